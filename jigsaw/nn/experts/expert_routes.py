"""Routes of rows to the ranks of their experts, and back: how many go where, and which are dropped.

Example: four ranks along `lat`, five experts cut as 2, 2, 1, 0 (torch.chunk's rule), each token sent to its two best.
Rank 1 has three tokens, which chose experts (0, 4), (2, 0) and (3, 1).  Sorted by expert, its six rows are those of
tokens 0, 1, 2, 1, 2, 0. Rank 0 gets three of them (experts 0, 0, 1), rank 1 keeps two (2, 3), and rank 2 gets one (4).
All ranks tell each other how many rows each expert gets, so each knows what will arrive. First are the rows from rank
0, by expert, then those from rank 1, and so on.  It sorts them by its own experts.  The results return the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.debug import compare_calls
from jigsaw.geometry.cut import Cut
from jigsaw.nn.rank_order import coordinates_along
from jigsaw.tile.tile import Tile

_DIGIT_BITS = 8


@dataclass(frozen=True, eq=False)
class ExpertRoute:
    """Route of rows along the axes that cut the experts: `gives` and `takes` rows to and from each mesh position.  One
    that `returns` is the way back, its adjoint.

    `order` has the places of this rank's rows by expert, and `arrived` those of the rows that arrived. Each expert of
    this rank gets `counts` of them.
    """

    mesh: DeviceMesh
    peers: tuple[int, ...]
    here: int
    gives: tuple[int, ...]
    takes: tuple[int, ...]
    order: Tensor
    arrived: Tensor
    counts: tuple[int, ...]
    returns: bool = False

    def back(self) -> ExpertRoute:
        """Return the way back of this one."""
        return replace(self, gives=self.takes, takes=self.gives, returns=not self.returns)

    def to_experts(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts, one expert's after the other's, from the ranks' `rows` in `order`.

        *Sends*: the rows of other ranks' experts, one message a rank; backward, their gradients return.
        """
        return _ExpertSwap.apply(rows, self).index_select(0, self.arrived)

    def from_experts(self, rows: Tensor) -> Tensor:
        """Return the experts' results for this rank's rows, in `order`: the adjoint of `to_experts`, with as many
        bytes.
        """
        return _ExpertSwap.apply(rows.index_select(0, self.arrived.argsort()), self.back())


class _ExpertSwap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: ExpertRoute) -> Tensor:
        ctx.route = route
        return _swap_expert_rows(rows, route)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _ExpertSwap.apply(grads[0], ctx.route.back()), None


def _swap_expert_rows(rows: Tensor, route: ExpertRoute) -> Tensor:
    compare_calls(route.mesh, "experts", route.returns)
    out = rows.new_empty((sum(route.takes), *rows.shape[1:]))
    sent, taken = rows.split(route.gives), out.split(route.takes)
    others = [at for at in range(len(route.peers)) if at != route.here]
    sends = [(route.peers[at], sent[at]) for at in others]
    under_way = comm.swap_messages(route.mesh, sends, [(route.peers[at], taken[at]) for at in others], "experts")
    taken[route.here].copy_(sent[route.here])
    under_way.wait()
    return out


def plan_expert_route(chosen: Tensor, experts: Cut, tile: Tile) -> ExpertRoute:
    """Plan the route of rows that go to the experts in `chosen`, on the mesh of `tile`.

    *Sends*: the number of rows that each expert gets from this rank, 8 bytes each, to every other rank along the axes.
    """
    own_piece = tile.layout.piece(experts, tile.coordinate)
    positions = [tile.layout.index(at) for at in coordinates_along(tile.layout, experts.axes, tile.coordinate)]
    counts = torch.bincount(chosen, minlength=experts.size)
    counts_by_rank: list[list[int]] = torch.stack(comm.all_gather(counts, tile.mesh, experts.axes)).tolist()
    low, high = experts.owned(own_piece)
    came = [row[low:high] for row in counts_by_rank]
    rows_of_came = torch.tensor([n for row in came for n in row], dtype=torch.int64)
    expert_of_came = torch.arange(high - low).repeat(len(counts_by_rank)).repeat_interleave(rows_of_came)
    return ExpertRoute(
        tile.mesh,
        tuple(positions),
        own_piece,
        tuple(sum(counts_by_rank[own_piece][slice(*experts.owned(at))]) for at in range(experts.pieces)),
        tuple(map(sum, came)),
        chosen.argsort(stable=True),
        expert_of_came.argsort(stable=True).to(chosen.device),
        tuple(map(sum, zip(*came, strict=True))),
    )


def kept_by_capacity(
    chosen: Tensor, place: Tensor, places: int, capacity: int, experts: int, mesh: DeviceMesh, axes: Sequence[str]
) -> Tensor:
    """Say of each row whether it is among the first `capacity` of its expert, by `place`, over all ranks along `axes`.

    Places are integers below `places`, no two alike.  The first place that is left out is found for all experts at
    once, digit by digit from the highest.  The ranks sum how many rows have each digit; the next digit is the one where
    the rows no longer fit.  So it does not matter which rank has which tokens, and no rank sees them all.

    *Sends*: for each byte of `places` one all-reduce of 256 counts an expert.
    """
    first_out = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    room = torch.full_like(first_out, capacity)
    for shift in reversed(range(0, max(places - 1, 1).bit_length(), _DIGIT_BITS)):
        above, digit = place >> (shift + _DIGIT_BITS), (place >> shift) % 2**_DIGIT_BITS
        undecided = (chosen * 2**_DIGIT_BITS + digit)[above == first_out[chosen]]
        counts = torch.bincount(undecided, minlength=experts * 2**_DIGIT_BITS).view(experts, -1)
        up_to = comm.all_reduce(counts, mesh, axes).cumsum(1)
        # 2^8 where all fit, which can only be the highest digit; then the next ones match no place
        fitting = (up_to <= room[:, None]).sum(1, keepdim=True)
        room = room - torch.where(fitting > 0, up_to.gather(1, (fitting - 1).clamp_min(0)), 0).squeeze(1)
        first_out = first_out * 2**_DIGIT_BITS + fitting.squeeze(1)
    return place < first_out[chosen]
