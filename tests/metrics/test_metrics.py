"""Metrics of fields and ensembles: the formulas of WeatherBench2, alike on every mesh, missing values too."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from jigsaw import comm, metrics
from jigsaw.errors import GridError, ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

MESHES = [{"lat": 1}, {"lat": 3}, {"ensemble": 4}, {"ensemble": 2, "lat": 2}, {"lat": 2, "lon": 2}]
LATS = np.linspace(90, -90, 7)
AREA = metrics.latitude_weights(LATS, dtype=torch.float64)
FIELD, MEMBERS = (None, "lat", "lon"), (None, "ensemble", "lat", "lon")


def _fields(members=None):
    torch.manual_seed(0)
    shape = (3, 7, 10) if members is None else (3, members, 7, 10)
    return torch.randn(shape, dtype=torch.float64), torch.randn(3, 7, 10, dtype=torch.float64)


def _with_holes(x):
    """Every fifth value is missing, and the first step throughout."""
    holes = torch.arange(x.numel()).reshape(x.shape) % 5 == 0
    holes[0] = True
    return x.masked_fill(holes, torch.nan)


def _metric(name, x, y, dim=None, holes=False, **options):
    if holes:
        y = _with_holes(torch.zeros(3, 7, 10, dtype=torch.float64)) + y
        options["skip_missing"] = True
    more = {"acc": [0.1 * AREA]}.get(name, [])
    if name == "spread":
        return metrics.spread(x, dim=dim, weights=AREA)
    found = getattr(metrics, name)(x, y, *more, dim=dim, weights=AREA, **options)
    return found.nan_to_num(7.0) if holes else found


@pytest.mark.parametrize("name", ["rmse", "mae", "bias", "acc"])
def test_fields_on_every_mesh(name):
    x, y = _fields()
    meshes = [mesh for mesh in MESHES if "ensemble" not in mesh]
    for options in ({}, {"dim": (-2, -1), "holes": True}):
        case = functools.partial(_metric, name, **options)
        assert_same_on_every_mesh(case, [x, y], meshes, spec=[FIELD, FIELD])


@pytest.mark.parametrize("name", ["crps", "spread", "spread_skill"])
def test_ensembles_on_every_mesh(name):
    x, y = _fields(members=5)
    for options in ({}, {"dim": (-2, -1), "holes": True}, {"dim": 0}):
        case = functools.partial(_metric, name, **options)
        assert_same_on_every_mesh(case, [x, y], MESHES, spec=[MEMBERS, FIELD])


def _spectrum(x, by_latitude):
    return metrics.spectrum(x, LATS) if by_latitude else metrics.spectrum(x.movedim(-1, 0), lon_dim=0)


@pytest.mark.slow
@pytest.mark.parametrize("by_latitude", [True, False])
def test_spectra_on_every_mesh(by_latitude):
    meshes = [mesh for mesh in MESHES if "ensemble" not in mesh]
    case = functools.partial(_spectrum, by_latitude=by_latitude)
    assert_same_on_every_mesh(case, [_fields()[0]], meshes, spec=[FIELD], atol=1e-8)


# -- oracles ----------------------------------------------------------------------------------------------------------


def test_latitude_weights_are_weatherbenchs():
    for lats in (LATS, LATS[::-1], np.linspace(-87.1875, 87.1875, 32)):
        radians = np.deg2rad(np.sort(lats))
        bounds = np.concatenate([[-np.pi / 2], (radians[:-1] + radians[1:]) / 2, [np.pi / 2]])
        areas = np.diff(np.sin(bounds))
        expected = (areas / areas.mean())[:: 1 if lats[0] < lats[-1] else -1]
        np.testing.assert_allclose(metrics.latitude_weights(lats, torch.float64)[:, 0], expected, rtol=1e-12)
    region = metrics.latitude_weights([50.0, 40.0], torch.float64)[:, 0]  # cells from 35 to 45 and 55, not to the poles
    expected = np.diff(np.sin(np.deg2rad([35, 45, 55])))[::-1]
    np.testing.assert_allclose(region / region.sum(), expected / expected.sum(), rtol=1e-12)
    assert metrics.latitude_weights(LATS).dtype == torch.float32
    with pytest.raises(GridError, match="beyond a pole"):
        metrics.latitude_weights([100.0, 0.0])


def test_the_formulas_of_weatherbench():
    x, y = _fields()
    climatology, w = np.linspace(-0.5, 0.5, 10), (AREA / AREA.mean()).numpy()
    f, t = x.numpy() - climatology, y.numpy() - climatology
    expected = (f * t * w).mean((1, 2)) / np.sqrt((f**2 * w).mean((1, 2)) * (t**2 * w).mean((1, 2)))
    found = metrics.acc(x, y, torch.tensor(climatology), dim=(1, 2), weights=AREA)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    missing = y.clone()
    missing[:, :, 3] = torch.nan  # as if that column were not there
    kept = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    found = metrics.acc(x, missing, torch.tensor(climatology), weights=AREA, skip_missing=True)
    expected = metrics.acc(x[..., kept], y[..., kept], torch.tensor(climatology[kept]), weights=AREA)
    torch.testing.assert_close(found, expected)

    ensemble, y = _fields(members=5)
    spread = np.sqrt((ensemble.numpy().var(1, ddof=1) * w).mean())
    error = np.sqrt(((ensemble.numpy().mean(1) - y.numpy()) ** 2 * w).mean())
    assert metrics.spread(ensemble, weights=AREA).item() == pytest.approx(spread, rel=1e-12)
    found = metrics.spread_skill(ensemble, y, weights=AREA)
    assert found.item() == pytest.approx(np.sqrt(6 / 5) * spread / error, rel=1e-12)


def test_an_ensemble_from_which_the_truth_is_drawn_has_the_spread_of_its_error():
    torch.manual_seed(0)
    drawn = torch.randn(40_000, 4, dtype=torch.float64)
    assert metrics.spread_skill(drawn[:, :3], drawn[:, 3]).item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("columns", [9, 10])
def test_spectra_are_weatherbenchs(columns):
    x = _fields()[0][..., :columns]
    modes = np.fft.rfft(x.numpy(), norm="forward")
    twins = np.array([1] + [2] * (modes.shape[-1] - 1))
    circles = 2 * np.pi * 1000 * (6357 + 6378) / 2 * np.cos(np.deg2rad(LATS))
    expected = np.abs(modes) ** 2 * twins * circles[:, None]
    np.testing.assert_allclose(metrics.spectrum(x, LATS), expected, rtol=1e-10, atol=1e-8)
    if columns % 2:  # Parseval's relation
        torch.testing.assert_close(metrics.spectrum(x).sum(-1), x.square().mean(-1))
        assert torch.equal(metrics.spectrum(x.bfloat16()), metrics.spectrum(x.bfloat16().float()))


def test_missing_values_make_nan_unless_they_are_skipped():
    x, y = torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([0.0, 0.0, 1.0])
    assert metrics.rmse(x, y).isnan()
    assert metrics.mae(x, y, skip_missing=True) == 1.5
    assert metrics.mae(x, y, weights=torch.tensor([1.0, 5.0, 3.0]), skip_missing=True) == 7 / 4
    assert metrics.mae(x[1:2], y[1:2], skip_missing=True).isnan()


@pytest.mark.parametrize("name", ["rmse", "mae", "bias", "acc", "crps", "spread", "spread_skill"])
def test_what_is_skipped_has_a_gradient_of_zero(name):
    of_members = name in ("crps", "spread", "spread_skill")
    x, y = _fields(members=5 if of_members else None)
    holes = torch.arange(y.numel()).reshape(y.shape) % 5 == 0
    own = x.masked_fill(torch.arange(x.numel()).reshape(x.shape) % 11 == 0, torch.nan).requires_grad_()
    options = {"dim": (-2, -1), "weights": AREA, "skip_missing": True}
    more = [y.masked_fill(holes, torch.nan)] if name != "spread" else []
    more += [0.1 * AREA] if name == "acc" else []
    getattr(metrics, name)(own, *more, **options).sum().backward()
    skipped = own.isnan() if name == "spread" else own.isnan() | (holes.unsqueeze(1) if of_members else holes)
    skipped = skipped.any(1, keepdim=True).expand_as(own) if of_members else skipped
    assert own.grad.isfinite().all() and not own.grad[skipped].any()
    assert name == "crps" or own.grad[~skipped].all()  # a member amid the others does not change that score


@on_ranks(4)
def test_what_metrics_send():
    mesh = world_mesh(lat=4)
    x = shard(torch.randn(3, 8, 10), mesh, (None, "lat", None))
    for weights, calls in ((None, 1), (AREA.new_ones(8, 1), 2)):
        with comm.count() as sent:
            metrics.rmse(x, x + 1, dim=(1, 2), weights=weights)
        assert [c.kind for c in sent.calls] == ["all_reduce"] * calls
        assert sent.sent_bytes < 200


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float16, torch.bfloat16])
def test_narrow_values_neither_wrap_nor_overflow(dtype):
    forecast, truth = (torch.tensor(values, dtype=dtype) for values in ([1, 250] * 40_000, [2, 0] * 40_000))
    wide, weights = [x.double() for x in (forecast, truth)], torch.ones(80_000)
    for name in ("rmse", "mae", "bias"):
        got = getattr(metrics, name)(forecast, truth, weights=weights, skip_missing=True)
        torch.testing.assert_close(got, getattr(metrics, name)(*wide).float(), rtol=1e-4, atol=0)
    members = torch.stack([forecast, truth], 1)
    torch.testing.assert_close(metrics.spread(members), metrics.spread(members.double()).float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(metrics.crps(members, truth), metrics.crps(members.double(), wide[1]).float())


def test_spread_and_skill_are_of_the_same_places():
    members, truth = torch.tensor([[1.0, 3.0], [0.0, 90.0]]), torch.tensor([3.0, torch.nan])
    got = metrics.spread_skill(members, truth, skip_missing=True)
    torch.testing.assert_close(got, metrics.spread_skill(members[:1], truth[:1]))
    torch.testing.assert_close(got, metrics.spread_skill(members.byte(), truth, skip_missing=True))


def test_what_is_refused():
    x = torch.ones(2, 4)
    for metric in (metrics.rmse, functools.partial(metrics.acc, climatology=0)):
        with pytest.raises(ShardingError, match=r"weight of shape \(2, 1\) does not broadcast to the values, \(2,\)"):
            metric(x[:, 0], x[:, 0], weights=x[:, :1])
    for metric in (metrics.rmse, metrics.mae, metrics.bias, functools.partial(metrics.acc, climatology=0)):
        with pytest.raises(ShardingError, match=r"input \(2, 4\) and target \(1, 4\) must have one shape"):
            metric(x, x[:1])
    with pytest.raises(ShardingError, match=r"crps\(alpha=1\): 1 member\(s\)"):
        metrics.crps(x[:, :1], x[:, 0])
    with pytest.raises(ValueError, match=r"spectrum\(latitudes=\(3,\)\): dim -2 has 2 rows"):
        metrics.spectrum(x, [1, 2, 3])
