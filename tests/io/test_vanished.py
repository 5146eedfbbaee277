"""Stores, arrays and chunks that vanish, or were never written: refused, or read as fill where that is asked for; and
bits that flip in what jigsaw wrote.
"""

import os
import shutil
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from dask.distributed import LocalCluster
from globe_store import LAT, LON, globe, write

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import CorruptChunkError, MissingArrayError, MissingChunkError, PeerError, ReadError
from jigsaw.io import DataLoader, convert, open_store
from jigsaw.io.chunks.files import BadChunkError
from jigsaw.testing import on_ranks, world_mesh


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store and one of shards, each with its metadata listed."""
    folder = tmp_path_factory.mktemp("whole")
    for layout in ("v2", "v3", "sharded"):
        path = write(folder / f"{layout}.zarr", globe()[["2m_temperature"]], layout, chunk=(1, None, 7, 16))
        zarr.consolidate_metadata(path)
    return folder


def copied(whole, tmp_path, layout="v3"):
    return shutil.copytree(whole / f"{layout}.zarr", tmp_path / "s.zarr")


def opened(path, **more):
    return jigsaw.io.open(str(path), mesh=world_mesh(lat=1), fields=["t2m"], **more)


@pytest.mark.parametrize("layout", ["v2", "v3", "sharded"])
@pytest.mark.parametrize("missing", ["error", "fill"])
@pytest.mark.parametrize("gone", ["", "2m_temperature"])
def test_an_array_or_a_store_that_is_removed_is_never_fill(whole, tmp_path, layout, missing, gone):
    path = copied(whole, tmp_path, layout)
    ds = opened(path, missing=missing)
    shutil.rmtree(path / gone)
    with pytest.raises(
        MissingArrayError, match=r"'2m_temperature' has vanished.*2m_temperature/(zarr.json|.zarray) is"
    ):
        ds[3]
    with pytest.raises(MissingArrayError, match="vanished"):
        list(DataLoader(ds))


@pytest.mark.parametrize("layout", ["v2", "v3", "sharded"])
def test_a_missing_chunk_is_refused_or_counted(whole, tmp_path, layout):
    path = copied(whole, tmp_path, layout)
    name = {"v2": "3.0.0", "v3": "c/3/0/0", "sharded": "c/0/0/0"}[layout]
    (path / "2m_temperature" / name).unlink()
    here = r"there is no|the store has no .*2m_temperature/"
    with pytest.raises(
        MissingChunkError, match=rf"chunk \(3, 0, 0\) of array '2m_temperature' is missing: {here}{name}"
    ):
        opened(path)[3]
    assert "missing='error' refuses" in str(opened(path).plan(3))
    ds = opened(path, missing="fill")
    filled = ds[3].input.local[0, 0, :7]  # of v2 with the fill value that means missing, of v3 with 0, unpacked
    assert filled.isnan().all() if layout == "v2" else (filled == 280).all()
    assert f"{sum(map(len, ds.plan(3).missing.values()))} of 2 chunks are missing" in str(ds.plan(3))
    loader = DataLoader(ds)
    assert len(list(loader)) == 10
    assert loader.read_counts.missing == (20 if layout == "sharded" else 1)
    loader.close()


def test_an_index_that_leaves_a_chunk_out_is_taken_at_its_word(tmp_path):
    """The shard says that there is no such chunk: no purge leaves that."""
    how = {"dimension_names": ("time", "lat", "lon"), "fill_value": 3.0}
    made = zarr.open_group(str(tmp_path / "s.zarr"), mode="w").create_array(
        "a", shape=(1, 8, 8), chunks=(1, 2, 8), shards=(1, 8, 8), dtype="f4", **how
    )
    made[0, 2:4] = 1.0
    ds = jigsaw.io.open(str(tmp_path / "s.zarr"), mesh=world_mesh(lat=1))
    assert ds[0].input.local[0, 0, :, 0].tolist() == [3, 3, 1, 1, 3, 3, 3, 3]
    assert "3 of 4 chunks are missing, and stand for fill values\n" in str(ds.plan(0))


def test_a_chunk_that_was_read_once_is_not_fill_later(whole, tmp_path):
    path = copied(whole, tmp_path)
    ds = opened(path, missing="fill")
    assert ds[3].input.local.isfinite().all()
    (path / "2m_temperature/c/3/0/0").unlink()  # as a purge by age does, which leaves folders and metadata
    with pytest.raises(CorruptChunkError, match=r"c/3/0/0 cannot be read: the file is gone since it was opened"):
        ds[3]


def test_a_404_is_refused_or_fill_and_an_array_that_is_gone_is_neither(whole, tmp_path):
    path = copied(whole, tmp_path)
    (path / "2m_temperature/c/3/1/0").unlink()
    with requests_served(tmp_path) as (url, asked):
        with pytest.raises(MissingChunkError, match=r"chunk \(3, 1, 0\).*2m_temperature/c/3/1/0"):
            opened(url)[3]
        ds = opened(url, missing="fill")
        asked.clear()
        assert (ds[3].input.local[0, 0, 7:] == 280).all()
        # one look at the metadata, for all chunks that are missing in this read
        assert sum(each.endswith("2m_temperature/zarr.json") for each in asked) == 1
        shutil.rmtree(path)
        with pytest.raises(MissingArrayError, match="vanished"):
            ds[4]


@contextmanager
def requests_served(folder):
    """The URL of the store in a folder, behind Python's own server, and what it was asked for."""
    asked = []

    class Counting(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Counting, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/s.zarr", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def purged(whole, tmp_path_factory):
    path = copied(whole, tmp_path_factory.mktemp("purged"))
    (path / "2m_temperature/c/3/0/0").unlink()
    return path


@pytest.mark.slow
@on_ranks(2)
def test_all_ranks_refuse_alike(purged):
    for mode in ("cooperative", "independent"):
        how = {"mesh": world_mesh(lat=2), "fields": ["t2m"], "mode": mode, "halo": 2}
        ds = jigsaw.io.open(str(purged), **how)
        with pytest.raises(ReadError, match=r"chunk \(3, 0, 0\) of array '2m_temperature' is missing"):
            ds[3]
        assert ds[4].input.local.isfinite().all()
        filled = jigsaw.io.open(str(purged), **how, missing="fill")
        assert (filled[3].input.full_tensor()[0, 0, :7] == 280).all()


def test_a_coordinate_of_several_values_is_never_fill(whole, tmp_path):
    path = copied(whole, tmp_path)
    shutil.rmtree(path / "latitude" / "c")
    for missing in ("error", "fill"):
        with pytest.raises(MissingChunkError, match=r"chunk \(0,\) of array 'latitude' is missing"):
            opened(path, missing=missing)


def test_one_value_of_a_coordinate_may_be_the_fill_value(tmp_path):
    data = globe(steps=1)[["2m_temperature"]].assign_coords(time=[np.datetime64("2020-01-01", "ns")])
    path = write(tmp_path / "one.zarr", data)
    assert not (tmp_path / "one.zarr/time/c").exists()  # hours since then: 0, which zarr leaves out
    assert opened(path).input_times(0).astype("datetime64[h]").tolist() == [np.datetime64("2020-01-01T00").item()]


def test_what_is_missing_is_said_by_two_words(wb2):
    with pytest.raises(jigsaw.errors.FieldError, match=r"missing='skip' must be one of \('error', 'fill'\)"):
        opened(wb2, missing="skip")


# -- what jigsaw writes ------------------------------------------------------------------------------------------------


def flat_fields():
    """Fields that are all zero and all missing at some steps."""
    data = globe()[["2m_temperature", "temperature"]]
    data["2m_temperature"].values[2:4] = 0.0
    data["temperature"].values[1] = np.nan
    return data


def written(path, **encoding):
    """Fields of zeros and of NaN at one of two steps, by a Writer."""
    dims, how = dict.fromkeys(("t2m", "sst"), ("time", "lat", "lon")), {"encoding": encoding} if encoding else {}
    space = {"lat": np.linspace(90, -90, LAT), "lon": np.arange(LON) * 22.5}
    with jigsaw.io.Writer(path, dims=dims, append_dim="time", coords=space, **how) as out:
        for day in range(2):
            noise = torch.randn(1, LAT, LON, generator=torch.Generator().manual_seed(day))
            fields = {"t2m": noise * (day == 0), "sst": noise if day == 0 else noise * float("nan")}
            tiles = {k: jigsaw.shard(v, world_mesh(lat=1), (None, "lat", None)) for k, v in fields.items()}
            out.append(tiles, coords={"time": np.array([f"2020-01-0{day + 1}"], "datetime64[ns]")})
    return path


def test_what_is_written_has_all_its_chunks(tmp_path):
    """A chunk of zeros or NaN is written as any other, so that none is missing but those that were lost."""
    ds = jigsaw.io.open(str(written(tmp_path / "w.zarr")), mesh=world_mesh(lat=1), fields=["t2m", "sst"])
    assert (ds[1].input.local[0, 0] == 0).all() and ds[1].input.local[0, 1].isnan().all()
    assert ds.plan([0, 1]).missing == {}
    for how in ({"chunks": {"time": 1}, "shards": {"time": 4}}, {"chunks": {"time": 1}, "shards": {"time": 1}}):
        made = jigsaw.io.convert(flat_fields(), tmp_path / "c.zarr", replace=True, **how)
        ds = jigsaw.io.open(made.path, mesh=world_mesh(lat=1), fields=["t2m", "t500"])
        assert ds.plan(range(10)).missing == {}
        assert (ds[2].input.local[0, 0] == 0).all() and ds[1].input.local[0, 1].isnan().all()


def flipped_bits(path, first, count, read):
    """Of 60 single bits that flip among so many bytes of a file, how many reading finds."""
    found, draws, raw = 0, np.random.default_rng(0), bytearray(path.read_bytes())
    for at, bit in zip(draws.integers(0, count, 60).tolist(), draws.integers(0, 8, 60).tolist(), strict=True):
        raw[first + at] ^= 1 << bit
        path.write_bytes(raw)
        try:
            read()
        except CorruptChunkError:
            found += 1
        raw[first + at] ^= 1 << bit
    path.write_bytes(raw)
    read()
    return found


def test_a_flipped_bit_of_the_writers_zarr_is_found(tmp_path):
    from zarr.codecs import BloscCodec, Crc32cCodec

    for number, given in enumerate(("auto", None, BloscCodec(cname="zstd"), [Crc32cCodec()])):
        path = written(tmp_path / f"{number}.zarr", compressors=given)
        table = open_store(path).arrays["t2m"]
        assert table.decoder is not None and table.decoder.checked  # on the fast path
        raw = np.fromfile(path / "t2m/c/0/0/0", np.uint8)
        room = np.empty(table.grid.chunk_bytes, np.uint8)
        table.decoder.decode(raw, room)
        for at, bit in np.random.default_rng(0).integers(0, [raw.size, 8], (60, 2)).tolist():
            raw[at] ^= 1 << bit
            with pytest.raises(BadChunkError):
                table.decoder.decode(raw, room)
            raw[at] ^= 1 << bit
    assert flipped_bits(path / "t2m/c/0/0/0", 0, raw.size, lambda: read_array(path, "t2m")) == 60


def read_array(path, name):
    """All chunks of an array, from a store that is opened anew: a file that changes under a reader is refused."""
    table = open_store(path).arrays[name]
    assert table.decoder is not None  # on the fast path
    for index in table.grid.indices():
        table.loader.load(index, np.empty(table.grid.chunk_bytes, np.uint8))


@pytest.mark.parametrize("shards", [1, 5])
def test_a_flipped_bit_of_a_conversion_is_found(tmp_path, shards):
    how = {"chunks": {"time": 1}, "shards": {"time": shards}, "fields": ["2m_temperature"]}
    path = jigsaw.io.convert(globe(steps=5), tmp_path / "c.zarr", **how).path
    file = tmp_path / "c.zarr/2m_temperature/c/0/0/0"
    assert flipped_bits(file, 0, file.stat().st_size, lambda: read_array(path, "2m_temperature")) == 60


@pytest.mark.parametrize("name", ["t2m", "lat"])
def test_a_flipped_bit_of_the_writers_netcdf_is_found(tmp_path, name):
    import h5py

    path = written(tmp_path / "w.nc")
    with h5py.File(path) as file:
        place = file[name].id.get_chunk_info(0)
    assert flipped_bits(path, place.byte_offset, place.size, lambda: read_array(path, name)) == 60


# -- ranks that open different stores ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Stores of one shape: the same twice, with other times of change; one with other values; one with other times."""
    folder = tmp_path_factory.mktemp("alike")
    data = globe()[["2m_temperature", "temperature"]]
    later = data.assign_coords(time=data.time + np.timedelta64(365, "D"))
    for kind, suffix in (("v3", "zarr"), ("sharded", "zarr"), ("netcdf", "nc")):
        for name, each in {"a": data, "b": data + 1, "later": later}.items():
            path = folder / f"{kind}-{name}.{suffix}"
            each.to_netcdf(path) if kind == "netcdf" else write(path, each, kind)
        for name in ("a", "b"):
            source, copy = folder / f"{kind}-{name}.{suffix}", folder / f"{kind}-copy-of-{name}.{suffix}"
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
            for file in [copy, *copy.rglob("*")]:
                os.utime(file, (1e9, 1e9))
    return folder


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("v3", "zarr"), pytest.param("sharded", "zarr", marks=pytest.mark.slow), ("netcdf", "nc")],
)
@on_ranks(2)
def test_ranks_that_open_different_stores_are_told(alike, kind, suffix):
    rank = torch.distributed.get_rank()
    for axis in ("lat", "data"):
        how = {"mesh": world_mesh(**{axis: 2}), "fields": ["t2m", "t500"]}
        pair = [alike / f"{kind}-{name}.{suffix}" for name in ("a", "copy-of-a")]
        loader = DataLoader(jigsaw.io.open(str(pair[rank]), **how), batch_size=2)
        assert len(list(loader)) == 5
        for other in ("b", "copy-of-b", "later"):
            mine = pair[0] if rank == 0 else alike / f"{kind}-{other}.{suffix}"
            ds = jigsaw.io.open(str(mine), **how)
            what = "its arrays, coordinates or times differ" if other == "later" else "the bytes of its chunks"
            with pytest.raises(PeerError, match=f"ranks read different stores: of .*{kind}-a.* {what}"):
                DataLoader(ds, batch_size=2)


