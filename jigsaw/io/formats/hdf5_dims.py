"""Descriptions of HDF5 datasets: attributes as plain values, and the names of dims by three conventions.

NetCDF-4 and dimension scales name a dim after the scale attached to it; makani's files, one dataset
``fields[time, channel, lat, lon]`` a file, have none and are named by position; any other dim is ``dim_0``, ``dim_1``…
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.formats.makani import MAKANI_DIMS, is_makani_array

_BOOKKEEPING_ATTRS = {
    "CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS",
    "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "_nc3_strict",
}  # fmt: skip
_NOT_A_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"
_NOT_A_COORDINATE = "_nc4_non_coord_"
# netcdf.h: what NetCDF reads where nothing was written
_FILLS = {
    "i1": -127, "i2": -32767, "i4": -2147483647, "i8": -9223372036854775806,
    "u1": 255, "u2": 65535, "u4": 4294967295, "u8": 18446744073709551614,
    "f4": 9.969209968386869e36, "f8": 9.969209968386869e36,
}  # fmt: skip


def hdf5_attributes(found: Any) -> dict[str, Any]:
    """Return the attributes of a dataset or group as strings, numbers and lists, without HDF5's bookkeeping."""
    attrs: dict[str, Any] = {}
    for name in found.attrs:
        if name in _BOOKKEEPING_ATTRS:
            continue
        try:
            value = found.attrs[name]
        except (OSError, TypeError, ValueError):
            continue  # of a type that numpy lacks
        if not isinstance(value, h5py.Empty):
            attrs[str(name)] = _plain_value(value)
    return attrs


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain_value(value.ravel()[0]) if value.size == 1 else [_plain_value(x) for x in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if isinstance(value, np.generic) else value


def is_dim_scale(dataset: Any) -> bool:
    """Say whether a dataset holds the coordinate of a dim."""
    return _text_attribute(dataset, "CLASS") == b"DIMENSION_SCALE"


def is_dim_without_values(dataset: Any) -> bool:
    """Say whether a dataset stands for a dim without a coordinate variable, and so lacks values."""
    return is_dim_scale(dataset) and _text_attribute(dataset, "NAME").startswith(_NOT_A_VARIABLE)


def _text_attribute(found: Any, name: str) -> bytes:
    """Return a text attribute; empty when there is none."""
    try:
        value = found.attrs.get(name, b"")
    except (OSError, TypeError, ValueError):
        return b""
    return value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, bytes) else b""


def dataset_name_in_store(path: str) -> str:
    """Return the store's name of the dataset at `path`: NetCDF-4 hides a variable that has a dim's name and is not its
    coordinate.
    """
    group, slash, name = path.strip("/").rpartition("/")
    return group + slash + name.removeprefix(_NOT_A_COORDINATE)


class Hdf5Dims:
    """Dims as the `datasets` of a file describe them; without `datasets`, as each dataset describes its own."""

    def __init__(self, datasets: Sequence[Any] = ()) -> None:
        scales = [d for d in datasets if is_dim_scale(d)]
        self._by_id = {int(d.attrs["_Netcdf4Dimid"]): str(d.name) for d in scales if "_Netcdf4Dimid" in d.attrs}
        # NetCDF-4 grows a variable only as far as it is written: an unlimited dim is as long as its longest variable
        growing = {str(d.name) for d in scales if d.maxshape and d.maxshape[0] is None}
        self._lengths: dict[str, int] = {}
        for d in datasets if growing else ():
            for path, size in zip(self._scales(d), d.shape or (), strict=False):
                if path in growing and not is_dim_without_values(d):
                    self._lengths[path] = max(size, self._lengths.get(path, 0))

    def names(self, dataset: Any) -> tuple[str, ...]:
        """Return the names of a dataset's dims; those that share one scale are told apart by position."""
        scales = [None if path is None else _last_name(path) for path in self._scales(dataset)]
        if is_makani_array(_last_name(dataset.name), scales):
            return MAKANI_DIMS
        names = [f"dim_{i}" if scale is None else scale for i, scale in enumerate(scales)]
        return tuple(f"{name}_{i}" if name in names[:i] else name for i, name in enumerate(names))

    def shape(self, dataset: Any) -> tuple[int, ...]:
        """Return the shape of a dataset as its file means it: to the end of its unlimited dims."""
        own = tuple(dataset.shape)
        if not self._lengths:
            return own
        return tuple(max(n, self._lengths.get(p or "", n)) for p, n in zip(self._scales(dataset), own, strict=True))

    def _scales(self, dataset: Any) -> list[str | None]:
        """Return the path of the scale of each dim, None for a dim without one.

        A coordinate variable of several dims has the numbers of NetCDF-4's dims in place of attached scales.
        """
        numbers = dataset.attrs.get("_Netcdf4Coordinates")
        if numbers is not None and len(numbers) == dataset.ndim and all(int(n) in self._by_id for n in numbers):
            return [self._by_id[int(n)] for n in numbers]
        if is_dim_scale(dataset):
            return [str(dataset.name), *[None] * (dataset.ndim - 1)]
        return [_dim_scale_name(dataset, i) for i in range(dataset.ndim)]


def _last_name(path: Any) -> str:
    return str(path).rpartition("/")[2].removeprefix(_NOT_A_COORDINATE)


def fill_beyond(dataset: Any, attrs: Mapping[str, Any]) -> Any:
    """Return the value of what a variable lacks at the end of an unlimited dim, as NetCDF-4 reads it. This is its
    ``_FillValue``, the dataset's own fill value where one was chosen, or NetCDF's default for its type.
    """
    chosen = dataset.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    default = dataset.fillvalue if chosen else _FILLS.get(dataset.dtype.str[1:], dataset.fillvalue)
    return attrs.get("_FillValue", default)


def _dim_scale_name(dataset: Any, dim: int) -> str | None:
    try:
        scales = dataset.dims[dim]
        return str(scales[0].name) if len(scales) else None
    except (KeyError, RuntimeError, OSError, ValueError, TypeError) as e:
        raise UnsupportedStoreError(
            f"dataset {dataset.name!r} has a damaged list of dimension scales for its dim {dim}: {e}"
        ) from e
