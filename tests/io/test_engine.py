"""Reading on real ranks: the same values on every mesh, bytes counted, failures told to all, nothing left behind."""

import gc
import os
import signal
import threading
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch.distributed as dist
import xarray as xr
import zarr
from toy_store import FORMS, held, layout, request, sample, write

from jigsaw.errors import CorruptChunkError, NaNError, PeerError, ReadError, TruncatedError
from jigsaw.geometry.layout import Layout
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading import found_chunks
from jigsaw.io.reading.chunk_readers import NO_OWNER
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.peers import meet_peers
from jigsaw.io.reading.placing import BoxParcels
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.io.series.request import DROPPED_DIM, ReadPart, ReadRequest
from jigsaw.testing import RankFailedError, on_ranks, run_on_ranks, world_mesh

FAST = ("v2", "blosc")


def expected(values, asked, member, **chosen):
    """What one rank should get, in float64 then rounded."""
    whole = sample(values, **chosen).astype(np.float64)
    shape = (1, -1, 1, 1)
    whole = whole * np.reshape(asked.scale, shape) + np.reshape(asked.offset, shape)
    return held(whole, asked.layout, list(asked.layout.coords())[member]).astype(asked.dtype)


def read_once(engine, asked, mode="cooperative"):
    """Read, and check the counters against the plan."""
    plan = plan_read(asked, engine.store.arrays, mode)
    before = replace(engine.stats)
    got = engine.read(plan)
    assert engine.stats == before + plan.rows[engine.peers.me]
    return got


def check_reads(path, values, axes, mesh, modes=("cooperative", "independent"), **more):
    engine = ReadEngine(open_store(path), mesh)
    try:
        for mode in modes:
            for halo in (0, 2):
                for steps in ((1, 3), (0, 1, 2, 3)):
                    asked = request(axes, halo=halo, steps=steps, **more)
                    got = read_once(engine, asked, mode)
                    np.testing.assert_allclose(
                        got, expected(values, asked, engine.peers.me, steps=steps), rtol=2e-6, atol=1e-6
                    )
    finally:
        engine.close()


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_one_rank_reads_every_form(tmp_path, form):
    path, values = write(tmp_path, form)
    check_reads(path, values, {}, None)


def body_meshes(path, values, axes):
    check_reads(path, values, axes, world_mesh(**axes))
    check_reads(path, values, axes, world_mesh(**axes), scale=(2.0, 0.5, 1.0, 1.0), offset=(1.0, 0.0, -3.0, 0.0))


