"""Every storage form of zarr as a chunk table: the same values as zarr's own, byte ranges, refusals."""

import json
import os
import shutil
import struct
import warnings
import zlib

import numpy as np
import pytest
import xarray as xr
import zarr
from google_crc32c import value as crc32c
from toy_store import FORMS, SLOW, write
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

import jigsaw
from jigsaw.errors import CorruptChunkError, TruncatedError, UnsupportedStoreError
from jigsaw.io.formats.store import open_store
from jigsaw.testing import world_mesh


@pytest.fixture(params=FORMS, ids="-".join)
def stored(request, tmp_path):
    return request.param, *write(tmp_path, request.param)


def whole(table):
    """An array through its chunk table."""
    full = np.empty(
        [g * c for g, c in zip(table.grid.counts, table.chunks, strict=True)], np.dtype(table.dtype).newbyteorder("=")
    )
    for index in table.grid.indices():
        room = np.empty(table.grid.chunk_bytes, np.uint8)
        loaded = table.loader.load(index, room)
        assert loaded.stored == table.finder.stored_bytes(index) > 0
        full[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, table.chunks, strict=True))] = table.loader.view(
            room, index
        )
    return full[tuple(slice(n) for n in table.shape)]


def test_every_form_gives_its_values(stored):
    form, path, values = stored
    store = open_store(path)
    assert set(store.arrays) == set(values)
    for name, x in values.items():
        table = store.arrays[name]
        assert (table.decoder is None) == (form in SLOW)
        assert table.shape == x.shape and table.dims[-2:] == ("lat", "lon")
        np.testing.assert_array_equal(whole(table), x)


def test_a_chunk_of_a_shard_is_its_inner_chunk_by_range(tmp_path):
    path, _ = write(tmp_path, ("sharded", "default"))
    table = open_store(path).arrays["air"]
    assert table.chunks == (1, 3, 5, 4)
    ref = table.finder.locate((1, 0, 1, 1))
    assert ref.path.endswith("air/c/0/0/0/0")
    assert 0 < ref.length < os.path.getsize(ref.path)


def test_a_shard_index_is_read_once(tmp_path, monkeypatch):
    path, _ = write(tmp_path, ("sharded", "default"))
    table = open_store(path).arrays["air"]
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a[0]) or real(*a, **k))
    whole(table)
    assert len(opened) == len(set(opened)) == 2 * 1 * 2 * 2


def test_a_missing_chunk_is_none(tmp_path):
    for form in (("v2", "zstd"), ("v3", "default"), ("sharded", "default"), ("v2", "delta")):
        path, _ = write(tmp_path, form)
        table = open_store(path).arrays["t2m"]
        os.remove(table.finder.locate((2, 1, 0)).path)
        table = open_store(path).arrays["t2m"]
        room = np.full(table.grid.chunk_bytes, 7, np.uint8)
        assert table.finder.locate((2, 1, 0)) is None
        assert table.loader.load((2, 1, 0), room).stored is None
        assert (room == 7).all()


def test_a_missing_inner_chunk_is_none(tmp_path):
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    made = group.create_array("a", shape=(8,), chunks=(2,), shards=(4,), dtype="f4", fill_value=9)
    made[2:4] = 1
    table = open_store(tmp_path / "s.zarr").arrays["a"]
    assert [table.finder.locate((i,)) is None for i in range(4)] == [True, False, True, True]
    assert table.fill_value == 9


@pytest.mark.parametrize("sealed", [True, False])
def test_an_index_of_a_shard_in_big_endian(tmp_path, sealed):
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    index = [BytesCodec(endian="big"), *([Crc32cCodec()] if sealed else [])]
    codec = ShardingCodec(chunk_shape=(2,), codecs=[BytesCodec()], index_codecs=index)
    made = group.create_array("a", shape=(8,), chunks=(4,), dtype="i4", serializer=codec, compressors=None)
    made[...] = np.arange(8)
    table = open_store(tmp_path / "s.zarr").arrays["a"]
    assert table.chunks == (2,)
    np.testing.assert_array_equal(whole(table), np.arange(8))


