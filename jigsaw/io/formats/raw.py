"""Files that hold one array as its values: raw files, described by the user, and `.npy`, which describes itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import prod
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jigsaw.errors import GridError, UnsupportedStoreError
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable, declared_missing_values
from jigsaw.io.chunks.files import BadChunkError, LocalFiles, ShortChunkError, StoreFiles
from jigsaw.io.formats import slab_arrays as slabs
from jigsaw.io.formats.array_source import tables_of_coordinates

RAW_ARRAY_NAME = "data"
"""Name of the one array of such a file."""
_NPY_MAGIC = b"\x93NUMPY"
_NPY_DIMS = ("time", "z", "y", "x")
_LONGEST_NPY_HEADER = 1 << 16


def claims(url: Any) -> bool:
    """Say whether a local file is `.npy`; raw files cannot be recognized."""
    return slabs.magic_bytes(url, len(_NPY_MAGIC)) == _NPY_MAGIC


def open_raw(
    path: str | os.PathLike[str],
    shape: Sequence[int],
    dtype: DTypeLike,
    dims: Sequence[str],
    offset: int = 0,
    order: str = "C",
    *,
    attrs: Mapping[str, Any] | None = None,
    coords: Mapping[str, Any] | None = None,
    files: StoreFiles | None = None,
) -> ArrayStore:
    """Open the array ``data`` of a file that holds its values from byte `offset` on, as a store for `jigsaw.io.open`.

    `shape` and `dims` are in the order of the array's indices. The last runs fastest with ``order="C"``, the first with
    ``order="F"``; `dtype` has the byte order (``">f4"``). `attrs` may have scale_factor, add_offset, _FillValue;
    `coords` has the values along dims, each an array or ``(array, attrs)``.

    Raises: `UnsupportedStoreError` for a missing file, objects, or another order; `GridError` for dims that do not fit
    the shape; `TruncatedError` for a file that is too short.

    >>> np.arange(24, dtype=">f4").tofile("field.bin")
    >>> store = jigsaw.io.open_raw("field.bin", (2, 3, 4), ">f4", dims=("z", "y", "x"))
    >>> jigsaw.io.open(store, mesh=jigsaw.init_mesh(depth=1))[0].input.local.flatten()[-1].item()
    23.0
    """
    described = tuple(shape), np.dtype(dtype), tuple(dims), offset, order
    return _store_of_values(os.fspath(path), files or LocalFiles(keep=True), *described, attrs or {}, coords or {})


def open_npy(
    url: str | os.PathLike[str],
    files: StoreFiles | None = None,
    *,
    dims: Sequence[str] | None = None,
    coords: Mapping[str, Any] | None = None,
) -> ArrayStore:
    """Open the array ``data`` of a `.npy` file.

    A `.npy` file does not name its dims: without `dims` they are the last of ``time, z, y, x``.

    Raises: `UnsupportedStoreError` for a file that is not `.npy` or holds pickled objects, `TruncatedError` for one
    that ends early, `CorruptChunkError` for a damaged header.

    >>> np.save("scan.npy", np.zeros((4, 33, 20), "float32"))
    >>> store = jigsaw.io.open_npy("scan.npy", dims=("z", "y", "x"))
    >>> store.arrays["data"].shape
    (4, 33, 20)
    """
    path, files = os.fspath(url), files or LocalFiles(keep=True)
    shape, fortran, dtype, offset = slabs.parse_named_file(path, ".npy", lambda: _npy_header(files, path))
    if dims is None:
        extra = tuple(f"dim_{i}" for i in range(len(shape) - len(_NPY_DIMS)))
        dims = (*extra, *_NPY_DIMS[max(0, len(_NPY_DIMS) - len(shape)) :])
    described = shape, dtype, tuple(dims), offset, "F" if fortran else "C"
    return _store_of_values(path, files, *described, {}, coords or {})


def _npy_header(files: StoreFiles, path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether the order is Fortran's, dtype, and where values begin; numpy parses it, without pickle."""
    file = BytesIO(slabs.file_head(files, path, _LONGEST_NPY_HEADER))
    if not file.getvalue().startswith(_NPY_MAGIC):
        raise UnsupportedStoreError(f"{path!r} is not a .npy file: it begins with {file.getvalue()[:6]!r}")
    numpy_format: Any = np.lib.format
    try:
        version = numpy_format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise UnsupportedStoreError(f"{path!r} is .npy of version {version}; those of numbers are (1, 0) or (2, 0)")
        shape, fortran, dtype = getattr(numpy_format, f"read_array_header_{version[0]}_0")(file)
    except (ValueError, SyntaxError, TypeError, TokenError) as e:
        kind = ShortChunkError if isinstance(e, ValueError) and "EOF" in str(e) else BadChunkError
        raise kind(f"its header: {e}") from e
    return tuple(shape), bool(fortran), dtype, file.tell()


def _store_of_values(
    path: str,
    files: StoreFiles,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    dims: tuple[str, ...],
    offset: int,
    order: str,
    attrs: Mapping[str, Any],
    coords: Mapping[str, Any],
) -> ArrayStore:
    if order not in ("C", "F"):
        raise UnsupportedStoreError(f"order={order!r} must be 'C' (the last index runs fastest) or 'F'")
    if len(shape) != len(dims) or len(set(dims)) != len(dims):
        raise GridError(f"dims={dims} must name each dim of shape={shape} once")
    if offset < 0 or any(n < 0 for n in shape):
        raise GridError(f"offset={offset} and shape={shape} must not be negative")
    if dtype.hasobject or dtype.names:
        raise UnsupportedStoreError(
            f"{path!r} holds {dtype}; arrays of plain values can be read, pickled objects never"
        )

    def describe() -> ArrayTable:
        size, claimed = slabs.file_size(files, path), prod(shape) * dtype.itemsize
        if offset + claimed > size:
            raise ShortChunkError(
                f"shape {shape} of {dtype} takes {claimed} bytes from byte {offset} on, and the file has {size}"
            )
        stored_order = tuple(range(len(shape)))[:: -1 if order == "F" else 1]
        places = slabs.slab_places(files, path, offset, shape, dtype.itemsize, stored_order)
        masks = declared_missing_values(dtype, attrs)
        return slabs.table_of_slabs(RAW_ARRAY_NAME, places, dims, dtype, attrs, stored_order, masks)

    table = slabs.parse_named_file(path, "an array", describe)
    tables, values = tables_of_coordinates(coords, dict(zip(dims, shape, strict=True)), path)

    def read(name: str) -> NDArray[Any]:
        return values[name] if name in values else slabs.read_whole_coordinate(table)

    return ArrayStore(path, {RAW_ARRAY_NAME: table, **tables}, {}, read)
