"""Modes of reading: who loads a chunk that several ranks need, and what each mode costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from jigsaw.io.chunks.read_cost import read_cost
from jigsaw.io.reading.chunk_jobs import COUNT_COLUMN, ChunkJob
from jigsaw.io.reading.chunk_readers import ByReader
from jigsaw.io.reading.fetch_batches import fetch_batches
from jigsaw.io.reading.found_chunks import FoundChunks
from jigsaw.io.reading.shared_jobs import SharedJobs, order_of_jobs

PLAN_MODES = ("independent", "neighbours", "cooperative")


def choose_mode(found: FoundChunks, array: str, mode: str) -> str:
    """Choose how an array is read: in `mode`, or in the cheapest mode for ``"auto"``; alone where nothing is shared."""
    readers_of = found.needed.readers[array]
    if found.needed.ranks == 1 or all(len(readers) == 1 for readers in readers_of.pattern.readers):
        return "independent"
    # of equal costs the first, which hands over least: `PLAN_MODES` has the modes in that order
    return mode if mode != "auto" else min(PLAN_MODES, key=lambda each: cost_of_mode(found, array, each))


def cost_of_mode(found: FoundChunks, array: str, mode: str) -> float:
    """Return the cost of reading an array in a mode, in CPU seconds over all ranks."""
    # An unknown size counts as decoded: ranks that read do not ask for it, and all must find the same cost.  A shared
    # job costs as such, whatever its bytes: every rank that reads it is woken, and decoding a small one again is less.
    table = found.tables[array]
    requests, decoded, stored = found.counts_in_mode(array, mode)
    _, shared, sent = found.needed.readers[array].pattern.totals(mode)
    if table.far:
        jobs = shared_jobs(found, {array: mode})
        if mode == "cooperative":  # who owns a chunk changes what is sent, and the requests for objects of many chunks
            sent = sum(sent_values(found, job) for job in jobs)
        requests = _far_requests(found, array, mode, jobs, requests)
    return read_cost(table, requests, stored, decoded, sent * table.grid.itemsize, shared)


def sent_values(found: FoundChunks, job: ChunkJob) -> int:
    """Count the values of a chunk that are handed to ranks other than its owner."""
    readers = found.needed.readers[job.array][job.chunk]
    total = int(readers.values_of(job.readers).sum())
    return total - int(readers.values_of((job.owner,)).sum()) if job.is_read_by(job.owner) else total


def _far_requests(found: FoundChunks, array: str, mode: str, shared: SharedJobs, requests: int) -> int:
    """Count the requests for an array of a far store; `requests` is the count if each chunk were its own object."""
    readers_of = found.needed.readers[array]
    if found.has_own_objects(array):
        return requests
    # chunks of an object are one request only for the rank that loads both: so ranks count, batch by batch
    mine: defaultdict[int, list[ChunkJob]] = defaultdict(list)
    by_chunk = {job.chunk: job for job in shared}
    if mode == "cooperative":
        for job in shared:
            mine[job.owner].append(job)
    for chunk, readers in readers_of.items():
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
    weights = np.concatenate([found.bytes_of_shared(name, modes[name]) for name in sharing])
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
        if (decoded := found.size_of_all(name)) is not None:
            load += found.needed.readers[name].pattern.loaded_alone(mode, len(load)) * np.int64(decoded)
            continue
        for chunk, readers in found.needed.readers[name].items():
            alone = readers.loads(mode).alone
            if len(alone):
                counts = found.counts_alone(name, chunk)[alone]
                stored, decoded = counts[:, COUNT_COLUMN["stored_bytes"]], counts[:, COUNT_COLUMN["decoded_bytes"]]
                load[readers.at[alone]] += np.where(stored, stored, decoded)
    return load
