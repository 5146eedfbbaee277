"""One rank of a world: a process that joins the others once and then runs test bodies until its parent is gone."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.ranks.mesh import init_mesh
from jigsaw.testing.failure import RankFailure
from jigsaw.testing.ordered_group import ORDERED_BACKEND, serve_ordered_groups, take_events
from jigsaw.testing.played_device import PLAYED_DEVICE, make_tensors_on, register_played_device
from jigsaw.testing.post_order import Post, PostWait

DEVICE_VARIABLE = "JIGSAW_TEST_DEVICE"

_GROUP_TIMEOUT = timedelta(hours=1)  # the world's own timeout reports earlier, with every rank's stack
_world_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
_world_device = "cpu"  # of this rank's tests, as `serve_jobs` was told


def world_mesh(**axes: int) -> DeviceMesh:
    """Return `jigsaw.init_mesh(**axes)` on the world's device, made once for each set of axes: later tests get it in
    microseconds.

    Raises: `ShardingError` when the product of the axes is not the number of ranks.

    >>> jigsaw.testing.world_mesh(lat=1, lon=1).shape
    (1, 1)
    """
    key = tuple(axes.items())
    if key not in _world_meshes:
        _world_meshes[key] = init_mesh(device=_world_device, **axes)
    return _world_meshes[key]


@dataclass(frozen=True)
class RankBody:
    """A module-level function by name, because it may be hidden under decorators, which a pickle could not reach."""

    module: str
    file: str | None
    name: str

    def find(self) -> Callable[..., Any]:
        """Return the function that `on_ranks` decorated, or the function itself."""
        value: Any = _find_module(self.module, self.file)
        for part in self.name.split("."):
            value = getattr(value, part)
        seen = value
        while not hasattr(seen, "rank_body") and hasattr(seen, "__wrapped__"):
            seen = seen.__wrapped__
        return getattr(seen, "rank_body", value)


@dataclass(frozen=True)
class RankJob:
    """A test body for every rank, in the folder of the test. `arguments` are pickled apart, because they may need the
    body's module.
    """

    body: RankBody
    arguments: bytes
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class RankReport:
    """A rank's answer to a job (or its first message, when it has joined): a pickled value, or a failure."""

    value: bytes = b""
    failure: RankFailure | None = None
    groups: int = 0
    posts: tuple[Post | PostWait, ...] = ()


@dataclass(frozen=True)
class WorldKind:
    """The number of ranks, the backend of their messages, and the device of their tensors."""

    ranks: int
    backend: str
    device: str


def serve_jobs(connection: Connection, rank: int, kind: WorldKind, folder: str, environment: dict[str, str]) -> None:
    """Join the world, then run what arrives on `connection`; the rank's whole life.  `environment` is the parent's now,
    because the process that this one was forked from may have an older one.
    """
    os.environ.clear()
    os.environ.update(environment)
    others: list[int] = []
    threading.Thread(target=_die_with_parent, args=(others,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a world ends
    stacks = (Path(folder) / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _be_one_rank(rank, kind)
    if DEVICE_VARIABLE in os.environ:
        make_tensors_on(kind.device)
    store = dist.FileStore(str(Path(folder) / "store"), kind.ranks)
    if kind.backend == ORDERED_BACKEND:
        serve_ordered_groups()
    backend = "cpu:gloo,cuda:nccl" if kind.backend == "nccl" else kind.backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=kind.ranks, timeout=_GROUP_TIMEOUT)
    store.set(f"process {rank}", str(os.getpid()))
    if rank == 0:
        others += [int(store.get(f"process {other}")) for other in range(1, kind.ranks)]
    connection.send_bytes(pickle.dumps(RankReport()))
    while True:
        try:
            job: RankJob = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            _end_rank(others, 0)
        report = pickle.dumps(_run_job(job, rank))
        with suppress(OSError):  # the parent has gone, as recv_bytes will tell
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(report)


def _run_job(job: RankJob, rank: int) -> RankReport:
    sys.path.extend(p for p in job.path if p not in sys.path)
    _same_start()
    try:
        os.chdir(job.folder)  # the one in which this process began may be a test's own, and gone
        body = job.body.find()
        args, kwargs = pickle.loads(job.arguments)
        value = body(*args, **kwargs)
    except BaseException as error:  # SystemExit and pytest's outcomes are failures of this rank too
        return RankReport(failure=RankFailure.of_exception(rank, error, 1, job.body.file))
    try:
        return RankReport(
            value=pickle.dumps(value), groups=dist.distributed_c10d.get_pg_count(), posts=tuple(take_events())
        )
    except Exception as error:
        error.add_note(
            f"{job.body.name} returned a {type(value).__name__} that does not pickle; return plain tensors and numbers"
        )
        return RankReport(failure=RankFailure.of_exception(rank, error, 1, None))


def _same_start() -> None:
    """Start every body in the same state on every rank: one seed, float32, gradients on, one time-out."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(_GROUP_TIMEOUT)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (scipy and others draw from the global state, which only this can seed)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _be_one_rank(rank: int, kind: WorldKind) -> None:
    global _world_device
    _world_device = kind.device
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(kind.ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if kind.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif kind.device == PLAYED_DEVICE:
        register_played_device()
    else:
        # NCCL 2.30 and newer let ranks share a GPU; with little memory each, as tests have many ranks and groups
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        for name, value in {"NCCL_MAX_CTAS": "1", "NCCL_BUFFSIZE": str(2**18), "NCCL_NVLS_ENABLE": "0"}.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if "lo" in (name for _, name in socket.if_nameindex()):  # a host name that does not resolve must not stop a test
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)


def _die_with_parent(others: Sequence[int]) -> None:
    """End with the parent: a rank in a collective does not read its pipe, so a thread watches for the parent's end."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        _end_rank(others, 1)


def _end_rank(others: Sequence[int], code: int) -> NoReturn:
    """End this process.  The first rank, which never rests, first wakes the `others`, which then see the same end."""
    for process in others:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    os._exit(code)


def _find_module(name: str, file: str | None) -> ModuleType:
    """Return the module of that name and file, imported by name where that gives this file, else from the file."""
    candidate = sys.modules.get(name)
    if candidate is None and (file is None or _module_file(name) == file):
        return importlib.import_module(name)
    if candidate is not None and (file is None or getattr(candidate, "__file__", None) == file):
        return candidate
    spec = importlib.util.spec_from_file_location(name, str(file))
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module_file(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None
