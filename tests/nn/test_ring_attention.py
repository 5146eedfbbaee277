"""Ways of attention over cut tokens: each gives what plain torch gives, and sends and holds what its formula says."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from random_cuts import any_spec, assert_as_the_whole
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut
from jigsaw.nn.attention import ring_attention
from jigsaw.nn.attention.attention_ways import (
    AttentionSizes,
    RankSplit,
    SplitAxes,
    choose_attention_way,
    splits_of_cuts,
    splits_of_pieces,
)
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.world import run_on_ranks
from jigsaw.tile.tile_making import shard

EXACT = {"rtol": 1e-9, "atol": 1e-10}
# query 2 may attend to nothing, queries 5 to 8 to none of the first keys
ALLOWED = (torch.randn(13, 33, generator=torch.Generator().manual_seed(3)) > -0.5) & (torch.arange(13) != 2)[:, None]
ALLOWED[5:9, :20] = False
Q, K, V = (2, 3, 13, 4), (2, 3, 33, 4), (2, 3, 33, 5)


def _attention(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def _with_boolean_mask(q, k, v):
    return _attention(q, k, v, ALLOWED, scale=0.3)


OF_HEADS = torch.randn(1, 3, 13, 33, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def _with_grouped_masks(q, k, v):
    y = _attention(q, k, v, ALLOWED, enable_gqa=True) + _attention(q, k, v, enable_gqa=True)
    return y + _attention(q, k, v, OF_HEADS.repeat(1, 2, 1, 1), enable_gqa=True)


# options, or a function, and the shapes of q, k, v and an additive mask that has a gradient
CASES = {
    "self": ({}, Q, Q, Q),
    "cross": ({}, Q, K, V),
    "causal": ({"is_causal": True}, (2, 3, 33, 4), (2, 3, 33, 4), (2, 3, 33, 5)),
    "causal cross": ({"is_causal": True, "scale": 0.7}, Q, K, V),
    "boolean mask": (_with_boolean_mask, Q, K, V),
    "additive mask": ({}, Q, K, V, (3, 13, 33)),
    "mask that broadcasts": ({}, Q, K, V, (2, 1, 1, 33)),
    "mask of rows": ({}, Q, K, V, (13, 1)),
    "one head of keys": ({}, Q, (1, 1, 33, 4), (2, 1, 33, 5)),
    "grouped": ({"enable_gqa": True}, (2, 6, 13, 4), (2, 3, 33, 4), (2, 3, 33, 5), (6, 13, 33)),
    "grouped, causal": ({"enable_gqa": True, "is_causal": True}, (2, 6, 13, 4), (2, 2, 13, 4), (2, 2, 13, 5)),
    "equal features": (_with_boolean_mask, Q, K, K),
    "equal features, mask of heads": (functools.partial(_attention, mask=OF_HEADS), Q, K, K),
    "equal features, grouped": (_with_grouped_masks, (2, 6, 13, 4), (2, 3, 33, 4), (2, 3, 33, 4)),
    "equal features, causal": ({"is_causal": True}, (2, 6, 13, 4), (2, 1, 33, 4), (6, 33, 4)),
    "one head": ({}, (2, 1, 13, 4), (2, 1, 33, 4), (2, 1, 33, 4)),
    "fewer tokens than ranks": ({}, (2, 3, 2, 4), (2, 3, 3, 4), (2, 3, 3, 5)),
}


NOT_SHARED = ("one head of keys", "equal features, causal")  # heads that ranks could not share out


def _check_ways(ways, names, **axes):
    """These cases with tokens cut by all axes, the mask plain and cut by rows or by columns."""
    mesh, cut = world_mesh(**axes), tuple(axes)
    torch.manual_seed(0)
    for way in ways:
        for name in [n for n in names if way == "ring" or n not in NOT_SHARED]:
            options, *shapes = CASES[name]
            function = options if callable(options) else functools.partial(_attention, **options)
            specs = [(*(None,) * (len(s) - 2), cut, None) for s in shapes[:3]]
            masks = [[]] if len(shapes) == 3 else [[None], *([_mask_spec(shapes[3], d, cut)] for d in (-2, -1))]
            for mask in masks:
                with jigsaw.nn.attention_way(way):
                    assert_as_the_whole(function, shapes, [*specs, *mask], mesh, **EXACT)


def _mask_spec(shape, dim, cut):
    return tuple(cut if d == len(shape) + dim and n > 1 else None for d, n in enumerate(shape))


@on_ranks(2)
def test_ways_on_two_ranks():
    _check_ways(("ring", "heads"), CASES, lat=2)


@pytest.mark.slow
@on_ranks(3)
def test_ways_on_three_ranks():
    _check_ways(("ring", "heads"), CASES, lat=3)


@on_ranks(1)
def test_ways_on_one_rank():
    _check_ways(("ring", "heads"), ["causal", "additive mask"], lat=1)


@pytest.mark.slow
@on_ranks(4)
def test_ways_on_four_ranks():
    _check_ways(("ring", "heads", "heads+ring"), CASES, lat=2, lon=2)
    some = ["cross", "causal", "additive mask", "grouped", "fewer tokens than ranks"]
    _check_ways(("ring", "heads", "heads+ring"), some, lat=4)


# -- tokens of a grid, other cuts, no tokens at all -------------------------------------------------------------------


def _of_a_grid(x, **options):
    """[batch, 18, 7, 5] -> attention of 3 heads over the 35 tokens, which a rank has in rows of its own."""
    q, k, v = x.flatten(2).unflatten(1, (3, 3, 2)).transpose(-1, -2).unbind(1)
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.slow
@on_ranks(4)
def test_ways_of_flattened_tokens_and_other_cuts():
    mesh, grid = world_mesh(lat=2, lon=2), (None, None, "lat", "lon")
    order = torch.randn(35, 35, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    both, turned = ((None, None, axes, None) for axes in (("lat", "lon"), ("lon", "lat")))
    for way in ("ring", "heads", "heads+ring"):
        with jigsaw.nn.attention_way(way):
            for options in ({"is_causal": True}, {"attn_mask": order}):
                assert_as_the_whole(functools.partial(_of_a_grid, **options), [(2, 18, 7, 5)], [grid], mesh, **EXACT)
            assert_as_the_whole(_attention, [Q, K, V], [both, turned, both], mesh, **EXACT)
    for way in ("ring", "heads"):
        with jigsaw.nn.attention_way(way):
            # lon cuts queries alone, lat heads or batch beside the tokens of lon
            for cut_q, cut_k in (
                [both, (None, None, "lon", None)],
                [(None, "lat", "lon", None), (None, "lat", "lon", None)],
                [("lat", None, "lon", None), (None, None, ("lat", "lon"), None)],
            ):
                assert_as_the_whole(_attention, [Q, K, V], [cut_q, cut_k, cut_k], mesh, **EXACT)
                assert_as_the_whole(_attention, [Q, K, V], [cut_q, cut_k, None], mesh, **EXACT)
    queries, keys = torch.randn(Q), torch.randn(K)
    line = world_mesh(lat=4)
    for way in ("ring", "heads", "heads+ring"):
        q = shard(queries, line, (None, None, "lat", None), split={2: (0, 6, 6, 6, 13)})
        k = shard(keys, line, (None, None, "lat", None), split={2: (0, 0, 30, 33, 33)})
        for x in (q, k):
            x.local.requires_grad_()
        with jigsaw.nn.attention_way(way):
            y = F.scaled_dot_product_attention(q, k, k)
        torch.testing.assert_close(y.full_tensor(), F.scaled_dot_product_attention(queries, keys, keys))
        y.sum().backward()
        assert k.grad.full_tensor().shape == K and bool(k.grad.full_tensor().abs().sum() > 0)


@on_ranks(4)
def test_checkpointed_attention_of_ranks_without_heads_or_queries():
    mesh, whole = world_mesh(lat=2, lon=2), torch.randn(2, 18, 7, 5, dtype=torch.float64)
    few = torch.randn(1, 3, 2, 4, dtype=torch.float64)
    found = []
    for way in ("gathered", "ring", "heads", "heads+ring"):
        for run in (lambda f, *x: f(*x), functools.partial(checkpoint, use_reentrant=False)):
            x = shard(whole, mesh, (None, None, "lat", "lon"))
            q, k = (shard(t, mesh, (None, None, ("lat", "lon"), None)) for t in (few, few.repeat(1, 1, 4, 1)))
            for t in (x, q, k):
                t.local.requires_grad_()
            with jigsaw.nn.attention_way(way):
                y, z = run(_of_a_grid, x), run(_attention, q, k, k)
                (y.square().sum() + z.square().sum()).backward()
            found.append([t.grad.full_tensor() for t in (x, q, k)])
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], **EXACT)


def _any_cuts(way, times, **axes):
    mesh, generator = world_mesh(**axes), random.Random(7)
    torch.manual_seed(0)
    with jigsaw.nn.attention_way(way):
        for name in ("cross", "causal cross", "boolean mask", "additive mask", "grouped", "grouped, causal"):
            options, *shapes = CASES[name]
            function = options if callable(options) else functools.partial(_attention, **options)
            for _ in range(times):
                specs = [any_spec(generator, s, list(axes)) for s in shapes]
                if any(s is not None for s in specs[:3]):
                    assert_as_the_whole(function, shapes, specs, mesh, **EXACT)


@pytest.mark.slow
@pytest.mark.nightly
@on_ranks(4)
def test_ways_of_any_cuts():
    for way in ("ring", "heads"):
        _any_cuts(way, 10, lat=2, lon=2)
    for way in ("ring", "heads", "heads+ring"):
        _any_cuts(way, 3, lat=4)


# -- what is sent and held --------------------------------------------------------------------------------------------


class _LargestTensor(TorchDispatchMode):
    """The most bytes of any tensor that is made within it, how many batches of matrices were multiplied, and
    the scores of fused kernels."""

    def __init__(self):
        super().__init__()
        self.nbytes = self.products = self.scores = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.nbytes, x.untyped_storage().nbytes())
        # the fused kernel of a block multiplies for the scores and for the sum
        of_block = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self.products += {torch.ops.aten.bmm.default: 1, of_block: 2}.get(func, 0)
        self.scores += args[0].shape[:-1].numel() * args[1].shape[-2] if func is of_block else 0
        return made


def _tiles_of_tokens(mesh, *shapes, dtype=torch.float64):
    torch.manual_seed(0)
    tiles = [shard(torch.randn(s, dtype=dtype), mesh, (None, None, tuple(mesh.mesh_dim_names), None)) for s in shapes]
    for x in tiles:
        x.local.requires_grad_()
    return tiles


def _bytes_by_all(mesh, *counts):
    return [sum(comm.all_gather_object(mesh, count.sent_bytes)) for count in counts]


WORDS = (
    ("gathered", "exchange"),
    ("ring", "ring attention"),
    ("heads", "heads"),
    ("heads+ring", "heads", "ring attention"),
)


@on_ranks(4)
def test_every_way_sends_what_its_formula_says():
    for mesh in (world_mesh(lat=4), world_mesh(lat=2, lon=2)):
        for kind, dtype in (("float64", torch.float64), ("bfloat16", torch.bfloat16)):
            # as many heads as ranks, and fewer
            for heads, tokens, others in ((4, 16, 32), (3, 13, 33)):
                q, k = _tiles_of_tokens(mesh, (2, heads, tokens, 8), (2, heads, others, 8), dtype=dtype)
                costs = dict(jigsaw.nn.explain_attention(q, k, k).costs)
                for way, *words in WORDS:
                    with jigsaw.nn.attention_way(way), comm.count() as forward:
                        assert jigsaw.nn.explain_attention(q, k, k).way == way
                        y = F.scaled_dot_product_attention(q, k, k)
                    with comm.count() as backward:
                        y.local.backward(torch.ones_like(y.local))
                    assert {c.kind for c in (*forward.calls, *backward.calls)} == set(words), (way, kind)
                    cost = costs[way]
                    assert _bytes_by_all(mesh, forward, backward) == [cost.forward, cost.backward], (way, kind, heads)


@on_ranks(4)
def test_no_rank_of_a_ring_ever_holds_all_keys():
    mesh = world_mesh(lat=4)
    for tokens in (32, 37):
        q, k, v = _tiles_of_tokens(mesh, *((1, 2, tokens, 64),) * 3)
        block = -(-tokens // 4) * 2 * 64 * 2 * 8  # keys and values of the longest piece
        for keys, values, factor in ((k, v, 2), (k.detach(), v.detach(), 1)):
            with jigsaw.nn.attention_way("ring"), _LargestTensor() as largest:
                with comm.count() as forward:
                    y = F.scaled_dot_product_attention(q, keys, values)
                with comm.count() as backward:
                    y.local.backward(torch.ones_like(y.local))
            assert 0 < largest.nbytes <= block < k.nbytes
            assert max(c.received_bytes for c in (*forward.calls, *backward.calls)) <= block
            # keys and values that need no gradient come by again, and nothing goes back
            assert _bytes_by_all(mesh, forward, backward) == [3 * 2 * k.nbytes, factor * 3 * 2 * k.nbytes]
            # by heads and rings of two a rank has half of the tokens of one head
            with jigsaw.nn.attention_way("heads+ring"), _LargestTensor() as largest:
                F.scaled_dot_product_attention(q, keys, values).local.sum().backward()
            assert 0 < largest.nbytes <= 2 * block < k.nbytes + v.nbytes
    with jigsaw.nn.attention_way("ring"), _LargestTensor() as largest:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # the scores and the sum of each block that the order of the tokens does not hide
    assert largest.products == 2 * (mesh.get_local_rank() + 1)


@on_ranks(4)
def test_ranks_of_a_causal_ring_have_as_much_to_do():
    for mesh, way, ranks in (
        (world_mesh(lat=4), "ring", 4),
        (world_mesh(lat=4), "heads+ring", 2),
        (world_mesh(lat=2, lon=2), "heads+ring", 2),
    ):
        q, k = _tiles_of_tokens(mesh, (1, 2, 1101, 4), (1, 2, 1101, 4))
        expected = F.scaled_dot_product_attention(*(x.detach().full_tensor() for x in (q, k, k)), is_causal=True)
        with jigsaw.nn.attention_way(way):
            told = dict(jigsaw.nn.explain_attention(q, k, k, is_causal=True).costs)[way]
            with comm.count() as forward, _LargestTensor() as largest:
                y = F.scaled_dot_product_attention(q, k, k, is_causal=True)
            with comm.count() as backward:
                y.local.backward(torch.ones_like(y.local))
        # blocks before each half of its queries, and around them half a block, and a whole one in two
        assert largest.products == 2 * (ranks - 1 + 1 + 2)
        scores = comm.all_gather_object(mesh, largest.scores)
        assert max(scores) <= 1.01 * min(scores) and sum(scores) <= 1.01 * 2 * 1101**2 * (2 * ranks + 1) / (4 * ranks)
        torch.testing.assert_close(y.full_tensor().detach(), expected, **EXACT)
        assert _bytes_by_all(mesh, forward, backward) == [told.forward, told.backward]


def _check_mirrored(*meshes):
    """Causal cases, though their ranks have few queries."""
    ring_attention.MIRRORED_QUERIES, before = 0, ring_attention.MIRRORED_QUERIES
    try:
        for axes, ways in meshes:
            _check_ways(ways, ["causal", "causal cross", "grouped, causal", "fewer tokens than ranks"], **axes)
            mesh, spec = world_mesh(**axes), (None, None, *(list(axes) if len(axes) == 2 else [None, *axes]))
            for way in ways:
                with jigsaw.nn.attention_way(way):
                    causal = functools.partial(_of_a_grid, is_causal=True)
                    assert_as_the_whole(causal, [(2, 18, 7, 5)], [spec], mesh, **EXACT)
            # the last axis makes rings, the others cut queries alone
            cut_q, cut_k = ((None, None, names, None) for names in (tuple(axes), (list(axes)[-1],)))
            with jigsaw.nn.attention_way("ring"):
                assert_as_the_whole(
                    functools.partial(_attention, is_causal=True), [K, Q, Q], [cut_q, cut_k, cut_k], mesh, **EXACT
                )
    finally:
        ring_attention.MIRRORED_QUERIES = before


@pytest.mark.slow
@on_ranks(4)
def test_mirrored_queries():
    _check_mirrored(({"lat": 4}, ["ring"]), ({"lat": 2, "lon": 2}, ["ring", "heads+ring"]))


@pytest.mark.slow
@on_ranks(3)
def test_mirrored_queries_of_a_rank_in_the_middle():
    _check_mirrored(({"lat": 3}, ["ring"]))


class _SmallTransformer(torch.nn.Module):
    """Blocks as timm's, checkpointed or not."""

    def __init__(self, features, heads, layers, checkpoints):
        super().__init__()
        self.heads, self.checkpoints = heads, checkpoints
        self.qkv = torch.nn.ModuleList([torch.nn.Linear(features, 3 * features) for _ in range(layers)])
        self.out = torch.nn.ModuleList([torch.nn.Linear(features, features) for _ in range(layers)])

    def _block(self, x, qkv, out):
        q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x):
        for qkv, out in zip(self.qkv, self.out, strict=True):
            x = (
                checkpoint(self._block, x, qkv, out, use_reentrant=False)
                if self.checkpoints
                else self._block(x, qkv, out)
            )
        return x


