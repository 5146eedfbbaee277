"""Ranks of heads and rings together: of those that cut the tokens, neighbors share out heads, the others make rings.

Example: eight ranks cut the tokens, ``lat=4, lon=2``, and there are heads for four of them.  Ranks 0 to 3 share out the
heads of the first half of the tokens, ranks 4 to 7 those of the second.  Rings of two pass the halves on: 0 and 4 those
of the first share of the heads, 1 and 5 of the second.  So the heads get lon and the minor half of lat, which gets a
separate name: lat becomes ``lat.ring=2, lat.heads=2``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from torch.distributed.device_mesh import DeviceMesh

from jigsaw.geometry.cut import Cut
from jigsaw.geometry.layout import AxisSizes, Layout
from jigsaw.nn.rank_order import CutGroup
from jigsaw.ranks.mesh import split_axis_mesh
from jigsaw.tile.tile import Tile


@dataclass(frozen=True)
class RankSplit:
    """Number of pieces of each cut of the tokens, and how many neighboring pieces share out heads."""

    pieces: tuple[int, ...]
    shares: tuple[int, ...]

    @property
    def head_ranks(self) -> int:
        """Number of ranks that share out heads."""
        return math.prod(self.shares)

    @property
    def ring_ranks(self) -> int:
        """Number of ranks of a ring."""
        return math.prod(self.pieces) // self.head_ranks

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Place of each rank in its ring, and its share of the heads."""
        coordinates: list[tuple[int, int]] = []
        for at in product(*map(range, self.pieces)):
            in_ring = of_heads = 0
            for place, pieces, share in zip(at, self.pieces, self.shares, strict=True):
                in_ring = in_ring * (pieces // share) + place // share
                of_heads = of_heads * share + place % share
            coordinates.append((in_ring, of_heads))
        return tuple(coordinates)

    def summed_by_ring(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Sum rows of each rank over those that have one place in their rings."""
        sums = [0] * self.ring_ranks
        for count, (at, _) in zip(rows, self.places, strict=True):
            sums[at] += count
        return tuple(sums)

    def __str__(self) -> str:
        return f"rings of {self.ring_ranks} ranks, heads shared out by {self.head_ranks}"


@lru_cache(maxsize=1024)
def splits_of_cuts(cuts: CutGroup, sizes: AxisSizes, within_axes: bool) -> tuple[RankSplit, ...]:
    """Return every split of the ranks that cut some tokens, minor axes first to the heads.  `within_axes`: an axis may
    also be divided between heads and a ring.
    """
    known = dict(sizes)

    def is_possible(split: RankSplit) -> bool:
        of_each = zip(cuts, split.shares, strict=True)
        return all(_axes_of_share(c.axes, share, known, within_axes) is not None for c, share in of_each)

    return tuple([split for split in splits_of_pieces(tuple([c.pieces for c in cuts])) if is_possible(split)])


def splits_of_pieces(pieces: tuple[int, ...]) -> tuple[RankSplit, ...]:
    """Return every split of the ranks that cut some tokens into so many pieces."""
    shares = [[n for n in range(1, count + 1) if count % n == 0] for count in pieces]
    splits = [RankSplit(pieces, some) for some in product(*shares)]
    return tuple([split for split in splits if min(split.head_ranks, split.ring_ranks) > 1])


def _axes_of_share(
    axes: Sequence[str], share: int, sizes: Mapping[str, int], within_axes: bool
) -> tuple[tuple[str, int], ...] | None:
    """Return how many places of each axis make `share` neighboring pieces, minor axes first, or None where none do."""
    shares: list[tuple[str, int]] = []
    for axis in reversed(axes):
        size = sizes[axis]
        part = math.gcd(size, share)
        if share > 1 and part not in (size, share):
            return None
        if 1 < part < size and not within_axes:
            return None
        shares.append((axis, part))
        share //= part
    return tuple(shares) if share == 1 else None


@dataclass(frozen=True)
class SplitAxes:
    """Axes of the tokens once each goes one way: those of the heads, and the parts of the axes that went both."""

    heads: tuple[str, ...]
    parted: tuple[tuple[str, AxisSizes], ...]

    @classmethod
    def of(cls, split: RankSplit, cuts: CutGroup, sizes: AxisSizes) -> SplitAxes:
        """Return the axes of these cuts of the tokens."""
        known, heads = dict(sizes), list[str]()
        parted: list[tuple[str, AxisSizes]] = []
        for cut, share in zip(cuts, split.shares, strict=True):
            for axis, count in reversed(_axes_of_share(cut.axes, share, known, within_axes=True) or ()):
                if count == known[axis]:
                    heads.append(axis)
                elif count > 1:
                    parted.append((axis, ((f"{axis}.ring", known[axis] // count), (f"{axis}.heads", count))))
                    heads.append(f"{axis}.heads")
        return cls(tuple(heads), tuple(parted))

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh with these axes; the first call is collective."""
        for axis, parts in self.parted:
            mesh = split_axis_mesh(mesh, axis, parts)
        return mesh

    def tile(self, x: Tile) -> Tile:
        """Return the same tile, its layout by these axes."""
        own = x.owned()
        return Tile(own.local, _layout_by_parts(own.layout, self.parted), self.mesh(x.mesh)) if self.parted else own


@lru_cache(maxsize=1024)
def _layout_by_parts(layout: Layout, parted: tuple[tuple[str, AxisSizes], ...]) -> Layout:
    parts = dict(parted)

    def names(axis: str) -> tuple[str, ...]:
        return tuple([name for name, _ in parts[axis]]) if axis in parts else (axis,)

    dims = [
        [Cut(c.size, c.points, tuple([n for a in c.axes for n in names(a)])) for c in group] for group in layout.dims()
    ]
    axes = tuple([new for axis, size in layout.axes for new in parts.get(axis, ((axis, size),))])
    return Layout.from_dims(dims, axes)
