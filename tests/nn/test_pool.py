"""Pooling on tiles is that of the whole tensor."""

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

POOLS = {
    "max 2": nn.MaxPool2d(2),
    "max 3 by 2": nn.MaxPool2d(3, stride=2, padding=1),
    "max, dilated": nn.MaxPool2d(3, stride=1, padding=1, dilation=(2, 1)),
    "max, ceil": nn.MaxPool2d(3, stride=2, ceil_mode=True),
    "max, ceil and padding": nn.MaxPool2d((4, 3), stride=3, padding=(2, 1), ceil_mode=True),
    "mean 2": nn.AvgPool2d(2),
    "mean 3 by 2": nn.AvgPool2d(3, stride=2, padding=1),
    "mean of what is there": nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
    "mean, ceil": nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True),
    "mean, ceil, of what is there": nn.AvgPool2d(
        (4, 3), stride=3, padding=(2, 0), ceil_mode=True, count_include_pad=False
    ),
    "mean, own divisor": nn.AvgPool2d(3, stride=1, padding=1, divisor_override=5),
    "global mean": nn.AdaptiveAvgPool2d(1),
    "mean of rows": nn.AdaptiveAvgPool2d((1, None)),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("shape", [(13, 10), (33, 7)])
def test_pool2d(name, shape):
    assert_same_on_every_mesh(POOLS[name], torch.randn(2, 3, *shape), MESHES, spec=SPACE)


@pytest.mark.parametrize("name", POOLS)
def test_pool2d_of_thin_pieces_and_halos(name):
    x = torch.randn(2, 3, 13, 10)
    assert_same_on_every_mesh(POOLS[name], x, [{"lat": 4}], spec=SPACE, split={2: (0, 1, 1, 12, 13)})
    assert_same_on_every_mesh(
        POOLS[name], x, [{"lat": 1}, {"lat": 2, "lon": 2}], spec=SPACE, halo={2: 2, 3: 1}, periodic=(3,)
    )


@pytest.mark.parametrize("size", [(4, 3), (6, 3), (2, 1), (None, 9)])
def test_adaptive_mean(size):
    x = torch.randn(2, 3, 12, 9)
    assert_same_on_every_mesh(nn.AdaptiveAvgPool2d(size), x, [{"lat": 2}, {"lat": 3}, {"lat": 4}], spec=SPACE)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_pools_in_one_and_three_dims(ranks):
    line, volume = torch.randn(2, 3, 33), torch.randn(1, 2, 10, 7, 5)
    for pool in (
        nn.MaxPool1d(3, 2, 1),
        nn.AvgPool1d(3, 2, 1),
        nn.AvgPool1d(4, 3, 2, True, False),
        nn.AdaptiveAvgPool1d(1),
    ):
        assert_same_on_every_mesh(pool, line, [{"lat": ranks}], spec=(None, None, "lat"))
        assert_same_on_every_mesh(pool, line[0], [{"lat": ranks}], spec=(None, "lat"))
    for pool in (nn.MaxPool3d(3, 2, 1), nn.AvgPool3d(3, 2, 1), nn.AdaptiveAvgPool3d(1)):
        assert_same_on_every_mesh(pool, volume, [{"z": ranks}], spec=(None, None, "z", None, None))


@on_ranks(2)
def test_a_pool_of_aligned_windows_sends_nothing():
    tile = shard(torch.randn(1, 2, 12, 8), world_mesh(lat=2), SPACE)
    with comm.count() as sent:
        nn.MaxPool2d(2)(nn.AvgPool2d(3, 3)(tile))
    assert sent.messages == 0


@on_ranks(2)
def test_indices_where_no_spatial_dim_is_cut():
    x = torch.randn(2, 3, 6, 8)
    values, indices = nn.MaxPool2d(2, return_indices=True)(shard(x, world_mesh(data=2), ("data", None, None, None)))
    expected, at = nn.MaxPool2d(2, return_indices=True)(x)
    assert torch.equal(values.full_tensor(), expected) and torch.equal(indices.full_tensor(), at)


@on_ranks(2)
def test_integers_have_maxima_too():
    x = torch.arange(-24, 24).reshape(1, 1, 6, 8)
    y = nn.MaxPool2d(3, 2, 1)(shard(x, world_mesh(lat=2), SPACE))
    assert torch.equal(y.full_tensor(), nn.MaxPool2d(3, 2, 1)(x))


@on_ranks(2)
def test_wrong_uses_name_the_rule():
    tile = shard(torch.randn(1, 2, 12, 8), world_mesh(lat=2), SPACE)
    with pytest.raises(ShardingError, match=r"adaptive pooling to 0: every size must be at least 1"):
        nn.AdaptiveAvgPool2d(0)(tile)
    with pytest.raises(ShardingError, match=r"padding=2 of a pool must lie within 0\.\.1"):
        nn.MaxPool2d(2, padding=2)(tile)
    with pytest.raises(ShardingError, match="it needs 4 or 5 dims"):
        nn.MaxPool3d(2)(tile.squeeze(0).flatten(0, 1))


@on_ranks(2)
def test_positions_of_maxima_where_a_rank_has_no_channel():
    x = torch.randn(1, 1, 4, 6)
    tile = shard(x, world_mesh(channel=2), (None, "channel", None, None))
    values, indices = nn.MaxPool2d(2, return_indices=True)(tile)
    expected, at = nn.MaxPool2d(2, return_indices=True)(x)
    assert torch.equal(values.full_tensor(), expected)
    assert torch.equal(indices.full_tensor(), at)


@on_ranks(3)
def test_adaptive_maxima_with_positions_where_a_rank_has_no_channel():
    x = torch.randn(3, 4, 6)
    tile = shard(x, world_mesh(lat=3), (None, "lat", None), split={1: (0, 2, 2, 4)})
    values, indices = nn.AdaptiveMaxPool1d(3, return_indices=True)(tile)
    expected, at = nn.AdaptiveMaxPool1d(3, return_indices=True)(x)
    assert torch.equal(values.full_tensor(), expected)
    assert torch.equal(indices.full_tensor(), at)
