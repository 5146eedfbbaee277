"""GRIB through cfgrib: files that ecCodes writes here, opened and converted as xarray sees them."""

import os
import pickle
import shutil
from pathlib import Path

import eccodes
import numpy as np
import pytest
import xarray as xr

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.conversion.convert import convert
from jigsaw.io.conversion.selected_source import open_with_xarray
from jigsaw.testing import on_ranks, world_mesh

LAT, LON = 192, 384  # a field is large enough that a part of it would be read alone, where that were possible
GRID = {
    "Ni": LON,
    "Nj": LAT,
    "latitudeOfFirstGridPointInDegrees": 90,
    "latitudeOfLastGridPointInDegrees": -90,
    "longitudeOfFirstGridPointInDegrees": 0,
    "longitudeOfLastGridPointInDegrees": 360 - 360 / LON,
    "iDirectionIncrementInDegrees": 360 / LON,
    "jDirectionIncrementInDegrees": 180 / (LAT - 1),
}
MISSING = 9999.0


def append(file, edition, values, **keys):
    """One message: a field, with every NaN of it missing."""
    kind = "pl" if "level" in keys else "sfc"
    message = eccodes.codes_grib_new_from_samples(f"regular_ll_{kind}_grib{edition}")
    for key, value in {**GRID, "bitmapPresent": 1, "missingValue": MISSING, **keys}.items():
        eccodes.codes_set(message, key, value)
    eccodes.codes_set_values(message, np.nan_to_num(values, nan=MISSING).ravel())
    eccodes.codes_write(message, file)
    eccodes.codes_release(message)


@pytest.fixture(scope="module", params=[1, 2])
def analyses(request, tmp_path_factory):
    """Four steps of a field at the surface with a hole, and of one at two levels."""
    path, r = tmp_path_factory.mktemp("grib") / f"edition{request.param}.grib", np.random.default_rng(0)
    with path.open("wb") as file:
        for hour in (0, 600, 1200, 1800):
            when = {"dataDate": 20200101, "dataTime": hour}
            surface = r.normal(280, 10, (LAT, LON))
            surface[3:9, 5] = np.nan
            append(file, request.param, surface, shortName="2t", **when)
            for level in (850, 500):
                append(file, request.param, r.normal(270, 10, (LAT, LON)), shortName="t", level=level, **when)
    return str(path)


@pytest.fixture(scope="module")
def forecasts(tmp_path_factory):
    """Two forecasts of three leads."""
    path, r = tmp_path_factory.mktemp("grib") / "forecasts.grib", np.random.default_rng(1)
    with path.open("wb") as file:
        for day in (20200101, 20200102):
            for step in (0, 6, 12):
                values = r.normal(280, 10, (LAT, LON))
                append(file, 2, values, shortName="2t", dataDate=day, dataTime=0, step=step)
    return str(path)


def opened(path):
    return xr.open_dataset(path, engine="cfgrib")


@pytest.mark.slow
@on_ranks(2)
def test_tiles_are_what_cfgrib_reads(analyses):
    ds = jigsaw.io.open(
        opened(analyses), mesh=world_mesh(lat=2), fields=["t2m", "t850"], inputs=[-1, 0], targets=[1], halo=2
    )
    found = opened(analyses).load()
    whole = np.stack([found.t2m.values, found.t.sel(isobaricInhPa=850).values], axis=1)
    assert np.isnan(whole[:, 0, 3:9, 5]).all()
    assert ds.input_times(0).tolist() == [np.datetime64("2020-01-01T00", "s"), np.datetime64("2020-01-01T06", "s")]
    np.testing.assert_array_equal(ds[1].input.full_tensor(), whole[1:3])
    np.testing.assert_array_equal(ds[1].target.full_tensor()[0], whole[3])


@on_ranks(2)
def test_a_message_is_decoded_by_one_rank(analyses):
    ds = jigsaw.io.open(opened(analyses), mesh=world_mesh(lat=2), fields=["t2m", "t850"], mode="cooperative")
    assert ds.store.arrays["t"].chunks == (1, 1, LAT, LON)
    assert ds.plan(0).total.chunks == ds.plan(0).total.fallback == 2
    assert ds.plan(0).total.decoded_bytes == 2 * LAT * LON * 4


