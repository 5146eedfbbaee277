"""Survey of a store: its variables with canonical dims, their one grid, levels and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError, WindowError
from jigsaw.io.arguments import checked_names
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.series.coords import (
    BOUNDARY_ATTR,
    CELL_ROLE,
    FURTHER_ROLES,
    SPATIAL_ROLES,
    TRAJECTORY_ROLE,
    DimNaming,
    StoreCoordinates,
)
from jigsaw.io.series.fields import FieldChannel, LevelCoordinate
from jigsaw.io.series.request import DROPPED_DIM, IndexPicks, NanRule, ReadPart, StoredOrder
from jigsaw.io.series.times import TimeAxis, decode_times, is_accumulated, kind_of_times

TIME_AT, CHANNEL_AT = 0, 1


@dataclass(frozen=True)
class StoreVariable:
    """A stored array and the role of each of its dims."""

    table: ArrayTable
    roles: tuple[str, ...]

    @property
    def space(self) -> tuple[str, ...]:
        """Its spatial dims in canonical order, or as they are stored where the format names them."""
        if self.table.roles:
            return tuple(role for role in self.roles if role not in FURTHER_ROLES)
        return tuple(role for role in SPATIAL_ROLES if role in self.roles)

    def size(self, role: str) -> int:
        return self.table.shape[self.roles.index(role)]

    def dim(self, role: str) -> str:
        return self.table.dims[self.roles.index(role)]

    @property
    def further(self) -> tuple[int, ...]:
        """Dims of which a place must be chosen: members, lead times, and those without a role."""
        return tuple(d for d, role in enumerate(self.roles) if role not in ("time", "level", *self.space))

    @property
    def unchosen(self) -> tuple[int, ...]:
        """Those of them that have no default: of trajectories all are samples."""
        return tuple(d for d in self.further if self.roles[d] != TRAJECTORY_ROLE)


class StoreSurvey:
    """Data variables that a store has for a reader of fields, and the meaning of their dims.

    `channels` are the names along a dim of channels for which the store has none.
    """

    def __init__(
        self,
        store: ArrayStore,
        dims: Mapping[str, str] | None = None,
        along: str = "time",
        channels: Sequence[str] | None = None,
    ) -> None:
        self.store = store
        self._channels = None if channels is None else checked_names("channels", channels)
        self.coords = StoreCoordinates(store.arrays, DimNaming.of(dims, along, store.arrays), store.attrs)
        self._values: dict[tuple[str, str, int], NDArray[Any]] = {}
        self.variables = {
            name: StoreVariable(table, self.coords.roles(table))
            for name, table in store.arrays.items()
            if self.coords.is_field(table)
        }

    def values(self, variable: StoreVariable, role: str) -> NDArray[Any]:
        """Return the coordinate values along the dim of a role, read once."""
        return self.values_along(variable, variable.dim(role))

    def values_along(self, variable: StoreVariable, dim: str) -> NDArray[Any]:
        """Return the coordinate values along a dim, by the store's name of it, read once."""
        table = variable.table
        key = self.coords.name(table, dim) or table.name, dim, table.shape[table.dims.index(dim)]
        if key not in self._values:
            self._values[key] = self.coords.values(self.store, table, dim)
        return self._values[key]

    def states(self, variable: StoreVariable, role: str) -> bool:
        """Say whether the store has a coordinate along the dim of a role; without one, `values` are places 0, 1, 2…"""
        return self.coords.name(variable.table, variable.dim(role)) is not None

    def attrs(self, variable: StoreVariable, role: str) -> Mapping[str, Any]:
        return self.attrs_along(variable, variable.dim(role))

    def attrs_along(self, variable: StoreVariable, dim: str) -> Mapping[str, Any]:
        """Return the attributes of the coordinate along a dim, by the store's name of it."""
        return self.coords.attrs(variable.table, dim)

    def boundary_types(self, variable: StoreVariable) -> dict[str, tuple[str, str]]:
        """Return what lies beyond the first and last row of each dim of space: ``open``, ``wall`` or ``periodic``;
        nothing where the store does not say it.
        """
        stated = {role: self.attrs(variable, role).get(BOUNDARY_ATTR) for role in variable.space}
        return {role: (ends[0], ends[1]) for role, ends in stated.items() if isinstance(ends, tuple)}

    @cached_property
    def levels(self) -> dict[str, LevelCoordinate | None]:
        """Levels of every variable, None for one without a level dim.

        Raises: `FieldError` for `channels` that no dim lacks, or in another number.
        """
        levels_by_array = {name: self._levels(v) for name, v in self.variables.items()}
        if self._channels is not None and self._channels not in [
            levels.names for levels in levels_by_array.values() if levels
        ]:
            lacking = [f"{n} ({len(v.values)})" for n, v in levels_by_array.items() if v and v.counted and not v.names]
            raise FieldError(
                f"channels={list(self._channels)} are {len(self._channels)} names; the store has "
                f"{', '.join(lacking) or 'no array'} with a dim of channels without names"
            )
        return levels_by_array

    def _levels(self, variable: StoreVariable) -> LevelCoordinate | None:
        if "level" not in variable.roles:
            return None
        values = self.values(variable, "level")
        # levels that are texts are channels by name; those, and levels without a coordinate, may be chosen by place,
        # too
        counted = values.dtype.kind not in "fiu" or not self.states(variable, "level")
        numeric = np.arange(len(values)) if counted else values
        names = () if values.dtype.kind in "fiu" else tuple(_text_of(value) for value in values.tolist())
        if counted and not names and len(self._channels or ()) == len(values):
            names = self._channels or ()
        units = str(self.attrs(variable, "level").get("units", ""))
        return LevelCoordinate(numeric.astype(np.float64), units, counted, names)

    def check_fields(self) -> None:
        """Raise `FieldError` where nothing lies on a grid, naming what exists and how to say what its dims are."""
        if self.variables:
            return
        arrays = [t for t in self.store.arrays.values() if len(t.dims) > 1]
        shown = [f"{t.name} ({', '.join(f'{d} {n}' for d, n in zip(t.dims, t.shape, strict=True))})" for t in arrays]
        why = (
            f"it has {', '.join(shown) or 'no array of several dims'}; where names and attributes do not tell what "
            "dims are, say it with dims={'lat': …, 'lon': …, 'time': …}, or dims={'cell': …}"
        )
        raise FieldError(
            f"the store {self.store.url} has no variable on a lat-lon grid, on cells or in a volume: {why}"
        )

    def of(self, channels: Sequence[FieldChannel]) -> tuple[StoreVariable, ...]:
        """Return the variables of these channels, each once, in order.

        Raises: `UnsupportedStoreError` for a scale or offset that is not a number; `GridError` without rows of space.
        """
        variables = tuple(self.variables[name] for name in dict.fromkeys(c.array for c in channels))
        for variable in variables:
            variable.table.check_readable()
            variable.table.check_rows(variable.dim(role) for role in variable.space)
        return variables

    def grid(self, variables: Sequence[StoreVariable]) -> dict[str, NDArray[Any]]:
        """Return the coordinates along each spatial dim, in canonical order; variables must share them."""
        first = variables[0]
        values = {role: self.values(first, role) for role in first.space}
        for role in ("lat", "lon"):
            if role in values and values[role].dtype.kind == "f" and not np.isfinite(values[role]).all():
                row = int(np.flatnonzero(~np.isfinite(values[role]))[0])
                raise GridError(
                    f"array {first.table.name!r} has no {role} for row {row} of {first.dim(role)!r}: its coordinate "
                    f"has {values[role][row]} there; rewrite the coordinate, or name another with dims="
                )
        for other in variables[1:]:
            sizes = [(role, v.size(role)) for v in (first, other) for role in v.space]
            if len(set(sizes)) != len(first.space) or len(sizes) != 2 * len(first.space):
                raise GridError(
                    f"{_grid_text(first)} and {_grid_text(other)} lie on different grids; open them one at a time"
                )
            if CELL_ROLE in values and first.dim(CELL_ROLE) != other.dim(CELL_ROLE):
                raise GridError(
                    f"arrays {first.table.name!r} and {other.table.name!r} lie on the cells {first.dim(CELL_ROLE)!r} "
                    f"and {other.dim(CELL_ROLE)!r}; open them one at a time"
                )
            for role, own in values.items():
                theirs = self.values(other, role)
                if not _same_coordinates(own, theirs):
                    raise GridError(
                        f"arrays {first.table.name!r} and {other.table.name!r} have different {role} values "
                        f"({own[0]}..{own[-1]} and {theirs[0]}..{theirs[-1]}); open them one at a time"
                    )
        return values

    def time(self, variables: Sequence[StoreVariable]) -> TimeAxis | None:
        """Return the time axis that the variables must share; None when none of them has time."""
        timed = [v for v in variables if "time" in v.roles]
        if not timed:
            return None
        first, attrs = timed[0], self.attrs(timed[0], "time")
        axis, own = self._time_of(first), self.coords.name(first.table, first.dim("time"))
        for other in timed[1:]:
            has_same = other.size("time") == first.size("time")
            if has_same and self.coords.name(other.table, other.dim("time")) != own:
                theirs = self._time_of(other).stamps  # decoded, because equal numbers may count from other dates
                has_same = kind_of_times(axis.stamps) == kind_of_times(theirs) and np.array_equal(axis.stamps, theirs)
            if not has_same:
                raise GridError(
                    f"arrays {first.table.name!r} ({first.size('time')} steps) and {other.table.name!r} "
                    f"({other.size('time')} steps) have different times; open them one at a time"
                )
        missing = attrs.get("missing_dates", ())  # anemoi's list of steps that hold no values
        return axis.take(~np.isin(axis.stamps, np.array(missing, "datetime64[us]"))) if len(missing) else axis

    def _time_of(self, variable: StoreVariable) -> TimeAxis:
        return decode_times(self.values(variable, "time"), self.attrs(variable, "time"))


