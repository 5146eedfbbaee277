"""jigsaw.compile: one graph with the messages in it, exact, made anew for other layouts alone."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm, graph_calls
from jigsaw.cut import ShardingError
from jigsaw.testing import on_ranks, world_mesh

SPACE = (None, None, "lat", "lon")


class SmallUNet(nn.Module):
    """Two levels, a skip, a stride and a transposed convolution; batch norm, which has buffers."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU())
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.leave = nn.Conv2d(12, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        high = self.enter(x)
        return self.leave(torch.cat([high, self.up(self.down(high))[:, :, : x.shape[2], : x.shape[3]]], 1))


class ConvNeXt(nn.Module):
    """One block, with a large kernel and a scale."""

    def __init__(self):
        super().__init__()
        self.far, self.norm = nn.Conv2d(3, 3, 7, padding=3, groups=3), nn.LayerNorm(3)
        self.wide, self.narrow = nn.Linear(3, 12), nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x):
        y = self.norm(self.far(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


class TokenBlock(nn.Module):
    """Patches, attention over all tokens, a mean over the globe: plain and tile results."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 8, 1), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, shift=None, *, gain=1.0):
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(tokens)).chunk(3, -1))
        y = tokens + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = y if shift is None else y + shift
        return {"tokens": y * gain, "mean": y.square().mean(), "gain": gain}


class Deep(nn.Module):
    """Rows enough for halo strips beside the rows at hand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


NETS = {
    "unet": (SmallUNet, 13, 10),
    "convnext": (ConvNeXt, 33, 10),
    "tokens": (TokenBlock, 7, 10),
    "deep": (Deep, 133, 6),
}


def _step(model, x):
    """The results by name, and the gradients, of one step."""
    out = model(x)
    out = out if isinstance(out, dict) else {"out": out}
    loss = sum(value.square().mean() for value in out.values() if isinstance(value, torch.Tensor))
    loss.backward()
    return {name: value for name, value in out.items() if isinstance(value, torch.Tensor)} | {"loss": loss}


def _assert_close(found, expected, what):
    found = found.full_tensor() if isinstance(found, jigsaw.Tile) else found
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=1e-12, msg=lambda m: f"{what}: {m}")


def _check_nets(backend="aot_eager", **axes):
    mesh = world_mesh(**axes)
    for name, (kind, *size) in NETS.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        whole, x = kind().double(), torch.randn(2, 3, *size, dtype=torch.float64)
        eager, compiled = (jigsaw.parallelize(copy.deepcopy(whole), mesh) for _ in range(2))
        compiled = jigsaw.compile(compiled, backend=backend)
        leaf = x.clone().requires_grad_()
        expected = _step(whole, leaf)
        sent = []
        for model in (eager, compiled):
            tile = jigsaw.shard(x, mesh, SPACE[: 3 + ("lon" in axes)] + (None,) * ("lon" not in axes))
            tile.local.requires_grad_()
            with comm.count() as traffic:
                found = _step(model, tile)
            sent.append([(c.kind, c.sent_bytes) for c in traffic.calls])
            for key, value in expected.items():
                _assert_close(found[key], value, f"{name} {key}")
            _assert_close(tile.grad, leaf.grad, f"{name} gradient of the input")
            for (key, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
                _assert_close(q.grad, p.grad, f"{name} gradient of {key}")
            for (key, b), c in zip(whole.named_buffers(), model.buffers(), strict=True):
                _assert_close(c, b, f"{name} buffer {key}")
        assert sum(b for _, b in sent[0]) == sum(b for _, b in sent[1]), name
        assert sorted(sent[0]) == sorted(sent[1]), name
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]


@on_ranks(2)
def test_nets_are_exact_and_send_what_they_send_without_a_graph():
    _check_nets(lat=2)


@pytest.mark.slow
@on_ranks(1)
def test_nets_on_one_rank():
    _check_nets(lat=1)


@pytest.mark.slow
@on_ranks(3)
def test_nets_on_three_ranks():
    _check_nets(lat=3)


@pytest.mark.slow
@on_ranks(4)
def test_nets_on_two_by_two_ranks():
    _check_nets(lat=2, lon=2)
