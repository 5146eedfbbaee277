"""Grid of cells: where each lies, how large it is, and which are beside it, as a store describes them.

- HEALPix, by CF 1.13's grid mapping (``grid_mapping_name = "healpix"``, ``refinement_level``, ``indexing_scheme``), or
  the older ``healpix_nside`` and ``healpix_order``. By xdggs' coordinate (``grid_name = "healpix"``, ``level``), or the
  attribute ``dggs`` of the store or an array (zarr-conventions). The coordinate along the dim has the numbers of the
  cells, which may be some of the sphere's only;
- any others by the latitude and the longitude of each, in degrees or radians (ICON, reduced Gaussian grids, stations);
  who is beside whom by UGRID's ``face_face_connectivity`` or ICON's ``neighbor_cell_index``, where a store has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, ShardingError
from jigsaw.geometry.curve import curve_order
from jigsaw.geometry.healpix import healpix_degrees, healpix_neighbors
from jigsaw.geometry.neighbors import Neighbors, points_on_sphere
from jigsaw.io.arguments import checked_mapping
from jigsaw.io.series.coords import CELL_ROLE, SOURCE_PLACES, StoreCoordinates, decoded_coordinate, is_healpix
from jigsaw.io.series.row_order import region_ends
from jigsaw.io.series.times import is_whole_number

if TYPE_CHECKING:
    from jigsaw.io.formats.store import StoreSource
    from jigsaw.io.series.store_survey import StoreSurvey, StoreVariable

CellValues = NDArray[np.float64]
CELL_ORDERS = ("store", "curve")
"""Orders of cells that `open` and `convert` give."""
_SCHEMES = {"nested": True, "nest": True, "ring": False}
_KILOMETERS = re.compile(r"(\d+(?:\.\d+)?) ?km")
_EARTH_RADIUS = 6371.0  # km
_ROUNDED_OFF = 1e-4  # degrees: what a coordinate in float32 or radians may lie beyond the end of a region
_WIDEST_GAP = 60.0  # degrees: from a corner of a region to its point, where points lie all over the globe


@dataclass(frozen=True, eq=False)
class CellGrid:
    """Places of the cells of a dataset, all of them and in its order; see `jigsaw.io.Dataset.grid`.

    `nside` and `nested` are those of HEALPix, else None; `numbers` are the cells' HEALPix numbers, None where they
    count from 0 on. `variables` are the arrays of the store that describe the grid, and `table` reads its neighbors.
    `source_places` say where each cell was before it was ordered along a curve, or a region was taken. `boundary_mask`
    is True for the cells around a region that was opened with a boundary: [cells]; None without one.

    >>> data = jigsaw.io.open("cells.zarr", mesh={"cell": 2})
    >>> data.grid
    CellGrid(48 cells, HEALPix nside 2, nested)
    >>> data.grid.lat[:3].round(1), data.grid.neighbors().degree
    (array([19.5, 41.8, 41.8]), 8)
    >>> jigsaw.io.open("cells.zarr", mesh={"cell": 2}, region={"lat": (0, 90)}).grid
    CellGrid(28 cells, HEALPix nside 2, nested)
    >>> jigsaw.io.open("cells.zarr", mesh={"cell": 2}, region={"lat": (0, 90), "boundary": 1}).grid.boundary_mask.sum()
    np.int64(16)
    """

    cells: int
    nside: int | None = None
    nested: bool | None = None
    numbers: NDArray[np.int64] | None = None
    points: tuple[CellValues, CellValues] | None = None
    areas: CellValues | None = None
    variables: tuple[str, ...] = ()
    table: Callable[[], Neighbors] | None = None
    source_places: NDArray[np.int64] | None = None
    boundary_mask: NDArray[np.bool_] | None = None

    def __repr__(self) -> str:
        if self.nside is None:
            return f"CellGrid({self.cells} cells{'' if self.points else ', without places'})"
        return f"CellGrid({self.cells} cells, HEALPix nside {self.nside}, {'nested' if self.nested else 'ring'})"

    @property
    def lat(self) -> CellValues:
        """Latitude of each cell in degrees: [cells].  Raises: `GridError` where the store does not say."""
        return self._places[0]

    @property
    def lon(self) -> CellValues:
        """Longitude of each cell in degrees: [cells].  Raises: `GridError` where the store does not say."""
        return self._places[1]

    @cached_property
    def _places(self) -> tuple[CellValues, CellValues]:
        if self.nside is not None:
            return healpix_degrees(self.nside, bool(self.nested), self._own_numbers)
        if self.points is None:
            raise GridError(
                f"the store does not say where its {self.cells} cells lie; give it a latitude and a longitude for each "
                "(standard_name), or the grid mapping of HEALPix"
            )
        return self.points

    @property
    def _own_numbers(self) -> NDArray[np.int64]:
        return np.arange(self.cells) if self.numbers is None else self.numbers

    @cached_property
    def area_weights(self) -> CellValues:
        """Area of each cell, 1 on average: [cells]; for losses, metrics and statistics.

        Cells of HEALPix are equal. Of others the areas are the store's (``cell_measures``), else those of the regions
        around the points (Voronoi, which needs scipy).

        Raises: `GridError` for points of a region, whose outer cells have no ends, and for points that coincide.
        """
        if self.nside is not None:
            return np.ones(self.cells)
        areas = _voronoi_areas(*self._places) if self.areas is None else self.areas
        return areas / areas.mean()

    def neighbors(self, k: int | None = None, *, radius: float | None = None) -> Neighbors:
        """Return the table of neighbors: the 8 of HEALPix, the store's own (UGRID, ICON), or near points.

        These are the `k` nearest, each cell itself first, or all within an arc of `radius` degrees.

        Raises: `GridError` without `k` or `radius` where cells are points alone; `ShardingError` for more than there
        are.
        """
        if k is not None or radius is not None:
            return Neighbors.of_points(self.lat, self.lon, k, radius=radius)
        if self.table is not None:
            return self.table()
        if self.nside is None:
            raise GridError("neighbors() of cells that are points needs their number: neighbors(k=8)")
        if self.numbers is None:
            return Neighbors.healpix(self.nside, bool(self.nested))
        rising = np.argsort(self.numbers)
        known = self.numbers[rising]
        wanted = healpix_neighbors(self.nside, bool(self.nested))(self.numbers)
        places = np.minimum(np.searchsorted(known, wanted), self.cells - 1)
        return Neighbors(np.where(known[places] == wanted, rising[places], -1))

    def in_order(self, rows: NDArray[np.int64]) -> CellGrid:
        """Return the grid of these cells: all in another order, or some of them."""
        return replace(
            self,
            cells=len(rows),
            numbers=None if self.nside is None else self._own_numbers[rows],
            points=None if self.points is None else (self.points[0][rows], self.points[1][rows]),
            areas=None if self.areas is None else self.areas[rows],
            table=None if self.table is None else partial(_neighbors_in_order, self.table, rows),
            source_places=rows if self.source_places is None else self.source_places[rows],
            boundary_mask=None if self.boundary_mask is None else self.boundary_mask[rows],
        )


def _neighbors_in_order(table: Callable[[], Neighbors], rows: NDArray[np.int64]) -> Neighbors:
    whole = table()
    beside, places = whole.rows_of(rows), np.full(whole.targets, -1)
    places[rows] = np.arange(len(rows))  # cells that are not among the rows stay -1
    return Neighbors(np.where(beside < 0, -1, places[beside]))


def cells_along_curve(grid: CellGrid | None, variable: StoreVariable) -> NDArray[np.int64]:
    """Return the cells of a variable in their order along a curve.

    Raises: `GridError` for what does not lie on cells, or on cells that are in such an order already.
    """
    if grid is None or grid.nested:
        place = list(variable.space) if grid is None else f"{grid}, which are along a curve already"
        raise GridError(f"order='curve' is for cells, and array {variable.table.name!r} lies on {place}; leave it out")
    return curve_order(grid.lat, grid.lon)


def part_of_cells(grid: CellGrid, region: Any) -> tuple[NDArray[np.int64], CellGrid]:
    """Return the cells of a region, in their order, and their grid: those inside, and its boundary of other cells.

    Raises: `GridError` for any other region than of two lat, two lon, a slice of cells and a boundary, and for one that
    holds no cell.
    """
    inside, boundary = np.ones(grid.cells, bool), None
    for dim, wanted in checked_mapping("region", region, "{'lat': (30, 60), 'lon': (-10, 40)}", GridError).items():
        if dim == "boundary":
            boundary = wanted
            continue
        if dim == CELL_ROLE and isinstance(wanted, slice):
            chosen = np.zeros(grid.cells, bool)
            chosen[wanted] = True
        elif dim == "lat":
            ends = region_ends(dim, wanted)
            chosen = (grid.lat >= min(ends) - _ROUNDED_OFF) & (grid.lat <= max(ends) + _ROUNDED_OFF)
        elif dim == "lon":  # eastward from the first end; 350 to 370 are 20 degrees, as are 350 to 10
            first, last = region_ends(dim, wanted)
            width = last - first if last - first >= 360.0 else (last - first) % 360.0
            # a cell that rounding puts a hair west of the first end is not a whole turn east of it
            east = (grid.lon - first + _ROUNDED_OFF) % 360.0 - _ROUNDED_OFF
            chosen = east <= width + _ROUNDED_OFF
        else:
            raise GridError(
                f"region={{{dim!r}: {wanted!r}}} of cells must be two latitudes, two longitudes, or a slice of cells, "
                f"such as {{'cell': slice(0, {grid.cells})}}"
            )
        inside &= chosen
    if not inside.any():
        raise GridError(f"region={region!r} holds none of the {grid.cells} cells")
    if boundary is not None and inside.all():
        raise GridError(
            f"region={region!r} adds cells around an area, and beside 'boundary' it names none, or all cells; "
            "name one, such as 'lat': (30, 60)"
        )
    if boundary is None:
        rows = np.flatnonzero(inside)
        return rows, grid.in_order(rows)
    is_around = _cells_around(grid, inside, boundary)
    rows = np.flatnonzero(inside | is_around)
    return rows, replace(grid.in_order(rows), boundary_mask=is_around[rows])


def _cells_around(grid: CellGrid, inside: NDArray[np.bool_], boundary: Any) -> NDArray[np.bool_]:
    """Return which cells are around those inside: so many rings of neighbors, or all within some kilometers."""
    distance = _KILOMETERS.fullmatch(boundary) if isinstance(boundary, str) else None
    if distance is not None:
        return _cells_within(grid, inside, float(distance[1]))
    rings = int(boundary) if is_whole_number(boundary) else 0
    if rings < 1:
        raise GridError(
            f"region={{'boundary': {boundary!r}}} must be a number of rings of neighbors, such as 2, or a distance, "
            "such as '300 km'"
        )
    if grid.nside is None and grid.table is None:
        raise GridError(
            f"region={{'boundary': {boundary}}} needs neighbors of cells, and the store has their places alone; give a "
            "distance, such as '300 km'"
        )
    table, reached, ring = grid.neighbors(), inside.copy(), np.flatnonzero(inside)
    for _ in range(rings):
        beside = np.unique(table.rows_of(ring))
        ring = beside[(beside >= 0) & ~reached[beside]]
        reached[ring] = True
    return reached & ~inside


def _cells_within(grid: CellGrid, inside: NDArray[np.bool_], kilometers: float) -> NDArray[np.bool_]:
    near, outside, is_within = np.flatnonzero(inside), np.flatnonzero(~inside), np.zeros(grid.cells, bool)
    if len(outside):
        places = (grid.lat[near], grid.lon[near])
        to_nearest = Neighbors.of_points(grid.lat[outside], grid.lon[outside], 1, sources=places)
        nearest = near[to_nearest.sources_of((0, len(outside)))]
        points = points_on_sphere(grid.lat, grid.lon)
        chords = np.linalg.norm(points[outside] - points[nearest], axis=1)
        is_within[outside] = 2 * np.arcsin(np.minimum(chords / 2, 1)) * _EARTH_RADIUS <= kilometers
    return is_within


def cell_grid_of(survey: StoreSurvey, variable: StoreVariable, source: StoreSource | None = None) -> CellGrid | None:
    """Return the grid of a variable's cells, None for one without them.  Its table of neighbors needs the `source`.

    Raises: `GridError` for a description that contradicts itself, or places in other than degrees and radians.
    """
    if CELL_ROLE not in variable.roles:
        return None
    table, dim, cells = variable.table, variable.dim(CELL_ROLE), variable.size(CELL_ROLE)
    mapping, angles = survey.coords.grid_mapping(table), survey.coords.angles(table, dim)
    described: list[tuple[str, Mapping[str, Any]]] = [] if mapping is None else [(mapping.name, mapping.attrs)]
    dggs = survey.coords.dggs(table)
    if dggs:
        described = [("dggs", {**dggs, "grid_name": dggs.get("name")})]
    if survey.states(variable, CELL_ROLE):
        described.append((survey.coords.name(table, dim) or dim, survey.attrs(variable, CELL_ROLE)))
    names = (*([mapping.name] if mapping is not None else ()), *angles.values())
    if "coordinate" in dggs:
        names = (*names, str(survey.coords.name(table, dim)))
    places = None
    if SOURCE_PLACES in survey.store.arrays and survey.store.arrays[SOURCE_PLACES].dims == (dim,):
        places = survey.store.read_small(SOURCE_PLACES).astype(np.int64)
    for name, attrs in described:
        if is_healpix(attrs):
            nside, nested = _healpix_of_attributes(name, attrs)
            numbers = _healpix_numbers(survey, variable, nside)
            return CellGrid(cells, nside, nested, numbers, variables=names, source_places=places)
    points = None
    if angles:
        lat, lon = (
            degrees_of_places(survey, angles[angle], (cells,), most) for angle, most in (("lat", 90), ("lon", 720))
        )
        points = lat, lon
    stored = next((n for n in survey.coords.tables_of_cells(table) if dim in survey.store.arrays[n].dims), None)
    return CellGrid(
        cells,
        points=points,
        areas=_stored_areas(survey, variable),
        variables=tuple(dict.fromkeys((*names, *survey.coords.mesh_variables(table)))),
        table=None if stored is None or source is None else partial(stored_neighbors, source, stored, table.name, dim),
        source_places=places,
    )


def stored_neighbors(source: StoreSource, name: str, array: str, dim: str) -> Neighbors:
    """Read the table of neighbors of an array's cells.  Raises: `GridError` for one that names cells that are not."""
    table = source.store.arrays[name]
    start = StoreCoordinates(source.store.arrays).tables_of_cells(source.store.arrays[array])[name]
    values = decoded_coordinate(table, source.store.read_small(name))
    try:
        return Neighbors.of_table(values, start, cell_dim=table.dims.index(dim))
    except ShardingError as e:
        raise GridError(f"{name!r} counts cells from {start}: {e}; give it the right start_index") from e


