"""Stores: dispatch of `open_store` to a store's format, and the source that another process opens it from again."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from glob import has_magic
from pathlib import PurePosixPath
from typing import Any

from jigsaw.errors import FieldError, ReadError, UnsupportedStoreError, imports_needed, redacted_text
from jigsaw.io.arguments import checked_mapping
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.chunks.files import identity_of_object
from jigsaw.io.formats.conventions import is_multiscale_group, multiscale_level
from jigsaw.io.formats.disk_cache import DiskCache

# Each is asked in this order whether it opens a path or object; those that need a package name the extra.
_FORMAT_OPENERS = (
    ("formats.array_source", "open_array_source", ""),
    ("formats.nifti", "open_nifti", ""),
    ("formats.netcdf3", "open_netcdf3", ""),
    ("formats.raw", "open_npy", ""),
    ("formats.dicom", "open_dicom", ""),
    ("formats.hdf5", "open_hdf5_file", "hdf5"),
)
# Single files behind a URL are known by how they begin: their suffix only says that it is worth a request to look.
_FILE_URL_SUFFIXES = (".nc", ".nc3", ".nc4", ".cdf", ".h5", ".hdf5", ".npy")
_OPENERS_BY_MAGIC = {
    b"CDF": ("formats.netcdf3", "open_netcdf3"),
    b"\x89HDF\r\n\x1a\n": ("formats.hdf5", "open_hdf5_file"),
    b"\x93NUMPY": ("formats.raw", "open_npy"),
}


def open_store(url: Any, options: Mapping[str, Any] | None = None) -> ArrayStore:
    """Open a store: a path, a glob or a list of paths, a URL, an object of the format's own library, a user's source.

    `options` are those of the object store behind a URL: see `jigsaw.io.chunks.remote_files.files_of_url`. For any Zarr
    store, references and HDF5 files, ``outside`` gives the places beyond their own folder that they may lead to: a list
    of folders and URLs, or True for all.

    Raises: `UnsupportedStoreError` for what none of jigsaw's formats claims, what leads elsewhere, or options without a
    URL.

    >>> store = jigsaw.io.open_store("globe.zarr")
    >>> sorted(store.arrays), store.arrays["2m_temperature"].attrs["units"]
    (['10m_u_component_of_wind', '2m_temperature', 'latitude', 'longitude', 'time'], 'K')
    """
    options = checked_mapping("options", options, "{'region': 'eu-west-1'}", UnsupportedStoreError)
    if isinstance(url, ArrayStore):
        return url
    if isinstance(url, type):
        raise UnsupportedStoreError(f"{url.__name__} is a class, and its instances can be opened: {url.__name__}(…)")
    if isinstance(url, str) and "://" in url and not url.startswith("file://"):
        return _open_by_url(str(url), options)
    if _format_function("formats.many_files", "claims")(url):
        return _format_function("formats.many_files", "open_many")(url, partial(open_store, options=options))
    if set(options or ()) - {"outside"}:
        raise UnsupportedStoreError(
            f"options={{…}} with {sorted(options or ())} are for URLs (s3://, https://…), and {url!r} is none"
        )
    if type(url).__module__.partition(".")[0] == "xarray":
        if not hasattr(url, "variables"):
            kind = type(url).__name__
            raise UnsupportedStoreError(f"an xarray {kind} is not a Dataset: give .to_dataset(name='t2m') of it")
        return _format_function("formats.array_source", "open_xarray")(url, options)
    is_file = isinstance(url, str | os.PathLike) and os.path.isfile(os.fspath(url))
    _check_there_is_a_file(url, is_file)
    for module, opener, extra in _FORMAT_OPENERS:
        if extra and not is_file:
            continue
        if _format_function(module, "claims", extra)(url):
            reach = {"outside": _is_all_outside(url, options)} if extra == "hdf5" else {}
            return _format_function(module, opener)(url, **reach)
    if _format_function("formats.slab_arrays", "magic_bytes")(url, 4) == b"GRIB":
        raise UnsupportedStoreError(
            f"{url!r} is GRIB, which cfgrib reads: open xarray.open_dataset({str(url)!r}, engine='cfgrib', "
            "backend_kwargs={'errors': 'raise'}), or convert it: python -m jigsaw convert"
        )
    return _format_function("formats.zarr_group", "open_zarr", "zarr")(url, options)


def _is_all_outside(url: Any, options: Mapping[str, Any] | None) -> bool:
    outside = (options or {}).get("outside", False)
    if isinstance(outside, bool):
        return outside
    raise UnsupportedStoreError(f"options={{'outside': {outside!r}}} of the HDF5 file {url!r} must be True or False")


def _check_there_is_a_file(url: Any, is_file: bool) -> None:
    if is_file and not os.path.getsize(os.fspath(url)):
        raise UnsupportedStoreError(f"{str(url)!r} is empty: a file of 0 bytes; copy or download it again")
    is_path = isinstance(url, str | os.PathLike) and not is_file
    if is_path and os.path.exists(os.fspath(url)) and not os.path.isdir(os.fspath(url)):
        raise UnsupportedStoreError(f"{str(url)!r} is a pipe or device, and a file or a folder is expected")
    name = str(url).lower() if isinstance(url, str | os.PathLike) else ""
    named = name.endswith((".nii", ".nii.gz", *_FILE_URL_SUFFIXES)) and not has_magic(name)
    if named and not os.path.exists(os.fspath(url)):
        raise UnsupportedStoreError(f"there is no file {str(url)!r}; the working folder is {os.getcwd()!r}")


def open_hdf5(url: Any, *, outside: bool = False, cache: str | os.PathLike[str] | None = None) -> ArrayStore:
    """Open the chunk tables of a local HDF5 or NetCDF-4 file.

    `outside` lets links and virtual datasets lead out of the file's folder; `cache` is the folder where the index of
    its chunks is kept, by default that of the user's caches.

    Raises: what `open_store` raises.

    >>> store = jigsaw.io.open_hdf5("globe-01.nc", cache="indices")
    >>> store.arrays["2m_temperature"].shape
    (4, 9, 16)
    """
    return _format_function("formats.hdf5", "open_hdf5_file", "hdf5")(url, outside=outside, cache=cache)


def _format_function(module: str, name: str, extra: str = "") -> Any:
    """Return a function of one format's module, which is loaded only when it is used."""
    package = {"": "more packages", "hdf5": "h5py", "remote": "obstore"}.get(extra, extra)
    absent = f"reading this needs {package}: pip install 'jigsaw-torch[{extra or 'all'}]'"
    with imports_needed(UnsupportedStoreError, absent):
        return getattr(importlib.import_module(f"jigsaw.io.{module}"), name)


