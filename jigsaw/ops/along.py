"""Functions that work along one dim: softmax as sums over ranks, and orders (sort, topk, median…) on a whole dim
(`jigsaw.ops.whole_dims`).

>>> tile = jigsaw.shard(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile.sort(dim=1).values.local
tensor([[1., 3.],
        [2., 4.]])
>>> tile.softmax(dim=0).sum(dim=0).local
tensor([1., 1.])
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.ops.reductions import finish_reduction, reduced_dims, reducing_axes
from jigsaw.ops.unknown_functions import uncut_tiles
from jigsaw.ops.whole_dims import run_held_whole, run_with_whole_dim
from jigsaw.tile.tile import Tile, implements_torch


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
    return _as_tiles(function(input.local, *args, **kwargs), input, at)


def _as_tiles(out: Any, input: Tile, dim: int) -> Any:
    if isinstance(out, Tensor) and out.ndim == input.ndim:
        return Tile(out, input.layout.replace_dim(dim, whole_dim(out.shape[dim])), input.mesh)
    if isinstance(out, Tensor):
        layout = input.layout.drop((dim,))
        return finish_reduction(out, input, (dim,), False) if layout.ndim == 0 else Tile(out, layout, input.mesh)
    values = [_as_tiles(o, input, dim) for o in out]
    return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)


def _answer_along_dim(function: Any, position: int, default: int | None) -> None:
    """Answer `function`, whose dim is argument number `position` (after the input) or `default`.  Without a dim it
    works on the flattened tensor, which every rank then holds whole.
    """

    def handler(input: Tile, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if isinstance(dim, int):
            return run_along_dim(function, input, dim, *args, **kwargs)
        return run_held_whole(function, input, *args, **kwargs)

    implements_torch(function)(handler)


for _function, _position, _default in (
    (torch.argsort, 0, -1),
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
        return run_along_dim(function, input, dim, *args, **kwargs)

    implements_torch(function)(handler)


_answer_sort(torch.sort)


@implements_torch(torch.msort)
def _msort(input: Tile) -> Any:
    return run_along_dim(torch.sort, input, 0, dim=0).values


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


def _check_has_exp(function: Any, input: Tile, dtype: torch.dtype | None) -> None:
    wanted = dtype or input.dtype
    if not wanted.is_floating_point:
        raise RuntimeError(f"{function.__name__}() of {wanted} is not defined; give a floating dtype=")


@implements_torch(F.softmax)
def softmax(input: Tile, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tile:
    """Return y = exp(x - max) / sum exp(x - max) along `dim`, which may be cut.

    *Shapes*: as the input, globally and per rank.
    *Sends*: along a cut dim two all-reduces of the input's size divided by the rows of `dim`; backward one.
    """
    if dim is None:
        raise ShardingError("softmax on a Tile needs dim=")
    (at,) = reduced_dims(input, dim)
    if not input.layout.is_cut(at):
        return run_along_dim(torch.softmax, input, at, at, dtype=dtype)
    _check_has_exp(torch.softmax, input, dtype)
    shifted, sums = _shifted_and_sums(input, at, dtype)
    return Tile((shifted.local.exp() / sums).to(dtype or input.dtype), shifted.layout, input.mesh)


@implements_torch(F.log_softmax)
def log_softmax(input: Tile, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tile:
    """Return y = x - log sum exp x along `dim`, which may be cut; bytes as `softmax`."""
    if dim is None:
        raise ShardingError("log_softmax on a Tile needs dim=")
    (at,) = reduced_dims(input, dim)
    if not input.layout.is_cut(at):
        return run_along_dim(torch.log_softmax, input, at, at, dtype=dtype)
    _check_has_exp(torch.log_softmax, input, dtype)
    shifted, sums = _shifted_and_sums(input, at, dtype)
    return Tile((shifted.local - sums.log()).to(dtype or input.dtype), shifted.layout, input.mesh)


@implements_torch(torch.softmax, torch.special.softmax)
def _torch_softmax(input: Tile, dim: int, dtype: torch.dtype | None = None) -> Tile:
    return softmax(input, dim, dtype=dtype)


@implements_torch(torch.log_softmax, torch.special.log_softmax)
def _torch_log_softmax(input: Tile, dim: int, dtype: torch.dtype | None = None) -> Tile:
    return log_softmax(input, dim, dtype=dtype)
