"""The code of docs/training.md runs as it stands, and on four ranks with the same forecast."""

import contextlib
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from globe_store import globe, write

from jigsaw.testing import run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
MESH = "jigsaw.init_mesh(lat=1, lon=1)"


def run(folder, mesh):
    """Run every block of the page in a folder that has globe.zarr; the last loss."""
    torch.manual_seed(0)
    left = {}
    with contextlib.chdir(folder):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(block.replace(MESH, mesh), "docs/training.md", "exec"), left)
    left["loader"].close()
    return left["loss"].item(), tuple(left["batch"].input.shape), left["loader"].state_dict()


@pytest.mark.slow
def test_the_page_runs_alike_on_one_rank_and_four(tmp_path):
    source = write(tmp_path / "globe.zarr", globe(56))
    made = []
    for ranks, mesh in ((1, MESH), (4, "jigsaw.init_mesh(lat=2, lon=2)")):
        assert mesh in PAGE
        folder = tmp_path / str(ranks)
        folder.mkdir()
        os.symlink(source, folder / "globe.zarr")
        (loss, shape, state), *others = run_on_ranks(ranks, run, folder, mesh)
        assert all(other[0] == loss for other in others)
        assert shape == (1, 2, 3, 4, 8) and state == {"seed": 0, "epoch": 2, "next_sample": 0}
        made.append((loss, xr.open_zarr(folder / "forecast.zarr", consolidated=False).load()))
    (one_loss, one), (four_loss, four) = made
    assert four_loss == pytest.approx(one_loss, rel=1e-5)
    assert set(one) == {"2m_temperature", "geopotential"}
    xr.testing.assert_allclose(one, four, rtol=1e-4)
    there = xr.open_zarr(source, consolidated=False)
    np.testing.assert_array_equal(one.latitude, there.latitude)
    np.testing.assert_array_equal(one.init_time, there.time.sel(time=slice("2020-01-11", None))[1:-2])
