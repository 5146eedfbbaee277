"""`pair`: inputs and targets of two stores on other grids, by time, on every mesh; each chunk once."""

import pickle
from itertools import islice

import numpy as np
import pytest
import torch
import xarray as xr
from globe_store import globe, stacked, truth, write

import jigsaw
from jigsaw.errors import FieldError, ShardingError, WindowError
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

MESHES = [{"lat": 1}, {"lat": 2}, {"data": 2}, {"lon": 3}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A coarse store of ten steps, and a fine one of other rows, chunks, and a part of the times, twice as often."""
    folder = tmp_path_factory.mktemp("pair")
    fine = globe(14, 25, 37)
    fine["time"] = np.datetime64("2020-01-01T18", "ns") + np.arange(14) * np.timedelta64(3, "h")
    return write(folder / "coarse.zarr", globe()), write(folder / "fine.zarr", fine, "v2", (2, 2, 7, 11))


def paired(stores, mesh, mode="auto", **kwargs):
    """Two steps of the coarse store, and the fine field three hours later."""
    coarse, fine = stores
    edges = {"halo": 1, "boundary": {"lon": "periodic"}, "mode": mode}
    inputs = jigsaw.io.open(coarse, mesh=mesh, fields=["z500", "t2m"], inputs=["-6h", "0h"], **edges)
    targets = jigsaw.io.open(fine, mesh=mesh, fields=["t2m", "t850"], inputs=["3h"], mode=mode, **kwargs)
    return jigsaw.io.pair(inputs, targets)


def expected(stores):
    """Inputs [n, 2, 2, 13, 16] and targets [n, 1, 2, 25, 37] of every sample, by xarray."""
    coarse, fine = (truth(path).time.values for path in stores)
    later = np.timedelta64(3, "h")
    times = [t for t in coarse[1:] if t in fine and t + later in fine]
    at, to = np.searchsorted(coarse, times), np.searchsorted(fine, np.array(times) + later)
    before = stacked(stores[0], ["geopotential@500", "2m_temperature"])
    after = stacked(stores[1], ["2m_temperature", "temperature@850"])
    return times, np.stack([before[at - 1], before[at]], axis=1), after[to][:, None]


def batches(stores, axes, state=None, count=None, mode="auto", **kwargs):
    loader = jigsaw.io.DataLoader(paired(stores, world_mesh(**axes), mode), **kwargs)
    if state is not None:
        loader.load_state_dict(state)
    read = [
        (b.samples, b.input.full_tensor().numpy(), b.target.full_tensor().numpy(), b.input_times, b.target_times)
        for b in islice(loader, count)
    ]
    chunks, left = loader.read_counts.chunks, loader.state_dict()
    loader.close()
    return read, left, chunks


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_samples_are_paired_by_time_on_every_mesh(stores, axes):
    times, before, after = expected(stores)
    ranks = int(np.prod(list(axes.values())))
    options = {"batch_size": 3, "shuffle": True, "seed": 7}
    for read, state, _ in run_on_ranks(ranks, batches, stores, axes, **options):
        assert sorted(s for samples, *_ in read for s in samples) == list(range(len(times)))
        assert state == {"seed": 7, "epoch": 1, "next_sample": 0}
        for samples, input, target, input_times, target_times in read:
            np.testing.assert_allclose(input, before[list(samples)], rtol=1e-6)
            np.testing.assert_allclose(target, after[list(samples)], rtol=1e-6)
            assert list(input_times[:, 1]) == [times[s] for s in samples]
            assert (target_times[:, 0] - input_times[:, 1] == np.timedelta64(3, "h")).all()


@pytest.mark.parametrize("axes", [{"lat": 1}, {"lat": 2}, {"lat": 2, "lon": 2}], ids=str)
def test_each_chunk_of_both_stores_is_decoded_once(stores, axes):
    """In order: a step more than samples of two coarse arrays, a globe a chunk; 4 x 4 chunks of two fine arrays."""
    times, _, _ = expected(stores)
    ranks = int(np.prod(list(axes.values())))
    counted = run_on_ranks(ranks, batches, stores, axes, batch_size=2, mode="cooperative")
    assert sum(chunks for *_, chunks in counted) == 2 * (len(times) + 1) + 2 * 16 * len(times)


def test_a_run_goes_on_in_mid_epoch_on_another_mesh(stores):
    options = {"batch_size": 2, "shuffle": True, "seed": 3}
    ((whole, *_),) = run_on_ranks(1, batches, stores, {"lat": 1}, **options)
    ((_, state, _), *_) = run_on_ranks(2, batches, stores, {"lat": 2}, count=1, **options)
    assert state.items() >= {"seed": 3, "epoch": 0, "next_sample": 2, "samples": 7}.items()
    for rest, after, _ in run_on_ranks(2, batches, stores, {"lon": 2}, state=state, **options):
        assert after == {"seed": 3, "epoch": 1, "next_sample": 0}
        assert [samples for samples, *_ in rest] == [samples for samples, *_ in whole[1:]]
        for (_, *read), (_, *alike) in zip(rest, whole[1:], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(read, alike, strict=True))


def test_an_epoch_that_is_left_ends_for_both(stores):
    loader = jigsaw.io.DataLoader(paired(stores, world_mesh(lat=1)), shuffle=True)
    for _ in range(2):
        for batch in loader:
            assert batch.target_times[0, 0] - batch.input_times[0, 1] == np.timedelta64(3, "h")
            break
    assert loader.state_dict().items() >= {"seed": 0, "epoch": 1, "next_sample": 1, "samples": 7}.items()
    assert loader.waited_s > 0


class Finer(torch.nn.Module):
    """From two coarse states to a fine one."""

    def __init__(self):
        super().__init__()
        self.before, self.after = torch.nn.Conv2d(4, 3, 3, padding=1), torch.nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x):
        finer = torch.nn.functional.interpolate(self.before(x.flatten(1, 2)).tanh(), (25, 37), mode="bilinear")
        return self.after(finer)


def trained(stores, axes):
    torch.manual_seed(0)
    mesh = world_mesh(**axes)
    scales = {"z500": (5e4, 1e3), "t2m": (280.0, 10.0)}, {"t2m": (280.0, 10.0), "t850": (270.0, 10.0)}
    opened = [
        jigsaw.io.open(path, mesh=mesh, fields=list(scale), inputs=steps, dtype="float64", normalize=scale)
        for path, scale, steps in zip(stores, scales, (["-6h", 0], [0]), strict=True)
    ]
    net = jigsaw.parallelize(Finer().double(), mesh)
    losses = []
    for batch in jigsaw.io.DataLoader(jigsaw.io.pair(*opened), batch_size=2):
        loss = torch.nn.functional.mse_loss(net(batch.input), batch.target[:, 0])
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad.numpy() for p in net.parameters()]


@pytest.mark.parametrize("axes", [{"lat": 2}, {"lat": 2, "lon": 2}, {"data": 2, "lon": 2}], ids=str)
def test_a_net_from_coarse_to_fine_has_the_gradients_of_one_rank(stores, axes):
    ((losses, gradients),) = run_on_ranks(1, trained, stores, {"lat": 1})
    for theirs, parts in run_on_ranks(int(np.prod(list(axes.values()))), trained, stores, axes):
        np.testing.assert_allclose(theirs, losses, rtol=1e-12)
        for part, whole in zip(parts, gradients, strict=True):
            np.testing.assert_allclose(part, whole, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_a_pair_by_number_and_after_a_pickle(stores):
    data = paired(stores, world_mesh(lat=2), halo=1)
    again = pickle.loads(pickle.dumps(data))
    _, before, after = expected(stores)
    for dataset in (data, again):
        sample = dataset[-1]
        np.testing.assert_allclose(sample.input.full_tensor().numpy(), before[-1], rtol=1e-6)
        np.testing.assert_allclose(sample.target.full_tensor().numpy(), after[-1], rtol=1e-6)
        assert sample.target.layout == dataset.target_layout == jigsaw.io.DataLoader(dataset.partner).dataset.layout
        assert sample.target_times == dataset.target_times(-1)
    loader = pickle.loads(pickle.dumps(jigsaw.io.DataLoader(data, batch_size=2, prefetch_bytes=10**9)))
    assert [batch.samples for batch in loader] == [(0, 1), (2, 3), (4, 5), (6,)]
    assert data.target_fields == ("t2m", "t850") and "with Dataset" in repr(data)


def test_a_pair_is_split_by_date(stores):
    parts = jigsaw.io.split(paired(stores, world_mesh(lat=1)), early=(None, "2020-01-02"), late=("2020-01-03", None))
    for part in parts.values():
        assert len(part) == len(part.partner)
        assert part[0].target_times[0] - part[0].input_times[1] == np.timedelta64(3, "h")
    assert parts["late"][0].input_times[0] >= np.datetime64("2020-01-03")


def test_no_target_of_a_part_reaches_into_another(stores):
    """Inputs of 6 hours, targets 3 hours after or before them: at the end of a part they lie in the next one."""
    end, mesh = np.datetime64("2020-01-02T12"), world_mesh(lat=1)
    ranges = {"early": (None, "2020-01-02T12"), "late": ("2020-01-02T16", None)}
    inputs = jigsaw.io.open(stores[0], mesh=mesh, fields=["t2m"])
    for step, last, first in (("3h", "2020-01-02T06", "2020-01-02T18"), ("-3h", "2020-01-02T12", "2020-01-03T00")):
        targets = jigsaw.io.open(stores[1], mesh=mesh, fields=["t2m"], inputs=[step])
        data = jigsaw.io.pair(inputs, targets)
        assert end in [data.input_times(i)[0] for i in range(len(data))]
        parts = jigsaw.io.split(data, **ranges)
        early, late = parts["early"][-1], parts["late"][0]
        assert (early.input_times[0], late.input_times[0]) == (np.datetime64(last), np.datetime64(first))
        assert early.target_times[0] <= end < late.target_times[0]
        with pytest.raises(WindowError, match="step positions, which count the steps of a pair's inputs"):
            jigsaw.io.split(data, early=(0, 4))


def test_a_step_beyond_the_series_is_no_anchor(stores):
    """A window of the next step alone has one before the series, whose time is not the last one's."""
    whole = jigsaw.io.open(stores[0], mesh=world_mesh(lat=1), fields=["t2m"])
    for step in (1, -1):
        data = jigsaw.io.pair(whole, jigsaw.io.open(stores[0], mesh=world_mesh(lat=1), fields=["t2m"], inputs=[step]))
        assert len(data) == len(whole) - 1
        for i in range(len(data)):
            assert data.target_times(i) - data.input_times(i) == step * np.timedelta64(6, "h")


def test_a_forecast_beside_what_came(stores, tmp_path):
    """The time of a forecast is its start plus the lead."""
    leads, start = np.arange(3) * np.timedelta64(6, "h"), truth(stores[0]).time.values[:5]
    values = np.arange(5 * 3 * 9 * 8, dtype="f4").reshape(5, 3, 9, 8)
    forecast = xr.Dataset(
        {"2m_temperature": (("time", "prediction_timedelta", "latitude", "longitude"), values)},
        {
            "time": start,
            "prediction_timedelta": leads.astype("m8[ns]"),
            "latitude": np.linspace(90, -90, 9),
            "longitude": np.arange(8) * 45.0,
        },
    )
    mesh = world_mesh(lat=1)
    came = jigsaw.io.open(stores[0], mesh=mesh, fields=["t2m"])
    told = jigsaw.io.open(forecast, mesh=mesh, fields=["t2m"], select={"lead": "12h"})
    data = jigsaw.io.pair(told, came)
    assert len(data) == 5
    assert data[3].input_times == data[3].target_times == start[3] + np.timedelta64(12, "h")
    assert np.array_equal(data[3].input.local[0, 0], values[3, 2])
    windows = jigsaw.io.open(forecast, mesh=mesh, fields=["t2m"], along="lead", select={"time": 2}, inputs=[-1, 0])
    ahead, behind = jigsaw.io.pair(windows, came), jigsaw.io.pair(came, windows)
    for both in (ahead, behind):
        assert len(both) == len(jigsaw.io.split(both, all=(str(start[2]), str(start[4])))["all"]) == 2
    # the window of the first sample begins before the range, and a forecast of the inputs is kept whole
    assert len(jigsaw.io.split(behind, late=(str(start[3]), str(start[4])))["late"]) == 1
    with pytest.raises(WindowError, match="holds no sample"):
        jigsaw.io.split(ahead, late=(str(start[3]), str(start[4])))
    several = jigsaw.io.open(forecast, mesh=mesh, fields=["t2m"], select={"lead": "all"})
    with pytest.raises(WindowError, match="of each time there are 3 samples of inputs and 1 of targets"):
        jigsaw.io.pair(several, came)
    with pytest.raises(WindowError, match="3 places along 'prediction_timedelta'"):
        jigsaw.io.pair(several, several)


def test_what_cannot_be_paired(stores):
    mesh = world_mesh(lat=1)
    coarse, fine = (jigsaw.io.open(path, mesh=mesh, fields=["t2m"]) for path in stores)
    with pytest.raises(FieldError, match=r"pair: targets='fine\.zarr' must be a dataset"):
        jigsaw.io.pair(coarse, "fine.zarr")
    with pytest.raises(FieldError, match="pair: inputs=PairedDataset"):
        jigsaw.io.pair(jigsaw.io.pair(coarse, fine), fine)
    with pytest.raises(WindowError, match=r"targets was opened with targets=\[1\].*inputs=\[1\]"):
        jigsaw.io.pair(coarse, jigsaw.io.open(stores[1], mesh=mesh, fields=["t2m"], targets=[1]))
    with pytest.raises(ShardingError, match=r"a mesh of {'lat': 1}, targets by one of {'lon': 1}"):
        jigsaw.io.pair(coarse, jigsaw.io.open(stores[1], mesh={"lon": 1}, fields=["t2m"]))
    with pytest.raises(ShardingError, match=r"cut alike, by {'lat': 1}, on other devices or ranks"):
        jigsaw.io.pair(coarse, jigsaw.io.open(stores[1], mesh={"lat": 1}, fields=["t2m"]))
    with pytest.raises(WindowError, match="no time is in both"):
        jigsaw.io.pair(coarse, jigsaw.io.open(stores[1], mesh=mesh, fields=["t2m"], time=(1, None), every="6h"))
    with pytest.raises(WindowError, match="cannot be compared"):
        jigsaw.io.pair(coarse, jigsaw.io.open(stores[1], mesh=mesh, fields=["land_sea_mask"]))
    with pytest.raises(WindowError, match=r"rollout=2 asks for 2 targets"):
        jigsaw.io.DataLoader(jigsaw.io.pair(coarse, fine), rollout=2)


def test_members_are_paired_by_their_coordinate(stores):
    field = truth(stores[0])[["2m_temperature"]].expand_dims(number=[1, 2, 3], axis=1)
    shuffled = field.isel(number=[1, 0, 2])
    mesh, options = world_mesh(lat=1), {"fields": ["t2m"], "select": {"number": "all"}}
    whole, other = (jigsaw.io.open(data, mesh=mesh, **options) for data in (field, shuffled))
    assert len(jigsaw.io.pair(whole, whole)) == len(whole)
    with pytest.raises(WindowError, match=r"'number' \[1, 2, 3\], samples of targets those of 'number' \[2, 1, 3\]"):
        jigsaw.io.pair(whole, other)
    unnamed = jigsaw.io.open(shuffled.drop_vars("number"), mesh=mesh, **options)
    assert len(jigsaw.io.pair(whole, unnamed)) == len(whole)


def test_what_takes_one_dataset_of_a_pair(stores, tmp_path):
    """A store like a pair is one of its targets; plans and statistics name the two datasets."""
    data = paired(stores, world_mesh(lat=1))
    sample = data[0]
    jigsaw.io.write(tmp_path / "target.zarr", sample.target, like=data, dims=("time", "channel", "lat", "lon"))
    written = xr.open_zarr(tmp_path / "target.zarr", consolidated=False)
    fine = truth(stores[1]).sel(time=sample.target_times)
    assert np.array_equal(written.lat, fine.latitude) and np.array_equal(written.lon, fine.longitude)
    np.testing.assert_allclose(written["2m_temperature"].values, fine["2m_temperature"].values, rtol=1e-6)
    for refused in (data.plan, lambda: jigsaw.io.recommend(data), lambda: jigsaw.io.statistics(data)):
        with pytest.raises(FieldError, match=r"data\.unpaired, the inputs, and .*data\.partner, the targets"):
            refused()
    assert data.unpaired.plan() and data.partner.plan()


# -- stations beside grids ---------------------------------------------------------------------------------------------


PLACES = np.array(
    [[52.5, 13.4], [40.7, -74.0], [-33.9, 151.2], [1.3, 103.8], [64.1, 338.1], [89.0, 12.0], [19.4, 260.9]]
)


@pytest.fixture(scope="module")
def observed(stores):
    """Temperatures of seven stations every six hours, one a day missing."""
    times = truth(stores[0]).time.values[2:]
    values = np.random.default_rng(5).normal(280, 10, (len(times), len(PLACES))).astype("f4")
    values[1::4, 2] = np.nan
    places = {name: ("station", PLACES[:, i]) for i, name in enumerate(("lat", "lon"))}
    return xr.Dataset({"t2m": (("time", "station"), values)}, {"time": times, **places})


class Change(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.near = torch.nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        return x[:, :, 1:] + self.near(x[:, 0])[:, None]


def scored(stores, observed, axes):
    """Losses at the stations that reported, their number, gradients, and what a net says there."""
    torch.manual_seed(0)
    mesh, scale = world_mesh(**axes), {"z500": (5e4, 1e3), "t2m": (280.0, 10.0)}
    options = {"mesh": mesh, "dtype": "float64"}
    grid = jigsaw.io.open(stores[0], fields=["z500", "t2m"], normalize=scale, **options)
    spec = {"cell": tuple(name for name in axes if name != "data")}
    stations = jigsaw.io.open(observed, fields=["t2m"], normalize={"t2m": (280.0, 10.0)}, spec=spec, **options)
    at_stations = jigsaw.io.Regridder(grid.whole_coords, stations.grid, method="bilinear")
    net = jigsaw.parallelize(Change().double(), mesh)
    losses, told = [], []
    for batch in jigsaw.io.DataLoader(jigsaw.io.pair(grid, stations), batch_size=2):
        forecast = at_stations(net(batch.input))
        has_value = ~batch.target.isnan()
        off = torch.where(has_value, forecast - batch.target, 0.0)
        loss = off.square().sum() / has_value.sum()
        loss.backward()
        losses.append((loss.item(), has_value.sum().item()))
        told.append(forecast.detach().full_tensor().numpy())
    return losses, [p.grad.numpy() for p in net.parameters()], np.concatenate(told)


@pytest.mark.parametrize("axes", [{"lat": 2}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}], ids=str)
def test_a_forecast_is_scored_at_stations_alike_on_every_mesh(stores, observed, axes):
    ((losses, gradients, told),) = run_on_ranks(1, scored, stores, observed, {"lat": 1})
    assert [count for _, count in losses] == [13, 14, 13, 14]
    for theirs, parts, said in run_on_ranks(int(np.prod(list(axes.values()))), scored, stores, observed, axes):
        np.testing.assert_allclose(theirs, losses, rtol=1e-12)
        np.testing.assert_allclose(said, told, rtol=1e-9)
        for part, whole in zip(parts, gradients, strict=True):
            np.testing.assert_allclose(part, whole, rtol=1e-9, atol=1e-12)


def test_values_at_stations_are_those_of_xarray(stores, observed):
    grid = jigsaw.io.open(stores[0], mesh=world_mesh(lat=1), fields=["t2m"], dtype="float64")
    stations = jigsaw.io.open(observed, mesh=world_mesh(lat=1), fields=["t2m"])
    told = jigsaw.io.Regridder(grid.whole_coords, stations.grid, method="bilinear")(grid[3].input)
    field = truth(stores[0])["2m_temperature"][3].pad(longitude=(0, 1), mode="wrap")
    field = field.assign_coords(longitude=np.arange(17) * 22.5)
    lat, lon = (xr.DataArray(PLACES[:, i], dims="station") for i in range(2))
    want = field.astype("f8").interp(latitude=lat, longitude=lon % 360)
    np.testing.assert_allclose(told.local[0, 0], want, rtol=1e-6)
