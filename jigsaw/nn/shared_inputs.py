"""Results that layers of one input share: the entry of a tile into parts, and the gather of its tokens.

A block of attention multiplies x by three weights that are cut by rows.  Each rank uses x for its own part of q, k and
v, so the gradient of x is a sum over the ranks. Three products that enter x one by one send three sums; with one entry
autograd adds the three gradients on each rank, and one sum travels, as in Shoeybi et al., "Megatron-LM", arXiv
1909.08053.

Only the last tile is remembered, until the forward pass of the model ends.  What is remembered follows from the
program alone: the same Tile object, in the same mode, with no change in place of any tile in between.  So ranks agree
on what they send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.ops.apart_copies import count_of_changes
from jigsaw.ranks.model_world import is_in_forward_pass
from jigsaw.tile.tile import Tile

R = TypeVar("R")


class _LastInput(threading.local):
    """The tile that a layer of this thread took last, and what was made of it."""

    tile: Tile | None = None
    changes = 0

    def __init__(self) -> None:
        self.made: dict[object, object] = {}


_last = _LastInput()


def shared_result(tile: Tile, key: object, make: Callable[[], R]) -> R:
    """Return ``make()``, or what it returned for the same tile and key in this forward pass of a model."""
    if not is_in_forward_pass():
        return make()
    kind = tile.local.device.type
    mode = torch.is_grad_enabled(), torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    if _last.tile is not tile or _last.changes != count_of_changes():
        _last.tile, _last.changes = tile, count_of_changes()
        _last.made = {}
    if (key, mode) not in _last.made:
        _last.made[key, mode] = make()
    return _last.made[key, mode]  # pyright: ignore[reportReturnType]  (of the same key, so of the same type)


def forget_last_input() -> None:
    """Let go of the last tile, once the forward pass has ended."""
    _last.tile = None
    _last.made = {}


def enter_in_parts(tile: Tile, axes: Sequence[str]) -> Tensor:
    """Return the rows of a tile that is the same along `axes`, for use in every rank's own part of the work.

    *Sends*: forward nothing; backward one all-reduce of the gradient, shared by the layers that take the tile.
    """
    return shared_result(tile, ("parts", *axes), lambda: comm.use_in_parts(tile.local, tile.mesh, axes))
