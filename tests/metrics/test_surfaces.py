"""Dice, surface Dice and Hausdorff's distance: scipy's distance transforms and MONAI, on every mesh."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from monai.metrics import compute_dice, compute_hausdorff_distance, compute_surface_dice
from scipy import ndimage

from jigsaw import comm, metrics
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import shard


def _blob(shape, center, radius, seed):
    """A ball with a ragged surface and a few specks."""
    axes = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    apart = sum((a - c) ** 2 for a, c in zip(axes, center, strict=True))
    noise = np.random.default_rng(seed).random(shape)
    return torch.tensor((apart < (radius * (0.7 + 0.3 * noise)) ** 2) | (noise > 0.998))


def _by_distance_transforms(found, true, spacing, percentile=95):
    """MONAI's definition, with scipy: surfaces by erosion, distances by the transform of the other surface."""
    surfaces = [mask & ~ndimage.binary_erosion(mask) for mask in (found.numpy(), true.numpy())]
    if not surfaces[0].any() or not surfaces[1].any():
        return np.inf if surfaces[0].any() or surfaces[1].any() else np.nan
    away = [ndimage.distance_transform_edt(~s, sampling=spacing) for s in surfaces]
    return max(np.percentile(away[1][surfaces[0]], percentile), np.percentile(away[0][surfaces[1]], percentile))


def _cases():
    shape, spacing = (33, 25, 19), (2.5, 0.8, 1.1)
    truth = _blob(shape, (15, 12, 9), 8, 0)
    yield _blob(shape, (13, 14, 8), 7, 1), truth, spacing
    yield truth, truth, spacing
    yield _blob(shape, (0, 0, 0), 6, 2), _blob(shape, (32, 24, 18), 6, 3), spacing  # far apart, at the volume's ends
    yield torch.ones(shape, dtype=torch.bool), truth, spacing
    yield torch.zeros(shape, dtype=torch.bool), truth, spacing
    yield torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool), spacing
    yield _blob((50, 41), (20, 20), 15, 0), _blob((50, 41), (25, 18), 12, 1), (0.7, 1.3)
    yield _blob((90,), (20,), 15, 0), _blob((90,), (25,), 30, 1), (0.5,)


@pytest.mark.parametrize("case", range(8))
def test_distances_are_those_of_distance_transforms(case):
    found, true, spacing = list(_cases())[case]
    for percentile in (95, 100, 50):
        got = metrics.hausdorff95(found, true, spacing, percentile=percentile)
        assert got.dtype == torch.float64
        np.testing.assert_allclose(got, _by_distance_transforms(found, true, spacing, percentile), rtol=1e-12)


@pytest.fixture
def default_of_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_surfaces_under_another_default_dtype(default_of_float64):
    found, true, spacing = next(iter(_cases()))
    expected = _by_distance_transforms(found, true, spacing)
    np.testing.assert_allclose(metrics.hausdorff95(found, true, spacing), expected, rtol=1e-12)


def test_many_cells_and_pairs_in_several_rounds(monkeypatch):
    monkeypatch.setattr("jigsaw.metrics.surfaces._MOST_PAIRS", 1 << 12)
    found, true = _blob((70, 60, 50), (30, 30, 20), 24, 0), _blob((70, 60, 50), (40, 28, 26), 22, 1)
    expected = _by_distance_transforms(found, true, (1, 1, 1))
    np.testing.assert_allclose(metrics.hausdorff95(found, true), expected, rtol=1e-12)


def _two_classes():
    found, true, spacing = next(_cases())
    shape = found.shape
    return (
        torch.stack([found, _blob(shape, (20, 10, 9), 5, 4)])[None].float(),
        torch.stack([true, _blob(shape, (19, 12, 7), 6, 5)])[None].float(),
        spacing,
    )


def test_classes_are_measured_as_by_monai():
    found, true, spacing = _two_classes()
    expected = compute_hausdorff_distance(found, true, include_background=True, percentile=95, spacing=list(spacing))
    got = metrics.hausdorff95(found, true, spacing)
    torch.testing.assert_close(got, expected.double(), rtol=1e-6, atol=0)
    for tolerance in ([2.0, 0.9], [1.2, 1.2]):
        expected = compute_surface_dice(found, true, tolerance, include_background=True, spacing=list(spacing))
        assert 0.1 < expected.min() < expected.max() < 1
        got = metrics.surface_dice(found, true, tolerance, spacing)
        torch.testing.assert_close(got, expected.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics.surface_dice(found, true, 1.2, spacing), got)  # one for all classes
    got = metrics.dice(found, true, dim=(2, 3, 4))
    torch.testing.assert_close(got, compute_dice(found, true).double(), rtol=1e-6, atol=0)
    weight = torch.arange(19)
    expected = 2 * (found * true * weight).sum() / ((found + true) * weight).sum()
    assert metrics.dice(found, true, weights=weight).item() == pytest.approx(expected.item(), rel=1e-6)
    nothing = torch.zeros_like(true)
    assert metrics.dice(nothing, nothing).isnan()
    assert metrics.surface_dice(nothing, nothing, 1.0).isnan().all()
    assert metrics.surface_dice(found, nothing, 1e6).tolist() == [[0, 0]]
    rows = torch.eye(50)[:, :, None, None]  # one voxel each, 0.1 from the next, which is not a number of base two
    assert metrics.surface_dice(rows, rows.roll(1, 0), 0.1, (0.1, 1.0, 1.0))[1:].eq(1).all()


