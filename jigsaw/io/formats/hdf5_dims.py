"""What HDF5 files say of their datasets: attributes as plain values, and the names of dims by three conventions.

NetCDF-4 and dimension scales name a dim after the scale attached to it; makani's files, one dataset
``fields[time, channel, lat, lon]`` a file, have none and are named by position; any other dim is ``dim_0``, ``dim_1``…
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from jigsaw.errors import UnsupportedStoreError

MAKANI_DIMS = ("time", "channel", "lat", "lon")
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
    """The attributes of a dataset or group as strings, numbers and lists, without HDF5's own books."""
    attrs: dict[str, Any] = {}
    for name in found.attrs:
        if name in _BOOKKEEPING_ATTRS:
            continue
        try:
            value = found.attrs[name]
        except (OSError, TypeError, ValueError):
            continue  # of a type that numpy has no name for
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
    """Whether a dataset holds the coordinate of a dim."""
    return _text_attribute(dataset, "CLASS") == b"DIMENSION_SCALE"


def is_dim_without_values(dataset: Any) -> bool:
    """Whether a dataset stands for a dim without a coordinate variable, and has no values."""
    return is_dim_scale(dataset) and _text_attribute(dataset, "NAME").startswith(_NOT_A_VARIABLE)


def _text_attribute(found: Any, name: str) -> bytes:
    """A text attribute; empty when there is none."""
    try:
        value = found.attrs.get(name, b"")
    except (OSError, TypeError, ValueError):
        return b""
    return value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, bytes) else b""


def dataset_name_in_store(path: str) -> str:
    """What a dataset at `path` is called: NetCDF-4 hides a variable named like a dim that it is no coordinate of."""
    group, slash, name = path.strip("/").rpartition("/")
    return group + slash + name.removeprefix(_NOT_A_COORDINATE)


def hdf5_dim_names(dataset: Any, by_id: Mapping[int, str]) -> tuple[str, ...]:
    """The names of a dataset's dims; `by_id` as in `_scales_of`."""
    scales = [None if path is None else _last_name(path) for path in _scales_of(dataset, by_id)]
    if _last_name(dataset.name) == "fields" and len(scales) == len(MAKANI_DIMS) and _is_makani_scales(scales):
        return MAKANI_DIMS
    return _distinct_dim_names([f"dim_{i}" if scale is None else scale for i, scale in enumerate(scales)])


def _scales_of(dataset: Any, by_id: Mapping[int, str]) -> list[str | None]:
    """The path of the scale of each dim, None for a dim without.

    `by_id` are the paths of the file's NetCDF-4 dims by their number, which a coordinate variable of several dims has
    in place of attached scales.
    """
    numbers = dataset.attrs.get("_Netcdf4Coordinates")
    if numbers is not None and len(numbers) == dataset.ndim and all(int(n) in by_id for n in numbers):
        return [by_id[int(n)] for n in numbers]
    if is_dim_scale(dataset):
        return [str(dataset.name), *[None] * (dataset.ndim - 1)]
    return [_dim_scale_name(dataset, i) for i in range(dataset.ndim)]


def _last_name(path: Any) -> str:
    return str(path).rpartition("/")[2].removeprefix(_NOT_A_COORDINATE)


def lengths_of_growing(datasets: Sequence[Any], by_id: Mapping[int, str]) -> dict[str, int]:
    """The length of each unlimited dim of a file, by the path of its scale: that of its longest variable.

    NetCDF-4 grows a variable only as far as it is written; as far as another one reaches, its values are missing.
    """
    growing = {str(d.name) for d in datasets if is_dim_scale(d) and d.maxshape and d.maxshape[0] is None}
    lengths: dict[str, int] = {}
    for d in datasets if growing else ():
        for path, size in zip(_scales_of(d, by_id), d.shape or (), strict=False):
            if path in growing and not is_dim_without_values(d):
                lengths[path] = max(size, lengths.get(path, 0))
    return lengths


def shape_in_file(dataset: Any, by_id: Mapping[int, str], lengths: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a dataset as its file means it: to the end of its unlimited dims, whose `lengths` these are."""
    own = tuple(dataset.shape)
    if not lengths:
        return own
    return tuple(max(n, lengths.get(path or "", n)) for path, n in zip(_scales_of(dataset, by_id), own, strict=True))


def fill_beyond(dataset: Any, attrs: Mapping[str, Any]) -> Any:
    """What stands for the values that a variable lacks at the end of an unlimited dim: as NetCDF-4 reads them.

    Its ``_FillValue``, the dataset's own fill value where somebody chose one, or the one that NetCDF has for its type.
    """
    chosen = dataset.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    default = dataset.fillvalue if chosen else _FILLS.get(dataset.dtype.str[1:], dataset.fillvalue)
    return attrs.get("_FillValue", default)


def _is_makani_scales(scales: Sequence[str | None]) -> bool:
    """Whether dims have no scales, or those that makani's own tool attaches."""
    return all(scale in (None, name, "timestamp") for scale, name in zip(scales, MAKANI_DIMS, strict=True))


def _distinct_dim_names(names: Sequence[str]) -> tuple[str, ...]:
    """Dims that share one scale, told apart by position."""
    return tuple(f"{n}_{i}" if n in names[:i] else n for i, n in enumerate(names))


def _dim_scale_name(dataset: Any, dim: int) -> str | None:
    try:
        scales = dataset.dims[dim]
        return str(scales[0].name) if len(scales) else None
    except (KeyError, RuntimeError, OSError, ValueError, TypeError) as e:
        raise UnsupportedStoreError(
            f"dataset {dataset.name!r} has a damaged list of dimension scales for its dim {dim}: {e}"
        ) from e


def dim_names_by_id(datasets: Sequence[Any]) -> dict[int, str]:
    """The paths of NetCDF-4 dims by number."""
    return {
        int(d.attrs["_Netcdf4Dimid"]): str(d.name) for d in datasets if is_dim_scale(d) and "_Netcdf4Dimid" in d.attrs
    }
