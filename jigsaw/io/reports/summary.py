"""What is in a store, as facts: variables by their canonical dims, levels, time, grid, chunks, sizes, attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.io import coords
from jigsaw.io.errors import GridError, MissingArrayError, ReadError
from jigsaw.io.fields import PRESSURE, SURFACE, channels
from jigsaw.io.formats.codecs import Decoder
from jigsaw.io.store import open_store
from jigsaw.io.survey import Survey, Variable
from jigsaw.io.table import ArrayTable, Store
from jigsaw.io.times import TimeAxis, decode_times
from jigsaw.io.writing.cf import plain
from jigsaw.io.writing.sink import completeness_of

_SAMPLED = 32
_GAPS = 5
_MAGIC = {b"\x89HDF": "HDF5 or NetCDF-4", b"CDF\x01": "NetCDF-3", b"CDF\x02": "NetCDF-3, 64-bit", b"CDF\x05": "CDF-5"}
_HDF5_FILTERS = {
    1: "deflate",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32015: "zstd",
    32026: "blosc2",
}
_SHORT = {name: row[0] for row in (*SURFACE, *PRESSURE) for name in row}
_SHOWN_ELSEWHERE = ("units", "long_name", "standard_name", "scale_factor", "add_offset", "_FillValue", "missing_value")


@dataclass(frozen=True)
class Axis:
    """The rows along a spatial dim: `step` is None where they are not equally far apart."""

    name: str
    size: int
    first: float
    last: float
    step: float | None
    units: str


@dataclass(frozen=True)
class Grid:
    """The space of some variables: `extent` is global, regional, or that of no globe."""

    axes: tuple[Axis, ...]
    extent: str
    order: str


@dataclass(frozen=True)
class Times:
    """A time axis; each gap lies between the two times given."""

    count: int
    first: str
    last: str
    step: str
    calendar: str
    gaps: tuple[tuple[str, str], ...]
    gap_count: int


@dataclass(frozen=True)
class Described:
    """One variable; `stored_bytes` is estimated from some of its chunks, None where the store does not tell."""

    name: str
    short_name: str
    dims: dict[str, int]
    dtype: str
    units: str
    long_name: str
    levels: tuple[float, ...]
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
class Summary:
    """What is in a store; a variable's `grid` and `times` count into those of the store."""

    url: str
    format: str
    complete: str
    grids: tuple[Grid, ...]
    times: tuple[Times, ...]
    variables: tuple[Described, ...]
    others: dict[str, str]
    attrs: dict[str, Any]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return plain(asdict(self))


def summarize(store: Any, fields: Sequence[str] | None = None, dims: Mapping[str, str] | None = None) -> Summary:
    """What is in a store; of the variables that `fields` name, by default of all.

    Reads coordinates, and asks where a few chunks of each variable lie.

    Raises: a `ReadError` as `jigsaw.io.open` does.
    """
    opened = open_store(store)
    found = Survey(opened, dims)
    wanted = found.variables if fields is None else {c.array: None for c in channels(fields, found.levels)}
    grids: dict[Grid, int] = {}
    times: dict[Times, int] = {}
    kind = _format(store, opened)
    in_objects = kind.startswith("Zarr")
    described = [_described(found, found.variables[name], in_objects, grids, times) for name in wanted]
    if fields is None and not opened.arrays:
        raise MissingArrayError(f"the store {opened.url} has no arrays")
    others = {n: _shape(t) for n, t in opened.arrays.items() if n not in found.variables} if fields is None else {}
    return Summary(
        url=opened.url,
        format=kind,
        complete=_complete(opened),
        grids=tuple(grids),
        times=tuple(times),
        variables=tuple(described),
        others=others,
        attrs={str(k): v for k, v in opened.attrs.items() if not str(k).startswith("jigsaw_")},
        notes=opened.notes,
    )


