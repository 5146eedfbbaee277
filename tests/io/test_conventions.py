"""Stores as scientists have them: any dims, calendars, longitudes, frequencies and targets; xarray is the oracle."""

import os

import numpy as np
import pytest
import xarray as xr
import zarr
from globe_store import globe, stacked, write

import jigsaw
from jigsaw.errors import FieldError, GridError, UnsupportedStoreError, WindowError
from jigsaw.testing import on_ranks, world_mesh


def one_rank(path, **kwargs):
    return jigsaw.io.open(path, mesh=world_mesh(lat=1), **kwargs)


def saved(tmp_path, data):
    data.to_zarr(tmp_path / "s.zarr", consolidated=False)
    return str(tmp_path / "s.zarr")


# -- the grid ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["cooperative", "independent"])
@on_ranks(4)
def test_longitudes_are_rolled_while_they_are_read(tiled, mode):
    """Rolled, flipped, wrapped and cut at once, through chunks that the roll cuts through."""
    mesh = world_mesh(lat=2, lon=2)
    ds = jigsaw.io.open(
        tiled,
        mesh=mesh,
        fields=["t2m", "temperature@700"],
        lon="-180..180",
        lat_order="south-first",
        halo={"lat": 1, "lon": (2, 3)},
        boundary={"lon": "periodic"},
        mode=mode,
    )
    whole = np.roll(stacked(tiled, ["2m_temperature", "temperature@700"])[3:4, :, ::-1], 8, axis=-1)
    np.testing.assert_array_equal(ds.whole_coords["lon"], np.arange(-180, 180, 22.5))
    sample = ds[3]
    (a, b), (c, d) = ds.layout.held(tuple(mesh.get_coordinate()))[-2:]
    want = whole[..., a:b, :].take(range(c, d), axis=-1, mode="wrap")
    np.testing.assert_allclose(sample.input.local, want, rtol=1e-6)
    np.testing.assert_allclose(sample.input.full_tensor(), whole, rtol=1e-6)


def test_longitudes_need_a_lon_dim(tmp_path):
    path = saved(tmp_path, xr.Dataset({"v": (("time", "y", "x"), np.zeros((2, 3, 4), "f4"))}))
    with pytest.raises(GridError, match=r"turns longitudes, but the fields' spatial dims are \['y', 'x'\]"):
        one_rank(path, lon="0..360")


@pytest.mark.parametrize("order", [{"lat_order": "north-first"}, {"lon": "-180..180"}])
@pytest.mark.parametrize("coordinates", ["none", "texts"])
def test_an_order_of_rows_needs_their_coordinates(tmp_path, order, coordinates):
    data = xr.Dataset({"v": (("time", "lat", "lon"), np.zeros((2, 3, 4), "f4"))})
    if coordinates == "texts":
        data = data.assign_coords(lat=["a", "b", "c"], lon=["a", "b", "c", "d"])
    with pytest.raises(GridError, match=r"(lon|lat_order)='.*' needs a coordinate of numbers along '(lat|lon)'"):
        one_rank(saved(tmp_path, data), **order)


@pytest.mark.parametrize("value", ["abc", [1.0, 2.0]])
@pytest.mark.parametrize("attr", ["scale_factor", "add_offset"])
@pytest.mark.parametrize("name", ["v", "time", "lat"])
def test_packing_by_what_is_no_number(tmp_path, name, attr, value):
    data = xr.Dataset(
        {"v": (("time", "lat", "lon"), np.zeros((2, 3, 4), "f4"))},
        {"time": [0, 1], "lat": [0.0, 1, 2], "lon": range(4)},
    )
    path = saved(tmp_path, data)
    zarr.open_group(path)[name].attrs[attr] = value
    with pytest.raises(UnsupportedStoreError, match=f"array '{name}' has {attr}=.* which is not a number"):
        one_rank(path)


