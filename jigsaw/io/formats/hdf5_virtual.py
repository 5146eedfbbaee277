"""HDF5 datasets whose values lie in other files: virtual datasets as tables over their sources, and external storage.

A virtual dataset becomes a table where its mappings are boxes that fit one grid of chunks; else libhdf5 reads it. It
may show virtual datasets again, or values in raw files. libhdf5 opens whatever they name, and looks in the working
directory for what is not in the file's folder. So `FileReach` follows them to their ends first.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import UnsupportedStoreError
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkPlaces, ChunkRef
from jigsaw.io.formats import slab_arrays as plain
from jigsaw.io.formats.hdf5_filters import FilterPipeline, Hdf5Filter
from jigsaw.io.formats.hdf5_index import Hdf5File, Hdf5Places

_LARGEST_GRID = 1 << 26
_DEEPEST = 16
_TRUST = (
    "if you trust the file, open it with jigsaw.io.open(..., options={'outside': True}), or jigsaw.io.open_hdf5(path, "
    "outside=True)"
)


def referenced_path(source: Hdf5File, name: str, outside: bool, holder: str) -> str:
    """Return the path of a file that an HDF5 file names, relative to its own folder. A path outside of that folder is
    refused, unless `outside` allows it. A symbolic link counts as lying where it leads.
    """
    folder = os.path.dirname(source.path)
    if os.path.isabs(name):
        name = os.path.relpath(name, os.path.abspath(folder)) if source.is_local else name
    name = posixpath.normpath(name)
    path = posixpath.join(folder, name)
    if outside:
        return path
    if os.path.isabs(name) or name.split("/")[0] == "..":
        raise UnsupportedStoreError(
            f"{holder} in {source.path} points to {name!r}, outside of the file's folder; {_TRUST}"
        )
    # the place must lie in the file's folder or below: the folder of its name, or of its real path
    real, own = os.path.realpath(path), source.path
    folders = (os.path.realpath(os.path.dirname(own) or "."), os.path.dirname(os.path.realpath(own)))
    if source.is_local and not any(os.path.commonpath([folder, real]) == folder for folder in folders):
        raise UnsupportedStoreError(
            f"{holder} in {source.path} points to {name!r}, which a symbolic link puts to {real!r}, "
            f"outside of the file's folder; {_TRUST}"
        )
    return path


def _grows_with_sources(space: Any) -> bool:
    """Say whether a virtual dataset takes its extent along a dim from its sources."""
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return False
    _, _, count, block = space.get_regular_hyperslab()
    return any(n >= 2**63 for n in (*count, *block))


def _files_of_pattern(path: str) -> list[str]:
    """Return the files that match a pattern of libhdf5's names: ``%b`` is a number, ``%%`` a percent sign."""
    return sorted(glob.glob(re.sub("%[b%]", lambda m: "[0-9]*" if m[0] == "%b" else "%", glob.escape(path))))


