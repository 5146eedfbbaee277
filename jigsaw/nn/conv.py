"""Convolutions and transposed convolutions in 1, 2 and 3 dims: torch's functions, and modules, on tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw.interval import Rule, Spread, Window
from jigsaw.layout import ShardingError, whole
from jigsaw.nn.halo_conv import Convolution, halo_convolution, halo_of
from jigsaw.nn.stencil import Along, Step, gather, nothing, per_dim, step, touched
from jigsaw.pointwise import part
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
    return tuple(
        Along(first + i, how.rule(i, k), how.wrap, always=not how.even(i)) for i, k in enumerate(kernel)
    )


def convolve(input: Tile, weight: Tensor, bias: Tensor | None, how: Sliding) -> Tile:
    """y = `input` convolved with `weight`, plus `bias`; the functions and modules of this file are its names.

    *Shapes*: [batch, channel, *space] or [channel, *space], global as torch; per rank a spatial dim that is cut at p is cut at
    ceil(p / stride) afterwards (about p x stride, transposed), so multiples of the stride stay aligned.  What a halo makes
    computable is computed and held.
    *Sends*: forward the rows of windows that reach into a neighbour, of `input` and one message a neighbour; backward
    their gradients.  Nothing where a halo holds them.
    *Raises*: `ShardingError` for channels that do not fit, windows larger than the padded input, flattened dims.
    """
    _check(input, weight, how)
    if input.ndim == how.dims + 1:
        batched = Tile(input.local.unsqueeze(0), input.layout.insert(0), input.mesh)
        y = convolve(batched, weight, bias, how)
        return Tile(y.local.squeeze(0), y.layout.drop((0,)), y.mesh)
    kernel = tuple(weight.shape[2:])
    along = _along(2, kernel, how)
    to = step(input.layout, along, input.coordinate, "convolution")
    channels = weight.shape[1] * how.groups if how.transposed else weight.shape[0]
    out = to.out.replace_dim(1, whole(channels))
    x, weight, bias = _narrow(input.local, weight, bias)
    weight = part(weight, input, out)
    bias = None if bias is None else part(bias, input, out)
    if not to.derived:
        return Tile(_plain(x, weight, bias, how, [p for p, _ in how.padding], how.output_padding), out, input.mesh)
    shape = out.local_shape(input.coordinate)
    halo = None if how.transposed else halo_of(input.layout, along, input.coordinate)
    if halo is not None and 0 not in shape:

        def again(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _slide(gather(Tile(x, input.layout, input.mesh), to), weight, bias, how, to)

        op = Convolution(how.stride, how.dilation, how.groups, again)
        return Tile(halo_convolution(x, weight, bias, op, halo, input.layout, input.mesh), out, input.mesh)
    x = gather(Tile(x, input.layout, input.mesh), to)
    if 0 in shape:
        return Tile(nothing(shape, x, weight, bias), out, input.mesh)
    spread = _spread if how.transposed else _slide
    return Tile(spread(x, weight, bias, how, to), out, input.mesh)


def _check(input: Tile, weight: Tensor, how: Sliding) -> None:
    if not isinstance(input, Tile) or isinstance(weight, Tile):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardingError("a convolution takes a Tile and a plain weight: make the input a Tile with jigsaw.shard")
    if input.ndim not in (how.dims + 1, how.dims + 2):
        raise ShardingError(
            f"a {how.dims}-d convolution of a Tile of shape {tuple(input.shape)}: it needs {how.dims + 1} or {how.dims + 2} dims"
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


def _padding(padding: str | Ints, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
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
    """`convolve` with the arguments of `torch.conv2d`, for any number of spatial dims; with `wrap`, padding is circular."""
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
    def handler(input: Tile, weight: Tensor, *args: Any, **kwargs: Any) -> Tile:
        if weight.ndim != dims + 2:
            raise ShardingError(f"{name} needs a weight of {dims + 2} dims, got shape {tuple(weight.shape)}")
        return function(input, weight, *args, **kwargs)

    handler.__name__ = name
    return handler


implements(torch.conv1d)(_of_dims(1, conv, "conv1d"))
implements(torch.conv2d)(_of_dims(2, conv, "conv2d"))
implements(torch.conv3d)(_of_dims(3, conv, "conv3d"))
implements(torch.conv_transpose1d)(_of_dims(1, conv_transpose, "conv_transpose1d"))
implements(torch.conv_transpose2d)(_of_dims(2, conv_transpose, "conv_transpose2d"))
implements(torch.conv_transpose3d)(_of_dims(3, conv_transpose, "conv_transpose3d"))
