"""Counts of the phases of a step, and the counts of many equal blocks, derived from those of a few.

A step is a list of events: memory that began and ceased to be alive, kernels, messages.  One more block adds one
stretch to the list, in one place; then the list of n blocks repeats the stretch as often. For example memory of the
forward pass with 1 and 2 blocks, x the input and y what a block keeps:

    +x +y -x
    +x +y +y -x         so n blocks have  +x, n times +y, -x

The highest point of n blocks is found in the list of n blocks.  An event may also grow with each block. An example is
the gather of FSDP2 for the rest of a model, with the norms of all blocks.  Such a number for n blocks lies on the line
through those of 1 and 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch

from jigsaw.comm import TrafficCall
from jigsaw.dryrun.kernel_clock import KernelCall

MEMORY_KINDS: tuple[str, ...] = ("weights", "gradients", "optimizer", "activations", "temporary")

T = TypeVar("T")


@dataclass(frozen=True)
class KernelCost:
    """One operator: its floating-point operations, the bytes it reads and writes, its dtype, its call.

    One that `is_attention` multiplies queries, keys and values in one kernel.
    """

    flop: int
    moved_bytes: int
    dtype: torch.dtype
    operator: Any = None
    call: KernelCall | None = None
    is_attention: bool = False


@dataclass
class CountedPhase:
    """One phase of a step: its kernels, also those of a forward pass that runs again, and its memory by kind.  That is
    what was alive before, and what began (> 0) or ceased to be while nodes of the graph ran and after.  Messages of
    FSDP2 are apart.
    """

    kernels: list[KernelCost] = field(default_factory=list[KernelCost])
    kernels_at_end: list[KernelCost] = field(default_factory=list[KernelCost])
    kernels_again: int = 0
    alive_before: Counter[str] = field(default_factory=Counter[str])
    changes: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    changes_at_end: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    calls: list[TrafficCall] = field(default_factory=list[TrafficCall])
    calls_of_weights: list[TrafficCall] = field(default_factory=list[TrafficCall])

    @property
    def peak(self) -> dict[str, int]:
        total = highest = sum(self.alive_before.values())
        where, changes = 0, [*self.changes, *self.changes_at_end]
        for at, (_, size) in enumerate(changes, 1):
            total += size
            if total > highest:
                highest, where = total, at
        alive = {kind: self.alive_before[kind] for kind in MEMORY_KINDS}
        for kind, size in changes[:where]:
            alive[kind] += size
        return alive


def ends_by_size(changes: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return changes of memory in which what ceases to be alive at one time does so in the order of its size: autocast
    drops the casts that it kept in any order.  The highest point is the same.

    >>> from jigsaw.dryrun.counted_steps import ends_by_size
    >>> ends_by_size([("temporary", 8), ("temporary", -3), ("temporary", -5)])
    [('temporary', 8), ('temporary', -5), ('temporary', -3)]
    """
    runs = groupby(changes, lambda change: change[1] > 0)
    return [each for begins, run in runs for each in (run if begins else sorted(run))]


def phase_of_more_blocks(
    fewer: CountedPhase, more: CountedPhase, times: int, by_size: bool = False
) -> CountedPhase | None:
    """Return the phase with `times` more stretches than `fewer`, of which `more` has one more; None where they differ
    otherwise.

    With `by_size`, what ceases to be alive at one time is put in the order of its size before they are compared.

    >>> from jigsaw.dryrun.counted_steps import CountedPhase, phase_of_more_blocks
    >>> two, three = (CountedPhase(changes=[("activations", 1)] * n + [("temporary", 9)]) for n in (2, 3))
    >>> phase_of_more_blocks(two, three, 4).peak["activations"]
    6
    """
    events: dict[str, Any] = {}
    for name, (look, make) in _LISTS.items():
        lists = getattr(fewer, name), getattr(more, name)
        if by_size and look is _look_of_change:
            lists = ends_by_size(lists[0]), ends_by_size(lists[1])
        stretched = _with_stretches(*lists, times, look, make)
        if stretched is None:
            return None
        events[name] = stretched
    before = {kind: _on_line(fewer.alive_before[kind], n, times) for kind, n in more.alive_before.items()}
    again = _on_line(fewer.kernels_again, more.kernels_again, times)
    return CountedPhase(**events, kernels_again=again, alive_before=Counter(before))


def are_same_steps(some: CountedPhase, other: CountedPhase) -> bool:
    """Say whether two phases are equal.

    What is kept to time kernels does not count, nor the order in which memory ceases to be alive at one time.
    """
    if (some.kernels_again, some.alive_before) != (other.kernels_again, other.alive_before):
        return False
    for name, (look, _) in _LISTS.items():
        lists = getattr(some, name), getattr(other, name)
        if look is _look_of_change:
            lists = ends_by_size(lists[0]), ends_by_size(lists[1])
        if [*map(look, lists[0])] != [*map(look, lists[1])]:
            return False
    return True


