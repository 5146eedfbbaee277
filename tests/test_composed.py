"""Strategies at once: ten steps of a transformer and of a U-Net on many meshes are those of one process."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

SPEC = ("data", None, "lat", "lon")


class TokenBlock(nn.Module):
    """Attention and a perceptron, before each a norm; dropout of nothing, for exact steps."""

    def __init__(self, width):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self._make_perceptron(width)

    def _make_perceptron(self, width):
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def perceptron(self, x):
        return self.narrow(F.gelu(self.wide(x)))

    def forward(self, x):
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.perceptron(self.between(x))


class DenseExperts(nn.Module):
    """The oracle of `jigsaw.nn.MoE`: every token through all experts, weighed by the two that it chose."""

    def __init__(self, width, hidden=7, experts=5):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, width) / 3)
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden) / 3)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, width) / 3)
        self.router = nn.Parameter(torch.randn(experts, width))

    def forward(self, x):
        logits = F.linear(x, self.router)
        p, dims = logits.softmax(-1), tuple(range(x.ndim - 1))
        best = p.topk(2)
        weights = torch.zeros_like(p).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        share = (weights > 0).to(p.dtype).mean(dims) / 2
        self.balance_loss = len(self.router) * (share * p.mean(dims)).sum()
        self.z_loss = logits.logsumexp(-1).square().mean()
        wide = F.silu(torch.einsum("...d,ehd->...eh", x, self.w1)) * torch.einsum("...d,ehd->...eh", x, self.w3)
        return torch.einsum("...eh,edh,...e->...d", wide, self.w2, weights)

    def cut(self, mesh, axis):
        """The layer of jigsaw, with these weights."""
        experts, hidden, width = self.w1.shape
        made = jigsaw.nn.MoE(width, hidden, experts, 2, mesh=mesh, axis=axis)
        with torch.no_grad():
            for name, p in made.named_parameters():
                value = self.get_parameter(name)
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
        return made


class ExpertBlock(TokenBlock):
    """A mixture of experts for a perceptron."""

    def _make_perceptron(self, width):
        self.experts = DenseExperts(width)

    def perceptron(self, x):
        return self.experts(x)


class Transformer(nn.Module):
    """Patches, a learned position, blocks, each recomputed in the backward pass, and patches again."""

    def __init__(self, checkpointed, block=TokenBlock):
        super().__init__()
        self.checkpointed = checkpointed
        self.patch, self.position = nn.Conv2d(3, 12, 2, stride=2), nn.Parameter(torch.randn(12, 9, 6))
        self.blocks = nn.ModuleList([block(12), block(12)])
        self.head = nn.ConvTranspose2d(12, 3, 2, stride=2)

    def forward(self, x):
        maps = self.patch(x) + self.position
        tokens = maps.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if self.checkpointed else block(tokens)
        return self.head(tokens.transpose(1, 2).unflatten(2, maps.shape[2:]))


class UNet(nn.Module):
    """Two levels; what comes up meets its skip at an odd size."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.enter = self._block(3, 8, 1)
        self.down, self.deep = self._block(8, 12, 2), self._block(12, 12, 1)
        self.leave = nn.Conv2d(20, 3, 3, padding=1)

    @staticmethod
    def _block(inputs, outputs, stride):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, stride=stride)
        return nn.Sequential(conv, nn.GroupNorm(2, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))

    def forward(self, x):
        high = self.enter(x)
        low = self.down(high)
        low = low + (checkpoint(self.deep, low, use_reentrant=False) if self.checkpointed else self.deep(low))
        return x + self.leave(torch.cat([high, F.interpolate(low, size=high.shape[-2:], mode="bilinear")], 1))


def mixture(checkpointed):
    return Transformer(checkpointed, ExpertBlock)


