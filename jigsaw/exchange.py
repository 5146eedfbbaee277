"""Transfers carried out: halos, redistribution and roll are one call, `exchange_rows`, with one planner
(jigsaw.transfers).

The adjoint of a move is the reversed move with additions (Hewett and Grady, "A linear algebraic approach to model
parallelism in deep learning", arXiv 2006.03108).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.layout import Box, Layout, ShardingError
from jigsaw.mesh import axes_of_mesh, mesh_coordinate
from jigsaw.transfers import BoxesByPeer, ExchangePlan, box_shape, plan_exchange

CutMargins = tuple[tuple[int, int], ...]


def _box_view(x: Tensor, box: Box, margins: CutMargins | None = None) -> Tensor:
    shift = [low for low, _ in margins] if margins else [0] * len(box)
    return x[tuple(slice(start + s, stop + s) for (start, stop), s in zip(box, shift, strict=True))]


def _pack_boxes(x: Tensor, boxes: Sequence[Box], margins: CutMargins | None = None) -> Tensor:
    parts = [_box_view(x, box, margins).reshape(-1) for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpack_boxes(flat: Tensor, x: Tensor, boxes: Sequence[Box], add: bool, margins: CutMargins | None = None) -> None:
    start = 0
    for box in boxes:
        part = _box_view(x, box, margins)
        values = flat[start : start + part.numel()].view(part.shape)
        part.add_(values) if add else part.copy_(values)
        start += part.numel()


def _receive_buffers(like: Tensor, boxes_by_peer: BoxesByPeer) -> list[tuple[int, Tensor]]:
    def size(boxes: tuple[Box, ...]) -> int:
        return sum(torch.Size(box_shape(b)).numel() for b in boxes)

    return [(peer, like.new_empty(size(boxes))) for peer, boxes in boxes_by_peer]


def _exchange_forward(
    x: Tensor, plan: ExchangePlan, mesh: DeviceMesh, margins: CutMargins | None, fill: float
) -> Tensor:
    if plan.is_slice and margins is None:
        return _box_view(x, plan.kept[0].taken)
    received = _receive_buffers(x, plan.receives)
    pending = comm.swap_messages(
        mesh, [(peer, _pack_boxes(x, boxes)) for peer, boxes in plan.sends], received, "exchange"
    )
    grown = margins or ((0, 0),) * len(plan.target_shape)
    shape = [n + low + high for n, (low, high) in zip(plan.target_shape, grown, strict=True)]
    out = x.new_empty(shape) if margins is None else x.new_full(shape, fill)
    for move in plan.kept:
        _box_view(out, move.placed, margins).copy_(_box_view(x, move.taken))
    pending.wait()
    for (_, flat), (_, boxes) in zip(received, plan.receives, strict=True):
        _unpack_boxes(flat, out, boxes, add=False, margins=margins)
    return out


def _exchange_backward(grad: Tensor, plan: ExchangePlan, mesh: DeviceMesh, margins: CutMargins | None) -> Tensor:
    received = _receive_buffers(grad, plan.sends)
    pending = comm.swap_messages(
        mesh, [(peer, _pack_boxes(grad, boxes, margins)) for peer, boxes in plan.receives], received, "exchange"
    )
    if plan.keeps_all:
        kept = _box_view(grad, plan.kept[0].placed, margins)
        out = kept if plan.is_local else kept.clone(memory_format=torch.contiguous_format)
    else:
        out = grad.new_zeros(plan.source_shape)
        for move in plan.kept:
            _box_view(out, move.taken).add_(_box_view(grad, move.placed, margins))
    pending.wait()
    for (_, flat), (_, boxes) in zip(received, plan.sends, strict=True):
        _unpack_boxes(flat, out, boxes, add=True)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: ExchangePlan, mesh: DeviceMesh, margins: CutMargins | None, fill: float
    ) -> Tensor:
        ctx.how = plan, mesh, margins
        return _exchange_forward(x, plan, mesh, margins, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _ExchangeAdjoint.apply(grads[0], *ctx.how), None, None, None, None


class _ExchangeAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, plan: ExchangePlan, mesh: DeviceMesh, margins: CutMargins | None) -> Tensor:
        ctx.how = plan, mesh, margins
        return _exchange_backward(grad, plan, mesh, margins)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], *ctx.how, 0.0), None, None, None


def _checked_plan(local: Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> ExchangePlan:
    """The plan, once everything fits.  What all ranks know alike is checked first, then this rank's tensor."""
    if source.axes != axes_of_mesh(mesh):
        raise ShardingError(
            f"{source} is cut over mesh {dict(source.axes)}, but the mesh is {dict(axes_of_mesh(mesh))}"
        )
    if source.groups != target.groups:
        raise ShardingError(f"{source} and {target}: their dims are flattened differently; unflatten first")
    here = mesh_coordinate(mesh)
    todo = plan_exchange(source, target, here)
    comm.connect_ranks(mesh)
    if tuple(local.shape) != todo.source_tile:
        raise ShardingError(
            f"the rank at {here} has a local tensor of shape {tuple(local.shape)}, "
            f"but {source} gives it {todo.source_tile}"
        )
    return todo


