"""NetCDF-3 (classic, 64-bit offset, and CDF-5) as chunk tables, by exact byte ranges.

The header is parsed here, after the NetCDF Classic Format Specification. A variable with the record dim has a row in
each record, where the rows of all such variables lie one after the other. So every record is a chunk of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable, declared_missing_values, dtype_with_declared_sign
from jigsaw.io.chunks.files import BadChunkError, LocalFiles, ShortChunkError, StoreFiles
from jigsaw.io.formats import slab_arrays as slabs

_DIMS_TAG, _VARIABLES_TAG, _ATTRIBUTES_TAG = 10, 11, 12
_NETCDF3_TYPES = {1: ">i1", 2: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8"}
_CDF5_TYPES = {7: ">u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"}
_FIRST_READ = 1 << 16

T = TypeVar("T")


def claims(url: Any) -> bool:
    """Say whether a local file begins as NetCDF-3 does."""
    return _netcdf3_version(slabs.magic_bytes(url, 4)) is not None


def _netcdf3_version(head: bytes) -> int | None:
    return head[3] if len(head) == 4 and head[:3] == b"CDF" and head[3] in (1, 2, 5) else None


def open_netcdf3(url: str | os.PathLike[str], files: StoreFiles | None = None) -> ArrayStore:
    """Open the chunk tables of a NetCDF-3 file. One that ends before its variables do is a `TruncatedError`, a damaged
    header a `CorruptChunkError`.
    """
    path, files = os.fspath(url), files or LocalFiles(keep=True)
    header = slabs.parse_named_file(path, "NetCDF-3", lambda: _Netcdf3Header(files, path))
    tables = header.tables  # free the bytes of the header
    return ArrayStore(path, tables, header.attrs, lambda name: slabs.read_whole_coordinate(tables[name]))


@dataclass(frozen=True)
class _Netcdf3Variable:
    name: str
    dims: tuple[int, ...]
    attrs: dict[str, Any]
    dtype: np.dtype[Any]
    begin: int


class _Netcdf3Header:
    """The header of a file, read from its start as far as it goes, and the tables that it describes."""

    def __init__(self, files: StoreFiles, path: str) -> None:
        self._files, self._path = files, path
        self._size, self._at = slabs.file_size(files, path), 0
        self._read = slabs.file_head(files, path, _FIRST_READ)
        version = _netcdf3_version(self._read[:4])
        if version is None:
            raise UnsupportedStoreError(f"{path!r} is not a NetCDF-3 file: it begins with {self._read[:4]!r}")
        self._at = 4
        self._wide = 8 if version == 5 else 4
        self._offset = 4 if version == 1 else 8
        self._types = _NETCDF3_TYPES | (_CDF5_TYPES if version == 5 else {})
        streaming = 256**self._wide - 1
        count = self._number(self._wide)
        self.dims = self._list(_DIMS_TAG, self._dim, 2 * self._wide)
        self.attrs = dict(self._list(_ATTRIBUTES_TAG, self._attribute, 2 * self._wide + 4))
        self.variables = self._list(_VARIABLES_TAG, self._variable, 4 * self._wide + 8 + self._offset)
        self._end = self._at
        self.records = count
        if count == streaming:  # the writer did not store the number: as many records as fit in the file
            first = min((v.begin for v in self.variables if self._is_record(v)), default=self._size)
            self.records = max(0, self._size - first) // max(self._record, 1)
        self.tables = {v.name: self._table(v) for v in self.variables}

    def _take(self, length: int) -> bytes:
        stop = self._at + length
        if stop > self._size:
            raise ShortChunkError(f"its header needs {length} bytes at {self._at}, and the file has {self._size}")
        if stop > len(self._read):
            self._read += slabs.file_head(self._files, self._path, max(length, len(self._read)), len(self._read))
        raw, self._at = self._read[self._at : stop], stop
        return raw

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _count(self, least: int) -> int:
        """Read a number of entries, each of at least `least` bytes; too many are refused before memory is allocated."""
        count = self._number(self._wide)
        if count * least > self._size - self._at:
            raise ShortChunkError(
                f"its header claims {count} entries at byte {self._at}, more than fit: the file has {self._size} bytes"
            )
        return count

    def _list(self, tag: int, entry: Callable[[], T], least: int) -> list[T]:
        own_tag = self._number(4)
        count = self._count(least)
        if own_tag != tag and (own_tag, count) != (0, 0):
            raise BadChunkError(f"its header has the tag {own_tag} at byte {self._at} where {tag} or 0 belongs")
        return [entry() for _ in range(count)]

    def _padded(self, length: int) -> bytes:
        return self._take(length + -length % 4)[:length]

    def _name(self) -> str:
        return _netcdf3_text(self._padded(self._count(1)))

    def _dim(self) -> tuple[str, int]:
        return self._name(), self._number(self._wide)

    def _type(self) -> np.dtype[Any]:
        number = self._number(4)
        if number not in self._types:
            raise BadChunkError(f"its header has the type {number} at byte {self._at}, which this format lacks")
        return np.dtype(self._types[number])

    def _attribute(self) -> tuple[str, Any]:
        name, dtype = self._name(), self._type()
        raw = self._padded(self._count(dtype.itemsize) * dtype.itemsize)
        if dtype.kind == "S":
            return name, _netcdf3_text(raw.rstrip(b"\0"))
        values = np.frombuffer(raw, dtype).tolist()
        return name, values[0] if len(values) == 1 else values

    def _variable(self) -> _Netcdf3Variable:
        name = self._name()
        dims = tuple(self._number(self._wide) for _ in range(self._count(self._wide)))
        attrs = dict(self._list(_ATTRIBUTES_TAG, self._attribute, 2 * self._wide + 4))
        dtype = self._type()
        self._number(self._wide)  # the size is skipped: it is redundant, and wrong for variables of 4 GiB or more
        if any(d >= len(self.dims) for d in dims):
            raise BadChunkError(f"variable {name!r} has the dims {dims}, and the file has {len(self.dims)}")
        variable = _Netcdf3Variable(name, dims, attrs, dtype, self._number(self._offset))
        if any(self.dims[d][1] == 0 for d in dims[1:]):
            raise BadChunkError(f"variable {name!r} has the record dim in another place than the first")
        return variable

    def _is_record(self, variable: _Netcdf3Variable) -> bool:
        return bool(variable.dims) and self.dims[variable.dims[0]][1] == 0

    def _row(self, variable: _Netcdf3Variable) -> int:
        return prod(self.dims[d][1] for d in variable.dims[1:]) * variable.dtype.itemsize

    @property
    def _record(self) -> int:
        """The bytes of a record: rows are padded to 4 bytes, except that of an only record variable."""
        rows = [self._row(v) for v in self.variables if self._is_record(v)]
        return rows[0] if len(rows) == 1 else sum(row + -row % 4 for row in rows)

    def _table(self, variable: _Netcdf3Variable) -> ArrayTable:
        record = self._record if self._is_record(variable) else None
        shape = [self.dims[d][1] for d in variable.dims]
        if record is not None:
            shape[0] = self.records
        places = slabs.slab_places(
            self._files, self._path, variable.begin, shape, variable.dtype.itemsize, record=record if shape else None
        )
        if variable.begin < self._end:
            raise BadChunkError(
                f"array {variable.name!r} begins at byte {variable.begin}, within the header of {self._end} bytes"
            )
        if places.end > self._size:
            array_text = f"array {variable.name!r} of shape {places.shape} ends at byte {places.end}"
            raise ShortChunkError(f"{array_text}, and the file has {self._size}")
        attrs, dtype = variable.attrs, dtype_with_declared_sign(variable.dtype, variable.attrs)
        dims = [self.dims[d][0] for d in variable.dims]
        masks = declared_missing_values(dtype, attrs, variable.dtype)
        return slabs.table_of_slabs(variable.name, places, dims, dtype, attrs, masks=masks)


def _netcdf3_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
