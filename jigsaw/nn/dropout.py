"""Dropout whose mask is a function of the global position, so that it is the same on every mesh.

`torch.manual_seed` fixes the masks; they are not those of plain torch (`jigsaw.ops.random_numbers`).

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.ones(1000), mesh, ("lat",))
>>> torch.nn.functional.dropout(tile, 0.5).unique().local
tensor([0., 2.])
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jigsaw.ops.random_numbers import global_chances
from jigsaw.tile.tile import Tile, implements_torch


def _answer_dropout(function: Any, space: int | None = None) -> None:
    """Answer a dropout of elements, or of whole channels before `space` dims of space."""

    def dropout(input: Tile, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tile:
        dims = input.ndim if space is None else 2 if input.ndim == space + 2 else 1
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0:
            return input
        # halo rows are hashed by their global place too, so a row that two ranks hold is dropped on both or on neither
        is_kept = global_chances(input, dims, p)
        # False, not 0.0, which is not an integer
        out = Tile((input.local * is_kept).mul_(False if p == 1 else 1 / (1 - p)), input.layout, input.mesh)
        return input.copy_(out) if inplace else out

    implements_torch(function)(dropout)


_answer_dropout(F.dropout)
_answer_dropout(torch.dropout)
_answer_dropout(F.dropout1d, 1)
_answer_dropout(F.dropout2d, 2)
_answer_dropout(F.dropout3d, 3)
