"""A linear whose contraction meets cuts: the role of each axis, the grid, and where the result lies.

Example: four ranks on lat=2, lon=2, x [6, 8] with rows cut by lat and K by lon, W whole.  With N = 4 the grid is
(2,2,1). The ranks of a row of the mesh add up partial sums of y [3, 4]. Each keeps 2 of its columns.  With N = 32 y is
larger than x, and the grid is (2,1,2). The parts [3, 4] of x travel along lon, and each rank makes 16 columns of y by
itself. Either way y is cut by lat and lon, as x was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from jigsaw.comm.matmul import grid_matmul
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, cut_points, have_same_rows, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import MatmulGrid, choose_grid, refine_cut
from jigsaw.nn.rank_order import (
    CutGroup,
    as_one_cut,
    axes_of_cuts,
    bare_cuts,
    cut_in_rank_order,
    put_in_dim_order,
    size_of_cuts,
    take_owned_rows,
)
from jigsaw.nn.shared_inputs import enter_in_parts
from jigsaw.ops.meeting.gradient_blocks import own_block, recorded_blocks
from jigsaw.tile.tile import Tile


@dataclass(frozen=True)
class LinearContraction:
    """A linear whose contraction meets cuts: the grid, and the cuts of K and of the last dims of x and y meanwhile."""

    grid: MatmulGrid
    inner: CutGroup
    outer: CutGroup
    stored: Layout  # the layout of the weight once its rows are where they are multiplied

    def result(self, x: Layout) -> Layout:
        return x.replace_dim(x.ndim - 1, *self.outer)

    def rows_at_work(self, w: Tensor, x: Tile) -> Tensor:
        """Return this rank's factor, from its part of a weight that is cut as ``self.stored``."""
        # cut a whole W without a message; where a dim stays whole, put its rows in the order of ranks, as in x and y
        for dim, group, block in ((0, self.outer, self.grid.n), (1, self.inner, self.grid.k)):
            if not self.stored.is_cut(dim):
                w = take_owned_rows(w, dim, group, self.stored, x.coordinate if block.is_cut else None)
        return w

    def parameter_at_work(self, parameter: nn.Parameter, x: Tile, scale: float) -> Tensor | None:
        """Return the same for a whole parameter whose gradient may travel in blocks; None if it has none of its own."""
        dims = (0, self.outer, self.grid.n), (1, self.inner, self.grid.k)
        record = recorded_blocks(parameter, x.mesh)
        if record is None or not any(block.is_cut for _, _, block in dims):
            return None
        cuts = [bare_cuts(group) if block.is_cut else (whole_dim(block.size),) for _, group, block in dims]
        w = own_block(parameter, Layout.from_dims(cuts, x.layout.axes), scale, record)
        for dim, group, block in dims:
            w = w if block.is_cut else take_owned_rows(w, dim, group, self.stored, None)
        return w

    def run(self, x: Tile, w: Tensor) -> Tile:
        grid, stored, coord, last = self.grid, self.stored, x.coordinate, x.ndim - 1
        # along these axes ranks use the same x for different columns of y (or of K), so each has a part of its gradient
        alike = [a for a in (*grid.n.axes, *grid.k.axes) if a not in x.layout.cut_axes]
        rows = enter_in_parts(x, alike)
        if grid.k.is_cut and not x.layout.is_cut(last):
            rows = take_owned_rows(rows, last, self.inner, x.layout, coord)
        elif stored.is_cut(1) and not x.layout.is_cut(last):
            # pieces of W arrive in the order of ranks, so put the features of x in that order
            rows = take_owned_rows(rows, last, stored.dim(1), x.layout, None)
        rows, w = in_autocast_dtype(rows), in_autocast_dtype(w)
        y = grid_matmul(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]), w, grid, x.mesh)
        if stored.is_cut(0) and not any(c.is_cut for c in self.outer):
            y = put_in_dim_order(y, 1, stored.dim(0), x.layout)
        return Tile(y.reshape(*rows.shape[:-1], y.shape[-1]), self.result(x.layout), x.mesh)


