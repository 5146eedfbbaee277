"""`jigsaw.pipeline`: losses and gradients of every schedule are those of one process with the whole model."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.dryrun.pipeline_estimate import PieceCost, balanced_cuts, balanced_stages
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.errors import ShardingError
from jigsaw.ranks.mesh import ranks_along
from jigsaw.stages.stage_cuts import balanced_begins
from jigsaw.testing import RankFailedError, on_ranks, run_on_ranks, world_mesh

SPEC = (None, None, "lat", None)
PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()


def _block(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.GELU())


class Chain(nn.Module):
    """Blocks in a list, with a parameter of the net itself."""

    def __init__(self, blocks=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.position = nn.Parameter(torch.randn(4, 33, 1) / 4)
        self.blocks = nn.ModuleList(_block(4) for _ in range(blocks))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.stem(x) + self.position
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.position.mean()


def _model(make, *args):
    torch.manual_seed(0)
    return make(*args).double()


def _batch(rows=33, samples=8):
    torch.manual_seed(1)
    return torch.randn(samples, 3, rows, 6).double(), torch.randn(samples, 2, rows, 6).double()


def _expected(model, x, y, batches=4):
    model = copy.deepcopy(model)
    losses = [F.mse_loss(model(a), b) / batches for a, b in zip(x.chunk(batches), y.chunk(batches), strict=True)]
    sum(losses).backward()
    return sum(losses).item(), {n: p.grad for n, p in model.named_parameters()}


def _assert_gradients(pipe, grads, scale=1.0, atol=1e-12):
    found = {n: p.grad for n, p in pipe.named_parameters()}
    assert found
    for name, grad in found.items():
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(whole, scale * grads[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "axes", [pytest.param({"pipe": 2, "lat": 2}, marks=pytest.mark.slow), {"pipe": 2}], ids=["pipe2-lat2", "pipe2"]
)
def test_each_schedule(axes):
    run_on_ranks(4 if len(axes) == 2 else 2, _check_schedules, axes)


def _check_schedules(axes):
    mesh = world_mesh(**axes)
    model, (x, y) = _model(Chain), _batch()
    loss, grads = _expected(model, x, y)
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for schedule, stages in SCHEDULES.items():
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, schedule=schedule, stages=stages)
        for step in (1, 2):  # gradients are added up
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12), schedule
            _assert_gradients(pipe, grads, step)
        with torch.no_grad():  # the forward passes alone
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12), schedule
        _assert_gradients(pipe, grads, 2)


SCHEDULES = {
    "gpipe": ["blocks.2"],
    "1f1b": None,
    "interleaved_1f1b": ["blocks.0", "blocks.1", "blocks.2"],
    "interleaved_zero_bubble": ["blocks.1", "blocks.2", "blocks.3"],
    "zbv": ["blocks.0", "blocks.1", "blocks.3"],
    "dualpipev": ["blocks.1", "blocks.2", "head"],
}


class PairsInLists(nn.Module):
    """Lists in a list, which nobody calls, and norms of large images, whose way hangs on values."""

    def __init__(self):
        super().__init__()
        pairs = [(nn.Conv2d(n, m, 3, padding=1), nn.GroupNorm(m // 2, m)) for n, m in ((3, 8), (8, 8), (8, 2))]
        self.pairs = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

    def forward(self, x):
        for conv, norm in self.pairs:
            x = F.gelu(norm(conv(x)))
        return x


@pytest.mark.slow
@on_ranks(4)
def test_lists_in_lists_and_norms_of_large_images():
    mesh = world_mesh(pipe=2, lat=2)
    torch.manual_seed(1)
    model, (x, y) = _model(PairsInLists), (torch.randn(4, n, 81, 96).double() for n in (3, 2))
    loss, grads = _expected(model, x, y)
    pipe = jigsaw.pipeline(model, mesh, loss=F.mse_loss)
    assert pipe.step(*(jigsaw.shard(v, mesh, SPEC) for v in (x, y))).item() == pytest.approx(loss, abs=1e-12)
    _assert_gradients(pipe, grads)


# -- nets that are not chains -----------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two levels; skips of each, and of the input, over several stages; an activation that all stages call."""

    def __init__(self):
        super().__init__()
        self.act, self.pool = nn.GELU(), nn.AvgPool2d(2)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.merge = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(7, 2, 1)

    def forward(self, x):
        a = self.act(self.stem(x))
        b = self.act(self.down(self.pool(a)))
        c = self.up(self.act(self.bottom(b)) + b)
        d = self.merge(torch.cat([F.pad(c, (0, 0, 0, a.shape[-2] - c.shape[-2])), a], 1))
        return self.out(torch.cat([d, x], 1))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [33, 10])
