"""Bad input: every mistake is refused by its type, names what was asked and what there is, alike on every rank."""

from pathlib import Path

import numpy as np
import pytest
import torch
from globe_store import globe, stacked, write

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.io import (
    CorruptChunkError,
    DataLoader,
    FieldError,
    GridError,
    HaloError,
    MissingArrayError,
    MissingLevelError,
    NaNError,
    ReadError,
    StateError,
    UnsupportedStoreError,
    WindowError,
)
from jigsaw.testing import on_ranks, world_mesh

REFUSED = [
    (
        {"fields": ["sst"]},
        MissingArrayError,
        r"'sst' is not in the store.*searched as 'sea_surface_temperature'.*store has: 2m_temperature, geop",
    ),
    (
        {"fields": ["z300"]},
        MissingLevelError,
        r"'geopotential' has no level 300; the nearest is 500. It has: 500, 700, 850",
    ),
    (
        {"halo": {"lat": 14}},
        HaloError,
        r"halo=\{'lat': 14\} is larger than the domain: 'lat' has 13 rows; use at most 13",
    ),
    ({"halo": {"lat": -1}}, HaloError, r"halo=\{'lat': -1\} is negative"),
    ({"halo": "2"}, HaloError, r"halo=\{'lat': '2'\} must be a number of rows, or \(below, above\)"),
    ({"halo": 1.5}, HaloError, r"halo=\{'lat': 1.5\} must be a number of rows"),
    ({"halo": {"lon": (1, 2, 3)}}, HaloError, r"halo=\{'lon': \(1, 2, 3\)\} must be a number of rows"),
    ({"select": {"level": 500}}, GridError, r"names 'level'.*there are \[\]; a level is part of a field: 'geop"),
    (
        {"halo": {"latitude": 1}},
        GridError,
        r"halo=.* names 'latitude', but the fields' spatial dims are \['lat', 'lon'\]",
    ),
    ({"spec": {"level": "lat"}}, GridError, r"spec=.* names 'level', but the fields' spatial dims"),
    ({"spec": {"lat": "data"}}, ShardingError, r"cuts space by 'data', which cuts the batch"),
    ({"spec": {"lat": "lat", "lon": "lat"}}, ShardingError, r"uses axis 'lat' more than once"),
    ({"boundary": {"lon": "wrap"}}, GridError, r"boundary=\{'lon': 'wrap'\} is not a rule: use 'periodic'"),
    ({"inputs": range(-11, 1)}, WindowError, r"offset -11 to 0 needs 12 steps, but the series has 10"),
    ({"boundary": "periodic"}, GridError, r"boundary='periodic' must say it by dim: boundary=\{'lat': 'periodic'\}"),
    ({"spec": "lat"}, GridError, r"spec='lat' must say it by dim: spec=\{'lat': 'lat'\}"),
    ({"inputs": 0}, WindowError, r"inputs=0 is not a list; give a list: inputs=\[0\]"),
    ({"time": "2020-01"}, WindowError, r"time='2020-01' is not a span; give \(first, last\), like \('1979', '2015'\)"),
    ({"time": 3}, WindowError, r"time=3 is not a span"),
    ({"inputs": np.array(0)}, WindowError, r"inputs=array\(0\) is not a list; give a list"),
    ({"inputs": []}, WindowError, r"inputs=\[\] names no step"),
    ({"targets": [1, 1]}, WindowError, r"targets=\[1, 1\] names a step twice"),
    ({"inputs": [10**20]}, WindowError, r"inputs=\[10+\] has a step 10+ away from the sample's anchor, and 64 bits"),
    ({"inputs": [0], "targets": [-(2**63)]}, WindowError, r"targets=\[-9\d+\] has a step -9\d+ away"),
    ({"inputs": ["9" * 400 + "h"]}, WindowError, r"'9+'… is longer than all time"),
    ({"every": 10**20}, WindowError, r"every=10+ is 10+ steps of the series, 6 hour\(s\), and so longer than all time"),
    ({"time": ("1990", "1991")}, WindowError, r"selects no step; the store has 10, 2020-01-01"),
    (
        {"normalize": {"z500": (0, 1)}},
        FieldError,
        r"normalize has 'z500', which is not a field; the channels are \['t2m'\]",
    ),
    (
        {"fields": ["t2m", "z500"], "normalize": {"t2m": (0, 1)}},
        FieldError,
        r"no mean and std for channel 'z500'; it has \['t2m'\]",
    ),
    ({"normalize": {"t2m": (280.0, 0.0)}}, FieldError, r"mean 280 and std 0; need finite numbers and std > 0"),
    ({"normalize": {"t2m": 280.0}}, FieldError, r"normalize\['t2m'\]=280.0 must be \(mean, std\)"),
    ({"nan": None}, FieldError, r"nan=None must be 'keep', 'raise' or a number"),
    ({"normalize": True}, FieldError, r"normalize=True must be \(mean, std\) by field, Statistics, or the path"),
    ({"nan": "drop"}, FieldError, r"nan='drop' must be 'keep', 'raise' or a number"),
    ({"dtype": "int8"}, FieldError, r"dtype='int8' must be one of"),
    ({"mode": "fast"}, FieldError, r"mode='fast' must be one of"),
    ({"lat_order": "down"}, GridError, r"lat_order='down' must be one of"),
    ({"fields": 5}, FieldError, r"fields=5 is not a list; give a list of names, like fields=\['t2m'\]"),
    ({"fields": ["t2m", 1]}, FieldError, r"fields=\['t2m', 1\] has 1, which is not a string; give names"),
    ({"target_fields": "t2m", "targets": [1]}, FieldError, r"target_fields='t2m' is one string; give a list"),
    ({"forcings": 5}, FieldError, r"forcings=5 is not a list; give a list of names, like forcings=\['cos_zenith'\]"),
    ({"vectors": 5, "boundary": {"lat": "pole"}}, FieldError, r"vectors=5 is not a list"),
    ({"dims": 5}, GridError, r"dims=5 must say it by name: dims=\{'time': 'valid_time'\}"),
    ({"select": 5}, GridError, r"select=5 must say it by name: select=\{'member': 0\}"),
    ({"along": ["time"]}, GridError, r"along=\['time'\] is not a dim of the store"),
    ({"options": 5}, UnsupportedStoreError, r"options=5 must say it by name: options=\{'region'"),
    ({"disk_cache": "cache"}, FieldError, r"disk_cache='cache' must be a DiskCache: .*jigsaw.io.DiskCache\("),
    ({"normalize": {5: (0, 1)}}, FieldError, r"normalize names 5, which is not a string"),
    ({"nan": np.zeros(2)}, FieldError, r"nan=array\(.* must be 'keep', 'raise' or a number"),
    ({"dtype": []}, FieldError, r"dtype=\[\] must be one of"),
    ({"spec": {"lat": 5}}, ShardingError, r"has 5, which names no axis; give a name"),
    ({"split": "even"}, ShardingError, r"split='even' is not a rule: use 'balanced', 'chunk' or"),
    ({"split": {"lon": 5}}, ShardingError, r"split=5 is not a rule"),
    ({"split": {"lat": [0, 6.5, 13]}}, ShardingError, r"split=\[0, 6.5, 13\] is not a rule"),
    ({"align": 0}, ShardingError, r"align=0 must be a whole number, 1 or more"),
    ({"align": {"lon": None}}, ShardingError, r"align=None must be a whole number, 1 or more"),
    ({"align": 1.5}, ShardingError, r"align=1.5 must be a whole number"),
]