def _described(
    found: Survey, variable: Variable, in_objects: bool, grids: dict[Grid, int], times: dict[Times, int]
) -> Described:
    table = variable.table
    levels = found.levels[table.name]
    grid, time = _grid(found, variable), _times(found, variable)
    attrs, stored = table.attrs, _storage(found.store, table)
    return Described(
        name=table.name,
        short_name=_SHORT.get(table.name, ""),
        dims=dict(zip(variable.roles, table.shape, strict=True)),
        dtype=np.dtype(table.dtype).name,
        units=str(attrs.get("units", "")),
        long_name=str(attrs.get("long_name", attrs.get("standard_name", ""))),
        levels=tuple(levels.values.tolist()) if levels else (),
        level_units=levels.units if levels else "",
        chunks=stored.chunks,
        shards=_shards(table) if in_objects else None,
        chunk_count=stored.chunk_count,
        codec=stored.codec,
        decoded_bytes=prod(table.shape) * table.itemsize,
        stored_bytes=stored.size,
        scale=table.scale,
        offset=table.offset,
        missing=tuple(table.masks),
        attrs={str(k): v for k, v in attrs.items() if k not in _SHOWN_ELSEWHERE},
        grid=grids.setdefault(grid, len(grids)),
        times=None if time is None else times.setdefault(time, len(times)),
    )


def _shape(table: ArrayTable) -> str:
    dims = ", ".join(f"{d} {n}" for d, n in zip(table.dims, table.shape, strict=True))
    return f"{np.dtype(table.dtype).name} ({dims})"


# -- grid and time -----------------------------------------------------------------------------------------------------


def _grid(found: Survey, variable: Variable) -> Grid:
    values = {role: found.values(variable, role) for role in variable.space}
    axes = tuple(_axis(role, v, found.attrs(variable, role)) for role, v in values.items())
    counted = [role for role in ("lat", "lon") if role in values and not found.states(variable, role)]
    if counted:
        return Grid(axes, f"no coordinate along {', '.join(counted)}: rows are counted", "")
    return Grid(axes, _extent(values), _order(values))


def _axis(role: str, values: NDArray[Any], attrs: Mapping[str, Any]) -> Axis:
    # texts have no distances: their places are told
    numbers = values.astype(np.float64) if values.dtype.kind in "fiu" else np.arange(len(values), dtype=np.float64)
    steps = np.diff(numbers)
    # coordinates are often rounded to float32
    even = len(steps) > 0 and bool(np.ptp(steps) <= 1e-3 * abs(steps.mean()) + 1e-9)
    first, last = (float(f"{numbers[i]:.7g}") for i in (0, -1)) if len(numbers) else (0.0, 0.0)
    step = float(f"{steps.mean():.6g}") if even else None
    return Axis(role, len(values), first, last, step, str(attrs.get("units", "")))


def _extent(values: Mapping[str, NDArray[Any]]) -> str:
    if "lat" not in values or "lon" not in values:
        return "a volume" if len(values) == 3 else "a plane"
    try:
        coords.check_periodic(values["lon"])
    except GridError:
        return "a region"
    lat = values["lat"].astype(np.float64)
    apart = abs(lat[-1] - lat[0]) / max(len(lat) - 1, 1)
    return "the globe" if abs(lat[-1] - lat[0]) + 2.5 * apart >= 180 else "a band around the globe"


def _order(values: Mapping[str, NDArray[Any]]) -> str:
    if "lat" not in values:
        return ""
    order = "north first" if values["lat"][0] > values["lat"][-1] else "south first"
    if "lon" not in values:
        return order
    low = float(np.min(values["lon"]))
    return f"{order}, longitudes {'-180..180' if low < 0 else '0..360'}"


def _times(found: Survey, variable: Variable) -> Times | None:
    if "time" not in variable.roles:
        return None
    attrs = found.attrs(variable, "time")
    axis = decode_times(found.values(variable, "time"), attrs)
    gaps = [(str(axis.stamps[i]), str(axis.stamps[i + 1])) for i in axis.breaks]
    own = getattr(axis.stamps[0], "calendar", "standard") if len(axis) else "standard"
    calendar = "" if axis.digits is None else str(attrs.get("calendar", own))
    ends = (str(axis.stamps[0]), str(axis.stamps[-1])) if len(axis) else ("", "")
    return Times(len(axis), *ends, _step(axis), calendar, tuple(gaps[:_GAPS]), len(gaps))


