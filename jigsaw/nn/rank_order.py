"""Rows of a dim in the order of ranks: each rank's after the other's.  A sum over a cut dim needs no other order.

Example: four ranks on lat=2, lon=2 and the 16 tokens of a 4 x 4 grid. rank 0 has 0, 1, 4, 5; rank 1 has 2, 3, 6, 7;
rank 2 has 8, 9, 12, 13; rank 3 has 10, 11, 14, 15.  In rank order they are one cut at 0, 4, 8, 12, 16.  A product over
them needs the rows of its other operand in the same order; the tokens stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.debug import compare_calls
from jigsaw.comm.exchange import PackedSwap
from jigsaw.comm.graph_calls import graph_call, lacks_values
from jigsaw.comm.wire_values import values_on_device
from jigsaw.geometry.cut import Cut, have_same_rows, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.dispatch import without_modes

CutGroup = tuple[Cut, ...]


def axes_of_cuts(group: Sequence[Cut]) -> tuple[str, ...]:
    """Return the mesh axes that cut a dim made of several cuts, major to minor."""
    return tuple(a for c in group for a in c.axes)


def size_of_cuts(group: Sequence[Cut]) -> int:
    """Return the size of a dim made of several cuts."""
    return math.prod(c.size for c in group)


def bare_cuts(group: Sequence[Cut]) -> CutGroup:
    """Return the same cuts without halo."""
    return tuple(c.bare() for c in group)


def cut_in_rank_order(layout: Layout, dims: Sequence[int], axes: Sequence[str]) -> Cut:
    """Return some dims as one, each rank's local rows after the other's; `axes` are those that cut them."""
    # pieces of a product of cuts are not intervals, but their sizes still give cut points
    counts = [0, *(math.prod(layout.local_shape(at)[d] for d in dims) for at in coordinates_along(layout, axes))]
    points = tuple(accumulate(counts))
    return Cut(points[-1], points, tuple(axes)) if axes else whole_dim(points[-1])


def as_one_cut(group: CutGroup, layout: Layout) -> Cut:
    """Return a dim of flattened cuts as one cut, in rank order."""
    return cut_in_rank_order(Layout(group, layout.axes, (len(group),)), [0], axes_of_cuts(group))


def coordinates_along(
    layout: Layout, axes: Sequence[str], coord: MeshCoordinate | None = None
) -> Iterator[MeshCoordinate]:
    """Iterate over the coordinates along `axes`, major to minor, through `coord` (by default the first rank)."""
    base = coord or (0,) * len(layout.axes)
    for place in product(*(range(layout.size_of(a)) for a in axes)):
        at = dict(zip(axes, place, strict=True))
        yield tuple(at.get(name, c) for (name, _), c in zip(layout.axes, base, strict=True))


def take_owned_rows(w: Tensor, dim: int, group: CutGroup, layout: Layout, coord: MeshCoordinate | None) -> Tensor:
    """Return the rows that the rank at `coord` has of a `dim` cut as `group`; without it, all in rank order."""
    if not any(c.is_cut for c in group):
        return w
    if coord is not None:
        cells = w.unflatten(dim, [c.size for c in group]) if len(group) > 1 else w
        for k, cut in enumerate(group):
            start, stop = cut.owned(layout.piece(cut, coord))
            cells = cells.narrow(dim + k, start, stop - start)
        return cells.flatten(dim, dim + len(group) - 1) if len(group) > 1 else cells
    if len(group) == 1:
        return w  # the pieces of a single cut are already in the order of ranks
    return w.index_select(dim, values_on_device(_rows_in_rank_order(group, layout), None, w.device))


def host_values() -> AbstractContextManager[Any]:
    """Give tensors of places on the host values within the block, also in a dry run, not while a graph is traced."""
    return nullcontext() if lacks_values() else without_modes()


def put_in_dim_order(w: Tensor, dim: int, group: CutGroup, layout: Layout) -> Tensor:
    """Return the rows of a whole `dim`, which came in rank order, in the order of the dim."""
    if len(group) == 1:
        return w
    return w.index_select(dim, values_on_device(_rows_in_rank_order(group, layout).argsort(), None, w.device))


def _rows_in_rank_order(group: CutGroup, layout: Layout) -> Tensor:
    return torch.cat([_global_rows(group, layout, at) for at in coordinates_along(layout, axes_of_cuts(group))])


def _global_rows(group: CutGroup, layout: Layout, coord: MeshCoordinate) -> Tensor:
    return take_owned_rows(torch.arange(size_of_cuts(group)), 0, group, layout, coord)


PeerRows = tuple[tuple[int, Tensor], ...]


@lru_cache(maxsize=256)
def _row_trades(source: CutGroup, target: CutGroup, layout: Layout, coord: MeshCoordinate) -> tuple[PeerRows, PeerRows]:
    """Return (peer, local rows) that this rank sends, and (peer, places) at which it puts received rows.

    Example: the tokens above are cut anew as 0:4, 4:8, 8:12, 12:16.  Rank 1 has 2, 3, 6, 7 and is to have 4 to 7.  It
    gives rank 0 its rows 0 and 1 (2 and 3). It puts the rows from there (4 and 5) at places 0 and 1, and keeps 6 and 7.
    """
    gives: list[tuple[int, Tensor]] = []
    takes: list[tuple[int, Tensor]] = []
    with without_modes():  # in a dry run, or while a graph is traced, tensors must not be kept
        own, wanted = _global_rows(source, layout, coord), _global_rows(target, layout, coord)
        for peer in coordinates_along(layout, axes_of_cuts(target), coord):
            sent, taken = (
                _shared_positions(own, _global_rows(target, layout, peer))[0],
                _shared_positions(wanted, _global_rows(source, layout, peer))[0],
            )
            gives.append((layout.index(peer), sent))
            takes.append((layout.index(peer), taken))
    return tuple(gives), tuple(takes)


def _shared_positions(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions in `a` and in `b` of the rows that are in both, by ascending row: the order of a message."""
    # in ascending order, so that both sides find the same order without a message
    order_a, order_b = a.argsort(), b.argsort()
    in_a, in_b = torch.isin(a[order_a], b), torch.isin(b[order_b], a)
    return order_a[in_a], order_b[in_b]


