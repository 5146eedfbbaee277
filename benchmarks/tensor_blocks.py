"""Transformer blocks as their libraries write them, cut along `channel` without a plan, beside Megatron's formula.

    python benchmarks/tensor_blocks.py --output benchmarks/results/tensor-blocks-MACHINE-MONTH.jsonl

A case is two blocks of `tests/parallel/plan_blocks.py` in float64 on 4 x 64 tokens of 128 channels, 16 heads, 8 of keys
where they are grouped.  `bytes` are what the rank that sends most sends in a step, over four sums a block of
2 (P-1)/P of its tokens, without the gradients of weights that are whole on each rank.  With 2 and 4 ranks they are
counted on ranks, whose result and gradients are compared with one process to 1e-12; with 8 by a dry run. `flop` and
`activations`, by a dry run, are those of the rank with most, over 1/P of one process.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import Any

import strategies_page
import torch
from result_file import ResultFile, add_result_options
from torch import nn

import jigsaw
from jigsaw.parallel.channel_parallel import completed_plan
from jigsaw.testing import run_on_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parallel"))

import plan_blocks

SIZES = {"WIDTH": 128, "HEADS": 16, "KEY_HEADS": 8, "SAMPLES": 4, "GRID": (8, 8)}
TOKENS = 64
WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "whole": (None, {}),
    "cut": ("channel", {}),
    "cut, gathered again": ("channel", {"gather_again": True}),
}
"""The axis that cuts tokens, and options of `parallelize`."""


def _at_size(block: str) -> Any:
    torch.set_default_dtype(torch.float64)
    for name, size in SIZES.items():
        setattr(plan_blocks, name, size)
    return getattr(plan_blocks, block)


def _input_shape() -> tuple[Any, ...]:
    return SIZES["SAMPLES"], TOKENS, SIZES["WIDTH"]


def counted_bytes(block: str, ranks: int, way: str) -> tuple[int, int]:
    """Return what this rank sends in a step, and the bytes of weights that it has whole."""
    tokens, options = WAYS[way]
    make, axes, spec = _at_size(block), {"channel": ranks}, (None, tokens, None)
    plan, _ = completed_plan(nn.Sequential(make(), make()), None, ranks, torch.empty(_input_shape()))
    forward, backward, _, plain = plan_blocks.trained_beside_whole(make, axes, spec, plan, tokens=TOKENS, **options)
    return forward + backward, plain


@cache
def _counted(block: str, ranks: int, way: str) -> tuple[int, int]:
    return max(run_on_ranks(ranks, counted_bytes, block, ranks, way, timeout=300.0))


@cache
def _played(block: str, ranks: int, way: str) -> Any:
    make, (tokens, options) = _at_size(block), WAYS[way]
    net, spec = nn.Sequential(make(), make()), (None, tokens, None)
    return jigsaw.dry_run(net, _input_shape(), {"channel": ranks}, spec=spec, optimizer=None, **options)


def _most_of(report: Any) -> tuple[int, int]:
    """Return the FLOP and the activations of the ranks that have most."""
    flop = max(rank.flop for rank in report.ranks)
    return flop, max(phase.peak["activations"] for rank in report.ranks for phase in rank.phases.values())


def measured(block: str, ranks: int, way: str) -> dict[str, Any]:
    """Return what a block costs, over what it would cost at best."""
    report = _played(block, ranks, way)
    (flop, activations), (one_flop, one_activations) = _most_of(report), _most_of(_played(block, 1, "whole"))
    both_ways = 2 * (ranks - 1) / ranks
    sent, plain = _counted(block, min(ranks, 4), way)
    if ranks > 4:  # the same weights are whole as with four ranks
        sent = report.sent_bytes
    one_sum = SIZES["SAMPLES"] * TOKENS * SIZES["WIDTH"] * 8 * both_ways
    return {
        "block": block, "ranks": ranks, "tokens": way, "counted": ranks <= 4,
        "flop": round(flop * ranks / one_flop, 3), "activations": round(activations * ranks / one_activations, 3),
        "bytes": round((sent - both_ways * plain) / (2 * 4 * one_sum), 3),
        "remarks": [f"{r.module}: {r.reason}" for r in report.remarks],
    }  # fmt: skip


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--block", nargs="+", default=[block.__name__ for block in plan_blocks.BLOCKS])
    add_result_options(parser)
    chosen = parser.parse_args()
    command = f"python benchmarks/tensor_blocks.py --ranks {' '.join(map(str, chosen.ranks))}"
    results = ResultFile(chosen, command)
    for ranks in chosen.ranks:
        for block in chosen.block:
            for way in WAYS:
                results.add(measured(block, ranks, way))
    if chosen.output:
        strategies_page.write_tables()


if __name__ == "__main__":
    main()
