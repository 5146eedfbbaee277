"""What every file format becomes: for each array, where the stored bytes of each chunk lie and how they decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jigsaw.io._codecs import BadChunkError, Bytes, Decoder, ShortChunkError
from jigsaw.io._memory import Scratch
from jigsaw.io.errors import CorruptChunkError, ReadError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Iterator

Index = tuple[int, ...]
Room = Callable[[int], Bytes]
"""Gives memory for so many bytes."""


scratch = Scratch()


@dataclass(frozen=True)
class ChunkRef:
    """Where a chunk's stored bytes lie: `length` bytes at `offset` of the file."""

    path: str
    offset: int
    length: int


class Places(Protocol):
    """Where an array's chunks lie, in one format."""

    def path(self, index: Index) -> str: ...

    def locate(self, index: Index) -> ChunkRef | None: ...

    def read(self, index: Index, room: Room) -> Bytes | None: ...


@dataclass(frozen=True)
class Loaded:
    """What loading one chunk took; `stored` is None for a missing chunk."""

    stored: int | None
    fallback: bool


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """One array as a table of chunks.

    `chunks` is the shape of what is fetched and decoded as one (the inner chunk of a shard); `dtype` the stored numpy
    dtype with its byte order; `masks` the stored values that mean "missing".  `decoder` is None for an array that only
    the format's own library can decode.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str
    chunks: tuple[int, ...]
    fill_value: Any
    attrs: Mapping[str, Any]
    masks: tuple[float, ...]
    decoder: Decoder | None = field(repr=False)
    places: Places = field(repr=False)
    load_slowly: Callable[[Index], NDArray[Any]] = field(repr=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """The decoded size of a chunk; those at the end of a dim are stored whole."""
        return prod(self.chunks) * self.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    @property
    def scale(self) -> float:
        return float(self.attrs.get("scale_factor", 1.0))

    @property
    def offset(self) -> float:
        return float(self.attrs.get("add_offset", 0.0))

    def indices(self) -> Iterator[Index]:
        """The index of every chunk, in C order."""
        return product(*(range(n) for n in self.grid))

    def path(self, index: Index) -> str:
        """The file that holds a chunk, or would."""
        return self.places.path(index)

    def locate(self, index: Index) -> ChunkRef | None:
        """Where a chunk lies; None when it is missing, which the format defines as the fill value."""
        return self.places.locate(index)

    def stored_bytes(self, index: Index) -> int:
        """The stored size of a chunk: 0 when it is missing, or when the store does not tell."""
        found = self.locate(index)
        return 0 if found is None else found.length

    def load(self, index: Index, out: Bytes) -> Loaded:
        """Fetch and decode one chunk into `out`, `chunk_bytes` long; a missing chunk leaves it alone.

        Raises: `CorruptChunkError` or `TruncatedError`, naming array, index and file.
        """
        if self.decoder is None:
            return self._load_slowly(index, out)
        try:
            plain = self.decoder.is_plain
            raw = self.places.read(index, lambda size: out if plain and size == out.size else scratch(size))
            if raw is None:
                return Loaded(None, False)
            if raw is not out:
                self.decoder.decode(raw, out)
            return Loaded(raw.size, False)
        except BadChunkError as e:
            raise self._refused(
                TruncatedError if isinstance(e, ShortChunkError) else CorruptChunkError, index, e
            ) from e
        except OSError as e:
            raise self._refused(CorruptChunkError, index, e) from e

    def _load_slowly(self, index: Index, out: Bytes) -> Loaded:
        found = self.locate(index)
        if found is None:
            return Loaded(None, True)
        try:
            values = self.load_slowly(index)
        except Exception as e:  # a library's decoder may raise anything
            raise self._refused(CorruptChunkError, index, e) from e
        self.view(out)[tuple(slice(n) for n in values.shape)] = values
        return Loaded(found.length, True)

    def _refused(self, kind: type[ReadError], index: Index, why: Exception) -> ReadError:
        return kind(f"chunk {index} of array {self.name!r} in {self.path(index)} cannot be read: {why}")

    def view(self, out: Bytes) -> NDArray[Any]:
        """The loaded bytes as an array of the chunk's shape."""
        if self.decoder is None:
            return out.view(self.dtype).reshape(self.chunks)
        return self.decoder.view(out, self.chunks)


@dataclass(frozen=True, eq=False)
class Store:
    """An opened store: its arrays, its attributes."""

    url: str
    arrays: Mapping[str, ArrayTable]
    attrs: Mapping[str, Any]
    _read: Callable[[str], NDArray[Any]] = field(repr=False)

    def read_small(self, name: str) -> NDArray[Any]:
        """A whole array as it is stored: for coordinates."""
        return self._read(name)
