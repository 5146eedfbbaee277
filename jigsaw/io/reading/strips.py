"""Strips of small chunks that lie side by side in a sample, placed as one.

A chunk is decoded in less time than it takes to find its rows and copy them in short pieces; a strip is found once, and
its rows are copied as long ones.

Four ranks on lat=2, lon=2 read an array of 8 x 16 in chunks of 4 x 4, each what it needs. Rank 1 holds rows 0-3 and
columns 8-15: the chunks (0, 2) and (0, 3), whose columns land in 0-3 and 4-7. They are one strip, with the box of a
chunk of 4 x 8: rows (0, 1, 0, 1, 4), columns (0, 1, 0, 1, 8). They are decoded one after the other, as an array [2, 4,
4], whose row r is then copied as (strip[0, r], strip[1, r]) to out[r]. With one more column on each side it also holds
column 7, of chunk (0, 1), and column 0, of chunk (0, 0), as the one past the last. It takes neither chunk whole along
its last dim, so each is by itself, and the strip's columns land in 1-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.reading.chunk_boxes import ChunkBox, RowRun
from jigsaw.io.reading.chunk_jobs import ChunkJob
from jigsaw.io.reading.read_plan import ReadPlan

LARGEST_STRIP_CHUNK = 1 << 20
"""Chunks of more decoded bytes are placed one by one."""
LARGEST_STRIP = 1 << 23
"""Largest number of decoded bytes of a strip: they stay in a third-level cache until they are placed."""


class ChunkStrip(NamedTuple):
    """Chunks of one array that one rank alone reads, and what of them lands in its sample.

    Where there is a `box`, they follow each other along the array's last dim and are taken whole along it: the box is
    that of the one chunk that they would make.  Without one it is a single chunk, whose boxes the plan says.
    """

    array: str
    chunks: tuple[ChunkIndex, ...]
    owner: int
    box: ChunkBox | None = None

    def job(self, number: int = 0) -> ChunkJob:
        return ChunkJob(self.array, self.chunks[number], self.owner, (self.owner,))


def strips_of_rank(plan: ReadPlan, member: int) -> Iterator[ChunkStrip]:
    """Yield the strips that a rank loads for itself alone, in the plan's order."""
    for array in plan.needed.readers:
        last = _joinable_runs(plan, array, member)
        for chunks in _chunks_in_strips(plan, array, member, last):
            run = last.get(chunks[0][-1]) if chunks[0] else None
            if run is None or _is_loaded_in_part(plan, array, chunks[0], member):
                yield ChunkStrip(array, chunks, member)
                continue
            (box,) = plan.boxes(ChunkJob(array, chunks[0], member, (member,)), member)
            if box.repeats:  # a strip is converted where it lies, once
                yield from (ChunkStrip(array, (chunk,), member) for chunk in chunks)
                continue
            whole = run._replace(length=len(chunks) * run.length)
            yield ChunkStrip(array, chunks, member, box._replace(runs=(*box.runs[:-1], (whole,))))


def _joinable_runs(plan: ReadPlan, array: str, member: int) -> dict[int, RowRun]:
    """Return the rows filled by each chunk along the last dim that may be joined."""
    table, geometry = plan.tables[array], plan.needed.geometries[array]
    grid, is_near = table.grid, table.decoder is not None and not table.far
    small = is_near and grid.is_uniform and grid.chunk_bytes <= LARGEST_STRIP_CHUNK
    if not small or len(geometry) != 1 or not geometry[0].ends_in_space:
        return {}
    # whole chunks alone, from their first row and forwards: rows of a strip then follow each other as their bytes do
    n, rows = table.chunks[-1], geometry[0].last(member)
    return {c: runs[0] for c, runs in rows.items() if len(runs) == 1 and runs[0] == (0, 1, runs[0].target, 1, n)}


def _chunks_in_strips(
    plan: ReadPlan, array: str, member: int, last: dict[int, RowRun]
) -> Iterator[tuple[ChunkIndex, ...]]:
    # Chunks side by side in the array need not be so in the sample: on a dim of four chunks that is rolled by half, 0
    # lands behind 3, and 2 behind nothing.
    after = {c for c, run in last.items() if c - 1 in last and last[c - 1].target + run.length == run.target}
    most = LARGEST_STRIP // max(plan.tables[array].grid.chunk_bytes, 1)
    strip: list[ChunkIndex] = []
    for chunk in plan.private_chunks(array, member):
        follows = (
            strip
            and chunk[-1] in after
            and strip[-1] == (*chunk[:-1], chunk[-1] - 1)
            and len(strip) < most
            and not _is_loaded_in_part(plan, array, chunk, member)
            and not _is_loaded_in_part(plan, array, strip[-1], member)
        )
        if strip and not follows:
            yield tuple(strip)
            strip = []
        strip.append(chunk)
    if strip:
        yield tuple(strip)


def _is_loaded_in_part(plan: ReadPlan, array: str, chunk: ChunkIndex, member: int) -> bool:
    return plan.found[array].portion(chunk, (member,)) is not None
