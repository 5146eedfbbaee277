"""Finder of the bytes of each chunk of one array, and of those that a part of it needs.

Some are looked up in the indices of shards and in Blosc's tables of blocks, each read once and kept. Plans need them,
so these reads are counted apart from those of the read itself. The index of an HDF5 file is read when it is opened, and
is not counted here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from jigsaw.errors import CorruptChunkError, FetchError, MissingArrayError, MissingChunkError, ReadError, TruncatedError
from jigsaw.io.chunks.chunk import (
    MOST_PORTION_SHARE,
    ChunkDecoder,
    ChunkGrid,
    ChunkIndex,
    ChunkPlaces,
    ChunkPortion,
    ChunkRef,
    ChunkRows,
    ObjectPerChunk,
    StripPlaces,
    blosc_blocks_of_rows,
    bounding_rows,
    needed_byte_spans,
    needed_share,
    plain_portion,
)
from jigsaw.io.chunks.codecs import BLOSC_HEADER_BYTES, BloscFrame, blosc_frame_of, check_blosc_header
from jigsaw.io.chunks.files import BadChunkError, ByteArray, CachingFiles, ShortChunkError, StoreFiles, fresh_memory

T = TypeVar("T")

_TABLES_KEPT = 1024
_SMALLEST_BLOCK = 1 << 14
"""Size below which Blosc's blocks hardly ever are."""
SMALLEST_DIVIDED_CHUNK = 1 << 18
"""Smallest chunk that is decoded in part: for a smaller one the bookkeeping of a part costs as much."""
_MOST_OVERHEAD = 1 << 16
"""Limit that the bytes of a chunk's headers and checksums never reach."""


class LookupCounts(NamedTuple):
    """Numbers of requests and of bytes."""

    requests: int = 0
    bytes: int = 0


def total_lookups(lookups: Iterable[LookupCounts]) -> LookupCounts:
    """Sum look-ups."""
    counts = tuple(lookups)
    return LookupCounts(sum(count.requests for count in counts), sum(count.bytes for count in counts))


class LookupTally:
    """Sum of the look-ups that threads make."""

    def __init__(self) -> None:
        self._lock, self.counted = threading.Lock(), LookupCounts()

    def add(self, more: LookupCounts) -> LookupCounts:
        with self._lock:
            so_far = self.counted
            self.counted = LookupCounts(so_far.requests + more.requests, so_far.bytes + more.bytes)
        return more


@runtime_checkable
class IndexedPlaces(Protocol):
    """Places that are looked up in indices; `counted` sums the look-ups of the indices that were read."""

    @property
    def counted(self) -> LookupCounts: ...

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts]:
        """Return the object whose index says where a chunk lies, and the look-ups of reading that index."""
        ...


