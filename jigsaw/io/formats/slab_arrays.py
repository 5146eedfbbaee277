"""Arrays that lie in a file as their values, one after another, as chunk tables of slabs: cut along the outermost dim.

Raw files, `.npy`, NIfTI, NetCDF-3 and contiguous HDF5 are such. The slabs are virtual: only the needed bytes of each
are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import CorruptChunkError, TruncatedError, UnsupportedStoreError
from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkRef
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.chunks.files import (
    BadChunkError,
    ByteAllocator,
    ByteArray,
    FillTarget,
    ObjectIdentity,
    ShortChunkError,
    StoreFiles,
    fresh_memory,
    identity_of_object,
)
from jigsaw.io.chunks.remote_files import ask_at_once
from jigsaw.io.series.coords import check_coordinate_size

_SMALL_SLAB_BYTES = 1 << 20  # bytes of a slab where a row has fewer
_LARGE_SLAB_BYTES = 1 << 24  # bytes of a slab where a row has more

_FILE_GONE = "the file is gone since it was opened; open the store again"

T = TypeVar("T")


class PresentFiles:
    """Files that were found when the store was opened: a missing one is an error, never an array of fill values."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self.far, self.gap = files.far, files.gap

    def size(self, path: str) -> int | None:
        return self._files.size(path)

    def identity(self, path: str) -> ObjectIdentity | None:
        return identity_of_object(self._files, path)

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None:
        if (raw := self._files.whole(path, room, most)) is None:
            raise BadChunkError(_FILE_GONE)
        return raw

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        if not self._files.ranges(path, targets):
            raise BadChunkError(_FILE_GONE)
        return True


@dataclass(frozen=True)
class SlabPlaces:
    """Places of the slabs of one array: `strides` are bytes, an entry for each dim."""

    files: StoreFiles
    file: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    chunks: tuple[int, ...]
    itemsize: int

    def path(self, index: ChunkIndex) -> str:
        return self.file

    def locate(self, index: ChunkIndex) -> ChunkRef:
        starts = [i * c for i, c in zip(index, self.chunks, strict=True)]
        rows = [min(c, n - a) for c, n, a in zip(self.chunks, self.shape, starts, strict=True)]
        at = self.offset + sum(a * stride for a, stride in zip(starts, self.strides, strict=True))
        return ChunkRef(self.file, at, prod(rows) * self.itemsize)

    @property
    def end(self) -> int:
        if 0 in self.shape:
            return self.offset
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize


def slab_places(
    files: StoreFiles,
    file: str,
    offset: int,
    shape: Sequence[int],
    itemsize: int,
    order: Sequence[int] | None = None,
    record: int | None = None,
) -> SlabPlaces:
    """Return the slabs of an array whose dims are stored in `order` (C order by default).

    `record` is how many bytes lie between the starts of two rows of the first dim, where other arrays lie between them.
    """
    order = range(len(shape)) if order is None else order
    strides = [itemsize] * len(shape)
    for outer, inner in reversed(list(pairwise(order))):
        strides[outer] = strides[inner] * max(shape[inner], 1)
    apart = record is not None and record != strides[0]
    sizes = slab_shape([shape[d] for d in order], itemsize, apart)
    chunks = [sizes[list(order).index(d)] for d in range(len(shape))]
    if record is not None:
        strides[0] = record
    return SlabPlaces(PresentFiles(files), file, offset, tuple(shape), tuple(strides), tuple(chunks), itemsize)


def slab_shape(sizes: Sequence[int], itemsize: int, apart: bool = False) -> list[int]:
    """Return the shape of a slab, outermost dim first: contiguous rows of one dim; rows of the first may lie apart."""
    rows = [1] * len(sizes)
    for d, size in enumerate(sizes):
        row = max(itemsize * prod(sizes[d + 1 :]), 1)
        if row <= _LARGE_SLAB_BYTES:
            rows[d + 1 :] = [max(n, 1) for n in sizes[d + 1 :]]
            if not (apart and d == 0):
                rows[d] = max(1, min(size, (_LARGE_SLAB_BYTES if d else _SMALL_SLAB_BYTES) // row))
            break
    return rows


def table_of_slabs(
    name: str,
    places: SlabPlaces,
    dims: Sequence[str],
    dtype: np.dtype[Any],
    attrs: Mapping[str, Any],
    order: Sequence[int] | None = None,
    masks: tuple[float, ...] = (),
) -> ArrayTable:
    """Return the chunk table of those slabs."""
    return ArrayTable(
        name=name,
        shape=places.shape,
        dims=tuple(dims),
        dtype=dtype.str,
        chunks=places.chunks,
        attrs=attrs,
        masks=masks,
        decoder=CodecDecoder(dtype, tuple(range(len(places.shape)) if order is None else order)),
        places=places,
        clipped=True,
    )


def read_table_box(table: ArrayTable, box: Box, missing: str = "error") -> NDArray[Any]:
    """Read the stored values of a box, in the machine's byte order; `missing` is that of `jigsaw.io.open`."""
    out = np.empty([b - a for a, b in box], np.dtype(table.dtype).newbyteorder("="))
    if 0 in out.shape:
        return out

    def read(index: ChunkIndex) -> None:
        room = fresh_memory(table.grid.bytes_of(index))
        if table.loader.load(index, room).stored is None:
            fill_missing_chunk(table, index, room, missing)
        chunk_box = table.grid.box_of(index)
        inside = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, chunk_box, strict=True))
        out[box_slices(inside, box)] = table.loader.view(room, index)[box_slices(inside, chunk_box)]

    spans = [range(along.find(a), along.find(b - 1) + 1) for (a, b), along in zip(box, table.grid.along, strict=True)]
    if table.far:
        ask_at_once(read, [*product(*spans)])
    else:
        for index in product(*spans):
            read(index)
    return out


