"""Objects of any store that zarr can read, and places of chunks in them: an object each, or within shards.

Stores are in memory, zipped, of fsspec or Icechunk; `ZarrMetadataStore` is a remote one for zarr itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.codecs import ShardingCodec
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, ZipStore

from jigsaw.errors import CorruptChunkError, FetchError, ReadError, TruncatedError, cause_without_secrets
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkRef
from jigsaw.io.chunks.chunk_finder import LookupCounts, LookupTally
from jigsaw.io.chunks.codecs import CodecDecoder, without_crc
from jigsaw.io.chunks.files import (
    BadChunkError,
    ByteAllocator,
    ByteArray,
    FillTarget,
    ObjectIdentity,
    ShortChunkError,
    StoreFiles,
    check_object_size,
    fill_targets,
    fresh_memory,
    merge_ranges,
)
from jigsaw.io.chunks.remote_files import RemoteFiles
from jigsaw.io.formats.zarr_reach import BoundedReferences

_MISSING_CHUNK = 2**64 - 1
_NAMES_OF_FORMATS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
"""Metadata of which a store may lack some: each format has its own."""
_SHARD_INDICES_KEPT = 128


def _is_in_memory(system: Any) -> bool:
    """Say whether a file system of fsspec, or the one that it wraps, is in memory, where names say nothing."""
    while system is not None:
        protocol: Any = getattr(system, "protocol", ())  # the name of its kind, or several
        if "memory" in ((protocol,) if isinstance(protocol, str) else protocol):
            return True
        system = getattr(system, "sync_fs", None) or getattr(system, "fs", None)
    return False


class ZarrKeyFiles:
    """A zarr store as `StoreFiles`: its objects by key, through its own `get`."""

    far = True
    gap = 1 << 16

    def __init__(self, store: Any) -> None:
        self._store = store

    def identity(self, path: str) -> ObjectIdentity | None:
        """Return the identity of an object; None where its store lacks a lasting name."""
        return ObjectIdentity(f"{self._place}/{path}") if self._place else None

    @cached_property
    def _place(self) -> str:
        """Name that distinguishes a store from all others; "" for stores without one, such as one in memory.

        It is the snapshot of a read-only Icechunk session, or the arguments of an fsspec file system.
        """
        store = self._store
        if isinstance(store, BoundedReferences):
            store = store.inner
        session, system = getattr(store, "session", None), getattr(store, "fs", None)
        if session is not None:
            return f"icechunk {session.snapshot_id}" if session.read_only else ""
        try:
            origin = "" if system is None or _is_in_memory(system) else f"{system.to_json()} {store.path}"
        except (TypeError, ValueError):  # its arguments are not text
            return ""
        return origin and f"fsspec {blake2b(origin.encode()).hexdigest()}"  # a digest, because references may be long

    @cached_property
    def knows_its_keys(self) -> bool:
        """True where the store lists its objects, so that a key that it lacks was never written."""
        return self._is_snapshot or isinstance(self._store, ZipStore | BoundedReferences)

    @cached_property
    def _is_snapshot(self) -> bool:
        return getattr(self._store, "session", None) is not None

    def size(self, path: str) -> int | None:
        try:
            return int(_answer_of_store(self._store.getsize(path)))
        except FileNotFoundError:
            return None

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None:
        part = None
        if most is not None and self._is_snapshot:  # a snapshot knows sizes, and refuses a part beyond the end
            check_object_size(self.size(path) or 0, most)
        elif most is not None:
            part = RangeByteRequest(0, most + 1)
        answer: Any = _answer_of_store(self._part_of(path, part))
        if answer is None:
            return None
        raw = np.frombuffer(answer.to_bytes(), np.uint8)
        check_object_size(raw.size, most)
        return raw

    async def _part_of(self, path: str, part: RangeByteRequest | None) -> Any:
        try:
            return await self._store.get(path, default_buffer_prototype(), part)
        except (ValueError, NotImplementedError):
            # a store that computes its chunks, such as tifffile's, has no ranges; a remote one is never read unbounded
            if part is None or isinstance(self._store, FsspecStore | BoundedReferences):
                raise
            whole = await self._store.get(path, default_buffer_prototype())
            return None if whole is None else whole[part.start : part.end]

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        parts = merge_ranges(((offset, offset + memory.size) for offset, memory in targets), self.gap)
        got: list[Any] = _answer_of_store(self._all([(path, RangeByteRequest(*part)) for part in parts]))
        blocks = [None if each is None else np.frombuffer(each.to_bytes(), np.uint8) for each in got]
        for (start, stop), raw in zip(parts, blocks, strict=True):
            if raw is not None and raw.size != stop - start:
                raise ShortChunkError(f"it should have {stop - start} bytes at {start} and gave {raw.size}")
        return fill_targets(targets, parts, blocks)

    async def _all(self, wanted: list[tuple[str, RangeByteRequest]]) -> list[Any]:
        return await asyncio.gather(*(self._part_of(key, part) for key, part in wanted))


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

    with suppress(FileNotFoundError):  # the store has no group
        zarr.open_group(Asked(), mode="r")
    return loops[0]


class ZarrMetadataStore(ObjectStore[Any]):
    """Zarr's store over obstore: what zarr itself reads (metadata, coordinates) is retried as by `files`."""

    def __init__(self, files: RemoteFiles, prefix: str) -> None:
        super().__init__(files.store, read_only=True)
        self.files = files
        self._root = {f"{prefix}/{name}".lstrip("/") for name in _NAMES_OF_FORMATS}
        self.refusal: FetchError | None = None
        """The first refusal of metadata at the root, of which a store has those of one format alone."""

    def with_read_only(self, read_only: bool = False) -> ZarrMetadataStore:
        return self

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        raw = await asyncio.to_thread(self._read, key, byte_range)
        return None if raw is None else prototype.buffer.from_bytes(raw.tobytes())

    def _read(self, key: str, part: ByteRequest | None) -> ByteArray | None:
        if part is None:
            try:
                return self.files.whole(key, fresh_memory)
            except FetchError as refusal:
                # S3 answers 403 for what is not there to who may not list a bucket
                if not (refusal.is_forbidden and self._is_of_other_format(key)):
                    raise
                self.refusal = self.refusal or refusal
                return None
        if isinstance(part, RangeByteRequest):
            raw = fresh_memory(part.end - part.start)
            return raw if self.files.ranges(key, [(part.start, raw)]) else None
        if isinstance(part, OffsetByteRequest):
            whole = self.files.whole(key, fresh_memory)
            return None if whole is None else whole[part.offset :]
        edge = self.files.edge(key, part.suffix, at_end=True)
        return None if edge is None else edge[0]

    def _is_of_other_format(self, key: str) -> bool:
        """Say whether a store may lack a key of its root. Attributes are lacked by a store of Zarr v3 alone."""
        folder, _, name = key.rpartition("/")
        as_v3 = f"{folder}/zarr.json".lstrip("/")
        return key in self._root or (
            name == ".zattrs" and as_v3 in self._root and self.files.whole(as_v3, fresh_memory) is not None
        )

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


