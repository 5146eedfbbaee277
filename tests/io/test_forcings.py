"""Forcings: the sun where NREL's algorithm puts it, clocks where the calendar has them, the same bits on every mesh."""

import math

import cftime
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from globe_store import globe, write

import jigsaw
from jigsaw.comm import count
from jigsaw.errors import FieldError, GridError, ReadError, UnsupportedStoreError, WindowError
from jigsaw.io.series import forcings
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

LAT, LON = np.array([90.0, 66.6, 45, 12.25, 0, -30, -71.4, -90]), np.array([0.0, 7.5, 100, 181, 250, 359.75])
# the low-precision theory is good to 0.01 degrees, which moves a cosine by less than this
MEEUS = math.radians(0.01)


def nrel(times, lat, lon):
    """The cosine of the true zenith angle [T, lat, lon] by NREL's SPA (0.0003 degrees), through pvlib."""
    import pvlib  # here, for ranks need not load it

    index = pd.DatetimeIndex(times)
    zenith = [
        [pvlib.solarposition.get_solarposition(index, a, o, method="nrel_numpy", delta_t=67.0).zenith for o in lon]
        for a in lat
    ]
    return np.maximum(np.cos(np.deg2rad(np.array(zenith).transpose(2, 0, 1))), 0.0)


def minutes(end, hours):
    """The middles of the minutes of the hours before `end`."""
    return np.datetime64(end, "s") - np.arange(hours * 60) * np.timedelta64(60, "s") - np.timedelta64(30, "s")


# -- the sun ----------------------------------------------------------------------------------------------------------


def test_the_sun_is_where_nrel_puts_it():
    r = np.random.default_rng(3)
    days = r.integers(0, 140 * 365, 80)
    times = np.datetime64("1930-01-01", "s") + days * 86400 + r.integers(0, 86400, 80)
    ours = forcings.cos_zenith(times, LAT, LON)
    assert ours.shape == (80, 8, 6)
    assert 0.35 < (ours > 0).mean() < 0.65
    np.testing.assert_allclose(ours, nrel(times, LAT, LON), rtol=0, atol=MEEUS)


@pytest.mark.parametrize(("end", "hours"), [("2021-06-03T07:00", 1), ("2019-03-20T18:00", 6), ("2020-10-25T00:00", 24)])
def test_means_are_those_of_every_minute_of_the_interval(end, hours):
    want = nrel(minutes(end, hours), LAT, LON[::2]).mean(axis=0)
    # the declination is held for 6 h, in which it moves 0.1 degrees at most: over the lit half of them it is 0.025 off
    atol = MEEUS + (math.radians(0.025) if hours > 1 else 0.0)
    np.testing.assert_allclose(forcings.cos_zenith(end, LAT, LON[::2], f"{hours}h")[0], want, rtol=0, atol=atol)


def test_radiation_at_the_top_of_the_atmosphere():
    import pvlib

    times = np.array(["2020-01-04T12", "2020-07-04T12"], "datetime64[s]")
    normal = pvlib.irradiance.get_extra_radiation(pd.DatetimeIndex(times), solar_constant=1361.0, method="nrel").values
    want = nrel(times, LAT, LON) * normal[:, None, None]
    np.testing.assert_allclose(forcings.toa_radiation(times, LAT, LON), want, rtol=0, atol=1400 * MEEUS)
    assert normal[0] / normal[1] > 1.06  # perihelion and aphelion
    hourly = nrel(minutes("2020-01-04T12", 1), LAT, LON).mean(axis=0) * normal[0]
    np.testing.assert_allclose(forcings.toa_radiation(times[0], LAT, LON, "60min")[0], hourly, rtol=0, atol=0.4)


