"""Given objects as stores: a user's class that reads boxes of its arrays, an `xarray.Dataset`, values in memory.

Whatever xarray opens or computes is read through it, a chunk at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jigsaw.errors import GridError, ReadError, UnsupportedStoreError
from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable, declared_missing_values, dtype_with_declared_sign
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkPlaces, ChunkRef, ObjectPerChunk
from jigsaw.io.chunks.chunk_finder import IndexedPlaces, LookupCounts
from jigsaw.io.chunks.files import LocalFiles, StoreFiles
from jigsaw.io.formats.slab_arrays import slab_places
from jigsaw.io.series.times import is_whole_number

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class SourceArray:
    """Description of an array of a source, before any of it is read: `dims` names each dim of its `shape`.

    `attrs` mean what they mean in a file: scale_factor, add_offset, _FillValue, standard_name, units….

    >>> array = jigsaw.io.SourceArray((8, 9, 16), "float32", ("time", "lat", "lon"), {"units": "K"})
    >>> array.shape, array.attrs
    ((8, 9, 16), {'units': 'K'})
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    dims: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@runtime_checkable
class ArraySource(Protocol):
    """Protocol of a user's class that `jigsaw.io.open` reads from: an object with `arrays` and `read`.

    `arrays` describes them by name. ``read(array, box)`` returns the values of a box: ``box`` has a pair (start, stop)
    for each dim, and the result has exactly that shape and the described dtype. It is called from several threads at a
    time, on every rank for what that rank loads. Further members are optional:

    - `coords`: the values along dims by name, each an array or ``(array, attrs)``; datetime64 for times;
    - ``chunks(array)``: the shape of what is best read at once, an entry a dim.  Then ``read`` is only asked for whole
      chunks, each once by one rank where that is cheaper; without it, for the very boxes that ranks need, at most a
      step (or 16 MB) at a time;
    - `attrs`: of the whole.

    A source that pickles can be read in other processes.

    >>> class Ones:
    ...     arrays = {"t2m": jigsaw.io.SourceArray((8, 9, 16), "float32", ("time", "lat", "lon"))}
    ...     def read(self, array, box):
    ...         return np.ones([stop - start for start, stop in box], "float32")
    >>> jigsaw.io.open(Ones(), mesh=jigsaw.init_mesh(lat=1))[0].input.shape
    torch.Size([1, 1, 9, 16])
    """

    @property
    def arrays(self) -> Mapping[str, SourceArray]: ...

    def read(self, array: str, box: Box) -> NDArray[Any]: ...


def claims(url: Any) -> bool:
    """Say whether an object is a user's source."""
    return not isinstance(url, str | ArrayStore | type) and isinstance(url, ArraySource) and callable(url.read)


def open_array_source(source: ArraySource) -> ArrayStore:
    """Open the arrays of a source as chunk tables; an inconsistent description is refused."""
    label = f"source {type(source).__qualname__}"
    arrays = _mapping_of_source(source, "arrays", "{'t2m': jigsaw.io.SourceArray(shape, dtype, dims)}", label)
    described = {name: _describe_array(name, array, label) for name, array in arrays.items()}
    if not described:
        raise UnsupportedStoreError(f"{label} describes no array: its arrays are empty")
    sizes = _sizes_by_dim(described, label)
    coords_by_name = _mapping_of_source(source, "coords", "{'lat': values}", label)
    coords, values = tables_of_coordinates(coords_by_name, sizes, label)
    tables = {name: _table_of_source(source, name, array, label) for name, array in described.items()}

    def read_small(name: str) -> NDArray[Any]:
        if name in values:
            return values[name]
        return _read_from_source(source, name, described[name], tuple((0, n) for n in described[name].shape))

    attrs = _mapping_of_source(source, "attrs", "{'title': 'mine'}", label)
    return ArrayStore(label, {**tables, **coords}, dict(attrs), read_small)