def renumbered_cells(table: NDArray[Any], start: int, places: NDArray[np.int64]) -> NDArray[Any]:
    """Return a table that counts cells from `start` with the new `places` of the old ones; what names none stays."""
    cells = np.where(np.isfinite(table), table, start - 1).astype(np.int64) - start
    is_cell = (cells >= 0) & (cells < len(places))
    return np.where(is_cell, places[np.where(is_cell, cells, 0)] + start, table).astype(table.dtype)


def _healpix_of_attributes(name: str, attrs: Mapping[str, Any]) -> tuple[int, bool]:
    """Return nside and whether numbers are nested."""
    level = attrs.get("refinement_level", attrs.get("level"))
    nside = attrs.get("healpix_nside", attrs.get("nside")) if level is None else 2 ** int(level)
    scheme = str(attrs.get("indexing_scheme", attrs.get("healpix_order", "not given"))).lower()
    if nside is None or int(nside) < 1 or scheme not in _SCHEMES:
        raise GridError(
            f"{name!r} describes HEALPix with refinement_level {level}, nside {nside} and indexing_scheme {scheme!r}; "
            f"give a level or nside, and one of {list(_SCHEMES)}"
        )
    if _SCHEMES[scheme] and int(nside) & (int(nside) - 1):
        raise GridError(f"{name!r} describes HEALPix of nside {nside}, nested; nested numbers need a power of two")
    return int(nside), _SCHEMES[scheme]


