"""Chunks and rows that each rank needs, from the request and the grids of arrays alone.

Boxes of chunks are the rows that a rank takes of each chunk, and where in its sample they land.

Each dim is worked out by itself, and a box is the product of its dims. Take ten rows of latitude in chunks of 4 (rows
0-3, 4-7 and 8-9), cut among four ranks, on a dim that wraps. Each rank holds one row more on each side:

    rank  owns   holds    takes, as `RowRun`s (source, its step, target, its step, length)
    0     0-2    -1..3    of chunk 2 (1, 1, 0, 1, 1), as row -1 is row 9;  of chunk 0 (0, 1, 1, 1, 4)
    1     3-5     2..6    of chunk 0 (2, 1, 0, 1, 2);  of chunk 1 (0, 1, 2, 1, 3)
    2     6-7     5..8    of chunk 1 (1, 1, 0, 1, 3);  of chunk 2 (0, 1, 3, 1, 1)
    3     8-9     7..10   of chunk 1 (3, 1, 0, 1, 1);  of chunk 2 (0, 1, 1, 1, 2);  of chunk 0 (0, 1, 3, 1, 1)

Sources count from the chunk's first row, targets from the first row that the rank holds. If the array were stored
upside down, row r would be the stored row 9 - r. Rank 0 would then take (1, -1, 1, 1, 2) of chunk 2: backwards.

Cells that the sample has in another order than the store are taken as a `RowList`, one of each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress, product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.geometry.cut import Cut, Interval
from jigsaw.geometry.layout import AxisSizes, Layout
from jigsaw.io.chunks.chunk import ChunkGrid, ChunkIndex, ChunkRows, DimChunks
from jigsaw.io.chunks.files import merge_ranges
from jigsaw.io.reading.chunk_readers import (
    DimShares,
    PartShares,
    PieceShare,
    ReadersByChunk,
    ReadersPattern,
    pattern_of_readers,
    readers_of_chunk,
    shares_of_dim,
)
from jigsaw.io.series.boundary import PERIODIC_BOUNDARY, DimBoundary
from jigsaw.io.series.request import DROPPED_DIM, IndexPicks, ReadPart, ReadRequest, StoredOrder, runs_of_pairs


class RowRun(NamedTuple):
    """`length` rows of a chunk, from `source` by `source_step`, and the local rows that they fill."""

    source: int
    source_step: int
    target: int
    target_step: int
    length: int

    @property
    def each(self) -> range:
        return range(self.source, self.source + self.source_step * self.length, self.source_step)

    @property
    def taken(self) -> slice:
        """Index of its rows in the chunk."""
        return strided_slice(self.source, self.source_step, self.length)

    @property
    def landing(self) -> slice:
        """Index of its rows among the local ones."""
        return strided_slice(self.target, self.target_step, self.length)

    @property
    def rows(self) -> tuple[Interval, ...]:
        """The intervals of the chunk's rows that it takes: one, or of steps that lie apart each by itself."""
        # The targets of samples 0, 50 and 90 are such a run.  As one interval they would decode all that is between.
        if abs(self.source_step) > 1:
            return tuple((row, row + 1) for row in self.each)
        last = self.source + self.source_step * (self.length - 1)
        return ((min(self.source, last), max(self.source, last) + 1),)


def strided_slice(start: int, step: int, count: int) -> slice:
    """Return the slice of `count` rows from `start`, `step` apart."""
    stop = start + step * count
    return slice(start, None if stop < 0 else stop, step)


@dataclass(frozen=True, eq=False)
class RowList:
    """Rows of a chunk in any order (`source`), and the local rows that they fill, in rising order (`target`)."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]

    @property
    def length(self) -> int:
        return len(self.source)

    @property
    def taken(self) -> NDArray[np.int64]:
        """Index of its rows in the chunk."""
        return self.source

    @cached_property
    def landing(self) -> slice | NDArray[np.int64]:
        """Index of its rows among the local ones: where these follow each other, they are filled where they lie."""
        first, last = int(self.target[0]), int(self.target[-1])
        return slice(first, last + 1) if last - first == self.length - 1 else self.target

    @property
    def rows(self) -> tuple[Interval, ...]:
        """One interval of the chunk's rows, that has all of them: what lies between is decoded, too."""
        return ((int(self.source.min()), int(self.source.max()) + 1),)


def _rows_of_runs(runs: Sequence[TakenRows]) -> tuple[Interval, ...]:
    return tuple(merge_ranges(rows for run in runs for rows in run.rows))


