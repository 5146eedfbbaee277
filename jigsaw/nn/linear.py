"""Linear layers on tiles: over a whole last dim each rank by itself, over a cut one through the matmul core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from jigsaw import comm
from jigsaw.grid import Grid, choose, refine
from jigsaw.layout import Coordinate, Cut, Layout, ShardingError, cut_points, whole
from jigsaw.matmul import matmul
from jigsaw.nn.weights import Weight, cut_parameter, layout_of, local_weight
from jigsaw.tile import Tile, implements, refuse

Group = tuple[Cut, ...]


@implements(F.linear)
def linear(input: Tile | Tensor, weight: Weight, bias: Weight | None = None) -> Tile:
    """y = x Wᵀ + b over the last dim of x, whatever cuts x and W.

    *Shapes*: x [..., K], W [N, K], b [N], y [..., N]; the leading dims of y are cut as those of x.  The last dim of y is

    - whole when that of x and both dims of W are (each rank by itself, halo rows included);
    - cut as W's rows when they are (column-cut: y stays cut along ``channel``);
    - else cut by the axes that cut K: where N = K at the same points, where N leads back to the size that x was made from at
      the points that it had then, else balanced.

    *Sends*: with K whole and W whole or column-cut, nothing; backward one all-reduce of the gradient of x over the axes of W's
    rows.  Else what the core's grid says (`jigsaw.matmul.matmul`): over a cut K either the parts of x travel (column) or
    partial sums of y do (row), whichever moves less in a training step; a W stored 1/P along the axes that cut the rows
    of x travels to them.  The input is never gathered on one rank, only passed around.
    *Raises*: `ShardingError` when the axes of x and W do not form a grid.
    """
    if not isinstance(input, Tile):
        return _of_plain(input, weight, bias)
    n, k = weight.shape
    if input.shape[-1] != k:
        raise RuntimeError(f"linear: input {tuple(input.shape)} and weight {tuple(weight.shape)} cannot be multiplied ({input.shape[-1]} and {k})")
    stored = layout_of(weight, input)
    if not input.layout.is_cut(input.ndim - 1) and not stored.cut_axes:
        return _by_itself(input, weight, bias, n)
    x = _without_halo_along_last(input)
    return _with_bias(_Job.of(x.layout, stored).run(x, weight, stored), bias)


def _of_plain(input: Tensor, weight: Weight, bias: Weight | None) -> Tile:
    """A whole input and a tile among the weights: the weight is the tile that the input multiplies."""
    if not isinstance(weight, Tile) or input.ndim != 2:
        tile = next(t for t in (weight, bias) if isinstance(t, Tile))
        raise refuse(F.linear, tile, f"the input is a plain tensor of shape {tuple(input.shape)}", "make the input a Tile with jigsaw.shard")
    return _with_bias(linear(weight, input).transpose(0, 1), bias)


def _by_itself(input: Tile, weight: Weight, bias: Weight | None, n: int) -> Tile:
    if isinstance(bias, (Tile, DTensor)):
        return _with_bias(_by_itself(input, weight, None, n), bias)
    x = _without_halo_along_last(input)
    out = x.layout.replace_dim(x.ndim - 1, whole(n))
    plain = None if bias is None else local_weight(bias, x, out)
    return Tile(F.linear(x.local, local_weight(weight, x, out), plain), out, x.mesh)


def _without_halo_along_last(input: Tile) -> Tile:
    """The tile without halo rows along the contracted dim; those of other dims stay."""
    last = input.ndim - 1
    layout = input.layout.replace_dim(last, *(c.bare() for c in input.layout.dim(last)))
    return input if layout == input.layout else input.with_layout(layout)


def _with_bias(y: Tile, bias: Weight | None) -> Tile:
    """y + bias; a DTensor's part must be cut as the last dim of y."""
    if bias is None:
        return y
    if not isinstance(bias, DTensor):
        return y + bias.to(y.dtype)
    cut = layout_of(bias, y).cuts
    if tuple(c.bare() for c in y.layout.dim(y.ndim - 1)) != cut:
        raise ShardingError(f"linear: the bias is cut as {layout_of(bias, y)}, but the last dim of the output as {y.layout}; cut the bias like the rows of the weight")
    return Tile(y.local + local_weight(bias, y, y.layout).to(y.dtype), y.layout, y.mesh)


# -- contraction over a cut dim ---------------------------------------------------------------------------------------


