"""Host time, watched by commit: functions on tiles, a layout, a dry run and the plan of a sample, in one process.

    pytest --codspeed benchmarks/watched.py   # with pytest-codspeed: each case, for CodSpeed or alone
    python benchmarks/watched.py --commits 10 --output benchmarks/results/watched-MACHINE-MONTH.jsonl
    python benchmarks/watched.py --table benchmarks/results/watched-MACHINE-MONTH.jsonl

The second prints the last commits that changed the package, a JSON object each.  `calls` are the Python functions that
a case calls, the same on every machine with the same torch; `us` is the least of seven means, in processor
microseconds.  Each commit is checked out by itself, and measured by this file, in `--turns` turns over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import zarr
from host_time import count_calls, functions, least_mean, losses, operands
from markdown_table import table_lines
from result_file import ResultFile, add_result_options
from torch import nn

import jigsaw

ROOT = Path(__file__).parents[1]
POINTWISE = ("x + y", "x * scale", "F.gelu", "x[:, :2]", "x.transpose", "torch.cat", "x.mean()")
WITH_GRADIENT = ("F.conv2d 3x3", "F.linear", "F.layer_norm", "attention", "a block")
LONG = ("layout", "dry run", "plan")
CASES = (*POINTWISE, *WITH_GRADIENT, *LONG)


def watched_calls(folder: Path) -> dict[str, Callable[[], Any]]:
    """The function of each case; `folder` gets the store of which a sample is planned."""
    mesh = jigsaw.init_mesh(lat=1)
    tiles, _ = operands(mesh)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3, padding=1))
    ranks, grid, shape = {"lat": 8, "lon": 8}, {"lat": 64, "lon": 64}, (1, 4, 721, 1440)
    zarr.create_array(
        folder / "air.zarr",
        name="air",
        data=np.zeros((6, 91, 180), "f4"),
        chunks=(1, 13, 20),
        dimension_names=("time", "lat", "lon"),
    )
    data = jigsaw.io.open(folder / "air.zarr", mesh=ranks, spec={"lat": "lat", "lon": "lon"})
    return {
        **{name: functions(tiles)[name] for name in POINTWISE},
        **{name: losses(tiles)[name] for name in WITH_GRADIENT},
        "layout": lambda: jigsaw.Layout.of(shape, (None, None, "lat", "lon"), grid).owned((31, 31)),
        "dry run": lambda: jigsaw.dry_run(net, (2, 4, 64, 128), ranks, spec=(None, None, "lat", "lon")),
        "plan": lambda: data.plan(0),
    }


# -- CodSpeed ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    return watched_calls(tmp_path_factory.mktemp("watched"))


@pytest.mark.parametrize("name", CASES)
def test_case(benchmark: Any, calls: dict[str, Callable[[], Any]], name: str) -> None:
    benchmark(calls[name])


# -- commits ----------------------------------------------------------------------------------------------------------


def measure_package() -> dict[str, dict[str, float]]:
    """Measure each case with the package that this process imports."""
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, function in watched_calls(Path(folder)).items():
            turns = 2 if name in LONG else 100
            for _ in range(3 if name in LONG else 20):
                function()  # plans are made at first use
            rows[name] = {"calls": count_calls(function), "us": min(least_mean(function, turns) for _ in range(7))}
    return rows


def measure_commits(commits: list[str], turns: int) -> Iterator[dict[str, Any]]:
    """Measure the package of each commit in a process of its own; the least time of all turns counts."""
    with tempfile.TemporaryDirectory() as folder:
        trees = {commit: Path(folder) / commit for commit in commits}
        try:
            for commit, tree in trees.items():
                subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
            rounds = [{commit: _package_of(tree) for commit, tree in trees.items()} for _ in range(turns)]
        finally:
            for tree in trees.values():
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)
    for commit in commits:
        told = subprocess.run(
            ["git", "log", "-1", "--format=%cs %s", commit], cwd=ROOT, check=True, capture_output=True, text=True
        )
        day, _, subject = told.stdout.strip().partition(" ")
        cases = {
            name: {
                "calls": rounds[0][commit][name]["calls"],
                "us": round(min(one[commit][name]["us"] for one in rounds), 1),
            }
            for name in CASES
        }
        yield {"commit": commit, "day": day, "subject": subject, "cases": cases}


def _package_of(tree: Path) -> dict[str, dict[str, float]]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    told = subprocess.run(
        [sys.executable, __file__, "--here"], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(told.stdout.splitlines()[-1])


def print_table(file: Path) -> None:
    """Print the table of docs/benchmarks.md: Python functions that are called, and microseconds."""
    commits = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    head = ["calls, µs", *(commit["commit"] for commit in commits)]
    rows = [[name, *(f"{c['cases'][name]['calls']}, {c['cases'][name]['us']:.0f}" for c in commits)] for name in CASES]
    print("\n".join(table_lines(head, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="measure the package that is imported, and no commit")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a result file, and no more")
    add_result_options(parser)
    options = parser.parse_args()
    if options.table:
        print_table(options.table)
    elif options.here:
        print(json.dumps(measure_package()))
    else:
        log = ["git", "log", "-n", str(options.commits), "--format=%h", "--", "jigsaw"]
        commits = subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        result = ResultFile(
            options, f"python benchmarks/watched.py --commits {options.commits} --turns {options.turns}"
        )
        for row in measure_commits(commits, options.turns):
            result.add(row)


if __name__ == "__main__":
    main()
