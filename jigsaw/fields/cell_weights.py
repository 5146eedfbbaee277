"""Weights between grids of cells and lat-lon grids, in float64: shares of areas, or of the corners of a triangle.

A cell of a lat-lon grid, or of a ring of a reduced Gaussian grid, is a rectangle in longitude and sine of latitude.
In HEALPix's own plane, which keeps areas, its cells are squares and such rectangles have straight edges.  So the areas
that two cells share are exact but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError
from jigsaw.fields.latlon import CIRCLE, GridRows, LatLonValues, latitude_rows, regrid_weights
from jigsaw.geometry.healpix import healpix_cells_of_plane, healpix_corners

Integers = NDArray[np.int64]
_SAME_RING = 1e-4  # degrees by which latitudes of one ring may differ
_SLIVER = 1e-9  # share of a cell: smaller ones are rounding errors
_NOISE_OF_FLOAT32 = 2 * CIRCLE * float(np.finfo(np.float32).eps)  # degrees by which such coordinates may be off
_MOST_NOISE = 1e-3  # share of a cell: larger ones are kept, however rough the coordinates are
_BEYOND = 1e-3  # share of a target cell that the source need not cover


@runtime_checkable
class CellPlaces(Protocol):
    """Grid of cells that has one dim, such as ``dataset.grid``: the degrees of each; of HEALPix its numbers."""

    @property
    def lat(self) -> LatLonValues: ...
    @property
    def lon(self) -> LatLonValues: ...
    @property
    def nside(self) -> int | None: ...
    @property
    def nested(self) -> bool | None: ...
    @property
    def numbers(self) -> Integers | None: ...


RectilinearRows = tuple[GridRows, GridRows]
CellsOrRows = CellPlaces | RectilinearRows


@dataclass(frozen=True, eq=False)
class WeightEntries:
    """Weights of source cells for target cells, by target and then source; those of a target sum to 1.

    `shape` is that of the targets and `source_shape` that of the sources: (lat, lon) or (cells,), flattened in entries.
    """

    shape: tuple[int, ...]
    source_shape: tuple[int, ...]
    target: Integers
    source: Integers
    value: LatLonValues


def shape_of_grid(grid: CellsOrRows) -> tuple[int, ...]:
    """Return the sizes of the dims of a grid."""
    return (len(grid.lat),) if isinstance(grid, CellPlaces) else (len(grid[0]), len(grid[1]))


def cell_weights(source: CellsOrRows, target: CellsOrRows, method: str) -> WeightEntries:
    """Return the weights between two grids of which one has cells.  Raises: `GridError` where the method has none, and
    for cells without a place.
    """
    for grid in (source, target):
        if isinstance(grid, CellPlaces) and not (np.isfinite(grid.lat) & np.isfinite(grid.lon)).all():
            raise GridError("regrid: some cells have no finite latitude and longitude; leave them out")
    if method == "conservative":
        entries = _shared_areas(source, target)
    elif isinstance(source, CellPlaces):
        entries = _shares_of_corners(source, target)
    else:
        entries = _shares_of_rows(source, target)
    shape, source_shape = shape_of_grid(target), shape_of_grid(source)
    size = int(np.prod(source_shape))
    keys, place = np.unique(entries[0] * size + entries[1], return_inverse=True)
    value = np.bincount(place.reshape(-1), entries[2], len(keys))
    rows, columns = keys // size, keys % size
    sums = np.bincount(rows, value, int(np.prod(shape)))
    # a point moves between cells of the source, an edge cuts those of the target
    width = _cell_width(target if method == "conservative" else source)
    noise = min(_coordinate_noise(source, target) / width, _MOST_NOISE) if width else 0.0
    kept = value > max(_SLIVER, noise) * sums[rows]
    rows, columns, value = rows[kept], columns[kept], value[kept]
    return WeightEntries(shape, source_shape, rows, columns, value / np.bincount(rows, value, len(sums))[rows])


def _coordinate_noise(*grids: CellsOrRows) -> float:
    """Return the degrees by which the coordinates of two grids may be off.

    Those of cells are in float64, and tell of themselves if they were stored in float32: then this changes none. Round
    numbers, such as quarters of a degree, do not tell, and count as exact.
    """
    noise = 0.0
    for grid in grids:
        if not isinstance(grid, CellPlaces):
            noise = max(noise, *(rows.noise for rows in grid))
        elif grid.nside is None:
            degrees = np.concatenate([grid.lat, grid.lon])
            is_single = np.array_equal(degrees.astype(np.float32), degrees)
            are_round = not (degrees * 1024 % 1).any()
            noise = max(noise, _NOISE_OF_FLOAT32 if is_single and not are_round else 0.0)
    return noise


def _cell_width(grid: CellsOrRows) -> float:
    """Return about how many degrees a cell of a grid is wide: that of rows and columns that are closest, else a mean
    over the part of the sphere between the least and the greatest degrees.
    """
    if not isinstance(grid, CellPlaces):
        return float(min(np.diff(rows.edges).min() for rows in grid))
    area = np.ptp(np.sin(np.radians(grid.lat))) * np.ptp(np.radians(grid.lon % CIRCLE))
    return float(np.degrees(np.sqrt(area / len(grid.lat))))


Entries = tuple[Integers, Integers, LatLonValues]  # targets, sources, weights or areas


def _join_entries(parts: list[Entries]) -> Entries:
    none = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    targets, sources, values = (np.concatenate(columns) for columns in zip(none, *parts, strict=True))
    return targets, sources, values


# -- between rows and columns -----------------------------------------------------------------------------------------


def _shares_of_rows(source: RectilinearRows, target: CellsOrRows) -> Entries:
    """Interpolate at each cell between the two rows and the two columns around it."""
    assert isinstance(target, CellPlaces)
    columns = source[1]
    first = columns.centers[0] - columns.noise
    shares: list[tuple[Integers, LatLonValues]] = []
    for rows, points in zip(source, (target.lat, first + (target.lon - first) % CIRCLE), strict=True):
        order = np.argsort(points, kind="stable")
        band = regrid_weights(rows, GridRows(rows.name, points[order], False, False, rows.noise), "bilinear")
        at, values = np.empty((len(points), band.values.shape[1]), np.int64), np.empty_like(band.values)
        at[order] = (band.first[:, None] + np.arange(at.shape[1])) % band.size
        values[order] = band.values
        shares.append((at, values))
    (rows_at, a), (columns_at, b) = shares
    sources = rows_at[:, :, None] * len(columns) + columns_at[:, None, :]
    values = a[:, :, None] * b[:, None, :]
    targets = np.broadcast_to(np.arange(len(a))[:, None, None], values.shape)
    return targets.reshape(-1), sources.reshape(-1), values.reshape(-1)


# -- within triangles -------------------------------------------------------------------------------------------------


def _shares_of_corners(source: CellPlaces, target: CellsOrRows) -> Entries:
    """Interpolate within the triangle of source points, Delaunay's on the sphere, that each target point lies in."""
    spatial: Any = _scipy_spatial()
    points, wanted = _unit_points(source.lat, source.lon), _unit_points(*_degrees_of(target))
    try:
        hull = spatial.ConvexHull(points)  # of points on a sphere it is Delaunay's triangulation
    except spatial.QhullError as error:
        raise GridError(f"regrid: the {len(points)} source cells have no triangles between them: {error}") from None
    corners, beside = hull.simplices.astype(np.int64), hull.neighbors
    # the faces that close the open side of a region have the sphere's center on their outer side
    is_lid = hull.equations[:, 3] > -1e-9
    triangle_of_point = np.zeros(len(points), np.int64)
    triangle_of_point[corners[~is_lid]] = np.flatnonzero(~is_lid)[:, None]
    at = triangle_of_point[spatial.cKDTree(points).query(wanted)[1]]
    weights, walking = np.zeros((len(wanted), 3)), np.arange(len(wanted))
    for _ in range(len(corners)):
        a, b, c = np.moveaxis(points[corners[at[walking]]], 1, 0)
        p, whole = wanted[walking], _volume(a, b, c)
        sign = np.where(whole < 0, -1.0, 1.0)[:, None]
        shares = np.stack([_volume(p, b, c), _volume(a, p, c), _volume(a, b, p)], -1) * sign
        lowest = shares.argmin(1)
        is_inside = (shares[np.arange(len(p)), lowest] >= -1e-13) & ~is_lid[at[walking]]
        weights[walking[is_inside]] = np.maximum(shares[is_inside], 0)
        # walk on to the triangle beyond the edge that the point is farthest behind
        walking, lowest = walking[~is_inside], lowest[~is_inside]
        if len(walking) == 0:
            break
        at[walking] = beside[at[walking], lowest]
        if is_lid[at[walking]].any():
            lost = int(walking[is_lid[at[walking]]][0])
            lat, lon = (float(degrees[lost]) for degrees in _degrees_of(target))
            raise GridError(
                f"regrid: the target at latitude {lat:g}, longitude {lon:g} lies beyond the source's cells; nothing is "
                "extrapolated: crop the target, or give a larger source"
            )
    weights /= weights.sum(1, keepdims=True)
    return np.repeat(np.arange(len(wanted)), 3), corners[at].reshape(-1), weights.reshape(-1)


