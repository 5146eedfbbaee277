"""Objects of any store that zarr can read: in memory, zipped, through fsspec, of Icechunk; a remote store for zarr."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.storage import MemoryStore, ObjectStore, ZipStore

from jigsaw.errors import ReadError, cause_without_secrets
from jigsaw.io.chunks.files import (
    BadChunkError,
    ByteAllocator,
    ByteArray,
    FillTarget,
    ObjectIdentity,
    ShortChunkError,
    check_object_size,
    fill_targets,
    fresh_memory,
    merge_ranges,
)
from jigsaw.io.chunks.remote_files import RemoteFiles
from jigsaw.io.formats.zarr_reach import BoundedReferences


class ZarrKeyFiles:
    """A zarr store as `StoreFiles`: what it has at a key, through its own `get`."""

    far = True
    gap = 1 << 16

    def __init__(self, store: Any) -> None:
        self._store = store

    def identity(self, path: str) -> ObjectIdentity | None:
        """Return the identity of an object; None where its store lacks a lasting name."""
        return ObjectIdentity(f"{self._place}/{path}") if self._place else None

    @cached_property
    def _place(self) -> str:
        return _lasting_store_name(self._store)

    @cached_property
    def knows_its_keys(self) -> bool:
        """True where the store lists its objects, so that a key that it lacks was never written: an Icechunk snapshot,
        a zip file, references.
        """
        return self._is_snapshot or isinstance(self._store, ZipStore | BoundedReferences)

    @cached_property
    def _is_snapshot(self) -> bool:
        """True for a session of Icechunk."""
        return getattr(self._store, "session", None) is not None

    def size(self, path: str) -> int | None:
        try:
            return int(_answer_of_store(self._store.getsize(path)))
        except FileNotFoundError:
            return None

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None:
        part = None
        if most is not None and self._is_snapshot:  # it knows sizes, and refuses a part beyond the end
            check_object_size(self.size(path) or 0, most)
        elif most is not None:
            part = RangeByteRequest(0, most + 1)
        found: Any = _answer_of_store(self._store.get(path, default_buffer_prototype(), part))
        if found is None:
            return None
        raw = np.frombuffer(found.to_bytes(), np.uint8)
        check_object_size(raw.size, most)
        return raw

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        parts = merge_ranges(((offset, offset + memory.size) for offset, memory in targets), self.gap)
        got: list[Any] = _answer_of_store(self._all([(path, RangeByteRequest(*part)) for part in parts]))
        found = [None if each is None else np.frombuffer(each.to_bytes(), np.uint8) for each in got]
        for (start, stop), raw in zip(parts, found, strict=True):
            if raw is not None and raw.size != stop - start:
                raise ShortChunkError(f"it should have {stop - start} bytes at {start} and gave {raw.size}")
        return fill_targets(targets, parts, found)

    async def _all(self, wanted: list[tuple[str, RangeByteRequest]]) -> list[Any]:
        return await asyncio.gather(*(self._store.get(key, default_buffer_prototype(), part) for key, part in wanted))


def _lasting_store_name(store: Any) -> str:
    """Return what distinguishes a store from all others: the snapshot of a read-only Icechunk session, or the arguments
    of an fsspec file system; "" for stores without either, such as one in memory.
    """
    if isinstance(store, BoundedReferences):
        store = store.inner
    session, system = getattr(store, "session", None), getattr(store, "fs", None)
    if session is not None:
        return f"icechunk {session.snapshot_id}" if session.read_only else ""
    try:
        made = "" if system is None else f"{system.to_json()} {store.path}"
    except (TypeError, ValueError):  # made from something that is not text
        return ""
    return made and f"fsspec {blake2b(made.encode()).hexdigest()}"  # references may be long


def _answer_of_store(asked: Coroutine[Any, Any, Any]) -> Any:
    """Return the store's answer; a user's store may raise anything, as a zip file does for a damaged member."""
    try:
        return asyncio.run_coroutine_threadsafe(asked, _loop_of_zarr(os.getpid())).result()
    except (OSError, ReadError):
        raise
    except Exception as e:
        raise BadChunkError(f"its store says: {e}") from cause_without_secrets(e)


@lru_cache(maxsize=16)
def _loop_of_zarr(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop in which zarr has opened a store, and to which the store's connections belong from then on.

    Zarr does not publish it, so a store of ours is read in it. A forked process has its own loop.
    """
    loops: list[asyncio.AbstractEventLoop] = []

    class Asked(MemoryStore):
        async def get(self, *args: Any, **kwargs: Any) -> Any:
            loops.append(asyncio.get_running_loop())
            return await super().get(*args, **kwargs)

    with suppress(FileNotFoundError):  # it does not hold a group
        zarr.open_group(Asked(), mode="r")
    return loops[0]


class ZarrMetadataStore(ObjectStore[Any]):
    """Zarr's store over obstore: what zarr itself reads (metadata, coordinates) is retried as by `files`."""

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
