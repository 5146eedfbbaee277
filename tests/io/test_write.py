"""Writing on real ranks: what xarray, zarr and netCDF4 then read is the whole array, bit for bit."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cftime
import netCDF4
import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
import zarr
from globe_store import globe
from globe_store import write as write_globe
from small_disk import no_space
from zarr.codecs import BloscCodec

import jigsaw
from jigsaw import comm
from jigsaw.errors import FieldError, GridError, ShardingError, WriteError
from jigsaw.io.writing.write import Writer, completeness, write
from jigsaw.testing import RankFailedError, on_ranks, run_on_ranks, world_mesh

SHAPE = (3, 4, 13, 10)
DIMS = ("time", "channel", "lat", "lon")
FIELDS = ("t2m", "z@500", "q@850", "z@850")
TIMES = np.datetime64("2020-02-28T18", "ns") + np.arange(12) * np.timedelta64(6, "h")
LEADS = np.arange(1, 13) * np.timedelta64(6, "h")
SPACE = {"lat": np.linspace(90, -90, 13), "lon": np.arange(10) * 36.0}
COORDS = {"time": TIMES[:3], **SPACE}
SUFFIXES = ("zarr", "nc")
MESHES = [
    {"lat": 1},
    {"lat": 2},
    {"lat": 3},
    {"lon": 4},
    {"lat": 2, "lon": 2},
    {"data": 2, "lat": 2},
    {"lat": 2, "m": 2},
]


def array(shape=SHAPE, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cut(x, mesh, spec=("data", None, "lat", "lon"), **more):
    return jigsaw.shard(x, mesh, spec, **more)


def ranks_of(axes):
    return int(np.prod(list(axes.values())))


def opened(path):
    """What xarray reads, without a word of warning."""
    return xr.open_dataset(path, decode_timedelta=True).load()


def check_fields(path, x, times=TIMES):
    ds = opened(path)
    assert ds.level.values.tolist() == [500, 850]
    np.testing.assert_array_equal(ds.time.values, times[: len(x)])
    np.testing.assert_array_equal(ds.t2m.values, x[:, 0])
    np.testing.assert_array_equal(ds.z.values, x[:, [1, 3]])
    np.testing.assert_array_equal(ds.q.sel(level=850).values, x[:, 2])
    assert np.isnan(ds.q.sel(level=500).values).all()
    assert ds.z.dims == ("time", "level", "lat", "lon")
    return ds


# -- every mesh ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "default": {},
    "uneven": {"chunks": {"time": 2, "level": 1, "lat": 4, "lon": 3}},
    "globe": {"chunks": {"lat": 13, "lon": 10}},
    "sharded": {"chunks": {"lat": 3, "lon": 4}, "shards": {"time": 2, "lat": 6, "lon": 8}},
}


def body_meshes(folder, axes):
    mesh = world_mesh(**axes)
    whole = array()
    for name, chosen in LAYOUTS.items():
        for suffix in SUFFIXES:
            if suffix == "nc" and name == "sharded":
                continue
            path = Path(folder) / f"{name}.{suffix}"
            tile = cut(whole, mesh, halo={2: 1, 3: 2}, periodic=(3,)) if name == "uneven" else cut(whole, mesh)
            write(path, tile, dims=DIMS, fields=FIELDS, coords=COORDS, budget=1 << 11, **chosen)
            if dist.get_rank() == 0:
                ds = check_fields(path, whole.numpy())
                stored = ds.t2m.encoding
                if "chunks" in chosen:
                    sizes = stored["chunks"] if suffix == "zarr" else stored["chunksizes"]
                    assert sizes[1:] == tuple(chosen["chunks"][d] for d in ("lat", "lon"))
                assert stored.get("shards") == ((2, 6, 8) if name == "sharded" else None)


@pytest.mark.parametrize(
    "axes", [pytest.param(a, marks=[] if len(a) == 2 else [pytest.mark.slow]) for a in MESHES], ids=str
)
def test_every_mesh_writes_the_same(tmp_path, axes):
    run_on_ranks(ranks_of(axes), body_meshes, str(tmp_path), axes)


@on_ranks(4)
def test_a_batch_cut_by_data_and_a_cut_channel_dim(tmp_path):
    x = array((4, 2, 4, 5, 6))
    dims = ("time", "prediction_timedelta", "channel", "lat", "lon")
    coords = {"time": TIMES[:4], "prediction_timedelta": LEADS[:2]}
    tile = cut(x, world_mesh(data=2, lat=2), ("data", None, None, "lat", None))
    write(tmp_path / "a.zarr", tile, dims=dims, fields=FIELDS, coords=coords)
    tile = cut(x, world_mesh(channel=4), (None, None, "channel", None, None))
    write(tmp_path / "b.zarr", tile, dims=dims, fields=FIELDS, coords=coords)
    write(tmp_path / "c.nc", tile, dims=dims, fields=FIELDS, coords=coords)
    for name in ("a.zarr", "b.zarr", "c.nc"):
        ds = opened(tmp_path / name)
        np.testing.assert_array_equal(ds.z.values, x.numpy()[:, :, [1, 3]])
        np.testing.assert_array_equal(ds.t2m.values, x.numpy()[:, :, 0])
        np.testing.assert_array_equal(ds.prediction_timedelta.values, LEADS[:2])


# -- what crosses ----------------------------------------------------------------------------------------------------


def sent(count):
    return sum(c.sent_bytes for c in count.calls if c.kind == "write")


@on_ranks(4)
def test_only_what_crosses_is_sent(tmp_path):
    mesh, x = world_mesh(lat=2, lon=2), array((4, 12, 10))
    tile = cut(x, mesh, (None, "lat", "lon"))
    dims, counts = ("time", "lat", "lon"), {}
    chunkings = {"aligned": None, "crossing": {"lat": 5, "lon": 5}, "globe": {"lat": 12, "lon": 10}}
    for name, chunks in chunkings.items():
        with comm.count() as count:
            write(tmp_path / f"{name}.zarr", {"u": tile}, dims=dims, chunks=chunks)
        counts[name] = [int(n) for n in comm.all_gather_object(mesh, sent(count))]
        np.testing.assert_array_equal(opened(tmp_path / f"{name}.zarr").u.values, x.numpy())
    assert counts["aligned"] == [0, 0, 0, 0]
    # rows 5 of 4 steps x 5 columns x 4 bytes: 5..9 has one row above the cut at 6, 10..11 none
    assert counts["crossing"] == [4 * 5 * 4] * 2 + [0, 0]
    # each rank writes one step, and gets three quarters of it
    assert counts["globe"] == [3 * 6 * 5 * 4] * 4
    with comm.count() as count:
        write(tmp_path / "one.nc", {"u": tile}, dims=dims, chunks=chunkings["globe"])
    received = sum(c.received_bytes for c in count.calls if c.kind == "write")
    assert received == (3 * 4 * 6 * 5 * 4 if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_one_rank_streams_a_netcdf_file_within_the_budget(tmp_path):
    tile = cut(array((8, 4, 10)), world_mesh(lat=2), (None, "lat", None))
    with comm.count() as count:
        write(tmp_path / "a.nc", {"u": tile}, dims=("time", "lat", "lon"), chunks={"lat": 4}, budget=2 * 160)
    calls = [c.received_bytes for c in count.calls if c.kind == "write"]
    assert calls == ([2 * 80] * 4 if dist.get_rank() == 0 else [0] * 4)


# -- growing ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("chunks", [{}, {"time": 4, "lat": 5}], ids=["steps", "shared"])
def test_a_store_grows_along_time(tmp_path, suffix, chunks):
    run_on_ranks(3, body_grow, str(tmp_path / f"a.{suffix}"), chunks)


def body_grow(path, chunks):
    """Pieces of other lengths than the chunks, by several writers, on several cuts."""
    mesh, x = world_mesh(lat=3), array((9, 4, 13, 10))
    valid = np.arange(9) * 2.5
    options = {"dims": DIMS, "fields": FIELDS, "append_dim": "time", "coords": SPACE, "attrs": {"title": "run"}}
    start = 0
    for writer in range(2):
        more = {"chunks": chunks, "mode": "w-"} if writer == 0 else {"mode": "a"}
        with Writer(path, **options, **more) as out:
            for rows in (2, 1, 1) if writer == 0 else (3, 2):
                rows = slice(start, start + rows)
                coords = {"time": TIMES[rows], "score": ("time", valid[rows], {"units": "1"})}
                spec = (None, None, "lat" if start else None, None if start else "lat")
                out.append(cut(x[rows], mesh, spec), coords=coords)
                start = rows.stop
                assert out.steps == start
        dist.barrier()
        ds = check_fields(path, x[:start].numpy())
        np.testing.assert_array_equal(ds.score.values, valid[:start])
        assert ds.attrs["title"] == "run" and "score" in ds.coords
        assert completeness(path).steps == start and completeness(path).closed
        dist.barrier()


@on_ranks(2)
def test_a_rollout_grows_along_lead_time(tmp_path):
    mesh, x = world_mesh(lat=2), array((2, 5, 4, 7, 6))
    dims = ("time", "prediction_timedelta", "channel", "lat", "lon")
    path = tmp_path / "run.zarr"
    with Writer(path, dims=dims, fields=FIELDS, append_dim="prediction_timedelta", coords={"time": TIMES[:2]}) as out:
        for lead in range(5):
            tile = cut(x[:, lead : lead + 1], mesh, (None, None, None, "lat", None))
            out.append(tile, coords={"prediction_timedelta": LEADS[lead : lead + 1]})
            seen = opened(path)  # while it grows
            assert seen.sizes["prediction_timedelta"] == lead + 1
            np.testing.assert_array_equal(seen.t2m.values, x[:, : lead + 1, 0].numpy())
            found = completeness(path)
            assert (found.append_dim, found.steps, found.closed) == ("prediction_timedelta", lead + 1, False)
            dist.barrier()
    ds = opened(path)
    np.testing.assert_array_equal(ds.prediction_timedelta.values, LEADS[:5])
    np.testing.assert_array_equal(ds.z.values, x[:, :, [1, 3]].numpy())
    assert ds.prediction_timedelta.attrs["standard_name"] == "forecast_period"
    group = zarr.open_group(str(path), mode="r")
    np.testing.assert_array_equal(group["t2m"][...], x[:, :, 0].numpy())
    np.testing.assert_array_equal(zarr.open_array(str(path / "t2m"), mode="r")[...], x[:, :, 0].numpy())


@pytest.mark.parametrize("axes", [{"lat": 1}, {"lat": 3}, {"lat": 2, "lon": 2}], ids=str)
def test_steps_written_behind_the_next_are_the_same_files(tmp_path, axes):
    run_on_ranks(ranks_of(axes), body_behind, str(tmp_path), axes)
    assert files_of(tmp_path / "behind.zarr") == files_of(tmp_path / "waiting.zarr")


def files_of(store):
    return {file.relative_to(store): file.read_bytes() for file in store.rglob("*") if file.is_file()}


def body_behind(folder, axes):
    mesh, x = world_mesh(**axes), array((5, 4, 13, 10))
    options = {"dims": DIMS, "fields": FIELDS, "append_dim": "time", "coords": SPACE, "chunks": {"lat": 5, "time": 2}}
    for name, more in (("waiting", {}), ("behind", {"wait": False}), ("small", {"wait": False, "budget": 900})):
        path, writers = f"{folder}/{name}.zarr", set()
        with Writer(path, **options, **more) as out:
            for step in range(5):
                tile = cut(x[step : step + 1], mesh, (None, None, "lat", "lon"))
                out.append(tile, coords={"time": TIMES[step : step + 1]})
                tile.zero_()  # the model goes on in the same memory
                assert out.steps == step + (not more)
                writers |= {thread.name for thread in threading.enumerate() if thread.name.startswith("jigsaw-write")}
        assert len(writers) <= 1
        np.testing.assert_array_equal(check_fields(path, x.numpy()).time.values, TIMES[:5])
        assert completeness(path).steps == 5 and completeness(path).closed
        dist.barrier()


def test_a_store_of_xarray_grows(tmp_path):
    mesh = world(lat=1)
    data = globe(4)[["geopotential", "2m_temperature"]].rename(latitude="lat", longitude="lon")
    data["2m_temperature"].attrs["units"] = "K"
    x = array((2, 4, 13, 16))
    for suffix in SUFFIXES:
        path = tmp_path / f"a.{suffix}"
        data.to_zarr(path) if suffix == "zarr" else data.to_netcdf(path, unlimited_dims=["time"])
        fields = ("2m_temperature", "geopotential@500", "geopotential@700", "geopotential@850")
        times = data.time.values[-1] + np.array([6, 12], "timedelta64[h]")
        write(path, cut(x, mesh), dims=DIMS, fields=fields, coords={"time": times}, mode="a", append_dim="time")
        ds = opened(path)
        np.testing.assert_array_equal(ds.time.values, np.concatenate([data.time.values, times]))
        np.testing.assert_array_equal(ds["2m_temperature"][:4], data["2m_temperature"])
        np.testing.assert_array_equal(ds["2m_temperature"][4:], x[:, 0])
        np.testing.assert_array_equal(ds["geopotential"][4:], x[:, 1:])
        assert ds["2m_temperature"].attrs["units"] == "K" and completeness(path).steps == 6


def world(**axes):
    """A mesh of one rank, in the test's own process."""
    return jigsaw.init_mesh(device="cpu", **axes)


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_read_and_written_comes_back(tmp_path, suffix):
    data = globe().drop_vars("land_sea_mask")
    data["geopotential"].attrs = {"units": "m2 s-2", "standard_name": "geopotential", "cells": [1, 2]}
    data["latitude"].attrs = {"units": "degrees_north", "axis": "Y", "comment": "north first"}
    data["level"].attrs = {"units": "hPa", "positive": "down"}
    data.attrs = {"Conventions": "CF-1.8", "version": 3}
    data.time.encoding = {"units": "hours since 1900-01-01", "calendar": "gregorian"}
    run_on_ranks(2, body_round_trip, write_globe(tmp_path / "in.zarr", data), str(tmp_path / f"out.{suffix}"))
    back = opened(tmp_path / f"out.{suffix}").rename(lat="latitude", lon="longitude")
    there = xr.open_zarr(tmp_path / "in.zarr", consolidated=False).load()
    steps = slice(2, 4)
    for name in ("geopotential", "temperature", "2m_temperature"):
        wanted = there[name][steps].sel(level=[500, 850]) if "level" in there[name].dims else there[name][steps]
        got = back[name].isel(latitude=slice(None, None, -1))  # it was read from the south
        rounding = (
            1e-7 if name == "2m_temperature" else 0
        )  # it is unpacked in float32 by the one, in float64 by the other
        np.testing.assert_allclose(got.values, wanted.values.astype("f4"), rtol=rounding)
        assert got.attrs.keys() == wanted.attrs.keys()
        for coordinate in wanted.coords:
            np.testing.assert_array_equal(got[coordinate], wanted[coordinate])
            assert got[coordinate].attrs == wanted[coordinate].attrs
    assert back.time.encoding["units"].startswith("hours since 1900-01-01")
    assert {k: v for k, v in back.attrs.items() if not k.startswith("jigsaw")} == there.attrs


