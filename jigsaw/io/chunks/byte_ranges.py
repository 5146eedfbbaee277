"""Byte ranges of an object, and the requests that cover them."""

from __future__ import annotations

from collections.abc import Iterable

ByteRange = tuple[int, int]
"""(start, stop) of an object's bytes."""


def merge_ranges(parts: Iterable[ByteRange], gap: int) -> list[ByteRange]:
    """The requests that cover these parts: those at most `gap` bytes apart as one, in rising order."""
    made: list[ByteRange] = []
    for start, stop in sorted(parts):
        if made and start <= made[-1][1] + gap:
            made[-1] = made[-1][0], max(stop, made[-1][1])
        else:
            made.append((start, stop))
    return made
