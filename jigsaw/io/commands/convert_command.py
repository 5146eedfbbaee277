"""``python -m jigsaw convert``: anything that xarray opens as a sharded Zarr store for training."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jigsaw.io.commands import parse_options as options
from jigsaw.io.conversion.convert import (
    AskedConversion,
    ConversionProgress,
    Converted,
    convert,
    is_complete_store,
    verify,
)
from jigsaw.io.reading.plan_text import bytes_text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("source", nargs="+", help="paths, a URL, or a quoted glob; several files are joined")
    parser.add_argument("target", help="the Zarr store to make; a conversion that was stopped goes on")
    options.add_shared_options(
        parser, "--fields", "--time", "--every", "--dims", "--outside", "--missing", "--order", "--scheduler"
    )
    sizes: dict[str, Any] = {"type": options.parse_integers}
    parser.add_argument(
        "--mesh",
        **sizes,
        default={},
        metavar="lat=2,lon=2",
        help="the mesh that will read it; chunks are chosen for it",
    )
    parser.add_argument("--chunks", **sizes, metavar="time=1,lat=361", help="by default recommended ones")
    parser.add_argument("--shards", **sizes, metavar="time=8,lat=722", help="by default up to 128 MiB")
    parser.add_argument("--dtype", metavar="float32", help="the dtype that floats are rounded to")
    parser.add_argument("--engine", metavar="cfgrib", help="xarray's engine, where xarray cannot tell")
    threads = "number of threads, or of workers of a local cluster"
    parser.add_argument("--workers", type=options.parse_count, metavar="N", help=threads)
    parser.add_argument("--verify", action="store_true", help="read the whole store again and compare digests")
    parser.add_argument("--replace", action="store_true", help="start again, whatever Zarr store there is")


@options.report_refusals
def run(args: argparse.Namespace) -> int:
    """Convert and print what was made; return 1 and print the reason when it failed."""
    target = Path(args.target)
    asked = {field.name: getattr(args, field.name) for field in fields(AskedConversion)}
    source = args.source[0] if len(args.source) == 1 else args.source
    if args.verify and not args.replace and target.is_dir() and is_complete_store(target):
        AskedConversion(**asked).check_converted(source, target)
    else:
        with options.scheduler_client(args.scheduler, args.workers) as client:
            progress = _progress_line() if sys.stderr.isatty() else None
            means: dict[str, Any] = {
                "threads": args.workers,
                "client": client,
                "replace": args.replace,
                "progress": progress,
            }
            print(conversion_report(convert(source, target, **asked, **means)))
    return _verify_target(args.target) if args.verify else 0


def conversion_report(conversion: Converted) -> str:
    """Return a line for each array: its chunks, shards and size."""
    lines = [f"{conversion.path}: {conversion.written} regions written and read back, {conversion.kept} were there"]
    if conversion.filled:
        lines.append(f"  {conversion.filled} chunks that the source lacks were read as fill values")
    for array in conversion.arrays:
        shape = ", ".join(f"{d} {n}" for d, n in zip(array.dims, array.shape, strict=True))
        nbytes = bytes_text(prod(array.shape) * np.dtype(array.dtype).itemsize)
        shards = f" in shards of {array.shards}" if array.shards else ""
        lines.append(f"  {array.name} ({shape}) {array.dtype}, {nbytes}: chunks of {array.chunks}{shards}")
    return "\n".join(lines)


def _verify_target(target: str) -> int:
    faults = verify(target)
    wrong = [name for name, same in faults.items() if not same]
    if wrong:
        print(f"WriteError: {target} is damaged: {', '.join(wrong)} have other values than the source", file=sys.stderr)
        return 1
    print(f"verified: {len(faults)} arrays have the digests of their source")
    return 0


def _progress_line() -> ConversionProgress:
    began = time.monotonic()

    def tell(done: int, whole: int) -> None:
        rate = done / max(time.monotonic() - began, 1e-6)
        line = f"\r{bytes_text(done)} of {bytes_text(whole)}, {bytes_text(int(rate))}/s "
        print(line, end="\n" if done >= whole else "", file=sys.stderr, flush=True)

    return tell
