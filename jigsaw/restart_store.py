"""The store in which the ranks of a job meet, apart from that of the same job before torchrun restarted it.

The agent of torchrun keeps one store for all starts of its job (in torch 2.13, unless
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` is 1), and gloo and NCCL leave in it where each rank listens.  After a restart,
ranks would find the addresses of the dead there.  So each start has a name of its own.  Torchrun's count of restarts
is none: an agent counts its own alone.

Four ranks start again.  Each writes a token, and waits for an answer to that token.  Rank 0 makes a name and answers
every token that it finds, also those that the dead left, until each rank has acknowledged this name.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from jigsaw.cut import ShardingError

_FOLDER = "jigsaw.start"
_POLL_SECONDS = 0.02


def is_shared_between_starts() -> bool:
    """Whether the store that this rank would join in has the addresses of earlier starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_start(limit: timedelta) -> tuple[dist.Store, int, int]:
    """The job's store under a name that only the ranks of this start know, this rank, and how many there are."""
    store, rank, ranks = next(rendezvous("env://", timeout=limit))
    until = time.monotonic() + limit.total_seconds()
    name = uuid.uuid4().hex
    if rank == 0:
        _answer_ranks(store, name, ranks, until)
    else:
        token = uuid.uuid4().hex
        store.set(f"{_FOLDER}/token/{rank}", token)
        store.wait([f"{_FOLDER}/answer/{token}"], limit)
        name = store.get(f"{_FOLDER}/answer/{token}").decode()
        store.set(f"{_FOLDER}/{name}/{rank}", "")
    return dist.PrefixStore(f"{_FOLDER}/{name}", store), rank, ranks


def _answer_ranks(store: dist.Store, name: str, ranks: int, until: float) -> None:
    missing = set(range(1, ranks))
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_FOLDER}/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"{_FOLDER}/token/{rank}"]):
                store.set(f"{_FOLDER}/answer/{store.get(f'{_FOLDER}/token/{rank}').decode()}", name)
        if missing and time.monotonic() > until:
            raise ShardingError(
                f"ranks {sorted(missing)[:8]} of {ranks} did not start in time; init_mesh(timeout=) says how long the "
                "first rank waits for the others: look into their output for why, or give them longer"
            )
        time.sleep(_POLL_SECONDS if missing else 0)
