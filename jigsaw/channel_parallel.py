"""Weights cut along a mesh axis: each rank makes, or takes, its piece of a layer's channels.

A *column* layer holds rows of the weight: it makes a piece of the output channels, and the pieces are gathered, unless
the next layer takes them as they are.  A *row* layer holds columns: it takes a piece of the input channels, and the
products are summed.  The weights are DTensors with the names and full shapes that they had.  After Shoeybi et al.,
"Megatron-LM", arXiv 1909.08053.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from jigsaw import comm
from jigsaw.layout import Cut, ShardingError, cut_points, whole_dim
from jigsaw.mesh import flat_submesh
from jigsaw.ops.reductions import stack_along_axes
from jigsaw.tile import Tile

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# What may stand between a column and a row layer, for it works on each channel by itself.
_BETWEEN = (nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus)


@dataclass(frozen=True)
class ChannelRole:
    """What a layer does with its piece of the channels; a column layer may leave its output in pieces."""

    axis: str
    row: bool = False
    gather: bool = True


# -- tiles whose channels are cut -------------------------------------------------------------------------------------


def _channel_cut(size: int, axis: str, ranks: int) -> Cut:
    return Cut(size, cut_points(size, ranks), (axis,)) if ranks > 1 else whole_dim(size)


def _enter_channels(tile: Tile, axis: str) -> Tile:
    return Tile(comm.use_in_parts(tile.local, tile.mesh, (axis,)), tile.layout, tile.mesh)


def _gather_channels(tile: Tile, dim: int, axis: str) -> Tile:
    """The tile with whole channels, halo rows included; *Sends*: its piece to the others, backward nothing."""
    if tile.layout.dim_axes(dim) != (axis,):
        return tile
    local = torch.cat(stack_along_axes(tile.local, tile, (axis,)).unbind(0), dim)
    return Tile(local, tile.layout.replace_dim(dim, whole_dim(tile.shape[dim])), tile.mesh)


def _channel_piece(tile: Tile, dim: int, axis: str) -> Tile:
    """The local piece of the channels, as if it were all of them."""
    if tile.layout.dim_axes(dim) == (axis,):
        local = tile.local
    else:
        cut = _channel_cut(tile.shape[dim], axis, tile.layout.size_of(axis))
        start, stop = cut.owned(tile.layout.piece(cut, tile.coordinate))
        local = _enter_channels(tile, axis).local.narrow(dim, start, stop - start)
    return Tile(local, tile.layout.replace_dim(dim, whole_dim(local.shape[dim])), tile.mesh)


def _check_channels(tile: Tile, dim: int, axis: str) -> None:
    there = tile.layout.dim_axes(dim)
    if there not in ((), (axis,)) or any(axis in tile.layout.dim_axes(d) for d in range(tile.ndim) if d != dim):
        raise ShardingError(
            f"a layer whose weights are cut along {axis!r} takes channels (dim {dim}) that are whole or cut along "
            f"{axis!r}, which cuts no other dim, but the Tile is cut as {tile.layout.spec}; "
            f"use tile.redistribute, or another channel= in jigsaw.parallelize"
        )


# -- weights ----------------------------------------------------------------------------------------------------------


def _own_weight(weight: Tensor, ranks: int) -> Tensor:
    """This rank's piece of a cut weight, for an op whose result looks alike along the axis but is not.

    There every rank has the gradient of its own piece, all of it; `jigsaw.ops.pointwise.plain_operand` takes it
    for one of `ranks` equal shares, so it is scaled up.
    """
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if local.requires_grad:
        local.register_hook(partial(torch.mul, ranks))
    return local


def _whole_weight(weight: DTensor, tile: Tile) -> Tensor:
    """A cut weight, whole; *Sends*: its piece to the others along the axis, backward an all-reduce of the gradient."""
    axes, (placement,) = weight.device_mesh.mesh_dim_names, weight.placements
    assert axes is not None and isinstance(placement, Shard)
    pieces = stack_along_axes(weight.to_local(), tile, axes)
    return comm.use_in_parts(torch.cat(pieces.unbind(0), placement.dim), tile.mesh, axes)


# -- layers -----------------------------------------------------------------------------------------------------------

LayerFunction = Callable[[Any, Tensor, Tensor | None], Any]


def apply_in_pieces(
    role: ChannelRole, input: Tile, weight: Tensor, bias: Tensor | None, dim: int, function: LayerFunction
) -> Tile:
    """y = ``function(input, weight, bias)``, where `weight` is cut along ``role.axis``; `dim` has the channels of both.

    *Shapes*: global, those of `function`; per rank the channels of y are whole, or cut by a column that leaves them so.
    *Sends*: column, forward its piece of y to each of the others along the axis (if it gathers), backward an all-reduce
    of the gradient of `input`; row, forward an all-reduce of y, backward nothing.
    *Raises*: `ShardingError` when other axes cut the channels, or the axis cuts another dim.
    """
    axis, ranks = role.axis, input.layout.size_of(role.axis)
    _check_channels(input, dim, axis)
    if role.row:
        y = function(_channel_piece(input, dim, axis), _own_weight(weight, ranks), None)
        y = Tile(comm.sum_parts(y.local, y.mesh, (axis,)), y.layout, y.mesh)
        return y if bias is None else y + bias.to(y.dtype).reshape(-1, *[1] * (y.ndim - 1 - dim))
    x = _enter_channels(_gather_channels(input, dim, axis), axis)
    y = function(x, _own_weight(weight, ranks), None if bias is None else _own_weight(bias, ranks))
    y = Tile(y.local, y.layout.replace_dim(dim, _channel_cut(ranks * y.shape[dim], axis, ranks)), y.mesh)
    return _gather_channels(y, dim, axis) if role.gather else y


def _layer_function(layer: Any, output_size: Sequence[int] | None) -> LayerFunction:
    """The layer's own function of (input, weight, bias)."""
    if isinstance(layer, nn.Linear):
        return F.linear
    if isinstance(layer, _CONVOLUTIONS):
        return layer._conv_forward  # pyright: ignore[reportPrivateUsage]
    dims, how = len(layer.kernel_size), (layer.stride, layer.padding, layer.kernel_size)

    def transposed(x: Any, weight: Tensor, bias: Tensor | None) -> Any:
        extra = layer._output_padding(x, output_size, *how, dims, layer.dilation)
        function = getattr(F, f"conv_transpose{dims}d")
        return function(x, weight, bias, layer.stride, layer.padding, extra, layer.groups, layer.dilation)

    return transposed


