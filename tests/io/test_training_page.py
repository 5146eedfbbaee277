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
MESH, NARROW, TRAINED = "jigsaw.init_mesh(lat=1, lon=1)", "torch.bfloat16)", "< EPOCHS:"
PATIENCE = 240


def run(folder, changes):
    """Run the blocks of the page, with some `changes`, in a folder that has globe.zarr; part of the epochs end it."""
    left = {}
    with contextlib.chdir(folder):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            for old, new in changes.items():
                block = block.replace(old, new)
            exec(compile(block, "docs/training.md", "exec"), left)
            if TRAINED in changes and "while" in block:
                break
    left["loader"].close()
    return left["losses"], left["skill"], left["loader"].state_dict()


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
    assert PAGE.count(MESH) == PAGE.count(NARROW) == PAGE.count(TRAINED) == 1
    source = write(tmp_path / "globe.zarr", smooth(globe(28, 721, 16)))
    folders = [tmp_path / name for name in ("narrow", "one", "more")]
    for folder in folders:
        folder.mkdir()
        os.symlink(source, folder / "globe.zarr")
    (narrow,) = run_on_ranks(1, run, folders[0], {}, timeout=PATIENCE)
    wide = {NARROW: "torch.bfloat16, enabled=False)"}
    ((losses, skill, state),) = run_on_ranks(1, run, folders[1], wide, timeout=PATIENCE)
    assert state == narrow[2] == {"seed": 0, "epoch": 2, "next_sample": 0}
    assert len(losses) == 16 and losses[-1] < losses[0]
    assert narrow[0] == pytest.approx(losses, rel=0.02) and narrow[0] != losses
    # trained for an epoch on two ranks, gone on with on four
    two = wide | {MESH: "jigsaw.init_mesh(lat=2, lon=1)", TRAINED: "< 1:"}
    for begun, *_ in run_on_ranks(2, run, folders[2], two, timeout=PATIENCE):
        assert begun == pytest.approx(losses[:8], rel=1e-5)
    four = wide | {MESH: "jigsaw.init_mesh(lat=2, lon=2)"}
    for ended, theirs, there in run_on_ranks(4, run, folders[2], four, timeout=PATIENCE):
        assert there == state
        assert ended == pytest.approx(losses, rel=1e-5)
        for name, values in skill.items():
            np.testing.assert_allclose(theirs[name], values, rtol=1e-3)
    one, more = (xr.open_zarr(folder / "forecast.zarr").load() for folder in folders[1:])
    assert set(one) == {"2m_temperature", "geopotential"}
    xr.testing.assert_allclose(one, more, rtol=1e-4)
    there = xr.open_zarr(source, consolidated=False)
    np.testing.assert_array_equal(one.latitude, there.latitude)
    np.testing.assert_array_equal(one.init_time, there.time.sel(time=slice("2020-01-06", None))[1:-2])
