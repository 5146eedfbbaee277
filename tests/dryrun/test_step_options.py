"""What people add to a step: passes before a step, mixed precision, weights that stay gathered, more axes."""

from dataclasses import replace
from functools import partial

import pytest
import small_nets
import torch
from small_nets import by_kind
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jigsaw
from jigsaw import comm
from jigsaw.dryrun import DEVICES, advise_mesh
from jigsaw.dryrun.mesh_search import _MeshSearch
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.errors import ShardingError
from jigsaw.testing import run_on_ranks, world_mesh

SHAPE, PASSES = (2, 3, 32, 40), 3
IN_HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
WAYS = {
    "whole": {},
    "cut": {"shard_weights": True},
    "kept": {"shard_weights": "keep"},
    "half": {"shard_weights": True, "mp_policy": IN_HALF},
}


def _net():
    return small_nets.SmallTransformer(64, 4, 2)


def _counted_step(way):
    """On a real rank: what so many passes send, by kind."""
    mesh = world_mesh(lat=2)
    model = jigsaw.parallelize(_net(), mesh, **WAYS[way])
    tile = jigsaw.shard(torch.randn(SHAPE), mesh, (None, None, "lat", None), align={2: 4})
    meter = StepMeter(keeps_calls=False)
    with comm.count() as counted, meter.counting():
        meter.begin_phase("step")
        for _ in range(PASSES):
            model(tile).square().mean().backward()
    return by_kind([*counted.calls, *meter.phases["step"].of_weights])


@pytest.mark.parametrize("way", ["whole", "half", *(pytest.param(w, marks=pytest.mark.slow) for w in ("cut", "kept"))])
def test_passes_send_what_real_ranks_do(way):
    real = run_on_ranks(2, _counted_step, way)
    how = {"mesh": {"lat": 2}, "align": {2: 4}, "ranks": range(2), "passes": PASSES, "device": "cpu"}
    report = jigsaw.dry_run(_net, SHAPE, **how, **WAYS[way])
    assert report.is_complete, report
    for rank, counted in zip(report.ranks, real, strict=True):
        sent = {}
        for phase in rank.phases.values():
            for kind, t in phase.traffic.items():
                size, messages = sent.get(kind, (0, 0))
                sent[kind] = size + t.sent_bytes, messages + t.messages
        assert sent == counted


def test_later_passes_have_gradients_and_the_step_is_taken_once():
    how = {"mesh": {"lat": 2}, "align": {2: 4}, "ranks": [0]}
    one, three = (jigsaw.dry_run(_net, SHAPE, passes=n, **how).ranks[0].phases for n in (1, 3))
    for name in ("forward", "backward"):
        assert three[name].flop == 3 * one[name].flop
        assert three[name].sent_bytes == 3 * one[name].sent_bytes
    assert three["step"] == one["step"]
    assert one["forward"].peak["gradients"] == 0
    assert three["forward"].peak["gradients"] == three["forward"].peak["weights"]
    assert three["forward"].peak["activations"] == one["forward"].peak["activations"]
    with pytest.raises(ShardingError, match="passes=0 must be a whole number, 1 or more"):
        jigsaw.dry_run(_net, SHAPE, passes=0, **how)


def test_gathered_weights_are_half_as_many_bytes_in_half_precision():
    plain, half = (
        jigsaw.dry_run(_net, SHAPE, mesh={"lat": 2}, align={2: 4}, ranks=[0], **WAYS[way]).ranks[0].phases
        for way in ("cut", "half")
    )
    sent = [phases["forward"].traffic["gathered weights"].sent_bytes for phases in (plain, half)]
    assert sent[1] == sent[0] // 2
    # gradients are summed in float32, and the parts that stay are of float32, as the optimizer's state
    grads = [phases["backward"].traffic["gradients"].sent_bytes for phases in (plain, half)]
    assert grads[0] == grads[1]
    assert plain["step"].peak == half["step"].peak
    with pytest.raises(ShardingError, match=r"mp_policy=.*is about weights that are cut"):
        jigsaw.dry_run(_net, SHAPE, mesh={"lat": 2}, align={2: 4}, mp_policy=IN_HALF)


def test_weights_that_stay_are_gathered_once():
    how = {"mesh": {"lat": 2}, "align": {2: 4}, "ranks": [0]}
    net = partial(small_nets.SmallTransformer, 1664, 4, 2)  # its blocks are units by themselves
    freed, kept = (jigsaw.dry_run(net, SHAPE, **how, **WAYS[way]).ranks[0].phases for way in ("cut", "kept"))
    sent = [p["backward"].traffic["gathered weights"].sent_bytes if p else 0 for p in (freed,)]
    assert sent[0] > 0
    assert "gathered weights" not in kept["backward"].traffic
    assert kept["forward"].traffic == freed["forward"].traffic


