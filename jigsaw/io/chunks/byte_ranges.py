"""Intervals (start, stop) of bytes or rows, merged into as few as cover them: for example requests for some bytes.

`jigsaw.io.chunks.portion.join_spans` does the same with arrays of them.
"""

from __future__ import annotations

from collections.abc import Iterable

ByteRange = tuple[int, int]
"""(start, stop) of an object's bytes."""


def merge_ranges(parts: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Return the intervals in rising order, with those that overlap, touch or lie at most `gap` apart as one."""
    made: list[ByteRange] = []
    for start, stop in sorted(parts):
        if made and start <= made[-1][1] + gap:
            made[-1] = made[-1][0], max(stop, made[-1][1])
        else:
            made.append((start, stop))
    return made
