"""What a training step holds: convolution nets plain, checkpointed and chunked; one JSON object a line.

    python benchmarks/memory.py --ranks 2 --case blocks-3d

`peak_bytes` is the highest sum of live allocations of a step on the rank that has the most (torch's profiler), so
activations, gradients and temporaries, but neither the input nor the weights; `held_bytes` is what autograd saves in
the forward pass.  `share` is the peak beside that of plain torch on one rank, the first line.  `step_s` is the median
of `--rounds` steps in turns, the slowest rank's, `cpu_s` its processor time.  `max_abs_err` is of the output and all
gradients, beside plain torch in the same precision (float32).  One thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import layers
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh


def double_block(dims: int, ins: int, outs: int) -> nn.Sequential:
    """Two convolutions at one resolution, each with an instance norm and an activation."""
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"InstanceNorm{dims}d")
    found = nn.Sequential()
    for first in (ins, outs):
        found.extend([conv(first, outs, 3, padding=1), norm(outs, affine=True), nn.GELU()])
    return found


class TwoBlocks(nn.Module):
    """A double block and its projection to a few channels."""

    def __init__(self, dims: int, ins: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(double_block(dims, ins, width), getattr(nn, f"Conv{dims}d")(width, 2, 1))

    def forward(self, x: Any) -> Any:
        return self.body(x)


class Down(nn.Module):
    """Half the resolution, then a double block."""

    def __init__(self, dims: int, ins: int, outs: int) -> None:
        super().__init__()
        self.pool, self.block = getattr(nn, f"MaxPool{dims}d")(2), double_block(dims, ins, outs)

    def forward(self, x: Any) -> Any:
        return self.block(self.pool(x))


class Up(nn.Module):
    """Twice the resolution, beside what the encoder had there, then a double block and what follows it."""

    def __init__(self, dims: int, ins: int, skipped: int, outs: int, *following: nn.Module) -> None:
        super().__init__()
        self.up = getattr(nn, f"ConvTranspose{dims}d")(ins, outs, 2, 2)
        self.block = nn.Sequential(double_block(dims, outs + skipped, outs), *following)

    def forward(self, x: Any, skipped: Any) -> Any:
        return self.block(torch.cat([self.up(x), skipped], 1))


class SmallUNet(nn.Module):
    """Three levels of double blocks, in the modules that such nets have (MONAI's `BasicUNet`)."""

    def __init__(self, dims: int, ins: int, width: int) -> None:
        super().__init__()
        self.encoder1, self.encoder2 = double_block(dims, ins, width), Down(dims, width, 2 * width)
        self.middle = Down(dims, 2 * width, 2 * width)
        self.decoder2 = Up(dims, 2 * width, 2 * width, 2 * width)
        self.decoder1 = Up(dims, 2 * width, width, width, getattr(nn, f"Conv{dims}d")(width, 2, 1))

    def forward(self, x: Any) -> Any:
        one = self.encoder1(x)
        two = self.encoder2(one)
        return self.decoder1(self.decoder2(self.middle(two), two), one)


class StridedUNet(nn.Module):
    """Four levels by strided convolutions; how its rows are shared out is what this one is for."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(ins: int, outs: int, stride: int = 1) -> nn.Module:
            conv = nn.Conv3d(ins, outs, 3, stride, 1)
            return nn.Sequential(conv, nn.InstanceNorm3d(outs, affine=True), nn.LeakyReLU(0.01))

        widths = [width, 2 * width, 4 * width, 4 * width]
        self.first = block(1, width)
        self.down = nn.ModuleList(block(a, b, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for b, a in pairwise(reversed(widths)))
        self.merge = nn.ModuleList(block(2 * a, a) for a in reversed(widths[:-1]))
        self.last = nn.Conv3d(width, 2, 1)

    def forward(self, x: Any) -> Any:
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        y = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            y = merge(torch.cat([up(y), skips.pop()], 1))
        return self.last(y)


@dataclass(frozen=True)
class MemoryCase:
    """A net, its input, which of its modules are chunked and along which dim, and where ranks may be cut."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dim: int
    align: int = 4


# The slabs of volumes are cut along their last dim: of a small product of the others torch takes another kernel on
# CPUs, which needs 27 times its input.
OUTER = ("encoder1", "encoder2", "decoder2", "decoder1")
CASES = {
    "blocks-2d": MemoryCase(lambda: TwoBlocks(2, 8, 16), (1, 8, 720, 720), ("body",), 2),
    "blocks-3d": MemoryCase(lambda: TwoBlocks(3, 8, 16), (1, 8, 64, 64, 96), ("body",), 4),
    "unet-2d": MemoryCase(lambda: SmallUNet(2, 8, 16), (1, 8, 360, 480), OUTER, 2),
    "strided-3d": MemoryCase(lambda: StridedUNet(16), (1, 1, 80, 256, 16), (), 2, align=1),
    "strided-3d-by-8": MemoryCase(lambda: StridedUNet(16), (1, 1, 80, 256, 16), (), 2, align=8),
}
SMALL = {
    "blocks-2d": MemoryCase(lambda: TwoBlocks(2, 4, 8), (1, 4, 240, 64), ("body",), 2),
    "blocks-3d": MemoryCase(lambda: TwoBlocks(3, 2, 4), (1, 2, 24, 16, 32), ("body",), 4),
    "unet-2d": MemoryCase(lambda: SmallUNet(2, 4, 8), (1, 4, 96, 48), OUTER, 2),
    "strided-3d": MemoryCase(lambda: StridedUNet(4), (1, 1, 40, 16, 16), (), 2, align=1),
    "strided-3d-by-8": MemoryCase(lambda: StridedUNet(4), (1, 1, 40, 16, 16), (), 2, align=8),
}


class _Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False)


