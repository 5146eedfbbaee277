"""`EpochLoader`: the base of every loader: an order that resumes anywhere, read ahead in the background."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import index
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import FieldError, ReadError
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.layout import MeshCoordinate
from jigsaw.io.datasets.samples import LoaderState, MeshSamples, SampleOrder
from jigsaw.io.reading.chunk_readers import ReadCounts
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.peers import HomeProcess
from jigsaw.io.series.times import is_whole_number
from jigsaw.ranks.mesh import mesh_coordinate

SamplesType = TypeVar("SamplesType", bound=MeshSamples)
LocalType = TypeVar("LocalType")
BatchType = TypeVar("BatchType")

BATCHES_AHEAD = 2
BATCHES_FORESEEN = 4
"""Number of batches known when one is read: planning one of a far store takes a round trip, and fetching another."""


@dataclass(frozen=True)
class BatchTurn:
    """The samples of one batch, the loader's place before it, and its place after the batch was returned.

    `following` are the samples of each of the `BATCHES_FORESEEN` batches after it; fewer at the end of an epoch.
    """

    samples: tuple[int, ...]
    at: LoaderState
    after: LoaderState
    following: tuple[tuple[int, ...], ...] = ()


class EpochLoader(ABC, Generic[SamplesType, LocalType, BatchType]):
    """Batches of a dataset; a subclass reads each (in the background, in order) and makes the batch of it."""

    _arrays = 1
    """Number of arrays that a batch is read into."""
    _kind: type[MeshSamples]
    _opener: str
    """Class of the loader's datasets, and the function that makes them."""

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        if "num_workers" in arguments:
            raise FieldError(
                f"num_workers={arguments['num_workers']!r} is an argument of torch's DataLoader; "
                f"jigsaw.io.{cls.__name__} reads in threads, not processes: write threads= for how many decode (by "
                "default this machine's cores, shared among its ranks), and prefetch_bytes= for how far it reads ahead"
            )
        return super().__new__(cls)

    def __init__(
        self,
        dataset: SamplesType,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        prefetch_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._check(dataset)
        count = len(dataset)
        check_whole_number("batch_size", batch_size, 1, ": the samples of a batch over the whole mesh")
        check_whole_number("seed", seed, 0)
        check_whole_number("prefetch_bytes", 0 if prefetch_bytes is None else prefetch_bytes, 0)
        check_whole_number("threads", 1 if threads is None else threads, 1)
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            # the text "no" would count as true
            if not isinstance(value, bool | np.bool_ | int) or value not in (0, 1):
                raise FieldError(f"{name}={value!r} must be True or False")
        if drop_last and batch_size > count:
            raise FieldError(f"batch_size={batch_size} with drop_last leaves no batch of a dataset of {count} samples")
        self.dataset = dataset
        self._prefetch_bytes, self._threads = prefetch_bytes, threads
        self._order = SampleOrder(count, batch_size, shuffle, drop_last, dataset.marks_of_samples)
        self._state = LoaderState(index(seed))
        self._resumed = False
        self._current: BatchPrefetch[BatchTurn, tuple[BatchTurn, LocalType]] | None = None
        self._waited_s = 0.0
        if dataset.is_live:
            self._join()  # all ranks of the mesh call this now

    @classmethod
    def _check(cls, dataset: Any) -> None:
        if not isinstance(dataset, cls._kind):
            raise FieldError(
                f"{cls.__name__}({dataset!r}) needs a jigsaw.io.{cls._kind.__name__}: "
                f"what {cls._opener}(…, mesh=…) returns"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._revive, (self.dataset, self._made_of(), self.state_dict())

    @classmethod
    def _revive(cls, dataset: SamplesType, made_of: Mapping[str, Any], state: Mapping[str, int]) -> Self:
        """Make an unpickled loader, at the place where it was pickled, even within an epoch."""
        loader = cls(dataset, **made_of)
        loader.load_state_dict(state)
        return loader

    def _made_of(self) -> dict[str, Any]:
        return {
            "batch_size": self._order.batch_size,
            "shuffle": self._order.shuffle,
            "drop_last": self._order.drop_last,
            "prefetch_bytes": self._prefetch_bytes,
            "threads": self._threads,
        }

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return math.ceil(self._order.usable / self._order.batch_size)

    @abstractmethod
    def _read(self, turn: BatchTurn) -> LocalType:
        """Read a batch; in the background."""

    @abstractmethod
    def _batch(self, turn: BatchTurn, block: LocalType) -> BatchType:
        """Make the batch that the user gets."""

    def _failed(self) -> None:
        """Forget what a batch may have left that has failed, here or on another rank."""

    def _join(self) -> None:
        """Join the mesh before there are threads; once joined, do nothing."""
        if "_engine" not in vars(self):
            self.dataset.check_same_everywhere()
        _ = self._engine, self._carrier

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return self.dataset.device_mesh()

    @cached_property
    def _coordinate(self) -> MeshCoordinate:
        return mesh_coordinate(self._mesh)

    @cached_property
    def _engine(self) -> ReadEngine:
        return self.dataset.new_engine(self._threads)

    @cached_property
    def _carrier(self) -> DeviceCopier:
        return DeviceCopier(self._mesh.device_type)

    def close(self) -> None:
        """End the reading threads and let go of their memory; no iteration is possible afterwards."""
        self._end_iteration()
        if "_engine" in vars(self):
            self._engine.close()

    @property
    def bytes_read(self) -> int:
        """Stored bytes that this rank has fetched, over all iterations."""
        return self.read_counts.stored_bytes

    @property
    def read_counts(self) -> ReadCounts:
        """Counts of this rank over all iterations, counted as the `rows` of a plan: requests, chunks, bytes."""
        return self._engine.stats if "_engine" in vars(self) else ReadCounts()

    @property
    def batch_bytes(self) -> int:
        """The most bytes that any rank holds of one batch."""
        pieces = dict(self.dataset.frame.axes).get(DATA_AXIS, 1)
        return -(-self._order.batch_size // pieces) * self.dataset.sample_bytes()

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for data, over all iterations."""
        return self._waited_s + (self._current.waited_s if self._current else 0.0)

    def state_dict(self) -> dict[str, int]:
        """Return the seed, the epoch, and the next sample that was not handed out: the same on every rank. Within an
        epoch also the number of samples that it began with, and a mark of their order.
        """
        return self._state.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, on whatever mesh and batch size, in O(1); ends an iteration under way.

        Of a store that has grown since, an epoch that had begun has the samples that it began with, and the next one
        has all.

        Raises: `StateError` for a state that is torn. Also within an epoch that began with another number of samples,
        with samples of other times, members or volumes, or with another `shuffle`.
        """
        order = self._order
        place = LoaderState.from_dict(state, order.count, self.dataset.is_appended_to, order.mark)
        loaded = self._order.settled(place)
        self._end_iteration()
        self._state = loaded
        self._resumed = True

    def __iter__(self) -> Iterator[BatchType]:
        if "_engine" in vars(self):
            self._engine.home.check_home()
        self._end_iteration()
        if self._state.next_sample and not self._resumed:
            self._state = LoaderState(self._state.seed, self._state.epoch + 1)
        self._resumed = False
        self._join()
        # memory of the batch in use, and of those read ahead
        self._engine.memory.keep((self._ahead + 1) * self._arrays)
        at = self._order.settled(self._state)
        alone = all(size == 1 for _, size in self.dataset.frame.domain)
        # One thread reads all batches in their order, the same on every rank, so reads pair up without messages.
        # `alone` is a rank that shares its samples with no other: it may leave reads undone that were due.
        current = self._current = BatchPrefetch(self._read_or_refuse, self._turns(at), self._ahead, alone)
        try:
            for turn, block in current:
                # before the batch is returned: a state saved while it is in use resumes after it
                self._state = turn.after
                yield self._batch(turn, block)
        finally:
            current.stop()

    def _read_or_refuse(self, turn: BatchTurn) -> tuple[BatchTurn, LocalType]:
        """Read a batch; other ranks hear of an error of this rank alone, and raise it in place of their next batch."""
        before = self._engine.reads
        try:
            return turn, self._read(turn)
        except BaseException as e:
            # Say rank 2 of four has run out of memory on its device. Before its read of a batch (`reads` as before) it
            # takes part in that read as one that failed; after it, in the read of the batch that follows, and so the
            # others raise there. After the last batch of an epoch the others do not read, so it takes no part.
            if getattr(e, "heard", False) or self._engine.reads == before or turn.following:
                self._failed()
                self._engine.refuse(e)
            raise

    def _turns(self, at: LoaderState) -> Iterator[BatchTurn]:
        coming = self._order.batches(at)
        known = deque(islice(coming, BATCHES_FORESEEN))
        while known:
            known.extend(islice(coming, 1))
            samples, after = known.popleft()
            yield BatchTurn(samples, at, after, tuple(batch for batch, _ in known))

    def _end_iteration(self) -> None:
        current, self._current = self._current, None
        if current is not None and current.home.is_here:
            # joined before anything else reads with this engine: the thread may still be in a read that was due. What
            # the other ranks read next has to come after that one here as well
            current.stop()
            current.join()
            if self._engine.ahead is not None:
                self._engine.ahead.forget()
            self._waited_s += current.waited_s

    @property
    def _ahead(self) -> int:
        """Number of batches that may be ready before they are requested."""
        budget = self._prefetch_bytes
        return BATCHES_AHEAD if budget is None else budget // max(self.batch_bytes, 1)


def check_whole_number(name: str, value: int, least: int, meaning: str = "") -> None:
    """Raise `FieldError` unless `value` is a whole number of at least `least`."""
    if not is_whole_number(value) or value < least:
        raise FieldError(f"{name}={value!r} must be a whole number, {least} or more{meaning}")


class DeviceCopier:
    """Copier of tensors to a device, for one reading thread.

    On CUDA, the thread that read them copies them from pinned memory on its own stream, and waits for the copy. So the
    memory can be used again at once, and the stream that computes never waits.
    """

    def __init__(self, device: str) -> None:
        # each thread has its own current GPU, so take that of this thread, which the model uses, for the reading thread
        self._device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if device == "cuda" else None

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the tensors to the device, in the thread that read them."""
        if self._stream is None:
            return [x.to(self._device) for x in tensors]
        with torch.cuda.stream(self._stream):
            brought = [x.to(self._device, non_blocking=True) for x in tensors]
        self._stream.synchronize()
        return brought

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Hand tensors to the computing thread: no other copy gets their memory while that thread's stream uses it."""
        if self._stream is not None:
            for x in tensors:
                x.record_stream(torch.cuda.current_stream(self._device))


JobType = TypeVar("JobType")
ResultType = TypeVar("ResultType")

_TAKEN_OVER = "this iteration has ended: a newer one, or a loaded state, took over its loader"
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
            return self._next_ready() if self._thread else self._read_now()
        finally:
            self.waited_s += time.perf_counter() - started

    def _read_now(self) -> ResultType:
        self.home.check_home()
        if self._stopped:
            raise ReadError(_TAKEN_OVER)
        return self._read(next(self._jobs))

    def _next_ready(self) -> ResultType:
        self.home.check_home()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._stopped)
            if self._stopped:
                raise ReadError(_TAKEN_OVER)
            result, error = self._ready[0]  # an error or the end stays there, because callers may ask again
            if error is not None:
                raise error
            if result is None:
                # a new exception: a kept one would keep its traceback's frames alive, and so a batch
                raise StopIteration
            self._ready.popleft()
            self._taken += 1
            self._changed.notify_all()
        return result

    def stop(self) -> None:
        """Read no further than what was due; returns at once."""
        if not self.home.is_here:
            return  # in a forked process the thread does not run, and may have held the lock at the fork
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

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
            if not self._stopped:  # after a stop the result is dropped, and its memory with it
                self._ready.append((result, error))
                self._changed.notify_all()


_running_prefetches: weakref.WeakSet[BatchPrefetch[Any, Any]] = weakref.WeakSet()
"""Prefetches whose thread may run: each is alive as long as its thread."""


@atexit.register
def _end_prefetches() -> None:
    """End the threads while Python still runs: one that comes back from a library later would abort the process."""
    until = time.monotonic() + _END_WAIT_S
    for prefetch in list(_running_prefetches):
        prefetch.stop()
    for prefetch in list(_running_prefetches):
        prefetch.join(max(0.0, until - time.monotonic()))
