"""The weather example: its data are what they say, its model is plain torch, its map shows the field where it is."""

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

EXAMPLE = Path(__file__).parents[1] / "examples" / "weather"
MODULES = ("data", "model", "plot", "train", "quarter_degree")


@pytest.fixture
def example(monkeypatch):
    """The example's files as modules; their short names are forgotten again afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def air_store(tmp_path_factory):
    return tmp_path_factory.mktemp("weather") / "air.zarr"


def test_packed_copy_is_small_and_whole(example):
    assert example.data.PACKED.stat().st_size <= 12_000_000
    with xr.open_dataset(example.data.PACKED, mask_and_scale=False) as packed:
        assert packed["air"].shape == (938, 73, 144)
        assert packed["air"].dtype == np.int16
        assert str(packed["time"].values[0])[:7] == "1948-01"
        assert "NOAA" in packed.attrs["license"]


def test_climatology_knows_nothing_of_the_test_years(example):
    times = xr.date_range("1948-01-01", periods=938, freq="MS")
    air = xr.DataArray(
        np.random.default_rng(0).normal(size=(938, 2, 3)), dims=("time", "lat", "lon"), coords={"time": times}
    )
    other = air.where(air["time"].dt.year <= 2008, 1e6)
    xr.testing.assert_identical(example.data.monthly_climatology(air), example.data.monthly_climatology(other))


@pytest.mark.slow
def test_store_is_chunked_by_decade_and_its_anomaly_has_no_season(example, air_store):
    path = example.data.store(air_store)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]  # no draft is left
    with xr.open_zarr(path) as store:
        assert store["air_anomaly"].dims == ("time", "latitude", "longitude")
        assert store["air_anomaly"].encoding["chunks"] == (120, 73, 144)
        anomaly = store["air_anomaly"].sel(time=slice("1948", "2008")).load()
        assert float(abs(anomaly.groupby("time.month").mean()).max()) < 0.01
        recent = store["air"].sel(time="2015-12").values - store["air_climatology"].sel(month=12).values
        np.testing.assert_allclose(store["air_anomaly"].sel(time="2015-12").values, recent, atol=0.0101)


@pytest.mark.slow
def test_four_ranks_read_together_what_one_reads(example, air_store, capsys):
    """By themselves, without being told to; and no more of a chunk than the months that samples need."""
    what = {"store": example.data.store(air_store), "fields": example.train.FIELDS, "inputs": example.train.INPUTS}
    what |= {"train": example.train.TRAIN, "test": None, "normalize": None}
    alone, four = (example.train.open_samples(what, mesh)[0] for mesh in ({"data": 1}, {"lat": 2, "lon": 2}))
    example.train.show_plan(alone, four, 16)
    told = capsys.readouterr().out
    rows = [[float(n) for n in line.split()[-4:]] for line in told.splitlines()[1:7]]
    months = 16 * 13 * 73 * 144 * 2 / 1e6
    assert rows[0][1] == rows[5][1] == pytest.approx(months, abs=0.01)
    for column in (0, 1):
        assert sum(row[column] for row in rows[1:5]) == pytest.approx(rows[0][column], abs=0.03)
        assert max(row[column] for row in rows[1:5]) < 0.35 * rows[5][column]
    assert "all of which several ranks need" in told and "(cooperative reading, the cheapest;" in told


def test_a_waiting_rank_says_who_failed(example, tmp_path):
    with pytest.raises(TimeoutError, match="the rank that writes it has failed"):
        example.data.once(tmp_path / "never", lambda path: None, writes=False, patience=0.1)


def test_a_slower_writer_keeps_the_store_that_is_there(example, tmp_path):
    def write_while_another_run_finishes(draft):
        draft.mkdir()
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "theirs").touch()

    store = example.data.once(tmp_path / "store", write_while_another_run_finishes, writes=True)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert (store / "theirs").exists()


def test_cell_areas_cover_the_sphere(example):
    lats = np.linspace(90, -90, 73)
    areas = example.train.cell_areas(lats)[:, 0]
    edges = np.clip(np.linspace(91.25, -91.25, 74), -90, 90)
    exact = -np.diff(np.sin(np.deg2rad(edges)))
    np.testing.assert_allclose(areas, exact * 73 / 2, rtol=1e-5)


def test_season_is_the_time_of_year_of_the_target(example):
    times = np.array([["2000-01-01"], ["2001-07-02"]], dtype="datetime64[us]")
    np.testing.assert_allclose(example.train.season(times), [[0, 1], [0, -1]], atol=0.02)


def test_first_forecast_is_persistence_for_any_grid(example):
    for size in ((9, 16), (13, 18)):
        model = example.model.GlobeModel(3, 2, size, (4, 8))
        x = torch.randn(2, 3, 2, *size)
        torch.testing.assert_close(model(x, torch.randn(2, 2)), x[:, -1:])


def test_model_does_not_know_where_longitude_begins(example):
    torch.manual_seed(0)
    model = example.model.GlobeModel(2, 1, (13, 32), (4, 8)).double()
    torch.nn.init.normal_(model.head.weight)
    x, season = torch.randn(1, 2, 1, 13, 32, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    turned = model(x.roll(model.stride, dims=-1), season).roll(-model.stride, dims=-1)
    torch.testing.assert_close(turned, model(x, season))


def test_map_shows_the_field_where_it_is(example):
    lats, lons = np.linspace(90, -90, 73), np.arange(144) * 2.5
    rows = np.broadcast_to(lats[:, None], (73, 144))
    image = example.plot.raster(rows, lats, lons, rows=101)
    assert abs(np.nanmax(image) - 90) < 2
    assert abs(image[50, 100]) < 1e-6  # the middle of the map is on the equator
    assert np.isnan(image[0, 0])
    flipped = example.plot.raster(rows[::-1], lats[::-1], lons, rows=101)
    np.testing.assert_allclose(flipped, image, atol=1e-9)


def run_training(ranks: int, out: Path, *flags: str) -> dict:
    """`train.py` as a user runs it; its report."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(EXAMPLE / "train.py"), "--steps", "3", "--out", str(out), *flags]
    run = subprocess.run(
        command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "waiting for data" in run.stderr
    assert "damped persistence" in run.stdout
    (report,) = (
        json.loads(path.read_text()) for path in out.glob("loss_*.json") if f'"ranks": {ranks},' in path.read_text()
    )
    return report


@pytest.mark.slow
def test_training_is_the_same_on_one_and_four_ranks(tmp_path):
    alone, tiles = run_training(1, tmp_path), run_training(4, tmp_path)
    assert len(alone["losses"]) == 3
    np.testing.assert_allclose(tiles["losses"], alone["losses"], rtol=1e-5)
    published = {"climatology": 1.715, "persistence": 1.602, "damped persistence": 1.443}
    for name, error in published.items():
        assert tiles["skill"][name] == pytest.approx(error, abs=1e-3)
        assert tiles["skill"][name] == pytest.approx(alone["skill"][name], rel=1e-6)
    assert tiles["skill"]["this model"] == pytest.approx(alone["skill"]["this model"], rel=1e-5)
    assert (tmp_path / "weather.png").stat().st_size > 50_000