@pytest.mark.parametrize(
    ("asked", "error", "match"), REFUSED, ids=[next(iter(asked)) + str(i) for i, (asked, _, _) in enumerate(REFUSED)]
)
def test_open_refuses(wb2, asked, error, match):
    with pytest.raises(error, match=match):
        jigsaw.io.open(wb2, **({"mesh": {"lat": 1}, "fields": ["t2m"]} | asked))


@on_ranks(2)
def test_open_refuses_on_every_rank_without_a_word_between_them(wb2):
    with jigsaw.comm.count() as sent:
        for asked, error, match in REFUSED:
            with pytest.raises(error, match=match):
                jigsaw.io.open(wb2, **({"mesh": world_mesh(lat=2), "fields": ["t2m"]} | asked))
    assert sent.calls == []


@pytest.mark.parametrize(
    "mesh", [5, None, "lat", [2, 1], {"lat": "2"}, {"lat": 1.5}, {"lat": None}, {5: 2}, {"lat": 0}]
)
def test_no_mesh(wb2, mesh):
    with pytest.raises(
        ShardingError, match=r"mesh=.*(is not a mesh; give jigsaw.init_mesh|must have axes of at least one)"
    ):
        jigsaw.io.open(wb2, mesh=mesh)


@pytest.mark.parametrize("sample", [slice(0, 3), 1.5, 2.0, "1", None, [0], np.arange(2)])
def test_a_sample_is_an_integer(wb2, sample):
    ds = jigsaw.io.open(wb2, mesh=jigsaw.init_mesh(lat=1), fields=["t2m"])
    with pytest.raises(TypeError, match=r"of a dataset must be an integer; a DataLoader reads several at a time"):
        ds[sample]
    torch.testing.assert_close(ds[np.int64(1)].input.local, ds[torch.tensor(1)].input.local)


