"""Many files along time as one store: the values of all, each by its own packing, units and format; gaps, overlaps."""

import math
import os

import netCDF4
import numpy as np
import pytest
import xarray as xr
from globe_store import globe

import jigsaw
from jigsaw.errors import CorruptChunkError, GridError, TruncatedError, UnsupportedStoreError
from jigsaw.io.commands.plan_command import plan_report
from jigsaw.io.formats import netcdf3 as _netcdf3
from jigsaw.io.formats import raw as _raw
from jigsaw.io.formats.many_files import claims, open_many
from jigsaw.io.formats.slab_arrays import read_table_box
from jigsaw.io.formats.store import open_store
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

FIELDS = ["t2m", "t500", "land_sea_mask"]
STEPS = (4, 1, 3, 2)


def opener(path):
    for format, openit in ((_netcdf3, _netcdf3.open_netcdf3), (_raw, _raw.open_npy)):
        if format.claims(path):
            return openit(path)
    return open_store(path)


def write(folder, data=None, formats=("nc",), steps=STEPS):
    """Files of so many steps: each packed by its own scale and offset, with times in its own units."""
    data, paths, start = globe() if data is None else data, [], 0
    for i, n in enumerate(steps):
        part = data.isel(time=slice(start, start + n))
        low, high = float(part["2m_temperature"].min()), float(part["2m_temperature"].max())
        packing = {"dtype": "int16", "scale_factor": (high - low) / 6e4, "add_offset": (high + low) / 2}
        encoding = {
            "2m_temperature": packing | {"_FillValue": -32000 - i},
            "time": {"units": ("hours since 2020-01-01", "days since 2019-12-31 06:00")[i % 2], "dtype": "f8"},
        }
        paths.append(str(folder / f"{9 - i}.{formats[i % len(formats)]}"))
        if paths[-1].endswith("zarr"):
            encoding["temperature"] = {"chunks": (2, 1, 5, 16)}
            part.to_zarr(paths[-1], zarr_format=2, encoding=encoding, consolidated=False)
        else:
            encoding["level"] = {"dtype": "i4"}
            part.to_netcdf(paths[-1], format="NETCDF3_64BIT", encoding=encoding, unlimited_dims=["time"])
        start += n
    return paths


def truth(paths):
    each = [xr.open_dataset(p, engine="zarr" if p.endswith("zarr") else None, **_options(p)) for p in paths]
    return xr.concat(
        [d.load() for d in each], "time", data_vars="minimal", coords="minimal", compat="override", join="override"
    )


def _options(path):
    return {"consolidated": False} if path.endswith("zarr") else {}


STEPS_AROUND = {"inputs": [-1, 0], "targets": [1, 2]}


@pytest.mark.parametrize("formats", [("nc",), ("zarr", "nc")], ids="-".join)
def test_all_files_are_one_series(tmp_path, formats):
    paths = write(tmp_path, formats=formats)
    data = truth(paths)
    store = open_many(paths[::-1], opener)
    ds = jigsaw.io.open(
        store, mesh=world_mesh(lat=1), fields=FIELDS, target_fields=FIELDS, inputs=[-1, 0], targets=[1, 2]
    )
    assert len(ds) == 10 - 3 and store.notes == ()
    for i in range(len(ds)):
        sample = ds[i]
        assert (sample.input_times == data.time.values[i : i + 2]).all()
        for tile, steps in ((sample.input, slice(i, i + 2)), (sample.target, slice(i + 2, i + 4))):
            part, got = data.isel(time=steps), tile.full_tensor().numpy()
            np.testing.assert_allclose(got[:, 0], part["2m_temperature"].values, rtol=1e-6)
            np.testing.assert_array_equal(got[:, 1], part.temperature.sel(level=500).values)
            np.testing.assert_array_equal(got[1, 2], data.land_sea_mask.values)
    plan = ds.plan(2)  # its steps 2, 3 and 4, 5: of the first file, the second and the third
    used = sorted({job.array for job in plan.jobs if job.array.startswith("2m")})
    assert used == sorted(f"2m_temperature of {p}" for p in paths[:3])