def test_known_places_of_the_sun():
    poles, everywhere = [90.0, -90.0], np.arange(0, 360, 1.0)
    equinox = forcings.cos_zenith("2020-03-20T03:50", poles, [0.0])[0, :, 0]
    assert np.abs(equinox).max() < MEEUS
    # Astronomical Almanac: obliquity 23.4366 degrees in 2020
    solstice = forcings.cos_zenith(["2020-06-20T21:44", "2020-12-21T10:02"], poles, [0.0])[:, :, 0]
    np.testing.assert_allclose(solstice, np.sin(np.deg2rad([[23.4366, 0], [0, 23.4366]])), rtol=0, atol=2e-5)
    # the equation of time is at most +16 min 25 s, on 3 November: noon at Greenwich comes that much before 12 UTC
    clock = np.datetime64("2020-11-03T11:30", "s") + np.arange(3600)
    noon = clock[forcings.cos_zenith(clock, [0.0], [0.0])[:, 0, 0].argmax()]
    assert abs((noon - np.datetime64("2020-11-03T11:43:35", "s")) / np.timedelta64(1, "s")) < 10
    # over the whole globe at once a quarter of the sphere's area faces the sun
    lat = np.arange(-89.5, 90, 1.0)
    area = np.cos(np.deg2rad(lat))[:, None] / np.cos(np.deg2rad(lat)).sum() / everywhere.size
    for interval in (None, "6h", "1d", "3d"):
        assert (forcings.cos_zenith("2021-02-11T05", lat, everywhere, interval)[0] * area).sum() == pytest.approx(
            0.25, abs=1e-4
        )


def test_a_day_without_night_and_one_without_sun():
    day = forcings.cos_zenith("2020-06-21T00", [80.0, -80.0], LON, "1d")[0]
    np.testing.assert_allclose(day[0], math.sin(math.radians(80)) * math.sin(math.radians(23.4366)), rtol=0, atol=2e-4)
    assert (day[1] == 0).all()


def test_short_means_tend_to_the_instant():
    times = pd.date_range("2021-01-01", periods=40, freq="211h").values
    instant, mean = (forcings.cos_zenith(times, LAT, LON, interval) for interval in (None, "0.001min"))
    # the middle of that interval is 0.03 s earlier, in which the earth turns by 2.2e-6
    np.testing.assert_allclose(mean, instant, rtol=0, atol=3e-6)


# -- clocks -----------------------------------------------------------------------------------------------------------


def test_progress_is_graphcasts():
    times = pd.date_range("1979-03-01T03:30", "2023-05-05", periods=25)
    seconds = times.values.astype("datetime64[us]").astype(np.int64) / 1e6
    year = seconds / 86400 / 365.24219 % 1.0
    day = (seconds[:, None] % 86400 / 86400 + LON / 360) % 1.0
    want = np.stack([np.sin(2 * np.pi * year), np.cos(2 * np.pi * year)], axis=1)
    np.testing.assert_allclose(forcings.year_progress(times), want, rtol=0, atol=1e-9)
    want = np.stack([np.sin(2 * np.pi * day), np.cos(2 * np.pi * day)], axis=1)
    np.testing.assert_allclose(forcings.day_progress(times, LON), want, rtol=0, atol=1e-9)


def test_it_is_local_midnight_at_the_right_place():
    sine, cosine = forcings.day_progress("2020-05-05T18:00", [0.0, 90, 180, -90])[0]
    np.testing.assert_allclose([sine, cosine], [[-1, 0, 1, 0], [0, 1, 0, -1]], rtol=0, atol=1e-12)


def test_latitudes_and_longitudes():
    got = forcings.latlon(LAT, LON)
    lat, lon = np.meshgrid(np.deg2rad(LAT), np.deg2rad(LON), indexing="ij")
    np.testing.assert_allclose(got, [np.sin(lat), np.cos(lat), np.sin(lon), np.cos(lon)], rtol=0, atol=1e-15)


@pytest.mark.parametrize("calendar", ["standard", "proleptic_gregorian"])
def test_a_real_calendar_by_cftime_is_that_of_numpy(calendar):
    stamps = ["1999-12-31T18", "2000-02-29T07", "2031-08-01T23"]
    dates = [cftime.datetime(1999, 12, 31, 18), cftime.datetime(2000, 2, 29, 7), cftime.datetime(2031, 8, 1, 23)]
    dates = [cftime.datetime(*d.timetuple()[:4], calendar=calendar) for d in dates]
    np.testing.assert_array_equal(forcings.cos_zenith(dates, LAT, LON), forcings.cos_zenith(stamps, LAT, LON))
    np.testing.assert_array_equal(forcings.year_progress(dates), forcings.year_progress(stamps))


