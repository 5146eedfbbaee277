"""Small chunks that lie side by side in a sample, to be placed as one.

A chunk is decoded in less time than it takes to find its rows and copy them in short pieces; a strip is found once, and
its rows are copied as long ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from jigsaw.io.boxes import Box, Run

if TYPE_CHECKING:
    from jigsaw.io.plan import Job, ReadPlan

SMALL = 1 << 20
"""Chunks of more decoded bytes are placed one by one."""
LONG = 1 << 23
"""The decoded bytes of a strip at most: they stay in a third-level cache until they are placed."""
NEAR = 1 << 19
"""The decoded bytes that are converted at a time: they are still in the second-level cache."""


class Strip(NamedTuple):
    """Jobs of one array and one rank, and what of their chunks lands in the sample.

    Several jobs are chunks that follow each other along the array's last dim, whole along it; the box is that of the
    chunk that they would be as one.  The box of a single job is None: it is the plan's to say.
    """

    jobs: tuple[Job, ...]
    box: Box | None = None


def strips(plan: ReadPlan, member: int) -> Iterator[Strip]:
    """The private jobs of a rank, in their order."""
    for array, found in groupby(plan.private(member), key=lambda job: job.array):
        last = _last_runs(plan, array, member)
        yield from (_strip(plan, jobs, last) for jobs in _joined(plan, found, last))


def _last_runs(plan: ReadPlan, array: str, member: int) -> dict[int, Run]:
    """Of the chunks along the last dim that may be joined, the rows that they fill."""
    table, geometry = plan.tables[array], plan.geometry(array)
    small = table.is_uniform and table.decoder is not None and not table.far and table.chunk_bytes <= SMALL
    if not small or len(geometry) != 1 or not geometry[0].ends_in_space:
        return {}
    n, rows = table.chunks[-1], geometry[0].last(member)
    return {c: runs[0] for c, runs in rows.items() if len(runs) == 1 and runs[0] == (0, 1, runs[0].target, 1, n)}


def _joined(plan: ReadPlan, jobs: Iterator[Job], last: dict[int, Run]) -> Iterator[list[Job]]:
    """Jobs whose chunks follow each other in the array and in the sample, and are loaded whole."""
    strip: list[Job] = []
    for job in jobs:
        most = LONG // max(plan.tables[job.array].chunk_bytes, 1)
        if strip and (len(strip) >= most or not _follows(plan, strip[-1], job, last)):
            yield strip
            strip = []
        strip.append(job)
    if strip:
        yield strip


def _follows(plan: ReadPlan, job: Job, then: Job, last: dict[int, Run]) -> bool:
    if job.chunk[:-1] != then.chunk[:-1] or then.chunk[-1] != job.chunk[-1] + 1:
        return False
    here, there = last.get(job.chunk[-1]), last.get(then.chunk[-1])
    if here is None or there is None or there.target != here.target + here.length:
        return False
    return plan.part_of(job) is None and plan.part_of(then) is None


def _strip(plan: ReadPlan, jobs: list[Job], last: dict[int, Run]) -> Strip:
    run = last.get(jobs[0].chunk[-1])
    if run is None or plan.part_of(jobs[0]) is not None:
        return Strip(tuple(jobs))
    (box,) = plan.boxes(jobs[0], jobs[0].owner)
    whole = run._replace(length=len(jobs) * run.length)
    return Strip(tuple(jobs), box._replace(runs=(*box.runs[:-1], (whole,))))
