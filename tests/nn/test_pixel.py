"""Pixel shuffle and unshuffle on tiles are those of the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1, "lon": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]


@pytest.mark.parametrize("mesh", MESHES)
def test_there_and_back(mesh):
    assert_same_on_every_mesh(nn.PixelShuffle(2), torch.randn(2, 8, 7, 10), [mesh], spec=SPACE)
    assert_same_on_every_mesh(nn.PixelUnshuffle(3), torch.randn(2, 2, 33, 12), [mesh], spec=SPACE)
    assert_same_on_every_mesh(
        nn.PixelUnshuffle(2), torch.randn(2, 2, 14, 10), [mesh], spec=SPACE, halo={2: 1, 3: 3}, periodic=(3,)
    )
    assert_same_on_every_mesh(
        nn.PixelShuffle(2), torch.randn(2, 4, 7, 10), [mesh], spec=SPACE, halo={2: 1, 3: 3}, periodic=(3,)
    )


def test_a_halo_of_channels_is_dropped():
    for layer in (nn.PixelShuffle(2), nn.PixelUnshuffle(2)):
        x = torch.randn(2, 8, 14, 10)
        assert_same_on_every_mesh(layer, x, MESHES, spec=SPACE, halo={1: 2, 2: 1}, periodic=(1,))


def test_empty_pieces():
    for layer in (nn.PixelShuffle(2), nn.PixelUnshuffle(2)):
        assert_same_on_every_mesh(
            layer, torch.randn(4, 14, 6), [{"lat": 4}], spec=(None, "lat", None), split={1: (0, 1, 1, 13, 14)}
        )


@on_ranks(2)
def test_aligned_blocks_send_nothing_and_wrong_uses_are_named():
    tile = shard(torch.randn(1, 8, 12, 8), world_mesh(lat=2), SPACE)
    with comm.count() as sent:
        y = nn.PixelUnshuffle(2)(nn.PixelShuffle(2)(tile))
    assert sent.messages == 0 and y.layout == tile.layout
    with pytest.raises(ShardingError, match="needs a multiple of 9 channels, got 8"):
        nn.PixelShuffle(3)(tile)
    with pytest.raises(ShardingError, match="needs multiples of 5"):
        nn.PixelUnshuffle(5)(tile)
    cut = shard(torch.randn(1, 8, 12, 8), world_mesh(lat=2), (None, "lat", None, None))
    with pytest.raises(ShardingError, match="channels that become rows are cut; cut another dim"):
        nn.PixelShuffle(2)(cut)
    with pytest.raises(ShardingError, match="channels that rows join are cut"):
        nn.PixelUnshuffle(2)(cut)


@on_ranks(2)
def test_a_change_in_place_of_shuffled_channels_does_not_reach_the_input():
    x = torch.randn(2, 2, 4, 3)  # two groups of one channel lie as they did
    tile = shard(x, world_mesh(lat=2), (None, None, "lat", None)).requires_grad_()
    nn.functional.channel_shuffle(tile, 2).fill_(-1)
    assert torch.equal(tile.full_tensor(), x)