def test_the_julian_calendar_is_thirteen_days_behind():
    date = cftime.datetime(2020, 1, 1, 6, calendar="julian")
    np.testing.assert_array_equal(
        forcings.cos_zenith([date], LAT, LON), forcings.cos_zenith(["2020-01-14T06"], LAT, LON)
    )


@pytest.mark.parametrize(("calendar", "length"), [("360_day", 360), ("noleap", 365), ("all_leap", 366)])
def test_on_an_idealised_calendar_the_sun_keeps_the_calendars_year(calendar, length):
    first = cftime.datetime(1, 1, 1, 15, calendar=calendar)
    year = [first + pd.Timedelta(days=i).to_pytimedelta() for i in range(length)]
    again = cftime.datetime(250, 1, 1, 15, calendar=calendar)
    np.testing.assert_array_equal(forcings.cos_zenith([first], LAT, LON), forcings.cos_zenith([again], LAT, LON))
    angle = np.unwrap(np.arctan2(*forcings.year_progress(year).T)) / (2 * np.pi)
    np.testing.assert_allclose(angle, (np.arange(length) + 15 / 24) / length, rtol=0, atol=1e-12)
    pole = forcings.cos_zenith(year, [90.0], [0.0])[:, 0, 0]
    # 20 June is 171/365 of the way round the year
    assert pole.argmax() / length == pytest.approx(171 / 365, abs=2 / 365)
    assert pole.max() == pytest.approx(math.sin(math.radians(23.44)), abs=1e-4)


# -- in a dataset -----------------------------------------------------------------------------------------------------

ASKED = ["cos_zenith", "cos_zenith@6h", "toa_radiation@1h", "day_progress", "year_progress", "latlon"]
NAMES = (
    *ASKED[:3],
    *("day_progress_sin", "day_progress_cos", "year_progress_sin", "year_progress_cos"),
    *("sin_lat", "cos_lat", "sin_lon", "cos_lon"),
)
WINDOW = {"inputs": [-1, 0], "targets": [1, 2]}
HALO = {"halo": {"lat": 2, "lon": (3, 1)}, "boundary": {"lon": "periodic"}}


def everywhere(times, lat, lon):
    """All channels of `ASKED` [T, C, lat, lon], by the standalone functions on the whole grid."""
    shape = (len(times), 1, len(lat), len(lon))
    fields = [
        forcings.cos_zenith(times, lat, lon)[:, None],
        forcings.cos_zenith(times, lat, lon, "6h")[:, None],
        forcings.toa_radiation(times, lat, lon, "1h")[:, None],
        forcings.day_progress(times, lon)[:, :, None, :],
        forcings.year_progress(times)[:, :, None, None],
        forcings.latlon(lat, lon)[None],
    ]
    return np.concatenate([np.broadcast_to(f, (shape[0], f.shape[1], *shape[2:])) for f in fields], axis=1)


def held(whole, layout, coord):
    """What a coordinate holds of a whole array [..., lat, lon], by numpy's own indexing."""
    (a, b), (c, d) = layout.held(coord)[-2:]
    return whole[..., a:b, :].take(range(c, d), axis=-1, mode="wrap")


