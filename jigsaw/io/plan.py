"""Which rank fetches and decodes which chunk, and who gets which box of it.  Integers only: the same on every rank.

The ranks that share a sample hold overlapping boxes of it, and a stored chunk may lie in many of them.  *Independent*:
every rank loads what it needs of each chunk.  *Cooperative*: each chunk is loaded once, by one rank, and cut into the
boxes of all that need it.  *Neighbours*: every rank loads the chunks that it owns rows of, and hands those of the halo
to the ranks that own none.  What a single rank needs it always loads for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from jigsaw.io.boxes import Box, Geometry, Index, Run, geometries
from jigsaw.io.cost import cost
from jigsaw.io.fetch.at_once import at_once
from jigsaw.io.fetch.batches import Batch, batches
from jigsaw.io.fit import check_fits
from jigsaw.io.formats.members import by_member
from jigsaw.io.request import Request
from jigsaw.layout import ShardingError

if TYPE_CHECKING:
    from jigsaw.io.portion import Portion
    from jigsaw.io.table import ArrayTable, ChunkRef

__all__ = ["MODES", "NOBODY", "Box", "Index", "Job", "ReadPlan", "Row", "Run", "plan_read"]

Tables = Mapping[str, "ArrayTable"]
Members = tuple[int, ...]

MODES = ("independent", "neighbours", "cooperative")


class Job(NamedTuple):
    """One chunk to load, by the rank `owner`, for `readers`.  The owner of a missing chunk is `NOBODY`."""

    array: str
    chunk: Index
    owner: int
    readers: Members

    @property
    def is_private(self) -> bool:
        return self.readers == (self.owner,)


NOBODY = -1


@dataclass
class Row:
    """What one rank does in a plan, or did: byte ranges asked for, chunks decoded, and bytes.

    `decoded_bytes` counts whole chunks, or the part of one that is decoded; `useful_bytes` what of them lands in the
    rank's own tile (in the stored dtype), `sent_bytes` what the rank hands to others; `fallback` the chunks that only
    the format's library could decode.
    """

    requests: int = 0
    chunks: int = 0
    fallback: int = 0
    stored_bytes: int = 0
    decoded_bytes: int = 0
    useful_bytes: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Row) -> Row:
        return Row(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class ReadPlan:
    """How the ranks of one domain group read one sample.

    Ranks are numbered in the layout's row-major order.  `modes` says for each array how its chunks are loaded.
    """

    def __init__(self, request: Request, tables: Tables, mode: str) -> None:
        self.request, self.tables = request, tables
        self.ranks = request.layout.ranks
        self._geometry: dict[str, list[Geometry]] = {}
        for number, part in enumerate(request.parts):
            made = geometries(number, part, tables[part.array], request)
            self._geometry.setdefault(part.array, []).extend(made)
        self._readers = {name: self._readers_of(name) for name in self._geometry}
        self._refs: dict[tuple[str, Index], ChunkRef | None] = {}
        self._taken: dict[tuple[str, Index, int], tuple[Box, ...]] = {}
        self._portions: dict[tuple[str, Index, Members], Portion | None] = {}
        self._ask_ahead()
        self.modes = {name: self._mode(name, mode) for name in self._geometry}

    def _ask_ahead(self) -> None:
        """Look up at once what `ref` and `portion` will ask far stores for: the indices of shards, Blosc tables."""
        far = [(name, chunks) for name, chunks in self._readers.items() if self.tables[name].far]
        first = {self.tables[name].path(chunk): (name, chunk) for name, chunks in far for chunk in chunks}
        at_once(lambda each: self.tables[each[0]].locate(each[1]), list(first.values()))
        parts = [(name, chunk) for name, chunks in far if self.tables[name].is_divisible for chunk in chunks]
        at_once(lambda each: [self.portion(*each, (m,)) for m in self._readers[each[0]][each[1]]], parts)

    def _readers_of(self, name: str) -> dict[Index, list[int]]:
        found: dict[Index, list[int]] = {}
        for member in range(self.ranks):
            needed = [chunk for each in self._geometry[name] for chunk in each.chunks(member)]
            for chunk in needed if len(self._geometry[name]) == 1 else dict.fromkeys(needed):
                found.setdefault(chunk, []).append(member)
        return {chunk: found[chunk] for chunk in sorted(found)}

    # -- how each array is read --------------------------------------------------------------------------------------

    def _mode(self, name: str, mode: str) -> str:
        if self.ranks == 1 or all(len(readers) == 1 for readers in self._readers[name].values()):
            return "independent"
        return mode if mode != "auto" else min(MODES, key=lambda each: self.cost(name, each))

    def cost(self, name: str, mode: str) -> float:
        """What reading an array costs in a mode, in CPU seconds over all ranks."""
        requests = stored = decoded = sent = shared = 0
        for chunk, readers in self._readers[name].items():
            for owner, served in self._loads(name, chunk, readers, mode):
                row = self._load(name, chunk, served)
                requests, stored = requests + row.requests, stored + row.stored_bytes
                decoded, shared = decoded + row.decoded_bytes, shared + (len(served) > 1)
                sent += sum(self._landing(name, chunk, m) for m in served if m != owner)
        return cost(self.tables[name], requests, stored, decoded, sent, shared)

    def _loads(self, name: str, chunk: Index, readers: Sequence[int], mode: str) -> list[tuple[int, Members]]:
        """(owner, readers) of every load of a chunk; an owner that is still to be chosen is the first reader."""
        if mode == "cooperative" or len(readers) == 1:
            return [(readers[0], tuple(readers))]
        owning = readers
        if mode == "neighbours":
            owning = [m for m in readers if any(each.owns(chunk, m) for each in self._geometry[name])] or readers[:1]
        borrowing = tuple(m for m in readers if m not in owning)
        first = (owning[0], tuple(sorted((owning[0], *borrowing))))
        return [first, *((m, (m,)) for m in owning[1:])]

    @cached_property
    def redundancy(self) -> dict[str, float]:
        """How many times independent ranks would decode what is needed of each array."""
        found: dict[str, float] = {}
        for name, readers_of in self._readers.items():
            alone = sum(self._load(name, c, (m,)).decoded_bytes for c, readers in readers_of.items() for m in readers)
            once = sum(self._load(name, c, tuple(readers)).decoded_bytes for c, readers in readers_of.items())
            found[name] = alone / once if once else 1.0
        return found

    @property
    def mode(self) -> str:
        """The mode of the array whose ranks share the most."""
        return max(self.modes.values(), key=MODES.index, default="independent")

    # -- chunks ------------------------------------------------------------------------------------------------------

    def ref(self, array: str, chunk: Index) -> ChunkRef | None:
        """Where a chunk lies, looked up once; None when it is missing."""
        key = array, chunk
        if key not in self._refs:
            self._refs[key] = self.tables[array].locate(chunk)
        return self._refs[key]

    def portion(self, array: str, chunk: Index, readers: Members) -> Portion | None:
        """What of a chunk is loaded for these ranks; None for all of it."""
        if not self.tables[array].is_divisible:
            return None
        key = array, chunk, readers
        if key not in self._portions:
            rects = [box.rect for m in readers for box in self._boxes(array, chunk, m)]
            self._portions[key] = self.tables[array].portion(chunk, rects)
        return self._portions[key]

    def _load(self, array: str, chunk: Index, readers: Members) -> Row:
        """What loading a chunk for these ranks takes of the one that does it."""
        ref, table = self.ref(array, chunk), self.tables[array]
        if ref is None:
            return Row()
        part, slow = self.portion(array, chunk, readers), int(table.decoder is None)
        if part is None:
            return Row(1, 1, slow, ref.length or 0, table.bytes_of(chunk))
        return Row(max(len(part.ranges), 1), 1, slow, ref.length or 0 if slow else part.stored, part.decoded)

    # -- jobs --------------------------------------------------------------------------------------------------------

    @cached_property
    def shared(self) -> tuple[Job, ...]:
        """The jobs whose chunk several ranks read, in the order in which all ranks take them."""
        todo = [
            (name, chunk, owner, served)
            for name, readers_of in self._readers.items()
            if self.modes[name] != "independent"
            for chunk, readers in readers_of.items()
            for owner, served in self._loads(name, chunk, readers, self.modes[name])
            if len(served) > 1
        ]
        owners = self._balance(todo)
        return tuple(
            Job(name, chunk, owner, readers) for (name, chunk, _, readers), owner in zip(todo, owners, strict=True)
        )

    def _balance(self, todo: Sequence[tuple[str, Index, int, Members]]) -> list[int]:
        """The owner of each shared chunk: the largest first, each to the rank with the least so far."""
        load = [self._own_load(member) for member in range(self.ranks)] if todo else []
        owners = [NOBODY] * len(todo)
        weights = [self._weight(name, chunk, readers) for name, chunk, _, readers in todo]
        for i in sorted(range(len(todo)), key=lambda i: (-weights[i], i)):
            if weights[i]:
                fixed = self.modes[todo[i][0]] == "neighbours"
                owners[i] = todo[i][2] if fixed else min(range(self.ranks), key=lambda m: (load[m], m))
                load[owners[i]] += weights[i]
        return owners

    def _own_load(self, member: int) -> int:
        return sum(self._weight(job.array, job.chunk, job.readers) for job in self.private(member))

    def _weight(self, array: str, chunk: Index, readers: Members) -> int:
        row = self._load(array, chunk, readers)
        return row.stored_bytes or row.decoded_bytes

    def private(self, member: int) -> Iterator[Job]:
        """The jobs that a rank does for itself alone."""
        for name, readers_of in self._readers.items():
            for chunk, readers in readers_of.items():
                if member in readers and (member, (member,)) in self._loads(name, chunk, readers, self.modes[name]):
                    yield Job(name, chunk, member, (member,))

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Every job of every rank."""
        return self.shared + tuple(job for member in range(self.ranks) for job in self.private(member))

    def batches(self, member: int) -> Iterator[Batch]:
        """The jobs of a rank on far stores, as they are fetched."""
        mine = [job for job in self.shared if job.owner == member]
        return batches(self, [*mine, *self.private(member)])

    def part_of(self, job: Job) -> Portion | None:
        """What of a job's chunk is loaded; None for all of it."""
        return self.portion(job.array, job.chunk, job.readers)

    def boxes(self, job: Job, member: int) -> tuple[Box, ...]:
        """What a rank takes of a job's chunk: a box a part, and one of its rows beyond a pole."""
        return self._boxes(job.array, job.chunk, member)

    def _boxes(self, array: str, chunk: Index, member: int) -> tuple[Box, ...]:
        key = array, chunk, member
        if key not in self._taken:
            found = (each.box(chunk, member) for each in self._geometry[array])
            self._taken[key] = tuple(box for box in found if box is not None)
        return self._taken[key]

    def box_bytes(self, job: Job, member: int) -> int:
        """The bytes of those boxes, in the stored dtype."""
        return self._landing(job.array, job.chunk, member)

    def _landing(self, array: str, chunk: Index, member: int) -> int:
        return sum(prod(box.extents) for box in self._boxes(array, chunk, member)) * self.tables[array].itemsize

    # -- what it will cost -------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """What each rank will do; the engine's counters equal it."""
        rows = [Row() for _ in range(self.ranks)]
        for job in self.jobs:
            for member in job.readers:
                landing = self.box_bytes(job, member)
                rows[member].useful_bytes += landing
                if member != job.owner != NOBODY:
                    rows[job.owner].sent_bytes += landing
            if job.owner != NOBODY:
                rows[job.owner] += self._load(job.array, job.chunk, job.readers)
                if self.tables[job.array].far:
                    rows[job.owner].requests -= self._load(job.array, job.chunk, job.readers).requests
        for member, row in enumerate(rows):
            row.requests += sum(batch.requests for batch in self.batches(member))
        return tuple(rows)

    @property
    def total(self) -> Row:
        return sum(self.rows, Row())

    @cached_property
    def union_bytes(self) -> int:
        """The decoded size of what the sample needs of its chunks, each once."""
        return sum(
            self._load(name, chunk, tuple(readers)).decoded_bytes
            for name, readers_of in self._readers.items()
            for chunk, readers in readers_of.items()
        )

    @property
    def amplification(self) -> float:
        """Bytes that the ranks decode, over those of the needed chunks decoded once."""
        return self.total.decoded_bytes / self.union_bytes if self.union_bytes else 1.0

    @cached_property
    def digest(self) -> int:
        """A number that ranks compare: equal when their plans are."""
        text = repr((self.request, self.modes, self.shared)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")

    def explain(self) -> str:
        """The plan as a table: a line a rank, in MB."""
        lines = [f"{self.mode} reading by {self.ranks} rank(s), amplification {self.amplification:.2f}"]
        for name, readers in self._readers.items():
            table = self.tables[name]
            size = f"{len(readers)} chunks of {table.chunk_bytes / 1e6:.2f} MB {table.chunks}"
            lines.append(f"  {name}: {size}, {self.modes[name]}, {self.redundancy[name]:.2f} readers a chunk")
        lines.append(f"{'rank':>6}{'chunks':>9}{'stored':>10}{'decoded':>10}{'useful':>10}{'sent':>10}")
        for label, row in [*enumerate(self.rows), ("all", self.total)]:
            sizes = (row.stored_bytes, row.decoded_bytes, row.useful_bytes, row.sent_bytes)
            lines.append(f"{label:>6}{row.chunks:>9}" + "".join(f"{size / 1e6:>10.2f}" for size in sizes))
        return "\n".join(lines)


def plan_read(request: Request, tables: Tables, mode: str = "auto") -> ReadPlan:
    """The plan of one sample: the same on every rank, without talking.

    `mode` is ``"cooperative"``, ``"neighbours"``, ``"independent"`` or ``"auto"``, which takes the cheapest of them
    for each array (`jigsaw.io.cost`).

    Raises: `ShardingError` or `ReadError` when the parts do not fill the sample exactly once, or do not fit the arrays.
    """
    if mode not in ("auto", *MODES):
        raise ShardingError(f"mode={mode!r} must be one of {['auto', *MODES]}")
    check_fits(request, tables)
    return ReadPlan(by_member(request, tables), tables, mode)