@on_ranks(2)
def test_ranks_that_open_different_datasets_of_xarray_are_told(alike):
    rank, how = torch.distributed.get_rank(), {"mesh": world_mesh(lat=2), "fields": ["t2m", "t500"]}
    for names, is_alike in ((("a", "copy-of-a"), True), (("a", "b"), False)):
        opened = xr.open_dataset(alike / f"netcdf-{names[rank]}.nc")
        for source in (opened, opened.load(), opened.chunk({"time": 1})):
            ds = jigsaw.io.open(source, **how)
            if is_alike:
                assert len(list(DataLoader(ds, batch_size=2))) == 5
                continue
            with pytest.raises(PeerError, match=r"ranks read different stores: .* the bytes of its chunks"):
                DataLoader(ds, batch_size=2)


# -- conversions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["v2", "v3", "sharded"])
def test_a_conversion_refuses_or_counts_the_chunks_that_its_source_lacks(whole, tmp_path, layout):
    path, made = copied(whole, tmp_path, layout), tmp_path / "made.zarr"
    (path / "2m_temperature" / {"v2": "3.0.0", "v3": "c/3/0/0", "sharded": "c/0/0/0"}[layout]).unlink()
    with pytest.raises(MissingChunkError, match=r"array '2m_temperature' is missing: the store has no 2m_temp.*'fill'"):
        convert(path, made)
    # smaller chunks than those of the source, of which none is counted twice
    assert convert(path, made, missing="fill", chunks={"time": 1, "lat": 5}, replace=True).filled == 1
    ours = opened(path, missing="fill")
    for step in range(10):
        # xarray unpacks in another order: the last bit may differ
        torch.testing.assert_close(opened(made)[step].input.local, ours[step].input.local, equal_nan=True)
    (path / "2m_temperature" / {"v2": ".zarray"}.get(layout, "zarr.json")).unlink()
    with pytest.raises(MissingArrayError, match="2m_temperature"):
        convert(path, tmp_path / "again.zarr", missing="fill")  # its metadata are listed by the root still


