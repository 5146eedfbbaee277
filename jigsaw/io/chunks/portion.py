"""Parts of a chunk: the bytes of its values that some boxes need, and the stored bytes that hold those."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.geometry.cut import Interval
from jigsaw.io.chunks.chunk_grid import ChunkRows

MOST_PORTION_SHARE = 0.75
"""Largest share of a chunk that is decoded as a part; beyond it the whole chunk is decoded."""

ByteSpans = NDArray[np.int64]
"""Bytes of the decoded chunk as rows (start, stop), rising and apart."""


class ChunkPortion(NamedTuple):
    """A part of a chunk to fetch and decode.

    `ranges` are (offset, length) of its stored bytes, each a request; `spans` the (start, stop) of the decoded bytes
    that become valid, in the same order; `rows` the interval of each dim, for a chunk that a library reads by slices.
    """

    ranges: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]
    rows: tuple[Interval, ...] = ()
    decoded: int = 0

    @property
    def stored(self) -> int:
        """The stored bytes that it fetches."""
        return sum(length for _, length in self.ranges)


def needed_share(rects: Sequence[ChunkRows], shape: Sequence[int]) -> float:
    """Return an upper bound on the share of a chunk that these boxes need."""
    needed = sum(prod(sum(b - a for a, b in each) for each in rect) for rect in rects)
    return needed / max(prod(shape), 1)


def bounding_rows(rects: Sequence[ChunkRows]) -> tuple[Interval, ...]:
    """Return the smallest box of rows around all of them."""
    return tuple(
        (min(a for each in dim for a, _ in each), max(b for each in dim for _, b in each))
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
    """Return the blocks of so many bytes that hold these: runs [first, stop), rising and apart."""
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
