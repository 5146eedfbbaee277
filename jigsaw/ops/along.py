"""Functions that work along one dim: softmax as sums over ranks, and orders and quantiles (sort, topk, median…) on a
whole dim (`jigsaw.ops.whole_dims`).

>>> tile = jigsaw.shard(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile.sort(dim=1).values.local, tile.quantile(0.5).item()
(tensor([[1., 3.],
        [2., 4.]]), 2.5)
>>> tile.softmax(dim=0).sum(dim=0).local
tensor([1., 1.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from jigsaw import comm
from jigsaw.comm.exchange import exchange_rows
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.pointwise import replace_results
from jigsaw.ops.reductions import reduced_dims, reducing_axes
from jigsaw.ops.unknown_functions import run_unknown_function, uncut_tiles
from jigsaw.ops.whole_dims import brought_home, check_by_torch, run_held_whole, run_with_whole_dim, with_whole_dims
from jigsaw.ops.whole_strides import is_whole_contiguous, whole_strides, with_order
from jigsaw.tile.tile import Tile, implements_torch, leave_tile, tiles_in


def run_along_dim(function: Any, input: Tile, dim: int, /, *args: Any, **kwargs: Any) -> Any:
    """Run on each rank where dim `dim` is whole; make a cut one whole.  Halo rows of other dims stay."""
    (at,) = reduced_dims(input, dim)
    if not input.ndim:
        return uncut_tiles(function(input.local, *args, **kwargs), input)
    if input.layout.is_cut(at):
        return run_with_whole_dim(function, input, at, *args, **kwargs)
    if not input.layout.complete_dims[at]:
        input = input.owned()
    if not input.local.numel() and input.numel():
        # torch checks dtypes only where there are elements, so a rank without rows checks them here
        function(input.local.new_zeros([n or 1 for n in input.local.shape]), *args, **kwargs)

    def as_tile(out: Tensor) -> Any:
        if out.ndim == input.ndim:
            return Tile(out, input.layout.replace_dim(at, whole_dim(out.shape[at])), input.mesh)
        layout = input.layout.drop((at,))
        return Tile(out, layout, input.mesh) if layout.ndim else leave_tile(out, input.mesh)

    return replace_results(function(input.local, *args, **kwargs), as_tile)


def _answer_along_dim(function: Any, position: int, default: int | None) -> None:
    """Answer `function`, whose dim is argument number `position` (after the input) or `default`; all dims for None."""

    def handler(input: Tile, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if isinstance(dim, int):
            return run_along_dim(function, input, dim, *args, **kwargs)
        return run_held_whole(function, input, *args, **kwargs)

    implements_torch(function)(handler)


for _function, _position, _default in (
    (torch.topk, 1, -1),
    (torch.kthvalue, 1, -1),
    (torch.median, 0, None),
    (torch.nanmedian, 0, None),
    (torch.mode, 0, -1),
):
    _answer_along_dim(_function, _position, _default)


def _answer_sort(function: Any) -> None:
    """Answer a sort, whose arguments by place are (dim, descending) or (descending) alone."""

    def handler(input: Tile, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", next((a for a in args if type(a) is int), -1))
        return _in_order_of(input, run_along_dim(function, input, dim, *args, **kwargs))

    implements_torch(function)(handler)


def _in_order_of(input: Tile, out: Any) -> Any:
    """Return results of a sort in torch's memory order, wherever rows were brought for the sort."""
    if not is_whole_contiguous(input):
        for tile in tiles_in((out,)):
            with_order(tile, whole_strides(input))
    return out


_answer_sort(torch.sort)
_answer_sort(torch.argsort)


@implements_torch(torch.msort)
def _msort(input: Tile) -> Any:
    return _in_order_of(input, run_along_dim(torch.sort, input, 0, dim=0).values)


# -- softmax ----------------------------------------------------------------------------------------------------------


