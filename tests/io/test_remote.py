"""Stores behind HTTP: values, requests and bytes counted by a proxy, servers that fail, are slow or lie."""

import json
import pickle
import re
import time
from dataclasses import replace
from datetime import timedelta

import globe_store
import numpy as np
import pytest
import zarr
from fault_proxy import Proxy
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore
from remote_servers import nginx
from toy_store import V2, held, layout, request, sample, write

import jigsaw
from jigsaw.errors import FetchError, MissingArrayError, MissingChunkError, UnsupportedStoreError
from jigsaw.geometry.layout import Layout
from jigsaw.io.chunks.remote_files import RemoteFiles, files_of_url
from jigsaw.io.formats.zarr_group import open_zarr
from jigsaw.io.reading.chunk_readers import PLAN_MODES
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.read_plan import plan_read, read_cost
from jigsaw.io.series.request import ReadPart, ReadRequest
from jigsaw.testing import run_on_ranks, world_mesh

QUICK = {
    "retry_config": {"max_retries": 4, "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": 0.02}},
    "client_options": {"read_timeout": "300ms"},
}
FORMS = [("v2", "blosc"), ("v2", "delta"), ("v3", "plain"), ("sharded", "default"), ("sharded", "two-compressors")]
BIG = (4, 2, 192, 192)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A folder of stores, and what they hold."""
    root = tmp_path_factory.mktemp("www")
    values = {}
    for form in FORMS:
        path, values["-".join(form)] = write(root, form)
        zarr.consolidate_metadata(path)
    path, values["v3-default"] = write(root, ("v3", "default"))  # not consolidated
    values["big"] = write_big(root / "big.zarr")
    return root, values


def write_big(path):
    """Chunks of which a part is worth reading: Blosc frames and plain values, of 4.7 MB a step."""
    x = np.random.default_rng(0).integers(0, 4096, (2, 8, 384, 384)).astype("f4")
    group = zarr.open_group(str(path), mode="w", zarr_format=2)
    for name, codec in (("blosc", V2["blosc"]), ("plain", V2["none"])):
        made = group.create_array(name, shape=x.shape, chunks=(1, 8, 384, 384), dtype="f4", fill_value=None, **codec)
        made.attrs["_ARRAY_DIMENSIONS"] = ["time", "level", "lat", "lon"]
        made[...] = x
    zarr.consolidate_metadata(group.store)
    return x


@pytest.fixture(scope="module")
def server(stores, tmp_path_factory):
    with nginx(stores[0], tmp_path_factory.mktemp("nginx")) as address:
        yield address


@pytest.fixture
def proxy(server):
    """One for each test: requests that another test gave up, and that are tried again, are not counted."""
    with Proxy(server) as made:
        yield made


def at(proxy, name):
    return f"http://{proxy.address}/{name}.zarr"


def read_all(table):
    """An array through its chunk table."""
    got = np.empty(table.shape, np.dtype(table.dtype).newbyteorder("="))
    for index in table.grid.indices():
        room = np.empty(table.grid.chunk_bytes, np.uint8)
        if table.loader.load(index, room).stored is None:
            table.loader.fill(room, index)
        box = tuple(slice(*rows) for rows in table.grid.box_of(index))
        got[box] = table.loader.view(room, index)[tuple(slice(s.stop - s.start) for s in box)]
    return got


def expected(values, asked, member=0):
    return held(sample(values), asked.layout, list(asked.layout.coords())[member]).astype(asked.dtype)


# -- values and counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_every_form_gives_its_values(stores, proxy, form):
    name = "-".join(form)
    store = open_zarr(at(proxy, name))
    assert store.url == at(proxy, name)
    assert proxy.methods.keys() == {"GET"}
    for array, x in stores[1][name].items():
        table = store.arrays[array]
        np.testing.assert_array_equal(read_all(table), x)
        np.testing.assert_array_equal(store.read_small(array), x)


def two_levels(array):
    """Levels 2 and 5 of a step of the big store."""
    parts = (ReadPart(array, (((1, 0),), ((2, 0), (5, 1)), None, None), (0, 1, 2, 3)),)
    return ReadRequest(layout(2, 1, (384, 384), {}), parts)


CASES = {
    "v2-blosc": request({}, halo=2),
    "v3-plain": request({}, halo=2),
    "sharded-default": request({}, halo=2),
    "big": two_levels("blosc"),
    "big-plain": two_levels("plain"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_is_what_is_asked_for(stores, proxy, case):
    engine = ReadEngine(open_zarr(at(proxy, case.removesuffix("-plain") if "big" in case else case)), None)
    asked, arrays = CASES[case], engine.store.arrays
    try:
        proxy.clear()
        plan = plan_read(asked, arrays)
        assert plan.lookups == engine.looked_up == (proxy.count, proxy.body_bytes)
        assert (plan.lookups.requests > 0) == (case in ("sharded-default", "big"))

        whole = [job for job in plan.jobs if plan.ref(job.array, job.chunk).length is None and not plan.part_of(job)]
        assert (plan.total.stored is None) == bool(whole) and plan.total.unsized == len(whole)
        plan = plan.ask_sizes()
        assert proxy.methods["HEAD"] == len(plan.sizes) >= len(whole)
        assert plan.total.unsized == 0 and plan.total.stored == plan.total.stored_bytes > 0

        for _ in range(2):
            proxy.clear()
            engine.stats = type(engine.stats)()
            engine.read(plan)
            assert proxy.count == engine.stats.requests and (engine.stats,) == plan.rows
            # bytes between wanted inner chunks come with them, and those between wanted blocks
            assert proxy.body_bytes >= engine.stats.stored_bytes
            assert case != "v2-blosc" or proxy.body_bytes == engine.stats.stored_bytes
            assert case != "sharded-default" or engine.stats.requests < engine.stats.chunks
            proxy.clear()
            assert plan_read(asked, arrays).lookups == plan.lookups and proxy.count == 0  # they are kept
    finally:
        engine.close()
    assert engine.looked_up == plan.lookups


@pytest.mark.parametrize("mode", PLAN_MODES)
@pytest.mark.parametrize("name", ["v2-blosc", "sharded-default"])
def test_the_cost_is_that_of_what_will_be_done(stores, proxy, name, mode):
    arrays = open_zarr(at(proxy, name)).arrays
    asked = request({"lat": 2}, halo=2)
    air = replace(asked, parts=asked.parts[:1])
    plan = plan_read(air, arrays, mode)
    total = plan.total
    stored = total.stored_bytes or total.decoded_bytes  # of unknown size
    done = total.requests, stored, total.decoded_bytes, total.sent_bytes, len(plan.shared)
    assert plan.cost("air", mode) == pytest.approx(read_cost(arrays["air"], *done))
    assert name == "v2-blosc" or total.requests < total.chunks


@pytest.mark.parametrize("array", ["blosc", "plain"])
def test_less_than_a_chunk(stores, proxy, array):
    table = open_zarr(at(proxy, "big")).arrays[array]
    rect = tuple(((a, b),) for a, b in ((0, 1), (2, 3), (100, 300), (0, 384)))
    proxy.clear()
    part = table.finder.portion((1, 0, 0, 0), [rect])
    assert proxy.count == (1 if array == "blosc" else 0)
    table.finder.portion((1, 0, 0, 0), [rect])
    assert proxy.count == (1 if array == "blosc" else 0)  # the table of blocks is kept
    proxy.clear()
    room = np.zeros(table.grid.chunk_bytes, np.uint8)
    loaded = table.loader.load((1, 0, 0, 0), room, part)
    np.testing.assert_array_equal(table.loader.view(room, (1, 0, 0, 0))[0, 2, 100:300], stores[1]["big"][1, 2, 100:300])
    assert proxy.count == loaded.requests == len(part.ranges)
    assert proxy.body_bytes == loaded.stored == part.stored < 0.25 * table.grid.chunk_bytes
    assert table.finder.portion((1, 0, 0, 0), [tuple(((0, n),) for n in table.chunks)]) is None


def test_many_requests_are_under_way(stores, proxy):
    engine = ReadEngine(open_zarr(at(proxy, "v2-blosc")), None)
    proxy.hold = 32  # nobody gets an answer before so many have asked
    proxy.clear()
    asked = request({}, steps=(0, 1, 2, 3))
    engine.read(plan_read(asked, engine.store.arrays))
    assert proxy.most_at_once == 32 < proxy.count
    engine.close()


@pytest.mark.parametrize("chunks", [1, 4, 7])
def test_one_budget_for_what_is_fetched_and_what_is_decoded(stores, proxy, chunks):
    """A chunk is being decoded, and what else the budget has room for is fetched: one at least."""
    store = open_zarr(at(proxy, "v2-blosc"))
    size = store.arrays["air"].grid.chunk_bytes
    engine = ReadEngine(store, None, threads=1, budget=chunks * size)
    proxy.hold = max(chunks - 1, 1)  # nobody gets an answer before so many have asked
    proxy.clear()
    try:
        times, levels = (tuple((i, i) for i in range(n)) for n in (4, 3))
        alone = ReadPart("air", (times, levels, None, None), (0, 1, 2, 3))
        engine.read(plan_read(ReadRequest(layout(3, 4, (13, 10), {}), (alone,)), store.arrays))
        assert proxy.most_at_once == max(chunks - 1, 1)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_missing_object_is_a_missing_chunk(tmp_path, tmp_path_factory):
    group = zarr.open_group(str(tmp_path / "m.zarr"), mode="w")
    for name, size in (("small", 8), ("large", 1 << 21)):
        made = group.create_array(name, shape=(2, size), chunks=(1, size), dtype="f4", fill_value=9)
        made[1] = 4
    zarr.consolidate_metadata(group.store)
    with nginx(tmp_path, tmp_path_factory.mktemp("nginx")) as address, Proxy(address) as proxy:
        store = open_zarr(f"http://{proxy.address}/m.zarr")
        for name, table in store.arrays.items():
            plan = plan_read(one_step(name, table.shape[1]), store.arrays)
            assert (plan.total.chunks, plan.total.stored) == (1, None)
            plan = plan.ask_sizes()
            assert (plan.total.requests, plan.total.chunks, plan.total.stored) == (1, 0, 0)
            engine = ReadEngine(store, None)
            assert engine.read(plan).ravel().tolist() == [9] * table.shape[1]
            assert (engine.stats,) == plan.rows
            engine.close()
            room = np.full(table.grid.chunk_bytes, 7, np.uint8)
            assert table.finder.portion((0, 0), [(((0, 1),), ((3, 4),))]) is None
            assert table.loader.load((0, 0), room).stored is None
            assert (room == 7).all()
            with pytest.raises(MissingChunkError, match=rf"chunk \(0, 0\) of array '{name}' is missing"):
                store.read_small(name)  # a coordinate of several values is never all fill
            proxy.always, proxy.spoils = "403", f"{name}/c/0"
            with pytest.raises(FetchError, match=r"m.zarr/\w+/c/0/0 cannot be read: the server answered 403"):
                table.loader.load((0, 0), room)


def one_step(array, size):
    parts = (ReadPart(array, (((0, 0),), None), (0, 3), at=((1, 0), (2, 0))),)
    return ReadRequest(Layout.of((1, 1, 1, size), (None, None, "lat", "lon"), {}), parts, missing="fill")


# -- opening ---------------------------------------------------------------------------------------------------------


def test_missing_chunks_of_shards_take_no_request(tmp_path, tmp_path_factory):
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    for name, fill in (("a", 3.0), ("b", 4.0)):
        options = {"dimension_names": ("time", "lat", "lon"), "fill_value": fill}
        made = group.create_array(name, shape=(1, 8, 8), chunks=(1, 2, 2), shards=(1, 8, 8), dtype="f4", **options)
        made[0, 2:4] = 1.0
    zarr.consolidate_metadata(group.store)
    with nginx(tmp_path, tmp_path_factory.mktemp("nginx")) as address, Proxy(address) as proxy:
        ds = jigsaw.io.open(at(proxy, "s"), mesh=world_mesh(lat=1, lon=1), fields=["a", "b"], mode="independent")
        plan = ds.plan(0)
        proxy.clear()
        got = ds[0].input.local.numpy()
        assert proxy.count == plan.total.requests > 0
    np.testing.assert_array_equal(got[0], np.stack([group["a"][0], group["b"][0]]))


def test_without_listing_the_arrays_are_named(stores, proxy):
    url = at(proxy, "v3-default")
    with pytest.raises(UnsupportedStoreError, match=r"cannot be listed: it has no consolidated metadata.*'arrays'"):
        open_zarr(url)
    proxy.clear()
    store = open_zarr(url, {"arrays": ["air", "mask"]})
    assert sorted(store.arrays) == ["air", "mask"]
    assert {path.rpartition("/")[0] for _, path, _ in proxy.requests} >= {
        f"/v3-default.zarr/{d}" for d in ("lat", "lon")
    }
    np.testing.assert_array_equal(read_all(store.arrays["air"]), stores[1]["v3-default"]["air"])
    with pytest.raises(MissingArrayError, match="has no array 'sst'"):
        open_zarr(url, {"arrays": ["sst"]})


def test_what_is_no_store(proxy):
    with pytest.raises(UnsupportedStoreError, match=f"//{proxy.address}/nothing.zarr cannot be opened as a"):
        open_zarr(at(proxy, "nothing"))
    with pytest.raises(UnsupportedStoreError, match=r"s3://bucket/x cannot be opened with options \['anon'\].*region"):
        open_zarr("s3://bucket/x", {"anon": True})


def test_the_files_pickle(proxy):
    files, path = files_of_url(at(proxy, "v2-blosc") + "/.zgroup", QUICK)
    again = pickle.loads(pickle.dumps(files))
    assert (again.name, again.retry) == (files.name, files.retry)
    assert json.loads(again.whole(path, np.empty).tobytes()) == {"zarr_format": 2}


# -- the objects -----------------------------------------------------------------------------------------------------


def test_ranges_near_each_other_are_one_request(stores, proxy):
    whole = (stores[0] / "big.zarr/plain/0.0.0.0").read_bytes()
    files, path = files_of_url(at(proxy, "big") + "/plain/0.0.0.0")
    places = [(3_000_000, 10), (0, 16), (16, 100), (200_000, 50), (1_500_000, 7), (3_000_005, 20)]
    targets = [(start, np.empty(length, np.uint8)) for start, length in places]
    assert files.ranges(path, targets)
    assert all(memory.tobytes() == whole[start : start + memory.size] for start, memory in targets)
    assert sorted(part for _, _, part in proxy.requests) == [
        "bytes=0-200049",
        "bytes=1500000-1500006",
        "bytes=3000000-3000024",
    ]
    proxy.clear()
    assert files.size(path) == len(whole) and files.size("nothing") is None
    assert files.whole("nothing", np.empty) is None
    assert not files.ranges("nothing", [(0, np.empty(4, np.uint8))])
    raw, size = files.edge(path, 12, at_end=True)
    assert (raw.tobytes(), size) == (whole[-12:], len(whole))
    with pytest.raises(Exception, match=f"10 bytes at {len(whole) - 5} and the object has {len(whole)}"):
        files.ranges(path, [(len(whole) - 5, np.empty(10, np.uint8))])
    with pytest.raises(Exception, match="the object ends before the range"):
        files.ranges(path, [(len(whole) + 5, np.empty(10, np.uint8))])


def test_an_object_that_changes_is_refused(tmp_path, tmp_path_factory):
    path, _ = write(tmp_path, ("sharded", "default"))
    zarr.consolidate_metadata(path)
    with nginx(tmp_path, tmp_path_factory.mktemp("nginx")) as address:
        table = open_zarr(f"http://{address}/sharded-default.zarr").arrays["air"]
        room = np.empty(table.grid.chunk_bytes, np.uint8)
        table.loader.load((0, 0, 0, 0), room)
        shard = tmp_path / "sharded-default.zarr/air/c/0/0/0/0"
        shard.write_bytes(bytes(100) + shard.read_bytes())
        with pytest.raises(jigsaw.errors.CorruptChunkError, match="changed since it was first read"):
            table.loader.load((1, 0, 0, 0), room)


# -- servers that fail -----------------------------------------------------------------------------------------------


FAULTS = ("500", "503", "429", "reset", "truncate", "stall")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("v2-blosc", f) for f in FAULTS] + [("sharded-default", f) for f in (*FAULTS, "short", "shift")],
)
def test_what_passes_is_tried_again(stores, proxy, name, fault):
    table = open_zarr(at(proxy, name), QUICK).arrays["air"]
    table.finder.locate((0, 0, 0, 0))
    proxy.clear()
    proxy.faults = [fault, fault]
    room = np.empty(table.grid.chunk_bytes, np.uint8)
    table.loader.load((0, 0, 0, 0), room)
    np.testing.assert_array_equal(table.loader.view(room, (0, 0, 0, 0)), stores[1][name]["air"][:1, :, :5, :4])
    assert proxy.count == 3


def test_metadata_and_coordinates_are_tried_again(stores, proxy):
    proxy.faults = ["503", "truncate", "reset", "503"]
    store = open_zarr(at(proxy, "v2-delta"), QUICK)
    proxy.faults = ["truncate", "500"]
    np.testing.assert_array_equal(store.read_small("mask"), stores[1]["v2-delta"]["mask"])
    assert not proxy.faults


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("503", r"given up after 5 tries in \d+\.\d s; the last answer: 503 Service Unavailable \(SlowDown\)"),
        ("truncate", "given up after 5 tries in .* s; the last answer: .*body"),
        ("reset", "given up after 5 tries in .* s; the last answer: HTTP error"),
        ("stall", "given up after 5 tries in .* s; the last answer: none within the time-out"),
        ("403", r"the server answered 403 Forbidden \(SlowDown\)"),
        ("401", "the server answered 401 Unauthorized"),
        ("400", "the server answered 400 Bad Request"),
    ],
)
def test_what_does_not_pass_names_the_object_and_the_answer(stores, proxy, fault, answer):
    url = at(proxy, "v2-blosc").replace("//", "//user:secret@") + "?token=secret"
    table = open_zarr(url, QUICK).arrays["air"]
    proxy.always = fault
    proxy.clear()
    place = re.escape(
        f"chunk (1, 0, 0, 0) of array 'air' in v2-blosc.zarr/air/1.0.0.0 cannot be read: http://{proxy.address}"
    )
    with pytest.raises(FetchError, match=f"{place}/v2-blosc.zarr/air/1.0.0.0 cannot be read: {answer}") as caught:
        table.loader.load((1, 0, 0, 0), np.empty(table.grid.chunk_bytes, np.uint8))
    assert "secret" not in str(caught.value)
    assert proxy.count == (5 if "given up" in answer else 1)
    assert proxy.requests[0][1].endswith("?token=secret")


@pytest.mark.parametrize("kind", [PermissionDeniedError, UnauthenticatedError])
def test_what_is_refused_is_known_by_its_type(kind):
    asked = []

    def ask():
        asked.append(kind)
        raise kind("said in other words")

    with pytest.raises(FetchError, match="s/a cannot be read: the server answered said in other words"):
        RemoteFiles(MemoryStore(), "s")._tried("a", ask)
    assert len(asked) == 1


def test_a_server_without_ranges_is_refused(proxy):
    table = open_zarr(at(proxy, "sharded-default"), QUICK).arrays["air"]
    proxy.always = "ignore"
    with pytest.raises(FetchError, match=r"air/c/0/0/0/0 cannot be read in part: the server ignores ranges"):
        table.finder.locate((0, 0, 0, 0))
    table = open_zarr(at(proxy, "big"), QUICK).arrays["plain"]
    with pytest.raises(FetchError, match=r"chunk .* the server ignores ranges"):
        table.loader.load(
            (0, 0, 0, 0), np.empty(table.grid.chunk_bytes, np.uint8), table.finder.portion((0, 0, 0, 0), [PART])
        )


PART = tuple(((a, b),) for a, b in ((0, 1), (2, 3), (100, 300), (0, 384)))


# -- on ranks --------------------------------------------------------------------------------------------------------


def body_of_ranks(url, values, mode):
    axes = {"lat": 2}
    engine = ReadEngine(open_zarr(url, QUICK), world_mesh(**axes))
    try:
        asked = request(axes, halo=2)
        plan = engine.plan(lambda: plan_read(asked, engine.store.arrays, mode))
        np.testing.assert_allclose(engine.read(plan), expected(values, asked, engine.peers.me), rtol=2e-6)
        return plan.rows[engine.peers.me].requests == engine.stats.requests
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["cooperative", "independent", "neighbors"])
@pytest.mark.parametrize("name", ["v2-blosc", "sharded-default"])
def test_ranks_read_the_same(stores, proxy, name, mode):
    proxy.always = ""
    assert run_on_ranks(2, body_of_ranks, at(proxy, name), stores[1][name], mode) == [True, True]


def body_that_fails(url, values, mode):
    begun = time.monotonic()
    with pytest.raises(FetchError, match=r"cannot be read: the server answered 403"):
        body_of_ranks(url, values, mode)
    return time.monotonic() - begun < 20


@pytest.mark.parametrize(("name", "spoils"), [("v2-blosc", "air/1.0.0.0"), ("sharded-default", "air/c/0/0/0/0")])
def test_a_failure_is_told_to_every_rank(stores, proxy, name, spoils):
    """A chunk that one of two ranks fetches; the index of a shard, for all but the first who asks."""
    proxy.always, proxy.spoils = "403", spoils
    proxy.faults = [""] if name == "sharded-default" else []
    assert run_on_ranks(2, body_that_fails, at(proxy, name), stores[1][name], "cooperative") == [True, True]


@pytest.fixture(scope="module")
def globe_proxy(tmp_path_factory):
    root = tmp_path_factory.mktemp("globes")
    for form in ("v2", "sharded"):
        zarr.consolidate_metadata(globe_store.write(root / f"{form}.zarr", globe_store.globe(), form, (3, 2, 5, 7)))
    with nginx(root, tmp_path_factory.mktemp("nginx")) as address, Proxy(address) as made:
        yield root, made


@pytest.mark.parametrize("steps_kept", [0, 3])
@pytest.mark.parametrize("form", [pytest.param("v2", marks=pytest.mark.slow), "sharded"])
def test_a_loader_reads_ahead_over_samples(globe_proxy, form, steps_kept):
    root, proxy = globe_proxy
    data = jigsaw.io.open(
        f"http://{proxy.address}/{form}.zarr", mesh=jigsaw.init_mesh(data=1, device="cpu"), inputs=[0, 1]
    )
    whole = globe_store.stacked(str(root / f"{form}.zarr"), data.fields)
    proxy.latency = 0.002
    proxy.clear()
    kept = steps_kept * data.sample_bytes() // 2
    loader = jigsaw.io.DataLoader(data, batch_size=2, shuffle=True, seed=3, cache_bytes=kept)
    seen = []
    for batch in loader:
        for values, sample_number in zip(batch.input.local.numpy(), batch.samples, strict=True):
            np.testing.assert_allclose(values, whole[sample_number : sample_number + 2], rtol=1e-6)
            seen.append(sample_number)
    assert sorted(seen) == list(range(len(data)))
    indices = [part for _, _, part in proxy.requests if part and part.startswith("bytes=-")]
    # what was fetched ahead was what was then read
    assert proxy.count == loader._engine.stats.requests + len(indices)
    for _ in loader:  # given up in the middle: what was expected is forgotten
        break
    loader.close()
