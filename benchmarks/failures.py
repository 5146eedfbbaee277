"""Seconds until all ranks have ended, when one of three fails in the middle of each kind of work.

    python benchmarks/failures.py --output benchmarks/results/failures-MACHINE-MONTH.jsonl
    python benchmarks/failures.py --page     # makes the table of docs/failures.md of the newest result file

The ranks do the work once, so that groups are connected.  Then one of them fails where the others wait for it: it
raises, it is killed (SIGKILL), or it stops and says nothing (SIGSTOP).  This is rank 1, and in another run rank 0,
which keeps the job's store.  The mesh waits for `--wait` seconds.  A case is a JSON object: `errors` is what the other
ranks raised, `seconds` how long the slower one took, and `names_it` whether both said which rank failed.  An error of a
rank that raised must be in what the others say (`tells_why`).
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from markdown_table import table_lines
from result_file import ResultFile, add_result_options
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import jigsaw
from jigsaw.ranks.mesh import mesh_patience

ROOT, RANKS = Path(__file__).parents[1], 3
FAULTS = ("raises", "killed", "silent")
_START_SECONDS = 120.0  # within which the fault happens
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
    "backward pass, cut weights": backward_of(shard_weights=True, unit_bytes=1),
    "step of a pipeline": pipeline_step,
    "save": checkpoint_written,
    "load": checkpoint_read,
    "read of a sample": samples_read,
    "statistics": statistics_computed,
}


def run_rank(work: str, fault: str, folder: str, wait: float, failing: int) -> None:
    """Do the work twice as the rank that the environment names; the second time one rank fails."""
    mesh = jigsaw.init_mesh(device="cpu", lat=RANKS, timeout=wait)
    call = WORKS[work](mesh, folder)
    call(lambda: None)

    def fail() -> None:
        if mesh.get_rank() != failing:
            return
        Path(folder, "failed_at").write_text(str(time.time()))
        if fault == "raises":
            raise ValueError("planted")
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    call(fail)
    raise SystemExit(f"{work}: nobody waited for rank {failing}")


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


def seen(work: str, fault: str, wait: float, failing: int = 1, patience: float = 60.0) -> Fact:
    """Start the ranks, wait for those that do not fail, and return the facts of the case."""
    with tempfile.TemporaryDirectory() as folder:
        write_store(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "--rank-of", work, fault, folder]
        command += ["--wait", str(wait), "--failing", str(failing)]
        processes = []
        for rank in range(RANKS):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            with open(f"{folder}/said{rank}", "w") as said:
                processes.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment))
        try:
            ended = ends_of(processes, failing, Path(folder, "failed_at"), patience)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = [Path(folder, f"said{rank}").read_text() for rank in range(RANKS)]
        if not Path(folder, "failed_at").exists():
            raise RuntimeError(f"{work}: {said}")
        failed_at = float(Path(folder, "failed_at").read_text())
    others = [rank for rank in range(RANKS) if rank != failing]
    errors = [re.findall(ERROR_LINE, said[rank], re.MULTILINE) for rank in others]
    fact: Fact = {
        "work": work, "fault": fault, "failing": failing,
        "errors": sorted({lines[-1] if lines else "none" for lines in errors}),
        "seconds": round(max(ended[rank] for rank in others) - failed_at, 1) if None not in ended.values() else None,
        "names_it": all(f"rank {failing}" in said[rank] or f"[{failing}]" in said[rank] for rank in others),
    }  # fmt: skip
    if fault == "raises":
        fact["tells_why"] = all("ValueError: planted" in said[rank] for rank in others)
    return fact


def ends_of(
    processes: Sequence[subprocess.Popen[bytes]], failing: int, fault: Path, patience: float
) -> dict[int, float | None]:
    """Return when each process ended that is not to fail, None for one that still runs so many seconds after the fault,
    which the file tells, or where none happens.
    """
    ended: dict[int, float | None] = {rank: None for rank in range(len(processes)) if rank != failing}
    until, has_failed = time.time() + _START_SECONDS, False
    while None in ended.values() and time.time() < until:
        if not has_failed and fault.exists():
            until, has_failed = time.time() + patience, True
        for rank, when in ended.items():
            if when is None and processes[rank].poll() is not None:
                ended[rank] = time.time()
        time.sleep(0.05)
    return ended


# -- the page ---------------------------------------------------------------------------------------------------------


def table_of(facts: Sequence[Fact]) -> Iterator[str]:
    """The table of the page: a row for each kind of work, a column for each fault."""
    by_case = {(fact["work"], fact["failing"], fact["fault"]): fact for fact in facts}
    rows = []
    for work, failing in dict.fromkeys((fact["work"], fact["failing"]) for fact in facts):
        cells = [str(failing)]
        for fault in FAULTS:
            fact = by_case[work, failing, fault]
            seconds = "**still waiting**" if fact["seconds"] is None else f"{fact['seconds']} s"
            lacks = "" if fact["names_it"] else ", **does not say who**"
            lacks += "" if fact.get("tells_why", True) else ", **does not say why**"
            cells.append(f"{seconds}, {' or '.join(fact['errors'])}{lacks}")
        rows.append([work, *cells])
    yield from table_lines(["while ranks are in", "rank", *FAULTS], rows)


def write_page() -> None:
    """Make the table of the page anew, of the newest result file."""
    page, results = ROOT / "docs" / "failures.md", (ROOT / "benchmarks" / "results").glob("failures-*.jsonl")
    newest = max(results, key=lambda file: json.loads(file.open().readline())["date"])
    header, *facts = map(json.loads, newest.read_text().splitlines())
    link = f"[{newest.name}](../benchmarks/results/{newest.name})"
    source = f"{link}: {header['hardware']}; {header['date']}; `{header['command']}`"
    before, rest = page.read_text().split(BEGIN)
    lines = "\n".join(["", *table_of(facts), source, ""])
    page.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", type=float, default=8.0, help="seconds that the mesh waits")
    parser.add_argument("--failing", type=int, nargs="+", default=[1, 0], help="the ranks that fail, one in a run")
    parser.add_argument("--work", nargs="*", help="the kinds of work; by default all")
    add_result_options(parser)
    parser.add_argument("--page", action="store_true", help="make the table of docs/failures.md, and measure nothing")
    parser.add_argument("--rank-of", nargs=3, metavar=("WORK", "FAULT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return run_rank(*options.rank_of, options.wait, *options.failing)
    if options.page:
        return write_page()
    results = ResultFile(options, f"python benchmarks/failures.py --wait {options.wait:g}")
    for work in options.work or WORKS:
        for failing, fault in itertools.product(options.failing, FAULTS):
            results.add(seen(work, fault, options.wait, failing))
    return None


if __name__ == "__main__":
    main()