def _open_by_url(url: str, options: Mapping[str, Any] | None) -> ArrayStore:
    name = PurePosixPath(url.partition("?")[0].lower())
    is_nifti = name.name.endswith((".nii", ".nii.gz"))
    if not is_nifti and name.suffix not in _FILE_URL_SUFFIXES:
        return _format_function("formats.zarr_group", "open_zarr", "zarr")(url, options)
    files, path = _format_function("chunks.remote_files", "files_of_url", "remote")(url, options)
    if is_nifti:
        return _format_function("formats.nifti", "open_nifti")(path, files)
    file_head = _format_function("formats.slab_arrays", "file_head")
    begins = _format_function("formats.slab_arrays", "parse_named_file")(
        url, "a file", lambda: file_head(files, path, 8)
    )
    for magic, (module, opener) in _OPENERS_BY_MAGIC.items():
        if begins.startswith(magic):
            return replace(
                _format_function(module, opener, "hdf5")(path, files), stamp=repr(identity_of_object(files, path))
            )
    raise UnsupportedStoreError(f"{url} is named like a file that jigsaw reads, but begins with {begins!r}")


@dataclass(frozen=True, eq=False)
class StoreSource:
    """Source that a store is opened from. It pickles as that, and is opened on first use."""

    given: Any
    options: Mapping[str, Any] | None = None
    disk_cache: DiskCache | None = None
    level: int | None = None

    @cached_property
    def store(self) -> ArrayStore:
        """The opened store. Raises what `open_store` raises, and `FieldError` for anything but a `DiskCache`."""
        if self.disk_cache is not None and not isinstance(self.disk_cache, DiskCache):
            raise FieldError(
                f"disk_cache={self.disk_cache!r} must be a DiskCache: a folder, and how many bytes it may take, like "
                "jigsaw.io.DiskCache('cache', 10**11)"
            )
        opened = open_store(self.given, self.options)
        if self.level is not None or is_multiscale_group(opened.attrs):
            opened = multiscale_level(opened, self.level or 0)
        return opened if self.disk_cache is None else self.disk_cache.of(opened)

    def __repr__(self) -> str:
        return f"Source({redacted_text(repr(self.given))}, options={sorted(self.options or {})}, level={self.level})"

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.given, ArrayStore):
            raise ReadError(
                f"a dataset of an opened Store ({self.given.url}) cannot be pickled: its files are open in this "
                "process; give jigsaw.io.open the path or URL instead"
            )
        return {f.name: getattr(self, f.name) for f in fields(self)}
