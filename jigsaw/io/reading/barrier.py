"""Barriers that make data written by one process visible to another before the word that announces it.

Python does not have fences. Processors of the x86 family need none: they show stores in order and load in order
(memcpy, whose streaming stores are the exception, ends them with a fence). Others, such as ARM's, promise neither.
There the kernel is asked for a full barrier on every thread of every process that has joined (``membarrier(2)``,
``GLOBAL_EXPEDITED``). The process that is about to store a word calls it; those that poll words need nothing.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

from jigsaw.errors import ReadError

_ORDERED = frozenset({"x86_64", "amd64", "i386", "i686"})
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_BARRIER, _JOIN = 1 << 1, 1 << 2


def memory_barrier() -> Callable[[], None] | None:
    """Return the barrier to call between writing data and storing the word that announces it; None if there is none."""
    return (lambda: None) if platform.machine().lower() in _ORDERED else kernel_barrier()


def kernel_barrier() -> Callable[[], None] | None:
    """Join the kernel's barrier and return it; None where the kernel lacks it or does not permit it."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return None
    # The kernel interrupts those who joined, wherever they run, and so orders the loads of those who poll as well: they
    # need no call of their own, and a poll costs nothing.
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, _JOIN, 0, 0) != 0:
        return None

    def barrier() -> None:
        if call(number, _BARRIER, 0, 0) != 0:
            raise ReadError(f"the kernel's memory barrier has failed (error {ctypes.get_errno()}), which it never does")

    return barrier
