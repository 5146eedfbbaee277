"""Outline of a store: tiles as arrays with names, dims, chunks and attributes, channels split into variables."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError, ShardingError, WriteError
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.neighbors import Neighbors
from jigsaw.io.writing.cf import StoredCoordinate, check_stored_exactly, check_times_rise, encode_coordinate
from jigsaw.io.writing.write_units import WriteTarget
from jigsaw.tile.tile import Tile

TileData = Tile | Mapping[str, Tile]
ArrayDims = Sequence[str] | Mapping[str, Sequence[str]]
CHANNEL_DIM, LEVEL_DIM = "channel", "level"
_DIMS_ONE_BY_ONE = ("time", "prediction_timedelta")
_PACKING_ATTRIBUTES = "scale_factor", "add_offset", "_Unsigned"
# dtypes that numpy lacks are stored as ones that hold them exactly
_STORED_DTYPES = {"bfloat16": "float32"}
_ENCODING_OPTIONS = {
    ".zarr": ("dtype", "compressors", "filters", "serializer"),
    ".nc": ("dtype", "compression", "complevel", "shuffle", "fletcher32"),
}


@dataclass(frozen=True)
class ArrayOutline:
    """An array to store.  Along the dim that grows, `shape` counts the rows of this append, not those before it."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    attrs: Mapping[str, Any]

    @property
    def units(self) -> tuple[int, ...]:
        """Shape that one process must write as one."""
        return self.shards or self.chunks

    @property
    def fill(self) -> Any:
        return np.nan if np.dtype(self.dtype).kind in "fc" else 0

    def stored_values(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values in the array's dtype, floats rounded to it.

        Raises: `WriteError` for values that it does not hold: beyond its range, fractions and NaN as integers, integers
        that a float rounds, and imaginary parts.
        """
        is_cut = values.dtype.kind == "c" and np.dtype(self.dtype).kind != "c"
        numbers: NDArray[Any] = np.real(values) if is_cut else values
        with np.errstate(over="ignore", invalid="ignore"):
            stored: NDArray[Any] = numbers.astype(self.dtype, copy=False)
            if stored.dtype == values.dtype:
                return stored
            if numbers.dtype.kind in "fc" and stored.dtype.kind in "fc":
                lost = np.isinf(stored) & ~np.isinf(numbers)
            else:
                # a wide integer becomes another as float, and a negative one comes back from an unsigned dtype
                lost = (stored != numbers) | (stored.astype(numbers.dtype) != numbers)
        if is_cut:
            lost |= np.imag(values) != 0
        if lost.any():
            raise WriteError(
                f"array {self.name!r} has values such as {values[lost][0]}, which {self.dtype} does not hold; choose a "
                "wider dtype, or round them"
            )
        return stored


StoredArrays = Sequence[ArrayOutline]
StoredCoordinates = Sequence[StoredCoordinate]


@dataclass(frozen=True)
class TileSource:
    """Tile and the array made from it; an array made from a single channel lacks the dim `dropped` of the tile."""

    tile: Tile
    array: ArrayOutline
    channel: int | None = None
    runs: tuple[tuple[int, int, int], ...] = ()
    dropped: int | None = None

    def target(self) -> WriteTarget:
        """Return the array as the planner sees it, with every dim of the tile."""
        return WriteTarget(self._wide(self.array.shape), self._wide(self.array.units), self.channel, self.runs)

    def _wide(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes if self.dropped is None else (*sizes[: self.dropped], 1, *sizes[self.dropped :])

    def phase(self, dim: str | None, rows: int) -> tuple[int, ...]:
        """Return `rows` along the dim of that name and 0 along the others, in the order of the tile's dims."""
        return self._wide(tuple(rows if d == dim else 0 for d in self.array.dims))


@dataclass(frozen=True, eq=False)
class GrowingStore:
    """A store that grows: its arrays, its coordinates, and its complete steps.

    Of coordinates along the dim that grows, `coords` may have only those of the last append.
    """

    arrays: Mapping[str, ArrayOutline]
    coords: Mapping[str, StoredCoordinate]
    steps: int


@dataclass(frozen=True, eq=False)
class AppendOutline:
    """Content of one append: arrays of tiles, coordinates, and the number of rows along the dim that grows."""

    sources: tuple[TileSource, ...]
    coords: tuple[StoredCoordinate, ...]
    rows: int

    def known(self, before: GrowingStore | None, steps: int) -> GrowingStore:
        arrays = {s.array.name: s.array for s in self.sources}
        held = {} if before is None else before.coords
        own = {c.name: replace(c, values=c.values.astype(held.get(c.name, c).values.dtype)) for c in self.coords}
        return GrowingStore(arrays, {**held, **own}, steps)

    def digest(self) -> str:
        facts = [(s.array, s.tile.layout, s.runs, str(s.tile.dtype)) for s in self.sources]
        whole = hashlib.sha256(repr(facts).encode())
        for c in self.coords:
            whole.update(repr((c.name, c.dims, c.values.dtype, c.attrs)).encode())
            whole.update(c.values.tobytes())
        return whole.hexdigest()


@dataclass(frozen=True, eq=False)
class WriteOptions:
    """Arguments of a `Writer` for one store; `lent_units` are coordinates whose units it takes over,
    and `lent_sizes` the dims of tables that no array of it has.  `restores` are the dim whose rows it puts back into
    another order, and for each place there the row that goes to it.  `own_attrs` are the arrays whose attributes the
    user gave.

    Raises: `WriteError` for what the format does not have.
    """

    suffix: str
    dims: ArrayDims
    fields: Sequence[WrittenField] | None
    coords: Mapping[str, Any]
    attrs: Mapping[str, Any]
    field_attrs: Mapping[str, Mapping[str, Any]]
    chunks: Mapping[str, int]
    shards: Mapping[str, int]
    append_dim: str | None
    encoding: Mapping[str, Any]
    lent_units: Mapping[str, StoredCoordinate] = field(default_factory=dict[str, StoredCoordinate])
    lent_sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    restores: tuple[str, Neighbors] | None = None
    own_attrs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.encoding) - set(_ENCODING_OPTIONS[self.suffix]))
        if unknown:
            raise WriteError(
                f"encoding has {unknown}, but {self.suffix} takes {', '.join(_ENCODING_OPTIONS[self.suffix])}"
            )
        for name, attrs in self.field_attrs.items():
            if packing := [k for k in _PACKING_ATTRIBUTES if k in attrs]:
                raise WriteError(
                    f"field_attrs[{name!r}] has {' and '.join(packing)}, by which readers would change values; they "
                    "are stored as they are given, so leave it out (encoding={'dtype': 'float32'} chooses a dtype)"
                )
        if self.shards and self.suffix == ".nc":
            raise WriteError(f"shards={dict(self.shards)} belong to Zarr; leave them out or write to a .zarr")


