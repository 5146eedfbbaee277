"""Regridding of fields between lat-lon grids and grids of cells, conservative or bilinear, whole or cut into tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, combinations, product
from operator import attrgetter
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from jigsaw.comm.exchange import exchange_rows
from jigsaw.comm.matmul import grid_matmul
from jigsaw.errors import FieldError, GridError
from jigsaw.fields.cell_table import CellTable, FieldProduct, TablePlan
from jigsaw.fields.cell_weights import CellPlaces, CellsOrRows, cell_weights
from jigsaw.fields.latlon import REGRID_METHODS, BandedMatrix, latitude_rows, longitude_rows, regrid_weights
from jigsaw.geometry.cut import Cut, Interval, SplitRule, cut_points, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.matmul_grid import MatmulGrid
from jigsaw.geometry.stencil_rules import ceil_div
from jigsaw.tile.tile import Tile

LAT_LON_DIMS = ("lat", "lon")


@dataclass(frozen=True)
class RegridPlan:
    """Plan of regridding a layout along `dims`, those of latitude and longitude.

    Every rank fetches its rows of `fetch`; for dims in `summed` partial sums travel through the matmul core instead.
    `out` is the result's layout; `received` has the bytes that each rank receives, forward, in mesh order.
    """

    dims: tuple[int, int]
    out: Layout
    fetch: Layout
    summed: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def fetched(self) -> tuple[int, ...]:
        """Dims of which the rank has all needed rows after the fetch."""
        return tuple(d for d in self.dims if d not in self.summed)

    def box(self, dim: int, coord: MeshCoordinate) -> tuple[Interval, Interval]:
        """Return the target rows that the rank makes along a fetched dim, and the source rows that it then has."""
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
    layout: Layout, dims: tuple[int, int], bands: Sequence[BandedMatrix], splits: Mapping[str, SplitRule], itemsize: int
) -> RegridPlan:
    """Choose the way of fewest bytes on the busiest rank, rows in a tie; raise `GridError` for flattened dims."""
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
    if split is not None:
        points = cut_points(size, cut.pieces, split)
    else:
        points = tuple(ceil_div(p * size, cut.size) for p in cut.points)
    return Cut(size, points, cut.axes) if cut.is_cut else whole_dim(size)


def _fetched_elements(source: Layout, target: Layout, coord: MeshCoordinate) -> int:
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
    """Return the grid of a product over the cut dim `dim`, whose result is cut as `target`; all else are rows of X."""
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


LatLonGrid = tuple[Any, Any] | Mapping[str, Any]
AnyGrid = LatLonGrid | CellPlaces
TileOrTensor = TypeVar("TileOrTensor", Tensor, Tile)
# by place (0 lat, 1 lon): the target rows to make, the source rows here
RowsByPlace = Mapping[int, tuple[Interval, Interval]]

_NAN_RULES = ("keep", "skip")
_PRODUCT_COLUMNS = 64  # columns of a product's blocks, about: few zeros of the band, still a matmul


class TileBatch(Protocol):
    """Fields of a `jigsaw.io.Batch`, a dataclass of tiles, that are regridded."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def input(self) -> Tile: ...
    @property
    def target(self) -> Tile | None: ...
    @property
    def target_forcings(self) -> Tile | None: ...


LoaderBatch = TypeVar("LoaderBatch", bound=TileBatch)


def regrid(
    tile: TileOrTensor,
    source: AnyGrid,
    target: AnyGrid,
    method: str = "conservative",
    dims: tuple[int, ...] | None = None,
    nan: str = "keep",
    coverage: float = 0.0,
    split: SplitRule | Mapping[str, SplitRule] | None = None,
) -> TileOrTensor:
    """Return y = A x Bᵀ: `tile` (or a plain tensor), a field on the grid `source`, on the grid `target`.

    `Regridder` documents the method, its messages and errors; it does the same many times at the price of one plan.

    >>> fine = np.linspace(90, -90, 721), np.arange(0, 360, 0.25)
    >>> coarse = np.linspace(-88.5, 88.5, 60), np.arange(-180, 180, 3.0)
    >>> jigsaw.io.regrid(torch.ones(2, 721, 1440), fine, coarse).shape
    torch.Size([2, 60, 120])
    """
    return Regridder(source, target, method, dims, nan, coverage, split)(tile)


