"""Tokens cut along the axis of the weights between column and row layers: sequence parallelism, for no more bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.parallel.gradient_buckets import local_part
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh


class Block(nn.Module):
    """Attention and an MLP between norms, dropout and residuals; a layer by itself behind them."""

    def __init__(self, heads=12, mlp_only=False, rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(3))
        self.own = None if mlp_only else nn.MultiheadAttention(12, heads, batch_first=True)
        self.other = None if mlp_only else nn.MultiheadAttention(12, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(rate), nn.Linear(24, 12))
        self.drop = nn.Dropout(rate)
        self.last = nn.Linear(12, 36)

    def forward(self, x):
        if self.own is not None:
            h = self.norms[0](x)
            x = x + self.drop(self.own(h, h, h, need_weights=False)[0])
            h = self.norms[1](x)
            x = x + self.other(h, h.flip(1), 2 * h, need_weights=True)[0]
        return self.last(x + self.drop(self.mlp(self.norms[2](x))))


TOKENS = (None, ("lat", "channel"), None)
MESHES = [{"channel": 2}, {"channel": 3}, {"channel": 4}, {"lat": 2, "channel": 2}]


class Parallel:
    """What runs on the ranks; a class, for it must pickle."""

    def __init__(self, shard_weights, gather_again=False):
        self.options = {"shard_weights": shard_weights, "unit_bytes": 1, "gather_again": gather_again}

    def __call__(self, model, mesh):
        return jigsaw.parallelize(model, mesh, **self.options)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_equal_to_one_process(mesh, cut):
    x = torch.randn(2, 13, 12, generator=torch.Generator().manual_seed(1))
    assert_same_on_every_mesh(Block(), x, [mesh], spec=TOKENS, build=Parallel(cut))
    if mesh == {"lat": 2, "channel": 2}:  # flattened tokens, fewer tokens than ranks, fewer heads than ranks
        image = nn.Sequential(nn.Flatten(1, 2), Block(mlp_only=True))
        spec = (None, "lat", "channel", None)
        assert_same_on_every_mesh(image, torch.randn(2, 5, 3, 12), [mesh], spec=spec, build=Parallel(cut))
        assert_same_on_every_mesh(Block(heads=1), torch.randn(1, 3, 12), [mesh], spec=TOKENS, build=Parallel(cut))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_equal_to_one_process_with_tokens_gathered_again(mesh, cut):
    x = torch.randn(2, 13, 12, generator=torch.Generator().manual_seed(1))
    assert_same_on_every_mesh(Block(), x, [mesh], spec=TOKENS, build=Parallel(cut, gather_again=True))


class Squares(nn.Module):
    """A column and a row layer behind a product, so that the column's input is made and may be changed."""

    def __init__(self, is_changed=False):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.is_changed = nn.Linear(12, 24), nn.Linear(24, 12), is_changed

    def forward(self, x):
        own = x * x
        y = self.down(self.up(own).tanh())
        if self.is_changed:
            own.mul_(2)
        return y


SQUARES = {"up": "column", "down": "row"}


def _graph_of_squares(again, is_changed=False):
    mesh = world_mesh(channel=2)
    net = jigsaw.parallelize(Squares(is_changed).double(), mesh, tensor=SQUARES, gather_again=again)
    whole = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = jigsaw.shard(whole, mesh, (None, "channel", None)).requires_grad_()
    return net, x, net(x).square().mean()


@on_ranks(2)
def test_a_graph_that_gathers_again_serves_twice_and_has_second_derivatives():
    results = []
    for again in (False, True):
        net, x, loss = _graph_of_squares(again)
        first = [torch.autograd.grad(loss, [x], retain_graph=True)[0].full_tensor() for _ in range(2)]
        (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
        slope.square().sum().backward()
        results.append(
            [*first, slope.full_tensor(), x.grad.full_tensor(), *(local_part(p.grad) for p in net.parameters())]
        )
    for kept, gathered in zip(*results, strict=True):
        torch.testing.assert_close(gathered, kept, rtol=1e-13, atol=1e-15)


@on_ranks(2)
def test_tokens_that_change_before_they_are_gathered_again_are_told():
    _, _, loss = _graph_of_squares(True, is_changed=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _step(spec, block):
    """The loss, what was sent forward and backward, and what the graph holds but for the weights, of one rank."""
    mesh = world_mesh(lat=2, channel=2)
    torch.manual_seed(0)
    block = jigsaw.parallelize(block, mesh)
    x = jigsaw.shard(torch.randn(2, 16, 12), mesh, spec)
    x.local.requires_grad_()
    held = {}

    def keep(saved):
        held[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved), comm.count() as forward:
        loss = block(x).square().mean()
    with jigsaw.no_sync(block), comm.count() as backward:
        loss.backward()
    of_weights = {local_part(p).untyped_storage().data_ptr() for p in block.parameters()}
    return loss.item(), forward, backward, sum(n for at, n in held.items() if at not in of_weights)


class Residual(nn.Module):
    """What tensor parallelism is published for: a column and a row layer, between a norm and a residual."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop = nn.LayerNorm(12), nn.Dropout(0.25)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))

    def forward(self, x):
        return x + self.drop(self.mlp(self.norm(x)))


@on_ranks(4)
def test_as_many_bytes_as_with_whole_tokens_and_less_held():
    whole_loss, *whole, whole_held = _step((None, "lat", None), Residual())
    cut_loss, *cut, cut_held = _step(TOKENS, Residual())
    assert cut_loss == pytest.approx(whole_loss, rel=1e-6)  # with the same dropout
    tokens = 2 * 8 * 12 * 4  # bytes of x along channel
    seeds = [call.sent_bytes for call in whole[0].calls if call.kind == "broadcast"]
    mean = 2 * 3 * 2 * 4 // 4
    for before, after in zip(whole, cut, strict=True):
        assert next(c.sent_bytes for c in before.calls if c.kind == "all_reduce") == tokens
        assert [c.sent_bytes for c in after.calls if c.kind == "exchange"] == [tokens // 2, tokens // 2]
    assert cut[0].sent_bytes == sum(seeds) + 2 * (tokens // 2) + mean
    assert cut[1].sent_bytes == whole[1].sent_bytes == tokens
    assert whole_held - cut_held > 2 * (tokens // 2)  # the norm's input, and the loss's; masks and statistics besides


@on_ranks(4)
def test_axes_in_another_order_are_refused():
    mesh = world_mesh(channel=2, lat=2)
    model = jigsaw.parallelize(nn.Linear(12, 4), mesh)
    x = jigsaw.shard(torch.randn(2, 16, 12), mesh, (None, ("channel", "lat"), None))
    with pytest.raises(ShardingError, match=r"lie side by side only where .*: \('lat', 'channel'\)"):
        model(x)
