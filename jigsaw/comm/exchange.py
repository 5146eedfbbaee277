"""Execution of transfers, with one planner (jigsaw.geometry.transfers).  Halos and roll are one call, `exchange_rows`;
redistribution is up to three steps (`redistribute_rows`).

The adjoint of a move is the reversed move with additions (Hewett and Grady, "A linear algebraic approach to model
parallelism in deep learning", arXiv 2006.03108).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import collectives, debug
from jigsaw.comm.connections import connect_ranks
from jigsaw.comm.graph_calls import graph_call, is_shape_run
from jigsaw.comm.kept_halos import keep_messages, kept_messages
from jigsaw.comm.wire_values import wire_memory
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.geometry.cut import Box, box_shape
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.transfers import (
    BoxesByPeer,
    ExchangePlan,
    check_exchange,
    holding_coarser,
    layouts_between,
    layouts_of_gather,
    plan_exchange,
)
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate
from jigsaw.ranks.slab_mesh import SlabMesh

CutMargins = tuple[tuple[int, int], ...]
TensorsByPeer = Sequence[tuple[int, Sequence[Tensor]]]
ShapesByPeer = Sequence[tuple[int, Sequence[Sequence[int]]]]


def _box_view(x: Tensor, box: Box, margins: CutMargins | None = None) -> Tensor:
    return x[_slices_of_box(box, margins)]


@lru_cache(maxsize=4096)
def _slices_of_box(box: Box, margins: CutMargins | None) -> tuple[slice, ...]:
    shift = [low for low, _ in margins] if margins else [0] * len(box)
    return tuple(slice(start + s, stop + s) for (start, stop), s in zip(box, shift, strict=True))


class PackedSwap:
    """Tensors for other ranks and from them, under way until `wait()`: all those of a pair of ranks in one message.

    Example: four ranks on 2 x 2 places each have a corner of an image and a halo of a row around it.  Rank 0 gives rank
    1 a column, rank 2 a row and rank 3 the corner between them.  A periodic dim adds a second box for the same peer;
    both travel as one flat message, and only their shapes separate them on the other side.  So both sides must list the
    tensors of a pair in one order, which the planner gives them: that of the rank that takes.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        sent: TensorsByPeer,
        taken: ShapesByPeer,
        like: Tensor,
        kind: str = "exchange",
        kept: list[tuple[int, Tensor]] | None = None,
    ) -> None:
        """Start it; what arrives has the dtype and device of `like`, or has been `kept` from before.

        *Sends*: the bytes of `sent`, one message a peer, counted as `kind`; nothing where all was kept.
        """
        self._sizes = [[math.prod(shape) for shape in shapes] for _, shapes in taken]
        self._shapes = [shape for _, shapes in taken for shape in shapes]
        if kept is not None:
            self.received, self._pending = kept, collectives.PendingWork((), ())
            return
        self.received = [
            (peer, wire_memory(like, (sum(sizes),))) for (peer, _), sizes in zip(taken, self._sizes, strict=True)
        ]
        sends = [(peer, _flat_message(parts)) for peer, parts in sent]
        self._pending = collectives.swap_messages(mesh, sends, self.received, kind)

    def wait(self) -> list[Tensor]:
        """Return what has arrived, in the order of `taken`."""
        self._pending.wait()
        parts = [p for (_, flat), sizes in zip(self.received, self._sizes, strict=True) for p in flat.split(sizes)]
        return [part.view(tuple(shape)) for part, shape in zip(parts, self._shapes, strict=True)]


