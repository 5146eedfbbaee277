"""Cells and graphs: rows that travel, time of a layer beside torch_geometric, and reading beside xarray and zarr.

    pip install torch-geometric                        # the other side of the layer
    python benchmarks/cells.py --output benchmarks/results/cells-MACHINE-MONTH.jsonl

Each case is one JSON object:

- `rows`: bytes that all ranks send in a forward pass, and in a backward one, over those of the rows that they need of
  others, each counted once a rank.  `random graph`: 20,000 cells, 200,000 edges between any two.  Real ranks; the three
  ways to write the same sum over neighbors: `gather_neighbors`, `x[..., table]` and edges with `index_select` and
  `index_add`, the last two with an index that the module keeps.
- `layer`: a forward and a backward pass of the sum over neighbors, on one process: `gather_neighbors` and
  `scatter_to_cells`, and torch_geometric's propagation of the same edges.  Contenders take turns, with a thread each.
  `cpu_s` and `wall_s` are medians; `max_rel_err` is the largest difference of sums and gradients.
- `read`: all samples of a store on cells, one chunk a twelfth of the sphere, with as many threads each.  Contenders
  take turns, and no sample is read twice in a turn.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import xarray as xr
import zarr
from torch import Tensor, nn

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

CHANNELS, FLOAT, READ_THREADS = 16, 4, 2
Fact = dict[str, Any]


def octahedral_points(rings: int) -> tuple[np.ndarray, np.ndarray]:
    """Latitudes and longitudes of the octahedral reduced Gaussian grid of so many circles between pole and equator."""
    latitudes = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(2 * rings)[0]))[::-1]
    counts = [20 + 4 * min(circle, 2 * rings - 1 - circle) for circle in range(2 * rings)]
    longitudes = [np.arange(count) * 360 / count for count in counts]
    return np.repeat(latitudes, counts), np.concatenate(longitudes)


def n320_points() -> tuple[np.ndarray, np.ndarray]:
    """Latitudes and longitudes of ECMWF's reduced Gaussian grid N320, as ecCodes has them: 542,080 points."""
    import eccodes

    message = eccodes.codes_grib_new_from_samples("reduced_gg_pl_320_grib2")
    lat, lon = (eccodes.codes_get_array(message, name) for name in ("latitudes", "longitudes"))
    eccodes.codes_release(message)
    return lat, lon


def table_of(grid: str) -> jigsaw.Neighbors:
    """Make the table of a grid by its name."""
    if grid == "O96":
        return jigsaw.Neighbors.of_points(*octahedral_points(96), k=9)
    if grid == "random graph":
        draw = np.random.default_rng(0)
        return jigsaw.Neighbors.of_edges(*draw.integers(0, 20_000, (2, 200_000)), 20_000, 20_000)
    return jigsaw.Neighbors.healpix(64, nested=grid == "HEALPix nested")


# -- rows that travel -------------------------------------------------------------------------------------------------


class TableSum(nn.Module):
    """The sum over neighbors by an index of one's own."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.index].sum(-1)


class EdgeSum(nn.Module):
    """The sum over neighbors along edges."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        super().__init__()
        self.register_buffer("source", source)
        self.register_buffer("target", target)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(-1, self.target, x.index_select(-1, self.source))


def edges_of(table: jigsaw.Neighbors) -> tuple[Tensor, Tensor]:
    """Sources and targets of all edges, without those that lead from nowhere."""
    span = (0, table.targets)
    source, target = torch.from_numpy(table.sources_of(span)), torch.from_numpy(table.targets_of(span))
    return source[source >= 0], target[source >= 0]


def sums_of(table: jigsaw.Neighbors) -> dict[str, Callable[[Any], Any]]:
    """Make the same sum, written in three ways; a table with gaps (-1) cannot be an index."""
    source, target = edges_of(table)
    ways: dict[str, Callable[[Any], Any]] = {
        "gather_neighbors": lambda x: jigsaw.nn.scatter_to_cells(jigsaw.nn.gather_neighbors(x, table), table),
        "index_select and index_add": EdgeSum(source, target),
    }
    if table.degree is not None and len(source) == table.edges:
        ways["x[..., table]"] = TableSum(source.view(table.targets, -1))
    return ways


