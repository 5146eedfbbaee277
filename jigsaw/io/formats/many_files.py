"""Many files along time, with trajectories or with fields of their own, as one store: arrays joined as they are stored.

Opening reads the metadata, the times and the one-dimensional coordinates of every file, 16 at a time; a file's chunks
are looked up when a sample first needs them, and the last 64 files stay open.
"""

from __future__ import annotations

import glob
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import CorruptChunkError, GridError, ReadError, UnsupportedStoreError, redacted_text
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable, JoinedArrays
from jigsaw.io.chunks.chunk import ChunkIndex
from jigsaw.io.chunks.files import LocalFiles, fresh_memory, size_and_change
from jigsaw.io.formats.array_source import FilelessPlaces, table_of_values
from jigsaw.io.formats.slab_arrays import read_table_box
from jigsaw.io.series.coords import BOUNDARY_ATTR, TRAJECTORY_ROLE, decoded_coordinate, role_of_dim
from jigsaw.io.series.times import TimeAxis, decode_times

_FILES_OPENED_AT_ONCE = 16
_STORES_KEPT_OPEN = 64
_PLACE_ROLES = ("level", "z", "member")
"""Roles of coordinates without dims, which say where or of what a whole array is."""
_PACKING_ATTRS = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")

StoreOpener = Callable[[str], ArrayStore]


def claims(url: Any) -> bool:
    """Say whether a path has the wildcards ``* ? [`` and is not itself a file, or is a list of paths."""
    if isinstance(url, str):
        return "://" not in url and glob.has_magic(url) and not os.path.exists(url)
    return isinstance(url, list | tuple) and bool(url) and all(isinstance(p, str | os.PathLike) for p in url)


def open_many(
    paths: str | Sequence[str | os.PathLike[str]], opener: StoreOpener | None = None, along: str | None = None
) -> ArrayStore:
    """Open the files that a glob string or a list names, joined along time or trajectories; formats may be mixed.

    Every file is read with its own chunks, dtype, scale and offset, and times in its own units. Files are ordered by
    their times, or as they are given (a glob: by name) when they lack times. Arrays without time must be the same in
    all files: one stored chunk of each is compared, and the values where it differs. So must the level or member of an
    array be, where a coordinate without dims says it. `along` is the dim that is joined, by default that of
    trajectories where there is one, else of time; `opener` opens one file, by default `open_store`.

    A gap in time is reported in the store's `notes`, and no window crosses it.

    Files of other fields at the same times are joined as channels. Their grids must be the same.

    A file may lack an array, or have it on another grid, in other units, or without time and with other values. That
    array is refused when it is read, with a `GridError` that names the file; the others are joined.

    Raises: `UnsupportedStoreError` when there is no file; `GridError` naming the file for one whose times overlap with
    another's; what opening a file raises.

    >>> store = jigsaw.io.open_many("globe-*.nc")
    >>> jigsaw.io.open(store, mesh={"lat": 1}, fields=["t2m"])
    Dataset(2 files globe-01.nc to globe-02.nc: 8 samples, 1 channels, lat 9, lon 16; [1, 1, 9, 16])
    """
    if opener is None:
        from jigsaw.io.formats.store import open_store  # imported here, because that file imports this one

        opener = open_store
    files = _OpenStores(_listed_paths(paths), opener)
    first = files.store(files.paths[0])
    dim = along or _joined_dim_of_store(first)
    with ThreadPoolExecutor(min(_FILES_OPENED_AT_ONCE, len(files.paths)), thread_name_prefix="jigsaw-open") as pool:
        known_files = list(pool.map(partial(_know_file, files, dim), files.paths))
    parts = _files_by_fields([f for f in known_files if f.steps], dim) or [known_files]
    stores: list[ArrayStore] = []
    for part in parts:
        series = _files_in_time_order([f for f in part if f.steps] or part[:1])
        unfit = _unfit_arrays(files, [series[0], *(f for f in part if f is not series[0])], dim)
        stores.append(_JoinedFiles(files, series, dim, unfit).store())
    return stores[0] if len(stores) == 1 else _stores_side_by_side(files, parts, stores, dim)


