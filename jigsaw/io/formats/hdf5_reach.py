"""Other files that an HDF5 dataset leads to, followed to their ends before libhdf5 may read them.

A virtual dataset shows datasets of other files, which may be virtual again, or have their values in raw files. libhdf5
opens whatever they name, and where a name is not in the file's folder it also looks in the working directory.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.formats.hdf5_index import Hdf5File

_DEEPEST = 16
_TRUST = (
    "if you trust the file, open it with jigsaw.io.open(..., options={'outside': True}), or jigsaw.io.open_hdf5(path, "
    "outside=True)"
)


def referenced_path(source: Hdf5File, name: str, outside: bool, what: str) -> str:
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
            f"{what} in {source.path} points to {name!r}, outside of the file's folder; {_TRUST}"
        )
    if source.is_local and not _lies_beside(source.path, path):
        raise UnsupportedStoreError(
            f"{what} in {source.path} points to {name!r}, which a symbolic link puts to {os.path.realpath(path)!r}, "
            f"outside of the file's folder; {_TRUST}"
        )
    return path


def _lies_beside(own: str, path: str) -> bool:
    """Say whether a file is in the folder of `own` or below: that of its name, or the one where it really is."""
    real = os.path.realpath(path)
    folders = (os.path.realpath(os.path.dirname(own) or "."), os.path.dirname(os.path.realpath(own)))
    return any(os.path.commonpath([folder, real]) == folder for folder in folders)


def _grows_with_sources(space: Any) -> bool:
    """Say whether a virtual dataset takes its extent along a dim from its sources."""
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return False
    _, _, count, block = space.get_regular_hyperslab()
    return any(n >= 2**63 for n in (*count, *block))


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
        here = os.path.realpath(source.path) if source.is_local else source.path, str(dataset.name)
        if (*here, by_library) in self._sound:
            return
        if here in way or len(way) >= _DEEPEST:
            why = "shows itself" if here in way else f"shows virtual datasets {_DEEPEST} deep"
            raise UnsupportedStoreError(
                f"the virtual dataset {dataset.name!r} in {source.path} {why}, which libhdf5 cannot read; "
                "write it again"
            )
        if not self._outside:
            self._check_storage(source, dataset, by_library)
        sources = dataset.virtual_sources() if dataset.is_virtual else []
        # what neither grows nor is read by libhdf5 opens no file of its own accord: names are enough
        ends = by_library or any(_grows_with_sources(each.vspace) for each in sources)
        for path, name in self._shown(source, dataset, sources, by_library):
            if not ends:
                continue
            other = self._source_of(path)
            with other.opened() as file:
                for found in self._datasets(other, file, name):
                    self._check(other, found, by_library, (*way, here))
        self._sound.add((*here, by_library))

    def _check_storage(self, source: Hdf5File, dataset: Any, by_library: bool) -> None:
        plist = dataset.id.get_create_plist()
        for i in range(plist.get_external_count()):
            what = f"the external storage of dataset {dataset.name!r}"
            name = os.fsdecode(plist.get_external(i)[0])
            referenced_path(source, name, False, what)
            if by_library:
                raise UnsupportedStoreError(
                    f"{what} in {source.path}, {name!r}, can only be read by libhdf5, which looks for it in the "
                    f"working directory; {_TRUST}"
                )

    def _shown(
        self, source: Hdf5File, dataset: Any, sources: Sequence[Any], by_library: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield the existing files that a virtual dataset shows, and the paths of the datasets in them."""
        what = f"the virtual dataset {dataset.name!r}"
        for each in sources:
            if each.file_name == ".":
                yield source.path, each.dset_name
                continue
            path = referenced_path(source, each.file_name, self._outside, what)
            if by_library and not source.is_local:
                raise UnsupportedStoreError(
                    f"{what} in {source.path} can only be read by libhdf5, which does not open {path!r} from there; "
                    "copy the files to a disk"
                )
            files = self._files(path) if "%" in path else [path] if source.files.size(path) is not None else []
            for file in files:  # what a pattern finds may be a link
                yield referenced_path(source, os.path.abspath(file), self._outside, what), each.dset_name
            if by_library and not self._outside:
                self._check_elsewhere(source, each.file_name, bool(files), what)

    def _files(self, path: str) -> list[str]:
        """Return the files that match a pattern of libhdf5's names: ``%b`` is a number, ``%%`` a percent sign."""
        return sorted(glob.glob(re.sub("%[b%]", lambda m: "[0-9]*" if m[0] == "%b" else "%", glob.escape(path))))

    def _check_elsewhere(self, source: Hdf5File, name: str, found: bool, what: str) -> None:
        """Check files in the working directory: libhdf5 takes from it, by name or last name, what the folder lacks."""
        folder = os.path.abspath(os.path.dirname(source.path))
        if "%" not in name and not found:
            raise UnsupportedStoreError(f"{what} in {source.path} needs {name!r}, which does not exist; bring it back")
        tried = os.path.abspath(os.path.basename(name) if os.path.isabs(name) else name)
        for file in self._files(tried) if "%" in name else ():
            if not os.path.exists(os.path.join(folder, os.path.relpath(file))):
                raise UnsupportedStoreError(
                    f"{what} in {source.path} names {name!r}, and libhdf5 would take {file!r} for it, which lies in "
                    f"the working directory; {_TRUST}"
                )

    def _datasets(self, source: Hdf5File, file: Any, name: str) -> Iterator[Any]:
        """Yield the dataset at a path in a file, or those that a pattern names."""
        group, _, last = name.rpartition("/")
        if "%" in group and not self._outside:
            raise UnsupportedStoreError(f"a virtual dataset shows {name!r} in {source.path}; {_TRUST}")
        names = [name]
        if "%" in last:
            parent = self._followed(source, file, group or "/") if group else file
            wanted = re.compile(re.sub("%[b%]", lambda m: r"\d+" if m[0] == "%b" else "%", re.escape(last)))
            names = [f"{group}/{each}" for each in parent or () if wanted.fullmatch(each)]
        for each in names:
            try:
                found = self._followed(source, file, each)
            except UnsupportedStoreError:
                if not self._outside:
                    raise
                continue
            if isinstance(found, h5py.Dataset):
                yield found
