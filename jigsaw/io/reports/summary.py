"""Summary of a store in facts: variables by their canonical dims, levels, time, grid, chunks, sizes, attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError, MissingArrayError, ReadError
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.formats.store import open_store
from jigsaw.io.series import coords
from jigsaw.io.series.cell_grid import CellGrid, cell_grid_of
from jigsaw.io.series.fields import SHORT_NAMES, channels_of_fields
from jigsaw.io.series.store_survey import StoreSurvey, StoreVariable
from jigsaw.io.series.times import TimeAxis, decode_times
from jigsaw.io.volumes.volume import affine_of_array, orientation_codes, voxel_spacing
from jigsaw.io.writing.cf import plain_attribute
from jigsaw.io.writing.deliver import completeness_from_attrs

_CHUNKS_SAMPLED = 32
_GAPS_SHOWN = 5
_FORMAT_MAGIC = {
    b"\x89HDF": "HDF5 or NetCDF-4",
    b"CDF\x01": "NetCDF-3",
    b"CDF\x02": "NetCDF-3, 64-bit",
    b"CDF\x05": "CDF-5",
}
_OWN_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset"}
_REGISTERED = {32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}
_HDF5_FILTERS = _OWN_FILTERS | _REGISTERED
_SHOWN_ELSEWHERE = ("units", "long_name", "standard_name", "scale_factor", "add_offset", "_FillValue", "missing_value")


@dataclass(frozen=True)
class DimSummary:
    """The rows along a spatial dim: `step` is None where they are not equally far apart."""

    name: str
    size: int
    first: float
    last: float
    step: float | None
    units: str


@dataclass(frozen=True)
class GridSummary:
    """The space of some variables: `extent` says how much of the globe, or that it is a volume or a plane."""

    axes: tuple[DimSummary, ...]
    extent: str
    order: str


@dataclass(frozen=True)
class TimeSummary:
    """A time axis; each gap lies between the two times given."""

    count: int
    first: str
    last: str
    step: str
    calendar: str
    gaps: tuple[tuple[str, str], ...]
    gap_count: int


@dataclass(frozen=True)
class VolumeSummary:
    """Place of an image in the world, by its affine; all along x, y, z."""

    name: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    units: str
    orientation: str
    origin: tuple[float, ...]


@dataclass(frozen=True)
class VariableSummary:
    """One variable; `stored_bytes` is estimated from some of its chunks, None where the store does not tell."""

    name: str
    short_name: str
    dims: dict[str, int]
    dtype: str
    units: str
    long_name: str
    levels: tuple[float, ...] | tuple[str, ...]
    level_units: str
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    chunk_count: int
    codec: str
    decoded_bytes: int
    stored_bytes: int | None
    scale: float
    offset: float
    missing: tuple[float, ...]
    attrs: dict[str, Any]
    grid: int
    times: int | None


@dataclass(frozen=True)
class StoreSummary:
    """Contents of a store; a variable's `grid` and `times` are indices into those of the store."""

    url: str
    format: str
    complete: str
    grids: tuple[GridSummary, ...]
    times: tuple[TimeSummary, ...]
    variables: tuple[VariableSummary, ...]
    volumes: tuple[VolumeSummary, ...]
    others: dict[str, str]
    attrs: dict[str, Any]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return plain_attribute(asdict(self))