def test_a_conversion_refuses_a_coordinate_that_lacks_a_chunk(whole, tmp_path):
    path = copied(whole, tmp_path)
    shutil.rmtree(path / "latitude/c")
    with pytest.raises(ReadError, match=r"chunk c/0 of array 'latitude' is missing"):
        convert(path, tmp_path / "made.zarr", missing="fill")


def test_workers_and_servers_refuse_and_count_alike(whole, tmp_path, capsys):
    path, quiet = copied(whole, tmp_path), {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    (path / "2m_temperature/c/3/0/0").unlink()
    how = {"n_workers": 2, "processes": False, "protocol": "tcp", "host": "127.0.0.1", "scheduler_kwargs": quiet}
    with LocalCluster(**how) as cluster:
        argv = ["convert", str(path), "--scheduler", cluster.scheduler_address, "--chunks", "time=1,lat=5"]
        assert main([*argv, str(tmp_path / "refused.zarr")]) == 1
        assert "MissingChunkError: chunk c/3/0/0 of array '2m_temperature'" in capsys.readouterr().err
        assert main([*argv, str(tmp_path / "workers.zarr"), "--missing", "fill"]) == 0
    assert "  1 chunks that the source lacks were read as fill values\n" in capsys.readouterr().out
    with requests_served(tmp_path) as (url, _):
        with pytest.raises(MissingChunkError, match="c/3/0/0"):
            convert(url, tmp_path / "refused.zarr", replace=True)
        assert convert(url, tmp_path / "far.zarr", missing="fill").filled == 1
