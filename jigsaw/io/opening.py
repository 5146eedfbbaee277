"""`open`: what the user asked of a store, checked, as a `Dataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.io import coords, survey
from jigsaw.io.dataset import DTYPES, Dataset, dtype_name
from jigsaw.io.errors import FieldError, GridError, WindowError
from jigsaw.io.fields import channels
from jigsaw.io.frame import Frame, Width
from jigsaw.io.stats import multiply_add
from jigsaw.io.store import open_store
from jigsaw.io.survey import Survey, Variable
from jigsaw.io.windows import anchors, offsets
from jigsaw.layout import DimSpec, Split
from jigsaw.mesh import axes_of

_MODES = ("auto", "cooperative", "independent")
_LAT_ORDERS = ("store", "north-first", "south-first")


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
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in DTYPES:
        raise FieldError(f"dtype={dtype!r} must be one of {sorted(DTYPES)}")
    return getattr(torch, name)


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
