"""Activation checkpointing: halos that came in the forward pass are not sent again, and go with the graph."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jigsaw import comm, kept_halos, parallelize
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile_making import shard


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
    for run in (_whole, _by_layer):
        sent, found = _step(run, mesh, spec, stride)
        assert sent == plain
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    sent, found = _step(_whole, mesh, spec, stride, again=True)
    assert sent == [plain[0], 2 * plain[1]]
    torch.testing.assert_close(found, [2 * g for g in expected], rtol=1e-12, atol=1e-12)
    gc.collect()
    assert not len(kept_halos._kept)


@on_ranks(2)
def test_checkpointing_sends_halos_once_on_two_ranks():
    mesh = world_mesh(lat=2)
    for stride in (1, 2):
        _compare_steps(mesh, (None, None, "lat", None), stride)


@pytest.mark.slow
@on_ranks(3)
def test_checkpointing_sends_halos_once_on_three_ranks():
    _compare_steps(world_mesh(lat=3), (None, None, "lat", None), 2)


@on_ranks(4)
def test_checkpointing_sends_halos_once_on_four_ranks():
    _compare_steps(world_mesh(lat=2, lon=2), (None, None, "lat", "lon"), 1)


@on_ranks(2)
def test_what_is_kept_of_halos_is_small():
    mesh, net = world_mesh(lat=2), _net(1)
    x = shard(torch.randn(1, 4, 66, 70, dtype=torch.float64), mesh, (None, None, "lat", None))
    y = _whole(net, x)
    kept = [m for frame in kept_halos._kept.values() for m in frame.messages]
    assert sum(flat.nbytes for m in kept for _, flat in m[1]) == 3 * 4 * 70 * 8
    del y, kept
    gc.collect()
    assert not len(kept_halos._kept)
    # rows as many as a rank has are no halo: they come again
    wide = nn.Conv2d(4, 4, (33, 1), padding=(16, 0)).double()
    y = _whole(wide, x)
    assert [m for frame in kept_halos._kept.values() for m in frame.messages] == [None]
    with comm.count() as counted:
        y.sum().backward()
    assert counted.calls
