"""What is said of a pipeline's step beside a real one: messages by kind, of layers, weights, gradients and borders."""

import math

import pytest
import torch
from small_nets import by_kind
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.dryrun import DEVICES
from jigsaw.dryrun.pipeline_estimate import StageShare, pipelined_report, tiles_at_borders
from jigsaw.dryrun.rank_playing import StepPlan
from jigsaw.dryrun.schedule_times import StageWork, played_schedule
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.stages.own_stages import PIPE_SCHEDULES
from jigsaw.testing import run_on_ranks, world_mesh

SHAPE, BATCHES, SPEC = (8, 3, 16, 12), 4, ("data", None, "lat", None)


class _Row(nn.Module):
    """Blocks that fetch halos, a skip over them, and a parameter of the net itself."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.position, self.scale = nn.Parameter(torch.zeros(8, 16, 1)), torch.ones(())
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(4))
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x):
        first = x = self.stem(x) + self.position
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(torch.cat([x, first], 1))


BEGINS = {2: ("blocks.2",), 4: ("blocks.1", "blocks.2", "blocks.3")}


def _mean_square(output, target=None):
    return output.square().mean()


def _spec(axes):
    return tuple(name if name in axes else None for name in SPEC)


def _counted_step(axes, options):
    mesh = world_mesh(**axes)
    how = {"microbatches": BATCHES, "stages": BEGINS[axes["pipe"]], **options}
    pipe = jigsaw.pipeline(_Row(), mesh, loss=_mean_square, **how)
    tile = jigsaw.shard(torch.randn(SHAPE), mesh, _spec(axes))
    pipe.step(tile)
    meter = StepMeter(keeps_calls=False)
    with comm.count() as counted, meter.counting():
        meter.begin_phase("step")
        pipe.step(tile)
    return mesh.get_coordinate(), by_kind([*counted.calls, *meter.phases["step"].of_weights])


def _told_step(axes, options):
    shape, stages = (SHAPE[0] // BATCHES, *SHAPE[1:]), axes["pipe"]
    within = math.prod(axes.values()) // stages
    how = {"spec": _spec(axes), "loss": _mean_square, **options}
    one = jigsaw.dry_run(_Row, shape, axes, ranks=range(within), device="cpu", **how)
    copies = how.pop("replicate", ())
    plan = StepPlan(_Row, (shape,), replicate=(copies,) if copies else (), **how)
    shares = [StageShare(1 / stages, 1 / stages, 1 / stages)] * stages
    borders = tiles_at_borders(plan, axes, BEGINS[stages])
    report = pipelined_report(one, shares, borders, BATCHES, DEVICES["cpu"], 2)
    found = {}
    for rank in report.ranks:
        kinds = found.setdefault(rank.coordinate, {})
        for phase in rank.phases.values():
            for kind, t in phase.traffic.items():
                size, messages = kinds.get(kind, (0, 0))
                kinds[kind] = size + t.sent_bytes, messages + t.messages
            assert sum(t.sent_bytes for t in phase.links.values()) == pytest.approx(phase.sent_bytes, abs=8)
    return found


def _assert_same(axes, options):
    real = run_on_ranks(math.prod(axes.values()), _counted_step, axes, options)
    told = _told_step(axes, options)
    assert len(real) == len(told)
    for place, kinds in real:
        assert told[tuple(place)]["pipeline"] == kinds["pipeline"]
    # how much of the rest each stage has is estimated: all stages together have what is told
    within = {tuple(place)[1:] for place, _ in real}
    for here in within:
        counted = [kinds for place, kinds in real if tuple(place)[1:] == here]
        mine = [kinds for place, kinds in told.items() if place[1:] == here]
        names = {kind for kinds in (*counted, *mine) for kind in kinds}
        for kind in sorted(names):
            for at in (0, 1):
                sums = [sum(kinds.get(kind, (0, 0))[at] for kinds in each) for each in (counted, mine)]
                assert sums[0] == pytest.approx(sums[1], abs=2), (kind, here)
    assert {"pipeline", "all_reduce"} <= names
    assert ("gathered weights" in names) == ("shard_weights" in options)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"pipe": 2, "lat": 1}, {}),
        ({"pipe": 2, "lat": 2}, {}),
        pytest.param({"pipe": 2, "data": 1, "lat": 2}, {"shard_weights": True}, marks=pytest.mark.slow),
        ({"pipe": 4, "lat": 1}, {}),
        pytest.param(
            {"pipe": 2, "data": 2, "lat": 2}, {"shard_weights": True, "replicate": "data"}, marks=pytest.mark.slow
        ),
    ],
    ids=["two", "whole", "cut", "four", "hybrid"],
)
def test_messages_are_those_of_a_real_pipeline(axes, options):
    _assert_same(axes, options)


@pytest.mark.parametrize(("name", "seconds"), [("interleaved_1f1b", 8 * 3 + 3 * 3 / 2), ("zbv", 8 * 3 + 3 * 1 / 2)])
def test_the_order_of_a_schedule_is_played(name, seconds):
    """Four ranks, eight microbatches: (P - 1) / v of what a rank does for one; of ZB-V the forward passes alone."""
    works = [StageWork(0.5, 1.0, 0.5)] * 8
    found, kept = played_schedule(PIPE_SCHEDULES[name], 4, works, 8)
    assert found == pytest.approx(seconds)
    assert max(kept) <= 8 / 2 + 2
    slower = [*works[:3], StageWork(1.0, 2.0, 0.5), *works[4:]]
    # a rank has no less time than for its own work
    assert played_schedule(PIPE_SCHEDULES[name], 4, slower, 8)[0] >= 8 * (0.5 + 1.0 + 1.0 + 2.0)
