r"""Position of the sun: instants, its position at one, and the cosine of its zenith angle over a grid.

The position is that of Meeus, Astronomical Algorithms (2nd ed., 1998, chapters 25 and 28), the low-precision theory
that NOAA's solar calculator uses: 0.01 degrees between the years 1900 and 2100, with the mean orbit drifting slowly
outside.  With latitude :math:`\varphi`, declination :math:`\delta` and hour angle h,
:math:`\cos z = \sin\varphi \sin\delta + \cos\varphi \cos\delta \cos h`.

Sines and cosines are taken of one row, one column or one instant at a time. Over the rows that a rank holds there are
products and sums alone, which are rounded alike wherever they are computed. So a value does not depend on how the grid
is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jigsaw.errors import GridError, UnsupportedStoreError

SolarValues = NDArray[np.float64]

TROPICAL_YEAR = 365.24219
_DAY_MICROSECONDS = 86_400_000_000
_J2000_DAY = 10_957  # 2000-01-01, in days since 1970-01-01
_J2000_ORDINAL = 2_451_545.0  # noon of that day, as a Julian day number
_EPOCH_ORDINAL = 2_440_587.5  # 1970-01-01T00
# calendars in which the sun keeps to the calendar's year, whatever its length
_DAYS_OF_CALENDAR_YEAR = {"noleap": 365, "365_day": 365, "all_leap": 366, "366_day": 366, "360_day": 360}
_LONGEST_PIECE = 0.25  # days for which the sun's declination is held when a mean is taken


@dataclass(frozen=True)
class SolarInstant:
    """Time as the sun sees it: days since noon of 2000-01-01, the fraction of the UTC day, and that of the year.

    On a calendar of years of 360, 365 or 366 days the year is the calendar's own; `days` are those of the same season
    of 2001. On a real calendar the year is the tropical year counted from 1970, as GraphCast counts it.
    """

    days: float
    clock: float
    year: float

    def shifted(self, days: float) -> SolarInstant:
        """Return the instant `days` later; the clock may leave 0..1."""
        return replace(self, days=self.days + days, clock=self.clock + days)


def solar_instants(times: ArrayLike) -> tuple[SolarInstant, ...]:
    """Return instants of datetime64, `datetime`, ISO strings, or cftime objects of any calendar; all are UTC."""
    flat = np.atleast_1d(np.asarray(times)).ravel()
    if flat.dtype.kind == "O" and flat.size and hasattr(flat[0], "calendar"):
        return tuple(_instant_of_cftime(t) for t in flat)
    if flat.dtype.kind not in "MUO":
        raise UnsupportedStoreError(
            f"times of type {flat.dtype} have no date, so the sun's place is unknown; "
            "give the time coordinate CF units such as 'hours since 1970-01-01'"
        )
    try:
        stamps = flat.astype("datetime64[us]")
    except (ValueError, TypeError) as error:
        raise UnsupportedStoreError(f"times from {str(flat[0])!r} on are not dates: {error}") from None
    if np.isnat(stamps).any():
        raise UnsupportedStoreError("a time is missing (NaT), so the sun's place is unknown; drop it")
    return tuple(_instant_of_microseconds(t) for t in stamps.astype(np.int64).tolist())


def _instant_of_microseconds(since_1970: int) -> SolarInstant:
    day, rest = divmod(since_1970, _DAY_MICROSECONDS)
    clock = rest / _DAY_MICROSECONDS
    return SolarInstant(day - _J2000_DAY + clock - 0.5, clock, (day + clock) / TROPICAL_YEAR % 1.0)


def _instant_of_cftime(t: Any) -> SolarInstant:
    clock = (((t.hour * 60 + t.minute) * 60 + t.second) * 1_000_000 + t.microsecond) / _DAY_MICROSECONDS
    if t.calendar in _DAYS_OF_CALENDAR_YEAR:
        year = (t.dayofyr - 1 + clock) / _DAYS_OF_CALENDAR_YEAR[t.calendar]
        return SolarInstant(365.5 + year * TROPICAL_YEAR, clock, year)  # 2001 begins 365.5 days after J2000
    day = math.floor(t.replace(hour=12, minute=0, second=0, microsecond=0).toordinal()) - 0.5
    days = day - _J2000_ORDINAL + clock
    return SolarInstant(days, clock, (day - _EPOCH_ORDINAL + clock) / TROPICAL_YEAR % 1.0)


@dataclass(frozen=True)
class SunPosition:
    """The sun's declination as sine and cosine, its hour angle at Greenwich (radians) and its distance (au)."""

    sin_declination: float
    cos_declination: float
    hour: float
    distance: float

    @classmethod
    def at(cls, instant: SolarInstant) -> SunPosition:
        """Compute the position by Meeus, chapters 25 and 28 (equation of time); nutation by its largest term."""
        t = instant.days / 36525.0
        mean_longitude = 280.46646 + t * (36000.76983 + t * 0.0003032)
        anomaly = math.radians(357.52911 + t * (35999.05029 - t * 0.0001537))
        eccentricity = 0.016708634 - t * (0.000042037 + t * 0.0000001267)
        center = (
            (1.914602 - t * (0.004817 + t * 0.000014)) * math.sin(anomaly)
            + (0.019993 - t * 0.000101) * math.sin(2 * anomaly)
            + 0.000289 * math.sin(3 * anomaly)
        )
        node = math.radians(125.04 - 1934.136 * t)
        nutation = -0.00478 * math.sin(node)
        longitude = math.radians(mean_longitude + center - 0.00569 + nutation)
        seconds = 21.448 - t * (46.8150 + t * (0.00059 - t * 0.001813))
        obliquity = math.radians(23 + (26 + seconds / 60) / 60 + 0.00256 * math.cos(node))
        ascension = math.degrees(math.atan2(math.cos(obliquity) * math.sin(longitude), math.cos(longitude)))
        equation = mean_longitude - 0.0057183 - ascension + nutation * math.cos(obliquity)
        equation = (equation + 180.0) % 360.0 - 180.0
        sine = math.sin(obliquity) * math.sin(longitude)
        distance = 1.000001018 * (1 - eccentricity**2) / (1 + eccentricity * math.cos(anomaly + math.radians(center)))
        hour = math.tau * (instant.clock - 0.5) + math.radians(equation)
        return cls(sine, math.sqrt(1 - sine * sine), hour, distance)


