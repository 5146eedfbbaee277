"""Times of a store's steps: CF units and calendars, selections of dates, frequencies, gaps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, UnsupportedStoreError, WindowError, imports_needed

_MICROSECONDS = {
    **dict.fromkeys(("microsecond", "microseconds"), 1),
    **dict.fromkeys(("millisecond", "milliseconds", "msec", "msecs"), 1_000),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), 1_000_000),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), 60_000_000),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 3_600_000_000),
    **dict.fromkeys(("day", "days", "d"), 86_400_000_000),
    **dict.fromkeys(("week", "weeks", "w"), 604_800_000_000),
}
_SINCE = re.compile(
    r"^\s*(?P<unit>\w+)\s+since\s+"
    r"(?:(?P<digits>\d{8})|(?P<year>\d{1,4})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2}))?)?)"
    r"(?:[T\s]+(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2}))?(?::(?P<second>\d{1,2}(?:\.\d*)?))?)?"
    r"\s*(?:Z|UTC|GMT|(?P<east>[+-])(?P<zone_hour>\d{1,2})(?::?(?P<zone_minute>\d{2}))?|0{1,2}(?::?00)?)?\s*$",
    re.IGNORECASE,
)
_MONTHS = {
    **dict.fromkeys(("mo", "mon", "month", "months"), 1),
    **dict.fromkeys(("y", "yr", "yrs", "year", "years"), 12),
}
_DURATION = re.compile(r"^\s*(?P<count>[+-]?\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)\s*$", re.IGNORECASE)
_DATE = re.compile(
    r"^\s*(\d{4})(?:-(\d{1,2})(?:-(\d{1,2})(?:[T ](\d{2})(?::?(\d{2})(?::?(\d{2})(?:\.\d*)?)?)?Z?)?)?)?\s*$"
)
FURTHEST_STEP = 1 << 62
"""Limit on steps and microseconds, so that their sums stay within 64 bits."""
_LARGEST_ELAPSED = float(FURTHEST_STEP)
_CALENDAR_REFORM = np.datetime64("1582-10-15")
_GREGORIAN_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")


@dataclass(frozen=True, eq=False)
class TimeAxis:
    """Times of a series of steps.

    `stamps` are datetime64 on a Gregorian calendar, cftime objects on another, timedelta64 for durations (lead times),
    plain numbers without units. `elapsed` are microseconds (or a million times those numbers) on one scale; `digits`
    are YYYYMMDDhhmmss, None without dates. `at` has the step of the store for each.

    `ticks` rise by `usual` from step to step: microseconds, or months where the steps are `monthly`.
    """

    stamps: NDArray[Any]
    elapsed: NDArray[np.int64]
    digits: NDArray[np.int64] | None
    at: NDArray[np.int64]
    ticks: NDArray[np.int64]
    usual: int
    monthly: bool

    @classmethod
    def of(cls, stamps: NDArray[Any], elapsed: NDArray[np.int64], digits: NDArray[np.int64] | None) -> TimeAxis:
        months = _month_numbers(elapsed, digits)
        ticks = elapsed if months is None else months
        steps, counts = np.unique(np.diff(ticks), return_counts=True)
        usual = int(steps[np.argmax(counts)]) if len(steps) else 0
        _check_distinct_times(stamps, elapsed)
        falls = np.flatnonzero(elapsed[1:] < elapsed[:-1])
        if len(steps) and (usual <= 0 or len(falls)):
            i = int(falls[0]) if len(falls) else 0
            raise GridError(
                f"the time coordinate does not rise: {stamps[i]} is followed by {stamps[i + 1]}; sort the store by time"
            )
        return cls(stamps, elapsed, digits, np.arange(len(stamps)), ticks, usual, months is not None)

    def __len__(self) -> int:
        return len(self.stamps)

    @cached_property
    def breaks(self) -> tuple[int, ...]:
        """Steps i for which a gap lies between i and i + 1: they are not a usual step apart."""
        off = np.abs(np.diff(self.ticks) - self.usual) > self._slack
        return tuple(int(i) for i in np.flatnonzero(off))

    @property
    def _slack(self) -> int:
        exact = self.digits is None and self.stamps.dtype.kind != "m"
        return 0 if self.monthly else max(0 if exact else 1_000_000, self.usual // 1000)

    def take(self, steps: slice | NDArray[Any]) -> TimeAxis:
        names = ("stamps", "elapsed", "digits", "at", "ticks")
        columns = {name: getattr(self, name) for name in names}
        return replace(self, **{name: column if column is None else column[steps] for name, column in columns.items()})

    def shifted(self, by: np.timedelta64) -> TimeAxis:
        moved = later_times(self.stamps, by)
        microseconds = int(by.astype("timedelta64[us]").astype(np.int64))
        digits = None if self.digits is None else stamp_digits(moved)
        return replace(self, stamps=moved, elapsed=self.elapsed + microseconds, digits=digits)

    def select(self, wanted: slice | tuple[Any, Any] | None) -> tuple[int, int]:
        """Return the half-open range of steps inside `wanted`: a slice or pair of dates, durations or integers. Both
        ends of dates are included (``"2008"`` is the whole year), and of durations such as ``"24h"``, where the steps
        are durations. Integers are step positions, and the end is excluded. Anything else is refused, as is a range
        without a step.
        """
        if wanted is None:
            return 0, len(self)
        first, last = _two_ends(wanted)
        if isinstance(wanted, slice) and wanted.step not in (None, 1):
            raise WindowError(f"time={wanted} has a step; thin the series with every={wanted.step} instead")
        if all(end is None or is_whole_number(end) for end in (first, last)):
            start, stop, _ = slice(first, last).indices(len(self))
        else:
            start, stop = self._between(first, last)
        if start >= stop:
            held = f"{self.stamps[0]} to {self.stamps[-1]}" if len(self) else "none at all"
            raise WindowError(f"time={wanted} selects no step; the store has {len(self)}, {held}")
        return start, stop

    def _between(self, first: Any, last: Any) -> tuple[int, int]:
        if self.stamps.dtype.kind == "m":
            values = self.elapsed
            low = -FURTHEST_STEP if first is None else self._microseconds(first)
            high = FURTHEST_STEP if last is None else self._microseconds(last)
        elif self.digits is not None:
            values = self.digits
            low, high = date_digit_range(first, last)
        else:
            raise WindowError(
                f"time=({first!r}, {last!r}) asks for dates, but the store's time has no units; use step positions"
            )
        inside = np.flatnonzero((values >= low) & (values <= high))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)

    def _microseconds(self, duration: Any) -> int:
        count, months = parse_duration(duration)
        if months:
            raise WindowError(f"{duration!r} has no fixed length; write it in days or hours")
        return count

    def series(self, time: slice | tuple[Any, Any] | None, every: Any) -> TimeAxis:
        """Return the steps inside `time`, and of them those of `every`; 1 takes all, however far apart."""
        selected = self.take(slice(*self.select(time)))
        return selected if is_whole_number(every) and every == 1 else selected.every(every)

    def every(self, frequency: Any) -> TimeAxis:
        """Return the steps that lie whole multiples of `frequency` (``"6h"``, or a number) after the first."""
        count = self.steps_in("every", frequency)
        if count < 1:
            raise WindowError(f"every={frequency!r} must be at least one step of the series, {self.usual_length()}")
        wide = count * self.usual
        if wide >= FURTHEST_STEP:
            raise WindowError(
                f"every={frequency!r} is {count} steps of the series, {self.usual_length()}, and so longer than "
                f"all time; give at most the {len(self)} that there are"
            )
        after = self.ticks - self.ticks[:1]  # `[:1]`, because the series may be empty
        off = np.abs(after - np.rint(after / wide).astype(np.int64) * wide) if wide else after
        return replace(self.take(np.flatnonzero(off <= self._slack)), usual=wide)

    def steps_in(self, name: str, wanted: Any) -> int:
        """Return a number of steps: an integer, or a duration such as ``"-6h"``, ``"3 months"``, a timedelta."""
        if is_whole_number(wanted):
            return int(wanted)
        microseconds, months = parse_duration(wanted)
        if self.digits is None and self.stamps.dtype.kind != "m":
            raise WindowError(f"{name}={wanted!r} is a duration, but the store's time has no units; use steps")
        if self.usual == 0:
            raise WindowError(f"{name}={wanted!r} is a duration, but the series has one step, so no step length")
        length, other = (months, microseconds) if self.monthly else (microseconds, months)
        count = round(length / self.usual)
        if other or abs(length - count * self.usual) > self._slack:
            raise WindowError(
                f"{name}={wanted!r} is not a whole number of the series' steps, which are {self.usual_length()}"
            )
        return count

    def usual_length(self) -> str:
        """Return how long a usual step is."""
        if self.digits is None and self.stamps.dtype.kind != "m":
            return f"{self.usual} without a unit"
        if self.monthly:
            return f"{self.usual} month(s)"
        hours = self.usual / 3_600_000_000
        return f"{hours / 24:g} day(s)" if hours >= 24 else f"{hours:g} hour(s)"


def is_accumulated(attrs: Mapping[str, Any], time_dim: str) -> bool:
    """Say whether values are sums over a step: ``time: sum`` among CF's cell methods, or GRIB's step type ``accum``.

    Upper case and blanks before a colon count as what they mean.
    """
    if attrs.get("GRIB_stepType") == "accum":
        return True
    # "lat: lon: mean time: sum (interval: 1 hr)": names end with a colon, the method follows
    names: list[str] = []
    methods = re.sub(r"\([^)]*\)", " ", str(attrs.get("cell_methods", "")))
    for word in re.sub(r"\s*:\s*", ": ", methods).split():
        if word.endswith(":"):
            names.append(word[:-1])
            continue
        if word.lower() == "sum" and {time_dim, "time"} & set(names):
            return True
        names = []
    return False


def _two_ends(span: Any) -> tuple[Any, Any]:
    if isinstance(span, slice):
        return span.start, span.stop
    if not isinstance(span, list | tuple | np.ndarray) or len(span) != 2:
        raise WindowError(f"time={span!r} is not a span; give (first, last), like ('1979', '2015'), or a slice")
    return span[0], span[1]


def is_whole_number(value: Any) -> bool:
    """Say whether a value is a whole number and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def kind_of_times(times: NDArray[Any]) -> str:
    """Return what times can be compared with: a calendar, or a kind of number."""
    if times.dtype.kind == "O":
        return str(times[0].calendar) if len(times) else ""
    return "number" if times.dtype.kind in "iuf" else times.dtype.kind


