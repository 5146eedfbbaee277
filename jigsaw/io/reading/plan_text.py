"""Text of a read plan: what is read, by whom, why so, and what else it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jigsaw.geometry.cut import Interval
from jigsaw.io.chunks.chunk_finder import LookupCounts
from jigsaw.io.reading.chunk_readers import NO_OWNER, PLAN_MODES, ReadCounts

if TYPE_CHECKING:
    from jigsaw.io.reading.read_plan import ReadPlan

NAMES_LISTED = 6
_WAYS = {
    "cooperative": "what they need of each is read and decoded once, by one rank, which hands the others their parts",
    "neighbors": "each rank reads and decodes what it owns rows of, and hands halos to the ranks that own none",
    "independent": "each rank reads and decodes for itself what it needs of them",
}


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
        shared = sum(len(every) > 1 for every in readers.pattern.readers)
        alike.setdefault((mode, table.chunks, table.grid.chunk_bytes, len(readers), shared), []).append(name)
    lines: list[str] = []
    for (mode, chunks, size, count, shared), names in alike.items():
        more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
        every, plural = " each" * (len(names) > 1), "s" * (count > 1)
        chunk_text = f"{count} chunk{plural} of {' x '.join(map(str, chunks)) or '1'} = {bytes_text(size)}{every}"
        lines.append(f"{', '.join(names[:NAMES_LISTED])}{more}: {chunk_text}")
        if not shared:
            lines[-1] += ", none of which two ranks need"
            continue
        needed = "all of which" if shared == count else f"{shared} of which"
        lines[-1] += f", {needed} several ranks need:"
        lines += [f"  {_WAYS[mode]}", f"  {_costs_text(plan, names, mode)}"]
    return lines


def _costs_text(plan: ReadPlan, names: Sequence[str], mode: str) -> str:
    costs = {way: sum(plan.cost(name, way) for name in names) for way in PLAN_MODES}
    listed = ", ".join(f"{way} {float(f'{costs[way] * 1e3:.2g}'):g}" for way in sorted(costs, key=costs.__getitem__))
    why = "the cheapest" if costs[mode] == min(costs.values()) else f"which mode={mode!r} asks for"
    return f"({mode} reading, {why}; predicted CPU ms of all ranks: {listed})"


def _lookups_text(lookups: LookupCounts) -> str:
    if not lookups.requests:
        return ""
    read = f"{bytes_text(lookups.bytes)} of shard indices and block tables in {lookups.requests} requests"
    return f"; to plan them, each rank reads {read}, once"


def _stored_dims(plan: ReadPlan) -> list[str]:
    """Return the store's names of the dims of space; a dim that no array has is called by its number."""
    layout = plan.request.layout
    names = {2 + i: f"dim {2 + i}" for i in range(len(layout.shape) - 2)}
    for part in plan.request.parts:
        for name, picks, to in zip(plan.tables[part.array].dims, part.picks, part.to, strict=True):
            if picks is None:
                names[to] = name
    return list(names.values())


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
    below, above = owned[0] - held[0], held[1] - owned[1]
    return f"{owned[0]}:{owned[1]}" + (f" -{below}+{above}" if below or above else "")


def _figure_texts(row: ReadCounts) -> list[str]:
    return [str(row.chunks), *map(bytes_text, (row.stored, row.decoded_bytes, row.useful_bytes, row.sent_bytes))]


def _amplification_lines(plan: ReadPlan) -> list[str]:
    meaning = "bytes decoded by all ranks / bytes of the needed chunks, each once"
    lines = [f"amplification {plan.amplification:.2f}: {meaning}"]
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
    parts = [part for job in plan.jobs if job.array == array and (part := plan.part_of(job)) is not None]
    if not parts:
        return ""
    decoded, fetched = sum(p.decoded for p in parts) / len(parts), sum(p.stored for p in parts) / len(parts)
    read = f"{bytes_text(round(fetched))} read, " if fetched else ""
    return f"; of {len(parts)} chunks a part: {read}{bytes_text(round(decoded))} decoded of each"


_BYTE_UNITS = ((3, "kB"), (6, "MB"), (9, "GB"))


def bytes_text(count: int | None) -> str:
    """Return a number of bytes in the unit that shows it best; None is unknown."""
    if count is None:
        return "unknown"
    if count < 1000:
        return f"{count} B"
    value, unit = next(((count / 10**p, u) for p, u in _BYTE_UNITS if count < 999.5 * 10**p), (count / 1e12, "TB"))
    return f"{value:.3g} {unit}"


def align_columns(lines: Sequence[Sequence[str]], left: bool = False) -> list[str]:
    """Align cells in columns, flush right or left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    put = str.ljust if left else str.rjust
    return ["  ".join(put(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
