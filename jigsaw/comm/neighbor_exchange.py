"""Rows of cells by lists: each edge gets the row of its source cell, and the adjoint sums what edges give back.

A row that a rank needs travels once, however many edges name it. Back travel the gradients of edges, not their sums:
the owner of a cell adds them up in the order of edges, which is one order on every mesh, so the bits are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.functional import embedding_bag

from jigsaw.comm import debug
from jigsaw.comm.exchange import PackedSwap
from jigsaw.comm.graph_calls import graph_call
from jigsaw.comm.wire_values import is_narrow, places_with_values
from jigsaw.geometry.cut import Cut
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.neighbors import Integers, ListsBySteps, NeighborPlan, OrderedLists

_on_device: WeakKeyDictionary[NeighborPlan, dict[torch.device, PlacesOnDevice]] = WeakKeyDictionary()


def _places_on_device(plan: NeighborPlan, device: torch.device) -> PlacesOnDevice:
    by_device = _on_device.setdefault(plan, {})
    if device not in by_device:
        by_device[device] = PlacesOnDevice(plan, device)
    return by_device[device]


@lru_cache(maxsize=1024)
def positions_of_pieces(layout: Layout, cut: Cut, coordinate: MeshCoordinate) -> tuple[int, ...]:
    """Return the mesh position of each piece of a cut, for the ranks that differ from a coordinate in it alone."""
    names = [name for name, _ in layout.axes]
    others = [place for place, name in enumerate(names) if name not in cut.axes]
    positions = {
        layout.piece(cut, coord): at
        for at, coord in enumerate(layout.coords())
        if all(coord[place] == coordinate[place] for place in others)
    }
    return tuple(positions[piece] for piece in range(cut.pieces))


class PlacesOnDevice:
    """Lists of a plan as tensors."""

    def __init__(self, plan: NeighborPlan, device: torch.device) -> None:
        def moved(places: Integers) -> Tensor:
            return places_with_values(places.copy(), device)

        self.near, self.none, self.far, self.far_places = map(moved, (plan.near, plan.none, plan.far, plan.far_places))
        self.sends = [(q, moved(rows)) for q, rows in plan.sends]
        self.back_sends = [(q, moved(edges)) for q, edges in plan.back_sends]
        self.sums = ListsOnDevice(plan.sums, device)


class ListsOnDevice:
    """Lists of what is summed as tensors; each form of them is made when it is first needed."""

    def __init__(self, lists: OrderedLists, device: torch.device) -> None:
        self.rows = lists.rows
        self._lists, self._device = lists, device

    @cached_property
    def bags(self) -> tuple[Tensor, ...]:
        """Places of all values, row by row, and where each row's begin and end."""
        return tuple(places_with_values(x, self._device) for x in (self._lists.places, self._lists.ends))

    @cached_property
    def steps(self) -> StepsOnDevice:
        """Places turn by turn."""
        return StepsOnDevice(self._lists.steps(), self._device)


class StepsOnDevice:
    """Lists of what is summed turn by turn, as tensors."""

    def __init__(self, lists: ListsBySteps, device: torch.device) -> None:
        self.turns = [places_with_values(places, device) for places in lists.turns]
        self.rest = tuple(places_with_values(x, device) for x in (lists.rest_rows, lists.rest_places))
        self.restore = places_with_values(lists.restore, device)


def sum_in_order(values: Tensor, lists: ListsOnDevice, dim: int) -> Tensor:
    """Sum the values of each row of the lists, one after the other; those of two bytes in float32.  Without messages.

    *Shapes*: [..., values, ...] -> [..., rows, ...] along `dim`.
    """
    if _can_use_bags(values):
        return _sum_in_bags(values, lists, dim)
    steps = lists.steps
    wide = torch.float32 if is_narrow(values.dtype) else values.dtype
    out = values.new_zeros([*values.shape[:dim], lists.rows, *values.shape[dim + 1 :]], dtype=wide)
    for places in steps.turns:
        # rows are sorted by their number of values, most first, so that rows with one more value are a slice
        out.narrow(dim, 0, len(places)).add_(values.index_select(dim, places))
    rows, places = steps.rest
    if len(rows):  # also one value after the other
        added = values.index_select(dim, places).movedim(dim, 0).to(wide)
        out.movedim(dim, 0).index_put_((rows,), added, accumulate=True)
    return out.index_select(dim, steps.restore).to(values.dtype)


def _can_use_bags(values: Tensor) -> bool:
    # torch adds float64 row by row in BLAS, slower than the steps; a dry run counts operators that all devices have
    return values.dtype == torch.float32 and values.device.type == "cpu" and type(values) in (Tensor, Parameter)


