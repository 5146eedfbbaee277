"""`Dataset`: the samples of a store, their layouts and read plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.errors import GridError, MissingArrayError, WindowError
from jigsaw.geometry.cut import Box
from jigsaw.geometry.layout import Layout
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.datasets.held_steps import HeldSteps
from jigsaw.io.datasets.samples import MeshSamples, TileIfAny, TileRecord, numpy_dtype_name
from jigsaw.io.formats.store import StoreSource
from jigsaw.io.reading.engine import ReadEngine, StoreIdentity, look_at_store
from jigsaw.io.reading.read_plan import ReadPlan, plan_read
from jigsaw.io.series import store_survey as survey
from jigsaw.io.series.boundary import fill_beyond_ends, shown_rows
from jigsaw.io.series.cell_grid import CellGrid
from jigsaw.io.series.choices import DimChoices
from jigsaw.io.series.fields import FieldChannel
from jigsaw.io.series.forcings import GridForcings
from jigsaw.io.series.request import NanRule, ReadRequest
from jigsaw.io.series.step_sums import StepSum
from jigsaw.io.series.store_survey import RowOrder, StoreVariable
from jigsaw.io.series.times import is_whole_number, later_times
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.tile.tile import Tile


@dataclass(frozen=True)
class Sample(TileRecord):
    r"""One sample: `input` and `target` tiles [T, C, \*space] (None without targets), and the times [T] of their steps.

    Values are in the units of the store, unless `normalize` says otherwise; times are datetime64, or cftime dates of
    other calendars.

    With `stack`, tiles are [member, T, C, \*space].

    With forcings, they are the last channels of the input. `target_forcings` [T, C, \*space] are those of the target's
    times, with the input's halo: a rollout puts them beside the state that it has predicted.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> sample = jigsaw.io.open("globe.zarr", mesh=mesh, fields=["t2m"], targets=[1, 2])[0]
    >>> sample.input.shape, sample.target.shape
    (torch.Size([1, 1, 9, 16]), torch.Size([2, 1, 9, 16]))
    >>> sample.target_times.astype("datetime64[h]")
    array(['2020-01-01T06', '2020-01-01T12'], dtype='datetime64[h]')
    """

    input: Tile
    target: TileIfAny
    index: int
    input_times: NDArray[Any]
    target_times: NDArray[Any]
    target_forcings: TileIfAny = None


@dataclass(frozen=True)
class SampleReading:
    """Reading of some samples: each step once, and where a sample's steps lie in the block that is returned.

    `steps` are the store's, `times` are the times that they are valid at; `keys` distinguish them where samples choose
    along further dims. Those `known` are not read.
    """

    request: ReadRequest
    keys: tuple[int, ...]
    known: frozenset[int]
    steps: tuple[int, ...]
    times: NDArray[Any]
    input_at: NDArray[np.int64]
    target_at: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset(MeshSamples):
    """The samples of a store, cut by a mesh; made by `jigsaw.io.open`.

    ``len(ds)`` samples; ``ds[i]`` reads one (every rank of the mesh must ask for it, in the same order), a
    `jigsaw.io.DataLoader` reads batches in the background.  Samples count anchors, and those again for each choice
    along further dims (members, lead times), the last dim fastest.

    It pickles as what it describes: unpickled in another process, it opens the store and joins the mesh when it first
    reads.

    *Shapes*: of a sample see `Sample`; per rank the rows of space that it owns, and of the input its halo.
    *Sends*: what `plan` says, on a process group of its own.

    Raises: `IndexError` for a sample that does not exist; the `ReadError` of a read that failed, on every rank.

    >>> data = jigsaw.io.open("globe.zarr", mesh={"lat": 2, "lon": 2}, fields=["t2m"], mode="cooperative")
    >>> data
    Dataset(file://globe.zarr: 8 samples, 1 channels, lat 9, lon 16; [1, 1, 9/lat[0, 5, 9], 16/lon[0, 8, 16]])
    >>> [row.decoded_bytes for row in data.plan(0).rows]    # of four ranks: the one chunk of 9 x 16 is decoded once
    [576, 0, 0, 0]
    """

    source: StoreSource
    channels: tuple[FieldChannel, ...]
    input_channels: tuple[int, ...]
    target_channels: tuple[int, ...]
    roles: Mapping[str, tuple[str, ...]]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    anchors: NDArray[np.int64]
    times: NDArray[Any]
    stored_steps: NDArray[np.int64]
    choices: DimChoices
    origins: Mapping[str, NDArray[Any]]
    whole_coords: Mapping[str, NDArray[Any]]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    dtype: torch.dtype
    nan: NanRule | tuple[NanRule, ...]
    missing: str
    mode: str
    turn: RowOrder
    forcings: GridForcings | None = None
    vectors: tuple[int, ...] = ()
    counted: tuple[str, ...] = ()
    cells: CellGrid | None = None
    sums: tuple[StepSum, ...] = ()
    stacked: str | None = None
    """The further dim, the last of `choices`, that is a dim of each sample."""
    boundary_types: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Beyond the first and last row of each dim: ``open``, ``wall`` or ``periodic``, where the store says it."""

    def __len__(self) -> int:
        return len(self.anchors) * self._chosen

    def __repr__(self) -> str:
        cut = ", ".join(f"{d} {n}" for d, n in zip(self.frame.dims, self.frame.sizes, strict=True))
        return f"Dataset({self.store.url}: {len(self)} samples, {len(self.fields)} channels, {cut}; {self.layout})"

    @property
    def store(self) -> ArrayStore:
        """The opened store."""
        return self.source.store

    @cached_property
    def variables(self) -> tuple[StoreVariable, ...]:
        """The stored arrays that are read, and the roles of their dims."""
        gone = [name for name in self.roles if name not in self.store.arrays]
        if gone:
            raise MissingArrayError(f"the store {self.store.url} had an array {gone[0]!r} and has it no more")
        return tuple(StoreVariable(self.store.arrays[name], roles) for name, roles in self.roles.items())

    @property
    def select(self) -> dict[str, Any]:
        """Choice along each further dim, as `jigsaw.io.open` takes it."""
        return {dim: at[0] if len(at) == 1 else list(at) for dim, at in self.choices.items()}

    @property
    def forcing_names(self) -> tuple[str, ...]:
        """The name of each channel of the forcings."""
        return self.forcings.names if self.forcings else ()

    @property
    def flipped(self) -> tuple[str, ...]:
        """The spatial dims whose rows are in reverse of the stored order."""
        return self.turn.flipped

    def identity(self) -> StoreIdentity:
        """Return the identity of what is read: the arrays and their content, and the places and times of the
        samples.
        """
        facts = self.places_digest(), self.times.tolist(), self.fields
        return look_at_store(lambda: self.store.url, self._compared_tables, facts)

    def places_digest(self) -> str:
        """Return a digest of the coordinates of the whole grid: alike where samples have the same rows."""
        digest = sha256()
        for dim, values in self.whole_coords.items():
            # memory of texts of any length, such as names of stations, is addresses, which differ by process
            plain = values.astype(str) if values.dtype.kind in "OT" else values
            digest.update(repr((dim, plain.dtype.str, plain.shape)).encode() + plain.tobytes())
        return digest.hexdigest()[:16]

    def _compared_tables(self) -> list[ArrayTable]:
        """Return the arrays that are read; of one that is joined from files, the first, middle and last."""
        tables: list[ArrayTable] = []
        for table in (v.table for v in self.variables):
            names = table.members.names if table.members else ()
            some = dict.fromkeys((names[0], names[len(names) // 2], names[-1]) if names else ())
            tables += [self.store.arrays[name] for name in some] or [table]
        return tables

    @cached_property
    def layout(self) -> Layout:
        r"""The layout of a sample's input [T, C, \*space], with halo and forcings; [member, T, …] with `stack`."""
        return self._layout(len(self.inputs), len(self.fields) + len(self.forcing_names))

    @cached_property
    def target_layout(self) -> Layout:
        r"""Layout of a sample's target [T, C, \*space]; targets do not have a halo."""
        return self._layout(len(self.targets), len(self.target_channels), halo=False)

    @cached_property
    def forcing_layout(self) -> Layout:
        r"""The layout of a sample's `target_forcings` [T, C, \*space], halo included."""
        return self._layout(len(self.targets), len(self.forcing_names))

    def _layout(self, *lead: int, halo: bool = True) -> Layout:
        lead = (*self._stack, *lead)
        return self.frame.layout(lead, (None,) * len(lead), halo)

    @property
    def fields(self) -> tuple[str, ...]:
        """The name of each channel of the input."""
        return tuple(self.channels[c].name for c in self.input_channels)

    @property
    def target_fields(self) -> tuple[str, ...]:
        """The name of each channel of the target; a channel that the input has, too, has the same name."""
        return tuple(self.channels[c].name for c in self.target_channels)

    @property
    def coords(self) -> dict[str, NDArray[Any]]:
        """The coordinates of the rows that this rank owns; `whole_coords` are those of the whole grid."""
        owned = self.layout.owned(mesh_coordinate(self.device_mesh()))[-len(self.frame.dims) :]
        return {d: self.whole_coords[d][a:b] for d, (a, b) in zip(self.frame.dims, owned, strict=True)}

    @property
    def grid(self) -> CellGrid:
        """Places, areas and neighbors of the cells.  Raises: `GridError` for fields that do not lie on cells."""
        if self.cells is None:
            raise GridError(f"grid is that of cells, and the fields lie on {list(self.frame.dims)}; see whole_coords")
        return self.cells

    def sample_bytes(self) -> int:
        """Return the most bytes that any rank holds of one sample, input and target."""
        summed = self._layout(len(self.inputs) + len(self.targets), self._earlier)
        layouts = (self.layout, self.target_layout, self.forcing_layout, summed)
        sizes = [sum(prod(layout.local_shape(c)) for layout in layouts) for c in self.layout.coords()]
        return max(sizes) * self.dtype.itemsize

    @property
    def _earlier(self) -> int:
        """The number of channels, the last ones, that are read for a sum alone."""
        return sum(len(s.earlier) for s in self.sums)

    @property
    def _stack(self) -> tuple[int, ...]:
        """The size of the leading dim of samples, where they have one."""
        return () if self.stacked is None else (len(self.choices[self.stacked]),)

    @property
    def is_appended_to(self) -> bool:
        return self._chosen == 1

    def marks_of_samples(self, count: int) -> bytes:
        """Return the times of the first samples, and what tells members and starts of forecasts apart."""
        # a window of later steps alone may have its anchor before the series
        anchors = np.clip(self.anchors[:count], 0, len(self.times) - 1)
        times = self.times[anchors]
        marks = times.astype("datetime64[us]").tobytes() if times.dtype.kind == "M" else repr(times.tolist()).encode()
        several = {dim: at for dim, at in self.choices.items() if len(at) > 1 and dim != self.stacked}
        starts = {dim: self.origins[dim][list(at)].tolist() for dim, at in self.choices.items() if dim in self.origins}
        return marks + repr((several, starts)).encode()

    @property
    def _chosen(self) -> int:
        return prod(len(at) for dim, at in self.choices.items() if dim != self.stacked)

    def choice(self, sample: int) -> dict[str, int]:
        """Return the position of a sample along each further dim, by the store's own name."""
        choice = self._choice(self._index(sample) // len(self.anchors) * prod(self._stack))
        return {dim: at for dim, at in choice.items() if dim != self.stacked}

    def _choice(self, number: int) -> dict[str, int]:
        places = np.unravel_index(number, [len(at) for at in self.choices.values()])
        return {dim: at[int(p)] for (dim, at), p in zip(self.choices.items(), places, strict=True)}

    def input_times(self, sample: int) -> NDArray[Any]:
        """Return the times that a sample's input steps are valid at; in a forecast, its start plus the lead time."""
        return self._times(sample, self.inputs)

    def target_times(self, sample: int) -> NDArray[Any]:
        """Return the same times for the sample's target."""
        return self._times(sample, self.targets)

    def _times(self, sample: int, steps: tuple[int, ...]) -> NDArray[Any]:
        anchor = self.anchors[self._index(sample) % len(self.anchors)]
        times = self.times[anchor + np.array(steps, dtype=np.int64)]
        return self._valid(times, self.choice(sample))

    def _valid(self, times: NDArray[Any], choice: Mapping[str, int]) -> NDArray[Any]:
        for dim, values in self.origins.items():
            times = later_times(times, values[choice[dim]])
        return times

    def rollout(self, steps: int) -> Dataset:
        """Return the same samples with the first `steps` targets.

        Raises: `WindowError` when there are fewer targets.
        """
        if not is_whole_number(steps) or not 1 <= steps <= len(self.targets):
            raise WindowError(
                f"a rollout of {steps!r} steps needs a whole number of targets, but the dataset was opened with "
                f"targets={list(self.targets)}"
            )
        return self if steps == len(self.targets) else self.changed(targets=self.targets[:steps])

    def reading(self, samples: Sequence[int], kept: HeldSteps | None = None) -> SampleReading:
        """Return what to read for these samples: every step once, inputs before targets, except the steps in `kept`."""
        wanted = self._wanted(samples)
        keys = self.keys(samples)
        place = {key: i for i, key in enumerate(keys)}
        known = kept.known(keys) if kept else frozenset[int]()
        steps = [int(self.stored_steps[key % len(self.stored_steps)]) for key in keys]
        # The steps left out here, and those `known`, depend only on the earlier batches. These were the same on every
        # rank that shares these samples, so all of them make this same request, and plan the same.
        variables = [v for v in self.variables if "time" in v.roles or not (kept and kept.has_fixed)]
        by_channel = self.nan if isinstance(self.nan, tuple) else ()
        request = ReadRequest(
            layout=self.frame.layout((len(steps), len(self.channels)), (None, None), axes=self.frame.domain),
            parts=survey.read_parts_of(self.channels, variables, self._moments(keys, known), self.turn, by_channel),
            scale=self.scale,
            offset=self.offset,
            dtype=numpy_dtype_name(self.dtype),
            nan="keep" if isinstance(self.nan, tuple) else self.nan,
            boundary=self.frame.boundary,
            missing=self.missing,
            vectors=self.vectors,
        )
        input_at, target_at = (
            np.array([place[key] for key in w.ravel().tolist()], dtype=np.int64).reshape(w.shape) for w in wanted
        )
        return SampleReading(request, keys, known, tuple(steps), self._block_times(keys), input_at, target_at)

    def _wanted(self, samples: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return the keys [B, T] of these samples' input steps, and of their targets'; [B, M, T] of M stacked."""
        places = np.array([self._index(s) for s in samples], dtype=np.int64)
        chosen, at = places // len(self.anchors), self.anchors[places % len(self.anchors)]
        # One number for a step of a choice: of 8 stored steps and members 0 and 1, step 3 of member 1 is 1 * 8 + 3.  Of
        # samples 0 and 1 with inputs (-1, 0) and target 1 the keys are 0, 1, 1, 2 and 2, 3: the four steps 0 to 3, each
        # read once, and `input_at` says [[0, 1], [1, 2]].
        stack = np.arange(prod(self._stack)).reshape(self._stack)
        chosen = chosen.reshape(-1, *(1 for _ in self._stack)) * stack.size + stack
        first = (chosen * len(self.stored_steps) + at.reshape(-1, *(1 for _ in self._stack)))[..., None]
        return [first + np.array(steps, dtype=np.int64) for steps in (self.inputs, self.targets)]

    def keys(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the steps that these samples need, each once, as a number for each step and choice."""
        return tuple(dict.fromkeys(key for wanted in self._wanted(samples) for key in wanted.ravel().tolist()))

    def new_steps(self, cache_bytes: int) -> HeldSteps:
        """Return a memory for shared steps, of `cache_bytes` a rank; 0 keeps only those of the next read."""
        layout = self.frame.layout((1, len(self.channels) - self._earlier), (None, None))
        # the size on the rank that holds most, so that all ranks keep equally many steps, and read the same ones again
        item = np.dtype(numpy_dtype_name(self.dtype)).itemsize
        size = item * max(prod(layout.local_shape(c)) for c in layout.coords())
        timeless = {v.table.name for v in self.variables if "time" not in v.roles}
        fixed = (
            [i for i, c in enumerate(self.channels) if c.array in timeless]
            if self._chosen * prod(self._stack) == 1
            else []
        )
        return HeldSteps(cache_bytes // size, fixed)

    def _moments(self, keys: Sequence[int], known: Collection[int]) -> survey.ChoiceSteps:
        picks: dict[int, list[tuple[int, int]]] = {}
        for i, key in enumerate(keys):
            if key not in known:
                chosen, step = divmod(key, len(self.stored_steps))
                picks.setdefault(chosen, []).append((int(self.stored_steps[step]), i))
        return [(self._choice(chosen), tuple(pairs)) for chosen, pairs in picks.items()]

    def _block_times(self, keys: Sequence[int]) -> NDArray[Any]:
        chosen, steps = np.divmod(np.array(keys, dtype=np.int64), len(self.stored_steps))
        if not self.origins:
            return self.times[steps]
        times = [self._valid(self.times[s : s + 1], self._choice(int(c))) for c, s in zip(chosen, steps, strict=True)]
        return np.concatenate(times)

    def plan(self, sample: int | Sequence[int] = 0) -> ReadPlan:
        """Return the read plan of one or several samples read together: bytes, chunks, who decodes what, amplification.

        For a far store it looks up the sizes of the objects that hold one chunk each, which reading does without.

        >>> data = jigsaw.io.open("globe.zarr", mesh={"lat": 2, "lon": 2}, fields=["t2m"], mode="cooperative")
        >>> print(data.plan(0))
        1 steps of 1 channels, latitude 9 x longitude 16, read by 4 ranks (lat=2, lon=2)
        1 requests
        <BLANKLINE>
        rank  lat  lon  latitude  longitude  chunks  stored  decoded  useful   sent
           0    0    0       0:5        0:8       1   ... B    576 B   160 B  416 B
           1    0    1       0:5       8:16       0     0 B      0 B   160 B    0 B
           2    1    0       5:9        0:8       0     0 B      0 B   128 B    0 B
           3    1    1       5:9       8:16       0     0 B      0 B   128 B    0 B
         all                                      1   ... B    576 B   576 B  416 B
        <BLANKLINE>
        2m_temperature: 1 chunk of 1 x 9 x 16 = 576 B, all of which several ranks need:
          what they need of each is read and decoded once, by one rank, which hands the others their parts
        ...
        """
        wanted: Sequence[Any] = list(sample) if isinstance(sample, Iterable) and np.ndim(sample) else [sample]
        return self.plan_of(self.reading(wanted)).ask_sizes()

    def plan_of(self, reading: SampleReading) -> ReadPlan:
        return plan_read(reading.request, self.store.arrays, mode=self.mode)

    def __getitem__(self, sample: int) -> Sample:
        mesh = self.device_mesh()
        index = self._index(sample)
        engine = self._engine
        reading = engine.prepared(lambda: self.reading([index]))
        input_part, target, forced = self.unpack(self.read(engine, reading), reading)
        return Sample(
            Tile(input_part[0].to(mesh.device_type), self.layout, mesh),
            Tile(target[0].to(mesh.device_type), self.target_layout, mesh) if self.targets else None,
            index,
            self.input_times(index),
            self.target_times(index),
            Tile(forced[0].to(mesh.device_type), self.forcing_layout, mesh) if self.targets and self.forcings else None,
        )

    def read(
        self, engine: ReadEngine, reading: SampleReading, kept: HeldSteps | None = None, wanted: Collection[int] = ()
    ) -> NDArray[Any]:
        r"""Read the block [steps, C, \*held] of a reading: the stored channels, then the forcings.

        `kept` provides the steps that the reading leaves out, and takes in those that the next reading has `wanted`.

        *Sends*: what `plan_of` says; nothing for the forcings.
        """
        plan = engine.plan(lambda: self.plan_of(reading), reading.request)
        stored, held = len(self.channels), self._held
        shape = len(reading.steps), stored + len(self.forcing_names), *(b - a for a, b in held)
        block = engine.memory.empty(shape, np.dtype(reading.request.dtype))
        engine.read(plan, block[:, :stored])
        with np.errstate(all="ignore"):  # steps that `kept` provides are not yet in the block, which holds any numbers
            for step_sum in self.sums:
                step_sum.add_up(block)
        if self.sums:
            fill_beyond_ends(block[:, :stored], held, self.frame.sizes, self.frame.boundary)
        if kept is not None:  # reached only if the read went well on all ranks; a failed read changes no rank's memory
            own = block[:, : stored - self._earlier]
            kept.write(own, reading.keys, reading.known)
            kept.keep(own, reading.keys, wanted)
        self._fill_forcings(block[:, stored:], reading.times)
        return block

    def forcings_at(self, times: Sequence[Any] | NDArray[Any]) -> Tile:
        r"""Return the forcings [T, C, \*space] of any `times`, also later ones than the store's, with the input's halo.

        *Sends*: nothing.  *Raises*: `WindowError` unless `times` are several, along one dim.
        """
        mesh, dates = self.device_mesh(), np.asarray(times)
        if dates.ndim != 1:
            raise WindowError(f"times={times!r} has {dates.ndim} dims; give a list of times, or an array of one dim")
        layout = self.frame.layout((len(dates), len(self.forcing_names)), (None, None))
        block = np.empty((*layout.shape[:2], *(b - a for a, b in self._held)), numpy_dtype_name(self.dtype))
        self._fill_forcings(block, dates)
        return Tile(torch.from_numpy(block).to(self.dtype).to(mesh.device_type), layout, mesh)

    def _fill_forcings(self, out: NDArray[Any], times: NDArray[Any]) -> None:
        for where, forcings in self._forcings_here:
            forcings.write(out[(..., *where)], times)
        fill_beyond_ends(out, self._held, self.frame.sizes, self.frame.boundary)

    @property
    def _held(self) -> Box:
        return self.layout.held(mesh_coordinate(self.device_mesh()))[-len(self.frame.dims) :]

    @cached_property
    def _forcings_here(self) -> list[tuple[tuple[slice, ...], GridForcings]]:
        """The forcings over this rank's held rows, or the rows that these repeat beyond an edge, and their place."""
        if self.forcings is None:
            return []
        pieces = shown_rows(self._held, self.frame.sizes, self.frame.boundary)
        return [(where, self.forcings.taken(*rows)) for where, rows in pieces]

    def unpack(self, block: NDArray[Any], reading: SampleReading) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return the local input [B, T, C, \*held], target [B, T, C, \*owned], target forcings [B, T, C, \*held] of a
        block.

        They are views of the block where no two samples share a step and the channels follow each other, else copies.
        """
        # Every step was read with the input's halo, because a target may be the next window's input; `inner` are the
        # owned rows within what is held.
        steps = torch.from_numpy(block)
        inner = self.frame.inner(mesh_coordinate(self.device_mesh()))
        computed = tuple(range(len(self.channels), block.shape[1]))
        channels = -1 - len(self.frame.dims)
        before = _take_channels(_take_steps(steps, reading.input_at), channels, (*self.input_channels, *computed))
        after = _take_steps(steps, reading.target_at)
        target = _take_channels(after, channels, self.target_channels)[(..., *inner)]
        forced = _take_channels(after, channels, computed)
        return before.to(self.dtype), target.to(self.dtype), forced.to(self.dtype)


def _take_channels(x: Tensor, dim: int, picked: tuple[int, ...]) -> Tensor:
    """Take channels along a dim; a view where they follow each other."""
    first = picked[0] if picked else 0
    if picked == tuple(range(first, first + len(picked))):
        return x.narrow(dim, first, len(picked))
    return x.index_select(dim, torch.tensor(picked))


def _take_steps(x: Tensor, at: NDArray[np.int64]) -> Tensor:
    """Return ``x[at]``; a view where `at` counts up by one."""
    flat, first = at.ravel(), int(at.flat[0]) if at.size else 0
    rising = bool((flat == np.arange(first, first + at.size)).all())
    picked = x.narrow(0, first, at.size) if rising else x.index_select(0, torch.from_numpy(flat))
    return picked.unflatten(0, at.shape)
