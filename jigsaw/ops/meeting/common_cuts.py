"""Meeting of tiles that one mesh axis cuts at other points: which of them moves, and its few rows on their way.

**The rule.**  Where tiles meet along a dim, all take the cut points of one of them.  Where an axis cuts another dim in
one of them, they first come to the cuts of one, which moves whole tiles: the second rule below.

1. It is the one at whose points the fewest bytes have to travel, summed over all ranks; of equals the one at whose
   points the most rows of a rank are the fewest, then the first argument's.  A row that a rank holds already, as its
   own or in its halo, does not travel.
2. In place the target stays, and the others come to it.
3. A tile that nothing cuts along the dim is cut there: nothing is sent, because every rank has its rows.
4. A halo stays as far as it reaches around the rows that a rank then owns; none is fetched.

All of it follows from layouts, which are the same on every rank, so every rank moves the same tile without a message.

Four ranks, 37 rows of a U-Net: `skip` [1, 16, 37, 50] is cut at 0, 10, 19, 28, 37.  `up` [1, 32, 37, 50], pooled to 18
rows and interpolated back, is cut at 0, 11, 21, 29, 37.  They differ in rows 10, 19, 20 and 28.  For ``torch.cat([skip,
up], 1)`` at `skip`'s points four rows of `up` would travel, 4 x 32 x 50 numbers; at `up`'s points four of `skip`, 4 x
16 x 50.  So `skip` moves: rank 1 gives row 10 to rank 0, rank 2 rows 19 and 20 to rank 1, rank 3 row 28 to rank 2.  The
result is cut at 0, 11, 21, 29, 37.  Backward the gradients of these rows take the way back.

**Where one axis cuts different dims.**  One tile stays as it is cut, and the others come to its cuts, each by one
exchange.

1. It is the one to whose cuts the fewest bytes have to travel, summed over all ranks; of equals the one that leaves the
   most ranks with rows, then the first argument's.  In place the target stays.
2. An axis that cuts others but not the one that stays goes on cutting what it cuts in the first of them: the dim, where
   nothing else cuts it, else its pieces finer.  So all cut what any of them cuts, and no tile comes to have more of a
   dim than before. The one that stays is cut further without a message.
3. A tile without the dim that such an axis cuts is not cut by it, because each rank needs all of it for its rows.
4. A tile that moves leaves its halo behind.  Where a dim was flattened from other dims than the other's, and both are
   cut, it takes two exchanges, with the dim whole between them; where no other dim can be cut then, it is refused.

Four ranks on lat=2, lon=2: x [2, 128, 12, 8] is cut by lat along its 12 rows and by lon along its 8 columns.  y of the
same shape is cut by lat along the 128 channels and by lon along the batch (a view parted its pixels).  ``x + y`` would
send as much to either's cuts, so x stays.  A rank has [1, 64, 12, 8] of y and needs [2, 128, 6, 4], of which it has a
quarter.  So three quarters of its tile travel to the three others, and the sum is cut as x.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.ones(2, 9), mesh, (None, "lat"))
>>> (tile + jigsaw.shard(torch.ones(2, 9), mesh, (None, None))).shape
torch.Size([2, 9])
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from torch import Tensor

from jigsaw.comm.exchange import redistribute_rows
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, cut_by_some_axes, cut_points, have_same_rows, interval_overlap
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.tile.tile import Tile, shared_mesh

# -- one axis, several dims -------------------------------------------------------------------------------------------

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
    )  # where sizes differ, the error is raised before anything is sent
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
    """Both layouts with a cut for each of the other's in every dim.  None where both are cut.

    A dim that is whole in one may have been flattened in the other: 70 whole tokens are 7 x 10, in the same memory.
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


# names in `jigsaw.comm.count` of rows that move because cut points differ, and of tiles that move to other dims' cuts
REALIGN_KIND, RECUT_KIND = "realign", "recut"


# -- tiles come together ----------------------------------------------------------------------------------------------


def bring_together(
    tiles: Sequence[Tile], labels: Sequence[Sequence[Hashable]] | None = None, stays: int | None = None
) -> list[Tile]:
    """Return the tiles, with every dim that they share cut at the same points; the rule is in the head of this file.

    `labels` name the dims of each tile: dims of one name meet, those named None do not.  Without them tiles broadcast:
    dims meet from the right.  A dim of one row that meets more of them is left as it is.  `stays` is the number of the
    tile whose cuts win.

    *Shapes*: global unchanged; per rank as the cuts that win.
    *Sends*: forward the rows that change owner, counted as "realign", or as "recut" where an axis cuts another dim then
    (up to (P-1)/P of a tile); backward their gradients the other way.  Of a tile that was whole along a dim, also each
    rank's part of the gradient, to the ranks that have the same tile.
    *Raises*: `ShardingError`, before anything is sent, where the target of a change in place lacks an axis that cuts
    another tile.  Also where dims without a name are cut by other axes.
    """
    first = tiles[0].layout
    if labels is None and all(t.layout is first for t in tiles):
        return list(tiles)
    shared_mesh(tiles)
    named = [tuple(range(-t.ndim, 0)) for t in tiles] if labels is None else [tuple(by) for by in labels]
    targets = _plan_meeting(tuple(t.layout for t in tiles), tuple(t.dtype.itemsize for t in tiles), tuple(named), stays)
    return [t if to is None else with_moved_rows(t, to) for t, to in zip(tiles, targets, strict=True)]


