"""What every file format becomes: for each array, where the stored bytes of each chunk lie and how they decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import CorruptChunkError, FetchError, ReadError, TruncatedError, UnsupportedStoreError
from jigsaw.io.chunks import blosc as _blosc
from jigsaw.io.chunks import portion
from jigsaw.io.chunks.blosc_tables import BloscBlockTables
from jigsaw.io.chunks.chunk import ChunkDecoder, ChunkLoadCounts, ChunkPlaces, ChunkRef, FetchedBytes, StripPlaces
from jigsaw.io.chunks.chunk_grid import ChunkIndex, DimChunks
from jigsaw.io.chunks.chunk_stream import ChunkStream
from jigsaw.io.chunks.codecs import BadChunkError, ByteArray, ShortChunkError
from jigsaw.io.chunks.files import ByteAllocator, CachingFiles, FillTarget
from jigsaw.io.chunks.joined_arrays import JoinedArrays
from jigsaw.io.chunks.lookups import IndexedPlaces, LookupCounts, total_lookups
from jigsaw.io.chunks.memory import ScratchMemory, fresh_memory
from jigsaw.io.chunks.portion import ChunkPortion, ChunkRows
from jigsaw.io.chunks.read_cost import MOST_PORTION_SHARE
from jigsaw.layout import Box
from jigsaw.redacted import cause_without_secrets, redacted_text

SMALLEST_DIVIDED_CHUNK = 1 << 18
"""Chunks of fewer bytes are decoded whole: the bookkeeping of a part costs as much."""
_MOST_OVERHEAD = 1 << 16
"""Bytes of headers and checksums that a chunk never has."""

load_scratch = ScratchMemory()


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """One array as a table of chunks.

    `chunks` is the shape of what is fetched and decoded as one (the inner chunk of a shard), the largest where
    `lengths` gives those along a dim one by one; `clipped` says that the last chunk along a dim holds no padding.
    `dtype` is the stored numpy dtype with its byte order; `masks` the stored values that mean "missing".  `decoder` is
    None for an array that only its library can read: `load_slowly` gives the values of a box, and reads no more than
    the box where `slices` says so.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str
    chunks: tuple[int, ...]
    fill_value: Any
    attrs: Mapping[str, Any]
    masks: tuple[float, ...]
    decoder: ChunkDecoder | None = field(repr=False)
    places: ChunkPlaces = field(repr=False)
    load_slowly: Callable[[Box], NDArray[Any]] | None = field(repr=False, default=None)
    lengths: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]], repr=False)
    clipped: bool = False
    slices: bool = False
    members: JoinedArrays | None = None
    _tables: BloscBlockTables = field(default_factory=BloscBlockTables, repr=False, init=False)

    # -- geometry ----------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @cached_property
    def along(self) -> tuple[DimChunks, ...]:
        """The chunks along each dim."""
        return tuple(
            DimChunks(n, c, self.lengths.get(d), self.clipped)
            for d, (n, c) in enumerate(zip(self.shape, self.chunks, strict=True))
        )

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every chunk is stored with the same shape."""
        return not self.lengths and not self.clipped

    @cached_property
    def chunk_bytes(self) -> int:
        """The decoded size of the largest chunk."""
        return prod(self.chunks) * self.itemsize

    def shape_of(self, index: ChunkIndex) -> tuple[int, ...]:
        """The stored shape of a chunk, padding included."""
        if self.is_uniform:
            return self.chunks
        return tuple(a.length(i) for a, i in zip(self.along, index, strict=True))

    def bytes_of(self, index: ChunkIndex) -> int:
        """The decoded size of a chunk."""
        return self.chunk_bytes if self.is_uniform else prod(self.shape_of(index)) * self.itemsize

    @cached_property
    def is_divisible(self) -> bool:
        """Whether less than a chunk can be read, and chunks are large enough for that to pay."""
        if self.chunk_bytes < SMALLEST_DIVIDED_CHUNK:
            return False
        return self.slices if self.decoder is None else self.decoder.splits

    @property
    def _table_bytes(self) -> int:
        """What finding the parts of a chunk costs, as bytes: of one far away, a request of its own."""
        return 4 * self.places.files.gap if self.far and not self.is_plain else 0

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes of a chunk are its values."""
        return self.decoder is not None and self.decoder.is_plain

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each dim."""
        return tuple(a.count for a in self.along)

    def indices(self) -> Iterator[ChunkIndex]:
        """The index of every chunk, in C order."""
        return product(*(range(n) for n in self.grid))

    def box_of(self, index: ChunkIndex) -> Box:
        """The rows of the array that a chunk covers."""
        return tuple(a.inside(i) for a, i in zip(self.along, index, strict=True))

    # -- attributes --------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """What stored values are multiplied with.

        Raises: `UnsupportedStoreError` for an attribute that is no number; so does `offset`.
        """
        return self._number("scale_factor", 1.0)

    @property
    def offset(self) -> float:
        """What is then added."""
        return self._number("add_offset", 0.0)

    def check_packing(self) -> None:
        """Raises: what `scale` and `offset` raise."""
        _ = self.scale, self.offset

    def _number(self, attr: str, usual: float) -> float:
        value = self.attrs.get(attr, usual)
        try:
            return float(np.asarray(value).item())
        except (TypeError, ValueError, OverflowError) as e:
            raise UnsupportedStoreError(
                f"array {self.name!r} has {attr}={value!r}, which is no number; rewrite the attribute"
            ) from e

    # -- places ------------------------------------------------------------------------------------------------------

    @cached_property
    def far(self) -> bool:
        """Whether fetching a chunk costs a round trip over a network."""
        return self.decoder is not None and self.places.files.far

    def path(self, index: ChunkIndex) -> str:
        """The file that holds a chunk, or would."""
        return self.places.path(index)

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        """Where a chunk lies; None when it is missing, which the format defines as the fill value."""
        return self._tried(index, lambda: self._found(index))

    def _found(self, index: ChunkIndex) -> ChunkRef | None:
        ref = self.places.locate(index)
        self._check_size(ref, self.bytes_of(index))
        return ref

    def _check_size(self, ref: ChunkRef | None, size: int) -> None:
        """Refuse a chunk that claims more bytes than any codec makes of its values."""
        if ref is not None and (ref.length or 0) > 2 * size + _MOST_OVERHEAD and self.decoder is not None:
            raise BadChunkError(f"it has {ref.length} stored bytes, for a chunk of {size}")

    def stored_bytes(self, index: ChunkIndex) -> int:
        """The stored size of a chunk: 0 when it is missing, or when the store does not tell."""
        found = self.locate(index)
        return 0 if found is None else found.length or 0

    def portion(self, index: ChunkIndex, rects: Sequence[ChunkRows]) -> ChunkPortion | None:
        """What to fetch and decode of a chunk of which these boxes are needed; None for all of it.

        Raises: `CorruptChunkError` for a Blosc frame whose header is damaged.
        """
        if not self._may_part(index, rects):
            return None
        if self.decoder is None:
            rows = portion.bounding_rows(rects)
            return ChunkPortion((), (), rows, prod(b - a for a, b in rows) * self.itemsize)
        ref = self.locate(index)
        return None if ref is None or ref.mask else self._portion(index, ref, rects)

    def _may_part(self, index: ChunkIndex, rects: Sequence[ChunkRows]) -> bool:
        """Whether a part may do, as far as geometry says."""
        needed = portion.needed_share(rects, self.shape_of(index))
        return (
            self.is_divisible
            and needed <= MOST_PORTION_SHARE
            and (1 - needed) * self.bytes_of(index) >= self._table_bytes
        )

    def _portion(self, index: ChunkIndex, ref: ChunkRef, rects: Sequence[ChunkRows]) -> ChunkPortion | None:
        assert self.decoder is not None
        gap, shape, order = self.places.files.gap, self.shape_of(index), self.decoder.order
        if self.decoder.is_plain:
            found = portion.plain_portion(portion.needed_byte_spans(rects, shape, order, self.itemsize, gap))
        else:
            frame = self._tried(index, lambda: self._frame(index, ref))
            if frame is None:
                return None
            found = frame.part(
                portion.blosc_blocks_of_rows(tuple(rects), shape, order, self.itemsize, frame.block), gap
            )
        return None if found.decoded > MOST_PORTION_SHARE * self.bytes_of(index) else found

    def _frame(self, index: ChunkIndex, ref: ChunkRef) -> _blosc.BloscFrame | None:
        return self._tables.frame(index, ref, self.bytes_of(index), self.places.files)

    # -- what finding chunks takes -----------------------------------------------------------------------------------

    @property
    def looked_up(self) -> LookupCounts:
        """The reads of indices and tables of blocks so far."""
        made = [self.places.counted] if isinstance(self.places, IndexedPlaces) else []
        return total_lookups([*made, self._tables.counted])

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts] | None:
        """The object whose index says where a chunk lies, and what reading it takes; None where there is none."""
        return self.places.index_of(index) if isinstance(self.places, IndexedPlaces) else None

    def table_of(self, index: ChunkIndex, rects: Sequence[ChunkRows]) -> LookupCounts:
        """What reading the table of blocks took, for the part of a chunk that these boxes need."""
        return self._tables.took(index) if self._may_part(index, rects) else LookupCounts()

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, index: ChunkIndex, out: ByteArray, part: ChunkPortion | None = None) -> ChunkLoadCounts:
        """Fetch and decode one chunk, or a part of it, into `out`, which has the chunk's size; a missing chunk leaves
        it.

        Raises: `CorruptChunkError` or `TruncatedError`, naming array, index and file.
        """
        if self.decoder is None:
            return self._load_slowly(index, out, part)
        fetched = self.fetch(index, load_scratch, part, out)
        return ChunkLoadCounts(None, False) if fetched is None else self.decode(index, fetched, out)

    def load_strip(self, first: ChunkIndex, count: int, out: ByteArray) -> list[int | None]:
        """Load whole chunks of one size that follow each other along the last dim, one after the other in `out`.

        Returns: the stored size of each; None for a missing one, which leaves its memory.

        Raises: what `load` raises.
        """
        each = self.chunk_bytes
        rooms = [out[at : at + each] for at in range(0, count * each, each)]
        try:
            return self._load_row(first, rooms)
        except (BadChunkError, OSError):  # which one it was shows when each is loaded by itself
            chunks = ((*first[:-1], first[-1] + n) for n in range(count))
            return [self.load(chunk, memory).stored for chunk, memory in zip(chunks, rooms, strict=True)]

    def _load_row(self, first: ChunkIndex, rooms: Sequence[ByteArray]) -> list[int | None]:
        assert self.decoder is not None
        refs = self._row(first, len(rooms))
        memory, at = load_scratch(sum(ref.length or 0 for ref in refs if ref is not None)), 0
        stored: list[tuple[ChunkRef, ByteArray, ByteArray]] = []
        targets: dict[str, list[FillTarget]] = {}
        for ref, room in zip(refs, rooms, strict=True):
            if ref is not None:
                raw = memory[at : at + (ref.length or 0)]
                at += raw.size
                stored.append((ref, raw, room))
                targets.setdefault(ref.path, []).append((ref.offset, raw))
        there = {path for path, each in targets.items() if self.places.files.ranges(path, each)}
        for ref, raw, room in stored:
            if ref.path in there:
                self.decoder.decode(raw, room, ref.mask)
        return [None if ref is None or ref.path not in there else ref.length or 0 for ref in refs]

    def _row(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]:
        """Where chunks lie that follow each other along the last dim."""
        refs = self._locate_row(first, count)
        for ref in refs:
            self._check_size(ref, self.chunk_bytes)
        return refs

    @cached_property
    def _locate_row(self) -> Callable[[ChunkIndex, int], list[ChunkRef | None]]:
        return self.places.locate_strip if isinstance(self.places, StripPlaces) else self._locate_each

    def _locate_each(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]:
        return [self.places.locate((*first[:-1], first[-1] + n)) for n in range(count)]

    def flow(self, index: ChunkIndex) -> Callable[[ByteArray], None]:
        """What fills memory with the next decoded bytes of a chunk that `splits`, at each call.

        Raises: what `load` raises; so does each call.
        """
        flow: ChunkStream = self._tried(index, lambda: self._flow(index))
        return lambda out: self._tried(index, lambda: flow.read(out))

    def _flow(self, index: ChunkIndex) -> ChunkStream:
        assert self.decoder is not None
        ref = self._found(index)
        frame = None if ref is None or self.decoder.is_plain else self._frame(index, ref)
        if ref is None or not (self.decoder.is_plain or frame):
            raise BadChunkError("it vanished while it was read")
        if frame is None and ref.length != self.bytes_of(index):
            raise ShortChunkError(f"it has {ref.length} bytes and the chunk has {self.bytes_of(index)}")
        return ChunkStream(self.places.files, ref, self.bytes_of(index), frame, load_scratch)

    def fetch(
        self, index: ChunkIndex, room: ByteAllocator, part: ChunkPortion | None = None, out: ByteArray | None = None
    ) -> FetchedBytes | None:
        """The stored bytes of a chunk or of a part of it, in memory that `room` gives; None for a missing chunk.

        Where the stored bytes are the values, and `out` is given, they are read to where they belong in it.
        """
        return self._tried(index, lambda: self._fetch(index, room, part, out))

    def _fetch(
        self, index: ChunkIndex, room: ByteAllocator, part: ChunkPortion | None, out: ByteArray | None
    ) -> FetchedBytes | None:
        assert self.decoder is not None
        files, ref = self.places.files, self._found(index)
        if ref is None:
            return None
        into = out if self.decoder.is_plain else None
        if part is not None:
            raw = room(part.stored) if into is None else None
            targets = _portion_targets(ref, part, raw, into)
            return FetchedBytes(raw, ref, part) if files.ranges(ref.path, targets) else None
        if ref.length is None:
            raw = files.whole(ref.path, room)
            return None if raw is None else FetchedBytes(raw, ref, None)
        if into is not None and ref.length == self.bytes_of(index):
            return FetchedBytes(None, ref, None) if files.ranges(ref.path, [(ref.offset, into)]) else None
        raw = room(ref.length)
        return FetchedBytes(raw, ref, None) if files.ranges(ref.path, [(ref.offset, raw)]) else None

    def fetch_together(
        self, wanted: Sequence[tuple[ChunkIndex, ChunkPortion | None]], requests: int
    ) -> list[FetchedBytes | None]:
        """The same of chunks in one object, in memory of their own, by so many requests."""
        if len(wanted) == 1:
            return [self.fetch(wanted[0][0], fresh_memory, wanted[0][1])]
        return self._tried(wanted[0][0], lambda: self._fetch_together(wanted, requests))

    def _fetch_together(
        self, wanted: Sequence[tuple[ChunkIndex, ChunkPortion | None]], requests: int
    ) -> list[FetchedBytes | None]:
        found: list[FetchedBytes | None] = []
        targets: list[FillTarget] = []
        path = ""
        for index, part in wanted:
            ref = self._found(index)
            assert ref is not None and ref.length is not None  # only such chunks are put together
            raw = fresh_memory(ref.length if part is None else part.stored)
            path = ref.path
            targets += [(ref.offset, raw)] if part is None else _portion_targets(ref, part, raw, None)
            found.append(FetchedBytes(raw, ref, part, 0 if found else requests))
        return found if self.places.files.ranges(path, targets) else [None] * len(wanted)

    def decode(self, index: ChunkIndex, fetched: FetchedBytes, out: ByteArray) -> ChunkLoadCounts:
        """Decode what was fetched into `out`."""
        self._tried(index, lambda: self._decode(index, fetched, out))
        part, raw = fetched.portion, fetched.raw
        requests = fetched.requests if fetched.requests is not None else len(part.ranges) if part else 1
        if part is not None:
            return ChunkLoadCounts(part.stored, False, requests, part.decoded)
        stored = fetched.ref.length if raw is None else raw.size
        return ChunkLoadCounts(stored, False, requests, self.bytes_of(index))

    def _decode(self, index: ChunkIndex, fetched: FetchedBytes, out: ByteArray) -> None:
        assert self.decoder is not None
        raw, part = fetched.raw, fetched.portion
        if raw is None:
            return
        if part is None:
            self.decoder.decode(raw, out, fetched.ref.mask)
        elif self.decoder.is_plain:
            at = 0
            for start, stop in part.spans:
                out[start:stop] = raw[at : at + stop - start]
                at += stop - start
        else:
            frame = self._frame(index, fetched.ref)
            if frame is None:
                raise BadChunkError("it vanished while it was read")
            frame.decode(part, raw, out)

    def _load_slowly(self, index: ChunkIndex, out: ByteArray, part: ChunkPortion | None) -> ChunkLoadCounts:
        assert self.load_slowly is not None
        found, box = self.locate(index), self.box_of(index)
        if found is None:
            return ChunkLoadCounts(None, True)
        rows = part.rows if part else tuple((0, b - a) for a, b in box)
        wanted = tuple((a + low, min(a + high, b)) for (a, b), (low, high) in zip(box, rows, strict=True))
        try:
            values = self.load_slowly(wanted)
        except ReadError:
            raise
        except Exception as e:  # a library's decoder may raise anything
            raise self._refused(CorruptChunkError, index, e) from cause_without_secrets(e)
        if values.shape != tuple(b - a for a, b in wanted):
            why = BadChunkError(f"its library gave values of shape {values.shape} for the box {wanted}")
            raise self._refused(CorruptChunkError, index, why)
        at = tuple(slice(low, low + n) for (low, _), n in zip(rows, values.shape, strict=True))
        self.view(out, index)[at] = values
        return ChunkLoadCounts(found.length or 0, True, 1, part.decoded if part else self.bytes_of(index))

    def _tried(self, index: ChunkIndex, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BadChunkError as e:
            if isinstance(self.places.files, CachingFiles):  # a server may answer better next time
                self.places.files.forget(self.path(index))
            kind = TruncatedError if isinstance(e, ShortChunkError) else CorruptChunkError
            raise self._refused(kind, index, e) from e
        except OSError as e:
            raise self._refused(CorruptChunkError, index, e) from e
        except FetchError as e:
            raise self._refused(FetchError, index, e) from None

    def _refused(self, kind: type[ReadError], index: ChunkIndex, why: Exception) -> ReadError:
        return kind(f"chunk {index} of array {self.name!r} in {self.path(index)} cannot be read: {why}")

    def view(self, out: ByteArray, index: ChunkIndex, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """The loaded bytes as an array of the chunk's shape, or of another one, without copying."""
        return self._view(out, shape or self.shape_of(index))[0, ...]  # an array, of a chunk without dims too

    def strip(self, out: ByteArray) -> NDArray[Any]:
        """The bytes of chunks of one size, one after the other, as an array [K, \\*chunk], without copying."""
        return self._view(out, self.chunks)

    def _view(self, out: ByteArray, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype, order = self._stored
        count = out.size // max(prod(shape) * dtype.itemsize, 1)
        if order is None:
            return np.ndarray((count, *shape), dtype, out)
        turned = np.ndarray((count, *(shape[d] for d in order)), dtype, out)
        return turned.transpose(0, *(1 + np.argsort(order)))

    @cached_property
    def _stored(self) -> tuple[np.dtype[Any], tuple[int, ...] | None]:
        """The dtype of decoded bytes, and the order of the dims in them where it is not theirs."""
        if self.decoder is None:
            return np.dtype(self.dtype), None
        order = tuple(self.decoder.order)
        return self.decoder.dtype, None if order == tuple(range(len(order))) else order

    def fill(self, out: ByteArray, index: ChunkIndex) -> None:
        """Make a chunk of fill values: of one that turned out to be missing."""
        value = self.fill_value
        self.view(out, index)[...] = value if isinstance(value, int | float) else 0


def _portion_targets(
    ref: ChunkRef, part: ChunkPortion, raw: ByteArray | None, out: ByteArray | None
) -> list[FillTarget]:
    """Where the ranges of a part go: one after the other in `raw`, or each to its place in `out`."""
    if raw is not None:
        memory, starts = raw, np.cumsum([0, *(length for _, length in part.ranges)]).tolist()
    else:
        assert out is not None
        memory, starts = out, [start for start, _ in part.spans]
    return [
        (ref.offset + offset, memory[at : at + length])
        for (offset, length), at in zip(part.ranges, starts, strict=False)
    ]


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
        """A whole array as it is stored: for coordinates."""
        return self._read(name)