def _mapping_of_source(source: ArraySource, member: str, example: str, label: str) -> Mapping[str, Any]:
    """Return the mapping that a source has under a name; empty where it has none."""
    mapping = getattr(source, member, {})
    if not isinstance(mapping, Mapping):
        kind = "a method" if callable(mapping) else f"a {type(mapping).__name__}"
        raise UnsupportedStoreError(
            f"{label}: {member} is {kind}, and an attribute or property is asked for that says it by name, like "
            f"{example}"
        )
    return cast(Mapping[str, Any], mapping)


def _describe_array(name: str, array: Any, label: str) -> SourceArray:
    try:
        own = SourceArray(
            tuple(int(n) for n in array.shape),
            np.dtype(array.dtype),
            tuple(str(d) for d in array.dims),
            dict(getattr(array, "attrs", {})),
        )
    except (AttributeError, TypeError) as e:
        raise UnsupportedStoreError(
            f"{label} describes array {name!r} by {array!r}; give jigsaw.io.SourceArray(shape, dtype, dims): {e}"
        ) from e
    if len(own.shape) != len(own.dims) or len(set(own.dims)) != len(own.dims) or any(n < 1 for n in own.shape):
        raise GridError(f"{label}: dims {own.dims} must name each dim of array {name!r}, of shape {own.shape}, once")
    return own


