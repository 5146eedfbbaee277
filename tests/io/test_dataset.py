"""`open`: samples equal what xarray reads, on every mesh, for every layout on disk; a tile is the rank's own part."""

import numpy as np
import pytest
import torch
import xarray as xr
from globe_store import LEVELS, globe, stacked, truth, write

import jigsaw
from jigsaw.errors import FieldError, NaNError, ReadError
from jigsaw.testing import on_ranks, world_mesh

FIELDS = ["z500", "t2m", "temperature@850", "land_sea_mask", "temperature@700"]
LONG = ["geopotential@500", "2m_temperature", "temperature@850", "land_sea_mask", "temperature@700"]


def one_rank(path, **kwargs):
    return jigsaw.io.open(path, mesh=world_mesh(lat=1, lon=1), **kwargs)


def wrapped(whole, layout, coord):
    """What a coordinate holds of a whole array [..., lat, lon], by numpy's own indexing."""
    (a, b), (c, d) = layout.held(coord)[-2:]
    return whole[..., a:b, :].take(range(c, d), axis=-1, mode="wrap")


def test_a_sample_is_what_xarray_reads(tiled):
    ds = one_rank(tiled, fields=FIELDS, target_fields=FIELDS, inputs=[-1, 0], targets=[2])
    whole = stacked(tiled, LONG)
    assert len(ds) == 7
    assert ds.fields == tuple(FIELDS)
    for i in range(len(ds)):
        sample = ds[i]
        np.testing.assert_allclose(sample.input.local, whole[i : i + 2], rtol=1e-6)
        np.testing.assert_allclose(sample.target.local, whole[i + 3 : i + 4], rtol=1e-6)


def test_a_relative_path_is_that_of_the_folder_where_it_was_opened(tiled, tmp_path, monkeypatch):
    """A chunk that is looked for in another folder would be missing, and read as fill."""
    folder, _, name = tiled.rpartition("/")
    monkeypatch.chdir(folder)
    ds = one_rank(name, fields=FIELDS)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_allclose(ds[3].input.local, stacked(tiled, LONG)[3:4], rtol=1e-6)


def test_a_sample_and_a_batch_move_as_their_tiles_do(wb2):
    ds = one_rank(wb2, fields=FIELDS, target_fields=FIELDS, targets=[1])
    for held in (ds[0], next(iter(jigsaw.io.DataLoader(ds)))):
        moved = held.to("cpu", torch.float64, non_blocking=True)
        assert type(moved) is type(held) and moved.target.dtype == torch.float64
        assert moved.target_forcings is None and moved.input_times is held.input_times
        assert moved.input.layout is held.input.layout
        assert torch.equal(moved.input.local, held.input.local.double())


def check_tiles(path, mesh, mode):
    ds = jigsaw.io.open(
        path,
        mesh=mesh,
        fields=FIELDS,
        halo={"lat": 2, "lon": (3, 1)},
        boundary={"lon": "periodic"},
        inputs=[0, -1],
        targets=[1],
        target_fields=FIELDS,
        mode=mode,
    )
    whole, coord = stacked(path, LONG), mesh.get_coordinate()
    sample = ds[4]
    want = whole[[5, 4]]
    assert sample.input.layout == ds.layout
    assert sample.input.layout.has_halo and not sample.target.layout.has_halo
    np.testing.assert_allclose(sample.input.local, wrapped(want, ds.layout, coord), rtol=1e-6)
    np.testing.assert_allclose(sample.target.local, wrapped(whole[[6]], ds.target_layout, coord), rtol=1e-6)
    np.testing.assert_allclose(sample.input.full_tensor(), want, rtol=1e-6)
    return tuple(sample.input.local.shape)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cooperative", "independent"])
@on_ranks(4)
def test_tiles_with_halo_on_four_ranks(wb2, mode):
    shapes = [
        check_tiles(wb2, world_mesh(**axes), mode)
        for axes in ({"lat": 2, "lon": 2}, {"lat": 4}, {"data": 2, "lon": 2}, {"lon": 4})
    ]
    assert shapes[0][-1] == 8 + 4


@on_ranks(3)
def test_tiles_with_halo_on_three_ranks(tiled):
    check_tiles(tiled, world_mesh(lat=3), "auto")
    check_tiles(tiled, world_mesh(lon=3, channel=1), "auto")


