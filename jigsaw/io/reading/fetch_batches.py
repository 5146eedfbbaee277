"""Chunks that lie near each other in one object of a far store, fetched by one request: inner chunks of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.files import ByteRange, merge_ranges
from jigsaw.io.reading.chunk_jobs import ChunkJob
from jigsaw.io.reading.found_chunks import FoundChunks

LARGEST_BATCH = 4 << 20
"""Bytes of one request for several chunks: more of them would wait for each other."""


class FetchBatch(NamedTuple):
    """Jobs whose bytes are fetched together, in so many requests; a chunk of unknown `size` counts as decoded."""

    jobs: tuple[ChunkJob, ...]
    requests: int
    size: int


def fetch_batches(chunks: FoundChunks, jobs: Iterable[ChunkJob]) -> Iterator[FetchBatch]:
    """Yield the jobs of one rank on far stores, those near each other together, in the order of their first ones."""
    far = [(job, chunks.ref(job.array, job.chunk)) for job in jobs if chunks.tables[job.array].far]
    if missing := tuple(job for job, ref in far if ref is None):
        yield FetchBatch(missing, 0, 0)
    there = ((job, ref) for job, ref in far if ref is not None)
    for (array, _), group in groupby(there, lambda each: (each[0].array, each[1].path)):
        yield from _batches_of_object(chunks, group, chunks.tables[array])


def _batches_of_object(
    chunks: FoundChunks, jobs: Iterable[tuple[ChunkJob, ChunkRef]], table: ArrayTable
) -> Iterator[FetchBatch]:
    """Yield the batches of jobs on one object; one of unknown size is fetched whole."""
    placed: list[tuple[list[ByteRange], ChunkJob]] = []
    for job, ref in jobs:
        part = chunks.portion(job.array, job.chunk, job.readers)
        if part is None and ref.length is None:
            yield FetchBatch((job,), 1, table.grid.bytes_of(job.chunk))
        else:
            ranges = [(0, ref.length or 0)] if part is None else part.ranges
            placed.append(([(ref.offset + start, ref.offset + start + length) for start, length in ranges], job))
    # Chunks at bytes 0-40, 50-90 and 5000-5040 of a shard, with a gap of 64: one request for the first two, whose ten
    # bytes between cost less than a round trip, and one for the third.
    batches: list[list[tuple[list[ByteRange], ChunkJob]]] = []
    reach, gap = 0, table.places.files.gap
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
