"""Stores of anemoi-datasets on regular grids: ``data[time, variable, ensemble, cell]`` as variables on lat and lon.

The cells of a regular grid are its rows of latitude, one after the other. A chunk of whole rows therefore has the same
bytes on both grids, and is read like any other. For a chunk that ends within a row, zarr reads the cells of a box.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.chunk import ChunkPlaces, ChunkRef, ObjectPerChunk
from jigsaw.io.chunks.chunk_finder import IndexedPlaces, LookupCounts
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.chunks.files import StoreFiles
from jigsaw.io.formats.in_memory import FilelessPlaces, table_of_values

_DATA_DIMS = ("time", "variable", "ensemble", "cell")
_CELL_COORDINATES = {"latitudes": {"units": "degrees_north"}, "longitudes": {"units": "degrees_east"}}
_DEGREES_APART = 1e-4


class _Coordinate(NamedTuple):
    """Coordinate that a store gives along a dim of `data`."""

    name: str
    dim: str
    values: NDArray[Any]
    attrs: Mapping[str, Any]


def is_anemoi_store(store: ArrayStore) -> bool:
    """Say whether a store has the layout of anemoi-datasets."""
    data, cells = store.arrays.get("data"), [store.arrays.get(name) for name in _CELL_COORDINATES]
    return data is not None and len(data.dims) == 4 and all(cells) and isinstance(store.attrs.get("variables"), list)


def anemoi_as_fields(store: ArrayStore) -> ArrayStore:
    """Return the store with a channel for each of its variables and `data` on lat and lon. On other than regular grids
    its cells stay, each with its own latitude and longitude.

    Raises: `GridError` where a description of `data` is not as long as its dims.
    """
    data = replace(store.arrays["data"], dims=_DATA_DIMS)
    values = {name: store.read_small(name) for name in ("dates", *_CELL_COORDINATES) if name in store.arrays}
    values["variable"] = np.array([str(name) for name in store.attrs["variables"]])
    for name, found in values.items():
        d = {"dates": 0, "variable": 1}.get(name, 3)
        if found.shape != (data.shape[d],):
            raise GridError(
                f"{store.url}: 'data' has {data.shape[d]} rows along {_DATA_DIMS[d]!r}, and its {name} have the shape "
                f"{found.shape}; write both equally long"
            )
    coords = [_Coordinate("variable", "variable", values["variable"], {})]
    if "dates" in values:
        missing = {"missing_dates": [str(date) for date in store.attrs.get("missing_dates", ())]}
        coords.append(_Coordinate("time", "time", values["dates"], missing))
    rows = _rows_of_cells(values["latitudes"], values["longitudes"])
    for name, attrs in _CELL_COORDINATES.items():
        if rows is None:
            coords.append(_Coordinate(name, "cell", values[name], attrs))
        else:
            dim, grid = name[:3], values[name].reshape(rows, -1)
            coords.append(_Coordinate(dim, dim, grid[:, 0] if dim == "lat" else grid[0], attrs))
    known = {c.name: c.values for c in coords}
    tables = {
        **{name: table for name, table in store.arrays.items() if name not in _CELL_COORDINATES},
        "data": data if rows is None else _on_rows(data, rows, store.url),
        **{c.name: table_of_values(c.name, c.values, (c.dim,), c.attrs, store.url) for c in coords},
    }

    def read_small(name: str) -> NDArray[Any]:
        return known[name] if name in known else store.read_small(name)

    return ArrayStore(store.url, tables, store.attrs, read_small, store.notes)


def _rows_of_cells(latitudes: NDArray[Any], longitudes: NDArray[Any]) -> int | None:
    """Return the number of rows of latitude that the cells form; None where they are not a regular grid."""
    other = np.flatnonzero(np.abs(latitudes - latitudes[0]) > _DEGREES_APART) if latitudes.size else []
    columns = int(other[0]) if len(other) else latitudes.size
    if columns < 2 or latitudes.size % columns:
        return None
    lat, lon = latitudes.reshape(-1, columns), longitudes.reshape(-1, columns)
    near = [np.abs(lat - lat[:, :1]).max(), np.abs(lon - lon[:1]).max()]
    return len(lat) if max(near) <= _DEGREES_APART else None


def _on_rows(data: ArrayTable, rows: int, url: str) -> ArrayTable:
    """Return the array with its cells as rows and columns."""
    columns = data.shape[3] // rows
    shape, dims = (*data.shape[:3], rows, columns), (*_DATA_DIMS[:3], "lat", "lon")
    decoder, places = data.decoder, data.places
    even = not data.lengths and data.chunks[3] % columns == 0
    if even and isinstance(decoder, CodecDecoder) and decoder.order == (0, 1, 2, 3):
        return replace(
            data,
            shape=shape,
            dims=dims,
            chunks=(*data.chunks[:3], data.chunks[3] // columns, columns),
            decoder=replace(decoder, order=(0, 1, 2, 3, 4)),
            places=_IndexedCells(places, places) if isinstance(places, IndexedPlaces) else _CellPlaces(places),
        )
    return replace(
        data,
        shape=shape,
        dims=dims,
        dtype=np.dtype(data.dtype).newbyteorder("=").str,
        chunks=(*data.chunks[:3], rows, columns),
        decoder=None,
        places=FilelessPlaces(f"{url}, array 'data'"),
        load_slowly=partial(_load_rows, data, columns),
        lengths={},
        slices=True,
    )


def _load_rows(data: ArrayTable, columns: int, box: Box) -> NDArray[Any]:
    """Load the values of a box of rows, by way of the cells of whole rows."""
    *lead, (first, stop), (west, east) = box
    cells = data.load_slowly((*lead, (first * columns, stop * columns)))
    return cells.reshape(*cells.shape[:3], stop - first, columns)[..., west:east]


class _CellPlaces:
    """The places of chunks of cells, asked for by rows and columns; a chunk has whole rows."""

    def __init__(self, places: ChunkPlaces) -> None:
        self._places = places

    @property
    def files(self) -> StoreFiles:
        return self._places.files

    def path(self, index: ChunkIndex) -> str:
        return self._places.path(index[:4])

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        return self._places.locate(index[:4])

    def lacks_object(self, index: ChunkIndex) -> bool:
        return isinstance(self._places, ObjectPerChunk) and self._places.lacks_object(index[:4])

    def lost_metadata(self) -> str | None:
        return self._places.lost_metadata() if isinstance(self._places, ObjectPerChunk) else None


class _IndexedCells(_CellPlaces):
    """Places of cells that are looked up in the indices of shards."""

    def __init__(self, places: ChunkPlaces, indexed: IndexedPlaces) -> None:
        super().__init__(places)
        self._indexed = indexed

    @property
    def counted(self) -> LookupCounts:
        return self._indexed.counted

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts]:
        return self._indexed.index_of(index[:4])
