"""Sections of shared chunks, which pass from rank to rank: shared memory then holds a few rows of each chunk. A section
is taken while it still lies in the cache of the core that decoded it.

The plan decides which chunks are cut, and the slot of each section, so both are the same on every rank.
Take four ranks and four shared jobs: 0 and 2 are rank 0's, 1 is rank 1's and 3 is rank 3's. Rank 0 has two threads, and
so two lanes. Jobs 0 and 2 are large, and cut into three sections (0a 0b 0c) and two (2a 2b); 1 and 3 are not cut:

    lane 0 of rank 0    0a 0b 0c
    lane 0 of rank 1    1
    lane 1 of rank 0    2a 2b
    lane 0 of rank 3    3

The order of slots takes one of each lane in turn: 0a 1 2a 3 0b 2b 0c. These are the places 0..6. With 4 slots,
place 4 is slot 0 again: rank 0 decodes 0b there once all readers of job 0 have taken 0a. A lane's sections come in
their order, so its thread waits only for places before its own. So the section at the lowest place that is not taken
yet never waits, and no two ranks wait for each other.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from operator import neg
from typing import Any, NamedTuple

from numpy.typing import NDArray

from jigsaw.geometry.cut import Interval
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import ChunkIndex
from jigsaw.io.chunks.files import ByteArray
from jigsaw.io.reading.chunk_readers import ChunkJob
from jigsaw.io.reading.needed_chunks import ChunkBox, RowList, RowRun, TakenRows
from jigsaw.io.reading.read_plan import ReadPlan

SECTION_BYTES = 1 << 22
"""Bytes of a section, or one row where that is more: what the caches hold."""
_FEW_SLOT_BYTES = 1 << 24


class ChunkSection(NamedTuple):
    """A chunk that is being read, or rows of it along `dim`: its job, and the table that says how it is decoded.

    `number` is the job's in the plan; the sections of a `lane` of its owner are decoded one after the other.
    """

    job: ChunkJob
    table: ArrayTable
    number: int = 0
    lane: int = 0
    dim: int = 0
    rows: Interval | None = None
    is_last: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.table.grid.shape_of(self.job.chunk))
        if self.rows is not None:
            shape[self.dim] = self.rows[1] - self.rows[0]
        return tuple(shape)

    @property
    def size(self) -> int:
        """Its decoded bytes; where chunks are not cut, a slot has room for a whole chunk of the array."""
        grid = self.table.grid
        return grid.chunk_bytes if self.rows is None else prod(self.shape) * grid.itemsize

    def view(self, memory: ByteArray) -> NDArray[Any]:
        return self.table.loader.view(memory, self.job.chunk, self.shape)

    def cut(self, boxes: Sequence[ChunkBox]) -> Iterator[tuple[ChunkBox, ChunkBox]]:
        """Yield the part of each box that lies in the section, in the chunk's rows and in the section's rows."""
        if self.rows is None:
            yield from zip(boxes, boxes, strict=True)
            return
        for box in boxes:
            runs = tuple(part for run in box.runs[self.dim] if (part := _run_within(run, self.rows)).length)
            if runs:
                # source rows are counted from the section's first row; target rows are rows of the sample, and stay
                shifted = tuple(_moved_run(run, self.rows[0]) for run in runs)
                before, after = box.runs[: self.dim], box.runs[self.dim + 1 :]
                yield box._replace(runs=(*before, runs, *after)), box._replace(runs=(*before, shifted, *after))


def _moved_run(run: TakenRows, first: int) -> TakenRows:
    if isinstance(run, RowList):
        return RowList(run.source - first, run.target)
    return run._replace(source=run.source - first)


def _run_within(run: TakenRows, rows: Interval) -> TakenRows:
    """Return the part of a run with source rows in an interval: of 1, 4, 7, 10 in [4, 8) the second and third."""
    if isinstance(run, RowList):
        is_within = (run.source >= rows[0]) & (run.source < rows[1])
        return RowList(run.source[is_within], run.target[is_within])
    source = run.each  # a range, rising or falling: it is searched without making a list of it
    if run.source_step > 0:
        first, stop = (bisect_left(source, row) for row in rows)
    else:
        # Falling rows rise when negated, and the ends change places: of 10, 7, 4, 1 the first below 8 is the first
        # whose negative is at least -7 = 1 - 8; the rows of at least 4 end before the first at or above -3 = 1 - 4.
        stop, first = (bisect_left(source, 1 - row, key=neg) for row in rows)
    return run._replace(
        source=run.source + run.source_step * first, target=run.target + run.target_step * first, length=stop - first
    )


def sections_in_slot_order(
    plan: ReadPlan, jobs: Sequence[tuple[int, ChunkJob]], lanes: Sequence[int], cut: bool = True
) -> list[ChunkSection]:
    """Return the sections of numbered jobs in the order of their slots; `lanes` has the number of each rank's."""
    # Queues stand in the order in which the plan's jobs first name them: the same everywhere, whatever order the
    # threads come in.  A rank's jobs go to its lanes in turn, so that these are about equally long.
    queues: dict[tuple[int, int], list[ChunkSection]] = {}
    job_counts = [0] * len(lanes)
    for number, job in jobs:
        lane = job_counts[job.owner] % lanes[job.owner]
        job_counts[job.owner] += 1
        queues.setdefault((job.owner, lane), []).extend(_sections_of_job(plan, job, number, lane, cut))
    # lanes take turns, so that at any time the slots hold sections of all lanes
    return [section for turn in zip_longest(*queues.values()) for section in turn if section is not None]


