"""Stores laid out as others write them: makani, anemoi-datasets, WeatherBench2, ARCO-ERA5, earth2studio."""

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from numcodecs import Blosc

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import FieldError, GridError, MissingArrayError
from jigsaw.testing import on_ranks, world_mesh

STEPS, ROWS, COLUMNS = 6, 9, 16
LAT, LON = np.linspace(90, -90, ROWS), np.arange(COLUMNS) * 22.5
TIMES = np.datetime64("2018-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h")
CHANNELS = ["u10m", "t2m", "u100", "u500", "z500"]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def read(path, **how):
    return jigsaw.io.open(path, mesh=world_mesh(lat=1), **how)


def check_cut(path, mesh, fields, want, **how):
    """What a rank of a mesh holds against the whole series [T, C, lat, lon]."""
    how = {"inputs": [-1, 0], "targets": [1], "target_fields": fields} | how  # static fields, too
    ds = jigsaw.io.open(path, mesh=mesh, fields=fields, halo=1, boundary={"lon": "periodic"}, **how)
    sample = ds[1]
    (a, b), (c, d) = ds.layout.held(tuple(mesh.get_coordinate()))[-2:]
    held = want[1:3, :, a:b].take(range(c, d), axis=-1, mode="wrap")
    np.testing.assert_array_equal(sample.input.local, held)
    np.testing.assert_array_equal(sample.target.full_tensor(), want[3:4])
    return ds


# -- makani ------------------------------------------------------------------------------------------------------------


def makani_hdf5(path, values, first="2018-01-01", annotated=True):
    """As its tools annotate a year."""
    with h5py.File(path, "w", libver="latest") as f:
        made = f.create_dataset("fields", data=values, chunks=(1, *values.shape[1:]))
        if annotated:
            start = np.datetime64(first, "s").astype("f8")
            f["timestamp"] = start + 21600.0 * np.arange(len(values))
            f["lat"], f["lon"] = LAT.astype("f4"), LON.astype("f4")
            f.create_dataset("channel", data=CHANNELS, dtype=h5py.string_dtype(length=4))
            for i, name in enumerate(("timestamp", "channel", "lat", "lon")):
                f[name].make_scale(name)
                made.dims[i].attach_scale(f[name])
    return str(path)


def makani_zarr(path, values, annotated=True):
    """As its tests write a year: dims have no names, times are seconds."""
    group = zarr.open_group(path, mode="w")
    group.create_array("fields", data=values, chunks=(1, *values.shape[1:]))
    if annotated:
        seconds = TIMES[: len(values)].astype("M8[s]").astype("f8")
        for name, found in {"time": seconds, "channel": np.array(CHANNELS), "lat": LAT, "lon": LON}.items():
            group.create_array(name, data=found)
    return str(path)


def by_xarray(path, values, dim="channel"):
    """A stack of channels as xarray writes one."""
    coords = {"time": TIMES, dim: CHANNELS, "latitude": LAT, "longitude": LON}
    data = xr.Dataset({"fields": (("time", dim, "latitude", "longitude"), values)}, coords)
    if str(path).endswith(".nc"):
        data.to_netcdf(path)
    else:
        data.to_zarr(path, zarr_format=2 if dim == "variable" else 3)
    return str(path)


WRITERS = {
    "2018.h5": makani_hdf5,
    "2018.zarr": makani_zarr,
    "stack.nc": by_xarray,
    "stack.zarr": by_xarray,
    "array.zarr": lambda path, values: by_xarray(path, values, "variable"),
}