@on_ranks(4)
def test_a_step_of_a_vision_transformer_sends_what_its_layers_formulas_say():
    mesh, features, layers = world_mesh(lat=2, lon=2), 176, 3
    # tokens enough that they are not gathered: 11 heads as 44 on 8 ranks, and 2, fewer than ranks
    for heads, way in ((11, "heads"), (2, "heads+ring")):
        x = shard(torch.randn(1, features, 22, 38), mesh, (None, None, "lat", "lon")).flatten(2).transpose(1, 2)
        for checkpoints in (False, True):
            torch.manual_seed(0)
            model = _SmallTransformer(features, heads, layers, checkpoints)
            tokens = x.detach()
            tokens.local.requires_grad_()
            q = tokens.unflatten(-1, (heads, -1)).transpose(1, 2)
            told = jigsaw.nn.explain_attention(q, q, q)
            assert told.way == way
            with comm.count() as traffic:
                model(tokens).square().local.sum().backward()
            cost = dict(told.costs)[way]
            assert _bytes_by_all(mesh, traffic) == [layers * (cost.forward * (1 + checkpoints) + cost.backward)]


# -- numbers of other kinds -------------------------------------------------------------------------------------------


@on_ranks(4)
def test_narrow_numbers_are_summed_in_wide_ones():
    mesh, spec = world_mesh(lat=4), (None, None, "lat", None)
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 2, 40, 16, dtype=torch.bfloat16)
    expected = F.scaled_dot_product_attention(*whole.double())
    tiles, wide = ([shard(x.to(dtype), mesh, spec) for x in whole] for dtype in (torch.bfloat16, torch.float32))
    for way in ("ring", "heads", "heads+ring", "gathered"):
        with jigsaw.nn.attention_way(way):
            found = F.scaled_dot_product_attention(*tiles)
            # what autocast makes narrow travels narrow
            with torch.autocast("cpu", torch.bfloat16), comm.count() as traffic:
                cast = F.scaled_dot_product_attention(*wide)
                told = dict(jigsaw.nn.explain_attention(*wide).costs)[way]
            assert _bytes_by_all(mesh, traffic) == [told.forward]
            assert told == dict(jigsaw.nn.explain_attention(*tiles).costs)[way]
            if "ring" in way:
                with pytest.raises(RuntimeError, match=r"query\.dtype: float key\.dtype: c10::BFloat16"):
                    F.scaled_dot_product_attention(wide[0], *tiles[1:])
        for y in (found, cast):
            assert y.dtype == torch.bfloat16
            # of a ring no more than the last rounding; torch's own kernel rounds weights, too
            rtol, atol = (2**-8, 1e-5) if "ring" in way else (2**-6, 2**-8)
            torch.testing.assert_close(y.full_tensor().double(), expected, rtol=rtol, atol=atol)


