"""Look-ups that find chunks: reads of the indices of shards and of Blosc's tables of blocks, each once and kept.

They are made while a read is planned, so they are counted apart from those of the read itself.  The index of an HDF5
file is read when it is opened, and not counted here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from jigsaw.io.chunks.chunk_grid import ChunkIndex


class LookupCounts(NamedTuple):
    """Numbers of requests and of bytes."""

    requests: int = 0
    bytes: int = 0


def total_lookups(each: Iterable[LookupCounts]) -> LookupCounts:
    """Sum look-ups."""
    found = tuple(each)
    return LookupCounts(sum(one.requests for one in found), sum(one.bytes for one in found))


class LookupTally:
    """Sum of the look-ups that threads make."""

    def __init__(self) -> None:
        self._lock, self.counted = threading.Lock(), LookupCounts()

    def add(self, more: LookupCounts) -> LookupCounts:
        """Count `more`, and give it back."""
        with self._lock:
            so_far = self.counted
            self.counted = LookupCounts(so_far.requests + more.requests, so_far.bytes + more.bytes)
        return more


@runtime_checkable
class IndexedPlaces(Protocol):
    """Places that are looked up in indices; `counted` adds up those that were read."""

    @property
    def counted(self) -> LookupCounts: ...

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts]:
        """Return the object whose index says where a chunk lies, and the look-ups of reading that index."""
        ...
