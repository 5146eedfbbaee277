"""Options shared by the commands (lists of names, sizes by dim, spans of time), clusters, and refusals."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from jigsaw.errors import ReadError, ShardingError, WriteError
from jigsaw.io.series.cell_grid import CELL_ORDERS
from jigsaw.io.series.request import MISSING_RULES
from jigsaw.io.stats.cluster import dask_client

if TYPE_CHECKING:
    from dask.distributed import Client

CommandFunction = Callable[[argparse.Namespace], int]


def report_refusals(command: CommandFunction) -> CommandFunction:
    """Wrap the command so that a refusal is printed in one line, with exit status 1."""

    @wraps(command)
    def told(args: argparse.Namespace) -> int:
        try:
            return command(args)
        except BrokenPipeError:
            raise  # the reader of the pipe has read enough
        except (ReadError, WriteError, ShardingError, IndexError, OSError) as refused:
            print(f"{type(refused).__name__}: {refused}", file=sys.stderr)
            return 1

    return told


def parse_names(text: str) -> list[str]:
    """Parse ``t2m,z500``."""
    return [name for name in text.split(",") if name]


def parse_pairs(text: str) -> dict[str, str]:
    """Parse ``lat=a,lon=b``."""
    pairs = [entry.partition("=") for entry in parse_names(text)]
    if any(not (key and sign and value) for key, sign, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like lat=2,lon=2")
    named = [key for key, _, _ in pairs]
    twice = sorted({key for key in named if named.count(key) > 1})
    if twice:
        raise argparse.ArgumentTypeError(f"{text!r} names {twice[0]} twice")
    return {key: value for key, _, value in pairs}


def parse_integers(text: str) -> dict[str, int]:
    """Parse ``lat=2,lon=2``."""
    try:
        return {key: int(value) for key, value in parse_pairs(text).items()}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like lat=2,lon=2 with whole numbers") from None


def parse_halo(text: str) -> int | dict[str, int]:
    """Parse ``2`` for all dims, or ``lat=2,lon=3``."""
    return int(text) if text.isdecimal() else parse_integers(text)


def parse_boundary(text: str) -> dict[str, Any]:
    """Parse ``lon=periodic,lat=fill:0``: the rule beyond the ends of each dim."""
    rules: dict[str, Any] = {}
    for dim, rule in parse_pairs(text).items():
        name, colon, value = rule.partition(":")
        try:
            rules[dim] = (name, float(value)) if colon else name
        except ValueError:
            raise argparse.ArgumentTypeError(f"{dim}={rule} is not a rule like lat=fill:0 with a number") from None
    return rules


def parse_spec(text: str) -> dict[str, Any]:
    """Parse ``lat=lat,lon=lon+depth``: the axes that cut each dim."""
    return {dim: tuple(axes.split("+")) for dim, axes in parse_pairs(text).items()}


def parse_offsets(text: str) -> list[int]:
    """Parse ``-1,0``."""
    try:
        return [int(entry) for entry in parse_names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like -1,0") from None


def parse_samples(text: str) -> list[int]:
    """Parse ``0,1``, at least one."""
    samples = parse_offsets(text)
    if not samples:
        raise argparse.ArgumentTypeError("names no sample; give at least one, like 0")
    return samples


def parse_count(text: str) -> int:
    """Parse ``4``, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_time_span(text: str) -> tuple[Any, Any]:
    """Parse ``1979..2015``, dates with both ends included, or positions like ``0..100``."""
    first, dots, last = text.partition("..")
    if not dots:
        raise argparse.ArgumentTypeError(f"{text!r} is not a span like 1979..2015, 2020-01-01..2020-06-30 or 0..100")
    ends = [end for end in (first, last) if end]
    # four digits are a year, unless the other end is a step
    steps = all(end.isdecimal() for end in ends) and any(len(end) != 4 for end in ends)
    start, stop = ((int(end) if steps else end) if end else None for end in (first, last))
    return start, stop


def parse_every(text: str) -> str | int:
    """Parse ``6h``, or a number of steps."""
    return int(text) if text.isdecimal() else text


def parse_outside(text: str) -> bool | list[str]:
    """Parse ``s3://bucket,/data``, or ``all``."""
    return text == "all" or parse_names(text)


_SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "store": {"help": "path or URL of the store"},
    "--fields": {"type": parse_names, "metavar": "t2m,z500", "help": "channels; by default every variable"},
    "--select": {"type": parse_integers, "metavar": "number=0", "help": "the index in any other dim"},
    "--dims": {"type": parse_pairs, "metavar": "lat=j,lon=i", "help": "what the store's dims are"},
    "--time": {"type": parse_time_span, "metavar": "1979..2015", "help": "dates, both included, or steps like 0..100"},
    "--every": {"type": parse_every, "default": 1, "metavar": "6h", "help": "thin the steps: a duration, or a number"},
    "--outside": {
        "type": parse_outside,
        "default": False,
        "metavar": "s3://bucket,/data",
        "help": "where links and references of the store may lead beyond its own folder; all: anywhere",
    },
    "--missing": {
        "choices": MISSING_RULES,
        "default": "error",
        "help": "chunks that the store lacks: an error, or fill values",
    },
    "--order": {
        "choices": CELL_ORDERS,
        "default": "store",
        "help": "of cells: along a curve their pieces have short borders",
    },
    "--scheduler": {
        "default": "threads",
        "metavar": "threads|local|tcp://host:8786",
        "help": "this process, a local dask cluster, or a running one",
    },
}


def add_shared_options(parser: Any, *names: str) -> None:
    """Add the options that several commands have, alike in all."""
    for name in names:
        parser.add_argument(name, **_SHARED_OPTIONS[name])


def scheduler_client(scheduler: str, workers: int | None) -> AbstractContextManager[Client | None]:
    """Return the client of the cluster that ``--scheduler`` names or starts; None for threads."""
    if scheduler == "threads":
        return nullcontext()
    return dask_client(None if scheduler == "local" else scheduler, workers)
