"""Cuts of samples, and the request of one: what it needs of the stored arrays, and where each value goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, HaloError, ShardingError, UnsupportedStoreError
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.cut import SplitRule, box_slices
from jigsaw.geometry.layout import AxisSizes, DimSpec, Layout, MeshCoordinate
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.series import coords
from jigsaw.io.series.boundary import BoundaryRule, DimBoundary, pole_boundary
from jigsaw.io.series.times import is_whole_number

IndexPicks = tuple[tuple[int, int], ...]
NanRule = str | float
"""Rule for missing values: ``"keep"``, ``"raise"``, or the number that replaces them."""

DROPPED_DIM = -1
MISSING_RULES = ("error", "fill")
"""Rules for a chunk that the store lacks."""


class StoredOrder:
    """Stored row of each of a sample's rows along a dim: `rows`.  Equal are those of equal rows."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.rows = rows
        self._digest = sha256(rows.tobytes()).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredOrder) and other._digest == self._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"StoredOrder({self._digest})"


@dataclass(frozen=True)
class ReadPart:
    """One stored array's contribution to a sample.

    An entry a *stored* dim:

    - `picks`: None for a spatial dim (the layout cuts it), else pairs (stored index, destination index);
    - `to`: the destination dim that it lands in: 0 time, 1 channel, 2 and up space; `DROPPED_DIM` for a dim of which
      one index is picked and which the destination lacks.

    `at` fixes the destination dims that the array lacks, as pairs (dim, index). ``((1, 3),)`` puts a variable without
    levels into channel 3; a static field is one part for each destination step. `flip` lists the stored dims that run
    against the layout's rows. `first` has for each stored dim the row that is the layout's row 0, where a window is
    smaller than the array. Along a flipped dim it is the layout's last row, and 0 for dims with picks. A window as long
    as the array wraps: it is rolled. `order` is that of the rows along the only dim of space, where they have one.
    `nan` is a rule of its own for missing values.
    """

    array: str
    picks: tuple[IndexPicks | None, ...]
    to: tuple[int, ...]
    at: tuple[tuple[int, int], ...] = ()
    flip: tuple[int, ...] = ()
    first: tuple[int, ...] = ()
    order: StoredOrder | None = None
    nan: NanRule | None = None


@dataclass(frozen=True)
class ReadRequest:
    """One sample [T, C, \\*space]: y = x * scale + offset, a channel each, after the file's own scale, offset and fill.

    `layout` is that of the sample over the ranks that share it, which read its held intervals. `nan` is the rule for
    missing values: ``"keep"``, ``"raise"`` (`NaNError`), or a number that replaces them in the result.

    `missing` is the rule for chunks that the store lacks: ``"error"`` (`MissingChunkError`), or ``"fill"`` for the
    array's fill value. `boundary` has the rule for rows beyond the ends of each spatial dim, which wrap without it.
    `vectors` are the channels that change sign in turned rows. `purpose` is what else ranks compare before they read:
    the sample, where its arrays have no name of their own, and the changes made to it.
    """

    layout: Layout
    parts: tuple[ReadPart, ...]
    scale: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    dtype: str = "float32"
    nan: NanRule = "keep"

    boundary: tuple[DimBoundary, ...] = ()
    missing: str = "error"
    vectors: tuple[int, ...] = ()
    purpose: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        channels = self.layout.cuts[1].size
        if not self.scale:
            object.__setattr__(self, "scale", (1.0,) * channels)
        if not self.offset:
            object.__setattr__(self, "offset", (0.0,) * channels)


