"""Conversion: what is written is what xarray reads of the source, after any kill, and damage is found."""

import dataclasses
import gc
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from base64 import standard_b64encode
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from dask.distributed import LocalCluster
from globe_store import globe

import jigsaw.io as jio
from jigsaw.__main__ import main
from jigsaw.errors import FieldError, GridError, UnsupportedStoreError, WriteError
from jigsaw.io.conversion.convert import convert, verify
from jigsaw.io.conversion.selected_source import open_with_xarray, select_source
from jigsaw.io.writing.write import completeness
from jigsaw.testing import world_mesh

MARKS = ("jigsaw_append_dim", "jigsaw_complete", "jigsaw_closed", "jigsaw_digests", "jigsaw_conversion")


def described(data):
    """With attributes, a scalar coordinate, bounds and labels, as archives have them."""
    data = data.copy()
    data.attrs.update(title="a small globe", levels=[500, 700, 850])
    data["geopotential"].attrs.update(units="m2 s-2", long_name="Geopotential")
    data["geopotential"].values[2, 1, 3:5] = np.nan
    data["latitude"].attrs.update(units="degrees_north", bounds="lat_bnds")
    half = 7.5 * np.array([1.0, -1.0])
    return data.assign_coords(
        number=3,
        lat_bnds=(("latitude", "side"), data["latitude"].values[:, None] + half),
        name=("level", ["a", "b", "c"]),
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A NetCDF-4 file with packed integers and 4 steps a chunk."""
    path = tmp_path_factory.mktemp("archive") / "globe.nc"
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    deflated = {"zlib": True, "chunksizes": (4, 3, 13, 16)}
    described(globe()).to_netcdf(path, encoding={"2m_temperature": packed, "geopotential": deflated})
    return path


def opened(path):
    return xr.load_dataset(path, decode_timedelta=False)


def stored(path):
    """What xarray reads of a conversion, without the marks of its completeness."""
    data = xr.open_zarr(path, consolidated=True).load()
    assert set(MARKS) <= set(data.attrs)
    data.attrs = {k: v for k, v in data.attrs.items() if k not in MARKS}
    return data


def same(found, expected):
    """Bit for bit: values, coordinates, attributes, dtypes."""
    xr.testing.assert_identical(found, expected)
    for name in expected.variables:
        if expected[name].dtype.kind != "U":  # zarr gives numpy's strings of any length
            assert found[name].dtype == expected[name].dtype, name


@pytest.mark.parametrize("client", [None, 4])
def test_a_netcdf_file_as_xarray_reads_it(tmp_path, archive, client):
    made = convert(archive, tmp_path / "made.zarr", threads=client)
    expected = opened(archive)
    expected["lat_bnds"] = expected["lat_bnds"].variable  # named by the attribute of another: data to xarray
    found = stored(tmp_path / "made.zarr")
    same(found.reset_coords(), expected.reset_coords().assign_attrs(levels=[500, 700, 850]))
    assert "number" in found.coords and "coordinates" not in found["geopotential"].attrs
    assert completeness(tmp_path / "made.zarr").closed and completeness(tmp_path / "made.zarr").steps == 10
    assert made.kept == 0 and made.written == 4
    assert not (tmp_path / "made.zarr.journal").exists()
    assert verify(tmp_path / "made.zarr") == dict.fromkeys(made.digests, True)
    sample = jio.open(str(tmp_path / "made.zarr"), mesh={"lat": 2}, fields=["t2m", "z500"])
    assert len(sample) == 10


def test_selected_fields_levels_and_steps(tmp_path, archive):
    convert(
        archive,
        tmp_path / "made.zarr",
        fields=["geopotential@500", "t850", "t2m"],
        time=("2020-01-01", "2020-01-02"),
        every="12h",
        dtype="float32",
    )
    found, source = stored(tmp_path / "made.zarr"), opened(archive)
    assert set(found.data_vars) - {"lat_bnds"} == {"geopotential", "temperature", "2m_temperature"}
    expected = source.isel(time=slice(0, 8, 2), level=[0, 2])
    for name in ("geopotential", "temperature", "2m_temperature"):
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name].values, expected[name].values.astype("f4"))
    np.testing.assert_array_equal(found["time"], expected["time"])
    np.testing.assert_array_equal(found["level"], [500, 850])


@pytest.mark.parametrize("calendar", ["standard", "noleap"])
def test_files_along_time_are_joined(tmp_path, calendar):
    data = globe()[["temperature", "2m_temperature", "land_sea_mask"]]
    if calendar == "noleap":
        data["time"] = xr.date_range("2020-02-27", periods=10, freq="6h", calendar="noleap", use_cftime=True)
    for i, steps in enumerate((slice(0, 3), slice(3, 8), slice(8, 10))):
        part = data.isel(time=steps)
        scale = {"dtype": "int16", "scale_factor": 0.01 * (i + 1), "add_offset": 280.0 + i}
        part.to_netcdf(
            tmp_path / f"{i}.nc", encoding={"2m_temperature": scale, "time": {"units": f"hours since 202{i}-01-01"}}
        )
    made = convert(str(tmp_path / "[0-9].nc"), tmp_path / "made.zarr", chunks={"time": 2, "lat": 13, "lon": 8})
    parts = [opened(tmp_path / f"{i}.nc") for i in range(3)]
    expected = xr.concat(parts, "time", data_vars="minimal", coords="minimal", compat="override")
    found = stored(tmp_path / "made.zarr")
    same(found.drop_attrs(), expected.drop_attrs())
    chunks = {a.name: a.chunks for a in made.arrays}
    assert chunks["temperature"] == (2, 3, 13, 8) and chunks["land_sea_mask"] == (13, 8)


@pytest.mark.slow
def test_a_zarr_store_a_dataset_and_a_dask_dataset(tmp_path, wb2):
    expected = xr.open_zarr(wb2, consolidated=False).load()
    sources = wb2, expected, xr.open_zarr(wb2, consolidated=False, chunks={"time": 3, "latitude": 5})
    for i, source in enumerate(sources):
        convert(
            source, tmp_path / f"{i}.zarr", chunks={"time": 1, "lat": 5}, shards={"time": 4, "lat": 13, "longitude": 16}
        )
        same(stored(tmp_path / f"{i}.zarr"), expected)
        array = zarr.open_group(tmp_path / f"{i}.zarr")["temperature"]
        assert (array.chunks, array.shards) == ((1, 3, 5, 16), (4, 3, 15, 16))


def test_chunks_are_those_that_the_mesh_reads_cheapest(tmp_path):
    r = np.random.default_rng(0)
    data = xr.Dataset(
        {"t": (("time", "level", "lat", "lon"), r.normal(size=(3, 4, 181, 360)).astype("f4"))},
        coords={"time": np.arange(3), "level": [1, 2, 3, 4], "lat": np.linspace(90, -90, 181), "lon": np.arange(360.0)},
    )
    made = convert(data, tmp_path / "made.zarr", mesh={"lat": 2})
    best = jio.recommend(data, mesh={"lat": 2}, targets=[1]).chunks[0]
    assert made.arrays[0].chunks == tuple(best.chunks.values())
    assert made.arrays[0].shards == tuple(best.shards.values())


def rainy(path, kind, steps=range(6)):
    """Zeros everywhere: dry cells, the equator, Greenwich, a time axis that counts from 0; missing values beside."""
    r = np.random.default_rng(0)
    rain = np.where(r.random((6, 3, 4)) < 0.5, 0, r.random((6, 3, 4))).astype("f4")[list(steps)]
    packed = {"scale_factor": 0.25, "add_offset": -3.0}
    counts = r.integers(-5, 5, (6, 3, 4)).astype("i2")[list(steps)]
    arrays = {
        "rain": (("time", "lat", "lon"), rain, {}, 0),
        "holes": (("time", "lat", "lon"), np.where(rain > 0.7, np.float32(-9), rain), {}, -9),
        "counts": (("time", "lat", "lon"), counts, {}, 0),
        "packed": (("time", "lat", "lon"), counts, packed, 0),
        "time": (("time",), np.array(steps), {"units": "hours since 2009-01-01"}, 0),
        "lat": (("lat",), np.array([30, 0, -30]), {"units": "degrees_north"}, 0),
        "lon": (("lon",), np.array([0.0, 90, 180, 270]), {"units": "degrees_east"}, 0),
    }
    if kind == "netcdf":
        masked = {"holes": -9, "packed": 0}
        data = {n: (d, v, a | ({"_FillValue": masked[n]} if n in masked else {})) for n, (d, v, a, _) in arrays.items()}
        xr.Dataset(data).to_netcdf(path, encoding={n: {"_FillValue": None} for n in data if n not in masked})
        return path
    group = zarr.open_group(path, mode="w", zarr_format=2 if kind == "zarr v2" else 3)
    for name, (dims, values, attrs, fill) in arrays.items():
        if kind == "zarr v2":
            group.create_array(
                name, data=values, fill_value=fill, attributes={**attrs, "_ARRAY_DIMENSIONS": list(dims)}
            )
        else:
            masked = {"holes": standard_b64encode(struct.pack("<d", -9)).decode(), "packed": 0}
            attrs = attrs | ({"_FillValue": masked[name]} if name in masked else {})
            group.create_array(name, data=values, fill_value=fill, attributes=attrs, dimension_names=dims)
    return path


@pytest.mark.parametrize("kind", ["zarr v2", "zarr v2 in two", "zarr v3", "netcdf"])
def test_the_values_are_those_that_open_reads(tmp_path, kind):
    if kind == "zarr v2 in two":
        source = [str(rainy(tmp_path / f"{i}.zarr", "zarr v2", at)) for i, at in enumerate((range(2), range(2, 6)))]
    else:
        source = str(rainy(tmp_path / ("in.nc" if kind == "netcdf" else "in.zarr"), kind))
    convert(source, tmp_path / "made.zarr")
    names, whole = ["rain", "holes", "counts", "packed"], {"mesh": world_mesh(lat=1), "dtype": "float64"}
    given, made = (jio.open(s, fields=names, **whole) for s in (source, str(tmp_path / "made.zarr")))
    found = xr.open_zarr(tmp_path / "made.zarr").load()
    np.testing.assert_array_equal(given.times, np.datetime64("2009-01-01") + np.arange(6).astype("m8[h]"))
    for times in (made.times, found["time"].values):
        np.testing.assert_array_equal(times, given.times)
    for name in ("lat", "lon"):
        assert 0 in given.whole_coords[name]
        np.testing.assert_array_equal(made.whole_coords[name], given.whole_coords[name])
        np.testing.assert_array_equal(found[name], given.whole_coords[name])
    for i in range(6):
        expected = given[i].input.local[0].numpy()
        np.testing.assert_array_equal(made[i].input.local[0], expected)
        np.testing.assert_array_equal(np.stack([found[n].values[i] for n in names]), expected)
    assert not found["rain"].isnull().any() and (found["rain"] == 0).any() and not found["counts"].isnull().any()
    assert found["holes"].isnull().any() and found["packed"].isnull().any()


# -- kills -------------------------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from jigsaw.io.conversion import convert as conversion
from jigsaw.__main__ import main
move = conversion.move_region
def slowly(*given):
    time.sleep(0.05)
    return move(*given)
conversion.move_region = slowly
sys.exit(main(["convert", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_killed_conversion_goes_on(tmp_path, archive, capsys):
    made, journal = tmp_path / "made.zarr", tmp_path / "made.zarr.journal"
    argv = [str(archive), str(made), "--chunks", "time=1,lat=13,lon=16", "--shards", "time=1", "--workers", "1"]
    running = subprocess.Popen([sys.executable, "-c", SLOW, *argv])
    try:
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.read_bytes().count(b"\n") < 8:
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    entered = [json.loads(line) for line in journal.read_text().splitlines()]
    before = [e for e in entered if "array" in e]
    assert 5 < len(before) < 31
    assert not completeness(made).closed and not list(xr.open_zarr(made, consolidated=True).variables)
    with journal.open("a") as out:
        out.write('{"array": "geopotential", "unit": [9, 2')  # a line that was being written

    assert main(["convert", *argv, "--verify"]) == 0
    out = capsys.readouterr().out
    assert f"regions written and read back, {len(before)} were there" in out
    assert "verified: 4 arrays" in out
    fresh = tmp_path / "fresh.zarr"
    convert(archive, fresh, chunks={"time": 1, "lat": 13, "lon": 16}, shards={"time": 1})
    same(stored(made), stored(fresh))
    assert verify(made) == verify(fresh)
    assert not journal.exists()


def test_regions_that_are_there_are_not_read_again(tmp_path, archive, monkeypatch):
    from jigsaw.io.conversion import convert as conversion

    moved, move = [], conversion.move_region

    def until(region, *given):
        if len(moved) == 3:
            raise OSError(28, "No space left on device")
        moved.append((region.array.name, region.units))
        return move(region, *given)

    how = {"chunks": {"time": 1, "lat": 13, "lon": 16}, "shards": {"time": 5}, "threads": 1}
    monkeypatch.setattr(conversion, "move_region", until)
    with pytest.raises(OSError, match="No space left"):
        convert(archive, tmp_path / "made.zarr", **how)
    first, moved[:] = list(moved), [None] * 4
    made = convert(archive, tmp_path / "made.zarr", **how)
    assert made.kept == sum(len(units) for _, units in first)
    assert not set(first) & {m for m in moved if m}
    same(stored(tmp_path / "made.zarr")[["temperature"]].drop_attrs(), opened(archive)[["temperature"]].drop_attrs())


def test_another_conversion_does_not_go_on(tmp_path, archive, monkeypatch):
    from jigsaw.io.conversion import convert as conversion

    monkeypatch.setattr(conversion, "_move_all", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(archive, tmp_path / "made.zarr")
    with pytest.raises(WriteError, match=r"belongs to another conversion"):
        convert(archive, tmp_path / "made.zarr", fields=["t2m"])
    monkeypatch.undo()
    convert(archive, tmp_path / "made.zarr", fields=["t2m"], replace=True)
    assert verify(tmp_path / "made.zarr") == {"2m_temperature": True}


@pytest.mark.parametrize("kind", ["computed", "chunked", "file"])
def test_another_dataset_of_xarray_does_not_go_on(tmp_path, monkeypatch, kind):
    from jigsaw.io.conversion import convert as conversion

    def dataset(factor):
        data = globe()[["2m_temperature"]] * factor
        if kind == "file":
            data.to_netcdf(tmp_path / "source.nc")
            return xr.open_dataset(tmp_path / "source.nc")
        return data.chunk({"time": 2}) if kind == "chunked" else data

    monkeypatch.setattr(conversion, "_move_all", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with dataset(1) as data, pytest.raises(KeyboardInterrupt):
        convert(data, tmp_path / "made.zarr")
    monkeypatch.undo()
    with dataset(10) as other, pytest.raises(WriteError, match="belongs to another conversion"):
        convert(other, tmp_path / "made.zarr")
    with dataset(1) as data:
        if kind != "file":  # which has another time now
            assert convert(data, tmp_path / "made.zarr").kept == 0


WRONG_ARGUMENTS = {
    "chunks": ({"chunks": 3}, r"chunks=3 must say it by name: chunks=\{'time': 1\}"),
    "shards": ({"shards": [1]}, r"shards=\[1\] must say it by name"),
    "text size": ({"chunks": {"time": "a"}}, r"chunks=\{'time': a\} must be a positive size"),
    "true": ({"chunks": {"time": True}}, r"chunks=\{'time': True\} must be a positive size"),
    "threads": ({"threads": 0}, "threads=0 must be a whole number of at least 1, or None"),
    "budget": ({"budget": "1GB"}, "budget='1GB' must be a number of bytes >= 1"),
    "progress": ({"progress": 5}, "progress=5 must be a function"),
    "client": ({"client": 5}, "client=5 must be a dask.distributed.Client"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused_by_name(tmp_path, wb2, case):
    options, match = WRONG_ARGUMENTS[case]
    with pytest.raises((FieldError, GridError), match=match):
        convert(wb2, tmp_path / "made.zarr", **options)
    assert not any(tmp_path.iterdir())


def test_a_zarr_source_that_was_written_anew_does_not_go_on(tmp_path, wb2, monkeypatch):
    from jigsaw.io.conversion import convert as conversion

    path, moved, move = tmp_path / "source.zarr", [], conversion.move_region
    shutil.copytree(wb2, path)

    def until(region, *given):
        if moved:
            raise OSError(28, "No space left on device")
        moved.append(region)
        return move(region, *given)

    monkeypatch.setattr(conversion, "move_region", until)
    how = {"fields": ["t2m"], "chunks": {"time": 1}, "shards": {"time": 2}, "threads": 1}
    with pytest.raises(OSError, match="No space left"):
        convert(path, tmp_path / "made.zarr", **how)
    monkeypatch.undo()
    array = zarr.open_group(path, mode="r+")["2m_temperature"]
    array[:] = array[:] + 1
    with pytest.raises(WriteError, match=r"belongs to another conversion: .*files that have changed since"):
        convert(path, tmp_path / "made.zarr", **how)
    assert convert(path, tmp_path / "made.zarr", **how, replace=True).kept == 0


def test_a_dataset_that_lists_its_arrays_in_another_order_goes_on(tmp_path, wb2, monkeypatch):
    """As xarray may, each time that it opens a Zarr store without consolidated metadata."""
    from jigsaw.io.conversion import convert as conversion

    data, moved, move = xr.open_zarr(wb2), [], conversion.move_region

    def until(region, *given):
        if len(moved) == 2:
            raise OSError(28, "No space left on device")
        moved.append(region)
        return move(region, *given)

    monkeypatch.setattr(conversion, "move_region", until)
    sizes = {"chunks": {"time": 1}, "shards": {"time": 2}, "threads": 1}
    with pytest.raises(OSError, match="No space left"):
        convert(data, tmp_path / "made.zarr", **sizes)
    monkeypatch.undo()
    turned = data[[*reversed(list(data.data_vars))]]
    turned = turned.assign_coords({name: data[name] for name in reversed(list(data.coords))})
    assert list(turned.data_vars) != list(data.data_vars)
    assert convert(turned, tmp_path / "made.zarr", **sizes).kept > 0
    stored_in = select_source(open_with_xarray(wb2))
    assert dataclasses.replace(stored_in, arrays=stored_in.arrays[::-1]).identity() == stored_in.identity()


# -- checksums ---------------------------------------------------------------------------------------------------------


def test_damage_is_found(tmp_path, archive, capsys):
    made = tmp_path / "made.zarr"
    assert main(["convert", str(archive), str(made)]) == 0
    assert main(["convert", str(archive), str(made)]) == 1
    assert "is complete; write elsewhere" in capsys.readouterr().err
    array = zarr.open_group(made, mode="r+")["temperature"]
    array[3, 1, 2, 5] += np.float32(1e-4)
    assert main(["convert", str(archive), str(made), "--verify"]) == 1
    assert "temperature have other values than the source" in capsys.readouterr().err
    assert verify(made) == {
        "2m_temperature": True, "geopotential": True, "land_sea_mask": True, "temperature": False,
    }  # fmt: skip


def test_verify_refuses_a_store_of_another_conversion(tmp_path, archive, capsys):
    made = str(tmp_path / "made.zarr")
    argv = ["convert", str(archive), made, "--fields", "t2m"]
    assert main([*argv, "--verify"]) == 0 and main([*argv, "--verify"]) == 0
    assert capsys.readouterr().out.count("verified: 1 arrays") == 2
    assert main([*argv, "--every", "2", "--verify"]) == 1
    assert "is complete, and of another conversion" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "gone.nc"), made, "--verify"]) == 1
    assert "gone.nc" in capsys.readouterr().err
    Path(archive).touch()  # written again since
    assert main([*argv, "--verify"]) == 1
    assert all(verify(made).values())


def test_bytes_that_do_not_decode_are_damage(tmp_path, archive):
    made = tmp_path / "made.zarr"
    convert(archive, made, fields=["temperature", "t2m"])
    chunk = max((made / "temperature" / "c").rglob("*"), key=lambda f: f.stat().st_size if f.is_file() else 0)
    raw = bytearray(chunk.read_bytes())
    raw[20:60] = bytes(40)
    chunk.write_bytes(raw)
    assert verify(made) == {"temperature": False, "2m_temperature": True}


def test_what_reads_back_other_than_written_is_refused(tmp_path, archive, monkeypatch):
    from jigsaw.io.writing.zarr_writer import ZarrSink

    put = ZarrSink.put
    monkeypatch.setattr(ZarrSink, "put", lambda self, name, box, block: put(self, name, box, block * 2))
    with pytest.raises(WriteError, match=r"rows .* of array '\w+' read back other than they were written"):
        convert(archive, tmp_path / "made.zarr", fields=["temperature"])


# -- clusters and refusals ---------------------------------------------------------------------------------------------


def test_a_dask_cluster_does_it(tmp_path, archive, capsys):
    quiet = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    how = {"n_workers": 1, "processes": False, "protocol": "tcp", "host": "127.0.0.1", "scheduler_kwargs": quiet}
    with LocalCluster(**how) as cluster:
        argv = ["--scheduler", cluster.scheduler_address, "--shards", "time=5", "--verify"]
        assert main(["convert", str(archive), str(tmp_path / "made.zarr"), *argv]) == 0
    assert "verified: 4 arrays" in capsys.readouterr().out
    same(stored(tmp_path / "made.zarr")[["geopotential"]].drop_attrs(), opened(archive)[["geopotential"]].drop_attrs())


@pytest.mark.parametrize(
    ("how", "kind", "match"),
    [
        ({"source": "nothing.nc"}, UnsupportedStoreError, r"xarray does not open 'nothing.nc'"),
        ({"source": "nothing-*.nc"}, UnsupportedStoreError, r"'nothing-\*.nc' names no file"),
        ({"fields": ["t3m"]}, jio.MissingArrayError, r"did you mean 't2m'"),
        ({"chunks": {"height": 3}}, GridError, r"chunks=\{'height': 3\} must be a positive size along one of"),
        ({"dtype": "int8"}, FieldError, r"dtype='int8' must be float16"),
        ({"time": ("2031", "2032")}, jio.WindowError, r"selects no step"),
    ],
)
def test_refusals_leave_nothing(tmp_path, archive, how, kind, match):
    with pytest.raises(kind, match=match):
        convert(how.pop("source", archive), tmp_path / "made.zarr", **how)
    assert not list(tmp_path.iterdir())


def test_files_in_other_units_are_not_joined(tmp_path):
    for name, units, steps in (("a", "K", slice(4)), ("b", "degC", slice(4, None))):
        data = globe()[["2m_temperature"]].isel(time=steps)
        data["2m_temperature"].attrs["units"] = units
        data.to_netcdf(tmp_path / f"{name}.nc")
    with pytest.raises(GridError, match=r"in units 'K' and 'degC'; write them in the same units"):
        convert([tmp_path / "a.nc", tmp_path / "b.nc"], tmp_path / "made.zarr")


def test_fields_without_time_are_alike_in_all_files(tmp_path):
    data = globe()[["2m_temperature", "land_sea_mask"]]
    data["land_sea_mask"].values[3, 4] = np.nan
    for i in range(3):
        data.isel(time=slice(3 * i, 3 * i + 3)).to_netcdf(tmp_path / f"{i}.nc")
    files = [str(tmp_path / f"{i}.nc") for i in range(3)]
    convert(files, tmp_path / "alike.zarr", chunks={})
    np.testing.assert_array_equal(stored(tmp_path / "alike.zarr")["land_sea_mask"], data["land_sea_mask"])
    data["land_sea_mask"].values[1, 2] += 1e-6
    data.isel(time=slice(6, 9)).to_netcdf(files[2])
    with pytest.raises(GridError, match=r"2\.nc has other values of 'land_sea_mask' than .*0\.nc"):
        convert(files, tmp_path / "other.zarr", chunks={})
    assert not (tmp_path / "other.zarr").exists()
    convert(files, tmp_path / "without.zarr", fields=["t2m"], chunks={})


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (slice(2, 5), r"0\.nc and .*1\.nc overlap along 'time', at 2020-01-01 12:00:00 among others"),
        (slice(0, 5), r"0\.nc and .*1\.nc overlap along 'time', at 2020-01-01 00:00:00 among others"),
        (slice(0, 3), r"1\.nc has other values of '2m_temperature' than .*0\.nc at the same place"),
    ],
)
def test_files_of_the_same_steps_are_not_joined(tmp_path, second, match):
    """Xarray keeps such steps twice, or leaves a whole file out."""
    data, files = globe()[["2m_temperature"]], [str(tmp_path / f"{i}.nc") for i in range(3)]
    for file, steps in zip(files, (slice(0, 3), second, slice(5, 8)), strict=True):
        (data if steps == slice(0, 3) and file == files[0] else data + 1).isel(time=steps).to_netcdf(file)
    with pytest.raises(GridError, match=match):
        convert(files, tmp_path / "made.zarr")


def test_sums_over_steps_are_not_thinned_in_a_conversion(tmp_path):
    data = globe(4)
    data["2m_temperature"].attrs["cell_methods"] = "time: sum"
    for how in ({}, {"fields": ["2m_temperature"]}):
        with pytest.raises(jio.WindowError, match=r"every='12h' skips steps of array '2m_temperature'.*are sums"):
            convert(data, tmp_path / "made.zarr", every="12h", **how)
    assert not list(tmp_path.iterdir())
    convert(data, tmp_path / "made.zarr", every="12h", fields=["temperature"])


def test_a_folder_of_something_else_is_left_alone(tmp_path, archive):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    for replace in (False, True):
        with pytest.raises(
            WriteError, match=r"mine (exists without the journal of a conversion; write elsewhere$|is not a Zarr store)"
        ):
            convert(archive, tmp_path / "mine", replace=replace)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def files_held_open(folder):
    """Return which files of a folder this process has open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.islink(link)]
    return sorted(path for path in targets if path.startswith(f"{folder}/"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="/proc lists open files on Linux alone")
def test_a_source_is_closed_when_its_conversion_fails(tmp_path, monkeypatch):
    """HDF5 ends the process where a file with texts that is open is opened again, and the first then collected."""
    from jigsaw.io.writing.zarr_writer import ZarrSink

    put = ZarrSink.put
    for i in range(2):
        described(globe()).isel(time=slice(4 * i, 4 * i + 4)).to_netcdf(tmp_path / f"{i}.nc")
    mine = xr.open_dataset(tmp_path / "0.nc", decode_timedelta=False)
    gc.collect()
    gc.disable()
    try:
        for number, source in enumerate((tmp_path / "1.nc", str(tmp_path / "?.nc"), mine)):
            with monkeypatch.context() as patched:
                patched.setattr(ZarrSink, "put", lambda self, name, box, block: put(self, name, box, block * 2))
                with pytest.raises(WriteError, match="read back other than they were written"):  # in a thread
                    convert(source, tmp_path / f"{number}.zarr")
            assert files_held_open(tmp_path) == [str(tmp_path / "0.nc")]
    finally:
        gc.enable()
    assert mine["temperature"].load().shape[0] == 4
    mine.close()


def test_replace_removes_neither_the_source_nor_what_a_wrong_call_would_replace(tmp_path):
    data, store = globe(3), tmp_path / "in.zarr"
    data.to_zarr(store, zarr_format=3)
    for source in (store, xr.open_zarr(store, consolidated=False)):
        with pytest.raises(WriteError, match=r"in\.zarr is what the conversion reads, so it is not replaced"):
            convert(source, store, replace=True)
    with pytest.raises(jio.MissingArrayError, match=r"field 'nothing'"):
        convert(store, store, fields=["nothing"], replace=True)
    (tmp_path / "link.zarr").symlink_to(store)
    with pytest.raises(WriteError, match=r"link\.zarr is what the conversion reads"):
        convert(store, tmp_path / "link.zarr", replace=True)
    for within in (store / "train.zarr", tmp_path / "link.zarr" / "variable" / "c"):
        with pytest.raises(WriteError, match=r"lies within .*in\.zarr, which the conversion reads; write beside"):
            convert(store, within)
    assert not (store / "train.zarr.journal").exists()
    convert(data, tmp_path / "made.zarr")
    with pytest.raises(UnsupportedStoreError):
        convert(tmp_path / "none.nc", tmp_path / "made.zarr", replace=True)
    assert all(verify(tmp_path / "made.zarr").values())
    xr.testing.assert_equal(xr.open_zarr(store, consolidated=False).load(), data)


def test_values_that_the_dtype_cannot_hold_are_not_written(tmp_path):
    source = globe(2)
    name = next(iter(source.data_vars))
    values = source[name].values.astype("f8")
    values.flat[5] = np.inf
    source[name] = source[name].dims, values
    convert(source, tmp_path / "a.zarr", fields=[name], dtype="float32", chunks={"time": 1})  # infinite before
    values.flat[6] = 1e300
    with pytest.raises(WriteError, match="which float32 does not hold; choose a wider dtype"):
        convert(source, tmp_path / "b.zarr", fields=[name], dtype="float32", chunks={"time": 1})


def test_a_store_object_is_refused_by_name(tmp_path):
    for source in (zarr.storage.MemoryStore(), [tmp_path, 3]):
        kind = "MemoryStore" if not isinstance(source, list) else "int"
        with pytest.raises(
            UnsupportedStoreError, match=rf"source has a {kind}; convert takes a path, .*xarray.open_zarr"
        ):
            convert(source, tmp_path / "out.zarr")
