"""`inspect`: what it says of stores of several formats is what xarray and zarr say of them."""

import json
import re

import numpy as np
import pytest
import xarray as xr
import zarr
from globe_store import globe, write

from jigsaw.__main__ import main
from jigsaw.io.reports.summary import summarize_store


def inspected(capsys, *argv):
    assert main(["inspect", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_a_store_in_words(wb2, capsys):
    out = inspected(capsys, wb2)
    assert "Zarr v3: 4 variables, 54.9 kB decoded, about " in out
    assert "lat 13 (90 to -90 by -15) x lon 16 (0 to 337.5 by 22.5); the globe, north first, longitudes 0..360" in out
    assert "time: 10 steps every 6 h, 2020-01-01T00:00 to 2020-01-03T06:00, calendar proleptic_gregorian" in out
    assert re.search(r"2m_temperature +t2m +time 10, lat 13, lon 16", out)
    assert re.search(r"geopotential +float32 +10 of 1x3x13x16 +- +zstd +2.5 kB +25 kB", out)
    assert "2m_temperature: value = stored * 0.01 + 280; missing where stored is -32768" in out
    assert "levels of geopotential, temperature: 500 700 850" in out
    assert "also: latitude float64 (latitude 13), level int64 (level 3)" in out


def test_json_agrees_with_zarr_and_the_disk(tiled, capsys):
    found = json.loads(inspected(capsys, tiled, "--json"))
    group = zarr.open_group(tiled, mode="r")
    assert found["format"] == f"Zarr v{group.metadata.zarr_format}"
    for variable in found["variables"]:
        array = group[variable["name"]]
        assert tuple(variable["chunks"]) == array.chunks
        assert variable["shards"] == (None if array.shards is None else list(array.shards))
        assert tuple(variable["dims"].values()) == array.shape
        assert variable["decoded_bytes"] == array.nbytes
        assert variable["chunk_count"] == np.prod([-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True)])
        # a shard's index and a v2 store's metadata are not values; some chunks stand for all
        assert variable["stored_bytes"] == pytest.approx(array.nbytes_stored(), rel=0.25, abs=2500)
    assert found["variables"][1]["levels"] == [500, 700, 850]


def test_json_has_null_for_what_json_lacks(tmp_path, capsys):
    globe().assign_attrs(bad=float("nan"), far=np.inf).to_netcdf(tmp_path / "a.nc")
    attrs = json.loads(inspected(capsys, tmp_path / "a.nc", "--json"), parse_constant=pytest.fail)["attrs"]
    assert attrs["bad"] is None and attrs["far"] is None


def test_gaps_calendars_regions_and_uneven_grids(tmp_path):
    data = globe(gap=4).isel(longitude=slice(0, 8))
    gappy = summarize_store(write(tmp_path / "gap.zarr", data))
    assert gappy.times[0].gaps == (("2020-01-02T00:00:00.000000", "2020-01-03T06:00:00.000000"),)
    assert gappy.times[0].gap_count == 1 and gappy.times[0].step == "6 h"
    assert gappy.grids[0].extent == "a region"
    gaussian = globe()
    gaussian["latitude"] = 90 * np.sin(np.linspace(-1.4, 1.4, 13))
    gaussian["longitude"] = gaussian["longitude"] - 180
    gaussian["time"] = xr.date_range("2001-01-01", periods=10, freq="MS", calendar="noleap", use_cftime=True)
    gaussian.to_netcdf(tmp_path / "months.nc")
    found = summarize_store(tmp_path / "months.nc")
    assert found.format == "HDF5 or NetCDF-4"
    assert found.times[0].calendar == "noleap" and found.times[0].step == "1 month"
    assert found.grids[0].axes[0].step is None and found.grids[0].axes[1].step == 22.5
    assert found.grids[0].order == "south first, longitudes -180..180"


def test_two_grids_are_told_apart(tmp_path, capsys):
    data = globe(steps=2).drop_vars("geopotential")
    coarse = data[["temperature"]].isel(latitude=slice(None, None, 2))
    data["coarse"] = (
        coarse["temperature"].rename(latitude="lat2").assign_coords(lat2=("lat2", coarse["latitude"].values))
    )
    data["lat2"].attrs["units"] = "degrees_north"
    data.to_zarr(tmp_path / "two.zarr", zarr_format=3, consolidated=False)
    out = inspected(capsys, tmp_path / "two.zarr")
    assert "grid 0: " in out and "grid 1: " in out and "lat 7 (90 to -90° by -30°)" in out


def test_filters_of_hdf5_are_named(tmp_path):
    encoding = {"temperature": {"zlib": True, "shuffle": True, "fletcher32": True, "chunksizes": (1, 3, 13, 16)}}
    globe()[["temperature"]].to_netcdf(tmp_path / "a.nc", engine="netcdf4", encoding=encoding)
    (found,) = summarize_store(tmp_path / "a.nc").variables
    assert set(found.codec.split(" + ")) == {"shuffle", "deflate", "fletcher32"}
    assert found.chunks == (1, 3, 13, 16) and found.shards is None
    assert 0 < found.stored_bytes < found.decoded_bytes


def test_many_files_are_told_of_as_they_are_stored(tmp_path, capsys):
    data = globe()[["temperature"]].assign_coords(
        time=xr.date_range("2001-02-27", periods=10, freq="D", calendar="noleap", use_cftime=True)
    )
    for name, steps in (("a", slice(0, 6)), ("b", slice(6, 10))):
        encoding = {"temperature": {"zlib": True, "shuffle": True, "chunksizes": (2, 3, 13, 16)}}
        data.isel(time=steps).to_netcdf(tmp_path / f"{name}.nc", engine="netcdf4", encoding=encoding)
    one, found = summarize_store(tmp_path / "a.nc").variables[0], summarize_store(str(tmp_path / "*.nc"))
    (all_files,) = found.variables
    assert (all_files.chunks, all_files.codec) == (one.chunks, one.codec) == ((2, 3, 13, 16), "shuffle + deflate")
    assert (one.chunk_count, all_files.chunk_count) == (3, 5)
    assert one.stored_bytes < all_files.stored_bytes < 2 * one.stored_bytes
    assert found.times[0].calendar == "noleap"
    assert "5 of 2x3x13x16" in inspected(capsys, tmp_path / "*.nc")


def test_the_map_is_drawn_of_the_values(tmp_path, wb2, capsys, monkeypatch):
    from jigsaw.io.reports import pictures

    drawn = []
    draw = pictures._draw_values
    monkeypatch.setattr(pictures, "_draw_values", lambda values, *rest: (drawn.append(values), draw(values, *rest)))
    out = inspected(capsys, wb2, "--fields", "temperature@700,t2m", "--step", "-1", "--plot", tmp_path / "map.png")
    assert out.rstrip().endswith(f"temperature@700, 2020-01-03T06:00:00, drawn to {tmp_path / 'map.png'}")
    expected = xr.open_zarr(wb2, consolidated=False)["temperature"].sel(level=700).isel(time=-1)
    np.testing.assert_array_equal(drawn[0], expected)
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_a_volume_and_a_plane_are_drawn(tmp_path, capsys):
    r = np.random.default_rng(0)
    data = xr.Dataset({"ct": (("z", "y", "x"), r.normal(size=(6, 8, 10)).astype("f4"), {"units": "HU"})})
    data.to_zarr(tmp_path / "ct.zarr", zarr_format=3, consolidated=False)
    out = inspected(capsys, tmp_path / "ct.zarr", "--plot", tmp_path / "ct.png")
    assert "a volume" in out and "ct, z = 3, drawn to" in out


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--fields", "t3m"], r"MissingArrayError: field 't3m' is not in the store; did you mean 't2m'"),
        (["--plot", "x.png", "--step", "99"], r"IndexError: step 99 of '2m_temperature', which has 10"),
        (["--plot", "nowhere/x.png"], r"UnsupportedStoreError: .*nowhere/x.png', whose folder is not there"),
        (["--select", "number=3"], r"FieldError: --select says what --plot draws"),
        (["--plot", "x.xyz"], r"UnsupportedStoreError: a picture is not written as 'x.xyz'; its ending may be .*png"),
        (["--dims", "lat=nothing"], r"GridError: dims=\{'lat': 'nothing'\}"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_status_1(wb2, capsys, argv, match):
    assert main(["inspect", wb2, *argv]) == 1
    err = capsys.readouterr().err
    assert re.search(match, err) and err.count("\n") == 1
