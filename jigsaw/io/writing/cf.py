"""Coordinates as they are stored: numbers with CF units, calendar, standard_name and axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, UnsupportedStoreError
from jigsaw.io.series.coords import role_of_dim
from jigsaw.io.series.times import decode_times

REFERENCE_ATTRIBUTES = tuple(
    "grid_mapping bounds climatology cell_measures ancillary_variables formula_terms mesh".split()
)
"""The attributes that name other variables."""
_LAT_ATTRIBUTES = {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}
_LON_ATTRIBUTES = {"standard_name": "longitude", "units": "degrees_east", "axis": "X"}
_DEFAULT_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "lat": _LAT_ATTRIBUTES,
    "latitude": _LAT_ATTRIBUTES,
    "lon": _LON_ATTRIBUTES,
    "longitude": _LON_ATTRIBUTES,
    "time": {"standard_name": "time", "axis": "T"},
    "prediction_timedelta": {"standard_name": "forecast_period"},
    "level": {"axis": "Z"},
    "z": {"axis": "Z"},
    "y": {"axis": "Y"},
    "x": {"axis": "X"},
}
_CALENDAR_NAMES = {"gregorian": "standard", "365_day": "noleap", "366_day": "all_leap"}
"""Second names that the CF conventions give to calendars."""
_NANOSECONDS = {"hours": 3_600_000_000_000, "seconds": 1_000_000_000, "microseconds": 1_000, "nanoseconds": 1}


@dataclass(frozen=True, eq=False)
class StoredCoordinate:
    """A small array that every rank knows: `values` as stored, and its attributes."""

    name: str
    dims: tuple[str, ...]
    values: NDArray[Any]
    attrs: Mapping[str, Any]


def encode_coordinate(name: str, entry: Any, stored: StoredCoordinate | None = None) -> StoredCoordinate:
    """Encode a coordinate that the user gives.

    `entry` is an array along the dim of that name, ``(array, attrs)``, ``(dims, array)``, ``(dims, array, attrs)`` or
    an xarray variable. Dates, durations and cftime objects become numbers: in the units among its attributes, or those
    of a coordinate that is stored already (`stored`), else in the coarsest unit that is exact. They are integers,
    unless the stored ones are floats or one is missing, which is NaN. Without attributes it gets those of the CF
    conventions for its name.

    Raises: `GridError` for a shape that does not fit its dims, or dates that are not a whole number of units where
    integers are stored.
    """
    dims, values, attrs = _dims_values_attrs(name, entry)
    if values.ndim != len(dims):
        raise GridError(f"coords[{name!r}] has dims {dims} but shape {values.shape}; give (dims, values)")
    known = dict(_DEFAULT_ATTRIBUTES.get(name, {}) if attrs is None else attrs)
    if stored is not None:
        known = dict(stored.attrs)
    if stored is not None and not values.size:  # an append of no steps
        values = values.astype(stored.values.dtype)
    is_dates = values.dtype.kind == "O" and values.size and not isinstance(values.flat[0], str)
    if values.dtype.kind in "mM" or is_dates:
        units = known if stored is None else _stored_units(name, stored)
        values, time = _encode_times(name, values, units, stored is not None and stored.values.dtype.kind == "f")
        known = {**time, **known}
    elif values.dtype.kind in "OU":
        values = values.astype(str)
    values = values if values.dtype.kind == "U" else values.astype(values.dtype.newbyteorder("="))
    return StoredCoordinate(name, dims, values, known)


def _stored_units(name: str, stored: StoredCoordinate) -> Mapping[str, Any]:
    """Return the attributes by which readers decode the stored values: without a calendar it is the standard one."""
    if stored.values.dtype.kind in "mMO":  # the values were decoded by xarray
        return stored.attrs
    if stored.attrs.get("units") is None:
        raise GridError(
            f"coords[{name!r}] holds dates or durations, but it is stored without units; give numbers, or "
            "(values, {'units': 'hours since 1970-01-01'}) when the store is made"
        )
    return {"calendar": "standard", **stored.attrs}


def _dims_values_attrs(name: str, entry: Any) -> tuple[tuple[str, ...], NDArray[Any], Mapping[str, Any] | None]:
    if hasattr(entry, "dims") and hasattr(entry, "attrs"):
        encoding: Mapping[str, Any] = getattr(entry, "encoding", {})
        units = {k: encoding[k] for k in ("units", "calendar") if k in encoding}
        return tuple(map(str, entry.dims)), _coordinate_values(entry.values), {**dict(entry.attrs), **units}
    parts: tuple[Any, ...] = entry if isinstance(entry, tuple) else ()
    if len(parts) == 2 and isinstance(parts[1], Mapping):
        return (name,), _coordinate_values(parts[0]), parts[1]
    named = parts and (isinstance(parts[0], str) or all(isinstance(d, str) for d in np.ravel(parts[0]).tolist()))
    has_attrs = len(parts) == 3 and isinstance(parts[2], Mapping)
    if named and (has_attrs or (len(parts) in (2, 3) and not isinstance(parts[1], str | Mapping))):
        dims = (parts[0],) if isinstance(parts[0], str) else tuple(parts[0])
        return dims, _coordinate_values(parts[1]), parts[2] if len(parts) == 3 else None
    array = _coordinate_values(list(parts) if isinstance(entry, tuple) else entry)
    return (name,) if array.ndim else (), array, None


def _coordinate_values(values: Any) -> NDArray[Any]:
    """Return an array; masked places, as netCDF4 returns them, are NaT or NaN, and integers then floats."""
    if not np.ma.is_masked(values):
        return np.asarray(values)
    if values.dtype.kind in "mM":
        return values.filled(np.array("NaT", values.dtype))
    return values.astype(np.result_type(values.dtype, np.float32)).filled(np.nan)


def _encode_times(
    name: str, values: NDArray[Any], attrs: Mapping[str, Any], fractions: bool
) -> tuple[NDArray[Any], dict[str, Any]]:
    if values.dtype.kind == "O":
        return _encode_cftime(name, values, attrs, fractions)
    is_missing = np.isnat(values)
    # Python's integers, because nanoseconds in 64 bits end 292 years from 1970
    kind, fine = values.dtype.kind, np.datetime_data(values.dtype)[0] in ("ns", "ps", "fs", "as")
    known = np.where(is_missing, np.zeros((), values.dtype), values).ravel()
    ticks = known.astype(f"{kind}8[{'ns' if fine else 'us'}]").astype(np.int64)
    exact: NDArray[Any] = np.multiply(ticks.astype(object), 1 if fine else 1000, dtype=object)
    if values.dtype.kind == "m":
        step, described = _duration_units(name, exact, attrs)
        since = exact
    else:
        origin, step, described = _date_units(name, exact, attrs)
        since = exact - origin
    if not fractions and (since % step != 0).any():
        raise GridError(
            f"coords[{name!r}]: {values.ravel()[:2]}… are not whole {described['units']!r}, the units that they are "
            "stored in; give finer units when the store is made: (values, {'units': 'seconds since 1970-01-01'})"
        )
    numbers = (since / step).astype(np.float64) if fractions else (since // step).astype(np.int64)
    numbers = numbers.reshape(values.shape)
    return np.where(is_missing, np.nan, numbers) if is_missing.any() else numbers, described


def _coarsest_unit(nanoseconds: NDArray[Any]) -> str:
    return next(unit for unit, n in _NANOSECONDS.items() if (nanoseconds % n == 0).all())


def _duration_units(name: str, exact: NDArray[Any], attrs: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the nanoseconds of the units that durations are stored in, and their attributes."""
    steps = {"days": 86_400_000_000_000, "minutes": 60_000_000_000, **_NANOSECONDS}
    units = str(attrs.get("units", _coarsest_unit(exact)))
    if units not in steps:
        raise GridError(f"coords[{name!r}] has units {units!r}; durations are stored in {', '.join(_NANOSECONDS)}")
    # by this attribute xarray tells durations from plain numbers
    return steps[units], {"units": units, "dtype": "timedelta64[ns]"}


