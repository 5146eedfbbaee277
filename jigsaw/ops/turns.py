"""Turns: flip, fliplr, flipud, rot90, roll.  The rows of the other end come from the rank that has them.

>>> tile = jigsaw.shard(torch.arange(3.0), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.flip(0).local
tensor([2., 1., 0.])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jigsaw.comm.exchange import exchange_rows
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.whole_dims import run_with_whole_dim
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory


@implements_torch(torch.flip)
def _flip(input: Tile, dims: Any, *more: int) -> Tile:
    """Return y[i] = x[n - 1 - i] along each of `dims`; the result is cut as the input.

    *Sends*: the rows of cut dims that change owner (all but those in the middle); backward the same, reversed.
    """
    named = (*_numbers_in(dims), *more)
    flipped = reduced_dims(input, named) if named else ()
    if not input.ndim:
        return input.clone()
    own = input if not any(c.has_halo for d in flipped for c in input.layout.dim(d)) else input.owned()
    target = own.layout
    for d in flipped:
        # the mirror image of each piece; a flattened dim reversed is each of its parts reversed
        mirrored = [c.holding([(c.size - b, c.size - a) for a, b in c.held]) if c.is_cut else c for c in target.dim(d)]
        target = target.replace_dim(d, *mirrored)
    local = exchange_rows(own.local, own.layout, target, own.mesh)
    return Tile(torch.flip(local, flipped), own.layout, own.mesh)


def _numbers_in(value: int | Sequence[int]) -> Sequence[int]:
    return (value,) if isinstance(value, int) else tuple(value)


@implements_torch(torch.fliplr)
def _flip_left_right(input: Tile) -> Tile:
    if input.ndim < 2:
        raise RuntimeError(f"fliplr of a Tile of {input.ndim} dims: it needs 2 or more")
    return _flip(input, (1,))


@implements_torch(torch.flipud)
def _flip_up_down(input: Tile) -> Tile:
    return _flip(input, (0,))


@implements_torch(torch.rot90)
def _rotate_by_quarters(input: Tile, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Do a flip and a transposition, as torch does; the cuts follow the dims."""
    if len(dims) != 2:
        raise RuntimeError(f"rot90 of a Tile: dims={tuple(dims)} must be two dims, the plane that is turned")
    first, second = reduced_dims(input, dims)
    if k % 4 == 0:
        return input.clone()
    if k % 4 == 2:
        return _flip(input, (first, second))
    return _flip(input, (second if k % 4 == 1 else first,)).transpose(first, second)


# -- roll -------------------------------------------------------------------------------------------------------------


@implements_torch(torch.roll)
def _roll(input: Tile, shifts: Any, dims: Any = None) -> Any:
    """Return y[i] = x[i - shift] around each dim.

    *Sends*: the rows that change owner; backward the same, reversed.  Dims that were flattened together are brought
    whole and taken back (`jigsaw.ops.whole_dims`).
    """
    if dims is None or dims == ():
        flat = input.reshape((input.numel(),))
        return _roll(flat, shifts, 0).reshape(tuple(input.shape))
    own = input.owned()
    named = [reduced_dims(own, d)[0] for d in _numbers_in(dims)]
    turns = list(zip(_numbers_in(shifts), named, strict=True))
    target = own.layout
    for shift, at in turns:
        if len(own.layout.dim(at)) == 1:
            (cut,) = target.dim(at)
            target = target.replace_dim(at, cut.holding([(a - shift, b - shift) for a, b in cut.held]))
    rolled = Tile(in_own_memory(exchange_rows(own.local, own.layout, target, own.mesh), input), own.layout, own.mesh)
    for shift, at in turns:
        if len(own.layout.dim(at)) > 1:
            rolled = run_with_whole_dim(torch.roll, rolled, at, shift, at)
    return rolled
