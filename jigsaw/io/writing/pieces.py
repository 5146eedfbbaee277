"""Who writes which piece of a stored array, and who gives which box of it.  Integers, alike on every rank.

A *unit* is what one process must write as one: a chunk, or a whole shard.  The rank that owns most of a unit writes it,
the others send it their boxes; where several own about as much, the one that has least to write so far does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from jigsaw.layout import Box, Interval, Layout


@dataclass(frozen=True)
class Target:
    """A stored array, in the dims of the tile that it is made of.

    `shape` is that of what is written now and `units` that of a unit, both with the tile's channel dim as levels;
    `runs` say which channels become which levels: (first, end, level of the first).  Without a channel dim they are
    empty.
    """

    shape: tuple[int, ...]
    units: tuple[int, ...]
    channel: int | None = None
    runs: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A box that the rank at mesh position `giver` owns, `taken` in the whole tile, and its place in the unit's box."""

    giver: int
    taken: Box
    placed: Box


@dataclass(frozen=True, slots=True)
class Unit:
    """A box of an array that `writer` puts together and writes.  Rows count from the start of the first unit."""

    box: Box
    writer: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return volume(self.box)

    @property
    def is_full(self) -> bool:
        """Whether the parts cover the box: levels that no channel has remain missing."""
        return sum(volume(p.placed) for p in self.parts) == self.size


@dataclass(frozen=True, slots=True)
class _Entry:
    """Consecutive rows of one dim with one owner: of the tile, and where they begin in the array."""

    piece: int
    rows: Interval
    at: int


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return prod(stop - start for start, stop in box)


@lru_cache(maxsize=256)
def plan_pieces(
    layout: Layout, target: Target, phase: tuple[int, ...], writers: tuple[int, ...] = ()
) -> tuple[Unit, ...]:
    """Every unit that a tile of `layout` touches, in C order.

    `phase` is how many rows of the first unit along each dim were written before; `writers` the only mesh positions
    that may write (all of them when empty).
    """
    owners = _owners(layout)
    load = [0] * layout.ranks
    found: list[Unit] = []
    for slots in product(*(_slots(layout, target, dim, phase[dim]) for dim in range(layout.ndim))):
        box = tuple(interval for interval, _ in slots)
        pieces = [(owners[tuple(e.piece for e in entries)], entries) for entries in product(*(e for _, e in slots))]
        writer = _writer(pieces, load, writers)
        load[writer] += volume(box)
        found.append(Unit(box, writer, tuple(_part(p, e, box, writer, len(found)) for p, e in pieces)))
    return tuple(found)


def _owners(layout: Layout) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The mesh positions that own each combination of pieces: several, where an axis replicates."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for position, coord in enumerate(layout.coords()):
        key = tuple(layout.piece(cut, coord) for cut in layout.cuts)
        found[key] = (*found.get(key, ()), position)
    return found


def _slots(layout: Layout, target: Target, dim: int, phase: int) -> list[tuple[Interval, list[_Entry]]]:
    """Along one dim, each unit's interval in the array and the rows of every owner in it."""
    size, step = target.shape[dim], target.units[dim]
    cut = layout.cuts[dim]
    runs = target.runs if dim == target.channel else ((0, cut.size, 0),)
    found: list[tuple[Interval, list[_Entry]]] = []
    for start in range(0, phase + size, step):
        low, high = max(start, phase), min(start + step, phase + size)
        entries: list[_Entry] = []
        for first, end, level in runs:
            shift = phase + level - first
            for piece in range(cut.pieces):
                a = max(low - shift, first, cut.points[piece])
                b = min(high - shift, end, cut.points[piece + 1])
                if a < b:
                    entries.append(_Entry(piece, (a, b), a + shift))
        if entries:
            found.append(((low, high), entries))
    return found


def _writer(
    pieces: Sequence[tuple[tuple[int, ...], tuple[_Entry, ...]]], load: Sequence[int], writers: tuple[int, ...]
) -> int:
    """Of the ranks that own at least half as much of a unit as the one with most, the one with least to write."""
    owned: dict[int, int] = dict.fromkeys(writers, 0)
    for positions, entries in pieces:
        for position in positions:
            if not writers or position in writers:
                owned[position] = owned.get(position, 0) + prod(e.rows[1] - e.rows[0] for e in entries)
    most = max(owned.values())
    return min((p for p, n in owned.items() if 2 * n >= most), key=lambda p: (load[p], -owned[p], p))


def _part(positions: tuple[int, ...], entries: tuple[_Entry, ...], box: Box, writer: int, number: int) -> Part:
    giver = writer if writer in positions else positions[number % len(positions)]
    placed = tuple((e.at - low, e.at - low + e.rows[1] - e.rows[0]) for e, (low, _) in zip(entries, box, strict=True))
    return Part(giver, tuple(e.rows for e in entries), placed)


def rounds(units: Sequence[Unit], most: int) -> Iterator[tuple[Unit, ...]]:
    """The units in order, as many at a time as let no rank put together more than `most` elements (or one unit)."""
    batch: list[Unit] = []
    held: dict[int, int] = {}
    for unit in units:
        size = held.get(unit.writer, 0) + unit.size
        if batch and size > most and unit.writer in held:
            yield tuple(batch)
            batch, held, size = [], {}, unit.size
        batch.append(unit)
        held[unit.writer] = size
    if batch:
        yield tuple(batch)
