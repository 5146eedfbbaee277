"""NetCDF-4: one rank writes, the others send it their boxes, a few units at a time.

HDF5 without MPI cannot be written by several processes at once, and a file that a killed process was writing may not
open.  So the file grows beside its name, as ``NAME.part``, and takes its name when it is whole; what is at the path
before stays there until then.  After every append the part is flushed and says how many steps are complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.errors import WriteError
from jigsaw.io.packages import why_not_imported
from jigsaw.io.writing.cf import Coordinate, plain
from jigsaw.io.writing.outline import Array, Found
from jigsaw.io.writing.sink import Completeness, completeness_of
from jigsaw.layout import Box, slices

_DEFLATE: Mapping[str, Any] = {"compression": "zlib", "complevel": 1, "shuffle": True}
_STEPS_A_CHUNK = 1024
# what NetCDF lacks, and what holds it exactly
_HELD = {"bool": "i1", "float16": "f4"}


class NetcdfSink:
    """A NetCDF-4 file that the first rank writes."""

    writers: tuple[int, ...] = (0,)

    def __init__(self, path: Path, append_dim: str | None, encoding: Mapping[str, Any]) -> None:
        self._path, self._dim = path, append_dim
        self._part = path.with_name(f"{path.name}.part")
        self._encoding = {**_DEFLATE, **{k: v for k, v in encoding.items() if k != "dtype"}}
        self._file: Any = None

    def find(self, append_dim: str) -> Found | None:
        """The file as far as it is complete; a copy of it grows."""
        if not self._path.exists():
            return None
        shutil.copyfile(self._path, self._part)
        self._file = _open(self._part, "a")
        if append_dim not in self._file.dimensions or not self._file.dimensions[append_dim].isunlimited():
            raise WriteError(f"{self._path} has no unlimited dim {append_dim!r} to grow along; write a new file")
        done = completeness_of(_attrs(self._file))
        steps = len(self._file.dimensions[append_dim]) if done is None else done.steps
        variables: Mapping[str, Any] = self._file.variables
        listed = {c for v in variables.values() for c in str(_attrs(v).get("coordinates", "")).split()}
        coords = {n: _coordinate(n, v) for n, v in variables.items() if n in listed or v.dimensions == (n,)}
        return Found({n: _array(n, v) for n, v in variables.items() if n not in coords}, coords, steps)

    def create(
        self, arrays: Sequence[Array], coords: Sequence[Coordinate], attrs: Mapping[str, Any], replace: bool
    ) -> None:
        if self._path.exists() and not replace:
            raise WriteError(f"{self._path} exists; write elsewhere, or choose mode='w' to replace or 'a' to append")
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open(self._part, "w")
        sizes = {d: n for a in arrays for d, n in zip(a.dims, a.shape, strict=True)}
        for dim, size in sizes.items():
            self._file.createDimension(dim, None if dim == self._dim else size)
        self._file.setncatts({k: _attribute(v) for k, v in attrs.items()} | Completeness(self._dim, 0, False).attrs())
        for array in arrays:
            made = self._file.createVariable(
                array.name,
                array.dtype,
                array.dims,
                chunksizes=array.chunks or None,
                fill_value=array.attrs.get("_FillValue", array.fill if np.dtype(array.dtype).kind == "f" else None),
                **(self._encoding if array.dims else {}),
            )
            made.setncatts({k: _attribute(v) for k, v in array.attrs.items() if k != "_FillValue"})
        for c in coords:
            self._create_coordinate(c)
        self._plain()

    def _create_coordinate(self, c: Coordinate) -> None:
        grows = self._dim in c.dims
        chunks = [_STEPS_A_CHUNK if d == self._dim else max(n, 1) for d, n in zip(c.dims, c.values.shape, strict=True)]
        kind = str if c.values.dtype.kind == "U" else _HELD.get(c.values.dtype.name, c.values.dtype)
        fill = c.attrs.get("_FillValue")
        made = self._file.createVariable(c.name, kind, c.dims, chunksizes=chunks if grows else None, fill_value=fill)
        made.setncatts({k: _attribute(v) for k, v in c.attrs.items() if k != "_FillValue"})

    def _plain(self) -> None:
        """Values are written as they are given: no masks, no packing."""
        self._file.set_auto_maskandscale(False)

    def attach(self, arrays: Sequence[Array]) -> None:
        if self._file is not None:
            self._plain()

    def put(self, name: str, box: Box, block: NDArray[Any]) -> None:
        self._file.variables[name][slices(box)] = block

    def commit(self, coords: Sequence[Coordinate], start: int, done: Completeness) -> None:
        for c in coords:
            sizes = zip(c.dims, c.values.shape, strict=True)
            box = tuple(slice(start, start + n) if d == self._dim else slice(0, n) for d, n in sizes)
            values = c.values.astype(object) if c.values.dtype.kind == "U" else c.values
            self._file.variables[c.name][box or ...] = values
        self._file.sync()  # the steps, before what says that they are complete
        self._file.setncatts(done.attrs())
        self._file.sync()

    def close(self, done: bool) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        if done:
            file.close()
            os.replace(self._part, self._path)
        else:  # a file that could not be written may not close either; the first failure is the one to tell
            with suppress(RuntimeError, OSError):
                file.close()


def _open(path: Path, mode: Literal["r", "w", "a"]) -> Any:
    try:
        import netCDF4
    except ImportError as missing:
        absent = "writing NetCDF-4 needs the package netCDF4: pip install 'jigsaw-torch[netcdf]'"
        raise WriteError(why_not_imported(missing, absent)) from missing
    return netCDF4.Dataset(str(path), mode, format="NETCDF4")


def _attrs(thing: Any) -> dict[str, Any]:
    return {name: plain(thing.getncattr(name)) for name in thing.ncattrs()}


def _attribute(value: Any) -> Any:
    """An attribute as NetCDF holds it: text, numbers, lists of numbers; those of numpy keep their type."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iuf" and value.ndim < 2:
        return value
    value = plain(value)
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, str | int | float | list) else str(value)


def _array(name: str, variable: Any) -> Array:
    chunks = variable.chunking()
    shape = tuple(variable.shape)
    return Array(
        name,
        tuple(variable.dimensions),
        shape,
        np.dtype(variable.dtype).name,
        shape if chunks == "contiguous" else tuple(chunks),
        None,
        _attrs(variable),
    )


def _coordinate(name: str, variable: Any) -> Coordinate:
    variable.set_auto_maskandscale(False)
    return Coordinate(name, tuple(variable.dimensions), np.asarray(variable[...]), _attrs(variable))


def netcdf_attrs(path: Path) -> Mapping[str, Any]:
    """The global attributes of a file."""
    file = _open(path, "r")
    try:
        return _attrs(file)
    finally:
        file.close()
