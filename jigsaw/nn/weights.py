"""Storage of a weight: whole on every rank, as a DTensor cut along mesh axes, or as a Tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType]

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.ops.meeting.plain_operands import plain_operand
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.autograd import own_buffers, own_parameters
from jigsaw.torch_internals.placements import dim_and_parts, is_dtensor, read_whole_numbers

StoredWeight = Tensor | Tile


def call_with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], args: Sequence[Any], kwargs: Any) -> Any:
    """Call `module` with other parameters and buffers by name (of shared ones the first name); it keeps its own.

    torch's `functional_call` (2.13) replaces a tensor twice where its module has two names, and leaves the replacement
    behind. So each place of a tensor is named once here, and tied tensors are replaced in all their places.
    """
    placed: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for key, x in (*own_parameters(owner).items(), *own_buffers(owner).items()):
            name = f"{prefix}.{key}" if prefix else key
            known = name if x is None else first_names.setdefault(id(x), name)
            if known in tensors:
                placed[name] = tensors[known]
    return functional_call(module, placed, tuple(args), kwargs, tie_weights=False)


def weight_layout(weight: StoredWeight, tile: Tile) -> Layout:
    """Return how `weight` is cut over the mesh of `tile`; a dim of several parts, each cut by itself, is two cuts.

    Raises: `ShardingError` for a DTensor on other axes than the mesh's, cut in parts and along another axis, or
    partial.
    """
    if isinstance(weight, Tile):
        return weight.layout.without_halo()
    cuts: list[tuple[Cut, ...]] = [(whole_dim(n),) for n in weight.shape]
    if is_dtensor(weight):
        from torch.distributed.tensor import Replicate

        mesh = weight.device_mesh
        names = mesh.mesh_dim_names or ()
        for name, size, placement in zip(names, mesh.shape, weight.placements, strict=True):
            if isinstance(placement, Replicate) or size == 1:
                continue
            known = dim_and_parts(placement)
            dim, parts = known or (0, 0)
            if known is None or (parts > 1 and cuts[dim] != (whole_dim(weight.shape[dim]),)):
                raise ShardingError(
                    f"a DTensor weight of shape {tuple(weight.shape)} is placed as {weight.placements}; "
                    "jigsaw takes Replicate and Shard, and parts that one axis cuts: make it whole by "
                    "weight.full_tensor()"
                )
            _check_weight_axis(name, size, tile)
            before = (whole_dim(parts), whole_dim(weight.shape[dim] // parts)) if parts > 1 else cuts[dim]
            # torch cuts by torch.chunk, ceil(n / ranks) rows first; two axes cut a dim one after the other
            cuts[dim] = (*before[:-1], refine_cut(before[-1], (name,), {name: size}, "chunk"))
    return Layout.from_dims(cuts, tile.layout.axes)


def _check_weight_axis(name: str, size: int, tile: Tile) -> None:
    axes = dict(tile.layout.axes)
    if axes.get(name) != size:
        raise ShardingError(
            f"a DTensor weight is cut along the axis {name!r} of size {size}, but the Tile's mesh has axes {axes}; "
            f"make the weight on a part of that mesh, not flattened"
        )


# for refusals of weights whose cuts do not meet those of a tile
CALL_THE_MODEL = (
    "; weights that shard_weights has cut are gathered when the forward pass of their unit begins, so call the model "
    "itself and not another method of it, or name the modules that the method calls in parallelize(units=...)"
)


def local_weight(weight: StoredWeight, tile: Tile, work: Layout) -> Tensor:
    """Return this rank's part of `weight`, as an operand of work that is cut over the mesh as `work` is.

    Its gradient is complete along the axes that cut it; along the others it becomes this rank's part for a parameter.
    For a Tile, which is the same on every rank there, it is summed (backward: one all-reduce).
    """
    if type(weight) is nn.Parameter or type(weight) is Tensor:
        return plain_operand(weight, tile, work)
    if isinstance(weight, Tile):
        alike = [a for a in work.cut_axes if a not in weight.layout.cut_axes]
        return comm.use_in_parts(weight.owned().local, weight.mesh, alike)
    local = weight.to_local() if is_dtensor(weight) else weight
    return plain_operand(local, tile, work)


def gathered_weight(weight: Tensor | None, tile: Tile) -> Tensor | None:
    """Return a weight as a whole plain tensor, for work that each rank does with all of it.

    *Sends*: the pieces of a DTensor to the ranks along the axes that cut it; backward an all-reduce of the gradient.
    """
    if weight is None or not is_dtensor(weight):
        return weight
    stored = weight_layout(weight, tile)
    pieces = Tile(weight.to_local(), stored, tile.mesh)
    whole = pieces.with_layout(stored.uncut())
    return comm.use_in_parts(whole.local, tile.mesh, stored.cut_axes)


def cut_parameter(whole_value: Tensor, mesh: DeviceMesh, axis: str | Sequence[str], dim: int = 0) -> nn.Parameter:
    """Return a parameter cut along `dim` by the axes (major to minor as in the mesh); a plain one where none has size >
    1.

    *Sends*: the parts of the first rank's values, once.
    """
    asked = (axis,) if isinstance(axis, str) else tuple(axis)
    names = tuple(name for name, size in axes_of_mesh(mesh) if name in asked and size > 1)
    if not names:
        return nn.Parameter(whole_value)
    from torch.distributed.tensor import Shard, distribute_tensor

    read_whole_numbers()
    part_of_mesh = mesh if len(names) == mesh.ndim else mesh[names]
    return nn.Parameter(distribute_tensor(whole_value, part_of_mesh, [Shard(dim)] * len(names)))


class CutLayer(nn.Module):
    """A layer of torch.nn that takes tiles where its weights are cut, and all that torch's takes where they are not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_plain_inputs(self, *args, *kwargs.values())
        return super().forward(*args, **kwargs)


def refuse_plain_inputs(layer: nn.Module, *inputs: Any) -> None:
    """Check the inputs of a layer.  Raises: `ShardingError` for plain ones alone where the layer's weights are cut."""
    plain = [x for x in inputs if type(x) is Tensor]
    if not plain or any(isinstance(x, Tile) or is_dtensor(x) for x in inputs):
        return
    if any(is_dtensor(p) for p in layer.parameters(recurse=False)):
        raise ShardingError(
            f"{type(layer).__name__} of a plain tensor of shape {tuple(plain[0].shape)}: its weights are cut, so it "
            "takes a Tile; make one of a tensor that every rank has with jigsaw.shard(x, mesh, spec), where spec has "
            f"a mesh axis or None for each of the {plain[0].ndim} dims"
        )
