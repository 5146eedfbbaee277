"""Object of any `StoreFiles` as a seekable file that libraries open: read in blocks, with the last blocks kept."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np

from jigsaw.io.chunks.files import ByteArray, ShortChunkError, StoreFiles, fresh_memory

SEEKABLE_BLOCK_BYTES = 1 << 18
_SEEKABLE_BLOCKS_KEPT = 64


class SeekableObject(io.RawIOBase):
    """One object as a read-only file; reads fetch whole blocks of `SEEKABLE_BLOCK_BYTES` bytes, and those that lie
    together at once.
    """

    def __init__(self, files: StoreFiles, path: str) -> None:
        size = files.size(path)
        if size is None:
            raise FileNotFoundError(path)
        self._files, self._path, self._size, self._at = files, path, size, 0
        self._blocks: OrderedDict[int, ByteArray] = OrderedDict()

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
        out = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        stop = min(self._at + out.size, self._size)
        if stop <= self._at:
            return 0
        first, last = self._at // SEEKABLE_BLOCK_BYTES, -(-stop // SEEKABLE_BLOCK_BYTES)
        self._fetch([n for n in range(first, last) if n not in self._blocks])
        for n in range(first, last):
            begin = n * SEEKABLE_BLOCK_BYTES
            low, high = max(self._at, begin), min(stop, begin + SEEKABLE_BLOCK_BYTES)
            out[low - self._at : high - self._at] = self._blocks[n][low - begin : high - begin]
        done, self._at = stop - self._at, stop
        while len(self._blocks) > _SEEKABLE_BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return done

    def _fetch(self, missing: list[int]) -> None:
        targets = [
            (n * SEEKABLE_BLOCK_BYTES, fresh_memory(min(SEEKABLE_BLOCK_BYTES, self._size - n * SEEKABLE_BLOCK_BYTES)))
            for n in missing
        ]
        try:
            found = not targets or self._files.ranges(self._path, targets)
        except ShortChunkError as e:
            raise OSError(f"{self._path}: {e}") from e
        if not found:
            raise FileNotFoundError(self._path)
        self._blocks.update(zip(missing, (memory for _, memory in targets), strict=True))
