"""Values already in memory, as tables beside those of files: coordinates that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError
from jigsaw.geometry.cut import box_slices
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.files import LocalFiles, StoreFiles


def tables_of_coordinates(
    coords: Mapping[str, Any], sizes: Mapping[str, int], of: str
) -> tuple[dict[str, ArrayTable], dict[str, NDArray[Any]]]:
    """Return tables and values of the coordinates along dims of these sizes: each an array, or ``(array, attrs)``."""
    tables: dict[str, ArrayTable] = {}
    found: dict[str, NDArray[Any]] = {}
    for name, given in coords.items():
        values, attrs = given if isinstance(given, tuple) and isinstance(given[-1], Mapping) else (given, {})
        found[name] = np.asarray(values)
        if name not in sizes or found[name].shape != (sizes[name],):
            raise GridError(
                f"coords[{name!r}] of {of} has shape {found[name].shape}; the dims are {dict(sizes)}, and coordinates "
                "have the size of the dim that they are named after"
            )
        tables[name] = table_of_values(name, found[name], (name,), attrs, of)
    return tables, found


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
        return ChunkRef(self._label, 0, self._length)
