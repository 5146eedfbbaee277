"""Weights, gradients and optimizer state in 1/P a rank: `fully_shard` over the flattened mesh, a unit at a time.

Hybrid: cut over some axes, and the same along the others (`ShardingOptions.replicate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from jigsaw import comm
from jigsaw.comm.connections import group_of_weights
from jigsaw.errors import ShardingError
from jigsaw.parallel.gradient_buckets import axes_not_cutting
from jigsaw.parallel.late_parameters import refuse_other_weights
from jigsaw.ranks.mesh import (
    axes_of_mesh,
    flat_submesh,
    has_every_rank,
    hybrid_submesh,
    root_mesh,
    sends_through_host,
)
from jigsaw.ranks.waiting_ranks import OpenWait
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import is_view
from jigsaw.torch_internals.groups import (
    CutWeightsShown,
    add_gradients_behind_reductions,
    gather_without_waiting,
    results_of_placement,
    send_unit_by,
    watch_messages_of_unit,
)
from jigsaw.torch_internals.placements import dim_and_parts, read_whole_numbers

WeightSharding = bool | Literal["after_forward", "keep"]


@dataclass(frozen=True)
class ShardingOptions:
    """Options of how weights are cut, as `jigsaw.parallelize` takes them."""

    keeps: bool
    """True where a unit stays gathered from its forward to its backward pass."""
    replicate: tuple[str, ...]
    """Axes along which every rank has the same part."""
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None

    @classmethod
    def checked(
        cls,
        mesh: DeviceMesh,
        shard_weights: WeightSharding,
        replicate: str | Sequence[str],
        mp_policy: MixedPrecisionPolicy | None,
        offload_policy: OffloadPolicy | None,
    ) -> ShardingOptions | None:
        """Return the options, None for whole weights; raise `ShardingError` for some that do not fit the mesh or such
        weights.
        """
        if not (isinstance(shard_weights, bool) or shard_weights in ("after_forward", "keep")):
            raise ShardingError(
                f"shard_weights={shard_weights!r} must be True or 'after_forward' (a unit's weights are freed between "
                "its forward and its backward pass), 'keep' (they stay), or False; to cut an optimizer's state "
                "alone (ZeRO-1), pass False and take "
                "torch.distributed.optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)"
            )
        copies = (replicate,) if isinstance(replicate, str) else tuple(replicate)
        options = {"replicate": copies, "mp_policy": mp_policy, "offload_policy": offload_policy}
        if not shard_weights:
            for name, value in options.items():
                if value:
                    raise ShardingError(
                        f"{name}={value!r} is about weights that are cut: pass shard_weights=True with it"
                    )
            return None
        if mesh.device_type != "cpu" and sends_through_host(mesh):
            raise ShardingError(
                f"shard_weights={shard_weights!r} on {mesh.device_type} devices whose messages go through the host "
                "(gloo): FSDP2 needs a backend of its own there; give each rank a GPU, let ranks share one by NCCL "
                "(NCCL 2.30 or newer, NCCL_MULTI_RANK_GPU_ENABLE=1), or pass shard_weights=False"
            )
        sizes = dict(axes_of_mesh(mesh))
        if copies and not has_every_rank(root_mesh(mesh)):
            raise ShardingError(f"replicate={copies} needs a mesh of all ranks of the job; {mesh} leaves out some")
        if not set(copies) <= set(sizes) or (copies and set(copies) == set(sizes)):
            raise ShardingError(
                f"replicate={copies} must be some, not all, of the axes {tuple(sizes)}: weights are cut along the "
                "others"
            )
        return cls(shard_weights == "keep", copies, mp_policy, offload_policy)

    def mesh_along(self, mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
        """Return the mesh of one or two axes that `fully_shard` takes, over the ranks along `axes`."""
        is_hybrid = any(name in self.replicate for name in axes)
        return hybrid_submesh(mesh, axes, self.replicate) if is_hybrid else flat_submesh(mesh, axes)


CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict


def _refuse_copy(name: str, memo: Any) -> NoReturn:
    raise ShardingError(
        f"deepcopy of {name}, whose weights are cut (shard_weights=), as torch.optim.swa_utils.AveragedModel takes "
        "one: make the copy before parallelize and parallelize both, or average the parameters themselves by p.lerp_"
    )


def sharding_units(model: nn.Module, least_bytes: int) -> list[nn.Module]:
    """Return modules to gather at once, inner first: elements of ``Sequential`` and ``ModuleList`` of `least_bytes` or
    more beyond the units in them.  A module with a parameter that is also used outside it is not a unit, because a unit
    is gathered alone.
    """
    uses = _parameter_uses(model)
    modules: list[nn.Module] = []
    taken: set[nn.Parameter] = set()

    def visit(module: nn.Module, is_element: bool) -> None:
        for child in module.children():
            visit(child, isinstance(module, nn.Sequential | nn.ModuleList))
        own = [p for p in module.parameters() if p not in taken]
        inside = _parameter_uses(module)
        closed = all(inside[p] == uses[p] for p in own)
        has_forward = not isinstance(module, CONTAINERS)
        if is_element and closed and has_forward and sum(p.nbytes for p in own) >= max(least_bytes, 1):
            modules.append(module)
            taken.update(own)

    visit(model, False)
    return modules


def _parameter_uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(p for module in model.modules() for p in module.parameters(recurse=False))


def shard_model_weights(
    model: nn.Module, mesh: DeviceMesh, units: Sequence[nn.Module], options: ShardingOptions
) -> dict[str, nn.Parameter]:
    """Cut the weights of `model` over the flattened mesh, each of `units` gathered at once; return what stays whole:
    scalars, and dtypes other than that of most bytes, because a unit has one.  A weight that another axis has cut (a
    DTensor) is cut further over the axes left, along a dim that divides, if there is one.
    """
    if isinstance(model, CONTAINERS):
        raise ShardingError(
            f"parallelize(shard_weights=) of a {type(model).__name__}, which has no forward pass of its own to gather "
            "weights for: put it into a module with a forward, or parallelize its modules one by one"
        )
    read_whole_numbers()
    named = dict(model.named_parameters())
    main = _main_dtype(named.values())
    others: dict[nn.Parameter, tuple[str, ...]] = {}
    dims: dict[nn.Parameter, int | None] = {}
    for p in named.values():
        if isinstance(p, DTensor):
            others[p] = axes_not_cutting(p, mesh)
            dims[p] = _dim_to_shard(p, comm.rank_count(mesh, [a for a in others[p] if a not in options.replicate]))
    rest = {name: p for name, p in named.items() if p.ndim == 0 or p.dtype != main or dims.get(p, 0) is None}
    _check_policy(options.mp_policy, rest)
    for p in named.values():
        if not isinstance(p, DTensor):
            p.data = p.data.contiguous()
    where = {p: options.mesh_along(mesh, others[p]) for p, d in dims.items() if d is not None}
    place = _shard_placement({p: d for p, d in dims.items() if d is not None}, where)
    over = options.mesh_along(mesh, [name for name, _ in axes_of_mesh(mesh)])
    policies = {"mp_policy": options.mp_policy, "offload_policy": options.offload_policy}
    fsdp_options: dict[str, Any] = {name: policy for name, policy in policies.items() if policy is not None}
    if options.keeps:
        fsdp_options["reshard_after_forward"] = False
    sharded: list[FSDPModule] = []
    for unit in [*units, model]:
        if not isinstance(unit, FSDPModule):
            unit.register_forward_hook(_without_views)  # registered before FSDP2's own hook
            fully_shard(unit, mesh=over, ignored_params=set(rest.values()), shard_placement_fn=place, **fsdp_options)
        if isinstance(unit, FSDPModule):
            sharded.append(unit)
    if sharded:
        _prepare_units(sharded, mesh)
    return rest


def _check_policy(policy: MixedPrecisionPolicy | None, rest: Mapping[str, nn.Parameter]) -> None:
    cut = [name for name, p in rest.items() if isinstance(p, DTensor)]
    if policy is not None and policy.param_dtype is not None and cut:
        raise ShardingError(
            f"mp_policy={policy!r} converts weights where they are gathered, and {cut[0]!r} is not: no axis is left "
            "that cuts it further. Compute under torch.autocast, convert the model, or give the mesh another axis"
        )


def _prepare_units(units: Sequence[FSDPModule], mesh: DeviceMesh) -> None:
    """Set what FSDP2 leaves open for units, the last of which is the outermost."""
    for unit in units:
        if sends_through_host(mesh):
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot average
        vars(unit)["__deepcopy__"] = partial(_refuse_copy, type(unit).__name__)
        watch_messages_of_unit(unit, _wait_of_group)
        add_gradients_behind_reductions(unit)
        module: Any = unit
        module.register_forward_pre_hook(refuse_other_weights, prepend=True)  # before FSDP2 puts its own there
    # once all units are made, as FSDP2 tells parameters of one unit apart by their groups
    for unit in units:
        send_unit_by(unit, lambda group: group_of_weights(group, mesh))
    outermost: Any = units[-1]
    if mesh.device_type == "cpu":
        _UnitPrefetch(units, outermost)
    shown = [CutWeightsShown(unit) for unit in units]
    outermost.register_forward_hook(partial(_leave_forward, units, shown))  # behind FSDP2's own


def _leave_forward(
    units: Sequence[FSDPModule], shown: Sequence[CutWeightsShown], module: Any, args: Any, output: Any
) -> None:
    """Show the cut weights again behind a forward pass, and free gathered ones where no backward pass follows.

    FSDP2 leaves those of the outermost unit gathered, for the backward pass. Whoever then asked for the parameters,
    such as a new optimizer, would get copies that the next forward pass replaces.
    """
    results = (x.local if isinstance(x, Tile) else x for x in pytree.tree_leaves(output))
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in results):
        for each in shown:
            each.show_cut()
    else:
        for unit in units:
            unit.reshard()


def _wait_of_group(kind: str, group: dist.ProcessGroup) -> OpenWait:
    return OpenWait(kind, dist.get_process_group_ranks(group))


class _NoView(torch.autograd.Function):
    """Same memory, not a view to autograd, with the version counter that shows changes in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Return results that may be changed in place, as by ``ReLU(inplace=True)``: FSDP2 gathers weights in a hook on
    them, which autograd drops for a changed view.
    """

    def apart(x: Tensor) -> Tensor:
        local = x.local if isinstance(x, Tile) else x
        if not (local.requires_grad and is_view(local)):
            return x
        local = cast(Tensor, _NoView.apply(local))
        return Tile(local, x.layout, x.mesh) if isinstance(x, Tile) else local

    return pytree.tree_map_only(Tensor, apart, output)


class _UnitPrefetch:
    """Early gather of the next unit's weights before one computes, in the order of the last forward pass.

    FSDP2 does so by streams, only on GPUs (backward it knows the order itself).  Example: after units a, b, c in one
    pass, b travels in the next while a computes.  A unit that different ones follow in one pass has no known successor;
    unused gathers are freed.
    """

    def __init__(self, units: Sequence[FSDPModule], root: FSDPModule) -> None:
        self._next: dict[Any, FSDPModule | None] = {}
        self._seen: list[FSDPModule] = []
        self._ahead: set[FSDPModule] = set()
        self._is_forward = False  # False in the backward pass, where checkpointed parts run again
        hooked: Any
        for hooked in units:
            gather_without_waiting(hooked, True)
            hooked.register_forward_pre_hook(self._begin_root if hooked is root else self._begin_unit)
        hooked = root
        hooked.register_forward_hook(self._end_root)

    def _begin_root(self, module: Any, args: Any) -> None:
        self._free_unused()  # units that a pass left gathered when it raised
        self._seen, self._is_forward = [], True
        self._begin_unit(module, args)

    def _begin_unit(self, module: Any, args: Any) -> None:
        if not self._is_forward:
            return
        self._seen.append(module)
        self._ahead.discard(module)
        following = self._next.get(module)
        if following is not None:
            following.unshard(async_op=True)
            self._ahead.add(following)

    def _end_root(self, module: Any, args: Any, output: Any) -> None:
        self._is_forward = False
        self._free_unused()
        self._next = {}
        for unit, following in zip(self._seen, [*self._seen[1:], None], strict=True):
            self._next[unit] = following if self._next.get(unit, following) is following else None

    def _free_unused(self) -> None:
        for unit in self._ahead:
            unit.unshard()  # wait for the gather that is under way
            unit.reshard()
        self._ahead.clear()


def _main_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype | None:
    weight = Counter[torch.dtype]()
    for p in parameters:
        weight[p.dtype] += p.nbytes
    return max(weight, key=lambda dtype: weight[dtype], default=None)


def _dim_to_shard(p: DTensor, ranks: int) -> int | None:
    """Return the dim to cut further: one whose pieces divide, on every rank, preferably not one that is cut already.

    A dim of several parts stays as it is: pieces of its pieces are none that torch can name.
    """
    pieces, parted = [1] * p.ndim, set[int]()
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if cut := dim_and_parts(placement):
            pieces[cut[0]] *= size
            parted |= {cut[0]} if cut[1] > 1 else set()
    order = sorted(set(range(p.ndim)) - parted, key=lambda d: (pieces[d] > 1, d))
    return next((d for d in order if ranks > 1 and p.shape[d] % (pieces[d] * ranks) == 0), None)


def _shard_placement(dims: Mapping[Any, int], where: Mapping[Any, DeviceMesh]) -> Callable[[nn.Parameter], Any] | None:
    """Return the function that tells `fully_shard` where to cut parameters; all groups are made in one order."""
    if not dims:
        return None
    return results_of_placement({p: Shard(d) for p, d in dims.items()}, where).get
