"""One training step of five small models: plain torch, jigsaw on one rank, the limit, jigsaw on several; one JSON
object a line.

    python benchmarks/layers.py --ranks 2 --case conv

The total work is the same for all, each rank has one thread, and the contenders take turns.  The limit is `apart`:
plain torch in as many processes, each on its rows alone, which exchange nothing (and so compute another function).
Each does its share of the products: the mixer mixes its own tokens by a weight of their number, attention is of its
queries to as many keys as there are, its own again in place of the others'.

`step_s` is the median over `--rounds` of a forward and a backward pass, gradients of all parameters whole on every
rank; of several ranks it is the slowest's, and so is `cpu_s`, the processor time of the same step.  `speedup` is
against plain torch.  `of_limit` and `cpu_of_limit` are medians of the ratios, round by round, to `apart` on as many
ranks, and on one rank to plain torch; `least_of_limit` and `least_cpu_of_limit` are the ratios of the smallest.  Where
other work shares the cores, trust the processor time.  `sent_bytes` is the most that a rank sends in a step.
`peak_bytes_per_rank` is the highest sum of live allocations that a step makes (torch's profiler, profile_memory), so
activations, gradients and temporaries, but not the input and the weights.  `max_abs_err` is against plain torch in the
same precision (float32), over the output and all gradients; it must be below 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

TIMEOUT = 3600.0

# -- models ----------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two levels of strided convolutions and back, with group norm and skips."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(ins: int, outs: int, stride: int = 1) -> nn.Module:
            return nn.Sequential(nn.Conv2d(ins, outs, 3, stride, 1), nn.GroupNorm(4, outs), nn.GELU())

        self.first = block(8, width)
        self.down = nn.ModuleList([block(width, 2 * width, 2), block(2 * width, 4 * width, 2)])
        ups = [(nn.ConvTranspose2d(2 * n, n, 2, 2), block(2 * n, n)) for n in (2 * width, width)]
        self.up = nn.ModuleList(nn.ModuleList(pair) for pair in ups)
        self.last = nn.Conv2d(width, 8, 3, padding=1)

    def forward(self, x: Any) -> Any:
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        y = skips.pop()
        for up, merge in self.up:
            y = merge(torch.cat([up(y), skips.pop()], 1))
        return x + self.last(y)


class Mixer(nn.Module):
    """An MLP over the tokens of the whole grid, then one over channels (Tolstikhin et al., arXiv 2105.01601)."""

    def __init__(self, tokens: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.tokens = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))
        self.channels = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Any) -> Any:
        x = x.flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class AttentionBlock(nn.Module):
    """A transformer block over the tokens of the whole grid; `copies` of its own keys are what a query meets."""

    def __init__(self, channels: int, heads: int, copies: int) -> None:
        super().__init__()
        self.heads, self.copies = heads, copies
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Any) -> Any:
        x = x.flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        if self.copies > 1:
            k, v = torch.cat([k] * self.copies, 2), torch.cat([v] * self.copies, 2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def convolutions(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers)


def linears(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@dataclass(frozen=True)
class Case:
    """A model of how many rows it is for and of how many processes share them, its input and how that is cut; `align`
    keeps cut points at multiples of the strides.
    """

    model: Callable[[int, int], nn.Module]
    shape: tuple[int, ...]
    spec: tuple[str | None, ...]
    align: int = 1

    @property
    def rows_dim(self) -> int:
        return self.spec.index("lat")


SPACE = (None, None, "lat", None)
TOKENS = (None, "lat", None)
CASES = {
    "conv": Case(lambda rows, apart: convolutions(32), (1, 32, 721, 1440), SPACE),
    "unet": Case(lambda rows, apart: UNet(16), (1, 8, 720, 1440), SPACE, 4),
    "mixer": Case(lambda rows, apart: Mixer(rows * 180, 256, 512), (1, 256, 90, 180), SPACE),
    "attention": Case(lambda rows, apart: AttentionBlock(384, 6, apart), (1, 384, 48, 90), SPACE),
    "linear": Case(lambda rows, apart: linears(512), (1, 64800, 512), TOKENS),
}
SMALL = {
    "conv": Case(lambda rows, apart: convolutions(4), (1, 4, 73, 144), SPACE),
    "unet": Case(lambda rows, apart: UNet(4), (1, 8, 72, 144), SPACE, 4),
    "mixer": Case(lambda rows, apart: Mixer(rows * 18, 16, 32), (1, 16, 9, 18), SPACE),
    "attention": Case(lambda rows, apart: AttentionBlock(16, 2, apart), (1, 16, 9, 18), SPACE),
    "linear": Case(lambda rows, apart: linears(16), (1, 648, 16), TOKENS),
}


# -- on every rank ---------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """A model with its input, ready to step."""

    model: nn.Module
    input: Any

    def step(self) -> Any:
        self.model.zero_grad()
        y = self.model(self.input)
        y.square().mean().backward()
        return y


_made: dict[tuple[str, bool, str], Contender] = {}


def _contender(name: str, small: bool, system: str, ranks: int) -> Contender:
    case = (SMALL if small else CASES)[name]
    torch.manual_seed(0)
    x = torch.randn(case.shape)
    if system == "torch":
        return Contender(case.model(case.shape[case.rows_dim], 1), x)
    mesh = world_mesh(lat=ranks)
    tile = jigsaw.shard(x, mesh, case.spec, align=case.align)
    if system == "apart":
        return Contender(case.model(tile.local.shape[case.rows_dim], ranks), tile.local)
    return Contender(jigsaw.parallelize(case.model(case.shape[case.rows_dim], 1), mesh), tile)


def prepare(name: str, small: bool, system: str, ranks: int) -> dict[str, float]:
    """Make the contender, warm it up, and measure all but its time."""
    mine = _contender(name, small, system, ranks)
    error = 0.0
    if system == "jigsaw":
        error = _error(mine, _contender(name, small, "torch", 1))
        if error > 1e-4:
            raise AssertionError(f"{name} on {ranks} ranks differs from plain torch by {error}")
    for key in [k for k in _made if k[:2] != (name, small)]:
        del _made[key]
    _made[name, small, system] = mine
    for other in _made.values():  # its gradients would count among this one's
        other.model.zero_grad()
    mine.step()
    with comm.count() as sent:
        mine.step()
    return {"sent_bytes": sent.sent_bytes, "peak_bytes_per_rank": peak_bytes(mine), "max_abs_err": error}


def _error(mine: Contender, plain: Contender) -> float:
    with torch.no_grad():  # the plain output is freed before gradients are made
        expected = jigsaw.shard(plain.model(plain.input), mine.input.mesh, mine.model(mine.input).layout.spec)
        got = mine.model(mine.input)
        worst = [(got.local - expected.with_layout(got.layout).local).abs().max().item()]
        del got, expected
    mine.step()
    plain.step()
    for a, b in zip(mine.model.parameters(), plain.model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        worst.append((a.grad - b.grad).abs().max().item())
    return max(worst)


def peak_bytes(mine: Contender) -> int:
    """The highest sum of live allocations during a step."""
    mine.model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        mine.step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    totals = [e["args"] for e in sorted(events, key=lambda e: e["ts"])]
    before = (
        totals[0]["Total Allocated"] - totals[0]["Bytes"]
    )  # of what ran in this process under a profiler, not freed
    return max(total["Total Allocated"] for total in totals) - before


def timed(name: str, small: bool, system: str, ranks: int) -> tuple[float, float]:
    """The wall and the processor seconds of one step, begun by all ranks together."""
    mine = _made[name, small, system]
    mine.model.zero_grad()
    if ranks > 1:
        dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    mine.step()
    return time.perf_counter() - start, time.process_time() - busy


# -- taking turns ----------------------------------------------------------------------------------------------------


def run(name: str, ranks: int, rounds: int, small: bool) -> list[dict[str, Any]]:
    contenders = [("torch", 1), ("jigsaw", 1), ("apart", ranks), ("jigsaw", ranks)]
    found = [run_on_ranks(n, prepare, name, small, system, n, timeout=TIMEOUT) for system, n in contenders]
    times: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for _ in range(rounds):
        for seen, (system, n) in zip(times, contenders, strict=True):
            of_ranks = run_on_ranks(n, timed, name, small, system, n, timeout=TIMEOUT)
            seen.append((max(wall for wall, _ in of_ranks), max(busy for _, busy in of_ranks)))
    plain_s = statistics.median(wall for wall, _ in times[0])
    lines: list[dict[str, Any]] = []
    for at, ((system, n), seen, facts) in enumerate(zip(contenders, times, found, strict=True)):
        walls, busies = zip(*seen, strict=True)
        line = {"case": name, "system": system, "ranks": n, "step_s": round(statistics.median(walls), 5)}
        line |= {"speedup": round(plain_s / statistics.median(walls), 3)}
        line |= {"cpu_s": round(statistics.median(busies), 5)}
        if system == "jigsaw":  # its limit stands before it
            limit_walls, limit_busies = zip(*times[at - 1], strict=True)
            line |= {"of_limit": _median_ratio(walls, limit_walls), "cpu_of_limit": _median_ratio(busies, limit_busies)}
            line |= {"least_of_limit": round(min(walls) / min(limit_walls), 3)}
            line |= {"least_cpu_of_limit": round(min(busies) / min(limit_busies), 3)}
        line |= {field: max(one[field] for one in facts) for field in facts[0]}
        lines.append({**line, "rounds": rounds, "shape": (SMALL if small else CASES)[name].shape})
    return lines


def _median_ratio(mine: Sequence[float], limit: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(mine, limit, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=list(CASES), help="all of them without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="toy sizes, as the tests run it")
    chosen = parser.parse_args()
    for name in chosen.case:
        for line in run(name, chosen.ranks, chosen.rounds, chosen.small):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