@on_ranks(4)
def test_skips_travel_through_the_stages_between(rows):
    mesh = world_mesh(pipe=2, lat=2)
    model, (x, y) = _model(UNet), _batch(rows)
    loss, grads = _expected(model, x, y)
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for schedule, stages in (("1f1b", None), ("interleaved_zero_bubble", ["down", "up", "out"])):
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, schedule=schedule, stages=stages)
        assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
        _assert_gradients(pipe, grads)


class Table(nn.Module):
    """A table that is read, not called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.linspace(0, 1, 4).view(1, 4, 1, 1))

    def get(self):
        return self.waves


class Moments(nn.Module):
    """Plain tensors: one of its own making, and a mean of weights and tiles."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.5]))

    def forward(self, x):
        return torch.ones(6, dtype=x.dtype), (x.square().mean() * self.weight).sum()


class Conditioned(nn.Module):
    """Registered in another order than called; several inputs, by place, by name and in a dict; plain tensors of stage
    0 in stage 1.
    """

    def __init__(self):
        super().__init__()
        self.head, self.position = nn.Conv2d(4, 2, 1), nn.Parameter(torch.randn(4, 1, 1))
        self.second, self.first, self.moments = _block(4), _block(4), Moments()
        self.table, self.time, self.stem = Table(), nn.Linear(3, 4), nn.Conv2d(3, 4, 1)

    def forward(self, x, where, scale=None, given=None):
        x = self.stem(x) * self.stem.bias[:, None, None]  # a weight that is read outside of the call
        waves, phase = self.table.get(), torch.arange(4)[:, None, None] % 2
        phase = torch.where(phase == 1, 0.5, 1.0)
        condition = self.time(given["time"])[:, :, None, None]
        position = self.position.tanh()
        ones, moment = self.moments(x)
        mean = x.mean()
        x = self.first(x + waves)
        deviation = (x - mean).square().mean().sqrt()
        x = self.second(x * phase + condition) + waves * ones
        return {"out": self.head(x * where * position + mean / deviation) * scale, "moment": moment}


def _conditioned_loss(out, y):
    return F.mse_loss(out["out"], y) + out["moment"] / 8


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "lat": 2}], ids=str)
def test_inputs_by_name_and_plain_tensors_in_later_stages(axes):
    run_on_ranks(math.prod(axes.values()), _condition_stages, axes)


def _condition_stages(axes):
    mesh, model = world_mesh(**axes), _model(Conditioned)
    x, y = _batch()
    where, scale, time = torch.rand(33, 6).double(), torch.tensor(0.75).double(), torch.randn(8, 3).double()
    whole, parts = copy.deepcopy(model), [v.chunk(4) for v in (x, time, y)]
    losses = [
        _conditioned_loss(whole(a, where, scale=scale, given={"time": t}), b) / 4
        for a, t, b in zip(*parts, strict=True)
    ]
    sum(losses).backward()
    grads = {n: p.grad for n, p in whole.named_parameters()}
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for stages in (["second"], None):
        example = {"example": (tiles[0], where), "example_kwargs": {"scale": scale, "given": {"time": time}}}
        pipe = jigsaw.pipeline(
            copy.deepcopy(model), mesh, loss=_conditioned_loss, stages=stages, microbatches=4, **example
        )
        for _ in range(2):
            pipe.zero_grad()
            loss = pipe.step((tiles[0], where), tiles[1], scale=scale, given={"time": time})
            assert loss.item() == pytest.approx(sum(losses).item(), abs=1e-12)
            _assert_gradients(pipe, grads)
        changed = {name: v * 2 for name, v in model.state_dict().items()}
        with pytest.raises(ShardingError, match=r"the model has no 'strange'; leave it out, or pass strict=False"):
            pipe.load_state_dict({**changed, "strange": torch.zeros(1)})
        pipe.load_state_dict(changed)
        twice = copy.deepcopy(model)
        twice.load_state_dict(changed)
        with torch.no_grad():
            expected = [
                _conditioned_loss(twice(a, where, scale=scale, given={"time": t}), b)
                for a, t, b in zip(*parts, strict=True)
            ]
            loss = pipe.step((tiles[0], where), tiles[1], scale=scale, given={"time": time})
        assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), abs=1e-12)