@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
@pytest.mark.parametrize("name", WRITERS)
def test_channels_are_fields_by_their_names(tmp_path, name):
    values = numbers(STEPS, len(CHANNELS), ROWS, COLUMNS)
    path = WRITERS[name](tmp_path / name, values)
    ds = read(path)
    assert ds.fields == tuple(CHANNELS)
    np.testing.assert_array_equal(ds.times, TIMES)
    np.testing.assert_array_equal(ds.whole_coords["lat"], LAT)
    np.testing.assert_array_equal(np.concatenate([ds[i].input.full_tensor() for i in range(STEPS)]), values)
    asked = ["z500", "2m_temperature", "10m_u_component_of_wind", "u_component_of_wind@500", "fields@2"]
    some = read(path, fields=asked, target_fields=["t2m"], targets=["6h"])
    assert some.fields == tuple(asked)
    np.testing.assert_array_equal(some[2].input.full_tensor()[0], values[2, [4, 1, 0, 3, 2]])
    np.testing.assert_array_equal(some[2].target.full_tensor()[0], values[3, [1]])
    with pytest.raises(
        MissingArrayError, match=r"'t850' is not in the store.*fields \(channels u10m t2m u100 u500 z500"
    ):
        read(path, fields=["t850"])
    # u100 is the wind at 100 hPa here, and at 100 m in other stores
    np.testing.assert_array_equal(read(path, fields=["u100"])[0].input.full_tensor()[0, 0], values[0, 2])
    with pytest.raises(MissingArrayError, match="'100m_u_component_of_wind' is not in the store"):
        read(path, fields=["100m_u_component_of_wind"])


@pytest.mark.parametrize("writer", [makani_hdf5, makani_zarr])
def test_channels_without_names_are_named_by_the_user(tmp_path, writer):
    values = numbers(STEPS, len(CHANNELS), ROWS, COLUMNS)
    path = writer(tmp_path / "2018.x", values, annotated=False)
    assert read(path).fields == tuple(f"fields@{i}" for i in range(len(CHANNELS)))
    ds = read(path, channels=CHANNELS, fields=["t2m", "z500"], normalize={"t2m": (1.0, 2.0), "z500": (0.0, 1.0)})
    np.testing.assert_array_equal(ds[4].input.full_tensor()[0, 0], (values[4, 1] - 1) / 2)
    with pytest.raises(FieldError, match=r"channels=\['t2m'\] are 1 names; the store has fields \(5\) with a dim of"):
        read(path, channels=["t2m"])
    named = writer(tmp_path / "2019.x", values)
    with pytest.raises(FieldError, match=r"are 5 names; the store has no array with a dim of channels without names"):
        read(named, channels=["a", "b", "c", "d", "e"])


def test_years_of_makani_are_one_series(tmp_path):
    values = numbers(2 * STEPS, len(CHANNELS), ROWS, COLUMNS)
    makani_hdf5(tmp_path / "2018.h5", values[:STEPS])
    makani_hdf5(tmp_path / "2019.h5", values[STEPS:], first="2018-01-02T12")
    ds = read(str(tmp_path / "*.h5"), fields=["t2m"], targets=[1])
    np.testing.assert_array_equal(ds[5].target.full_tensor()[0, 0], values[6, 1])
    assert len(ds) == 2 * STEPS - 1


# -- anemoi-datasets ---------------------------------------------------------------------------------------------------

NAMES = ["10u", "2t", "z", "u_500", "z_500", "lsm"]
REGULAR = np.repeat(LAT, COLUMNS), np.tile(LON, ROWS)


def anemoi(path, values, cells=REGULAR, chunk=None, shard=None, missing=(), form=2, **options):
    """As `anemoi-datasets create` writes: data, dates, places and statistics, dims by xarray's convention."""
    group = zarr.open_group(path, mode="w", zarr_format=form)
    group.attrs.update(
        {"variables": NAMES, "field_shape": [ROWS, COLUMNS], "missing_dates": list(missing), "frequency": "6h"}
    )
    arrays = {
        "data": (values, ("time", "variable", "ensemble", "cell")),
        "dates": (TIMES[: len(values)].astype("M8[s]"), ("time",)),
        "latitudes": (cells[0], ("cell",)),
        "longitudes": (cells[1], ("cell",)),
    }
    over = {"mean": np.mean, "stdev": np.std, "minimum": np.min, "maximum": np.max}
    arrays |= {name: (f(values.astype("f8"), axis=(0, 2, 3)), ("variable",)) for name, f in over.items()}
    for name, (found, dims) in arrays.items():
        how = {"dimension_names": dims} if form == 3 else {}
        if name == "data":
            how |= {"chunks": (1, *values.shape[1:3], chunk or values.shape[3]), "shards": shard, **options}
        made = group.create_array(name, shape=found.shape, dtype=found.dtype, **how)
        made[...] = found
        if form == 2:
            made.attrs["_ARRAY_DIMENSIONS"] = dims
    return str(path)


