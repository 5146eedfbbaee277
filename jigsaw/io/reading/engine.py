"""Carries a read plan out, together with the ranks that share the sample.

A pool of threads loads this rank's chunks: a chunk that others need too piece by piece into the arena, where every rank
of the machine takes its boxes straight from, and one that only this rank needs into scratch memory.  Ranks on other
machines get their boxes by one all-to-all.  A read ends well on all ranks, or raises on all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import CorruptChunkError, PeerError, ReadError
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.chunks.chunk import ChunkLoadCounts
from jigsaw.io.chunks.lookups import LookupCounts, total_lookups
from jigsaw.io.chunks.memory import ScratchMemory
from jigsaw.io.reading.arena import MAX_ARENA_SLOTS, attach_arena, error_from_rank, slot_ticket
from jigsaw.io.reading.chunk_sections import (
    ChunkSection,
    fair_thread_count,
    sections_in_slot_order,
    slot_size_and_count,
    whole_chunk_section,
)
from jigsaw.io.reading.fetch_ahead import FetchAhead
from jigsaw.io.reading.forks import HomeProcess
from jigsaw.io.reading.memory_pool import MemoryPool
from jigsaw.io.reading.parcels import BoxParcels
from jigsaw.io.reading.peers import PeerGroup, meet_peers
from jigsaw.io.reading.placing import PartPlacing, RefusedValueError, box_when_packed
from jigsaw.io.reading.read_plan import NO_OWNER, ChunkBox, ChunkJob, ReadCounts, ReadPlan
from jigsaw.io.reading.strips import STRIP_CONVERT_BYTES, ChunkStrip, strips_of_rank
from jigsaw.io.series.boundary import fill_beyond_ends

AnyArray = NDArray[Any]
ByteArray = NDArray[np.uint8]


class ReadEngine:
    """Reads samples of a store for one rank of a domain group.

    Making one is collective over `mesh` (ranks along the axes `apart` read other samples).  `threads` load chunks at
    the same time; by default the cores of this machine are shared among its ranks.  `budget`, the same on every rank,
    bounds the bytes in flight, down to one chunk: the shared memory of a machine, and with it a chunk for each thread
    and what this rank has fetched and not decoded yet.  Ranks wait `timeout` seconds for each other, by default as long
    as in the mesh.  `stats` adds up what it did, and equals its row of the plans.
    """

    def __init__(
        self,
        store: ArrayStore,
        mesh: DeviceMesh | PeerGroup | None = None,
        threads: int | None = None,
        *,
        apart: tuple[str, ...] = ("data",),
        budget: int = 1 << 29,
        timeout: float | None = None,
    ) -> None:
        self.store, self.home = store, HomeProcess("this reader")
        self.peers = mesh if isinstance(mesh, PeerGroup) else meet_peers(mesh, apart, timeout=timeout)
        self.arena = attach_arena(self.peers, timeout or self.peers.timeout)
        self.memory = MemoryPool(pinned=isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda")
        self.budget, self.stats, self.reads = budget, ReadCounts(), 0
        self.threads = threads or fair_thread_count(len(self.peers.neighbours))
        self.lanes = self.peers.gather(self.threads)
        self._busy, self._counting, self._is_closed = threading.Lock(), threading.Lock(), False
        self.scratch, self.converted = ScratchMemory(), ScratchMemory()
        self.ahead = FetchAhead(self.peers.me, budget) if any(t.far for t in store.arrays.values()) else None
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="jigsaw-read")

    def read(self, plan: ReadPlan, out: AnyArray | None = None) -> AnyArray:
        """This rank's held box of the sample [T, C, \\*space], in `out` when given.

        Every rank of the domain group reads the same plans in the same order.

        *Sends*: nothing on one machine; else one all-to-all of the boxes that other machines need, in the stored dtype.

        Raises: a `ReadError` on every rank when it fails on any; of an engine that was closed; `ForkedError`.
        """
        self.home.check_home()
        with self._busy:
            if self._is_closed:
                raise ReadError("this reader was closed; make a new dataset or loader to read on")
            self.reads += 1
            try:
                return _RunningRead(self, plan, self.reads).run(out)
            except BaseException as e:
                vars(e)["heard"] = True
                raise

    def plan(self, make: Callable[[], ReadPlan], key: Hashable = None) -> ReadPlan:
        """The plan of the next read: the one that `ahead` expected under `key`, or else made now.

        Raises: `ForkedError`; what planning raises, which a far store may do for one rank alone: the others, who are
        told, learn of it in their `read`.
        """
        self.home.check_home()
        try:
            return (self.ahead and self.ahead.planned(key)) or make()
        except BaseException as e:
            self.refuse(e)
            raise

    def refuse(self, error: BaseException) -> None:
        """Take part in the next read as one that has failed, so that others do not wait for this rank; nothing happens
        when they know of the error already, from the read that failed with it.
        """
        if self._is_closed or getattr(error, "heard", False):
            return
        with self._busy, suppress(PeerError):
            self.reads += 1
            try:
                if self.arena is not None:
                    self.arena.await_turn(self.reads)
                    self.arena.fail(self.reads, error)
                if self.peers.is_spread:
                    self.peers.gather(((type(error).__name__, str(error)), 0))
            finally:
                vars(error)["heard"] = True
                if self.arena is not None:
                    self.arena.leave(self.reads)

    @property
    def looked_up(self) -> LookupCounts:
        """The reads of shard indices and of Blosc's tables that planning took, since the store was opened."""
        return total_lookups(table.looked_up for table in self.store.arrays.values())

    def close(self) -> None:
        """End the threads and let go of the shared memory; nothing can be read afterwards."""
        self._is_closed = True
        if not self.home.is_here:
            return  # its threads are those of another process
        self.pool.shutdown()
        if self.ahead is not None:
            self.ahead.close()
        if self.arena is not None:
            self.arena.close()
        self.peers.close()

    def count(self, more: ReadCounts) -> None:
        """Add to the counters."""
        with self._counting:
            self.stats = self.stats + more


