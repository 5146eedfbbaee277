"""Strides of the whole tensor that a tile stands for, which say where torch's `reshape` is a view, and where a copy.

A tile's own strides cannot say it: of x [4, 6], cut along its columns at 0, 3, 6, all of ``x[:, :3]`` lies on one rank,
contiguous, and torch copies ``x[:, :3].flatten()`` all the same.  Views keep the strides of the whole beside the tile;
a tile without them is as dense as what a function of torch makes, its dims in the order of its local strides.

>>> from jigsaw.ops.whole_strides import strides_of_view
>>> strides_of_view((4, 3), (6, 1), (2, 2, 3)), strides_of_view((4, 3), (6, 1), (12,))
((12, 6, 1), None)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jigsaw.comm.graph_calls import lacks_values
from jigsaw.geometry.layout import Layout
from jigsaw.tile.table import table
from jigsaw.tile.tile import WHOLE_STRIDES, Tile


def whole_strides(tile: Tile) -> tuple[int, ...]:
    """Return the strides that torch's tensor would have in place of the tile."""
    found = tile.__dict__.get(WHOLE_STRIDES)
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
    """Return the dims along which all rows of torch's tensor lie in one place, as those that `expand` makes longer."""
    strides = tile.__dict__.get(WHOLE_STRIDES)
    if strides is None or all(strides):
        return ()
    return tuple(d for d, stride in enumerate(strides) if stride == 0 and tile.shape[d] > 1)


def with_strides(tile: Tile, strides: tuple[int, ...]) -> Tile:
    """Return the tile, a view that was just made, with the strides of torch's."""
    tile.__dict__[WHOLE_STRIDES] = strides
    return tile


def with_order(tile: Tile, strides: tuple[int, ...] | None) -> Tile:
    """Return the tile, just made, whose dims lie in memory in the order of those strides: of None contiguous."""
    return with_strides(tile, _dense_strides(tile.layout, strides))


@lru_cache(maxsize=4096)
def _dense_strides(layout: Layout, strides: tuple[int, ...] | None) -> tuple[int, ...]:
    shape = layout.shape
    order = range(len(shape)) if strides is None else sorted(range(len(shape)), key=lambda d: -strides[d])
    found, step = [0] * len(shape), 1
    for d in reversed(order):
        found[d] = step
        step *= max(shape[d], 1)
    return tuple(found)


# -- what a function makes of a view ----------------------------------------------------------------------------------


class _StandIn(NamedTuple):
    """A tensor by its shape and strides, for a key of a cache."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Parts(NamedTuple):
    """A list, tuple, dict or slice among arguments, for a key of a cache."""

    kind: type
    values: tuple[Any, ...]


def note_order(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Give results of tiles that are not contiguous the order of dims in which torch makes them.  The local strides
    do not tell it where rows have moved, or pieces are thin.
    """
    given = (*args, *kwargs.values())
    results = list(enumerate(out)) if isinstance(out, (list, tuple)) else [(0, out)]
    results = [(at, t) for at, t in results if type(t) is Tile and WHOLE_STRIDES not in t.__dict__]
    if not results or lacks_values() or all(is_whole_contiguous(x) for x in given if type(x) is Tile):
        return
    for at, tile in results:
        if all(tile is not x for x in given):
            with_order_of(tile, function, args, kwargs, at)


def with_order_of(
    tile: Tile, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, at: int = 0
) -> Tile:
    """Return the tile, result number `at` of a function that was just made, with torch's order of dims."""
    key = function, _as_cache_key(tuple(args)), _as_cache_key(dict(kwargs or {}))
    try:
        strides = _strides_of_results(*key)
    except TypeError:  # an argument has no hash
        strides = _strides_of_results.__wrapped__(*key)
    found = strides.get((at, tuple(tile.shape))) if strides else None
    return with_order(tile, found)


def _as_cache_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _StandIn(
            tuple(value.shape), whole_strides(value) if isinstance(value, Tile) else value.stride(), value.dtype
        )
    if type(value) in (list, tuple):
        return _Parts(type(value), tuple(map(_as_cache_key, value)))
    if type(value) is dict:
        return _Parts(dict, tuple((k, _as_cache_key(v)) for k, v in value.items()))
    return _Parts(slice, (value.start, value.stop, value.step)) if type(value) is slice else value


def _on_no_memory(value: Any) -> Any:
    if isinstance(value, _StandIn):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="meta")
    if not isinstance(value, _Parts):
        return value
    if value.kind is dict:
        return {k: _on_no_memory(v) for k, v in value.values}
    return slice(*value.values) if value.kind is slice else value.kind(map(_on_no_memory, value.values))


@lru_cache(maxsize=4096)
def _strides_of_results(function: Any, args: _Parts, kwargs: _Parts) -> dict[tuple[int, tuple[int, ...]], Any]:
    """Return the strides of torch's results, by their number and shape: of tensors without values."""
    try:
        with torch.no_grad():
            call = function if callable(function) else function.__get__  # of an attribute, as x.real
            found = call(*_on_no_memory(args), **_on_no_memory(kwargs))
    except Exception:  # whatever a function says that needs values
        return {}
    several = found if isinstance(found, (list, tuple)) else [found]
    return {(at, tuple(t.shape)): t.stride() for at, t in enumerate(several) if isinstance(t, Tensor)}


table.note_order = note_order


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
