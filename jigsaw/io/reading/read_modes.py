"""Modes of reading: who loads a chunk that several ranks need, in which requests, and what each mode costs.

Costs are CPU seconds over all ranks: the planner takes the cheapest mode. The rates are of one core of the machine that
`benchmarks/read.py` was run on, rounded; only their ratios matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.files import ByteRange, merge_ranges
from jigsaw.io.reading.chunk_jobs import COUNT_COLUMN, ChunkJob
from jigsaw.io.reading.chunk_readers import ByReader
from jigsaw.io.reading.found_chunks import FoundArray, FoundChunks
from jigsaw.io.reading.shared_jobs import SharedJobs, order_of_jobs

PLAN_MODES = ("independent", "neighbors", "cooperative")
LARGEST_BATCH = 4 << 20
"""Bytes of one request for several chunks: more of them would wait for each other."""

_DECODE_RATES = {"fast": 2e9, "slow": 4e8, "library": 2e8, "plain": 8e9}
_FETCH_RATES = {False: 2e9, True: 1e8}
_REQUEST_SECONDS = {False: 1e-5, True: 2e-3}
_HANDOVER_RATE = 5e9
_SHARED_JOB_SECONDS = 4e-4


def read_cost(table: ArrayTable, requests: int, stored: int, decoded: int, sent: int, shared: int) -> float:
    """Return the CPU seconds of so many requests, bytes stored, decoded and handed to other ranks, and chunks handed
    over.
    """
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


def choose_mode(found: FoundChunks, array: str, mode: str) -> str:
    """Choose how an array is read: in `mode`, or in the cheapest mode for ``"auto"``; alone where nothing is shared."""
    if found.needed.ranks == 1 or all(len(readers) == 1 for readers in found[array].readers.pattern.readers):
        return "independent"
    # of equal costs the first, which hands over least: `PLAN_MODES` has the modes in that order
    return mode if mode != "auto" else min(PLAN_MODES, key=lambda each: cost_of_mode(found, array, each))


def cost_of_mode(found: FoundChunks, array: str, mode: str) -> float:
    """Return the cost of reading an array in a mode, in CPU seconds over all ranks."""
    # An unknown size counts as decoded: ranks that read do not ask for it, and all must find the same cost.  A shared
    # job costs as such, whatever its bytes: every rank that reads it is woken, and decoding a small one again is less.
    table = found[array].table
    requests, decoded, stored = found[array].counts_in_mode(mode)
    _, shared, sent = found[array].readers.pattern.totals(mode)
    if table.far:
        jobs = shared_jobs(found, {array: mode})
        if mode == "cooperative":  # who owns a chunk changes what is sent, and the requests for objects of many chunks
            sent = sum(sent_values(found, job) for job in jobs)
        requests = _far_requests(found, array, mode, jobs, requests)
    return read_cost(table, requests, stored, decoded, sent * table.grid.itemsize, shared)


def sent_values(found: FoundChunks, job: ChunkJob) -> int:
    """Count the values of a chunk that are handed to ranks other than its owner."""
    readers = found[job.array].readers[job.chunk]
    total = int(readers.values_of(job.readers).sum())
    return total - int(readers.values_of((job.owner,)).sum()) if job.is_read_by(job.owner) else total


def _far_requests(found: FoundChunks, array: str, mode: str, shared: SharedJobs, requests: int) -> int:
    """Count the requests for an array of a far store; `requests` is the count if each chunk were its own object."""
    if found[array].has_own_objects():
        return requests
    # chunks of an object are one request only for the rank that loads both: so ranks count, batch by batch
    mine: defaultdict[int, list[ChunkJob]] = defaultdict(list)
    by_chunk = {job.chunk: job for job in shared}
    if mode == "cooperative":
        for job in shared:
            mine[job.owner].append(job)
    for chunk, readers in found[array].readers.items():
        if mode != "cooperative" and chunk in by_chunk:
            mine[by_chunk[chunk].owner].append(by_chunk[chunk])
        for rank in readers.at[readers.loads(mode).alone].tolist():
            mine[rank].append(ChunkJob(array, chunk, rank, (rank,)))
    return sum(batch.requests for some in mine.values() for batch in fetch_batches(found, some))


def shared_jobs(found: FoundChunks, modes: Mapping[str, str]) -> SharedJobs:
    """Return the jobs whose chunk several ranks read, with their owners, in the order in which all ranks take them."""
    readers_of = found.needed.readers
    sharing = [name for name, mode in modes.items() if len(readers_of[name].pattern.shared_places(mode))]
    if not sharing:  # near stores need not be asked for the sizes of private chunks then
        return SharedJobs(order_of_jobs((), b"", b""), ())
    weights = np.concatenate([found[name].bytes_of_shared(modes[name]) for name in sharing])
    # Every rank works out the load of all, not its own alone: who owns what must come out alike everywhere, and the
    # order of the jobs, with which slots and parcels are numbered, as well.
    loads = _private_bytes(found, modes)
    ways = tuple((readers_of[name].pattern, modes[name]) for name in sharing)
    return SharedJobs(
        order_of_jobs(ways, weights.tobytes(), loads.tobytes()), [(name, readers_of[name]) for name in sharing]
    )


def _private_bytes(found: FoundChunks, modes: Mapping[str, str]) -> ByReader:
    """Count the bytes that each rank fetches for itself alone; chunks of unknown size count as their decoded bytes."""
    load = np.zeros(found.needed.ranks, np.int64)
    for name, mode in modes.items():
        if (decoded := found[name].size_of_all) is not None:
            load += found[name].readers.pattern.loaded_alone(mode, len(load)) * np.int64(decoded)
            continue
        for chunk, readers in found[name].readers.items():
            alone = readers.loads(mode).alone
            if len(alone):
                counts = found[name].counts_alone(chunk)[alone]
                stored, decoded = counts[:, COUNT_COLUMN["stored_bytes"]], counts[:, COUNT_COLUMN["decoded_bytes"]]
                load[readers.at[alone]] += np.where(stored, stored, decoded)
    return load


# -- chunks that lie near each other in one object of a far store, fetched by one request -----------------------------


class FetchBatch(NamedTuple):
    """Jobs whose bytes are fetched together, in so many requests; a chunk of unknown `size` counts as decoded."""

    jobs: tuple[ChunkJob, ...]
    requests: int
    size: int


def fetch_batches(found: FoundChunks, jobs: Iterable[ChunkJob]) -> Iterator[FetchBatch]:
    """Yield the jobs of one rank on far stores, those near each other together, in the order of their first ones."""
    far = [(job, found[job.array].ref(job.chunk)) for job in jobs if found[job.array].table.far]
    if missing := tuple(job for job, ref in far if ref is None):
        yield FetchBatch(missing, 0, 0)
    there = ((job, ref) for job, ref in far if ref is not None)
    for (array, _), group in groupby(there, lambda each: (each[0].array, each[1].path)):
        yield from _batches_of_object(found[array], group)


def _batches_of_object(found: FoundArray, jobs: Iterable[tuple[ChunkJob, ChunkRef]]) -> Iterator[FetchBatch]:
    """Yield the batches of jobs on one object; one of unknown size is fetched whole."""
    placed: list[tuple[list[ByteRange], ChunkJob]] = []
    for job, ref in jobs:
        part = found.portion(job.chunk, job.readers)
        if part is None and ref.length is None:
            yield FetchBatch((job,), 1, found.table.grid.bytes_of(job.chunk))
        else:
            ranges = [(0, ref.length or 0)] if part is None else part.ranges
            placed.append(([(ref.offset + start, ref.offset + start + length) for start, length in ranges], job))
    # Chunks at bytes 0-40, 50-90 and 5000-5040 of a shard, with a gap of 64: one request for the first two, whose ten
    # bytes between cost less than a round trip, and one for the third.
    batches: list[list[tuple[list[ByteRange], ChunkJob]]] = []
    reach, gap = 0, found.table.places.files.gap
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