def test_leads_of_forecasts(forecasts):
    data = opened(forecasts)
    ds = jigsaw.io.open(
        data, mesh=world_mesh(lat=1), fields=["t2m"], along="lead", select={"init": "all"}, inputs=[0], targets=[1]
    )
    assert len(ds) == 4
    np.testing.assert_array_equal(ds[3].target.local[0, 0], data.t2m.values[1, 2])


@pytest.mark.slow
def test_converted(tmp_path, analyses):
    made = tmp_path / "made.zarr"
    assert main(["convert", analyses, str(made), "--mesh", "lat=2", "--verify"]) == 0
    found, expected = xr.open_zarr(made).load(), opened(analyses).load()
    for name in expected.variables:
        np.testing.assert_array_equal(found[name].values, expected[name].values, err_msg=name)
        assert found[name].attrs.get("units") == expected[name].attrs.get("units")
    ds = jigsaw.io.open(made, mesh=world_mesh(lat=1), fields=["t2m", "t500"])
    np.testing.assert_array_equal(ds[2].input.local[0, 1], expected.t.values[2, 1])


def test_converted_by_the_named_engine(tmp_path, forecasts):
    convert(forecasts, tmp_path / "made.zarr", engine="cfgrib")
    found = xr.open_zarr(tmp_path / "made.zarr", decode_timedelta=True)
    np.testing.assert_array_equal(found.t2m.values, opened(forecasts).t2m.values)
    np.testing.assert_array_equal(found.step.values, opened(forecasts).step.values)


def test_a_grid_without_rows(tmp_path):
    with (tmp_path / "reduced.grib").open("wb") as file:
        message = eccodes.codes_grib_new_from_samples("reduced_gg_pl_32_grib2")
        eccodes.codes_write(message, file)
        eccodes.codes_release(message)
    expected = opened(tmp_path / "reduced.grib")
    ds = jigsaw.io.open(expected, mesh=world_mesh(cell=1))
    np.testing.assert_array_equal(ds[0].input.local[0, 0], expected[ds.fields[0]].values.reshape(-1))
    np.testing.assert_array_equal([ds.grid.lat, ds.grid.lon], [expected.latitude, expected.longitude])


def test_its_path_says_how_it_is_opened(analyses):
    with pytest.raises(UnsupportedStoreError, match=r"is GRIB.*engine='cfgrib'.*jigsaw convert"):
        jigsaw.io.open(analyses, mesh=world_mesh(lat=1))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda file: file.truncate(file.tell() - 100),
            "End of resource reached when reading message; of a file with a torn message get another",
        ),
        (
            lambda file: append(file, 2, np.ones((LAT, LON)), shortName="10u", dataDate=20200101, dataTime=0),
            "key present and new value is different.*open those of one kind, xarray.open_dataset",
        ),
    ],
    ids=["torn", "of another height"],
)
def test_no_message_is_left_out_of_a_conversion(tmp_path, spoil, told):
    path = tmp_path / "it.grib"
    with path.open("wb") as file:
        for hour in (0, 600):
            append(file, 2, np.ones((LAT, LON)), shortName="2t", dataDate=20200101, dataTime=hour)
        spoil(file)
    with pytest.raises(UnsupportedStoreError, match=f"xarray does not open '.*it.grib': {told}"):
        convert(str(path), tmp_path / "made.zarr")
    assert not (tmp_path / "made.zarr").exists()


class Trap:
    """A pickle of it makes a folder where it is loaded."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("engine", [None, "cfgrib"])
def test_an_index_that_lies_beside_a_file_is_not_unpickled(tmp_path, analyses, engine):
    path, mark = Path(shutil.copy(analyses, tmp_path / "it.grib")), tmp_path / "ran"
    by_pressure = {"filter_by_keys": {"typeOfLevel": "surface"}}
    xr.open_dataset(path, engine="cfgrib", backend_kwargs=by_pressure).close()
    (index,) = tmp_path.glob("*.idx")
    index.write_bytes(pickle.dumps(Trap(mark)))
    opened = open_with_xarray(str(path), engine)
    assert opened.name == str(path)
    assert opened.data.sizes["latitude"] == LAT
    assert not mark.exists()
    xr.open_dataset(path, engine="cfgrib", backend_kwargs=by_pressure).close()  # as cfgrib does by itself
    assert mark.exists()
    index.unlink()
    open_with_xarray([str(path)], engine)
    assert not list(tmp_path.glob("*.idx"))
