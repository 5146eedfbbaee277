"""Losses of margins, distances and sequences, their operands cut anyhow or plain, against the whole tensors."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from random_cuts import any_spec, assert_as_the_whole

from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import shard


def _signs(y):
    return torch.where(y.detach() > 0, 1, -1)


def _labels(y, classes):
    return (y.detach().sigmoid() * classes).long()


ROWS = [(7, 5), (7, 5), (7, 5)]
WEIGHT = torch.linspace(0.5, 2, 5, dtype=torch.float64)
LOSSES = {
    "margin_ranking": (ROWS, lambda x, y, z: F.margin_ranking_loss(x, y, _signs(z), 0.5)),
    "margin_ranking, broadcast": (
        [(7, 1), (7, 5), (1, 5)],
        lambda x, y, z: F.margin_ranking_loss(x, y, _signs(z), 0.5),
    ),
    "hinge_embedding": (ROWS[:2], lambda x, y: F.hinge_embedding_loss(x, _signs(y), 0.3)),
    "hinge_embedding, none": (
        ROWS[:2],
        lambda x, y: F.hinge_embedding_loss(x, y.detach().sign().long() * 0 + 2, reduction="none"),
    ),
    "cosine_embedding": (
        [(7, 5), (7, 5), (7,)],
        lambda x, y, t: F.cosine_embedding_loss(x, y, _signs(t), 0.1, reduction="none"),
    ),
    "cosine_embedding of one": ([(5,), (5,), (1,)], lambda x, y, t: F.cosine_embedding_loss(x, y, _signs(t).sum())),
    "triplet_margin": (ROWS, lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True)),
    "triplet_margin, sum": (ROWS, lambda x, y, z: F.triplet_margin_loss(x, y, z, 2.0, 1, reduction="sum")),
    "triplet_margin_with_distance": (
        ROWS,
        lambda x, y, z: F.triplet_margin_with_distance_loss(
            x, y, z, distance_function=lambda a, b: (a - b).abs().amax(-1), swap=True, reduction="none"
        ),
    ),
    "multi_margin": ([(7, 5), (7,)], lambda x, t: F.multi_margin_loss(x, _labels(t, 5), 2, 0.7, WEIGHT)),
    "multi_margin, none": ([(7, 5), (7,)], lambda x, t: F.multi_margin_loss(x, _labels(t, 5), reduction="none")),
    "multilabel_margin": (ROWS[:2], lambda x, y: F.multilabel_margin_loss(x, _labels(y, 7).clamp_max(5) - 1)),
    "multilabel_soft_margin": (ROWS[:2], lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).double(), WEIGHT)),
}


def _check(mesh, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for shapes, loss in LOSSES.values():
        for _ in range(3):
            specs = [any_spec(generator, s, mesh.mesh_dim_names) for s in shapes]
            if specs[0] is None:
                specs[0] = (None,) * len(shapes[0])
            assert_as_the_whole(loss, shapes, specs, mesh)


@on_ranks(2)
def test_losses_on_two_ranks():
    _check(world_mesh(lat=2), 0)


@on_ranks(3)
def test_losses_on_three_ranks():
    _check(world_mesh(lat=3), 1)


@pytest.mark.slow
@on_ranks(4)
def test_losses_on_two_axes():
    _check(world_mesh(lat=2, lon=2), 2)


@on_ranks(2)
def test_arguments_that_do_not_fit_are_refused_by_name():
    tile = shard(torch.ones(4, 3), world_mesh(lat=2), ("lat", None))
    with pytest.raises(RuntimeError, match=r"margin_ranking_loss: operands of shapes .* must have as many dims"):
        F.margin_ranking_loss(tile, tile, torch.ones(4))
    with pytest.raises(RuntimeError, match=r"cosine_embedding_loss of shapes .* pass \[batch, features\] twice"):
        F.cosine_embedding_loss(tile, tile, tile)
    with pytest.raises(ValueError, match="margin must be greater than 0, got -1"):
        F.triplet_margin_with_distance_loss(tile, tile, tile, margin=-1)
    with pytest.raises(ValueError, match="multi_margin_loss: p=3 is not 1 or 2"):
        F.multi_margin_loss(tile, torch.zeros(4, dtype=torch.int64), p=3)
    with pytest.raises(
        ShardingError, match=r"hinge_embedding_loss\(size_average=, reduce=\) on tiles is not supported"
    ):
        F.hinge_embedding_loss(tile, tile, size_average=True)
