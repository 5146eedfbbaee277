"""Sources of the user: tiles, windows, counted reads, errors on every rank; the code of docs/sources.md."""

import contextlib
import os
import pickle
import re
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

import jigsaw
from jigsaw.errors import GridError, ReadError, UnsupportedStoreError
from jigsaw.io.formats.array_source import ArraySource, SourceArray, claims, open_array_source
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

DOC = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()


class Memory:
    """A series [10, 3, 13, 16] at levels and one without; it remembers what it was asked for."""

    def __init__(self, chunks=None, wrong=None):
        r = np.random.default_rng(0)
        self.values = {
            "temperature": r.normal(size=(10, 3, 13, 16)).astype("f4"),
            "t2m": r.integers(-300, 300, (10, 13, 16)).astype("i2"),
        }
        dims = ("time", "level", "lat", "lon")
        self.arrays = {
            "temperature": SourceArray((10, 3, 13, 16), "f4", dims),
            "t2m": SourceArray((10, 13, 16), "i2", (dims[0], *dims[2:]), {"scale_factor": 0.5, "_FillValue": 7}),
        }
        self.coords = {
            "time": np.datetime64("2020-01-01") + np.arange(10),
            "level": (np.array([500, 700, 850]), {"units": "hPa"}),
            "lat": np.linspace(90, -90, 13),
            "lon": np.arange(16) * 22.5,
        }
        self._chunks, self._wrong = chunks, wrong
        self.asked = []

    def __getstate__(self):
        return {"_chunks": self._chunks, "_wrong": self._wrong}

    def __setstate__(self, state):
        self.__init__(state["_chunks"], state["_wrong"])

    def chunks(self, array):
        return self._chunks and tuple(self._chunks[d] for d in self.arrays[array].dims)

    def read(self, array, box):
        self.asked.append((array, box))
        found = self.values[array][tuple(slice(*rows) for rows in box)]
        if self._wrong is None:
            return found
        return self._wrong(found)


def _dtype(x):
    return x.astype("f8")


def _shape(x):
    return x[..., :-1]


def _listed(x):
    return x.tolist()


def _raises(x):
    raise KeyError("no such thing")


FIELDS = ["temperature@700", "t2m"]
CHUNKS = {"time": 2, "level": 3, "lat": 5, "lon": 16}


def expected(source, steps):
    t2m = source.values["t2m"][steps]
    return np.stack([source.values["temperature"][steps, 1], np.where(t2m == 7, np.nan, t2m * 0.5)], axis=1)


@pytest.mark.parametrize("chunks", [None, CHUNKS], ids=["any", "chunked"])
def test_samples_are_what_the_source_has(chunks):
    source = Memory(chunks)
    assert claims(source) and isinstance(source, ArraySource)
    ds = jigsaw.io.open(open_array_source(source), mesh=world_mesh(lat=1), fields=FIELDS, inputs=[-1, 0], targets=[1])
    for i in (0, 3, 7):
        np.testing.assert_array_equal(ds[i].input.full_tensor().numpy(), expected(source, slice(i, i + 2)))
        np.testing.assert_array_equal(ds[i].target.full_tensor().numpy(), expected(source, slice(i + 2, i + 3)))
    assert ds.input_times(3)[0] == np.datetime64("2020-01-04")


def test_chunks_are_asked_for_whole_and_once():
    source = Memory(CHUNKS)
    ds = jigsaw.io.open(open_array_source(source), mesh=world_mesh(lat=1), fields=["t2m"], inputs=[0, 1, 2])
    source.asked.clear()
    ds[1]
    rows = [((t, t + 2), (a, min(a + 5, 13)), (0, 16)) for t in (0, 2) for a in (0, 5, 10)]
    assert sorted(source.asked) == [("t2m", box) for box in rows]
    assert ds.plan(1).total.chunks == ds.plan(1).total.fallback == 6


