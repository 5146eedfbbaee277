"""`convert`: anything that xarray opens as a sharded Zarr v3 store for training, a region at a time.

**Killed conversions.** Each region is written, read back, compared by digest, and only then entered in a journal beside
the store (``NAME.journal``). The same call goes on with the regions that are not entered. Until the end the store's
root says that nothing is complete and lists no array; then one file, replaced atomically, lists all
(`jigsaw.io.completeness`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError, WriteError, writing_to
from jigsaw.geometry.cut import Box, box_elements, box_slices
from jigsaw.io.arguments import checked_choice, checked_mapping, is_real_number
from jigsaw.io.chunks.files import holds_place_read, local_paths
from jigsaw.io.conversion.journal import CONVERT_AGAIN, ConversionJournal, UnitIndex, UnitKey, remove_journal
from jigsaw.io.conversion.selected_source import SelectedSource, open_with_xarray, recommended_chunks, select_source
from jigsaw.io.series.cell_grid import CELL_ORDERS
from jigsaw.io.series.request import MISSING_RULES
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.stats.cluster import results_in_order, worker_threads
from jigsaw.io.writing.cf import plain_attribute
from jigsaw.io.writing.deliver import StoreCompleteness, completeness_from_attrs
from jigsaw.io.writing.outline import ArrayOutline
from jigsaw.io.writing.zarr_writer import ZarrSink, is_zarr_group, remove_zarr_store, zarr_store_attrs

if TYPE_CHECKING:
    import xarray as xr
    from dask.distributed import Client

    from jigsaw.io.formats.zarr_reach import WatchedStore


def values_digest(values: NDArray[Any]) -> str:
    """Return the digest of the values in C order; every NaN counts as the same one, as a store fills with one."""
    plain = np.ascontiguousarray(values)
    if plain.dtype.kind == "f" and (missing := np.isnan(plain)).any():
        plain = np.where(missing, np.array(np.nan, plain.dtype), plain)
    return hashlib.blake2b(plain.tobytes(), digest_size=16).hexdigest()


def combine_digests(digests: Iterable[str]) -> str:
    """Return the digest of an array from those of its units in C order."""
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


DIGESTS_ATTRIBUTE = "jigsaw_digests"
IDENTITY_ATTRIBUTE = "jigsaw_conversion"  # of a finished store: which conversion made it
ConversionProgress = Callable[[int, int], None]
"""Callback that takes the bytes written so far, and their total."""


@dataclass(frozen=True)
class Converted:
    """Result of a conversion at `path`: its arrays, and the digest of each one's values, by name.

    `written` and `kept` count the units (chunks, or shards where there are any) of this run and of those before it;
    `filled` the chunks that a Zarr source lacks and that this run read as fill values.

    >>> made = jigsaw.io.convert("globe-01.nc", "short.zarr")
    >>> [array.name for array in made.arrays], made.kept
    (['2m_temperature', '10m_u_component_of_wind'], 0)
    """

    path: str
    arrays: tuple[ArrayOutline, ...]
    written: int
    kept: int
    digests: Mapping[str, str]
    filled: int = 0


@dataclass(frozen=True)
class AskedConversion:
    """Arguments of `convert` that say what is read, and in which arrays it is written."""

    fields: Sequence[str] | None
    time: Any
    every: Any
    mesh: Mapping[str, int] | None
    chunks: Mapping[str, int] | None
    shards: Mapping[str, int] | None
    dims: Mapping[str, str] | None
    dtype: str | None
    engine: str | None
    outside: bool | Sequence[str]
    missing: str
    order: str

    def __post_init__(self) -> None:
        checked_choice("missing", self.missing, MISSING_RULES)
        checked_choice("order", self.order, CELL_ORDERS, GridError)
        checked_mapping("chunks", self.chunks, "{'time': 1}", GridError)
        checked_mapping("shards", self.shards, "{'time': 8}", GridError)

    @contextmanager
    def opened(self, source: Any) -> Generator[tuple[SelectedSource, tuple[ArrayOutline, ...]]]:
        """Open the source, and outline the arrays that are made of it."""
        # Closed here and not when it is collected: HDF5 2.2 crashes where a file with texts is opened while an older
        # handle of it is still open, and that one is closed first (netcdf-c issue 2510).
        with closing(open_with_xarray(source, self.engine, self.outside)) as data:
            chosen = select_source(
                data, self.fields, self.time, self.every, self.dims, self.outside, self.missing, self.order
            )
            sizes = self.chunks if self.chunks is not None else recommended_chunks(chosen, self.mesh or {}, self.dims)
            yield chosen, tuple(chosen.outline(sizes, self.shards, self.dtype))

    def check_converted(self, source: Any, target: Path) -> None:
        """Check that it made the finished store at `target` of this source, whose values are not read again.

        Raises: `WriteError` for a store of another conversion; a `ReadError` for a source that cannot be opened.
        """
        made_by = zarr_store_attrs(target).get(IDENTITY_ATTRIBUTE)
        with self.opened(source) as (chosen, arrays):
            if made_by != conversion_identity(chosen, arrays):
                raise WriteError(
                    f"{target} is complete, and of another conversion: of other files, fields, times, chunks or "
                    "shards, or of files that have changed since; jigsaw.io.verify looks at its values alone, and "
                    "replace=True (--replace) starts again"
                )


def convert(
    source: Any,
    target: str | os.PathLike[str],
    *,
    fields: Sequence[str] | None = None,
    time: Any = None,
    every: Any = 1,
    mesh: Mapping[str, int] | None = None,
    chunks: Mapping[str, int] | None = None,
    shards: Mapping[str, int] | None = None,
    dims: Mapping[str, str] | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    client: Client | None = None,
    threads: int | None = None,
    budget: int = 1 << 30,
    replace: bool = False,
    progress: ConversionProgress | None = None,
    outside: bool | Sequence[str] = False,
    missing: str = "error",
    order: str = "store",
) -> Converted:
    """Write what xarray reads of a source to a local Zarr v3 store, decoded: missing values are NaN, and packed numbers
    are unpacked. Coordinates, attributes and CF metadata are kept.

    - `source`: a path, URL, glob or list of files (joined by their coordinates), or an `xarray.Dataset`; `engine` is
      xarray's (``"cfgrib"`` for GRIB), `dims` says what its dims are (see `jigsaw.io.open`). What several files
      have, such as a field without time, must be alike in all: each call first reads it once in each of them, and twice
      in the first above 256 MiB. Files that share some of their steps are refused;
    - `fields`, `time`, `every`: the selection, as in `jigsaw.io.open`; by default all is converted;
    - `chunks`, `shards`: sizes by dim; by default those that `mesh` (one rank without) reads cheapest
      (`jigsaw.io.recommend`);
    - `dtype`: the dtype that floats are rounded to, such as ``"float32"``; by default they keep that of xarray;
    - `client`: a `dask.distributed` client whose workers do it; without one, `threads` of this process (one a core);
    - `budget`: bytes that this process (or a worker's thread) holds at a time, at least one region;
    - `replace`: start again, whatever Zarr store there is at `target`, unless it is the source;
    - `outside`: folders and URLs that links of a Zarr store and references may lead to beyond their own folder, or True
      for all;
    - `missing`: the rule for chunks that a Zarr source lacks, ``"error"`` or ``"fill"``, as in `jigsaw.io.open`; a
      dataset that was opened elsewhere is read as it is;
    - `order`: of cells that are points, by default the source's; ``"curve"`` puts them along Hilbert's curve, so that
      pieces have short borders. A `Writer` that writes like the new store restores the order of the source.

    Raises: `WriteError` for a target that is complete, lies within the source, belongs to another conversion, cannot be
    written, or reads back different values; after a full disk the same call goes on once there is room. A `ReadError`
    for the source, a `GridError` for files that differ in what several have; `FieldError` for a cluster without
    workers.

    >>> made = jigsaw.io.convert("globe-*.nc", "train.zarr", fields=["2m_temperature"], chunks={"time": 1})
    >>> jigsaw.io.open(made.path, mesh={"lat": 1})
    Dataset(file://train.zarr: 8 samples, 1 channels, lat 9, lon 16; [1, 1, 9, 16])
    """
    asked = AskedConversion(fields, time, every, mesh, chunks, shards, dims, dtype, engine, outside, missing, order)
    _check_resources(client, threads, budget, progress)
    path = Path(target)
    with asked.opened(source) as (chosen, arrays):
        _check_beside_source(path, chosen)
        if replace:
            _remove_target(path, chosen)
        journal = _open_journal(path, chosen, arrays)
        store = _ConversionTarget(path, chosen, arrays)
        _check_began_here(path, journal)
        if not journal.is_made:
            store.make()
            journal.made()
        kept = len(journal.done)
        regions = [r for array in arrays for r in _regions_to_move(array, chosen, journal.done, int(budget))]
        read = WatchedDataset(chosen.data, chosen.watched)
        # the memory of a thread (region, read-back copy, encoded bytes) stays within the budget
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        most = int(budget) // max(1, 3 * max((r.nbytes for r in regions), default=1))
        filled = _move_all(regions, read, path, journal, client, max(1, min(threads or cores, most)), progress)
        digests = {a.name: combine_digests(journal.done[a.name, i] for i in unit_indices(a)) for a in arrays}
        store.finish(digests, journal.identity)
        journal.remove()
        return Converted(str(path), arrays, len(journal.done) - kept, kept, digests, filled)


def conversion_identity(chosen: SelectedSource, arrays: Sequence[ArrayOutline]) -> str:
    """Return a digest that tells a conversion from others: of what is read, and the shapes of what is written."""
    shapes = [(a.name, a.shape, a.dtype, a.chunks, a.shards) for a in sorted(arrays, key=lambda array: array.name)]
    return f"{chosen.identity()} {values_digest(np.frombuffer(repr(shapes).encode(), np.uint8))}"


def _check_resources(client: Any, threads: Any, budget: Any, progress: Any) -> None:
    if threads is not None and not (is_whole_number(threads) and threads >= 1):
        raise FieldError(f"threads={threads!r} must be a whole number of at least 1, or None")
    if not (is_real_number(budget) and budget >= 1):
        raise FieldError(f"budget={budget!r} must be a number of bytes >= 1, like budget=256 << 20")
    if progress is not None and not callable(progress):
        raise FieldError(f"progress={progress!r} must be a function of the bytes done and of all bytes, or None")
    if client is not None and not hasattr(client, "submit"):
        raise FieldError(f"client={client!r} must be a dask.distributed.Client, or None")


def verify(target: str | os.PathLike[str]) -> dict[str, bool]:
    """Read a finished conversion again, and say for each array whether its values are those of the source.

    Raises: `WriteError` for a store that `convert` did not finish.

    >>> made = jigsaw.io.convert("globe-01.nc", "checked.zarr", fields=["2m_temperature"])
    >>> jigsaw.io.verify("checked.zarr")
    {'2m_temperature': True}
    """
    import zarr

    path = Path(target)
    attrs = zarr_store_attrs(path) if path.is_dir() else {}
    if DIGESTS_ATTRIBUTE not in attrs:
        raise WriteError(f"{path} is not a finished conversion: it has no digests to verify by")
    group = zarr.open_group(str(path), mode="r")
    outcomes: dict[str, bool] = {}
    for name, digest in attrs[DIGESTS_ATTRIBUTE].items():
        stored: Any = group[name]
        array = ArrayOutline(name, (), stored.shape, stored.dtype.name, stored.chunks, stored.shards, {})
        try:
            units = (values_digest(stored[box_slices(unit_box(array, i))]) for i in unit_indices(array))
            outcomes[name] = combine_digests(units) == digest
        except Exception:  # a codec fails on damaged bytes in any way it likes
            outcomes[name] = False
    return outcomes


def is_complete_store(path: Path) -> bool:
    """Say whether a store exists and says that it is whole."""
    done = completeness_from_attrs(zarr_store_attrs(path)) if (path / "zarr.json").exists() else None
    return done is not None and done.closed


@dataclass(frozen=True)
class ConversionRegion:
    """A box of an array that is moved at a time, and the units in it."""

    array: ArrayOutline
    box: Box
    units: tuple[UnitIndex, ...]

    @property
    def nbytes(self) -> int:
        return box_elements(self.box) * np.dtype(self.array.dtype).itemsize


def unit_indices(array: ArrayOutline) -> Iterator[UnitIndex]:
    """Yield the index of every unit of writing, a shard or chunk, in C order."""
    return product(*(range(ceil(n / u)) for n, u in zip(array.shape, array.units, strict=True)))


def unit_box(array: ArrayOutline, index: UnitIndex) -> Box:
    """Return the rows of a unit."""
    spans = zip(index, array.units, array.shape, strict=True)
    return tuple((i * u, min((i + 1) * u, n)) for i, u, n in spans)


def _regions_to_move(
    array: ArrayOutline, chosen: SelectedSource, done: Mapping[UnitKey, str], budget: int
) -> Iterator[ConversionRegion]:
    """Yield the units still to be written, along the first dim as many together as one chunk of the source has. Along a
    dim whose rows get another order it is all, because each unit is made of rows of many chunks.
    """
    together = _units_together(array, chosen.data, budget)
    scattered = array.dims.index(chosen.reordered) if chosen.reordered in array.dims else -1
    groups: dict[UnitIndex, list[UnitIndex]] = {}
    for index in unit_indices(array):
        if (array.name, index) not in done:
            group = [index[0] // together, *index[1:]] if index else []
            group[scattered : scattered + 1] = [0] if scattered >= 0 else []
            groups.setdefault(tuple(group), []).append(index)
    for members in groups.values():
        boxes = [unit_box(array, i) for i in members]
        hull = tuple((min(a for a, _ in dim), max(b for _, b in dim)) for dim in zip(*boxes, strict=True))
        yield ConversionRegion(array, hull, tuple(members))


def _units_together(array: ArrayOutline, data: xr.Dataset, budget: int) -> int:
    """Return how many units along the first dim a source's chunk spans, so that each is decoded once."""
    if not array.dims:
        return 1
    variable = data.variables[array.name]
    lazy: Mapping[Any, tuple[int, ...]] = variable.chunksizes
    dim = array.dims[0]
    rows = max(lazy[dim]) if dim in lazy else variable.encoding.get("preferred_chunks", {}).get(dim, 1)
    most = budget // max(1, 3 * prod(array.units) * np.dtype(array.dtype).itemsize)
    return max(1, min(ceil(rows / array.units[0]), most))


@dataclass(frozen=True)
class WatchedDataset:
    """The source of a region, and the Zarr stores below it; they travel to other processes together."""

    data: xr.Dataset
    watched: tuple[WatchedStore, ...]

    def take_filled(self) -> set[tuple[int, str]]:
        """Return the chunks that were read as fill values in this process since the last call."""
        return {(n, key) for n, store in enumerate(self.watched) for key in store.take_filled()}


def _move_all(
    regions: Sequence[ConversionRegion],
    read: WatchedDataset,
    path: Path,
    journal: ConversionJournal,
    client: Client | None,
    threads: int,
    progress: ConversionProgress | None,
) -> int:
    """Move all regions, and count the chunks of the source that were read as fill values."""
    whole, written, filled = sum(r.nbytes for r in regions), 0, set[tuple[int, str]]()
    moved = _move_by_workers(regions, read, path, client) if client else _move_by_threads(regions, read, path, threads)
    for region, result in moved:
        journal.add(result.digests)
        filled |= result.filled
        written += region.nbytes
        if progress:
            progress(written, whole)
    return len(filled | read.take_filled())


class MovedRegion(NamedTuple):
    """The digests of a region's units; `filled` are chunks that were read as fill values, here or in other threads."""

    digests: list[tuple[UnitKey, str]]
    filled: set[tuple[int, str]]


def _move_by_threads(
    regions: Sequence[ConversionRegion], read: WatchedDataset, path: Path, threads: int
) -> Iterator[tuple[ConversionRegion, MovedRegion]]:
    with ThreadPoolExecutor(threads) as pool:
        running = {pool.submit(move_region, region, read, path): region for region in regions}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _move_by_workers(
    regions: Sequence[ConversionRegion], read: WatchedDataset, path: Path, client: Client
) -> Iterator[tuple[ConversionRegion, MovedRegion]]:
    """Yield the same from the workers of a cluster, in the order of the regions; only digests come back."""
    threads = sum(worker_threads(client).values())
    shared: Any = client.scatter(read, broadcast=True, hash=False)
    return results_in_order(
        client, ((r, client.submit(move_region, r, shared, path, pure=False)) for r in regions), threads
    )


def move_region(region: ConversionRegion, read: WatchedDataset, path: Path) -> MovedRegion:
    """Read a region of the source, write it, and read it back: the digest of each of its units.

    Raises: `WriteError` when what is read back is not what was written.
    """
    import zarr

    array = region.array
    part = read.data.variables[array.name][box_slices(region.box)]
    # each region already runs in a thread of jigsaw's own
    loaded = part.load(scheduler="synchronous") if part.chunks else part
    values = array.stored_values(np.asarray(loaded.values))
    sink = ZarrSink(path, None, {}, CONVERT_AGAIN)
    sink.attach([array])
    written: list[tuple[UnitKey, str]] = []
    for index in region.units:
        box = unit_box(array, index)
        unit = values[box_slices(box, region.box)]
        sink.put(array.name, box, unit)
        digest = values_digest(unit)
        stored: Any = zarr.open_array(f"{path}/{array.name}", mode="r", zarr_format=3)
        if values_digest(np.asarray(stored[box_slices(box)])) != digest:
            raise WriteError(f"{path}: rows {box} of array {array.name!r} read back other than they were written")
        written.append(((array.name, index), digest))
    return MovedRegion(written, read.take_filled())


def _remove_target(path: Path, chosen: SelectedSource) -> None:
    """Remove the target for `replace`: a Zarr store and its journal, nothing else, and never the source."""
    if path.exists() and not is_zarr_group(path):
        raise WriteError(f"{path} is not a Zarr store, so it is not replaced; remove it yourself")
    if holds_place_read(path, chosen.places):
        raise WriteError(f"{path} is what the conversion reads, so it is not replaced; write elsewhere")
    remove_journal(path.with_name(path.name + ".journal"))
    if path.exists():
        remove_zarr_store(path)


def _check_beside_source(path: Path, chosen: SelectedSource) -> None:
    """Raise `WriteError` for a target in a Zarr store that is read: it would become a part of that store."""
    for place in local_paths(chosen.places):
        # of references the place is what they are relative to, such as "/"
        if place in path.resolve().parents and is_zarr_group(place):
            raise WriteError(f"{path} lies within {place}, which the conversion reads; write beside that store")


def _open_journal(path: Path, chosen: SelectedSource, arrays: Sequence[ArrayOutline]) -> ConversionJournal:
    beside = path.with_name(path.name + ".journal")
    if not beside.exists() and path.exists() and (not path.is_dir() or any(path.iterdir())):
        whole = path.is_dir() and is_complete_store(path)
        state = "is complete" if whole else "exists without the journal of a conversion"
        may_replace = is_zarr_group(path) and not holds_place_read(path, chosen.places)
        again = ", or start again with replace=True (--replace)" if may_replace else ""
        raise WriteError(f"{path} {state}; write elsewhere{again}")
    with writing_to(path, CONVERT_AGAIN):
        path.parent.mkdir(parents=True, exist_ok=True)
    return ConversionJournal(beside, conversion_identity(chosen, arrays))


def _check_began_here(path: Path, journal: ConversionJournal) -> None:
    """Check the store at the target of a conversion that goes on.  Raises: `WriteError` for another store."""
    if not is_zarr_group(path):  # there is no store to replace
        return
    done = completeness_from_attrs(zarr_store_attrs(path))
    if done is None or (not journal.is_made and (done.steps or done.closed)):
        raise WriteError(
            f"{path} is not what the conversion of {path.name}.journal began; move it away, or start again with "
            "replace=True (--replace)"
        )


class _ConversionTarget(ZarrSink):
    def __init__(self, path: Path, chosen: SelectedSource, arrays: Sequence[ArrayOutline]) -> None:
        from zarr.codecs import BloscCodec

        compressor = BloscCodec(cname="zstd", clevel=3, shuffle="shuffle")
        super().__init__(path, None, {"compressors": compressor}, CONVERT_AGAIN)
        self._shapes, self._coords, self._time = arrays, chosen.coordinates, chosen.time
        self._attrs = {str(k): plain_attribute(v) for k, v in chosen.data.attrs.items()}

    def make(self) -> None:
        self.create(self._shapes, self._coords, self._attrs, replace=True)

    def finish(self, digests: Mapping[str, str], identity: str) -> None:
        self.attach(self._shapes)
        self._attrs |= {DIGESTS_ATTRIBUTE: dict(digests), IDENTITY_ATTRIBUTE: identity}
        steps = {n for a in self._shapes for d, n in zip(a.dims, a.shape, strict=True) if d == self._time}
        done = StoreCompleteness(self._time, max(steps), True) if steps else StoreCompleteness(None, 0, True)
        self.commit(self._coords, 0, done)
