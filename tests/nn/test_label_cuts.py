"""Products of tiles of which one axis cuts two dims: attention by hand, and every product of torch."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from random_cuts import any_spec, assert_as_the_whole
from torch import nn

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

MESHES = [{"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]
GRID = (None, None, "lat", "lon")  # [batch, 12 features, 7, 9]


# -- attention by hand ------------------------------------------------------------------------------------------------


def _heads(x):
    """[batch, 12, 7, 9] -> q, k, v [batch, 2 heads, 63 tokens, 2]."""
    return x.flatten(2).unflatten(1, (3, 2, 2)).transpose(-1, -2).unbind(1)


class ByMatmul(nn.Module):
    """Cosine attention with a relative position bias from a table, as in Swin V2; and the weights."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[[0.5]], [[1.5]]]))
        self.table = nn.Parameter(torch.randn(40, 2))
        self.index = torch.randint(40, (63, 63), generator=torch.Generator().manual_seed(2))

    def forward(self, x):
        q, k, v = _heads(x)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * self.scale.clamp(max=4.6).exp() + self.table[self.index.view(-1)].view(63, 63, 2).permute(
            2, 0, 1
        )
        weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights.sum(-2), weights.amax(-1)


def _by_einsum(x):
    q, k, v = _heads(x)
    weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(dim=-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, v)


def _by_bmm(x):
    """As in autoencoders: channels first, the values on the left."""
    q, k, v = (y.flatten(2) for y in x.chunk(3, 1))
    weights = torch.bmm(q.permute(0, 2, 1), k).mul(0.5).softmax(2)
    return torch.bmm(v, weights.permute(0, 2, 1)).unflatten(2, (7, 9))


def _by_baddbmm(x):
    q, k, v = (y.flatten(0, 1) for y in _heads(x))
    empty = torch.empty(4, 63, 63, dtype=q.dtype)
    weights = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.7).softmax(-1)
    return torch.baddbmm(v, weights, v, beta=0.5)


def _unbatched(x):
    q, k, v = (y[0, 0] for y in _heads(x))
    return torch.addmm(v, (q @ k.t()).softmax(-1), v), torch.tensordot(q, k, ([1], [1])), torch.inner(k, q)


def _of_columns(x):
    """Axial: rows of the grid, which lat cuts, attend to each other in each column, which lon cuts."""
    q, k, v = x.chunk(3, 1)
    weights = torch.einsum("bchw,bcgw->bwhg", q, k).softmax(-1)
    return torch.einsum("bwhg,bcgw->bchw", weights, v)


def _without_scores(x):
    """Linear attention, and attention between channels: sums over tokens."""
    q, k, v = _heads(x)
    mixed = (q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)).transpose(1, 2)
    channels = F.normalize(q.mT, dim=-1) @ F.normalize(k.mT, dim=-1).transpose(-2, -1)
    return mixed, channels.softmax(-1) @ v.mT, torch.linalg.multi_dot([q[0, 0], k[0, 0].mT, v[0, 0]])


BY_HAND = [ByMatmul(), _by_einsum, _by_bmm, _by_baddbmm, _unbatched, _of_columns, _without_scores]


@pytest.mark.slow
@pytest.mark.parametrize("function", BY_HAND, ids=lambda f: getattr(f, "__name__", "by_matmul"))
def test_attention_by_hand(function):
    torch.manual_seed(0)
    assert_same_on_every_mesh(function, torch.randn(2, 12, 7, 9), MESHES, spec=GRID)


@on_ranks(4)
def test_keys_travel_and_scores_are_cut_along_the_queries():
    mesh = world_mesh(lat=2, lon=2)
    torch.manual_seed(0)
    q, k = (shard(torch.randn(2, 3, 7, 9, 4), mesh, (None, None, "lat", "lon", None)).flatten(2, 3) for _ in range(2))
    for x in (q, k):
        x.local.requires_grad_()
    own, everything = k.local.nbytes, 4 * k.numel()
    for product in (torch.matmul, lambda x, y: torch.einsum("bhid,bhdj->bhij", x, y)):
        with comm.count() as forward:
            scores = product(q, k.transpose(-2, -1))
        assert (forward.sent_bytes, forward.received_bytes) == (3 * own, everything - own)
        assert scores.layout.dim(2) == q.layout.dim(2)
        assert not scores.layout.is_cut(3)
        with comm.count() as backward:
            scores.local.backward(torch.ones_like(scores.local))
        assert (backward.sent_bytes, backward.received_bytes) == (everything - own, 3 * own)
    with comm.count() as mixed:
        out = scores.detach() @ k.detach()
    assert mixed.sent_bytes == 3 * own
    assert out.layout == q.layout
    with comm.count() as linear:
        _ = k.detach().transpose(-2, -1) @ q.detach()
    assert {c.kind for c in linear.calls} == {"all_reduce"}
    assert sum(c.sent_bytes for c in linear.calls) < own


