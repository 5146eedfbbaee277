"""Extreme values and their places: max, min, argmax, argmin, aminmax.

>>> tile = jigsaw.shard(torch.tensor([3.0, 7.0, 7.0]), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.argmax().item(), tile.max(0).indices.item()
(1, 1)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.layout import Layout
from jigsaw.ops.along import run_along_dim
from jigsaw.ops.cumulative import pieces_in_stack
from jigsaw.ops.reductions import (
    extreme_of_all,
    finish_reduction,
    reduced_dims,
    stack_along_axes,
)
from jigsaw.ops.whole_dims import check_by_torch, rows_of_local
from jigsaw.tile.tile import Tile, implements_torch, leave_tile


def _along_cut_dim(function: Any, input: Tile, dim: int, keepdim: bool) -> tuple[Any, Any] | None:
    """Return values and places along a cut dim: of equal values the first, of NaN the first.  None where a rank can
    answer by itself, or the dim was flattened.

    *Sends*: two all-gathers of the ranks' values and places; backward nothing.
    """
    if not input.ndim or not input.layout.is_cut(dim) or len(input.layout.dim(dim)) > 1:
        return None
    check_by_torch(function, input, dim, dim)
    own = input.owned()
    (cut,) = own.layout.dim(dim)
    axes = own.layout.dim_axes(dim)
    if own.local.shape[dim]:
        value, place = function(own.local, dim)
    else:  # this value is left out below, but keeps the rank in the backward pass
        value = own.local.sum(dim).to(own.dtype)
        place = torch.zeros_like(value, dtype=torch.int64)
    place = place + cut.owned(own.layout.piece(cut, own.coordinate))[0]
    pieces = pieces_in_stack(own.layout, cut)
    # in the order of the dim, so that of equal values the first wins; pieces without rows are left out
    order = [pieces.index(p) for p in range(cut.pieces) if cut.points[p] < cut.points[p + 1]]
    values, places = stack_along_axes(value, own, axes, (own.layout, dim)), stack_along_axes(place, own, axes)
    values, places = (torch.stack([y[i] for i in order]) for y in (values, places))
    best, which = function(values, 0)
    where = places.gather(0, which.unsqueeze(0)).squeeze(0)
    if keepdim:
        best, where = best.unsqueeze(dim), where.unsqueeze(dim)
    return finish_reduction(best, own, (dim,), keepdim), finish_reduction(where, own, (dim,), keepdim)


def _answer_max_or_min(function: Any, whole_tensor: Callable[[Tile], Any]) -> None:
    elementwise = getattr(torch, f"{function.__name__}imum")

    def answer(input: Any, *args: Any, **kwargs: Any) -> Any:
        is_pair = bool(args) and isinstance(args[0], (Tile, Tensor))
        if not isinstance(input, Tile) or "other" in kwargs or is_pair:
            return elementwise(input, *args, **kwargs)
        if not args and not kwargs:
            return whole_tensor(input)
        if not args and "dim" not in kwargs:
            raise TypeError(f"{function.__name__}() of a Tile got {sorted(kwargs)} without dim=: name the dim")
        dim: Any = kwargs["dim"] if "dim" in kwargs else args[0]
        (at,) = reduced_dims(input, dim)
        keepdim = bool(kwargs.get("keepdim", args[1] if len(args) > 1 else False))
        pair = _along_cut_dim(function, input, at, keepdim)
        if pair is None:
            return run_along_dim(function, input, dim, *args, **kwargs)
        return getattr(torch.return_types, function.__name__)(list(pair))

    implements_torch(function, either=("input",))(answer)


_answer_max_or_min(torch.max, partial(extreme_of_all, op="max"))
_answer_max_or_min(torch.min, partial(extreme_of_all, op="min"))


def _answer_place(function: Any, with_values: Any) -> None:
    """Answer `torch.argmax` by torch.max, torch.argmin by torch.min."""

    def handler(input: Tile, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the row of the first largest (smallest) element along `dim`, or its place in the flattened tensor.

        *Sends*: two all-gathers of the ranks' values and places.
        """
        input = input.detach()
        if dim is None:
            return _place_in_all(function, input, keepdim)
        (at,) = reduced_dims(input, dim)
        pair = _along_cut_dim(with_values, input, at, keepdim)
        return run_along_dim(function, input, at, at, keepdim) if pair is None else pair[1]

    implements_torch(function)(handler)


_answer_place(torch.argmax, torch.max)
_answer_place(torch.argmin, torch.min)


def _place_in_all(function: Any, input: Tile, keepdim: bool) -> Any:
    own = input.owned()
    axes = own.layout.cut_axes
    check_by_torch(function, own, -1)
    if not input.numel():
        raise IndexError(
            f"{function.__name__}(): a Tile of shape {tuple(input.shape)} has no elements; give a dim that has some"
        )
    local = own.local.flatten()
    if local.numel():
        # a rank's rows have the order of the whole tensor, so its first hit is its earliest one in the whole
        at = torch.unravel_index(function(local), own.local.shape)
        value, place = own.local[at].reshape(()), torch.zeros((), dtype=torch.int64, device=local.device)
        for d, row in enumerate(at):
            place = place * input.shape[d] + rows_of_local(own.layout, own.coordinate, d, local.device)[row]
    else:
        value = local.new_zeros(())
        place = torch.full((), input.numel(), dtype=torch.int64, device=local.device)
    values = stack_along_axes(value, own, axes, (own.layout,))
    places = stack_along_axes(place, own, axes)
    order = places.argsort()
    order = order[places[order] < input.numel()]
    first_place = places[order[function(values[order])]]
    if not keepdim:
        return leave_tile(first_place, own.mesh)
    ones = Layout.of((1,) * input.ndim, (None,) * input.ndim, own.layout.axes)
    return Tile(first_place.reshape((1,) * input.ndim), ones, own.mesh)


@implements_torch(torch.aminmax)
def _aminmax(input: Tile, *, dim: int | None = None, keepdim: bool = False) -> Any:
    return torch.return_types.aminmax((input.amin(dim, keepdim), input.amax(dim, keepdim)))
