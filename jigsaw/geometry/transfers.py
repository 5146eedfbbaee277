"""Messages of an exchange, from the boxes that ranks own and the boxes that they need.  No torch.

Each rank owns the box ``source.owned(coord)`` and holds ``source.held(coord)``; it needs ``target.held(coord)``. Needed
intervals may reach below 0 or beyond the size: rows wrap around, as on a longitude circle.  What a rank holds already
is copied, everything else comes from its owner, in one message a pair of ranks.  The arithmetic is per dim, so boxes
with several hops, several wraps, empty pieces and negative margins need no special case. A rank plans its own side
alone. The steps count its dims' pieces and its messages, never the ranks of the mesh.

Example: four ranks on lat=2, lon=2, an 8 x 8 array, a row of halo around, lon a circle.  Rank 0 owns [0:4, 0:4] and
needs [0:5, -1:5].  Along lat rows 0:4 are its own and row 4 belongs to the rank below. Along lon -1 is column 7 and 4
column 4, both of the ranks to the right.  The product of these is its list. Rank 1 gives columns 3 and 0 of its local
tensor, rank 2 a row, rank 3 two corners.  Rank 0 gives the same to the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Box, Cut, Interval, box_shape
from jigsaw.geometry.layout import Layout, MeshCoordinate

BoxesByPeer = tuple[tuple[int, tuple[Box, ...]], ...]


@dataclass(frozen=True, slots=True)
class RowMove:
    """Rows that one rank (mesh position `giver`) gives another: `taken` of its local tensor become `placed` there."""

    giver: int
    taken: Box
    placed: Box


@dataclass(frozen=True)
class ExchangePlan:
    """Exchange of one rank, in local rows.  Shapes have one entry a cut; those of tiles, one a tensor dim."""

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    kept: tuple[RowMove, ...]
    sends: BoxesByPeer
    receives: BoxesByPeer
    source_tile: tuple[int, ...]
    target_tile: tuple[int, ...]
    layouts: tuple[Layout, Layout]

    @cached_property
    def is_local(self) -> bool:
        return not self.sends and not self.receives

    @cached_property
    def is_slice(self) -> bool:
        """True where the target is one box of what this rank holds, and no other rank needs anything from it."""
        return self.is_local and len(self.kept) == 1 and box_shape(self.kept[0].placed) == self.target_shape

    @cached_property
    def keeps_all(self) -> bool:
        """True where the whole source is kept, as one box: the gradient can then start as a slice."""
        return len(self.kept) == 1 and box_shape(self.kept[0].taken) == self.source_shape


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive needed rows of one dim with one owner: `rows` of the global dim, `placed` in the needed interval."""

    owner: int
    rows: Interval
    placed: Interval
    mine: Interval | None  # the same rows in the needing rank's own local coordinates, where it holds them


@dataclass(frozen=True, slots=True)
class _DimNeed:
    """Rows that a rank needs along a dim: rows `held`, of which those `inside` are rows of the array; `piece` is its
    piece of the source.
    """

    held: Interval
    inside: Interval
    piece: int


def _dim_need(source: Layout, target: Layout, dim: int, coord: MeshCoordinate) -> _DimNeed:
    wanted = target.cuts[dim]
    at = target.piece(wanted, coord)
    return _DimNeed(wanted.held[at], wanted.inside(at), source.piece(source.cuts[dim], coord))


def _needed_segments(cut: Cut, need: _DimNeed) -> list[_Segment]:
    """Split what a rank needs at wraps, at the owners' cut points and at the edges of what it holds."""
    segments: list[_Segment] = []
    # rows -1:5 of a circle of 8 owned as 0:4, 4:8 give -1:0 (row 7, of piece 1), 0:4 (piece 0) and 4:5 (piece 1)
    start, end = need.inside
    while start < end:
        row = start % cut.size
        owner = bisect_right(cut.points, row) - 1
        stop = min(end, start - row + cut.points[owner + 1])
        segments += _split_at_held(cut, need, owner, (start, stop))
        start = stop
    return _add_rows_beyond(cut, need, segments)


