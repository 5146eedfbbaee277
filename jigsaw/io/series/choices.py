"""Steps and places of samples: windows whose steps all exist, and choices along further dims.

Further dims are ensemble members, lead times and initial times. A choice along a dim is

- an integer: a position; ``-1`` is the last;
- a value of the dim's coordinate: a number with a point, a label, a date, or a duration such as ``"24h"``;
- a list of those, a slice, a pair (first, last) of dates or durations, or ``"all"``: a sample for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, WindowError
from jigsaw.io.series.store_survey import StoreSurvey, StoreVariable
from jigsaw.io.series.times import FURTHEST_STEP, TimeAxis, decode_times, is_whole_number


def window_offsets(name: str, offsets: Any, axis: TimeAxis | None = None) -> tuple[int, ...]:
    """Check the steps of a window relative to its anchor: integers, or durations such as ``"-6h"`` along `axis`."""
    if (
        isinstance(offsets, str)
        or not isinstance(offsets, Iterable)
        or (isinstance(offsets, np.ndarray) and not offsets.ndim)
    ):
        kind = "one string" if isinstance(offsets, str) else "not a list"
        raise WindowError(f"{name}={offsets!r} is {kind}; give a list: {name}=[{offsets!r}]")
    wrong = [o for o in offsets if not (is_whole_number(o) or isinstance(o, str | timedelta | np.timedelta64))]
    if wrong:
        raise WindowError(
            f"{name}={list(offsets)} must be integers: steps relative to the sample's anchor, 0 is the anchor itself; "
            "or durations like '-6h'"
        )
    whole = tuple(_offset_steps(name, o, axis) for o in offsets)
    far = [o for o in whole if abs(o) >= FURTHEST_STEP]
    if far:
        raise WindowError(
            f"{name}={list(offsets)} has a step {far[0]} away from the sample's anchor, and 64 bits count to "
            f"{FURTHEST_STEP}; give the number of steps between the two"
        )
    if len(set(whole)) != len(whole):
        raise WindowError(f"{name}={list(offsets)} names a step twice")
    return whole


def _offset_steps(name: str, offset: Any, axis: TimeAxis | None) -> int:
    if axis is not None:
        return axis.steps_in(name, offset)
    if not is_whole_number(offset):
        raise WindowError(f"{name}={offset!r} is a duration, but the fields have no time; use steps")
    return int(offset)


def window_anchors(
    start: int, stop: int, inputs: Sequence[int], targets: Sequence[int] = (), breaks: Sequence[int] = ()
) -> NDArray[np.int64]:
    """Return every step a whose window, a + min(offsets) to a + max(offsets), lies in ``start..stop`` without a gap.

    `breaks` holds each i such that a gap lies between the steps i and i + 1. At least one anchor must be left.
    """
    window = (*inputs, *targets)
    if not inputs:
        raise WindowError("inputs=[] names no step; a sample needs at least one, such as inputs=[0]")
    low, high = min(window), max(window)
    span, steps = high - low + 1, stop - start
    if span > steps:
        raise WindowError(
            f"a window from offset {low} to {high} needs {span} steps, but the series has {steps}; "
            "use fewer offsets or select a longer time"
        )
    # a gap after step b: a run ends before b + 1
    runs = list(pairwise([start, *(b + 1 for b in sorted(breaks) if start < b + 1 < stop), stop]))
    anchors = [np.arange(a - low, b - high, dtype=np.int64) for a, b in runs if b - a >= span]
    if not anchors:
        longest = max(b - a for a, b in runs)
        raise WindowError(
            f"a window from offset {low} to {high} needs {span} steps without a gap, but the longest of the series' "
            f"{len(runs)} runs has {longest}; use fewer offsets"
        )
    return np.concatenate(anchors)


DimChoices = Mapping[str, tuple[int, ...]]
"""The picked positions along each further dim, by the store's own name."""


def choose_positions(
    survey: StoreSurvey, variables: Sequence[StoreVariable], select: Mapping[str, Any] | None, stack: str | None = None
) -> tuple[DimChoices, str | None]:
    """Return the positions that `select` picks along each further dim, and the own name of the stacked dim, the last of
    them. Of a stacked dim all are picked if `select` does not say. None of several positions stays open.
    """
    further = {v.table.dims[d]: v for v in variables for d in v.further}
    choice_by_dim = {_chosen_dim("select", n, further, select or {}): value for n, value in (select or {}).items()}
    stacked = None if stack is None else _chosen_dim("stack", stack, further, {})
    if stacked is not None:
        if stacked in time_origins(survey, variables):
            raise GridError(
                f"stack={stack!r}: places along {stacked!r} have times of their own, which one sample cannot have; for "
                "windows along it open with along=, for samples of each select= is enough"
            )
        choice_by_dim.setdefault(stacked, "all")
    positions_by_dim: dict[str, tuple[int, ...]] = {}
    for variable in variables:
        for d in variable.further:
            dim, size = variable.table.dims[d], variable.table.shape[d]
            if dim in choice_by_dim:
                positions = _wanted_positions(survey, variable, dim, choice_by_dim[dim])
                if positions_by_dim.setdefault(dim, positions) != positions:
                    raise GridError(
                        f"select={{{dim!r}: {choice_by_dim[dim]!r}}} is at other places of {dim!r} in array "
                        f"{variable.table.name!r} than in another field; open them one at a time"
                    )
            elif size == 1 or d not in variable.unchosen:
                positions_by_dim.setdefault(dim, tuple(range(size)))
            else:
                raise GridError(
                    f"array {variable.table.name!r} has a dim {dim!r} of {size} that is not time, level or space; "
                    f"choose one with select={{{dim!r}: 0}}, or a sample for each with select={{{dim!r}: 'all'}}, or "
                    f"all in each sample with stack={dim!r}"
                )
    if stacked is not None:
        positions_by_dim[stacked] = positions_by_dim.pop(stacked)
    return positions_by_dim, stacked


