"""Grid of pieces: where cuts of its dims divide a tensor, and which file has which piece, by rules and not by a list.

Four ranks, lat=2 and lon=2, and W [7, 4], rows cut by lat and columns by lon.  Rows of pieces begin at 0 and 4, columns
at 0 and 2.  Piece 0 has rows 0:4 and columns 0:2, piece 1 the same rows and columns 2:4, and so on, row-major.  Ranks
0, 1, 2, 3 have them in files of these numbers: one range, ``(0, 4, 1)``, which begins at 0 and has 4 files in steps of
1.  A thousand ranks need no more numbers.  A rank that reads rows 3:5 finds by bisection that it needs all four pieces.

Which place a piece has within its file stands at the end of that file (`piece_places`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.geometry.cut import Box, Interval

FileRange = tuple[int, int, int]
RankRows = tuple[tuple[int, int], ...]
"""Ranks and parts of each axis that cuts a dim; a dim of several parts has a piece of each on every rank."""


class GridPiece(NamedTuple):
    """A piece of a grid: its box, the number of its file, and its number among those pieces that this file has."""

    box: Box
    file: int
    number: int


class PieceGrid(NamedTuple):
    """Grid of the pieces of a tensor: where those along each dim begin, and ranges (first, count, step) of files."""

    shape: tuple[int, ...]
    begins: tuple[Sequence[int], ...]
    files: tuple[FileRange, ...]

    @property
    def piece_count(self) -> int:
        """Number of pieces; a tensor without elements has none."""
        return sum(count for _, count, _ in self.files)

    def pieces_in(self, box: Box) -> list[GridPiece]:
        """Return the pieces that share elements with a box."""
        if not self.piece_count or any(start >= stop for start, stop in box):
            return []
        counts = [len(each) for each in self.begins]
        files, numbers = _files_of_pieces(self.files)
        along = [
            range(bisect_right(begins, start) - 1, bisect_left(begins, stop))
            for begins, (start, stop) in zip(self.begins, box, strict=True)
        ]
        pieces: list[GridPiece] = []
        for place in product(*along):
            at = 0
            for number, count in zip(place, counts, strict=True):
                at = at * count + number
            pieces.append(GridPiece(self._box_at(place), int(files[at]), int(numbers[at])))
        return pieces

    def _box_at(self, place: tuple[int, ...]) -> Box:
        ends = [
            begins[at + 1] if at + 1 < len(begins) else size
            for at, begins, size in zip(place, self.begins, self.shape, strict=True)
        ]
        return tuple((begins[at], end) for at, begins, end in zip(place, self.begins, ends, strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return the form that `grid_from_json` reads: of a dim the rows of a piece, or where pieces begin."""
        cuts = [_even_step(begins, size) or list(begins) for begins, size in zip(self.begins, self.shape, strict=True)]
        return {"cuts": cuts, "files": [list(each) for each in self.files]}


def grid_from_json(shape: tuple[int, ...], cuts: list[Any], files: list[Any], most_pieces: int) -> PieceGrid:
    """Return the grid that a file describes.

    Raises: `ValueError`, or any other error, for a grid that does not divide the shape, each element once. Also for
    one of more than `most_pieces`, which are counted before memory is taken for them.
    """
    begins: list[Sequence[int]] = []
    for size, cut in zip(shape, cuts, strict=True):
        if type(cut) is int:
            if not 0 < cut <= max(size, 1):
                raise ValueError(f"pieces of {cut} rows do not cut {size}")
            begins.append(range(0, max(size, 1), cut))
        else:
            points = np.array([*map(_natural_number, cut), max(size, 1)], np.int64)
            if points[0] or not (np.diff(points) > 0).all():
                raise ValueError(f"pieces of a dim of {size} rows do not begin one after the other")
            begins.append(tuple(cut))
    ranges = tuple((_natural_number(a), _natural_number(b), _natural_number(c)) for a, b, c in files)
    pieces = math.prod(map(len, begins)) if math.prod(shape) else 0
    if pieces > most_pieces or sum(count for _, count, _ in ranges) != pieces:
        raise ValueError(f"{pieces} pieces do not lie in the files that are said to have them")
    return PieceGrid(shape, tuple(begins), ranges)


def _natural_number(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"{number!r} is not a natural number")
    return number