def test_a_curvilinear_ocean(tmp_path):
    """Latitudes of two dims with bounds, a scalar coordinate, a depth that points down."""
    values = np.random.default_rng(0).normal(size=(3, 2, 5, 6)).astype("f4")
    lat, lon = np.mgrid[-2.0:3, 0:6]
    data = xr.Dataset(
        {
            "thetao": (("time", "lev", "j", "i"), values),
            "vertices_lat": (("j", "i", "nv"), np.zeros((5, 6, 4), "f4")),
            "time_bnds": (("time", "bnds"), np.zeros((3, 2))),
        },
        coords={
            "time": ("time", [0, 1, 2], {"units": "days since 2000-01-01", "bounds": "time_bnds"}),
            "lev": ("lev", [5.0, 15.0], {"positive": "down", "units": "m", "axis": "Z"}),
            "latitude": (("j", "i"), lat, {"units": "degrees_north", "bounds": "vertices_lat"}),
            "longitude": (("j", "i"), lon, {"units": "degrees_east"}),
            "height": ((), 2.0),
        },
    )
    ds = jigsaw.io.open(saved(tmp_path, data), mesh=world_mesh(y=1, x=1), targets=[1])
    assert ds.frame.dims == ("y", "x")
    assert ds.fields == ("thetao@5", "thetao@15")
    np.testing.assert_array_equal(ds[1].target.local[0], values[2])


def test_dims_that_only_the_user_knows(tmp_path):
    values = np.arange(3 * 5 * 6, dtype="f4").reshape(5, 6, 3)
    data = xr.Dataset(
        {"v": (("a", "b", "c"), values)}, coords={"when": ("c", [0, 6, 12], {"units": "hours since 2001-01-01"})}
    )
    path = saved(tmp_path, data)
    with pytest.raises(FieldError, match="has no variable on a lat-lon grid"):
        one_rank(path)
    ds = one_rank(path, dims={"lat": "a", "lon": "b", "time": "when"}, inputs=["-6h"])
    np.testing.assert_array_equal(ds[1].input.local[0, 0], values[..., 1])
    assert ds.input_times(0)[0] == np.datetime64("2001-01-01")


def test_unsigned_values_and_coordinates(tmp_path):
    """As NetCDF-3 spells them: signed bytes that mean unsigned ones."""
    stored = np.random.default_rng(0).integers(-128, 128, (3, 4, 5)).astype("i1")
    group = zarr.open_group(tmp_path / "u.zarr", mode="w")
    dims = {"lat": ("i1", [0, 50, 100, -106]), "lon": ("i1", [0, 1, 2, 3, 4]), "time": ("i4", [0, 1, 2])}
    for name, (dtype, values) in dims.items():
        made = group.create_array(name, shape=(len(values),), dtype=dtype, dimension_names=[name])
        made[...] = np.array(values, dtype)
    group["lat"].attrs.update({"_Unsigned": "true", "scale_factor": 0.5})
    made = group.create_array("v", shape=stored.shape, dtype="i1", dimension_names=["time", "lat", "lon"])
    made[...] = stored
    made.attrs.update({"_Unsigned": "true", "scale_factor": 2.0, "add_offset": -10.0})
    ds = one_rank(str(tmp_path / "u.zarr"))
    want = xr.open_zarr(tmp_path / "u.zarr", consolidated=False, decode_times=False).load()
    np.testing.assert_array_equal(ds[1].input.local[0, 0], want.v.values[1])
    np.testing.assert_array_equal(ds.whole_coords["lat"], want.lat.values)
    assert want.lat.values[-1] == 75


@pytest.mark.parametrize("form", [2, 3])
def test_missing_chunks_of_unsigned_values(tmp_path, form):
    group, dims = zarr.open_group(tmp_path / "u.zarr", mode="w", zarr_format=form), ("time", "lat", "lon")
    made = group.create_array(
        "v", shape=(2, 4, 5), chunks=(1, 2, 5), dtype="i1", fill_value=-1, dimension_names=dims if form == 3 else None
    )
    made.attrs.update({"_Unsigned": "true", "_FillValue": -1, "_ARRAY_DIMENSIONS": dims})
    made[0, :2] = np.arange(-6, 4).reshape(2, 5)
    ds = one_rank(str(tmp_path / "u.zarr"), inputs=[0, 1], missing="fill")
    got = ds[0].input.local[:, 0].numpy()
    want = made[...].view("u1").astype("f4")
    np.testing.assert_array_equal(got, np.where(want == 255, np.nan, want))


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "julian"])
@pytest.mark.parametrize("as_store", [True, False])
def test_windows_on_the_calendars_of_models(tmp_path, calendar, as_store):
    times = xr.date_range("2000-02-20", periods=40, calendar=calendar, use_cftime=True)
    data = globe(steps=40, lat=3, lon=4)[["2m_temperature"]].assign_coords(time=times)
    source = saved(tmp_path, data) if as_store else data
    ds = one_rank(source, inputs=["-1d", 0], targets=["2 days"], time=("2000-02-25", "2000-03-09"), every=1)
    want = data.sel(time=slice("2000-02-25", "2000-03-09"))["2m_temperature"]
    assert len(ds) == len(want) - 3
    np.testing.assert_array_equal(ds[0].input.local[:, 0], want.values[:2])
    np.testing.assert_array_equal(ds[-1].target.local[:, 0], want.values[-1:])
    assert (ds.target_times(-1 % len(ds)) == want.time.values[-1:].astype(ds.times.dtype)).all()