@pytest.mark.parametrize("chunk", [(1, 3, 13, 10), (2, 1, 4, 3)], ids=["globe", "tiles"])
@pytest.mark.parametrize("axes", [{"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}], ids=str)
def test_every_mesh_reads_the_same(tmp_path, axes, chunk):
    path, values = write(tmp_path, chunk=chunk)
    run_on_ranks(int(np.prod(list(axes.values()))), body_meshes, path, values, axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [("v3", "transposed"), ("v2", "fortran"), ("sharded", "default"), ("v2", "delta")], ids="-".join
)
def test_forms_cooperate(tmp_path, form):
    path, values = write(tmp_path, form)
    run_on_ranks(3, body_meshes, path, values, {"lat": 3})


@on_ranks(4)
def test_ranks_that_replicate_and_ranks_apart(tmp_path):
    """The data axis reads other samples; an axis that cuts nothing shares its ranks' chunks."""
    mesh = world_mesh(data=2, channel=2)
    if dist.get_rank() == 0:
        write(tmp_path)
    path, values = str(tmp_path / "v2-blosc.zarr"), sample_values()
    dist.barrier()
    engine = ReadEngine(open_store(path), mesh)
    assert engine.peers.size == 2 and engine.peers.me == dist.get_rank() % 2
    steps = (1, 3) if dist.get_rank() < 2 else (0, 2)
    asked = request({"channel": 2}, steps=steps)
    got = read_once(engine, asked)
    np.testing.assert_array_equal(got, expected(values, asked, engine.peers.me, steps=steps))
    assert plan_read(asked, engine.store.arrays, "cooperative").amplification == 1.0
    engine.close()


def sample_values():
    r = np.random.default_rng(0)
    rows = (13, 10)
    return {
        "air": r.normal(size=(4, 3, *rows)).astype("f4"),
        "t2m": r.normal(size=(4, *rows)).astype("f4"),
        "mask": r.normal(size=rows).astype("f4"),
    }


@on_ranks(2)
def body_budget(path, values):
    """One slot for all: every chunk waits until the one before was taken."""
    engine = ReadEngine(open_store(path), world_mesh(lat=2), threads=3, budget=1)
    for _ in range(20):
        asked = request({"lat": 2}, steps=(0, 1, 2, 3), levels=(0, 1, 2))
        got = read_once(engine, asked, "cooperative")
        want = expected(values, asked, engine.peers.me, steps=(0, 1, 2, 3), levels=(0, 1, 2))
        np.testing.assert_array_equal(got, want)
    engine.close()


def test_slots_are_reused_within_the_budget(tmp_path):
    body_budget(*write(tmp_path, chunk=(1, 1, 7, 5)))


def body_growing(path, values):
    """Plans of other chunk sizes lay the slots out anew."""
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    for _ in range(5):
        small = ReadRequest(
            layout(1, 1, (13, 10), {"lat": 2}), (ReadPart("mask", (None, None), (2, 3), at=((0, 0), (1, 0))),)
        )
        np.testing.assert_array_equal(
            read_once(engine, small), held(values["mask"][None, None], small.layout, (engine.peers.me,))
        )
        asked = request({"lat": 2})
        np.testing.assert_array_equal(read_once(engine, asked), expected(values, asked, engine.peers.me))
    engine.close()


def test_slots_grow(tmp_path):
    run_on_ranks(2, body_growing, *write(tmp_path, chunk=(1, 3, 13, 10)))


# -- over machines ---------------------------------------------------------------------------------------------------


def body_far(path, values, axes, per_machine):
    mesh = world_mesh(**axes)
    engine = ReadEngine(open_store(path), meet_peers(mesh, host=f"machine {dist.get_rank() // per_machine}"))
    assert engine.peers.is_spread and (engine.arena is None) == (per_machine == 1)
    for mode in ("cooperative", "independent"):
        for halo in (0, 2):
            asked = request(axes, halo=halo, scale=(2.0, 1.0, 1.0, 1.0))
            np.testing.assert_allclose(
                read_once(engine, asked, mode), expected(values, asked, engine.peers.me), rtol=1e-6
            )
    if dist.get_rank() == 0:
        os.remove(engine.store.arrays["air"].finder.path((0, 0, 0, 0)))
        with open(engine.store.arrays["air"].finder.path((0, 0, 0, 0)), "wb") as f:
            f.write(b"rubbish")
    dist.barrier()
    with pytest.raises(CorruptChunkError, match=r"chunk \(0, 0, 0, 0\) of array 'air'"):
        engine.read(plan_read(request(axes, steps=(0,)), engine.store.arrays, "cooperative"))
    asked = request(axes, steps=(1,))
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(BoxParcels, "make_room", without_memory)
        with pytest.raises((MemoryError, PeerError), match=r"^no room$|rank 1 .* failed: MemoryError: no room"):
            engine.read(plan_read(asked, engine.store.arrays, "cooperative"))
    np.testing.assert_array_equal(read_once(engine, asked), expected(values, asked, engine.peers.me, steps=(1,)))
    engine.close()


def without_memory(parcels):
    raise MemoryError("no room")


@pytest.mark.parametrize("per_machine", [1, 2])
def test_over_machines(tmp_path, per_machine):
    path, values = write(tmp_path, chunk=(1, 3, 13, 10))
    run_on_ranks(4, body_far, path, values, {"lat": 2, "lon": 2}, per_machine)


# -- conventions -----------------------------------------------------------------------------------------------------


def packed_store(path, version):
    r = np.random.default_rng(1)
    x = r.normal(280, 10, (3, 7, 8))
    x[1, 2:4, 5] = np.nan
    data = xr.Dataset({"t": (("time", "lat", "lon"), x), "s": (("time", "lat", "lon"), x.astype("f4"))})
    encoding = {
        "t": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 270.0, "_FillValue": -32768, "chunks": (1, 7, 8)},
        "s": {"_FillValue": np.float32(1e20), "chunks": (1, 7, 8)},
    }
    data.to_zarr(path, zarr_format=version, encoding=encoding, consolidated=False)
    return xr.open_zarr(path, consolidated=False).load()


def packed_request(axes, times=(0, 1, 2), **more):
    picked = tuple((t, i) for i, t in enumerate(times))
    lay = layout(2, len(times), (7, 8), axes, halo=1)
    parts = tuple(ReadPart(name, (picked, None, None), (0, 2, 3), at=((1, c),)) for c, name in enumerate("ts"))
    return ReadRequest(lay, parts, (0.1, 1.0), (-28.0, 0.0), **more)


def body_packed(path, truth, dtype):
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    asked = packed_request({"lat": 2}, dtype=dtype)
    want = np.stack([truth["t"] * 0.1 - 28.0, truth["s"]], axis=1)
    coord = (engine.peers.me,)
    got = read_once(engine, asked)
    np.testing.assert_allclose(
        got, held(want, asked.layout, coord), rtol=1e-3 if dtype == "float16" else 1e-6, atol=2e-6
    )
    filled = read_once(engine, replace(asked, nan=-1.0))
    assert not np.isnan(filled).any()
    np.testing.assert_array_equal(filled[~np.isnan(got)], got[~np.isnan(got)])
    assert (filled[np.isnan(got)] == -1.0).all()
    with pytest.raises(
        NaNError, match=r"array '[ts]' has missing values at time 1 \(chunk \(1, 0, 0\)\) .* use nan=\"keep\""
    ):
        engine.read(plan_read(replace(asked, nan="raise"), engine.store.arrays, "cooperative"))
    clean = read_once(engine, packed_request({"lat": 2}, (0, 2), nan="raise", dtype=dtype))
    np.testing.assert_array_equal(clean, got[[0, 2]])
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("version", [2, 3])
def test_scale_offset_and_fill_as_xarray_reads_them(tmp_path, version, dtype):
    truth = packed_store(tmp_path / "p.zarr", version)
    run_on_ranks(2, body_packed, str(tmp_path / "p.zarr"), {k: truth[k].to_numpy().astype("f8") for k in "ts"}, dtype)


def body_missing(path, values):
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    for mode, most in product(("cooperative", "neighbors", "independent"), (found_chunks.MOST_SIZES, 0)):
        asked = request({"lat": 2}, scale=(2.0, 1.0, 1.0, 1.0), missing="fill")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(found_chunks, "MOST_SIZES", most)  # with 0 a missing chunk has an owner, who finds it so
            plan = plan_read(asked, engine.store.arrays, mode)
            assert (NO_OWNER in [job.owner for job in plan.shared]) == (most > 0 and mode == "cooperative")
            before = engine.stats
            np.testing.assert_array_equal(engine.read(plan), expected(values, asked, engine.peers.me))
            assert before + plan.rows[engine.peers.me] == engine.stats
    engine.close()


@pytest.mark.parametrize("form", [("v2", "blosc"), ("v3", "default"), ("v2", "delta")], ids="-".join)
def test_a_missing_chunk_is_fill(tmp_path, form):
    path, values = write(tmp_path, form, chunk=(1, 3, 13, 10))
    os.remove(open_store(path).arrays["air"].finder.path((3, 0, 0, 0)))
    values["air"][3] = 0.0
    run_on_ranks(2, body_missing, path, values)


def test_missing_chunk_of_a_masked_array_is_nan(tmp_path):
    group = zarr.open_group(str(tmp_path / "m.zarr"), mode="w", zarr_format=2)
    made = group.create_array(
        "a", shape=(2, 4, 4), chunks=(1, 4, 4), dtype="i2", fill_value=-1, attributes={"scale_factor": 0.5}
    )
    made[0] = 4
    engine = ReadEngine(open_store(group))
    part = ReadPart("a", (((0, 0), (1, 1)), None, None), (0, 2, 3), at=((1, 0),))
    asked = ReadRequest(layout(1, 2, (4, 4), {}), (part,), missing="fill")
    got = engine.read(plan_read(asked, engine.store.arrays, "cooperative"))
    assert (got[0] == 2.0).all() and np.isnan(got[1]).all()
    engine.close()


def test_flip_transpose_drop_and_other_orders(tmp_path):
    """Stored [lon, member, lat, time] with lat from the south, read as [T, C, lat, lon]."""
    x = np.random.default_rng(2).normal(size=(8, 3, 7, 5)).astype("f8")
    group = zarr.open_group(str(tmp_path / "o.zarr"), mode="w")
    group.create_array("a", shape=x.shape, chunks=(3, 2, 4, 2), dtype="f8")[...] = x
    part = ReadPart(
        "a", (None, ((1, 0),), None, ((4, 0), (0, 1), (2, 2))), (3, DROPPED_DIM, 2, 0), at=((1, 0),), flip=(2,)
    )
    for dtype in ("float64", "float32", "int32"):
        asked = ReadRequest(layout(1, 3, (7, 8), {}, halo=0), (part,), dtype=dtype)
        engine = ReadEngine(open_store(group))
        want = x[:, 1, ::-1][..., [4, 0, 2]].transpose(2, 1, 0)[:, None]
        want = np.rint(want) if dtype == "int32" else want.astype(dtype)
        np.testing.assert_array_equal(read_once(engine, asked), want)
        engine.close()


def test_volumes_and_series_without_space(tmp_path):
    x = np.random.default_rng(3).normal(size=(6, 5, 7)).astype("f4")
    group = zarr.open_group(str(tmp_path / "v.zarr"), mode="w")
    group.create_array("v", shape=x.shape, chunks=(2, 5, 3), dtype="f4")[...] = x
    group.create_array("s", shape=(6,), chunks=(4,), dtype="f4")[...] = x[:, 0, 0]
    engine = ReadEngine(open_store(group))
    volume = ReadPart("v", (None, None, None), (2, 3, 4), at=((0, 0), (1, 0)))
    lay = Layout.of((1, 1, 6, 5, 7), (None, None, "z", None, None), {}, halo={4: 1}, periodic=(4,))
    got = read_once(engine, ReadRequest(lay, (volume,), scale=(3.0,)))
    np.testing.assert_array_equal(got[0, 0], 3 * x.take(range(-1, 8), axis=2, mode="wrap"))
    series = ReadPart("s", (((5, 0), (1, 1)),), (0,), at=((1, 0),))
    got = read_once(engine, ReadRequest(Layout.of((2, 1), (None, None), {}), (series,), offset=(1.0,)))
    np.testing.assert_array_equal(got[:, 0], x[[5, 1], 0, 0] + 1)
    engine.close()


# -- failures --------------------------------------------------------------------------------------------------------


def body_corrupt(path, values, damage, mode):
    engine = ReadEngine(open_store(path), world_mesh(lat=2, lon=2))
    if dist.get_rank() == 0:
        target = engine.store.arrays["t2m"].finder.path((3, 0, 0))
        if damage == "truncate":
            os.truncate(target, os.path.getsize(target) // 2)
        else:
            with open(target, "r+b") as f:
                f.write(b"\x02\x01\x11\x04\xff\xff\xff\x7f")
    dist.barrier()
    kind = TruncatedError if damage == "truncate" else CorruptChunkError
    for _ in range(3):
        with pytest.raises(kind, match=r"chunk \(3, 0, 0\) of array 't2m' in .*t2m/3.0.0 cannot be read"):
            engine.read(plan_read(request({"lat": 2, "lon": 2}), engine.store.arrays, mode))
        asked = request({"lat": 2, "lon": 2}, steps=(0, 2), halo=1)
        want = expected(values, asked, engine.peers.me, steps=(0, 2))
        np.testing.assert_array_equal(engine.read(plan_read(asked, engine.store.arrays, mode)), want)
    engine.close()


@pytest.mark.parametrize("mode", ["cooperative", "independent"])
@pytest.mark.parametrize("damage", ["truncate", "header"])
def test_a_bad_chunk_is_told_to_every_rank_and_the_next_read_works(tmp_path, damage, mode):
    path, values = write(tmp_path, chunk=(1, 3, 13, 10))
    run_on_ranks(4, body_corrupt, path, values, damage, mode)


def body_corrupt_among_many(path, values):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(found_chunks, "MOST_SIZES", 0)
        body_corrupt(path, values, "truncate", "cooperative")


def test_a_bad_chunk_whose_size_nobody_asks_is_told_to_every_rank(tmp_path):
    path, values = write(tmp_path, chunk=(1, 3, 13, 10))
    run_on_ranks(4, body_corrupt_among_many, path, values)


@pytest.mark.parametrize("mode", ["cooperative", "independent"])
def test_a_bad_chunk_that_one_rank_reads_fails_everywhere(tmp_path, mode):
    path, _ = write(tmp_path, chunk=(1, 3, 4, 3))
    table = open_store(path).arrays["t2m"]
    with open(table.finder.path((3, 0, 0)), "wb") as f:
        f.write(b"nothing")
    run_on_ranks(4, body_one_bad, path, mode)


def body_one_bad(path, mode):
    engine = ReadEngine(open_store(path), world_mesh(lat=2, lon=2))
    with pytest.raises(CorruptChunkError, match=r"chunk \(3, 0, 0\) of array 't2m'"):
        engine.read(plan_read(request({"lat": 2, "lon": 2}), engine.store.arrays, mode))
    engine.close()


@on_ranks(2)
def body_other_error(path):
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    plan = plan_read(request({"lat": 2}), engine.store.arrays, "cooperative")
    wrong = np.empty((1, 2, 3)) if dist.get_rank() == 0 else None
    with pytest.raises((ValueError, PeerError), match=r"out is float64\[1, 2, 3\], this rank reads float32"):
        engine.read(plan, wrong)
    engine.close()


@on_ranks(2)
def body_differs(path):
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    steps = (0, 1) if dist.get_rank() == 0 else (2, 3)
    with pytest.raises(PeerError, match="reads another sample or sees other chunks"):
        engine.read(plan_read(request({"lat": 2}, steps=steps), engine.store.arrays, "cooperative"))
    engine.close()


@on_ranks(2)
def body_closed(path):
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    plan = plan_read(request({"lat": 2}), engine.store.arrays, "cooperative")
    engine.read(plan)
    if dist.get_rank() == 0:
        engine.close()
    else:
        with pytest.raises(PeerError, match=r"rank 0 .* has closed its reader"):
            engine.read(plan)
        engine.close()


@on_ranks(2)
def body_vanished(path):
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    plan = plan_read(request({"lat": 2}), engine.store.arrays, "cooperative")
    assert plan.shared
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(engine.store.arrays["air"].finder.path((3, 0, 0, 0)))
    dist.barrier()
    with pytest.raises(CorruptChunkError, match=r"chunk \(3, 0, 0, 0\) of array 'air' in .* vanished"):
        engine.read(plan)
    engine.close()


@on_ranks(2)
def body_late(path):
    engine = ReadEngine(open_store(path), world_mesh(lat=2), timeout=0.3)
    plan = plan_read(request({"lat": 2}), engine.store.arrays, "cooperative")
    if dist.get_rank() == 0:
        with pytest.raises(PeerError, match=r"waited 0.3 s for ranks \[1\] of the domain group"):
            engine.read(plan)
    dist.barrier()
    engine.close()


@on_ranks(2)
def body_early_refusal(path):
    """A rank whose next read cannot be planned tells of it once the others have left this one."""
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    plan = plan_read(request({"lat": 2}), engine.store.arrays, "cooperative")
    if dist.get_rank() == 0:
        engine.read(plan)
        with pytest.raises(OSError, match="no such plan"):
            engine.plan(fail)
    else:
        check, arena = engine.arena.check_digests, engine.arena
        arena.check_digests = lambda read: (time.sleep(0.3), arena.check(read), check(read))  # as one that polls late
        engine.read(plan)
        with pytest.raises(PeerError, match="rank 0 of the domain group failed: OSError: no such plan"):
            engine.read(plan)
    engine.read(plan)
    engine.close()


def fail():
    raise OSError("no such plan")


@on_ranks(2)
def body_smaller_slots(path):
    """A rank that asks for less than another one, and has not seen its memory grow, takes none of it away."""
    arena = ReadEngine(open_store(path), world_mesh(lat=2)).arena
    if dist.get_rank() == 0:
        arena._lay_out(1 << 20, 4)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fstat", lambda fd: os.stat_result([0] * 10))
            arena._lay_out(1 << 16, 1)
    dist.barrier()
    arena.memory(arena.slots - 1, 1 << 16)[:] = 1


@on_ranks(2)
def body_unclosed(path):
    """A reader that nobody closed lets go of its memory with the last reference."""
    gc.collect()
    before = shared_memory()
    for _ in range(3):
        engine = ReadEngine(open_store(path), world_mesh(lat=2))
        engine.read(plan_read(request({"lat": 2}), engine.store.arrays, "cooperative"))
        assert len(shared_memory()) > len(before)
        dist.barrier()
        del engine
        gc.collect()
    assert len(shared_memory()) == len(before)


def shared_memory():
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.lexists(link) and "memfd:jigsaw" in os.readlink(link)]


@on_ranks(2)
def body_read_after_close(path):
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    plan = plan_read(request({"lat": 2}), engine.store.arrays, "cooperative")
    engine.close()
    with pytest.raises(ReadError, match="this reader was closed"):
        engine.read(plan)


@on_ranks(2)
def body_ending(path):
    """Python starts no threads once it ends, and closes pools of them itself."""
    engine = ReadEngine(open_store(path), world_mesh(lat=2))
    if dist.get_rank() == 1:
        engine.pool.shutdown()
    with pytest.raises(ReadError, match=r"this process ends, and the read that it was to take part in"):
        engine.read(plan_read(request({"lat": 2}), engine.store.arrays, "cooperative"))
    engine.close()


BODIES = [
    body_ending,
    body_early_refusal,
    body_smaller_slots,
    body_unclosed,
    body_read_after_close,
    body_other_error,
    body_differs,
    body_closed,
    body_vanished,
    body_late,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_nothing_hangs(tmp_path, body):
    body(write(tmp_path, chunk=(1, 3, 13, 10))[0])


def test_a_plan_for_other_ranks(tmp_path):
    store = open_store(write(tmp_path)[0])
    with pytest.raises(PeerError, match="the plan is for 2 ranks and 1 share this reader"):
        ReadEngine(store).read(plan_read(request({"lat": 2}), store.arrays))


def body_killed(path, told):
    """Rank 1 dies in the middle of a read; the others say so, and then the world is gone."""
    engine = ReadEngine(open_store(path), world_mesh(lat=3))
    plan = plan_read(request({"lat": 3}), engine.store.arrays, "cooperative")
    engine.read(plan)
    dist.barrier()
    if dist.get_rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGKILL)
    since = time.monotonic()
    try:
        engine.read(plan)
    except PeerError as e:
        with open(f"{told}/{dist.get_rank()}", "w") as f:
            f.write(f"{time.monotonic() - since:.1f} {e}")


def test_a_killed_rank_is_named_and_leaves_nothing(tmp_path):
    path, _ = write(tmp_path, chunk=(1, 3, 13, 10))
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailedError):
        run_on_ranks(3, body_killed, path, str(tmp_path))
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert "rank 1 of the domain group" in text and "has ended" in text
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "jigsaw" in name}


def test_threads_end_with_the_engine(tmp_path):
    store, before = open_store(write(tmp_path)[0]), set(threading.enumerate())
    engine = ReadEngine(store, threads=2)
    engine.read(plan_read(request({}), store.arrays))
    engine.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("jigsaw-read")]
