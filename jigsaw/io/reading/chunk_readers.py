"""Readers of a stored chunk and how much each takes, worked out once for all chunks that lie alike.

A sample is cut as a product of dims, and so is what a rank takes of a chunk: along each dim a piece's rows. Chunks of
which the pieces take the same rows have the same readers, whatever their array and step. With 100 fields in chunks of
the whole globe all chunks are alike, as are those of the next sample. So 4096 ranks work out once who takes what.

Take four ranks on lat=2, lon=2, and an array of 8 x 8 in chunks of 4 x 8 with a halo of one row. Of chunk (0, 0), piece
0 along lat takes the rows 0-3, all of which it owns; piece 1 takes row 3, which it does not own. Along lon, piece 0 has
the columns 0-4 and piece 1 the columns 3-7. So all four ranks read it, taking 20, 20, 5 and 5 values; ranks 0 and 1 own
rows of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.geometry.cut import Interval
from jigsaw.geometry.layout import AxisSizes, values_over_mesh
from jigsaw.io.chunks.chunk_grid import ChunkRows
from jigsaw.io.chunks.portion import ChunkPortion, needed_share
from jigsaw.io.reading.chunk_jobs import ReaderRanks

ByReader = NDArray[np.int64]
"""A number for each reader of a chunk, in the order of their ranks."""


class PieceShare(NamedTuple):
    """Share of a chunk that a piece of a cut takes along a dim: the intervals of rows, each once, and the number of
    rows when those taken twice count twice.
    """

    piece: int
    rows: tuple[Interval, ...]
    taken: int
    owns: bool = True


@dataclass(frozen=True, eq=False)
class DimShares:
    """Shares of the pieces of a dim's cut in the `length` rows that a chunk stores; pieces that take none are left out.

    The axes `cutting` of the mesh `axes` cut it.
    """

    axes: AxisSizes
    cutting: tuple[str, ...]
    length: int
    shares: tuple[PieceShare, ...]

    @cached_property
    def rows(self) -> NDArray[np.object_]:
        """The rows that each rank takes; None for those that take none."""
        return self._over_mesh([each.rows for each in self.shares], None)

    @cached_property
    def taken(self) -> NDArray[np.int64]:
        return self._over_mesh([each.taken for each in self.shares], 0)

    @cached_property
    def share(self) -> NDArray[np.float64]:
        # of rows that are taken twice, as beyond an edge, one is decoded
        return self._over_mesh([sum(b - a for a, b in each.rows) / self.length for each in self.shares], 0.0)

    @cached_property
    def owns(self) -> NDArray[np.bool_]:
        return self._over_mesh([each.owns for each in self.shares], False)

    def _over_mesh(self, values: Sequence[Any], nothing: Any) -> NDArray[Any]:
        """Lay out each rank's value as an array over the mesh, of size one along the axes that do not cut."""
        pieces = prod(size for axis, size in self.axes if axis in self.cutting)
        by_piece = np.full(pieces, nothing, object if nothing is None else None)
        for each, value in zip(self.shares, values, strict=True):
            by_piece[each.piece] = value
        return values_over_mesh(self.axes, self.cutting, by_piece)


@lru_cache(maxsize=1 << 14)
def shares_of_dim(axes: AxisSizes, cutting: tuple[str, ...], length: int, shares: tuple[PieceShare, ...]) -> DimShares:
    """Return one object for equal shares, so that chunks that lie alike are found by identity."""
    return DimShares(axes, cutting, length, shares)


class PartShares(NamedTuple):
    """Shares that ranks take of a chunk for a part of the request: along stored dims, and along those that its array
    lacks.
    """

    stored: tuple[DimShares, ...]
    fixed: tuple[DimShares, ...]


class ReaderGroup:
    """Readers that a chunk is loaded for, and what they need of it."""

    def __init__(self, readers: ChunkReaders, places: NDArray[np.intp]) -> None:
        self._readers, self._places = readers, places
        self.largest_share = float(readers.largest_share[places].max())
        self.portions: dict[Hashable, ChunkPortion | None] = {}

    @cached_property
    def rects(self) -> list[ChunkRows]:
        return [rect for place in self._places.tolist() for rect in self._readers.rects(place)]

    @cached_property
    def share(self) -> float:
        """Upper bound on the share of the chunk that they need together."""
        return needed_share(self.rects, self._readers.shape)


class ChunkLoads(NamedTuple):
    """Loads of a chunk: by the rank `owner` for those `served`, and by the readers `alone` (their places) for
    themselves.

    Without a load for several ranks `served` is empty; `sent` counts the values that the owner hands to other ranks.
    """

    owner: int
    served: ReaderRanks
    alone: NDArray[np.intp]
    sent: int = 0


