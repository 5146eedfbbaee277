"""Open files of a rank and entries in the job's store, for groups of GPUs; a JSON object a number of ranks.

    python benchmarks/open_files.py --ranks 4 8 16

Ranks are processes of this host.  Torch's fake backend plays NCCL, which opens files of its own; gloo is real.  Each
rank makes a mesh of two axes and the group of a save in the background, and all sum a value of the host.  `jigsaw` is
by `init_mesh`.  `torch` is by torch's own functions, where every group has a part for the host.  Figures are of the
last rank beyond those before it joined; `first` is the rank that keeps the store.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.testing._internal.distributed.fake_pg  # pyright: ignore[reportUnusedImport] # registers the backend
from torch.distributed.device_mesh import init_device_mesh

import jigsaw
from jigsaw.ranks.job_groups import host_group
from jigsaw.torch_internals.groups import default_store


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _be_rank(rank: int, ranks: int, port: int, way: str, rows: Queue[tuple[int, int, int]]) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    torch.cuda.device_count, torch.cuda.set_device = lambda: ranks, lambda device: None
    before = _open_files()
    if way == "jigsaw":
        jigsaw.init_mesh(device="cuda", backend="cuda:fake", lat=2, lon=-1)
        group: Any = host_group("saves", timedelta(minutes=5))
    else:
        dist.init_process_group("cpu:gloo,cuda:fake")
        init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("lat", "lon"))
        group: Any = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1))
    dist.gather_object(rank, [None] * ranks if rank == 0 else None, dst=0, group=group)
    rows.put((rank, _open_files() - before, default_store().num_keys()))
    dist.barrier()


def measure_ranks(ranks: int, way: str) -> dict[str, int | str]:
    """Return the figures of the last rank and the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows: Queue[tuple[int, int, int]] = mp.get_context("spawn").Queue()
    job: Any = mp.spawn(_be_rank, (ranks, port, way, rows), ranks, join=False)
    by_rank = {rank: row for rank, *row in (rows.get() for _ in range(ranks))}
    while not job.join():
        pass
    (files, _), (first_files, keys) = by_rank[ranks - 1], by_rank[0]
    return {"ranks": ranks, "groups": way, "open_files": files, "first_open_files": first_files, "store_keys": keys}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="even numbers")
    for ranks in parser.parse_args().ranks:
        for way in ("torch", "jigsaw"):
            print(json.dumps(measure_ranks(ranks, way)), flush=True)


if __name__ == "__main__":
    main()
