"""A cache of fetched bytes on a local disk: what it serves, its limit, and what damage to it does."""

import os
import pickle
from pathlib import Path

import icechunk
import numpy as np
import pytest
import xarray as xr
import zarr
from fault_proxy import Proxy
from globe_store import globe
from remote_servers import nginx
from toy_store import request, sample, write
from zarr.storage import MemoryStore

import jigsaw
from jigsaw.errors import CorruptChunkError, FieldError, UnsupportedStoreError
from jigsaw.io.chunks.files import identity_of_object
from jigsaw.io.chunks.remote_files import files_of_url
from jigsaw.io.formats.disk_cache import DiskCache
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.testing import world_mesh


def read(store, steps=(1, 3)):
    return ReadEngine(store).read(plan_read(request({}, steps=steps), store.arrays))


@pytest.mark.parametrize("form", [("v2", "blosc"), ("v3", "plain"), ("sharded", "default")], ids="-".join)
def test_what_was_fetched_is_served_from_the_disk(tmp_path, form):
    path, values = write(tmp_path, form)
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    np.testing.assert_array_equal(read(cache.of(open_store(path))), sample(values))
    again = cache.of(open_store(path))
    plan = plan_read(request({}), again.arrays)
    kept = os.listdir(tmp_path / "cache")
    assert len(kept) >= plan.total.chunks
    for table in again.arrays.values():  # the store itself is not read any more
        table.places.files._files.whole = table.places.files._files.ranges = None
    np.testing.assert_array_equal(ReadEngine(again).read(plan), sample(values))


def test_a_damaged_file_is_fetched_again(tmp_path):
    path, values = write(tmp_path)
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    read(cache.of(open_store(path)))
    for i, name in enumerate(sorted(os.listdir(tmp_path / "cache"))):
        file = tmp_path / "cache" / name
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw if i % 2 else raw[: len(raw) // 2])
    np.testing.assert_array_equal(read(cache.of(open_store(path))), sample(values))


def test_the_limit_holds(tmp_path):
    path, values = write(tmp_path)
    cache = DiskCache(tmp_path / "cache", 3000)
    store = cache.of(open_store(path))
    for steps in ((0,), (1,), (2,), (3,), (0,)):
        np.testing.assert_array_equal(read(store, steps), sample(values, steps))
        assert 0 < sum(f.stat().st_size for f in os.scandir(tmp_path / "cache")) <= 3000 + 16 * 64
    with pytest.raises(FieldError, match="limit=0 must be a positive number"):
        DiskCache(tmp_path, 0)


def test_through_open_and_pickled(wb2, tmp_path):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["z500"], disk_cache=cache)
    plain = jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["z500"])
    np.testing.assert_array_equal(ds[1].input.local, plain[1].input.local)
    assert os.listdir(tmp_path / "cache")
    assert pickle.loads(pickle.dumps(ds)).source.disk_cache == cache


# -- which store it was ----------------------------------------------------------------------------------------------


def filled(store, value):
    """A store of one field that has one value."""
    group = zarr.open_group(store, mode="w")
    for name, x in (("t2m", np.full((4, 8), value, "f4")), ("lat", np.arange(4.0)), ("lon", np.arange(8.0))):
        dims = ("lat", "lon") if name == "t2m" else (name,)
        group.create_array(name, shape=x.shape, dtype=x.dtype, dimension_names=dims)[...] = x
    return store


def values_of(store, cache):
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["t2m"], disk_cache=cache)
    return set(ds[0].input.local.unique().tolist())


def test_stores_in_memory_are_not_taken_for_each_other(tmp_path):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    assert [values_of(filled(MemoryStore(), value), cache) for value in (1, 2)] == [{1}, {2}]


