"""Chunks that lie near each other in one object of a far store, fetched by one request: inner chunks of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jigsaw.io.chunk import ChunkRef
    from jigsaw.io.plan import Job, ReadPlan
    from jigsaw.io.table import ArrayTable

MOST = 4 << 20
"""Bytes of one request for several chunks: more of them would wait for each other."""

Part = tuple[int, int]
"""(start, stop) of an object's bytes."""


class Batch(NamedTuple):
    """Jobs whose bytes are fetched together, in so many requests; a chunk of unknown size counts as its decoded one."""

    jobs: tuple[Job, ...]
    requests: int
    size: int


class _Placed(NamedTuple):
    """A job, and which bytes of its object it needs."""

    start: int
    stop: int
    parts: list[Part]
    job: Job


def batches(plan: ReadPlan, jobs: Iterable[Job]) -> Iterator[Batch]:
    """The jobs of one rank on far stores, those near each other together; in the order of their first ones."""
    far = [(job, plan.ref(job.array, job.chunk)) for job in jobs if plan.tables[job.array].far]
    if missing := tuple(job for job, ref in far if ref is None):
        yield Batch(missing, 0, 0)
    there = ((job, ref) for job, ref in far if ref is not None)
    for (array, _), group in groupby(there, lambda each: (each[0].array, each[1].path)):
        yield from _of_object(plan, group, plan.tables[array])


def _of_object(plan: ReadPlan, jobs: Iterable[tuple[Job, ChunkRef]], table: ArrayTable) -> Iterator[Batch]:
    """The batches of jobs on one object; one of unknown size is fetched whole."""
    placed: list[_Placed] = []
    for job, ref in jobs:
        part = plan.part_of(job)
        if part is None and ref.length is None:
            yield Batch((job,), 1, table.bytes_of(job.chunk))
        else:
            ranges = [(0, ref.length or 0)] if part is None else part.ranges
            parts = [(ref.offset + start, ref.offset + start + length) for start, length in ranges]
            placed.append(_Placed(parts[0][0], parts[-1][1], parts, job))
    yield from _near(sorted(placed), table.places.files.gap)


def _near(placed: Iterable[_Placed], gap: int) -> Iterator[Batch]:
    some: list[_Placed] = []
    stop = 0
    for each in placed:
        if some and (each.start > stop + gap or each.stop - some[0].start > MOST):
            yield _batch(some, gap)
            some, stop = [], 0
        some.append(each)
        stop = max(stop, each.stop)
    if some:
        yield _batch(some, gap)


def _batch(some: Sequence[_Placed], gap: int) -> Batch:
    parts = [part for each in some for part in each.parts]
    size = sum(stop - start for start, stop in parts)
    return Batch(tuple(each.job for each in some), len(merged(parts, gap)), size)


def merged(parts: Iterable[Part], gap: int) -> list[Part]:
    """The requests that cover these parts: those at most `gap` bytes apart as one, in rising order."""
    made: list[Part] = []
    for start, stop in sorted(parts):
        if made and start <= made[-1][1] + gap:
            made[-1] = made[-1][0], max(stop, made[-1][1])
        else:
            made.append((start, stop))
    return made