def cube(members=1):
    return numbers(STEPS, len(NAMES), members, ROWS * COLUMNS, seed=1)


ANEMOI = {
    "globe a chunk": {},
    "rows a chunk": {"chunk": 4 * COLUMNS},
    "a part of a row a chunk": {"chunk": 20},
    "column-major": {"order": "F"},
    "v3": {"form": 3},
    "shards": {"form": 3, "chunk": 3 * COLUMNS, "shard": (2, len(NAMES), 1, ROWS * COLUMNS)},
    "big-endian parts": {"chunk": 20, "dtype": ">f4"},
}


@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
@pytest.mark.parametrize("case", ANEMOI)
def test_variables_of_anemoi_are_fields(tmp_path, case):
    options, values = dict(ANEMOI[case]), cube()
    path = anemoi(tmp_path / "era5.zarr", values.astype(options.pop("dtype", "f4")), **options)
    whole = values[:, :, 0].reshape(STEPS, len(NAMES), ROWS, COLUMNS)
    ds = read(path)
    assert ds.fields == tuple(NAMES)
    np.testing.assert_array_equal(ds.times, TIMES)
    for dim, want in (("lat", LAT), ("lon", LON)):
        np.testing.assert_array_equal(ds.whole_coords[dim], want)
    np.testing.assert_array_equal(np.concatenate([ds[i].input.full_tensor() for i in range(STEPS)]), whole)
    asked = ["t2m", "z500", "u10", "u@500", "land_sea_mask"]
    some = read(path, fields=asked, normalize="store", boundary={"lat": "pole", "lon": "periodic"}, halo=1)
    at = [1, 4, 0, 3, 5]
    mean, std = values.mean(axis=(0, 2, 3), dtype="f8")[at], values.astype("f8").std(axis=(0, 2, 3))[at]
    want = (whole[2, at] - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(some[2].input.full_tensor()[0], want, rtol=1e-5, atol=1e-6)
    assert some.vectors == (2, 3)  # they change sign across the pole
    with pytest.raises(MissingArrayError, match="'geopotential' is not in the store"):  # z is that of the ground
        read(path, fields=["geopotential"])


def test_members_of_anemoi_are_chosen(tmp_path):
    values = cube(3)
    path = anemoi(tmp_path / "ens.zarr", values)
    ds = read(path, fields=["2t"], select={"member": "all"})
    assert len(ds) == 3 * STEPS
    np.testing.assert_array_equal(ds[STEPS + 2].input.full_tensor().flatten(), values[2, 1, 1])


def test_no_window_has_a_date_that_anemoi_misses(tmp_path):
    values = cube()
    values[2] = np.nan
    path = anemoi(tmp_path / "gap.zarr", values, missing=["2018-01-01T12:00:00"])
    ds = read(path, fields=["2t"], targets=[1], nan="raise")
    assert [ds.input_times(i)[0].item().hour for i in range(len(ds))] == [0, 18, 0]
    np.testing.assert_array_equal(ds[1].target.full_tensor().flatten(), values[4, 1, 0])


@pytest.mark.parametrize("kind", ["reduced", "scattered"])
def test_a_reduced_grid_of_anemoi_lies_on_cells(tmp_path, kind):
    sizes = [8, 16, 24, 32, 32, 24, 8] if kind == "reduced" else [1] * 144
    latitudes = np.repeat(np.linspace(80, -80, len(sizes)), sizes)
    longitudes = np.concatenate([1 + np.arange(n) * 360 / n for n in sizes])
    values = cube()[..., :144]
    path = anemoi(tmp_path / "n.zarr", values, (latitudes, longitudes), chunk=50)
    ds = jigsaw.io.open(path, mesh=world_mesh(cell=1), fields=["2t", "z500"], normalize="store")
    assert ds.layout.shape == (1, 2, 144)
    at = [NAMES.index("2t"), NAMES.index("z_500")]
    mean, std = (f(values.astype("f8"), axis=(0, 2, 3))[at] for f in (np.mean, np.std))
    want = (values[3, at, 0] - mean[:, None]) / std[:, None]
    np.testing.assert_allclose(ds[3].input.full_tensor()[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal([ds.grid.lat, ds.grid.lon], [latitudes, longitudes])


@pytest.mark.parametrize("name", ["dates", "latitudes", "variables"])
def test_what_anemoi_says_of_data_has_its_length(tmp_path, name):
    path = anemoi(tmp_path / "short.zarr", cube())
    group = zarr.open_group(path)
    if name == "variables":
        group.attrs["variables"] = NAMES[:-1]
    else:
        group[name].resize((5,))
    with pytest.raises(GridError, match=r"'data' has \d+ rows along .*, and its \w+ have the shape \(5,\)"):
        read(path)


def test_statistics_that_a_store_lacks(tmp_path):
    path = makani_zarr(tmp_path / "2018.zarr", numbers(STEPS, 5, ROWS, COLUMNS))
    with pytest.raises(FieldError, match=r"normalize='store' needs statistics in the store .*compute some with"):
        read(path, fields=["t2m"], normalize="store")


# -- what else is done with channels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_channels_are_written_as_arrays_of_their_own(tmp_path, suffix):
    values = cube()
    ds = read(anemoi(tmp_path / "era5.zarr", values), fields=["t2m", "z_500"], targets=[1])
    made = str(tmp_path / f"forecast{suffix}")
    jigsaw.io.write(made, ds[0].target, dims=("time", "channel", "lat", "lon"), like=ds, coords={"time": TIMES[1:2]})
    with xr.open_dataset(made) as data:
        np.testing.assert_array_equal(data["2t"].values.ravel(), values[1, 1, 0])
        np.testing.assert_array_equal(data["z_500"].values.ravel(), values[1, 4, 0])
        np.testing.assert_array_equal(data.lat.values, LAT)


def test_inspect_names_channels(tmp_path, capsys):
    assert main(["inspect", anemoi(tmp_path / "era5.zarr", cube())]) == 0
    assert "levels of data: 10u 2t z u_500 z_500 lsm" in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "era5.zarr"), "--mesh", "lat=2", "--fields", "t2m"]) == 0


