"""Strides of the whole tensor that a tile stands for, which say where torch's `reshape` is a view, and where a copy.

A tile's own strides cannot say it.  Take x [4, 6], cut along its columns at 0, 3, 6: all of ``x[:, :3]`` lies on one
rank, contiguous.  Torch copies ``x[:, :3].flatten()`` all the same.  Views keep the strides of the whole beside the
tile; a tile without them is as dense as what a function of torch makes, its dims in the order of its local strides.

>>> from jigsaw.ops.whole_strides import strides_of_view
>>> strides_of_view((4, 3), (6, 1), (2, 2, 3)), strides_of_view((4, 3), (6, 1), (12,))
((12, 6, 1), None)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw.comm.graph_calls import lacks_values
from jigsaw.geometry.layout import Layout
from jigsaw.tile.tile import Tile

WHOLE_STRIDES = "whole_strides"
_REORDERED = "reordered"  # attribute of tiles whose rows are ordered in memory otherwise than torch's tensor
_Operand = tuple[tuple[int, ...], tuple[int, ...]]


def whole_strides(tile: Tile) -> tuple[int, ...]:
    """Return the strides that torch's tensor would have in place of the tile."""
    strides = tile.__dict__.get(WHOLE_STRIDES)
    if strides is not None:
        return strides
    local = tile.local
    is_plain = local.is_contiguous() or _has_thin_pieces(tile.layout)
    return _dense_strides(tile.layout, None if is_plain else local.stride())


@lru_cache(maxsize=4096)
def _has_thin_pieces(layout: Layout) -> bool:
    """Say whether a rank has fewer than two rows of a longer dim, so that its strides do not tell the order."""
    return any(c.size > 1 and min(b - a for a, b in c.held) < 2 for c in layout.cuts)


def repeated_dims(tile: Tile) -> tuple[int, ...]:
    """Return the dims along which all rows of torch's tensor lie in one place, as those that `expand` makes longer.

    One row of a cut dim is one of them: the ranks without it have its place, too.
    """
    strides = tile.__dict__.get(WHOLE_STRIDES)
    if strides is None or all(strides):
        return ()
    layout = tile.layout
    return tuple(d for d, n in enumerate(strides) if n == 0 and (layout.shape[d] > 1 or layout.is_cut(d)))


def with_strides(tile: Tile, strides: tuple[int, ...], source: Any) -> Tile:
    """Return the tile, a view of `source` that was just made, with the strides of torch's."""
    state = tile.__dict__
    state[WHOLE_STRIDES] = strides
    if _REORDERED in source.__dict__:
        state[_REORDERED] = True
    return tile


def has_strides(tile: Tile) -> bool:
    """Say whether the strides of torch's tensor were kept beside the tile, as those of a view."""
    return WHOLE_STRIDES in tile.__dict__


def with_order(tile: Tile, strides: tuple[int, ...] | None) -> Tile:
    """Return the tile, just made, whose rows lie in another order than those of torch's result.

    These are dense, and lie in the order of `strides`, or contiguous for None.
    """
    tile.__dict__[_REORDERED] = True
    return with_strides(tile, _dense_strides(tile.layout, strides), tile)


def with_strides_of(tile: Tile, source: Tile) -> Tile:
    """Return the tile, just made, with the strides of `source`, as torch's functions that end in `_scatter` keep them.

    Where elements of the source lie in one place, as those of windows do, the result is dense.
    """
    shape, strides = source.layout.shape, whole_strides(source)
    if repeated_dims(source) or _lie_in_one_place(shape, strides):
        return with_order(tile, order_of_results(shape, ((shape, strides),)))
    tile.__dict__[_REORDERED] = True
    return with_strides(tile, strides, source)


