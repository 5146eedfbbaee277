"""Ranks that share a sample, as the reader sees them: a process group of its own, never the model's.

Reading runs in its own thread beside the model's collectives, so it may not use their groups.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ForkedError, PeerError, ShardingError
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.ranks.mesh import axes_of_mesh, digest_of_ranks, mesh_patience
from jigsaw.ranks.restart_store import store_answer
from jigsaw.ranks.waiting_ranks import first_ended, first_failure, found_of_others, start_wait_watch
from jigsaw.torch_internals.groups import default_store


class PeerGroup:
    """The ranks of one domain group, numbered in mesh order: this one is `me`.

    `hosts` says for each on which machine it runs: those on one machine read through shared memory.  They wait for each
    other for `timeout` seconds.
    """

    def __init__(
        self, me: int = 0, size: int = 1, group: Any = None, host: str | None = None, timeout: float = 300.0
    ) -> None:
        self.me, self.size, self.timeout = me, size, timeout
        self.group: Any = group  # a group of gloo; None for one rank, and after it was released
        self._talks = 0
        _met_here.add(self)
        places = self.gather((host or this_host(), os.getpid()))
        self.hosts, self.pids = tuple(h for h, _ in places), tuple(pid for _, pid in places)

    @property
    def neighbors(self) -> tuple[int, ...]:
        return tuple(m for m, host in enumerate(self.hosts) if host == self.hosts[self.me])

    @property
    def is_spread(self) -> bool:
        return len(set(self.hosts)) > 1

    def separate(self) -> None:
        """Take every rank for a machine of its own: some cannot share memory."""
        self.hosts = tuple(f"{host}#{m}" for m, host in enumerate(self.hosts))

    def gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        # Two all-gathers, as gloo wants equal sizes. With pickles of 40, 90, 40 and 60 bytes each of four ranks first
        # learns the four sizes, then sends 90 bytes; those beyond its own are zeros, which are not unpickled.
        message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([message.numel()]))
        room = torch.zeros(max(int(n) for n in sizes), dtype=torch.uint8)
        room[: message.numel()] = message
        parts = self._all_gather(room)
        return [pickle.loads(x[: int(n)].numpy().tobytes()) for x, n in zip(parts, sizes, strict=True)]

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(x) for _ in range(self.size)]
        self._heard(lambda: self.group.allgather([received], [x]).wait())
        return received

    def _heard(self, talk: Callable[[], Any]) -> None:
        """Run a communication, and turn gloo's error, which does not name the rank that is gone, into a `PeerError`."""
        since = time.monotonic()
        self._talks += 1
        try:
            talk()
        except RuntimeError as e:
            waited = f"after {time.monotonic() - since:.1f} s (of {self.timeout:g} that ranks wait for each other)"
            raise PeerError(
                f"another rank of the domain group of {self.size} has ended or does not answer, {waited}: {e}"
                f"{first_failure()}"
            ) from e
        finally:
            self._talks -= 1

    def exchange_bytes(
        self, going: NDArray[np.uint8], counts: Sequence[int], coming: NDArray[np.uint8], sizes: Sequence[int]
    ) -> None:
        """Send each rank its `counts` bytes of `going`, and receive `sizes` bytes from each into `coming`.

        *Sends*: `going`, in one all-to-all.
        """
        sent, room = torch.from_numpy(going), torch.from_numpy(coming)
        options = dist.AllToAllOptions()
        self._heard(lambda: self.group.alltoall_base(room, sent, list(sizes), list(counts), options).wait())

    def close(self) -> None:
        self.group = None

    @property
    def is_idle(self) -> bool:
        """True where every thread is outside of a message."""
        return self._talks == 0


_met_here: WeakSet[PeerGroup] = WeakSet()


@atexit.register
def _end_groups() -> None:
    """End gloo's threads while Python still runs, like the mesh's; a group that waits for others would wait on."""
    # the threads that read have ended by then: `_end_prefetches` is registered later, so it runs before
    for peers in list(_met_here):
        if peers.is_idle:
            peers.close()


_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 0.2  # seconds between looks for ranks that have not come
_STORE_SECONDS = 5.0
"""Beyond their time-out, ranks of a meeting wait so long for an answer of the job's store."""
_groups_met: Counter[tuple[int, ...]] = Counter()


