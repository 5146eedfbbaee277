"""Blosc's tables of blocks: which bytes of a chunk hold which of its blocks; read when a part of it may do."""

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

_TABLES_KEPT = 1024
_SMALLEST_BLOCK = 1 << 14
"""Blosc's blocks are hardly ever smaller."""


class BloscBlockTables:
    """The tables of one array's chunks, each read once; the last 1024 are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ChunkIndex, tuple[blosc.BloscFrame | None, LookupCounts]] = OrderedDict()
        self._lock, self._tally = threading.Lock(), LookupTally()

    @property
    def counted(self) -> LookupCounts:
        """The reads so far."""
        return self._tally.counted

    def took(self, index: ChunkIndex) -> LookupCounts:
        """What reading the table of a chunk took, while it is kept."""
        found = self._kept.get(index)
        return LookupCounts() if found is None else found[1]

    def frame(self, index: ChunkIndex, ref: ChunkRef, size: int, files: StoreFiles) -> blosc.BloscFrame | None:
        """The frame that a chunk of `size` decoded bytes is; None when it is missing.

        Raises: `BadChunkError` for a header or a table that lies.
        """
        with self._lock:
            if index in self._kept:
                return self._kept[index][0]
        read = _BlockTableRead(ref, size, files)
        try:
            made = read.frame()
        finally:
            self._tally.add(read.took)
        with self._lock:
            self._kept[index] = made, read.took
            if len(self._kept) > _TABLES_KEPT:
                self._kept.popitem(last=False)
        return made


class _BlockTableRead:
    """The read of one table; `took` is what it has taken so far."""

    def __init__(self, ref: ChunkRef, size: int, files: StoreFiles) -> None:
        self._ref, self._size, self._files = ref, size, files
        self.took = LookupCounts()

    def frame(self) -> blosc.BloscFrame | None:
        raw, ref = self._beginning(), self._ref
        if raw is None:
            return None
        head = raw[: blosc.BLOSC_HEADER_BYTES].tobytes()
        _, count = blosc.check_blosc_header(head, self._size, ref.length)
        table = fresh_memory(0 if head[2] & 0x2 else 4 * count)
        if ref.length is not None and table.size > ref.length:
            raise ShortChunkError(f"it has {ref.length} bytes, too few for its table of {count} blocks")
        known = min(raw.size - blosc.BLOSC_HEADER_BYTES, table.size)
        table[:known] = raw[blosc.BLOSC_HEADER_BYTES : blosc.BLOSC_HEADER_BYTES + known]
        if known < table.size:
            self._read(blosc.BLOSC_HEADER_BYTES + known, table[known:])
        return blosc.blosc_frame_of(head, table)

    def _beginning(self) -> ByteArray | None:
        """The header, and of a chunk far away the table that it can be expected to have; None: the chunk is missing."""
        expected = blosc.BLOSC_HEADER_BYTES + 4 * -(-self._size // _SMALLEST_BLOCK)
        if self._files.far and (self._ref.length is None or self._ref.length >= expected):
            raw = fresh_memory(expected)
            try:
                return raw if self._read(0, raw) else None
            except ShortChunkError:  # an object of unknown size that compresses to less
                pass
        raw = fresh_memory(blosc.BLOSC_HEADER_BYTES)
        return raw if self._read(0, raw) else None

    def _read(self, start: int, memory: ByteArray) -> bool:
        requests, read = self.took
        self.took = LookupCounts(requests + 1, read)
        found = self._files.ranges(self._ref.path, [(self._ref.offset + start, memory)])
        self.took = LookupCounts(requests + 1, read + (memory.size if found else 0))
        return found
