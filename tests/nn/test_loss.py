"""Losses: one global number, equal on every rank, with the gradient of the whole tensor."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw.errors import ShardingError
from jigsaw.nn.losses.loss import weighted_mean
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]
SPACE = (None, None, "lat", "lon")
AREA = torch.linspace(0.1, 1, 7, dtype=torch.float64)[:, None]
CLASS_WEIGHT = torch.tensor([0.2, 1.0, 2.0], dtype=torch.float64)


def _area_mean(x, y):
    if isinstance(x, Tile):
        return weighted_mean((x - y).square(), AREA)
    return ((x - y).square() * AREA).sum() / (torch.ones_like(x) * AREA).sum()


ELEMENTWISE = {
    "mse": nn.MSELoss(),
    "mse sum": nn.MSELoss(reduction="sum"),
    "mse none": nn.MSELoss(reduction="none"),
    "l1": nn.L1Loss(),
    "smooth l1": nn.SmoothL1Loss(beta=0.7),
    "huber": nn.HuberLoss(delta=0.4),
    "weighted mse": lambda x, y: F.mse_loss(x, y, weight=AREA.expand(2, 3, 7, 10)),
    "weighted huber": lambda x, y: F.huber_loss(x, y, weight=AREA.expand(2, 3, 7, 10)),
    "area mean": _area_mean,
    "logits": lambda x, y: F.binary_cross_entropy_with_logits(x, (y > 0).to(x.dtype)),
    "logits by class": lambda x, y: F.binary_cross_entropy_with_logits(
        x, (y > 0).to(x.dtype), pos_weight=CLASS_WEIGHT[:, None, None]
    ),
    "probabilities": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach()),
    "divergence": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="sum"),
    "divergence by sample": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "logits at zero": lambda x, y: F.binary_cross_entropy_with_logits(x - x.detach().clamp(max=0), (y > 0).to(x.dtype)),
    "gaussian": lambda x, y: F.gaussian_nll_loss(x, y, y.square() + 0.1),
    "gaussian of small variances": lambda x, y: F.gaussian_nll_loss(x, y, y.square(), eps=0.5),
    "gaussian of one variance": lambda x, y: F.gaussian_nll_loss(x, y, 0.3, full=True),
    "gaussian of a variance a row": lambda x, y: F.gaussian_nll_loss(x, y, y.square().mean(-1) + 0.1),
}

CLASSES = {
    "cross entropy": nn.CrossEntropyLoss(),
    "weighted, smoothed": nn.CrossEntropyLoss(weight=CLASS_WEIGHT, label_smoothing=0.1),
    "ignoring": nn.CrossEntropyLoss(ignore_index=1),
    "ignoring, smoothed": nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
    "sum": nn.CrossEntropyLoss(reduction="sum", weight=CLASS_WEIGHT),
    "none": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.2),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, 1), y, weight=CLASS_WEIGHT),
}


def _run(name, x, y):
    return {**ELEMENTWISE, **CLASSES}[name](x, y)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_loss(name):
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        functools.partial(_run, name), [torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)], MESHES, spec=[SPACE, SPACE]
    )


@pytest.mark.parametrize("name", ["mse", "huber", "weighted mse", "area mean"])
def test_a_target_with_another_halo_and_a_whole_target(name):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(functools.partial(_run, name), [x, y], MESHES, spec=[SPACE, SPACE], halo={2: 2})
    assert_same_on_every_mesh(functools.partial(_run, name), [x, y], MESHES, spec=[SPACE, None])


@pytest.mark.parametrize("name", CLASSES)
def test_class_loss(name):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randint(0, 3, (2, 7, 10))
    assert_same_on_every_mesh(functools.partial(_run, name), [x, y], MESHES, spec=[SPACE, (None, "lat", "lon")])


@pytest.mark.parametrize("name", ["ignoring", "ignoring, smoothed"])
def test_ignored_positions_may_be_infinite(name):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randint(0, 3, (2, 7, 10))
    x[:, 2] = x[:, 2].masked_fill(y == 1, -float("inf"))
    assert_same_on_every_mesh(functools.partial(_run, name), [x, y], MESHES, spec=[SPACE, (None, "lat", "lon")])


def test_probabilities_of_classes():
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10).softmax(1)
    assert_same_on_every_mesh(functools.partial(_run, "weighted, smoothed"), [x, y], MESHES, spec=[SPACE, SPACE])


@on_ranks(2)
def test_what_losses_refuse():
    mesh = world_mesh(lat=2)
    x = shard(torch.randn(2, 4, 6), mesh, (None, "lat", None))
    flat = shard(torch.randn(2, 4, 6, 5), mesh, (None, None, "lat", None)).flatten(1, 2)
    with pytest.raises(ShardingError, match=r"the classes .dim 1. .* were flattened together; unflatten"):
        F.cross_entropy(flat, torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ShardingError, match=r"input \(2, 4, 6\) and target \(2, 4, 1\)"):
        F.mse_loss(x, torch.zeros(2, 4, 1))
    with pytest.raises(ShardingError, match="torch drops the weight"):
        F.l1_loss(x, x, weight=torch.ones(2, 4, 6))
    for loss, target in (
        (F.mse_loss, x),
        (F.binary_cross_entropy_with_logits, x),
        (F.cross_entropy, x),
        (F.nll_loss, x),
    ):
        with pytest.raises(ShardingError, match="use reduction="):
            loss(x, target, size_average=False)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@on_ranks(2)
def test_an_unknown_reduction_of_class_losses_is_refused(loss):
    mesh = world_mesh(lat=2)
    x, target = (
        shard(torch.randn(1, 3, 4), mesh, (None, None, "lat")),
        shard(torch.ones(1, 4).long(), mesh, (None, "lat")),
    )
    with pytest.raises(ValueError, match="'avg' is not a valid value for reduction"):
        loss(x, target, reduction="avg")
