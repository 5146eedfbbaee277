"""Carries a read plan out: this rank's chunks are loaded by a pool of threads and land in the local sample."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io._peers import Peers
from jigsaw.io._scatter import FoundNaNError, Placing
from jigsaw.io.errors import NaNError
from jigsaw.io.plan import Box, Job, ReadPlan, Row
from jigsaw.io.table import Loaded, Store

Array = NDArray[Any]


class Engine:
    """Reads samples of a store for one rank of a domain group.

    `threads` load chunks at the same time.  `stats` adds up what was done, and equals the plans' rows of this rank.
    """

    def __init__(self, store: Store, peers: Peers | None = None, threads: int = 1) -> None:
        self.store = store
        self.peers = peers or Peers()
        self.stats = Row()
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jigsaw-read")

    def read(self, plan: ReadPlan, out: Array | None = None) -> Array:
        """This rank's held box of the sample [T, C, \\*space], in `out` when given."""
        work = _Reading(self, plan, out)
        shared = [job for job in plan.shared if self.peers.me in job.readers]
        list(self._pool.map(work.private, [*shared, *plan.private(self.peers.me)]))
        return work.out

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def room(self, size: int) -> NDArray[np.uint8]:
        """Scratch memory of this thread."""
        found = getattr(self._scratch, "room", None)
        if found is None or found.size < size:
            found = self._scratch.room = np.empty(size, np.uint8)
        return found[:size]

    def count(self, **more: int) -> None:
        """Add to the counters."""
        with self._lock:
            self.stats += Row(**more)


class _Reading:
    """One plan under way on one rank."""

    def __init__(self, engine: Engine, plan: ReadPlan, out: Array | None) -> None:
        request = plan.request
        self.engine, self.plan, self.me = engine, plan, engine.peers.me
        coord = list(request.layout.coords())[self.me]
        shape, dtype = request.layout.local_shape(coord), np.dtype(request.dtype)
        self.out = np.empty(shape, dtype) if out is None else out
        if self.out.shape != shape or self.out.dtype != dtype:
            raise ValueError(f"out is {self.out.dtype}{list(self.out.shape)}, this rank reads {dtype}{list(shape)}")
        channels = request.layout.held(coord)[1]
        self.placings = [Placing.of(part, plan.tables[part.array], request, channels) for part in request.parts]

    def private(self, job: Job) -> None:
        """Load a chunk that this rank alone reads, and take what it needs of it."""
        table = self.plan.tables[job.array]
        room = self.engine.room(table.chunk_bytes)
        loaded = table.load(job.chunk, room)
        self.count_load(job, loaded)
        self.take(job, None if loaded.stored is None else table.view(room))

    def take(self, job: Job, chunk: Array | None) -> None:
        """This rank's boxes of a chunk, of a missing one when it is None."""
        for box in self.plan.boxes(job, self.me):
            try:
                if chunk is None:
                    self.placings[box.part].place_fill(box, self.out)
                else:
                    self.placings[box.part].place(chunk, box, self.out)
            except FoundNaNError:
                raise self._nan(job, box) from None
        self.engine.count(useful_bytes=self.plan.box_bytes(job, self.me))

    def count_load(self, job: Job, loaded: Loaded) -> None:
        if loaded.stored is not None:
            size = self.plan.tables[job.array].chunk_bytes
            self.engine.count(
                requests=1, chunks=1, fallback=int(loaded.fallback), stored_bytes=loaded.stored, decoded_bytes=size
            )

    def _nan(self, job: Job, box: Box) -> NaNError:
        table = self.plan.tables[job.array]
        picks = self.plan.request.parts[box.part].picks
        at = [
            f"{name} {c * size + runs[0].source}"
            for name, picked, c, size, runs in zip(table.dims, picks, job.chunk, table.chunks, box.runs, strict=True)
            if picked is not None
        ]
        return NaNError(
            f"array {job.array!r} has missing values at {', '.join(at) or 'its only step'} (chunk {job.chunk}) and "
            f'nan="raise" allows none; use nan="keep" or a number'
        )
