"""Which rows of which chunks a rank takes, and where in its sample they land.

Each dim is worked out by itself, and a box is the product of its dims.  Ten rows of latitude in chunks of 4 (rows 0-3,
4-7 and 8-9), cut among four ranks, who hold a row more on each side, on a dim that wraps:

    rank  owns   holds    takes, as `RowRun`s (source, its step, target, its step, length)
    0     0-2    -1..3    of chunk 2 (1, 1, 0, 1, 1), as row -1 is row 9;  of chunk 0 (0, 1, 1, 1, 4)
    1     3-5     2..6    of chunk 0 (2, 1, 0, 1, 2);  of chunk 1 (0, 1, 2, 1, 3)
    2     6-7     5..8    of chunk 1 (1, 1, 0, 1, 3);  of chunk 2 (0, 1, 3, 1, 1)
    3     8-9     7..10   of chunk 1 (3, 1, 0, 1, 1);  of chunk 2 (0, 1, 1, 1, 2);  of chunk 0 (0, 1, 3, 1, 1)

Sources count from the chunk's first row, targets from the first row that the rank holds.  Were the array stored
upside down, row r would be the stored row 9 - r, and rank 0 would take of chunk 2 (1, -1, 1, 1, 2): backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from jigsaw.cut import Cut, Interval
from jigsaw.io.chunks.byte_ranges import merge_ranges
from jigsaw.io.chunks.chunk_grid import ChunkGrid, ChunkIndex, ChunkRows, DimChunks
from jigsaw.io.series.boundary import PERIODIC_BOUNDARY, DimBoundary
from jigsaw.io.series.request import DROPPED_DIM, IndexPicks, ReadPart, ReadRequest, runs_of_pairs


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
    def rows(self) -> Interval:
        """The interval of the chunk's rows that it spans."""
        last = self.source + self.source_step * (self.length - 1)
        return min(self.source, last), max(self.source, last) + 1


class ChunkBox(NamedTuple):
    """What one rank takes of a chunk for one part: the product of the runs of each stored dim.

    `at` are the (dim, local index) where it lands along dims of the sample that the array lacks.  Of a part a rank may
    take two boxes: the rows beyond a pole are `turned`.
    """

    part: int
    runs: tuple[tuple[RowRun, ...], ...]
    at: tuple[tuple[int, int], ...]
    turned: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    @property
    def repeats(self) -> bool:
        """Whether it takes a row of the chunk more than once, as rows beyond an edge do."""
        rows = [[x for run in runs for x in run.each] for runs in self.runs if len(runs) > 1]
        return any(len(set(taken)) < len(taken) for taken in rows)

    @property
    def rect(self) -> ChunkRows:
        return tuple(tuple(merge_ranges(run.rows for run in runs)) for runs in self.runs)


# -- from one dim's rows to runs -------------------------------------------------------------------------------------

RunsByChunk = dict[int, tuple[RowRun, ...]]


def _split_by_chunk(pairs: Sequence[tuple[int, int]], along: DimChunks) -> RunsByChunk:
    split: dict[int, list[tuple[int, int]]] = {}
    for source, target in pairs:
        chunk = along.find(source)
        split.setdefault(chunk, []).append((source - along.start(chunk), target))
    return {c: tuple(RowRun(*run) for run in runs_of_pairs(rows)) for c, rows in split.items()}


@lru_cache(maxsize=4096)
def _runs_of_space_dim(
    held: Interval, size: int, first: int, along: DimChunks, flip: bool, way: BoundaryRows
) -> RunsByChunk:
    """The runs of a spatial dim, whose `size` rows begin at the stored row `first`; they wrap where it is rolled."""
    # Three counts of rows: those of the sample, as held -> those of the domain, beyond whose ends the boundary's rule
    # has shown which row stands there (and half a turn on, beyond a pole) -> those stored, which may run against them.
    # On 10 rows that wrap, stored upside down, a rank holds -1..3: its first row is the domain's 9, and the stored 0.
    # Of a rolled dim `first` is the stored row at which the domain begins: of 6, row 5 is the stored row 11 % 10 = 1.
    rows = ((row, target) for target, row, turned in way.boundary.rows(held, size) if turned == way.turned)
    shown = (((row + way.shift) % size if way.shift else row, target) for row, target in rows)
    pairs = [((first + (size - 1 - row if flip else row)) % along.size, target) for row, target in shown]
    return _split_by_chunk(pairs, along)


class BoundaryRows(NamedTuple):
    """Which of the held rows of a dim are meant, and by how many rows they are shifted.

    Beyond a pole a globe goes on along the opposite meridian: `turned` rows of latitude, each of them shifted by half
    the rows of longitude.  The rows within the poles are another geometry, not turned and not shifted.
    """

    boundary: DimBoundary = PERIODIC_BOUNDARY
    turned: bool = False
    shift: int = 0


