"""Memory for samples, used again once the sample in it is gone.

Fresh memory costs as much as the copy into it: the kernel clears every page first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.chunks.files import fresh_memory

_PATIENCE_S, _PAUSE_S = 0.02, 5e-4


def _pinned_memory(size: int) -> NDArray[np.uint8]:
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


class _MemoryLease:
    """Owner of an array's memory: numpy and torch views keep it alive, and its end gives the memory back."""

    def __init__(self, memory: NDArray[np.uint8], home: MemoryPool) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._home = memory, home

    def __del__(self) -> None:
        self._home.take_back(id(self), self._memory)


class MemoryPool:
    """Uninitialized arrays whose memory is used again; at most `kept` pieces lie idle.

    While that many are in use, a new array waits a moment for one that is about to come back: a loop lets go of its
    last batch only once it has the next. `pinned` memory is locked in place, so that a GPU copies from it while it
    computes.
    """

    def __init__(self, kept: int = 4, pinned: bool = False) -> None:
        self._fresh = _pinned_memory if pinned else fresh_memory
        self._lent: set[int] = set()
        self._idle: deque[NDArray[np.uint8]] = deque()
        self.keep(kept)

    def keep(self, pieces: int) -> None:
        self._idle = deque(self._idle, maxlen=pieces)
        self._most = pieces

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array; its memory returns when its last view is gone."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        lease = _MemoryLease(self._find(size), self)
        self._lent.add(id(lease))
        return np.asarray(lease).view(dtype).reshape(shape)

    def take_back(self, lease: int, memory: NDArray[np.uint8]) -> None:
        """Take back the memory of a lease that ends, in any thread, at any moment, by atomic steps alone."""
        # No lock: a lease may end in the midst of `_find`, in this very thread, whenever Python collects garbage.
        self._lent.discard(lease)
        self._idle.append(memory)

    def _find(self, size: int) -> NDArray[np.uint8]:
        until = time.monotonic() + _PATIENCE_S
        while (memory := self._pick(size)) is None:
            if len(self._lent) + len(self._idle) < self._most:
                return self._fresh(size)
            if self._idle:  # of another size, from before the batch size or the rollout changed
                self._pick(None)
            elif time.monotonic() < until:
                time.sleep(_PAUSE_S)
            else:
                self._most *= 2  # holding so many pieces is intended
        return memory

    def _pick(self, size: int | None) -> NDArray[np.uint8] | None:
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread was faster
                return None
            if size in (None, memory.size):
                return memory
            self._idle.append(memory)
        return None
