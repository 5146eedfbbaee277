"""Training steps that others published, beside the dry run's seconds, by one command.

    python benchmarks/published.py            # some minutes of one core
    python benchmarks/published.py --page     # the table of docs/dry_run.md alone, from the results that are there

`tests/dryrun/published.json` has the runs, each with its source and its settings.  A run of several microbatches takes
forward and backward passes as often, and one step of the optimizer; one with `pipe` is estimated as `advise` does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from markdown_table import table_lines
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jigsaw
from jigsaw.dryrun import DEVICES
from jigsaw.dryrun.bare_models import made_once, remembered_models
from jigsaw.dryrun.mesh_search import _MeshSearch

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "tests" / "dryrun" / "published.json"
RESULTS = ROOT / "benchmarks" / "results" / "published-dry-run-2026-11.jsonl"
BEGIN, END = "<!-- begin: made by benchmarks/published.py -->", "<!-- end: made by benchmarks/published.py -->"
MOST_OFF = {"fsdp": 0.20, "tensor": 0.35, "pipeline": 0.35}
"""By parallelism, how far the dry run's seconds may be from those published, as a share of these."""


class DecoderBlock(nn.Module):
    """Block of a decoder as GPT (layer norms, GELU) or, `gated`, as Llama (RMS norms, rotary positions, SwiGLU)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.heads = options["width"], options["heads"]
        self.key_heads, self.gated = options.get("key_heads", self.heads), options.get("gated", False)
        self.fused_attention = options.get("fused_attention", True)
        inner, keys = options.get("inner", 4 * width), self.key_heads * width // self.heads
        norm = nn.RMSNorm if self.gated else nn.LayerNorm
        linear = partial(nn.Linear, bias=options.get("biases", False))
        self.norm, self.mlp_norm = norm(width), norm(width)
        self.q, self.k, self.v, self.out = (linear(width, n) for n in (width, keys, keys, width))
        self.up, self.down = linear(width, inner), linear(inner, width)
        self.gate = linear(width, inner) if self.gated else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(y).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for part in (self.k, self.v))
        x = x + self.out(self._mixed(q, k, v).transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        y = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(y)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.fused_attention:
            return torch.softmax(q @ k.mT, -1) @ v
        if self.gated:
            q, k = _turned(q), _turned(k)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.key_heads != self.heads)


def _turned(x: Tensor) -> Tensor:
    """Turn pairs of channels as rotary positions do; by which angles makes no difference to the cost."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([0.8 * first - 0.6 * second, 0.6 * first + 0.8 * second], -1).to(x.dtype)


class Decoder(nn.Module):
    """Language model of equal blocks, which returns its loss."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        width, words = options["width"], options["vocabulary"]
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([DecoderBlock(options) for _ in range(options["layers"])])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.is_selective = options.get("checkpoint") == "selective"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = _selectively(block, x) if self.is_selective else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def _selectively(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block whose every second product is computed again, as torchtitan's option ``op`` does."""
    products = {False: 0, True: 0}
    kept = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            is_kept = products[context.is_recompute] % 2 == 1
        else:
            is_kept = operator is kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


def _own_loss(loss: Tensor) -> Tensor:
    return loss


