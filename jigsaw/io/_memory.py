"""Memory for samples, used again once nobody holds the sample that lay in it.

Fresh memory costs as much as the copy into it: the kernel clears every page first.
"""

from __future__ import annotations

import threading
import time
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


_PATIENCE_S, _PAUSE_S = 0.02, 5e-4


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

    def __init__(self, memory: NDArray[np.uint8], home: Memory) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._home = memory, home

    def __del__(self) -> None:
        self._home.take_back(id(self), self._memory)


class Memory:
    """Uninitialised arrays whose memory is used again; at most `kept` pieces lie idle.

    While so many are in use, a new one waits a moment for one that is about to come back: a loop lets go of its last
    batch only once it has the next.  `pinned` memory is locked in place, so that a GPU copies from it while it
    computes.
    """

    def __init__(self, kept: int = 4, pinned: bool = False) -> None:
        self._fresh = _pinned if pinned else fresh
        self._lent: set[int] = set()
        self._idle: deque[NDArray[np.uint8]] = deque()
        self.keep(kept)

    def keep(self, pieces: int) -> None:
        """Let so many lie idle from now on."""
        self._idle = deque(self._idle, maxlen=pieces)
        self._most = pieces

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of any contents; its memory returns when the last view of it is gone."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        lease = _Lease(self._find(size), self)
        self._lent.add(id(lease))
        return np.asarray(lease).view(dtype).reshape(shape)

    def take_back(self, lease: int, memory: NDArray[np.uint8]) -> None:
        """What a lease ends with, in any thread and at any moment: each step is one that Python does whole."""
        self._lent.discard(lease)
        self._idle.append(memory)

    def _find(self, size: int) -> NDArray[np.uint8]:
        until = time.monotonic() + _PATIENCE_S
        while (memory := self._pick(size)) is None:
            if len(self._lent) + len(self._idle) < self._most:
                return self._fresh(size)
            if self._idle:
                self._pick(None)
            elif time.monotonic() < until:
                time.sleep(_PAUSE_S)
            else:
                self._most *= 2  # whoever holds so many means to
        return memory

    def _pick(self, size: int | None) -> NDArray[np.uint8] | None:
        """An idle piece of this size, or the one that is idle for longest."""
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread was faster
                return None
            if size in (None, memory.size):
                return memory
            self._idle.append(memory)
        return None
