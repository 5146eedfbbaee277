"""`MeshSamples`: the base of every dataset: samples by their number, cut by a mesh that it belongs to or joins.

Their order is a seeded shuffle that does not need a table: every rank computes it, and a loader's place in it, from
three integers, whatever the mesh, so a run resumes in O(1) on another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from operator import index
from typing import Any, Self, TypeAlias, cast
from zlib import crc32

import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import data

from jigsaw.comm.agreement import told_where_different
from jigsaw.errors import FieldError, ReadError, ShardingError, StateError, WindowError
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.layout import AxisSizes
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.reading.engine import ReadEngine, StoreIdentity, check_same_store
from jigsaw.io.series.request import SampleSpace
from jigsaw.io.series.times import is_whole_number
from jigsaw.ranks.mesh import axes_of_mesh, init_mesh
from jigsaw.tile.misuse import warn_once
from jigsaw.tile.tile import Tile

# dtypes of the arrays that are read; bfloat16 is rounded from float32 as a torch tensor
FLOAT_DTYPES = {"float16": "float16", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
TileIfAny: TypeAlias = Tile | Any
"""Tile where there is one, else None: callers know which, and need not tell a type checker again."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def numpy_dtype_name(dtype: torch.dtype) -> str:
    """Return the numpy dtype in which values are read for a tile of a torch dtype."""
    return FLOAT_DTYPES[dtype_name(dtype)]


def checked_dtype(argument: str, dtype: str | torch.dtype, known: Collection[str] = FLOAT_DTYPES) -> torch.dtype:
    """Return the torch dtype of an argument. Raises: `FieldError` for a dtype that is not `known`."""
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in known:
        raise FieldError(f"{argument}={dtype!r} must be one of {sorted(known)}")
    return getattr(torch, name)


class TileRecord:
    """Dataclass of tiles and facts about them, which `to` moves to another device."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same with its tiles on another device, or of another dtype, as `torch.Tensor.to` takes it."""
        held = ((f.name, getattr(self, f.name)) for f in dataclass_fields(cast(Any, self)))
        moved = {name: value.to(*args, **kwargs) for name, value in held if isinstance(value, Tile)}
        return replace(cast(Any, self), **moved)


