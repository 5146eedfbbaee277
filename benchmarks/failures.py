"""Seconds until all ranks end when one of three fails in the middle of each kind of work, and what writes leave.

    sudo python benchmarks/failures.py --output benchmarks/results/failures-MACHINE-MONTH.jsonl
    python benchmarks/failures.py --page     # makes the tables of docs/failures.md of the newest result file

The ranks do the work once, so that groups are connected.  Then one of them fails where the others wait for it: it
raises, it is killed (SIGKILL), it stops and says nothing (SIGSTOP), or the link between its host and that of the others
goes down, while what it sends lies on the link (hosts are namespaces of network; all three ranks are then waited for).
In some work its memory runs out: torch's error, or a kill by its group of memory.  This is rank 1, and in another run
rank 0, which keeps the job's store.  The mesh waits for `--wait` seconds.  A case is a JSON object: `errors` is what
the ranks raised, `seconds` how long the slowest one took, and `names_it` whether each said for whom it waited.  An
error of a rank that raised must be in what the others say (`tells_why`).  `failing_writes.py` says what is asked of
files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from failing_machines import (
    ADDRESSES,
    be_killed_for_memory,
    lose_link,
    memory_group,
    run_out_of_memory,
    small_disk,
)
from failing_writes import WRITES, run_writing_rank
from links import HOSTS, linked_hosts
from markdown_table import table_lines
from result_file import ResultFile, add_result_options
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import jigsaw
from jigsaw.ranks.mesh import mesh_patience

ROOT, RANKS = Path(__file__).parents[1], 3
LINK = "link goes down"
FAULTS = ("raises", "killed", "silent", LINK)
OUT_OF_MEMORY, KILLED_FOR_MEMORY = "memory runs out", "killed for its memory"
MEMORY_FAULTS, MEMORY_WORKS = (OUT_OF_MEMORY, KILLED_FOR_MEMORY), ("halos", "backward pass")
TOLD = {"raises": "ValueError: planted", OUT_OF_MEMORY: "can't allocate memory"}  # what others must hear
_START_SECONDS, _MOST_SECONDS = 300.0, 120.0  # within which the fault happens; and for which ranks are awaited after it
NOBODY_WAITED = "nobody waited for"
BEGIN, END = "<!-- begin: made by benchmarks/failures.py -->", "<!-- end: made by benchmarks/failures.py -->"
ERROR_LINE = r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w+(?:Error|Exit)): "  # the last line of a traceback
Fact = dict[str, Any]
Fault = Callable[[], None]
Work = Callable[[Fault], None]
Maker = Callable[[DeviceMesh, str], Work]

# -- work, in a rank --------------------------------------------------------------------------------------------------
# Each makes work on a mesh: a function that does it, and that calls its argument where a rank fails.


def field_on(mesh: DeviceMesh) -> jigsaw.Tile:
    """A batch of small fields whose rows the mesh cuts."""
    return jigsaw.shard(torch.linspace(-1, 1, 1248).view(3, 4, 13, 8), mesh, (None, None, "lat", None))


def convolutions() -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)))


def call_of(function: Callable[[Any], Any]) -> Maker:
    """A function of a tile, before which the rank fails."""

    def make(mesh: DeviceMesh, folder: str) -> Work:
        x = field_on(mesh)

        def work(fail: Fault) -> None:
            fail()
            function(x)

        return work

    return make


def forward_of(**cut: Any) -> Maker:
    """A forward pass, in the middle of which the rank fails."""

    def make(mesh: DeviceMesh, folder: str) -> Work:
        x, net = field_on(mesh), jigsaw.parallelize(convolutions(), mesh, **cut)

        def work(fail: Fault) -> None:
            first = net[0](x)
            fail()
            net[2](net[1](first))

        return work

    return make


def backward_of(**cut: Any) -> Maker:
    """A backward pass, in the middle of which the rank fails."""

    def make(mesh: DeviceMesh, folder: str) -> Work:
        x, net = field_on(mesh), jigsaw.parallelize(convolutions(), mesh, **cut)

        def work(fail: Fault) -> None:
            middle = net[1](net[0](x))
            middle.register_hook(lambda gradient: fail())
            net[2](middle).square().mean().backward()

        return work

    return make


def gradients_of(outputs: int) -> Maker:
    """A backward pass through a linear layer over cut tokens, which sends gradients of its weight alone."""

    def make(mesh: DeviceMesh, folder: str) -> Work:
        net = jigsaw.parallelize(nn.Linear(512, outputs, bias=False), mesh)
        x = jigsaw.shard(torch.linspace(-1, 1, 96 * 512).view(96, 512), mesh, ("lat", None))

        def work(fail: Fault) -> None:
            loss = net(x).square().mean()
            fail()
            loss.backward()

        return work

    return make


def agreement(mesh: DeviceMesh, folder: str) -> Work:
    """What ranks pass to a call, compared by all of them."""

    def work(fail: Fault) -> None:
        fail()
        field_on(mesh)

    return work


def pipeline_step(mesh: DeviceMesh, folder: str) -> Work:
    own_mesh = jigsaw.init_mesh(device="cpu", pipe=RANKS, lat=1, timeout=mesh_patience(mesh))
    pipe = jigsaw.pipeline(convolutions(), own_mesh, loss=nn.functional.mse_loss, microbatches=RANKS)
    x = field_on(own_mesh)

    def work(fail: Fault) -> None:
        fail()
        pipe.step(x, x)

    return work


def checkpoint_written(mesh: DeviceMesh, folder: str) -> Work:
    net = jigsaw.parallelize(convolutions(), mesh)

    def work(fail: Fault) -> None:
        fail()
        jigsaw.save(f"{folder}/saved", model=net)

    return work


def checkpoint_read(mesh: DeviceMesh, folder: str) -> Work:
    net = jigsaw.parallelize(convolutions(), mesh)
    jigsaw.save(f"{folder}/saved", model=net)

    def work(fail: Fault) -> None:
        fail()
        jigsaw.load(f"{folder}/saved", model=net)

    return work


def samples_read(mesh: DeviceMesh, folder: str) -> Work:
    data = jigsaw.io.open(f"{folder}/store.zarr", mesh=mesh, fields=["t"], targets=[])

    def work(fail: Fault) -> None:
        data[0]
        fail()
        data[1]

    return work


def statistics_computed(mesh: DeviceMesh, folder: str) -> Work:
    data = jigsaw.io.open(f"{folder}/store.zarr", mesh=mesh, fields=["t"], targets=[])

    def work(fail: Fault) -> None:
        fail()
        jigsaw.io.statistics(data)

    return work


WORKS: dict[str, Maker] = {
    "halos": forward_of(),
    "mean": call_of(lambda tile: tile.mean()),
    "gather": call_of(lambda tile: tile.full_tensor()),
    "all-to-all of an FFT": call_of(torch.fft.rfft2),
    "attention": call_of(lambda tile: nn.functional.scaled_dot_product_attention(tile, tile, tile)),
    "cut weights": forward_of(shard_weights=True, unit_bytes=1),
    "backward pass": backward_of(),
    "sum of gradients": gradients_of(outputs=8),
    "blocks of gradients": gradients_of(outputs=1024),
    "backward pass, cut weights": backward_of(shard_weights=True, unit_bytes=1),
    "step of a pipeline": pipeline_step,
    "agreement": agreement,
    "save": checkpoint_written,
    "load": checkpoint_read,
    "read of a sample": samples_read,
    "statistics": statistics_computed,
}


def note_time(folder: str) -> None:
    Path(folder, "failed_at").write_text(str(time.time()))


def run_rank(work: str, fault: str, folder: str, wait: float, failing: int) -> None:
    """Do the work twice as the rank that the environment names; the second time one rank fails."""
    mesh = jigsaw.init_mesh(device="cpu", lat=RANKS, timeout=wait)
    call = WORKS[work](mesh, folder)
    call(lambda: None)

    def fail() -> None:
        if mesh.get_rank() != failing:
            return
        if fault == LINK:
            lose_link(lambda: note_time(folder))
            return
        note_time(folder)
        if fault == "raises":
            raise ValueError("planted")
        if fault in MEMORY_FAULTS:
            (run_out_of_memory if fault == OUT_OF_MEMORY else be_killed_for_memory)()
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    call(fail)
    raise SystemExit(f"{NOBODY_WAITED} rank {failing}")


# -- a case -----------------------------------------------------------------------------------------------------------


def write_store(folder: str) -> None:
    """Write the store that some of the work reads."""
    values = np.random.default_rng(0).normal(size=(8, 13, 8)).astype(np.float32)
    coords = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h"),
        "lat": np.linspace(60, -60, 13),
        "lon": np.arange(8) * 45.0,
    }
    data = xr.Dataset({"t": (("time", "lat", "lon"), values)}, coords)
    data.to_zarr(f"{folder}/store.zarr", encoding={"t": {"chunks": (1, 13, 8)}}, consolidated=False)


@dataclass(frozen=True)
class RankEnds:
    """What became of a job's ranks: what each said, its exit status, and seconds from the fault until it ended."""

    said: list[str]
    statuses: list[int | None]
    seconds: list[float | None]

    def errors(self, ranks: Sequence[int]) -> list[str]:
        lines = [re.findall(ERROR_LINE, self.said[rank], re.MULTILINE) for rank in ranks]
        return sorted({each[-1] if each else "none" for each in lines})


