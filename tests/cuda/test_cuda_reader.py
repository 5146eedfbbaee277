"""The reader's tiles on a GPU: the stored values, through pinned memory, on streams of their own."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from device_under_test import DEVICE, device_mesh

import jigsaw
from jigsaw.testing import run_on_ranks


def _write(path):
    values = np.random.default_rng(0).standard_normal((8, 37, 24), np.float32)
    times = np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h")
    coords = {"time": times, "lat": np.linspace(90, -90, 37), "lon": np.arange(24) * 15.0}
    fields = {name: (("time", "lat", "lon"), values + at) for at, name in enumerate(("t2m", "u10"))}
    xr.Dataset(fields, coords).chunk(time=1, lat=10, lon=24).to_zarr(path)
    return values


def _read(path, values, ranks):
    mesh = device_mesh(lat=ranks)
    data = jigsaw.io.open(str(path), mesh=mesh, fields=["t2m", "u10"], targets=["6h"], halo=1)
    loader, seen = jigsaw.io.DataLoader(data, batch_size=2, shuffle=True, seed=0), 0
    for batch in loader:
        assert batch.input.device.type == DEVICE
        # work on the computing stream at once: a tile whose copy is still under way would have other values
        doubled = (batch.input * 2).full_tensor().cpu()
        for sample, tile in zip(batch.samples, doubled, strict=True):
            np.testing.assert_array_equal(tile[0].numpy(), 2 * np.stack([values[sample], values[sample] + 1]))
            seen += 1
    loader.close()
    assert seen == len(data)
    model = jigsaw.parallelize(torch.nn.Conv2d(2, 2, 3, padding=1).to(DEVICE), mesh)
    out = model(jigsaw.shard(torch.ones(1, 2, 37, 24).to(DEVICE), mesh, (None, None, "lat", None)))
    out.square().mean().backward()
    assert model.weight.grad.device.type == DEVICE


def test_batches_on_one_gpu(tmp_path):
    run_on_ranks(1, _read, tmp_path / "x.zarr", _write(tmp_path / "x.zarr"), 1, timeout=120, device=DEVICE)


def test_batches_of_ranks_that_share_a_gpu(tmp_path):
    run_on_ranks(2, _read, tmp_path / "x.zarr", _write(tmp_path / "x.zarr"), 2, timeout=120, device=DEVICE)
