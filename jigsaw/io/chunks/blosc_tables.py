"""Blosc's tables of blocks: which bytes of a chunk hold which of its blocks; read when a part of it may be enough."""

from __future__ import annotations

import threading
from collections import OrderedDict

from jigsaw.io.chunks import blosc
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.codecs import ByteArray, ShortChunkError
from jigsaw.io.chunks.files import StoreFiles
from jigsaw.io.chunks.lookups import LookupCounts, LookupTally
from jigsaw.io.chunks.memory import fresh_memory

_HEADER_BYTES = blosc.BLOSC_HEADER_BYTES
_TABLES_KEPT = 1024
_SMALLEST_BLOCK = 1 << 14
"""Size below which Blosc's blocks hardly ever are."""


class BloscBlockTables:
    """The tables of one array's chunks, each read once; the last 1024 are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ChunkIndex, tuple[blosc.BloscFrame | None, LookupCounts]] = OrderedDict()
        self._lock, self._tally = threading.Lock(), LookupTally()

    @property
    def counted(self) -> LookupCounts:
        return self._tally.counted

    def took(self, index: ChunkIndex) -> LookupCounts:
        """Return the look-ups for the table of a chunk, while it is kept."""
        found = self._kept.get(index)
        return LookupCounts() if found is None else found[1]

    def frame(self, index: ChunkIndex, ref: ChunkRef, size: int, files: StoreFiles) -> blosc.BloscFrame | None:
        """Return the Blosc frame of a chunk of `size` decoded bytes, its header and table checked; None when it is
        missing.
        """
        with self._lock:
            if index in self._kept:
                return self._kept[index][0]
        took = LookupTally()  # of this table alone; what a read that fails took is counted too
        try:
            made = _read_frame(ref, size, files, took)
        finally:
            self._tally.add(took.counted)
        with self._lock:
            self._kept[index] = made, took.counted
            if len(self._kept) > _TABLES_KEPT:
                self._kept.popitem(last=False)
        return made


def _read_frame(ref: ChunkRef, size: int, files: StoreFiles, took: LookupTally) -> blosc.BloscFrame | None:
    def read(start: int, memory: ByteArray) -> ByteArray | None:
        took.add(LookupCounts(1, 0))
        if not files.ranges(ref.path, [(ref.offset + start, memory)]):
            return None
        took.add(LookupCounts(0, memory.size))
        return memory

    # the header, and with it the table that it can be expected to have
    expected = _HEADER_BYTES + 4 * -(-size // _SMALLEST_BLOCK)
    at_once = ref.length is None or ref.length >= expected
    try:
        raw = read(0, fresh_memory(expected if at_once else _HEADER_BYTES))
    except ShortChunkError:
        if not at_once:
            raise
        raw = read(0, fresh_memory(_HEADER_BYTES))  # of an object of unknown size that compresses to less
    if raw is None:
        return None
    head = raw[:_HEADER_BYTES].tobytes()
    _, count = blosc.check_blosc_header(head, size, ref.length)
    stop = _HEADER_BYTES + (0 if head[2] & 0x2 else 4 * count)
    if ref.length is not None and stop - _HEADER_BYTES > ref.length:
        raise ShortChunkError(f"it has {ref.length} bytes, too few for its table of {count} blocks")
    if stop <= raw.size:
        return blosc.blosc_frame_of(head, raw[_HEADER_BYTES:stop])
    table = fresh_memory(stop - _HEADER_BYTES)
    known = raw.size - _HEADER_BYTES
    table[:known] = raw[_HEADER_BYTES:]
    read(raw.size, table[known:])
    return blosc.blosc_frame_of(head, table)
