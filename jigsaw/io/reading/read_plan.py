"""Which rank fetches and decodes which chunk, and who gets which box of it: the same on every rank, without a word
between them, for it follows from the request and from where the store says that chunks lie.

The ranks that share a sample hold overlapping boxes of it, and a stored chunk may lie in many of them.  *Independent*:
every rank loads what it needs of each chunk.  *Cooperative*: each chunk is loaded once, by one rank, and cut into the
boxes of all that need it.  *Neighbours*: every rank loads the chunks that it owns rows of, and hands those of the halo
to the ranks that own none.  What a single rank needs it always loads for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from jigsaw.cut import ShardingError
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.concurrent_requests import ask_at_once
from jigsaw.io.chunks.joined_arrays import JoinedArrays
from jigsaw.io.chunks.lookups import LookupCounts
from jigsaw.io.chunks.portion import ChunkPortion
from jigsaw.io.reading.chunk_boxes import ChunkBox
from jigsaw.io.reading.chunk_jobs import NO_OWNER, ChunkJob, ReadCounts, ReaderRanks
from jigsaw.io.reading.fetch_batches import FetchBatch, fetch_batches
from jigsaw.io.reading.found_chunks import ArrayTables, FoundChunks, look_up_chunks
from jigsaw.io.reading.needed_chunks import NeededChunks
from jigsaw.io.reading.read_modes import (
    PLAN_MODES,
    balance_shared_jobs,
    bytes_of_job,
    choose_mode,
    cost_of_mode,
    loads_of_chunk,
)
from jigsaw.io.reading.request_check import check_request_fits
from jigsaw.io.series.request import ReadPart, ReadRequest

ObjectSizes = Mapping[str, "int | None"]


@dataclass(frozen=True, eq=False, repr=False)
class ReadPlan:
    """How the ranks of one domain group read one sample.

    Ranks are numbered in the layout's row-major order.  `modes` says for each array how its chunks are loaded.  `sizes`
    are those of far objects that hold one chunk each, None for missing ones; they change nothing but `rows`, because
    ranks that read do not ask for them.
    """

    needed: NeededChunks
    found: FoundChunks
    modes: Mapping[str, str]
    sizes: ObjectSizes = field(default_factory=dict[str, "int | None"])

    @property
    def request(self) -> ReadRequest:
        return self.needed.request

    @property
    def tables(self) -> ArrayTables:
        return self.found.tables

    @property
    def ranks(self) -> int:
        return self.needed.ranks

    # -- how each array is read --------------------------------------------------------------------------------------

    def cost(self, name: str, mode: str) -> float:
        """What reading an array would cost in a mode, in CPU seconds over all ranks."""
        return cost_of_mode(self.found, name, mode)

    # -- chunks ------------------------------------------------------------------------------------------------------

    def ref(self, array: str, chunk: ChunkIndex) -> ChunkRef | None:
        return self.found.ref(array, chunk)

    def _taking(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> ReadCounts:
        """What loading a chunk takes, with its stored size where `sizes` have that."""
        row, ref = self.found.load_counts(array, chunk, readers), self.ref(array, chunk)
        if not row.unsized or ref is None or ref.path not in self.sizes:
            return row
        size = self.sizes[ref.path]
        return ReadCounts(1) if size is None else replace(row, stored_bytes=size, unsized=0)

    # -- jobs --------------------------------------------------------------------------------------------------------

    @cached_property
    def shared(self) -> tuple[ChunkJob, ...]:
        """The jobs whose chunk several ranks read, in the order in which all ranks take them."""
        todo = [
            ChunkJob(name, chunk, owner, served)
            for name, readers_of in self.needed.readers.items()
            if self.modes[name] != "independent"
            for chunk, readers in readers_of.items()
            for owner, served in loads_of_chunk(self.needed, name, chunk, readers, self.modes[name])
            if len(served) > 1
        ]
        if not todo:  # near stores need not be asked for the sizes of private chunks then
            return ()
        # Every rank works out the load of all, not its own alone: who owns what must come out alike everywhere, and
        # the order of this tuple, with which slots and parcels are numbered, as well.
        load = [sum(bytes_of_job(self.found, job) for job in self.private(m)) for m in range(self.ranks)]
        return tuple(balance_shared_jobs(self.found, todo, load, self.modes))

    def private(self, member: int) -> Iterator[ChunkJob]:
        for name in self.needed.readers:
            for chunk in self.private_chunks(name, member):
                yield ChunkJob(name, chunk, member, (member,))

    def private_chunks(self, name: str, member: int) -> list[ChunkIndex]:
        """The chunks of an array that a rank loads for itself alone, in C order."""
        readers_of, mode = self.needed.readers[name], self.modes[name]
        mine, alone = [c for c, readers in readers_of.items() if member in readers], (member, (member,))
        if mode == "independent":
            return mine
        return [chunk for chunk in mine if alone in loads_of_chunk(self.needed, name, chunk, readers_of[chunk], mode)]

    @property
    def chunk_bytes(self) -> int:
        return max((self.tables[name].grid.chunk_bytes for name in self.modes), default=0)

    @property
    def jobs(self) -> tuple[ChunkJob, ...]:
        return self.shared + tuple(job for member in range(self.ranks) for job in self.private(member))

    def batches(self, member: int) -> Iterator[FetchBatch]:
        mine = [job for job in self.shared if job.owner == member]
        return fetch_batches(self.found, [*mine, *self.private(member)])

    def part_of(self, job: ChunkJob) -> ChunkPortion | None:
        return self.found.portion(job.array, job.chunk, job.readers)

    def boxes(self, job: ChunkJob, member: int) -> tuple[ChunkBox, ...]:
        return self.needed.boxes(job.array, job.chunk, member)

    def where(self, job: ChunkJob, box: ChunkBox) -> str:
        """The first step, level, … of a box, as an error names it."""
        table, picks = self.tables[job.array], self.request.parts[box.part].picks
        dims = zip(table.dims, picks, table.grid.along, job.chunk, box.runs, strict=True)
        at = [
            f"{name} {along.start(c) + runs[0].source}" for name, picked, along, c, runs in dims if picked is not None
        ]
        return ", ".join(at) or "its only step"

    def box_bytes(self, job: ChunkJob, member: int) -> int:
        return self.needed.box_bytes(job.array, job.chunk, member)

    # -- what it will cost -------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[ReadCounts, ...]:
        """What each rank will do; the engine's counters equal it."""
        rows = [ReadCounts() for _ in range(self.ranks)]
        for job in self.jobs:
            for member in job.readers:
                landing = self.box_bytes(job, member)
                rows[member].useful_bytes += landing
                if member != job.owner != NO_OWNER:
                    rows[job.owner].sent_bytes += landing
            if job.owner != NO_OWNER:
                # of far objects one request may bring many chunks: those are counted below, by the batch
                row = self._taking(job.array, job.chunk, job.readers)
                rows[job.owner] += replace(row, requests=0) if self.tables[job.array].far else row
        for member, row in enumerate(rows):
            row.requests += sum(batch.requests for batch in self.batches(member))
        return tuple(rows)

    @property
    def total(self) -> ReadCounts:
        return sum(self.rows, ReadCounts())

    @cached_property
    def union_bytes(self) -> int:
        """The decoded size of what the sample needs of its chunks, each once."""
        return sum(
            self._taking(name, chunk, tuple(readers)).decoded_bytes
            for name, readers_of in self.needed.readers.items()
            for chunk, readers in readers_of.items()
        )

    def ask_sizes(self) -> ReadPlan:
        """This plan with `sizes` that are complete: of every object of unknown size one is asked, many at a time."""
        unknown = {
            ref.path: self.tables[name].places.files
            for name, readers_of in self.needed.readers.items()
            if self.tables[name].far
            for chunk in readers_of
            if (ref := self.ref(name, chunk)) is not None and ref.length is None and ref.path not in self.sizes
        }
        sizes = dict(self.sizes)
        ask_at_once(lambda path: sizes.update({path: unknown[path].size(path)}), list(unknown))
        return replace(self, sizes=sizes)

    @property
    def lookups(self) -> LookupCounts:
        """What a rank that knows nothing yet looks up for all `rows`; `ReadEngine.looked_up` is what it has."""
        _ = self.rows  # asks for every part
        return self.found.lookups()

    @property
    def amplification(self) -> float:
        """Bytes that the ranks decode, over those of the needed chunks decoded once."""
        return self.total.decoded_bytes / self.union_bytes if self.union_bytes else 1.0

    @cached_property
    def digest(self) -> int:
        """A number that ranks compare: equal when their plans are."""
        # Private jobs follow from request and modes.  What a rank finds of a store enters by `shared`: ranks that see
        # other chunks there, of a store that is written meanwhile, balance them otherwise, and must not go on.  Seven
        # bytes fit the arena's signed words.
        text = repr((self.request, self.modes, self.shared)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def plan_read(
    request: ReadRequest, tables: ArrayTables, mode: str = "auto", sizes: ObjectSizes | None = None
) -> ReadPlan:
    """The plan of one sample: the same on every rank.  No rank is asked; a store may be, where chunks lie.

    `mode` is ``"cooperative"``, ``"neighbours"``, ``"independent"`` or ``"auto"``, which takes the cheapest of them
    for each array (`jigsaw.io.chunks.read_cost`).  `sizes` are of far objects, where another plan has asked for them.

    Raises: `ShardingError` or `ReadError` when the parts do not fill the sample exactly once, or do not fit the arrays.
    """
    if mode not in ("auto", *PLAN_MODES):
        raise ShardingError(f"mode={mode!r} must be one of {['auto', *PLAN_MODES]}")
    check_request_fits(request, tables)
    return make_read_plan(_split_joined_parts(request, tables), tables, mode, sizes)


def make_read_plan(request: ReadRequest, tables: ArrayTables, mode: str, sizes: ObjectSizes | None = None) -> ReadPlan:
    """The plan of a request of stored arrays, in three steps: what the ranks need, where far stores have it, and how
    each array is read.  Only the second may wait for a store, or fail for one rank alone; the third asks near ones
    where a choice depends on what they tell (`docs/design.md` says why).
    """
    needed = NeededChunks(request, {part.array: tables[part.array].grid for part in request.parts})
    found = look_up_chunks(needed, tables)
    return ReadPlan(needed, found, {name: choose_mode(found, name, mode) for name in needed.readers}, sizes or {})


def _split_joined_parts(request: ReadRequest, tables: ArrayTables) -> ReadRequest:
    """The request with each part of a joined array as parts of those it is made of, whose files differ in all else."""
    found = [(part, tables[part.array].members) for part in request.parts]
    if not any(joined for _, joined in found):
        return request
    parts = [each for part, joined in found for each in (_parts_by_array(part, joined) if joined else [part])]
    return replace(request, parts=tuple(parts))


def _parts_by_array(part: ReadPart, joined: JoinedArrays) -> list[ReadPart]:
    """A part as one for each of the joined arrays that it needs."""
    # of 12 files with 4 steps each, rows 3, 4 and 9 are row 3 of the first, 0 of the second and 1 of the third
    picks = part.picks[joined.dim]
    assert picks is not None
    found: dict[int, list[tuple[int, int]]] = {}
    for source, target in picks:
        number = joined.find(source)
        found.setdefault(number, []).append((source - joined.edges[number], target))
    before, after = part.picks[: joined.dim], part.picks[joined.dim + 1 :]
    return [
        replace(part, array=joined.names[i], picks=(*before, tuple(pairs), *after))
        for i, pairs in sorted(found.items())
    ]
