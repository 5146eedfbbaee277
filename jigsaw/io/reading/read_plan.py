"""Which rank fetches and decodes which chunk, and who gets which box of it: the same on every rank, without a word
between them, for it follows from the request and from where the store says that chunks lie.

The ranks that share a sample hold overlapping boxes of it, and a stored chunk may lie in many of them.  *Independent*:
every rank loads what it needs of each chunk.  *Cooperative*: each chunk is loaded once, by one rank, and cut into the
boxes of all that need it.  *Neighbours*: every rank loads the chunks that it owns rows of, and hands those of the halo
to the ranks that own none.  What a single rank needs it always loads for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.concurrent_requests import ask_at_once
from jigsaw.io.chunks.lookups import LookupCounts, total_lookups
from jigsaw.io.chunks.read_cost import MOST_PORTION_SHARE, read_cost
from jigsaw.io.reading.chunk_boxes import ChunkBox, PartGeometry, RowRun, part_geometries
from jigsaw.io.reading.fetch_batches import FetchBatch, fetch_batches
from jigsaw.io.reading.joined_parts import split_joined_parts
from jigsaw.io.reading.request_check import check_request_fits
from jigsaw.io.series.request import ReadRequest
from jigsaw.layout import ShardingError

if TYPE_CHECKING:
    from jigsaw.io.chunks.array_table import ArrayTable
    from jigsaw.io.chunks.chunk import ChunkRef
    from jigsaw.io.chunks.portion import ChunkPortion, ChunkRows

__all__ = [
    "NO_OWNER",
    "PLAN_MODES",
    "ChunkBox",
    "ChunkIndex",
    "ChunkJob",
    "ReadCounts",
    "ReadPlan",
    "RowRun",
    "plan_read",
]

ArrayTables = Mapping[str, "ArrayTable"]
ReaderRanks = tuple[int, ...]
ObjectSizes = Mapping[str, "int | None"]

PLAN_MODES = ("independent", "neighbours", "cooperative")


class ChunkJob(NamedTuple):
    """One chunk to load, by the rank `owner`, for `readers`.  The owner of a missing chunk is `NO_OWNER`."""

    array: str
    chunk: ChunkIndex
    owner: int
    readers: ReaderRanks

    @property
    def is_private(self) -> bool:
        return self.readers == (self.owner,)


NO_OWNER = -1


@dataclass
class ReadCounts:
    """What one rank does in a plan, or did: byte ranges asked for, chunks decoded, and bytes.

    `decoded_bytes` counts whole chunks, or the part of one that is decoded; `useful_bytes` what of them lands in the
    rank's own tile (in the stored dtype), `sent_bytes` what the rank hands to others; `fallback` the chunks that only
    the format's library could decode; `unsized` those whose stored size is not known beforehand, which `stored_bytes`
    leaves out: never any in what was done.
    """

    requests: int = 0
    chunks: int = 0
    fallback: int = 0
    stored_bytes: int = 0
    decoded_bytes: int = 0
    useful_bytes: int = 0
    sent_bytes: int = 0
    unsized: int = 0

    @property
    def stored(self) -> int | None:
        """The stored bytes; None where they are not known."""
        return None if self.unsized else self.stored_bytes

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class ReadPlan:
    """How the ranks of one domain group read one sample.

    Ranks are numbered in the layout's row-major order.  `modes` says for each array how its chunks are loaded.  `sizes`
    are those of far objects that hold one chunk each, None for missing ones; they change nothing but `rows`, because
    ranks that read do not ask for them.
    """

    def __init__(self, request: ReadRequest, tables: ArrayTables, mode: str, sizes: ObjectSizes | None = None) -> None:
        self.request, self.tables = request, tables
        self.sizes: dict[str, int | None] = dict(sizes or {})
        self.ranks = request.layout.ranks
        self._geometry: dict[str, list[PartGeometry]] = {}
        for number, part in enumerate(request.parts):
            made = part_geometries(number, part, tables[part.array], request)
            self._geometry.setdefault(part.array, []).extend(made)
        self._readers = {name: self._readers_of(name) for name in self._geometry}
        self._refs: dict[tuple[str, ChunkIndex], ChunkRef | None] = {}
        self._taken: dict[tuple[str, ChunkIndex, int], tuple[ChunkBox, ...]] = {}
        self._portions: dict[tuple[str, ChunkIndex, ReaderRanks], ChunkPortion | None] = {}
        self._ask_ahead()
        self.modes = {name: self._mode(name, mode) for name in self._geometry}

    def _ask_ahead(self) -> None:
        """Look up at once what `ref` and `portion` will ask far stores for: the indices of shards, Blosc tables."""
        far = [(name, chunks) for name, chunks in self._readers.items() if self.tables[name].far]
        first = {self.tables[name].finder.path(chunk): (name, chunk) for name, chunks in far for chunk in chunks}
        ask_at_once(lambda each: self.tables[each[0]].finder.locate(each[1]), list(first.values()))
        parts = [(name, chunk) for name, chunks in far if self.tables[name].finder.is_divisible for chunk in chunks]
        ask_at_once(lambda each: [self.portion(*each, (m,)) for m in self._readers[each[0]][each[1]]], parts)

    def _readers_of(self, name: str) -> dict[ChunkIndex, list[int]]:
        found: dict[ChunkIndex, list[int]] = {}
        for member in range(self.ranks):
            needed = [chunk for each in self._geometry[name] for chunk in each.chunks(member)]
            for chunk in needed if len(self._geometry[name]) == 1 else dict.fromkeys(needed):
                found.setdefault(chunk, []).append(member)
        return {chunk: found[chunk] for chunk in sorted(found)}

    # -- how each array is read --------------------------------------------------------------------------------------

    def _mode(self, name: str, mode: str) -> str:
        if self.ranks == 1 or all(len(readers) == 1 for readers in self._readers[name].values()):
            return "independent"
        return mode if mode != "auto" else min(PLAN_MODES, key=lambda each: self.cost(name, each))

    def cost(self, name: str, mode: str) -> float:
        """What reading an array costs in a mode, in CPU seconds over all ranks.

        Requests are counted as they are made: near chunks of a far object by one.  An unknown size counts as decoded.
        """
        table, jobs = self.tables[name], self._jobs_of(name, mode)
        stored = decoded = sent = shared = requests = 0
        for job in jobs:
            row = self._load(name, job.chunk, job.readers)
            requests, decoded = requests + row.requests, decoded + row.decoded_bytes
            stored += row.decoded_bytes if row.unsized else row.stored_bytes
            shared += len(job.readers) > 1
            sent += sum(self._landing(name, job.chunk, m) for m in job.readers if m != job.owner)
        if table.far:
            requests = sum(
                batch.requests for m in range(self.ranks) for batch in fetch_batches(self, _jobs_owned_by(jobs, m))
            )
        return read_cost(table, requests, stored, decoded, sent, shared)

    def _jobs_of(self, name: str, mode: str) -> list[ChunkJob]:
        """The jobs of an array, were it read in this mode and alone."""
        jobs = [
            ChunkJob(name, chunk, owner, served)
            for chunk, readers in self._readers[name].items()
            for owner, served in self._loads(name, chunk, readers, mode)
        ]
        if mode != "cooperative" or not self.tables[name].far:
            return jobs  # who owns a chunk changes the requests for objects of many chunks, and little else
        own = [sum(self._weight(job) for job in _jobs_owned_by(jobs, m) if job.is_private) for m in range(self.ranks)]
        shared = self._balanced([job for job in jobs if not job.is_private], own, {name: mode})
        return [*shared, *(job for job in jobs if job.is_private)]

    def _loads(self, name: str, chunk: ChunkIndex, readers: Sequence[int], mode: str) -> list[tuple[int, ReaderRanks]]:
        """(owner, readers) of every load of a chunk; an owner that is still to be chosen is the first reader."""
        if mode == "cooperative" or len(readers) == 1:
            return [(readers[0], tuple(readers))]
        owning = readers
        if mode == "neighbours":
            owning = [m for m in readers if any(each.owns(chunk, m) for each in self._geometry[name])] or readers[:1]
        borrowing = tuple(m for m in readers if m not in owning)
        first = (owning[0], tuple(sorted((owning[0], *borrowing))))
        return [first, *((m, (m,)) for m in owning[1:])]

    @cached_property
    def redundancy(self) -> dict[str, float]:
        """How many times independent ranks would decode what is needed of each array."""
        found: dict[str, float] = {}
        for name, readers_of in self._readers.items():
            alone = sum(self._load(name, c, (m,)).decoded_bytes for c, readers in readers_of.items() for m in readers)
            once = sum(self._load(name, c, tuple(readers)).decoded_bytes for c, readers in readers_of.items())
            found[name] = alone / once if once else 1.0
        return found

    @property
    def mode(self) -> str:
        """The mode of the array whose ranks share the most."""
        return max(self.modes.values(), key=PLAN_MODES.index, default="independent")

    # -- chunks ------------------------------------------------------------------------------------------------------

    def ref(self, array: str, chunk: ChunkIndex) -> ChunkRef | None:
        """Where a chunk lies, looked up once; None when it is missing."""
        key = array, chunk
        if key not in self._refs:
            self._refs[key] = self.tables[array].finder.locate(chunk)
        return self._refs[key]

    def portion(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> ChunkPortion | None:
        """What of a chunk is loaded for these ranks; None for all of it."""
        if not self.tables[array].finder.is_divisible or self._needs_most(array, chunk, readers):
            return None
        key = array, chunk, readers
        if key not in self._portions:
            self._portions[key] = self.tables[array].finder.portion(chunk, self._rects(array, chunk, readers))
        return self._portions[key]

    def _needs_most(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> bool:
        """Whether one box alone says that a part of a chunk is not worth it."""
        return any(geometry.share(chunk, m) > MOST_PORTION_SHARE for geometry in self._geometry[array] for m in readers)

    def _rects(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> list[ChunkRows]:
        return [box.rect for m in readers for box in self._boxes(array, chunk, m)]

    def _load(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> ReadCounts:
        """What loading a chunk for these ranks takes of the one that does it."""
        ref, table = self.ref(array, chunk), self.tables[array]
        if ref is None:
            return ReadCounts()
        part, slow = self.portion(array, chunk, readers), int(table.decoder is None)
        if part is not None:
            return ReadCounts(max(len(part.ranges), 1), 1, slow, ref.length or 0 if slow else part.stored, part.decoded)
        unsized = int(ref.length is None and not slow)
        return ReadCounts(1, 1, slow, ref.length or 0, table.grid.bytes_of(chunk), unsized=unsized)

    def _taking(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> ReadCounts:
        """What loading a chunk takes, with its stored size where `sizes` have that."""
        row, ref = self._load(array, chunk, readers), self.ref(array, chunk)
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
            for name, readers_of in self._readers.items()
            if self.modes[name] != "independent"
            for chunk, readers in readers_of.items()
            for owner, served in self._loads(name, chunk, readers, self.modes[name])
            if len(served) > 1
        ]
        load = [sum(map(self._weight, self.private(member))) for member in range(self.ranks)] if todo else []
        return tuple(self._balanced(todo, load, self.modes))

    def _balanced(self, todo: Sequence[ChunkJob], load: list[int], modes: Mapping[str, str]) -> list[ChunkJob]:
        """Shared jobs with their owners: the largest first, each to the rank with the least so far."""
        owners = [NO_OWNER] * len(todo)
        weights = [self._weight(job) for job in todo]
        for i in sorted(range(len(todo)), key=lambda i: (-weights[i], i)):
            if weights[i]:
                fixed = modes[todo[i].array] == "neighbours"
                owners[i] = todo[i].owner if fixed else min(range(self.ranks), key=lambda m: (load[m], m))
                load[owners[i]] += weights[i]
        return [ChunkJob(job.array, job.chunk, owner, job.readers) for job, owner in zip(todo, owners, strict=True)]

    def _weight(self, job: ChunkJob) -> int:
        row = self._load(job.array, job.chunk, job.readers)
        return row.stored_bytes or row.decoded_bytes

    def private(self, member: int) -> Iterator[ChunkJob]:
        """The jobs that a rank does for itself alone."""
        for name in self._readers:
            for chunk in self.private_chunks(name, member):
                yield ChunkJob(name, chunk, member, (member,))

    def private_chunks(self, name: str, member: int) -> list[ChunkIndex]:
        """The chunks of an array that a rank loads for itself alone, in C order."""
        mine, mode = [c for c, readers in self._readers[name].items() if member in readers], self.modes[name]
        if mode == "independent":
            return mine
        readers_of, alone = self._readers[name], (member, (member,))
        return [chunk for chunk in mine if alone in self._loads(name, chunk, readers_of[chunk], mode)]

    @property
    def chunk_bytes(self) -> int:
        """The decoded size of the largest chunk."""
        return max((self.tables[name].grid.chunk_bytes for name in self.modes), default=0)

    @property
    def jobs(self) -> tuple[ChunkJob, ...]:
        """Every job of every rank."""
        return self.shared + tuple(job for member in range(self.ranks) for job in self.private(member))

    def batches(self, member: int) -> Iterator[FetchBatch]:
        """The jobs of a rank on far stores, as they are fetched."""
        mine = [job for job in self.shared if job.owner == member]
        return fetch_batches(self, [*mine, *self.private(member)])

    def part_of(self, job: ChunkJob) -> ChunkPortion | None:
        """What of a job's chunk is loaded; None for all of it."""
        return self.portion(job.array, job.chunk, job.readers)

    @property
    def arrays(self) -> Sequence[str]:
        """The arrays that are read."""
        return list(self._geometry)

    def geometry(self, array: str) -> Sequence[PartGeometry]:
        """Which chunks of an array ranks need: one a part, and one of its rows beyond a pole."""
        return self._geometry[array]

    def boxes(self, job: ChunkJob, member: int) -> tuple[ChunkBox, ...]:
        """What a rank takes of a job's chunk: a box a part, and one of its rows beyond a pole."""
        return self._boxes(job.array, job.chunk, member)

    def _boxes(self, array: str, chunk: ChunkIndex, member: int) -> tuple[ChunkBox, ...]:
        key = array, chunk, member
        if key not in self._taken:
            found = (each.box(chunk, member) for each in self._geometry[array])
            self._taken[key] = tuple(box for box in found if box is not None)
        return self._taken[key]

    def where(self, job: ChunkJob, box: ChunkBox) -> str:
        """The first step, level, … of a box, as an error names it."""
        table, picks = self.tables[job.array], self.request.parts[box.part].picks
        at = [
            f"{name} {along.start(c) + runs[0].source}"
            for name, picked, c, along, runs in zip(
                table.dims, picks, job.chunk, table.grid.along, box.runs, strict=True
            )
            if picked is not None
        ]
        return ", ".join(at) or "its only step"

    def box_bytes(self, job: ChunkJob, member: int) -> int:
        """The bytes of those boxes, in the stored dtype."""
        return self._landing(job.array, job.chunk, member)

    def _landing(self, array: str, chunk: ChunkIndex, member: int) -> int:
        return sum(prod(box.extents) for box in self._boxes(array, chunk, member)) * self.tables[array].grid.itemsize

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
            for name, readers_of in self._readers.items()
            for chunk, readers in readers_of.items()
        )

    def ask_sizes(self) -> ReadPlan:
        """This plan, its `sizes` complete: of every object of unknown size one is asked, many at a time."""
        unknown = {
            ref.path: self.tables[name].places.files
            for name, readers_of in self._readers.items()
            if self.tables[name].far
            for chunk in readers_of
            if (ref := self.ref(name, chunk)) is not None and ref.length is None and ref.path not in self.sizes
        }
        ask_at_once(lambda path: self.sizes.update({path: unknown[path].size(path)}), list(unknown))
        for known in ("rows", "union_bytes"):
            vars(self).pop(known, None)
        return self

    @property
    def lookups(self) -> LookupCounts:
        """What one rank that knows none of them yet reads to know all `rows`: the indices of shards, once, and Blosc's
        tables of blocks.  `Engine.looked_up` counts what it has read.
        """
        _ = self.rows  # asks for every part
        chunks = [(self.tables[name], chunk) for name, readers_of in self._readers.items() for chunk in readers_of]
        indices = dict(found for table, chunk in chunks if (found := table.finder.index_of(chunk)) is not None)
        tables = {
            (name, chunk): took
            for name, chunk, readers in self._portions
            if (took := self.tables[name].finder.table_of(chunk, self._rects(name, chunk, readers))).requests
        }
        return total_lookups((*indices.values(), *tables.values()))

    @property
    def amplification(self) -> float:
        """Bytes that the ranks decode, over those of the needed chunks decoded once."""
        return self.total.decoded_bytes / self.union_bytes if self.union_bytes else 1.0

    @cached_property
    def digest(self) -> int:
        """A number that ranks compare: equal when their plans are."""
        text = repr((self.request, self.modes, self.shared)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")

    def explain(self) -> str:
        """The plan as a table: a line a rank, in MB."""
        lines = [f"{self.mode} reading by {self.ranks} rank(s), amplification {self.amplification:.2f}"]
        for name, readers in self._readers.items():
            table = self.tables[name]
            size = f"{len(readers)} chunks of {table.grid.chunk_bytes / 1e6:.2f} MB {table.chunks}"
            lines.append(f"  {name}: {size}, {self.modes[name]}, {self.redundancy[name]:.2f} readers a chunk")
        lines.append(f"{'rank':>6}{'chunks':>9}{'stored':>10}{'decoded':>10}{'useful':>10}{'sent':>10}")
        for label, row in [*enumerate(self.rows), ("all", self.total)]:
            sizes = (row.stored_bytes, row.decoded_bytes, row.useful_bytes, row.sent_bytes)
            lines.append(f"{label:>6}{row.chunks:>9}" + "".join(f"{size / 1e6:>10.2f}" for size in sizes))
        return "\n".join(lines)


def _jobs_owned_by(jobs: Sequence[ChunkJob], member: int) -> list[ChunkJob]:
    return [job for job in jobs if job.owner == member]


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
    return ReadPlan(split_joined_parts(request, tables), tables, mode, sizes)
