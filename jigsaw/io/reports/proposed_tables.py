"""Arrays that do not exist: with chunks and shards of given sizes, in the codec that `jigsaw.io.convert` writes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from jigsaw.io.chunks import portion
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.chunk_finder import SMALLEST_DIVIDED_CHUNK, ChunkFinder
from jigsaw.io.chunks.chunk_grid import ChunkIndex, ChunkRows
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.chunks.portion import ChunkPortion
from jigsaw.io.formats.array_source import FilelessPlaces
from jigsaw.io.series.coords import SPATIAL_ROLES
from jigsaw.io.series.store_survey import StoreVariable

MOST_SHARD_BYTES = 1 << 27
"""Largest number of decoded bytes in a shard, unless one chunk is larger: a writer keeps these in memory at a time."""
BLOSC_BLOCK_BYTES = 1 << 18
"""Size of the blocks of a Blosc frame, each of which is decoded alone; Blosc chooses about this size."""
SPACELESS_CHUNK_BYTES = 1 << 26
"""Largest number of bytes in a chunk of an array without space."""


def chunk_shape_of(dims: Sequence[tuple[str, str, int]], itemsize: int, wanted: Mapping[str, int]) -> tuple[int, ...]:
    """Return the chunk of an array whose dims are (role, own name, size), given sizes by role or name.

    Levels and space that are not named are whole; of any other dim a chunk has one row. An array without space is one
    chunk, or as many as keep each small.
    """
    whole = [max(n, 1) for _, _, n in dims]
    if any(role in SPATIAL_ROLES for role, _, _ in dims):
        free = [n if role in (*SPATIAL_ROLES, "level") else 1 for (role, _, _), n in zip(dims, whole, strict=True)]
        sizes = [wanted.get(own, wanted.get(role, n)) for (role, own, _), n in zip(dims, free, strict=True)]
        return tuple(min(size, n) for size, n in zip(sizes, whole, strict=True))
    if whole and prod(whole) * itemsize > SPACELESS_CHUNK_BYTES:
        whole[0] = max(1, SPACELESS_CHUNK_BYTES // (prod(whole[1:]) * itemsize))
    return tuple(whole)


def shard_shape_of(
    dims: Sequence[tuple[str, str, int]], itemsize: int, chunks: Sequence[int], most: int = MOST_SHARD_BYTES
) -> tuple[int, ...]:
    """Return the whole chunks along each dim that make a shard of at most `most` bytes: space and levels first, then
    steps.

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


def dims_with_roles(variable: StoreVariable) -> list[tuple[str, str, int]]:
    """Return (role, own name, size) of each dim."""
    return list(zip(variable.roles, variable.table.dims, variable.table.shape, strict=True))


def proposed_table(variable: StoreVariable, chunks: Mapping[str, int], ratio: float) -> ArrayTable:
    """Return the array in chunks of these sizes; each is stored in `ratio` of its decoded bytes."""
    table = variable.table
    shape = chunk_shape_of(dims_with_roles(variable), table.grid.itemsize, chunks)
    stored = max(1, int(prod(shape) * table.grid.itemsize * ratio))
    decoder = CodecDecoder(np.dtype(table.dtype), tuple(range(table.grid.ndim)), "blosc")
    places = FilelessPlaces("a store that is not written yet", stored)
    return _ProposedTable(
        name=table.name,
        shape=table.shape,
        dims=table.dims,
        dtype=table.dtype,
        chunks=shape,
        attrs={},
        decoder=decoder,
        places=places,
    )


class _ProposedTable(ArrayTable):
    """An array whose chunks are nowhere: its finder makes them up."""

    def make_finder(self) -> ChunkFinder:
        return _ProposedFinder(self.name, self.grid, self.places, self.decoder, self.slices)


class _ProposedFinder(ChunkFinder):
    """Parts of chunks are those blocks of equal size that the rows touch."""

    def portion_key(self, index: ChunkIndex, ref: ChunkRef | None) -> Hashable:
        return "proposed", self.grid.itemsize, self.stored_bytes(index)

    def portion(self, index: ChunkIndex, rects: Sequence[ChunkRows]) -> ChunkPortion | None:
        grid, size = self.grid, self.grid.bytes_of(index)
        if size < SMALLEST_DIVIDED_CHUNK or portion.needed_share(rects, grid.chunks) > portion.MOST_PORTION_SHARE:
            return None
        spans = portion.needed_byte_spans(rects, grid.chunks, range(grid.ndim), grid.itemsize, BLOSC_BLOCK_BYTES)
        blocks: set[Any] = {
            b for a, z in spans.tolist() for b in range(a // BLOSC_BLOCK_BYTES, -(-z // BLOSC_BLOCK_BYTES))
        }
        decoded = min(size, len(blocks) * BLOSC_BLOCK_BYTES)
        if decoded > portion.MOST_PORTION_SHARE * size:
            return None
        stored = self.stored_bytes(index) * decoded // size
        return ChunkPortion(((0, stored),), ((0, decoded),), decoded=decoded)
