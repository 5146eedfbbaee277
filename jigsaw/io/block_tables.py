"""Blosc's tables of blocks: which bytes of a chunk hold which of its blocks; read when a part of it may do."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from jigsaw.io._memory import fresh
from jigsaw.io.fetch.files import Files
from jigsaw.io.formats import blosc
from jigsaw.io.formats.codecs import Bytes, ShortChunkError
from jigsaw.io.lookups import Lookups, Tally

if TYPE_CHECKING:
    from jigsaw.io.chunk import ChunkRef
    from jigsaw.io.chunk_grid import Index

_KEPT = 1024
_BLOCK = 1 << 14
"""Blosc's blocks are hardly ever smaller."""


class BlockTables:
    """Those of the chunks of one array, each read once; the last 1024 are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Index, tuple[blosc.Frame | None, Lookups]] = OrderedDict()
        self._lock, self._tally = threading.Lock(), Tally()

    @property
    def made(self) -> Lookups:
        """The reads so far."""
        return self._tally.made

    def took(self, index: Index) -> Lookups:
        """What reading the table of a chunk took, while it is kept."""
        found = self._kept.get(index)
        return Lookups() if found is None else found[1]

    def frame(self, index: Index, ref: ChunkRef, size: int, files: Files) -> blosc.Frame | None:
        """The frame that a chunk of `size` decoded bytes is; None when it is missing.

        Raises: `BadChunkError` for a header or a table that lies.
        """
        with self._lock:
            if index in self._kept:
                return self._kept[index][0]
        read = _Reading(ref, size, files)
        try:
            made = read.frame()
        finally:
            self._tally.add(read.took)
        with self._lock:
            self._kept[index] = made, read.took
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made


class _Reading:
    """The read of one table; `took` is what it has taken so far."""

    def __init__(self, ref: ChunkRef, size: int, files: Files) -> None:
        self._ref, self._size, self._files = ref, size, files
        self.took = Lookups()

    def frame(self) -> blosc.Frame | None:
        raw, ref = self._beginning(), self._ref
        if raw is None:
            return None
        head = raw[: blosc.HEADER].tobytes()
        _, count = blosc.head_of(head, self._size, ref.length)
        table = fresh(0 if head[2] & 0x2 else 4 * count)
        if ref.length is not None and table.size > ref.length:
            raise ShortChunkError(f"it has {ref.length} bytes, too few for its table of {count} blocks")
        known = min(raw.size - blosc.HEADER, table.size)
        table[:known] = raw[blosc.HEADER : blosc.HEADER + known]
        if known < table.size:
            self._read(blosc.HEADER + known, table[known:])
        return blosc.frame_of(head, table)

    def _beginning(self) -> Bytes | None:
        """The header, and of a chunk far away the table that it can be expected to have; None: the chunk is missing."""
        expected = blosc.HEADER + 4 * -(-self._size // _BLOCK)
        if self._files.far and (self._ref.length is None or self._ref.length >= expected):
            raw = fresh(expected)
            try:
                return raw if self._read(0, raw) else None
            except ShortChunkError:  # an object of unknown size that compresses to less
                pass
        raw = fresh(blosc.HEADER)
        return raw if self._read(0, raw) else None

    def _read(self, start: int, memory: Bytes) -> bool:
        requests, read = self.took
        self.took = Lookups(requests + 1, read)
        found = self._files.ranges(self._ref.path, [(self._ref.offset + start, memory)])
        self.took = Lookups(requests + 1, read + (memory.size if found else 0))
        return found