def _date_units(name: str, exact: NDArray[Any], attrs: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """Return where the units of dates begin, how long one is (nanoseconds), and their attributes."""
    units = str(attrs.get("units", f"{_coarsest_unit(exact)} since 1970-01-01"))
    calendar = str(attrs.get("calendar", "proleptic_gregorian"))
    try:  # the numbers 0 and 1000 tell the reader's units; its dates have no nanoseconds
        origin, after = decode_times(np.array([0, 1000]), {"units": units, "calendar": calendar}).stamps
    except UnsupportedStoreError as error:
        raise GridError(f"coords[{name!r}]: {error}") from error
    if not isinstance(origin, np.datetime64):
        raise GridError(f"coords[{name!r}] holds datetime64, which calendar {calendar!r} lacks; give cftime dates")
    first, thousandth = (int(t.astype("datetime64[us]").astype(np.int64)) for t in (origin, after))
    return first * 1000, thousandth - first, {"units": units, "calendar": calendar}


def _encode_cftime(
    name: str, values: NDArray[Any], attrs: Mapping[str, Any], fractions: bool
) -> tuple[NDArray[Any], dict[str, Any]]:
    import cftime

    first: Any = values.flat[0]
    calendar = str(getattr(first, "calendar", ""))
    stored = str(attrs.get("calendar", calendar)).lower()
    if not calendar or _CALENDAR_NAMES.get(calendar, calendar) != _CALENDAR_NAMES.get(stored, stored):
        raise GridError(
            f"coords[{name!r}] holds {type(first).__name__} of calendar {calendar!r}, and the calendar to store is "
            f"{attrs.get('calendar', 'not given')!r}; give datetime64 or cftime dates of one calendar"
        )
    units = str(attrs.get("units", "seconds since 1970-01-01"))
    numbers = np.asarray(cftime.date2num(values, units, calendar))
    if not np.array_equal(np.asarray(cftime.num2date(numbers, units, calendar)), values):
        raise GridError(f"coords[{name!r}] are not expressed exactly by {units!r}; give finer units")
    return numbers.astype(np.float64) if fractions else numbers, {"units": units, "calendar": calendar}


def check_times_rise(c: StoredCoordinate, before: StoredCoordinate | None) -> None:
    """Refuse times that do not rise, or do not follow those `before`, as steps that an ended run appends again."""
    attrs = c.attrs if before is None else before.attrs
    if c.dims != (c.name,) or role_of_dim(c.name, attrs) not in ("time", "lead", "init"):
        return
    if c.values.dtype.kind == "U":
        raise GridError(
            f"coords[{c.name!r}] are texts, such as {c.values[:1].tolist()}, and times are dates, durations or "
            "numbers; give np.array([...], 'datetime64[ns]')"
        )
    held = c.values[:0] if before is None else before.values
    if {c.values.dtype.kind, held.dtype.kind} - set("fiu"):
        return
    if not np.isfinite(c.values).all():
        raise GridError(f"coords[{c.name!r}] has a missing or infinite time in {c.values[:3]}; give each step its own")
    values = np.concatenate([held[-1:], c.values])
    if (values[1:] > values[:-1]).all():
        return
    if not held.size:
        raise GridError(
            f"coords[{c.name!r}] must rise, and is {c.values[:3]} {attrs.get('units', '')}; write the steps in the "
            "order of their times, each once"
        )
    raise GridError(
        f"coords[{c.name!r}] of an append must rise from the last in the store, {held[-1:]} "
        f"{attrs.get('units', '')}, and is {c.values[:3]}; append only the steps after Writer.steps"
    )


def check_stored_exactly(c: StoredCoordinate, held: StoredCoordinate) -> None:
    """Refuse values that the store's dtype would round or cut off."""
    numbers = c.values.dtype.kind in "fiu" and held.values.dtype.kind in "fiu"
    with np.errstate(invalid="ignore"):
        kept = c.values.astype(held.values.dtype) if numbers else c.values
    if not np.array_equal(kept, c.values, equal_nan=numbers):
        raise GridError(
            f"coords[{c.name!r}] are stored as {held.values.dtype} in {held.attrs.get('units', 'no units')!r}, which "
            f"do not hold {c.values.ravel()[:2]}… exactly; give finer units when the store is made"
        )


def plain_attribute(value: Any) -> Any:
    """Return an attribute as JSON and NetCDF hold it: numpy scalars and arrays as Python's own, dates as text."""
    if isinstance(value, date | timedelta | np.datetime64 | np.timedelta64):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain_attribute(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain_attribute(v) for v in value]
    return value
