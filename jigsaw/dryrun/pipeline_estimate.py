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
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.dryrun.devices import DEVICES, Device
from jigsaw.dryrun.dry_runs import priced_rank
from jigsaw.dryrun.fake_ranks import fake_mesh
from jigsaw.dryrun.few_blocks import longest_row
from jigsaw.dryrun.rank_playing import (
    ONCE_A_STEP,
    PIPE_AXIS,
    StepPlan,
    know_neighbors,
    play_rank,
    prepared_inputs,
    prepared_model,
)
from jigsaw.dryrun.report import (
    DryRunReport,
    PhaseCost,
    RankCost,
    Traffic,
    part_of_phase,
    part_of_traffic,
    phase_after_phase,
)
from jigsaw.dryrun.schedule_times import StageWork, played_schedule
from jigsaw.errors import ShardingError
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.stages.own_stages import PIPE_SCHEDULES
from jigsaw.stages.stage_calls import TileOnPaper, as_on_paper
from jigsaw.stages.stage_cuts import cut_places, cut_stages, mesh_of_stage
from jigsaw.stages.stage_plan import PaperModel
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.fake_tensors import PaperMode


@dataclass(frozen=True)
class PieceCost:
    """Seconds of a piece for a microbatch, forward and backward; bytes of its weights with all state, and of what it
    keeps.
    """

    name: str
    seconds: float
    weight_bytes: int
    kept_bytes: int


