"""Elements of a rank's local tensor at places of the whole one: which of them it holds, and where.

Places are row-major numbers along one or several dims, each made up of its cuts.  For example 3 x 4 rows were
flattened, whose columns are cut at 2.  Then the second rank holds 2, 3, 6, 7, 10, 11, and place 6 is its row 1, column
0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.cut import Cut
from jigsaw.tile.tile import Tile


def is_mask(item: Any) -> bool:
    """Say whether an item of an index is a mask, which names as many dims as it has."""
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def dims_named_by(item: Any) -> int:
    """Return how many dims of a tensor an item of an index names."""
    return 0 if item is None or item is Ellipsis else item.ndim if is_mask(item) else 1


def cells_in_front(local: Tensor, tile: Tile, dims: Sequence[int]) -> tuple[Tensor, list[Cut]]:
    """Return a view of a local tensor with the cuts of `dims` in front, each as a separate dim."""
    cuts = [c for d in dims for c in tile.layout.dim(d)]
    if any(len(tile.layout.dim(d)) > 1 for d in dims):
        for d in sorted(dims, reverse=True):
            group = tile.layout.dim(d)
            held = [c.held[tile.layout.piece(c, tile.coordinate)] for c in group]
            local = local.unflatten(d, [b - a for a, b in held])
    lengths = [len(g) if d in dims else 1 for d, g in enumerate(tile.layout.dims())]
    starts = [sum(lengths[:d]) for d in range(tile.ndim)]
    front = [starts[d] + k for d in dims for k in range(lengths[d])]
    return local.permute([*front, *(p for p in range(local.ndim) if p not in front)]), cuts


def rows_held(places: Tensor, cuts: Sequence[Cut], tile: Tile) -> tuple[list[Tensor], Tensor | None]:
    """Return the local row along each cut for row-major places, and which of them are held here; None: all."""
    rest, rows, is_held = places, list[Tensor](), None
    for cut in reversed(cuts):
        start, stop = cut.held[tile.layout.piece(cut, tile.coordinate)]
        row = rest % max(cut.size, 1)
        rest = rest // max(cut.size, 1)
        if (start, stop) != (0, cut.size):
            inside = (row >= start) & (row < stop)
            is_held = inside if is_held is None else is_held & inside
        rows.insert(0, row - start)
    return rows, is_held


def cells_at_rows(cells: Tensor, rows: Sequence[Tensor], is_held: Tensor | None) -> Tensor:
    """Return the cells at local rows; zeros for places that are not held here."""
    if is_held is None:
        return cells[tuple(rows)]
    sizes = cells.shape[: len(rows)]
    if 0 in sizes:  # without rows, but connected to the graph
        none = cells.sum(tuple(range(len(rows)))).to(cells.dtype)
        return none.expand(len(is_held), *cells.shape[len(rows) :])
    # Any row stands for those held elsewhere; their number need not be known, so the shape follows from `here`. Each
    # time another row, because gradients of one row may be added up one after the other.
    picked = cells[tuple(row % n for row, n in zip(rows, sizes, strict=True))]
    return picked.masked_fill(~is_held.reshape(-1, *[1] * (picked.ndim - 1)), 0)
