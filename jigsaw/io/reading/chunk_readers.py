"""Ranks that read each chunk, how much each takes, and which rank loads it for the others.

Readers are worked out once for all chunks that lie alike.

A sample is cut as a product of dims, and so is what a rank takes of a chunk: along each dim a piece's rows. Chunks of
which the pieces take the same rows have the same readers, whatever their array and step. With 100 fields in chunks of
the whole globe all chunks are alike, as are those of the next sample. So 4096 ranks work out once who takes what.

Take four ranks on lat=2, lon=2, and an array of 8 x 8 in chunks of 4 x 8 with a halo of one row. Of chunk (0, 0), piece
0 along lat takes the rows 0-3, all of which it owns; piece 1 takes row 3, which it does not own. Along lon, piece 0 has
the columns 0-4 and piece 1 the columns 3-7. So all four ranks read it, taking 20, 20, 5 and 5 values; ranks 0 and 1 own
rows of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from hashlib import blake2b
from heapq import heapify, heapreplace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.geometry.cut import Interval
from jigsaw.geometry.layout import AxisSizes, values_over_mesh
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkPortion, ChunkRows, needed_share

PLAN_MODES = ("independent", "neighbors", "cooperative")
ReaderRanks = tuple[int, ...]


class ChunkJob(NamedTuple):
    """One chunk to load, by the rank `owner`, for `readers`.  The owner of a missing chunk is `NO_OWNER`."""

    array: str
    chunk: ChunkIndex
    owner: int
    readers: ReaderRanks

    def is_read_by(self, rank: int) -> bool:
        at = bisect_left(self.readers, rank)  # readers are in rising order
        return at < len(self.readers) and self.readers[at] == rank


NO_OWNER = -1


@dataclass
class ReadCounts:
    """Counts of the work that a rank will do, or did, for a plan: byte ranges requested, chunks decoded, and bytes.

    `decoded_bytes` counts whole chunks, or the part that is decoded; `useful_bytes` is what lands in the rank's own
    tile, in the stored dtype. `sent_bytes` is what the rank hands to others, and `fallback` counts chunks that only the
    format's library could decode. `unsized` counts chunks whose stored size is not known beforehand, which
    `stored_bytes` leaves out; it is 0 in counts of work done. `missing` counts chunks that are not in the store and
    stand as fill values.
    """

    requests: int = 0
    chunks: int = 0
    fallback: int = 0
    stored_bytes: int = 0
    decoded_bytes: int = 0
    useful_bytes: int = 0
    sent_bytes: int = 0
    unsized: int = 0
    missing: int = 0

    @property
    def row(self) -> NDArray[np.int64]:
        return np.array(list(vars(self).values()), np.int64)

    @property
    def stored(self) -> int | None:
        return None if self.unsized else self.stored_bytes

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


CountsTable = NDArray[np.int64]
"""`ReadCounts` of many ranks, a row each."""
COUNT_COLUMN = {field.name: number for number, field in enumerate(fields(ReadCounts))}
"""Column of a `CountsTable`, by the name of the count."""

ByReader = NDArray[np.int64]
"""A number for each reader of a chunk, in the order of their ranks."""


class PieceShare(NamedTuple):
    """Share of a chunk that a piece of a cut takes along a dim: the rows, each once, and their number with repeats."""

    piece: int
    rows: tuple[Interval, ...]
    taken: int
    owns: bool = True


@dataclass(frozen=True, eq=False)
class DimShares:
    """Shares of the pieces of a dim's cut in the `length` rows that a chunk stores; pieces that take none are left out.

    The axes `cutting` of the mesh `axes` cut it.
    """

    axes: AxisSizes
    cutting: tuple[str, ...]
    length: int
    shares: tuple[PieceShare, ...]

    @cached_property
    def rows(self) -> NDArray[np.object_]:
        """The rows that each rank takes; None for a rank that takes none."""
        return self._over_mesh([share.rows for share in self.shares], None)

    @cached_property
    def taken(self) -> NDArray[np.int64]:
        return self._over_mesh([share.taken for share in self.shares], 0)

    @cached_property
    def share(self) -> NDArray[np.float64]:
        # of rows that are taken twice, as beyond an edge, one is decoded
        return self._over_mesh(
            [sum(b - a for a, b in piece_share.rows) / self.length for piece_share in self.shares], 0.0
        )

    @cached_property
    def owns(self) -> NDArray[np.bool_]:
        return self._over_mesh([share.owns for share in self.shares], False)

    def _over_mesh(self, values: Sequence[Any], nothing: Any) -> NDArray[Any]:
        """Lay out each rank's value as an array over the mesh, of size one along the axes that do not cut."""
        pieces = prod(size for axis, size in self.axes if axis in self.cutting)
        by_piece = np.full(pieces, nothing, object if nothing is None else None)
        for share, value in zip(self.shares, values, strict=True):
            by_piece[share.piece] = value
        return values_over_mesh(self.axes, self.cutting, by_piece)


