"""Rectilinear lat-lon grids and the weights that map one to another, a dim at a time, in float64.

On such grids regridding is separable: ``Y = A X Bᵀ``, where A [M, N] works along latitude and B along longitude.  Each
row of A and B uses a few consecutive source rows, so both are a `BandedMatrix`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError
from jigsaw.geometry.cut import Interval

LatLonValues = NDArray[np.float64]

CIRCLE, POLE = 360.0, 90.0


@dataclass(frozen=True, eq=False)
class GridRows:
    """One dim of a grid in degrees: the `centers` of its rows, rising and unwrapped, however the grid stores them.

    `edges` bound the cells: halfway between centers, half a row beyond the outer ones, at most at a pole.  A cell that
    ends less than half a row from a pole reaches it.  `noise` is the precision of the coordinate's dtype; points that
    are that close are one point.
    """

    name: str
    centers: LatLonValues
    falling: bool
    periodic: bool
    noise: float

    def __len__(self) -> int:
        return len(self.centers)

    @cached_property
    def edges(self) -> LatLonValues:
        if len(self) < 2:
            raise GridError(
                f"{self.name} has one row, at {self.centers[0]:g} degrees, whose width nobody knows; regrid by "
                "'bilinear', or give a grid of two rows or more"
            )
        steps = np.diff(self.centers)
        inner = self.centers[:-1] + steps / 2
        if self.periodic:
            first = (self.centers[0] + self.centers[-1] - CIRCLE) / 2
            return np.concatenate([[first], inner, [first + CIRCLE]])
        bounds = np.concatenate([[self.centers[0] - steps[0] / 2], inner, [self.centers[-1] + steps[-1] / 2]])
        if self.name == "lat":
            bounds[0] = -POLE if bounds[0] + POLE < steps[0] / 2 else bounds[0]
            bounds[-1] = POLE if POLE - bounds[-1] < steps[-1] / 2 else bounds[-1]
        return bounds

    def latitude_shares(self) -> LatLonValues:
        """Return each latitude row's share of the sphere, 1 on average, in the order in which the grid stores them."""
        shares = np.diff(np.sin(np.deg2rad(self.edges)))
        return (shares[::-1] if self.falling else shares) / shares.mean()


def latitude_rows(values: Any) -> GridRows:
    """Return the rows of a latitude coordinate, north or south first.

    Raises: `GridError` for values that do not rise or fall throughout, or lie beyond a pole.
    """
    stored, noise = _degree_values("lat", values)
    rising = stored[::-1] if stored[0] > stored[-1] else stored
    if np.any(np.diff(rising) <= noise):
        raise GridError(f"lat {_values_text(stored)} must rise or fall throughout; sort the grid by latitude")
    if rising[0] < -POLE - noise or rising[-1] > POLE + noise:
        raise GridError(f"lat {_values_text(stored)} lies beyond a pole; give latitudes in degrees, -90 to 90")
    return GridRows("lat", np.clip(rising, -POLE, POLE), bool(stored[0] > stored[-1]), False, noise)


def longitude_rows(values: Any) -> GridRows:
    """Return the rows of a longitude coordinate, periodic when they go round the globe.  It may be 0..360 or -180..180
    or any other cut of the circle, rolled or not, or a region.

    Raises: `GridError` for values that turn back, or go round more than once.
    """
    stored, noise = _degree_values("lon", values)
    steps = CIRCLE / 2 - (CIRCLE / 2 - np.diff(stored)) % CIRCLE  # in (-180, 180]
    if np.any(np.abs(steps) <= noise) or (np.any(steps < 0) and np.any(steps > 0)):
        raise GridError(
            f"lon {_values_text(stored)} must go eastwards or westwards throughout; sort the grid by longitude"
        )
    falling = bool(len(steps) and steps[0] < 0)
    unrolled = stored[0] + np.concatenate([[0.0], np.cumsum(steps)])
    rising = unrolled[::-1] if falling else unrolled
    gap, widest = CIRCLE - (rising[-1] - rising[0]), float(np.max(np.abs(steps), initial=0.0))
    if gap < widest / 2:
        raise GridError(
            f"lon {_values_text(stored)} goes round more than once: {len(stored)} values cover "
            f"{rising[-1] - rising[0]:g} "
            "degrees from first to last; drop the column that is stored twice"
        )
    return GridRows("lon", rising, falling, bool(gap <= 1.5 * widest), noise)


def _degree_values(name: str, values: Any) -> tuple[LatLonValues, float]:
    raw = np.asarray(values)
    is_number = raw.dtype.kind in "iuf" and np.all(np.isfinite(raw)) and not np.ma.is_masked(values)
    if raw.ndim != 1 or not len(raw) or not is_number:
        raise GridError(
            f"{name} must be finite numbers of degrees along one dim, got shape {raw.shape}, dtype {raw.dtype}; "
            "curvilinear and unstructured grids are not regridded"
        )
    eps = float(np.finfo(raw.dtype).eps) if raw.dtype.kind == "f" else 0.0
    return raw.astype(np.float64), max(1e-9, 2 * CIRCLE * eps)


def _values_text(values: LatLonValues) -> str:
    return f"[{values[0]:g}, {values[1]:g}, ..., {values[-1]:g}]" if len(values) > 2 else str(values.tolist())