def test_without_chunks_only_the_needed_rows_are_asked_for():
    class Wide:
        @property
        def arrays(self):
            return {"a": SourceArray((3, 512, 1024), "f4", ("time", "lat", "lon"))}

        def read(self, array, box):
            asked.append(box)
            return np.zeros([b - a for a, b in box], "f4")

    asked = []
    store = open_array_source(Wide())
    ds = jigsaw.io.open(store, mesh={"lat": 4}, fields=["a"], spec={"lat": "lat"}, mode="independent")
    assert [row.decoded_bytes for row in ds.plan(0).rows] == [128 * 1024 * 4] * 4
    table = store.arrays["a"]
    part = table.finder.portion((1, 0, 0), [(((0, 1),), ((100, 228),), ((0, 1024),))])
    table.loader.load((1, 0, 0), np.empty(table.grid.bytes_of((1, 0, 0)), "u1"), part)
    assert asked == [((1, 2), (100, 228), (0, 1024))]


@on_ranks(2)
def test_ranks_share_what_is_read():
    source = Memory(CHUNKS)
    mesh = world_mesh(lat=2)
    more = {"halo": 1, "boundary": {"lon": "periodic"}, "mode": "cooperative"}
    ds = jigsaw.io.open(open_array_source(source), mesh=mesh, fields=FIELDS, inputs=[0, 1], targets=[2], **more)
    np.testing.assert_array_equal(ds[2].input.full_tensor().numpy(), expected(source, slice(2, 4)))
    planned = ds.plan(2).rows[mesh.get_rank()]
    assert ds._engine.stats == planned and planned.fallback == len(source.asked) > 0
    loader = jigsaw.io.DataLoader(ds, batch_size=3, shuffle=True, seed=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.samples for batch in iterator]
    loader.load_state_dict(state)
    assert [batch.samples for batch in loader] == rest
    loader.close()


def _reads(name):
    source = Memory(CHUNKS, globals()[name] if world_mesh(lat=2).get_rank() == 1 else None)
    ds = jigsaw.io.open(open_array_source(source), mesh=world_mesh(lat=2), fields=["t2m"], mode="cooperative", halo=1)
    try:
        ds[0]
    except ReadError as e:
        return type(e).__name__, str(e)
    return None


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("_raises", "raised KeyError: 'no such thing'"),
        ("_shape", r"gave int16\[2, \d, 15\], and int16\[2, \d, 16\] is what arrays describes"),
        ("_dtype", r"gave float64\[2, \d, 16\], and int16"),
        ("_listed", "gave list, and int16"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_known_to_all(wrong, match):
    told = run_on_ranks(2, _reads, wrong)
    for kind, message in told:
        assert kind == "ReadError"
        assert re.search(rf"Memory\.read\('t2m', .*\) {match}", message)


def test_a_source_pickles_as_it_is():
    again = pickle.loads(pickle.dumps(Memory(CHUNKS)))
    ds = jigsaw.io.open(open_array_source(again), mesh=world_mesh(lat=1), fields=FIELDS)
    np.testing.assert_array_equal(ds[4].input.full_tensor().numpy(), expected(again, slice(4, 5)))


def test_read_is_called_by_several_threads():
    seen, both = set(), threading.Barrier(2, timeout=10)

    class Slow(Memory):
        def read(self, array, box):
            seen.add(threading.get_ident())
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait()
            return super().read(array, box)

    ds = jigsaw.io.open(open_array_source(Slow(CHUNKS)), mesh=world_mesh(lat=1), fields=["t2m"], inputs=[0, 2])
    engine = ds.new_engine(threads=2)
    engine.read(ds.plan(0))
    engine.close()
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"arrays": {}}, UnsupportedStoreError, "describes no array"),
        ({"arrays": {"a": (3, 4)}}, UnsupportedStoreError, r"by \(3, 4\); give jigsaw.io.SourceArray"),
        ({"arrays": {"a": SourceArray((3,), "f4", ("y", "x"))}}, GridError, r"dims \('y', 'x'\) must name each dim"),
        (
            {"arrays": {n: SourceArray((i, 3), "f4", ("y", "x")) for i, n in ((1, "a"), (2, "b"))}},
            GridError,
            "dim 'y' has 1 rows and 2 in array 'b'",
        ),
        ({"coords": {"lat": np.arange(4)}}, GridError, r"coords\['lat'\] of source Memory has shape \(4,\)"),
        (
            {"arrays": [SourceArray((3,), "f4", ("x",))]},
            UnsupportedStoreError,
            "Memory: arrays is a list, .* by name, like",
        ),
        ({"arrays": dict}, UnsupportedStoreError, "arrays is a method, and an attribute or property is asked for"),
        ({"coords": [1, 2]}, UnsupportedStoreError, "coords is a list"),
        ({"attrs": "mine"}, UnsupportedStoreError, "attrs is a str"),
        (
            {"chunks": (1, 2)},
            UnsupportedStoreError,
            r"chunks is \(1, 2\), and a method is asked for .* def chunks\(self",
        ),
        ({"chunks": lambda name: 3}, GridError, r"chunks\('temperature'\) gave 3; it gives the rows of a chunk"),
        ({"_chunks": dict.fromkeys(CHUNKS, 0)}, GridError, r"chunks\('temperature'\) gave \(0, 0, 0, 0\)"),
    ],
)
def test_descriptions_that_do_not_fit(change, kind, match):
    source = Memory()
    vars(source).update(change)
    with pytest.raises(kind, match=match):
        open_array_source(source)