@dataclass(frozen=True, eq=False)
class MeshSamples(ABC, data.Dataset[Any]):
    """Samples that the ranks of `mesh` read together, cut as `frame` says; torch's loader takes them, too.

    It pickles as its description, without its mesh: unpickled in another process, it joins one of the same axes on the
    same `device` when it first reads. Opened with integers for a mesh, it lacks a `device`, and only plans.
    """

    mesh: DeviceMesh | None
    device: str | None
    frame: SampleSpace

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: None if f.name == "mesh" else getattr(self, f.name) for f in dataclass_fields(self)}

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def store(self) -> ArrayStore:
        """The opened store."""

    @property
    def is_appended_to(self) -> bool:
        """True where the samples that a store gains come after those that it had, as in a series of one member."""
        return False

    @abstractmethod
    def marks_of_samples(self, count: int) -> bytes:
        """Return bytes that tell the first `count` samples from others, and stay the same where the store moves or
        grows.
        """

    @abstractmethod
    def sample_bytes(self) -> int:
        """Return the most bytes that any rank holds of one sample."""

    @abstractmethod
    def identity(self) -> StoreIdentity:
        """Return what this rank sees of what it reads, which all ranks must see alike."""

    def check_same_everywhere(self) -> None:
        """Compare what all ranks opened.  Ranks that share samples compare it again when they first read.

        *Sends*: with an axis `data`, less than a kilobyte to every rank of the mesh.
        *Raises*: `PeerError` for different stores, `ReadError` where one cannot be looked at; alike on every rank.
        """
        mesh = self.device_mesh()
        if dict(self.frame.axes).get(DATA_AXIS, 1) > 1:
            identity = self.identity()
            check_same_store(told_where_different("reading", mesh, identity) or [identity])

    @property
    def is_live(self) -> bool:
        """True once it has joined a mesh in this process; an unpickled dataset joins when it first reads."""
        return self.mesh is not None or self.device is None

    def device_mesh(self) -> DeviceMesh:
        """Return the mesh; for an unpickled dataset it is made now, over all ranks.

        Raises: `ReadError` when the dataset was opened with integers for a mesh.
        """
        if self.device is None:
            raise ReadError(
                "this dataset was opened with a mesh of plain integers, so it can plan, not read; pass a DeviceMesh"
            )
        return self._joined if self.mesh is None else self.mesh

    @cached_property
    def _joined(self) -> DeviceMesh:
        return init_mesh(device=self.device, **dict(self.frame.axes))

    @property
    def mesh_so_far(self) -> DeviceMesh | None:
        """The mesh that it was made on or has joined, if any."""
        return vars(self).get("_joined", self.mesh)

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other attributes, on the mesh that this one has joined."""
        return replace(self, **({"mesh": self.mesh_so_far} | fields))

    def new_engine(self, threads: int | None = None) -> ReadEngine:
        """Make a reader of plans with its own process groups; this is collective over the mesh.

        Raises: `ReadError` where a store cannot be opened, on every rank that reads with this one.
        """
        mesh, store, failure = self.device_mesh(), empty_store("a store"), None
        try:
            store = self.store
        except ReadError as error:
            failure = error
        # the other ranks wait for this one, whose `identity` tells them of the failure
        engine = ReadEngine(store, mesh, threads, apart=(DATA_AXIS,), identity=self.identity)
        if failure is not None:
            engine.close()
            raise failure
        return engine

    @cached_property
    def _engine(self) -> ReadEngine:
        return self.new_engine()

    def _index(self, sample: int) -> int:
        try:
            at = index(sample)
        except TypeError:
            raise TypeError(
                f"sample {sample!r} of a dataset must be an integer; a DataLoader reads several at a time"
            ) from None
        if not -len(self) <= at < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        return at % len(self)


def empty_store(name: str) -> ArrayStore:
    """Return a store without arrays."""

    def refuse(array: str) -> NDArray[Any]:
        raise ReadError(f"{name} has no array {array!r}")

    return ArrayStore(name, {}, {}, refuse)


def mesh_and_axes(mesh: DeviceMesh | Mapping[str, int]) -> tuple[DeviceMesh | None, str | None, AxisSizes]:
    """Return the mesh, its device and its axes; only axes where it was given as integers.

    Raises: `ShardingError` for anything but a mesh, and for sizes below 1.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh, mesh.device_type, axes_of_mesh(mesh)
    if not isinstance(mesh, Mapping):
        raise ShardingError(
            f"mesh={mesh!r} is not a mesh; give jigsaw.init_mesh(lat=2), or sizes by axis to plan without ranks: "
            "{'lat': 2}"
        )
    if not all(isinstance(name, str) and is_whole_number(size) and size >= 1 for name, size in mesh.items()):
        raise ShardingError(f"mesh={dict(mesh)} must have axes of at least one rank each, as whole numbers by name")
    return None, None, tuple(mesh.items())


