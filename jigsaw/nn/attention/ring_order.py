"""Rings of ranks that pass keys and values on, and the exchange of queries that gives all as much causal work.

A query attends to earlier tokens, so of P blocks of keys the ranks need 1, 2, ... P.  Rank r exchanges the second half
of its queries with rank P-1-r, and y goes back.  Example: four ranks, by their halves of queries 0 to 7 and the blocks
of keys that these need:

    rank       0        1        2        3
    its own    0, 1     2, 3     4, 5     6, 7
    blocks     1 + 1    2 + 2    3 + 3    4 + 4
    mirrored   0, 7     2, 5     4, 3     6, 1
    blocks     1 + 4    2 + 3    3 + 2    4 + 1

After the zigzag order of context parallel training (Dubey et al., "The Llama 3 herd of models", arXiv 2407.21783). Its
keys and values lie in that order, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm import debug
from jigsaw.comm.graph_calls import graph_call
from jigsaw.comm.wire_values import wire_memory
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.nn.rank_order import CutGroup, axes_of_cuts, coordinates_along, host_values, size_of_cuts, take_owned_rows


@dataclass(frozen=True)
class KeyRing:
    """A ring as one of its ranks sees it: how the tokens of the keys are cut, and where each rank is."""

    keys: CutGroup
    layout: Layout
    places: tuple[MeshCoordinate, ...]
    me: int

    @classmethod
    def through(cls, keys: CutGroup, layout: Layout, coord: MeshCoordinate) -> KeyRing:
        places = tuple(coordinates_along(layout, axes_of_cuts(keys), coord))
        return cls(keys, layout, places, places.index(coord))

    @property
    def size(self) -> int:
        return len(self.places)

    def rows(self, member: int) -> int:
        owned = (c.owned(self.layout.piece(c, self.places[member])) for c in self.keys)
        return math.prod(stop - start for start, stop in owned)

    def positions(self, member: int) -> Tensor:
        return take_owned_rows(torch.arange(size_of_cuts(self.keys)), 0, self.keys, self.layout, self.places[member])

    def pass_on(self, mesh: DeviceMesh, sent: Tensor, taken: Tensor) -> comm.PendingWork:
        after, before = (self.layout.index(self.places[(self.me + d) % self.size]) for d in (1, -1))
        return comm.swap_messages(mesh, [(after, sent)], [(before, taken)], "ring attention")


# a rank with fewer queries has less work than messages
MIRRORED_QUERIES = 256


def mirrored_counts(queries: Sequence[int]) -> tuple[int, ...]:
    """Return how many queries each rank of a ring gives away, of so many."""
    if max(queries) < MIRRORED_QUERIES:
        return (0,) * len(queries)
    # the rank in the middle of an odd number is its own mirror
    return tuple([n // 2 if 2 * r + 1 != len(queries) else 0 for r, n in enumerate(queries)])


@dataclass(frozen=True, slots=True)
class LastRowSwap:
    """Swap of the last rows with the rank at the position `peer` of the mesh: so many are sent, and so many taken."""

    mesh: DeviceMesh
    peer: int
    sent: int
    taken: int

    def back(self) -> LastRowSwap:
        return LastRowSwap(self.mesh, self.peer, self.taken, self.sent)


@dataclass(frozen=True)
class QueryMirror:
    """Swap of queries with a rank of a ring, and global `places` of those here then: own first ones, its last."""

    swap: LastRowSwap
    places: tuple[Tensor, Tensor]

    @classmethod
    def through(cls, queries: CutGroup, ring: KeyRing, mesh: DeviceMesh) -> QueryMirror:
        with host_values():
            every = torch.arange(size_of_cuts(queries))
            rows = [take_owned_rows(every, 0, queries, ring.layout, at) for at in ring.places]
            counts, other = mirrored_counts([len(r) for r in rows]), ring.size - 1 - ring.me
            kept, taken = len(rows[ring.me]) - counts[ring.me], len(rows[other]) - counts[other]
            places = rows[ring.me][:kept], rows[other][taken:]
        peer = ring.layout.index(ring.places[other])
        return cls(LastRowSwap(mesh, peer, counts[ring.me], len(places[1])), places)

    def exchange(self, q: Tensor) -> Tensor:
        """Return the queries [..., L, E] that this rank works on.

        *Sends*: forward, half of its own; backward, the gradients of those that it took.
        """
        return _MirroredRows.apply(q, self.swap)

    def give_back(self, y: Tensor) -> Tensor:
        return _MirroredRows.apply(y, self.swap.back())


@graph_call()
def _swap_last_rows(x: Tensor, swap: LastRowSwap) -> Tensor:
    arriving = wire_memory(x, (*x.shape[:-2], swap.taken, x.shape[-1]))
    kept, leaving = x.split([x.shape[-2] - swap.sent, swap.sent], -2)
    comm.swap_messages(swap.mesh, [(swap.peer, leaving)], [(swap.peer, arriving)], "ring attention").wait()
    return torch.cat([kept, arriving], -2)


class _MirroredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, swap: LastRowSwap) -> Tensor:
        ctx.swap = swap
        debug.compare_calls(swap.mesh, "mirrored queries")
        return _swap_last_rows(x, swap)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _MirroredRows.apply(grads[0], ctx.swap.back()), None