def later_times(stamps: NDArray[Any], by: Any) -> NDArray[Any]:
    """Return `stamps` a duration later, on any calendar; either may be the times, and the other the duration."""
    if isinstance(by, np.timedelta64) and stamps.dtype.kind == "O":
        return np.asarray(stamps + by.astype("timedelta64[us]").item(), dtype=object)
    if stamps.dtype.kind == "m" and not isinstance(by, np.generic):  # the rest are durations from a cftime date
        return np.array([by + span for span in stamps.astype("timedelta64[us]").tolist()], dtype=object)
    return stamps + by


def parse_duration(duration: Any) -> tuple[int, int]:
    """Return a duration as (microseconds, months), one of which is 0."""
    if isinstance(duration, np.timedelta64):
        unit = np.datetime_data(duration)[0]
        if unit in ("Y", "M"):
            return 0, int(duration.astype("timedelta64[M]").astype(np.int64))
        return int(duration.astype("timedelta64[us]").astype(np.int64)), 0
    if isinstance(duration, timedelta):
        return round(duration.total_seconds() * 1e6), 0
    match = _DURATION.match(duration) if isinstance(duration, str) else None
    unit = match["unit"].lower() if match else ""
    if match is None or unit not in {**_MICROSECONDS, **_MONTHS}:
        raise WindowError(
            f"{duration!r} is not a number of steps, nor a duration like '6h', '-30min', '1 day', '3 months'"
        )
    if not isfinite(float(match["count"])):
        raise WindowError(f"{duration[:40]!r}… is longer than all time")
    if unit in _MONTHS:
        months = float(match["count"]) * _MONTHS[unit]
        if not months.is_integer():
            raise WindowError(f"{duration!r} is not a whole number of months, and a part of one has no fixed length")
        return 0, int(months)
    return round(float(match["count"]) * _MICROSECONDS[unit]), 0


