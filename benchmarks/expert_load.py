"""How unevenly experts, and the ranks that have them, are asked, by training step: one JSON object a case.

    python benchmarks/expert_load.py --output benchmarks/results/expert-load-MACHINE-MONTH.jsonl

A layer of 16 experts, two a token, learns a function that differs by cluster of tokens; clusters have shares of 1,
1/2, 1/3, ...  (Zipf).  `busiest_expert` is the choices of the most asked expert over the mean, of the last ten steps;
`busiest_rank` the same of ranks with torch.chunk's shares of the experts, by their number.  Ranks compute in turn with
the busiest, so it is how much longer that part of a step takes than with even shares.  `dropped` is the share of
choices that a capacity of 1.25 has no room for.  Which tokens go where does not depend on the mesh, so one process
measures.
"""

from __future__ import annotations

import argparse
from typing import Any

import strategies_page
import torch
import torch.nn.functional as F
from result_file import ResultFile, add_result_options
from torch import Tensor

import jigsaw

EXPERTS, TOP_K, WIDTH, TOKENS, CLUSTERS = 16, 2, 32, 1024, 32


def load_of(choices: Tensor) -> dict[str, Any]:
    """The facts of one count of choices for each expert."""
    mean, over = choices.mean(), {}
    for ranks in (2, 4, 8):
        each = torch.stack([part.sum() for part in choices.chunk(ranks)])
        over[str(ranks)] = round((each.max() / each.mean()).item(), 3)
    dropped = (choices - 1.25 * mean).clamp(min=0).sum() / choices.sum()
    return {
        "busiest_expert": round((choices.max() / mean).item(), 3), "busiest_rank": over,
        "dropped": round(dropped.item(), 4),
    }  # fmt: skip


def trained(balance: float, steps: int) -> list[dict[str, Any]]:
    """What is asked at the start and at the end of a training with so much of the loss of balance."""
    torch.manual_seed(0)
    layer = jigsaw.nn.MoE(WIDTH, 2 * WIDTH, EXPERTS, TOP_K, mesh=jigsaw.init_mesh(lat=1), axis="lat")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    centers, maps = torch.randn(CLUSTERS, WIDTH), torch.randn(CLUSTERS, WIDTH, WIDTH) / WIDTH**0.5
    shares = 1 / torch.arange(1.0, CLUSTERS + 1)
    loads, losses = list[Tensor](), list[float]()
    for _ in range(steps):
        cluster = torch.multinomial(shares, TOKENS, replacement=True)
        x = 2 * centers[cluster] + 0.5 * torch.randn(TOKENS, WIDTH)
        wanted = torch.einsum("tij,tj->ti", maps[cluster], x)
        loss = F.mse_loss(layer(x), wanted)
        optimizer.zero_grad()
        (loss + balance * layer.balance_loss).backward()
        optimizer.step()
        with torch.no_grad():
            chosen = (x @ layer.router.T).topk(TOP_K, -1).indices
        loads.append(torch.bincount(chosen.flatten(), minlength=EXPERTS).double())
        losses.append(loss.item())
    return [
        {"balance": balance, "steps": at, "loss": round(sum(losses[span]) / 10, 4), **load_of(sum(loads[span]) / 10)}
        for at, span in ((10, slice(0, 10)), (steps, slice(-10, None)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    add_result_options(parser)
    chosen = parser.parse_args()
    results = ResultFile(chosen, f"python benchmarks/expert_load.py --steps {chosen.steps}")
    for balance in (0.0, 0.01, 0.1):
        for row in trained(balance, chosen.steps):
            results.add(row)
    if chosen.output:
        strategies_page.write_tables()


if __name__ == "__main__":
    main()