def row_of_shards(folder):
    """Ten chunks of one row in four shards, of which one is missing, and inner chunks of another; and its values."""
    group = zarr.open_group(str(folder / "s.zarr"), mode="w")
    made = group.create_array("a", shape=(2, 20), chunks=(1, 2), shards=(1, 6), dtype="f4", fill_value=9)
    made[1, 2:12] = np.arange(10)
    made[1, 18:] = 1
    return open_store(folder / "s.zarr").arrays["a"], made[1]


@pytest.mark.parametrize("places", ["shards", "objects"])
def test_a_row_of_chunks_is_loaded_as_each_by_itself(tmp_path, places):
    table, values = row_of_shards(tmp_path)
    if places == "objects":
        made = zarr.open_group(str(tmp_path / "o.zarr"), mode="w").create_array(
            "a", shape=(2, 20), chunks=(1, 2), dtype="f4", fill_value=9
        )
        made[1] = values
        table = open_store(tmp_path / "o.zarr").arrays["a"]
    for first in range(10):
        for count in range(1, 11 - first):
            room = np.zeros((count, 2), "f4")
            sizes = table.decoding.load_strip((1, first), count, room.reshape(-1).view("u1"))
            each = [table.finder.locate((1, first + n)) for n in range(count)]
            assert sizes == [ref and ref.length for ref in each]
            there = np.repeat([size is not None for size in sizes], 2)
            stored = values[2 * first : 2 * (first + count)]
            np.testing.assert_array_equal(room.ravel(), np.where(there, stored, 0))
            assert (stored[~there] == 9).all()


def test_a_damaged_chunk_of_a_row_is_named(tmp_path):
    ref = row_of_shards(tmp_path)[0].finder.locate((1, 4))
    with open(ref.path, "r+b") as f:
        f.seek(ref.offset)
        f.write(b"\0" * 4)
    table = open_store(tmp_path / "s.zarr").arrays["a"]
    with pytest.raises(CorruptChunkError, match=r"chunk \(1, 4\) of array 'a'"):
        table.decoding.load_strip((1, 2), 4, np.zeros(32, "u1"))


@pytest.mark.parametrize(
    "form",
    [("v2", "blosc"), ("v2", "zstd"), ("v2", "zlib"), ("v2", "none"), ("v3", "crc"), ("v2", "delta")],
    ids="-".join,
)
def test_a_truncated_chunk_is_named(tmp_path, form):
    path, _ = write(tmp_path, form)
    table = open_store(path).arrays["air"]
    ref = table.finder.locate((1, 0, 2, 1))
    os.truncate(ref.path, ref.length - 7)
    kind = CorruptChunkError if form[1] in ("crc", "delta", "zstd") else TruncatedError
    with pytest.raises(kind, match=rf"chunk \(1, 0, 2, 1\) of array 'air' in {ref.path}"):
        table.loader.load((1, 0, 2, 1), np.empty(table.grid.chunk_bytes, np.uint8))


def test_a_truncated_shard_is_named(tmp_path):
    path, _ = write(tmp_path, ("sharded", "default"))
    table = open_store(path).arrays["air"]
    ref = table.finder.locate((1, 0, 2, 1))
    os.truncate(ref.path, 100)
    with pytest.raises(CorruptChunkError, match=f"shard {ref.path} cannot be read"):
        open_store(path).arrays["air"].finder.locate((1, 0, 2, 1))


@pytest.mark.parametrize("form", [("v2", "blosc"), ("v2", "zstd"), ("v2", "lz4")], ids="-".join)
def test_a_header_that_claims_another_size_is_refused(tmp_path, form):
    path, _ = write(tmp_path, form)
    table = open_store(path).arrays["air"]
    other = open_store(path).arrays["t2m"]
    shutil.copy(other.finder.locate((0, 0, 0)).path, table.finder.path((0, 0, 0, 0)))
    with pytest.raises(CorruptChunkError, match="claims 80 decoded bytes and the chunk has 240"):
        table.loader.load((0, 0, 0, 0), np.empty(table.grid.chunk_bytes, np.uint8))


