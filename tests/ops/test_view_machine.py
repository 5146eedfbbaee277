"""A tile under views and writes in place, on real ranks that take the same steps: each live value is plain torch's."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

MOST_LIVE = 5
NUMBERS = st.integers(0, 11)

VIEWS = {
    "slice": lambda x, d, i, j: x.narrow(d, i % (x.shape[d] + 1), j % (x.shape[d] - i % (x.shape[d] + 1) + 1)),
    "item": lambda x, d, i, j: x.select(d, i % x.shape[d]),
    "steps": lambda x, d, i, j: x[(slice(None),) * d + (slice(i % 2, None, 2),)],
    "transpose": lambda x, d, i, j: x.transpose(d, j % x.ndim),
    "movedim": lambda x, d, i, j: x.movedim(d, j % x.ndim),
    "flat": lambda x, d, i, j: x.view(-1),
    "flatten": lambda x, d, i, j: x.flatten(min(d, j % x.ndim), max(d, j % x.ndim)),
    "unflatten": lambda x, d, i, j: x.unflatten(d, (2, -1)),
    "reshape": lambda x, d, i, j: x.reshape(-1, x.shape[d]),
    "unbind": lambda x, d, i, j: x.unbind(d)[i % x.shape[d]],
    "chunk": lambda x, d, i, j: x.chunk(2, d)[-1],
    "split": lambda x, d, i, j: x.split(1 + i % 3, d)[0],
    "squeeze": lambda x, d, i, j: x.squeeze(),
    "unsqueeze": lambda x, d, i, j: x.unsqueeze(d),
    "diagonal": lambda x, d, i, j: x.diagonal(),
    "detach": lambda x, d, i, j: x.detach(),
    "unfold": lambda x, d, i, j: x.unfold(d, 2, 2),
    "expand_as": lambda x, d, i, j: x.expand_as(x),
    "row": lambda x, d, i, j: x[i % x.shape[0]],
    "contiguous": lambda x, d, i, j: x.contiguous(),
}
WRITES = {
    "mul_": lambda x, d, i, j: x.mul_(-2),
    "add_": lambda x, d, i, j: x.add_(i),
    "fill_": lambda x, d, i, j: x.fill_(j),
    "+=": lambda x, d, i, j: operator.iadd(x, 1),
    "zero_ of a row": lambda x, d, i, j: x.select(d, i % x.shape[d]).zero_(),
    "item": lambda x, d, i, j: x.__setitem__(i % x.shape[0], float(j)),
    "slice": lambda x, d, i, j: x.__setitem__((slice(None),) * d + (slice(i % 3, None),), float(j)),
    "clamp_": lambda x, d, i, j: x.clamp_(min=i - 5),
    "copy_": lambda x, d, i, j: x.copy_(torch.arange(float(x.shape[-1]), dtype=x.dtype) + i),
    "add_ of itself": lambda x, d, i, j: x.add_(x),
    "mask": lambda x, d, i, j: x.__setitem__(x > j, float(i)),
    "index_fill_": lambda x, d, i, j: x.index_fill_(d, torch.tensor([i % x.shape[d]]), float(j)),
}


class TileUnderWrites(RuleBasedStateMachine):
    """The values that are alive, as tiles and as plain tensors; `place` is where the ranks are."""

    axes: tuple[tuple[str, int], ...] = ()

    @initialize(
        shape=st.lists(st.integers(1, 7), min_size=1, max_size=3), places=st.tuples(NUMBERS, NUMBERS), cut=NUMBERS
    )
    def begin(self, shape, places, cut):
        self.mesh = world_mesh(**dict(self.axes))
        whole = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
        spec = [()] * len(shape)
        for (axis, _), place in zip(self.axes, places, strict=False):
            spec[place % len(shape)] += (axis,)
        split = {d: (0, cut % (shape[d] + 1), shape[d]) for d, names in enumerate(spec) if len(names) == 1}
        tile = shard(whole, self.mesh, [names or None for names in spec], split=split)
        self.live = [(tile, whole.clone())]

    def _alike(self, said):
        """Fail on every rank where any rank has something to say, or where they say different things."""
        heard = comm.all_gather_object(self.mesh, said)
        assert all(text == heard[0] for text in heard), heard
        return heard[0]

    def _answer(self, call):
        """What tiles answer; None for a typed refusal, alike on all ranks."""
        answer, said = None, "answered"
        try:
            answer = call()
        except ShardingError:
            said = "refused"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        said = self._alike(said)
        assert said in ("answered", "refused"), said
        return answer

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(at=NUMBERS, kind=st.sampled_from(sorted(VIEWS)), d=NUMBERS, i=NUMBERS, j=NUMBERS)
    def view(self, at, kind, d, i, j):
        tile, whole = self.live[at % len(self.live)]
        d = d % max(whole.ndim, 1)
        try:
            expected = VIEWS[kind](whole, d, i, j)
        except (RuntimeError, IndexError, ZeroDivisionError, ValueError):  # torch has no such view
            return
        answer = self._answer(lambda: VIEWS[kind](tile, d, i, j))
        if answer is not None:
            self.live.append((answer, expected))
        self._check()

    @rule(at=NUMBERS, kind=st.sampled_from(sorted(WRITES)), d=NUMBERS, i=NUMBERS, j=NUMBERS)
    def write(self, at, kind, d, i, j):
        tile, whole = self.live[at % len(self.live)]
        d = d % max(whole.ndim, 1)
        try:
            WRITES[kind](whole.clone(), d, i, j)
        except (RuntimeError, IndexError, ZeroDivisionError):
            return
        if self._answer(lambda: (WRITES[kind](tile, d, i, j), True)) is not None:
            WRITES[kind](whole, d, i, j)
        self._check()

    @precondition(lambda self: len(self.live) > 1)
    @rule(at=NUMBERS)
    def forget(self, at):
        del self.live[at % len(self.live)]

    def _check(self):
        """Every value, whole, is plain torch's."""
        for tile, whole in self.live:
            found = self._answer(tile.full_tensor if isinstance(tile, Tile) else tile.clone)
            if found is not None:
                assert found.shape == whole.shape
                said = "" if torch.equal(found, whole) else f"{found.tolist()}, not {whole.tolist()}"
                said = "; ".join(filter(None, comm.all_gather_object(self.mesh, said)))
                assert not said, said


def _run(examples, steps=10, **axes):
    machine = type("TileUnderWrites", (TileUnderWrites,), {"axes": tuple(axes.items())})
    alike = settings(  # without a database and without shrinking, so that all ranks take the same steps
        max_examples=examples, stateful_step_count=steps, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=alike)


@on_ranks(2)
def test_views_and_writes_on_two_ranks():
    _run(40, lat=2)


@pytest.mark.slow
@on_ranks(2, timeout=600)
def test_more_views_and_writes_on_two_ranks():
    _run(150, steps=14, lat=2)


@pytest.mark.slow
@pytest.mark.nightly
@on_ranks(2, timeout=600)
def test_many_views_and_writes_on_two_ranks():
    _run(600, steps=14, lat=2)


@pytest.mark.slow
@pytest.mark.nightly
@on_ranks(4, timeout=600)
def test_many_views_and_writes_on_two_axes():
    _run(300, steps=12, lat=2, lon=2)
