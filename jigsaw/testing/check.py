"""``python -m jigsaw check``: what is installed, what it can use, and whether tiles compute what torch computes."""

from __future__ import annotations

import argparse
import platform
import time
from importlib import metadata

import torch
import torch.distributed as dist
from torch import nn

from jigsaw.testing.failure import RankFailedError
from jigsaw.testing.oracle import assert_same_on_every_mesh

_PACKAGES = ("jigsaw-torch", "torch", "numpy", "zarr", "numcodecs", "h5py", "netCDF4", "xarray", "dask", "matplotlib")


def arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=4, help="ranks of the parity test (default 4)")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when the parity test fails."""
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        print(f"  {name:<12} {_package_version(name)}")
    print(f"backends: {', '.join(_available_backends()) or 'none'}")
    print(f"devices:  {_device_names()}")
    return 0 if _has_parity(args.ranks) else 1


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _available_backends() -> list[str]:
    if not dist.is_available():
        return []
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, there in found.items() if there]


def _device_names() -> str:
    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return ", ".join([*names, f"CPU ({torch.get_num_threads()} threads)"])


def _has_parity(ranks: int) -> bool:
    """A small convolution net, forward and every gradient, on tiles and on the whole tensor."""
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
