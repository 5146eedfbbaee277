"""Functions of the diagonal: tril, triu, diagonal, trace, diag, diag_embed, diagflat, diagonal_scatter.

>>> tile = jigsaw.shard(torch.ones(2, 3), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile.tril().local, tile.diagonal(1).local
(tensor([[1., 0., 0.],
        [1., 1., 0.]]), tensor([1., 1.]))
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.cut import Cut, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.apart_copies import copied_to
from jigsaw.ops.joining import join_tiles
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.whole_dims import rows_of_local, with_whole_dims
from jigsaw.ops.whole_strides import whole_strides, with_strides, with_strides_of
from jigsaw.tile.tile import Tile, implements_torch, refusal_error


def _kept_by_place(input: Tile, is_kept: Callable[[Tensor, Tensor], Tensor]) -> Tile:
    """Return the tile with 0 where `is_kept`, called with the rows and columns of the last two dims, is false."""
    own = input.owned()
    rows, columns = (rows_of_local(own.layout, own.coordinate, d, own.device) for d in (-2, -1))
    local = torch.where(is_kept(rows[:, None], columns), own.local, own.local.new_zeros(()))
    return Tile(local, own.layout, own.mesh)


def _answer_triangle(function: Any, is_kept: Callable[[Any, int], Any]) -> None:
    def handler(input: Tile, diagonal: int = 0) -> Tile:
        if input.ndim < 2:
            raise RuntimeError(f"{function.__name__} of a Tile of {input.ndim} dims: it needs 2 or more")
        return _kept_by_place(input, lambda row, column: is_kept(column - row, diagonal))

    implements_torch(function)(handler)


_answer_triangle(torch.tril, operator.le)
_answer_triangle(torch.triu, operator.ge)


@implements_torch(torch.diagonal)
def _diagonal(input: Tile, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return y[..., k] = x[k, k + offset], cut where `dim1` or `dim2` is.

    *Sends*: nothing where one of the two is cut; where both are, the exchange that makes `dim2` whole.
    """
    first, second = reduced_dims(input, (dim1, dim2))
    tile = copied_to(input, input.layout.without_halo()) if input.layout.has_halo else input
    size = input.shape
    moved = [d for d in (first, second) if len(tile.layout.dim(d)) > 1]
    if not moved and tile.layout.is_cut(first) and tile.layout.is_cut(second):
        moved = [second]
    if moved:
        tile = with_whole_dims(tile, moved, copied_to)
    # x[row + k, column + k] for k < length
    row, column = max(-offset, 0), max(offset, 0)
    length = max(min(size[first] - row, size[second] - column), 0)
    along, skipped = (second, column) if tile.layout.is_cut(second) else (first, row)
    (cut,) = tile.layout.dim(along)
    diagonal = Cut(length, tuple(min(max(p - skipped, 0), length) for p in cut.points[:-1]) + (length,), cut.axes)
    piece = tile.layout.piece(cut, tile.coordinate)
    (start, stop), low = diagonal.owned(piece), cut.owned(piece)[0]
    local = tile.local
    for d, begin in ((first, row + start), (second, column + start)):
        at = begin - low if d == along else begin
        local = local.narrow(d, at if stop > start else 0, stop - start)
    others = [group for d, group in enumerate(tile.layout.dims()) if d not in (first, second)]
    layout = Layout.from_dims([*others, (diagonal if cut.is_cut else whole_dim(length),)], tile.layout.axes)
    local = local.diagonal(0, first, second)
    strides = whole_strides(input)
    of_others = [n for d, n in enumerate(strides) if d not in (first, second)]
    return with_strides(Tile(local, layout, tile.mesh), (*of_others, strides[first] + strides[second]), input)


@implements_torch(torch.linalg.diagonal)
def _diagonal_of_matrices(A: Tile, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return _diagonal(A, offset, dim1, dim2)


@implements_torch(torch.trace)
def _trace(input: Tile) -> Any:
    if input.ndim != 2:
        raise RuntimeError(f"trace of a Tile of {input.ndim} dims: it needs a matrix, 2 dims")
    return _diagonal(input).sum()


@implements_torch(torch.diag_embed)
def _diag_embed(input: Tile, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Return y[k, k + offset] = x[..., k] in matrices whose rows are cut as the last dim of x; nothing is sent."""
    tile = input
    if offset:
        zeros = torch.zeros((), dtype=input.dtype, device=input.device).expand(*input.shape[:-1], abs(offset))
        tile = join_tiles([input, zeros] if offset > 0 else [zeros, input], -1)
    wide = tile.unsqueeze(-1).expand(*tile.shape, tile.shape[-1])
    return _kept_by_place(wide, lambda row, column: column - row == offset).movedim((-2, -1), (dim1, dim2))


@implements_torch(torch.diag)
def _diag(input: Tile, diagonal: int = 0) -> Any:
    if input.ndim > 2:
        raise RuntimeError(f"diag of a Tile of {input.ndim} dims: it needs 1 or 2; use tile.diagonal")
    return _diag_embed(input, diagonal) if input.ndim == 1 else _diagonal(input, diagonal).clone()


@implements_torch(torch.diagflat)
def _diagflat(input: Tile, offset: int = 0) -> Any:
    return _diag_embed(input.flatten(), offset)


@implements_torch(torch.diagonal_scatter, either=("input", "src"))
def _diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return a copy with `src` in a diagonal; *Sends*: of a tile `src`, the rows that other ranks write."""
    if not isinstance(input, Tile):
        raise refusal_error(torch.diagonal_scatter, src, "its input is a plain tensor", "make the input a Tile")
    x = input.owned().movedim((dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2:]
    above = max(-offset, 0)
    length = max(min(rows - above, columns - max(offset, 0)), 0)
    if tuple(src.shape) != (*x.shape[:-2], length):
        raise RuntimeError(
            f"diagonal_scatter: src has shape {tuple(src.shape)}, but the diagonal {(*x.shape[:-2], length)}"
        )
    if isinstance(src, Tile) and src.layout.is_cut(src.ndim - 1):
        src = src.owned().with_layout(src.layout.without_halo().replace_dim(src.ndim - 1, whole_dim(length)))
    counts = (above, length, rows - above - length)
    zeros = [x.local.new_zeros((*x.shape[:-2], n)) for n in counts]
    parts: list[Any] = [src if k == 1 else zeros[k] for k, n in enumerate(counts) if n]
    placed = torch.cat(parts, -1) if len(parts) > 1 else (parts or [zeros[1]])[0]
    row, column = (rows_of_local(x.layout, x.coordinate, d, x.device) for d in (-2, -1))
    mask = Tile(column - row[:, None] == offset, x.layout.drop(range(x.ndim - 2)), x.mesh)
    out: Any = torch.where(mask, placed.unsqueeze(-1), x).movedim((-2, -1), (dim1, dim2))
    return with_strides_of(out, input)