@on_ranks(4)
def test_scores_of_few_queries_at_a_time():
    ring_attention.SCORE_BYTES, before = 1000, ring_attention.SCORE_BYTES
    try:
        _check_ways(("ring",), ["causal cross", "boolean mask", "additive mask", "mask of rows", "grouped"], lat=4)
    finally:
        ring_attention.SCORE_BYTES = before


def _dropped(axes, ways):
    mesh, found = world_mesh(**axes), {}
    for p in (0.4, 1.0):
        for way in ways:
            torch.manual_seed(3)
            x = shard(torch.randn(2, 18, 7, 5, dtype=torch.float64), mesh, (None, None, "lat", "lon"))
            x.local.requires_grad_()
            grouped = x.flatten(2).unflatten(1, (9, 2)).transpose(-1, -2)
            with jigsaw.nn.attention_way(way):
                y = _of_a_grid(x, dropout_p=p)
                z = F.scaled_dot_product_attention(
                    grouped[:, :6], grouped[:, 6:8], grouped[:, 7:], dropout_p=p, enable_gqa=True
                )
            (y.square().sum() + z.square().sum()).backward()
            found[way, p] = [t.full_tensor().detach() for t in (y, z, x.grad)]
    return found


def test_dropout_is_alike_on_every_mesh_and_way():
    expected = run_on_ranks(1, _dropped, {"lat": 1}, [None])[0]
    assert expected[None, 0.4][0].all() and not expected[None, 1.0][0].any()
    for axes, more in (({"lat": 2}, []), ({"lat": 2, "lon": 2}, ["heads+ring"])):
        ways = ["gathered", "ring", "heads", *more]
        for (_, p), found in run_on_ranks(2 ** len(axes), _dropped, axes, ways)[0].items():
            torch.testing.assert_close(found, expected[None, p], **EXACT)