@dataclass(frozen=True, slots=True)
class RowTrade:
    """Move of the rows of dim 0 from one cut to another, over the ranks of `mesh`, whose axes `layout` has."""

    source: CutGroup
    target: CutGroup
    layout: Layout
    mesh: DeviceMesh


def _swapped_shape(w: Tensor, trade: RowTrade) -> Tensor:
    coord = mesh_coordinate(trade.mesh)
    owned = (cut.owned(trade.layout.piece(cut, coord)) for cut in trade.target)
    return w.new_empty((math.prod(stop - start for start, stop in owned), *w.shape[1:]))


@graph_call(_swapped_shape)
def _swap_rows(w: Tensor, trade: RowTrade) -> Tensor:
    coord = mesh_coordinate(trade.mesh)
    me = trade.layout.index(coord)
    gives, takes = (
        [(peer, values_on_device(at, None, w.device)) for peer, at in trades]
        for trades in _row_trades(trade.source, trade.target, trade.layout, coord)
    )
    out = w.new_empty((sum(len(at) for _, at in takes), *w.shape[1:]))
    sends = [(peer, [w.index_select(0, at)]) for peer, at in gives if peer != me]
    places = [(peer, at) for peer, at in takes if peer != me]
    shapes = [(peer, [(len(at), *w.shape[1:])]) for peer, at in places]
    swap = PackedSwap(trade.mesh, sends, shapes, w, "rows")
    # rows that stay are copied while the messages travel
    out.index_copy_(0, dict(takes)[me], w.index_select(0, dict(gives)[me]))
    for (_, at), values in zip(places, swap.wait(), strict=True):
        out.index_copy_(0, at, values)
    return out


class _RearrangedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, trade: RowTrade) -> Tensor:
        ctx.trade = trade
        compare_calls(trade.mesh, "rows", w.ndim)
        return _swap_rows(w, trade)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # the adjoint of a permutation of rows over ranks is its inverse
        trade: RowTrade = ctx.trade
        return _RearrangedRows.apply(grads[0], RowTrade(trade.target, trade.source, trade.layout, trade.mesh)), None


def rearrange_rows(w: Tensor, source: CutGroup, target: CutGroup, tile: Tile) -> Tensor:
    """Return the rows of dim 0 of `w`, cut as `source`, where `target` has them. These are other points, or the tokens
    of a lat x lon tile.

    *Sends*: forward, the rows that change owner, at most this rank's; backward, the same reversed.
    """
    if have_same_rows(source, target):
        return w
    return _RearrangedRows.apply(w, RowTrade(source, target, Layout((), tile.layout.axes), tile.mesh))