NETS = {"transformer": (Transformer, 18), "unet": (UNet, 17)}
MIXTURES = {"mixture": (mixture, 18)}
# four stages, none of which begins within what is checkpointed
QUARTERS = {"transformer": ["blocks.0", "blocks.1", "head"], "unet": ["down", "deep", "leave"]}
WHOLE, CUT = {}, {"shard_weights": True, "unit_bytes": 1}
MESHES = [
    ({"lat": 2}, CUT),
    ({"lat": 3}, CUT | {"shard_weights": "keep"}),
    ({"lon": 4}, CUT),
    ({"data": 2, "lat": 2}, CUT | {"replicate": "data"}),
    ({"data": 2, "lat": 2}, WHOLE),
    ({"data": 3, "lat": 2}, CUT),
    ({"lat": 2, "lon": 2}, CUT),
    ({"lat": 3, "lon": 2}, WHOLE),
    ({"channel": 2}, CUT),
    ({"channel": 4}, WHOLE),
    ({"lat": 2, "channel": 2}, CUT),
    ({"lon": 3, "channel": 2}, WHOLE),
    ({"data": 2, "channel": 2}, CUT),
    ({"data": 2, "channel": 3}, CUT | {"shard_weights": "keep"}),
    ({"lat": 5}, WHOLE),
    ({"lat": 7}, CUT),
    ({"lon": 8}, CUT),
    ({"data": 2, "lat": 2, "lon": 2}, CUT),
    ({"data": 2, "lat": 2, "lon": 2}, CUT | {"replicate": ["data"]}),
    ({"data": 2, "lat": 2, "lon": 2}, WHOLE),
    ({"data": 2, "lat": 2, "channel": 2}, CUT),
    ({"data": 2, "lat": 2, "channel": 2}, CUT | {"replicate": "data"}),
    ({"lat": 2, "lon": 2, "channel": 2}, CUT),
    ({"lat": 2, "lon": 2, "channel": 2}, WHOLE),
    ({"lat": 4, "channel": 2}, CUT | {"shard_weights": "keep"}),
    ({"data": 4, "lat": 2}, CUT | {"replicate": "lat"}),
]
FIRST = [3, 10]
EXPERTS = [
    ({"expert": 2, "lat": 2}, WHOLE, "expert"),
    ({"data": 2, "lat": 2}, WHOLE, ("data", "lat")),
    ({"expert": 2, "lat": 2}, CUT, "expert"),
    ({"data": 2, "lat": 3}, CUT, ("data", "lat")),
    ({"lat": 2, "channel": 2}, WHOLE, "lat"),
    ({"lat": 2, "channel": 2, "expert": 2}, CUT, "expert"),
    ({"data": 2, "lat": 2, "expert": 2}, CUT | {"replicate": "data"}, ("lat", "expert")),
]
PIPES = [
    ({"pipe": 2}, {"schedule": "1f1b"}, None),
    ({"pipe": 2, "lat": 2}, {"schedule": "zbv"}, None),
    ({"pipe": 2, "data": 2, "lat": 2}, {"schedule": "1f1b"}, None),
    ({"pipe": 2, "lat": 2, "channel": 2}, {"schedule": "interleaved_zero_bubble"}, None),
    ({"pipe": 2, "lat": 2}, {"schedule": "1f1b", "shard_weights": True}, None),
    ({"pipe": 2, "lat": 2, "channel": 2}, {"schedule": "interleaved_1f1b", "shard_weights": True}, None),
    ({"pipe": 4, "lat": 2}, {"schedule": "gpipe"}, None),
    ({"pipe": 2, "lat": 2}, {"schedule": "1f1b"}, "lat"),
    ({"pipe": 2, "lat": 2, "expert": 2}, {"schedule": "zbv"}, "expert"),
    ({"pipe": 2, "data": 2, "lat": 2}, {"schedule": "1f1b", "shard_weights": True}, ("data", "lat")),
]


def _name(case):
    axes, options = case[:2]
    mesh = "x".join(f"{name}{size}" for name, size in axes.items())
    how = f"{options.get('schedule', '')}{options.get('shard_weights', 'whole')}"
    experts = "-experts" if case[2:] and case[2] else ""
    return f"{mesh}-{how}{experts}" + ("-copies" if "replicate" in options else "")


