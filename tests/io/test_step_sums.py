"""`sums`: the value of a field at a step is the sum over the stored steps up to it; xarray is the oracle."""

import numpy as np
import pytest
import xarray as xr
from globe_store import globe, stacked, write

import jigsaw
from jigsaw.errors import FieldError, GridError, WindowError
from jigsaw.testing import run_on_ranks, world_mesh

HOURS = 30


def hourly(gap=None):
    """Hourly rain with a missing value in the eighth hour, and temperatures."""
    data = globe(HOURS, 13, 16)[["2m_temperature", "land_sea_mask"]]
    times = np.datetime64("2020-01-01", "ns") + np.arange(HOURS) * np.timedelta64(1, "h")
    if gap is not None:
        times[gap:] += np.timedelta64(2, "h")
    data["time"] = times
    rain = np.random.default_rng(3).gamma(1.0, 2.0, (HOURS, 13, 16)).astype("f4")
    rain[7, 4, 5] = np.nan
    data["total_precipitation"] = ("time", "latitude", "longitude"), rain, {"cell_methods": "time: sum"}
    return data


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hourly") / "hourly.zarr", hourly())


def opened(store, mesh, **kwargs):
    options = {"every": "6h", "sums": {"tp": "6h"}, "fields": ["tp", "t2m", "land_sea_mask"], **kwargs}
    return jigsaw.io.open(store, mesh=mesh, **options)


def read(store, axes, **kwargs):
    data = opened(store, world_mesh(**axes), inputs=[0], targets=[1], halo=1, boundary={"lon": "periodic"}, **kwargs)
    loader = jigsaw.io.DataLoader(data, batch_size=2, cache_bytes=1 << 20)
    tiles = [(b.input.full_tensor().numpy(), b.target.full_tensor().numpy(), b.input_times) for b in loader]
    input, target, times = (np.concatenate(parts) for parts in zip(*tiles, strict=True))
    return input[:, 0], target[:, 0], times[:, 0], loader.read_counts.chunks


def expected():
    """Six-hourly sums that end at their label, where all six hours are, and the temperature of that hour."""
    data = hourly()
    sums = data["total_precipitation"].rolling(time=6).construct("hour").sum("hour", skipna=False)
    return sums[6::6].values, data["2m_temperature"][6::6].values, data.time.values[6::6]


@pytest.mark.parametrize("axes", [{"lat": 1}, {"lat": 2}, {"lon": 3}, {"lat": 2, "lon": 2}, {"data": 2}], ids=str)
def test_rain_of_six_hours_on_every_mesh(store, axes):
    sums, _, times = expected()
    t2m = stacked(store, ["2m_temperature"])[6::6, 0]
    for input, target, at, _ in run_on_ranks(int(np.prod(list(axes.values()))), read, store, axes):
        assert (at == times[:-1]).all()
        np.testing.assert_allclose(input[:, 0], sums[:-1], rtol=1e-6)
        np.testing.assert_allclose(target[:, 0], sums[1:], rtol=1e-6)
        np.testing.assert_allclose(input[:, 1], t2m[:-1], rtol=1e-6)
        assert np.isnan(input[0, 0, 4, 5]) == np.isnan(sums[0, 4, 5]) and np.isnan(sums).sum() == 1


def test_each_chunk_is_decoded_once(store):
    """Four labels: 24 hours of rain, four of temperature, the mask once."""
    counted = run_on_ranks(2, read, store, {"lat": 2}, mode="cooperative")
    assert sum(chunks for *_, chunks in counted) == 24 + 4 + 1


def test_sums_are_normalized_and_filled_as_sums(store):
    sums, _, _ = expected()
    scale = {"tp": (12.0, 5.0), "t2m": (280.0, 10.0), "land_sea_mask": (0.0, 1.0)}
    data = opened(store, world_mesh(lat=1), normalize=scale, nan={"tp": -7.0})
    got = np.stack([data[i].input.local[0, 0].numpy() for i in range(len(data))])
    want = (sums - 12) / 5
    np.testing.assert_allclose(got, np.where(np.isnan(want), -7, want), rtol=1e-5, atol=1e-5)
    with pytest.raises(jigsaw.io.NaNError, match="total_precipitation"):
        opened(store, world_mesh(lat=1), nan={"tp": "raise"})[1]


