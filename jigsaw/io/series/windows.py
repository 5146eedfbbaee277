"""Windows of a series: anchors whose input and target steps all exist and touch no gap. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import WindowError
from jigsaw.io.series.times import FURTHEST_STEP, TimeAxis, is_whole_number


def window_offsets(name: str, offsets: Any, axis: TimeAxis | None = None) -> tuple[int, ...]:
    """Check the steps of a window relative to its anchor: integers, or durations such as ``"-6h"`` along `axis`."""
    if (
        isinstance(offsets, str)
        or not isinstance(offsets, Iterable)
        or (isinstance(offsets, np.ndarray) and not offsets.ndim)
    ):
        what = "one string" if isinstance(offsets, str) else "no list"
        raise WindowError(f"{name}={offsets!r} is {what}; give a list: {name}=[{offsets!r}]")
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
    # a gap after step b ends a run before b + 1
    runs = list(pairwise([start, *(b + 1 for b in sorted(breaks) if start < b + 1 < stop), stop]))
    anchors = [np.arange(a - low, b - high, dtype=np.int64) for a, b in runs if b - a >= span]
    if not anchors:
        longest = max(b - a for a, b in runs)
        raise WindowError(
            f"a window from offset {low} to {high} needs {span} steps without a gap, but the longest of the series' "
            f"{len(runs)} runs has {longest}; use fewer offsets"
        )
    return np.concatenate(anchors)
