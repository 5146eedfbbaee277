"""Chunks of far stores, fetched before they are asked for: many requests under way, within a budget of bytes.

A round trip takes as long as decoding many chunks, so fetching has threads of its own, which mostly wait.  The chunks
of the next read are fetched behind those of the one under way, so that the line never runs empty between two.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jigsaw.io.fetch.at_once import IN_FLIGHT
from jigsaw.io.fetch.batches import Batch
from jigsaw.io.plan import Job, ReadPlan
from jigsaw.io.table import Fetched

Key = tuple[int, Job]
"""The `id` of a plan, and a job of it."""


@dataclass(eq=False)
class _Group:
    """Jobs that are fetched together."""

    plan: ReadPlan
    batch: Batch
    size: int
    promises: dict[Job, Future[Fetched | None]]
    started: bool = False


class Ahead:
    """The far jobs of the reads of one rank, fetched in the order in which they are added.

    What is under way or fetched and not taken yet is at most `budget` bytes, or one request; a chunk of unknown stored
    size counts as its decoded one.
    """

    def __init__(self, me: int, budget: int) -> None:
        self._me, self._budget = me, budget
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="jigsaw-fetch")
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="jigsaw-plan")
        self._expected: dict[Hashable, Future[ReadPlan]] = {}
        self._waiting: deque[_Group] = deque()
        self._groups: dict[Key, _Group] = {}
        self._plans: dict[int, ReadPlan] = {}
        self._held = 0
        self._lock = threading.Lock()

    # -- reads to come -----------------------------------------------------------------------------------------------

    def expect(self, key: Hashable, plan: Callable[[], ReadPlan]) -> None:
        """Plan a read that will follow, in a thread, and begin to fetch for it."""
        if key not in self._expected:
            self._expected[key] = self._planner.submit(lambda: self.add(plan()))

    def planned(self, key: Hashable) -> ReadPlan | None:
        """The plan of a read that was expected; None, and nothing is expected any more, when it was another one.

        Raises: what planning it raised.
        """
        found = self._expected.pop(key, None)
        if found is not None:
            return found.result()
        self.forget()
        return None

    def forget(self) -> None:
        """Give up all reads that were expected and have not begun."""
        while self._expected:
            _, future = self._expected.popitem()
            if not future.cancel() and future.exception() is None:
                self.drop(future.result())

    # -- fetching ----------------------------------------------------------------------------------------------------

    def add(self, plan: ReadPlan) -> ReadPlan:
        """Fetch for this plan what this rank loads of far stores, behind what was added before; once."""
        groups = [] if id(plan) in self._plans else [self._group(plan, batch) for batch in plan.batches(self._me)]
        with self._lock:
            self._plans[id(plan)] = plan
            self._waiting.extend(groups)
            self._groups |= {(id(plan), job): group for group in groups for job in group.batch.jobs}
            self._submit()
        return plan

    def take(self, plan: ReadPlan, job: Job) -> Fetched | None:
        """What was fetched for a job, once it is there; None for a missing chunk."""
        with self._lock:
            group = self._groups.get((id(plan), job))
            if group is None:
                raise CancelledError
            if not group.started:  # the budget is full: what is asked for goes first
                self._waiting.remove(group)
                self._start(group)
            promise = group.promises[job]
        try:
            return promise.result()
        finally:
            with self._lock:
                self._let_go(group, job)
                self._submit()

    def drop(self, plan: ReadPlan) -> None:
        """Fetch nothing more for a plan; nobody waits for its requests under way."""
        with self._lock:
            if self._plans.pop(id(plan), None) is None:
                return
            self._waiting = deque(group for group in self._waiting if group.plan is not plan)
            for (number, job), group in list(self._groups.items()):
                if number == id(plan):
                    group.promises[job].cancel()
                    self._let_go(group, job)
            self._submit()

    def close(self) -> None:
        """End the threads; requests under way run out."""
        self.forget()
        self._planner.shutdown()
        self._pool.shutdown(cancel_futures=True)

    def _group(self, plan: ReadPlan, batch: Batch) -> _Group:
        return _Group(plan, batch, sum(_size(plan, job) for job in batch.jobs), {job: Future() for job in batch.jobs})

    def _submit(self) -> None:
        while self._waiting and (not self._held or self._held + self._waiting[0].size <= self._budget):
            self._start(self._waiting.popleft())

    def _start(self, group: _Group) -> None:
        group.started = True
        self._held += group.size
        self._pool.submit(_fetch, group, dict(group.promises))

    def _let_go(self, group: _Group, job: Job) -> None:
        if self._groups.pop((id(group.plan), job), None) is not None:
            del group.promises[job]
            self._held -= _size(group.plan, job) if group.started else 0


def _size(plan: ReadPlan, job: Job) -> int:
    part, ref = plan.part_of(job), plan.ref(job.array, job.chunk)
    if part is not None:
        return part.stored
    return (ref.length if ref else None) or plan.tables[job.array].bytes_of(job.chunk)


def _fetch(group: _Group, promises: dict[Job, Future[Fetched | None]]) -> None:
    """Fetch what a group's jobs need, unless nobody wants it any more."""
    if all(promise.cancelled() for promise in promises.values()):
        return
    plan, jobs = group.plan, group.batch.jobs
    table = plan.tables[jobs[0].array]
    try:
        found = table.fetch_together([(job.chunk, plan.part_of(job)) for job in jobs], group.batch.requests)
    except BaseException as e:
        for promise in promises.values():
            _keep(promise.set_exception, e)
        return
    for job, each in zip(jobs, found, strict=True):
        _keep(promises[job].set_result, each)


def _keep(promise: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):  # given up meanwhile
        promise(value)
