"""Numbers that travel behind the values of a message, and show whether ranks that combine values have the same.

They stand for what the call itself says, such as the layout of a tile, and for the plain values that tiles met
(`jigsaw.comm.first_meetings`).  Four ranks add up a tile's mean, and their numbers are 7, 7, 9, 7.  The first sends -3
x 7, the others theirs: 2 arrives in place of 0, on all four.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.debug import told_by_ranks
from jigsaw.comm.first_meetings import number_of_meetings, settle_meetings, told_meetings
from jigsaw.comm.wire_values import is_on_accelerator
from jigsaw.errors import RanksDifferError
from jigsaw.ranks.call_places import place_of_call
from jigsaw.ranks.mesh import ranks_along
from jigsaw.ranks.model_world import job_rank
from jigsaw.torch_internals.autograd import assert_on_device

SameOnRanks = tuple[Hashable, ...] | None
"""Facts that must be the same on ranks that combine values, such as the layout of a tile."""


@lru_cache(maxsize=4096)
def _number_of_same(same: tuple[Hashable, ...]) -> int:
    return zlib.crc32(repr(same).encode())


def alike_number(same: tuple[Hashable, ...], mesh: DeviceMesh, ranks: int) -> int:
    """Return a number of `same` and of what tiles have met so far; sums of `ranks` of them are exact in float32."""
    return (_number_of_same(same) + number_of_meetings(mesh)) % max(2**24 // ranks, 2)


def alike_marks(
    buffer: Tensor, mesh: DeviceMesh, axes: str | Sequence[str], op: str, same: tuple[Hashable, ...]
) -> list[int]:
    """Return numbers that travel behind the values and show whether ranks have `same` alike, and met the same values.

    In a sum the first rank has -(P-1) times its number and the others theirs, which add up to 0; in a maximum or a
    minimum a number and its negative come back as they were.
    """
    ranks = ranks_along(mesh, axes)
    number = alike_number(same, mesh, len(ranks))
    if buffer.dtype not in (torch.float32, torch.float64, torch.int32, torch.int64) or op == "prod":
        return []
    if op == "sum":
        return [-(len(ranks) - 1) * number if job_rank() == ranks[0] else number]
    return [number, -number]


def check_marks(alike: Tensor, mesh: DeviceMesh, axes: str | Sequence[str], same: tuple[Hashable, ...]) -> None:
    """Raise where ranks differ.

    On the CPU on all of them.  A GPU is not waited for: its own assertion ends the process.

    *Sends*: nothing; where marks differ, to each rank along `axes` what this one has.
    """
    if is_on_accelerator(alike):
        assert_on_device(alike, _DIFFERENT)
    elif not alike:
        described = ", ".join(map(str, same))
        every = told_by_ranks(mesh, axes, (described, told_meetings(mesh)), "the comparison of marks that differ")
        if any(description != described for description, _ in every):
            raise RanksDifferError(f"{_DIFFERENT}; this rank's are {described}")
        settle_meetings(mesh, [met for _, met in every], ", ".join(place_of_call()))


_DIFFERENT = (
    "the ranks reduce tiles of different layouts: every size (or other argument) that an op takes must be the same on "
    "every rank"
)
