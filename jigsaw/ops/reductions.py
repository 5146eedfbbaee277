"""Reductions over cut dims: global, exact and differentiable.

Each reduces the rows that this rank owns and combines the results over the axes that cut the reduced dims.  The result
is a Tile with the remaining cuts, the same along the axes that were reduced.  When no dim is left it is an ordinary
scalar tensor, equal on every rank.

>>> tile = jigsaw.shard(torch.arange(12.0).reshape(3, 4), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile.mean().item(), tile.amax(dim=0).local
(5.5, tensor([ 8.,  9., 10., 11.]))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.geometry.layout import Layout
from jigsaw.tile.tile import Tile, implements_torch, leave_tile, refusal_error

ReducedDims = int | Sequence[int] | None


def reduced_dims(tile: Tile, dim: ReducedDims) -> tuple[int, ...]:
    """Return the dims to reduce, non-negative; None and () mean all, as in torch."""
    ndim = tile.layout.ndim
    if type(dim) is int and -ndim <= dim < ndim:
        return (dim % ndim,)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = tuple((dim,) if isinstance(dim, int) else dim)
    for d in dims:
        if isinstance(d, bool):  # in Python a bool is an int
            raise TypeError(f"dim={d!r} is not a dim of a Tile: pass whole numbers")
        if not -max(tile.ndim, 1) <= d < max(tile.ndim, 1):
            raise IndexError(
                f"dim {d} is out of range for a Tile of {tile.ndim} dims (expected {-tile.ndim}..{tile.ndim - 1})"
            )
    places = tuple(d % max(tile.ndim, 1) for d in dims)
    if len(set(places)) != len(places):
        raise RuntimeError(f"dims {dims} name a dim of a Tile of {tile.ndim} dims twice: name each once")
    return places


def reducing_axes(layout: Layout, dims: Sequence[int]) -> tuple[str, ...]:
    """Return the mesh axes that cut the dims."""
    return tuple(a for d in dims for a in layout.dim_axes(d))


def finish_reduction(local: Tensor, tile: Tile, dims: Sequence[int], keepdim: bool) -> Any:
    """Return a reduced local tensor as a Tile, or as an ordinary tensor when it is a scalar."""
    layout = tile.layout.without_halo().drop(dims, keepdim)
    return leave_tile(local, tile.mesh) if layout.ndim == 0 else Tile(local, layout, tile.mesh)


def elements_per_value(tile: Tile, dims: Sequence[int]) -> int:
    """Return how many global elements one reduced value is made of."""
    return math.prod([tile.shape[d] for d in dims]) if tile.ndim else 1


def sum_parts_over(local: Tensor, tile: Tile, dims: Sequence[int]) -> Tensor:
    """Sum local partial results over the axes that cut `dims`."""
    axes = reducing_axes(tile.layout, dims)
    return comm.sum_parts(local, tile.mesh, axes, (tile.layout, tuple(dims))) if axes else local


@lru_cache(maxsize=4096)
def _plan_reduction(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> tuple[tuple[str, ...], Layout]:
    """Return the axes that cut the dims, and the layout of the result."""
    return reducing_axes(layout, dims), layout.drop(dims, keepdim)


def _reduced_tile(local: Tensor, own: Tile, out: Layout) -> Any:
    return Tile(local, out, own.mesh) if out.ndim else leave_tile(local, own.mesh)


# -- sums -------------------------------------------------------------------------------------------------------------


@implements_torch(torch.sum)
def reduce_sum(input: Tile, dim: ReducedDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Sum `input` over `dim`.

    *Shapes*: global as in torch; per rank the dims that stay keep their cuts.
    *Sends*: forward one all-reduce of the local result over the axes that cut `dim`; backward nothing.
    """
    if dtype is torch.bool:  # messages cannot sum bools
        return reduce_sum(input.to(dtype), dim, keepdim).to(dtype)
    dims = reduced_dims(input, dim)
    own = input.owned()
    # without dims the sum is the input, in new memory
    local = torch.sum(own.local, dims, keepdim, dtype=dtype) if dims else own.local.to(dtype or own.dtype, copy=True)
    axes, out = _plan_reduction(own.layout, dims, keepdim)
    local = comm.sum_parts(local, own.mesh, axes, (own.layout, dims)) if axes else local
    return _reduced_tile(local, own, out)