def test_statistics_of_channels(tmp_path):
    values = cube()
    found = jigsaw.io.statistics(read(anemoi(tmp_path / "era5.zarr", values), fields=["t2m", "u500"]))
    np.testing.assert_allclose(found["t2m"]["mean"], values[:, 1].mean(dtype="f8"), rtol=1e-9)
    np.testing.assert_allclose(found["u500"]["std"], values[:, 3].astype("f8").std(), rtol=1e-9)


def test_names_that_channels_share(tmp_path):
    values = numbers(STEPS, 3, ROWS, COLUMNS)
    coords = {"time": TIMES, "lat": LAT, "lon": LON}
    dims = ("time", "channel", "lat", "lon")
    xr.Dataset({"a": (dims, values), "b": (dims, values)}, {**coords, "channel": ["x", "y", "y"]}).to_netcdf(
        tmp_path / "two.nc"
    )
    path = str(tmp_path / "two.nc")
    with pytest.raises(FieldError, match=r"'x' is the channels \['a@0', 'b@0'\] of the store; ask for one of these"):
        read(path, fields=["x"])
    with pytest.raises(FieldError, match=r"'y' is the channels \['a@1', 'a@2', 'b@1', 'b@2'\]"):
        read(path, fields=["y"])
    assert read(path, fields=["b@x", "a@2"]).fields == ("b@x", "a@2")