def time_origins(survey: StoreSurvey, variables: Sequence[StoreVariable]) -> dict[str, NDArray[Any]]:
    """Return the times that positions along a dim add to a sample: lead times, or starts of forecasts."""
    origins: dict[str, NDArray[Any]] = {}
    for variable in (v for v in variables if "time" in v.roles):
        for d in (d for d in variable.further if variable.roles[d] in ("lead", "init")):
            along, times = _time_axis_along(survey, variable, d), survey.time([variable])
            kinds = {axis.stamps.dtype.kind for axis in (along, times) if axis is not None}
            # a duration is added to dates, or to another; numbers without units, and second dates, stand alone
            if along is not None and "m" in kinds and kinds <= set("mMO"):
                origins[variable.table.dims[d]] = along.stamps
    return origins


def _chosen_dim(argument: str, name: str, further: Mapping[str, StoreVariable], select: Mapping[str, Any]) -> str:
    if name in further:
        return name
    dims_of_role = [dim for dim, v in further.items() if v.roles[v.table.dims.index(dim)] == name]
    if len(dims_of_role) != 1:
        hint = {"level": "; a level is part of a field: 'geopotential@500'", "time": "; steps are picked by time="}
        raise GridError(
            f"{argument} names {name!r}, which is not a further dim of the fields; there are {sorted(further)}"
            + hint.get(name, "")
        )
    if dims_of_role[0] in select:
        raise GridError(f"select names {dims_of_role[0]!r} twice, also as {name!r}")
    return dims_of_role[0]


def _time_axis_along(survey: StoreSurvey, variable: StoreVariable, d: int) -> TimeAxis | None:
    """Return the times or durations along a dim; None where its coordinate has neither."""
    dim = variable.table.dims[d]
    values = survey.values_along(variable, dim)
    if variable.roles[d] not in ("lead", "init") and values.dtype.kind not in "mM":
        return None
    axis = decode_times(values, survey.attrs_along(variable, dim))
    return axis if axis.digits is not None or axis.stamps.dtype.kind == "m" else None


def _wanted_positions(survey: StoreSurvey, variable: StoreVariable, dim: str, choice: Any) -> tuple[int, ...]:
    d = variable.table.dims.index(dim)
    size = variable.table.shape[d]
    if isinstance(choice, str) and choice == "all":
        return tuple(range(size))
    if isinstance(choice, slice | tuple):
        return tuple(range(*_position_range(survey, variable, d, choice)))
    choices: list[Any] = list(choice) if isinstance(choice, list | np.ndarray | range) else [choice]
    positions = tuple(
        _checked_position(variable, dim, w) if is_whole_number(w) else _single_position(survey, variable, d, w)
        for w in choices
    )
    if not positions or len(set(positions)) != len(positions):
        raise GridError(f"select={{{dim!r}: {choice!r}}} picks nothing, or one place twice")
    return positions


def _checked_position(variable: StoreVariable, dim: str, index: Any) -> int:
    size = variable.table.shape[variable.table.dims.index(dim)]
    if not -size <= index < size:
        raise GridError(
            f"select={{{dim!r}: {index}}} is outside array {variable.table.name!r}, whose {dim!r} has {size}"
        )
    return int(index) % size


def _position_range(
    survey: StoreSurvey, variable: StoreVariable, d: int, choice: slice | tuple[Any, ...]
) -> tuple[int, int]:
    dim = variable.table.dims[d]
    ends = (choice.start, choice.stop) if isinstance(choice, slice) else choice
    axis = _time_axis_along(survey, variable, d)
    if len(ends) != 2 or (axis is None and not all(e is None or is_whole_number(e) for e in ends)):
        raise GridError(
            f"select={{{dim!r}: {choice!r}}} is not a range: give positions (start, stop), dates or durations "
            "(first, last), or a list"
        )
    try:
        plain = axis or decode_times(np.arange(variable.table.shape[d]), {})  # only positions are asked for
        return plain.select(choice)
    except WindowError as e:
        raise GridError(f"select={{{dim!r}: {choice!r}}}: {e}") from e


def _single_position(survey: StoreSurvey, variable: StoreVariable, d: int, value: Any) -> int:
    dim = variable.table.dims[d]
    coordinate = survey.values_along(variable, dim)
    axis = _time_axis_along(survey, variable, d) if isinstance(value, str | date | timedelta | np.generic) else None
    at = _time_positions(axis, value) if axis is not None else _value_positions(coordinate, value)
    if len(at) != 1:
        shown = coordinate if axis is None else axis.stamps
        listed = ", ".join(str(v) for v in shown[:8]) + (" …" if len(shown) > 8 else "")
        raise GridError(
            f"select={{{dim!r}: {value!r}}} is {len(at)} values of {dim!r} of array {variable.table.name!r}, "
            f"which has {listed}"
        )
    return int(at[0])


def _time_positions(axis: TimeAxis, value: Any) -> Sequence[int]:
    try:
        return range(*axis.select((value, value)))
    except WindowError:
        return ()


def _value_positions(coordinate: NDArray[Any], value: Any) -> NDArray[Any]:
    if isinstance(value, str) or coordinate.dtype.kind not in "fiu":
        return np.flatnonzero(coordinate.astype(str) == str(value))
    if not isinstance(value, int | float | np.number):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.isclose(coordinate.astype(np.float64), float(value), rtol=1e-6, atol=0))
