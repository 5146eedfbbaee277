"""What every file format becomes: for each array, where the stored bytes of each chunk lie and how they decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io import portion
from jigsaw.io._memory import Scratch, fresh
from jigsaw.io.block_tables import BlockTables
from jigsaw.io.chunk import ChunkRef, Codec, Fetched, Loaded, Places, Rows
from jigsaw.io.chunk_grid import Along, Index
from jigsaw.io.cost import WORTH
from jigsaw.io.errors import CorruptChunkError, FetchError, ReadError, TruncatedError, UnsupportedStoreError
from jigsaw.io.fetch.files import Keeping, Room, Target
from jigsaw.io.flow import Flow
from jigsaw.io.formats import blosc as _blosc
from jigsaw.io.formats.codecs import BadChunkError, Bytes, ShortChunkError
from jigsaw.io.lookups import Indexed, Lookups, total
from jigsaw.io.portion import Portion, Rect
from jigsaw.io.redacted import cause_without_secrets, redacted
from jigsaw.layout import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jigsaw.io.members import Members

SMALL = 1 << 18
"""Chunks of fewer bytes are decoded whole: the bookkeeping of a part costs as much."""
_OVERHEAD = 1 << 16
"""Bytes of headers and checksums that a chunk never has."""

scratch = Scratch()


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
    decoder: Codec | None = field(repr=False)
    places: Places = field(repr=False)
    load_slowly: Callable[[Box], NDArray[Any]] | None = field(repr=False, default=None)
    lengths: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]], repr=False)
    clipped: bool = False
    slices: bool = False
    members: Members | None = None
    _tables: BlockTables = field(default_factory=BlockTables, repr=False, init=False)

    # -- geometry ----------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @cached_property
    def along(self) -> tuple[Along, ...]:
        """The chunks along each dim."""
        return tuple(
            Along(n, c, self.lengths.get(d), self.clipped)
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

    def shape_of(self, index: Index) -> tuple[int, ...]:
        """The stored shape of a chunk, padding included."""
        if self.is_uniform:
            return self.chunks
        return tuple(a.length(i) for a, i in zip(self.along, index, strict=True))

    def bytes_of(self, index: Index) -> int:
        """The decoded size of a chunk."""
        return self.chunk_bytes if self.is_uniform else prod(self.shape_of(index)) * self.itemsize

    @cached_property
    def is_divisible(self) -> bool:
        """Whether less than a chunk can be read, and chunks are large enough for that to pay."""
        if self.chunk_bytes < SMALL:
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

    def indices(self) -> Iterator[Index]:
        """The index of every chunk, in C order."""
        return product(*(range(n) for n in self.grid))

    def box_of(self, index: Index) -> Box:
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

    def path(self, index: Index) -> str:
        """The file that holds a chunk, or would."""
        return self.places.path(index)

    def locate(self, index: Index) -> ChunkRef | None:
        """Where a chunk lies; None when it is missing, which the format defines as the fill value."""
        return self._tried(index, lambda: self._found(index))

    def _found(self, index: Index) -> ChunkRef | None:
        ref = self.places.locate(index)
        self._check_size(ref, self.bytes_of(index))
        return ref

    def _check_size(self, ref: ChunkRef | None, size: int) -> None:
        """Refuse a chunk that claims more bytes than any codec makes of its values."""
        if ref is not None and (ref.length or 0) > 2 * size + _OVERHEAD and self.decoder is not None:
            raise BadChunkError(f"it has {ref.length} stored bytes, for a chunk of {size}")

    def stored_bytes(self, index: Index) -> int:
        """The stored size of a chunk: 0 when it is missing, or when the store does not tell."""
        found = self.locate(index)
        return 0 if found is None else found.length or 0

    def portion(self, index: Index, rects: Sequence[Rect]) -> Portion | None:
        """What to fetch and decode of a chunk of which these boxes are needed; None for all of it.

        Raises: `CorruptChunkError` for a Blosc frame whose header is damaged.
        """
        if not self._may_part(index, rects):
            return None
        if self.decoder is None:
            rows = portion.hull(rects)
            return Portion((), (), rows, prod(b - a for a, b in rows) * self.itemsize)
        ref = self.locate(index)
        return None if ref is None or ref.mask else self._portion(index, ref, rects)

    def _may_part(self, index: Index, rects: Sequence[Rect]) -> bool:
        """Whether a part may do, as far as geometry says."""
        needed = portion.share(rects, self.shape_of(index))
        return self.is_divisible and needed <= WORTH and (1 - needed) * self.bytes_of(index) >= self._table_bytes

    def _portion(self, index: Index, ref: ChunkRef, rects: Sequence[Rect]) -> Portion | None:
        assert self.decoder is not None
        gap, shape, order = self.places.files.gap, self.shape_of(index), self.decoder.order
        if self.decoder.is_plain:
            found = portion.plain(portion.byte_spans(rects, shape, order, self.itemsize, gap))
        else:
            frame = self._tried(index, lambda: self._frame(index, ref))
            if frame is None:
                return None
            found = frame.part(portion.blocks_of_rects(tuple(rects), shape, order, self.itemsize, frame.block), gap)
        return None if found.decoded > WORTH * self.bytes_of(index) else found

    def _frame(self, index: Index, ref: ChunkRef) -> _blosc.Frame | None:
        return self._tables.frame(index, ref, self.bytes_of(index), self.places.files)

    # -- what finding chunks takes -----------------------------------------------------------------------------------

    @property
    def looked_up(self) -> Lookups:
        """The reads of indices and tables of blocks so far."""
        made = [self.places.made] if isinstance(self.places, Indexed) else []
        return total([*made, self._tables.made])

    def index_of(self, index: Index) -> tuple[str, Lookups] | None:
        """The object whose index says where a chunk lies, and what reading it takes; None where there is none."""
        return self.places.index_of(index) if isinstance(self.places, Indexed) else None

    def table_of(self, index: Index, rects: Sequence[Rect]) -> Lookups:
        """What reading the table of blocks took, for the part of a chunk that these boxes need."""
        return self._tables.took(index) if self._may_part(index, rects) else Lookups()

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, index: Index, out: Bytes, part: Portion | None = None) -> Loaded:
        """Fetch and decode one chunk, or a part of it, into `out`, which has the chunk's size; a missing chunk leaves
        it.

        Raises: `CorruptChunkError` or `TruncatedError`, naming array, index and file.
        """
        if self.decoder is None:
            return self._load_slowly(index, out, part)
        fetched = self.fetch(index, scratch, part, out)
        return Loaded(None, False) if fetched is None else self.decode(index, fetched, out)

    def load_row(self, first: Index, count: int, out: Bytes) -> list[int | None]:
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

    def _load_row(self, first: Index, rooms: Sequence[Bytes]) -> list[int | None]:
        assert self.decoder is not None
        refs = self._row(first, len(rooms))
        memory, at = scratch(sum(ref.length or 0 for ref in refs if ref is not None)), 0
        stored: list[tuple[ChunkRef, Bytes, Bytes]] = []
        targets: dict[str, list[Target]] = {}
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

    def _row(self, first: Index, count: int) -> list[ChunkRef | None]:
        """Where chunks lie that follow each other along the last dim."""
        refs = self._locate_row(first, count)
        for ref in refs:
            self._check_size(ref, self.chunk_bytes)
        return refs

    @cached_property
    def _locate_row(self) -> Callable[[Index, int], list[ChunkRef | None]]:
        return self.places.locate_row if isinstance(self.places, Rows) else self._locate_each

    def _locate_each(self, first: Index, count: int) -> list[ChunkRef | None]:
        return [self.places.locate((*first[:-1], first[-1] + n)) for n in range(count)]

    def flow(self, index: Index) -> Callable[[Bytes], None]:
        """What fills memory with the next decoded bytes of a chunk that `splits`, at each call.

        Raises: what `load` raises; so does each call.
        """
        flow: Flow = self._tried(index, lambda: self._flow(index))
        return lambda out: self._tried(index, lambda: flow.read(out))

    def _flow(self, index: Index) -> Flow:
        assert self.decoder is not None
        ref = self._found(index)
        frame = None if ref is None or self.decoder.is_plain else self._frame(index, ref)
        if ref is None or not (self.decoder.is_plain or frame):
            raise BadChunkError("it vanished while it was read")
        if frame is None and ref.length != self.bytes_of(index):
            raise ShortChunkError(f"it has {ref.length} bytes and the chunk has {self.bytes_of(index)}")
        return Flow(self.places.files, ref, self.bytes_of(index), frame, scratch)

    def fetch(self, index: Index, room: Room, part: Portion | None = None, out: Bytes | None = None) -> Fetched | None:
        """The stored bytes of a chunk or of a part of it, in memory that `room` gives; None for a missing chunk.

        Where the stored bytes are the values, and `out` is given, they are read to where they belong in it.
        """
        return self._tried(index, lambda: self._fetch(index, room, part, out))

    def _fetch(self, index: Index, room: Room, part: Portion | None, out: Bytes | None) -> Fetched | None:
        assert self.decoder is not None
        files, ref = self.places.files, self._found(index)
        if ref is None:
            return None
        into = out if self.decoder.is_plain else None
        if part is not None:
            raw = room(part.stored) if into is None else None
            targets = _targets(ref, part, raw, into)
            return Fetched(raw, ref, part) if files.ranges(ref.path, targets) else None
        if ref.length is None:
            raw = files.whole(ref.path, room)
            return None if raw is None else Fetched(raw, ref, None)
        if into is not None and ref.length == self.bytes_of(index):
            return Fetched(None, ref, None) if files.ranges(ref.path, [(ref.offset, into)]) else None
        raw = room(ref.length)
        return Fetched(raw, ref, None) if files.ranges(ref.path, [(ref.offset, raw)]) else None

    def fetch_together(self, wanted: Sequence[tuple[Index, Portion | None]], requests: int) -> list[Fetched | None]:
        """The same of chunks in one object, in memory of their own, by so many requests."""
        if len(wanted) == 1:
            return [self.fetch(wanted[0][0], fresh, wanted[0][1])]
        return self._tried(wanted[0][0], lambda: self._fetch_together(wanted, requests))

    def _fetch_together(self, wanted: Sequence[tuple[Index, Portion | None]], requests: int) -> list[Fetched | None]:
        found: list[Fetched | None] = []
        targets: list[Target] = []
        path = ""
        for index, part in wanted:
            ref = self._found(index)
            assert ref is not None and ref.length is not None  # only such chunks are put together
            raw = fresh(ref.length if part is None else part.stored)
            path = ref.path
            targets += [(ref.offset, raw)] if part is None else _targets(ref, part, raw, None)
            found.append(Fetched(raw, ref, part, 0 if found else requests))
        return found if self.places.files.ranges(path, targets) else [None] * len(wanted)

    def decode(self, index: Index, fetched: Fetched, out: Bytes) -> Loaded:
        """Decode what was fetched into `out`."""
        self._tried(index, lambda: self._decode(index, fetched, out))
        part, raw = fetched.portion, fetched.raw
        requests = fetched.requests if fetched.requests is not None else len(part.ranges) if part else 1
        if part is not None:
            return Loaded(part.stored, False, requests, part.decoded)
        stored = fetched.ref.length if raw is None else raw.size
        return Loaded(stored, False, requests, self.bytes_of(index))

    def _decode(self, index: Index, fetched: Fetched, out: Bytes) -> None:
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

    def _load_slowly(self, index: Index, out: Bytes, part: Portion | None) -> Loaded:
        assert self.load_slowly is not None
        found, box = self.locate(index), self.box_of(index)
        if found is None:
            return Loaded(None, True)
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
        return Loaded(found.length or 0, True, 1, part.decoded if part else self.bytes_of(index))

    def _tried(self, index: Index, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except BadChunkError as e:
            if isinstance(self.places.files, Keeping):  # a server may answer better next time
                self.places.files.forget(self.path(index))
            kind = TruncatedError if isinstance(e, ShortChunkError) else CorruptChunkError
            raise self._refused(kind, index, e) from e
        except OSError as e:
            raise self._refused(CorruptChunkError, index, e) from e
        except FetchError as e:
            raise self._refused(FetchError, index, e) from None

    def _refused(self, kind: type[ReadError], index: Index, why: Exception) -> ReadError:
        return kind(f"chunk {index} of array {self.name!r} in {self.path(index)} cannot be read: {why}")

    def view(self, out: Bytes, index: Index, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """The loaded bytes as an array of the chunk's shape, or of another one, without copying."""
        return self._view(out, shape or self.shape_of(index))[0, ...]  # an array, of a chunk without dims too

    def strip(self, out: Bytes) -> NDArray[Any]:
        """The bytes of chunks of one size, one after the other, as an array [K, \\*chunk], without copying."""
        return self._view(out, self.chunks)

    def _view(self, out: Bytes, shape: tuple[int, ...]) -> NDArray[Any]:
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

    def fill(self, out: Bytes, index: Index) -> None:
        """Make a chunk of fill values: of one that turned out to be missing."""
        value = self.fill_value
        self.view(out, index)[...] = value if isinstance(value, int | float) else 0


def _targets(ref: ChunkRef, part: Portion, raw: Bytes | None, out: Bytes | None) -> list[Target]:
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
class Store:
    """An opened store: its arrays, its attributes, and `notes` that a user should read."""

    url: str
    arrays: Mapping[str, ArrayTable]
    attrs: Mapping[str, Any]
    _read: Callable[[str], NDArray[Any]] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", redacted(self.url))

    def read_small(self, name: str) -> NDArray[Any]:
        """A whole array as it is stored: for coordinates."""
        return self._read(name)
