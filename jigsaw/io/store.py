"""`open_store`: which format a store is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from jigsaw.io._memory import fresh
from jigsaw.io.arguments import by_name
from jigsaw.io.errors import UnsupportedStoreError
from jigsaw.io.fetch.files import Files
from jigsaw.io.packages import why_not_imported
from jigsaw.io.table import Store

# Asked in this order whether what was given is theirs; those that need a package say which extra brings it.
_FORMATS = (
    ("formats.array_source", "open_source", ""),
    ("formats.many_files", "open_many", ""),
    ("formats.nifti", "open_nifti", ""),
    ("formats.netcdf3", "open_netcdf3", ""),
    ("formats.raw", "open_npy", ""),
    ("formats.hdf5", "open_hdf5", "hdf5"),
)
# Single files behind a URL are known by how they begin: their suffix only says that it is worth a request to look.
_SUFFIXES = (".nc", ".nc3", ".nc4", ".cdf", ".h5", ".hdf5", ".npy")
_MAGIC = {
    b"CDF": ("formats.netcdf3", "open_netcdf3"),
    b"\x89HDF\r\n\x1a\n": ("formats.hdf5", "open_hdf5"),
    b"\x93NUMPY": ("formats.raw", "open_npy"),
}


def open_store(url: Any, options: Mapping[str, Any] | None = None) -> Store:
    """Open a store: a path, a glob or a list of paths, a URL, an object of the format's own library, a user's source.

    `options` are those of the object store behind a URL: see `jigsaw.io.fetch.objects.files_of_url`.

    Raises: `UnsupportedStoreError` for what no format of jigsaw's claims, or options where there is no URL.
    """
    options = by_name("options", options, "{'region': 'eu-west-1'}", UnsupportedStoreError)
    if isinstance(url, Store):
        return url
    if _is_url(url):
        return _open_url(str(url), options)
    if options:
        raise UnsupportedStoreError(
            f"options={{…}} with {sorted(options)} are for URLs (s3://, https://…), and {url!r} is none"
        )
    if type(url).__module__.partition(".")[0] == "xarray":
        if not hasattr(url, "variables"):
            kind = type(url).__name__
            raise UnsupportedStoreError(f"an xarray {kind} is no Dataset: give .to_dataset(name='t2m') of it")
        return _of("formats.xarray_dataset", "open_xarray")(url)
    for module, opener, extra in _FORMATS:
        if extra and not _may_be_hdf5(url):
            continue
        if _of(module, "claims", extra)(url):
            return _of(module, opener)(url)
    if _of("formats.plain", "magic")(url, 4) == b"GRIB":
        raise UnsupportedStoreError(
            f"{url!r} is GRIB, which cfgrib reads: open xarray.open_dataset({str(url)!r}, engine='cfgrib'), "
            "or convert it: python -m jigsaw convert"
        )
    return _of("formats.zarr_group", "open_zarr", "zarr")(url)


def open_hdf5(url: Any, *, outside: bool = False, cache: str | os.PathLike[str] | None = None) -> Store:
    """The chunk tables of a local HDF5 or NetCDF-4 file.

    `outside` lets links and virtual datasets lead out of the file's folder; `cache` is the folder where the index of
    its chunks is kept, by default that of the user's caches.

    Raises: what `open_store` raises.
    """
    return _of("formats.hdf5", "open_hdf5", "hdf5")(url, outside=outside, cache=cache)


def _of(module: str, name: str, extra: str = "") -> Any:
    """A function of one format's module, which is loaded when its turn comes."""
    try:
        return getattr(importlib.import_module(f"jigsaw.io.{module}"), name)
    except ImportError as e:
        package = str(e.name).partition(".")[0]
        absent = f"reading this needs {package}: pip install 'jigsaw-torch[{extra or 'all'}]'"
        raise UnsupportedStoreError(why_not_imported(e, absent)) from e


def _is_url(url: Any) -> bool:
    return isinstance(url, str) and "://" in url and not url.startswith("file://")


def _may_be_hdf5(url: Any) -> bool:
    return isinstance(url, str | os.PathLike) and os.path.isfile(os.fspath(url))


def _open_url(url: str, options: Mapping[str, Any] | None) -> Store:
    name = PurePosixPath(url.partition("?")[0].lower())
    is_nifti = name.name.endswith((".nii", ".nii.gz"))
    if not is_nifti and name.suffix not in _SUFFIXES:
        return _of("formats.zarr_group", "open_zarr", "zarr")(url, options)
    files, path = _of("fetch.objects", "files_of_url", "remote")(url, options)
    if is_nifti:
        return _of("formats.nifti", "open_nifti")(path, files)
    begins = _beginning(files, path)
    for magic, (module, opener) in _MAGIC.items():
        if begins.startswith(magic):
            return _of(module, opener, "hdf5")(path, files)
    raise UnsupportedStoreError(f"{url} is named like a file that jigsaw reads, but begins with {begins!r}")


def _beginning(files: Files, path: str) -> bytes:
    first = fresh(8)
    if not files.ranges(path, [(0, first)]):
        raise UnsupportedStoreError(f"there is no object {path!r}")
    return first.tobytes()
