"""Small chunks that lie side by side in a sample, to be placed as one.

A chunk is decoded in less time than it takes to find its rows and copy them in short pieces; a strip is found once, and
its rows are copied as long ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from jigsaw.io.boxes import Box, Run
from jigsaw.io.chunk_grid import Index
from jigsaw.io.plan import Job

if TYPE_CHECKING:
    from jigsaw.io.plan import ReadPlan

SMALL = 1 << 20
"""Chunks of more decoded bytes are placed one by one."""
LONG = 1 << 23
"""The decoded bytes of a strip at most: they stay in a third-level cache until they are placed."""
NEAR = 1 << 19
"""The decoded bytes that are converted at a time: they are still in the second-level cache."""


class Strip(NamedTuple):
    """Chunks of one array that one rank alone reads, and what of them lands in its sample.

    Those that have a box follow each other along the array's last dim, and are whole along it: the box is that of the
    chunk that they would be as one.  A chunk without is by itself, and its boxes are the plan's to say.
    """

    array: str
    chunks: tuple[Index, ...]
    owner: int
    box: Box | None = None

    def job(self, number: int = 0) -> Job:
        """What the plan calls one of its chunks."""
        return Job(self.array, self.chunks[number], self.owner, (self.owner,))


def strips(plan: ReadPlan, member: int) -> Iterator[Strip]:
    """What a rank loads for itself alone, in the plan's order."""
    for array in plan.arrays:
        last = _last_runs(plan, array, member)
        for chunks in _joined(plan, array, member, last):
            run = last.get(chunks[0][-1]) if chunks[0] else None
            if run is None or _is_part(plan, array, chunks[0], member):
                yield Strip(array, chunks, member)
                continue
            (box,) = plan.boxes(Job(array, chunks[0], member, (member,)), member)
            if box.repeats:  # a strip is converted where it lies, once
                yield from (Strip(array, (chunk,), member) for chunk in chunks)
                continue
            whole = run._replace(length=len(chunks) * run.length)
            yield Strip(array, chunks, member, box._replace(runs=(*box.runs[:-1], (whole,))))


def _last_runs(plan: ReadPlan, array: str, member: int) -> dict[int, Run]:
    """Of the chunks along the last dim that may be joined, the rows that they fill."""
    table, geometry = plan.tables[array], plan.geometry(array)
    small = table.is_uniform and table.decoder is not None and not table.far and table.chunk_bytes <= SMALL
    if not small or len(geometry) != 1 or not geometry[0].ends_in_space:
        return {}
    n, rows = table.chunks[-1], geometry[0].last(member)
    return {c: runs[0] for c, runs in rows.items() if len(runs) == 1 and runs[0] == (0, 1, runs[0].target, 1, n)}


def _joined(plan: ReadPlan, array: str, member: int, last: dict[int, Run]) -> Iterator[tuple[Index, ...]]:
    """Chunks that follow each other in the array and in the sample, and are loaded whole."""
    after = {c for c, run in last.items() if c - 1 in last and last[c - 1].target + run.length == run.target}
    most = LONG // max(plan.tables[array].chunk_bytes, 1)
    strip: list[Index] = []
    for chunk in plan.private_chunks(array, member):
        follows = (
            strip
            and chunk[-1] in after
            and strip[-1] == (*chunk[:-1], chunk[-1] - 1)
            and len(strip) < most
            and not _is_part(plan, array, chunk, member)
            and not _is_part(plan, array, strip[-1], member)
        )
        if strip and not follows:
            yield tuple(strip)
            strip = []
        strip.append(chunk)
    if strip:
        yield tuple(strip)


def _is_part(plan: ReadPlan, array: str, chunk: Index, member: int) -> bool:
    """Whether a rank loads less than the chunk."""
    return plan.portion(array, chunk, (member,)) is not None