def runs_of_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return pairs (source, target) as runs (source, source step, target, target step, count), in their order."""
    runs: list[tuple[int, int, int, int, int]] = []
    for source, target in pairs:
        if runs:
            s, ds, t, dt, n = runs[-1]
            step = (source - s, target - t) if n == 1 else (ds, dt)
            fits = source == s + n * step[0] and target == t + n * step[1]
            if fits and step[0] != 0 and step[1] != 0:
                runs[-1] = (s, step[0], t, step[1], n + 1)
                continue
        runs.append((source, 1, target, 1, 1))
    return tuple(runs)


def check_arrays_readable(request: ReadRequest, tables: Mapping[str, ArrayTable]) -> None:
    """Refuse an array that cannot be read into a sample, alike on every rank."""
    for name in dict.fromkeys(part.array for part in request.parts):
        if tables[name].dtype[1] not in "biuf":
            raise UnsupportedStoreError(
                f"array {name!r} has dtype {tables[name].dtype!r}; only numbers can be read into a sample"
            )
        tables[name].check_readable()


HaloWidth = int | tuple[int, int]


@dataclass(frozen=True)
class SampleSpace:
    """Spatial dims of a sample in canonical order, and for each its size, axes, halo (below, above) and boundary.

    `axes` are those of the mesh.  The axis `data` cuts batches and never space: the other axes make up a *domain
    group*, the ranks that share a sample.

    At the ends of a dim whose boundary is neither ``clip`` nor ``periodic``, ranks hold rows outside of the sample
    (`jigsaw.Cut.wraps`). A convolution without padding on ``tile.local`` reads them, while the tile stays exactly the
    whole sample. So whatever jigsaw computes on it (padded layers, reductions, losses, norms, `full_tensor`) equals
    torch on the whole sample.
    """

    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    axes: AxisSizes
    spec: tuple[DimSpec, ...]
    halo: tuple[tuple[int, int], ...]
    boundary: tuple[DimBoundary, ...]
    split: tuple[SplitRule, ...]
    align: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int],
        axes: AxisSizes,
        spec: Mapping[str, DimSpec] | None,
        halo: HaloWidth | Mapping[str, HaloWidth] | None,
        boundary: Mapping[str, BoundaryRule] | None,
        split: SplitRule | Mapping[str, SplitRule],
        align: int | Mapping[str, int],
    ) -> SampleSpace:
        """Check what the user asked for by dim names; without a `spec`, a dim is cut by the axis of its own name."""
        dims = tuple(sizes)
        for name, argument in (
            ("spec", spec),
            ("halo", halo),
            ("boundary", boundary),
            ("split", split),
            ("align", align),
        ):
            _check_dim_names(name, argument, dims, alike=name in ("halo", "split", "align"))
        chosen = dict(spec) if spec is not None else {d: d for d in dims}
        frame = cls(
            dims,
            tuple(sizes.values()),
            axes,
            tuple(chosen.get(d) for d in dims),
            tuple(_halo_widths(d, sizes[d], halo) for d in dims),
            tuple(DimBoundary.of(d, (boundary or {}).get(d, "clip")) for d in dims),
            tuple(split.get(d, "balanced") if isinstance(split, Mapping) else split for d in dims),
            tuple(align.get(d, 1) if isinstance(align, Mapping) else align for d in dims),
        )
        frame.layout((1, 1), (None, None))
        for dim, entry in chosen.items():
            if DATA_AXIS in ((entry,) if isinstance(entry, str) else entry or ()):
                raise ShardingError(
                    f"spec={{{dim!r}: {entry!r}}} cuts space by 'data', which cuts the batch; use another axis"
                )
        return frame

    def on(self, grid: Mapping[str, NDArray[Any]]) -> SampleSpace:
        """Return this space on a grid whose coordinates say where longitudes wrap and latitudes meet the poles."""
        rules = [self._boundary_on(i, grid) for i in range(len(self.dims))]
        for dim, rule, size, width in zip(self.dims, rules, self.sizes, self.halo, strict=True):
            rule.check_width(dim, size, width)
        return replace(self, boundary=tuple(rules))

    def _boundary_on(self, i: int, grid: Mapping[str, NDArray[Any]]) -> DimBoundary:
        dim, rule = self.dims[i], self.boundary[i]
        if rule.rule == "periodic" and dim == "lon":
            coords.check_lon_periodic(grid[dim])
        if rule.rule != "pole":
            return rule
        if dim != "lat" or "lon" not in self.dims:
            raise GridError(
                f"boundary={{{dim!r}: 'pole'}} is for 'lat' on a grid with 'lon', but the fields' spatial dims are "
                f"{list(self.dims)}; use 'reflect' or 'replicate'"
            )
        circle = self.dims.index("lon")
        coords.check_lon_periodic(grid["lon"], "lat", "pole")
        return pole_boundary(grid["lat"], self.sizes[circle], self.halo[i], circle)

    @property
    def periodic(self) -> tuple[bool, ...]:
        return tuple(b.rule == "periodic" for b in self.boundary)

    @property
    def domain(self) -> AxisSizes:
        return tuple((name, size) for name, size in self.axes if name != DATA_AXIS)

    def in_domain(self, coordinate: MeshCoordinate) -> MeshCoordinate:
        return tuple(c for (name, _), c in zip(self.axes, coordinate, strict=True) if name != DATA_AXIS)

    def layout(
        self, lead: Sequence[int], lead_spec: Sequence[DimSpec], halo: bool = True, axes: AxisSizes | None = None
    ) -> Layout:
        """Return the layout of [*lead, *space]."""
        first = len(lead)
        beyond = {
            first + i: width
            for i, (width, b) in enumerate(zip(self.halo, self.boundary, strict=True))
            if halo and b.is_beyond
        }
        layout = Layout.of(
            (*lead, *self.sizes),
            (*lead_spec, *self.spec),
            self.axes if axes is None else axes,
            split={first + i: rule for i, rule in enumerate(self.split)},
            align={first + i: rows for i, rows in enumerate(self.align)},
            halo={first + i: w for i, w in enumerate(self.halo) if halo and w != (0, 0) and first + i not in beyond},
            periodic=[first + i for i, periodic in enumerate(self.periodic) if periodic],
        )
        for dim, width in beyond.items():
            layout = layout.replace_dim(dim, layout.dim(dim)[0].with_beyond(*width))
        return layout

    def inner(self, coordinate: MeshCoordinate) -> tuple[slice, ...]:
        """Return where the owned rows lie among those that a mesh coordinate holds, a slice for each spatial dim."""
        layout = self.layout((1,), (None,))
        return box_slices(layout.owned(coordinate)[1:], layout.held(coordinate)[1:])


def _check_dim_names(name: str, argument: Any, dims: Sequence[str], alike: bool) -> None:
    """Refuse names that are not dims, and an argument without names unless it may be `alike` for all dims."""
    if isinstance(argument, Mapping):
        unknown = sorted(set(map(str, argument)) - set(dims))
        if unknown:
            raise GridError(
                f"{name}={dict(argument)!r} names {unknown[0]!r}, but the fields' spatial dims are {list(dims)}"
            )

    elif argument is not None and not alike:
        raise GridError(f"{name}={argument!r} must say it by dim: {name}={{{dims[0]!r}: {argument!r}}}")


def _halo_widths(dim: str, size: int, halo: HaloWidth | Mapping[str, HaloWidth] | None) -> tuple[int, int]:
    width: Any = (halo.get(dim, 0) if isinstance(halo, Mapping) else halo) or 0
    pair: Any = (width, width) if is_whole_number(width) else width
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(is_whole_number, pair)):
        raise HaloError(f"halo={{{dim!r}: {width!r}}} must be a number of rows, or (below, above)")
    below, above = int(pair[0]), int(pair[1])
    if min(below, above) < 0:
        raise HaloError(f"halo={{{dim!r}: {width}}} is negative; a halo is the rows held beyond those owned")
    if max(below, above) > size:
        raise HaloError(
            f"halo={{{dim!r}: {width}}} is larger than the domain: {dim!r} has {size} rows; use at most {size}"
        )
    return below, above
