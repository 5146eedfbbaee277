"""Estimate of a pipelined step, from the dry run of one microbatch that runs through all of its stages.

For example 12 blocks on pipe=4, 8 microbatches: a stage has 3 blocks, a quarter of the seconds of a microbatch.  The
step takes 8 + 4 - 1 = 11 of these instead of 8; the bubble is 3/11 of the time.  With 10 blocks the longest stage has 3
as well, a share of 0.3, so the step is 1.2 times as long.

Messages of layers, gathers of weights and gradients of cut weights count in each microbatch.  Gradients of whole
weights count once a step.  Messages between stages follow the pipeline's own plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from jigsaw.dryrun.devices import Device
from jigsaw.dryrun.fake_ranks import fake_mesh
from jigsaw.dryrun.rank_playing import (
    ONCE_A_STEP,
    PIPE_AXIS,
    StepPlan,
    know_neighbors,
    prepared_inputs,
    prepared_model,
)
from jigsaw.dryrun.report import DryRunReport, PhaseCost, RankCost, Traffic
from jigsaw.dryrun.stage_balance import PieceCost
from jigsaw.stages.batch_split import as_on_paper
from jigsaw.stages.stage_calls import TileOnPaper
from jigsaw.stages.stage_cuts import cut_stages, mesh_of_stage
from jigsaw.stages.stage_plan import PaperModel
from jigsaw.torch_internals.fake_tensors import FakeTensorMode

Borders = Sequence[Sequence[TileOnPaper]]


@dataclass(frozen=True)
class StageShare:
    """Shares of a stage: of a microbatch's seconds, of the weights, of what is kept for the backward pass."""

    seconds: float
    weights: float
    kept: float


def stage_shares(pieces: Sequence[PieceCost], cuts: Sequence[int]) -> list[StageShare]:
    """Return the shares of the stages that begin with these pieces."""
    each = [
        [(p.seconds, p.weight_bytes, p.kept_bytes) for p in pieces[a:b]] for a, b in pairwise([0, *cuts, len(pieces)])
    ]
    sums = [[sum(values) for values in zip(*stage, strict=True)] for stage in each]
    totals = [sum(values) or 1 for values in zip(*sums, strict=True)]
    return [StageShare(*(n / total for n, total in zip(stage, totals, strict=True))) for stage in sums]


def tiles_at_borders(plan: StepPlan, axes: Mapping[str, int], begins: Sequence[str]) -> Borders:
    """Return the tiles that each stage gets for a microbatch, as `jigsaw.pipeline` plans it.

    *Raises*: `ShardingError` for a model that cannot be cut there.
    """
    with fake_mesh(axes, 0) as mesh:
        stage_mesh = mesh_of_stage(mesh, PIPE_AXIS)
        know_neighbors(stage_mesh)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model, dtype = prepared_model(plan, mesh)
            inputs = prepared_inputs(plan, stage_mesh, dtype)
        paper = PaperModel(model, cut_stages(model, begins), stage_mesh, mode)
        return paper.plan(
            (as_on_paper(inputs), {}), {name: module.training for name, module in model.named_modules()}
        ).sent


def pipelined_report(
    report: DryRunReport,
    shares: Sequence[StageShare],
    borders: Borders,
    microbatches: int,
    device: Device,
    ranks_per_node: int,
) -> DryRunReport:
    """Return the report of a step of so many microbatches, 1F1B, from that of one on a mesh with ``pipe``.  Each rank
    of that has one for every stage.

    Its bound ``"bubble"`` is the time in which a rank has nothing to do.
    """
    ranks = [
        cost
        for rank in report.ranks
        for cost in _StagesOfRank(report.mesh, rank, borders, device, ranks_per_node).costs(shares, microbatches)
    ]
    return replace(report, ranks=tuple(ranks), reader_seconds=microbatches * report.reader_seconds)


@dataclass(frozen=True)
class _BorderMessage:
    """Message of a stage to another one for each microbatch."""

    link: str
    traffic: Traffic
    seconds: float


_NOTHING = _BorderMessage("node", Traffic(), 0.0)


class _StagesOfRank:
    """Ranks of all stages at the place of one within its stage."""

    def __init__(
        self, mesh: Mapping[str, int], rank: RankCost, borders: Borders, device: Device, ranks_per_node: int
    ) -> None:
        self._rank, self._borders, self._device, self._node = rank, borders, device, ranks_per_node
        self._axis, self._sizes = list(mesh).index(PIPE_AXIS), list(mesh.values())

    def costs(self, shares: Sequence[StageShare], microbatches: int) -> list[RankCost]:
        """Return what each stage's rank does in a step."""
        phases, last = self._rank.phases, len(shares) - 1
        sent = {
            "forward": [*(self._message(at, at + 1, at + 1) for at in range(last)), _NOTHING],
            "backward": [_NOTHING, *(self._message(at, at - 1, at) for at in range(1, last + 1))],
        }
        rank_costs = list[RankCost]()
        for at, share in enumerate(shares):
            phase_costs = dict[str, PhaseCost]()
            for name, messages in sent.items():
                each = zip(shares, messages, strict=True)
                slot = max(phases[name].seconds * s.seconds + message.seconds for s, message in each)
                under_way = min(len(shares) - at, microbatches)
                one = _phase_of_stage(phases[name], share, under_way, microbatches)
                phase_costs[name] = _with_messages(one, messages[at], microbatches, slot * (microbatches + last))
            for name, part in zip(ONCE_A_STEP, (share.weights, 1.0), strict=True):
                phase_costs["backward"] = _one_after_other(phase_costs["backward"], _part_of_phase(phases[name], part))
            if "step" in phases:
                phase_costs["step"] = _part_of_phase(phases["step"], share.weights)
            rank_costs.append(RankCost(self._number(at), self._coordinate(at), phase_costs))
        return rank_costs

    def _coordinate(self, stage: int) -> tuple[int, ...]:
        coordinate = self._rank.coordinate
        return (*coordinate[: self._axis], stage, *coordinate[self._axis + 1 :])

    def _number(self, stage: int) -> int:
        number = 0
        for size, at in zip(self._sizes, self._coordinate(stage), strict=True):
            number = number * size + at
        return number

    def _message(self, stage: int, to: int, border: int) -> _BorderMessage:
        """Return the tiles at a border, or their gradients on the way back."""
        coordinate = self._rank.coordinate
        within = (*coordinate[: self._axis], *coordinate[self._axis + 1 :]) or (0,)
        tiles = [x for x in self._borders[border] if to > stage or x.dtype.is_floating_point or x.dtype.is_complex]
        sizes = [torch.Size(x.sent_layout.local_shape(within)).numel() * x.dtype.itemsize for x in tiles]
        traffic = Traffic(sum(sizes), len(sizes))
        link = "node" if self._number(stage) // self._node == self._number(to) // self._node else "network"
        return _BorderMessage(link, traffic, self._device.call_time("pipeline", link, *_numbers(traffic)))


