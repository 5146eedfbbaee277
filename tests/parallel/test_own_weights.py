"""Weights that `channel` cuts, in a model's own code: sliced, made whole, added to tiles; gradients of one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.testing import run_on_ranks, world_mesh


def whole(w):
    return w.full_tensor() if isinstance(w, DTensor) else w


def whole_tile(x):
    return x.full_tensor() if isinstance(x, jigsaw.Tile) else x


USES = {
    "slice": lambda x, w: F.linear(x, w[:6]),
    "softmax": lambda x, w: F.linear(x, w.softmax(0)),
    "joined": lambda x, w: F.linear(x, torch.cat([w[:6], w[6:]])),
    "flipped": lambda x, w: F.linear(x, w.flip(0)),
    "scaled": lambda x, w: F.linear(x, w * 0.5),
    "whole": lambda x, w: F.linear(x, whole(w)),
    "whole and turned": lambda x, w: F.linear(x, whole(w).t()),
    "convolution": lambda x, w: F.conv1d(x.mT, w[:6, :, None]).mT,
    "convolution with a bias": lambda x, w: F.conv1d(x.mT, w.softmax(0)[:, :, None], w[:, 0]).mT,
    "convolution with a whole bias": lambda x, w: F.conv1d(x.mT, w[:, :, None], whole(w)[:, 0]).mT,
    "product with a whole bias": lambda x, w: F.linear(x, w, whole(w)[:, 0]),
    "matmul": lambda x, w: x @ w[:6].t(),
    "einsum": lambda x, w: torch.einsum("btd,ed->bte", x, w),
    "row": lambda x, w: x + w[0],
    "sum": lambda x, w: x * w.sum(),
    "mean": lambda x, w: x + 0.1 * w.square().mean(),
    "statistic": lambda x, w: F.linear(x, whole(w) * whole_tile(x.mean((0, 1), keepdim=True)).reshape(12)),
    "number": lambda x, w: x / w.detach().norm().item() + w.detach().max().item() * (1 if w.mean() > 0 else 2),
    "where": lambda x, w: torch.where(x > 0, x, w[1]),
    "norm": lambda x, w: F.layer_norm(x, (12,), w[0], w[1]),
    "rows joined": lambda x, w: torch.cat([x, w[None, :7].expand(4, 7, 12)], 1),
}


class Net(nn.Module):
    """A layer, and another one whose weight is used by hand, before it or behind it."""

    def __init__(self, use, is_first):
        super().__init__()
        self.layer, self.own = nn.Linear(12, 12), nn.Linear(12, 12)
        self.use, self.is_first = use, is_first

    def forward(self, x):
        if self.is_first:
            y = self.use(x, self.own.weight)
            return F.linear(y, whole(self.layer.weight)[:, : y.shape[-1]])
        return self.use(self.layer(x), self.own.weight)


def gradients(use, is_first, x, cut=lambda model: model):
    torch.manual_seed(0)
    model = cut(Net(USES[use], is_first).double())
    model(x).square().mean().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def on_mesh(axes, spec, options):
    mesh = world_mesh(**axes)
    torch.manual_seed(1)
    x = torch.randn(4, 7, 12, dtype=torch.float64)
    for use in USES:
        for is_first in (True, False):
            expected = gradients(use, is_first, x)
            tile = jigsaw.shard(x, mesh, spec)
            found = gradients(use, is_first, tile, lambda model: jigsaw.parallelize(model, mesh, **options))
            assert found.keys() == expected.keys(), use
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13, msg=f"{use} {name}")


@pytest.mark.parametrize(
    ("axes", "spec", "options"),
    [
        ({"channel": 2}, (None, None, None), {}),
        pytest.param({"channel": 3}, (None, None, None), {}, marks=pytest.mark.slow),
        ({"lat": 2, "channel": 2}, (None, "lat", None), {}),
        pytest.param(
            {"lat": 2, "channel": 2},
            (None, "lat", None),
            {"shard_weights": True, "unit_bytes": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_own_uses_of_cut_weights_have_the_gradient_of_one_device(axes, spec, options):
    ranks = 3 if axes == {"channel": 3} else 2 * len(axes)
    run_on_ranks(ranks, on_mesh, axes, spec, options, timeout=240)  # 42 nets are cut, each after a run on paper


def refused():
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(ShardingError, match="no axis is left that cuts it further"):
        jigsaw.parallelize(copy.deepcopy(model), world_mesh(channel=2), shard_weights=True, mp_policy=policy)


def test_a_policy_needs_weights_that_are_gathered():
    run_on_ranks(2, refused)


def with_leaves_of_its_own():
    mesh = world_mesh(channel=2)
    net = jigsaw.parallelize(nn.Sequential(nn.Linear(12, 12)), mesh)
    tile = jigsaw.shard(torch.ones(4, 12), mesh, (None, None))
    free = torch.zeros(12, requires_grad=True)
    with pytest.raises(ShardingError, match="from leaves that are summed and leaves that are averaged"):
        tile + net[0].weight.full_tensor()[0] * (1 + free)


def test_a_whole_weight_beside_a_leaf_that_nothing_averages_is_refused():
    run_on_ranks(2, with_leaves_of_its_own)