def fill_missing_chunk(table: ArrayTable, index: ChunkIndex, room: ByteArray, missing: str) -> None:
    """Make fill values of a chunk that turned out to be missing.

    Raises: `MissingArrayError` where its array is gone; `MissingChunkError` with ``missing="error"``.
    """
    if table.finder.lacks_object(index):
        table.finder.check_metadata()
        if missing == "error":
            raise table.finder.missing_error(index)
    table.loader.fill(room, index)


def check_all_chunks_there(table: ArrayTable) -> None:
    """Raise `MissingChunkError` where an array lacks a chunk that its library, which alone reads it, would fill in."""
    check_coordinate_size(table.name, table.shape, table.grid.chunk_bytes)
    for index in table.grid.indices():
        ref, files = table.finder.locate(index), table.places.files
        absent = ref is None or (ref.length is None and files.far and files.size(ref.path) is None)
        if absent and table.finder.lacks_object(index):
            raise table.finder.missing_error(index)


def read_whole_coordinate(table: ArrayTable) -> NDArray[Any]:
    """Read all stored values of a coordinate, in the machine's byte order; one larger than any coordinate is refused.

    A single value may be missing: Zarr leaves out a 0 that is the fill value. Records between which other arrays lie
    are read in as few requests as `gap` allows.
    """
    places, shape = table.places, table.shape
    check_coordinate_size(table.name, shape, max(prod(shape) * table.grid.itemsize, table.grid.chunk_bytes))
    step = 0 if not shape else prod(shape[1:]) * table.grid.itemsize
    if not isinstance(places, SlabPlaces) or 0 in shape or places.chunks[:1] != (1,) or step == places.strides[0]:
        return read_table_box(table, tuple((0, n) for n in shape), "error" if prod(shape) > 1 else "fill")
    return parse_named_file(
        places.file, f"array {table.name!r}", lambda: _read_records(places, np.dtype(table.dtype), step)
    )


def _read_records(places: SlabPlaces, dtype: np.dtype[Any], step: int) -> NDArray[Any]:
    count, stride = places.shape[0], places.strides[0]
    out = np.empty((count, step), np.uint8)
    if stride - step > places.files.gap:
        places.files.ranges(places.file, [(places.offset + i * stride, out[i]) for i in range(count)])
    else:
        many = max(1, _LARGE_SLAB_BYTES // stride)
        for start in range(0, count, many):
            rows = min(many, count - start)
            room = fresh_memory((rows - 1) * stride + step)
            places.files.ranges(places.file, [(places.offset + start * stride, room)])
            out[start : start + rows] = np.lib.stride_tricks.as_strided(room, (rows, step), (stride, 1))
    return out.reshape(-1).view(dtype).reshape(places.shape).astype(dtype.newbyteorder("="))


def file_head(files: StoreFiles, path: str, length: int, offset: int = 0) -> bytes:
    """Read the bytes of a file, which must exist, from `offset` on: `length` of them or as many as there are."""
    room = fresh_memory(max(0, min(length, file_size(files, path) - offset)))
    files.ranges(path, [(offset, room)])
    return room.tobytes()


def file_size(files: StoreFiles, path: str) -> int:
    """Return the length of a file, which must exist and not be a directory."""
    size = files.size(path)
    if size is None:
        raise UnsupportedStoreError(f"there is no file {path!r}")
    if not files.far and os.path.isdir(path):
        raise UnsupportedStoreError(f"{path!r} is a directory, and a file is expected")
    return size


def parse_named_file(path: str, kind: str, parse: Callable[[], T]) -> T:
    """Return the result of `parse`; errors that it raises about a header name the file."""
    try:
        return parse()
    except ShortChunkError as e:
        raise TruncatedError(f"{path} cannot be read as {kind}: {e}") from e
    except (BadChunkError, OSError) as e:
        raise CorruptChunkError(f"{path} cannot be read as {kind}: {e}") from e


def magic_bytes(url: Any, length: int) -> bytes:
    """Read the first bytes of a local file; none of anything else, such as a pipe, on which a read would wait."""
    try:
        descriptor = os.open(os.fspath(url), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a folder, too
        try:
            return os.read(descriptor, length) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        finally:
            os.close(descriptor)
    except (OSError, TypeError, ValueError):
        return b""
