"""Convolutions and transposed convolutions of tiles in 1, 2 and 3 dims: torch's functions, and modules.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None, None, "lat", None))
>>> torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="circular")(tile).shape
torch.Size([2, 8, 5, 8])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.stencil_rules import TransposedWindow
from jigsaw.nn.shared_inputs import enter_in_parts
from jigsaw.nn.stencils.conv_channels import ChannelPlan, add_partial_sums, channel_weight, plan_channels
from jigsaw.nn.stencils.halo_conv import (
    ConvGeometry,
    ConvPlan,
    ConvSize,
    HaloConvolution,
    channels_of_result,
    conv_dim_stencils,
    convolve_with_halo,
    plan_halo,
    plan_of_whole_channels,
    read_convolution,
    read_transposed_convolution,
)
from jigsaw.nn.stencils.stencil import empty_result, gather_input_rows, plan_stencil
from jigsaw.nn.weights import CutLayer, cut_parameter, gathered_weight, local_weight, weight_layout
from jigsaw.ops.meeting.common_cuts import bring_to_cuts
from jigsaw.tile.tile import Tile, implements_torch
from jigsaw.torch_internals.placements import is_dtensor


def convolve(input: Tile, weight: Tensor, bias: Tensor | None, conv: ConvGeometry) -> Tile:
    """Return `input` convolved with `weight`, plus `bias`; all functions and modules of this file come here.

    *Shapes*: ``[batch, channel, *space]`` or ``[channel, *space]``, global as in torch.  A spatial dim that is cut at p
    is cut at ceil(p / stride) afterwards (about p x stride, transposed). So multiples of the stride stay aligned.  Rows
    that a halo allows to compute are computed and held.
    *Sends*: forward, the rows of windows that reach into a neighbor, one message each; backward, their gradients.
    Nothing where a halo holds them.  Where P ranks cut the channels of `input`, each sends (P-1)/P of the smaller of
    the input and the output, forward and backward.  Where only the weight is cut, by output channels: nothing, and
    backward an all-reduce of the gradient of `input`.  A weight cut by input channels: an all-reduce of y, and backward
    one of the gradient of an `input` whose channels are whole.
    *Raises*: `ShardingError` for channels that do not fit, windows larger than the padded input, flattened dims.
    """
    if type(weight) in (Tensor, nn.Parameter) and isinstance(input, Tile):
        if weight.is_complex() and input.is_complex():
            return _convolve_complex(input, weight, bias, conv)
        plan = plan_of_whole_channels(input.layout, weight.shape, conv, input.coordinate)
        if plan is not None:
            return _convolve_whole_channels(input, weight, bias, plan)
    _check_convolution(input, weight, conv)
    if input.ndim == conv.dims + 1:
        batched = Tile(input.local.unsqueeze(0), input.layout.insert(0), input.mesh)
        y = convolve(batched, weight, bias, conv)
        return Tile(y.local.squeeze(0), y.layout.drop((0,)), y.mesh)
    if _is_pointwise_in_space(weight, conv) and any(len(input.layout.dim(d)) > 1 for d in range(2, input.ndim)):
        # unflatten tokens into lat x lon, because a kernel of size 1 does not depend on the order of rows
        apart = input.reshape((*input.shape[:2], *(c.size for d in range(2, input.ndim) for c in input.layout.dim(d))))
        if apart.ndim <= 5:  # torch convolves up to three dims
            for _ in range(apart.ndim - input.ndim):
                weight = weight.unsqueeze(-1)
            y = convolve(apart, weight, bias, _pointwise_geometry(apart.ndim - 2, conv))
            return y.reshape((*y.shape[:2], *input.shape[2:]))
    if not input.layout.is_cut(1) and input.layout.has_halo:
        input = input.with_layout(
            input.layout.replace_dim(1, whole_dim(input.shape[1]))
        )  # a halo of channels is dropped
    if is_dtensor(weight) and conv.transposed and conv.groups > 1:
        # the cut of channels need not fall between groups: each rank then works on the whole groups that it has
        weight, bias = cast(Tensor, gathered_weight(weight, input)), gathered_weight(bias, input)
    if is_dtensor(weight) and conv.groups == 1:
        input = bring_to_cuts(input, 1, weight_layout(weight, input).dim(0 if conv.transposed else 1))
    along = conv_dim_stencils(2, tuple(weight.shape[2:]), conv)
    to = plan_stencil(input.layout, along, input.coordinate, "convolution")
    out = to.out.replace_dim(1, whole_dim(channels_of_result(weight.shape, conv)))
    ways = plan_channels(input, weight, conv.groups, conv.transposed, (math.prod(input.shape), math.prod(out.shape)))
    if ways is None:
        return _convolve_whole_channels(input, weight, bias, ConvPlan(conv, along, to, out))
    return _convolve_cut_channels(input, weight, bias, ConvPlan(conv, along, to, out.replace_dim(1, ways.out)), ways)


def _convolve_complex(input: Tile, weight: Tensor, bias: Tensor | None, conv: ConvGeometry) -> Tile:
    """Convolve real and imaginary parts, in three convolutions as torch does."""
    x, y = input.real, input.imag
    real, imaginary = convolve(x, weight.real, None, conv), convolve(y, weight.imag, None, conv)
    both = convolve(x + y, weight.real + weight.imag, None, conv)
    out: Any = torch.complex(real - imaginary, both - real - imaginary)
    return out if bias is None else out + bias.reshape(-1, *[1] * conv.dims)


def _convolve_whole_channels(input: Tile, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tile:
    conv, out = plan.conv, plan.out
    if bias is not None and is_dtensor(bias):  # one of another layer, if the weight is whole
        bias = gathered_weight(bias, input)
    b = None if bias is None else local_weight(bias, input, out)
    w = local_weight(weight, input, out)
    if plan.padding is not None:
        x, w, b = _autocast_operands(input.local, w, b)
        return Tile(_torch_convolution(x, w, b, conv, plan.padding, conv.output_padding), out, input.mesh)
    return Tile(_convolve_local(input, w, b, plan), out, input.mesh)


def _is_pointwise_in_space(weight: Tensor, conv: ConvGeometry) -> bool:
    is_still = all(s == 1 for s in conv.stride) and not any(map(sum, conv.padding)) and not any(conv.output_padding)
    return is_still and all(k == 1 for k in weight.shape[2:])


def _pointwise_geometry(dims: int, like: ConvGeometry) -> ConvGeometry:
    none = (0,) * dims
    return ConvGeometry((1,) * dims, ((0, 0),) * dims, (1,) * dims, none, like.groups, like.transposed)


def _convolve_cut_channels(input: Tile, weight: Tensor, bias: Tensor | None, plan: ConvPlan, ways: ChannelPlan) -> Tile:
    conv, out = plan.conv, plan.out
    w, b, groups = channel_weight(ways, input, weight, bias, out, conv.groups, conv.transposed)
    conv = replace(conv, groups=groups)
    if ways.row:
        tile = input.with_layout(input.layout.replace_dim(1, input.layout.dim(1)[0].bare()))
        local = tile.local
        if ways.taken is not None and not input.layout.is_cut(1):
            low, high = ways.taken.owned(input.layout.piece(ways.taken, input.coordinate))
            local = comm.use_in_parts(local, input.mesh, ways.taken.axes).narrow(1, low, high - low)
        tile = Tile(local, tile.layout.replace_dim(1, whole_dim(local.shape[1])), tile.mesh)
        to = plan_stencil(tile.layout, plan.along, tile.coordinate, "convolution")
        held = out.replace_dim(1, whole_dim(ways.out.size))
        sums = Tile(_convolve_local(tile, w, None, ConvPlan(conv, plan.along, to, held)), held, input.mesh)
        if not ways.taken:
            # two ranks that hold a row would both add to it, so a halo, which saves the exchange of rows, ends here
            sums, out = sums.owned(), out.without_halo()
        # a weight cut by its input channels: y is whole, so one all-reduce instead of a reduce-scatter and a gather
        y = (
            comm.sum_parts(sums.local, input.mesh, ways.taken.axes)
            if ways.taken
            else add_partial_sums(sums.local, out, input)
        )
        return Tile(y if b is None else y + b.to(y.dtype).reshape(-1, *[1] * conv.dims), out, input.mesh)
    if not input.layout.is_cut(1):
        local = enter_in_parts(input, ways.out.axes)
        low, high = ways.needs[input.layout.piece(ways.out, input.coordinate)]
        local = local if high - low == local.shape[1] else local.narrow(1, low, high - low)
        input = Tile(local, input.layout.replace_dim(1, whole_dim(high - low)), input.mesh)
    to = plan_stencil(input.layout, plan.along, input.coordinate, "convolution")
    to = replace(to, target=ways.input(to.target))
    return Tile(_convolve_local(input, w, b, replace(plan, conv=conv, to=to)), out, input.mesh)


def _convolve_local(input: Tile, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    """Return this rank's rows of the result, with its own part of the weight."""
    x, weight, bias = _autocast_operands(input.local, weight, bias)
    shape, layout, mesh = plan.out.local_shape(input.coordinate), input.layout, input.mesh
    conv, to = plan.conv, plan.to
    is_empty = 0 in shape or not weight.numel()  # without input channels torch makes no output
    needs_channels = layout.is_cut(1)  # channels and rows of other ranks come in one exchange
    if not (to.derived or needs_channels or is_empty):
        return _torch_convolution(x, weight, bias, conv, [p for p, _ in conv.padding], conv.output_padding)
    if not (conv.transposed or needs_channels or is_empty):
        halo = plan_halo(layout, plan.along, input.coordinate)
        if halo is not None:
            again = partial(_convolve_gathered, plan, layout, mesh)
            return convolve_with_halo(x, weight, bias, HaloConvolution(conv, halo, layout, mesh, again))
    if is_empty:
        channels = shape[1]  # this rank's channels, to which its part of the bias belongs
        if bias is not None and bias.shape != (channels,):
            raise RuntimeError(f"a convolution makes {channels} channels, but its bias has shape {tuple(bias.shape)}")
        return empty_result(shape, gather_input_rows(Tile(x, layout, mesh), to), weight, bias, saved=2)
    return _convolve_gathered(plan, layout, mesh, x, weight, bias)


