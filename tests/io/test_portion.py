"""Less than a chunk: the spans that boxes need, the blocks of Blosc frames, what a read then fetches and decodes."""

import itertools
import struct

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Blosc
from numcodecs import blosc as library
from toy_store import held, layout, request
from toy_store import write as write_toy

from jigsaw.errors import CorruptChunkError
from jigsaw.io.chunks import chunk_finder
from jigsaw.io.chunks.chunk import join_spans, needed_byte_spans, needed_share
from jigsaw.io.chunks.codecs import blosc_frame_of, check_blosc_header
from jigsaw.io.chunks.files import BadChunkError, merge_ranges
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.chunk_readers import PLAN_MODES
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.io.series.request import ReadPart, ReadRequest
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.testing import on_ranks, world_mesh

ROWS = (200, 150)


# -- spans -----------------------------------------------------------------------------------------------------------


@st.composite
def rects(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        rect = []
        for n in shape:
            edges = sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=4)))
            rect.append(tuple(zip(edges[::2], edges[1::2], strict=False)))
        found.append(tuple(rect))
    return shape, found, tuple(draw(st.permutations(range(len(shape)))))


@given(rects(), st.integers(0, 9))
@settings(deadline=None, max_examples=200)
def test_spans_are_the_bytes_of_the_boxes(given_rects, gap):
    shape, wanted, order = given_rects
    need = np.zeros(shape, bool)
    for rect in wanted:
        need[np.ix_(*[[i for a, b in dim for i in range(a, b)] for dim in rect])] = True
    flat = np.repeat(need.transpose(order).ravel(), 4)
    spans = needed_byte_spans(wanted, shape, order, 4, gap)
    covered = np.zeros(flat.size, bool)
    for a, b in spans:
        covered[a:b] = True
    assert covered[flat].all()
    assert (spans[1:, 0] > spans[:-1, 1] + gap).all()
    if gap == 0:
        assert (covered == flat).all()


def test_joined_keeps_what_is_apart():
    spans = np.array([[10, 12], [0, 4], [3, 9], [20, 21]])
    assert join_spans(spans, 0).tolist() == [[0, 9], [10, 12], [20, 21]]
    assert join_spans(spans, 1).tolist() == [[0, 12], [20, 21]]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1), st.integers(0, 5))
def test_intervals_and_arrays_of_them_are_joined_alike(parts, gap):
    spans = [(start, start + length) for start, length in parts]
    merged = merge_ranges(spans, gap)
    assert join_spans(np.array(spans), gap).tolist() == [list(each) for each in merged]
    assert all(a[1] + gap < b[0] for a, b in itertools.pairwise(merged))


# -- Blosc frames ----------------------------------------------------------------------------------------------------

KINDS = list(itertools.product(("lz4", "blosclz", "zstd", "zlib", "lz4hc"), (0, 1, 2), ("u1", "f4", "f8", "V12")))


def frame(raw):
    head = raw[:16].tobytes()
    size = struct.unpack("<I", head[4:8])[0]
    _, count = check_blosc_header(head, size, raw.size)
    return blosc_frame_of(head, raw[16 : 16 + (0 if head[2] & 2 else 4 * count)])


@pytest.mark.slow
@pytest.mark.parametrize(("cname", "shuffle", "dtype"), KINDS)
def test_blocks_of_a_frame_are_those_of_the_library(cname, shuffle, dtype):
    r = np.random.default_rng(0)
    values = (r.normal(size=30_001) * 50).astype("i4").view("u1")[: 120_000 - 120_000 % 12]
    x = values.view(dtype)
    for level, block in ((5, 0), (1, 4096), (9, 1 << 16), (0, 4096)):
        raw = np.frombuffer(library.compress(x, cname.encode(), level, shuffle, block), np.uint8)
        found = frame(raw)
        for spans in ([[0, 1]], [[5, 9000], [70_000, 70_100]], [[values.size - 1, values.size]], [[0, values.size]]):
            part = found.portion(np.array(spans), gap=100)
            fetched = np.concatenate([raw[at : at + n] for at, n in part.ranges])
            out = np.zeros(values.size, np.uint8)
            found.decode(part, fetched, out)
            for a, b in [*spans, *part.spans]:
                np.testing.assert_array_equal(out[a:b], values[a:b])
            assert part.decoded == sum(b - a for a, b in part.spans) and part.stored <= raw.size


