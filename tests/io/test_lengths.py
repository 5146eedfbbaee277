"""Coordinates are what the file says, or refused: of another length, missing, in a group around, in other units."""

import h5py
import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr

import jigsaw.io
from jigsaw.errors import GridError, MissingLevelError
from jigsaw.io.formats.store import open_store
from jigsaw.io.reports.summary import summarize_store
from jigsaw.io.series.store_survey import StoreSurvey
from jigsaw.testing import world_mesh

SINCE = "hours since 2009-01-01"
LAT, LON = [60.0, 20.0, -20.0], [0.0, 90.0, 180.0, 270.0]
SPACE = (("lat", LAT, "degrees_north"), ("lon", LON, "degrees_east"))


def one(store, **asked):
    return jigsaw.io.open(store, mesh=world_mesh(lat=1), dtype="float64", **asked)


def cubes(steps, seed=0):
    return np.random.default_rng(seed).integers(-90, 90, size=(steps, 3, 4)).astype("f4")


def netcdf(path, time=("time", 6), **rows):
    """A NetCDF-4 file with its dims, and a time coordinate that netCDF4 was given so many values of."""
    f = netCDF4.Dataset(path, "w")
    f.createDimension("time", None)
    for name, values, units in SPACE:
        f.createDimension(name, len(values))
        f.createVariable(name, "f8", (name,))[:] = values
        f[name].units = units
    name, steps = time
    f.createVariable(name, "i4", ("time",)).units = SINCE
    f[name][:] = 6 * np.arange(steps)
    for array, (dtype, rows_written, more) in rows.items():
        made = f.createVariable(array, dtype, ("time", "lat", "lon"), **more)
        made[:rows_written] = cubes(rows_written)
    return f


@pytest.mark.parametrize("name", ["filled", "packed", "short", "plain", "chunked"])
def test_a_variable_that_lags_its_unlimited_dim_is_missing_there_as_xarray_has_it(tmp_path, name):
    path = tmp_path / "a.nc"
    more = {
        "whole": ("f4", 6, {}),
        "filled": ("f4", 4, {"fill_value": -999.0}),
        "packed": ("i2", 4, {"fill_value": -32768}),
        "short": ("u2", 0, {"fill_value": 7}),
        "plain": ("f4", 4, {}),
        "chunked": ("f8", 3, {"chunksizes": (4, 2, 3), "zlib": True, "fill_value": -1e20}),
    }
    with netcdf(path, **more) as f:
        f["packed"].setncatts({"scale_factor": 0.5, "add_offset": 10.0})
    with xr.open_dataset(path) as theirs:
        expected = theirs[name].values.astype("f8")
        if name == "plain":  # nothing in it names what NetCDF fills it with; netCDF4's own masks do
            with netCDF4.Dataset(path) as f:
                expected = f[name][:].astype("f8").filled(np.nan)
        ds = one(path, fields=["whole", name])
        found = np.stack([ds[i].input.local[0].numpy() for i in range(6)])
        np.testing.assert_array_equal(ds.times, theirs["time"].values)
        np.testing.assert_array_equal(ds.whole_coords["lat"], theirs["lat"].values)
        np.testing.assert_array_equal(found[:, 0], theirs["whole"].values)
    assert np.isnan(expected[-1]).all()
    np.testing.assert_array_equal(found[:, 1], expected)


def test_bytes_have_no_missing_value_of_their_own(tmp_path):
    with netcdf(tmp_path / "a.nc", whole=("f4", 6, {}), mask=("i1", 4, {})):
        pass
    with xr.open_dataset(tmp_path / "a.nc") as theirs:
        ds = one(tmp_path / "a.nc", fields=["mask"])
        np.testing.assert_array_equal(np.stack([ds[i].input.local[0, 0] for i in range(6)]), theirs["mask"].values)


def test_a_time_that_lags_is_missing_and_no_invented_date(tmp_path):
    with netcdf(tmp_path / "own.nc", ("time", 4), t=("f4", 6, {})):
        pass
    with netcdf(tmp_path / "other.nc", ("valid_time", 4), t=("f4", 6, {})):
        pass
    for name in ("own", "other"):
        with pytest.raises(GridError, match=r"no time at step 4, or one beyond all dates; leave such steps out"):
            one(tmp_path / f"{name}.nc")
        with xr.open_dataset(tmp_path / f"{name}.nc", decode_times=False) as theirs:
            first = xr.decode_cf(theirs.isel(time=slice(0, 4))).rename(
                {"valid_time": "time"} if name == "other" else {}
            )
            ds = one(first, dims={"time": "time"})
            np.testing.assert_array_equal(ds.times, np.datetime64("2009-01-01") + 6 * np.arange(4).astype("m8[h]"))


