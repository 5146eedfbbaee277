"""HDF5 files that are damaged, lie, change or point elsewhere: the library's values or a typed error, never others."""

import os
import struct
import zlib

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs.fletcher32 import Fletcher32

from jigsaw.errors import CorruptChunkError, ReadError, TruncatedError, UnsupportedStoreError
from jigsaw.io.chunks.files import BadChunkError
from jigsaw.io.formats.hdf5 import claims, open_hdf5_file
from jigsaw.io.formats.hdf5_filters import (
    BLOSC_FILTER,
    DEFLATE_FILTER,
    SHUFFLE_FILTER,
    ZSTD_FILTER,
    Hdf5Filter,
    filter_pipeline_of,
    fletcher32_sums,
)

SHUFFLED = {"compression": "gzip", "shuffle": True}


def smooth(shape=(6, 13, 20)):
    return np.random.default_rng(0).normal(size=shape).cumsum(-1).astype("f4")


def write(path, x=None, **how):
    x = smooth() if x is None else x
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=x, **({"chunks": (1, *x.shape[1:])} | how))
    return x


# -- damage ----------------------------------------------------------------------------------------------------------

HOW = {
    "deflate": SHUFFLED,
    "fletcher32": {"fletcher32": True},
    "zstd": hdf5plugin.Zstd(),
    "blosc": hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """For each filter: the bytes of a file, where its chunk lies, and a path to write a damaged one to."""
    folder = tmp_path_factory.mktemp("fuzz")
    made = {}
    for name, how in HOW.items():
        path = folder / f"{name}.h5"
        write(path, smooth((1, 40, 50)), **how)
        ref = open_hdf5_file(path).arrays["x"].finder.locate((0, 0, 0))
        made[name] = path.read_bytes(), ref, folder / f"{name}-damaged.h5"
    return made


@pytest.mark.parametrize("name", HOW)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bytes_give_the_values_of_the_library_or_an_error(samples, name, data):
    raw, ref, path = samples[name]
    near = st.integers(0, min(64, ref.length - 1))  # headers and tables are more worth damaging
    places = data.draw(st.lists(st.one_of(near, st.integers(0, ref.length - 1)), min_size=1, max_size=3))
    damaged = bytearray(raw)
    for place in places:
        damaged[ref.offset + place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        got = open_hdf5_file(path, cache="").read_small("x")
    except CorruptChunkError:
        return
    if name in ("deflate", "fletcher32"):  # their checksums leave no doubt, but for the level in the header of zlib
        path.write_bytes(raw)
    with h5py.File(path) as f:
        np.testing.assert_array_equal(got.view("u4"), f["x"][...].view("u4"))


@settings(max_examples=60, deadline=None)
@given(
    number=st.sampled_from([DEFLATE_FILTER, BLOSC_FILTER, ZSTD_FILTER]),
    raw=st.binary(max_size=400),
    shuffled=st.booleans(),
)
def test_rubbish_is_refused(number, raw, shuffled):
    filters = [Hdf5Filter(SHUFFLE_FILTER, (4,))] * shuffled + [Hdf5Filter(number, ())]
    out = np.empty(800, np.uint8)
    with pytest.raises(BadChunkError):
        filter_pipeline_of(np.dtype("f4"), 1, filters).decode(np.frombuffer(raw, np.uint8), out)


@pytest.mark.parametrize("size", [1, 2, 3, 719, 720, 2047, 2048, 2049, 100_001])
def test_the_checksum_is_that_of_numcodecs(size):
    data = np.random.default_rng(size).integers(0, 256, size).astype("u1")
    stored = bytes(Fletcher32().encode(data))[-4:]
    first, second = fletcher32_sums(data)
    claimed = int.from_bytes(stored, "little")
    assert (first, second) == ((claimed & 0xFFFF) % 0xFFFF, (claimed >> 16) % 0xFFFF)


def test_headers_that_claim_other_sizes_are_refused_before_anything_is_made(tmp_path):
    for number, head in [
        (BLOSC_FILTER, bytes([2, 1, 0, 4]) + (2**31 - 1).to_bytes(4, "little") * 3),
        (ZSTD_FILTER, b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little")),
    ]:
        filters = [Hdf5Filter(number, ())]
        with pytest.raises(BadChunkError, match=r"claims \d+ decoded bytes and the chunk has 800"):
            raw = np.frombuffer(head + bytes(50), np.uint8)
            filter_pipeline_of(np.dtype("f4"), 1, filters).decode(raw, np.empty(800, np.uint8))


@pytest.mark.parametrize("packed", [b"a" * 2000, b"a" * 700])
def test_a_stream_that_decodes_to_another_size_is_refused(tmp_path, packed):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as f:
        d = f.create_dataset("x", (4, 200), "f4", chunks=(1, 200), compression="gzip")
        d.id.write_direct_chunk((2, 0), zlib.compress(packed))
    with pytest.raises(CorruptChunkError, match=r"chunk \(2, 0\) of array 'x'.*than the chunk's 800 bytes"):
        open_hdf5_file(path).read_small("x")


@pytest.mark.parametrize(
    ("how", "claimed", "kind", "why"),
    [
        ({}, 400, CorruptChunkError, "it has 400 bytes and the chunk has 800"),
        (SHUFFLED, 2**32 - 1, TruncatedError, "it should have 4294967295 bytes at "),
        (SHUFFLED, 20, CorruptChunkError, "damaged or cut short"),
    ],
)
def test_lengths_that_lie_are_refused_before_anything_is_read(tmp_path, how, claimed, kind, why):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="earliest") as f:
        f.create_dataset("x", data=smooth((4, 200)), chunks=(1, 200), **how)
    length = open_hdf5_file(path, cache="").arrays["x"].finder.locate((1, 0)).length
    entry = struct.pack("<IIQQQ", length, 0, 1, 0, 0)  # of the index: length, mask, corner
    raw = path.read_bytes()
    assert raw.count(entry) == 1
    path.write_bytes(raw.replace(entry, struct.pack("<I", claimed) + entry[4:]))
    with pytest.raises(kind, match=rf"chunk \(1, 0\) of array 'x' in .*{why}"):
        open_hdf5_file(path, cache="").read_small("x")


def test_a_file_that_ends_too_early(tmp_path):
    path = tmp_path / "x.h5"
    write(path, **SHUFFLED)
    raw = path.read_bytes()
    store = open_hdf5_file(path)
    store.arrays["x"].finder.locate((0, 0, 0))
    (tmp_path / "cut.h5").write_bytes(raw[:-200])
    with pytest.raises(TruncatedError, match=r"cut\.h5' cannot be opened as HDF5.*truncated"):
        open_hdf5_file(tmp_path / "cut.h5")
    os.truncate(path, len(raw) - 200)
    with pytest.raises(TruncatedError, match=rf"the file had {len(raw)} bytes when it was opened and has"):
        store.arrays["x"].finder.locate((0, 0, 0))
    (tmp_path / "no.h5").write_bytes(b"no HDF5")
    assert not claims(tmp_path / "no.h5")
    with pytest.raises(UnsupportedStoreError, match="cannot be opened as HDF5"):
        open_hdf5_file(tmp_path / "no.h5")
    with pytest.raises(UnsupportedStoreError, match="does not exist"):
        open_hdf5_file(tmp_path / "nowhere.h5")


@pytest.mark.parametrize(
    "how", [SHUFFLED, {"compression": "lzf"}, {"chunks": None}], ids=["fast", "slow", "contiguous"]
)
def test_a_file_that_changes_under_the_reader(tmp_path, how):
    path = tmp_path / "x.h5"
    write(path, **how)
    store = open_hdf5_file(path)
    store.read_small("x")
    write(tmp_path / "new.h5", smooth() + 1, **how)
    os.replace(tmp_path / "new.h5", path)
    with pytest.raises(CorruptChunkError, match=r"opened.*; open the store again"):
        store.read_small("x")


def test_damaged_metadata_ends_in_a_typed_error(tmp_path):
    write(tmp_path / "x.h5", **SHUFFLED)
    raw = (tmp_path / "x.h5").read_bytes()
    r = np.random.default_rng(0)
    path, failed = tmp_path / "damaged.h5", 0
    with h5py.File(tmp_path / "x.h5") as f:
        x = f["x"][...]
    for at in [*range(96), *r.integers(96, 2200, 200)]:
        damaged = bytearray(raw)
        damaged[at] ^= int(r.integers(1, 256))
        path.write_bytes(damaged)
        try:
            store = open_hdf5_file(path, cache="")
            if "x" in store.arrays and store.arrays["x"].shape == x.shape:
                store.read_small("x")
        except ReadError:
            failed += 1
    assert failed > 20


# -- the cache of indices --------------------------------------------------------------------------------------------


def test_an_index_is_kept_and_a_damaged_or_stale_one_is_made_again(tmp_path):
    path, cache = tmp_path / "x.h5", tmp_path / "cache"
    x = write(path, np.arange(70 * 70, dtype="f4").reshape(70, 70), chunks=(1, 1))

    def index():
        (kept,) = cache.glob("*.npz")
        return kept

    def whole():
        return open_hdf5_file(path, cache=cache).read_small("x")

    np.testing.assert_array_equal(whole(), x)
    made = index().stat().st_mtime_ns, index().read_bytes()
    np.testing.assert_array_equal(whole(), x)
    assert index().stat().st_mtime_ns == made[0]
    for damaged in (b"", made[1][:-40], bytes(reversed(made[1])), made[1][:2000] + b"\1\2\3" + made[1][2003:]):
        index().write_bytes(damaged)
        np.testing.assert_array_equal(whole(), x)
        assert index().read_bytes() == made[1]
    x = write(path, np.arange(70 * 70, dtype="f4").reshape(70, 70)[::-1], chunks=(1, 1))
    os.utime(path, ns=(1, 1))
    np.testing.assert_array_equal(whole(), x)


def test_the_cache_is_never_required(tmp_path):
    path = tmp_path / "x.h5"
    x = write(path, np.arange(70 * 70, dtype="f4").reshape(70, 70), chunks=(1, 1))
    (tmp_path / "file").write_text("in the way")
    for cache in ("", tmp_path / "file", tmp_path / "file" / "below"):
        np.testing.assert_array_equal(open_hdf5_file(path, cache=cache).read_small("x"), x)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "x.h5"]


# -- other files -----------------------------------------------------------------------------------------------------


def yearly(folder, steps=(4, 6, 2), chunks=(2, 5, 7), fill=0.0, **how):
    """A virtual dataset of one file a year; its values."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, at = [smooth((n, 13, 20)) + n for n in steps], 0
    layout = h5py.VirtualLayout((sum(steps), 13, 20), "f4")
    for i, x in enumerate(parts):
        with h5py.File(folder / f"{i}.h5", "w") as f:
            f.create_dataset("x", data=x, chunks=chunks, fillvalue=fill, **how)
        layout[at : at + len(x)] = h5py.VirtualSource(f"{i}.h5", "x", x.shape)
        at += len(x)
    with h5py.File(folder / "all.h5", "w") as f:
        f.create_virtual_dataset("x", layout, fillvalue=0.0)
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("more", "fast"),
    [
        (SHUFFLED, True),
        ({"chunks": None}, True),
        ({"fletcher32": True}, True),
        ({"steps": (3, 6, 2), **SHUFFLED}, False),  # a year ends within a chunk
        ({"steps": (4, 6, 3), **SHUFFLED}, True),  # the last may
        ({"fill": 2.0, **SHUFFLED}, False),
        ({"compression": "lzf"}, False),
    ],
    ids=["deflate", "contiguous", "fletcher32", "within", "last", "fill", "lzf"],
)
def test_a_virtual_dataset_is_a_table_over_its_sources(tmp_path, more, fast):
    x = yearly(tmp_path, **more)
    store = open_hdf5_file(tmp_path / "all.h5")
    table = store.arrays["x"]
    assert (table.decoder is not None) == fast
    np.testing.assert_array_equal(store.read_small("x"), x)
    if fast:
        assert {os.path.basename(table.finder.path(i)) for i in table.grid.indices()} == {"0.h5", "1.h5", "2.h5"}


def test_virtual_datasets_of_single_steps_and_with_gaps(tmp_path):
    x = smooth()
    layout = h5py.VirtualLayout((8, 13, 20), "f4")
    for i, step in enumerate(x):
        with h5py.File(tmp_path / f"{i}.h5", "w") as f:
            f.create_dataset("x", data=step, chunks=(13, 20), **SHUFFLED)
        layout[i + 1] = h5py.VirtualSource(f"{i}.h5", "x", step.shape)
    with h5py.File(tmp_path / "all.h5", "w") as f:
        f.create_virtual_dataset("x", layout)
        every = h5py.VirtualLayout((3, 13, 20), "f4")
        every[...] = h5py.VirtualSource(f["x"])[::3]
        f.create_virtual_dataset("every", every)
    store = open_hdf5_file(tmp_path / "all.h5")
    assert store.arrays["x"].decoder is not None
    assert store.arrays["every"].decoder is None
    with h5py.File(tmp_path / "all.h5") as f:
        for name in f:
            np.testing.assert_array_equal(store.read_small(name), f[name][...])


def test_sources_that_are_missing_or_outside_are_refused(tmp_path):
    x = yearly(tmp_path / "years", **SHUFFLED)
    with h5py.File(tmp_path / "years" / "all.h5") as f:
        maps = f["x"].virtual_sources()
    (tmp_path / "own").mkdir()
    for name in ("../years/0.h5", str(tmp_path / "years" / "0.h5"), "a/../../years/0.h5"):
        layout = h5py.VirtualLayout((4, 13, 20), "f4")
        layout[...] = h5py.VirtualSource(name, "x", (4, 13, 20))
        with h5py.File(tmp_path / "own" / "x.h5", "w") as f:
            f.create_virtual_dataset("x", layout)
        with pytest.raises(
            UnsupportedStoreError, match=r"virtual dataset '/x'.*outside of the file's folder.*outside=True"
        ):
            open_hdf5_file(tmp_path / "own" / "x.h5")
        store = open_hdf5_file(tmp_path / "own" / "x.h5", outside=True)
        np.testing.assert_array_equal(store.read_small("x"), x[:4])
    assert len(maps) == 3
    (tmp_path / "years" / "1.h5").unlink()
    with pytest.raises(UnsupportedStoreError, match=r"needs .*1\.h5, which does not exist; bring it back"):
        open_hdf5_file(tmp_path / "years" / "all.h5")


def test_links_within_the_folder_are_followed_and_others_refused(tmp_path):
    x = write(tmp_path / "secret.h5", **SHUFFLED)
    own = tmp_path / "own"
    (own / "below").mkdir(parents=True)
    write(own / "below" / "y.h5", x + 1, **SHUFFLED)
    with h5py.File(own / "x.h5", "w") as f:
        f["here"] = x
        f["soft"], f["lost"] = h5py.SoftLink("/here"), h5py.SoftLink("/nowhere")
        f["gone"] = h5py.ExternalLink("gone.h5", "/x")
        f["near"], f["all"] = h5py.ExternalLink("below/y.h5", "/x"), h5py.ExternalLink("below/y.h5", "/")
        f.create_group("loop")["back"] = f["/"]
        f["turn"] = h5py.SoftLink("/turn")
    store = open_hdf5_file(own / "x.h5")
    assert set(store.arrays) == {"here", "soft", "near", "all/x"}
    for name, expected in {"soft": x, "near": x + 1, "all/x": x + 1}.items():
        np.testing.assert_array_equal(store.read_small(name), expected)
    for target in ("../secret.h5", str(tmp_path / "secret.h5")):
        with h5py.File(own / "out.h5", "w") as f:
            f["x"] = h5py.ExternalLink(target, "/x")
        with pytest.raises(
            UnsupportedStoreError, match=r"external link 'x' in .* points to '\.\./secret\.h5', outside"
        ):
            open_hdf5_file(own / "out.h5")
        np.testing.assert_array_equal(open_hdf5_file(own / "out.h5", outside=True).read_small("x"), x)
    with h5py.File(own / "out.h5", "w") as f:
        f.create_group("a")["x"] = h5py.SoftLink("/b/x")
        f["b"] = h5py.ExternalLink("below/y.h5", "/")
    with pytest.raises(UnsupportedStoreError, match="leads through an external link"):
        open_hdf5_file(own / "out.h5")


def test_external_storage_within_the_folder_and_outside(tmp_path):
    x = smooth()
    (tmp_path / "own").mkdir()
    for raw in (tmp_path / "x.raw", tmp_path / "own" / "x.raw"):
        raw.write_bytes(bytes(64) + x.tobytes())
    for name in ("x.raw", "../x.raw"):
        with h5py.File(tmp_path / "own" / "x.h5", "w") as f:
            f.create_dataset("x", x.shape, "f4", external=[(name, 64, x.nbytes)])
        if name == "x.raw":
            np.testing.assert_array_equal(open_hdf5_file(tmp_path / "own" / "x.h5").read_small("x"), x)
    with pytest.raises(UnsupportedStoreError, match=r"external storage of dataset '/x'.*outside of the file's folder"):
        open_hdf5_file(tmp_path / "own" / "x.h5")
    np.testing.assert_array_equal(open_hdf5_file(tmp_path / "own" / "x.h5", outside=True).read_small("x"), x)
    os.truncate(tmp_path / "x.raw", 1000)
    with pytest.raises(TruncatedError, match="and the file has 1000"):
        open_hdf5_file(tmp_path / "own" / "x.h5", outside=True).read_small("x")