@lru_cache(maxsize=1024)
def plan_contraction(x: Layout, stored: Layout, wanted: CutGroup | None = None) -> LinearContraction:
    """Plan the product of tiles cut as `x` and `stored`; `wanted` are the cuts of y's last dim where axes allow a
    choice.

    Raises: `ShardingError` when the axes of x and W do not form a grid.
    """
    stored = _layout_at_work(x, stored, wanted)
    jobs = [_contraction_in_role(role, x, stored, wanted) for role in _possible_roles(x, stored)]
    best = choose_grid([j.grid for j in jobs])
    return next(j for j in jobs if j.grid is best)


def _possible_roles(x: Layout, stored: Layout) -> list[str]:
    """Return the possible roles of the axes that cut K of x. As "k" (row) they go on cutting K, and y is reduced over
    them. As "n" (column) they cut N, and x travels.
    """
    along = set(x.dim_axes(x.ndim - 1))
    (by_rows, rows_move), (by_columns, columns_move) = (_staying_axes_and_moves(x, stored, d) for d in (0, 1))
    # an axis can cut K only once, and cannot cut a dim of W that is already cut finer for its travel
    as_k = along.isdisjoint(by_rows) and not (along and columns_move)
    as_n = along.isdisjoint(by_columns) and not (along and rows_move) and (not by_rows or along <= by_rows)
    if not (as_k or as_n):
        raise ShardingError(
            f"linear: x is cut as {x} and the weight as {stored}; cut one dim of the weight by the axes of the last "
            "dim "
            f"of x, or store it whole"
        )
    return ["k"] * as_k + ["n"] * as_n


def _contraction_in_role(role: str, x: Layout, stored: Layout, wanted: CutGroup | None) -> LinearContraction:
    inner, rows_of_x = x.dim(x.ndim - 1), _leading_axes(x)
    m = cut_in_rank_order(x, range(x.ndim - 1), rows_of_x)
    of_n, of_k = (_weight_block_cut(stored, d, rows_of_x) for d in (0, 1))
    inner_cut = as_one_cut(inner, x)
    k = of_k if of_k.is_cut else inner_cut if role == "k" else whole_dim(inner_cut.size)
    spare = axes_of_cuts(inner) if role == "n" and not of_n.is_cut else ()
    outer = _output_cuts(stored.dim(0), of_n, (*spare, *k.axes), inner, x, wanted)
    outer_cut = as_one_cut(outer, x)
    n = of_n if of_n.is_cut else outer_cut if spare else whole_dim(of_n.size)
    work = stored.dim(1) if of_k.is_cut else inner
    for d, group in ((0, outer), (1, inner if inner_cut.is_cut else work)):
        _check_flattened_order(stored, d, group)
    w_rest = [_cut_at_rest(d, rows_of_x, block, stored) for d, block in ((0, n), (1, k))]
    x_rest = inner_cut if inner_cut.is_cut else k
    layouts = [Layout(tuple(cuts), x.axes) for cuts in ((m, x_rest), w_rest, (m, outer_cut))]
    return LinearContraction(MatmulGrid(m, k, n, *layouts), work, outer, stored)


def _layout_at_work(x: Layout, stored: Layout, wanted: CutGroup | None) -> Layout:
    """Return the layout of a weight whose rows go where y is wanted, or known, to be cut by their axes."""
    inner, rows = x.dim(x.ndim - 1), stored.dim(0)
    axes = axes_of_cuts(rows)
    known = (
        wanted if wanted and set(axes_of_cuts(wanted)) == set(axes) else _known_cuts(inner, size_of_cuts(rows), axes)
    )
    return stored.replace_dim(0, *known) if known and axes else stored


