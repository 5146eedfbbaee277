"""How one dim of an array is cut into chunks: all alike, or each of its own length.  Integers only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

ChunkIndex = tuple[int, ...]
"""Which chunk along each dim."""


class DimChunks:
    """The chunks along one dim of `size` rows.

    A regular grid has `chunk` rows in each, the last one stored as long as the others (Zarr, HDF5) unless it is
    `clipped` (plain files).  A rectilinear one has the `lengths` that it is given.

    Grids are equal by value: what is worked out on one is remembered under it, and found again by a store that is
    opened once more.
    """

    def __init__(self, size: int, chunk: int, lengths: Sequence[int] | None = None, clipped: bool = False) -> None:
        self.size, self.chunk, self._clipped = size, chunk, clipped
        self._edges: list[int] | None = None
        if lengths is not None:
            self._edges = [0]
            for length in lengths:
                self._edges.append(self._edges[-1] + length)
        self._key = size, chunk, clipped, tuple(self._edges or ())
        self._hash = hash(self._key)  # once: there may be an edge for each of many files

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DimChunks) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @property
    def count(self) -> int:
        """The number of chunks."""
        return -(-self.size // self.chunk) if self._edges is None else len(self._edges) - 1

    def find(self, row: int) -> int:
        """The chunk that holds a row."""
        return row // self.chunk if self._edges is None else bisect_right(self._edges, row) - 1

    def start(self, index: int) -> int:
        """The first row of a chunk."""
        return index * self.chunk if self._edges is None else self._edges[index]

    def length(self, index: int) -> int:
        """How many rows a chunk stores; what lies beyond the dim's end is padding."""
        if self._edges is not None:
            return self._edges[index + 1] - self._edges[index]
        return min(self.chunk, self.size - index * self.chunk) if self._clipped else self.chunk

    def inside(self, index: int) -> tuple[int, int]:
        """The rows of the dim that a chunk covers, padding left out."""
        start = self.start(index)
        return start, min(start + self.length(index), self.size)

    def edges(self) -> list[int]:
        """Where chunks begin, and the end."""
        return [self.start(i) for i in range(self.count)] + [self.size]
