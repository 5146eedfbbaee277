"""What it takes to find chunks: reads of the indices of shards and of Blosc's tables of blocks, each once and kept.

They are made while a read is planned, so they are counted apart from those of the read itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from jigsaw.io.chunk_grid import Index


class Lookups(NamedTuple):
    """So many requests, for so many bytes."""

    requests: int = 0
    bytes: int = 0


def total(each: Iterable[Lookups]) -> Lookups:
    """Their sum."""
    found = tuple(each)
    return Lookups(sum(one.requests for one in found), sum(one.bytes for one in found))


class Tally:
    """Adds up the lookups that threads make."""

    def __init__(self) -> None:
        self._lock, self.made = threading.Lock(), Lookups()

    def add(self, more: Lookups) -> Lookups:
        """Count `more`, and give it back."""
        with self._lock:
            self.made = total((self.made, more))
        return more


@runtime_checkable
class Indexed(Protocol):
    """Places that are looked up in indices; `made` adds up those that were read."""

    @property
    def made(self) -> Lookups: ...

    def index_of(self, index: Index) -> tuple[str, Lookups]:
        """The object whose index says where a chunk lies, and what reading that index takes."""
        ...