@on_ranks(4)
def test_both_axes_may_cut_one_dim_and_cuts_may_be_aligned(wb2):
    mesh = world_mesh(lat=2, lon=2)
    ds = jigsaw.io.open(wb2, mesh=mesh, fields=["t2m"], spec={"lon": ("lat", "lon")}, align={"lon": 4})
    assert [ds.layout.owned(c)[3] for c in ds.layout.coords()] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    np.testing.assert_allclose(ds[1].input.full_tensor(), stacked(wb2, ["2m_temperature"])[1:2], rtol=1e-6)
    assert ds.coords["lat"].shape == (13,)
    lon = truth(wb2).longitude.values
    first, stop = ds.layout.owned(tuple(mesh.get_coordinate()))[3]
    np.testing.assert_array_equal(ds.coords["lon"], lon[first:stop])


def test_a_variable_alone_is_all_its_levels(wb2):
    ds = one_rank(wb2, fields=["temperature"])
    assert ds.fields == tuple(f"temperature@{level}" for level in LEVELS)
    np.testing.assert_array_equal(ds[3].input.local[0], truth(wb2).temperature.values[3])


def test_every_level_of_a_chunk_is_one_selection(wb2):
    plan = one_rank(wb2, fields=["z500", "z700", "z850"]).plan(0)
    assert len(plan.request.parts) == 1
    assert plan.total.chunks == 1


def test_without_fields_all_variables_are_read(wb2):
    assert {c.array for c in one_rank(wb2).channels} == {
        "geopotential",
        "temperature",
        "2m_temperature",
        "land_sea_mask",
    }


def test_windows_never_cross_a_gap(gappy):
    ds = one_rank(gappy, fields=["t2m"], inputs=[-1, 0], targets=[1])
    assert ds.anchors.tolist() == [1, 2, 3, 6, 7, 8]
    for i in range(len(ds)):
        times = np.concatenate([ds.input_times(i), ds.target_times(i)])
        assert (np.diff(times) == np.timedelta64(6, "h")).all()


def test_a_selection_of_dates(wb2):
    ds = one_rank(wb2, fields=["t2m"], inputs=[0], targets=[1], time=("2020-01-01T12", "2020-01-02"))
    assert len(ds) == 5
    assert ds.input_times(0)[0] == np.datetime64("2020-01-01T12")
    np.testing.assert_allclose(ds[0].input.local, stacked(wb2, ["2m_temperature"])[2:3], rtol=1e-6)
    np.testing.assert_allclose(ds[-1].target.local, stacked(wb2, ["2m_temperature"])[7:8], rtol=1e-6)


def test_normalization_is_fused_and_named_by_channel_field_or_array(wb2):
    stats = {
        "z500": (5e4, 1e3),
        "2m_temperature": {"mean": 280.0, "std": 10.0},
        "temperature": ([260.0, 270.0, 280.0], [9.0, 10.0, 11.0]),
    }
    ds = one_rank(wb2, fields=["z500", "t2m", "temperature"], normalize=stats, dtype="float64")
    whole = stacked(wb2, ["geopotential@500", "2m_temperature", *(f"temperature@{level}" for level in LEVELS)])
    mean, std = np.array([5e4, 280, 260, 270, 280]), np.array([1e3, 10, 9, 10, 11])
    want = (whole - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(ds[2].input.local[0], want[2], rtol=1e-9, atol=1e-6)
    other = {"geopotential@500": (5e4, 1e3), "t2m": (280.0, 10.0), "temperature": stats["temperature"]}
    again = one_rank(wb2, fields=["z500", "2m_temperature", "temperature"], normalize=other, dtype="float64")
    assert (again.scale, again.offset) == (ds.scale, ds.offset)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-6), (torch.float16, 1e-2), ("bfloat16", 1e-2)])
def test_dtypes(wb2, dtype, tolerance):
    sample = one_rank(wb2, fields=["t2m"], dtype=dtype)[0]
    assert sample.input.dtype == (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
    np.testing.assert_allclose(sample.input.local.double(), stacked(wb2, ["2m_temperature"])[:1], rtol=tolerance)


@on_ranks(2)
def test_latitudes_turn_round_when_asked(wb2):
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=2), fields=["t2m"], lat_order="south-first", halo={"lat": 1})
    assert (np.diff(ds.coords["lat"]) > 0).all()
    whole = stacked(wb2, ["2m_temperature"])[:1, :, ::-1]
    np.testing.assert_allclose(ds[0].input.full_tensor(), whole, rtol=1e-6)
    assert ds.whole_coords["lat"][0] == -90


