"""A time in which Python collects no garbage: while a library holds a lock that its objects take when they go."""

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
    """No thread begins to collect garbage inside by itself, and none is at it.

    h5py holds its lock while it reads a file that is far, and its objects take that lock when they go.  A thread that
    has a part in the answer (one of a pool, the loop of zarr's stores) and collects such an object would wait for the
    lock, and the read for that thread, for ever: h5py documents it of file-like objects (h5py #2019, #2021).  So this
    is entered before the lock is taken.
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
    """Whether a collection is under way: Python has one at a time, and leaves out one that is asked for meanwhile."""
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
