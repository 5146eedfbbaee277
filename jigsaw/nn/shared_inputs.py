"""Results that layers of one input share: the entry of a tile into parts, and the gather of its tokens.

A block of attention multiplies x by three weights that are cut by rows.  Each rank uses x for its own part of q, k and
v, so the gradient of x is a sum over the ranks. Three products that enter x one by one send three sums; with one entry
autograd adds the three gradients on each rank, and one sum travels, as in Shoeybi et al., "Megatron-LM", arXiv
1909.08053.

Only the last tile is remembered, until the forward pass of the model ends.  What is remembered follows from the
program alone: the same Tile object, in the same mode, with no change in place of any tile in between.  So ranks agree
on what they send.  A checkpointed call remembers its own, in each of its runs: the second one does what the first did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.comm.checkpoint_runs import memory_of_run
from jigsaw.ops.apart_copies import count_of_changes
from jigsaw.ranks.model_world import is_in_forward_pass
from jigsaw.tile.tile import Tile

R = TypeVar("R")


class _LastInput:
    """The tile that a layer took last, and the results computed from it."""

    def __init__(self) -> None:
        self.tile: Tile | None = None
        self.changes = 0
        self.made: dict[object, object] = {}


class _InputOfThread(threading.local):
    def __init__(self) -> None:
        self.last = _LastInput()


_of_thread = _InputOfThread()


def _last_input() -> _LastInput | None:
    memory = memory_of_run()
    if memory is not None:
        return memory.setdefault(_LastInput, _LastInput())
    return _of_thread.last if is_in_forward_pass() else None


def shared_result(tile: Tile, key: object, make: Callable[[], R]) -> R:
    """Return ``make()``, or what it returned for the same tile and key in this forward pass of a model."""
    last = _last_input()
    if last is None:
        return make()
    kind = tile.local.device.type
    mode = torch.is_grad_enabled(), torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    if last.tile is not tile or last.changes != count_of_changes():
        last.tile, last.changes = tile, count_of_changes()
        last.made = {}
    if (key, mode) not in last.made:
        last.made[key, mode] = make()
    return last.made[key, mode]  # pyright: ignore[reportReturnType]  (of the same key, so of the same type)


def shared_results() -> Collection[object]:
    """Return what was made of the tile that a layer took last."""
    last = _last_input()
    return () if last is None else last.made.values()


def forget_last_input() -> None:
    """Forget the last tile once the forward pass has ended."""
    _of_thread.last = _LastInput()


def enter_in_parts(tile: Tile, axes: Sequence[str]) -> Tensor:
    """Return the rows of a tile that is the same along `axes`, for use in every rank's own part of the work.

    *Sends*: forward nothing; backward one all-reduce of the gradient, shared by the layers that take the tile.
    """
    return shared_result(tile, ("parts", *axes), lambda: comm.use_in_parts(tile.local, tile.mesh, axes))
