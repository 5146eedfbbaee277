"""Guard of what belongs to the process that made it: threads, sockets and shared memory do not outlive a fork."""

from __future__ import annotations

import os

from jigsaw.errors import ForkedError


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
