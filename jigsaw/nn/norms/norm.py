"""Normalization with exact global statistics: layer, group, instance, batch and RMS norm, whatever is cut.

The statistics are those of the whole tensor, in float32 or better, by two passes.  All ranks that share them hold the
same values; so it is with the running statistics of batch norm.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.arange(18.0).reshape(1, 2, 9), mesh, (None, None, "lat"))
>>> round(torch.nn.GroupNorm(1, 2)(tile).square().mean().item(), 3)
1.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS
from jigsaw.geometry.layout import MeshCoordinate
from jigsaw.nn.norms.standardize import is_whole_along, owned_along, standardize_tile
from jigsaw.nn.weights import CALL_THE_MODEL, CutLayer, StoredWeight, cut_parameter, local_weight, weight_layout
from jigsaw.ops.meeting.plain_operands import cut_entered_tensor, plain_operand
from jigsaw.ops.reductions import elements_per_value, reducing_axes
from jigsaw.ops.whole_strides import has_strides, is_whole_contiguous, suggested_format
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory
from jigsaw.torch_internals.placements import is_dtensor


def _widened_tile(tile: Tile) -> Tile:
    return tile.float() if tile.dtype in (torch.bfloat16, torch.float16) else tile


def _has_plain_weights(*values: Any) -> bool:
    return not any(type(x) is not nn.Parameter and (isinstance(x, Tile) or is_dtensor(x)) for x in values)


def _last_dims(name: str, input: Tile, shape: Sequence[int]) -> tuple[int, ...]:
    first = input.ndim - len(shape)
    if tuple(input.shape[first:]) != tuple(shape):
        raise ShardingError(f"{name} over {tuple(shape)}: the last dims of the Tile are {tuple(input.shape[first:])}")
    return tuple(range(first, input.ndim))


def _weight_parts(input: Tile, *values: Any) -> list[Tensor | None]:
    return [None if v is None else plain_operand(v, input) for v in values]


def _norm_operand(value: Tensor | None, shape: Sequence[int], input: Tile) -> Tensor | None:
    """Return a weight or bias as this rank's operand, broadcast to the last dims of the local tensor.

    Raises: `ShardingError` for a DTensor that is not cut as the input is.
    """
    if not is_dtensor(value):
        if value is None:
            return None
        # make it an operand before it is reshaped, while it is still a leaf
        return cut_entered_tensor(plain_operand(value, input).reshape(tuple(shape)), input, input.layout)
    stored, last = weight_layout(value, input), range(input.ndim - len(shape), input.ndim)

    def at(coord: MeshCoordinate) -> list[int]:
        return [1 if n == 1 else input.layout.local_shape(coord)[d] for d, n in zip(last, shape, strict=True)]

    if any(math.prod(at(c)) != math.prod(stored.local_shape(c)) for c in input.layout.coords()):
        raise ShardingError(
            f"a norm whose weight is cut as {stored} takes a Tile whose channels are cut so, not {input.layout}; "
            f"redistribute the tile, or use torch.nn's layer with its whole weight{CALL_THE_MODEL}"
        )
    return local_weight(value, input, input.layout).reshape(at(input.coordinate))


def _in_memory_order(input: Tile, keeps_last: bool = False) -> Tile:
    """Return the input in the memory order of torch's result, contiguous or with channels last where it `keeps_last`.

    A net may `view` that, where it could not the input.
    """
    if input.local.is_contiguous() and not has_strides(input):
        return input
    memory_format = suggested_format(input) if keeps_last else torch.contiguous_format
    return input if is_whole_contiguous(input, memory_format) else input.contiguous(memory_format=memory_format)


def _standardize_and_scale(
    input: Tile, dims: Sequence[int], eps: float, weight: Any, bias: Any, shape: Sequence[int]
) -> tuple[Tile, Tensor, Tensor]:
    wide = _widened_tile(input)
    if isinstance(weight, Tile) or isinstance(bias, Tile):
        y, mean, squares = standardize_tile(wide, dims, eps)
        out = Tile(y, input.layout, input.mesh)
        out = out if weight is None else out * weight.reshape(tuple(shape))
        out = out if bias is None else out + bias.reshape(tuple(shape))
        return out.to(input.dtype), mean, squares
    y, mean, squares = standardize_tile(
        wide, dims, eps, _norm_operand(weight, shape, input), _norm_operand(bias, shape, input)
    )
    return Tile(y.to(input.dtype), input.layout, input.mesh), mean, squares


@implements_torch(F.layer_norm, torch.layer_norm, either=("weight", "bias"))
def layer_norm(
    input: Tile,
    normalized_shape: Sequence[int],
    weight: StoredWeight | None = None,
    bias: StoredWeight | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tile:
    """Return y = (x - mean) / sqrt(var + eps) * weight + bias over the last dims, cut or not (arXiv 1607.06450).

    *Shapes*: input and output alike, globally and per rank; weight and bias are whole, of `normalized_shape`. *Sends*:
    nothing when the last dims are whole; else two all-reduces of one value a position, and two backward. *Raises*:
    `ShardingError` when `normalized_shape` is not that of the last dims.
    """
    dims = _last_dims("layer_norm", input, normalized_shape)
    if is_whole_along(input, dims) and _has_plain_weights(weight, bias):
        w, b = _weight_parts(input, weight, bias)
        return Tile(F.layer_norm(input.local, list(normalized_shape), w, b, eps), input.layout, input.mesh)
    return _standardize_and_scale(_in_memory_order(input), dims, eps, weight, bias, normalized_shape)[0]


@implements_torch(F.rms_norm, torch.rms_norm, either=("weight",))
def rms_norm(
    input: Tile, normalized_shape: Sequence[int], weight: StoredWeight | None = None, eps: float | None = None
) -> Tile:
    """Return y = x / sqrt(mean x^2 + eps) * weight (arXiv 1910.07467); *Sends*: as `layer_norm`, but once."""
    dims = _last_dims("rms_norm", input, normalized_shape)
    if is_whole_along(input, dims) and _has_plain_weights(weight):
        (w,) = _weight_parts(input, weight)
        return Tile(F.rms_norm(input.local, list(normalized_shape), w, eps), input.layout, input.mesh)
    wide = _widened_tile(input)
    axes = reducing_axes(wide.layout, dims)
    squares = owned_along(wide, dims).local.square().sum(dims, keepdim=True)
    power = comm.sum_parts(squares, input.mesh, axes, (wide.layout, dims)) / elements_per_value(wide, dims)
    # torch's own default is that of the type that it computes in
    scale = torch.rsqrt(power + (torch.finfo(wide.dtype).eps if eps is None else eps))
    out = wide.local * comm.use_in_parts(scale, input.mesh, axes)
    if isinstance(weight, Tile):
        return (Tile(out, input.layout, input.mesh) * weight).to(input.dtype)
    operand = _norm_operand(weight, normalized_shape, input)
    return Tile((out if operand is None else out * operand).to(input.dtype), input.layout, input.mesh)


@implements_torch(F.group_norm, torch.group_norm, either=("weight", "bias"))
def group_norm(
    input: Tile,
    num_groups: int,
    weight: StoredWeight | None = None,
    bias: StoredWeight | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tile:
    """Return y = (x - mean) / sqrt(var + eps) * weight + bias over a group of channels and all positions.

    *Shapes*: ``[batch, channel, *space]``, cut anywhere; channels may be cut where the cut points fall on groups.
    *Sends*: two all-reduces of one value a sample and group, and two backward. *Raises*: `ShardingError` when channels
    do not divide into groups, or are cut inside a group. *Source*: Wu and He, arXiv 1803.08494.
    """
    channels = input.shape[1]
    if channels % num_groups:
        raise ShardingError(f"group_norm with num_groups={num_groups}: {channels} channels do not divide into groups")
    if input.numel() == input.shape[0] * channels and input.shape[0] * channels == num_groups:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    shape = (channels, *(1,) * (input.ndim - 2))
    if is_whole_along(input, range(1, input.ndim)) and _has_plain_weights(weight, bias):
        w, b = _weight_parts(input, weight, bias)
        # not `F.group_norm`, whose check would refuse a rank with a single value a group
        return Tile(torch.group_norm(input.local, num_groups, w, b, eps), input.layout, input.mesh)
    grouped: Tile = _in_memory_order(input, keeps_last=True).unflatten(1, (num_groups, channels // num_groups))
    by_group = (num_groups, channels // num_groups, *shape[1:])
    return _standardize_and_scale(grouped, range(2, grouped.ndim), eps, weight, bias, by_group)[0].flatten(1, 2)


@implements_torch(F.instance_norm, torch.instance_norm, either=("weight", "bias"))
def instance_norm(
    input: Tile,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: StoredWeight | None = None,
    bias: StoredWeight | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tile:
    """Run `group_norm` with one channel a group; running statistics are means over the batch, alike on every rank.

    *Sends*: as `group_norm`; with running statistics their values too, where the batch or the channels are cut.
    """
    shape = (input.shape[1], *(1,) * (input.ndim - 2))
    if not use_input_stats:
        return _by_running(input, running_mean, running_var, weight, bias, eps)
    dims = tuple(range(2, input.ndim))
    if elements_per_value(input, dims) == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {tuple(input.shape)}")
    y, mean, squares = _standardize_and_scale(_in_memory_order(input), dims, eps, weight, bias, shape)
    if running_mean is not None and running_var is not None:
        count = elements_per_value(input, dims)
        _update_running(running_mean, _statistic_tile(mean, input, dims).mean(0), momentum)
        _update_running(running_var, _statistic_tile(squares / (count - 1), input, dims).mean(0), momentum)
    return y


def _statistic_tile(value: Tensor, input: Tile, dims: Sequence[int]) -> Tile:
    layout = input.layout.drop(dims, keepdim=True)
    return Tile(value.detach(), layout, input.mesh).owned()


def _by_running(
    input: Tile,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: StoredWeight | None,
    bias: StoredWeight | None,
    eps: float,
) -> Tile:
    shape = (input.shape[1], *(1,) * (input.ndim - 2))
    wide = _widened_tile(input)
    centered = wide - cast(Tensor, running_mean).to(wide.dtype).reshape(shape)
    out = centered * torch.rsqrt(cast(Tensor, running_var).to(wide.dtype) + eps).reshape(shape)
    out = out if weight is None else out * weight.reshape(shape)
    return (out if bias is None else out + bias.reshape(shape)).to(input.dtype)


@implements_torch(F.batch_norm, torch.batch_norm, either=("weight", "bias"))
def batch_norm(
    input: Tile,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: StoredWeight | None = None,
    bias: StoredWeight | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tile:
    """Return y = (x - mean) / sqrt(var + eps) * weight + bias over the global batch and all positions.

    It is always synchronized (Ioffe and Szegedy, arXiv 1502.03167); running statistics are alike on every rank.

    *Shapes*: ``[batch, channel, *space]``, cut anywhere. *Sends*: in training, two all-reduces of one value a channel,
    and two backward. With running statistics of cut channels, also their values to every rank. In evaluation, nothing.
    """
    if input.ndim < 2:
        raise ShardingError(f"batch_norm of a Tile of shape {tuple(input.shape)}: it needs [batch, channel, *space]")
    shape = (input.shape[1], *(1,) * (input.ndim - 2))
    dims = (0, *range(2, input.ndim))
    if not training and (running_mean is None or running_var is None):
        raise ShardingError("batch_norm in evaluation needs running_mean and running_var")
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if value is not None and len(value) != input.shape[1]:  # torch checks this only for inputs with rows
            raise RuntimeError(f"{name} should contain {input.shape[1]} elements not {len(value)}")
    if (
        _has_plain_weights(weight, bias)
        and is_whole_along(input, (1,))
        and (not training or is_whole_along(input, dims))
    ):
        w, b = _weight_parts(input, weight, bias)
        y = F.batch_norm(input.local, running_mean, running_var, w, b, training, momentum, eps)
        return Tile(y, input.layout, input.mesh)
    if not training:
        return _by_running(input, running_mean, running_var, weight, bias, eps)
    count = elements_per_value(input, dims)
    if not count:  # an empty batch leaves the running statistics unchanged
        zeros = input.local.new_zeros(input.shape[1])
        return _by_running(input, zeros, zeros + 1, weight, bias, eps)
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    ordered = _in_memory_order(input, keeps_last=True)
    y, mean, squares = _standardize_and_scale(ordered, dims, eps, weight, bias, shape)
    if running_mean is not None and running_var is not None:
        _update_running(running_mean, _statistic_tile(mean, input, dims), momentum)
        _update_running(running_var, _statistic_tile(squares / (count - 1), input, dims), momentum)
    return y


def _update_running(running: Tensor, value: Tile, momentum: float) -> None:
    with torch.no_grad():
        running.lerp_(value.full_tensor().reshape(-1).to(running.dtype), momentum)


@implements_torch(F.normalize)
def l2_normalize(input: Tile, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tile:
    """Return ``x / max(|x|_p, eps)`` along `dim`, cut or not."""
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)


@implements_torch(F.local_response_norm)
def _local_response_norm(input: Tile, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tile:
    """Return y = x / (k + alpha mean x^2)^beta, the mean over `size` neighboring channels.

    *Sends*: along cut channels, the squares of the neighbor's channels that windows reach; backward, the same.
    *Raises*: `ShardingError` for cut channels of a tile of 5 dims.
    """
    if size < 1:
        raise ShardingError(f"local_response_norm of size={size} channels: it must be 1 or more")
    if not input.layout.is_cut(1):
        own = input.owned()
        # without rows torch returns the input itself
        rows = (
            in_own_memory(F.local_response_norm(own.local, size, alpha, beta, k), own) if input.numel() else own.local
        )
        return Tile(rows.to(torch.result_type(rows, 1.0)), own.layout, own.mesh)
    space = input.ndim - 2
    if space not in (1, 2):
        raise ShardingError("local_response_norm on cut channels of a Tile of 5 dims is not answered: cut another dim")
    squares = F.pad(input.square().unsqueeze(1), (*(0,) * 2 * space, size // 2, (size - 1) // 2))
    pool: Any = F.avg_pool2d if space == 1 else F.avg_pool3d
    means = pool(squares, (size, *(1,) * space), 1).squeeze(1)
    # the pool's cuts follow its windows' centers
    return input / (means.with_layout(input.layout.without_halo()) * alpha + k) ** beta


class _CutNorm(CutLayer):
    """A norm of torch.nn whose weight and bias are cut along `axis`, as the channels of its tiles are."""

    def __init__(self, *args: Any, mesh: DeviceMesh, axis: str | Sequence[str] = CHANNEL_AXIS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in list(self.named_parameters(recurse=False)):
            if value.ndim != 1:
                raise ShardingError(f"{type(self).__name__} with a weight of shape {tuple(value.shape)} cannot be cut")
            setattr(self, name, cut_parameter(value.detach(), mesh, axis))


class LayerNorm(_CutNorm, nn.LayerNorm):
    """`torch.nn.LayerNorm` whose weight and bias are cut along `axis` of `mesh`, for features that are cut so.

    The other arguments are torch's.  Each rank holds 1/P of the weight and the bias, as DTensors with torch's names and
    full shapes.  On a mesh without that axis it is torch's layer.

    *Shapes*: input and output ``[..., C]`` alike, globally and per rank; weight ``[C]``, per rank ceil(C / P).
    *Sends*: see `jigsaw.nn.norms.norm.layer_norm`.
    *Raises*: `ShardingError` for a `normalized_shape` of several dims.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.LayerNorm(8, mesh=mesh)
    >>> y = layer(jigsaw.shard(torch.randn(5, 8), mesh, (None, "channel")))
    >>> y.mean().abs().item() < 1e-6
    True
    """


class RMSNorm(_CutNorm, nn.RMSNorm):
    """`torch.nn.RMSNorm` whose weight is cut along `axis` of `mesh`, for features that are cut so.

    Arguments, shapes and errors: as `LayerNorm`.  *Sends*: see `jigsaw.nn.norms.norm.rms_norm`.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.RMSNorm(8, mesh=mesh)
    >>> layer(jigsaw.shard(torch.ones(1, 8), mesh, (None, "channel"))).local
    tensor([[1., 1., 1., 1., 1., 1., 1., 1.]], grad_fn=<MulBackward0>)
    """


class GroupNorm(_CutNorm, nn.GroupNorm):
    """`torch.nn.GroupNorm` whose weight and bias are cut along `axis` of `mesh`, for channels that are cut so.

    *Shapes*: input and output ``[B, C, ...]`` alike, globally and per rank; weight ``[C]``, per rank ceil(C / P).
    *Sends*, *Raises*: see `jigsaw.nn.norms.norm.group_norm`.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.GroupNorm(2, 8, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(2, 8, 9, 16), mesh, (None, "channel", None, None))).shape
    torch.Size([2, 8, 9, 16])
    """
