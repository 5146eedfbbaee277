"""Values of neighbors, and sums over them, on cells that are cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.agreement import told_where_different
from jigsaw.comm.exchange import exchange_rows
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.neighbor_exchange import NeighborExchange, positions_of_pieces, rows_to_edges
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.geometry.cut import Cut, Interval, cut_points
from jigsaw.geometry.neighbors import Neighbors, plan_neighbors
from jigsaw.nn.cells.edge_sums import (
    EdgesOfCells,
    greatest_of_edges,
    mean_of_edges,
    softmax_of_edges,
    sum_of_edges,
)
from jigsaw.tile.tile import Tile

_REDUCTIONS: dict[str, Callable[[Tensor, EdgesOfCells], Tensor]] = {
    "sum": sum_of_edges,
    "mean": mean_of_edges,
    "max": greatest_of_edges,
    "softmax": softmax_of_edges,
}
_plan = lru_cache(maxsize=256)(plan_neighbors)
_agreed: WeakKeyDictionary[DeviceMesh, set[str]] = WeakKeyDictionary()


def gather_neighbors(x: Any, table: Neighbors, dim: int = -1, points: Sequence[int] | None = None) -> Any:
    """Return the values of the neighbors of each target cell: those of `table`, along the dim of source cells.

    `points` are the cut points of the target cells. By default those of the source cells, where there are as many of
    both, and else pieces of equal size. A neighbor -1 has the value 0. `x` is a tile or a plain tensor.

    *Shapes*: [..., sources, ...] -> [..., targets, k, ...], or [..., edges, ...] for a table of edges, which lie in its
    order (`Neighbors.order`) with the piece of their target.  Per rank the own pieces of both.
    *Sends*: forward, each own row that another rank needs, once a rank, one message a pair of ranks; backward, the
    gradient of each edge whose source another rank owns.  Rows within reach are taken while the others travel.  At the
    first call of a table on a mesh, its checksum to every rank.
    *Bits*: those of one process on every mesh, gradients included, because cells sum their edges in one order.
    *Raises*: `ShardingError` for a dim that is not one of `table.sources` cells, one that was flattened from several,
    and points that do not fit; `RanksDifferError` on every rank where tables differ.

    >>> ring = jigsaw.Neighbors([[3, 1], [0, 2], [1, 3], [2, -1]])
    >>> jigsaw.nn.gather_neighbors(torch.arange(4.0), ring).tolist()
    [[3.0, 1.0], [0.0, 2.0], [1.0, 3.0], [2.0, 0.0]]
    """
    at = _cell_dim("gather_neighbors", x, dim, table.sources, f"the {table.sources} source cells")
    if not isinstance(x, Tile):
        ends = (0, table.sources), (0, table.targets)
        edges = rows_to_edges(x, NeighborExchange(_plan(table, *ends, 0), None, (0,), at))
        return edges if table.degree is None else edges.unflatten(at, (table.targets, table.degree))
    _agree_on_table(table, x.mesh)
    cut, local = _own_rows(x, at)
    target = _cut_of_targets(table, cut, points)
    piece = x.layout.piece(cut, x.coordinate)
    exchange = NeighborExchange(
        _plan(table, cut.points, target.points, piece), x.mesh, positions_of_pieces(x.layout, cut, x.coordinate), at
    )
    edges, layout = rows_to_edges(local, exchange), x.layout
    if table.degree is None:
        return Tile(edges, layout.replace_dim(at, _cut_of_edges(table, target)), x.mesh)
    first, last = target.owned(piece)
    edges = edges.unflatten(at, (last - first, table.degree))
    return Tile(edges, layout.replace_dim(at, target).insert(at + 1, table.degree), x.mesh)


def scatter_to_cells(values: Any, table: Neighbors, reduce: str = "sum", dim: int | None = None) -> Any:
    """Reduce values of edges to one for each target cell: their ``"sum"``, ``"mean"`` or ``"max"``.

    ``"softmax"`` keeps the shape: weights of edges that sum to 1 for each target cell, as attention over neighbors
    needs.  Neighbors -1 count for nothing, and a cell without any has 0.  `dim` is that of the target cells, before
    that of their k neighbors, or that of edges; by default these are the last.

    *Shapes*: [..., targets, k, ...] -> [..., targets, ...], or [..., edges, ...] -> [..., targets, ...] for a table of
    edges; per rank the own pieces of both.
    *Sends*: nothing, because edges lie with their targets.
    *Bits*: those of one process on every mesh; values of two bytes are summed in float32.
    *Raises*: `ShardingError` for another `reduce`, and for dims that are not those of the table.

    >>> ring = jigsaw.Neighbors([[3, 1], [0, 2], [1, 3], [2, -1]])
    >>> near = jigsaw.nn.gather_neighbors(torch.arange(4.0), ring)
    >>> jigsaw.nn.scatter_to_cells(near, ring, "mean").tolist()
    [2.0, 1.0, 2.0, 2.0]
    """
    if reduce not in _REDUCTIONS:
        raise ShardingError(f"scatter_to_cells: reduce={reduce!r} must be one of {', '.join(map(repr, _REDUCTIONS))}")
    is_table = table.degree is not None
    if dim is None:
        dim = -2 if is_table else -1
    count, cells = (table.targets, "target cells") if is_table else (table.edges, "edges")
    at = _cell_dim("scatter_to_cells", values, dim, count, f"the {count} {cells}")
    if is_table and (at + 1 >= values.ndim or values.shape[at + 1] != table.degree):
        raise ShardingError(
            f"scatter_to_cells: dim {at + 1} of shape {tuple(values.shape)} must be the {table.degree} neighbors"
        )
    if not isinstance(values, Tile):
        return _reduced(values, table, reduce, at, (0, table.targets))
    cut, local = _own_rows(values, at)
    target = cut if is_table else _cut_behind_edges(table, cut)
    interval = target.owned(values.layout.piece(cut, values.coordinate))
    out, layout = _reduced(local, table, reduce, at, interval), values.layout.replace_dim(at, cut)
    if reduce != "softmax":
        layout = (layout.drop([at + 1]) if is_table else layout).replace_dim(at, target)
    return Tile(out, layout, values.mesh)


def _reduced(values: Tensor, table: Neighbors, reduce: str, dim: int, targets: Interval) -> Tensor:
    cells = EdgesOfCells(table, targets, dim, values.device)
    edges = values if table.degree is None else values.flatten(dim, dim + 1)
    return _REDUCTIONS[reduce](edges, cells) if reduce != "softmax" else softmax_of_edges(edges, cells).view_as(values)


def _cell_dim(function: str, x: Any, dim: int, count: int, cells: str) -> int:
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != count:
        raise ShardingError(f"{function}: dim {dim} of shape {tuple(x.shape)} must be {cells} of the table")
    at = dim % x.ndim
    if isinstance(x, Tile) and len(x.layout.dim(at)) > 1:
        raise ShardingError(f"{function}: dim {dim} of {x.layout} was flattened from several; unflatten it first")
    return at


def _own_rows(x: Tile, dim: int) -> tuple[Cut, Tensor]:
    """Return the cut of the cells without halo, and this rank's own rows of them."""
    cut = x.layout.dim(dim)[0].bare()
    return cut, exchange_rows(x.local, x.layout, x.layout.replace_dim(dim, cut), x.mesh)


