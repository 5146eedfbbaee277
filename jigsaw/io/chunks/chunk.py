"""Chunks of an array: their grid, the parts of one that boxes need, and where one lies in its store."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jigsaw.geometry.cut import Box, Interval
from jigsaw.io.chunks.files import ByteArray, StoreFiles

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
        self._hash = hash(self._key)  # computed once, because many files have many edges

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DimChunks) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @property
    def count(self) -> int:
        return -(-self.size // self.chunk) if self._edges is None else len(self._edges) - 1

    def find(self, row: int) -> int:
        return row // self.chunk if self._edges is None else bisect_right(self._edges, row) - 1

    def start(self, index: int) -> int:
        return index * self.chunk if self._edges is None else self._edges[index]

    def length(self, index: int) -> int:
        """Return the number of rows that a chunk stores; rows beyond the dim's end are padding."""
        if self._edges is not None:
            return self._edges[index + 1] - self._edges[index]
        return min(self.chunk, self.size - index * self.chunk) if self._clipped else self.chunk

    def inside(self, index: int) -> tuple[int, int]:
        """Return the rows of the dim that a chunk covers, without padding."""
        start = self.start(index)
        return start, min(start + self.length(index), self.size)

    def edges(self) -> list[int]:
        return [self.start(i) for i in range(self.count)] + [self.size]


@dataclass(frozen=True, eq=False)
class ChunkGrid:
    """Places of an array's chunks in the array, and the bytes that they decode to.

    `chunks` is the shape of the largest chunk; `lengths` has those along a dim where they differ. `clipped` says that
    the last chunk along a dim does not hold padding. Take 10 x 6 values of 4 bytes in chunks of 4 x 4. Chunk (2,
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
        return tuple(
            DimChunks(n, c, self.lengths.get(d), self.clipped)
            for d, (n, c) in enumerate(zip(self.shape, self.chunks, strict=True))
        )

    @cached_property
    def is_uniform(self) -> bool:
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
        return self.chunk_bytes if self.is_uniform else prod(self.shape_of(index)) * self.itemsize

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(a.count for a in self.along)

    def indices(self) -> Iterator[ChunkIndex]:
        return product(*(range(n) for n in self.counts))

    def box_of(self, index: ChunkIndex) -> Box:
        return tuple(a.inside(i) for a, i in zip(self.along, index, strict=True))


MOST_PORTION_SHARE = 0.75
"""Largest share of a chunk that is decoded as a part; beyond it the whole chunk is decoded."""

ByteSpans = NDArray[np.int64]
"""Bytes of the decoded chunk as rows (start, stop), rising and apart."""


class ChunkPortion(NamedTuple):
    """A part of a chunk to fetch and decode.

    `ranges` are (offset, length) of its stored bytes, each a request. `spans` are the (start, stop) of the decoded
    bytes that become valid, in the same order. `rows` has the interval of each dim of a chunk that a library slices.
    """

    ranges: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]
    rows: tuple[Interval, ...] = ()
    decoded: int = 0

    @property
    def stored(self) -> int:
        return sum(length for _, length in self.ranges)


def needed_share(rects: Sequence[ChunkRows], shape: Sequence[int]) -> float:
    """Return an upper bound on the share of a chunk that these boxes need."""
    needed = sum(prod(sum(b - a for a, b in rows) for rows in rect) for rect in rects)
    return needed / max(prod(shape), 1)


def bounding_rows(rects: Sequence[ChunkRows]) -> tuple[Interval, ...]:
    """Return the smallest box of rows around all of them."""
    return tuple(
        (min(a for rows in dim for a, _ in rows), max(b for rows in dim for _, b in rows))
        for dim in zip(*rects, strict=True)
    )


def needed_byte_spans(
    rects: Sequence[ChunkRows], shape: Sequence[int], order: Sequence[int], itemsize: int, gap: int
) -> ByteSpans:
    """Return the bytes of a decoded chunk, its dims in `order`, that boxes need; those `gap` apart are joined."""
    sizes = [shape[d] for d in order]
    parts = [_element_spans([rect[d] for d in order], sizes) for rect in rects]
    return join_spans(np.concatenate(parts) * itemsize, gap)


def blosc_blocks_of_spans(spans: ByteSpans, block: int) -> ByteSpans:
    """Return the blocks of `block` bytes that hold these spans: runs [first, stop), rising and apart."""
    return join_spans(np.stack([spans[:, 0] // block, -(-spans[:, 1] // block)], axis=1), 0)


@lru_cache(maxsize=1024)
def blosc_blocks_of_rows(
    rects: tuple[ChunkRows, ...], shape: tuple[int, ...], order: tuple[int, ...], itemsize: int, block: int
) -> ByteSpans:
    """Return the runs of blocks that boxes need of a decoded chunk; most chunks of an array need the same."""
    runs = blosc_blocks_of_spans(needed_byte_spans(rects, shape, order, itemsize, 0), block)
    runs.flags.writeable = False
    return runs


def _element_spans(rect: Sequence[Sequence[Interval]], sizes: Sequence[int]) -> ByteSpans:
    """Return the elements of one rect as spans: dims from the last partial one on are contiguous."""
    partial = [d for d, (rows, n) in enumerate(zip(rect, sizes, strict=True)) if sum(b - a for a, b in rows) < n]
    inner = partial[-1] if partial else 0
    tail = prod(sizes[inner + 1 :])
    starts = np.zeros(1, np.int64)
    for rows, n in zip(rect[:inner], sizes, strict=False):
        picked = np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in rows])
        # the number, in C order, of each combination of the rows so far
        starts = (starts[:, None] * n + picked).ravel()
    if not sizes:
        return np.array([[0, 1]], np.int64)
    edges = np.array(rect[inner], np.int64).reshape(-1, 2)
    return ((starts[:, None, None] * sizes[inner] + edges) * tail).reshape(-1, 2)


def join_spans(spans: NDArray[Any], gap: int) -> ByteSpans:
    """Return the spans in rising order, with those that overlap or lie at most `gap` apart as one."""
    if len(spans) < 2:
        return spans.astype(np.int64)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    stops = np.maximum.accumulate(spans[:, 1])
    # a joined span begins where one starts beyond all stops before it, and ends before the next begins
    first = np.concatenate([[True], spans[1:, 0] > stops[:-1] + gap])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], stops[last]], axis=1).astype(np.int64)


def plain_portion(spans: ByteSpans) -> ChunkPortion:
    """Return the portion of a chunk that is stored as its values."""
    pairs = [(int(a), int(b)) for a, b in spans]
    return ChunkPortion(tuple((a, b - a) for a, b in pairs), tuple(pairs), decoded=sum(b - a for a, b in pairs))


class ChunkRef(NamedTuple):
    """Place of a chunk's stored bytes: `length` bytes at `offset` of an object.

    `length` is None where the store does not give it, and the whole object is meant. `mask` has bit k set where HDF5
    left out filter k for this chunk.
    """

    path: str
    offset: int
    length: int | None
    mask: int = 0


class ChunkPlaces(Protocol):
    """Places of an array's chunks, in one format."""

    @property
    def files(self) -> StoreFiles: ...

    def path(self, index: ChunkIndex) -> str: ...

    def locate(self, index: ChunkIndex) -> ChunkRef | None: ...


