"""Chunks of far stores, fetched before they are needed: many requests under way, within a budget of bytes.

A round trip takes as long as decoding many chunks, so fetching has threads of its own, which mostly wait. The chunks of
the next read are fetched behind those of the current one, so that the connection is never idle between two reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from jigsaw.io.chunks.chunk import FetchedBytes
from jigsaw.io.chunks.remote_files import REQUESTS_IN_FLIGHT, while_waited_for
from jigsaw.io.reading.chunk_readers import ChunkJob
from jigsaw.io.reading.read_plan import FetchBatch, ReadPlan


@dataclass(eq=False)
class _FetchGroup:
    """Jobs that are fetched together: a promise of what was fetched for each, and those that were not taken yet."""

    plan: ReadPlan
    batch: FetchBatch
    promise: Future[dict[ChunkJob, FetchedBytes | None]]
    left: set[ChunkJob]
    started: bool = False


class FetchAhead:
    """The far jobs of the reads of one rank, fetched in the order in which they are added.

    At most `budget` bytes, or one request, are under way or fetched and not taken yet. Bytes in flight `beside` them
    count too, and a chunk of unknown stored size counts as its decoded one.
    """

    def __init__(self, me: int, budget: int) -> None:
        self._me, self._budget = me, budget
        self.beside = 0
        self._pool = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, thread_name_prefix="jigsaw-fetch")
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="jigsaw-plan")
        self._expected: dict[Hashable, Future[ReadPlan]] = {}
        self._waiting: deque[_FetchGroup] = deque()
        self._groups: dict[ReadPlan, dict[ChunkJob, _FetchGroup]] = {}
        # `_lock` guards `_waiting`, `_groups`, `_held` and what is left of each group.  `_expected` is the reading
        # thread's alone; the planning thread comes here by `add` only.
        self._held = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def expect(self, key: Hashable, plan: Callable[[], ReadPlan]) -> None:
        """Plan a read that will follow, in a thread, and begin to fetch for it."""
        if key not in self._expected:
            self._expected[key] = self._planner.submit(self._planned, plan)

    def _planned(self, plan: Callable[[], ReadPlan]) -> ReadPlan:
        with while_waited_for(lambda: not self._is_closed):
            return self.add(plan())

    def planned(self, key: Hashable) -> ReadPlan | None:
        """Return the plan of a read that was expected, or raise its error; None when another read was expected."""
        future = self._expected.pop(key, None)
        if future is not None:
            return future.result()
        self.forget()
        return None

    def forget(self) -> None:
        while self._expected:
            _, future = self._expected.popitem()
            if not future.cancel() and future.exception() is None:
                self.drop(future.result())

    def add(self, plan: ReadPlan) -> ReadPlan:
        """Fetch for this plan what this rank loads of far stores, behind what was added before; once."""
        if plan in self._groups:
            return plan
        groups = [_FetchGroup(plan, batch, Future(), set(batch.jobs)) for batch in plan.batches(self._me)]
        with self._lock:
            self._groups[plan] = {job: group for group in groups for job in group.batch.jobs}
            self._waiting.extend(groups)
            self._submit()
        return plan

    def take(self, plan: ReadPlan, job: ChunkJob) -> FetchedBytes | None:
        """Return the bytes fetched for a job, once they have arrived; None for a missing chunk."""
        with self._lock:
            group = self._groups.get(plan, {}).get(job)
            if group is None:
                raise CancelledError
            if not group.started:  # the budget is full, but a thread waits for this group, so start it now
                # exceed the budget, or each of two threads could hold the bytes that the other one waits for
                self._waiting.remove(group)
                self._start(group)
        try:
            # without the lock, because it may take seconds; popped, so that the bytes go when they are decoded
            return group.promise.result().pop(job)
        finally:
            with self._lock:
                self._let_go(group, {job})

    def drop(self, plan: ReadPlan) -> None:
        """Fetch nothing more for a plan; results of its requests under way are dropped."""
        with self._lock:
            groups = self._groups.pop(plan, {})
            if any(not group.started for group in groups.values()):
                self._waiting = deque(group for group in self._waiting if group.plan is not plan)
            for group in groups.values():
                # A promise that no thread works on is canceled. One under way is too, as it is never marked as running:
                # its thread finds that by `while_waited_for`, and its result has nowhere to go (InvalidStateError).
                group.promise.cancel()
                self._let_go(group, group.left)

    def close(self) -> None:
        """End the threads; requests under way run out, and those that fail are not tried again."""
        self._is_closed = True
        self.forget()
        for plan in list(self._groups):
            self.drop(plan)
        self._planner.shutdown()
        self._pool.shutdown(cancel_futures=True)

    def _submit(self) -> None:
        most = self._budget - self.beside
        while self._waiting and (not self._held or self._held + self._waiting[0].batch.size <= most):
            self._start(self._waiting.popleft())

    def _start(self, group: _FetchGroup) -> None:
        group.started = True
        self._held += group.batch.size
        self._pool.submit(_fetch_group, group)

    def _let_go(self, group: _FetchGroup, jobs: set[ChunkJob]) -> None:
        """Count the bytes of a group until the last of its jobs is taken."""
        if group.left:  # empty if the group was dropped while one of its jobs was being taken
            group.left -= jobs
            if group.started and not group.left:
                self._held -= group.batch.size
                self._submit()


def _fetch_group(group: _FetchGroup) -> None:
    """Fetch what a group's jobs need, unless the group was dropped."""
    if group.promise.cancelled():
        return
    waiting = while_waited_for(lambda: not group.promise.cancelled())
    with waiting, suppress(InvalidStateError):  # the promise may have been canceled meanwhile
        plan, jobs, fetched = group.plan, group.batch.jobs, None
        try:
            if group.batch.requests:  # without requests the jobs are missing chunks, possibly of several arrays
                chunk_parts = [(job.chunk, plan.part_of(job)) for job in jobs]
                fetched = plan.tables[jobs[0].array].decoding.fetch_together(chunk_parts, group.batch.requests)
        except BaseException as e:
            group.promise.set_exception(e)
        else:
            group.promise.set_result(dict(zip(jobs, fetched or [None] * len(jobs), strict=True)))