class _ReadStoppedError(Exception):
    """The read has failed elsewhere; a loading thread gives up."""


class _RunningRead:
    """One plan under way on one rank."""

    def __init__(self, engine: ReadEngine, plan: ReadPlan, number: int) -> None:
        self.engine, self.plan, self.number = engine, plan, number
        self.arena, self.peers, self.me = engine.arena, engine.peers, engine.peers.me
        self._stop = threading.Event()
        self._taking = threading.Lock()
        self._failure: BaseException | None = None
        self._rows: dict[int, ReadCounts] = {}
        self.parcels = BoxParcels(plan, engine.peers)

    # -- the whole ---------------------------------------------------------------------------------------------------

    def run(self, out: AnyArray | None) -> AnyArray:
        """Read; every rank leaves with its part or with an error."""
        try:
            failure = self._tried(lambda: self._here(out))
            if self.peers.is_spread:
                failure = self._over_machines(failure)
            if failure is None and self.arena is not None:
                arena = self.arena
                failure = self._tried(lambda: arena.finish(self.number))
        finally:
            self.engine.count(sum(self._rows.values(), ReadCounts()))
            if self.arena is not None:
                self.arena.leave(self.number)
        if failure is not None:
            raise failure
        return self.out

    def _tried(self, step: Callable[[], None]) -> BaseException | None:
        """What a step failed with; the ranks of this machine know it at once."""
        try:
            step()
        except BaseException as e:
            if self.arena is not None:
                self.arena.fail(self.number, e)
            return e
        return None

    def _here(self, out: AnyArray | None) -> None:
        if self.arena is not None:
            self.arena.await_turn(self.number)
        self._begin(out)
        self._load_and_take()

    def _begin(self, out: AnyArray | None) -> None:
        plan, request = self.plan, self.plan.request
        if plan.ranks != self.peers.size:
            raise PeerError(f"the plan is for {plan.ranks} ranks and {self.peers.size} share this reader")
        near = self.peers.neighbours
        self.local = {m: i for i, m in enumerate(near)}
        shared = [(n, job) for n, job in enumerate(plan.shared) if job.owner in near]
        self.through = sections_in_slot_order(plan, shared, self.engine.lanes, cut=not self.peers.is_spread)
        threads = sum(self.engine.lanes[m] for m in near)
        size, self.slots = slot_size_and_count(
            plan, self.through, min(threads, MAX_ARENA_SLOTS // 2), self.engine.budget
        )
        if self.arena is not None:
            self.arena.start(self.number, plan.digest, size, self.slots if self.through else 0)
        if self.engine.ahead is not None:
            self.engine.ahead.beside = size * self.slots + self.engine.threads * plan.chunk_bytes
        coord = list(request.layout.coords())[self.me]
        shape, dtype = request.layout.local_shape(coord), np.dtype(request.dtype)
        self.out = self.engine.memory.empty(shape, dtype) if out is None else out
        if self.out.shape != shape or self.out.dtype != dtype:
            raise ValueError(f"out is {self.out.dtype}{list(self.out.shape)}, this rank reads {dtype}{list(shape)}")
        held = request.layout.held(coord)
        if request.boundary:
            fill_beyond_ends(self.out, held[2:], request.layout.shape[2:], request.boundary)
        channels = held[1]
        self.placings = [PartPlacing.of(part, plan.tables[part.array], request, channels) for part in request.parts]

    def _load_and_take(self) -> None:
        ahead = self.engine.ahead
        if ahead is not None:
            ahead.add(self.plan)
        todo = self._todo()
        try:
            workers = [self.engine.pool.submit(self._work, todo) for _ in range(self.engine.threads)]
        except RuntimeError as e:  # Python starts no threads while it ends
            raise ReadError("this process ends, and the read that it was to take part in with it") from e
        try:
            for job in self.plan.shared:
                if job.owner == NO_OWNER and self.me in job.readers:
                    self.take(whole_chunk_section(job), None)
            self._take_published()
            while wait(workers, 0.01).not_done:
                self._went_wrong()
            self._went_wrong()
        finally:
            self._stop.set()
            if ahead is not None:
                ahead.drop(self.plan)
            wait(workers)

    def _went_wrong(self) -> bool:
        """False; or raises what a loading thread, or another rank, failed with."""
        if self._failure is not None:
            raise self._failure
        if self.arena is not None:
            self.arena.check(self.number)
        return False

    # -- loading: in the pool's threads ------------------------------------------------------------------------------

    def _todo(self) -> Iterator[Callable[[], None]]:
        """What this rank loads; what others wait for comes first."""
        for lane in range(self.engine.threads):
            yield lambda lane=lane: self._load_shared(lane)
        for strip in strips_of_rank(self.plan, self.me):
            yield lambda strip=strip: self._load_strip(strip)

    def _work(self, todo: Iterator[Callable[[], None]]) -> None:
        try:
            while not self._stop.is_set():
                with self._taking:
                    step = next(todo, None)
                if step is None:
                    return
                step()
        except _ReadStoppedError:
            return
        except BaseException as e:
            self._failure = self._failure or e
            self._stop.set()

    def _load_shared(self, lane: int) -> None:
        """Load the pieces of a lane, each into its slot once the one before has been taken from it, and show them."""
        flow: Callable[[ByteArray], None] | None = None
        for at, piece in enumerate(self.through):
            if (piece.job.owner, piece.lane) == (self.me, lane):
                room = self._slot(at, piece)
                if piece.rows is not None:
                    flow = self._flow(piece.job) if flow is None or piece.rows[0] == 0 else flow
                    flow(room)
                elif self._load(piece.job, room).stored is None:
                    self.plan.tables[piece.job.array].fill(room, piece.job.chunk)
                self._show(at, piece, room)

    def _slot(self, at: int, piece: ChunkSection) -> ByteArray:
        """The memory of a slot, once it is free."""
        size = piece.size(self.plan.tables[piece.job.array])
        if self.arena is None:
            return np.empty(size, np.uint8)
        self._await_slot(at)
        return self.arena.memory(at % self.slots, size)

    def _flow(self, job: ChunkJob) -> Callable[[ByteArray], None]:
        """Begin to load a chunk piece by piece, and count it as the one request that it is."""
        ref, table = self.plan.ref(job.array, job.chunk), self.plan.tables[job.array]
        flow = table.flow(job.chunk)
        self._count(job, ChunkLoadCounts((ref and ref.length) or 0, False, 1, table.bytes_of(job.chunk)))
        return flow

    def _show(self, at: int, piece: ChunkSection, room: ByteArray) -> None:
        """Let all that read a piece have it."""
        job, table = piece.job, self.plan.tables[piece.job.array]
        values = table.view(room, job.chunk, piece.shape(table))
        self.parcels.pack(job, piece.number, values)
        if piece.is_last:
            self._row().sent_bytes += sum(self.plan.box_bytes(job, m) for m in job.readers if m != self.me)
        if self.arena is not None:
            self.arena.publish(at % self.slots, slot_ticket(self.number, at))
        elif self.me in job.readers:
            self.take(piece, values)

    def _await_slot(self, at: int) -> None:
        """Wait until everybody here has taken the piece that lay in the slot before."""
        if at < self.slots:
            return
        arena, job = self.arena, self.through[at - self.slots].job
        assert arena is not None
        last, readers = (
            slot_ticket(self.number, at - self.slots),
            [self.local[m] for m in job.readers if m in self.local],
        )
        slot = at % self.slots

        def free() -> bool:
            if self._stop.is_set():
                raise _ReadStoppedError
            return arena.is_published(slot, last) and arena.is_free(slot, last, readers)

        arena.wait(free, self.number)

    def _load_strip(self, strip: ChunkStrip) -> None:
        """Load chunks that this rank alone reads, and that lie side by side, and place them as one."""
        if strip.box is None:
            self._load_private(strip.job())
            return
        table = self.plan.tables[strip.array]
        room = self.engine.scratch(len(strip.chunks) * table.chunk_bytes)
        chunks, placing = table.strip(room), self.placings[strip.box.part]
        work = placing.room(chunks, self.engine.converted)
        near = max(1, STRIP_CONVERT_BYTES // table.chunk_bytes)
        for start in range(0, len(strip.chunks), near):
            some = slice(start, start + near)
            self._decode(strip, some, room[start * table.chunk_bytes :])
            try:
                placing.settle(chunks[some], strip.box, work[some])
            except RefusedValueError as e:
                job = strip.job(start + e.chunk)
                raise self._refusal(e, job, self.plan.boxes(job, self.me)[0]) from None
        placing.lay(work, strip.box, self.out)
        self._row().useful_bytes += prod(strip.box.extents) * table.itemsize

    def _decode(self, strip: ChunkStrip, some: slice, room: ByteArray) -> None:
        """Load chunks of a strip, one after the other, into memory."""
        table, chunks = self.plan.tables[strip.array], strip.chunks[some]
        sizes = table.load_row(chunks[0], len(chunks), room)
        for n, size in enumerate(sizes):
            if size is None:
                self._check_missing(strip.job(some.start + n))
                table.fill(room[n * table.chunk_bytes : (n + 1) * table.chunk_bytes], chunks[n])
        row, there = self._row(), [size for size in sizes if size is not None]
        row.requests += len(there)
        row.chunks += len(there)
        row.stored_bytes += sum(there)
        row.decoded_bytes += len(there) * table.chunk_bytes

    def _load_private(self, job: ChunkJob) -> None:
        """Load a chunk that this rank alone reads, and take what it needs of it."""
        table = self.plan.tables[job.array]
        direct = self._destination(job)
        room = self.engine.scratch(table.bytes_of(job.chunk)) if direct is None else direct.reshape(-1).view(np.uint8)
        loaded = self._load(job, room)
        self.take(whole_chunk_section(job), None if loaded.stored is None else table.view(room, job.chunk))

    def _destination(self, job: ChunkJob) -> AnyArray | None:
        """Where in the sample all of a chunk lies as it is decoded; None when it has to be cut or turned."""
        boxes = self.plan.boxes(job, self.me)
        if len(boxes) != 1 or self.plan.part_of(job) is not None:
            return None
        table = self.plan.tables[job.array]
        return self.placings[boxes[0].part].destination(boxes[0], table.shape_of(job.chunk), self.out)

    def _row(self) -> ReadCounts:
        """What this thread has done for this read."""
        thread = threading.get_ident()
        if thread not in self._rows:
            self._rows[thread] = ReadCounts()
        return self._rows[thread]

    def _load(self, job: ChunkJob, room: ByteArray) -> ChunkLoadCounts:
        """Load what is needed of a job's chunk, and count it."""
        table, ahead = self.plan.tables[job.array], self.engine.ahead
        room = room[: table.bytes_of(job.chunk)]
        if ahead is None or not table.far:
            loaded = table.load(job.chunk, room, self.plan.part_of(job))
        else:
            fetched = ahead.take(self.plan, job)
            loaded = ChunkLoadCounts(None, False) if fetched is None else table.decode(job.chunk, fetched, room)
        self._count(job, loaded)
        return loaded

    def _count(self, job: ChunkJob, loaded: ChunkLoadCounts) -> None:
        if loaded.stored is None:
            self._check_missing(job)
        else:
            row = self._row()
            row.requests += loaded.requests
            row.chunks += 1
            row.fallback += loaded.fallback
            row.stored_bytes += loaded.stored
            row.decoded_bytes += loaded.decoded

    def _check_missing(self, job: ChunkJob) -> None:
        """A far store does not say beforehand that a chunk is missing, so it took a request; a near one did."""
        ref = self.plan.ref(job.array, job.chunk)
        if ref is not None and ref.length is not None:
            raise CorruptChunkError(
                f"chunk {job.chunk} of array {job.array!r} in {ref.path} vanished while it was read"
            )
        self._row().requests += int(ref is not None)

    # -- taking: in the calling thread -------------------------------------------------------------------------------

    def _take_published(self) -> None:
        """Take this rank's boxes out of the slots, whichever is shown first."""
        if self.arena is None:
            return
        arena, slots = self.arena, self.slots
        pending = [
            (at % slots, slot_ticket(self.number, at), piece)
            for at, piece in enumerate(self.through)
            if self.me in piece.job.readers
        ]
        while pending:
            # a slot's next piece is shown only after this one was taken, so looking at one a slot suffices
            window = pending[:slots]
            shown = [each for each in window if arena.is_published(each[0], each[1])]
            if not shown:
                asked = arena.any_published([(slot, mark) for slot, mark, _ in window])
                arena.wait(lambda asked=asked: self._went_wrong() or asked(), self.number)
                continue
            arena.check_digests(self.number)
            for slot, mark, piece in shown:
                table = self.plan.tables[piece.job.array]
                memory = arena.memory(slot, piece.size(table))
                self.take(piece, table.view(memory, piece.job.chunk, piece.shape(table)))
                arena.release(slot, mark)
            pending = [each for each in window if each not in shown] + pending[slots:]

    def take(self, piece: ChunkSection, values: AnyArray | None) -> None:
        """This rank's boxes of a piece, or of a missing chunk when it is None."""
        for box, within in piece.cut(self.plan.boxes(piece.job, self.me)):
            self._take_box(piece.job, box, values, within)

    def _take_box(self, job: ChunkJob, box: ChunkBox, values: AnyArray | None, within: ChunkBox) -> None:
        """Place `box` of a job's chunk, found as `within` in `values`."""
        placing = self.placings[box.part]
        try:
            if values is None:
                placing.place_fill(within, self.out)
            else:
                placing.place(values, within, self.out)
        except RefusedValueError as e:
            raise self._refusal(e, job, box) from None
        self._row().useful_bytes += prod(box.extents) * self.plan.tables[job.array].itemsize

    def _refusal(self, found: RefusedValueError, job: ChunkJob, box: ChunkBox) -> ReadError:
        where = f"{self.plan.where(job, box)} (chunk {job.chunk})"
        return found.at(job.array, where, self.plan.request.dtype)

    # -- over machines -----------------------------------------------------------------------------------------------

    def _over_machines(self, failure: BaseException | None) -> BaseException | None:
        """Exchange boxes with the ranks of other machines; what any rank failed with."""
        any_go = self.parcels.are_any
        if failure is None and any_go:
            failure = self._tried(self.parcels.lay_out)
        failure = self._agree(failure)
        if failure is not None or not any_go:
            return failure
        return self._agree(self._tried(self._swap))

    def _agree(self, failure: BaseException | None) -> BaseException | None:
        """This rank's failure, else another's: every rank learns whether all went well."""
        mine = None if failure is None else (type(failure).__name__, str(failure))
        told = self.peers.gather((mine, self.plan.digest))
        if failure is not None:
            return failure
        for m, (theirs, digest) in enumerate(told):
            if theirs is not None:
                return error_from_rank(theirs[0], theirs[1], m)
            if digest != self.plan.digest:
                return PeerError(f"rank {m} of the domain group reads another sample than rank {self.me}")
        return None

    def _swap(self) -> None:
        for job, box, values in self.parcels.swap():
            self._take_box(job, box, values, box_when_packed(box))
