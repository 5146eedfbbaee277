"""What a way of reading costs, in CPU seconds over all ranks: the planner takes the cheapest.

The rates are of one core of the machine that `benchmarks/read.py` was run on, rounded; only their ratios matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jigsaw.io.table import ArrayTable

WORTH = 0.75
"""A part that needs more than this share of a chunk is decoded as the whole."""

_DECODE = {"fast": 2e9, "slow": 4e8, "library": 2e8, "plain": 8e9}
_FETCH = {False: 2e9, True: 1e8}
_REQUEST = {False: 1e-5, True: 2e-3}
_SHARE = 5e9
_SHARED_JOB = 4e-4


def cost(table: ArrayTable, requests: int, stored: int, decoded: int, sent: int, shared: int) -> float:
    """Of so many requests, bytes stored, decoded and handed to other ranks, and chunks that are handed over.

    A shared chunk wakes every rank that waits for it; a request to a far store is time in which a thread waits.
    """
    return (
        requests * _REQUEST[table.far]
        + stored / _FETCH[table.far]
        + decoded / _DECODE[_kind(table)]
        + sent / _SHARE
        + shared * _SHARED_JOB
    )


def _kind(table: ArrayTable) -> str:
    if table.decoder is None:
        return "library"
    if table.decoder.is_plain:
        return "plain"
    return "fast" if table.decoder.splits else "slow"
