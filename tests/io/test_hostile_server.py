"""Servers that lie about sizes or send readers elsewhere: refused with the object's name, in bounded memory."""

import gc
import gzip
import http.server
import pickle
import resource
import socket
import threading
import zipfile
from contextlib import contextmanager

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jigsaw
from jigsaw.errors import CorruptChunkError, FetchError, ReadError, UnsupportedStoreError
from jigsaw.io.chunks.chunk_finder import most_stored_bytes
from jigsaw.io.chunks.redirects import GuardedHttp, private_address
from jigsaw.io.formats.store import open_store
from jigsaw.testing import world_mesh

DATE = "Tue, 24 Nov 2026 00:00:00 GMT"
FEW = {"retry_config": {"max_retries": 1, "retry_timeout": 5.0}}


@contextmanager
def server(answer, address="127.0.0.1"):
    """`answer(handler, body or None)` answers what a folder's own files do not."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            answer(self)

        do_HEAD = do_GET  # noqa: N815  # the name that http.server asks for

        def log_message(self, *told):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *told):
            pass  # a client that has enough

    made = Server((address, 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"{address}:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def reply(handler, body=b"", status=200, length=None, **headers):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.send_header("Last-Modified", DATE)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body)


def from_folder(handler, root):
    path = root / handler.path.strip("/").partition("?")[0]
    if not path.is_file():
        return reply(handler, status=404)
    body, asked = path.read_bytes(), handler.headers.get("Range")
    if not asked:
        return reply(handler, body)
    first, _, last = asked.removeprefix("bytes=").partition("-")
    start = int(first) if first else len(body) - int(last)
    stop = min(int(last) + 1, len(body)) if first and last else len(body)
    return reply(handler, body[start:stop], 206, Content_Range=f"bytes {start}-{stop - 1}/{len(body)}")


@pytest.fixture
def root(tmp_path):
    coords = {"time": np.arange(4), "lat": np.linspace(2, -2, 6), "lon": np.arange(5.0)}
    data = xr.Dataset({"t2m": (("time", "lat", "lon"), np.ones((4, 6, 5), "f4"))}, coords)
    data.to_zarr(tmp_path / "s.zarr", zarr_format=2, consolidated=True, encoding={"t2m": {"chunks": (1, 6, 5)}})
    sharded = {"t2m": {"chunks": (1, 6, 5), "shards": (2, 6, 5)}}
    data.to_zarr(tmp_path / "sharded.zarr", zarr_format=3, consolidated=True, encoding=sharded)
    return tmp_path


def read(url, **options):
    ds = jigsaw.io.open(url, mesh=world_mesh(lat=1), fields=["t2m"], options={**FEW, **options})
    return np.stack([ds[i].input.local.numpy() for i in range(len(ds))])


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def says_huge(handler):
    reply(handler, b"x" * 100, length=2**40)


def says_more(handler):
    """What can still be allocated, and is more than a chunk of 120 bytes ever has."""
    reply(handler, b"x" * 100, length=23 * 10**8)


def sends_more(handler):
    """400 MB for a chunk of 120 bytes, with headers that say so."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(4 * 10**8))
    handler.send_header("Last-Modified", DATE)
    handler.end_headers()
    for _ in range(400):
        handler.wfile.write(bytes(10**6))


def says_minus(handler):
    reply(handler, b"x" * 100, length=-5)


def says_words(handler):
    reply(handler, b"x" * 100, length="many")


LIES = [says_huge, says_more, sends_more, says_minus, says_words]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("what", ["t2m/1.0.0", pytest.param("lat/0", marks=pytest.mark.slow), ".zmetadata"])
def test_sizes_that_cannot_be_are_refused_before_the_body_is_read(root, what, lie):
    if (what, lie) == (".zmetadata", sends_more):
        pytest.skip("metadata may have up to 2 GiB")

    def answer(handler):
        lie(handler) if handler.path.endswith(what) else from_folder(handler, root)

    with server(from_folder_of(root)) as address:
        assert (read(f"http://{address}/s.zarr") == 1).all()
    before = peak()
    with server(answer) as address, pytest.raises(ReadError):
        read(f"http://{address}/s.zarr")
    assert peak() - before < 1 << 28