class _Experts(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.experts = jigsaw.nn.MoE(16, 32, 8, 2, mesh=mesh, axis="expert")

    def forward(self, x):
        return self.experts(self.embed(x))


def test_axes_of_experts_and_of_context():
    spec = (("data", "expert"), None, None)
    report = jigsaw.dry_run(_Experts, (8, 33, 3), {"data": 2, "expert": 2}, spec=spec, ranks=[0])
    assert report.is_complete, report
    # each of 66 tokens has two experts, half of them on the other rank, there and back, forward and backward
    sent = [phase.traffic["experts"].sent_bytes for phase in report.ranks[0].phases.values() if phase.traffic]
    assert sent == [2 * 66 * 16 * 4] * 2
    whole = jigsaw.dry_run(_Experts, (8, 33, 3), {"expert": 1}, spec=spec, ranks=[0])
    assert report.peak["weights"] < 0.55 * whole.peak["weights"]
    # tokens of a transformer, cut along an axis of any name
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    tokens = jigsaw.dry_run(layer, (2, 64, 16), {"data": 2, "context": 2}, spec=("data", "context", None), ranks=[0])
    assert tokens.is_complete and not tokens.remarks
    alone = jigsaw.dry_run(layer, (2, 64, 16), {"data": 1}, spec=("data", None, None))
    assert tokens.flop == pytest.approx(alone.flop / 4, rel=1e-6)


class _Selective(nn.Module):
    """Two layers, of which the backward pass computes again what a policy says."""

    def __init__(self, kept):
        super().__init__()
        self.up, self.down, self.kept = nn.Linear(16, 64), nn.Linear(64, 16), kept

    def _inner(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, self._policy)
        return checkpoint(self._inner, x, use_reentrant=False, context_fn=contexts)

    def _policy(self, context, operator, *args, **kwargs):
        is_kept = operator in self.kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "channel": 2}], ids=["data", "channel"])
def test_selective_checkpointing_computes_the_rest_again(axes):
    every, none = (
        jigsaw.dry_run(lambda kept=kept: _Selective(kept), (4, 32, 16), axes, spec=("data", None, None), ranks=[0])
        for kept in (PRODUCTS, ())
    )
    assert every.is_complete and none.is_complete
    forward = none.ranks[0].phases["forward"].flop
    # the first product once more; torch stops before the second, whose result nobody needs
    assert none.flop - every.flop == forward // 2
    assert none.ranks[0].phases["backward"].kernels > every.ranks[0].phases["backward"].kernels


def test_a_maker_that_casts_has_weights_of_half_the_bytes():
    casts = jigsaw.dry_run(lambda: _net().bfloat16(), SHAPE, {"lat": 2}, align={2: 4}, ranks=[0])
    plain = jigsaw.dry_run(_net, SHAPE, {"lat": 2}, align={2: 4}, ranks=[0])
    assert casts.is_complete
    assert 2 * casts.peak["weights"] == plain.peak["weights"]


class _Deep(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Conv2d(3, width, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU()) for _ in range(8))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.slow
def test_advice_takes_these_options():
    device = replace(DEVICES["a100"], ranks_per_node=4)
    how = {"passes": 2, "mp_policy": IN_HALF, "shard_weights": "keep", "device": device}
    found = advise_mesh(_Deep, (4, 3, 8, 8), 4, **how)
    cut = [option for option in found if option.shard_weights]
    assert cut and all(option.shard_weights == "keep" for option in cut)
    for option in found:
        is_pipe = "pipe" in option.mesh
        lines = "\n".join(option.lines_to_paste)
        assert ("mp_policy=mp_policy" in lines) == (bool(option.shard_weights) and not is_pipe)
        if is_pipe:
            assert option.works and option.microbatches == 8 // option.mesh.get("data", 1)
    plain = next(option for option in advise_mesh(_Deep, (4, 3, 8, 8), 4, device=device) if not option.shard_weights)
    twice = next(o for o in found if dict(o.mesh) == dict(plain.mesh) and not o.shard_weights and not o.checkpoint)
    assert twice.report.ranks[0].phases["forward"].flop == 2 * plain.report.ranks[0].phases["forward"].flop


@pytest.mark.slow
def test_steps_by_other_schedules_wait_less():
    device, seconds = replace(DEVICES["a100"], node_seconds=0, node_bandwidth=1e15), {}
    for schedule, stages in (("1f1b", 2), ("interleaved_1f1b", 4), ("interleaved_zero_bubble", 4), ("zbv", 4)):
        search = _MeshSearch(_Deep(), ((8, 3, 512, 512),), device, None, {"schedule": schedule})
        option = search.attempt({"pipe": 2, "data": 1, "lat": 1, "lon": 1}, microbatches=8)
        assert option.works, option.refusal
        assert len(option.report.ranks) == 2 and len(option.begins) + 1 == stages
        assert f"schedule={schedule!r}" in option.lines_to_paste[-1]
        assert sum(option.report.seconds_by_bound.values()) == pytest.approx(option.report.seconds)
        seconds[schedule] = option.report.seconds
        ways = search.tried_ways([option], 0)
        assert all(not way.shard_weights for way in ways)  # one rank a stage has nothing to cut
    assert seconds["interleaved_zero_bubble"] < seconds["interleaved_1f1b"] < seconds["1f1b"]
    assert seconds["zbv"] < seconds["interleaved_1f1b"]
    with pytest.raises(ShardingError, match="schedule='2f2b' is none of 'gpipe'"):
        advise_mesh(_Deep, (8, 3, 8, 8), 2, schedule="2f2b")
