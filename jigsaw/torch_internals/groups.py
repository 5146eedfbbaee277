"""Private names of torch.distributed: process groups, meshes, FSDP2 and DDP.  Most are looked up when first needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.torch_internals.autograd import graph_task_id, tensor_version
from jigsaw.torch_internals.private_names import (
    LateName,
    private_attribute,
    private_name,
    replace_in_torch,
    replaced_in_torch,
)

# -- process groups ---------------------------------------------------------------------------------------------------

WORLD_NAME = "_world"
"""Where torch keeps its process groups, and lets others put an object of their own.  Public: functions that ask it."""

# The store of the job's ranks.  Public: only whoever makes a store has it, and torchrun's is made by torch.
default_store = LateName("torch.distributed.distributed_c10d:_get_default_store")

# The group of a name, for every message.  Public: `DeviceMesh.get_group`, which looks at the mesh's ranks each time.
group_of_name: Any = private_name("torch.distributed.distributed_c10d:_resolve_process_group")

# What serves a group on a device, for every message.  Public: `get_backend`, which returns a name, and no time-out.
backend_of_group: Any = private_name("torch.distributed:ProcessGroup._get_backend")

# The time-out in the options of a backend, for every message.  Public: nothing tells.
timeout_of_options = private_attribute(private_name("torch._C:_distributed_c10d.Backend.Options"), "_timeout")

# Ends the groups of a dry run, and gives torch's log its rank back.  Public: `destroy_process_group`, which waits.
unregister_group = LateName("torch._C:_distributed_c10d._unregister_process_group")
set_rank_of_log = LateName("torch._C:_distributed_c10d._set_global_rank")


# Returns the object that holds torch's process groups, or jigsaw's in its place; every message asks.
known_groups: Callable[[], Any] = partial(private_attribute(c10d, WORLD_NAME), c10d)


def know_groups(world: Any) -> None:
    """Put an object in the place of torch's process groups."""
    setattr(c10d, WORLD_NAME, world)


def devices_of_group(group: dist.ProcessGroup) -> set[str]:
    """Return the types of devices that a group serves; public is a text for people."""
    return {device.type for device in private_attribute(group, "_device_types")(group)}


def serves_host(backend: str) -> bool:
    """Say whether groups of a backend serve the host's memory, too; public is the answer of a group that exists."""
    config: Any = backend  # torch's own hint leaves out "cpu:gloo,cuda:nccl"
    return "cpu" in c10d.BackendConfig(config).get_device_backend_map()