def grid_of_ranks(
    shape: tuple[int, ...], axes_of_dims: Sequence[Sequence[int]], parts: Sequence[int], ranks: NDArray[Any]
) -> PieceGrid:
    """Return the grid of a tensor whose dims are cut along axes of `ranks`; each rank's file has its own number.

    `parts` has, for each axis, the parts of the dim that it cuts.
    """
    rows = [
        cut_rows(size, tuple((ranks.shape[a], parts[a]) for a in axes))
        for size, axes in zip(shape, axes_of_dims, strict=True)
    ]
    by_dim = ranks.transpose([a for axes in axes_of_dims for a in axes])
    by_dim = by_dim.reshape([math.prod(ranks.shape[a] for a in axes) for axes in axes_of_dims])
    files = by_dim[np.ix_(*(owners for _, owners in rows))] if rows else by_dim
    ranges = ranges_of_files(files.reshape(-1)) if math.prod(shape) else ()
    return PieceGrid(shape, tuple(begins for begins, _ in rows), ranges)


def ranges_of_files(files: NDArray[Any]) -> tuple[FileRange, ...]:
    """Return numbers of files as few ranges."""
    steps = np.diff(files)
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    ranges: list[FileRange] = []
    at = next_change = 0
    while at < len(files):
        while next_change < len(changes) - 1 and changes[next_change] <= at:
            next_change += 1
        last, step = changes[next_change], int(steps[at]) if at < len(steps) else 1
        if step < 0 or at >= len(steps):
            last, step = at, 1
        ranges.append((int(files[at]), last - at + 1, step))
        at = last + 1
    return tuple(ranges)


@lru_cache(maxsize=256)
def _files_of_pieces(ranges: tuple[FileRange, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the number of each piece's file, and the number of the piece among those of its file."""
    files = np.concatenate([np.arange(count) * step + first for first, count, step in ranges])
    order = np.argsort(files, kind="stable")
    in_order = files[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=-1))
    numbers = np.empty_like(files)
    numbers[order] = np.arange(len(files)) - np.repeat(starts, np.diff(starts, append=len(files)))
    return files, numbers


# -- how axes cut a dim -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def cut_rows(size: int, axes: RankRows) -> tuple[Sequence[int], NDArray[Any]]:
    """Return where the pieces of a dim begin, and which place along the axes, row-major, has each of them.

    Each axis shares out what the one before has left, as torch cuts DTensors: by `torch.chunk`, each part by itself.
    """
    runs = [[(0, size)]]
    for ranks, parts in axes:
        runs = [share for rows in runs for share in _row_shares_of_ranks(rows, ranks, parts)]
    owned = sorted((start, stop, owner) for owner, rows in enumerate(runs) for start, stop in rows if start < stop)
    joined: list[tuple[int, int, int]] = []
    for start, stop, owner in owned:
        if joined and joined[-1][2] == owner:
            joined[-1] = (joined[-1][0], stop, owner)
        else:
            joined.append((start, stop, owner))
    begins = [start for start, _, _ in joined] or [0]
    step = _even_step(begins, size)
    owners = np.array([owner for _, _, owner in joined] or [0])
    return range(0, max(size, 1), step) if step else tuple(begins), owners


def _row_shares_of_ranks(rows: Sequence[Interval], ranks: int, parts: int) -> list[list[Interval]]:
    """Return the rows of each rank, of parts that differ by at most one row."""
    total, shares, begin = sum(stop - start for start, stop in rows), [list[Interval]() for _ in range(ranks)], 0
    for part in range(parts):
        size = total // parts + (part < total % parts)
        step = max(-(-size // ranks), 1)
        for rank in range(ranks):
            first, end = min(rank * step, size), min((rank + 1) * step, size)
            if first < end:
                shares[rank] += _interval_rows(rows, begin + first, begin + end)
        begin += size
    return shares


def _interval_rows(rows: Sequence[Interval], first: int, end: int) -> list[Interval]:
    """Return the rows from number `first` to `end` among those that a rank has."""
    taken, at = list[Interval](), 0
    for start, stop in rows:
        low, high = max(first - at, 0), min(end - at, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        at += stop - start
    return taken


def _even_step(begins: Sequence[int], size: int) -> int | None:
    """Return the rows of a piece, where all but the last have as many and that has no more; else None."""
    if isinstance(begins, range):
        return begins.step
    step = begins[1] if len(begins) > 1 else max(size, 1)
    is_even = step > 0 and tuple(begins) == tuple(range(0, max(size, 1), step))
    return step if is_even else None
