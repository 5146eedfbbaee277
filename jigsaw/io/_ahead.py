"""Chunks of far stores, fetched before they are asked for: many requests under way, within a budget of bytes.

A round trip takes as long as decoding many chunks, so fetching has threads of its own, which mostly wait.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jigsaw.io._memory import fresh
from jigsaw.io.plan import Job, ReadPlan
from jigsaw.io.table import Fetched

IN_FLIGHT = 32


class Ahead:
    """The jobs of one read, fetched in their order; `take` waits for one of them.

    What is under way or fetched and not taken yet is at most `budget` bytes, or one chunk; a chunk of unknown stored
    size counts as its decoded one.
    """

    def __init__(self, pool: ThreadPoolExecutor, plan: ReadPlan, jobs: Sequence[Job], budget: int) -> None:
        self._pool, self._plan, self._budget = pool, plan, budget
        self._waiting = list(reversed(jobs))
        self._futures: dict[Job, Future[Fetched | None]] = {}
        self._held = 0
        self._lock = threading.Lock()
        with self._lock:
            self._submit()

    def take(self, job: Job) -> Fetched | None:
        """What was fetched for a job; None for a missing chunk."""
        with self._lock:
            if job not in self._futures:  # the budget is full: what is asked for goes first
                self._waiting.remove(job)
                self._start(job)
            future = self._futures[job]
        try:
            return future.result()
        finally:
            with self._lock:
                del self._futures[job]
                self._held -= self._size(job)
                self._submit()

    def stop(self) -> None:
        """Fetch nothing more; requests under way run out."""
        with self._lock:
            self._waiting.clear()
            for future in self._futures.values():
                future.cancel()

    def _submit(self) -> None:
        while self._waiting and len(self._futures) < 2 * IN_FLIGHT:
            if self._futures and self._held + self._size(self._waiting[-1]) > self._budget:
                return
            self._start(self._waiting.pop())

    def _start(self, job: Job) -> None:
        table, part = self._plan.tables[job.array], self._plan.part_of(job)
        self._held += self._size(job)
        self._futures[job] = self._pool.submit(table.fetch, job.chunk, fresh, part)

    def _size(self, job: Job) -> int:
        part, ref = self._plan.part_of(job), self._plan.ref(job.array, job.chunk)
        if part is not None:
            return part.stored
        return (ref.length if ref else None) or self._plan.tables[job.array].bytes_of(job.chunk)