@lru_cache(maxsize=1 << 14)
def shares_of_dim(axes: AxisSizes, cutting: tuple[str, ...], length: int, shares: tuple[PieceShare, ...]) -> DimShares:
    """Return one object for equal shares, so that chunks that lie alike are found by identity."""
    return DimShares(axes, cutting, length, shares)


class PartShares(NamedTuple):
    """Shares that ranks take of a chunk for a part: along stored dims, and along those that its array lacks."""

    stored: tuple[DimShares, ...]
    fixed: tuple[DimShares, ...]


class ReaderGroup:
    """Readers that a chunk is loaded for, and the rows that they need."""

    def __init__(self, readers: ChunkReaders, places: NDArray[np.intp]) -> None:
        self._readers, self._places = readers, places
        self.largest_share = float(readers.largest_share[places].max())
        self.portions: dict[Hashable, ChunkPortion | None] = {}

    @cached_property
    def rects(self) -> list[ChunkRows]:
        return [rect for place in self._places.tolist() for rect in self._readers.rects(place)]

    @cached_property
    def share(self) -> float:
        """Upper bound on the share of the chunk that they need together."""
        return needed_share(self.rects, self._readers.shape)


class ChunkLoads(NamedTuple):
    """Loads of a chunk: by the rank `owner` for those `served`, and by the readers `alone` (their places) for
    themselves.

    Without a load for several ranks `served` is empty; `sent` counts the values that the owner hands to other ranks.
    """

    owner: int
    served: ReaderRanks
    alone: NDArray[np.intp]
    sent: int = 0


class ChunkReaders:
    """The ranks that take rows of a chunk, and how many `values` each takes.

    `at` are the ranks as an array; `largest_share` is what the largest of a reader's boxes takes of the chunk, `owning`
    whether it owns rows of it.
    """

    def __init__(self, parts: Sequence[PartShares]) -> None:
        self._parts, mesh = parts, tuple(size for _, size in parts[0].stored[0].axes)
        self.shape = tuple(dim.length for dim in parts[0].stored)

        def over_parts(shares_by_part: Iterable[Sequence[NDArray[Any]]]) -> NDArray[Any]:
            return np.stack([np.broadcast_to(prod(by_dim), mesh).ravel() for by_dim in shares_by_part])

        values = over_parts([dim.taken for dim in (*p.stored, *p.fixed)] for p in parts).sum(0)
        self.at: ByReader = np.flatnonzero(values)
        self.ranks: ReaderRanks = tuple(self.at.tolist())
        self.values: ByReader = values[self.at]
        self.largest_share = over_parts([dim.share for dim in p.stored] for p in parts).max(0)[self.at]
        self.owning = over_parts([dim.owns for dim in p.stored] for p in parts).max(0)[self.at] > 0
        self.memo: dict[Hashable, Any] = {}
        self._loads: dict[str, ChunkLoads] = {}
        self._groups: dict[ReaderRanks, ReaderGroup] = {}

    def __len__(self) -> int:
        return len(self.ranks)

    def places(self, ranks: ReaderRanks) -> NDArray[np.intp]:
        return np.arange(len(self.at)) if ranks is self.ranks else np.searchsorted(self.at, ranks)

    def values_of(self, ranks: ReaderRanks) -> ByReader:
        return self.values if ranks is self.ranks else self.values[self.places(ranks)]

    def group(self, ranks: ReaderRanks) -> ReaderGroup:
        if ranks is self.ranks:
            return self._all
        if ranks not in self._groups:
            self._groups[ranks] = ReaderGroup(self, self.places(ranks))
        return self._groups[ranks]

    @cached_property
    def _all(self) -> ReaderGroup:
        return ReaderGroup(self, self.places(self.ranks))

    def rects(self, place: int) -> list[ChunkRows]:
        pairs = [(tuple(d[place] for d in stored), tuple(d[place] for d in fixed)) for stored, fixed in self._rows]
        return [rect for rect, fixed_rows in pairs if None not in rect and None not in fixed_rows]

    @cached_property
    def _rows(self) -> list[tuple[list[NDArray[np.object_]], ...]]:
        mesh = tuple(size for _, size in self._parts[0].stored[0].axes)
        return [
            tuple([np.broadcast_to(dim.rows, mesh).ravel()[self.at] for dim in dims] for dims in part)
            for part in self._parts
        ]

    def is_alone(self, rank: int, mode: str) -> bool:
        return mode == "independent" or rank in self.at[self.loads(mode).alone]

    def loads(self, mode: str) -> ChunkLoads:
        """Return who loads the chunk in a mode of reading.

        Suppose ranks 0 to 3 need a chunk; 1 and 2 own rows, and 0 and 3 hold some as their halo. `independent`: each
        loads it for itself. `cooperative`: one of them, here rank 0, loads it for all. `neighbors`: rank 1 loads it
        for 0, 1 and 3, and rank 2 for itself.
        """
        if mode not in self._loads:
            self._loads[mode] = self._loads_in(mode)
        return self._loads[mode]

    def _loads_in(self, mode: str) -> ChunkLoads:
        everybody, values = np.arange(len(self.at)), self.values
        if mode == "independent" or len(self.ranks) == 1:
            return ChunkLoads(self.ranks[0], (), everybody)
        if mode == "cooperative":
            return ChunkLoads(self.ranks[0], self.ranks, everybody[:0], int(values[1:].sum()))
        # there may be no owner: a crop's halo may reach into chunks that no rank owns rows of
        owning = np.flatnonzero(self.owning) if self.owning.any() else everybody[:1]
        serving = np.delete(everybody, owning[1:])
        owner, sent = self.ranks[owning[0]], int(values[serving].sum() - values[owning[0]])
        if len(serving) == 1:
            return ChunkLoads(owner, (), owning)
        served = self.ranks if len(serving) == len(everybody) else tuple(self.at[serving].tolist())
        return ChunkLoads(owner, served, owning[1:], sent)


