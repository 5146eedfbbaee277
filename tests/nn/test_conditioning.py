"""How published nets condition a layer (adaLN, FiLM) or leave a branch out (stochastic depth): plain torch on tiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import jigsaw
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

MESHES = [{"lat": 1}, {"lat": 3}, {"lon": 4}, {"data": 2, "lat": 2}, {"lat": 2, "lon": 2}]
SPACE, SAMPLE = ("data", None, "lat", "lon"), ("data", None)


class AdaptiveLayerNorm(nn.Module):
    """DiT's block: a norm without weights, shifted and scaled by what is known of the sample, and a gated branch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6, elementwise_affine=False)
        self.of_sample = nn.Sequential(nn.SiLU(), nn.Linear(4, 18))
        self.branch = nn.Linear(6, 6)

    def forward(self, x, known):
        tokens = x.flatten(2).transpose(1, 2)
        shift, scale, gate = self.of_sample(known).chunk(3, dim=1)
        inner = self.norm(tokens) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return tokens + gate.unsqueeze(1) * self.branch(inner)


class FeatureModulation(nn.Module):
    """FiLM: a scale and a shift of each channel after a group norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.of_sample = nn.GroupNorm(3, 6), nn.Linear(4, 12)

    def forward(self, x, known):
        scale, shift = self.of_sample(known)[:, :, None, None].chunk(2, dim=1)
        return self.norm(x) * (scale + 1) + shift


class StochasticDepth(nn.Module):
    """timm's DropPath around a convolution: a sample keeps the branch, or has none of it."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x, keep=0.5):
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0:
            kept.div_(keep)
        return x + self.branch(x) * kept


@pytest.mark.parametrize("module", [AdaptiveLayerNorm, FeatureModulation])
@pytest.mark.parametrize("known", ["tile", "whole"])
def test_conditional_norms_on_every_mesh(module, known):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 6, 7, 10), torch.randn(3, 4)]
    spec = [SPACE, SAMPLE if known == "tile" else None]
    assert_same_on_every_mesh(module(), inputs, MESHES, spec=spec)


@pytest.mark.parametrize("module", [AdaptiveLayerNorm, FeatureModulation])
def test_conditional_norms_in_parallel(module):
    torch.manual_seed(0)
    inputs = [torch.randn(3, 6, 7, 10), torch.randn(3, 4)]
    assert_same_on_every_mesh(module(), inputs, [{"data": 2, "lat": 2}], spec=[SPACE, SAMPLE], build=jigsaw.parallelize)


@on_ranks(4)
def test_stochastic_depth_leaves_out_the_same_samples_on_every_rank():
    torch.manual_seed(0)
    model, x = StochasticDepth().double(), torch.randn(8, 6, 7, 10, dtype=torch.float64)
    branch, meshes = model.branch(x) * 2, []
    for axes in ({"lat": 4}, {"lat": 2, "lon": 2}, {"data": 2, "lon": 2}, {"data": 4}):
        torch.manual_seed(torch.distributed.get_rank())  # as in a job, where ranks differ
        tile = shard(x, world_mesh(**axes), ("data", None, "lat", "lon"))
        added = (model(tile) - tile).full_tensor()
        kept = (added.flatten(1).abs().sum(1) > 0).to(x.dtype)
        torch.testing.assert_close(added, branch * kept[:, None, None, None], rtol=1e-9, atol=1e-12)
        assert 0 < kept.sum() < 8
        meshes.append(kept.tolist())
    assert meshes == meshes[:1] * 4
