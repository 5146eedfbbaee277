"""Arguments of writers that do not fit: each is refused by name, before anything is written."""

from pathlib import Path

import cftime
import numpy as np
import pytest
import torch
import xarray as xr

import jigsaw
from jigsaw.errors import FieldError, GridError, WriteError
from jigsaw.io.writing.write import Writer, write

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


@pytest.mark.parametrize("attribute", ["scale_factor", "add_offset", "_Unsigned"])
def test_attributes_of_packing_are_refused(tmp_path, attribute):
    for suffix in SUFFIXES:
        with pytest.raises(WriteError, match=rf"field_attrs\['u'\] has {attribute}, .* stored as they are given"):
            Writer(tmp_path / f"a.{suffix}", dims=("time", "lat"), field_attrs={"u": {"units": "K", attribute: 1}})


def test_what_like_reads_is_not_replaced(tmp_path):
    mesh, options = jigsaw.init_mesh(device="cpu", lat=1), {"dims": ("time", "lat", "lon"), "append_dim": "time"}
    space = {"lat": np.linspace(90, -90, 9), "lon": np.arange(16) * 22.5}
    tile = jigsaw.shard(torch.ones(1, 9, 16), mesh, (None, None, None))
    for number in range(2):
        for suffix in SUFFIXES:
            path = tmp_path / f"in{number}.{suffix}"
            write(path, {"u": tile}, coords={"time": TIMES[[number]], **space}, **options)
    zarr, netcdf = tmp_path / "in0.zarr", tmp_path / "in1.nc"
    (tmp_path / "link.nc").symlink_to(netcdf)
    sources = {
        zarr: [str(zarr), [str(zarr), str(tmp_path / "in1.zarr")], xr.open_zarr(zarr)],
        netcdf: [str(netcdf), str(tmp_path / "in*.nc"), str(tmp_path / "link.nc")],
    }
    for path, opened in sources.items():
        for source in opened:
            data = jigsaw.io.open(source, mesh=mesh)
            with pytest.raises(WriteError, match=rf"{path.name} is what the dataset of like= reads, so mode='w' does"):
                Writer(path, like=data, mode="w", **options)
            Writer(tmp_path / "other.zarr", like=data, mode="w", **options)
            Writer(path, like=data, mode="a", **options)
    sides = [jigsaw.io.open(str(tmp_path / f"in0.{suffix}"), mesh=mesh) for suffix in ("nc", "zarr")]
    with pytest.raises(WriteError, match="is what the dataset of like= reads"):
        Writer(zarr, like=jigsaw.io.pair(*sides), mode="w", **options)


