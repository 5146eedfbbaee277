"""Attention over cut tokens: outputs, weights and every gradient are those of the whole tensor."""

from __future__ import annotations

import functools
import math
import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from random_cuts import any_spec, assert_as_the_whole
from torch import nn

from jigsaw import comm, dry_run, parallelize
from jigsaw.comm import exchange
from jigsaw.errors import ShardingError
from jigsaw.geometry import transfers
from jigsaw.geometry.transfers import layouts_of_gather
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.world import run_on_ranks
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

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
        found = F.scaled_dot_product_attention(shard(q, mesh, (None,) * 4), shard(q, mesh, spec), shard(q, mesh, spec))
        torch.testing.assert_close(found.full_tensor(), F.scaled_dot_product_attention(q, q, q))
        assert found.layout.spec == spec
    whole = F.scaled_dot_product_attention(q, few, few, enable_gqa=True)
    for spec in (("lat", None, None, None), (None, "lat", None, None)):
        keys = shard(few, mesh, spec)
        found = F.scaled_dot_product_attention(shard(q, mesh, spec), keys, keys, enable_gqa=True)
        torch.testing.assert_close(found.full_tensor(), whole)
    found = F.scaled_dot_product_attention(shard(q, mesh, (None, "lat", None, None)), cut_few, cut_few, enable_gqa=True)
    torch.testing.assert_close(found.full_tensor(), whole)


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


# -- every cut of queries, keys, values and masks ---------------------------------------------------------------------

EYE = torch.eye(7, 5, dtype=torch.bool)
SOME = (torch.randn(7, 5, generator=torch.Generator().manual_seed(3)) > -0.5) | EYE
NONE_FOR_ONE = SOME & (torch.arange(7) != 2)[:, None]  # query 2 may attend to nothing: torch gives zeros


def _attention(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


Q, K, V = (2, 3, 7, 4), (2, 3, 5, 4), (2, 3, 5, 3)
ANY_CUTS = [
    ({}, Q, K, V),
    ({"is_causal": True}, Q, K, V),
    ({"mask": SOME, "scale": 0.3}, Q, K, V),
    ({"mask": NONE_FOR_ONE}, Q, K, V),
    ({}, Q, K, V, (3, 7, 5)),
    ({}, Q, K, V, (2, 1, 1, 5)),
    ({}, (7, 4), (5, 4), (5, 3), (7, 5)),
    ({}, Q, (1, 3, 5, 4), (2, 1, 5, 3)),
    ({"enable_gqa": True}, (2, 6, 7, 4), (2, 3, 5, 4), (2, 3, 5, 3)),
    ({"enable_gqa": True}, (2, 4, 7, 4), (2, 2, 5, 4), (2, 2, 5, 3), (4, 7, 5)),
    ({"enable_gqa": True, "is_causal": True}, (2, 4, 7, 4), (2, 1, 5, 4), (2, 1, 5, 3)),
]


def _attend_at_random(times, **axes):
    mesh, generator = world_mesh(**axes), random.Random(5)
    torch.manual_seed(0)
    for options, *shapes in ANY_CUTS:
        for _ in range(times):
            specs = [any_spec(generator, s, list(axes)) for s in shapes]
            if any(s is not None for s in specs[:3]):
                assert_as_the_whole(functools.partial(_attention, **options), shapes, specs, mesh)


@on_ranks(3)
def test_attention_of_any_cuts_on_three_ranks():
    _attend_at_random(2, lat=3)


@on_ranks(4)
def test_attention_of_any_cuts_on_four_ranks():
    _attend_at_random(3, lat=2, lon=2)


@on_ranks(2)
def test_a_rank_without_queries_has_the_batch_of_the_keys():
    torch.manual_seed(0)
    q, k = torch.randn(4, 3, 8), torch.randn(3, 4, 6, 8)
    tile = shard(q, world_mesh(lat=2), (None, "lat", None), split={1: (0, 3, 3)})
    y = F.scaled_dot_product_attention(tile, k, k)
    torch.testing.assert_close(y.full_tensor(), F.scaled_dot_product_attention(q, k, k))


def _queries_without_a_batch(x):
    return F.scaled_dot_product_attention(x.flatten(0, -2), x, x)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_without_keys_and_queries_of_fewer_dims(ranks):
    x, spec = torch.randn(1, 6, 5), ("lat", None, None)
    assert_same_on_every_mesh(_queries_without_a_batch, x, [{"lat": ranks}], spec=spec)


@on_ranks(2)
def test_keys_that_axes_cut_alone_stay():
    mesh = world_mesh(lat=2)
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 1001, 5)
    keys = shard(k, mesh, (None, None, "lat", None))
    with comm.count() as sent:
        found = F.scaled_dot_product_attention(q, keys, keys)
    torch.testing.assert_close(found.full_tensor(), F.scaled_dot_product_attention(q, k, k))
    assert {c.kind for c in sent.calls} == {"all_reduce"}
    assert sent.sent_bytes < keys.local.nbytes // 10


def _dropped(axes, need_weights):
    torch.manual_seed(3)
    mesh = world_mesh(**axes)
    x = shard(torch.randn(2, 8, 7, 5, dtype=torch.float64), mesh, GRID).flatten(2).transpose(1, 2)
    module = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True, dtype=torch.float64)
    heads = x.unflatten(2, (2, 4)).transpose(1, 2)
    dropped = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)
    return [y.full_tensor().detach() for y in (dropped, module(x, x, x, need_weights=need_weights)[0])]


def test_dropout_is_alike_on_every_mesh():
    for need_weights in (False, True):
        first, *others = (
            run_on_ranks(math.prod(axes.values()), _dropped, axes, need_weights)[0]
            for axes in ({"lat": 1}, {"lat": 2}, {"lat": 2, "lon": 2})
        )
        for found in others:
            torch.testing.assert_close(found, first)


