"""Nets of the zoo in harder use than plain training: a matrix, net by use, on two ranks.

    python tests/zoo/uses.py                              # all; a table, uses.json and its part of docs/models.md
    python tests/zoo/uses.py timm/ViT --use compile       # nets whose key has one of these words, in one use

Each use is a function of a rank: it trains a net on tiles (or in stages) and compares with the same use in one
process.  A tensor may differ by rounding, and by three times what it changes in one process when the input is changed
in its last digit (four runs), or be as near to float64 as one process is: a net that is chaotic in float32 or bfloat16
is not wrong for it.  Verdicts are those of `run.py`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from run import end_world, short_cause, verdict_of_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_net import ZooNet, as_built, default_dtype
from zoo_table import ZOO, installed_version
from zoo_training import (
    OwnNoise,
    RankVerdict,
    compare_records,
    compare_with_whole,
    float_leaves,
    import_package,
    judged,
    measure_noise,
    sum_of_squares,
    train_whole,
    wide_complex,
    without_casts,
)

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

NETS = [
    *("monai/UNet", "monai/SwinUNETR 2d", "timm/ViT", "timm/Swin", "timm/ConvNeXt", "transformers/Swin2SR"),
    *("transformers/MaskFormer", "diffusers/VQModel", "neuraloperator/FNO", "torch-harmonics/SFNO"),
    *("nvidia-physicsnemo/AFNO", "by hand/UTransformer", "by hand/Stormer"),
]
SECONDS = 300.0  # on a busy machine a graph takes minutes
PAGE_HEAD = """## Net by use

Thirteen nets on two ranks, in harder use than plain training.
*exact*: outputs, losses, gradients and trained weights are those of the same use in one process, up to rounding (under
autocast to the last digit of bfloat16). In float32 and under autocast a tensor may also differ by three times what one
process's own numbers change when the last digit of its input does, or be as near to float64 as they are. *Cut weights*
is `shard_weights=True`, with units of 4 MiB and with every block a unit; *compile* calls the compiled net again; *dry
run*: the bytes that it tells are those that a real step sends. Made by `tests/zoo/uses.py`.
"""


# -- the uses ---------------------------------------------------------------------------------------------------------


def _evaluated(model: nn.Module) -> nn.Module:
    return model.eval()


def _recomputed(model: nn.Module) -> nn.Module:
    """Every element of a list or sequence of modules is computed again in the backward pass."""
    rows = [part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    for block in {id(b): b for row in rows for b in row if type(b).forward is not nn.Module.forward}.values():
        if any(True for _ in block.parameters()) and not isinstance(block, nn.ModuleList | nn.Sequential):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _in_bfloat16(model: nn.Module) -> nn.Module:
    forward = model.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = call
    return model


def _compiled(model: nn.Module) -> nn.Module:
    return jigsaw.compile(model, backend="aot_eager")


@dataclass(frozen=True)
class Use:
    """How a net is used: what is done to the model in both runs, and what more on ranks."""

    prepare: Callable[[nn.Module], nn.Module] = as_built
    finish: Callable[[nn.Module], nn.Module] = as_built
    axes: dict[str, int] = field(default_factory=lambda: {"lat": 2})
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: torch.dtype | None = None
    run: Callable[[ZooNet, Use, str], RankVerdict] | None = None

    def of_net(self, net: ZooNet) -> ZooNet:
        dtype = net.dtype if self.dtype is None else self.dtype
        return replace(net, prepare=self.prepare, dtype=dtype, rtol=2 * self.last_digit or net.rtol)

    @property
    def last_digit(self) -> float:
        return 2.0**-8 if self.prepare is _in_bfloat16 else 0.0


def _train(net: ZooNet, use: Use, folder: str) -> RankVerdict:
    return compare_with_whole(net, use.axes, use.options, folder, finish=use.finish)


class _Called(nn.Module):
    """The net as its user calls it, which stages of a pipeline take as one module."""

    def __init__(self, net: ZooNet) -> None:
        super().__init__()
        self.net, self.call = net.model(), net.call

    def forward(self, *inputs: Any) -> Any:
        return self.net(*inputs) if self.call is None else self.call(self.net, *inputs)


def _run_in_stages(net: ZooNet, use: Use, folder: str) -> RankVerdict:
    """Loss and gradients of a step of two microbatches that are alike; a rank compares the parameters of its stage."""
    mesh = world_mesh(**use.axes)
    inputs, targets = tuple(torch.cat([x, x]) for x in net.draw_inputs()), net.draw_targets()

    def loss(output: Any, _: Any) -> Tensor:
        leaves = [leaf for _, leaf in float_leaves(output)]
        return net.loss(output, *targets) if net.loss else sum_of_squares(leaves)

    pipe = jigsaw.pipeline(_Called(net), mesh, loss=loss, microbatches=2, example=inputs)
    torch.manual_seed(1)
    with wide_complex(net):
        record = {"loss 0": pipe.step(inputs, inputs[0])}
    for name, p in pipe.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        record[f"gradient of {name.removeprefix('net.')}"] = gradient.detach().clone()
    return compare_records(net, record, folder, is_part=True)


def _run_dry(net: ZooNet, use: Use, folder: str) -> RankVerdict:
    """The bytes that a dry run tells beside those of a real step."""
    mesh = world_mesh(**use.axes)

    def loss(output: Any) -> Any:
        return sum_of_squares([leaf for _, leaf in float_leaves(output)])

    model = jigsaw.parallelize(_Called(net), mesh)
    specs = [given.spec for given in net.inputs]
    drawn = zip(net.draw_inputs(), specs, strict=True)
    inputs = [x if spec is None else jigsaw.shard(x, mesh, spec) for x, spec in drawn]
    loss(model(*inputs)).backward()  # a first step says some things once
    with jigsaw.comm.count() as traffic:
        loss(model(*inputs)).backward()
    sent = torch.tensor(traffic.sent_bytes)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    shapes = [given.shape for given in net.inputs]
    report = jigsaw.dry_run(
        lambda: _Called(net), shapes, use.axes, spec=specs, dtype=net.dtype, loss=loss, optimizer=None
    )
    if report.sent_bytes == int(sent):
        return RankVerdict("exact")
    return RankVerdict("wrong", f"a dry run tells {report.sent_bytes} bytes, and a step sends {int(sent)}")


USES: dict[str, Use] = {
    "train": Use(),
    "eval": Use(prepare=_evaluated),
    "checkpointing": Use(prepare=_recomputed),
    "autocast": Use(prepare=_in_bfloat16, dtype=torch.float32),
    "cut weights": Use(options={"shard_weights": True}),
    "cut, small units": Use(options={"shard_weights": True, "unit_bytes": 1}),
    "channel": Use(axes={"channel": 2}),
    "compile": Use(finish=_compiled),
    "two stages": Use(axes={"pipe": 2}, run=_run_in_stages),
    "dry run": Use(run=_run_dry),
}


# -- running ----------------------------------------------------------------------------------------------------------


def use_on_rank(key: str, name: str, folder: str) -> RankVerdict:
    """One rank's side."""
    use = USES[name]
    net = use.of_net(ZOO[key])
    with without_casts(net.is_wide), default_dtype(net.dtype):
        return judged(lambda: (use.run or _train)(net, use, folder), folder)


