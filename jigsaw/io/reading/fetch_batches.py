"""Chunks that lie near each other in one object of a far store, fetched by one request: inner chunks of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from jigsaw.io.chunks.byte_ranges import ByteRange, merge_ranges
from jigsaw.io.reading.chunk_jobs import ChunkJob
from jigsaw.io.reading.found_chunks import FoundChunks

if TYPE_CHECKING:
    from jigsaw.io.chunks.array_table import ArrayTable
    from jigsaw.io.chunks.chunk import ChunkRef

LARGEST_BATCH = 4 << 20
"""Bytes of one request for several chunks: more of them would wait for each other."""


class FetchBatch(NamedTuple):
    """Jobs whose bytes are fetched together: how many requests that takes, and how many bytes come.

    A chunk of unknown stored size is counted with its decoded size.
    """

    jobs: tuple[ChunkJob, ...]
    requests: int
    size: int


class _PlacedJob(NamedTuple):
    """A job, and which bytes of its object it needs."""

    start: int
    stop: int
    parts: list[ByteRange]
    job: ChunkJob


def fetch_batches(chunks: FoundChunks, jobs: Iterable[ChunkJob]) -> Iterator[FetchBatch]:
    """The jobs of one rank on far stores, those near each other together; in the order of their first ones."""
    far = [(job, chunks.ref(job.array, job.chunk)) for job in jobs if chunks.tables[job.array].far]
    if missing := tuple(job for job, ref in far if ref is None):
        yield FetchBatch(missing, 0, 0)
    there = ((job, ref) for job, ref in far if ref is not None)
    for (array, _), group in groupby(there, lambda each: (each[0].array, each[1].path)):
        yield from _batches_of_object(chunks, group, chunks.tables[array])


def _batches_of_object(
    chunks: FoundChunks, jobs: Iterable[tuple[ChunkJob, ChunkRef]], table: ArrayTable
) -> Iterator[FetchBatch]:
    """The batches of jobs on one object; one of unknown size is fetched whole."""
    placed: list[_PlacedJob] = []
    for job, ref in jobs:
        part = chunks.portion_of(job)
        if part is None and ref.length is None:
            yield FetchBatch((job,), 1, table.grid.bytes_of(job.chunk))
        else:
            ranges = [(0, ref.length or 0)] if part is None else part.ranges
            parts = [(ref.offset + start, ref.offset + start + length) for start, length in ranges]
            placed.append(_PlacedJob(parts[0][0], parts[-1][1], parts, job))
    yield from _batches_of_near_jobs(sorted(placed), table.places.files.gap)


def _batches_of_near_jobs(placed: Iterable[_PlacedJob], gap: int) -> Iterator[FetchBatch]:
    some: list[_PlacedJob] = []
    stop = 0
    for each in placed:
        if some and (each.start > stop + gap or each.stop - some[0].start > LARGEST_BATCH):
            yield _batch_of_jobs(some, gap)
            some, stop = [], 0
        some.append(each)
        stop = max(stop, each.stop)
    if some:
        yield _batch_of_jobs(some, gap)


def _batch_of_jobs(some: Sequence[_PlacedJob], gap: int) -> FetchBatch:
    parts = [part for each in some for part in each.parts]
    size = sum(stop - start for start, stop in parts)
    return FetchBatch(tuple(each.job for each in some), len(merge_ranges(parts, gap)), size)
