"""Attention whose heads are cut along a mesh axis: exact, with weights that are stored 1/P."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.nn.attention.multi_head_attention import MultiheadAttention
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh

MESHES = [{"channel": 2}, {"channel": 3}, {"lat": 2, "channel": 2}, {"channel": 2, "lat": 2}]


class Attention(nn.Module):
    """Self attention over the tokens of a grid, or attention of some tokens to all."""

    def __init__(self, heads=3, crossed=False, need_weights=False, batch_first=True, bias=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, heads, batch_first=batch_first, bias=bias)
        self.crossed, self.need_weights = crossed, need_weights

    def forward(self, x, other=None):
        other = x if other is None else other
        out, weights = self.attention(x, other, other.tanh() if self.crossed else other, need_weights=self.need_weights)
        return out if weights is None else (out, weights)


def _cut(model, mesh):
    old = model.attention
    new = MultiheadAttention(
        12,
        old.num_heads,
        bias=old.in_proj_bias is not None,
        batch_first=old.batch_first,
        dtype=torch.float64,
        mesh=mesh,
    )
    state = {}
    for name, target in new.state_dict().items():
        value = old.state_dict()[name]
        cut = isinstance(target, DTensor)
        state[name] = distribute_tensor(value, target.device_mesh, target.placements) if cut else value
    new.load_state_dict(state)
    model.attention = new
    return model


def _randomised(model):
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.5)
    return model


MODELS = {
    "heads that divide": Attention(6),
    "heads that do not": Attention(4),
    "sequence first": Attention(batch_first=False),
    "with weights": Attention(need_weights=True),
    "without bias": Attention(bias=False),
}


@pytest.mark.parametrize("features", [pytest.param(None, marks=pytest.mark.slow), "channel"])
@pytest.mark.parametrize("name", MODELS)
def test_cut_heads(name, features):
    model = _randomised(MODELS[name])
    spec = ("lat", None, features) if name == "sequence first" else (None, "lat", features)
    x = torch.randn(7, 2, 12) if name == "sequence first" else torch.randn(2, 7, 12)
    meshes = MESHES if features else MESHES[2:]
    assert_same_on_every_mesh(model, x, meshes, spec=spec, build=_cut, gradients="parts")


@pytest.mark.parametrize("features", [None, "channel"])
def test_attention_to_other_tokens(features):
    model = _randomised(Attention(crossed=True))
    spec = (None, "lat", features)
    inputs = [torch.randn(2, 7, 12), torch.randn(2, 10, 12)]
    assert_same_on_every_mesh(model, inputs, MESHES[2:], spec=[spec, spec], build=_cut, gradients="parts")


@pytest.mark.parametrize("crossed", [False, True])
def test_torchs_own_module_on_cut_features(crossed):
    model = _randomised(Attention(crossed=crossed))
    assert_same_on_every_mesh(model, torch.randn(2, 7, 12), MESHES, spec=(None, "lat", "channel"))


@on_ranks(4)
def _shares():
    layer = MultiheadAttention(12, 4, mesh=world_mesh(channel=4))
    plain = nn.MultiheadAttention(12, 4)
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert layer.in_proj_weight.to_local().shape == (9, 12)
    with pytest.raises(ShardingError, match="has 3 heads for 4 ranks along 'channel'; use more heads or fewer ranks"):
        MultiheadAttention(12, 3, mesh=world_mesh(channel=4))
    with pytest.raises(ShardingError, match="cannot be cut along heads"):
        MultiheadAttention(12, 4, add_bias_kv=True, mesh=world_mesh(channel=4))


def test_every_rank_holds_a_share():
    _shares()


def test_on_a_mesh_without_the_axis_it_is_torchs():
    layer = MultiheadAttention(12, 3, mesh=jigsaw.init_mesh(lat=1))
    assert not any(isinstance(p, DTensor) for p in layer.parameters())
