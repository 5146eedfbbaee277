"""Zarr stores that a conversion reads through xarray, watched for missing chunks.

Zarr silently reads fill values for them. Here they are an error, or counted, by the same evidence as in
`jigsaw.io.open`: an absent object of an array whose metadata exist.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from math import prod
from typing import Any

import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.buffer import default_buffer_prototype

from jigsaw.io.chunks.chunk_finder import missing_chunk_error, vanished_array_error
from jigsaw.io.formats.zarr_reach import ReadThroughStore

_METADATA_NAMES = {"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"}


class WatchedStore(ReadThroughStore[Store]):
    """Zarr store whose missing chunks are errors, except for `filled_arrays`, where they are counted.

    A single value may be missing: Zarr leaves out one that is the fill value.
    """

    def __init__(self, store: Store, arrays: Mapping[str, tuple[str, int]]) -> None:
        super().__init__(store)
        self.arrays = arrays
        self.filled_arrays: frozenset[str] = frozenset()
        self._filled: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, store: Store, arrays: Mapping[str, zarr.Array[Any]]) -> WatchedStore:
        """Watch a store; `arrays` are its arrays by path."""
        kinds = {2: ".zarray", 3: "zarr.json"}
        facts = {p: (f"{p}/{kinds[a.metadata.zarr_format]}", prod(a.shape)) for p, a in arrays.items()}
        return cls(store, facts)

    def take_filled(self) -> set[str]:
        """Return the keys of the chunks that were read as fill values in this process since the last call."""
        with self._lock:
            taken, self._filled = self._filled, set()
        return taken

    def __getstate__(self) -> tuple[Any, ...]:
        return self.inner, self.arrays, self.filled_arrays

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        store, arrays, filled = state
        self.__init__(store, arrays)
        self.filled_arrays = filled

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        answer = await self.inner.get(key, prototype, byte_range)
        if answer is None and key.rpartition("/")[2] not in _METADATA_NAMES:
            await self._account_for(key)
        return answer

    async def _account_for(self, key: str) -> None:
        """Raise `MissingArrayError` or `MissingChunkError` for a chunk that is not read as fill values."""
        parts = key.split("/")
        name = next((p for n in range(len(parts), 0, -1) if (p := "/".join(parts[:n])) in self.arrays), None)
        if name is None:
            return
        metadata, count = self.arrays[name]
        if await self.inner.get(metadata, default_buffer_prototype()) is None:
            raise vanished_array_error(name, metadata)
        if name not in self.filled_arrays and count > 1:
            raise missing_chunk_error(key[len(name) + 1 :], name, key)
        with self._lock:
            self._filled.add(key)
