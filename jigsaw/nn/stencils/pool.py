"""Pooling: torch's maxima and means over windows, and adaptive means, along cut dims too.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None, None, "lat", None))
>>> torch.nn.MaxPool2d(2)(tile).shape, torch.nn.AdaptiveAvgPool2d(1)(tile).shape
(torch.Size([2, 3, 4, 8]), torch.Size([2, 3, 1, 1]))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.comm.wire_values import values_on_device
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Interval
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.stencil_rules import StencilWindow
from jigsaw.nn.stencils.adaptive import OutputSize, adaptive_sizes, mean_of_windows, pool_adaptive_windows
from jigsaw.nn.stencils.stencil import (
    DimStencil,
    StencilPlan,
    empty_result,
    entry_per_dim,
    gather_input_rows,
    is_cut_or_haloed,
    plan_stencil,
    resized_layout,
)
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory

PoolSize = int | Sequence[int]


def _pool_windows(
    input: Tile,
    dims: int,
    kernel: PoolSize,
    stride: PoolSize | None,
    padding: PoolSize,
    dilation: PoolSize,
    ceil_mode: bool,
) -> tuple[StencilWindow, ...]:
    if input.ndim not in (dims + 1, dims + 2):
        raise ShardingError(
            f"{dims}-d pooling of a Tile of shape {tuple(input.shape)}: it needs {dims + 1} or {dims + 2} dims"
        )
    every = [tuple(v) if isinstance(v, list) else v for v in (kernel, stride, padding, dilation)]
    return _read_windows(dims, *every, ceil_mode)


@lru_cache(maxsize=1024, typed=True)
def _read_windows(
    dims: int, kernel: PoolSize, stride: PoolSize | None, padding: PoolSize, dilation: PoolSize, ceil_mode: bool
) -> tuple[StencilWindow, ...]:
    sizes = entry_per_dim(kernel, dims, "kernel_size")
    strides = entry_per_dim(kernel if stride is None or stride == () else stride, dims, "stride")
    pads, spacings = entry_per_dim(padding, dims, "padding"), entry_per_dim(dilation, dims, "dilation")
    if min(*sizes, *strides, *spacings) < 1:
        raise ShardingError(
            f"kernel_size={sizes}, stride={strides} and dilation={spacings} of a pool must be 1 or more in each dim"
        )
    for k, p in zip(sizes, pads, strict=True):
        if p > k // 2 or p < 0:
            raise ShardingError(f"padding={p} of a pool must lie within 0..{k // 2}, half of kernel_size={k}")
    return tuple(
        StencilWindow(k, s, d, p, p, ceil_mode) for k, s, d, p in zip(sizes, strides, spacings, pads, strict=True)
    )


def _plan_pool(input: Tile, windows: tuple[StencilWindow, ...], name: str) -> StencilPlan:
    return plan_stencil(input.layout, _pool_stencils(input.ndim - len(windows), windows), input.coordinate, name)


@lru_cache(maxsize=1024)
def _pool_stencils(first: int, windows: tuple[StencilWindow, ...]) -> tuple[DimStencil, ...]:
    return tuple(DimStencil(first + i, w) for i, w in enumerate(windows))


@lru_cache(maxsize=4096)
def _own_padding(layout: Layout, windows: tuple[StencilWindow, ...]) -> tuple[int, ...]:
    first = layout.ndim - len(windows)
    return tuple(0 if is_cut_or_haloed(layout, first + i) else w.below for i, w in enumerate(windows))


# -- maxima -----------------------------------------------------------------------------------------------------------


def max_pool(
    input: Tile,
    dims: int,
    kernel: PoolSize,
    stride: PoolSize | None,
    padding: PoolSize,
    dilation: PoolSize,
    ceil_mode: bool,
    with_places: bool = False,
) -> Any:
    """Return y[o] = max over the window of o, and their flat positions in all of space `with_places`.

    *Shapes*: as torch, globally; per rank the output is cut at ceil(point / stride), because the center of a window
    decides.
    *Sends*: forward, the rows of windows that reach into a neighbor; backward, their gradients.
    *Raises*: `ShardingError` for a padding of more than half a window.
    """
    windows = _pool_windows(input, dims, kernel, stride, padding, dilation, ceil_mode)
    to = _plan_pool(input, windows, "max_pool")
    lowest = float("-inf") if input.dtype.is_floating_point else torch.iinfo(input.dtype).min
    x = gather_input_rows(input, to, lowest)
    if to.is_empty:
        y = Tile(empty_result(to.shape, x), to.out, input.mesh)
        return (y, Tile(x.new_zeros(to.shape, dtype=torch.int64), to.out, input.mesh)) if with_places else y
    own = _own_padding(input.layout, windows)
    steps = [[w.kernel for w in windows], [w.stride for w in windows], own, [w.dilation for w in windows]]
    options: list[Any] = [*steps, ceil_mode]
    if not with_places:
        op: Callable[..., Tensor] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
        return Tile(op(x, *options), to.out, input.mesh)
    values, flat = _WITH_INDICES[dims - 1](x, *options)
    return Tile(values, to.out, input.mesh), Tile(_global_places(flat, x, input, dims, to), to.out, input.mesh)


def _global_places(flat: Tensor, x: Tensor, input: Tile, dims: int, to: StencilPlan) -> Tensor:
    """Return flat positions in this rank's rows `x`, padding included, as positions in the whole."""
    lows = {dim: derived.needs[piece][0] - derived.margins[piece][0] for dim, derived, piece in to.derived}
    places, step = torch.zeros_like(flat), 1
    for d in reversed(range(input.ndim - dims, input.ndim)):
        places += (flat % x.shape[d] + lows.get(d, 0)) * step
        flat, step = flat // x.shape[d], step * input.shape[d]
    return places


