"""Stores in SeaweedFS, through its S3 interface: listing, ranges, credentials, and zarr's other stores."""

import re
import zipfile

import icechunk
import numpy as np
import pytest
import zarr
from fault_proxy import Proxy
from remote_servers import seaweedfs, upload
from test_remote import QUICK, expected, read_all
from toy_store import request, write
from zarr.core.buffer.cpu import Buffer
from zarr.storage import FsspecStore, MemoryStore, ObjectStore, ZipStore

from jigsaw.errors import FetchError, UnsupportedStoreError
from jigsaw.io.chunks.remote_files import files_of_url
from jigsaw.io.formats.zarr_group import open_zarr
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.read_plan import plan_read


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """A proxy before the server, the options for it, and the values of the stores below ``s3://tests/d``."""
    root, values = tmp_path_factory.mktemp("stores"), {}
    with seaweedfs(tmp_path_factory.mktemp("weed")) as options:
        for form in (("v2", "blosc"), ("sharded", "default")):
            _, values["-".join(form)] = write(root, form)
        upload(root, "tests", "d", options)
        with Proxy(options["endpoint"].removeprefix("http://")) as proxy:
            yield proxy, {**options, "endpoint": f"http://{proxy.address}", **QUICK}, values


@pytest.mark.parametrize("name", ["v2-blosc", "sharded-default"])
def test_a_bucket_is_listed_and_read(bucket, name):
    proxy, options, values = bucket
    store = open_zarr(f"s3://tests/d/{name}.zarr", options)
    assert set(store.arrays) == set(values[name]) and store.url == f"s3://tests/d/{name}.zarr"
    engine = ReadEngine(store, None)
    asked = request({}, halo=1)
    proxy.clear()
    plan = plan_read(asked, store.arrays)
    assert plan.lookups == engine.looked_up == (proxy.count, proxy.body_bytes)
    plan = plan.ask_sizes()
    requests = plan.total.requests
    proxy.clear()
    np.testing.assert_allclose(engine.read(plan), expected(values[name], asked), rtol=2e-6)
    assert proxy.count == requests and proxy.methods.keys() == {"GET"}
    assert (engine.stats,) == plan.rows
    assert proxy.body_bytes >= engine.stats.stored_bytes > 0
    np.testing.assert_array_equal(store.read_small("mask"), values[name]["mask"])
    engine.close()


def test_a_shard_costs_its_index_and_what_is_needed(bucket):
    proxy, options, values = bucket
    table = open_zarr("s3://tests/d/sharded-default.zarr", options).arrays["air"]
    proxy.clear()
    room = np.empty(table.grid.chunk_bytes, np.uint8)
    loaded = table.loader.load((1, 0, 1, 1), room)
    np.testing.assert_array_equal(
        table.loader.view(room, (1, 0, 1, 1)), values["sharded-default"]["air"][1:2, :, 5:10, 4:8]
    )
    assert [(method, part.partition("=")[2][0] == "-") for method, _, part in proxy.requests] == [
        ("GET", True),
        ("GET", False),
    ]
    assert proxy.body_bytes == 16 * 16 + 4 + loaded.stored


def test_a_bucket_fails_and_recovers(bucket):
    proxy, options, _ = bucket
    files, path = files_of_url("s3://tests/d/v2-blosc.zarr/.zgroup", options)
    proxy.faults = ["503", "reset"]
    assert files.size(path) == files.whole(path, np.empty).size > 0
    assert files.whole("d/nothing", np.empty) is None
    proxy.always = "503"
    try:
        with pytest.raises(
            FetchError, match=r"s3://tests/d/v2-blosc.zarr/.zgroup .* the last answer: 503 .*SlowDown"
        ) as e:
            files.whole(path, np.empty)
    finally:
        proxy.always = None
    assert "secret" not in str(e.value)


def test_wrong_credentials_are_refused_and_not_shown(bucket):
    _, options, _ = bucket
    wrong = {**options, "secret_access_key": "not-the-secret"}
    with pytest.raises(FetchError, match=r"s3://tests/d/v2-blosc.zarr/\S+ cannot be read: .*403 Forbidden") as e:
        open_zarr("s3://tests/d/v2-blosc.zarr", wrong)
    assert not re.search("not-the-secret|tests-key|Signature=", str(e.value))


def test_a_store_that_is_not_there(bucket):
    with pytest.raises(UnsupportedStoreError, match="s3://tests/nowhere cannot be opened as a Zarr group"):
        open_zarr("s3://tests/nowhere", bucket[1])


# -- the other stores of zarr ----------------------------------------------------------------------------------------


def zipped(folder, path):
    with zipfile.ZipFile(folder / "s.zip", "w") as made:
        for key, raw in files_of(path):
            made.writestr(key, raw)
    return ZipStore(folder / "s.zip", mode="r")


def in_memory(folder, path):
    return MemoryStore({key: Buffer.from_bytes(raw) for key, raw in files_of(path)})


def through_fsspec(folder, path):
    return FsspecStore.from_url(f"file://{path}")


def files_of(path):
    return [(str(file.relative_to(path)), file.read_bytes()) for file in path.rglob("*") if file.is_file()]


def through_obstore(folder, path):
    from obstore.store import LocalStore

    return ObjectStore(LocalStore(path))


@pytest.mark.slow
@pytest.mark.parametrize("form", [("v2", "blosc"), ("sharded", "default"), ("v3", "gzip-crc")], ids="-".join)
@pytest.mark.parametrize("made", [zipped, in_memory, through_fsspec, through_obstore])
def test_other_stores_give_the_same(tmp_path, made, form):
    path, values = write(tmp_path, form)
    store = open_zarr(zarr.open_group(made(tmp_path, tmp_path / path), mode="r"))
    for name, x in values.items():
        np.testing.assert_array_equal(read_all(store.arrays[name]), x)
        assert store.arrays[name].far == (made is not through_fsspec)  # of files here
    engine = ReadEngine(store, None)
    asked = request({}, halo=1)
    plan = plan_read(asked, store.arrays)
    np.testing.assert_allclose(engine.read(plan), expected(values, asked), rtol=2e-6)
    assert engine.stats.requests == plan.total.requests
    engine.close()


def test_icechunk(tmp_path):
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("f4")
    session = repo.writable_session("main")
    group = zarr.open_group(session.store, mode="w")
    dims = ("time", "lat", "lon")
    group.create_array("air", shape=x.shape, chunks=(1, 4, 3), dtype="f4", dimension_names=dims)[...] = x
    session.commit("first")
    changed = repo.writable_session("main")
    zarr.open_group(changed.store)["air"][0] = 0  # its chunks are missing now
    for store, first in ((repo.readonly_session("main").store, x[:1]), (changed.store, 0 * x[:1])):
        table = open_zarr(zarr.open_group(store, mode="r")).arrays["air"]
        assert table.dims == dims and table.decoder is not None
        np.testing.assert_array_equal(read_all(table), np.concatenate([first, x[1:]]))