def summarize_store(
    store: Any,
    fields: Sequence[str] | None = None,
    dims: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> StoreSummary:
    """Summarize a store, or the variables that `fields` name; `options` are those of `open_store`.

    It reads coordinates, and asks where a few chunks of each variable lie.

    Raises: a `ReadError` as `jigsaw.io.open` does.
    """
    opened = open_store(store, options)
    survey = StoreSurvey(opened, dims)
    names = survey.variables if fields is None else {c.array: None for c in channels_of_fields(fields, survey.levels)}
    if fields is None and not opened.arrays:
        raise MissingArrayError(f"the store {opened.url} has no arrays")
    grids: dict[GridSummary, int] = {}
    times: dict[TimeSummary, int] = {}
    kind = _format_name(store)
    in_objects = kind.startswith("Zarr")
    described = [_summarize_variable(survey, survey.variables[name], in_objects, grids, times) for name in names]
    others: dict[str, str] = {}
    for name, table in opened.arrays.items():
        if fields is None and name not in survey.variables:
            shape = ", ".join(f"{d} {n}" for d, n in zip(table.dims, table.shape, strict=True))
            others[name] = f"{np.dtype(table.dtype).name} ({shape})"
    attrs = {str(k): v for k, v in opened.attrs.items() if not str(k).startswith("jigsaw_")}
    return StoreSummary(
        url=opened.url,
        format=kind,
        complete=_completeness_text(opened),
        grids=tuple(grids),
        times=tuple(times),
        variables=tuple(described),
        volumes=tuple(v for v in (_summarize_volume(opened, survey.variables[name]) for name in names) if v),
        others=others,
        attrs=attrs,
        notes=(*opened.notes, *_why_no_fields(survey)),
    )


def _why_no_fields(survey: StoreSurvey) -> tuple[str, ...]:
    """Return the reason why nothing in a store is a field, if so: cells, say, are not on a grid of rows."""
    try:
        survey.check_fields()
    except FieldError as e:
        return (str(e),)
    return ()


def _summarize_variable(
    survey: StoreSurvey,
    variable: StoreVariable,
    in_objects: bool,
    grids: dict[GridSummary, int],
    times: dict[TimeSummary, int],
) -> VariableSummary:
    table, levels = variable.table, survey.levels[variable.table.name]
    grid, time = _summarize_grid(survey, variable), _summarize_times(survey, variable)
    attrs, (chunks, chunk_count, codec, stored_bytes) = table.attrs, _summarize_storage(survey.store, table)
    return VariableSummary(
        name=table.name,
        short_name=SHORT_NAMES.get(table.name, ""),
        dims=dict(zip(variable.roles, table.shape, strict=True)),
        dtype=np.dtype(table.dtype).name,
        units=str(attrs.get("units", "")),
        long_name=str(attrs.get("long_name", attrs.get("standard_name", ""))),
        levels=(levels.names or tuple(levels.values.tolist())) if levels else (),
        level_units=levels.units if levels else "",
        chunks=chunks,
        shards=_shard_shape(table) if in_objects else None,
        chunk_count=chunk_count,
        codec=codec,
        decoded_bytes=prod(table.shape) * table.grid.itemsize,
        stored_bytes=stored_bytes,
        scale=table.scale,
        offset=table.offset,
        missing=tuple(table.masks),
        attrs={str(k): v for k, v in attrs.items() if k not in _SHOWN_ELSEWHERE},
        grid=grids.setdefault(grid, len(grids)),
        times=None if time is None else times.setdefault(time, len(times)),
    )


def _summarize_volume(store: ArrayStore, variable: StoreVariable) -> VolumeSummary | None:
    affine = affine_of_array(store, variable.table)
    dims = [d for d in "xyz" if d in variable.space]
    if affine is None or not dims:
        return None
    units = variable.table.attrs.get("space_units", store.attrs.get("space_units", ""))
    codes = orientation_codes(affine)
    return VolumeSummary(
        variable.table.name,
        tuple(variable.size(d) for d in dims),
        tuple(float(f"{step:.6g}") for step in voxel_spacing(affine, dims)),
        str(units),
        "".join(codes["xyz".index(d)] for d in dims),
        tuple(float(f"{x:.6g}") for x in affine[:3, 3]),
    )


# -- grid and time -----------------------------------------------------------------------------------------------------


def _summarize_grid(survey: StoreSurvey, variable: StoreVariable) -> GridSummary:
    values = {role: survey.values(variable, role) for role in variable.space}
    axes = tuple(_summarize_dim(role, v, survey.attrs(variable, role)) for role, v in values.items())
    counted = [role for role in ("lat", "lon") if role in values and not survey.states(variable, role)]
    cells = cell_grid_of(survey, variable)
    if cells is not None:
        return GridSummary(axes, _cells_extent(cells), "")
    if counted:
        return GridSummary(axes, f"no coordinate along {', '.join(counted)}: rows are counted", "")
    return GridSummary(axes, _grid_extent(values), _order_text(values))


def _summarize_dim(role: str, values: NDArray[Any], attrs: Mapping[str, Any]) -> DimSummary:
    # strings have no distances, so their places are used instead
    numbers = values.astype(np.float64) if values.dtype.kind in "fiu" else np.arange(len(values), dtype=np.float64)
    steps = np.diff(numbers)
    # coordinates are often rounded to float32
    even = len(steps) > 0 and bool(np.ptp(steps) <= 1e-3 * abs(steps.mean()) + 1e-9)
    first, last = (float(f"{numbers[i]:.7g}") for i in (0, -1)) if len(numbers) else (0.0, 0.0)
    step = float(f"{steps.mean():.6g}") if even else None
    return DimSummary(role, len(values), first, last, step, str(attrs.get("units", "")))


def _cells_extent(grid: CellGrid) -> str:
    if grid.nside is not None:
        sphere = 12 * grid.nside**2
        part = "" if grid.cells == sphere else f", {grid.cells} of {sphere} cells"
        return f"HEALPix of nside {grid.nside}, {'nested' if grid.nested else 'ring'}{part}"
    if grid.points is None:
        return "cells whose places the store does not say"
    lat, lon = grid.points
    return f"points, lat {lat.min():g} to {lat.max():g}, lon {lon.min():g} to {lon.max():g}"


def _grid_extent(values: Mapping[str, NDArray[Any]]) -> str:
    if "lat" not in values or "lon" not in values:
        return "a volume" if len(values) == 3 else "a plane"
    try:
        coords.check_lon_periodic(values["lon"])
    except GridError:
        return "a region"
    lat = values["lat"].astype(np.float64)
    apart = abs(lat[-1] - lat[0]) / max(len(lat) - 1, 1)
    return "the globe" if abs(lat[-1] - lat[0]) + 2.5 * apart >= 180 else "a band around the globe"


def _order_text(values: Mapping[str, NDArray[Any]]) -> str:
    if "lat" not in values:
        return ""
    order = "north first" if values["lat"][0] > values["lat"][-1] else "south first"
    if "lon" not in values:
        return order
    return f"{order}, longitudes {'-180..180' if np.min(values['lon']) < 0 else '0..360'}"


def _summarize_times(survey: StoreSurvey, variable: StoreVariable) -> TimeSummary | None:
    if "time" not in variable.roles:
        return None
    attrs = survey.attrs(variable, "time")
    axis = decode_times(survey.values(variable, "time"), attrs)
    gaps = [(str(axis.stamps[i]), str(axis.stamps[i + 1])) for i in axis.breaks]
    own = getattr(axis.stamps[0], "calendar", "standard") if len(axis) else "standard"
    calendar = "" if axis.digits is None else str(attrs.get("calendar", own))
    ends = (str(axis.stamps[0]), str(axis.stamps[-1])) if len(axis) else ("", "")
    return TimeSummary(len(axis), *ends, _step_text(axis), calendar, tuple(gaps[:_GAPS_SHOWN]), len(gaps))


def _step_text(axis: TimeAxis) -> str:
    if len(axis) < 2:
        return ""
    if axis.monthly:
        return f"{axis.usual} months" if axis.usual > 1 else "1 month"
    if axis.digits is None and axis.stamps.dtype.kind != "m":
        return f"{axis.usual / 1e6:g}"
    hours = axis.usual / 3.6e9
    return f"{hours / 24:g} d" if hours >= 24 else f"{hours:g} h" if hours >= 1 else f"{hours * 60:g} min"


# -- how it is stored --------------------------------------------------------------------------------------------------


def _summarize_storage(store: ArrayStore, table: ArrayTable) -> tuple[tuple[int, ...], int, str, int | None]:
    """Return the chunks of an array, their number, their codec, and their stored size where it is known.

    Of an array of many files they are the chunks of the first, and the sizes follow from those of some.
    """
    if table.members is None:
        return table.chunks, prod(table.grid.counts), codec_text(table), _estimated_bytes(table)
    names = table.members.names
    at = np.unique(np.linspace(0, len(names) - 1, min(len(names), _CHUNKS_SAMPLED)).astype(int))
    tables = [store.arrays[names[int(i)]] for i in at]
    known = [size for size in map(_estimated_bytes, tables) if size is not None]
    times = len(names) / len(tables)
    count = round(sum(prod(t.grid.counts) for t in tables) * times)
    codecs = " or ".join(dict.fromkeys(map(codec_text, tables)))
    return tables[0].chunks, count, codecs, round(sum(known) * times) if len(known) == len(tables) else None


def codec_text(table: ArrayTable) -> str:
    """Name the compression of the chunks, as far as the reader needs to know."""
    decoder = table.decoder
    if decoder is None:
        return "read by its library"
    if isinstance(decoder, CodecDecoder):
        return " + ".join(part for part in (decoder.compression, "crc32c" if decoder.checked else "") if part) or "none"
    if decoder.is_plain:
        return "none"
    filters: Sequence[Any] = getattr(decoder, "filters", ())
    return " + ".join(_HDF5_FILTERS.get(f.id, f"filter {f.id}") for f in filters) or "compressed"


def _shard_shape(table: ArrayTable) -> tuple[int, ...] | None:
    """Return the extent of the object that holds the first chunk along each dim, where it holds several chunks."""
    if not table.grid.ndim or table.decoder is None or 0 in table.grid.counts:
        return None
    first = table.finder.path((0,) * table.grid.ndim)
    held: list[int] = []
    for d, count in enumerate(table.grid.counts):
        k = 1
        while k < count and table.finder.path(tuple(k if e == d else 0 for e in range(table.grid.ndim))) == first:
            k += 1
        held.append(k)
    return None if max(held) == 1 else tuple(k * c for k, c in zip(held, table.chunks, strict=True))


def _estimated_bytes(table: ArrayTable) -> int | None:
    count = prod(table.grid.counts)
    if not count:
        return 0
    try:
        at = np.unique(np.linspace(0, count - 1, min(count, _CHUNKS_SAMPLED)).astype(int))
        refs = [table.finder.locate(tuple(int(i) for i in np.unravel_index(k, table.grid.counts))) for k in at]
    except ReadError:
        return None
    lengths = [0 if ref is None else ref.length for ref in refs]
    known = [n for n in lengths if n is not None]
    return round(sum(known) / len(known) * count) if len(known) == len(lengths) else None


def _format_name(argument: Any) -> str:
    if not isinstance(argument, str | Path):
        return f"{type(argument).__module__.partition('.')[0]} {type(argument).__name__}"
    path = Path(argument)
    if path.is_dir():
        return "Zarr v3" if (path / "zarr.json").exists() else "Zarr v2"
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(8)
        if path.name.lower().endswith((".nii", ".nii.gz")):
            return "NIfTI, gzip" if path.suffix.lower() == ".gz" else "NIfTI"
        known = (name for magic, name in _FORMAT_MAGIC.items() if head.startswith(magic))
        return next(known, path.suffix.lstrip(".") or "raw")
    return "a remote store" if "://" in str(argument) else "a store of many files"


def _completeness_text(store: ArrayStore) -> str:
    done = completeness_from_attrs(store.attrs)
    if done is None:
        return ""
    whole = f"{done.steps} steps of {done.append_dim}" if done.append_dim else "one piece"
    return f"written by jigsaw: {whole}, {'closed' if done.closed else 'not closed'}"
