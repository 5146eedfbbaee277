"""Attention over cut tokens: outputs, weights and every gradient are those of the whole tensor."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw import comm
from jigsaw.layout import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile import shard

MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]
GRID = (None, None, "lat", "lon")  # [batch, features, lat, lon]
MASK = torch.randn(35, 35, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
ALLOWED = (MASK > -1) | torch.eye(35, dtype=torch.bool)


def _tokens(x):
    """[batch, 12, 7, 5] -> q, k, v [batch, 2 heads, 35 tokens, 2]."""
    return x.flatten(2).unflatten(1, (3, 2, 2)).transpose(-1, -2).unbind(1)


KERNELS = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "additive mask": {"attn_mask": MASK},
    "boolean mask": {"attn_mask": ALLOWED},
}


def _kernel(name, x):
    q, k, v = _tokens(x)
    return F.scaled_dot_product_attention(q, k, v, **KERNELS[name])


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_over_the_tokens_of_a_grid(name):
    torch.manual_seed(0)
    assert_same_on_every_mesh(functools.partial(_kernel, name), torch.randn(2, 12, 7, 5), MESHES, spec=GRID)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over the tokens of a grid."""

    def __init__(self, need_weights=False, mask=None, batch_first=True, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.need_weights, self.mask = need_weights, mask

    def forward(self, x):
        tokens = x.flatten(2).permute((0, 2, 1) if self.attention.batch_first else (2, 0, 1))
        out, weights = self.attention(tokens, tokens, tokens, need_weights=self.need_weights, attn_mask=self.mask)
        return out if weights is None else (out, weights)


MODULES = {
    "unmodified": SelfAttention(),
    "sequence first": SelfAttention(batch_first=False),
    "with weights": SelfAttention(need_weights=True),
    "masked": SelfAttention(mask=MASK),
    "masked with weights": SelfAttention(need_weights=True, mask=~ALLOWED),
    "without bias": SelfAttention(bias=False),
}


@pytest.mark.parametrize("name", MODULES)
def test_multihead_attention_of_torch(name):
    torch.manual_seed(0)
    for p in MODULES[name].parameters():
        nn.init.normal_(p, 0, 0.5)
    assert_same_on_every_mesh(MODULES[name], torch.randn(2, 8, 7, 5), MESHES, spec=GRID)


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_unmodified_transformer_layer(norm_first):
    torch.manual_seed(0)
    layer = Block(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first))
    assert_same_on_every_mesh(layer, torch.randn(2, 8, 7, 5), MESHES, spec=GRID, rtol=1e-8)


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(2).transpose(1, 2))


def test_cut_batch_and_heads_and_a_halo():
    torch.manual_seed(0)
    x = torch.randn(3, 12, 7, 5)
    run = functools.partial(_kernel, "plain")
    assert_same_on_every_mesh(run, x, [{"data": 2, "lat": 2}, {"data": 3}], spec=("data", None, "lat", None))
    assert_same_on_every_mesh(run, x, [{"lat": 2}], spec=GRID, halo={2: 1})


def _with_whole_keys(spec, name, x):
    """x [batch, heads, tokens, features] is cut; keys and values are made of its mean over what is cut."""
    keys = x.mean(tuple(d for d in (0, 1) if spec[d]), keepdim=True)
    if name == "as many":
        keys = (
            keys.expand(x.shape[0], x.shape[1], -1, -1)
            * torch.arange(1.0, 1 + x.shape[1], dtype=x.dtype)[:, None, None]
        )
    return F.scaled_dot_product_attention(x, keys, keys.sin())


@pytest.mark.parametrize("spec", [("lat", None, None, None), (None, "lat", None, None), ("lat", "lon", None, None)])
@pytest.mark.parametrize("name", ["one", "as many"])
def test_keys_that_are_whole_along_batch_and_heads(name, spec):
    torch.manual_seed(0)
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    run = functools.partial(_with_whole_keys, spec, name)
    assert_same_on_every_mesh(run, torch.randn(5, 3, 4, 2), meshes, spec=spec)


@on_ranks(2)
def test_keys_that_every_rank_has():
    mesh, q = world_mesh(lat=2), torch.randn(3, 4, 5, 2)
    few = q[:, :2]
    k, cut_few = (shard(x, mesh, (None,) * 4) for x in (q.cos(), few))
    for spec in (("lat", None, None, None), (None, "lat", None, None)):
        found = F.scaled_dot_product_attention(shard(q, mesh, spec), k, k)
        torch.testing.assert_close(found.full_tensor(), F.scaled_dot_product_attention(q, q.cos(), q.cos()))
        with pytest.raises(ShardingError, match=r"dim . of keys or values does not match .*redistribute"):
            F.scaled_dot_product_attention(shard(q, mesh, (None,) * 4), shard(q, mesh, spec), shard(q, mesh, spec))
    whole = F.scaled_dot_product_attention(q, few, few, enable_gqa=True)
    for spec in (("lat", None, None, None), (None, "lat", None, None)):
        keys = shard(few, mesh, spec)
        found = F.scaled_dot_product_attention(shard(q, mesh, spec), keys, keys, enable_gqa=True)
        torch.testing.assert_close(found.full_tensor(), whole)
    with pytest.raises(ShardingError, match="dim 1 of keys or values does not match"):
        F.scaled_dot_product_attention(shard(q, mesh, (None, "lat", None, None)), cut_few, cut_few, enable_gqa=True)


@on_ranks(4)
def test_keys_and_values_are_sent_once_and_queries_never():
    mesh = world_mesh(lat=2, lon=2)
    torch.manual_seed(0)
    q, k, v = (
        shard(torch.randn(2, 3, 7, 5, 4), mesh, (None, None, "lat", "lon", None)).flatten(2, 3) for _ in range(3)
    )
    for x in (q, k, v):
        x.local.requires_grad_()
    with comm.count() as forward:
        out = F.scaled_dot_product_attention(q, k, v)
    own = k.local.nbytes + v.local.nbytes
    everything = 4 * (k.numel() + v.numel())
    assert forward.sent_bytes == 3 * own
    assert forward.received_bytes == everything - own
    with comm.count() as backward:
        out.local.backward(torch.ones_like(out.local))
    assert backward.sent_bytes == everything - own and backward.received_bytes == 3 * own


@on_ranks(2)
def test_what_attention_refuses():
    mesh = world_mesh(lat=2)
    q = shard(torch.randn(2, 2, 8, 4), mesh, (None, None, "lat", None))
    with pytest.raises(ShardingError, match="key is a plain tensor"):
        F.scaled_dot_product_attention(q, q.full_tensor(), q)
    with pytest.raises(ShardingError, match="cut along the features of a head"):
        F.scaled_dot_product_attention(q.transpose(2, 3), q.transpose(2, 3), q.transpose(2, 3))
    with pytest.raises(ShardingError, match=r"dropout_p=0.5"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with pytest.raises(ShardingError, match="append a token"):
        nn.MultiheadAttention(4, 2, add_bias_kv=True)(*(q[:, 0],) * 3)
