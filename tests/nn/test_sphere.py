"""torch-harmonics' layers, installed as they are, on cut spheres.  The nets that are made of them: tests/zoo."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh

harmonics = pytest.importorskip("torch_harmonics", reason="a package of the zoo: make zoo")

FINE, COARSE = (13, 24), (7, 12)
SPEC = (None, "channel", "lat", "lon")
MESHES = [{"lat": 4}, {"lon": 4}, {"channel": 2, "lat": 2}, {"lat": 2, "lon": 2}]


class Convolutions(nn.Module):
    """Down, up and at one size, in groups, and with fewer channels."""

    def __init__(self):
        super().__init__()
        disco, up = harmonics.DiscreteContinuousConvS2, harmonics.DiscreteContinuousConvTransposeS2
        self.alike = disco(4, 4, FINE, FINE, (3, 3), groups=2)
        self.fused = disco(4, 6, FINE, FINE, (3, 3), groups=2, fused=True)
        self.fewer = disco(4, 2, FINE, COARSE, (3, 3))  # a custom autograd.Function, with a weight
        self.down = disco(4, 4, FINE, COARSE, (2, 3))
        self.up = up(4, 4, COARSE, FINE, (3, 3))

    def forward(self, x):
        high = self.up(self.down(x + self.alike(x)))
        return self.fused(high), self.fewer(high)


class Neighbors(nn.Module):
    """Down, up and at one size; the kernels are for single precision."""

    def __init__(self):
        super().__init__()
        attend = harmonics.NeighborhoodAttentionS2
        self.alike = attend(4, FINE, FINE, num_heads=2, use_qknorm=True, out_channels=6)
        self.down = attend(4, FINE, COARSE, num_heads=2)
        self.up = attend(4, COARSE, FINE, num_heads=1)

    def forward(self, x):
        x = x.float()
        low = self.down(F.interpolate(x, size=COARSE, mode="nearest"), x, x)
        return self.alike(x + self.up(x, low, low)), low[:, :2]


def _pass(model, x, g):
    """Both outputs, and the gradients of the input and the weights, of which a rank has its part."""
    model.zero_grad()
    y = model(x)
    sum((a * b).sum() for a, b in zip(y, g, strict=True)).backward()
    return [*y, x.grad], [p.grad for p in model.parameters()]


@pytest.mark.slow
@on_ranks(4, timeout=240)
def test_convolutions_and_neighbors_on_every_mesh():
    warnings.simplefilter("ignore")
    x, *g = (torch.randn(s).double() for s in [(2, 4, *FINE), (2, 6, *FINE), (2, 2, *COARSE)])
    for model, near in ((Convolutions().double(), 1e-9), (Neighbors(), 1e-4)):
        for p in model.parameters():
            p.data.normal_(std=0.3)
        expected, weights = _pass(model, x.clone().requires_grad_(), g)
        weights = [w.clone() for w in weights]
        largest = max(w.abs().max().item() for w in weights)  # a bias of keys has a gradient of rounding alone
        for axes in MESHES:
            tile = jigsaw.shard(x, world_mesh(**axes), SPEC)
            tile.local.requires_grad_()
            found, parts = _pass(model, tile, g)
            for part in parts:
                torch.distributed.all_reduce(part)
            for got, want in zip([y.full_tensor() for y in found] + parts, expected + weights, strict=True):
                torch.testing.assert_close(got, want, rtol=near, atol=near * largest)


@on_ranks(2)
def test_what_is_sent_are_the_rows_that_a_filter_reaches():
    mesh = world_mesh(lat=2)
    layer = harmonics.DiscreteContinuousConvS2(4, 4, (24, 48), (24, 48), (3, 3))
    x = jigsaw.shard(torch.randn(1, 4, 24, 48), mesh, (None, None, "lat", None))
    with torch.no_grad(), comm.count() as traffic:
        layer(x)
    reach = layer.psi_col_idx // 48 - layer.psi_row_idx
    assert sum(c.sent_bytes for c in traffic.calls) == reach.max().item() * 4 * 48 * 4
    with pytest.raises(ShardingError, match="which is 2 dims flattened together; unflatten it"):
        layer(x.unflatten(1, (2, 2)).flatten(2, 3))
