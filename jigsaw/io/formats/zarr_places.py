"""Places of the chunks of a Zarr array: an object each, or within shards."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from zarr.codecs import ShardingCodec
from zarr.storage import LocalStore

from jigsaw.errors import CorruptChunkError, TruncatedError
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.chunk_finder import LookupCounts, LookupTally
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.codecs import CodecDecoder, without_crc
from jigsaw.io.chunks.files import BadChunkError, ByteArray, ShortChunkError, StoreFiles, fresh_memory
from jigsaw.io.chunks.remote_files import RemoteFiles
from jigsaw.io.formats.zarr_keys import ZarrKeyFiles

_MISSING_CHUNK = 2**64 - 1
_SHARD_INDICES_KEPT = 128


class ObjectPlaces:
    """An object a chunk, named by the store's own key encoding."""

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
        found = self.files.whole(name, fresh_memory) if far else self.files.size(name)
        return name if found is None else None

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
        """Return where chunks lie that follow each other in the index; a damaged one is refused before memory is
        allocated.
        """
        found: list[ChunkRef | None] = []
        for offset, length in self.index[first : first + count]:
            if offset == length == _MISSING_CHUNK:
                found.append(None)
            elif offset + length > self.size:
                raise ShortChunkError(f"the index says {length} bytes at {offset} and the shard has {self.size}")
            else:
                found.append(ChunkRef(self.path, offset, length))
        return found


class _ReadOnce:
    """A shard's index, read when it is first asked for; others who ask meanwhile wait, and a failure is not kept."""

    def __init__(self, read: Callable[[], _ShardIndex | None]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._found: list[_ShardIndex | None] = []

    @property
    def is_missing(self) -> bool:
        """True where it was read, and the shard does not exist."""
        return self._found == [None]

    def __call__(self) -> _ShardIndex | None:
        with self._lock:
            if not self._found:
                self._found.append(self._read())
            return self._found[0]


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
        said: Any = codec.to_dict()["configuration"]  # as in zarr.json: what zarr itself has of it changes
        self._at_end = said["index_location"] == "end"
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
        """The reads of indices so far; a question for the size, where a store cannot read from the end, is not one."""
        return self._tally.counted

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts]:
        """Return the shard that has a chunk, and the look-ups of reading its index."""
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
        found = self._edge(path)
        self._tally.add(self._lookup(is_there=found is not None))
        if found is None:
            return None
        raw, size = found
        if size < self._index_bytes:
            raise ShortChunkError(f"the shard has {size} bytes and its index alone {self._index_bytes}")
        if self._index.checked:
            raw = without_crc(raw)
        return _ShardIndex(path, size, raw.view(self._index.dtype).reshape(-1, 2).tolist())

    def _edge(self, path: str) -> tuple[ByteArray, int] | None:
        """Read the end or beginning of the shard that has the index, and return it with the shard's size; far stores
        get one request.
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
        """Return where the chunk `first` lies, and those that follow it along the last dim."""
        found: list[ChunkRef | None] = []
        *others, last = first
        stop, per_shard = last + count, self._per_shard[-1]
        while last < stop:
            here = min(stop - last, per_shard - last % per_shard)
            found += self._within((*others, last), here)
            last += here
        return found

    def _within(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]:
        """Return the places of chunks of one shard that follow each other along the last dim."""
        outer, flat = self._outer(first), 0
        known, shard = self._last
        if known != outer:
            shard = self._shard(outer)
            self._last = outer, shard
        if shard is None:
            return [None] * count
        for i, n in zip(first, self._per_shard, strict=True):  # the number within the shard, in C order
            flat = flat * n + i % n
        return shard.refs(flat, count)


ZarrPlaces = ObjectPlaces | ShardPlaces
