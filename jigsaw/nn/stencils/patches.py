"""Windows as columns (`unfold`) and back (`fold`), pools by powers, and unpooling of maxima.

>>> tile = jigsaw.shard(torch.ones(1, 2, 6, 4), jigsaw.init_mesh(lat=1), (None, None, "lat", None))
>>> columns = torch.nn.functional.unfold(tile, 3, padding=1)
>>> columns.shape, torch.nn.functional.fold(columns, (6, 4), 3, padding=1).local[0, 0, 0]
(torch.Size([1, 18, 24]), tensor([4., 6., 6., 4.]))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.geometry.stencil_rules import StencilWindow, TransposedWindow
from jigsaw.nn.stencils.stencil import (
    DimStencil,
    empty_result,
    entry_per_dim,
    gather_input_rows,
    is_cut_or_haloed,
    plan_stencil,
)
from jigsaw.ops.apart_copies import copied_to, note_views
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.shapes import select_dim
from jigsaw.ops.whole_strides import whole_strides, with_strides
from jigsaw.tile.tile import Tile, implements_torch

WindowSize = int | Sequence[int]


@implements_torch(F.unfold)
def _unfold_columns(
    input: Tile, kernel_size: WindowSize, dilation: WindowSize = 1, padding: WindowSize = 0, stride: WindowSize = 1
) -> Any:
    """Return y[:, c k + j, o] = the j-th element of the window of o in channel c.

    *Shapes*: ``[batch, channel, H, W]`` to ``[batch, channel k, oh ow]``; the last dim is cut as oh x ow is.
    *Sends*: forward, the rows of windows that reach into a neighbor; backward, their gradients.
    """
    if input.ndim == 3:
        return _unfold_columns(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    if input.ndim != 4:
        raise RuntimeError(f"unfold: expected a Tile of 3 or 4 dims, got {input.ndim}")
    sizes, pads = entry_per_dim(kernel_size, 2, "kernel_size"), entry_per_dim(padding, 2, "padding")
    spacings, strides = entry_per_dim(dilation, 2, "dilation"), entry_per_dim(stride, 2, "stride")
    windows = [StencilWindow(k, s, d, p, p) for k, s, d, p in zip(sizes, strides, spacings, pads, strict=True)]
    to = plan_stencil(
        input.layout, tuple(DimStencil(2 + i, w) for i, w in enumerate(windows)), input.coordinate, "unfold"
    )
    x = gather_input_rows(input, to)
    shape = to.shape
    local_shape = (*shape[:2], math.prod(sizes), *shape[2:])
    if to.is_empty:
        columns = empty_result(local_shape, x, saved=0)
    else:
        own = tuple(0 if is_cut_or_haloed(input.layout, 2 + i) else p for i, p in enumerate(pads))
        columns = F.unfold(x, sizes, spacings, own, strides).reshape(local_shape)
    wide = Tile(columns, to.out.insert(2, math.prod(sizes)), input.mesh).owned()
    return wide.flatten(3).flatten(1, 2)


@implements_torch(F.fold)
def _fold_columns(
    input: Tile,
    output_size: WindowSize,
    kernel_size: WindowSize,
    dilation: WindowSize = 1,
    padding: WindowSize = 0,
    stride: WindowSize = 1,
) -> Any:
    """Sum, at each place, the elements of all windows that cover it: `unfold`'s adjoint.

    A transposed convolution of each channel with the unit windows.  *Sends*: as one.
    *Raises*: `ShardingError` for columns that are not cut as oh x ow is (as those of `unfold` are).
    """
    if input.ndim == 2:
        return _fold_columns(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    if input.dtype == torch.bool:  # a sum of bools says whether any is True, and no convolution takes bools
        return _fold_columns(input.float(), output_size, kernel_size, dilation, padding, stride).bool()
    wanted, sizes = entry_per_dim(output_size, 2, "output_size"), entry_per_dim(kernel_size, 2, "kernel_size")
    pads, spacings = entry_per_dim(padding, 2, "padding"), entry_per_dim(dilation, 2, "dilation")
    strides = entry_per_dim(stride, 2, "stride")
    windows = [StencilWindow(k, s, d, p, p) for k, s, d, p in zip(sizes, strides, spacings, pads, strict=True)]
    counts = [w.size(n) for w, n in zip(windows, wanted, strict=True)]
    elements = math.prod(sizes)
    if input.shape[1] % elements or input.shape[2] != math.prod(counts):
        raise RuntimeError(
            f"fold: columns of shape {tuple(input.shape)} for windows {sizes} of {wanted}: there must be a multiple of "
            f"{elements} rows, and {math.prod(counts)} columns"
        )
    blocks = input.unflatten(2, counts)
    unit = torch.eye(elements, dtype=input.dtype, device=input.device).reshape(elements, 1, *sizes)
    channels = input.shape[1] // elements
    extra = [
        n - ((c - 1) * s - 2 * p + w.span) for n, c, s, p, w in zip(wanted, counts, strides, pads, windows, strict=True)
    ]
    # output padding may not exceed the stride; a channel is a group of its own
    return F.conv_transpose2d(
        blocks, unit.repeat(channels, 1, 1, 1), None, strides, pads, extra, channels, dilation=spacings
    )


@implements_torch(Tensor.unfold)
def _unfold_dim(input: Tile, dimension: int, size: int, step: int) -> Tile:
    """Return the windows of `size` rows of a dim, each `step` from the last, as a new last dim.

    *Sends*: forward, the rows of windows that reach into a neighbor; backward, their gradients.
    """
    (at,) = reduced_dims(input, dimension)
    if not input.ndim:  # torch treats a 0-d tensor as one row
        return select_dim(_unfold_dim(input.unsqueeze(0), 0, size, step), 0, 0)
    if size > input.shape[at] or size < 0 or step < 1:
        raise RuntimeError(f"unfold of dim {at} of size {input.shape[at]}: windows of {size} rows, step {step}")
    to = plan_stencil(input.layout, (DimStencil(at, StencilWindow(size, step)),), input.coordinate, "unfold")
    strides, out = whole_strides(input), to.out.insert(input.ndim, size)
    is_apart = input.layout.is_cut(at) or input.layout.has_halo  # then the result is a copy, where torch returns a view
    rows = (copied_to(input, to.target, has_way_back=False) if is_apart else input).local
    as_windows: Callable[..., Tensor] = rows.unfold  # torch's stub has another signature
    # a rank without windows makes a view, too, so that it refuses and refreshes the same things as other ranks
    has_none = rows.shape[at] < size
    local = rows.narrow(at, 0, 0).unsqueeze(-1).expand(*to.shape, size) if has_none else as_windows(at, size, step)
    windows = Tile(local, out, input.mesh)
    if is_apart:
        note_views(windows, rows)
    return with_strides(windows, (*strides[:at], strides[at] * step, *strides[at + 1 :], strides[at]), input)


# -- pools by powers --------------------------------------------------------------------------------------------------


def _answer_power_pool(dims: int, function: Any, average: Callable[..., Any]) -> None:
    def pool(
        input: Tile,
        norm_type: float,
        kernel_size: WindowSize,
        stride: WindowSize | None = None,
        ceil_mode: bool = False,
    ) -> Any:
        """Return y[o] = (sum over the window of o of x^p)^(1/p); *Sends*: as `jigsaw.nn.stencils.pool.avg_pool`."""
        out = average(input**norm_type, kernel_size, stride, 0, ceil_mode)
        elements = math.prod(entry_per_dim(kernel_size, dims, "kernel_size"))
        return (out.sign() * F.relu(out.abs()) * elements) ** (1 / norm_type)

    implements_torch(function)(pool)


_answer_power_pool(1, F.lp_pool1d, F.avg_pool1d)
_answer_power_pool(2, F.lp_pool2d, F.avg_pool2d)
_answer_power_pool(3, F.lp_pool3d, F.avg_pool3d)


# -- maxima put back --------------------------------------------------------------------------------------------------


def _answer_unpool(dims: int, function: Any) -> None:
    def unpool(
        input: Tile,
        indices: Tile,
        kernel_size: WindowSize,
        stride: WindowSize | None = None,
        padding: WindowSize = 0,
        output_size: Sequence[int] | None = None,
    ) -> Tile:
        return _put_back(input, indices, dims, kernel_size, stride, padding, output_size)

    implements_torch(function, tiles=("indices",))(unpool)


def _put_back(
    input: Tile,
    indices: Tile,
    dims: int,
    kernel_size: WindowSize,
    stride: WindowSize | None,
    padding: WindowSize,
    output_size: Sequence[int] | None,
) -> Tile:
    """Return zeros, with the maxima at the flat positions where they were found.

    *Sends*: forward, the values and indices of windows that reach into a neighbor; backward, their gradients.
    """
    sizes = entry_per_dim(kernel_size, dims, "kernel_size")
    strides = entry_per_dim(kernel_size if stride is None or stride == () else stride, dims, "stride")
    pads, first = entry_per_dim(padding, dims, "padding"), input.ndim - dims
    usual = [
        (input.shape[first + i] - 1) * s + k - 2 * p
        for i, (k, s, p) in enumerate(zip(sizes, strides, pads, strict=True))
    ]
    wanted = usual if output_size is None else list(output_size)[-dims:]
    if any(abs(n - m) >= s for n, m, s in zip(wanted, usual, strides, strict=True)):
        raise ValueError(f"max_unpool: output_size={wanted} must be less than a stride {strides} from {usual}")
    indices = indices.with_layout(input.layout)
    along = tuple(
        DimStencil(first + i, TransposedWindow(k, s, 1, p, n - m), always=True)
        for i, (k, s, p, n, m) in enumerate(zip(sizes, strides, pads, wanted, usual, strict=True))
    )
    to = plan_stencil(input.layout, along, input.coordinate, "max_unpool")
    values, places = gather_input_rows(input, to), gather_input_rows(indices, to)
    if to.is_empty:
        return Tile(empty_result(to.shape, values), to.out, input.mesh)
    rest, row, is_inside = places, torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
    stride_here = 1
    by_dim = {dim: derived.out.held[piece] for dim, derived, piece in to.derived}
    for d in reversed(range(first, input.ndim)):
        low, high = by_dim[d]
        at, rest = rest % wanted[d - first], rest // wanted[d - first]
        is_inside &= (at >= low) & (at < high)
        row += (at - low) * stride_here
        stride_here *= high - low
    # values that belong to a neighbor go to one extra place, which is dropped
    flat = torch.where(is_inside, row, stride_here).flatten(first)
    out = values.new_zeros((*values.shape[:first], stride_here + 1)).scatter(first, flat, values.flatten(first))
    return Tile(out.narrow(first, 0, stride_here).reshape(to.shape), to.out, input.mesh)


_answer_unpool(1, F.max_unpool1d)
_answer_unpool(2, F.max_unpool2d)
_answer_unpool(3, F.max_unpool3d)


@implements_torch(F.fractional_max_pool2d, F.fractional_max_pool3d)
def _refuse_fractional(input: Tile, *args: Any, **kwargs: Any) -> Tile:
    raise ShardingError(
        f"fractional max pooling of a Tile of shape {tuple(input.shape)}: its windows are random, and not answered; "
        "use max_pool or adaptive_max_pool"
    )
