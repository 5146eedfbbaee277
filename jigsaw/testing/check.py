"""``python -m jigsaw check``: report what is installed and usable, and whether tiles compute what torch computes.

Started as several ranks, by srun, torchrun or mpirun, it reports instead what keeps their nodes from working together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from jigsaw.errors import ReadError, ShardingError
from jigsaw.io.formats.store import open_store
from jigsaw.ranks.launcher import torchrun_variables
from jigsaw.ranks.restart_store import store_that_answers
from jigsaw.testing.failure import RankFailedError
from jigsaw.testing.oracle import assert_same_on_every_mesh

NodeFacts = Mapping[str, str]
_COMPARED = ("python", "torch", "jigsaw", "numpy", "store")


class JobPlace(NamedTuple):
    """Rank of this process, number of processes, and their meeting point; `is_kept`: a launcher has the store."""

    rank: int
    ranks: int
    host: str
    port: int
    is_kept: bool = False


def place_in_job(environment: Mapping[str, str]) -> JobPlace | None:
    """Read the variables of torchrun, srun or mpirun; return None for a process that was started alone.

    Raises: `ShardingError` where they name no place to meet.
    """
    variables = {**environment, **torchrun_variables(environment)}
    if int(variables.get("WORLD_SIZE", "1")) == 1:
        return None
    is_kept = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    return JobPlace(int(variables["RANK"]), int(variables["WORLD_SIZE"]), *where, is_kept)


def facts_of_node(store: str | None) -> NodeFacts:
    """Return the facts of this process, most of which should be the same on all."""
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "jigsaw": metadata.version("jigsaw-torch"),
        "numpy": metadata.version("numpy"),
        "/dev/shm": f"{shared.f_blocks * shared.f_frsize / 1e6:.0f} MB" if shared else "none",
        "store": "not asked for" if store is None else _seen_of_store(store),
    }


def _seen_of_store(path: str) -> str:
    try:
        arrays = open_store(path).arrays
    except (ReadError, OSError) as e:
        return f"cannot be opened: {e}"
    return ", ".join(f"{name}{list(table.shape)}" for name, table in sorted(arrays.items()))


def check_nodes(place: JobPlace, facts: NodeFacts, seconds: float) -> list[str]:
    """Return what is wrong, an entry a problem, each with a remedy; empty where the processes can work together.

    Every process of the job calls it.  Process 0 keeps the store that torch would keep.  All write their facts there
    and wait for those of the others, so it knows which did not come.  A sum over gloo last needs connections between
    all. All report the same differences; problems of one node are reported there alone.
    """
    wrong = _wrong_with_meeting_point(place)
    if wrong:
        return wrong  # the other ranks will notice that this process is missing
    limit = timedelta(seconds=seconds)
    try:
        keeps = place.rank == 0 and not place.is_kept
        if keeps:
            meeting = dist.TCPStore(place.host, place.port, None, True, limit, wait_for_workers=False)
        else:
            meeting = store_that_answers(place.host, place.port, None, limit, limit / 2)
    except RuntimeError as e:
        return [
            f"rank {place.rank} on {facts['host']} cannot reach rank 0 at {place.host}, port {place.port}, within "
            f"{seconds:g} s: is it running, does a firewall close the port, do MASTER_ADDR and MASTER_PORT say the "
            f"same on all nodes? ({str(e).splitlines()[0]})"
        ]
    if meeting is None:
        return [
            f"rank {place.rank} on {facts['host']} reaches {place.host}, port {place.port}, but what listens there is "
            "not the store of rank 0: another program has the port; set MASTER_PORT to a free one on all nodes"
        ]
    store = dist.PrefixStore("jigsaw.check", meeting)
    store.set(f"facts/{place.rank}", json.dumps(dict(facts)))
    facts_by_rank, absent = _facts_of_all(store, place.ranks, limit)
    if absent:
        return [f"ranks {absent} of {place.ranks} did not come within {seconds:g} s; what do they say, on their nodes?"]
    wrong = _differences(facts_by_rank) + _wrong_with_gloo(place, facts, store, limit)
    store.set(f"done/{place.rank}", "")
    if keeps:  # the store ends with this process, so wait for the others
        _await_keys(store, [f"done/{rank}" for rank in range(place.ranks)], limit)
    return wrong


def _wrong_with_meeting_point(place: JobPlace) -> list[str]:
    """Say whether the host of process 0 has an address, and whether its port is free on that host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        return [f"rank {place.rank} finds no address of {place.host!r}, MASTER_ADDR or the first node of the step: {e}"]
    if place.rank or place.is_kept:
        return []
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(address)
        except OSError as e:
            return [
                f"rank 0 cannot listen at {place.host}, port {place.port}: {e.strerror}; set MASTER_PORT to another"
            ]
    return []


