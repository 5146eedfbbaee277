"""Named device meshes: functions that make a plain `torch.distributed.DeviceMesh` and read its names, sizes
and groups.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from numbers import Integral
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.layout import AxisSizes, MeshCoordinate
from jigsaw.ranks.job_groups import JobOptions, check_job_options, default_device, device_of_values, join_job
from jigsaw.ranks.launcher import DEBUG_VARIABLE, EVERY_VARIABLE, debug_interval, torchrun_variables
from jigsaw.ranks.model_world import job_group, job_rank, job_size, of_the_job
from jigsaw.torch_internals.dispatch import without_modes
from jigsaw.torch_internals.groups import (
    backend_alone,
    backend_of_group,
    flattened_meshes,
    group_by_name,
    group_of_name,
    mesh_flattened,
    mesh_root,
    mesh_unflattened,
    meshes_joined,
    splitting_device_alone,
    takes_batches,
    timeout_of_options,
)

# Weak, so that no job that ended is kept alive.
_flat_by_axes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = WeakKeyDictionary()
_split_by_axis: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = WeakKeyDictionary()
_groups_by_kind: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()


_BY_LAUNCHERS = "with torchrun --nproc-per-node or srun --ntasks"

DEFAULT_PATIENCE = timedelta(minutes=5)
"""Time that ranks wait for each other, by default."""


def init_mesh(
    *,
    device: str | None = None,
    timeout: timedelta | float | None = None,
    backend: str | Any = None,  # a type checker takes `**sizes` of integers for any keyword that is left out
    device_id: torch.device | int | None = None,
    pg_options: Any = None,
    **axes: int,
) -> DeviceMesh:
    """Make a `DeviceMesh` with named axes over all ranks: ``init_mesh(data=1, lat=2, lon=2)``.

    Under ``torchrun``, Slurm's ``srun`` and, with ``MASTER_ADDR`` and ``MASTER_PORT`` set, ``mpirun`` it joins the
    process group (or uses the one that exists). Else the mesh has one rank.  One axis may be -1: the rest of the ranks.
    ``init_mesh()`` is for one rank: a mesh whose only axis, `data`, cuts nothing. `device` defaults to ``"cuda"`` where
    there is a GPU for each local rank, else ``"cpu"``. With ``device="cuda"`` more ranks than GPUs share them, and talk
    through the host (gloo), or by NCCL from 2.30 on with ``NCCL_MULTI_RANK_GPU_ENABLE=1``. This is for tests, not for
    speed.  A rank waits for others for `timeout` (a `timedelta`, or seconds), in the mesh's groups and in those that
    reading makes. By default this is 5 minutes, or as long as in the process group that exists.

    `backend`, `device_id` and `pg_options` go to `torch.distributed.init_process_group`, where this call joins. By
    default GPUs get groups of NCCL with a part of gloo for the host, as torch makes them. With ``backend="nccl"``, for
    jobs of many ranks, only the job's own has one, which connects ranks late. With `device_id`, this rank's GPU, NCCL
    connects all ranks at once, and splits the groups of axes off, with the job's `pg_options`. These reach the job's
    own group alone without `device_id`; groups for messages and for gradients always have NCCL's defaults.

    Raises: `ShardingError` when the product of the axes is not the number of ranks, or several ranks have no axes. Also
    when `timeout` is not a time above 0, or a process may open fewer files than there are ranks. Also where options of
    the process group come after it. `RanksDifferError` on every rank where ranks name other axes, devices or backends,
    or ``JIGSAW_DEBUG`` is set on some of them only.

    >>> mesh = jigsaw.init_mesh(data=1, lat=1, lon=-1, device="cpu")
    >>> mesh.mesh_dim_names, mesh.shape
    (('data', 'lat', 'lon'), (1, 1, 1))
    """
    sizes = list(axes.values())
    are_whole = all(isinstance(size, Integral) and not isinstance(size, bool) for size in sizes)
    if not are_whole or any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ShardingError(
            f"init_mesh({_axes_as_arguments(axes)}) needs axes, each a whole number >= 1; one may be -1, the rest of "
            "the ranks"
        )
    axes = {name: int(size) for name, size in axes.items()}
    limit = None if timeout is None else _checked_timeout(timeout)
    if not dist.is_initialized():
        os.environ.update(torchrun_variables(os.environ))
    device, options = device or default_device(), JobOptions(backend, device_id, pg_options)
    if dist.is_initialized():
        check_job_options(options)
    else:
        join_job(device, limit or DEFAULT_PATIENCE, options)
    _agree_on_mesh(axes, device)  # before anything else, so that no rank waits for one with wrong axes
    axes = _with_the_rest(axes, dist.get_world_size())
    with splitting_device_alone(_world_group(), device):
        names, alone = tuple(axes), _backends_alone(axes, device)
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=names, backend_override=alone)
    apart = _groups_by_kind.get(_world_group(), {}).values()
    for group in (_world_group(), *mesh.get_all_groups(), *apart):  # torch lets a new group wait for 30 minutes
        _let_wait(group, device, limit or group_patience(_world_group(), device))
    return mesh


def _backends_alone(sizes: dict[str, int], device: str) -> dict[Any, Any] | None:
    """Return the backend of each axis' group where the job's own group does not serve the device of the mesh; that one
    is not made again.
    """
    world = _world_group()
    backend = backend_alone(world, device) if world.bound_device_id is None else None
    return None if backend is None else {name: backend for name, size in sizes.items() if size < world.size()}


def _agree_on_mesh(axes: dict[str, int], device: str) -> None:
    """Raise `RanksDifferError` on every rank if ranks make different meshes, or some alone compare their messages."""
    group = _world_group()
    if group.size() == 1 or dist.get_backend() == "fake":
        return
    interval = debug_interval(os.environ)
    words = f"init_mesh({_axes_as_arguments(axes)}, device={device!r})"
    digest = int.from_bytes(blake2b(words.encode(), digest_size=7).digest(), "big")
    own = torch.tensor([interval, digest], device=device_of_values(group))
    ends = torch.cat([own, -own])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)  # the maximum of each number, and minus its minimum
    if ends[0] != -ends[2]:
        raise RanksDifferError(
            f"{DEBUG_VARIABLE} (with {EVERY_VARIABLE}) must be the same on every rank, but the ranks compare what they "
            f"do: {_said_by_ranks(f'every {interval} passes' if interval else 'not')}; set it for all of them, as "
            "torchrun and srun pass the environment on, or for none"
        )
    if ends[1] != -ends[3]:
        raise RanksDifferError(
            f"ranks of one job make different meshes: {_said_by_ranks(words)}; give init_mesh the same axes in the "
            "same order on every rank"
        )


def _said_by_ranks(words: str) -> str:
    """Return the different statements of ranks, each with the first rank that makes it. Collective over the job."""
    group = _world_group()
    padded = words.encode()[:_LONGEST_WORDS].ljust(_LONGEST_WORDS)
    own = torch.tensor(list(padded), dtype=torch.uint8, device=device_of_values(group))
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    first: dict[str, int] = {}
    for rank, letters in enumerate(torch.stack(every).tolist()):
        first.setdefault(bytes(letters).decode(errors="ignore").rstrip(), rank)
    named = [f"rank {rank}: {text}" for text, rank in list(first.items())[:_MOST_TOLD]]
    return "; ".join([*named, "..."] if len(first) > _MOST_TOLD else named)


_MOST_TOLD, _LONGEST_WORDS = 16, 256


def _checked_timeout(timeout: timedelta | float) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ShardingError(f"timeout={timeout!r} must be a time above 0: seconds, or a datetime.timedelta")
    return timedelta(seconds=seconds)


def mesh_patience(mesh: DeviceMesh) -> timedelta:
    """Return how long a rank of the mesh waits for others: the time-out of its process group, whoever made it."""
    return group_patience(mesh_group(mesh), mesh.device_type)


def sends_through_host(mesh: DeviceMesh) -> bool:
    """Say whether messages leave from memory of the host: gloo's do, even those of ranks that share one GPU.

    A backend that queues its operations on a device takes batches of them.
    """
    device = torch.device(mesh.device_type)
    return device.type == "cpu" or not takes_batches(mesh_group(mesh), device)


def job_patience() -> timedelta:
    """Return how long a rank of the job waits for others in the group of all ranks."""
    return group_patience(_world_group(), "cuda" if "nccl" in dist.get_backend() else "cpu")


def group_patience(group: dist.ProcessGroup, device: str) -> timedelta:
    """Return how long a member of the group waits for a message between devices of that kind."""
    try:
        backend: Any = backend_of_group(group, torch.device(device))
    except RuntimeError:  # the group has no backend for this device
        return DEFAULT_PATIENCE
    options = getattr(backend, "options", None)  # MPI's backend has none
    return DEFAULT_PATIENCE if options is None else timeout_of_options(options)


def _let_wait(group: dist.ProcessGroup, device: str, limit: timedelta) -> None:
    if group_patience(group, device) != limit:
        group.set_timeout(limit)


def _with_the_rest(axes: dict[str, int], ranks: int) -> dict[str, int]:
    """Return the axes with their sizes, -1 computed; without axes, those of a single rank."""
    if not axes:
        if ranks == 1:
            return {DATA_AXIS: 1}
        raise ShardingError(
            f"init_mesh() without axes is for one rank, and there are {ranks}; say what they cut: "
            f"init_mesh(lat={ranks}), or init_mesh(data=-1) for batches"
        )
    known = math.prod(size for size in axes.values() if size != -1)
    filled = {name: ranks // known if size == -1 else size for name, size in axes.items()}
    if math.prod(filled.values()) == ranks:
        return filled
    if -1 in axes.values():
        raise ShardingError(
            f"init_mesh({_axes_as_arguments(axes)}) has places for multiples of {known} ranks but there are {ranks} "
            f"ranks; start such a number {_BY_LAUNCHERS}, or change an axis"
        )
    raise ShardingError(
        f"init_mesh({_axes_as_arguments(axes)}) has {known} places but there are {ranks} ranks; "
        f"start that many {_BY_LAUNCHERS}, or change an axis"
    )


def _axes_as_arguments(axes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def axes_of_mesh(mesh: DeviceMesh) -> AxisSizes:
    """Return the names and sizes of the axes, in mesh order."""
    known: AxisSizes | None = mesh.__dict__.get(_AXES)
    if known is not None:
        return known
    names = mesh.mesh_dim_names
    if names is None:
        raise ShardingError(
            f"mesh of shape {tuple(mesh.shape)} has no axis names; "
            f"make it with jigsaw.init_mesh(lat=2, ...) or pass mesh_dim_names"
        )
    axes = tuple(zip(names, mesh.shape, strict=True))
    setattr(mesh, _AXES, axes)
    return axes


def mesh_size(mesh: DeviceMesh) -> int:
    """Return how many ranks the mesh has."""
    known = mesh.__dict__.get(_SIZE)
    if known is not None:
        return known
    size = mesh.size()
    setattr(mesh, _SIZE, size)
    return size


# Constant facts of a mesh that every parameter or message needs are kept with it, as plain values, because a mesh is
# pickled with its tensors, and would keep a group alive.
_AXES, _SIZE, _RANKS = "_jigsaw_axes", "_jigsaw_size", "_jigsaw_ranks"
_LINES, _GROUPS = "_jigsaw_lines", "_jigsaw_groups"


def mesh_coordinate(mesh: DeviceMesh) -> MeshCoordinate:
    """Return this rank's coordinate in the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(f"rank {job_rank()} is not part of the mesh {mesh}; only its ranks may use its tiles")
    return tuple(coordinate)


