"""A store understood: its variables with canonical dims, their one grid, levels and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io import coords
from jigsaw.io.coords import SPACE
from jigsaw.io.errors import GridError
from jigsaw.io.fields import Channel, Levels
from jigsaw.io.request import DROPPED, Part, Picks
from jigsaw.io.times import TimeAxis, decode_times

if TYPE_CHECKING:
    from jigsaw.io.table import ArrayTable, Store

TIME, CHANNEL = 0, 1
ROLES = ("time", "level", *SPACE)


@dataclass(frozen=True)
class Variable:
    """A stored array and the role of each of its dims."""

    table: ArrayTable
    roles: tuple[str, ...]

    @property
    def space(self) -> tuple[str, ...]:
        """Its spatial dims in canonical order."""
        return tuple(role for role in SPACE if role in self.roles)

    def size(self, role: str) -> int:
        return self.table.shape[self.roles.index(role)]

    def dim(self, role: str) -> str:
        """What the store calls a dim."""
        return self.table.dims[self.roles.index(role)]


class Survey:
    """What a store has for a reader of fields: its data variables, and what their dims mean."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._values: dict[tuple[str, int], NDArray[Any]] = {}
        arrays = store.arrays
        self.variables: dict[str, Variable] = {}
        for name, table in arrays.items():
            if len(_space(table, arrays)) >= 2 and not _describes_space(table):
                self.variables[name] = Variable(table, coords.roles(table, arrays))

    def values(self, variable: Variable, role: str) -> NDArray[Any]:
        """The coordinate values along a dim of a variable, read once."""
        key = coords.name_of(variable.table, variable.dim(role)), variable.size(role)
        if key not in self._values:
            self._values[key] = coords.values(self.store, variable.table, variable.dim(role))
        return self._values[key]

    def attrs(self, variable: Variable, role: str) -> Mapping[str, Any]:
        """The attributes of that coordinate."""
        return coords.attributes(variable.table, variable.dim(role), self.store.arrays)

    @cached_property
    def levels(self) -> dict[str, Levels | None]:
        """The levels of every variable, None for one that has no level dim."""
        return {name: self._levels(v) for name, v in self.variables.items()}

    def _levels(self, variable: Variable) -> Levels | None:
        if "level" not in variable.roles:
            return None
        values = self.values(variable, "level")
        numeric = values if values.dtype.kind in "fiu" else np.arange(len(values))
        return Levels(numeric.astype(np.float64), str(self.attrs(variable, "level").get("units", "")))

    def of(self, channels: Sequence[Channel]) -> tuple[Variable, ...]:
        """The variables of these channels, each once, in order."""
        return tuple(self.variables[name] for name in dict.fromkeys(c.array for c in channels))

    def grid(self, variables: Sequence[Variable]) -> dict[str, NDArray[Any]]:
        """The coordinate values along each spatial dim, in canonical order, of variables that share one grid.

        Raises: `GridError` naming two arrays that do not.
        """
        first = variables[0]
        values = {role: self.values(first, role) for role in first.space}
        for other in variables[1:]:
            sizes = [(role, v.size(role)) for v in (first, other) for role in v.space]
            if len(set(sizes)) != len(first.space) or len(sizes) != 2 * len(first.space):
                raise GridError(
                    f"{_grid_of(first)} and {_grid_of(other)} lie on different grids; open them one at a time"
                )
            for role, mine in values.items():
                theirs = self.values(other, role)
                if not np.array_equal(mine, theirs):
                    raise GridError(
                        f"arrays {first.table.name!r} and {other.table.name!r} have different {role} values "
                        f"({mine[0]}..{mine[-1]} and {theirs[0]}..{theirs[-1]}); open them one at a time"
                    )
        return values

    def time(self, variables: Sequence[Variable]) -> TimeAxis | None:
        """The time axis that the variables share; None when none of them has time.

        Raises: `GridError` naming two arrays with different times.
        """
        timed = [v for v in variables if "time" in v.roles]
        if not timed:
            return None
        first = timed[0]
        raw = self.values(first, "time")
        for other in timed[1:]:
            if other.size("time") != first.size("time") or not np.array_equal(raw, self.values(other, "time")):
                raise GridError(
                    f"arrays {first.table.name!r} ({first.size('time')} steps) and {other.table.name!r} "
                    f"({other.size('time')} steps) have different times; open them one at a time"
                )
        return decode_times(raw, self.attrs(first, "time"))


def _space(table: ArrayTable, arrays: Mapping[str, ArrayTable]) -> list[str]:
    found = [coords.role_of(d, coords.attributes(table, d, arrays)) for d in table.dims]
    return [role for role in found if role in SPACE]


def _describes_space(table: ArrayTable) -> bool:
    """Whether an array holds coordinates itself: the latitudes of a curvilinear grid."""
    return str(table.attrs.get("standard_name", "")).lower() in ("latitude", "longitude")


def _grid_of(variable: Variable) -> str:
    return f"array {variable.table.name!r} ({', '.join(f'{role} {variable.size(role)}' for role in variable.space)})"


def parts(
    channels: Sequence[Channel],
    variables: Iterable[Variable],
    steps: Picks,
    select: Mapping[str, int],
    flipped: Sequence[str],
) -> tuple[Part, ...]:
    """One part an array: its time steps (`steps`, pairs of stored and destination step) and all its levels.

    A variable without time fills every destination step, a part each.
    """
    return tuple(part for v in variables for part in _parts(v, channels, steps, select, flipped))


def _parts(
    variable: Variable, channels: Sequence[Channel], steps: Picks, select: Mapping[str, int], flipped: Sequence[str]
) -> list[Part]:
    mine = [(i, c.level) for i, c in enumerate(channels) if c.array == variable.table.name]
    levels: Picks = tuple((level, i) for i, level in mine if level is not None)
    picks: list[Picks | None] = []
    to: list[int] = []
    for role, dim, size in zip(variable.roles, variable.table.dims, variable.table.shape, strict=True):
        if role in variable.space:
            picks.append(None)
            to.append(2 + variable.space.index(role))
        elif role in ("time", "level"):
            picks.append(steps if role == "time" else levels)
            to.append(TIME if role == "time" else CHANNEL)
        else:
            picks.append(((_selected(variable, dim, size, select), 0),))
            to.append(DROPPED)
    flip = tuple(d for d, role in enumerate(variable.roles) if role in flipped)
    fixed = () if levels else ((CHANNEL, mine[0][0]),)
    moments = [()] if "time" in variable.roles else [((TIME, step),) for _, step in steps]
    return [Part(variable.table.name, tuple(picks), tuple(to), (*moment, *fixed), flip) for moment in moments]


def _selected(variable: Variable, dim: str, size: int, select: Mapping[str, int]) -> int:
    index = select.get(dim, 0 if size == 1 else None)
    if index is None:
        raise GridError(
            f"array {variable.table.name!r} has a dim {dim!r} of {size} that is no time, level or space; "
            f"choose one with select={{{dim!r}: 0}}"
        )
    if not 0 <= index < size:
        raise GridError(
            f"select={{{dim!r}: {index}}} is outside array {variable.table.name!r}, whose {dim!r} has {size}"
        )
    return index
