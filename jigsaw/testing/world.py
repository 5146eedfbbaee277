"""A world of ranks: real gloo processes, started once for each size and reused by every test of the session."""

from __future__ import annotations

import atexit
import functools
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jigsaw.testing import rank as rank_process
from jigsaw.testing.failure import RankFailure, combined_error
from jigsaw.testing.ordered_group import ORDERED_BACKEND
from jigsaw.testing.played_device import PLAYED_DEVICE, build_played_device
from jigsaw.testing.post_order import check_posts
from jigsaw.testing.rank import DEVICE_VARIABLE, RankBody, RankJob, RankReport, WorldKind

P = ParamSpec("P")
T = TypeVar("T")

_START_SECONDS = 180.0  # time to import torch on every rank of a busy machine
_GRACE_SECONDS = 2.5  # time for other ranks to report after one failed; they first ask for 1.5 s who is missing
_STACK_SECONDS = 30.0  # time to write all stacks on a busy machine
_MOST_GROUPS = 96  # gloo keeps sockets and threads for each process group that tests leave behind

_worlds: dict[WorldKind, RankWorld] = {}

BACKEND_VARIABLE = "JIGSAW_TEST_BACKEND"


def on_ranks(
    ranks: int, *, timeout: float = 60.0, backend: str | None = None, device: str | None = None
) -> Callable[[Callable[P, T]], Callable[P, list[T] | None]]:
    """Run the function's body on `ranks` real ranks: ``@on_ranks(4)`` over a test, below ``pytest.mark.parametrize``.

    The ranks are gloo processes with one thread each that all tests share; each starts a body with the same seed, in
    float32. The arguments (parameters, fixture values) must pickle, and the function must be at module level. It
    returns the list of what each rank returned, or None when no rank returned anything (as pytest expects of a test).
    While ranks of another number or backend work, these are stopped (all but rank 0, on CPUs), with all their threads.

    `backend` is ``"gloo"``, or ``"ordered"``: gloo by NCCL's law, which shows on CPUs what would hang or be wrong on
    GPUs (`jigsaw.testing.ordered_group`), or ``"nccl"``.  By default it is that of the variable
    ``JIGSAW_TEST_BACKEND``, else gloo.  `device` is ``"cpu"``, or ``"cuda"``: ranks see the GPUs, and share them where
    there are fewer, which NCCL allows from its version 2.30.  By default it is that of ``JIGSAW_TEST_DEVICE``, else the
    CPU; where that variable names a device, bodies make their tensors there.  ``"played"`` is a device in the host's
    memory that refuses what a GPU does, with ordered groups (`jigsaw.testing.played_device`).

    Raises: `RankFailedError`, with the failing rank's own traceback first, when a rank raises, dies, or runs longer
    than `timeout` seconds. The world is then killed and the next test starts a fresh one. `PostOrderError` where
    NCCL would not run what the ranks posted to ordered groups.

    >>> jigsaw.testing.on_ranks(2)(torch.distributed.get_rank)()
    [0, 1]
    """

    def decorate(function: Callable[P, T]) -> Callable[P, list[T] | None]:
        body = _importable_body(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> list[T] | None:
            __tracebackhide__ = True  # pytest: show the rank's traceback, not ours
            values = _live_world(ranks, backend, device).run(body, args, kwargs, timeout)
            return None if all(value is None for value in values) else values

        call.__dict__["rank_body"] = function  # a rank looks here for the function that this wraps
        return call

    return decorate


def run_on_ranks(
    ranks: int,
    function: Callable[..., T],
    *args: Any,
    timeout: float = 60.0,
    device: str | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call a module-level `function` on `ranks` ranks and return what each returned; `on_ranks` without the decorator,
    on its backend by default.

    Raises: `RankFailedError`, as `on_ranks` does.

    >>> jigsaw.testing.run_on_ranks(2, torch.distributed.get_world_size)
    [2, 2]
    """
    return _live_world(ranks, device=device).run(_importable_body(function), args, kwargs, timeout)


class RankWorld:
    """The processes of one size. `run` is synchronous; after a failure the world is dead."""

    def __init__(self, kind: WorldKind) -> None:
        self.size = size = kind.ranks
        self.jobs = 0
        # NCCL's threads would take a stop for a rank that hangs
        self._may_rest, self._is_resting = kind.device != "cuda", False
        self._groups = 0
        self._folder = tempfile.mkdtemp(prefix="jigsaw-world-")
        start = _process_context()
        pipes = [start.Pipe() for _ in range(size)]
        self._connections: list[Connection] = [ours for ours, _ in pipes]
        self._processes: list[SpawnProcess | ForkServerProcess] = [
            start.Process(
                target=rank_process.serve_jobs,
                args=(theirs, rank, kind, self._folder, dict(os.environ)),
                name=f"rank{rank}",
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # so that a dead rank ends our side of its pipe
        self._gather(f"the start of {size} ranks", _START_SECONDS)

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    @property
    def is_worn(self) -> bool:
        """True where tests left so many groups that fresh processes are better, as DTensor's caches keep meshes and
        groups.
        """
        return self._groups > _MOST_GROUPS

    @property
    def pids(self) -> list[int]:
        return [p.pid or 0 for p in self._processes]

    def rest(self) -> None:
        """Stop all ranks but the first until the next job.  Gloo has a thread for each group, which looks for messages
        a hundred times a second: those of a few idle worlds take a third of a core.

        The first rank stays awake, because it wakes the others when this process has ended without a word.
        """
        if self._may_rest and not self._is_resting and self.alive:
            self._signal_others(signal.SIGSTOP)
            self._is_resting = True

    def _wake(self) -> None:
        if self._is_resting:
            self._signal_others(signal.SIGCONT)
            self._is_resting = False

    def _signal_others(self, number: signal.Signals) -> None:
        for pid in self.pids[1:]:
            with suppress(ProcessLookupError):  # it has died, which the next job reports
                os.kill(pid, number)

    def run(self, body: RankBody, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        __tracebackhide__ = True
        self._wake()
        job = RankJob(body, _pickled_arguments(body, args, kwargs), tuple(sys.path), os.getcwd())
        message = pickle.dumps(job)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            reports = self._gather(body.name, timeout)
        except BaseException:
            self.kill()  # also on ctrl-C: the ranks are in the middle of something
            raise
        self.jobs += 1
        self._groups = max(r.groups for r in reports)
        check_posts([r.posts for r in reports])
        return [pickle.loads(r.value) for r in reports]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(10)
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _gather(self, name: str, timeout: float) -> list[RankReport]:
        __tracebackhide__ = True
        reports: dict[int, RankReport] = {}
        failures: dict[int, RankFailure] = {}
        end = time.monotonic() + timeout
        while len(reports) + len(failures) < self.size:
            waiting = [r for r in range(self.size) if r not in reports and r not in failures]
            ready = wait(self._sources(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                failures |= self._late(waiting, timeout, stacks=not failures)
                break
            for r in waiting:
                if self._connections[r] in ready or self._processes[r].sentinel in ready:
                    report = self._hear(r)
                    if report.failure is None:
                        reports[r] = report
                    else:
                        failures[r] = report.failure
            if failures:
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        if failures:
            self.kill()
            raise combined_error(name, self.size, list(failures.values()))
        return [reports[r] for r in range(self.size)]

    def _sources(self, ranks: Iterable[int]) -> list[Connection | int]:
        return [s for r in ranks for s in (self._connections[r], self._processes[r].sentinel)]

    def _hear(self, rank: int) -> RankReport:
        try:
            if self._connections[rank].poll():
                return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            pass  # the pipe ended without a report, so look at the exit code
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        ending = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        text = f"the process of rank {rank} ended without a word ({ending})"
        return RankReport(failure=RankFailure(rank, text, text, moment=time.monotonic()))

    def _late(self, ranks: Iterable[int], timeout: float, stacks: bool) -> dict[int, RankFailure]:
        """Return failures of ranks that are still busy: the cause if no rank failed (`stacks`), else bystanders."""
        moment = time.monotonic() if stacks else float("inf")
        dumps = self._stacks(ranks) if stacks else {}
        failures: dict[int, RankFailure] = {}
        for r in ranks:
            summary = f"still running after {timeout:g} s" if stacks else "still running when the other failed; killed"
            failures[r] = RankFailure(
                r, f"rank {r} {summary}", f"{summary}\n{dumps[r]}" if stacks else summary, moment=moment
            )
        return failures

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return where each rank is: every one dumps its Python stacks on SIGUSR1, even inside a collective."""
        for r in ranks:
            os.kill(self.pids[r], signal.SIGUSR1)
        files = {r: Path(self._folder) / f"stack{r}" for r in ranks}
        end = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < end and not all(f.exists() and f.stat().st_size for f in files.values()):
            time.sleep(0.05)
        time.sleep(0.1)  # a dump is several writes
        return {r: f.read_text() if f.exists() else "(no stack: it has not started)" for r, f in files.items()}


def _process_context() -> ForkServerContext | SpawnContext:
    """Choose how ranks start: forked, in a tenth of a second, from a process that has only imported torch.  A fork of
    this process would copy threads and locks; Apple's libraries do not survive a fork at all.
    """
    if sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([rank_process.__name__])
    return context


def _live_world(size: int, backend: str | None = None, device: str | None = None) -> RankWorld:
    device = device or os.environ.get(DEVICE_VARIABLE, "cpu")
    if device == PLAYED_DEVICE:  # gloo does not support this device
        backend = ORDERED_BACKEND
        build_played_device()
    kind = WorldKind(size, backend or os.environ.get(BACKEND_VARIABLE, "gloo"), device)
    if size < 1:
        raise ValueError(f"on_ranks({size}): a world has at least 1 rank")
    if multiprocessing.parent_process() is not None:
        raise RuntimeError(
            f"on_ranks({size}) was called inside a rank or another child process; call it from the test's own process"
        )
    world = _worlds.get(kind)
    if world is None or not world.alive or world.is_worn:
        if world is not None:
            world.kill()
        world = _worlds[kind] = RankWorld(kind)
    for other in _worlds.values():
        if other is not world:
            other.rest()
    return world


@atexit.register
def _end_all_worlds() -> None:
    for world in _worlds.values():
        world.kill()


def _importable_body(function: Callable[..., Any]) -> RankBody:
    name = getattr(function, "__qualname__", repr(function))
    if not inspect.isfunction(function) or "<" in name:
        raise ValueError(
            f"on_ranks needs a function at module level (every rank imports it by name), got {name}; move it out"
        )
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or inspect.getsourcefile(function)
    # a script's own file is as it was called, such as ../script.py, which a rank would not know for the same
    return RankBody(function.__module__, None if file is None else os.path.abspath(file), name)


def _pickled_arguments(body: RankBody, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, kwargs))
    except Exception as error:
        for name, value in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
            try:
                pickle.dumps(value)
            except Exception:
                raise TypeError(
                    f"{body.name}: {name!r} ({type(value).__name__}) does not pickle, so it cannot reach the ranks; "
                    f"pass plain values and make the rest inside the body"
                ) from error
        raise
