"""A training step on tiles, as it is and compiled by jigsaw.compile; one JSON object a net and number of ranks.

    python benchmarks/compiled_step.py --ranks 1 2 --backend inductor

Gradients are compared before anything is timed.  `*_ms` is the least of `--rounds` steps (forward, backward) of the
slowest rank, `*_cpu_ms` the processor time of that step of the rank that took the most; `first_s` is the first step,
in which the graphs are made.  On one rank `torch_*` is the same of plain torch, and of `torch.compile`, on the whole
tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh


class ConvNeXtBlock(nn.Module):
    """A 7 x 7 depthwise convolution, a norm and two linear layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.far, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.far(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


def _convolutions() -> nn.Module:
    return nn.Sequential(*(_block(8, 8) for _ in range(4)))


class SmallUNet(nn.Module):
    """Three levels with skips."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        widths = [dim, 2 * dim, 4 * dim]
        self.down = nn.ModuleList(_block(a, b) for a, b in zip([8, *widths], widths, strict=False))
        self.up = nn.ModuleList(_block(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.leave = nn.Conv2d(dim, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            skips.append(block(x if level == 0 else F.avg_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.leave(x)


def _block(into: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())


NETS: dict[str, Callable[[], nn.Module]] = {
    "four convolutions with norms": _convolutions,
    "two ConvNeXt blocks": lambda: nn.Sequential(ConvNeXtBlock(8), ConvNeXtBlock(8)),
    "U-Net of three levels": lambda: SmallUNet(16),
    "many small pointwise functions": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 1), *(nn.Sequential(nn.SiLU(), nn.Tanh(), nn.Softplus()) for _ in range(6))
    ),
}


def _measured(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least of each, taken in turns."""
    least = dict.fromkeys((f"{name}_{kind}" for name in runs for kind in ("ms", "cpu_ms")), float("inf"))
    for _ in range(rounds):
        for name, step in runs.items():
            step()  # what another one left in the caches is gone
            start, cpu = time.perf_counter(), time.process_time()
            step()
            took = time.perf_counter() - start, time.process_time() - cpu
            for kind, each in zip(("ms", "cpu_ms"), took, strict=True):
                least[f"{name}_{kind}"] = min(least[f"{name}_{kind}"], each * 1e3)
    return least


def _body(name: str, rows: int, columns: int, rounds: int, backend: str, ranks: int) -> dict[str, float]:
    mesh = world_mesh(lat=ranks)
    torch._dynamo.reset()
    plain, compiled = _made(name, mesh), jigsaw.compile(_made(name, mesh), backend=backend)
    tile = jigsaw.shard(torch.randn(1, 8, rows, columns), mesh, (None, None, "lat", None))

    def step(model: nn.Module, x: Any) -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def first(model: nn.Module, x: Any) -> float:
        start = time.perf_counter()
        step(model, x)
        return time.perf_counter() - start

    step(plain, tile)
    found = {"first_s": first(compiled, tile)}
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    runs = {"plain": partial(step, plain, tile), "compiled": partial(step, compiled, tile)}
    if ranks == 1:
        whole, theirs = NETS[name](), NETS[name]()
        made: Any = torch.compile(theirs, backend=backend)
        found["torch_first_s"] = first(made, tile.local)
        runs |= {"torch_plain": partial(step, whole, tile.local), "torch_compiled": partial(step, made, tile.local)}
    return found | _measured(runs, rounds)


def _made(name: str, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    return jigsaw.parallelize(NETS[name](), mesh)


def main() -> None:
    """Print one JSON object for each net and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    asked = parser.parse_args()
    sizes = asked.rows, asked.columns
    for ranks in asked.ranks:
        for name in asked.nets:
            found = run_on_ranks(ranks, _body, name, *sizes, asked.rounds, asked.backend, ranks, timeout=900)
            slowest = {key: round(max(each[key] for each in found), 3) for key in found[0]}
            said = {"net": name, "ranks": ranks, "rows": asked.rows, "columns": asked.columns, "backend": asked.backend}
            print(json.dumps(said | slowest), flush=True)


if __name__ == "__main__":
    main()
