"""Chunks and rows that each rank needs for a sample, from the request and the arrays' grids alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError, MissingArrayError, ShardingError, UnsupportedStoreError, WindowError
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk_grid import ChunkGrid, ChunkIndex
from jigsaw.io.reading.chunk_boxes import ChunkBox, DimPieces, PartGeometry, boundary_rows
from jigsaw.io.reading.chunk_readers import ChunkLoads, ChunkReaders, DimShares, PartShares, readers_of_chunk
from jigsaw.io.series.request import DROPPED_DIM, IndexPicks, ReadPart, ReadRequest

_PartDims = tuple[tuple[DimPieces, ...], tuple[DimShares, ...]]


class ReadersPattern:
    """The readers of an array's needed chunks in C order, wherever in it these lie: those of the next sample are alike.

    Where the first of several steps needs chunk 3 along time and the next one chunk 4, both have one pattern.
    """

    def __init__(self, readers: tuple[ChunkReaders, ...]) -> None:
        self.readers = readers
        self._loads: dict[str, tuple[ChunkLoads, ...]] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._totals: dict[str, tuple[int, int, int]] = {}
        self._alone: dict[tuple[str, int], NDArray[np.int32]] = {}

    def loads(self, mode: str) -> tuple[ChunkLoads, ...]:
        """Return who loads each chunk in a mode."""
        if mode not in self._loads:
            self._loads[mode] = tuple(each.loads(mode) for each in self.readers)
        return self._loads[mode]

    def counts(self, mode: str) -> NDArray[np.int64]:
        """Return how often each chunk is loaded, whether for several ranks, and the values handed over [3, chunk]."""
        if mode not in self._counts:
            rows = [(len(each.alone) + bool(each.served), bool(each.served), each.sent) for each in self.loads(mode)]
            self._counts[mode] = np.array(rows, np.int64).reshape(-1, 3).T
        return self._counts[mode]

    def totals(self, mode: str) -> tuple[int, int, int]:
        """Sum `counts` over all chunks."""
        if mode not in self._totals:
            loads, shared, sent = self.counts(mode).sum(1).tolist()
            self._totals[mode] = loads, shared, sent
        return self._totals[mode]

    def shared_places(self, mode: str) -> NDArray[np.intp]:
        """Return the places, in C order, of the chunks that are loaded for several ranks in a mode."""
        return np.flatnonzero(self.counts(mode)[1])

    def loaded_alone(self, mode: str, ranks: int) -> NDArray[np.int32]:
        """Count the chunks that each of so many ranks loads for itself alone in a mode."""
        if (mode, ranks) not in self._alone:
            count = np.zeros(ranks, np.int32)
            for readers, loads in zip(self.readers, self.loads(mode), strict=True):
                count[readers.at[loads.alone]] += 1
            self._alone[mode, ranks] = count
        return self._alone[mode, ranks]


class ReadersByChunk(dict[ChunkIndex, ChunkReaders]):
    """The needed chunks of an array in C order, `chunks`, and the readers of each: those of the `pattern`."""

    def __init__(self, chunks: Iterable[ChunkIndex], pattern: ReadersPattern) -> None:
        super().__init__(zip(chunks, pattern.readers, strict=True))
        self.pattern, self.chunks = pattern, tuple(self)


class NeededChunks:
    """The chunks that the ranks of a request need.

    `readers` has for each array its chunks in C order, and the ranks that need each; `geometries` the geometry of each
    of its parts, and that of the rows beyond a pole.
    """

    def __init__(self, request: ReadRequest, grids: Mapping[str, ChunkGrid]) -> None:
        self.request, self.grids, self.ranks = request, grids, request.layout.ranks
        self.geometries: dict[str, list[PartGeometry]] = {}
        both = (False, True) if any(b.rule == "pole" for b in request.boundary) else (False,)
        ways = [boundary_rows(request, turned) for turned in both]
        for number, part in enumerate(request.parts):
            made = [PartGeometry(number, part, grids[part.array], request, way) for way in ways]
            self.geometries.setdefault(part.array, []).extend(made)
        # one mapping for all arrays whose parts take the same rows
        alike = {name: tuple((each.dims, each.fixed) for each in parts) for name, parts in self.geometries.items()}
        made = {parts: _readers_by_chunk(parts) for parts in set(alike.values())}
        self.readers: dict[str, ReadersByChunk] = {name: made[parts] for name, parts in alike.items()}
        self._taken: dict[tuple[str, ChunkIndex, int], tuple[ChunkBox, ...]] = {}

    def chunks(self, array: str, member: int) -> list[ChunkIndex]:
        """Return the chunks of an array that a rank needs, in C order."""
        # two geometries, such as of two levels, may name a chunk each; a rolled dim ends with its first chunk
        return sorted({chunk for each in self.geometries[array] for chunk in each.chunks(member)})

    def boxes(self, array: str, chunk: ChunkIndex, member: int) -> tuple[ChunkBox, ...]:
        """Return the boxes that a rank takes of a chunk: one for each part, and one for its rows beyond a pole."""
        key = array, chunk, member
        found = self._taken.get(key)
        if found is None:
            boxes = [each.box(chunk, member) for each in self.geometries[array]]
            found = self._taken[key] = tuple([box for box in boxes if box is not None])
        return found

    def box_bytes(self, array: str, chunk: ChunkIndex, member: int) -> int:
        return sum(prod(box.extents) for box in self.boxes(array, chunk, member)) * self.grids[array].itemsize


def _readers_by_chunk(parts: Sequence[_PartDims]) -> ReadersByChunk:
    """Find the chunks of which parts take rows, in C order, and the ranks that need them."""
    if len(parts) == 1:
        ((dims, fixed),) = parts
        taken, pattern = _pattern_of_part(tuple(tuple(dim.shares.values()) for dim in dims), fixed)
        return ReadersByChunk(compress(product(*(dim.shares for dim in dims)), taken), pattern)
    found: dict[ChunkIndex, list[PartShares]] = {}
    for dims, fixed in parts:
        for along in product(*(dim.shares.items() for dim in dims)):
            chunk, shares = zip(*along, strict=True)
            found.setdefault(chunk, []).append(PartShares(shares, fixed))
    every = {chunk: readers_of_chunk(tuple(found[chunk])) for chunk in sorted(found)}
    kept = {chunk: readers for chunk, readers in every.items() if readers.ranks}
    return ReadersByChunk(kept, _pattern_of_readers(tuple(kept.values())))


@lru_cache(maxsize=256)
def _pattern_of_part(
    along: tuple[tuple[DimShares, ...], ...], fixed: tuple[DimShares, ...]
) -> tuple[tuple[bool, ...], ReadersPattern]:
    """Say which chunks any rank reads for one part, given its shares by dim, and return the pattern of those chunks."""
    every = [readers_of_chunk((PartShares(shares, fixed),)) for shares in product(*along)]
    taken = tuple(bool(readers.ranks) for readers in every)
    return taken, _pattern_of_readers(tuple(compress(every, taken)))


@lru_cache(maxsize=256)
def _pattern_of_readers(readers: tuple[ChunkReaders, ...]) -> ReadersPattern:
    """Return one object for equal patterns, so that what is worked out from a pattern is found by identity."""
    return ReadersPattern(readers)


# -- checks that the parts of a request fit the arrays and fill the sample exactly once -------------------------------


def check_request_fits(request: ReadRequest, tables: Mapping[str, ArrayTable]) -> None:
    """Raise `ShardingError` or a `ReadError` that names the part, the array and the dim, unless the request fits."""
    layout = request.layout
    if any(count != 1 for count in layout.groups) or layout.ndim < 2:
        raise ShardingError(f"cannot read into {layout}: a sample is [T, C, *space] with no dims flattened together")
    for part in request.parts:
        _check_part_fits(part, tables, request)
    _check_sample_filled(request)


def _check_part_fits(part: ReadPart, tables: Mapping[str, ArrayTable], request: ReadRequest) -> None:
    if part.array not in tables:
        raise MissingArrayError(f"the store has no array {part.array!r}; it has {', '.join(sorted(tables))}")
    table = tables[part.array]
    if table.dtype[1] not in "biuf":
        raise UnsupportedStoreError(
            f"array {part.array!r} has dtype {table.dtype!r}; only numbers can be read into a sample"
        )
    table.check_readable()  # refused here, alike on every rank
    if not len(part.picks) == len(part.to) == table.grid.ndim:
        raise FieldError(
            f"array {part.array!r} has dims {table.dims} and the part {len(part.picks)} picks, "
            f"{len(part.to)} destinations"
        )
    landing = [to for to in part.to if to != DROPPED_DIM] + [dim for dim, _ in part.at]
    if sorted(landing) != list(range(request.layout.ndim)):
        raise FieldError(
            f"array {part.array!r}: its dims land in {sorted(landing)} and the sample's are "
            f"0..{request.layout.ndim - 1}, each once"
        )
    for d, (picks, to) in enumerate(zip(part.picks, part.to, strict=True)):
        _check_dim_fits(part, table, request, d, picks, to)


def _check_dim_fits(
    part: ReadPart, table: ArrayTable, request: ReadRequest, d: int, picks: IndexPicks | None, to: int
) -> None:
    size, name = table.shape[d], f"dim {table.dims[d]!r} of array {part.array!r}"
    if picks is None:
        wanted = request.layout.cuts[to].size
        if part.first:
            first, last = part.first[d], part.first[d] + wanted
            if first < 0 or (last > size and not (wanted == size and first < size)):  # a whole dim may be rolled
                raise WindowError(f"rows {first}..{last} are outside {name}, which has {size}")
        elif to < 2 or size != wanted:
            raise GridError(f"{name} has {size} rows and lands in dim {to} of the sample, which has {wanted}")
        return
    if to == DROPPED_DIM and len(picks) != 1:
        raise FieldError(f"{name} is dropped, so exactly one index of it must be picked, not {len(picks)}")
    beyond = [source for source, _ in picks if not 0 <= source < size]
    if beyond:
        raise WindowError(f"index {beyond[0]} is outside {name}, which has {size}")


def _check_sample_filled(request: ReadRequest) -> None:
    """Check that every (time, channel) of the sample comes from exactly one part."""
    times, channels = request.layout.cuts[0].size, request.layout.cuts[1].size
    seen: dict[tuple[int, int], str] = {}
    for part in request.parts:
        stored = zip(part.picks, part.to, strict=True)
        targets = {to: [t for _, t in picks] for picks, to in stored if picks is not None}
        targets |= {dim: [index] for dim, index in part.at}
        for where in product(targets.get(0, []), targets.get(1, [])):
            if where in seen or not (0 <= where[0] < times and 0 <= where[1] < channels):
                beyond = f"is outside the sample's {times} x {channels}"
                why = f"also comes from array {seen[where]!r}" if where in seen else beyond
                raise FieldError(f"(time, channel) {where} of array {part.array!r} {why}")
            seen[where] = part.array
    if len(seen) != times * channels and not request.gaps:
        lacking = next(w for w in product(range(times), range(channels)) if w not in seen)
        raise FieldError(f"(time, channel) {lacking} of the sample comes from no array")