class ChunkBox(NamedTuple):
    """Rows that one rank takes of a chunk for one part: the product of the runs of each stored dim.

    `at` has the (dim, local index) where it lands along dims of the sample that the array lacks. A rank may take two
    boxes of a part: the rows beyond a pole are `turned`.
    """

    part: int
    runs: tuple[tuple[TakenRows, ...], ...]
    at: tuple[tuple[int, int], ...]
    turned: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    @property
    def repeats(self) -> bool:
        """True where it takes a row of the chunk more than once, as rows beyond an edge do."""
        rows = [[x for run in runs if isinstance(run, RowRun) for x in run.each] for runs in self.runs if len(runs) > 1]
        return any(len(set(dim_rows)) < len(dim_rows) for dim_rows in rows)

    @property
    def rect(self) -> ChunkRows:
        return tuple(map(_rows_of_runs, self.runs))


TakenRows = RowRun | RowList
RunsByChunk = dict[int, tuple[TakenRows, ...]]


def _split_by_chunk(pairs: Sequence[tuple[int, int]], along: DimChunks) -> RunsByChunk:
    split: dict[int, list[tuple[int, int]]] = {}
    for source, target in pairs:
        chunk = along.find(source)
        split.setdefault(chunk, []).append((source - along.start(chunk), target))
    return {c: tuple(RowRun(*run) for run in runs_of_pairs(rows)) for c, rows in split.items()}


def _lists_by_chunk(source: NDArray[np.int64], target: NDArray[np.int64], along: DimChunks) -> RunsByChunk:
    if not len(source):
        return {}
    starts = np.array(along.edges()[:-1])
    chunks = np.searchsorted(starts, source, side="right") - 1
    by_chunk = np.argsort(chunks, kind="stable")
    names, first = np.unique(chunks[by_chunk], return_index=True)
    members = np.split(by_chunk, first[1:])
    return {int(c): (RowList(source[at] - starts[c], target[at]),) for c, at in zip(names, members, strict=True)}


@lru_cache(maxsize=4096)
def _runs_of_space_dim(
    held: Interval,
    size: int,
    first: int,
    along: DimChunks,
    flip: bool,
    way: BoundaryRows,
    order: StoredOrder | None = None,
) -> RunsByChunk:
    """Find the runs of a spatial dim whose `size` rows begin at the stored row `first`; a rolled dim wraps."""
    # Rows are counted in three ways. Those of the sample, as held, become those of the domain, where the boundary's
    # rule shows a row for each beyond the ends (and half a turn on, beyond a pole). These become the stored rows, which
    # may run against them. On 10 rows that wrap, stored upside down, a rank holds -1..3: its first row is the domain's
    # 9, and the stored 0. In a rolled dim `first` is the stored row at which the domain begins: when it is 6, row 5 is
    # the stored row 11 % 10 = 1.
    rows = ((row, target) for target, row, turned in way.boundary.rows(held, size) if turned == way.turned)
    if order is not None:
        shown, targets = np.array([*rows], np.int64).reshape(-1, 2).T
        return _lists_by_chunk(order.rows[shown], targets, along)
    shown = (((row + way.shift) % size if way.shift else row, target) for row, target in rows)
    pairs = [((first + (size - 1 - row if flip else row)) % along.size, target) for row, target in shown]
    return _split_by_chunk(pairs, along)


class BoundaryRows(NamedTuple):
    """Choice of the held rows of a dim, and the number of rows by which they are shifted.

    Beyond a pole a globe goes on along the opposite meridian: `turned` rows of latitude, each of them shifted by half
    the rows of longitude.  The rows within the poles are another geometry, not turned and not shifted.
    """

    boundary: DimBoundary = PERIODIC_BOUNDARY
    turned: bool = False
    shift: int = 0