def test_sums_of_every_hour_and_beyond_an_edge(store):
    """Windows that share hours; a halo of a number has that number and no sum of it."""
    rain = hourly()["total_precipitation"].rolling(time=3).construct("hour").sum("hour", skipna=False).values
    edges = {"halo": 1, "boundary": {"lat": ("fill", 5.0), "lon": "periodic"}}
    data = opened(store, world_mesh(lat=1), every=1, sums={"total_precipitation": 3}, fields=["tp"], **edges)
    assert len(data) == HOURS - 2
    held = data[4].input.local[0, 0].numpy()
    np.testing.assert_allclose(held[1:-1, 1:-1], rain[6], rtol=1e-6)
    assert (held[0] == 5).all() and (held[-1] == 5).all()


def test_a_gap_and_a_split(store):
    data = opened(hourly(gap=9), world_mesh(lat=1), every=1, fields=["tp"])
    assert len(data) == HOURS - 2 * 5
    long = opened(store, world_mesh(lat=1), sums={"tp": "12h"})
    parts = jigsaw.io.split(long, early=(None, "2020-01-01T12"), late=("2020-01-01T13", None))
    # the sum at 18 reaches back to 7, which is before the late part
    assert [part[0].input_times[0].astype("datetime64[h]") for part in parts.values()] == [
        np.datetime64("2020-01-01T12"),
        np.datetime64("2020-01-02T00"),
    ]
    short = jigsaw.io.split(opened(store, world_mesh(lat=1)), late=("2020-01-01T13", None))["late"]
    assert short[0].input_times[0] == np.datetime64("2020-01-01T18")


def test_sums_that_cannot_be(store):
    mesh = world_mesh(lat=1)
    with pytest.raises(FieldError, match=r"sums has 'rain', which is not a field; the channels are \['tp'"):
        opened(store, mesh, sums={"rain": "6h"})
    with pytest.raises(FieldError, match=r"sums has \['land_sea_mask'\], which have no time"):
        opened(store, mesh, sums={"land_sea_mask": 6, "tp": 6})
    with pytest.raises(WindowError, match=r"every='6h' skips steps of array 'total_precipitation'.*sums="):
        opened(store, mesh, sums={"tp": "3h"})
    with pytest.raises(WindowError, match=r"sums={'t2m': 0} must be at least one step of the series, 1 hour"):
        opened(store, mesh, sums={"t2m": 0, "tp": 6})
    with pytest.raises(WindowError, match=r"sums={'tp': 60} needs 60 steps of 1 hour\(s\) without a gap"):
        opened(store, mesh, sums={"tp": 60})
    with pytest.raises(WindowError, match="must say it by name"):
        opened(store, mesh, sums="6h")
    with pytest.raises(WindowError, match="selects steps, but the fields have no time"):
        opened(store, mesh, fields=["land_sea_mask"], sums={"land_sea_mask": 2}, every=1)
    with pytest.raises((GridError, WindowError)):
        jigsaw.io.open(hourly().drop_vars("time"), mesh=mesh, fields=["tp"], sums={"tp": "6h"})


def test_a_sum_of_one_level_frees_no_other(store):
    """Of an array of sums with levels, each level that is taken needs a sum."""
    data, mesh = hourly()[["total_precipitation"]], world_mesh(lat=1)
    upper = data["total_precipitation"].expand_dims(level=[500, 850], axis=1)
    data["rain"] = upper.copy().assign_attrs(cell_methods="time: sum")
    fields = {"mesh": mesh, "fields": ["rain@500", "rain@850"], "every": "6h"}
    with pytest.raises(WindowError, match="skips steps of array 'rain'"):
        jigsaw.io.open(data, sums={"rain@500": "6h"}, **fields)
    assert len(jigsaw.io.open(data, sums={"rain@500": "6h", "rain@850": "6h"}, **fields)) == 4


def test_the_bytes_of_a_sample_count_the_hours_of_a_sum(store):
    one = opened(store, world_mesh(lat=1), every=1, sums=None)
    assert opened(store, world_mesh(lat=1)).sample_bytes() == one.sample_bytes() + 5 * 13 * 16 * 4


def test_what_xarray_resamples_to(store):
    """The same as `resample` with labels at the right, for hours that are all there."""
    data = hourly().drop_vars("land_sea_mask")
    resampled = data["total_precipitation"].resample(time="6h", closed="right", label="right").sum(skipna=False)
    got = opened(store, world_mesh(lat=1), fields=["tp"])
    for i in range(len(got)):
        sample = got[i]
        want = resampled.sel(time=sample.input_times[0]).values
        np.testing.assert_allclose(sample.input.local[0, 0], want, rtol=1e-6)
    assert isinstance(xr.open_zarr(store, consolidated=False), xr.Dataset)
