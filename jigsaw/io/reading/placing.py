"""Copies from a decoded chunk into the sample: flip, transpose, cast, scale, offset and fill in one pass over the
cache.

The chunk stays in its stored dtype until its values land. The file's scale and offset and the channel's normalization
are one multiply-add, y = raw * a + b. Its a and b are computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, NaNError, ReadError
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.files import ByteArray
from jigsaw.io.reading.chunk_readers import NO_OWNER, ChunkJob
from jigsaw.io.reading.needed_chunks import ChunkBox, RowList, RowRun, TakenRows, strided_slice
from jigsaw.io.reading.peers import PeerGroup
from jigsaw.io.reading.read_plan import ReadPlan
from jigsaw.io.series.request import DROPPED_DIM, ReadPart, ReadRequest
from jigsaw.tile.misuse import warn_once

AnyArray = NDArray[Any]

_ROUNDED_OFF = 0.01
"""Tolerance within which a label counts as an integer after a scale of the file, or its dtype, has moved it."""
CONVERTED_BYTES = 1 << 19
"""Bytes that are converted at a time: they stay in the second-level cache between decoding, scaling and adding."""


class RefusedValueError(Exception):
    """A value that the sample cannot have, missing or too large, and the number of its chunk."""

    def __init__(self, is_missing: bool, chunk: int = 0) -> None:
        self.is_missing, self.chunk = is_missing, chunk

    def at(self, array: str, where: str, dtype: str) -> ReadError:
        if self.is_missing:
            return NaNError(
                f'array {array!r} has missing values at {where} and nan="raise" allows none; use nan="keep" or a number'
            )
        return FieldError(f"array {array!r} has values at {where} that {dtype} cannot hold; read it as a wider dtype")


def warn_of_rounding(labels: AnyArray, name: str) -> None:
    """Warn once of values that are to become integers and lie between them, which rounding changes."""
    with np.errstate(invalid="ignore"):  # infinite ones are refused later
        off = np.abs(labels - np.rint(labels)) > _ROUNDED_OFF
    if off.any():
        warn_once(
            "labels between integers",
            f"array {name} has labels that are not integers, such as {labels[off][0]:g}, and they are rounded to the "
            "nearest: a label map that was resampled linearly, or holds probabilities; resample it by the nearest "
            "voxel, or open probabilities as images (told once, other label maps may have such values too)",
        )


class PartPlacing:
    """Rules by which the values of one part land in the sample: a and b for each of the rank's `channels`."""

    def __init__(self, part: ReadPart, table: ArrayTable, request: ReadRequest, channels: tuple[int, int]) -> None:
        kept = [d for d, to in enumerate(part.to) if to != DROPPED_DIM]
        self.order = tuple(sorted(kept, key=lambda d: part.to[d]))
        self.dropped = tuple(d for d, to in enumerate(part.to) if to == DROPPED_DIM)
        self.to, self.masks, self.name = part.to, table.masks, part.array
        self.nan = request.nan if part.nan is None else part.nan
        # y = (raw * own_scale + own_offset) * s + o: the file's numbers and the channel's normalization as one a and b
        scale, offset = request.scale[slice(*channels)], request.offset[slice(*channels)]
        own = [(table.offset * s, o) for s, o in zip(scale, offset, strict=True)]
        self.a, self.b = tuple(table.scale * s for s in scale), tuple(shift + o for shift, o in own)
        # Beyond a pole the components of vectors change sign, but not the offset that normalizes them: it belongs to
        # the values as the model sees them.
        signs = [-1.0 if c in request.vectors else 1.0 for c in range(*channels)]
        self.turned = (
            tuple(sign * x for sign, x in zip(signs, self.a, strict=True)),
            tuple(sign * shift + o for sign, (shift, o) in zip(signs, own, strict=True)),
        )
        self.stored, self.dtype = stored, dtype = np.dtype(table.dtype), np.dtype(request.dtype)
        # float32 holds integers of 16 bits exactly, and of 32 not
        wide = dtype.itemsize > 4 or stored.itemsize > 4 or (stored.kind in "iu" and stored.itemsize > 2)
        self.work = np.dtype("float64" if wide else "float32")
        self.fill = float(table.fill_value) if isinstance(table.fill_value, int | float) else 0.0
        self.memory = () if table.decoder is None else tuple(table.decoder.order)
        self._made: dict[tuple[int, ...], tuple[float | AnyArray, float | AnyArray]] = {}

    def place(self, chunk: AnyArray | None, box: ChunkBox, out: AnyArray) -> None:
        """Put what `box` takes of `chunk`, or of a missing one, where it belongs in `out` [T, C, \\*space]."""
        a, b = self.turned if box.turned else (self.a, self.b)
        for runs in product(*box.runs):
            if chunk is None:  # the fill value, seen as an array of the run's shape
                source = np.broadcast_to(np.asarray(self.fill, np.float64), tuple(r.length for r in runs))
            else:
                source = chunk[tuple([r.taken for r in runs])]
            where = self._where(runs, box, out.ndim)
            ordered = source if self.is_ordered else source.transpose(self.order + self.dropped)
            if box.at or self.dropped:
                ordered = ordered[self._picked(box, out.ndim)]
            # `where` has dims of the sample, and its second is of channels: a and b count from the first one held
            # an index by a list gives a copy, not a view
            is_list = any(isinstance(index, np.ndarray) for index in where)
            target = np.empty(ordered.shape, out.dtype) if is_list else out[where]
            self._convert(ordered, target, a[where[1]], b[where[1]])
            if is_list:
                out[where] = target

    def strip_work_memory(self, strip: AnyArray, scratch: Callable[[int], AnyArray]) -> AnyArray:
        """Return the memory in which a strip is converted: the strip itself if it has that dtype."""
        if self.is_copy or (strip.dtype == self.work and not self.masks):
            return strip
        return np.ndarray(strip.shape, self.work, scratch(strip.size * self.work.itemsize))

    def convert_strip(self, chunks: AnyArray, box: ChunkBox, work: AnyArray) -> None:
        """Convert what `box` takes of each of these chunks, [K, \\*chunk], to where it lies in `work`.

        `box` takes them whole along their last dim, which is one of space.

        Raises: a `RefusedValueError`, with the number of the chunk.
        """
        for runs in product(*box.runs[:-1]):
            rows = (slice(None), *(r.taken for r in runs))
            try:
                if self.is_copy:
                    self._check(chunks[rows])
                else:
                    self._block(chunks[rows], work[rows], *self._factors((*runs, *box.runs[-1]), box))
            except RefusedValueError as e:  # all chunks were checked together; find the one with the value only now
                number = next(k for k, y in enumerate(work[rows]) if self._refused(y))
                raise RefusedValueError(e.is_missing, number) from None

    def _factors(self, runs: Sequence[TakenRows], box: ChunkBox) -> tuple[float | AnyArray, float | AnyArray]:
        """Return a and b along the stored dim of channels; plain numbers where all are 1 or 0."""
        # a b of 0 among others is -0.0: to add 0.0 would make 0.0 of -0.0, where a channel by itself is left as it is
        at = dict(box.at).get(1)
        run = None if at is not None else runs[self.to.index(1)]
        # a store has its channels in order, so they are a run and never a list
        channels = (at or 0, 1, 1) if not isinstance(run, RowRun) else run[2:]
        if channels not in self._made:
            a, b = self.a[strided_slice(*channels)], self.b[strided_slice(*channels)]
            shape = [-1 if to == 1 else 1 for to in self.to]
            self._made[channels] = (
                np.array(a, self.work).reshape(shape) if any(x != 1.0 for x in a) else 1.0,
                np.array([x or -0.0 for x in b], self.work).reshape(shape) if any(x != 0.0 for x in b) else 0.0,
            )
        return self._made[channels]

    def place_strip(self, strip: AnyArray, box: ChunkBox, out: AnyArray) -> None:
        """Put chunks that `convert_strip` made, [K, \\*chunk], side by side along their last dim, where `box` says."""
        # Of chunks [K, lat, lon] the dim that counts them goes in front of their last one, wherever that lands in the
        # sample: K chunks of n columns are K * n columns there.
        last = strip.ndim - 2
        to = self.to[last]
        order = [at for d in (*self.order, *self.dropped) for at in ((0, d + 1) if d == last else (d + 1,))]
        for runs in product(*box.runs):
            rows = [r.taken for r in runs[:-1]]
            source = strip[(slice(None), *rows)].transpose(order)
            target = out[self._where(runs, box, out.ndim)]
            shape = (*target.shape[:to], len(strip), -1, *target.shape[to + 1 :])
            picked = self._picked(box, out.ndim)
            source = source[(*picked[:to], slice(None), *picked[to:])]
            # one dim split in two is still a view of `out`, however it is cut out of it
            np.copyto(target.reshape(shape), source, casting="unsafe")

    def in_place_target(self, box: ChunkBox, shape: Sequence[int], out: AnyArray) -> AnyArray | None:
        """Return the part of `out` that a chunk fills whole, in its own dtype, to be decoded there."""
        if box.runs[-1][0].length != out.shape[-1] or not self.lands_as_stored or self.dropped:
            return None
        if out.dtype != self.stored or not all(_is_all_rows(runs, n) for runs, n in zip(box.runs, shape, strict=True)):
            return None
        target = out[self._where([runs[0] for runs in box.runs], box, out.ndim)]
        return target if target.flags.c_contiguous else None

    @cached_property
    def lands_as_stored(self) -> bool:
        """True where decoded bytes may be scaled where they lie: dims in order, and no value means "missing"."""
        return self.is_ordered and not self.masks and self.memory == tuple(range(len(self.memory)))

    def _where(self, runs: Sequence[TakenRows], box: ChunkBox, ndim: int) -> tuple[Any, ...]:
        where: list[Any] = [slice(None)] * ndim
        for dim, index in box.at:
            where[dim] = slice(index, index + 1)
        for d in self.order:
            where[self.to[d]] = runs[d].landing
        return tuple(where)

    def _picked(self, box: ChunkBox, ndim: int) -> tuple[Any, ...]:
        """Return the index that turns stored dims, already in the sample's order, into those of the sample."""
        # an array [member, lat, lon] that lands at (time 2, channel 5) of [T, C, lat, lon], its member dropped: ordered
        # it is [lat, lon, member], and [None, None, :, :, 0] of that
        fixed = {dim for dim, _ in box.at}
        return (*(None if dim in fixed else slice(None) for dim in range(ndim)), *(0 for _ in self.dropped))

    @cached_property
    def is_ordered(self) -> bool:
        order = self.order + self.dropped
        return order == tuple(range(len(order)))

    def _convert(self, source: AnyArray, out: AnyArray, a: Sequence[float], b: Sequence[float]) -> None:
        if self._is_copy(a, b):
            self._check(source)
            # equal where the chunk was decoded in place
            if source.__array_interface__["data"] != out.__array_interface__["data"]:
                np.copyto(out, source, casting="unsafe")
            return
        # in reverse, because the planes decoded last are still in the cache
        for t, c in reversed(list(np.ndindex(*out.shape[:2]))):
            self._planes(source[t, c, ...], out[t, c, ...], a[c], b[c])

    def _is_copy(self, a: Sequence[float], b: Sequence[float]) -> bool:
        return self.is_plain and all(x == 1.0 for x in a) and all(x == 0.0 for x in b)

    @cached_property
    def is_copy(self) -> bool:
        return self._is_copy(self.a, self.b)

    @cached_property
    def is_plain(self) -> bool:
        """True where no value means "missing", none replaces a missing one, and none has to be rounded."""
        rounds = self.dtype.kind in "iu" and self.stored.kind == "f"
        return not self.masks and not isinstance(self.nan, float | int) and not rounds

    def _planes(self, source: AnyArray, out: AnyArray, a: float, b: float) -> None:
        """Place one (time, channel) of any number of space dims, a block of rows at a time."""
        if out.ndim == 0:
            source, out = source[None], out[None]
        rows = max(1, CONVERTED_BYTES // max(out[:1].nbytes, 1))
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
        # Masks are stored values, so the source is asked. It is gone where y lies over it, but chunks with masks are
        # never decoded in place (`lands_as_stored`), nor strips converted there (`strip_work_memory`).
        for mask in self.masks:
            np.copyto(y, np.nan, where=source == mask)
        if not isinstance(self.nan, str):
            np.copyto(y, self.nan, where=np.isnan(y))
        if self.dtype.kind in "iu":  # a scale makes 0.99999 of a label 1
            warn_of_rounding(y, repr(self.name))
            np.rint(y, out=y)
        self._check(y)
        if not direct:
            np.copyto(out, y, casting="unsafe")

    def _number(self, x: float | AnyArray) -> Any:
        return x if isinstance(x, np.ndarray) else self.work.type(x)

    def _check(self, y: AnyArray) -> None:
        if refused := self._refused(y):
            raise refused

    def _refused(self, y: AnyArray) -> RefusedValueError | None:
        if self.nan == "raise" and y.dtype.kind == "f" and np.isnan(y).any():
            return RefusedValueError(is_missing=True)
        if self.nan == "raise" and y.dtype.kind == self.dtype.kind == "f" and y.dtype.itemsize > self.dtype.itemsize:
            # 1e300 would be infinite in float32; what is infinite already stays so
            large = np.abs(y) > np.finfo(self.dtype).max
            return RefusedValueError(is_missing=False) if (large & np.isfinite(y)).any() else None
        if self.dtype.kind not in "iu" or np.can_cast(y.dtype, self.dtype) or not y.size:
            return None
        held = np.iinfo(self.dtype)
        # below max + 1, a power of two: max itself, 2**63 - 1, does not exist in float64, and would let 2**63 pass
        within = y.min() >= held.min and y.max() < held.max + 1
        return None if within else RefusedValueError(is_missing=False)


def _is_all_rows(runs: Sequence[TakenRows], rows: int) -> bool:
    first = runs[0]
    if isinstance(first, RowList):
        return False
    return len(runs) == 1 and (first.length, first.source, first.source_step, first.target_step) == (rows, 0, 1, 1)


def pack_box(chunk: AnyArray, box: ChunkBox) -> ByteArray:
    """Pack the bytes that `box` takes of `chunk`, in the stored dtype, for another machine."""
    room = np.empty(box.extents, chunk.dtype)
    for runs, packed in zip(product(*box.runs), product(*box_when_packed(box).runs), strict=True):
        room[tuple(r.taken for r in packed)] = chunk[tuple(r.taken for r in runs)]
    return room.reshape(-1).view(np.uint8)


def box_when_packed(box: ChunkBox) -> ChunkBox:
    """Return the same box in the coordinates of the array that `pack_box` packed."""
    dims: list[tuple[TakenRows, ...]] = []
    for runs in box.runs:
        starts = [sum(r.length for r in runs[:i]) for i in range(len(runs))]
        dims.append(tuple(_packed_rows(r, start) for r, start in zip(runs, starts, strict=True)))
    return box._replace(runs=tuple(dims))


def _packed_rows(run: TakenRows, start: int) -> TakenRows:
    if isinstance(run, RowList):
        return RowList(np.arange(start, start + run.length), run.target)
    return run._replace(source=start, source_step=1)


class BoxParcels:
    """The boxes of one plan that go from machine to machine.

    They travel without a description, because both sides know the contents from the plan. Say ranks 0 and 1 are on one
    machine, 2 and 3 on another. Rank 0 has loaded the shared jobs 4 and 7, which all four read. Rank 0 sends rank 2 its
    boxes of job 4, then those of job 7, and rank 3 likewise. Rank 2 counts the bytes of its own boxes of the jobs 4 and
    7, and cuts what comes from rank 0 in that order. Rank 1 has taken its boxes from shared memory.
    """

    def __init__(self, plan: ReadPlan, peers: PeerGroup) -> None:
        self._plan, self._peers, self._near = plan, peers, frozenset(peers.neighbors)
        self._packed: dict[tuple[int, int], list[ByteArray]] = {}

    @property
    def are_any(self) -> bool:
        """True where any rank sends boxes; the same on every rank."""
        jobs, hosts = self._plan.shared, self._peers.hosts
        return any(hosts[job.owner] != hosts[m] for job in jobs if job.owner != NO_OWNER for m in job.readers)

    def pack(self, job: ChunkJob, number: int, values: AnyArray) -> None:
        """Keep the boxes that others need of a chunk, under the job's number, until all are sent together."""
        # in the loading threads: each (reader, number) is stored by one of them, and by no other.  Chunks are not cut
        # into sections where ranks are on several machines, so all boxes of a job are here at once
        for reader in job.readers:
            if reader not in self._near:
                self._packed[reader, number] = [pack_box(values, box) for box in self._plan.boxes(job, reader)]

    def make_room(self) -> None:
        """Allocate memory to send and to receive, so that lack of memory fails before other ranks wait."""
        # Sorted by (reader, number): threads have packed in any order, and an all-to-all wants what goes to rank 0
        # first.  The receiver walks `plan.shared`, by owner, in the same order of numbers, and both take the boxes of a
        # job as `plan.boxes` has them.
        plan, me = self._plan, self._peers.me
        packed = [(to, part) for to, number in sorted(self._packed) for part in self._packed.pop((to, number))]
        self._counts = [0] * self._peers.size
        for to, part in packed:
            self._counts[to] += part.size
        self._going = np.concatenate([np.empty(0, np.uint8), *(part for _, part in packed)])
        self._wanted: list[list[ChunkJob]] = [[] for _ in self._counts]
        for job in plan.shared.read_by(me):
            if job.owner != NO_OWNER and job.owner not in self._near:
                self._wanted[job.owner].append(job)
        self._sizes = [sum(plan.box_bytes(job, me) for job in jobs) for jobs in self._wanted]
        self._coming = np.empty(sum(self._sizes), np.uint8)

    def exchange_boxes(self) -> Iterator[tuple[ChunkJob, ChunkBox, AnyArray]]:
        """Send the packed boxes, and yield those received, box by box, in the stored dtype. Collective over the peers.

        *Sends*: the packed boxes, by one all-to-all.
        """
        self._peers.exchange_bytes(self._going, self._counts, self._coming, self._sizes)
        done = 0
        for job in (job for jobs in self._wanted for job in jobs):
            dtype = np.dtype(self._plan.tables[job.array].dtype)
            for box in self._plan.boxes(job, self._peers.me):
                size = prod(box.extents) * dtype.itemsize
                yield job, box, self._coming[done : done + size].view(dtype).reshape(box.extents)
                done += size
