"""Latency of decoding requests with Wan's video autoencoder of diffusers, on one rank and on two; a JSON object a way.

    python benchmarks/vae_latency.py --output benchmarks/results/vae-latency-MACHINE-MONTH.jsonl   # with `make zoo`

The net has a sixth of the published width (16 channels) and random weights, in float32. Requests of one batch are
decoded at once.  The ways take turns, round by round, with one thread a rank:

- `plain`: diffusers in one process, without jigsaw;
- `1 rank`: the same net, parallelized on a mesh of one;
- `y=2`: every frame is cut, so both ranks work at each request;
- `data=2`: each rank has half of the requests.

`latency_s` is the median over the rounds until the slowest rank has its part of the frames, `least_s` the least;
`cpu_s` the median of the processor's seconds of the rank that has most; `sent_bytes` what the busiest rank sends in a
batch; `off` the largest difference to plain diffusers, of the largest value.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1] / "tests" / "zoo"))

import torch
import torch.distributed as dist
from result_file import ResultFile, add_result_options
from zoo_net import define_missing_operators

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

WAYS: dict[str, dict[str, int]] = {"plain": {}, "1 rank": {"y": 1}, "y=2": {"y": 2}, "data=2": {"data": 2}}
LATENTS = (16, 1, 24, 32)  # channels, frames, rows, columns: one frame of 192 x 256


@cache
def autoencoder(way: str) -> Any:
    """The net, made once in each process."""
    define_missing_operators()
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    net = AutoencoderKLWan(base_dim=16, latents_mean=[0.0] * 16, latents_std=[1.0] * 16).eval()
    return jigsaw.parallelize(net, world_mesh(**WAYS[way])) if WAYS[way] else net


@torch.no_grad()
def decode(way: str, requests: int) -> tuple[float, float, int, Any]:
    """Decode a batch once: seconds, those of the processor, bytes sent; and on the first rank the frames."""
    net, axes = autoencoder(way), WAYS[way]
    latents: Any = torch.randn(requests, *LATENTS, generator=torch.Generator().manual_seed(7))
    if axes:
        spec = ("data" if "data" in axes else None, None, None, "y" if "y" in axes else None, None)
        latents = jigsaw.shard(latents, world_mesh(**axes), spec)
        dist.barrier()
    with comm.count() as counted:
        began, began_cpu = time.perf_counter(), time.process_time()
        frames = net.decode(latents).sample
        took = time.perf_counter() - began, time.process_time() - began_cpu
    whole = frames.full_tensor() if axes else frames
    return *took, counted.sent_bytes, whole if not axes or dist.get_rank() == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    add_result_options(parser)
    options = parser.parse_args()
    command = f"python benchmarks/vae_latency.py --requests {' '.join(map(str, options.requests))}"
    command += f" --rounds {options.rounds}"
    file = ResultFile(options, command, torch=torch.__version__, diffusers=version("diffusers"))
    torch.set_num_threads(1)
    for requests in options.requests:
        ways = {way: axes for way, axes in WAYS.items() if requests % axes.get("data", 1) == 0}
        rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        sent, frames = dict[str, int](), dict[str, Any]()
        for number in range(options.rounds + 1):
            for way, axes in ways.items():
                ranks = torch.Size(axes.values()).numel()
                found = run_on_ranks(ranks, decode, way, requests, timeout=300) if axes else [decode(way, requests)]
                frames[way], sent[way] = found[0][3], max(each[2] for each in found)
                if number:  # the first makes the net
                    rounds[way].append((max(each[0] for each in found), max(each[1] for each in found)))
        for way, took in rounds.items():
            walls, busy = zip(*took, strict=True)
            off = (frames[way] - frames["plain"]).abs().max() / frames["plain"].abs().max()
            file.add(
                {
                    "requests": requests, "way": way, "latency_s": round(statistics.median(walls), 3),
                    "least_s": round(min(walls), 3), "cpu_s": round(statistics.median(busy), 3),
                    "sent_bytes": sent[way], "off": float(f"{off.item():.2g}"),
                }
            )  # fmt: skip


if __name__ == "__main__":
    main()
