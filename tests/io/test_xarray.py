"""An xarray dataset is a store too: what the user selected or computed is what is read."""

import numpy as np
import pytest
import xarray as xr
from globe_store import globe, stacked, truth

import jigsaw
from jigsaw.testing import on_ranks, world_mesh


@on_ranks(2)
def test_what_the_user_selected_is_what_is_read(wb2):
    lazy = xr.open_zarr(wb2, consolidated=False, chunks=None)
    warmer = (lazy.isel(time=slice(3, 9)) + 1).rename({"temperature": "warm"})
    ds = jigsaw.io.open(warmer, mesh=world_mesh(lat=2), fields=["warm@850", "t2m"], inputs=[0], targets=[1], halo=1)
    whole = stacked(wb2, ["temperature@850", "2m_temperature"]) + 1
    assert len(ds) == 5
    assert ds.input_times(0)[0] == np.datetime64("2020-01-01T18")
    np.testing.assert_allclose(ds[0].input.full_tensor()[0], whole[3], rtol=1e-6)
    np.testing.assert_allclose(ds[4].target.full_tensor()[0], whole[8], rtol=1e-6)


def test_channels_follow_the_names_in_whatever_order_the_dataset_has_them(wb2):
    """The order that xarray finds in a Zarr store without consolidated metadata changes from run to run."""
    data = xr.open_zarr(wb2)
    turned = data[[*reversed(list(data.data_vars))]]
    channels = [jigsaw.io.open(each, mesh=world_mesh(lat=1)).channels for each in (wb2, data, turned)]
    assert list(turned.data_vars) != list(data.data_vars)
    assert channels[0] == channels[1] == channels[2]


def test_dask_chunks_are_read_a_chunk_at_a_time(wb2):
    lazy = xr.open_zarr(wb2, consolidated=False).chunk(time=4, latitude=5)
    ds = jigsaw.io.open(lazy, mesh=world_mesh(lat=1), fields=["t500"], inputs=[0, 5])
    assert ds.store.arrays["temperature"].chunks == (4, 3, 5, 16)
    assert ds.plan(0).total.chunks == 2 * 3
    np.testing.assert_array_equal(ds[1].input.local[:, 0], truth(wb2).temperature.sel(level=500).values[[1, 6]])


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_calendars_that_xarray_decoded(calendar):
    times = xr.date_range("2000-02-27", periods=10, freq="D", calendar=calendar, use_cftime=True)
    data = globe().assign_coords(time=times)
    ds = jigsaw.io.open(data, mesh=world_mesh(lat=1), fields=["t2m"], targets=[1], time=("2000-03-01", None))
    assert len(ds) == {"noleap": 7, "360_day": 5}[calendar]
    np.testing.assert_allclose(ds[0].input.local[0, 0], data["2m_temperature"].values[-len(ds) - 1], rtol=1e-6)


@pytest.mark.parametrize("how", [{}, {"mask_and_scale": False}, {"decode_cf": False}])
@pytest.mark.parametrize("chunks", [None, {}])
def test_packed_values_are_those_meant_whoever_decodes_them(tmp_path, how, chunks):
    values = np.random.default_rng(0).normal(size=(3, 4, 5)).round(1)
    values[1, 2, 3] = np.nan
    data = xr.Dataset({"v": (("time", "lat", "lon"), values), "w": (("time", "lat", "lon"), np.abs(values) * 9)})
    packed = {"v": {"dtype": "i2", "scale_factor": 0.1, "add_offset": 1.0, "_FillValue": -999}}
    packed["w"] = {"dtype": "i1", "scale_factor": 0.1, "_FillValue": -1, "_Unsigned": "true"}
    data.to_netcdf(tmp_path / "x.nc", encoding=packed, format="NETCDF3_CLASSIC")
    with xr.open_dataset(tmp_path / "x.nc", chunks=chunks, **how) as opened:
        ds = jigsaw.io.open(opened, mesh=world_mesh(lat=1), inputs=[0, 1, 2])
        got = ds[0].input.local.numpy()
    np.testing.assert_allclose(got[:, 0], values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[:, 1], np.abs(values) * 9, rtol=1e-5, atol=1e-6)