def boundary_rows(request: ReadRequest, turned: bool) -> tuple[BoundaryRows, ...]:
    """Return the `BoundaryRows` of each spatial dim; `turned` selects the rows beyond a pole."""
    space = request.layout.cuts[2:]
    boundary = request.boundary or (PERIODIC_BOUNDARY,) * len(space)
    circles = [b.circle for b in boundary if b.rule == "pole"] if turned else []
    return tuple(
        BoundaryRows(b, turned and b.rule == "pole", cut.size // 2 if d in circles else 0)
        for d, (b, cut) in enumerate(zip(boundary, space, strict=True))
    )


@lru_cache(maxsize=4096)
def _runs_of_picks(picks: IndexPicks, held: Interval, along: DimChunks) -> RunsByChunk:
    start, stop = held
    return _split_by_chunk([(source, target - start) for source, target in picks if start <= target < stop], along)


class DimPieces:
    """Cut of a stored dim: the runs that each piece holds, by chunk, and how much of each chunk each piece takes.

    Compared by identity: `_pieces_of_space` and `_pieces_of_picks` make one object of those that are equal.
    """

    def __init__(
        self,
        axes: AxisSizes,
        cut: Cut | None,
        along: DimChunks,
        held: Sequence[RunsByChunk],
        owned: Sequence[RunsByChunk],
    ) -> None:
        self.cut, self.held = cut, held
        shares: dict[int, list[PieceShare]] = {}
        for piece, (runs_of, own) in enumerate(zip(held, owned, strict=True)):
            for chunk, runs in runs_of.items():
                # merged, because rows that are taken twice, as beyond an edge, are decoded once
                rows = _rows_of_runs(runs)
                share = PieceShare(piece, rows, sum(run.length for run in runs), chunk in own)
                shares.setdefault(chunk, []).append(share)
        cutting = cut.axes if cut else ()
        self.shares = {c: shares_of_dim(axes, cutting, along.length(c), tuple(shares[c])) for c in sorted(shares)}


@lru_cache(maxsize=256)
def _pieces_of_space(
    axes: AxisSizes,
    cut: Cut,
    first: int,
    along: DimChunks,
    flip: bool,
    way: BoundaryRows,
    order: StoredOrder | None,
) -> DimPieces:
    placement = cut.size, first, along, flip, way, order
    held = [_runs_of_space_dim(rows, *placement) for rows in cut.held]
    return DimPieces(axes, cut, along, held, [_runs_of_space_dim(cut.owned(i), *placement) for i in range(cut.pieces)])


@lru_cache(maxsize=256)
def _pieces_of_picks(axes: AxisSizes, cut: Cut | None, picks: IndexPicks, along: DimChunks) -> DimPieces:
    """Cut times or channels, which have no halo; a dropped dim has no cut and is one piece that all ranks take."""
    runs = [_runs_of_picks(picks, held, along) for held in (cut.held if cut else ((0, 1),))]
    return DimPieces(axes, cut, along, runs, runs)


@lru_cache(maxsize=1024)
def _shares_of_place(axes: AxisSizes, cut: Cut, index: int) -> DimShares:
    """Return the pieces that hold one place along a dim that an array lacks."""
    pieces = (i for i, (start, stop) in enumerate(cut.held) if start <= index < stop)
    return shares_of_dim(axes, cut.axes, 1, tuple(PieceShare(i, ((0, 1),), 1) for i in pieces))


class PartGeometry:
    """Geometry of one part: the chunks that each rank needs along each stored dim, and which of their rows.

    Runs are worked out for each piece of a cut, not for each rank. With 64 ranks on 8 x 8 pieces there are 8 for
    latitude and 8 for longitude; rank 13, at (1, 5), has the second and the sixth. They are kept, because most arrays
    and samples need the same ones.
    """

    def __init__(
        self, number: int, part: ReadPart, grid: ChunkGrid, request: ReadRequest, ways: Sequence[BoundaryRows]
    ) -> None:
        self._number, self._part, self._layout = number, part, request.layout
        self._turned = any(way.turned for way in ways)
        self.ends_in_space = bool(part.to) and part.to[-1] >= 2
        cuts, axes = request.layout.cuts, request.layout.axes
        self.dims = tuple(_pieces_along(part, d, grid.along[d], request, ways) for d in range(len(part.to)))
        self.fixed = tuple(_shares_of_place(axes, cuts[dim], index) for dim, index in part.at)
        self._by_member: dict[int, tuple[list[RunsByChunk], tuple[tuple[int, int], ...] | None]] = {}

    def _of_member(self, member: int) -> tuple[list[RunsByChunk], tuple[tuple[int, int], ...] | None]:
        """Return the runs of a rank along each stored dim, and where it lands along dims that the array lacks."""
        if member not in self._by_member:
            layout, coord = self._layout, self._layout.coord(member)
            runs = [dim.held[layout.piece(dim.cut, coord) if dim.cut else 0] for dim in self.dims]
            self._by_member[member] = runs, _fixed_targets(self._part, layout, coord)
        return self._by_member[member]

    def chunks(self, member: int) -> Iterator[ChunkIndex]:
        held, at = self._of_member(member)
        return iter(()) if at is None else product(*held)

    def last(self, member: int) -> RunsByChunk:
        """Return the runs of a rank along the last stored dim, by chunk."""
        return self._of_member(member)[0][-1]

    def box(self, chunk: ChunkIndex, member: int) -> ChunkBox | None:
        """Return the box that a rank takes of a chunk; None where it takes nothing."""
        held, at = self._of_member(member)
        runs = tuple([row.get(c, ()) for row, c in zip(held, chunk, strict=True)])
        return None if at is None or not all(runs) else ChunkBox(self._number, runs, at, self._turned)


def _pieces_along(
    part: ReadPart, d: int, along: DimChunks, request: ReadRequest, ways: Sequence[BoundaryRows]
) -> DimPieces:
    picks, to, axes = part.picks[d], part.to[d], request.layout.axes
    if to == DROPPED_DIM:
        assert picks is not None
        return _pieces_of_picks(axes, None, ((picks[0][0], 0),), along)
    cut = request.layout.cuts[to]
    if picks is not None:
        return _pieces_of_picks(axes, cut, picks, along)
    # space begins at dim 2 of the sample
    first = part.first[d] if part.first else 0
    return _pieces_of_space(axes, cut, first, along, d in part.flip, ways[to - 2], part.order)


def _fixed_targets(part: ReadPart, layout: Layout, coord: ChunkIndex) -> tuple[tuple[int, int], ...] | None:
    """Return the local place of a part along dims that its array lacks; None for a rank that does not hold it."""
    targets: list[tuple[int, int]] = []
    for dim, index in part.at:
        cut = layout.cuts[dim]
        start, stop = cut.held[layout.piece(cut, coord)]
        if not start <= index < stop:
            return None
        targets.append((dim, index - start))
    return tuple(targets)


_PartDims = tuple[tuple[DimPieces, ...], tuple[DimShares, ...]]


class NeededChunks:
    """The chunks that the ranks of a request need.

    `readers` has for each array its chunks in C order, and the ranks that need each; `geometries` the geometry of each
    of its parts, and that of the rows beyond a pole.
    """

    def __init__(self, request: ReadRequest, grids: Mapping[str, ChunkGrid]) -> None:
        self.request, self.grids, self.ranks = request, grids, request.layout.ranks
        self.geometries: dict[str, list[PartGeometry]] = {}
        both = (False, True) if any(b.rule == "pole" for b in request.boundary) else (False,)
        ways = [boundary_rows(request, turned) for turned in both]
        for number, part in enumerate(request.parts):
            part_geometries = [PartGeometry(number, part, grids[part.array], request, way) for way in ways]
            self.geometries.setdefault(part.array, []).extend(part_geometries)
        # one mapping for all arrays whose parts take the same rows
        alike = {
            name: tuple((geometry.dims, geometry.fixed) for geometry in parts)
            for name, parts in self.geometries.items()
        }
        part_geometries = {parts: _readers_by_chunk(parts) for parts in set(alike.values())}
        self.readers: dict[str, ReadersByChunk] = {name: part_geometries[parts] for name, parts in alike.items()}
        self._taken: dict[tuple[str, ChunkIndex, int], tuple[ChunkBox, ...]] = {}

    def chunks(self, array: str, member: int) -> list[ChunkIndex]:
        # two geometries, such as of two levels, may name a chunk each; a rolled dim ends with its first chunk
        return sorted({chunk for geometry in self.geometries[array] for chunk in geometry.chunks(member)})

    def boxes(self, array: str, chunk: ChunkIndex, member: int) -> tuple[ChunkBox, ...]:
        """Return the boxes that a rank takes of a chunk: one for each part, and one for its rows beyond a pole."""
        key = array, chunk, member
        known = self._taken.get(key)
        if known is None:
            boxes = [geometry.box(chunk, member) for geometry in self.geometries[array]]
            known = self._taken[key] = tuple([box for box in boxes if box is not None])
        return known

    def box_bytes(self, array: str, chunk: ChunkIndex, member: int) -> int:
        return sum(prod(box.extents) for box in self.boxes(array, chunk, member)) * self.grids[array].itemsize


def _readers_by_chunk(parts: Sequence[_PartDims]) -> ReadersByChunk:
    """Find the chunks of which parts take rows, in C order, and the ranks that need them."""
    if len(parts) == 1:
        ((dims, fixed),) = parts
        is_read, pattern = _pattern_of_part(tuple(tuple(dim.shares.values()) for dim in dims), fixed)
        return ReadersByChunk(compress(product(*(dim.shares for dim in dims)), is_read), pattern)
    shares_by_chunk: dict[ChunkIndex, list[PartShares]] = {}
    for dims, fixed in parts:
        for along in product(*(dim.shares.items() for dim in dims)):
            chunk, shares = zip(*along, strict=True)
            shares_by_chunk.setdefault(chunk, []).append(PartShares(shares, fixed))
    every = {chunk: readers_of_chunk(tuple(shares_by_chunk[chunk])) for chunk in sorted(shares_by_chunk)}
    kept = {chunk: readers for chunk, readers in every.items() if readers.ranks}
    return ReadersByChunk(kept, pattern_of_readers(tuple(kept.values())))


@lru_cache(maxsize=256)
def _pattern_of_part(
    along: tuple[tuple[DimShares, ...], ...], fixed: tuple[DimShares, ...]
) -> tuple[tuple[bool, ...], ReadersPattern]:
    """Say which chunks any rank reads for one part, given its shares by dim, and return the pattern of those chunks."""
    every = [readers_of_chunk((PartShares(shares, fixed),)) for shares in product(*along)]
    is_read = tuple(bool(readers.ranks) for readers in every)
    return is_read, pattern_of_readers(tuple(compress(every, is_read)))