def check_on(mesh, path, dtype, **more):
    ds = jigsaw.io.open(path, mesh=mesh, fields=["t2m", "z500"], forcings=ASKED, dtype=dtype, **WINDOW, **HALO, **more)
    bare = jigsaw.io.open(path, mesh=mesh, fields=["t2m", "z500"], dtype=dtype, **WINDOW, **HALO, **more)
    lat, lon, coord = ds.whole_coords["lat"], ds.whole_coords["lon"], tuple(mesh.get_coordinate())
    assert (ds.fields, ds.forcing_names) == (("t2m", "z500"), NAMES)
    sample, plain = ds[3], bare[3]
    assert sample.input.shape == (2, 2 + len(NAMES), 13, 10)
    assert torch.equal(sample.input.local[:, :2], plain.input.local)
    assert torch.equal(sample.target.local, plain.target.local)
    assert plain.target_forcings is None
    for times, tile in ((sample.input_times, sample.input), (sample.target_times, sample.target_forcings)):
        got = tile.local[:, -len(NAMES) :].numpy()
        want = held(everywhere(times, lat, lon).astype(dtype), tile.layout, coord)
        np.testing.assert_array_equal(got, want)  # to the bit
    assert sample.target_forcings.layout.has_halo
    # reading is as without them: what is asked of the store, and what ranks send
    assert repr(ds.plan(3).total) == repr(bare.plan(3).total)
    assert ds._engine.stats == bare._engine.stats


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    return write(tmp_path_factory.mktemp("uneven") / "globe.zarr", globe(lon=10), "v3", (2, 1, 5, 4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@on_ranks(4)
def test_every_mesh_has_the_same_bits(uneven, dtype):
    for axes in ({"lat": 4}, {"lon": 4}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}):
        check_on(world_mesh(**axes), uneven, dtype)


def test_one_rank_has_them_too(uneven):
    check_on(world_mesh(lat=1, lon=1), uneven, "float32")


@on_ranks(2)
def test_rows_turned_round_have_the_sun_of_their_own_latitude(uneven):
    check_on(world_mesh(lat=2), uneven, "float64", lat_order="south-first", lon="-180..180")


@on_ranks(4)
def test_batches_carry_them_and_nothing_is_sent(uneven):
    mesh = world_mesh(data=2, lat=2)
    ds = jigsaw.io.open(uneven, mesh=mesh, fields=["t2m"], forcings=ASKED, dtype="float64", **WINDOW, **HALO)
    lat, lon = ds.whole_coords["lat"], ds.whole_coords["lon"]
    loader = jigsaw.io.DataLoader(ds, batch_size=3, shuffle=True, seed=1)
    for batch in loader:
        with count() as counted:
            want = np.stack([everywhere(t, lat, lon) for t in batch.input_times])
            assert batch.input.shape == (len(batch.samples), 2, 1 + len(NAMES), 13, 10)
            forced = batch.target_forcings
            assert forced.shape == (len(batch.samples), 2, len(NAMES), 13, 10)
        assert counted.sent_bytes == 0
        np.testing.assert_array_equal(batch.input.full_tensor()[:, :, 1:], want)
        want = np.stack([everywhere(t, lat, lon) for t in batch.target_times])
        np.testing.assert_array_equal(forced.full_tensor(), want)
    loader.close()


def test_static_fields_of_the_store_are_channels_at_every_step(uneven):
    data = xr.open_zarr(uneven, consolidated=False)
    ds = jigsaw.io.open(
        uneven,
        mesh=world_mesh(lat=1),
        fields=["t2m", "land_sea_mask"],
        normalize={"t2m": (280.0, 10.0), "land_sea_mask": (0.5, 0.25)},
        forcings=["latlon"],
        **WINDOW,
    )
    mask = ds[2].input.local[:, 1].numpy()
    np.testing.assert_allclose(mask, (np.stack([data.land_sea_mask.values] * 2) - 0.5) * 4, rtol=0, atol=1e-6)


def test_forcings_are_normalized_when_they_are_named(uneven):
    stats = {"toa_radiation": (300.0, 400.0), "sin_lat": (0.1, 2.0), "t2m": (280.0, 10.0)}
    asked = ["toa_radiation", "latlon"]
    kwargs = {"mesh": world_mesh(lat=1), "fields": ["t2m"], "forcings": asked, "dtype": "float64"}
    scaled, plain = jigsaw.io.open(uneven, normalize=stats, **kwargs)[1], jigsaw.io.open(uneven, **kwargs)[1]
    want = plain.input.local.clone()
    for channel, (mean, std) in ((0, (280, 10)), (1, (300, 400)), (2, (0.1, 2))):
        want[:, channel] = (want[:, channel] - mean) / std
    torch.testing.assert_close(scaled.input.local, want)
    only = jigsaw.io.open(uneven, normalize={"latlon": (0.0, 2.0)}, **kwargs)[1].input.local
    torch.testing.assert_close(only[:, 2:] * 2, plain.input.local[:, 2:])
    assert torch.equal(only[:, :2], plain.input.local[:, :2])


def test_a_store_on_a_calendar_of_360_days(tmp_path):
    times = xr.date_range("2000-01-30", periods=4, freq="6h", calendar="360_day", use_cftime=True)
    data = globe(steps=4, lon=10)[["2m_temperature"]].assign_coords(time=times)
    ds = jigsaw.io.open(
        write(tmp_path / "ideal.zarr", data), mesh=world_mesh(lat=1), forcings=["cos_zenith", "year_progress"]
    )
    got = ds[2].input.local[0, 1:].numpy()
    lat, lon = ds.whole_coords["lat"], ds.whole_coords["lon"]
    np.testing.assert_array_equal(got[0], forcings.cos_zenith([times[2]], lat, lon)[0].astype("f4"))
    np.testing.assert_allclose(got[1:, 0, 0], np.sin([np.pi / 180 * 29.5, np.pi / 180 * 119.5]), rtol=0, atol=1e-6)


def test_a_forecast_has_the_sun_of_the_time_that_it_is_valid_at(tmp_path):
    data = globe(steps=3, lon=10)[["2m_temperature"]].rename(time="init").expand_dims(lead=[0, 6, 12], axis=1)
    data["lead"] = ("lead", np.arange(3) * np.timedelta64(6, "h").astype("m8[ns]"))
    data.to_zarr(tmp_path / "forecast.zarr", consolidated=False)
    kwargs = {"mesh": world_mesh(lat=1), "forcings": ["cos_zenith"], "dtype": "float64"}
    ds = jigsaw.io.open(str(tmp_path / "forecast.zarr"), along="lead", select={"init": 1}, **kwargs)
    lat, lon = ds.whole_coords["lat"], ds.whole_coords["lon"]
    for i, valid in enumerate(["2020-01-01T06", "2020-01-01T12", "2020-01-01T18"]):
        np.testing.assert_array_equal(ds[i].input.local[0, 1], forcings.cos_zenith(valid, lat, lon)[0])


# -- places that are not rows and columns -----------------------------------------------------------------------------


def scattered(shape):
    """Latitudes and longitudes without order."""
    draw = np.random.default_rng(3)
    return draw.uniform(-90, 90, shape), draw.uniform(-180, 360, shape)


def at_each_place(times, lat, lon):
    """All channels of `ASKED` [T, C, places], each place a grid of its own."""
    of_places = [everywhere(times, [a], [b])[..., 0, 0] for a, b in zip(lat.ravel(), lon.ravel(), strict=True)]
    return np.stack(of_places, -1).reshape(len(times), len(NAMES), *lat.shape)


def store_of_places(path, dims, shape, angle_dims):
    """A store whose places have a latitude and a longitude each, along `angle_dims`."""
    sizes = dict(zip(dims, shape, strict=True))
    lat, lon = scattered(shape)
    data = xr.DataArray(np.zeros((3, *shape), "f4"), dims=("time", *dims), coords={"time": TIME})
    for name, values in (("latitude", lat), ("longitude", lon)):
        turned = values.transpose([dims.index(dim) for dim in angle_dims])
        data.coords[f"their_{name}"] = angle_dims, turned, {"standard_name": name}
    assert data.sizes == {"time": 3, **sizes}
    data.to_dataset(name="t").to_zarr(path, consolidated=False)
    return str(path), lat, lon


@pytest.mark.parametrize(
    ("dims", "shape", "angle_dims"),
    [
        (("station",), (11,), ("station",)),
        (("y", "x"), (5, 4), ("y", "x")),
        (("rlat", "rlon"), (5, 4), ("rlon", "rlat")),
    ],
)
def test_places_of_their_own_have_the_sun_of_each(tmp_path, dims, shape, angle_dims):
    path, lat, lon = store_of_places(tmp_path / "s.zarr", dims, shape, angle_dims)
    ds = jigsaw.io.open(path, mesh={"cell": 1, "y": 1}, forcings=ASKED, dtype="float64")
    if dims != angle_dims:  # y and x are the dims of the latitudes, in their order
        lat, lon = lat.T, lon.T
    sample = forced_parts(path, {"cell": 1, "y": 1}, "balanced")
    np.testing.assert_array_equal(sample, at_each_place(ds.input_times(1), lat, lon))  # to the bit


def forced_parts(path, axes, split):
    ds = jigsaw.io.open(path, mesh=world_mesh(**axes), forcings=ASKED, dtype="float64", split=split)
    with count() as counted:
        whole = ds[1].input
    assert counted.sent_bytes == 0
    return whole.full_tensor()[0, 1:].numpy()[None]


@pytest.mark.parametrize(
    ("dims", "shape", "axes", "split"),
    [
        (("station",), (11,), {"cell": 2}, [0, 7, 11]),
        (("station",), (11,), {"cell": 3}, [0, 0, 4, 11]),
        (("station",), (11,), {"cell": 4}, [0, 5, 5, 10, 11]),
        (("y", "x"), (5, 4), {"y": 3}, {"y": [0, 1, 3, 5]}),
        (("y", "x"), (5, 4), {"y": 2, "x": 2}, "balanced"),
    ],
)
def test_places_of_their_own_on_every_mesh(tmp_path, dims, shape, axes, split):
    path, lat, lon = store_of_places(tmp_path / "s.zarr", dims, shape, dims)
    times = jigsaw.io.open(path, mesh={"cell": 1}).input_times(1)
    for got in run_on_ranks(math.prod(axes.values()), forced_parts, path, axes, split):
        np.testing.assert_array_equal(got, at_each_place(times, lat, lon))


def test_forcings_of_healpix_cells(tmp_path):
    cells = xr.DataArray(np.zeros((3, 48), "f4"), dims=("time", "cell"), coords={"time": TIME}, name="t")
    crs = {"grid_mapping_name": "healpix", "refinement_level": 1, "indexing_scheme": "nested"}
    data = cells.assign_attrs(grid_mapping="crs").to_dataset().assign_coords(crs=((), 0, crs))
    data.to_zarr(tmp_path / "s.zarr", consolidated=False)
    ds = jigsaw.io.open(str(tmp_path / "s.zarr"), mesh=world_mesh(cell=1), forcings=ASKED, dtype="float64")
    want = at_each_place(ds.input_times(2), ds.grid.lat, ds.grid.lon)
    np.testing.assert_array_equal(ds[2].input.local[:, 1:], want)
    standalone = forcings.cos_zenith(ds.input_times(2), ds.grid.lat[:, None], ds.grid.lon[:, None])
    np.testing.assert_array_equal(standalone[..., 0], want[:, 0])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("latlon", r"forcings='latlon' is one string; give a list: forcings=\['latlon'\]"),
        (["sunshine"], "forcings has 'sunshine', which is none of cos_zenith, toa_radiation, day_progress"),
        (["latlon@6h"], "forcings has 'latlon@6h', but only cos_zenith and toa_radiation have means over an interval"),
        (["cos_zenith@6"], "forcings has 'cos_zenith@6', whose interval '6' is not a positive number of minutes"),
        (["cos_zenith@1 month"], "whose interval '1 month' is not a positive number of minutes, hours or days"),
        (["cos_zenith@0h"], "whose interval '0h' is not a positive number"),
        (["latlon", "latlon"], r"forcings=\['latlon', 'latlon'\] makes channel 'sin_lat' a second time; name it once"),
    ],
)
def test_forcings_that_do_not_exist(uneven, asked, said):
    with pytest.raises(FieldError, match=said):
        jigsaw.io.open(uneven, mesh={"lat": 2}, fields=["t2m"], forcings=asked)


