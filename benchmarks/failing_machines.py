"""Faults of machines, as a rank of `failures.py` meets them: links, memory and disks.  They need root and Linux."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from links import HOSTS

ADDRESSES = dict(zip(HOSTS, ("10.77.0.1", "10.77.0.2"), strict=True))  # those of `linked_hosts`
_MOST_MEMORY = 2**26  # beyond what the rank has
_LINK_SECONDS = 1.0  # that messages lie on the link before it goes down
_FRAME, _BURST = 8900, 9100


def lose_link(note: Callable[[], None]) -> None:
    """Let what this host sends from now on lie on the link, and take the link down a second later, which is noted."""
    words = f"tc qdisc replace dev wire root tbf rate 8bit burst {_BURST} limit 16mb"
    subprocess.run(words.split(), check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(2):  # the first takes the burst, the second waits for hours, and all that comes behind it
            sender.sendto(bytes(_FRAME), (_other_address(), 9))

    def cut() -> None:
        time.sleep(_LINK_SECONDS)
        note()
        subprocess.run(["ip", "link", "set", "wire", "down"], check=True)

    threading.Thread(target=cut, daemon=True).start()


def _other_address() -> str:
    own = subprocess.run(["ip", "addr", "show", "dev", "wire"], check=True, capture_output=True, text=True).stdout
    return next(address for address in ADDRESSES.values() if f"{address}/" not in own)


def run_out_of_memory() -> None:
    """Ask for more memory than the system gives this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MOST_MEMORY, most))
    torch.ones(2**28)


def memory_group(process: int) -> Path:
    """Return the folder of a process' own group of memory, of the first or the second version of cgroups."""
    root = Path("/sys/fs/cgroup")
    return (root / "memory" if (root / "memory").is_dir() else root) / f"jigsaw-{process}"


def be_killed_for_memory() -> None:
    """Take more memory than the group of this process may have, for which the system kills it."""
    group = memory_group(os.getpid())
    group.mkdir()
    limit = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    (group / limit).write_text(str(_MOST_MEMORY))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taken = []
    while True:
        taken.append(torch.ones(2**22))


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """A disk of that size at a folder, which is made."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_disk(place: Path, left: int) -> None:
    """Leave so many bytes of a disk, until the file `filling` is removed."""
    state = os.statvfs(place)
    with open(place / "filling", "wb", buffering=0) as filling, suppress(OSError):
        filling.write(bytes(max(0, state.f_bavail * state.f_frsize - left)))
