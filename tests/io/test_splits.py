"""Splits by date: every sample's steps lie in its own range, and no step is in two."""

import numpy as np
import pytest
import xarray as xr
from globe_store import globe
from test_choices import forecasts

import jigsaw
from jigsaw.errors import WindowError
from jigsaw.io.datasets.splits import split
from jigsaw.testing import world_mesh

WINDOW = {"inputs": ["-6h", "0h"], "targets": [1, 2]}


def opened(data, **kwargs):
    return jigsaw.io.open(data, mesh=world_mesh(lat=1), fields=["t2m"], **kwargs)


def times_of(ds):
    return [np.concatenate([ds.input_times(i), ds.target_times(i)]) for i in range(len(ds))]


def test_no_window_crosses_from_one_range_into_another():
    data = globe(steps=40, lat=3, lon=4)
    ds = opened(data, **WINDOW)
    ranges = {
        "train": ("2020-01-01", "2020-01-06"),
        "validation": ("2020-01-07", "2020-01-08"),
        "test": ("2020-01-09", None),
    }
    found = split(ds, **ranges)
    assert {name: len(part) for name, part in found.items()} == {"train": 21, "validation": 5, "test": 5}
    seen = {}
    for name, part in found.items():
        for times in times_of(part):
            first, last = (np.datetime64(d or "2030", "D") for d in ranges[name])
            assert first <= times.min() and times.max() < last + np.timedelta64(1, "D")
            for time in times:
                assert seen.setdefault(time, name) == name
    np.testing.assert_array_equal(found["test"][0].input.local, data["2m_temperature"].values[32:34, None])


def test_positions_split_a_series_without_dates():
    data = globe(steps=12, lat=3, lon=4).assign_coords(time=np.arange(12))
    found = split(opened(data, inputs=[0], targets=[1]), a=(0, 5), b=slice(5, None))
    assert [part.anchors.tolist() for part in found.values()] == [[0, 1, 2, 3], [5, 6, 7, 8, 9, 10]]
    with pytest.raises(WindowError, match="needs a time with units"):
        split(opened(data), a=("2000", "2001"))


def test_a_forecast_counts_when_it_is_valid():
    """The first forecasts' 18-hour lead is valid in the afternoon; the last one of the range ends within it."""
    ds = opened(forecasts(), select={"lead": [0, 3], "member": 0})
    found = split(ds, early=("2020-01-01", "2020-01-02T12"), late=("2020-01-02T13", None))
    assert found["early"].anchors.tolist() == [0]
    assert found["late"].anchors.tolist() == [2, 3, 4]


def test_forecasts_with_windows_along_the_lead_are_kept_whole():
    ds = opened(forecasts(), select={"init": "all", "member": 0}, along="lead", targets=[1])
    found = split(ds, early=("2020-01-01", "2020-01-03T12"), late=("2020-01-04", None))
    assert found["early"].choices["time"] == (0, 1)
    assert found["late"].choices["time"] == (3, 4)
    assert max(t.max() for t in times_of(found["early"])) < np.datetime64("2020-01-03T12")


def test_other_calendars_split_too():
    times = xr.date_range("2001-02-20", periods=30, calendar="360_day", use_cftime=True)
    data = globe(steps=30, lat=3, lon=4).assign_coords(time=times)
    found = split(opened(data, targets=[1]), a=("2001-02", "2001-02"), b=("2001-03", None))
    assert {name: len(part) for name, part in found.items()} == {"a": 10, "b": 18}


@pytest.mark.parametrize(
    ("ranges", "match"),
    [
        ({}, "names no range"),
        ({"a": ("2020-01-01", "2020-01-05"), "b": ("2020-01-05", None)}, r"a=.* and b=.* overlap"),
        ({"a": (None, "2020-01-05"), "b": (3, 5)}, "mixes dates and step positions"),
        ({"a": ("2021", "2022")}, r"a=\('2021', '2022'\) holds no sample; the dataset has 37, 2020-01-01"),
        ({"a": "2020"}, "is not a range"),
    ],
)
def test_ranges_that_make_no_split(ranges, match):
    with pytest.raises(WindowError, match=match):
        split(opened(globe(steps=40, lat=3, lon=4), **WINDOW), **ranges)
