"""Who loads a chunk that several ranks need, in each mode of reading, and what a mode costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.read_cost import read_cost
from jigsaw.io.reading.chunk_jobs import NO_OWNER, ChunkJob, ReaderRanks
from jigsaw.io.reading.fetch_batches import fetch_batches
from jigsaw.io.reading.found_chunks import FoundChunks
from jigsaw.io.reading.needed_chunks import NeededChunks

PLAN_MODES = ("independent", "neighbours", "cooperative")


def choose_mode(found: FoundChunks, array: str, mode: str) -> str:
    """How an array is read: in `mode`, or in the cheapest where that is ``"auto"``; alone where nothing is shared."""
    readers_of = found.needed.readers[array]
    if found.needed.ranks == 1 or all(len(readers) == 1 for readers in readers_of.values()):
        return "independent"
    # of equal costs the first, which hands over least: `PLAN_MODES` has the modes in that order
    return mode if mode != "auto" else min(PLAN_MODES, key=lambda each: cost_of_mode(found, array, each))


def cost_of_mode(found: FoundChunks, array: str, mode: str) -> float:
    """What reading an array costs in a mode, in CPU seconds over all ranks."""
    # An unknown size counts as decoded: ranks that read do not ask for it, and all must find the same cost.  A shared
    # job costs as such, whatever its bytes: every rank that reads it is woken, and decoding a small one again is less.
    table, needed, jobs = found.tables[array], found.needed, _jobs_of_array(found, array, mode)
    stored = decoded = sent = shared = requests = 0
    for job in jobs:
        row = found.load_counts(array, job.chunk, job.readers)
        requests, decoded = requests + row.requests, decoded + row.decoded_bytes
        stored += row.decoded_bytes if row.unsized else row.stored_bytes
        shared += len(job.readers) > 1
        sent += sum(needed.box_bytes(array, job.chunk, m) for m in job.readers if m != job.owner)
    if table.far:
        # near chunks of an object are one request only for the rank that owns both: so owners count, batch by batch
        mine = ([job for job in jobs if job.owner == m] for m in range(needed.ranks))
        requests = sum(batch.requests for some in mine for batch in fetch_batches(found, some))
    return read_cost(table, requests, stored, decoded, sent, shared)


def loads_of_chunk(
    needed: NeededChunks, array: str, chunk: ChunkIndex, readers: Sequence[int], mode: str
) -> list[tuple[int, ReaderRanks]]:
    """(owner, readers) of every load of a chunk; an owner that is still to be chosen is the first reader.

    Say ranks 0 to 3 need a chunk, of which 1 and 2 own rows and 0 and 3 hold some as their halo.  Independent: each
    loads it for itself.  Cooperative: one of them loads it for all.  Neighbours: rank 1 loads it for 0, 1 and 3, and
    rank 2 for itself.
    """
    if mode == "cooperative" or len(readers) == 1:
        return [(readers[0], tuple(readers))]
    owning = readers
    if mode == "neighbours":
        # all readers may hold a chunk as their halo alone: of a crop whose halo reaches beyond its own rows
        owning = [m for m in readers if needed.owns(array, chunk, m)] or readers[:1]
    borrowing = tuple(m for m in readers if m not in owning)
    first = (owning[0], tuple(sorted((owning[0], *borrowing))))
    return [first, *((m, (m,)) for m in owning[1:])]


def balance_shared_jobs(
    found: FoundChunks, todo: Sequence[ChunkJob], load: list[int], modes: Mapping[str, str]
) -> list[ChunkJob]:
    """Shared jobs with their owners: the largest first, each to the rank with the least so far, by bytes.

    Ranks that have 5, 0, 0 and 9 to load for themselves share jobs of 8, 4, 4 and 2: 8 goes to rank 1, 4 to rank 2,
    which then has 4, the least, and gets the other 4; 2 goes to rank 0, with 5.  Of equals the lower rank and the
    earlier job come first, so that all ranks find the same.
    """
    owners = [NO_OWNER] * len(todo)
    weights = [bytes_of_job(found, job) for job in todo]
    # Largest first, because a large one that comes last finds no rank that is behind by so much.  In whole bytes, with
    # ties broken by number: a float's rounding, or a set's order, would make other owners on another machine.
    for i in sorted(range(len(todo)), key=lambda i: (-weights[i], i)):
        if weights[i]:  # a missing chunk has nobody to load it: its readers fill their boxes by themselves
            fixed = modes[todo[i].array] == "neighbours"
            owners[i] = todo[i].owner if fixed else min(range(found.needed.ranks), key=lambda m: (load[m], m))
            load[owners[i]] += weights[i]
    return [ChunkJob(job.array, job.chunk, owner, job.readers) for job, owner in zip(todo, owners, strict=True)]


def bytes_of_job(found: FoundChunks, job: ChunkJob) -> int:
    """The bytes that a job fetches, or decodes where that is not known; 0 of a missing chunk."""
    row = found.load_counts(job.array, job.chunk, job.readers)
    return row.stored_bytes or row.decoded_bytes


def _jobs_of_array(found: FoundChunks, array: str, mode: str) -> list[ChunkJob]:
    """The jobs of an array, were it read in this mode and alone."""
    needed = found.needed
    jobs = [
        ChunkJob(array, chunk, owner, served)
        for chunk, readers in needed.readers[array].items()
        for owner, served in loads_of_chunk(needed, array, chunk, readers, mode)
    ]
    if mode != "cooperative" or not found.tables[array].far:
        return jobs  # who owns a chunk changes the requests for objects of many chunks, and little else
    private, shared = [job for job in jobs if job.is_private], [job for job in jobs if not job.is_private]
    load = [sum(bytes_of_job(found, job) for job in private if job.owner == m) for m in range(needed.ranks)]
    return [*balance_shared_jobs(found, shared, load, {array: mode}), *private]
