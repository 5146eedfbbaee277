"""Reads that zarr itself makes of a remote store, retried like `RemoteFiles`: metadata, coordinates, odd codecs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest
from zarr.storage import ObjectStore

from jigsaw.io.chunks.files import ByteArray, fresh_memory
from jigsaw.io.chunks.remote_files import RemoteFiles


class ZarrMetadataStore(ObjectStore[Any]):
    """Zarr's store over obstore, reading through `files`."""

    def __init__(self, files: RemoteFiles) -> None:
        super().__init__(files.store, read_only=True)
        self.files = files

    def with_read_only(self, read_only: bool = False) -> ZarrMetadataStore:
        return self

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        raw = await asyncio.to_thread(self._read, key, byte_range)
        return None if raw is None else prototype.buffer.from_bytes(raw.tobytes())

    def _read(self, key: str, part: ByteRequest | None) -> ByteArray | None:
        if part is None:
            return self.files.whole(key, fresh_memory)
        if isinstance(part, RangeByteRequest):
            raw = fresh_memory(part.end - part.start)
            return raw if self.files.ranges(key, [(part.start, raw)]) else None
        if isinstance(part, OffsetByteRequest):
            whole = self.files.whole(key, fresh_memory)
            return None if whole is None else whole[part.offset :]
        found = self.files.edge(key, part.suffix, at_end=True)
        return None if found is None else found[0]

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self.files.size, key) is not None

    async def getsize(self, key: str) -> int:
        size = await asyncio.to_thread(self.files.size, key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def list_dir(self, prefix: str) -> AsyncGenerator[str, None]:
        for name in await asyncio.to_thread(self.files.names, prefix):
            yield name