def check_no_sums(variables: Iterable[StoreVariable], every: Any) -> None:
    """Raise `WindowError` for an array of sums over a step, of which some steps would be skipped."""
    for variable in variables:
        if "time" in variable.roles and is_accumulated(variable.table.attrs, variable.dim("time")):
            raise WindowError(
                f"every={every!r} skips steps of array {variable.table.name!r}, whose values are sums over a step: "
                "those of the skipped steps would be lost; leave it out, take every=1, add them up at the read by "
                f"sums={{{variable.table.name!r}: {every!r}}}, or write sums first (xarray: .resample(time=…).sum())"
            )


def _text_of(value: Any) -> str:
    """Return a text of a store, where it may be bytes that are padded to the length of the longest."""
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)).rstrip("\0 ")


def _same_coordinates(own: NDArray[Any], theirs: NDArray[Any]) -> bool:
    """Say whether two coordinates are equal, including missing values at the same places."""
    floats = own.dtype.kind == theirs.dtype.kind == "f"
    return np.array_equal(own, theirs, equal_nan=floats)


def _grid_text(variable: StoreVariable) -> str:
    return f"array {variable.table.name!r} ({', '.join(f'{role} {variable.size(role)}' for role in variable.space)})"


@dataclass(frozen=True)
class RowOrder:
    """Order of rows against those stored: the dims that are `flipped`, where each of `rolled` begins; that of cells."""

    flipped: tuple[str, ...] = ()
    rolled: Mapping[str, int] = field(default_factory=dict[str, int])
    cells: StoredOrder | None = None


