"""Order of samples: a seeded shuffle that does not need a table, and the loader's place in it.

Every rank computes the same order from three integers, whatever the mesh, so a run resumes in O(1) on another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

from jigsaw.errors import StateError, WindowError

_FEISTEL_ROUNDS = 6
_WORD_MASK = (1 << 64) - 1


def _mix_bits(x: int) -> int:
    """Mix bits by the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD_MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    return x ^ (x >> 31)


def shuffled_sample(position: int, count: int, seed: int, epoch: int) -> int:
    """Return the sample at `position` of a pseudo-random permutation of ``range(count)``, in O(1) time and memory.

    It is a Feistel network over the next even power of two, walked until it lands inside (Black and Rogaway, 2002).
    Unlike numpy's, it is the same in every version, and no rank holds a table of all samples.
    """
    # Ten samples take 4 bits, two halves of 2: a permutation of 0..15. Position 3 may lead to 12, which is not a
    # sample; 12 leads on to 7, which is one. As each number has one successor and one predecessor, no two positions end
    # alike.
    half = ((count - 1).bit_length() + 1) // 2 or 1
    mask = (1 << half) - 1
    keys = [_mix_bits(_mix_bits(_mix_bits(seed) ^ epoch) + r) for r in range(_FEISTEL_ROUNDS)]
    at = position
    while True:
        left, right = at >> half, at & mask
        for key in keys:
            left, right = right, left ^ (_mix_bits(right ^ key) & mask)
        at = (left << half) | right
        if at < count:
            return at


@dataclass(frozen=True)
class LoaderState:
    """Place of a loader: the `next_sample` in the order of an `epoch`."""

    seed: int
    epoch: int = 0
    next_sample: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], count: int) -> LoaderState:
        """Return the state in a dict that `as_dict` made, in a series of `count` samples.

        Raises: `StateError` for missing or foreign keys, values that are not integers, or a place beyond the series.
        """
        names = list(cls.__dataclass_fields__)
        # a checkpoint may hold anything
        if not isinstance(state, Mapping) or sorted(map(str, state)) != sorted(names):
            shown = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(
                f"a loader's state has the keys {names}, but got {shown}; save what loader.state_dict() returns"
            )
        values = {name: state[name] for name in names}
        wrong = [f"{n}={v!r}" for n, v in values.items() if not _is_count(v)]
        if wrong:
            raise StateError(
                f"a loader's state holds integers >= 0, but got {', '.join(wrong)}; the checkpoint is torn"
            )
        values = {name: index(v) for name, v in values.items()}
        if values["next_sample"] > count:
            raise StateError(
                f"state says next_sample={values['next_sample']}, but the dataset has {count} samples; "
                "open it with the fields, offsets and time that the state was saved with"
            )
        return cls(**values)


def _is_count(value: Any) -> bool:
    """Say whether a value is a whole number >= 0 of any kind that a checkpoint may return."""
    try:
        return not isinstance(value, bool) and index(value) >= 0
    except TypeError:
        return False


@dataclass(frozen=True)
class SampleOrder:
    """The batches of one epoch: `count` samples, `batch_size` at a time over the whole mesh."""

    count: int
    batch_size: int
    shuffle: bool
    drop_last: bool

    @property
    def usable(self) -> int:
        return self.count - self.count % self.batch_size if self.drop_last else self.count

    def settled(self, state: LoaderState) -> LoaderState:
        """Return the same place, with the end of an epoch as the beginning of the next."""
        # not `usable`: a place that another batch size led to, on another mesh, may leave more whole batches
        left = self.count - state.next_sample
        done = left <= 0 or (self.drop_last and left < self.batch_size)
        return LoaderState(state.seed, state.epoch + 1, 0) if done else state

    def batches(self, state: LoaderState) -> Iterator[tuple[tuple[int, ...], LoaderState]]:
        """Yield the samples of each batch left in the epoch, and the state once it was handed out."""
        state = self.settled(state)
        epoch = state.epoch
        while state.epoch == epoch:
            first = state.next_sample
            stop = min(first + self.batch_size, self.count)
            samples = tuple(self.sample(i, state) for i in range(first, stop))
            # with the last batch comes the beginning of the next epoch: a checkpoint there names a batch that exists
            state = self.settled(LoaderState(state.seed, epoch, stop))
            yield samples, state

    def sample(self, position: int, state: LoaderState) -> int:
        return shuffled_sample(position, self.count, state.seed, state.epoch) if self.shuffle else position


@dataclass(frozen=True)
class RolloutLengths:
    """Numbers of targets by epoch: pairs (first epoch, targets), or all targets without any."""

    lengths: tuple[tuple[int, int], ...]
    longest: int

    @classmethod
    def of(cls, rollout: Mapping[int, int] | int | None, targets: int) -> RolloutLengths:
        """Make it from ``{0: 1, 5: 4, 10: 12}``, or a number for all epochs; `targets` is how many exist.

        Raises: `WindowError` for a schedule that does not begin at epoch 0, or is outside of 1 to `targets`.
        """
        lengths: Mapping[Any, Any] = (
            {} if rollout is None else rollout if isinstance(rollout, Mapping) else {0: rollout}
        )
        wrong = [n for pair in lengths.items() for n in pair if not _is_count(n)]
        if wrong or (rollout is not None and 0 not in lengths):
            raise WindowError(f"rollout={rollout!r} must be targets by first epoch, from 0 on, like {{0: 1, 5: 4}}")
        over = [n for n in lengths.values() if not 1 <= n <= targets]
        if over:
            raise WindowError(
                f"rollout={rollout!r} asks for {over[0]} targets, but the dataset was opened with {targets}; "
                "open it with the targets of the longest rollout"
            )
        return cls(tuple(sorted((index(e), index(n)) for e, n in lengths.items())), targets)

    def at(self, epoch: int) -> int:
        return next((n for first, n in reversed(self.lengths) if first <= epoch), self.longest)
