"""Windows: every anchor whose steps exist without a gap, and no other."""

from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsaw.errors import WindowError
from jigsaw.io.series.choices import window_anchors, window_offsets
from jigsaw.io.series.times import decode_times


def by_hand(start, stop, window, breaks):
    low, high = min(window), max(window)
    return [
        a
        for a in range(start - 50, stop + 50)
        if start <= a + low and a + high < stop and not any(a + low <= b < a + high for b in breaks)
    ]


@given(
    st.integers(0, 5),
    st.integers(1, 30),
    st.lists(st.integers(-4, 4), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(-4, 4), max_size=3, unique=True),
    st.sets(st.integers(0, 33)),
)
def test_anchors_are_those_found_by_hand(start, length, inputs, targets, breaks):
    want = by_hand(start, start + length, [*inputs, *targets], breaks)
    if not want:
        with pytest.raises(WindowError):
            window_anchors(start, start + length, inputs, targets, breaks)
    else:
        assert window_anchors(start, start + length, inputs, targets, sorted(breaks)).tolist() == want


def test_a_window_ends_before_a_gap_and_begins_after_it():
    assert window_anchors(0, 8, [-1, 0], [1], breaks=[3]).tolist() == [1, 2, 5, 6]


@pytest.mark.parametrize(
    ("stop", "inputs", "targets", "breaks", "match"),
    [
        (5, range(-11, 1), [1], [], r"offset -11 to 1 needs 13 steps, but the series has 5; use fewer offsets"),
        (9, [-3, 0], [1], [2, 5], r"needs 5 steps without a gap, but the longest of the series' 3 runs has 3"),
        (9, [], [1], [], r"inputs=\[\] names no step"),
    ],
)
def test_windows_that_the_series_cannot_give(stop, inputs, targets, breaks, match):
    with pytest.raises(WindowError, match=match):
        window_anchors(0, stop, list(inputs), targets, breaks)


@pytest.mark.parametrize(
    ("given_", "match"),
    [
        ([0, 0], "names a step twice"),
        ([0.5], "must be integers"),
        ([True], "must be integers"),
        (["-6h"], "'-6h' is a duration, but the fields have no time"),
        ("-6h", r"is one string; give a list: inputs=\['-6h'\]"),
    ],
)
def test_offsets_are_checked(given_, match):
    with pytest.raises(WindowError, match=f"inputs=.*{match}"):
        window_offsets("inputs", given_)


def test_offsets_may_be_durations_along_an_axis():
    axis = decode_times(np.arange(0, 48, 6), {"units": "hours since 2000-01-01"})
    assert window_offsets("inputs", ["-12h", -1, "0h", timedelta(hours=6)], axis) == (-2, -1, 0, 1)
    with pytest.raises(WindowError, match=r"targets=\[1, '6h'\] names a step twice"):
        window_offsets("targets", [1, "6h"], axis)