def shifted_by_global_max(input: Tile, dim: int, dtype: torch.dtype | None = None) -> Tile:
    """Return input - max along a cut dim, without halo, in at least float32; *Sends*: one all-reduce of the maxima."""
    own = input.owned().to(dtype) if dtype else input.owned()
    wide = own.float() if own.dtype in (torch.bfloat16, torch.float16) else own
    axes = reducing_axes(own.layout, (dim,))
    local_top = (
        wide.local.detach().amax(dim, keepdim=True)
        if wide.local.shape[dim]
        else wide.local.new_full([1 if d == dim else n for d, n in enumerate(wide.local.shape)], -math.inf)
    )
    top = comm.all_reduce(local_top, own.mesh, axes, "max", (own.layout, dim))
    return Tile(wide.local - torch.where(top == -math.inf, 0.0, top), own.layout, own.mesh)


def _shifted_and_sums(input: Tile, dim: int, dtype: torch.dtype | None) -> tuple[Tile, Tensor]:
    """Return (input - global max, global sum of exp) along a cut dim, in at least float32."""
    shifted = shifted_by_global_max(input, dim, dtype)
    axes = reducing_axes(shifted.layout, (dim,))
    sums = comm.sum_parts(shifted.local.exp().sum(dim, keepdim=True), shifted.mesh, axes, (shifted.layout, dim))
    return shifted, comm.use_in_parts(sums, shifted.mesh, axes)


def _softmax_along(function: Any, input: Tile, dim: int | None, dtype: torch.dtype | None) -> Tile:
    """Return exp(x - max) / sum exp(x - max) along `dim`, which may be cut, or its logarithm.

    *Shapes*: as the input, globally and per rank.
    *Sends*: along a cut dim two all-reduces of the input's size divided by the rows of `dim`; backward one.
    """
    if dim is None:
        raise ShardingError(f"{function.__name__} on a Tile needs dim=")
    (at,) = reduced_dims(input, dim)
    if not input.layout.is_cut(at):
        return run_along_dim(function, input, at, at, dtype=dtype)
    result_dtype = dtype or input.dtype
    if not result_dtype.is_floating_point:
        raise RuntimeError(f"{function.__name__}() of {result_dtype} is not defined; give a floating dtype=")
    shifted, sums = _shifted_and_sums(input, at, dtype)
    local = shifted.local.exp() / sums if function is torch.softmax else shifted.local - sums.log()
    return Tile(local.to(result_dtype), shifted.layout, input.mesh)