_OF_WEIGHTS = ("weights", "gradients", "optimizer")  # memory
_SENT_OF_WEIGHTS = ("gathered weights", "gradients")


def _phase_of_stage(phase: PhaseCost, share: StageShare, under_way: int, times: int) -> PhaseCost:
    """Return the stage's part of a phase for so many microbatches; memory that each keeps counts for all that are under
    way.
    """
    parts = {kind: share.weights if kind in _SENT_OF_WEIGHTS else share.seconds for kind in phase.traffic}
    traffic = {kind: _part_of_traffic(t, times * parts[kind]) for kind, t in phase.traffic.items()}
    before, after = (sum(totals.values(), Traffic()) for totals in (phase.traffic, traffic))
    # links have all kinds together
    of_bytes, of_messages = after.sent_bytes / max(before.sent_bytes, 1), after.messages / max(before.messages, 1)
    memory = dict.fromkeys(_OF_WEIGHTS, share.weights) | {"activations": share.kept * under_way}
    return replace(
        _part_of_phase(phase, times * share.seconds),
        peak={kind: round(size * memory.get(kind, share.seconds)) for kind, size in phase.peak.items()},
        traffic=traffic,
        links={
            link: Traffic(round(t.sent_bytes * of_bytes), round(t.messages * of_messages))
            for link, t in phase.links.items()
        },
    )


def _with_messages(phase: PhaseCost, message: _BorderMessage, times: int, seconds: float) -> PhaseCost:
    """Return the phase with the messages to another stage in each microbatch; it ends when all stages have ended."""
    waiting, sent = times * message.seconds, _part_of_traffic(message.traffic, times)
    traffic, links = dict(phase.traffic), dict(phase.links)
    if sent.messages:
        traffic["pipeline"] = sent
        links[message.link] = links.get(message.link, Traffic()) + sent
    return replace(
        phase,
        traffic=traffic,
        links=links,
        seconds_by_bound={**phase.seconds_by_bound, "bubble": max(seconds - phase.seconds - waiting, 0.0)},
        message_seconds=phase.message_seconds + waiting,
        seconds=seconds,
    )


def _part_of_phase(phase: PhaseCost, part: float) -> PhaseCost:
    return PhaseCost(
        round(phase.flop * part),
        round(phase.moved_bytes * part),
        round(phase.kernels * part),
        {kind: round(size * part) for kind, size in phase.peak.items()},
        {kind: _part_of_traffic(t, part) for kind, t in phase.traffic.items()},
        {link: _part_of_traffic(t, part) for link, t in phase.links.items()},
        {name: seconds * part for name, seconds in phase.seconds_by_bound.items()},
        phase.message_seconds * part,
        phase.hidden_seconds * part,
        phase.seconds * part,
    )


def _one_after_other(first: PhaseCost, then: PhaseCost) -> PhaseCost:
    """Return two phases as one."""
    bounds = {**then.seconds_by_bound, **first.seconds_by_bound}
    return PhaseCost(
        first.flop + then.flop,
        first.moved_bytes + then.moved_bytes,
        first.kernels + then.kernels,
        max(first, then, key=lambda phase: phase.peak_bytes).peak,
        _sum_of_traffic(first.traffic, then.traffic),
        _sum_of_traffic(first.links, then.links),
        {name: first.seconds_by_bound.get(name, 0.0) + then.seconds_by_bound.get(name, 0.0) for name in bounds},
        first.message_seconds + then.message_seconds,
        first.hidden_seconds + then.hidden_seconds,
        first.seconds + then.seconds,
    )


def _sum_of_traffic(first: Mapping[str, Traffic], then: Mapping[str, Traffic]) -> dict[str, Traffic]:
    return {kind: first.get(kind, Traffic()) + then.get(kind, Traffic()) for kind in {**first, **then}}


def _part_of_traffic(traffic: Traffic, part: float) -> Traffic:
    return Traffic(round(traffic.sent_bytes * part), round(traffic.messages * part))


def _numbers(traffic: Traffic) -> tuple[int, int]:
    return traffic.sent_bytes, traffic.messages