@dataclass(frozen=True, eq=False)
class BandedMatrix:
    """A matrix [M, N] whose row o is ``values[o]`` from column ``first[o]`` on and zero elsewhere; columns wrap."""

    size: int
    first: NDArray[np.int64]
    values: LatLonValues

    def __len__(self) -> int:
        return len(self.first)

    def need(self, out: Interval) -> Interval:
        """Return the columns that the rows `out` use: from a start in [0, N), wrapped beyond N; or all of them once."""
        touched = self.values[slice(*out)] > 0
        if not touched.size:
            return 0, 0
        first = self.first[slice(*out)]
        start = int((first + touched.argmax(1)).min())
        stop = int((first + touched.shape[1] - touched[:, ::-1].argmax(1)).max())
        if stop - start >= self.size:
            return 0, self.size
        return start % self.size, start % self.size + stop - start

    def dense(self, out: Interval, need: Interval) -> LatLonValues:
        """Return the rows `out` as a matrix over the columns `need`, which include all that they use."""
        values = self.values[slice(*out)]
        matrix = np.zeros((len(values), need[1] - need[0]))
        rows, at = np.nonzero(values)
        columns = (self.first[slice(*out)][rows] + at - need[0]) % self.size
        np.add.at(matrix, (rows, columns), values[rows, at])
        return matrix


def regrid_weights(source: GridRows, target: GridRows, method: str) -> BandedMatrix:
    """Return the weights from `source` to `target`; every row sums to 1.  Raises: `GridError` beyond the source."""
    first, values = _METHOD_WEIGHTS[method](source, target)
    if source.falling:
        first, values = len(source) - first - values.shape[1], values[:, ::-1]
    if target.falling:
        first, values = first[::-1], values[::-1]
    return BandedMatrix(len(source), np.ascontiguousarray(first), np.ascontiguousarray(values))


def _conservative_weights(source: GridRows, target: GridRows) -> tuple[NDArray[np.int64], LatLonValues]:
    """Return the share of each target cell's area (longitude times the sine of latitude) that lies in each source cell:
    first-order conservative remapping (Jones, Monthly Weather Review 127, 1999), which factorizes on such grids.
    """
    edges = _unroll_circle(source, source.edges)
    wanted = _snap_points(_turn_points(source, target, edges, target.edges), edges, max(source.noise, target.noise))
    low, high = wanted[:-1, None], wanted[1:, None]
    first = np.searchsorted(edges, wanted[:-1], "right") - 1
    last = np.searchsorted(edges, wanted[1:], "left") - 1
    columns = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), len(edges) - 2)
    measure = _sine_of_degrees if source.name == "lat" else np.asarray
    # columns beyond the last were clipped to it, and count only at their own place
    inside = columns == first[:, None] + np.arange(columns.shape[1])
    overlap = measure(np.minimum(high, edges[columns + 1])) - measure(np.maximum(low, edges[columns]))
    overlap = np.where(inside, np.maximum(overlap, 0.0), 0.0)
    return first, overlap / overlap.sum(1, keepdims=True)


def _sine_of_degrees(degrees: LatLonValues) -> LatLonValues:
    return np.sin(np.deg2rad(degrees))


def _bilinear_weights(source: GridRows, target: GridRows) -> tuple[NDArray[np.int64], LatLonValues]:
    """Interpolate between the two source centers around each target center; an outer row holds up to its pole."""
    centers = _unroll_circle(source, source.centers)
    reach = centers
    if source.name == "lat" and len(source) > 1:
        at_pole = np.abs(source.edges[[0, -1]]) == POLE
        low, high = np.where(at_pole, source.edges[[0, -1]], centers[[0, -1]])
        reach = np.concatenate([[low], centers[1:-1], [high]])
    points = _turn_points(source, target, reach, target.centers)
    points = np.clip(_snap_points(points, centers, max(source.noise, target.noise)), centers[0], centers[-1])
    if len(centers) == 1:
        return np.zeros(len(points), np.int64), np.ones((len(points), 1))
    first = np.minimum(np.searchsorted(centers, points, "right") - 1, len(centers) - 2)
    upper = (points - centers[first]) / (centers[first + 1] - centers[first])
    return first, np.stack([1.0 - upper, upper], 1)


_METHOD_WEIGHTS: dict[str, Callable[[GridRows, GridRows], tuple[NDArray[np.int64], LatLonValues]]] = {
    "conservative": _conservative_weights,
    "bilinear": _bilinear_weights,
}
REGRID_METHODS = tuple(_METHOD_WEIGHTS)


def _unroll_circle(source: GridRows, points: LatLonValues) -> LatLonValues:
    """Return centers or edges of the source, twice round the globe where it is periodic."""
    if not source.periodic:
        return points
    once = points[: len(source)]
    return np.concatenate([once, once + CIRCLE, once[:1] + 2 * CIRCLE])


def _snap_points(points: LatLonValues, onto: LatLonValues, noise: float) -> LatLonValues:
    """Replace those `points` that differ from one of `onto` only by rounding, so that no sliver is left."""
    after = np.clip(np.searchsorted(onto, points), 1, len(onto) - 1) if len(onto) > 1 else np.zeros(len(points), int)
    nearest = np.where(points - onto[after - 1] < onto[after] - points, onto[after - 1], onto[after])
    return np.where(np.abs(points - nearest) <= noise, nearest, points)


def _turn_points(source: GridRows, target: GridRows, reach: LatLonValues, points: LatLonValues) -> LatLonValues:
    """Turn the target's `points` by whole circles to where the source begins; raise `GridError` where they leave
    `reach`.
    """
    noise = max(source.noise, target.noise)
    if source.name == "lon":
        points = points + CIRCLE * np.ceil((reach[0] - noise - points[0]) / CIRCLE)
    if points[0] < reach[0] - noise or points[-1] > reach[-1] + noise:
        raise GridError(
            f"the target's {source.name} reaches from {points[0]:g} to {points[-1]:g} degrees, beyond the source's "
            f"{reach[0]:g} to {reach[-1]:g}; nothing is extrapolated: crop the target, or give a larger source"
        )
    return np.clip(points, reach[0], reach[-1])
