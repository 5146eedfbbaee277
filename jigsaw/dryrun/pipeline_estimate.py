"""What a pipeline would make of a step, from the dry run of one microbatch on the ranks of one stage.

For example 12 blocks on pipe=4, 8 microbatches: a stage has 3 blocks, a quarter of the seconds of a microbatch, and the
step takes 8 + 4 - 1 = 11 of these instead of 8: of the time 3/11 is the bubble.  With 10 blocks the longest stage has 3
as well, a share of 0.3, so all is 1.2 times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jigsaw.dryrun.report import DryRunReport, PhaseCost, RankCost, Traffic


def pipelined_report(report: DryRunReport, stages: int, microbatches: int, share: float) -> DryRunReport:
    """The report of a step of so many microbatches on ``pipe=stages`` times the ranks of `report`, which is that of one
    microbatch of the whole model; 1F1B of stages of which the slowest has a `share` of a microbatch's seconds.

    Its bound ``"bubble"`` is the time in which a rank has nothing to do.  Gradients are summed in each microbatch here,
    where the pipeline does so once; and what stages send to each other is not in it.
    """
    under_way = min(stages, microbatches)
    ranks = tuple(
        RankCost(
            rank.rank,
            (0, *rank.coordinate),
            {
                name: _staged_phase(
                    phase, share, 1 if name == "step" else microbatches, 0 if name == "step" else stages - 1, under_way
                )
                for name, phase in rank.phases.items()
            },
        )
        for rank in report.ranks
    )
    return replace(report, mesh={"pipe": stages, **report.mesh}, ranks=ranks)


def _staged_phase(phase: PhaseCost, share: float, times: int, waits: int, under_way: int) -> PhaseCost:
    """A phase of one stage, `times` times, with `waits` times of nothing to do."""
    part = share * times
    return PhaseCost(
        round(phase.flop * part),
        round(phase.moved_bytes * part),
        round(phase.kernels * part),
        _staged_memory(phase.peak, share, under_way),
        _staged_traffic(phase.traffic, part),
        _staged_traffic(phase.links, part),
        {name: seconds * part for name, seconds in phase.seconds_by_bound.items()}
        | {"bubble": phase.seconds * share * waits},
        phase.message_seconds * part,
        phase.hidden_seconds * part,
        phase.seconds * share * (times + waits),
    )


def _staged_memory(peak: Mapping[str, int], share: float, under_way: int) -> dict[str, int]:
    # the first stage keeps what the backward passes of all microbatches that are under way need
    return {kind: round(size * share * (under_way if kind == "activations" else 1)) for kind, size in peak.items()}


def _staged_traffic(traffic: Mapping[str, Traffic], part: float) -> dict[str, Traffic]:
    return {kind: Traffic(round(t.sent_bytes * part), round(t.messages * part)) for kind, t in traffic.items()}