def _await_keys(store: dist.Store, keys: list[str], limit: timedelta) -> bool:
    try:
        store.wait(keys, limit)
    except RuntimeError:
        return False
    return True


def _facts_of_all(store: dist.Store, ranks: int, limit: timedelta) -> tuple[list[NodeFacts], list[int]]:
    keys = [f"facts/{rank}" for rank in range(ranks)]
    if not _await_keys(store, keys, limit):
        return [], [rank for rank, key in enumerate(keys) if not store.check([key])]
    return [json.loads(store.get(key)) for key in keys], []


def _differences(facts_by_rank: list[NodeFacts]) -> list[str]:
    wrong: list[str] = []
    for name in _COMPARED:
        places: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            places.setdefault(facts[name], []).append(rank)
        if len(places) > 1 or any(each.startswith("cannot") for each in places):
            hosts = {value: sorted({facts_by_rank[rank]["host"] for rank in ranks}) for value, ranks in places.items()}
            texts = [f"{value} on ranks {ranks} ({', '.join(hosts[value])})" for value, ranks in places.items()]
            wrong.append(f"{name} must be the same on all, and readable: {'; '.join(texts)}")
    return wrong


def _wrong_with_gloo(place: JobPlace, facts: NodeFacts, store: dist.Store, limit: timedelta) -> list[str]:
    """Check by a sum over gloo that all processes can connect to each other."""
    try:
        group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), place.rank, place.ranks, limit)
        total = torch.ones(1)
        group.allreduce([total]).wait()
    except RuntimeError as e:
        names = ", ".join(name for _, name in socket.if_nameindex())
        return [
            f"rank {place.rank} on {facts['host']} reaches rank 0, and not all others over gloo: set "
            f"GLOO_SOCKET_IFNAME to the interface that joins the nodes, of {names} ({str(e).splitlines()[0]})"
        ]
    return [] if int(total) == place.ranks else [f"a sum of ones over {place.ranks} ranks is {int(total)}"]


_PACKAGES = ("jigsaw-torch", "torch", "numpy", "zarr", "numcodecs", "h5py", "netCDF4", "xarray", "dask", "matplotlib")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=4, help="ranks of the parity test (default 4)")
    parser.add_argument("--store", help="on several nodes: a store that all of them should read")
    waits = "on several nodes: how long they wait for each other, in seconds (default 60)"
    parser.add_argument("--timeout", type=float, default=60.0, help=waits)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 when the parity test fails, or ranks cannot work together."""
    try:
        place = place_in_job(os.environ)
    except ShardingError as e:
        print(e)
        return 1
    if place is not None:
        return _report_nodes(place, args.store, args.timeout)
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        print(f"  {name:<12} {_package_version(name)}")
    print(f"backends: {', '.join(_available_backends()) or 'none'}")
    print(f"devices:  {_device_names()}")
    return 0 if _has_parity(args.ranks) else 1


def _report_nodes(place: JobPlace, store: str | None, seconds: float) -> int:
    facts = facts_of_node(store)
    wrong = check_nodes(place, facts, seconds)
    own = ", ".join(f"{name} {value}" for name, value in facts.items())
    print("\n".join([f"rank {place.rank} of {place.ranks}: {own}", *(f"WRONG: {each}" for each in wrong)]), flush=True)
    if not wrong and place.rank == 0:
        print(f"all {place.ranks} ranks reach each other, and have the same versions", flush=True)
    return 1 if wrong else 0


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _available_backends() -> list[str]:
    if not dist.is_available():
        return []
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_available in backends.items() if is_available]


def _device_names() -> str:
    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return ", ".join([*names, f"CPU ({torch.get_num_threads()} threads)"])


def _has_parity(ranks: int) -> bool:
    """Say whether a small convolution net gives the same on tiles as on the whole tensor, with all gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, stride=2, padding=1))
    axes = {"lat": min(ranks, 2), "lon": max(ranks // 2, 1)}
    start = time.perf_counter()
    try:
        assert_same_on_every_mesh(model, torch.randn(2, 3, 33, 20), [axes])
    except (AssertionError, RankFailedError) as failure:
        print(f"parity:   FAILED on {ranks} ranks\n{failure}")
        return False
    print(f"parity:   tiles on {ranks} ranks give what plain torch gives ({time.perf_counter() - start:.1f} s)")
    return True
