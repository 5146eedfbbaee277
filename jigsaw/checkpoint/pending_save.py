"""A save in the background: what its ranks write while training continues, and how all of them learn the result.

On the main thread the ranks plan which rank writes which rows, and each copies its own.  Then a thread of each writes
its file, without messages.  The first rank gets the list of what each wrote, or its error.  It writes the index, gives
the checkpoint its name only if all have written, and tells the others the result.  The threads use a gloo group of
their own: on a group of the training their messages would mix with others, differently on each rank.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from jigsaw.errors import CheckpointError
from jigsaw.ranks.job_groups import host_group
from jigsaw.ranks.mesh import job_patience
from jigsaw.ranks.model_world import job_size

SaveWork = Callable[[dist.ProcessGroup | None], None]


class PendingSave:
    """A checkpoint that a thread writes; `jigsaw.save(..., wait=False)` gives it.

    The program may end meanwhile: Python waits for the thread.  Its process group may not: call `wait()` before
    `dist.destroy_process_group()`.

    >>> model = torch.nn.Linear(4, 2)
    >>> pending = jigsaw.save("at-100", model=model, wait=False)
    >>> for p in model.parameters():  # training goes on
    ...     _ = torch.nn.init.zeros_(p)
    >>> pending.wait()
    >>> jigsaw.load("at-100", model=model)
    >>> bool(model.weight.any())
    True
    """

    def __init__(self, path: Path, work: SaveWork) -> None:
        self.path = path
        self._work, self._failure, self._is_told = work, None, False
        self._group = host_group("saves", job_patience()) if job_size() > 1 else None
        self._thread = threading.Thread(target=self._run, name=f"jigsaw.save {path.name}")
        self._thread.start()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere all threads of a process have one priority
            # lowest priority: a step must not wait for a save, which has time until the next save
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            self._work(self._group)
        except BaseException as e:  # kept, and raised by `wait`
            self._failure = e
        del self._work  # drop the function, and with it the copies

    def done(self) -> bool:
        """Say whether the save has ended, with success or not, on this rank."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return once the checkpoint is whole.  Every rank calls this.

        *Raises*: `CheckpointError` on every rank, where the save has failed on any.
        """
        self._thread.join()
        self._is_told = True
        if self._failure is not None:
            raise CheckpointError(f"the save of {self.path} in the background failed: {self._failure}") from (
                self._failure
            )

    def wait_unless_told(self) -> None:
        """Do `wait()`, without an error that was raised before."""
        if self._is_told:
            self._thread.join()
        else:
            self.wait()


_last: list[PendingSave] = []


def begin_save(path: Path, work: SaveWork) -> PendingSave:
    """Start a save in the background; the one before has ended by then."""
    _last[:] = [PendingSave(path, work)]
    return _last[0]


def end_pending_save() -> None:
    """Wait for the save that is under way, if any.

    *Raises*: `CheckpointError` on every rank, where it has failed and has not raised yet.
    """
    if _last:
        _last.pop().wait_unless_told()