def test_a_thinned_series(tmp_path):
    """Every 12 hours of a 6-hourly series with a day missing; offsets count its own steps."""
    path = write(tmp_path / "g.zarr", globe(steps=24, gap=5))
    data = xr.open_zarr(path, consolidated=False)["2m_temperature"]
    ds = one_rank(path, fields=["t2m"], every="12h", inputs=[-1, 0], targets=["1d"])
    kept = data.isel(time=(data.time.dt.hour % 12 == 0).values)
    for i in range(len(ds)):
        sample = ds[i]
        times = np.concatenate([sample.input_times, sample.target_times])
        assert np.diff(times).tolist() == [np.timedelta64(h, "h") for h in (12, 24)]
        np.testing.assert_allclose(sample.input.local[:, 0], kept.sel(time=times[:2]).values, rtol=1e-6)
        np.testing.assert_allclose(sample.target.local[:, 0], kept.sel(time=times[2:]).values, rtol=1e-6)
    assert len(ds) == 6
    with pytest.raises(WindowError, match="every='7h' is not a whole number of the series' steps"):
        one_rank(path, fields=["t2m"], every="7h")


# -- targets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "targets", "long"),
    [
        (["t2m", "z500"], ["z500"], ["geopotential@500"]),
        (["t2m", "z500", "land_sea_mask"], ["z500", "t2m"], ["geopotential@500", "2m_temperature"]),
        (["t2m"], ["t850", "t2m"], ["temperature@850", "2m_temperature"]),
    ],
)
@on_ranks(2)
def test_targets_of_other_fields(wb2, fields, targets, long):
    names = {"t2m": "2m_temperature", "z500": "geopotential@500"}
    given = [names.get(name, name) for name in fields]
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=2), fields=fields, target_fields=targets, halo=1, targets=[1, 2])
    assert (ds.fields, ds.target_fields) == (tuple(fields), tuple(targets))
    before, after = stacked(wb2, given), stacked(wb2, long)
    np.testing.assert_allclose(ds[2].input.full_tensor(), before[2:3], rtol=1e-6)
    np.testing.assert_allclose(ds[2].target.full_tensor(), after[3:5], rtol=1e-6)
    batch = next(iter(jigsaw.io.DataLoader(ds, batch_size=3)))
    assert batch.target.shape == (3, 2, len(targets), 13, 16)
    np.testing.assert_allclose(batch.target.full_tensor()[1], after[2:4], rtol=1e-6)


def test_target_fields_without_targets(wb2):
    with pytest.raises(FieldError, match=r"target_fields=\['t2m'\] needs targets"):
        one_rank(wb2, fields=["z500"], target_fields=["t2m"])


def test_zeros_of_zarr_v2_stay_and_are_missing_for_who_says_so(tmp_path):
    """As `jigsaw.io.open` tells: a `fill_value` of 0 is none of the missing values, unless an attribute says it."""
    values = np.arange(16.0, dtype="f4").reshape(1, 4, 4) % 4

    def read(fill, nan="keep", form=2, **attrs):
        group = zarr.open_group(str(tmp_path / "z.zarr"), mode="w", zarr_format=form)
        names = {"dimension_names": ("time", "lat", "lon")} if form == 3 else {}
        made = group.create_array("t2m", shape=(2, 4, 4), chunks=(1, 4, 4), dtype="f4", fill_value=fill, **names)
        made[:1] = values  # of the second step no chunk is written
        made.attrs.update({"_ARRAY_DIMENSIONS": ["time", "lat", "lon"], **attrs})
        ds = jigsaw.io.open(str(tmp_path / "z.zarr"), mesh=world_mesh(lat=1), nan=nan, missing="fill")
        return np.stack([ds[i].input.local[0, 0].numpy() for i in range(2)])

    both = np.concatenate([values, np.zeros_like(values)])
    np.testing.assert_array_equal(read(0), both)
    np.testing.assert_array_equal(read(0, nan=-1.0), both)
    np.testing.assert_array_equal(read(0, _FillValue=0.0), np.where(both == 0, np.nan, both))
    np.testing.assert_array_equal(read(0, nan=-1.0, _FillValue=0.0), np.where(both == 0, -1, both))
    np.testing.assert_array_equal(read(2, nan=-1.0), np.where(np.concatenate([values, values * 0 + 2]) == 2, -1, both))
    np.testing.assert_array_equal(read(2, form=3), np.concatenate([values, values * 0 + 2]))


