"""What ranks of other machines need of the chunks that this rank loads: packed boxes, in one exchange."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io._peers import Peers
from jigsaw.io._scatter import pack
from jigsaw.io.plan import NOBODY, Box, Job, ReadPlan

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


class Parcels:
    """The boxes of one plan that go from machine to machine."""

    def __init__(self, plan: ReadPlan, peers: Peers) -> None:
        self._plan, self._peers, self._near = plan, peers, frozenset(peers.neighbours)
        self._packed: dict[tuple[int, int], list[Bytes]] = {}

    @property
    def are_any(self) -> bool:
        """Whether any rank sends some: the same on every rank."""
        hosts = self._peers.hosts
        return any(
            hosts[job.owner] != hosts[m] for job in self._plan.shared if job.owner != NOBODY for m in job.readers
        )

    def pack(self, job: Job, number: int, values: Array) -> None:
        """Keep what others need of a chunk, under the job's number, until all go out together."""
        for reader in job.readers:
            if reader not in self._near:
                self._packed[reader, number] = [pack(values, box) for box in self._plan.boxes(job, reader)]

    def swap(self) -> Iterator[tuple[Job, Box, Array]]:
        """Send what was packed; what comes, box by box, in the stored dtype.  Collective over the peers.

        *Sends*: the packed boxes, by one all-to-all.
        """
        plan, me, nothing = self._plan, self._peers.me, np.empty(0, np.uint8)
        packed = [(to, self._packed[to, number]) for to, number in sorted(self._packed)]
        outgoing = [
            np.concatenate([nothing, *(part for to, parts in packed if to == m for part in parts)])
            for m in range(self._peers.size)
        ]
        coming = [
            [job for job in plan.shared if job.owner == m and me in job.readers and m not in self._near]
            for m in range(self._peers.size)
        ]
        sizes = [sum(plan.box_bytes(job, me) for job in jobs) for jobs in coming]
        for jobs, got in zip(coming, self._peers.swap(outgoing, sizes), strict=True):
            yield from self._opened(jobs, got)

    def _opened(self, jobs: list[Job], got: Bytes) -> Iterator[tuple[Job, Box, Array]]:
        done = 0
        for job in jobs:
            dtype = np.dtype(self._plan.tables[job.array].dtype)
            for box in self._plan.boxes(job, self._peers.me):
                size = prod(box.extents) * dtype.itemsize
                yield job, box, got[done : done + size].view(dtype).reshape(box.extents)
                done += size