def body_round_trip(source, path):
    mesh = world_mesh(lat=2)
    fields = ["z500", "t2m", "temperature@850", "geopotential@850", "t500"]
    options = {"mesh": mesh, "fields": fields, "halo": 1, "lat_order": "south-first"}
    ds = jigsaw.io.open(source, inputs=[0, 1], **options)
    sample = ds[2]
    write(path, sample.input, dims=DIMS, like=ds, coords={"time": sample.input_times})
    dist.barrier()
    again = jigsaw.io.open(path, inputs=[0, 1], **options) if path.endswith("zarr") else None
    if again is not None:
        assert torch.equal(again[0].input.full_tensor(), sample.input.full_tensor())


def test_a_forecast_is_named_as_the_target_and_lies_on_the_dims_of_the_store(tmp_path):
    source = write_globe(tmp_path / "in.zarr", globe())
    fields = ["t2m", "z500", "temperature@850"]
    ds = jigsaw.io.open(source, mesh=world(lat=1), fields=fields, targets=[1, 2], target_fields=["z500", "t2m"])
    sample, dims = ds[0], ("time", "channel", "latitude", "longitude")
    write(tmp_path / "a.zarr", sample.target, dims=dims, like=ds, coords={"time": sample.target_times})
    back, there = opened(tmp_path / "a.zarr"), xr.open_zarr(source, consolidated=False).sel(level=[500])
    assert set(back) == {"geopotential", "2m_temperature"}
    np.testing.assert_allclose(back["2m_temperature"], there["2m_temperature"].sel(time=back.time), rtol=1e-6)
    np.testing.assert_array_equal(back["geopotential"], there["geopotential"].sel(time=back.time))
    for name in ("latitude", "longitude"):
        np.testing.assert_array_equal(back[name], there[name])
    named = ("mine", "height@500", "warmth@850")
    write(tmp_path / "b.zarr", sample.input, dims=DIMS, like=ds, fields=named)
    assert opened(tmp_path / "b.zarr").level.values.tolist() == [500, 850]
    write(tmp_path / "c.zarr", sample.input, dims=DIMS, like=ds, fields=("a", "b", "c"))
    assert dict(opened(tmp_path / "c.zarr").sizes) == {"time": 1, "lat": 13, "lon": 16}
    with pytest.raises(FieldError, match=r"there are 2 fields for the 3 channels of .*: geopotential@500, 2m_temp"):
        write(tmp_path / "d.zarr", sample.input, dims=DIMS, like=ds)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_calendars_and_units(tmp_path, suffix):
    tile = cut(array((2, 3)), world(lat=1), (None, None))
    days = np.array([cftime.DatetimeNoLeap(2020, 2, 28), cftime.DatetimeNoLeap(2020, 3, 1)])
    path = tmp_path / f"a.{suffix}"
    options = {"dims": ("time", "lat"), "append_dim": "time"}
    write(path, {"u": tile}, coords={"time": (days, {"units": "days since 2000-01-01", "long_name": "t"})}, **options)
    later = np.array([cftime.DatetimeNoLeap(2020, 3, 2), cftime.DatetimeNoLeap(2020, 3, 3)])
    write(path, {"u": tile}, coords={"time": later}, mode="a", **options)
    ds = opened(path)
    assert ds.time.values.tolist() == [*days, *later] and ds.time.attrs["long_name"] == "t"
    assert ds.time.encoding["calendar"] == "noleap" and ds.time.encoding["units"] == "days since 2000-01-01"
    with pytest.raises(GridError, match=r"coords\['time'\] holds datetime64, which calendar 'noleap' lacks"):
        write(path, {"u": tile}, coords={"time": TIMES[:2]}, mode="a", **options)
    path = tmp_path / f"b.{suffix}"
    write(path, {"u": tile}, coords={"time": np.array(["2020-01-01", "2020-01-02"], "M8[D]")}, **options)
    with pytest.raises(GridError, match="are not whole 'hours since 1970-01-01', the units that they are stored in"):
        write(
            path,
            {"u": tile},
            coords={"time": np.array(["2020-01-01T00:30", "2020-01-02"], "M8[m]")},
            mode="a",
            **options,
        )
    assert opened(path).sizes["time"] == 2