def warn_of_idle_readers(axes: AxisSizes, dims: Sequence[str]) -> None:
    """Warn once of mesh axes that, without a `spec`, cut none of these dims: their ranks read and hold the same."""
    idle = {name: size for name, size in axes if size > 1 and name not in (DATA_AXIS, *dims)}
    if idle:
        name = next(iter(idle))
        warn_once(
            f"axes {idle} of {dims}",
            f"the mesh axes {idle} cut none of the dims {', '.join(dims)}, so their ranks all read and hold the same; "
            f"say what they cut, like spec={{{dims[0]!r}: {name!r}}}, or give a spec without them if they cut weights",
        )


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
    """Place of a loader: the `next_sample` in the order of an `epoch`.

    `samples` is how many the epoch began with, which a store that grows meanwhile does not change; 0 at its beginning.
    `order` tells its order from those of other samples, and with or without `shuffle`; 0 where it is not known.
    """

    seed: int
    epoch: int = 0
    next_sample: int = 0
    samples: int = 0
    order: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the place as integers by name; `samples` and `order` only within an epoch."""
        state = asdict(self)
        left_out = {"order": not (self.next_sample and self.order), "samples": not self.next_sample}
        return {name: value for name, value in state.items() if not left_out.get(name)}

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], count: int, appended: bool = False, mark: Callable[[int], int] | None = None
    ) -> LoaderState:
        """Return the state in a dict that `as_dict` made, for a dataset of `count` samples.

        `appended` says that samples which the dataset had not when the epoch began come after those that it had. `mark`
        is `SampleOrder.mark` of the dataset.

        Raises: `StateError` for missing or foreign keys, and values that are not integers. Also for a place beyond the
        samples, or a dataset that is not that of the epoch.
        """
        names = [*cls.__dataclass_fields__]
        # a checkpoint may hold anything
        keys = set(map(str, state)) if isinstance(state, Mapping) else set[str]()
        if keys | {"samples", "order"} != set(names):
            shown = sorted(keys) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(
                f"a loader's state has the keys {names}, the last two within an epoch, but got {shown}; save what "
                "loader.state_dict() returns"
            )
        values = {name: state[name] for name in names if name in keys}
        wrong = [f"{n}={v!r}" for n, v in values.items() if not _is_count(v)]
        if wrong:
            raise StateError(
                f"a loader's state holds integers >= 0, but got {', '.join(wrong)}; the checkpoint is torn"
            )
        place = cls(**{name: index(v) for name, v in values.items()})
        if place.next_sample == 0:
            return replace(place, samples=0, order=0)
        if place.next_sample > place.samples:
            raise StateError(
                f"state says next_sample={place.next_sample} in an epoch of samples={place.samples}; save what "
                "loader.state_dict() returns"
            )
        if place.samples != count and not (appended and place.samples < count):
            raise StateError(
                f"state is within an epoch of samples={place.samples}, but the dataset has {count} samples, in another "
                "order; open it with the fields, offsets and time that the state was saved with, or begin the next "
                f"epoch by {cls(place.seed, place.epoch + 1).as_dict()}"
            )
        order = place.order if mark is None or not place.order else mark(place.samples)
        if place.order != order:
            raise StateError(
                f"state is within an epoch of order={place.order}, and this loader's is {order}: its first "
                f"{place.samples} samples are of other times or volumes, or shuffle= differs; make it as the state was "
                f"saved, or begin the next epoch by {cls(place.seed, place.epoch + 1).as_dict()}"
            )
        return place


def _is_count(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and index(value) >= 0
    except TypeError:
        return False


def _no_marks(count: int) -> bytes:
    return b""


@dataclass(frozen=True)
class SampleOrder:
    """The batches of one epoch: `count` samples, `batch_size` at a time over the whole mesh."""

    count: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    marks_of_samples: Callable[[int], bytes] = _no_marks

    def mark(self, count: int) -> int:
        """Return an integer that tells this order of the first `count` samples from that of others, or without
        `shuffle`.
        """
        return crc32(self.marks_of_samples(count), int(bool(self.shuffle))) or 1

    @property
    def usable(self) -> int:
        return self.count - self.count % self.batch_size if self.drop_last else self.count

    def settled(self, state: LoaderState) -> LoaderState:
        """Return the same place, with the end of an epoch as the beginning of the next."""
        # not `usable`: after another batch size, as on another mesh, more whole batches may be left
        left = self._samples(state) - state.next_sample
        done = left <= 0 or (self.drop_last and left < self.batch_size)
        return LoaderState(state.seed, state.epoch + 1, 0) if done else state

    def batches(self, state: LoaderState) -> Iterator[tuple[tuple[int, ...], LoaderState]]:
        """Yield the samples of each batch left in the epoch, and the state once it was handed out."""
        state = self.settled(state)
        epoch, count = state.epoch, self._samples(state)
        mark = self.mark(count)
        while state.epoch == epoch:
            first = state.next_sample
            stop = min(first + self.batch_size, count)
            samples = tuple(self.sample(i, state) for i in range(first, stop))
            # after the last batch the state is the start of the next epoch, so a checkpoint always names a batch that
            # exists
            state = self.settled(LoaderState(state.seed, epoch, stop, count, mark))
            yield samples, state

    def sample(self, position: int, state: LoaderState) -> int:
        count = self._samples(state)
        return shuffled_sample(position, count, state.seed, state.epoch) if self.shuffle else position

    def _samples(self, state: LoaderState) -> int:
        return state.samples if state.next_sample else self.count


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
