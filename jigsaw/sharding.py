"""Weights, gradients and optimizer state in 1/P a rank: `fully_shard` over the flattened mesh, a unit at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from jigsaw import comm
from jigsaw.gradients import axes_not_cutting
from jigsaw.mesh import axes_of_mesh, flat_submesh


def sharding_units(model: nn.Module, least_bytes: int) -> list[nn.Module]:
    """Modules to gather at once, inner first: elements of ``Sequential`` and ``ModuleList`` of `least_bytes` or more
    beyond the units in them.  One with a parameter that is also used outside it is none, for it is gathered alone.
    """
    uses = _parameter_uses(model)
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()

    def visit(module: nn.Module, is_element: bool) -> None:
        for child in module.children():
            visit(child, isinstance(module, nn.Sequential | nn.ModuleList))
        own = [p for p in module.parameters() if p not in taken]
        inside = _parameter_uses(module)
        closed = all(inside[p] == uses[p] for p in own)
        has_forward = not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if is_element and closed and has_forward and sum(p.nbytes for p in own) >= max(least_bytes, 1):
            found.append(module)
            taken.update(own)

    visit(model, False)
    return found


def _parameter_uses(model: nn.Module) -> Counter[nn.Parameter]:
    """How many modules in `model` hold each parameter."""
    return Counter(p for module in model.modules() for p in module.parameters(recurse=False))


def shard_model_weights(model: nn.Module, mesh: DeviceMesh, units: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Cut the weights of `model` over the flattened mesh, each of `units` gathered at once; returns what stays whole.

    That are scalars, and dtypes other than that of most bytes, as a unit has one.  A weight that another axis has cut
    (a DTensor) is cut further over the axes that are left, along a dim that divides; without one it stays as it is.
    """
    named = dict(model.named_parameters())
    main = _main_dtype(named.values())
    others: dict[nn.Parameter, tuple[str, ...]] = {}
    dims: dict[nn.Parameter, int | None] = {}
    for p in named.values():
        if isinstance(p, DTensor):
            others[p] = axes_not_cutting(p, mesh)
            dims[p] = _dim_to_shard(p, comm.rank_count(mesh, others[p]))
    rest = {name: p for name, p in named.items() if p.ndim == 0 or p.dtype != main or dims.get(p, 0) is None}
    for p in named.values():
        if not isinstance(p, DTensor):
            p.data = p.data.contiguous()
    place = _shard_placement({p: d for p, d in dims.items() if d is not None}, others, mesh)
    flat = flat_submesh(mesh, [name for name, _ in axes_of_mesh(mesh)])
    for unit in [*units, model]:
        if not isinstance(unit, FSDPModule):
            fully_shard(unit, mesh=flat, ignored_params=set(rest.values()), shard_placement_fn=place)
        if isinstance(unit, FSDPModule) and mesh.device_type == "cpu":
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return rest


def _main_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    weight = Counter[torch.dtype]()
    for p in parameters:
        weight[p.dtype] += p.nbytes
    return max(weight, key=lambda dtype: weight[dtype], default=None)


def _dim_to_shard(p: DTensor, ranks: int) -> int | None:
    """The dim to cut further: one whose pieces divide, on every rank, rather not the one that is cut already."""
    pieces = [1] * p.ndim
    for size, how in zip(p.device_mesh.shape, p.placements, strict=True):
        if isinstance(how, Shard):
            pieces[how.dim] *= size
    order = sorted(range(p.ndim), key=lambda d: (pieces[d] > 1, d))
    return next((d for d in order if ranks > 1 and p.shape[d] % (pieces[d] * ranks) == 0), None)


def _shard_placement(
    dims: Mapping[Any, int], axes: Mapping[Any, tuple[str, ...]], mesh: DeviceMesh
) -> Callable[[nn.Parameter], Any] | None:
    """What tells `fully_shard` where to cut the parameters in `dims`: groups of ranks are made in one order."""
    if not dims:
        return None
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    where = {
        left: FSDPMeshInfo(flat_submesh(mesh, left), shard_mesh_dim=0) for left in dict.fromkeys(axes[p] for p in dims)
    }
    results = {p: ShardPlacementResult(Shard(d), where[axes[p]]) for p, d in dims.items()}
    return results.get