def _convolve_gathered(
    plan: ConvPlan, layout: Layout, mesh: DeviceMesh, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    spread = _convolve_transposed if plan.conv.transposed else _convolve_padded_rows
    return spread(gather_input_rows(Tile(x, layout, mesh), plan.to), weight, bias, plan)


def _check_convolution(input: Tile, weight: Tensor, conv: ConvGeometry) -> None:
    if not isinstance(input, Tile) or isinstance(weight, Tile):
        raise ShardingError("a convolution takes a Tile and a plain weight: make the input a Tile with jigsaw.shard")
    if input.ndim not in (conv.dims + 1, conv.dims + 2):
        raise ShardingError(
            f"a {conv.dims}-d convolution of a Tile of shape {tuple(input.shape)}: it needs {conv.dims + 1} or "
            f"{conv.dims + 2} dims"
        )
    channels = input.shape[input.ndim - conv.dims - 1]
    expected = weight.shape[0] if conv.transposed else weight.shape[1] * conv.groups
    if channels != expected:
        raise ShardingError(
            f"a convolution with weight {tuple(weight.shape)} and groups={conv.groups} takes {expected} channels, "
            f"but the Tile of shape {tuple(input.shape)} has {channels}"
        )


def _autocast_operands(x: Tensor, *others: Tensor | None) -> list[Any]:
    """Return operands in the dtype of autocast, where it is on, before an exchange, which is then smaller."""
    operands = [x, *others]
    if not torch.is_autocast_enabled(x.device.type):
        return operands
    to = torch.get_autocast_dtype(x.device.type)
    return [o.to(to) if o is not None and o.is_floating_point() and o.dtype != torch.float64 else o for o in operands]


def _torch_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: ConvGeometry,
    padding: Sequence[int],
    output_padding: Sequence[int],
) -> Tensor:
    return torch.convolution(
        x, weight, bias, conv.stride, padding, conv.dilation, conv.transposed, output_padding, conv.groups
    )


