"""Arguments of writers that do not fit: each is refused by name, before anything is written."""

import cftime
import numpy as np
import pytest
import torch
import xarray as xr

import jigsaw
from jigsaw.errors import GridError
from jigsaw.io.writing.write import write

TIMES = np.datetime64("2020-01-01", "ns") + np.arange(6) * np.timedelta64(6, "h")
SUFFIXES = ("zarr", "nc")


def whole(rows=1, columns=9):
    return jigsaw.shard(torch.ones(rows, columns), jigsaw.init_mesh(device="cpu", lat=1), (None, None))


def test_a_coordinate_with_the_name_of_a_dim_lies_along_it(tmp_path):
    match = (
        r"coords\['time'\] has the dims \(\), but 'time' is a dim of the arrays, with 1 rows; .*\{'time': \[value\]\}"
    )
    for append_dim in ("time", None):
        with pytest.raises(GridError, match=match):
            write(
                tmp_path / "a.zarr",
                {"u": whole()},
                dims=("time", "lat"),
                append_dim=append_dim,
                coords={"time": TIMES[0]},
            )
    assert not any(tmp_path.iterdir())


NO_TIMES = {
    "repeat": (TIMES[[0, 0]], r"coords\['time'\] must rise, and is \[438288 438288\] hours since .*each once"),
    "fall": (TIMES[[1, 0]], r"coords\['time'\] must rise"),
    "noleap": (np.array([cftime.DatetimeNoLeap(2020, 1, d) for d in (2, 1)]), r"coords\['time'\] must rise"),
    "missing": (np.array(["2020-01-01", "NaT"], "M8[ns]"), r"coords\['time'\] has a missing or infinite time"),
    "nan": (np.array([np.nan, 1.0]), r"coords\['time'\] has a missing or infinite time"),
    "text": (["2020-01-01", "2020-01-02"], r"coords\['time'\] are texts, such as \['2020-01-01'\], .*datetime64"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", NO_TIMES)
def test_times_rise_in_every_append(tmp_path, case, suffix):
    times, match = NO_TIMES[case]
    path, options = tmp_path / f"a.{suffix}", {"dims": ("time", "lat"), "mode": "a", "append_dim": "time"}
    for more in ({}, {"append_dim": None, "mode": "w-"}):
        with pytest.raises(GridError, match=match):
            write(path, {"u": whole(2)}, coords={"time": times}, **{**options, **more})
    assert not any(tmp_path.iterdir())
    write(path, {"u": whole(2)}, coords={"time": TIMES[:2]}, **options)
    with pytest.raises(GridError, match=r"coords\['time'\]"):
        write(path, {"u": whole(2)}, coords={"time": times}, **options)
    assert xr.open_dataset(path).load().time.values.tolist() == TIMES[:2].tolist()


def test_one_missing_time_is_refused(tmp_path):
    for name in ("time", "prediction_timedelta"):
        missing = np.array(["NaT"], "M8[ns]" if name == "time" else "m8[ns]")
        with pytest.raises(GridError, match=rf"coords\['{name}'\] has a missing or infinite time"):
            write(tmp_path / "a.zarr", {"u": whole()}, dims=(name, "lat"), coords={name: missing})
    issued = {"issued": (("time",), TIMES[[1, 0]])}  # along time, and is not what tells its rows
    write(tmp_path / "a.zarr", {"u": whole(2)}, dims=("time", "lat"), coords={"time": TIMES[:2], **issued})
