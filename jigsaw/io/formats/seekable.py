"""An object of any `Files` as a file that libraries open: seekable, read in blocks, the last blocks kept."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np

from jigsaw.io._memory import fresh
from jigsaw.io.fetch.files import Bytes, Files
from jigsaw.io.formats.codecs import ShortChunkError

BLOCK = 1 << 18
_KEPT = 64


class Seekable(io.RawIOBase):
    """One object as a read-only file; reads fetch whole blocks of `BLOCK` bytes, and those that lie together at once.

    *Raises*: `FileNotFoundError` when there is no such object, `OSError` when it ends before its size.
    """

    def __init__(self, files: Files, path: str) -> None:
        size = files.size(path)
        if size is None:
            raise FileNotFoundError(path)
        self._files, self._path, self._size, self._at = files, path, size, 0
        self._blocks: OrderedDict[int, Bytes] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from here on, as far as the object goes."""
        out = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        stop = min(self._at + out.size, self._size)
        if stop <= self._at:
            return 0
        first, last = self._at // BLOCK, -(-stop // BLOCK)
        self._fetch([n for n in range(first, last) if n not in self._blocks])
        for n in range(first, last):
            low, high = max(self._at, n * BLOCK), min(stop, (n + 1) * BLOCK)
            out[low - self._at : high - self._at] = self._blocks[n][low - n * BLOCK : high - n * BLOCK]
        done, self._at = stop - self._at, stop
        while len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)
        return done

    def _fetch(self, missing: list[int]) -> None:
        targets = [(n * BLOCK, fresh(min(BLOCK, self._size - n * BLOCK))) for n in missing]
        try:
            found = not targets or self._files.ranges(self._path, targets)
        except ShortChunkError as e:
            raise OSError(f"{self._path}: {e}") from e
        if not found:
            raise FileNotFoundError(self._path)
        self._blocks.update(zip(missing, (memory for _, memory in targets), strict=True))
