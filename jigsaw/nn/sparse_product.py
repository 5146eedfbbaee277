"""Products of a sparse matrix, which every rank has whole, with a tile: ``torch.sparse.mm``, ``bmm``, ``@`` and ``mv``.

A matrix of two dims whose columns one cut meets: a rank multiplies the rows of the result that it owns.  It needs the
rows of the tile that these have entries for. Each that another rank owns travels once, as along a kept index.  Who
needs which row is planned once for a matrix, until it is changed.

Of others, and where fewer rows travel so (few long rows, which sum over all): a rank multiplies the columns of the
matrix that its own rows of the tile meet.  That gives parts of some rows of the result; each row is summed by the rank
that owns it.  A rank sends only the rows that its columns have entries in.

Four ranks on lat=4, a matrix of 12 x 12 with three diagonals, x [12, 5] cut at 0, 3, 6, 9, 12. Rank 1 has the columns
3:6, with entries in the rows 2:7.  The result is cut as x, so row 2 goes to rank 0, row 6 to rank 2, five numbers each;
or, of which there are as many, it needs the rows 2 and 6 of x.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.arange(6.0).reshape(3, 2), mesh, ("lat", None))
>>> (torch.eye(3).to_sparse() @ tile).local[2]
tensor([4., 5.])
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from jigsaw.comm.exchange import sum_held_rows
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.neighbor_exchange import NeighborExchange, positions_of_pieces, rows_to_edges
from jigsaw.comm.wire_values import places_with_values
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, Interval, cut_points
from jigsaw.geometry.neighbors import NeededRows
from jigsaw.nn.rank_order import CutGroup
from jigsaw.nn.spheres.sphere import stretched_cut
from jigsaw.nn.stencils.stencil import empty_result
from jigsaw.tile.tile import Tile, implements_torch
from jigsaw.torch_internals.autograd import tensor_version


def is_sparse_matrix(x: object) -> bool:
    """Say of an operand whether it is a plain tensor of a sparse layout."""
    return isinstance(x, Tensor) and not isinstance(x, Tile) and x.layout != torch.strided


@implements_torch(torch.sparse.mm, either=("mat1", "mat2"))
def sparse_matmul(mat1: Any, mat2: Any) -> Any:
    """Return y = a x, or x a. a is a sparse matrix that every rank has, or a batch of them, and x is a tile.

    *Shapes*: [M, K] x [K, N] -> [M, N], [B, M, K] x [B, K, N] -> [B, M, N], [M, K] x [K] -> [M]. Where axes cut K of
    the tile, they cut M of the result.
    *Sends*: the rows of the tile that other ranks' rows of the result have entries for, each once a rank. Or, where
    these are fewer over all ranks, other ranks' rows of the result in which this rank's columns have entries. Backward
    their gradients, the other way.
    *Raises*: `ShardingError` for a sparse matrix that requires a gradient, and for other numbers of dims.
    """
    if isinstance(mat1, Tile):
        if mat1.ndim == 2 and not isinstance(mat2, Tile) and mat2.ndim == 2:
            return sparse_matmul(mat2.t(), mat1.t()).t()
        matrix, x = mat2, mat1
    else:
        matrix, x = mat1, mat2
    if (
        isinstance(matrix, Tile)
        or not isinstance(x, Tile)
        or matrix is mat2
        or x.ndim not in _DIMS.get(matrix.ndim, ())
    ):
        raise ShardingError(
            f"a product of a sparse matrix and a Tile, of shapes {tuple(mat1.shape)} and {tuple(mat2.shape)}: it takes "
            "[M, K] and [K, N] or [K], [B, M, K] and [B, K, N], [M, K] and a sparse [K, N]; use to_dense()"
        )
    if matrix.requires_grad:
        raise ShardingError(
            f"a product of a sparse matrix of shape {tuple(matrix.shape)} that requires a gradient and a Tile is not "
            "answered: its gradient would have to be summed over the ranks; use to_dense()"
        )
    if matrix.shape[-1] != x.shape[matrix.ndim - 2] or (matrix.ndim == 3 and matrix.shape[0] != x.shape[0]):
        raise RuntimeError(f"matmul: {tuple(matrix.shape)} and {tuple(x.shape)} cannot be multiplied")
    return _multiply(matrix, x.owned())


_DIMS = {2: (1, 2), 3: (3,)}  # numbers of dims: of the matrix, and of the tile that it may multiply


def _multiply(original: Tensor, x: Tile) -> Tile:
    matrix = original.to_sparse_coo().coalesce()
    dim = matrix.ndim - 2  # the dim of x that is summed over
    size, group = matrix.shape[dim], x.layout.dim(dim)
    if len(group) == 1:
        rows = stretched_cut(group[0], size)
    else:
        points = cut_points(size, math.prod(c.pieces for c in group))
        rows = Cut(size, points, tuple(a for c in group for a in c.axes))
    home = x.layout.replace_dim(dim, rows)
    if matrix.ndim == 2 and len(group) == 1 and rows.is_cut and not lacks_values():
        needed = _rows_for_product(original, matrix, group[0], rows, x.layout.piece(group[0], x.coordinate))
        if needed is not None:
            return Tile(needed.product(matrix, x, group[0]), home, x.mesh)
    held = home.replace_dim(dim, rows.holding(_rows_with_entries(matrix, group))) if rows.is_cut else home
    piece = held.piece(rows, x.coordinate)
    held_rows = held.dim(dim)[0].held[piece]
    part = _part_of_matrix(matrix, x, held_rows)
    if part.shape[dim] and x.local.numel():
        y = torch.matmul(part, x.local) if matrix.ndim == 2 else torch.bmm(part, x.local)
    else:
        y = empty_result(held.local_shape(x.coordinate), x.local, saved=int(part.requires_grad))
    return Tile(sum_held_rows(y, held, home, x.mesh) if rows.is_cut else y, home, x.mesh)


class _PieceOfProduct:
    """Rows of a tile that one piece of the rows of a product needs, and its entries of the matrix, on a device."""

    def __init__(self, needed: NeededRows, device: torch.device) -> None:
        self.needed = needed
        self.entries = places_with_values(needed.entries, device)
        self.places = places_with_values(np.stack([needed.rows, needed.columns]), device)

    def product(self, matrix: Tensor, x: Tile, cut: Cut) -> Tensor:
        """Return the own rows of the product.  *Sends*: each own row that another rank needs, once a rank."""
        positions, rows = positions_of_pieces(x.layout, cut, x.coordinate), self.needed.count
        near = rows_to_edges(x.local, NeighborExchange(self.needed.plan, x.mesh, positions, 0))
        part = torch.sparse_coo_tensor(
            self.places, matrix.values()[self.entries], (rows, near.shape[0]), check_invariants=False, is_coalesced=True
        )
        return (
            torch.matmul(part, near) if rows and near.numel() else empty_result((rows, *near.shape[1:]), near, saved=0)
        )


# for each matrix, keyed by the cuts of its columns and rows; made again after a change in place
_pieces: MutableMapping[Tensor, dict[Any, _PieceOfProduct | None]] = WeakIdKeyDictionary()


def _rows_for_product(original: Tensor, matrix: Tensor, cut: Cut, rows: Cut, piece: int) -> _PieceOfProduct | None:
    """Return what a piece of the result needs, None where fewer rows travel as parts of the result."""
    kept, key = _pieces.setdefault(original, {}), (tensor_version(original), cut.points, rows.points, piece)
    if key not in kept:
        row, column = matrix.indices().cpu().numpy()
        needed = NeededRows.of(row, column, rows.points, cut.points, piece)
        held = _rows_with_entries(matrix, (cut,))
        parts = sum(
            b - a - max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(held, pairwise(rows.points), strict=True)
        )
        kept[key] = _PieceOfProduct(needed, matrix.device) if sum(needed.received) <= parts else None
    return kept[key]


# for each matrix, keyed by the cuts of its columns; made again after a change in place
_kept_rows: MutableMapping[Tensor, dict[tuple[int, CutGroup], tuple[Interval, ...]]] = WeakIdKeyDictionary()


def _rows_with_entries(matrix: Tensor, group: CutGroup) -> tuple[Interval, ...]:
    """Return the rows in which each piece of the columns has entries; the host waits for a GPU to read them."""
    indices = matrix.indices()
    kept = _kept_rows.setdefault(matrix, {})
    key = tensor_version(indices), group
    if key not in kept:
        size = math.prod(c.pieces for c in group)
        of_entry = torch.zeros_like(indices[-1])
        for cut, place in zip(group, _places_in_group(indices[-1], group), strict=True):
            ends = torch.tensor(cut.points[1:-1], device=place.device, dtype=place.dtype)
            of_entry = of_entry * cut.pieces + torch.bucketize(place, ends, right=True)
        first = torch.full((size,), matrix.shape[-2], device=indices.device)
        first = first.scatter_reduce(0, of_entry, indices[-2], "amin")
        last = torch.zeros_like(first).scatter_reduce(0, of_entry, indices[-2] + 1, "amax")
        kept[key] = tuple((min(a, b), b) for a, b in zip(first.tolist(), last.tolist(), strict=True))
    return kept[key]


def _places_in_group(columns: Tensor, group: CutGroup) -> list[Tensor]:
    places: list[Tensor] = []
    for cut in reversed(group):
        places.insert(0, columns % cut.size)
        columns = columns.div(cut.size, rounding_mode="floor")
    return places


def _part_of_matrix(matrix: Tensor, x: Tile, rows: Interval) -> Tensor:
    """Return the part of the matrix that meets this rank's rows of `x`, and of its rows those of `rows`."""
    dim = matrix.ndim - 2
    indices, layout = matrix.indices(), x.layout
    boxes = [(g, [c.owned(layout.piece(c, x.coordinate)) for c in g]) for g in map(layout.dim, range(dim + 1))]
    are_mine = torch.ones_like(indices[0], dtype=torch.bool)
    inside: list[Tensor] = []
    for (group, box), index in zip(boxes, (*indices[:dim], indices[-1]), strict=True):
        at = torch.zeros_like(index)
        for place, (start, stop) in zip(_places_in_group(index, group), box, strict=True):
            are_mine &= (place >= start) & (place < stop)
            at = at * (stop - start) + place - start
        inside.append(at)
    sizes = [math.prod(b - a for a, b in box) for _, box in boxes]
    places = torch.stack([*inside[:dim], indices[-2] - rows[0], inside[-1]])[:, are_mine]
    shape: Sequence[int] = (*sizes[:dim], rows[1] - rows[0], sizes[-1])
    return torch.sparse_coo_tensor(places, matrix.values()[are_mine], shape, check_invariants=False, is_coalesced=True)