@pytest.mark.parametrize("given", ["globe.zarr", None, [1, 2]])
def test_a_loader_of_what_is_no_dataset(given):
    with pytest.raises(FieldError, match=r"DataLoader\(.*\) needs a jigsaw.io.Dataset: what jigsaw.io.open\("):
        DataLoader(given)
    with pytest.raises(
        FieldError, match=r"VolumeLoader\(.*\) needs a jigsaw.io.Volumes: what jigsaw.io.open_volumes\("
    ):
        jigsaw.io.VolumeLoader(given)
    with pytest.raises(WindowError, match=r"split\(.*\) needs a jigsaw.io.Dataset"):
        jigsaw.io.split(given, train=(0, 5))


def test_loaders_refuse_numbers_of_other_kinds(wb2):
    ds = jigsaw.io.open(wb2, mesh=jigsaw.init_mesh(lat=1), fields=["t2m"], targets=[1, 2])
    with pytest.raises(FieldError, match=r"is not a Dataset|needs a jigsaw.io.Volumes"):
        jigsaw.io.VolumeLoader(ds)
    for rollout in ("1", [1], 1.5):
        with pytest.raises(WindowError, match=r"rollout=.* must be targets by first epoch"):
            DataLoader(ds, rollout=rollout)
    for cache_bytes in ("1", None, 1.5, -1):
        with pytest.raises(FieldError, match=r"cache_bytes=.* must be a whole number, 0 or more"):
            DataLoader(ds, cache_bytes=cache_bytes)
    for steps in (1.5, "a", None, 0, 3):
        with pytest.raises(WindowError, match=r"a rollout of .* steps needs a whole number of targets"):
            ds.rollout(steps)


def test_no_store(tmp_path):
    for path in (tmp_path / "nothing.zarr", tmp_path):
        with pytest.raises(UnsupportedStoreError, match=str(tmp_path)):
            jigsaw.io.open(str(path), mesh={"lat": 1})
    globe(2).to_netcdf(tmp_path / "2020.nc")
    with pytest.raises(UnsupportedStoreError, match=r"a folder of files; give those along time as a glob: '.*/\*\.nc'"):
        jigsaw.io.open(str(tmp_path), mesh={"lat": 1})
    with pytest.raises(UnsupportedStoreError, match=r"an xarray DataArray is not a Dataset: give .to_dataset\("):
        jigsaw.io.open(globe(2)["2m_temperature"], mesh={"lat": 1})


