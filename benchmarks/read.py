"""Reads samples of ERA5-shaped data and of scans, jigsaw among its contenders: one JSON object a case and contender.

    python benchmarks/read.py --case globe-2x2 tiles --repeat 5 --output benchmarks/results/read-MACHINE-MONTH.jsonl

A case is a store, a mesh and a question: `cases.py` has them, `contenders.py` who is asked, `stores.py` the data,
`team.py` how it is measured.  All contenders of a case give every rank the same bits, which the checksum shows.
`wall_s` and `cpu_s` (user and system, all threads of all ranks) are medians for one sample; `peak_rss_bytes` is that
of the largest rank, shared memory that it touched included; bytes are sums over the ranks.  `report.py` makes
`docs/reading.md` of the result file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import cases
import stores


def hardware() -> str:
    """This machine, in words."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = named[0] if named else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory:.0f} GiB, data in the page cache"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--case", nargs="+", choices=list(cases.CASES), default=list(cases.CASES))
    made.add_argument("--engine", nargs="+", default=(), help="only these contenders")
    made.add_argument("--repeat", type=int, default=5, help="turns of each contender that are measured")
    made.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="where the stores are kept")
    made.add_argument("--small", action="store_true", help="toy size")
    made.add_argument("--fresh", action="store_true", help="write the stores again")
    made.add_argument("--output", type=Path, help="a result file, that begins with hardware, date and command")
    made.add_argument("--hardware", default=None, help="what the result file says of the machine")
    return made


def main() -> None:
    args = parser().parse_args()
    if args.fresh:
        for store in (*stores.ZARR, *stores.HDF5, *stores.VOLUMES):
            stores.remove(args.data, store, args.small)
    if args.output:
        command = " ".join(["python benchmarks/read.py", *_without(sys.argv[1:], "--data", "--output", "--hardware")])
        first = {"hardware": args.hardware or hardware(), "date": f"{datetime.date.today()}", "command": command}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(first) + "\n")
    setting = cases.Setting(args.data, args.small, args.repeat, tuple(args.engine))
    for name in args.case:
        for result in cases.CASES[name](setting):
            _tell(result | {"repeat": args.repeat}, args.output)


def _tell(result: dict[str, Any], output: Path | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    if output:
        with output.open("a") as f:
            f.write(line + "\n")


def _without(words: list[str], *options: str) -> list[str]:
    """The command line without options that say where files lie."""
    kept = list(words)
    for option in options:
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return kept


if __name__ == "__main__":
    main()