def _forward_in_pieces(layer: Any, input: Any, output_size: Sequence[int] | None = None) -> Any:
    function, bias = _layer_function(layer, output_size), layer.bias
    if not isinstance(input, Tile):  # every rank computes it alike, so whole gradients are right
        bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
        return function(input, layer.weight.full_tensor(), bias)
    spatial = len(getattr(layer, "kernel_size", ()))
    return apply_in_pieces(layer.role, input, layer.weight, bias, input.ndim - 1 - spatial, function)


class CutMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose weights are cut; each rank has its heads, where there are enough for all."""

    def forward(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """As torch.

        *Sends*: as `jigsaw.nn.heads`; without a head for each rank, or with weights of their own for keys and values,
        its piece of the weights to the others, and backward an all-reduce of their gradients.
        """
        weight: Any = self.in_proj_weight
        run: Any = super().forward
        if isinstance(query, Tile) and isinstance(weight, DTensor) and weight.device_mesh.size() <= self.num_heads:
            return run(query, *args, **kwargs)
        with _gathered_weights(self, query):
            return run(query, *args, **kwargs)


@contextmanager
def _gathered_weights(module: nn.Module, input: Any) -> Generator[None]:
    held = [
        (owner, name, p)
        for owner in module.modules()
        for name, p in owner.named_parameters(recurse=False)
        if isinstance(p, DTensor)
    ]
    try:
        for owner, name, p in held:
            used = _whole_weight(p, input) if isinstance(input, Tile) else p.full_tensor()
            owner._parameters[name] = used  # pyright: ignore[reportArgumentType, reportPrivateUsage]
        yield
    finally:
        for owner, name, p in held:
            owner._parameters[name] = p  # pyright: ignore[reportPrivateUsage]


_CUT_LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.MultiheadAttention: CutMultiheadAttention}
for _base in (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED):
    _made: Any = type(f"Cut{_base.__name__}", (_base,), {"forward": _forward_in_pieces, "__module__": __name__})
    globals()[_made.__name__] = _CUT_LAYERS[_base] = _made


# -- cutting the layers of a model ------------------------------------------------------------------------------------


def cut_channels(model: nn.Module, mesh: DeviceMesh, axis: str) -> None:
    """Cut the weights of the plain linear, convolution and attention layers of `model` along `axis`, in place.

    In a ``Sequential``, two layers with only activations between them become a column and a row; others are columns.
    A layer stays whole when its channels do not divide by the ranks, when it has groups, or shares a parameter.
    """
    ranks = comm.rank_count(mesh, axis)
    if ranks == 1:
        return
    line = flat_submesh(mesh, axis)
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    able = [m for m in model.modules() if all(uses[p] == 1 for p in m.parameters()) and _channel_counts(m)]
    roles: dict[nn.Module, ChannelRole] = {}
    for module in model.modules():
        if type(module) is nn.Sequential:
            for first, second in _column_row_pairs(list(module), able, ranks):
                roles[first], roles[second] = ChannelRole(axis, gather=False), ChannelRole(axis, row=True)
    for module in able:
        _cut_layer(module, roles.get(module, ChannelRole(axis)), line)


def _channel_counts(module: nn.Module) -> tuple[int, int] | None:
    """(input, output) channels of a layer whose weights can be cut."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module) in (*_CONVOLUTIONS, *_TRANSPOSED) and module.groups == 1:
        convolution = cast(nn.Conv2d, module)
        return convolution.in_channels, convolution.out_channels
    if type(module) is nn.MultiheadAttention:
        return module.embed_dim, module.embed_dim
    return None


