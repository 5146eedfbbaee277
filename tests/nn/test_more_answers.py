"""Functions of other names and compositions: what they give is that of the whole tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

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


@on_ranks(2)
def test_dtypes_and_places_are_those_of_torch():
    mesh, numbers = world_mesh(lat=2), torch.arange(12).reshape(4, 3)
    for dtype in (torch.float64, torch.int32):
        x = numbers.to(dtype)
        tile = shard(x, mesh, ("lat", None))
        for data in ([0.5], 3, torch.tensor([1, 2]), [True]):
            assert tile.new_tensor(data).full_tensor().equal(x.new_tensor(data))
            assert tile.new_tensor(data).dtype == dtype
        assert tile.new_tensor(tile.double()).dtype == dtype
        assert tile.new_tensor([2], dtype=torch.float32).dtype == torch.float32
        for value in (9, 2.5):
            assert F.threshold(tile, 4, value).full_tensor().equal(F.threshold(x, 4, value))
        assert F.threshold(tile * 1, 4, 9, inplace=True).full_tensor().equal(F.threshold(x, 4, 9))
        assert torch.result_type(tile, 1.5) == torch.result_type(x, 1.5)
        assert torch.result_type(torch.ones(1, dtype=torch.float16), tile) == torch.result_type(torch.ones(1).half(), x)
    for first, places in ((numbers[:1], numbers % 2), (numbers, numbers[:, :1] % 4), (numbers, -numbers[:2] % 7 - 3)):
        tile = shard(first.double(), mesh, (None, "lat"))
        assert (
            torch.take_along_dim(tile, places, 0).full_tensor().equal(torch.take_along_dim(first.double(), places, 0))
        )


@on_ranks(2)
def test_prelu_under_autocast_has_the_dtype_of_torch():
    x, weight = torch.randn(2, 3, 7, 4), torch.rand(3)
    tile = shard(x, world_mesh(lat=2), (None, None, "lat", None))
    with torch.autocast("cpu", torch.bfloat16):
        want, got = F.prelu(x, weight), F.prelu(tile, weight)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=0)
