"""Reading ahead: one thread that works through a list of reads in order, as many at a time as a budget allows."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from jigsaw.errors import ReadError
from jigsaw.io.reading.peers import HomeProcess

JobType = TypeVar("JobType")
ResultType = TypeVar("ResultType")

_END_WAIT_S = 5.0
"""Seconds that the end of the process waits for reads that are due: other ranks may never take part in them."""


class BatchPrefetch(Generic[JobType, ResultType]):
    """The results of ``read(job)`` in order, at most `ahead` of them ready or under way before they are asked for.

    Reads of several ranks must pair up, so what a rank reads may depend only on how many results it took: after
    `stop` the thread still does the reads that were due, unless the rank reads `alone`.  An error of the thread is
    raised, with its own traceback, where its result would have been.
    """

    def __init__(self, read: Callable[[JobType], ResultType], jobs: Iterator[JobType], ahead: int, alone: bool) -> None:
        self._read, self._jobs, self._ahead, self._alone = read, jobs, ahead, alone
        self._ready: deque[tuple[ResultType | None, BaseException | None]] = deque()
        self.home = HomeProcess("this iteration")
        self._taken = 0
        self._stopped = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0
        # `_changed` guards `_ready`, `_taken` and `_stopped`; the jobs are the thread's own from here on
        if ahead > 0:
            _running_prefetches.add(self)
            self._thread = threading.Thread(target=self._work, name="jigsaw-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[ResultType]:
        return self

    def __next__(self) -> ResultType:
        started = time.perf_counter()
        try:
            return self._next_ready() if self._thread else self._read(next(self._jobs))
        finally:
            self.waited_s += time.perf_counter() - started

    def _next_ready(self) -> ResultType:
        self.home.check_home()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._stopped)
            if self._stopped:
                raise ReadError("this iteration has ended: a newer one, or a loaded state, took over its loader")
            result, error = self._ready[0]  # an error or the end stays there, because callers may ask again
            if error is not None:
                raise error
            if result is None:
                raise StopIteration  # made anew: one that is kept would keep the frames it went through, and a batch
            self._ready.popleft()
            self._taken += 1
            self._changed.notify_all()
        return result

    def stop(self) -> None:
        """Read no further than what was due; returns at once."""
        if not self.home.is_here:
            return  # the thread is not, and may have held the lock when this process was forked
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, so many seconds at most."""
        if self._thread is not None:
            self._thread.join(timeout)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            for number, job in enumerate(self._jobs):
                if not self._is_due(number):
                    return
                self._hand_over(self._read(job), None)
            self._hand_over(None, None)
        except BaseException as error:  # the taker raises it
            self._hand_over(None, error)

    def _is_due(self, number: int) -> bool:
        """Wait until a read may begin; False when it never will."""
        # Take four ranks and two reads ahead. Rank 0 leaves the loop after three batches, and so do the others, whose
        # threads may be a little behind or ahead. Reads 0 to 4 (3 taken + 2) were due on all of them. So all of them do
        # these reads, begun or not when `stop` came: else rank 1 would wait in read 4 for rank 0.
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or number < self._taken + self._ahead)
            return not (self._stopped and (self._alone or number >= self._taken + self._ahead))

    def _hand_over(self, result: ResultType | None, error: BaseException | None) -> None:
        with self._changed:
            if not self._stopped:  # what was read only because it was due goes, and its memory with it
                self._ready.append((result, error))
                self._changed.notify_all()


_running_prefetches: weakref.WeakSet[BatchPrefetch[Any, Any]] = weakref.WeakSet()
"""Prefetches whose thread may run: each is alive as long as its thread."""


@atexit.register
def _end_prefetches() -> None:
    """End the threads while Python still runs: one that comes back from a library later would abort the process."""
    until = time.monotonic() + _END_WAIT_S
    for each in list(_running_prefetches):
        each.stop()
    for each in list(_running_prefetches):
        each.join(max(0.0, until - time.monotonic()))
