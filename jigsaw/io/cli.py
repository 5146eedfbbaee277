"""``python -m jigsaw plan``: what each rank of a mesh would read of a store.  It needs no ranks."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jigsaw.io import coords
from jigsaw.io.dataset import Dataset
from jigsaw.io.errors import GridError, ReadError
from jigsaw.io.explain import report
from jigsaw.io.opening import open
from jigsaw.io.picture import draw
from jigsaw.io.plan import MODES
from jigsaw.layout import ShardingError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument("--mesh", type=_integers, default={}, metavar="lat=2,lon=2", help="mesh axes and their sizes")
    parser.add_argument("--halo", type=_halo, default=0, metavar="2", help="rows of halo, for all dims or lat=2,lon=3")
    parser.add_argument("--fields", type=_names, metavar="t2m,z500", help="channels; by default every variable")
    parser.add_argument(
        "--spec", type=_spec, metavar="lat=lat,lon=lon", help="which axis cuts which dim; a+b for several"
    )
    parser.add_argument(
        "--boundary", type=_pairs, metavar="lon=periodic", help="by default longitudes wrap round if they can"
    )
    parser.add_argument(
        "--inputs", type=_offsets, default=[0], metavar="-1,0", help="input steps (write --inputs=-1,0)"
    )
    parser.add_argument("--targets", type=_offsets, default=[1], metavar="1", help="target steps")
    parser.add_argument("--samples", type=_offsets, default=[0], metavar="0", help="the samples that are read together")
    parser.add_argument("--select", type=_integers, metavar="number=0", help="the index in any other dim")
    parser.add_argument("--mode", choices=("auto", *MODES), default="auto")
    parser.add_argument("--plot", metavar="plan.png", help="draw the plan")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 with the reason when there is none."""
    try:
        dataset = _opened(args)
        plan = dataset.plan(args.samples)
        if args.plot:
            draw(dataset, plan, args.plot)
        print(report(dataset, plan) + (f"\n\ndrawn to {args.plot}" if args.plot else ""))
    except (ReadError, ShardingError, IndexError) as refused:
        print(f"{type(refused).__name__}: {refused}", file=sys.stderr)
        return 1
    return 0


def _opened(args: argparse.Namespace) -> Dataset:
    def attempt(boundary: dict[str, str]) -> Dataset:
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


# -- values of options ------------------------------------------------------------------------------------------------


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _pairs(text: str) -> dict[str, str]:
    found = [entry.partition("=") for entry in _names(text)]
    if any(not (key and sign and value) for key, sign, value in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like lat=2,lon=2")
    return {key: value for key, _, value in found}


def _integers(text: str) -> dict[str, int]:
    try:
        return {key: int(value) for key, value in _pairs(text).items()}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like lat=2,lon=2 with whole numbers") from None


def _halo(text: str) -> int | dict[str, int]:
    return int(text) if text.isdecimal() else _integers(text)


def _spec(text: str) -> dict[str, Any]:
    return {dim: tuple(axes.split("+")) for dim, axes in _pairs(text).items()}


def _offsets(text: str) -> list[int]:
    try:
        return [int(entry) for entry in _names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like -1,0") from None
