"""Intervals (start, stop) of bytes or rows, as few of them as cover some: the requests that fetch some bytes, say.

`jigsaw.io.chunks.portion.join_spans` does the same with arrays of them.
"""

from __future__ import annotations

from collections.abc import Iterable

ByteRange = tuple[int, int]
"""(start, stop) of an object's bytes."""


def merge_ranges(parts: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """The intervals in rising order, those that overlap, touch or lie at most `gap` apart as one."""
    made: list[ByteRange] = []
    for start, stop in sorted(parts):
        if made and start <= made[-1][1] + gap:
            made[-1] = made[-1][0], max(stop, made[-1][1])
        else:
            made.append((start, stop))
    return made