def _convolve_padded_rows(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    conv, gathered = plan.conv, {dim - 2 for dim, _, _ in plan.to.derived}
    padding = [0 if i in gathered else low for i, (low, _) in enumerate(conv.padding)]
    return _torch_convolution(x, weight, bias, conv, padding, conv.output_padding)


def _convolve_transposed(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvPlan) -> Tensor:
    """Return a transposed convolution of the needed rows, cropped to the output rows of this rank."""
    conv = plan.conv
    padding, extra = [low for low, _ in conv.padding], list(conv.output_padding)
    crops: list[tuple[int, int, int]] = []
    for dim, derived, piece in plan.to.derived:
        i = dim - 2
        rule = conv.rule(i, weight.shape[dim])
        assert isinstance(rule, TransposedWindow)
        (start, stop), need = derived.out.held[piece], derived.needs[piece]
        below = start - (need[0] * rule.stride - rule.crop)
        above = (need[1] - need[0] - 1) * rule.stride + rule.span - below - (stop - start)
        # the op crops both sides alike, then adds fewer rows than a stride or a dilation above
        low, more = below, below - above
        if more >= max(rule.stride, rule.dilation):
            low = max(above, 0)
            more = low - above
        padding[i], extra[i] = low, max(more, 0)
        if (low, low - extra[i]) != (below, above):
            crops.append((dim, below - low, stop - start))
    y = _torch_convolution(x, weight, bias, conv, padding, extra)
    for dim, start, length in crops:
        y = y.narrow(dim, start, length)
    return y


# -- torch's functions ------------------------------------------------------------------------------------------------


def conv_as_torch(
    input: Tile,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: ConvSize = 1,
    padding: str | ConvSize = 0,
    dilation: ConvSize = 1,
    groups: int = 1,
    wrap: bool = False,
) -> Tile:
    """Run `convolve` with the arguments of `torch.conv2d`, for any number of dims; with `wrap`, padding is circular."""
    stride, padding, dilation = _hashable(stride, padding, dilation)
    return convolve(input, weight, bias, read_convolution(weight.shape[2:], stride, padding, dilation, groups, wrap))


def _hashable(*values: Any) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in values]