BAD = {
    "chunks": ({"chunks": 4}, WriteError, r"chunks=4 must say it by name: chunks=\{'time': 1, 'lat': 90\}"),
    "text size": ({"chunks": {"time": "x"}}, WriteError, "'x' of 'time' is not a whole number >= 1; give chunks="),
    "no size": ({"shards": {"time": None}}, WriteError, "shards=.* None of 'time' is not a whole number"),
    "fraction": ({"chunks": {"lat": 2.9}}, WriteError, "2.9 of 'lat' is not a whole number"),
    "true": ({"chunks": {"lat": True}}, WriteError, "True of 'lat' is not a whole number"),
    "encoding": ({"encoding": ["dtype"]}, WriteError, r"encoding=\['dtype'\] must say it by name: encoding=\{'dtype'"),
    "no dtype": ({"encoding": {"dtype": None}}, WriteError, r"encoding=\{'dtype': None\} must name a dtype"),
    "attrs": ({"attrs": ["x"]}, WriteError, r"attrs=\['x'\] must say it by name"),
    "coords": ({"coords": ["x"]}, GridError, r"coords=\['x'\] must say it by name"),
    "coords name": ({"coords": {3: [1]}}, GridError, "coords name 3, which is not a string"),
    "like": ({"like": "x"}, WriteError, "like='x' must be a jigsaw.io.Dataset; open one"),
    "budget": ({"budget": "1GB"}, WriteError, "budget='1GB' must be a number of bytes >= 1, like budget=256 << 20"),
    "no budget": ({"budget": 0}, WriteError, "budget=0 must be a number of bytes >= 1"),
    "fields": ({"fields": [3]}, FieldError, r"fields=\[3\] has 3, which is not a string"),
    "one field": ({"fields": "u"}, FieldError, r"fields='u' is one string; give a list"),
    "dims of another": ({"dims": {"t2m": ("time", "lat")}}, FieldError, r"the arrays \['t2m'\], but not 'u'; give its"),
    "no dim": ({"dims": ("time", None)}, FieldError, "has None, which is not a string"),
    "one dim": ({"dims": "time"}, FieldError, "dims='time' is one string; give a list"),
    "field_attrs": ({"field_attrs": ["u"]}, WriteError, r"field_attrs=\['u'\] must say it by name"),
    "attrs of a field": ({"field_attrs": {"u": "K"}}, WriteError, r"field_attrs\['u'\]='K' must say it by name"),
    "misspelt": ({"field_attrs": {"uu": {}}}, FieldError, r"field_attrs name \['uu'\], but the arrays are \['u'\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_argument_that_is_something_else_is_refused_by_name(tmp_path, case):
    chosen, error, match = BAD[case]
    with pytest.raises(error, match=match):
        write(tmp_path / "a.zarr", {"u": whole()}, **{"dims": ("time", "lat"), **chosen})
    assert not any(tmp_path.iterdir())


def test_coordinates_of_an_append_are_by_name(tmp_path):
    out = Writer(tmp_path / "a.zarr", dims=("time", "lat"))
    with pytest.raises(GridError, match=r"coords=\['x'\] must say it by name"):
        out.append({"u": whole()}, coords=["x"])
    with pytest.raises(FieldError, match="3 cannot name an array"):
        out.append({3: whole()})
    out.append({"u": whole()}, coords={"time": TIMES[:1]})
    out.close()
    write(tmp_path / "b.zarr", {"u": whole()}, dims=("time", "lat"), budget=1e6, chunks={"lat": np.int64(4)})


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"attrs": {"config": Path("run.yml")}}, r"attrs\['config'\] is PosixPath.*, which JSON does not hold"),
        ({"encoding": {"compressors": "zstd"}}, "zarr refuses array 'u': "),
        ({"field_attrs": {"u": {"_FillValue": "none"}}}, "_FillValue='none' of array 'u' of float32 must be a number"),
        ({"field_attrs": {"u": {"units": {1, 2}}}}, "zarr refuses array 'u': "),
    ],
    ids=str,
)
def test_a_store_is_not_replaced_by_one_that_zarr_refuses(tmp_path, more, match):
    write(tmp_path / "a.zarr", {"u": whole()}, dims=("time", "lat"))
    with pytest.raises(WriteError, match=match):
        write(tmp_path / "a.zarr", {"u": whole()}, dims=("time", "lat"), mode="w", **more)
    np.testing.assert_array_equal(xr.open_zarr(tmp_path / "a.zarr")["u"], np.ones((1, 9)))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_imaginary_parts_and_wide_integers_are_not_dropped(tmp_path, suffix):
    mesh = jigsaw.init_mesh(device="cpu", lat=1)
    options = {"dims": ("lat",), "encoding": {"dtype": "float32"}}
    for name, values, first in (("complex", [1 + 2j, 3], r"\(1\+2j\)"), ("wide", [1, 2**24 + 1], "16777217")):
        with pytest.raises(WriteError, match=f"values such as {first}, which float32 does not hold"):
            write(tmp_path / f"{name}.{suffix}", {"u": jigsaw.shard(torch.tensor(values), mesh, ("lat",))}, **options)
    real = jigsaw.shard(torch.tensor([1 + 0j, 2**24]), mesh, ("lat",))
    write(tmp_path / f"b.{suffix}", {"u": real}, **options)
    np.testing.assert_array_equal(xr.open_dataset(tmp_path / f"b.{suffix}")["u"], [1, 2**24])
