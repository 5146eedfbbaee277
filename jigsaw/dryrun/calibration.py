"""What the processor of this machine does, measured: a `Device` for dry runs of CPU ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from jigsaw.dryrun.devices import DEVICES, Device

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def measure_device(ranks: int = 2) -> Device:
    """This machine's processor, one thread a rank: matrix products, copies, small kernels, and messages by gloo.

    Takes some seconds.  Processor seconds are counted, so that others on the machine disturb little.
    """
    from jigsaw.testing import run_on_ranks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flop = {dtype: _product_rate(dtype) for dtype in _DTYPES}
        bandwidth, kernel = _copy_rate(), _kernel_seconds()
    finally:
        torch.set_num_threads(threads)
    (start, seconds_a_byte), *_ = run_on_ranks(ranks, _message_seconds)
    return replace(
        DEVICES["cpu"],
        name="this machine",
        flop_per_second=flop,
        memory_bandwidth=bandwidth,
        node_bandwidth=1 / seconds_a_byte,
        kernel_seconds=kernel,
        node_seconds=start,
    )


def _best_time(work: Callable[[], object], times: int = 5) -> float:
    """The least processor seconds of some runs."""
    work()
    found: list[float] = []
    for _ in range(times):
        since = time.process_time()
        work()
        found.append(time.process_time() - since)
    return max(min(found), 1e-9)


def _product_rate(dtype: torch.dtype, size: int = 512) -> float:
    x = torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best_time(lambda: x @ x)


def _copy_rate(size: int = 2**24) -> float:
    # what a net's kernels move lies in caches partly; an addition of 16 MiB is read and written
    x = torch.ones(size // 4)
    return 3 * size / _best_time(lambda: x + x)


def _kernel_seconds(times: int = 2000) -> float:
    x = torch.ones(8)

    def work() -> None:
        for _ in range(times):
            torch.add(x, x)

    return _best_time(work) / times


def _message_seconds() -> tuple[float, float]:
    """On each of two ranks: the processor seconds of a message beside its bytes, and of a byte."""

    def swap(size: int) -> float:
        mine, theirs = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        other = 1 - dist.get_rank()

        def work() -> None:
            for pending in [dist.irecv(theirs, other), dist.isend(mine, other)]:
                if pending is not None:
                    pending.wait()

        return _best_time(work)

    small, large = swap(8), swap(2**22)
    return small, max(large - small, 1e-6) / 2**22


# -- on disk ----------------------------------------------------------------------------------------------------------


def save_device(device: Device, path: str | Path) -> None:
    """Write a device as JSON, which `load_device` and ``--device`` read."""
    said = asdict(device)
    said["flop_per_second"] = {
        str(dtype).removeprefix("torch."): rate for dtype, rate in device.flop_per_second.items()
    }
    Path(path).write_text(json.dumps(said, indent=1) + "\n")


def load_device(path: str | Path) -> Device:
    """A device that `save_device` wrote.

    >>> from jigsaw.dryrun.calibration import load_device, save_device
    >>> save_device(jigsaw.dryrun.DEVICES["h100"], "mine.json")
    >>> load_device("mine.json") == jigsaw.dryrun.DEVICES["h100"]
    True
    """
    said = json.loads(Path(path).read_text())
    said["flop_per_second"] = {getattr(torch, dtype): rate for dtype, rate in said["flop_per_second"].items()}
    return Device(**said)
