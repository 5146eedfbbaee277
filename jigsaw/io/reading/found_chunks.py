"""Places of the chunks of a read, and the part of each to load: all that planning asks of stores."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jigsaw.errors import ReadError
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import (
    MOST_PORTION_SHARE,
    ByteSpans,
    ChunkIndex,
    ChunkPortion,
    ChunkRef,
    blosc_blocks_of_rows,
)
from jigsaw.io.chunks.chunk_finder import ChunkFinder, LookupCounts, total_lookups
from jigsaw.io.chunks.files import BadChunkError
from jigsaw.io.chunks.remote_files import ask_at_once
from jigsaw.io.reading.chunk_readers import (
    COUNT_COLUMN,
    ChunkLoads,
    ChunkReaders,
    CountsTable,
    ReadCounts,
    ReaderGroup,
    ReaderRanks,
    ReadersByChunk,
)
from jigsaw.io.reading.needed_chunks import NeededChunks

ArrayTables = Mapping[str, ArrayTable]

MOST_SIZES = 1024
"""Limit on the small chunks of near stores whose sizes one plan looks up: 3 ms of every rank."""
_SIZES_LOOKED_AT = 8


class ReaderKinds:
    """Kinds of readers of a chunk, `number` in all: those that need the same part. `of` has each one's kind.

    A few kinds stand for thousands of ranks. On a chunk of the whole globe all 64 ranks along a latitude may need the
    same blocks.
    """

    def __init__(self, of: NDArray[np.intp], number: int) -> None:
        self.of, self.number = of, number
        self._counted: dict[str, NDArray[np.intp]] = {}

    def count(self, loads: ChunkLoads, mode: str) -> NDArray[np.intp]:
        """Count how many readers of each kind load the chunk for themselves in a mode, which has these `loads`."""
        if mode not in self._counted:
            self._counted[mode] = np.bincount(self.of[loads.alone], minlength=self.number)
        return self._counted[mode]


class LoadsAlone(NamedTuple):
    """Loads that each reader of a chunk would make for itself.

    `table` [4, kind] has for each kind of reader whether it loads all of the chunk, its requests, and the bytes stored
    and decoded.  The stored bytes of those that load all of it are left out, because the same rows of other chunks have
    others.
    """

    kinds: ReaderKinds
    table: NDArray[np.int64]

    @classmethod
    def of(cls, kinds: ReaderKinds, size: int, parts: ArrayLike = ()) -> LoadsAlone:
        """Make the loads for chunks of `size` bytes; `parts` are requests, stored and decoded bytes [3, kind] of parts.
        They are for all kinds but the first, which loads the whole chunk.
        """
        table = np.empty((4, kinds.number), np.int64)
        table[0], table[1:, 1:] = 0, np.asarray(parts, np.int64).reshape(3, -1)
        table[:, table[3] > MOST_PORTION_SHARE * size] = table[:, :1] = [[1], [1], [0], [size]]
        return cls(kinds, table)

    def total(self, loads: ChunkLoads, mode: str) -> list[int]:
        """Sum the whole-chunk loads, requests, stored and decoded bytes of all ranks that load it alone in a mode."""
        return (self.table @ self.kinds.count(loads, mode)).tolist()


class WholeSizes(NamedTuple):
    """Presence of each chunk, and its bytes decoded and stored; an unknown stored size is that of the decoded bytes."""

    there: NDArray[np.bool_]
    decoded: NDArray[np.int64]
    stored: NDArray[np.int64]


class FoundArray:
    """The places of the needed chunks of one array, each looked up once.

    `readers` are the ranks that need each. Small chunks of which there are not `few` count as decoded, without a
    look-up.  Threads that load may look up the same chunk at the same time, and find the same.
    """

    def __init__(self, table: ArrayTable, readers: ReadersByChunk, few: bool) -> None:
        self.table, self.finder, self.readers = table, table.finder, readers
        self.size_of_all = None if few or table.far or self.finder.is_divisible else table.grid.chunk_bytes
        """The size that every chunk counts as when there are too many to look up; None where each is looked up."""
        self.asked: set[ChunkIndex] = set()
        """The chunks whose tables of blocks were asked for."""
        self._refs: dict[ChunkIndex, ChunkRef | None] = {}
        self._portions: dict[Hashable, ChunkPortion | None] = {}
        self._alone: dict[ChunkIndex, LoadsAlone] = {}

    def ref(self, chunk: ChunkIndex) -> ChunkRef | None:
        """Return where a chunk lies, looked up once; None when it is missing."""
        if chunk not in self._refs:
            self._refs[chunk] = self.finder.locate(chunk)
        return self._refs[chunk]

    def _refs_of(self, chunks: Sequence[ChunkIndex]) -> list[ChunkRef | None]:
        """Return where chunks lie, in C order; chunks that follow each other are looked up together."""
        if all(chunk not in self._refs for chunk in chunks):
            for first, count in _strips_of_chunks(chunks):
                try:
                    refs = self.finder.locate_strip(first, count)
                except (ReadError, OSError, BadChunkError):
                    break  # look up each chunk alone below, so that the error names the one that failed
                self._refs.update(((*first[:-1], first[-1] + n), ref) for n, ref in enumerate(refs))
        return [self.ref(chunk) for chunk in chunks]

    @cached_property
    def _sizes(self) -> WholeSizes:
        """The sizes of the needed chunks, in C order; of a few of them where there are many."""
        grid, chunks = self.table.grid, self.readers.chunks
        if self.size_of_all is not None:
            chunks = [chunks[place] for place in spread_places(len(chunks))]
        refs = self._refs_of(chunks)
        decoded = np.array(
            [0 if ref is None else grid.bytes_of(c) for c, ref in zip(chunks, refs, strict=True)], np.int64
        )
        stored = np.array([0 if ref is None else -1 if ref.length is None else ref.length for ref in refs], np.int64)
        unsized = 0 if self.table.decoder is None else decoded
        is_present = np.array([ref is not None for ref in refs])
        return WholeSizes(is_present, decoded, np.where(stored < 0, unsized, stored))

    def counts_in_mode(self, mode: str) -> tuple[int, int, int]:
        """Sum `counts_of_loads` over all needed chunks; where there are many, estimate it from a few."""
        if self.finder.is_divisible:
            counts = [self.counts_of_loads(chunk, mode) for chunk in self.readers]
            requests, decoded, stored = (sum(column) for column in zip(*counts, strict=True))
            return requests, decoded, stored
        loads, sizes = self.readers.pattern.counts(mode)[0], self._sizes
        if self.size_of_all is not None:
            every = self.readers.pattern.totals(mode)[0]
            requests, decoded, stored = (int(column.sum()) * every // len(column) for column in sizes)
            return requests, decoded, stored
        return int(loads @ sizes.there), int(loads @ sizes.decoded), int(loads @ sizes.stored)

    def bytes_of_shared(self, mode: str) -> NDArray[np.int64]:
        """Return the bytes that each shared load fetches, in C order; unknown ones count as decoded."""
        pattern = self.readers.pattern
        places = pattern.shared_places(mode)
        if (decoded := self.size_of_all) is not None:
            return np.full(len(places), decoded, np.int64)
        if not self.finder.is_divisible:
            sizes = self._sizes
            return np.where(sizes.stored, sizes.stored, sizes.decoded)[places]
        chunks, loads = self.readers.chunks, pattern.loads(mode)
        rows = [self.load_counts(chunks[place], loads[place].served) for place in places.tolist()]
        return np.array([row.stored_bytes or row.decoded_bytes for row in rows], np.int64)

    def has_own_objects(self) -> bool:
        """Say whether each needed chunk lies in its own object, so that no request brings two of them."""
        paths = [ref.path for chunk in self.readers if (ref := self.ref(chunk)) is not None]
        return len(set(paths)) == len(paths)

    def portion(self, chunk: ChunkIndex, readers: ReaderRanks) -> ChunkPortion | None:
        """Return the part of a chunk that is loaded for these ranks; None for all of it."""
        finder = self.finder
        if not finder.is_divisible:
            return None
        group = self.readers[chunk].group(readers)
        if not _may_part(finder, chunk, group):
            return None
        kept, key = group.portions, finder.portion_key(chunk, self.ref(chunk))
        if key is None:  # the part depends on the stored bytes, so it is kept for this store only
            kept, key = self._portions, (chunk, readers)
            self.asked.add(chunk)
        if key not in kept:
            kept[key] = finder.portion(chunk, group.rects)
        return kept[key]

    def load_counts(self, chunk: ChunkIndex, readers: ReaderRanks) -> ReadCounts:
        ref, table = self.ref(chunk), self.table
        if ref is None:
            return ReadCounts(missing=1)
        part, slow = self.portion(chunk, readers), int(table.decoder is None)
        if part is not None:
            return ReadCounts(max(len(part.ranges), 1), 1, slow, ref.length or 0 if slow else part.stored, part.decoded)
        unsized = int(ref.length is None and not slow)
        return ReadCounts(1, 1, slow, ref.length or 0, table.grid.bytes_of(chunk), unsized=unsized)

    def counts_of_loads(self, chunk: ChunkIndex, mode: str) -> tuple[int, int, int]:
        """Count requests, bytes decoded and stored of all loads of a chunk; unknown sizes count as decoded."""
        table, ref, readers = self.table, self.ref(chunk), self.readers[chunk]
        if ref is None:
            return 0, 0, 0
        loads, size = readers.loads(mode), table.grid.bytes_of(chunk)
        length = size if ref.length is None and table.decoder is not None else ref.length or 0
        if not self.finder.is_divisible:
            count = len(loads.alone) + bool(loads.served)
            return count, count * size, count * length
        whole = requests = stored = decoded = 0
        if len(loads.alone):
            whole, requests, stored, decoded = self._loads_alone(chunk, ref).total(loads, mode)
        if loads.served:
            row = self.load_counts(chunk, loads.served)
            requests, decoded = requests + row.requests, decoded + row.decoded_bytes
            stored += row.decoded_bytes if row.unsized else row.stored_bytes
        return requests, decoded, stored + whole * length

    def counts_alone(self, chunk: ChunkIndex) -> CountsTable:
        """Return `load_counts` of each reader of a chunk by itself, a row for each reader."""
        ref, readers, table = self.ref(chunk), self.readers[chunk], self.table
        rows = np.zeros((len(readers), len(COUNT_COLUMN)), np.int64)
        if ref is None:
            rows[:, COUNT_COLUMN["missing"]] = 1
            return rows
        slow, size = table.decoder is None, table.grid.bytes_of(chunk)
        is_whole, requests, stored, decoded = True, 1, 0, size
        if self.finder.is_divisible:
            loads = self._loads_alone(chunk, ref)
            is_whole, requests, stored, decoded = loads.table[:, loads.kinds.of]
        counts = {
            "requests": requests,
            "chunks": 1,
            "fallback": slow,
            "stored_bytes": ref.length or 0 if slow else np.where(is_whole, ref.length or 0, stored),
            "decoded_bytes": decoded,
            "unsized": 0 if ref.length is not None or slow else is_whole,
        }
        for name, column in counts.items():
            rows[:, COUNT_COLUMN[name]] = column
        return rows

    def _loads_alone(self, chunk: ChunkIndex, ref: ChunkRef) -> LoadsAlone:
        """Return what each reader would load alone, for chunks of which a part may be enough."""
        readers, key = self.readers[chunk], self.finder.portion_key(chunk, ref)
        if key is None:
            if chunk not in self._alone:
                self._alone[chunk] = self._divided_frame(chunk, ref)
            return self._alone[chunk]
        if key not in readers.memo:
            able = [(i, (readers.ranks[i],)) for i in self._able_alone(chunk).tolist()]
            parts = [(i, part) for i, rank in able if (part := self.portion(chunk, rank)) is not None]
            counts = [(max(len(part.ranges), 1), part.stored, part.decoded) for _, part in parts]
            kinds, at = np.zeros(len(readers), np.intp), [i for i, _ in parts]
            kinds[at] = np.arange(1, len(at) + 1)
            counts = list(zip(*counts, strict=True))
            size = self.table.grid.bytes_of(chunk)
            readers.memo[key] = LoadsAlone.of(ReaderKinds(kinds, len(at) + 1), size, counts)
        return readers.memo[key]

    def _divided_frame(self, chunk: ChunkIndex, ref: ChunkRef) -> LoadsAlone:
        """Return what readers would load of a chunk stored as a Blosc frame; all of it where it is not a frame."""
        readers, table = self.readers[chunk], self.table
        able, size, frame = self._able_alone(chunk), table.grid.bytes_of(chunk), None
        if len(able) and not ref.mask:
            self.asked.add(chunk)
            frame = self.finder.blosc_frame_of(chunk, ref)
        if frame is None or table.decoder is None:
            return LoadsAlone.of(ReaderKinds(np.zeros(len(readers), np.intp), 1), size)
        # frames have tables of their own, but the blocks that readers need are the same in all of them
        blocking = readers.shape, tuple(table.decoder.order), table.grid.itemsize, frame.block
        key = self.finder.least_left_out, blocking
        if key not in readers.memo:
            readers.memo[key] = _kinds_by_blocks(readers, able, blocking)
        runs, firsts, kinds = readers.memo[key]
        return LoadsAlone.of(kinds, size, frame.count_parts(runs, firsts, table.places.files.gap))

    def _able_alone(self, chunk: ChunkIndex) -> NDArray[np.intp]:
        """Return places of the readers for which a part of a chunk may be enough, by geometry."""
        readers, finder = self.readers[chunk], self.finder
        key = "able", finder.least_left_out
        if key not in readers.memo:
            groups = [readers.group((rank,)) for rank in readers.ranks]
            readers.memo[key] = np.flatnonzero([_may_part(finder, chunk, group) for group in groups])
        return readers.memo[key]


class FoundChunks(dict[str, FoundArray]):
    """The needed chunks of each array, as found in a store.

    Those of far stores are all looked up by `look_up_chunks`, before anything is planned.  Of near ones only those that
    a choice depends on ever are: the others are located while they are loaded, small ones by the strip.
    """

    def __init__(self, needed: NeededChunks, tables: ArrayTables) -> None:
        self.needed, self.tables = needed, tables
        near = [name for name in needed.readers if not (tables[name].far or tables[name].finder.is_divisible)]
        few = sum(len(needed.readers[name]) for name in near) <= MOST_SIZES
        super().__init__({name: FoundArray(tables[name], readers, few) for name, readers in needed.readers.items()})

    def lookups(self) -> LookupCounts:
        """Count the look-ups of a rank that knew nothing yet: the indices of shards, and Blosc's tables."""
        chunks = ((array.finder, chunk) for array in self.values() for chunk in array.readers)
        indices = dict(lookups for finder, chunk in chunks if (lookups := finder.index_of(chunk)) is not None)
        tables = (array.finder.table_of(chunk) for array in self.values() for chunk in array.asked)
        return total_lookups((*indices.values(), *tables))


