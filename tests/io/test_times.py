"""Calendars, gaps and the selection of times."""

from datetime import datetime, timedelta

import cftime
import numpy as np
import pytest
import xarray as xr

from jigsaw.errors import GridError, UnsupportedStoreError, WindowError
from jigsaw.io.series.times import decode_times


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


@pytest.mark.parametrize("calendar", ["standard", "noleap"])
@pytest.mark.parametrize(
    ("units", "first"),
    [
        ("hours since 2000", "2000-01-01T00:00"),
        ("hours since 2000-06", "2000-06-01T00:00"),
        ("hours since 20000613", "2000-06-13T00:00"),
        ("hours since 20000601T06:30Z", "2000-06-01T06:30"),
        ("hours since 2000-06-01 00:00:00 +02:00", "2000-05-31T22:00"),
        ("hours since 2000-06-01T00:00:00-05", "2000-06-01T05:00"),
        ("hours since 2000-06-01 00:00 +0530", "2000-05-31T18:30"),
        ("hours since 2000-06-01 06:00:00.5 -3:30", "2000-06-01T09:30:00.5"),
    ],
)
def test_references_in_other_zones_and_in_short(units, first, calendar):
    """As xarray reads them on the Gregorian calendar; on others cftime does not know all, and loses the zone of one."""
    stamps = decode_times(np.array([0, 24]), {"units": units, "calendar": calendar}).stamps
    if calendar == "standard":
        np.testing.assert_array_equal(
            stamps, xr.coding.times.decode_cf_datetime(np.array([0, 24]), units, calendar, use_cftime=False)
        )
    assert [np.datetime64(t.isoformat() if calendar == "noleap" else t) for t in stamps] == [
        np.datetime64(first) + np.timedelta64(h, "h") for h in (0, 24)
    ]


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
    six = np.array([0, 6, 12, 24, 30, 33, 39, 45])
    assert decode_times(six, {"units": "hours since 2000-01-01"}).breaks == (2, 4)
    assert decode_times(np.array([0, 1, 2, 5, 6]), {}).breaks == (2,)
    four_weeks = np.array([0, 28, 56, 112, 140, 168, 196])
    assert decode_times(four_weeks, {"units": "days since 2000-01-01"}).breaks == (2,)


def test_times_that_fall_are_refused():
    with pytest.raises(GridError, match="does not rise"):
        decode_times(np.array([12, 6, 0]), {"units": "hours since 2000-01-01"})
    with pytest.raises(GridError, match=r"does not rise: 2000-01-01T18.* is followed by 2000-01-01T12"):
        decode_times(np.array([0, 6, 12, 18, 12, 18, 24]), {"units": "hours since 2000-01-01"})


def test_times_that_are_there_twice_are_named():
    twice = np.array([0, 6, 12, 12, 18, 24, 24])
    told = r"has times twice: 2000-01-01T12\S* \(steps 2 and 3\), 2000-01-02T00\S* \(steps 5 and 6\); .*drop_duplicates"
    with pytest.raises(GridError, match=told):
        decode_times(twice, {"units": "hours since 2000-01-01"})
    with pytest.raises(GridError, match=r"twice: 2000-01-01 00:00:00 \(steps 0 and 1\), .* and 1 more; keep one step"):
        decode_times(np.repeat(np.arange(4), 2), {"units": "hours since 2000-01-01", "calendar": "noleap"})
    with pytest.raises(GridError, match=r"twice: 1\.5 \(steps 1 and 2\)"):
        decode_times(np.array([0, 1.5, 1.5, 3]), {})
    months = np.array(["2000-01", "2000-02", "2000-02", "2000-03"], "datetime64[ns]")
    with pytest.raises(GridError, match="twice: 2000-02-01"):
        decode_times(months, {})


@pytest.mark.parametrize("attrs", [{}, {"units": "hours"}, {"units": "days since 2000-01-01"}])
@pytest.mark.parametrize("missing", [np.nan, np.inf, 9.969209968386869e36])
@pytest.mark.parametrize("at", [0, 3])
def test_steps_without_a_time_are_refused(attrs, missing, at):
    raw = np.arange(6.0)
    raw[at] = missing
    with pytest.raises(GridError, match=f"no time at step {at}"):
        decode_times(raw, attrs)
    if np.isnan(missing):
        with pytest.raises(GridError, match=f"no time at step {at}"):
            decode_times(np.arange(6).astype("M8[h]") + np.where(np.arange(6) == at, np.timedelta64("NaT"), 0), {})


