"""Convolutions and transposed convolutions in 1, 2 and 3 dims: torch's functions, and modules, on tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.interval import Rule, Spread, Window
from jigsaw.layout import Layout, ShardingError, whole
from jigsaw.nn.channels import Channels, add_up, channels_of, weight_of
from jigsaw.nn.halo_conv import Convolution, halo_convolution, halo_of
from jigsaw.nn.stencil import Along, Step, gather, nothing, per_dim, step
from jigsaw.nn.weights import cut_parameter, local_weight
from jigsaw.tile import Tile, implements

Ints = int | Sequence[int]


@dataclass(frozen=True)
class Sliding:
    """How a convolution slides, an entry a spatial dim; `padding` is (below, above)."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool
    wrap: bool = False

    @property
    def dims(self) -> int:
        return len(self.stride)

    def rule(self, i: int, kernel: int) -> Rule:
        """The interval rule along spatial dim `i`."""
        low, high = self.padding[i]
        if self.transposed:
            return Spread(kernel, self.stride[i], self.dilation[i], low, self.output_padding[i])
        return Window(kernel, self.stride[i], self.dilation[i], low, high)

    def even(self, i: int) -> bool:
        """Whether the plain op can pad spatial dim `i` itself."""
        return self.padding[i][0] == self.padding[i][1] and not self.wrap


@lru_cache(maxsize=4096)
def _along(first: int, kernel: tuple[int, ...], how: Sliding) -> tuple[Along, ...]:
    return tuple(Along(first + i, how.rule(i, k), how.wrap, always=not how.even(i)) for i, k in enumerate(kernel))


def convolve(input: Tile, weight: Tensor, bias: Tensor | None, how: Sliding) -> Tile:
    """y = `input` convolved with `weight`, plus `bias`; the functions and modules of this file are its names.

    *Shapes*: [batch, channel, *space] or [channel, *space], global as torch; per rank a spatial dim that is cut at p is
    cut at ceil(p / stride) afterwards (about p x stride, transposed), so multiples of the stride stay aligned.  What a
    halo makes computable is computed and held.
    *Sends*: forward the rows of windows that reach into a neighbour, one message each; backward their gradients.
    Nothing where a halo holds them.  Where P ranks cut the channels of `input`, each sends (P-1)/P of the smaller of
    the input and the output, forward and backward; where only the weight is cut, nothing, and backward an all-reduce of
    the gradient of `input`.
    *Raises*: `ShardingError` for channels that do not fit, windows larger than the padded input, flattened dims.
    """
    _check(input, weight, how)
    if input.ndim == how.dims + 1:
        batched = Tile(input.local.unsqueeze(0), input.layout.insert(0), input.mesh)
        y = convolve(batched, weight, bias, how)
        return Tile(y.local.squeeze(0), y.layout.drop((0,)), y.mesh)
    if not input.layout.is_cut(1) and input.layout.has_halo:
        input = input.with_layout(input.layout.replace_dim(1, whole(input.shape[1])))  # a halo of channels is dropped
    along = _along(2, tuple(weight.shape[2:]), how)
    to = step(input.layout, along, input.coordinate, "convolution")
    made = weight.shape[1] * how.groups if how.transposed else weight.shape[0]
    out = to.out.replace_dim(1, whole(made))
    ways = channels_of(input, weight, how.groups, how.transposed, (math.prod(input.shape), math.prod(out.shape)))
    if ways is None:
        local = None if bias is None else local_weight(bias, input, out)
        return Tile(_run(input, local_weight(weight, input, out), local, how, along, out), out, input.mesh)
    return _with_cut_channels(input, weight, bias, how, along, out.replace_dim(1, ways.out), ways)


def _with_cut_channels(
    input: Tile,
    weight: Tensor,
    bias: Tensor | None,
    how: Sliding,
    along: tuple[Along, ...],
    out: Layout,
    ways: Channels,
) -> Tile:
    """`convolve`, where the input's channels or the weight's output channels are cut."""
    w, b, groups = weight_of(ways, input, weight, bias, out, how.groups, how.transposed)
    how = replace(how, groups=groups)
    if ways.row:
        mine = input.owned() if input.layout.dim(1)[0].has_halo else input
        mine = Tile(mine.local, mine.layout.replace_dim(1, whole(mine.local.shape[1])), mine.mesh)
        sums = _run(mine, w, None, how, along, out.replace_dim(1, whole(ways.out.size)))
        y = add_up(sums, out, input)
        return Tile(y if b is None else y + b.to(y.dtype).reshape(-1, *[1] * how.dims), out, input.mesh)
    if not input.layout.is_cut(1):
        local = comm.enter(input.local, input.mesh, ways.out.axes)
        low, high = ways.needs[input.layout.piece(ways.out, input.coordinate)]
        local = local if high - low == local.shape[1] else local.narrow(1, low, high - low)
        input = Tile(local, input.layout.replace_dim(1, whole(high - low)), input.mesh)
    return Tile(_run(input, w, b, how, along, out, ways), out, input.mesh)