def sent_by_way(grid: str) -> dict[str, tuple[int, int, int]]:
    """Return, by way, the bytes that this rank sends in a forward and in a backward pass, and the rows that it needs of
    others.
    """
    torch.manual_seed(0)
    mesh, table = world_mesh(cell=torch.distributed.get_world_size()), table_of(grid)
    tile = jigsaw.shard(torch.randn(1, CHANNELS, table.sources), mesh, (None, None, "cell"))
    tile.local.requires_grad_()
    start, stop = tile.layout.owned(tile.coordinate)[-1]
    needed = np.unique(table.sources_of((start, stop)))
    needed = needed[(needed >= 0) & ((needed < start) | (needed >= stop))]
    traffic = {}
    for way, function in sums_of(table).items():
        net = jigsaw.parallelize(function, mesh) if isinstance(function, nn.Module) else function
        net(tile)  # the first call compares the tables of all ranks
        with comm.count() as counts:
            out = net(tile)
        with comm.count() as back:
            torch.autograd.grad(out.local.sum(), tile.local)
        traffic[way] = counts.sent_bytes, back.sent_bytes, len(needed)
    return traffic


def rows_sent(grid: str, ranks: int) -> Iterator[Fact]:
    """The facts of one grid on so many ranks."""
    by_rank = run_on_ranks(ranks, sent_by_way, grid, timeout=300)
    for way in by_rank[0]:
        sent = sum(rank[way][0] for rank in by_rank)
        back, needed = (sum(rank[way][at] for rank in by_rank) for at in (1, 2))
        yield {
            "case": "rows", "grid": grid, "ranks": ranks, "way": way, "rows_needed": needed, "sent_bytes": sent,
            "sent_over_needed": round(sent / (needed * CHANNELS * FLOAT), 4),
            "back_over_needed": round(back / (needed * CHANNELS * FLOAT), 4),
        }  # fmt: skip


# -- turns ------------------------------------------------------------------------------------------------------------


def take_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Fact]:
    """Call all contenders in turns, after one call each that is not timed, and return their medians."""
    seconds = {name: list[tuple[float, float]]() for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: {
            "wall_s": round(statistics.median(wall for wall, _ in turns), 5),
            "cpu_s": round(statistics.median(cpu for _, cpu in turns), 5),
        }
        for name, turns in seconds.items()
    }


def facts_of_turns(facts: Fact, turns: dict[str, Fact]) -> Iterator[Fact]:
    """The facts of each contender, and its CPU time over that of the fastest other."""
    for name, timed in turns.items():
        best = min(other["cpu_s"] for rival, other in turns.items() if rival != name)
        yield {**facts, "engine": name, **timed, "cpu_over_best_other": round(timed["cpu_s"] / best, 3)}


# -- a layer ----------------------------------------------------------------------------------------------------------


def layer_times(grid: str, features: int, rounds: int) -> Iterator[Fact]:
    """The facts of a sum over neighbors on one process; cells are the first dim, as torch_geometric has them."""
    from torch_geometric.nn import SimpleConv

    table = table_of(grid)
    edges, conv = torch.stack(edges_of(table)), SimpleConv(aggr="sum")
    x = torch.randn(table.sources, features, requires_grad=True)
    weight = torch.randn(table.targets, features)
    results: dict[str, tuple[Tensor, Tensor]] = {}

    def by_table(value: Tensor) -> Tensor:
        return jigsaw.nn.scatter_to_cells(jigsaw.nn.gather_neighbors(value, table, dim=0), table, dim=0)

    def step(name: str, function: Callable[[Tensor], Tensor]) -> None:
        out = function(x)
        (gradient,) = torch.autograd.grad((out * weight).sum(), x)
        results[name] = out.detach(), gradient

    engines = {"jigsaw": by_table, "torch_geometric": lambda value: conv(value, edges)}
    turns = take_turns({name: partial(step, name, function) for name, function in engines.items()}, rounds)
    differences = [
        ((a - b).abs().max() / b.abs().max()).item()
        for a, b in zip(results["jigsaw"], results["torch_geometric"], strict=True)
    ]
    facts = {
        "case": "layer", "grid": grid, "cells": table.sources, "edges": edges.shape[1], "features": features,
        "max_rel_err": float(f"{max(differences):.1e}"),
    }  # fmt: skip
    yield from facts_of_turns(facts, turns)


# -- reading ----------------------------------------------------------------------------------------------------------