@implements_torch(torch.mean)
def reduce_mean(
    input: Tile, dim: ReducedDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Return the global mean of `input` over `dim`; shapes and bytes as `reduce_sum`."""
    dims = reduced_dims(input, dim)
    own = input.owned()
    kind = dtype or own.local.dtype
    if not kind.is_floating_point and not kind.is_complex:
        raise RuntimeError(f"mean(): a Tile of {input.dtype} has no mean; give dtype= or use tile.float()")
    axes, out = _plan_reduction(own.layout, dims, keepdim)
    if dims and not axes:
        return _reduced_tile(torch.mean(own.local, dims, keepdim, dtype=dtype), own, out)
    # narrow types are summed in float32, as torch does inside a rank
    wide = torch.float32 if (dtype or own.dtype) in (torch.bfloat16, torch.float16) else dtype
    local = torch.sum(own.local, dims, keepdim, dtype=wide) if dims else own.local.to(wide or own.dtype)
    value = comm.sum_parts(local, own.mesh, axes, (own.layout, dims)) if axes else local
    return _reduced_tile((value / elements_per_value(own, dims)).to(kind), own, out)


def global_moments(input: Tile, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (mean, sum of squared deviations) over `dims`, local tensors with the dims kept at size 1, the same along
    reduced axes.

    Two passes, so that no digits cancel; `input` is without halo and wide enough (float32 or float64).

    *Sends*: two all-reduces of one value a kept element; backward one.
    """
    axes = reducing_axes(input.layout, dims)
    center = sum_parts_over(input.local.sum(tuple(dims), keepdim=True), input, dims) / elements_per_value(input, dims)
    deviation = input.local - comm.use_in_parts(center, input.mesh, axes)
    squared = deviation.abs().square() if deviation.is_complex() else deviation.square()
    return center, sum_parts_over(squared.sum(tuple(dims), keepdim=True), input, dims)


def _variance_and_mean(
    input: Tile, dim: Any, unbiased: bool | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor, Tile, tuple[int, ...]]:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1.0 if unbiased is None or unbiased else 0.0
    own = input.owned()
    if not (own.dtype.is_floating_point or own.dtype.is_complex):
        raise RuntimeError(f"std and var of a Tile of {own.dtype} are not defined; use tile.float()")
    dims = reduced_dims(own, dim)
    if dims and not reducing_axes(own.layout, dims):
        return *torch.var_mean(own.local, dims, correction=correction, keepdim=keepdim), own, dims
    center, squares = global_moments(own, dims)
    spread = squares / max(elements_per_value(own, dims) - correction, 0)
    if not keepdim:
        shape = [n for d, n in enumerate(own.local.shape) if d not in dims]
        center, spread = center.reshape(shape), spread.reshape(shape)
    return spread, center, own, dims


def _root_flat_at_zero(spread: Tensor) -> Tensor:
    """Return the square root, whose gradient at 0 (a constant field) is 0, as torch has it for `std`."""
    flat = spread == 0
    return torch.where(flat, 0.0, torch.where(flat, 1.0, spread).sqrt())


def _answer_spread(function: Any, is_root: bool, has_mean: bool) -> None:
    def handler(
        input: Tile,
        dim: Any = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        """Return the global variance over `dim`, or its root, by two passes, and the mean where torch does.

        *Sends*: two all-reduces forward, one backward.
        """
        spread, center, own, dims = _variance_and_mean(input, dim, unbiased, correction, keepdim)
        spread = finish_reduction(_root_flat_at_zero(spread) if is_root else spread, own, dims, keepdim)
        return (spread, finish_reduction(center, own, dims, keepdim)) if has_mean else spread

    implements_torch(function)(handler)


_answer_spread(torch.var, False, False)
_answer_spread(torch.std, True, False)
_answer_spread(torch.var_mean, False, True)
_answer_spread(torch.std_mean, True, True)


# -- norms: the norm of the ranks' norms ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RankStack:
    """Stack of the ranks along `axes`, in which this rank's is `mine`; `same` as in `jigsaw.comm.all_reduce`."""

    mesh: DeviceMesh
    axes: tuple[str, ...]
    mine: int
    same: comm.SameOnRanks = None


class _StackAlongAxes(torch.autograd.Function):
    """Stack of the local tensors of the ranks along `axes`, the same on all; backward, each takes its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: _RankStack) -> Tensor:
        ctx.stack = stack
        return torch.stack(comm.all_gather(x, stack.mesh, stack.axes, stack.same))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _OwnOfStack.apply(grads[0], _RankStack(ctx.stack.mesh, ctx.stack.axes, ctx.stack.mine)), None


class _OwnOfStack(torch.autograd.Function):
    """This rank's tensor of a stack that is the same on all; so is its gradient, a stack of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: _RankStack) -> Tensor:
        ctx.stack = stack
        return x[stack.mine]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _StackAlongAxes.apply(grads[0], ctx.stack), None


def stack_along_axes(local: Tensor, tile: Tile, axes: tuple[str, ...], same: comm.SameOnRanks = None) -> Tensor:
    """Return [ranks along axes, *local.shape], in mesh order, the same on all; `same` as in `jigsaw.comm.all_reduce`.

    *Sends*: the local tensor to each of the others; backward nothing.
    """
    if not axes:
        return local.unsqueeze(0)
    flat = 0
    for (name, size), at in zip(tile.layout.axes, tile.coordinate, strict=True):
        flat = flat * size + at if name in axes else flat
    return _StackAlongAxes.apply(local, _RankStack(tile.mesh, axes, flat, same))


@implements_torch(torch.linalg.vector_norm)
def vector_norm(
    x: Tile, ord: float = 2, dim: ReducedDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Return (sum |x|^ord)^(1/ord) over `dim`: the norm of the ranks' norms.

    *Sends*: one all-gather of the local norms; backward nothing.
    """
    dims = reduced_dims(x, dim)
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise RuntimeError(f"vector_norm(): a Tile of {x.dtype} has no norm; use tile.float()")
    own = x.owned()
    axes = reducing_axes(own.layout, dims)
    if abs(ord) == math.inf:
        return (amax if ord > 0 else amin)(own.to(dtype or own.dtype).abs(), dims, keepdim)
    if ord < 0 and elements_per_value(x, dims) == 0:
        raise RuntimeError(f"vector_norm: no elements, as of {tuple(x.shape)} over {dims}, have a norm of ord={ord}")
    if ord < 0 and 0 in (own.local.shape[d] for d in dims):
        # torch refuses this norm without rows; infinity is neutral in the norm of the ranks' norms
        local = own.local.to(dtype or own.dtype).abs().sum(dims, keepdim) + math.inf
    elif dims:
        local = torch.linalg.vector_norm(own.local, ord, dims, keepdim, dtype=dtype)
    else:
        local = own.local.abs()
    if axes:
        stacked = stack_along_axes(local, own, axes, (own.layout, dims))
        local = stacked.sum(0) if ord == 0 else torch.linalg.vector_norm(stacked, ord, 0)
    return finish_reduction(local, own, dims, keepdim)


@implements_torch(torch.norm)
def norm(
    input: Tile,
    p: Any = None,
    dim: ReducedDims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return the vector norm of the whole tensor or over `dim`; the nuclear norm is refused."""
    _check_norm_order(torch.norm, input, p)
    return vector_norm(input, 2 if p is None or p == "fro" else p, dim, keepdim, dtype=dtype)


@implements_torch(torch.linalg.norm)
def _linalg_norm(
    A: Tile,
    ord: Any = None,
    dim: ReducedDims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Do as `norm`; but an `ord` for two dims is that of a matrix, of which only Frobenius is a sum over elements."""
    if ord is not None and dim is None and A.ndim > 2:
        raise RuntimeError(f"linalg.norm: with ord= and without dim= a Tile must be 1-d or 2-d, got {A.ndim} dims")
    is_matrix = ord is not None and len(reduced_dims(A, dim)) == 2
    if ord == "fro" and not is_matrix:
        raise RuntimeError(f"linalg.norm: ord='fro' is that of a matrix, over two dims; got dim={dim!r}")
    _check_norm_order(torch.linalg.norm, A, f"ord={ord}" if is_matrix and ord != "fro" else ord)
    return vector_norm(A, 2 if ord is None or ord == "fro" else ord, dim, keepdim, dtype=dtype)


def _check_norm_order(function: Any, input: Tile, order: Any) -> None:
    if isinstance(order, str) and order != "fro":
        raise refusal_error(
            function,
            input,
            f"the matrix norm {order!r} is not a sum over elements",
            "use a vector norm, or tile.full_tensor()",
        )


# -- extremes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ExtremeCall:
    """Maximum or minimum (`op`) over `dims`; with `nan`, NaN attains NaN."""

    mesh: DeviceMesh
    layout: Layout
    dims: tuple[int, ...]
    op: str
    nan: bool


class _Extreme(torch.autograd.Function):
    """Global amax or amin; the gradient is shared evenly by all elements that attain it, on whichever rank.

    NaN equals nothing: where it is the extreme, no element has a share (0 / 0 is NaN, as in torch), unless `nan`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _ExtremeCall) -> Tensor:
        mesh, dims, op, axes = call.mesh, call.dims, call.op, reducing_axes(call.layout, call.dims)
        local = getattr(torch, f"a{op}")(x, dims, keepdim=True) if x.numel() else _neutral_element(x, dims, op)
        best = comm.all_reduce(local, mesh, axes, op, (call.layout, dims))
        attained = (x == best) | (x.isnan() & best.isnan()) if call.nan else x == best
        ctx.save_for_backward(attained, comm.all_reduce(attained.sum(dims, keepdim=True), mesh, axes))
        return best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        attained, shares = ctx.saved_tensors
        return grads[0] * attained / shares, None


def _neutral_element(x: Tensor, dims: tuple[int, ...], op: str) -> Tensor:
    """Return the neutral element, for a rank without rows."""
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    if x.dtype == torch.bool:
        return x.new_full(shape, op == "min")
    info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
    edge = -math.inf if x.is_floating_point() else info.min
    return x.new_full(shape, edge if op == "max" else -edge if x.is_floating_point() else info.max)


def _global_extreme(input: Tile, dim: ReducedDims, keepdim: bool, op: str, nan: bool = False) -> Any:
    dims = reduced_dims(input, dim)
    if input.dtype.is_complex:
        raise RuntimeError(f"a{op}(): a Tile of {input.dtype} has no order; use tile.abs()")
    if elements_per_value(input, dims) == 0:
        raise IndexError(
            f"a{op}(): cannot reduce dims {dims} of a Tile of shape {tuple(input.shape)}: there are no elements"
        )
    own = input.owned()
    axes, out = _plan_reduction(own.layout, dims, keepdim)
    if dims and not axes and not nan:
        return _reduced_tile((torch.amax if op == "max" else torch.amin)(own.local, dims, keepdim), own, out)
    local: Tensor = _Extreme.apply(own.local, _ExtremeCall(own.mesh, own.layout, dims, op, nan))
    return finish_reduction(local if keepdim else local.squeeze(dims), own, dims, keepdim)


@implements_torch(torch.amax)
def amax(input: Tile, dim: ReducedDims = None, keepdim: bool = False) -> Any:
    """Return the global maximum over `dim`; ties share the gradient evenly.  *Sends*: forward two all-reduces."""
    return _global_extreme(input, dim, keepdim, "max")


@implements_torch(torch.amin)
def amin(input: Tile, dim: ReducedDims = None, keepdim: bool = False) -> Any:
    """Return the global minimum over `dim`; see `amax`."""
    return _global_extreme(input, dim, keepdim, "min")


def extreme_of_all(input: Tile, op: str) -> Any:
    """Return the global maximum or minimum, as `amax` and `amin`; but all NaN share the gradient of NaN evenly."""
    return _global_extreme(input, None, False, op, nan=True)


# -- truth and counting -----------------------------------------------------------------------------------------------


def _is_empty_dim(dim: ReducedDims) -> bool:
    """Say whether no dim is named: the functions below then reduce none, where others reduce all."""
    return dim is not None and not isinstance(dim, int) and len(dim) == 0


def _truth_dtype(input: Tile) -> torch.dtype:
    return torch.uint8 if input.dtype == torch.uint8 else torch.bool  # as in torch


@implements_torch(torch.all)
def reduce_all(input: Tile, dim: ReducedDims = None, keepdim: bool = False) -> Any:
    """Say whether every element (over `dim`) is true, globally."""
    false = input.to(torch.bool).logical_not()
    count = false if _is_empty_dim(dim) else reduce_sum(false.to(torch.int64), dim, keepdim)
    return count.eq(0).to(_truth_dtype(input))


@implements_torch(torch.any)
def reduce_any(input: Tile, dim: ReducedDims = None, keepdim: bool = False) -> Any:
    """Say whether any element (over `dim`) is true, globally."""
    true = input.to(torch.bool)
    count = true if _is_empty_dim(dim) else reduce_sum(true.to(torch.int64), dim, keepdim)
    return count.ne(0).to(_truth_dtype(input))


@implements_torch(torch.count_nonzero)
def count_nonzero(input: Tile, dim: ReducedDims = None) -> Any:
    """Return the global number of elements (over `dim`) that are not zero."""
    return reduce_sum(input.ne(0).to(torch.int64), dim)


@implements_torch(torch.equal, either=("input", "other"))
def equal(input: Any, other: Any) -> bool:
    """Say whether two tiles, or a tile and a whole tensor, are the same tensor, shape and elements."""
    return input.shape == other.shape and bool(input.eq(other).all())


@implements_torch(torch.allclose, either=("input", "other"))
def allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Say whether all elements are close, globally."""
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@implements_torch(torch.nansum)
def nansum(input: Tile, dim: ReducedDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """`reduce_sum` with NaN counted as zero."""
    return reduce_sum(input.masked_fill(input.isnan(), 0), dim, keepdim, dtype=dtype)


@implements_torch(torch.nanmean)
def nanmean(input: Tile, dim: ReducedDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """`reduce_mean` over the elements that are not NaN."""
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        raise RuntimeError(f"nanmean(): a Tile of {input.dtype} has no NaN; use tile.float().mean()")
    return nansum(input, dim, keepdim, dtype=dtype) / reduce_sum(input.isnan().logical_not(), dim, keepdim)


@implements_torch(torch.logsumexp, torch.special.logsumexp)
def logsumexp(input: Tile, dim: ReducedDims, keepdim: bool = False) -> Any:
    """Return log sum exp over `dim`, shifted by the global maximum."""
    dims = reduced_dims(input, dim)
    if input.dtype.is_complex:
        raise refusal_error(torch.logsumexp, input, "complex numbers have no maximum", "use tile.exp().sum(dim).log()")
    if not input.dtype.is_floating_point:
        input = input.to(torch.get_default_dtype())
    if not input.ndim:
        return input.clone()
    if elements_per_value(input, dims) == 0:
        return reduce_sum(input.exp(), dims, keepdim).log()
    top = amax(input.detach(), dims, keepdim=True)
    top = torch.where(top.abs() == math.inf, 0.0, top)
    out = reduce_sum((input - top).exp(), dims, keepdim=True).log() + top
    return out if keepdim else reduce_sum(out, dims)


@implements_torch(torch.dot, either=("input", "other"))
def dot(input: Any, other: Any) -> Any:
    """Return the sum of input * other, over two 1-d tensors of one length and dtype."""
    if input.ndim != 1 or input.shape != other.shape or input.dtype != other.dtype or input.dtype == torch.bool:
        raise RuntimeError(
            f"dot of shapes {tuple(input.shape)} and {tuple(other.shape)}, {input.dtype} and {other.dtype}: pass two "
            "1-d tensors of numbers, of one length and dtype"
        )
    return (input * other).sum(dtype=input.dtype)


@implements_torch(torch.vdot, either=("input", "other"))
def vdot(input: Any, other: Any) -> Any:
    """Return the sum of conj(input) * other; see `dot`."""
    return dot(input.conj(), other)
