"""One rank of a job of any size, played by one process, with every message counted; nothing is sent.

A group of torch's own kind answers its collectives.  Other ranks pass what this one passes, or what `others` makes of
it.  What the first rank broadcasts or scatters is kept, so that another rank may be played after it and is given that.
Bytes are those of the usual algorithms: a ring for all-gathers and all-reduces, a binomial tree for broadcasts, and a
message a rank for gathers and scatters.  Sums and maxima of what ranks pass alike are exact; what another rank alone
sends is zeros, and `pairs` counts such messages.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jigsaw.comm import agreement

BACKEND = "played"


class PlayedJob:
    """What one rank sends, receives and makes, and what the first rank has given the others."""

    def __init__(self, rank: int, ranks: int, first: PlayedJob | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self.sent = self.received = self.messages = self.pairs = self.groups = 0
        self.given: list[list[Tensor] | Tensor] = []
        self.others: Callable[[int, Any], Any] = lambda _, mine: mine
        self.aside = 0.0
        self._first = first
        self._taken = 0

    def gather(self, mine: Any) -> list[Any] | None:
        """Do as jigsaw's `gather_on_first_rank`; making the values of others is not this rank's time."""
        raw = pickle.dumps(mine)
        size = 2 * (self.ranks - 1) * 8 // self.ranks  # of the longest value, which all ranks agree on
        self.count(size, size, 2 * (self.ranks - 1))
        if self.rank:
            self.count(len(raw), 0)
            return None
        self.count(0, (self.ranks - 1) * len(raw), self.ranks - 1)
        every: list[Any] = []
        for rank in range(self.ranks):
            began = time.process_time()
            theirs = raw if rank == self.rank else pickle.dumps(self.others(rank, mine))
            self.aside += time.process_time() - began
            every.append(pickle.loads(theirs))
        return every

    def count(self, sent: int, received: int, messages: int = 1) -> None:
        self.sent, self.received, self.messages = self.sent + sent, self.received + received, self.messages + messages

    def value_of_first(self, mine: Any) -> Any:
        """Return what the first rank passed at this place of its program; the first one's is kept."""
        if self._first is None:
            self.given.append([x.clone() for x in mine] if isinstance(mine, list) else mine.clone())
            return mine
        self._taken += 1
        return self._first.given[self._taken - 1]


class _DoneWork(dist.Work):
    def __init__(self, results: Any = ()) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> Any:
        return self._results

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


# pyright: reportIncompatibleMethodOverride=false
class PlayedGroup(dist.ProcessGroup):
    """A group of a played job; torch calls it as it calls any other."""

    supports_coalescing = False  # messages have no group of their own then, as on gloo

    def __init__(self, rank: int, ranks: int, name: str) -> None:
        super().__init__(rank, ranks)  # pyright: ignore[reportCallIssue]
        self.name_of_group = name

    @property
    def group_name(self) -> str:
        return self.name_of_group

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        return BACKEND

    def allgather(self, results: Any, mine: Any, *_: Any) -> dist.Work:
        job = _job()
        for row, x in zip(results, mine, strict=True):
            for result in row:
                result.copy_(x)
            if self.size() == job.ranks:
                of_first = job.value_of_first(x)
                row[0][: of_first.numel()].copy_(of_first)
            moved = (self.size() - 1) * x.nbytes
            job.count(moved, moved, self.size() - 1)
        return _DoneWork(results)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        for x in tensors:
            if options is not None and options.reduceOp == dist.ReduceOp.SUM:
                x.mul_(self.size())
            moved = 2 * (self.size() - 1) * x.nbytes // self.size()
            _job().count(moved, moved, 2 * (self.size() - 1))
        return _DoneWork(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        job = _job()
        for x in tensors:
            if options.rootRank == self.rank():
                _ = job.value_of_first(x)
                depth = (self.size() - 1).bit_length()
                job.count(depth * x.nbytes, 0, depth)
            else:
                x.copy_(job.value_of_first(x))
                job.count(0, x.nbytes)
        return _DoneWork(tensors)

    def scatter(self, results: list[Tensor], given: Any, options: Any) -> dist.Work:
        job = _job()
        for at, x in enumerate(results):
            if options.rootRank == self.rank():
                x.copy_(given[at][self.rank()])
                _ = job.value_of_first(given[at])
                job.count(sum(each.nbytes for each in given[at]) - x.nbytes, 0, self.size() - 1)
            else:
                x.copy_(job.value_of_first(given)[job.rank])
                job.count(0, x.nbytes)
        return _DoneWork(results)

    def send(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        job = _job()
        job.pairs += len(tensors)
        job.count(sum(x.nbytes for x in tensors), 0, len(tensors))
        return _DoneWork()

    def recv(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        for x in tensors:
            x.zero_()
            _job().count(0, x.nbytes, 0)
        return _DoneWork()

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        _job().count(0, 0, (self.size() - 1).bit_length())
        return _DoneWork([])


_jobs: list[PlayedJob] = []


def _job() -> PlayedJob:
    return _jobs[-1]


def _make_group(options: Any, _: Any) -> PlayedGroup:
    _job().groups += 1
    return PlayedGroup(options.group_rank, options.group_size, options.group_id)


def _gather(value: Any, _: dist.ProcessGroup) -> list[Any] | None:
    return _job().gather(value)


@contextmanager
def played_job(rank: int, ranks: int, first: PlayedJob | None = None) -> Generator[PlayedJob]:
    """Let this process be one rank of a job of that size within the block."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
    _jobs.append(PlayedJob(rank, ranks, first))
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=ranks)
    gather, agreement.gather_on_first_rank = agreement.gather_on_first_rank, _gather
    try:
        yield _jobs[-1]
    finally:
        agreement.gather_on_first_rank = gather
        dist.destroy_process_group()
        _jobs.pop()
