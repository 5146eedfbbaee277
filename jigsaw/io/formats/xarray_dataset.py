"""Chunk tables of an `xarray.Dataset`: whatever xarray opens or computes is read through it, a chunk at a time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable, dtype_with_declared_sign, missing_values_of
from jigsaw.io.formats.in_memory import FilelessPlaces

if TYPE_CHECKING:
    import xarray as xr


def open_xarray(dataset: xr.Dataset, options: Mapping[str, Any] | None = None) -> ArrayStore:
    """Open the chunk tables of a dataset as it is, including the user's selections, renamings and lazy computations.

    References that it reads may lead elsewhere only where ``options["outside"]`` allows it.
    """
    variables: Mapping[Any, xr.Variable] = dataset.variables
    if "zarr" in sys.modules:
        from jigsaw.io.formats.zarr_reach import check_references_within, checked_outside

        check_references_within(variables.values(), checked_outside((options or {}).get("outside")))
    tables = {str(name): _table_of_variable(str(name), variable) for name, variable in variables.items()}
    name = f"xarray dataset of {dataset.encoding.get('source', 'computed values')}"
    return ArrayStore(name, tables, dict(dataset.attrs), lambda name: np.asarray(variables[name].values))


def _table_of_variable(name: str, variable: xr.Variable) -> ArrayTable:
    chunks, lengths = _chunks_of_variable(variable)
    own = variable.dtype.newbyteorder("=")
    dtype, attrs = dtype_with_declared_sign(own, variable.attrs), dict(variable.attrs)

    def load(box: Box) -> NDArray[Any]:
        return np.asarray(variable[box_slices(box)].values)

    return ArrayTable(
        name=name,
        shape=tuple(variable.shape),
        dims=tuple(map(str, variable.dims)),
        dtype=dtype.str,
        chunks=chunks,
        attrs=attrs,
        # of what xarray has decoded it keeps such attributes elsewhere
        masks=missing_values_of(dtype, (attrs[k] for k in ("_FillValue", "missing_value") if k in attrs), own),
        places=FilelessPlaces(f"xarray variable {name!r}"),
        load_slowly=load,
        lengths=lengths,
        slices=not (variable.chunksizes or _is_from_grib(variable)),
    )


def _chunks_of_variable(variable: xr.Variable) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Return the shape of what is read as one, and the lengths of the chunks along each dim where they differ. These
    are dask's chunks, else those on disk, else one step of the first dim.
    """
    on_disk = _message_sizes(variable) if _is_from_grib(variable) else variable.encoding.get("preferred_chunks", {})
    lazy: Mapping[Any, tuple[int, ...]] = variable.chunksizes
    sizes = [
        max(lazy[dim]) if dim in lazy else on_disk.get(dim, 1 if i == 0 and variable.ndim > 2 else size)
        for i, (dim, size) in enumerate(zip(variable.dims, variable.shape, strict=True))
    ]
    lengths = {i: tuple(lazy[dim]) for i, dim in enumerate(variable.dims) if dim in lazy and _is_irregular(lazy[dim])}
    return tuple(max(1, min(chunk, size)) for chunk, size in zip(sizes, variable.shape, strict=True)), lengths


def _is_from_grib(variable: xr.Variable) -> bool:
    """Say whether cfgrib opened it, which decodes the whole message for any part of a field."""
    return "GRIB_gridType" in variable.attrs and "filter_by_keys" in variable.encoding


def _message_sizes(variable: xr.Variable) -> dict[Any, int]:
    """Return the sizes of one GRIB message: a field at one time, step, level and member."""
    field = ("latitude", "longitude", "y", "x", "values")
    return {dim: n if dim in field else 1 for dim, n in variable.sizes.items()}


def _is_irregular(lengths: tuple[int, ...]) -> bool:
    """Say whether the chunks before the last differ in length, or the last is longer than the first."""
    return len(set(lengths[:-1])) > 1 or lengths[-1] > lengths[0]
