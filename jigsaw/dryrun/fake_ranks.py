"""One rank of a job that is not there: torch's fake process group, beside whatever group the process is in.

A fake group carries nothing and never waits, so one process plays any rank of any mesh.  torch keeps its process groups
in one object, which it calls the point where others may put their own; a dry run puts an empty one there, and gives the
old one back.  Thus a dry run works in a notebook, under torchrun, and within a test that has joined a real group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from jigsaw import debug

# Groups are found by name in C++ as well, where the real ones are "0", "1", ...; each dry run has names of its own.
_first_names = count(10**6, 10**6)


@contextmanager
def fake_mesh(axes: Mapping[str, int], rank: int) -> Generator[DeviceMesh]:
    """A mesh of CPU ranks of which this process plays `rank`, within the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world, held = _empty_world(), c10d._world  # pyright: ignore[reportPrivateUsage]
    was_debugging, hook = debug.IS_DEBUGGING, sys.excepthook  # torch lets tracebacks begin with a rank from now on
    joined = DeviceMesh._concatenate  # pyright: ignore[reportPrivateUsage]
    c10d._world, debug.IS_DEBUGGING = world, False  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    DeviceMesh._concatenate = staticmethod(partial(_with_values, joined))  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    try:
        ranks = torch.Size(axes.values()).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        # meshes are told apart by their ranks and names, not by whose they are: what is kept for rank 0 of a dry run
        # must never answer rank 1 of the next one
        mesh._thread_id, mesh._hash = next(_mesh_numbers), None  # pyright: ignore[reportPrivateUsage]
        yield mesh
    finally:
        for name in world.pg_names.values():
            torch._C._distributed_c10d._unregister_process_group(name)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        c10d._world, debug.IS_DEBUGGING = held, was_debugging  # pyright: ignore[reportPrivateUsage]
        sys.excepthook = hook
        DeviceMesh._concatenate = staticmethod(joined)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def _with_values(make: Callable[..., Any], *args: Any) -> Any:
    # FSDP2 joins its mesh with that of a weight that is cut already, and looks for this rank in a tensor
    with _disable_current_modes():
        return make(*args)


_mesh_numbers = count(-1, -1)


def _empty_world() -> Any:
    """What `torch.distributed` asks of its own `_World`."""
    dicts: dict[str, dict[Any, Any]] = {
        name: {}
        for name in (
            "pg_map",
            "pg_names",
            "pg_group_ranks",
            "pg_backend_config",
            "tags_to_pg",
            "pg_to_tag",
            "pg_coalesce_state",
        )
    }
    return SimpleNamespace(default_pg=None, group_count=next(_first_names), comms=[], pg_config_info=[], **dicts)
