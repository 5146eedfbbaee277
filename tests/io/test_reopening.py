"""A process that opens, reads and closes again and again keeps nothing of it."""

import gc
import itertools
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


CASES = [("v3", 1), ("sharded", 2)]
CASES += [
    pytest.param(store, ranks, marks=pytest.mark.nightly)
    for store, ranks in itertools.product(("v2", "v3", "sharded"), (1, 2))
    if (store, ranks) not in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize(("tiled", "ranks"), CASES, indirect=["tiled"])
def test_reopening_keeps_nothing(tiled, ranks):
    for found in run_on_ranks(ranks, counted, tiled, ranks):
        objects, descriptors, threads = zip(*found, strict=True)
        # The first rounds fill caches of what all rounds share, and a round may end with some twenty objects that go a
        # little later, so the least of five rounds is compared. What is kept in each round adds to both steps; what is
        # made once, in whichever round, adds to one.
        early, middle, late = (min(objects[at : at + 5]) for at in (5, 10, 15))
        assert min(middle - early, late - middle) < 5, objects
        # a thread of a busy machine may end a little after its round, and its descriptors with it
        assert min(descriptors[-5:]) <= min(descriptors[2:7]), descriptors
        assert min(threads[-5:]) <= min(threads[2:7]), threads
