"""From a decoded chunk into the sample: flip, transpose, cast, scale, offset and fill in one pass over the cache.

The chunk stays in its stored dtype until its values land; what the file's scale and offset and the channel's
normalisation do is one multiply-add, y = raw * a + b, whose a and b are computed in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, NaNError, ReadError
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.reading.read_plan import ChunkBox, RowRun
from jigsaw.io.series.request import DROPPED_DIM, ReadPart, ReadRequest

AnyArray = NDArray[Any]

_CONVERTED_BYTES = 1 << 19
"""Bytes of the destination that are scaled at a time: they stay in the second-level cache between the two passes."""


class RefusedValueError(Exception, ABC):
    """A value that the sample cannot have: in which of several chunks; the caller says where that is."""

    def __init__(self, chunk: int = 0) -> None:
        self.chunk = chunk

    @abstractmethod
    def at(self, array: str, where: str, dtype: str) -> ReadError:
        """What the user is told."""


class RefusedNaNError(RefusedValueError):
    """A missing value where none is allowed."""

    def at(self, array: str, where: str, dtype: str) -> ReadError:
        return NaNError(
            f'array {array!r} has missing values at {where} and nan="raise" allows none; use nan="keep" or a number'
        )


class RefusedRangeError(RefusedValueError):
    """A value that the integers of the sample cannot hold."""

    def at(self, array: str, where: str, dtype: str) -> ReadError:
        return FieldError(f"array {array!r} has values at {where} that {dtype} cannot hold; read it as a wider dtype")


def _strided_slice(start: int, step: int, count: int) -> slice:
    stop = start + step * count
    return slice(start, None if stop < 0 else stop, step)


@dataclass(frozen=True)
class PartPlacing:
    """How the values of one part land in the sample: a and b for each channel that the rank holds.

    `turned` are those of rows beyond a pole, where the components of vectors change sign.
    """

    order: tuple[int, ...]
    dropped: tuple[int, ...]
    to: tuple[int, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    turned: tuple[tuple[float, ...], tuple[float, ...]]
    masks: tuple[float, ...]
    nan: str | float
    work: np.dtype[Any]
    dtype: np.dtype[Any]
    fill: float
    stored: np.dtype[Any]
    memory: tuple[int, ...]
    _made: dict[tuple[int, ...], tuple[float | AnyArray, float | AnyArray]] = field(
        default_factory=dict[Any, Any], repr=False
    )

    @classmethod
    def of(cls, part: ReadPart, table: ArrayTable, request: ReadRequest, channels: tuple[int, int]) -> PartPlacing:
        """`channels` are those that the rank holds."""
        kept = [d for d, to in enumerate(part.to) if to != DROPPED_DIM]
        order = tuple(sorted(kept, key=lambda d: part.to[d]))
        scale, offset = request.scale[slice(*channels)], request.offset[slice(*channels)]
        a = [table.scale * s for s in scale]
        b = [(table.offset * s, o) for s, o in zip(scale, offset, strict=True)]
        signs = [-1.0 if c in request.vectors else 1.0 for c in range(*channels)]
        stored = np.dtype(table.dtype)
        wide = (
            np.dtype(request.dtype).itemsize > 4 or stored.itemsize > 4 or (stored.kind in "iu" and stored.itemsize > 2)
        )
        return cls(
            order=order,
            dropped=tuple(d for d, to in enumerate(part.to) if to == DROPPED_DIM),
            to=part.to,
            a=tuple(a),
            b=tuple(own + o for own, o in b),
            turned=(
                tuple(sign * x for sign, x in zip(signs, a, strict=True)),
                tuple(sign * own + o for sign, (own, o) in zip(signs, b, strict=True)),
            ),
            masks=table.masks,
            nan=request.nan,
            work=np.dtype("float64" if wide else "float32"),
            dtype=np.dtype(request.dtype),
            fill=_fill_number(table),
            stored=np.dtype(table.dtype),
            memory=() if table.decoder is None else tuple(table.decoder.order),
        )

    def place(self, chunk: AnyArray, box: ChunkBox, out: AnyArray) -> None:
        """Put what `box` takes of `chunk` where it belongs in `out` [T, C, \\*space]."""
        for runs in product(*box.runs):
            source = chunk[tuple([_strided_slice(r.source, r.source_step, r.length) for r in runs])]
            self._place_run(source, runs, box, out)

    def place_fill(self, box: ChunkBox, out: AnyArray) -> None:
        """The same for a missing chunk, which is its fill value everywhere."""
        for runs in product(*box.runs):
            # one value, seen as an array of the run's shape
            source = np.broadcast_to(np.asarray(self.fill, np.float64), tuple(r.length for r in runs))
            self._place_run(source, runs, box, out)

    def strip_work_memory(self, strip: AnyArray, scratch: Callable[[int], AnyArray]) -> AnyArray:
        """Where the values of a strip are converted: where they lie, if they have that dtype already."""
        if self.is_copy or (strip.dtype == self.work and not self.masks):
            return strip
        return np.ndarray(strip.shape, self.work, scratch(strip.size * self.work.itemsize))

    def convert_strip(self, chunks: AnyArray, box: ChunkBox, work: AnyArray) -> None:
        """Convert what `box` takes of each of these chunks, [K, \\*chunk], to where it lies in `work`.

        `box` takes them whole along their last dim, which is one of space.

        Raises: a `RefusedValueError`, with the number of the chunk.
        """
        for runs in product(*box.runs[:-1]):
            rows = (slice(None), *(_strided_slice(r.source, r.source_step, r.length) for r in runs))
            try:
                if self.is_copy:
                    self._check(chunks[rows])
                else:
                    self._block(chunks[rows], work[rows], *self._factors((*runs, *box.runs[-1]), box))
            except RefusedValueError as e:
                raise type(e)(next(k for k, y in enumerate(work[rows]) if self._refused(y))) from None

    def _factors(self, runs: Sequence[RowRun], box: ChunkBox) -> tuple[float | AnyArray, float | AnyArray]:
        """a and b along the stored dim of channels; numbers where all are 1 or 0.

        A b of 0 among others is -0.0: to add 0.0 would make 0.0 of -0.0, where a channel by itself is left as it is.
        """
        at = dict(box.at).get(1)
        channels = (at, 1, 1) if at is not None else runs[self.to.index(1)][2:]
        if channels not in self._made:
            a, b = self.a[_strided_slice(*channels)], self.b[_strided_slice(*channels)]
            shape = [-1 if to == 1 else 1 for to in self.to]
            self._made[channels] = (
                np.array(a, self.work).reshape(shape) if any(x != 1.0 for x in a) else 1.0,
                np.array([x or -0.0 for x in b], self.work).reshape(shape) if any(x != 0.0 for x in b) else 0.0,
            )
        return self._made[channels]

    def place_strip(self, strip: AnyArray, box: ChunkBox, out: AnyArray) -> None:
        """Put chunks that `convert_strip` made, [K, \\*chunk], side by side along their last dim, where `box` says."""
        last = strip.ndim - 2
        to = self.to[last]
        order = [at for d in (*self.order, *self.dropped) for at in ((0, d + 1) if d == last else (d + 1,))]
        for runs in product(*box.runs):
            rows = [_strided_slice(r.source, r.source_step, r.length) for r in runs[:-1]]
            source = strip[(slice(None), *rows)].transpose(order)
            target = out[self._where(runs, box, out.ndim)]
            shape = (*target.shape[:to], len(strip), -1, *target.shape[to + 1 :])
            picked = self._picked(box, out.ndim)
            source = source[(*picked[:to], slice(None), *picked[to:])]
            # one dim split in two is still a view of `out`, however it is cut out of it
            np.copyto(target.reshape(shape), source, casting="unsafe")

    def in_place_target(self, box: ChunkBox, shape: Sequence[int], out: AnyArray) -> AnyArray | None:
        """The part of `out` that a chunk fills whole, row by row and in its own dtype; None when there is none.

        What is decoded there is then scaled in place.
        """
        if box.runs[-1][0].length != out.shape[-1] or not self.lands_as_stored or self.dropped:
            return None
        if out.dtype != self.stored or not all(_is_all_rows(runs, n) for runs, n in zip(box.runs, shape, strict=True)):
            return None
        where = [slice(None)] * out.ndim
        for dim, index in box.at:
            where[dim] = slice(index, index + 1)
        for d in self.order:
            where[self.to[d]] = slice(box.runs[d][0].target, box.runs[d][0].target + box.runs[d][0].length)
        found = out[tuple(where)]
        return found if found.flags.c_contiguous else None

    @cached_property
    def lands_as_stored(self) -> bool:
        """Whether decoded bytes may be scaled where they lie: dims in order, no value that means "missing"."""
        return self.is_ordered and not self.masks and self.memory == tuple(range(len(self.memory)))

    def _place_run(self, source: AnyArray, runs: Sequence[RowRun], box: ChunkBox, out: AnyArray) -> None:
        where = self._where(runs, box, out.ndim)
        ordered = source if self.is_ordered else source.transpose(self.order + self.dropped)
        if box.at or self.dropped:
            ordered = ordered[self._picked(box, out.ndim)]
        a, b = self.turned if box.turned else (self.a, self.b)
        self._convert(ordered, out[where], a[where[1]], b[where[1]])

    def _where(self, runs: Sequence[RowRun], box: ChunkBox, ndim: int) -> tuple[slice, ...]:
        """The part of the sample that a run of each stored dim fills."""
        where = [slice(None)] * ndim
        for dim, index in box.at:
            where[dim] = slice(index, index + 1)
        for d in self.order:
            run = runs[d]
            where[self.to[d]] = _strided_slice(run.target, run.target_step, run.length)
        return tuple(where)

    def _picked(self, box: ChunkBox, ndim: int) -> tuple[Any, ...]:
        """What makes stored dims, in the order of the sample's, those of the sample."""
        fixed = {dim for dim, _ in box.at}
        return (*(None if dim in fixed else slice(None) for dim in range(ndim)), *(0 for _ in self.dropped))

    @cached_property
    def is_ordered(self) -> bool:
        """Whether the stored dims come in the order of the sample's."""
        order = self.order + self.dropped
        return order == tuple(range(len(order)))

    def _convert(self, source: AnyArray, out: AnyArray, a: Sequence[float], b: Sequence[float]) -> None:
        if self._is_copy(a, b):
            self._check(source)
            if source.__array_interface__["data"] != out.__array_interface__["data"]:  # else it was decoded in place
                np.copyto(out, source, casting="unsafe")
            return
        for t, c in reversed(list(np.ndindex(*out.shape[:2]))):  # what was decoded last is still in a cache
            self._planes(source[t, c, ...], out[t, c, ...], a[c], b[c])

    def _is_copy(self, a: Sequence[float], b: Sequence[float]) -> bool:
        return self.is_plain and all(x == 1.0 for x in a) and all(x == 0.0 for x in b)

    @cached_property
    def is_copy(self) -> bool:
        """Whether every value is laid down as it is stored."""
        return self._is_copy(self.a, self.b)

    @cached_property
    def is_plain(self) -> bool:
        """Whether no value means "missing", none replaces a missing one, and none has to be rounded."""
        rounds = self.dtype.kind in "iu" and self.stored.kind == "f"
        return not self.masks and not isinstance(self.nan, float | int) and not rounds

    def _planes(self, source: AnyArray, out: AnyArray, a: float, b: float) -> None:
        """One (time, channel) of any number of space dims, a block of rows at a time."""
        if out.ndim == 0:
            source, out = source[None], out[None]
        rows = max(1, _CONVERTED_BYTES // max(out[:1].nbytes, 1))
        for start in reversed(range(0, out.shape[0], rows)):
            self._block(source[start : start + rows], out[start : start + rows], a, b)

    def _block(self, source: AnyArray, out: AnyArray, a: float | AnyArray, b: float | AnyArray) -> None:
        direct = out.dtype == self.work
        y: AnyArray = out if direct else np.empty(out.shape, self.work)
        if (source.dtype.kind == "f" and source.dtype.itemsize > self.work.itemsize) or source.dtype.kind == "b":
            np.copyto(y, source, casting="unsafe")
            source_or_y = y
        else:
            source_or_y = source
        if isinstance(a, np.ndarray) or a != 1.0:
            np.multiply(source_or_y, self._number(a), out=y, dtype=self.work, casting="unsafe")
        elif source_or_y is source and y is not source:
            np.copyto(y, source, casting="unsafe")
        if isinstance(b, np.ndarray) or b != 0.0:
            np.add(y, self._number(b), out=y)
        for mask in self.masks:
            np.copyto(y, np.nan, where=source == mask)
        self._apply_policy(y)
        if not direct:
            np.copyto(out, y, casting="unsafe")

    def _number(self, x: float | AnyArray) -> Any:
        return x if isinstance(x, np.ndarray) else self.work.type(x)

    def _apply_policy(self, y: AnyArray) -> None:
        """What the policy says becomes of missing values, and the nearest integer of what lands as one."""
        if not isinstance(self.nan, str):
            np.copyto(y, self.nan, where=np.isnan(y))
        if self.dtype.kind in "iu":  # a scale makes 0.99999 of a label 1
            np.rint(y, out=y)
        self._check(y)

    def _check(self, y: AnyArray) -> None:
        refused = self._refused(y)
        if refused is not None:
            raise refused

    def _refused(self, y: AnyArray) -> type[RefusedValueError] | None:
        if self.nan == "raise" and y.dtype.kind == "f" and np.isnan(y).any():
            return RefusedNaNError
        if self.dtype.kind not in "iu" or np.can_cast(y.dtype, self.dtype) or not y.size:
            return None
        held = np.iinfo(self.dtype)
        return None if y.min() >= held.min and y.max() < held.max + 1 else RefusedRangeError


def _is_all_rows(runs: Sequence[RowRun], rows: int) -> bool:
    """Whether runs take all rows of a chunk in their order."""
    first = runs[0]
    return len(runs) == 1 and (first.length, first.source, first.source_step, first.target_step) == (rows, 0, 1, 1)


def _fill_number(table: ArrayTable) -> float:
    value = table.fill_value
    return float(value) if isinstance(value, int | float) else 0.0


def pack_box(chunk: AnyArray, box: ChunkBox) -> NDArray[np.uint8]:
    """The bytes of what `box` takes of `chunk`, in the stored dtype: what travels to another machine."""
    room = np.empty(box.extents, chunk.dtype)
    for runs, packed in zip(product(*box.runs), product(*box_when_packed(box).runs), strict=True):
        to = tuple(_strided_slice(r.source, r.source_step, r.length) for r in packed)
        room[to] = chunk[tuple(_strided_slice(r.source, r.source_step, r.length) for r in runs)]
    return room.reshape(-1).view(np.uint8)


def box_when_packed(box: ChunkBox) -> ChunkBox:
    """The same box, of a chunk that `pack_box` reduced to it."""
    dims: list[tuple[RowRun, ...]] = []
    for runs in box.runs:
        starts = [sum(r.length for r in runs[:i]) for i in range(len(runs))]
        dims.append(tuple(r._replace(source=start, source_step=1) for r, start in zip(runs, starts, strict=True)))
    return box._replace(runs=tuple(dims))
