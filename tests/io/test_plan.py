"""The plan by itself: integers, the same everywhere, every value from exactly one place."""

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_store import layout, request, write

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.chunks.chunk import ChunkGrid
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.chunk_readers import NO_OWNER, PLAN_MODES
from jigsaw.io.reading.needed_chunks import NeededChunks
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.io.series.request import ReadPart, ReadRequest, runs_of_pairs

MESHES = [{}, {"lat": 2}, {"lat": 3}, {"lon": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    path, _ = write(tmp_path_factory.mktemp("plan"), chunk=(1, 3, 13, 10))
    return open_store(path).arrays


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    path, _ = write(tmp_path_factory.mktemp("plan"), rows=(64, 64), chunk=(1, 3, 16, 16))
    return open_store(path).arrays


@pytest.mark.parametrize("axes", MESHES)
def test_cooperative_loads_each_chunk_once(tables, axes):
    plan = plan_read(request(axes, halo=1), tables, "cooperative")
    loaded = [(job.array, job.chunk) for job in plan.jobs]
    assert len(loaded) == len(set(loaded)) == 2 + 2 + 1  # two steps of air and of t2m, one mask
    assert plan.amplification == 1.0
    assert plan.total.decoded_bytes == plan.union_bytes == 4 * 130 * (2 * 3 + 2 + 1)
    assert plan.total.chunks == plan.total.requests == 5


@pytest.mark.parametrize("axes", MESHES[1:])
def test_independent_loads_what_each_needs(tables, axes):
    plan = plan_read(request(axes), tables, "independent")
    ranks = math.prod(axes.values())
    assert plan.amplification == ranks
    assert plan.total.sent_bytes == 0 and plan.shared == ()
    assert all(job.readers == (job.owner,) for job in plan.jobs)
    assert (
        plan.total.useful_bytes == plan_read(request(axes), tables, "cooperative").total.useful_bytes == 4 * 130 * 4 * 2
    )


def test_auto_takes_the_cheapest_mode_of_each_array(tables, tiles):
    """A shared chunk costs every rank a wait, so that few and large ones are shared, and small ones decoded again."""
    cut = {"lat": 2, "lon": 2}
    assert set(plan_read(request(cut), tables).modes.values()) == {"independent"}
    bare = plan_read(request(cut, (64, 64)), tiles)
    assert set(bare.modes.values()) == {"independent"} and bare.amplification == 1.0
    wide = plan_read(request(cut, (64, 64), halo=2), tiles)
    readers = wide.needed.readers["air"].values()
    assert sum(map(len, readers)) / len(readers) == (2 * 3 / 4) * (2 * 4 / 4)
    rows, zstd = (2000, 1000), CodecDecoder(np.dtype("f4"), (0, 1, 2), "zstd")
    large = {
        name: replace(t, shape=(*t.shape[:-2], *rows), chunks=(*t.chunks[:-2], *rows), decoder=zstd)
        for name, t in tables.items()
    }
    large["mask"] = replace(large["mask"], chunks=(500, 500))
    plan = plan_read(request(cut, rows, halo=1), large)
    assert plan.modes == {"air": "cooperative", "t2m": "cooperative", "mask": "independent"}
    for name, mode in plan.modes.items():
        assert plan.cost(name, mode) == min(plan.cost(name, each) for each in PLAN_MODES)


@pytest.mark.parametrize("axes", MESHES[1:])
def test_neighbors_hand_over_the_halo(tiles, axes):
    plan = plan_read(request(axes, (64, 64), halo=2), tiles, "neighbors")
    bare = plan_read(request(axes, (64, 64)), tiles, "independent")
    assert plan.total.chunks == bare.total.chunks  # nothing is read for the halo alone
    assert plan.total.sent_bytes == plan.total.useful_bytes - sum(
        plan.box_bytes(job, job.owner) for job in plan.jobs if job.owner != NO_OWNER
    )
    for job in plan.shared:
        assert job.owner == NO_OWNER or job.owner in job.readers


def test_a_chunk_that_one_rank_reads_is_its_own(tiles):
    plan = plan_read(request({"lat": 2, "lon": 2}, (64, 64), halo=2), tiles, "cooperative")
    assert plan.amplification == 1.0
    shared = {(job.array, job.chunk) for job in plan.shared}
    assert ("t2m", (1, 1, 1)) in shared and ("t2m", (3, 0, 0)) in shared
    inner = ReadRequest(
        layout(1, 1, (64, 64), {"lat": 2, "lon": 2}),
        (ReadPart("t2m", (((0, 0),), None, None), (0, 2, 3), at=((1, 0),)),),
    )
    own = plan_read(inner, tiles, "cooperative")
    assert own.shared == () and len(own.jobs) == 16
    assert [sum(1 for _ in own.private(m)) for m in range(4)] == [4] * 4


def test_shared_jobs_are_balanced_by_stored_bytes(tmp_path):
    path, _ = write(tmp_path, chunk=(1, 1, 13, 10))
    plan = plan_read(request({"lat": 4}, steps=(0, 1, 2, 3), levels=(0, 1, 2)), open_store(path).arrays, "cooperative")
    stored = [row.stored_bytes for row in plan.rows]
    assert len(plan.shared) == 4 * 3 + 4 + 1
    assert max(stored) - min(stored) <= max(plan.ref(j.array, j.chunk).length for j in plan.shared)


def test_a_missing_chunk_is_nobodys_job(tmp_path):
    import os

    path, _ = write(tmp_path, chunk=(1, 3, 13, 10))
    tables = open_store(path).arrays
    os.remove(tables["air"].finder.path((3, 0, 0, 0)))
    plan = plan_read(request({"lat": 2}), tables, "cooperative")
    missing = [job for job in plan.shared if job.owner == NO_OWNER]
    assert [(job.array, job.chunk) for job in missing] == [("air", (3, 0, 0, 0))]
    assert plan.total.chunks == 4


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("mode", PLAN_MODES)
def test_boxes_fill_every_held_row_once(tiles, axes, mode):
    asked = request(axes, (64, 64), halo=3)
    plan = plan_read(asked, tiles, mode)
    for member, coord in enumerate(asked.layout.coords()):
        filled = np.zeros(asked.layout.local_shape(coord), int)
        for job in plan.jobs:
            if member not in job.readers:
                continue
            for box in plan.boxes(job, member):
                part = asked.parts[box.part]
                where = [[0]] * 4
                for dim, index in box.at:
                    where[dim] = [index]
                for to, runs in zip(part.to, box.runs, strict=True):
                    where[to] = [r.target + i * r.target_step for r in runs for i in range(r.length)]
                filled[np.ix_(*where)] += 1
        assert (filled == 1).all()


def test_levels_of_a_chunk_are_one_job_with_runs(tables):
    plan = plan_read(request({"lat": 2}, levels=(0, 2)), tables, "cooperative")
    job = next(job for job in plan.shared if job.array == "air")
    (box,) = plan.boxes(job, 0)
    assert [tuple(run) for run in box.runs[1]] == [(0, 2, 0, 1, 2)]


def test_parts_of_one_array_share_a_job(tables):
    lay = layout(2, 1, (13, 10), {"lat": 2})
    one = [ReadPart("air", (((1, 0),), ((k, c),), None, None), (0, 1, 2, 3)) for c, k in enumerate((2, 0))]
    plan = plan_read(ReadRequest(lay, tuple(one)), tables, "cooperative")
    assert len(plan.jobs) == 1 and len(plan.boxes(plan.jobs[0], 1)) == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8))
