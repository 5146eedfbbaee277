"""A step of many blocks from those of one and of two of them: exact, or not done.

Blocks of a row (``ModuleList``, ``Sequential``) that are alike in all that a module has, and are called one after the
other with the same sizes, do the same.  So the step of twenty is played with one and with two, and what the second one
adds stands for each of the others (`counted_steps`).  Four things are looked at first, for a net may do at one of its
blocks what it does at no other:

- the blocks: types, sizes of weights and buffers, and plain attributes all the way down;
- an outline of the forward pass, once with all blocks, of which the first alone is run, and with two and three: what
  the net does around them must be the same at each;
- gradients travel in buckets, which end where the bytes of all parameters say; they do so alike in all blocks where
  each block has a parameter that is a bucket by itself, or none of its parameters is in one;
- three blocks, played once for each way to keep weights, must do what follows from one and two.

Where one of these does not hold, all blocks are played.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from jigsaw.cut import ShardingError
from jigsaw.dryrun.counted_steps import CountedPhase, are_same_steps, phase_of_more_blocks
from jigsaw.dryrun.fake_ranks import fake_mesh
from jigsaw.dryrun.rank_playing import (
    PlayedRank,
    StepPlan,
    know_neighbours,
    play_rank,
    prepared_inputs,
    prepared_model,
    rows_of_blocks,
)
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.tile import Tile

_WORTH = 7  # blocks: more than are played, one, two and three
_Known = set[tuple[Any, ...]]
_known: _Known | None = None


@contextmanager
def remembered_models() -> Generator[None]:
    """Within the block models do not change: what was found of one holds for its next meshes, too."""
    global _known
    before, _known = _known, set() if _known is None else _known
    try:
        yield
    finally:
        _known = before


def play_rank_shortly(plan: StepPlan, axes: Mapping[str, int], rank: int) -> PlayedRank:
    """Run the step as `rank` of a mesh of these axes, with all blocks or with a few that say as much."""
    if plan.blocks is None and not plan.every_block and isinstance(plan.checkpoint, str):
        found = _play_few(plan, axes, rank)
        if found is not None:
            return found
    return play_rank(plan, axes, rank)


def _play_few(plan: StepPlan, axes: Mapping[str, int], rank: int) -> PlayedRank | None:
    """From one block and two, if what three do follows from these."""
    with fake_mesh(axes, rank) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        row = longest_row(prepared_model(plan, mesh)[0])
    if row is None:
        return None
    name, blocks = row
    model = id(plan.model), plan.dtype, name
    way = *model, plan.shard_weights, plan.checkpoint, bool(plan.replicate)
    known: _Known = set() if _known is None else _known
    if model not in known and not _passes_blocks_alike(plan, axes, rank, *row):
        return None
    known.add(model)
    one, two = (play_rank(replace(plan, row=(name, n)), axes, rank) for n in (1, 2))
    found = _of_more_blocks(one, two, blocks - 1)
    if found is not None and way not in known:
        three, foretold = play_rank(replace(plan, row=(name, 3)), axes, rank), _of_more_blocks(one, two, 2)
        if foretold is None or not all(are_same_steps(foretold.phases[n], p) for n, p in three.phases.items()):
            return None
        known.add(way)
    return found


def _of_more_blocks(fewer: PlayedRank, more: PlayedRank, times: int) -> PlayedRank | None:
    """What is played with so many blocks more than `fewer`, of which `more` has one more."""
    if not (fewer.is_periodic and more.is_periodic) or set(fewer.phases) != set(more.phases):
        return None
    if any(r.kind != "value" for r in fewer.remarks) or len(fewer.remarks) != len(more.remarks):
        return None
    phases: dict[str, CountedPhase] = {}
    for name in fewer.phases:
        phase = phase_of_more_blocks(fewer.phases[name], more.phases[name], times)
        if phase is None:
            return None
        phases[name] = phase
    parameters = fewer.parameters + times * (more.parameters - fewer.parameters)
    return replace(more, phases=phases, parameters=parameters)


# -- blocks -----------------------------------------------------------------------------------------------------------


def longest_row(model: nn.Module) -> tuple[str, int] | None:
    """The name of the row of the most blocks that are alike in everything, and how many; None where few are."""
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
    """All that decides what a module does but for its values, to be compared."""
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    plain = {name: _plain_look(value) for name, value in vars(module).items() if name not in _OWN_OF_MODULES}
    tensors = [
        (name, None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad))
        for own in (module._parameters, module._buffers)  # pyright: ignore[reportPrivateUsage]
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
    """Whether the forward pass does the same around each block of a row."""
    try:
        few, more, all_of_them = (_outline(replace(plan, row=(name, n)), axes, rank) for n in (2, 3, blocks))
    except (_UnlikeCallError, ShardingError, RuntimeError, LookupError, TypeError, ValueError, AttributeError):
        return False  # it shall stop, if it does, where all blocks are played
    found = phase_of_more_blocks(few, more, blocks - 2)
    return found is not None and are_same_steps(found, all_of_them)


def _outline(plan: StepPlan, axes: Mapping[str, int], rank: int) -> CountedPhase:
    """What a forward pass does around the blocks of its row, of which the first is run once."""
    meter = StepMeter()
    assert plan.row is not None
    with fake_mesh(axes, rank) as mesh:
        know_neighbours(mesh)
        with FakeTensorMode(allow_non_fake_inputs=True), meter.counting(), torch.no_grad():
            model, dtype = prepared_model(plan, mesh)
            inputs = prepared_inputs(plan, mesh, dtype)
            row: Any = model.get_submodule(plan.row[0])
            calls = _BlockCalls()
            for at, block in enumerate(row):
                block.forward = partial(calls.answer, at, block.forward)
            meter.begin_phase("forward")
            said = model(*inputs)
            meter.begin_phase("after")
            del said
    if calls.next != plan.row[1]:
        raise _UnlikeCallError
    return _in_one_order(meter.counted_phase("forward", []))


def _in_one_order(phase: CountedPhase) -> CountedPhase:
    """Memory that ceases to be alive at one time in the order of sizes: what autocast kept goes in any order."""
    runs = groupby(phase.changes, lambda change: change[1] > 0)
    phase.changes = [each for begins, run in runs for each in (run if begins else sorted(run))]
    return phase


class _BlockCalls:
    """Answers the calls of the blocks of a row as the first one did."""

    def __init__(self) -> None:
        self.next = 0
        self._asked: Any = None
        self._said: Any = None

    def answer(self, at: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """What the block at a place returns, in its order."""
        if at != self.next:
            raise _UnlikeCallError
        self.next += 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        asked = [*map(_argument_look, leaves)], spec
        if self._said is None:
            self._asked, self._said = asked, forward(*args, **kwargs)
        if asked != self._asked:
            raise _UnlikeCallError
        return pytree.tree_map_only(Tensor, _alike, self._said)


def _argument_look(leaf: Any) -> Any:
    if isinstance(leaf, Tile):
        return leaf.layout, leaf.local.stride(), leaf.dtype
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return _plain_look(leaf)


def _alike(x: Tensor) -> Tensor:
    return Tile(torch.empty_like(x.local), x.layout, x.mesh) if isinstance(x, Tile) else torch.empty_like(x)
