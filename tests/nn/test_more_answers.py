"""Functions of other names and compositions: what they give is that of the whole tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw.cut import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile_making import shard

SPACE = (None, None, "lat", "lon")


def answers(x):
    left, right = torch.broadcast_tensors(x[:, :1], x.mean((2, 3), keepdim=True))
    rain = x.detach().exp()
    return [
        nn.ChannelShuffle(3)(x),
        left * right,
        F.poisson_nll_loss(x, rain),
        F.poisson_nll_loss(x, rain, full=True, reduction="none"),
        F.poisson_nll_loss(x.exp(), rain, log_input=False, reduction="sum"),
        (x * 2).abs_(),
        (x + 1).true_divide_(2),
        (x * 2).copysign_(rain) + (x * 1).gt_(0.0),
        torch.special.expit(x) + torch.special.ndtr(x) + torch.special.gammaln(rain),
    ]


def test_answers_are_those_of_the_whole():
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(answers, torch.randn(2, 6, 7, 5, dtype=torch.float64), meshes, spec=SPACE)


@on_ranks(2)
def test_groups_must_divide_the_channels():
    tile = shard(torch.randn(1, 4, 6, 6), world_mesh(lat=2), SPACE)
    with pytest.raises(ShardingError, match="4 channels into 3 groups: they must divide evenly"):
        F.channel_shuffle(tile, 3)