def exchange_rows(
    local: Tensor,
    source: Layout,
    target: Layout,
    mesh: DeviceMesh,
    margins: CutMargins | None = None,
    fill: float = 0.0,
) -> Tensor:
    """Each rank gives its source box and gets its target box; rows that several ranks need are sent to each of them.

    `margins` adds rows of `fill` around this rank's target box (a cut each: below, above), so that a padded stencil
    input is assembled in one copy.  The layouts must be cut by the same axes (else use `redistribute_rows`).  Where
    nothing has to move, the result is `local` itself or a view of it.

    *Shapes*: global source.shape = target.shape; per rank ``source.held`` -> ``target.held`` plus margins.
    *Sends*: forward the rows that others need and this rank owns, one message a pair of ranks; backward the reverse.
    *Raises*: `ShardingError` for layouts of different shapes, meshes or cut axes, or that do not fit `mesh` or `local`.
    """
    if set(source.cut_axes) != set(target.cut_axes):
        raise ShardingError(f"exchange from {source} to {target} would change what is replicated; use redistribute")
    todo = _checked_plan(local, source, target, mesh)
    margins = _checked_margins(margins, source, fill, local.dtype)
    if margins is None and todo.is_slice and todo.keeps_all:
        return local
    cells = local.reshape(todo.source_shape)
    if margins is None and todo.is_slice:
        out = _box_view(cells, todo.kept[0].taken)
    else:
        out = cast(Tensor, _Exchange.apply(cells, todo, mesh, margins, fill))
    return out if out.ndim == source.ndim else out.reshape(_flattened_sizes(out.shape, source.groups))


def _checked_margins(margins: CutMargins | None, source: Layout, fill: float, dtype: torch.dtype) -> CutMargins | None:
    """The margins, or None where there are none; a fill that ranks at the border would refuse is refused by all."""
    if margins is None:
        return None
    if not math.isfinite(fill) and not (dtype.is_floating_point or dtype.is_complex):
        raise ShardingError(f"fill={fill} does not exist in {dtype}; cast the tile to a floating dtype first")
    if len(margins) != len(source.cuts) or any(min(pair) < 0 for pair in margins):
        raise ShardingError(f"margins {margins} must be two row counts >= 0 for each of the {len(source.cuts)} cuts")
    return margins if any(low or high for low, high in margins) else None