def test_missing_values_are_those_of_each_file(tmp_path):
    data = globe()
    data["2m_temperature"][[0, 4, 9], 2, 5] = np.nan
    paths = write(tmp_path, data)
    ds = jigsaw.io.open(open_many(paths, opener), mesh=world_mesh(lat=1), fields=["t2m"])
    got = np.stack([ds[i].input.local[0, 0].numpy() for i in range(10)])
    assert np.argwhere(np.isnan(got)).tolist() == [[0, 2, 5], [4, 2, 5], [9, 2, 5]]
    store = ds.store
    whole = store.read_small("2m_temperature")
    np.testing.assert_allclose(whole, truth(paths)["2m_temperature"].values, rtol=1e-6)
    table = store.arrays["2m_temperature"]
    np.testing.assert_array_equal(read_table_box(table, ((2, 9), (1, 6), (2, 7))), whole[2:9, 1:6, 2:7])
    np.testing.assert_array_equal(store.read_small("temperature"), truth(paths).temperature.values)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return write(tmp_path_factory.mktemp("many"), formats=("zarr", "nc"))


@on_ranks(2)
def test_planned_counts_are_what_the_engine_counts(shared):
    mesh = world_mesh(lat=2)
    ds = jigsaw.io.open(open_many(shared, opener), mesh=mesh, fields=FIELDS, inputs=[0, 1, 2], halo=1)
    got = ds[3].input.full_tensor().numpy()
    part = truth(shared).isel(time=slice(3, 6))
    np.testing.assert_array_equal(got[:, 1], part.temperature.sel(level=500).values)
    np.testing.assert_allclose(got[:, 0], part["2m_temperature"].values, rtol=1e-6)
    planned = ds.plan(3).rows[mesh.get_rank()]
    assert ds._engine.stats == planned and planned.stored_bytes > 0
    loader = jigsaw.io.DataLoader(ds, batch_size=4)
    assert sum(len(batch.samples) for batch in loader) == 8
    loader.close()


def write_apart(folder, upper=None):
    """The surface in two files along time, and another store with what lies above it."""
    data = globe()
    surface, above = data[["2m_temperature", "land_sea_mask"]], data[["temperature", "land_sea_mask"]]
    paths = [str(folder / "late.nc"), str(folder / "above.zarr"), str(folder / "early.nc")]
    surface.isel(time=slice(6, None)).to_netcdf(paths[0], format="NETCDF3_64BIT")
    (above if upper is None else upper(above)).to_zarr(paths[1], zarr_format=2, consolidated=False)
    surface.isel(time=slice(6)).to_netcdf(paths[2], format="NETCDF3_64BIT")
    return paths


def read_apart(paths, axes):
    """Samples of both stores, and the stored bytes that each rank read, as planned, of both and of each alone."""
    mesh, halo = world_mesh(**axes), {"lat": 1}
    ds = jigsaw.io.open(paths, mesh=mesh, fields=FIELDS, inputs=[-1, 0], targets=[1], halo=halo)
    values = [(ds[i].input.full_tensor(), ds[i].target.full_tensor()) for i in range(len(ds))]
    ds = jigsaw.io.open(paths, mesh=mesh, fields=FIELDS, halo=halo)
    assert ds[6].input.shape[1] == 3
    row = mesh.get_rank()
    assert ds._engine.stats == ds.plan(6).rows[row]
    parts = [(paths[::2], ["t2m", "land_sea_mask"]), (paths[1], ["t500"])]
    alone = [jigsaw.io.open(part, mesh=mesh, fields=names, halo=halo).plan(6).rows for part, names in parts]
    return values, ds.plan(6).rows[row].stored_bytes, sum(rows[row].stored_bytes for rows in alone)


