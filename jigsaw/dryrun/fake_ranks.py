"""One rank of a job that does not exist: torch's fake process group, beside any group that the process is in.

A fake group carries nothing and never waits, so one process plays any rank of any mesh.  torch keeps its process groups
in one object, and documents that others may replace it.  A dry run puts one there that shows its own thread an empty
world, and every other thread the old one.  So a save in the background, a loader and a watch continue with the groups
of the job.  Thus a dry run works in a notebook, under torchrun, and within a test that has joined a real group.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jigsaw.comm import debug
from jigsaw.torch_internals.dispatch import without_modes
from jigsaw.torch_internals.groups import (
    around_chunks,
    around_joins,
    fake_store,
    know_groups,
    known_groups,
    number_mesh,
    set_rank_of_log,
    unregister_group,
)

_one_at_a_time = threading.RLock()  # a dry run changes torch for the whole process

# C++ finds groups by name as well, where the real ones are "0", "1", ...; each dry run has unique names.
_first_names = count(10**6, 10**6)


@contextmanager
def fake_mesh(axes: Mapping[str, int], rank: int) -> Generator[DeviceMesh]:
    """Make a mesh of CPU ranks of which this thread plays `rank`, within the block; dry runs of other threads wait."""
    with _one_at_a_time, debug.without_comparing():
        world, held = _empty_world(), known_groups()
        hook = sys.excepthook  # torch lets tracebacks begin with a rank from now on
        meshes: Any = DeviceMesh
        initializer = meshes.__init__
        know_groups(_WorldOfThread(world, held))
        meshes.__init__ = _numbered(initializer, next(_mesh_numbers))
        joins, chunks = around_joins(partial(partial, _with_values)), around_chunks(partial(partial, _ChunksOfRanks))
        try:
            with joins, chunks:
                ranks = torch.Size(axes.values()).numel()
                dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
                yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        finally:
            for name in world.pg_names.values():
                unregister_group(name)
            know_groups(held)
            set_rank_of_log(dist.get_rank() if dist.is_initialized() else -1)  # the rank that torch's log shows
            meshes.__init__ = initializer
            sys.excepthook = hook


class _WorldOfThread:
    """Process groups that torch knows: `mine` for the thread that makes this, `theirs` for all others."""

    def __init__(self, own: Any, theirs: Any) -> None:
        self.__dict__.update(thread=threading.get_ident(), mine=own, theirs=theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mine if threading.get_ident() == self.thread else self.theirs, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.mine if threading.get_ident() == self.thread else self.theirs, name, value)


_mesh_numbers = count(-1, -1)


def _numbered(make: Any, number: int) -> Any:
    # Meshes compare by their ranks and names, not by the rank that has them.  But caches for rank 0 of a dry run, ours
    # or torch's for operators on DTensors, must never answer rank 1 of the next one, nor parts of its mesh.
    thread = threading.get_ident()

    @wraps(make)
    def make_with_number(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        if threading.get_ident() == thread:
            number_mesh(mesh, number)

    return make_with_number


def _with_values(function: Any, *args: Any) -> Any:
    # FSDP2 joins the meshes of a weight that `channel` cuts as well, and looks up its rank in a tensor
    with without_modes():
        return function(*args)


class _ChunksOfRanks(Sequence[torch.Tensor]):
    """Parts of a weight for all ranks, of which FSDP2 asks for all and reads one or two: only these are made."""

    def __init__(self, chunk: Any, x: torch.Tensor, ranks: int, dim: int) -> None:
        self._chunk, self._x, self._ranks, self._dim = chunk, x, ranks, dim

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, at: Any) -> Any:
        size = self._x.size(self._dim)
        rows = -(-size // self._ranks)
        if isinstance(at, slice) or not rows or not 0 <= at < self._ranks:
            return self._chunk(self._x, self._ranks, self._dim)[at]
        if at * rows >= size:
            return self._x.new_empty(0)
        return self._x.narrow(self._dim, at * rows, min(rows, size - at * rows))


def _empty_world() -> Any:
    """Return what `torch.distributed` asks of its own `_World`."""
    names = "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag pg_coalesce_state"
    dicts: dict[str, dict[Any, Any]] = {name: {} for name in names.split()}
    return SimpleNamespace(default_pg=None, group_count=next(_first_names), comms=[], pg_config_info=[], **dicts)
