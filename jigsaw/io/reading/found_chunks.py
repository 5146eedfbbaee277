"""Where the chunks of a read lie, and what of them is to be loaded: all that planning asks of stores."""

from __future__ import annotations

from collections.abc import Mapping

from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.concurrent_requests import ask_at_once
from jigsaw.io.chunks.lookups import LookupCounts, total_lookups
from jigsaw.io.chunks.portion import MOST_PORTION_SHARE, ChunkPortion
from jigsaw.io.reading.chunk_jobs import ReadCounts, ReaderRanks
from jigsaw.io.reading.needed_chunks import NeededChunks

ArrayTables = Mapping[str, ArrayTable]


class FoundChunks:
    """The places of needed chunks, each looked up once.

    Those of far stores are all looked up by `look_up_chunks`, before anything is planned.  Of near ones only those that
    a choice depends on ever are: the others are located while they are loaded, small ones by the strip.  Threads that
    load may look up the same chunk at the same time, and find the same.
    """

    def __init__(self, needed: NeededChunks, tables: ArrayTables) -> None:
        self.needed, self.tables = needed, tables
        self._refs: dict[tuple[str, ChunkIndex], ChunkRef | None] = {}
        self._portions: dict[tuple[str, ChunkIndex, ReaderRanks], ChunkPortion | None] = {}

    def ref(self, array: str, chunk: ChunkIndex) -> ChunkRef | None:
        """Where a chunk lies, looked up once; None when it is missing."""
        key = array, chunk
        if key not in self._refs:
            self._refs[key] = self.tables[array].finder.locate(chunk)
        return self._refs[key]

    def portion(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> ChunkPortion | None:
        """What of a chunk is loaded for these ranks; None for all of it."""
        if not self.tables[array].finder.is_divisible:
            return None
        # asked before the finder is: from geometry alone, it spares reading the chunk's table of blocks
        if self.needed.takes_more(MOST_PORTION_SHARE, array, chunk, readers):
            return None
        key = array, chunk, readers
        if key not in self._portions:
            self._portions[key] = self.tables[array].finder.portion(chunk, self.needed.rects(array, chunk, readers))
        return self._portions[key]

    def load_counts(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> ReadCounts:
        """What loading a chunk for these ranks takes of the one that does it."""
        ref, table = self.ref(array, chunk), self.tables[array]
        if ref is None:
            return ReadCounts()
        part, slow = self.portion(array, chunk, readers), int(table.decoder is None)
        if part is not None:
            return ReadCounts(max(len(part.ranges), 1), 1, slow, ref.length or 0 if slow else part.stored, part.decoded)
        unsized = int(ref.length is None and not slow)
        return ReadCounts(1, 1, slow, ref.length or 0, table.grid.bytes_of(chunk), unsized=unsized)

    def lookups(self) -> LookupCounts:
        """What finding these took of one rank that knew nothing yet: the indices of shards, and Blosc's tables."""
        chunks = [(self.tables[name], chunk) for name, chunks in self.needed.readers.items() for chunk in chunks]
        indices = dict(found for table, chunk in chunks if (found := table.finder.index_of(chunk)) is not None)
        tables = {
            (name, chunk): took
            for name, chunk, readers in self._portions
            if (took := self.tables[name].finder.table_of(chunk, self.needed.rects(name, chunk, readers))).requests
        }
        return total_lookups((*indices.values(), *tables.values()))


def look_up_chunks(needed: NeededChunks, tables: ArrayTables) -> FoundChunks:
    """Ask far stores for what plans depend on, many at a time: the indices of shards, then Blosc's tables of chunks of
    which some rank takes a part.

    Raises: what asking a store raises, which it may do for one rank alone.
    """
    found = FoundChunks(needed, tables)
    far = [(name, chunks) for name, chunks in needed.readers.items() if tables[name].far]
    # one chunk of each object: its shard's index, read for that one, says where all others of it lie
    one_an_object = {tables[name].finder.path(chunk): (name, chunk) for name, chunks in far for chunk in chunks}
    ask_at_once(lambda each: tables[each[0]].finder.locate(each[1]), list(one_an_object.values()))
    parts = [(name, chunk) for name, chunks in far if tables[name].finder.is_divisible for chunk in chunks]
    # each reader by itself, for its table of blocks: what they share in any mode is then found without another request
    ask_at_once(lambda each: [found.portion(*each, (m,)) for m in needed.readers[each[0]][each[1]]], parts)
    return found