@pytest.mark.parametrize("dtype", [str, object, "S10"])
def test_times_that_are_texts_are_refused(dtype):
    with pytest.raises(UnsupportedStoreError, match=r"holds .*2000-01-01.*, which is not a number"):
        decode_times(np.array(["2000-01-01", "2000-01-02"], dtype), {})


@pytest.mark.parametrize("calendar", ["standard", "noleap"])
def test_a_series_without_steps(calendar):
    assert len(decode_times(np.zeros(0), {"units": "days since 2000-01-01", "calendar": calendar})) == 0


def test_the_mixed_calendar_counts_back_across_its_reform():
    attrs = {"units": "days since 1583-01-01"}
    stamps = decode_times(np.arange(-80, -76), attrs).stamps
    assert [str(t) for t in stamps] == [str(t) for t in cftime.num2date(range(-80, -76), **attrs)]
    assert str(stamps[0])[:10] == "1582-10-03"


@pytest.mark.parametrize(
    "units",
    [
        "months since 2000-01-01",
        "hours since last tuesday",
        "hours since 200001",
        "hours since 20001301",
        "hours since 2000-01-01 00:00 CET",
        "days since 2000-13-01",
        "days since 2001-02-29",
    ],
)
@pytest.mark.parametrize("calendar", ["standard", "noleap", "of mars", ""])
def test_units_without_a_fixed_meaning_are_refused(units, calendar):
    with pytest.raises(UnsupportedStoreError, match=r"time units .* are not"):
        decode_times(np.arange(3), {"units": units, "calendar": calendar})


def test_dates_beyond_their_calendar_are_refused():
    attrs = {"units": "days since 2000-01-01", "calendar": "noleap"}
    for beyond in ([0, 1e18, 2e18], [0, 2**60, 2**61]):
        with pytest.raises(GridError, match="no time at step 1"):
            decode_times(np.array(beyond), attrs)
    with pytest.raises(UnsupportedStoreError, match=r"time units .* are not"):
        decode_times(np.array([0, 1e18, 2e18]), {**attrs, "units": "common_years since 2000-01-01"})


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
        (("1948-2-1", "1948-3-1"), (1, 3)),
        (("1948-2", "1948-3"), (1, 3)),
        (("1948-1-2", "1948-4-1 00:00"), (1, 4)),
    ],
)
def test_a_selection_includes_both_ends(wanted, want):
    assert monthly(months("1948-01", "1952-01")).select(wanted) == want


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        (("1990", "1991"), r"selects no step; the store has 48, 1948-01-01.* to 1951-12"),
        (("June", None), "'June' is not a date"),
        (("1949-13", None), "'1949-13' is not a date"),
        (("1949-02-45", None), "'1949-02-45' is not a date"),
        ((None, "1949-02-02T25:00"), "'1949-02-02T25:00' is not a date"),
        (slice(0, 9, 2), "has a step"),
        (5, "time=5 is not a span; give"),
        ("1948", "time='1948' is not a span; give"),
        (("1948", "1949", "1950"), "is not a span; give"),
    ],
)
def test_selections_that_find_nothing(wanted, match):
    with pytest.raises(WindowError, match=match):
        monthly(months("1948-01", "1952-01")).select(wanted)


def test_dates_need_units():
    with pytest.raises(WindowError, match="the store's time has no units"):
        decode_times(np.arange(9), {}).select(("2000", None))


# -- durations and frequencies -----------------------------------------------------------------------------------------


def six_hourly(*missing):
    return decode_times(np.delete(np.arange(0, 240, 6), missing), {"units": "hours since 2000-01-01"})


@pytest.mark.parametrize(
    ("axis", "wanted", "steps"),
    [
        (six_hourly(), "-6h", -1),
        (six_hourly(), "1 day", 4),
        (six_hourly(), timedelta(hours=12), 2),
        (six_hourly(), np.timedelta64(18, "h"), 3),
        (six_hourly(), -2, -2),
        (six_hourly(5), "0.25d", 1),
        (monthly(months("1948-01", "1952-01")), "3 months", 3),
        (monthly(months("1948-01", "1952-01")), "-1y", -12),
        (monthly(months("1948-01", "1952-01")), np.timedelta64(2, "M"), 2),
        (decode_times(np.array([0, 12, 24]), {"units": "hours"}), "24h", 2),
    ],
)
def test_durations_are_steps(axis, wanted, steps):
    assert axis.steps_in("inputs", wanted) == steps