def _sizes_by_dim(arrays: Mapping[str, SourceArray], label: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        for dim, size in zip(array.dims, array.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise GridError(f"{label}: dim {dim!r} has {sizes[dim]} rows and {size} in array {name!r}")
    return sizes


def _table_of_source(source: ArraySource, name: str, array: SourceArray, label: str) -> ArrayTable:
    own, own_chunks = np.dtype(array.dtype), _chunks_of_source(source, name, array, label)
    dtype = dtype_with_declared_sign(own, array.attrs)
    return ArrayTable(
        name=name,
        shape=array.shape,
        dims=array.dims,
        dtype=dtype.str,
        chunks=own_chunks or slab_places(LocalFiles(), label, 0, array.shape, dtype.itemsize).chunks,
        attrs=array.attrs,
        masks=declared_missing_values(dtype, array.attrs, own),
        places=FilelessPlaces(f"{label}, array {name!r}"),
        load_slowly=partial(_read_from_source, source, name, array),
        clipped=True,
        slices=own_chunks is None,
    )


def _chunks_of_source(source: ArraySource, name: str, array: SourceArray, label: str) -> tuple[int, ...] | None:
    ask = getattr(source, "chunks", None)
    if ask is not None and not callable(ask):
        raise UnsupportedStoreError(
            f"{label}: chunks is {ask!r}, and a method is asked for that gives the chunks of an array by its name: "
            "def chunks(self, array): return …"
        )
    answer: Any = None if ask is None else ask(name)
    if answer is None:
        return None
    rows = tuple(answer) if isinstance(answer, tuple | list) else ()
    if len(rows) != len(array.shape) or not all(is_whole_number(c) and c >= 1 for c in rows):
        raise GridError(
            f"{label}: chunks({name!r}) gave {answer!r}; it gives the rows of a chunk for each of {array.dims}"
        )
    return tuple(min(int(c), n) for c, n in zip(rows, array.shape, strict=True))


def _read_from_source(source: ArraySource, name: str, array: SourceArray, box: Box) -> NDArray[Any]:
    """Read the values of a box and check them; an error of the user's code becomes a `ReadError` on every rank."""
    call = f"{type(source).__qualname__}.read({name!r}, {box})"
    try:
        values = source.read(name, box)
    except ReadError:
        raise
    except Exception as e:  # the user's code may raise anything
        raise ReadError(f"{call} raised {type(e).__name__}: {e}") from e
    shape = tuple(b - a for a, b in box)
    if not hasattr(values, "dtype") or values.dtype != np.dtype(array.dtype) or tuple(values.shape) != shape:
        answer = f"{values.dtype}{list(values.shape)}" if hasattr(values, "dtype") else type(values).__name__
        raise ReadError(f"{call} gave {answer}, and {np.dtype(array.dtype)}{list(shape)} is what arrays describes")
    return without_mask(values, call).view(dtype_with_declared_sign(np.dtype(array.dtype), array.attrs))


def without_mask(values: Any, label: str) -> NDArray[Any]:
    """Return an array's values, NaN where it is masked.  Raises: `ReadError` for masked values of integers."""
    if not isinstance(values, np.ma.MaskedArray) or not np.ma.is_masked(values):  # pyright: ignore[reportUnknownMemberType]
        return np.asarray(values)
    masked: Any = values
    if masked.dtype.kind not in "fc":
        raise ReadError(
            f"{label}: masked values of {masked.dtype}, which has no NaN for them; give floats, or what stands there "
            "(x.filled(value); of netCDF4 set_auto_mask(False), with _FillValue among the attributes)"
        )
    return np.asarray(masked.filled(np.nan))


def tables_of_coordinates(
    coords: Mapping[str, Any], sizes: Mapping[str, int], of: str
) -> tuple[dict[str, ArrayTable], dict[str, NDArray[Any]]]:
    """Return tables and values of the coordinates along dims of these sizes: each an array, or ``(array, attrs)``."""
    tables: dict[str, ArrayTable] = {}
    held: dict[str, NDArray[Any]] = {}
    for name, entry in coords.items():
        values, attrs = entry if isinstance(entry, tuple) and isinstance(entry[-1], Mapping) else (entry, {})
        held[name] = without_mask(values, f"coords[{name!r}] of {of}")
        if name not in sizes or held[name].shape != (sizes[name],):
            raise GridError(
                f"coords[{name!r}] of {of} has shape {held[name].shape}; the dims are {dict(sizes)}, and coordinates "
                "have the size of the dim that they are named after"
            )
        tables[name] = table_of_values(name, held[name], (name,), attrs, of)
    return tables, held


def table_of_values(
    name: str, values: NDArray[Any], dims: tuple[str, ...], attrs: Mapping[str, Any], of: str
) -> ArrayTable:
    """Return a table of one chunk that has these values."""
    return ArrayTable(
        name=name,
        shape=values.shape,
        dims=dims,
        dtype=values.dtype.str,
        chunks=tuple(max(n, 1) for n in values.shape),
        attrs=dict(attrs),
        places=FilelessPlaces(f"{of}, in memory"),
        load_slowly=lambda box: values[box_slices(box)],
        clipped=True,
        slices=True,
    )


class FilelessPlaces:
    """Places outside of any file: `label` names them in messages; `length` is that of a chunk if it were in a file."""

    def __init__(self, label: str, length: int | None = None) -> None:
        self._label, self._length = label, length

    @property
    def files(self) -> StoreFiles:
        return LocalFiles()

    def path(self, index: ChunkIndex) -> str:
        return self._label

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        return ChunkRef(self.path(index), 0, self._length)


class WrappedPlaces:
    """Places of an array that are read through other `files`, or looked up by the first dims of an index.

    `tail` is the number of its chunk along the dims that such an index lacks.
    """

    def __init__(
        self, places: ChunkPlaces, files: StoreFiles | None = None, dims: int | None = None, tail: ChunkIndex = ()
    ) -> None:
        self._places: Any = places
        self.files, self._dims, self._tail = files or places.files, dims, tail

    def own_index(self, index: ChunkIndex) -> ChunkIndex:
        return index[: self._dims] + self._tail

    def path(self, index: ChunkIndex) -> str:
        return self._places.path(self.own_index(index))

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        return self._places.locate(self.own_index(index))

    def lacks_object(self, index: ChunkIndex) -> bool:
        return isinstance(self._places, ObjectPerChunk) and self._places.lacks_object(self.own_index(index))

    def lost_metadata(self) -> str | None:
        return self._places.lost_metadata() if isinstance(self._places, ObjectPerChunk) else None


class WrappedIndexedPlaces(WrappedPlaces):
    """`WrappedPlaces` of an array whose places look chunks up in indices, which they keep themselves."""

    @property
    def counted(self) -> LookupCounts:
        return self._places.counted

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts]:
        return self._places.index_of(self.own_index(index))


def wrap_places(
    places: ChunkPlaces, files: StoreFiles | None = None, dims: int | None = None, tail: ChunkIndex = ()
) -> WrappedPlaces:
    """Wrap the places of an array, with the members that they have."""
    return (WrappedIndexedPlaces if isinstance(places, IndexedPlaces) else WrappedPlaces)(places, files, dims, tail)


def open_xarray(dataset: xr.Dataset, options: Mapping[str, Any] | None = None) -> ArrayStore:
    """Open the chunk tables of a dataset as it is, including the user's selections, renamings and lazy computations.

    Arrays are in the order of their names.

    References that it reads may lead elsewhere only where ``options["outside"]`` allows it.
    """
    variables: Mapping[Any, xr.Variable] = dataset.variables
    if "zarr" in sys.modules:
        from jigsaw.io.formats.zarr_reach import check_references_within, checked_outside

        check_references_within(variables.values(), checked_outside((options or {}).get("outside")))
    # by name, as of a Zarr store: xarray lists one without consolidated metadata in an order that changes, and ranks,
    # and the run that goes on, must read the same channels
    named = sorted(((str(name), v) for name, v in variables.items()), key=lambda pair: pair[0])
    tables = {name: _table_of_variable(name, variable) for name, variable in named}
    name = f"xarray dataset of {dataset.encoding.get('source', 'computed values')}"
    encodings = (dataset.encoding, *(v.encoding for v in variables.values()))
    files = tuple(sorted({str(e["source"]) for e in encodings if e.get("source")}))
    return ArrayStore(name, tables, dict(dataset.attrs), lambda name: np.asarray(variables[name].values), files=files)


def _table_of_variable(name: str, variable: xr.Variable) -> ArrayTable:
    chunks, lengths = _chunks_of_variable(variable)
    own = variable.dtype.newbyteorder("=")
    # with decode_coords="all" xarray moves attributes that name other variables aside
    moved = {key: variable.encoding[key] for key in ("grid_mapping", "cell_measures") if key in variable.encoding}
    dtype, attrs = dtype_with_declared_sign(own, variable.attrs), {**moved, **variable.attrs}

    return ArrayTable(
        name=name,
        shape=tuple(variable.shape),
        dims=tuple(map(str, variable.dims)),
        dtype=dtype.str,
        chunks=chunks,
        attrs=attrs,
        # where xarray has decoded values, it moved these attributes to `encoding`
        masks=declared_missing_values(dtype, attrs, own),
        places=FilelessPlaces(f"xarray variable {name!r}"),
        load_slowly=lambda box: np.asarray(variable[box_slices(box)].values),
        compared=True,
        lengths=lengths,
        slices=not (variable.chunksizes or _is_from_grib(variable)),
    )


def _chunks_of_variable(variable: xr.Variable) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Return the chunk of a variable (dask's, else that on disk, else a step), and lengths along dims where chunks
    differ.
    """
    on_disk = variable.encoding.get("preferred_chunks", {})
    if _is_from_grib(variable):  # a message is a field at one time, step, level and member
        field_dims = ("latitude", "longitude", "y", "x", "values")
        on_disk = {dim: n if dim in field_dims else 1 for dim, n in variable.sizes.items()}
    lazy: Mapping[Any, tuple[int, ...]] = variable.chunksizes
    sizes = [
        max(lazy[dim]) if dim in lazy else on_disk.get(dim, 1 if i == 0 and variable.ndim > 2 else size)
        for i, (dim, size) in enumerate(zip(variable.dims, variable.shape, strict=True))
    ]
    by_dim = {i: tuple(lazy[dim]) for i, dim in enumerate(variable.dims) if dim in lazy}
    lengths = {i: rows for i, rows in by_dim.items() if len(set(rows[:-1])) > 1 or rows[-1] > rows[0]}
    return tuple(max(1, min(chunk, size)) for chunk, size in zip(sizes, variable.shape, strict=True)), lengths


def _is_from_grib(variable: xr.Variable) -> bool:
    """Say whether cfgrib opened a variable; it decodes a whole message for any part of a field."""
    return "GRIB_gridType" in variable.attrs and "filter_by_keys" in variable.encoding
