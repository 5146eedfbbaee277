"""`jigsaw.pipeline`: losses and gradients of every schedule are those of one process with the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.cut import ShardingError
from jigsaw.testing import on_ranks, world_mesh

SPEC = (None, None, "lat", None)


def _block(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.GELU())


class Chain(nn.Module):
    """Blocks in a list, with a parameter of the net itself."""

    def __init__(self, blocks=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.position = nn.Parameter(torch.randn(4, 33, 1) / 4)
        self.blocks = nn.ModuleList(_block(4) for _ in range(blocks))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.stem(x) + self.position
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.position.mean()


def _model(make, *args):
    torch.manual_seed(0)
    return make(*args).double()


def _batch(rows=33, samples=8):
    torch.manual_seed(1)
    return torch.randn(samples, 3, rows, 6).double(), torch.randn(samples, 2, rows, 6).double()


def _expected(model, x, y, batches=4):
    model = copy.deepcopy(model)
    losses = [F.mse_loss(model(a), b) / batches for a, b in zip(x.chunk(batches), y.chunk(batches), strict=True)]
    sum(losses).backward()
    return sum(losses).item(), {n: p.grad for n, p in model.named_parameters()}


def _assert_gradients(pipe, grads, scale=1.0, atol=1e-12):
    found = {n: p.grad for n, p in pipe.named_parameters()}
    assert found
    for name, grad in found.items():
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(whole, scale * grads[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("axes", [{"pipe": 2, "lat": 2}, {"pipe": 2}], ids=["pipe2-lat2", "pipe2"])
def test_each_schedule(axes):
    from jigsaw.testing import run_on_ranks

    run_on_ranks(4 if len(axes) == 2 else 2, _check_schedules, axes)


def _check_schedules(axes):
    mesh = world_mesh(**axes)
    model, (x, y) = _model(Chain), _batch()
    loss, grads = _expected(model, x, y)
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for schedule, stages in SCHEDULES.items():
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, schedule=schedule, stages=stages)
        for step in (1, 2):  # gradients are added up
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12), schedule
            _assert_gradients(pipe, grads, step)


SCHEDULES = {
    "gpipe": ["blocks.2"],
    "1f1b": None,
    "interleaved_1f1b": ["blocks.0", "blocks.1", "blocks.2"],
    "interleaved_zero_bubble": ["blocks.1", "blocks.2", "blocks.3"],
    "zbv": None,
    "dualpipev": ["blocks.1", "blocks.2", "head"],
}


# -- nets that are no chains ------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two levels; skips of each, and of the input, over several stages; an activation that all stages call."""

    def __init__(self):
        super().__init__()
        self.act, self.pool = nn.GELU(), nn.AvgPool2d(2)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.merge = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(7, 2, 1)

    def forward(self, x):
        a = self.act(self.stem(x))
        b = self.act(self.down(self.pool(a)))
        c = self.up(self.act(self.bottom(b)) + b)
        d = self.merge(torch.cat([F.pad(c, (0, 0, 0, a.shape[-2] - c.shape[-2])), a], 1))
        return self.out(torch.cat([d, x], 1))


@pytest.mark.parametrize("rows", [33, 10])
@on_ranks(4)
def test_skips_travel_through_the_stages_between(rows):
    mesh = world_mesh(pipe=2, lat=2)
    model, (x, y) = _model(UNet), _batch(rows)
    loss, grads = _expected(model, x, y)
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for schedule, stages in (("1f1b", None), ("interleaved_zero_bubble", ["down", "up", "out"])):
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, schedule=schedule, stages=stages)
        assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
        _assert_gradients(pipe, grads)