@dataclass(frozen=True)
class WrittenField:
    """The array, and the level in it, that one channel becomes."""

    array: str
    level: float | None

    def __str__(self) -> str:
        return self.array if self.level is None else f"{self.array}@{self.level:g}"


def parse_written_field(field: str) -> WrittenField:
    """Parse a field: ``t2m`` is an array, ``z@500`` the level 500 of an array.

    Raises: `FieldError` for a level that is not a number.
    """
    name, at, level = field.partition("@")
    try:
        return WrittenField(name, float(level) if at else None)
    except ValueError:
        raise FieldError(f"field {field!r}: {level!r} is not a level; write a number, like {name}@500") from None


def _level_values(fields: Sequence[WrittenField], own_levels: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return the values along the level dim: those given, else all that fields name, in their order; None without any.

    Raises: `FieldError` for a field whose level is not among those given.
    """
    named = list(dict.fromkeys(f.level for f in fields if f.level is not None))
    if not named or own_levels is None:
        values = np.array(named)
        whole = values.size and not (values % 1).any()
        return (values.astype(np.int64) if whole else values) if named else None
    missing = [level for level in named if not np.isclose(own_levels, level).any()]
    if missing:
        raise FieldError(f"fields name the levels {missing}, but coords['level'] has {own_levels.tolist()}")
    return own_levels


def _tile_sources(data: TileData, levels: NDArray[Any] | None, options: WriteOptions) -> tuple[TileSource, ...]:
    """Return every array to write, with the tile that it is made from, without its halo.

    Raises: `FieldError`, `ShardingError` or `WriteError` naming what does not fit.
    """
    dims, fields = options.dims, options.fields
    if isinstance(data, Tile):
        if fields is None:
            raise FieldError("a tile needs names: fields=('t2m', 'z@500') for its channels, or {'name': tile}")
        if isinstance(dims, Mapping):
            raise FieldError(f"dims={dict(dims)} name arrays, but there is one tile; give its dims in order")
        return _split_channels(_owned_tile(data, dims), fields, levels, options)
    if fields is not None:
        raise FieldError(f"fields={[f.array for f in fields]} split one tile; with a mapping of tiles leave them out")
    sources: list[TileSource] = []
    for name, tile in data.items():
        if isinstance(dims, Mapping) and name not in dims:
            raise FieldError(f"dims name the arrays {sorted(dims)}, but not {name!r}; give its dims, too")
        own_dims = tuple(dims[name] if isinstance(dims, Mapping) else dims)
        bare = _owned_tile(tile, own_dims)
        sources.append(
            TileSource(bare, _outline_array(name, own_dims, tuple(bare.shape), bare, range(bare.ndim), options))
        )
    if not sources:
        raise FieldError("there is no tile to write; the mapping is empty")
    return tuple(sources)


def _owned_tile(tile: Any, dims: Sequence[str]) -> Tile:
    if not isinstance(tile, Tile):
        raise ShardingError(
            f"write takes tiles, not {type(tile).__name__}; cut it first: jigsaw.shard(x, mesh, spec) "
            "(a spec of None for every dim keeps it whole)"
        )
    if len(tile.layout.cuts) != tile.ndim:
        raise ShardingError(f"{tile.layout} has dims that were flattened together; unflatten them before writing")
    if len(dims) != tile.ndim or len(set(dims)) != len(dims):
        raise ShardingError(f"dims={tuple(dims)} must name each of the {tile.ndim} dims of {tile.layout} once")
    return tile.owned().detach()


def _split_channels(
    tile: Tile, fields: Sequence[WrittenField], levels: NDArray[Any] | None, options: WriteOptions
) -> tuple[TileSource, ...]:
    dims = tuple(options.dims)
    if CHANNEL_DIM not in dims:
        raise FieldError(f"fields name channels, but dims={dims} have no {CHANNEL_DIM!r}")
    at = dims.index(CHANNEL_DIM)
    if len(fields) != tile.shape[at]:
        named = ", ".join(map(str, fields))
        raise FieldError(f"there are {len(fields)} fields for the {tile.shape[at]} channels of {tile.layout}: {named}")
    parts: list[TileSource] = []
    for name in dict.fromkeys(f.array for f in fields):
        channels = [c for c, f in enumerate(fields) if f.array == name]
        named = [level for level in (fields[c].level for c in channels) if level is not None]
        if len(channels) > 1 and len(named) < len(channels):
            raise FieldError(f"fields name {name!r} twice, or once without a level; name each channel once")
        where = [int(np.argmin(np.abs(levels - level))) for level in named] if levels is not None else []
        if len(set(where)) != len(where):
            raise FieldError(f"fields name a level of {name!r} twice; name each channel once")
        shape = tuple(tile.shape)
        if not named or levels is None:  # without a level, the array lacks a dim in the place of the channels
            kept = [d for d in range(tile.ndim) if d != at]
            own_dims, own_shape = tuple(dims[d] for d in kept), tuple(shape[d] for d in kept)
            array = _outline_array(name, own_dims, own_shape, tile, kept, options)
            parts.append(TileSource(tile, array, at, ((channels[0], channels[0] + 1, 0),), dropped=at))
            continue
        wide, leveled = (*shape[:at], len(levels), *shape[at + 1 :]), (*dims[:at], LEVEL_DIM, *dims[at + 1 :])
        array = _outline_array(name, leveled, wide, tile, range(tile.ndim), options)
        if len(where) < len(levels) and np.dtype(array.dtype).kind not in "fc":
            raise FieldError(f"{name!r} lacks levels that other fields have, and {array.dtype} has no NaN for them")
        parts.append(TileSource(tile, array, at, _level_runs(channels, where)))
    return tuple(parts)


def _level_runs(channels: Sequence[int], levels: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return runs of consecutive channels that are consecutive levels: (first, end, level of the first)."""
    runs: list[tuple[int, int, int]] = []
    for channel, level in zip(channels, levels, strict=True):
        first, end, start = runs[-1] if runs else (0, -1, 0)
        if channel == end and level - start == channel - first:
            runs[-1] = first, channel + 1, start
        else:
            runs.append((channel, channel + 1, level))
    return tuple(runs)


def _outline_array(
    name: str, dims: tuple[str, ...], shape: tuple[int, ...], tile: Tile, kept: Sequence[int], options: WriteOptions
) -> ArrayOutline:
    if options.append_dim is not None and options.append_dim not in dims:
        raise WriteError(
            f"array {name!r} has dims {dims} and cannot grow along append_dim={options.append_dim!r}; write what has "
            f"no such dim as a coordinate: coords={{{name!r}: (dims, values, attrs)}}"
        )
    chunks = tuple(_chunk_rows(d, n, tile.layout, at, options) for d, n, at in zip(dims, shape, kept, strict=True))
    shards = tuple(_shard_rows(name, d, n, c, options) for d, n, c in zip(dims, shape, chunks, strict=True))
    attrs, dtype = dict(options.field_attrs.get(name, {})), _dtype_to_store(tile, options)
    return ArrayOutline(name, dims, shape, dtype, chunks, shards if options.shards else None, attrs)


def _dtype_to_store(tile: Tile, options: WriteOptions) -> str:
    own = str(tile.dtype).removeprefix("torch.")
    dtype = options.encoding.get("dtype", _STORED_DTYPES.get(own, own))
    try:
        stored = np.dtype(dtype)
    except TypeError:
        raise WriteError(f"dtype {dtype!r} cannot be stored; give encoding={{'dtype': 'float32'}}") from None
    kinds = "fiu" if options.suffix == ".nc" else "fiucb"
    if stored.kind not in kinds or (options.suffix == ".nc" and stored.itemsize < 4 and stored.kind == "f"):
        raise WriteError(f"{options.suffix} does not hold {stored.name}; give encoding={{'dtype': 'float32'}}")
    return stored.name


def _chunk_rows(dim: str, size: int, layout: Layout, at: int, options: WriteOptions) -> int:
    """Return the rows asked for, else one step of time, and in space the largest piece: chunks and tiles align."""
    grows = dim == options.append_dim
    if dim in options.chunks:
        return int(options.chunks[dim]) if grows else max(1, min(int(options.chunks[dim]), size))
    if grows or dim in _DIMS_ONE_BY_ONE:
        return 1
    cut = layout.cuts[at]
    largest = max(b - a for a, b in zip(cut.points, cut.points[1:], strict=False))
    return max(1, size if dim == LEVEL_DIM else largest)


def _shard_rows(name: str, dim: str, size: int, chunk: int, options: WriteOptions) -> int:
    rows = int(options.shards.get(dim, chunk))
    if rows >= size and dim != options.append_dim:  # one shard for the whole dim, whatever its chunks
        return -(-size // chunk) * chunk
    if rows % chunk:
        raise WriteError(
            f"array {name!r}: shards={{{dim!r}: {rows}}} must hold whole chunks of {chunk}; "
            f"choose {rows - rows % chunk or chunk} or {rows - rows % chunk + chunk}"
        )
    return rows


def _check_dim_sizes(options: WriteOptions, sources: Sequence[TileSource]) -> dict[str, int]:
    """Return the size of each dim; options for a dim or an array that is not there are refused."""
    sizes: dict[str, int] = {}
    for source in sources:
        for dim, size in zip(source.array.dims, source.array.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                raise FieldError(f"array {source.array.name!r} has {size} rows along {dim!r}, another {sizes[dim]}")
    for argument, by_dim in (("chunks", options.chunks), ("shards", options.shards)):
        unknown = sorted(set(by_dim) - set(sizes))
        if unknown:
            raise WriteError(f"{argument} name the dims {unknown}, but the arrays have {sorted(sizes)}")
    names = {source.array.name for source in sources}
    if strange := sorted(options.own_attrs - names):
        raise FieldError(
            f"field_attrs name {strange}, but the arrays are {sorted(names)}; attributes of a coordinate are given "
            "with it: coords={'lat': (values, attrs)}"
        )
    return sizes


def outline_append(
    data: TileData, own_coords: Mapping[str, Any], options: WriteOptions, known: GrowingStore | None
) -> AppendOutline:
    """Return what one append writes, checked against the existing store (`known`).

    Coordinates that are `own_coords` without attributes are stored in `lent_units`.

    Raises: `FieldError`, `GridError`, `ShardingError` or `WriteError` naming what does not fit.
    """
    stored = {} if known is None else known.coords
    bare = {n: c for n, c in options.lent_units.items() if not isinstance(own_coords.get(n), tuple)}
    coords = [encode_coordinate(n, value, stored.get(n, bare.get(n))) for n, value in own_coords.items()]
    if options.restores is not None:
        coords = [_restored(c, *options.restores) for c in coords]
    at_levels = next((c.values for c in (*coords, *stored.values()) if c.name == LEVEL_DIM), None)
    levels = None if options.fields is None else _level_values(options.fields, at_levels)
    sources = list(_tile_sources(data, levels, options))
    sizes = _check_dim_sizes(options, sources)
    if levels is not None and LEVEL_DIM not in {c.name for c in coords} | set(stored):
        coords.append(encode_coordinate(LEVEL_DIM, levels))
    names = {s.array.name for s in sources}
    for name in (*names, *(c.name for c in coords)):  # in Zarr names become folders, so none may lead to another folder
        if not isinstance(name, str) or not name or "/" in name or name in (".", "..") or name.startswith("__"):
            raise FieldError(f"{name!r} cannot name an array; choose one without '/', not '.', '..' or '__…'")
    for c in coords:
        _check_coordinate(c, {**options.lent_sizes, **sizes}, names)
    rows = sizes[options.append_dim] if options.append_dim is not None else 0
    if known is None:
        for c in coords:
            check_times_rise(c, None)
        for at, source in enumerate(sources):  # name the coordinates that are not their dim's own, as CF does
            array = source.array
            own = [c.name for c in coords if c.dims != (c.name,) and set(c.dims) <= set(array.dims)]
            if own:
                sources[at] = replace(source, array=replace(array, attrs={"coordinates": " ".join(own), **array.attrs}))
        return AppendOutline(tuple(sources), tuple(coords), rows)
    growing = _growing_coordinates(coords, known, options.append_dim)
    grow = {name for name, a in known.arrays.items() if options.append_dim in a.dims}
    if grow != names:
        raise WriteError(
            f"an append writes every array that grows: the store has {sorted(grow)}, this would write {sorted(names)}"
        )
    outlined = AppendOutline(tuple(_as_in_store(s, known, options) for s in sources), growing, rows)
    for c in growing:
        check_times_rise(c, known.coords[c.name])
    return outlined


def _restored(c: StoredCoordinate, dim: str, rows: Neighbors) -> StoredCoordinate:
    if dim not in c.dims or c.values.shape[c.dims.index(dim)] != rows.sources:
        return c
    return replace(c, values=c.values.take(rows.sources_of((0, rows.targets)), c.dims.index(dim)))


def _check_coordinate(c: StoredCoordinate, sizes: Mapping[str, int], arrays: Collection[str]) -> None:
    if c.name in arrays:
        raise GridError(f"{c.name!r} is both an array and a coordinate; rename one")
    if c.name in sizes and c.name not in c.dims:
        raise GridError(
            f"coords[{c.name!r}] has the dims {c.dims}, but {c.name!r} is a dim of the arrays, with {sizes[c.name]} "
            f"rows; give a value for each row, coords={{{c.name!r}: [value]}} for one, or another name"
        )
    wrong = {d: n for d, n in zip(c.dims, c.values.shape, strict=True) if sizes.get(d) != n}
    if wrong:
        raise GridError(
            f"coords[{c.name!r}] has {wrong} rows, but the arrays have {dict(sizes)}; give the whole array's coordinate"
        )


def _growing_coordinates(
    coords: Sequence[StoredCoordinate], known: GrowingStore, dim: str | None
) -> tuple[StoredCoordinate, ...]:
    """Return the coordinates along the dim that grows; the others must equal those of the store."""
    strange = sorted({c.name for c in coords} - set(known.coords))
    missing = sorted({n for n, c in known.coords.items() if dim in c.dims} - {c.name for c in coords})
    if strange or missing:
        raise GridError(f"coords of an append must be those of the store: {strange} are new and {missing} are missing")
    for c in coords:
        stored = known.coords[c.name]
        fixed = dim not in c.dims
        if c.dims != stored.dims or (fixed and not np.array_equal(c.values, stored.values)):
            raise GridError(f"coords[{c.name!r}] differs from that of the store, which has dims {stored.dims}")
        check_stored_exactly(c, stored)
    return tuple(c for c in coords if dim in c.dims)


def _as_in_store(source: TileSource, known: GrowingStore, options: WriteOptions) -> TileSource:
    ours, stored = source.array, known.arrays[source.array.name]
    shape = tuple(
        m if d == options.append_dim else t for d, m, t in zip(ours.dims, ours.shape, stored.shape, strict=False)
    )
    if (ours.dims, ours.shape, ours.dtype) != (stored.dims, shape, stored.dtype):
        raise WriteError(
            f"array {ours.name!r} is {ours.dtype} {dict(zip(ours.dims, ours.shape, strict=True))}, but the store has "
            f"{stored.dtype} {dict(zip(stored.dims, stored.shape, strict=True))}"
        )
    if packed := [k for k in _PACKING_ATTRIBUTES if k in stored.attrs]:
        raise WriteError(
            f"array {ours.name!r} of the store is packed by {' and '.join(packed)}, and values are appended as "
            "they are given; write a new store, or convert this one to floats (python -m jigsaw convert)"
        )
    compared = (("chunks", options.chunks, stored.chunks), ("shards", options.shards, stored.units))
    for argument, sizes_by_dim, has in compared:
        sizes = zip(stored.dims, has, shape, strict=True)
        # sizes of the dim and larger were made one unit of the whole dim
        whole = {d for d, n, size in sizes if d != options.append_dim and n >= size <= sizes_by_dim.get(d, n)}
        wrong = {d: n for d, n in zip(stored.dims, has, strict=True) if sizes_by_dim.get(d, n) != n and d not in whole}
        if wrong:
            raise WriteError(
                f"{argument}={dict(sizes_by_dim)} differ from those of array {ours.name!r} in the store, {wrong}"
            )
    return replace(source, array=replace(stored, shape=ours.shape))