@pytest.mark.parametrize("name", ["four.nc", "three.nc"])
@pytest.mark.parametrize("begin", [0, 1])
def test_a_file_of_which_a_server_sends_more_than_was_asked_for(root, name, begin):
    """The first bytes, by which the format is known, or those behind them."""
    data = xr.open_zarr(root / "s.zarr").load().drop_encoding()
    data.to_netcdf(root / "four.nc")
    data.to_netcdf(root / "three.nc", format="NETCDF3_64BIT")

    def answer(handler):
        first, _, last = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        if not last or int(first) < begin:
            return from_folder(handler, root)
        size = (root / name).stat().st_size
        return reply(handler, bytes(1 << 24), 206, length=2**40, Content_Range=f"bytes {first}-{last}/{size}")

    with server(answer) as address, pytest.raises(ReadError):
        read(f"http://{address}/{name}")


def from_folder_of(root):
    return lambda handler: from_folder(handler, root)


def test_the_error_names_chunk_size_and_limit(root):
    def answer(handler):
        says_huge(handler) if handler.path.endswith("t2m/1.0.0") else from_folder(handler, root)

    said = rf"chunk \(1, 0, 0\) of array 't2m' .*sends {2**40} bytes, and at most {most_stored_bytes(120)} can be right"
    with server(answer) as address, pytest.raises(CorruptChunkError, match=said):
        read(f"http://{address}/s.zarr")


@pytest.mark.parametrize("extra", [10**9, 2**40])
def test_ranges_come_back_with_the_size_that_was_asked_for(root, extra):
    """The index of a shard and its chunks: a body that is longer than its range says."""

    def answer(handler):
        asked = handler.headers.get("Range", "")
        if "/c/" not in handler.path or not asked:
            return from_folder(handler, root)
        size = (root / handler.path.strip("/")).stat().st_size
        handler.send_response(206)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else size - int(last)
        stop = min(int(last), size - 1) if first else size - 1
        handler.send_header("Content-Range", f"bytes {start}-{stop}/{size}")
        handler.send_header("Content-Length", str(extra))
        handler.send_header("Last-Modified", DATE)
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(bytes(10**6))
        return None

    with server(from_folder_of(root)) as address:
        assert (read(f"http://{address}/sharded.zarr") == 1).all()
    before = peak()
    with server(answer) as address, pytest.raises(ReadError, match=r"sends more than the|cannot be read"):
        read(f"http://{address}/sharded.zarr")
    assert peak() - before < 1 << 28


