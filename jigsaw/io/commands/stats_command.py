"""``python -m jigsaw stats``: statistics of a store's channels, on one rank, under torchrun, or on a dask cluster."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from jigsaw.errors import FieldError
from jigsaw.io.commands import parse_options as options
from jigsaw.io.datasets.opening import open
from jigsaw.io.series.statistics import Statistics, check_statistics_path
from jigsaw.io.stats.compute import WEIGHT_RULES, statistics
from jigsaw.ranks.mesh import init_mesh, mesh_coordinate


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_shared_options(parser, "store", "--fields", "--time", "--every", "--select", "--outside", "--missing")
    parser.add_argument("--output", required=True, metavar="stats.nc", help="the file to write: .nc, .npz or .json")
    parser.add_argument(
        "--weights", choices=WEIGHT_RULES, default="none", help="area: weight rows by their share of the sphere"
    )
    ranks = "under torchrun; by default all cut the time"
    parser.add_argument("--mesh", type=options.parse_integers, metavar="data=2,lat=2", help=ranks)
    parser.add_argument("--block", type=int, metavar="8", help="steps read together; by default 128 MiB of them")
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    parser.add_argument("--checkpoint", metavar="FILE", help="by default the output with .part behind it")
    parser.add_argument("--no-progress", action="store_true", help="no bar")
    cluster = parser.add_mutually_exclusive_group()
    options.add_shared_options(cluster, "--scheduler")
    local: dict[str, Any] = {"type": options.parse_count, "nargs": "?", "const": 0, "metavar": "WORKERS"}
    cluster.add_argument(
        "--dask", **local, help="the same as --scheduler local, with this number of workers (one a core)"
    )


@options.report_refusals
def run(args: argparse.Namespace) -> int:
    """Write the file and print its content; return 1 and print the reason when there are no statistics."""
    checkpoint = args.checkpoint or f"{args.output}.part"
    check_statistics_path(args.output)
    if os.path.realpath(checkpoint) == os.path.realpath(args.output):
        raise FieldError(f"--checkpoint {checkpoint} is the file of --output, and a checkpoint is removed at the end")
    scheduler = args.scheduler if args.dask is None else "local"
    with options.scheduler_client(scheduler, args.dask) as client:
        if (client is not None) and args.mesh:
            raise FieldError(
                f"--mesh {args.mesh} is for ranks of torchrun, and dask's workers read whole steps; leave one out"
            )
        mesh = init_mesh(device="cpu", **(args.mesh or {"data": -1}))
        chosen = {name: getattr(args, name) for name in ("fields", "time", "every", "select", "missing")}
        # float64: what a store packs as integers is not rounded before it is summed
        dataset = open(args.store, mesh=mesh, **chosen, dtype="float64", options={"outside": args.outside})
        stats = statistics(
            dataset,
            weights=args.weights,
            block=args.block,
            checkpoint=checkpoint,
            resume=args.resume,
            progress=not args.no_progress,
            client=client,
        )
    if client is not None or not any(mesh_coordinate(dataset.device_mesh())):
        stats.write(args.output)
        Path(checkpoint).unlink(missing_ok=True)
        print(statistics_report(stats) + f"\n\nwritten to {args.output}")
    return 0


def statistics_report(stats: Statistics) -> str:
    """Return a table with a line for each channel."""
    width = max(map(len, ("channel", *stats.fields)))
    shown = ("mean", "std", "min", "max", "diff_std", "missing")
    lines = [f"{'channel':<{width}} " + " ".join(f"{name:>12}" for name in shown)]
    for name in stats.fields:
        numbers = stats[name]
        lines.append(f"{name:<{width}} " + " ".join(f"{numbers[s]:>12.6g}" for s in shown))
    facts = stats.attrs
    return f"{facts['steps']} steps of {facts['store']}, {facts['first']} to {facts['last']}\n" + "\n".join(lines)
