"""A dim that a function needs whole, or in order: the axes that cut it visit another dim, and come back.

Sorting along a cut dim, a median, a roll of flattened dims: each needs all rows of the dim on one rank, but not all of
the tensor.  Four ranks on lat=4, x [2, 8, 33, 64] cut along its dim of 33: one exchange makes [2, 8, 33, 16] of
[2, 8, 9 or 8, 64], 3/4 of which other ranks had, every rank sorts 33 rows, and one exchange takes the result back.
The dim that is visited is the one whose rows the axes share out best; a dim that is cut already is cut finer.  Where
none has two rows a rank (a 1-d tensor), every rank holds the dim whole and computes alike.

>>> tile = jigsaw.shard(torch.tensor([3.0, 1.0, 2.0]), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.sort().values.local
tensor([1., 2., 3.])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.cut import Cut, cut_points, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.ops.pointwise import replace_results
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.unknown_functions import run_alike
from jigsaw.tile.tile import Tile, leave_tile


@lru_cache(maxsize=1024)
def plan_whole_dims(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """Return the layout, without halo, in which `dims` are whole; their axes cut another dim that has rows for them."""
    axes = tuple(a for d in dims for a in layout.dim_axes(d))
    moved = layout.without_halo()
    for d in dims:
        moved = moved.replace_dim(d, *(c.uncut() for c in layout.dim(d)))
    if not axes:
        return moved
    best, least = None, 1.0
    for d in range(layout.ndim):
        if d in dims or len(moved.dim(d)) != 1:
            continue
        cut = refine_cut(moved.dim(d)[0], axes, dict(layout.axes))
        # rows of the busiest rank, as a share of those that it has now
        share = _longest_piece(cut) / max(_longest_piece(moved.dim(d)[0]), 1)
        if share < least and layout.shape[d]:
            best, least = (d, cut), share
    return moved if best is None else moved.replace_dim(*best)


def _longest_piece(cut: Cut) -> int:
    return max(cut.owned(i)[1] - cut.owned(i)[0] for i in range(cut.pieces))


TileMove = Callable[[Tile, Layout], Tile]


def with_whole_dims(tile: Tile, dims: Sequence[int], move: TileMove = Tile.with_layout) -> Tile:
    """Return the same tensor with `dims` whole on every rank, flattened dims in their order; `move` brings a tile to
    another layout.

    *Sends*: where they are cut, (P-1)/P of a tile to the other ranks along their axes; where no other dim has rows for
    the axes, the whole tile to each of them.  Backward as many.
    """
    layout = plan_whole_dims(tile.layout, tuple(dims))
    moved = move(tile, layout)
    for d in dims:
        layout = layout.replace_dim(d, whole_dim(tile.shape[d]))
    return Tile(moved.local, layout, tile.mesh)


def brought_home(tile: Tile, home: Layout) -> Tile:
    """Return the tile in the layout `home`, in which dims may be flattened that are one whole dim in its own."""
    layout = tile.layout
    for d, group in enumerate(home.dims()):
        if len(group) > 1 and len(layout.dim(d)) == 1:
            layout = layout.replace_dim(d, *(c.uncut() for c in group))
    return Tile(tile.local, layout, tile.mesh).with_layout(home)


def with_contiguous_dim(tile: Tile, dim: int, move: TileMove = Tile.with_layout) -> Tile:
    """Return the same tensor, with the rows of a dim that was flattened from several in one interval a rank.

    The tokens of a lat x lon tile lie in boxes.  On lat=2, lon=2 the ranks of one lat swap halves of their rows, so
    that each has whole rows of lat; then its tokens are an interval.

    *Sends*: about half a tile a rank on 2 x 2; backward as many.  Nothing for a dim that is one already.
    """
    group = tile.layout.dim(dim)
    if len(group) == 1:
        return tile
    own = move(tile, tile.layout.without_halo()) if tile.layout.has_halo else tile
    size = tile.shape[dim]
    axes, sizes = own.layout.dim_axes(dim), dict(own.layout.axes)
    pieces = math.prod(sizes[a] for a in axes)
    first, inner = own.layout.dim(dim)[0], size // max(group[0].size, 1)
    if first.size < pieces:
        whole = with_whole_dims(own, (dim,), move)
        return move(whole, own.layout.replace_dim(dim, Cut(size, cut_points(size, pieces), axes)))
    outer = refine_cut(first, [a for a in axes if a not in first.axes], sizes)
    moved = move(own, own.layout.replace_dim(dim, outer, *(c.uncut() for c in group[1:])))
    cut = Cut(size, tuple(p * inner for p in outer.points), outer.axes)
    return Tile(moved.local, own.layout.replace_dim(dim, cut), tile.mesh)


def run_with_whole_dim(function: Any, input: Tile, dim: int, /, *args: Any, **kwargs: Any) -> Any:
    """Run along a cut dim, brought whole; the results lie where reductions of torch would lie.

    The other dims of a result are cut as the input's; dim `dim` is cut as it was where it has kept its size, else it is
    whole.

    *Sends*: what `with_whole_dims` does, and each result back.
    """
    (at,) = reduced_dims(input, dim)
    check_by_torch(function, input, at, *args, **kwargs)
    whole = with_whole_dims(input.owned(), (at,))
    if whole.local.numel() or not input.numel():
        out = function(whole.local, *args, **kwargs)
    else:
        like = function(whole.local.detach().new_zeros([n or 1 for n in whole.local.shape]), *args, **kwargs)
        out = _results_without_rows(like, whole.local, at)
    home = input.layout.without_halo()
    return replace_results(out, lambda y: _result_at_home(y, whole, home, at))


def _results_without_rows(like: Any, local: Tensor, dim: int) -> Any:
    """Return results of a rank without rows, which not every function of torch answers, but which takes part in the
    backward pass.

    `like` are the results for one row.
    """

    def result(like: Tensor) -> Tensor:
        total = local.sum(dim, keepdim=like.ndim == local.ndim).to(like.dtype)
        if like.ndim < local.ndim:
            return total
        return total.expand([like.shape[d] if d == dim else n for d, n in enumerate(local.shape)])

    return replace_results(like, result)


def check_by_torch(function: Any, input: Tile, dim: int, /, *args: Any, **kwargs: Any) -> None:
    """Raise torch's own errors for the arguments, on every rank, before anything is sent."""
    shape = [n if d == dim else min(n, 1) for d, n in enumerate(input.shape)]
    function(input.local.detach().new_zeros(shape), *args, **kwargs)


