"""How long stages of a pipeline wait, beside theory: one JSON object a schedule.

    python benchmarks/pipeline_waits.py --output benchmarks/results/pipeline-waits-MACHINE-MONTH.jsonl

Layers sleep in place of computing, a third of their time forward, for gradients of the input and of weights each, so
that ranks do not share this machine's cores and nothing else is in the times.  `waits` is the share of a step during
which a rank does not work, 1 - (work of a rank) / (step of the slowest rank), the median over `--rounds`.  `theory` is
(P - 1) / (M + P - 1) of P ranks and M microbatches for GPipe (Huang et al., arXiv 1811.06965) and 1F1B, and
(P - 1) / (v M + P - 1) with v stages a rank (Narayanan et al., arXiv 2104.04473); schedules that compute gradients of
weights in the gaps have none here but that it be less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import strategies_page
import torch
import torch.distributed as dist
import torch.nn.functional as F
from result_file import ResultFile, add_result_options
from torch import Tensor, nn

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

STAGES_A_RANK = {
    "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2, "dualpipev": 2,
}  # fmt: skip


class _SlowInput(torch.autograd.Function):
    """y = x, late; and late backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0].clone(), None


class _SlowWeight(torch.autograd.Function):
    """The weight, whose gradient alone is late."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0].clone(), None


class SlowLayer(nn.Module):
    """y = w x, which takes `seconds` forward and as long for each of its two gradients."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return 1.0 * _SlowInput.apply(x * _SlowWeight.apply(self.weight, self.seconds), self.seconds)


def seconds_of_steps(ranks: int, schedule: str, batches: int, seconds: float, rounds: int) -> list[float]:
    """The times of steps on this rank, all ranks beginning together."""
    mesh = world_mesh(pipe=ranks)
    layers = ranks * STAGES_A_RANK[schedule]
    model = nn.Sequential(*(SlowLayer(seconds / STAGES_A_RANK[schedule]) for _ in range(layers)))
    stages = [str(at) for at in range(1, layers)]
    pipe = jigsaw.pipeline(model, mesh, loss=F.mse_loss, microbatches=batches, schedule=schedule, stages=stages)
    x, y = torch.ones(batches, 4), torch.zeros(batches, 4)
    found: list[float] = []
    for _ in range(rounds + 1):
        pipe.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        pipe.step(x, y)
        found.append(time.perf_counter() - start)
    for p in pipe.parameters():  # mean of (w^n x)^2: each weight's gradient is 2
        torch.testing.assert_close(p.grad, torch.full((1,), 2.0))
    return found[1:]  # the first one plans


def waits(ranks: int, schedule: str, batches: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The result of a schedule."""
    of_ranks = run_on_ranks(ranks, seconds_of_steps, ranks, schedule, batches, seconds, rounds, timeout=300.0)
    slowest = [max(steps) for steps in zip(*of_ranks, strict=True)]
    work, per_rank = 3 * seconds * batches, STAGES_A_RANK[schedule]
    theory = (
        None
        if schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
        else (ranks - 1) / (per_rank * batches + ranks - 1)
    )
    return {
        "schedule": schedule, "ranks": ranks, "microbatches": batches, "stages": ranks * per_rank,
        "step_s": round(statistics.median(slowest), 4), "work_s": round(work, 4),
        "waits": round(1 - work / statistics.median(slowest), 3), "theory": theory and round(theory, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.06, help="of a stage forward, of one microbatch")
    parser.add_argument("--rounds", type=int, default=5)
    add_result_options(parser)
    chosen = parser.parse_args()
    command = f"python benchmarks/pipeline_waits.py --microbatches {chosen.microbatches} --rounds {chosen.rounds}"
    results = ResultFile(chosen, command)
    for ranks in chosen.ranks:
        for schedule in STAGES_A_RANK:
            results.add(waits(ranks, schedule, chosen.microbatches, chosen.seconds, chosen.rounds))
    if chosen.output:
        strategies_page.write_tables()


if __name__ == "__main__":
    main()
