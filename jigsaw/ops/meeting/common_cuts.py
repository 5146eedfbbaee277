"""Meeting of tiles that one mesh axis cuts at other points: which of them moves, and its few rows on their way.

**The rule.**  Where tiles meet along a dim, all take the cut points of one of them.  Where an axis cuts another dim in
one of them, they first come to the cuts of one, which moves whole tiles: `jigsaw.ops.meeting.common_axes` has that
rule.

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
from jigsaw.geometry.cut import Cut, cut_points, have_same_rows, interval_overlap
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.common_axes import exchanges_between, plan_common_axes
from jigsaw.tile.tile import Tile, shared_mesh

# names in `jigsaw.comm.count` of rows that move because cut points differ, and of tiles that move to other dims' cuts
REALIGN_KIND, RECUT_KIND = "realign", "recut"

_Group = tuple[Cut, ...]
_Labels = tuple[Hashable, ...]

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
        # one row meets many as it is; only where all have one row do those that are cut come together
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
        # what every rank has is cut without a message only without a halo along its other dims
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
    # of equals the one at whose points the rank with the most rows has the fewest: it needs the most memory
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
