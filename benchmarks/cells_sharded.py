"""A graph transformer's processor of anemoi-models on cut cells: its own sharding, and the same net on tiles.

    pip install anemoi-models torch-geometric
    python benchmarks/cells_sharded.py --output benchmarks/results/cells-sharded-MACHINE-MONTH.jsonl

Cells are HEALPix's of nside 32, with 8 neighbors each, 64 channels, 4 heads and 2 layers, in float32; a step is a
forward and a backward pass on all ranks.  Anemoi cuts heads between its attention and the rest, so that every rank
holds all cells of some heads; tiles stay cut by cells.  Both take turns.

`cpu_s` is the processor time of all ranks together and `wall_s` that of the slowest, medians of the rounds.
`max_rel_err` is the largest difference of outputs and gradients from one process in float64.  `sent_bytes` is what the
ranks send on tiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from result_file import ResultFile, add_result_options
from torch import Tensor, nn

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

NSIDE, CHANNELS, HEADS, LAYERS, EDGE_CHANNELS = 32, 64, 4, 2, 8


class Processor(nn.Module):
    """The processor, with the edges that it keeps, sorted by their target."""

    def __init__(self) -> None:
        super().__init__()
        from anemoi.models.layers.processor import GraphTransformerProcessor

        table = jigsaw.Neighbors.healpix(NSIDE)
        span = (0, table.targets)
        source, target = torch.from_numpy(table.sources_of(span)), torch.from_numpy(table.targets_of(span))
        self.register_buffer("edges", torch.stack([source, target])[:, source >= 0])
        self.cells = table.targets
        torch.manual_seed(0)
        self.processor = GraphTransformerProcessor(
            num_layers=LAYERS, num_channels=CHANNELS, num_chunks=1, num_heads=HEADS, mlp_hidden_ratio=4,
            edge_dim=EDGE_CHANNELS, layer_kernels={}, graph_attention_backend="pyg",
        )  # fmt: skip

    def forward(self, x: Tensor, edge_values: Tensor, group: Any = None, sizes: tuple[int, ...] = ()) -> Tensor:
        shapes = [[n, CHANNELS] for n in sizes or (self.cells,)]
        return self.processor(x, 1, shapes, edge_values, self.edges, group)


def inputs_of(net: Processor) -> tuple[Tensor, Tensor]:
    """Values of all cells and of all edges."""
    draw = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(n, c, generator=draw) for n, c in ((net.cells, CHANNELS), (net.edges.shape[1], EDGE_CHANNELS))
    )


def weights_like(x: Tensor, first: int = 0) -> Tensor:
    """Weights of the cells in the loss, from the first that a rank owns."""
    return torch.linspace(0.5, 2, 12 * NSIDE**2)[first : first + x.shape[0], None].to(x.dtype)


def step_of_one_process() -> tuple[Tensor, Tensor]:
    """The output and the gradient of all cells in float64."""
    net = Processor().double()
    x, edge_values = (value.double() for value in inputs_of(net))
    x.requires_grad_()
    out = net(x, edge_values)
    (grad,) = torch.autograd.grad((out * weights_like(out)).sum(), x)
    return out.detach(), grad


def timed_steps(rounds: int) -> dict[str, Any]:
    """Run both in turns on this rank: outputs, gradients, seconds of each, and bytes."""
    mesh = world_mesh(cell=dist.get_world_size())
    group, rank = mesh.get_group("cell"), mesh.get_rank()
    own_net, tile_net = Processor(), jigsaw.parallelize(Processor(), mesh)
    x, edge_values = inputs_of(own_net)
    tile = jigsaw.shard(x, mesh, ("cell", None))
    points = tile.layout.cuts[0].points
    sizes = tuple(stop - start for start, stop in pairwise(points))
    edge_tile = jigsaw.shard(edge_values, mesh, ("cell", None))
    part = tile.local.clone().requires_grad_()
    tile.local.requires_grad_()

    def sharded() -> tuple[Tensor, Tensor]:
        out = own_net(part, edge_values, group, sizes)
        loss = (out * weights_like(out, points[rank])).sum()
        loss.backward()
        grad, part.grad = part.grad, None
        return out.detach(), grad

    def on_tiles() -> tuple[Tensor, Tensor]:
        out = tile_net(tile, edge_tile)
        (out * weights_like(out)).sum().backward()
        grad, tile.local.grad = tile.local.grad, None
        return out.local.detach(), grad

    results: dict[str, Any] = {"points": points[rank : rank + 2]}
    for name, step in {"anemoi": sharded, "jigsaw": on_tiles}.items():
        step(), step()  # indices are planned, and both are warm
        results[name] = *step(), []
    with comm.count() as counts:
        on_tiles()
    results["sent_bytes"] = counts.sent_bytes
    for _ in range(rounds):
        for name, step in {"anemoi": sharded, "jigsaw": on_tiles}.items():
            dist.barrier(group)
            results[name][2].append(seconds_of(step))
    return results


def seconds_of(step: Callable[[], Any]) -> tuple[float, float]:
    """Wall-clock and processor seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    add_result_options(parser)
    options = parser.parse_args()
    versions = {name: version(name) for name in ("torch", "anemoi-models", "torch-geometric")}
    file = ResultFile(options, f"python benchmarks/cells_sharded.py --rounds {options.rounds}", **versions)
    torch.set_num_threads(1)
    wanted = step_of_one_process()
    for ranks in options.ranks:
        by_rank = run_on_ranks(ranks, timed_steps, options.rounds, timeout=900)
        for name in ("anemoi", "jigsaw"):
            error = max(
                ((found.double() - one[slice(*rank["points"])]).abs().max() / one.abs().max()).item()
                for rank in by_rank
                for found, one in zip(rank[name][:2], wanted, strict=True)
            )
            rounds = [*zip(*(rank[name][2] for rank in by_rank), strict=True)]
            facts = {
                "ranks": ranks, "engine": name, "cells": 12 * NSIDE**2, "max_rel_err": float(f"{error:.1e}"),
                "wall_s": round(statistics.median(max(wall for wall, _ in turn) for turn in rounds), 4),
                "cpu_s": round(statistics.median(sum(cpu for _, cpu in turn) for turn in rounds), 4),
            }  # fmt: skip
            sent = {"sent_bytes": sum(rank["sent_bytes"] for rank in by_rank)} if name == "jigsaw" else {}
            file.add(facts | sent)


if __name__ == "__main__":
    main()
