"""Shared chunks in pieces: what a flow reads, where pieces are cut, and that ranks read the same through them."""

import os

import numpy as np
import pytest
from toy_store import held, layout, request, sample, write

from jigsaw.errors import CorruptChunkError, TruncatedError
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.chunk_readers import ChunkJob
from jigsaw.io.reading.chunk_sections import SECTION_BYTES, ChunkSection, sections_in_slot_order
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.needed_chunks import ChunkBox, RowList, RowRun
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.testing import run_on_ranks, world_mesh

ROWS, CHUNK = (700, 600), (1, 3, 700, 600)  # 5 MB a chunk of `air`, 1.7 MB one of `t2m`
FORMS = [("v2", "blosc"), ("v2", "blosc-zstd-bits"), ("v2", "none"), ("v2", "fortran"), ("v3", "transposed")]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1, 7, 4096], [1 << 19], [700_001, 3]], ids=str)
@pytest.mark.parametrize("form", FORMS[:3], ids="-".join)
def test_a_flow_reads_what_loading_gives(tmp_path, form, sizes):
    table = open_store(write(tmp_path, form, ROWS, CHUNK)[0]).arrays["air"]
    want, got = np.empty((2, table.grid.chunk_bytes), np.uint8)
    table.loader.load((1, 0, 0, 0), want)
    flow, at, turn = table.decoding.stream((1, 0, 0, 0)), 0, 0
    while at < got.size:
        size = sizes[turn % len(sizes)] if turn < 40 else 1 << 20
        flow(got[at : at + size])
        at, turn = at + size, turn + 1
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("step", [1, 3, -1, -2])
def test_boxes_are_cut_at_the_rows_of_a_piece(tmp_path, step):
    table = open_store(write(tmp_path, FORMS[0], ROWS, CHUNK)[0]).arrays["air"]
    run = RowRun(4 if step > 0 else 20, step, 5, -step, 5)
    box = ChunkBox(0, ((RowRun(0, 1, 0, 1, 2),), (run, RowRun(23, 1, 50, 1, 1))), ())
    want = sorted(
        (r.source + k * r.source_step, r.target + k * r.target_step) for r in box.runs[1] for k in range(r.length)
    )
    found = []
    for start in range(0, 24, 5):
        piece = ChunkSection(ChunkJob("air", (0, 0), 0, (0, 1)), table, 0, 0, 1, (start, min(start + 5, 24)))
        for there, here in piece.cut([box]):
            assert there.runs[0] == here.runs[0] == box.runs[0]
            for a, b in zip(there.runs[1], here.runs[1], strict=True):
                assert a == b._replace(source=b.source + start)
                rows = [a.source + k * a.source_step for k in range(a.length)]
                assert all(start <= row < start + 5 for row in rows)
                found += [(row, a.target + k * a.target_step) for k, row in enumerate(rows)]
    assert sorted(found) == want


def test_lists_of_rows_are_cut_at_the_rows_of_a_piece(tmp_path):
    table = open_store(write(tmp_path, FORMS[0], ROWS, CHUNK)[0]).arrays["air"]
    rows = np.random.default_rng(0).permutation(24)[:17]
    box = ChunkBox(0, ((RowRun(0, 1, 0, 1, 2),), (RowList(rows, np.arange(17) * 2),)), ())
    assert box.extents == (2, 17)
    found = {}
    for start in range(0, 24, 5):
        piece = ChunkSection(ChunkJob("air", (0, 0), 0, (0, 1)), table, 0, 0, 1, (start, min(start + 5, 24)))
        for there, here in piece.cut([box]):
            (a,), (b,) = there.runs[1], here.runs[1]
            np.testing.assert_array_equal(a.source, b.source + start)
            assert (a.source >= start).all() and (a.source < start + 5).all()
            found |= dict(zip(a.target.tolist(), a.source.tolist(), strict=True))
    assert found == {2 * at: row for at, row in enumerate(rows.tolist())}


def test_pieces_make_up_their_chunks_and_lanes_take_turns(tmp_path):
    store = open_store(write(tmp_path, ("v2", "blosc"), ROWS, CHUNK)[0])
    plan = plan_read(request({"lat": 2}, ROWS, steps=(0, 1, 2, 3)), store.arrays, "cooperative")
    pieces = sections_in_slot_order(plan, list(enumerate(plan.shared)), [1, 2])
    for number, job in enumerate(plan.shared):
        table, mine = store.arrays[job.array], [piece for piece in pieces if piece.number == number]
        assert sum(piece.size for piece in mine) == table.grid.chunk_bytes
        assert all(piece.size <= SECTION_BYTES for piece in mine)
        assert [piece.is_last for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert len(mine) == (2 if job.array == "air" else 1)
    assert {(piece.job.owner, piece.lane) for piece in pieces[:3]} == {(0, 0), (1, 0), (1, 1)}
    whole = sections_in_slot_order(plan, list(enumerate(plan.shared)), [1, 1], cut=False)
    assert sorted(piece.number for piece in whole) == list(range(len(plan.shared)))


def body_same(path, values, threads):
    engine = ReadEngine(open_store(path), world_mesh(lat=3), threads=threads, budget=3 << 22)
    try:
        for halo, steps in ((0, (1, 3)), (2, (0, 1, 2, 3))):
            asked = request({"lat": 3}, ROWS, halo, steps)
            plan, before = plan_read(asked, engine.store.arrays, "cooperative"), engine.stats
            got = engine.read(plan)
            assert engine.stats == before + plan.rows[engine.peers.me]
            lay = layout(4, len(steps), ROWS, {"lat": 3}, halo)
            want = held(sample(values, steps), lay, list(lay.coords())[engine.peers.me])
            np.testing.assert_array_equal(got, want)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_ranks_read_the_same_through_pieces(tmp_path, form, threads):
    path, values = write(tmp_path, form, ROWS, CHUNK)
    run_on_ranks(3, body_same, path, values, threads)


def body_damaged(path, name, kind):
    engine = ReadEngine(open_store(path), world_mesh(lat=3))
    with pytest.raises(kind, match=r"chunk \(1, 0, 0, 0\) of array 'air'"):
        engine.read(plan_read(request({"lat": 3}, ROWS), engine.store.arrays, "cooperative"))
    engine.close()
    return name


@pytest.mark.parametrize(("damage", "kind"), [("cut", TruncatedError), ("table", CorruptChunkError)])
def test_a_damaged_chunk_fails_on_every_rank(tmp_path, damage, kind):
    path, _ = write(tmp_path, ("v2", "blosc"), ROWS, CHUNK)
    file = tmp_path / "v2-blosc.zarr" / "air" / "1.0.0.0"
    if damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        raw = bytearray(file.read_bytes())
        raw[20:24] = (1 << 30).to_bytes(4, "little")
        file.write_bytes(raw)
    assert run_on_ranks(3, body_damaged, path, damage, kind) == [damage] * 3