def serve_group(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo, is_default: bool = True) -> None:
    """Let gloo serve a group on CPUs; public is only the group that `init_process_group` makes."""
    register = private_name("torch.distributed:ProcessGroup._register_backend")
    register(group, torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if is_default:
        set_default = private_name("torch.distributed:ProcessGroup._set_default_backend")
        set_default(group, dist.ProcessGroup.BackendType.GLOO)


def late_gloo(store: dist.Store, rank: int, ranks: int, limit: timedelta) -> dist.ProcessGroupGloo:
    """Return gloo's group of ranks that connect as late as they first talk; public are those that do so at once."""
    options: Any = private_name("torch.distributed:ProcessGroupGloo._Options")()
    for name in ("_devices", "_timeout"):
        private_attribute(options, name)
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def group_of_host(name: str, rank: int, ranks: int, limit: timedelta) -> dist.ProcessGroup:
    """Make a group of all ranks of the job on `late_gloo`, by a new name; public are groups that connect at once."""
    store = dist.PrefixStore(f"{name}/", default_store())
    group = dist.ProcessGroup(store, rank, ranks)
    serve_group(group, late_gloo(store, rank, ranks, limit))
    private_name("torch.distributed:ProcessGroup._set_group_name")(group, name)
    private_name("torch.distributed:ProcessGroup._set_group_desc")(group, name)
    _know_group(group, "gloo", store, name, "cpu:gloo", {each: each for each in range(ranks)})
    return group


_know_group = LateName("torch.distributed.distributed_c10d:_register_pg_in_world")


def backend_alone(group: dist.ProcessGroup, device: str) -> str | None:
    """Return the backend for groups of the host in a job of GPUs alone; None where groups made like `group` will do.

    Public are groups that serve all devices that the job's own does.
    """
    config: Any = dist.get_backend_config(group)
    is_served = device in c10d.BackendConfig(config).get_device_backend_map()
    return "gloo" if device == "cpu" and not is_served else None


@contextmanager
def splitting_device_alone(group: dist.ProcessGroup, device: str) -> Generator[None]:
    """Let meshes of a device be made within the block in a job that is bound to GPUs.

    Their groups are split off for the device alone.  Public are splits with a part for the host.  Groups of another
    device are made as if the job were not bound: torch would split off NCCL's on ranks outside of them alone.
    """
    bound = group.bound_device_id
    if bound is None:
        yield
    elif bound.type != device:
        group.bound_device_id = None
        try:
            yield
        finally:
            group.bound_device_id = bound
    else:
        config: Any = dist.get_backend_config(group)
        backend = c10d.BackendConfig(config).get_device_backend_map()[device]
        with replaced_in_torch(device_mesh, "split_group", partial(dist.split_group, backend=f"{device}:{backend}")):
            yield


def fake_store() -> Any:
    """Return the store of a fake group, whose backend this import registers.  Public is nothing."""
    return private_name("torch.testing._internal.distributed.fake_pg:FakeStore")()


def takes_batches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether a group runs a batch of messages as one operation, as it runs its operations one after the other."""
    own: bool | None = getattr(group, "supports_coalescing", None)  # a group of another class has no backend to ask
    return bool(backend_of_group(group, device).supports_coalescing) if own is None else own


def group_by_name(
    name: str, ranks: Sequence[int], like: dist.ProcessGroup, device: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group of these ranks, which make it without the others, on the backend that `like` has for a device.

    The name must be new, and the same on all of them.  Public are groups whose names count those of each rank.
    """
    config: Any = dist.get_backend_config(like)
    backend = c10d.BackendConfig(config).get_device_backend_map()[device]
    world = known_groups()
    job = world.default_pg
    # a communicator that NCCL splits off needs all ranks of the job, so this one is made by itself
    bound, job.bound_device_id = job.bound_device_id, None
    try:
        own = list(ranks).index(job.rank())
        group, _ = _new_group(len(ranks), own, list(ranks), backend, default_store(), name, timeout=timeout)
    finally:
        job.bound_device_id = bound
    world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
    return group


_new_group = LateName("torch.distributed.distributed_c10d:_new_process_group_helper")


# -- meshes: public are slices of a mesh by its names alone -----------------------------------------------------------

mesh_flattened = LateName("torch.distributed.device_mesh:DeviceMesh._flatten")
mesh_unflattened = LateName("torch.distributed.device_mesh:DeviceMesh._unflatten")
mesh_root = LateName("torch.distributed.device_mesh:DeviceMesh._get_root_mesh")


_JOIN = "torch.distributed.device_mesh:DeviceMesh._concatenate"


def meshes_joined(parts: list[DeviceMesh]) -> DeviceMesh:
    """Return the mesh of the axes of several; looked up each time, as `around_joins` replaces it."""
    return private_name(_JOIN)(parts)


def flattened_meshes(root: DeviceMesh) -> dict[str, DeviceMesh]:
    """Return the flattened meshes that torch knows of a mesh, by name."""
    return private_attribute(root, "_flatten_mapping")(root)


def around_joins(wrap: Any) -> AbstractContextManager[None]:
    """Let torch join meshes by ``wrap(torch's function)`` within the block."""
    meshes: Any = DeviceMesh
    joined = private_name(_JOIN)
    return replaced_in_torch(meshes, "_concatenate", staticmethod(wrap(joined)))


def number_mesh(mesh: Any, number: int) -> None:
    """Let a mesh be equal to those of the same number alone."""
    private_attribute(mesh, "_thread_id")
    mesh._thread_id, mesh._hash = number, None


# -- FSDP2 ------------------------------------------------------------------------------------------------------------

_FSDP = "torch.distributed.fsdp._fully_shard."

# Whether `unshard()` returns at once, on CPUs too.  Public: only for GPUs, by their streams.
gather_without_waiting = LateName("torch.distributed.fsdp:FSDPModule._set_unshard_async_op")


@lru_cache(maxsize=8)
def change_units_of_fsdp(apply: Callable[..., Any]) -> None:
    """Let FSDP2 call ``apply(torchs, parameters, *inputs)`` in the place of `torchs`, from the first call on.

    That passes the inputs of a unit that require grad through a Function whose backward reduces the unit's gradients.
    Public is nothing.
    """
    function = private_name(_FSDP + "_fsdp_param_group:RegisterPostBackwardFunction")
    replace_in_torch(function, "apply", staticmethod(partial(apply, function.apply)))


def watch_messages_of_unit(unit: Any, wait: Callable[[str, dist.ProcessGroup], AbstractContextManager[Any]]) -> None:
    """Let FSDP2 wait for messages of a unit within ``wait(kind, group)``, and sum complex gradients as pairs of reals.

    NCCL adds up real numbers alone.  Public are `set_custom_all_gather` and `set_custom_reduce_scatter`, which refuse
    units on several meshes and need classes that are not public.
    """
    gather = private_name(_FSDP + "_fsdp_collectives:DefaultAllGather")
    reduction = private_name(_FSDP + "_fsdp_collectives:DefaultReduceScatter")

    class WatchedGather(gather):
        def __call__(self, *, group: dist.ProcessGroup, **options: Any) -> Any:
            gathering = "gather of cut weights"
            with wait(gathering, group):
                work = super().__call__(group=group, **options)
            return None if work is None else _WatchedWork(work, lambda: wait(gathering, group))

    class WatchedReduction(reduction):
        def __call__(
            self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
        ) -> Any:
            pairs = [torch.view_as_real(x).view(-1) if x.is_complex() else x for x in (output_tensor, input_tensor)]
            with wait("sum of gradients of cut weights", group):
                return super().__call__(*pairs, group=group, **options)

    for parameters in _parameter_groups(unit):
        for name, traffic in (("_all_gather_comm", WatchedGather()), ("_reduce_scatter_comm", WatchedReduction())):
            private_attribute(parameters, name)
            setattr(parameters, name, traffic)


def send_unit_by(unit: Any, replaced: Callable[[dist.ProcessGroup], dist.ProcessGroup]) -> None:
    """Let FSDP2 send a unit's messages by `replaced(group)` of each of its groups, once all units are made.

    Public is `set_separate_reduce_scatter_group`, for sums of gradients alone.
    """
    for parameters in _parameter_groups(unit):
        cut = private_attribute(parameters, "mesh_info")(parameters)
        private_attribute(cut, "shard_process_group")
        for name in ("shard_process_group", "replicate_process_group"):
            if hasattr(cut, name):
                setattr(cut, name, replaced(getattr(cut, name)))


class _WatchedWork(dist.Work):
    """A message under way, for which its rank waits within a block."""

    def __init__(self, work: dist.Work, block: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._work, self._block = work, block

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._block():
            return self._work.wait(timeout)


def _parameter_groups(unit: Any) -> list[Any]:
    state = _state_of_unit(unit)
    return private_attribute(state, "_fsdp_param_groups")(state)


def add_gradients_behind_reductions(unit: Any) -> None:
    """Let a gradient that a cut weight gets outside of its unit, as by a decay in the loss, wait for the unit's own.

    FSDP2 writes the unit's to ``grad`` on a stream of its own, which autograd does not wait for: the sum that it makes
    of both could lose either.  Public is nothing.
    """
    for group in _parameter_groups(unit):
        for parameter in _parameters_of_group(group):
            weight = _cut_weight(parameter)
            if not (weight.is_floating_point() or weight.is_complex()):
                continue
            is_trained = weight.requires_grad
            weight.requires_grad_()  # a frozen weight may be trained later; a hook needs this
            weight.register_hook(partial(_wait_for_reductions, group, weight.device.type))
            weight.requires_grad_(is_trained)


class CutWeightsShown:
    """A unit of FSDP2 that shows its cut weights between its forward and its backward pass, while it keeps the gathered
    ones in memory.

    FSDP2 leaves its outermost unit gathered.  Its modules then have copies as parameters: what is written into them,
    their gradients and `requires_grad_` do not reach the cut weights.  Public is `reshard`, after which the backward
    pass gathers once more.
    """

    def __init__(self, unit: Any) -> None:
        self._groups = _parameter_groups(unit)
        # of cut weights that are shown while gathered ones are kept, by group
        self._versions: dict[Any, list[tuple[int, int]]] = {}
        for group in self._groups:
            gather = private_attribute(group, "unshard")(group)
            group.unshard = partial(self._before_use, group, gather)

    def show_cut(self) -> None:
        """Show the cut weights of what is gathered, until the next pass uses it."""
        for group in self._groups:
            if private_attribute(group, "is_unsharded")(group):
                self._versions[group] = _versions_of_cut(group)
                for parameter in _parameters_of_group(group):
                    _show_weight(parameter, _cut_weight(parameter))

    def _before_use(self, group: Any, gather: Callable[..., Any], async_op: bool = False) -> None:
        versions = self._versions.pop(group, None)
        if versions is not None and group.is_unsharded:
            if versions != _versions_of_cut(group) and graph_task_id() == -1:
                private_attribute(group, "_to_sharded")(group)()  # they have changed, so they are gathered anew
            else:
                for parameter in _parameters_of_group(group):
                    gathered = private_attribute(parameter, "_unsharded_param")(parameter)
                    gathered.requires_grad_(_cut_weight(parameter).requires_grad)
                    _show_weight(parameter, gathered)
        gather(async_op)


def _parameters_of_group(group: Any) -> Sequence[Any]:
    return private_attribute(group, "fsdp_params")(group)


def _cut_weight(parameter: Any) -> Any:
    return private_attribute(parameter, "sharded_param")(parameter)


def _show_weight(parameter: Any, weight: Tensor) -> None:
    """Let the modules with a parameter have this tensor as it."""
    private_attribute(parameter, "_setattr_on_modules")(parameter)(weight)


def _versions_of_cut(group: Any) -> list[tuple[int, int]]:
    weights = map(_cut_weight, _parameters_of_group(group))
    # a DTensor and its local tensor count changes apart
    return [(tensor_version(w), tensor_version(private_attribute(w, "_local_tensor")(w))) for w in weights]


def _wait_for_reductions(group: Any, device: str, gradient: Tensor) -> None:
    traffic = private_attribute(group, "comm_ctx")(group)
    current = torch.get_device_module(device).current_stream()
    for name in ("reduce_scatter_stream", "all_reduce_stream"):
        current.wait_stream(private_attribute(traffic, name)(traffic))


_state_of_unit = LateName("torch.distributed.fsdp:FSDPModule._get_fsdp_state")


def is_before_backward(unit: Any) -> bool:
    """Say whether FSDP2 takes a unit to be behind the beginning of its backward pass; public is nothing."""
    states = private_name(_FSDP + "_fsdp_common:TrainingState")
    state = _state_of_unit(unit)
    return private_attribute(state, "_training_state")(state) is private_attribute(states, "PRE_BACKWARD")(states)


def results_of_placement(dims: Mapping[Any, Any], where: Mapping[Any, DeviceMesh]) -> dict[Any, Any]:
    """Return what `fully_shard` takes for parameters with meshes of their own: a placement and a mesh for each.

    Public is `shard_placement_fn`, whose results of this kind have private names.
    """
    one = private_name(_FSDP + "_fsdp_common:FSDPMeshInfo")
    two = private_name(_FSDP + "_fsdp_common:HSDPMeshInfo")
    result = private_name(_FSDP + "_fsdp_common:ShardPlacementResult")
    meshes = dict.fromkeys(where.values())
    infos = {mesh: one(mesh, shard_mesh_dim=0) if mesh.ndim == 1 else two(mesh, 1, 0) for mesh in meshes}
    return {p: result(placement, infos[where[p]]) for p, placement in dims.items()}


def around_chunks(wrap: Any) -> AbstractContextManager[None]:
    """Let FSDP2 cut weights into parts by ``wrap(torch's function)`` within the block."""
    chunks = private_name(_FSDP + "_fsdp_param:_chunk_with_empty")
    return replaced_in_torch(sys.modules[_FSDP + "_fsdp_param"], "_chunk_with_empty", wrap(chunks))


def is_file_of_fsdp(file: str) -> bool:
    """Say whether a file is one of FSDP2's."""
    folder = sys.modules.get(_FSDP.rstrip("."))
    return folder is not None and file.startswith(tuple(folder.__path__))


# -- DDP --------------------------------------------------------------------------------------------------------------

# The wrapper whose forward pass is under way, or None.  Public: nothing tells.
wrapper_around = LateName("torch.nn.parallel:DistributedDataParallel._get_active_ddp_module")