class TimesTable(nn.Module):
    """A convolution, and a transform that it shares with others."""

    def __init__(self, table):
        super().__init__()
        self.table, self.conv = table, nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return F.gelu(self.conv(x) * self.table.get())


class SharedTables(nn.Module):
    """Modules of two stages share one table, as blocks of spherical nets do; it is read between them, too."""

    def __init__(self):
        super().__init__()
        self.table, self.stem = Table(), nn.Conv2d(3, 4, 1)
        self.first, self.second = TimesTable(self.table), TimesTable(self.table)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.first(self.stem(x))
        return self.head(self.second(x + self.table.get()) + self.table.get())


@on_ranks(2)
def test_stages_whose_modules_share_a_table():
    mesh, model, (x, y) = world_mesh(pipe=2), _model(SharedTables), _batch()
    loss, grads = _expected(model, x, y)
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, stages=["second"])
    for step in (1, 2):
        assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
        _assert_gradients(pipe, grads, step)


@functools.lru_cache(maxsize=1)
def _waves(rows, dtype):
    """Positions by shape, which packages keep for the next call."""
    return torch.linspace(0, 3, rows, dtype=dtype)[:, None].sin()


class PlacedByCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second, self.head = nn.Conv2d(3, 4, 1), _block(4), _block(4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.first(self.stem(x) + _waves(x.shape[2], x.dtype))
        return self.head(self.second(x * _waves(x.shape[2], x.dtype)))


@on_ranks(2)
def test_what_a_function_keeps_for_the_next_call_has_values():
    mesh, model, (x, y) = world_mesh(pipe=2), _model(PlacedByCache), _batch()
    loss, grads = _expected(model, x, y)
    _waves.cache_clear()
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for example in (None, tiles[0]):
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, stages=["second"], example=example)
        for step in (1, 2):
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
            _assert_gradients(pipe, grads, step)


@on_ranks(2)
def test_the_loss_has_the_type_of_the_weights():
    mesh, x = world_mesh(pipe=2), torch.randn(4, 3, 33, 6)
    for dtype in (torch.float32, torch.bfloat16):
        pipe = jigsaw.pipeline(Chain().to(dtype), mesh, loss=lambda out, y: out.square().mean(), microbatches=2)
        assert pipe.step(x.to(dtype)).dtype == dtype


class Negated(torch.autograd.Function):
    """Another gradient than torch would find; of a given tile as it is, or times a plain weight."""

    @staticmethod
    def forward(ctx, x, weight=None):
        ctx.save_for_backward(x, weight)
        return x if weight is None else x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (-grad, None) if weight is None else (-grad * weight, (grad * x).sum())


class Reversed(nn.Module):
    """A custom Function right before a border: of its own input, of a weight, of two stages."""

    def __init__(self, how):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.tensor(1.5))
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        x = self.first(x)
        y = Negated.apply(x, *([] if self.how == "input" else [self.weight]))
        return self.second(y) + (y[:, :2] - x[:, :2] if self.how == "skip" else 0)


