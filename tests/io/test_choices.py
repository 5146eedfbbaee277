"""Members, lead times and initial times: chosen, made samples, or what windows run along; xarray is the oracle."""

import re

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import jigsaw
from jigsaw.errors import FieldError, GridError, WindowError
from jigsaw.io.series.forcings import day_progress
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

INITS, LEADS, MEMBERS = 5, 4, 3


def forecasts():
    """Five forecasts a day apart, of four 6-hourly leads and three members, labelled 1 to 3."""
    shape = INITS, LEADS, MEMBERS, 7, 8
    r = np.random.default_rng(1)
    dims = ("time", "prediction_timedelta", "number", "latitude", "longitude")
    return xr.Dataset(
        {
            "2m_temperature": (dims, r.normal(size=shape).astype("f4")),
            "land_sea_mask": (dims[3:], r.normal(size=shape[3:]).astype("f4")),
        },
        coords={
            "time": np.datetime64("2020-01-01", "ns") + np.arange(INITS) * np.timedelta64(24, "h"),
            "prediction_timedelta": np.arange(LEADS) * np.timedelta64(6, "h").astype("timedelta64[ns]"),
            "number": [1, 2, 3],
            "latitude": np.linspace(90, -90, 7),
            "longitude": np.arange(8) * 45.0,
        },
    )


@pytest.fixture(scope="module", params=["zarr", "xarray"])
def store(request, tmp_path_factory):
    data = forecasts()
    if request.param == "xarray":
        return data
    path = str(tmp_path_factory.mktemp("forecasts") / "f.zarr")
    chunks = {"2m_temperature": {"chunks": (1, 2, 3, 7, 8)}}
    data.to_zarr(path, consolidated=False, encoding=chunks)
    return path


def opened(store, select, fields=("t2m",), **kwargs):
    return jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=list(fields), select=select, **kwargs)


@pytest.mark.parametrize(
    ("select", "place"),
    [
        ({"number": 1, "prediction_timedelta": 2}, {"number": 1, "prediction_timedelta": 2}),
        ({"member": -1, "lead": 0}, {"number": 2, "prediction_timedelta": 0}),
        ({"member": "3", "lead": "12h"}, {"number": 2, "prediction_timedelta": 2}),
        ({"number": 1.0, "lead": np.timedelta64(18, "h")}, {"number": 0, "prediction_timedelta": 3}),
    ],
)
def test_a_choice_is_a_position_or_a_value_by_either_name(store, select, place):
    ds = opened(store, select)
    want = forecasts()["2m_temperature"].isel(place)
    assert len(ds) == INITS
    for i in range(INITS):
        np.testing.assert_array_equal(ds[i].input.local[0, 0], want.values[i])
    lead = forecasts().prediction_timedelta.values[place["prediction_timedelta"]]
    assert ds.input_times(1)[0] == np.datetime64("2020-01-02") + lead


