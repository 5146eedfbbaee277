"""Padding on tiles is that of the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1, "lon": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]


class Pad(torch.nn.Module):
    def __init__(self, pads, mode, value=None):
        super().__init__()
        self.how = pads, mode, value

    def forward(self, x):
        return F.pad(x, *self.how)


@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 3), (2, 0, 5, 1), (-1, 2, -3, 0), (-2, -2, -1, -4), (1, 1, 0, 0)])
@pytest.mark.parametrize("mode", ["constant", "circular", "reflect", "replicate"])
def test_pad(pads, mode):
    if mode != "constant" and len(pads) == 2:
        pads = (*pads, 0, 0)
    assert_same_on_every_mesh(Pad(pads, mode), torch.randn(2, 3, 13, 10), MESHES, spec=SPACE)
    assert_same_on_every_mesh(
        Pad(pads, mode), torch.randn(2, 3, 13, 10), MESHES, spec=SPACE, halo={2: 2, 3: (1, 3)}, periodic=(3,)
    )


@pytest.mark.parametrize("points", [(0, 0, 7, 8, 13), (0, 1, 1, 12, 13), (0, 13, 13, 13, 13), (0, 2, 3, 4, 13)])
@pytest.mark.parametrize("mode", ["constant", "circular", "reflect", "replicate"])
def test_pad_of_thin_and_empty_pieces(points, mode):
    for pads in [(1, 2, 3, 4), (0, 0, 12, 12), (0, 0, -6, -6)]:
        assert_same_on_every_mesh(
            Pad(pads, mode), torch.randn(2, 3, 13, 10), [{"lat": 4}], spec=SPACE, split={2: points}
        )


@pytest.mark.parametrize("pads", [(1, 2), (0, 0), (-1, 1)])
@pytest.mark.parametrize("mode", ["constant", "circular", "reflect", "replicate"])
def test_an_empty_piece_of_a_dim_that_is_not_padded(pads, mode):
    x, spec = torch.randn(2, 3, 5), ("batch", "channel", None)
    for mesh, points in [({"batch": 3}, {0: (0, 2, 2, 2)}), ({"channel": 2}, {1: (0, 3, 3)})]:
        assert_same_on_every_mesh(Pad(pads, mode), x, [mesh], spec=spec, split=points)
    assert_same_on_every_mesh(Pad((*pads, 0, 0), mode), torch.randn(2, 3, 2, 5), [{"lat": 3}], spec=SPACE)


@on_ranks(2)
def test_a_padding_that_torch_refuses_is_refused_by_a_rank_without_rows_too():
    tile = shard(torch.randn(1, 3, 5), world_mesh(data=2), ("data", None, None))
    with pytest.raises(RuntimeError, match="Padding size should be less than"):
        F.pad(tile, (5, 0), "reflect")


@pytest.mark.parametrize("pads", [(0, 0, -1, -1), (0, 0, 0, -7), (1, 0, 0, 0)])
@on_ranks(2)
def test_a_change_in_place_does_not_reach_the_input(pads):
    x = torch.randn(1, 2, 12, 8)
    tile = shard(x, world_mesh(lat=2), SPACE)
    for mode in ("constant", "circular", "reflect", "replicate"):
        F.relu(F.pad(tile, pads, mode), inplace=True)
        assert torch.equal(tile.full_tensor(), x)


def test_pad_of_batch_channel_and_by_a_value():
    x = torch.randn(2, 3, 7, 10)
    meshes = [{"data": 2}, {"lat": 2}, {"data": 2, "lat": 2}]
    assert_same_on_every_mesh(
        Pad((1, 0, 2, 1, 1, 1, 3, 0), "constant", 1.5), x, meshes, spec=("data", None, "lat", None)
    )
    assert_same_on_every_mesh(Pad((0, 0, 0, 0, 1, 2), "constant", -2.0), x, meshes, spec=("data", None, "lat", None))


@on_ranks(2)
def test_a_constant_pad_sends_nothing_and_keeps_integers():
    x = torch.arange(24).reshape(1, 1, 6, 4)
    with comm.count() as sent:
        y = F.pad(shard(x, world_mesh(lat=2), SPACE), (1, 1, 2, 1), value=7)
    assert all(c.kind != "exchange" or not c.messages for c in sent.calls)
    assert torch.equal(y.full_tensor(), F.pad(x, (1, 1, 2, 1), value=7))


@on_ranks(2)
def test_wrong_uses_name_the_rule():
    tile = shard(torch.randn(1, 2, 12, 8), world_mesh(lat=2), SPACE)
    with pytest.raises(ShardingError, match="mode='mirror': use 'constant', 'circular', 'reflect' or 'replicate'"):
        F.pad(tile, (0, 0, 1, 1), "mirror")
    with pytest.raises(ShardingError, match="two entries a dim"):
        F.pad(tile, (1, 1, 1))
    with pytest.raises(ShardingError, match="wider than its 12 rows"):
        F.pad(tile, (0, 0, 13, 0), "circular")
    with pytest.raises(ShardingError, match="a reflection has at most 11 rows"):
        F.pad(tile, (0, 0, 12, 0), "reflect")