def _known_cuts(inner: CutGroup, size: int, axes: Sequence[str]) -> CutGroup | None:
    """Return the cuts that a dim of `size` over `axes` had: those of K, or of the dim that K was made from."""
    for group in (inner, inner[0].source):
        if group and size_of_cuts(group) == size and set(axes_of_cuts(group)) == set(axes):
            return bare_cuts(group)
    return None


def _leading_axes(x: Layout) -> tuple[str, ...]:
    return tuple(a for a in x.cut_axes if a not in x.dim_axes(x.ndim - 1))


def _staying_axes_and_moves(x: Layout, stored: Layout, dim: int) -> tuple[set[str], bool]:
    """Return the axes that cut a dim of W and stay, and whether W travels along others, which cut x's leading dims."""
    axes, moving = set(stored.dim_axes(dim)), set(_leading_axes(x))
    return axes - moving, bool(axes & moving)


def _check_flattened_order(stored: Layout, dim: int, group: CutGroup) -> None:
    cuts = stored.dim(dim)
    are_both_cut = stored.is_cut(dim) and any(c.is_cut for c in group)
    if are_both_cut and max(len(cuts), len(group)) > 1 and not have_same_rows(cuts, group):
        raise ShardingError(
            f"linear: dim {dim} of the weight, cut as {stored}, cannot meet a dim cut as "
            f"{Layout(group, stored.axes, (len(group),))}; "
            f"cut the weight at the same points (a Tile), or store it whole"
        )


def _weight_block_cut(stored: Layout, dim: int, moving: Sequence[str]) -> Cut:
    """Return the block cut of a dim of W: without the axes along which W travels, which must be its minor ones."""
    cut = as_one_cut(stored.dim(dim), stored)
    kept = tuple(a for a in cut.axes if a not in moving)
    every = math.prod(stored.size_of(a) for a in cut.axes if a in moving)
    if cut.axes[: len(kept)] != kept:
        raise ShardingError(
            f"linear: the weight, cut as {stored}, travels along {moving}: where other axes cut the same dim, they "
            "must come first"
        )
    return Cut(cut.size, cut.points[::every], kept) if kept else whole_dim(cut.size)


def _cut_at_rest(dim: int, moving: Sequence[str], block: Cut, stored: Layout) -> Cut:
    cut = as_one_cut(stored.dim(dim), stored)
    return cut if set(cut.axes) & set(moving) else block


def _output_cuts(
    rows: CutGroup, of_n: Cut, axes: tuple[str, ...], inner: CutGroup, x: Layout, wanted: CutGroup | None
) -> CutGroup:
    """Return the cuts of the last dim of y: those of W's rows, finer by `axes`, or those that its size had before."""
    if of_n.is_cut:
        return (
            (refine_cut(of_n, axes, dict(x.axes)),)
            if axes
            else bare_cuts(rows)
            if len(rows) > 1
            else (replace(of_n, source=inner[0].source or inner),)
        )
    if not axes:
        return (whole_dim(of_n.size),)
    # tokens cut at 0, 3, 10 that went through 6 hidden ones, cut at 0, 3, 6, lie at 0, 3, 10 again, so that adding the
    # residual needs no message; an unknown size is cut evenly
    known = wanted or _known_cuts(inner, of_n.size, axes)
    if known and axes_of_cuts(known) == axes:
        return known
    origin = inner[0].source or inner
    points = cut_points(of_n.size, math.prod(x.size_of(a) for a in axes))
    return (Cut(of_n.size, points, axes, source=origin if set(axes_of_cuts(origin)) == set(axes) else ()),)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return an operand of a product in the dtype that autocast gives it."""
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.to(torch.get_autocast_dtype(kind)) if narrow else x


def tile_in_autocast_dtype(x: Any) -> Any:
    """Return the same of a tile, before it moves; anything else stays."""
    if not isinstance(x, Tile) or not torch.is_autocast_enabled(x.local.device.type):
        return x
    return Tile(in_autocast_dtype(x.local), x.layout, x.mesh)
