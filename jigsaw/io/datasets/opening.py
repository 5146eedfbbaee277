"""`open`: the user's arguments for a store, checked, as a `Dataset`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import FieldError, GridError, WindowError
from jigsaw.geometry.cut import SplitRule
from jigsaw.geometry.layout import DimSpec
from jigsaw.io.arguments import checked_choice, checked_mapping
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.samples import checked_dtype, mesh_and_axes, warn_of_idle_readers
from jigsaw.io.formats.disk_cache import DiskCache
from jigsaw.io.formats.store import StoreSource
from jigsaw.io.reading.chunk_readers import PLAN_MODES
from jigsaw.io.series.boundary import BoundaryRule, vector_channels
from jigsaw.io.series.cell_grid import CELL_ORDERS, CellGrid, cell_grid_of, cells_along_curve, part_of_cells
from jigsaw.io.series.choices import choose_positions, time_origins, window_anchors, window_offsets
from jigsaw.io.series.fields import FieldChannel, channels_of_fields
from jigsaw.io.series.forcings import GridForcings, geographic_angles
from jigsaw.io.series.request import MISSING_RULES, HaloWidth, NanRule, SampleSpace, StoredOrder
from jigsaw.io.series.row_order import make_row_order
from jigsaw.io.series.statistics import NormalizeArgument, channel_scales, with_stored_statistics
from jigsaw.io.series.step_sums import StepSum, summed_channels
from jigsaw.io.series.store_survey import RowOrder, StoreSurvey, StoreVariable, check_no_sums
from jigsaw.io.series.times import TimeAxis

_READ_MODES = ("auto", *PLAN_MODES)


def open(
    store: Any,
    *,
    mesh: DeviceMesh | Mapping[str, int],
    fields: Sequence[str] | None = None,
    target_fields: Sequence[str] | None = None,
    spec: Mapping[str, DimSpec] | None = None,
    halo: HaloWidth | Mapping[str, HaloWidth] | None = None,
    boundary: Mapping[str, BoundaryRule] | str | None = None,
    vectors: Sequence[str] | None = None,
    inputs: Sequence[Any] = (0,),
    targets: Sequence[Any] = (),
    time: slice | tuple[Any, Any] | None = None,
    every: Any = 1,
    sums: Mapping[str, Any] | None = None,
    along: str = "time",
    select: Mapping[str, Any] | None = None,
    stack: str | None = None,
    dims: Mapping[str, str] | None = None,
    normalize: NormalizeArgument = None,
    nan: NanRule | Mapping[str, NanRule] = "keep",
    missing: str = "error",
    dtype: str | torch.dtype = "float32",
    lat_order: str = "store",
    lon: str = "store",
    region: Mapping[str, Any] | None = None,
    order: str = "store",
    split: SplitRule | Mapping[str, SplitRule] = "balanced",
    align: int | Mapping[str, int] = 1,
    mode: str = "auto",
    forcings: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    disk_cache: DiskCache | None = None,
    level: int | None = None,
    channels: Sequence[str] | None = None,
) -> Dataset:
    r"""Open the samples of a store, cut over `mesh` while they are read.

    A sample at anchor a is its input, the steps ``a + inputs``, and its target, the steps ``a + targets``. Both are
    tiles [T, C, \*space]: space is ``lat, lon`` on the globe, ``cell`` on HEALPix, ICON and other grids of cells, and
    ``z, y, x`` or ``y, x`` elsewhere.

    - `store`: a path (Zarr, NetCDF, HDF5, NIfTI, `.npy`), a URL, a glob or a list (along time, or of other
      fields), an `xarray.Dataset` (read through xarray, as it is), a user's own `ArraySource`, or an opened store;
    - `mesh`: a `DeviceMesh`, or axis sizes as integers, to plan without ranks;
    - `fields`: names (see `jigsaw.io.series.fields`), in channel order; by default every variable on the first one's
      grid, those of Zarr stores and xarray datasets by name;
    - `target_fields`: those of the target, by default `fields` without those that lack time; the union is read for
      every step;
    - `spec`: the axis, or axes, that cut each spatial dim; by default the axis of its own name (``lat``, whatever the
      store calls it). `data` cuts batches. An axis that the mesh lacks counts as size 1, and ranks along an axis that
      cuts nothing read the same;
    - `halo`: rows of the input beyond those owned, a number or (below, above), for all spatial dims or by dim; targets
      do not have a halo;
    - `boundary`: the content of the halo beyond the ends of a dim (see `jigsaw.io.series.boundary`). ``"periodic"``
      takes the rows of the other end, ``"pole"`` (of ``lat``) those across the pole. Other rules are ``"reflect"``,
      ``"replicate"`` or ``("fill", number)``. By default, ``"clip"``, the halo ends with the domain. ``"store"`` wraps
      the dims that the store says are periodic: The Well's;
    - `vectors`: the fields that change sign across a pole; by default the components of wind, by their names or CF
      standard names;
    - `inputs`, `targets`: steps relative to the anchor, as numbers of steps or as durations: ``["-6h", "0h"]``;
    - `time`: a slice or pair of dates, both ends included, or of step positions; no window crosses a gap;
    - `every`: takes every n-th step, from the first: ``"6h"``, or a number of steps;
      refused for arrays that are sums over a step (by `cell_methods`, or GRIB's step type), unless `sums` has them;
    - `sums`: by field, how long a sum its value is: ``{"tp": "6h"}`` adds up the stored steps of the six hours up to
      each step, whatever `every` takes. Steps without all of them are left out;
    - `along`: the dim that windows run along; ``"lead"`` (or its own name, such as ``"prediction_timedelta"``) for the
      lead times of a forecast;
    - `select`: the choice along any further dim (members, lead or initial times), by its name or as `member`, `lead`,
      `init`. An integer is a position; a float, string, date or duration is a value (``"24h"``). A list, a slice or
      pair of ends, or ``"all"`` makes samples of each;
    - `stack`: a further dim that is the first of each sample, such as ``"member"``: [member, T, C, \*space]; all places
      along it, or those of `select`;
    - `dims`: the roles of the store's dims, where they are not found: ``{"time": "valid_time", "lat": "j"}``;
    - `normalize`: the path of a file of statistics (see `jigsaw.io.statistics`), a `jigsaw.io.Statistics`, ``{"t2m":
      (mean, std)}`` by field, or ``"store"`` for the store's own (anemoi's); fused into the read;
    - `nan`: ``"keep"``, ``"raise"``, or the number that replaces missing values in the result; or these by field, as in
      ``{"sst": 0.0, "t2m": "raise"}``, where other fields keep theirs;
    - `missing`: the rule for chunks that are not in the store: ``"error"``, or ``"fill"`` for the array's fill value.
      Use ``"fill"`` where chunks are known to be unwritten, or left out because they hold fill values alone. A store
      whose index says so itself (HDF5, within a shard, Icechunk, references) is believed;
    - `dtype`: of the tiles;
    - `lat_order`: ``"store"``, ``"north-first"`` or ``"south-first"``;
    - `lon`: ``"store"``, or ``"0..360"`` or ``"-180..180"``: longitudes rise within these, and the grid is rolled;
    - `region`: by dim of space two coordinates, both ends included, or a slice of rows: ``{"lat": (30, 60), "lon":
      (-10, 40)}``. Longitudes count eastward from the first. The other rows are not read, and beyond the region nothing
      is. Of cells those between the two are read, or a slice of them: ``{"cell": slice(0, 100)}``. ``"boundary"`` adds
      cells around these: a number of rings of neighbors, or a distance, ``"300 km"``. They are cells of the sample, and
      `grid.boundary_mask` says which;
    - `order`: for cells that are stored as points or in rings, ``"store"`` or ``"curve"``: along Hilbert's curve, so
      that pieces have short borders. The dataset's `grid` has this order, too; ``Writer(like=data)`` writes in the
      store's order;
    - `split`, `align`: where the cuts lie (see `jigsaw.Layout`), for all spatial dims or by dim;
    - `mode`: ``"cooperative"`` (each chunk is decoded by one rank), ``"neighbors"`` (by every rank that owns rows of
      it, which also sends the halos), ``"independent"``, or ``"auto"``, the cheapest;
    - `forcings`: names (see `jigsaw.io.series.forcings`), such as ``["cos_zenith", "day_progress", "latlon"]``. They
      are computed, not read, as the last channels of the input, and at the target's times as `target_forcings`;
    - `options`: of the object store behind a URL: credentials, region, endpoint, time-outs, retries;
    - `disk_cache`: a `DiskCache`, where fetched bytes are kept on a local disk;
    - `level`: of an OME-Zarr image, 0 the finest and the default;
    - `channels`: the names along a dim of channels (``[time, channel, lat, lon]``) where the store lacks them.

    Missing values are those that ``_FillValue`` and ``missing_value`` name; ``valid_min``, ``valid_max`` and
    ``valid_range`` change nothing, as in xarray. The `fill_value` of a Zarr v2 array also names them, except for a 0
    where values are not packed: stored zeros stay zeros, and chunks that were never written are zeros (xarray makes
    both NaN). To read such zeros as missing, give the array the attribute ``_FillValue``, 0, and choose their
    replacement by `nan`. Chunks of Zarr v3 that were never written are its `fill_value`, whatever that is. What
    NetCDF-4 lacks at the end of an unlimited dim is missing. An existing coordinate is used unchanged, or refused. A
    dim without one gets 0, 1, 2…; `Dataset.counted` lists the dims of space that did.

    *Sends*: nothing.

    Raises: a `ReadError` of `jigsaw.errors`, or `ShardingError` for impossible cuts, naming the request and what
    exists, alike on every rank.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> data = jigsaw.io.open("globe.zarr", mesh=mesh, fields=["t2m", "u10"], inputs=["-6h", "0h"], targets=["6h"])
    >>> len(data), data.fields
    (6, ('t2m', 'u10'))
    >>> sample = data[0]
    >>> sample.input.shape, sample.target.shape
    (torch.Size([2, 2, 9, 16]), torch.Size([1, 2, 9, 16]))
    >>> sample.target.local[0, 0].mean().item(), sample.target_times.astype("datetime64[h]")
    (282.0, array(['2020-01-01T12'], dtype='datetime64[h]'))
    """
    select = checked_mapping("select", select, "{'member': 0}", GridError)
    source = StoreSource(store, options, disk_cache, level)
    survey = StoreSurvey(source.store, dims, along, channels)
    survey.check_fields()
    normalize = with_stored_statistics(normalize, source.store)
    field_names = _default_fields(survey, {stack, *(select or ())}) if fields is None else fields
    chosen, given_channels, target_channels = _channels_to_read(survey, field_names, target_fields, targets)
    variables = survey.of(chosen)
    grid = survey.grid(variables)
    summed = summed_channels(checked_mapping("sums", sums, "{'tp': '6h'}", WindowError), chosen)
    axis = _selected_steps(survey, variables, time, every, chosen, summed)
    device_mesh, device, axes = mesh_and_axes(mesh)
    if device_mesh is not None and spec is None:
        warn_of_idle_readers(axes, tuple(grid))
    rules = _stored_boundary(boundary, survey, variables[0]) if isinstance(boundary, str) else boundary
    cells = cell_grid_of(survey, variables[0], source)
    cells, turn, whole_coords = _rows_in_order(cells, survey, variables[0], grid, lat_order, lon, region, order)
    frame = SampleSpace.of({d: len(v) for d, v in whole_coords.items()}, axes, spec, halo, rules, split, align)
    frame = frame.on(whole_coords)
    places = geographic_angles(whole_coords, survey, variables[0], cells, turn, forcings) if forcings else None
    forced = places and GridForcings.of(forcings, places, [c.name for c in chosen], normalize)
    scale, offset = channel_scales(chosen, forced.unnamed(normalize) if forced else normalize)
    choices, stacked = choose_positions(survey, variables, select, stack)
    before, after = window_offsets("inputs", inputs, axis), window_offsets("targets", targets, axis)
    dataset = Dataset(
        source=source,
        mesh=device_mesh,
        device=device,
        frame=frame,
        channels=chosen,
        input_channels=given_channels,
        target_channels=target_channels,
        roles={v.table.name: v.roles for v in variables},
        inputs=before,
        targets=after,
        anchors=window_anchors(0, 1 if axis is None else len(axis), before, after, axis.breaks if axis else ()),
        times=np.arange(1) if axis is None else axis.stamps,  # fields without time are one step
        stored_steps=np.arange(1) if axis is None else axis.at,
        choices=choices,
        stacked=stacked,
        origins=time_origins(survey, variables),
        whole_coords=whole_coords,
        scale=scale,
        offset=offset,
        dtype=checked_dtype("dtype", dtype),
        nan=_nan_rules(nan, chosen),
        missing=checked_choice("missing", missing, MISSING_RULES),
        mode=checked_choice("mode", mode, _READ_MODES),
        turn=turn,
        forcings=forced,
        vectors=_turning_channels(chosen, vectors, survey, frame),
        counted=tuple(dim for dim in grid if not survey.states(variables[0], dim)),
        cells=cells,
        boundary_types=survey.boundary_types(variables[0]),
    )
    dataset = _with_sums(dataset, summed, survey, time) if summed else dataset
    if forced:
        forced.check(dataset.input_times(0))
    dataset.plan_of(dataset.reading([0]))  # what cannot be planned is refused here, not at the first batch
    return dataset


def _channels_to_read(
    survey: StoreSurvey, fields: Sequence[str], target_fields: Sequence[str] | None, targets: Sequence[Any]
) -> tuple[tuple[FieldChannel, ...], tuple[int, ...], tuple[int, ...]]:
    input_channels = channels_of_fields(fields, survey.levels)
    if target_fields is None:
        every = tuple(range(len(input_channels)))
        moving = tuple(i for i in every if "time" in survey.variables[input_channels[i].array].roles)
        return input_channels, every, moving or every  # a static field is known already, unless all fields are static
    if len(targets) == 0:
        raise FieldError(f"target_fields={list(target_fields)} needs targets, such as targets=[1]; there are none")
    target_channels = channels_of_fields(target_fields, survey.levels, "target_fields")
    # Input t2m, u10, target u10, tp: t2m, u10 and tp are read, and the target picks 1 and 2.  In reverse, so that of a
    # field that is named twice the first channel is picked.
    place = {(c.array, c.level): i for i, c in reversed([*enumerate(input_channels)])}
    more = [c for c in target_channels if (c.array, c.level) not in place]
    place |= {(c.array, c.level): len(input_channels) + i for i, c in enumerate(more)}
    target_places = tuple(place[c.array, c.level] for c in target_channels)
    return (*input_channels, *more), tuple(range(len(input_channels))), target_places


def _selected_steps(
    survey: StoreSurvey,
    variables: Sequence[StoreVariable],
    time: Any,
    every: Any,
    channels: Sequence[FieldChannel],
    summed: Mapping[int, Any],
) -> TimeAxis | None:
    axis = survey.time(variables)
    if axis is None:
        sums = {channels[i].field: length for i, length in summed.items()}
        for name, value, default in (("time", time, None), ("every", every, 1), ("sums", sums, {})):
            if isinstance(value, np.ndarray) or value != default:
                raise WindowError(f"{name}={value!r} selects steps, but the fields have no time dim")
        return None
    chosen = axis.series(time, every)
    if chosen.usual > axis.usual:
        long = {i for i, length in summed.items() if axis.steps_in("sums", length) * axis.usual >= chosen.usual}
        skipped = {c.array for i, c in enumerate(channels) if i not in long}  # a sum of one level is not that of all
        check_no_sums([v for v in variables if v.table.name in skipped], every)
    return chosen


def _with_sums(dataset: Dataset, summed: Mapping[int, Any], survey: StoreSurvey, time: Any) -> Dataset:
    """Return the dataset with a channel for each earlier step of a sum, and the anchors that have all of them."""
    axis = survey.time(dataset.variables)
    channels = list(dataset.channels)
    static = [channels[i].field for i in summed if "time" not in survey.variables[channels[i].array].roles]
    if axis is None or static:
        raise FieldError(f"sums has {static}, which have no time; leave them out")
    series, rules = axis.series(time, 1), dataset.nan
    scale, offset, sums = list(dataset.scale), list(dataset.offset), list[StepSum]()
    nan = list(rules) if isinstance(rules, tuple) else [rules] * len(channels)
    vectors = list(dataset.vectors)
    for i, length in summed.items():
        count = series.steps_in(f"sums of {channels[i].field!r}", length)
        if count < 1:
            raise WindowError(
                f"sums={{{channels[i].field!r}: {length!r}}} must be at least one step of the series, "
                f"{series.usual_length()}"
            )
        earlier = range(len(channels), len(channels) + count - 1)
        fill = None if isinstance(nan[i], str) else float(nan[i])
        nan[i] = nan[i] if fill is None else "keep"  # what replaces missing values replaces missing sums
        channels += [replace(channels[i], earlier=k) for k in range(1, count)]
        scale += [scale[i] for _ in earlier]
        offset += [0.0 for _ in earlier]  # (x - mean) / std of a sum: the offset once
        nan += [nan[i] for _ in earlier]
        vectors += earlier if i in vectors else ()
        sums.append(StepSum(i, tuple(earlier), fill))
    longest = max(sums, key=lambda s: len(s.earlier))
    wanted = f"sums={{{channels[longest.channel].field!r}: {summed[longest.channel]!r}}}"
    return dataset.changed(
        channels=tuple(channels),
        scale=tuple(scale),
        offset=tuple(offset),
        nan=tuple(nan),
        vectors=tuple(vectors),
        sums=tuple(sums),
        anchors=_whole_anchors(dataset, series, 1 + len(longest.earlier), wanted),
    )


def _whole_anchors(dataset: Dataset, series: TimeAxis, count: int, wanted: str) -> NDArray[np.int64]:
    """Return the anchors of whose steps each has the `count` steps up to it, in the series and without a gap."""
    at, runs = np.searchsorted(series.at, dataset.stored_steps), np.zeros(len(series), np.int64)
    runs[np.array(series.breaks, np.int64) + 1] = 1
    runs = np.cumsum(runs)
    is_whole = (at >= count - 1) & (runs[at] == runs[np.maximum(at - count + 1, 0)])
    kept = dataset.anchors[is_whole[dataset.anchors[:, None] + [*dataset.inputs, *dataset.targets]].all(axis=1)]
    if not len(kept):
        raise WindowError(
            f"{wanted} needs {count} steps of {series.usual_length()} without a gap up to each step of a sample, and "
            f"no sample of the series of {len(series)} has them; sum over fewer steps, or select a longer time"
        )
    return kept


def _default_fields(survey: StoreSurvey, named: Collection[str | None]) -> list[str]:
    """Return every numeric variable on the grid of the first, without those with a choice that is not `named`, unless
    all have one. A dim is named by the store's own name, or by its role.
    """
    listed = [v for v in survey.variables.values() if not v.table.by_name_only]
    every = [v for v in listed if np.dtype(v.table.dtype).kind in "fiu"]
    numeric = [v for v in every if all(v.table.dims[d] in named or v.roles[d] in named for d in v.unchosen)] or every
    if not numeric:
        raise FieldError(f"the store {survey.store.url} has no variable on a lat-lon grid, on cells or in a volume")
    first = {d: numeric[0].size(d) for d in numeric[0].space}
    return [v.table.name for v in numeric if {d: v.size(d) for d in v.space} == first]


def _stored_boundary(boundary: str, survey: StoreSurvey, variable: StoreVariable) -> dict[str, BoundaryRule]:
    edges = survey.boundary_types(variable)
    if boundary != "store":
        by_dim = f"boundary={{{variable.space[0]!r}: {boundary!r}}}"
        raise GridError(f"boundary={boundary!r} must say it by dim: {by_dim}, or be 'store'")
    if not edges:
        raise GridError(
            f"boundary='store' takes what the store says of its boundaries, and {survey.store.url} says nothing; give "
            "them by dim: boundary={'lon': 'periodic'}"
        )
    return {dim: "periodic" for dim, ends in edges.items() if ends == ("periodic", "periodic")}


def _turning_channels(
    chosen: Sequence[FieldChannel], vectors: Sequence[str] | None, survey: StoreSurvey, frame: SampleSpace
) -> tuple[int, ...]:
    """Return the channels that change sign across a pole, where there is one."""
    attrs = {c.array: survey.variables[c.array].table.attrs for c in chosen}
    changing = vector_channels(chosen, vectors, attrs)
    if any(b.rule == "pole" for b in frame.boundary):
        return changing
    if vectors is not None:
        raise FieldError(
            f"vectors={list(vectors)} change sign across a pole; give boundary={{'lat': 'pole'}}, or leave them out"
        )
    return ()


def _rows_in_order(
    cells: CellGrid | None,
    survey: StoreSurvey,
    variable: StoreVariable,
    grid: Mapping[str, NDArray[Any]],
    lat_order: str,
    lon: str,
    region: Any,
    order: str,
) -> tuple[CellGrid | None, RowOrder, Mapping[str, NDArray[Any]]]:
    """Return the cells, if any, the order of the rows that are read, and their coordinates."""
    of_rows = region if cells is None else None  # cells lie along one dim, and a region picks some of them
    turn, whole_coords = make_row_order(survey, variable, grid, lat_order, lon, of_rows)
    along_curve = checked_choice("order", order, CELL_ORDERS, GridError) == "curve"
    if not along_curve and (cells is None or region is None):
        return cells, turn, whole_coords
    rows, part = (np.arange(0), None) if cells is None else part_of_cells(cells, {} if region is None else region)
    if along_curve:
        of_curve = cells_along_curve(part, variable)
        rows, part = rows[of_curve], part and part.in_order(of_curve)
    ordered = {dim: values[rows] for dim, values in whole_coords.items()}
    return part, RowOrder(cells=StoredOrder(rows)), ordered


def _nan_rules(nan: NanRule | Mapping[str, NanRule], channels: Sequence[FieldChannel]) -> NanRule | tuple[NanRule, ...]:
    """Return the one rule for missing values, or that of each channel: by its name, its field's or its array's."""
    for rule in nan.values() if isinstance(nan, Mapping) else (nan,):
        if not isinstance(rule, int | float | np.number) and not (isinstance(rule, str) and rule in ("keep", "raise")):
            raise FieldError(f"nan={nan!r} must be 'keep', 'raise' or a number, or these by field: {{'sst': 0.0}}")
    if not isinstance(nan, Mapping):
        return nan
    names = [(c.name, c.field, c.array) for c in channels]
    unknown = sorted(str(key) for key in nan if not any(key in of_channel for of_channel in names))
    if unknown:
        raise FieldError(f"nan has {unknown[0]!r}, which is not a field; the channels are {[c.name for c in channels]}")
    return tuple(next((nan[name] for name in of_channel if name in nan), "keep") for of_channel in names)
