"""Zarr v2, v3 and sharded v3 as chunk tables: the metadata is zarr's own, the chunks are found and read without it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import ShardingCodec
from zarr.core.chunk_grids import RegularChunkGrid
from zarr.core.metadata.v2 import ArrayV2Metadata
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.errors import NodeNotFoundError
from zarr.storage import LocalStore

from jigsaw.io._codecs import BadChunkError, Bytes, Decoder, ShortChunkError, decoder_of_v2, decoder_of_v3, without_crc
from jigsaw.io._memory import fresh
from jigsaw.io.errors import CorruptChunkError, UnsupportedStoreError
from jigsaw.io.table import ArrayTable, ChunkRef, Index, Room, Store

_MISSING = 2**64 - 1
_SHARDS_KEPT = 128


def open_zarr(url: Any) -> Store:
    """The chunk tables of a zarr group.

    Raises: `UnsupportedStoreError` when there is no zarr group at `url`.
    """
    try:
        group = url if isinstance(url, zarr.Group) else zarr.open_group(url, mode="r")
    except (NodeNotFoundError, FileNotFoundError, ValueError, TypeError, ImportError) as e:
        raise UnsupportedStoreError(f"{url!r} is not a zarr group that can be opened: {e}") from e
    sources = dict(_arrays(group))
    tables = {name: table_of(name, array) for name, array in sources.items()}
    return Store(str(group.store_path), tables, dict(group.attrs), lambda name: np.asarray(sources[name][...]))


def _arrays(group: zarr.Group) -> Iterator[tuple[str, Any]]:
    members: Any = group.members(max_depth=None)
    for name, member in sorted(members, key=lambda pair: pair[0]):
        if isinstance(member, zarr.Array):
            yield name, member


def table_of(name: str, array: Any) -> ArrayTable:
    """The chunk table of one zarr array."""
    meta = array.metadata
    dtype = _stored_dtype(array)
    if isinstance(meta, ArrayV2Metadata):
        chunks = tuple(meta.chunks)
        dims: Any = meta.attributes.get("_ARRAY_DIMENSIONS")
        decoder = decoder_of_v2(dtype, meta.order, len(chunks), meta.filters or (), meta.compressor)
        places: Places = Objects(array)
    else:
        chunks, dims, decoder, places = _of_v3(array, meta, dtype)
    if not isinstance(array.store, LocalStore):
        decoder, places = None, Remote(array)
    return ArrayTable(
        name=name,
        shape=tuple(array.shape),
        dims=tuple(d or f"dim_{i}" for i, d in enumerate(dims or [None] * len(chunks))),
        dtype=(decoder.dtype if decoder else dtype).str,
        chunks=chunks,
        fill_value=_scalar(meta.fill_value),
        attrs=_attributes(meta),
        masks=_masks(meta, dtype),
        decoder=decoder,
        places=places,
        load_slowly=lambda index: _through_zarr(array, chunks, index),
    )


def _of_v3(
    array: Any, meta: ArrayV3Metadata, dtype: np.dtype[Any]
) -> tuple[tuple[int, ...], Any, Decoder | None, Places]:
    grid = meta.chunk_grid
    if not isinstance(grid, RegularChunkGrid):
        raise UnsupportedStoreError(
            f"array {array.name!r} has a {type(grid).__name__}; only regular chunk grids can be read"
        )
    outer = tuple(grid.chunk_shape)
    codecs = meta.codecs
    if len(codecs) == 1 and isinstance(codecs[0], ShardingCodec):
        sharding = codecs[0]
        inner = tuple(sharding.chunk_shape)
        decoder = decoder_of_v3(dtype, len(inner), sharding.codecs)
        names = [c.to_dict()["name"] for c in sharding.index_codecs]
        if decoder and names in (["bytes"], ["bytes", "crc32c"]):
            return inner, meta.dimension_names, decoder, Shards(array, inner, outer, sharding, checked=len(names) == 2)
        return outer, meta.dimension_names, None, Objects(array)
    return outer, meta.dimension_names, decoder_of_v3(dtype, len(outer), codecs), Objects(array)


def _attributes(meta: ArrayV2Metadata | ArrayV3Metadata) -> dict[str, Any]:
    return {k: v for k, v in meta.attributes.items() if k != "_ARRAY_DIMENSIONS"}


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _masks(meta: ArrayV2Metadata | ArrayV3Metadata, dtype: np.dtype[Any]) -> tuple[float, ...]:
    """The stored values that mean "missing", by the conventions that xarray reads by.

    Zarr v3 has ``_FillValue`` among its attributes; zarr v2 has it as the array's `fill_value`.  That of v2 is 0 when
    nobody chose one, so a 0 masks only packed integers.
    """
    attrs = meta.attributes
    if dtype.kind not in "iuf":
        return ()
    found: list[Any] = [_decoded(attrs[k], dtype) for k in ("_FillValue", "missing_value") if k in attrs]
    if isinstance(meta, ArrayV2Metadata) and (meta.fill_value or "scale_factor" in attrs):
        found.append(_scalar(meta.fill_value))
    flat = [x for value in found for x in np.ravel(np.asarray(value)).tolist()]
    numbers = [_as_stored(x, dtype) for x in flat if isinstance(x, int | float) and x == x]
    return tuple(dict.fromkeys(numbers))


def _as_stored(value: float, dtype: np.dtype[Any]) -> float:
    """The value that an array of `dtype` holds for it: rounded, or of the other sign."""
    if dtype.kind == "u" and value < 0:
        return value + 2.0 ** (8 * dtype.itemsize)
    return float(np.asarray(value).astype(dtype)) if dtype.kind == "f" else float(value)


def _stored_dtype(array: Any) -> np.dtype[Any]:
    """The dtype of the stored values; ``_Unsigned`` is how NetCDF-3 spells an unsigned one."""
    dtype = np.dtype(array.dtype)
    if dtype.kind == "i" and str(array.metadata.attributes.get("_Unsigned", "")).lower() == "true":
        return np.dtype(dtype.str.replace("i", "u"))
    return dtype


def _decoded(value: Any, dtype: np.dtype[Any]) -> Any:
    """Xarray writes the ``_FillValue`` of a zarr v3 float as base64 of its eight bytes."""
    if isinstance(value, str) and dtype.kind == "f":
        from base64 import standard_b64decode
        from struct import unpack

        try:
            return unpack("<d", standard_b64decode(value))[0]
        except ValueError:
            return float(value)  # "NaN"
    return value


def _through_zarr(array: Any, chunks: Sequence[int], index: Index) -> NDArray[Any]:
    region = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(index, chunks, array.shape, strict=True))
    return np.asarray(array[region])


# -- where chunks lie ------------------------------------------------------------------------------------------------


class Objects:
    """A file a chunk, named by the store's own key encoding."""

    def __init__(self, array: Any) -> None:
        self._root = str(Path(array.store.root) / array.path) if isinstance(array.store, LocalStore) else array.path
        self._key = array.metadata.encode_chunk_key

    def path(self, index: Index) -> str:
        return f"{self._root}/{self._key(index)}"

    def locate(self, index: Index) -> ChunkRef | None:
        path = self.path(index)
        try:
            return ChunkRef(path, 0, os.stat(path).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, index: Index, room: Room) -> Bytes | None:
        """The stored bytes, in memory that `room` gives; None for a missing chunk."""
        try:
            fd = os.open(self.path(index), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return read_range(fd, 0, os.fstat(fd).st_size, room)
        finally:
            os.close(fd)


class Remote(Objects):
    """Chunks of a store that only zarr can read: their sizes are not known."""

    def locate(self, index: Index) -> ChunkRef | None:
        return ChunkRef(self.path(index), 0, 0)

    def read(self, index: Index, room: Room) -> Bytes | None:
        raise BadChunkError("it is not a local file")


class _Shard:
    """An open shard and its index: (offset, length) of every inner chunk.  Closed when nobody uses it any more."""

    def __init__(self, path: str, index_bytes: int, at_end: bool, checked: bool) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self.fd).st_size
        if size < index_bytes:
            raise ShortChunkError(f"the shard has {size} bytes and its index alone {index_bytes}")
        raw = read_range(self.fd, size - index_bytes if at_end else 0, index_bytes, fresh)
        if checked:
            raw = without_crc(raw)
        self.index = raw.view("<u8").reshape(-1, 2).tolist()

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Shards:
    """Chunks inside shards; a shard's index is read once and kept."""

    def __init__(
        self, array: Any, inner: Sequence[int], outer: Sequence[int], codec: ShardingCodec, checked: bool
    ) -> None:
        self._files = Objects(array)
        self._per_shard = tuple(o // i for o, i in zip(outer, inner, strict=True))
        self._index_bytes = 16 * prod(self._per_shard) + 4 * checked
        self._at_end = codec.index_location.value == "end"
        self._checked = checked
        self._open: OrderedDict[str, _Shard | None] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, index: Index) -> str:
        return self._files.path(tuple(i // n for i, n in zip(index, self._per_shard, strict=True)))

    def _shard(self, path: str) -> _Shard | None:
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
            try:
                shard = _Shard(path, self._index_bytes, self._at_end, self._checked)
            except (FileNotFoundError, NotADirectoryError):
                shard = None
            except BadChunkError as e:
                raise CorruptChunkError(f"shard {path} cannot be read: the index: {e}") from e
            self._open[path] = shard
            if len(self._open) > _SHARDS_KEPT:
                self._open.popitem(last=False)
            return shard

    def _find(self, index: Index) -> tuple[_Shard, int, int] | None:
        shard = self._shard(self.path(index))
        flat = 0
        for i, n in zip(index, self._per_shard, strict=True):
            flat = flat * n + i % n
        offset, length = shard.index[flat] if shard else (_MISSING, _MISSING)
        return None if shard is None or offset == length == _MISSING else (shard, offset, length)

    def locate(self, index: Index) -> ChunkRef | None:
        found = self._find(index)
        return None if found is None else ChunkRef(self.path(index), found[1], found[2])

    def read(self, index: Index, room: Room) -> Bytes | None:
        found = self._find(index)
        return None if found is None else read_range(found[0].fd, found[1], found[2], room)


Places = Objects | Shards


def read_range(fd: int, offset: int, length: int, room: Room) -> Bytes:
    """`length` bytes at `offset`, in memory that `room` gives.

    Raises: `ShortChunkError` when the file ends before.
    """
    if length > (size := os.fstat(fd).st_size):  # before allocating what a damaged index claims
        raise ShortChunkError(f"it should have {length} bytes at {offset} and the file has {size}")
    raw = room(length)
    view, done = raw.data, 0
    while done < length:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise ShortChunkError(f"the file ends after {done} of its {length} bytes")
        done += got
    return raw
