"""What the fuzzers call with bytes: each damages a good sample as the bytes say, and compares with the library.

``python fuzz_targets.py NAME [options of libFuzzer]`` searches with atheris, guided by coverage.
"""

import atexit
import os
import shutil
import sys
import tempfile
from contextlib import nullcontext
from functools import cache
from itertools import product

import h5py
import hdf5plugin  # at once: its filters find the libhdf5 of h5py only before netCDF4 brings another
import numpy as np


def _watched():
    """Of a search, which branches of the reader are taken."""
    if __name__ != "__main__":
        return nullcontext()
    import atheris

    return atheris.instrument_imports(include=["jigsaw.io"])


with _watched():
    from jigsaw.errors import CorruptChunkError
    from jigsaw.io.chunks.codecs import CodecDecoder, blosc_frame_of, check_blosc_header
    from jigsaw.io.chunks.files import BadChunkError
    from jigsaw.io.formats.hdf5_filters import Hdf5Filter, filter_pipeline_of
    from jigsaw.io.formats.zarr_group import table_of_zarr


def damaged(raw, data):
    """`raw` with bytes replaced, inserted, removed or cut off, as `data` says by fours."""
    raw = bytearray(raw)
    for kind, high, low, value in zip(*[iter(data)] * 4, strict=False):
        at = (high << 8 | low) % max(len(raw), 1) if kind & 1 else low % max(min(len(raw), 64), 1)
        if not raw or kind < 0xF0:
            raw[at : at + 1] = [value]
        elif kind < 0xF8:
            raw[at:at] = [value]
        elif kind < 0xFC:
            del raw[at]
        else:
            del raw[-1 - value :]
    return bytes(raw)


# -- Blosc -----------------------------------------------------------------------------------------------------------


@cache
def frames():
    from numcodecs import blosc

    x = (np.random.default_rng(0).normal(size=4001).cumsum() * 9).astype("i4").view("u1")[:16_000]
    made = []
    for name, shuffle, dtype in product(("lz4", "blosclz", "zstd", "zlib"), (0, 1, 2), ("u1", "f4", "f8", "V20")):
        for level, block in ((5, 0), (1, 1280), (0, 4096)):
            made.append(blosc.compress(np.ascontiguousarray(x).view(dtype), name.encode(), level, shuffle, block))
    return made


def blosc(data):
    """Whole frames and parts of them give what Blosc gives, or an error."""
    from numcodecs import blosc as library

    if len(data) < 3:
        return
    frame = np.frombuffer(damaged(frames()[data[0] % len(frames())], data[3:]), np.uint8)
    size, want = 16_000, None
    try:
        out = np.full(size, 0x55, np.uint8)
        CodecDecoder(np.dtype("u1"), (0,), "blosc").decode(frame, out)
        want = np.full(size, 0xAA, np.uint8)
        library.decompress(frame, want)
        np.testing.assert_array_equal(out, want)
    except BadChunkError:
        pass
    try:
        head = frame[:16].tobytes()
        _, count = check_blosc_header(head, size, frame.size)
        found = blosc_frame_of(head, frame[16 : 16 + (0 if head[2] & 2 else 4 * count)])
        low, high = sorted((data[1] * 62, data[2] * 62 + 1))
        part = found.portion(np.array([[low, high]]), gap=data[0] * 8)
        fetched = np.concatenate([frame[at : at + n] for at, n in part.ranges])
        assert fetched.size == part.stored
        out = np.full(size, 0x55, np.uint8)
        found.decode(part, fetched, out)
    except BadChunkError:
        return
    if want is not None:  # else another block is damaged
        np.testing.assert_array_equal(out[low:high], want[low:high])


# -- shard indices ---------------------------------------------------------------------------------------------------


