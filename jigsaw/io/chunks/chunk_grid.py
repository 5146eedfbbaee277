"""Grid of an array's chunks: along each dim of equal length, or each of its own length. Integers only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

from jigsaw.geometry.cut import Box, Interval

ChunkIndex = tuple[int, ...]
"""Number of a chunk along each dim."""
ChunkRows = tuple[tuple[Interval, ...], ...]
"""Rows of a chunk: for each of its dims the intervals whose product is needed."""


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
        return -(-self.size // self.chunk) if self._edges is None else len(self._edges) - 1

    def find(self, row: int) -> int:
        """Return the chunk that holds a row."""
        return row // self.chunk if self._edges is None else bisect_right(self._edges, row) - 1

    def start(self, index: int) -> int:
        """Return the first row of a chunk."""
        return index * self.chunk if self._edges is None else self._edges[index]

    def length(self, index: int) -> int:
        """Return how many rows a chunk stores; those beyond the dim's end are padding."""
        if self._edges is not None:
            return self._edges[index + 1] - self._edges[index]
        return min(self.chunk, self.size - index * self.chunk) if self._clipped else self.chunk

    def inside(self, index: int) -> tuple[int, int]:
        """Return the rows of the dim that a chunk covers, without padding."""
        start = self.start(index)
        return start, min(start + self.length(index), self.size)

    def edges(self) -> list[int]:
        """Return the first row of each chunk, then the number of rows."""
        return [self.start(i) for i in range(self.count)] + [self.size]


@dataclass(frozen=True, eq=False)
class ChunkGrid:
    """Places of an array's chunks in the array, and the bytes that they decode to.

    `chunks` is the shape of a chunk, the largest where `lengths` gives those along a dim one by one; `clipped` says
    that the last chunk along a dim does not hold padding. Take 10 x 6 values of 4 bytes in chunks of 4 x 4. Chunk (2,
    1) has the box ((8, 10), (4, 6)); it is stored as 4 x 4 values in 64 bytes, or clipped, as 2 x 2 in 16.
    """

    shape: tuple[int, ...]
    itemsize: int
    chunks: tuple[int, ...]
    lengths: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]], repr=False)
    clipped: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def along(self) -> tuple[DimChunks, ...]:
        """The chunks along each dim."""
        return tuple(
            DimChunks(n, c, self.lengths.get(d), self.clipped)
            for d, (n, c) in enumerate(zip(self.shape, self.chunks, strict=True))
        )

    @cached_property
    def is_uniform(self) -> bool:
        """True where every chunk is stored with the same shape."""
        return not self.lengths and not self.clipped

    @cached_property
    def chunk_bytes(self) -> int:
        """The decoded size of the largest chunk."""
        return prod(self.chunks) * self.itemsize

    def shape_of(self, index: ChunkIndex) -> tuple[int, ...]:
        """Return the stored shape of a chunk, including padding."""
        if self.is_uniform:
            return self.chunks
        return tuple(a.length(i) for a, i in zip(self.along, index, strict=True))

    def bytes_of(self, index: ChunkIndex) -> int:
        """Return the decoded size of a chunk."""
        return self.chunk_bytes if self.is_uniform else prod(self.shape_of(index)) * self.itemsize

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each dim."""
        return tuple(a.count for a in self.along)

    def indices(self) -> Iterator[ChunkIndex]:
        """Yield the index of every chunk, in C order."""
        return product(*(range(n) for n in self.counts))

    def box_of(self, index: ChunkIndex) -> Box:
        """Return the rows of the array that a chunk covers."""
        return tuple(a.inside(i) for a, i in zip(self.along, index, strict=True))
