"""Who loads a chunk that several ranks need, in each mode of reading, and what a mode costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from heapq import heapify, heapreplace

import numpy as np

from jigsaw.io.chunks.read_cost import read_cost
from jigsaw.io.reading.chunk_jobs import COUNT_COLUMN, NO_OWNER, ChunkJob
from jigsaw.io.reading.chunk_readers import ByReader
from jigsaw.io.reading.fetch_batches import fetch_batches
from jigsaw.io.reading.found_chunks import FoundChunks

PLAN_MODES = ("independent", "neighbours", "cooperative")


def choose_mode(found: FoundChunks, array: str, mode: str) -> str:
    """How an array is read: in `mode`, or in the cheapest where that is ``"auto"``; alone where nothing is shared."""
    readers_of = found.needed.readers[array]
    if found.needed.ranks == 1 or all(len(readers) == 1 for readers in readers_of.pattern.readers):
        return "independent"
    # of equal costs the first, which hands over least: `PLAN_MODES` has the modes in that order
    return mode if mode != "auto" else min(PLAN_MODES, key=lambda each: cost_of_mode(found, array, each))


def cost_of_mode(found: FoundChunks, array: str, mode: str) -> float:
    """What reading an array costs in a mode, in CPU seconds over all ranks."""
    # An unknown size counts as decoded: ranks that read do not ask for it, and all must find the same cost.  A shared
    # job costs as such, whatever its bytes: every rank that reads it is woken, and decoding a small one again is less.
    table = found.tables[array]
    requests, decoded, stored = found.counts_in_mode(array, mode)
    _, shared, sent = found.needed.readers[array].pattern.counts(mode).sum(1).tolist()
    if table.far:
        jobs = shared_jobs(found, {array: mode})
        if mode == "cooperative":  # who owns a chunk changes what is sent, and the requests for objects of many chunks
            sent = sum(sent_values(found, job) for job in jobs)
        requests = _far_requests(found, array, mode, jobs, requests)
    return read_cost(table, requests, stored, decoded, sent * table.grid.itemsize, shared)


def sent_values(found: FoundChunks, job: ChunkJob) -> int:
    """The values of a chunk that are handed to others than its owner."""
    readers = found.needed.readers[job.array][job.chunk]
    total = int(readers.values_of(job.readers).sum())
    return total - int(readers.values_of((job.owner,)).sum()) if job.is_read_by(job.owner) else total


def _far_requests(found: FoundChunks, array: str, mode: str, shared: list[ChunkJob], requests: int) -> int:
    """The requests for an array of a far store: `requests`, were each of its chunks an object of its own."""
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


def shared_jobs(found: FoundChunks, modes: Mapping[str, str]) -> list[ChunkJob]:
    """The jobs whose chunk several ranks read, with their owners, in the order in which all ranks take them.

    Of a cooperative one the owner is chosen: the largest first, each to the rank with the least so far, by bytes.
    Ranks that have 5, 0, 0 and 9 to load for themselves share jobs of 8, 4, 4 and 2: 8 goes to rank 1, 4 to rank 2,
    which then has 4, the least, and gets the other 4; 2 goes to rank 0, with 5.  Of equals the lower rank and the
    earlier job come first, so that all ranks find the same.
    """
    todo, weights = _shared_loads(found, modes)
    if not todo:  # near stores need not be asked for the sizes of private chunks then
        return []
    # Every rank works out the load of all, not its own alone: who owns what must come out alike everywhere, and the
    # order of the jobs, with which slots and parcels are numbered, as well.
    load = _private_bytes(found, modes).tolist()
    least = [(each, rank) for rank, each in enumerate(load)]
    heapify(least)
    # Largest first, because a large one that comes last finds no rank that is behind by so much.  In whole bytes, with
    # ties broken by number, as sorting keeps the order of equals: a float's rounding, or a set's order, would make
    # other owners on another machine.
    for i in sorted(range(len(todo)), key=[-weight for weight in weights].__getitem__):
        array, chunk, owner, readers = todo[i]
        if not weights[i]:  # a missing chunk has nobody to load it: its readers fill their boxes by themselves
            todo[i] = ChunkJob(array, chunk, NO_OWNER, readers)
            continue
        if modes[array] == "cooperative":
            while least[0][0] < load[least[0][1]]:  # it was given more since it was entered
                heapreplace(least, (load[least[0][1]], least[0][1]))
            owner = least[0][1]
            todo[i] = ChunkJob(array, chunk, owner, readers)
        load[owner] += weights[i]
    return todo


def _shared_loads(found: FoundChunks, modes: Mapping[str, str]) -> tuple[list[ChunkJob], list[int]]:
    """The jobs for several ranks, those of cooperative ones not given to their owners yet, and the bytes of each."""
    todo: list[ChunkJob] = []
    weights: list[int] = []
    for name, mode in modes.items():
        readers_of = found.needed.readers[name]
        if mode == "independent" or not readers_of.pattern.counts(mode)[1].any():
            continue
        every = zip(readers_of, readers_of.pattern.loads(mode), found.bytes_of_shared(name, mode), strict=True)
        for chunk, loads, weight in every:
            if loads.served:
                todo.append(ChunkJob(name, chunk, loads.owner, loads.served))
                weights.append(weight)
    return todo, weights


def _private_bytes(found: FoundChunks, modes: Mapping[str, str]) -> ByReader:
    """The bytes that each rank fetches for itself alone, of chunks of unknown size those that it decodes."""
    load = np.zeros(found.needed.ranks, np.int64)
    for name, mode in modes.items():
        for chunk, readers in found.needed.readers[name].items():
            alone = readers.loads(mode).alone
            if len(alone):
                counts = found.counts_alone(name, chunk)[alone]
                stored, decoded = counts[:, COUNT_COLUMN["stored_bytes"]], counts[:, COUNT_COLUMN["decoded_bytes"]]
                load[readers.at[alone]] += np.where(stored, stored, decoded)
    return load
