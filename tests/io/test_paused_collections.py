"""Python collects no garbage while a lock is held that garbage takes."""

import gc
import threading

import pytest

from jigsaw.io.formats.hdf5_index import paused_collections


@pytest.fixture(autouse=True)
def collections_on_afterwards():
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
def test_collections_are_as_they_were_afterwards(before):
    gc.enable() if before else gc.disable()
    with pytest.raises(KeyError), paused_collections():
        with paused_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == before


def test_the_last_of_several_threads_turns_them_on():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with paused_collections():
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=other)
    with paused_collections():
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled()
    leave.set()
    thread.join(30)
    assert gc.isenabled()


def test_a_collection_that_is_under_way_ends_first():
    collecting, end, steps = threading.Event(), threading.Event(), []

    class Finalized:
        def __del__(self):
            collecting.set()
            assert end.wait(30)
            steps.append("collected")

    def collect():
        gc.collect()

    ring = [Finalized()]
    ring.append(ring)
    del ring
    thread = threading.Thread(target=collect)
    thread.start()
    assert collecting.wait(30)
    threading.Timer(0.3, end.set).start()
    with paused_collections():
        steps.append("entered")
    thread.join(30)
    assert steps == ["collected", "entered"]
