"""Packed numbers: the values that stored ones mean, or that one is missing, by CF's and NetCDF's attributes, as xarray
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def dtype_with_declared_sign(dtype: np.dtype[Any], attrs: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the dtype of the stored values: by ``_Unsigned`` NetCDF-3 declares signs that its types lack."""
    said = str(attrs.get("_Unsigned", "")).lower()
    other = {("i", "true"): "u", ("u", "false"): "i"}.get((dtype.kind, said), dtype.kind)
    return np.dtype(dtype.str.replace(dtype.kind, other))


def missing_values_of(
    dtype: np.dtype[Any], missing: Iterable[Any], stored: np.dtype[Any] | None = None
) -> tuple[float, ...]:
    """Return the stored values that mean "missing": numbers and lists of them, as an array of `dtype` holds them. A
    number that it cannot hold is left out, as in xarray and netCDF4.

    `stored` is the dtype before `dtype_with_declared_sign`, in which such numbers are written.
    """
    if dtype.kind not in "iuf":
        return ()
    turns = stored is not None and stored.kind != dtype.kind
    flat = [x for value in missing for x in np.ravel(np.asarray(value)).tolist()]
    numbers = [x for x in flat if isinstance(x, int | float) and x == x]
    if dtype.kind == "f":  # in float32, 0.1 as float64 is not one of the values: rounded, it would hide one that is
        with np.errstate(over="ignore"):
            numbers = [x for x in numbers if stored_number_of(x, dtype) == x]
    return tuple(dict.fromkeys(fill_value_of(x, dtype) if turns else stored_number_of(x, dtype) for x in numbers))


def fill_is_missing(fill: Any, attrs: Mapping[str, Any]) -> bool:
    """Say whether the `fill_value` of a Zarr v2 array means "missing"."""
    return bool(fill) or "scale_factor" in attrs  # a 0 may be a default; it is missing in packed numbers alone


def stored_number_of(value: float, dtype: np.dtype[Any]) -> float:
    """Return the value that an array of `dtype` holds for it: rounded, or with the other sign; integers stay exact."""
    if dtype.kind == "f":
        return float(np.asarray(value).astype(dtype))
    number = int(value) if isinstance(value, int) or value.is_integer() else value
    return number + (1 << 8 * dtype.itemsize) if dtype.kind == "u" and number < 0 else number


def fill_value_of(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value as a Python number that `dtype` holds: one written for the other sign has the same bits.

    Anything but a number stays as it is.
    """
    if not isinstance(value, int | float | np.number) or dtype.kind not in "iuf":
        return value.item() if isinstance(value, np.generic) else value
    if dtype.kind == "f" or not np.isfinite(value) or value != np.floor(value):
        return float(value)
    bits = 8 * dtype.itemsize
    wrapped = int(value) % 2**bits
    return wrapped - 2**bits if dtype.kind == "i" and wrapped >= 2 ** (bits - 1) else wrapped
