"""Chunks of an array that only its format's library can read: the values of a box, as the library gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import CorruptChunkError, ReadError, cause_without_secrets
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.chunk import ChunkLoadCounts
from jigsaw.io.chunks.chunk_finder import ChunkFinder
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.chunk_loader import DecodedChunks
from jigsaw.io.chunks.codecs import BadChunkError, ByteArray
from jigsaw.io.chunks.portion import ChunkPortion

BoxReader = Callable[[Box], NDArray[Any]]


class LibraryLoader(DecodedChunks):
    """Loader of the chunks of an array through `read_box`."""

    def __init__(self, finder: ChunkFinder, dtype: np.dtype[Any], read_box: BoxReader, fill_value: Any) -> None:
        super().__init__(finder.grid, dtype, range(finder.grid.ndim), fill_value)
        self._finder, self._read_box = finder, read_box

    def _is_absent(self, path: str) -> bool:
        """Say whether a far store lacks an object; its library would silently read fill values."""
        files = self._finder.places.files
        return files.far and files.size(path) is None

    def load(self, index: ChunkIndex, out: ByteArray, part: ChunkPortion | None = None) -> ChunkLoadCounts:
        """Read one chunk, or the rows of a part of it, into `out`, which has the chunk's size: see `ChunkLoader`."""
        found, box = self._finder.locate(index), self.grid.box_of(index)
        if found is None or (found.length is None and self._is_absent(found.path)):
            return ChunkLoadCounts(None, True)
        rows = part.rows if part else tuple((0, b - a) for a, b in box)
        wanted = tuple((a + low, min(a + high, b)) for (a, b), (low, high) in zip(box, rows, strict=True))
        try:
            values = self._read_box(wanted)
        except ReadError:
            raise
        except Exception as e:  # a library's decoder may raise anything
            raise self._finder.chunk_error(CorruptChunkError, index, e) from cause_without_secrets(e)
        if values.shape != tuple(b - a for a, b in wanted):
            why = BadChunkError(f"its library gave values of shape {values.shape} for the box {wanted}")
            raise self._finder.chunk_error(CorruptChunkError, index, why)
        at = tuple(slice(low, low + n) for (low, _), n in zip(rows, values.shape, strict=True))
        self.view(out, index)[at] = values
        return ChunkLoadCounts(found.length or 0, True, 1, part.decoded if part else self.grid.bytes_of(index))
