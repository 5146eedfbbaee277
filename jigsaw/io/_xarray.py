"""An `xarray.Dataset` as chunk tables: whatever xarray opens or computes is read through it, a chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io._codecs import BadChunkError, Bytes
from jigsaw.io.table import ArrayTable, ChunkRef, Index, Store

if TYPE_CHECKING:
    import xarray as xr


def open_xarray(dataset: xr.Dataset) -> Store:
    """The chunk tables of a dataset as it is now: selections, renamings and lazy computations of the user included."""
    variables: Mapping[Any, xr.Variable] = dataset.variables
    tables = {str(name): _table(str(name), variable) for name, variable in variables.items()}
    name = f"xarray dataset of {dataset.encoding.get('source', 'computed values')}"
    return Store(name, tables, dict(dataset.attrs), lambda name: np.asarray(variables[name].values))


def _table(name: str, variable: xr.Variable) -> ArrayTable:
    chunks = _chunks(variable)

    def load(index: Index) -> NDArray[Any]:
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))
        return np.asarray(variable[box].values)

    return ArrayTable(
        name=name,
        shape=tuple(variable.shape),
        dims=tuple(map(str, variable.dims)),
        dtype=variable.dtype.newbyteorder("=").str,
        chunks=chunks,
        fill_value=None,
        attrs=dict(variable.attrs),
        masks=(),  # xarray has decoded missing values to NaN
        decoder=None,
        places=_Places(name),
        load_slowly=load,
    )


def _chunks(variable: xr.Variable) -> tuple[int, ...]:
    """What is read as one: dask's chunks, else those on disk, else one step of the first dim."""
    on_disk = variable.encoding.get("preferred_chunks", {})
    lazy: Mapping[Any, tuple[int, ...]] = variable.chunksizes
    sizes = [
        max(lazy[dim]) if dim in lazy else on_disk.get(dim, 1 if i == 0 and variable.ndim > 2 else size)
        for i, (dim, size) in enumerate(zip(variable.dims, variable.shape, strict=True))
    ]
    return tuple(max(1, min(chunk, size)) for chunk, size in zip(sizes, variable.shape, strict=True))


class _Places:
    """Chunks that xarray finds: their stored sizes are not known."""

    def __init__(self, name: str) -> None:
        self._name = name

    def path(self, index: Index) -> str:
        return f"xarray variable {self._name!r}"

    def locate(self, index: Index) -> ChunkRef | None:
        return ChunkRef(self.path(index), 0, 0)

    def read(self, index: Index, room: Any) -> Bytes | None:
        raise BadChunkError("it is read through xarray")
