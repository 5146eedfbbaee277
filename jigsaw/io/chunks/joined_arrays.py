"""Array that is stored as several, one after another along a dim, and the rows that each has. Integers only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from jigsaw.geometry.cut import Box, Interval


@dataclass(frozen=True)
class JoinedArrays:
    """The arrays that one is made of: their names among a store's tables, and as `edges` the rows of `dim` where each
    begins, then the number of all rows.
    """

    dim: int
    names: tuple[str, ...]
    edges: tuple[int, ...]

    def find(self, row: int) -> int:
        """Return the number of the array that has a row of the whole."""
        return bisect_right(self.edges, row) - 1

    def inside(self, rows: Interval) -> Iterator[tuple[int, Interval]]:
        """Yield the arrays that have some of `rows`, by number, and the rows that each has."""
        if rows[0] < rows[1]:
            for i in range(self.find(rows[0]), self.find(rows[1] - 1) + 1):
                yield i, (max(rows[0], self.edges[i]), min(rows[1], self.edges[i + 1]))

    def local(self, box: Box, number: int, rows: Interval) -> Box:
        """Return a box of the whole in the coordinates of the array `number`, of which it takes `rows`."""
        start = self.edges[number]
        return (*box[: self.dim], (rows[0] - start, rows[1] - start), *box[self.dim + 1 :])