def test_a_dim_of_channels_by_another_name(tmp_path):
    values = numbers(STEPS, 2, ROWS, COLUMNS)
    data = xr.Dataset({"a": (("time", "feature", "lat", "lon"), values)}, {"time": TIMES, "feature": ["t2m", "sp"]})
    data.to_netcdf(tmp_path / "f.nc")
    ds = read(str(tmp_path / "f.nc"), fields=["surface_pressure"], dims={"channel": "feature"})
    np.testing.assert_array_equal(ds[2].input.full_tensor()[0, 0], values[2, 1])


def test_dims_that_nobody_knows(tmp_path):
    xr.Dataset({"v": (("when", "up", "across"), numbers(3, 4, 5)), "w": ("when", [1, 2, 3])}).to_netcdf(
        tmp_path / "v.nc"
    )
    told = r"no variable on a lat-lon grid, on cells .*: it has v \(when 3, up 4, across 5\); .*dims=\{'lat': …, "
    for fields in (None, ["v"]):
        with pytest.raises(FieldError, match=told):
            read(str(tmp_path / "v.nc"), fields=fields)
    ds = read(str(tmp_path / "v.nc"), dims={"time": "when", "lat": "up", "lon": "across"})
    np.testing.assert_array_equal(ds[1].input.full_tensor()[0, 0], numbers(3, 4, 5)[1])


def test_a_step_without_a_time(tmp_path):
    times = TIMES.copy()
    times[2] = np.datetime64("NaT")
    data = xr.Dataset({"t": (("time", "lat", "lon"), numbers(STEPS, ROWS, COLUMNS))}, {"time": times})
    data.to_netcdf(tmp_path / "nat.nc")
    with pytest.raises(GridError, match="no time at step 2, or one beyond all dates; leave such steps out"):
        read(str(tmp_path / "nat.nc"))


# -- WeatherBench2 and ARCO-ERA5 ---------------------------------------------------------------------------------------

WB2_NAMES = {
    "t2m": "2m_temperature",
    "u10m": "10m_u_component_of_wind",
    "v10m": "10m_v_component_of_wind",
    "u100m": "100m_u_component_of_wind",
    "v100m": "100m_v_component_of_wind",
    "d2m": "2m_dewpoint_temperature",
    "sp": "surface_pressure",
    "msl": "mean_sea_level_pressure",
    "sst": "sea_surface_temperature",
    "tcwv": "total_column_water_vapour",
    "tp": "total_precipitation",
    "tp06": "total_precipitation_6hr",
    "lsm": "land_sea_mask",
}
WB2_UPPER = {
    "u": "u_component_of_wind",
    "v": "v_component_of_wind",
    "w": "vertical_velocity",
    "z": "geopotential",
    "t": "temperature",
    "q": "specific_humidity",
    "r": "relative_humidity",
}
LEVELS = [50, 500, 1000]


def weatherbench(path, order=("latitude", "longitude"), first="1959-01-01", further=(), steps=STEPS):
    """As WeatherBench2 stores ERA5: a variable an array, Zarr 2, consolidated, whole hours since the first step."""
    space = {"latitude": LAT[::-1] if order[0] == "longitude" else LAT, "longitude": LON}
    times = np.datetime64(first, "ns") + np.arange(steps) * np.timedelta64(6, "h")
    sizes = {
        "time": steps,
        **{dim: len(values) for dim, values in further},
        "level": len(LEVELS),
        **{d: len(space[d]) for d in order},
    }
    lead = [dim for dim in sizes if dim not in ("level", *order)]
    lower, upper = (*lead, *order), (*lead, "level", *order)
    data = {}
    for seed, name in enumerate([*WB2_NAMES.values(), *WB2_UPPER.values()]):
        dims = order if name == "land_sea_mask" else upper if name in WB2_UPPER.values() else lower
        data[name] = dims, numbers(*(sizes[d] for d in dims), seed=seed)
    made = xr.Dataset(data, {"time": times, "level": LEVELS, **space, **dict(further)})
    encoding = {"time": {"units": f"hours since {first}", "dtype": "int64"}}
    encoding |= {n: {"chunks": [1 if d in lead else s for d, s in v.sizes.items()]} for n, v in made.data_vars.items()}
    made.to_zarr(path, zarr_format=2, consolidated=True, encoding=encoding)
    return str(path)


