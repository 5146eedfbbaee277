"""Which rank fetches and decodes which chunk, and who gets which box of it.  Integers only: the same on every rank.

The ranks that share a sample hold overlapping boxes of it, and a stored chunk may lie in many of them.  *Independent*:
every rank loads each chunk that it needs.  *Cooperative*: each chunk is loaded once, by one rank, and cut into the
boxes of all that need it; a chunk that a single rank needs is that rank's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from jigsaw.io.errors import FieldError, GridError, MissingArrayError, UnsupportedStoreError, WindowError
from jigsaw.io.request import DROPPED, Part, Picks, Request, runs_of
from jigsaw.layout import Cut, Interval, ShardingError

if TYPE_CHECKING:
    from jigsaw.io.table import ArrayTable, ChunkRef

Index = tuple[int, ...]
Tables = Mapping[str, "ArrayTable"]

REDUNDANCY = 1.2
"""Cooperate when independent reading would decode more than this many times what is needed."""


class Run(NamedTuple):
    """`length` rows of a chunk, from `source` by `source_step`, and the local rows that they fill."""

    source: int
    source_step: int
    target: int
    target_step: int
    length: int


class Box(NamedTuple):
    """What one rank takes of a chunk for one part: the product of the runs of each stored dim."""

    part: int
    runs: tuple[tuple[Run, ...], ...]
    at: tuple[tuple[int, int], ...]

    @property
    def extents(self) -> tuple[int, ...]:
        """The number of rows along each stored dim."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)


class Job(NamedTuple):
    """One chunk to load, by the rank `owner`, for `readers`.  The owner of a missing chunk is `NOBODY`."""

    array: str
    chunk: Index
    owner: int
    readers: tuple[int, ...]

    @property
    def is_private(self) -> bool:
        return self.readers == (self.owner,)


NOBODY = -1


