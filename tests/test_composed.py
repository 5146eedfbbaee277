"""Strategies at once: ten steps of a transformer and of a U-Net on many meshes are those of one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

SPEC = ("data", None, "lat", "lon")


class TokenBlock(nn.Module):
    """Attention and a perceptron, before each a norm; dropout of nothing, for exact steps."""

    def __init__(self, width):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Transformer(nn.Module):
    """Patches, a learned position, blocks, each recomputed in the backward pass, and patches again."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.patch, self.position = nn.Conv2d(3, 12, 2, stride=2), nn.Parameter(torch.randn(12, 9, 6))
        self.blocks = nn.ModuleList([TokenBlock(12), TokenBlock(12)])
        self.head = nn.ConvTranspose2d(12, 3, 2, stride=2)

    def forward(self, x):
        maps = self.patch(x) + self.position
        tokens = maps.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if self.checkpointed else block(tokens)
        return self.head(tokens.transpose(1, 2).unflatten(2, maps.shape[2:]))


class UNet(nn.Module):
    """Two levels; what comes up meets its skip at an odd size."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.enter = self._block(3, 8, 1)
        self.down, self.deep = self._block(8, 12, 2), self._block(12, 12, 1)
        self.leave = nn.Conv2d(20, 3, 3, padding=1)

    @staticmethod
    def _block(inputs, outputs, stride):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, stride=stride)
        return nn.Sequential(conv, nn.GroupNorm(2, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))

    def forward(self, x):
        high = self.enter(x)
        low = self.down(high)
        low = low + (checkpoint(self.deep, low, use_reentrant=False) if self.checkpointed else self.deep(low))
        return x + self.leave(torch.cat([high, F.interpolate(low, size=high.shape[-2:], mode="bilinear")], 1))


NETS = {"transformer": (Transformer, 18), "unet": (UNet, 17)}
WHOLE, CUT = {}, {"shard_weights": True, "unit_bytes": 1}
MESHES = [
    ({"lat": 2}, CUT),
    ({"lat": 3}, CUT | {"shard_weights": "keep"}),
    ({"lon": 4}, CUT),
    ({"data": 2, "lat": 2}, CUT | {"replicate": "data"}),
    ({"data": 2, "lat": 2}, WHOLE),
    ({"data": 3, "lat": 2}, CUT),
    ({"lat": 2, "lon": 2}, CUT),
    ({"lat": 3, "lon": 2}, WHOLE),
    ({"channel": 2}, CUT),
    ({"channel": 4}, WHOLE),
    ({"lat": 2, "channel": 2}, CUT),
    ({"lon": 3, "channel": 2}, WHOLE),
    ({"data": 2, "channel": 2}, CUT),
    ({"data": 2, "channel": 3}, CUT | {"shard_weights": "keep"}),
    ({"lat": 5}, WHOLE),
    ({"lat": 7}, CUT),
    ({"lon": 8}, CUT),
    ({"data": 2, "lat": 2, "lon": 2}, CUT),
    ({"data": 2, "lat": 2, "lon": 2}, CUT | {"replicate": ["data"]}),
    ({"data": 2, "lat": 2, "lon": 2}, WHOLE),
    ({"data": 2, "lat": 2, "channel": 2}, CUT),
    ({"data": 2, "lat": 2, "channel": 2}, CUT | {"replicate": "data"}),
    ({"lat": 2, "lon": 2, "channel": 2}, CUT),
    ({"lat": 2, "lon": 2, "channel": 2}, WHOLE),
    ({"lat": 4, "channel": 2}, CUT | {"shard_weights": "keep"}),
    ({"data": 4, "lat": 2}, CUT | {"replicate": "lat"}),
]
FIRST = [3, 10]


def _name(case):
    axes, options = case
    mesh = "x".join(f"{name}{size}" for name, size in axes.items())
    return f"{mesh}-{options.get('shard_weights', 'whole')}" + ("-copies" if "replicate" in options else "")


def _steps(model, batches, count=10):
    """Losses and gradient norms of clipped AdamW steps, each of two backward passes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    seen = []
    for _ in range(count):
        optimizer.zero_grad()
        with jigsaw.no_sync(model):
            first = (model(batches[0]) - batches[1]).square().mean()
            first.backward()
        second = (model(batches[1]) - batches[0]).abs().mean()
        second.backward()
        norm = jigsaw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((first.item(), second.item(), norm.item()))
    return torch.tensor(seen)


def _ten_steps(axes, options):
    torch.set_default_dtype(torch.float64)
    mesh = world_mesh(**axes)
    spec = tuple(name if name in axes else None for name in SPEC)
    for name, (make, rows) in NETS.items():
        torch.manual_seed(0)
        whole = make("shard_weights" in options)
        batch = [torch.randn(5 if "data" in axes else 2, 3, rows, 12) for _ in range(2)]
        model = jigsaw.parallelize(copy.deepcopy(whole), mesh, **options)
        found = _steps(model, [jigsaw.shard(x, mesh, spec) for x in batch])
        torch.testing.assert_close(
            found, _steps(whole, batch), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
        for (key, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=lambda m, n=key: f"{n}: {m}")


@pytest.mark.parametrize("case", [MESHES[k] for k in FIRST], ids=_name)
def test_ten_steps_of_all_strategies_at_once(case):
    run_on_ranks(math.prod(case[0].values()), _ten_steps, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for k, c in enumerate(MESHES) if k not in FIRST], ids=_name)
def test_ten_steps_on_other_meshes(case):
    run_on_ranks(math.prod(case[0].values()), _ten_steps, *case, timeout=240)