@pytest.fixture(scope="module")
def era5(tmp_path_factory):
    return weatherbench(tmp_path_factory.mktemp("wb2") / "era5.zarr")


def by_lexicon(data):
    """What earth2studio's name of each variable stands for, with its dims in canonical order."""
    found = {short: data[name] for short, name in WB2_NAMES.items()}
    found |= {f"{short}{level}": data[name].sel(level=level) for short, name in WB2_UPPER.items() for level in LEVELS}
    return {name: value.transpose(..., "latitude", "longitude").values for name, value in found.items()}


@pytest.mark.parametrize("order", [("latitude", "longitude"), ("longitude", "latitude")])
def test_weatherbench_under_the_names_of_the_lexicon(tmp_path, order):
    path = weatherbench(tmp_path / "era5.zarr", order)
    with xr.open_zarr(path) as data:
        want = by_lexicon(data)
        ds = read(path, fields=list(want))
        np.testing.assert_array_equal(ds.times, data.time.values)
    got = np.concatenate([ds[i].input.full_tensor() for i in range(STEPS)])
    for channel, (name, values) in enumerate(want.items()):
        np.testing.assert_array_equal(got[:, channel], np.broadcast_to(values, got[:, channel].shape), err_msg=name)


def test_steps_of_arco_that_are_not_written_are_missing(tmp_path):
    """Its times go from 1900 to 2050, hourly; before and after what there is no chunk is stored."""
    path = weatherbench(tmp_path / "arco.zarr", first="1900-01-01")
    for name in (tmp_path / "arco.zarr").glob("*/0.*"):
        name.unlink()
    ds = read(path, fields=["t2m", "z500"], missing="fill")
    with xr.open_zarr(path) as data:
        want = np.stack([data["2m_temperature"].values, data.geopotential.sel(level=500).values], axis=1)
    assert np.isnan(want[0]).all() and not np.isnan(want[1:]).any()
    np.testing.assert_array_equal(np.concatenate([ds[i].input.full_tensor() for i in range(STEPS)]), want)


def test_forecasts_of_weatherbench(tmp_path):
    further = [
        ("number", np.arange(2)),
        ("prediction_timedelta", np.arange(3) * np.timedelta64(12, "h").astype("m8[ns]")),
    ]
    path = weatherbench(tmp_path / "ens.zarr", further=further, steps=2)
    ds = read(path, fields=["t2m"], along="prediction_timedelta", select={"time": "all", "number": 1}, targets=[1])
    with xr.open_zarr(path, decode_timedelta=True) as data:
        values = data["2m_temperature"].values
    assert len(ds) == 4
    np.testing.assert_array_equal(ds[3].target.full_tensor()[0, 0], values[1, 1, 2])
    assert ds.target_times(3)[0] == np.datetime64("1959-01-02T06")


def test_a_climatology_of_weatherbench(tmp_path):
    values = numbers(4, 5, ROWS, COLUMNS)
    dims = ("hour", "dayofyear", "latitude", "longitude")
    coords = {"hour": [0, 6, 12, 18], "dayofyear": np.arange(1, 6), "latitude": LAT, "longitude": LON}
    xr.Dataset({"2m_temperature": (dims, values)}, coords).to_zarr(tmp_path / "clim.zarr", zarr_format=2)
    ds = read(str(tmp_path / "clim.zarr"), fields=["t2m"], select={"hour": 1, "dayofyear": "all"})
    np.testing.assert_array_equal([ds[i].input.full_tensor()[0, 0].numpy() for i in range(5)], values[1])