def _flattened_sizes(sizes: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The sizes of the tensor dims, from those of the cuts."""
    ends = list(accumulate(groups, initial=0))
    return [math.prod(sizes[first:end]) for first, end in pairwise(ends)]


class AsyncExchange:
    """Several boxes fetched at once, under way until `wait()`; not differentiable (`give_back` is the adjoint)."""

    def __init__(self, x: Tensor, source: Layout, targets: Sequence[Layout], mesh: DeviceMesh) -> None:
        self._todo = [_checked_plan(x, source, target, mesh) for target in targets]
        self._x = x
        self._received = [_receive_buffers(x, todo.receives) for todo in self._todo]
        cells = [x.reshape(todo.source_shape) for todo in self._todo]
        self._pending = [
            comm.swap_messages(
                mesh, [(peer, _pack_boxes(cell, boxes)) for peer, boxes in todo.sends], received, "exchange"
            )
            for cell, todo, received in zip(cells, self._todo, self._received, strict=True)
        ]

    def wait(self) -> list[Tensor]:
        """The boxes, in the order of the targets."""
        found: list[Tensor] = []
        for todo, received, pending in zip(self._todo, self._received, self._pending, strict=True):
            out = self._x.new_empty(todo.target_shape)
            for move in todo.kept:
                _box_view(out, move.placed).copy_(_box_view(self._x.reshape(todo.source_shape), move.taken))
            pending.wait()
            for (_, flat), (_, boxes) in zip(received, todo.receives, strict=True):
                _unpack_boxes(flat, out, boxes, add=False)
            found.append(out.reshape(todo.target_tile))
        return found


class AsyncExchangeAdjoint:
    """The adjoint of `AsyncExchange`: gradients of the boxes go back to their owners; `wait(into)` adds what
    arrives.
    """

    def __init__(self, grads: Sequence[Tensor], source: Layout, targets: Sequence[Layout], mesh: DeviceMesh) -> None:
        here = mesh_coordinate(mesh)
        self._todo = [plan_exchange(source, target, here) for target in targets]
        self._grads = [grad.reshape(todo.target_shape) for grad, todo in zip(grads, self._todo, strict=True)]
        self._received = [
            _receive_buffers(grad, todo.sends) for grad, todo in zip(self._grads, self._todo, strict=True)
        ]
        self._pending = [
            comm.swap_messages(
                mesh, [(peer, _pack_boxes(grad, boxes)) for peer, boxes in todo.receives], received, "exchange"
            )
            for grad, todo, received in zip(self._grads, self._todo, self._received, strict=True)
        ]

    def wait(self, into: Tensor) -> None:
        """Add everything to `into`, the gradient of the local source tensor."""
        for todo, grad, received, pending in zip(self._todo, self._grads, self._received, self._pending, strict=True):
            cells = into.view(todo.source_shape)
            for move in todo.kept:
                _box_view(cells, move.taken).add_(_box_view(grad, move.placed))
            pending.wait()
            for (_, flat), (_, boxes) in zip(received, todo.sends, strict=True):
                _unpack_boxes(flat, cells, boxes, add=True)


class _Redistribute(torch.autograd.Function):
    """The identity between two partitions.

    A value held alike has its whole gradient everywhere, so the way back is the same map.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> Tensor:
        ctx.how = target, source, mesh
        todo = plan_exchange(source, target, mesh_coordinate(mesh))
        out = _exchange_forward(x, todo, mesh, None, 0.0)
        # a piece of a whole tensor must not keep the whole alive
        return out.clone(memory_format=torch.contiguous_format) if todo.is_slice and not todo.keeps_all else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Redistribute.apply(grads[0], *ctx.how), None, None, None


def redistribute_rows(local: Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> Tensor:
    """From any layout of an array to any other: other cut points, dims or axes, gathered or cut, with or without halo.

    *Shapes*: global unchanged; per rank ``source.held`` -> ``target.held``.
    *Sends*: forward the rows that others need and this rank owns; backward likewise from target to source.
    *Raises*: `ShardingError` for layouts of different shapes or meshes, or that do not fit `mesh` or `local`.
    """
    if set(source.cut_axes) == set(target.cut_axes):
        return exchange_rows(local, source, target, mesh)
    bare_source, bare_target = source.without_halo(), target.without_halo()
    _checked_plan(local, source, target, mesh)
    owned = exchange_rows(local, source, bare_source, mesh)
    todo = plan_exchange(bare_source, bare_target, mesh_coordinate(mesh))
    moved = cast(Tensor, _Redistribute.apply(owned.reshape(todo.source_shape), bare_source, bare_target, mesh))
    return exchange_rows(moved.reshape(todo.target_tile), bare_target, target, mesh)
