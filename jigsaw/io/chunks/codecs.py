"""Codecs from a chunk's stored bytes to its values in the caller's memory: Blosc, Zstandard and LZ4 decode straight
into it, without holding the GIL; zlib's output is copied there.

A `CodecDecoder` knows the codecs that nearly all stores use. `decoder_of_zarr_v2` and `decoder_of_zarr_v3` return None
for a pipeline that it does not know. The reader then decodes that array by zarr itself, and counts it.

A Blosc 1 frame is also decoded in part: it is blocks that are compressed by themselves, after a table of where they
begin. A run of blocks becomes a frame of its own, which Blosc decodes; so every compressor, shuffle and split that
Blosc knows works. Format: github.com/Blosc/c-blosc, README_CHUNK_FORMAT.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.chunks.chunk import ByteSpans, ChunkPortion, blosc_blocks_of_spans, join_spans
from jigsaw.io.chunks.files import BadChunkError, ByteAllocator, ByteArray, ShortChunkError, fresh_memory

BLOSC_HEADER_BYTES = 16
_STORED_AS_IS = 0x2
_NEVER_SPLIT = 0x10
_BLOSC_VERSION = 2
_RESERVED_FLAG = 0x8
_MOST_SPLITS, _LEAST_SPLIT = 16, 128
_HEADER_STRUCT = struct.Struct("<BBBBIII")
DecodeStep = Callable[[ByteArray, ByteArray], None]


@dataclass(frozen=True)
class BloscFrame:
    """One Blosc frame: its header, and where each of its blocks lies, [begin, end) from the frame's start."""

    head: bytes
    size: int
    block: int
    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    @property
    def is_copied(self) -> bool:
        return bool(self.head[2] & _STORED_AS_IS)

    def portion(self, spans: ByteSpans, gap: int) -> ChunkPortion:
        """Return the blocks that hold these decoded bytes; those stored less than `gap` bytes apart are one request."""
        return self.part(blosc_blocks_of_spans(spans, self.block), gap)

    def part(self, runs: ByteSpans, gap: int) -> ChunkPortion:
        stored = join_spans(self._stored(runs), gap).tolist()
        valid = np.minimum(runs * self.block, self.size).tolist()
        ranges, spans = tuple((a, b - a) for a, b in stored), tuple((a, b) for a, b in valid)
        return ChunkPortion(ranges, spans, decoded=sum(b - a for a, b in spans))

    def count_parts(self, runs: ByteSpans, firsts: NDArray[np.int64], gap: int) -> NDArray[np.int64]:
        """Count requests, stored and decoded bytes [3, part] of many parts at once; their runs of blocks begin at
        `firsts`.

        The counts are those of `part` for each.
        """
        if not self._is_rising:
            parts = [self.part(counts, gap) for counts in np.split(runs, firsts[1:])]
            return np.array([(len(part.ranges), part.stored, part.decoded) for part in parts], np.int64).T
        first, last = runs.T
        start, stop = self.begin[first], self.end[last - 1]
        before = np.zeros_like(start)
        before[1:] = stop[:-1]
        apart = start > before + gap
        apart[firsts] = True
        counts = np.empty((3, len(runs)), np.int64)
        counts[0] = apart
        # a run that is joined to the one before is requested from the end of that one on
        counts[1] = stop - np.where(apart, start, before)
        counts[2] = np.minimum(last * self.block, self.size) - first * self.block
        return np.add.reduceat(counts, firsts, axis=1)

    def _stored(self, runs: ByteSpans) -> ByteSpans:
        if self._is_rising:
            return np.stack([self.begin[runs[:, 0]], self.end[runs[:, 1] - 1]], axis=1)
        return np.array([(self.begin[a:b].min(), self.end[a:b].max()) for a, b in runs], np.int64)

    @cached_property
    def _is_rising(self) -> bool:
        """True where blocks are stored in their order, as they nearly always are."""
        return bool((self.begin[1:] > self.begin[:-1]).all())

    def decode(self, portion: ChunkPortion, raw: ByteArray, out: ByteArray) -> None:
        """Decode the portion, whose ranges lie one after the other in `raw`, to where its blocks belong in `out`."""
        begins = [offset for offset, _ in portion.ranges]
        places = list(accumulate((length for _, length in portion.ranges), initial=0))

        def read(offset: int, memory: ByteArray) -> None:
            k = bisect_right(begins, offset) - 1  # the blocks of a span are stored within one range
            at = places[k] + offset - begins[k]
            memory[:] = raw[at : at + memory.size]

        for start, stop in portion.spans:
            self.run(start // self.block, -(-stop // self.block), read, fresh_memory, out[start:stop])

    def run(
        self, first: int, last: int, read: Callable[[int, ByteArray], None], room: ByteAllocator, out: ByteArray
    ) -> None:
        """Decode the blocks [first, last) into `out`; `read` fills memory with stored bytes from an offset on."""
        begin, end = self.begin[first:last], self.end[first:last]
        low, high = int(begin.min()), int(end.max())
        table = BLOSC_HEADER_BYTES + (0 if self.is_copied else 4 * len(begin))
        frame = room(table + high - low)
        version, codec, flags, typesize = self.head[:4]
        if out.size < self.block:  # the last block alone: it is shorter than the others, and never split
            flags |= _NEVER_SPLIT
        head = _HEADER_STRUCT.pack(version, codec, flags, typesize, out.size, min(self.block, out.size), frame.size)
        frame[:BLOSC_HEADER_BYTES] = np.frombuffer(head, np.uint8)
        if not self.is_copied:  # offsets of the blocks within this frame
            frame[BLOSC_HEADER_BYTES:table] = (begin - low + table).astype("<i4").view(np.uint8)
        read(low, frame[table:])
        decode_blosc_frame(frame, out)


def check_blosc_header(raw: bytes | memoryview, chunk_bytes: int, stored: int | None) -> tuple[int, int]:
    """Return the block size and the number of blocks that a frame's 16-byte header claims; refuse contradictions."""
    if len(raw) < BLOSC_HEADER_BYTES:
        raise ShortChunkError(f"it has {len(raw)} bytes, too few for a Blosc header")
    version, _, flags, typesize, size, block, frame = _HEADER_STRUCT.unpack_from(raw)
    if size != chunk_bytes:
        raise BadChunkError(f"its header claims {size} decoded bytes and the chunk has {chunk_bytes}")
    if stored is not None and frame != stored:
        kind = ShortChunkError if stored < frame else BadChunkError
        raise kind(f"it has {stored} bytes and its header says {frame}")
    if not 0 < block <= size:
        raise BadChunkError(f"its header claims blocks of {block} bytes in a chunk of {size}")
    if version != _BLOSC_VERSION or flags & _RESERVED_FLAG or not typesize:
        raise BadChunkError(f"its header claims version {version}, flags {flags:#x} and elements of {typesize} bytes")
    if not flags & (_NEVER_SPLIT | _STORED_AS_IS) and _is_block_split(block, typesize) and block % typesize:
        # Blosc would leave the rest of each block as whatever its memory held
        raise BadChunkError(f"its header claims blocks of {block} bytes, split by elements of {typesize}")
    count = -(-size // block)
    if flags & _STORED_AS_IS:
        if frame != BLOSC_HEADER_BYTES + size:
            raise BadChunkError(f"its header claims {size} bytes that are copied and {frame} stored ones")
    elif BLOSC_HEADER_BYTES + 8 * count > frame:
        # 8 bytes a block: its entry in the table, and the length before its bytes
        raise BadChunkError(f"its header claims {count} blocks in a frame of {frame} bytes")
    return block, count


def _is_block_split(block: int, typesize: int) -> bool:
    """Say whether Blosc stores each byte of the elements of a block by itself."""
    return typesize <= _MOST_SPLITS and block // typesize >= _LEAST_SPLIT


def check_blosc_frame(raw: ByteArray, chunk_bytes: int) -> None:
    """Refuse a whole frame that Blosc itself would read beyond, or decode into rubbish."""
    frame = raw.data  # a view: copying the header would take as long as the check
    _, count = check_blosc_header(frame, chunk_bytes, raw.size)
    if frame[2] & _STORED_AS_IS:
        return
    _block_starts(raw[BLOSC_HEADER_BYTES : BLOSC_HEADER_BYTES + 4 * count], raw.size)


def _block_starts(table: ByteArray, stored: int) -> list[int]:
    """Return where the blocks of a table begin, in its order. They are mostly few: a list is faster than numpy."""
    begin: list[int] = table.view("<i4").tolist()
    if min(begin) < BLOSC_HEADER_BYTES + table.size or max(begin) > stored - 4 or len(set(begin)) < len(begin):
        raise BadChunkError("its table of blocks points outside the frame, or twice to one place")
    return begin


def blosc_frame_of(head: bytes, table: ByteArray) -> BloscFrame:
    """Return the frame of a checked header and its table of block offsets (empty for copied blocks)."""
    *_, size, block, stored = _HEADER_STRUCT.unpack(head)
    count = -(-size // block)
    if head[2] & _STORED_AS_IS:
        begin = BLOSC_HEADER_BYTES + np.arange(count, dtype=np.int64) * block
        end = np.minimum(begin + block, BLOSC_HEADER_BYTES + size)
        return BloscFrame(head, size, block, begin, end)
    begin = _block_starts(table, stored)
    rising = sorted(begin)
    nexts = np.array([*rising[1:], stored], np.int64)
    if rising != begin:
        nexts = nexts[np.searchsorted(rising, begin)]
    return BloscFrame(head, size, block, np.array(begin, np.int64), nexts)


@cache
def _blosc_decompress() -> DecodeStep:
    """Return Blosc's function: importing it at every chunk would take as long as the check of a frame."""
    from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]

    return blosc.decompress


def decode_blosc_frame(frame: ByteArray, out: ByteArray) -> None:
    """Decode a Blosc frame that fills `out`; one that is damaged is a `BadChunkError`."""
    check_blosc_frame(frame, out.size)
    try:
        _blosc_decompress()(frame, out)
    except (RuntimeError, ValueError) as e:
        raise BadChunkError(str(e)) from e


_RUN_CODE = ("pickle", "dill", "marshal", "joblib")


@dataclass(frozen=True)
class CodecDecoder:
    """Stored bytes of one chunk -> its values in C order of the *stored* dims' `order`, in `dtype`.

    `compression` is None for plain bytes.  `checked` says that a CRC-32C closes the stored bytes.
    """

    dtype: np.dtype[Any]
    order: tuple[int, ...]
    compression: str | None = None
    checked: bool = False

    @property
    def splits(self) -> bool:
        return not self.checked and self.compression in (None, "blosc")

    @property
    def is_plain(self) -> bool:
        return self.compression is None and not self.checked

    def decode(self, raw: ByteArray, out: ByteArray, mask: int = 0) -> None:
        """Fill `out`, which has exactly the chunk's size; Zarr leaves no filter out, so `mask` is 0.

        Raises: `BadChunkError` for what is cut short, damaged, or claims another size.
        """
        if self.checked:
            raw = without_crc(raw)
        if self.compression is None:
            check_same_size(raw, out)
            out[:] = raw
            return
        try:
            _DECODE_STEPS[self.compression](raw, out)
        except (RuntimeError, ValueError, struct.error, zlib.error) as e:
            raise BadChunkError(str(e)) from e


def check_same_size(raw: ByteArray, out: ByteArray) -> None:
    """Refuse decoded bytes that are fewer or more than the chunk's."""
    if raw.size != out.size:
        kind = ShortChunkError if raw.size < out.size else BadChunkError
        raise kind(f"it has {raw.size} bytes and the chunk has {out.size}")


def without_crc(raw: ByteArray) -> ByteArray:
    """Return the stored bytes without their closing CRC-32C, which must match."""
    from google_crc32c import value as crc32c

    if raw.size < 4:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for its checksum")
    body, stored = raw[:-4], int.from_bytes(raw[-4:].tobytes(), "little")
    if crc32c(body) != stored:
        raise BadChunkError("its CRC-32C does not match")
    return body


def _check_claimed_size(claimed: int, out: ByteArray) -> None:
    if claimed != out.size:
        raise BadChunkError(f"its header claims {claimed} decoded bytes and the chunk has {out.size}")


def zstd_frame_size(raw: ByteArray) -> int | None:
    """Return the decoded size in a Zstandard frame's header, if it is there."""
    if raw.size < 6 or raw[:4].tobytes() != b"\x28\xb5\x2f\xfd":
        raise BadChunkError("it does not begin with a Zstandard frame")
    descriptor = int(raw[4])
    single, flag = descriptor >> 5 & 1, descriptor >> 6
    width = (1 if single else 0, 2, 4, 8)[flag]
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    if not width:
        return None
    if raw.size < at + width:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for a Zstandard header")
    return int.from_bytes(raw[at : at + width].tobytes(), "little") + (256 if width == 2 else 0)


def _decode_zstd(raw: ByteArray, out: ByteArray) -> None:
    from numcodecs import zstd  # pyright: ignore[reportAttributeAccessIssue]

    size = zstd_frame_size(raw)
    if size is not None:  # a streamed frame does not say its size; decoding never goes beyond `out`
        _check_claimed_size(size, out)
    zstd.decompress(raw, out)


def _decode_lz4(raw: ByteArray, out: ByteArray) -> None:
    from numcodecs import lz4  # pyright: ignore[reportAttributeAccessIssue]

    if raw.size < 4:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for an LZ4 header")
    _check_claimed_size(int.from_bytes(raw[:4].tobytes(), "little"), out)
    lz4.decompress(raw, out)


def _decode_deflate(raw: ByteArray, out: ByteArray) -> None:
    """Decode zlib and gzip, also of several members, and never more than the chunk's size."""
    done, rest = 0, memoryview(raw.data)
    while rest:
        engine = zlib.decompressobj(wbits=47)  # the header of zlib or of gzip
        part = engine.decompress(rest, out.size - done + 1)
        if done + len(part) > out.size:
            raise BadChunkError(f"it decodes to more than the chunk's {out.size} bytes")
        if not engine.eof:
            raise ShortChunkError(f"its compressed stream ends after {done + len(part)} of {out.size} bytes")
        out[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done, rest = done + len(part), memoryview(engine.unused_data)
    if done != out.size:
        raise BadChunkError(f"it decodes to {done} bytes and the chunk has {out.size}")


_DECODE_STEPS: dict[str, DecodeStep] = {
    "blosc": decode_blosc_frame,
    "zstd": _decode_zstd,
    "lz4": _decode_lz4,
    "zlib": _decode_deflate,
    "gzip": _decode_deflate,
}


def decoder_of_zarr_v2(
    dtype: np.dtype[Any], order: str, ndim: int, filters: Sequence[Any], compressor: Any
) -> CodecDecoder | None:
    """Return the decoder of a zarr v2 array, or None when it is not one of the fast ones."""
    name = None if compressor is None else str(compressor.codec_id)
    if filters or not _is_number_dtype(dtype) or name not in (None, *_DECODE_STEPS):
        return None
    dims = tuple(range(ndim))
    return CodecDecoder(dtype, dims[::-1] if order == "F" else dims, name)


def decoder_of_zarr_v3(dtype: np.dtype[Any], ndim: int, codecs: Sequence[Any]) -> CodecDecoder | None:
    """Return the decoder of a zarr v3 codec chain: [transpose], bytes, [one compressor], [crc32c]; else None."""
    rest = [codec.to_dict() for codec in codecs]
    order = tuple(range(ndim))
    if rest and rest[0]["name"] == "transpose":
        order = tuple(rest.pop(0)["configuration"]["order"])
    if not rest or rest[0]["name"] != "bytes" or not _is_number_dtype(dtype):
        return None
    endian = (rest.pop(0).get("configuration") or {}).get("endian")
    names = [codec["name"] for codec in rest]
    checked = bool(names) and names[-1] == "crc32c"
    compressors = names[:-1] if checked else names
    if len(compressors) > 1 or any(name not in _DECODE_STEPS for name in compressors):
        return None
    stored = dtype.newbyteorder(">" if str(getattr(endian, "value", endian)) == "big" else "<")
    return CodecDecoder(stored, order, compressors[0] if compressors else None, checked)


def codec_that_runs_code(codecs: Sequence[Any]) -> str | None:
    """Return the name of the first of zarr's codecs that decodes a chunk by running code in the chunk; else None."""
    configs = [codec.get_config() if hasattr(codec, "get_config") else codec.to_dict() for codec in codecs]
    return next((name for name in _codec_names(configs) if any(word in name.lower() for word in _RUN_CODE)), None)


def _codec_names(configs: Any) -> Iterator[str]:
    """Yield the names of codecs, and of those inside them, such as a shard's."""
    if isinstance(configs, Mapping):
        yield from (str(configs[key]) for key in ("id", "name") if key in configs)
        configs = list(configs.values())
    if isinstance(configs, list | tuple):
        for entry in configs:
            yield from _codec_names(entry)


def _is_number_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf"
