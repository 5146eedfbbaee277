"""The times of a store's steps: CF units and calendars, selections of dates, gaps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.errors import GridError, UnsupportedStoreError, WindowError

_MICROSECONDS = {
    **dict.fromkeys(("microsecond", "microseconds"), 1),
    **dict.fromkeys(("millisecond", "milliseconds", "msec", "msecs"), 1_000),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), 1_000_000),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), 60_000_000),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 3_600_000_000),
    **dict.fromkeys(("day", "days", "d"), 86_400_000_000),
}
_SINCE = re.compile(
    r"^\s*(?P<unit>\w+)\s+since\s+(?P<year>\d{1,4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[T\s]+(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2}))?(?::(?P<second>\d{1,2}(?:\.\d*)?))?)?"
    r"\s*(?:Z|UTC|GMT|[+-]?0{1,2}(?::?00)?)?\s*$",
    re.IGNORECASE,
)
_GREGORIAN = ("standard", "gregorian", "proleptic_gregorian")


@dataclass(frozen=True, eq=False)
class TimeAxis:
    """The times of a store's steps.

    `stamps` are datetime64 on a Gregorian calendar, cftime objects on another, plain numbers without units;
    `elapsed` are microseconds (or those numbers) on one scale; `digits` are YYYYMMDDhhmmss, None without units.
    `breaks` holds each i such that a gap lies between the steps i and i + 1.
    """

    stamps: NDArray[Any]
    elapsed: NDArray[np.int64]
    digits: NDArray[np.int64] | None
    breaks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.stamps)

    def select(self, wanted: slice | tuple[Any, Any] | None) -> tuple[int, int]:
        """The half-open range of steps inside `wanted`: a slice or pair of dates (both ends included, ``"2008"`` is the
        whole year), or of integers (step positions, the end excluded).

        Raises: `WindowError` when nothing is inside, or dates are asked of a store without time units.
        """
        if wanted is None:
            return 0, len(self)
        first, last = (wanted.start, wanted.stop) if isinstance(wanted, slice) else wanted
        if isinstance(wanted, slice) and wanted.step not in (None, 1):
            raise WindowError(
                f"time={wanted} has a step; thin a series with inputs and targets (offsets in steps) instead"
            )
        if all(end is None or isinstance(end, int | np.integer) for end in (first, last)):
            start, stop, _ = slice(first, last).indices(len(self))
        else:
            start, stop = self._between(first, last)
        if start >= stop:
            raise WindowError(f"time={wanted} selects no step; the store has {len(self)}, {self._span()}")
        return start, stop

    def _between(self, first: Any, last: Any) -> tuple[int, int]:
        if self.digits is None:
            raise WindowError(
                f"time=({first!r}, {last!r}) asks for dates, but the store's time has no units; use step positions"
            )
        low = 0 if first is None else _digits(first, "0")
        high = 99991231235959 if last is None else _digits(last, "9")
        inside = np.flatnonzero((self.digits >= low) & (self.digits <= high))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)

    def _span(self) -> str:
        return f"{self.stamps[0]} to {self.stamps[-1]}" if len(self) else "none at all"


def decode_times(raw: NDArray[Any], attrs: Mapping[str, Any]) -> TimeAxis:
    """Times of numbers with CF ``units`` ("hours since 1900-01-01") and ``calendar``, or of datetime64.

    A step that differs from the usual one is a gap; steps of calendar months or years are equal steps.

    Raises: `UnsupportedStoreError` for units that are no fixed length or a time zone, `GridError` for falling times.
    """
    units, calendar = str(attrs.get("units", "")), str(attrs.get("calendar", "standard")).lower()
    if raw.dtype.kind == "O":
        return _of_cftime(raw)
    if raw.dtype.kind != "M" and " since " not in units:
        numbers = raw.astype(np.float64)
        elapsed = np.rint(numbers * 1e6).astype(np.int64)
        return TimeAxis(raw, elapsed, None, _breaks(elapsed, None))
    stamps, elapsed = _stamps(raw, units, calendar)
    digits = _stamp_digits(stamps)
    return TimeAxis(stamps, elapsed, digits, _breaks(elapsed, digits))


def _of_cftime(stamps: NDArray[Any]) -> TimeAxis:
    """Times that were decoded to cftime objects."""
    import cftime

    elapsed = np.asarray(cftime.date2num(stamps, "microseconds since 1970-01-01", stamps[0].calendar), dtype=np.int64)
    digits = _stamp_digits(stamps)
    return TimeAxis(stamps, elapsed, digits, _breaks(elapsed, digits))


def _stamps(raw: NDArray[Any], units: str, calendar: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if raw.dtype.kind == "M":
        stamps = raw.astype("datetime64[us]")
        return stamps, stamps.astype(np.int64)
    match = _SINCE.match(units)
    if match is None or (match["unit"].lower() not in _MICROSECONDS and "nano" not in match["unit"].lower()):
        raise UnsupportedStoreError(
            f"time units {units!r} are not 'microseconds|…|hours|days since YYYY-MM-DD [hh:mm:ss] [UTC]'; "
            "rewrite the time coordinate"
        )
    since = _elapsed(raw, match["unit"].lower())
    # the mixed Julian/Gregorian calendar differs from numpy's proleptic one before its reform in 1582
    if calendar in _GREGORIAN and (calendar == "proleptic_gregorian" or int(match["year"]) >= 1583):
        stamps = _reference(match) + since.astype("timedelta64[us]")
        return stamps, stamps.astype(np.int64)
    return _cftime(raw, units, calendar), since


def _elapsed(raw: NDArray[Any], unit: str) -> NDArray[np.int64]:
    if "nano" in unit:
        return raw.astype(np.int64) // 1000
    if raw.dtype.kind in "iu":
        return raw.astype(np.int64) * _MICROSECONDS[unit]
    return np.rint(raw.astype(np.float64) * _MICROSECONDS[unit]).astype(np.int64)


def _reference(match: re.Match[str]) -> np.datetime64:
    second = float(match["second"] or 0)
    text = f"{int(match['year']):04d}-{int(match['month']):02d}-{int(match['day']):02d}"
    clock = (int(match["hour"] or 0) * 60 + int(match["minute"] or 0)) * 60_000_000 + round(second * 1e6)
    return np.datetime64(text, "us") + np.timedelta64(clock, "us")


def _cftime(raw: NDArray[Any], units: str, calendar: str) -> NDArray[Any]:
    try:
        import cftime
    except ImportError as missing:
        raise UnsupportedStoreError(
            f"calendar {calendar!r} with units {units!r} needs the package cftime: pip install cftime"
        ) from missing
    return np.asarray(cftime.num2date(raw, units, calendar), dtype=object)


def _stamp_digits(stamps: NDArray[Any]) -> NDArray[np.int64]:
    if stamps.dtype.kind != "M":
        whole = np.array([(t.year * 100 + t.month) * 100 + t.day for t in stamps], dtype=np.int64)
        clock = np.array([(t.hour * 100 + t.minute) * 100 + t.second for t in stamps], dtype=np.int64)
        return whole * 1_000_000 + clock
    months, days = stamps.astype("datetime64[M]"), stamps.astype("datetime64[D]")
    month, day = months.astype(np.int64), (days - months.astype("datetime64[D]")).astype(np.int64)
    seconds = (stamps.astype("datetime64[s]") - days.astype("datetime64[s]")).astype(np.int64)
    whole = ((month // 12 + 1970) * 100 + month % 12 + 1) * 100 + day + 1
    return whole * 1_000_000 + seconds // 3600 * 10_000 + seconds // 60 % 60 * 100 + seconds % 60


def _digits(when: Any, pad: str) -> int:
    """YYYYMMDDhhmmss of a date, partial ones filled up with `pad`: "2008" covers all that begins with 2008."""
    text = str(np.datetime64(when)) if isinstance(when, datetime | date) else str(when)
    digits = re.sub(r"\D", "", text)
    if not re.match(r"^\s*\d{4}(-\d{1,2}(-\d{1,2}([T ]\d{2}(:?\d{2}(:?\d{2}(\.\d*)?)?)?Z?)?)?)?\s*$", text):
        raise WindowError(f"{when!r} is not a date like '2008', '2008-06', '2008-06-30' or '2008-06-30T18:00'")
    return int(digits[:14].ljust(14, pad))


# -- gaps ------------------------------------------------------------------------------------------------------------

_DAY = 86_400_000_000


def _breaks(elapsed: NDArray[np.int64], digits: NDArray[np.int64] | None) -> tuple[int, ...]:
    if len(elapsed) < 3:
        return ()
    steps = np.diff(elapsed)
    usual = _most_common(steps)
    if usual <= 0:
        raise GridError("the time coordinate does not rise; sort the store by time")
    off = np.abs(steps - usual) > max(1_000_000 if digits is not None else 0, usual // 1000)
    if off.any() and digits is not None and np.median(steps) >= 28 * _DAY:
        months = digits // 10**10 * 12 + digits // 10**8 % 100
        days = digits // 10**6 % 100
        # stamps that keep their place in the month are calendar steps, whatever the months' lengths
        if int(days.max() - days.min()) <= 3:
            counts = np.diff(months)
            off = counts != _most_common(counts)
    return tuple(int(i) for i in np.flatnonzero(off))


def _most_common(steps: NDArray[np.int64]) -> int:
    values, counts = np.unique(steps, return_counts=True)
    return int(values[np.argmax(counts)])