def _flat_message(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def _box_views(x: Tensor, by_peer: BoxesByPeer, margins: CutMargins | None = None) -> TensorsByPeer:
    return [(peer, [_box_view(x, box, margins) for box in boxes]) for peer, boxes in by_peer]


@lru_cache(maxsize=4096)
def _box_shapes(by_peer: BoxesByPeer) -> ShapesByPeer:
    return tuple((peer, tuple(map(box_shape, boxes))) for peer, boxes in by_peer)


def _boxes_in_order(by_peer: BoxesByPeer) -> list[Box]:
    return [box for _, boxes in by_peer for box in boxes]


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Exchange of one rank: its plan, the ranks, the kind that its bytes count as, and `margins` of `fill` around the
    target box.

    The gradient of the source has its own `memory_format`, whatever that of the result's gradient is.  Torch's norms
    are wrong about some formats.
    """

    plan: ExchangePlan
    mesh: DeviceMesh
    kind: str = "exchange"
    margins: CutMargins | None = None
    fill: float = 0.0
    memory_format: torch.memory_format = torch.contiguous_format

    def start(self, cells: Tensor) -> PackedSwap:
        """Start the way of source rows to those that need them."""
        plan = self.plan
        # checkpointing runs a forward pass again, on every rank; halos that arrived the first time need not come again
        kept = None if is_shape_run() else kept_messages(plan)
        sends, shapes = _box_views(cells, plan.sends), _box_shapes(plan.receives)
        swap = PackedSwap(self.mesh, sends, shapes, cells, self.kind, kept)
        if kept is None and not is_shape_run():
            keep_messages(plan, plan.layouts, swap.received)
        return swap

    def finish(self, cells: Tensor, swap: PackedSwap) -> Tensor:
        """Return the target box: the rows at hand are copied while the others travel, then those that arrive."""
        grown = self.margins or ((0, 0),) * len(self.plan.target_shape)
        shape = [n + low + high for n, (low, high) in zip(self.plan.target_shape, grown, strict=True)]
        out = _empty_of_format(cells, shape, memory_format_of(cells))
        if self.margins is not None:
            out.fill_(self.fill)
        for move in self.plan.kept:
            _box_view(out, move.placed, self.margins).copy_(_box_view(cells, move.taken))
        for box, values in zip(_boxes_in_order(self.plan.receives), swap.wait(), strict=True):
            _box_view(out, box, self.margins).copy_(values)
        return out

    def start_back(self, grad: Tensor) -> PackedSwap:
        """Start the way back of gradients of fetched rows: the plan's sides change places."""
        sends, shapes = _box_views(grad, self.plan.receives, self.margins), _box_shapes(self.plan.sends)
        return PackedSwap(self.mesh, sends, shapes, grad, self.kind)

    def add_kept(self, out: Tensor, grad: Tensor) -> None:
        """Add the gradients of the rows at hand to that of the source."""
        for move in self.plan.kept:
            _box_view(out, move.taken).add_(_box_view(grad, move.placed, self.margins))

    def add_returned(self, out: Tensor, swap: PackedSwap) -> None:
        """Add what others send back: a row that three ranks needed gets three gradients."""
        for box, values in zip(_boxes_in_order(self.plan.sends), swap.wait(), strict=True):
            _box_view(out, box).add_(values)


def _exchange_forward(x: Tensor, exchange: RowExchange) -> Tensor:
    if exchange.plan.is_slice and exchange.margins is None:
        return _box_view(x, exchange.plan.kept[0].taken)
    return _fetch_rows(x, exchange)


@graph_call()
def _fetch_rows(x: Tensor, exchange: RowExchange) -> Tensor:
    # messages leave before the target is made, so they hide its allocation and the copy of the rows at hand
    return exchange.finish(x, exchange.start(x))


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Say whether the channels of a tensor lie side by side, as those of channels-last images and volumes, or slices of
    them.
    """
    if x.ndim in _CHANNELS_LAST and x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous():
        # torch's own rule: strides that fall as they do when channels come last
        order = (0, *range(2, x.ndim), 1)
        strides = [x.stride(d) for d in order if x.shape[d] != 1]
        if strides == sorted(strides, reverse=True):
            return _CHANNELS_LAST[x.ndim]
    return torch.contiguous_format


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _empty_of_format(x: Tensor, shape: Sequence[int], memory_format: torch.memory_format) -> Tensor:
    fits = memory_format == _CHANNELS_LAST.get(len(shape))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format if fits else None)


@graph_call()
def _exchange_backward(grad: Tensor, exchange: RowExchange) -> Tensor:
    plan, memory_format = exchange.plan, exchange.memory_format
    debug.compare_calls(exchange.mesh, f"gradient of {exchange.kind}", plan.layouts)
    swap = exchange.start_back(grad)
    # the gradient of kept rows is a view where nothing is added to it; else it has its own memory, because autograd may
    # hand the same gradient to others
    if plan.keeps_all:
        kept = _box_view(grad, plan.kept[0].placed, exchange.margins)
        out = kept if plan.is_local else kept.clone(memory_format=memory_format)
    else:
        out = _empty_of_format(grad, plan.source_shape, memory_format).zero_()
        exchange.add_kept(out, grad)
    exchange.add_returned(out, swap)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        debug.compare_calls(exchange.mesh, exchange.kind, exchange.fill, exchange.plan.layouts)
        return _exchange_forward(x, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # a separate Function, so that a gradient of the gradient is an exchange again
        adjoint = _ExchangeAdjoint.apply if torch.is_grad_enabled() else _exchange_backward
        return adjoint(grads[0], ctx.exchange), None


class _ExchangeAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _exchange_backward(grad, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        again = replace(ctx.exchange, fill=0.0, memory_format=memory_format_of(grads[0]))
        return _Exchange.apply(grads[0], again), None


def _checked_plan(local: Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> ExchangePlan:
    """Return the plan, once everything fits.  Facts that all ranks share are checked first, then this rank's tensor."""
    _check_layouts(source, target, mesh)
    todo = plan_exchange(source, target, mesh_coordinate(mesh))
    _check_local_tensor(local, source, todo.source_tile, mesh)
    return todo


def _check_layouts(source: Layout, target: Layout, mesh: DeviceMesh) -> None:
    if isinstance(mesh, SlabMesh) and source is not target:
        mesh.check_rows(source, target)
    if source.axes != axes_of_mesh(mesh):
        raise ShardingError(
            f"{source} is cut over mesh {dict(source.axes)}, but the mesh is {dict(axes_of_mesh(mesh))}"
        )
    if source.groups != target.groups:
        raise ShardingError(f"{source} and {target}: their dims are flattened differently; unflatten first")


def _check_local_tensor(local: Tensor, source: Layout, shape: tuple[int, ...], mesh: DeviceMesh) -> None:
    """Check this rank's tensor, which may be wrong alone: the others then wait, but not for a first connection."""
    connect_ranks(mesh)
    if tuple(local.shape) != shape:
        raise RanksDifferError(
            f"the rank at {mesh_coordinate(mesh)} has a local tensor of shape {tuple(local.shape)}, "
            f"but {source} gives it {shape}"
        )


def exchange_rows(
    local: Tensor,
    source: Layout,
    target: Layout,
    mesh: DeviceMesh,
    margins: CutMargins | None = None,
    fill: float = 0.0,
    kind: str = "exchange",
) -> Tensor:
    """Give this rank's source box and return its target box; rows that several ranks need go to each of them.

    `margins` adds rows of `fill` around this rank's target box (a cut each: below, above), so that a padded stencil
    input is assembled in one copy.  The layouts must be cut by the same axes (else use `redistribute_rows`).  Where
    nothing has to move, the result is `local` itself or a view of it.

    *Shapes*: global source.shape = target.shape; per rank ``source.held`` -> ``target.held`` plus margins.
    *Sends*: forward the rows that others need and this rank owns, one message a pair of ranks; backward the reverse.
    Counted as `kind`.  Whole dims come from more than 64 ranks along one axis after the other.
    *Raises*: `ShardingError` for layouts of different shapes, meshes or cut axes, or that do not fit `mesh` or `local`.
    """
    if source is target and margins is None:
        _check_layouts(source, target, mesh)
        _check_local_tensor(local, source, source.local_shape(mesh_coordinate(mesh)), mesh)
        return local
    # where an axis begins or ends to cut, copies become parts, so the gradient is not a plain sum over the ranks that
    # took a row
    if set(source.cut_axes) != set(target.cut_axes):
        _check_layouts(source, target, mesh)
        raise ShardingError(f"exchange from {source} to {target} would change what is replicated; use redistribute")
    if margins is None and (passed := layouts_of_gather(source, target)):
        # after each step the ranks along one more axis hold the same rows
        for finer, coarser in pairwise((source, *passed)):
            local = exchange_rows(local, finer, holding_coarser(finer, coarser), mesh, kind=kind)
        return local
    todo = _checked_plan(local, source, target, mesh)
    if source == target and margins is None:
        return local
    margins = _checked_margins(margins, source, fill, local.dtype)
    # nothing moves here; between other ranks rows may move, or they have margins where this one has none, and when
    # debugging they compare with this one
    is_quiet = margins is None and todo.is_slice and not (debug.IS_DEBUGGING and debug.is_comparing())
    if is_quiet and todo.keeps_all:
        return local
    cells = local.reshape(todo.source_shape)
    if is_quiet:
        out = _box_view(cells, todo.kept[0].taken)
    else:
        exchange = RowExchange(todo, mesh, kind, margins, fill, memory_format_of(cells))
        out = cast(Tensor, _Exchange.apply(cells, exchange))
    return out if out.ndim == source.ndim else out.reshape(_flattened_sizes(out.shape, source.groups))


def sum_held_rows(local: Tensor, held: Layout, owned: Layout, mesh: DeviceMesh, kind: str = "exchange") -> Tensor:
    """Add up each rank's parts of the rows that it holds on their owners: the adjoint of `exchange_rows`.

    *Shapes*: global unchanged; per rank ``held.held`` -> ``owned.held``.
    *Sends*: forward, the rows that this rank holds and others own, narrow types in float32; backward, the reverse.
    *Raises*: as `exchange_rows` from `owned` to `held`.
    """
    _check_layouts(owned, held, mesh)
    todo = plan_exchange(owned, held, mesh_coordinate(mesh))
    _check_local_tensor(local, held, todo.target_tile, mesh)
    wide = local.float() if local.dtype in (torch.bfloat16, torch.float16) else local
    out = cast(Tensor, _ExchangeAdjoint.apply(wide.reshape(todo.target_shape), RowExchange(todo, mesh, kind)))
    return out.reshape(todo.source_tile).to(local.dtype)


def _checked_margins(margins: CutMargins | None, source: Layout, fill: float, dtype: torch.dtype) -> CutMargins | None:
    """Return the margins, or None where there are none; all ranks refuse a fill that ranks at the border
    would refuse.
    """
    if margins is None:
        return None
    if not math.isfinite(fill) and not (dtype.is_floating_point or dtype.is_complex):
        raise ShardingError(f"fill={fill} does not exist in {dtype}; cast the tile to a floating dtype first")
    return margins if _has_margins(margins, source) else None


@lru_cache(maxsize=4096)
def _has_margins(margins: CutMargins, source: Layout) -> bool:
    if len(margins) != len(source.cuts) or any(min(pair) < 0 for pair in margins):
        raise ShardingError(f"margins {margins} must be two row counts >= 0 for each of the {len(source.cuts)} cuts")
    return any(low or high for low, high in margins)


def _flattened_sizes(sizes: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Return the sizes of the tensor dims, from those of the cuts."""
    ends = list(accumulate(groups, initial=0))
    return [math.prod(sizes[first:end]) for first, end in pairwise(ends)]


class AsyncExchange:
    """Fetch of several boxes at once, under way until `wait()`; not differentiable (`AsyncExchangeAdjoint` is the
    adjoint).
    """

    def __init__(self, x: Tensor, source: Layout, targets: Sequence[Layout], mesh: DeviceMesh) -> None:
        debug.compare_calls(mesh, "exchange", source, *targets)
        exchanges = [RowExchange(_checked_plan(x, source, target, mesh), mesh) for target in targets]
        each = [(exchange, x.reshape(exchange.plan.source_shape)) for exchange in exchanges]
        self._under_way = [(exchange, cells, exchange.start(cells)) for exchange, cells in each]

    def wait(self) -> list[Tensor]:
        """Return the boxes, in the order of the targets."""
        return [
            exchange.finish(cells, swap).reshape(exchange.plan.target_tile) for exchange, cells, swap in self._under_way
        ]


class AsyncExchangeAdjoint:
    """Adjoint of `AsyncExchange`: gradients of the boxes go back to their owners; `wait(into)` adds what arrives."""

    def __init__(self, grads: Sequence[Tensor], source: Layout, targets: Sequence[Layout], mesh: DeviceMesh) -> None:
        coordinate = mesh_coordinate(mesh)
        debug.compare_calls(mesh, "gradient of an exchange", source, *targets)
        exchanges = [RowExchange(plan_exchange(source, target, coordinate), mesh) for target in targets]
        each = [(e, grad.reshape(e.plan.target_shape)) for e, grad in zip(exchanges, grads, strict=True)]
        self._under_way = [(exchange, grad, exchange.start_back(grad)) for exchange, grad in each]

    def wait(self, into: Tensor) -> None:
        """Add everything to `into`, the gradient of the local source tensor."""
        for exchange, grad, swap in self._under_way:
            cells = into.view(exchange.plan.source_shape)
            exchange.add_kept(cells, grad)
            exchange.add_returned(cells, swap)


class _Redistribute(torch.autograd.Function):
    """Identity between two partitions.

    A value that is the same on several ranks has its whole gradient everywhere, so the way back is the same map.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange, plan = exchange, exchange.plan
        debug.compare_calls(exchange.mesh, "redistribute", *plan.layouts)
        out = _exchange_forward(x, exchange)
        # a piece of a whole tensor must not keep the whole alive, and all of it, where no other rank has rows, may be
        # changed in place as on other ranks: autograd forbids that of a view that a Function made
        return out.clone(memory_format=memory_format_of(x)) if plan.is_slice else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        mesh, (source, target) = ctx.exchange.mesh, ctx.exchange.plan.layouts
        back = plan_exchange(target, source, mesh_coordinate(mesh))
        return _Redistribute.apply(grads[0], RowExchange(back, mesh, ctx.exchange.kind)), None


def redistribute_rows(
    local: Tensor, source: Layout, target: Layout, mesh: DeviceMesh, kind: str = "exchange"
) -> Tensor:
    """Move rows from any layout of an array to any other: other cut points, dims or axes, gathered or cut, with or
    without halo.

    *Shapes*: global unchanged; per rank ``source.held`` -> ``target.held``.
    *Sends*: forward the rows that others need and this rank owns; backward likewise from target to source.  Counted as
    `kind`.  Among more than 64 ranks one axis goes after the other, in few messages of more bytes.
    *Raises*: `ShardingError` for layouts of different shapes or meshes, or that do not fit `mesh` or `local`.
    """
    for layout in layouts_between(source, target):
        local, source = exchange_rows(local, source, layout, mesh, kind=kind), layout
    if set(source.cut_axes) == set(target.cut_axes):
        return exchange_rows(local, source, target, mesh, kind=kind)
    # Example: four ranks, from 2 x 2 pieces by lat and lon to two by lat alone, with halos.  A row of a halo has
    # several holders and one owner.  So halos are dropped first (no message), owned rows move (each rank's half to the
    # other one along lon), and the new halo comes from the neighbors along lat.
    bare_source, bare_target = source.without_halo(), target.without_halo()
    # all three steps are checked before the first one sends
    _check_layouts(source, target, mesh)
    check_exchange(source, target)
    _check_local_tensor(local, source, source.local_shape(mesh_coordinate(mesh)), mesh)
    moved = exchange_rows(local, source, bare_source, mesh, kind=kind)
    onward, back = layouts_of_gather(bare_source, bare_target), layouts_of_gather(bare_target, bare_source)
    # a step that only drops rows gathers their gradients in the backward pass
    for before, after in pairwise((bare_source, *onward[:-1], *back[-2::-1], bare_target)):
        todo = plan_exchange(before, after, mesh_coordinate(mesh))
        rows = _Redistribute.apply(moved.reshape(todo.source_shape), RowExchange(todo, mesh, kind))
        moved = cast(Tensor, rows).reshape(todo.target_tile)
    out = exchange_rows(moved, bare_target, target, mesh, kind=kind)
    # a leaf must not be a view: autograd would look for the gradients of its own views at its base
    return out if out.requires_grad else out.detach()