def test_what_is_no_source():
    assert not any(claims(x) for x in ("path", Memory, 3, {"arrays": 1}, os.sep))
    with pytest.raises(UnsupportedStoreError, match=r"Memory is a class, and its instances can be opened: Memory\("):
        jigsaw.io.open(Memory, mesh={})


# -- the tutorial ------------------------------------------------------------------------------------------------------


@pytest.fixture
def days(tmp_path):
    values = np.random.default_rng(0).integers(-2000, 2000, (6, 33, 64)).astype("i2")
    (tmp_path / "days").mkdir()
    for i, day in enumerate(values):
        text = b"Daily 1.0\n" + zlib.compress(day.tobytes())
        (tmp_path / "days" / f"2020-01-{i + 1:02}.day").write_bytes(text)
    return tmp_path, values


def test_the_code_of_the_tutorial_runs(days, capsys):
    folder, values = days
    code = re.findall(r"^```python\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    left = {}
    with contextlib.chdir(folder):
        for block in code:
            exec(compile(block, "docs/sources.md", "exec"), left)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("torch.Size([2, 2, 1, 33, 64]) ['2020-01-0")
    assert printed[-1] == "Broken.read('t2m', ((0, 1), (0, 33), (0, 64))) raised OSError: the tape is torn"
    assert printed[-1] in DOC
    with contextlib.chdir(folder):
        sample = left["ds"][2].target.full_tensor().numpy()
    np.testing.assert_allclose(sample[0, 0], values[4] * 0.01 / 10, rtol=1e-4, atol=1e-5)


def _masked(x):
    return np.ma.masked_array(x, mask=np.broadcast_to(np.arange(x.shape[-1]) < 2, x.shape))


def test_masked_values_are_missing_and_never_read():
    source, mesh = Memory(wrong=_masked), jigsaw.init_mesh(lat=1)
    tile = jigsaw.io.open(source, mesh=mesh, fields=["temperature"], nan="keep")[3].input
    expected = source.values["temperature"][3].copy()
    expected[..., :2] = np.nan
    np.testing.assert_array_equal(tile.local[0].numpy(), expected)
    with pytest.raises(ReadError, match="missing values"):
        jigsaw.io.open(source, mesh=mesh, fields=["temperature"], nan="raise")[3]
    with pytest.raises(ReadError, match=r"masked values of int16, which has no NaN .*x.filled"):
        jigsaw.io.open(source, mesh=mesh, fields=["t2m"])[3]


def test_integers_have_the_sign_that_they_declare():
    source = Memory()
    declared = {"_Unsigned": "true", "scale_factor": 0.5}
    source.arrays["t2m"] = SourceArray((10, 13, 16), "i2", ("time", "lat", "lon"), declared)
    tile = jigsaw.io.open(source, mesh=jigsaw.init_mesh(lat=1), fields=["t2m"])[3].input
    expected = source.values["t2m"][3].view("u2") * 0.5
    np.testing.assert_array_equal(tile.local[0, 0].numpy(), expected.astype("f4"))