def _healpix_numbers(survey: StoreSurvey, variable: StoreVariable, nside: int) -> NDArray[np.int64] | None:
    """Return the numbers of the cells, None for all of the sphere's in order."""
    cells, sphere = variable.size(CELL_ROLE), 12 * nside**2
    values = survey.values(variable, CELL_ROLE)
    numbers = values.astype(np.int64) if values.dtype.kind in "iuf" and survey.states(variable, CELL_ROLE) else None
    if numbers is None and cells != sphere:
        raise GridError(
            f"array {variable.table.name!r} has {cells} cells, and HEALPix of nside {nside} has {sphere}; give the dim "
            f"{variable.dim(CELL_ROLE)!r} a coordinate of their numbers, with standard_name 'healpix_index'"
        )
    if numbers is None or np.array_equal(numbers, np.arange(sphere)):
        return None
    if (numbers < 0).any() or (numbers >= sphere).any() or len(np.unique(numbers)) < cells:
        raise GridError(
            f"the coordinate of {variable.dim(CELL_ROLE)!r} has numbers from {numbers.min()} to {numbers.max()}, and "
            f"HEALPix of nside {nside} numbers its cells from 0 to {sphere - 1}, each once"
        )
    return numbers


def degrees_of_places(survey: StoreSurvey, name: str, shape: tuple[int, ...], most: float) -> CellValues:
    """Read a latitude or longitude of each place, in degrees.  Raises: `GridError` for others than that."""
    table = survey.store.arrays[name]
    values = decoded_coordinate(table, survey.store.read_small(name), wide=True).astype(np.float64)
    if str(table.attrs.get("units", "")).lower().startswith("rad"):
        values = np.degrees(values)
    is_wrong = ~(np.abs(values) <= most + 1e-4)
    if values.shape != shape or is_wrong.any():
        at = np.argwhere(is_wrong)[0].tolist() if values.shape == shape else []
        wrong = f"{values[tuple(at)]} for cell {', '.join(map(str, at))}" if at else f"the shape {values.shape}"
        raise GridError(
            f"{name!r} has {wrong}, and each of {' x '.join(map(str, shape))} cells needs degrees of at most {most:g}, "
            "or radians by its units; rewrite it, or leave it out"
        )
    return values