@dataclass(frozen=True, eq=False)
class GridAngles:
    """Places of a grid: longitudes in radians, and the sines and cosines of both angles.

    They broadcast to the shape of the grid: [lat, 1] and [1, lon], or the whole shape where each place has its own.
    """

    lon: SolarValues
    sin_lat: SolarValues
    cos_lat: SolarValues
    sin_lon: SolarValues
    cos_lon: SolarValues

    @classmethod
    def of(cls, lat: ArrayLike, lon: ArrayLike, paired: bool = False) -> GridAngles:
        """Make angles from degrees: those of rows and of columns, or `paired`, of one shape, those of each place."""
        north, east = _checked_radians("lat", lat, 90.0, paired), _checked_radians("lon", lon, 720.0, paired)
        if not paired:
            north, east = north[:, None], east[None, :]
        elif north.shape != east.shape:
            raise GridError(
                f"lat has the shape {list(north.shape)} and lon {list(east.shape)}; give both of each place"
            )
        return cls(east, *(_map_each(f, values) for values in (north, east) for f in (math.sin, math.cos)))

    def taken(self, *rows: Sequence[int]) -> GridAngles:
        """Return the angles over some rows of each dim of the grid."""
        angles = [self.lon, self.sin_lat, self.cos_lat, self.sin_lon, self.cos_lon]
        for dim, (size, picked) in enumerate(zip(self.shape, rows, strict=True)):
            at = np.array(picked, dtype=np.int64)
            angles = [values.take(at, dim) if values.shape[dim] == size else values for values in angles]
        return GridAngles(*angles)

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.sin_lat.shape, self.sin_lon.shape)


