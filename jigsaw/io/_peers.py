"""The ranks that share a sample, as the reader meets them: a group of its own, never the model's.

Reading runs in a thread of its own beside the model's collectives, so it may not use their groups.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.layout import ShardingError
from jigsaw.mesh import axes_of


class Peers:
    """The ranks of one domain group, numbered in mesh order: this one is `me`.

    `hosts` says for each on which machine it runs: those on one machine read through shared memory.
    """

    def __init__(self, me: int = 0, ranks: Sequence[int] = (0,), group: Any = None, host: str | None = None) -> None:
        self.me, self.size = me, len(ranks)
        self._group = group
        if group is not None:
            by_rank = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(group))}
            self._slot = [by_rank[rank] for rank in ranks]
        found = self.gather((host or this_host(), os.getpid()))
        self.hosts = tuple(h for h, _ in found)
        self.pids = tuple(pid for _, pid in found)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Those on this machine, this one included."""
        return tuple(m for m, host in enumerate(self.hosts) if host == self.hosts[self.me])

    @property
    def is_spread(self) -> bool:
        """Whether they run on more than one machine."""
        return len(set(self.hosts)) > 1

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of each."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return [found[slot] for slot in self._slot]

    def swap(self, outgoing: Sequence[NDArray[np.uint8]], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Give each its bytes of `outgoing`, and get `sizes` bytes from each."""
        order = np.argsort(self._slot).tolist()
        sent = torch.from_numpy(np.concatenate([outgoing[m] for m in order]))
        room = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(
            room, sent, [sizes[m] for m in order], [outgoing[m].size for m in order], group=self._group
        )
        parts = dict(zip(order, room.split([sizes[m] for m in order]), strict=True))
        return [parts[m].numpy() for m in range(self.size)]


def meet(
    mesh: DeviceMesh | None, apart: Sequence[str] = ("data",), host: str | None = None, timeout: float = 300.0
) -> Peers:
    """The ranks that share this rank's samples: those that differ from it along other axes than `apart`.

    Collective over the mesh: it makes a gloo group.  `host` overrides the name of this machine.
    """
    if mesh is None or mesh.size() == 1:
        return Peers(host=host)
    axes = axes_of(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(f"rank {dist.get_rank()} is not part of the mesh {mesh}; only its ranks may read")
    mine = tuple(c if name in apart else slice(None) for (name, _), c in zip(axes, coordinate, strict=True))
    ranks: list[int] = mesh.mesh[mine].flatten().tolist()
    me = ranks.index(dist.get_rank())
    if len(ranks) == 1:
        return Peers(host=host)
    group = dist.new_group(ranks, timedelta(seconds=timeout), "gloo", use_local_synchronization=True)
    return Peers(me, ranks, group, host)


def this_host() -> str:
    """A name for what can share memory: a machine since it was started, and a namespace of process ids on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