def _listed_paths(paths: str | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    listed = sorted(glob.glob(paths, recursive=True)) if isinstance(paths, str) else [os.fspath(p) for p in paths]
    if not listed:
        raise UnsupportedStoreError(f"{paths!r} names no file")
    if len(set(listed)) != len(listed):
        twice = next(p for p in listed if listed.count(p) > 1)
        raise GridError(f"the list of files names {twice!r} twice")
    return tuple(listed)


def _joined_dim_of_store(store: ArrayStore) -> str:
    dims = dict.fromkeys(d for table in store.arrays.values() for d in table.dims)
    if any(TRAJECTORY_ROLE in table.roles for table in store.arrays.values()):
        return TRAJECTORY_ROLE
    roles = {d: role_of_dim(d, store.arrays[d].attrs if d in store.arrays else {}) for d in dims}
    for role in ("time", "init"):
        time_dims = [d for d, its_role in roles.items() if its_role == role]
        if len(time_dims) == 1:
            return time_dims[0]
    raise GridError(
        f"{store.url} has the dims {list(dims)}, of which not exactly one is time; say which one joins the files, with "
        f"jigsaw.io.open_many(paths, along={next(iter(dims), 'time')!r})"
    )


class _OpenStores:
    def __init__(self, paths: tuple[str, ...], opener: StoreOpener) -> None:
        self.paths, self._opener = paths, opener
        self._files = LocalFiles()  # knows the folder that relative paths are of, wherever the process goes later
        self._open: OrderedDict[str, ArrayStore] = OrderedDict()
        self._stamps: dict[str, tuple[int, int] | str | None] = {}
        self._lock = threading.Lock()

    def store(self, path: str) -> ArrayStore:
        """Return the open store of a file. Raises: `CorruptChunkError` when it has changed since."""
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
        is_known = path in self._stamps and "://" not in path
        place = self._files.absolute_path(path) if is_known else path
        stamp = size_and_change(place)  # before it is opened
        opened = self._opener(place)
        stamp = opened.stamp or stamp
        with self._lock:
            if self._stamps.setdefault(path, stamp) != stamp:
                raise CorruptChunkError(f"{redacted_text(path)} has changed since it was opened; open the files again")
            self._open[path] = opened
            if len(self._open) > _STORES_KEPT_OPEN:
                self._open.popitem(last=False)
        return opened


@dataclass(frozen=True)
class _ArrayOfFile:
    """One array of a file: `packing` turns its stored values into those meant."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    units: str
    calendar: str
    packing: tuple[Any, ...]
    ends: Any


@dataclass(frozen=True, eq=False)
class _KnownFile:
    """Facts kept of every file: the shape of its arrays, its coordinates, and its times if it has any."""

    path: str
    steps: int
    axis: TimeAxis | None
    units: str
    arrays: Mapping[str, _ArrayOfFile]
    coords: Mapping[str, NDArray[Any]]
    digests: Mapping[str, bytes | None]  # of the values of arrays without the joined dim


def _know_file(files: _OpenStores, dim: str, path: str) -> _KnownFile:
    try:
        store = files.store(path)
        arrays = {
            name: _ArrayOfFile(
                t.dims,
                t.shape,
                str(t.attrs.get("units", "")),
                str(t.attrs.get("calendar", "")),
                (t.scale, t.offset, t.masks, t.dtype),
                t.attrs.get(BOUNDARY_ATTR),
            )
            for name, t in store.arrays.items()
        }
        sizes = {s.shape[s.dims.index(dim)] for s in arrays.values() if dim in s.dims}
        if len(sizes) != 1:
            raise GridError(
                f"{path} has no dim {dim!r} along which files are joined, or of several sizes {sorted(sizes)}"
            )
        coords = {n: store.read_small(n) for n, s in arrays.items() if s.dims == (n,) and n != dim}
        statics = [n for n, s in arrays.items() if dim not in s.dims and n not in coords]
        statics = [n for n in statics if arrays[n].dims or role_of_dim(n, store.arrays[n].attrs) in _PLACE_ROLES]
        digests = {n: _digest_of_middle(store.arrays[n]) for n in statics if store.arrays[n].dtype[1] in "biuf"}
        table = store.arrays.get(dim)
        axis, units = None, ""
        if table is not None and table.dims == (dim,) and min(sizes):
            axis = decode_times(decoded_coordinate(table, store.read_small(dim)), table.attrs)
            units = arrays[dim].units
        return _KnownFile(path, sizes.pop(), axis, units, arrays, coords, digests)
    except ReadError as e:
        raise e if path in str(e) else type(e)(f"{path}: {e}") from e


def _digest_of_middle(table: ArrayTable) -> bytes | None:
    """Return a digest of the stored chunk in the middle of an array; None for one that is not stored as a whole."""
    if 0 in table.grid.counts or table.decoder is None:
        return None
    ref = table.finder.locate(tuple(n // 2 for n in table.grid.counts))
    if ref is None or ref.length is None:
        return None
    stored = fresh_memory(ref.length)
    is_there = table.places.files.ranges(ref.path, [(ref.offset, stored)])
    return blake2b(stored.tobytes(), digest_size=16).digest() if is_there else None


def _unfit_arrays(files: _OpenStores, series: Sequence[_KnownFile], dim: str) -> dict[str, str]:
    """Return why arrays of the first file cannot be joined with the others', by name, of those that cannot."""
    first, unfit = series[0], dict[str, str]()
    for other in series[1:]:
        for name in first.arrays.keys() - unfit.keys():
            why = _why_unlike(name, first, other, dim)
            if why is None and name in first.digests:
                why = _why_another_static(files, name, first, other)
            if why is not None:
                unfit[name] = why
    # where rows lie is said by a dim's own coordinate, or by latitudes and longitudes of two dims
    tables = files.store(first.path).arrays
    places = [n for n in unfit if n in first.digests and role_of_dim(n, tables[n].attrs) in ("lat", "lon")]
    # a coordinate without dims, which an array names, may be its level or its member
    scalars = {n for n in unfit if not first.arrays[n].dims and n in first.digests}
    scalars = {n for n in scalars if all(n in file.arrays for file in series)}
    causes: dict[str, list[str]] = {}
    for name, array in first.arrays.items():
        around = [n for n in places if set(first.arrays[n].dims) <= set(array.dims)]
        named = str(tables[name].attrs.get("coordinates", "")).split()
        causes[name] = [name, *array.dims, *around, *(n for n in named if n in scalars)]
    return {n: unfit[k] for n, keys in causes.items() for k in reversed(keys) if k in unfit}


def _why_another_static(files: _OpenStores, name: str, first: _KnownFile, other: _KnownFile) -> str | None:
    """Compare an array of two files by the bytes of one chunk, and by its values where these differ: to the bit, or
    where numbers are packed to a step of theirs.
    """
    if first.digests[name] is not None and first.digests[name] == other.digests.get(name):
        return None
    tables = [files.store(file.path).arrays[name] for file in (first, other)]
    try:
        ours, theirs = (
            decoded_coordinate(t, read_table_box(t, tuple((0, n) for n in t.shape), "fill"), wide=True) for t in tables
        )
    except ReadError as e:
        return str(e)
    step = max((abs(t.scale) for t in tables if (t.scale, t.offset) != (1.0, 0.0)), default=0.0)
    if np.allclose(ours, theirs, rtol=0, atol=step, equal_nan=True):
        return None
    return f"{other.path} has other values of {name!r} than {first.path}, though it does not lie along the joined dim"


def _why_unlike(name: str, first: _KnownFile, other: _KnownFile, dim: str) -> str | None:
    ours, theirs = first.arrays[name], other.arrays.get(name)
    if theirs is None:
        return f"{other.path} has no array {name!r}, which {first.path} has; join files with the same ones"
    if _sizes_but_joined(ours, dim) != _sizes_but_joined(theirs, dim):
        return (
            f"{other.path} lies on another grid than {first.path}: array {name!r} is {_shown_dims(theirs)} there "
            f"and {_shown_dims(ours)} here"
        )
    if ours.units != theirs.units and " since " not in ours.units:
        return f"{other.path} has array {name!r} in units {theirs.units!r} and {first.path} in {ours.units!r}"
    if ours.ends != theirs.ends:
        return f"{other.path} has the boundaries {theirs.ends} along {name!r} and {first.path} {ours.ends}"
    if name in first.coords and not np.array_equal(first.coords[name], other.coords[name]):
        return f"{other.path} lies on another grid than {first.path}: its {name!r} has other values"
    return None


def _sizes_but_joined(array: _ArrayOfFile, dim: str) -> list[tuple[str, int | None]]:
    return [(d, None if d == dim else n) for d, n in zip(array.dims, array.shape, strict=True)]


def _shown_dims(array: _ArrayOfFile) -> str:
    return ", ".join(f"{d} {n}" for d, n in zip(array.dims, array.shape, strict=True)) or "a scalar"


def _files_in_time_order(files: list[_KnownFile]) -> list[_KnownFile]:
    without = [f for f in files if f.axis is None]
    if without:
        if len(without) < len(files):
            raise GridError(f"{without[0].path} has no times, and others of the files have")
        return files
    kinds = {f.path: (_times_of_file(f).dtype.kind, getattr(_times_of_file(f)[0], "calendar", "")) for f in files}
    odd = [f for f in files if kinds[f.path] != kinds[files[0].path]]
    odd += [f for f in files if _times_of_file(f).dtype.kind not in "mMO" and f.units != files[0].units]
    if odd:
        raise GridError(f"the times of {odd[0].path} and {files[0].path} are in other calendars or units")
    series = sorted(files, key=lambda f: _times_of_file(f)[0])
    for before, after in pairwise(series):
        if _times_of_file(before)[-1] >= _times_of_file(after)[0]:
            raise GridError(
                f"the times of two files overlap: {before.path} ends at {_times_of_file(before)[-1]} and {after.path} "
                f"begins at {_times_of_file(after)[0]}; leave one out, or cut it; files of other fields need "
                "the same times"
            )
    return series


def _times_of_file(file: _KnownFile) -> NDArray[Any]:
    assert file.axis is not None
    return file.axis.stamps


def _files_by_fields(files: list[_KnownFile], dim: str) -> list[list[_KnownFile]]:
    """Return files of other fields at the same times, those of each set together; none for any others."""
    parts: dict[frozenset[str], list[_KnownFile]] = {}
    for file in files:
        fields = frozenset(n for n, a in file.arrays.items() if dim in a.dims and len(a.dims) > 1)
        parts.setdefault(fields, []).append(file)
    alone = len(parts) < 2 or any(f.axis is None for f in files)
    if alone or len(frozenset[str]().union(*parts)) < sum(map(len, parts)):
        return []
    series = [_files_in_time_order(part) for part in parts.values()]
    times, *others = [np.concatenate([_times_of_file(f) for f in part]) for part in series]
    same = all(other.dtype.kind == times.dtype.kind and np.array_equal(times, other) for other in others)
    return series if same else []


def _stores_side_by_side(
    files: _OpenStores, parts: list[list[_KnownFile]], stores: list[ArrayStore], dim: str
) -> ArrayStore:
    """Return stores of other fields as one. Raises: `GridError` where arrays without time, or places, differ."""
    owners: dict[str, int] = {}
    for i, (file, *_) in enumerate(parts):
        for name, array in file.arrays.items():
            first = parts[owners.setdefault(name, i)][0]
            if first is file or dim in array.dims or not array.dims:
                continue
            why = _why_unlike(name, first, file, dim)
            if why is None and name in first.digests:
                why = _why_another_static(files, name, first, file)
            if why is not None:
                raise GridError(f"{why}; files of other fields are joined on one grid")
    arrays = {name: stores[i].arrays[name] for name, i in owners.items()}
    every = [file for part in parts for file in part]
    shown = _shown_paths(every)
    members = {f"{n} of {shown[f.path]}": (f.path, n) for f in every for n in f.arrays}

    def read_small(name: str) -> NDArray[Any]:
        return stores[owners[name]].read_small(name)

    url = " beside ".join(store.url for store in stores)
    tables, paths = _JoinedTables(arrays, members, files), tuple(f.path for f in every)
    return ArrayStore(url, tables, stores[0].attrs, read_small, stores[0].notes, paths)


def _shown_paths(files: Sequence[_KnownFile]) -> dict[str, str]:
    """Return a text without secrets for each path, which no other path has."""
    shown: dict[str, str] = {}
    for place, file in enumerate(files):
        text = redacted_text(file.path)
        shown[file.path] = text if text == file.path else f"{text} (file {place})"
    return shown


class _JoinedFiles:
    def __init__(self, files: _OpenStores, series: list[_KnownFile], dim: str, unfit: Mapping[str, str]) -> None:
        self.files, self.series, self.dim, self.unfit = files, series, dim, unfit
        self.edges = (0, *accumulate(f.steps for f in series))
        self.first = files.store(series[0].path)

    def store(self) -> ArrayStore:
        arrays = dict(self.first.arrays)
        held: dict[str, NDArray[Any]] = {}
        members: dict[str, tuple[str, str]] = {}
        shown = _shown_paths(self.series)
        for name, table in self.first.arrays.items():
            if name in self.unfit:
                arrays[name] = self._refused(table, self.unfit[name])
            elif self.dim in table.dims:
                names = {f"{name} of {shown[f.path]}": (f.path, name) for f in self.series}
                members |= names
                arrays[name] = self._array(table, JoinedArrays(table.dims.index(self.dim), tuple(names), self.edges))
        notes: tuple[str, ...] = ()
        if self.series[0].axis is not None:
            arrays[self.dim], held[self.dim] = self._times()
            notes = tuple(self._gaps(held[self.dim], arrays[self.dim].attrs))

        def read_small(name: str) -> NDArray[Any]:
            if name in held:
                return held[name]
            joined = arrays[name]
            if self.dim not in joined.dims:
                return self.first.read_small(name)
            return joined.load_slowly(tuple((0, n) for n in joined.shape))

        url = f"{len(self.series)} files {self.series[0].path} to {self.series[-1].path}"
        tables, paths = _JoinedTables(arrays, members, self.files), tuple(f.path for f in self.series)
        return ArrayStore(url, tables, self.first.attrs, read_small, notes, paths)

    def _times(self) -> tuple[ArrayTable, NDArray[Any]]:
        """Return one time coordinate of all files: dates where they have units, so that units may differ."""
        stamps = np.concatenate([_times_of_file(f) for f in self.series])
        dropped = {"units", "calendar", *_PACKING_ATTRS} if stamps.dtype.kind in "mMO" else set(_PACKING_ATTRS)
        attrs = {k: v for k, v in self.first.arrays[self.dim].attrs.items() if k not in dropped}
        return table_of_values(self.dim, stamps, (self.dim,), attrs, "the times of all files"), stamps

    def _gaps(self, stamps: NDArray[Any], attrs: Mapping[str, Any]) -> Iterator[str]:
        for i in decode_times(stamps, attrs).breaks:
            before, after = (self.series[bisect_right(self.edges, step) - 1].path for step in (i, i + 1))
            where = f"in {before}" if before == after else f"between {before} and {after}"
            yield f"a gap in time {where}: {stamps[i]} is followed by {stamps[i + 1]}"

    def _array(self, table: ArrayTable, members: JoinedArrays) -> ArrayTable:
        """Return one array of all files; it is planned by its members, and read itself it has one dtype and scale."""
        same = len({f.arrays[table.name].packing for f in self.series}) == 1
        at, steps = members.dim, self.edges[-1]
        return replace(
            table,
            shape=(*table.shape[:at], steps, *table.shape[at + 1 :]),
            dtype=table.dtype if same else "<f8",
            chunks=(*table.shape[:at], 1, *table.shape[at + 1 :]),
            attrs=table.attrs if same else {k: v for k, v in table.attrs.items() if k not in _PACKING_ATTRS},
            masks=table.masks if same else (),
            decoder=None,
            places=_JoinedPlaces([f.path for f in self.series], members),
            load_slowly=partial(self._load, table.name, members, not same),
            lengths={},
            clipped=True,
            slices=True,
            members=members,
        )

    def _refused(self, table: ArrayTable, why: str) -> ArrayTable:
        """Return an array that is listed, and refused when it is read."""

        def refuse(box: Box) -> NDArray[Any]:
            raise GridError(why)

        sizes = [self.edges[-1] if d == self.dim else n for d, n in zip(table.dims, table.shape, strict=True)]
        return replace(
            table,
            shape=tuple(sizes),
            decoder=None,
            places=FilelessPlaces(f"array {table.name!r} of some of the files"),
            load_slowly=refuse,
            lengths={},
            unfit=why,
        )

    def _load(self, name: str, members: JoinedArrays, decoded: bool, box: Box) -> NDArray[Any]:
        # only along the joined dim are times joined that files count in different units
        since = {(f.arrays[name].units, f.arrays[name].calendar): f.path for f in self.series}
        if len(since) > 1:
            (ours, start), (theirs, path), *_ = since.items()
            raise GridError(
                f"{path} has array {name!r} in {' '.join(theirs).strip()!r} and {start} in {' '.join(ours).strip()!r}; "
                "write them in the same units, or name the dim like its times"
            )
        parts: list[NDArray[Any]] = []
        for i, rows in members.inside(box[members.dim]):
            table = self.files.store(self.series[i].path).arrays[name]
            values = read_table_box(table, members.local(box, i, rows))
            if decoded and values.dtype.kind in "iuf":
                values = decoded_coordinate(table, values, wide=True)
            parts.append(values)
        return np.concatenate(parts, axis=members.dim)


class _JoinedTables(Mapping[str, ArrayTable]):
    """Joined arrays; those that they are made of are found by name, but not listed."""

    def __init__(
        self, arrays: Mapping[str, ArrayTable], members: Mapping[str, tuple[str, str]], files: _OpenStores
    ) -> None:
        self._arrays, self._members, self._files = arrays, members, files

    def __getitem__(self, name: str) -> ArrayTable:
        if name in self._members:
            path, array = self._members[name]
            return self._files.store(path).arrays[array]
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays or name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class _JoinedPlaces(FilelessPlaces):
    """Places of a joined array: the file that has each step."""

    def __init__(self, paths: Sequence[str], members: JoinedArrays) -> None:
        super().__init__("")
        self._paths, self._members = paths, members

    def path(self, index: ChunkIndex) -> str:
        return self._paths[self._members.find(index[self._members.dim])]