@settings(deadline=None, max_examples=200)
def test_runs_are_their_pairs(pairs):
    unrolled = [(s + i * ds, t + i * dt) for s, ds, t, dt, n in runs_of_pairs(pairs) for i in range(n)]
    assert unrolled == pairs


def test_the_plan_is_the_same_everywhere(tables, tmp_path):
    asked = request({"lat": 2, "lon": 2}, halo=1)
    a, b = plan_read(asked, tables), plan_read(asked, tables)
    assert a.shared == b.shared and a.digest == b.digest
    assert a.digest != plan_read(request({"lat": 2, "lon": 2}, halo=2), tables).digest
    assert a.digest != plan_read(asked, tables, "cooperative").digest


def test_the_plan_imports_no_torch():
    """Without the package's own public names, which are torch's, it and what it imports are integers."""
    code = """
import sys, types, importlib.util
root = importlib.util.find_spec("jigsaw").submodule_search_locations[0]
for name, path in (("jigsaw", root), ("jigsaw.io", root + "/io")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
import jigsaw.io.reading.read_plan
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("axes", MESHES)
def test_what_ranks_need_follows_from_grids_alone(tiles, axes):
    """No store, and no table: a chunk's readers are those that have a box of it."""
    asked = request(axes, (64, 64), halo=2)
    needed = NeededChunks(asked, {name: ChunkGrid(t.shape, 4, t.chunks) for name, t in tiles.items()})
    for name, readers_of in needed.readers.items():
        for chunk in needed.grids[name].indices():
            readers = readers_of[chunk].ranks if chunk in readers_of else ()
            assert [*readers] == [m for m in range(needed.ranks) if needed.boxes(name, chunk, m)]
    plan = plan_read(asked, tiles, "cooperative")
    assert {(job.array, job.chunk): job.readers for job in plan.jobs} == {
        (name, chunk): readers.ranks for name, of in needed.readers.items() for chunk, readers in of.items()
    }


def test_a_plan_is_not_changed(tiles):
    plan = plan_read(request({"lat": 2}, (64, 64)), tiles)
    with pytest.raises(FrozenInstanceError, match="modes"):
        plan.modes = {}
    assert plan.ask_sizes().rows == plan.rows and plan.ask_sizes() is not plan


def test_texts_are_not_read_into_a_sample(tables):
    words = {**tables, "t2m": replace(tables["t2m"], dtype="<U4")}
    with pytest.raises(UnsupportedStoreError, match="'t2m' has dtype '<U4'"):
        plan_read(request({}), words)
