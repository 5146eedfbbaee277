"""Neighbors of cells: which cells each cell gathers from, and what each rank needs of others for it.  Integers only.

Cells are a dim that one or more mesh axes cut into contiguous pieces. An *edge* leads from a source cell to a target
cell.  Edges lie with the piece of their target, in one order on every mesh: by target, then as the table lists them.
Sums over edges go in this order too, so that their bits are alike on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Interval
from jigsaw.geometry.healpix import healpix_neighbors

Integers = NDArray[np.int64]


class Neighbors:
    """Table of the source cells that are neighbors of each target cell.

    `index` has shape [targets, k]: numbers of source cells, -1 where a target has fewer than k.  There are `sources`
    source cells; by default as many as targets.  `of_edges` takes graphs in which targets have any number of edges,
    `of_table` tables of UGRID and ICON files. `of_points` finds near points, and `healpix` makes the table of a
    grid.

    Every rank makes the same table. Which of its rows a rank sends, to whom, follows from the table and the cuts.

    *Raises*: `ShardingError` for a table that is not of integers, of another rank, or that names a cell that is not
    there.

    >>> ring = jigsaw.Neighbors([[3, 1], [0, 2], [1, 3], [2, 0]])
    >>> ring.targets, ring.sources, ring.degree, ring.edges
    (4, 4, 2, 8)
    """

    def __init__(self, index: ArrayLike, sources: int | None = None) -> None:
        table = _integer_array(index, "index", 2)
        self.targets, self.degree = table.shape
        self.sources = self.targets if sources is None else sources
        _check_cells(table, self.sources, "index", least=-1)
        self._rows_of: Callable[[Integers], Integers] = partial(np.take, table, axis=0)
        self._starts, self._sorted_sources = None, None
        self.is_symmetric = False
        self.key = f"table {self.sources} {_digest(table)}"

    degree: int | None
    _starts: Integers | None
    _sorted_sources: Integers | None
    _order: Integers | None = None

    @classmethod
    def of_edges(
        cls, source: ArrayLike, target: ArrayLike, sources: int | None = None, targets: int | None = None
    ) -> Neighbors:
        """Make a table of edges, from `source` cells to `target` cells, each of shape [edges].

        By default there are as many cells as the largest number says.  Edges are sorted by target, then source; the
        attribute `order` says which of the edges as given comes first, second and so on.

        *Raises*: `ShardingError` for sources and targets of different numbers, and cells that are not there.

        >>> graph = jigsaw.Neighbors.of_edges([2, 0, 1], [1, 1, 0])
        >>> graph.degree, graph.edges, graph.order.tolist()
        (None, 3, [2, 1, 0])
        """
        sender, receiver = _integer_array(source, "source", 1), _integer_array(target, "target", 1)
        if len(sender) != len(receiver):
            raise ShardingError(f"source names {len(sender)} edges and target {len(receiver)}; give both of each edge")
        table = cls.__new__(cls)
        table.sources = int(sender.max(initial=-1)) + 1 if sources is None else sources
        table.targets = int(receiver.max(initial=-1)) + 1 if targets is None else targets
        _check_cells(sender, table.sources, "source", least=0)
        _check_cells(receiver, table.targets, "target", least=0)
        table._order = np.lexsort((sender, receiver))
        table._sorted_sources = sender[table._order]
        counts = np.bincount(receiver, minlength=table.targets)
        table._starts = np.concatenate([[0], np.cumsum(counts)])
        table.degree, table.is_symmetric = None, False
        table.key = f"edges {table.sources} {_digest(table._starts)} {_digest(table._sorted_sources)}"
        return table

    @classmethod
    def of_table(
        cls, values: ArrayLike, start_index: int = 0, missing: float | None = None, cell_dim: int = 0
    ) -> Neighbors:
        """Make a table from that of an unstructured grid, which counts cells from `start_index` on.

        UGRID's ``face_face_connectivity`` has a row for each face; ICON's ``neighbor_cell_index`` counts from 1 and has
        a column for each cell (``cell_dim=1``). A number that is `missing`, masked, NaN, or below the first leads
        nowhere.

        *Raises*: `ShardingError` for a table that is not of whole numbers, and for cells that are not there.

        >>> jigsaw.Neighbors.of_table([[2, 1, 1], [3, 3, -1]], start_index=1, cell_dim=1).sources_of((0, 3)).tolist()
        [1, 2, 0, 2, 0, -1]
        """
        stored = np.asarray(values)
        is_none = np.ma.getmaskarray(np.ma.asarray(values)) | (np.isnan(stored) if stored.dtype.kind == "f" else False)
        if missing is not None:
            is_none |= stored == missing
        whole = np.where(is_none, start_index, stored)
        if stored.ndim != 2 or stored.dtype.kind not in "iuf" or (whole != np.floor(whole)).any():
            raise ShardingError(
                f"Neighbors.of_table: values of dtype {stored.dtype} and shape {stored.shape} must be whole numbers of "
                "2 dims, one of cells and one of their neighbors"
            )
        cells = whole.astype(np.int64) - start_index
        return cls(np.moveaxis(np.where(is_none | (cells < 0), -1, cells), cell_dim, 0))

    @classmethod
    def of_points(
        cls,
        lat: ArrayLike,
        lon: ArrayLike,
        k: int | None = None,
        sources: tuple[ArrayLike, ArrayLike] | None = None,
        *,
        radius: float | None = None,
    ) -> Neighbors:
        """Make a table of the source points near each point on the sphere: the `k` nearest, or all within a `radius`.

        `lat` and `lon` are degrees, [targets] each; `sources` are those of the source points, by default the same
        points, of which each is then its own neighbor.  The `k` nearest come nearest first.  A `radius` is an arc, in
        degrees too. Its table is a graph, as of `of_edges`, in which points may have no neighbor.  Needs scipy.

        *Raises*: `ShardingError` for points whose coordinates do not fit each other, and for fewer than `k` sources.
        Also for a radius that is not above 0 and at most 180, and unless one of `k` and `radius` is passed.

        >>> jigsaw.Neighbors.of_points([0, 0, 0], [0, 10, 30], k=2).degree
        2
        >>> jigsaw.Neighbors.of_points([0, 0, 0], [0, 10, 30], radius=15).sources_of((0, 3)).tolist()
        [0, 1, 0, 1, 2]
        """
        targets = points_on_sphere(lat, lon)
        among = targets if sources is None else points_on_sphere(*sources)
        if (k is None) == (radius is None):
            raise ShardingError(f"Neighbors.of_points: pass k, or radius in degrees, not k={k} and radius={radius}")
        if radius is not None:
            if not 0 < radius <= 180:
                raise ShardingError(f"radius={radius} must be above 0 and at most 180 degrees of arc")
            return cls.of_edges(*_points_within(targets, among, radius), len(among), len(targets))
        if k is None or not 1 <= k <= len(among):
            raise ShardingError(f"k={k} of {len(among)} source points; use a number from 1 to {len(among)}")
        return cls(_nearest_points(targets, among, k), len(among))

    @classmethod
    def healpix(cls, nside: int, nested: bool = True) -> Neighbors:
        """Make the table of the 8 neighbors of each cell of a HEALPix grid; at eight corners of faces a cell has 7.

        They go around from the south-west: SW, W, NW, N, NE, E, SE, S.  A rank computes only the rows that it asks for.
        Numbers are `nested` (``nside`` a power of two) or run along rings.  Source: Gorski et al., "HEALPix",
        arXiv astro-ph/0409513.

        *Raises*: `ShardingError` for an `nside` that is not a power of two where numbers are nested, or below 1.

        >>> jigsaw.Neighbors.healpix(2).degree
        8
        """
        rows_of = healpix_neighbors(nside, nested)
        table = cls.__new__(cls)
        table.sources = table.targets = 12 * nside**2
        table.degree, table.is_symmetric = 8, True
        table._rows_of, table._starts, table._sorted_sources = rows_of, None, None
        table.key = f"healpix {nside} {nested}"
        return table

    @property
    def order(self) -> Integers:
        """Number, among the edges as they were given, of the first edge, the second and so on: [edges]."""
        return np.arange(self.edges) if self._order is None else self._order

    @property
    def edges(self) -> int:
        """Number of edges, those that lead from nowhere (-1) included."""
        return self.first_edge(self.targets)

    def first_edge(self, target: int) -> int:
        """Return the number of edges before those of a target."""
        return target * (self.degree or 0) if self._starts is None else int(self._starts[target])

    def sources_of(self, targets: Interval) -> Integers:
        """Return the source of each edge of these targets, -1 for none: [edges]."""
        start, stop = targets
        if self._starts is None or self._sorted_sources is None:
            return self._rows_of(np.arange(start, stop)).reshape(-1)
        return self._sorted_sources[self._starts[start] : self._starts[stop]]

    def targets_of(self, targets: Interval) -> Integers:
        """Return which of these targets each of their edges leads to, counted from the first of them: [edges]."""
        start, stop = targets
        if self._starts is None:
            return np.repeat(np.arange(stop - start), self.degree or 0)
        return np.repeat(np.arange(stop - start), np.diff(self._starts[start : stop + 1]))

    def rows_of(self, cells: Integers) -> Integers:
        """Return the neighbors of any cells, of a table: [cells, k]."""
        return self._rows_of(cells)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Neighbors) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        each = f"{self.edges} edges" if self.degree is None else f"{self.degree} each"
        return f"Neighbors({self.sources} cells -> {self.targets} cells, {each})"


def _digest(values: NDArray[Any]) -> str:
    return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:32]


def _integer_array(values: ArrayLike, name: str, ndim: int) -> Integers:
    array = np.asarray(values)
    if np.ma.is_masked(values):
        raise ShardingError(f"Neighbors: {name} has masked values; leave these out, or fill them with -1 for none")
    if array.ndim != ndim or (array.size and array.dtype.kind not in "iu"):
        raise ShardingError(
            f"Neighbors: {name} has dtype {array.dtype} and shape {array.shape}; it must be integers of {ndim} dims"
        )
    return array.astype(np.int64)


def _check_cells(cells: Integers, count: int, name: str, least: int) -> None:
    if cells.size and not (least <= cells.min() and cells.max() < count):
        wrong = int(cells.min() if cells.min() < least else cells.max())
        raise ShardingError(f"Neighbors: {name} names cell {wrong}, but the cells are {least} to {count - 1}")


def points_on_sphere(lat: ArrayLike, lon: ArrayLike) -> NDArray[np.float64]:
    """Return points of latitudes and longitudes in degrees on the sphere of radius 1: [points, 3]."""
    phi, theta = np.radians(np.asarray(lat, np.float64)), np.radians(np.asarray(lon, np.float64))
    if np.ma.is_masked(lat) or np.ma.is_masked(lon):
        raise ShardingError("Neighbors.of_points: some of lat or lon are masked; leave these points out")
    if phi.shape != theta.shape or phi.ndim != 1 or not (np.isfinite(phi).all() and np.isfinite(theta).all()):
        raise ShardingError(
            f"Neighbors.of_points: lat of shape {phi.shape} and lon of shape {theta.shape} must be finite and have one "
            "dim of the same size"
        )
    if (np.abs(phi) > np.pi / 2 + 1e-6).any():  # radians in float32 may go a little beyond
        most = np.degrees(np.abs(phi)).max()
        raise ShardingError(f"Neighbors.of_points: a latitude of {most:g} is beyond a pole; give degrees, -90 to 90")
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], axis=-1)


def _nearest_points(points: NDArray[np.float64], among: NDArray[np.float64], k: int) -> Integers:
    _, nearest = _point_tree(among).query(points, k=[*range(1, k + 1)])
    return nearest.astype(np.int64)


def _points_within(points: NDArray[np.float64], among: NDArray[np.float64], radius: float) -> tuple[Integers, Integers]:
    """Return the sources and the targets of all pairs whose arc is at most so many degrees."""
    chord = 2 * np.sin(np.radians(radius) / 2)
    near: list[list[int]] = _point_tree(among).query_ball_point(points, chord).tolist()
    counts = np.fromiter(map(len, near), np.int64, len(near))
    sources = np.fromiter(chain.from_iterable(near), np.int64, int(counts.sum()))
    return sources, np.repeat(np.arange(len(near)), counts)


def _point_tree(points: NDArray[np.float64]) -> Any:
    try:
        spatial: Any = import_module("scipy.spatial")
    except ImportError:
        raise ShardingError("Neighbors.of_points needs scipy, which is missing: pip install scipy") from None
    return spatial.cKDTree(points)


# -- sums in one order ------------------------------------------------------------------------------------------------


_MOST_STEPS = 256


@dataclass(frozen=True, eq=False)
class OrderedLists:
    """Values of which each of `rows` sums some, one after the other, in an order that is fixed.

    `places` are those of the values, by row and then in their order, and `ends` where each row's begin and end there.
    """

    rows: int
    places: Integers
    ends: Integers

    @classmethod
    def of(cls, row_of_value: Integers, place_of_value: Integers, rows: int) -> OrderedLists:
        """Make it from the row that each value belongs to, values in their order, and where each of them lies."""
        counts = np.bincount(row_of_value, minlength=rows)
        by_row = np.argsort(row_of_value, kind="stable")
        return cls(rows, place_of_value[by_row], np.concatenate([[0], np.cumsum(counts)]))

    @property
    def counts(self) -> Integers:
        """Number of the values of each row."""
        return np.diff(self.ends)

    def steps(self) -> ListsBySteps:
        """Return the same lists, for sums by vector additions."""
        counts, starts = self.counts, self.ends[:-1]
        longest_first = np.argsort(-counts, kind="stable")
        falling = -counts[longest_first]
        turns: list[Integers] = []
        for turn in range(min(int(counts.max(initial=0)), _MOST_STEPS)):
            members = longest_first[: int(np.searchsorted(falling, -turn))]
            turns.append(self.places[starts[members] + turn])
        restore = np.argsort(longest_first, kind="stable")
        number = np.arange(len(self.places)) - np.repeat(starts, counts)  # the number of each value within its row
        rest = np.flatnonzero(number >= _MOST_STEPS)
        return ListsBySteps(tuple(turns), np.repeat(restore, counts)[rest], self.places[rest], restore)


@dataclass(frozen=True, eq=False)
class ListsBySteps:
    """Values of which each row sums some, turn by turn.

    ``turns[j]`` are the places of the j-th value of each row that has one, rows with most values first. `restore`
    puts the rows back into their own order.  So a sum is a few vector additions. Values beyond the 256th of a row are
    in `rest_places`, in order, with their rows, as `turns` count these.
    """

    turns: tuple[Integers, ...]
    rest_rows: Integers
    rest_places: Integers
    restore: Integers


# -- the plan of a rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class NeighborPlan:
    """One rank's part of a gather: its edges, the rows that it needs and gives, and the way back of gradients.

    `near` is the own row of each edge, 0 for the edges `far`, whose sources others own, and `none`, which have none.
    ``far_places`` are the places of the far edges' sources among the rows that arrive: each once, in order.
    """

    key: tuple[Any, ...]
    rows: int
    edges: int
    near: Integers
    none: Integers
    far: Integers
    far_places: Integers
    receives: tuple[tuple[int, int], ...]  # piece, rows
    sends: tuple[tuple[int, Integers], ...]  # piece, own rows
    back_sends: tuple[tuple[int, Integers], ...]  # piece, own edges
    back_receives: tuple[tuple[int, int], ...]  # piece, edges
    sums: OrderedLists  # for each own row, the values to add: own edges, then those that come back

    def __repr__(self) -> str:
        return f"NeighborPlan{self.key}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeighborPlan) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def plan_neighbors(
    table: Neighbors, source_points: Sequence[int], target_points: Sequence[int], piece: int
) -> NeighborPlan:
    """Plan a gather for one piece: the source cells are cut at `source_points`, the target cells at `target_points`.

    Without messages: what others need of this piece's rows follows from the table.  Of a symmetric one, the neighbors
    of own cells are asked; of another, the rows of all pieces are looked through.
    """
    start, stop = source_points[piece], source_points[piece + 1]
    sources = table.sources_of((target_points[piece], target_points[piece + 1]))
    is_none = sources < 0
    is_near = (sources >= start) & (sources < stop)
    far = np.flatnonzero(~is_near & ~is_none)
    needed, far_places = np.unique(sources[far], return_inverse=True)
    owners = np.searchsorted(source_points, sources[far], side="right") - 1
    edges_of_owner = {int(q): far[owners == q] for q in np.unique(owners)}
    rows_of_owner = np.searchsorted(needed, source_points)
    edges_elsewhere = _edges_from_piece(table, source_points, target_points, piece, needed)
    values = [(piece, sources[is_near] - start, np.flatnonzero(is_near))]
    place = len(sources)
    for other, rows in edges_elsewhere:
        values.append((other, rows, np.arange(place, place + len(rows))))
        place += len(rows)
    values.sort(key=lambda entry: entry[0])
    return NeighborPlan(
        key=(table.key, tuple(source_points), tuple(target_points), piece),
        rows=stop - start,
        edges=len(sources),
        near=np.where(is_near, sources - start, 0),
        none=np.flatnonzero(is_none),
        far=far,
        far_places=far_places.reshape(-1),
        receives=tuple((q, int(rows)) for q, rows in enumerate(np.diff(rows_of_owner)) if rows),
        sends=tuple((q, np.unique(rows)) for q, rows in edges_elsewhere),
        back_sends=tuple(edges_of_owner.items()),
        back_receives=tuple((q, len(rows)) for q, rows in edges_elsewhere),
        sums=OrderedLists.of(
            np.concatenate([rows for _, rows, _ in values]), np.concatenate([at for *_, at in values]), stop - start
        ),
    )


def _edges_from_piece(
    table: Neighbors, source_points: Sequence[int], target_points: Sequence[int], piece: int, needed: Integers
) -> list[tuple[int, Integers]]:
    """Return the edges of other pieces whose sources this piece owns: their pieces, and own rows in order of edges."""
    start, stop = source_points[piece], source_points[piece + 1]
    if table.is_symmetric and tuple(source_points) == tuple(target_points):
        # neighbors are mutual, so edges back start at the own cells' neighbors
        rows = table.rows_of(needed)
        owners = np.repeat(np.searchsorted(target_points, needed, side="right") - 1, rows.shape[1])
        sources = rows.reshape(-1)
    else:
        parts = [(q, table.sources_of(targets)) for q, targets in enumerate(pairwise(target_points)) if q != piece]
        owners = np.concatenate([np.full(len(part), q) for q, part in parts] or [np.empty(0, np.int64)])
        sources = np.concatenate([part for _, part in parts] or [np.empty(0, np.int64)])
    is_own = (sources >= start) & (sources < stop)
    owners, sources = owners[is_own], sources[is_own] - start
    return [(int(q), sources[owners == q]) for q in np.unique(owners)]


# -- rows for a product -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NeededRows:
    """Source rows that one piece of the rows of a sparse matrix needs: how they come, and its entries by places there.

    `entries` are those of the matrix, `rows` and `columns` their places in the piece of `count` rows and among the
    needed rows.  `received` has the rows that each piece needs of others, and needs once.
    """

    plan: NeighborPlan
    entries: Integers
    rows: Integers
    columns: Integers
    count: int
    received: tuple[int, ...]

    @classmethod
    def of(
        cls, row: Integers, column: Integers, row_points: Sequence[int], column_points: Sequence[int], piece: int
    ) -> NeededRows:
        """Plan it for the entries of a matrix, sorted by row, whose rows and columns are cut at these points."""
        size = column_points[-1]
        owner = np.searchsorted(row_points, row, side="right") - 1
        pairs = np.unique(owner * size + column)  # sorted by piece, then by source row
        names, whose = pairs % size, pairs // size
        is_far = np.searchsorted(column_points, names, side="right") - 1 != whose
        ends = np.searchsorted(whose, np.arange(len(row_points)))
        entries = np.flatnonzero(owner == piece)
        return cls(
            plan_neighbors(Neighbors(names[:, None], size), column_points, ends.tolist(), piece),
            entries,
            row[entries] - row_points[piece],
            np.searchsorted(names[ends[piece] : ends[piece + 1]], column[entries]),
            row_points[piece + 1] - row_points[piece],
            tuple(np.bincount(whose[is_far], minlength=len(row_points) - 1).tolist()),
        )