def _assert_alike(axes, spec):
    found, true, spacing = _two_classes()
    expected, dice = metrics.hausdorff95(found, true, spacing), metrics.dice(found, true, dim=(2, 3, 4))
    tiles = [shard(x, world_mesh(**axes), spec) for x in (found, true)]
    torch.testing.assert_close(metrics.hausdorff95(*tiles, spacing), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics.hausdorff95(tiles[0], true, spacing), expected, rtol=1e-12, atol=0)
    near = metrics.surface_dice(found, true, [1.2, 2.0], spacing)
    torch.testing.assert_close(metrics.surface_dice(*tiles, [1.2, 2.0], spacing), near, rtol=1e-15, atol=0)
    torch.testing.assert_close(metrics.dice(*tiles, dim=(2, 3, 4)).full_tensor(), dice, rtol=1e-15, atol=0)


@pytest.mark.slow
@on_ranks(4)
def test_on_four_ranks():
    _assert_alike({"z": 4}, (None, None, "z", None, None))
    _assert_alike({"z": 2, "y": 2}, (None, None, "z", "y", None))
    _assert_alike({"classes": 2, "x": 2}, (None, "classes", None, None, "x"))
    empty = shard(torch.zeros(2, 33, 25, 19), world_mesh(z=4), (None, "z", None, None))
    assert metrics.hausdorff95(empty, empty).isnan().all()
    assert metrics.hausdorff95(empty, _two_classes()[1][0]).isinf().all()


@pytest.mark.slow
@on_ranks(3)
def test_on_three_ranks():
    _assert_alike({"z": 3}, (None, None, "z", None, None))


@pytest.mark.slow
@on_ranks(2)
def test_what_surfaces_send():
    found, true, spacing = next(_cases())
    tiles = [shard(x.float(), world_mesh(z=2), ("z", None, None)) for x in (found, true)]
    with comm.count() as sent:
        metrics.hausdorff95(*tiles, spacing)
    most = 0
    for mask in (found, true):
        surface = mask.numpy() & ~ndimage.binary_erosion(mask.numpy())
        most += max(surface[:17].sum(), surface[17:].sum())
    rows = sum(c.sent_bytes for c in sent.calls if c.kind == "exchange")
    assert rows == 2 * 4 * 25 * 19  # a row of each mask, in float32
    assert sum(c.sent_bytes for c in sent.calls if c.kind == "all_gather") == 16 * most + 4 * 8
    assert sent.sent_bytes < tiles[0].local.nbytes


def test_what_is_refused():
    x = torch.ones(2, 3, 4)
    with pytest.raises(ShardingError, match=r"input \(2, 3, 4\) and target \(2, 3\) must have one shape"):
        metrics.hausdorff95(x, x[..., 0])
    with pytest.raises(
        ShardingError, match=r"hausdorff95\(spacing=\(1, 1, 1, 1\)\): one to three numbers, one for each"
    ):
        metrics.hausdorff95(x, x, (1, 1, 1, 1))
    with pytest.raises(ShardingError, match=r"surface_dice\(tolerance=\[1, 2, 3\]\): one number, or one"):
        metrics.surface_dice(x, x, [1, 2, 3], (1, 1))
    for function in (partial(metrics.surface_dice, tolerance=1.0), metrics.hausdorff95):
        with pytest.raises(ShardingError, match=r"\(spacing=1.0\): one to three numbers, .* such as \(1.0, 1.0\)"):
            function(torch.zeros(2, 5, 5), torch.zeros(2, 5, 5), spacing=1.0)
    with pytest.raises(ShardingError, match=r"surface_dice\(spacing=\(\)\): one to three numbers"):
        metrics.surface_dice(x, x, 1.0, ())
    for percentile in (-5, 150, float("nan")):
        with pytest.raises(ValueError, match=r"hausdorff95\(percentile=.*\): a percentile is from 0 to 100"):
            metrics.hausdorff95(x, x, percentile=percentile)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"surface_dice\(tolerance=.*\): a distance of 0 or more"):
            metrics.surface_dice(x, x, tolerance)
    for step in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"hausdorff95\(spacing=.*\): the size of a voxel"):
            metrics.hausdorff95(x, x, (1, 1, step))