def test_a_forcing_with_a_fields_name(tmp_path):
    data = globe(steps=2)[["2m_temperature"]].rename({"2m_temperature": "sin_lat"})
    data.to_zarr(tmp_path / "s.zarr", consolidated=False)
    with pytest.raises(FieldError, match="makes channel 'sin_lat' a second time"):
        jigsaw.io.open(str(tmp_path / "s.zarr"), mesh={"lat": 1}, forcings=["latlon"])


def grid_store(path, dims, sizes, coords, steps=3):
    data = xr.DataArray(np.zeros((steps, *sizes), "f4"), dims=("time", *dims), coords=coords)
    data.to_dataset(name="t").to_zarr(path, consolidated=False)
    return str(path)


TIME = ("time", pd.date_range("2020-01-01", periods=3, freq="6h"))
LATS, LONS = ("lat", np.linspace(-60, 60, 4)), ("lon", np.arange(5) * 72.0)


@pytest.mark.parametrize(
    ("dims", "coords", "error", "said"),
    [
        (
            ("y", "x"),
            {"time": TIME},
            GridError,
            r"but the fields' spatial dims are \['y', 'x'\]",
        ),
        (
            ("lat", "lon"),
            {"time": TIME, "lon": LONS},
            GridError,
            "need the degrees of 'lat', but it only counts from 0 to 3; give the store a coordinate with units",
        ),
        (
            ("lat", "lon"),
            {"time": TIME, "lat": ("lat", np.linspace(0, 300, 4)), "lon": LONS},
            GridError,
            r"lat values 0..300 are not degrees of lat \(at most 90\)",
        ),
        (
            ("lat", "lon"),
            {"time": TIME, "lat": ("lat", np.linspace(-1, 1, 4), {"units": "radians"}), "lon": LONS},
            GridError,
            "need geographic degrees, but 'lat' has standard_name '' and units 'radians'",
        ),
        (
            ("lat", "lon"),
            {"lat": LATS, "lon": LONS},
            UnsupportedStoreError,
            "have no date, so the sun's place is unknown; give the time coordinate CF units",
        ),
    ],
)
def test_grids_and_times_that_have_no_sun(tmp_path, dims, coords, error, said):
    path = grid_store(tmp_path / "s.zarr", dims, (4, 5), coords)
    assert jigsaw.io.open(path, mesh={"lat": 1}).fields == ("t",)
    with pytest.raises(error, match=said):
        jigsaw.io.open(path, mesh={"lat": 1}, forcings=["cos_zenith"])