def date_digit_range(first: Any, last: Any) -> tuple[int, int]:
    """Return the range of YYYYMMDDhhmmss that dates include, for ``"2008"`` the whole year; None means open."""
    return (0 if first is None else _date_digits(first, "0")), (10**15 if last is None else _date_digits(last, "9"))


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode_times(raw: NDArray[Any], attrs: Mapping[str, Any]) -> TimeAxis:
    """Decode times from numbers with CF ``units`` ("hours since 1900-01-01") and ``calendar``, or from datetime64.
    Durations come from numbers with units alone ("hours"), or from timedelta64.

    Times are UTC: those of units with a zone ("since 2000-01-01 00:00 +02:00") are converted. A reference may be a year
    or month alone, its beginning, or eight digits ("since 20000101"). A step that differs from the usual one is a gap;
    steps of calendar months or years are equal steps. Texts are refused, as are units without a fixed length on their
    calendar, and times that fall, are missing or occur twice.
    """
    units, calendar = str(attrs.get("units", "")), str(attrs.get("calendar", "standard")).lower()
    _check_time_values(raw)
    if raw.dtype.kind == "O":
        return _axis_of_dates(raw, _cftime_elapsed(raw))
    if raw.dtype.kind == "m" or units.lower() in (*_MICROSECONDS, "nanoseconds", "ns"):
        spans = raw.astype("timedelta64[us]").astype(np.int64) if raw.dtype.kind == "m" else None
        elapsed = _elapsed_microseconds(raw, units.lower()) if spans is None else spans
        return TimeAxis.of(elapsed.astype("timedelta64[us]"), elapsed, None)
    if raw.dtype.kind != "M" and " since " not in units:
        return TimeAxis.of(raw, _multiply_rounded(raw, 1_000_000), None)
    return _axis_of_dates(*_stamps_and_elapsed(raw, units, calendar))


