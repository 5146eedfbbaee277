"""Scans and products along a cut dim, with one row from each earlier rank.

A rank scans its own rows after the totals of the ranks before it.  Example: four ranks on lat=4, x [8] cut at rows 0,
2, 4, 6, 8: the totals of two rows each go round, and the third rank's ``cumsum`` is that of (total 0, total 1, row 4,
row 5), without the first two results.  So zeros, infinities, NaN and ties are torch's own, in their order.

>>> tile = jigsaw.shard(torch.arange(5.0), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.cumsum(0).local, tile.prod().item()
(tensor([ 0.,  1.,  3.,  6., 10.]), 0.0)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.geometry.cut import Cut
from jigsaw.geometry.layout import Layout
from jigsaw.ops.along import run_along_dim
from jigsaw.ops.reductions import (
    ReducedDims,
    finish_reduction,
    reduced_dims,
    reducing_axes,
    stack_along_axes,
)
from jigsaw.ops.whole_dims import check_by_torch
from jigsaw.tile.tile import Tile, implements_torch

# -- rows of the pieces before ----------------------------------------------------------------------------------------


def pieces_in_stack(layout: Layout, cut: Cut) -> list[int]:
    """Return the pieces of `cut` in the order of `stack_along_axes`, which is that of the mesh, not of the dim."""
    others = [a not in cut.axes for a, _ in layout.axes]
    coords = (c for c in layout.coords() if not any(i for i, other in zip(c, others, strict=True) if other))
    return [layout.piece(cut, c) for c in coords]


def _stacked_rows(row: Tensor, tile: Tile, dim: int) -> Tensor:
    """Return [pieces, *row.shape], the same on all ranks, of which each rank uses some."""
    axes = tile.layout.dim_axes(dim)
    stacked = stack_along_axes(row, tile, axes, (tile.layout, dim))
    return comm.use_in_parts(stacked, tile.mesh, axes)


def _rows_before(stacked: Tensor, tile: Tile, dim: int) -> Tensor:
    """Return the rows of the non-empty pieces before this rank's, joined in the order of the dim."""
    (cut,) = tile.layout.dim(dim)
    own_piece = tile.layout.piece(cut, tile.coordinate)
    places = {piece: place for place, piece in enumerate(pieces_in_stack(tile.layout, cut))}
    before = [stacked[places[p]] for p in range(own_piece) if cut.points[p] < cut.points[p + 1]]
    # the first piece gets an empty row, which keeps its rank in the backward pass
    return torch.cat([stacked[0].narrow(dim, 0, 0), *before], dim)


def _last_row(scanned: Tensor, local: Tensor, dim: int) -> Tensor:
    """Return the last row of a scan; where there is none, a row of the same shape and with the same graph."""
    if scanned.shape[dim]:
        return scanned.narrow(dim, scanned.shape[dim] - 1, 1)
    return local.sum(dim, keepdim=True).to(scanned.dtype)


# -- scans ------------------------------------------------------------------------------------------------------------


def _answer_scan(function: Any, total: Callable[[Tensor, int], Tensor] | None) -> None:
    """Answer a scan of one result; `total` of rows is the last row of their scan, in a dtype that may be wider."""

    def handler(input: Tile, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        """Return y[i] = x[0] + ... + x[i] (or their product, or log sum exp) along `dim`, which may be cut.

        *Sends*: one all-gather of one row a rank along the axes that cut `dim`; backward one all-reduce of those rows.
        Along dims that were flattened together: see `jigsaw.ops.whole_dims`.
        """
        (at,) = reduced_dims(input, dim)
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if not input.layout.is_cut(at) or len(input.layout.dim(at)) > 1:
            return run_along_dim(function, input, at, at, **options)
        check_by_torch(function, input, at, at, **options)
        own = input.owned()
        wide = dtype or (own.dtype if own.dtype.is_floating_point or own.dtype.is_complex else torch.int64)
        local = own.local if total is None else own.local.to(wide)
        last = _last_row(function(local, at), local, at) if total is None else total(local, at).to(wide)
        before = _rows_before(_stacked_rows(last, own, at), own, at)
        scanned = function(torch.cat([before, local], at), at, **options)
        return Tile(scanned.narrow(at, before.shape[at], local.shape[at]), own.layout, own.mesh)

    implements_torch(function)(handler)


_answer_scan(torch.cumsum, lambda x, dim: x.sum(dim, keepdim=True))
_answer_scan(torch.cumprod, lambda x, dim: x.prod(dim, keepdim=True))
_answer_scan(torch.logcumsumexp, None)


def _answer_extreme_scan(function: Any) -> None:
    """Answer a scan whose results are values and their rows."""

    def handler(input: Tile, dim: int) -> Any:
        """Return the largest (smallest) value up to each row and its row: of equal ones the last, as in torch.

        *Sends*: two all-gathers of one row a rank, values and places; backward one all-reduce of those rows.
        """
        (at,) = reduced_dims(input, dim)
        if not input.layout.is_cut(at) or len(input.layout.dim(at)) > 1:
            return run_along_dim(function, input, at, at)
        check_by_torch(function, input, at, at)
        own = input.owned()
        values, places = function(own.local, at)
        (cut,) = own.layout.dim(at)
        start, _ = cut.owned(own.layout.piece(cut, own.coordinate))
        rows = _rows_before(_stacked_rows(_last_row(values, own.local, at), own, at), own, at)
        last_places = _last_row(places, own.local.detach(), at) + start
        places_of_rows = _rows_before(_stacked_rows(last_places, own, at), own, at)
        count, size = rows.shape[at], own.local.shape[at]
        values, places = (y.narrow(at, count, size) for y in function(torch.cat([rows, own.local], at), at))
        if count:
            earlier = places_of_rows.gather(at, places.clamp(max=count - 1))
            places = torch.where(places < count, earlier, places - count + start)
        else:
            places = places + start
        results = [Tile(y, own.layout, own.mesh) for y in (values, places)]
        return getattr(torch.return_types, function.__name__)(results)

    implements_torch(function)(handler)


_answer_extreme_scan(torch.cummax)
_answer_extreme_scan(torch.cummin)


# -- products ---------------------------------------------------------------------------------------------------------


@implements_torch(torch.prod)
def _prod(input: Tile, dim: ReducedDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return the product of `input` over `dim`, or over all; exact gradients at zeros.

    *Sends*: one all-gather of the local products over the axes that cut `dim`; backward nothing.
    """
    dims = reduced_dims(input, dim)
    if not (dim is None or len(dims) == 1):
        raise TypeError(f"prod(): dim={dim!r} of a Tile must be one dim, or none for all")
    own = input.owned()
    local = own.local.prod(dtype=dtype) if dim is None else own.local.prod(dims[0], keepdim, dtype=dtype)
    axes = reducing_axes(own.layout, dims)
    if axes:
        local = stack_along_axes(local, own, axes, (own.layout, dims)).prod(0, dtype=dtype)
    return finish_reduction(local, own, dims, keepdim)
