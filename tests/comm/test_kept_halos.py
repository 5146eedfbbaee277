"""Activation checkpointing: halos that came in the forward pass are not sent again, and go with the graph."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jigsaw import comm, parallelize
from jigsaw.comm import checkpoint_runs, kept_halos
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard


def _net(stride):
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 4, 3, padding=1, stride=stride), nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(3, 1, 1)]
    return nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers)).double()


def _whole(net, x):
    return checkpoint(net, x, use_reentrant=False)


def _by_layer(net, x):
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def _nested(net, x):
    """Three deep, with a convolution before, within and after each call."""

    def outer(x):
        return checkpoint(net[2], checkpoint(inner, net[0](x), use_reentrant=False), use_reentrant=False)

    def inner(x):
        return checkpoint(net[1], x, use_reentrant=False)

    return checkpoint(outer, x, use_reentrant=False)


def _step(run, mesh, spec, stride, again=False):
    """What halos send forward and backward, and the gradients."""
    net = parallelize(_net(stride), mesh)
    torch.manual_seed(1)
    x = shard(torch.randn(1, 4, 66, 70, dtype=torch.float64), mesh, spec)
    x.requires_grad_()
    with comm.count() as forward:
        loss = run(net, x).square().sum()
    with comm.count() as backward:
        loss.backward(retain_graph=again)
        if again:
            loss.backward()
    sent = [sum(c.sent_bytes for c in counted.calls if c.kind == "exchange") for counted in (forward, backward)]
    return sent, [x.grad.full_tensor(), *(p.grad.clone() for p in net.parameters())]


def _compare_steps(mesh, spec, stride):
    plain, expected = _step(lambda net, x: net(x), mesh, spec, stride)
    assert plain[0] > 0 and plain[1] > 0
    for run in (_whole, _by_layer, _nested):
        sent, found = _step(run, mesh, spec, stride)
        assert sent == plain
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for run in (_whole, _nested):
        sent, found = _step(run, mesh, spec, stride, again=True)
        assert sent == [plain[0], 2 * plain[1]]
        torch.testing.assert_close(found, [2 * g for g in expected], rtol=1e-12, atol=1e-12)
    gc.collect()
    assert not kept_halos._received.of_frames


@on_ranks(2)
def test_checkpointing_sends_halos_once_on_two_ranks():
    mesh = world_mesh(lat=2)
    for stride in (1, 2):
        _compare_steps(mesh, (None, None, "lat", None), stride)


def _saves_convolutions(context, function, *args, **kwargs):
    is_dear = function is torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(net, x):
    contexts = partial(create_selective_checkpoint_contexts, _saves_convolutions)
    return checkpoint(net, x, use_reentrant=False, context_fn=contexts)


def _offloaded(net, x):
    with torch.autograd.graph.save_on_cpu():
        return net(x)


def _around(run, net, x):
    with torch.autograd.graph.save_on_cpu():
        return run(net, x)


@on_ranks(2)
def test_selective_checkpointing_sends_halos_once():
    mesh, spec = world_mesh(lat=2), (None, None, "lat", None)
    plain, expected = _step(lambda net, x: net(x), mesh, spec, 2)
    for run in (_selective, _offloaded, partial(_around, _whole), partial(_around, _nested)):
        sent, found = _step(run, mesh, spec, 2)
        assert sent == plain and plain[1] > 0
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class NestedBlock(nn.Module):
    """What calls within calls may take and give: several tiles, a plain tensor, tuples, names; one is used later."""

    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.qkv, self.up = nn.Linear(6, 18), nn.Conv2d(6, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))

    def _attend(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        y = F.scaled_dot_product_attention(*self.qkv(tokens).chunk(3, -1))
        return y.transpose(1, 2).unflatten(2, x.shape[2:])

    def _inner(self, x, skip, scale, bias=None):
        x = self.norm(x * scale) + skip
        return checkpoint(self._attend, x, use_reentrant=False) + bias, x

    def _outer(self, x):
        skip = self.down(x)
        x, same = checkpoint(
            self._inner, skip.sin(), skip, self.scale.exp(), bias=skip.mean(1, True), use_reentrant=False
        )
        return checkpoint(self.up, x * same, use_reentrant=False) + x[:, :3]

    def forward(self, x):
        return checkpoint(self._outer, x, use_reentrant=False) + checkpoint(self._outer, x, use_reentrant=False)


@pytest.mark.parametrize(
    "meshes", [[{"lat": 1}, {"lat": 2}], pytest.param([{"lat": 3}, {"lat": 2, "lon": 2}], marks=pytest.mark.slow)]
)
def test_checkpoints_within_checkpoints_are_exact(meshes):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 13, 10)
    assert_same_on_every_mesh(NestedBlock(), x, meshes, spec=(None, None, "lat", "lon"))


@on_ranks(2)
def test_what_a_checkpoint_has_to_read_again_must_not_change_as_in_torch():
    x = shard(torch.randn(6, 4), world_mesh(lat=2), ("lat", None)).requires_grad_() * 1
    y = checkpoint(torch.sin, x, use_reentrant=False)
    x += 1
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


def _sent_by_kind(function, tiles):
    """Bytes sent and received forward and backward, by kind, and the gradients."""
    for tile in tiles:
        tile.local.grad = None
    with comm.count() as forward:
        y = function(*tiles)
    with comm.count() as backward:
        y.square().sum().backward()
    return [
        {kind: n for kind in sorted({c.kind for c in counted.calls}) if (n := _bytes_of(counted, kind))}
        for counted in (forward, backward)
    ], [tile.local.grad.clone() for tile in tiles]


def _bytes_of(counted, kind):
    return sum(c.sent_bytes + c.received_bytes for c in counted.calls if c.kind == kind)


@on_ranks(2)
def test_rows_that_move_a_little_come_once_and_keys_again():
    mesh = world_mesh(lat=2)

    def case(*shape, points=None, dim=2):
        spec = tuple("lat" if at == dim else None for at in range(len(shape)))
        tile = shard(torch.randn(*shape).double(), mesh, spec, split={dim: points} if points else "balanced")
        tile.local.requires_grad_()
        return tile

    def again(function, *tiles):
        return checkpoint(function, *tiles, use_reentrant=False)

    moved = [case(1, 2, 33, 4), case(1, 2, 33, 4, points=(0, 16, 33))]
    plain, expected = _sent_by_kind(lambda a, b: (a * b).sin(), moved)
    sent, found = _sent_by_kind(lambda a, b: again(lambda a, b: (a * b).sin(), a, b), moved)
    assert plain[0] == {"realign": 64} and sent == plain
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    tokens = [case(1, 2, 33, 4) for _ in "qkv"]
    plain, expected = _sent_by_kind(F.scaled_dot_product_attention, tokens)
    sent, found = _sent_by_kind(lambda *t: again(F.scaled_dot_product_attention, *t), tokens)
    assert sum(sent[1].values()) == sum(plain[0].values()) + sum(plain[1].values())  # as large as a rank's own
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@on_ranks(3)
def test_checkpointing_sends_halos_once_on_three_ranks():
    _compare_steps(world_mesh(lat=3), (None, None, "lat", None), 2)


@on_ranks(4)
def test_checkpointing_sends_halos_once_on_four_ranks():
    _compare_steps(world_mesh(lat=2, lon=2), (None, None, "lat", "lon"), 1)


def _kept_frames(others):
    return [messages for key, messages in kept_halos._received.of_frames.items() if key not in others]


@on_ranks(2)
def test_what_is_kept_of_halos_is_small():
    mesh, net = world_mesh(lat=2), _net(1)
    gc.collect()
    others = {
        *kept_halos._received.of_frames,
        *checkpoint_runs._outer,
    }  # tests before this one may have left graphs behind
    x = shard(torch.randn(1, 4, 66, 70, dtype=torch.float64), mesh, (None, None, "lat", None))
    y = _whole(net, x)
    kept = [m for frame in _kept_frames(others) for m in frame]
    assert sum(flat.nbytes for m in kept for _, flat in m[1]) == 3 * 4 * 70 * 8
    del y, kept
    gc.collect()
    assert not _kept_frames(others)
    # calls within calls keep the same memory
    y = _nested(net, x)
    kept = {id(m): m for frame in _kept_frames(others) for m in frame}
    assert len(_kept_frames(others)) == 4
    assert sum(flat.nbytes for m in kept.values() for _, flat in m[1]) == 3 * 4 * 70 * 8
    del y, kept
    gc.collect()
    assert not _kept_frames(others) and not set(checkpoint_runs._outer) - others
    # rows as many as a rank has are not a halo: they come again
    wide = nn.Conv2d(4, 4, (33, 1), padding=(16, 0)).double()
    y = _whole(wide, x)
    assert [m for frame in _kept_frames(others) for m in frame] == [None]
    with comm.count() as counted:
        y.sum().backward()
    assert counted.calls
