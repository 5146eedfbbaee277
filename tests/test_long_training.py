"""Training for thousands of steps, with samples read and checkpoints written: nothing grows."""

from __future__ import annotations

import gc

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
