"""Errors for ranks that wait for each other in vain: what each waits for, where, and which ranks did not come.

Gloo and NCCL report that a message timed out, but neither what it was nor which rank is missing.  So each rank notes
what it waits for.  Once a wait is long, a thread writes that to the job's store, which the others read when they give
up.

Example: of four ranks, rank 2 left the training loop and sleeps in line 40.  The others enter an all-reduce of
`mse_loss`.  After a while the store has "all_reduce, UNet > train.py:31" from ranks 0, 1, 3, and "train.py:40" from
rank 2, which sees that others wait.  When its time is over, each of 0, 1, 3 reads that and raises.  The first that
fails, by its own error or because it gives up, writes why.

Ranks whose connection breaks report the first failure as well.  The connection may be to rank 0, with which the store
ends.  So the threads of ranks that wait look for a failure twice a second, and a failed rank 0 gives them the time.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from jigsaw.ranks.call_places import place_in_frames, place_of_call
from jigsaw.ranks.mesh import job_patience
from jigsaw.ranks.model_world import job_group, job_rank, job_size
from jigsaw.ranks.restart_store import is_shared_between_starts, store_answer
from jigsaw.torch_internals.groups import default_store

T = TypeVar("T")
_FOLDER = "jigsaw.waits"
_LONGEST_NOTICE = 10.0  # seconds after which other ranks hear of a wait; fewer where time-outs are short
_STORE_SECONDS = 3.0  # patience with the store, which may have ended with the rank that kept it
_LOOK_SECONDS = 0.5  # interval at which a waiting rank asks whether another has failed
_ANSWER_SECONDS = 3 * _LOOK_SECONDS  # time in which waiting ranks answer once they are asked
_KEEPING_SECONDS = 3 * _LOOK_SECONDS  # time for which a failed rank 0 keeps the store for the others
_MOST_RANKS = 64  # largest number of ranks that are described
_MOST_NAMED = 16  # largest number of ranks that are listed by number
_MANY_RANKS = 256  # with more ranks than this, each asks the store less often


class WaitError(RuntimeError):
    """Other ranks of the mesh have ended, or did not take part for as long as `init_mesh(timeout=)` says."""


# Gloo has no type for errors of messages: most name a line of its source, those of a pair that it closed do not.
_WORDS_OF_GLOO = ("/gloo/", "Application timeout caused pair closure")


class OpenWait:
    """A block in which this thread waits for `ranks`, which may include itself.

    Raises: `WaitError` in place of gloo's and NCCL's own, which name neither the call nor the ranks.
    """

    # not a generator, because each message opens one or two of these
    def __init__(self, kind: str, ranks: Sequence[int]) -> None:
        self.kind, self.ranks, self.since = kind, ranks, time.monotonic()
        self.question: int | None = None  # the number of the question by which the others were asked where they are
        self._around: OpenWait | None = None

    def __enter__(self) -> None:
        start_wait_watch()
        thread = threading.get_ident()
        self._around, _open_waits[thread] = _open_waits.get(thread), self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, WaitError) and _is_of_messages(error):
                raise self._error_of(error) from error  # all other errors concern arguments, not ranks
        finally:
            if self._around is None:
                _open_waits.pop(threading.get_ident(), None)
            else:
                _open_waits[threading.get_ident()] = self._around

    def _error_of(self, error: BaseException) -> WaitError:
        others = [rank for rank in self.ranks if rank != job_rank()]
        function, where = place_of_call()
        waited = f"{self.kind} waited {time.monotonic() - self.since:.1f} s for ranks {_short_list(others)}"
        report = found_of_others(self.kind, others, f"{waited}, in {function}, {where}", self.question)
        return WaitError(
            f"{waited}: they have ended, or do not answer; init_mesh(timeout=) says how long ranks wait; this was in "
            f"{function}, {where}{report} ({error})"
        )


def _is_of_messages(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _WORDS_OF_GLOO)


_open_waits: dict[int, OpenWait] = {}
"""Waits of each thread of this rank."""


def found_of_others(kind: str, others: Sequence[int], message: str, question: int | None = None) -> str:
    """Return what the store knows, at the end of a wait, of the ranks that this one waited for, and write `message` for
    them.  `question` is the number by which they were asked where they are, if they were.
    """
    return _asked_of_store(lambda store: _read_others(store, kind, others, message, question))


def _short_list(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MOST_NAMED:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[: _MOST_NAMED // 2]))}, ..., {ranks[-1]}], {len(ranks)} in all"


def first_failure() -> str:
    """Return words about the first rank of the job that failed, empty where none has told it."""
    return _asked_of_store(_read_first_failure)


def _asked_of_store(read: Callable[[dist.Store], str]) -> str:
    """Return the words that `read` finds in the store; if it is gone, those that the watch last read, or say so."""
    watch = _watch
    if watch is None:
        return ""
    words = _within(_STORE_SECONDS, lambda: read(watch.store))
    return words or watch.first_failure or (_words_of_lost_store() if words is None else "")


def _words_of_lost_store() -> str:
    """Return words about who has probably ended where the store of the job does not answer."""
    keeper = "torchrun's agent" if is_shared_between_starts() else "rank 0"
    return f"; the store of the job does not answer: {keeper}, which keeps it, has probably ended"


def first_ended(ranks: Sequence[int]) -> int | None:
    """Return the first of these ranks that its own error has ended; None where all still run.

    It asks the store for one word, and for one of each rank only once some rank of the job has ended so.
    """
    store = default_store()
    if not store.check([f"{_FOLDER}/ended"]):
        return None
    return next((rank for rank in ranks if store.check([f"{_FOLDER}/ended/{rank}"])), None)


def _read_others(store: dist.Store, kind: str, others: Sequence[int], message: str, question: int | None) -> str:
    me, described = job_rank(), others[:_MOST_RANKS]
    asked, until = question or store.add(f"{_FOLDER}/asked", 1), time.monotonic() + _ANSWER_SECONDS
    statuses = {rank: _read_status(store, rank, asked) for rank in described}
    while None in statuses.values() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS / (1 if job_size() > _MANY_RANKS else 10))
        statuses |= {rank: _read_status(store, rank, asked) for rank, status in statuses.items() if status is None}
    missing: list[str] = []
    for rank, status in statuses.items():
        if status is None:
            missing.append(f"rank {rank}, which has said nothing of itself")
        elif status["kind"] is None:
            missing.append(f"rank {rank}, which was at {status['place']}")
        elif status["kind"] != kind or not any(me in range(*run) for run in status["runs"]):
            missing.append(f"rank {rank}, which waits in {status['kind']} at {status['place']}")
    absent = f"; missing: {'; '.join(missing)}" if missing else ""
    first = store.compare_set(f"{_FOLDER}/first", "", f"rank {me}: {message}{absent}").decode()
    # one that waits for the same ranks need not say twice that they are missing
    return absent + ("" if first.startswith(f"rank {me}: ") else _words_of_first(first.removesuffix(absent)))


def _read_status(store: dist.Store, rank: int, asked: int) -> dict[str, Any] | None:
    """Return the status that a rank wrote; None if it wrote none since that question was asked."""
    if not store.check([f"{_FOLDER}/{rank}"]):
        return None
    status = json.loads(store.get(f"{_FOLDER}/{rank}"))
    return status if status["question"] >= asked else None


def _read_first_failure(store: dist.Store) -> str:
    key = f"{_FOLDER}/first"
    return _words_of_first(store.get(key).decode()) if store.check([key]) else ""


def _words_of_first(failure: str) -> str:
    return f"; the first to fail was {failure}"


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`; None where it fails, or takes longer."""
    try:
        return store_answer(work).result(seconds)
    except Exception:  # a store that has ended may raise anything, and there is a better error to show
        return None


