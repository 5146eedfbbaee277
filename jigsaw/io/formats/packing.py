"""How stored numbers stand for others: by the attributes of CF and NetCDF, read as xarray reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def signed_as_said(dtype: np.dtype[Any], attrs: Mapping[str, Any]) -> np.dtype[Any]:
    """The dtype of the stored values: ``_Unsigned`` is how NetCDF-3 spells what its types lack."""
    said = str(attrs.get("_Unsigned", "")).lower()
    if (dtype.kind, said) == ("i", "true"):
        return np.dtype(dtype.str.replace("i", "u"))
    if (dtype.kind, said) == ("u", "false"):
        return np.dtype(dtype.str.replace("u", "i"))
    return dtype


def masks_of(dtype: np.dtype[Any], missing: Iterable[Any]) -> tuple[float, ...]:
    """The stored values that mean "missing": numbers and lists of them, as an array of `dtype` holds them."""
    if dtype.kind not in "iuf":
        return ()
    flat = [x for value in missing for x in np.ravel(np.asarray(value)).tolist()]
    numbers = [as_stored(x, dtype) for x in flat if isinstance(x, int | float) and x == x]
    return tuple(dict.fromkeys(numbers))


def as_stored(value: float, dtype: np.dtype[Any]) -> float:
    """The value that an array of `dtype` holds for it: rounded, or of the other sign; whole numbers stay exact."""
    if dtype.kind == "f":
        return float(np.asarray(value).astype(dtype))
    number = int(value) if isinstance(value, int) or value.is_integer() else value
    span = 1 << 8 * dtype.itemsize
    low = 0 if dtype.kind == "u" else -(span >> 1)
    if low <= number < low + span or not -(span >> 1) <= number < span:
        return number
    return number + span if number < low else number - span


def fill_of(value: Any, dtype: np.dtype[Any]) -> Any:
    """What a missing chunk is full of, as an array of `dtype` holds it."""
    plain = value.item() if isinstance(value, np.generic) else value
    return as_stored(plain, dtype) if dtype.kind in "iu" and isinstance(plain, int) else plain