@pytest.mark.parametrize("axes", [{"lat": 1}, {"lat": 2}, {"lat": 2, "lon": 2}], ids=str)
def test_stores_of_other_fields_are_joined_as_channels(tmp_path, axes):
    data = globe()
    columns = [data["2m_temperature"], data.temperature.sel(level=500), data.land_sea_mask]
    whole = np.stack([np.broadcast_to(c, (10, 13, 16)) for c in columns], 1)
    answers = run_on_ranks(math.prod(axes.values()), read_apart, write_apart(tmp_path), axes)
    for values, _, _ in answers:
        assert len(values) == 8
        for i, (given, target) in enumerate(values):
            np.testing.assert_array_equal(given, whole[i : i + 2])
            np.testing.assert_array_equal(target, whole[i + 2 : i + 3, :2])
    assert sum(read for _, read, _ in answers) == sum(alone for _, _, alone in answers) > 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.assign_coords(latitude=d.latitude + 1), "above.zarr lies on another grid .*'latitude' has other"),
        (lambda d: d.isel(longitude=slice(12)), "above.zarr lies on another grid .*longitude 12 there"),
        (lambda d: d.assign(land_sea_mask=d.land_sea_mask * 2), "above.zarr has other values of 'land_sea_mask'"),
        (lambda d: d.isel(time=slice(9)), "overlap.*files of other fields need the same times"),
        (lambda d: d.assign(temperature_2=d.temperature).rename(temperature="2m_temperature"), "overlap"),
    ],
)
def test_stores_of_other_fields_elsewhere_are_refused(tmp_path, change, match):
    with pytest.raises(GridError, match=match):
        jigsaw.io.open(write_apart(tmp_path, change), mesh=world_mesh(lat=1))


def test_a_glob(tmp_path):
    write(tmp_path)
    assert claims(str(tmp_path / "*.nc")) and claims([tmp_path]) and not claims(str(tmp_path)) and not claims([])
    assert open_many(str(tmp_path / "*.nc"), opener).arrays["time"].shape == (10,)
    with pytest.raises(UnsupportedStoreError, match=r"\*\.grib' names no file"):
        open_many(str(tmp_path / "*.grib"), opener)


@pytest.mark.parametrize("calendar", ["noleap", "standard"])
def test_monthly_files_on_any_calendar(tmp_path, calendar):
    times = xr.date_range("2000-01-01", periods=6, freq="MS", calendar=calendar, use_cftime=True)
    data = globe(6).assign_coords(time=times)
    for i in range(3):
        part = data.isel(time=slice(2 * i, 2 * i + 2)).drop_encoding()
        part["time"].encoding = {"units": f"days since 2000-0{i + 1}-01", "calendar": calendar, "dtype": "f8"}
        part["level"].encoding = {"dtype": "i4"}
        part.to_netcdf(tmp_path / f"{i}.nc", format="NETCDF3_64BIT")
    store = open_many(str(tmp_path / "?.nc"), opener)
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["t2m"], targets=[1])
    assert store.notes == () and len(ds) == 5
    assert str(ds.input_times(3)[0])[:10] == "2000-04-01"
    np.testing.assert_array_equal(ds[3].input.local[0, 0], data["2m_temperature"].values[3])


def test_a_gap_is_told_of_and_no_window_crosses_it(tmp_path):
    paths = write(tmp_path, globe(gap=4))
    store = open_many(paths, opener)
    told = f"a gap in time between {paths[1]} and {paths[2]}: 2020-01-02T00:00:00.000000 is followed by 2020-01-03T06"
    assert len(store.notes) == 1 and store.notes[0].startswith(told)
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["t2m"], targets=[1])
    assert len(ds) == 8
    assert told in plan_report(ds, ds.plan(0))