def _on_line(few: int, more: int, times: int) -> int:
    return few + times * (more - few)


Look = tuple[Any, tuple[int, ...]]  # a kind, and its numbers


def _look_of_change(change: tuple[str, int]) -> Look:
    return (change[0], change[1] > 0), (change[1],)


def _look_of_kernel(cost: KernelCost) -> Look:
    return (cost.operator, cost.dtype), (cost.flop, cost.moved_bytes)


def _look_of_call(call: TrafficCall) -> Look:
    where = tuple(rank for rank, _ in call.sent_to)
    sizes = tuple(size for _, size in call.sent_to)
    return (call.kind, call.messages, call.is_behind, where, call.ring), (call.sent_bytes, call.received_bytes, *sizes)


def _made_change(like: tuple[str, int], numbers: tuple[int, ...]) -> tuple[str, int]:
    return like[0], numbers[0]


def _made_kernel(like: KernelCost, numbers: tuple[int, ...]) -> KernelCost:
    return KernelCost(numbers[0], numbers[1], like.dtype, like.operator, is_attention=like.is_attention)


def _made_call(like: TrafficCall, numbers: tuple[int, ...]) -> TrafficCall:
    to = tuple((rank, size) for (rank, _), size in zip(like.sent_to, numbers[2:], strict=True))
    return TrafficCall(like.kind, numbers[0], numbers[1], like.messages, to, like.is_behind, like.ring)


_LISTS: dict[str, tuple[Any, Any]] = {
    "changes": (_look_of_change, _made_change),
    "changes_at_end": (_look_of_change, _made_change),
    "kernels": (_look_of_kernel, _made_kernel),
    "kernels_at_end": (_look_of_kernel, _made_kernel),
    "calls": (_look_of_call, _made_call),
    "calls_of_weights": (_look_of_call, _made_call),
}


def _with_stretches(shorter: Sequence[T], longer: Sequence[T], times: int, look: Any, make: Any) -> list[T] | None:
    """Return `shorter` with `times` stretches where `longer` has one, extrapolated; None if they differ elsewhere."""
    few, more = [*map(look, shorter)], [*map(look, longer)]
    places = _places_of_stretches(few, more)
    if places is None:
        return None
    items: list[T] = []
    for at, (item, numbers_of_few) in enumerate(zip(shorter, few, strict=True)):
        place = places[at]
        if place > (before := places[at - 1] + 1 if at else 0):
            items += list(longer[before:place]) * times
        other = more[place]
        numbers = (_on_line(a, b, times) for a, b in zip(numbers_of_few[1], other[1], strict=True))
        items.append(item if numbers_of_few == other else make(item, tuple(numbers)))
    return items + list(longer[places[-1] + 1 if places else 0 :]) * times


_GAP, _NEVER = 3, 10**6  # the beginning of a stretch costs as much as three numbers that differ


def _places_of_stretches(shorter: Sequence[Look], longer: Sequence[Look]) -> list[int] | None:
    """Return where each item of `shorter` lies in `longer`, with the fewest differences; None if kinds differ."""
    extra = len(longer) - len(shorter)
    if extra < 0:
        return None
    known: dict[Any, int] = {}
    ids = [
        [np.array([known.setdefault(look[part] if part == 0 else look, len(known)) for look in looks], dtype=np.int64)
         for looks in (shorter, longer)]
        for part in (0, 1)
    ]  # fmt: skip
    firsts = [np.array([look[1][0] for look in looks], dtype=np.float64) for looks in (shorter, longer)]
    # costs[d]: of the items so far, if the last one lies d places further on in `longer`; and d of the one before it
    costs = np.full(extra + 1, _NEVER, dtype=np.float64)
    costs[0] = 0
    came_from: list[Any] = []
    shifts = np.arange(extra + 1)
    for at in range(len(shorter) + 1):
        least = np.minimum.accumulate(costs)
        # for each shift, the last one up to it that has the least cost so far
        where = np.maximum.accumulate(np.where(costs == least, shifts, 0))
        opened = np.concatenate([[_NEVER], least[:-1] + _GAP])
        is_opened = opened < costs
        came_from.append(np.where(is_opened, np.concatenate([[0], where[:-1]]), shifts))
        costs = np.where(is_opened, opened, costs)
        if at < len(shorter):
            theirs = slice(at, at + extra + 1)
            is_other = ids[0][1][theirs] != ids[0][0][at]
            differs = ids[1][1][theirs] != ids[1][0][at]
            change = np.abs(firsts[1][theirs] - firsts[0][at]) / np.maximum(np.abs(firsts[1][theirs]), 1)
            costs = np.minimum(costs + np.where(is_other, _NEVER, differs * (1 + change)), _NEVER)
    if costs[extra] >= _NEVER:
        return None
    places, shift = list[int](), int(came_from[-1][extra])
    for at in reversed(range(len(shorter))):
        places.append(at + shift)
        shift = int(came_from[at][shift])
    return places[::-1]