@pytest.mark.parametrize(
    ("member", "numbers"), [("all", [0, 1, 2]), ([2, 0], [2, 0]), (["2", "1"], [1, 0]), (slice(1, None), [1, 2])]
)
def test_several_choices_are_samples_each(store, member, numbers):
    ds = opened(store, {"member": member, "lead": 1}, fields=["t2m", "land_sea_mask"], inputs=[0], targets=[1])
    data = forecasts().isel(prediction_timedelta=1)
    assert len(ds) == len(numbers) * (INITS - 1)
    for i in range(len(ds)):
        number, step = numbers[i // (INITS - 1)], i % (INITS - 1)
        assert ds.choice(i) == {"prediction_timedelta": 1, "number": number}
        sample = ds[i]
        np.testing.assert_array_equal(sample.input.local[0, 0], data["2m_temperature"].values[step, number])
        np.testing.assert_array_equal(sample.target.local[0, 0], data["2m_temperature"].values[step + 1, number])
        np.testing.assert_array_equal(sample.input.local[0, 1], data["land_sea_mask"].values)


def test_windows_run_along_the_lead_time(store):
    ds = opened(store, {"init": "all", "number": 0}, along="lead", inputs=["-6h", "0h"], targets=["6h"])
    data = forecasts()["2m_temperature"].isel(number=0)
    assert len(ds) == INITS * 2
    for i in range(len(ds)):
        init, anchor = i // 2, i % 2 + 1
        sample = ds[i]
        np.testing.assert_array_equal(sample.input.local[:, 0], data.values[init, anchor - 1 : anchor + 1])
        np.testing.assert_array_equal(sample.target.local[:, 0], data.values[init, [anchor + 1]])
        valid = data.time.values[init] + data.prediction_timedelta.values[anchor - 1 : anchor + 2]
        np.testing.assert_array_equal(np.concatenate([sample.input_times, sample.target_times]), valid)


def test_leads_and_initial_times_are_selected_by_time(store):
    ds = opened(
        store, {"time": ("2020-01-02", "2020-01-03"), "number": 0}, along="prediction_timedelta", time=("6h", "12h")
    )
    assert len(ds) == 4
    want = forecasts()["2m_temperature"].values[1:3, 1:3, 0].reshape(4, 7, 8)
    for i in range(4):
        np.testing.assert_array_equal(ds[i].input.local[0, 0], want[i])
    one = opened(store, {"init": "2020-01-04", "number": 0}, along="lead")
    assert one.choice(0)["time"] == 3


def test_forcings_are_those_of_the_valid_time(store):
    ds = opened(store, {"member": "all", "lead": "18h"}, targets=[1], forcings=["day_progress"])
    data = forecasts()
    batch = next(iter(jigsaw.io.DataLoader(ds, batch_size=6)))
    assert len(ds) == 12
    valid = np.array([[data.time.values[s % 4 + 1] + np.timedelta64(18, "h")] for s in range(6)])
    np.testing.assert_array_equal(batch.target_times, valid)
    want = day_progress(valid.ravel(), data.longitude.values)
    found = batch.target_forcings.full_tensor()[:, 0, :, 0].numpy()
    np.testing.assert_allclose(found, want, atol=1e-6)


@on_ranks(2)
def test_a_batch_over_members_on_two_ranks(store):
    ds = jigsaw.io.open(
        store, mesh=world_mesh(lat=2), fields=["t2m"], select={"member": "all", "lead": 0}, halo=1, targets=[1]
    )
    whole = forecasts()["2m_temperature"].isel(prediction_timedelta=0).values
    seen = []
    for batch in jigsaw.io.DataLoader(ds, batch_size=5, shuffle=True, seed=2):
        member, step = np.array(batch.samples) // 4, np.array(batch.samples) % 4
        np.testing.assert_array_equal(batch.input.full_tensor()[:, 0, 0], whole[step, member])
        np.testing.assert_array_equal(batch.target.full_tensor()[:, 0, 0], whole[step + 1, member])
        seen += batch.samples
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("store", ["zarr"], indirect=True)
def test_a_chunk_that_members_share_is_decoded_once(store):
    plan = opened(store, {"member": "all", "lead": 0}).plan([0, INITS, 2 * INITS])
    assert plan.total.chunks == 1


@pytest.mark.parametrize(
    ("select", "match"),
    [
        ({"lead": 0}, r"has a dim 'number' of 3 .* with select=\{'number': 'all'\}"),
        ({"lead": 0, "number": "7"}, r"'7'\} is 0 values of 'number' .* which has 1, 2, 3"),
        ({"lead": "5h", "number": 0}, r"'5h'\} is 0 values of 'prediction_timedelta'"),
        ({"lead": 4, "number": 0}, "is outside array"),
        ({"lead": 0, "number": None}, "None} is 0 values of 'number'"),
        ({"lead": 0, "number": {}}, "{}} is 0 values of 'number'"),
        ({"lead": 0, "number": [1, 1]}, "picks nothing, or one place twice"),
        ({"lead": 0, "number": ("1", "2")}, "is not a range"),
        ({"lead": ("30h", "60h"), "number": 0}, "selects no step"),
        ({"lead": 0, "prediction_timedelta": 0, "number": 0}, "twice"),
        ({"lead": 0, "number": 0, "level": 0}, r"select names 'level'.*\['number', 'prediction_timedelta'\]"),
    ],
)
def test_choices_that_cannot_be_made(store, select, match):
    with pytest.raises(GridError, match=match):
        opened(store, select)


def test_one_label_at_two_places_is_refused():
    """Two fields whose members are numbered differently."""
    data = forecasts()["2m_temperature"].isel(prediction_timedelta=0, drop=True)
    groups = {"/a": data.to_dataset(), "/b": data.assign_coords(number=[3, 2, 1]).to_dataset()}
    store = zarr.storage.MemoryStore()
    for name, group in groups.items():
        group.to_zarr(store, group=name, consolidated=False)
    fields = ["a/2m_temperature", "b/2m_temperature"]
    opened_group = zarr.open_group(store, mode="r")
    assert len(opened(opened_group, {"number": "2"}, fields)) == INITS
    with pytest.raises(GridError, match="'3'} is at other places of 'number' in array 'b/2m_temperature'"):
        opened(opened_group, {"number": "3"}, fields)


def test_a_dim_to_run_along_must_exist(store):
    with pytest.raises(GridError, match=re.escape("along='step_time' is not a dim of the store")):
        opened(store, {}, along="step_time")


def test_a_window_of_leads_ends_with_the_forecast(store):
    with pytest.raises(WindowError, match="needs 5 steps, but the series has 4"):
        opened(store, {"init": 0, "number": 0}, along="lead", targets=["24h"])


# -- a further dim as a dim of a sample --------------------------------------------------------------------------------


def stacked(store, axes, **kwargs):
    """Forecasts of three leads with all members in a sample, beside the mask: batches, chunks of a start, a sample."""
    mesh = world_mesh(**axes)
    options = {"select": {"time": "all"}, "stack": "member", "targets": ["6h"], "mode": "cooperative", **kwargs}
    edges = {"halo": 1, "boundary": {"lon": "periodic"}}
    data = jigsaw.io.open(
        store, mesh=mesh, fields=["t2m", "land_sea_mask"], along="lead", forcings=["latlon"], **edges, **options
    )
    loader = jigsaw.io.DataLoader(data, batch_size=4)
    read = []
    for batch in loader:
        parts = batch.input, batch.target, batch.target_forcings
        read.append((batch.samples, *(x.full_tensor().numpy() for x in parts), batch.input_times))
        # members and samples as one batch dim, as most nets need them
        flat = batch.input.flatten(0, 1)[:, 0]
        torch.testing.assert_close(flat.full_tensor(), torch.from_numpy(read[-1][1]).flatten(0, 1)[:, 0])
    return read, data.plan([0, 1, 2]).total.chunks, data[3].input.full_tensor().numpy()


@pytest.mark.parametrize("store", ["zarr"], indirect=True)
@pytest.mark.parametrize("axes", [{"lat": 1}, {"lat": 2}, {"lon": 3}, {"data": 2, "lat": 2}], ids=str)
def test_members_are_a_dim_of_each_sample(store, axes):
    truth = xr.open_zarr(store, consolidated=False)
    whole = truth["2m_temperature"].transpose("time", "number", "prediction_timedelta", ...).values
    results = run_on_ranks(int(np.prod(list(axes.values()))), stacked, store, axes)
    for read, chunks, one in results:
        assert [s for samples, *_ in read for s in samples] == list(range(15))
        for samples, input, target, forced, times in read:
            start, lead = np.divmod(np.array(samples), 3)
            assert input.shape == (len(samples), 3, 1, 6, 7, 8)  # members, steps, two fields and four forcings
            np.testing.assert_array_equal(input[:, :, 0, 0], whole[start, :, lead])
            np.testing.assert_array_equal(target[:, :, 0, 0], whole[start, :, lead + 1])
            np.testing.assert_array_equal(
                input[:, :, 0, 1], np.broadcast_to(truth.land_sea_mask, (len(start), 3, 7, 8))
            )
            np.testing.assert_array_equal(input[:, :, 0, 2:], forced[:, :, 0])
            assert (times[:, 0] == truth.time.values[start] + truth.prediction_timedelta.values[lead]).all()
        np.testing.assert_array_equal(one[:, 0, 0], whole[1, :, 0])
        assert chunks == 3  # one of two leads of all members, another of two, and the mask


def test_some_members_in_a_sample(store):
    data = opened(store, {"lead": "12h", "number": [2, 0]}, stack="number")
    assert len(data) == INITS and data.select == {"prediction_timedelta": 2, "number": [2, 0]}
    assert data.choice(3) == {"prediction_timedelta": 2} and data.layout.shape == (2, 1, 1, 7, 8)
    whole = forecasts()["2m_temperature"].values
    np.testing.assert_array_equal(data[3].input.local[:, 0, 0], whole[3, 2, [2, 0]])
    assert jigsaw.io.open(store, mesh={"lat": 2}, along="lead", select={"time": 0}, stack="member").fields == (
        "2m_temperature",
        "land_sea_mask",
    )


def test_what_cannot_be_stacked(store):
    with pytest.raises(GridError, match=r"stack names 'level', which is not a further dim"):
        opened(store, {"lead": 0, "number": 0}, stack="level")
    with pytest.raises(GridError, match=r"stack='lead': places along 'prediction_timedelta' have times of their own"):
        opened(store, {"number": 0}, stack="lead")
    with pytest.raises(FieldError, match=r"stack='number' puts all into one; open it with select={'number': 'all'}"):
        jigsaw.io.statistics(opened(store, {"lead": 0}, stack="member"))


@pytest.mark.parametrize(("time", "units"), [(np.arange(3.0), "hours"), (None, "")])
def test_leads_are_not_added_to_times_without_units(time, units):
    days = np.datetime64("2020-01-01", "ns") + np.arange(3) * np.timedelta64(1, "D")
    leads, values = ("step", np.array([0, 6]), {"units": units}), np.zeros((3, 2, 5, 8), "f4")
    places = {"time": days if time is None else time, "step": leads, "lat": np.linspace(90, -90, 5)}
    data = xr.Dataset({"t2m": (("time", "step", "lat", "lon"), values)}, places)
    along = "lead" if time is None else "time"
    ds = jigsaw.io.open(data, mesh={"lat": 1}, along=along, select={"init" if time is None else "lead": 1})
    assert ds.input_times(1).tolist() == ([6] if time is None else [1.0])