def _scipy_spatial() -> Any:
    try:
        return import_module("scipy.spatial")
    except ImportError:
        raise GridError("regrid: 'bilinear' of cells needs scipy, which is missing: pip install scipy") from None


def _degrees_of(grid: CellsOrRows) -> tuple[LatLonValues, LatLonValues]:
    """Return latitude and longitude of each cell, in the order in which the grid is stored."""
    if isinstance(grid, CellPlaces):
        return grid.lat, grid.lon
    lat, lon = (rows.centers[::-1] if rows.falling else rows.centers for rows in grid)
    return np.repeat(lat, len(lon)), np.tile(lon, len(lat))


def _unit_points(lat: LatLonValues, lon: LatLonValues) -> LatLonValues:
    phi, theta = np.radians(lat), np.radians(lon)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], axis=-1)


def _volume(a: LatLonValues, b: LatLonValues, c: LatLonValues) -> LatLonValues:
    return (a * np.cross(b, c)).sum(-1)


# -- shared areas -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CellBand:
    """Cells between two sines of latitude: their edges in longitude, rising, and their numbers."""

    low: float
    high: float
    edges: LatLonValues
    cells: Integers


def _shared_areas(source: CellsOrRows, target: CellsOrRows) -> Entries:
    """Return the areas that target and source cells share, as parts of 1 for the whole sphere."""
    if _has_healpix_numbers(source) and _has_healpix_numbers(target):
        raise GridError(
            "regrid: method='conservative' from HEALPix to HEALPix is not made; 4 cells in nested order lie in one of "
            "the next level, so take their mean, or repeat each"
        )
    if isinstance(target, CellPlaces) and _has_healpix_numbers(target):
        sources, targets, areas = _areas_in_healpix(list(_bands_of(source)), target)
    elif isinstance(source, CellPlaces) and _has_healpix_numbers(source):
        targets, sources, areas = _areas_in_healpix(list(_bands_of(target)), source)
    else:
        targets, sources, areas = _areas_in_bands(list(_bands_of(target)), list(_bands_of(source)))
    size = int(np.prod(shape_of_grid(target)))
    covered, whole = np.bincount(targets, areas, size), _areas_of(target)
    if (covered < (1 - _BEYOND) * whole).any():
        lost = int(np.argmax(covered < (1 - _BEYOND) * whole))
        lat, lon = (float(degrees[lost]) for degrees in _degrees_of(target))
        raise GridError(
            f"regrid: the source covers {covered[lost] / whole[lost]:.1%} of the target cell at latitude {lat:g}, "
            f"longitude {lon:g}; nothing is extrapolated: crop the target, or give a larger source"
        )
    return targets, sources, areas


