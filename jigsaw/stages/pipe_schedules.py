"""Schedules of a pipeline, all torch's: which stages a rank has, and how many stages and microbatches each needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

from jigsaw.errors import ShardingError


@dataclass(frozen=True)
class PipeSchedule:
    """One of torch's schedules: how many stages a rank has (None: any number from 2), and its requirements."""

    make: Any
    per_rank: int | None
    is_v: bool = False
    parts_backward: bool = False  # gradients of inputs first, those of weights later
    least_batches: int = 0  # a stage

    def stages_at(self, place: int, ranks: int, stages: int) -> list[int]:
        """Return the stages of the rank at a place of the axis: they loop over the ranks, or go there and back."""
        return [place, stages - 1 - place] if self.is_v and ranks > 1 else [*range(place, stages, ranks)]


PIPE_SCHEDULES = {
    "gpipe": PipeSchedule(pipelining.ScheduleGPipe, 1),
    "1f1b": PipeSchedule(pipelining.Schedule1F1B, 1, least_batches=1),
    "interleaved_1f1b": PipeSchedule(pipelining.ScheduleInterleaved1F1B, None),
    "interleaved_zero_bubble": PipeSchedule(pipelining.ScheduleInterleavedZeroBubble, None, parts_backward=True),
    "zbv": PipeSchedule(pipelining.ScheduleZBVZeroBubble, 2, is_v=True, parts_backward=True),
    "dualpipev": PipeSchedule(pipelining.ScheduleDualPipeV, 2, is_v=True, parts_backward=True, least_batches=1),
}


def check_schedule(name: str, schedule: PipeSchedule, ranks: int, stages: int, batches: int) -> None:
    """Check the numbers of stages and microbatches.

    *Raises*: `ShardingError` for stages and microbatches that the schedule cannot have.
    """
    if batches < 1:
        raise ShardingError(f"microbatches={batches} must be at least 1")
    if ranks == 1:
        return
    each = schedule.per_rank or max(stages // ranks, 2)
    if stages != each * ranks:
        wanted = f"{schedule.per_rank * ranks}" if schedule.per_rank else f"a multiple of {ranks}, at least {2 * ranks}"
        raise ShardingError(
            f"schedule={name!r} on {ranks} ranks has {wanted} stages, but stages= makes {stages}; name one module less "
            "than there are stages"
        )
    if batches < schedule.least_batches * stages:
        raise ShardingError(f"schedule={name!r} of {stages} stages needs microbatches >= {stages}, not {batches}")
    rounds = max(1, batches // ranks)
    if schedule.per_rank is None and batches % rounds:
        raise ShardingError(
            f"schedule={name!r} on {ranks} ranks: microbatches={batches} is no multiple of its {rounds} rounds; take a "
            f"multiple of {ranks}"
        )