@on_ranks(2)
def test_a_mesh_that_does_not_fit_the_ranks():
    with pytest.raises(ShardingError, match=r"lat=3.*2"):
        jigsaw.init_mesh(device="cpu", lat=3)


def test_two_grids_and_two_time_axes(tmp_path):
    coarse = globe(lat=7)[["2m_temperature"]].rename({"2m_temperature": "coarse", "latitude": "lat2"})
    shifted = globe()[["2m_temperature"]].rename({"2m_temperature": "shifted", "longitude": "lon2"})
    later = globe(steps=4)[["2m_temperature"]].rename({"2m_temperature": "later", "time": "time2"})
    coarse["lat2"].attrs["units"] = "degrees_north"
    shifted["lon2"].attrs["units"] = "degrees_east"
    later["time2"].attrs["axis"] = "T"
    data = globe().merge(coarse).merge(shifted.assign_coords(lon2=shifted.lon2 + 1)).merge(later)
    path = str(tmp_path / "mixed.zarr")
    data.to_zarr(path, consolidated=False)
    for other, match in (
        (
            "coarse",
            r"array '2m_temperature' \(lat 13, lon 16\) and array 'coarse' \(lat 7, lon 16\) lie on different grids",
        ),
        ("shifted", r"have different lon values \(0.0\.\.337.5 and 1.0\.\.338.5\)"),
        ("later", r"'2m_temperature' \(10 steps\) and 'later' \(4 steps\) have different times"),
    ):
        with pytest.raises(GridError, match=match):
            jigsaw.io.open(path, mesh={"lat": 1}, fields=["t2m", other])


# -- chunks ------------------------------------------------------------------------------------------------------------