def _has_healpix_numbers(grid: CellsOrRows) -> bool:
    return isinstance(grid, CellPlaces) and grid.nside is not None


def _areas_of(grid: CellsOrRows) -> LatLonValues:
    if isinstance(grid, CellPlaces) and grid.nside is not None:
        return np.full(len(grid.lat), 1 / (12 * grid.nside**2))
    areas = np.zeros(int(np.prod(shape_of_grid(grid))))
    for band in _bands_of(grid):
        areas[band.cells] = (band.high - band.low) / 2 * np.diff(band.edges) / CIRCLE
    return areas


def _bands_of(grid: CellsOrRows) -> Iterator[CellBand]:
    """Yield the rows of a lat-lon grid, or the rings of cells: from the south, cells between edges that lie halfway."""
    if not isinstance(grid, CellPlaces):
        lat, lon = grid
        sines, columns = np.sin(np.radians(lat.edges)), np.arange(len(lon))[:: -1 if lon.falling else 1]
        for row in range(len(lat)):
            stored = len(lat) - 1 - row if lat.falling else row
            yield CellBand(sines[row], sines[row + 1], lon.edges, stored * len(lon) + columns)
        return
    order = np.argsort(grid.lat, kind="stable")
    starts = np.flatnonzero(np.diff(grid.lat[order], prepend=-CIRCLE) > _SAME_RING)
    rings = np.split(order, starts[1:])
    lats = [float(grid.lat[ring].mean()) for ring in rings]
    if len(rings) < 2:
        raise GridError(f"regrid: the {len(order)} cells lie on one circle of latitude; use 'bilinear', or more rows")
    sines = np.sin(np.radians(latitude_rows(lats).edges))
    for at, ring in enumerate(rings):
        cells = ring[np.argsort(grid.lon[ring] % CIRCLE, kind="stable")]
        lon, step = grid.lon[cells] % CIRCLE, CIRCLE / len(ring)
        apart = np.diff(lon, append=lon[0] + CIRCLE)
        if (len(ring) < 3 and abs(lats[at]) < 90 - _SAME_RING) or (np.abs(apart - step) > 1e-2 * step).any():
            raise GridError(
                "regrid: 'conservative' needs the edges of cells, which are known of HEALPix, and of rings of points "
                f"equally far apart (reduced Gaussian grids); the {len(ring)} cells at latitude {lats[at]:g} are not "
                "such a ring; use 'bilinear'"
            )
        edges = lon[0] + (np.arange(len(ring) + 1) - 0.5) * step
        yield CellBand(sines[at], sines[at + 1], edges, cells)