def _experts_losses(model):
    losses = [0.1 * m.balance_loss + 0.01 * m.z_loss for m in model.modules() if hasattr(m, "balance_loss")]
    return sum(losses)


def _two_passes(model, batches):
    """Losses of two backward passes whose gradients are added up."""
    with jigsaw.no_sync(model):
        first = (model(batches[0]) - batches[1]).square().mean() + _experts_losses(model)
        first.backward()
    second = (model(batches[1]) - batches[0]).abs().mean() + _experts_losses(model)
    second.backward()
    return first.item(), second.item()


def _two_steps(model, batches):
    """As a pipeline has it: the same loss for both, that of the output alone."""
    losses = []
    for x, y in (batches, batches[::-1]):
        if isinstance(model, nn.Module):
            loss = F.mse_loss(model(x), y)
            loss.backward()
        else:
            loss = model.step(x, y)
        losses.append(loss.item())
    return tuple(losses)


def _steps(model, batches, passes, count=10):
    """Losses and gradient norms of clipped AdamW steps, each of two backward passes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    seen = []
    for _ in range(count):
        optimizer.zero_grad()
        losses = passes(model, batches)
        norm = jigsaw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append((*losses, norm.item()))
    return torch.tensor(seen)


def _with_cut_experts(model, mesh, axis):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, DenseExperts):
                setattr(module, name, child.cut(mesh, axis))
    return model


def _ten_steps(axes, options, expert_axis=None):
    torch.set_default_dtype(torch.float64)
    mesh = world_mesh(**axes)
    spec = tuple(name if name in axes else None for name in SPEC)
    if expert_axis == "expert" and "pipe" not in axes and "channel" not in axes:
        spec = (("data", "expert") if "data" in axes else "expert", *spec[1:])
    for name, (make, rows) in (MIXTURES if expert_axis else NETS).items():
        torch.manual_seed(0)
        whole = make("shard_weights" in options)
        samples = (4 if "pipe" in axes else 5) if spec[0] else 2
        batch = [torch.randn(samples, 3, rows, 12) for _ in range(2)]
        model = _with_cut_experts(copy.deepcopy(whole), mesh, expert_axis)
        if "pipe" in axes:
            if options["schedule"] == "interleaved_1f1b":
                options = options | {"stages": QUARTERS[name]}
            model = jigsaw.pipeline(model, mesh, loss=F.mse_loss, microbatches=2 if spec[0] else samples, **options)
            passes = _two_steps
        else:
            model, passes = jigsaw.parallelize(model, mesh, **options), _two_passes
        found = _steps(model, [jigsaw.shard(x, mesh, spec) for x in batch], passes)
        expected = _steps(whole, batch, passes)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        compared = 0
        for key, ours in model.named_parameters():
            ours, theirs = ours.full_tensor() if isinstance(ours, DTensor) else ours, whole.get_parameter(key)
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=lambda m, n=key: f"{n}: {m}")
            compared += 1
        assert compared == len(list(whole.parameters())) or ("pipe" in axes and compared)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*(MESHES[k] for k in FIRST), PIPES[7]], ids=_name)
def test_ten_steps_of_all_strategies_at_once(case):
    run_on_ranks(math.prod(case[0].values()), _ten_steps, *case)


def _with_marks(cases):
    """Cases of more than four ranks run nightly: each takes half a minute of two cores."""
    many = [case for case in cases if math.prod(case[0].values()) > 4]
    return [pytest.param(case, marks=[pytest.mark.nightly] if case in many else []) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", _with_marks([c for k, c in enumerate(MESHES) if k not in FIRST]), ids=_name)
def test_ten_steps_on_other_meshes(case):
    run_on_ranks(math.prod(case[0].values()), _ten_steps, *case, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("case", _with_marks([*EXPERTS, *(case for k, case in enumerate(PIPES) if k != 7)]), ids=_name)
def test_ten_steps_of_experts_and_pipelines(case):
    run_on_ranks(math.prod(case[0].values()), _ten_steps, *case, timeout=240)