# -- earth2studio ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
@pytest.mark.parametrize("split", [True, False])
def test_what_earth2studio_writes(tmp_path, split):
    """Its Zarr backend: times and lead times in numpy's own types, an array a variable or a dim of variables."""
    values = numbers(2, 3, len(CHANNELS), ROWS, COLUMNS)
    coords = {
        "time": TIMES[:2],
        "lead_time": np.arange(3) * np.timedelta64(6, "h").astype("m8[ns]"),
        "variable": np.array(CHANNELS),
        "lat": LAT,
        "lon": LON,
    }
    group = zarr.open_group(tmp_path / "out.zarr", mode="w", zarr_format=3)
    for name, found in coords.items():
        if not (split and name == "variable"):
            made = group.create_array(
                name, shape=found.shape, chunks=found.shape, dtype=found.dtype, dimension_names=[name], fill_value=None
            )
            made[:] = found
    arrays = {name: values[:, :, i] for i, name in enumerate(CHANNELS)} if split else {"fields": values}
    for name, found in arrays.items():
        dims = [d for d in coords if not (split and d == "variable")]
        made = group.create_array(
            name,
            shape=found.shape,
            chunks=(1, 1, *found.shape[2:]),
            dtype="f4",
            dimension_names=dims,
            fill_value=None,
        )
        made[:] = found
    ds = read(
        str(tmp_path / "out.zarr"), fields=["z500", "t2m"], along="lead_time", select={"time": "all"}, targets=[1]
    )
    assert len(ds) == 4
    for i, (began, lead) in enumerate([(0, 1), (0, 2), (1, 1), (1, 2)]):
        np.testing.assert_array_equal(ds[i].target.full_tensor()[0], values[began, lead, [4, 1]])
        assert ds.target_times(i)[0] == TIMES[began] + lead * np.timedelta64(6, "h")


# -- cut over ranks ----------------------------------------------------------------------------------------------------


LARGE = np.repeat(np.linspace(90, -90, 61), 120), np.tile(np.arange(120) * 3.0, 61)


def large():
    """Of its chunks, Blosc frames of 700 kB, a rank decodes the blocks that it needs."""
    return numbers(4, len(NAMES), 4, 61 * 120, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("theirs")
    makani_hdf5(made / "2018.h5", numbers(STEPS, len(CHANNELS), ROWS, COLUMNS))
    makani_zarr(made / "2018.zarr", numbers(STEPS, len(CHANNELS), ROWS, COLUMNS))
    anemoi(made / "whole.zarr", cube(), compressors=Blosc("lz4", 5, 1))
    anemoi(made / "parts.zarr", cube(), chunk=20)
    anemoi(made / "large.zarr", large(), LARGE, compressors=Blosc("lz4", 5, 1, blocksize=1 << 14))
    weatherbench(made / "era5.zarr")
    return str(made)


def check_all(folder, mesh):
    values = numbers(STEPS, len(CHANNELS), ROWS, COLUMNS)
    for year in ("2018.h5", "2018.zarr"):
        check_cut(f"{folder}/{year}", mesh, ["z500", "t2m"], values[:, [4, 1]], mode="cooperative")
    values = cube().reshape(STEPS, len(NAMES), ROWS, COLUMNS)
    for name in ("whole.zarr", "parts.zarr"):
        check_cut(f"{folder}/{name}", mesh, ["z500", "2t"], values[:, [4, 1]], mode="cooperative")
    values = large()[:, :, 1].reshape(4, len(NAMES), 61, 120)
    how = {"mode": "independent", "select": {"member": 1}}
    ds = check_cut(f"{folder}/large.zarr", mesh, ["z500", "2t"], values[:, [4, 1]], **how)
    (row,) = [r for i, r in enumerate(ds.plan(0).rows) if i == mesh.get_rank()]
    assert 0 < row.decoded_bytes < 0.5 * 3 * 4 * len(NAMES) * 4 * 61 * 120  # of the three chunks of a sample
    with xr.open_zarr(f"{folder}/era5.zarr") as data:
        want = {name: values for name, values in by_lexicon(data).items() if name in ("t2m", "u10m", "z500", "lsm")}
    want["lsm"] = np.broadcast_to(want["lsm"], want["t2m"].shape)
    check_cut(f"{folder}/era5.zarr", mesh, list(want), np.stack(list(want.values()), axis=1))


@on_ranks(2)
def test_their_stores_in_bands(folder):
    check_all(folder, world_mesh(lat=2))


@pytest.mark.slow
@on_ranks(4)
def test_their_stores_in_tiles(folder):
    check_all(folder, world_mesh(lat=2, lon=2))
