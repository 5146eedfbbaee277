"""What a read plan means for a person: a table of ranks, and who decodes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jigsaw.cut import Interval
from jigsaw.io.chunks.lookups import LookupCounts
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.reading.chunk_jobs import NO_OWNER, ReadCounts
from jigsaw.io.reading.read_modes import PLAN_MODES
from jigsaw.io.reading.read_plan import ReadPlan, plan_read
from jigsaw.io.reports.recommend import ChunkOption, MeshOption, ReadFigures, Recommendation

_CHUNKS_LISTED = 6
_BOUNDARY_TEXTS = {"clip": "", "periodic": " (wraps round)"}
_WORTH_TELLING = 1.05  # predictions are no better
_BYTE_UNITS = ((3, "kB"), (6, "MB"), (9, "GB"))


def plan_report(dataset: Dataset, plan: ReadPlan) -> str:
    """The plan of some samples as text: what is read, a line a rank, amplification, who decodes which chunks."""
    blocks = (_plan_lines(dataset, plan), _rank_table(dataset, plan), _amplification_lines(plan), _decoder_lines(plan))
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _plan_lines(dataset: Dataset, plan: ReadPlan) -> list[str]:
    frame, layout = dataset.frame, plan.request.layout
    steps, count = layout.shape[:2]
    more = f" and {count - _CHUNKS_LISTED} more" if count > _CHUNKS_LISTED else ""
    names = ", ".join(dataset.fields[:_CHUNKS_LISTED]) + more
    space = " x ".join(f"{d} {n}" for d, n in zip(frame.dims, frame.sizes, strict=True))
    halos = [
        f"{d} {below}" + (f"+{above}" if above != below else "") + _BOUNDARY_TEXTS.get(b.rule, f" ({b.rule})")
        for d, (below, above), b in zip(frame.dims, frame.halo, frame.boundary, strict=True)
        if below or above
    ]
    modes = sorted(set(plan.modes.values()))
    # axes that cut nothing, because `spec`, or the name of a dim, does not name them
    cutting = {axis for cut in layout.cuts for axis in cut.axes}
    dims, idle = ", ".join(frame.dims), [name for name, n in frame.domain if n > 1 and name not in cutting]
    return [
        str(dataset.store.url),
        *dataset.store.notes,
        f"reads {steps} steps of {count} channels ({names}), {space}",
        f"mesh {_mesh_text(dataset)}; halo {', '.join(halos) or 'none'}; {' and '.join(modes)} reading",
        *(f"axis {axis} cuts none of the dims {dims}: all ranks along it read the same" for axis in idle),
        f"{plan.total.requests} requests{_lookups_text(plan.lookups)}",
    ]


def _lookups_text(lookups: LookupCounts) -> str:
    """What each rank asks the store before it knows where the chunks lie."""
    if not lookups.requests:
        return ""
    read = f"{bytes_text(lookups.bytes)} of shard indices and block tables in {lookups.requests} requests"
    return f"; to plan them, each rank reads {read}, once"


def _rank_table(dataset: Dataset, plan: ReadPlan) -> list[str]:
    dims, axes = dataset.frame.dims, [name for name, _ in dataset.frame.domain]
    layout = plan.request.layout
    columns = ["chunks", "stored", "decoded", "useful", "sent"]
    lines: list[list[str]] = [["rank", *axes, *dims, *columns]]
    for rank, (coord, row) in enumerate(zip(layout.coords(), plan.rows, strict=True)):
        boxes = zip(layout.owned(coord)[2:], layout.held(coord)[2:], strict=True)
        lines.append([str(rank), *map(str, coord), *(_rows_text(*box) for box in boxes), *_figure_texts(row)])
    lines.append(["all", *[""] * (len(axes) + len(dims)), *_figure_texts(plan.total)])
    return align_columns(lines)


def advice_report(dataset: Dataset, found: Recommendation, tables: bool = False) -> str:
    """The best mesh and the best chunks, and how many times cheaper they read; with `tables`, all that were weighed."""
    mesh, chunks = found.meshes[0], found.chunks[0]
    sizes, shards = _sizes_by_dim_text(chunks.chunks), _sizes_by_dim_text(chunks.shards)
    lines = [
        f"recommended: mesh {_sizes_by_dim_text(mesh.axes) or 'one rank'}, {_cuts_text(mesh)}: "
        f"{_gain_text(found.mesh_gain)}",
        f"{'':13}chunks {sizes} in shards {shards}: {_gain_text(found.chunk_gain)}",
    ]
    if found.chunk_gain > _WORTH_TELLING:
        how = f"--chunks {sizes} --shards {shards}"
        lines.append(f"{'':13}to store it so: python -m jigsaw convert SRC DST {how}")
    if tables:
        lines += ["", "meshes", *_mesh_table(found), "", f"chunks for mesh {_mesh_text(dataset)}", *_chunk_table(found)]
    return "\n".join(lines)


def _mesh_text(dataset: Dataset) -> str:
    return ", ".join(f"{name}={n}" for name, n in dataset.frame.axes) or "one rank"


def _gain_text(times: float) -> str:
    return f"{times:.2g} times cheaper to read" if times > _WORTH_TELLING else "about as it is"


def _sizes_by_dim_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{dim}={n}" for dim, n in sizes.items())


def _cuts_text(mesh: MeshOption) -> str:
    moved = [f"{dim} at {','.join(map(str, at[1:-1]))}" for dim, at in mesh.split.items() if not isinstance(at, str)]
    return f"cut at the edges of chunks ({'; '.join(moved)})" if moved else "balanced cuts"


def _mesh_table(found: Recommendation) -> list[str]:
    lines = [["mesh", "cuts", "CPU ms", "read", "decoded", "busiest", "sent", "amplification"]]
    for o in found.meshes:
        f, name = o.figures, _sizes_by_dim_text(o.axes) or "one rank"
        lengths = map(bytes_text, (f.stored_bytes, f.decoded_bytes, f.busiest_bytes, f.sent_bytes))
        lines.append([name, _cuts_text(o), _milliseconds_text(f), *lengths, f"{f.amplification:.2f}"])
    return align_columns(lines)


def _chunk_table(found: Recommendation, most: int = 12) -> list[str]:
    lines = [["chunks", "shards", "a chunk", "CPU ms", "read", "decoded"]]
    for o in found.chunks[:most]:
        shapes = _sizes_by_dim_text(o.chunks), _sizes_by_dim_text(o.shards), bytes_text(o.chunk_bytes)
        lines.append([*shapes, _milliseconds_text(o), bytes_text(o.stored_bytes), bytes_text(o.decoded_bytes)])
    now = found.now
    stored = bytes_text(now.stored_bytes), bytes_text(now.decoded_bytes)
    lines.append(["as stored", "", "", _milliseconds_text(now), *stored])
    return align_columns(lines)


def _milliseconds_text(cost: ReadFigures | ChunkOption) -> str:
    return f"{cost.seconds * 1e3:.3g}"


def _rows_text(owned: Interval, held: Interval) -> str:
    """Rows owned, and how many more are held below and above."""
    below, above = owned[0] - held[0], held[1] - owned[1]
    return f"{owned[0]}:{owned[1]}" + (f" -{below}+{above}" if below or above else "")


def _figure_texts(row: ReadCounts) -> list[str]:
    return [str(row.chunks), *map(bytes_text, (row.stored, row.decoded_bytes, row.useful_bytes, row.sent_bytes))]


def bytes_text(count: int | None) -> str:
    """A number of bytes in the unit that shows it best; None is unknown."""
    if count is None:
        return "unknown"
    if count < 1000:
        return f"{count} B"
    value, unit = next(((count / 10**p, u) for p, u in _BYTE_UNITS if count < 999.5 * 10**p), (count / 1e12, "TB"))
    return f"{value:.3g} {unit}"


def align_columns(lines: Sequence[Sequence[str]], left: bool = False) -> list[str]:
    """Cells under each other, flush right or left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    put = str.ljust if left else str.rjust
    return ["  ".join(put(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _amplification_lines(plan: ReadPlan) -> list[str]:
    meant = "bytes decoded by all ranks / bytes of the needed chunks, each once"
    lines = [f"amplification {plan.amplification:.2f}: {meant}"]
    for mode in PLAN_MODES:
        other = plan_read(plan.request, plan.tables, mode, plan.sizes)
        total = other.total
        lines.append(
            f"  all {mode}: {other.amplification:.2f}, {total.chunks} chunks, {bytes_text(total.stored)} read, "
            f"{bytes_text(total.decoded_bytes)} decoded, {bytes_text(total.sent_bytes)} sent"
        )
    return lines


def _decoder_lines(plan: ReadPlan) -> list[str]:
    """A line an array and rank: how many of its chunks the rank decodes, and the first of them."""
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
            shown = " ".join(listed[:_CHUNKS_LISTED]) + (" …" if len(listed) > _CHUNKS_LISTED else "")
            lines.append(f"    {who}, {len(by_rank[rank])}: {shown}")
    return lines


def _portion_text(plan: ReadPlan, array: str) -> str:
    """How much of an array's chunks is decoded, where that is less than all."""
    parts = [part for job in plan.jobs if job.array == array and (part := plan.part_of(job)) is not None]
    if not parts:
        return ""
    decoded, fetched = sum(p.decoded for p in parts) / len(parts), sum(p.stored for p in parts) / len(parts)
    read = f"{bytes_text(round(fetched))} read, " if fetched else ""
    return f"; of {len(parts)} chunks a part: {read}{bytes_text(round(decoded))} decoded of each"
