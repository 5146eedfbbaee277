"""Arrays that are not there: with chunks and shards of given sizes, in the codec that `jigsaw.io.convert` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from jigsaw.io import portion
from jigsaw.io.chunk_grid import Index
from jigsaw.io.coords import SPACE
from jigsaw.io.cost import WORTH
from jigsaw.io.formats.codecs import Decoder
from jigsaw.io.formats.values import NoFile
from jigsaw.io.portion import Portion, Rect
from jigsaw.io.survey import Variable
from jigsaw.io.table import SMALL, ArrayTable

SHARD_BYTES = 1 << 27
"""Decoded bytes that a shard holds at most, unless one chunk is larger: what a writer keeps in memory at a time."""
BLOCK = 1 << 18
"""The blocks of a Blosc frame, each of which is decoded alone; Blosc chooses about this size."""
FEW_BYTES = 1 << 26
"""Arrays without space are stored in chunks of at most so many bytes."""


def chunks_of(dims: Sequence[tuple[str, str, int]], itemsize: int, wanted: Mapping[str, int]) -> tuple[int, ...]:
    """The chunk of an array whose dims are (role, own name, size), by sizes by role or name.

    Levels and space that are not named are whole, of any other dim a chunk has one row.  An array without space is one
    chunk, or as many as keep each small.
    """
    whole = [max(n, 1) for _, _, n in dims]
    if any(role in SPACE for role, _, _ in dims):
        free = [n if role in (*SPACE, "level") else 1 for (role, _, _), n in zip(dims, whole, strict=True)]
        sizes = [wanted.get(own, wanted.get(role, n)) for (role, own, _), n in zip(dims, free, strict=True)]
        return tuple(min(size, n) for size, n in zip(sizes, whole, strict=True))
    if whole and prod(whole) * itemsize > FEW_BYTES:
        whole[0] = max(1, FEW_BYTES // (prod(whole[1:]) * itemsize))
    return tuple(whole)


def shards_of(
    dims: Sequence[tuple[str, str, int]], itemsize: int, chunks: Sequence[int], most: int = SHARD_BYTES
) -> tuple[int, ...]:
    """Whole chunks along each dim that make a shard of at most `most` bytes: space and levels first, then steps.

    Fewer, larger files cost a reader nothing: it fetches chunks, and keeps the index of a shard.
    """
    shard = list(chunks)
    last_first = sorted(range(len(dims)), key=lambda d: (dims[d][0] == "time", -d))
    for d in last_first:
        room = most // (prod(shard) * itemsize)
        needed = -(-dims[d][2] // chunks[d])
        # 128 steps rather than 129: a power of two fits what else is cut along the dim
        shard[d] = chunks[d] * (needed if needed <= room else 1 << max(room, 1).bit_length() - 1)
    return tuple(shard)


def dims_of(variable: Variable) -> list[tuple[str, str, int]]:
    """(role, own name, size) of each dim."""
    return list(zip(variable.roles, variable.table.dims, variable.table.shape, strict=True))


def proposed(variable: Variable, chunks: Mapping[str, int], ratio: float) -> ArrayTable:
    """The array in chunks of these sizes; each is stored in `ratio` of its decoded bytes."""
    table = variable.table
    shape = chunks_of(dims_of(variable), table.itemsize, chunks)
    stored = max(1, int(prod(shape) * table.itemsize * ratio))
    decoder = Decoder(np.dtype(table.dtype), tuple(range(table.ndim)), "blosc")
    places = NoFile("a store that is not written yet", stored)
    return _Proposed(table.name, table.shape, table.dims, table.dtype, shape, None, {}, (), decoder, places)


class _Proposed(ArrayTable):
    """Parts of chunks are those blocks of equal size that the rows touch."""

    def portion(self, index: Index, rects: Sequence[Rect]) -> Portion | None:
        size = self.bytes_of(index)
        if size < SMALL or portion.share(rects, self.chunks) > WORTH:
            return None
        spans = portion.byte_spans(rects, self.chunks, range(self.ndim), self.itemsize, BLOCK)
        blocks: set[Any] = {b for a, z in spans.tolist() for b in range(a // BLOCK, -(-z // BLOCK))}
        decoded = min(size, len(blocks) * BLOCK)
        if decoded > WORTH * size:
            return None
        stored = self.stored_bytes(index) * decoded // size
        return Portion(((0, stored),), ((0, decoded),), decoded=decoded)
