"""Memory for stored and decoded bytes."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import ReadError

_SCRATCH_GRAIN = 1 << 20
"""Bytes that scratch memory grows by: sizes that differ by little would leave holes in the heap."""

_CACHE_LINE = 64
"""Bytes of a cache line: arithmetic on memory that begins amid one takes a tenth longer."""


class ScratchMemory(threading.local):
    """Memory of each thread that the next call overwrites."""

    def __init__(self) -> None:
        self._room = fresh_memory(0)

    def __call__(self, size: int) -> NDArray[np.uint8]:
        if self._room.size < size:
            self._room = fresh_memory(0)  # given back before there is more
            self._room = fresh_memory(-(-size // _SCRATCH_GRAIN) * _SCRATCH_GRAIN)
        return self._room[:size]


def fresh_memory(size: int) -> NDArray[np.uint8]:
    """Return uninitialized memory that begins at a cache line; a `ReadError` when there is not enough."""
    try:
        room = np.empty(size + _CACHE_LINE - 1, np.uint8)
        start = -room.ctypes.data % _CACHE_LINE
        return room[start : start + size]
    except (MemoryError, ValueError) as e:  # ValueError: beyond what has an address
        raise ReadError(f"there is no memory for {size} bytes; use smaller chunks, or the store's metadata lies") from e
