"""Forcings: channels that follow from time and place alone, computed on a rank's own rows; nothing is read or sent.

- ``cos_zenith``: the cosine of the solar zenith angle, 0 at night;
- ``toa_radiation``: solar radiation on a horizontal plane at the top of the atmosphere, W m-2;
- ``day_progress``: ``day_progress_sin, day_progress_cos`` of local mean solar time, the fraction of the UTC day plus
  longitude / 360;
- ``year_progress``: ``year_progress_sin, year_progress_cos`` of the fraction of the tropical year since 1970;
- ``latlon``: ``sin_lat, cos_lat, sin_lon, cos_lon``.

``cos_zenith@6h`` and ``toa_radiation@1h`` are means over the hours, minutes or days *before* the time, as accumulated
fields are stamped. Times 3600 s, the latter is ERA5's ``tisr`` except for its solar constant. The progress of day and
year is GraphCast's (Lam et al., Science 382, 2023). On a calendar of 360, 365 or 366 days a year it is that of the
calendar's year. The sun is that of `jigsaw.io.series.solar`.

Static fields of the store (land-sea mask, orography) do not need a forcing: they are fields like others, at every step.

>>> jigsaw.io.forcings.cos_zenith(["2020-06-21T12:00"], lat=[23.5], lon=[0.0, 180.0]).round(4)
array([[[1., 0.]]])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jigsaw.errors import FieldError, GridError, WindowError
from jigsaw.io import arguments
from jigsaw.io.series import solar
from jigsaw.io.series.cell_grid import CellGrid, degrees_of_places
from jigsaw.io.series.fields import FieldChannel
from jigsaw.io.series.solar import GridAngles, SolarInstant, SunPosition
from jigsaw.io.series.statistics import NormalizeArgument, Statistics, channel_scales
from jigsaw.io.series.times import parse_duration

if TYPE_CHECKING:
    from jigsaw.io.series.store_survey import RowOrder, StoreSurvey, StoreVariable

ForcingValues = NDArray[np.float64]

SOLAR_CONSTANT = 1361.0
"""Solar constant in W m-2 at the mean distance of the sun: Kopp and Lean, Geophys. Res. Lett. 38, 2011."""

FORCING_NAMES = ("cos_zenith", "toa_radiation", "day_progress", "year_progress", "latlon")
_AVERAGED_FORCINGS = ("cos_zenith", "toa_radiation")
_MICROSECONDS_A_DAY = 86_400_000_000
_PLACES_AT_ONCE = 1 << 16  # computed at a time, so that the intermediate values stay in cache


@dataclass(frozen=True)
class AskedForcing:
    """A forcing as it was asked for; `days` is the interval of a mean, 0 for the instant."""

    asked: str
    name: str
    days: float = 0.0

    @classmethod
    def parse(cls, asked: str) -> AskedForcing:
        name, at, interval = str(asked).partition("@")
        if name not in FORCING_NAMES:
            raise FieldError(f"forcings has {asked!r}, which is none of {', '.join(FORCING_NAMES)}")
        if at and name not in _AVERAGED_FORCINGS:
            raise FieldError(
                f"forcings has {asked!r}, but only {' and '.join(_AVERAGED_FORCINGS)} have means over an interval"
            )
        return cls(asked, name, _interval_days(interval, f"forcings has {asked!r}, whose interval") if at else 0.0)

    @property
    def channels(self) -> tuple[str, ...]:
        if self.name == "latlon":
            return "sin_lat", "cos_lat", "sin_lon", "cos_lon"
        progress = self.name in ("day_progress", "year_progress")
        return (f"{self.name}_sin", f"{self.name}_cos") if progress else (self.asked,)

    @property
    def is_static(self) -> bool:
        return self.name == "latlon"

    def at(self, instant: SolarInstant, places: GridAngles) -> tuple[ForcingValues, ...]:
        """Return the values of its channels, each of a shape that broadcasts to that of the places."""
        if self.name == "latlon":
            return places.sin_lat, places.cos_lat, places.sin_lon, places.cos_lon
        if self.name == "year_progress":
            angle = math.tau * instant.year
            return np.array(math.sin(angle)), np.array(math.cos(angle))
        if self.name == "day_progress":
            sine, cosine = math.sin(math.tau * instant.clock), math.cos(math.tau * instant.clock)
            turned = sine * places.cos_lon + cosine * places.sin_lon
            return turned, cosine * places.cos_lon - sine * places.sin_lon
        is_zenith = self.name == "cos_zenith"
        if self.days and is_zenith:
            return (solar.mean_cos_zenith(instant, self.days, places),)
        if self.days:
            return (solar.mean_cos_zenith(instant, self.days, places, lambda sun: sun.distance**-2) * SOLAR_CONSTANT,)
        sun = SunPosition.at(instant)
        values = solar.cos_zenith_now(sun, places)
        return (values if is_zenith else values * (SOLAR_CONSTANT / sun.distance**2),)


def _interval_days(interval: str, what: str) -> float:
    try:
        microseconds, months = parse_duration(interval)
    except WindowError:
        microseconds, months = 0, 0
    if months or microseconds <= 0:
        raise FieldError(f"{what} {interval!r} is not a positive number of minutes, hours or days, like '6h'")
    return microseconds / _MICROSECONDS_A_DAY


def cos_zenith(times: ArrayLike, lat: ArrayLike, lon: ArrayLike, interval: str | None = None) -> ForcingValues:
    """Return the cosine of the solar zenith angle [T, lat, lon], 0 at night; or its mean over `interval` before each
    time.

    `times` are UTC: datetime64, `datetime`, ISO strings or cftime objects; `lat` and `lon` 1-d, in degrees. For
    places of their own give both with one shape of two dims: [T, y, x], or for cells ``lat[:, None]``, [T, cells, 1].

    Raises: `GridError`, `UnsupportedStoreError` for coordinates that are not degrees or dates, `FieldError` for an
    invalid interval.

    >>> jigsaw.io.forcings.cos_zenith("2020-03-20T12:00", lat=[0.0, 60.0], lon=[0.0]).round(2)
    array([[[1. ],
            [0.5]]])
    """
    return _compute_forcing("cos_zenith", times, lat, lon, interval)[:, 0]


def toa_radiation(times: ArrayLike, lat: ArrayLike, lon: ArrayLike, interval: str | None = None) -> ForcingValues:
    """Return solar radiation on a horizontal plane at the top of the atmosphere [T, lat, lon], W m-2; else as
    `cos_zenith`.

    >>> jigsaw.io.forcings.toa_radiation("2020-03-20T12:00", lat=[0.0, 60.0], lon=[0.0]).round()
    array([[[1371.],
            [ 688.]]])
    """
    return _compute_forcing("toa_radiation", times, lat, lon, interval)[:, 0]


def day_progress(times: ArrayLike, lon: ArrayLike) -> ForcingValues:
    """Return sine and cosine of local mean solar time as an angle, 0 at midnight: [T, 2, lon]; else as `cos_zenith`.

    >>> jigsaw.io.forcings.day_progress("2020-03-20T06:00", lon=[0.0, 90.0]).round(2)
    array([[[ 1.,  0.],
            [ 0., -1.]]])
    """
    return _compute_forcing("day_progress", times, [0.0], lon)[:, :, 0]


def year_progress(times: ArrayLike) -> ForcingValues:
    """Return sine and cosine of the fraction of the year as an angle: [T, 2]; `times` as for `cos_zenith`.

    >>> jigsaw.io.forcings.year_progress(["2020-01-01", "2020-07-01"]).shape
    (2, 2)
    """
    return _compute_forcing("year_progress", times, [0.0], [0.0])[:, :, 0, 0]


def latlon(lat: ArrayLike, lon: ArrayLike) -> ForcingValues:
    """Return sine and cosine of latitude, then of longitude, both given in degrees: [4, lat, lon].

    >>> jigsaw.io.forcings.latlon([30.0], [90.0]).round(2).flatten()
    array([0.5 , 0.87, 1.  , 0.  ])
    """
    return _compute_forcing("latlon", "1970-01-01", lat, lon)[0]


def _compute_forcing(
    name: str, times: ArrayLike, lat: ArrayLike, lon: ArrayLike, interval: str | None = None
) -> ForcingValues:
    paired = np.ndim(lat) == np.ndim(lon) == 2
    forcings = GridForcings.of([name if interval is None else f"{name}@{interval}"], GridAngles.of(lat, lon, paired))
    out = np.empty((np.size(np.asarray(times)), len(forcings.names), *forcings.places.shape))
    forcings.write(out, np.asarray(times))
    return out


@dataclass(frozen=True, eq=False)
class GridForcings:
    """The forcings of a dataset over its whole grid, as channels with a scale and offset each."""

    forcings: tuple[AskedForcing, ...]
    places: GridAngles
    scale: tuple[float, ...] = field(default=())
    offset: tuple[float, ...] = field(default=())

    @classmethod
    def of(
        cls, asked: Sequence[str], places: GridAngles, fields: Sequence[str] = (), normalize: NormalizeArgument = None
    ) -> GridForcings:
        """Make forcings from their names. `normalize` may name forcings or their channels, each (mean, std); others
        stay as they are. A file of statistics is for the fields alone.
        """
        parsed = tuple(map(AskedForcing.parse, arguments.checked_names("forcings", asked, FORCING_NAMES[0])))
        names = [name for forcing in parsed for name in forcing.channels]
        for name in names:
            if names.count(name) > 1 or name in fields:
                raise FieldError(f"forcings={list(asked)} makes channel {name!r} a second time; name it once")
        scales = normalize if isinstance(normalize, Mapping) else {}
        pairs = [_forcing_scale(f, channel, scales) for f in parsed for channel in f.channels]
        return cls(parsed, places, tuple(scale for scale, _ in pairs), tuple(offset for _, offset in pairs))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for forcing in self.forcings for name in forcing.channels)

    @property
    def is_static(self) -> bool:
        return all(forcing.is_static for forcing in self.forcings)

    def check(self, times: ArrayLike) -> None:
        """Refuse times that `write` could not use."""
        if not self.is_static:
            solar.solar_instants(times)

    def unnamed(self, normalize: NormalizeArgument) -> NormalizeArgument:
        """Return the part of `normalize` that is for the fields; None when all of it is for the forcings."""
        if not isinstance(normalize, Mapping) or isinstance(normalize, Statistics):
            return normalize
        own_names = {*self.names, *(forcing.asked for forcing in self.forcings)}
        rest = {key: value for key, value in normalize.items() if key not in own_names}
        return rest if rest or not normalize else None

    def taken(self, *rows: Sequence[int]) -> GridForcings:
        """Return these forcings over some rows of each dim: those that a rank holds, including wrapped ones."""
        return GridForcings(self.forcings, self.places.taken(*rows), self.scale, self.offset)

    def write(self, out: NDArray[Any], times: NDArray[Any]) -> None:
        r"""Write the values at `times` into `out` [T, C, \*space], rounded to its dtype."""
        when = [SolarInstant(0.0, 0.0, 0.0)] * len(out) if self.is_static else solar.solar_instants(times)
        rows, *others = self.places.shape
        at_once = max(1, _PLACES_AT_ONCE // max(1, math.prod(others)))
        for first in range(0, rows, at_once):
            block = range(first, min(first + at_once, rows))
            places = self.places.taken(block, *map(range, others))
            for t, instant in enumerate(when):
                self._write(out[t, :, block.start : block.stop], instant, places)

    def _write(self, out: NDArray[Any], instant: SolarInstant, places: GridAngles) -> None:
        values = [value for forcing in self.forcings for value in forcing.at(instant, places)]
        for channel, (value, scale, offset) in enumerate(zip(values, self.scale, self.offset, strict=True)):
            out[channel] = value if (scale, offset) == (1.0, 0.0) else value * scale + offset


def _forcing_scale(forcing: AskedForcing, channel: str, normalize: Mapping[str, Any]) -> tuple[float, float]:
    own_scales = {key: normalize[key] for key in (channel, forcing.asked) if key in normalize}
    if not own_scales:
        return 1.0, 0.0
    scale, offset = channel_scales([FieldChannel(channel, forcing.asked, forcing.asked)], own_scales)
    return scale[0], offset[0]


def geographic_angles(
    grid: Mapping[str, ArrayLike],
    survey: StoreSurvey,
    variable: StoreVariable,
    cells: CellGrid | None,
    turn: RowOrder,
    asked: Sequence[str],
) -> GridAngles:
    """Return the places of a variable's grid: of rows and columns, of cells, or of each point of a curvilinear grid, of
    which `turn` may take a part.

    Raises: `GridError` for a grid without geographic latitudes and longitudes: a volume, a rotated pole or a projection
    alone, dims without coordinates.
    """
    if cells is not None:
        return GridAngles.of(cells.lat, cells.lon, paired=True)
    angles = survey.coords.plane(variable.table)[1] if tuple(grid) == ("y", "x") else {}
    if angles:
        shape = variable.size("y"), variable.size("x")
        most = {"lat": 90, "lon": 720}
        degrees = [degrees_of_places(survey, angles[name], shape, most[name]) for name in most]
        starts = [(turn.rolled.get(dim, 0), len(np.asarray(grid[dim]))) for dim in ("y", "x")]
        part = tuple(slice(first, first + count) for first, count in starts)
        return GridAngles.of(degrees[0][part], degrees[1][part], paired=True)
    if tuple(grid) != ("lat", "lon"):
        raise GridError(
            f"forcings={list(asked)} need latitudes and longitudes, but the fields' spatial dims are {list(grid)} "
            "without them; give the store both along these dims, leave the forcings out, or store them as fields"
        )
    for dim, values in grid.items():
        _check_degrees(dim, np.asarray(values), survey.attrs(variable, dim), asked)
    return GridAngles.of(grid["lat"], grid["lon"])


def _check_degrees(dim: str, values: NDArray[Any], attrs: Mapping[str, Any], asked: Sequence[str]) -> None:
    counted = values.dtype.kind in "iu" and np.array_equal(values, np.arange(values.size))
    if counted and not attrs:
        raise GridError(
            f"forcings={list(asked)} need the degrees of {dim!r}, but it only counts from 0 to {values.size - 1}; "
            "give the store a coordinate with units"
        )
    standard, units = (str(attrs.get(key, "")).lower() for key in ("standard_name", "units"))
    if standard.startswith("grid_") or units.startswith("rad"):
        raise GridError(
            f"forcings={list(asked)} need geographic degrees, but {dim!r} has standard_name {standard!r} and units "
            f"{units!r}; leave the forcings out, or store true latitudes and longitudes"
        )
