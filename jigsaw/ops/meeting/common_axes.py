"""Common cuts for tiles in which one mesh axis cuts different dims.  Integers only.

**The rule.**  One tile stays as it is cut, and the others come to its cuts, each by one exchange.

1. It is the one to whose cuts the fewest bytes have to travel, summed over all ranks; of equals the one that leaves the
   most ranks with rows, then the first argument's.  In place the target stays.
2. An axis that cuts others but not the one that stays goes on cutting what it cuts in the first of them: the dim, where
   nothing else cuts it, else its pieces finer.  So all cut what any of them cuts, and no tile comes to have more of a
   dim than before. The one that stays is cut further without a message.
3. A tile without the dim that such an axis cuts is not cut by it, because each rank needs all of it for its rows.
4. A tile that moves leaves its halo behind.  Where a dim was flattened from other dims than the other's, and both are
   cut, it takes two exchanges, with the dim whole between them; where no other dim can be cut then, it is refused.

All of it follows from layouts, which are the same on every rank.

Four ranks on lat=2, lon=2: x [2, 128, 12, 8] is cut by lat along its 12 rows and by lon along its 8 columns.  y of the
same shape is cut by lat along the 128 channels and by lon along the batch (a view parted its pixels).  ``x + y`` would
send as much to either's cuts, so x stays.  A rank has [1, 64, 12, 8] of y and needs [2, 128, 6, 4], of which it has a
quarter.  So three quarters of its tile travel to the three others, and the sum is cut as x.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, cut_by_some_axes, cut_points, have_same_rows, interval_overlap
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import refine_cut

_Group = tuple[Cut, ...]
_Labels = tuple[Hashable, ...]
_Frame = dict[Hashable, _Group]


@lru_cache(maxsize=4096)
def plan_common_axes(
    layouts: tuple[Layout, ...],
    itemsizes: tuple[int, ...],
    labels: tuple[_Labels, ...],
    stays: int | None = None,
    joined: Hashable = None,
) -> tuple[Layout | None, ...]:
    """Return the layout that each tile moves to, by the rule above, or None where it stays; only Nones where no axis
    cuts two dims, at whatever points.

    `labels` name the dims of each tile; dims of one name meet, and one row meets many as it is.  Tiles of any size
    follow each other along the one named `joined`.  `stays` is the number of the tile that is changed in place.

    Raises: `ShardingError` where the target of a change in place lacks an axis that cuts another tile. Also for cut
    dims that were flattened from other dims.
    """
    rows = {
        by: max(layout.shape[named.index(by)] for layout, named in zip(layouts, labels, strict=True) if by in named)
        for by in dict.fromkeys(name for named in labels for name in named)
    }
    meeting = [
        [by == joined or layout.shape[d] == rows[by] for d, by in enumerate(named)]
        for layout, named in zip(layouts, labels, strict=True)
    ]
    sizes_fit = all(
        met or layout.shape[d] == 1 for layout, dims in zip(layouts, meeting, strict=True) for d, met in enumerate(dims)
    )  # where they do not, nothing is sent before that is said
    if not sizes_fit or _axes_agree(layouts, labels, meeting, joined):
        return (None,) * len(layouts)
    if stays is not None:
        _check_target_has_axes(layouts, stays)
    options = [k for k, layout in enumerate(layouts) if layout.cut_axes] if stays is None else [stays]
    ways: list[tuple[tuple[float, int], tuple[Layout, ...]]] = []
    for option in options:
        frame = _cuts_when_staying(option, layouts, labels, meeting, is_fixed=stays is not None)
        targets = tuple(
            _layout_in_frame(layout, named, met, frame, joined)
            for layout, named, met in zip(layouts, labels, meeting, strict=True)
        )
        sent = sum(elements_to_fetch(a, b) * n for a, b, n in zip(layouts, targets, itemsizes, strict=True))
        ways.append(((sent, -_ranks_with_rows(frame, layouts[0])), targets))
    best = min(ways, key=lambda way: way[0])
    if math.isinf(best[0][0]):
        raise ShardingError(
            f"tiles cut as {' and '.join(map(str, layouts))} cannot meet: a dim was flattened from other dims in one "
            "of them, axes cut it in both, and no other dim could be cut on the way; bring one to the other's cuts "
            "with tile.redistribute before it is flattened"
        )
    return tuple(
        None if all(have_same_rows(a, b) for a, b in zip(new.dims(), old.dims(), strict=True)) else new
        for new, old in zip(best[1], layouts, strict=True)
    )


def _axes_agree(
    layouts: Sequence[Layout], labels: Sequence[_Labels], meeting: Sequence[Sequence[bool]], joined: Hashable
) -> bool:
    """Say whether each axis cuts dims of one name alone, and each dim is cut by the same axes wherever it is cut."""
    label_of: dict[str, Hashable] = {}
    ways: dict[Hashable, list[tuple[int | None, tuple[str, ...]]]] = {}
    for layout, named, met in zip(layouts, labels, meeting, strict=True):
        for d, by in enumerate(named):
            if any(label_of.setdefault(axis, by) != by for axis in layout.dim_axes(d)):
                return False
            way = [(None if by == joined else c.size, c.axes) for c in layout.dim(d)]
            if met[d] and layout.is_cut(d) and ways.setdefault(by, way) != way:
                return False
    return True


def _cuts_when_staying(
    stays: int,
    layouts: Sequence[Layout],
    labels: Sequence[_Labels],
    meeting: Sequence[Sequence[bool]],
    is_fixed: bool,
) -> _Frame:
    """Return the cuts of each name's dims where tile `stays` stays; finer by axes that it lacks, unless `is_fixed`."""
    sizes = dict(layouts[stays].axes)
    frame: _Frame = {}
    used: set[str] = set()
    for k in [stays] if is_fixed else [stays, *(k for k in range(len(layouts)) if k != stays)]:
        for d, by in enumerate(labels[k]):
            left = {a for a in layouts[k].dim_axes(d) if a not in used}
            if not meeting[k][d] or not (left or by not in frame):
                continue
            group = tuple(cut_by_some_axes(c, left, sizes) for c in layouts[k].dim(d))
            known = frame.get(by, ())
            if not any(c.is_cut for c in known):
                frame[by] = group
            else:
                wide = max(range(len(known)), key=lambda i: known[i].size // known[i].pieces)
                finer = refine_cut(known[wide], [a for c in group for a in c.axes], sizes)
                frame[by] = (*known[:wide], finer, *known[wide + 1 :])
            used |= left
    return frame


def _layout_in_frame(
    layout: Layout, named: _Labels, met: Sequence[bool], frame: Mapping[Hashable, _Group], joined: Hashable
) -> Layout:
    """Return the layout of a tile whose dims are cut as those of their names."""
    dims: list[Sequence[Cut]] = []
    for d, by in enumerate(named):
        group = frame.get(by, ())
        if not met[d] or not any(c.is_cut for c in group):
            dims.append(tuple(c.uncut() for c in layout.dim(d)))
        elif by == joined and layout.shape[d] != math.prod(c.size for c in group):
            pieces, n = math.prod(c.pieces for c in group), layout.shape[d]
            dims.append([Cut(n, cut_points(n, pieces), tuple(a for c in group for a in c.axes))])
        else:
            dims.append(group)
    return Layout.from_dims(dims, layout.axes)


def matched_structures(source: Layout, target: Layout) -> tuple[Layout, Layout] | None:
    """Both layouts with a cut for each of the other's in every dim: what is whole in one may have been flattened in
    the other, for 70 whole tokens are 7 x 10, in the same memory.  None where both are cut.
    """
    pairs = [_matched_groups(a, b) for a, b in zip(source.dims(), target.dims(), strict=True)]
    both = [pair for pair in pairs if pair is not None]
    if len(both) < len(pairs):
        return None
    return Layout.from_dims([a for a, _ in both], source.axes), Layout.from_dims([b for _, b in both], source.axes)


def _matched_groups(group: _Group, to: _Group) -> tuple[_Group, _Group] | None:
    if [c.size for c in group] == [c.size for c in to]:
        return group, to
    if not any(c.is_cut for c in group):
        return tuple(c.uncut() for c in to), to
    if not any(c.is_cut for c in to):
        return group, tuple(c.uncut() for c in group)
    return None


@lru_cache(maxsize=4096)
def exchanges_between(source: Layout, target: Layout) -> tuple[tuple[Layout, Layout], ...]:
    """Return from where to where each exchange on the way goes: one, or two where a dim was flattened from other dims
    and is cut in both, which is then whole between them; none where nothing else could be cut meanwhile.

    8/lat, flattened 2 x 4/lon, in [4, 8, 8/lon]: lon goes where it is wanted, and lat waits along the 4.
    """
    pair = matched_structures(source, target)
    if pair is not None:
        return (pair,)
    between: list[list[Cut]] = []
    others: list[int] = []
    for d, (source_group, target_group) in enumerate(zip(source.dims(), target.dims(), strict=True)):
        matched = _matched_groups(source_group, target_group)
        between.append([c.uncut() for c in source_group] if matched is None else [c.bare() for c in matched[1]])
        others += [d] if matched is not None else []
    used = {a for group in between for c in group for a in c.axes}
    for axis in (a for a in source.cut_axes if a not in used):
        places = [(c.size // c.pieces, -d, -k) for d in others for k, c in enumerate(between[d])]
        rows, d, k = max(places, default=(0, 0, 0))
        if rows < 2:
            return ()
        between[-d][-k] = refine_cut(between[-d][-k], [axis], dict(source.axes))
    halfway = Layout.from_dims(between, source.axes)
    first, second = matched_structures(source, halfway), matched_structures(halfway, target)
    return () if first is None or second is None else (first, second)


def elements_to_fetch(source: Layout, target: Layout) -> float:
    """Return how many elements all ranks lack of what they then own; infinite where no exchange leads there."""
    ways = exchanges_between(source, target)
    return sum(_elements_missing(a, b) for a, b in ways) if ways else math.inf


def _elements_missing(source: Layout, target: Layout) -> int:
    missing = 0
    for at in source.coords():
        owned = target.owned(at)
        held = (c.inside(source.piece(c, at)) for c in source.cuts)
        at_hand = (interval_overlap(a, b) for a, b in zip(owned, held, strict=True))
        missing += math.prod(b - a for a, b in owned) - math.prod(b - a for a, b in at_hand)
    return missing


def _ranks_with_rows(frame: Mapping[Hashable, _Group], layout: Layout) -> int:
    """Return on how many ranks something cut as `frame` has rows."""
    cuts = [c for group in frame.values() for c in group]
    return math.prod(sum(a < b for a, b in pairwise(c.points)) for c in cuts if c.is_cut) * (
        layout.ranks // math.prod(c.pieces for c in cuts)
    )


def _check_target_has_axes(layouts: Sequence[Layout], stays: int) -> None:
    """Check that in place no part of a tile has to be gathered, because one more axis cannot cut the target."""
    for layout in layouts:
        more = [a for a in layout.cut_axes if a not in layouts[stays].cut_axes]
        if more:
            raise ShardingError(
                f"a Tile cut as {layouts[stays]} cannot be changed in place by one cut as {layout}: the target stays "
                f"as it is, and {'+'.join(more)} would no longer cut the other; use the function that makes a new "
                "one, as x + y"
            )
