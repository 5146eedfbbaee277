"""``python -m jigsaw plan``: what each rank of a mesh would read of a store. It does not need ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jigsaw.errors import GridError, ShardingError
from jigsaw.io.commands import parse_options as options
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.opening import open
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.chunk_readers import PLAN_MODES
from jigsaw.io.reading.plan_text import NAMES_LISTED, align_columns, bytes_text, plan_text
from jigsaw.io.reading.read_plan import ReadPlan
from jigsaw.io.reports.pictures import draw_plan, picture_place
from jigsaw.io.reports.recommend import (
    ChunkOption,
    MeshOption,
    ReadFigures,
    Recommendation,
    is_cheap_recommendation,
    recommend,
)
from jigsaw.io.series import coords


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_shared_options(parser, "store", "--fields", "--select", "--outside", "--missing", "--order")
    sizes: dict[str, Any] = {"type": options.parse_integers, "default": {}}
    parser.add_argument("--mesh", **sizes, metavar="lat=2,lon=2", help="mesh axes and their sizes")
    rows = "rows of halo, for all dims or lat=2,lon=3"
    parser.add_argument("--halo", type=options.parse_halo, default=0, metavar="2", help=rows)
    cuts = "which axis cuts which dim; a+b for several"
    parser.add_argument("--spec", type=options.parse_spec, metavar="lat=lat,lon=lon", help=cuts)
    beyond = "what the halo holds beyond the ends of a dim; by default longitudes wrap round if they can"
    parser.add_argument("--boundary", type=options.parse_boundary, metavar="lon=periodic,lat=fill:0", help=beyond)
    steps: dict[str, Any] = {"type": options.parse_offsets}
    parser.add_argument("--inputs", **steps, default=[0], metavar="-1,0", help="input steps (write --inputs=-1,0)")
    ahead = "target steps; by default 1, and none where there is one step, as in a scan"
    parser.add_argument("--targets", **steps, metavar="1", help=ahead)
    together = "the samples that are read together"
    parser.add_argument("--samples", type=options.parse_samples, default=[0], metavar="0", help=together)
    parser.add_argument("--mode", choices=("auto", *PLAN_MODES), default="auto")
    parser.add_argument("--plot", metavar="plan.png", help="draw the plan")
    ranks = "list the meshes of this number of ranks (by default that of --mesh) and the chunks that read cheapest"
    parser.add_argument("--recommend", type=int, nargs="?", const=True, metavar="RANKS", help=ranks)


@options.report_refusals
def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 and print the reason where there cannot be one."""
    dataset = _open_for_plan(args)
    plan = dataset.plan(args.samples)
    if args.plot:
        draw_plan(dataset, plan, args.plot)
    print("\n\n".join([plan_report(dataset, plan), *_advice_lines(args, dataset, plan)]))
    if args.plot:
        print(f"\ndrawn to {picture_place(args.plot)}")
    return 0


def _advice_lines(args: argparse.Namespace, dataset: Dataset, plan: ReadPlan) -> list[str]:
    if args.recommend is None and not is_cheap_recommendation(dataset, plan):
        return ["recommended: not compared, because there are many chunks; pass --recommend to compare them"]
    ranks = None if args.recommend is True else args.recommend  # True: given without a number
    if ranks is not None and ranks < 1:
        raise ShardingError(f"--recommend {ranks} must be a number of ranks")
    advice = recommend(dataset, ranks=ranks, sample=args.samples[0])
    return [advice_report(dataset, advice, tables=args.recommend is not None)]


def _open_for_plan(args: argparse.Namespace) -> Dataset:
    store = open_store(args.store, {"outside": args.outside})

    def attempt(boundary: dict[str, Any], targets: Sequence[int]) -> Dataset:
        names = ("mesh", "fields", "spec", "halo", "inputs", "select", "missing", "mode", "order")
        return open(store, boundary=boundary, targets=targets, **{name: getattr(args, name) for name in names})

    clipped = attempt(args.boundary or {}, args.targets or [])
    if args.targets is None and len(clipped.times) > 1:
        args.targets = [1]
        clipped = attempt(args.boundary or {}, args.targets)
    if args.boundary is None and "lon" in clipped.frame.dims and _is_lon_periodic(clipped):
        return attempt({"lon": "periodic"}, args.targets or [])
    return clipped


def _is_lon_periodic(dataset: Dataset) -> bool:
    try:
        coords.check_lon_periodic(dataset.whole_coords["lon"])
    except GridError:
        return False
    return True


_BOUNDARY_TEXTS = {"clip": "", "periodic": " (wraps round)"}
_WORTH_TELLING = 1.05  # smaller gains are below the accuracy of the prediction


def _cells_line(dataset: Dataset) -> list[str]:
    """Return a line that says which cells are read, and in which order, where it is another than the store's."""
    rows = None if dataset.turn.cells is None else dataset.turn.cells.rows
    if rows is None:
        return []
    is_ordered = bool((np.diff(rows) > 0).all())
    return [f"{len(rows)} cells of a region" if is_ordered else "cells along a curve"]


def plan_report(dataset: Dataset, plan: ReadPlan) -> str:
    """Return the text of a plan, with a heading that names the store and what is read."""
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
    # axes that cut nothing: neither `spec` nor a dim has their name
    cutting = {axis for cut in layout.cuts for axis in cut.axes}
    dims, idle = ", ".join(frame.dims), [name for name, n in frame.domain if n > 1 and name not in cutting]
    head = [
        str(dataset.store.url),
        *dataset.store.notes,
        f"reads {steps} steps of {count} channels ({names}), {space}",
        f"mesh {_mesh_text(dataset)}; halo {', '.join(halos) or 'none'}; {' and '.join(modes)} reading",
        *_cells_line(dataset),
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
    return f"{times:.2g} times cheaper to read" if times > _WORTH_TELLING else "no cheaper"


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