def _cut_of_targets(table: Neighbors, cut: Cut, points: Sequence[int] | None) -> Cut:
    if points is not None:
        return Cut(table.targets, cut_points(table.targets, cut.pieces, points), cut.axes)
    if table.targets == cut.size:
        return cut
    return Cut(table.targets, cut_points(table.targets, cut.pieces), cut.axes)


def _cut_of_edges(table: Neighbors, target: Cut) -> Cut:
    return Cut(table.edges, tuple(map(table.first_edge, target.points)), target.axes, source=(target,))


def _cut_behind_edges(table: Neighbors, cut: Cut) -> Cut:
    """Return the cut of the target cells whose edges are cut so."""
    target = cut.source[0] if cut.source else _cut_of_targets(table, Cut(table.edges, cut.points, cut.axes), None)
    if target.size != table.targets or tuple(map(table.first_edge, target.points)) != cut.points:
        raise ShardingError(
            f"scatter_to_cells: edges cut at {cut.points} are not those of pieces of target cells; make them by "
            "gather_neighbors, or cut them where the edges of its pieces of cells begin (Neighbors.first_edge)"
        )
    return target


def _agree_on_table(table: Neighbors, mesh: DeviceMesh) -> None:
    known = _agreed.setdefault(mesh, set())
    if table.key in known or lacks_values() or mesh.size() == 1:
        return
    keys = told_where_different("gather of cells", mesh, table.key)
    if keys:
        place = next(at for at, key in enumerate(keys) if key != keys[0])
        raise RanksDifferError(
            f"gather_neighbors: the table differs by rank: {keys[place]} at place {place} of the mesh, {keys[0]} at "
            "place 0; make the same table on every rank"
        )
    known.add(table.key)
