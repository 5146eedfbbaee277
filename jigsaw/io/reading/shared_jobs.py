"""Chunks that ranks load for each other: their order, and the rank that loads each.

Every rank must find the same order and owners, because slots and parcels are numbered by them. But of thousands of
chunks a rank loads a dozen and reads some hundreds. So the order is a few arrays, kept for the samples that share their
jobs alike. A job becomes an object only where it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.reading.chunk_jobs import NO_OWNER, ChunkJob
from jigsaw.io.reading.needed_chunks import ReadersByChunk, ReadersPattern

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
        made = np.stack([self.arrays, self.places, self.owners]).astype("<i4")
        return blake2b(made.tobytes(), digest_size=16).digest()


class SharedJobs(Sequence[ChunkJob]):
    """The shared jobs of one sample, in their `order`; `arrays` has the name and the chunks of each of its arrays."""

    def __init__(self, order: JobOrder, arrays: Sequence[tuple[str, ReadersByChunk]]) -> None:
        self.order = order
        loads = [pattern.loads(mode) for pattern, mode in order.ways]
        self._arrays = [(name, found.chunks, each) for (name, found), each in zip(arrays, loads, strict=True)]

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
        """Return the jobs that some ranks load, and the number of each."""
        return [(n, self[n]) for n in np.flatnonzero(np.isin(self.order.owners, list(ranks))).tolist()]

    def read_by(self, rank: int) -> list[ChunkJob]:
        """Return the jobs of which a rank takes a part, including those that it loads."""
        return [self[n] for n in _numbers_read_by(self.order, rank)]


@lru_cache(maxsize=16)
def _numbers_read_by(order: JobOrder, rank: int) -> tuple[int, ...]:
    """Return the numbers of the jobs that have a rank among their readers."""
    # whether it reads a chunk is asked once a place of a pattern, which many arrays share
    reads = {way: [rank in each.served for each in way[0].loads(way[1])] for way in set(order.ways)}
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
    arrays = np.repeat(np.arange(len(ways)), [len(each) for each in places])
    place = np.concatenate([np.empty(0, np.intp), *places])
    given = [pattern.loads(mode)[p].owner for (pattern, mode), some in zip(ways, places, strict=True) for p in some]
    is_chosen = np.array([mode == "cooperative" for _, mode in ways], bool)[arrays]
    load = np.frombuffer(loads, np.int64).tolist()
    owners = owners_of_jobs(weight, np.where(is_chosen, NO_OWNER, given).tolist(), load)
    return JobOrder(ways, arrays.astype(np.int32), place.astype(np.int32), np.array(owners, np.int32))


def owners_of_jobs(weight: NDArray[np.int64], given: Sequence[int], load: list[int]) -> list[int]:
    """Find the rank that loads each job: the rank that it is `given`, or the one with the least so far."""
    ranks, turns = len(load), [0] * len(load)
    # Among equals ranks take turns in an order that moves on each time, by a golden section of them. If the lowest were
    # always first, 64 tiles of each field would give rank 3 of 64 tile 3 of each, which may lie in the ocean in all.
    least = [(each, rank, rank) for rank, each in enumerate(load)]
    heapify(least)
    owners, weights = [NO_OWNER] * len(given), weight.tolist()
    # Largest first, because a large one that comes last finds no rank that is behind by so much.  In whole bytes, with
    # ties broken by number, as a stable sort keeps the order of equals: a float's rounding, or a set's order, would
    # make other owners on another machine.
    for number in np.argsort(-weight, kind="stable").tolist():
        owner, size = given[number], weights[number]
        if not size:
            break  # no rank loads missing chunks: their readers fill their boxes by themselves
        if owner == NO_OWNER:
            while least[0][0] < load[owner := least[0][2]]:  # it was given more since it was entered
                turn = turns[owner] * ranks * GOLDEN_SECTION >> 16
                heapreplace(least, (load[owner], (owner + turn) % ranks, owner))
        load[owner] += size
        turns[owner] += 1
        owners[number] = owner
    return owners
