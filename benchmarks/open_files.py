"""Open files of a rank and requests to the job's store, for groups of GPUs; a JSON object a number of ranks.

    python benchmarks/open_files.py --ranks 4 8 16 --paper 64 512 1024 4096

Ranks are processes of this host.  Torch's fake backend plays NCCL, which opens files of its own; gloo is real.  Each
rank makes a mesh of two axes and the group of a save in the background, and all sum a value of the host.  `jigsaw` is
by `init_mesh`.  `torch` is by torch's own functions, where every group has a part for the host.  Figures are of the
last rank beyond those before it joined; `first` is the rank that keeps the store.  `store_requests` are those of a
rank, `store_keys` the entries that all have left there.

The last rows are on paper: what `connections_of_rank` says of more ranks, by rules that hold exactly for those that
were run, and the start of such a job.  `store_s` is the processor time of the store, one thread, for all requests and
connections, by what one of each costs it here (`store_request_s`, `store_connection_s`).  What is assumed: the store
has a core of its own, each rank waits for each of its requests one round trip of `--round-trip` seconds, and NCCL needs
`--nccl` seconds for its groups.  `start_s` is the sum; starting Python and reading weights come on top.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.testing._internal.distributed.fake_pg  # pyright: ignore[reportUnusedImport] # registers the backend
from result_file import ResultFile, add_result_options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

import jigsaw
from jigsaw.ranks.job_groups import host_group


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class _CountedStore(dist.Store):
    """The job's store, which counts what its rank asks for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.store, self.requests = dist.TCPStore(*args, **kwargs), 0


def _counted_request(name: str) -> Any:
    def ask(store: _CountedStore, *args: Any) -> Any:
        store.requests += 1
        return getattr(store.store, name)(*args)

    return ask


for _name in ("set", "get", "add", "append", "check", "wait", "delete_key", "compare_set", "multi_get", "multi_set"):
    setattr(_CountedStore, _name, _counted_request(_name))


def _be_rank(rank: int, ranks: int, port: int, way: str, rows: Queue[tuple[int, ...]]) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    torch.cuda.device_count, torch.cuda.set_device = lambda: ranks, lambda device: None
    stores: list[_CountedStore] = []

    def counted_store(*args: Any, **kwargs: Any) -> _CountedStore:
        stores.append(_CountedStore(*args, **kwargs))
        return stores[-1]

    setattr(sys.modules[rendezvous.__module__], "TCPStore", counted_store)  # noqa: B010 (what torch makes stores of)
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
    rows.put((rank, _open_files() - before, stores[0].requests, stores[0].store.num_keys()))
    dist.barrier()


def measure_ranks(ranks: int, way: str) -> dict[str, int | str]:
    """Return the figures of the last rank and the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows: Queue[tuple[int, ...]] = mp.get_context("spawn").Queue()
    job: Any = mp.spawn(_be_rank, (ranks, port, way, rows), ranks, join=False)
    while not job.join():  # raises what a rank has failed with
        pass
    by_rank = {rank: row for rank, *row in (rows.get() for _ in range(ranks))}
    (files, requests, _), (first_files, first_requests, keys) = by_rank[ranks - 1], by_rank[0]
    of_store = {"store_requests": requests, "first_store_requests": first_requests, "store_keys": keys}
    return {"ranks": ranks, "groups": way, "open_files": files, "first_open_files": first_files, **of_store}


def connections_of_rank(ranks: int) -> dict[str, int]:
    """Return the figures of `measure_ranks` for `jigsaw` of any power of two: by rules, which tests compare with it.

    The rank that starts last asks once more than others. It is the first rank here; `measure_ranks` may meet another.
    """
    doublings = ranks.bit_length() - 1
    files, requests = 10 + 2 * doublings, 8 + 4 * doublings
    of_first = {"first_open_files": files + 2 * ranks + 6, "first_store_requests": requests + 2 * ranks - 5}
    return {"open_files": files, "store_requests": requests, **of_first, "store_keys": 2 * ranks + 4}


def _ask_store(port: int, requests: int, connections: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for at in range(requests // 2):
        store.set(f"{os.getpid()} {at % 100}", "0" * 32)
        store.get(f"{os.getpid()} {at % 100}")
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(connections)]
    del stores


def measure_store(requests: int = 20_000, connections: int = 400) -> dict[str, float]:
    """Return the processor seconds of the store for a request, and for a rank that connects."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    costs: list[float] = []
    for asked in ((requests, 0), (0, connections)):
        client = mp.get_context("spawn").Process(target=_ask_store, args=(store.port, *asked))
        client.start()
        began = time.process_time()
        client.join()
        costs.append((time.process_time() - began) / max(asked))
    return {"store_request_s": round(costs[0], 7), "store_connection_s": round(costs[1], 7)}


def start_on_paper(ranks: int, store: dict[str, float], round_trip: float, nccl: float) -> dict[str, int | float | str]:
    """Return the seconds until all ranks of a job have their groups."""
    counts = connections_of_rank(ranks)
    asked = (ranks - 1) * counts["store_requests"] + counts["first_store_requests"]
    busy = asked * store["store_request_s"] + ranks * store["store_connection_s"]
    start = busy + counts["store_requests"] * round_trip + nccl
    costs = {**store, "store_s": round(busy, 2), "round_trip_s": round_trip, "nccl_s": nccl, "start_s": round(start, 1)}
    return {"ranks": ranks, "groups": "on paper", **counts, "all_store_requests": asked, **costs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16], help="powers of two")
    parser.add_argument("--ways", nargs="+", default=["torch", "jigsaw"], choices=["torch", "jigsaw"])
    parser.add_argument("--paper", type=int, nargs="*", default=[], help="powers of two, which are not run")
    parser.add_argument("--round-trip", type=float, default=1e-3, help="seconds, assumed")
    parser.add_argument("--nccl", type=float, default=30.0, help="seconds of NCCL for its own groups, assumed")
    add_result_options(parser)
    chosen = parser.parse_args()
    asked = {"ranks": chosen.ranks, "ways": chosen.ways, "paper": chosen.paper}
    options = [f"--{name} {' '.join(map(str, values))}" for name, values in asked.items() if values]
    results = ResultFile(chosen, f"python benchmarks/open_files.py {' '.join(options)}")
    for ranks in chosen.ranks:
        for way in chosen.ways:
            results.add(measure_ranks(ranks, way))
    store = measure_store() if chosen.paper else {}
    for ranks in chosen.paper:
        results.add(start_on_paper(ranks, store, chosen.round_trip, chosen.nccl))


if __name__ == "__main__":
    main()
