"""Plan of which rank writes which piece of a stored array, and which gives which box of it: integers, alike on all
ranks.

A *unit* is what one process must write as one: a chunk, or a whole shard. The rank that owns most of a unit writes it,
and the others send it their boxes. Where several own about as much, the one that has least to write so far does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from jigsaw.geometry.cut import Box, Interval, box_elements
from jigsaw.geometry.layout import Layout


@dataclass(frozen=True)
class WriteTarget:
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
class UnitPart:
    """A box that the rank at mesh position `giver` owns, `taken` in the whole tile, and its place in the unit's box."""

    giver: int
    taken: Box
    placed: Box


@dataclass(frozen=True, slots=True)
class WriteUnit:
    """A box of an array that `writer` puts together and writes.  Rows count from the start of the first unit."""

    box: Box
    writer: int
    parts: tuple[UnitPart, ...]

    @property
    def size(self) -> int:
        return box_elements(self.box)

    @property
    def is_full(self) -> bool:
        """True where the parts cover the box: levels that no channel has remain missing."""
        return sum(box_elements(p.placed) for p in self.parts) == self.size


@dataclass(frozen=True, slots=True)
class _OwnedRows:
    """Consecutive rows of one dim with one owner: of the tile, and where they begin in the array."""

    piece: int
    rows: Interval
    at: int


@lru_cache(maxsize=256)
def plan_units(
    layout: Layout, target: WriteTarget, phase: tuple[int, ...], writers: tuple[int, ...] = ()
) -> tuple[WriteUnit, ...]:
    """Return every unit that a tile of `layout` touches, in C order.

    `phase` is how many rows of the first unit along each dim were written before; `writers` are the only mesh positions
    that may write (all of them when empty).
    """
    owners = _owners_of_pieces(layout)
    load = [0] * layout.ranks
    planned: list[WriteUnit] = []
    for slots in product(*(_unit_slots(layout, target, dim, phase[dim]) for dim in range(layout.ndim))):
        box = tuple(interval for interval, _ in slots)
        pieces = [(owners[tuple(e.piece for e in entries)], entries) for entries in product(*(e for _, e in slots))]
        # `load` grows unit by unit in the same order on every rank, so all choose the same writers without talking
        writer = _choose_writer(pieces, load, writers)
        load[writer] += box_elements(box)
        parts: list[UnitPart] = []
        for positions, entries in pieces:
            # of several ranks that hold the same rows the writer takes its own, else they take turns by unit
            giver = writer if writer in positions else positions[len(planned) % len(positions)]
            spans = zip(entries, box, strict=True)
            placed = tuple((e.at - low, e.at - low + e.rows[1] - e.rows[0]) for e, (low, _) in spans)
            parts.append(UnitPart(giver, tuple(e.rows for e in entries), placed))
        planned.append(WriteUnit(box, writer, tuple(parts)))
    return tuple(planned)


def _owners_of_pieces(layout: Layout) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the mesh positions that own each combination of pieces: several, where an axis replicates."""
    owners: dict[tuple[int, ...], tuple[int, ...]] = {}
    for position, coord in enumerate(layout.coords()):
        key = tuple(layout.piece(cut, coord) for cut in layout.cuts)
        owners[key] = (*owners.get(key, ()), position)
    return owners


def _unit_slots(layout: Layout, target: WriteTarget, dim: int, phase: int) -> list[tuple[Interval, list[_OwnedRows]]]:
    """Return, along one dim, each unit's interval in the array and the rows of every owner in it."""
    size, step = target.shape[dim], target.units[dim]
    cut = layout.cuts[dim]
    runs = target.runs if dim == target.channel else ((0, cut.size, 0),)
    slots: list[tuple[Interval, list[_OwnedRows]]] = []
    # rows count from the start of the first unit, which `phase` earlier rows fill already
    for start in range(0, phase + size, step):
        low, high = max(start, phase), min(start + step, phase + size)
        entries: list[_OwnedRows] = []
        for first, end, level in runs:
            shift = phase + level - first  # the offset from a row of the tile to its row in the array
            for piece in range(cut.pieces):
                a = max(low - shift, first, cut.points[piece])
                b = min(high - shift, end, cut.points[piece + 1])
                if a < b:
                    entries.append(_OwnedRows(piece, (a, b), a + shift))
        if entries:
            slots.append(((low, high), entries))
    return slots


def _choose_writer(
    pieces: Sequence[tuple[tuple[int, ...], tuple[_OwnedRows, ...]]], load: Sequence[int], writers: tuple[int, ...]
) -> int:
    """Choose the rank with least to write among those that own at least half as much of a unit as the one with most."""
    owned: dict[int, int] = dict.fromkeys(writers, 0)
    for positions, entries in pieces:
        for position in positions:
            if not writers or position in writers:
                owned[position] = owned.get(position, 0) + box_elements(tuple(e.rows for e in entries))
    most = max(owned.values())
    return min((p for p, n in owned.items() if 2 * n >= most), key=lambda p: (load[p], -owned[p], p))


def write_rounds(units: Sequence[WriteUnit], most: int) -> Iterator[tuple[WriteUnit, ...]]:
    """Yield the units in order, in groups of which no rank puts together more than `most` elements, or one unit."""
    batch: list[WriteUnit] = []
    held: dict[int, int] = {}
    for unit in units:
        size = held.get(unit.writer, 0) + unit.size
        # all ranks end a round together, when any writer is full, because their swaps must match
        if batch and size > most and unit.writer in held:
            yield tuple(batch)
            batch, held, size = [], {}, unit.size
        batch.append(unit)
        held[unit.writer] = size
    if batch:
        yield tuple(batch)
