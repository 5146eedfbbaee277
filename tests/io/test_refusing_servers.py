"""Servers that refuse some requests, want a password, or change: what is read in spite of that, and what is refused."""

from base64 import standard_b64encode

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr
from test_hostile_server import FEW, from_folder, from_folder_of, other_address, read, redirecting, reply, root, server

import jigsaw
from jigsaw.errors import CorruptChunkError, FetchError, FieldError, UnsupportedStoreError, WriteError
from jigsaw.io.chunks.remote_files import files_of_url
from jigsaw.io.conversion.selected_source import _source_paths
from jigsaw.testing import world_mesh

assert root  # a fixture


def files_of(root):
    data = xr.open_zarr(root / "s.zarr").load().drop_encoding()
    data.to_netcdf(root / "four.nc")
    data.to_netcdf(root / "three.nc", format="NETCDF3_64BIT")
    data.to_zarr(root / "plain.zarr", zarr_format=3, consolidated=False)


@pytest.mark.parametrize("status", [403, 405, 501])
@pytest.mark.parametrize("name", ["four.nc", "three.nc"])
def test_files_where_head_is_refused(root, name, status):
    files_of(root)

    def answer(handler):
        reply(handler, status=status) if handler.command == "HEAD" else from_folder(handler, root)

    with server(answer) as address:
        assert (read(f"http://{address}/{name}?signature=1") == 1).all()
        with pytest.raises(UnsupportedStoreError, match=f"there is no file 'gone-{name}'"):
            read(f"http://{address}/gone-{name}")
    refused = pytest.raises(FetchError, match=f"{name} cannot be read: the server answered 403")
    with server(lambda handler: reply(handler, status=403)) as address, refused:
        read(f"http://{address}/{name}")


@pytest.mark.parametrize("name", ["s.zarr", "plain.zarr"])
def test_a_zarr_store_where_what_is_missing_is_forbidden(root, name):
    files_of(root)

    def answer(handler):
        if (root / handler.path.strip("/")).is_file():
            return from_folder(handler, root)
        return reply(handler, status=403)

    with server(answer) as address:
        assert (read(f"http://{address}/{name}", arrays=["t2m"]) == 1).all()
        with pytest.raises(FetchError, match=r"gone.zarr/.* cannot be read: the server answered 403"):
            read(f"http://{address}/gone.zarr", arrays=["t2m"])
    (root / "s.zarr/t2m/1.0.0").unlink()
    with server(answer) as address, pytest.raises(FetchError, match="answered 403"):
        read(f"http://{address}/s.zarr")


@pytest.mark.parametrize("name", ["s.zarr", "four.nc"])
def test_the_password_of_a_url_is_sent_and_goes_to_no_other_host(root, name):
    files_of(root)
    sent = {"first": set(), "second": set()}

    def noting(which, answer):
        def noted(handler):
            sent[which].add(handler.headers.get("Authorization"))
            answer(handler)

        return noted

    basic = "Basic " + standard_b64encode(b"me:p@ss/w").decode()
    with (
        server(noting("second", from_folder_of(root)), other_address()) as inner,
        server(noting("first", from_folder_of(root))) as address,
        server(noting("first", redirecting(inner))) as leading,
    ):
        assert (read(f"http://me:p%40ss%2Fw@{address}/{name}") == 1).all()
        assert sent["first"] == {basic}
        own = {"client_options": {"default_headers": {"authorization": "Bearer b"}}}
        assert (read(f"http://me:p%40ss%2Fw@{address}/{name}", **own) == 1).all()
        assert sent["first"] == {basic, "Bearer b"}
        assert (read(f"http://me:p%40ss%2Fw@{leading}/{name}", redirects=True) == 1).all()
    assert sent["second"] == {None}


def test_names_in_a_plan_of_urls_hold_no_secrets(root):
    data = xr.open_zarr(root / "s.zarr").load().drop_encoding()
    for i in range(2):
        data.assign_coords(time=data.time + 4 * i).to_netcdf(root / f"f{i}.nc", format="NETCDF3_64BIT")
    with server(from_folder_of(root)) as address:
        urls = [f"http://me:secret@{address}/f{i}.nc?signature=private" for i in range(2)]
        ds = jigsaw.io.open(urls, mesh=world_mesh(lat=1), fields=["t2m"], options=FEW)
        assert (np.stack([s.input.local.numpy() for s in ds]) == 1).all() and len(ds) == 8
        plan = ds.plan([0, 5])
    assert len(plan.modes) == 2 and "http://***@" in str(plan)
    assert not any(word in f"{plan} {plan.modes} {ds!r}" for word in ("secret", "private"))


