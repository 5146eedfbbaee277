"""Source of a conversion: anything that xarray opens, as arrays to move and coordinates to keep."""

from __future__ import annotations

import glob
import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jigsaw.errors import (
    FieldError,
    GridError,
    UnsupportedStoreError,
    WindowError,
    cause_without_secrets,
    imports_needed,
    redacted_text,
)
from jigsaw.io.chunks.array_table import ArrayTable, fill_is_missing
from jigsaw.io.chunks.files import size_and_change
from jigsaw.io.datasets.opening import open
from jigsaw.io.formats.array_source import open_xarray
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.engine import StoreIdentity, look_at_store
from jigsaw.io.reports.recommend import best_chunks, chunk_shape_of, shard_shape_of
from jigsaw.io.series.cell_grid import cell_grid_of, cells_along_curve, renumbered_cells
from jigsaw.io.series.coords import CELL_ROLE, SOURCE_PLACES
from jigsaw.io.series.fields import FieldChannel, channels_of_fields
from jigsaw.io.series.store_survey import StoreSurvey, StoreVariable, check_no_sums
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.writing.cf import REFERENCE_ATTRIBUTES, StoredCoordinate, encode_coordinate
from jigsaw.io.writing.outline import ArrayOutline

if TYPE_CHECKING:
    import xarray as xr

    from jigsaw.io.formats.zarr_reach import WatchedStore

_CONVERTED_KINDS = "biuf"
_DECODED: dict[str, Any] = {"decode_timedelta": False, "decode_coords": "all"}
# the keys that xarray keeps from an array's own metadata
_OF_ZARR, _OF_ZARR_V3 = {"compressor", "compressors"}, {"serializer", "codecs"}
_COMPARED_IN_MEMORY = 1 << 28
"""Bytes of an array that is read once and kept, to compare other files with it; a larger one is read for each."""
_GRIB = (".grib", ".grib2", ".grb", ".grb2")
_ADVICE_ON_GRIB = (
    "; of a file with a torn message get another copy; if messages differ in level, step type or members, open those "
    "of one kind, xarray.open_dataset(path, engine='cfgrib', backend_kwargs={'filter_by_keys': {'shortName': '2t'}}), "
    "and convert that: jigsaw.io.convert(part, target)"
)