def test_dtypes_codecs_names_and_attributes(tmp_path):
    mesh = world(lat=1)
    x = array((4, 6))
    tiles = {
        "half": cut(x.bfloat16(), mesh, (None, None)),
        "double": cut(x.double(), mesh, (None, None)),
        "count": cut((x * 100).to(torch.int16), mesh, (None, None)),
    }
    coords = {"channel": ["a", "bb", "c", "d"], "lat2d": (("channel", "x"), x.numpy(), {"units": "degrees_north"})}
    attrs = {"n": np.float32(2), "ok": "ja"}
    for suffix in SUFFIXES:
        path = tmp_path / f"a.{suffix}"
        write(path, tiles, dims=("channel", "x"), coords=coords, attrs=attrs, field_attrs={"half": {"units": "K"}})
        ds = opened(path)
        assert [str(ds[n].dtype) for n in tiles] == ["float32", "float64", "int16"]
        for name, tile in tiles.items():
            np.testing.assert_array_equal(ds[name].values, tile.local.double().numpy())
        assert ds.channel.values.tolist() == coords["channel"]
        assert set(ds.coords) == {"channel", "lat2d"} and ds.lat2d.attrs["units"] == "degrees_north"
        assert ds.half.attrs["units"] == "K" and ds.attrs["n"] == 2.0
    encoding = {"dtype": "float16", "compressors": BloscCodec(cname="zstd")}
    write(tmp_path / "b.zarr", {"u": tiles["double"]}, dims=("channel", "x"), encoding=encoding)
    stored = zarr.open_array(str(tmp_path / "b.zarr" / "u"), mode="r")
    assert stored.dtype == np.float16 and isinstance(stored.compressors[0], BloscCodec)
    write(tmp_path / "b.nc", {"u": tiles["double"]}, dims=("channel", "x"), encoding={"complevel": 7, "dtype": "f4"})
    with netCDF4.Dataset(tmp_path / "b.nc") as file:
        assert file["u"].filters()["complevel"] == 7 and file["u"].dtype == np.float32


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_space_on_one_rank_is_an_error_on_all(tmp_path, suffix, full):
    found = run_on_ranks(2, body_no_space, str(tmp_path / f"a.{suffix}"), full)
    assert found == [True, True]


