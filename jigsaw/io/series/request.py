"""Request of one sample: what it needs of the stored arrays, and where each value goes. Integers and numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from jigsaw.errors import FieldError, GridError, MissingArrayError, ShardingError, UnsupportedStoreError, WindowError
from jigsaw.geometry.layout import Layout
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.series.boundary import DimBoundary

IndexPicks = tuple[tuple[int, int], ...]

DROPPED_DIM = -1
MISSING_RULES = ("error", "fill")
"""Rules for a chunk that the store lacks."""


@dataclass(frozen=True)
class ReadPart:
    """One stored array's contribution to a sample.

    An entry a *stored* dim:

    - `picks`: None for a spatial dim (the layout cuts it), else pairs (stored index, destination index);
    - `to`: the destination dim that it lands in: 0 time, 1 channel, 2 and up space; `DROPPED_DIM` for a dim of which
      one index is picked and which the destination lacks.

    `at` fixes the destination dims that the array lacks, as pairs (dim, index): ``((1, 3),)`` puts a variable without
    levels into channel 3; a static field is one part a destination step.  `flip` lists the stored dims that run
    against the layout's rows.  `first` is where a window begins that is smaller than the array: for each stored dim the
    row that is the layout's row 0 (its last one along a flipped dim; 0 for dims that are picked from).  A window as
    long as the array wraps: it is rolled.
    """

    array: str
    picks: tuple[IndexPicks | None, ...]
    to: tuple[int, ...]
    at: tuple[tuple[int, int], ...] = ()
    flip: tuple[int, ...] = ()
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReadRequest:
    """One sample [T, C, \\*space]: y = x * scale + offset, a channel each, after the file's own scale, offset and fill.

    `layout` is that of the sample over the ranks that share it; its held intervals are what is read.  `nan` says what
    becomes of missing values: ``"keep"``, ``"raise"`` (`NaNError`), or the number that stands in the result for them.
    With `gaps`, a (time, channel) that no part fills is left as it is, instead of refused.
    `missing` says what becomes of chunks whose object the store has not: ``"error"`` (`MissingChunkError`) or
    ``"fill"``, the array's fill value.
    `boundary` says for each spatial dim what rows beyond its ends show; without it they wrap.  `vectors` are the
    channels that change sign in turned rows.
    """

    layout: Layout
    parts: tuple[ReadPart, ...]
    scale: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    dtype: str = "float32"
    nan: str | float = "keep"
    gaps: bool = False
    boundary: tuple[DimBoundary, ...] = ()
    missing: str = "error"
    vectors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        channels = self.layout.cuts[1].size
        if not self.scale:
            object.__setattr__(self, "scale", (1.0,) * channels)
        if not self.offset:
            object.__setattr__(self, "offset", (0.0,) * channels)


def runs_of_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return pairs (source, target) as runs (source, source step, target, target step, count), in their order."""
    runs: list[tuple[int, int, int, int, int]] = []
    for source, target in pairs:
        if runs:
            s, ds, t, dt, n = runs[-1]
            step = (source - s, target - t) if n == 1 else (ds, dt)
            fits = source == s + n * step[0] and target == t + n * step[1]
            if fits and step[0] != 0 and step[1] != 0:
                runs[-1] = (s, step[0], t, step[1], n + 1)
                continue
        runs.append((source, 1, target, 1, 1))
    return tuple(runs)


def check_request_fits(request: ReadRequest, tables: Mapping[str, ArrayTable]) -> None:
    """Raise `ShardingError` or a `ReadError` that names the part, the array and the dim, unless the request fits."""
    layout = request.layout
    if any(count != 1 for count in layout.groups) or layout.ndim < 2:
        raise ShardingError(f"cannot read into {layout}: a sample is [T, C, *space] with no dims flattened together")
    for part in request.parts:
        _check_part_fits(part, tables, request)
    _check_sample_filled(request)


def _check_part_fits(part: ReadPart, tables: Mapping[str, ArrayTable], request: ReadRequest) -> None:
    if part.array not in tables:
        raise MissingArrayError(f"the store has no array {part.array!r}; it has {', '.join(sorted(tables))}")
    table = tables[part.array]
    if table.dtype[1] not in "biuf":
        raise UnsupportedStoreError(
            f"array {part.array!r} has dtype {table.dtype!r}; only numbers can be read into a sample"
        )
    table.check_readable()  # refused here, alike on every rank
    if not len(part.picks) == len(part.to) == table.grid.ndim:
        raise FieldError(
            f"array {part.array!r} has dims {table.dims} and the part {len(part.picks)} picks, "
            f"{len(part.to)} destinations"
        )
    landing = [to for to in part.to if to != DROPPED_DIM] + [dim for dim, _ in part.at]
    if sorted(landing) != list(range(request.layout.ndim)):
        raise FieldError(
            f"array {part.array!r}: its dims land in {sorted(landing)} and the sample's are "
            f"0..{request.layout.ndim - 1}, each once"
        )
    for d, (picks, to) in enumerate(zip(part.picks, part.to, strict=True)):
        _check_dim_fits(part, table, request, d, picks, to)


def _check_dim_fits(
    part: ReadPart, table: ArrayTable, request: ReadRequest, d: int, picks: IndexPicks | None, to: int
) -> None:
    size, name = table.shape[d], f"dim {table.dims[d]!r} of array {part.array!r}"
    if picks is None:
        wanted = request.layout.cuts[to].size
        if part.first:
            first, last = part.first[d], part.first[d] + wanted
            if first < 0 or (last > size and not (wanted == size and first < size)):  # a whole dim may be rolled
                raise WindowError(f"rows {first}..{last} are outside {name}, which has {size}")
        elif to < 2 or size != wanted:
            raise GridError(f"{name} has {size} rows and lands in dim {to} of the sample, which has {wanted}")
        return
    if to == DROPPED_DIM and len(picks) != 1:
        raise FieldError(f"{name} is dropped, so exactly one index of it must be picked, not {len(picks)}")
    beyond = [source for source, _ in picks if not 0 <= source < size]
    if beyond:
        raise WindowError(f"index {beyond[0]} is outside {name}, which has {size}")


def _check_sample_filled(request: ReadRequest) -> None:
    """Check that every (time, channel) of the sample comes from exactly one part."""
    times, channels = request.layout.cuts[0].size, request.layout.cuts[1].size
    seen: dict[tuple[int, int], str] = {}
    for part in request.parts:
        stored = zip(part.picks, part.to, strict=True)
        targets = {to: [t for _, t in picks] for picks, to in stored if picks is not None}
        targets |= {dim: [index] for dim, index in part.at}
        for where in product(targets.get(0, []), targets.get(1, [])):
            if where in seen or not (0 <= where[0] < times and 0 <= where[1] < channels):
                beyond = f"is outside the sample's {times} x {channels}"
                why = f"also comes from array {seen[where]!r}" if where in seen else beyond
                raise FieldError(f"(time, channel) {where} of array {part.array!r} {why}")
            seen[where] = part.array
    if len(seen) != times * channels and not request.gaps:
        lacking = next(w for w in product(range(times), range(channels)) if w not in seen)
        raise FieldError(f"(time, channel) {lacking} of the sample comes from no array")
