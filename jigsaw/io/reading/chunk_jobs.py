"""Work of a read: the chunks to load, the ranks that load and need them, and counts. Integers only."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.chunks.chunk_grid import ChunkIndex

ReaderRanks = tuple[int, ...]


class ChunkJob(NamedTuple):
    """One chunk to load, by the rank `owner`, for `readers`.  The owner of a missing chunk is `NO_OWNER`."""

    array: str
    chunk: ChunkIndex
    owner: int
    readers: ReaderRanks

    @property
    def is_private(self) -> bool:
        return self.readers == (self.owner,)

    def is_read_by(self, rank: int) -> bool:
        at = bisect_left(self.readers, rank)  # they rise
        return at < len(self.readers) and self.readers[at] == rank


NO_OWNER = -1


@dataclass
class ReadCounts:
    """Counts of the work that one rank does, or did, in a plan: byte ranges asked for, chunks decoded, and bytes.

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
        """The row of a `CountsTable`."""
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
