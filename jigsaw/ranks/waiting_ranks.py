"""Errors for ranks that wait for each other in vain: what each waits for, where, and which ranks did not come.

Gloo and NCCL report that a message timed out, but neither what it was nor which rank is missing.  So each rank notes
what it waits for.  Once a wait is long, a thread writes that to the job's store, which the others read when they give
up.

Example: of four ranks, rank 2 left the training loop and sleeps in line 40.  The others enter an all-reduce of
`mse_loss`.  After a while the store has "all_reduce, UNet > train.py:31" from ranks 0, 1, 3, and "train.py:40" from
rank 2, which sees that others wait.  When its time is over, each of 0, 1, 3 reads that and raises.  The first that
fails, by its own error or because it gives up, writes why. Ranks whose connection to it breaks then report this as
well.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from jigsaw.ranks.call_places import place_in_frames, place_of_call
from jigsaw.ranks.mesh import job_patience
from jigsaw.ranks.model_world import job_group, job_rank, job_size
from jigsaw.torch_internals.groups import default_store

T = TypeVar("T")
_FOLDER = "jigsaw.waits"
_LONGEST_NOTICE = 10.0  # after so many seconds the others learn of a wait; sooner where time-outs are short
_STORE_SECONDS = 3.0  # the store may be gone with the rank that kept it
_MOST_RANKS = 64  # at most so many ranks are described


class WaitError(RuntimeError):
    """Other ranks of the mesh have ended, or did not take part for as long as `init_mesh(timeout=)` says."""


class OpenWait:
    """A block in which this thread waits for `ranks`, which may include itself.

    Raises: `WaitError` in place of gloo's and NCCL's own, which name neither the call nor the ranks.
    """

    # not a generator, because each message opens one or two of these
    def __init__(self, kind: str, ranks: Sequence[int]) -> None:
        self.kind, self.ranks, self.since = kind, ranks, time.monotonic()

    def __enter__(self) -> None:
        _start_watch()
        _open_waits[threading.get_ident()] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "/gloo/" in str(error)):
                raise self._error_of(error) from error  # all other errors concern arguments, not ranks
        finally:
            _open_waits.pop(threading.get_ident(), None)

    def _error_of(self, error: BaseException) -> WaitError:
        others = [rank for rank in self.ranks if rank != job_rank()]
        function, where = place_of_call()
        waited = f"{self.kind} waited {time.monotonic() - self.since:.1f} s for ranks {others}"
        report = found_of_others(self.kind, others, f"{waited}, in {function}, {where}")
        return WaitError(
            f"{waited}: they have ended, or do not answer; init_mesh(timeout=) says how long ranks wait; this was in "
            f"{function}, {where}{report} ({error})"
        )


_open_waits: dict[int, OpenWait] = {}
"""Waits of each thread of this rank."""


def found_of_others(kind: str, others: Sequence[int], message: str) -> str:
    """Return what the store knows, at the end of a wait, of the ranks that this one waited for, and write `message` for
    them.
    """
    if _watch is None:
        return ""
    return _within(_STORE_SECONDS, lambda: _read_others(kind, others, message)) or ""


def _read_others(kind: str, others: Sequence[int], message: str) -> str:
    store, me = _store_of_job(), job_rank()
    first = store.compare_set(f"{_FOLDER}/first", "", f"rank {me}: {message}").decode()
    missing: list[str] = []
    for rank in others[:_MOST_RANKS]:
        if not store.check([f"{_FOLDER}/{rank}"]):
            missing.append(f"rank {rank}, which has said nothing of itself")
            continue
        status = json.loads(store.get(f"{_FOLDER}/{rank}"))
        if status["kind"] is None:
            missing.append(f"rank {rank}, which was at {status['place']}")
        elif status["kind"] != kind or me not in status["ranks"]:
            missing.append(f"rank {rank}, which waits in {status['kind']} at {status['place']}")
    absent = f"; missing: {'; '.join(missing)}" if missing else ""
    return absent + (f"; the first to fail was {first}" if not first.startswith(f"rank {me}: ") else "")


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`; None where it fails, or takes longer."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception:  # a store that has ended may raise anything, and there is a better error to show
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _store_of_job() -> dist.Store:
    # a separate one, because a client of the store that waits for a key blocks others of its process
    return default_store().clone()


# -- while ranks wait -------------------------------------------------------------------------------------------------


class _WaitWatch(threading.Thread):
    """Thread that tells the other ranks, through the store, about long waits here, or where this rank is while others
    wait.
    """

    def __init__(self) -> None:
        super().__init__(name="jigsaw waits", daemon=True)
        self.world = job_group()
        self._rank, self._process = job_rank(), os.getpid()
        self._notice = min(_LONGEST_NOTICE, job_patience().total_seconds() / 4)
        self._ended, self._store = threading.Event(), _store_of_job()
        self._main = threading.main_thread().ident or 0

    def run(self) -> None:
        while not self._ended.wait(self._notice / 2):
            try:
                self._tell()
            except Exception:  # the store has ended, and with it the job
                return

    def _tell(self) -> None:
        now = time.monotonic()
        long = [(thread, each) for thread, each in list(_open_waits.items()) if now - each.since > self._notice]
        if long:
            self._store.set(f"{_FOLDER}/asked", "")
            thread, wait = long[0]
            self._say(thread, wait.kind, wait.ranks)
        elif self._store.check([f"{_FOLDER}/asked"]):
            self._say(self._main, None, ())

    def _say(self, thread: int, kind: str | None, ranks: Sequence[int]) -> None:
        function, where = place_in_frames(sys._current_frames().get(thread))  # pyright: ignore[reportPrivateUsage]
        place = f"{function}, {where}" if kind else where
        self._store.set(f"{_FOLDER}/{self._rank}", json.dumps({"kind": kind, "ranks": list(ranks), "place": place}))

    def end(self) -> None:
        """End the thread, while Python still runs; not that of the process that this one was forked from."""
        self._ended.set()
        if os.getpid() == self._process:
            self.join(_STORE_SECONDS)


_watch: _WaitWatch | None = None


def _start_watch() -> None:
    global _watch
    if _watch is not None and _watch.world is job_group():
        return
    if job_size() == 1 or dist.get_backend() == "fake":
        return  # no rank to wait for
    if _watch is None:
        atexit.register(_end_watch)
        hook = sys.excepthook
        sys.excepthook = lambda kind, error, trace: _tell_failure(hook, kind, error, trace)
    else:
        _watch.end()
    _watch = _WaitWatch()
    _watch.start()


def _end_watch() -> None:
    if _watch is not None:
        _watch.end()


def _tell_failure(hook: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write to the store what ends this rank, then show it."""
    if dist.is_initialized() and issubclass(kind, Exception):
        message = f"rank {job_rank()}: {kind.__name__}: {error}"
        _within(_STORE_SECONDS, lambda: _store_of_job().compare_set(f"{_FOLDER}/first", "", message))
    hook(kind, error, trace)
