"""Attention over cut tokens: a block of a ring by each kernel, and every way on several ranks; one JSON object a case.

    python benchmarks/attention_ways.py

Results are compared with plain torch on the whole tensor before anything is timed.  `cpu_ms` is the processor time of
the least of `--rounds`, on ranks that of the rank that took the most; `mb` is what the process took more at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

import jigsaw
from jigsaw import comm
from jigsaw.nn.attention import ring_attention
from jigsaw.nn.attention.block_attention import BlockRows, block_gradients, sum_block
from jigsaw.testing import run_on_ranks, world_mesh


def _peak_mb() -> float:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _measured(step: Callable[[], Any], rounds: int) -> float:
    least = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        step()
        least = min(least, time.process_time() - start)
    return round(least * 1e3, 1)


def _block(kernel: str, dtype: torch.dtype, tokens: int, rounds: int) -> dict[str, float]:
    """One block of 8 heads of 64 features, forward and backward."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 8, tokens, 64, dtype=dtype) for _ in range(4))
    part = BlockRows(slice(0, tokens), slice(0, tokens), torch.arange(tokens))
    base = _peak_mb()
    is_fused = kernel == "fused"

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        found = sum_block(part, q * 0.125, k, v, is_fused)
        return found.mixed / found.total[..., None], found.highest + found.total.log()

    out, log_sum = forward()

    def backward() -> Any:
        return block_gradients(part, q * 0.125, k, v, out, log_sum, grad, is_fused)

    gradients = backward()
    mb = _peak_mb() - base
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole)
    expected.backward(grad.double())
    pairs = (out, expected), (gradients.k, whole[1].grad), (gradients.v, whole[2].grad)
    error = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    assert error < (1e-9 if dtype == torch.float64 else 1e-4), error
    return {
        "forward_cpu_ms": _measured(forward, rounds),
        "backward_cpu_ms": _measured(backward, rounds),
        "mb": round(mb, 1),
        "error": error,
    }


def _way(way: str, is_causal: bool, is_mirrored: bool, tokens: int, heads: int, rounds: int, ranks: int) -> Any:
    mesh = world_mesh(lat=ranks)
    ring_attention.MIRRORED_QUERIES = 0 if is_mirrored else tokens
    torch.manual_seed(0)
    whole = torch.randn(3, 1, heads, tokens, 64)
    tiles = [jigsaw.shard(x, mesh, (None, None, "lat", None)) for x in whole]
    for x in tiles:
        x.local.requires_grad_()

    def step() -> Any:
        with jigsaw.nn.attention_way(way):
            y = F.scaled_dot_product_attention(*tiles, is_causal=is_causal)
            y.local.backward(torch.ones_like(y.local))
            return y

    with comm.count() as traffic:
        y = step()
    expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal)
    torch.testing.assert_close(y.full_tensor().detach(), expected, rtol=1e-4, atol=1e-4)
    mine = _measured(step, rounds), traffic.sent_bytes
    every = comm.all_gather_object(mesh, mine)
    return {"cpu_ms": [cpu for cpu, _ in every], "sent_mb": round(max(sent for _, sent in every) / 1e6, 2)}


def main() -> None:
    """Print every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _ = parser.add_argument("--tokens", type=int, default=2048)
    _ = parser.add_argument("--heads", type=int, default=8, help="of the ways on several ranks")
    _ = parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for dtype in (torch.float32, torch.float64):
        for kernel in ("products", "fused"):
            with get_context("spawn").Pool(1) as one:  # so that its peak is its own
                found = one.apply(_block, (kernel, dtype, asked.tokens, asked.rounds))
            print(json.dumps({"block": kernel, "dtype": str(dtype), "tokens": asked.tokens, **found}), flush=True)
    for ranks in (2, 4):
        for way in ("gathered", "ring", "heads", "heads+ring"):
            if way == "heads+ring" and ranks == 2:
                continue
            for is_causal, is_mirrored in ((False, False), (True, False), (True, True)):
                if is_mirrored and way in ("gathered", "heads"):
                    continue
                case = way, is_causal, is_mirrored, asked.tokens, asked.heads, asked.rounds, ranks
                found = run_on_ranks(ranks, _way, *case)[0]
                said = {"way": way, "ranks": ranks, "causal": is_causal, "mirrored": is_mirrored}
                print(json.dumps({**said, "tokens": asked.tokens, "heads": asked.heads, **found}), flush=True)


if __name__ == "__main__":
    main()
