"""Cost of a way of reading, in CPU seconds over all ranks: the planner takes the cheapest.

The rates are of one core of the machine that `benchmarks/read.py` was run on, rounded; only their ratios matter.
"""

from __future__ import annotations

from jigsaw.io.chunks.array_table import ArrayTable

_DECODE_RATES = {"fast": 2e9, "slow": 4e8, "library": 2e8, "plain": 8e9}
_FETCH_RATES = {False: 2e9, True: 1e8}
_REQUEST_SECONDS = {False: 1e-5, True: 2e-3}
_HANDOVER_RATE = 5e9
_SHARED_JOB_SECONDS = 4e-4


def read_cost(table: ArrayTable, requests: int, stored: int, decoded: int, sent: int, shared: int) -> float:
    """Return the CPU seconds of so many requests, bytes stored, decoded and handed to other ranks, and chunks handed
    over.
    """
    # a shared chunk wakes every rank that waits for it; a request to a far store is time in which a thread waits
    return (
        requests * _REQUEST_SECONDS[table.far]
        + stored / _FETCH_RATES[table.far]
        + decoded / _DECODE_RATES[_decoder_kind(table)]
        + sent / _HANDOVER_RATE
        + shared * _SHARED_JOB_SECONDS
    )


def _decoder_kind(table: ArrayTable) -> str:
    if table.decoder is None:
        return "library"
    if table.decoder.is_plain:
        return "plain"
    return "fast" if table.decoder.splits else "slow"
