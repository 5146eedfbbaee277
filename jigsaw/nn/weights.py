"""How a weight is stored: whole on every rank, as a DTensor cut along mesh axes, or as a Tile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from jigsaw import comm
from jigsaw.layout import Cut, Layout, ShardingError, cut_points, whole
from jigsaw.mesh import axes_of, submesh
from jigsaw.pointwise import part
from jigsaw.tile import Tile

Weight = Tensor | Tile


def layout_of(weight: Weight, tile: Tile) -> Layout:
    """How `weight` is cut over the mesh of `tile`.

    Raises: `ShardingError` for a DTensor on other axes than the mesh's, cut twice along a dim, or partial.
    """
    if isinstance(weight, Tile):
        return weight.layout.without_halo()
    cuts = [whole(n) for n in weight.shape]
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        names = mesh.mesh_dim_names or ()
        for name, size, placement in zip(names, mesh.mesh.shape, weight.placements, strict=True):
            if isinstance(placement, Replicate) or size == 1:
                continue
            if type(placement) is not Shard or cuts[placement.dim].is_cut:
                raise ShardingError(
                    f"a DTensor weight of shape {tuple(weight.shape)} is placed as {weight.placements}; jigsaw takes Replicate and one Shard a dim"
                )
            rows = weight.shape[placement.dim]
            cuts[placement.dim] = Cut(rows, cut_points(rows, size, "chunk"), _axes_named(name, size, tile))
    return Layout(tuple(cuts), tile.layout.axes)


def _axes_named(name: str, size: int, tile: Tile) -> tuple[str, ...]:
    """The axes of the tile's mesh that make up an axis of the weight's mesh: itself, or several that were flattened."""
    axes = tile.layout.axes
    for count in range(1, len(axes) + 1):
        for some in combinations(axes, count):
            product = torch.Size(n for _, n in some).numel()
            if "_".join(n for n, _ in some) == name and product == size:
                return tuple(n for n, _ in some)
    raise ShardingError(
        f"a DTensor weight is cut along the axis {name!r} of size {size}, but the Tile's mesh has axes {dict(axes)}; "
        f"make the weight on a part of that mesh"
    )


def local_weight(weight: Weight, tile: Tile, work: Layout) -> Tensor:
    """This rank's part of `weight`, as an operand of work that is cut over the mesh as `work` is.

    Its gradient is complete along the axes that cut it; along the others it becomes this rank's part for a parameter, and
    is summed (backward: one all-reduce) for a Tile, which every rank there holds alike.
    """
    if isinstance(weight, Tile):
        alike = [a for a in work.cut_axes if a not in weight.layout.cut_axes]
        return comm.enter(weight.owned().local, weight.mesh, alike)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return part(local, tile, work)


def cut_parameter(whole_value: Tensor, mesh: DeviceMesh, axis: str | Sequence[str], dim: int = 0) -> nn.Parameter:
    """A parameter that the axis cuts along `dim`; a plain one where the mesh has no such axis or it has size 1.

    *Sends*: once, the parts of the first rank's values.
    """
    names = [n for n, size in axes_of(mesh) if n in ((axis,) if isinstance(axis, str) else axis) and size > 1]
    if not names:
        return nn.Parameter(whole_value)
    return nn.Parameter(distribute_tensor(whole_value, submesh(mesh, names), [Shard(dim)]))
