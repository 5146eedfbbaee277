"""What a store's dims mean: roles by CF attributes, then by name.

A *role* is the canonical name of a dim, whatever the store calls it: `time, level, lat, lon` on the globe, `z, y, x`
in a volume.  A dim without a role keeps its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.errors import GridError

if TYPE_CHECKING:
    from jigsaw.io.table import ArrayTable

SPACE = ("lat", "lon", "z", "y", "x")

_STANDARD_NAMES = {
    "time": "time",
    "forecast_reference_time": "time",
    "latitude": "lat",
    "longitude": "lon",
    "grid_latitude": "lat",
    "grid_longitude": "lon",
    "projection_y_coordinate": "y",
    "projection_x_coordinate": "x",
    "air_pressure": "level",
    "model_level_number": "level",
    "atmosphere_hybrid_sigma_pressure_coordinate": "level",
    "atmosphere_sigma_coordinate": "level",
    "height": "level",
    "depth": "level",
}
_UNITS = {
    **dict.fromkeys(("degrees_north", "degree_north", "degree_n", "degrees_n", "degreen", "degreesn"), "lat"),
    **dict.fromkeys(("degrees_east", "degree_east", "degree_e", "degrees_e", "degreee", "degreese"), "lon"),
    **dict.fromkeys(("pa", "hpa", "mbar", "millibar", "millibars", "mb"), "level"),
}
_AXES = {"T": "time", "Z": "z", "Y": "y", "X": "x"}
_NAMES = {
    **dict.fromkeys(("time", "valid_time", "initial_time", "forecast_reference_time", "t"), "time"),
    **dict.fromkeys(
        ("level", "levels", "lev", "plev", "pressure", "pressure_level", "isobaricinhpa", "hybrid"), "level"
    ),
    **dict.fromkeys(("lat", "latitude", "lats", "nav_lat", "rlat"), "lat"),
    **dict.fromkeys(("lon", "longitude", "lons", "long", "nav_lon", "rlon"), "lon"),
    **dict.fromkeys(("z", "depth", "height"), "z"),
    **dict.fromkeys(("y", "row", "rows"), "y"),
    **dict.fromkeys(("x", "column", "columns", "col", "cols"), "x"),
}


class _Store(Protocol):
    @property
    def arrays(self) -> Mapping[str, ArrayTable]: ...

    def read_small(self, name: str) -> NDArray[Any]: ...


def role_of(dim: str, attrs: Mapping[str, Any]) -> str | None:
    """The role of one dim from its coordinate's attributes (standard_name, units, axis), then from its name."""
    standard = str(attrs.get("standard_name", "")).lower()
    units = str(attrs.get("units", "")).lower()
    if standard in _STANDARD_NAMES:
        return _STANDARD_NAMES[standard]
    if units in _UNITS:
        return _UNITS[units]
    if " since " in units:
        return "time"
    axis, named = _AXES.get(str(attrs.get("axis", "")).upper()), _NAMES.get(dim.lower())
    if axis in ("y", "x") and named in ("lat", "lon"):
        return named
    return axis or named


def roles(array: ArrayTable, arrays: Mapping[str, ArrayTable]) -> tuple[str, ...]:
    """The role of every dim of `array`, or its own name where it has none.

    A vertical dim is `level` beside lat and lon (or time), and `z` in a volume.

    Raises: `GridError` when two dims claim one role.
    """
    found = [role_of(dim, attributes(array, dim, arrays)) or dim for dim in array.dims]
    globe = {"lat", "lon"} <= set(found)
    vertical = {"z": "level"} if globe else {"level": "z"} if {"y", "x"} <= set(found) and "time" not in found else {}
    named = tuple(vertical.get(role, role) for role in found)
    twice = sorted({role for role in named if named.count(role) > 1})
    if twice:
        dims = [d for d, role in zip(array.dims, named, strict=True) if role == twice[0]]
        raise GridError(
            f"array {array.name!r} has dims {dims} that both look like {twice[0]!r}; "
            "set the CF attributes standard_name, units or axis of their coordinates"
        )
    return named


def name_of(array: ArrayTable, dim: str) -> str:
    """The name of the coordinate variable of a dim of `array`: in the group where the array is."""
    group, slash, _ = array.name.rpartition("/")
    return group + slash + dim


def attributes(array: ArrayTable, dim: str, arrays: Mapping[str, ArrayTable]) -> Mapping[str, Any]:
    """The attributes of that coordinate variable; none where there is no such."""
    found = arrays.get(name_of(array, dim))
    return {} if found is None else found.attrs


def values(store: _Store, array: ArrayTable, dim: str) -> NDArray[Any]:
    """The values along a dim of `array`: its coordinate variable, or 0, 1, 2… where it has none."""
    name, size = name_of(array, dim), array.shape[array.dims.index(dim)]
    table = store.arrays.get(name)
    if table is None or tuple(table.shape) != (size,):
        return np.arange(size)
    stored = store.read_small(name)
    return stored if (table.scale, table.offset) == (1.0, 0.0) else stored * table.scale + table.offset


def check_periodic(values: NDArray[Any], name: str = "lon") -> None:
    """Longitudes that are to be wrapped must go round once: n steps of 360/n degrees.

    Raises: `GridError` for a region, or for a grid that stores both 0 and 360.
    """
    if len(values) < 2 or values.dtype.kind not in "fiu":
        return
    step = abs(float(values[-1]) - float(values[0])) / (len(values) - 1)
    covered = step * len(values)
    if abs(covered - 360.0) > 0.5 * step:
        raise GridError(
            f"boundary={{{name!r}: 'periodic'}} needs {name!r} to go round once, but its {len(values)} values "
            f"{float(values[0]):g}..{float(values[-1]):g} cover {covered:g} degrees; leave the boundary out"
        )
