"""Functions of a row and its neighbors: diff, gradient, trapezoid, cumulative_trapezoid.

The first rows of the next piece come from the rank that has them; a result along a cut dim is cut where its input is.

>>> tile = jigsaw.shard(torch.tensor([0.0, 1.0, 4.0, 9.0]), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.diff().local, torch.trapezoid(tile).item()
(tensor([1., 3., 5.]), 9.5)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jigsaw.comm.exchange import exchange_rows
from jigsaw.geometry.cut import Cut
from jigsaw.ops.along import run_along_dim
from jigsaw.ops.joining import join_tiles
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.whole_dims import check_by_torch, with_contiguous_dim
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory


def _windows_of_rows(input: Tile, dim: int, more: int) -> tuple[Tensor, Cut]:
    """Return for each row of the result, which has `more` rows less, its row of a cut dim and `more` after it, and the
    cut.

    Three ranks, 7 rows cut at 0, 3, 5, 7, one row more: the 6 rows are cut at 0, 3, 5, 6, and made of rows 0 to 3, 3 to
    5 and 5 to 6.

    *Sends*: `more` rows a rank; backward as many.
    """
    tile = with_contiguous_dim(input.owned(), dim)
    (cut,) = tile.layout.dim(dim)
    size = max(cut.size - more, 0)
    points = tuple(min(p, size) for p in cut.points)
    result = Cut(size, points, cut.axes)
    needed = [(a, b + more) if a < b else (a, a) for a, b in result.held]
    target = tile.layout.replace_dim(dim, cut.holding(needed))
    return exchange_rows(tile.local, tile.layout, target, tile.mesh), result


@implements_torch(torch.diff, either=("input", "prepend", "append"))
def _diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return differences of neighbors along `dim`, `n` times; *Sends*: `n` rows of a cut dim a rank."""
    parts = [t for t in (prepend, input, append) if t is not None]
    if any(t.ndim != input.ndim for t in parts):
        raise RuntimeError(f"diff of shapes {[tuple(t.shape) for t in parts]}: prepend and append need as many dims")
    # for n = 0 torch returns the input without what is appended
    tile = join_tiles(parts, dim) if len(parts) > 1 and n else input
    (at,) = reduced_dims(tile, dim)
    if not tile.layout.is_cut(at) or n == 0:
        return run_along_dim(torch.diff, tile, at, n, at)
    check_by_torch(torch.diff, tile, at, n, at)
    rows, cut = _windows_of_rows(tile, at, n)
    local = in_own_memory(torch.diff(rows, n, at), tile)  # without rows torch returns its input
    return Tile(local, tile.layout.without_halo().replace_dim(at, cut), tile.mesh)


@implements_torch(torch.gradient, either=("spacing",))
def _gradient_along_dims(input: Tile, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> tuple[Any, ...]:
    """Return the slope at each row, of first or second order at the ends; *Sends*: rows of neighbors, as joins do."""
    torch.gradient(input.local.new_zeros(2))  # only to raise torch's own errors
    dims = reduced_dims(input, dim)
    spacings: Sequence[Any] = spacing if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
    if len(spacings) != len(dims) or edge_order not in (1, 2):
        raise RuntimeError(
            f"gradient along {len(dims)} dims: spacing= has {len(spacings)} entries, edge_order={edge_order}; it takes "
            "a number, or an entry for each dim, and order 1 or 2"
        )
    for d, between in zip(dims, spacings, strict=True):
        size = input.shape[d]
        if size <= edge_order:
            raise RuntimeError(f"gradient along dim {d} of {size} rows: edge_order={edge_order} needs one more")
        if isinstance(between, Tensor) and between.ndim and tuple(between.shape) != (size,):
            raise RuntimeError(f"gradient: {tuple(between.shape)} places for the {size} rows of dim {d}")
    return tuple(_slopes(input, d, between, edge_order) for d, between in zip(dims, spacings, strict=True))


def _slopes(x: Any, dim: int, between: Any, order: int) -> Any:
    """Return the slopes between neighbors, each weighted with the distance of the other."""
    step = x.diff(dim=dim)
    if not isinstance(between, Tensor) or not between.ndim:
        slope = step / (1 if between is None else between)
        width: Any = torch.ones(x.shape[dim] - 1, dtype=slope.real.dtype, device=x.device)
        width = width.reshape(-1, *[1] * (x.ndim - dim - 1))
    else:
        width = between.diff().reshape(-1, *[1] * (x.ndim - dim - 1))
        slope = step / width

    def rows(of: Any, first: int, count: int) -> Any:
        at = of.ndim - (x.ndim - dim)
        return of.narrow(at, first % of.shape[at], count)

    n = x.shape[dim] - 2
    low, high = rows(slope, 0, n), rows(slope, 1, n)
    below, above = rows(width, 0, n), rows(width, 1, n)
    inner = (above * low + below * high) / (below + above)
    first, last = rows(slope, 0, 1), rows(slope, -1, 1)
    if order == 2:
        second, before = rows(slope, 1, 1), rows(slope, -2, 1)
        a, b, c, d = rows(width, 0, 1), rows(width, 1, 1), rows(width, -2, 1), rows(width, -1, 1)
        first, last = first + (first - second) * a / (a + b), last + (last - before) * d / (c + d)
    return join_tiles([first, inner, last] if n else [first, last], dim)


def _areas_between_rows(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """Return the area of the trapezoid between each row and the next."""
    if not isinstance(y, Tile) or not y.layout.is_cut(dim):  # a plain tensor is whole
        count = max(y.shape[dim] - 1, 0)
        middle = (y.narrow(dim, y.shape[dim] - count, count) + y.narrow(dim, 0, count)) / 2
    else:
        rows, cut = _windows_of_rows(y, dim, 1)
        count = max(rows.shape[dim] - 1, 0)
        local = (rows.narrow(dim, min(1, rows.shape[dim]), count) + rows.narrow(dim, 0, count)) / 2
        middle = Tile(local, y.layout.without_halo().replace_dim(dim, cut), y.mesh)
    if x is None:
        return middle * dx
    widths = torch.diff(x, dim=0 if x.ndim == 1 else dim - y.ndim)
    return middle * (widths.reshape((-1, *[1] * (y.ndim - dim - 1))) if x.ndim == 1 else widths)


def _checked_trapezoids(y: Any, x: Any, dim: int) -> int:
    at = dim % max(y.ndim, 1) if -y.ndim <= dim < y.ndim else reduced_dims(y, dim)[0]
    if x is not None and x.ndim == 1 and len(x) != y.shape[at]:
        raise RuntimeError(f"trapezoid: x has {len(x)} places, but y has {y.shape[at]} rows along dim {at}")
    return at


@implements_torch(torch.trapezoid, torch.trapz, either=("y", "x", "dx"))
def _trapezoid(y: Any, x: Any = None, *, dx: Any = 1.0, dim: int = -1) -> Any:
    """Return the integral along `dim` by trapezoids; *Sends*: one row of a cut dim a rank, and what a sum sends."""
    at = _checked_trapezoids(y, x, dim)
    # without rows torch returns zeros that require no gradient
    return _areas_between_rows(y, x, dx, at).sum(at) if y.shape[at] else y.detach().sum(at)


@implements_torch(torch.cumulative_trapezoid, either=("y", "x", "dx"))
def _cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1.0, dim: int = -1) -> Any:
    """Return the integral up to each row; *Sends*: one row of a cut dim a rank, and what a cumulative sum sends."""
    at = _checked_trapezoids(y, x, dim)
    return _areas_between_rows(y, x, dx, at).cumsum(at)