def test_blocks_that_are_stored_in_another_order():
    """As several threads of Blosc leave them."""
    x = np.arange(20_000, dtype="f4").view("u1")
    raw = np.frombuffer(library.compress(x.view("f4"), b"lz4", 5, 1, 1 << 13), np.uint8)
    made, table = frame(raw), 16 + 4 * frame(raw).begin.size
    order = np.random.default_rng(0).permutation(made.begin.size)
    stored = [raw[made.begin[k] : made.end[k]] for k in order]
    begin = np.empty(order.size, "<i4")
    begin[order] = table + np.cumsum([0, *(part.size for part in stored[:-1])])
    turned = np.concatenate([raw[:16], begin.view("u1"), *stored])
    for spans in ([[0, 9000]], [[20_000, 30_000], [70_000, 80_000]]):
        part = frame(turned).portion(np.array(spans), gap=0)
        fetched, out = np.concatenate([turned[at : at + n] for at, n in part.ranges]), np.zeros(x.size, np.uint8)
        frame(turned).decode(part, fetched, out)
        for a, b in spans:
            np.testing.assert_array_equal(out[a:b], x[a:b])


@given(st.integers(0, 79), st.integers(0, 255))
@settings(deadline=None, max_examples=300)
def test_a_changed_header_or_table_is_refused_or_stays_within_the_chunk(at, value):
    x = np.arange(20_000, dtype="f4").view("u1")
    raw = np.frombuffer(library.compress(x, b"lz4", 5, 1, 1 << 13), np.uint8).copy()
    raw[at] = value
    try:
        _, count = check_blosc_header(raw[:16].tobytes(), x.size, raw.size)
        found = blosc_frame_of(raw[:16].tobytes(), raw[16 : 16 + (0 if raw[2] & 2 else 4 * count)])
        part = found.portion(np.array([[10, 50_000]]), gap=0)
        fetched = np.concatenate([raw[at : at + n] for at, n in part.ranges])
        found.decode(part, fetched, np.zeros(x.size, np.uint8))
    except BadChunkError:
        return


@pytest.mark.parametrize("halo", [0, 2])
@pytest.mark.parametrize("axes", [{}, {"lat": 3}, {"lat": 2, "lon": 2}], ids=str)
def test_the_share_that_a_rank_takes_of_a_chunk_is_that_of_its_box(tmp_path, axes, halo):
    path, _ = write_toy(tmp_path)
    plan = plan_read(request(axes, halo=halo), open_store(path).arrays)
    for name, readers_of in plan.needed.readers.items():
        for chunk, readers in readers_of.items():
            for member in readers.ranks:
                group, boxes = readers.group((member,)), plan.needed.boxes(name, chunk, member)
                assert group.rects == [box.rect for box in boxes]
                shares = [needed_share([box.rect], plan.tables[name].grid.shape_of(chunk)) for box in boxes]
                assert group.largest_share == pytest.approx(max(shares))


# -- through the reader ----------------------------------------------------------------------------------------------


def write(folder, kind):
    """`air` [time, level, lat, lon], one chunk a step."""
    x = np.random.default_rng(1).normal(size=(2, 3, *ROWS)).round(2).astype("f4")
    dims = ("time", "level", "lat", "lon")
    group = zarr.open_group(str(folder / "s.zarr"), mode="w", zarr_format=3 if kind == "sharded" else 2)
    chunks = (1, 3, *ROWS)
    if kind == "sharded":
        blosc = zarr.codecs.BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", blocksize=1 << 13)
        options = {"compressors": blosc, "shards": (2, *chunks[1:]), "dimension_names": dims}
    else:
        options = {
            "blosc": {"compressors": Blosc("zstd", 1, 1, 1 << 13)},
            "fortran": {"compressors": Blosc("zstd", 1, 2, 1 << 13), "order": "F"},
            "copied": {"compressors": Blosc("lz4", 0, 1, 1 << 13)},
            "plain": {"compressors": None},
        }[kind] | {"attributes": {"_ARRAY_DIMENSIONS": dims}}
    group.create_array("air", shape=x.shape, chunks=chunks, dtype="f4", **options)[...] = x
    return str(folder / "s.zarr"), x


def asked(axes, halo=0):
    times, levels = ((0, 0), (1, 1)), tuple((k, k) for k in range(3))
    return ReadRequest(layout(3, 2, ROWS, axes, halo), (ReadPart("air", (times, levels, None, None), (0, 1, 2, 3)),))


@pytest.mark.parametrize("kind", ["blosc", "fortran", "copied", "plain", "sharded"])
@pytest.mark.parametrize("mode", ["auto", *PLAN_MODES])
@pytest.mark.parametrize("axes", [pytest.param({"lat": 4}, marks=pytest.mark.slow), {"lat": 2, "lon": 2}], ids=str)
@on_ranks(4)
def test_parts_of_chunks_give_the_same_tile(tmp_path, kind, mode, axes):
    mesh = world_mesh(**axes)
    if mesh.get_rank() == 0:
        write(tmp_path, kind)
    import torch.distributed as dist

    dist.barrier()
    x = np.random.default_rng(1).normal(size=(2, 3, *ROWS)).round(2).astype("f4")
    engine = ReadEngine(open_store(tmp_path / "s.zarr"), mesh, threads=1)
    request = asked(axes, halo=2)
    plan = plan_read(request, engine.store.arrays, mode)
    got = engine.read(plan)
    np.testing.assert_array_equal(got, held(x, request.layout, mesh_coordinate(mesh)))
    assert engine.stats == plan.rows[mesh.get_rank()]
    assert engine.looked_up == plan.lookups == plan_read(request, engine.store.arrays, mode).lookups
    engine.close()