def test_overlap_names_both_files(tmp_path):
    paths = write(tmp_path)
    data = globe().isel(time=slice(3, 6))
    data["level"].encoding = {"dtype": "i4"}
    data.to_netcdf(tmp_path / "extra.nc", format="NETCDF3_64BIT")
    with pytest.raises(GridError, match=rf"overlap: {paths[0]} ends at 2020-01-01T18.* and {tmp_path}/extra.nc begins"):
        open_many([*paths[:1], tmp_path / "extra.nc"], opener)
    with pytest.raises(GridError, match=r"names .*9\.nc' twice"):
        open_many([paths[0], paths[0]], opener)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.isel(latitude=slice(12)), "7.nc lies on another grid than .*9.nc: array 'geopotential' is"),
        (lambda d: d.assign_coords(latitude=d.latitude + 1), "7.nc lies on another .* 'latitude' has other"),
        (lambda d: d.drop_vars("temperature"), "7.nc has no array 'temperature', which .*9.nc has"),
        (lambda d: d.assign(temperature=d.temperature.assign_attrs(units="degC")), "'temperature' in units 'degC'"),
        (lambda d: d.isel(time=0, drop=True), "7.nc has no dim 'time'"),
        (lambda d: d.drop_vars("time"), "7.nc has no (array 'time'|times)"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_named(tmp_path, change, match):
    paths = write(tmp_path)
    other = change(xr.open_dataset(paths[2], decode_cf=False).load())
    os.remove(paths[2])
    other.to_netcdf(paths[2], format="NETCDF3_64BIT")
    for fields in (None, ["z500", "t500"]):
        with pytest.raises(GridError, match=match):
            jigsaw.io.open(open_many(paths, opener), mesh=world_mesh(lat=1), fields=fields)


def _curvilinear(shift=0.0, mask=0.0):
    y, x = np.meshgrid(np.arange(6.0), np.arange(8.0), indexing="ij")
    places = {"lat": (("y", "x"), 40 + y + 0.1 * x + shift, {"standard_name": "latitude"})}
    places["lon"] = (("y", "x"), 10 + x - 0.1 * y, {"standard_name": "longitude"})
    fields = {"t2m": (("time", "y", "x"), np.zeros((2, 6, 8), "f4")), "lsm": (("y", "x"), np.full((6, 8), mask, "f4"))}
    return xr.Dataset(fields, places)


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_places_and_statics_that_differ_between_files_are_refused(tmp_path, suffix):
    days = np.datetime64("2020-01-01", "ns") + np.arange(2) * np.timedelta64(6, "h")

    def stored(name, data, day):
        data = data.assign_coords(time=days + np.timedelta64(day, "D"))
        path = str(tmp_path / f"{name}.{suffix}")
        data.to_zarr(path, zarr_format=2) if suffix == "zarr" else data.to_netcdf(path, format="NETCDF3_64BIT")
        return path

    first, same = stored("a", _curvilinear(), 0), stored("b", _curvilinear(), 1)
    moved, wet = stored("c", _curvilinear(shift=0.5), 2), stored("d", _curvilinear(mask=1.0), 2)
    how = {"mesh": {"y": 1}}
    assert len(jigsaw.io.open([first, same], fields=["t2m", "lsm"], **how)) == 4
    with pytest.raises(GridError, match=rf"{moved} has other values of 'lat' than {first}"):
        jigsaw.io.open([first, same, moved], fields=["t2m"], **how)
    assert len(jigsaw.io.open([first, same, wet], fields=["t2m"], **how)) == 6
    with pytest.raises(GridError, match=rf"{wet} has other values of 'lsm' than {first}"):
        jigsaw.io.open([first, same, wet], fields=["t2m", "lsm"], **how)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.drop_vars("temperature"),
        lambda d: d.assign(temperature=d.temperature.assign_attrs(units="degC")),
        lambda d: d.assign(
            temperature=d.temperature.isel(latitude=slice(12)).rename(latitude="south").drop_vars("south")
        ),
        lambda d: d.assign_coords(level=d.level + 1),
    ],
)
def test_only_what_is_asked_for_has_to_fit(tmp_path, change):
    paths = write(tmp_path)
    expected = truth(paths)["2m_temperature"].values
    other = change(xr.open_dataset(paths[2], decode_cf=False).load())
    os.remove(paths[2])
    other.to_netcdf(paths[2], format="NETCDF3_64BIT")
    for order in (paths, paths[::-1], [paths[2], *paths[:2], paths[3]]):
        ds = jigsaw.io.open(open_many(order, opener), mesh=world_mesh(lat=1), fields=["t2m"])
        got = np.stack([ds[i].input.local[0, 0].numpy() for i in range(10)])
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        with pytest.raises(GridError, match=r"7\.nc (has|lies on another).*(9\.nc|here)"):
            jigsaw.io.open(ds.store, mesh=world_mesh(lat=1), fields=["t2m", "t500"])
        with pytest.raises(GridError, match=r"7\.nc"):
            ds.store.read_small("temperature")


