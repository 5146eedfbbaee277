"""Memory for samples: aligned, used again, and no more of it than is in use."""

import threading

import numpy as np
import pytest

from jigsaw.errors import ReadError
from jigsaw.io.chunks.files import fresh_memory
from jigsaw.io.reading import arena as _memory
from jigsaw.io.reading.arena import MemoryPool

F4 = np.dtype("f4")


def counted(memory):
    """How often memory was made, as a list that grows."""
    made, make = [], memory._fresh
    memory._fresh = lambda size: made.append(size) or make(size)
    return made


@pytest.mark.parametrize("size", [0, 1, 63, 64, 4097, 1 << 20])
def test_fresh_memory_begins_at_a_cache_line(size):
    room = fresh_memory(size)
    assert room.shape == (size,) and room.dtype == np.uint8
    assert size == 0 or room.ctypes.data % 64 == 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(ReadError, match="no memory for"):
        fresh_memory(1 << 62)


def test_memory_comes_back_with_the_last_view_of_an_array():
    memory = MemoryPool()
    made = counted(memory)
    first = memory.empty((3, 5), F4)
    where, view = first.ctypes.data, first[1:]
    del first
    second = memory.empty((3, 5), F4)
    assert second.ctypes.data != where
    del view
    assert memory.empty((5, 3), F4).ctypes.data == where, "the size counts, not the shape"
    assert len(made) == 2
    assert memory.empty((0, 5), F4).size == 0 and len(made) == 2


def test_no_more_lies_idle_than_is_kept():
    memory = MemoryPool(kept=2)
    arrays = [memory.empty((8,), F4) for _ in range(5)]
    del arrays
    made = counted(memory)
    _again = [memory.empty((8,), F4) for _ in range(3)]
    assert len(made) == 1


def test_memory_of_another_size_makes_room():
    memory = MemoryPool(kept=2)
    large = [memory.empty((1000,), F4) for _ in range(2)]
    del large
    small = memory.empty((8,), F4)
    assert len(memory._idle) == 1, "what is in use and what lies idle are two pieces"
    made = counted(memory)
    assert memory.empty((1000,), F4) is not None and not made
    assert small.shape == (8,)


def test_a_piece_that_is_about_to_come_back_is_waited_for(monkeypatch):
    """A loop lets go of its last batch only once it has the next one, while another is read ahead."""
    monkeypatch.setattr(_memory, "_PATIENCE_S", 60.0)
    memory = MemoryPool(kept=1)
    made = counted(memory)
    held = [memory.empty((8,), F4)]
    where = held[0].ctypes.data
    threading.Timer(0.005, held.clear).start()
    assert memory.empty((8,), F4).ctypes.data == where
    assert len(made) == 1


def test_who_holds_many_waits_a_few_times_at_most():
    memory = MemoryPool(kept=1)
    held = [memory.empty((8,), F4) for _ in range(100)]
    assert len({each.ctypes.data for each in held}) == 100
    assert memory._most == 128, "seven waits"
