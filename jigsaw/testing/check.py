"""``python -m jigsaw check``: report what is installed and usable, and whether tiles compute what torch computes.

Started as several ranks, by srun, torchrun or mpirun, it reports instead what keeps their nodes from working together.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from importlib import metadata

import torch
import torch.distributed as dist
from torch import nn

from jigsaw.errors import ShardingError
from jigsaw.testing.failure import RankFailedError
from jigsaw.testing.node_check import JobPlace, check_nodes, facts_of_node, place_in_job
from jigsaw.testing.oracle import assert_same_on_every_mesh

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
    """Print what is wrong with the nodes; rank 0 also prints when nothing is."""
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
    """Say whether a small convolution net gives the same on tiles as on the whole tensor, forward and
    every gradient.
    """
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