def with_moved_rows(tile: Tile, layout: Layout) -> Tile:
    """Return the tile in a layout of other cut points, or cut along other dims; counted as "realign", or "recut"."""
    if [c.size for c in tile.layout.cuts] != [c.size for c in layout.cuts]:
        tile = tile.owned()
    kind = _kind_of_move(tile.layout, layout)
    local = tile.local
    for source, target in exchanges_between(tile.layout, layout):
        local = redistribute_rows(local, source, target, tile.mesh, kind)
    return Tile(local, layout, tile.mesh)


@lru_cache(maxsize=4096)
def _kind_of_move(source: Layout, target: Layout) -> str:
    """Return the kind under which the moving rows are counted."""
    if not exchanges_between(source, target):
        raise ShardingError(
            f"a Tile cut as {source} cannot come to {target}: a dim was flattened from other dims, axes cut it in "
            "both, and no other dim could be cut on the way; use tile.redistribute before it is flattened"
        )
    cut_before = {a: d for d in range(source.ndim) for a in source.dim_axes(d)}
    elsewhere = any(cut_before.get(a, d) != d for d in range(target.ndim) for a in target.dim_axes(d))
    return RECUT_KIND if elsewhere else REALIGN_KIND


@lru_cache(maxsize=4096)
def _plan_meeting(
    layouts: tuple[Layout, ...], itemsizes: tuple[int, ...], labels: tuple[_Labels, ...], stays: int | None
) -> tuple[Layout | None, ...]:
    """Return the layout that each tile is brought to, or None where it is there."""
    if not any(name is None for by in labels for name in by):
        moves = plan_common_axes(layouts, itemsizes, labels, stays)
        if any(moves):
            return moves
    targets = list(layouts)
    newly_cut: set[int] = set()
    for label in dict.fromkeys(name for by in labels for name in by if name is not None):
        at = {k: by.index(label) for k, by in enumerate(labels) if label in by}
        rows = max(layouts[k].shape[d] for k, d in at.items())
        # a dim of one row broadcasts as it is; only if all have one row must the cut ones be brought together
        at = {k: d for k, d in at.items() if layouts[k].shape[d] == rows and (rows != 1 or layouts[k].is_cut(d))}
        first, *others = [targets[k].dim(d) for k, d in at.items()] or [()]
        if all(have_same_rows(group, first) for group in others):
            continue
        winner = _winning_cuts(label, layouts, itemsizes, at, stays if stays in at else None)
        for k, d in at.items():
            group = targets[k].dim(d)
            if have_same_rows(group, winner):
                continue
            if not targets[k].is_cut(d):
                newly_cut.add(k)
                taken = {a for other in range(targets[k].ndim) if other != d for a in targets[k].dim_axes(other)}
                if taken & {a for c in winner for a in c.axes}:
                    raise _cuts_error(label, winner, group, targets[k])
                targets[k] = targets[k].replace_dim(d, *(c.bare() for c in winner))
            else:
                moved = (_with_halo_kept(c, to) for c, to in zip(group, winner, strict=True))
                targets[k] = targets[k].replace_dim(d, *moved)
    for k in newly_cut:
        # rows that every rank has are cut without a message, but only without a halo along other dims
        targets[k] = targets[k].without_halo()
    return tuple(None if new == old else new for new, old in zip(targets, layouts, strict=True))


def _winning_cuts(
    label: Hashable, layouts: Sequence[Layout], itemsizes: Sequence[int], at: Mapping[int, int], stays: int | None
) -> _Group:
    """Return the cuts to which all tiles come, by the rule."""
    groups = {k: layouts[k].dim(d) for k, d in at.items()}
    is_cut = {k: any(c.is_cut for c in group) for k, group in groups.items()}
    options = [k for k in groups if is_cut[k]] or list(groups)
    options = options if stays is None else [stays]
    for k, group in groups.items():
        if is_cut[k] and not _is_cut_alike(group, groups[options[0]]):
            raise _cuts_error(label, groups[options[0]], group, layouts[k])
    if len(options) == 1:
        return groups[options[0]]
    sent = [
        sum(
            _bytes_to_reach(layouts[k], d, groups[option]) * itemsizes[k]
            for k, d in at.items()
            if is_cut[k] and not have_same_rows(groups[k], groups[option])
        )
        for option in options
    ]
    # of equal options take the one whose largest piece is smallest, because that rank needs the most memory
    most = [math.prod(max(b - a for a, b in pairwise(c.points)) for c in groups[option]) for option in options]
    return groups[min(zip(sent, most, options, strict=True), key=lambda o: o[:2])[2]]


