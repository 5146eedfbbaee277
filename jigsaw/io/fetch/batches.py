"""Chunks that lie near each other in one object of a far store, fetched by one request: inner chunks of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jigsaw.io.plan import Job, ReadPlan

MOST = 4 << 20
"""Bytes of one request for several chunks: more of them would wait for each other."""

Part = tuple[int, int]
"""(start, stop) of an object's bytes."""


class Batch(NamedTuple):
    """Jobs whose bytes are fetched together, in so many requests."""

    jobs: tuple[Job, ...]
    requests: int


def batches(plan: ReadPlan, jobs: Iterable[Job]) -> Iterator[Batch]:
    """The jobs of one rank on far stores, those near each other together; in the order of their first ones."""
    far = (job for job in jobs if plan.tables[job.array].far)
    for (array, _), group in groupby(far, lambda job: (job.array, plan.tables[job.array].path(job.chunk))):
        yield from _near(plan, list(group), plan.tables[array].places.files.gap)


def _near(plan: ReadPlan, jobs: Sequence[Job], gap: int) -> Iterator[Batch]:
    """The batches of jobs on one object."""
    placed = sorted((parts, job) for job in jobs if (parts := _parts(plan, job)))
    yield from (Batch((job,), _alone(plan, job)) for job in jobs if not _parts(plan, job))
    some: list[tuple[list[Part], Job]] = []
    for each in placed:
        if some and (each[0][0][0] > _stop(some) + gap or each[0][-1][1] - some[0][0][0][0] > MOST):
            yield _batch(some, gap)
            some = []
        some.append(each)
    if some:
        yield _batch(some, gap)


def _stop(some: list[tuple[list[Part], Job]]) -> int:
    return max(parts[-1][1] for parts, _ in some)


def _batch(some: list[tuple[list[Part], Job]], gap: int) -> Batch:
    requests = len(merged([part for parts, _ in some for part in parts], gap))
    return Batch(tuple(job for _, job in some), requests)


def _parts(plan: ReadPlan, job: Job) -> list[Part]:
    """Which bytes of its object a job needs; none when that is all of an object of unknown size, or nothing."""
    part, ref = plan.part_of(job), plan.ref(job.array, job.chunk)
    if ref is None:
        return []
    if part is not None:
        return [(ref.offset + start, ref.offset + start + length) for start, length in part.ranges]
    return [] if ref.length is None else [(ref.offset, ref.offset + ref.length)]


def _alone(plan: ReadPlan, job: Job) -> int:
    return int(plan.ref(job.array, job.chunk) is not None)


def merged(parts: Iterable[Part], gap: int) -> list[Part]:
    """The requests that cover these parts: those at most `gap` bytes apart as one, in rising order."""
    made: list[Part] = []
    for start, stop in sorted(parts):
        if made and start <= made[-1][1] + gap:
            made[-1] = made[-1][0], max(stop, made[-1][1])
        else:
            made.append((start, stop))
    return made