def _kinds_by_blocks(
    readers: ChunkReaders, able: NDArray[np.intp], blocking: tuple[tuple[int, ...], tuple[int, ...], int, int]
) -> tuple[ByteSpans, NDArray[np.int64], ReaderKinds]:
    """Group the readers `able` by the blocks that they need; return runs of blocks, their starts by kind, and kinds."""
    rects = (tuple(readers.group((rank,)).rects) for rank in readers.at[able].tolist())
    block_runs = [blosc_blocks_of_rows(boxes, *blocking) for boxes in rects]
    # readers side by side share most blocks: of 64 x 64 ranks few need others than those beside them
    apart = {runs.tobytes(): runs for runs in block_runs}
    number = {boxes: n for n, boxes in enumerate(apart, 1)}
    kinds = np.zeros(len(readers), np.intp)
    kinds[able] = [number[runs.tobytes()] for runs in block_runs]
    firsts = np.cumsum([0, *map(len, apart.values())])[:-1]
    return np.concatenate([*apart.values()]), firsts, ReaderKinds(kinds, len(apart) + 1)


def _strips_of_chunks(chunks: Sequence[ChunkIndex]) -> Iterator[tuple[ChunkIndex, int]]:
    """Yield runs of chunks in C order that follow each other along the last dim: the first chunk and their number."""
    start = 0
    for i, chunk in enumerate(chunks):
        last = i + 1 == len(chunks)
        if last or chunks[i + 1][-1] != chunk[-1] + 1 or chunks[i + 1][:-1] != chunk[:-1]:
            yield chunks[start], i + 1 - start
            start = i + 1


