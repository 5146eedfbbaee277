"""``python -m jigsaw convert``: anything that xarray opens as a sharded Zarr store for training."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jigsaw.io.commands import parse_options as options
from jigsaw.io.conversion.convert import Converted, convert, is_complete_store, verify
from jigsaw.io.reports.plan_report import bytes_text
from jigsaw.io.stats.cluster import dask_client

if TYPE_CHECKING:
    from dask.distributed import Client


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("source", nargs="+", help="paths, a URL, or a quoted glob; several files are joined")
    parser.add_argument("target", help="the Zarr store to make; a conversion that was ended goes on")
    parser.add_argument("--fields", type=options.parse_names, metavar="t2m,z500", help="by default every variable")
    parser.add_argument(
        "--time", type=options.parse_time_span, metavar="1979..2015", help="dates, both included, or positions"
    )
    parser.add_argument("--every", type=options.parse_every, default=1, metavar="6h", help="thin the steps")
    parser.add_argument(
        "--mesh",
        type=options.parse_integers,
        default={},
        metavar="lat=2,lon=2",
        help="what will read it: chunks are for it",
    )
    parser.add_argument(
        "--chunks", type=options.parse_integers, metavar="time=1,lat=361", help="by default recommended ones"
    )
    parser.add_argument(
        "--shards", type=options.parse_integers, metavar="time=8,lat=722", help="by default up to 128 MiB"
    )
    parser.add_argument("--dims", type=options.parse_pairs, metavar="lat=j,lon=i", help="what the source's dims are")
    parser.add_argument("--dtype", metavar="float32", help="what floats are rounded to, if anything")
    parser.add_argument("--engine", metavar="cfgrib", help="xarray's engine, where it does not find it")
    parser.add_argument(
        "--scheduler",
        default="threads",
        metavar="threads|local|tcp://host:8786",
        help="threads of this process, a local dask cluster, or a running one",
    )
    parser.add_argument(
        "--workers", type=options.parse_count, metavar="N", help="threads, or workers of a local cluster"
    )
    parser.add_argument("--verify", action="store_true", help="read the whole store again and compare digests")
    parser.add_argument("--replace", action="store_true", help="start again, whatever Zarr store there is")


@options.report_refusals
def run(args: argparse.Namespace) -> int:
    """Convert and say what was made; 1 with the reason when it failed."""
    target = Path(args.target)
    if not (args.verify and not args.replace and target.is_dir() and is_complete_store(target)):
        print(conversion_report(_run_conversion(args)))
    if args.verify:
        return _verify_target(args.target)
    return 0


def _run_conversion(args: argparse.Namespace) -> Converted:
    with _conversion_client(args) as client:
        return convert(
            args.source[0] if len(args.source) == 1 else args.source,
            args.target,
            fields=args.fields,
            time=args.time,
            every=args.every,
            mesh=args.mesh,
            chunks=args.chunks,
            shards=args.shards,
            dims=args.dims,
            dtype=args.dtype,
            engine=args.engine,
            client=client,
            threads=args.workers,
            replace=args.replace,
            progress=_ProgressLine() if sys.stderr.isatty() else None,
        )


def conversion_report(made: Converted) -> str:
    """A line an array: its chunks, shards and size."""
    lines = [f"{made.path}: {made.written} regions written and read back, {made.kept} were there"]
    for array in made.arrays:
        shape = ", ".join(f"{d} {n}" for d, n in zip(array.dims, array.shape, strict=True))
        nbytes = bytes_text(int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize)
        shards = f" in shards of {array.shards}" if array.shards else ""
        lines.append(f"  {array.name} ({shape}) {array.dtype}, {nbytes}: chunks of {array.chunks}{shards}")
    return "\n".join(lines)


def _verify_target(target: str) -> int:
    found = verify(target)
    wrong = [name for name, same in found.items() if not same]
    if wrong:
        print(f"WriteError: {target} is damaged: {', '.join(wrong)} have other values than the source", file=sys.stderr)
        return 1
    print(f"verified: {len(found)} arrays have the digests of their source")
    return 0


class _ProgressLine:
    """One line of progress that is written over."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, done: int, whole: int) -> None:
        rate = done / max(time.monotonic() - self._began, 1e-6)
        end = "\n" if done >= whole else ""
        print(
            f"\r{bytes_text(done)} of {bytes_text(whole)}, {bytes_text(int(rate))}/s ",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def _conversion_client(args: argparse.Namespace) -> AbstractContextManager[Client | None]:
    """The client of the cluster that was named or started; None for threads."""
    if args.scheduler == "threads":
        return nullcontext()
    return dask_client(None if args.scheduler == "local" else args.scheduler, args.workers)
