"""Gradients that are a block on each rank travel as blocks: the whole gradient on every mesh, in half of the bytes."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.geometry import transfers
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

SPEC = ("data", None, "lat", "lon")
ROWS, COLUMNS, HIDDEN = 7, 10, 13
KIND = "blocks of gradients"


class TokenMixer(nn.Module):
    """An MLP over tokens, whose weights are of use in blocks, and one over channels."""

    def __init__(self, again=0):
        super().__init__()
        self.into, self.back = nn.Linear(ROWS * COLUMNS, HIDDEN), nn.Linear(HIDDEN, ROWS * COLUMNS)
        self.channels, self.again = nn.Linear(3, 3), again

    def mix(self, x):
        return self.back(torch.tanh(self.into(x)))

    def forward(self, x):
        x = x.flatten(2)
        for _ in range(1 + self.again):
            x = x + self.mix(x)
        return x + self.channels(x.transpose(1, 2)).transpose(1, 2)


def _made(axes, **options):
    torch.manual_seed(3)
    expected = TokenMixer(**options).double()
    x = torch.randn(4, 3, ROWS, COLUMNS, dtype=torch.float64)
    mesh = world_mesh(**axes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jigsaw.parallel.gradient_buckets._LENT_BYTES", 1)
        model = jigsaw.parallelize(copy.deepcopy(expected), mesh, bucket_bytes=1)
    return model, expected, jigsaw.shard(x, mesh, SPEC), x


def _loss(model, x):
    return model(x).square().mean()


def _step(model, expected, tile, x, loss=_loss, wanted=None):
    """A step of both; which gradients travelled as blocks, and the bytes that this rank sent for them."""
    (wanted or loss)(expected, x).backward()
    with comm.count() as sent:
        loss(model, tile).backward()
    _assert_alike(model, expected)
    return sum(c.kind == KIND for c in sent.calls), sum(c.sent_bytes for c in sent.calls if c.kind == KIND)


def _assert_alike(model, expected):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def _blocks_travel(axes):
    model, expected, tile, x = _made(axes)
    ranks = dist.get_world_size()
    tokens = tile.local.shape[2] * tile.local.shape[3]
    along = ranks // axes.get("data", 1)
    for _ in range(2):
        model.zero_grad()
        expected.zero_grad()
        calls, sent = _step(model, expected, tile, x)
        assert (calls, sent) == (2, 2 * (along - 1) * HIDDEN * tokens * 8)
    found = jigsaw.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(expected.parameters(), 0.1), rtol=1e-9, atol=0)
    _assert_alike(model, expected)


@pytest.mark.parametrize("axes", [{"lat": 2}, {"lon": 3}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}], ids=str)
def test_blocks_travel_instead_of_sums(axes):
    ranks = 1
    for size in axes.values():
        ranks *= size
    run_on_ranks(ranks, _blocks_travel, axes)


def _blocks_of_many_ranks_are_summed(axes):
    model, expected, tile, x = _made(axes)
    with mock.patch.object(transfers, "MOST_PEERS_AT_ONCE", 1):
        assert _step(model, expected, tile, x) == (0, 0)
    model.zero_grad()
    expected.zero_grad()
    assert _step(model, expected, tile, x)[0] == 2


@pytest.mark.parametrize("axes", [{"lat": 2}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}], ids=str)
def test_among_many_ranks_gradients_are_summed_whole(axes):
    run_on_ranks(4 if len(axes) == 2 else 2, _blocks_of_many_ranks_are_summed, axes)


def _decay(model, x):
    return _loss(model, x) + model.into.weight.square().sum()


def _on_one_rank(model, x):
    more = 1.0 if dist.get_rank() == 0 else 0.0  # of a parameter alone: its mean is taken
    return _loss(model, x) + (more * model.into.weight.square().sum() if more else 0.0)


def _shared(model, x):
    return _loss(model, x) + _loss(model, x * 2)


def _checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False).square().mean()


@on_ranks(3)
def test_what_is_more_than_a_block_is_summed():
    """A weight that has another gradient too, on every rank or on one; a second time it is summed at once."""
    axes = {"lat": 3}
    for loss, wanted in ((_decay, None), (_shared, None), (_on_one_rank, "third")):
        model, expected, tile, x = _made(axes)
        by_hand = wanted and (lambda m, t: _loss(m, t) + m.into.weight.square().sum() / 3)
        first = _step(model, expected, tile, x, loss, by_hand)[0]
        model.zero_grad()
        expected.zero_grad()
        second = _step(model, expected, tile, x, loss, by_hand)[0]
        assert (first, second) == (2, 0 if loss is _shared else 1)
    model, expected, tile, x = _made(axes, again=1)  # one weight, used twice
    _step(model, expected, tile, x)
    model, expected, tile, x = _made(axes)
    assert _step(model, expected, tile, x, _checkpointed)[0] == 2


@on_ranks(2)
def test_hooks_see_the_whole_and_may_change_it():
    for hook in (lambda g: g * 2 + 1, lambda g: g.add_(1), lambda g: None):
        model, expected, tile, x = _made({"lat": 2})
        model.into.weight.register_hook(hook)
        expected.into.weight.register_hook(hook)
        assert _step(model, expected, tile, x)[0] == 1  # that of the other weight
    seen = []
    model.back.weight.register_hook(lambda g: seen.append(g.clone()))
    model.zero_grad()
    _loss(model, tile).backward()
    torch.testing.assert_close(seen[0], expected.back.weight.grad, rtol=1e-9, atol=1e-13)


@on_ranks(2)
def test_a_hook_that_removes_the_gradient_leaves_none():
    model, expected, tile, x = _made({"lat": 2})
    seen = []

    def take(p):
        seen.append(p.grad)
        p.grad = None

    model.back.weight.register_post_accumulate_grad_hook(take)
    _loss(expected, x).backward()
    for _ in range(2):
        model.zero_grad()
        _loss(model, tile).backward()
        assert model.back.weight.grad is None
        torch.testing.assert_close(seen[-1], expected.back.weight.grad, rtol=1e-9, atol=1e-13)


def _failing_pass(axes):
    """A pass that raises once all gradients of the mixer have left, is followed by `zero_grad` and a good one."""
    model, expected, tile, x = _made(axes)

    def fail(grad):
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jigsaw.parallel.gradient_buckets._LENT_BYTES", 1)
        for is_kept in (False, True):
            model.zero_grad()
            expected.zero_grad()
            if is_kept:  # what an earlier pass gave stays, as in torch
                _step(model, expected, tile, x)
            before = [p.grad for p in model.parameters()]
            early = jigsaw.Tile(tile.local.clone().requires_grad_(), tile.layout, tile.mesh)
            early.local.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                _loss(model, early).backward()
            assert all(p.grad is not None for p in model.parameters())
            assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True) if grad is not None)
            model.zero_grad()
            expected.zero_grad()
            _step(model, expected, tile, x)


@pytest.mark.parametrize("axes", [{"lat": 2}, {"data": 2}], ids=str)
def test_zero_grad_after_a_pass_that_raised_reaches_all_gradients(axes):
    run_on_ranks(2, _failing_pass, axes)


@on_ranks(4)
def test_gradients_add_up_over_passes():
    for way in ("each reduced", "no_sync", "zeros"):
        model, expected, tile, x = _made({"lat": 2, "lon": 2})
        if way == "zeros":
            for m in (model, expected):
                for p in m.parameters():
                    p.grad = torch.zeros_like(p)
        for k in range(3):
            _loss(expected, x + k).backward()
            if way == "no_sync" and k < 2:
                with jigsaw.no_sync(model), comm.count() as sent:
                    _loss(model, tile + k).backward()
                assert not any(c.kind == KIND for c in sent.calls)
            else:
                _loss(model, tile + k).backward()
        _assert_alike(model, expected)


class _BackwardWithin(torch.autograd.Function):
    """A backward pass in another's."""

    @staticmethod
    def forward(ctx, x, again):
        ctx.again = again
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        with torch.enable_grad():
            ctx.again().backward()
        return grads[0], None