def predicted_step(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return the dry run's seconds of a step, and its bytes of a device."""
    axes, batch, size = run["mesh"], run["batch"], run["microbatch"]
    samples = axes.get("data", 1)
    times = batch // (size * samples)
    device = replace(DEVICES[run["device"]], **run.get("device_changes", {}))
    how: dict[str, Any] = {"spec": ("data", *run.get("spec", [None])), "dtype": torch.int64, "loss": _own_loss}
    is_cut, twice = run["weights"] == "cut", run["model"].get("checkpoint") == "blocks"

    model = made_once(lambda: Decoder(run["model"]).bfloat16())
    if "pipe" in axes:
        search = _MeshSearch(model, ((batch, run["sequence"]),), device, None, how)
        with remembered_models():
            report = search.attempt(axes, is_cut, twice, microbatches=times).report
        assert report is not None and report.is_complete
        return report.seconds, report.peak_bytes
    shape, ways = (size * samples, run["sequence"]), {"checkpoint": "blocks" if twice else "none", "ranks": [1]}
    report = jigsaw.dry_run(model, shape, axes, shard_weights=is_cut, device=device, **how, **ways)
    assert report.is_complete, report
    phases = report.ranks[0].phases
    return times * (phases["forward"].seconds + phases["backward"].seconds) + phases["step"].seconds, report.peak_bytes


def published_runs() -> list[dict[str, Any]]:
    """Return the runs with their sources, and with `seconds` where tokens were published."""
    file = json.loads(RUNS.read_text())
    models, runs = file["models"], list[dict[str, Any]]()
    for run in file["runs"]:
        model = models[run["model"]] | {"checkpoint": run.get("checkpoint", "none")} | run.get("model_changes", {})
        gpus = torch.Size(run["mesh"].values()).numel()
        source = file["sources"][run["source"]]
        seconds = run.get("seconds")
        if seconds is None and "tokens" in run:
            seconds = run["batch"] * run["sequence"] / (run["tokens"] * gpus)
        elif seconds is None:  # operations as the source counts them
            seconds = _megatron_flop(model, run) / (gpus * run["teraflop"] * 1e12)
        changes = source.get("device_changes", {})
        runs.append({**run, "named": run["model"], "model": model, "seconds": seconds, "gpus": gpus}
                    | ({"device_changes": changes} if changes else {}))  # fmt: skip
    return runs


def _megatron_flop(model: Mapping[str, Any], run: Mapping[str, Any]) -> float:
    """Return the operations of a step by the third formula of the paper (arXiv 2104.04473), of three or four passes."""
    layers, width, words, length = model["layers"], model["width"], model["vocabulary"], run["sequence"]
    return 96 * run["batch"] * length * layers * width**2 * (1 + length / (6 * width) + words / (16 * layers * width))


def result_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of a run in the results."""
    seconds, peak = predicted_step(run)
    return {"case": run["name"], "seconds": run["seconds"], "predicted": seconds, "peak_bytes": peak}


def _rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for run in published_runs():
        line = results[run["name"]]
        ratio = line["predicted"] / line["seconds"]
        mesh = " ".join(f"{name}={size}" for name, size in run["mesh"].items())
        tuned = {"products": "products", "attention": "attention"}.get(run.get("used_for", ""), "")
        off = "" if abs(ratio - 1) <= MOST_OFF[run["kind"]] else " **off**"
        each = f"{run['microbatch']} x {run['sequence']}"
        yield (
            run["named"], run["device"], mesh, str(run["batch"]), each, run.get("checkpoint", "none"),
            f"{line['seconds']:.2f}", f"{line['predicted']:.2f}", f"{ratio:.2f}{off}", tuned, run["source"],
        )  # fmt: skip


HEAD = (
    "model", "GPU", "mesh", "batch", "a rank at once", "computed twice", "published, s", "dry run, s", "ratio",
    "a share is from it", "source",
)  # fmt: skip


def write_page(file: Path) -> None:
    """Make the table of docs/dry_run.md anew."""
    header, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    page, results = ROOT / "docs" / "dry_run.md", {line["case"]: line for line in lines}
    runs = published_runs()
    inside = [abs(results[r["name"]]["predicted"] / r["seconds"] - 1) <= MOST_OFF[r["kind"]] for r in runs]
    held = [ok for ok, run in zip(inside, runs, strict=True) if "used_for" not in run]
    text = [
        "", f"**{sum(inside)} of {len(inside)} runs are inside their bounds**, {sum(held)} of the {len(held)} that no "
        "share is from.", "", *table_lines(HEAD, list(_rows(results))),
    ]  # fmt: skip
    sources = json.loads(RUNS.read_text())["sources"]
    text += [f"- *{name}*: [{source['title']}]({source['url']}). {source['notes']}" for name, source in sources.items()]
    text += ["", f"[{file.name}](../benchmarks/results/{file.name}): {header['date']}; `{header['command']}`.", ""]
    above, rest = page.read_text().split(BEGIN)
    page.write_text(f"{above}{BEGIN}\n" + "\n".join(text) + f"\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="make the table alone")
    parser.add_argument("--case", default="", help="only runs whose name has this; the others of the file stay")
    chosen = parser.parse_args()
    if not chosen.page:
        kept = RESULTS.read_text().splitlines()[1:] if RESULTS.exists() else []
        lines = {line["case"]: line for line in map(json.loads, kept)}
        runs = published_runs()
        for run in runs:
            if chosen.case in run["name"]:
                lines[run["name"]] = result_of(run)
                print(json.dumps(lines[run["name"]]), lines[run["name"]]["predicted"] / run["seconds"], flush=True)
        header = {
            "hardware": "none: dry runs, on one core",
            "date": f"{datetime.date.today()}",
            "command": "python benchmarks/published.py",
        }
        RESULTS.write_text("\n".join(map(json.dumps, [header, *(lines[run["name"]] for run in runs)])) + "\n")
    write_page(RESULTS)


if __name__ == "__main__":
    main()