def test_a_deflate_bomb_is_not_inflated(tmp_path):
    path, _ = write(tmp_path, ("v2", "zlib"))
    table = open_store(path).arrays["air"]
    with open(table.finder.path((0, 0, 0, 0)), "wb") as f:
        f.write(zlib.compress(bytes(1 << 24)))
    with pytest.raises(CorruptChunkError, match="more than the chunk's 240 bytes"):
        table.loader.load((0, 0, 0, 0), np.empty(table.grid.chunk_bytes, np.uint8))


def test_a_shard_index_that_claims_too_much_allocates_nothing(tmp_path):
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    made = group.create_array("a", shape=(4,), chunks=(2,), shards=(4,), dtype="f4", compressors=None)
    made[...] = 1
    table = open_store(tmp_path / "s.zarr").arrays["a"]
    path = table.finder.path((0,))
    with open(path, "rb") as f:
        raw = f.read()

    index = struct.pack("<4Q", 0, 2**60, 8, 8)
    with open(path, "wb") as f:
        f.write(raw[:16] + index + crc32c(index).to_bytes(4, "little"))
    table = open_store(tmp_path / "s.zarr").arrays["a"]
    with pytest.raises(TruncatedError, match=r"chunk \(0,\) of array 'a'"):
        table.loader.load((0,), np.empty(table.grid.chunk_bytes, np.uint8))


def test_a_changed_byte_fails_its_checksum(tmp_path):
    path, _ = write(tmp_path, ("v3", "gzip-crc"))
    table = open_store(path).arrays["air"]
    ref = table.finder.locate((0, 0, 0, 0))
    with open(ref.path, "r+b") as f:
        f.seek(20)
        f.write(b"\xff\x00")
    with pytest.raises(CorruptChunkError, match="CRC-32C"):
        table.loader.load((0, 0, 0, 0), np.empty(table.grid.chunk_bytes, np.uint8))


def test_masks_are_those_of_xarray(tmp_path):
    x = xr.DataArray(np.array([1.0, np.nan, 3.0]), dims="x", name="a").to_dataset()
    encoding = {"a": {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1.0, "_FillValue": -99}}
    for version in (2, 3):
        path = tmp_path / f"{version}.zarr"
        x.to_zarr(path, zarr_format=version, encoding=encoding)
        table = open_store(path).arrays["a"]
        assert (table.masks, table.scale, table.offset, table.dims) == ((-99.0,), 0.5, 1.0, ("x",))
    plain = zarr.open_group(str(tmp_path / "plain.zarr"), mode="w", zarr_format=2)
    plain.create_array("zeros", shape=(3,), chunks=(3,), dtype="f4")
    assert open_store(plain).arrays["zeros"].masks == ()


def test_unsigned_attribute(tmp_path):
    group = zarr.open_group(str(tmp_path / "u.zarr"), mode="w", zarr_format=2)
    made = group.create_array(
        "a", shape=(3,), chunks=(3,), dtype="i1", attributes={"_Unsigned": "true", "_FillValue": -1}
    )
    made[...] = np.array([-1, -2, 5], "i1")
    table = open_store(group).arrays["a"]
    assert (table.dtype, table.masks) == ("|u1", (255.0,))
    assert whole(table).tolist() == [255, 254, 5]


@pytest.mark.parametrize("declared", [True, "TRUE", "yes", "false", 1])
def test_other_words_than_xarrays_declare_no_sign(tmp_path, declared):
    group = zarr.open_group(str(tmp_path / "u.zarr"), mode="w")
    group.create_array("a", shape=(3,), chunks=(3,), dtype="i1", attributes={"_Unsigned": declared})
    assert open_store(group).arrays["a"].dtype == "|i1"


@pytest.mark.parametrize("value", ["-3", "none", "AAAAAAAA+D8="])
def test_a_missing_value_in_words_masks_nothing(tmp_path, value):
    assert open_store(lying(tmp_path, "missing_value", value)).arrays["a"].masks == ()


@pytest.mark.parametrize(("dtype", "said", "fill", "want"), [("i1", "true", -1, 255), ("u2", "false", 65535, -1)])
def test_a_missing_chunk_of_the_other_sign(tmp_path, dtype, said, fill, want):
    group = zarr.open_group(str(tmp_path / "u.zarr"), mode="w")
    attrs = {"_Unsigned": said, "_FillValue": fill}
    group.create_array("a", shape=(3,), chunks=(3,), dtype=dtype, fill_value=fill, attributes=attrs)
    table = open_store(group).arrays["a"]
    room = np.zeros(table.grid.chunk_bytes, np.uint8)
    table.loader.fill(room, (0,))
    assert (table.fill_value, table.masks) == (want, (want,))
    assert table.loader.view(room, (0,)).tolist() == [want] * 3