def scaled(path, sizes, arrays, grow=()):
    """An HDF5 file with dimension scales of `sizes`, of which some may grow."""
    with h5py.File(path, "w") as f:
        values = {"time": 6.0 * np.arange(99), "lat": np.linspace(60, -60, 99), "lon": np.linspace(0, 270, 99)}
        for dim, n in sizes.items():
            f.create_dataset(dim, data=values[dim][:n], maxshape=(None if dim in grow else n,))
            f[dim].make_scale(dim)
        f["time"].attrs["units"] = SINCE
        for name, (shape, more) in arrays.items():
            f.create_dataset(name, data=np.ones(shape, "f4"), **more)
            for i, dim in enumerate(sizes):
                f[name].dims[i].attach_scale(f[dim])


@pytest.mark.parametrize("sizes", [{"time": 2}, {"time": 9}, {"lat": 2}, {"lat": 9}, {"lon": 5}])
@pytest.mark.parametrize("format", ["hdf5", "zarr2", "zarr3"])
def test_a_coordinate_of_another_length_is_refused(tmp_path, sizes, format):
    lengths = {"time": 6, "lat": 3, "lon": 4} | sizes
    if format == "hdf5":
        path = tmp_path / "a.h5"
        scaled(path, lengths, {"t": ((6, 3, 4), {})})
    else:
        path, version = tmp_path / "a.zarr", int(format[-1])
        group = zarr.open_group(path, mode="w", zarr_format=version)
        for name, dims, shape in (("t", tuple(lengths), (6, 3, 4)), *((d, (d,), (n,)) for d, n in lengths.items())):
            named = {"dimension_names": dims} if version == 3 else {"attributes": {"_ARRAY_DIMENSIONS": list(dims)}}
            group.create_array(name, data=np.arange(np.prod(shape)).reshape(shape) * 6.0, **named)
        group["time"].attrs["units"] = SINCE
        with pytest.raises(ValueError, match="conflicting sizes"):
            xr.open_zarr(path, consolidated=False)
    (dim, n), size = next(iter(sizes.items())), {"time": 6, "lat": 3, "lon": 4}[next(iter(sizes))]
    with pytest.raises(GridError, match=rf"'t' has {size} rows along '{dim}', and its coordinate '{dim}' has {n};"):
        one(path)


def test_h5py_writes_what_lags_too(tmp_path):
    growing = {"maxshape": (None, 3, 4)}
    sizes = {"time": 6, "lat": 3, "lon": 4}
    arrays = {"a": ((6, 3, 4), growing), "b": ((4, 3, 4), growing), "c": ((5, 3, 4), {"fillvalue": -1})}
    scaled(tmp_path / "a.h5", sizes, arrays, grow=("time",))
    with xr.open_dataset(tmp_path / "a.h5", engine="netcdf4", mask_and_scale=False) as theirs:
        ds = one(tmp_path / "a.h5", fields=["a", "b", "c"])
        for i in range(6):
            found = ds[i].input.local[0].numpy()
            for name, mine in zip("abc", found, strict=True):
                there = theirs[name].values[i].astype("f8")
                gone = (there > 9e36) | (there == -1)
                np.testing.assert_array_equal(mine, np.where(gone, np.nan, there))
    scaled(tmp_path / "b.h5", {**sizes, "time": 4}, arrays, grow=("time",))
    with pytest.raises(GridError, match="no time at step 4"):
        one(tmp_path / "b.h5", fields=["a", "c"])


def test_texts_that_lag_are_empty_as_xarray_has_them(tmp_path):
    with netcdf(tmp_path / "a.nc", t=("f4", 6, {})) as f:
        f.createVariable("name", str, ("time",))[:2] = np.array(["a", "b"], object)
    with xr.open_dataset(tmp_path / "a.nc") as theirs:
        assert open_store(tmp_path / "a.nc").read_small("name").tolist() == theirs["name"].values.tolist()


