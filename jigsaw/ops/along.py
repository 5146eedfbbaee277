"""Functions that work along one dim: softmax along any dim, the others (sort, cumsum, argmax…) along a dim that nothing
cuts.

>>> tile = jigsaw.shard(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile.sort(dim=1).values.local
tensor([[1., 3.],
        [2., 4.]])
>>> tile.softmax(dim=0).sum(dim=0).local
tensor([1., 1.])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.layout import ShardingError, whole_dim
from jigsaw.ops.pointwise import run_alike
from jigsaw.ops.reductions import extreme_of_all, finish_reduction, reduced_dims, reducing_axes
from jigsaw.tile import Tile, implements_torch, refusal_error


def run_along_dim(function: Any, input: Tile, dim: int, /, *args: Any, **kwargs: Any) -> Any:
    """Run on each rank; exact because dim `dim` is whole there.  Halo rows of other dims stay."""
    (at,) = reduced_dims(input, dim)
    if any(c.is_cut or c.has_halo for c in input.layout.dim(at)):
        if input.layout.is_cut(at):
            raise refusal_error(
                function,
                input,
                f"it works along dim {at}, which is cut",
                "redistribute the tile so that another dim is cut",
            )
        input = input.owned()
    if not input.local.numel() and input.numel():
        # torch looks at dtypes only where there are elements: a rank without rows refuses what the others refuse
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
    """Answer `function`, whose dim is argument number `position` (after the input) or `default`."""

    def handler(input: Tile, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if not isinstance(dim, int):
            if input.layout.cut_dims:
                raise refusal_error(
                    function,
                    input,
                    f"without dim it works on the flattened tensor (dim={dim!r})",
                    "pass a dim that nothing cuts",
                )
            return run_alike(function, (input, *args), kwargs, input)
        return run_along_dim(function, input, dim, *args, **kwargs)

    implements_torch(function)(handler)


for _function, _position, _default in (
    (torch.cumsum, 0, None),
    (torch.cumprod, 0, None),
    (torch.cummax, 0, None),
    (torch.cummin, 0, None),
    (torch.logcumsumexp, 0, None),
    (torch.sort, 0, -1),
    (torch.argsort, 0, -1),
    (torch.topk, 1, -1),
    (torch.kthvalue, 1, -1),
    (torch.median, 0, None),
    (torch.mode, 0, -1),
    (torch.argmax, 0, None),
    (torch.argmin, 0, None),
    (torch.prod, 0, None),
    (F.glu, 0, -1),
):
    _answer_along_dim(_function, _position, _default)


@implements_torch(torch.flip)
def _flip(input: Tile, dims: Any, *more: int) -> Tile:
    wanted = (dims, *more) if isinstance(dims, int) else tuple(dims)
    for d in reduced_dims(input, wanted):
        if input.layout.is_cut(d) or any(c.has_halo for c in input.layout.dim(d)):
            raise refusal_error(
                torch.flip,
                input,
                f"it reverses dim {d}, which is cut",
                "redistribute the tile so that another dim is cut",
            )
    return Tile(torch.flip(input.local, wanted), input.layout, input.mesh)


def _max_or_min(function: Any, whole_tensor: Callable[[Tile], Any]) -> None:
    elementwise = getattr(torch, f"{function.__name__}imum")

    def answer(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Tile) or "other" in kwargs or (args and isinstance(args[0], (Tile, Tensor))):
            return elementwise(input, *args, **kwargs)
        if not args and not kwargs:
            return whole_tensor(input)
        if not args and "dim" not in kwargs:
            raise TypeError(f"{function.__name__}() of a Tile got {sorted(kwargs)} without dim=: name the dim")
        dim: Any = kwargs["dim"] if "dim" in kwargs else args[0]
        return run_along_dim(function, input, dim, *args, **kwargs)

    implements_torch(function)(answer)


_max_or_min(torch.max, partial(extreme_of_all, op="max"))
_max_or_min(torch.min, partial(extreme_of_all, op="min"))


# -- softmax ----------------------------------------------------------------------------------------------------------


def _shifted_and_sums(input: Tile, dim: int, dtype: torch.dtype | None) -> tuple[Tile, Tensor]:
    """(input - global max, global sum of exp) along a cut dim, in at least float32."""
    own = input.owned().to(dtype) if dtype else input.owned()
    wide = own.float() if own.dtype in (torch.bfloat16, torch.float16) else own
    axes = reducing_axes(own.layout, (dim,))
    local_top = (
        wide.local.detach().amax(dim, keepdim=True)
        if wide.local.shape[dim]
        else wide.local.new_full([1 if d == dim else n for d, n in enumerate(wide.local.shape)], -math.inf)
    )
    top = comm.all_reduce(local_top, own.mesh, axes, "max", (own.layout, dim))
    shifted = wide.local - torch.where(top == -math.inf, 0.0, top)
    sums = comm.sum_parts(shifted.exp().sum(dim, keepdim=True), own.mesh, axes, (own.layout, dim))
    return Tile(shifted, own.layout, own.mesh), comm.use_in_parts(sums, own.mesh, axes)


def _check_has_exp(function: Any, input: Tile, dtype: torch.dtype | None) -> None:
    wanted = dtype or input.dtype
    if not wanted.is_floating_point:
        raise RuntimeError(f"{function.__name__}() of {wanted} is not defined; give a floating dtype=")


@implements_torch(F.softmax)
def softmax(input: Tile, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tile:
    """y = exp(x - max) / sum exp(x - max) along `dim`, which may be cut.

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
    """y = x - log sum exp x along `dim`, which may be cut; bytes as `softmax`."""
    if dim is None:
        raise ShardingError("log_softmax on a Tile needs dim=")
    (at,) = reduced_dims(input, dim)
    if not input.layout.is_cut(at):
        return run_along_dim(torch.log_softmax, input, at, at, dtype=dtype)
    _check_has_exp(torch.log_softmax, input, dtype)
    shifted, sums = _shifted_and_sums(input, at, dtype)
    return Tile((shifted.local - sums.log()).to(dtype or input.dtype), shifted.layout, input.mesh)


@implements_torch(torch.softmax)
def _torch_softmax(input: Tile, dim: int, dtype: torch.dtype | None = None) -> Tile:
    return softmax(input, dim, dtype=dtype)


@implements_torch(torch.log_softmax)
def _torch_log_softmax(input: Tile, dim: int, dtype: torch.dtype | None = None) -> Tile:
    return log_softmax(input, dim, dtype=dtype)
