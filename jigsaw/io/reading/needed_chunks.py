"""Which chunks each rank needs for a sample, and which rows of them: by the request and the arrays' grids alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from jigsaw.io.chunks.chunk_grid import ChunkGrid, ChunkIndex, ChunkRows
from jigsaw.io.reading.chunk_boxes import ChunkBox, PartGeometry
from jigsaw.io.reading.chunk_jobs import ReaderRanks
from jigsaw.io.series.request import ReadRequest


class NeededChunks:
    """The chunks that the ranks of a request need.

    `readers` has for each array its chunks in C order, and the ranks that need each; `geometries` the geometry of each
    of its parts, and that of the rows beyond a pole.
    """

    def __init__(self, request: ReadRequest, grids: Mapping[str, ChunkGrid]) -> None:
        self.request, self.grids, self.ranks = request, grids, request.layout.ranks
        self.geometries: dict[str, list[PartGeometry]] = {}
        both = (False, True) if any(b.rule == "pole" for b in request.boundary) else (False,)
        for number, part in enumerate(request.parts):
            made = [PartGeometry(number, part, grids[part.array], request, turned) for turned in both]
            self.geometries.setdefault(part.array, []).extend(made)
        self.readers = {name: self._readers_of(name) for name in self.geometries}
        self._taken: dict[tuple[str, ChunkIndex, int], tuple[ChunkBox, ...]] = {}

    def _readers_of(self, name: str) -> dict[ChunkIndex, list[int]]:
        found: dict[ChunkIndex, list[int]] = {}
        for member in range(self.ranks):
            needed = [chunk for each in self.geometries[name] for chunk in each.chunks(member)]
            # one geometry names a chunk once, of the product of its dims; two, such as of two levels, may name one each
            for chunk in needed if len(self.geometries[name]) == 1 else dict.fromkeys(needed):
                found.setdefault(chunk, []).append(member)
        # sorted, because ranks meet chunks in an order of their own, and the plan's order must be everybody's
        return {chunk: found[chunk] for chunk in sorted(found)}

    def owns(self, array: str, chunk: ChunkIndex, member: int) -> bool:
        return any(each.owns(chunk, member) for each in self.geometries[array])

    def takes_more(self, share: float, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> bool:
        """Whether one box alone takes more than this share of a chunk."""
        return any(each.share(chunk, m) > share for each in self.geometries[array] for m in readers)

    def boxes(self, array: str, chunk: ChunkIndex, member: int) -> tuple[ChunkBox, ...]:
        """What a rank takes of a chunk: a box a part, and one of its rows beyond a pole."""
        key = array, chunk, member
        if key not in self._taken:
            found = (each.box(chunk, member) for each in self.geometries[array])
            self._taken[key] = tuple(box for box in found if box is not None)
        return self._taken[key]

    def box_bytes(self, array: str, chunk: ChunkIndex, member: int) -> int:
        return sum(prod(box.extents) for box in self.boxes(array, chunk, member)) * self.grids[array].itemsize

    def rects(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> list[ChunkRows]:
        return [box.rect for m in readers for box in self.boxes(array, chunk, m)]
