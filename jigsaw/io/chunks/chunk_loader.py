"""Loader from the stored bytes of an array's chunks to their values, in memory that the caller gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import CorruptChunkError, ReadError, cause_without_secrets
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.chunk import (
    ChunkDecoder,
    ChunkGrid,
    ChunkIndex,
    ChunkLoadCounts,
    ChunkPortion,
    ChunkRef,
    FetchedBytes,
)
from jigsaw.io.chunks.chunk_finder import ChunkFinder, most_stored_bytes
from jigsaw.io.chunks.codecs import BloscFrame
from jigsaw.io.chunks.files import (
    BadChunkError,
    ByteAllocator,
    ByteArray,
    FillTarget,
    ScratchMemory,
    ShortChunkError,
    StoreFiles,
    fresh_memory,
)

_load_scratch = ScratchMemory()
BoxReader = Callable[[Box], NDArray[Any]]


class ChunkStream:
    """The decoded bytes of a chunk in order: of a Blosc `frame` whose blocks lie in order, or stored as they are."""

    def __init__(
        self, files: StoreFiles, ref: ChunkRef, size: int, frame: BloscFrame | None, room: ByteAllocator
    ) -> None:
        self._files, self._ref, self._size, self._frame, self._room = files, ref, size, frame, room
        self._at = 0
        self._block = fresh_memory(0 if frame is None else min(frame.block, size))
        self._rest = self._block[:0]

    def read(self, out: ByteArray) -> None:
        done = min(self._rest.size, out.size)
        out[:done], self._rest = self._rest[:done], self._rest[done:]
        if done == out.size:
            return
        if self._frame is None:
            self._fetch(self._at, out[done:])
            self._at += out.size - done
        else:
            self._blocks(self._frame, out[done:])

    def _blocks(self, frame: BloscFrame, out: ByteArray) -> None:
        """Decode the blocks that end within `out`, and the beginning of the one that does not, whose rest is kept."""
        whole = out.size if self._at + out.size == self._size else out.size // frame.block * frame.block
        if whole:
            self._decode(frame, out[:whole])
        if whole < out.size:
            block = self._block[: self._size - self._at]
            self._decode(frame, block)
            out[whole:], self._rest = block[: out.size - whole], block[out.size - whole :]

    def _decode(self, frame: BloscFrame, out: ByteArray) -> None:
        first = self._at // frame.block
        frame.run(first, first - (-out.size // frame.block), self._fetch, self._room, out)
        self._at += out.size

    def _fetch(self, offset: int, memory: ByteArray) -> None:
        if not self._files.ranges(self._ref.path, [(self._ref.offset + offset, memory)]):
            raise BadChunkError("it vanished while it was read")


class DecodedChunks:
    """The memory of decoded chunks, seen as arrays.

    `dtype` is that of the decoded bytes, `order` the order of the dims in them.
    """

    def __init__(self, grid: ChunkGrid, dtype: np.dtype[Any], order: Sequence[int], fill_value: Any) -> None:
        self.grid, self._dtype, self._fill_value = grid, dtype, fill_value
        self._order = None if tuple(order) == tuple(range(len(order))) else tuple(order)

    def view(self, out: ByteArray, index: ChunkIndex, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """View the loaded bytes as an array of the chunk's shape, or of another one, without copying."""
        # the `...` makes it an array, also where a chunk has no dims
        return self._view(out, shape or self.grid.shape_of(index))[0, ...]

    def view_strip(self, out: ByteArray) -> NDArray[Any]:
        """View the bytes of chunks of one size, one after the other, as an array [K, \\*chunk], without copying."""
        return self._view(out, self.grid.chunks)

    def _view(self, out: ByteArray, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype, order = self._dtype, self._order
        count = out.size // max(prod(shape) * dtype.itemsize, 1)
        if order is None:
            return np.ndarray((count, *shape), dtype, out)
        turned = np.ndarray((count, *(shape[d] for d in order)), dtype, out)
        return turned.transpose(0, *(1 + np.argsort(order)))

    def fill(self, out: ByteArray, index: ChunkIndex) -> None:
        """Make a chunk of fill values, for one that turned out to be missing."""
        value = self._fill_value
        self.view(out, index)[...] = value if isinstance(value, int | float) else 0


class ChunkLoader(DecodedChunks):
    """Loader of the chunks of an array that is fetched and decoded here."""

    def __init__(self, finder: ChunkFinder, decoder: ChunkDecoder, fill_value: Any) -> None:
        super().__init__(finder.grid, decoder.dtype, decoder.order, fill_value)
        self._finder, self._decoder = finder, decoder

    def load(self, index: ChunkIndex, out: ByteArray, part: ChunkPortion | None = None) -> ChunkLoadCounts:
        """Fetch and decode one chunk, or a part of it, into `out`, which has the chunk's size. `out` keeps its content
        where the chunk is missing. A damaged chunk is a `CorruptChunkError` that names array, index and file.
        """
        fetched = self.fetch(index, _load_scratch, part, out)
        return ChunkLoadCounts(None, False) if fetched is None else self.decode(index, fetched, out)

    def load_strip(self, first: ChunkIndex, count: int, out: ByteArray) -> list[int | None]:
        """Load consecutive whole chunks of one size along the last dim, one after the other in `out`.

        Returns the stored size of each. It is None for a missing chunk, whose memory stays as it is.
        """
        size = self.grid.chunk_bytes
        rooms = [out[at : at + size] for at in range(0, count * size, size)]
        try:
            return self._load_strip(first, rooms)
        except (BadChunkError, OSError):  # load each chunk alone, to find the one that failed
            chunks = ((*first[:-1], first[-1] + n) for n in range(count))
            return [self.load(chunk, memory).stored for chunk, memory in zip(chunks, rooms, strict=True)]

    def _load_strip(self, first: ChunkIndex, rooms: Sequence[ByteArray]) -> list[int | None]:
        refs = self._finder.locate_strip(first, len(rooms))
        memory, at = _load_scratch(sum(ref.length or 0 for ref in refs if ref is not None)), 0
        stored: list[tuple[ChunkRef, ByteArray, ByteArray]] = []
        targets: dict[str, list[FillTarget]] = {}
        for ref, room in zip(refs, rooms, strict=True):
            if ref is not None:
                raw = memory[at : at + (ref.length or 0)]
                at += raw.size
                stored.append((ref, raw, room))
                targets.setdefault(ref.path, []).append((ref.offset, raw))
        present = {path for path, parts in targets.items() if self._finder.places.files.ranges(path, parts)}
        for ref, raw, room in stored:
            if ref.path in present:
                self._decoder.decode(raw, room, ref.mask)
        return [None if ref is None or ref.path not in present else ref.length or 0 for ref in refs]

    def stream(self, index: ChunkIndex) -> Callable[[ByteArray], None]:
        """Return a function that fills memory with the next decoded bytes of a chunk that `splits`, at each call."""
        stream = self._finder.naming_chunk(index, lambda: self._stream(index))
        return lambda out: self._finder.naming_chunk(index, lambda: stream.read(out))

    def _stream(self, index: ChunkIndex) -> ChunkStream:
        ref = self._finder.checked_ref(index)
        frame = None if ref is None or self._decoder.is_plain else self._finder.blosc_frame(index, ref)
        if ref is None or not (self._decoder.is_plain or frame):
            raise BadChunkError("it vanished while it was read")
        if frame is None and ref.length != self.grid.bytes_of(index):
            raise ShortChunkError(f"it has {ref.length} bytes and the chunk has {self.grid.bytes_of(index)}")
        return ChunkStream(self._finder.places.files, ref, self.grid.bytes_of(index), frame, _load_scratch)

    def fetch(
        self, index: ChunkIndex, room: ByteAllocator, part: ChunkPortion | None = None, out: ByteArray | None = None
    ) -> FetchedBytes | None:
        """Fetch the stored bytes of a chunk or of a part of it, in memory that `room` gives; None for a missing chunk.

        Where the stored bytes are the values, and `out` is given, they are read to their places in it.
        """
        return self._finder.naming_chunk(index, lambda: self._fetch(index, room, part, out))

    def _fetch(
        self, index: ChunkIndex, room: ByteAllocator, part: ChunkPortion | None, out: ByteArray | None
    ) -> FetchedBytes | None:
        files, ref = self._finder.places.files, self._finder.checked_ref(index)
        if ref is None:
            return None
        into = out if self._decoder.is_plain else None
        if part is not None:
            raw = room(part.stored) if into is None else None
            targets = _portion_targets(ref, part, raw, into)
            return FetchedBytes(raw, ref, part) if files.ranges(ref.path, targets) else None
        if ref.length is None:
            raw = files.whole(ref.path, room, most_stored_bytes(self.grid.bytes_of(index)))
            return None if raw is None else FetchedBytes(raw, ref, None)
        if into is not None and ref.length == self.grid.bytes_of(index):
            return FetchedBytes(None, ref, None) if files.ranges(ref.path, [(ref.offset, into)]) else None
        raw = room(ref.length)
        return FetchedBytes(raw, ref, None) if files.ranges(ref.path, [(ref.offset, raw)]) else None

    def fetch_together(
        self, chunks: Sequence[tuple[ChunkIndex, ChunkPortion | None]], requests: int
    ) -> list[FetchedBytes | None]:
        """Fetch the stored bytes of chunks of one object, each in memory of its own, by `requests` requests."""
        if len(chunks) == 1:
            return [self.fetch(chunks[0][0], fresh_memory, chunks[0][1])]
        return self._finder.naming_chunk(chunks[0][0], lambda: self._fetch_together(chunks, requests))

    def _fetch_together(
        self, chunks: Sequence[tuple[ChunkIndex, ChunkPortion | None]], requests: int
    ) -> list[FetchedBytes | None]:
        fetched: list[FetchedBytes | None] = []
        targets: list[FillTarget] = []
        path = ""
        for index, part in chunks:
            ref = self._finder.checked_ref(index)
            assert ref is not None and ref.length is not None  # only chunks with a reference and a length are joined
            raw = fresh_memory(ref.length if part is None else part.stored)
            path = ref.path
            targets += [(ref.offset, raw)] if part is None else _portion_targets(ref, part, raw, None)
            fetched.append(FetchedBytes(raw, ref, part, 0 if fetched else requests))
        return fetched if self._finder.places.files.ranges(path, targets) else [None] * len(chunks)

    def decode(self, index: ChunkIndex, fetched: FetchedBytes, out: ByteArray) -> ChunkLoadCounts:
        self._finder.naming_chunk(index, lambda: self._decode(index, fetched, out))
        part, raw = fetched.portion, fetched.raw
        requests = fetched.requests if fetched.requests is not None else len(part.ranges) if part else 1
        if part is not None:
            return ChunkLoadCounts(part.stored, False, requests, part.decoded)
        stored = fetched.ref.length if raw is None else raw.size
        return ChunkLoadCounts(stored, False, requests, self.grid.bytes_of(index))

    def _decode(self, index: ChunkIndex, fetched: FetchedBytes, out: ByteArray) -> None:
        raw, part = fetched.raw, fetched.portion
        if raw is None:
            return
        if part is None:
            self._decoder.decode(raw, out, fetched.ref.mask)
        elif self._decoder.is_plain:
            at = 0
            for start, stop in part.spans:
                out[start:stop] = raw[at : at + stop - start]
                at += stop - start
        else:
            frame = self._finder.blosc_frame(index, fetched.ref)
            if frame is None:
                raise BadChunkError("it vanished while it was read")
            frame.decode(part, raw, out)


def _portion_targets(
    ref: ChunkRef, part: ChunkPortion, raw: ByteArray | None, out: ByteArray | None
) -> list[FillTarget]:
    """Return where the ranges of a part go: one after the other in `raw`, or each to its place in `out`."""
    if raw is not None:
        memory, starts = raw, np.cumsum([0, *(length for _, length in part.ranges)]).tolist()
    else:
        assert out is not None
        memory, starts = out, [start for start, _ in part.spans]
    return [
        (ref.offset + offset, memory[at : at + length])
        for (offset, length), at in zip(part.ranges, starts, strict=False)
    ]


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
        ref, box = self._finder.locate(index), self.grid.box_of(index)
        if ref is None or (ref.length is None and self._is_absent(ref.path)):
            return ChunkLoadCounts(None, True)
        rows = part.rows if part else tuple((0, b - a) for a, b in box)
        part_box = tuple((a + low, min(a + high, b)) for (a, b), (low, high) in zip(box, rows, strict=True))
        try:
            values = self._read_box(part_box)
        except ReadError:
            raise
        except Exception as e:  # a library's decoder may raise anything
            raise self._finder.chunk_error(CorruptChunkError, index, e) from cause_without_secrets(e)
        if values.shape != tuple(b - a for a, b in part_box):
            why = BadChunkError(f"its library gave values of shape {values.shape} for the box {part_box}")
            raise self._finder.chunk_error(CorruptChunkError, index, why)
        at = tuple(slice(low, low + n) for (low, _), n in zip(rows, values.shape, strict=True))
        self.view(out, index)[at] = values
        return ChunkLoadCounts(ref.length or 0, True, 1, part.decoded if part else self.grid.bytes_of(index))