def test_a_path_is_that_from_where_it_was_opened(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        monkeypatch.chdir(tmp_path / str(value))
        assert values_of(filled("s.zarr", value), cache) == {value}


def test_snapshots_of_one_repository(tmp_path):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    repo = icechunk.Repository.create(icechunk.in_memory_storage())
    for value in (1, 2):
        session = repo.writable_session("main")
        filled(session.store, value)
        assert values_of(session.store, cache) == {value}
        session.commit(str(value))
    main = [snapshot.id for snapshot in repo.ancestry(branch="main")][:2]
    for _ in range(2):
        for value, snapshot in zip((2, 1), main, strict=True):
            assert values_of(repo.readonly_session(snapshot_id=snapshot).store, cache) == {value}
            assert len(os.listdir(tmp_path / "cache")) > 1


@pytest.mark.parametrize(("name", "options"), [("f.nc", {"format": "NETCDF3_64BIT"}), ("f.h5", {"engine": "h5netcdf"})])
def test_servers_that_have_files_of_one_name(tmp_path, name, options):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    for value in (1, 2):
        root = tmp_path / str(value)
        root.mkdir()
        x = xr.DataArray(np.full((4, 8), value, "f4"), {"lat": np.arange(4.0), "lon": np.arange(8.0)}, ("lat", "lon"))
        x.to_dataset(name="t2m").to_netcdf(root / name, **options)
        with nginx(root, root) as address:
            assert values_of(f"http://{address}/{name}", cache) == {value}


def test_buckets_of_one_name(monkeypatch):
    def place(url, **options):
        return identity_of_object(files_of_url(url, options)[0], "a").place

    known = [place("s3://b"), place("s3://b", endpoint="http://one"), place("s3://b", endpoint="http://two")]
    known += [place("az://b", account_name="one"), place("az://b", account_name="two"), place("gs://b")]
    known += [place("http://host/?run=1"), place("http://host/?run=2")]
    assert place("s3://b", access_key_id="k", secret_access_key="s") == known[0]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one")
    known.append(place("s3://b"))
    assert len(set(known)) == 9


def test_many_files(tmp_path):
    for year, part in enumerate(np.array_split(np.arange(10), 2)):
        globe().isel(time=part).to_netcdf(tmp_path / f"{year}.nc", engine="h5netcdf")
    cache, world = DiskCache(tmp_path / "cache", 1 << 22), world_mesh(lat=1)
    plain = jigsaw.io.open(str(tmp_path / "*.nc"), mesh=world, fields=["t2m"])
    for _ in range(2):
        ds = jigsaw.io.open(str(tmp_path / "*.nc"), mesh=world, fields=["t2m"], disk_cache=cache)
        for i in (0, 4, 5, 9):
            np.testing.assert_array_equal(ds[i].input.local, plain[i].input.local)
        assert len(os.listdir(tmp_path / "cache")) > 2


def test_an_object_that_was_replaced_is_fetched_again(tmp_path):
    """Its parts lie where they lay: only what the server says of it tells that it is another one."""
    cache = DiskCache(tmp_path / "cache", 1 << 22)
    with nginx(tmp_path, tmp_path) as address:
        for seed in (0, 1):
            path, values = write(tmp_path, ("sharded", "plain"), seed=seed)
            for shard in Path(path).rglob("c/**/*"):
                os.utime(shard, (seed, seed))
            zarr.consolidate_metadata(path)
            engine = ReadEngine(cache.of(open_store(f"http://{address}/sharded-plain.zarr")))
            got = engine.read(plan_read(request({}), engine.store.arrays))
            engine.close()
            np.testing.assert_array_equal(got, sample(values))


def test_what_cannot_be_decoded_is_not_kept(tmp_path):
    """A server answers once with what is not the object: a page that says so, with status 200."""
    cache = DiskCache(tmp_path / "cache", 1 << 22)
    path, values = write(tmp_path)
    zarr.consolidate_metadata(path)
    with nginx(tmp_path, tmp_path) as address, Proxy(address) as proxy:
        engine = ReadEngine(cache.of(open_store(f"http://{proxy.address}/v2-blosc.zarr")))
        plan = plan_read(request({}), engine.store.arrays)
        proxy.faults = ["200"]
        with pytest.raises(CorruptChunkError, match=r"chunk .* of array .* cannot be read"):
            engine.read(plan)
        np.testing.assert_array_equal(engine.read(plan), sample(values))
        engine.close()


# -- the folder ------------------------------------------------------------------------------------------------------


def used(folder):
    return sum(f.stat().st_size for f in os.scandir(folder) if f.name != "count")


def test_the_limit_holds_for_all_that_write(tmp_path):
    path, values = write(tmp_path)
    cache = DiskCache(tmp_path / "cache", 8000)
    stores = [cache.of(open_store(path)) for _ in range(3)]
    for steps in ((0,), (1,), (2,), (3,)):
        for store in stores:
            np.testing.assert_array_equal(read(store, steps), sample(values, steps))
            assert 4000 < used(tmp_path / "cache") <= 8000
            for file in sorted(os.listdir(tmp_path / "cache"))[::2]:  # what another store has fetched is lost
                (tmp_path / "cache" / file).write_bytes(b"damaged")


def test_what_a_killed_writer_left_makes_room(tmp_path):
    path, values = write(tmp_path)
    (tmp_path / "cache").mkdir()
    left = tmp_path / "cache" / f".{0:032}-whole.chunk.{0:016}.draft"
    left.write_bytes(bytes(8000))
    os.utime(left, (0, 0))
    store = DiskCache(tmp_path / "cache", 8000).of(open_store(path))
    np.testing.assert_array_equal(read(store, (0,)), sample(values, (0,)))
    assert not left.exists() and 0 < used(tmp_path / "cache") <= 8000


def test_a_folder_that_cannot_be_made(tmp_path):
    path, _ = write(tmp_path)
    (tmp_path / "cache").write_bytes(b"a file")
    with pytest.raises(UnsupportedStoreError, match=r"the folder '.*cache' of the disk cache cannot be made"):
        DiskCache(tmp_path / "cache", 1 << 20).of(open_store(path))


def test_no_space_is_no_reason_to_fail(tmp_path, monkeypatch):
    path, values = write(tmp_path)
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    monkeypatch.setattr(os, "replace", _full)
    np.testing.assert_array_equal(read(cache.of(open_store(path))), sample(values))
    assert os.listdir(tmp_path / "cache") == ["count"]


def _full(*names):
    raise OSError(28, "No space left on device")