def in_rank_order(layout: Layout, dims: Sequence[int], axes: Sequence[str]) -> Cut:
    """Some dims as one, each rank's local rows after the other's: the order in which a rank holds them does not matter to a sum."""
    counts = [0]
    for place in product(*(range(layout.size_of(a)) for a in axes)):
        at = dict(zip(axes, place, strict=True))
        shape = layout.local_shape(tuple(at.get(name, 0) for name, _ in layout.axes))
        counts.append(math.prod(shape[d] for d in dims))
    points = tuple(accumulate(counts))
    return Cut(points[-1], points, tuple(axes)) if axes else whole(points[-1])


def _axes(group: Group) -> tuple[str, ...]:
    return tuple(a for c in group for a in c.axes)


def _one(group: Group, layout: Layout) -> Cut:
    """A dim of flattened cuts in rank order."""
    return in_rank_order(Layout(group, layout.axes, (len(group),)), [0], _axes(group))


def take_rows(w: Tensor, dim: int, group: Group, layout: Layout, coord: Coordinate | None) -> Tensor:
    """The rows of a whole `dim` that the rank at `coord` has of a dim cut as `group`; without it, all of them in rank order."""
    if not any(c.is_cut for c in group):
        return w
    if coord is not None:
        cells = w.unflatten(dim, [c.size for c in group])
        for k, cut in enumerate(group):
            start, stop = cut.owned(layout.piece(cut, coord))
            cells = cells.narrow(dim + k, start, stop - start)
        return cells.flatten(dim, dim + len(group) - 1)
    if len(group) == 1:
        return w  # pieces of one cut lie one after the other anyway
    axes = _axes(group)
    rows = torch.arange(w.shape[dim], device=w.device)
    places = product(*(range(layout.size_of(a)) for a in axes))
    coords = (tuple(dict(zip(axes, place, strict=True)).get(name, 0) for name, _ in layout.axes) for place in places)
    return w.index_select(dim, torch.cat([take_rows(rows, 0, group, layout, c) for c in coords]))


@dataclass(frozen=True)
class _Job:
    """A linear whose contraction meets cuts: the grid, and the cuts of the last dims of x and y and of K as it is worked on."""

    grid: Grid
    inner: Group
    outer: Group

    @classmethod
    def of(cls, x: Layout, stored: Layout) -> _Job:
        """The grid of fewest bytes among those that the axes of x and W allow.

        The axes that cut K of x may go on cutting K, then y is reduced over them ("k", row), or cut N, then x travels ("n", column).
        """
        along = set(x.dim_axes(x.ndim - 1))
        (by_rows, rows_move), (by_columns, columns_move) = (_how(x, stored, d) for d in (0, 1))
        # axes cut K once, and a dim of W that is cut finer by its travels cannot be cut by them as well
        as_k = along.isdisjoint(by_rows) and not (along and columns_move)
        as_n = along.isdisjoint(by_columns) and not (along and rows_move) and (not by_rows or along <= by_rows)
        roles = ["k"] * as_k + ["n"] * as_n
        if not roles:
            raise ShardingError(f"linear: x is cut as {x} and the weight as {stored}; cut one dim of the weight by the axes of the last dim of x, or store it whole")
        jobs = [cls._as(role, x, stored) for role in roles]
        best = choose([j.grid for j in jobs])
        return next(j for j in jobs if j.grid is best)

    @classmethod
    def _as(cls, role: str, x: Layout, stored: Layout) -> _Job:
        inner, rows_of_x = x.dim(x.ndim - 1), _rows_axes(x)
        m = in_rank_order(x, range(x.ndim - 1), rows_of_x)
        of_n, of_k = (_leading(stored, d, rows_of_x) for d in (0, 1))
        inner_cut = _one(inner, x)
        k = of_k if of_k.is_cut else inner_cut if role == "k" else whole(inner_cut.size)
        spare = _axes(inner) if role == "n" and not of_n.is_cut else ()
        outer = _outer(stored.dim(0), of_n, (*spare, *k.axes), inner, x)
        outer_cut = _one(outer, x)
        n = of_n if of_n.is_cut else outer_cut if spare else whole(of_n.size)
        work = stored.dim(1) if of_k.is_cut else inner
        for d, group in ((0, outer), (1, inner if inner_cut.is_cut else work)):
            _check_order(stored, d, group)
        w_rest = [_stored_cut(d, rows_of_x, block, stored) for d, block in ((0, n), (1, k))]
        x_rest = inner_cut if inner_cut.is_cut else k
        layouts = [Layout(tuple(cuts), x.axes) for cuts in ((m, x_rest), w_rest, (m, outer_cut))]
        return cls(Grid(m, k, n, *layouts), work, outer)

    def run(self, x: Tile, weight: Weight, stored: Layout) -> Tile:
        grid, coord, last = self.grid, x.coordinate, x.ndim - 1
        out = x.layout.replace_dim(last, *self.outer)
        alike = [a for a in (*grid.n.axes, *grid.k.axes) if a not in x.layout.cut_axes]
        rows = comm.enter(x.local, x.mesh, alike)
        if grid.k.is_cut and not x.layout.is_cut(last):
            rows = take_rows(rows, last, self.inner, x.layout, coord)
        w = local_weight(weight, x, out)
        for dim, group, block in ((0, self.outer, grid.n), (1, self.inner, grid.k)):
            if not stored.is_cut(dim):
                w = take_rows(w, dim, group, stored, coord if block.is_cut else None)
        rows, w = _autocast(rows), _autocast(w)
        y = matmul(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]), w, grid, x.mesh)
        return Tile(y.reshape(*rows.shape[:-1], y.shape[-1]), out, x.mesh)