# -- which way --------------------------------------------------------------------------------------------------------


def test_the_rule():
    choices = {
        (256, 4, 8, 64): "gathered",  # a mebibyte of keys and values
        (1000, 4, 8, 64): "heads",
        (1000, 8, 4, 128): "heads+ring",  # fewer heads than ranks
        (1000, 7, 4, 128): "ring",  # a prime number of them
        (1000, 2, 1, 512): "gathered",  # two ranks hold as much of q, k, v and y as all keys are
        (1000, 3, 1, 512): "ring",
    }
    for (tokens, ranks, heads, features), way in choices.items():
        assert choose_attention_way(AttentionSizes.of_tokens(tokens, ranks, heads, features, 4)).way == way
    sizes = AttentionSizes.of_tokens(1000, 4, 8, 64)
    assert dict(choose_attention_way(sizes).costs)["gathered"].forward == 3 * 1000 * 2 * 8 * 64 * 2
    assert dict(choose_attention_way(sizes).costs)["heads"].forward == 1000 * 4 * 8 * 64 * 2 * 3 // 4
    # a mask that is cut would have to be gathered for heads
    assert choose_attention_way(AttentionSizes.of_tokens(1000, 4, 8, 64, 4), is_mask_cut=True).way == "ring"
    assert "1,024,000" in choose_attention_way(AttentionSizes.of_tokens(1000, 8, 4, 64)).why
    # eight queries share a head of keys: heads of queries would be more than the keys of a ring
    grouped = AttentionSizes((2000,) * 4, (2000,) * 4, 2, 16 * 128, 2 * 128, 2, splits_of_pieces((4,)))
    assert choose_attention_way(grouped).way == "gathered"
    assert choose_attention_way(replace(grouped, keys=(20000,) * 4)).way == "heads+ring"