def test_a_mask_is_one_whole_number(tmp_path):
    """Of 64 bits too, where a float stands for many."""
    most = 2**63 - 1
    group = zarr.open_group(str(tmp_path / "m.zarr"), mode="w")
    group.create_array("a", shape=(3,), chunks=(3,), dtype="i8", attributes={"missing_value": most})
    table = open_store(group).arrays["a"]
    assert [np.int64(most - n) == table.masks[0] for n in range(3)] == [True, False, False]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(("dtype", "chunks", "key"), [("i4", 2, "dtype|data_type"), ("f4", 1, "chunks|chunk_grid")])
def test_consolidated_metadata_of_another_array_are_refused(tmp_path, zarr_format, dtype, chunks, key):
    path = str(tmp_path / "c.zarr")
    group = zarr.create_group(path, zarr_format=zarr_format)
    group.create_group("in").create_array("a", shape=(4,), chunks=(2,), dtype="f4")[...] = 4.0
    with warnings.catch_warnings(action="ignore"):  # that a Zarr v3 store is consolidated
        zarr.consolidate_metadata(path)
    current = zarr.open_group(path, use_consolidated=False)
    current["in/a"].resize(6)
    assert open_store(path).arrays["in/a"].shape == (4,)  # rows that were added do not change how others are read
    del current["in/a"]
    current["in"].create_array("a", shape=(4,), chunks=(chunks,), dtype=dtype)[...] = 4
    with pytest.raises(UnsupportedStoreError, match=f"array 'in/a' in .* have ({key})=.*, and the array's own"):
        open_store(path)
    with warnings.catch_warnings(action="ignore"):
        zarr.consolidate_metadata(path)
    assert whole(open_store(path).arrays["in/a"]).tolist() == [4] * 4


def test_nested_groups_and_small_reads(tmp_path):
    group = zarr.open_group(str(tmp_path / "n.zarr"), mode="w")
    group.create_group("high").create_array("t", shape=(3,), chunks=(2,), dtype="f4")[...] = 4.0
    group.attrs["title"] = "nested"
    store = open_store(tmp_path / "n.zarr")
    assert list(store.arrays) == ["high/t"] and store.attrs["title"] == "nested"
    assert store.read_small("high/t").tolist() == [4.0] * 3
    assert whole(store.arrays["high/t"]).tolist() == [4.0] * 3


def test_what_is_no_store(tmp_path):
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "notes.txt").write_text("no field")
    for name, reason in {
        "nothing.zarr": "does not exist",
        "folder.zarr": "a folder without a Zarr group",
        "notes.txt": "a file of none of the known formats",
    }.items():
        with pytest.raises(UnsupportedStoreError, match=f"{name}' .*{reason}.*reads Zarr .*GRIB, with xarray"):
            open_store(str(tmp_path / name))


def lying(folder, name, value):
    """A store whose array has this attribute, as it stands in the file."""
    group = zarr.open_group(str(folder / "l.zarr"), mode="w", zarr_format=2)
    group.create_array("a", shape=(4, 5), chunks=(4, 5), dtype="f4")[...] = 1.0
    attrs = {"_ARRAY_DIMENSIONS": ["lat", "lon"]} | {name: value}
    (folder / "l.zarr" / "a" / ".zattrs").write_text(json.dumps(attrs if name else value))
    return str(folder / "l.zarr")


@pytest.mark.parametrize("dims", [["lat"], ["lat", 1], ["lat", ["lon"]], 7, {"lat": 4, "lon": 5}], ids=str)
def test_dims_that_are_no_names(tmp_path, dims):
    with pytest.raises(UnsupportedStoreError, match=r"array 'a' has the dims .* need 2 names"):
        open_store(lying(tmp_path, "_ARRAY_DIMENSIONS", dims))