def damaged(folder, how):
    """A store whose chunk (3, 0, 0) of 2m_temperature is missing, empty, cut short, or scrambled."""
    path = write(folder / f"{how}.zarr", globe())
    chunk = Path(path) / "2m_temperature" / "c" / "3" / "0" / "0"
    raw = chunk.read_bytes()
    if how == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes({"empty": b"", "short": raw[: len(raw) // 2], "scrambled": bytes(255 - b for b in raw)}[how])
    return path


@pytest.mark.parametrize("how", ["empty", "short", "scrambled"])
def test_a_corrupt_chunk_is_named_by_array_index_and_file(tmp_path, how):
    ds = jigsaw.io.open(damaged(tmp_path, how), mesh=world_mesh(lat=1), fields=["t2m"])
    with pytest.raises(
        CorruptChunkError,
        match=r"chunk \(3, 0, 0\) of array '2m_temperature' in .*/2m_temperature/c/3/0/0 cannot be read",
    ):
        ds[3]
    want = globe()["2m_temperature"].values[4]
    np.testing.assert_allclose(
        ds[4].input.local[0, 0], want, atol=0.006
    )  # the others stay readable; 0.01 is the packing


@pytest.fixture(scope="module")
def scrambled(tmp_path_factory):
    return damaged(tmp_path_factory.mktemp("scrambled"), "scrambled")


@pytest.mark.slow
@on_ranks(4)
def test_every_rank_of_a_cooperative_read_hears_of_a_corrupt_chunk(scrambled):
    ds = jigsaw.io.open(scrambled, mesh=world_mesh(lat=2, lon=2), fields=["t2m"], mode="cooperative", halo=1)
    with pytest.raises(ReadError, match=r"chunk \(3, 0, 0\) of array '2m_temperature'"):
        for _ in DataLoader(ds, batch_size=1):
            pass


def test_a_missing_chunk_that_the_format_defines_as_fill_is_fill_for_who_says_so(tmp_path):
    path = damaged(tmp_path, "missing")
    ds = jigsaw.io.open(path, mesh=world_mesh(lat=1), fields=["t2m"], nan="raise", missing="fill")
    torch.testing.assert_close(ds[3].input.local, torch.full((1, 1, 13, 16), 280.0))  # zarr's fill 0, unpacked
    np.testing.assert_allclose(ds[3].input.local, stacked(path, ["2m_temperature"])[3:4])
    floats = globe()[["temperature"]]
    floats["temperature"].values[2] = np.nan  # zarr does not write a chunk that is all fill
    floats = write(tmp_path / "floats.zarr", floats)
    holes = jigsaw.io.open(floats, mesh=world_mesh(lat=1), fields=["t500"], missing="fill")
    assert holes.plan(2).total.chunks == 0
    assert holes[2].input.local.isnan().all()


# -- missing values ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def holes(tmp_path_factory):
    """Missing values over "land": a masked int16 variable and a float one with NaN."""
    data = globe()
    data["2m_temperature"].values[:, 2:4, 5] = np.nan
    data["temperature"].values[:, 1, 7, 9] = np.nan
    return write(tmp_path_factory.mktemp("holes") / "holes.zarr", data)


@pytest.mark.parametrize(("field", "long", "holes_at"), [("t2m", "2m_temperature", 2), ("t700", "temperature@700", 1)])
def test_missing_values_are_kept_filled_or_refused(holes, field, long, holes_at):
    want = stacked(holes, [long])[:1]
    assert np.isnan(want).sum() == holes_at
    options = {"mesh": world_mesh(lat=1), "fields": [field], "normalize": {field: (270.0, 10.0)}}
    kept = jigsaw.io.open(holes, nan="keep", **options)[0].input.local
    np.testing.assert_allclose(kept, (want - 270) / 10, rtol=1e-4, atol=1e-5)
    filled = jigsaw.io.open(holes, nan=-3.0, **options)[0].input.local
    torch.testing.assert_close(filled, kept.nan_to_num(nan=-3.0))
    with pytest.raises(NaNError, match=rf"array '{long.partition('@')[0]}' has missing values"):
        jigsaw.io.open(holes, nan="raise", **options)[0]


def test_a_field_without_holes_passes_the_strict_policy(holes):
    assert (
        jigsaw.io.open(holes, mesh=world_mesh(lat=1), fields=["z500", "t500"], nan="raise")[0]
        .input.local.isfinite()
        .all()
    )


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_torn_state_dict(wb2):
    loader = DataLoader(jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["t2m"]))
    whole = loader.state_dict()
    for torn in (
        dict(list(whole.items())[:2]),
        whole | {"epoch": None},
        whole | {"next_sample": 9, "samples": 8},
        [],
        None,
    ):
        with pytest.raises(StateError):
            loader.load_state_dict(torn)
    loader.load_state_dict(whole)


@pytest.mark.parametrize("dim", ["latitude", "longitude"])
def test_a_grid_without_rows_has_no_sample(tmp_path, dim):
    data = globe().isel({dim: slice(0)})
    refusal = f"array '2m_temperature' has 0 rows along '{dim}', so it holds no sample"
    with pytest.raises(GridError, match=refusal):
        jigsaw.io.open(data, mesh={"lat": 1}, fields=["t2m"])
    with pytest.raises(GridError, match=refusal):
        jigsaw.io.convert(data, tmp_path / "none.zarr", fields=["t2m"], chunks={})
    np.save(tmp_path / "none.npy", np.zeros((0, 4, 4), "f4"))
    with pytest.raises(GridError, match="has 0 rows along 'z'"):
        jigsaw.io.open_volumes([tmp_path / "none.npy"], mesh={"z": 1}, crop=None)


def test_a_series_without_steps_has_no_sample():
    with pytest.raises(WindowError, match=r"needs 1 steps, but the series has 0"):
        jigsaw.io.open(globe().isel(time=slice(0)), mesh={"lat": 1}, fields=["t2m"])