def _sum_in_bags(values: Tensor, lists: ListsOnDevice, dim: int) -> Tensor:
    """Sum by torch's kernel for bags of embeddings, which reads each value once, and adds them in the same order."""
    places, ends = lists.bags
    lead, rest = values.shape[:dim], values.shape[dim + 1 :]
    if not values.numel():
        return values.new_zeros([*lead, lists.rows, *rest])
    tables = values.detach().reshape(lead.numel(), values.shape[dim], rest.numel())
    sums = [embedding_bag(places, table, ends, mode="sum", include_last_offset=True) for table in tables]
    return (sums[0] if len(sums) == 1 else torch.stack(sums)).view([*lead, lists.rows, *rest])


@dataclass(frozen=True)
class NeighborExchange:
    """Gather of one rank along `dim`: its plan, and the mesh position of each piece; no mesh for a whole tensor."""

    plan: NeighborPlan
    mesh: DeviceMesh | None
    positions: tuple[int, ...]
    dim: int

    def shape_with(self, x: Tensor, rows: int) -> list[int]:
        """Return the shape of a tensor with `rows` rows along the dim."""
        return [*x.shape[: self.dim], rows, *x.shape[self.dim + 1 :]]

    def start(
        self, x: Tensor, sends: list[tuple[int, Tensor]], receives: tuple[tuple[int, int], ...]
    ) -> PackedSwap | None:
        """Start sending rows by their places, and receiving a number of rows from each piece."""
        if self.mesh is None:
            return None
        sent = [(self.positions[q], [x.index_select(self.dim, places)]) for q, places in sends]
        received = [(self.positions[q], [self.shape_with(x, count)]) for q, count in receives]
        return PackedSwap(self.mesh, sent, received, x, "neighbors")

    def compare(self, kind: str) -> None:
        """Compare, when debugging, what the ranks are about to send."""
        if self.mesh is not None:
            debug.compare_calls(self.mesh, kind, self.plan.key[:3], self.dim)


def _like_edge_rows(x: Tensor, exchange: NeighborExchange) -> Tensor:
    return x.new_empty(exchange.shape_with(x, exchange.plan.edges))


@graph_call(_like_edge_rows)
def _rows_to_edges(x: Tensor, exchange: NeighborExchange) -> Tensor:
    dim, places = exchange.dim, _places_on_device(exchange.plan, x.device)
    swap = exchange.start(x, places.sends, exchange.plan.receives)
    # edges within this rank's rows are filled while the others' rows travel
    out = x.index_select(dim, places.near) if x.shape[dim] else x.new_zeros(exchange.shape_with(x, exchange.plan.edges))
    arrived = swap.wait() if swap else []
    if arrived:
        out.index_copy_(dim, places.far, torch.cat(arrived, dim).index_select(dim, places.far_places))
    return out.index_fill_(dim, places.none, 0) if len(places.none) else out


def _like_rows(edges: Tensor, exchange: NeighborExchange) -> Tensor:
    return edges.new_empty(exchange.shape_with(edges, exchange.plan.rows))


@graph_call(_like_rows)
def _edges_to_rows(edges: Tensor, exchange: NeighborExchange) -> Tensor:
    places = _places_on_device(exchange.plan, edges.device)
    swap = exchange.start(edges, places.back_sends, exchange.plan.back_receives)
    arrived = swap.wait() if swap else []
    values = torch.cat([edges, *arrived], exchange.dim) if arrived else edges
    return sum_in_order(values, places.sums, exchange.dim)


class _RowsToEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: NeighborExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.compare("neighbors")
        return _rows_to_edges(x, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _EdgesToRows.apply(grads[0], ctx.exchange), None


class _EdgesToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edges: Tensor, exchange: NeighborExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.compare("gradient of neighbors")
        return _edges_to_rows(edges, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _RowsToEdges.apply(grads[0], ctx.exchange), None


def edges_to_rows(edges: Tensor, exchange: NeighborExchange) -> Tensor:
    """Sum the values of edges for each own cell that is their source, in their order: the adjoint of `rows_to_edges`.

    *Sends*: each edge whose source another rank owns; backward what `rows_to_edges` sends forward.
    """
    return _EdgesToRows.apply(edges, exchange)  # pyright: ignore[reportReturnType]


def rows_to_edges(x: Tensor, exchange: NeighborExchange) -> Tensor:
    """Give each edge of this rank the row of its source cell; zeros where it has none.

    *Shapes*: per rank [..., own cells, ...] -> [..., own edges, ...] along the exchange's dim.
    *Sends*: forward each own row that another rank needs, once a rank, in one message; backward, the gradient of each
    edge whose source another rank owns, to that rank.  Counted as ``"neighbors"``.
    """
    return _RowsToEdges.apply(x, exchange)  # pyright: ignore[reportReturnType]