def body_no_space(path, full):
    mesh, x = world_mesh(lat=2), array((2, 64, 64))
    options = {"dims": ("time", "lat", "lon"), "append_dim": "time"}
    netcdf = path.endswith("nc")
    with Writer(path, **options) as out:
        out.append({"u": cut(x[:1], mesh, (None, "lat", None))}, {"time": TIMES[:1]})
        failing = dist.get_rank() == (0 if netcdf else full)
        size = resource.RLIM_INFINITY if not failing else 15_000 if netcdf else 4096
        with no_space(size), pytest.raises(WriteError, match="Error: "):
            for step in range(8):
                out.append({"u": cut(x[1:], mesh, (None, "lat", None))}, {"time": TIMES[step + 1 : step + 2]})
    with pytest.raises(WriteError, match="takes no more: it was closed, failed"):
        out.append({"u": cut(x[:1], mesh, (None, "lat", None))}, {"time": TIMES[:1]})
    dist.barrier()
    if netcdf:  # it has no name yet
        return not os.path.exists(path)
    np.testing.assert_array_equal(opened(path).u.values, x[:1].numpy())
    return completeness(path).steps == 1 and not completeness(path).closed


def test_a_failure_behind_a_step_is_raised_by_all_at_the_next(tmp_path):
    run_on_ranks(2, body_no_space_behind, str(tmp_path))


