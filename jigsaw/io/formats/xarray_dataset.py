"""An `xarray.Dataset` as chunk tables: whatever xarray opens or computes is read through it, a chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.chunk import ChunkRef
from jigsaw.io.chunk_grid import Index
from jigsaw.io.fetch.files import Files, Local
from jigsaw.io.formats.packing import masks_of, signed_as_said
from jigsaw.io.table import ArrayTable, Store
from jigsaw.layout import Box, slices

if TYPE_CHECKING:
    import xarray as xr


def open_xarray(dataset: xr.Dataset) -> Store:
    """The chunk tables of a dataset as it is now: selections, renamings and lazy computations of the user included."""
    variables: Mapping[Any, xr.Variable] = dataset.variables
    tables = {str(name): _table(str(name), variable) for name, variable in variables.items()}
    name = f"xarray dataset of {dataset.encoding.get('source', 'computed values')}"
    return Store(name, tables, dict(dataset.attrs), lambda name: np.asarray(variables[name].values))


def _table(name: str, variable: xr.Variable) -> ArrayTable:
    chunks, lengths = _chunks(variable)
    own = variable.dtype.newbyteorder("=")
    dtype, attrs = signed_as_said(own, variable.attrs), dict(variable.attrs)

    def load(box: Box) -> NDArray[Any]:
        return np.asarray(variable[slices(box)].values)

    return ArrayTable(
        name=name,
        shape=tuple(variable.shape),
        dims=tuple(map(str, variable.dims)),
        dtype=dtype.str,
        chunks=chunks,
        fill_value=None,
        attrs=attrs,
        # of what xarray has decoded it keeps such attributes elsewhere
        masks=masks_of(dtype, (attrs[k] for k in ("_FillValue", "missing_value") if k in attrs), own),
        decoder=None,
        places=_Places(name),
        load_slowly=load,
        lengths=lengths,
        slices=not (variable.chunksizes or _is_grib(variable)),
    )


def _chunks(variable: xr.Variable) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """What is read as one: dask's chunks, else those on disk, else one step of the first dim.

    With them the lengths along each dim whose chunks differ.
    """
    on_disk = _messages(variable) if _is_grib(variable) else variable.encoding.get("preferred_chunks", {})
    lazy: Mapping[Any, tuple[int, ...]] = variable.chunksizes
    sizes = [
        max(lazy[dim]) if dim in lazy else on_disk.get(dim, 1 if i == 0 and variable.ndim > 2 else size)
        for i, (dim, size) in enumerate(zip(variable.dims, variable.shape, strict=True))
    ]
    lengths = {i: tuple(lazy[dim]) for i, dim in enumerate(variable.dims) if dim in lazy and _differ(lazy[dim])}
    return tuple(max(1, min(chunk, size)) for chunk, size in zip(sizes, variable.shape, strict=True)), lengths


def _is_grib(variable: xr.Variable) -> bool:
    """Whether cfgrib opened it: it decodes the whole message for any part of a field."""
    return "GRIB_gridType" in variable.attrs and "filter_by_keys" in variable.encoding


def _messages(variable: xr.Variable) -> dict[Any, int]:
    """The sizes of one GRIB message: a field at one time, step, level and member."""
    field = ("latitude", "longitude", "y", "x", "values")
    return {dim: n if dim in field else 1 for dim, n in variable.sizes.items()}


def _differ(lengths: tuple[int, ...]) -> bool:
    """Whether chunks other than the last are not all as long as the first, or the last is longer."""
    return len(set(lengths[:-1])) > 1 or lengths[-1] > lengths[0]


class _Places:
    """Chunks that xarray finds: their stored sizes are not known."""

    def __init__(self, name: str) -> None:
        self._name = name

    def path(self, index: Index) -> str:
        return f"xarray variable {self._name!r}"

    @property
    def files(self) -> Files:
        return Local()

    def locate(self, index: Index) -> ChunkRef | None:
        return ChunkRef(self.path(index), 0, None)
