"""A training step on one GPU, in plain torch and on a tile of the whole sample, by turns: one JSON object a net.

    python benchmarks/gpu_step.py

`step_ms` ends when the GPU is done, `host_ms` when the host has told it everything; both are medians of `--rounds`,
plain torch's first.  `memory_mib` is the peak of a step beside weights and optimizer.  Steps are in bfloat16 by
autocast, with a fused AdamW.  The small nets have so little to compute that the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import jigsaw

SPEC = (None, None, "lat", None)


class ResidualBlock(nn.Module):
    """Two convolutions with a norm between, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.silu(self.norm(self.first(x))))


class TwoLevels(nn.Module):
    """A U-Net of two levels, which meet at an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(69, 64, 3, padding=1)
        self.high = nn.Sequential(*[ResidualBlock(64) for _ in range(4)])
        self.down = nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.low = nn.Sequential(*[ResidualBlock(128) for _ in range(4)])
        self.leave = nn.Conv2d(192, 69, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.high(self.enter(x))
        low = self.low(self.down(high))
        return self.leave(torch.cat([high, F.interpolate(low, size=high.shape[-2:])], 1))


class PatchTokens(nn.Module):
    """Patches of 8 x 8, and eight layers of attention over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(69, 512, 8, stride=8)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True) for _ in range(8)])
        self.leave = nn.Linear(512, 69)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.leave(tokens)


CASES = {
    "unet": (TwoLevels, (1, 69, 721, 1440)),
    "tokens": (PatchTokens, (1, 69, 720, 1440)),
    "small unet": (TwoLevels, (1, 69, 64, 128)),
    "small tokens": (PatchTokens, (1, 69, 64, 128)),
}


def train_once(net: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(name: str, rounds: int) -> dict[str, object]:
    make, shape = CASES[name]
    mesh = jigsaw.init_mesh(lat=1, device="cuda")
    torch.manual_seed(0)
    plain = make().cuda()
    tiled = jigsaw.parallelize(copy.deepcopy(plain), mesh)
    x = torch.randn(shape, device="cuda")
    sides = [(plain, x), (tiled, jigsaw.shard(x, mesh, SPEC))]
    optimizers = [torch.optim.AdamW(net.parameters(), fused=True) for net, _ in sides]
    seconds: list[list[float]] = [[], []]
    host_seconds: list[list[float]] = [[], []]
    memory = [0, 0]
    for at in range(rounds + 3):  # three to warm up
        for side, (net, value) in enumerate(sides):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, begin = torch.cuda.memory_allocated(), time.perf_counter()
            train_once(net, value, optimizers[side])
            told = time.perf_counter()
            torch.cuda.synchronize()
            if at >= 3:
                seconds[side].append(time.perf_counter() - begin)
                host_seconds[side].append(told - begin)
            memory[side] = torch.cuda.max_memory_allocated() - before
    step, host = ([round(1e3 * statistics.median(s), 2) for s in times] for times in (seconds, host_seconds))
    return {
        "net": name,
        "step_ms": step,
        "ratio": round(step[1] / step[0], 3),
        "host_ms": host,
        "memory_mib": [round(m / 2**20) for m in memory],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nets", default=",".join(CASES), help="which, separated by commas")
    options = parser.parse_args()
    for name in options.nets.split(","):
        print(json.dumps(measure(name, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