def body_no_space_behind(folder):
    mesh, x = world_mesh(lat=2), array((4, 64, 64))
    options = {"dims": ("time", "lat", "lon"), "append_dim": "time"}
    for last in ("append", "close"):
        path = f"{folder}/{last}.zarr"
        with Writer(path, wait=False, **options) as first:  # the group of the thread has a file, too
            first.append({"u": cut(x[:2], mesh, (None, "lat", None))}, {"time": TIMES[:2]})
        out = Writer(path, mode="a", wait=False, **options)
        with no_space(4096 if dist.get_rank() == 1 else resource.RLIM_INFINITY):
            out.append({"u": cut(x[2:3], mesh, (None, "lat", None))}, {"time": TIMES[2:3]})
            with pytest.raises(WriteError, match=r"could not be written behind a step: rank 1: .*Error: ") as failure:
                if last == "append":
                    out.append({"u": cut(x[3:], mesh, (None, "lat", None))}, {"time": TIMES[3:4]})
                out.close()
        assert (failure.value.__cause__ is not None) == (dist.get_rank() == 1)  # the rank's own traceback
        with pytest.raises(WriteError, match="takes no more: it was closed, failed"):
            out.append({"u": cut(x[:1], mesh, (None, "lat", None))}, {"time": TIMES[:1]})
        dist.barrier()
        np.testing.assert_array_equal(opened(path).u.values, x[:2].numpy())
        assert completeness(path).steps == 2
        dist.barrier()


def test_a_step_behind_is_kept_whatever_ends_the_program(tmp_path):
    program = """
import jigsaw, numpy as np, sys, torch
mesh = jigsaw.init_mesh(lat=1)
out = jigsaw.io.Writer("run.zarr", dims=("time", "lat"), append_dim="time", wait=False)
for step in range(3):
    tile = jigsaw.shard(torch.full((1, 5), float(step)), mesh, (None, "lat"))
    out.append({"u": tile}, coords={"time": np.array([step])})
raise KeyError("the model's")
"""
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.rstrip().endswith('KeyError: "the model\'s"')
    assert completeness(tmp_path / "run.zarr").steps == 3
    np.testing.assert_array_equal(opened(tmp_path / "run.zarr").u.values[:, 0], [0, 1, 2])


@on_ranks(2)
def test_what_cannot_be_written_behind_a_step():
    with pytest.raises(WriteError, match=r"wait=False with a\.nc: only Zarr .*write a \.zarr"):
        Writer("a.nc", dims=("lat",), wait=False)
    alone = jigsaw.shard(torch.zeros(4), world_mesh(data=2, lat=1)["lat"], ("lat",))
    with pytest.raises(
        WriteError, match=r"wait=False .*all 2 ranks of the job.* lie on the ranks \[\d\]; leave wait=F"
    ):
        Writer("a.zarr", dims=("lat",), wait=False).append({"u": alone})


def kill_when(appears):
    """End this process, without a chance to tidy up, as soon as a file is there."""

    def watch():
        while not os.path.exists(appears):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def body_killed(folder):
    """Two stores grow together; rank 1 ends in the middle of the third step of the first."""
    mesh, x = world_mesh(lat=2), array((4, 64, 64))
    options = {"dims": ("time", "lat", "lon"), "append_dim": "time", "chunks": {"lat": 2, "lon": 8}}
    with Writer(f"{folder}/a.zarr", **options) as first, Writer(f"{folder}/a.nc", **options) as second:
        for step in range(4):
            tile = cut(x[step : step + 1], mesh, (None, "lat", None))
            if dist.get_rank() == 1 and step == 2:
                kill_when(f"{folder}/a.zarr/u/c/2/20/1")  # one of the 256 chunks of a step
            try:
                first.append({"u": tile}, {"time": TIMES[step : step + 1]})
            except WriteError as error:
                Path(folder, "told").write_text(str(error))
                raise
            second.append({"u": tile}, {"time": TIMES[step : step + 1]})


@pytest.mark.slow
def test_a_killed_run_leaves_what_is_complete(tmp_path):
    with pytest.raises(RankFailedError, match=r"SIGKILL|another rank ended"):
        run_on_ranks(2, body_killed, str(tmp_path))
    assert "another rank ended while they were writing together" in (tmp_path / "told").read_text()
    path, x = tmp_path / "a.zarr", array((4, 64, 64))
    assert (path / "u" / "c" / "2" / "20" / "1").exists()  # it was in the middle of the third step
    assert not (tmp_path / "a.nc").exists()
    for left in (path, tmp_path / "a.nc.part"):
        found = completeness(left)
        assert (found.append_dim, found.steps, found.closed) == ("time", 2, False)
        ds = opened(left)
        np.testing.assert_array_equal(ds.u.values, x[:2])
        np.testing.assert_array_equal(ds.time.values, TIMES[:2])
    # what it had begun is written again, on another mesh
    tile = cut(x[2:], world(lat=1), (None, "lat", None))
    write(path, {"u": tile}, dims=("time", "lat", "lon"), coords={"time": TIMES[2:4]}, append_dim="time", mode="a")
    np.testing.assert_array_equal(opened(path).u.values, x)
    assert completeness(path).closed


def test_a_run_that_ends_before_its_first_step(tmp_path):
    mesh, x = world(lat=1), array((2, 3))
    path = tmp_path / "a.zarr"
    options = {"dims": ("time", "lat"), "append_dim": "time", "coords": {"time": TIMES[:2]}}
    with pytest.raises(WriteError, match="Error: "), no_space(600):
        write(path, {"u": cut(x, mesh, (None, None))}, **options)
    assert completeness(path).steps == 0 and not opened(path).variables
    with pytest.raises(WriteError, match=r"exists; write elsewhere, or choose mode='w'"):
        write(path, {"u": cut(x, mesh, (None, None))}, **options)
    write(path, {"u": cut(x, mesh, (None, None))}, mode="a", **options)
    np.testing.assert_array_equal(opened(path).u.values, x.numpy())