class CrossAttention(nn.Module):
    """nn.MultiheadAttention of the tokens of a grid to those of another, some of them padding."""

    def __init__(self, need_weights, batch_first=True):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x, memory, padding, mask):
        x, memory = (y if y.ndim == 3 else y.flatten(2).transpose(1, 2) for y in (x, memory))
        if not self.attention.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        return self.attention(
            x, memory, memory.sin(), key_padding_mask=padding, need_weights=self.need_weights, attn_mask=mask
        )[: 1 + self.need_weights]


@pytest.mark.slow
@pytest.mark.parametrize(("need_weights", "batch_first"), [(False, True), (True, False)])
def test_cross_attention_with_masks(need_weights, batch_first):
    torch.manual_seed(0)
    model = CrossAttention(need_weights, batch_first)
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.5)
    x, memory, mask = torch.randn(2, 8, 7, 5), torch.randn(2, 11, 8), torch.randn(4, 35, 11)
    padding = torch.arange(11) >= torch.tensor([[8], [11]])
    uncut = (None,) * 3
    for specs in (
        [GRID, None, None, None],
        [GRID, uncut, (None, "lat"), None],
        [GRID, (None, "lat", None), (None, "lon"), None],
        [None, (None, ("lat", "lon"), None), None, None],
    ):
        assert_same_on_every_mesh(
            model, [x, memory, padding, mask], [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}], spec=specs
        )


def _with_cut_mask(x, memory, mask, weights):
    """What the module calls: the module itself asks of an attn_mask that it be a torch.Tensor."""
    x, memory = x.flatten(2).permute(2, 0, 1), memory.transpose(0, 1)
    return F.multi_head_attention_forward(
        x, memory, memory, 8, 2, weights, None, None, None, False, 0.0, weights[:8], None, attn_mask=mask
    )


def test_cut_masks_of_multihead_attention():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 8, 7, 5), torch.randn(2, 11, 8), torch.randn(4, 35, 11), torch.randn(24, 8)]
    for spec in ((None, ("lat", "lon"), None), ("lon", None, "lat")):
        specs = [GRID, (None, "lat", None), spec, None]
        assert_same_on_every_mesh(_with_cut_mask, inputs, [{"lat": 2}, {"lat": 2, "lon": 2}], spec=specs)


@on_ranks(2)
def test_what_attention_refuses():
    mesh = world_mesh(lat=2)
    x = torch.randn(2, 2, 8, 4)
    q = shard(x, mesh, (None, None, "lat", None))
    mask = shard(torch.ones(8, 8), mesh, ("lat", None))
    with pytest.raises(ShardingError, match=r"attn_mask is a Tile, but query, key and value are plain.*jigsaw.shard"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    with pytest.raises(RuntimeError, match="attn_mask must not be set when is_causal=True"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
    # also on a rank without queries
    few = shard(x[0, 0], mesh, ("lat", None), split={0: (0, 8, 8)})
    with pytest.raises(RuntimeError, match="queries and keys need the same last dim"):
        F.scaled_dot_product_attention(few, x[0, 0, :, :1], x[0, 0])
    with pytest.raises(RuntimeError, match="2 heads of queries, 3 of keys and 3 of values"):
        F.scaled_dot_product_attention(q, *(torch.randn(2, 3, 5, 4),) * 2, enable_gqa=True)


class _TokensOfRows(nn.Module):
    """Attention to all points of a map, beside the map with its mean row."""

    def __init__(self, features=8, heads=2):
        super().__init__()
        self.qkv, self.heads = nn.Linear(features, 3 * features), heads

    def forward(self, x):
        batch, rows, columns, _ = x.shape
        q, k, v = (
            part.reshape(batch, rows * columns, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(batch, rows, columns, -1)


@pytest.mark.parametrize("axes", [{"lat": 2, "lon": 2}, {"lat": 2, "lon": 3}])
def test_keys_of_many_ranks_come_along_one_axis_after_the_other(axes):
    run_on_ranks(math.prod(axes.values()), _keys_in_rounds, axes)


def _keys_in_rounds(axes):
    mesh, rounds = world_mesh(**axes), []

    def noted(source, target):
        rounds.append(layouts_of_gather(source, target))
        return rounds[-1]

    torch.manual_seed(0)
    model, x = _TokensOfRows().double(), torch.randn(2, 5, 7, 8, dtype=torch.float64)
    weights = torch.randn(2, 5, 7, 8, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    expected = model(whole)
    (expected * weights).sum().backward()
    tile = shard(x, mesh, (None, "lat", "lon", None))
    tile.local.requires_grad_()
    with mock.patch.object(transfers, "MOST_PEERS_AT_ONCE", 1), mock.patch.object(exchange, "layouts_of_gather", noted):
        y = parallelize(model, mesh)(tile)
        torch.testing.assert_close(y.full_tensor(), expected)
        (y.full_tensor() * weights).sum().backward()  # whose gradient is alike on every rank
        grad = Tile(tile.local.grad, tile.layout, mesh).full_tensor()
    assert max(map(len, rounds)) == 2
    torch.testing.assert_close(grad, whole.grad)


def test_attention_of_a_thousand_ranks_sends_few_messages():
    """All keys at once would be 4092 messages a rank and step."""
    report = dry_run(
        _TokensOfRows(), (1, 32, 32, 8), {"lat": 32, "lon": 32}, spec=(None, "lat", "lon", None), ranks=[495]
    )
    phases = report.ranks[0].phases
    sent = [phases[name].traffic["exchange"] for name in ("forward", "backward")]
    assert [(each.messages, each.sent_bytes) for each in sent] == [(2 * 62, 2 * 1023 * 8 * 4)] * 2