def write_store(path: str, grid: str, steps: int, variables: tuple[str, ...]) -> int:
    """Write a store by xarray, with fields that compress as weather does, and return the number of its cells."""
    if grid == "N320":
        lat, lon = n320_points()
        coords = {"latitude": ("cell", lat), "longitude": ("cell", lon)}
        cells, attributes, mapping = len(lat), {}, {}
    else:
        cells = 12 * 4**8
        coords, attributes = {}, {"grid_mapping": "crs"}
        described = {"grid_mapping_name": "healpix", "refinement_level": 8, "indexing_scheme": "nested"}
        mapping = {"crs": ((), np.int32(0), described)}
    random = np.random.default_rng(0)
    smooth = np.sin(np.linspace(0, 60, cells))
    fields = {
        name: (
            ("time", "cell"),
            (280 + 20 * smooth + random.normal(0, 0.5, (steps, cells)).round(1)).astype(np.float32),
            attributes,
        )
        for name in variables
    }
    times = np.datetime64("2020-01-01", "ns") + np.arange(steps) * np.timedelta64(6, "h")
    data = xr.Dataset({**fields, **mapping}, {**coords, "time": times})
    chunks = {name: {"chunks": (1, -(-cells // 12))} for name in variables}
    data.to_zarr(path, encoding=chunks, zarr_format=3, consolidated=False)
    return cells


def read_times(grid: str, rounds: int, steps: int = 8) -> Iterator[Fact]:
    """The facts of reading all samples of a store on cells, whole, on one process."""
    variables = ("t", "z", "u", "v")
    with tempfile.TemporaryDirectory() as folder, zarr.config.set({"threading.max_workers": READ_THREADS}):
        path = f"{folder}/store.zarr"
        cells = write_store(path, grid, steps, variables)
        mesh = jigsaw.init_mesh(cell=1)
        data = jigsaw.io.open(path, mesh=mesh, fields=list(variables), targets=[])
        arrays = [zarr.open_group(path, mode="r")[name] for name in variables]
        with xr.open_zarr(path, consolidated=False, chunks=None) as lazy:

            def by_jigsaw(step: int) -> np.ndarray:
                return data[step].input.local[0].numpy()

            def by_zarr(step: int) -> np.ndarray:
                return np.stack([array[step] for array in arrays])

            def by_xarray(step: int) -> np.ndarray:
                return np.stack([lazy[name].isel(time=step).values for name in variables])

            engines = {"jigsaw": by_jigsaw, "zarr": by_zarr, "xarray": by_xarray}
            for step in range(steps):
                first, *others = (read(step) for read in engines.values())
                assert all(np.array_equal(first, other) for other in others)
            turns = take_turns(
                {name: lambda read=read: [read(step) for step in range(steps)] for name, read in engines.items()},
                rounds,
            )
    facts = {"case": "read", "grid": grid, "cells": cells, "samples": steps, "threads": READ_THREADS}
    yield from facts_of_turns(facts, turns)


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", action="store_true", help="the rows that travel, alone")
    parser.add_argument("--read", action="store_true", help="reading, alone")
    parser.add_argument("--output", type=Path, help="a result file, that begins with hardware, date and command")
    parser.add_argument("--hardware", default="", help="the words of the result file about the machine")
    options = parser.parse_args()
    alone = " --rows" * options.rows or " --read" * options.read
    others = () if options.rows else ("xarray", "zarr") if options.read else ("torch-geometric", "xarray", "zarr")
    packages = {name: version(name) for name in ("torch", *others)}
    command = "python benchmarks/cells.py" + alone + f" --rounds {options.rounds}" * (not options.rows)
    lines: list[Fact] = [
        {
            "hardware": options.hardware or "?", "date": f"{datetime.date.today()}", **packages,
            "command": command,
        }
    ]  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    grids = "HEALPix nested", "HEALPix ring", "O96", "random graph"
    rows = (rows_sent(grid, ranks) for grid in grids for ranks in (2, 3, 4))
    layers = (layer_times(grid, n, options.rounds) for grid in ("HEALPix nested", "O96") for n in (16, 128))
    reads = (read_times(grid, options.rounds) for grid in ("HEALPix level 8", "N320"))
    cases = rows if options.rows else reads if options.read else (*rows, *layers, *reads)
    for facts in cases:
        for fact in facts:
            lines.append(fact)
            print(json.dumps(fact), flush=True)
    if options.output:
        options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
