"""Which chunks each rank needs for a sample, and which rows of them: by the request and the arrays' grids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from jigsaw.io.chunks.chunk_grid import ChunkGrid, ChunkIndex, ChunkRows
from jigsaw.io.reading.chunk_boxes import ChunkBox, PartGeometry, part_geometries
from jigsaw.io.reading.chunk_jobs import ReaderRanks
from jigsaw.io.series.request import ReadRequest


class NeededChunks:
    """The chunks that the ranks of a request need.

    `readers` has for each array its chunks in C order, and the ranks that need each.
    """

    def __init__(self, request: ReadRequest, grids: Mapping[str, ChunkGrid]) -> None:
        self.request, self.grids, self.ranks = request, grids, request.layout.ranks
        self._geometry: dict[str, list[PartGeometry]] = {}
        for number, part in enumerate(request.parts):
            made = part_geometries(number, part, grids[part.array], request)
            self._geometry.setdefault(part.array, []).extend(made)
        self.readers = {name: self._readers_of(name) for name in self._geometry}
        self._taken: dict[tuple[str, ChunkIndex, int], tuple[ChunkBox, ...]] = {}

    def _readers_of(self, name: str) -> dict[ChunkIndex, list[int]]:
        found: dict[ChunkIndex, list[int]] = {}
        for member in range(self.ranks):
            needed = [chunk for each in self._geometry[name] for chunk in each.chunks(member)]
            for chunk in needed if len(self._geometry[name]) == 1 else dict.fromkeys(needed):
                found.setdefault(chunk, []).append(member)
        return {chunk: found[chunk] for chunk in sorted(found)}

    def geometry(self, array: str) -> Sequence[PartGeometry]:
        """Which chunks of an array ranks need: one a part, and one of its rows beyond a pole."""
        return self._geometry[array]

    def owns(self, array: str, chunk: ChunkIndex, member: int) -> bool:
        """Whether a rank owns rows of a chunk, rather than only holding some as its halo."""
        return any(each.owns(chunk, member) for each in self._geometry[array])

    def takes_more(self, share: float, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> bool:
        """Whether one box alone takes more than this share of a chunk."""
        return any(each.share(chunk, m) > share for each in self._geometry[array] for m in readers)

    def boxes(self, array: str, chunk: ChunkIndex, member: int) -> tuple[ChunkBox, ...]:
        """What a rank takes of a chunk: a box a part, and one of its rows beyond a pole."""
        key = array, chunk, member
        if key not in self._taken:
            found = (each.box(chunk, member) for each in self._geometry[array])
            self._taken[key] = tuple(box for box in found if box is not None)
        return self._taken[key]

    def box_bytes(self, array: str, chunk: ChunkIndex, member: int) -> int:
        """The bytes of those boxes, in the stored dtype."""
        return sum(prod(box.extents) for box in self.boxes(array, chunk, member)) * self.grids[array].itemsize

    def rects(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> list[ChunkRows]:
        """The rows of a chunk that these ranks take."""
        return [box.rect for m in readers for box in self.boxes(array, chunk, m)]
