"""Volumes that are given as arrays, or whose files do not name their dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError
from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.formats.array_source import SourceArray, open_array_source

GIVEN_DIMS = ("channel", "z", "y", "x")
"""Dims that a volume may have, by the names that `dims=` gives, in the order of an array without names."""


@dataclass(frozen=True, eq=False)
class ArrayVolume:
    """An array as a source of boxes."""

    values: NDArray[Any]
    dims: tuple[str, ...]

    @property
    def arrays(self) -> Mapping[str, SourceArray]:
        return {"array": SourceArray(self.values.shape, self.values.dtype, self.dims)}

    def read(self, array: str, box: Box) -> NDArray[Any]:
        return self.values[box_slices(box)]


def values_of_array(given: Any) -> NDArray[Any] | None:
    """Return the values of an array or tensor, not copied where numpy has their dtype; None for anything else."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    if not isinstance(given, np.ndarray):
        return None
    return given.view(np.uint8) if given.dtype == bool else given


def store_of_array(values: NDArray[Any], dims: Sequence[str] | None) -> ArrayStore:
    """Return the array as a store. Raises: `GridError` for another number of dims than those of a volume."""
    usual = GIVEN_DIMS[-values.ndim :] if 2 <= values.ndim <= len(GIVEN_DIMS) else ()
    found = _dims_for(values.ndim, usual if dims is None else dims)
    if not found:
        wanted = "[C, z, y, x], [z, y, x] or [y, x]" if dims is None else f"[{', '.join(dims)}]"
        raise GridError(
            f"an array of shape {values.shape} is no volume {wanted}; name its dims, like dims=('x', 'y', 'z')"
        )
    named = open_array_source(ArrayVolume(values, found))
    return replace(named, url=f"array {list(values.shape)} of {values.dtype}")


def with_given_dims(store: ArrayStore, dims: Sequence[str] | None) -> ArrayStore:
    """Return the store with these names of the dims of each array that has as many, or as many as its dims of space."""
    if dims is None:
        return store
    named = {name: _dims_for(len(table.shape), dims) for name, table in store.arrays.items()}
    tables = {
        name: replace(store.arrays[name], dims=found) if found else store.arrays[name] for name, found in named.items()
    }
    return replace(store, arrays=tables)


def _dims_for(count: int, dims: Sequence[str]) -> tuple[str, ...] | None:
    """Return those of the given dims that an array with so many has: a label map may lack the channels."""
    whole = tuple(dims)
    return next(
        (each for each in (whole, tuple(d for d in whole if d != "channel")) if each and len(each) == count), None
    )


def checked_dims(dims: Any) -> tuple[str, ...] | None:
    """Check and return the dims of a volume. Raises: `FieldError` for anything that does not name them."""
    if dims is None:
        return None
    found = tuple(dims) if isinstance(dims, Sequence) and not isinstance(dims, str) else ()
    if not {"y", "x"} <= set(found) <= set(GIVEN_DIMS) or len(set(found)) != len(found):
        raise FieldError(
            f"dims={dims!r} must name each stored dim once, in their order: y and x, and 'z' and 'channel' where there "
            "are such, like dims=('channel', 'z', 'y', 'x')"
        )
    return found