def test_a_missing_value_of_a_coordinate_is_no_number(tmp_path):
    data = xr.Dataset(
        {"t": (("time", "lat", "lon"), cubes(6))},
        {"time": 6 * np.arange(6), "lat": ("lat", [60.0, np.nan, -20.0]), "lon": LON},
    )
    packed = {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -999}
    data.to_netcdf(tmp_path / "a.nc", encoding={"lat": packed})
    with pytest.raises(GridError, match=r"array 't' has no lat for row 1 of 'lat': its coordinate has nan there"):
        one(tmp_path / "a.nc")


def test_many_files_count_a_second_time_in_the_same_units(tmp_path):
    for i, units in enumerate((SINCE, "hours since 2009-01-02")):
        data = xr.Dataset(
            {"t": (("time", "lat", "lon"), cubes(4))},
            {
                "time": 4 * i + np.arange(4),
                "lat": LAT,
                "lon": LON,
                "valid": ("time", 6 * np.arange(4), {"units": units}),
            },
        )
        data.to_netcdf(tmp_path / f"{i}.nc")
    store = open_store(str(tmp_path / "?.nc"))
    assert len(one(store)) == 8
    with pytest.raises(
        GridError, match=r"1.nc has array 'valid' in 'hours since 2009-01-02' and .*0.nc in 'hours sinc"
    ):
        store.read_small("valid")


def test_a_group_has_the_dims_of_the_groups_around_it(tmp_path):
    with netcdf(tmp_path / "a.nc", t=("f4", 6, {})) as f:
        inner = f.createGroup("inner").createGroup("most")
        inner.createVariable("u", "f4", ("time", "lat", "lon"))[:] = cubes(6)
    ds = one(tmp_path / "a.nc", fields=["inner/most/u"])
    np.testing.assert_array_equal(ds.times, np.datetime64("2009-01-01") + 6 * np.arange(6).astype("m8[h]"))
    np.testing.assert_array_equal(ds.whole_coords["lat"], LAT)


@pytest.mark.parametrize("name", ["timestamp", "channel"])
def test_what_makani_says_of_fields_has_their_length(tmp_path, name):
    with h5py.File(tmp_path / "2018.h5", "w") as f:
        f["fields"] = np.zeros((6, 2, 3, 4), "f4")
        f["timestamp"] = 21600.0 * np.arange(5 if name == "timestamp" else 6)
        f["channel"] = [b"u10m", b"v10m", b"t2m"][: 3 if name == "channel" else 2]
    with pytest.raises(GridError, match=rf"'fields' has \d rows along .*, and '{name}' has the shape"):
        open_store(tmp_path / "2018.h5")


# -- dims without a coordinate: places 0, 1, 2…, which stand for nothing else ----------------------------------------


@pytest.fixture
def bare(tmp_path):
    path = tmp_path / "bare.nc"
    xr.Dataset({"t": (("time", "level", "lat", "lon"), np.zeros((6, 2, 3, 4), "f4"))}).to_netcdf(path)
    return path


def test_places_are_no_latitudes(bare):
    ds = one(bare)
    np.testing.assert_array_equal(ds.whole_coords["lat"], [0, 1, 2])
    assert ds.counted == ("lat", "lon") and ds.times.tolist() == list(range(6))
    with pytest.raises(GridError, match="weights='area' needs latitudes, and the store has no coordinate along lat"):
        jigsaw.io.statistics(ds, weights="area")
    assert "no coordinate along lat, lon" in summarize_store(bare).grids[0].extent


def test_places_are_no_pressures(bare):
    survey = StoreSurvey(open_store(bare))
    assert survey.levels["t"].counted
    with pytest.raises(MissingLevelError, match=r"'t1' asks for 1 hPa of array 't', whose levels have no numbers"):
        one(bare, fields=["t1"])
    assert one(bare, fields=["t@1"]).fields == ("t@1",)


def test_places_are_not_written_as_coordinates(tmp_path, bare):
    ds = one(bare)
    dates = np.datetime64("2009-01-01", "ns") + np.arange(1).astype("m8[D]")
    jigsaw.io.write(
        tmp_path / "made.nc", ds[0].input, dims=("time", "channel", "lat", "lon"), like=ds, coords={"time": dates}
    )
    with xr.open_dataset(tmp_path / "made.nc") as made:
        assert not {"lat", "lon"} & set(made.coords)
        np.testing.assert_array_equal(made["time"].values, dates)
