"""HDF5 and NetCDF-4 as chunk tables: h5py lists datasets and where their chunks lie, and jigsaw reads the chunks.

The filters that the reader undoes itself are in `hdf5_filters`. Everything else is read by libhdf5, under one lock, and
counted as fallback: other filters, types that numpy lacks, values in object headers, irregular virtual datasets.

NetCDF-4 and dimension scales name a dim after the scale attached to it; makani's files, one dataset
``fields[time, channel, lat, lon]`` a file, have none and are named by position; any other dim is ``dim_0``, ``dim_1``…
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import ReadError, UnsupportedStoreError
from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.cache_folder import user_cache_folder
from jigsaw.io.chunks.array_table import (
    ArrayStore,
    ArrayTable,
    declared_missing_values,
    dtype_with_declared_sign,
    fill_value_of,
    missing_values_of,
)
from jigsaw.io.chunks.chunk import ChunkIndex
from jigsaw.io.chunks.files import LocalFiles, StoreFiles
from jigsaw.io.formats import slab_arrays as plain
from jigsaw.io.formats.conventions import MAKANI_DIMS, describe_makani_fields, is_makani_array
from jigsaw.io.formats.hdf5_filters import FilterPipeline, Hdf5Filter, filter_pipeline_of
from jigsaw.io.formats.hdf5_index import (
    Hdf5ChunkPlaces,
    Hdf5File,
    has_misplaced_chunks,
    has_unfiltered_edges,
)
from jigsaw.io.formats.hdf5_virtual import (
    DatasetStorage,
    FileReach,
    Hdf5SlabPlaces,
    LibraryPlaces,
    external_raw_file,
    referenced_path,
    storage_of_virtual_dataset,
)
from jigsaw.io.formats.well import BOUNDARY_GROUP, WELL_GROUPS, is_well_file, well_as_fields

_MOST_LINKS = 32
VisitedGroups = set[tuple[str, int]]
"""File and address of each group that was listed."""
_H5O_MODULE: Any = import_module("h5py.h5o")  # which h5py's types do not list
_PLUGIN_NAMES = {32000: "lzf", 32026: "Blosc2", 32013: "ZFP", 32017: "SZ", 32024: "SZ3", 4: "szip", 307: "bzip2"}
_BOOKKEEPING_ATTRS = {
    "CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS",
    "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "_nc3_strict",
}  # fmt: skip
_NOT_A_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"
_NOT_A_COORDINATE = "_nc4_non_coord_"
# netcdf.h: what NetCDF reads where nothing was written
_FILLS = {
    "i1": -127, "i2": -32767, "i4": -2147483647, "i8": -9223372036854775806,
    "u1": 255, "u2": 65535, "u4": 4294967295, "u8": 18446744073709551614,
    "f4": 9.969209968386869e36, "f8": 9.969209968386869e36,
}  # fmt: skip


def claims(url: Any) -> bool:
    """Say whether `url` is a local HDF5 file, by its signature."""
    return isinstance(url, str | os.PathLike) and os.path.isfile(url) and h5py.is_hdf5(os.fspath(url))


def open_hdf5_file(
    url: Any, files: StoreFiles | None = None, *, outside: bool = False, cache: str | os.PathLike[str] | None = None
) -> ArrayStore:
    """Open the chunk tables of an HDF5 or NetCDF-4 file; groups become ``group/name``.

    libhdf5 is asked once where the chunks lie, when they are first needed. Long indices are kept in the folder `cache`,
    by default $JIGSAW_CACHE or ~/.cache/jigsaw (an empty name keeps none). External links, sources of virtual datasets
    and external storage must lie in the file's folder or below, unless `outside` allows others. The same holds for each
    file that they lead to. Other places, and files that h5py cannot open, are refused.
    """
    path = str(os.fspath(url))
    opening = _Hdf5Opening(files or LocalFiles(keep=True), outside, cache)
    source = opening.source(path)
    with ExitStack() as held:
        file = held.enter_context(source.opened())
        try:
            attrs = hdf5_attributes(file)
            tables, groups = opening.tables(source, file, held), _well_groups(file)
        except ReadError:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as e:
            # errors that h5py raises for damaged metadata
            raise UnsupportedStoreError(f"{path!r} is damaged, or has what h5py cannot read: {e}") from e
    store = ArrayStore(path, tables, attrs, opening.read_small)
    return well_as_fields(store, groups) if is_well_file(groups) else store


def _well_groups(file: Any) -> dict[str, dict[str, Any]]:
    """Return the attributes of the groups that a file of The Well has, by their paths; through hard links alone."""
    names = [name for name in WELL_GROUPS if _has_own_group(file, name)]
    if BOUNDARY_GROUP in names:
        inner = file[BOUNDARY_GROUP]
        names += [f"{BOUNDARY_GROUP}/{name}" for name in inner if _has_own_group(inner, name)]
    return {name: hdf5_attributes(file[name]) for name in names}


def _has_own_group(group: Any, name: str) -> bool:
    return isinstance(group.get(name, getlink=True), h5py.HardLink) and isinstance(group[name], h5py.Group)


class _FoundDataset(NamedTuple):
    """A dataset by its name in the store: the file that it is in, and its path there through hard links alone."""

    name: str
    source: Hdf5File
    path: str
    dataset: Any


class _Hdf5Opening:
    def __init__(self, files: StoreFiles, outside: bool, cache: str | os.PathLike[str] | None) -> None:
        self._files, self._outside = files, outside
        self._cache = user_cache_folder(cache)
        self._sources: dict[str, Hdf5File] = {}
        self._texts: dict[str, Callable[[], NDArray[Any]]] = {}
        self._tables: dict[str, ArrayTable] = {}
        self._reach = FileReach(outside, self.source, self._followed)

    def source(self, path: str) -> Hdf5File:
        if path not in self._sources:
            self._sources[path] = Hdf5File(path, self._files, self._cache)
        return self._sources[path]

    def tables(self, source: Hdf5File, file: Any, held: ExitStack) -> dict[str, ArrayTable]:
        """Return the tables of all datasets of numbers and lists of texts; linked files stay open in `held`."""
        self._held = held
        datasets = list(self._walk(source, file, "", set()))
        for each in datasets:  # checked first, because reading a shape makes libhdf5 open some files of sources
            self._reach.check(each.source, each.dataset)
        known = {s: Hdf5Dims([f.dataset for f in datasets if f.source is s]) for s in {f.source for f in datasets}}
        for each in datasets:
            if is_dim_without_values(each.dataset):
                continue
            group, slash, last = each.name.strip("/").rpartition("/")
            # NetCDF-4 puts this before the name of a variable that is named like a dim and is not its coordinate
            name = group + slash + last.removeprefix(_NOT_A_COORDINATE)
            table = self._table(name, each, known[each.source])
            if table is not None:
                self._tables[name] = table
        describe_makani_fields(self._tables, source.path)
        return self._tables

    def _walk(self, source: Hdf5File, group: Any, prefix: str, visited: VisitedGroups) -> Iterator[_FoundDataset]:
        """Yield every dataset below a group; a group with several links is listed once, by its first hard link."""
        visited.add((source.path, _object_address(group)))
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.HardLink):
                member = group[name]
                if isinstance(member, h5py.Dataset):
                    yield _FoundDataset(prefix + name, source, f"{group.name.rstrip('/')}/{name}", member)
                elif isinstance(member, h5py.Group) and (source.path, _object_address(member)) not in visited:
                    yield from self._walk(source, member, f"{prefix}{name}/", visited)
            elif isinstance(link, h5py.SoftLink):
                target = self._followed(source, group, link.path)
                if isinstance(target, h5py.Dataset):  # a linked group is found where it is
                    yield _FoundDataset(prefix + name, source, str(target.name), target)
            elif isinstance(link, h5py.ExternalLink):
                yield from self._linked(source, link, prefix + name, visited)

    def _linked(self, source: Hdf5File, link: Any, name: str, visited: VisitedGroups) -> Iterator[_FoundDataset]:
        """Yield the datasets that an external link leads to: none when its file is missing."""
        path = referenced_path(source, str(link.filename), self._outside, f"the external link {name!r}")
        if self._files.size(path) is None:
            return
        other = self.source(path)
        target = self._followed(other, self._held.enter_context(other.opened()), link.path)
        if isinstance(target, h5py.Dataset):
            yield _FoundDataset(name, other, str(target.name), target)
        elif isinstance(target, h5py.Group) and (other.path, _object_address(target)) not in visited:
            yield from self._walk(other, target, name + "/", visited)

    def _followed(self, source: Hdf5File, start: Any, path: str, depth: int = 0) -> Any:
        """Return the object at a path, None when there is none.

        Soft links are followed one by one: libhdf5 would follow external links on the way, wherever they lead.
        """
        at: Any = start.file if path.startswith("/") else start
        for name in (part for part in path.split("/") if part not in ("", ".")):
            link = at.get(name, getlink=True) if isinstance(at, h5py.Group) else None
            if isinstance(link, h5py.SoftLink) and depth < _MOST_LINKS:
                at = self._followed(source, at, link.path, depth + 1)
            elif isinstance(link, h5py.HardLink):
                at = at[name]
            elif isinstance(link, h5py.ExternalLink):
                raise UnsupportedStoreError(
                    f"the soft link to {path!r} in {source.path} leads through an external link; link to the file"
                )
            else:
                return None
        return at

    def _table(self, name: str, place: _FoundDataset, known: Hdf5Dims) -> ArrayTable | None:
        dataset = place.dataset
        if dataset.shape is None:
            return None
        if h5py.check_string_dtype(dataset.dtype) and dataset.ndim <= 1:
            return self._text_table(name, place, known)
        if dataset.dtype.kind not in "biuf":
            return None
        attrs = hdf5_attributes(dataset)
        own = np.dtype(dataset.dtype.str)
        dtype = dtype_with_declared_sign(own, attrs)
        stored = self._stored(place, dtype)
        table = ArrayTable(
            name=name,
            shape=tuple(dataset.shape),
            dims=known.names(dataset),
            dtype=dtype.str,
            chunks=stored.chunks,
            fill_value=fill_value_of(dataset.fillvalue, dtype),
            attrs=attrs,
            masks=declared_missing_values(dtype, attrs, own),
            decoder=stored.decoder,
            places=stored.places,
            load_slowly=_box_reader_by_libhdf5(place, stored.filters),
            clipped=stored.clipped,
            slices=stored.slices,
        )
        shape = known.shape(dataset)
        if shape == table.shape:
            return table
        return _table_to_the_end(table, shape, fill_beyond(dataset, attrs), place.source)

    def _stored(self, place: _FoundDataset, dtype: np.dtype[Any]) -> DatasetStorage:
        dataset, source = place.dataset, place.source
        shape, as_is = tuple(dataset.shape), FilterPipeline(dtype, tuple(range(dataset.ndim)))
        plist = dataset.id.get_create_plist()
        layout = plist.get_layout()
        # true if the stored type is exactly numpy's, and offsets start at the beginning of the file
        same = dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True))
        native = bool(same) and (not dataset.file.userblock_size or h5py.version.hdf5_version_tuple >= (2, 0, 0))
        if layout == h5py.h5d.CHUNKED:
            return _storage_in_chunks(place, dtype, plist, native)
        external = external_raw_file(dataset, source, self._outside)
        if external is not None and not native:
            raise UnsupportedStoreError(
                f"dataset {dataset.name!r} in {source.path} is stored in an external file in a type that numpy lacks"
            )
        if layout == h5py.h5d.CONTIGUOUS and native and shape:
            held, offset = external or (source, dataset.id.get_offset())
            slabs = plain.slab_places(held.files, held.path, offset or 0, shape, dtype.itemsize)
            places = Hdf5SlabPlaces(held, slabs, written=offset is not None)
            return DatasetStorage(slabs.chunks, as_is, places, clipped=True)
        if layout == h5py.h5d.VIRTUAL:
            fill = fill_value_of(dataset.fillvalue, dtype)
            grid = storage_of_virtual_dataset(dataset, source, self._outside, fill, self._source_table)
            if grid is not None and native and dtype == dataset.dtype:
                return grid
        self._reach.check(source, dataset, by_library=True)
        chunks = tuple(plain.slab_shape(shape, dtype.itemsize))
        return DatasetStorage(chunks, None, LibraryPlaces(source), clipped=True, slices=True)

    def _source_table(self, path: str, name: str) -> ArrayTable | None:
        """Return the table of a dataset that a virtual one shows; None for one that libhdf5 must read."""
        source = self.source(path)
        with source.opened() as file:
            dataset = self._followed(source, file, name)
            if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.shape is None:
                return None
            table = self._table(name, _FoundDataset(name, source, str(dataset.name), dataset), Hdf5Dims())
        return table if table is not None and table.decoder is not None else None

    def _text_table(self, name: str, place: _FoundDataset, known: Hdf5Dims) -> ArrayTable:
        """Return the table of a list of texts, such as names of channels or dates; libhdf5 reads it whole."""
        shape, source, path = known.shape(place.dataset), place.source, place.path
        self._reach.check(source, place.dataset, by_library=True)

        def read() -> NDArray[Any]:
            with source.opened() as file:
                dataset: Any = file[path]
                texts = np.asarray(dataset.asstr("utf-8", "replace")[...]).astype(str)
            whole = np.zeros(shape, texts.dtype)  # an array of empty strings
            whole[tuple(slice(n) for n in texts.shape)] = texts
            return whole

        self._texts[name] = read
        return ArrayTable(
            name=name,
            shape=shape,
            dims=known.names(place.dataset),
            dtype="|O",
            chunks=tuple(max(n, 1) for n in shape),
            attrs=hdf5_attributes(place.dataset),
            places=LibraryPlaces(source),
        )

    def read_small(self, name: str) -> NDArray[Any]:
        if name in self._texts:
            return self._texts[name]()
        table = self._tables[name]
        return plain.read_whole_coordinate(table).astype(table.dtype, copy=False)


def _table_to_the_end(table: ArrayTable, shape: ChunkIndex, fill: Any, source: Hdf5File) -> ArrayTable:
    """Return the table of a variable shorter than its unlimited dims; libhdf5 reads it, further rows are missing."""
    own, dtype = table.shape, np.dtype(table.dtype)

    def load(box: Box) -> NDArray[Any]:
        values = np.full([b - a for a, b in box], fill, dtype)
        stored_box = tuple((a, min(b, n)) for (a, b), n in zip(box, own, strict=True))
        if all(a < b for a, b in stored_box):
            values[box_slices(stored_box, box)] = table.load_slowly(stored_box)
        return values

    # NetCDF-4 has no byte that means missing, so bytes are values, even the fill value
    masks = table.masks if dtype.itemsize == 1 else (*table.masks, *missing_values_of(dtype, [fill]))
    return replace(
        table,
        shape=shape,
        chunks=tuple(plain.slab_shape(shape, dtype.itemsize)),
        decoder=None,
        places=LibraryPlaces(source),
        load_slowly=load,
        masks=tuple(dict.fromkeys(masks)),
        clipped=True,
        slices=True,
    )


def _storage_in_chunks(place: _FoundDataset, dtype: np.dtype[Any], plist: Any, native: bool) -> DatasetStorage:
    shape, chunks = tuple(place.dataset.shape), tuple(place.dataset.chunks)
    stored = (plist.get_filter(k) for k in range(plist.get_nfilters()))
    filters = tuple(Hdf5Filter(int(number), tuple(map(int, values))) for number, _, values, _ in stored)
    if has_misplaced_chunks(place.dataset):
        return DatasetStorage(chunks, None, LibraryPlaces(place.source), filters=filters)
    pipeline = filter_pipeline_of(dtype, len(shape), filters) if native else None
    exact = prod(chunks) * dtype.itemsize if pipeline is not None and pipeline.is_plain else None
    edges = (1 << len(filters)) - 1 if filters and has_unfiltered_edges(plist) else 0
    places = Hdf5ChunkPlaces(place.source, place.path, shape, chunks, exact, edges)
    return DatasetStorage(chunks, pipeline, places, filters=filters)


def _object_address(member: Any) -> int:
    return int(_H5O_MODULE.get_info(member.id).addr)


def _box_reader_by_libhdf5(place: _FoundDataset, filters: tuple[Hdf5Filter, ...]) -> Callable[[Box], NDArray[Any]]:
    source, path = place.source, place.path

    def load(box: Box) -> NDArray[Any]:
        lacking = [f.id for f in filters if not _is_filter_available(f.id)]
        if lacking:
            names = ", ".join(f"{n} ({_PLUGIN_NAMES.get(n, 'registered plugin')})" for n in lacking)
            raise UnsupportedStoreError(
                f"dataset {path!r} in {source.path} needs the HDF5 filter {names}: pip install hdf5plugin"
            )
        return source.slowly(path, box_slices(box))

    return load


def _is_filter_available(number: int) -> bool:
    if not h5py.h5z.filter_avail(number):
        try:
            import_module("hdf5plugin")
        except ImportError:
            return False
    return bool(h5py.h5z.filter_avail(number))


# -- attributes as plain values, and the names of dims ----------------------------------------------------------------


def hdf5_attributes(member: Any) -> dict[str, Any]:
    """Return the attributes of a dataset or group as strings, numbers and lists, without HDF5's bookkeeping."""
    attrs: dict[str, Any] = {}
    for name in member.attrs:
        if name in _BOOKKEEPING_ATTRS:
            continue
        try:
            value = member.attrs[name]
        except (OSError, TypeError, ValueError):
            continue  # its type is one that numpy lacks
        if not isinstance(value, h5py.Empty):
            attrs[str(name)] = _plain_value(value)
    return attrs


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain_value(value.ravel()[0]) if value.size == 1 else [_plain_value(x) for x in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if isinstance(value, np.generic) else value


def is_dim_scale(dataset: Any) -> bool:
    """Say whether a dataset holds the coordinate of a dim."""
    return _text_attribute(dataset, "CLASS") == b"DIMENSION_SCALE"


def is_dim_without_values(dataset: Any) -> bool:
    """Say whether a dataset stands for a dim without a coordinate variable, and so lacks values."""
    return is_dim_scale(dataset) and _text_attribute(dataset, "NAME").startswith(_NOT_A_VARIABLE)


def _text_attribute(member: Any, name: str) -> bytes:
    """Return a text attribute; empty when there is none."""
    try:
        value = member.attrs.get(name, b"")
    except (OSError, TypeError, ValueError):
        return b""
    return value.encode() if isinstance(value, str) else bytes(value) if isinstance(value, bytes) else b""


class Hdf5Dims:
    """Dims as the `datasets` of a file describe them; without `datasets`, as each dataset describes its own."""

    def __init__(self, datasets: Sequence[Any] = ()) -> None:
        scales = [d for d in datasets if is_dim_scale(d)]
        self._by_id = {int(d.attrs["_Netcdf4Dimid"]): str(d.name) for d in scales if "_Netcdf4Dimid" in d.attrs}
        # NetCDF-4 grows a variable only as far as it is written: an unlimited dim is as long as its longest variable
        growing = {str(d.name) for d in scales if d.maxshape and d.maxshape[0] is None}
        self._lengths: dict[str, int] = {}
        for d in datasets if growing else ():
            for path, size in zip(self._scales(d), d.shape or (), strict=False):
                if path in growing and not is_dim_without_values(d):
                    self._lengths[path] = max(size, self._lengths.get(path, 0))

    def names(self, dataset: Any) -> tuple[str, ...]:
        """Return the names of a dataset's dims; names of dims that share a scale get their position as a suffix."""
        scales = [None if path is None else _last_name(path) for path in self._scales(dataset)]
        if is_makani_array(_last_name(dataset.name), scales):
            return MAKANI_DIMS
        names = [f"dim_{i}" if scale is None else scale for i, scale in enumerate(scales)]
        return tuple(f"{name}_{i}" if name in names[:i] else name for i, name in enumerate(names))

    def shape(self, dataset: Any) -> tuple[int, ...]:
        """Return the shape of a dataset, including rows of unlimited dims that were not written."""
        own = tuple(dataset.shape)
        if not self._lengths:
            return own
        return tuple(max(n, self._lengths.get(p or "", n)) for p, n in zip(self._scales(dataset), own, strict=True))

    def _scales(self, dataset: Any) -> list[str | None]:
        """Return the path of the scale of each dim, None for a dim without one.

        A coordinate variable of several dims has the numbers of NetCDF-4's dims in place of attached scales.
        """
        numbers = dataset.attrs.get("_Netcdf4Coordinates")
        if numbers is not None and len(numbers) == dataset.ndim and all(int(n) in self._by_id for n in numbers):
            return [self._by_id[int(n)] for n in numbers]
        if is_dim_scale(dataset):
            return [str(dataset.name), *[None] * (dataset.ndim - 1)]
        return [_dim_scale_name(dataset, i) for i in range(dataset.ndim)]


def _last_name(path: Any) -> str:
    return str(path).rpartition("/")[2].removeprefix(_NOT_A_COORDINATE)


def fill_beyond(dataset: Any, attrs: Mapping[str, Any]) -> Any:
    """Return the value of rows of unlimited dims that were never written, as NetCDF-4 reads them. This is its
    ``_FillValue``, the dataset's own fill value where one was chosen, or NetCDF's default for its type.
    """
    chosen = dataset.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    default = dataset.fillvalue if chosen else _FILLS.get(dataset.dtype.str[1:], dataset.fillvalue)
    return attrs.get("_FillValue", default)


def _dim_scale_name(dataset: Any, dim: int) -> str | None:
    try:
        scales = dataset.dims[dim]
        return str(scales[0].name) if len(scales) else None
    except (KeyError, RuntimeError, OSError, ValueError, TypeError) as e:
        raise UnsupportedStoreError(
            f"dataset {dataset.name!r} has a damaged list of dimension scales for its dim {dim}: {e}"
        ) from e