@dataclass(frozen=True, eq=False)
class SelectedSource:
    """The part of a source that is converted: `data` as xarray has it, and what its dims mean."""

    name: str
    files: tuple[str, ...]
    data: xr.Dataset
    found: StoreSurvey
    arrays: tuple[str, ...]
    time: str | None
    outside: Any = False
    watched: tuple[WatchedStore, ...] = ()
    reordered: str | None = None  # the dim along which cells were reordered

    @property
    def coordinates(self) -> list[StoredCoordinate]:
        """Arrays that are stored whole: coordinates, their bounds, labels."""
        return [_as_coordinate(str(n), v) for n, v in self.data.variables.items() if n not in self.arrays]

    @property
    def places(self) -> set[str]:
        """Every file, folder or URL that values come from, as far as xarray says."""
        encodings = (self.data.encoding, *(v.encoding for v in self.data.variables.values()))
        return {*self.files, *(str(e["source"]) for e in encodings if e.get("source"))}

    def dims(self, name: str) -> list[tuple[str, str, int]]:
        """Return (role, own name, size) of each dim of an array."""
        variable = self.data.variables[name]
        roles = self.found.coords.roles(self.found.store.arrays[name])
        return [(r, str(d), n) for r, d, n in zip(roles, variable.dims, variable.shape, strict=True)]

    def outline(
        self, chunks: Mapping[str, int], shards: Mapping[str, int] | None, floats: str | None = None
    ) -> list[ArrayOutline]:
        """Return the arrays of the store to be made: `chunks` and `shards` are sizes by role or name.

        Raises: `FieldError` for an invalid `floats`, `GridError` for sizes along a dim that no array has, and for an
        array without rows.
        """
        if floats not in (None, "float16", "float32", "float64"):
            raise FieldError(f"dtype={floats!r} must be float16, float32 or float64")
        for table in map(self.found.store.arrays.__getitem__, self.arrays):
            table.check_rows(table.dims)
        known = {word for name in self.arrays for role, own, _ in self.dims(name) for word in (role, own)}
        for argument, sizes in (("chunks", chunks), ("shards", shards or {})):
            wrong = [dim for dim, n in sizes.items() if dim not in known or not is_whole_number(n) or n < 1]
            if wrong:
                raise GridError(
                    f"{argument}={{{wrong[0]!r}: {sizes[wrong[0]]}}} must be a positive size along one of "
                    f"{sorted(known)}"
                )
        return [self._array(name, chunks, shards, floats) for name in self.arrays]

    def _array(
        self, name: str, chunks: Mapping[str, int], shards: Mapping[str, int] | None, floats: str | None
    ) -> ArrayOutline:
        variable, dims = self.data.variables[name], self.dims(name)
        stored = variable.dtype.newbyteorder("=")
        dtype = np.dtype(floats) if floats and stored.kind == "f" else stored
        unit = chunk_shape_of(dims, dtype.itemsize, chunks)
        if shards is None:
            held = shard_shape_of(dims, dtype.itemsize, unit)
        else:
            shard = [shards.get(own, shards.get(role, c)) for c, (role, own, _) in zip(unit, dims, strict=True)]
            held = tuple(-(-max(c, min(a, n)) // c) * c for c, a, n in zip(unit, shard, variable.shape, strict=True))
        attrs = {**_xarray_attributes(variable), **self._beside(name)}
        names = tuple(own for _, own, _ in dims)
        return ArrayOutline(name, names, tuple(variable.shape), dtype.name, unit, held if held != unit else None, attrs)

    def _beside(self, name: str) -> dict[str, str]:
        """Return the attribute by which CF readers find coordinates that are not dims."""
        dims = set(self.data.variables[name].dims)
        referred = {
            word for v in self.data.variables.values() for k in REFERENCE_ATTRIBUTES for word in _reference_words(v, k)
        }
        others = {str(n): c for n, c in self.data.coords.items() if n not in self.data.dims and n not in referred}
        beside = [n for n, c in others.items() if set(c.dims) <= dims]
        return {"coordinates": " ".join(sorted(beside))} if beside else {}

    def identity(self) -> str:
        """Return a digest of what is read: files by size and time, some values, shapes, dtypes and coordinates."""
        stamps = [(path, size_and_change(path)) for path in self.files if Path(path).is_file()]
        facts: list[Any] = [self.name, *self.files, *stamps, *self._seen_of_folders()]
        # in the order of names: that in which xarray lists a Zarr store without consolidated metadata changes
        facts += [(n, self.data.variables[n].dims, self.data.variables[n].shape) for n in sorted(self.arrays)]
        facts += [] if self.files else [self._seen_of_values(name) for name in sorted(self.arrays)]
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
        for each in sorted(self.coordinates, key=lambda coordinate: coordinate.name):
            digest.update(repr((each.name, each.dims, each.values.dtype)).encode() + each.values.tobytes())
        return digest.hexdigest()

    def _seen_of_values(self, name: str) -> tuple[Any, ...]:
        """Look at an array of a given dataset: at its file and three rows, or at all values that are in memory."""
        variable = self.data.variables[name]
        source = str(variable.encoding.get("source", ""))
        if variable.ndim and (source or variable.chunks is not None):
            variable = variable[sorted({0, variable.shape[0] // 2, variable.shape[0] - 1})]
        values = np.ascontiguousarray(variable.values).reshape(-1)
        seen = hashlib.blake2b(values.view(np.uint8).data, digest_size=16).hexdigest()
        return name, seen, size_and_change(source) if Path(source).is_file() else None

    def _seen_of_folders(self) -> list[StoreIdentity]:
        """Look at a few chunks of each Zarr store on disk, because only these show that a store was written again."""

        def tables_of(path: str) -> list[ArrayTable]:
            arrays = open_store(path, {"outside": self.outside}).arrays
            return [arrays[name] for name in sorted(self.arrays)]

        return [
            look_at_store(partial(str, path), partial(tables_of, path)) for path in self.files if Path(path).is_dir()
        ]


class OpenedSource(NamedTuple):
    """Dataset that xarray opened; `watched` are the Zarr stores that it reads, where the user gave no dataset.

    `files` are those that were opened here, none where the user gave a dataset, and `parts` the dataset of each where
    they are several.
    """

    name: str
    files: tuple[str, ...]
    data: xr.Dataset
    watched: tuple[WatchedStore, ...] = ()
    parts: tuple[xr.Dataset, ...] = ()

    def close(self) -> None:
        """Close the files that were opened here; a dataset that the user gave stays open."""
        if self.files:
            self.data.close()


def open_with_xarray(source: Any, engine: str | None = None, outside: Any = False) -> OpenedSource:
    """Open a path, URL, glob or list of files (joined by their coordinates) with xarray; a dataset stays as it is.

    In a Zarr v2 store that is given by its place, the same values are missing as for `jigsaw.io.open`: a 0 seldom is.
    Links of a Zarr store and references only lead where `outside` allows.

    Raises: `UnsupportedStoreError` for what xarray does not open, and for codecs that run code; `GridError` for files
    that do not join.
    """
    with imports_needed(UnsupportedStoreError, "converting needs xarray: pip install 'jigsaw-torch[xarray]'"):
        import xarray as xr
    if isinstance(source, xr.Dataset):
        called = redacted_text(f"xarray dataset of {source.encoding.get('source', 'computed values')}")
        return OpenedSource(called, (), source)
    paths = _source_paths(source)
    raw = any(engine in ("zarr", "kerchunk") or (engine is None and not os.path.isfile(path)) for path in paths)
    options: dict[str, Any] = {"engine": engine, **({"decode_cf": False} if raw else _DECODED)}
    if engine == "cfgrib" or (engine is None and paths[0].lower().endswith(_GRIB)):
        # an index beside the file is a pickle, and may come from an untrusted writer; and by default cfgrib leaves out
        # torn messages, and variables that do not fit beside the first ones
        options |= {"engine": "cfgrib", "backend_kwargs": {"indexpath": "", "errors": "raise"}}
    stores: list[Any] = [_checked_store(path, engine, outside) for path in paths]
    watched = tuple(store for store in stores if not isinstance(store, str))
    if watched:
        options["engine"] = "zarr"
    try:
        with warnings.catch_warnings():  # consolidated metadata are not needed
            warnings.filterwarnings("ignore", "Failed to open Zarr store with consolidated", RuntimeWarning)
            if len(paths) == 1:
                dataset = xr.open_dataset(stores[0], **options)
                data = _decode_as_reader(dataset) if raw else dataset
                return OpenedSource(redacted_text(paths[0]), (paths[0],), data, watched)
            dataset, parts = _join_files(stores, options, raw)
            name = redacted_text(f"{paths[0]} and {len(paths) - 1} more")
            return OpenedSource(name, tuple(paths), dataset, watched, parts)
    except GridError:  # of files that are not joined
        raise
    except (OSError, ValueError, ImportError, KeyError) as e:
        advice = _ADVICE_ON_GRIB if options["engine"] == "cfgrib" else ""
        raise UnsupportedStoreError(f"xarray does not open {paths[0]!r}: {e}{advice}") from cause_without_secrets(e)
    except Exception as e:
        if options["engine"] != "cfgrib":
            raise
        # errors of ecCodes have a base of their own, which only that package knows
        raise UnsupportedStoreError(f"xarray does not open {paths[0]!r}: {e}{_ADVICE_ON_GRIB}") from e


def _checked_store(path: str, engine: str | None, outside: Any) -> str | WatchedStore:
    """Return the store to give to xarray for a path, checked before xarray opens it and reads coordinates.

    A Zarr store then leads nowhere else, and others' code or references can do no harm.
    """
    if engine == "kerchunk":
        from jigsaw.io.formats.zarr_reach import check_reference_file, checked_outside

        check_reference_file(path, checked_outside(outside))
    # of URLs without an engine xarray reads those by zarr that end in .zarr
    named = "://" not in path or path.rstrip("/").endswith(".zarr")
    if engine != "zarr" and (engine is not None or not named or os.path.isfile(path)):
        return path
    from zarr.storage import FsspecStore

    from jigsaw.io.formats.zarr_group import arrays_without_code
    from jigsaw.io.formats.zarr_reach import WatchedStore, checked_outside, local_zarr_store

    store = local_zarr_store(path, checked_outside(outside))
    arrays = arrays_without_code(store)
    if arrays and isinstance(store, str) and "://" in store:
        store = FsspecStore.from_url(store, read_only=True)
    # a zip file lists its chunks, so nothing needs to be watched
    return path if isinstance(store, str) else WatchedStore.of(store, arrays)


def _decode_as_reader(raw: xr.Dataset) -> xr.Dataset:
    """Decode by xarray with only the truly missing values named.

    Xarray takes every `fill_value` of Zarr v2 as missing, even a default 0.
    """
    import xarray as xr

    for variable in raw.variables.values():
        is_v2 = not _OF_ZARR.isdisjoint(variable.encoding) and _OF_ZARR_V3.isdisjoint(variable.encoding)
        if is_v2 and not fill_is_missing(variable.attrs.get("_FillValue", 0), variable.attrs):
            variable.attrs.pop("_FillValue", None)
    return xr.decode_cf(raw, **_DECODED)


def _source_paths(source: Any) -> list[str]:
    is_list = isinstance(source, Iterable) and not isinstance(source, str | os.PathLike)
    sources: list[Any] = list(source) if is_list else [source]
    if unlike := [each for each in sources if not isinstance(each, str | os.PathLike)]:
        raise UnsupportedStoreError(
            f"source has a {type(unlike[0]).__name__}; convert takes a path, a URL, a glob, a list of these, or an "
            "xarray.Dataset: open a store of zarr's or Icechunk's by xarray.open_zarr(store), and give that"
        )
    texts = [os.fspath(each) for each in sources]
    # a URL may have a query behind "?"
    paths = [p for t in texts for p in (sorted(glob.glob(t)) if glob.has_magic(t) and "://" not in t else [t])]
    if not paths:
        raise UnsupportedStoreError(f"{source!r} names no file")
    return paths


def _join_files(
    paths: Sequence[Any], options: Mapping[str, Any], raw: bool
) -> tuple[xr.Dataset, tuple[xr.Dataset, ...]]:
    """Return files as one dataset, and the dataset of each."""
    import xarray as xr

    parts: list[xr.Dataset] = []
    files_to_close = ExitStack()

    def keep_part(part: xr.Dataset) -> xr.Dataset:
        parts.append(_decode_as_reader(part) if raw else part)
        files_to_close.callback(part.close)
        return parts[-1]

    joining: dict[str, Any] = {"data_vars": "minimal", "coords": "minimal", "compat": "override", "join": "exact"}
    joining["combine_attrs"] = _attributes_of_first
    try:
        with files_to_close:
            dataset = xr.open_mfdataset(list(paths), combine="by_coords", preprocess=keep_part, **joining, **options)
            files_to_close.pop_all()  # they are joined, and closed with the dataset
            return dataset, tuple(parts)
    except GridError:
        raise
    except (ValueError, TypeError) as e:  # the last for times of several calendars
        if "engine" in str(e) or "dask" in str(e):
            raise
        raise GridError(f"the {len(paths)} files {paths[0]!r} … do not join along their coordinates: {e}") from (
            cause_without_secrets(e)
        )


def _attributes_of_first(of_files: Sequence[Mapping[str, Any]], context: Any = None) -> dict[str, Any]:
    """Return the attributes of an array in the first file.  Raises: `GridError` where another has other units."""
    units = list(dict.fromkeys(str(attrs.get("units", "")) for attrs in of_files))
    if len(units) > 1:
        name = of_files[0].get("long_name", of_files[0].get("standard_name", "an array without a long name"))
        raise GridError(f"files have {name!r} in units {units[0]!r} and {units[1]!r}; write them in the same units")
    return dict(of_files[0]) if of_files else {}


def select_source(
    opened: OpenedSource,
    fields: Sequence[str] | None = None,
    time: Any = None,
    every: Any = 1,
    dims: Mapping[str, str] | None = None,
    outside: Any = False,
    missing: str = "error",
    order: str = "store",
) -> SelectedSource:
    """Select what is converted of a source: variables, levels and steps.

    `fields` and `missing` as in `jigsaw.io.open`, `order` as in `convert`; levels that one of them names are kept for
    all variables. By default all is converted.

    Raises: a `ReadError` as `jigsaw.io.open` does.
    """
    name, files, data, watched, _ = opened
    survey = StoreSurvey(open_xarray(data, {"outside": outside}), dims)
    channels = [] if fields is None else channels_of_fields(fields, survey.levels)
    chosen = list(survey.variables if fields is None else dict.fromkeys(c.array for c in channels))
    if not chosen:
        raise FieldError(
            f"{name} has no variable on a lat-lon grid, on cells or in a volume; it has "
            f"{', '.join(map(str, data.data_vars))}; say what its dims are with dims={{'lat': …, 'lon': …}}"
        )
    data = _take_levels(data, survey, channels)
    time_dim = next((survey.variables[n].dim("time") for n in chosen if "time" in survey.variables[n].roles), None)
    steps = _steps_to_convert(survey, chosen, time, every)
    if steps is not None and time_dim is not None:
        data = data.isel({time_dim: steps})
    moved, kept = chosen, data
    if fields is None:
        moved = [str(n) for n, v in data.data_vars.items() if v.dtype.kind in _CONVERTED_KINDS]
    else:  # with their coordinates, and variables that these name: bounds of cells, a grid mapping
        known = {str(n) for n in data[chosen].variables}
        on_cells = [(v.table, dim) for v in (survey.variables[n] for n in chosen) for dim in v.table.dims]
        known |= {name for table, dim in on_cells for name in survey.coords.angles(table, dim).values()}
        known |= {name for n in chosen for name in survey.coords.mesh_variables(survey.variables[n].table)}
        known |= {
            word for n in known for key in REFERENCE_ATTRIBUTES for word in _reference_words(data.variables[n], key)
        }
        kept = data.drop_vars([n for n in data.variables if str(n) not in known])
    for store in watched:
        store.filled_arrays = frozenset(moved if missing == "fill" else ())
    _check_files_alike(opened, kept)
    survey, reordered = StoreSurvey(open_xarray(kept, {"outside": outside}), dims), None
    if order == "curve":
        kept, reordered = _along_curve(kept, survey, survey.variables[chosen[0]])
        survey = StoreSurvey(open_xarray(kept, {"outside": outside}), dims)
        moved = [n for n in moved if n in kept.data_vars]
    return SelectedSource(name, files, kept, survey, tuple(moved), time_dim, outside, watched, reordered)


def _check_files_alike(opened: OpenedSource, kept: xr.Dataset) -> None:
    """Refuse files that have other values at the same places, such as of a field without time: one file's would stay.

    Take three files of the steps 0 to 2, 0 to 2 and 3 to 5. They lie at two places along time, and at one along
    latitude.
    """
    if not opened.parts:
        return
    places = {str(dim): _places_of_parts(opened, str(dim)) for dim in opened.data.dims}
    for name in map(str, kept.variables):
        firsts: dict[tuple[int, ...], tuple[str, Any]] = {}
        for number, (path, part) in enumerate(zip(opened.files, opened.parts, strict=True)):
            theirs = part.variables.get(name)
            if theirs is None or name in part.indexes:
                continue
            place = tuple(places[str(dim)][number] for dim in theirs.dims)
            if place not in firsts:
                firsts[place] = path, theirs
                continue
            first, ours = firsts[place]
            if ours.nbytes <= _COMPARED_IN_MEMORY:
                ours.load()
            if not ours.equals(theirs):
                raise GridError(
                    f"{redacted_text(path)} has other values of {name!r} than {redacted_text(first)} at the same "
                    "place, and joined files keep those of one; write them alike, leave the array out by fields=, or "
                    "convert these files apart"
                )


def _places_of_parts(opened: OpenedSource, dim: str) -> list[int]:
    """Return for each file the number of its place along a dim: files have the same one where their coordinates agree.

    Raises: `GridError` for files that share some coordinates and not all.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    places: list[int] = []
    owners: dict[Any, tuple[int, str]] = {}
    for path, part in zip(opened.files, opened.parts, strict=True):
        values = tuple(part.indexes[dim].tolist()) if dim in part.indexes else ()
        place = numbers.setdefault(values, len(numbers))
        places.append(place)
        for value in dict.fromkeys(values) if place == len(numbers) - 1 else ():
            known, owner = owners.setdefault(value, (place, path))
            if known != place:
                raise GridError(
                    f"{redacted_text(owner)} and {redacted_text(path)} overlap along {dim!r}, at {value} among others; "
                    "leave one out, or cut it"
                )
    return places


def _along_curve(data: xr.Dataset, survey: StoreSurvey, variable: StoreVariable) -> tuple[xr.Dataset, str]:
    """Return a dataset with the cells of a variable along a curve, with where each was, and their dim."""
    grid = cell_grid_of(survey, variable)
    along = cells_along_curve(grid, variable)
    assert grid is not None
    dim = variable.dim(CELL_ROLE)
    places = np.argsort(along)
    renumbered: dict[str, Any] = {}
    for name, start in survey.coords.tables_of_cells(variable.table).items():
        renumbered[name] = data[name].copy(data=renumbered_cells(data[name].values, start, places))
    was = along if grid.source_places is None else grid.source_places[along]
    beside: dict[str, Any] = {SOURCE_PLACES: (dim, was, {"long_name": "place of the cell in the source"})}
    if grid.nside is not None and grid.numbers is None:
        beside["healpix_index"] = dim, along, {"standard_name": "healpix_index"}
    ordered = data.drop_vars([SOURCE_PLACES, *renumbered], errors="ignore").assign_coords(renumbered)
    return ordered.isel({dim: along}).assign_coords(beside), dim


def _take_levels(data: xr.Dataset, survey: StoreSurvey, channels: Iterable[FieldChannel]) -> xr.Dataset:
    levels_by_dim: dict[str, set[int]] = {}
    for c in channels:
        if c.level is not None:
            levels_by_dim.setdefault(survey.variables[c.array].dim("level"), set()).add(c.level)
    return data.isel({dim: sorted(at) for dim, at in levels_by_dim.items() if len(at) < data.sizes[dim]})


def _steps_to_convert(survey: StoreSurvey, chosen: Sequence[str], time: Any, every: Any) -> Any:
    """Return the positions of the steps that are kept: a slice where they are equally far apart."""
    if time is None and is_whole_number(every) and every == 1:
        return None
    variables = [survey.variables[name] for name in chosen]
    axis = survey.time(variables)
    if axis is None:
        raise WindowError(f"time={time!r}, every={every!r} select steps, but the fields have no time dim")
    series = axis.series(time, every)
    if series.usual > axis.usual:
        check_no_sums(variables, every)
    at = series.at
    apart = np.unique(np.diff(at))
    return slice(int(at[0]), int(at[-1]) + 1, int(apart[0]) if len(apart) else 1) if len(apart) < 2 else at


def recommended_chunks(
    selected: SelectedSource, mesh: Mapping[str, int], dims: Mapping[str, str] | None
) -> dict[str, int]:
    """Return the chunk sizes by role that this mesh reads cheapest."""
    on_grid = [selected.found.variables[n] for n in selected.arrays if n in selected.found.variables]
    space = {r: on_grid[0].size(r) for r in on_grid[0].space}
    alike = [v for v in on_grid if {r: v.size(r) for r in v.space} == space]
    further = {v.table.dims[d]: 0 for v in alike for d in v.further}
    steps = max((v.size("time") for v in alike if "time" in v.roles), default=1)
    opened = partial(open, selected.data, mesh=mesh, select=further, dims=dims, options={"outside": selected.outside})
    try:
        dataset = opened(fields=[v.table.name for v in alike], targets=[1] if steps > 1 else [])
    except (WindowError, GridError):  # gaps at every step, or several grids: plan one step of one field
        dataset = opened(fields=[alike[0].table.name])
    return dict(best_chunks(dataset).chunks)


def _reference_words(variable: Any, key: str) -> list[str]:
    return str(variable.attrs.get(key, variable.encoding.get(key, ""))).replace(":", " ").split()


def _xarray_attributes(variable: Any) -> dict[str, Any]:
    """Return the attributes as they are stored: xarray moves those that name other variables aside."""
    return {**variable.attrs, **{k: variable.encoding[k] for k in REFERENCE_ATTRIBUTES if k in variable.encoding}}


def _as_coordinate(name: str, variable: Any) -> StoredCoordinate:
    """Encode a coordinate with its own attributes, dates in the units of the source where these are exact."""
    attrs, dims = _xarray_attributes(variable), tuple(map(str, variable.dims))
    values = np.asarray(variable.values)
    if values.dtype.kind not in "mMO":
        return encode_coordinate(name, (dims, values, attrs))
    units = {k: variable.encoding[k] for k in ("units", "calendar") if k in variable.encoding}
    try:
        return encode_coordinate(name, (dims, values, {**attrs, **units}))
    except GridError:  # fractions of days, which the source holds as floats
        return encode_coordinate(name, (dims, values, attrs))