_made: dict[tuple[str, bool, str], layers.Contender] = {}


def make_contender(name: str, small: bool, system: str, ranks: int, slabs: int) -> layers.Contender:
    case = (SMALL if small else CASES)[name]
    torch.manual_seed(0)
    model, x = case.model(), torch.randn(case.shape)
    for part in case.parts:
        if system == "chunked":
            jigsaw.nn.chunked(model.get_submodule(part), slabs=slabs, dim=case.dim, align=2)
        elif system == "checkpoint":
            model.set_submodule(part, _Checkpointed(model.get_submodule(part)))
    if ranks == 1:
        return layers.Contender(model, x)
    mesh = world_mesh(lat=ranks)
    tile = jigsaw.shard(x, mesh, (None, None, "lat", *(None,) * (x.ndim - 3)), align=case.align)
    return layers.Contender(jigsaw.parallelize(model, mesh), tile)


def prepare(name: str, small: bool, system: str, ranks: int, slabs: int) -> dict[str, float]:
    """Make the contender, warm it up, and measure all but its time."""
    mine = make_contender(name, small, system, ranks, slabs)
    plain = make_contender(name, small, "torch", 1, slabs)
    got, expected = mine.step(), plain.step()
    whole = got.full_tensor() if ranks > 1 else got
    weights = zip(mine.model.parameters(), plain.model.parameters(), strict=True)
    pairs = [(whole, expected), *((a.grad, b.grad) for a, b in weights)]
    error = max((a - b).abs().max().item() for a, b in pairs)
    del got, expected, whole, pairs, plain
    _made[name, small, system] = mine
    return {"peak_bytes": layers.peak_bytes(mine), "held_bytes": _held(mine), "max_abs_err": error}


def _held(mine: layers.Contender) -> int:
    """The bytes that autograd saves, each memory once, but for weights and the input."""
    x = mine.input.local if hasattr(mine.input, "local") else mine.input
    skipped = {t.untyped_storage().data_ptr() for t in (*mine.model.parameters(), x)}
    saved: dict[int, int] = {}
    kept: list[Any] = []

    def pack(t: Any) -> Any:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        kept.append(t)  # so that no memory is counted for two tensors
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mine.model(mine.input)
    del y
    return sum(n for at, n in saved.items() if at not in skipped)


def timed(name: str, small: bool, system: str, ranks: int) -> tuple[float, float]:
    layers._made[name, small, system] = _made[name, small, system]
    return layers.timed(name, small, system, ranks)


def run(name: str, ranks: int, slabs: int, rounds: int, small: bool) -> list[dict[str, Any]]:
    systems = [("torch", 1), ("checkpoint", 1), ("chunked", 1), ("jigsaw", ranks), ("chunked", ranks)]
    if not (SMALL if small else CASES)[name].parts:
        systems = [("torch", 1), ("jigsaw", ranks)]
    found = [run_on_ranks(n, prepare, name, small, s, n, slabs, timeout=layers.TIMEOUT) for s, n in systems]
    times: list[list[tuple[float, float]]] = [[] for _ in systems]
    for _ in range(rounds):
        for seen, (s, n) in zip(times, systems, strict=True):
            each = run_on_ranks(n, timed, name, small, s, n, timeout=layers.TIMEOUT)
            seen.append((max(wall for wall, _ in each), max(busy for _, busy in each)))
    whole = max(one["peak_bytes"] for one in found[0])
    lines: list[dict[str, Any]] = []
    for (s, n), facts, seen in zip(systems, found, times, strict=True):
        most = {field: max(one[field] for one in facts) for field in facts[0]}
        lines.append(
            {
                "case": name,
                "system": s,
                "ranks": n,
                "slabs": slabs if s == "chunked" else 1,
                "share": round(most["peak_bytes"] / whole, 3),
                **most,
                "step_s": round(statistics.median(wall for wall, _ in seen), 4),
                "cpu_s": round(statistics.median(busy for _, busy in seen), 4),
                "rounds": rounds,
                "shape": (SMALL if small else CASES)[name].shape,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slabs", type=int, default=8)
    parser.add_argument("--case", choices=sorted(CASES), help="all of them without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="toy sizes, as the tests run it")
    chosen = parser.parse_args()
    for name in [chosen.case] if chosen.case else CASES:
        for line in run(name, chosen.ranks, chosen.slabs, chosen.rounds, chosen.small):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