class Regridder:
    r"""Module from one grid to another: y = A x Bᵀ, with A along latitude and B along longitude, between rectilinear
    lat-lon grids. Where one of the grids has cells, a sparse matrix of weights takes the place of both.

    - `source`, `target`: (lat, lon) cell centers in degrees, or a mapping that has them under these names, such as
      ``dataset.whole_coords``; of cells ``dataset.grid``. Latitudes may rise or fall, longitudes lie in 0..360,
      -180..180 or any other turn; a grid that goes round the globe is periodic. The target may be a part of a regional
      source, never more;
    - `method`: ``"conservative"``, first order: the mean over each target cell, weighted by area (longitude times the
      sine of latitude). The area integral is that of the source. Cells end halfway between centers, and at the poles;
      of cells those of HEALPix, and of rings of equally spaced points (reduced Gaussian grids), have known edges.
      ``"bilinear"``: between the four centers around each target center; beyond the outermost row of a grid whose cells
      reach the pole, that row's values hold. From cells: between the corners of Delaunay's triangle (needs scipy);
    - `dims`: those of latitude and longitude, in this order, or that of cells; by default the last of x. The result's
      dims are in the place of the first;
    - `nan`: ``"keep"`` gives a missing value wherever a source value is missing; ``"skip"`` takes the mean of the
      present ones, and is missing where they are less than the share `coverage` of a cell, or nothing. A value that is
      not finite is missing;
    - `split`: the cuts of the result's dims, for both or by ``"lat"`` and ``"lon"``: a rule or explicit points (see
      `jigsaw.Layout`). By default they are in proportion to the cuts of the input. From or to cells the axes of all
      dims cut the first dim of the result, and `split` is for that one.

    A call takes a tile, or a plain tensor, and returns the same; gradients flow to the values that are present.  On
    load: ``for batch in map(regridder.batch, loader)``.  Sums are taken in float32 or wider, autocast or not.

    *Shapes*: x [..., lat, lon, ...] -> y [..., lat', lon', ...]. Per rank x as it is cut, halo included, and y cut by
    the same axes, without halo along these dims.
    *Sends*: along each cut dim, the fewer bytes on the busiest rank (`way`) of two.  One: the source rows that a rank's
    target rows use and that it does not hold. They are one or two a side where both grids run alike, in one exchange
    for both dims.  Two: partial sums of all target rows through the matmul core, ``2 (1-1/P) M R`` elements for R
    others a rank. These are values, and how much of each is present.  It wins where the grids run against each other
    (latitude flipped, longitude turned) and the target is coarse.  Backward, as many.  From and to cells: each row that
    a rank's targets use and that another owns, once, one message a pair of ranks; backward its gradient.
    *Raises*: `GridError` for invalid grids, a target beyond the source, or dims that do not fit; `FieldError` for an
    unknown method, `nan`, `coverage` or dtype.

    >>> globe = np.linspace(90, -90, 9), np.arange(16) * 22.5
    >>> coarse = np.linspace(-67.5, 67.5, 4), np.arange(8) * 45.0
    >>> to_coarse = jigsaw.io.Regridder(globe, coarse)
    >>> tile = jigsaw.shard(torch.ones(2, 9, 16), jigsaw.init_mesh(lat=1), (None, "lat", None))
    >>> to_coarse(tile).shape
    torch.Size([2, 4, 8])
    """

    def __init__(
        self,
        source: AnyGrid,
        target: AnyGrid,
        method: str = "conservative",
        dims: tuple[int, ...] | None = None,
        nan: str = "keep",
        coverage: float = 0.0,
        split: SplitRule | Mapping[str, SplitRule] | None = None,
    ) -> None:
        _check_regrid_options(method, nan, coverage)
        old_grid, new_grid = _parts_of_grid("source", source), _parts_of_grid("target", target)
        self.method, self.nan, self.coverage = method, nan, coverage
        self._ways: dict[tuple[Layout, int], RegridPlan] = {}
        self._tables: dict[tuple[Layout, int], TablePlan] = {}
        self._products: dict[tuple[Any, ...], BandProduct] = {}
        self.bands: tuple[BandedMatrix, ...] = ()
        self._table = None
        if isinstance(old_grid, CellPlaces) or isinstance(new_grid, CellPlaces):
            if isinstance(split, Mapping):
                raise GridError(
                    f"regrid: split={dict(split)!r} is by dim, and from or to cells it is for one; give a rule"
                )
            self._table = CellTable(cell_weights(old_grid, new_grid, method), split)
            self.sizes, self.result_sizes = self._table.entries.source_shape, self._table.entries.shape
        else:
            self.bands = tuple(regrid_weights(s, t, method) for s, t in zip(old_grid, new_grid, strict=True))
            self.sizes, self.result_sizes = (tuple(map(size, self.bands)) for size in (attrgetter("size"), len))
        self._splits = {} if self._table else _splits_by_place(split)
        self.dims = tuple(range(-len(self.sizes), 0)) if dims is None else tuple(dims)

    def __call__(self, x: TileOrTensor) -> TileOrTensor:
        dims = self._dims_of(tuple(x.shape), x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            y: Any = self._of_tile(x) if isinstance(x, Tile) else self._of_tensor(x, dims)
        return y

    def __repr__(self) -> str:
        sizes = [" x ".join(map(str, sizes)) for sizes in (self.sizes, self.result_sizes)]
        return f"Regridder({self.method}, {' to '.join(sizes)}, nan={self.nan!r})"

    def batch(self, batch: LoaderBatch) -> LoaderBatch:
        """Return a `jigsaw.io.Batch` with input, target and the target's forcings regridded; halos are used up."""
        target, forced = (None if tile is None else self(tile) for tile in (batch.target, batch.target_forcings))
        return replace(batch, input=self(batch.input), target=target, target_forcings=forced)

    def way(self, layout: Layout, dtype: torch.dtype = torch.float32) -> RegridPlan | TablePlan:
        """Return the plan for a tile of this layout: the result's layout, and the bytes that each rank receives."""
        return self._band_way(layout, dtype) if self._table is None else self._table_way(self._table, layout, dtype)

    def _table_way(self, table: CellTable, layout: Layout, dtype: torch.dtype) -> TablePlan:
        key = layout, dtype.itemsize
        if key not in self._tables:
            self._tables[key] = table.plan(layout, self._dims_of(layout.shape, dtype), dtype.itemsize)
        return self._tables[key]

    def _band_way(self, layout: Layout, dtype: torch.dtype) -> RegridPlan:
        key = layout, dtype.itemsize
        if key not in self._ways:
            lat, lon = self._dims_of(layout.shape, dtype)
            self._ways[key] = choose_regrid_plan(layout, (lat, lon), self.bands, self._splits, dtype.itemsize)
        return self._ways[key]

    # -- whole tensors and tiles ---------------------------------------------------------------------------------------

    def _of_tensor(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        if self._table is not None:
            return self._table.of_tensor(x, dims, self._judged_product)
        boxes: dict[int, tuple[Interval, Interval]] = {}
        for place, (dim, band) in enumerate(zip(dims, self.bands, strict=True)):
            need = band.need((0, len(band)))
            need = need if need[1] <= band.size else (0, band.size)
            x = x.narrow(dim, need[0], need[1] - need[0])
            boxes[place] = (0, len(band)), need
        return self._whole(x, dims, boxes)

    def _of_tile(self, tile: Tile) -> Tile:
        if self._table is not None:
            way = self._table_way(self._table, tile.layout, tile.dtype)
            return self._table.of_tile(tile, way, self._judged_product)
        way = self._band_way(tile.layout, tile.dtype)
        x = exchange_rows(tile.local, tile.layout, way.fetch, tile.mesh)
        boxes = {way.dims.index(d): way.box(d, tile.coordinate) for d in way.fetched}
        if not way.summed:
            return Tile(self._whole(x, way.dims, boxes), way.out, tile.mesh)
        wide = _as_wide(x)
        is_finite = wide.isfinite()
        pairs = torch.stack([torch.where(is_finite, wide, 0.0), self._counted(is_finite, wide.dtype)])
        y = Tile(self._products_of(pairs, [d + 1 for d in way.dims], boxes), way.pairs, tile.mesh)
        for dim in way.summed:
            y = self._sum(y, way.dims.index(dim), dim + 1, way.out.dim(dim)[0])
        return Tile(self._judged(*y.local.unbind(0)).to(tile.dtype), way.out, tile.mesh)

    # -- products ------------------------------------------------------------------------------------------------------

    def _whole(self, x: Tensor, dims: Sequence[int], boxes: RowsByPlace) -> Tensor:
        return self._judged_product(x, partial(self._products_of, dims=dims, boxes=boxes))

    def _judged_product(self, x: Tensor, multiply: FieldProduct) -> Tensor:
        wide = _as_wide(x)
        # checked in one pass; if the sum overflows, the slower path gives the same result
        if bool(wide.detach().sum().isfinite()):
            return multiply(wide).to(x.dtype)
        is_finite = wide.isfinite()
        values = multiply(torch.where(is_finite, wide, 0.0))
        count = multiply(self._counted(is_finite, wide.dtype))
        return self._judged(values, count).to(x.dtype)

    def _products_of(self, x: Tensor, dims: Sequence[int], boxes: RowsByPlace) -> Tensor:
        for place, (out, need) in sorted(boxes.items(), key=lambda box: _row_growth(*box[1])):
            key = place, out, need, x.dtype, x.device
            if key not in self._products:
                self._products[key] = BandProduct.of(self.bands[place], out, need, x)
            x = self._products[key](x, dims[place])
        return x

    def _sum(self, tile: Tile, place: int, dim: int, target: Cut) -> Tile:
        band, cut = self.bands[place], tile.layout.dim(dim)[0]
        own_rows = slice(*cut.owned(tile.layout.piece(cut, tile.coordinate)))
        w = torch.from_numpy(band.dense((0, len(band)), (0, band.size))[:, own_rows].copy()).to(tile.local)
        x = tile.local.movedim(dim, -1)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y = grid_matmul(rows, w, contraction_grid(tile.layout, dim, target), tile.mesh)
        y = y.reshape(*x.shape[:-1], y.shape[-1]).movedim(-1, dim)
        return Tile(y, tile.layout.replace_dim(dim, target), tile.mesh)

    # -- missing values ------------------------------------------------------------------------------------------------

    def _counted(self, is_finite: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the counts to sum besides the values: of present values, for the mean, or of missing ones."""
        return (is_finite if self.nan == "skip" else ~is_finite).to(dtype)

    def _judged(self, values: Tensor, count: Tensor) -> Tensor:
        if self.nan == "keep":
            return torch.where(count > 0, math.nan, values)
        least = max(self.coverage - 1e-5, 1e-6)  # a little less than asked, because a share is a sum of rounded weights
        return torch.where(count >= least, values / count.clamp(min=least), math.nan)

    def _dims_of(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
        n, count = len(shape), len(self.sizes)
        dims = tuple(d % n for d in self.dims) if all(-n <= d < n for d in self.dims) else ()
        if len(set(dims)) != count or len(self.dims) != count:
            number = "a dim" if count == 1 else "two dims"
            raise GridError(f"regrid: dims={self.dims} must be {number} of a tensor of shape {tuple(shape)}")
        if not dtype.is_floating_point:
            remedy = "regrid x.real and x.imag" if dtype.is_complex else "cast them to float32 first"
            raise FieldError(f"regrid: {dtype} values cannot be averaged; {remedy}")
        for dim, name, size in zip(dims, LAT_LON_DIMS if count == 2 else ("cells",), self.sizes, strict=True):
            if shape[dim] != size:
                raise GridError(
                    f"regrid: dim {dim} of shape {tuple(shape)} has {shape[dim]} rows, but the source grid has "
                    f"{size} in {name}; pass the grid that the field is on, or other dims= than {self.dims}"
                )
        return dims


@dataclass(frozen=True)
class BandProduct:
    """Product of some rows of a band and the source rows at hand, in blocks: their columns and weights."""

    blocks: tuple[tuple[Interval, Tensor], ...]

    @classmethod
    def of(cls, band: BandedMatrix, out: Interval, need: Interval, like: Tensor) -> BandProduct:
        rows = max(8, int(_PRODUCT_COLUMNS * _row_growth(out, need)))
        blocks: list[tuple[Interval, Tensor]] = []
        for start in range(out[0], max(out[1], out[0] + 1), rows):
            block = start, min(start + rows, out[1])
            reads = band.need(block)
            first = (reads[0] - need[0]) % band.size
            if first + reads[1] - reads[0] > need[1] - need[0]:  # the rows wrap around within a whole dim
                reads, first = need, 0
            with torch.inference_mode(False):  # kept for later calls, which may need gradients
                w = torch.from_numpy(band.dense(block, reads)).to(like)
            blocks.append(((first, first + reads[1] - reads[0]), w))
        return cls(tuple(blocks))

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        if dim == x.ndim - 1:
            return _join_products([x[..., slice(*columns)] @ w.mT for columns, w in self.blocks], -1)
        x = x.movedim(dim, -2)
        return _join_products([w @ x[..., slice(*columns), :] for columns, w in self.blocks], -2).movedim(-2, dim)


def _join_products(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _row_growth(out: Interval, need: Interval) -> float:
    """Return the number of target rows for each source row."""
    return (out[1] - out[0]) / max(need[1] - need[0], 1)


def _as_wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parts_of_grid(which: str, grid: AnyGrid) -> CellsOrRows:
    if isinstance(grid, CellPlaces):
        return grid
    if isinstance(grid, Mapping):
        if not set(LAT_LON_DIMS) <= set(grid):
            raise GridError(f"{which} has the coordinates {sorted(grid)}; regrid needs 'lat' and 'lon'")
        grid = grid["lat"], grid["lon"]
    if len(grid) != 2:
        raise GridError(f"{which} must be (lat, lon), two coordinates, but has {len(grid)}")
    try:
        return latitude_rows(grid[0]), longitude_rows(grid[1])
    except GridError as error:
        raise GridError(f"regrid: {which}: {error}") from None


def _check_regrid_options(method: str, nan: str, coverage: float) -> None:
    if method not in REGRID_METHODS:
        raise FieldError(f"regrid: method={method!r} must be one of {REGRID_METHODS}")
    if nan not in _NAN_RULES:
        raise FieldError(f"regrid: nan={nan!r} must be one of {_NAN_RULES}")
    if not 0.0 <= coverage <= 1.0 or (coverage and nan != "skip"):
        raise FieldError(
            f"regrid: coverage={coverage} must be a share, 0 to 1, and is for nan='skip' alone, not {nan!r}"
        )


def _splits_by_place(split: SplitRule | Mapping[str, SplitRule] | None) -> Mapping[str, SplitRule]:
    if split is None:
        return {}
    if not isinstance(split, Mapping):
        return dict.fromkeys(LAT_LON_DIMS, split)
    wrong = [name for name in split if name not in LAT_LON_DIMS]
    if wrong:
        raise GridError(f"regrid: split names {wrong[0]!r}; it is for 'lat' and 'lon'")
    return split