class FileReach:
    """Follower of datasets into other files; `source_of` opens one, `followed` finds an object there by its path."""

    def __init__(
        self, outside: bool, source_of: Callable[[str], Hdf5File], followed: Callable[[Hdf5File, Any, str], Any]
    ) -> None:
        self._outside, self._source_of, self._followed = outside, source_of, followed
        self._sound: set[tuple[str, str, bool]] = set()

    def check(self, source: Hdf5File, dataset: Any, by_library: bool = False) -> None:
        """Raise `UnsupportedStoreError` for a dataset that leads out of the folder of a file on its way.

        `by_library` says that libhdf5 reads it: then to its ends, also for what libhdf5 looks for elsewhere, and for
        what leads back to itself.
        """
        self._check(source, dataset, by_library, ())

    def _check(self, source: Hdf5File, dataset: Any, by_library: bool, way: tuple[tuple[str, str], ...]) -> None:
        place = os.path.realpath(source.path) if source.is_local else source.path, str(dataset.name)
        if (*place, by_library) in self._sound:
            return
        if place in way or len(way) >= _DEEPEST:
            why = "shows itself" if place in way else f"shows virtual datasets {_DEEPEST} deep"
            raise UnsupportedStoreError(
                f"the virtual dataset {dataset.name!r} in {source.path} {why}, which libhdf5 cannot read; "
                "write it again"
            )
        if not self._outside:
            self._check_storage(source, dataset, by_library)
        sources = dataset.virtual_sources() if dataset.is_virtual else []
        # a dataset that neither grows nor is read by libhdf5 opens no file by itself, so names are enough
        ends = by_library or any(_grows_with_sources(each.vspace) for each in sources)
        for path, name in self._shown(source, dataset, sources, by_library):
            if not ends:
                continue
            other = self._source_of(path)
            with other.opened() as file:
                for shown in self._datasets(other, file, name):
                    self._check(other, shown, by_library, (*way, place))
        self._sound.add((*place, by_library))

    def _check_storage(self, source: Hdf5File, dataset: Any, by_library: bool) -> None:
        plist = dataset.id.get_create_plist()
        for i in range(plist.get_external_count()):
            holder = f"the external storage of dataset {dataset.name!r}"
            name = os.fsdecode(plist.get_external(i)[0])
            referenced_path(source, name, False, holder)
            if by_library:
                raise UnsupportedStoreError(
                    f"{holder} in {source.path}, {name!r}, can only be read by libhdf5, which looks for it in the "
                    f"working directory; {_TRUST}"
                )

    def _shown(
        self, source: Hdf5File, dataset: Any, sources: Sequence[Any], by_library: bool
    ) -> Iterator[tuple[str, str]]:
        holder = f"the virtual dataset {dataset.name!r}"
        for each in sources:
            if each.file_name == ".":
                yield source.path, each.dset_name
                continue
            path = referenced_path(source, each.file_name, self._outside, holder)
            if by_library and not source.is_local:
                raise UnsupportedStoreError(
                    f"{holder} in {source.path} can only be read by libhdf5, which does not open {path!r} "
                    "from there; copy the files to a disk"
                )
            files = _files_of_pattern(path) if "%" in path else [path] if source.files.size(path) is not None else []
            for file in files:  # what a pattern finds may be a link
                yield referenced_path(source, os.path.abspath(file), self._outside, holder), each.dset_name
            if by_library and not self._outside:
                self._check_elsewhere(source, each.file_name, bool(files), holder)

    def _check_elsewhere(self, source: Hdf5File, name: str, exists: bool, holder: str) -> None:
        """Check files in the working directory: libhdf5 takes from it, by name or last name, what the folder lacks."""
        folder = os.path.abspath(os.path.dirname(source.path))
        if "%" not in name and not exists:
            raise UnsupportedStoreError(
                f"{holder} in {source.path} needs {name!r}, which does not exist; bring it back"
            )
        tried = os.path.abspath(os.path.basename(name) if os.path.isabs(name) else name)
        for file in _files_of_pattern(tried) if "%" in name else ():
            if not os.path.exists(os.path.join(folder, os.path.relpath(file))):
                raise UnsupportedStoreError(
                    f"{holder} in {source.path} names {name!r}, and libhdf5 would take {file!r} for it, which lies in "
                    f"the working directory; {_TRUST}"
                )

    def _datasets(self, source: Hdf5File, file: Any, name: str) -> Iterator[Any]:
        group, _, last = name.rpartition("/")
        if "%" in group and not self._outside:
            raise UnsupportedStoreError(f"a virtual dataset shows {name!r} in {source.path}; {_TRUST}")
        names = [name]
        if "%" in last:
            parent = self._followed(source, file, group or "/") if group else file
            pattern = re.compile(re.sub("%[b%]", lambda m: r"\d+" if m[0] == "%b" else "%", re.escape(last)))
            names = [f"{group}/{each}" for each in parent or () if pattern.fullmatch(each)]
        for each in names:
            try:
                member = self._followed(source, file, each)
            except UnsupportedStoreError:
                if not self._outside:
                    raise
                continue
            if isinstance(member, h5py.Dataset):
                yield member


