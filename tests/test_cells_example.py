"""The example on cells: its store holds what the grid holds there, and its losses are those of one rank."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

EXAMPLE = Path(__file__).parents[1] / "examples" / "cells"
MODULES = ("data", "model")


def modules():
    """The example's files as modules; their short names are forgotten again afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


def test_values_are_interpolated_as_xarray_does():
    lat, lon = np.linspace(90, -90, 73, dtype="f4"), np.arange(144, dtype="f4") * 2.5
    values = np.random.default_rng(0).normal(size=(2, 73, 144)).astype("f4")
    grid = xr.DataArray(values, dims=("time", "lat", "lon"), coords={"lat": lat, "lon": lon})
    wrapped = xr.concat([grid, grid.isel(lon=[0]).assign_coords(lon=[360.0])], "lon")
    cells = jigsaw.io.CellGrid(3072, nside=16, nested=True)
    want = wrapped.interp(lat=xr.DataArray(cells.lat, dims="cell"), lon=xr.DataArray(cells.lon, dims="cell"))
    np.testing.assert_allclose(modules().data.to_cells(values, lat, lon), want, atol=1e-5)


def forecast(axes, split):
    """The net on the cells of level 2, its gradients, and what traveled of them."""
    torch.manual_seed(0)
    net = modules().model.CellModel(3, 2, (4, 8, 8)).double()
    torch.nn.init.normal_(net.head.weight)
    x, season = torch.randn(2, 3, 192, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    if axes is not None:
        net = jigsaw.parallelize(net, mesh := world_mesh(**axes))
        x = jigsaw.shard(x, mesh, (None, None, "cell"), split={2: split})
    out = net(x, season)
    with comm.count() as sent:
        net(x, season)
    out.square().mean().backward()
    whole = out.full_tensor() if axes is not None else out
    return (
        whole.detach(),
        [p.grad.clone() for p in net.parameters()],
        {call.kind for call in sent.calls if call.sent_bytes},
    )


@pytest.mark.parametrize("split", [[0, 96, 192], [0, 16, 192], [0, 192, 192]])
def test_the_net_on_cells_is_that_of_one_process(split):
    want, grads, _ = forecast(None, None)
    for whole, parts, kinds in run_on_ranks(2, forecast, {"cell": 2}, split):
        assert kinds <= {"neighbors", "all_reduce"}, "down and up send nothing"
        torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-12)
        for part, grad in zip(parts, grads, strict=True):
            torch.testing.assert_close(part, grad, rtol=1e-9, atol=1e-12)


def run_training(ranks, out):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(EXAMPLE / "train.py"), "--steps", "3", "--out", str(out)]
    run = subprocess.run(
        command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((out / f"loss_{ranks}.json").read_text())


@pytest.mark.slow
def test_training_on_cells_is_the_same_on_one_and_four_ranks(tmp_path):
    alone, tiles = run_training(1, tmp_path), run_training(4, tmp_path)
    np.testing.assert_allclose(tiles["losses"], alone["losses"], rtol=1e-5)
    assert tiles["chunks"] == alone["chunks"]
    for name, error in alone["skill"].items():
        assert tiles["skill"][name] == pytest.approx(error, rel=1e-5)
    assert (tmp_path / "cells.png").stat().st_size > 50_000
