"""Plan of a read: which rank fetches and decodes which chunk, and who gets which box of it. Every rank finds the same
plan without messages, because it follows from the request and from where the store says that chunks lie.

The ranks that share a sample hold overlapping boxes of it, and a stored chunk may lie in many of them. `independent`:
every rank loads what it needs of each chunk. `cooperative`: each chunk is loaded once, by one rank, and cut into the
boxes of all that need it. `neighbors`: every rank loads the chunks that it owns rows of, and hands those of the halo
to the ranks that own none. A chunk that a single rank needs is always loaded by that rank.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jigsaw.io.chunks.array_table import ArrayTable, JoinedArrays
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkPortion, ChunkRef
from jigsaw.io.chunks.chunk_finder import LookupCounts
from jigsaw.io.chunks.files import ByteRange, merge_ranges
from jigsaw.io.chunks.remote_files import ask_at_once
from jigsaw.io.reading.chunk_readers import (
    COUNT_COLUMN,
    NO_OWNER,
    PLAN_MODES,
    ByReader,
    ChunkJob,
    ChunkReaders,
    CountsTable,
    ReadCounts,
    ReaderRanks,
    SharedJobs,
    order_of_jobs,
)
from jigsaw.io.reading.found_chunks import ArrayTables, FoundArray, FoundChunks, look_up_chunks
from jigsaw.io.reading.needed_chunks import ChunkBox, NeededChunks
from jigsaw.io.reading.plan_text import plan_reasons, plan_text
from jigsaw.io.series.request import ReadPart, ReadRequest, check_arrays_readable

ObjectSizes = Mapping[str, "int | None"]


LARGEST_BATCH = 4 << 20
"""Bytes of one request for several chunks: more of them would wait for each other."""

_DECODE_RATES = {"fast": 2e9, "slow": 4e8, "library": 2e8, "plain": 8e9}
_FETCH_RATES = {False: 2e9, True: 1e8}
_REQUEST_SECONDS = {False: 1e-5, True: 2e-3}
_HANDOVER_RATE = 5e9
_SHARED_JOB_SECONDS = 4e-4


def read_cost(table: ArrayTable, requests: int, stored: int, decoded: int, sent: int, shared: int) -> float:
    """Return the CPU seconds of requests, bytes stored, decoded and handed over, and chunks that ranks share."""
    # a shared chunk wakes every rank that waits for it; a request to a far store is time in which a thread waits
    return (
        requests * _REQUEST_SECONDS[table.far]
        + stored / _FETCH_RATES[table.far]
        + decoded / _DECODE_RATES[_decoder_kind(table)]
        + sent / _HANDOVER_RATE
        + shared * _SHARED_JOB_SECONDS
    )


def _decoder_kind(table: ArrayTable) -> str:
    if table.decoder is None:
        return "library"
    if table.decoder.is_plain:
        return "plain"
    return "fast" if table.decoder.splits else "slow"


def choose_mode(places: FoundChunks, array: str, mode: str) -> str:
    """Choose how an array is read: in `mode`, or in the cheapest mode for ``"auto"``; alone where nothing is shared."""
    if places.needed.ranks == 1 or all(len(readers) == 1 for readers in places[array].readers.pattern.readers):
        return "independent"
    # of equal costs take the first mode, which hands over least: `PLAN_MODES` is in that order
    return mode if mode != "auto" else min(PLAN_MODES, key=lambda each: cost_of_mode(places, array, each))


def cost_of_mode(places: FoundChunks, array: str, mode: str) -> float:
    """Return the cost of reading an array in a mode, in CPU seconds over all ranks."""
    # An unknown size counts as decoded: ranks that read do not ask for it, and all must find the same cost.  A shared
    # job costs as such, whatever its bytes: every rank that reads it is woken, and decoding a small one again is less.
    table = places[array].table
    requests, decoded, stored = places[array].counts_in_mode(mode)
    _, shared, sent = places[array].readers.pattern.totals(mode)
    if table.far:
        jobs = shared_jobs(places, {array: mode})
        # the owner of a chunk decides what is sent, and the number of requests for objects of many chunks
        if mode == "cooperative":
            sent = sum(sent_values(places, job) for job in jobs)
        requests = _far_requests(places, array, mode, jobs, requests)
    return read_cost(table, requests, stored, decoded, sent * table.grid.itemsize, shared)


def sent_values(places: FoundChunks, job: ChunkJob) -> int:
    """Count the values of a chunk that are handed to ranks other than its owner."""
    readers = places[job.array].readers[job.chunk]
    total = int(readers.values_of(job.readers).sum())
    return total - int(readers.values_of((job.owner,)).sum()) if job.is_read_by(job.owner) else total


def _far_requests(places: FoundChunks, array: str, mode: str, shared: SharedJobs, requests: int) -> int:
    """Count the requests for an array of a far store; `requests` is the count if each chunk were its own object."""
    if places[array].has_own_objects():
        return requests
    # two chunks of an object are one request only if one rank loads both, so requests are counted for each rank
    jobs_by_rank: defaultdict[int, list[ChunkJob]] = defaultdict(list)
    by_chunk = {job.chunk: job for job in shared}
    if mode == "cooperative":
        for job in shared:
            jobs_by_rank[job.owner].append(job)
    for chunk, readers in places[array].readers.items():
        if mode != "cooperative" and chunk in by_chunk:
            jobs_by_rank[by_chunk[chunk].owner].append(by_chunk[chunk])
        for rank in readers.at[readers.loads(mode).alone].tolist():
            jobs_by_rank[rank].append(ChunkJob(array, chunk, rank, (rank,)))
    return sum(batch.requests for some in jobs_by_rank.values() for batch in fetch_batches(places, some))


def shared_jobs(places: FoundChunks, modes: Mapping[str, str]) -> SharedJobs:
    """Return the jobs whose chunk several ranks read, with their owners, in the order in which all ranks take them."""
    readers_of = places.needed.readers
    sharing = [name for name, mode in modes.items() if len(readers_of[name].pattern.shared_places(mode))]
    if not sharing:  # then the sizes of private chunks of near stores need not be looked up
        return SharedJobs(order_of_jobs((), b"", b""), ())
    weights = np.concatenate([places[name].bytes_of_shared(modes[name]) for name in sharing])
    # Every rank works out the load of all, not its own alone: who owns what must come out alike everywhere, and the
    # order of the jobs, with which slots and parcels are numbered, as well.
    loads = _private_bytes(places, modes)
    ways = tuple((readers_of[name].pattern, modes[name]) for name in sharing)
    return SharedJobs(
        order_of_jobs(ways, weights.tobytes(), loads.tobytes()), [(name, readers_of[name]) for name in sharing]
    )


def _private_bytes(places: FoundChunks, modes: Mapping[str, str]) -> ByReader:
    """Count the bytes that each rank fetches for itself alone; chunks of unknown size count as their decoded bytes."""
    load = np.zeros(places.needed.ranks, np.int64)
    for name, mode in modes.items():
        if (decoded := places[name].size_of_all) is not None:
            load += places[name].readers.pattern.loaded_alone(mode, len(load)) * np.int64(decoded)
            continue
        for chunk, readers in places[name].readers.items():
            alone = readers.loads(mode).alone
            if len(alone):
                counts = places[name].counts_alone(chunk)[alone]
                stored, decoded = counts[:, COUNT_COLUMN["stored_bytes"]], counts[:, COUNT_COLUMN["decoded_bytes"]]
                load[readers.at[alone]] += np.where(stored, stored, decoded)
    return load


# -- chunks that lie near each other in one object of a far store, fetched by one request -----------------------------


class FetchBatch(NamedTuple):
    """Jobs whose bytes are fetched together, in `requests` requests; a chunk of unknown `size` counts as decoded."""

    jobs: tuple[ChunkJob, ...]
    requests: int
    size: int


def fetch_batches(places: FoundChunks, jobs: Iterable[ChunkJob]) -> Iterator[FetchBatch]:
    """Yield the jobs of one rank on far stores, those near each other together, in the order of their first ones."""
    far = [(job, places[job.array].ref(job.chunk)) for job in jobs if places[job.array].table.far]
    if missing := tuple(job for job, ref in far if ref is None):
        yield FetchBatch(missing, 0, 0)
    present = ((job, ref) for job, ref in far if ref is not None)
    for (array, _), group in groupby(present, lambda each: (each[0].array, each[1].path)):
        yield from _batches_of_object(places[array], group)


def _batches_of_object(places: FoundArray, jobs: Iterable[tuple[ChunkJob, ChunkRef]]) -> Iterator[FetchBatch]:
    placed: list[tuple[list[ByteRange], ChunkJob]] = []
    for job, ref in jobs:
        part = places.portion(job.chunk, job.readers)
        if part is None and ref.length is None:
            yield FetchBatch((job,), 1, places.table.grid.bytes_of(job.chunk))
        else:
            ranges = [(0, ref.length or 0)] if part is None else part.ranges
            placed.append(([(ref.offset + start, ref.offset + start + length) for start, length in ranges], job))
    # Chunks at bytes 0-40, 50-90 and 5000-5040 of a shard, with a gap of 64: one request for the first two, whose ten
    # bytes between cost less than a round trip, and one for the third.
    batches: list[list[tuple[list[ByteRange], ChunkJob]]] = []
    reach, gap = 0, places.table.places.files.gap
    for parts, job in sorted(placed):
        start, stop = parts[0][0], parts[-1][1]
        if not batches or start > reach + gap or stop - batches[-1][0][0][0][0] > LARGEST_BATCH:
            batches.append([])
            reach = 0
        batches[-1].append((parts, job))
        reach = max(reach, stop)
    for batch in batches:
        parts = [part for parts, _ in batch for part in parts]
        size = sum(stop - start for start, stop in parts)
        # one batch may take several requests: of chunks in part, whose ranges lie further apart than the chunks do
        yield FetchBatch(tuple(job for _, job in batch), len(merge_ranges(parts, gap)), size)


@dataclass(frozen=True, eq=False, repr=False)
class ReadPlan:
    """Plan by which the ranks of one domain group read one sample.

    Ranks are numbered in the layout's row-major order.  `modes` says for each array how its chunks are loaded.  `sizes`
    are those of far objects that hold one chunk each, None for missing ones; they change nothing but `rows`, because
    ranks that read do not ask for them.

    ``print(plan)`` explains it: what each rank reads, decodes, keeps and hands over, and why.
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

    def cost(self, name: str, mode: str) -> float:
        """Return the cost of reading an array in a mode, in CPU seconds over all ranks."""
        return cost_of_mode(self.found, name, mode)

    def in_mode(self, mode: str) -> ReadPlan:
        """Return the plan of the same request with all arrays read in `mode`, as `plan_read` takes it."""
        return replace(self, modes={name: choose_mode(self.found, name, mode) for name in self.modes})

    @property
    def reasons(self) -> str:
        """Explanation of the plan: which rank has which chunks, and what each way of reading would cost."""
        return "\n".join(plan_reasons(self))

    def __str__(self) -> str:
        return plan_text(self)

    def ref(self, array: str, chunk: ChunkIndex) -> ChunkRef | None:
        return self.found[array].ref(chunk)

    def _known_size(self, row: CountsTable, array: str, chunk: ChunkIndex) -> CountsTable:
        """Return counts of loading a chunk, a row or several, with its stored size where `sizes` has it."""
        ref, unsized = self.ref(array, chunk), row[..., COUNT_COLUMN["unsized"]] > 0
        if ref is None or ref.path not in self.sizes or not unsized.any():
            return row
        size, known = self.sizes[ref.path], row.copy()
        if size is None:
            known[unsized] = ReadCounts(1, missing=1).row
        else:
            known[unsized, COUNT_COLUMN["stored_bytes"]], known[unsized, COUNT_COLUMN["unsized"]] = size, 0
        return known

    def _counts_of(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> CountsTable:
        return self._known_size(self.found[array].load_counts(chunk, readers).row, array, chunk)

    @cached_property
    def shared(self) -> SharedJobs:
        """The jobs whose chunk several ranks read, in the order in which all ranks take them."""
        return shared_jobs(self.found, self.modes)

    def private(self, member: int) -> Iterator[ChunkJob]:
        for name in self.needed.readers:
            for chunk in self.private_chunks(name, member):
                yield ChunkJob(name, chunk, member, (member,))

    def private_chunks(self, name: str, member: int) -> list[ChunkIndex]:
        """Return the chunks of an array that a rank loads for itself alone, in C order."""
        readers_of, mode = self.needed.readers[name], self.modes[name]
        loads, shared, _ = readers_of.pattern.totals(mode)
        if mode == "independent" or loads == shared:  # every chunk is shared, or none
            return self.needed.chunks(name, member) if mode == "independent" else []
        return [chunk for chunk in self.needed.chunks(name, member) if readers_of[chunk].is_alone(member, mode)]

    @property
    def chunk_bytes(self) -> int:
        return max((self.tables[name].grid.chunk_bytes for name in self.modes), default=0)

    @property
    def jobs(self) -> tuple[ChunkJob, ...]:
        return (*self.shared, *(job for member in range(self.ranks) for job in self.private(member)))

    def batches(self, member: int) -> Iterator[FetchBatch]:
        return fetch_batches(self.found, [*self._shared_by_owner[member], *self.private(member)])

    @cached_property
    def _shared_by_owner(self) -> defaultdict[int, list[ChunkJob]]:
        jobs: defaultdict[int, list[ChunkJob]] = defaultdict(list)
        for job in self.shared:
            jobs[job.owner].append(job)
        return jobs

    def part_of(self, job: ChunkJob) -> ChunkPortion | None:
        return self.found[job.array].portion(job.chunk, job.readers)

    def boxes(self, job: ChunkJob, member: int) -> tuple[ChunkBox, ...]:
        return self.needed.boxes(job.array, job.chunk, member)

    def where(self, job: ChunkJob, box: ChunkBox) -> str:
        """Return the first step, level, … of a box, as an error names it."""
        table, picks = self.tables[job.array], self.request.parts[box.part].picks
        dims = zip(table.dims, picks, table.grid.along, job.chunk, box.runs, strict=True)
        at = [
            f"{name} {along.start(c) + runs[0].source}" for name, picked, along, c, runs in dims if picked is not None
        ]
        return ", ".join(at) or "its only step"

    def box_bytes(self, job: ChunkJob, member: int) -> int:
        return self.needed.box_bytes(job.array, job.chunk, member)

    @cached_property
    def rows(self) -> tuple[ReadCounts, ...]:
        """Work that each rank will do; the engine's counters equal it."""
        table = np.zeros((self.ranks, len(COUNT_COLUMN)), np.int64)
        singly = np.zeros(self.ranks, np.int64)
        useful, sent, requests = (COUNT_COLUMN[name] for name in ("useful_bytes", "sent_bytes", "requests"))
        for name, chunk, readers in self._chunks():
            table[readers.at, useful] += readers.values * self.tables[name].grid.itemsize
            if len(alone := readers.loads(self.modes[name]).alone):
                rows = self._known_size(self.found[name].counts_alone(chunk)[alone], name, chunk)
                table[readers.at[alone]] += rows
                singly[readers.at[alone]] += rows[:, requests] * self.tables[name].far
        for job in self.shared:
            if job.owner == NO_OWNER:
                # all its readers fill their boxes, and the first one counts it
                table[job.readers[0], COUNT_COLUMN["missing"]] += 1
            else:
                row = self._counts_of(job.array, job.chunk, job.readers)
                table[job.owner] += row
                singly[job.owner] += row[requests] * self.tables[job.array].far
                table[job.owner, sent] += sent_values(self.found, job) * self.tables[job.array].grid.itemsize
        if not all(array.has_own_objects() for array in self.found.values() if array.table.far):
            # one request may fetch many chunks of an object, so requests are counted by the batch
            batched = [sum(batch.requests for batch in self.batches(member)) for member in range(self.ranks)]
            table[:, requests] += np.array(batched) - singly
        return tuple(ReadCounts(*row) for row in table.tolist())

    def _chunks(self) -> Iterator[tuple[str, ChunkIndex, ChunkReaders]]:
        for name, readers_of in self.needed.readers.items():
            for chunk, readers in readers_of.items():
                yield name, chunk, readers

    @cached_property
    def missing(self) -> Mapping[str, tuple[ChunkIndex, ...]]:
        """The needed chunks that are not in the store, by array; of far stores those that `sizes` tell of."""
        chunks_by_array = {
            name: tuple(chunk for chunk in readers_of if self._is_missing(name, chunk))
            for name, readers_of in self.needed.readers.items()
        }
        return {name: chunks for name, chunks in chunks_by_array.items() if chunks}

    def _is_missing(self, array: str, chunk: ChunkIndex) -> bool:
        ref = self.ref(array, chunk)
        return ref is None or (ref.path in self.sizes and self.sizes[ref.path] is None)

    @property
    def total(self) -> ReadCounts:
        return sum(self.rows, ReadCounts())

    @cached_property
    def union_bytes(self) -> int:
        """The decoded size of what the sample needs of its chunks, each once."""
        return sum(
            int(self._counts_of(name, chunk, readers.ranks)[COUNT_COLUMN["decoded_bytes"]])
            for name, chunk, readers in self._chunks()
        )

    def ask_sizes(self) -> ReadPlan:
        """Return this plan with complete `sizes`: every object of unknown size is looked up, many at a time."""
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
        """Look-ups for all `rows` by a rank that knows nothing yet; `ReadEngine.looked_up` has those done."""
        _ = self.rows  # computing the rows looks up every part
        return self.found.lookups()

    @property
    def amplification(self) -> float:
        """Bytes that the ranks decode, over those of the needed chunks decoded once."""
        return self.total.decoded_bytes / self.union_bytes if self.union_bytes else 1.0

    @cached_property
    def digest(self) -> int:
        """Number that ranks compare: equal when their plans are."""
        # Private jobs follow from request and modes. A rank's findings in a store enter by `shared`. Ranks that see
        # other chunks, of a store that is written meanwhile, balance them otherwise, and must not go on: their order
        # and owners differ, and all else of the jobs follows from these. Seven bytes fit the arena's signed words.
        text = repr((self.request, self.modes, self.shared.order.digest)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def plan_read(request: ReadRequest, tables: ArrayTables, mode: str = "auto") -> ReadPlan:
    """Plan the reading of one sample: the same on every rank. No rank is asked; a store may be asked where chunks lie.

    `mode` is ``"cooperative"``, ``"neighbors"``, ``"independent"`` or ``"auto"``, which takes the cheapest of them for
    each array (`cost_of_mode`).

    Raises: `UnsupportedStoreError` or `GridError` for an array that cannot be read into a sample.
    """
    check_arrays_readable(request, tables)
    return make_read_plan(_split_joined_parts(request, tables), tables, mode)


def make_read_plan(request: ReadRequest, tables: ArrayTables, mode: str) -> ReadPlan:
    """Make the plan of a request of stored arrays in three steps: the ranks' needs, the places in far stores, the mode
    of each array. Only the second may wait for a store, or fail for one rank alone. The third asks near stores where a
    choice depends on them (`docs/design.md` says why).
    """
    needed = NeededChunks(request, {part.array: tables[part.array].grid for part in request.parts})
    places = look_up_chunks(needed, tables)
    return ReadPlan(needed, places, {name: choose_mode(places, name, mode) for name in needed.readers}, {})


def _split_joined_parts(request: ReadRequest, tables: ArrayTables) -> ReadRequest:
    parts_and_joins = [(part, tables[part.array].members) for part in request.parts]
    if not any(joined for _, joined in parts_and_joins):
        return request
    parts = [
        piece for part, joined in parts_and_joins for piece in (_parts_by_array(part, joined) if joined else [part])
    ]
    return replace(request, parts=tuple(parts))


def _parts_by_array(part: ReadPart, joined: JoinedArrays) -> list[ReadPart]:
    # of 12 files with 4 steps each, rows 3, 4 and 9 are: row 3 of the first, row 0 of the second, row 1 of the third
    picks = part.picks[joined.dim]
    assert picks is not None
    picks_by_array: dict[int, list[tuple[int, int]]] = {}
    for source, target in picks:
        number = joined.find(source)
        picks_by_array.setdefault(number, []).append((source - joined.edges[number], target))
    before, after = part.picks[: joined.dim], part.picks[joined.dim + 1 :]
    return [
        replace(part, array=joined.names[i], picks=(*before, tuple(pairs), *after))
        for i, pairs in sorted(picks_by_array.items())
    ]
