"""Rings of ranks that pass keys and values on to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.nn.rank_order import CutGroup, axes_of_cuts, coordinates_along, size_of_cuts, take_owned_rows


@dataclass(frozen=True)
class KeyRing:
    """A ring as one of its ranks sees it: how the tokens of the keys are cut, and where each rank is."""

    keys: CutGroup
    layout: Layout
    places: tuple[MeshCoordinate, ...]
    me: int

    @classmethod
    def through(cls, keys: CutGroup, layout: Layout, coord: MeshCoordinate) -> KeyRing:
        """Return the ring through the rank `coord`, along the axes that cut the keys."""
        places = tuple(coordinates_along(layout, axes_of_cuts(keys), coord))
        return cls(keys, layout, places, places.index(coord))

    @property
    def size(self) -> int:
        return len(self.places)

    def rows(self, member: int) -> int:
        """Return how many keys a member has."""
        owned = (c.owned(self.layout.piece(c, self.places[member])) for c in self.keys)
        return math.prod(stop - start for start, stop in owned)

    def positions(self, member: int) -> Tensor:
        """Return the global places of a member's keys."""
        return take_owned_rows(torch.arange(size_of_cuts(self.keys)), 0, self.keys, self.layout, self.places[member])

    def pass_on(self, mesh: DeviceMesh, sent: Tensor, taken: Tensor) -> comm.PendingWork:
        """Start one step: give a block to the next rank and take one from the rank before."""
        after, before = (self.layout.index(self.places[(self.me + d) % self.size]) for d in (1, -1))
        return comm.swap_messages(mesh, [(after, sent)], [(before, taken)], "ring attention")