def _step(axis: TimeAxis) -> str:
    if len(axis) < 2:
        return ""
    if axis.monthly:
        return f"{axis.usual} months" if axis.usual > 1 else "1 month"
    if axis.digits is None and axis.stamps.dtype.kind != "m":
        return f"{axis.usual / 1e6:g}"
    hours = axis.usual / 3.6e9
    return f"{hours / 24:g} d" if hours >= 24 else f"{hours:g} h" if hours >= 1 else f"{hours * 60:g} min"


# -- how it is stored --------------------------------------------------------------------------------------------------


class _Storage(NamedTuple):
    """The chunks of an array, how many there are, and their stored size where it is known."""

    chunks: tuple[int, ...]
    chunk_count: int
    codec: str
    size: int | None


def _storage(store: Store, table: ArrayTable) -> _Storage:
    """Of an array of many files: the chunks of the first, all else from some files spread over the series."""
    if table.members is None:
        return _Storage(table.chunks, prod(table.grid), codec_of(table), _stored(table))
    names = table.members.names
    at = np.unique(np.linspace(0, len(names) - 1, min(len(names), _SAMPLED)).astype(int))
    each = [store.arrays[names[int(i)]] for i in at]
    known = [size for size in map(_stored, each) if size is not None]
    times = len(names) / len(each)
    return _Storage(
        each[0].chunks,
        round(sum(prod(t.grid) for t in each) * times),
        " or ".join(dict.fromkeys(map(codec_of, each))),
        round(sum(known) * times) if len(known) == len(each) else None,
    )


def codec_of(table: ArrayTable) -> str:
    """What the chunks are compressed by, as far as the reader needs to know."""
    decoder = table.decoder
    if decoder is None:
        return "read by its library"
    if isinstance(decoder, Decoder):
        return " + ".join(part for part in (decoder.compression, "crc32c" if decoder.checked else "") if part) or "none"
    if decoder.is_plain:
        return "none"
    filters: Sequence[Any] = getattr(decoder, "filters", ())
    return " + ".join(_HDF5_FILTERS.get(f.id, f"filter {f.id}") for f in filters) or "compressed"


def _shards(table: ArrayTable) -> tuple[int, ...] | None:
    """How far the object that holds the first chunk reaches along each dim, where it holds several."""
    if not table.ndim or table.decoder is None or 0 in table.grid:
        return None
    first = table.path((0,) * table.ndim)
    held: list[int] = []
    for d, count in enumerate(table.grid):
        k = 1
        while k < count and table.path(tuple(k if e == d else 0 for e in range(table.ndim))) == first:
            k += 1
        held.append(k)
    return None if max(held) == 1 else tuple(k * c for k, c in zip(held, table.chunks, strict=True))


def _stored(table: ArrayTable) -> int | None:
    """The stored size, from some chunks spread over the array."""
    count = prod(table.grid)
    if not count:
        return 0
    try:
        at = np.unique(np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int))
        refs = [table.locate(tuple(int(i) for i in np.unravel_index(k, table.grid))) for k in at]
    except ReadError:
        return None
    lengths = [0 if ref is None else ref.length for ref in refs]
    if any(n is None for n in lengths):
        return None
    return round(sum(n or 0 for n in lengths) / len(lengths) * count)


def _format(given: Any, store: Store) -> str:
    if not isinstance(given, str | Path):
        return f"{type(given).__module__.partition('.')[0]} {type(given).__name__}"
    path = Path(given)
    if path.is_dir():
        return "Zarr v3" if (path / "zarr.json").exists() else "Zarr v2"
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(8)
        return next(
            (name for magic, name in _MAGIC.items() if head.startswith(magic)), path.suffix.lstrip(".") or "raw"
        )
    return "a remote store" if "://" in str(given) else "a store of many files"


def _complete(store: Store) -> str:
    done = completeness_of(store.attrs)
    if done is None:
        return ""
    whole = f"{done.steps} steps of {done.append_dim}" if done.append_dim else "one piece"
    return f"written by jigsaw: {whole}, {'closed' if done.closed else 'not closed'}"
