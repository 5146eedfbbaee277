"""The memory that ranks of a machine share, by itself: what many threads of a rank do with it at the same time."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jigsaw.io._arena import Arena, header_bytes
from jigsaw.io.errors import PeerError

THREADS = 8


@pytest.fixture
def other():
    """Another process, which ends with its input."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate()


@pytest.fixture
def arena(other):
    fd = os.memfd_create("jigsaw")
    os.truncate(fd, header_bytes(2))
    made = Arena(fd, 0, [0, 1], [os.getpid(), other.pid], 60.0, lambda: None)
    yield made
    made.close()


def test_many_threads_look_around_at_the_same_time(arena, other):
    """The threads that read, decode and take wait independently; each looks for ranks that died."""

    def look(_thread):
        for _ in range(2000):
            arena._look_around(1, 1, float("inf"))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(look, range(THREADS)))


def test_every_thread_sees_that_a_rank_died(arena, other):
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(arena.wait, lambda: False, 1) for _ in range(THREADS)]
        other.communicate(b"\n")
        for each in waiting:
            with pytest.raises(PeerError, match=rf"rank 1 of the domain group \(process {other.pid}\) has ended"):
                each.result()
