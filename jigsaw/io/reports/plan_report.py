"""Report on the read plan of a store for a person, with recommendations of cheaper ones."""

from __future__ import annotations

from collections.abc import Mapping

from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.reading.plan_text import NAMES_LISTED, plan_text
from jigsaw.io.reading.read_plan import ReadPlan
from jigsaw.io.reports.recommend import ChunkOption, MeshOption, ReadFigures, Recommendation
from jigsaw.io.text_tables import align_columns, bytes_text

_BOUNDARY_TEXTS = {"clip": "", "periodic": " (wraps round)"}
_WORTH_TELLING = 1.05  # predictions are not more accurate


def plan_report(dataset: Dataset, plan: ReadPlan) -> str:
    """Return the text of a plan, headed by what is read of which store."""
    frame, layout = dataset.frame, plan.request.layout
    steps, count = layout.shape[:2]
    more = f" and {count - NAMES_LISTED} more" if count > NAMES_LISTED else ""
    names = ", ".join(dataset.fields[:NAMES_LISTED]) + more
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
    head = [
        str(dataset.store.url),
        *dataset.store.notes,
        f"reads {steps} steps of {count} channels ({names}), {space}",
        f"mesh {_mesh_text(dataset)}; halo {', '.join(halos) or 'none'}; {' and '.join(modes)} reading",
        *(f"axis {axis} cuts none of the dims {dims}: all ranks along it read the same" for axis in idle),
    ]
    return plan_text(plan, head, frame.dims)


def advice_report(dataset: Dataset, advice: Recommendation, tables: bool = False) -> str:
    """Describe the best mesh and chunks, and how many times cheaper they read; with `tables`, all candidates."""
    mesh, chunks = advice.meshes[0], advice.chunks[0]
    sizes, shards = _sizes_by_dim_text(chunks.chunks), _sizes_by_dim_text(chunks.shards)
    lines = [
        f"recommended: mesh {_sizes_by_dim_text(mesh.axes) or 'one rank'}, {_cuts_text(mesh)}: "
        f"{_gain_text(advice.mesh_gain)}",
        f"{'':13}chunks {sizes} in shards {shards}: {_gain_text(advice.chunk_gain)}",
    ]
    if advice.chunk_gain > _WORTH_TELLING:
        options = f"--chunks {sizes} --shards {shards}"
        lines.append(f"{'':13}to store it so: python -m jigsaw convert SRC DST {options}")
    if tables:
        lines += [
            "",
            "meshes",
            *_mesh_table(advice),
            "",
            f"chunks for mesh {_mesh_text(dataset)}",
            *_chunk_table(advice),
        ]
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


def _mesh_table(advice: Recommendation) -> list[str]:
    lines = [["mesh", "cuts", "CPU ms", "read", "decoded", "busiest", "sent", "amplification"]]
    for o in advice.meshes:
        f, name = o.figures, _sizes_by_dim_text(o.axes) or "one rank"
        lengths = map(bytes_text, (f.stored_bytes, f.decoded_bytes, f.busiest_bytes, f.sent_bytes))
        lines.append([name, _cuts_text(o), _milliseconds_text(f), *lengths, f"{f.amplification:.2f}"])
    return align_columns(lines)


def _chunk_table(advice: Recommendation, most: int = 12) -> list[str]:
    lines = [["chunks", "shards", "a chunk", "CPU ms", "read", "decoded"]]
    for o in advice.chunks[:most]:
        shapes = _sizes_by_dim_text(o.chunks), _sizes_by_dim_text(o.shards), bytes_text(o.chunk_bytes)
        lines.append([*shapes, _milliseconds_text(o), bytes_text(o.stored_bytes), bytes_text(o.decoded_bytes)])
    now = advice.now
    stored = bytes_text(now.stored_bytes), bytes_text(now.decoded_bytes)
    lines.append(["as stored", "", "", _milliseconds_text(now), *stored])
    return align_columns(lines)


def _milliseconds_text(cost: ReadFigures | ChunkOption) -> str:
    return f"{cost.seconds * 1e3:.3g}"