class BloscBlockTables:
    """The tables of one array's chunks, each read once; the last 1024 are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ChunkIndex, tuple[BloscFrame | None, LookupCounts]] = OrderedDict()
        self._lock, self._tally = threading.Lock(), LookupTally()

    @property
    def counted(self) -> LookupCounts:
        return self._tally.counted

    def took(self, index: ChunkIndex) -> LookupCounts:
        """Return the look-ups for the table of a chunk, while it is kept."""
        entry = self._kept.get(index)
        return LookupCounts() if entry is None else entry[1]

    def frame(self, index: ChunkIndex, ref: ChunkRef, size: int, files: StoreFiles) -> BloscFrame | None:
        """Return the checked Blosc frame of a chunk of `size` decoded bytes; None when it is missing."""
        with self._lock:
            if index in self._kept:
                return self._kept[index][0]
        lookups = LookupTally()  # for this table alone; a read that fails is counted, too
        try:
            frame = _read_frame(ref, size, files, lookups)
        finally:
            self._tally.add(lookups.counted)
        with self._lock:
            self._kept[index] = frame, lookups.counted
            if len(self._kept) > _TABLES_KEPT:
                self._kept.popitem(last=False)
        return frame


def _read_frame(ref: ChunkRef, size: int, files: StoreFiles, lookups: LookupTally) -> BloscFrame | None:
    def read(start: int, memory: ByteArray) -> ByteArray | None:
        lookups.add(LookupCounts(1, 0))
        if not files.ranges(ref.path, [(ref.offset + start, memory)]):
            return None
        lookups.add(LookupCounts(0, memory.size))
        return memory

    # read the header and, at once, the largest table that the frame is likely to have
    expected = BLOSC_HEADER_BYTES + 4 * -(-size // _SMALLEST_BLOCK)
    at_once = ref.length is None or ref.length >= expected
    try:
        raw = read(0, fresh_memory(expected if at_once else BLOSC_HEADER_BYTES))
    except ShortChunkError:
        if not at_once:
            raise
        raw = read(0, fresh_memory(BLOSC_HEADER_BYTES))  # the object, of unknown size, is shorter
    if raw is None:
        return None
    head = raw[:BLOSC_HEADER_BYTES].tobytes()
    _, count = check_blosc_header(head, size, ref.length)
    stop = BLOSC_HEADER_BYTES + (0 if head[2] & 0x2 else 4 * count)
    if ref.length is not None and stop - BLOSC_HEADER_BYTES > ref.length:
        raise ShortChunkError(f"it has {ref.length} bytes, too few for its table of {count} blocks")
    if stop <= raw.size:
        return blosc_frame_of(head, raw[BLOSC_HEADER_BYTES:stop])
    table = fresh_memory(stop - BLOSC_HEADER_BYTES)
    known = raw.size - BLOSC_HEADER_BYTES
    table[:known] = raw[BLOSC_HEADER_BYTES:]
    read(raw.size, table[known:])
    return blosc_frame_of(head, table)


def most_stored_bytes(size: int) -> int:
    """Return the number of stored bytes that a chunk of `size` decoded ones never exceeds.

    On data that cannot be compressed Blosc adds 16 bytes, Zstandard and LZ4 1 in 255, deflate 5 in 16 KiB.
    """
    return 2 * size + _MOST_OVERHEAD


def vanished_array_error(array: str, metadata: str) -> MissingArrayError:
    """Make the error that refuses an array whose metadata are gone."""
    return MissingArrayError(
        f"array {array!r} has vanished from its store: {metadata} is gone since the store was opened, so its missing "
        "chunks are not read as fill values; restore the store, or open another one"
    )


def missing_chunk_error(chunk: Any, array: str, place: str, more: str = "") -> MissingChunkError:
    """Make the error that refuses a missing chunk; `more` says how many others are missing."""
    return MissingChunkError(
        f"chunk {chunk} of array {array!r} is missing: the store has no {place}{more}. It was never written, or left "
        "out because all its values are the fill value, or removed since; restore it, or give missing='fill' to read "
        "the fill value in place of every missing chunk"
    )


class ChunkFinder:
    """Finder of the chunks of the array `name`, by its format's `places`.

    `decoder` is None for an array that only its library can read, in boxes smaller than a chunk where it `slices`.
    """

    def __init__(
        self, name: str, grid: ChunkGrid, places: ChunkPlaces, decoder: ChunkDecoder | None, slices: bool
    ) -> None:
        self.name, self.grid, self.places, self._decoder, self._slices = name, grid, places, decoder, slices
        self._tables = BloscBlockTables()

    @cached_property
    def far(self) -> bool:
        """True where fetching a chunk costs a round trip over a network."""
        return self._decoder is not None and self.places.files.far

    def path(self, index: ChunkIndex) -> str:
        return self.places.path(index)

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        """Return where a chunk lies; None when it is missing, which the format defines as the fill value."""
        return self.naming_chunk(index, lambda: self.checked_ref(index))

    def checked_ref(self, index: ChunkIndex) -> ChunkRef | None:
        """Return the result of `locate`, with errors that lack the chunk's name: for use in `naming_chunk`."""
        ref = self.places.locate(index)
        self._check_size(ref, self.grid.bytes_of(index))
        return ref

    def _check_size(self, ref: ChunkRef | None, size: int) -> None:
        """Refuse a chunk that claims more bytes than any codec makes of its values."""
        if ref is not None and (ref.length or 0) > most_stored_bytes(size) and self._decoder is not None:
            raise BadChunkError(f"it has {ref.length} stored bytes, for a chunk of {size}")

    def lacks_object(self, index: ChunkIndex) -> bool:
        """Say whether a missing chunk may have been removed: no index of the store says that it never existed."""
        return isinstance(self.places, ObjectPerChunk) and self.places.lacks_object(index)

    def check_metadata(self) -> None:
        """Raise `MissingArrayError` where the array's own metadata are gone, and its chunks with them."""
        gone = self.places.lost_metadata() if isinstance(self.places, ObjectPerChunk) else None
        if gone is not None:
            raise vanished_array_error(self.name, gone)

    def missing_error(self, index: ChunkIndex, more: str = "") -> MissingChunkError:
        """Make the error that refuses a missing chunk; `more` says how many others are missing."""
        return missing_chunk_error(index, self.name, self.path(index), more)

    def stored_bytes(self, index: ChunkIndex) -> int:
        """Return the stored size of a chunk: 0 when it is missing, or when the store does not give it."""
        ref = self.locate(index)
        return 0 if ref is None else ref.length or 0

    @cached_property
    def is_divisible(self) -> bool:
        """True where less than a chunk can be read, and chunks are large enough for that to pay."""
        if self.grid.chunk_bytes < SMALLEST_DIVIDED_CHUNK:
            return False
        return self._slices if self._decoder is None else self._decoder.splits

    @cached_property
    def least_left_out(self) -> int:
        """The bytes that a part must leave out at least."""
        is_plain = self._decoder is not None and self._decoder.is_plain
        # the table of a remote Blosc frame takes a request of its own, which costs as much as reading four gaps
        return 4 * self.places.files.gap if self.far and not is_plain else 0

    def portion(self, index: ChunkIndex, rects: Sequence[ChunkRows]) -> ChunkPortion | None:
        """Return what to fetch and decode of a chunk of which these boxes are needed; None for all of it."""
        if not self.may_part(index, needed_share(rects, self.grid.shape_of(index))):
            return None
        if self._decoder is None:
            rows = bounding_rows(rects)
            return ChunkPortion((), (), rows, prod(b - a for a, b in rows) * self.grid.itemsize)
        ref = self.locate(index)
        return None if ref is None or ref.mask else self._portion(index, ref, rects, self._decoder)

    def portion_key(self, index: ChunkIndex, ref: ChunkRef | None) -> Hashable:
        """Return a key that is equal for chunks with equal portions; None where the portion depends on stored bytes."""
        if self._decoder is None:
            return self.grid.shape_of(index), self.grid.itemsize
        if ref is None or ref.mask or not self._decoder.is_plain:
            return None
        return self.grid.shape_of(index), self.grid.itemsize, self._decoder.order, self.places.files.gap, self.far

    def may_part(self, index: ChunkIndex, needed: float) -> bool:
        """Say whether a part may be enough when the share `needed` of a chunk is needed, as far as geometry says."""
        return (
            self.is_divisible
            and needed <= MOST_PORTION_SHARE
            and (1 - needed) * self.grid.bytes_of(index) >= self.least_left_out
        )

    def _portion(
        self, index: ChunkIndex, ref: ChunkRef, rects: Sequence[ChunkRows], decoder: ChunkDecoder
    ) -> ChunkPortion | None:
        gap, shape, order = self.places.files.gap, self.grid.shape_of(index), decoder.order
        if decoder.is_plain:
            part = plain_portion(needed_byte_spans(rects, shape, order, self.grid.itemsize, gap))
        else:
            frame = self.blosc_frame_of(index, ref)
            if frame is None:
                return None
            part = frame.part(blosc_blocks_of_rows(tuple(rects), shape, order, self.grid.itemsize, frame.block), gap)
        return None if part.decoded > MOST_PORTION_SHARE * self.grid.bytes_of(index) else part

    def blosc_frame(self, index: ChunkIndex, ref: ChunkRef) -> BloscFrame | None:
        """Return the Blosc frame that a chunk is stored as, its table read once; None when it is missing."""
        return self._tables.frame(index, ref, self.grid.bytes_of(index), self.places.files)

    def blosc_frame_of(self, index: ChunkIndex, ref: ChunkRef) -> BloscFrame | None:
        """Return the result of `blosc_frame`, with errors that name the chunk."""
        return self.naming_chunk(index, lambda: self.blosc_frame(index, ref))

    def locate_strip(self, first: ChunkIndex, count: int) -> list[ChunkRef | None]:
        """Return where `count` consecutive chunks along the last dim lie; the errors do not name them."""
        refs = self._locate_strip(first, count)
        for ref in refs:
            self._check_size(ref, self.grid.chunk_bytes)
        return refs

    @cached_property
    def _locate_strip(self) -> Callable[[ChunkIndex, int], list[ChunkRef | None]]:
        if isinstance(self.places, StripPlaces):
            return self.places.locate_strip
        return lambda first, count: [self.places.locate((*first[:-1], first[-1] + n)) for n in range(count)]

    @property
    def looked_up(self) -> LookupCounts:
        indices = [self.places.counted] if isinstance(self.places, IndexedPlaces) else []
        return total_lookups([*indices, self._tables.counted])

    def index_of(self, index: ChunkIndex) -> tuple[str, LookupCounts] | None:
        """Return the object whose index says where a chunk lies, and the look-ups of reading it; None without
        an index.
        """
        return self.places.index_of(index) if isinstance(self.places, IndexedPlaces) else None

    def table_of(self, index: ChunkIndex) -> LookupCounts:
        return self._tables.took(index)

    def naming_chunk(self, index: ChunkIndex, step: Callable[[], T]) -> T:
        """Run a step and return its result; its errors name array, chunk and file."""
        try:
            return step()
        except BadChunkError as e:
            if isinstance(self.places.files, CachingFiles):  # a server may send the right bytes next time
                self.places.files.forget(self.path(index))
            kind = TruncatedError if isinstance(e, ShortChunkError) else CorruptChunkError
            raise self.chunk_error(kind, index, e) from e
        except OSError as e:
            raise self.chunk_error(CorruptChunkError, index, e) from e
        except FetchError as e:
            raise self.chunk_error(FetchError, index, e) from None

    def chunk_error(self, kind: type[ReadError], index: ChunkIndex, why: Exception) -> ReadError:
        """Make the error that says that a chunk cannot be read, and why."""
        return kind(f"chunk {index} of array {self.name!r} in {self.path(index)} cannot be read: {why}")
