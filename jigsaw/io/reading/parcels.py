"""Boxes that ranks of other machines need of the chunks that this rank loads, packed into one exchange."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from jigsaw.io.chunks.files import ByteArray
from jigsaw.io.reading.chunk_boxes import ChunkBox
from jigsaw.io.reading.chunk_jobs import NO_OWNER, ChunkJob
from jigsaw.io.reading.peers import PeerGroup
from jigsaw.io.reading.placing import AnyArray, pack_box
from jigsaw.io.reading.read_plan import ReadPlan


class BoxParcels:
    """The boxes of one plan that go from machine to machine.

    They travel without a description, because both sides know the contents from the plan. Say ranks 0 and 1 are on one
    machine, 2 and 3 on another. Rank 0 has loaded the shared jobs 4 and 7, which all four read. Rank 0 sends rank 2 its
    boxes of job 4, then those of job 7, and rank 3 likewise. Rank 2 counts the bytes of its own boxes of the jobs 4 and
    7, and cuts what comes from rank 0 in that order. Rank 1 has taken its boxes from shared memory.
    """

    def __init__(self, plan: ReadPlan, peers: PeerGroup) -> None:
        self._plan, self._peers, self._near = plan, peers, frozenset(peers.neighbours)
        self._packed: dict[tuple[int, int], list[ByteArray]] = {}

    @property
    def are_any(self) -> bool:
        """True where any rank sends some: the same on every rank."""
        jobs, hosts = self._plan.shared, self._peers.hosts
        return any(hosts[job.owner] != hosts[m] for job in jobs if job.owner != NO_OWNER for m in job.readers)

    def pack(self, job: ChunkJob, number: int, values: AnyArray) -> None:
        """Keep what others need of a chunk, under the job's number, until all go out together."""
        # in the loading threads: each (reader, number) is stored by one of them, and by no other.  Chunks are not cut
        # into sections where ranks are on several machines, so all boxes of a job are here at once
        for reader in job.readers:
            if reader not in self._near:
                self._packed[reader, number] = [pack_box(values, box) for box in self._plan.boxes(job, reader)]

    def make_room(self) -> None:
        """Make room for what goes and for what comes: what fails for lack of memory fails before the others wait."""
        # Sorted by (reader, number): threads have packed in any order, and an all-to-all wants what goes to rank 0
        # first.  The receiver walks `plan.shared`, by owner, in the same order of numbers, and both take the boxes of a
        # job as `plan.boxes` has them.
        plan, me = self._plan, self._peers.me
        packed = [(to, part) for to, number in sorted(self._packed) for part in self._packed.pop((to, number))]
        self._counts = [0] * self._peers.size
        for to, part in packed:
            self._counts[to] += part.size
        self._going = np.concatenate([np.empty(0, np.uint8), *(part for _, part in packed)])
        self._wanted: list[list[ChunkJob]] = [[] for _ in self._counts]
        for job in plan.shared.read_by(me):
            if job.owner != NO_OWNER and job.owner not in self._near:
                self._wanted[job.owner].append(job)
        self._sizes = [sum(plan.box_bytes(job, me) for job in jobs) for jobs in self._wanted]
        self._coming = np.empty(sum(self._sizes), np.uint8)

    def exchange_boxes(self) -> Iterator[tuple[ChunkJob, ChunkBox, AnyArray]]:
        """Send the packed boxes, and yield those received, box by box, in the stored dtype. Collective over the peers.

        *Sends*: the packed boxes, by one all-to-all.
        """
        self._peers.exchange_bytes(self._going, self._counts, self._coming, self._sizes)
        done = 0
        for job in (job for jobs in self._wanted for job in jobs):
            dtype = np.dtype(self._plan.tables[job.array].dtype)
            for box in self._plan.boxes(job, self._peers.me):
                size = prod(box.extents) * dtype.itemsize
                yield job, box, self._coming[done : done + size].view(dtype).reshape(box.extents)
                done += size
