"""The host time that a tile adds to a function: processor microseconds of small tensors; one JSON object a function.

    python benchmarks/host_time.py --ranks 1
    python benchmarks/host_time.py --ranks 2 --steps unet,transformer,mixer,volumes

A GPU waits for the host where tiles are small, so what Python adds to a call is speed.  The same function is called on
tiles and on their local tensors by turns; `plain_us` and `tile_us` are the least of `--rounds` means over `--calls`
calls, processor time of this process, and `added_us` is their difference.  With several ranks the slowest rank's;
functions that send (`sends`: bytes a call) then wait for others too, so their processor time says little.

With ``--steps`` it is the nets of dry_run.py, their rows cut over the ranks: `python_calls` is how many Python
functions a training step calls, torch's among them, `step_ms` the median processor time of the thread that trains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dry_run import NETS, training_step
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

Operands = dict[str, Any]


def functions(t: Operands) -> dict[str, Callable[[], Any]]:
    """What is called, on tiles or on plain tensors."""
    x, y, w, b, tokens, lin = t["x"], t["y"], t["w"], t["b"], t["tokens"], t["lin"]
    heads, scale, row, labels, scores = t["heads"], t["scale"], t["row"], t["labels"], t["scores"]
    z = t["z"]
    return {
        "x + 1": lambda: x + 1,
        "x + y": lambda: x + y,
        "x * x": lambda: x * x,
        "x + row": lambda: tokens + row,
        "x * scale": lambda: x * scale,
        "torch.exp": lambda: torch.exp(x),
        "F.gelu": lambda: F.gelu(x),
        "F.relu": lambda: F.relu(x),
        "F.silu": lambda: F.silu(x),
        "x.clamp": lambda: x.clamp(0, 1),
        "torch.where": lambda: torch.where(x > 0, x, y),
        "z += y": lambda: z.add_(y),
        "F.relu(inplace)": lambda: F.relu(z, inplace=True),
        "x.masked_fill": lambda: x.masked_fill(x > 0, 0.0),
        "x.to(dtype)": lambda: x.to(torch.float64),
        "x.float()": x.float,
        "x.detach": x.detach,
        "x.clone": x.clone,
        "x.contiguous": x.contiguous,
        "torch.zeros_like": lambda: torch.zeros_like(x),
        "x.sum()": x.sum,
        "x.mean()": x.mean,
        "x.sum(1)": lambda: x.sum(1),
        "x.mean(1, keepdim)": lambda: x.mean(1, keepdim=True),
        "x.var(1)": lambda: x.var(1),
        "x.amax(1)": lambda: x.amax(1),
        "torch.cat": lambda: torch.cat([x, y], 1),
        "torch.stack": lambda: torch.stack([x, y], 1),
        "x[:, :2]": lambda: x[:, :2],
        "x[:, 1]": lambda: x[:, 1],
        "x[..., None]": lambda: x[..., None],
        "x.transpose": lambda: x.transpose(1, 2),
        "x.permute": lambda: x.permute(0, 2, 3, 1),
        "x.flatten": lambda: x.flatten(2),
        "x.view": lambda: x.view(1, 2, 2, -1, 8),
        "x.reshape": lambda: x.reshape(1, 2, 2, -1, 8),
        "x.unflatten": lambda: x.unflatten(1, (2, 2)),
        "x.unsqueeze": lambda: x.unsqueeze(0),
        "x.squeeze": lambda: x.squeeze(0),
        "x.expand": lambda: x.expand(2, -1, -1, -1),
        "x.chunk": lambda: x.chunk(2, 1),
        "x.split": lambda: x.split(2, 1),
        "x.unbind": lambda: x.unbind(1),
        "x.softmax(1)": lambda: x.softmax(1),
        "F.log_softmax": lambda: F.log_softmax(x, 1),
        "F.dropout": lambda: F.dropout(x, 0.5),
        "F.dropout(0)": lambda: F.dropout(x, 0.0),
        "F.layer_norm": lambda: F.layer_norm(tokens, (4,)),
        "F.rms_norm": lambda: F.rms_norm(tokens, (4,)),
        "F.group_norm": lambda: F.group_norm(x, 2),
        "F.batch_norm": lambda: F.batch_norm(x, b, b, training=False),
        "F.conv2d 1x1": lambda: F.conv2d(x, w, b),
        "F.conv2d 3x3": lambda: F.conv2d(x, t["w3"], b, padding=1),
        "F.conv_transpose2d": lambda: F.conv_transpose2d(x, t["w2"], b, stride=2),
        "F.linear": lambda: F.linear(tokens, lin, b),
        "F.avg_pool2d": lambda: F.avg_pool2d(x, 2),
        "F.max_pool2d": lambda: F.max_pool2d(x, 2),
        "F.interpolate": lambda: F.interpolate(x, scale_factor=2),
        "F.pad": lambda: F.pad(x, (1, 1)),
        "F.pixel_shuffle": lambda: F.pixel_shuffle(x, 2),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads),
        "torch.matmul": lambda: torch.matmul(tokens, lin),
        "q @ k": lambda: heads @ heads.transpose(-2, -1),
        "torch.einsum": lambda: torch.einsum("bchw,oc->bohw", x, lin),
        "F.embedding": lambda: F.embedding(labels, t["table"]),
        "F.mse_loss": lambda: F.mse_loss(x, y),
        "F.l1_loss": lambda: F.l1_loss(x, y),
        "F.cross_entropy": lambda: F.cross_entropy(scores, labels),
    }


def losses(t: Operands) -> dict[str, Callable[[], Any]]:
    """Numbers whose gradients are taken, with respect to what in `t` requires grad."""
    x, y, w3, b, tokens, lin = t["x"], t["y"], t["w3"], t["b"], t["tokens"], t["lin"]
    heads, scale, block = t["heads"], t["scale"], t["block"]
    return {
        "x + y": lambda: torch.sum(x + y),
        "x * scale": lambda: torch.sum(x * scale),
        "x[:, :2]": lambda: torch.sum(x[:, :2]),
        "x.flatten.transpose": lambda: x.flatten(2).transpose(1, 2).sum(),
        "torch.cat": lambda: torch.cat([x, y], 1).sum(),
        "F.gelu": lambda: F.gelu(x).sum(),
        "F.conv2d 3x3": lambda: F.conv2d(x, w3, b, padding=1).sum(),
        "F.linear": lambda: F.linear(tokens, lin, b).sum(),
        "F.layer_norm": lambda: F.layer_norm(tokens, (4,), b, b).sum(),
        "F.group_norm": lambda: F.group_norm(x, 2, b, b).sum(),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads).sum(),
        "F.mse_loss": lambda: F.mse_loss(x, y),
        "a block": lambda: block(tokens).square().mean(),
    }


def make_block() -> nn.Module:
    """A parallelized net of modules that are called one after the other."""
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 4))


def least_mean(function: Callable[[], Any], calls: int) -> float:
    """Processor microseconds of a call."""
    before = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - before) / calls * 1e6


def operands(mesh: DeviceMesh) -> tuple[Operands, Operands]:
    """Tiles and their local tensors; what is not a tile is in both."""
    torch.manual_seed(0)
    block = jigsaw.parallelize(make_block(), mesh)
    specs = {
        "x": ((1, 4, 8, 8), (None, None, "lat", None)),
        "y": ((1, 4, 8, 8), (None, None, "lat", None)),
        "z": ((1, 4, 8, 8), (None, None, "lat", None)),
        "tokens": ((1, 64, 4), (None, "lat", None)),
        "heads": ((1, 1, 64, 4), (None, None, "lat", None)),
        "scores": ((2, 5, 8), (None, None, "lat")),
    }
    tiles: Operands = {k: jigsaw.shard(torch.randn(size), mesh, spec) for k, (size, spec) in specs.items()}
    tiles["labels"] = jigsaw.shard(torch.randint(5, (2, 8)), mesh, (None, "lat"))
    weights = {
        "w": (4, 4, 1, 1),
        "w2": (4, 4, 2, 2),
        "w3": (4, 4, 3, 3),
        "b": (4,),
        "table": (5, 4),
        "lin": (4, 4),
        "row": (4,),
    }
    whole: Operands = {k: torch.randn(size) for k, size in weights.items()}
    whole |= {"scale": torch.randn(4, 1, 1), "block": block}
    return tiles | whole, {k: tile.local for k, tile in tiles.items()} | whole


def compare(name: str, on_tiles: Callable[[], Any], on_plain: Callable[[], Any], rounds: int, calls: int) -> Any:
    with comm.count() as counted:
        on_tiles()
    sends = counted.sent_bytes
    for _ in range(20):
        on_tiles()
    times = [(least_mean(on_plain, calls), least_mean(on_tiles, calls)) for _ in range(rounds)]
    plain_us, tile_us = min(p for p, _ in times), min(t for _, t in times)
    return {"function": name, "plain_us": plain_us, "tile_us": tile_us, "sends": sends}


def gradient(loss: Callable[[], Any], of: list[torch.Tensor]) -> Callable[[], Any]:
    """The backward pass of a loss alone."""
    value = loss()
    return lambda: torch.autograd.grad(value, of, retain_graph=True, allow_unused=True)


def measure(rounds: int, calls: int) -> list[dict[str, Any]]:
    tiles, local = operands(world_mesh(lat=dist.get_world_size()))
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for (name, on_tiles), on_plain in zip(functions(tiles).items(), functions(local).values(), strict=True):
            found.append(compare(name, on_tiles, on_plain, rounds, calls))
    for x in (*local.values(), *local["block"].parameters()):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    of = [x for k, x in local.items() if k not in ("block", "labels")] + list(local["block"].parameters())
    for (name, on_tiles), on_plain in zip(losses(tiles).items(), losses(local).values(), strict=True):
        found.append(compare(f"forward: {name}", on_tiles, on_plain, rounds, calls))
        back = gradient(on_tiles, of), gradient(on_plain, of)
        found.append(compare(f"backward: {name}", *back, rounds, calls))
    return found


def measure_steps(names: list[str], rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for name in names:
        make, shape, align = NETS[name]
        step = training_step(make, shape, align, {"lat": dist.get_world_size()})
        for _ in range(4):
            step()
        seconds: list[float] = []
        for _ in range(rounds):
            dist.barrier()
            since = time.thread_time()
            step()
            seconds.append(time.thread_time() - since)
        found.append({"net": name, "python_calls": count_calls(step), "step_ms": statistics.median(seconds) * 1e3})
    return found


def count_calls(function: Callable[[], Any]) -> int:
    """How many Python functions it calls in this thread, in which a backward pass on CPUs runs as well."""
    found = 0

    def notice(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(notice)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--steps", metavar="NETS", type=lambda text: text.split(","))
    options = parser.parse_args()
    if options.steps:
        by_rank = run_on_ranks(options.ranks, measure_steps, options.steps, options.rounds, timeout=600)
        for of_net in zip(*by_rank, strict=True):
            slowest = max(of_net, key=lambda one: one["step_ms"])
            print(json.dumps({"ranks": options.ranks, **slowest, "step_ms": round(slowest["step_ms"], 2)}), flush=True)
        return
    by_rank = run_on_ranks(options.ranks, measure, options.rounds, options.calls, timeout=600)
    added: list[float] = []
    for of_function in zip(*by_rank, strict=True):
        # a broadcast is sent by one rank alone
        slowest = max(of_function, key=lambda one: one["tile_us"]) | {"sends": max(x["sends"] for x in of_function)}
        extra = slowest["tile_us"] - slowest["plain_us"]
        if not slowest["sends"]:
            added.append(extra)
        rounded = {k: round(v, 1) if isinstance(v, float) else v for k, v in slowest.items()}
        print(json.dumps({"ranks": options.ranks, **rounded, "added_us": round(extra, 1)}), flush=True)
    summary = {"functions_that_send_nothing": len(added), "median_added_us": round(statistics.median(added), 1)}
    print(json.dumps({"ranks": options.ranks, **summary, "most_added_us": round(max(added), 1)}))


if __name__ == "__main__":
    main()
