"""Groups by which ranks send, connected where all of them are: at one point of the program.

NCCL connects a group on its first operation, for which the host waits until every rank of the group has come.  Two
ranks that come to the first operations of two groups in different order would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.ranks.mesh import TrafficKind, group_of_kind, groups_along, mesh_group, mesh_size
from jigsaw.ranks.slab_mesh import SlabMesh
from jigsaw.ranks.waiting_ranks import OpenWait
from jigsaw.torch_internals.groups import takes_batches

_connected_groups: WeakSet[dist.ProcessGroup] = WeakSet()


def connect_ranks(mesh: DeviceMesh, traffic: TrafficKind = TrafficKind.MESSAGES) -> dist.ProcessGroup | None:
    """Return the group by which ranks of a mesh send; all of them call this before any does, also one that will not.

    The first call makes it.  Gloo has connected it already.  None where nobody is to send: on one rank, and on slabs.

    Raises: `ShardingError` for a mesh of several axes on some of the ranks of a job, on a backend of GPUs that has no
    groups apart.
    """
    if isinstance(mesh, SlabMesh) or mesh_size(mesh) == 1:
        return None
    group = mesh_group(mesh, traffic)
    if mesh.device_type == "cpu":
        return group
    if group.size() > mesh_size(mesh):
        raise ShardingError(
            f"{mesh} of several axes leaves out ranks of the job; make it over all of them, or of one axis"
        )
    return _connected(group, mesh.device_type)


def connect_sums(mesh: DeviceMesh, axes: Iterable[tuple[str, ...]], has_blocks: bool) -> None:
    """Connect the groups of gradients, of their sums along each of `axes` and their blocks; all ranks call this.

    When a rank comes to its first sum depends on when its buckets are full.
    """
    if not takes_batches(mesh_group(mesh), torch.device(mesh.device_type)):
        return
    for names in axes:
        for group, _ in groups_along(mesh, names, TrafficKind.GRADIENTS):
            _connected(group, mesh.device_type)
    if has_blocks:
        connect_ranks(mesh, TrafficKind.GRADIENTS)


def group_of_weights(group: dist.ProcessGroup, mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the same ranks for gathers of cut weights and sums of their gradients, connected."""
    apart = group_of_kind(TrafficKind.WEIGHTS, group, mesh.device_type)
    return apart if apart is group else _connected(apart, mesh.device_type)


def _connected(group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    if device != "cpu" and group not in _connected_groups:
        _connected_groups.add(group)
        with OpenWait("the first message", dist.get_process_group_ranks(group)):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group