def test_places_need_no_dates(tmp_path):
    path = grid_store(tmp_path / "s.zarr", ("lat", "lon"), (4, 5), {"lat": LATS, "lon": LONS})
    ds = jigsaw.io.open(path, mesh=world_mesh(lat=1), forcings=["latlon"], dtype="float64")
    np.testing.assert_array_equal(ds[1].input.local[0, 1:], forcings.latlon(LATS[1], LONS[1]))


def test_bad_arguments_of_the_functions():
    with pytest.raises(GridError, match=r"lat must be a 1-d array of degrees, not float64\[2, 2\]"):
        forcings.cos_zenith("2020-01-01", np.zeros((2, 2)), [0.0])
    with pytest.raises(GridError, match=r"lat has the shape \[2, 2\] and lon \[2, 3\]; give both of each place"):
        forcings.cos_zenith("2020-01-01", np.zeros((2, 2)), np.zeros((2, 3)))
    with pytest.raises(UnsupportedStoreError, match=r"a time is missing \(NaT\)"):
        forcings.cos_zenith(["2020-01-01", "NaT"], [0.0], [0.0])
    with pytest.raises(UnsupportedStoreError, match="times from 'noon' on are not dates"):
        forcings.year_progress(["noon"])
    with pytest.raises(ReadError, match="times of type int64 have no date"):
        forcings.year_progress([2020])
    with pytest.raises(GridError, match=r"lon values nan\.\.nan are not degrees of lon"):
        forcings.latlon([0.0], [np.nan])


