"""Which chunks each rank needs for a sample, and which rows of them: by the request and the arrays' grids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from jigsaw.io.chunks.chunk_grid import ChunkGrid, ChunkIndex
from jigsaw.io.reading.chunk_boxes import ChunkBox, DimPieces, PartGeometry, boundary_rows
from jigsaw.io.reading.chunk_readers import ChunkReaders, DimShares, PartShares, readers_of_chunk
from jigsaw.io.series.request import ReadRequest

ReadersByChunk = Mapping[ChunkIndex, ChunkReaders]
_PartDims = tuple[tuple[DimPieces, ...], tuple[DimShares, ...]]


class NeededChunks:
    """The chunks that the ranks of a request need.

    `readers` has for each array its chunks in C order, and the ranks that need each; `geometries` the geometry of each
    of its parts, and that of the rows beyond a pole.
    """

    def __init__(self, request: ReadRequest, grids: Mapping[str, ChunkGrid]) -> None:
        self.request, self.grids, self.ranks = request, grids, request.layout.ranks
        self.geometries: dict[str, list[PartGeometry]] = {}
        both = (False, True) if any(b.rule == "pole" for b in request.boundary) else (False,)
        ways = [boundary_rows(request, turned) for turned in both]
        for number, part in enumerate(request.parts):
            made = [PartGeometry(number, part, grids[part.array], request, way) for way in ways]
            self.geometries.setdefault(part.array, []).extend(made)
        # one mapping for all arrays whose parts take the same rows
        alike = {name: tuple((each.dims, each.fixed) for each in parts) for name, parts in self.geometries.items()}
        made = {parts: _readers_by_chunk(parts) for parts in set(alike.values())}
        self.readers: dict[str, ReadersByChunk] = {name: made[parts] for name, parts in alike.items()}
        self._taken: dict[tuple[str, ChunkIndex, int], tuple[ChunkBox, ...]] = {}

    def chunks(self, array: str, member: int) -> list[ChunkIndex]:
        """The chunks of an array that a rank needs, in C order."""
        # two geometries, such as of two levels, may name a chunk each; a rolled dim ends with its first chunk
        return sorted({chunk for each in self.geometries[array] for chunk in each.chunks(member)})

    def boxes(self, array: str, chunk: ChunkIndex, member: int) -> tuple[ChunkBox, ...]:
        """What a rank takes of a chunk: a box a part, and one of its rows beyond a pole."""
        key = array, chunk, member
        if key not in self._taken:
            found = (each.box(chunk, member) for each in self.geometries[array])
            self._taken[key] = tuple(box for box in found if box is not None)
        return self._taken[key]

    def box_bytes(self, array: str, chunk: ChunkIndex, member: int) -> int:
        return sum(prod(box.extents) for box in self.boxes(array, chunk, member)) * self.grids[array].itemsize


def _readers_by_chunk(parts: Sequence[_PartDims]) -> ReadersByChunk:
    """The chunks of which parts take rows, in C order, and who needs them."""
    found: dict[ChunkIndex, list[PartShares]] = {}
    for dims, fixed in parts:
        for along in product(*(dim.shares.items() for dim in dims)):
            chunk, shares = zip(*along, strict=True)
            found.setdefault(chunk, []).append(PartShares(shares, fixed))
    every = {chunk: readers_of_chunk(tuple(found[chunk])) for chunk in sorted(found)}
    return {chunk: readers for chunk, readers in every.items() if readers.ranks}
