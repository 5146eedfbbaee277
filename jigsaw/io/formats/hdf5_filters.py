"""Filters of HDF5 undone without libhdf5: its own, Blosc and Zstandard. libhdf5 undoes the others.

HDF5 applies the filters of a dataset in order when it writes, and records for each chunk which of them it left out. A
chunk decodes into memory whose size is known beforehand: the claims of a header are compared with it, never believed.

Unshuffling is Blosc's, which has vector instructions for it: the shuffled bytes are handed over as a Blosc frame whose
blocks are stored as they are.  On one core: 4 MB of float32 in 0.4 ms, against 4.5 ms by numpy.

Zlib streams are inflated by libdeflate, straight into the caller's memory and without the GIL. It comes with the wheel
``deflate``, whose own functions hold the GIL and return memory of their own; its exported C functions are called
instead. Without the wheel, or where it hides them, Python's zlib decodes: the same values in about twice the time. On
one core, a float32 field of 4 MB, shuffled, level 4: libdeflate 9 ms, ISA-L 14, zlib-ng 11, zlib 20.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from jigsaw.io.chunks import codecs
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.chunks.files import BadChunkError, ByteArray, ScratchMemory, ShortChunkError

DEFLATE_FILTER, SHUFFLE_FILTER, FLETCHER32_FILTER = 1, 2, 3
BLOSC_FILTER, ZSTD_FILTER = 32001, 32015
COMPRESSOR_FILTERS = (DEFLATE_FILTER, BLOSC_FILTER, ZSTD_FILTER)

_FRAME_HEAD_BYTES = 24
"""Bytes of a Blosc frame of one block before its values: header, table of one, length of the block."""
_SHUFFLED_FLAG, _UNSPLIT_FLAG, _LZ4_FLAG = 0x1, 0x10, 0x20
_DEFLATE_FAILURES = {
    1: "its compressed stream is damaged or cut short",
    2: "it decodes to fewer",
    3: "it decodes to more",
}
_LARGEST_BLOSC_BLOCK = 1 << 29  # limit below the largest block that Blosc takes, about 700 MB


@cache
def libdeflate_functions() -> Any:
    """Return the C functions of libdeflate; None where they are not available."""
    try:
        library = ctypes.CDLL(str(import_module("deflate._deflate").__file__))
        library.libdeflate_alloc_decompressor.restype = ctypes.c_void_p
        library.libdeflate_free_decompressor.argtypes = [ctypes.c_void_p]
        library.libdeflate_free_decompressor.restype = None
        call = library.libdeflate_zlib_decompress
    except (ImportError, OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes, call.restype = [pointer, pointer, size, pointer, size, pointer], ctypes.c_int
    return library


class _Decompressor(threading.local):
    def __init__(self) -> None:
        self.library = libdeflate_functions()
        self.handle = self.library and self.library.libdeflate_alloc_decompressor()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.libdeflate_free_decompressor(self.handle)


_decompressor = _Decompressor()


def inflate_zlib(raw: ByteArray, out: ByteArray, decoder: CodecDecoder) -> None:
    """Decode a zlib stream that must fill `out`; `decoder` is what does it without libdeflate."""
    if not _decompressor.handle:
        decoder.decode(raw, out)
        return
    decode = _decompressor.library.libdeflate_zlib_decompress
    failed = decode(_decompressor.handle, raw.ctypes.data, raw.size, out.ctypes.data, out.size, None)
    if failed:
        size = "" if failed == 1 else f" than the chunk's {out.size} bytes"
        raise BadChunkError(_DEFLATE_FAILURES.get(failed, f"libdeflate failed with {failed}") + size)


class _FrameScratch(ScratchMemory):
    """Memory of each thread with room for a frame's header before a decoded part."""

    def values(self, size: int) -> ByteArray:
        return self(_FRAME_HEAD_BYTES + size)[_FRAME_HEAD_BYTES:]

    def holds(self, data: ByteArray) -> bool:
        """Say whether `data` begins where `values` does."""
        return data.size > 0 and data.ctypes.data == self._room.ctypes.data + _FRAME_HEAD_BYTES


_frame_scratch = (_FrameScratch(), _FrameScratch())


def _with_room_for_head(data: ByteArray) -> ByteArray:
    """Return `data` with that room before it, without a copy where it already lies in such memory."""
    for each in _frame_scratch:
        if each.holds(data):
            return each(_FRAME_HEAD_BYTES + data.size)
    frame = np.empty(_FRAME_HEAD_BYTES + data.size, np.uint8)
    frame[_FRAME_HEAD_BYTES:] = data
    return frame


_zlib_decoder, _zstd_decoder = (CodecDecoder(np.dtype(np.uint8), (0,), name) for name in ("zlib", "zstd"))


