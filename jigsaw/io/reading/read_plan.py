"""Plan of a read: which rank fetches and decodes which chunk, and who gets which box of it. Every rank finds the same
plan without messages, because it follows from the request and from where the store says that chunks lie.

The ranks that share a sample hold overlapping boxes of it, and a stored chunk may lie in many of them. `independent`:
every rank loads what it needs of each chunk. `cooperative`: each chunk is loaded once, by one rank, and cut into the
boxes of all that need it. `neighbors`: every rank loads the chunks that it owns rows of, and hands those of the halo
to the ranks that own none. A chunk that a single rank needs is always loaded by that rank.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Interval
from jigsaw.io.chunks.array_table import JoinedArrays
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.chunk_finder import LookupCounts
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.portion import ChunkPortion
from jigsaw.io.chunks.remote_files import ask_at_once
from jigsaw.io.reading.chunk_boxes import ChunkBox
from jigsaw.io.reading.chunk_jobs import COUNT_COLUMN, NO_OWNER, ChunkJob, CountsTable, ReadCounts, ReaderRanks
from jigsaw.io.reading.chunk_readers import ChunkReaders
from jigsaw.io.reading.found_chunks import ArrayTables, FoundChunks, look_up_chunks
from jigsaw.io.reading.needed_chunks import NeededChunks, check_request_fits
from jigsaw.io.reading.read_modes import (
    PLAN_MODES,
    FetchBatch,
    choose_mode,
    cost_of_mode,
    fetch_batches,
    sent_values,
    shared_jobs,
)
from jigsaw.io.reading.shared_jobs import SharedJobs
from jigsaw.io.series.request import ReadPart, ReadRequest
from jigsaw.io.text_tables import align_columns, bytes_text

ObjectSizes = Mapping[str, "int | None"]

NAMES_LISTED = 6
_WAYS = {
    "cooperative": "what they need of each is read and decoded once, by one rank, which hands the others their parts",
    "neighbors": "each rank reads and decodes what it owns rows of, and hands halos to the ranks that own none",
    "independent": "each rank reads and decodes for itself what it needs of them",
}


@dataclass(frozen=True, eq=False, repr=False)
class ReadPlan:
    """Plan by which the ranks of one domain group read one sample.

    Ranks are numbered in the layout's row-major order.  `modes` says for each array how its chunks are loaded.  `sizes`
    are those of far objects that hold one chunk each, None for missing ones; they change nothing but `rows`, because
    ranks that read do not ask for them.

    ``print(plan)`` explains it: what each rank reads, decodes, keeps and hands over, and why.
    """

    needed: NeededChunks
    found: FoundChunks
    modes: Mapping[str, str]
    sizes: ObjectSizes = field(default_factory=dict[str, "int | None"])

    @property
    def request(self) -> ReadRequest:
        return self.needed.request

    @property
    def tables(self) -> ArrayTables:
        return self.found.tables

    @property
    def ranks(self) -> int:
        return self.needed.ranks

    # -- how each array is read --------------------------------------------------------------------------------------

    def cost(self, name: str, mode: str) -> float:
        """Return the cost of reading an array in a mode, in CPU seconds over all ranks."""
        return cost_of_mode(self.found, name, mode)

    def in_mode(self, mode: str) -> ReadPlan:
        """Return the plan of the same request with all arrays read in `mode`, as `plan_read` takes it."""
        return replace(self, modes={name: choose_mode(self.found, name, mode) for name in self.modes})

    @property
    def reasons(self) -> str:
        """Explanation of the plan: which rank has which chunks, and what each way of reading would cost."""
        return "\n".join(plan_reasons(self))

    def __str__(self) -> str:
        return plan_text(self)

    # -- chunks ------------------------------------------------------------------------------------------------------

    def ref(self, array: str, chunk: ChunkIndex) -> ChunkRef | None:
        return self.found[array].ref(chunk)

    def _known_size(self, row: CountsTable, array: str, chunk: ChunkIndex) -> CountsTable:
        """Return counts of loading a chunk, a row or several, with its stored size where `sizes` has it."""
        ref, unsized = self.ref(array, chunk), row[..., COUNT_COLUMN["unsized"]] > 0
        if ref is None or ref.path not in self.sizes or not unsized.any():
            return row
        size, known = self.sizes[ref.path], row.copy()
        if size is None:
            known[unsized] = ReadCounts(1, missing=1).row
        else:
            known[unsized, COUNT_COLUMN["stored_bytes"]], known[unsized, COUNT_COLUMN["unsized"]] = size, 0
        return known

    def _counts_of(self, array: str, chunk: ChunkIndex, readers: ReaderRanks) -> CountsTable:
        """Count what loading a chunk for these ranks takes."""
        return self._known_size(self.found[array].load_counts(chunk, readers).row, array, chunk)

    # -- jobs --------------------------------------------------------------------------------------------------------

    @cached_property
    def shared(self) -> SharedJobs:
        """The jobs whose chunk several ranks read, in the order in which all ranks take them."""
        return shared_jobs(self.found, self.modes)

    def private(self, member: int) -> Iterator[ChunkJob]:
        for name in self.needed.readers:
            for chunk in self.private_chunks(name, member):
                yield ChunkJob(name, chunk, member, (member,))

    def private_chunks(self, name: str, member: int) -> list[ChunkIndex]:
        """Return the chunks of an array that a rank loads for itself alone, in C order."""
        readers_of, mode = self.needed.readers[name], self.modes[name]
        loads, shared, _ = readers_of.pattern.totals(mode)
        if mode == "independent" or loads == shared:  # every chunk is, or none
            return self.needed.chunks(name, member) if mode == "independent" else []
        return [chunk for chunk in self.needed.chunks(name, member) if readers_of[chunk].is_alone(member, mode)]

    @property
    def chunk_bytes(self) -> int:
        return max((self.tables[name].grid.chunk_bytes for name in self.modes), default=0)

    @property
    def jobs(self) -> tuple[ChunkJob, ...]:
        return (*self.shared, *(job for member in range(self.ranks) for job in self.private(member)))

    def batches(self, member: int) -> Iterator[FetchBatch]:
        return fetch_batches(self.found, [*self._shared_by_owner[member], *self.private(member)])

    @cached_property
    def _shared_by_owner(self) -> defaultdict[int, list[ChunkJob]]:
        found: defaultdict[int, list[ChunkJob]] = defaultdict(list)
        for job in self.shared:
            found[job.owner].append(job)
        return found

    def part_of(self, job: ChunkJob) -> ChunkPortion | None:
        return self.found[job.array].portion(job.chunk, job.readers)

    def boxes(self, job: ChunkJob, member: int) -> tuple[ChunkBox, ...]:
        return self.needed.boxes(job.array, job.chunk, member)

    def where(self, job: ChunkJob, box: ChunkBox) -> str:
        """Return the first step, level, … of a box, as an error names it."""
        table, picks = self.tables[job.array], self.request.parts[box.part].picks
        dims = zip(table.dims, picks, table.grid.along, job.chunk, box.runs, strict=True)
        at = [
            f"{name} {along.start(c) + runs[0].source}" for name, picked, along, c, runs in dims if picked is not None
        ]
        return ", ".join(at) or "its only step"

    def box_bytes(self, job: ChunkJob, member: int) -> int:
        return self.needed.box_bytes(job.array, job.chunk, member)

    # -- what it will cost -------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[ReadCounts, ...]:
        """Work that each rank will do; the engine's counters equal it."""
        table = np.zeros((self.ranks, len(COUNT_COLUMN)), np.int64)
        singly = np.zeros(self.ranks, np.int64)
        useful, sent, requests = (COUNT_COLUMN[name] for name in ("useful_bytes", "sent_bytes", "requests"))
        for name, chunk, readers in self._chunks():
            table[readers.at, useful] += readers.values * self.tables[name].grid.itemsize
            if len(alone := readers.loads(self.modes[name]).alone):
                rows = self._known_size(self.found[name].counts_alone(chunk)[alone], name, chunk)
                table[readers.at[alone]] += rows
                singly[readers.at[alone]] += rows[:, requests] * self.tables[name].far
        for job in self.shared:
            if job.owner == NO_OWNER:
                table[job.readers[0], COUNT_COLUMN["missing"]] += 1  # all its readers fill, and one counts it
            else:
                row = self._counts_of(job.array, job.chunk, job.readers)
                table[job.owner] += row
                singly[job.owner] += row[requests] * self.tables[job.array].far
                table[job.owner, sent] += sent_values(self.found, job) * self.tables[job.array].grid.itemsize
        if not all(each.has_own_objects() for each in self.found.values() if each.table.far):
            # one request may bring many chunks of an object: those are counted by the batch
            batched = [sum(batch.requests for batch in self.batches(member)) for member in range(self.ranks)]
            table[:, requests] += np.array(batched) - singly
        return tuple(ReadCounts(*row) for row in table.tolist())

    def _chunks(self) -> Iterator[tuple[str, ChunkIndex, ChunkReaders]]:
        for name, readers_of in self.needed.readers.items():
            for chunk, readers in readers_of.items():
                yield name, chunk, readers

    @cached_property
    def missing(self) -> Mapping[str, tuple[ChunkIndex, ...]]:
        """The needed chunks that are not in the store, by array; of far stores those that `sizes` tell of."""
        found = {
            name: tuple(chunk for chunk in readers_of if self._is_missing(name, chunk))
            for name, readers_of in self.needed.readers.items()
        }
        return {name: chunks for name, chunks in found.items() if chunks}

    def _is_missing(self, array: str, chunk: ChunkIndex) -> bool:
        ref = self.ref(array, chunk)
        return ref is None or (ref.path in self.sizes and self.sizes[ref.path] is None)

    @property
    def total(self) -> ReadCounts:
        return sum(self.rows, ReadCounts())

    @cached_property
    def union_bytes(self) -> int:
        """The decoded size of what the sample needs of its chunks, each once."""
        return sum(
            int(self._counts_of(name, chunk, readers.ranks)[COUNT_COLUMN["decoded_bytes"]])
            for name, chunk, readers in self._chunks()
        )

    def ask_sizes(self) -> ReadPlan:
        """Return this plan with complete `sizes`: every object of unknown size is looked up, many at a time."""
        unknown = {
            ref.path: self.tables[name].places.files
            for name, readers_of in self.needed.readers.items()
            if self.tables[name].far
            for chunk in readers_of
            if (ref := self.ref(name, chunk)) is not None and ref.length is None and ref.path not in self.sizes
        }
        sizes = dict(self.sizes)
        ask_at_once(lambda path: sizes.update({path: unknown[path].size(path)}), list(unknown))
        return replace(self, sizes=sizes)

    @property
    def lookups(self) -> LookupCounts:
        """Look-ups for all `rows` by a rank that knows nothing yet; `ReadEngine.looked_up` has those done."""
        _ = self.rows  # asks for every part
        return self.found.lookups()

    @property
    def amplification(self) -> float:
        """Bytes that the ranks decode, over those of the needed chunks decoded once."""
        return self.total.decoded_bytes / self.union_bytes if self.union_bytes else 1.0

    @cached_property
    def digest(self) -> int:
        """Number that ranks compare: equal when their plans are."""
        # Private jobs follow from request and modes. A rank's findings in a store enter by `shared`. Ranks that see
        # other chunks, of a store that is written meanwhile, balance them otherwise, and must not go on: their order
        # and owners differ, and all else of the jobs follows from these. Seven bytes fit the arena's signed words.
        text = repr((self.request, self.modes, self.shared.order.digest)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


def plan_read(
    request: ReadRequest, tables: ArrayTables, mode: str = "auto", sizes: ObjectSizes | None = None
) -> ReadPlan:
    """Plan the reading of one sample: the same on every rank. No rank is asked; a store may be asked where chunks lie.

    `mode` is ``"cooperative"``, ``"neighbors"``, ``"independent"`` or ``"auto"``, which takes the cheapest of them for
    each array (`jigsaw.io.reading.read_modes`). `sizes` are those of far objects, where another plan looked them up.

    Raises: `ShardingError` or `ReadError` when the parts do not fill the sample exactly once, or do not fit the arrays.
    """
    if mode not in ("auto", *PLAN_MODES):
        raise ShardingError(f"mode={mode!r} must be one of {['auto', *PLAN_MODES]}")
    check_request_fits(request, tables)
    return make_read_plan(_split_joined_parts(request, tables), tables, mode, sizes)


def make_read_plan(request: ReadRequest, tables: ArrayTables, mode: str, sizes: ObjectSizes | None = None) -> ReadPlan:
    """Make the plan of a request of stored arrays in three steps: the ranks' needs, the places in far stores, the mode
    of each array. Only the second may wait for a store, or fail for one rank alone. The third asks near stores where a
    choice depends on them (`docs/design.md` says why).
    """
    needed = NeededChunks(request, {part.array: tables[part.array].grid for part in request.parts})
    found = look_up_chunks(needed, tables)
    return ReadPlan(needed, found, {name: choose_mode(found, name, mode) for name in needed.readers}, sizes or {})


def _split_joined_parts(request: ReadRequest, tables: ArrayTables) -> ReadRequest:
    """Split each part that reads a joined array into one part for each array that it joins."""
    found = [(part, tables[part.array].members) for part in request.parts]
    if not any(joined for _, joined in found):
        return request
    parts = [each for part, joined in found for each in (_parts_by_array(part, joined) if joined else [part])]
    return replace(request, parts=tuple(parts))


def _parts_by_array(part: ReadPart, joined: JoinedArrays) -> list[ReadPart]:
    """Split a part into one for each of the joined arrays that it needs."""
    # of 12 files with 4 steps each, rows 3, 4 and 9 are: row 3 of the first, row 0 of the second, row 1 of the third
    picks = part.picks[joined.dim]
    assert picks is not None
    found: dict[int, list[tuple[int, int]]] = {}
    for source, target in picks:
        number = joined.find(source)
        found.setdefault(number, []).append((source - joined.edges[number], target))
    before, after = part.picks[: joined.dim], part.picks[joined.dim + 1 :]
    return [
        replace(part, array=joined.names[i], picks=(*before, tuple(pairs), *after))
        for i, pairs in sorted(found.items())
    ]


# -- the text of a plan -----------------------------------------------------------------------------------------------


def plan_text(plan: ReadPlan, head: Sequence[str] = (), dims: Sequence[str] = ()) -> str:
    """Return a plan as text: what is read, the table of ranks, the reasons, the other ways, who decodes which chunks.

    A report that knows more than the plan gives its own `head` and names of `dims`.
    """
    layout = plan.request.layout
    steps, channels = layout.shape[:2]
    dims = dims or _stored_dims(plan)
    space = " x ".join(f"{dim} {n}" for dim, n in zip(dims, layout.shape[2:], strict=True))
    axes = ", ".join(f"{name}={n}" for name, n in layout.axes)
    who = f"{plan.ranks} ranks ({axes})" if plan.ranks > 1 else "one rank"
    blocks = (
        [
            *(head or [f"{steps} steps of {channels} channels, {space}, read by {who}"]),
            f"{plan.total.requests} requests{_lookups_text(plan.lookups)}",
            *_missing_chunk_lines(plan),
        ],
        _rank_table(plan, dims),
        plan_reasons(plan),
        _amplification_lines(plan),
        _decoder_lines(plan),
    )
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _missing_chunk_lines(plan: ReadPlan) -> list[str]:
    """Say how many needed chunks are not in the store, and what becomes of them; no line where none is missing."""
    missing = sum(map(len, plan.missing.values()))
    if not missing:
        return []
    count = sum(map(len, plan.needed.readers.values()))
    lacking = [
        chunk
        for name, chunks in plan.missing.items()
        for chunk in chunks
        if plan.request.missing == "error" and plan.tables[name].finder.lacks_object(chunk)
    ]
    refused = f"; missing='error' refuses {len(lacking)} of them" if lacking else ""
    return [f"{missing} of {count} chunks are missing, and stand for fill values{refused}"]


def plan_reasons(plan: ReadPlan) -> list[str]:
    """Say for the arrays that are chunked and read alike which rank has which chunks, how they are read, and why."""
    alike: dict[tuple[str, tuple[int, ...], int, int, int], list[str]] = {}
    for name, mode in plan.modes.items():
        readers, table = plan.needed.readers[name], plan.tables[name]
        shared = sum(len(each) > 1 for each in readers.pattern.readers)
        alike.setdefault((mode, table.chunks, table.grid.chunk_bytes, len(readers), shared), []).append(name)
    lines: list[str] = []
    for (mode, chunks, size, count, shared), names in alike.items():
        more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
        each, plural = " each" * (len(names) > 1), "s" * (count > 1)
        what = f"{count} chunk{plural} of {' x '.join(map(str, chunks)) or '1'} = {bytes_text(size)}{each}"
        lines.append(f"{', '.join(names[:NAMES_LISTED])}{more}: {what}")
        if not shared:
            lines[-1] += ", none of which two ranks need"
            continue
        needed = "all of which" if shared == count else f"{shared} of which"
        lines[-1] += f", {needed} several ranks need:"
        lines += [f"  {_WAYS[mode]}", f"  {_costs_text(plan, names, mode)}"]
    return lines


def _costs_text(plan: ReadPlan, names: Sequence[str], mode: str) -> str:
    """Describe the costs of the modes, and say whether the chosen one is the cheapest."""
    costs = {each: sum(plan.cost(name, each) for name in names) for each in PLAN_MODES}
    told = ", ".join(f"{each} {float(f'{costs[each] * 1e3:.2g}'):g}" for each in sorted(costs, key=costs.__getitem__))
    why = "the cheapest" if costs[mode] == min(costs.values()) else f"which mode={mode!r} asks for"
    return f"({mode} reading, {why}; predicted CPU ms of all ranks: {told})"


def _lookups_text(lookups: LookupCounts) -> str:
    if not lookups.requests:
        return ""
    read = f"{bytes_text(lookups.bytes)} of shard indices and block tables in {lookups.requests} requests"
    return f"; to plan them, each rank reads {read}, once"


def _stored_dims(plan: ReadPlan) -> list[str]:
    """Return the store's names of the dims of space; a dim that no array has is called by its number."""
    layout = plan.request.layout
    found = {2 + i: f"dim {2 + i}" for i in range(len(layout.shape) - 2)}
    for part in plan.request.parts:
        for name, picks, to in zip(plan.tables[part.array].dims, part.picks, part.to, strict=True):
            if picks is None:
                found[to] = name
    return list(found.values())


def _rank_table(plan: ReadPlan, dims: Sequence[str]) -> list[str]:
    layout = plan.request.layout
    axes = [name for name, _ in layout.axes]
    columns = ["chunks", "stored", "decoded", "useful", "sent"]
    lines: list[list[str]] = [["rank", *axes, *dims, *columns]]
    for rank, (coord, row) in enumerate(zip(layout.coords(), plan.rows, strict=True)):
        boxes = zip(layout.owned(coord)[2:], layout.held(coord)[2:], strict=True)
        lines.append([str(rank), *map(str, coord), *(_rows_text(*box) for box in boxes), *_figure_texts(row)])
    lines.append(["all", *[""] * (len(axes) + len(dims)), *_figure_texts(plan.total)])
    return align_columns(lines)


def _rows_text(owned: Interval, held: Interval) -> str:
    """Describe the rows owned, and how many more are held below and above."""
    below, above = owned[0] - held[0], held[1] - owned[1]
    return f"{owned[0]}:{owned[1]}" + (f" -{below}+{above}" if below or above else "")


def _figure_texts(row: ReadCounts) -> list[str]:
    return [str(row.chunks), *map(bytes_text, (row.stored, row.decoded_bytes, row.useful_bytes, row.sent_bytes))]


def _amplification_lines(plan: ReadPlan) -> list[str]:
    meant = "bytes decoded by all ranks / bytes of the needed chunks, each once"
    lines = [f"amplification {plan.amplification:.2f}: {meant}"]
    for mode in PLAN_MODES:
        other = plan.in_mode(mode)
        total = other.total
        lines.append(
            f"  all {mode}: {other.amplification:.2f}, {total.chunks} chunks, {bytes_text(total.stored)} read, "
            f"{bytes_text(total.decoded_bytes)} decoded, {bytes_text(total.sent_bytes)} sent"
        )
    return lines


def _decoder_lines(plan: ReadPlan) -> list[str]:
    """Return a line for each array and rank: how many of its chunks the rank decodes, and the first of them."""
    owned: dict[str, dict[int, list[tuple[int, ...]]]] = {}
    for job in plan.jobs:
        owner = job.owner if plan.ref(job.array, job.chunk) is not None else NO_OWNER
        owned.setdefault(job.array, {}).setdefault(owner, []).append(job.chunk)
    lines = ["chunks decoded by whom"]
    for array, by_rank in owned.items():
        table = plan.tables[array]
        lines.append(
            f"  {array}: {plan.modes[array]}, chunks of {table.chunks} = "
            f"{bytes_text(table.grid.chunk_bytes)}{_portion_text(plan, array)}"
        )
        for rank in sorted(by_rank):
            who = "missing (fill)" if rank == NO_OWNER else f"rank {rank}"
            listed = [str(chunk).replace(" ", "") for chunk in sorted(set(by_rank[rank]))]
            shown = " ".join(listed[:NAMES_LISTED]) + (" …" if len(listed) > NAMES_LISTED else "")
            lines.append(f"    {who}, {len(by_rank[rank])}: {shown}")
    return lines


def _portion_text(plan: ReadPlan, array: str) -> str:
    """Say how much of an array's chunks is decoded, where that is less than all."""
    parts = [part for job in plan.jobs if job.array == array and (part := plan.part_of(job)) is not None]
    if not parts:
        return ""
    decoded, fetched = sum(p.decoded for p in parts) / len(parts), sum(p.stored for p in parts) / len(parts)
    read = f"{bytes_text(round(fetched))} read, " if fetched else ""
    return f"; of {len(parts)} chunks a part: {read}{bytes_text(round(decoded))} decoded of each"