@pytest.mark.parametrize(
    ("axis", "wanted", "match"),
    [
        (six_hourly(), "7h", r"inputs='7h' is not a whole number of the series' steps, which are 6 hour\(s\)"),
        (six_hourly(), "1 month", "is not a whole number of the series' steps"),
        (monthly(months("1948-01", "1952-01")), "1.5 months", "is not a whole number of months"),
        (monthly(months("1948-01", "1952-01")), "30 days", r"steps, which are 1 month\(s\)"),
        (six_hourly(), "soon", "'soon' is not a number of steps, nor a duration"),
        (six_hourly(), "6m", "'6m' is not a number of steps"),
        (decode_times(np.arange(9), {}), "6h", "the store's time has no units"),
        (decode_times(np.arange(1), {"units": "days since 2000-01-01"}), "6h", "the series has one step"),
    ],
)
def test_durations_that_are_no_steps(axis, wanted, match):
    with pytest.raises(WindowError, match=match):
        axis.steps_in("inputs", wanted)


def test_a_frequency_keeps_the_hours_of_the_first_step_across_gaps():
    axis = six_hourly(3, 4, 5)
    thin = axis.every("12h")
    assert thin.stamps.astype("datetime64[h]").astype(object)[1].hour == 12
    assert thin.at.tolist() == [0, 2, *range(3, 37, 2)]
    assert thin.breaks == (1,)
    assert thin.steps_in("targets", "1d") == 2
    assert axis.every(4).every("2 days").at.tolist() == [0, 5, 13, 21, 29]
    seasons = monthly(months("1948-01", "1952-01")).every("3 months")
    assert seasons.stamps[:3].astype("datetime64[M]").astype(str).tolist() == ["1948-01", "1948-04", "1948-07"]
    with pytest.raises(WindowError, match="every=0 must be at least one step"):
        axis.every(0)


def test_a_gap_stays_a_gap_in_a_selection_around_it():
    assert six_hourly(3).take(slice(2, 4)).breaks == (0,)


@pytest.mark.parametrize(
    ("raw", "attrs"),
    [
        (np.array([0, 6, 12]), {"units": "hours"}),
        (np.array([0.0, 0.25, 0.5]), {"units": "days"}),
        (np.array([0, 6, 12]) * 3_600_000_000_000, {"units": "nanoseconds"}),
        (np.array([0, 6, 12]).astype("timedelta64[h]"), {}),
    ],
)
def test_lead_times_are_durations(raw, attrs):
    axis = decode_times(raw, attrs)
    assert axis.stamps.tolist() == [timedelta(hours=h) for h in (0, 6, 12)]
    assert axis.select(("6h", None)) == (1, 3)
    assert axis.select((None, timedelta(hours=6))) == (0, 2)


@pytest.mark.parametrize(
    ("units", "calendar", "steps"),
    [("months since 2000-01-01", "360_day", 24), ("common_years since 2000-01-01", "noleap", 2)],
)
def test_months_and_years_on_the_calendars_that_have_them(units, calendar, steps):
    axis = decode_times(np.arange(30), {"units": units, "calendar": calendar})
    want = cftime.num2date(np.arange(30), units, calendar)
    assert (axis.stamps == want).all()
    assert axis.breaks == ()
    start, stop = axis.select(("2000", "2001"))
    assert stop - start == steps


def test_dates_that_were_decoded_to_cftime():
    stamps = cftime.num2date(np.arange(100), "days since 2001-02-01", "noleap")
    axis = decode_times(stamps, {})
    assert axis.select(("2001-03", "2001-03")) == (28, 59)
    later_by_a_day = axis.shifted(np.timedelta64(1, "D"))
    assert (later_by_a_day.stamps[:-1] == stamps[1:]).all()
    assert later_by_a_day.digits[0] == 20010202000000


@pytest.mark.parametrize("units", ["days since 2000-01-01", "hours"])
def test_a_series_without_a_step_selects_none(units):
    axis = decode_times(np.zeros(0), {"units": units})
    assert len(axis.series(None, 2)) == 0
    with pytest.raises(WindowError, match="selects no step; the store has 0, none at all"):
        axis.select((None, "2000" if "since" in units else "6h"))
