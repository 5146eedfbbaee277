"""Stores that are damaged, lie, or change, ranks that die or are slow: a typed error on every rank, never a hang."""

import gzip
import json
import os
import signal
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
import zarr
from globe_store import globe
from globe_store import write as write_globe
from google_crc32c import value as crc32c
from numcodecs import LZ4, Blosc, Delta, GZip, Zlib, Zstd
from toy_store import request, write
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import jigsaw
from jigsaw.io import CorruptChunkError, DataLoader, PeerError, ReadError, UnsupportedStoreError
from jigsaw.io.chunks import files
from jigsaw.io.chunks.files import BadChunkError
from jigsaw.io.formats.hdf5_filters import (
    BLOSC_FILTER,
    DEFLATE_FILTER,
    SHUFFLE_FILTER,
    ZSTD_FILTER,
    Hdf5Filter,
    filter_pipeline_of,
)
from jigsaw.io.formats.netcdf3 import open_netcdf3
from jigsaw.io.formats.nifti import open_nifti
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.peers import meet_peers
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.testing import RankFailedError, on_ranks, run_on_ranks, world, world_mesh

MODES = ("independent", "neighbors", "cooperative")


def one(path, n=64, chunk=16, version=3, **how):
    """A store of the array `a`."""
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    group.create_array("a", shape=(n,), chunks=(chunk,), dtype="f4", **how)[...] = np.arange(n) / 7
    return str(path)


def load(path, index=(0,)):
    """The values of one chunk of `a`, by the reader."""
    table = open_store(path).arrays["a"]
    out = np.empty(table.grid.chunk_bytes, np.uint8)
    assert table.loader.load(index, out).stored is not None
    return table.loader.view(out, index)