def runs_of_ranks(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ranges (start, stop, step) of these numbers in their order: one for an axis of thousands of ranks."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        start, stop, step = runs[-1] if runs else (0, 0, 0)
        last = stop - (1 if step > 0 else -1)
        if runs and rank != last and (last == start or rank - last == step):
            step = rank - last
            runs[-1] = start, rank + (1 if step > 0 else -1), step
        else:
            runs.append((rank, rank + 1, 1))
    return runs


# -- while ranks wait -------------------------------------------------------------------------------------------------


class _WaitWatch(threading.Thread):
    """Thread that tells the other ranks, through the store, about long waits here, or where this rank is while others
    wait.  It asks for failures of others while this rank waits.
    """

    def __init__(self) -> None:
        super().__init__(name="jigsaw waits", daemon=True)
        self.world = job_group()
        self._rank, self.process = job_rank(), os.getpid()
        self._patience = job_patience().total_seconds()
        self._notice = min(_LONGEST_NOTICE, self._patience / 4)
        self._ended = threading.Event()
        # a connection of its own, because a client of the store that waits for a key blocks others of its process
        self.store = default_store().clone()
        self._main = threading.main_thread().ident or 0
        self.first_failure = ""
        self._answered, self._told_until = 0, 0.0
        self._told: OpenWait | None = None
        self._next_look = time.monotonic() + self._notice / 2

    def run(self) -> None:
        while not self._ended.wait(min(_LOOK_SECONDS, self._notice / 2)):
            try:
                self._look()
            except Exception:  # the store has ended, and so has the job
                return

    def _look(self) -> None:
        """Ask the store every half second while this rank waits, and otherwise seldom: a job may have many ranks."""
        now = time.monotonic()
        waits = sorted(_open_waits.items(), key=lambda thread_and_wait: thread_and_wait[1].since)
        age = now - waits[0][1].since if waits else 0.0
        if age < _LOOK_SECONDS and now < self._next_look:
            return
        self._next_look = now + self._notice / 2
        thread, wait = waits[0] if waits else (self._main, None)
        if wait is not None and wait.question is None and age > self._notice:
            wait.question = self.store.add(f"{_FOLDER}/asked", 1)
        question = self.store.add(f"{_FOLDER}/asked", 0)
        # This rank tells its place once for each question, and again in its next long wait, as long as the ranks that
        # asked may be waiting. It does not do so at each look, because thousands of ranks share the store.
        is_asked = question > self._answered
        if is_asked:
            self._answered, self._told_until = question, now + self._patience
        waits_elsewhere = wait is not None and wait is not self._told and age > _LOOK_SECONDS
        if is_asked or (waits_elsewhere and now < self._told_until):
            self._told = wait
            self._say(question, thread, wait and wait.kind, wait.ranks if wait else ())
        if age > _LOOK_SECONDS and not self.first_failure and self.store.check([f"{_FOLDER}/ended"]):
            self.first_failure = _read_first_failure(self.store)
            self.store.set(f"{_FOLDER}/heard/{self._rank}", "")

    def _say(self, question: int, thread: int, kind: str | None, ranks: Sequence[int]) -> None:
        function, where = place_in_frames(sys._current_frames().get(thread))  # pyright: ignore[reportPrivateUsage]
        place = f"{function}, {where}" if kind else where
        status = {"question": question, "kind": kind, "runs": runs_of_ranks(ranks), "place": place}
        self.store.set(f"{_FOLDER}/{self._rank}", json.dumps(status))

    def end(self) -> None:
        """End the thread, while Python still runs; not that of the process that this one was forked from."""
        self._ended.set()
        if os.getpid() == self.process:
            self.join(_STORE_SECONDS)


_watch: _WaitWatch | None = None


def start_wait_watch() -> None:
    """Start the thread that tells others of this rank's waits, and of the error that ends this rank; once a job."""
    global _watch
    if _watch is not None and _watch.world is job_group():
        return
    if job_size() == 1 or dist.get_backend() == "fake":
        return  # there is no other rank to wait for
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
        if os.getpid() == _watch.process:
            let_threads_rest()


def let_threads_rest() -> None:
    """Let other threads run until none has anything left to do, for a second at most.

    A thread of gloo's lets go of a message's tensors after the rank has gone on. It needs the interpreter for that, and
    once Python ends, waiting for it aborts the process, although all is done. `destroy_process_group` does not end
    these threads while anything, such as a mesh, still has a group.
    """
    until, quiet_looks = time.monotonic() + 1.0, 0
    while quiet_looks < 2 and time.monotonic() < until:
        time.sleep(0.005)
        quiet_looks = 0 if _is_other_thread_running() else quiet_looks + 1


def _is_other_thread_running() -> bool:
    own = threading.get_native_id()
    for file in Path("/proc/self/task").glob("*/stat"):  # none but on Linux
        with suppress(OSError):  # the thread has ended
            state = file.read_text().rpartition(")")[2].split()[0]
            if state == "R" and file.parent.name != str(own):
                return True
    return False


def _tell_failure(hook: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the error that ends this rank to the store, then show it."""
    watch = _watch
    if watch is not None and dist.is_initialized() and issubclass(kind, Exception):
        _within(_STORE_SECONDS, lambda: _write_end(watch.store, f"rank {job_rank()}: {kind.__name__}: {error}"))
        if job_rank() == 0 and not is_shared_between_starts():
            _kept_stores.append((default_store(), job_size()))
    hook(kind, error, trace)


def _write_end(store: dist.Store, message: str) -> None:
    store.compare_set(f"{_FOLDER}/first", "", message)
    for key in (f"ended/{job_rank()}", f"heard/{job_rank()}", "ended"):
        store.set(f"{_FOLDER}/{key}", "")


_kept_stores: list[tuple[dist.Store, int]] = []
"""The store that this rank keeps and that ranks may still read, once an error ends it."""


@atexit.register
def _keep_store_for_others() -> None:
    for store, ranks in _kept_stores:
        keys, until = [f"{_FOLDER}/heard/{rank}" for rank in range(ranks)], time.monotonic() + _KEEPING_SECONDS
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS / 10)
