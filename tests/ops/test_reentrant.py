"""Reentrant activation checkpointing of tiles: the numbers of plain torch, also nested, and gradients reduced once."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

F64 = torch.float64
MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]
reentrant = functools.partial(checkpoint, use_reentrant=True)


class Block(nn.Module):
    """Halos, a global statistic, a weight used twice, and a condition that meets tiles and plain tensors."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(1, channels)
        self.gain, self.shift = nn.Linear(2, channels), nn.Parameter(torch.randn(channels))

    def forward(self, x, condition):
        y = F.gelu(self.norm(self.first(x))) * self.gain(condition)[:, :, None, None]
        y = self.first(y) + self.shift[:, None, None] * condition.sum() + y.mean()
        return x + y, condition.sin() + self.shift.sum(), y.square().mean() * condition.sum()


class Twice(nn.Module):
    """A checkpoint in a checkpoint."""

    def __init__(self, channels):
        super().__init__()
        self.inner, self.outer = Block(channels), nn.Conv2d(channels, channels, 1)

    def forward(self, x, condition):
        y, condition, level = reentrant(self.inner, x, condition)
        return self.outer(y) * level, condition


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lift = nn.Linear(3, 2), nn.Conv2d(2, 4, 1)
        self.blocks, self.twice = nn.ModuleList([Block(4), Block(4)]), Twice(4)
        self.scale = nn.Parameter(torch.ones(2, 2))

    def forward(self, x, times):
        x, condition = self.lift(x), self.embed(times)
        level = x.mean()
        for block in self.blocks:
            x, condition, some = reentrant(block, x, condition + level)
            level = level + 0.1 * some
        x, condition = reentrant(self.twice, x, condition)
        weighed = reentrant(lambda x, w, k: (x * w.sum() + k, k * w), x, self.scale, condition.mean())
        return (
            weighed[0] + x.amax(),
            weighed[1].sum() * level,
            checkpoint_sequential([nn.Tanh(), nn.Sigmoid()], 2, x, use_reentrant=True),
        )


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.values())))
def test_the_numbers_are_those_of_torch(mesh):
    torch.manual_seed(0)
    specs = [(None, None, "lat", "lon" if "lon" in mesh else None), None]
    batch = [torch.randn(2, 2, 13, 10), torch.randn(2, 3)]
    assert_same_on_every_mesh(Net(), batch, [mesh], spec=specs, build=jigsaw.parallelize)


CUT = [{"lat": 2}, {"lat": 2, "lon": 2}, pytest.param({"lat": 3}, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("unit_bytes", [1, 4 << 20])
@pytest.mark.parametrize("mesh", CUT, ids=lambda m: "x".join(map(str, m.values())))
def test_weights_that_are_cut_give_the_same(mesh, unit_bytes):
    torch.manual_seed(0)
    specs = [(None, None, "lat", "lon" if "lon" in mesh else None), None]
    batch = [torch.randn(2, 2, 13, 10), torch.randn(2, 3)]
    build = functools.partial(jigsaw.parallelize, shard_weights=True, unit_bytes=unit_bytes)
    assert_same_on_every_mesh(Net(), batch, [mesh], spec=specs, build=build)


class Plain(nn.Module):
    """What needs no `parallelize`: tiles and parameters alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.attend = nn.Conv2d(3, 3, 3, padding=1, stride=2), nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x):
        x = reentrant(self.conv, x)
        y, _ = reentrant(lambda t: self.attend(t, t, t), x.flatten(2).transpose(1, 2))
        return reentrant(torch.sub, x.flatten(2), y.transpose(1, 2))


def test_parts_of_gradients_without_parallelize():
    torch.manual_seed(0)
    assert_same_on_every_mesh(Plain(), torch.randn(2, 3, 13, 10), [MESHES[1], MESHES[4]], spec=SPEC)


SPEC = (None, None, "lat", "lon")


# -- what is sent, random numbers, autocast ---------------------------------------------------------------------------


def _three_layers():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.3), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers).double()


def _step(run, mesh, tile, **options):
    net = jigsaw.parallelize(_three_layers(), mesh)
    torch.manual_seed(5)
    tile = Tile(tile.local.clone().requires_grad_(), tile.layout, mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16, **options):
        y = tile
        for layer in net:
            y = run(layer, y)
    loss = y.double().square().sum()
    with comm.count() as counted:
        loss.backward()
    sent = {kind: [c.sent_bytes for c in counted.calls if c.kind == kind] for kind in ("all_reduce", "exchange")}
    return sent, [y.full_tensor().detach(), tile.grad.full_tensor(), *(p.grad for p in net.parameters())]


@on_ranks(2)
def test_gradients_are_reduced_once_and_dropout_and_autocast_are_those_of_before():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(2, 4, 13, 10, dtype=F64), mesh, (None, None, "lat", None))
    for on in (False, True):
        sent, wanted = _step(lambda layer, y: layer(y), mesh, tile, enabled=on)
        again, found = _step(reentrant, mesh, tile, enabled=on)
        assert again["all_reduce"] == sent["all_reduce"] and len(sent["all_reduce"]) == 1
        assert sum(again["exchange"]) == 2 * sum(sent["exchange"]) > 0  # halos of the second time
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)
    state = torch.get_rng_state()
    y = reentrant(nn.Dropout(0.5), tile.requires_grad_())
    drawn = torch.rand(3)
    y.sum().backward()
    torch.set_rng_state(state)
    assert torch.equal(nn.Dropout(0.5)(tile).full_tensor(), y.full_tensor()) and torch.equal(torch.rand(3), drawn)


# -- what is refused --------------------------------------------------------------------------------------------------


class SharedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1)])

    def forward(self, x):
        return reentrant(self.layers[0], reentrant(self.layers[0], x))


@on_ranks(2)
def test_what_would_lose_gradients_is_refused():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(2, 4, 13, 10), mesh, (None, None, "lat", None)).requires_grad_()
    loss = jigsaw.parallelize(SharedUnit(), mesh, shard_weights=True, unit_bytes=1)(tile).sum()
    with pytest.raises(ShardingError, match=r"runs FSDPConv2d, a unit .* a second time .*use_reentrant=False"):
        loss.backward()
    whole = nn.Conv2d(4, 4, 3, padding=1)
    jigsaw.parallelize(SharedUnit(), mesh, shard_weights=True)(tile).sum().backward()  # one unit: no such trouble
    gain = nn.Parameter(torch.ones(4))
    y, shift = reentrant(lambda x: (whole(x), gain * 2), tile)
    with pytest.raises(ShardingError, match=r"plain tensor of shape \(4,\) that was made of parameters alone"):
        (y + shift[:, None, None]).sum().backward()
    weight = torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh, [torch.distributed.tensor.Shard(0)])
    with pytest.raises(ShardingError, match=r"of a Tile and a DTensor of shape \(4, 4\).*use_reentrant=False"):
        reentrant(lambda x, w: x, tile, weight)
    with pytest.raises(RuntimeError, match=r"incompatible with .grad"):
        torch.autograd.grad(reentrant(F.gelu, tile).sum(), tile.local)