def _runs_of_one_process(net: ZooNet, use: Use, folder: Path) -> Path:
    """The folder with the whole run and its noise, which uses share that do the same in one process."""
    used = use.of_net(net)
    runs = folder / f"{net.key} {use.prepare.__name__} {used.dtype}".replace("/", "-")
    digit = use.last_digit or (0.0 if used.dtype == torch.float64 else 2.0**-23)
    if not runs.exists():
        import_package(net)
        whole = train_whole(used)
        noise = measure_noise(used, digit, net.dtype == torch.float64) if digit else OwnNoise()
        runs.mkdir()
        torch.save(whole, runs / "whole")
        torch.save((noise.nearby, noise.reference), runs / "noise")
    return runs


def try_use(net: ZooNet, name: str, folder: Path) -> RankVerdict:
    """The verdict of both ranks."""
    if installed_version(net) is None:
        return RankVerdict("absent", f"{net.package} is not installed")
    use = USES[name]
    own = folder / f"{net.key} {name}".replace("/", "-").replace(" ", "_")
    try:
        shutil.copytree(_runs_of_one_process(net, use, folder), own)
    except Exception as error:
        return RankVerdict("unbuilt", f"{type(error).__name__}: {str(error)[:300]}")
    return verdict_of_world(
        2,
        str(own),
        lambda: run_on_ranks(2, import_package, net.key, timeout=600.0),
        lambda: run_on_ranks(2, use_on_rank, net.key, name, str(own), timeout=SECONDS),
    )


def uses_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """What the page shows: a row a net, a column a use, and below what stops those that are not exact."""
    lines = [PAGE_HEAD, f"| net | {' | '.join(USES)} |", f"|---|{'---|' * len(USES)}"]
    told: list[str] = []
    for key, row in results.items():
        lines.append(f"| {key} | {' | '.join(row[use]['verdict'] if use in row else '-' for use in USES)} |")
        for use, found in row.items():
            if found["verdict"] != "exact":
                told.append(f"- {key}, {use}: {short_cause(found)}".replace("|", "/"))
    counts = [str(sum(row.get(use, {}).get("verdict") == "exact" for row in results.values())) for use in USES]
    lines += [f"| exact of {len(results)} | {' | '.join(counts)} |", "", *told]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of keys, package/name; the thirteen by default")
    parser.add_argument("--use", action="append", choices=list(USES), help="all by default")
    parser.add_argument("--json", type=Path, default=Path("uses.json"))
    parser.add_argument("--page", type=Path, help="put the table at the end of docs/models.md")
    given = parser.parse_args(arguments)
    keys = [key for key in NETS if not given.words or any(w in key for w in given.words)]
    results = json.loads(given.json.read_text()) if given.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="uses-") as folder:
        for key in keys:
            for name in given.use or USES:
                found = try_use(ZOO[key], name, Path(folder))
                results.setdefault(key, {})[name] = asdict(found)
                given.json.write_text(json.dumps(results, indent=1))
                print(f"{key:30} {name:17} {found.verdict:8} {found.worst:8.1e} {found.cause[:200]}", flush=True)
    end_world(2)
    results = {key: {use: results[key][use] for use in USES if use in results[key]} for key in NETS if key in results}
    if given.page:
        page = given.page.read_text().partition(PAGE_HEAD.partition("\n")[0])[0].rstrip("\n")
        given.page.write_text(f"{page}\n\n{uses_table(results)}")
    verdicts = [found["verdict"] for row in results.values() for found in row.values()]
    # "unbuilt": one process cannot do it either
    return int(any(v not in ("exact", "refused", "absent", "unbuilt") for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