class Hdf5SlabPlaces(Hdf5Places):
    """Virtual chunks of an array that lies in one piece; an array that was never `written` has none."""

    def __init__(self, source: Hdf5File, slabs: plain.SlabPlaces, written: bool) -> None:
        super().__init__(source)
        self._slabs, self._written = slabs, written

    def cut(self, chunks: ChunkIndex) -> Hdf5SlabPlaces:
        return Hdf5SlabPlaces(self._source, replace(self._slabs, chunks=chunks), self._written)

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        self._source.check()
        if not self._written:
            return None
        ref = self._slabs.locate(index)
        self._source.has(ref.offset, ref.length or 0)
        return ref


class LibraryPlaces(Hdf5Places):
    """An array that only libhdf5 reads, a box at a time; its stored size is not known."""

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        self._source.check()
        return ChunkRef(self._source.path, 0, None)


def external_raw_file(dataset: Any, source: Hdf5File, outside: bool) -> tuple[Hdf5File, int] | None:
    """Return the raw file that holds a dataset's values, and where they begin; None when the HDF5 file holds them."""
    plist = dataset.id.get_create_plist()
    count = plist.get_external_count()
    if not count:
        return None
    if count > 1:
        raise UnsupportedStoreError(
            f"dataset {dataset.name!r} in {source.path} is stored in {count} external files, not one; rewrite it"
        )
    name, offset, _ = plist.get_external(0)
    path = referenced_path(source, os.fsdecode(name), outside, f"the external storage of dataset {dataset.name!r}")
    return Hdf5File(path, source.files), int(offset)


class _SourceMapping(NamedTuple):
    """A box of a virtual dataset, and the box of a source that it shows."""

    to: Box
    at: Box
    table: ArrayTable


@dataclass(frozen=True)
class _SourceChunks:
    """The chunks of one source within the virtual grid: `shift` is added to an index, leading dims dropped first."""

    places: ChunkPlaces
    shift: ChunkIndex

    def index(self, index: ChunkIndex) -> ChunkIndex:
        own = index[len(index) - len(self.shift) :]
        return tuple(i + s for i, s in zip(own, self.shift, strict=True))


class VirtualPlaces(Hdf5Places):
    """The chunks of a virtual dataset: `owner` says for each of the grid which piece has it, -1 for none."""

    def __init__(self, source: Hdf5File, pieces: Sequence[_SourceChunks], owner: NDArray[np.int32]) -> None:
        super().__init__(source)
        self._pieces, self._owner = pieces, owner

    def path(self, index: ChunkIndex) -> str:
        owner = int(self._owner[index])
        return self._source.path if owner < 0 else self._pieces[owner].places.path(self._pieces[owner].index(index))

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        self._source.check()
        owner = int(self._owner[index])
        return None if owner < 0 else self._pieces[owner].places.locate(self._pieces[owner].index(index))


class DatasetStorage(NamedTuple):
    """Storage of a dataset: the members of an `ArrayTable` that it decides, and its filters."""

    chunks: ChunkIndex
    decoder: FilterPipeline | None
    places: ChunkPlaces
    clipped: bool = False
    slices: bool = False
    filters: tuple[Hdf5Filter, ...] = ()


def storage_of_virtual_dataset(
    dataset: Any, source: Hdf5File, outside: bool, fill: Any, table_of: Callable[[str, str], ArrayTable | None]
) -> DatasetStorage | None:
    """Return the storage of a virtual dataset as a grid of its sources' chunks; None where these do not form one.

    `table_of` gives the table of a dataset of another file. A missing file is refused: libhdf5 would read fill values.
    """
    mappings: list[_SourceMapping] = []
    regular = True
    for each in dataset.virtual_sources():
        holder = f"the virtual dataset {dataset.name!r}"
        path = source.path if each.file_name == "." else referenced_path(source, each.file_name, outside, holder)
        shown, at = _selected_box(each.vspace), _selected_box(each.src_space)
        if "%" in each.file_name or shown is None:
            regular = False  # a pattern of file names: the dataset grows with the files
            continue
        if path != source.path and source.files.size(path) is None:
            raise UnsupportedStoreError(f"{holder} in {source.path} needs {path}, which does not exist; bring it back")
        table = table_of(path, each.dset_name)
        regular &= table is not None and at is not None
        if table is not None and at is not None:
            at = at or tuple((0, n) for n in table.shape)
            mappings.append(_SourceMapping(shown or tuple((0, n) for n in dataset.shape), at, table))
    return _grid_of_mappings(dataset, source, mappings, fill) if regular and mappings else None