def _areas_in_bands(bands: list[CellBand], others: list[CellBand]) -> Entries:
    """Return the areas that the cells of two grids of bands share."""
    parts: list[Entries] = []
    lows, highs = (np.array([getattr(other, end) for other in others]) for end in ("low", "high"))
    for band in bands:
        for at in np.flatnonzero((lows < band.high) & (highs > band.low)).tolist():
            other = others[at]
            height = (min(band.high, other.high) - max(band.low, other.low)) / 2
            start, stop = band.edges[0], band.edges[-1]
            turned = start + (other.edges - start) % CIRCLE
            points = np.unique(np.concatenate([band.edges, turned[turned < stop]]))
            middle = (points[:-1] + points[1:]) / 2
            own_cells = np.searchsorted(band.edges, middle, "right") - 1
            theirs = np.searchsorted(other.edges, other.edges[0] + (middle - other.edges[0]) % CIRCLE, "right") - 1
            shared = theirs < len(other.cells)
            areas = np.diff(points) / CIRCLE * height
            parts.append((band.cells[own_cells[shared]], other.cells[theirs[shared]], areas[shared]))
    return _join_entries(parts)


def _areas_in_healpix(bands: list[CellBand], grid: CellPlaces) -> Entries:
    """Return the areas that the cells of bands share with those of HEALPix."""
    assert grid.nside is not None
    number_of = None
    if grid.numbers is not None:
        number_of = np.full(12 * grid.nside**2, -1)
        number_of[grid.numbers] = np.arange(len(grid.numbers))
    parts: list[Entries] = []
    for band in bands:
        for corners, rectangles in healpix_corners(grid.nside, band.low, band.high, band.edges):
            pieces, squares, areas = _squares_in_quadrangles(corners)
            cells = healpix_cells_of_plane(grid.nside, bool(grid.nested), squares)
            if number_of is not None:
                cells = number_of[cells]
            own = cells >= 0
            parts.append((band.cells[rectangles[pieces[own]]], cells[own], areas[own] / (12 * grid.nside**2)))
    return _join_entries(parts)


def _squares_in_quadrangles(corners: LatLonValues) -> tuple[Integers, Integers, LatLonValues]:
    """Return which unit squares of a plane, [n, 2], convex quadrangles [m, 4, 2] share areas with, and these."""
    low, high = np.floor(corners.min(1) + 1e-12), np.ceil(corners.max(1) - 1e-12)
    sizes = np.maximum(high - low, 1).astype(np.int64)
    counts = sizes.prod(1)
    pieces = np.repeat(np.arange(len(corners)), counts)
    place = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    squares = low[pieces].astype(np.int64) + np.stack([place // sizes[pieces, 1], place % sizes[pieces, 1]], -1)
    x, y = np.moveaxis(corners[pieces] - squares[:, None], -1, 0)
    areas = np.abs(sum(_area_below_edge(x[:, i], y[:, i], x[:, i - 1], y[:, i - 1]) for i in range(4)))
    kept = areas > 1e-14
    return pieces[kept], squares[kept], areas[kept]


def _area_below_edge(x: LatLonValues, y: LatLonValues, to_x: LatLonValues, to_y: LatLonValues) -> LatLonValues:
    """Return the signed area between an edge and y = 0 within the unit square: Green's theorem, edge by edge."""
    run = to_x - x
    is_steep = np.abs(run) < 1e-14
    slope = (to_y - y) / np.where(is_steep, 1.0, run)
    ends = [np.clip(end, 0, 1) for end in (x, to_x)]
    first, last = (y + (end - x) * slope for end in ends)
    inside = [np.clip(value, 0, 1) for value in (first, last)]
    above = [np.maximum(value - 1, 0) for value in (first, last)]
    rise = last - first
    is_flat = np.abs(rise) < 1e-12
    passed = (inside[0] + inside[1]) / 2 * (inside[1] - inside[0]) + above[1] - above[0]
    height = np.where(is_flat, (inside[0] + inside[1]) / 2, passed / np.where(is_flat, 1.0, rise))
    return np.where(is_steep, 0.0, height * (ends[1] - ends[0]))