def _result_at_home(out: Tensor, whole: Tile, home: Layout, dim: int) -> Any:
    if out.ndim == whole.ndim:
        now = whole.layout.replace_dim(dim, whole_dim(out.shape[dim]))
        goal = home if out.shape[dim] == home.shape[dim] else home.replace_dim(dim, whole_dim(out.shape[dim]))
    else:
        now, goal = whole.layout.drop((dim,)), home.drop((dim,))
    if goal.ndim == 0:
        return leave_tile(out, whole.mesh)
    return brought_home(Tile(out, now, whole.mesh), goal)


def held_whole(tile: Tile) -> Tile:
    """Return the tile with every row on every rank, flattened dims in their order.

    *Sends*: this rank's owned rows to every rank that lacks them; backward nothing.
    """
    whole = Layout.from_dims([[whole_dim(n)] for n in tile.shape], tile.layout.axes)
    return Tile(tile.owned().with_layout(tile.layout.uncut()).local, whole, tile.mesh)


def run_held_whole(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run on whole tensors, alike on every rank: for results whose size depends on the values, and orders of all
    elements.  Results are tiles that nothing cuts.

    *Sends*: each tile to every rank; backward nothing.
    """
    whole_args = [held_whole(a) if isinstance(a, Tile) else a for a in args]
    whole_kwargs = {name: held_whole(a) if isinstance(a, Tile) else a for name, a in kwargs.items()}
    first = next(a for a in (*whole_args, *whole_kwargs.values()) if isinstance(a, Tile))
    return run_alike(function, whole_args, whole_kwargs, first)


def rows_of_local(layout: Layout, coord: MeshCoordinate, dim: int, device: torch.device) -> Tensor:
    """Return the global position along `dim` of each local row, without a halo; of flattened dims too."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for cut in layout.dim(dim):
        start, stop = cut.owned(layout.piece(cut, coord))
        rows = (rows[:, None] * cut.size + torch.arange(start, stop, device=device)).flatten()
    return rows