@lru_cache(maxsize=4096)
def _lie_in_one_place(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Say whether elements may share a place: those of an inner dim reach beyond one step of an outer one."""
    reach = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1 and stride < reach:
            return True
        reach += max(n - 1, 0) * stride
    return False


# -- pointwise results ------------------------------------------------------------------------------------------------


def with_order_of_operands(out: Any, operands: Sequence[Any]) -> Any:
    """Return results of a pointwise function with torch's order of dims, where that of this rank's rows does not tell:
    pieces are thin, or the rows of an operand lie in another order.
    """
    apart = next((x for x in operands if type(x) is Tile and _REORDERED in x.__dict__), None)
    for tile in out if isinstance(out, (list, tuple)) else (out,):
        if type(tile) is not Tile or has_strides(tile) or not (apart is not None or _has_thin_pieces(tile.layout)):
            continue
        shapes = [_shape_and_strides(x) for x in operands if isinstance(x, Tensor) and x.ndim <= tile.ndim]
        order = order_of_results(tile.layout.shape, tuple(x for x in shapes if x is not None))
        with_strides(tile, _dense_strides(tile.layout, order), tile if apart is None else apart)
    return out


def _shape_and_strides(x: Tensor) -> _Operand | None:
    if isinstance(x, Tile):
        return x.layout.shape, whole_strides(x)
    # in a graph plain sizes may be symbols; they matter only where tiles do not decide the order
    return None if lacks_values() else (tuple(x.shape), x.stride())


@lru_cache(maxsize=4096)
def order_of_results(shape: tuple[int, ...], operands: tuple[_Operand, ...]) -> tuple[int, ...]:
    """Return strides in the order of those that torch gives to what it makes of these operands, one element at a time:
    its dims are sorted by the strides of the first operand that tells two of them apart.

    >>> from jigsaw.ops.whole_strides import order_of_results
    >>> order_of_results((4, 6), (((4, 6), (1, 4)), ((6,), (1,))))
    (0, 1)
    """
    ndim = len(shape)
    aligned = [
        (
            *[0] * (ndim - len(sizes)),
            *[0 if n < m else step for n, m, step in zip(sizes, shape[ndim - len(sizes) :], strides, strict=True)],
        )
        for sizes, strides in operands
    ]

    def is_inner(dim: int, other: int) -> bool | None:
        """Say whether `dim` belongs inside of `other`; None where no operand tells."""
        for strides in aligned:
            a, b = strides[dim], strides[other]
            if a and b and (a != b or shape[other] > shape[dim]):
                return a < b or (a == b)
        return None

    order: list[int] = []  # dims, from the innermost on
    for dim in reversed(range(ndim)):
        order.append(dim)
        at = len(order) - 1
        for before in reversed(range(at)):
            answer = is_inner(dim, order[before])
            if answer:
                order[at], order[before], at = order[before], order[at], before
            elif answer is False:
                break
    return tuple(order.index(d) for d in range(ndim))


@lru_cache(maxsize=4096)
def _dense_strides(layout: Layout, strides: tuple[int, ...] | None) -> tuple[int, ...]:
    shape = layout.shape
    order = range(len(shape)) if strides is None else sorted(range(len(shape)), key=lambda d: -strides[d])
    dense, step = [0] * len(shape), 1
    for d in reversed(order):
        dense[d] = step
        step *= max(shape[d], 1)
    return tuple(dense)


_CHANNELS_LAST = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}


def is_whole_contiguous(tile: Tile, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Say whether torch's tensor is contiguous in that format."""
    order = _CHANNELS_LAST.get(memory_format, range(tile.ndim))
    shape, strides = tile.layout.shape, whole_strides(tile)
    if len(order) != len(shape):
        return False
    return _is_contiguous(tuple([shape[d] for d in order]), tuple([strides[d] for d in order]))


def suggested_format(tile: Tile) -> torch.memory_format:
    """Return the memory format that torch sees in its tensor, which may be a slice of one in that format."""
    shape, strides = tile.layout.shape, whole_strides(tile)
    for memory_format, order in _CHANNELS_LAST.items():
        steps = [strides[d] for d in order if shape[d] != 1] if tile.ndim == len(order) else [0, 1]
        if steps == sorted(steps, reverse=True) and not _is_contiguous(shape, strides):
            return memory_format
    return torch.contiguous_format


def with_channels_last(tile: Tile, memory_format: torch.memory_format) -> Tile:
    """Return the tile, just made in a format whose channels come last, with its order where pieces are thin."""
    if not _has_thin_pieces(tile.layout):
        return tile
    order = _CHANNELS_LAST[memory_format]
    return with_strides(tile, _dense_strides(tile.layout, tuple([-order.index(d) for d in range(tile.ndim)])), tile)


@lru_cache(maxsize=4096)
def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


@lru_cache(maxsize=4096)
def strides_of_view(shape: tuple[int, ...], strides: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a tensor viewed in the shape `to`, of as many elements; None where that is a copy."""
    # the dims that lie one after the other in memory are one block; [4, 3] with strides (6, 1) are two
    blocks: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if blocks and blocks[-1][1] == n * stride:
            blocks[-1] = blocks[-1][0] * n, stride
        else:
            blocks.append((n, stride))
    new_strides, size, step = [0] * len(to), 1, 1
    for d in reversed(range(len(to))):
        if to[d] != 1 and size == 1:
            size, step = blocks.pop()
        if size % to[d]:
            return None
        new_strides[d] = step
        size, step = size // to[d], step * to[d]
    return tuple(new_strides)
