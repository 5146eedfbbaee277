"""``python -m jigsaw plan``: what each rank of a mesh would read of a store. It does not need ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jigsaw.errors import GridError, ShardingError
from jigsaw.io.commands import parse_options as options
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.opening import open
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.chunk_readers import PLAN_MODES
from jigsaw.io.reading.read_plan import ReadPlan
from jigsaw.io.reports.pictures import draw_plan
from jigsaw.io.reports.plan_report import advice_report, plan_report
from jigsaw.io.reports.recommend import is_cheap_recommendation, recommend
from jigsaw.io.series import coords


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_shared_options(parser, "store", "--fields", "--select", "--outside", "--missing")
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
    ranks = "list the meshes of so many ranks (by default as many as --mesh has) and the chunks that read cheapest"
    parser.add_argument("--recommend", type=int, nargs="?", const=0, metavar="RANKS", help=ranks)


@options.report_refusals
def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 with the reason when there is none."""
    dataset = _open_for_plan(args)
    plan = dataset.plan(args.samples)
    if args.plot:
        draw_plan(dataset, plan, args.plot)
    print("\n\n".join([plan_report(dataset, plan), *_advice_lines(args, dataset, plan)]))
    if args.plot:
        print(f"\ndrawn to {args.plot}")
    return 0


def _advice_lines(args: argparse.Namespace, dataset: Dataset, plan: ReadPlan) -> list[str]:
    if args.recommend is None and not is_cheap_recommendation(dataset, plan):
        return ["recommended: there are many chunks to weigh; --recommend does"]
    if args.recommend is not None and args.recommend < 0:
        raise ShardingError(f"--recommend {args.recommend} must be a number of ranks")
    advice = recommend(dataset, ranks=args.recommend or None, sample=args.samples[0])
    return [advice_report(dataset, advice, tables=args.recommend is not None)]


def _open_for_plan(args: argparse.Namespace) -> Dataset:
    store = open_store(args.store, {"outside": args.outside})

    def attempt(boundary: dict[str, Any], targets: Sequence[int]) -> Dataset:
        names = ("mesh", "fields", "spec", "halo", "inputs", "select", "missing", "mode")
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