def _boundary_rows(request: ReadRequest, turned: bool) -> tuple[BoundaryRows, ...]:
    """For each spatial dim; `turned` for the rows beyond a pole."""
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


class PartGeometry:
    """Of one part: for each rank and stored dim the chunks that it needs, and which rows of them.

    Runs are worked out for each piece of a cut, not for each rank: of 64 ranks on 8 x 8 pieces 8 for latitude and 8
    for longitude, of which rank 13, at (1, 5), has the second and the sixth.
    """

    def __init__(
        self, number: int, part: ReadPart, grid: ChunkGrid, request: ReadRequest, turned: bool = False
    ) -> None:
        self._number, self._turned, self._along = number, turned, grid.along
        self.ends_in_space = bool(part.to) and part.to[-1] >= 2
        self._shares: dict[int, list[dict[int, float]]] = {}
        layout, ways = request.layout, _boundary_rows(request, turned)
        dims = [_runs_by_piece(part, d, grid, request, ways) for d in range(len(part.to))]
        # a dropped dim has no cut, and is one piece that all ranks take
        pieces = [[layout.piece(cut, coord) if cut else 0 for cut, _, _ in dims] for coord in layout.coords()]
        self._held = [[held[i] for (_, held, _), i in zip(dims, mine, strict=True)] for mine in pieces]
        self._owned = [[owned[i] for (_, _, owned), i in zip(dims, mine, strict=True)] for mine in pieces]
        self._fixed_at = [_fixed_targets(part, request, coord) for coord in layout.coords()]

    def chunks(self, member: int) -> Iterator[ChunkIndex]:
        return iter(()) if self._fixed_at[member] is None else product(*self._held[member])

    def owns(self, chunk: ChunkIndex, member: int) -> bool:
        """Whether a rank owns rows of a chunk, rather than only holding some as its halo."""
        return all(c in rows for rows, c in zip(self._owned[member], chunk, strict=True))

    def last(self, member: int) -> RunsByChunk:
        """What a rank takes along the last stored dim, for each of the chunks there."""
        return self._held[member][-1]

    def share(self, chunk: ChunkIndex, member: int) -> float:
        if member not in self._shares:
            # merged, because rows that are taken twice, as beyond an edge, are decoded once
            self._shares[member] = [
                {
                    c: sum(b - a for a, b in merge_ranges(run.rows for run in runs)) / along.length(c)
                    for c, runs in rows.items()
                }
                for rows, along in zip(self._held[member], self._along, strict=True)
            ]
        return prod(shares.get(c, 0.0) for shares, c in zip(self._shares[member], chunk, strict=True))

    def box(self, chunk: ChunkIndex, member: int) -> ChunkBox | None:
        """What a rank takes of a chunk; None for nothing."""
        at = self._fixed_at[member]
        runs = tuple(row.get(c, ()) for row, c in zip(self._held[member], chunk, strict=True))
        return None if at is None or not all(runs) else ChunkBox(self._number, runs, at, self._turned)


def _runs_by_piece(
    part: ReadPart, d: int, grid: ChunkGrid, request: ReadRequest, ways: Sequence[BoundaryRows]
) -> tuple[Cut | None, list[RunsByChunk], list[RunsByChunk]]:
    """How a stored dim is cut, and what each piece holds of its chunks, and owns of them."""
    picks, to, along = part.picks[d], part.to[d], grid.along[d]
    if to == DROPPED_DIM:
        assert picks is not None
        runs = [_runs_of_picks(((picks[0][0], 0),), (0, 1), along)]
        return None, runs, runs
    cut = request.layout.cuts[to]
    if picks is not None:  # along times and channels, where nobody has a halo
        runs = [_runs_of_picks(picks, held, along) for held in cut.held]
        return cut, runs, runs
    # space begins at dim 2 of the sample
    how = cut.size, part.first[d] if part.first else 0, along, d in part.flip, ways[to - 2]
    held = [_runs_of_space_dim(rows, *how) for rows in cut.held]
    return cut, held, [_runs_of_space_dim(cut.owned(i), *how) for i in range(cut.pieces)]


def _fixed_targets(part: ReadPart, request: ReadRequest, coord: ChunkIndex) -> tuple[tuple[int, int], ...] | None:
    """Where a part lands along dims that its array lacks: None for a rank that does not hold that place."""
    found: list[tuple[int, int]] = []
    for dim, index in part.at:
        cut = request.layout.cuts[dim]
        start, stop = cut.held[request.layout.piece(cut, coord)]
        if not start <= index < stop:
            return None
        found.append((dim, index - start))
    return tuple(found)
