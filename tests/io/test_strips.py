"""Chunks that are placed as one give the bits that they give one by one."""

from dataclasses import replace

import numpy as np
import pytest
import zarr
from numcodecs import Blosc
from toy_store import request, write

from jigsaw.errors import CorruptChunkError, NaNError
from jigsaw.geometry.layout import Layout
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading import chunk_sections as strips_module
from jigsaw.io.reading.chunk_sections import strips_of_rank
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.io.series.boundary import DimBoundary
from jigsaw.io.series.request import ReadPart, ReadRequest


def both_ways(path, asked, monkeypatch):
    """What a request gives with strips and with every chunk by itself, and the strips."""
    engine = ReadEngine(open_store(path), None)
    try:
        plan = plan_read(asked, engine.store.arrays)
        joined = [strip for strip in strips_of_rank(plan, 0) if strip.box]
        found = engine.read(plan).copy()
        with monkeypatch.context() as patch:
            patch.setattr(strips_module, "LARGEST_STRIP_CHUNK", 0)
            assert all(not strip.box and len(strip.chunks) == 1 for strip in strips_of_rank(plan, 0))
            return found, engine.read(plan), joined
    finally:
        engine.close()


FACTORS = {
    "as stored": {},
    "scaled": {"scale": (2.0, 0.5, 1.0, 1.0), "offset": (1.0, 0.0, -3.0, 0.0)},
    "float64": {"dtype": "float64"},
    "filled": {"nan": 0.0},
}
FORMS = [
    ("v2", "blosc"),
    ("v2", "fortran"),
    ("v2", "big-endian"),
    ("v3", "plain"),
    ("v3", "transposed"),
    ("sharded", "default"),
]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
def test_strips_give_the_same_bits(tmp_path, monkeypatch, form, factors):
    path, _ = write(tmp_path, form)
    joined, alone, found = both_ways(path, request({}, steps=(1, 3), **factors), monkeypatch)
    assert joined.tobytes() == alone.tobytes()
    assert {len(strip.chunks) for strip in found} >= {2}, "chunks of 4 of 10 columns: two are whole, the third is not"


def row_of_chunks(path, values, **how):
    """A store of one array [1, 2, 5, 12] in three chunks side by side, and how to read it."""
    array = zarr.open_group(path, mode="w", zarr_format=2).create_array(
        "x", shape=values.shape, chunks=(1, 2, 5, 4), dtype=values.dtype, compressors=Blosc(), **how
    )
    array[...] = values
    channels = ReadPart("x", (((0, 0),), ((0, 0), (1, 1)), None, None), (0, 1, 2, 3))
    return array, ReadRequest(Layout.of((1, 2, 5, 12), (None, None, "lat", "lon"), {}), (channels,))


def test_packed_integers_and_those_that_mean_missing(tmp_path, monkeypatch):
    packed = np.arange(120, dtype="i2").reshape(1, 2, 5, 12)
    array, asked = row_of_chunks(tmp_path, packed, fill_value=7)
    array.attrs.update({"scale_factor": 0.25, "add_offset": -3.0})
    joined, alone, (strip,) = both_ways(tmp_path, asked, monkeypatch)
    assert len(strip.chunks) == 3
    assert joined.tobytes() == alone.tobytes()
    np.testing.assert_array_equal(joined, np.where(packed == 7, np.nan, packed * 0.25 - 3.0).astype("f4"))


def test_a_channel_that_is_not_shifted_keeps_its_negative_zeros(tmp_path, monkeypatch):
    _, asked = row_of_chunks(tmp_path, np.full((1, 2, 5, 12), -0.0, "f4"))
    shifted = ReadRequest(asked.layout, asked.parts, scale=(1.0, 2.0), offset=(0.0, 1.0))
    joined, alone, _ = both_ways(tmp_path, shifted, monkeypatch)
    assert joined.tobytes() == alone.tobytes()
    assert np.signbit(joined[0, 0]).all()


@pytest.mark.parametrize("rule", ["periodic", "reflect", "replicate"])
def test_rows_that_are_held_twice_are_scaled_once(tmp_path, monkeypatch, rule):
    values = np.arange(120, dtype="f4").reshape(1, 2, 5, 12)
    _, asked = row_of_chunks(tmp_path, values)
    rows = asked.layout.dim(2)[0].with_beyond(2, 1)
    way = {"boundary": (DimBoundary(rule), DimBoundary())} | FACTORS["scaled"]
    held = ReadRequest(asked.layout.replace_dim(2, rows), asked.parts, **{k: v[:2] for k, v in way.items()})
    joined, alone, _ = both_ways(tmp_path, held, monkeypatch)
    assert joined.tobytes() == alone.tobytes()
    factors = np.array([2.0, 0.5], "f4")[:, None, None], np.array([1.0, 0.0], "f4")[:, None, None]
    mode = {"periodic": "wrap", "replicate": "edge"}.get(rule, rule)
    np.testing.assert_array_equal(
        joined, np.pad(values * factors[0] + factors[1], ((0, 0), (0, 0), (2, 1), (0, 0)), mode)
    )


def test_a_level_in_two_channels_is_scaled_for_each(tmp_path, monkeypatch):
    values = np.arange(120, dtype="i2").reshape(1, 2, 5, 12)
    _, asked = row_of_chunks(tmp_path, values)
    twice = ReadPart("x", (((0, 0),), ((1, 0), (1, 1)), None, None), (0, 1, 2, 3))
    joined, alone, _ = both_ways(tmp_path, ReadRequest(asked.layout, (twice,), scale=(2.0, 3.0)), monkeypatch)
    assert joined.tobytes() == alone.tobytes()
    np.testing.assert_array_equal(joined, values[:, [1, 1]] * np.array([2.0, 3.0], "f4")[:, None, None])


def test_a_missing_chunk_amid_a_strip_is_its_fill_value(tmp_path, monkeypatch):
    _, asked = row_of_chunks(tmp_path, np.ones((1, 2, 5, 12), "f4"), fill_value=5.0)
    (tmp_path / "x" / "0.0.0.1").unlink()
    joined, alone, _ = both_ways(tmp_path, replace(asked, missing="fill"), monkeypatch)
    assert joined.tobytes() == alone.tobytes()
    assert (joined[..., 4:8] != 1.0).all() and (np.delete(joined, range(4, 8), axis=3) == 1.0).all()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_names_its_chunk_of_a_strip(tmp_path, bad):
    values = np.ones((1, 2, 5, 12), "f4")
    values[0, 1, 3, 4 * bad + 1] = np.nan
    _, asked = row_of_chunks(tmp_path, values)
    engine = ReadEngine(open_store(tmp_path), None)
    try:
        with pytest.raises(NaNError, match=rf"chunk \(0, 0, 0, {bad}\)"):
            engine.read(plan_read(ReadRequest(asked.layout, asked.parts, nan="raise"), engine.store.arrays))
        chunk = tmp_path / "x" / f"0.0.0.{bad}"
        chunk.write_bytes(chunk.read_bytes()[:4] + b"\xff" + chunk.read_bytes()[5:])
        with pytest.raises(CorruptChunkError, match=rf"chunk \(0, 0, 0, {bad}\)"):
            engine.read(plan_read(asked, engine.store.arrays))
    finally:
        engine.close()
