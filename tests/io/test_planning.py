"""What is worked out once for chunks that lie alike equals what each chunk and rank gives by itself."""

import sys
from collections import Counter
from itertools import product
from math import prod

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Blosc, Zstd

from jigsaw.geometry.layout import Layout
from jigsaw.io.chunks import chunk_finder
from jigsaw.io.chunks.chunk import MOST_PORTION_SHARE, needed_share
from jigsaw.io.chunks.files import LocalFiles, merge_ranges
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading import found_chunks
from jigsaw.io.reading.chunk_readers import (
    GOLDEN_SECTION,
    NO_OWNER,
    PLAN_MODES,
    ChunkJob,
    ReadCounts,
    _numbers_read_by,
    order_of_jobs,
    owners_of_jobs,
)
from jigsaw.io.reading.found_chunks import spread_places
from jigsaw.io.reading.read_plan import plan_read, read_cost
from jigsaw.io.series.request import ReadPart, ReadRequest

MESHES = [{}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}, {"lon": 3, "lat": 2}, {"ens": 2, "lat": 2}]
STEPS, ROWS = 4, (37, 40)
FORMS = {
    "blosc": ((1, 37, 40), Blosc("lz4", 5, 1, blocksize=512)),
    "plain": ((2, 19, 40), None),
    "zstd": ((1, 37, 21), Zstd(1)),
    "fine": ((3, 8, 7), None),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Chunks that are divided however small they are; one of each array but the last is missing."""
    path, r = tmp_path_factory.mktemp("planning") / "s.zarr", np.random.default_rng(0)
    group = zarr.open_group(path, mode="w", zarr_format=2)
    for name, (chunks, codec) in FORMS.items():
        array = group.create_array(name, shape=(STEPS, *ROWS), chunks=chunks, dtype="f4", compressors=codec)
        array[...] = r.normal(size=array.shape).round(1)
        array.attrs["_ARRAY_DIMENSIONS"] = ("time", "lat", "lon")
    for name in ("blosc/2.0.0", "plain/1.1.0", "zstd/1.0.1"):
        (path / name).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_finder, "SMALLEST_DIVIDED_CHUNK", 1)
        found = open_store(path).arrays
        assert [table.finder.is_divisible for table in found.values()].count(True) == 3
    return found


class Enumerated:
    """A plan by its definition: row by row, rank by rank, chunk by chunk."""

    def __init__(self, asked, tables, mode, most_sizes):
        self.most_sizes = most_sizes
        self.asked, self.tables, self.ranks = asked, tables, list(range(asked.layout.ranks))
        self.coords = list(asked.layout.coords())
        self.names = list(dict.fromkeys(part.array for part in asked.parts))
        self.readers = {name: self.readers_of(name) for name in self.names}
        shared = {n for n in self.names if any(len(who) > 1 for who in self.readers[n].values())}
        self.modes = {
            n: "independent" if n not in shared else mode if mode != "auto" else min(PLAN_MODES, key=self.costs_of(n))
            for n in self.names
        }
        jobs = [(n, c, *load) for n in self.names for c in self.readers[n] for load in self.loads(n, c, self.modes[n])]
        self.private = [ChunkJob(*job) for job in jobs if len(job[3]) == 1]
        self.shared = self.balanced([ChunkJob(*job) for job in jobs if len(job[3]) > 1])

    def dims(self, name, chunk, rank, box):
        """Of one chunk, for each part, the stored rows along each dim that a rank's box shows, and where."""
        for part in (p for p in self.asked.parts if p.array == name):
            rows = []
            for d, (picks, to) in enumerate(zip(part.picks, part.to, strict=True)):
                size, (a, b) = self.tables[name].shape[d], box[to]
                taken = [(s, t) for s, t in picks if a <= t < b] if picks else [(x % size, x) for x in range(a, b)]
                low, high = self.tables[name].grid.box_of(chunk)[d]
                rows.append([(row - low, target - a) for row, target in taken if low <= row < high])
            yield rows

    def held(self, name, chunk, rank):
        found = self.dims(name, chunk, rank, self.asked.layout.held(self.coords[rank]))
        return [rows for rows in found if all(rows)]

    def values(self, name, chunk, rank):
        return sum(prod(map(len, rows)) for rows in self.held(name, chunk, rank))

    def owns(self, name, chunk, rank):
        return any(all(rows) for rows in self.dims(name, chunk, rank, self.asked.layout.owned(self.coords[rank])))

    def readers_of(self, name):
        who = {c: [m for m in self.ranks if self.held(name, c, m)] for c in self.tables[name].grid.indices()}
        return {chunk: ranks for chunk, ranks in who.items() if ranks}

    def counts(self, name, chunk, served):
        table = self.tables[name]
        ref, size = table.finder.locate(chunk), table.grid.bytes_of(chunk)
        if ref is None:
            return ReadCounts(missing=1)
        boxes = [rows for m in served for rows in self.held(name, chunk, m)]
        rects = [tuple(tuple(merge_ranges((row, row + 1) for row, _ in dim)) for dim in rows) for rows in boxes]
        shares = [needed_share([rect], table.grid.shape_of(chunk)) for rect in rects]
        part = table.finder.portion(chunk, rects) if max(shares) <= MOST_PORTION_SHARE else None
        if part is None or not table.finder.is_divisible:
            return ReadCounts(1, 1, 0, ref.length, size)
        return ReadCounts(len(part.ranges), 1, 0, part.stored, part.decoded)

    def loads(self, name, chunk, mode):
        readers = self.readers[name][chunk]
        if mode == "cooperative" or len(readers) == 1:
            return [(readers[0], tuple(readers))]
        owning = [m for m in readers if mode == "independent" or self.owns(name, chunk, m)] or readers[:1]
        borrowing = [m for m in readers if m not in owning]
        return [(owning[0], tuple(sorted([owning[0], *borrowing]))), *((m, (m,)) for m in owning[1:])]

    def is_asked(self, name):
        """Whether each chunk is asked for its size; what is read in part always is."""
        small = [n for n in self.names if not self.tables[n].finder.is_divisible]
        return name not in small or sum(len(self.readers[n]) for n in small) <= self.most_sizes

    def estimate(self, name, jobs):
        """All loads as if they were of the chunks that are looked at, on average."""
        chunks = list(self.readers[name])
        some = [self.counts(name, chunks[i], self.readers[name][chunks[i]]) for i in spread_places(len(chunks))]
        found = sum(some, ReadCounts())
        per = [found.requests, found.stored_bytes, found.decoded_bytes]
        requests, stored, decoded = (total * len(jobs) // len(some) for total in per)
        return ReadCounts(requests, stored_bytes=stored, decoded_bytes=decoded)

    def costs_of(self, name):
        def cost(mode):
            jobs = [(chunk, *load) for chunk in self.readers[name] for load in self.loads(name, chunk, mode)]
            row = sum((self.counts(name, chunk, served) for chunk, _, served in jobs), ReadCounts())
            row = row if self.is_asked(name) else self.estimate(name, jobs)
            sent = sum(self.values(name, chunk, m) for chunk, owner, served in jobs for m in served if m != owner)
            shared = sum(len(served) > 1 for _, _, served in jobs)
            table = self.tables[name]
            return read_cost(table, row.requests, row.stored_bytes, row.decoded_bytes, 4 * sent, shared)

        return cost

    def balanced(self, todo):
        def weight(job):
            if not self.is_asked(job.array):
                return self.tables[job.array].grid.chunk_bytes
            row = self.counts(job.array, job.chunk, job.readers)
            return row.stored_bytes or row.decoded_bytes

        load = [sum(weight(job) for job in self.private if job.owner == m) for m in self.ranks]
        turns, ranks = [0 for _ in self.ranks], len(self.ranks)
        order = sorted(range(len(todo)), key=lambda i: (-weight(todo[i]), i))
        for i in order:
            bytes_, owner = weight(todo[i]), todo[i].owner
            if self.modes[todo[i].array] == "cooperative":
                owner = min(
                    self.ranks, key=lambda m: (load[m], (m + turns[m] * ranks * GOLDEN_SECTION // 2**16) % ranks)
                )
            todo[i] = todo[i]._replace(owner=owner if bytes_ else NO_OWNER)
            load[owner] += bytes_
            turns[owner] += bytes_ > 0
        return tuple(todo)

    def rows(self):
        rows = [ReadCounts() for _ in self.ranks]
        for job in (*self.shared, *self.private):
            for m in job.readers:
                rows[m].useful_bytes += 4 * self.values(job.array, job.chunk, m)
                if m != job.owner != NO_OWNER:
                    rows[job.owner].sent_bytes += 4 * self.values(job.array, job.chunk, m)
            if job.owner == NO_OWNER:
                rows[job.readers[0]].missing += 1
            else:
                rows[job.owner] += self.counts(job.array, job.chunk, job.readers)
        return tuple(rows)


@st.composite
def requests(draw):
    names = draw(st.lists(st.sampled_from(list(FORMS)), min_size=1, max_size=3))
    steps = draw(st.lists(st.integers(0, STEPS - 1), min_size=1, max_size=3, unique=True))
    axes = draw(st.sampled_from(MESHES))
    spec = draw(st.sampled_from([("lat", "lon"), ("lat", "lon"), (("lon", "lat"), None), ("lon", "lat")]))
    halo = {2: draw(st.integers(0, 5)), 3: draw(st.integers(0, 22))}
    layout = Layout.of((len(steps), len(names), *ROWS), (None, None, *spec), axes, halo=halo, periodic=(3,))
    picks = tuple((step, i) for i, step in enumerate(steps))
    parts = [ReadPart(name, (picks, None, None), (0, 2, 3), at=((1, c),)) for c, name in enumerate(names)]
    return ReadRequest(layout, tuple(parts))


@given(requests(), st.sampled_from(["auto", *PLAN_MODES]), st.sampled_from([0, found_chunks.MOST_SIZES]))
@settings(deadline=None, max_examples=60)
def test_plans_equal_an_enumeration(tables, asked, mode, most_sizes):
    """Those of few chunks, each asked for its size, and those of many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found_chunks, "MOST_SIZES", most_sizes)
        _compare_with_enumeration(plan_read(asked, tables, mode), Enumerated(asked, tables, mode, most_sizes))


def _compare_with_enumeration(plan, expected):
    assert plan.modes == expected.modes
    assert plan.shared == expected.shared
    for member in expected.ranks:
        assert sorted(plan.private(member)) == sorted(job for job in expected.private if job.owner == member)
        assert plan.shared.read_by(member) == [job for job in expected.shared if member in job.readers]
        mine = [(n, job) for n, job in enumerate(expected.shared) if job.owner == member]
        assert plan.shared.loaded_by((member,)) == mine
    assert plan.rows == expected.rows()
    for name, each in product(expected.names, PLAN_MODES):
        assert plan.cost(name, each) == expected.costs_of(name)(each)


def test_what_ranks_take_of_a_chunk_is_worked_out_once(tables):
    """Of thousands of ranks: for chunks of every step, array and sample that lie alike."""
    layout = Layout.of(
        (1, 2, *ROWS), (None, None, "lat", "lon"), {"lat": 37, "lon": 40}, halo={2: 1, 3: 1}, periodic=(3,)
    )

    def plan(step):
        parts = [
            ReadPart(name, (((step, 0),), None, None), (0, 2, 3), ((1, c),)) for c, name in enumerate(("zstd", "blosc"))
        ]
        return plan_read(ReadRequest(layout, tuple(parts)), tables)

    first, later = plan(0), plan(3)
    assert len(first.needed.readers["blosc"][0, 0, 0]) == first.ranks == 37 * 40
    for name, at in (("zstd", (0, 1)), ("blosc", (0, 0))):
        assert first.needed.readers[name][0, *at] is later.needed.readers[name][3, *at]
    assert [job.readers for job in first.shared] == [job.readers for job in later.shared] != []


# -- many small chunks ------------------------------------------------------------------------------------------------


@pytest.fixture
def tiles(tmp_path):
    """A folder of 2 steps in 8 x 8 tiles, and its tables."""
    array = zarr.open_group(tmp_path / "t.zarr", mode="w", zarr_format=2).create_array(
        "x", shape=(2, 64, 64), chunks=(1, 8, 8), dtype="f4", compressors=Zstd(1)
    )
    array[...] = np.random.default_rng(0).normal(size=array.shape).round(1)
    array.attrs["_ARRAY_DIMENSIONS"] = ("time", "lat", "lon")
    return tmp_path / "t.zarr" / "x", open_store(tmp_path / "t.zarr").arrays


def tiles_request(*steps):
    layout = Layout.of((len(steps), 1, 64, 64), (None, None, "lat", "lon"), {"lat": 2, "lon": 2}, halo={2: 1, 3: 1})
    picks = tuple((step, i) for i, step in enumerate(steps))
    return ReadRequest(layout, (ReadPart("x", (picks, None, None), (0, 2, 3), ((1, 0),)),))


def sizes_asked(tables, mode):
    """How many files a plan is made by asking for their size."""
    asked = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code is LocalFiles.size.__code__:
            asked.append(frame.f_locals["path"])

    sys.setprofile(note)
    try:
        plan = plan_read(tiles_request(0), tables, mode)
        assert plan.digest
    finally:
        sys.setprofile(None)
    assert len(set(asked)) == len(asked)
    return len(asked)


def test_of_many_chunks_a_few_are_asked_for_their_size(tiles, monkeypatch):
    _, tables = tiles
    assert [sizes_asked(tables, mode) for mode in ("auto", "cooperative", "independent")] == [64, 64, 0]
    monkeypatch.setattr(found_chunks, "MOST_SIZES", 63)
    assert [sizes_asked(tables, mode) for mode in ("auto", "cooperative", "independent")] == [8, 0, 0]


def test_the_order_of_many_chunks_is_kept_for_the_next_sample(tiles, monkeypatch):
    folder, tables = tiles
    monkeypatch.setattr(found_chunks, "MOST_SIZES", 63)
    first, later = (plan_read(tiles_request(step), tables, "cooperative") for step in (0, 1))
    assert first.shared.order is later.shared.order
    assert [job.chunk[0] for job in later.shared] == [1] * len(later.shared) != []
    assert first.digest != later.digest
    assert len({plan_read(tiles_request(0), tables, mode).digest for mode in PLAN_MODES}) == len(PLAN_MODES)
    # whoever is to load a chunk finds it missing; ranks that see it and ranks that do not have one plan
    (folder / "0.3.3").unlink()
    after = plan_read(tiles_request(0), tables, "cooperative")
    assert after.digest == first.digest and NO_OWNER not in [job.owner for job in after.shared]
    monkeypatch.setattr(found_chunks, "MOST_SIZES", 64)
    assert plan_read(tiles_request(0), tables, "cooperative").digest != first.digest


def test_no_rank_gets_the_same_tiles_of_every_step():
    """They may be those of an ocean: of 64 tiles of 48 steps each of 8 ranks gets every one, at most 12 times."""
    tile = Counter[tuple[int, int]]()
    owners = owners_of_jobs(np.full(48 * 64, 100), [NO_OWNER] * (48 * 64), [0] * 8)
    for number, owner in enumerate(owners):
        tile[owner, number % 64] += 1
    assert Counter(owners) == dict.fromkeys(range(8), 48 * 8)
    assert max(tile.values()) <= 12 and len(tile) == 8 * 64


def test_what_is_kept_of_shared_jobs_is_bounded():
    assert order_of_jobs.cache_info().maxsize <= 8 and _numbers_read_by.cache_info().maxsize <= 16