@on_ranks(2)
def test_results_of_custom_functions_cross_borders():
    mesh, (x, y) = world_mesh(pipe=2, lat=1), _batch()
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for how, sent in (("input", 1), ("weight", 1), ("skip", 2)):
        model = _model(Reversed, how)
        loss, grads = _expected(model, x, y)
        pipe = jigsaw.pipeline(model, mesh, loss=F.mse_loss, stages=["second"])
        assert _sent(pipe, *tiles) == (pytest.approx(loss, abs=1e-12), sent * 8 * x.numel())
        _assert_gradients(
            pipe, {name: torch.zeros_like(x[0, 0, 0, 0]) if g is None else g for name, g in grads.items()}
        )


class Narrowing(nn.Sequential):
    """Most of the work where the rows are, most of the parameters where they are not."""

    def __init__(self):
        def conv(before, after, stride=1):
            return nn.Sequential(nn.Conv2d(before, after, 3, stride, padding=1), nn.GELU())

        wide = [conv(3, 16), conv(16, 16), conv(16, 16), conv(16, 16)]
        super().__init__(*wide, conv(16, 32, 4), conv(32, 64), conv(64, 64), nn.Conv2d(64, 2, 1))


@on_ranks(2)
def test_stages_are_balanced_by_a_dry_run():
    mesh = world_mesh(pipe=2)
    model = _model(Narrowing)
    x, y = torch.randn(8, 3, 32, 24).double(), torch.randn(8, 2, 8, 6).double()
    for tensor in (x, y):
        torch.distributed.broadcast(tensor, 0)
    loss, grads = _expected(model, x, y)
    tiles = [jigsaw.shard(v, mesh, (None, None, None, None)) for v in (x, y)]
    with comm.count() as counted:
        begins = balanced_stages(model, tiles[0], mesh, axis="pipe", stages=2, microbatches=4)
    assert not counted.calls
    # operations a pixel, as the first convolution needs no gradient of its input: 96, 768, 768 | 768, 96, 384, 768, 24
    assert begins == ("3",)
    assert balanced_begins(model, 2) == ("6",)
    pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, stages="balanced", example=tiles[0])
    assert {name.split(".")[0] for name, _ in pipe.named_parameters()} == set("012" if pipe.stages == [0] else "34567")
    assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
    _assert_gradients(pipe, grads)
    with pytest.raises(ShardingError, match="needs example="):
        jigsaw.pipeline(model, mesh, loss=F.mse_loss, stages="balanced")
    with pytest.raises(ShardingError, match="stages='even' must be a list of names"):
        jigsaw.pipeline(model, mesh, loss=F.mse_loss, stages="even")
    with pytest.raises(ShardingError, match="a batch of 8, which is not a multiple of microbatches=3"):
        jigsaw.pipeline(model, mesh, loss=F.mse_loss, stages="balanced", example=tiles[0], microbatches=3)


def test_stages_fit_before_they_are_balanced():
    pieces = [
        PieceCost(str(at), seconds, size, 0) for at, (seconds, size) in enumerate([(1, 9), (1, 9), (1, 1), (5, 1)])
    ]
    assert balanced_cuts(pieces, 2, 4, 1e3) == [3]
    assert balanced_cuts(pieces, 2, 4, 15) == [1]
    # nothing fits: the least memory
    assert balanced_cuts(pieces, 2, 4, 1) == [1]
    # of four microbatches the first of three stages has three under way
    kept = [PieceCost(str(at), 1, 0, 10) for at in range(6)]
    assert balanced_cuts(kept, 3, 4, 1e3) == [2, 4]
    assert balanced_cuts(kept, 3, 4, 40 / 0.9) == [1, 3]


# -- training ---------------------------------------------------------------------------------------------------------


