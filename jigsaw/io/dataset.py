"""`Dataset`: the samples of a store, their layouts and read plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.io import survey
from jigsaw.io.engine import Engine
from jigsaw.io.errors import ReadError
from jigsaw.io.fields import Channel
from jigsaw.io.frame import DATA, Frame
from jigsaw.io.plan import ReadPlan, plan_read
from jigsaw.io.request import Request
from jigsaw.io.survey import Variable
from jigsaw.io.table import Store
from jigsaw.layout import Layout
from jigsaw.mesh import coordinate
from jigsaw.tile import Tile

# numpy reads into these; bfloat16 is rounded from float32 once it is a torch tensor
DTYPES = {"float16": "float16", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Sample:
    r"""One sample: `input` and `target` tiles [T, C, \*space] (None without targets), and the times of their steps."""

    input: Tile
    target: Tile | None
    index: int
    input_times: NDArray[Any]
    target_times: NDArray[Any]


@dataclass(frozen=True)
class Reading:
    """What is read for some samples: each step once, and where a sample's steps lie in the block that comes back."""

    request: Request
    steps: tuple[int, ...]
    input_at: NDArray[np.int64]
    target_at: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of a store, cut by a mesh; made by `jigsaw.io.open`.

    ``len(ds)`` samples; ``ds[i]`` reads one (every rank of the mesh must ask for it, in the same order), a
    `jigsaw.io.DataLoader` reads batches in the background.
    """

    store: Store
    mesh: DeviceMesh | None
    frame: Frame
    channels: tuple[Channel, ...]
    variables: tuple[Variable, ...]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    anchors: NDArray[np.int64]
    times: NDArray[Any]
    whole_coords: Mapping[str, NDArray[Any]]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    dtype: torch.dtype
    nan: str | float
    mode: str
    select: Mapping[str, int]
    flipped: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.anchors)

    def __repr__(self) -> str:
        cut = ", ".join(f"{d} {n}" for d, n in zip(self.frame.dims, self.frame.sizes, strict=True))
        return f"Dataset({self.store.url}: {len(self)} samples, {len(self.channels)} channels, {cut}; {self.layout})"

    # -- shapes -------------------------------------------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        r"""The layout of a sample's input [T, C, \*space], halo included."""
        return self.frame.layout((len(self.inputs), len(self.channels)), (None, None))

    @cached_property
    def target_layout(self) -> Layout:
        r"""The layout of a sample's target [T, C, \*space]; targets have no halo."""
        return self.frame.layout((len(self.targets), len(self.channels)), (None, None), halo=False)

    @property
    def fields(self) -> tuple[str, ...]:
        """The name of each channel."""
        return tuple(c.name for c in self.channels)

    @property
    def coords(self) -> dict[str, NDArray[Any]]:
        """The coordinates of the rows that this rank owns; `whole_coords` are those of the whole grid."""
        owned = self.layout.owned(coordinate(self.device_mesh()))[2:]
        return {d: self.whole_coords[d][a:b] for d, (a, b) in zip(self.frame.dims, owned, strict=True)}

    def sample_bytes(self) -> int:
        """The most bytes that any rank holds of one sample, input and target."""
        item = self.dtype.itemsize
        sizes = [
            np.prod(self.layout.local_shape(c)) + np.prod(self.target_layout.local_shape(c))
            for c in self.layout.coords()
        ]
        return int(max(sizes)) * item

    def input_times(self, sample: int) -> NDArray[Any]:
        return self.times[self.anchors[sample] + np.array(self.inputs, dtype=np.int64)]

    def target_times(self, sample: int) -> NDArray[Any]:
        return self.times[self.anchors[sample] + np.array(self.targets, dtype=np.int64)]

    # -- reading ------------------------------------------------------------------------------------------------------

    def reading(self, samples: Sequence[int]) -> Reading:
        """What to read for these samples: every step once, inputs before targets."""
        at = self.anchors[np.array([self._index(s) for s in samples], dtype=np.int64)][:, None]
        input_steps = at + np.array(self.inputs, dtype=np.int64)
        target_steps = at + np.array(self.targets, dtype=np.int64)
        steps = tuple(dict.fromkeys([*input_steps.ravel().tolist(), *target_steps.ravel().tolist()]))
        place = {step: i for i, step in enumerate(steps)}
        request = Request(
            layout=self.frame.layout((len(steps), len(self.channels)), (None, None), axes=self.frame.domain),
            parts=survey.parts(self.channels, self.variables, tuple(place.items()), self.select, self.flipped),
            scale=self.scale,
            offset=self.offset,
            dtype=DTYPES[dtype_name(self.dtype)],
            nan=self.nan,
        )

        def places(wanted: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.array([place[s] for s in wanted.ravel().tolist()], dtype=np.int64).reshape(wanted.shape)

        return Reading(request, steps, places(input_steps), places(target_steps))

    def plan(self, sample: int | Sequence[int] = 0) -> ReadPlan:
        """The read plan of one sample, or of several read together: bytes, chunks, who decodes what, amplification."""
        wanted = [sample] if isinstance(sample, int | np.integer) else list(sample)
        return self.plan_of(self.reading(wanted))

    def plan_of(self, reading: Reading) -> ReadPlan:
        return plan_read(reading.request, self.store.arrays, mode=self.mode)

    def __getitem__(self, sample: int) -> Sample:
        mesh = self.device_mesh()
        index = self._index(sample)
        reading = self.reading([index])
        given, target = self.unpack(self._engine.read(self.plan_of(reading)), reading)
        return Sample(
            Tile(given[0], self.layout, mesh),
            Tile(target[0], self.target_layout, mesh) if self.targets else None,
            index,
            self.input_times(index),
            self.target_times(index),
        )

    def unpack(self, block: NDArray[Any], reading: Reading) -> tuple[Tensor, Tensor]:
        r"""The local input [B, T, C, \*held] and target [B, T, C, \*owned] of a block [steps, C, \*held].

        Views of the block where no two samples share a step, else copies.
        """
        steps = torch.from_numpy(block)
        inner = self.frame.inner(coordinate(self.device_mesh()))
        given = _take(steps, reading.input_at)
        target = _take(steps, reading.target_at)[(..., *inner)]
        return given.to(self.dtype), target.to(self.dtype)

    @cached_property
    def _engine(self) -> Engine:
        return self.new_engine()

    def new_engine(self, threads: int | None = None) -> Engine:
        """A reader of plans with process groups of its own; making one is collective over the mesh."""
        return Engine(self.store, self.device_mesh(), threads, apart=(DATA,))

    def device_mesh(self) -> DeviceMesh:
        """The mesh; raises `ReadError` when the dataset was opened with integers for one."""
        if self.mesh is None:
            raise ReadError(
                "this dataset was opened with a mesh of plain integers, so it can plan, not read; pass a DeviceMesh"
            )
        return self.mesh

    def _index(self, sample: int) -> int:
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        return int(sample) % len(self)


def _take(x: Tensor, at: NDArray[np.int64]) -> Tensor:
    """``x[at]``; a view where `at` counts up by one."""
    flat, first = at.ravel(), int(at.flat[0]) if at.size else 0
    rising = bool((flat == np.arange(first, first + at.size)).all())
    picked = x.narrow(0, first, at.size) if rising else x.index_select(0, torch.from_numpy(flat))
    return picked.view(*at.shape, *x.shape[1:])