def _selected_box(space: Any) -> Box | None:
    """Return the box that a dataspace selects; empty for all of it, None for anything else."""
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return ()
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return None
    start, stride, count, block = space.get_regular_hyperslab()
    edges: list[tuple[int, int]] = []
    for a, s, n, b in zip(start, stride, count, block, strict=True):
        if n >= 2**63 or b >= 2**63 or (n > 1 and s != b):
            return None
        edges.append((int(a), int(a + n * b)))
    return tuple(edges)


def _grid_of_mappings(
    dataset: Any, source: Hdf5File, mappings: Sequence[_SourceMapping], fill: Any
) -> DatasetStorage | None:
    shape = tuple(dataset.shape)
    mappings = _cut_where_mappings_meet(mappings, shape)
    first = mappings[0].table
    decoder, extra = first.decoder, len(shape) - first.grid.ndim
    if not isinstance(decoder, FilterPipeline) or extra < 0:
        return None
    # every source must decode like the first one, to values that need no conversion
    for table in (m.table for m in mappings):
        same = (table.chunks, table.clipped, table.lengths) == (first.chunks, first.clipped, {})
        fills = table.fill_value == fill or (table.fill_value != table.fill_value and fill != fill)
        if not (same and fills and table.decoder == decoder and np.dtype(table.dtype) == dataset.dtype):
            return None
    chunks = (1,) * extra + first.chunks
    grid = tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))
    if prod(grid) > _LARGEST_GRID:
        return None
    owner, pieces = np.full(grid, -1, np.int32), list[_SourceChunks]()
    for m in mappings:
        at = ((0, 1),) * extra + m.at  # a source may have fewer leading dims
        if not _is_on_chunk_edges(m.to, at, chunks, shape, (1,) * extra + m.table.shape):
            return None
        # chunk i of the virtual grid is the source's chunk i + shift, both grids of the same chunks
        chunk_box = tuple(slice(a // c, -(-b // c)) for (a, b), c in zip(m.to, chunks, strict=True))
        if (owner[chunk_box] >= 0).any():
            return None
        owner[chunk_box] = len(pieces)
        shift = tuple(a // c - t // c for (a, _), (t, _), c in zip(at, m.to, chunks, strict=True))[extra:]
        pieces.append(_SourceChunks(m.table.places, shift))
    whole = FilterPipeline(decoder.dtype, tuple(range(len(shape))), decoder.filters)
    return DatasetStorage(chunks, whole, VirtualPlaces(source, pieces, owner), first.clipped)


def _cut_where_mappings_meet(mappings: Sequence[_SourceMapping], shape: ChunkIndex) -> Sequence[_SourceMapping]:
    """Cut sources that lie in one piece each where the mappings begin and end along their leading dim."""
    places = [m.table.places for m in mappings if isinstance(m.table.places, Hdf5SlabPlaces)]
    if len(places) < len(mappings) or any(not m.at for m in mappings):
        return mappings
    lead = len(shape) - mappings[0].table.grid.ndim
    inner = [m for m in mappings if m.to[lead][1] < shape[lead]]
    ends = gcd(*(m.to[lead][0] for m in mappings), *(m.at[0][0] for m in mappings), *(m.to[lead][1] for m in inner))
    most = min(m.table.chunks[0] for m in mappings)
    rows = next(n for n in range(most, 0, -1) if ends % n == 0)
    cut = (rows, *mappings[0].table.chunks[1:])
    return [
        m._replace(table=replace(m.table, chunks=cut, places=slabs.cut(cut)))
        for m, slabs in zip(mappings, places, strict=True)
    ]


def _is_on_chunk_edges(shown: Box, at: Box, chunks: ChunkIndex, shape: ChunkIndex, source: ChunkIndex) -> bool:
    if len(at) != len(shown):
        return False
    for (t0, t1), (a0, a1), c, n, m in zip(shown, at, chunks, shape, source, strict=True):
        if t1 - t0 != a1 - a0 or t0 % c or a0 % c or a1 > m or t1 > n:
            return False
        if (t1 - t0) % c and (t1 != n or a1 != m):
            return False
    return True