def ended_ranks(folder: str, words: Sequence[str], ranks: int, awaited: Sequence[int], apart: int | None) -> RankEnds:
    """Start the ranks of a job, wait for those `awaited`, and end the others.  One rank may be on a host apart."""
    file = Path(folder, "failed_at")
    file.unlink(missing_ok=True)  # that of a run before
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [HOSTS[rank == apart] for rank in range(ranks)]
    address = "127.0.0.1" if apart is None else ADDRESSES[hosts[0]]
    processes = []
    for rank, host in enumerate(hosts):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        place |= {"GLOO_SOCKET_IFNAME": "lo" if apart is None else "wire"}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        there = [] if apart is None else ["ip", "netns", "exec", host]
        with open(f"{folder}/said{rank}", "w") as said:
            command = [*there, sys.executable, __file__, *words]
            processes.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment))
    try:
        ended = ends_of(processes, awaited, file)
        statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            with suppress(FileNotFoundError):
                memory_group(process.pid).rmdir()
    failed_at = float(file.read_text()) if file.exists() else None
    seconds = [None if None in (failed_at, end) else end - failed_at for end in map(ended.get, range(ranks))]
    return RankEnds([Path(folder, f"said{rank}").read_text() for rank in range(ranks)], statuses, seconds)


def ends_of(processes: Sequence[subprocess.Popen[bytes]], awaited: Sequence[int], fault: Path) -> dict[int, float]:
    """Return when each process ended that is awaited; without one that still runs a minute after the fault, which the
    file tells, or where none happens.
    """
    ended: dict[int, float] = {}
    until, has_failed = time.time() + _START_SECONDS, False
    while len(ended) < len(awaited) and time.time() < until:
        if not has_failed and fault.exists():
            until, has_failed = time.time() + _MOST_SECONDS, True
        for rank in awaited:
            if rank not in ended and processes[rank].poll() is not None:
                ended[rank] = time.time()
        time.sleep(0.05)
    return ended