def _column_row_pairs(
    layers: Sequence[nn.Module], able: Sequence[nn.Module], ranks: int
) -> Generator[tuple[nn.Module, nn.Module]]:
    """Layers that can be column and row."""
    first: nn.Module | None = None
    for layer in layers:
        known = _channel_counts(layer) if layer in able and type(layer) is not nn.MultiheadAttention else None
        if known is not None and first is not None and known[0] % ranks == 0:
            yield first, layer
            first = None
        elif known is not None:
            first = layer if known[1] % ranks == 0 else None
        elif not isinstance(layer, _BETWEEN):
            first = None


def _cut_layer(layer: nn.Module, role: ChannelRole, line: DeviceMesh) -> None:
    channels = _channel_counts(layer)
    assert channels is not None
    if channels[0 if role.row else 1] % line.size():
        return
    owners = [layer, *layer.children()] if type(layer) is nn.MultiheadAttention else [layer]
    input_first = type(layer) in _TRANSPOSED
    for owner in owners:
        for name, p in owner.named_parameters(recurse=False):
            if name == "weight" or "_weight" in name:
                dim = int(role.row != input_first)
            elif role.row:
                continue  # the bias of a sum is added once, whole
            else:
                dim = 0
            if p.shape[dim] % line.size() == 0:
                setattr(owner, name, _shard_parameter(p, dim, line))
    object.__setattr__(layer, "role", role)  # a plain layer has no such attribute yet
    object.__setattr__(layer, "__class__", _CUT_LAYERS[type(layer)])


def _shard_parameter(p: nn.Parameter, dim: int, line: DeviceMesh) -> nn.Parameter:
    mine = p.detach().chunk(line.size(), dim)[line.get_local_rank()].clone(memory_format=torch.contiguous_format)
    cut = DTensor.from_local(mine, line, [Shard(dim)], run_check=False)
    return nn.Parameter(cut, requires_grad=p.requires_grad)