def test_what_was_there_stays_until_a_netcdf_file_is_whole(tmp_path):
    mesh, x = world(lat=1), array((2, 3))
    path, options = tmp_path / "a.nc", {"dims": ("time", "lat"), "append_dim": "time"}
    write(path, {"u": cut(x, mesh, (None, None))}, **options)
    with pytest.raises(KeyError), Writer(path, mode="a", **options) as out:
        out.append({"u": cut(x, mesh, (None, None))})
        raise KeyError
    assert opened(path).sizes["time"] == 2 and completeness(path).closed


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "channels": ({"fields": ("a", "b")}, FieldError, "there are 2 fields for the 4 channels"),
    "level": ({"fields": ("a", "b", "c", "z@top")}, FieldError, "field 'z@top': 'top' is not a level"),
    "twice": ({"fields": ("a", "a", "c", "d")}, FieldError, "fields name 'a' twice"),
    "level twice": ({"fields": ("z@5", "z@5", "c", "d")}, FieldError, "fields name a level of 'z' twice"),
    "both": ({"fields": ("z@5", "z", "c", "d")}, FieldError, "or once without a level"),
    "names": ({"fields": None}, FieldError, "a tile needs names"),
    "dims": ({"dims": ("time", "lat")}, ShardingError, "must name each of the 4 dims"),
    "no channel": ({"dims": ("time", "c", "lat", "lon")}, FieldError, "have no 'channel'"),
    "lat": ({"coords": {"lat": np.arange(6)}}, GridError, r"coords\['lat'\] has \{'lat': 6\} rows"),
    "2d": ({"coords": {"lat": np.ones((13, 2))}}, GridError, r"has dims \('lat',\) but shape \(13, 2\)"),
    "clash": ({"coords": {"a": ("lat", np.ones(13))}}, GridError, "'a' is both an array and a coordinate"),
    "path": ({"fields": ("../a", "b", "c", "d")}, FieldError, "'../a' cannot name an array"),
    "levels": ({"fields": ("z@5", "z@6", "c", "d"), "coords": {"level": [6, 7]}}, FieldError, r"levels \[5.0\]"),
    "chunks": ({"chunks": {"latt": 3}}, WriteError, r"chunks name the dims \['latt'\]"),
    "zero": ({"chunks": {"lat": 0}}, WriteError, "must be sizes >= 1"),
    "shards": ({"chunks": {"lat": 4}, "shards": {"lat": 6}}, WriteError, "whole chunks of 4; choose 4 or 8"),
    "netcdf shards": ({"format": "netcdf", "shards": {"lat": 6}}, WriteError, "belong to Zarr"),
    "encoding": ({"encoding": {"scale_factor": 2}}, WriteError, r"encoding has \['scale_factor'\], but .zarr takes"),
    "dtype": ({"format": "netcdf", "encoding": {"dtype": "float16"}}, WriteError, ".nc does not hold float16"),
    "mode": ({"mode": "r"}, WriteError, r"mode='r' must be one of"),
    "append": ({"mode": "a"}, WriteError, "'a' needs append_dim="),
    "grow": ({"append_dim": "step"}, WriteError, "cannot grow along append_dim='step'"),
    "format": ({"format": "grib"}, WriteError, "neither .zarr nor .nc"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, case):
    chosen, error, match = REFUSED[case]
    options = {"dims": DIMS, "fields": ("a", "b", "c", "d"), **chosen}
    with pytest.raises(error, match=match):
        write(tmp_path / "a.zarr", cut(array(), world(lat=1)), **options)
    assert not any(tmp_path.iterdir())


def test_places_that_are_refused(tmp_path):
    tile, options = cut(array(), world(lat=1)), {"dims": DIMS, "fields": ("a", "b", "c", "d")}
    with pytest.raises(WriteError, match="is a URL; only local paths are written"):
        write("s3://bucket/a.zarr", tile, **options)
    (tmp_path / "own.zarr").mkdir()
    (tmp_path / "own.zarr" / "letter").write_text("dear")
    with pytest.raises(WriteError, match="is not a Zarr store, so mode='w' does not replace it"):
        write(tmp_path / "own.zarr", tile, mode="w", **options)
    (tmp_path / "own.nc").mkdir()
    (tmp_path / "note.nc").write_text("dear")
    for path in ("own.nc", "note.nc"):
        with pytest.raises(WriteError, match=f"{path} is not a NetCDF file, so mode='w' does not replace it"):
            write(tmp_path / path, tile, mode="w", **options)
    assert (tmp_path / "own.zarr" / "letter").exists() and (tmp_path / "note.nc").read_text() == "dear"
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(WriteError, match="does not exist"):
        completeness(tmp_path / "none.zarr")
    globe(2).to_zarr(tmp_path / "theirs.zarr")
    with pytest.raises(WriteError, match="jigsaw did not write it"):
        completeness(tmp_path / "theirs.zarr")
    (tmp_path / "torn.zarr").mkdir()
    (tmp_path / "torn.zarr" / "zarr.json").write_text("{")
    (tmp_path / "letter.nc").write_text("dear")
    for path in ("own.zarr", "torn.zarr", "letter.nc"):
        with pytest.raises(WriteError, match=f"{path} cannot be read as a store that jigsaw wrote: "):
            completeness(tmp_path / path)
    with pytest.raises(ShardingError, match="takes a tile or a mapping of tiles, not Tensor; cut it first"):
        write(tmp_path / "a.zarr", array(), **options)
    with pytest.raises(FieldError, match="split one tile"):
        write(tmp_path / "a.zarr", {"a": tile}, **options)


def test_mode_w_replaces(tmp_path):
    mesh = world(lat=1)
    for suffix in SUFFIXES:
        for rows in (7, 3):
            x = array((rows, 2))
            write(tmp_path / f"a.{suffix}", {"u": cut(x, mesh, (None, None))}, dims=("lat", "lon"), mode="w")
            np.testing.assert_array_equal(opened(tmp_path / f"a.{suffix}").u.values, x.numpy())


LOST = [(float("nan"), "int16"), (1.5, "int16"), (40000.0, "int16"), (-1, "uint8"), (1e300, "float32")]