def test_dims_in_any_order(tmp_path):
    data = globe()[["2m_temperature", "temperature"]].transpose("time", "longitude", "latitude", "level")
    path = write(tmp_path / "turned.zarr", data)
    whole = stacked(write(tmp_path / "straight.zarr", globe()), ["2m_temperature", "temperature@850"])
    np.testing.assert_allclose(one_rank(path, fields=["t2m", "t850"])[1].input.local[0], whole[1], rtol=1e-6)


def test_members_are_selected_by_name(tmp_path):
    data = globe()[["2m_temperature"]].expand_dims(number=[0, 1, 2]).copy(deep=True)
    data["2m_temperature"].values[1] += 5
    path = str(tmp_path / "members.zarr")
    data.to_zarr(path, consolidated=False)
    base = one_rank(path, fields=["t2m"], select={"number": 0})[0].input.local
    torch.testing.assert_close(one_rank(path, fields=["t2m"], select={"number": 1})[0].input.local, base + 5)
    with pytest.raises(ReadError, match=r"has a dim 'number' of 3 .* choose one with select=\{'number': 0\}"):
        one_rank(path, fields=["t2m"])
    with pytest.raises(
        ReadError, match=r"select=\{'number': 3\} is outside array '2m_temperature', whose 'number' has 3"
    ):
        one_rank(path, fields=["t2m"], select={"number": 3})
    with pytest.raises(
        ReadError, match=r"select names 'realm', which is not a further dim of the fields; there are \['number'\]"
    ):
        one_rank(path, fields=["t2m"], select={"realm": 0})


def test_721_rows_just_work(tmp_path):
    data = globe(steps=1, lat=721, lon=24)[["2m_temperature"]]
    path = write(tmp_path / "era5.zarr", data)
    ds = jigsaw.io.open(path, mesh={"lat": 8}, fields=["t2m"], halo={"lat": 2})
    assert [b - a for a, b in (ds.layout.owned(c)[2] for c in ds.layout.coords())] == [91] + [90] * 7
    assert ds.plan(0).total.chunks == 1


def test_integers_plan_without_ranks_but_do_not_read(wb2):
    fields, round_ = ["t2m", "z500"], {"lon": "periodic"}
    ds = jigsaw.io.open(
        wb2, mesh={"lat": 2, "lon": 2}, fields=fields, halo=2, boundary=round_, targets=[1], mode="cooperative"
    )
    plan = ds.plan([0, 1])
    assert plan.ranks == 4
    assert plan.total.chunks == 6  # steps 0, 1, 2 of two variables: a step that two windows share is read once
    with pytest.raises(ReadError, match="it can plan, not read; pass a DeviceMesh"):
        ds[0]


@pytest.mark.parametrize("index", [8, -9])
def test_samples_end(wb2, index):
    with pytest.raises(IndexError, match=f"sample {index} of a dataset of 8"):
        one_rank(wb2, fields=["t2m"], inputs=[-1, 0], targets=[1])[index]


def test_a_dataset_says_what_it_is(wb2):
    shown = repr(one_rank(wb2, fields=["t2m"], halo=1))
    assert "10 samples, 1 channels, lat 13, lon 16" in shown


def test_a_group_inside_a_store_has_its_own_coordinates(tmp_path):
    data = globe(gap=4)[["2m_temperature"]]
    data.to_zarr(tmp_path / "nested.zarr", group="hourly", consolidated=False)
    ds = one_rank(str(tmp_path / "nested.zarr"), fields=["hourly/2m_temperature"], targets=[1])
    assert len(ds) == 8  # two runs of five steps
    assert ds.whole_coords["lat"][0] == 90