class ObjectPlaces:
    """Places of chunks that are an object each, named by the store's own key encoding."""

    def __init__(self, array: Any, files: StoreFiles) -> None:
        path = f"{array.path}/" if array.path else ""
        self._prefix = f"{array.store.root}/{path}" if isinstance(array.store, LocalStore) else path
        self._metadata = f"{self._prefix}{'.zarray' if array.metadata.zarr_format == 2 else 'zarr.json'}"
        self._key = array.metadata.encode_chunk_key
        self.files = files

    def path(self, index: ChunkIndex) -> str:
        return f"{self._prefix}{self._key(index)}"

    def lacks_object(self, index: ChunkIndex) -> bool:
        """Return True, unless the store itself knows which objects it has, as a snapshot of Icechunk does."""
        return not (isinstance(self.files, ZarrKeyFiles) and self.files.knows_its_keys)

    def lost_metadata(self) -> str | None:
        # from afar they are asked for whole, as a server may answer nothing else; a local file may be held open, gone
        far, name = self.files.far, self._metadata
        answer = self.files.whole(name, fresh_memory) if far else self.files.size(name)
        return name if answer is None else None

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        path = self.path(index)
        if self.files.far:  # to ask for its size costs as much as to fetch it
            return ChunkRef(path, 0, None)
        size = self.files.size(path)
        return None if size is None else ChunkRef(path, 0, size)

    def locate_strip(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]:
        if self.files.far or count == 1:
            return [self.locate((*first[:-1], first[-1] + n)) for n in range(count)]
        # both encodings of keys end with the last number: "c/0/3/12", "0.3.12"
        lead = self.path((*first[:-1], 0))[:-1]
        paths = [f"{lead}{n}" for n in range(first[-1], first[-1] + count)]
        sizes = map(self.files.size, paths)
        return [None if size is None else ChunkRef(path, 0, size) for path, size in zip(paths, sizes, strict=True)]


@dataclass(frozen=True)
class _ShardIndex:
    """A shard's object, its size, and (offset, length) of every inner chunk."""

    path: str
    size: int
    index: list[list[int]]

    def refs(self, first: int, count: int) -> list[ChunkRef | None]:
        """Return where consecutive chunks of the index lie; a damaged place is refused."""
        refs: list[ChunkRef | None] = []
        for offset, length in self.index[first : first + count]:
            if offset == length == _MISSING_CHUNK:
                refs.append(None)
            elif offset + length > self.size:
                raise ShortChunkError(f"the index says {length} bytes at {offset} and the shard has {self.size}")
            else:
                refs.append(ChunkRef(self.path, offset, length))
        return refs


_MISSING_KEPT_S = 10.0  # as long as a missing shard is not asked for again, for a server may have lost it for a moment


