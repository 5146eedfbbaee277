"""Channels-last tensors stay so: cut, through layers, and their gradients; the numbers are the whole tensor's."""

import torch
import torch.nn.functional as F
from torch import nn

from jigsaw import parallelize
from jigsaw.comm.exchange import memory_format_of
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import from_local, shard


def _is_last(x):
    """Slices of what is channels-last too: an interpolation leaves rows out."""
    return memory_format_of(x) == torch.channels_last


def _net(channels):
    return nn.Sequential(
        nn.Conv2d(4, channels, 3, padding=1),  # by strips
        nn.GELU(),
        nn.Conv2d(channels, channels, 7, padding=3, groups=2),
        nn.BatchNorm2d(channels),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(channels, 4, 3, stride=2, padding=1, padding_mode="circular"),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Upsample(size=(40, 31)),
        nn.ConvTranspose2d(4, 6, 2, 2),
    )


def _compare_layers(layout, spec):
    mesh = world_mesh(**layout)
    torch.manual_seed(0)
    whole = torch.randn(2, 4, 42, 36, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    net = _net(6).double().to(memory_format=torch.channels_last)
    leaf = whole.clone().requires_grad_()
    expected, steps = leaf, []
    for layer in net:
        expected = layer(expected)
        steps.append(_is_last(expected))
    expected.square().sum().backward()
    wanted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net = parallelize(net, mesh)
    x = shard(whole, mesh, spec)
    assert _is_last(x.local) and _is_last(x.clone().local) and _is_last(x.owned().local)
    x.requires_grad_()
    y = x
    for layer, is_last in zip(net, steps, strict=True):
        y = layer(y)
        assert _is_last(y.local) or not is_last, layer
    y.square().sum().backward()
    assert _is_last(x.grad.local)
    torch.testing.assert_close(y.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)
    torch.testing.assert_close([p.grad for p in net.parameters()], wanted)
    return sum(steps)


@on_ranks(2)
def test_channels_last_nets_stay_so_on_two_ranks():
    assert _compare_layers({"lat": 2}, (None, None, "lat", None)) == 9


@on_ranks(4)
def test_channels_last_nets_stay_so_on_four_ranks():
    assert _compare_layers({"lat": 2, "lon": 2}, (None, None, "lat", "lon")) == 9


@on_ranks(3)
def test_ways_into_channels_last():
    mesh, whole = world_mesh(lat=3), torch.randn(2, 4, 13, 6)
    last, spec = whole.contiguous(memory_format=torch.channels_last), (None, None, "lat", None)
    for tile in (
        shard(last, mesh, spec),
        shard(last, mesh, spec, halo={2: 1}),
        shard(last, mesh, (None, None, None, None)),
        shard(whole, mesh, spec).to(memory_format=torch.channels_last),
        shard(whole, mesh, spec).contiguous(memory_format=torch.channels_last),
        shard(last, mesh, spec).redistribute((None, None, None, "lat")),
        shard(last, mesh, spec, split={2: (0, 1, 9, 13)}).with_layout(shard(whole, mesh, spec).layout),
        shard(last, mesh, spec).double().float(),
        from_local(shard(last, mesh, spec).local, mesh, spec, whole.shape),
    ):
        assert _is_last(tile.local) and tile.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(tile.full_tensor(), whole)
        assert _is_last((tile + tile.mean(dim=(2, 3), keepdim=True)).local)
    assert _is_last(shard(last, mesh, spec).full_tensor())
    assert shard(whole, mesh, spec).local.is_contiguous()
    assert shard(whole.movedim(1, 3), mesh, ("lat", None, None, None), split={0: (0, 1, 2, 2)}).shape == (2, 13, 6, 4)
    volume = torch.randn(1, 3, 9, 5, 4).contiguous(memory_format=torch.channels_last_3d)
    tile = F.max_pool3d(shard(volume, mesh, (None, None, "lat", None, None)), 3, 1, 1)
    assert tile.local.is_contiguous(memory_format=torch.channels_last_3d) and not tile.local.is_contiguous()
    assert torch.equal(tile.full_tensor(), F.max_pool3d(volume, 3, 1, 1))
