"""`open_store`: which format a store is."""

from __future__ import annotations

from typing import Any

from jigsaw.io.errors import UnsupportedStoreError
from jigsaw.io.table import Store


def open_store(url: Any) -> Store:
    """Open a store: a path, a URL, or an object of the format's own library.

    Raises: `UnsupportedStoreError` for what no format of jigsaw's claims.
    """
    if isinstance(url, Store):
        return url
    if type(url).__module__.partition(".")[0] == "xarray" and hasattr(url, "variables"):
        from jigsaw.io._xarray import open_xarray

        return open_xarray(url)
    try:
        from jigsaw.io._zarr import open_zarr
    except ImportError as e:
        raise UnsupportedStoreError(f"reading {url!r} needs zarr: pip install 'jigsaw-torch[zarr]'") from e
    return open_zarr(url)