def test_statistics_of_a_file_are_those_of_the_fields(wb2):
    options = {"mesh": world_mesh(lat=1), "fields": ["t2m"], "forcings": ["latlon"]}
    plain = jigsaw.io.open(wb2, **options)[0].input.full_tensor()
    found = jigsaw.io.statistics(jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["t2m", "z500"]))
    scaled = jigsaw.io.open(wb2, normalize=found, **options)[0].input.full_tensor()
    mean, std = found["t2m"]["mean"], found["t2m"]["std"]
    np.testing.assert_allclose(scaled[:, 0], (plain[:, 0] - mean) / std, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(scaled[:, 1:], plain[:, 1:])


def test_forcings_are_those_of_several_times(tmp_path):
    path = grid_store(tmp_path / "s.zarr", ("lat", "lon"), (4, 5), {"lat": LATS, "lon": LONS, "time": TIME})
    ds = jigsaw.io.open(path, mesh=world_mesh(lat=1), forcings=["cos_zenith"])
    assert ds.forcings_at(["2020-01-01T06"]).shape == (1, 1, 4, 5)
    for wrong in ("2020-01-01T12", np.datetime64("2020-01-01"), [["2020-01-01"]]):
        with pytest.raises(WindowError, match=r"times=.* has . dims; give a list of times"):
            ds.forcings_at(wrong)
