"""Checks that the parts of a request fit the arrays and fill the sample exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from jigsaw.errors import FieldError, GridError, MissingArrayError, ShardingError, UnsupportedStoreError, WindowError
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.series.request import DROPPED_DIM, IndexPicks, ReadPart, ReadRequest


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
