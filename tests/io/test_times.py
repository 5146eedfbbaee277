"""Calendars, gaps and the selection of times."""

from datetime import datetime

import numpy as np
import pytest

from jigsaw.io.errors import GridError, UnsupportedStoreError, WindowError
from jigsaw.io.times import decode_times


@pytest.mark.parametrize(
    ("units", "calendar", "raw", "last"),
    [
        ("hours since 1900-01-01", "standard", np.array([0, 6, 12], "i4"), "1900-01-01T12"),
        ("hours since 1800-01-01 00:00:0.0", None, np.array([1297320.0, 1297326.0]), "1948-01-01T06"),
        ("seconds since 1970-01-01T00:00:00Z", "proleptic_gregorian", np.array([0, 3600]), "1970-01-01T01"),
        ("days since 2000-1-1 12:30", "gregorian", np.array([0.0, 0.25]), "2000-01-01T18:30"),
        ("nanoseconds since 1970-01-01", "proleptic_gregorian", np.array([0, 10**15]), "1970-01-12T13:46:40"),
        ("minutes since 2020-02-28 23:59:30.5 UTC", "standard", np.array([0, 1]), "2020-02-29T00:00:30.5"),
    ],
)
def test_units_are_decoded(units, calendar, raw, last):
    attrs = {"units": units} | ({"calendar": calendar} if calendar else {})
    axis = decode_times(raw, attrs)
    assert axis.stamps[-1] == np.datetime64(last)
    assert axis.breaks == ()


def test_the_mixed_calendar_before_its_reform_goes_through_cftime():
    axis = decode_times(np.array([17522904.0, 17522928.0]), {"units": "hours since 1-1-1 00:00:0.0"})
    assert (axis.stamps[0].year, axis.stamps[0].month, axis.stamps[0].day) == (2000, 1, 1)


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_calendars_of_models_have_no_false_gap(calendar):
    axis = decode_times(np.arange(0, 800), {"units": "days since 2000-01-01", "calendar": calendar})
    assert axis.breaks == ()
    start, stop = axis.select(("2001", "2001"))
    assert stop - start == {"noleap": 365, "360_day": 360}[calendar]


def months(first, last):
    stamps = np.arange(first, last, dtype="datetime64[M]").astype("datetime64[h]")
    return (stamps - np.datetime64("1800-01-01T00", "h")).astype(float)


def monthly(hours):
    return decode_times(hours, {"units": "hours since 1800-01-01"})


def test_calendar_months_are_equal_steps_and_a_missing_one_is_a_gap():
    assert monthly(months("1948-01", "2026-03")).breaks == ()
    assert monthly(np.delete(months("1948-01", "1960-01"), 25)).breaks == (24,)
    middle = months("1990-01", "1992-01") + 24.0 * np.resize([15.5, 14, 15.5, 15], 24)
    assert monthly(middle).breaks == ()


def test_a_gap_and_a_double_step_break_the_series():
    six = np.array([0, 6, 12, 24, 30, 30, 36, 42])
    assert decode_times(six, {"units": "hours since 2000-01-01"}).breaks == (2, 4)
    assert decode_times(np.array([0, 1, 2, 5, 6]), {}).breaks == (2,)
    four_weeks = np.array([0, 28, 56, 112, 140, 168, 196])
    assert decode_times(four_weeks, {"units": "days since 2000-01-01"}).breaks == (2,)


def test_times_that_fall_are_refused():
    with pytest.raises(GridError, match="does not rise"):
        decode_times(np.array([12, 6, 0]), {"units": "hours since 2000-01-01"})


@pytest.mark.parametrize(
    "units", ["months since 2000-01-01", "hours since last tuesday", "hours since 2000-01-01 00:00:00 +02:00"]
)
def test_units_without_a_fixed_meaning_are_refused(units):
    with pytest.raises(UnsupportedStoreError, match=r"time units .* are not"):
        decode_times(np.arange(3), {"units": units})


@pytest.mark.parametrize(
    ("wanted", "want"),
    [
        (None, (0, 48)),
        (("1949", "1950"), (12, 36)),
        (slice("1949-02", "1949-03"), (13, 15)),
        (slice(None, "1948-02-01"), (0, 2)),
        (("1951-12-01T00:00", None), (47, 48)),
        (slice(3, -1), (3, 47)),
        ((datetime(1948, 2, 1), np.datetime64("1948-03-01")), (1, 3)),
    ],
)
def test_a_selection_includes_both_ends(wanted, want):
    assert monthly(months("1948-01", "1952-01")).select(wanted) == want


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        (("1990", "1991"), r"selects no step; the store has 48, 1948-01-01.* to 1951-12"),
        (("June", None), "'June' is not a date"),
        (slice(0, 9, 2), "has a step"),
    ],
)
def test_selections_that_find_nothing(wanted, match):
    with pytest.raises(WindowError, match=match):
        monthly(months("1948-01", "1952-01")).select(wanted)


def test_dates_need_units():
    with pytest.raises(WindowError, match="the store's time has no units"):
        decode_times(np.arange(9), {}).select(("2000", None))