def test_files_without_times_are_joined_as_given(tmp_path):
    x = np.random.default_rng(0).normal(size=(12, 5, 6))
    for i in range(3):
        np.save(tmp_path / f"{2 - i}.npy", x[4 * i : 4 * i + 4])
    dims = ("time", "y", "x")
    store = open_many([tmp_path / f"{i}.npy" for i in (2, 1, 0)], lambda path: _raw.open_npy(path, dims=dims))
    np.testing.assert_array_equal(store.read_small("data"), x)
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), inputs=[0, 1], dtype="float64")
    np.testing.assert_array_equal(ds[3].input.local[:, 0], x[3:5])


def test_faults_name_the_file(tmp_path):
    paths = write(tmp_path)
    store = open_many(paths, opener)
    os.truncate(paths[3], 4000)
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["t2m"])
    with pytest.raises(CorruptChunkError, match=rf"{paths[3]}"):
        ds[9]
    assert ds[0].input.shape == (1, 1, 13, 16)
    with pytest.raises(TruncatedError, match=paths[3]):
        open_many(paths, opener)
    with pytest.raises(UnsupportedStoreError, match=r"none\.nc"):
        open_many([*paths[:2], tmp_path / "none.nc"], opener)


def test_more_files_than_stay_open(tmp_path):
    paths = []
    for i in range(150):
        paths.append(str(tmp_path / f"{i:03}.nc"))
        with netCDF4.Dataset(paths[-1], "w", format="NETCDF3_CLASSIC") as file:
            for dim, n in (("time", None), ("lat", 4), ("lon", 5)):
                file.createDimension(dim, n)
            file.createVariable("time", "i4", ("time",)).units = "days since 2000-01-01"
            file.createVariable("a", "f4", ("time", "lat", "lon"))[:] = np.full((2, 4, 5), i)
            file["time"][:] = [2 * i, 2 * i + 1]
    before = len(os.listdir("/proc/self/fd"))
    store = open_many(paths, opener)
    assert len(os.listdir("/proc/self/fd")) - before < 100
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["a"])
    assert [ds[i].input.local[0, 0, 0, 0].item() for i in range(0, 300, 7)] == [i // 2 for i in range(0, 300, 7)]
    with netCDF4.Dataset(paths[0], "r+") as file:
        file["a"][:] = 7
    os.utime(paths[0], ns=(0, 0))
    with pytest.raises(CorruptChunkError, match=r"000\.nc .*changed since it was opened"):
        ds[1]


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_files_of_other_levels_are_not_one_series(tmp_path, suffix):
    def stored(name, hpa, day):
        time = np.datetime64("2020-01-01", "ns") + np.arange(2) * np.timedelta64(6, "h") + np.timedelta64(day, "D")
        level = ((), hpa, {"units": "hPa"})
        places = {"time": time, "lat": np.linspace(90, -90, 5), "lon": np.arange(8) * 45.0, "level": level}
        data = xr.Dataset({"t": (("time", "lat", "lon"), np.zeros((2, 5, 8), "f4"))}, places)
        path = str(tmp_path / f"{name}.{suffix}")
        data.to_zarr(path, zarr_format=2) if suffix == "zarr" else data.to_netcdf(path)
        return path

    first, same, other = stored("a", 500.0, 0), stored("b", 500.0, 1), stored("c", 850.0, 2)
    assert not open_many([first, same]).arrays["t"].unfit
    assert f"{other} has other values of 'level' than {first}" in open_many([first, same, other]).arrays["t"].unfit


def test_relative_paths_stay_those_of_the_folder_they_were_opened_in(tmp_path, monkeypatch):
    monkeypatch.setattr("jigsaw.io.formats.many_files._STORES_KEPT_OPEN", 1)  # so that files are opened once more
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    data = globe()[["2m_temperature"]]
    data.isel(time=slice(4)).to_netcdf("a.nc")
    data.isel(time=slice(4, None)).to_netcdf("b.nc")
    one, both = open_store("a.nc").arrays["2m_temperature"], open_many("?.nc").arrays["2m_temperature"]
    monkeypatch.chdir(tmp_path / "elsewhere")
    for table, want in ((one, data.isel(time=slice(4))), (both, data)):
        values = read_table_box(table, tuple((0, n) for n in table.shape))
        np.testing.assert_array_equal(values, want["2m_temperature"])