def _max_pool_handler(dims: int, *, with_places: bool) -> Callable[..., Any]:
    def handler(
        input: Tile,
        kernel_size: PoolSize,
        stride: PoolSize | None = None,
        padding: PoolSize = 0,
        dilation: PoolSize = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        options = kernel_size, stride, padding, dilation, ceil_mode
        return max_pool(input, dims, *options, with_places=with_places or return_indices)

    handler.__name__ = f"max_pool{dims}d" + "_with_indices" * with_places
    return handler


_WITH_INDICES: tuple[Callable[..., Any], ...] = (
    F.max_pool1d_with_indices,
    F.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
)
for _dims, _functions in enumerate(
    ((torch.max_pool1d, F.max_pool1d), (torch.max_pool2d, F.max_pool2d), (torch.max_pool3d, F.max_pool3d)), 1
):
    implements_torch(*_functions)(_max_pool_handler(_dims, with_places=False))
    implements_torch(_WITH_INDICES[_dims - 1])(_max_pool_handler(_dims, with_places=True))


# -- means ------------------------------------------------------------------------------------------------------------


def avg_pool(
    input: Tile,
    dims: int,
    kernel: PoolSize,
    stride: PoolSize | None,
    padding: PoolSize,
    ceil_mode: bool,
    include_pad: bool,
    divisor: int | None = None,
) -> Tile:
    """Return y[o] = sum over the window of o / count; `include_pad` says whether padding counts, and `divisor` replaces
    the count.

    *Shapes*, *Sends*, *Raises*: as `max_pool`.
    """
    op: Callable[..., Tensor] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    if divisor == 0:
        raise ShardingError("divisor_override=0 of a pool: the sum of a window is divided by it; give another number")
    windows = _pool_windows(input, dims, kernel, stride, padding, 1, ceil_mode)
    to = _plan_pool(input, windows, "avg_pool")
    x = gather_input_rows(input, to)
    if to.is_empty:
        return Tile(empty_result(to.shape, x), to.out, input.mesh)
    own = _own_padding(input.layout, windows)
    args = (x, [w.kernel for w in windows], [w.stride for w in windows], own, ceil_mode, include_pad)
    y = op(*args) if dims == 1 else op(*args, divisor)
    if divisor is None:
        y = _recount_means(y, input, to, windows, include_pad)
    return Tile(y, to.out, input.mesh)


def _recount_means(
    y: Tensor, input: Tile, to: StencilPlan, windows: Sequence[StencilWindow], include_pad: bool
) -> Tensor:
    """Divide windows at the ends of a cut dim by the rows that count, not by the whole window."""
    first = input.ndim - len(windows)
    for dim, derived, piece in to.derived:
        rows, window = input.shape[dim], windows[dim - first]
        counts = [_counted_rows(window, o, rows, include_pad) for o in range(*derived.out.held[piece])]
        if any(c != window.kernel for c in counts):
            factors = values_on_device([window.kernel / c for c in counts], y.dtype, y.device)
            y = y * factors.reshape(-1, *(1,) * (y.ndim - dim - 1))
    return y


def _counted_rows(window: StencilWindow, o: int, rows: int, include_pad: bool) -> int:
    start = o * window.stride - window.below
    valid: Interval = (-window.below, rows + window.above) if include_pad else (0, rows)
    return min(start + window.kernel, valid[1]) - max(start, valid[0])


def _avg_pool_handler(dims: int) -> Callable[..., Any]:
    def handler(
        input: Tile,
        kernel_size: PoolSize,
        stride: PoolSize | None = None,
        padding: PoolSize = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tile:
        return avg_pool(input, dims, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    handler.__name__ = f"avg_pool{dims}d"
    return handler


implements_torch(F.avg_pool1d)(_avg_pool_handler(1))
implements_torch(F.avg_pool2d)(_avg_pool_handler(2))
implements_torch(F.avg_pool3d)(_avg_pool_handler(3))


# -- adaptive means ---------------------------------------------------------------------------------------------------


def adaptive_avg_pool(input: Tile, dims: int, output_size: OutputSize) -> Tile:
    """Return y[o] = mean of the rows from floor(o n / m) to ceil((o + 1) n / m), n rows to m = `output_size`.

    *Shapes*: as torch, globally; a dim of output size 1 is held whole by every rank, others stay cut.
    *Sends*: for size 1, one all-reduce; else as `avg_pool`.
    """
    sizes = adaptive_sizes(input, dims, output_size)
    first, wanted = input.ndim - dims, list(sizes.values())
    cut = {d: m for d, m in sizes.items() if is_cut_or_haloed(input.layout, d)}
    ones = [d for d, m in cut.items() if m == 1]
    x = input.mean(ones, keepdim=True) if ones else input
    # for volumes in narrow dtypes torch has a kernel of this function, but not always of `avg_pool3d`
    is_narrow = dims == 3 and input.itemsize < 4
    odd = {d: m for d, m in cut.items() if m != 1 and (is_narrow or input.shape[d] % m)}
    x = pool_adaptive_windows(x, odd, mean_of_windows) if odd else x
    factors = [x.shape[d] // m if d in cut else 1 for d, m in sizes.items()]
    if prod(factors) > 1:
        x = avg_pool(x, dims, factors, factors, 0, False, True)
    y = _adaptive_uncut(x, dims, first, wanted) if len(cut) < dims else x
    return Tile(in_own_memory(y.local, input), y.layout, y.mesh)  # own memory, also where no size changes


def _adaptive_uncut(x: Tile, dims: int, first: int, wanted: Sequence[int]) -> Tile:
    shape = x.layout.local_shape(x.coordinate)
    local_sizes = [shape[first + i] if is_cut_or_haloed(x.layout, first + i) else wanted[i] for i in range(dims)]
    whole = [first + i for i in range(dims) if not is_cut_or_haloed(x.layout, first + i)]
    layout = resized_layout(x.layout, {d: wanted[d - first] for d in whole})
    op: Callable[..., Tensor] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
    if x.local.numel():
        return Tile(op(x.local, local_sizes), layout, x.mesh)
    saved = int(any(n != 1 for n in local_sizes))  # for one window torch calls mean, which saves nothing
    return Tile(empty_result(layout.local_shape(x.coordinate), x.local, saved=saved), layout, x.mesh)


def _answer_adaptive_avg(dims: int, function: Any) -> None:
    def pool(input: Tile, output_size: OutputSize) -> Tile:
        return adaptive_avg_pool(input, dims, output_size)

    implements_torch(function)(pool)


_answer_adaptive_avg(1, F.adaptive_avg_pool1d)
_answer_adaptive_avg(2, F.adaptive_avg_pool2d)
_answer_adaptive_avg(3, F.adaptive_avg_pool3d)
