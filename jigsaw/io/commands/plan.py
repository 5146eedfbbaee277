"""``python -m jigsaw plan``: what each rank of a mesh would read of a store.  It needs no ranks."""

from __future__ import annotations

import argparse
from typing import Any

from jigsaw.io import coords
from jigsaw.io.commands import options
from jigsaw.io.dataset import Dataset
from jigsaw.io.errors import GridError
from jigsaw.io.opening import open
from jigsaw.io.plan import MODES, ReadPlan
from jigsaw.io.reports.explain import advice, report
from jigsaw.io.reports.picture import draw
from jigsaw.io.reports.recommend import is_cheap, recommend
from jigsaw.layout import ShardingError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument(
        "--mesh", type=options.integers, default={}, metavar="lat=2,lon=2", help="mesh axes and their sizes"
    )
    parser.add_argument(
        "--halo", type=options.halo, default=0, metavar="2", help="rows of halo, for all dims or lat=2,lon=3"
    )
    parser.add_argument("--fields", type=options.names, metavar="t2m,z500", help="channels; by default every variable")
    parser.add_argument(
        "--spec", type=options.spec, metavar="lat=lat,lon=lon", help="which axis cuts which dim; a+b for several"
    )
    parser.add_argument(
        "--boundary",
        type=options.boundary,
        metavar="lon=periodic,lat=fill:0",
        help="what the halo holds beyond the ends of a dim; by default longitudes wrap round if they can",
    )
    parser.add_argument(
        "--inputs", type=options.offsets, default=[0], metavar="-1,0", help="input steps (write --inputs=-1,0)"
    )
    parser.add_argument("--targets", type=options.offsets, default=[1], metavar="1", help="target steps")
    parser.add_argument(
        "--samples", type=options.samples, default=[0], metavar="0", help="the samples that are read together"
    )
    parser.add_argument("--select", type=options.integers, metavar="number=0", help="the index in any other dim")
    parser.add_argument("--mode", choices=("auto", *MODES), default="auto")
    parser.add_argument("--plot", metavar="plan.png", help="draw the plan")
    parser.add_argument(
        "--recommend",
        type=int,
        nargs="?",
        const=0,
        metavar="RANKS",
        help="list the meshes of so many ranks (by default as many as --mesh has) and the chunks that read cheapest",
    )


@options.refusing
def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 with the reason when there is none."""
    dataset = _opened(args)
    plan = dataset.plan(args.samples)
    if args.plot:
        draw(dataset, plan, args.plot)
    print("\n\n".join([report(dataset, plan), *_advised(args, dataset, plan)]))
    if args.plot:
        print(f"\ndrawn to {args.plot}")
    return 0


def _advised(args: argparse.Namespace, dataset: Dataset, plan: ReadPlan) -> list[str]:
    """What would be read cheaper: in short where that is known soon, as tables where it is asked for."""
    if args.recommend is None and not is_cheap(dataset, plan):
        return ["recommended: there are many chunks to weigh; --recommend does"]
    if args.recommend is not None and args.recommend < 0:
        raise ShardingError(f"--recommend {args.recommend} must be a number of ranks")
    found = recommend(dataset, ranks=args.recommend or None, sample=args.samples[0])
    return [advice(dataset, found, tables=args.recommend is not None)]


def _opened(args: argparse.Namespace) -> Dataset:
    def attempt(boundary: dict[str, Any]) -> Dataset:
        return open(
            args.store,
            mesh=args.mesh,
            fields=args.fields,
            spec=args.spec,
            halo=args.halo,
            boundary=boundary,
            inputs=args.inputs,
            targets=args.targets,
            select=args.select,
            mode=args.mode,
        )

    clipped = attempt(args.boundary or {})
    if args.boundary is None and "lon" in clipped.frame.dims and _goes_round(clipped):
        return attempt({"lon": "periodic"})
    return clipped


def _goes_round(dataset: Dataset) -> bool:
    try:
        coords.check_periodic(dataset.whole_coords["lon"])
    except GridError:
        return False
    return True
