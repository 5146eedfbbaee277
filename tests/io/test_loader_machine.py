"""A loader under random steps, saves, kills and returns, on one mesh after the other: each sample is seen once."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
from globe_store import stacked
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

SEED, COUNT = 3, 9
MESHES = [{"data": 4}, {"data": 2, "lat": 2}, {"lat": 2, "lon": 2}, {"lon": 4}]


def opened(path, axes):
    return jigsaw.io.open(path, mesh=world_mesh(**axes), fields=["t2m"], targets=[1], halo=1)


class LoaderRun(RuleBasedStateMachine):
    """A training run of four ranks, each of which draws the same steps; `place` is the epoch and the next sample."""

    path: str
    orders: list[list[int]]
    values: np.ndarray

    def __init__(self):
        super().__init__()
        self.loader = self.batches = self.saved = None
        self.place, self.resumed = (0, 0), False

    def teardown(self):
        if self.loader is not None:
            self.batches = None
            self.loader.close()

    def _settled(self, epoch, position):
        return (epoch + 1, 0) if position >= COUNT else (epoch, position)

    @rule(
        axes=st.sampled_from(MESHES),
        batch_size=st.integers(1, 4),
        ahead=st.sampled_from([None, 0]),
        cache_bytes=st.sampled_from([0, 1 << 20]),
        in_order=st.booleans(),
    )
    def is_killed_and_begins_again(self, axes, batch_size, ahead, cache_bytes, in_order):
        """On another mesh, with another batch size, from what was saved last."""
        if self.loader is not None and in_order:
            self.loader.close()
        self.loader = self.batches = None
        gc.collect()
        how = {"shuffle": True, "seed": SEED, "prefetch_bytes": ahead, "cache_bytes": cache_bytes}
        self.loader = jigsaw.io.DataLoader(opened(self.path, axes), batch_size, **how)
        self.batch_size, self.place, self.resumed = batch_size, (0, 0), False
        if self.saved is not None:
            self.go_back()

    @precondition(lambda self: self.loader is not None)
    @rule()
    def save(self):
        self.saved = json.dumps(self.loader.state_dict()), self.place

    @precondition(lambda self: self.loader is not None and self.saved is not None)
    @rule()
    def go_back(self):
        self.loader.load_state_dict(json.loads(self.saved[0]))
        self.batches, self.place, self.resumed = None, self._settled(*self.saved[1]), True

    @precondition(lambda self: self.batches is not None)
    @rule()
    def leave(self):
        self.batches = None

    @precondition(lambda self: self.loader is not None)
    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self._step()

    def _step(self):
        if self.batches is None:
            if self.place[1] and not self.resumed:  # an iteration that was left ended its epoch
                self.place = self.place[0] + 1, 0
            self.batches, self.resumed, self.going = iter(self.loader), False, self.place[0]
        epoch, position = self.place
        batch = next(self.batches, None)
        if epoch != self.going:  # the one before was the last of its epoch
            assert batch is None
            self.batches = None
            return
        expected = self.orders[epoch][position : position + self.batch_size]
        assert list(batch.samples) == expected
        self.place = self._settled(epoch, position + self.batch_size)
        for tile, steps in ((batch.input, 0), (batch.target, 1)):
            rows = self.values[np.array(expected) + steps][:, None]
            np.testing.assert_allclose(tile.full_tensor().numpy(), rows, rtol=1e-6)

    @invariant()
    def the_state_is_the_place(self):
        if self.loader is not None:
            epoch, position = self.place
            within = {"samples": COUNT} if position else {}
            state = {name: value for name, value in self.loader.state_dict().items() if name != "order"}
            assert state == {"seed": SEED, "epoch": epoch, "next_sample": position} | within


def drive(path, orders, values, examples):
    """One rank's part: without a database, a time limit or a search for shorter failures all ranks draw the same."""
    made = type("LoaderRunOfPath", (LoaderRun,), {"path": path, "orders": orders, "values": values})
    how = {"phases": (Phase.generate,), "deadline": None, "derandomize": True, "database": None}
    how |= {"suppress_health_check": list(HealthCheck), "max_examples": examples, "stateful_step_count": 14}
    run_state_machine_as_test(made, settings=settings(**how))


LONG = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("examples", [pytest.param(3, marks=pytest.mark.slow), pytest.param(100, marks=LONG)])
def test_a_run_that_is_killed_anywhere_sees_each_sample_once(wb2, examples):
    loader = jigsaw.io.DataLoader(opened(wb2, {"lat": 1}), shuffle=True, seed=SEED)
    orders = [[batch.samples[0] for batch in loader] for _ in range(40)]
    assert all(sorted(order) == list(range(COUNT)) for order in orders) and orders[0] != orders[1]
    values = stacked(wb2, ["2m_temperature"])
    run_on_ranks(4, drive, wb2, orders, values, examples, timeout=30.0 * examples)