def _run(
    input: Tile,
    weight: Tensor,
    bias: Tensor | None,
    how: Sliding,
    along: tuple[Along, ...],
    out: Layout,
    ways: Channels | None = None,
) -> Tensor:
    """This rank's rows of the result, with its own part of the weight; `ways` says which channels it needs."""
    x, weight, bias = _narrow(input.local, weight, bias)
    shape, layout, mesh = out.local_shape(input.coordinate), input.layout, input.mesh
    is_empty = 0 in shape or not weight.numel()  # of no input channel torch makes none
    to = step(layout, along, input.coordinate, "convolution")
    if ways is not None and layout.is_cut(1):
        to = replace(to, target=ways.input(to.target))
    elif not to.derived and not is_empty:
        return _plain(x, weight, bias, how, [p for p, _ in how.padding], how.output_padding)
    elif not how.transposed and not is_empty:
        halo = halo_of(layout, along, input.coordinate)
        if halo is not None:
            op = Convolution(how.stride, how.dilation, how.groups, partial(_gathered, layout, mesh, to, how))
            return halo_convolution(x, weight, bias, op, halo, layout, mesh)
    if is_empty:
        return nothing(shape, gather(Tile(x, layout, mesh), to), weight, bias)
    return _gathered(layout, mesh, to, how, x, weight, bias)