def fair_thread_count(ranks: int) -> int:
    """Return the number of a rank's threads: its machine's cores shared among the ranks there, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // ranks))


def slot_size_and_count(plan: ReadPlan, sections: Sequence[ChunkSection], threads: int, budget: int) -> tuple[int, int]:
    """Return the size and number of slots: one for each loading thread, two while these are small, within a budget."""
    size = max((section.size for section in sections), default=0)
    # a slot for each thread, so that none waits for another's readers; a second lets it decode on while its first is
    # taken, which pays only as long as all slots together stay in the cache
    count = max(threads, min(2 * threads, _FEW_SLOT_BYTES // max(size, 1)))
    return size, max(1, min(count, len(sections), budget // max(size, 1)))


def _sections_of_job(plan: ReadPlan, job: ChunkJob, number: int, lane: int, cut: bool) -> Iterator[ChunkSection]:
    table, chunk = plan.tables[job.array], job.chunk
    size = table.grid.bytes_of(chunk)
    if not cut or size <= SECTION_BYTES or not _can_stream(plan, job):
        yield ChunkSection(job, table, number, lane)
        return
    assert table.decoder is not None
    # the outermost dim in memory that has rows to cut: what is decoded from beginning to end is then rows of it in turn
    dim = next(d for d in table.decoder.order if table.grid.shape_of(chunk)[d] > 1)
    rows = table.grid.shape_of(chunk)[dim]
    step = max(1, SECTION_BYTES * rows // size)
    for start in range(0, rows, step):
        yield ChunkSection(job, table, number, lane, dim, (start, min(start + step, rows)), start + step >= rows)


def _can_stream(plan: ReadPlan, job: ChunkJob) -> bool:
    """Say whether a chunk can be decoded whole, from its beginning to its end, as it is fetched."""
    table = plan.tables[job.array]
    # All ranks must answer this alike, or they would disagree about which section is in which slot.
    # Far chunks come whole, by batches. Chunks in part, and those whose filters were left out in part (`mask`), are not
    # a stream of rows from the first to the last.
    if table.decoder is None or not table.decoder.splits or table.far:
        return False
    ref = plan.ref(job.array, job.chunk)
    return plan.part_of(job) is None and ref is not None and ref.length is not None and not ref.mask


# A chunk is decoded in less time than it takes to find its rows and copy them in short pieces; a strip is found once,
# and its rows are copied as long ones. Four ranks on lat=2, lon=2 read an array of 8 x 16 in chunks of 4 x 4, each what
# it needs. Rank 1 holds rows 0-3 and columns 8-15: the chunks (0, 2) and (0, 3), whose columns land in 0-3 and 4-7.
# They are one strip, with the box of a chunk of 4 x 8: rows (0, 1, 0, 1, 4), columns (0, 1, 0, 1, 8). They are decoded
# one after the other, as an array [2, 4, 4], whose row r is then copied as (strip[0, r], strip[1, r]) to out[r]. With
# one more column on each side it also takes parts of (0, 1) and (0, 0): each of these is placed by itself.

LARGEST_STRIP_CHUNK = 1 << 20
"""Chunks of more decoded bytes are placed one by one."""
LARGEST_STRIP = 1 << 23
"""Largest number of decoded bytes of a strip: they stay in a third-level cache until they are placed."""


class ChunkStrip(NamedTuple):
    """Chunks of one array that one rank alone reads, and the box of them that lands in its sample.

    Where there is a `box`, they follow each other along the array's last dim and are taken whole along it: the box is
    that of the one chunk that they would make.  Without one it is a single chunk, whose boxes the plan says.
    """

    first: ChunkSection
    chunks: tuple[ChunkIndex, ...]
    box: ChunkBox | None = None

    def section(self, number: int) -> ChunkSection:
        return self.first._replace(job=self.first.job._replace(chunk=self.chunks[number]))


def strips_of_rank(plan: ReadPlan, member: int) -> Iterator[ChunkStrip]:
    """Yield the strips that a rank loads for itself alone, in the plan's order."""
    for array in plan.needed.readers:
        last = _joinable_runs(plan, array, member)
        for chunks in _chunks_in_strips(plan, array, member, last):
            first = ChunkSection(ChunkJob(array, chunks[0], member, (member,)), plan.tables[array])
            run = last.get(chunks[0][-1]) if chunks[0] else None
            if run is None or _is_loaded_in_part(plan, array, chunks[0], member):
                yield ChunkStrip(first, chunks)
                continue
            (box,) = plan.boxes(first.job, member)
            if box.repeats:  # a strip is converted in place, so a chunk that is used twice is placed by itself
                strip = ChunkStrip(first, chunks)
                yield from (ChunkStrip(strip.section(n), (chunk,)) for n, chunk in enumerate(chunks))
                continue
            whole = run._replace(length=len(chunks) * run.length)
            yield ChunkStrip(first, chunks, box._replace(runs=(*box.runs[:-1], (whole,))))


