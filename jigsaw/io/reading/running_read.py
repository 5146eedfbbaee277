"""One read of one rank: it loads its chunks, takes its boxes, and ends well or fails together with the other ranks.

Four ranks read a sample. Of its shared chunks rank 0 loads A, rank 1 B, rank 2 C and rank 3 D; all ranks need all of
them, and each chunk is one section: places 0 to 3. On one machine, with two slots:

1. all wait until everybody has left the read before, lay out the slots and say that they have started;
2. the threads of rank 0 decode A into slot 0, those of rank 1 B into slot 1.  Those of rank 2 wait until all four have
   taken A, then decode C into slot 0; those of rank 3 until all have taken B.  A thread that has no more sections loads
   what its rank alone reads into scratch memory, and places it;
3. meanwhile the calling thread of each rank looks at the first two sections that it has not taken, A and B.  When one
   is shown it copies its boxes into the sample, says that it has taken it, and looks at the next: B and C, say;
4. all say that they have finished, wait for each other, compare digests, and leave.

With ranks 2 and 3 on another machine, A and B pass through the first one's memory, C and D through the other's. Rank 0
also packs its boxes of A for ranks 2 and 3. After step 3 all four gather whether they failed, send the packed boxes by
one all-to-all, and gather once more.

A rank that fails in step n reports it, and the others see it in whatever they wait for. No rank is left behind in a
collective: each is entered only after a gathering in which all take part, failed or not.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod

import numpy as np

from jigsaw.errors import CorruptChunkError, PeerError, ReadError
from jigsaw.io.chunks.chunk import ChunkLoadCounts
from jigsaw.io.chunks.files import ByteArray, ScratchMemory
from jigsaw.io.reading.arena import MAX_ARENA_SLOTS, Arena, MemoryPool, error_from_rank, slot_ticket
from jigsaw.io.reading.chunk_readers import NO_OWNER, ChunkJob, ReadCounts
from jigsaw.io.reading.chunk_sections import (
    ChunkSection,
    ChunkStrip,
    sections_in_slot_order,
    slot_size_and_count,
    strips_of_rank,
)
from jigsaw.io.reading.fetch_ahead import FetchAhead
from jigsaw.io.reading.needed_chunks import ChunkBox
from jigsaw.io.reading.peers import PeerGroup
from jigsaw.io.reading.placing import (
    CONVERTED_BYTES,
    AnyArray,
    BoxParcels,
    PartPlacing,
    RefusedValueError,
    box_when_packed,
)
from jigsaw.io.reading.read_plan import ReadPlan
from jigsaw.io.series.boundary import fill_beyond_ends


class _ReadStoppedError(Exception):
    """The read has failed elsewhere; a loading thread gives up."""


@dataclass(frozen=True, eq=False)
class ReadingRank:
    """State that a rank keeps for all its reads: its peers, its threads and its memory.

    `lanes` are the threads of every rank, `budget` the bytes in flight. `arena` is None for a rank that shares no
    memory, `ahead` for one whose store is near. `scratch` and `converted` are for the bytes and the values of chunks
    that only this rank reads.
    """

    peers: PeerGroup
    arena: Arena | None
    ahead: FetchAhead | None
    memory: MemoryPool
    pool: ThreadPoolExecutor
    lanes: Sequence[int]
    budget: int
    scratch: ScratchMemory = field(default_factory=ScratchMemory)
    converted: ScratchMemory = field(default_factory=ScratchMemory)

    @property
    def threads(self) -> int:
        return self.lanes[self.peers.me]


class RunningRead:
    """One plan under way on one rank, in the read of that `number`."""

    def __init__(self, rank: ReadingRank, plan: ReadPlan, number: int) -> None:
        self.rank, self.plan, self.number = rank, plan, number
        self.arena, self.peers, self.me = rank.arena, rank.peers, rank.peers.me
        self._stop = threading.Event()
        self._taking = threading.Lock()
        self._failure: BaseException | None = None
        self._rows: defaultdict[int, ReadCounts] = defaultdict(ReadCounts)
        self._metadata_seen: set[str] = set()
        self.parcels = BoxParcels(plan, rank.peers)

    @property
    def counts(self) -> ReadCounts:
        return sum(self._rows.values(), ReadCounts())

    def run(self, out: AnyArray | None) -> AnyArray:
        """Read; every rank leaves with its part or with an error."""
        try:
            failure = self._tried(lambda: self._begin(out), self._load_and_take)
            # Entered whether or not this rank has failed: ranks of other machines see no word of its arena, and wait
            # in the gathering.  Those of this machine are waited for after it, as they may be in that gathering too.
            if self.peers.is_spread:
                failure = self._over_machines(failure)
            if failure is None and self.arena is not None:
                arena = self.arena
                failure = self._tried(lambda: arena.finish(self.number))
        finally:
            # last of all, and after a failure as well: the others lay out the next read's slots once this rank's word
            # says that it touches none any more.  A rank that dies before it is found by their `_look_around`
            if self.arena is not None:
                self.arena.leave(self.number)
        if failure is not None:
            raise failure
        return self.out

    def _tried(self, *steps: Callable[[], None]) -> BaseException | None:
        """Run steps and return the error of one that fails; this machine's ranks are told at once."""
        try:
            for step in steps:
                step()
        except BaseException as e:
            if self.arena is not None:
                self.arena.fail(self.number, e)
            return e
        return None

    def _begin(self, out: AnyArray | None) -> None:
        if self.arena is not None:
            self.arena.await_turn(self.number)
        plan, request = self.plan, self.plan.request
        if plan.ranks != self.peers.size:
            raise PeerError(f"the plan is for {plan.ranks} ranks and {self.peers.size} share this reader")
        near = self.peers.neighbors
        self.local = {m: i for i, m in enumerate(near)}
        # slots belong to one machine, so places are numbered among the jobs that its ranks load
        shared = plan.shared.loaded_by(near)
        self.sections = sections_in_slot_order(plan, shared, self.rank.lanes, cut=not self.peers.is_spread)
        # the threads of all ranks here, as all are to find the same slots; half of what the header has words for, since
        # there may be two a thread
        threads = min(sum(self.rank.lanes[m] for m in near), MAX_ARENA_SLOTS // 2)
        size, self.slots = slot_size_and_count(plan, self.sections, threads, self.rank.budget)
        if self.arena is not None:
            self.arena.start(self.number, plan.digest, size, self.slots if self.sections else 0)
        if self.rank.ahead is not None:
            self.rank.ahead.beside = size * self.slots + self.rank.threads * plan.chunk_bytes
        coord = request.layout.coord(self.me)
        shape, dtype = request.layout.local_shape(coord), np.dtype(request.dtype)
        self.out = self.rank.memory.empty(shape, dtype) if out is None else out
        if self.out.shape != shape or self.out.dtype != dtype:
            raise ValueError(f"out is {self.out.dtype}{list(self.out.shape)}, this rank reads {dtype}{list(shape)}")
        held = request.layout.held(coord)
        if request.boundary:
            fill_beyond_ends(self.out, held[2:], request.layout.shape[2:], request.boundary)
        self.placings = [PartPlacing(part, plan.tables[part.array], request, held[1]) for part in request.parts]

    def _load_and_take(self) -> None:
        ahead = self.rank.ahead
        if ahead is not None:
            ahead.add(self.plan)
        todo = self._todo()
        try:
            workers = [self.rank.pool.submit(self._work, todo) for _ in range(self.rank.threads)]
        except RuntimeError as e:  # Python starts no threads while it ends
            raise ReadError("this process ends, and the read that it was to take part in with it") from e
        try:
            for job in self.plan.shared.read_by(self.me):
                if job.owner == NO_OWNER:
                    missing = ChunkSection(job, self.plan.tables[job.array])
                    self._note_missing(missing, counts=job.readers[0] == self.me)
                    self.take(missing, None)
            self._take_published()
            while wait(workers, 0.01).not_done:
                self._went_wrong()
            self._went_wrong()
        finally:
            # In this order: threads that wait for a slot see the flag, and those that wait for fetched bytes are woken
            # by the drop. Only when all have ended may the caller have `out`, and another read the slots.
            self._stop.set()
            if ahead is not None:
                ahead.drop(self.plan)
            wait(workers)

    def _went_wrong(self) -> bool:
        """Return False, or raise the error of a loading thread or another rank."""
        if self._failure is not None:
            raise self._failure
        if self.arena is not None:
            self.arena.check(self.number)
        return False

    def _todo(self) -> Iterator[Callable[[], None]]:
        """Yield the loads of this rank, those that other ranks wait for first."""
        # As many lanes as threads, so all are under way at once. They have to be: an idle lane would keep a place lower
        # than those that the others wait for.
        for lane in range(self.rank.threads):
            yield lambda lane=lane: self._load_shared(lane)
        for strip in strips_of_rank(self.plan, self.me):
            yield lambda strip=strip: self._load_strip(strip)

    def _work(self, todo: Iterator[Callable[[], None]]) -> None:
        try:
            while not self._stop.is_set():
                with self._taking:  # a generator that runs in one thread raises when another one enters it
                    step = next(todo, None)
                if step is None:
                    return
                step()
        except _ReadStoppedError:
            return
        except BaseException as e:
            # The first of all threads' counts, more or less: two at once may both store theirs.  It is the calling
            # thread that tells the other ranks, once `_went_wrong` has shown it there.
            self._failure = self._failure or e
            self._stop.set()

    def _load_shared(self, lane: int) -> None:
        """Load the sections of a lane, each into its slot once the one before has been taken from it, and show them."""
        # a chunk in sections is decoded by one thread from its beginning, so its lane has them one after the other
        flow: Callable[[ByteArray], None] | None = None
        for at, section in enumerate(self.sections):
            if (section.job.owner, section.lane) == (self.me, lane):
                room = self._slot(at, section)
                if section.rows is not None:
                    flow = self._flow(section) if flow is None or section.rows[0] == 0 else flow
                    flow(room)
                elif self._load(section, room).stored is None:
                    section.table.loader.fill(room, section.job.chunk)
                self._show(at, section, room)

    def _slot(self, at: int, section: ChunkSection) -> ByteArray:
        if self.arena is None:
            return np.empty(section.size, np.uint8)
        self._await_slot(at)
        return self.arena.memory(at % self.slots, section.size)

    def _flow(self, section: ChunkSection) -> Callable[[ByteArray], None]:
        """Begin to load a chunk section by section, and count it as the one request that it is."""
        job, table = section.job, section.table
        ref, flow = self.plan.ref(job.array, job.chunk), table.decoding.stream(job.chunk)
        self._count(section, ChunkLoadCounts((ref and ref.length) or 0, False, 1, table.grid.bytes_of(job.chunk)))
        return flow

    def _show(self, at: int, section: ChunkSection, room: ByteArray) -> None:
        job, values = section.job, section.view(room)
        # pack before the section is shown: once its readers have taken it, the slot may be used again
        self.parcels.pack(job, section.number, values)
        if section.is_last:
            self._row().sent_bytes += sum(self.plan.box_bytes(job, m) for m in job.readers if m != self.me)
        if self.arena is not None:
            self.arena.publish(at % self.slots, slot_ticket(self.number, at))
        elif job.is_read_by(self.me):
            self.take(section, values)

    def _await_slot(self, at: int) -> None:
        """Wait until everybody here has taken the section that lay in the slot before: that of the place at - slots."""
        if at < self.slots:
            return  # all ranks have left the read before, so every slot is free
        arena, job = self.arena, self.sections[at - self.slots].job
        assert arena is not None
        slot, last = at % self.slots, slot_ticket(self.number, at - self.slots)
        readers = [self.local[m] for m in job.readers if m in self.local]

        # Section A, which ranks 0 to 3 read, lies in slot 1 of 4 at place 1; this is place 5. The rank that decoded A
        # has stored its ticket in the slot's word, and each of 0 to 3 stores it in its own word of the slot once it has
        # copied. All five are checked: if A had readers on other machines alone, only the first would be stored. A rank
        # that dies before it stores its word keeps the slot taken, until `wait` finds it dead.
        def free() -> bool:
            if self._stop.is_set():
                raise _ReadStoppedError
            return arena.is_published(slot, last) and arena.is_free(slot, last, readers)

        arena.wait(free, self.number)

    def _load_strip(self, strip: ChunkStrip) -> None:
        """Load chunks that this rank alone reads, and that lie side by side, and place them as one."""
        if strip.box is None:
            self._load_private(strip.first)
            return
        table = strip.first.table
        room = self.rank.scratch(len(strip.chunks) * table.grid.chunk_bytes)
        chunks, placing = table.loader.view_strip(room), self.placings[strip.box.part]
        work = placing.strip_work_memory(chunks, self.rank.converted)
        near = max(1, CONVERTED_BYTES // table.grid.chunk_bytes)
        for start in range(0, len(strip.chunks), near):
            some = slice(start, start + near)
            self._decode(strip, some, room[start * table.grid.chunk_bytes :])
            try:
                placing.convert_strip(chunks[some], strip.box, work[some])
            except RefusedValueError as e:
                job = strip.section(start + e.chunk).job
                raise self._refusal(e, job, self.plan.boxes(job, self.me)[0]) from None
        placing.place_strip(work, strip.box, self.out)  # no other thread writes there: a row lies in one strip
        self._row().useful_bytes += prod(strip.box.extents) * table.grid.itemsize

    def _decode(self, strip: ChunkStrip, some: slice, room: ByteArray) -> None:
        table, chunks = strip.first.table, strip.chunks[some]
        sizes = table.decoding.load_strip(chunks[0], len(chunks), room)
        for n, size in enumerate(sizes):
            if size is None:
                self._check_missing(strip.section(some.start + n))
                table.loader.fill(room[n * table.grid.chunk_bytes : (n + 1) * table.grid.chunk_bytes], chunks[n])
        row, present = self._row(), [size for size in sizes if size is not None]
        row.requests += len(present)
        row.chunks += len(present)
        row.stored_bytes += sum(present)
        row.decoded_bytes += len(present) * table.grid.chunk_bytes

    def _load_private(self, section: ChunkSection) -> None:
        direct = self._in_place_target(section)
        scratch = self.rank.scratch(section.table.grid.bytes_of(section.job.chunk)) if direct is None else direct
        room = scratch.reshape(-1).view(np.uint8)
        loaded = self._load(section, room)
        self.take(section, None if loaded.stored is None else section.view(room))

    def _in_place_target(self, section: ChunkSection) -> AnyArray | None:
        """Return where in the sample a whole chunk lies as it is decoded; None when it has to be cut or turned."""
        boxes = self.plan.boxes(section.job, self.me)
        if len(boxes) != 1 or self.plan.part_of(section.job) is not None:
            return None
        return self.placings[boxes[0].part].in_place_target(boxes[0], section.shape, self.out)

    def _row(self) -> ReadCounts:
        """Return this thread's own counts: `+=` on one shared object would lose some."""
        return self._rows[threading.get_ident()]

    def _load(self, section: ChunkSection, room: ByteArray) -> ChunkLoadCounts:
        job, table, ahead = section.job, section.table, self.rank.ahead
        room = room[: table.grid.bytes_of(job.chunk)]  # a slot is as large as the largest chunk
        if ahead is None or not table.far:
            loaded = table.loader.load(job.chunk, room, self.plan.part_of(job))
        elif (fetched := ahead.take(self.plan, job)) is None:
            loaded = ChunkLoadCounts(None, False)
        else:
            loaded = table.decoding.decode(job.chunk, fetched, room)
        self._count(section, loaded)
        return loaded

    def _count(self, section: ChunkSection, loaded: ChunkLoadCounts) -> None:
        if loaded.stored is None:
            self._check_missing(section)
        else:
            row = self._row()
            row.requests += loaded.requests
            row.chunks += 1
            row.fallback += loaded.fallback
            row.stored_bytes += loaded.stored
            row.decoded_bytes += loaded.decoded

    def _check_missing(self, section: ChunkSection) -> None:
        """Count the request by which a far store shows that a chunk is missing; a near store is asked beforehand."""
        job = section.job
        ref = self.plan.ref(job.array, job.chunk)
        if ref is not None and ref.length is not None:
            raise CorruptChunkError(
                f"chunk {job.chunk} of array {job.array!r} in {ref.path} vanished while it was read"
            )
        self._row().requests += int(ref is not None)
        self._note_missing(section)

    def _note_missing(self, section: ChunkSection, counts: bool = True) -> None:
        """Count a missing chunk, once among the ranks that fill in its place.

        Raises: `MissingArrayError` where its array is gone, `MissingChunkError` where the request reads no fill value.
        """
        self._row().missing += counts
        job, finder = section.job, section.table.finder
        if not finder.lacks_object(job.chunk):
            return
        if job.array not in self._metadata_seen:  # look at most once an array and read
            finder.check_metadata()
            self._metadata_seen.add(job.array)
        if self.plan.request.missing == "error":
            # the number of missing chunks is given only where it takes no further request
            needed = self.plan.needed.readers[job.array]
            lacking = 0 if finder.places.files.far else sum(finder.locate(chunk) is None for chunk in needed)
            more = f" (it is one of {lacking} of the {len(needed)} chunks of that array in this read)"
            raise finder.missing_error(job.chunk, more * (lacking > 1))

    def _take_published(self) -> None:
        """Take this rank's boxes out of the slots, in the order in which sections are shown."""
        if self.arena is None:
            return
        arena, slots = self.arena, self.slots
        pending = [
            (at % slots, slot_ticket(self.number, at), section)
            for at, section in enumerate(self.sections)
            if section.job.is_read_by(self.me)
        ]
        while pending:
            # This ends. Of the places that some reader has not taken yet, the lowest, p, does not wait for others.
            # Place p - slots was taken, so p's slot is free; its loader has done its lane's sections before p, which
            # are of lower places; and each reader that still has to take p has it first in this window. A section
            # beyond the window may be shown already, in a slot that the window leaves out: it is taken a little later.
            window = pending[:slots]
            shown = [entry for entry in window if arena.is_published(entry[0], entry[1])]
            if not shown:
                is_any_shown = arena.any_published([(slot, mark) for slot, mark, _ in window])
                arena.wait(lambda is_any_shown=is_any_shown: self._went_wrong() or is_any_shown(), self.number)
                continue
            arena.check_digests(self.number)  # with another plan, the same ticket would stand for other bytes
            for slot, mark, section in shown:
                self.take(section, section.view(arena.memory(slot, section.size)))
                arena.release(slot, mark)  # from here on the slot may be used again
            pending = [entry for entry in window if entry not in shown] + pending[slots:]

    def take(self, section: ChunkSection, values: AnyArray | None) -> None:
        """Take this rank's boxes of a section, or of a missing chunk when `values` is None."""
        for box, within in section.cut(self.plan.boxes(section.job, self.me)):
            self._take_box(section, box, values, within)

    def _take_box(self, section: ChunkSection, box: ChunkBox, values: AnyArray | None, within: ChunkBox) -> None:
        """Place `box` of a chunk, found as `within` in `values`."""
        try:
            self.placings[box.part].place(values, within, self.out)
        except RefusedValueError as e:
            raise self._refusal(e, section.job, box) from None
        self._row().useful_bytes += prod(box.extents) * section.table.grid.itemsize

    def _refusal(self, refused: RefusedValueError, job: ChunkJob, box: ChunkBox) -> ReadError:
        where = f"{self.plan.where(job, box)} (chunk {job.chunk})"
        return refused.at(job.array, where, self.plan.request.dtype)

    def _over_machines(self, failure: BaseException | None) -> BaseException | None:
        any_go = self.parcels.are_any  # from the plan, so that all enter the all-to-all or none
        if failure is None and any_go:
            failure = self._tried(self.parcels.make_room)
        failure = self._agree(failure)
        if failure is not None or not any_go:
            return failure
        # a box that a placing refuses fails on this rank alone, after the all-to-all: so all gather once more
        return self._agree(self._tried(self._exchange_boxes))

    def _agree(self, failure: BaseException | None) -> BaseException | None:
        """Return this rank's failure, else another's: every rank learns whether all went well.

        *Sends*: what failed and the plan's digest to every rank of the domain group, whether or not something failed.
        """
        # type and text, never the error itself: one that does not pickle would fail here, and leave the others waiting
        report = None if failure is None else (type(failure).__name__, str(failure))
        reports = self.peers.gather((report, self.plan.digest))
        if failure is not None:
            return failure
        for m, (theirs, digest) in enumerate(reports):
            if theirs is not None:
                return error_from_rank(theirs[0], theirs[1], m)
            if digest != self.plan.digest:
                return PeerError(f"rank {m} of the domain group reads another sample than rank {self.me}")
        return None

    def _exchange_boxes(self) -> None:
        for job, box, values in self.parcels.exchange_boxes():
            self._take_box(ChunkSection(job, self.plan.tables[job.array]), box, values, box_when_packed(box))