@dataclass
class Row:
    """What one rank does in a plan, or did: byte ranges asked for, chunks decoded, and bytes.

    `decoded_bytes` counts whole chunks, `useful_bytes` what of them lands in the rank's own tile (in the stored dtype),
    `sent_bytes` what the rank hands to others; `fallback` the chunks that only the format's library could decode.
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


# -- from one dim's rows to runs -------------------------------------------------------------------------------------

ByChunk = dict[int, tuple[Run, ...]]


def _by_chunk(pairs: Sequence[tuple[int, int]], chunk: int) -> ByChunk:
    split: dict[int, list[tuple[int, int]]] = {}
    for source, target in pairs:
        split.setdefault(source // chunk, []).append((source % chunk, target))
    return {c: tuple(Run(*run) for run in runs_of(rows)) for c, rows in split.items()}


@lru_cache(maxsize=4096)
def _space_runs(held: Interval, size: int, chunk: int, flip: bool) -> ByChunk:
    """The runs of a spatial dim: rows beyond its ends wrap, since only periodic dims hold such."""
    rows = ((x % size, x - held[0]) for x in range(*held))
    return _by_chunk([(size - 1 - row if flip else row, target) for row, target in rows], chunk)


@lru_cache(maxsize=4096)
def _pick_runs(picks: Picks, held: Interval, chunk: int) -> ByChunk:
    start, stop = held
    return _by_chunk([(source, target - start) for source, target in picks if start <= target < stop], chunk)


class _Geometry:
    """Of one part: for each rank and stored dim the chunks that it needs, and which rows of them."""

    def __init__(self, number: int, part: Part, table: ArrayTable, request: Request) -> None:
        self._part, self._at = number, [request.layout.cuts[dim] for dim, _ in part.at]
        self._fixed = part.at
        self._dims: list[tuple[Cut | None, list[ByChunk]]] = []
        for d, (picks, to) in enumerate(zip(part.picks, part.to, strict=True)):
            cut = None if to == DROPPED else request.layout.cuts[to]
            chunk, size = table.chunks[d], table.shape[d]
            if picks is None:
                assert cut is not None
                runs = [_space_runs(held, size, chunk, d in part.flip) for held in cut.held]
            elif cut is None:
                runs = [_pick_runs(((picks[0][0], 0),), (0, 1), chunk)]
            else:
                runs = [_pick_runs(picks, held, chunk) for held in cut.held]
            self._dims.append((cut, runs))
        self._rows = [self._row(request, coord) for coord in request.layout.coords()]
        self._fixed_at = [self._fix(request, coord) for coord in request.layout.coords()]

    def _row(self, request: Request, coord: Index) -> list[ByChunk]:
        return [runs[request.layout.piece(cut, coord) if cut else 0] for cut, runs in self._dims]

    def _fix(self, request: Request, coord: Index) -> tuple[tuple[int, int], ...] | None:
        found: list[tuple[int, int]] = []
        for (dim, index), cut in zip(self._fixed, self._at, strict=True):
            start, stop = cut.held[request.layout.piece(cut, coord)]
            if not start <= index < stop:
                return None
            found.append((dim, index - start))
        return tuple(found)

    def chunks(self, member: int) -> Iterator[Index]:
        """The chunks that a rank needs."""
        return iter(()) if self._fixed_at[member] is None else product(*self._rows[member])

    def box(self, chunk: Index, member: int) -> Box | None:
        """What a rank takes of a chunk; None for nothing."""
        at = self._fixed_at[member]
        runs = tuple(row.get(c, ()) for row, c in zip(self._rows[member], chunk, strict=True))
        return None if at is None or not all(runs) else Box(self._part, runs, at)


# -- the plan --------------------------------------------------------------------------------------------------------


class ReadPlan:
    """How the ranks of one domain group read one sample.

    Ranks are numbered in the layout's row-major order.  `modes` says for each array whether its chunks are loaded
    cooperatively.
    """

    def __init__(self, request: Request, tables: Tables, mode: str) -> None:
        self.request, self.tables = request, tables
        self.ranks = request.layout.ranks
        self._geometry: dict[str, list[_Geometry]] = {}
        for number, part in enumerate(request.parts):
            made = _Geometry(number, part, tables[part.array], request)
            self._geometry.setdefault(part.array, []).append(made)
        self._readers = {name: self._readers_of(name) for name in self._geometry}
        self._refs: dict[tuple[str, Index], ChunkRef | None] = {}
        self.redundancy = self._redundancy()
        self.modes = {name: self._mode(name, mode) for name in self._geometry}

    def _readers_of(self, name: str) -> dict[Index, list[int]]:
        found: dict[Index, list[int]] = {}
        for member in range(self.ranks):
            needed = [chunk for each in self._geometry[name] for chunk in each.chunks(member)]
            for chunk in needed if len(self._geometry[name]) == 1 else dict.fromkeys(needed):
                found.setdefault(chunk, []).append(member)
        return {chunk: found[chunk] for chunk in sorted(found)}

    def _redundancy(self) -> dict[str, float]:
        """How many times independent ranks would decode each array's needed chunks."""
        return {name: sum(map(len, r.values())) / max(len(r), 1) for name, r in self._readers.items()}

    def _mode(self, name: str, mode: str) -> str:
        if mode == "auto":
            return "cooperative" if self.redundancy[name] > REDUNDANCY else "independent"
        return mode if self.ranks > 1 else "independent"

    @property
    def mode(self) -> str:
        """ "cooperative" when any array is."""
        return "cooperative" if "cooperative" in self.modes.values() else "independent"

    def ref(self, array: str, chunk: Index) -> ChunkRef | None:
        """Where a chunk lies, looked up once; None when it is missing."""
        key = array, chunk
        if key not in self._refs:
            self._refs[key] = self.tables[array].locate(chunk)
        return self._refs[key]

    @cached_property
    def shared(self) -> tuple[Job, ...]:
        """The jobs whose chunk several ranks read, in the order in which all ranks take them."""
        todo = [
            (name, chunk, tuple(readers))
            for name, readers_of in self._readers.items()
            if self.modes[name] == "cooperative"
            for chunk, readers in readers_of.items()
            if len(readers) > 1
        ]
        owners = self._balance(todo)
        return tuple(
            Job(name, chunk, owner, readers) for (name, chunk, readers), owner in zip(todo, owners, strict=True)
        )

    def _balance(self, todo: Sequence[tuple[str, Index, tuple[int, ...]]]) -> list[int]:
        """The owner of each shared chunk: the largest first, each to the rank with the least so far."""
        load = [self._own_load(member) for member in range(self.ranks)] if todo else []
        owners = [NOBODY] * len(todo)
        weights = [self._weight(name, chunk) for name, chunk, _ in todo]
        for i in sorted(range(len(todo)), key=lambda i: (-weights[i], i)):
            if weights[i]:
                owners[i] = min(range(self.ranks), key=lambda m: (load[m], m))
                load[owners[i]] += weights[i]
        return owners

    def _own_load(self, member: int) -> int:
        return sum(self._weight(job.array, job.chunk) for job in self.private(member))

    def _weight(self, array: str, chunk: Index) -> int:
        found = self.ref(array, chunk)
        return 0 if found is None else found.length or self.tables[array].chunk_bytes

    def private(self, member: int) -> Iterator[Job]:
        """The jobs that a rank does for itself alone."""
        for name, readers_of in self._readers.items():
            alone = self.modes[name] == "independent"
            for chunk, readers in readers_of.items():
                if member in readers and (alone or len(readers) == 1):
                    yield Job(name, chunk, member, (member,))

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Every job of every rank."""
        return self.shared + tuple(job for member in range(self.ranks) for job in self.private(member))

    def boxes(self, job: Job, member: int) -> tuple[Box, ...]:
        """What a rank takes of a job's chunk, at most one box a part."""
        found = (each.box(job.chunk, member) for each in self._geometry[job.array])
        return tuple(box for box in found if box is not None)

    def box_bytes(self, job: Job, member: int) -> int:
        """The bytes of those boxes, in the stored dtype."""
        size = sum(prod(box.extents) for box in self.boxes(job, member))
        return size * self.tables[job.array].itemsize

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
            self._add_load(job, rows)
        return tuple(rows)

    def _add_load(self, job: Job, rows: list[Row]) -> None:
        found = self.ref(job.array, job.chunk)
        if found is not None:
            table = self.tables[job.array]
            rows[job.owner] += Row(1, 1, int(table.decoder is None), found.length, table.chunk_bytes)

    @property
    def total(self) -> Row:
        return sum(self.rows, Row())

    @cached_property
    def union_bytes(self) -> int:
        """The decoded size of the chunks that the sample needs, each once."""
        keys = ((name, chunk) for name, readers in self._readers.items() for chunk in readers)
        return sum(self.tables[name].chunk_bytes for name, chunk in keys if self.ref(name, chunk) is not None)

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

    `mode` is ``"cooperative"``, ``"independent"`` or ``"auto"``, which decides for each array by `REDUNDANCY`.

    Raises: `ShardingError` or `ReadError` when the parts do not fill the sample exactly once, or do not fit the arrays.
    """
    if mode not in ("auto", "cooperative", "independent"):
        raise ShardingError(f"mode={mode!r} must be 'auto', 'cooperative' or 'independent'")
    layout = request.layout
    if any(count != 1 for count in layout.groups) or layout.ndim < 2:
        raise ShardingError(f"cannot read into {layout}: a sample is [T, C, *space] with no dims flattened together")
    for part in request.parts:
        _check_part(part, tables, request)
    _check_filled(request)
    return ReadPlan(request, tables, mode)


def _check_part(part: Part, tables: Tables, request: Request) -> None:
    if part.array not in tables:
        raise MissingArrayError(f"the store has no array {part.array!r}; it has {', '.join(sorted(tables))}")
    table = tables[part.array]
    if table.dtype[1] not in "biuf":
        raise UnsupportedStoreError(
            f"array {part.array!r} has dtype {table.dtype!r}; only numbers can be read into a sample"
        )
    if not len(part.picks) == len(part.to) == table.ndim:
        raise FieldError(
            f"array {part.array!r} has dims {table.dims} and the part {len(part.picks)} picks, "
            f"{len(part.to)} destinations"
        )
    landing = [to for to in part.to if to != DROPPED] + [dim for dim, _ in part.at]
    if sorted(landing) != list(range(request.layout.ndim)):
        raise FieldError(
            f"array {part.array!r}: its dims land in {sorted(landing)} and the sample's are "
            f"0..{request.layout.ndim - 1}, each once"
        )
    for d, (picks, to) in enumerate(zip(part.picks, part.to, strict=True)):
        _check_dim(part, table, request, d, picks, to)


def _check_dim(part: Part, table: ArrayTable, request: Request, d: int, picks: Picks | None, to: int) -> None:
    size, name = table.shape[d], f"dim {table.dims[d]!r} of array {part.array!r}"
    if picks is None:
        wanted = request.layout.cuts[to].size
        if to < 2 or size != wanted:
            raise GridError(f"{name} has {size} rows and lands in dim {to} of the sample, which has {wanted}")
        return
    if to == DROPPED and len(picks) != 1:
        raise FieldError(f"{name} is dropped, so exactly one index of it must be picked, not {len(picks)}")
    beyond = [source for source, _ in picks if not 0 <= source < size]
    if beyond:
        raise WindowError(f"index {beyond[0]} is outside {name}, which has {size}")


def _check_filled(request: Request) -> None:
    """Every (time, channel) of the sample comes from exactly one part."""
    times, channels = request.layout.cuts[0].size, request.layout.cuts[1].size
    seen: dict[tuple[int, int], str] = {}
    for part in request.parts:
        fixed = dict(part.at)
        targets = {
            to: [t for _, t in picks] for picks, to in zip(part.picks, part.to, strict=True) if picks is not None
        }
        landing = [[fixed[dim]] if dim in fixed else targets.get(dim, []) for dim in (0, 1)]
        for where in product(landing[0], landing[1]):
            if where in seen or not (0 <= where[0] < times and 0 <= where[1] < channels):
                why = (
                    f"also comes from array {seen[where]!r}"
                    if where in seen
                    else f"is outside the sample's {times} x {channels}"
                )
                raise FieldError(f"(time, channel) {where} of array {part.array!r} {why}")
            seen[where] = part.array
    if len(seen) != times * channels:
        lacking = next(w for w in product(range(times), range(channels)) if w not in seen)
        raise FieldError(f"(time, channel) {lacking} of the sample comes from no array")