def test_sums_over_steps_are_not_thinned():
    """Rain of 6 hours every 12 hours would lose half of it; other fields are thinned as before."""
    data = globe(steps=8, lat=3, lon=4)[["2m_temperature", "temperature"]]
    for attrs in (
        {"cell_methods": "area: mean time: sum (interval: 1 hr)"},
        {"GRIB_stepType": "accum"},
        {"cell_methods": "time : Sum"},
    ):
        data["2m_temperature"].attrs = attrs
        source = data.copy()
        with pytest.raises(jigsaw.io.WindowError, match=r"every='12h' skips steps of array '2m_temperature'.*sums"):
            one_rank(source, fields=["t2m"], every="12h")
        assert len(one_rank(source, fields=["t2m"])) == len(one_rank(source, fields=["t2m"], every="6h")) == 8
        assert len(one_rank(source, fields=["temperature"], every="12h")) == 4
    data["2m_temperature"].attrs = {"cell_methods": "area: sum time: mean"}
    assert len(one_rank(data, fields=["t2m"], every="12h")) == 4


def test_static_fields_are_no_targets_unless_they_are_named(wb2):
    fields = ["t2m", "land_sea_mask"]
    ds = one_rank(wb2, fields=fields, targets=[1])
    assert (ds.fields, ds.target_fields) == (("t2m", "land_sea_mask"), ("t2m",))
    assert tuple(ds[0].target.shape)[1] == 1
    assert one_rank(wb2, fields=fields, target_fields=fields, targets=[1]).target_fields == tuple(fields)


@pytest.mark.parametrize("held", [False, True])
def test_a_missing_value_that_the_dtype_cannot_hold_hides_nothing(tmp_path, held):
    values = np.full((1, 3, 4), 0.1, "f4")
    made = zarr.open_group(str(tmp_path / "m.zarr"), mode="w", zarr_format=3).create_array(
        "v", data=values, chunks=(1, 3, 4), dimension_names=("time", "lat", "lon")
    )
    made.attrs["missing_value"] = float(np.float32(0.1)) if held else 0.1
    assert one_rank(str(tmp_path / "m.zarr"))[0].input.local.isnan().all() == held


def test_values_that_the_dtype_cannot_hold_are_refused(tmp_path):
    values = np.ones((1, 3, 4))
    values[0, 1, 2] = 1e300
    zarr.open_group(str(tmp_path / "l.zarr"), mode="w", zarr_format=3).create_array(
        "v", data=values, chunks=(1, 3, 4), dimension_names=("time", "lat", "lon")
    )
    with pytest.raises(jigsaw.io.FieldError, match="that float32 cannot hold"):
        one_rank(str(tmp_path / "l.zarr"), nan="raise")[0]
    assert one_rank(str(tmp_path / "l.zarr"), nan="raise", dtype="float64")[0].input.local.max() == 1e300


def test_a_scale_that_is_a_text_is_refused(tmp_path):
    made = zarr.open_group(str(tmp_path / "s.zarr"), mode="w", zarr_format=3).create_array(
        "v", data=np.ones((1, 3, 4)), chunks=(1, 3, 4), dimension_names=("time", "lat", "lon")
    )
    for scale in ("0.5", "NaN", "Infinity"):
        made.attrs["scale_factor"] = scale if scale == "0.5" else float(scale)
        with pytest.raises(jigsaw.io.UnsupportedStoreError, match=r"scale_factor=.*, which is not a number"):
            one_rank(str(tmp_path / "s.zarr"))


@pytest.mark.parametrize("name", ["p.nc", "p.zarr", "p.nii", "p.nii.gz", "p"])
@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_a_store_keeps_nobody_waiting(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(jigsaw.io.UnsupportedStoreError, match="is a pipe or device"):
        one_rank(str(tmp_path / name))
    with pytest.raises(jigsaw.io.UnsupportedStoreError, match="is a pipe or device"):
        jigsaw.io.open_volumes([tmp_path / name], mesh=world_mesh(z=1), crop=None)


def test_what_is_no_known_format_says_what_is(tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(jigsaw.io.UnsupportedStoreError, match=r"reads Zarr .*NetCDF, HDF5, NIfTI.*ArraySource"):
        one_rank(str(tmp_path / "notes.txt"))
