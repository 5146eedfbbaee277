"""The code of docs/training.md runs as it stands, and goes on on other ranks, with the numbers of one."""

import contextlib
import os
import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from globe_store import globe, write

from jigsaw.testing import run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
MESH = "jigsaw.init_mesh(lat=1, lon=1)"
TRAINED = "< EPOCHS:"
PATIENCE = 240


def run(folder, mesh, epochs="EPOCHS"):
    """Run the blocks of the page in a folder that has globe.zarr; with `epochs` as far as the training goes."""
    left = {}
    with contextlib.chdir(folder):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            code = block.replace(MESH, mesh).replace(TRAINED, f"< {epochs}:")
            exec(compile(code, "docs/training.md", "exec"), left)
            if TRAINED in block and epochs != "EPOCHS":
                break
    left["loader"].close()
    scores = {name: values.tolist() for name, values in left["scores"].items()}
    return left["losses"], scores, left["loader"].state_dict()


def smooth(globe):
    """The globe with fields that a net can learn: waves that go east, and a little noise."""
    lat, lon = np.deg2rad(globe.latitude.values), np.deg2rad(globe.longitude.values)
    for field in globe.data_vars.values():
        if "time" in field.dims:
            at = np.arange(field.sizes["time"])[:, None, None]
            wave = np.cos(lat)[:, None] * np.sin(3 * lon - 0.4 * at) + np.sin(2 * lat)[:, None]
            wave = wave[:, None] if "level" in field.dims else wave
            field.values[:] = 0.1 * field.values + 0.9 * field.values.mean() + 2 * field.values.std() * wave
    return globe


@pytest.mark.slow
def test_the_page_is_the_same_on_one_rank_and_goes_on_from_two_to_four(tmp_path):
    assert PAGE.count(MESH) == PAGE.count(TRAINED) == 1
    source = write(tmp_path / "globe.zarr", smooth(globe(40, 721, 32)))
    folders = [tmp_path / name for name in ("one", "more")]
    for folder in folders:
        folder.mkdir()
        os.symlink(source, folder / "globe.zarr")
    ((losses, scores, state),) = run_on_ranks(1, run, folders[0], MESH, timeout=PATIENCE)
    assert state == {"seed": 0, "epoch": 3, "next_sample": 0}
    assert len(losses) == 30 and min(losses[-3:]) < losses[0]
    for begun, _, _ in run_on_ranks(2, run, folders[1], "jigsaw.init_mesh(lat=2, lon=1)", "1", timeout=PATIENCE):
        assert begun == pytest.approx(losses[:10], rel=1e-3)
    for ended, theirs, there in run_on_ranks(4, run, folders[1], "jigsaw.init_mesh(lat=2, lon=2)", timeout=PATIENCE):
        assert there == state and len(ended) == len(losses)
        assert ended == pytest.approx(losses, rel=1e-3)
        for name, values in scores.items():
            np.testing.assert_allclose(theirs[name], values, rtol=1e-2)
    one, four = (xr.open_zarr(folder / "forecast.zarr", consolidated=False).load() for folder in folders)
    assert set(one) == {"2m_temperature", "geopotential"}
    xr.testing.assert_allclose(one, four, rtol=1e-2)
    there = xr.open_zarr(source, consolidated=False)
    np.testing.assert_array_equal(one.latitude, there.latitude)
    np.testing.assert_array_equal(one.init_time, there.time.sel(time=slice("2020-01-07", None))[1:-2])