@lru_cache(maxsize=1 << 14)
def readers_of_chunk(parts: tuple[PartShares, ...]) -> ChunkReaders:
    """Return the readers of all chunks with these shares; the same object for equal shares."""
    return ChunkReaders(parts)


class ReadersPattern:
    """The readers of an array's needed chunks in C order, wherever these lie: the next sample has the same pattern.

    Where the first of several steps needs chunk 3 along time and the next one chunk 4, both have one pattern.
    """

    def __init__(self, readers: tuple[ChunkReaders, ...]) -> None:
        self.readers = readers
        self._loads: dict[str, tuple[ChunkLoads, ...]] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._totals: dict[str, tuple[int, int, int]] = {}
        self._alone: dict[tuple[str, int], NDArray[np.int32]] = {}

    def loads(self, mode: str) -> tuple[ChunkLoads, ...]:
        if mode not in self._loads:
            self._loads[mode] = tuple(chunk_readers.loads(mode) for chunk_readers in self.readers)
        return self._loads[mode]

    def counts(self, mode: str) -> NDArray[np.int64]:
        """Return how often each chunk is loaded, whether for several ranks, and the values handed over [3, chunk]."""
        if mode not in self._counts:
            rows = [
                (len(loads.alone) + bool(loads.served), bool(loads.served), loads.sent) for loads in self.loads(mode)
            ]
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


@lru_cache(maxsize=256)
def pattern_of_readers(readers: tuple[ChunkReaders, ...]) -> ReadersPattern:
    """Return one object for equal patterns, so that what is worked out from a pattern is found by identity."""
    return ReadersPattern(readers)


# -- chunks that ranks load for each other ----------------------------------------------------------------------------

# Every rank must find the same order and owners, because slots and parcels are numbered by them. But of thousands of
# chunks a rank loads a dozen and reads some hundreds. So the order is a few arrays, kept for the samples that share
# their jobs alike. A job becomes an object only where it is used.

GOLDEN_SECTION = 40503
"""Golden section of 2^16: an integer, so that all machines round alike."""
SharingWays = tuple[tuple[ReadersPattern, str], ...]
"""The pattern and the mode of each array that has shared chunks."""


class JobOrder:
    """Shared jobs in the order in which all ranks take them: job n is the chunk at place `places[n]` among those needed
    of the array that `ways` has at `arrays[n]`, and the rank `owners[n]` loads it.
    """

    def __init__(
        self, ways: SharingWays, arrays: NDArray[np.int32], places: NDArray[np.int32], owners: NDArray[np.int32]
    ) -> None:
        self.ways, self.arrays, self.places, self.owners = ways, arrays, places, owners

    @cached_property
    def digest(self) -> bytes:
        """Digest that is equal where the jobs come in the same order and have the same owners."""
        table = np.stack([self.arrays, self.places, self.owners]).astype("<i4")
        return blake2b(table.tobytes(), digest_size=16).digest()