@pytest.mark.parametrize(("value", "dtype"), LOST)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_values_that_the_stored_dtype_does_not_hold(tmp_path, suffix, value, dtype):
    x = torch.tensor([[0, value]], dtype=torch.float64 if isinstance(value, float) else torch.int8)
    tile, options = cut(x, world(lat=1), (None, None)), {"dims": ("lat", "lon"), "encoding": {"dtype": dtype}}
    with pytest.raises(WriteError, match=f"values such as .*, which {dtype} does not hold; choose a wider dtype"):
        write(tmp_path / f"a.{suffix}", {"u": tile}, **options)
    write(tmp_path / f"b.{suffix}", {"u": tile * 0 if dtype == "float32" else tile[:, :1]}, **options)
    assert opened(tmp_path / f"b.{suffix}").u.values.tolist()[0][0] == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_steps_that_are_there_are_not_appended_again(tmp_path, suffix):
    path, tile = tmp_path / f"a.{suffix}", cut(array((2, 3)), world(lat=1), (None, None))
    options = {"dims": ("time", "lat"), "append_dim": "time", "mode": "a"}
    times = np.datetime64("2020-01-01", "ns") + np.arange(6) * np.timedelta64(6, "h")
    with Writer(path, **options) as out:
        out.append({"u": tile}, {"time": times[:2]})
        out.append({"u": tile}, {"time": times[2:4]})
    for again in (times[2:4], times[3:5], times[5:3:-1]):
        with pytest.raises(GridError, match=r"coords\['time'\] of an append must rise from the last in the store"):
            write(path, {"u": tile}, coords={"time": again}, **options)
    write(path, {"u": tile}, coords={"time": times[4:]}, **options)
    np.testing.assert_array_equal(opened(path).time.values, times)


@on_ranks(2)
def _goes_on_from_its_steps(folder, suffix):
    path, tile = folder / f"a.{suffix}", cut(array((1, 3)), world_mesh(lat=2), (None, "lat"))
    options = {"dims": ("time", "lat"), "append_dim": "time", "mode": "a"}
    for begun, steps in ((0, 3), (3, 5), (5, 5)):
        with comm.count() as sent, Writer(path, **options) as out:
            assert (out.steps, sent.messages) == (begun, 0)
            for step in range(out.steps, steps):
                out.append({"u": tile})
                assert out.steps == step + 1


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_writer_that_goes_on_says_how_many_steps_there_are(tmp_path, suffix):
    _goes_on_from_its_steps(tmp_path, suffix)
    assert opened(tmp_path / f"a.{suffix}").sizes["time"] == 5
    xr.Dataset({"u": (("time", "lat"), np.ones((4, 3), "f4"))}).to_netcdf(tmp_path / "b.nc", unlimited_dims="time")
    assert Writer(tmp_path / "b.nc", dims=("time", "lat"), append_dim="time", mode="a").steps == 4  # not ours
    (tmp_path / f"c.{suffix}").mkdir()
    (tmp_path / f"c.{suffix}" / "zarr.json").write_text("{")
    with pytest.raises(WriteError, match=rf"c.{suffix} cannot be read as a store to append to: "):
        Writer(tmp_path / f"c.{suffix}", dims=("time", "lat"), append_dim="time", mode="a").steps  # noqa: B018