def test_a_far_file_that_changed_while_it_was_closed_is_refused(root, monkeypatch):
    monkeypatch.setattr("jigsaw.io.formats.many_files._STORES_KEPT_OPEN", 1)
    data = xr.open_zarr(root / "s.zarr").load().drop_encoding()

    def write(i, more=0):
        made = (data + more).assign_coords(time=data.time + 4 * i)
        made.to_netcdf(root / f"f{i}.nc", format="NETCDF3_64BIT")

    def tagged(handler):
        path = root / handler.path.strip("/")
        handler.send_header_once = path.stat().st_mtime_ns
        body, asked = path.read_bytes(), handler.headers.get("Range", "")
        first, last = map(int, asked.removeprefix("bytes=").split("-")) if asked else (0, len(body) - 1)
        part, status = body[first : last + 1], 206 if asked else 200
        bounds = {"Content_Range": f"bytes {first}-{first + len(part) - 1}/{len(body)}"} if asked else {}
        reply(handler, part, status, length=len(part), ETag=f'"{path.stat().st_mtime_ns}"', **bounds)

    for i in range(3):
        write(i)
    with server(tagged) as address:
        urls = [f"http://{address}/f{i}.nc" for i in range(3)]
        ds = jigsaw.io.open(urls, mesh=world_mesh(lat=1), fields=["t2m"], options=FEW)
        assert float(ds[0].input.local.mean()) == float(ds[11].input.local.mean()) == 1
        write(1, more=1000)
        with pytest.raises(CorruptChunkError, match=r"f1\.nc.* has changed since it was"):
            _ = ds[5]


def test_a_shard_that_a_server_lost_for_a_moment_comes_back(root, monkeypatch):
    monkeypatch.setattr("jigsaw.io.formats.zarr_places._MISSING_KEPT_S", 0.0)
    lost = ["/t2m/c/"]

    def answer(handler):
        if any(part in handler.path for part in lost):
            return reply(handler, status=404)
        return from_folder(handler, root)

    with server(answer) as address:
        ds = jigsaw.io.open(
            f"http://{address}/sharded.zarr", mesh=world_mesh(lat=1), fields=["t2m"], options=FEW, missing="fill"
        )
        assert np.isnan(ds[0].input.local.numpy()).all()
        lost.clear()
        assert (ds[0].input.local.numpy() == 1).all()


def test_a_disk_cache_tells_headers_and_stores_in_memory_apart(root, tmp_path):
    (root / "other").mkdir()
    (xr.open_zarr(root / "s.zarr").load().drop_encoding() + 1).to_zarr(root / "other/s.zarr", zarr_format=2)

    def answer(handler):
        from_folder(handler, root / "other" if handler.headers.get("X-Who") == "2" else root)

    cache = jigsaw.io.DiskCache(tmp_path / "cache", limit=1 << 30)

    def values(store, options=None):
        ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["t2m"], disk_cache=cache, options=options)
        return {float(sample.input.local.mean()) for sample in ds}

    with server(answer) as address:
        for who in ("1", "2"):
            headers = {"client_options": {"default_headers": {"X-Who": who}}}
            assert values(f"http://{address}/s.zarr", {**FEW, **headers}) == {float(who)}
    system = fsspec.filesystem("memory")
    for value in (1, 2):
        system.store.clear()
        data = xr.open_zarr(root / "s.zarr").load().drop_encoding() * value
        store = zarr.storage.FsspecStore.from_url("memory://s.zarr")
        data.to_zarr(store, zarr_format=3, consolidated=False)
        assert values(zarr.storage.FsspecStore.from_url("memory://s.zarr", read_only=True)) == {float(value)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retry_config": 5}, r"retry_config=5 must say it by name"),
        ({"retry_config": {"backoff": 3}}, r"backoff=3 must say it by name"),
        ({"retry_config": {"max_retries": "many"}}, r"max_retries='many', which must be a whole number"),
        ({"retry_config": {"retry_timeout": "30s"}}, r"retry_timeout='30s', which must be a number >= 0, of seconds"),
        ({"retry_config": {"tries": 3}}, r"retry_config has \['tries'\], and may have"),
        ({"client_options": "x"}, r"client_options='x' must say it by name"),
        ({"arrays": "t2m"}, r"arrays='t2m' is one string; give a list"),
    ],
)
def test_options_that_say_nothing(root, options, said):
    with server(from_folder_of(root)) as address, pytest.raises((UnsupportedStoreError, FieldError), match=said):
        read(f"http://{address}/s.zarr", **options)


def test_places_that_are_none(root, tmp_path):
    with pytest.raises(UnsupportedStoreError, match=r"is not a URL: Invalid IPv6 URL"):
        read("http://[::1/s.zarr")
    for folder, limit, said in (
        ("", 1, "folder="),
        (None, 1, "folder="),
        (tmp_path, "1GB", "limit="),
        (tmp_path, 0, "limit="),
    ):
        with pytest.raises(FieldError, match=said):
            jigsaw.io.DiskCache(folder, limit)
    with pytest.raises(WriteError, match="path is a MemoryStore, and a writer takes a local path"):
        jigsaw.io.Writer(zarr.storage.MemoryStore(), dims={})
    url = "http://127.0.0.1/s.zarr?signature=1"  # not a glob
    assert _source_paths(url) == [url]


@pytest.mark.parametrize("name", ["endpoint", "aws_endpoint", "endpoint_url", "AWS_ENDPOINT_URL"])
def test_an_endpoint_without_tls_by_any_of_its_names(root, name, monkeypatch):
    keys = {"skip_signature": True, "region": "us-east-1", **FEW}
    with server(from_folder_of(root)) as address:
        if name.isupper():
            monkeypatch.setenv(name, f"http://{address}")
        else:
            keys[name] = f"HTTP://{address}"
        files, path = files_of_url("s3://s.zarr/.zgroup", keys)
        assert files.whole(path, np.empty) is not None
