"""What becomes of files when the disk is full, or the process is killed, and whether the next run goes on.

Each work of `failures.py` that writes is run three times: as a whole; with a fault in its middle; and again on what
that run left.  What was whole before the fault must still be, and the last result must have the bits of the first.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from failing_machines import fill_disk
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import jigsaw
import jigsaw.io as jio

Pause = Callable[[], None]
STEPS, ROWS, WIDTH = 6, 66, 64
TIMES = np.datetime64("2020-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h")


@dataclass(frozen=True)
class WritingWork:
    """Work that writes to a disk, calls its argument in the middle, and returns a digest of its result.

    `left` are the bytes that a full disk has left in the middle, and `ranks` how many do it.
    """

    run: Callable[[DeviceMesh, Path, bool, Pause], str]
    left: int
    ranks: int
    faults: tuple[str, ...] = ("full disk",)


def digest_of(values: object) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def saved(is_waiting: bool) -> Callable[[DeviceMesh, Path, bool, Pause], str]:
    """A second checkpoint beside a first."""

    def model_of(mesh: DeviceMesh, value: float) -> nn.Module:
        model = nn.Linear(512, 512, bias=False)
        nn.init.constant_(model.weight, value)
        return jigsaw.parallelize(model, mesh, shard_weights=True)

    def run(mesh: DeviceMesh, disk: Path, is_again: bool, pause: Pause) -> str:
        if not is_again:
            jigsaw.save(disk / "step-1", model=model_of(mesh, 1.0))
        assert jigsaw.latest(disk) == disk / "step-1"
        before, second = model_of(mesh, 0.0), model_of(mesh, 2.0)
        jigsaw.load(disk / "step-1", model=before)
        assert all(bool((p.full_tensor() == 1).all()) for p in before.parameters())
        pause()
        dist.barrier()
        if is_waiting:
            jigsaw.save(disk / "step-2", model=second)
        else:
            jigsaw.save(disk / "step-2", model=second, wait=False).wait()
        jigsaw.load(disk / "step-2", model=before)
        assert jigsaw.latest(disk) == disk / "step-2"
        return digest_of(next(before.parameters()).full_tensor().detach().numpy())

    return run


def steps_written(mesh: DeviceMesh, disk: Path, is_again: bool, pause: Pause) -> str:
    """A store of forecasts that grows step by step."""
    x = torch.linspace(-1, 1, STEPS * ROWS * WIDTH).view(STEPS, ROWS, WIDTH)
    options = {"dims": ("time", "lat", "lon"), "append_dim": "time"}
    first = jio.completeness(disk / "a.zarr").steps if is_again else 0
    assert (first >= 2) == is_again
    with jio.Writer(disk / "a.zarr", mode="a" if is_again else "w", **options) as out:
        for step in range(first, STEPS):
            if step == 2:
                pause()
                dist.barrier()
            tile = jigsaw.shard(x[step : step + 1], mesh, (None, "lat", None))
            out.append({"u": tile}, {"time": TIMES[step : step + 1]})
    dist.barrier()
    return digest_of(xr.open_zarr(disk / "a.zarr")["u"].values)


def statistics_written(mesh: DeviceMesh, disk: Path, is_again: bool, pause: Pause) -> str:
    """Statistics with a checkpoint after each block, beside older ones."""
    data = jio.open(f"{disk.parent}/store.zarr", mesh=mesh, fields=["t"], targets=[])
    older = disk / "older.json"
    if not is_again:
        jio.statistics(data).write(older)
    assert jio.Statistics.read(older)["t"]["count"]

    def report(done: int, steps: int) -> None:
        if done == 4:
            pause()

    found = jio.statistics(data, block=2, checkpoint=disk / "s.part", resume=is_again, progress=report)
    return digest_of(np.concatenate([np.ravel(found.columns[name]) for name in ("mean", "std", "min", "max")]))


def store_converted(mesh: DeviceMesh, disk: Path, is_again: bool, pause: Pause) -> str:
    """A store that is made of another one, a region at a time."""
    seen: list[int] = []

    def report(done: int, steps: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            pause()

    source = xr.open_zarr(disk.parent / "store.zarr", consolidated=False)
    sizes = {"time": 1, "lat": 13, "lon": 8}
    made = jio.convert(source, disk / "made.zarr", chunks=sizes, shards=sizes, threads=1, progress=report)
    assert (made.kept > 0) == is_again
    return digest_of(xr.open_zarr(disk / "made.zarr")["t"].values)


WRITES = {
    "checkpoint": WritingWork(saved(is_waiting=True), 2**16, 3),
    "checkpoint in the background": WritingWork(saved(is_waiting=False), 2**16, 3),
    "forecast": WritingWork(steps_written, 2**15, 3),
    "statistics with a checkpoint": WritingWork(statistics_written, 0, 3, ("full disk", "killed")),
    "conversion": WritingWork(store_converted, 0, 1, ("full disk", "killed")),
}


def run_writing_rank(work: str, fault: str, folder: Path, wait: float) -> None:
    """Do the work as the rank that the environment names; `fault` is "whole" for none, and "again" behind one."""
    disk = folder / "disk"
    mesh = jigsaw.init_mesh(device="cpu", lat=WRITES[work].ranks, timeout=wait)

    def pause() -> None:
        if mesh.get_rank() or fault in ("whole", "again"):
            return
        (folder / "failed_at").write_text(str(time.time()))
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        fill_disk(disk, WRITES[work].left)

    print("digest", WRITES[work].run(mesh, disk, fault == "again", pause))