class _ReadOnce:
    """A shard's index, read when it is first needed; other threads wait meanwhile, and a failure is not kept."""

    def __init__(self, read: Callable[[], _ShardIndex | None]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._index: _ShardIndex | None = None
        self._missing_since: float | None = None

    @property
    def is_missing(self) -> bool:
        """True where the shard did not exist when it was last asked for."""
        return self._missing_since is not None

    def __call__(self) -> _ShardIndex | None:
        with self._lock:
            if self._index is None and (
                self._missing_since is None or time.monotonic() - self._missing_since > _MISSING_KEPT_S
            ):
                self._index = self._read()
                self._missing_since = time.monotonic() if self._index is None else None
            return self._index


class ShardPlaces:
    """Chunks inside shards; a shard's index is read once and kept."""

    def __init__(
        self,
        array: Any,
        inner: Sequence[int],
        outer: Sequence[int],
        codec: ShardingCodec,
        index: CodecDecoder,
        files: StoreFiles,
    ) -> None:
        self.files = files
        self._objects = ObjectPlaces(array, files)
        self._per_shard = tuple(o // i for o, i in zip(outer, inner, strict=True))
        self._index_bytes = 16 * prod(self._per_shard) + 4 * index.checked
        form: Any = codec.to_dict()["configuration"]  # as in zarr.json: what zarr itself has of it changes
        self._at_end = form["index_location"] == "end"
        self._index = index
        self._known: OrderedDict[ChunkIndex, _ReadOnce] = OrderedDict()
        self._lock = threading.Lock()
        self._tally = LookupTally()
        self._last: tuple[ChunkIndex, _ShardIndex | None] = (), None
        """The shard of the last lookup: the next is nearly always of the same one."""

    def path(self, index: ChunkIndex) -> str:
        return self._objects.path(self._outer(index))

    @property
    def counted(self) -> LookupCounts:
        """The reads of indices so far; requests for a size, where a store cannot read from the end, do not count."""
        return self._tally.counted

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts]:
        outer = self._outer(index)
        known = self._known.get(outer)
        return self._objects.path(outer), self._lookup(is_there=known is None or not known.is_missing)

    def _lookup(self, is_there: bool) -> LookupCounts:
        if is_there:
            return LookupCounts(1, self._index_bytes)
        return LookupCounts(int(isinstance(self.files, RemoteFiles)))

    def _outer(self, index: ChunkIndex) -> ChunkIndex:
        return tuple([i // n for i, n in zip(index, self._per_shard, strict=True)])

    def _shard(self, outer: ChunkIndex) -> _ShardIndex | None:
        with self._lock:
            known = self._known.get(outer)
            if known is None:
                path = self._objects.path(outer)
                known = self._known[outer] = _ReadOnce(lambda: self._read(path))
                if len(self._known) > _SHARD_INDICES_KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(outer)
        try:
            return known()
        except BadChunkError as e:
            kind = TruncatedError if isinstance(e, ShortChunkError) else CorruptChunkError
            raise kind(f"shard {self._objects.path(outer)} cannot be read: the index: {e}") from e

    def _read(self, path: str) -> _ShardIndex | None:
        edge = self._edge(path)
        self._tally.add(self._lookup(is_there=edge is not None))
        if edge is None:
            return None
        raw, size = edge
        if size < self._index_bytes:
            raise ShortChunkError(f"the shard has {size} bytes and its index alone {self._index_bytes}")
        if self._index.checked:
            raw = without_crc(raw)
        return _ShardIndex(path, size, raw.view(self._index.dtype).reshape(-1, 2).tolist())

    def _edge(self, path: str) -> tuple[ByteArray, int] | None:
        """Read the end (or beginning) of the shard with the index, and return it with its size; far stores get one
        request.
        """
        if isinstance(self.files, RemoteFiles):
            return self.files.edge(path, self._index_bytes, self._at_end)
        size = self.files.size(path)
        if size is None or size < self._index_bytes:
            return None if size is None else (fresh_memory(0), size)
        raw = fresh_memory(self._index_bytes)
        start = size - raw.size if self._at_end else 0
        return (raw, size) if self.files.ranges(path, [(start, raw)]) else None

    def lacks_object(self, index: ChunkIndex) -> bool:
        """Say whether the shard is missing; one that exists says itself which chunks it has."""
        return self._shard(self._outer(index)) is None and self._objects.lacks_object(index)

    def lost_metadata(self) -> str | None:
        return self._objects.lost_metadata()

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        return self._within(index, 1)[0]

    def locate_strip(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]:
        """Return where the chunk `first` lies, and the next ones along the last dim."""
        refs: list[ChunkRef | None] = []
        *others, last = first
        stop, per_shard = last + count, self._per_shard[-1]
        while last < stop:
            within = min(stop - last, per_shard - last % per_shard)
            refs += self._within((*others, last), within)
            last += within
        return refs

    def _within(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]:
        """Return the places of consecutive chunks of one shard along the last dim."""
        outer, flat = self._outer(first), 0
        known, shard = self._last
        if known != outer or shard is None:
            shard = self._shard(outer)
            self._last = outer, shard
        if shard is None:
            return [None] * count
        for i, n in zip(first, self._per_shard, strict=True):  # the number within the shard, in C order
            flat = flat * n + i % n
        return shard.refs(flat, count)


ZarrPlaces = ObjectPlaces | ShardPlaces