class AxesAlong(NamedTuple):
    """Some of a mesh's axes, in its order, those of them that have several ranks, and how many ranks they join."""

    names: tuple[str, ...]
    long: tuple[str, ...]
    ranks: int


def axes_along(mesh: DeviceMesh, axes: str | Sequence[str]) -> AxesAlong:
    """Return those of `axes` that the mesh has."""
    return _axes_among(axes_of_mesh(mesh), (axes,) if isinstance(axes, str) else tuple(axes))


@lru_cache(maxsize=4096)
def _axes_among(sizes: AxisSizes, wanted: tuple[str, ...]) -> AxesAlong:
    axes = [(name, size) for name, size in sizes if name in wanted]
    long = tuple(name for name, size in axes if size > 1)
    return AxesAlong(tuple(name for name, _ in axes), long, math.prod(size for _, size in axes))


def axes_in_mesh_order(mesh: DeviceMesh, axes: str | Sequence[str]) -> tuple[str, ...]:
    """Return those of `axes` that the mesh has, in mesh order."""
    return axes_along(mesh, axes).names


def ranks_along(mesh: DeviceMesh, axes: str | Sequence[str]) -> tuple[int, ...]:
    """Return the global ranks along `axes` through this rank, in mesh order."""
    lines: dict[tuple[str, ...], tuple[int, ...]] = vars(mesh).setdefault(_LINES, {})
    names = axes_along(mesh, axes).names
    if names not in lines:
        coordinate = mesh_coordinate(mesh)
        line = tuple(
            slice(None) if name in names else c for (name, _), c in zip(axes_of_mesh(mesh), coordinate, strict=True)
        )
        with without_modes():  # the mesh's tensor of ranks needs its values
            lines[names] = tuple(mesh.mesh[line].flatten().tolist())
    return lines[names]