def conv_transpose_as_torch(
    input: Tile,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: ConvSize = 1,
    padding: ConvSize = 0,
    output_padding: ConvSize = 0,
    groups: int = 1,
    dilation: ConvSize = 1,
) -> Tile:
    """Run `convolve` with the arguments of `torch.conv_transpose2d`, for any number of spatial dims."""
    stride, padding, output_padding, dilation = _hashable(stride, padding, output_padding, dilation)
    conv = read_transposed_convolution(weight.ndim - 2, stride, padding, output_padding, groups, dilation)
    return convolve(input, weight, bias, conv)


def _handler_of_dims(dims: int, function: Callable[..., Tile], name: str) -> Callable[..., Tile]:
    def handler(input: Tile, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tile:
        if weight.ndim != dims + 2:
            raise ShardingError(f"{name} needs a weight of {dims + 2} dims, got shape {tuple(weight.shape)}")
        return function(input, weight, bias, *args, **kwargs)

    handler.__name__ = name
    return handler


implements_torch(torch.conv1d)(_handler_of_dims(1, conv_as_torch, "conv1d"))
implements_torch(torch.conv2d)(_handler_of_dims(2, conv_as_torch, "conv2d"))
implements_torch(torch.conv3d)(_handler_of_dims(3, conv_as_torch, "conv3d"))
implements_torch(torch.conv_transpose1d)(_handler_of_dims(1, conv_transpose_as_torch, "conv_transpose1d"))
implements_torch(torch.conv_transpose2d)(_handler_of_dims(2, conv_transpose_as_torch, "conv_transpose2d"))
implements_torch(torch.conv_transpose3d)(_handler_of_dims(3, conv_transpose_as_torch, "conv_transpose3d"))


# -- modules ----------------------------------------------------------------------------------------------------------


class _CutConv(CutLayer):
    """A convolution of torch.nn whose weight and bias are cut along `axis`, as the channels of its result are."""

    def __init__(self, *args: Any, mesh: DeviceMesh, axis: str | Sequence[str] = CHANNEL_AXIS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self  # this class is mixed into a layer of torch
        transposed = isinstance(self, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        if transposed and layer.groups > 1:
            raise ShardingError(f"{type(self).__name__} with groups={layer.groups} cannot be cut; use torch.nn's")
        layer.weight = cut_parameter(layer.weight.detach(), mesh, axis, int(transposed))
        if layer.bias is not None:
            layer.bias = cut_parameter(layer.bias.detach(), mesh, axis)


class _CutPaddedConv(_CutConv):
    def forward(self, input: Any) -> Any:
        layer: Any = self
        if isinstance(input, Tile) and layer.padding_mode == "circular":
            options = layer.stride, layer.padding, layer.dilation, layer.groups
            return conv_as_torch(input, layer.weight, layer.bias, *options, wrap=True)
        return super().forward(input)


class Conv1d(_CutPaddedConv, nn.Conv1d):
    """`torch.nn.Conv1d` whose output channels are cut along `axis` of `mesh`.

    The other arguments are torch's.  Each rank holds 1/P of the weight and the bias, their gradients and optimizer
    state, as DTensors with torch's names and full shapes. The sizes need not divide.  On a mesh without that axis it is
    torch's layer.  Circular padding keeps a periodic halo, so that several layers can live on one.

    *Shapes*: input ``[B, in, ...]``, whole or with channels cut along `axis`, output ``[B, out, ...]`` cut along it.
    Weight ``[out, in / groups, ...]``, per rank ceil(out / P) of its rows (the last ranks may have fewer).
    *Sends*: see `jigsaw.nn.stencils.conv.convolve`; once, when it is made, the parts of the first rank's initial
    values.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.Conv1d(3, 8, 3, padding=1, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 16), mesh, (None,) * 3)).shape
    torch.Size([2, 8, 16])
    """


class Conv2d(_CutPaddedConv, nn.Conv2d):
    """`torch.nn.Conv2d` whose output channels are cut along `axis` of `mesh`; all else as `Conv1d`.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.Conv2d(3, 8, 3, padding=1, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None,) * 4)).shape
    torch.Size([2, 8, 9, 16])
    """


class Conv3d(_CutPaddedConv, nn.Conv3d):
    """`torch.nn.Conv3d` whose output channels are cut along `axis` of `mesh`; all else as `Conv1d`.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.Conv3d(3, 8, 3, padding=1, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 8, 9, 16), mesh, (None,) * 5)).shape
    torch.Size([2, 8, 8, 9, 16])
    """


class ConvTranspose1d(_CutConv, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` whose output channels are cut along `axis` of `mesh`.

    What each rank holds and what is sent: as `Conv1d`.

    *Shapes*: input ``[B, in, ...]``, output ``[B, out, ...]``; weight ``[in, out, ...]``, per rank ceil(out / P) of its
    second dim.
    *Raises*: `ShardingError` for groups.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.ConvTranspose1d(3, 8, 2, stride=2, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 16), mesh, (None,) * 3)).shape
    torch.Size([2, 8, 32])
    """


class ConvTranspose2d(_CutConv, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` whose output channels are cut along `axis` of `mesh`; all else as `ConvTranspose1d`.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.ConvTranspose2d(3, 8, 2, stride=2, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None,) * 4)).shape
    torch.Size([2, 8, 18, 32])
    """


class ConvTranspose3d(_CutConv, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` whose output channels are cut along `axis` of `mesh`; all else as `ConvTranspose1d`.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.ConvTranspose3d(3, 8, 2, stride=2, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 8, 9, 16), mesh, (None,) * 5)).shape
    torch.Size([2, 8, 16, 18, 32])
    """
