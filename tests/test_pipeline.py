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
    for schedule in ("gpipe", "1f1b"):
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, schedule=schedule, stages=["blocks.2"])
        for step in (1, 2):  # gradients are added up
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
            _assert_gradients(pipe, grads, step)