def ranks_in_mesh(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, whether this one is among them or not, in its order."""
    known: tuple[int, ...] | None = mesh.__dict__.get(_RANKS)
    if known is not None:
        return known
    with without_modes():  # as above
        ranks = tuple(mesh.mesh.flatten().tolist())
    setattr(mesh, _RANKS, ranks)
    return ranks


def flat_submesh(mesh: DeviceMesh, axes: str | Sequence[str]) -> DeviceMesh:
    """Return the 1-D mesh along `axes`, flattened when several, for users of a `DeviceMesh`, such as FSDP2.

    Making it is collective over all ranks of the job, not only those of the mesh.  It is made on the first call and
    kept for the life of the job; its parent mesh does not know it.
    """
    names = axes_in_mesh_order(mesh, axes)
    if len(names) == 1:
        return mesh if mesh.ndim == 1 else mesh[names[0]]
    meshes, root = _flat_by_axes.setdefault(_world_group(), {}), root_mesh(mesh)
    key = root, mesh, names
    if key not in meshes:
        meshes[key] = _flattened_apart(mesh if len(names) == mesh.ndim else mesh[names], root)
        _let_wait(meshes[key].get_group(), mesh.device_type, mesh_patience(mesh))
    return meshes[key]


def hybrid_submesh(mesh: DeviceMesh, axes: Sequence[str], replicate: Sequence[str]) -> DeviceMesh:
    """Return the ranks along `axes` as a mesh of two axes, those of `replicate` and the others: FSDP2's hybrid.

    Making it is collective over all ranks of the job, as making a `flat_submesh` is.
    """
    copies = axes_in_mesh_order(mesh, [name for name in axes if name in replicate])
    others = axes_in_mesh_order(mesh, [name for name in axes if name not in replicate])
    parts = [flat_submesh(mesh, copies), flat_submesh(mesh, others)]
    with of_the_job(), without_modes():
        return meshes_joined(parts)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `mesh` is a part of, or itself."""
    return mesh_root(mesh)


def _flattened_apart(mesh: DeviceMesh, root: DeviceMesh) -> DeviceMesh:
    """Return the flattened mesh, without a record of it in `root`.

    The root of a DTensor's mesh may know a flattened mesh for two axes that cut one dim, ``[Shard(0), Shard(0)]``. Then
    torch (2.13) gathers them in one step. It counts rows as if four ranks had cut the dim at once.  10 rows on 2 x 2
    ranks lie as 3, 2, 3, 2 (halves, cut again). They are read as 3, 3, 3, 1, and come back as other rows.
    """
    known = flattened_meshes(root)
    before = dict(known)
    try:
        with (
            of_the_job(),
            without_modes(),
            splitting_device_alone(_world_group(), mesh.device_type),
        ):  # the ranks are in a tensor, which must have values even while others have none
            alone = _backends_alone({"": mesh_size(mesh)}, mesh.device_type) or {}
            return mesh_flattened(mesh, backend_override=alone.get(""))
    finally:
        for name in known.keys() - before.keys():
            del known[name]


def split_axis_mesh(mesh: DeviceMesh, axis: str, parts: AxisSizes) -> DeviceMesh:
    """Return the same ranks in the same order, with `parts`, major to minor, in the place of an axis.

    Making it is collective over all ranks of the job, all of which the mesh must have.  It is made on the first call
    and kept for the life of the job.
    """
    meshes, key = _split_by_axis.setdefault(_world_group(), {}), (mesh, axis, parts)
    if key not in meshes:
        names, sizes = zip(*parts, strict=True)
        device = mesh.device_type
        with of_the_job(), without_modes(), splitting_device_alone(_world_group(), device):
            alone = _backends_alone(dict(parts), device)
            meshes[key] = mesh_unflattened(mesh, axis, sizes, names, backend_override=alone)
        for name in names:
            _let_wait(meshes[key].get_group(name), mesh.device_type, mesh_patience(mesh))
    return meshes[key]


def has_every_rank(mesh: DeviceMesh) -> bool:
    """Say whether the mesh has all ranks of the job."""
    return mesh_size(mesh) == job_size()


class TrafficKind(Enum):
    """Traffic that has groups of its own, where a backend runs what a group does in order: so neither kind waits
    behind the other, nor collectives of tiles behind either.
    """

    MESSAGES = "messages"  # between two ranks: halos, rows, blocks of products
    GRADIENTS = "gradients"
    WEIGHTS = "weights"  # FSDP2's: gathers of cut weights, and sums of their gradients


def digest_of_ranks(ranks: Sequence[int]) -> str:
    """Return 32 characters for these ranks in this order, for a name in the job's store.

    Torch's store takes names of fewer than 8192 bytes, which are not enough for the numbers of 2000 ranks.
    """
    return blake2b(",".join(map(str, ranks)).encode(), digest_size=16).hexdigest()


def _group_apart(kind: TrafficKind, ranks: Sequence[int], group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """Return the group of these ranks for that kind, on the backend of `group`.

    The first call makes it: all of the ranks make that call, and no others.  Its name has all that it depends on.
    Torch would number it by the groups that each rank knows, and these differ between stages of a pipeline.
    """
    groups = _groups_by_kind.setdefault(_world_group(), {})
    ranks = sorted(ranks)
    name = f"jigsaw {kind.value} {device} {digest_of_ranks(ranks)}"
    if name not in groups:
        with of_the_job(), without_modes():
            groups[name] = group_by_name(name, ranks, group, device, group_patience(group, device))
    return groups[name]


def groups_along(
    mesh: DeviceMesh, axes: str | Sequence[str], kind: TrafficKind | None = None
) -> list[tuple[dist.ProcessGroup, tuple[int, ...]]]:
    """Return the groups that join the ranks along `axes`, each with its ranks in mesh order (`torch` sorts those of a
    group).

    There is one group where possible.  An axis has the mesh's own; all axes of a mesh over the whole job have the
    job's.  For other axes of such a mesh the first call makes one, for all its ranks at once.  A mesh that leaves out
    ranks of the job cannot make a group without them: `torch` names a group by how many each rank knows.  There the
    axes follow each other, major to minor.  The `kind` of what travels may have groups apart.
    """
    along = _shared_groups_along(mesh, axes)
    if kind is None or not along or not takes_batches(along[0][0], torch.device(mesh.device_type)):
        return along
    return [(_group_apart(kind, ranks, group, mesh.device_type), ranks) for group, ranks in along]


def _shared_groups_along(
    mesh: DeviceMesh, axes: str | Sequence[str]
) -> list[tuple[dist.ProcessGroup, tuple[int, ...]]]:
    long = axes_along(mesh, axes).long
    if len(long) > 1 and mesh_size(mesh) == job_size():
        ranks = ranks_along(mesh, long)
        return [(_world_group() if len(ranks) == mesh_size(mesh) else flat_submesh(mesh, long).get_group(), ranks)]
    return [(_axis_group(mesh, name), ranks_along(mesh, name)) for name in long]


def _axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return ``mesh.get_group(axis)``, which itself looks up the name of the group at every call."""
    names: dict[str, Any] = vars(mesh).setdefault(_GROUPS, {})
    if axis not in names:
        names[axis] = mesh.get_group(axis).group_name
    return group_of_name(names[axis])


def mesh_group(mesh: DeviceMesh, kind: TrafficKind | None = None) -> dist.ProcessGroup:
    """Return a group that every rank of the mesh is in: an axis' own, or the job's; or one apart, for that `kind`."""
    sizes = axes_of_mesh(mesh)
    long = _axes_among(sizes, tuple(dict(sizes))).long
    group = _axis_group(mesh, long[0]) if len(long) == 1 else _world_group()
    if kind is None or not takes_batches(group, torch.device(mesh.device_type)):
        return group
    return _group_apart(kind, ranks_in_mesh(mesh), group, mesh.device_type)


def group_of_kind(kind: TrafficKind, group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """Return the group apart of the same ranks for that `kind`; the group itself where all traffic has one."""
    if group.size() == 1 or not takes_batches(group, torch.device(device)):
        return group
    return _group_apart(kind, dist.get_process_group_ranks(group), group, device)


def _world_group() -> dist.ProcessGroup:
    group = job_group()
    if group is None:
        raise ShardingError(
            "the process group that the mesh was made in has ended; make a mesh in the one that runs now"
        )
    return group


def is_same_mesh(a: DeviceMesh, b: DeviceMesh) -> bool:
    """Say whether two meshes have the same ranks at the same coordinates of axes of the same names."""
    if a is b or a == b:
        return True
    alike = a.device_type == b.device_type and a.mesh_dim_names == b.mesh_dim_names
    return alike and torch.equal(a.mesh, b.mesh)