@on_ranks(2)
def test_of_two_summed_dims_the_one_stays_cut_for_which_less_moves():
    mesh = world_mesh(lat=2)
    x, y = torch.randn(4, 6), torch.randn(4, 6, 5)
    small = shard(x, mesh, ("lat", None))
    with comm.count() as sent:
        found = torch.einsum("ij,ijk->k", small, shard(y, mesh, (None, "lat", None)))
    torch.testing.assert_close(found.full_tensor(), torch.einsum("ij,ijk->k", x, y))
    moved = [c for c in sent.calls if c.kind == "exchange"]
    assert [c.sent_bytes for c in moved] == [small.local.nbytes // 2]


# -- every cut of every operand ---------------------------------------------------------------------------------------


def _addbmm(c, a, b):
    return torch.addbmm(c, a, b, beta=0.5, alpha=2.0)


def _addmv(c, a, b):
    return torch.addmv(c, a, b)


def _addr(c, a, b):
    return torch.addr(c, a, b)


def _tensordot(a, b):
    return torch.tensordot(a, b, ([0, 2], [1, 0]))


def _chain(a, b, c):
    return torch.linalg.multi_dot([a, b, c])


def _three(a, b, c):
    return torch.einsum("bi,bj,ijk->bk", a, b, c)


PRODUCTS = [
    (torch.matmul, (7, 6), (6, 5)),
    (torch.matmul, (3, 7, 6), (3, 6, 5)),
    (torch.matmul, (3, 7, 6), (6, 5)),
    (torch.matmul, (7, 6), (1, 3, 6, 5)),
    (torch.matmul, (1, 7, 6), (3, 6, 5)),
    (torch.matmul, (2, 7, 6), (6,)),
    (torch.matmul, (7,), (2, 7, 6)),
    (torch.matmul, (7,), (7,)),
    (torch.baddbmm, (3, 7, 5), (3, 7, 6), (3, 6, 5)),
    (torch.addmm, (5,), (7, 6), (6, 5)),
    (torch.addmm, (7, 5), (7, 6), (6, 5)),
    (_addbmm, (7, 5), (2, 7, 6), (2, 6, 5)),
    (_addmv, (7,), (7, 6), (6,)),
    (_addr, (7, 6), (7,), (6,)),
    (_tensordot, (3, 4, 5), (5, 3, 2)),
    (torch.tensordot, (3, 4, 5), (4, 5, 2)),
    (torch.inner, (3, 4), (2, 5, 4)),
    (torch.outer, (3,), (5,)),
    (_chain, (3,), (3, 7), (7, 5)),
    (_chain, (4, 3), (3, 7), (7, 5)),
    (_three, (2, 7), (2, 5), (7, 5, 3)),
]


def _random_products(times, **axes):
    mesh, generator = world_mesh(**axes), random.Random(4)
    torch.manual_seed(0)
    for function, *shapes in PRODUCTS:
        for _ in range(times):
            specs = [any_spec(generator, s, list(axes)) for s in shapes]
            if any(s is not None for s in specs):
                assert_as_the_whole(function, shapes, specs, mesh)


@on_ranks(3)
def test_products_of_any_cuts_on_three_ranks():
    _random_products(2, lat=3)


@pytest.mark.slow
@on_ranks(4)
def test_products_of_any_cuts_on_four_ranks():
    _random_products(3, lat=2, lon=2)


@on_ranks(4)
def test_tokens_flattened_from_two_dims_meet_tokens_cut_as_one():
    mesh = world_mesh(lat=2, lon=2)
    torch.manual_seed(0)
    x, y = torch.randn(7, 9, 2), torch.randn(63, 2)
    grid = shard(x, mesh, ("lat", "lon", None)).flatten(0, 1)
    tokens = shard(y, mesh, (("lat", "lon"), None))
    for a, b, whole in ((grid, tokens, (x.flatten(0, 1), y)), (tokens, grid, (y, x.flatten(0, 1)))):
        found = torch.einsum("id,id->i", a, b)
        assert found.layout.dim(0) == a.layout.dim(0)
        torch.testing.assert_close(found.full_tensor(), torch.einsum("id,id->i", *whole))
    with pytest.raises(
        ShardingError, match=r"dim 0 of a Tile cut as \[63/lat.*flattened from other dims.*redistribute"
    ):
        torch.einsum("id,id->i", grid, shard(y, mesh, ("lat", None)))


WRONG = {
    "matmul: both operands need at least 1 dim": lambda x: torch.matmul(x, torch.ones(())),
    r"matmul: \(2, 4, 6\) and \(2, 4, 6\) cannot": lambda x: torch.matmul(x.expand(2, 4, 6), x.expand(2, 4, 6)),
    "tensordot: dims=3 of operands of 2 and 2 dims": lambda x: torch.tensordot(x, x, 3),
    "tensordot: dims=.* must name as many": lambda x: torch.tensordot(x, x, ([0, 1], [0])),
    "inner: the last dims of .* differ": lambda x: torch.inner(x, x.t()),
    "outer: operands of 2 and 2 dims": lambda x: torch.outer(x, x),
    "multi_dot: 1 operands": lambda x: torch.linalg.multi_dot([x]),
    "dim 'i' has sizes 4 and 6": lambda x: torch.einsum("ij,ik->jk", x, x.t()),
    r"an operand of shape \(3, 4, 5\) does not broadcast": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=torch.ones(3, 4, 5)
    ),
}


@on_ranks(2)
def test_wrong_sizes_are_told():
    x = shard(torch.randn(4, 6), world_mesh(lat=2), ("lat", None))
    for message, call in WRONG.items():
        with pytest.raises(RuntimeError, match=message):
            call(x)
