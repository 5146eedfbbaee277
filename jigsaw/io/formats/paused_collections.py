"""Pause in Python's garbage collection while a library holds a lock that its objects take when they are freed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_LOOK_AGAIN_S = 0.001
_pause_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def paused_collections() -> Generator[None]:
    """Pause collections: inside, no thread starts one by itself, and none is under way.

    h5py holds its lock while it reads a far file, and its objects take that lock when they are freed. A thread that
    contributes to the answer (one of a pool, or the loop of zarr's stores) may collect such an object. It would then
    wait for the lock, and the read for that thread, forever: h5py documents this for file-like objects (h5py #2019,
    #2021). So this is entered before the lock is taken.
    """
    global _pauses, _was_enabled
    with _pause_lock:
        _was_enabled = gc.isenabled() if _pauses == 0 else _was_enabled
        gc.disable()
        _pauses += 1
    try:
        while _another_thread_collects():
            time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        with _pause_lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def _another_thread_collects() -> bool:
    """Say whether a collection is under way: Python runs one at a time, and skips one that is requested meanwhile."""
    collected: list[str] = []
    here = threading.get_ident()

    def note(phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            collected.append(phase)

    gc.callbacks.append(note)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(note)
    return not collected