@pytest.mark.slow
def test_an_object_in_other_stores_is_measured_too(root, tmp_path):
    """A member of a zip file that unpacks to far more than its chunk, and a file on disk."""
    with zipfile.ZipFile(tmp_path / "s.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for path in sorted((root / "s.zarr").rglob("*")):
            name = str(path.relative_to(root / "s.zarr"))
            if path.is_file():
                made.writestr(name, bytes(3 * 10**8) if name == "t2m/1.0.0" else path.read_bytes())
    before = peak()
    with pytest.raises(CorruptChunkError, match=r"chunk \(1, 0, 0\).*at most"):
        ds = jigsaw.io.open(zarr.storage.ZipStore(tmp_path / "s.zip"), mesh=world_mesh(lat=1), fields=["t2m"])
        [ds[i] for i in range(4)]
    assert peak() - before < 1 << 28
    with open(root / "s.zarr" / "t2m" / "1.0.0", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(CorruptChunkError, match=r"chunk \(1, 0, 0\)"):
        ds = jigsaw.io.open(str(root / "s.zarr"), mesh=world_mesh(lat=1), fields=["t2m"])
        ds[1]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_server_says_an_answer_is_right_or_a_read_error(root, data):
    length = data.draw(st.one_of(st.none(), st.integers(-(2**65), 2**65), st.text("0123456789 -+xe", max_size=8)))
    status = data.draw(st.sampled_from([200, 206, 204, 301, 302, 404, 416, 500]))
    start, stop = data.draw(st.integers(-2, 300)), data.draw(st.integers(-2, 2**62))
    headers = {"Content_Range": f"bytes {start}-{stop}/{stop}"} if data.draw(st.booleans()) else {}
    body = data.draw(st.binary(max_size=200))
    where = data.draw(st.sampled_from(["t2m/1.0.0", "lat/0", "c/0/0/0"]))

    def answer(handler):
        if handler.path.endswith(where):
            reply(handler, body, status, length, **headers)
            handler.close_connection = True
        else:
            from_folder(handler, root)

    with server(answer) as address:
        options = {"retry_config": {"max_retries": 0}, "client_options": {"timeout": "2s", "read_timeout": "1s"}}
        try:
            got = read(f"http://{address}/{'sharded' if where[0] == 'c' else 's'}.zarr", **options)
        except ReadError:
            return
        assert status == 404 or (got == 1).all()  # a chunk that is not there is a missing one


# -- redirects -------------------------------------------------------------------------------------------------------


def other_address():
    """An address of this machine that is not 127.0.0.1."""
    return "127.0.0.2"


def redirecting(to, only=""):
    def answer(handler):
        reply(handler, status=302, Location=f"http://{to}{handler.path}")

    return answer


def test_a_redirect_to_aprivate_address_is_refused_unless_it_is_asked_for(root):
    asked = []

    def secret(handler):
        asked.append(handler.path)
        from_folder(handler, root)

    with server(secret, other_address()) as inner, server(redirecting(inner)) as address:
        said = r"leads by a redirect to 127\.0\.0\.2, 127\.0\.0\.2, which is not a.*'redirects': \['127\.0\.0\.2'\]"
        with pytest.raises(FetchError, match=said):
            read(f"http://{address}/s.zarr")
        assert not asked
        for allowed in (["127.0.0.2"], True):
            assert (read(f"http://{address}/s.zarr", redirects=allowed) == 1).all()
        store = open_store(f"http://{address}/s.zarr", {**FEW, "redirects": ["127.0.0.2"]})
        files = pickle.loads(pickle.dumps(store.arrays["t2m"].places.files))
        assert files.whole("s.zarr/t2m/0.0.0", np.empty).size
        del asked[:]
        with pytest.raises(FetchError, match="leads by a redirect"):
            open_store(f"http://{address}/s.zarr", {**FEW, "redirects": ["example.org"]})
        assert not asked


def test_a_chunk_alone_that_leads_elsewhere(root):
    with server(from_folder_of(root), other_address()) as inner:

        def answer(handler):
            redirecting(inner)(handler) if handler.path.endswith("2.0.0") else from_folder(handler, root)

        with server(answer) as address, pytest.raises(FetchError, match=r"chunk \(2, 0, 0\).*leads by a redirect to"):
            read(f"http://{address}/s.zarr")


def test_a_redirect_within_the_server_is_followed(root):
    def answer(handler):
        if handler.path.startswith("/old/"):
            return reply(handler, status=301, Location=handler.path.removeprefix("/old"))
        return from_folder(handler, root)

    with server(answer) as address:
        assert (read(f"http://{address}/old/s.zarr") == 1).all()


def test_a_redirect_to_a_public_host_is_followed(root, monkeypatch):
    """No test leaves this machine: its second address is said to be public."""
    monkeypatch.setattr("jigsaw.io.chunks.redirects.private_address", lambda host: None)
    with server(from_folder_of(root), other_address()) as inner, server(redirecting(inner)) as address:
        assert (read(f"http://{address}/s.zarr") == 1).all()
        files = pickle.loads(pickle.dumps(open_store(f"http://{address}/s.zarr", FEW).arrays["t2m"].places.files))
        assert files.whole("s.zarr/t2m/0.0.0", np.empty).size


def test_behind_a_proxy_of_the_users_the_proxy_decides(root, monkeypatch):
    with server(from_folder_of(root)) as proxy:  # which takes what it is asked for from its own folder
        monkeypatch.setenv("http_proxy", f"http://{proxy}")

        def by_proxy(handler):
            handler.path = handler.path.partition("//")[2].partition("/")[2]
            from_folder(handler, root)

        with server(by_proxy) as second:
            monkeypatch.setenv("http_proxy", f"http://{second}")
            assert (read("http://nowhere.invalid/s.zarr") == 1).all()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "::1", "fc00::1", "fe80::1", "0.0.0.0"]
    + ["::ffff:127.0.0.1", "localhost", "2130706433", "100.64.0.1", "224.0.0.1", "0x7f.1"],
)
def test_addresses_that_are_not_public(host):
    assert private_address(host) is not None


def test_addresses_that_are_public():
    assert private_address("93.184.216.34") is None
    assert private_address("2606:2800:220:1:248:1893:25c8:1946") is None


def test_what_is_no_list_of_hosts():
    with pytest.raises(UnsupportedStoreError, match=r"'redirects': 'example\.org'.* must be a list of hosts"):
        GuardedHttp("http://example.org", {}, "example.org")


