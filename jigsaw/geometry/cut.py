"""Cuts of one dim: intervals, boxes, cut points and `Cut`.  Integers only: no torch, the same result on every rank.

An *interval* is half open; a *box* is one interval for each dim.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import index
from typing import Any, cast

from jigsaw.errors import ShardingError

Interval = tuple[int, int]
Box = tuple[Interval, ...]
SplitRule = str | Sequence[int]


def box_slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Return the slices that pick a box out of memory that holds the whole array, or the box `within`."""
    lows = [0] * len(box) if within is None else [low for low, _ in within]
    return tuple(slice(a - low, b - low) for (a, b), low in zip(box, lows, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple([stop - start for start, stop in box])


def box_elements(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(box_shape(box))


def interval_overlap(a: Interval, b: Interval) -> Interval:
    """Return what two intervals share; an empty interval where nothing."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def box_overlap(a: Box, b: Box) -> Box:
    """Return what two boxes share; an empty interval along each dim in which they share nothing."""
    return tuple(interval_overlap(x, y) for x, y in zip(a, b, strict=True))


def cut_points(size: int, pieces: int, split: SplitRule = "balanced", align: int = 1) -> tuple[int, ...]:
    """Return the points that cut `size` rows into `pieces`: ``pieces + 1`` non-decreasing points from 0 to `size`.

    - ``"balanced"``: piece sizes differ by at most one `align`-block, larger ones first (721/8 = 91 + 7x90);
    - ``"chunk"``: `torch.chunk`'s rule, ceil(size / pieces) rows until they run out (721/8 = 7x91 + 84);
    - a sequence: explicit points, checked.

    `align` keeps every inner point at a multiple of `align` (patches, strides). The last block may be shorter (121
    rows, align 4: 30 blocks and one row).

    Raises: `ShardingError` naming the size, the pieces and the rule that they break.
    """
    check_split_rule(pieces, split, align)
    if size < 0 or pieces < 1:
        raise ShardingError(
            f"cannot cut {size} rows into {pieces} pieces of {align}-row blocks: need size >= 0, pieces >= 1"
        )
    if not isinstance(split, str):
        return _explicit_points(size, pieces, tuple(index(p) for p in split), align)
    blocks = -(-size // align)
    if split == "balanced":
        base, extra = divmod(blocks, pieces)
        points = [i * base + min(i, extra) for i in range(pieces + 1)]
    else:
        step = -(-blocks // pieces)
        points = [min(i * step, blocks) for i in range(pieces + 1)]
    return tuple(points) if align == 1 else tuple(min(align * block, size) for block in points)


def check_split_rule(pieces: int, split: Any, align: Any) -> None:
    """Check the rule.  Raises: `ShardingError` for a `split` or `align` that would be wrong for any size."""
    if not _is_integer(align) or align < 1:
        raise ShardingError(f"align={align!r} must be a whole number, 1 or more: the rows of a block that is not cut")
    if isinstance(split, str) or not isinstance(split, Collection):
        known = split in ("balanced", "chunk")
    else:
        known = all(map(_is_integer, cast(Collection[Any], split)))
    if not known:
        raise ShardingError(
            f"split={split!r} is not a rule: use 'balanced', 'chunk' or {pieces + 1} explicit cut points"
        )


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def _explicit_points(size: int, pieces: int, points: tuple[int, ...], align: int) -> tuple[int, ...]:
    rising = tuple(sorted(points)) == points
    if len(points) != pieces + 1 or not rising or points[0] != 0 or points[-1] != size:
        raise ShardingError(
            f"cut points {points} must be {pieces + 1} non-decreasing integers from 0 to {size}, for {pieces} pieces"
        )
    if align > 1 and any(p % align and p != size for p in points[1:-1]):
        raise ShardingError(f"cut points {points} must be multiples of align={align}")
    return points


class FrozenValue:
    """Quick equality and hash of a frozen value: each part is hashed once, and an object equals itself at once.
    Derived values (cached properties) are not a part of it, and are not pickled, because a hash of words differs in
    each process.
    """

    @cached_property
    def _parts(self) -> tuple[Any, ...]:
        names: Any = type(self).__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
        return tuple([getattr(self, name) for name in names])

    @cached_property
    def _hash(self) -> int:
        return hash(self._parts)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        return self._hash == other._hash and self._parts == other._parts

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parts


@dataclass(frozen=True, eq=False)
class Cut(FrozenValue):
    """Cut of one dim: `points` by `axes` (major to minor), and what each piece holds.

    ``held[i]`` is in *unwrapped* coordinates: on a periodic dim row -1 is row ``size - 1`` and an interval may
    reach below 0 or beyond `size`.  Without a halo it equals the owned interval.

    Where `wraps` is False, held rows beyond [0, size) are not rows of the array: a reader filled them by its boundary
    (`jigsaw.io.series.boundary`).  Only `Tile.local` has them. Views, copies and functions along other dims keep them,
    and everything else leaves them out. Nothing takes them for a row of the array.

    `source` remembers the cuts of the dim that a contraction made this one from.  A contraction back to the same size
    restores them: the tokens after a mixer's second linear lie where they were before its first.  It is part of
    equality, because caches by layout (a stencil's plan has the layout of its result) must not hand out another dim's
    memory.  `have_same_rows` says whether two tiles can meet.  `by_index` says that an index which stays as it is has
    made the dim: a function that a cut dim stops runs with this one whole.

    Raises: `ShardingError` for points that fall or do not run from 0 to `size`, and unless there is one held interval a
    piece.

    >>> cut = jigsaw.Cut(10, (0, 4, 7, 10), axes=("lat",))
    >>> cut.pieces, cut.owned(1)
    (3, (4, 7))
    >>> cut.with_halo(1, 2, periodic=True).held
    ((-1, 6), (3, 9), (6, 12))
    """

    size: int
    points: tuple[int, ...]
    axes: tuple[str, ...] = ()
    held: tuple[Interval, ...] = ()
    source: tuple[Cut, ...] = field(default=(), repr=False)
    wraps: bool = True
    by_index: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        _explicit_points(self.size, self.pieces, self.points, 1)
        # filled in here, so that a cut without halo equals one whose held rows were given
        if not self.held:
            object.__setattr__(self, "held", tuple(pairwise(self.points)))
        elif len(self.held) != self.pieces or any(start > stop for start, stop in self.held):
            raise ShardingError(
                f"held {self.held} must be one interval (start <= stop) for each of the {self.pieces} pieces "
                f"that {self.points} make"
            )

    @property
    def pieces(self) -> int:
        return len(self.points) - 1

    @cached_property
    def _bare(self) -> Cut:
        return replace(self, held=(), wraps=True) if self.has_halo or not self.wraps else self

    @property
    def is_cut(self) -> bool:
        """True where more than one piece exists; a dim cut by axes of size 1 is whole."""
        return len(self.points) > 2

    @cached_property
    def has_halo(self) -> bool:
        return self.held != tuple(pairwise(self.points))

    def owned(self, piece: int) -> Interval:
        return self.points[piece], self.points[piece + 1]

    def bare(self) -> Cut:
        """Return the same cut without halo."""
        return self._bare

    def has_same_rows(self, other: Cut) -> bool:
        """Say whether every piece owns the same rows on the same ranks, whatever it holds or was made from."""
        return self is other or ((self.size, self.points, self.axes) == (other.size, other.points, other.axes))

    def is_finer_than(self, coarse: Cut) -> bool:
        """Return True where this cut has equally many rows for each row of the other, at the same places."""
        rows_of_one, rest = divmod(self.size, max(coarse.size, 1))
        points = tuple(rows_of_one * point for point in coarse.points)
        return not rest and self.has_same_rows(Cut(self.size, points, coarse.axes))

    def holding(self, held: Sequence[Interval]) -> Cut:
        return replace(self, held=tuple(held), wraps=True)

    def inside(self, piece: int) -> Interval:
        """Return the rows of the array that a piece holds: all but rows beyond an end that does not wrap."""
        return self.held[piece] if self.wraps else self.between_ends(piece)

    def between_ends(self, piece: int) -> Interval:
        """Return what a piece holds in [0, size), for operations that do not take the dim for a circle."""
        start, stop = self.held[piece]
        return max(start, 0), min(stop, self.size)

    def uncut(self) -> Cut:
        return whole_dim(self.size)

    def with_halo(self, below: int, above: int, periodic: bool = False) -> Cut:
        """Hold `below` and `above` rows more; clipped at the ends of a dim that is not periodic.

        Raises: `ShardingError` when a margin is negative or wider than the dim.
        """
        if min(below, above) < 0 or max(below, above) > self.size:
            raise ShardingError(
                f"halo ({below}, {above}) must lie within 0..{self.size}, the size of the dim that it extends"
            )

        def grow(start: int, stop: int) -> Interval:
            if start == stop:  # a piece without rows reads nothing, so it needs no halo either
                return start, stop
            wide = start - below, stop + above
            return wide if periodic else (max(wide[0], 0), min(wide[1], self.size))

        return self.holding([grow(*self.owned(i)) for i in range(self.pieces)])

    def with_beyond(self, below: int, above: int) -> Cut:
        """Hold `below` and `above` rows more, even beyond the ends of a dim that does not wrap."""
        # where the halo stays inside the dim there is nothing beyond, and the cut is an ordinary one
        wide, ended = self.with_halo(below, above, periodic=True), self.with_halo(below, above)
        return replace(wide, wraps=wide.held == ended.held)


def have_same_rows(group: Sequence[Cut], other: Sequence[Cut]) -> bool:
    """Say whether two tensor dims lie on the ranks alike, so that their tiles can meet without a message."""
    return len(group) == len(other) and all(a.has_same_rows(b) for a, b in zip(group, other, strict=True))


@lru_cache(maxsize=4096)
def whole_dim(size: int) -> Cut:
    """Return the cut of a dim that nothing cuts."""
    return Cut(size, (0, size))


def cut_by_some_axes(cut: Cut, kept: Collection[str], sizes: Mapping[str, int]) -> Cut:
    """Return a cut by only those of its axes that are `kept`, without halo.

    >>> from jigsaw.geometry.cut import cut_by_some_axes
    >>> cut_by_some_axes(jigsaw.Cut(9, (0, 2, 4, 7, 9), ("lat", "lon")), ["lat"], {"lat": 2, "lon": 2}).points
    (0, 4, 9)
    """
    left = tuple(a for a in cut.axes if a in kept)
    if left == cut.axes:
        return cut.bare()
    pieces = math.prod(sizes[a] for a in left)
    is_major = cut.axes[: len(left)] == left  # then a piece consists of consecutive old ones
    points = cut.points[:: cut.pieces // pieces] if is_major else cut_points(cut.size, pieces)
    return Cut(cut.size, points, left) if left else whole_dim(cut.size)


def cut_holding_along(cut: Cut, axes: Collection[str], sizes: Mapping[str, int]) -> Cut:
    """Return a cut of which each piece holds the rows of all pieces along `axes`, which must be its minor ones.

    Raises: `ShardingError` where they are not: the rows of such pieces do not lie side by side.

    >>> from jigsaw.geometry.cut import cut_holding_along
    >>> cut_holding_along(jigsaw.Cut(9, (0, 2, 4, 7, 9), ("lat", "lon")), ["lon"], {"lat": 2, "lon": 2}).held
    ((0, 4), (0, 4), (4, 9), (4, 9))
    """
    count = math.prod(sizes[a] for a in axes)
    if set(cut.axes[len(cut.axes) - len(axes) :]) != set(axes):
        raise ShardingError(
            f"a dim of {cut.size} rows is cut by {cut.axes}, but its rows along {tuple(axes)} lie side by side only "
            f"where these axes come last: {(*(a for a in cut.axes if a not in axes), *axes)}"
        )
    first = [i - i % count for i in range(cut.pieces)]
    return cut.bare().holding([(cut.points[i], cut.points[i + count]) for i in first])


def cut_of_cells(size: int, edges: Sequence[Cut]) -> tuple[Cut, ...] | None:
    """Return how `size` rows of zeros are cut, into which an index will write values that are cut as `edges`."""
    if len(edges) != 1 or not edges[0].by_index or [c.size for c in edges[0].source] != [size]:
        return None
    return (replace(edges[0].source[0], by_index=True),)


_LEAST_SHARE = 16  # rows that an index names are cut only if there is at least one for this number of cells


def is_worth_cutting(rows: int, cells: Sequence[Cut]) -> bool:
    """Say whether so many rows that belong to cells, by an index, are cut as these: few of them stay whole."""
    return rows >= max(math.prod(c.pieces for c in cells), math.prod(c.size for c in cells) // _LEAST_SHARE)


def cut_of_written_rows(size: int, values: Sequence[Cut]) -> tuple[Cut, ...] | None:
    """Return how `size` rows are cut to which an index writes values that are cut as `values`; None for whole ones.

    They are cut as the cells that the values were picked from, where there are as many, else evenly.
    """
    cells = values[0].source if len(values) == 1 and values[0].by_index and values[0].source else values
    if [c.size for c in cells] == [size]:
        return (replace(cells[0].bare(), by_index=True),)
    if not is_worth_cutting(size, cells):
        return None
    axes, pieces = tuple(a for c in values for a in c.axes), math.prod(c.pieces for c in values)
    return (Cut(size, cut_points(size, pieces), axes, by_index=True),)