def _check_time_values(raw: NDArray[Any]) -> None:
    if raw.dtype.kind not in "iufmMO" or (raw.dtype.kind == "O" and not all(hasattr(t, "calendar") for t in raw)):
        raise UnsupportedStoreError(
            f"the time coordinate holds {str(raw[0])!r}, which is not a number; rewrite it with CF units such as "
            "'hours since 1900-01-01', or name another coordinate with dims={'time': …}"
        )
    if raw.dtype.kind in "mM":
        _check_present(~np.isnat(raw))


def _check_present(is_present: NDArray[np.bool_]) -> None:
    if not is_present.all():
        step = int(np.argmin(is_present))
        raise GridError(
            f"the time coordinate has no time at step {step}, or one beyond all dates; leave such steps out of the "
            "store, or open those that have times: xarray.open_dataset(path).isel(time=…) is read in its place"
        )


def _check_distinct_times(stamps: NDArray[Any], elapsed: NDArray[np.int64]) -> None:
    """Raise `GridError` naming times that occur twice: the choice between such steps would be ambiguous."""
    again = np.flatnonzero(elapsed[1:] == elapsed[:-1])
    if len(again):
        shown = ", ".join(f"{stamps[i]} (steps {i} and {i + 1})" for i in again[:3])
        more = f" and {len(again) - 3} more" if len(again) > 3 else ""
        raise GridError(
            f"the time coordinate has times twice: {shown}{more}; keep one step of each: "
            "xarray.open_dataset(path).drop_duplicates('time') is read in its place"
        )


def _axis_of_dates(stamps: NDArray[Any], elapsed: NDArray[np.int64]) -> TimeAxis:
    return TimeAxis.of(stamps, elapsed, stamp_digits(stamps))


def _cftime_elapsed(stamps: NDArray[Any]) -> NDArray[np.int64]:
    import cftime

    if not len(stamps):
        return np.zeros(0, np.int64)
    return np.asarray(cftime.date2num(stamps, "microseconds since 1970-01-01", stamps[0].calendar), dtype=np.int64)