def _is_cut_alike(group: _Group, other: _Group) -> bool:
    """Say whether the same axes cut both in the same order, at whatever points."""
    return [(c.size, c.axes) for c in group] == [(c.size, c.axes) for c in other]


def _bytes_to_reach(layout: Layout, dim: int, to: _Group) -> int:
    """Return how many elements all ranks together lack of what they own once the dim is cut as `to`."""
    group = layout.dim(dim)
    missing = 0
    for pieces in product(*(range(c.pieces) for c in to)):
        owned = [c.owned(i) for c, i in zip(to, pieces, strict=True)]
        at_hand = [interval_overlap(o, c.inside(i)) for o, c, i in zip(owned, group, pieces, strict=True)]
        missing += math.prod(b - a for a, b in owned) - math.prod(b - a for a, b in at_hand)
    others = math.prod(n for d, n in enumerate(layout.shape) if d != dim)
    return missing * others * layout.replicas


def _cuts_error(label: Hashable, winner: _Group, group: _Group, layout: Layout) -> ShardingError:
    a, b = (Layout(g, layout.axes, (len(g),)) for g in (winner, group))
    return ShardingError(
        f"tiles that cut dim {label!r} differently cannot meet: {a} and {b}, of {layout}; other points of the same "
        "axes are brought together, other axes are not: bring one to the other's cuts with tile.redistribute"
    )


def bring_to_cuts(tile: Tile, dim: int, group: Sequence[Cut]) -> Tile:
    """Return the tile with a dim cut as `group`, where the same axes cut both at other points; a stored weight stays.
    *Sends*: as `bring_together`.
    """
    own_group = tile.layout.dim(dim)
    if have_same_rows(own_group, group) or not _is_cut_alike(own_group, tuple(group)):
        return tile
    moved = (_with_halo_kept(c, to) for c, to in zip(own_group, group, strict=True))
    return with_moved_rows(tile, tile.layout.replace_dim(dim, *moved))


# -- halos and multiples ----------------------------------------------------------------------------------------------


def _with_halo_kept(cut: Cut, to: Cut) -> Cut:
    """Return the cut `to`, with the rows of the halo of `cut` that lie around what each piece then owns."""
    if cut.has_same_rows(to):
        return cut
    if not cut.has_halo:
        return to.bare()
    held: list[tuple[int, int]] = []
    for i in range(to.pieces):
        (low, high), (start, stop) = cut.inside(i), to.owned(i)
        # rank 1 owns 4:8 and holds 3:9; around 5:8 it still holds 3:9, around 2:8 only 2:9, because row 2 is new
        reaches = start < stop
        held.append(
            (low if reaches and low <= start <= high else start, high if reaches and low <= stop <= high else stop)
        )
    return to.holding(held)


def cut_at_multiples(cut: Cut, rows: int) -> Cut | None:
    """Return the cut with its points at the nearest multiples of `rows` (of two the larger one), and a halo of whole
    multiples as far as it reaches.  It is shared out evenly where one piece would otherwise get everything that several
    have, and None where there is only one multiple.

    >>> from jigsaw.ops.meeting.common_cuts import cut_at_multiples
    >>> cut_at_multiples(jigsaw.Cut(24, (0, 7, 13, 18, 24), ("lat",)), 4).points
    (0, 8, 12, 20, 24)
    """
    if cut.size % rows or cut.size == rows:
        return None
    if not any(e % rows for e in (*cut.points, *(e for held in cut.held for e in held))):
        return cut
    points = tuple(min((2 * p + rows) // (2 * rows) * rows, cut.size) for p in cut.points)
    if pieces_with_rows(points) == 1 < pieces_with_rows(cut.points):
        points = cut_points(cut.size, cut.pieces, align=rows)
    inside = cut if cut.wraps else cut.holding([cut.inside(i) for i in range(cut.pieces)])
    moved = _with_halo_kept(inside, replace(cut.bare(), points=points, held=()))
    return moved.holding([(-(-a // rows) * rows, b // rows * rows) for a, b in moved.held])


def pieces_with_rows(points: Sequence[int]) -> int:
    """Return how many pieces of cut points are not empty."""
    return sum(a < b for a, b in pairwise(points))


# -- views whose rows moved -------------------------------------------------------------------------------------------

APART_MARK = "_jigsaw_apart"


def set_apart_mark(local: Tensor, mark: object) -> None:
    """Mark a tensor that has its own memory where torch's shares it.  All views of the memory have the mark."""
    setattr(local.untyped_storage(), APART_MARK, mark)


def apart_mark(local: Tensor) -> Any:
    """Return the mark of `set_apart_mark` on the memory of a tensor, or None."""
    return getattr(local.untyped_storage(), APART_MARK, None)


def mark_rows_moved(local: Tensor) -> None:
    """Mark a view whose rows had to move, so that it has its own memory where torch's shares it."""
    set_apart_mark(local, True)


def has_moved_rows(local: Tensor) -> bool:
    """Say whether the tensor is such a view, or a view of one."""
    return apart_mark(local) is True
