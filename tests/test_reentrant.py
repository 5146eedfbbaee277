"""Reentrant activation checkpointing of tiles: the numbers of plain torch, also nested, and gradients reduced once."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import jigsaw
from jigsaw.testing import assert_same_on_every_mesh

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