@pytest.mark.parametrize("kind", ["blosc", "plain", "sharded"])
def test_bands_read_their_own_blocks(tmp_path, kind):
    path, _ = write(tmp_path, kind)
    arrays = open_store(path).arrays
    request = asked({"lat": 4})
    plan = plan_read(request, arrays)
    assert plan.modes == {"air": "independent"}  # a band is a part of the chunk, and parts hardly overlap
    assert plan.amplification < 1.3  # at most a block more at each end of a level's band
    if kind == "plain":
        assert plan.total.stored_bytes == plan.total.useful_bytes == 2 * 3 * 200 * 150 * 4
    else:
        whole = sum(arrays["air"].finder.stored_bytes((t, 0, 0, 0)) for t in range(2))
        assert plan.total.stored_bytes < 1.3 * whole


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(3, 13, 23, 33), (33, 23, 13), (5, 6, 7, 39), (4,)], ids=str)
@pytest.mark.parametrize("mode", ["independent", "cooperative"])
@on_ranks(4)
def test_steps_that_lie_apart_in_a_chunk_decode_their_own_blocks(tmp_path, steps, mode):
    mesh = world_mesh(lat=2, lon=2)
    x = np.random.default_rng(1).normal(size=(40, *ROWS)).round(2).astype("f4")
    if mesh.get_rank() == 0:
        by_step = Blosc("zstd", 1, 1, x[0].nbytes)
        group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w", zarr_format=2)
        how = {"compressors": by_step, "attributes": {"_ARRAY_DIMENSIONS": ("time", "lat", "lon")}}
        group.create_array("air", shape=x.shape, chunks=x.shape, dtype="f4", **how)[...] = x
    import torch.distributed as dist

    dist.barrier()
    engine = ReadEngine(open_store(tmp_path / "s.zarr"), mesh, threads=1)
    times = tuple((step, place) for place, step in enumerate(steps))
    part = ReadPart("air", (times, None, None), (0, 2, 3), ((1, 0),))
    request = ReadRequest(layout(1, len(steps), ROWS, {"lat": 2, "lon": 2}, 2), (part,))
    plan = plan_read(request, engine.store.arrays, mode)
    got = engine.read(plan)
    np.testing.assert_array_equal(got, held(x[list(steps)][:, None], request.layout, mesh_coordinate(mesh)))
    assert engine.stats == plan.rows[mesh.get_rank()]
    # a block is a step, and so each that is loaded is decoded once, by one rank or by all
    assert plan.total.decoded_bytes == len(steps) * x[0].nbytes * (4 if mode == "independent" else 1)
    engine.close()


@pytest.mark.parametrize(("kind", "shards", "frames"), [("sharded", 1, 2), ("blosc", 0, 2), ("plain", 0, 0)])
def test_lookups_are_the_indices_and_tables_that_are_read(tmp_path, kind, shards, frames):
    path, _ = write(tmp_path, kind)
    arrays = open_store(path).arrays
    plan = plan_read(asked({"lat": 4}), arrays)
    blocks = -(-arrays["air"].grid.chunk_bytes // (1 << 13))
    # an index has (offset, length) of two chunks and its checksum; a table comes after its header of 16 bytes
    expected = shards + 2 * frames, shards * (2 * 16 + 4) + frames * (16 + 4 * blocks)
    assert plan.lookups == arrays["air"].finder.looked_up == expected


def test_a_damaged_table_of_blocks_is_named(tmp_path):
    path, _ = write(tmp_path, "blosc")
    arrays = open_store(path).arrays
    ref = arrays["air"].finder.locate((0, 0, 0, 0))
    with open(ref.path, "r+b") as f:
        f.seek(20)
        f.write(b"\xff\xff\xff\x7f")
    with pytest.raises(CorruptChunkError, match=r"chunk \(0, 0, 0, 0\) of array 'air' in .*table of blocks points out"):
        assert plan_read(asked({"lat": 4}), arrays, "independent").total.chunks


def test_small_chunks_are_read_whole(tmp_path, monkeypatch):
    path, _ = write(tmp_path, "blosc")
    monkeypatch.setattr(chunk_finder, "SMALLEST_DIVIDED_CHUNK", 1 << 30)
    plan = plan_read(asked({"lat": 4}), open_store(path).arrays, "independent")
    assert plan.total.decoded_bytes == 4 * 2 * 3 * 200 * 150 * 4