def _gathered(
    layout: Layout, mesh: DeviceMesh, to: Step, how: Sliding, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The convolution of rows that one exchange has assembled, padding included."""
    spread = _spread if how.transposed else _slide
    return spread(gather(Tile(x, layout, mesh), to), weight, bias, how, to)


def _check(input: Tile, weight: Tensor, how: Sliding) -> None:
    if not isinstance(input, Tile) or isinstance(weight, Tile):
        raise ShardingError("a convolution takes a Tile and a plain weight: make the input a Tile with jigsaw.shard")
    if input.ndim not in (how.dims + 1, how.dims + 2):
        raise ShardingError(
            f"a {how.dims}-d convolution of a Tile of shape {tuple(input.shape)}: it needs {how.dims + 1} or "
            f"{how.dims + 2} dims"
        )
    channels = input.shape[input.ndim - how.dims - 1]
    expected = weight.shape[0] if how.transposed else weight.shape[1] * how.groups
    if channels != expected:
        raise ShardingError(
            f"a convolution with weight {tuple(weight.shape)} and groups={how.groups} takes {expected} channels, "
            f"but the Tile of shape {tuple(input.shape)} has {channels}"
        )


def _narrow(x: Tensor, *others: Tensor | None) -> list[Any]:
    """Operands in the dtype of autocast, where it is on: before an exchange, which is then smaller."""
    operands = [x, *others]
    if not torch.is_autocast_enabled(x.device.type):
        return operands
    to = torch.get_autocast_dtype(x.device.type)
    return [o.to(to) if o is not None and o.is_floating_point() and o.dtype != torch.float64 else o for o in operands]


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: Sliding, padding: Sequence[int], output_padding: Sequence[int]
) -> Tensor:
    return torch.convolution(
        x, weight, bias, how.stride, padding, how.dilation, how.transposed, output_padding, how.groups
    )


def _slide(x: Tensor, weight: Tensor, bias: Tensor | None, how: Sliding, to: Step) -> Tensor:
    """A convolution of rows that include their padding; the op pads only the dims that nothing cuts."""
    gathered = {dim - 2 for dim, _, _ in to.derived}
    padding = [0 if i in gathered else low for i, (low, _) in enumerate(how.padding)]
    return _plain(x, weight, bias, how, padding, how.output_padding)


def _spread(x: Tensor, weight: Tensor, bias: Tensor | None, how: Sliding, to: Step) -> Tensor:
    """A transposed convolution of the needed rows, cropped to the output rows of this rank."""
    padding, extra = [low for low, _ in how.padding], list(how.output_padding)
    crops: list[tuple[int, int, int]] = []
    for dim, derived, piece in to.derived:
        i = dim - 2
        rule = how.rule(i, weight.shape[dim])
        assert isinstance(rule, Spread)
        (start, stop), need = derived.out.held[piece], derived.needs[piece]
        below = start - (need[0] * rule.stride - rule.crop)
        above = (need[1] - need[0] - 1) * rule.stride + rule.span - below - (stop - start)
        # the op crops alike on both sides, then adds fewer rows than a stride or a dilation above
        low, more = below, below - above
        if more >= max(rule.stride, rule.dilation):
            low = max(above, 0)
            more = low - above
        padding[i], extra[i] = low, max(more, 0)
        if (low, low - extra[i]) != (below, above):
            crops.append((dim, below - low, stop - start))
    y = _plain(x, weight, bias, how, padding, extra)
    for dim, start, length in crops:
        y = y.narrow(dim, start, length)
    return y


# -- torch's functions ------------------------------------------------------------------------------------------------


def _padding(
    padding: str | Ints, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if not isinstance(padding, str):
        return tuple((p, p) for p in per_dim(padding, len(kernel), "padding"))
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding != "same":
        raise ShardingError(f"padding={padding!r}: use 'same', 'valid' or integers")
    if any(s != 1 for s in stride):
        raise ShardingError(f"padding='same' needs stride 1, got {tuple(stride)}")
    both = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple((b // 2, b - b // 2) for b in both)


def conv(
    input: Tile,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: str | Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    wrap: bool = False,
) -> Tile:
    """`convolve` with the arguments of `torch.conv2d`, for any number of spatial dims; with `wrap`, padding is
    circular.
    """
    kernel = weight.shape[2:]
    dims = len(kernel)
    strides, dilations = per_dim(stride, dims, "stride"), per_dim(dilation, dims, "dilation")
    pads = _padding(padding, kernel, strides, dilations)
    return convolve(input, weight, bias, Sliding(strides, pads, dilations, (0,) * dims, groups, False, wrap))


def conv_transpose(
    input: Tile,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tile:
    """`convolve` with the arguments of `torch.conv_transpose2d`, for any number of spatial dims."""
    dims = weight.ndim - 2
    strides, dilations = per_dim(stride, dims, "stride"), per_dim(dilation, dims, "dilation")
    extra, pads = per_dim(output_padding, dims, "output_padding"), per_dim(padding, dims, "padding")
    for e, s, d in zip(extra, strides, dilations, strict=True):
        if not 0 <= e < max(s, d):
            raise ShardingError(f"output_padding={e} must be smaller than stride {s} or dilation {d}")
    return convolve(input, weight, bias, Sliding(strides, tuple((p, p) for p in pads), dilations, extra, groups, True))


def _of_dims(dims: int, function: Callable[..., Tile], name: str) -> Callable[..., Tile]:
    def handler(input: Tile, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tile:
        if weight.ndim != dims + 2:
            raise ShardingError(f"{name} needs a weight of {dims + 2} dims, got shape {tuple(weight.shape)}")
        return function(input, weight, bias, *args, **kwargs)

    handler.__name__ = name
    return handler


implements(torch.conv1d)(_of_dims(1, conv, "conv1d"))
implements(torch.conv2d)(_of_dims(2, conv, "conv2d"))
implements(torch.conv3d)(_of_dims(3, conv, "conv3d"))
implements(torch.conv_transpose1d)(_of_dims(1, conv_transpose, "conv_transpose1d"))
implements(torch.conv_transpose2d)(_of_dims(2, conv_transpose, "conv_transpose2d"))
implements(torch.conv_transpose3d)(_of_dims(3, conv_transpose, "conv_transpose3d"))


# -- modules ----------------------------------------------------------------------------------------------------------


class _Cut(nn.Module):
    """A convolution whose weight and bias are cut along `axis`: y is cut along it as the weight's output channels are.

    The arguments are those of torch.nn's layer of the same name.  Each rank holds 1/P of the weight, its gradient and
    its optimizer state, as a DTensor with torch's names and full shapes; the sizes need not divide.  On a mesh without
    that axis it is torch's layer.  Circular padding keeps a periodic halo, so that several layers can live on one.

    *Shapes*: weight [out, in / groups, ...], per rank ceil(out / P) of the output channels; x whole or cut along
    `axis`.
    *Sends*: see `convolve`; once, when it is made, the parts of the first rank's initial values.
    *Raises*: `ShardingError` for a transposed layer with groups.
    """

    def __init__(self, *args: Any, mesh: DeviceMesh, axis: str | Sequence[str] = "channel", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self  # torch's layer, of which this class is a part
        transposed = isinstance(self, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        if transposed and layer.groups > 1:
            raise ShardingError(f"{type(self).__name__} with groups={layer.groups} cannot be cut; use torch.nn's")
        layer.weight = cut_parameter(layer.weight.detach(), mesh, axis, int(transposed))
        if layer.bias is not None:
            layer.bias = cut_parameter(layer.bias.detach(), mesh, axis)


class _Sliding(_Cut):
    def _conv_forward(self, input: Any, weight: Tensor, bias: Tensor | None) -> Any:
        layer: Any = self
        if isinstance(input, Tile) and layer.padding_mode == "circular":
            return conv(input, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups, wrap=True)
        plain: Any = super()
        return plain._conv_forward(input, weight, bias)


class Conv1d(_Sliding, nn.Conv1d):
    """`torch.nn.Conv1d` whose output channels are cut along `axis` of `mesh`."""


class Conv2d(_Sliding, nn.Conv2d):
    """`torch.nn.Conv2d` whose output channels are cut along `axis` of `mesh`."""


class Conv3d(_Sliding, nn.Conv3d):
    """`torch.nn.Conv3d` whose output channels are cut along `axis` of `mesh`."""


class ConvTranspose1d(_Cut, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` whose output channels are cut along `axis` of `mesh`."""


class ConvTranspose2d(_Cut, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` whose output channels are cut along `axis` of `mesh`."""


class ConvTranspose3d(_Cut, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` whose output channels are cut along `axis` of `mesh`."""