APPENDS = {
    "dims": ({"u": (2, 3, 4)}, {}, "is float32 .* but the store has float32"),
    "names": ({"v": (2, 5)}, {}, r"the store has \['u'\], this would write \['v'\]"),
    "chunks": ({"u": (2, 5)}, {"chunks": {"lat": 3}}, "chunks=.* differ from those of array 'u' in the store"),
    "missing": ({"u": (2, 5)}, {"coords": {}}, r"\['time'\] are missing"),
    "new": ({"u": (2, 5)}, {"coords": {"time": TIMES[:2], "m": ("lat", np.ones(5))}}, r"\['m'\] are new"),
    "other": ({"u": (2, 5)}, {"coords": {"time": TIMES[:2], "lat": np.ones(5)}}, r"coords\['lat'\] differs"),
    "along": ({"u": (2, 5)}, {"append_dim": "lat"}, "append_dim='lat'|no unlimited dim 'lat'"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", APPENDS)
def test_an_append_that_does_not_fit(tmp_path, case, suffix):
    shapes, chosen, match = APPENDS[case]
    mesh, path = world(lat=1), tmp_path / f"a.{suffix}"
    options = {"dims": ("time", "lat"), "append_dim": "time"}
    coords = {"time": TIMES[:2], "lat": np.arange(5)}
    write(path, {"u": cut(array((2, 5)), mesh, (None, None))}, coords=coords, **options)
    tiles = {n: cut(array(s), mesh, (None,) * len(s)) for n, s in shapes.items()}
    dims = {n: ("time", "lat", "lon")[: len(s)] for n, s in shapes.items()}
    with pytest.raises((WriteError, GridError), match=match):
        write(path, tiles, **{**options, "dims": dims, "coords": {"time": TIMES[2:4]}, "mode": "a", **chosen})
    assert opened(path).sizes["time"] == 2 and completeness(path).closed


@on_ranks(2)
def test_ranks_that_disagree_all_raise(tmp_path):
    tile = cut(array(), world_mesh(lat=2))
    times = TIMES[dist.get_rank() :][:3]
    with pytest.raises(WriteError, match="the ranks describe different arrays or coordinates"):
        write(tmp_path / "a.zarr", tile, dims=DIMS, fields=FIELDS, coords={"time": times})
    fields = FIELDS if dist.get_rank() else FIELDS[1:]
    with pytest.raises(FieldError, match="there are 3 fields for the 4 channels"):
        write(tmp_path / "a.zarr", tile, dims=DIMS, fields=fields)
    assert not (tmp_path / "a.zarr").exists()


OF_RANKS = {
    "path": ({"path": "old.zarr"}, r"path is '.*new\.zarr' at place 0 of the mesh and '.*old\.zarr' at place 1"),
    "append_dim": ({"append_dim": None}, "append_dim is 'time' at place 0 of the mesh and None at place 1"),
    "wait": ({"wait": False}, "wait is True at place 0 of the mesh and False at place 1; give every rank the same"),
    "mode": ({"mode": "w"}, "mode is 'w-' at place 0 of the mesh and 'w' at place 1"),
    "format": ({"format": "netcdf"}, "format is '.zarr' at place 0 of the mesh and '.nc' at place 1"),
    "encoding": ({"encoding": {"filters": []}}, r"encoding is \{\} at place 0 .* and \{'filters': \[\]\} at place 1"),
}


@on_ranks(2)
def test_ranks_that_were_given_other_arguments_change_nothing(tmp_path):
    tile, rank = cut(array((1, 13, 10)), world_mesh(lat=2), (None, "lat", None)), dist.get_rank()
    options = {"dims": ("time", "lat", "lon"), "append_dim": "time", "coords": {"time": TIMES[:1]}}
    write(tmp_path / "old.zarr", {"u": tile}, **options)
    before = files_of(tmp_path / "old.zarr")
    for chosen, match in OF_RANKS.values():
        given = {"path": "new.zarr", **options, **(chosen if rank else {})}
        with pytest.raises(WriteError, match=f"^the ranks write different things: {match}"):
            write(tmp_path / given.pop("path"), {"u": tile}, **given)
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["old.zarr"] and files_of(tmp_path / "old.zarr") == before


@on_ranks(2)
def test_ranks_that_spell_a_path_in_other_ways_write_one_store(tmp_path):
    tile, rank = cut(array((1, 13)), world_mesh(lat=2), (None, "lat")), dist.get_rank()
    here = os.path.relpath(tmp_path) if rank else tmp_path / "no" / ".."
    codec = {"compressors": BloscCodec(cname="zstd")}  # one object on each rank
    attrs = {"made": f"at the time of rank {rank}"}
    write(Path(here) / "a.zarr", {"u": tile}, dims=("time", "lat"), encoding=codec, attrs=attrs)
    np.testing.assert_array_equal(opened(tmp_path / "a.zarr").u.values, tile.full_tensor())
    assert opened(tmp_path / "a.zarr").attrs["made"] == "at the time of rank 0"


@on_ranks(2)
def test_the_smallest_budget_of_all_ranks_is_kept(tmp_path):
    tile = cut(array((8, 4, 10)), world_mesh(lat=2), (None, "lat", None))
    with comm.count() as count:
        budget = 320 if dist.get_rank() else 5000
        write(tmp_path / "a.nc", {"u": tile}, dims=("time", "lat", "lon"), chunks={"lat": 4}, budget=budget)
    assert len([c for c in count.calls if c.kind == "write"]) == 4  # rounds of two chunks


@on_ranks(2)
def test_a_writer_that_one_rank_has_closed_is_refused_on_all(tmp_path):
    tile, options = (
        cut(array((1, 13)), world_mesh(lat=2), (None, "lat")),
        {"dims": ("time", "lat"), "append_dim": "time"},
    )
    out = Writer(tmp_path / "a.zarr", **options)
    if dist.get_rank() == 0:
        out.close()
    with pytest.raises(WriteError, match=r"a\.zarr takes no more: it was closed"):
        out.append({"u": tile})
    again = Writer(tmp_path / "b.zarr", **options)
    again.append({"u": tile})
    if dist.get_rank() == 1:
        again = Writer(tmp_path / "b.zarr", **options)
    with pytest.raises(WriteError, match="the ranks write different things: "):
        again.append({"u": tile})


def test_a_writer_that_wrote_nothing_lets_go_of_the_file_that_it_would_append_to(tmp_path):
    mesh, path = world_mesh(lat=1), tmp_path / "s.nc"
    options = {"dims": ("time", "lat", "lon"), "append_dim": "time"}
    write(path, {"u": cut(array((2, 4, 4)), mesh, (None, "lat", None))}, **options)
    with Writer(path, mode="a", **options) as out, pytest.raises(WriteError, match="an append writes every array"):
        out.append({"v": cut(array((2, 4, 4)), mesh, (None, "lat", None))})
    assert [p.name for p in tmp_path.iterdir()] == ["s.nc"]  # the copy that would have grown
    with netCDF4.Dataset(path, "a") as file:  # HDF5 locks a file that is open
        assert len(file.dimensions["time"]) == 2
    with pytest.raises(WriteError, match="takes no more: it was closed"):
        out.append({"u": cut(array((2, 4, 4)), mesh, (None, "lat", None))})


@pytest.mark.parametrize("theirs", [True, False])
def test_a_refused_append_to_a_netcdf_file_leaves_nothing_behind(tmp_path, theirs):
    path, part = tmp_path / "k.nc", tmp_path / "k.nc.part"
    options = {"dims": ("time", "lat"), "append_dim": "time", "mode": "a"}
    tile = cut(array((2, 3)), world(lat=1), (None, None))
    if theirs:
        first = xr.Dataset({"u": (("time", "lat"), tile.local.numpy())}, {"time": TIMES[:2]})
        first.to_netcdf(path, unlimited_dims=["time"])
    else:
        write(path, {"u": tile}, coords={"time": TIMES[:2]}, **options)
    for _ in range(2):
        with pytest.raises(GridError, match="must rise from the last in the store"):
            write(path, {"u": tile}, coords={"time": TIMES[1:3]}, **options)
        assert not part.exists()
    # a run that is killed leaves its copy
    Writer(path, **options)._sink.find("time")
    assert part.exists()
    write(path, {"u": tile}, coords={"time": TIMES[2:4]}, **options)
    np.testing.assert_array_equal(opened(path).time.values, TIMES[:4])
    part.write_bytes((tmp_path / "k.nc").read_bytes())
    with netCDF4.Dataset(part, "a") as file:  # of somebody else
        file.delncattr("jigsaw_complete")
    with pytest.raises(WriteError, match=r"k\.nc\.part is there, and jigsaw did not write it"):
        write(path, {"u": tile}, coords={"time": TIMES[4:6]}, **options)
    assert part.exists()