class Checkpointed(Chain):
    def forward(self, x):
        x = self.stem(x) + self.position
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _trained(model, x, y, steps=3):
    """Norms of clipped gradients, and the weights after these steps."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), []
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return norms, model, optimizer


def _pipe_trained(pipe, tiles, steps=3):
    optimizer, norms = torch.optim.AdamW(pipe.parameters(), lr=1e-2, eps=1e-4), []
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.step(*tiles)
        norms.append(jigsaw.clip_grad_norm_(pipe.parameters(), 0.05).item())
        optimizer.step()
    return norms, optimizer


def _assert_weights(pipe, model):
    for name, p in pipe.named_parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(whole, model.get_parameter(name), rtol=0, atol=1e-11)


HYBRID = {"shard_weights": True, "replicate": "data"}


def _check_training(folder, axes, cut):
    """FSDP2 in a stage, checkpointing, clipping; the checkpoint of one is read by a plain model and by the other."""
    mesh = world_mesh(**axes)
    x, y = _batch()
    tiles = [jigsaw.shard(v, mesh, ("data" if "data" in axes else None, *SPEC[1:])) for v in (x, y)]
    pipes = []
    for make, schedule, options in ((Chain, "1f1b", cut), (Checkpointed, "zbv", {})):
        norms, expected, theirs = _trained(_model(make), x, y)
        pipe = jigsaw.pipeline(_model(make), mesh, loss=F.mse_loss, schedule=schedule, **options)
        found, optimizer = _pipe_trained(pipe, tiles)
        assert found == pytest.approx(norms, abs=1e-12)
        _assert_weights(pipe, expected)
        pipes.append((pipe, optimizer, expected, theirs))
    (pipe, optimizer, expected, theirs), (other, its, _, _) = pipes
    jigsaw.save(folder / "step", model=pipe, optimizer=optimizer)
    jigsaw.load(folder / "step", model=other, optimizer=its)
    _assert_weights(other, expected)
    whole = _model(Chain)
    again = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-4)
    jigsaw.load(folder / "step", model=whole, optimizer=again)
    for name, p in whole.named_parameters():
        torch.testing.assert_close(p, expected.get_parameter(name), rtol=0, atol=1e-11)
        known = theirs.state[expected.get_parameter(name)]["exp_avg"]
        torch.testing.assert_close(again.state[p]["exp_avg"], known, rtol=0, atol=1e-11)
    jigsaw.save(folder / "whole", model=whole, optimizer=again)
    jigsaw.load(folder / "whole", model=pipe, optimizer=optimizer)
    _assert_weights(pipe, expected)

    # of each dim 0 a stage's ranks along `lat` have parts, those along `data` the same
    for p in (p for name, p in pipe.named_parameters() if name != "position"):
        assert len(p.to_local()) <= -(-len(p) // axes["lat"])
        assert [how.is_replicate() for how in p.placements] == ([True, False] if "data" in axes else [False])


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        pytest.param({"pipe": 2, "lat": 2}, {"shard_weights": True}, marks=pytest.mark.slow),
        pytest.param({"pipe": 2, "data": 2, "lat": 2}, HYBRID, marks=pytest.mark.slow),
    ],
    ids=["cut", "hybrid"],
)
def test_training_and_its_checkpoints(axes, cut, tmp_path):
    run_on_ranks(8 if "data" in axes else 4, _check_training, tmp_path, axes, cut)


class InTurn(nn.Module):
    """In each microbatch one of two layers, or none."""

    def __init__(self, turns):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.turns, self.calls = turns, 0

    def forward(self, x):
        layer = self.turns[self.calls % len(self.turns)]
        self.calls += 1
        return x + getattr(self, layer)(x).sin() if layer else x * 1


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("JIGSAW_TEST_BACKEND") == "ordered", reason="counts the calls of torch's own groups")
@on_ranks(4)
def test_hybrid_weights_in_stages():
    mesh = world_mesh(data=2, pipe=2, lat=1)
    model, (x, y) = _model(Chain), _batch()
    loss, grads = _expected(model, x, y)
    tiles = [jigsaw.shard(v, mesh, ("data", None, "lat", None)) for v in (x, y)]
    for options in (HYBRID, HYBRID | {"shard_weights": "keep", "replicate": ["data"], "schedule": "gpipe"}):
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, **options)
        for step in (1, 2):
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
            _assert_gradients(pipe, grads, step)
    # the sums over ranks that have the same parts are sent once, however many microbatches there are
    found = []
    for microbatches in (2, 4):
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, microbatches=microbatches, **HYBRID)
        meter = StepMeter(keeps_calls=False)
        with meter.counting():
            meter.begin_phase("step")
            pipe.step(*tiles)
        found.append([c.sent_bytes for c in meter.phases["step"].of_weights if c.ring == ranks_along(mesh, "data")])
    assert found[0] and found[0] == found[1]
    # whichever parameters a microbatch uses: gradients are added up, and none is left until the next step
    for turns in (["first", "second", "first", "second"], ["first", "first", "second", None]):
        model = _model(lambda turns=turns: nn.Sequential(nn.Conv2d(4, 4, 1), *(InTurn(turns) for _ in range(3))))
        x, y = (torch.randn(8, 4, 33, 2).double() for _ in "xy")
        # ranks of `data` have half of the rows each, and of each half a microbatch has the next
        loss, grads = _expected(model, *(v.unflatten(0, (2, 4)).transpose(0, 1).flatten(0, 1) for v in (x, y)))
        tiles = [jigsaw.shard(v, mesh, ("data", None, "lat", None)) for v in (x, y)]
        pipe = jigsaw.pipeline(model, mesh, loss=F.mse_loss, **HYBRID)
        for step in (1, 2):
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
            _assert_gradients(pipe, grads, step)


def _skip_the_last_microbatch():
    model = _model(lambda: nn.Sequential(InTurn(["first", None]), nn.Conv2d(4, 2, 1)))
    x, y = torch.randn(8, 4, 6, 5).double(), torch.randn(8, 2, 6, 5).double()
    options = HYBRID | {"stages": ["1"], "microbatches": 2}
    jigsaw.pipeline(model, world_mesh(data=2, pipe=2, lat=1), loss=F.mse_loss, **options).step(x, y)


@pytest.mark.slow
def test_a_stage_that_has_no_gradients_to_sum_is_refused():
    with pytest.raises(RankFailedError, match="stage 0 computes nothing with a gradient in the last microbatch"):
        run_on_ranks(4, _skip_the_last_microbatch)


def _check_channels_in_one_stage():
    """Only the first stage has weights that are cut by `channel` and over the other axes as well."""
    mesh = world_mesh(pipe=2, data=2, spare=1, channel=2)
    model = _model(lambda: nn.Sequential(nn.Conv2d(4, 8, 1), nn.GELU(), nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)))
    torch.manual_seed(1)
    x, y = (torch.randn(8, n, 6, 5).double() for n in (4, 8))
    loss, grads = _expected(model, x, y)
    pipe = jigsaw.pipeline(model, mesh, loss=F.mse_loss, stages=["3"], shard_weights=True)
    tiles = [jigsaw.shard(v, mesh, ("data", None, None, None)) for v in (x, y)]
    assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
    _assert_gradients(pipe, grads)


@pytest.mark.slow
def test_stages_of_which_one_has_weights_that_channel_cuts():
    run_on_ranks(8, _check_channels_in_one_stage)


class Nested(Chain):
    """Two blocks within each call, and within that each block's own."""

    def _one(self, x, block):
        return checkpoint(block, x, use_reentrant=False) + x.sin()

    def _pair(self, x, first):
        for block in self.blocks[first : first + 2]:
            x = checkpoint(self._one, x, block, use_reentrant=False)
        return x

    def forward(self, x):
        x = self.stem(x) + self.position
        for first in (0, 2):
            x = checkpoint(self._pair, x, first, use_reentrant=False)
        return self.head(x) * self.position.mean()