def seen(work: str, fault: str, wait: float, failing: int = 1) -> Fact:
    """Start the ranks, wait for those that do not fail, and return the facts of the case."""
    others = [rank for rank in range(RANKS) if rank != failing]
    awaited, is_link = (range(RANKS), True) if fault == LINK else (others, False)
    with tempfile.TemporaryDirectory() as folder, linked_hosts() if is_link else nullcontext():
        write_store(folder)
        words = ["--rank-of", work, fault, folder, "--wait", str(wait), "--failing", str(failing)]
        ends = ended_ranks(folder, words, RANKS, awaited, failing if is_link else None)
        if is_link and all(NOBODY_WAITED in said for said in ends.said):
            return {"work": work, "fault": fault, "failing": failing, "needs_no_link": True}
        if not Path(folder, "failed_at").exists():
            raise RuntimeError(f"{work}: {ends.said}")
    if fault == KILLED_FOR_MEMORY and ends.statuses[failing] != -signal.SIGKILL:
        raise RuntimeError(f"{work}: rank {failing} was not killed, but ended with {ends.statuses[failing]}")

    def names(rank: int, missing: Sequence[int]) -> bool:
        listed = [set(map(int, re.findall(r"\d+", ranks))) for ranks in re.findall(r"\[([\d, ]+)\]", ends.said[rank])]
        return any(f"rank {each}" in ends.said[rank] or any(each in some for some in listed) for each in missing)

    seconds = [ends.seconds[rank] for rank in awaited]
    fact: Fact = {
        "work": work, "fault": fault, "failing": failing, "errors": ends.errors(awaited),
        "seconds": None if None in seconds else round(max(s for s in seconds if s is not None), 1),
        "names_it": all(names(rank, others if rank == failing else [failing]) for rank in awaited),
    }  # fmt: skip
    if fault in TOLD:
        fact["tells_why"] = all(TOLD[fault] in ends.said[rank] for rank in others)
    return fact


def seen_of_writes(work: str, fault: str, wait: float) -> Fact:
    """Write as a whole, with a fault, and again on what that run left; return the facts of the case."""
    ranks = WRITES[work].ranks
    digests, ends = dict[str, str | None](), dict[str, RankEnds]()
    with tempfile.TemporaryDirectory() as folder:
        write_store(folder)
        disk = Path(folder, "disk")
        for runs in (["whole"], [fault, "again"]):
            with small_disk(disk, "8m"):
                for run in runs:
                    words = ["--writing-rank-of", work, run, folder, "--wait", str(wait)]
                    ends[run] = ended_ranks(folder, words, ranks, range(ranks), None)
                    digests[run] = next(iter(re.findall("^digest (\\w+)$", ends[run].said[0], re.MULTILINE)), None)
                    (disk / "filling").unlink(missing_ok=True)
            disk.rmdir()
    seconds = [s for s in ends[fault].seconds if s is not None]
    told = [rank for rank in range(ranks) if ends[fault].statuses[rank] != -signal.SIGKILL]
    fact: Fact = {
        "work": work, "fault": fault, "ranks": ranks, "errors": ends[fault].errors(told),
        "seconds": round(max(seconds), 1) if len(seconds) == ranks else None,
        "goes_on": ends["again"].statuses == [0] * ranks and digests["again"] == digests["whole"] is not None,
    }  # fmt: skip
    return fact


