"""What a checkpoint costs the training beside it: at once and in the background; one JSON object a line.

    python benchmarks/saving.py --ranks 2 --table 600

Rounds in turns: `--steps` steps alone, the same with a save at once before them, and with one in the background.  The
model has a table of `--table` MB that no step uses, so that a save lasts for many steps.
`step_s` is the median step, of those that began while the save was under way where it is in the background, and
`step_cpu_s` the processor time of the training's thread in it; `slower` and `cpu_slower` are they beside the steps
alone of the same round, the median over rounds.  `call_s` is how long `jigsaw.save` kept the training, `whole_s` until
the checkpoint was whole, `cpu_s` the processor time of the process, steps, save and all.  All times are the slowest
rank's.  What the background wrote, while weights changed, is compared with what they were.  One thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

WAYS = ("alone", "at once", "background")


class Mixer(nn.Module):
    """Residual blocks of two wide layers over the channels of every point."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))
            for _ in range(depth)
        )

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


def rank_rounds(folder: str, width: int, depth: int, rows: int, table: int, steps: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = world_mesh(lat=torch.distributed.get_world_size())
    model = Mixer(width, depth)
    for at in range(table):
        model.register_buffer(f"table{at}", torch.full((250_000,), float(at)))
    model = jigsaw.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = jigsaw.shard(torch.randn(1, width, rows, rows), mesh, (None, None, "lat", None))

    def step() -> tuple[float, float]:
        began, cpu = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began, time.thread_time() - cpu

    def one_round(way: str) -> dict[str, float]:
        torch.distributed.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        things = {"model": model, "optimizer": optimizer}
        pending = None
        if way == "at once":
            jigsaw.save(Path(folder, "now"), **things)
        elif way == "background":
            pending = jigsaw.save(Path(folder, "later"), **things, wait=False)
        call = time.perf_counter() - began
        took: list[tuple[float, float]] = []
        whole = call
        for _ in range(steps):
            busy = pending is not None and not pending.done()
            spent = step()
            if way != "background" or busy:
                took.append(spent)
                whole = time.perf_counter() - began if busy else whole
        if pending is not None:
            pending.wait()
        return {
            "step_s": statistics.median(wall for wall, _ in took or [step()]),
            "step_cpu_s": statistics.median(cpu for _, cpu in took or [step()]),
            "steps": len(took),
            "call_s": call,
            "whole_s": whole,
            "cpu_s": time.process_time() - cpu,
        }

    step()
    same = _same_values(folder, model, optimizer)
    told = [{way: one_round(way) for way in WAYS} for _ in range(rounds)]
    size = sum(each.stat().st_size for each in Path(folder, "now").iterdir())
    return {"rounds": told, "bytes": size, "same": same}


def _same_values(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a save in the background, with weights changed meanwhile, holds what one at once holds."""
    before = [p.detach().clone() for p in model.parameters()]
    pending = jigsaw.save(Path(folder, "later"), model=model, optimizer=optimizer, wait=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    pending.wait()
    jigsaw.load(Path(folder, "later"), model=model, optimizer=optimizer)
    return all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--table", type=int, default=600)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = args.width, args.depth, args.rows, args.table, args.steps, args.rounds
        told = run_on_ranks(args.ranks, rank_rounds, folder, *sizes, timeout=1200)
    if not all(each["same"] for each in told):
        raise SystemExit("the background wrote other values than those of its call")
    for way in WAYS:
        rows = [[each["rounds"][at] for each in told] for at in range(args.rounds)]
        medians = {
            key: round(statistics.median(max(rank[way][key] for rank in row) for row in rows), 4)
            for key in ("step_s", "step_cpu_s", "call_s", "whole_s", "cpu_s")
        }
        for key, name in (("step_s", "slower"), ("step_cpu_s", "cpu_slower")):
            beside = [max(r[way][key] for r in row) / max(r["alone"][key] for r in row) for row in rows]
            medians[name] = round(statistics.median(beside), 3)
        case = {"ranks": args.ranks, "width": args.width, "depth": args.depth, "rows": args.rows, "way": way}
        seen = min(rank[way]["steps"] for row in rows for rank in row)
        print(json.dumps(case | {"bytes": told[0]["bytes"]} | medians | {"steps_seen": seen}))


if __name__ == "__main__":
    main()