def balanced_stages(
    model: nn.Module, example: Tile, mesh: DeviceMesh, *, axis: str, stages: int, microbatches: int
) -> tuple[str, ...]:
    """Return the modules that begin the later stages on `mesh`, balanced by a dry run of one microbatch, alike on all
    ranks.

    *Sends*: nothing. *Raises*: `ShardingError` for a model that does not run or has too few modules with parameters.
    Also for a batch that is not a multiple of the microbatches.
    """
    axes = {name: size for name, size in axes_of_mesh(mesh) if name != axis} or {"alone": 1}
    batch, *rest = example.layout.shape
    if batch % microbatches:
        raise ShardingError(f"example= has a batch of {batch}, which is not a multiple of microbatches={microbatches}")
    spec = tuple(_without_axis(entry, axis) for entry in example.layout.spec)
    device = DEVICES["cpu" if mesh.device_type == "cpu" else "h100"]
    shapes, is_processor = ((batch // microbatches, *rest),), device.is_processor
    plan = StepPlan(model, shapes, spec, example.dtype, keeps_calls=False, on_processor=is_processor)
    pieces = piece_costs(plan, axes, stages, device, device.ranks_per_node)
    memory = torch.cuda.get_device_properties(0).total_memory if mesh.device_type == "cuda" else device.memory_bytes
    return tuple(pieces[at].name for at in balanced_cuts(pieces, stages, microbatches, memory))


def _without_axis(entry: Any, axis: str) -> Any:
    if isinstance(entry, tuple):
        left = tuple(name for name in entry if name != axis)
        return left if len(left) > 1 else next(iter(left), None)
    return None if entry == axis else entry


def piece_costs(
    plan: StepPlan, axes: Mapping[str, int], stages: int, device: Device, ranks_per_node: int
) -> list[PieceCost]:
    """Return the cost of each piece that stages may begin with; of a row of equal blocks two are played."""
    with fake_mesh(axes, 0) as mesh, PaperMode():
        model = prepared_model(plan, mesh)[0]
        row, names = longest_row(model), [name for name, _ in cut_places(model, stages)]
    blocks = [] if row is None else [f"{row[0]}.{at}" for at in range(row[1])]
    if row is not None and all(block in names for block in blocks):
        left_out = set(blocks[2:])
        plan = replace(plan, row=(row[0], 2), pieces=tuple(name for name in names if name not in left_out))
    else:
        blocks, plan = [], replace(plan, pieces=tuple(names))
    played = play_rank(plan, axes, 0)
    stopped = [remark for remark in played.remarks if remark.kind == "stopped"]
    if stopped:
        raise ShardingError(
            f"stages='balanced' needs a dry run of the model, which stops in {stopped[0].module or 'the model'}: "
            f"{stopped[0].reason}; name modules in stages="
        )
    costs: dict[str, PieceCost] = {}
    for piece in played.pieces:
        own = replace(played, phases=piece.phases)
        priced = priced_rank(own, device, ranks_per_node, torch.Size(axes.values()).numel())
        seconds = sum(phase.seconds for phase in priced.phases.values())
        costs[piece.name] = PieceCost(piece.name, seconds, piece.weight_bytes, piece.kept_bytes)
    # a block that was not played costs as much as the second one
    return [costs[name] if name in costs else replace(costs[blocks[1]], name=name) for name in names]


def balanced_cuts(pieces: Sequence[PieceCost], stages: int, microbatches: int, memory: float) -> list[int]:
    """Return where stages 1, 2, ... begin, so that the slowest is fastest and each fits into nine tenths of the memory;
    if no way does, that of the least memory.  Of 1F1B's microbatches stage s of P has P - s under way.

    >>> from jigsaw.dryrun.pipeline_estimate import PieceCost, balanced_cuts
    >>> pieces = [PieceCost(str(at), seconds, 0, 0) for at, seconds in enumerate((1, 1, 1, 1, 1, 4))]
    >>> balanced_cuts(pieces, 3, 4, 1e9)
    [2, 5]
    """
    seconds, weights, kept = (
        [0, *accumulate(getattr(piece, what) for piece in pieces)] for what in ("seconds", "weight_bytes", "kept_bytes")
    )

    def cost(stage: int, begin: int, end: int) -> tuple[float, float]:
        under_way = min(stages - stage, microbatches)
        size = weights[end] - weights[begin] + under_way * (kept[end] - kept[begin])
        return max(size - 0.9 * memory, 0.0), seconds[end] - seconds[begin]

    # best[n]: for the first n pieces, the most memory that a stage lacks, the longest seconds, and where stages begin
    best = {n: (cost(0, 0, n), list[int]()) for n in range(1, len(pieces) + 1)}
    for stage in range(1, stages):
        best = {
            n: min(
                (tuple(max(a, b) for a, b in zip(best[m][0], cost(stage, m, n), strict=True)), [*best[m][1], m])
                for m in range(stage, n)
            )
            for n in range(stage + 1, len(pieces) + 1)
        }
    return best[len(pieces)][1]


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
        with PaperMode() as mode:
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
    schedule: str = "1f1b",
) -> DryRunReport:
    """Return the report of a step of `microbatches` from the report of one, which has a rank for each stage.

    Its bound ``"bubble"`` is the time in which a rank has nothing to do: with one stage a rank, (P - 1) microbatches of
    the slowest; of other schedules, what their own order leaves (`played_schedule`).
    """
    stages = (_StagesOfRank(report.mesh, rank, borders, device, ranks_per_node, schedule) for rank in report.ranks)
    ranks = [cost for each in stages for cost in each.costs(shares, microbatches)]
    return replace(report, ranks=tuple(ranks), reader_seconds=microbatches * report.reader_seconds)


@dataclass(frozen=True)
class _BorderMessage:
    link: str
    traffic: Traffic
    seconds: float


_NOTHING = _BorderMessage("node", Traffic(), 0.0)


class _StagesOfRank:
    def __init__(
        self,
        mesh: Mapping[str, int],
        rank: RankCost,
        borders: Borders,
        device: Device,
        ranks_per_node: int,
        schedule: str,
    ) -> None:
        self._rank, self._borders, self._device, self._node = rank, borders, device, ranks_per_node
        self._axis, self._sizes = list(mesh).index(PIPE_AXIS), list(mesh.values())
        self._schedule, self._places = PIPE_SCHEDULES[schedule], mesh[PIPE_AXIS]
        # of each rank of the pipeline, its stages
        self._own = [self._schedule.stages_at(at, self._places, len(borders)) for at in range(self._places)]
        self._place_of = {stage: place for place, stages in enumerate(self._own) for stage in stages}

    def costs(self, shares: Sequence[StageShare], microbatches: int) -> list[RankCost]:
        phases, last = self._rank.phases, len(shares) - 1
        sent = {
            "forward": [*(self._message(at, at + 1, at + 1) for at in range(last)), _NOTHING],
            "backward": [_NOTHING, *(self._message(at, at - 1, at) for at in range(1, last + 1))],
        }
        slots = {
            name: [phases[name].seconds * s.seconds + m.seconds for s, m in zip(shares, messages, strict=True)]
            for name, messages in sent.items()
        }
        if self._schedule.per_rank == 1:
            ends = {name: [max(each) * (microbatches + last)] * len(shares) for name, each in slots.items()}
            kept = [share.kept * min(len(shares) - at, microbatches) for at, share in enumerate(shares)]
        else:
            ends, kept = self._played(shares, slots, microbatches)
        rank_costs = list[RankCost]()
        for place, own in enumerate(self._own):
            share = StageShare(*(sum(getattr(shares[at], n) for at in own) for n in ("seconds", "weights", "kept")))
            phase_costs = dict[str, PhaseCost]()
            for name, messages in sent.items():
                one = _phase_of_stage(phases[name], share, kept[place], microbatches)
                phase_costs[name] = _with_messages(one, [messages[at] for at in own], microbatches, ends[name][place])
            for name, part in zip(ONCE_A_STEP, (share.weights, 1.0), strict=True):
                once = replace(part_of_phase(phases[name], part), peak=part_of_phase(phases[name], share.weights).peak)
                phase_costs["backward"] = phase_after_phase(phase_costs["backward"], once)
            if "step" in phases:
                phase_costs["step"] = part_of_phase(phases["step"], share.weights)
            rank_costs.append(RankCost(self._number(place), self._coordinate(place), phase_costs))
        return rank_costs

    def _played(
        self, shares: Sequence[StageShare], slots: Mapping[str, Sequence[float]], microbatches: int
    ) -> tuple[dict[str, list[float]], list[float]]:
        """Return the seconds in which each rank is in forward and in backward passes, waiting counted with either by
        their work; and what it keeps.
        """
        works = [
            StageWork(forward, backward, share.kept)
            for forward, backward, share in zip(slots["forward"], slots["backward"], shares, strict=True)
        ]
        seconds, kept = played_schedule(self._schedule, self._places, works, microbatches)
        busy = {name: [sum(each[at] for at in own) for own in self._own] for name, each in slots.items()}
        whole = [sum(of_place) or 1.0 for of_place in zip(*busy.values(), strict=True)]
        ends = {
            name: [seconds * part / all_of_it for part, all_of_it in zip(parts, whole, strict=True)]
            for name, parts in busy.items()
        }
        return ends, kept

    def _coordinate(self, place: int) -> tuple[int, ...]:
        coordinate = self._rank.coordinate
        return (*coordinate[: self._axis], place, *coordinate[self._axis + 1 :])

    def _number(self, place: int) -> int:
        return int(np.ravel_multi_index(self._coordinate(place), self._sizes))

    def _message(self, stage: int, to: int, border: int) -> _BorderMessage:
        coordinate = self._rank.coordinate
        within = (*coordinate[: self._axis], *coordinate[self._axis + 1 :]) or (0,)
        tiles = [x for x in self._borders[border] if to > stage or x.dtype.is_floating_point or x.dtype.is_complex]
        sizes = [torch.Size(x.sent_layout.local_shape(within)).numel() * x.dtype.itemsize for x in tiles]
        traffic = Traffic(sum(sizes), len(sizes))
        places = self._place_of[stage], self._place_of[to]
        if places[0] == places[1]:
            return _NOTHING
        nodes = {self._number(place) // self._node for place in places}
        link = "node" if len(nodes) == 1 else "network"
        return _BorderMessage(link, traffic, self._device.call_time("pipeline", link, *_numbers(traffic)))


_OF_WEIGHTS = ("weights", "gradients", "optimizer")  # kinds of memory
_SENT_OF_WEIGHTS = ("gathered weights", "gradients")


def _phase_of_stage(phase: PhaseCost, share: StageShare, kept: float, times: int) -> PhaseCost:
    """Return the stage's part of a phase for `times` microbatches; `kept` is the part of activations under way."""
    parts = {kind: share.weights if kind in _SENT_OF_WEIGHTS else share.seconds for kind in phase.traffic}
    traffic = {kind: part_of_traffic(t, times * parts[kind]) for kind, t in phase.traffic.items()}
    before, after = (sum(totals.values(), Traffic()) for totals in (phase.traffic, traffic))
    # a link's numbers cover all kinds of traffic together
    of_bytes, of_messages = after.sent_bytes / max(before.sent_bytes, 1), after.messages / max(before.messages, 1)
    memory = dict.fromkeys(_OF_WEIGHTS, share.weights) | {"activations": kept}
    return replace(
        part_of_phase(phase, times * share.seconds),
        peak={kind: round(size * memory.get(kind, share.seconds)) for kind, size in phase.peak.items()},
        traffic=traffic,
        links={
            link: Traffic(round(t.sent_bytes * of_bytes), round(t.messages * of_messages))
            for link, t in phase.links.items()
        },
    )


def _with_messages(phase: PhaseCost, messages: Sequence[_BorderMessage], times: int, seconds: float) -> PhaseCost:
    waiting = times * sum(message.seconds for message in messages)
    traffic, links = dict(phase.traffic), dict(phase.links)
    for message in messages:
        sent = part_of_traffic(message.traffic, times)
        if sent.messages:
            traffic["pipeline"] = traffic.get("pipeline", Traffic()) + sent
            links[message.link] = links.get(message.link, Traffic()) + sent
    return replace(
        phase,
        traffic=traffic,
        links=links,
        seconds_by_bound={**phase.seconds_by_bound, "bubble": max(seconds - phase.seconds - waiting, 0.0)},
        message_seconds=phase.message_seconds + waiting,
        seconds=seconds,
    )


def _numbers(traffic: Traffic) -> tuple[int, int]:
    return traffic.sent_bytes, traffic.messages
