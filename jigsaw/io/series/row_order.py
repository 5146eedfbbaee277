"""Rows of a sample along each dim of space: the order in which they lie against those stored, and a part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError
from jigsaw.io.arguments import checked_choice, checked_mapping
from jigsaw.io.series.coords import rolled_longitudes
from jigsaw.io.series.store_survey import RowOrder, StoreSurvey, StoreVariable
from jigsaw.io.series.times import is_whole_number

_LAT_ORDERS = ("store", "north-first", "south-first")
_CIRCLE = 360.0
_ROUNDED_OFF = 1e-3  # of a step: what a coordinate in float32 may lie beyond the end of a region

GridCoordinates = Mapping[str, NDArray[Any]]
"""The coordinates along each dim of space."""


def make_row_order(
    survey: StoreSurvey, variable: StoreVariable, grid: GridCoordinates, lat_order: str, lon: str, region: Any
) -> tuple[RowOrder, GridCoordinates]:
    """Return the order of a sample's rows, and their coordinates: all of `grid`, or those inside of `region`."""
    checked_choice("lat_order", lat_order, _LAT_ORDERS, GridError)
    _check_orders(survey, variable, grid, {"lat": lat_order, "lon": lon})
    has_order = lat_order != "store" and "lat" in grid
    north_first = has_order and bool(grid["lat"][0] > grid["lat"][-1])
    flipped = ("lat",) if has_order and north_first != (lat_order == "north-first") else ()
    values = {d: v[::-1] if d in flipped else v for d, v in grid.items()}
    if lon != "store" and "lon" not in grid:
        raise GridError(f"lon={lon!r} turns longitudes, but the fields' spatial dims are {list(grid)}")
    order = RowOrder(flipped)
    if "lon" in grid:
        # 0, 90, 180, 270 within -180..180 are -180, -90, 0, 90: the sample's row 0 is the stored row 2, the `shift`
        shift, values["lon"] = rolled_longitudes(grid["lon"], lon)
        order = RowOrder(flipped, {"lon": shift} if shift else {})
    for dim, wanted in checked_mapping("region", region, "{'lat': (30, 60), 'lon': (-10, 40)}", GridError).items():
        if dim not in values:
            raise GridError(f"region={{{dim!r}: {wanted!r}}} names no dim of rows; the fields lie along {list(values)}")
        order, values[dim] = _part_of_rows(order, dim, values[dim], wanted, survey.states(variable, dim))
    return order, values


def _check_orders(survey: StoreSurvey, first: StoreVariable, grid: GridCoordinates, orders: Mapping[str, str]) -> None:
    for dim, order in orders.items():
        if order == "store" or dim not in grid:
            continue
        if not (survey.states(first, dim) and len(grid[dim]) and grid[dim].dtype.kind in "iuf"):
            argument = "lon" if dim == "lon" else "lat_order"
            raise GridError(
                f"{argument}={order!r} needs a coordinate of numbers along {first.dim(dim)!r}, which the store lacks; "
                f"use {argument}='store'"
            )


def _part_of_rows(
    order: RowOrder, dim: str, values: NDArray[Any], wanted: Any, stated: bool
) -> tuple[RowOrder, NDArray[Any]]:
    """Return the order, and the coordinates, of a run of the rows along a dim."""
    size = len(values)
    if isinstance(wanted, slice):
        start, stop, step = wanted.indices(size)
        count = stop - start if step == 1 else 0
    else:
        start, count, values = _rows_of_region(dim, values, wanted, stated)
    if count < 1:
        held = f"{values[0]:g} to {values[-1]:g}" if stated else f"0 to {size - 1}"
        raise GridError(
            f"region={{{dim!r}: {wanted!r}}} holds no row, or rows that do not follow each other; {dim!r} has {size}, "
            f"{held}"
        )
    # Of 9 rows that are stored upside down, the sample's rows 2 to 5 are the stored 6 to 3: it is the last that counts.
    # Of 16 longitudes that were rolled by 8, the sample's row 2 is the stored 10; rows after the stored 15 begin at 0.
    rolled = order.rolled.get(dim, 0)
    first = size - start - count if dim in order.flipped else (rolled + start) % size
    return replace(order, rolled={**order.rolled, dim: first}), np.take(
        values, range(start, start + count), mode="wrap"
    )


def _rows_of_region(dim: str, values: NDArray[Any], wanted: Any, stated: bool) -> tuple[int, int, NDArray[Any]]:
    """Return the first of the rows whose coordinates lie between two ends, their number, and all coordinates.

    Longitudes are counted from the first end on, eastward, so rows may go on at the beginning of a full circle.
    """
    or_rows = f", or, also without a coordinate along {dim!r}, a slice of rows"
    has_numbers = stated and values.dtype.kind in "iuf"
    first, last = region_ends(dim, wanted, or_rows, has_numbers)
    at = values.astype(np.float64)
    step = float(np.abs(np.diff(at)).min()) if len(at) > 1 else 0.0
    slack = _ROUNDED_OFF * step
    if dim != "lon":
        inside = (at >= min(first, last) - slack) & (at <= max(first, last) + slack)
    else:
        east = (at - first + slack) % _CIRCLE - slack
        inside = east <= (last - first) % _CIRCLE + slack if last - first < _CIRCLE else np.ones(len(at), bool)
        exact = values if values.dtype.kind == "f" else at  # integers may not hold 360, or what lies west of 0
        turns = np.rint((first + east - at) / _CIRCLE).astype(exact.dtype)
        values = exact + turns * exact.dtype.type(_CIRCLE)  # whole turns, so that coordinates stay exact
    rows = np.flatnonzero(inside)
    if not len(rows):
        return 0, 0, at
    breaks = np.flatnonzero(np.diff(rows) > 1)
    goes_round = dim == "lon" and abs(abs(at[-1] - at[0]) + step - _CIRCLE) < 0.5 * step
    if len(rows) == len(at) and goes_round:  # the whole circle, from the first end on
        return int(np.argmin(values)), len(rows), values
    if len(breaks) == 1 and goes_round and rows[0] == 0 and rows[-1] == len(at) - 1:
        return int(rows[breaks[0] + 1]), len(rows), values
    return (int(rows[0]), len(rows), values) if not len(breaks) else (0, 0, at)


def region_ends(dim: str, wanted: Any, else_text: str = "", has_numbers: bool = True) -> tuple[float, float]:
    """Check and return the two ends of a region along a dim; `else_text` says what else could be given there.

    `has_numbers` is False where no coordinate of numbers lies along the dim, so that two ends mean nothing.
    """
    ends: Any = wanted if isinstance(wanted, tuple | list) and len(wanted) == 2 else ()
    numbers = [float(end) for end in ends if isinstance(end, float | np.number) or is_whole_number(end)]
    # an open end, of inf, has no meaning around a circle
    has_ends = len(numbers) == 2 and not np.isnan(numbers).any() and (dim != "lon" or np.isfinite(numbers).all())
    if not has_ends or not has_numbers:
        raise GridError(f"region={{{dim!r}: {wanted!r}}} must be two coordinates, such as (30.0, 60.0){else_text}")
    return numbers[0], numbers[1]