class Hdf5Filter(NamedTuple):
    """Filter of a dataset: its registered number, and the values of its parameters."""

    id: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class FilterPipeline:
    """Stored bytes of one chunk -> its values, by undoing the filters last to first."""

    dtype: np.dtype[Any]
    order: tuple[int, ...]
    filters: tuple[Hdf5Filter, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not self.filters

    @property
    def splits(self) -> bool:
        return [f.id for f in self.filters] in ([], [BLOSC_FILTER])

    def decode(self, raw: ByteArray, out: ByteArray, mask: int = 0) -> None:
        """Fill `out`, which has exactly the chunk's size; bit k of `mask` says that filter k was left out.  What is cut
        short, damaged, or decodes to another size is a `BadChunkError`.
        """
        todo = [f for k, f in enumerate(self.filters) if not mask >> k & 1]
        sizes = [out.size + 4 * sum(f.id == FLETCHER32_FILTER for f in todo[:k]) for k in range(len(todo))]
        data, rooms = raw, cycle(_frame_scratch)
        for k in reversed(range(len(todo))):
            if todo[k].id == FLETCHER32_FILTER:
                data = without_fletcher32(data)
            else:
                target = out if k == 0 else next(rooms).values(sizes[k])
                _UNDO_BY_FILTER[todo[k].id](data, target, todo[k].values)
                data = target
        if data is not out:
            codecs.check_same_size(data, out)
            out[:] = data


def filter_pipeline_of(dtype: np.dtype[Any], ndim: int, filters: Sequence[Hdf5Filter]) -> FilterPipeline | None:
    """Return the decoder of a dataset with these filters; None when only libhdf5 knows them.

    The known order is at most one shuffle and any number of checksums, then at most one compressor, then checksums.
    """
    packed = [k for k, f in enumerate(filters) if f.id in COMPRESSOR_FILTERS]
    after = filters[packed[0] + 1 :] if packed else ()
    known = all(f.id in (*_UNDO_BY_FILTER, FLETCHER32_FILTER) for f in filters)
    known = known and all(f.id == FLETCHER32_FILTER for f in after)
    shuffled = [f for f in filters if f.id == SHUFFLE_FILTER]
    if not known or len(packed) > 1 or len(shuffled) > 1 or any(not f.values for f in shuffled):
        return None
    return FilterPipeline(dtype, tuple(range(ndim)), tuple(filters))


_WORDS_PER_ROW = 1 << 10


def without_fletcher32(raw: ByteArray) -> ByteArray:
    """Return the stored bytes without their closing Fletcher-32, which must match."""
    if raw.size < 4:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for its checksum")
    body, stored = raw[:-4], int.from_bytes(raw[-4:].tobytes(), "little")
    first, second = fletcher32_sums(body)
    # libhdf5 before 1.6.3 on little-endian machines swapped the bytes of both sums, and today's accepts them
    swapped = (first * 256 % 0xFFFF, second * 256 % 0xFFFF)
    # 0 and 65535 are one number to these sums
    if ((stored & 0xFFFF) % 0xFFFF, (stored >> 16) % 0xFFFF) not in [(first, second), swapped]:
        raise BadChunkError("its Fletcher-32 checksum does not match")
    return body


def fletcher32_sums(data: ByteArray) -> tuple[int, int]:
    """Return the two sums, modulo 65535, of `data` as big-endian words of 16 bits.

    With words w_0 … w_(n-1) they are Σ w_i and Σ (n - i) w_i, taken over rows of words at a time. Swapping the bytes of
    a word multiplies it by 256 modulo 65535, so the words are added as they lie and the sums swapped.
    """
    count = data.size // 2
    words = data[: 2 * count].view("<u2")
    full = count // _WORDS_PER_ROW
    rows = words[: full * _WORDS_PER_ROW].reshape(full, _WORDS_PER_ROW)
    by_row = rows.sum(axis=1, dtype=np.uint64)
    by_column = np.zeros(_WORDS_PER_ROW, np.uint64)
    for at in range(0, full, 1 << 14):  # 2^14 words of 16 bits fit in 32
        by_column += rows[at : at + (1 << 14)].sum(axis=0, dtype=np.uint32)
    tail = words[full * _WORDS_PER_ROW :].astype(np.uint64)
    first = int(by_row.sum()) + int(tail.sum())
    # Python's integers: the weights reach 2^31 and the sums 2^48
    starts = sum(int(r) * (count - i * _WORDS_PER_ROW) for i, r in enumerate(by_row.tolist()))
    second = starts - int((by_column * np.arange(_WORDS_PER_ROW, dtype=np.uint64)).sum())
    second += int((tail * np.arange(len(tail), 0, -1, dtype=np.uint64)).sum())
    first, second = first * 256, second * 256
    if data.size % 2:  # the last byte is the high half of a word
        first += int(data[-1]) << 8
        second += first
    return first % 0xFFFF, second % 0xFFFF


def _undo_shuffle(data: ByteArray, out: ByteArray, values: tuple[int, ...]) -> None:
    """Put the bytes of each element together again; what does not fill an element stays at the end."""
    codecs.check_same_size(data, out)
    size = values[0]
    if size <= 1 or out.size < size:
        out[:] = data
    elif size > 255 or out.size > _LARGEST_BLOSC_BLOCK:
        whole = out.size // size * size
        out[:whole].reshape(-1, size)[...] = data[:whole].reshape(size, -1).T
        out[whole:] = data[whole:]
    else:
        frame = _with_room_for_head(data)
        head = (2, 1, _SHUFFLED_FLAG | _UNSPLIT_FLAG | _LZ4_FLAG, size, out.size, out.size, frame.size, 20, out.size)
        frame[:_FRAME_HEAD_BYTES] = np.frombuffer(struct.pack("<BBBBIIIII", *head), np.uint8)
        codecs.decode_blosc_frame(frame, out)


def _undo_zstd(data: ByteArray, out: ByteArray, values: tuple[int, ...]) -> None:
    if codecs.zstd_frame_size(data) is None:
        raise codecs.BadChunkError("its Zstandard frame does not say its size, without which HDF5's filter refuses it")
    _zstd_decoder.decode(data, out)


_UNDO_BY_FILTER: dict[int, Callable[[ByteArray, ByteArray, tuple[int, ...]], None]] = {
    DEFLATE_FILTER: lambda data, out, values: inflate_zlib(data, out, _zlib_decoder),
    SHUFFLE_FILTER: _undo_shuffle,
    BLOSC_FILTER: lambda data, out, values: codecs.decode_blosc_frame(data, out),
    ZSTD_FILTER: _undo_zstd,
}