def _segments_of_owner(cut: Cut, need: _DimNeed, owner: int) -> list[_Segment]:
    """Return those of `_needed_segments` with that owner, without walking through the others."""
    low, high = cut.owned(owner)
    segments: list[_Segment] = []
    for wrap in _wraps_to_owner(cut, need.inside, owner):
        span = max(need.inside[0], low + wrap * cut.size), min(need.inside[1], high + wrap * cut.size)
        segments += _split_at_held(cut, need, owner, span)
    return _add_rows_beyond(cut, need, segments) if need.piece == owner else segments


def _add_rows_beyond(cut: Cut, need: _DimNeed, inside: list[_Segment]) -> list[_Segment]:
    """Return those inside and, around them, the needed rows beyond an end that does not wrap, which the ranks of one
    piece share.
    """
    if need.held == need.inside:
        return inside
    low, first = cut.held[need.piece][0], need.held[0]

    def beyond(a: int, b: int) -> list[_Segment]:
        return [_Segment(need.piece, (a, b), (a - first, b - first), (a - low, b - low))] if a < b else []

    return [*beyond(need.held[0], need.inside[0]), *inside, *beyond(need.inside[1], need.held[1])]


def _wraps_to_owner(cut: Cut, need: Interval, owner: int) -> range:
    """Return how often the dim must be unrolled for the owner's rows to meet the needed interval."""
    low, high = cut.owned(owner)
    if low == high or need[0] >= need[1]:
        return range(0)
    return range((need[0] - high) // cut.size + 1, -((low - need[1]) // cut.size))


def _split_at_held(cut: Cut, need: _DimNeed, owner: int, span: Interval) -> Iterator[_Segment]:
    """Iterate over the rows of one owner in one wrap, split where the rank that needs them begins or ends to hold them
    itself.
    """
    # a rank that holds -1:4 and needs -2:5 fetches only -2 and 4: -1 is in its halo, though another owns it
    base, first = span[0] - span[0] % cut.size, need.held[0]
    held_ends = [base + h % cut.size for h in cut.inside(need.piece)]
    edges = [e for e in held_ends if span[0] < e < span[1]]
    for start, stop in pairwise(sorted({*span, *edges}) if edges else span):
        at = _where_held(cut, need.piece, start, stop - start)
        yield _Segment(owner, (start - base, stop - base), (start - first, stop - first), at)


def _where_held(cut: Cut, piece: int, start: int, length: int) -> Interval | None:
    """Return where `piece` holds the rows [start, start + length), tried as asked first, then any number of
    wraps away.
    """
    (low, high), first = cut.inside(piece), cut.held[piece][0]
    # a piece can hold a row twice (a halo that goes around the circle); the copy without a wrap is taken, so that
    # gradients of a row return to the copy that was used
    for wraps in (0, -((start - low) // cut.size)):
        at = start + wraps * cut.size
        if low <= at and at + length <= high:
            return at - first, at - first + length
    return None


def _merged_own_rows(segments: Sequence[_Segment]) -> list[tuple[Interval, Interval]]:
    """Return (mine, placed) of the segments that this rank holds itself, consecutive ones merged."""
    runs: list[tuple[Interval, Interval]] = []
    for s in segments:
        if s.mine is None:
            continue
        if runs and runs[-1][0][1] == s.mine[0] and runs[-1][1][1] == s.placed[0]:
            (held, placed) = runs.pop()
            runs.append(((held[0], s.mine[1]), (placed[0], s.placed[1])))
        else:
            runs.append((s.mine, s.placed))
    return runs


def row_moves(source: Layout, target: Layout, coord: MeshCoordinate) -> tuple[RowMove, ...]:
    """Return everything that the rank at `coord` must gather to hold its target box; its own rows first."""
    if any(start >= stop for start, stop in target.held(coord)):
        return ()
    by_dim = [_needed_segments(c, _dim_need(source, target, d, coord)) for d, c in enumerate(source.cuts)]
    me = source.index(coord)
    moves = [RowMove(me, *_taken_and_placed(cell)) for cell in product(*map(_merged_own_rows, by_dim))]
    # the common case, a crop: the product over dims below would find nothing, slowly
    if all(s.mine is not None for segments in by_dim for s in segments):
        return tuple(moves)
    for cell in product(*by_dim):
        # a corner is at hand only where it is along every dim; else the owner of all its rows gives it, in one message
        # and without a second hop through a neighbor
        if any(s.mine is None for s in cell):
            giver = _owner_position(source, coord, [s.owner for s in cell])
            taken = tuple([_local_interval(s.rows, c, s.owner) for s, c in zip(cell, source.cuts, strict=True)])
            moves.append(RowMove(giver, taken, tuple([s.placed for s in cell])))
    return tuple(moves)


def _taken_and_placed(cell: Sequence[tuple[Interval, Interval]]) -> tuple[Box, Box]:
    return tuple(taken for taken, _ in cell), tuple(placed for _, placed in cell)


def _local_interval(rows: Interval, cut: Cut, owner: int) -> Interval:
    """Return global rows as rows of the local tensor of the piece that owns them."""
    low, _ = cut.held[owner]
    return rows[0] - low, rows[1] - low


def _owner_position(source: Layout, coord: MeshCoordinate, pieces: Sequence[int]) -> int:
    """Return the position of the owner of the given piece of every cut; along axes that cut nothing, the asking rank's
    own.
    """
    at = dict(zip((name for name, _ in source.axes), coord, strict=True))
    for cut, piece in zip(source.cuts, pieces, strict=True):
        if cut.axes:
            at.update(_axis_places(source, cut, piece))
    return source.index(tuple(at.values()))


def _axis_places(layout: Layout, cut: Cut, piece: int) -> dict[str, int]:
    """Return where on its axes a piece of a cut is."""
    at: dict[str, int] = {}
    sizes = dict(layout.axes)
    for axis in reversed(cut.axes):
        piece, at[axis] = divmod(piece, sizes[axis])
    return at


def _boxes_given(
    source: Layout, target: Layout, coord: MeshCoordinate, others: Sequence[MeshCoordinate]
) -> Iterator[tuple[Box, ...]]:
    """Iterate over what the rank at `coord` gives each of the `others`, in the order of the `row_moves` of that one."""
    # A dim is computed once for all others that are the same along it: for 511 that need other columns of my rows, each
    # dim that neither layout cuts is computed once, and for 1023 on 32 x 32 all dims 32 times.
    intervals: dict[tuple[int, int, int], list[tuple[Interval, bool]]] = {}
    wanted = list(enumerate(zip(source.cuts, target.cuts, strict=True)))
    for other in others:
        by_dim: list[list[tuple[Interval, bool]]] = []
        for d, (cut, needed) in wanted:
            key = d, source.piece(cut, other), target.piece(needed, other)
            if key not in intervals:
                owner = source.piece(cut, coord)
                segments = _segments_of_owner(cut, _dim_need(source, target, d, other), owner)
                intervals[key] = [(_local_interval(s.rows, cut, owner), s.mine is None) for s in segments]
            by_dim.append(intervals[key])
        yield tuple(
            [
                tuple([rows for rows, _ in cell])
                for cell in product(*by_dim)
                if any(is_lacking for _, is_lacking in cell)
            ]
        )


def _asking_coordinates(source: Layout, target: Layout, coord: MeshCoordinate) -> list[MeshCoordinate]:
    """Return the others that may need rows that the rank at `coord` owns, found dim by dim instead of rank by rank."""
    own_places = dict(zip((name for name, _ in source.axes), coord, strict=True))
    cutting = source.cut_axes
    options: list[list[dict[str, int]]] = []
    for cut, wanted in zip(source.cuts, target.cuts, strict=True):
        piece = source.piece(cut, coord)
        asking = [q for q in range(wanted.pieces) if _wraps_to_owner(cut, wanted.inside(q), piece)]
        askers = [_axis_places(target, wanted, q) for q in asking]
        # a rank asks the owner that shares its place on the axes along which the source is replicated
        options.append([at for at in askers if all(c == own_places[a] for a, c in at.items() if a not in cutting)])
    settled = {a for cut in target.cuts for a in cut.axes}
    # an axis that cuts only the source: every place along it needs its own copy, so any of them may ask
    for axis in cutting:
        if axis not in settled:
            options.append([{axis: c} for c in range(source.size_of(axis))])
    coords = {
        tuple({**own_places, **{a: c for at in chosen for a, c in at.items()}}.values()) for chosen in product(*options)
    }
    return sorted(coords - {coord})


def check_exchange(source: Layout, target: Layout) -> None:
    """Raise, from facts that every rank shares, when no exchange can bring the source to the target."""
    if source.axes != target.axes or [c.size for c in source.cuts] != [c.size for c in target.cuts]:
        raise ShardingError(
            f"cannot exchange between {source} on mesh {dict(source.axes)} and {target} on mesh {dict(target.axes)}: "
            f"sizes and mesh must agree"
        )
    for cut, wanted in zip(source.cuts, target.cuts, strict=True):
        owned = tuple(pairwise(cut.points))
        if any(a < b and not (low <= a and b <= high) for (low, high), (a, b) in zip(cut.held, owned, strict=True)):
            raise ShardingError(
                f"the source holds {cut.held} of a dim whose pieces own {owned}: rows that their owner lacks cannot be "
                f"exchanged; let every piece hold at least what it owns"
            )
        if not wanted.wraps and (cut.wraps or not cut.has_same_rows(wanted) or not _has_rows_beyond(cut, wanted)):
            raise ShardingError(
                f"the target needs rows {wanted.held} of a dim of {cut.size} rows that does not wrap; rows beyond an "
                "end come from a reader alone and stay where it put them: leave the halo out with tile.owned()"
            )
        if cut.size == 0 and any(start < stop for start, stop in wanted.held):
            raise ShardingError(f"the target needs rows {wanted.held} of a dim that has none; an empty dim cannot wrap")


def _has_rows_beyond(cut: Cut, wanted: Cut) -> bool:
    """Say whether each piece holds the rows beyond an end that it needs there."""

    def beyond(held: Interval) -> Interval:
        return min(held[0], 0), max(held[1], cut.size)

    pairs = zip(map(beyond, cut.held), map(beyond, wanted.held), strict=True)
    return all(low <= a and b <= high for (low, high), (a, b) in pairs)


@lru_cache(maxsize=512)
def plan_exchange(source: Layout, target: Layout, coord: MeshCoordinate) -> ExchangePlan:
    """Plan the transfers that bring every rank from its source box to its target box, as the rank at `coord` sees them.

    Raises: `ShardingError` when the layouts describe arrays of different shapes or meshes, or the source lacks rows.
    """
    check_exchange(source, target)
    me = source.index(coord)
    moves = row_moves(source, target, coord)
    receives: dict[int, list[Box]] = {}
    for m in moves:
        if m.giver != me:
            receives.setdefault(m.giver, []).append(m.placed)
    asking = _asking_coordinates(source, target, coord)
    boxes_by_peer = zip(map(source.index, asking), _boxes_given(source, target, coord, asking), strict=True)
    return ExchangePlan(
        box_shape(source.held(coord)),
        box_shape(target.held(coord)),
        tuple(m for m in moves if m.giver == me),
        tuple((peer, boxes) for peer, boxes in boxes_by_peer if boxes),
        tuple((peer, tuple(boxes)) for peer, boxes in sorted(receives.items())),
        source.local_shape(coord),
        target.local_shape(coord),
        (source, target),
    )


MOST_PEERS_AT_ONCE = 64
"""Ranks among which rows are exchanged at once; with more, messages are many and small, and two rounds have fewer.

Sums that each rank would share with each other one are the backend's own then.
"""


def layouts_between(source: Layout, target: Layout) -> tuple[Layout, ...]:
    """Return layouts to pass on the way, from each of which one axis goes to another dim; none where few ranks meet, or
    where axes do not lie in an order that allows it.

    Example: 32 x 32 ranks take rows cut by (lat, lon) to columns cut by (lon, lat).  At once each sends 1023 messages.
    With lon first, then lat, it sends 62, and twice the bytes.
    """
    return _layouts_between(source, target, MOST_PEERS_AT_ONCE)


@lru_cache(maxsize=1024)
def _layouts_between(source: Layout, target: Layout, most_peers: int) -> tuple[Layout, ...]:
    cuts, wanted = source.cuts, target.cuts
    if [c.size for c in cuts] != [c.size for c in wanted] or set(source.cut_axes) != set(target.cut_axes):
        return ()
    leaving = [a for cut, other in zip(cuts, wanted, strict=True) for a in cut.axes if a not in other.axes]
    if math.prod(map(source.size_of, leaving)) <= most_peers:
        return ()
    axes, arrived, passed = [cut.axes for cut in cuts], set[int](), list[Layout]()
    while (step := _next_step(axes, [cut.axes for cut in wanted])) is not None:
        before, after = step
        axes[after] += axes[before][-1:]
        axes[before] = axes[before][:-1]
        arrived.add(after)
        coarse = [
            _coarse_cut(wanted[at] if at in arrived else cuts[at], names, source) for at, names in enumerate(axes)
        ]
        parts = iter(coarse)
        passed.append(Layout.from_dims([[next(parts) for _ in group] for group in source.dims()], source.axes))
    return tuple(passed[:-1]) if axes == [cut.axes for cut in wanted] else ()


def _next_step(axes: Sequence[tuple[str, ...]], wanted: Sequence[tuple[str, ...]]) -> tuple[int, int] | None:
    """Return a cut whose minor axis can become that of another cut, and this one."""
    for before, names in enumerate(axes):
        for after, others in enumerate(axes):
            if names and before != after and (*others, names[-1]) == wanted[after][: len(others) + 1]:
                return before, after
    return None


def _coarse_cut(cut: Cut, axes: tuple[str, ...], layout: Layout) -> Cut:
    """Return a cut by the major ones of its axes alone."""
    finer = math.prod(layout.size_of(a) for a in cut.axes[len(axes) :])
    return Cut(cut.size, cut.points[::finer], axes)


def layouts_of_gather(source: Layout, target: Layout) -> tuple[Layout, ...]:
    """Return layouts to pass on the way to whole dims, each cut by one axis less; none where few ranks meet, or those
    of one axis.

    The target holds whole what the source cuts, by the same axes or by none.  Example: tokens of 32 x 32 ranks, each of
    which needs all.  At once it sends 1023 messages.  Along lon first it sends 31, and then has a row of pieces. Along
    lat it sends 31 more, each of a row; the bytes are the same.
    """
    return _layouts_of_gather(source, target, MOST_PEERS_AT_ONCE)


@lru_cache(maxsize=1024)
def _layouts_of_gather(source: Layout, target: Layout, most_peers: int) -> tuple[Layout, ...]:
    pairs = list(zip(source.cuts, target.cuts, strict=False))
    fetched = [at for at, (cut, wanted) in enumerate(pairs) if cut.is_cut and _holds_all(cut, wanted)]
    if source.axes != target.axes or len(source.cuts) != len(target.cuts) or source.has_halo:
        return ()
    if math.prod(source.cuts[at].pieces for at in fetched) <= most_peers:
        return ()
    if any(cut != wanted for at, (cut, wanted) in enumerate(pairs) if at not in fetched):
        return ()
    cuts, passed = list(source.cuts), list[Layout]()
    for at in fetched:
        while names := cuts[at].axes:
            cuts[at] = _coarse_cut(cuts[at], names[:-1], source)
            parts = iter(cuts)
            passed.append(Layout.from_dims([[next(parts) for _ in group] for group in source.dims()], source.axes))
    return tuple(passed) if len(passed) > 1 else ()


def _holds_all(cut: Cut, wanted: Cut) -> bool:
    return wanted.size == cut.size and wanted.axes in (cut.axes, ()) and set(wanted.held) == {(0, cut.size)}


def holding_coarser(layout: Layout, coarser: Layout) -> Layout:
    """Return a layout whose ranks own what they do, and hold what another, cut by fewer axes, gives them."""

    def held(cut: Cut, wide: Cut) -> Cut:
        finer = cut.pieces // wide.pieces
        return cut if finer == 1 else cut.holding([wide.owned(piece // finer) for piece in range(cut.pieces)])

    pairs = zip(layout.cuts, coarser.cuts, strict=True)
    parts = iter([held(cut, wide) for cut, wide in pairs])
    return Layout.from_dims([[next(parts) for _ in group] for group in layout.dims()], layout.axes)