@runtime_checkable
class StripPlaces(Protocol):
    """Places that look up consecutive chunks along the last dim together."""

    def locate_strip(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]: ...


@runtime_checkable
class ObjectPerChunk(Protocol):
    """Places of chunks that are objects of their own, which somebody may remove one by one.

    A chunk may be missing there because it was never written, because all its values are the fill value, or because it
    was removed. Where an index lists the chunks (HDF5, shards, Icechunk), the store itself tells.
    """

    def lacks_object(self, index: ChunkIndex) -> bool:
        """Say whether a missing chunk's object is absent, rather than left out by an index of the store."""
        ...

    def lost_metadata(self) -> str | None:
        """Return the name of the array's metadata, where these are gone. It asks the store."""
        ...


class ChunkDecoder(Protocol):
    """Decoder from the stored bytes of a chunk to its values: `CodecDecoder` of Zarr's codecs and of bytes as they are,
    or `FilterPipeline` of HDF5's.

    `is_plain`: the stored bytes are the values.  `splits`: a part can be decoded alone (plain bytes and Blosc frames).
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def order(self) -> tuple[int, ...]: ...

    @property
    def is_plain(self) -> bool: ...

    @property
    def splits(self) -> bool: ...

    def decode(self, raw: ByteArray, out: ByteArray, mask: int = 0) -> None: ...


class ChunkLoadCounts(NamedTuple):
    """Counts of loading a chunk; `stored` is None for a missing chunk."""

    stored: int | None
    fallback: bool
    requests: int = 1
    decoded: int = 0


class FetchedBytes(NamedTuple):
    """The stored bytes of a chunk, or of a part of it; `raw` is None when they are already where they belong.

    `requests` are those it took, where the chunk was fetched together with others.
    """

    raw: ByteArray | None
    ref: ChunkRef
    portion: ChunkPortion | None
    requests: int | None = None
