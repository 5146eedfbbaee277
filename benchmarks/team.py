"""The processes of one contender: opened once, they wait for their turns, so that contenders can take turns.

Every contender has processes of its own, one a rank, with its thread budget in their environment.  A turn reads some
samples on all ranks; wall time is that of the slowest, CPU time (user and system, all threads and child processes) is
summed over the ranks.  Nothing else of the benchmark runs meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Box = tuple[slice, ...]

_SPAWN = multiprocessing.get_context("spawn")
_LIBRARIES = ("OMP", "OPENBLAS", "MKL", "RAYON", "BLOSC", "NUMEXPR")


@dataclass(frozen=True)
class Task:
    """What a rank of a contender reads: its box of the samples of a store, with `threads` threads.

    A sample of a store with time is `per_sample` steps, else a file of `paths`.
    """

    engine: str
    store: str
    paths: tuple[str, ...]
    variables: tuple[str, ...]
    per_sample: int
    mesh: tuple[tuple[str, int], ...]
    threads: int
    boxes: tuple[Box, ...]  # every rank's rows of the spatial dims
    rank: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.boxes)

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def box(self) -> Box:
        return self.boxes[self.rank]

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(rows.stop - rows.start for rows in self.box)


@dataclass(frozen=True)
class Turn:
    """What one turn took, for each sample: seconds; and the checksum of what was read last."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    checksum: str
    more: dict[str, Any]


class Team:
    """The ranks of one contender."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._folder = tempfile.TemporaryDirectory()
        self._lines, self.processes = [], []
        with _environment(task):
            for rank in range(task.ranks):
                here, there = _SPAWN.Pipe()
                work = (replace(task, rank=rank), self._folder.name, there)
                process = _SPAWN.Process(target=_on_rank, args=work, daemon=False)
                process.start()
                there.close()
                self._lines.append(here)
                self.processes.append(process)
        self.settings: dict[str, Any] = self._answers()[0]

    def begin(self, samples: Sequence[int], **how: Any) -> None:
        """Begin a turn."""
        for line in self._lines:
            line.send((list(samples), how))

    def end(self) -> Turn:
        """Wait for the end of a turn."""
        found = self._answers()
        walls, cpus, peaks, checks, more = zip(*found, strict=True)
        return Turn(max(walls), sum(cpus), max(peaks), f"{zlib.crc32(repr(checks).encode()):08x}", more[0])

    def turn(self, samples: Sequence[int], **how: Any) -> Turn:
        self.begin(samples, **how)
        return self.end()

    def is_done(self) -> bool:
        """Whether every rank has answered, or one has gone."""
        return all(line.poll() for line in self._lines) or not all(p.is_alive() for p in self.processes)

    def _answers(self) -> list[Any]:
        found: list[Any] = []
        for rank, line in enumerate(self._lines):
            try:
                kind, answer = line.recv()
            except EOFError:
                kind, answer = "error", "it ended without an answer"
            if kind == "error":
                self.close(kill=True)
                raise RuntimeError(f"{self.task.engine} on {self.task.store}, rank {rank}: {answer}")
            found.append(answer)
        return found

    def close(self, kill: bool = False) -> None:
        for line, process in zip(self._lines, self.processes, strict=True):
            if kill:
                process.kill()
            else:
                line.send(None)
        for process in self.processes:
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if any(process.is_alive() for process in self.processes):
            self.close(kill=kind is not None)


@contextmanager
def _environment(task: Task) -> Iterator[None]:
    """The thread budget, where libraries look for it as they are loaded."""
    wanted = {f"{name}_NUM_THREADS": str(task.threads) for name in _LIBRARIES}
    wanted["BLOSC_NTHREADS"] = str(task.threads)
    kept = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- on a rank -------------------------------------------------------------------------------------------------------


def _on_rank(task: Task, folder: str, line: Any) -> None:
    import contenders

    try:
        read, settings = contenders.opened(task, folder)
        line.send(("ready", settings))
        while (asked := line.recv()) is not None:
            line.send(("done", _turn(read, *asked)))
        contenders.left(task)
        del read  # with its worker processes, where it has any
    except EOFError:
        return
    except BaseException:
        line.send(("error", traceback.format_exc()))


def _turn(read: Any, samples: Sequence[int], how: dict[str, Any]) -> tuple[Any, ...]:
    more: dict[str, Any] = {}
    last, taken = None, 0
    used, since = cpu_seconds(), time.perf_counter()
    for last in read(samples, **how):
        taken += 1
        if isinstance(last, dict):  # what a loader says of itself, after its last sample
            more, taken = last, taken - 1
        else:
            kept = last
        last = None
    wall, cpu = time.perf_counter() - since, cpu_seconds() - used
    check = zlib.crc32(np.ascontiguousarray(kept))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return wall / taken, cpu / taken, peak, check, more


def cpu_seconds() -> float:
    """User and system time of this process and its children, those that still run included."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    used = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    tick = os.sysconf("SC_CLK_TCK")
    for pid in descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / tick
        except (OSError, IndexError):
            continue  # it has just ended
    return used


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs included."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children") as f:
                children = [int(child) for child in f.read().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def pss_bytes(pids: Sequence[int]) -> int:
    """The proportional set size of processes and their children: what they share is counted once."""
    total = 0
    for pid in {p for root in pids for p in (root, *descendants(root))}:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as f:
                total += next(int(text.split()[1]) for text in f if text.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            continue  # it has just ended
    return total