@pytest.mark.slow
@on_ranks(4)
def test_stages_begin_with_what_is_checkpointed():
    mesh, (x, y) = world_mesh(pipe=2, lat=2), _batch()
    tiles = [jigsaw.shard(v, mesh, SPEC) for v in (x, y)]
    for make in (Checkpointed, Nested):
        model = _model(make)
        loss, grads = _expected(model, x, y)
        for options in ({}, {"shard_weights": True}):
            pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, stages=["blocks.2"], **options)
            assert pipe.step(*tiles).item() == pytest.approx(loss, abs=1e-12)
            _assert_gradients(pipe, grads)


# -- other axes, other dtypes, what is sent ---------------------------------------------------------------------------


def _sent(pipe, *tiles):
    with comm.count() as counted:
        loss = pipe.step(*tiles)
    return loss.item(), sum(c.sent_bytes for c in counted.calls if c.kind == "pipeline")


@contextlib.contextmanager
def _tiles_of_a_loader(tile):
    """Meanwhile another thread makes tiles, as one that reads ahead does."""
    ends = threading.Event()

    def read():
        while not ends.wait(1e-4):
            jigsaw.Tile(tile.local, tile.layout, tile.mesh)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@pytest.mark.slow
@on_ranks(4)
def test_beside_data_and_channels_and_in_bfloat16():
    model, (x, y) = _model(Chain), _batch()
    loss, grads = _expected(model, x, y)
    border = 8 * 4 * 33 * 6  # elements of the tile between two stages, of all microbatches
    for axes, spec in (({"pipe": 2, "data": 2}, ("data", None, None, None)), ({"pipe": 2, "channel": 2}, (None,) * 4)):
        mesh = world_mesh(**axes)
        pipe = jigsaw.pipeline(copy.deepcopy(model), mesh, loss=F.mse_loss, stages=["blocks.2"])
        tile, per_rank = jigsaw.shard(x, mesh, spec), border // (2 if "data" in axes else 1)
        with _tiles_of_a_loader(tile):
            assert _sent(pipe, tile, y) == (pytest.approx(loss, abs=1e-12), 8 * per_rank)  # a whole target
        _assert_gradients(pipe, grads)
        with torch.no_grad():
            assert _sent(pipe, tile, y) == (pytest.approx(loss, abs=1e-12), 0 if pipe.stages == [1] else 8 * per_rank)
        _assert_gradients(pipe, grads)
    mesh = world_mesh(pipe=2, lat=2)
    single, tiles = model.float(), [jigsaw.shard(v.float(), mesh, SPEC) for v in (x, y)]
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = _expected(single, x.float(), y.float())
        pipe = jigsaw.pipeline(copy.deepcopy(single), mesh, loss=F.mse_loss, stages=["blocks.2.1"])
        found, sent = _sent(pipe, *tiles)
    assert found == pytest.approx(loss, rel=2e-2)
    _assert_gradients(pipe, grads, atol=3e-2)
    # what the convolution returns travels in bfloat16, the residual beside it in float32
    assert sent == 8 * 4 * 6 * (17 if mesh.get_coordinate()[1] == 0 else 16) * (2 + 4)