def spread_places(count: int) -> list[int]:
    """Return some of `count` places in rising order, spread evenly whatever divides `count`."""
    # multiples of the golden section: of 8 x 8 tiles no two in a row, where equal steps would stay in one column
    return sorted({int(count * ((0.5 + n) * 0.6180339887498949 % 1)) for n in range(_SIZES_LOOKED_AT)})


def look_up_chunks(needed: NeededChunks, tables: ArrayTables) -> FoundChunks:
    """Ask far stores for what plans depend on, many requests at a time: the indices of shards, then Blosc's tables of
    chunks of which some rank takes a part.

    Raises: what asking a store raises, possibly on one rank alone.
    """
    places = FoundChunks(needed, tables)
    far = [array for array in places.values() if array.table.far]
    # one chunk of each object: its shard's index, read for that one, says where all others of it lie
    one_an_object = {array.finder.path(chunk): (array, chunk) for array in far for chunk in array.readers}
    ask_at_once(lambda place: place[0].finder.locate(place[1]), list(one_an_object.values()))
    parts = [(array, chunk) for array in far if array.finder.is_divisible for chunk in array.readers]
    # each reader by itself, because of its table of blocks: what they share in any mode then needs no other request
    ask_at_once(lambda place: place[0].counts_alone(place[1]), parts)
    return places


def _may_part(finder: ChunkFinder, chunk: ChunkIndex, group: ReaderGroup) -> bool:
    """Say whether a part of a chunk may be enough for some readers, by geometry alone."""
    return group.largest_share <= MOST_PORTION_SHARE and finder.may_part(chunk, group.share)
