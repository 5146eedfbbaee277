"""Thousands of steps with samples read and checkpoints written, and a thousand files: nothing grows."""

from __future__ import annotations

import gc
from pathlib import Path

import netCDF4
import numpy as np
import psutil
import pytest
import torch
import xarray as xr

import jigsaw
from jigsaw.testing import on_ranks, world_mesh

STEPS, SETTLED, SAVES = 2000, 600, 50


def held():
    """Megabytes, descriptors and threads of this process."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()


@on_ranks(2, timeout=600)
def train(folder):
    torch.manual_seed(0)
    mesh = world_mesh(lat=2)
    net = jigsaw.parallelize(torch.nn.Sequential(torch.nn.Conv2d(2, 8, 3, padding=1), torch.nn.Conv2d(8, 2, 1)), mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    history, losses, pending = [], [], None
    data = jigsaw.io.open(f"{folder}/store.zarr", mesh=mesh, fields=["t", "z"], targets=[1])
    loader = jigsaw.io.DataLoader(data, 2, shuffle=True, seed=0)
    step = 0
    while step < STEPS:
        for batch in loader:
            loss = torch.nn.functional.mse_loss(net(batch.input[:, 0]), batch.target[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step % SAVES == 0:
                state = {"model": net, "optimizer": optimizer, "random": jigsaw.RandomState()}
                pending = jigsaw.save(f"{folder}/run/step-{step}", **state, keep=2, wait=False)
            if step in (SETTLED, STEPS):
                pending.wait()
                history.append(held())
            if step == STEPS:
                break
    return history, losses


@pytest.mark.slow
@pytest.mark.nightly
def test_memory_descriptors_and_threads_stay_as_they_are(tmp_path):
    fields = {name: (("time", "lat", "lon"), np.random.default_rng(0).normal(size=(41, 13, 8))) for name in "tz"}
    times = np.datetime64("2020-01-01", "ns") + np.arange(41) * np.timedelta64(6, "h")
    coords = {"time": times, "lat": np.linspace(60, -60, 13), "lon": np.arange(8) * 45.0}
    data = xr.Dataset(fields, coords).astype(np.float32)
    data.to_zarr(tmp_path / "store.zarr", encoding={name: {"chunks": (1, 13, 8)} for name in "tz"}, consolidated=False)
    for history, losses in train(str(tmp_path)):
        (settled_mb, *settled), (last_mb, *last) = history
        assert last == settled, "descriptors, threads"
        assert last_mb - settled_mb < 10  # a leak of 8 kB a step would be 11
        assert np.mean(losses[-100:]) < np.mean(losses[:100])
    assert sorted(folder.name for folder in (tmp_path / "run").iterdir()) == ["step-1950", "step-2000"]


FILES, DAY, LAT, LON = 1000, 4, 45, 90
BATCHES = (100, 400)  # in the midst of the epoch: readers ahead are at work at both
FEW = 8  # of a thousand files: connections and threads that come and go


def day_of(file):
    """Values of a file that tell their place."""
    steps = file * DAY + np.arange(DAY)
    return (steps[:, None, None] + np.arange(LAT)[:, None] / 64 + np.arange(LON) / 4096).astype("f4")


def write_days(folder):
    """NetCDF files of 100 chunks each."""
    for file in range(FILES):
        with netCDF4.Dataset(folder / f"{file:04}.nc", "w") as day:
            for name, size in (("time", DAY), ("lat", LAT), ("lon", LON)):
                day.createDimension(name, size)
            times = day.createVariable("time", "i8", ("time",))
            times.units, times[:] = "hours since 2000-01-01", 6 * (file * DAY + np.arange(DAY))
            day.createVariable("lat", "f4", ("lat",))[:] = np.linspace(88, -88, LAT)
            day.createVariable("lon", "f4", ("lon",))[:] = 4 * np.arange(LON)
            chunked = {"chunksizes": (1, LAT // 5, LON // 5), "zlib": True}
            day.createVariable("t", "f4", ("time", "lat", "lon"), **chunked)[:] = day_of(file)


@on_ranks(8, timeout=1200)
def read_days(folder):
    mesh = world_mesh(lat=4, lon=2)
    data = jigsaw.io.open(sorted(map(str, Path(folder).glob("*.nc"))), mesh=mesh, fields=["t"])
    history, batches = [], 0
    for batch in jigsaw.io.DataLoader(data, 8, shuffle=True, seed=0):
        first = batch.input[:, 0, 0].local[:, 0, 0]  # this tile's corner
        *_, lat, lon = (start for start, _ in batch.input.layout.owned(tuple(mesh.get_coordinate())))
        assert (first.frac() == torch.tensor(lat / 64 + lon / 4096)).all()
        batches += 1
        if batches in BATCHES:
            history.append(held())
    return history, batches


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_files_of_a_hundred_chunks_are_read_by_eight_ranks(tmp_path):
    write_days(tmp_path)
    for history, batches in read_days(str(tmp_path)):
        (settled_mb, *settled), (last_mb, *last) = history
        assert batches == FILES * DAY // 8
        assert all(now <= before + FEW for now, before in zip(last, settled, strict=True)), "descriptors, threads"
        assert last_mb - settled_mb < 10
