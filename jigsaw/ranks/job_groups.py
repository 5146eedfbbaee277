"""Joining the job, and groups of its host memory beside those of its devices.

With ``init_mesh(backend="nccl")`` every group is of NCCL alone.  A group of gloo beside each, as torch makes by
default, holds a connection from every rank to every other one.  The job's own group has one such part, for values and
tensors of the host.  Its ranks connect as late as they first talk: 4 open files, and one for each rank that a rank has
talked to.

Example: 4096 ranks wait for each other, in twelve rounds.  Each has then 24 connections, and not 4095.
"""

from __future__ import annotations

import atexit
import os
import warnings
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from jigsaw.errors import ShardingError
from jigsaw.ranks.launcher import allow_open_files
from jigsaw.ranks.model_world import job_group, of_the_job
from jigsaw.ranks.restart_store import (
    agree_on_start,
    is_shared_between_starts,
    joined_job_store,
    store_of_this_start,
)
from jigsaw.torch_internals.groups import (
    default_store,
    devices_of_group,
    group_of_host,
    late_gloo,
    serve_group,
    serves_host,
)

_SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
_MANY_RANKS = 256  # from this number on, warn of a full mesh of gloo's connections besides NCCL's


class JobOptions(NamedTuple):
    """Arguments of `torch.distributed.init_process_group`; None leaves one to jigsaw."""

    backend: str | None = None
    device_id: torch.device | int | None = None
    pg_options: Any = None


def default_device() -> str:
    """Return the kind of device of a mesh: GPUs where each local rank has one."""
    return "cuda" if torch.cuda.is_available() and _has_a_gpu_each() else "cpu"


def _has_a_gpu_each() -> bool:
    own = "SLURM_GPUS_PER_TASK" in os.environ  # srun then shows each task only its own GPUs
    return torch.cuda.device_count() >= (1 if own else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


_joined_by: WeakKeyDictionary[dist.ProcessGroup, JobOptions] = WeakKeyDictionary()


def join_job(device: str, limit: timedelta, options: JobOptions) -> None:
    """Make the process group of the job, with the variables that its launcher has set.

    Raises: `ShardingError` where a process may open too few files for all ranks, or options do not fit the device.
    `RanksDifferError` on every rank where ranks start on other devices or backends.
    """
    _check_device(device, options)
    backend, ranks = options.backend or _usual_backend(device), int(os.environ.get("WORLD_SIZE", "1"))
    is_late = not serves_host(backend)
    keeps_store = os.environ.get("RANK") == "0" and ranks > 1 and not is_shared_between_starts()
    allow_open_files(ranks, keeps_store, is_late)
    if device == "cuda" and not is_late and ranks > _MANY_RANKS and os.environ.get("RANK") == "0":
        warnings.warn(
            f"init_mesh() with backend={backend!r} gives each of {ranks} ranks connections to all others beside those "
            'of NCCL; so large a job needs few open files with init_mesh(backend="nccl", ...), and starts faster',
            stacklevel=3,
        )
    atexit.register(_leave_process_group, os.getpid())
    named: dict[str, Any] = {"backend": backend, "timeout": limit}
    if device == "cuda":
        own = options.device_id if options.device_id is not None else int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(own if isinstance(own, torch.device) else own % torch.cuda.device_count())
        named |= {"device_id": options.device_id, "pg_options": options.pg_options}
    if is_shared_between_starts():
        store, rank, ranks = store_of_this_start(limit)
        named |= {"store": store, "rank": rank, "world_size": ranks}
    elif "RANK" in os.environ and os.environ.get("JIGSAW_JOB_SECRET"):
        store, rank, ranks = joined_job_store(os.environ["JIGSAW_JOB_SECRET"], limit)
        named |= {"store": store, "rank": rank, "world_size": ranks}
    elif "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        named |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    else:
        store, rank, ranks = next(rendezvous("env://", timeout=limit))
        named |= {"store": store, "rank": rank, "world_size": ranks}
    agree_on_start(named["store"], named["rank"], named["world_size"], f"device={device!r}, backend={backend!r}", limit)
    dist.init_process_group(**named)
    world: Any = dist.group.WORLD
    _joined_by[world] = options
    if "cpu" not in devices_of_group(world):
        store = dist.PrefixStore(f"jigsaw host {world.group_name}", default_store())
        gloo: Any = late_gloo(store, world.rank(), world.size(), limit)
        # connect the ranks that a later barrier needs, because by then the first rank may have ended the store
        gloo.barrier().wait()
        serve_group(world, gloo, is_default=False)
        _late_jobs.add(world)


def _usual_backend(device: str) -> str:
    # NCCL refuses ranks that share a GPU, unless it is told not to, from its version 2.30 on
    is_ncclable = device == "cuda" and (_has_a_gpu_each() or os.environ.get(_SHARED_GPUS) == "1")
    return "cpu:gloo,cuda:nccl" if is_ncclable else "gloo"


def _check_device(device: str, options: JobOptions) -> None:
    if device == "cuda" and not torch.cuda.device_count():
        raise ShardingError(
            "device='cuda' needs a GPU, and torch sees none in this process; pass device='cpu', or start it where "
            "torch.cuda.is_available()"
        )
    if device != "cuda" and (options.device_id is not None or options.pg_options is not None):
        raise ShardingError(
            f"device_id={options.device_id!r} and pg_options={options.pg_options!r} are NCCL's, and device={device!r}; "
            "leave them out, or pass device='cuda'"
        )


def check_job_options(options: JobOptions) -> None:
    """Raise `ShardingError` where the job's group exists already, and was not made with these options."""
    world: Any = job_group()
    if options == JobOptions() or options == _joined_by.get(world):
        return
    named = zip(options.__match_args__, options, strict=True)
    arguments = ", ".join(f"{name}={value!r}" for name, value in named if value is not None)
    raise ShardingError(
        f"init_mesh({arguments}) says how to make the process group of the job, which exists already, on the backend "
        f"{dist.get_backend(world)!r}; pass this to what made it, torch.distributed.init_process_group or the first "
        "init_mesh"
    )


def _leave_process_group(process: int) -> None:
    """End gloo's threads before Python exits; left running they abort a rank that had finished.

    A process that was forked from the one that joined has none of these threads, and would wait for them.
    """
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()


def device_of_values(group: dist.ProcessGroup) -> str:
    """Return the kind of device on which a group takes small values of the host."""
    kinds = devices_of_group(group)
    return "cpu" if "cpu" in kinds else min(kinds)


_late_jobs: WeakSet[dist.ProcessGroup] = WeakSet()  # jobs whose ranks connect when they first talk
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()


def host_group(purpose: str, limit: timedelta) -> dist.ProcessGroup:
    """Return the job's group for one purpose of the host; making it, at its first use, is collective.

    A thread that talks beside others has a purpose of its own: a group pairs messages by their order.  Ranks connect as
    late as they first talk where the job's own do.  Elsewhere they connect at once: a rank that dies is found sooner.
    """
    world: Any = job_group()
    groups = _host_groups.setdefault(world, {})
    if purpose not in groups:
        with of_the_job():
            if world in _late_jobs:
                groups[purpose] = group_of_host(f"jigsaw {purpose}", world.rank(), world.size(), limit)
            else:
                eager: Any = dist.new_group(backend="gloo", timeout=limit)
                groups[purpose] = eager
    return groups[purpose]