# -- what is refused --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 1) for _ in range(3))
        if how == "tied":
            self.third.weight = self.first.weight
        if how == "experts":
            self.third = jigsaw.nn.MoE(3, 4, 2, 1, mesh=world_mesh(pipe=2), axis="pipe")

    def _in_turn(self, x):
        for module in (self.first, self.second, self.third):
            x = checkpoint(module, x, use_reentrant=False)
        return x

    def forward(self, x):
        if self.how == "checkpointed":
            return checkpoint(lambda x: self.third(self.second(self.first(x))), x, use_reentrant=False)
        if self.how == "nested":
            return checkpoint(self._in_turn, x, use_reentrant=False)
        if self.how == "mask":
            return self.third(self.second(self.first(x))[:, :, torch.arange(7) > 2])
        if self.how == "order":
            return self.first(self.third(self.second(x)))
        scale = torch.rand((), dtype=x.dtype) if self.how == "random" else 1.0
        x = self.second(self.first(x))
        return x if self.how == "never" else self.third(x) * scale


def _refused(match, how="", stages=("third",), mesh=None, x=None, **options):
    mesh = mesh or world_mesh(pipe=2)
    with pytest.raises(ShardingError, match=match):
        pipe = jigsaw.pipeline(Odd(how), mesh, loss=F.mse_loss, stages=stages, **options)
        x = torch.randn(8, 3, 7, 5) if x is None else x
        pipe.step(x, x)


