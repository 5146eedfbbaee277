"""A request of joined arrays as one of the arrays that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jigsaw.io.chunks.joined_arrays import JoinedArrays
from jigsaw.io.series.request import ReadPart, ReadRequest


def split_joined_parts(request: ReadRequest, joined_arrays: Callable[[str], JoinedArrays | None]) -> ReadRequest:
    """The request with each part that asks for a joined array as parts that ask for those it is made of: they differ in
    dtype, chunks, scale and offset as their files do.
    """
    found = [(part, joined_arrays(part.array)) for part in request.parts]
    if not any(joined for _, joined in found):
        return request
    parts = [each for part, joined in found for each in (_parts_by_array(part, joined) if joined else [part])]
    return replace(request, parts=tuple(parts))


def _parts_by_array(part: ReadPart, joined: JoinedArrays) -> list[ReadPart]:
    """A part as one for each of the joined arrays that it needs."""
    picks = part.picks[joined.dim]
    assert picks is not None
    found: dict[int, list[tuple[int, int]]] = {}
    for source, target in picks:
        number = joined.find(source)
        found.setdefault(number, []).append((source - joined.edges[number], target))
    before, after = part.picks[: joined.dim], part.picks[joined.dim + 1 :]
    return [
        replace(part, array=joined.names[i], picks=(*before, tuple(pairs), *after))
        for i, pairs in sorted(found.items())
    ]