@cache
def shards():
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec, ShardingCodec

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    group, made = zarr.open_group(folder, mode="w"), []
    for i, (location, sealed, inner) in enumerate(product(("end", "start"), (True, False), (None, BloscCodec()))):
        codecs = [zarr.codecs.BytesCodec(), *([inner] if inner else [])]
        index = [zarr.codecs.BytesCodec(), *([Crc32cCodec()] if sealed else [])]
        codec = ShardingCodec(chunk_shape=(8,), codecs=codecs, index_codecs=index, index_location=location)
        array = group.create_array(
            f"a{i}",
            shape=(32,),
            chunks=(32,),
            dtype="i4",
            serializer=codec,
            compressors=None,
            filters=None,
            fill_value=7,
        )
        array[:24] = np.arange(24)  # the last inner chunk is missing
        path = os.path.join(folder, f"a{i}", "c", "0")
        with open(path, "rb") as file:
            made.append((array, path, file.read(), location == "end", sealed))
    return made


def shard(data):
    """Chunks in a shard whose index is damaged, by a matching checksum or not, are those that zarr reads, or errors."""
    from google_crc32c import value as crc32c

    if len(data) < 2:
        return
    array, path, whole, at_end, sealed = shards()[data[0] % len(shards())]
    size = 64 + 4 * sealed
    index, body = (whole[-size:], whole[:-size]) if at_end else (whole[:size], whole[size:])
    index = damaged(index, data[2:])
    if sealed and data[1] & 1:  # a lie that is sealed
        index = index[:-4] + crc32c(index[:-4]).to_bytes(4, "little")
    with open(path, "wb") as file:
        file.write(body + index if at_end else index + body)
    table = table_of_zarr("a", array)
    for i in range(4):
        out = np.full(table.grid.chunk_bytes, 0x55, np.uint8)
        try:
            if table.loader.load((i,), out).stored is None:
                table.loader.fill(out, (i,))
        except CorruptChunkError:
            continue
        np.testing.assert_array_equal(table.loader.view(out, (i,)), array[8 * i : 8 * i + 8])


# -- HDF5 filters ----------------------------------------------------------------------------------------------------


def _hdf5_ways():
    return [
        {"compression": "gzip", "shuffle": True},
        {"compression": "gzip", "fletcher32": True},
        {"shuffle": True, "fletcher32": True},
        dict(hdf5plugin.Zstd()),
        dict(hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE)),
        dict(hdf5plugin.Blosc("zstd", 5, hdf5plugin.Blosc.BITSHUFFLE)) | {"shuffle": True},
    ]


@cache
def chunks():
    x = np.random.default_rng(0).normal(size=803).cumsum().astype("f4")  # the last elements are of no whole group
    file = h5py.File.in_memory(rdcc_nbytes=0)
    made = []
    for i, how in enumerate(_hdf5_ways()):
        dataset = file.create_dataset(f"x{i}", data=x, chunks=x.shape, **how)
        plist = dataset.id.get_create_plist()
        found = [plist.get_filter(k) for k in range(plist.get_nfilters())]
        pipeline = filter_pipeline_of(x.dtype, 1, [Hdf5Filter(code, tuple(values)) for code, _, values, _ in found])
        assert pipeline is not None
        made.append((file, dataset.name, pipeline, dataset.id.read_direct_chunk((0,))[1]))
    return made


def hdf5(data):
    """Chunks whose filters are undone are those that libhdf5 reads, or errors."""
    if len(data) < 2:
        return
    file, name, pipeline, whole = chunks()[data[0] % len(chunks())]
    mask = data[1] & (1 << len(pipeline.filters)) - 1 if data[1] >= 0xF0 else 0
    raw = damaged(whole, data[2:])
    out = np.full(803 * 4, 0x55, np.uint8)
    try:
        pipeline.decode(np.frombuffer(raw, np.uint8), out, mask)
    except BadChunkError:
        return
    # libhdf5 remembers the mask of a chunk while the dataset is open, and while its size stays
    file[name].id.write_direct_chunk((0,), raw + b"\0", mask)
    file[name].id.write_direct_chunk((0,), raw, mask)
    np.testing.assert_array_equal(out.view("u4"), file[name][...].view("u4"))


TARGETS = {"blosc": blosc, "shard": shard, "hdf5": hdf5}


if __name__ == "__main__":
    import atheris

    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
