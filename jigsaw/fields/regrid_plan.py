"""Plans of regridding a cut field: which rows travel, or which sums, and where the result is cut.  Integers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, product

import numpy as np

from jigsaw.errors import GridError
from jigsaw.fields.latlon import BandedMatrix
from jigsaw.geometry.cut import Cut, Interval, SplitRule, cut_points, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.matmul_grid import MatmulGrid
from jigsaw.geometry.stencil_rules import ceil_div

LAT_LON_DIMS = ("lat", "lon")


@dataclass(frozen=True)
class RegridPlan:
    """Plan of regridding a layout along `dims`, those of latitude and longitude.

    Every rank fetches its rows of `fetch`; the dims in `summed` go through the matmul core instead, where partial sums
    travel.  `out` is the layout of the result. `received` has the bytes that each rank receives, forward, in mesh
    order.
    """

    dims: tuple[int, int]
    out: Layout
    fetch: Layout
    summed: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def fetched(self) -> tuple[int, ...]:
        """Dims whose rows are all at hand after the fetch."""
        return tuple(d for d in self.dims if d not in self.summed)

    def box(self, dim: int, coord: MeshCoordinate) -> tuple[Interval, Interval]:
        """Return the target rows that the rank at `coord` makes along a fetched dim, and the source rows that it then
        has.
        """
        target, held = self.out.dim(dim)[0], self.fetch.dim(dim)[0]
        piece = self.out.piece(target, coord)
        return target.owned(piece), held.held[piece]

    @property
    def pairs(self) -> Layout:
        """Layout of (values, count) [2, ...] before the first sum."""
        stage = self.fetch
        for dim in self.fetched:
            stage = stage.replace_dim(dim, *self.out.dim(dim))
        return stage.insert(0, 2)


def choose_regrid_plan(
    layout: Layout,
    dims: tuple[int, int],
    bands: Sequence[BandedMatrix],
    splits: Mapping[str, SplitRule],
    itemsize: int,
) -> RegridPlan:
    """Choose the way of fewest bytes on the busiest rank; in a tie, fetch rows.

    Raises: `GridError` for dims that were flattened together.
    """
    for dim in dims:
        if len(layout.dim(dim)) > 1:
            raise GridError(
                f"regrid: dim {dim} of {layout} is {len(layout.dim(dim))} dims flattened together; unflatten it first"
            )
    out = fetch = layout
    for place, dim, band in zip(LAT_LON_DIMS, dims, bands, strict=True):
        cut = layout.dim(dim)[0]
        target = _result_cut(cut, len(band), splits.get(place))
        out = out.replace_dim(dim, target)
        fetch = fetch.replace_dim(dim, cut.holding([band.need(target.owned(i)) for i in range(cut.pieces)]))
    cut_dims = [d for d in dims if layout.is_cut(d)]
    choices = [c for n in range(len(cut_dims) + 1) for c in combinations(cut_dims, n)]
    ways = [_plan_with_sums(layout, dims, out, fetch, summed, itemsize) for summed in choices]
    return min(ways, key=lambda way: max(way.received))


def _plan_with_sums(
    layout: Layout, dims: tuple[int, int], out: Layout, fetch: Layout, summed: tuple[int, ...], itemsize: int
) -> RegridPlan:
    for dim in summed:
        fetch = fetch.replace_dim(dim, layout.dim(dim)[0].bare())
    received = [itemsize * _fetched_elements(layout, fetch, coord) for coord in layout.coords()]
    way = RegridPlan(dims, out, fetch, summed, ())
    stage = way.pairs
    for dim in summed:
        grid = contraction_grid(stage, dim + 1, out.dim(dim)[0])
        for at, coord in enumerate(layout.coords()):
            received[at] += max(itemsize, 4) * grid.received(coord)["y"]
        stage = stage.replace_dim(dim + 1, *out.dim(dim))
    return RegridPlan(dims, out, fetch, summed, tuple(received))


def _result_cut(cut: Cut, size: int, split: SplitRule | None) -> Cut:
    """Return the cut of a target dim: as asked, or in proportion to that of the source."""
    if split is not None:
        points = cut_points(size, cut.pieces, split)
    else:
        points = tuple(ceil_div(p * size, cut.size) for p in cut.points)
    return Cut(size, points, cut.axes) if cut.is_cut else whole_dim(size)


def _fetched_elements(source: Layout, target: Layout, coord: MeshCoordinate) -> int:
    """Return how many elements a rank needs and does not hold."""
    needed = held_count = 1
    for cut, wanted in zip(source.cuts, target.cuts, strict=True):
        piece = source.piece(cut, coord)
        start, stop = wanted.held[piece]
        needed *= stop - start
        held_count *= _shared_rows(cut.size, (start, stop), cut.inside(piece))
    return needed - held_count


@lru_cache(maxsize=4096)
def _shared_rows(size: int, need: Interval, held: Interval) -> int:
    """Return how many of the needed rows are held, on a dim that may wrap."""
    if need == held:
        return need[1] - need[0]
    return int(np.isin(np.arange(*need) % size, np.arange(*held) % size).sum())


@lru_cache(maxsize=512)
def contraction_grid(layout: Layout, dim: int, target: Cut) -> MatmulGrid:
    """Return the grid of a product that contracts the cut dim `dim`, whose result is cut as `target`.  The rest of the
    tile are the rows of X.
    """
    k = layout.dim(dim)[0].bare()
    axes = tuple(a for a in layout.cut_axes if a not in k.axes)
    rows: list[int] = []
    for places in product(*(range(layout.size_of(a)) for a in axes)):
        at = dict(zip(axes, places, strict=True))
        shape = layout.local_shape(tuple(at.get(name, 0) for name, _ in layout.axes))
        rows.append(math.prod(shape[:dim] + shape[dim + 1 :]))
    m = Cut(sum(rows), tuple(accumulate(rows, initial=0)), axes) if axes else whole_dim(sum(rows))
    layouts = [Layout(cuts, layout.axes) for cuts in ((m, k), (whole_dim(target.size), k), (m, target))]
    return MatmulGrid(m, k, whole_dim(target.size), *layouts)