def test_how_ranks_are_split():
    cuts = Cut(24, tuple(range(25)), ("a", "b")), Cut(2, (0, 1, 2), ("c",))
    sizes = (("a", 4), ("b", 6), ("c", 2))
    found = splits_of_cuts(cuts, sizes, True)
    assert {split.shares for split in found} == {(n, c) for n in (1, 2, 3, 6, 12, 24) for c in (1, 2) if 1 < n * c < 48}
    assert {split.shares for split in splits_of_cuts(cuts, sizes, False)} == {
        (n, c) for n in (1, 6, 24) for c in (1, 2) if 1 < n * c < 48
    }
    axes = SplitAxes.of(RankSplit((24, 2), (12, 2)), cuts, sizes)
    assert axes.heads == ("a.heads", "b", "c") and axes.parted == (("a", (("a.ring", 2), ("a.heads", 2))),)
    # each rank has a place of its own, and rings are of those with one share of the heads
    for split in found:
        assert sorted(split.places) == [(r, h) for r in range(split.ring_ranks) for h in range(split.head_ranks)]


@on_ranks(4)
def test_what_is_chosen_and_what_is_said():
    mesh = world_mesh(lat=4)
    for heads, way, kind in ((4, "heads", "heads"), (1, "ring", "ring attention")):
        q, k, v = _tiles_of_tokens(mesh, *((1, heads, 1040, 256 // heads),) * 3, dtype=torch.float32)
        with torch.no_grad(), comm.count() as traffic:
            F.scaled_dot_product_attention(q, k, v)
        assert {c.kind for c in traffic.calls} == {kind}
        told = jigsaw.nn.explain_attention(q, k, v)
        assert told.way == way and _bytes_by_all(mesh, traffic) == [dict(told.costs)[way].forward]
        assert f"{dict(told.costs)[way].forward:,} bytes sent forward" in str(told)
    # fewer heads than ranks, and enough for half of them
    q = _tiles_of_tokens(mesh, (1, 2, 1040, 128), dtype=torch.float32)[0]
    told = jigsaw.nn.explain_attention(q, q, q)
    assert told.way == "heads+ring" and "rings of 2 ranks, heads shared out by 2" in told.why
    few = shard(torch.randn(9, 4), mesh, ("lat", None))
    with jigsaw.nn.attention_way("heads"):
        with pytest.raises(ShardingError, match=r"attention_way\('heads'\).*no dim of heads.*'ring'"):
            F.scaled_dot_product_attention(few, few, few)
        with jigsaw.nn.attention_way(None):
            assert jigsaw.nn.explain_attention(few, few, few).way == "gathered"
    line = shard(torch.randn(2, 9, 4), world_mesh(lat=2, lon=2), (None, "lat", None))
    with (
        jigsaw.nn.attention_way("heads+ring"),
        pytest.raises(
            ShardingError, match=r"the 2 ranks that cut the tokens cannot go both ways.*'heads' or 'gathered'"
        ),
    ):
        F.scaled_dot_product_attention(line, line, line)
    with pytest.raises(ShardingError, match=r"attention_way\('rings'\): use one of"), jigsaw.nn.attention_way("rings"):
        pass


class _Block(torch.nn.Module):
    """Attention as torch's layer and as timm write it, over the tokens of a grid."""

    def __init__(self, way):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        self.qkv, self.out, self.way = torch.nn.Linear(12, 36), torch.nn.Linear(12, 12), way

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        with jigsaw.nn.attention_way(self.way):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            q, k, v = self.qkv(x).reshape(x.shape[0], x.shape[1], 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("way", ["ring", "heads", "heads+ring"])
def test_layers_of_others(way):
    torch.manual_seed(0)
    meshes = [{"lat": 4} if way == "heads+ring" else {"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(_Block(way), torch.randn(2, 12, 7, 5), meshes, spec=(None, None, "lat", "lon"))