class SharedJobs(Sequence[ChunkJob]):
    """The shared jobs of one sample, in their `order`; `arrays` has the name and the chunks of each of its arrays."""

    def __init__(self, order: JobOrder, arrays: Sequence[tuple[str, ReadersByChunk]]) -> None:
        self.order = order
        loads = [pattern.loads(mode) for pattern, mode in order.ways]
        self._arrays = [
            (name, readers.chunks, loads_of_chunks)
            for (name, readers), loads_of_chunks in zip(arrays, loads, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.order.owners)

    def __getitem__(self, number: int) -> ChunkJob:  # pyright: ignore[reportIncompatibleMethodOverride] (no slices)
        order = self.order
        return self._job(int(order.arrays[number]), int(order.places[number]), int(order.owners[number]))

    def __iter__(self) -> Iterator[ChunkJob]:
        order = self.order
        return map(self._job, order.arrays.tolist(), order.places.tolist(), order.owners.tolist())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, SharedJobs | tuple) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _job(self, array: int, place: int, owner: int) -> ChunkJob:
        name, chunks, loads = self._arrays[array]
        return ChunkJob(name, chunks[place], owner, loads[place].served)

    def loaded_by(self, ranks: Collection[int]) -> list[tuple[int, ChunkJob]]:
        return [(n, self[n]) for n in np.flatnonzero(np.isin(self.order.owners, list(ranks))).tolist()]

    def read_by(self, rank: int) -> list[ChunkJob]:
        """Return the jobs of which a rank takes a part, including those that it loads."""
        return [self[n] for n in _numbers_read_by(self.order, rank)]


@lru_cache(maxsize=16)
def _numbers_read_by(order: JobOrder, rank: int) -> tuple[int, ...]:
    # computed once for each place of a pattern, because many arrays share a pattern
    reads = {way: [rank in loads.served for loads in way[0].loads(way[1])] for way in set(order.ways)}
    by_array = [reads[way] for way in order.ways]
    placed = zip(order.arrays.tolist(), order.places.tolist(), strict=True)
    return tuple(n for n, (array, place) in enumerate(placed) if by_array[array][place])


@lru_cache(maxsize=8)
def order_of_jobs(ways: SharingWays, weights: bytes, loads: bytes) -> JobOrder:
    """Find the order and the owners of shared jobs, from numbers alone, so that samples alike are worked out once.
    `weights` are the bytes of the jobs (int64, by array and place); `loads` are the bytes that ranks load for
    themselves.

    The owner of a cooperative job is chosen: the largest first, each to the rank with the fewest bytes so far. Suppose
    ranks have 5, 0, 0 and 9 to load for themselves and share jobs of 8, 4, 4 and 2. Then 8 goes to rank 1 and 4 to rank
    2, which then has 4, the least, and gets the other 4; 2 goes to rank 0, with 5.
    """
    weight = np.frombuffer(weights, np.int64)
    places = [pattern.shared_places(mode) for pattern, mode in ways]
    arrays = np.repeat(np.arange(len(ways)), [len(some_places) for some_places in places])
    place = np.concatenate([np.empty(0, np.intp), *places])
    fixed_owners = [
        pattern.loads(mode)[p].owner for (pattern, mode), some in zip(ways, places, strict=True) for p in some
    ]
    is_chosen = np.array([mode == "cooperative" for _, mode in ways], bool)[arrays]
    load = np.frombuffer(loads, np.int64).tolist()
    owners = owners_of_jobs(weight, np.where(is_chosen, NO_OWNER, fixed_owners).tolist(), load)
    return JobOrder(ways, arrays.astype(np.int32), place.astype(np.int32), np.array(owners, np.int32))


def owners_of_jobs(weight: NDArray[np.int64], fixed_owners: Sequence[int], load: list[int]) -> list[int]:
    """Find the rank that loads each job: the rank that it is `fixed_owners`, or the one with the least so far."""
    ranks, turns = len(load), [0] * len(load)
    # Among equals ranks take turns in an order that moves on each time, by a golden section of them. If the lowest were
    # always first, 64 tiles of each field would give rank 3 of 64 tile 3 of each, which may lie in the ocean in all.
    least = [(size_so_far, rank, rank) for rank, size_so_far in enumerate(load)]
    heapify(least)
    owners, weights = [NO_OWNER] * len(fixed_owners), weight.tolist()
    # Largest first, because a large one that comes last finds no rank that is behind by so much.  In whole bytes, with
    # ties broken by number, as a stable sort keeps the order of equals: a float's rounding, or a set's order, would
    # make other owners on another machine.
    for number in np.argsort(-weight, kind="stable").tolist():
        owner, size = fixed_owners[number], weights[number]
        if not size:
            break  # no rank loads missing chunks: their readers fill their boxes by themselves
        if owner == NO_OWNER:
            while least[0][0] < load[owner := least[0][2]]:  # the entry is old: that rank was given more jobs since
                turn = turns[owner] * ranks * GOLDEN_SECTION >> 16
                heapreplace(least, (load[owner], (owner + turn) % ranks, owner))
        load[owner] += size
        turns[owner] += 1
        owners[number] = owner
    return owners
