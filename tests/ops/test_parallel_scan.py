"""A parallel scan that writes through views, as Mamba's in plain torch, forward and in its own backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import shard


def _scan(decays, values):
    """Make ``values[t] += decays[t] * values[t - 1]`` along dim 2 of [batch, channel, time, state], a power of two of
    steps, in place: pairs of steps first, then what lies between.
    """
    batch, channels, steps, _ = decays.shape
    a, x, levels = decays, values, steps.bit_length() - 1
    for _ in range(levels):
        count = x.size(2) // 2
        a, x = a.view(batch, channels, count, 2, -1), x.view(batch, channels, count, 2, -1)
        x[:, :, :, 1].add_(a[:, :, :, 1].mul(x[:, :, :, 0]))
        a[:, :, :, 1].mul_(a[:, :, :, 0])
        a, x = a[:, :, :, 1], x[:, :, :, 1]
    for k in range(levels - 2, -1, -1):
        a, x = decays[:, :, 2**k - 1 :: 2**k], values[:, :, 2**k - 1 :: 2**k]
        count = x.size(2) // 2
        a, x = a.view(batch, channels, count, 2, -1), x.view(batch, channels, count, 2, -1)
        x[:, :, 1:, 0].add_(a[:, :, 1:, 0].mul(x[:, :, :-1, 1]))
        a[:, :, 1:, 0].mul_(a[:, :, :-1, 1])


class _ParallelScan(torch.autograd.Function):
    """Of decays and values [batch, time, channel, state]."""

    @staticmethod
    def forward(ctx, decays, values):
        a, x = decays.clone().transpose(1, 2), values.clone().transpose(1, 2)
        _scan(a, x)
        ctx.save_for_backward(decays, x)
        return x.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        decays, x = ctx.saved_tensors
        later = F.pad(decays.transpose(1, 2)[:, :, 1:], (0, 0, 0, 1)).flip(2).contiguous()
        back = grad.transpose(1, 2).flip(2).clone()
        _scan(later, back)
        back = back.flip(2)
        to_decays = torch.zeros_like(x)
        to_decays[:, :, 1:].add_(x[:, :, :-1] * back[:, :, 1:])
        return to_decays.transpose(1, 2), back.transpose(1, 2)


def _one_after_the_other(decays, values):
    steps = [values[:, 0]]
    for a, x in zip(decays.unbind(1)[1:], values.unbind(1)[1:], strict=True):
        steps.append(a * steps[-1] + x)
    return torch.stack(steps, 1)


def _assert_exact(mesh, spec, split):
    generator = torch.Generator().manual_seed(0)
    decays, values, weight = (torch.randn(2, 16, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (decays, values)]
    expected = _one_after_the_other(*leaves)
    (expected * weight).sum().backward()
    tiles = [shard(x, mesh, spec, split=split).requires_grad_() for x in (decays, values)]
    found = _ParallelScan.apply(*tiles)
    (found * weight).sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected, msg=str(spec))
    for tile, leaf in zip(tiles, leaves, strict=True):
        torch.testing.assert_close(tile.grad.full_tensor(), leaf.grad, msg=str(spec))


@on_ranks(2)
def test_a_scan_cut_along_each_dim_is_exact():
    for dim in range(4):
        _assert_exact(world_mesh(lat=2), [None if d != dim else "lat" for d in range(4)], "balanced")
    _assert_exact(world_mesh(lat=2), (None, "lat", None, None), {1: (0, 5, 16)})


@on_ranks(4)
def test_a_scan_cut_along_two_dims_is_exact():
    for spec in ((None, "lat", "lon", None), ("lon", "lat", None, None), (None, ("lat", "lon"), None, None)):
        _assert_exact(world_mesh(lat=2, lon=2), spec, "balanced")
