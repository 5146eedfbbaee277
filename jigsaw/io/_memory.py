"""Memory for samples, used again once nobody holds the sample that lay in it.

Fresh memory costs as much as the copy into it: the kernel clears every page first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.errors import ReadError

_GRAIN = 1 << 20
"""Bytes that scratch memory grows by: sizes that differ by little would leave holes in the heap."""

_LINE = 64
"""Bytes of a cache line: arithmetic on memory that begins amid one takes a tenth longer."""


class Scratch(threading.local):
    """Memory of each thread that the next call overwrites."""

    def __init__(self) -> None:
        self._room = fresh(0)

    def __call__(self, size: int) -> NDArray[np.uint8]:
        if self._room.size < size:
            self._room = fresh(0)  # given back before there is more
            self._room = fresh(-(-size // _GRAIN) * _GRAIN)
        return self._room[:size]


def fresh(size: int) -> NDArray[np.uint8]:
    """Uninitialised memory of its own, that begins where a cache line does.

    Raises: `ReadError` when there is not so much.
    """
    try:
        room = np.empty(size + _LINE - 1, np.uint8)
        start = -room.ctypes.data % _LINE
        return room[start : start + size]
    except (MemoryError, ValueError) as e:  # ValueError: beyond what has an address
        raise ReadError(f"there is no memory for {size} bytes; use smaller chunks, or the store's metadata lies") from e


def _pinned(size: int) -> NDArray[np.uint8]:
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


class _Lease:
    """What an array's memory belongs to; numpy and torch views keep it, and its end gives the memory back."""

    def __init__(self, memory: NDArray[np.uint8], home: deque[NDArray[np.uint8]]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._home = memory, home

    def __del__(self) -> None:
        self._home.append(self._memory)


class Memory:
    """Uninitialised arrays whose memory is used again; at most `kept` pieces lie idle.

    `pinned` memory is locked in place, so that a GPU copies from it while it computes.
    """

    def __init__(self, kept: int = 4, pinned: bool = False) -> None:
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=kept)
        self._fresh = _pinned if pinned else fresh

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of any contents; its memory returns when the last view of it is gone."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        return np.asarray(_Lease(self._find(size), self._idle)).view(dtype).reshape(shape)

    def _find(self, size: int) -> NDArray[np.uint8]:
        while True:
            try:
                memory = self._idle.popleft()
            except IndexError:
                return self._fresh(size)
            if memory.size == size:
                return memory  # others were for samples of another size
