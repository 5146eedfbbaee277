"""Token mixing along cut dims: exact, every rank keeps its tokens, and the bytes are those of the bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.nn.products.mixing import Mix, mix_tokens
from jigsaw.nn.weights import cut_parameter
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]
GRID = (None, None, "lat", "lon")


class Mixer(nn.Module):
    """A block of an MLP-Mixer as anyone would write it; tokens are the points of a lat x lon grid."""

    def __init__(self, tokens, hidden, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))
        self.channels = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x):
        b, c, h, w = x.shape
        x = x.flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return x.transpose(1, 2).reshape(b, c, h, w)


@pytest.mark.parametrize("size", [(7, 10), (13, 3), (4, 4)], ids=str)
@pytest.mark.parametrize("hidden", [5, 33])
def test_an_unmodified_mixer(size, hidden):
    h, w = size
    assert_same_on_every_mesh(Mixer(h * w, hidden, 3), torch.randn(2, 3, h, w), MESHES, spec=GRID)


def test_cut_points_that_no_rule_makes_are_kept():
    assert_same_on_every_mesh(
        Mixer(70, 5, 3), torch.randn(2, 3, 7, 10), [{"lat": 3}], spec=GRID, split={2: (0, 1, 1, 7)}
    )
    assert_same_on_every_mesh(Mixer(70, 5, 3), torch.randn(2, 3, 7, 10), [{"lat": 2}], spec=GRID, halo={2: 1})


def test_a_mixer_on_a_channel_mesh():
    spec = (None, "channel", "lat", None)
    assert_same_on_every_mesh(
        Mixer(35, 11, 4), torch.randn(2, 4, 7, 5), [{"lat": 2, "channel": 2}, {"channel": 3}], spec=spec
    )


def test_tokens_of_a_plain_tensor_are_mixed_as_by_a_linear():
    mix, x = Mix(7, 5, dims=(1, 2), mesh=world_mesh(lat=1)), torch.randn(2, 1, 7, 3)
    (y, _) = map(mix, [x, x])
    torch.testing.assert_close(y, nn.functional.linear(x.flatten(1, 2).mT, mix.weight, mix.bias).mT)


def _along_lat(x, w, b):
    return mix_tokens(x, w, b, dims=-2) if isinstance(x, Tile) else (w @ x) + b[:, None]


def _along_both(x, w, b):
    if isinstance(x, Tile):
        return mix_tokens(x, w, b, dims=(-2, -1))
    return (x.flatten(-2) @ w.t() + b).unflatten(-1, x.shape[-2:])


def test_along_one_spatial_dim():
    for out in (7, 12):
        whole = [torch.randn(2, 3, 7, 10), torch.randn(out, 7), torch.randn(out)]
        assert_same_on_every_mesh(_along_lat, whole, MESHES, spec=[GRID, None, None])


def test_along_two_spatial_dims():
    whole = [torch.randn(2, 3, 7, 5), torch.randn(35, 35), torch.randn(35)]
    assert_same_on_every_mesh(_along_both, whole, MESHES, spec=[GRID, None, None])


@on_ranks(4)
def _layouts():
    mesh = world_mesh(lat=2, lon=2)
    x = shard(torch.randn(2, 3, 7, 10), mesh, GRID)
    y = mix_tokens(x, torch.randn(70, 70), dims=(2, 3))
    assert y.layout == x.layout
    y = mix_tokens(x, torch.randn(7, 7), dims=2)
    assert y.layout == x.layout
    y = mix_tokens(x, torch.randn(9, 70), dims=(2, 3))
    assert y.shape == (2, 3, 9)
    assert y.layout.dim_axes(2) == ("lat", "lon")


def test_the_result_keeps_the_cuts():
    _layouts()


class CutMixer(nn.Module):
    """The token part of a mixer with weights that are stored 1/P."""

    def __init__(self, plain, mesh):
        super().__init__()
        first, self.act, last = plain.inner
        self.inner = nn.Sequential(*(_cut(layer, mesh) for layer in (first, self.act, last)))

    def forward(self, x):
        return x + self.inner(x)


class Plain(nn.Module):
    def __init__(self, tokens, hidden):
        super().__init__()
        self.inner = nn.Sequential(OverTokens(tokens, hidden), nn.Tanh(), OverTokens(hidden, tokens))

    def forward(self, x):
        return x + self.inner(x)


class OverTokens(nn.Linear):
    """A linear over the flattened last two dims, or over the last of three."""

    def forward(self, x):
        y = super().forward(x.flatten(2))
        return y.unflatten(-1, (7, 5)) if y.shape[-1] == 35 else y


def _cut(layer, mesh):
    if not isinstance(layer, nn.Linear):
        return layer
    for name, p in list(layer.named_parameters()):
        setattr(layer, name, cut_parameter(p.detach(), mesh, ("lat", "lon")))
    return layer


def test_weights_at_rest_on_their_way_to_the_tokens():
    assert_same_on_every_mesh(
        Plain(35, 6), torch.randn(2, 3, 7, 5), MESHES, spec=GRID, build=CutMixer, gradients="parts"
    )


@on_ranks(4)
def _module():
    mesh = world_mesh(lat=2, lon=2)
    layer = Mix(70, 70, dims=(-2, -1), mesh=mesh, axis=("lat", "lon"), dtype=torch.float64)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {"weight": (70, 70), "bias": (70,)}
    assert layer.weight.to_local().shape == ((18, 17)[mesh.get_rank() % 2], 70)
    whole = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    x = shard(whole, mesh, GRID)
    with torch.no_grad(), comm.count() as count:
        y = layer(x)
    weight, bias = layer.weight.full_tensor(), layer.bias.full_tensor()
    expected = (whole.flatten(2) @ weight.t() + bias).unflatten(-1, (7, 10))
    torch.testing.assert_close(y.full_tensor(), expected.detach())
    assert y.layout == x.layout
    own = x.local.numel()
    assert count.received_bytes <= 8 * (6 * 70 - own + (70 * 70 + 70) // 4 + 71)


def test_the_module_holds_a_share_of_its_weight():
    _module()


@on_ranks(4)
def _bytes(tokens, out):
    mesh = world_mesh(lat=2, lon=2)
    h, w = tokens
    x = shard(torch.randn(2, 3, h, w), mesh, GRID)
    x.local.requires_grad_()
    weight = torch.randn(out, h * w, requires_grad=True)
    with comm.count() as forward:
        y = mix_tokens(x, weight, dims=(-2, -1))
    with comm.count() as backward:
        y.local.sum().backward()
    return forward.received_bytes / 4, backward.received_bytes / 4


def test_bytes_of_the_bound():
    # R = 6 rows; as many tokens out as in: partial sums of y, (1-1/4) 6 M and the same backward
    assert set(_bytes((4, 6), 24)) == {(0.75 * 6 * 24, 0.75 * 6 * 24)}
    # many tokens out: x travels, (1-1/4) 6 N forward, x again and its gradient backward
    assert set(_bytes((4, 6), 96)) == {(0.75 * 6 * 24, 2 * 0.75 * 6 * 24)}


@on_ranks(1)
def _refused():
    mesh = world_mesh(lat=1)
    x = shard(torch.randn(2, 3, 4), mesh, (None, None, None))
    with pytest.raises(ShardingError, match="must be consecutive; permute the tile first"):
        mix_tokens(x, torch.randn(8, 8), dims=(0, 2))


def test_dims_that_are_not_consecutive():
    _refused()


BETWEEN = {
    "convolution over the dim": lambda x: torch.conv1d(x, torch.ones(6, 6, 1)),
    "convolution beside the dim": lambda x: torch.conv1d(x.transpose(0, 1), torch.ones(2, 2, 3)).transpose(0, 1),
    "pool": lambda x: torch.nn.functional.avg_pool1d(x, 3),
}


@pytest.mark.parametrize("layer", BETWEEN)
@on_ranks(2)
def test_a_dim_remembers_its_own_past_whatever_ran_before(layer):
    """Equal cuts that two contractions made of different ones, or none."""
    mesh = world_mesh(lat=2)
    there, back = torch.randn(6, 10), torch.randn(10, 6)
    alone = shard(torch.randn(2, 3, 6), mesh, (None, None, "lat"))

    def points_after_both(hidden):
        y = BETWEEN[layer](hidden.transpose(1, 2)).transpose(1, 2)
        return torch.nn.functional.linear(y, back).layout.cuts[2].points

    assert points_after_both(alone) == (0, 5, 10)  # nothing is known of it: balanced
    for points in ((0, 3, 10), (0, 8, 10)):
        tokens = shard(torch.randn(2, 3, 10), mesh, (None, None, "lat"), split={2: points})
        hidden = torch.nn.functional.linear(tokens, there)
        assert hidden.layout.cuts[2].points == alone.layout.cuts[2].points
        assert points_after_both(hidden) == points
        met = (alone + hidden, torch.cat([alone, hidden], 1), alone @ hidden.transpose(1, 2), alone.add_(hidden))
        assert [tuple(y.shape) for y in met] == [(2, 3, 6), (2, 6, 6), (2, 3, 3), (2, 3, 6)]