def _stored_areas(survey: StoreSurvey, variable: StoreVariable) -> CellValues | None:
    """Return the areas that CF's ``cell_measures = "area: cell_area"`` names; None where they are not in the store."""
    words = str(variable.table.attrs.get("cell_measures", "")).split()
    named = [name for key, name in pairwise(words) if key == "area:"]
    table = survey.store.arrays.get(named[0]) if named else None
    if table is None or tuple(table.dims) != (variable.dim(CELL_ROLE),):
        return None
    areas = decoded_coordinate(table, survey.store.read_small(table.name), wide=True).astype(np.float64)
    if not (areas > 0).all():
        raise GridError(f"{table.name!r} has areas that are not above 0; rewrite it, or leave out cell_measures")
    return areas


def _voronoi_areas(lat: CellValues, lon: CellValues) -> CellValues:
    try:
        spatial: Any = import_module("scipy.spatial")
    except ImportError:
        raise GridError("areas of cells that are points need scipy, which is missing: pip install scipy") from None
    points = points_on_sphere(lat, lon)
    try:
        regions = spatial.SphericalVoronoi(points)
        areas = regions.calculate_areas()
    except ValueError as e:
        raise GridError(f"the {len(lat)} points have no areas: {e}; give the store cell_measures of its own") from e
    nearest, _ = spatial.cKDTree(points).query(regions.vertices)
    if np.max(nearest) > 2 * np.sin(np.radians(_WIDEST_GAP) / 2):
        raise GridError(
            f"the {len(lat)} points do not lie all over the globe, so that the outer ones have no area; give the store "
            "cell_measures of its own"
        )
    return areas