def _joinable_runs(plan: ReadPlan, array: str, member: int) -> dict[int, RowRun]:
    """Return the rows filled by each chunk along the last dim that may be joined."""
    table, geometry = plan.tables[array], plan.needed.geometries[array]
    grid, is_near = table.grid, table.decoder is not None and not table.far
    small = is_near and grid.is_uniform and grid.chunk_bytes <= LARGEST_STRIP_CHUNK
    if not small or len(geometry) != 1 or not geometry[0].ends_in_space:
        return {}
    # whole chunks alone, from their first row and forwards: rows of a strip then follow each other as their bytes do
    n, rows = table.chunks[-1], geometry[0].last(member)
    lone = {c: runs[0] for c, runs in rows.items() if len(runs) == 1}
    return {c: r for c, r in lone.items() if isinstance(r, RowRun) and r == (0, 1, r.target, 1, n)}


def _chunks_in_strips(
    plan: ReadPlan, array: str, member: int, last: dict[int, RowRun]
) -> Iterator[tuple[ChunkIndex, ...]]:
    # Chunks side by side in the array need not be so in the sample: on a dim of four chunks that is rolled by half, 0
    # lands behind 3, and 2 behind nothing.
    after = {c for c, run in last.items() if c - 1 in last and last[c - 1].target + run.length == run.target}
    most = LARGEST_STRIP // max(plan.tables[array].grid.chunk_bytes, 1)
    strip: list[ChunkIndex] = []
    was_whole = False
    for chunk in plan.private_chunks(array, member):
        is_whole = not _is_loaded_in_part(plan, array, chunk, member)
        follows = (
            is_whole
            and was_whole
            and chunk[-1] in after
            and strip[-1] == (*chunk[:-1], chunk[-1] - 1)
            and len(strip) < most
        )
        if strip and not follows:
            yield tuple(strip)
            strip = []
        strip.append(chunk)
        was_whole = is_whole
    if strip:
        yield tuple(strip)


def _is_loaded_in_part(plan: ReadPlan, array: str, chunk: ChunkIndex, member: int) -> bool:
    return plan.found[array].portion(chunk, (member,)) is not None
