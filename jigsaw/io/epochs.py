"""`Epochs`: what every loader does: an order that resumes anywhere, read ahead in the background, epoch by epoch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Generic, TypeVar

from jigsaw.io.errors import FieldError
from jigsaw.io.order import Order, State
from jigsaw.io.prefetch import Prefetch

Block = TypeVar("Block")
Batched = TypeVar("Batched")

BATCHES_AHEAD = 2


@dataclass(frozen=True)
class Turn:
    """The samples of one batch, the place that they were drawn at, and the loader's place once it was handed out.

    `following` are the samples of the batch after it; none at the end of an epoch.
    """

    samples: tuple[int, ...]
    at: State
    after: State
    following: tuple[int, ...] = ()


class Epochs(ABC, Generic[Block, Batched]):
    """Batches of `count` samples: iterate it once for each epoch.

    A subclass says how a batch is read (in the background, in order) and what it becomes.

    Raises: `FieldError` for a batch size below 1, or larger than the dataset with `drop_last`.
    """

    def __init__(
        self, count: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool, ahead: int, alone: bool
    ) -> None:
        if batch_size < 1:
            raise FieldError(f"batch_size={batch_size} must be at least 1, the samples of a batch over the whole mesh")
        if drop_last and batch_size > count:
            raise FieldError(f"batch_size={batch_size} with drop_last leaves no batch of a dataset of {count} samples")
        self._order = Order(count, batch_size, shuffle, drop_last)
        self._state = State.from_dict(State(seed).as_dict(), count)
        self._resumed = False
        self._ahead, self._alone = ahead, alone
        self._current: Prefetch[Turn, tuple[Turn, Block]] | None = None
        self._waited_s = 0.0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return math.ceil(self._order.usable / self._order.batch_size)

    # -- what a subclass says ----------------------------------------------------------------------------------------

    @abstractmethod
    def _join(self) -> None:
        """Join the mesh before there are threads; once joined, do nothing."""

    @abstractmethod
    def _read(self, turn: Turn) -> Block:
        """Read a batch; in the background."""

    @abstractmethod
    def _batch(self, turn: Turn, block: Block) -> Batched:
        """Hand a batch out."""

    def _left(self) -> None:
        """What else ends with an iteration."""

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for data, over all iterations."""
        return self._waited_s + (self._current.waited_s if self._current else 0.0)

    def state_dict(self) -> dict[str, int]:
        """The seed, the epoch, and the next sample in its order that was not handed out: the same on every rank."""
        return self._state.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, on whatever mesh and batch size, in O(1); ends an iteration under way.

        Raises: `StateError` for a state that is torn or belongs to a longer dataset.
        """
        loaded = self._order.settled(State.from_dict(state, self._order.count))
        self._end_iteration()
        self._state = loaded
        self._resumed = True

    # -- iterating ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batched]:
        self._end_iteration()
        if self._state.next_sample and not self._resumed:
            self._state = State(self._state.seed, self._state.epoch + 1)
        self._resumed = False
        self._join()
        at = self._order.settled(self._state)
        current = self._current = Prefetch(
            lambda turn: (turn, self._read(turn)), self._turns(at), self._ahead, self._alone
        )
        try:
            for turn, block in current:
                self._state = turn.after
                yield self._batch(turn, block)
        finally:
            current.stop()

    def _turns(self, at: State) -> Iterator[Turn]:
        """The batches of the epoch that are left."""
        nothing: tuple[tuple[int, ...], State] = (), at
        for (samples, after), (following, _) in pairwise(chain(self._order.batches(at), [nothing])):
            yield Turn(samples, at, after, following)

    def _end_iteration(self) -> None:
        if self._current is not None:
            self._current.stop()
            self._current.join()
            self._left()
            self._waited_s += self._current.waited_s
            self._current = None


def batches_ahead(batch_bytes: int, budget: int | None) -> int:
    """How many batches may be ready before they are asked for."""
    return BATCHES_AHEAD if budget is None else budget // max(batch_bytes, 1)
