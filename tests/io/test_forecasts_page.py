"""The code of docs/forecasts.md runs as it stands, with the values of one process on every mesh, in constant memory."""

import contextlib
import gc
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from globe_store import globe, truth, write

import jigsaw
from jigsaw.testing import run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "forecasts.md").read_text()
MESH = "jigsaw.init_mesh(lat=1, lon=1)"


def run(folder, mesh):
    """Run the page in a folder that has globe.zarr; return its weights, and the most tiles alive at each lead."""
    left = {}
    (folder / "out").mkdir(exist_ok=True)
    with contextlib.chdir(folder / "out"):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(
                compile(block.replace(MESH, mesh).replace("globe.zarr", "../globe.zarr"), "docs/forecasts.md", "exec"),
                left,
            )
    data, tiles = left["data"], []
    start = data[0]
    states = left["forecast"](start.input, start.input_times[-1], 12, 2)
    while (state := next(states, None)) is not None:
        assert state.shape == (2, 2, 13, 16)
        gc.collect()
        tiles.append(sum(issubclass(type(each), jigsaw.Tile) for each in gc.get_objects()))
    weights = {name: w.detach().clone() for name, w in left["net"].state_dict().items()}
    return weights, tiles, left["made"][0].input.shape, len(left["made"])


def control(folder, weights, init, leads):
    """Return the forecast of plain torch on the whole globe, [leads, C, lat, lon], without perturbations."""
    stored = truth(folder / "globe.zarr")
    values = np.stack([stored["2m_temperature"], stored["geopotential"].sel(level=500)], axis=1)
    units = torch.tensor([[280.0, 10.0], [5e4, 1e3]])[:, :, None, None]
    states = (torch.from_numpy(values.astype("f4")) - units[:, 0]) / units[:, 1]
    lat, lon = stored.latitude.values, stored.longitude.values
    before, now, made = states[init - 1], states[init], []
    for lead in range(leads):
        time = stored.time.values[init] + lead * np.timedelta64(6, "h")
        sun = torch.from_numpy(jigsaw.io.forcings.cos_zenith([time], lat, lon)).float()
        places = torch.from_numpy(jigsaw.io.forcings.latlon(lat, lon)).float()
        x = torch.cat([before, now, sun, places])[None]
        hidden = torch.nn.functional.conv2d(x, weights["0.weight"], weights["0.bias"], padding=1)
        change = torch.nn.functional.conv2d(
            torch.nn.functional.gelu(hidden), weights["2.weight"], weights["2.bias"], padding=1
        )
        before, now = now, now + change[0]
        made.append(now * units[:, 1] + units[:, 0])
    return torch.stack(made)


def test_the_page_forecasts_alike_on_every_mesh(tmp_path):
    assert MESH in PAGE
    folders = {ranks: tmp_path / str(ranks) for ranks in (1, 2, 4)}
    for folder in folders.values():
        folder.mkdir()
        write(folder / "globe.zarr", globe(4))
    meshes = {1: MESH, 2: "jigsaw.init_mesh(lat=2)", 4: "jigsaw.init_mesh(lat=2, lon=2)"}
    for ranks, folder in folders.items():
        results = run_on_ranks(ranks, run, folder, meshes[ranks], timeout=240)
        for _, tiles, shape, samples in results:
            assert len(tiles) == 12 and len(set(tiles[2:])) == 1  # two states, however many leads
            assert shape == (2, 2, 13, 16) and samples == 5 * 3
        stores = sorted((folder / "out").glob("forecast-*.zarr"))
        assert [store.name[9:22] for store in stores] == ["2020-01-01T06", "2020-01-01T12", "2020-01-01T18"]
        for init, store in enumerate(stores, start=1):
            made = xr.open_zarr(store).load()
            assert made.prediction_timedelta.values[-1] == np.timedelta64(36, "h")
            assert made.init_time == truth(folder / "globe.zarr").time[init]
            expected = control(folder, results[0][0], init, 6).numpy()
            np.testing.assert_allclose(made["2m_temperature"][:, 0], expected[:, 0], rtol=1e-5)
            np.testing.assert_allclose(made["geopotential"].sel(level=500)[:, 0], expected[:, 1], rtol=1e-5)
            one = xr.open_zarr(folders[1] / "out" / store.name).load()
            xr.testing.assert_allclose(made, one, rtol=1e-5)
            members = made["2m_temperature"].values
            assert 0.1 < (members[:, 1:] - members[:, :1]).std() < 5
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(made["2m_temperature"][:, 1], expected[:, 0], rtol=1e-5)
