"""One stored chunk: where its bytes lie, its decoder, and the counts of its loading."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.files import ByteArray, StoreFiles
from jigsaw.io.chunks.portion import ChunkPortion


class ChunkRef(NamedTuple):
    """Place of a chunk's stored bytes: `length` bytes at `offset` of an object.

    `length` is None where the store does not give it, and the whole object is meant. `mask` has bit k set where HDF5
    left out filter k for this chunk.
    """

    path: str
    offset: int
    length: int | None
    mask: int = 0


class ChunkPlaces(Protocol):
    """Places of an array's chunks, in one format."""

    @property
    def files(self) -> StoreFiles: ...

    def path(self, index: ChunkIndex) -> str: ...

    def locate(self, index: ChunkIndex) -> ChunkRef | None: ...


@runtime_checkable
class StripPlaces(Protocol):
    """Places that look up chunks that follow each other along the last dim together."""

    def locate_strip(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]: ...


@runtime_checkable
class ObjectPerChunk(Protocol):
    """Places in objects of their own, which others may remove one by one.

    A chunk may be missing there because it was never written, because all its values are the fill value, or because it
    was removed. Where an index lists the chunks (HDF5, shards, Icechunk), the store itself tells.
    """

    def lacks_object(self, index: ChunkIndex) -> bool:
        """Say whether a missing chunk's object is absent, rather than left out by an index of the store."""
        ...

    def lost_metadata(self) -> str | None:
        """Return the name of the array's metadata, where these are gone. It asks the store."""
        ...


class ChunkDecoder(Protocol):
    """Decoder from the stored bytes of a chunk to its values: `CodecDecoder` of Zarr's codecs and of bytes as they are,
    or `FilterPipeline` of HDF5's.

    `is_plain`: the stored bytes are the values.  `splits`: a part can be decoded alone (plain bytes and Blosc frames).
    """

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def order(self) -> tuple[int, ...]: ...

    @property
    def is_plain(self) -> bool: ...

    @property
    def splits(self) -> bool: ...

    def decode(self, raw: ByteArray, out: ByteArray, mask: int = 0) -> None: ...


class ChunkLoadCounts(NamedTuple):
    """Counts of loading a chunk; `stored` is None for a missing chunk."""

    stored: int | None
    fallback: bool
    requests: int = 1
    decoded: int = 0


class FetchedBytes(NamedTuple):
    """The stored bytes of a chunk, or of a part of it; `raw` is None when they are already where they belong.

    `requests` are those it took, where the chunk was fetched together with others.
    """

    raw: ByteArray | None
    ref: ChunkRef
    portion: ChunkPortion | None
    requests: int | None = None
