"""`open`: a store as samples that are cut while they are read; `Dataset`: its samples, layouts and read plans."""

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

from jigsaw.io import coords, survey
from jigsaw.io.engine import Engine
from jigsaw.io.errors import FieldError, GridError, ReadError, WindowError
from jigsaw.io.fields import Channel, channels
from jigsaw.io.frame import DATA, Frame, Width
from jigsaw.io.plan import ReadPlan, plan_read
from jigsaw.io.request import Request
from jigsaw.io.stats import multiply_add
from jigsaw.io.store import open_store
from jigsaw.io.survey import Survey, Variable
from jigsaw.io.table import Store
from jigsaw.io.windows import anchors, offsets
from jigsaw.layout import DimSpec, Layout, Split
from jigsaw.mesh import axes_of, coordinate
from jigsaw.tile import Tile

_MODES = ("auto", "cooperative", "independent")
_LAT_ORDERS = ("store", "north-first", "south-first")
# numpy reads into these; bfloat16 is rounded from float32 once it is a torch tensor
_DTYPES = {"float16": "float16", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


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
            dtype=_DTYPES[_name(self.dtype)],
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


# -- open --------------------------------------------------------------------------------------------------------------


def open(
    store: Any,
    *,
    mesh: DeviceMesh | Mapping[str, int],
    fields: Sequence[str] | None = None,
    spec: Mapping[str, DimSpec] | None = None,
    halo: Width | Mapping[str, Width] | None = None,
    boundary: Mapping[str, str] | None = None,
    inputs: Sequence[int] = (0,),
    targets: Sequence[int] = (),
    time: slice | tuple[Any, Any] | None = None,
    normalize: Mapping[str, Any] | None = None,
    nan: str | float = "keep",
    dtype: str | torch.dtype = "float32",
    lat_order: str = "store",
    select: Mapping[str, int] | None = None,
    split: Split | Mapping[str, Split] = "balanced",
    align: int | Mapping[str, int] = 1,
    mode: str = "auto",
) -> Dataset:
    r"""The samples of a store, cut over `mesh` while they are read.

    A sample at anchor a is its input, the steps ``a + inputs``, and its target, the steps ``a + targets``, both tiles
    [T, C, \*space]: space is ``lat, lon`` on the globe and ``z, y, x`` or ``y, x`` elsewhere.

    - `store`: a path or URL, an `xarray.Dataset` (read through xarray, as it is), or an opened store;
    - `mesh`: a `DeviceMesh`, or axis sizes as integers, to plan without ranks;
    - `fields`: names (see `jigsaw.io.fields`), in channel order; by default every variable on the first one's grid;
    - `spec`: which axis, or axes, cut which spatial dim; by default the axis of its own name. `data` cuts batches;
    - `halo`: rows of the input beyond those owned, a number or (below, above), for all spatial dims or by dim;
      targets have none;
    - `boundary`: ``{"lon": "periodic"}`` lets the halo wrap round; elsewhere it ends with the domain;
    - `time`: a slice or pair of dates, both ends included, or of step positions; no window crosses a gap;
    - `normalize`: (mean, std) by field, fused into the read;
    - `nan`: ``"keep"``, ``"raise"``, or the number that stands in the result for missing values;
    - `dtype`: of the tiles;
    - `lat_order`: ``"store"``, ``"north-first"`` or ``"south-first"``;
    - `select`: the index in any other dim, such as members;
    - `split`, `align`: where the cuts lie (see `jigsaw.Layout`), for all spatial dims or by dim;
    - `mode`: ``"cooperative"`` (each chunk decoded by one rank), ``"independent"``, or ``"auto"``, the cheaper one.

    *Sends*: nothing.

    Raises: a `ReadError` of `jigsaw.io.errors` naming what was asked and what there is, alike on every rank.
    """
    opened = open_store(store)
    found = Survey(opened)
    chosen = channels(_default_fields(found) if fields is None else fields, found.levels)
    variables = found.of(chosen)
    grid = found.grid(variables)
    axis = found.time(variables)
    start, stop = axis.select(time) if axis else _untimed(time)
    device_mesh, axes = _axes(mesh)
    frame = Frame.of({d: len(v) for d, v in grid.items()}, axes, spec, halo, boundary, split, align)
    _check_periodic(grid, frame)
    flipped = _flipped(grid, lat_order)
    scale, offset = multiply_add(chosen, normalize)
    given, wanted = offsets("inputs", inputs), offsets("targets", targets)
    made = Dataset(
        store=opened,
        mesh=device_mesh,
        frame=frame,
        channels=chosen,
        variables=variables,
        inputs=given,
        targets=wanted,
        anchors=anchors(start, stop, given, wanted, axis.breaks if axis else ()),
        times=axis.stamps if axis else np.arange(1),
        whole_coords={d: v[::-1] if d in flipped else v for d, v in grid.items()},
        scale=scale,
        offset=offset,
        dtype=_dtype(dtype),
        nan=_nan_policy(nan),
        mode=_mode(mode),
        select=_selection(select, variables),
        flipped=flipped,
    )
    made.plan(0)  # what cannot be planned is refused here, not at the first batch
    return made


def _default_fields(found: Survey) -> list[str]:
    """Every numeric variable on the grid of the first; those that need a `select` only where there are no others."""
    every = [v for v in found.variables.values() if np.dtype(v.table.dtype).kind in "fiu"]
    numeric = [v for v in every if all(role in survey.ROLES for role in v.roles)] or every
    if not numeric:
        raise FieldError(f"the store {found.store.url} has no variable on a lat-lon grid or in a volume")
    first = {d: numeric[0].size(d) for d in numeric[0].space}
    return [v.table.name for v in numeric if {d: v.size(d) for d in v.space} == first]


def _untimed(time: Any) -> tuple[int, int]:
    if time is not None:
        raise WindowError(f"time={time!r} selects steps, but the fields have no time dim")
    return 0, 1


def _axes(mesh: DeviceMesh | Mapping[str, int]) -> tuple[DeviceMesh | None, tuple[tuple[str, int], ...]]:
    return (None, tuple(mesh.items())) if isinstance(mesh, Mapping) else (mesh, axes_of(mesh))


def _check_periodic(grid: Mapping[str, NDArray[Any]], frame: Frame) -> None:
    for dim, periodic in zip(frame.dims, frame.periodic, strict=True):
        if periodic and dim == "lon":
            coords.check_periodic(grid[dim])


def _flipped(grid: Mapping[str, NDArray[Any]], lat_order: str) -> tuple[str, ...]:
    if lat_order not in _LAT_ORDERS:
        raise GridError(f"lat_order={lat_order!r} must be one of {_LAT_ORDERS}")
    if lat_order == "store" or "lat" not in grid:
        return ()
    north_first = bool(grid["lat"][0] > grid["lat"][-1])
    return () if north_first == (lat_order == "north-first") else ("lat",)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    name = _name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in _DTYPES:
        raise FieldError(f"dtype={dtype!r} must be one of {sorted(_DTYPES)}")
    return getattr(torch, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nan_policy(nan: str | float) -> str | float:
    if isinstance(nan, str) and nan not in ("keep", "raise"):
        raise FieldError(f"nan={nan!r} must be 'keep', 'raise' or a number")
    return nan


def _mode(mode: str) -> str:
    if mode not in _MODES:
        raise FieldError(f"mode={mode!r} must be one of {_MODES}")
    return mode


def _selection(select: Mapping[str, int] | None, variables: Sequence[Variable]) -> Mapping[str, int]:
    dims = {d: role for v in variables for d, role in zip(v.table.dims, v.roles, strict=True)}
    for dim in select or {}:
        if dims.get(dim) != dim:
            rest = sorted(d for d, role in dims.items() if d == role and role not in survey.ROLES)
            raise GridError(f"select names {dim!r}, which is no further dim of the fields; there are {rest}")
    return dict(select or {})