@on_ranks(2)
def test_a_part_that_comes_while_blocks_travel():
    model, expected, tile, x = _made({"lat": 2})

    def twice(module, t):
        t = t * 1.0
        if isinstance(t, jigsaw.Tile):
            local = _BackwardWithin.apply(t.local.requires_grad_(), lambda: _loss(module, t.detach()))
            return _loss(module, jigsaw.Tile(local, t.layout, t.mesh))
        return 2 * _loss(module, t)

    _step(model, expected, tile, x, twice)


@on_ranks(2)
def test_other_meshes_and_cut_weights_are_as_before():
    torch.manual_seed(0)
    x = torch.randn(4, 3, ROWS, COLUMNS, dtype=torch.float64)
    expected = TokenMixer().double()
    mesh = world_mesh(lat=2)
    cut = jigsaw.parallelize(copy.deepcopy(expected), mesh, shard_weights=True, unit_bytes=1)
    wrapped = nn.parallel.DistributedDataParallel(jigsaw.parallelize(copy.deepcopy(expected), mesh, reduce=False))
    _loss(expected, x).backward()
    for model in (cut, wrapped):
        with comm.count() as sent:
            _loss(model, jigsaw.shard(x, mesh, SPEC)).backward()
        assert not any(c.kind == KIND for c in sent.calls)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, q.grad, rtol=1e-9, atol=1e-13)