def _rows_axes(x: Layout) -> tuple[str, ...]:
    """The axes that cut the leading dims of x, in mesh order."""
    return tuple(a for a in x.cut_axes if a not in x.dim_axes(x.ndim - 1))


def _how(x: Layout, stored: Layout, dim: int) -> tuple[set[str], bool]:
    """The axes that cut a dim of W and stay, and whether W travels along others: those that cut the leading dims of x."""
    axes, moving = set(stored.dim_axes(dim)), set(_rows_axes(x))
    return axes - moving, bool(axes & moving)


def _check_order(stored: Layout, dim: int, group: Group) -> None:
    """A dim of W that is cut can only meet a dim of x or y of several cuts when it has the same ones."""
    mine = tuple(c.bare() for c in stored.dim(dim))
    if stored.is_cut(dim) and any(c.is_cut for c in group) and max(len(mine), len(group)) > 1 and mine != tuple(c.bare() for c in group):
        raise ShardingError(
            f"linear: dim {dim} of the weight, cut as {stored}, cannot meet a dim cut as {Layout(group, stored.axes, (len(group),))}; "
            f"cut the weight at the same points (a Tile), or store it whole"
        )


def _leading(stored: Layout, dim: int, moving: Sequence[str]) -> Cut:
    """The block cut of a dim of W: without the axes along which W travels, which must be its minor ones."""
    cut = _one(stored.dim(dim), stored)
    kept = _axes_without(cut.axes, moving)
    every = math.prod(stored.size_of(a) for a in cut.axes if a in moving)
    if cut.axes[: len(kept)] != kept:
        raise ShardingError(f"linear: the weight, cut as {stored}, travels along {moving}: where other axes cut the same dim, they must come first")
    return Cut(cut.size, cut.points[::every], kept) if kept else whole(cut.size)


def _axes_without(axes: Sequence[str], without: Sequence[str]) -> tuple[str, ...]:
    return tuple(a for a in axes if a not in without)


def _stored_cut(dim: int, moving: Sequence[str], block: Cut, stored: Layout) -> Cut:
    """How a dim of W is cut at rest: as its block, or finer where W travels."""
    cut = _one(stored.dim(dim), stored)
    return cut if set(cut.axes) & set(moving) else block


def _outer(rows: Group, of_n: Cut, axes: tuple[str, ...], inner: Group, x: Layout) -> Group:
    """The cuts of the last dim of y: those of W's rows, finer by `axes`, or those that its size is known to have had."""
    if of_n.is_cut:
        return (refine(of_n, axes, dict(x.axes)),) if axes else tuple(c.bare() for c in rows) if len(rows) > 1 else (of_n,)
    if not axes:
        return (whole(of_n.size),)
    origin = inner[0].source or inner
    for known in (inner, origin):
        if math.prod(c.size for c in known) == of_n.size and _axes(known) == axes:
            return tuple(c.bare() for c in known)
    pieces = math.prod(x.size_of(a) for a in axes)
    return (Cut(of_n.size, cut_points(of_n.size, pieces), axes, source=origin if _axes(origin) == axes else ()),)


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.to(torch.get_autocast_dtype(kind)) if narrow else x


# -- module -----------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """`torch.nn.Linear` whose weight and bias are cut along `axis`: y = x Wᵀ + b, y cut along it as the rows of W are.

    Each rank holds 1/P of the weight, its gradient and its optimizer state, as a DTensor with torch's names and full shapes;
    the sizes need not divide.  On a mesh without that axis it is `torch.nn.Linear`.

    *Shapes*: weight [out, in], per rank [ceil(out / P), in] (the last ones may have fewer rows); x whole or cut along `axis`.
    *Sends*: see `linear`; once, when it is made, the parts of the first rank's initial values.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: DeviceMesh,
        axis: str | Sequence[str] = "channel",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.weight = cut_parameter(self.weight.detach(), mesh, axis)
        if bias:
            self.bias = cut_parameter(self.bias.detach(), mesh, axis)