# -- the page ---------------------------------------------------------------------------------------------------------


def table_of(facts: Sequence[Fact], faults: Sequence[str]) -> Iterator[str]:
    """A table of the page: a row for each kind of work, a column for each fault."""
    by_case = {(fact["work"], fact["failing"], fact["fault"]): fact for fact in facts if fact["fault"] in faults}
    rows = []
    for work, failing in dict.fromkeys((work, failing) for work, failing, _ in by_case):
        cells = [str(failing)]
        for fault in faults:
            if (work, failing, fault) not in by_case:
                cells.append("not measured")
                continue
            fact = by_case[work, failing, fault]
            if fact.get("needs_no_link"):
                cells.append("goes on: each host reads for itself")
                continue
            lacks = "" if fact["names_it"] else ", **does not say who**"
            lacks += "" if fact.get("tells_why", True) else ", **does not say why**"
            cells.append(f"{told_seconds(fact)}, {' or '.join(fact['errors'])}{lacks}")
        rows.append([work, *cells])
    yield from table_lines(["while ranks are in", "rank", *faults], rows)


def table_of_writes(facts: Sequence[Fact]) -> Iterator[str]:
    """The table of what writes leave: a row for each kind of work and fault."""
    rows = []
    for fact in facts:
        next_run = "goes on, same bits" if fact["goes_on"] else "**does not go on**"
        rows.append(
            [
                fact["work"],
                str(fact["ranks"]),
                fact["fault"],
                told_seconds(fact),
                " or ".join(fact["errors"]) or "nothing: all are killed",
                next_run,
            ]
        )
    yield from table_lines(["work", "ranks", "fault", "until all have ended", "they raise", "the next run"], rows)


def told_seconds(fact: Fact) -> str:
    return "**still waiting**" if fact["seconds"] is None else f"{fact['seconds']} s"


def write_page() -> None:
    """Make the table of the page anew, of the newest result file."""
    page, results = ROOT / "docs" / "failures.md", (ROOT / "benchmarks" / "results").glob("failures-*.jsonl")
    newest = max(results, key=lambda file: json.loads(file.open().readline())["date"])
    header, *facts = map(json.loads, newest.read_text().splitlines())
    link = f"[{newest.name}](../benchmarks/results/{newest.name})"
    source = f"{link}: {header['hardware']}; {header['date']}; `{header['command']}`"
    before, rest = page.read_text().split(BEGIN)
    jobs, writes = ([f for f in facts if ("goes_on" in f) == is_write] for is_write in (False, True))
    tables = [*table_of(jobs, FAULTS), *table_of(jobs, MEMORY_FAULTS), *table_of_writes(writes)]
    lines = "\n".join(["", *tables, source, ""])
    page.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", type=float, default=8.0, help="seconds that the mesh waits")
    parser.add_argument("--failing", type=int, nargs="+", default=[1, 0], help="the ranks that fail, one in a run")
    parser.add_argument("--work", nargs="*", help="the kinds of work; by default all")
    parser.add_argument("--fault", nargs="*", help="the faults; by default all")
    add_result_options(parser)
    parser.add_argument("--page", action="store_true", help="make the table of docs/failures.md, and measure nothing")
    parser.add_argument("--rank-of", nargs=3, metavar=("WORK", "FAULT", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--writing-rank-of", nargs=3, metavar=("WORK", "RUN", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return run_rank(*options.rank_of, options.wait, *options.failing)
    if options.writing_rank_of:
        work, run, folder = options.writing_rank_of
        return run_writing_rank(work, run, Path(folder), options.wait)
    if options.page:
        return write_page()
    results = ResultFile(options, f"python benchmarks/failures.py --wait {options.wait:g}")

    def is_chosen(work: str, fault: str) -> bool:
        return (not options.work or work in options.work) and (not options.fault or fault in options.fault)

    for work, failing in itertools.product(WORKS, options.failing):
        for fault in [*FAULTS, *(MEMORY_FAULTS if work in MEMORY_WORKS else ())]:
            if is_chosen(work, fault):
                results.add(seen(work, fault, options.wait, failing))
    for work, writing in WRITES.items():
        for fault in writing.faults:
            if is_chosen(work, fault):
                results.add(seen_of_writes(work, fault, options.wait))
    return None


if __name__ == "__main__":
    main()