def edit(path, change):
    """Change the metadata of `a`, or of the group."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


# -- damage ----------------------------------------------------------------------------------------------------------

CHECKED = {
    "crc": {"compressors": (Crc32cCodec(),)},
    "blosc-crc": {"compressors": (BloscCodec(cname="lz4"), Crc32cCodec())},
    "zstd-checksum": {"compressors": ZstdCodec(checksum=True)},
    "gzip": {"compressors": GzipCodec()},
    "zlib": {"compressors": Zlib(), "version": 2},
    "shard-crc": {"compressors": (Crc32cCodec(),), "shards": (64,)},
}


@pytest.mark.parametrize("kind", CHECKED)
def test_a_changed_byte_under_a_checksum_is_an_error_or_changes_nothing(tmp_path, kind):
    path = one(tmp_path / "s.zarr", **CHECKED[kind])
    ref = open_store(path).arrays["a"].finder.locate((1,))
    whole, refused = Path(ref.path).read_bytes(), 0
    for at in range(ref.length):
        damaged = bytearray(whole)
        damaged[ref.offset + at] ^= 1 << at % 8
        Path(ref.path).write_bytes(damaged)
        try:
            np.testing.assert_array_equal(load(path, (1,)), np.arange(16, 32, dtype="f4") / np.float32(7))
        except CorruptChunkError:
            refused += 1
    assert refused >= ref.length - 8  # gzip's header has a time, a system and such


@pytest.mark.parametrize("location", ["end", "start"])
def test_a_changed_byte_in_a_shard_index_is_an_error(tmp_path, location):
    path = tmp_path / "s.zarr"
    group = zarr.open_group(str(path), mode="w")
    codec = zarr.codecs.ShardingCodec(chunk_shape=(16,), index_location=location)
    made = zarr.create_array(
        group.store, name="a", shape=(64,), chunks=(64,), dtype="f4", serializer=codec, compressors=None, filters=None
    )
    made[...] = np.arange(64)
    shard = path / "a" / "c" / "0"
    whole, size = shard.read_bytes(), 16 * 4 + 4
    start = 0 if location == "start" else len(whole) - size
    for at in range(start, start + size):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(CorruptChunkError, match=r"shard .*/a/c/0 cannot be read: the index: its CRC-32C"):
            load(str(path))
    for low, length in ((0, 2**63), (2**64 - 64, 64), (10, 2**64 - 10), (len(whole), 64)):
        index = np.array([low, length] * 4, "<u8").tobytes()
        index += crc32c(index).to_bytes(4, "little")
        shard.write_bytes(whole[:start] + index + whole[start + size :])
        with pytest.raises(CorruptChunkError, match=r"chunk \(0,\) of array 'a' in .* cannot be read: the index says"):
            load(str(path))


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, 3, "claims version 3"),
        (2, 0x39, "flags 0x39"),
        (3, 0, "elements of 0 bytes"),
        (4, 0xFF, "decoded bytes and the chunk has 4096"),
        (8, 1, r"claims blocks of \d+ bytes"),
        (9, 0, "claims (blocks of 0|4096 blocks)"),
        (12, 0, "bytes and its header says"),
        (16, 0, "table of blocks points outside"),
        (19, 0x7F, "table of blocks points outside"),
    ],
)
def test_blosc_headers_are_checked_before_blosc_sees_them(tmp_path, at, value, match):
    path = one(tmp_path / "s.zarr", 1024, 1024, 2, compressors=Blosc("lz4", 5, 1))
    chunk = tmp_path / "s.zarr" / "a" / "0"
    raw = bytearray(chunk.read_bytes())
    assert raw[:4] == b"\x02\x01\x21\x04"
    raw[at] = value
    if at == 8:  # blocks that are split, of no whole number of elements
        raw[2], raw[8:12] = 0x21, (1022).to_bytes(4, "little")
    if at == 9:
        raw[8:12] = bytes(4)
    chunk.write_bytes(raw)
    with pytest.raises(CorruptChunkError, match=match):
        load(path)


def test_a_damaged_coordinate_is_a_typed_error(tmp_path):
    path = write_globe(tmp_path / "g.zarr", globe())
    (chunk,) = (p for p in Path(path, "latitude", "c").rglob("*") if p.is_file())
    chunk.write_bytes(b"rubbish")
    with pytest.raises(CorruptChunkError, match=r"chunk \(0,\) of array 'latitude' in .* cannot be read"):
        jigsaw.io.open(path, mesh={"lat": 1}, fields=["t2m"])


# -- metadata that lies ----------------------------------------------------------------------------------------------


def lies():
    def grid(key, *value):
        return lambda m: m["chunk_grid"]["configuration"].update({key: list(value)})

    def inner(m):
        m["codecs"][0]["configuration"]["chunk_shape"] = [4]

    def no_divisor(m):
        m["codecs"][0]["configuration"]["chunk_shape"] = [5]

    def wider(m):
        m["data_type"] = "float64"

    blosc, shards = {"compressors": BloscCodec()}, {"compressors": None, "shards": (32,)}
    return {
        "smaller": (blosc, grid("chunk_shape", 8), "claims 64 decoded bytes and the chunk has 32"),
        "larger": (blosc, grid("chunk_shape", 32), "claims 64 decoded bytes and the chunk has 128"),
        "terabytes": (blosc, grid("chunk_shape", 10**13), "(there is no memory for|decoded bytes and the chunk has)"),
        "no address": (blosc, grid("chunk_shape", 2**62), "there is no memory for"),
        "zero": (blosc, grid("chunk_shape", 0), r"(need at least 1|metadata that cannot be read|the chunk has 4$)"),
        "negative": (blosc, grid("chunk_shape", -4), "metadata that cannot be read"),
        "text": (blosc, grid("chunk_shape", "many"), "metadata that cannot be read"),
        "two dims": (blosc, grid("chunk_shape", 4, 4), "metadata that cannot be read"),
        "wider": (blosc, wider, "claims 64 decoded bytes and the chunk has 128"),
        "plain": ({"compressors": None}, wider, "has 64 bytes and the chunk has 128"),
        "shard": (shards, grid("chunk_shape", 48), "the index: its CRC-32C does not match"),
        "huge shard": (shards, grid("chunk_shape", 16 * 10**12), "its index alone 16000000000004"),
        "inner": (shards, inner, "the index: its CRC-32C does not match"),
        "no divisor": (shards, no_divisor, "metadata that cannot be read"),
    }


@pytest.mark.parametrize("lie", lies())
def test_chunk_grids_that_lie(tmp_path, lie):
    how, change, match = lies()[lie]
    path = one(tmp_path / "s.zarr", **how)
    edit(tmp_path / "s.zarr" / "a" / "zarr.json", change)
    with pytest.raises(ReadError, match=match):
        table = open_store(path).arrays["a"]
        engine = ReadEngine(open_store(path), threads=1)
        table.loader.load((0,), engine.rank.scratch(table.grid.bytes_of((0,))))


# -- bombs -----------------------------------------------------------------------------------------------------------

MOST = 4 << 20
"""Bytes that refusing may allocate; the bombs are of 8 MB and more."""


def refused(match, step):
    """Refused, and cheaply."""
    tracemalloc.start()
    try:
        with pytest.raises((ReadError, BadChunkError), match=match):
            step()
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def streamed(size):
    """A Zstandard frame without its decoded size: runs of 128 KiB of zeros."""
    blocks = [(1 << 17) << 3 | 1 << 1] * (size >> 17)
    blocks[-1] |= 1
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(b.to_bytes(3, "little") + b"\0" for b in blocks)


BIG = 1 << 26
BOMBS = {
    "blosc": (Blosc("zstd"), lambda: Blosc("zstd").encode(bytes(BIG)), "claims 67108864 decoded bytes"),
    "zstd": (Zstd(), lambda: Zstd().encode(bytes(BIG)), "claims 67108864 decoded bytes"),
    "zstd-streamed": (Zstd(), lambda: streamed(BIG), "Destination buffer is too small"),
    "lz4": (LZ4(), lambda: LZ4().encode(bytes(1 << 23)), "claims 8388608 decoded bytes"),
    "gzip": (GZip(), lambda: gzip.compress(bytes(BIG), 9), "more than the chunk's 64 bytes"),
    "gzip-members": (GZip(), lambda: gzip.compress(bytes(16)) * 1000, "more than the chunk's 64 bytes"),
    "zlib": (Zlib(), lambda: zlib.compress(bytes(BIG), 9), "more than the chunk's 64 bytes"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_chunk_that_decodes_to_too_much_is_refused_before_memory_is_taken(tmp_path, kind):
    codec, bomb, match = BOMBS[kind]
    path = one(tmp_path / "s.zarr", version=2, compressors=codec)
    (tmp_path / "s.zarr" / "a" / "0").write_bytes(bytes(bomb()))
    store = open_store(path)
    refused(match, lambda: store.arrays["a"].loader.load((0,), np.empty(64, np.uint8)))
    refused(match, lambda: store.read_small("a"))  # as a coordinate


def test_a_coordinate_that_claims_to_be_large_is_refused_before_memory_is_taken(tmp_path):
    for claim in ({"shape": [2**30]}, {"shape": [2**62]}, {"chunks": [2**30]}):
        path = one(tmp_path / "s.zarr", version=2, fill_value=1)
        for chunk in (tmp_path / "s.zarr" / "a").glob("[0-9]*"):
            chunk.unlink()  # all of it is the fill value
        edit(tmp_path / "s.zarr" / "a" / ".zarray", lambda m, claim=claim: m.update(claim))
        store = open_store(path)
        refused("array 'a' of shape .* is too large for a coordinate", lambda store=store: store.read_small("a"))


def test_a_coordinate_whose_codecs_only_zarr_knows(tmp_path):
    store = open_store(one(tmp_path / "s.zarr", version=2, filters=[Delta("f4")], compressors=Zlib()))
    assert store.arrays["a"].decoder is None
    np.testing.assert_allclose(store.read_small("a"), np.arange(64) / 7, rtol=1e-5)


@pytest.mark.parametrize("how", [{"compressors": None}, {"compressors": Blosc()}, {"compressors": Zstd()}], ids=str)
def test_a_chunk_that_is_stored_as_too_much_is_refused_before_memory_is_taken(tmp_path, how):
    path = one(tmp_path / "s.zarr", version=2, **how)
    os.truncate(tmp_path / "s.zarr" / "a" / "0", 1 << 40)  # sparse
    table = open_store(path).arrays["a"]
    refused(
        "has 1099511627776 stored bytes, for a chunk of 64", lambda: table.loader.load((0,), np.empty(64, np.uint8))
    )


@pytest.mark.parametrize(
    ("number", "raw"),
    [
        (DEFLATE_FILTER, lambda: zlib.compress(bytes(BIG))),
        (ZSTD_FILTER, lambda: Zstd().encode(bytes(BIG))),
        (ZSTD_FILTER, lambda: streamed(BIG)),
        (BLOSC_FILTER, lambda: Blosc("zstd").encode(bytes(BIG))),
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_hdf5_filters_that_decode_to_too_much(number, raw, shuffled):
    filters = [Hdf5Filter(SHUFFLE_FILTER, (4,))] * shuffled + [Hdf5Filter(number, ())]
    chunk, decoder = np.frombuffer(bytes(raw()), np.uint8), filter_pipeline_of(np.dtype("f4"), 1, filters)
    refused(r"\w", lambda: decoder.decode(chunk, np.empty(800, np.uint8)))


def test_headers_of_files_that_claim_too_much(tmp_path, monkeypatch):
    monkeypatch.setenv("JIGSAW_CACHE", str(tmp_path / "cache"))
    for at in (8, 12, 16):
        head = bytearray(b"CDF\x01" + bytes(4) + b"\0\0\0\x0a\0\0\0\1" + bytes(60))
        head[at : at + 4] = b"\x7f\xff\xff\xff"
        (tmp_path / "x.nc").write_bytes(head)
        refused("header (claims|has the tag)", lambda: open_netcdf3(tmp_path / "x.nc"))
    nifti = bytearray(348)
    nifti[:4], nifti[344:348] = (348).to_bytes(4, "little"), b"n+1\0"
    nifti[40:56] = np.array([3, 32767, 32767, 32767, 1, 1, 1, 1], "<i2").tobytes()
    nifti[70:74] = np.array([16, 32], "<i2").tobytes()
    (tmp_path / "x.nii.gz").write_bytes(gzip.compress(bytes(nifti) + bytes(BIG)))
    refused("claims .* bytes, more than", lambda: open_nifti(tmp_path / "x.nii.gz"))


# -- names that lead elsewhere ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("version", [2, 3])
def test_array_names_that_lead_out_of_the_store_are_refused(tmp_path, version):
    one(tmp_path / "secret.zarr", version=version)
    path = one(tmp_path / "s.zarr", version=version)
    zarr.consolidate_metadata(path)

    def two(m):
        known = m["metadata"]
        known["../.zgroup"] = known["../secret.zarr/.zgroup"] = known[".zgroup"]
        known["../secret.zarr/a/.zarray"] = known["a/.zarray"]

    def three(m):
        known = m["consolidated_metadata"]["metadata"]
        empty = {"kind": "inline", "must_understand": False, "metadata": {}}
        group = {"zarr_format": 3, "node_type": "group", "attributes": {}, "consolidated_metadata": empty}
        known |= {"..": group, "../secret.zarr": group, "../secret.zarr/a": known["a"]}

    edit(tmp_path / "s.zarr" / ("zarr.json" if version == 3 else ".zmetadata"), three if version == 3 else two)
    with pytest.raises(UnsupportedStoreError, match=r"cannot be (read|opened).*"):
        open_store(path)


# -- stores that change under the reader -----------------------------------------------------------------------------

KINDS = {
    "whole": {"chunks": (50_000,), "compressors": ZstdCodec()},
    "parts": {"chunks": (100_000,), "compressors": BloscCodec(cname="zstd", blocksize=1 << 14)},
    "plain": {"chunks": (100_000,), "compressors": None},
    "shards": {"chunks": (25_000,), "shards": (100_000,)},
}


@pytest.mark.parametrize("change", ["longer", "shorter", "alike"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_is_replaced_in_mid_epoch(tmp_path, kind, change):
    """Files are closed and opened again, as with more than 128 of them: what is known of a file is of no other."""
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w")
    made = group.create_array("a", shape=(100_000,), dtype="f4", **KINDS[kind])
    made[...] = values = np.random.default_rng(0).normal(size=100_000).round(2).astype("f4")
    table = open_store(tmp_path / "s.zarr").arrays["a"]
    rect = (((100, 9000),),)
    whole, part = np.empty(table.grid.chunk_bytes, np.uint8), table.finder.portion((0,), [rect])
    assert (part is not None) == (kind in ("parts", "plain"))
    table.loader.load((0,), whole, part)
    np.testing.assert_array_equal(table.loader.view(whole, (0,))[100:9000], values[100:9000])
    path = Path(table.finder.path((0,)))
    scale = {"longer": 1.2345678, "shorter": 0.0, "alike": 1.0}[change]
    made[...] = values[::-1] * np.float32(scale) if change != "shorter" else np.float32(1)
    if kind == "plain" and change != "alike":
        path.write_bytes(path.read_bytes()[: 300_000 if change == "shorter" else None] + bytes(7))
    table.places.files._open.clear()
    with pytest.raises(CorruptChunkError, match=r"chunk \(0,\) of array 'a' in .*(changed since|the file had)"):
        table.loader.load((0,), whole, part)


@pytest.mark.parametrize("suffix", ["zarr", "nc", "h5"])
def test_a_file_that_changes_during_an_epoch(tmp_path, suffix):
    path = tmp_path / f"g.{suffix}"
    if suffix == "zarr":
        write_globe(path, globe(), "sharded")
        (shard,) = (p for p in (path / "2m_temperature" / "c").rglob("*") if p.is_file())
    else:
        shard = path
        globe().to_netcdf(path, **({"format": "NETCDF3_64BIT"} if suffix == "nc" else {"engine": "netcdf4"}))
    ds = jigsaw.io.open(str(path), mesh=world_mesh(lat=1), fields=["t2m"])
    loader = iter(DataLoader(ds, batch_size=1, shuffle=False, prefetch_bytes=0))
    next(loader)
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1000] + bytes(1000))
    with pytest.raises(CorruptChunkError, match="changed since it was opened; open the store again"):
        list(loader)


# -- on ranks --------------------------------------------------------------------------------------------------------


def broken(folder):
    """Stores whose array `t2m` has one bad chunk each, and what it is called."""
    made = {}
    for name, form, damage in (
        ("cut", ("v2", "blosc"), lambda raw: raw[:-9]),
        ("empty", ("v2", "zstd"), lambda raw: b""),
        ("checksum", ("v3", "crc"), lambda raw: raw[:9] + b"\xff\x00" + raw[11:]),
        ("bomb", ("v2", "zlib"), lambda raw: zlib.compress(bytes(BIG))),
        ("long", ("v2", "none"), lambda raw: raw + b"more"),
        ("slow", ("v3", "two-compressors"), lambda raw: raw[:-9]),
        ("index", ("sharded", "default"), lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:]),
    ):
        path, _ = write(folder, form)
        os.rename(path, folder / name)
        chunk = Path(open_store(folder / name).arrays["t2m"].finder.path((1, 0, 0)))
        chunk.write_bytes(damage(chunk.read_bytes()))
        made[name] = str(folder / name)
    return made


@on_ranks(3)
def body_broken(stores):
    before = set(os.listdir("/dev/shm"))
    for i, (name, path) in enumerate(stores.items()):
        host = f"machine {dist.get_rank() * (i % 2)}"
        engine = ReadEngine(open_store(path), meet_peers(world_mesh(lat=3), host=host), threads=1, timeout=20.0)
        for mode in MODES:
            with pytest.raises(ReadError, match=r"'t2m'|shard"):
                engine.read(plan_read(request({"lat": 3}), engine.store.arrays, mode))
            if name != "index":
                engine.read(plan_read(request({"lat": 3}, steps=(2, 3)), engine.store.arrays, mode))
        engine.close()
    dist.barrier()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "jigsaw" in name}


@pytest.mark.slow
def test_damage_that_one_rank_meets_is_an_error_on_all(tmp_path):
    body_broken(broken(tmp_path))


class Slow(files.LocalFiles):
    """A file system that hangs for a while."""

    def ranges(self, path, targets):
        time.sleep(1.5)
        return super().ranges(path, targets)


@on_ranks(3)
def body_slow(path):
    for host in ("here", f"machine {dist.get_rank()}"):
        peers = meet_peers(world_mesh(lat=3), host=host, timeout=0.5)
        engine = ReadEngine(open_store(path), peers, threads=1, timeout=0.5)
        if dist.get_rank() == 1:
            for table in engine.store.arrays.values():
                table.places.files = Slow()
        plan = plan_read(request({"lat": 3}), engine.store.arrays, "cooperative")
        with pytest.raises(PeerError, match=r"waited 0\.5 s for ranks|has ended or does not answer|\[rank \d\]"):
            engine.read(plan)
        dist.barrier()
        engine.close()


@pytest.mark.slow
def test_a_store_that_is_too_slow_for_one_rank_is_an_error_on_all(tmp_path):
    body_slow(write(tmp_path, chunk=(1, 3, 13, 10))[0])


class Deadly(files.LocalFiles):
    """The process is killed while it reads."""

    def ranges(self, path, targets):
        os.kill(os.getpid(), signal.SIGKILL)


def body_killed(path, told):
    """Rank 1 is killed in the middle of its first read; the others try every mode, on one machine and over three."""
    rank, lines = dist.get_rank(), []
    hosts = {"one": "here", "three": f"machine {rank}", "two": f"machine {rank // 2}"}
    engines = {
        name: ReadEngine(open_store(path), meet_peers(world_mesh(lat=3), host=host), threads=1, timeout=20.0)
        for name, host in hosts.items()
    }
    dist.barrier()
    for name, engine in engines.items():
        for mode in MODES:
            plan = plan_read(request({"lat": 3}), engine.store.arrays, mode)
            if rank == 1:
                for table in engine.store.arrays.values():
                    table.places.files = Deadly()
            try:
                engine.read(plan)
            except PeerError as error:
                lines.append(f"{name} {mode}: {error}".replace("\n", " "))
        engine.close()
    Path(told, str(rank)).write_text("\n".join(lines))


def test_a_rank_that_is_killed_fails_every_read_of_the_others_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "_GRACE_SECONDS", 60.0)  # all nine reads, on a machine as busy as it may be
    path, _ = write(tmp_path, chunk=(1, 3, 4, 10))
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailedError):
        run_on_ranks(3, body_killed, path, str(tmp_path))
    for rank in (0, 2):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        assert [line.partition(":")[0] for line in lines] == [
            f"{n} {m}" for n in ("one", "three", "two") for m in MODES
        ]
        assert all("has ended" in line for line in lines)
        assert all("rank 1 of the domain group" in line for line in lines[:3])
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "jigsaw" in name}
