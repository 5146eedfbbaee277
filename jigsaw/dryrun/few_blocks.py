"""A step of many blocks, derived from those of a few of them: exact, or not done.

Blocks of a row (``ModuleList``, ``Sequential``) that are equal, and are called one after the other with the same sizes,
do the same.  So the step of twenty is played with one and with two (or two and three).  The share of the last one
stands for each of the others (`counted_steps`).  Four checks come first, because a net may treat one of its blocks
differently:

- the blocks: types, sizes of weights and buffers, and plain attributes all the way down;
- an outline of the forward pass, with all blocks (only the first is run), and with two and three. The net must do the
  same around each block, with tensors of the same age;
- gradients travel in buckets, whose ends depend on the bytes of all parameters. All blocks have the same ends if each
  has a parameter that is a bucket by itself, or none of its parameters is in one;
- one more block, played once for each way to keep weights, must do what follows from those.

Where one of these does not hold, all blocks are played.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from jigsaw.dryrun.bare_models import facts_of_models, rows_of_blocks
from jigsaw.dryrun.counted_steps import CountedPhase, KernelCost, are_same_steps, ends_by_size, phase_of_more_blocks
from jigsaw.dryrun.fake_ranks import fake_mesh
from jigsaw.dryrun.rank_playing import (
    PIPE_AXIS,
    PlayedRank,
    StepPlan,
    know_neighbors,
    play_rank,
    prepared_inputs,
    prepared_model,
)
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import own_buffers, own_parameters
from jigsaw.torch_internals.fake_tensors import PaperMode

_WORTH = 7  # rows with fewer blocks are played whole: else one, two and three blocks are played, and sometimes four


def play_rank_shortly(plan: StepPlan, axes: Mapping[str, int], rank: int) -> PlayedRank:
    """Run the step as `rank` of a mesh of these axes, with all blocks or with a few that give the same."""
    if plan.blocks is None and not plan.every_block and isinstance(plan.checkpoint, str):
        played = play_few_blocks(plan, axes, rank)
        if played is not None:
            return played
    return play_rank(plan, axes, rank)


def play_few_blocks(plan: StepPlan, axes: Mapping[str, int], rank: int) -> PlayedRank | None:
    """Play one block and two, or two and three, if the next number of blocks follows from these."""
    known = facts_of_models()
    row: tuple[str, int] | None
    if isinstance(plan.model, nn.Module):
        looked = "longest row", id(plan.model)
        row = known[looked] = known[looked] if looked in known else longest_row(plan.model)
    else:
        with fake_mesh(axes, rank) as mesh, PaperMode():
            row = longest_row(prepared_model(plan, mesh)[0])
    if row is None:
        return None
    name, blocks = row
    model = id(plan.model), plan.dtype, name
    way = (
        *model,
        plan.shard_weights,
        plan.checkpoint,
        bool(plan.replicate),
        bool(plan.tensor),
        plan.gather_again,
        PIPE_AXIS in axes,
    )
    if model not in known and not _passes_blocks_alike(plan, axes, rank, *row):
        return None
    known[model] = 0
    played: dict[int, PlayedRank] = {}

    def play(n: int) -> PlayedRank:
        if n not in played:
            played[n] = play_rank(replace(plan, row=(name, n)), axes, rank)
        return played[n]

    # FSDP2 gathers weights while the block before computes, so a second block adds something else than a third one.
    # Autocast drops its casts in any order: what the order itself does not foretell, that of sizes may.
    for few, by_size in (known[way],) if way in known else product((1, 2), (False, True)):
        forecast = _of_more_blocks(play(few), play(few + 1), blocks - few, by_size)
        if forecast is not None and (way in known or _is_foretold(play(few), play(few + 1), play(few + 2), by_size)):
            known[way] = few, by_size
            return forecast
    return None


def _is_foretold(few: PlayedRank, more: PlayedRank, still_more: PlayedRank, by_size: bool) -> bool:
    forecast = _of_more_blocks(few, more, 2, by_size)
    return forecast is not None and all(are_same_steps(forecast.phases[n], p) for n, p in still_more.phases.items())


def _of_more_blocks(fewer: PlayedRank, more: PlayedRank, times: int, by_size: bool) -> PlayedRank | None:
    if not (fewer.is_periodic and more.is_periodic) or set(fewer.phases) != set(more.phases):
        return None
    if any(r.kind != "value" for r in fewer.remarks) or len(fewer.remarks) != len(more.remarks):
        return None
    phases: dict[str, CountedPhase] = {}
    for name in fewer.phases:
        phase = phase_of_more_blocks(fewer.phases[name], more.phases[name], times, by_size)
        if phase is None:
            return None
        phases[name] = phase
    parameters = fewer.parameters + times * (more.parameters - fewer.parameters)
    return replace(more, phases=phases, parameters=parameters)


# -- blocks -----------------------------------------------------------------------------------------------------------


def longest_row(model: nn.Module) -> tuple[str, int] | None:
    """Return the name and length of the longest row of blocks that are equal in everything; None for few."""
    names = {module: name for name, module in model.named_modules()}
    rows = [row for row in rows_of_blocks(model) if len(row) >= _WORTH]
    for row in sorted(rows, key=len, reverse=True):
        shared = len(list(row.parameters())) < sum(len(list(block.parameters())) for block in row)
        first = _look_of(row[0])
        if not shared and all(_look_of(block) == first for block in row):
            return names[row], len(row)
    return None


_OWN_OF_MODULES = set(vars(nn.Module())) - {"training"}


def _look_of(module: nn.Module) -> tuple[Any, ...]:
    """Return everything except values that decides what a module does, for comparison."""
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    plain = {name: _plain_look(value) for name, value in vars(module).items() if name not in _OWN_OF_MODULES}
    tensors = [
        (name, None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad))
        for own in (own_parameters(module), own_buffers(module))
        for name, x in own.items()
    ]
    inner = [(name, _look_of(child)) for name, child in module.named_children()]
    return type(module), [id(module)] if hooks else [], plain, tensors, inner


def _plain_look(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), [_plain_look(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain_look(each) for key, each in value.items()}
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    known = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
    return value if isinstance(value, known) else id(value)


# -- what is around them ----------------------------------------------------------------------------------------------


class _UnlikeCallError(Exception):
    """A block is called in another order or with other arguments than the first."""


def _passes_blocks_alike(plan: StepPlan, axes: Mapping[str, int], rank: int, name: str, blocks: int) -> bool:
    try:
        few, more, all_of_them = (_outline(replace(plan, row=(name, n)), axes, rank) for n in (2, 3, blocks))
    except Exception:
        return False  # the run with all blocks will raise the error
    forecast = phase_of_more_blocks(few, more, blocks - 2)
    return forecast is not None and are_same_steps(forecast, all_of_them)


def _outline(plan: StepPlan, axes: Mapping[str, int], rank: int) -> CountedPhase:
    meter = _OutlineMeter()
    assert plan.row is not None
    with fake_mesh(axes, rank) as mesh:
        know_neighbors(mesh)
        with PaperMode(), meter.counting(), torch.no_grad():
            model, dtype = prepared_model(plan, mesh)
            inputs = prepared_inputs(plan, mesh, dtype)
            row: Any = model.get_submodule(plan.row[0])
            calls = _BlockCalls(meter)
            for at, block in enumerate(row):
                block.forward = partial(calls.answer, at, block.forward)
            meter.begin_phase("forward")
            output = model(*inputs)
            meter.begin_phase("after")
            del output
    if calls.next != plan.row[1]:
        raise _UnlikeCallError
    phase = meter.counted_phase("forward", [])
    return replace(phase, kernels=meter.asked, changes=ends_by_size(phase.changes))


class _OutlineMeter(StepMeter):
    """Notes of the tensors of each operator: by number if from before the first block, else by their age."""

    def __init__(self) -> None:
        super().__init__(keeps_calls=False)
        self.asked: list[KernelCost] = []
        self._begun = 0
        self.is_quiet = False  # True while a remembered answer stands for a block
        self._first: int | None = None

    def begin_phase(self, name: str) -> None:
        super().begin_phase(name)
        self._begun = self._numbers

    def begin_row(self) -> None:
        self._first = self._numbers

    def note(self, what: Any, values: Any) -> None:
        ages: list[Any] = []
        for x in pytree.tree_leaves(values):
            if isinstance(x, Tensor):
                number = self._number_of((x.local if isinstance(x, Tile) else x).untyped_storage())
                early = self._first is None or number <= self._first
                ages.append(("early", max(number - self._begun, 0)) if early else ("late", self._numbers - number))
        self.asked.append(KernelCost(0, 0, torch.float32, (what, tuple(ages))))

    def _count_kernel(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self._begun and not self.is_quiet:
            self.note(func, (args, kwargs))
        super()._count_kernel(func, args, kwargs, out)


class _BlockCalls:
    def __init__(self, meter: _OutlineMeter) -> None:
        self.next = 0
        self._meter = meter
        self._asked: Any = None
        self._said: Any = None

    def answer(self, at: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if at != self.next:
            raise _UnlikeCallError
        self.next += 1
        if at == 0:
            self._meter.begin_row()
        self._meter.note("block", (args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        asked = [*map(_argument_look, leaves)], spec
        if self._said is None:
            self._asked, self._said = asked, forward(*args, **kwargs)
        if asked != self._asked:
            raise _UnlikeCallError
        self._meter.is_quiet = True
        answer = pytree.tree_map_only(Tensor, _alike, self._said)
        self._meter.is_quiet = False
        return answer


def _argument_look(leaf: Any) -> Any:
    if isinstance(leaf, Tile):
        return leaf.layout, leaf.local.stride(), leaf.dtype
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return _plain_look(leaf)


def _alike(x: Tensor) -> Tensor:
    return Tile(torch.empty_like(x.local), x.layout, x.mesh) if isinstance(x, Tile) else torch.empty_like(x)