def meet_peers(
    mesh: DeviceMesh | None, apart: Sequence[str] = (DATA_AXIS,), host: str | None = None, timeout: float | None = None
) -> PeerGroup:
    """Return the ranks that share this rank's samples: those that differ from it along other axes than `apart`.

    Collective over these ranks: it makes a gloo group that only the reader uses. `host` overrides the name of this
    machine, `timeout` the seconds that the ranks of the mesh wait for each other.

    Raises: `ForkedError` in a process that was forked from a rank, because such a process is not a rank.
    """
    if mesh is None or mesh.size() == 1:
        return PeerGroup(host=host)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(f"rank {dist.get_rank()} is not part of the mesh {mesh}; only its ranks may read")
    names = [name for name, _ in axes_of_mesh(mesh)]
    selection = tuple(c if name in apart else slice(None) for name, c in zip(names, coordinate, strict=True))
    ranks = tuple(mesh.mesh[selection].flatten().tolist())
    if len(ranks) == 1:
        return PeerGroup(host=host)
    if dist.group.WORLD is not None and dist.group.WORLD is _inherited[0]:
        raise forked_from(os.getppid(), f"the mesh {mesh}")
    timeout = timeout or mesh_patience(mesh).total_seconds()
    # Made by hand on the job's store, not by `new_group`. That one is collective over all ranks of the job and counts
    # the groups that a rank has made, so ranks that make one alone would no longer find their peers. Each group has its
    # own name: ranks 0 to 3 that open two datasets meet in the same order, by their digest with 1 and then with 2.
    _groups_met[ranks] += 1
    store = dist.PrefixStore(f"jigsaw.io/{digest_of_ranks(ranks)}/{_groups_met[ranks]}", default_store())
    me = ranks.index(dist.get_rank())
    start_wait_watch()
    limit = timeout + _STORE_SECONDS
    try:
        store_answer(lambda: _await_peers(store, ranks, me, timeout)).result(limit)
        group = store_answer(lambda: dist.ProcessGroupGloo(store, me, len(ranks), timedelta(seconds=timeout))).result(
            limit
        )
    except TimeoutError as e:
        waited = f"the ranks {ranks} cannot meet to read samples together, and have waited {limit:g} s"
        raise PeerError(f"{waited}{first_failure()}") from e
    except dist.DistError as e:
        others = [rank for rank in ranks if rank != dist.get_rank()]
        waited = f"the ranks {ranks} cannot meet to read samples together ({e})"
        raise PeerError(f"{waited}{found_of_others('meeting of readers', others, waited)}") from e
    return PeerGroup(me, len(ranks), group, host, timeout)


def _await_peers(store: dist.Store, ranks: Sequence[int], me: int, timeout: float) -> None:
    """Wait until all come to make the group; gloo would wait for its whole time, and not say for whom.

    Raises: `PeerError` with the error of a rank that failed, or with the ranks that have not come in time.
    """
    store.set(f"here/{me}", "")
    arrivals, pause, until = store.add("here", 1), _SHORTEST_PAUSE, time.monotonic() + timeout
    while arrivals < len(ranks):
        if (ended := first_ended(ranks)) is not None:
            raise PeerError(f"rank {ended} has ended, and was to read samples with this one{first_failure()}")
        if time.monotonic() > until:
            absent = [rank for m, rank in enumerate(ranks) if not store.check([f"here/{m}"])]
            waited = f"waited {timeout:g} s for ranks {absent} to read samples together, and they did not come"
            raise PeerError(f"{waited}{found_of_others('meeting of readers', absent, waited)}")
        time.sleep(pause)
        arrivals, pause = store.add("here", 0), min(2 * pause, _LONGEST_PAUSE)


_inherited: list[Any] = [None]
"""The process group of the process that this one was forked from."""


def _inherit() -> None:
    # A process that ends one of gloo's groups waits for its threads, which a forked process lacks. So none is ended
    # there, not even when Python ends: only this reference knows of it.
    _inherited[0] = dist.group.WORLD
    for peers in list(_met_here):
        if peers.group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(peers.group))
    _met_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def this_host() -> str:
    """Return a name for what can share memory: a machine since it was started, and a namespace of process ids on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class HomeProcess:
    """The process that something was made in; `what` is what a user knows it as."""

    def __init__(self, what: str) -> None:
        self._pid, self._what = os.getpid(), what

    @property
    def is_here(self) -> bool:
        """True in that process, but not in one that was forked from it."""
        return os.getpid() == self._pid

    def check_home(self) -> None:
        """Raise `ForkedError` in a forked process, which has none of the threads that it would wait for."""
        if not self.is_here:
            raise forked_from(self._pid, self._what)


def forked_from(pid: int, what: str) -> ForkedError:
    """Make the error for a process that was forked from `pid`."""
    return ForkedError(
        f"{what} belongs to process {pid}, and this one ({os.getpid()}) was forked from it: its threads, sockets and "
        "shared memory stayed behind; jigsaw.io.DataLoader reads ahead in threads and needs no processes, and those of "
        'torch.utils.data.DataLoader can be started afresh by multiprocessing_context="spawn"'
    )
