"""Digest of a list of volumes, which ranks compare: lists in another order would give one tile parts of two scans."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ReadError
from jigsaw.io.rank_results import results_of_ranks
from jigsaw.io.reading.engine import StoreIdentity, check_same_store
from jigsaw.io.volumes.volume import StoredVolume
from jigsaw.io.volumes.volume_arrays import values_of_array

_VALUES_COMPARED = 64


def listing_of_volumes(
    images: Sequence[StoredVolume], labels: Sequence[StoredVolume | None], arguments: Sequence[Any]
) -> str:
    """Return a digest of all volumes and of arguments with which they are read, which no file is read for.

    Of files it has the names below their common folder, because each node may have a folder of its own. Of arrays in
    memory it has some values.
    """
    digest = blake2b(repr(tuple(arguments)).encode(), digest_size=16)
    for volumes in (images, labels):
        names = iter(names_of_volumes(volumes))
        for volume in volumes:
            if volume is None:
                digest.update(b"none")
                continue
            shown = [next(names) for _ in volume.given]
            affines = [affine.tobytes() for _, affine in volume.affines]
            digest.update(repr((shown, volume.shape, volume.dims, volume.channels, affines)).encode())
    return digest.hexdigest()


def names_of_volumes(volumes: Sequence[StoredVolume | None]) -> list[Any]:
    """Return the names of the files of volumes below their common folder, and some values of arrays in memory."""
    return list(_names_below_folder([source for each in volumes if each for source in each.given]))


def _names_below_folder(sources: Sequence[Any]) -> Iterator[Any]:
    paths = {
        at: os.fspath(source).rstrip("/").split("/")
        for at, source in enumerate(sources)
        if isinstance(source, str | os.PathLike)
    }
    columns = zip(*(folders[:-1] for folders in paths.values()), strict=False)
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, columns))
    for at, source in enumerate(sources):
        yield "/".join(paths[at][shared:]) if at in paths else _some_values(source)


def _some_values(source: Any) -> bytes:
    values = None if source is None else values_of_array(source)
    if values is None or not values.size:
        return b""
    middle = tuple(n // 2 for n in values.shape[:-1])
    first = max(values.shape[-1] - _VALUES_COMPARED, 0) // 2
    return values[middle][first : first + _VALUES_COMPARED].tobytes()


def check_same_listing(mesh: DeviceMesh | None, listing: str) -> None:
    """Compare the list of every rank, before ranks share out work on its volumes.

    *Sends*: less than a kilobyte to every other rank.
    *Raises*: `PeerError` on every rank where lists differ.
    """
    check_same_store(results_of_ranks(mesh, lambda: StoreIdentity("", listing=listing), ReadError))
