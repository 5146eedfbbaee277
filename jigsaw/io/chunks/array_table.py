"""Tables of arrays, made from every file format: where the stored bytes of each chunk lie and how they decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, UnsupportedStoreError, redacted_text
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.chunk import ChunkDecoder, ChunkPlaces
from jigsaw.io.chunks.chunk_finder import ChunkFinder
from jigsaw.io.chunks.chunk_grid import ChunkGrid
from jigsaw.io.chunks.chunk_loader import ChunkLoader
from jigsaw.io.chunks.joined_arrays import JoinedArrays
from jigsaw.io.chunks.library_loader import BoxReader, LibraryLoader


def _no_library(box: Box) -> NDArray[Any]:
    raise UnsupportedStoreError(f"nothing reads the box {box} of an array that has neither a decoder nor `load_slowly`")


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayTable:
    """Array as a table of chunks.

    `chunks` is the shape of what is fetched and decoded as one; in a shard, the inner chunk. It is the largest shape
    where `lengths` gives those along a dim one by one. `clipped` says that the last chunk along a dim does not hold
    padding. `dtype` is the stored numpy dtype with its byte order; `masks` are the stored values that mean "missing".
    `decoder` is None for an array that only its library can read. Then `load_slowly` gives the values of a box, and
    reads no more than the box where `slices` says so. `unfit` says why the array is refused where it is asked for.

    These facts make its `grid` (where chunks lie in the array), its `finder` (where their bytes lie) and its `loader`
    (their values); `dataclasses.replace` makes them anew.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str
    chunks: tuple[int, ...]
    attrs: Mapping[str, Any]
    places: ChunkPlaces = field(repr=False)
    fill_value: Any = None
    masks: tuple[float, ...] = ()
    decoder: ChunkDecoder | None = field(repr=False, default=None)
    load_slowly: BoxReader = field(repr=False, default=_no_library)
    lengths: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]], repr=False)
    clipped: bool = False
    slices: bool = False
    members: JoinedArrays | None = None
    unfit: str = ""
    grid: ChunkGrid = field(init=False, repr=False)
    finder: ChunkFinder = field(init=False, repr=False)
    loader: ChunkLoader | LibraryLoader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        itemsize = np.dtype(self.dtype).itemsize
        object.__setattr__(self, "grid", ChunkGrid(self.shape, itemsize, self.chunks, self.lengths, self.clipped))
        object.__setattr__(self, "finder", self.make_finder())
        object.__setattr__(self, "loader", self._make_loader())

    def make_finder(self) -> ChunkFinder:
        """Return the finder of its chunks."""
        return ChunkFinder(self.name, self.grid, self.places, self.decoder, self.slices)

    def _make_loader(self) -> ChunkLoader | LibraryLoader:
        if self.decoder is not None:
            return ChunkLoader(self.finder, self.decoder, self.fill_value)
        return LibraryLoader(self.finder, np.dtype(self.dtype), self.load_slowly, self.fill_value)

    @property
    def decoding(self) -> ChunkLoader:
        """The `loader` of an array that has a `decoder`: callers have seen to that."""
        assert isinstance(self.loader, ChunkLoader)
        return self.loader

    @property
    def far(self) -> bool:
        return self.finder.far

    @property
    def is_plain(self) -> bool:
        return self.decoder is not None and self.decoder.is_plain

    # -- attributes --------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """Factor by which stored values are multiplied; an attribute that is not a number is refused, as for
        `offset`.
        """
        return self._number("scale_factor", 1.0)

    @property
    def offset(self) -> float:
        """Offset that is then added."""
        return self._number("add_offset", 0.0)

    def check_readable(self) -> None:
        """Raise `GridError` for an array that is unfit, `UnsupportedStoreError` for a scale that is not a number."""
        if self.unfit:
            raise GridError(self.unfit)
        _ = self.scale, self.offset

    def _number(self, attr: str, usual: float) -> float:
        value = self.attrs.get(attr, usual)
        try:
            if np.asarray(value).dtype.kind not in "biuf":  # a text such as "0.01" is a mistake of who wrote it
                raise TypeError(f"{value!r} is no number")
            return float(np.asarray(value).item())
        except (TypeError, ValueError, OverflowError) as e:
            raise UnsupportedStoreError(
                f"array {self.name!r} has {attr}={value!r}, which is no number; rewrite the attribute"
            ) from e


@dataclass(frozen=True, eq=False)
class ArrayStore:
    """An opened store: its arrays, its attributes, and `notes` that a user should read."""

    url: str
    arrays: Mapping[str, ArrayTable]
    attrs: Mapping[str, Any]
    _read: Callable[[str], NDArray[Any]] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", redacted_text(self.url))

    def read_small(self, name: str) -> NDArray[Any]:
        """Read a whole array as it is stored: for coordinates."""
        return self._read(name)
