"""Times of a pipeline's step, played by the order of work that one of torch's schedules gives to each rank.

Two ranks with two stages each, in V: rank 0 has the first and the last stage, rank 1 those between.  The backward pass
of a microbatch goes 3, 2, 1, 0; the gradients of weights (W) fill gaps.  A rank's work begins when that of the same
microbatch in the stage before (backward: behind) has ended, and its own list has come to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from jigsaw.stages.own_stages import PipeSchedule

# schedules that compute them apart are taken to need as long for gradients of weights as for those of inputs
_OF_WEIGHTS = 0.5


@dataclass(frozen=True)
class StageWork:
    """Seconds of a stage for a microbatch, with its messages, and the share of what is kept for the backward pass."""

    forward: float
    backward: float
    kept: float


def played_schedule(
    schedule: PipeSchedule, ranks: int, works: Sequence[StageWork], microbatches: int
) -> tuple[float, list[float]]:
    """Return the seconds until the last rank has ended, and the most that each rank keeps at a time.

    The schedule has several stages a rank: torch's order of 1F1B leaves out the last stage's first microbatch.

    >>> from jigsaw.dryrun.schedule_times import StageWork, played_schedule
    >>> from jigsaw.stages.own_stages import PIPE_SCHEDULES
    >>> played_schedule(PIPE_SCHEDULES["interleaved_1f1b"], 2, [StageWork(0.5, 1.0, 0.25)] * 4, 4)
    (13.5, [1.25, 0.75])
    """
    left = {rank: deque(_computations(actions)) for rank, actions in _orders(schedule, ranks, works, microbatches)}
    clock, kept, most = ([0.0] * ranks for _ in range(3))
    ended: dict[tuple[int, bool, int], float] = {}
    while any(left.values()):
        steps_left = sum(map(len, left.values()))
        for rank, actions in left.items():
            while actions:
                kind, stage, batch = actions[0].computation_type, actions[0].stage_index, actions[0].microbatch_index
                before = [key for key in _needed(kind, stage, batch) if 0 <= key[0] < len(works)]
                if not all(key in ended for key in before):
                    break
                actions.popleft()
                begin = max([clock[rank], *(ended[key] for key in before)])
                clock[rank] = begin + _seconds(kind, works[stage])
                if kind is schedules.FORWARD:
                    kept[rank] += works[stage].kept
                    most[rank] = max(most[rank], kept[rank])
                if kind in (schedules.FULL_BACKWARD, schedules.BACKWARD_WEIGHT):
                    kept[rank] -= works[stage].kept
                if kind is not schedules.BACKWARD_WEIGHT:
                    ended[stage, kind is schedules.FORWARD, batch] = clock[rank]
        assert sum(map(len, left.values())) < steps_left, "each rank waits for another"
    return max(clock), most


def _orders(
    schedule: PipeSchedule, ranks: int, works: Sequence[StageWork], microbatches: int
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Return what each rank does in turn; a schedule asks stages for their numbers, and whether they are compiled."""
    facts: dict[str, Any] = {"num_stages": len(works), "group_size": ranks, "group_rank": 0, "submod": nn.Identity()}
    own: Any = [SimpleNamespace(stage_index=at, **facts) for at in schedule.stages_at(0, ranks, len(works))]
    orders: Mapping[int, Sequence[Any]] = schedule.make(own, microbatches, loss_fn=_no_loss).pipeline_order
    yield from orders.items()


def _no_loss(output: Any, target: Any) -> Any:
    """Stand for a loss, which tells a schedule that it has a backward pass."""
    return output


def _computations(actions: Sequence[Any]) -> Iterator[Any]:
    for action in actions:
        if action is not None and action.is_compute_op:
            yield from action.sub_actions or (action,)


def _needed(kind: Any, stage: int, batch: int) -> Sequence[tuple[int, bool, int]]:
    if kind is schedules.FORWARD:
        return [(stage - 1, True, batch)]
    if kind is schedules.BACKWARD_WEIGHT:
        return [(stage, False, batch)]
    return [(stage, True, batch), (stage + 1, False, batch)]


def _seconds(kind: Any, work: StageWork) -> float:
    if kind is schedules.FORWARD:
        return work.forward
    part = {schedules.BACKWARD_WEIGHT: _OF_WEIGHTS, schedules.BACKWARD_INPUT: 1 - _OF_WEIGHTS}.get(kind, 1.0)
    return part * work.backward
