"""What a training step of eight residual blocks holds, by what it keeps for the backward pass; one JSON object a line.

    python benchmarks/recomputing.py --ranks 2

The ways: everything kept (``plain``), ``torch.utils.checkpoint`` around the whole net (``full``), around each block
(``by block``), around each with a policy that keeps what convolutions return (``selective``), ``offloaded``, what is
saved copied to the host, and ``accumulated``, the batch in four parts one after the other.  `peak_bytes` is the highest
sum of live allocations of a step on the rank that has the most (torch's profiler), so neither the input nor the
weights; memory of numpy, which the profiler does not see, stands for the host's.  `share` is the peak beside that of
plain torch on one rank.  `halo_bytes` is what halos send forward and backward on that rank, `cpu_s` the processor
seconds of a step, the slowest rank's of a median of `--rounds`.  `max_abs_err` is of all gradients, beside plain torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import layers
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

WAYS = ("plain", "full", "by block", "selective", "offloaded", "accumulated")
PARTS = 4
SHAPE, SMALL = (4, 16, 240, 240), (4, 4, 48, 16)


class ResidualBlock(nn.Module):
    """Two convolutions, a norm and an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, width, width, 3, padding=1)
        self.body = nn.Sequential(conv(), nn.GroupNorm(4, width), nn.GELU(), conv())

    def forward(self, x: Any) -> Any:
        return x + self.body(x)


def _keeps_convolutions(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_dear = function is torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


class BlockNet(nn.Module):
    """Blocks one after the other, in one of the ways."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(8)))
        self.way = way

    def forward(self, x: Any) -> Any:
        again: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
        if self.way == "full":
            return again(self.blocks, x)
        if self.way == "offloaded":
            with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
                return self.blocks(x)
        contexts = partial(create_selective_checkpoint_contexts, _keeps_convolutions)
        for block in self.blocks:
            if self.way == "by block":
                x = again(block, x)
            elif self.way == "selective":
                x = again(block, x, context_fn=contexts)
            else:
                x = block(x)
        return x


def _to_host(x: torch.Tensor) -> Any:
    return x if isinstance(x, nn.Parameter) else x.detach().numpy().copy()


def _from_host(kept: Any) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept).clone()


class ContenderInParts(layers.Contender):
    """A step on parts of the batch, whose gradients are added up and reduced with the last."""

    def step(self) -> Any:
        self.model.zero_grad()
        size = self.input.shape[0] // PARTS
        for at in range(PARTS):
            part = self.input[at * size : (at + 1) * size]
            if at + 1 < PARTS:
                with jigsaw.no_sync(self.model):
                    (self.model(part).square().mean() / PARTS).backward()
            else:
                (self.model(part).square().mean() / PARTS).backward()


def make_way(way: str, ranks: int, shape: tuple[int, ...]) -> layers.Contender:
    torch.manual_seed(0)
    model, x = BlockNet(shape[1], way), torch.randn(shape)
    kind = ContenderInParts if way == "accumulated" else layers.Contender
    if ranks == 1:
        return kind(model, x)
    mesh = world_mesh(lat=ranks)
    return kind(jigsaw.parallelize(model, mesh), jigsaw.shard(x, mesh, (None, None, "lat", None)))


def measure(way: str, ranks: int, rounds: int, shape: tuple[int, ...]) -> dict[str, Any]:
    mine, plain = make_way(way, ranks, shape), make_way("plain", 1, shape)
    plain.step()
    with comm.count() as counted:
        mine.step()
    pairs = zip(mine.model.parameters(), plain.model.parameters(), strict=True)
    error = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
    del plain, pairs
    busy: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        mine.step()
        busy.append(time.process_time() - start)
    return {
        "peak_bytes": layers.peak_bytes(mine),
        "halo_bytes": sum(c.sent_bytes for c in counted.calls if c.kind == "exchange"),
        "cpu_s": round(statistics.median(busy), 3),
        "max_abs_err": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="toy sizes, as the tests run it")
    chosen = parser.parse_args()
    shape, whole = SMALL if chosen.small else SHAPE, 0
    for ranks in (1, chosen.ranks):
        for way in WAYS:
            found = run_on_ranks(ranks, measure, way, ranks, chosen.rounds, shape, timeout=layers.TIMEOUT)
            most = {field: max(one[field] for one in found) for field in found[0]}
            whole = whole or most["peak_bytes"]
            line = {"way": way, "ranks": ranks, "share": round(most["peak_bytes"] / whole, 3), **most, "shape": shape}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