def test_a_volume_without_time_is_one_sample(tmp_path):
    values = np.arange(7 * 10 * 13, dtype="f4").reshape(7, 10, 13)
    xr.Dataset({"ct": (("z", "y", "x"), values)}).to_zarr(tmp_path / "ct.zarr", consolidated=False)
    ds = jigsaw.io.open(str(tmp_path / "ct.zarr"), mesh=world_mesh(z=1, x=1), halo={"z": 1})
    assert len(ds) == 1
    assert ds.frame.dims == ("z", "y", "x")
    np.testing.assert_array_equal(ds[0].input.local[0, 0], values)
    planned = jigsaw.io.open(str(tmp_path / "ct.zarr"), mesh={"z": 2, "x": 3}, halo={"z": 1})
    assert planned.layout.held((0, 1))[2:] == ((0, 5), (0, 10), (5, 9))
    with pytest.raises(ReadError, match="needs 2 steps, but the series has 1"):
        one_rank(str(tmp_path / "ct.zarr"), targets=[1])
    with pytest.raises(ReadError, match=r"time=\('2000', '2001'\) selects steps, but the fields have no time dim"):
        one_rank(str(tmp_path / "ct.zarr"), time=("2000", "2001"))
    with pytest.raises(ReadError, match=r"time=array\(.* selects steps, but the fields have no time dim"):
        one_rank(str(tmp_path / "ct.zarr"), time=np.array(["2000", "2001"], "M8[Y]"))


def test_a_variable_that_needs_a_choice_is_no_default_field(tmp_path):
    """A climatology by month, beside the series, is read only when it is named."""
    grid = {"lat": np.arange(3.0), "lon": np.arange(4.0)}
    series = xr.DataArray(
        np.zeros((5, 3, 4), "float32"), dims=("time", "lat", "lon"), coords={"time": np.arange(5), **grid}
    )
    by_month = xr.DataArray(np.ones((12, 3, 4), "float32"), dims=("month", "lat", "lon"), coords=grid)
    xr.Dataset({"air": series, "normal": by_month}).to_zarr(tmp_path / "s.zarr")
    assert jigsaw.io.open(tmp_path / "s.zarr", mesh={"lat": 1}).fields == ("air",)
    chosen = jigsaw.io.open(tmp_path / "s.zarr", mesh={"lat": 1}, fields=["normal"], select={"month": 2})
    assert chosen.fields == ("normal",)


# -- missing values by field ----------------------------------------------------------------------------------------


def fields_with_holes():
    """Three fields [time, lat, lon] of which each lacks values elsewhere: as arrays, and as channels of one array."""
    values = np.random.default_rng(3).normal(size=(3, 4, 9, 16)).astype("f4")
    for c in range(3):
        values[c, :, c : c + 3, 2 * c : 2 * c + 4] = np.nan
    values[2] = np.nan_to_num(values[2])
    dims = ("time", "lat", "lon")
    times = np.datetime64("2020-01-01", "ns") + np.arange(4) * np.timedelta64(6, "h")
    space = {"time": times, "lat": np.linspace(90, -90, 9), "lon": np.arange(16) * 22.5}
    names = ["sst", "t2m", "u10"]
    apart = xr.Dataset({name: (dims, v) for name, v in zip(names, values, strict=True)}, space)
    stacked = xr.DataArray(values.swapaxes(0, 1), {**space, "channel": names}, ("time", "channel", "lat", "lon"))
    return values, {"arrays": apart, "channels": stacked.to_dataset(name="fields")}


@on_ranks(4)
def test_missing_values_are_treated_by_field():
    values, stores = fields_with_holes()
    mesh = world_mesh(lat=2, lon=2)
    rules = {"sst": -5.0, "u10": "raise"}
    for store in stores.values():
        how = {"mesh": mesh, "fields": ["u10", "sst", "t2m"], "targets": [1]}
        how["normalize"] = {"sst": (1.0, 2.0), "t2m": (0.0, 1.0), "u10": (0.0, 1.0)}
        sample = jigsaw.io.open(store, nan=rules, **how)[1]
        sst = np.where(np.isnan(values[0]), -5.0, (values[0] - 1) / 2)  # the number is that of the result
        whole = np.stack([values[2], sst, values[1]], axis=1)
        np.testing.assert_allclose(sample.input.full_tensor(), whole[1:2], rtol=1e-6)
        np.testing.assert_allclose(sample.target.full_tensor(), whole[2:3], rtol=1e-6)
        with pytest.raises(NaNError, match="missing values at time 1"):
            jigsaw.io.open(store, nan=rules | {"t2m": "raise"}, **how)[1]
        with pytest.raises(FieldError, match=r"nan has 'z500', which is not a field; the channels are \['u10'"):
            jigsaw.io.open(store, nan={"z500": 0.0}, **how)
        with pytest.raises(FieldError, match="must be 'keep', 'raise' or a number, or these by field"):
            jigsaw.io.open(store, nan={"sst": None}, **how)