def test_strangers_cannot_stop_the_proxy_that_refuses(root):
    """It listens on this machine: whatever others send there, redirects are still noticed."""
    guard = GuardedHttp("http://127.0.0.1:1", {})
    guard.open_store()
    port = guard._port
    for junk in (b"", b"\r\n\r\n", b"GET\r\n\r\n", b"CONNECT [ HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(junk)
    refused = pytest.raises(FetchError, match="leads by a redirect")
    with server(from_folder_of(root), other_address()) as inner, server(redirecting(inner)) as address, refused:
        read(f"http://{address}/s.zarr")
    assert not guard.follow_new("x")


def test_a_port_is_closed_with_its_store():
    guard = GuardedHttp("http://127.0.0.1:1", {})
    guard.open_store()
    port = guard._port
    socket.create_connection(("127.0.0.1", port)).close()
    del guard
    gc.collect()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


# -- references ------------------------------------------------------------------------------------------------------


def referring(root, address, whole, outside=None, **options):
    """References to the chunks of the store behind a server, each to all of an object or to so many bytes of it."""
    found = {}
    for path in sorted((root / "s.zarr").rglob("*")):
        name = str(path.relative_to(root / "s.zarr"))
        if path.name.startswith("."):
            found[name] = path.read_text()
        elif path.is_file():
            url = f"http://{address}/s.zarr/{name}"
            found[name] = [url] if whole else [url, 0, path.stat().st_size]
    far = {"remote_protocol": "http", "remote_options": {"asynchronous": True, **options}, "skip_instance_cache": True}
    system = fsspec.filesystem("reference", fo={"version": 1, "refs": found}, asynchronous=True, **far)
    store = zarr.storage.FsspecStore(system, read_only=True, path="")
    ds = jigsaw.io.open(
        zarr.open_group(store, mode="r"),
        mesh=world_mesh(lat=1),
        fields=["t2m"],
        missing="fill",
        options={"outside": outside or [f"http://{address}"]},
    )
    return np.stack([ds[i].input.local.numpy() for i in range(len(ds))])


def says_nothing(handler):
    """A body that ends when the connection does, however long it is."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"x" * 100)
    handler.close_connection = True


def is_packed(handler):
    reply(handler, gzip.compress(bytes(10**6)), Content_Encoding="gzip")


def is_gone(handler):
    reply(handler, status=404)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("lie", [says_huge, says_more, sends_more, says_nothing, is_packed, is_gone])
def test_sizes_of_what_references_lead_to_are_looked_at_before_the_body(root, lie, whole):
    sent = []

    def answer(handler):
        if handler.path.endswith("t2m/1.0.0"):
            lie(handler)
            sent.append(lie)
        else:
            from_folder(handler, root)

    with server(from_folder_of(root)) as address:
        assert (referring(root, address, whole) == 1).all()
    before = peak()
    with server(answer) as address, pytest.raises(ReadError, match=r"chunk \(1, 0, 0\) of array 't2m'"):
        referring(root, address, whole)
    assert peak() - before < 1 << 27


@pytest.mark.parametrize("whole", [True, False])
def test_references_follow_redirects_as_stores_do(root, whole):
    asked = []

    def secret(handler):
        asked.append(handler.path)
        from_folder(handler, root)

    def within(handler):
        if handler.path.startswith("/s.zarr"):
            return reply(handler, status=301, Location=f"/new{handler.path}")
        handler.path = handler.path.removeprefix("/new")
        return from_folder(handler, root)

    with server(secret, other_address()) as inner, server(redirecting(inner)) as address:
        said = r"redirect to 127\.0\.0\.2, 127\.0\.0\.2, which is not a.*'outside': \['http://127\.0\.0\.2'\]"
        with pytest.raises(ReadError, match=said):
            referring(root, address, whole)
        assert not asked
        for outside in ([f"http://{address}", f"http://{inner}"], True):
            assert (referring(root, address, whole, outside) == 1).all()
        assert asked
    with server(within) as address:
        assert (referring(root, address, whole) == 1).all()
    with (
        server(lambda handler: reply(handler, status=302, Location=handler.path)) as address,
        pytest.raises(ReadError, match="leads by redirects to more than 10 others"),
    ):
        referring(root, address, whole)


def test_a_redirect_of_references_takes_no_credentials_along(root):
    seen = {"first": [], "second": []}

    def noting(name, answer):
        def noted(handler):
            seen[name].append((handler.headers.get("Authorization"), handler.headers.get("X-Kind")))
            answer(handler)

        return noted

    secrets = {"client_kwargs": {"headers": {"Authorization": "Bearer secret", "X-Kind": "one"}}}
    with (
        server(noting("second", from_folder_of(root)), other_address()) as inner,
        server(noting("first", redirecting(inner))) as address,
    ):
        assert (referring(root, address, True, True, **secrets) == 1).all()
    assert set(seen["first"]) == {("Bearer secret", "one")} and set(seen["second"]) == {(None, "one")}
