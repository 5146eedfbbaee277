"""Strides of the whole tensor that a tile stands for, which say where torch's `reshape` is a view, and where a copy.

A tile's own strides cannot say it: of x [4, 6], cut along its columns at 0, 3, 6, all of ``x[:, :3]`` lies on one rank,
contiguous, and torch copies ``x[:, :3].flatten()`` all the same.  Views keep the strides of the whole beside the tile;
a tile without them is as dense as what a function of torch makes, its dims in the order of its local strides.

>>> from jigsaw.ops.whole_strides import strides_of_view
>>> strides_of_view((4, 3), (6, 1), (2, 2, 3)), strides_of_view((4, 3), (6, 1), (12,))
((12, 6, 1), None)
"""

from __future__ import annotations

from functools import lru_cache

from jigsaw.geometry.layout import Layout
from jigsaw.tile.tile import Tile

_STRIDES = "whole_strides"


def whole_strides(tile: Tile) -> tuple[int, ...]:
    """Return the strides that torch's tensor would have in place of the tile."""
    found = tile.__dict__.get(_STRIDES)
    if found is not None:
        return found
    local = tile.local
    is_plain = local.is_contiguous() or _has_thin_pieces(tile.layout)
    return _dense_strides(tile.layout, None if is_plain else local.stride())


@lru_cache(maxsize=4096)
def _has_thin_pieces(layout: Layout) -> bool:
    """Say whether some rank has fewer than two rows of a dim that has more, so that its strides do not give the order
    of dims.
    """
    return any(c.size > 1 and min(b - a for a, b in c.held) < 2 for c in layout.cuts)


def repeated_dims(tile: Tile) -> tuple[int, ...]:
    """Return the dims along which all rows of torch's tensor lie in one place, as those that `expand` makes longer.

    One row of a cut dim is one of them: the ranks without it have its place, too.
    """
    strides = tile.__dict__.get(_STRIDES)
    if strides is None or all(strides):
        return ()
    layout = tile.layout
    return tuple(d for d, n in enumerate(strides) if n == 0 and (layout.shape[d] > 1 or layout.is_cut(d)))


def with_strides(tile: Tile, strides: tuple[int, ...]) -> Tile:
    """Return the tile, a view that was just made, with the strides of torch's."""
    tile.__dict__[_STRIDES] = strides
    return tile


def with_dense_strides(tile: Tile) -> Tile:
    """Return the tile, just made, whose rows lie in another order than those of torch's result, which is contiguous."""
    return with_strides(tile, _dense_strides(tile.layout, None))


@lru_cache(maxsize=4096)
def _dense_strides(layout: Layout, strides: tuple[int, ...] | None) -> tuple[int, ...]:
    shape = layout.shape
    order = range(len(shape)) if strides is None else sorted(range(len(shape)), key=lambda d: -strides[d])
    found, step = [0] * len(shape), 1
    for d in reversed(order):
        found[d] = step
        step *= max(shape[d], 1)
    return tuple(found)


def is_whole_contiguous(tile: Tile) -> bool:
    """Say whether torch's tensor is contiguous."""
    return _is_contiguous(tile.layout.shape, whole_strides(tile))


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
    """Return the strides of a tensor viewed in the shape `to`, which has equally many elements; None where that takes a
    copy.
    """
    # the dims that lie one after the other in memory are one block; [4, 3] with strides (6, 1) are two
    blocks: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if blocks and blocks[-1][1] == n * stride:
            blocks[-1] = blocks[-1][0] * n, stride
        else:
            blocks.append((n, stride))
    found, size, step = [0] * len(to), 1, 1
    for d in reversed(range(len(to))):
        if to[d] != 1 and size == 1:
            size, step = blocks.pop()
        if size % to[d]:
            return None
        found[d] = step
        size, step = size // to[d], step * to[d]
    return tuple(found)