def _stamps_and_elapsed(raw: NDArray[Any], units: str, calendar: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if raw.dtype.kind == "M":
        stamps = raw.astype("datetime64[us]")
        return stamps, stamps.astype(np.int64)
    match = _SINCE.match(units)
    if match is None:
        raise _unknown_units(units, calendar)
    unit, reference = match["unit"].lower(), _TimeReference.of(match)
    if unit not in _MICROSECONDS and "nano" not in unit:
        _check_present(np.isfinite(raw))
        stamps = _cftime_dates(raw, unit, reference, units, calendar)
        return stamps, _cftime_elapsed(stamps)
    since = _elapsed_microseconds(raw, unit)
    if calendar in _GREGORIAN_CALENDARS:
        try:
            stamps = np.datetime64(reference.text, "us") + (since + reference.to_utc).astype("timedelta64[us]")
        except ValueError as e:  # the 30th of February
            raise _unknown_units(units, calendar) from e
        # the mixed Julian/Gregorian calendar differs from numpy's proleptic one before its reform in 1582
        if calendar == "proleptic_gregorian" or (reference.year >= 1583 and not (stamps < _CALENDAR_REFORM).any()):
            return stamps, stamps.astype(np.int64)
    return _cftime_dates(raw, unit, reference, units, calendar), since


def _unknown_units(units: str, calendar: str) -> UnsupportedStoreError:
    return UnsupportedStoreError(
        f"time units {units!r} are not 'microseconds|…|hours|days since YYYY-MM-DD [hh:mm:ss] [+hh:mm]' (nor months of "
        f"the 360_day, common_years of the noleap calendar), the calendar is {calendar!r}; rewrite the time coordinate"
    )


def _elapsed_microseconds(raw: NDArray[Any], unit: str) -> NDArray[np.int64]:
    if "nano" in unit or unit == "ns":
        return _multiply_rounded(raw, 1) // 1000
    return _multiply_rounded(raw, _MICROSECONDS[unit])


def _multiply_rounded(raw: NDArray[Any], by: int) -> NDArray[np.int64]:
    """Return `by` times as much, rounded to whole numbers, which int64 must hold."""
    wide = raw.astype(np.float64) * by
    _check_present(np.abs(wide) < _LARGEST_ELAPSED)
    return raw.astype(np.int64) * by if raw.dtype.kind in "iu" else np.rint(wide).astype(np.int64)


@dataclass(frozen=True)
class _TimeReference:
    """The moment that times count from: as ISO 8601 without a zone, and the microseconds from there to UTC."""

    year: int
    text: str
    to_utc: int

    @classmethod
    def of(cls, match: re.Match[str]) -> _TimeReference:
        """Make it from a match of `_SINCE`."""
        digits = match["digits"] or ""
        year, month, day = (
            int(part or 1)
            for part in ((digits[:4], digits[4:6], digits[6:]) if digits else match.group("year", "month", "day"))
        )
        microseconds = round(float(match["second"] or 0) * 1e6)
        clock = f"{int(match['hour'] or 0):02d}:{int(match['minute'] or 0):02d}"
        text = f"{year:04d}-{month:02d}-{day:02d}T{clock}:{microseconds // 10**6:02d}.{microseconds % 10**6:06d}"
        zone = int(match["zone_hour"] or 0) * 60 + int(match["zone_minute"] or 0)
        return cls(year, text, zone * 60_000_000 * (1 if match["east"] == "-" else -1))


def _cftime_dates(raw: NDArray[Any], unit: str, reference: _TimeReference, units: str, calendar: str) -> NDArray[Any]:
    absent = f"calendar {calendar!r} with units {units!r} needs the package cftime: pip install cftime"
    with imports_needed(UnsupportedStoreError, absent):
        import cftime
    try:
        dates = np.asarray(cftime.num2date(raw, f"{unit} since {reference.text}", calendar), dtype=object)
        return dates + timedelta(microseconds=reference.to_utc) if reference.to_utc else dates
    except (ValueError, OverflowError, KeyError) as e:
        raise _unknown_units(units, calendar) from e


def stamp_digits(stamps: NDArray[Any]) -> NDArray[np.int64]:
    """Return YYYYMMDDhhmmss of dates on any calendar."""
    if stamps.dtype.kind != "M":
        whole = np.array([(t.year * 100 + t.month) * 100 + t.day for t in stamps], dtype=np.int64)
        clock = np.array([(t.hour * 100 + t.minute) * 100 + t.second for t in stamps], dtype=np.int64)
        return whole * 1_000_000 + clock
    months, days = stamps.astype("datetime64[M]"), stamps.astype("datetime64[D]")
    month, day = months.astype(np.int64), (days - months.astype("datetime64[D]")).astype(np.int64)
    seconds = (stamps.astype("datetime64[s]") - days.astype("datetime64[s]")).astype(np.int64)
    whole = ((month // 12 + 1970) * 100 + month % 12 + 1) * 100 + day + 1
    return whole * 1_000_000 + seconds // 3600 * 10_000 + seconds // 60 % 60 * 100 + seconds % 60


def _date_digits(when: Any, pad: str) -> int:
    """Return YYYYMMDDhhmmss of a date, partial ones filled up with `pad`: "2008" covers all that begins with 2008."""
    text = str(np.datetime64(when)) if isinstance(when, datetime | date) else str(when)
    match = _DATE.match(text)
    limits = (9999, 12, 31, 24, 59, 60)  # a calendar may have a 30th of February
    if match is None or any(int(part or 0) > most for part, most in zip(match.groups(), limits, strict=True)):
        raise WindowError(f"{when!r} is not a date like '2008', '2008-06', '2008-06-30' or '2008-06-30T18:00'")
    return int("".join(part.zfill(2) for part in match.groups() if part).ljust(14, pad))


# -- gaps ------------------------------------------------------------------------------------------------------------


def _month_numbers(elapsed: NDArray[np.int64], digits: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Return the number of each step's month, where the steps are calendar months or years; else None."""
    if digits is None or len(elapsed) < 2 or np.median(np.diff(elapsed)) < 28 * _MICROSECONDS["day"]:
        return None
    days = digits // 10**6 % 100
    # times on the same day of each month are steps of a month, whatever the months' lengths
    return digits // 10**10 * 12 + digits // 10**8 % 100 if int(days.max() - days.min()) <= 3 else None