@pytest.mark.parametrize("value", [7, [], "x"])
def test_attributes_that_are_none(tmp_path, value):
    with pytest.raises(UnsupportedStoreError, match="metadata that cannot be read"):
        open_store(lying(tmp_path, "", value))


@pytest.mark.parametrize("name", ["scale_factor", "add_offset"])
@pytest.mark.parametrize("value", ["x", None, [1.0, 2.0], {}, 10**400], ids=lambda v: str(v)[:10])
def test_packing_by_what_is_no_number(tmp_path, name, value):
    with pytest.raises(UnsupportedStoreError, match=f"array 'a' has {name}=.* not a number"):
        jigsaw.io.open(lying(tmp_path, name, value), mesh={"lat": 1}, fields=["a"])


@pytest.mark.parametrize(
    ("said", "masks"), [("Infinity", (np.inf,)), ("-Infinity", (-np.inf,)), ("NaN", ()), ("AAAAAAAA+D8=", (1.5,))]
)
def test_a_fill_value_in_words(tmp_path, said, masks):
    assert open_store(lying(tmp_path, "_FillValue", said)).arrays["a"].masks == masks


def test_a_fill_value_in_words_that_say_nothing(tmp_path):
    with pytest.raises(UnsupportedStoreError, match="metadata that cannot be read"):
        open_store(lying(tmp_path, "_FillValue", "AAAAAAAA"))


@pytest.mark.parametrize("rows", [2**40, 2**62, 2**70])
def test_a_dim_of_more_rows_than_there_can_be(tmp_path, rows):
    path = lying(tmp_path, "units", "K")
    file = tmp_path / "l.zarr" / "a" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shape": [4, rows]}))
    with pytest.raises(UnsupportedStoreError, match="too large for a coordinate"):
        jigsaw.io.open(path, mesh={"lat": 1}, fields=["a"])


def test_texts_beside_fields(tmp_path):
    path = lying(tmp_path, "units", "K")
    names = zarr.open_group(path, mode="a").create_array("names", shape=(4, 5), chunks=(4, 5), dtype=str)
    names.attrs["_ARRAY_DIMENSIONS"] = ["lat", "lon"]
    assert jigsaw.io.open(path, mesh={"lat": 1}).fields == ("a",)
    with pytest.raises(UnsupportedStoreError, match="only numbers can be read"):
        jigsaw.io.open(path, mesh={"lat": 1}, fields=["names"])


@pytest.mark.parametrize("shards", [None, (8, 8)], ids=["chunks", "shards"])
def test_a_damaged_member_of_a_zip_is_named(tmp_path, shards):
    path = tmp_path / "s.zip"
    values = np.arange(1, 65, dtype="f4").reshape(8, 8)
    with zarr.storage.ZipStore(path, mode="w") as store:
        group = zarr.open_group(store, mode="w")
        made = group.create_array("a", shape=(8, 8), chunks=(4, 4), shards=shards, dtype="f4", compressors=None)
        made[...] = values
    raw = bytearray(path.read_bytes())
    raw[raw.index(values[0, :4].tobytes())] ^= 0xFF
    path.write_bytes(raw)
    table = open_store(zarr.open_group(zarr.storage.ZipStore(path, mode="r"), mode="r")).arrays["a"]
    with pytest.raises(CorruptChunkError, match="Bad CRC-32"):
        table.loader.load((0, 0), np.empty(table.grid.chunk_bytes, np.uint8))


def test_a_path_to_a_zip_file_is_a_store(tmp_path):
    values = np.arange(24.0, dtype="f4").reshape(2, 3, 4)
    xr.Dataset({"a": (("time", "lat", "lon"), values)}).to_zarr(tmp_path / "s.zarr")
    shutil.make_archive(str(tmp_path / "s"), "zip", tmp_path / "s.zarr")
    for path in (tmp_path / "s.zip", str(tmp_path / "s.zip")):
        ds = jigsaw.io.open(path, mesh=world_mesh(lat=1))
        np.testing.assert_array_equal(ds[1].input.local[0, 0].numpy(), values[1])
    (tmp_path / "other.zip").write_bytes(b"PK and nothing more")
    with pytest.raises(UnsupportedStoreError, match="a file of none of the known formats"):
        jigsaw.io.open(tmp_path / "other.zip", mesh={"lat": 1})
