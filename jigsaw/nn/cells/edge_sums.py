"""Sums over the edges of each cell, in one order. Nothing is sent, because edges lie with the piece of their target."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jigsaw.comm.graph_calls import graph_call
from jigsaw.comm.neighbor_exchange import ListsOnDevice, sum_in_order
from jigsaw.comm.wire_values import places_with_values
from jigsaw.geometry.cut import Interval
from jigsaw.geometry.neighbors import Neighbors, OrderedLists


@dataclass(frozen=True)
class EdgesOfCells:
    """Edges of this rank's target cells, along `dim`; those that lead from nowhere count as none."""

    table: Neighbors
    targets: Interval
    dim: int
    device: torch.device = field(repr=False)

    def lists(self) -> CellLists:
        """Return the lists as tensors."""
        return _lists_of_cells(self.table, self.targets, self.device)

    def shape_with(self, x: Tensor, rows: int) -> list[int]:
        """Return the shape of a tensor with `rows` rows along the dim."""
        return [*x.shape[: self.dim], rows, *x.shape[self.dim + 1 :]]

    @property
    def cells(self) -> int:
        """Number of this rank's target cells."""
        return self.targets[1] - self.targets[0]

    @property
    def edges(self) -> int:
        """Number of their edges."""
        return self.table.first_edge(self.targets[1]) - self.table.first_edge(self.targets[0])


class CellLists:
    """Target cell of each edge, edges that lead from nowhere, edges of each cell in order, and their number."""

    def __init__(self, table: Neighbors, targets: Interval, device: torch.device) -> None:
        cell_of_edge, sources = table.targets_of(targets), table.sources_of(targets)
        edges = np.flatnonzero(sources >= 0)
        lists = OrderedLists.of(cell_of_edge[edges], edges, targets[1] - targets[0])
        self.cell_of_edge = places_with_values(cell_of_edge, device)
        self.none = places_with_values(np.flatnonzero(sources < 0), device)
        self.counts = places_with_values(lists.counts, device)
        self.sums = ListsOnDevice(lists, device)


@lru_cache(maxsize=1024)
def _lists_of_cells(table: Neighbors, targets: Interval, device: torch.device) -> CellLists:
    return CellLists(table, targets, device)


def _like_cells(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    return edges.new_empty(cells.shape_with(edges, cells.cells))


def _like_spread(values: Tensor, cells: EdgesOfCells) -> Tensor:
    return values.new_empty(cells.shape_with(values, cells.edges))


def _like_counts(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    return edges.new_empty([cells.cells])


@graph_call(_like_cells)
def _sum_edges(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    return sum_in_order(edges, cells.lists().sums, cells.dim)


@graph_call(_like_spread)
def _cells_to_edges(values: Tensor, cells: EdgesOfCells) -> Tensor:
    lists = cells.lists()
    out = values.index_select(cells.dim, lists.cell_of_edge)
    return out.index_fill_(cells.dim, lists.none, 0) if len(lists.none) else out


@graph_call(_like_cells)
def _greatest_edges(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    steps = cells.lists().sums.steps
    out = edges.new_zeros(cells.shape_with(edges, cells.cells))
    for turn, places in enumerate(steps.turns):
        rows, values = out.narrow(cells.dim, 0, len(places)), edges.index_select(cells.dim, places)
        rows.copy_(values if turn == 0 else torch.maximum(rows, values))
    rest, places = steps.rest
    if len(rest):
        values = edges.index_select(cells.dim, places).movedim(cells.dim, -1)
        out.movedim(cells.dim, -1).scatter_reduce_(-1, rest.expand_as(values), values, "amax")
    return out.index_select(cells.dim, steps.restore)


@graph_call(_like_counts)
def _edge_counts(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    return cells.lists().counts.to(edges.dtype)


class _SumOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edges: Tensor, cells: EdgesOfCells) -> Tensor:
        ctx.cells = cells
        return _sum_edges(edges, cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SpreadToEdges.apply(grads[0], ctx.cells), None


class _SpreadToEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cells: EdgesOfCells) -> Tensor:
        ctx.cells = cells
        return _cells_to_edges(values, cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SumOfEdges.apply(grads[0], ctx.cells), None


class _GreatestOfEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edges: Tensor, cells: EdgesOfCells) -> Tensor:
        ctx.cells, out = cells, _greatest_edges(edges, cells)
        ctx.save_for_backward(edges, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        edges, out = ctx.saved_tensors
        is_greatest = (edges == spread_to_edges(out, ctx.cells)).to(edges.dtype)
        ties = sum_of_edges(is_greatest, ctx.cells).clamp(min=1)
        return spread_to_edges(grads[0] / ties, ctx.cells) * is_greatest, None


def sum_of_edges(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    """Sum the edges of each cell: [..., own edges, ...] -> [..., own cells, ...]; 0 for a cell without any."""
    return _SumOfEdges.apply(edges, cells)  # pyright: ignore[reportReturnType]


def spread_to_edges(values: Tensor, cells: EdgesOfCells) -> Tensor:
    """Give each edge the value of its target cell: [..., own cells, ...] -> [..., own edges, ...]."""
    return _SpreadToEdges.apply(values, cells)  # pyright: ignore[reportReturnType]


def mean_of_edges(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    """Return the mean of the edges of each cell; 0 for a cell without any."""
    counts = _edge_counts(edges.detach(), cells).clamp(min=1)
    return sum_of_edges(edges, cells) / counts.view([-1 if d == cells.dim else 1 for d in range(edges.ndim)])


def greatest_of_edges(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    """Return the maximum of the edges of each cell, 0 for a cell without any; equal ones share its gradient."""
    return _GreatestOfEdges.apply(edges, cells)  # pyright: ignore[reportReturnType]


def softmax_of_edges(edges: Tensor, cells: EdgesOfCells) -> Tensor:
    """Return the softmax over the edges of each cell, of the shape of `edges`; 0 for those that lead from nowhere."""
    top = _cells_to_edges(_greatest_edges(edges.detach(), cells), cells)
    weights = (edges - top).exp()
    sums = spread_to_edges(sum_of_edges(weights, cells), cells)
    return torch.where(sums == 0, 0, weights / sums.where(sums != 0, 1))
