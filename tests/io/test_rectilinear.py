"""Zarr arrays whose chunks are not all of one size along a dim."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import zarr
from google_crc32c import value as crc32c

import jigsaw
import jigsaw.io as jio
from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.formats.store import open_store
from jigsaw.io.formats.zarr_group import zarr_chunk_grid
from jigsaw.testing import on_ranks

KNOWN = zarr.config.get("array.rectilinear_chunks", None) is not None
newer = pytest.mark.skipif(not KNOWN, reason=f"zarr {zarr.__version__} does not know rectilinear grids")
NAMES = ("time", "lat", "lon")
SHAPE = (5, 13, 10)


def write(path, shapes, shape=SHAPE, edges=None, codecs=()):
    """A store as the specification of rectilinear grids has it; `edges` are the lengths of the chunks, by dim."""
    values = np.random.default_rng(0).normal(size=SHAPE).astype("<f4")
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": shapes}}
    array = {
        "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "float32", "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}, "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *codecs], "attributes": {},
        "dimension_names": NAMES,
    }  # fmt: skip
    (path / "air").mkdir(parents=True)
    (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    (path / "air" / "zarr.json").write_text(json.dumps(array))
    for name, n in zip(NAMES, shape, strict=True):
        made = zarr.create_array(path / name, data=np.arange(n) * 1.0, dimension_names=(name,), zarr_format=3)
        made.attrs.update({"units": "days since 2000-01-01"} if name == "time" else {})
    for index in np.ndindex(*map(len, edges)) if edges else ():
        starts = [sum(lengths[:i]) for lengths, i in zip(edges, index, strict=True)]
        chunk = np.zeros([lengths[i] for lengths, i in zip(edges, index, strict=True)], "<f4")
        part = values[tuple(slice(a, a + n) for a, n in zip(starts, chunk.shape, strict=True))]
        chunk[tuple(slice(n) for n in part.shape)] = part
        file = path / "air" / "c" / "/".join(map(str, index))
        file.parent.mkdir(parents=True, exist_ok=True)
        raw = chunk.tobytes()
        file.write_bytes(raw + crc32c(raw).to_bytes(4, "little") if codecs else raw)
    return values


@on_ranks(2)
def read_on_two(path, values):
    dataset = jio.open(path, mesh=jigsaw.init_mesh(lat=2), fields=["air"], halo={"lat": 1})
    for step, expected in enumerate(values):
        read = dataset[step].input
        np.testing.assert_array_equal(read.full_tensor().numpy()[0, 0], expected)


@newer
@pytest.mark.parametrize("codecs", [(), ({"name": "crc32c"},)], ids=["plain", "checked"])
def test_chunks_of_many_lengths(tmp_path, codecs):
    shapes = [2, [[3, 2], 4, [3, 1], 8], [[4, 1], 6]]  # one length for all, runs of lengths, a chunk beyond the end
    edges = [[2, 2, 2], [3, 3, 4, 3], [4, 6]]
    values = write(tmp_path / "g.zarr", shapes, edges=edges, codecs=codecs)
    table = open_store(str(tmp_path / "g.zarr")).arrays["air"]
    assert table.decoder is not None and table.grid.counts == (3, 4, 2) and table.chunks == (2, 4, 6)
    assert [a.edges() for a in table.grid.along] == [[0, 2, 4, 5], [0, 3, 6, 10, 13], [0, 4, 10]]
    read_on_two(str(tmp_path / "g.zarr"), values)


@newer
def test_what_zarr_itself_writes(tmp_path):
    values = np.random.default_rng(0).normal(size=SHAPE).astype("f4")
    with zarr.config.set({"array.rectilinear_chunks": True}):
        group = zarr.open_group(tmp_path / "g.zarr", mode="w")
        made = {
            "air": {"chunks": [[1, 4], [5, 5, 3], [7, 3]]},
            "sea": {"chunks": [1, 13, 5], "shards": [[2, 3], [13], [10]]},
        }
        for name, options in made.items():
            group.create_array(name, shape=SHAPE, dtype="f4", dimension_names=NAMES, **options)[...] = values
    store = open_store(tmp_path / "g.zarr")
    assert store.arrays["air"].decoder is not None
    assert store.arrays["sea"].decoder is None  # shards of many lengths are left to zarr
    for name in made:
        np.testing.assert_array_equal(store.read_small(name), values)


@pytest.mark.skipif(KNOWN, reason="this zarr reads them")
def test_an_older_zarr(tmp_path):
    write(tmp_path / "g.zarr", [5, [3, 10], 10])
    with pytest.raises(UnsupportedStoreError, match=r"has metadata that cannot be read|(as|without) a Zarr group"):
        open_store(str(tmp_path / "g.zarr"))


def test_grids_as_documents_have_them():
    def rectilinear(*shapes):
        return {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": shapes}}

    assert zarr_chunk_grid("a", (7, 5), {"name": "regular", "configuration": {"chunk_shape": (2, 5)}}) == ((2, 5), {})
    assert zarr_chunk_grid("a", (7, 5), rectilinear(3, [[2, 2], 1])) == ((3, 2), {1: (2, 2, 1)})
    assert zarr_chunk_grid("a", (7, 0), rectilinear([7, 9], [4])) == ((7, 1), {0: (7,), 1: ()})
    with pytest.raises(UnsupportedStoreError, match=r"array 'a' has chunks for 6 of 7 rows of dim 0"):
        zarr_chunk_grid("a", (7,), rectilinear([3, 3]))
    with pytest.raises(UnsupportedStoreError, match=r"array 'a' has a chunk grid 'hexagonal'; only regular and recti"):
        zarr_chunk_grid("a", (7,), {"name": "hexagonal"})
    assert math.prod(zarr_chunk_grid("a", (), rectilinear())[0]) == 1