@on_ranks(2)
def test_refused():
    _refused(r"needs a mesh with the axis 'pipe'.*init_mesh\(pipe=2", mesh=world_mesh(lat=2))
    _refused("schedule='2f2b' is none of 'gpipe', '1f1b'", schedule="2f2b")
    _refused("has no module 'fourth'", stages=["fourth"])
    _refused("name each module once, in the order", stages=["third", "second", "first"], schedule="zbv")
    _refused("has 2 stages, but stages= makes 3; name one module less", stages=["second", "third"])
    _refused("3 modules with parameters to cut between, but the pipeline has 4", stages=None, schedule="zbv")
    _refused("parameter 'first.weight' of stage 0 is also third.weight, of stage 1", "tied", ["second"])
    _refused("module 'first' lies in stage 0, .* calls it in stage 1", "order", ["second"])
    _refused("in module 'second', or after it, a shape hangs on values .*: a mask as an index", "mask")
    _refused(r"a plain tensor of shape .* that stage 0 makes is used in stage 1, by aten.*random numbers", "random")
    _refused("'second' begins a stage within what is checkpointed", "checkpointed", ["second"])
    _refused("'second' begins a stage within what is checkpointed", "nested", ["second"])
    _refused(r"'third.w1' is a DTensor over {'pipe': 2}, which are not axes of a stage", "experts")
    _refused("does not call 'third'; name modules that it calls", "never")
    _refused(r"needs microbatches >= 2, not 1", microbatches=1)
    _refused("of 6 samples cut at .* into 4 equal parts", x=torch.randn(6, 3, 7, 5))
    _refused("shard_weights=True with schedule='zbv': .* take schedule='1f1b'", schedule="zbv", shard_weights=True)
    _refused("replicate=.*pass shard_weights=True with it", replicate="lat")
    wide = {"mesh": world_mesh(pipe=2, data=1, lat=1), "shard_weights": True}
    _refused(r"replicate=\('pipe',\) must be some, not all, of the axes \('data', 'lat'\)", replicate="pipe", **wide)
    _refused(r"replicate=\('data', 'lat'\) must be some, not all", replicate=["data", "lat"], **wide)
    _refused("shard_weights='always' must be True or 'after_forward'", shard_weights="always")


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda out, y: (out - y).square(), r"loss= returned Tile \(4, 4\); return the mean over the microbatch"),
        (lambda out, y: F.mse_loss(out, y).detach(), "loss= returned a tensor without a graph, so no stage would get"),
    ],
    ids=["of each sample", "detached"],
)
def test_losses_that_no_stage_can_learn_from(loss, told):
    x = torch.randn(8, 4)
    pipe = jigsaw.pipeline(nn.Linear(4, 4), jigsaw.init_mesh(pipe=1), loss=loss, microbatches=2)
    with pytest.raises(ShardingError, match=told):
        pipe.step(x, x)
    with pytest.raises(ShardingError, match="must be a whole number, at least 1"):
        jigsaw.pipeline(nn.Linear(4, 4), jigsaw.init_mesh(pipe=1), loss=loss, microbatches=2.0)


# -- the page ---------------------------------------------------------------------------------------------------------


def _run_page(code, folder):
    torch.manual_seed(0)
    left = {}
    with contextlib.chdir(folder):
        exec(compile(code, "docs/parallelism.md", "exec"), left)
    return left["loss"].item()


def test_the_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (code,) = re.findall(r"^## Pipeline.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert "pipe=-1, lat=1" in code
    alone = _run_page(code, tmp_path)
    assert run_on_ranks(4, _run_page, code.replace("pipe=-1, lat=1", "pipe=2, lat=2"), tmp_path) == pytest.approx(
        [alone] * 4, rel=1e-5
    )
