"""Passwords, tokens and query values of URLs and options: no message, traceback, name or report has them."""

import functools
import http.server
import json
import pickle
import threading
import traceback
from pathlib import Path

import pytest
import zarr

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import ReadError, UnsupportedStoreError, WriteError, cause_without_secrets, redacted_text
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.commands.plan_command import plan_report
from jigsaw.io.formats.store import StoreSource
from jigsaw.io.volumes.volume import StoredVolume
from jigsaw.testing import world_mesh

ONCE = {"retry_config": {"max_retries": 0}}
URL = "http://anna:hunter2@127.0.0.1:9/store{end}?sig=hunter2&v=hunter2"


def told(error):
    """What a traceback says, without the lines of this file."""
    shown = traceback.TracebackException.from_exception(error)
    while shown is not None:
        yield from shown.format_exception_only()
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://anna:pw@host:80/a?token=abc&b=c", "https://***@host:80/a?token=***&b=***"),
        ("'s3://key:pw@bucket/a' and s3://b/x@y/c", "'s3://***@bucket/a' and s3://b/x@y/c"),
        ("abfs://container@account/a, abfs://c:pw@account/a", "abfs://container@account/a, abfs://***@account/a"),
        ("https://h/a?abcdef", "https://h/a?***"),
        ("zip://a.nc::simplecache::https://u:p@h/x?sig=1", "zip://a.nc::simplecache::https://***@h/x?sig=***"),
        ("https://u:pa/ss@host/x?y=1", "https://***@host/x"),
        ("http://u:p@[::1]:80/x?y=1", "http://***@[::1]:80/x?y=***"),
        ("{'secret_access_key': 'a b', 'region': 'eu'}", "{'secret_access_key': '***', 'region': 'eu'}"),
        ('{"token": "abc"}, account_key=abc; x', '{"token": "***"}, account_key=***; x'),
        ("Authorization: Bearer abc", "Authorization: ***"),
        (
            "URLs (s3://, https://…) such as https://host/a.zarr?",
            "URLs (s3://, https://…) such as https://host/a.zarr?",
        ),
        (
            "s3://bucket/2018.zarr, /data/a.nc and http://host:80/a",
            "s3://bucket/2018.zarr, /data/a.nc and http://host:80/a",
        ),
    ],
)
def test_what_is_shown(text, shown):
    assert redacted_text(text) == shown
    assert redacted_text(shown) == shown


def test_values_of_options_are_taken_out_of_what_others_say():
    options = {"key": "hunter2", "deep": [{"header": b"hunter3"}], "region": "eu", "n": 3}
    assert redacted_text("hunter2 hunter3 in eu 3", options) == "*** *** in eu 3"


def test_every_error_and_every_store_takes_them_out_itself():
    url = URL.format(end=".zarr")
    for kind in (ReadError, UnsupportedStoreError, WriteError):
        assert str(kind(f"{url} cannot be read")) == "http://***@127.0.0.1:9/store.zarr?sig=***&v=*** cannot be read"
        assert "hunter2" not in repr(pickle.loads(pickle.dumps(kind(url))))
    assert "hunter2" not in repr(ArrayStore(url, {}, {}, lambda name: None))
    assert "hunter2" not in repr(StoreSource(url, {"secret": "hunter2"}))
    assert "hunter2" not in repr(StoredVolume((url,)))


def test_a_cause_with_secrets_is_not_shown():
    over = ValueError("of that")
    over.__cause__ = OSError("http://u:hunter2@h")
    assert cause_without_secrets(over) is None
    assert cause_without_secrets(plain := OSError("plain")) is plain
    assert cause_without_secrets(OSError("eu-west is not a key"), {"region": "eu-west"}) is None


@pytest.mark.parametrize("end", [".zarr", ".nc", ".nii.gz", ".npy", ".h5"])
def test_opening_what_does_not_answer(end):
    for options in (ONCE, {**ONCE, "client_options": {"default_headers": {"authorization": "Bearer hunter2"}}}):
        with pytest.raises(ReadError, match="127") as caught:
            jigsaw.io.open(URL.format(end=end), mesh=world_mesh(lat=1), fields=["t2m"], options=options)
        assert "hunter2" not in "".join(told(caught.value))


@pytest.mark.parametrize(
    "options",
    [
        {"region": ["hunter2"], "secret_access_key": "hunter2"},
        {"hunter": "hunter2", "token": "hunter2"},
        {"client_options": {"timeout": "hunter2"}},
        {"skip_signature": "hunter2"},
    ],
)
def test_options_that_are_refused(options):
    with pytest.raises(UnsupportedStoreError) as caught:
        jigsaw.io.open("s3://anna:hunter2@bucket/a.zarr", mesh=world_mesh(lat=1), fields=["t2m"], options=options)
    assert "hunter2" not in "".join(told(caught.value))
    assert all(name in str(caught.value) for name in options)


@pytest.mark.parametrize(
    "given", [{"secret_access_key": "hunter2", "region": "hunter2"}, "password=hunter2", "hunter2"]
)
def test_options_where_there_is_no_url(tmp_path, given):
    with pytest.raises(UnsupportedStoreError, match="options=") as caught:
        jigsaw.io.open(str(tmp_path), mesh=world_mesh(lat=1), fields=["t2m"], options=given)
    assert "hunter2" not in "".join(told(caught.value))


@pytest.mark.parametrize(
    "url", ["gcs://bucket/a.zarr", "memory://u:hunter2@a/b?k=hunter2", "simplecache::nope://u:hunter2@h/x"]
)
def test_stores_of_fsspec(url):
    with pytest.raises(UnsupportedStoreError) as caught:
        jigsaw.io.open(url, mesh=world_mesh(lat=1), fields=["t2m"], options={"token": "hunter2", "x": ["hunter2"]})
    assert "hunter2" not in "".join(told(caught.value))


@pytest.fixture
def served(wb2):
    """The address of a server of the store's folder, which asks for nothing."""
    zarr.consolidate_metadata(str(wb2))
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(quiet, directory=Path(wb2).parent)
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://anna:hunter2@127.0.0.1:{server.server_address[1]}/{Path(wb2).name}?token=hunter2"
        server.shutdown()
        thread.join()


def test_reports_of_a_store_that_is_opened_with_them(served, tmp_path, capsys):
    headers = {"client_options": {"default_headers": {"authorization": "Bearer hunter2"}}}
    cache = jigsaw.io.DiskCache(tmp_path / "cache", 10**9)
    ds = jigsaw.io.open(served, mesh=world_mesh(lat=1), fields=["t2m"], options=headers, disk_cache=cache)
    shown = [repr(ds), str(ds.plan(0)), repr(ds.source), ds.store.url, plan_report(ds, ds.plan(0))]
    shown += [str(p) for p in (tmp_path / "cache").rglob("*")]
    assert main(["inspect", served, "--json"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told)["url"].startswith("http://127.0.0.1")
    assert main(["inspect", served]) == 0
    shown += [told, capsys.readouterr().out, json.dumps(jigsaw.io.statistics(ds).attrs, default=str)]
    assert not [text for text in shown if "hunter2" in text]


def test_a_pickled_dataset_opens_the_store_again_and_so_holds_them(served):
    """As docs/design.md says: those of the environment stay out of it."""
    ds = jigsaw.io.open(served, mesh=world_mesh(lat=1), fields=["t2m"])
    assert b"hunter2" in pickle.dumps(ds)
    assert "hunter2" not in repr(pickle.loads(pickle.dumps(ds)))