def _answer_softmax(function: Any, functional: Any, special: Any) -> None:
    @implements_torch(function, special)
    def answer(input: Tile, dim: int, dtype: torch.dtype | None = None) -> Tile:
        return _softmax_along(function, input, dim, dtype)

    @implements_torch(functional)
    def answer_functional(
        input: Tile, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tile:
        return _softmax_along(function, input, dim, dtype)


_answer_softmax(torch.softmax, F.softmax, torch.special.softmax)
_answer_softmax(torch.log_softmax, F.log_softmax, torch.special.log_softmax)


# -- segments ---------------------------------------------------------------------------------------------------------


@implements_torch(torch.segment_reduce, either=("data", "lengths", "offsets"))
def segment_reduce(
    data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, axis: int = 0, **named: Any
) -> Any:
    """Return y[s] = the sum, or another reduction, of the rows of segment s along `axis`, which may be cut.

    *Shapes*: [..., rows, ...] -> [..., segments, ...]. Where the rows are edges of as many cells as there are segments,
    segments are cut as these cells. Else a cut of the rows moves to the start of the next segment.
    *Sends*: each row of a segment that belongs to another rank, once; backward its gradient.  The host waits for a GPU
    to read where segments begin.
    *Raises*: `ShardingError` for lengths that are not alike along other dims, where anything is cut.
    """
    ends = _ends_of_segments(data, lengths, offsets, axis)
    if ends is None:
        named |= {"lengths": lengths} if lengths is not None else {"offsets": offsets}
        return run_unknown_function(torch.segment_reduce, data, reduce, axis=axis, **named)
    (at,), count = reduced_dims(data, axis), len(ends) - 1
    if ends[-1] != data.shape[at] or (ends[1:] < ends[:-1]).any():
        raise RuntimeError(
            f"segment_reduce: {count} segments end at row {int(ends[-1])} of {data.shape[at]}, and none may end before "
            "it begins; give lengths that add up to the rows"
        )
    x = data.owned()
    one = torch.ones(1, dtype=torch.int64, device=x.device)
    # torch refuses a wrong reduction here, on ranks without rows, too
    torch.segment_reduce(x.local.new_ones(1), reduce, lengths=one, **named)
    (cut,) = x.layout.dim(at)
    target = cut.source[0].bare() if cut.is_cut and [c.size for c in cut.source] == [count] else None
    if target is None:
        places = np.searchsorted(ends[:-1], cut.points[1:-1])
        target = replace(cut, size=count, points=(0, *places.tolist(), count), held=(), source=())
    rows = replace(cut, points=tuple(ends[list(target.points)].tolist()), held=())
    own = exchange_rows(x.local, x.layout, x.layout.replace_dim(at, rows), x.mesh)
    start, stop = target.owned(x.layout.piece(cut, x.coordinate))
    sizes = torch.from_numpy(np.diff(ends)[start:stop].copy()).to(own.device)
    layout = x.layout.replace_dim(at, target)
    if not own.numel() and stop == start:
        return Tile(empty_rows(own, layout.local_shape(x.coordinate)), layout, x.mesh)
    out = torch.segment_reduce(own.movedim(at, 0).contiguous(), reduce, lengths=sizes, axis=0, **named)
    return Tile(out.movedim(0, at), layout, x.mesh)


def empty_rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return empty rows that stay connected to the graph, because other ranks wait for this rank's backward pass."""
    return x.new_zeros(shape) + x.sum(dtype=x.dtype)


def _ends_of_segments(data: Any, lengths: Any, offsets: Any, axis: int) -> NDArray[np.int64] | None:
    """Return the first row of each segment, and the end of the last; None where these are not alike for all."""
    numbers = offsets if lengths is None else lengths
    is_plain = isinstance(data, Tile) and data.ndim and isinstance(numbers, Tensor) and not isinstance(numbers, Tile)
    is_lone = (lengths is None) != (offsets is None) and not lacks_values()
    if not is_plain or not is_lone or numbers.dtype not in (torch.int64, torch.int32) or not numbers.numel():
        return None
    (at,) = reduced_dims(data, axis)
    whole = numbers.detach().cpu()
    first = whole.reshape(-1, whole.shape[-1])[:1]
    is_alike = numbers.ndim == at + 1 and bool((whole == first[0]).all())
    if not is_alike or len(data.layout.dim(at)) > 1 or not data.is_floating_point():
        return None
    values = first[0].long().numpy()
    return values if lengths is None else np.concatenate([[0], np.cumsum(values)])


# -- quantiles --------------------------------------------------------------------------------------------------------


def _answer_quantile(function: Any) -> None:
    def handler(
        input: Tile, q: float | Tensor, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Any:
        """Return [quantiles, *the other dims], or only the other dims for one quantile.

        *Sends*: where `dim` is cut, what `jigsaw.ops.whole_dims` says, and the quantiles back; without `dim`, the tile
        to every rank.
        """
        if dim is None or not input.ndim:
            return run_held_whole(function, input, q, dim, keepdim, interpolation=interpolation)
        (at,) = reduced_dims(input, dim)
        check_by_torch(function, input, at, q, at, keepdim, interpolation=interpolation)
        whole = with_whole_dims(input, (at,))
        several = (len(q),) if isinstance(q, Tensor) and q.ndim else ()
        if whole.local.numel() or not input.numel():
            out = function(whole.local, q, at, keepdim, interpolation=interpolation)
        else:  # torch refuses empty rows, but this rank still takes part in the backward pass
            none = whole.local.sum(at, keepdim)
            out = none.expand(*several, *none.shape)

        def of_quantiles(layout: Layout) -> Layout:
            kept = layout.without_halo().drop((at,), keepdim)
            return kept.insert(0, *several) if several else kept

        home = of_quantiles(input.layout)
        if home.ndim == 0:
            return leave_tile(out, input.mesh)
        return brought_home(Tile(out, of_quantiles(whole.layout), input.mesh), home)

    implements_torch(function)(handler)


_answer_quantile(torch.quantile)
_answer_quantile(torch.nanquantile)
