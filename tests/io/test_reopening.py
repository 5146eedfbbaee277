"""A process that opens, reads and closes again and again keeps nothing of it."""

import gc
import os
import threading

import pytest

from jigsaw.io import DataLoader
from jigsaw.io import open as open_dataset
from jigsaw.testing import run_on_ranks, world_mesh

ROUNDS = 20


def counted(path, ranks):
    """After each round the objects, descriptors and threads of this process."""
    found = []
    for _ in range(ROUNDS):
        ds = open_dataset(path, mesh=world_mesh(lat=ranks), fields=["t2m", "geopotential@500"])
        ds[0]
        with_steps = DataLoader(ds, batch_size=2)
        for _, _batch in zip(range(2), with_steps, strict=False):
            pass
        with_steps.close()
        del ds, with_steps, _batch
        gc.collect()
        found.append((len(gc.get_objects()), len(os.listdir("/proc/self/fd")), threading.active_count()))
    return found


CASES = [(store, ranks) for ranks in (1, 2) for store in ("v2", "v3", "sharded")]


@pytest.mark.slow
@pytest.mark.parametrize(("tiled", "ranks"), CASES, indirect=["tiled"])
def test_reopening_keeps_nothing(tiled, ranks):
    for found in run_on_ranks(ranks, counted, tiled, ranks):
        objects, descriptors, threads = zip(*found, strict=True)
        # the first rounds fill caches of what all rounds share; a round may end with some twenty objects that go a
        # little later, so the least of five rounds is compared
        assert min(objects[-5:]) - min(objects[5:10]) < ROUNDS - 10, objects
        # a thread of a busy machine may end a little after its round, and its descriptors with it
        assert min(descriptors[-5:]) <= min(descriptors[2:7]), descriptors
        assert min(threads[-5:]) <= min(threads[2:7]), threads
