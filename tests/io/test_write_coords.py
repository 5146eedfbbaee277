"""What a written store says: dates of any year and units, fill values, sizes beyond a dim; how it is replaced."""

import shutil
import warnings

import cftime
import numpy as np
import pytest
import torch
import xarray as xr
from globe_store import globe
from globe_store import write as write_globe

import jigsaw
from jigsaw.errors import GridError, WriteError
from jigsaw.io.writing.write import Writer, write
from jigsaw.testing import run_on_ranks, world_mesh

SUFFIXES = ("zarr", "nc")
DIMS = ("time", "channel", "lat", "lon")
TIMES = np.datetime64("2020-02-28T18", "ns") + np.arange(2) * np.timedelta64(6, "h")


def whole_tile():
    """[time, lat] on one rank."""
    return jigsaw.shard(torch.arange(6.0).reshape(2, 3), jigsaw.init_mesh(device="cpu", lat=1), (None, None))


def opened(path):
    """What xarray reads, without a word of warning."""
    return xr.open_dataset(path, decode_timedelta=True).load()


FAR = {
    "later": np.array(["2500-01-01", "2500-01-02"], "M8[us]"),
    "earlier": np.array(["1500-01-01T12", "1500-01-02T12"], "M8[s]"),
    "days": np.array(["3000-01-01", "3000-01-02"], "M8[D]"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("given", FAR.values(), ids=FAR)
def test_years_beyond_nanoseconds(tmp_path, suffix, given):
    path = tmp_path / f"a.{suffix}"
    options = {"dims": ("time", "lat"), "append_dim": "time"}
    tile = whole_tile()
    for more, mode in ((0, "w-"), (2, "a")):
        write(path, {"u": tile}, coords={"time": given + np.timedelta64(more, "D")}, mode=mode, **options)
    wide = xr.coders.CFDatetimeCoder(time_unit="us")
    found = xr.open_dataset(path, decode_times=wide).time.values
    np.testing.assert_array_equal(found, np.concatenate([given, given + np.timedelta64(2, "D")]).astype("M8[us]"))


def test_nanoseconds_and_missing_dates(tmp_path):
    tile = whole_tile()
    exact = np.array(["2000-01-01T00:00:00.000000001", "2000-01-02"], "M8[ns]")
    missing = np.array(["2000-01-01", "NaT"], "M8[ns]")
    for suffix in SUFFIXES:
        path = tmp_path / f"a.{suffix}"
        coords = {"time": exact, "issued": (("time",), missing), "made": exact[1]}
        write(path, {"u": tile}, dims=("time", "lat"), coords=coords)
        ds = opened(path)
        np.testing.assert_array_equal(ds.time.values, exact)
        np.testing.assert_array_equal(ds.issued.values, missing)
        assert ds.made.values == exact[1]


def body_float_days(source, path):
    data = jigsaw.io.open(source, mesh=world_mesh(lat=2))
    with Writer(path, dims=DIMS, like=data, append_dim="time") as out:
        for i in range(3):
            out.append(data[i].input, coords={"time": data[i].input_times})
    write(path, data[3].input, dims=DIMS, like=data, append_dim="time", mode="a", coords={"time": data[3].input_times})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_times_that_a_store_holds_as_fractions_of_days_are_written_so(tmp_path, suffix):
    data = globe()[["2m_temperature"]]
    data.time.encoding = {"units": "days since 1900-01-01", "calendar": "standard", "dtype": "float64"}
    run_on_ranks(2, body_float_days, write_globe(tmp_path / "in.zarr", data), str(tmp_path / f"out.{suffix}"))
    back = opened(tmp_path / f"out.{suffix}")
    np.testing.assert_array_equal(back.time.values, data.time.values[:4])
    assert back.time.encoding["units"] == "days since 1900-01-01" and back.time.encoding["dtype"] == np.float64


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_append_never_rounds_a_coordinate(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    options = {"dims": ("time", "lat"), "append_dim": "time"}
    tile = whole_tile()
    days = np.array([cftime.DatetimeNoLeap(2020, 1, 1), cftime.DatetimeNoLeap(2020, 1, 2)])
    coords = {"time": (days, {"units": "days since 2000-01-01"}), "run": (("time",), [1, 2])}
    write(path, {"u": tile}, coords=coords, **options)
    noon = np.array([cftime.DatetimeNoLeap(2020, 1, 3, 12), cftime.DatetimeNoLeap(2020, 1, 4, 12)])
    with pytest.raises(GridError, match=r"coords\['time'\] are stored as int64 in 'days since 2000-01-01'"):
        write(path, {"u": tile}, coords={"time": noon, "run": (("time",), [3, 4])}, mode="a", **options)
    dates = (("time",), TIMES)
    with pytest.raises(GridError, match=r"coords\['run'\] holds dates or durations, but it is stored without units"):
        write(path, {"u": tile}, coords={"time": days, "run": dates}, mode="a", **options)
    assert opened(path).sizes["time"] == 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_append_of_no_steps_changes_nothing(tmp_path, suffix):
    path, tile = tmp_path / f"a.{suffix}", whole_tile()
    with Writer(path, dims=("time", "lat"), append_dim="time") as out:
        for steps in (0, 2, 0):
            out.append({"u": tile[:steps]}, {"time": TIMES[:steps]})
        out.append({"u": tile[:0]}, {"time": []})
    np.testing.assert_array_equal(opened(path).time.values, TIMES)
    np.testing.assert_array_equal(opened(path).u.values, tile.local)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_text_beside_the_coordinates(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    coords = {"model": ((), "small", {"long_name": "which"}), "run": "first"}
    write(path, {"u": whole_tile()}, dims=("time", "lat"), coords=coords)
    found = opened(path)
    assert (str(found["model"].values), found["model"].attrs["long_name"]) == ("small", "which")
    assert str(found["run"].values) == "first"


def test_attributes_of_numpy_keep_their_type_in_netcdf(tmp_path):
    flags = {"flag_values": np.array([0, 1], "i1"), "valid_max": np.int16(9), "flag_meanings": "sea land", "ok": True}
    write(tmp_path / "a.nc", {"u": whole_tile()}, dims=("time", "lat"), field_attrs={"u": flags})
    found = opened(tmp_path / "a.nc").u.attrs
    np.testing.assert_array_equal(found["flag_values"], [0, 1])
    assert (found["flag_values"].dtype, found["valid_max"].dtype) == (np.dtype("i1"), np.dtype("i2"))
    assert (found["flag_meanings"], found["ok"]) == ("sea land", 1)


@pytest.mark.parametrize("sizes", [{"chunks": {"lat": 7}}, {"chunks": {"lat": 7}, "shards": {"lat": 21, "time": 4}}])
def test_chunks_and_shards_larger_than_a_dim_are_those_of_the_dim(tmp_path, sizes):
    path, tile = tmp_path / "a.zarr", whole_tile()
    options = {"dims": ("time", "lat"), "append_dim": "time", **sizes}
    with Writer(path, **options) as out:
        out.append({"u": tile}, coords={"time": TIMES})
        out.append({"u": tile}, coords={"time": TIMES + np.timedelta64(12, "h")})
    write(path, {"u": tile}, coords={"time": TIMES + np.timedelta64(24, "h")}, mode="a", **options)
    found = opened(path).u
    np.testing.assert_array_equal(found.values, np.tile(tile.full_tensor().numpy(), (3, 1)))
    assert found.encoding["chunks"][1] == 3 and (found.encoding["shards"] or (4, 3))[1] == 3


def test_a_shard_of_the_whole_dim_that_no_chunk_divides_is_appended_to(tmp_path):
    path, tile = tmp_path / "a.zarr", whole_tile()
    options = {"dims": ("time", "lat"), "append_dim": "time", "chunks": {"lat": 2}, "shards": {"lat": 3}}
    for _ in range(2):
        with Writer(path, mode="a", **options) as out:
            out.append({"u": tile})
            out.append({"u": tile})
    np.testing.assert_array_equal(opened(path).u.values, np.tile(tile.full_tensor().numpy(), (4, 1)))
    with pytest.raises(WriteError, match=r"shards={'lat': 2} differ from those of array 'u' in the store"):
        write(path, {"u": tile}, mode="a", **{**options, "shards": {"lat": 2}})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_fill_values_that_are_given_stand_for_missing_values(tmp_path, suffix):
    mesh, path = jigsaw.init_mesh(device="cpu", lat=1), tmp_path / f"a.{suffix}"
    tiles = {"u": torch.tensor([[1.0, 9e36, 3.0]]), "n": torch.tensor([[1, -999, 3]], dtype=torch.int32)}
    attrs = {"u": {"_FillValue": np.float32(9e36), "units": "K"}, "n": {"_FillValue": np.int32(-999)}}
    depth = (("lat",), np.array([-1.0, 5.0, 6.0]), {"_FillValue": -1.0})
    sea = (("lat",), np.array([True, False, True]))
    cut = {name: jigsaw.shard(x, mesh, (None, None)) for name, x in tiles.items()}
    made = {"made": np.datetime64("2020-01-01"), "n": np.float32(2)}
    coords = {"depth": depth, "sea": sea, "half": (("lat",), np.arange(3, dtype="f2"))}
    write(path, cut, dims=("time", "lat"), coords=coords, field_attrs=attrs, attrs=made)
    found = opened(path)
    np.testing.assert_array_equal(found.u.values, [[1, np.nan, 3]])
    np.testing.assert_array_equal(found.n.values, [[1, np.nan, 3]])
    np.testing.assert_array_equal(found.depth.values, [np.nan, 5, 6])
    assert found.sea.values.tolist() == [1, 0, 1] and found.half.values.tolist() == [0, 1, 2]
    assert found.attrs["made"] == "2020-01-01" and found.u.attrs["units"] == "K"


def test_a_store_whose_replacement_is_ended_is_gone_not_halved(tmp_path, monkeypatch):
    path, tile = tmp_path / "a.zarr", whole_tile()
    options = {"dims": ("time", "lat"), "mode": "w"}
    write(path, {"u": tile}, **options)
    (tmp_path / "link.zarr").symlink_to(path)
    with pytest.raises(WriteError, match=r"link\.zarr is a symbolic link, so it is not replaced"):
        write(tmp_path / "link.zarr", {"u": tile}, **options)

    def ended(folder, ignore_errors=False):
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", ended)
        write(path, {"u": tile}, **options)
    assert not path.exists()
    write(path, {"u": tile}, **options)
    np.testing.assert_array_equal(opened(path).u.values, tile.full_tensor().numpy())
    write(path, {"u": tile}, **options)
    # what the interrupt left has a name that nobody else takes, so nobody removes it
    left = sorted(p.name for p in tmp_path.iterdir())
    assert [name for name in left if not name.endswith(".replaced")] == ["a.zarr", "link.zarr"]
    assert len(left) <= 3


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_lent_names_only_what_is_written(tmp_path, suffix):
    data = globe()[["2m_temperature"]]
    half = 7.5 * np.array([1.0, -1.0])
    data = data.assign_coords(lat_bnds=(("latitude", "side"), data.latitude.values[:, None] + half), crs=0)
    data["latitude"].attrs.update(units="degrees_north", bounds="lat_bnds")
    data["2m_temperature"].attrs.update(grid_mapping="crs", cell_measures="area: cells", cell_methods="time: mean")
    source = jigsaw.io.open(write_globe(tmp_path / "in.zarr", data), mesh=jigsaw.init_mesh(device="cpu", lat=1))
    path = tmp_path / f"out.{suffix}"
    crs = ((), np.int32(0), {"grid_mapping_name": "latitude_longitude"})
    for given in ({}, {"crs": crs}):
        how = {"dims": DIMS, "like": source, "mode": "w"}
        with Writer(path, coords=given, **how) as out:
            out.append(source[0].input, coords={"time": source[0].input_times})
        with warnings.catch_warnings(action="error"), xr.open_dataset(path, decode_coords="all") as found:
            mapping = found["2m_temperature"].encoding.get("grid_mapping")
            assert (mapping, "crs" in found.coords) == (("crs", True) if given else (None, False))
            assert found["2m_temperature"].attrs["cell_methods"] == "time: mean"
            assert found.lat.attrs == {"units": "degrees_north"}


def test_values_are_not_appended_to_packed_ones(tmp_path):
    path = tmp_path / "packed.zarr"
    packed = {"dtype": "int16", "scale_factor": 0.5, "add_offset": 100.0, "_FillValue": -9999}
    xr.Dataset({"u": (("time", "lat"), np.full((2, 3), 110.0))}, {"time": TIMES}).to_zarr(path, encoding={"u": packed})
    tile = jigsaw.shard(torch.ones(2, 3, dtype=torch.int16), jigsaw.init_mesh(device="cpu", lat=1), (None, None))
    with pytest.raises(WriteError, match=r"'u' of the store is packed by scale_factor and add_offset.*convert"):
        write(
            path,
            {"u": tile},
            dims=("time", "lat"),
            append_dim="time",
            mode="a",
            coords={"time": TIMES + np.timedelta64(12, "h")},
        )
    np.testing.assert_array_equal(opened(path).u, np.full((2, 3), 110.0))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_masked_coordinates_are_missing(tmp_path, suffix):
    orog = np.ma.masked_less(np.arange(3), 1)
    began = np.ma.masked_array(np.array(["2020-01-01", "2020-01-02"], "M8[ns]"), [False, True])
    coords = {"orog": ("lat", orog), "began": ("time", began)}
    write(tmp_path / f"a.{suffix}", {"u": whole_tile()}, dims=("time", "lat"), coords=coords)
    store = opened(tmp_path / f"a.{suffix}")
    np.testing.assert_array_equal(store["orog"], [np.nan, 1, 2])
    np.testing.assert_array_equal(np.isnat(store["began"]), [False, True])


@pytest.mark.parametrize("name", ["init_time", "forecast_reference_time"])
def test_a_forecast_that_began_at_a_stored_time_is_not_appended_again(tmp_path, name):
    options = {"dims": (name, "lat"), "append_dim": name, "mode": "a"}
    write(tmp_path / "a.zarr", {"u": whole_tile()}, coords={name: TIMES}, **options)
    with pytest.raises(GridError, match="of an append must rise from the last in the store"):
        write(tmp_path / "a.zarr", {"u": whole_tile()}, coords={name: TIMES}, **options)


@pytest.mark.parametrize(
    ("stored", "date"), [("365_day", cftime.DatetimeNoLeap), ("gregorian", cftime.DatetimeGregorian)]
)
def test_a_calendar_has_two_names(tmp_path, stored, date):
    dates = np.array([date(2020, 1, d) for d in (1, 2)])
    coords = {"time": (dates, {"units": "hours since 2020-01-01", "calendar": stored})}
    write(tmp_path / "a.zarr", {"u": whole_tile()}, dims=("time", "lat"), coords=coords)
    raw = xr.open_zarr(tmp_path / "a.zarr", decode_times=False)["time"]
    assert raw.attrs["calendar"] == stored and raw.values.tolist() == [0, 24]


def test_limits_of_packed_numbers_are_not_lent(tmp_path):
    coords = {"time": TIMES, "lat": np.linspace(80, -80, 9), "lon": np.arange(16) * 22.5}
    limits = {"valid_min": np.int16(1), "valid_max": np.int16(255)}
    values = np.arange(2 * 9 * 16).reshape(2, 9, 16) % 18 - 2.0
    stored = xr.Dataset({"sst": (("time", "lat", "lon"), values, limits)}, coords)
    stored["sst"].encoding.update(dtype="int16", scale_factor=0.075, add_offset=-3.0, _FillValue=0)
    stored.to_netcdf(tmp_path / "a.nc")
    data = jigsaw.io.open(tmp_path / "a.nc", mesh=world_mesh(lat=1), fields=["sst"], targets=[1])
    write(tmp_path / "b.zarr", data[0].target, dims=DIMS, like=data, coords={"time": data[0].target_times})
    assert not {*limits} & {*xr.open_zarr(tmp_path / "b.zarr")["sst"].attrs}


def test_a_curvilinear_grid_lends_its_places(tmp_path):
    lat, lon = np.meshgrid(np.linspace(40, 50, 9), np.linspace(0, 15, 16), indexing="ij")
    values = np.arange(3 * 9 * 16, dtype="f4").reshape(3, 9, 16)
    stored = xr.Dataset(
        {
            "t": (("time", "y", "x"), values, {"grid_mapping": "crs"}),
            "crs": ((), 0, {"grid_mapping_name": "lambert_conformal_conic"}),
        },
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(3) * np.timedelta64(6, "h"),
            "y": np.arange(9) * 1e3,
            "x": np.arange(16) * 1e3,
            "lat": (("y", "x"), lat, {"standard_name": "latitude"}),
            "lon": (("y", "x"), lon, {"standard_name": "longitude"}),
        },
    )
    stored.to_zarr(tmp_path / "a.zarr")
    options = {"mesh": world_mesh(y=1), "fields": ["t"], "forcings": ["latlon"]}
    data = jigsaw.io.open(tmp_path / "a.zarr", targets=[1], region={"y": slice(2, 7)}, **options)
    times = {"time": data[0].target_times}
    write(tmp_path / "b.zarr", data[0].target, dims=("time", "channel", "y", "x"), like=data, coords=times)
    part = opened(tmp_path / "b.zarr")
    assert part["t"].attrs["grid_mapping"] == "crs" and "grid_mapping_name" in part["crs"].attrs
    np.testing.assert_array_equal(part["lat"], lat[2:7])
    np.testing.assert_array_equal(part["lon"], lon[2:7])
    again = jigsaw.io.open(tmp_path / "b.zarr", **options)[0].input.local
    torch.testing.assert_close(again[0, 1:], data[0].input.local[0, 1:])
