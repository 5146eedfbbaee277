"""Regridding as a product with a sparse matrix of weights; each source row is sent to a rank once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor

from jigsaw.comm.exchange import exchange_rows
from jigsaw.comm.neighbor_exchange import NeighborExchange, positions_of_pieces, rows_to_edges
from jigsaw.errors import GridError
from jigsaw.fields.cell_weights import Integers, WeightEntries
from jigsaw.geometry.cut import Cut, SplitRule, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.neighbors import NeededRows
from jigsaw.geometry.stencil_rules import ceil_div
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.dispatch import without_modes

FieldProduct = Callable[[Tensor], Tensor]


class MatrixOnDevice:
    """Rows of the matrix of weights, for the source rows that this rank has, by dtype and device."""

    def __init__(self, rows: Integers, columns: Integers, values: np.ndarray, count: int) -> None:
        self._places, self._values, self._count = np.stack([rows, columns]), values, count
        self._made: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply along the last dim: [..., sources] -> [..., targets]."""
        key = x.dtype, x.device
        if key not in self._made:
            with without_modes():  # kept, so with values, even where a dry run makes them
                places, values = torch.from_numpy(self._places), torch.from_numpy(self._values)
                self._made[key] = places.to(x.device), values.to(x.device, x.dtype)
        columns = x.movedim(-1, 0).reshape(x.shape[-1], math.prod(x.shape[:-1]))
        if self._count and x.numel():
            matrix = torch.sparse_coo_tensor(
                *self._made[key], (self._count, x.shape[-1]), check_invariants=False, is_coalesced=True
            )
            y = torch.sparse.mm(matrix, columns)
        else:  # times 0, so that the backward pass still sends to other ranks
            y = (columns.sum(0, keepdim=True) * 0).expand(self._count, -1)
        return y.mT.reshape(*x.shape[:-1], self._count)


@dataclass(frozen=True, eq=False)
class TablePlan:
    """Plan of one layout: its bare `source`, the result's layout, and what this rank needs, by pieces of one cut.

    The source's dims are flattened into one, cut by the axes of all.  `received` has the bytes of each rank,
    in mesh order.
    """

    dims: tuple[int, ...]
    source: Layout
    out: Layout
    cut: Cut
    target_points: tuple[int, ...]
    order: Integers | None
    received: tuple[int, ...]


class CellTable:
    """Product of fields and a matrix of weights, on whole tensors and on tiles.

    *Sends*: each source row that a rank's targets need and that another owns, once, one message a pair of ranks;
    backward its gradient.
    """

    def __init__(self, entries: WeightEntries, split: SplitRule | None) -> None:
        self.entries, self._split = entries, split
        self._pieces: dict[tuple[Layout, tuple[int, ...], int], tuple[NeededRows, MatrixOnDevice]] = {}

    @cached_property
    def _whole(self) -> MatrixOnDevice:
        e = self.entries
        return MatrixOnDevice(e.target, e.source, e.value, math.prod(e.shape))

    def of_tensor(self, x: Tensor, dims: Sequence[int], judge: Callable[[Tensor, FieldProduct], Tensor]) -> Tensor:
        """Return the field of a whole tensor; `judge` applies the product to values and to the mask of missing ones."""
        y = judge(x.movedim(tuple(dims), self._last).flatten(-len(dims)), self._whole)
        return self._with_dims(y, self.entries.shape, min(dims))

    def of_tile(self, tile: Tile, plan: TablePlan, judge: Callable[[Tensor, FieldProduct], Tensor]) -> Tile:
        """Return the field of a tile, as planned."""
        x = exchange_rows(tile.local, tile.layout, plan.source, tile.mesh)
        x = x.movedim(plan.dims, self._last).flatten(-len(plan.dims))
        piece = plan.source.piece(plan.cut, tile.coordinate)
        needed, matrix = self._piece(plan, piece)
        positions = positions_of_pieces(plan.source, plan.cut, tile.coordinate)
        mesh = tile.mesh if plan.cut.is_cut else None
        near = rows_to_edges(x, NeighborExchange(needed.plan, mesh, positions, x.ndim - 1))
        first = min(plan.dims)
        shape = plan.out.local_shape(tile.coordinate)[first : first + len(self.entries.shape)]
        return Tile(self._with_dims(judge(near, matrix), shape, first), plan.out, tile.mesh)

    def plan(self, layout: Layout, dims: tuple[int, ...], itemsize: int) -> TablePlan:
        """Plan a layout.  Raises: `GridError` for flattened dims."""
        for dim in dims:
            if len(layout.dim(dim)) > 1:
                raise GridError(
                    f"regrid: dim {dim} of {layout} is {len(layout.dim(dim))} dims flattened together; unflatten it "
                    "first"
                )
        cuts = [layout.dim(dim)[0].bare() for dim in dims]
        source = layout
        for dim, cut in zip(dims, cuts, strict=True):
            source = source.replace_dim(dim, cut)
        boxes = [
            np.ravel_multi_index(np.ix_(*(np.arange(*span) for span in spans)), self.entries.source_shape).reshape(-1)
            for spans in product(*([c.owned(i) for i in range(c.pieces)] for c in cuts))
        ]
        order = np.concatenate(boxes)
        points = (0, *np.cumsum([len(box) for box in boxes]).tolist())
        joined = Cut(len(order), points, tuple(axis for cut in cuts for axis in cut.axes))
        rows = self.entries.shape[0]
        if self._split is not None:
            row_points = cut_points(rows, joined.pieces, self._split)
        else:
            row_points = tuple(ceil_div(p * rows, joined.size) for p in points)
        target = Cut(rows, row_points, joined.axes) if joined.is_cut else whole_dim(rows)
        out = source.drop(dims)
        for at, size in enumerate(self.entries.shape):
            out = out.insert(min(dims) + at, size)
        out = out.replace_dim(min(dims), target)
        each = math.prod(self.entries.shape[1:])
        in_order = bool((np.diff(order) == 1).all())
        points_in_cells = tuple(p * each for p in row_points)
        plan = TablePlan(dims, source, out, joined, points_in_cells, None if in_order else order, ())
        needed, others = self._piece(plan, 0)[0].received, source.drop(dims)
        rows_of = [needed[source.piece(joined, c)] * math.prod(others.local_shape(c)) for c in layout.coords()]
        return replace(plan, received=tuple(itemsize * count for count in rows_of))

    def _piece(self, plan: TablePlan, piece: int) -> tuple[NeededRows, MatrixOnDevice]:
        key = plan.source, plan.dims, piece
        if key not in self._pieces:
            e, source = self.entries, self.entries.source
            if plan.order is not None:  # sources are numbered in the order in which ranks hold them
                source = np.argsort(plan.order)[source]
            needed = NeededRows.of(e.target, source, plan.target_points, plan.cut.points, piece)
            by_place = np.lexsort((needed.columns, needed.rows))
            matrix = MatrixOnDevice(
                needed.rows[by_place], needed.columns[by_place], e.value[needed.entries][by_place], needed.count
            )
            self._pieces[key] = needed, matrix
        return self._pieces[key]

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(range(-len(self.entries.source_shape), 0))

    @staticmethod
    def _with_dims(y: Tensor, shape: Sequence[int], first: int) -> Tensor:
        last = tuple(range(-len(shape), 0))
        return y.unflatten(-1, tuple(shape)).movedim(last, tuple(range(first, first + len(shape))))
