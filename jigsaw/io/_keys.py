"""The objects of any store that zarr can read: in memory, zipped, through fsspec, of Icechunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from jigsaw.io._codecs import Bytes, ShortChunkError
from jigsaw.io._files import Room, Target


class Keys:
    """A zarr store as `Files`: what it has at a key, through its own `get`."""

    far = True
    gap = 1 << 16

    def __init__(self, store: Any) -> None:
        self._store = store

    def size(self, path: str) -> int | None:
        """The length of an object in bytes; None when it is missing."""
        try:
            return int(sync(self._store.getsize(path)))
        except FileNotFoundError:
            return None

    def whole(self, path: str, room: Room) -> Bytes | None:
        """All bytes of an object."""
        found: Any = sync(self._store.get(path, default_buffer_prototype()))
        return None if found is None else np.frombuffer(found.to_bytes(), np.uint8)

    def ranges(self, path: str, targets: Sequence[Target]) -> bool:
        """Fill every target, in one request each; False when the object is missing.

        Raises: `ShortChunkError` when the object ends before.
        """
        wanted = [(path, RangeByteRequest(offset, offset + memory.size)) for offset, memory in targets]
        found: list[Any] = sync(self._all(wanted))
        for (offset, memory), got in zip(targets, found, strict=True):
            if got is None:
                return False
            raw = np.frombuffer(got.to_bytes(), np.uint8)
            if raw.size != memory.size:
                raise ShortChunkError(f"it should have {memory.size} bytes at {offset} and gave {raw.size}")
            memory[:] = raw
        return True

    async def _all(self, wanted: list[tuple[str, RangeByteRequest]]) -> list[Any]:
        from asyncio import gather

        return await gather(*(self._store.get(key, default_buffer_prototype(), part) for key, part in wanted))