def _checked_radians(name: str, values: ArrayLike, most: float, paired: bool) -> SolarValues:
    degrees = np.asarray(values)
    if (degrees.ndim != 1 and not paired) or degrees.dtype.kind not in "fiu":
        raise GridError(f"{name} must be a 1-d array of degrees, not {degrees.dtype}{list(degrees.shape)}")
    wide = degrees.astype(np.float64)
    if not (np.abs(wide) <= most + 1e-4).all():
        raise GridError(
            f"{name} values {wide.min():g}..{wide.max():g} are not degrees of {name} (at most {most:g}), so the sun's "
            "place over them is unknown; leave the forcings out, or mend the coordinate"
        )
    return np.deg2rad(wide)


def _map_each(function: Callable[[float], float], values: SolarValues) -> SolarValues:
    """Apply the function to each value: vectorized sines may differ with a value's place in its array."""
    return np.array([function(x) for x in values.ravel().tolist()], dtype=np.float64).reshape(values.shape)


def cos_zenith_now(sun: SunPosition, at: GridAngles) -> SolarValues:
    """Return the cosine of the sun's zenith angle now, over the grid, 0 where it is below the horizon."""
    hour = math.cos(sun.hour) * at.cos_lon - math.sin(sun.hour) * at.sin_lon
    cosine = at.cos_lat * sun.cos_declination * hour
    cosine += at.sin_lat * sun.sin_declination
    return np.maximum(cosine, 0.0, out=cosine)


def mean_cos_zenith(
    instant: SolarInstant, days: float, at: GridAngles, weight: Callable[[SunPosition], float] = lambda _: 1.0
) -> SolarValues:
    """Return the mean of `cos_zenith_now`, times a `weight` of the sun, over the `days` up to an instant.

    The integral over the hour angle between sunrise and sunset is taken exactly; the declination is held for a quarter
    of a day at most.
    """
    pieces = max(1, math.ceil(days / _LONGEST_PIECE))
    mean = np.zeros(at.shape)
    for piece in range(pieces):
        sun = SunPosition.at(instant.shifted(days * ((piece + 0.5) / pieces - 1.0)))
        mean += _daylight_integral(sun, math.pi * days / pieces, at) * (weight(sun) / (math.tau * days))
    return mean


def _daylight_integral(sun: SunPosition, half: float, at: GridAngles) -> SolarValues:
    """Integrate max(0, cos z) over the hour angles within `half` (at most pi) of the sun's."""
    a, b = at.sin_lat * sun.sin_declination, at.cos_lat * sun.cos_declination
    cos_set = np.clip(-a / b, -1.0, 1.0)
    sunset = _SunsetIntegral(a, b, _map_each(math.acos, cos_set), np.sqrt(1.0 - cos_set**2))
    first, last = _hour_angles(sun.hour - half, at), _hour_angles(sun.hour + half, at)
    passed = sunset.until(*last)
    passed -= sunset.until(*first)
    # a span over midnight ends at an hour before its start
    over = (last[0] < first[0]) if half < math.pi else np.ones(at.lon.shape, np.bool_)
    passed += sunset.day() * over
    return np.maximum(passed, 0.0, out=passed)


def _hour_angles(greenwich: float, at: GridAngles) -> tuple[SolarValues, SolarValues]:
    """Return the hour angle along the columns, in -pi..pi, and its sine."""
    sine = math.sin(greenwich) * at.cos_lon + math.cos(greenwich) * at.sin_lon
    return (at.lon + (greenwich + math.pi)) % math.tau - math.pi, sine


@dataclass(frozen=True, eq=False)
class _SunsetIntegral:
    """cos z = a + b cos h is above 0 for hour angles within `hour` of noon; `sine` is that hour's; of each latitude."""

    a: SolarValues
    b: SolarValues
    hour: SolarValues
    sine: SolarValues

    def until(self, hour: SolarValues, sine: SolarValues) -> SolarValues:
        """Return the integral of max(0, cos z) from noon to hour angles, over the grid."""
        lit = np.clip(hour, -self.hour, self.hour)
        risen = np.where(hour > self.hour, self.sine, np.where(hour < -self.hour, -self.sine, sine))
        lit *= self.a
        risen *= self.b
        return np.add(lit, risen, out=lit)

    def day(self) -> SolarValues:
        """Return the integral over the whole day, for each latitude."""
        return 2.0 * (self.a * self.hour + self.b * self.sine)