class ChunkReaders:
    """The ranks that take rows of a chunk, and how many `values` each takes.

    `at` are the ranks as an array; `largest_share` is what the largest of a reader's boxes takes of the chunk, `owning`
    whether it owns rows of it.
    """

    def __init__(self, parts: Sequence[PartShares]) -> None:
        self._parts, mesh = parts, tuple(size for _, size in parts[0].stored[0].axes)
        self.shape = tuple(dim.length for dim in parts[0].stored)

        def over_parts(made: Iterable[Sequence[NDArray[Any]]]) -> NDArray[Any]:
            return np.stack([np.broadcast_to(prod(by_dim), mesh).ravel() for by_dim in made])

        values = over_parts([dim.taken for dim in (*p.stored, *p.fixed)] for p in parts).sum(0)
        self.at: ByReader = np.flatnonzero(values)
        self.ranks: ReaderRanks = tuple(self.at.tolist())
        self.values: ByReader = values[self.at]
        self.largest_share = over_parts([dim.share for dim in p.stored] for p in parts).max(0)[self.at]
        self.owning = over_parts([dim.owns for dim in p.stored] for p in parts).max(0)[self.at] > 0
        self.memo: dict[Hashable, Any] = {}
        self._loads: dict[str, ChunkLoads] = {}
        self._groups: dict[ReaderRanks, ReaderGroup] = {}

    def __len__(self) -> int:
        return len(self.ranks)

    def places(self, ranks: ReaderRanks) -> NDArray[np.intp]:
        """Return the places of some of the readers among all of them."""
        return np.arange(len(self.at)) if ranks is self.ranks else np.searchsorted(self.at, ranks)

    def values_of(self, ranks: ReaderRanks) -> ByReader:
        """Return how many values each of some readers takes."""
        return self.values if ranks is self.ranks else self.values[self.places(ranks)]

    def group(self, ranks: ReaderRanks) -> ReaderGroup:
        """Return the group of some of the readers."""
        if ranks is self.ranks:
            return self._all
        if ranks not in self._groups:
            self._groups[ranks] = ReaderGroup(self, self.places(ranks))
        return self._groups[ranks]

    @cached_property
    def _all(self) -> ReaderGroup:
        return ReaderGroup(self, self.places(self.ranks))

    def rects(self, place: int) -> list[ChunkRows]:
        """Return the boxes that a reader needs, one for each part."""
        found = [(tuple(d[place] for d in stored), tuple(d[place] for d in fixed)) for stored, fixed in self._rows]
        return [rect for rect, there in found if None not in rect and None not in there]

    @cached_property
    def _rows(self) -> list[tuple[list[NDArray[np.object_]], ...]]:
        """Rows that each reader takes, for each part and dim."""
        mesh = tuple(size for _, size in self._parts[0].stored[0].axes)
        return [
            tuple([np.broadcast_to(dim.rows, mesh).ravel()[self.at] for dim in dims] for dims in part)
            for part in self._parts
        ]

    def is_alone(self, rank: int, mode: str) -> bool:
        """Say whether a reader loads the chunk for itself alone."""
        return mode == "independent" or rank in self.at[self.loads(mode).alone]

    def loads(self, mode: str) -> ChunkLoads:
        """Return who loads the chunk in a mode of reading.

        Suppose ranks 0 to 3 need a chunk; 1 and 2 own rows, and 0 and 3 hold some as their halo. `independent`: each
        loads it for itself. `cooperative`: one of them, here rank 0, loads it for all. `neighbors`: rank 1 loads it
        for 0, 1 and 3, and rank 2 for itself.
        """
        if mode not in self._loads:
            self._loads[mode] = self._loads_in(mode)
        return self._loads[mode]

    def _loads_in(self, mode: str) -> ChunkLoads:
        everybody, values = np.arange(len(self.at)), self.values
        if mode == "independent" or len(self.ranks) == 1:
            return ChunkLoads(self.ranks[0], (), everybody)
        if mode == "cooperative":
            return ChunkLoads(self.ranks[0], self.ranks, everybody[:0], int(values[1:].sum()))
        # all readers may hold a chunk as their halo alone: of a crop whose halo reaches beyond its own rows
        owning = np.flatnonzero(self.owning) if self.owning.any() else everybody[:1]
        serving = np.delete(everybody, owning[1:])
        owner, sent = self.ranks[owning[0]], int(values[serving].sum() - values[owning[0]])
        if len(serving) == 1:
            return ChunkLoads(owner, (), owning)
        served = self.ranks if len(serving) == len(everybody) else tuple(self.at[serving].tolist())
        return ChunkLoads(owner, served, owning[1:], sent)


@lru_cache(maxsize=1 << 14)
def readers_of_chunk(parts: tuple[PartShares, ...]) -> ChunkReaders:
    """Return the readers of all chunks of which parts take such rows; the same object for equal parts."""
    return ChunkReaders(parts)
