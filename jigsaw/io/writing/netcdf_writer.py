"""NetCDF-4: one rank writes, the others send it their boxes, a few units at a time.

HDF5 without MPI cannot be written by several processes at once, and a file that a killed process was writing may not
open. So the file grows beside its name, as ``NAME.part``, and takes its name when it is whole; an older file at the
path stays there until then. After every append the part is flushed and says how many steps are complete.

A full disk in the middle of a step would leave a part that libhdf5 cannot even close. So room for a whole step is
reserved before any of it is written. Without room the part stays as it was; ``mode="a"`` goes on with it.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jigsaw.drafts import open_unlinked
from jigsaw.errors import WriteError, imports_needed, writing_to
from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.chunks.files import size_and_change
from jigsaw.io.writing.cf import StoredCoordinate, plain_attribute
from jigsaw.io.writing.deliver import (
    COMPLETE_ATTRIBUTE,
    StoreCompleteness,
    completeness_from_attrs,
    failing_with_remedy,
    listed_coordinates,
    part_path,
    reading_growing_store,
)
from jigsaw.io.writing.outline import ArrayOutline, GrowingStore, StoredArrays, StoredCoordinates

_DEFLATE_ENCODING: Mapping[str, Any] = {"compression": "zlib", "complevel": 1, "shuffle": True, "fletcher32": True}
_NETCDF_CHUNK_STEPS = 1024
_METADATA, _OF_A_CHUNK = 1 << 18, 512
"""Largest number of bytes that a file needs beside its values, and beside each of their chunks."""
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_GREW_FROM = "jigsaw_grew_from"  # attribute of a draft that began as a copy: the name of the copied file
# types that NetCDF lacks, and the types that hold them exactly
_HELD_DTYPES = {"bool": "i1", "float16": "f4"}


class NetcdfSink:
    """A NetCDF-4 file that the first rank writes."""

    writers: tuple[int, ...] = (0,)

    def __init__(self, path: Path, append_dim: str | None, encoding: Mapping[str, Any]) -> None:
        self.path, self._dim = path, append_dim
        self._part = part_path(path)
        self._encoding = {**_DEFLATE_ENCODING, **{k: v for k, v in encoding.items() if k != "dtype"}}
        self._file: Any = None
        self._complete, self._is_new = 0, False
        self._copied = 0  # steps of a part that is a copy of the file at the path
        self._held_file: tuple[int, int] | None = None  # of the part that this sink made or opened

    @property
    def remedy(self) -> str:
        where = self.path if self._has_nothing_of_its_own else self._part
        kept = f"go on with mode='a': the {self._complete} complete steps are in {where}"
        return kept if self._complete and self._dim else "write again"

    @property
    def _has_nothing_of_its_own(self) -> bool:
        """Say whether this sink made the part, and it has no more complete steps than what it is a copy of."""
        return self._is_new and self._complete == self._copied

    def find(self, append_dim: str) -> GrowingStore | None:
        """Return the complete steps of the file. A copy of it grows, or the part that an ended run has left."""
        goes_on = self._goes_on()
        if not goes_on:
            if not self.path.exists():
                return None
            with writing_to(self.path, self.remedy):
                self._new_part(self.path.stat().st_size)
                shutil.copyfile(self.path, self._part)
                self._open_part("a")
                self._file.setncattr(_GREW_FROM, str(size_and_change(self.path) or ""))
        if append_dim not in self._file.dimensions or not self._file.dimensions[append_dim].isunlimited():
            raise WriteError(f"{self.path} has no unlimited dim {append_dim!r} to grow along; write a new file")
        done = completeness_from_attrs(_read_attrs(self._file))
        self._complete = steps = len(self._file.dimensions[append_dim]) if done is None else done.steps
        self._copied = 0 if goes_on else steps
        variables: Mapping[str, Any] = self._file.variables
        listed = listed_coordinates(map(_read_attrs, variables.values()))
        # an incomplete step is written again
        rows = {d: slice(steps if d == append_dim else None) for d in self._file.dimensions}
        whole = {n: tuple(rows[d] for d in v.dimensions) for n, v in variables.items()}
        coords = {
            n: _netcdf_coordinate(n, v, whole[n]) for n, v in variables.items() if n in listed or v.dimensions == (n,)
        }
        return GrowingStore(
            {n: _netcdf_array(n, v, whole[n]) for n, v in variables.items() if n not in coords}, coords, steps
        )

    def _goes_on(self) -> bool:
        """Open the part, where it grew from what is at the path now and has complete steps."""
        if not self._attrs_to_continue():
            return False
        _refuse_open_part(self._part)
        self._open_part("a")
        return True

    def _open_part(self, mode: Literal["w", "a"]) -> None:
        self._file = _open_netcdf4(self._part, mode)
        self._held_file = _number_of_file(self._part)

    def _attrs_to_continue(self) -> Mapping[str, Any]:
        kept = _attrs_of_kept(self._part)
        return kept if kept.get(_GREW_FROM, "") == str(size_and_change(self.path) or "") else {}

    @reading_growing_store
    def stored_steps(self, append_dim: str) -> int:
        """Return the number of complete steps in the file, or in the part that an ended run has left."""
        attrs = self._attrs_to_continue()
        if not attrs and not self.path.exists():
            return 0
        done = completeness_from_attrs(attrs or netcdf_attrs(self.path))
        if done is not None:
            return done.steps
        with _open_netcdf4(self.path, "r") as file:
            return len(file.dimensions[append_dim]) if append_dim in file.dimensions else 0

    def _new_part(self, size: int) -> None:
        """Make an empty part: never the existing one, nor anything that a link leads to."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        if not _is_replaceable(self._part):
            raise WriteError(f"{self._part} is there, and jigsaw did not write it; move it away, or write elsewhere")
        _refuse_open_part(self._part)
        self._part.unlink(missing_ok=True)
        self._is_new = True
        os.close(open_unlinked(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        self._held_file = _number_of_file(self._part)
        self._make_sure_of(size + _METADATA)

    def _make_sure_of(self, size: int) -> None:
        """Raise `OSError` when the draft cannot grow by `size` bytes."""
        if not hasattr(os, "posix_fallocate"):  # macOS: a full disk is then noticed while a step is written
            return
        handle = open_unlinked(self._part, os.O_RDWR)
        before = os.fstat(handle).st_size
        try:
            os.posix_fallocate(handle, before, size)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return  # this file system does not say
            raise OSError(e.errno, f"{os.strerror(e.errno)}; what is written next takes up to {size} bytes") from e
        finally:
            os.ftruncate(handle, before)
            os.close(handle)

    @failing_with_remedy
    def create(self, arrays: StoredArrays, coords: StoredCoordinates, attrs: Mapping[str, Any], replace: bool) -> None:
        if self.path.exists() and not replace:
            raise WriteError(f"{self.path} exists; write elsewhere, or choose mode='w' to replace or 'a' to append")
        if os.path.lexists(self.path) and not _begins_as_netcdf(self.path):
            raise WriteError(f"{self.path} is not a NetCDF file, so mode='w' does not replace it; remove it yourself")
        if not replace and (left := _attrs_of_kept(self._part)):
            raise WriteError(
                f"{self._part} holds {left[COMPLETE_ATTRIBUTE]} complete steps of a run that ended; go on with "
                "mode='a', or choose mode='w' to write them anew"
            )
        self._new_part(0)
        self._open_part("w")
        of_coords = {d: n for c in coords for d, n in zip(c.dims, c.values.shape, strict=True)}
        for dim, size in {**of_coords, **{d: n for a in arrays for d, n in zip(a.dims, a.shape, strict=True)}}.items():
            self._file.createDimension(dim, None if dim == self._dim else size)
        about = StoreCompleteness(self._dim, 0, False).attrs()
        self._file.setncatts({k: _netcdf_attribute(v) for k, v in attrs.items()} | about)
        for a in arrays:
            fill = a.fill if np.dtype(a.dtype).kind == "f" else None
            self._create_variable(a, a.dtype, a.chunks or None, fill, self._encoding if a.dims else {})
        for c in coords:
            sizes = zip(c.dims, c.values.shape, strict=True)
            chunks = [_NETCDF_CHUNK_STEPS if d == self._dim else max(n, 1) for d, n in sizes]
            dtype = str if c.values.dtype.kind == "U" else _HELD_DTYPES.get(c.values.dtype.name, c.values.dtype)
            checked = bool(chunks) and dtype is not str  # HDF5 cannot checksum texts
            checksum = {"fletcher32": True} if checked else {}
            self._create_variable(c, dtype, chunks if checked or self._dim in c.dims else None, None, checksum)
        self._file.set_auto_maskandscale(False)  # values are written as they are given: no masks, no packing

    def _create_variable(
        self, item: ArrayOutline | StoredCoordinate, dtype: Any, chunks: Any, fill: Any, encoding: Mapping[str, Any]
    ) -> None:
        fill = item.attrs.get("_FillValue", fill)
        variable = self._file.createVariable(
            item.name, dtype, item.dims, chunksizes=chunks, fill_value=fill, **encoding
        )
        variable.setncatts({k: _netcdf_attribute(v) for k, v in item.attrs.items() if k != "_FillValue"})

    @failing_with_remedy
    def attach(self, arrays: StoredArrays) -> None:
        if self._file is not None:
            self._file.set_auto_maskandscale(False)  # values are written as they are given: no masks, no packing
            self._make_sure_of(_METADATA + sum(map(self._bytes, arrays)) + self._bytes_of_coordinates(arrays))

    def _bytes(self, array: ArrayOutline) -> int:
        """Return how many bytes the chunks of incomplete steps take at most: uncompressed, and whole."""
        first = [self._complete if d == self._dim else 0 for d in array.dims]
        chunks = [c or max(n, 1) for c, n in zip(array.chunks or array.shape, array.shape, strict=True)]
        counts = [ceil(n / c) - a // c for n, c, a in zip(array.shape, chunks, first, strict=True)]
        return prod(counts) * (prod(chunks) * np.dtype(array.dtype).itemsize * 101 // 100 + _OF_A_CHUNK)

    def _bytes_of_coordinates(self, arrays: StoredArrays) -> int:
        """Return the bytes of a chunk of those that grow, and of all of the others where nothing is complete."""
        size, written = 0, {a.name for a in arrays}
        for name, v in self._file.variables.items():
            grows = self._dim in v.dimensions
            if name not in written and (grows or not self._complete):
                size += 2 * prod(v.chunking() if grows else v.shape) * (64 if v.dtype is str else v.dtype.itemsize)
        return size

    @failing_with_remedy
    def put(self, name: str, box: Box, block: NDArray[Any]) -> None:
        self._file.variables[name][box_slices(box)] = block

    @failing_with_remedy
    def check_untouched(self) -> None:
        if _number_of_file(self._part) != self._held_file:
            raise WriteError(
                f"{self._part} was removed or replaced while this writer had it open; only one writer at a time may "
                "grow a file; open it anew with mode='a'"
            )

    @failing_with_remedy
    def commit(self, coords: StoredCoordinates, start: int, done: StoreCompleteness) -> None:
        for c in coords:
            sizes = zip(c.dims, c.values.shape, strict=True)
            box = tuple(slice(start, start + n) if d == self._dim else slice(0, n) for d, n in sizes)
            values = c.values.astype(object) if c.values.dtype.kind == "U" else c.values
            self._file.variables[c.name][box or ...] = values
        self._file.sync()  # write the steps before the attribute that says that they are complete
        self._file.setncatts(done.attrs())
        self._file.sync()
        self._complete = done.steps

    def close(self, done: bool) -> None:
        file, self._file = self._file, None
        if file is not None and done:
            with writing_to(self.path, self.remedy):
                self._finish(file)
        elif file is not None:
            # closing a file that could not be written fails again; the first failure is raised
            with suppress(RuntimeError, OSError):
                file.close()
        # of a part that another has put there since, this sink is not to judge
        if self._has_nothing_of_its_own and not done and _number_of_file(self._part) == self._held_file:
            with suppress(OSError):
                self._part.unlink(missing_ok=True)

    def _finish(self, file: Any) -> None:
        rows = len(file.dimensions[self._dim]) if self._dim in file.dimensions else self._complete
        if _GREW_FROM in file.ncattrs():
            file.delncattr(_GREW_FROM)
        file.close()
        if rows > self._complete:
            raise WriteError(
                f"{self._part} holds {self._complete} complete steps and a part of others, of a run that ended; go on "
                "with mode='a' until all are written"
            )
        self.check_untouched()
        os.replace(self._part, self.path)


def _open_netcdf4(path: Path, mode: Literal["r", "w", "a"]) -> Any:
    with imports_needed(WriteError, "writing NetCDF-4 needs the package netCDF4: pip install 'jigsaw-torch[netcdf]'"):
        import netCDF4
    return netCDF4.Dataset(str(path), mode, format="NETCDF4")


def _read_attrs(thing: Any) -> dict[str, Any]:
    return {name: plain_attribute(thing.getncattr(name)) for name in thing.ncattrs()}


def _netcdf_attribute(value: Any) -> Any:
    """Return an attribute as NetCDF holds it: text, numbers, lists of numbers; those of numpy keep their type."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iuf" and value.ndim < 2:
        return value
    value = plain_attribute(value)
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, str | int | float | list) else str(value)


def _netcdf_array(name: str, variable: Any, whole: tuple[slice, ...]) -> ArrayOutline:
    chunks, dtype = variable.chunking(), np.dtype(variable.dtype).name
    shape = tuple(min(n, s.stop or n) for n, s in zip(variable.shape, whole, strict=True))
    held = shape if chunks == "contiguous" else tuple(chunks)
    return ArrayOutline(name, tuple(variable.dimensions), shape, dtype, held, None, _read_attrs(variable))


def _netcdf_coordinate(name: str, variable: Any, whole: tuple[slice, ...]) -> StoredCoordinate:
    variable.set_auto_maskandscale(False)
    return StoredCoordinate(name, tuple(variable.dimensions), np.asarray(variable[whole or ...]), _read_attrs(variable))


def _attrs_of_kept(part: Path) -> Mapping[str, Any]:
    """Return the attributes of a part with complete steps, left by a run that ended; empty for any other file."""
    if part.is_symlink() or not part.is_file():
        return {}
    try:
        attrs = netcdf_attrs(part)
    except (OSError, RuntimeError):  # its writer was killed in the middle of a step
        return {}
    return attrs if attrs.get(COMPLETE_ATTRIBUTE) else {}


def _is_replaceable(part: Path) -> bool:
    """Say whether a part is a link, which alone is replaced, or looks like one left by a writer of jigsaw's.

    A writer that was killed may have left a file that cannot be opened; it begins as HDF5 does, or is empty.
    """
    if part.is_symlink() or not part.exists():
        return True
    if not part.is_file():
        return False
    with part.open("rb") as file:
        begin = file.read(len(_HDF5_SIGNATURE))
    try:
        looks_like_one = begin in (b"", bytes(len(begin)), _HDF5_SIGNATURE)
        return looks_like_one and not netcdf_attrs(part).keys().isdisjoint((COMPLETE_ATTRIBUTE, _GREW_FROM))
    except (OSError, RuntimeError):
        return True


def _refuse_open_part(part: Path) -> None:
    """Raise `WriteError` where a writer has the part open: libhdf5 locks a file that it writes.

    A file system without locks does not say; then `check_untouched` refuses the writer whose part is gone.
    """
    if not _is_open_elsewhere(part):
        return
    gc.collect()  # a writer of this process that nobody holds any more lets go
    if _is_open_elsewhere(part):
        raise WriteError(
            f"{part} is open in another writer, of this process or another; only one at a time may grow a file: "
            "close that one, or write elsewhere"
        )


def _is_open_elsewhere(part: Path) -> bool:
    if part.is_symlink() or not part.is_file():
        return False
    with part.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:  # other errors: this file system has no locks
            return isinstance(e, BlockingIOError)
    return False


def _number_of_file(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another that has its name later; None without a file."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino


def _begins_as_netcdf(path: Path) -> bool:
    """Say whether a path is a NetCDF file of any kind, or an empty one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(len(_HDF5_SIGNATURE))
    return begin in (b"", _HDF5_SIGNATURE) or begin.startswith((b"CDF\x01", b"CDF\x02", b"CDF\x05"))


def netcdf_attrs(path: Path) -> Mapping[str, Any]:
    """Return the global attributes of a file."""
    with _open_netcdf4(path, "r") as file:
        return _read_attrs(file)