ChoiceSteps = Sequence[tuple[Mapping[str, int], IndexPicks]]
"""Pairs of stored and destination step, for each choice along further dims."""


def read_parts_of(
    channels: Sequence[FieldChannel],
    variables: Iterable[StoreVariable],
    moments: ChoiceSteps,
    turn: RowOrder,
    nan: Sequence[NanRule] = (),
) -> tuple[ReadPart, ...]:
    """Return a part for each array and choice, of its time steps and all its levels. A variable without time fills
    every destination step by a part of its own. Levels of an array whose rules for missing values differ, one a channel
    in `nan`, are parts of their own.
    """
    places: defaultdict[tuple[str, NanRule | None, int], list[tuple[int, int | None]]] = defaultdict(list)
    for i, channel in enumerate(channels):
        places[channel.array, nan[i] if nan else None, channel.earlier].append((i, channel.level))
    return tuple(
        replace(part, nan=rule)
        for v in variables
        for choice, steps in moments
        for (array, rule, earlier), levels in places.items()
        if array == v.table.name
        for part in _parts_of_variable(v, levels, choice, [(step - earlier, to) for step, to in steps], turn)
    )


def _parts_of_variable(
    variable: StoreVariable,
    places: Sequence[tuple[int, int | None]],
    choice: Mapping[str, int],
    steps: Sequence[tuple[int, int]],
    turn: RowOrder,
) -> list[ReadPart]:
    levels: IndexPicks = tuple((level, i) for i, level in places if level is not None)
    picks: list[IndexPicks | None] = []
    to: list[int] = []
    for role, dim in zip(variable.roles, variable.table.dims, strict=True):
        if role in variable.space:
            picks.append(None)
            to.append(2 + variable.space.index(role))
        elif role in ("time", "level"):
            picks.append(tuple(steps) if role == "time" else levels)
            to.append(TIME_AT if role == "time" else CHANNEL_AT)
        else:
            picks.append(((choice[dim], 0),))
            to.append(DROPPED_DIM)
    flip = tuple(d for d, role in enumerate(variable.roles) if role in turn.flipped)
    first = tuple(turn.rolled.get(role, 0) for role in variable.roles) if any(turn.rolled.values()) else ()
    fixed = () if levels else ((CHANNEL_AT, places[0][0]),)
    landing = [()] if "time" in variable.roles else [((TIME_AT, step),) for _, step in steps]
    return [
        ReadPart(variable.table.name, tuple(picks), tuple(to), (*moment, *fixed), flip, first, turn.cells)
        for moment in landing
    ]
