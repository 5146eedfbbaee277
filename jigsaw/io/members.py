"""An array that is stored as several, one after another along a dim: which of them has which rows.  Integers only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jigsaw.io.request import Part, Request
from jigsaw.layout import Box, Interval

if TYPE_CHECKING:
    from jigsaw.io.table import ArrayTable


@dataclass(frozen=True)
class Members:
    """The arrays that one is made of: their names among a store's tables, and the rows of `dim` where each begins, and
    the end.
    """

    dim: int
    names: tuple[str, ...]
    edges: tuple[int, ...]

    def find(self, row: int) -> int:
        """The member that has a row."""
        return bisect_right(self.edges, row) - 1

    def inside(self, rows: Interval) -> Iterator[tuple[int, Interval]]:
        """The members that have some of `rows`, and which of those."""
        if rows[0] < rows[1]:
            for i in range(self.find(rows[0]), self.find(rows[1] - 1) + 1):
                yield i, (max(rows[0], self.edges[i]), min(rows[1], self.edges[i + 1]))

    def split(self, part: Part) -> list[Part]:
        """A part as one for each member that it needs."""
        picks = part.picks[self.dim]
        assert picks is not None
        found: dict[int, list[tuple[int, int]]] = {}
        for source, target in picks:
            member = self.find(source)
            found.setdefault(member, []).append((source - self.edges[member], target))
        before, after = part.picks[: self.dim], part.picks[self.dim + 1 :]
        return [
            replace(part, array=self.names[i], picks=(*before, tuple(pairs), *after))
            for i, pairs in sorted(found.items())
        ]

    def local(self, box: Box, member: int, rows: Interval) -> Box:
        """A box of the whole as one of a member, of which it takes `rows`."""
        start = self.edges[member]
        return (*box[: self.dim], (rows[0] - start, rows[1] - start), *box[self.dim + 1 :])


def by_member(request: Request, tables: Mapping[str, ArrayTable]) -> Request:
    """The request with each part that asks for an array of several as parts that ask for these: they differ in dtype,
    chunks, scale and offset as their files do.
    """
    found = [(part, tables[part.array].members) for part in request.parts]
    if not any(members for _, members in found):
        return request
    parts = [each for part, members in found for each in (members.split(part) if members else [part])]
    return replace(request, parts=tuple(parts))
