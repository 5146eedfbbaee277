"""The seconds that a dry run predicts beside those that ranks take; one JSON object a net, mesh and strategy.

    python benchmarks/dry_run.py --rounds 5     # five minutes a round
    python benchmarks/dry_run.py --published    # six nets of other packages, on which nothing was tuned: make zoo

The device is this machine's processor, as ``python -m jigsaw advise --calibrate`` measures it.  Compared are processor
seconds of the thread that trains: `measured_s` is the median step of the busiest rank, `predicted_s` the dry run's,
`ratio` the second over the first.  Ranks may thus share cores, as four do on two, and wait for each other: what a core
is idle is in neither.  `process_s` is the same step with all threads of the process, gloo's among them; the last line
counts the cases within a quarter by both clocks.  `measured_bytes` is the highest sum of what a step allocates, weights
and the optimizer's state left out, by torch's profiler, on the rank that has the most; `predicted_bytes` the dry run's.
On each number of ranks the cases take turns: in each round a case trains for some steps, as training does, and the
first, which finds the caches and the memory of another case, is not counted.  The speed of a machine changes from
minute to minute: in each round it is calibrated anew, and what is predicted is the median of the rounds, too.
The last line also says how many pairs of a net's cases the prediction orders as the measurement does:
all pairs, those of as many ranks, and of these the pairs that measurement itself tells apart (whose quartiles do not
meet).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import layers
import torch
from torch import nn

import jigsaw
from jigsaw.dryrun.calibration import measure_device
from jigsaw.dryrun.kernel_clock import forget_kernels
from jigsaw.testing import run_on_ranks, world_mesh

MESHES: dict[int, list[dict[str, int]]] = {
    1: [{"lat": 1}],
    2: [{"lat": 2}, {"lon": 2}, {"data": 2}],
    4: [{"lat": 4}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}],
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut weights": {"shard_weights": True},
    "checkpointed": {"checkpoint": "blocks"},
}


class ConvBlock(nn.Module):
    """Two convolutions with norms, in as many dims as `conv` has."""

    def __init__(self, conv: Callable[..., nn.Module], before: int, after: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (before, after):
            layers += [conv(channels, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class UNet(nn.Module):
    """Three levels, skips that are concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.downs = nn.ModuleList(ConvBlock(nn.Conv2d, a, b) for a, b in itertools.pairwise([8, *widths]))
        self.ups = nn.ModuleList(ConvBlock(nn.Conv2d, 2 * w, w) for w in reversed(widths[:-1]))
        self.rises = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.out = nn.Conv2d(width, 8, 1)

    def forward(self, x: Any) -> Any:
        skips: list[Any] = []
        for at, down in enumerate(self.downs):
            x = down(x if at == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for up, rise, skip in zip(self.ups, self.rises, reversed(skips[:-1]), strict=True):
            x = up(torch.cat([rise(x), skip], 1))
        return self.out(x)


class AttentionBlock(nn.Module):
    """Attention over all patches, then two layers over the channels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


class VisionTransformer(nn.Module):
    """Attention blocks over patches of 4 x 4."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(8, width, 4, stride=4)
        self.blocks = nn.ModuleList(AttentionBlock(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MixerBlock(nn.Module):
    """Mixes along the rows, which are cut, then along the channels."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rows = nn.Sequential(nn.Linear(rows, 2 * rows), nn.GELU(), nn.Linear(2 * rows, rows))
        self.channels = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.rows(self.norm(x).transpose(1, -1)).transpose(1, -1)
        return x + self.channels(x)


class Mixer(nn.Module):
    """Blocks that mix rows and channels in turn."""

    def __init__(self, rows: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 8)
        self.blocks = nn.ModuleList(MixerBlock(rows, width) for _ in range(depth))

    def forward(self, x: Any) -> Any:
        x = self.embed(x.movedim(1, -1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class VolumeNet(nn.Module):
    """Residual blocks of 3-D convolutions at half the resolution."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, width, 2, stride=2)
        self.blocks = nn.ModuleList(ConvBlock(nn.Conv3d, width, width) for _ in range(depth))
        self.head = nn.ConvTranspose3d(width, 2, 2, stride=2)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


Net = tuple[Callable[[], nn.Module], tuple[int, ...], int]  # and how many rows stay together
NETS: dict[str, Net] = {
    "unet": (lambda: UNet(24), (2, 8, 96, 128), 4),
    "transformer": (lambda: VisionTransformer(128, 4), (2, 8, 96, 128), 4),
    "mixer": (lambda: Mixer(64, 96, 3), (2, 8, 64, 48), 1),
    "volumes": (lambda: VolumeNet(16, 3), (2, 2, 24, 48, 64), 2),
}
SMALL: dict[str, Net] = {
    "unet": (lambda: UNet(4), (2, 8, 32, 32), 4),
    "mixer": (lambda: Mixer(16, 8, 1), (2, 8, 16, 12), 1),
}


# -- nets of other packages -------------------------------------------------------------------------------------------


def package_of_zoo(name: str) -> Any:
    """Import a package, or a module of one, for which torchvision's operators need not be there."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "zoo"))
    from zoo_net import define_missing_operators

    define_missing_operators()
    return importlib.import_module(name)


class TokenNet(nn.Module):
    """A language model of transformers without its table of words: vectors of tokens -> the same."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        super().__init__()
        transformers = package_of_zoo("transformers")
        self.net = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))

    def forward(self, x: Any) -> Any:
        return self.net(inputs_embeds=x, use_cache=False).last_hidden_state


class DenoisingNet(nn.Module):
    """DiT of diffusers at one time and for one class."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        sizes |= {"in_channels": 4, "out_channels": 4, "patch_size": 2, "norm_num_groups": 4}
        self.net = package_of_zoo("diffusers").DiTTransformer2DModel(**sizes)

    def forward(self, x: Any) -> Any:
        times, classes = torch.full((len(x),), 5), torch.full((len(x),), 1)
        return self.net(x, timestep=times, class_labels=classes).sample


def gpt() -> nn.Module:
    sizes = {"n_embd": 192, "n_layer": 4, "n_head": 6, "n_positions": 512, "vocab_size": 2}
    return TokenNet("GPT2", **sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


def llama() -> nn.Module:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 2}
    return TokenNet("Llama", hidden_size=192, intermediate_size=512, num_hidden_layers=4, **heads)


def convnext() -> nn.Module:
    sizes = {"dims": (32, 64, 128, 256), "depths": (2, 2, 4, 2)}
    return package_of_zoo("timm").create_model("convnext_atto", in_chans=8, num_classes=10, **sizes)


def volume_unet() -> nn.Module:
    nets = package_of_zoo("monai.networks.nets")
    return nets.UNet(3, 2, 3, channels=(16, 32, 64), strides=(2, 2), num_res_units=1)


def fourier_net() -> nn.Module:
    sizes = {"n_modes": (16, 16), "hidden_channels": 32, "n_layers": 4}
    return package_of_zoo("neuralop.models").FNO(in_channels=8, out_channels=8, **sizes)


PUBLISHED: dict[str, Net] = {
    "GPT-2": (gpt, (2, 256, 192), 1),
    "Llama": (llama, (2, 256, 192), 1),
    "DiT": (
        lambda: DenoisingNet(num_attention_heads=4, attention_head_dim=32, num_layers=4, sample_size=32),
        (2, 4, 32, 32),
        2,
    ),
    "ConvNeXt": (convnext, (2, 8, 128, 128), 32),
    "volume U-Net": (volume_unet, (2, 2, 32, 48, 64), 4),
    "FNO": (fourier_net, (2, 8, 64, 96), 1),
}
SETS = {"own": NETS, "small": SMALL, "published": PUBLISHED}
_STEPS = 3  # counted in a turn


def spec_of(shape: Sequence[int], axes: Mapping[str, int]) -> tuple[str | None, ...]:
    if len(shape) == 3:  # vectors of tokens
        return tuple(name if name in axes else None for name in ("data", "lat")) + (None,)
    names = "data", *[None] * (len(shape) - 3), "lat", "lon"
    return tuple(name if name in axes else None for name in names)


def meshes_of(shape: Sequence[int], ranks: int) -> list[dict[str, int]]:
    """The meshes of so many ranks whose axes all cut an input; tokens have no second dim of space."""
    return [axes for axes in MESHES[ranks] if ranks == 1 or set(axes) <= set(spec_of(shape, axes))]


def rank_steps(names: Sequence[str], which: str, ways: Sequence[str], warm: int) -> list[tuple[Any, Any, int]]:
    """On each rank, of every case: the processor seconds of some steps, by thread and by process, and their memory."""
    cases: list[tuple[Any, Callable[[], None]]] = []
    for name in names:
        make, shape, align = SETS[which][name]
        for axes in meshes_of(shape, torch.distributed.get_world_size()):
            for way in ways:
                how = WAYS[way]
                cases.append(((name, axes, way), training_step(make, shape, align, axes, **how)))
    found: list[list[tuple[float, float]]] = [[] for _ in cases]
    for (_, step), seconds in zip(cases, found, strict=True):
        for at in range(warm + _STEPS):
            torch.distributed.barrier()
            since, of_process = time.thread_time(), time.process_time()
            step()
            if at >= warm:
                seconds.append((time.thread_time() - since, time.process_time() - of_process))
    memory = [layers.peak_bytes(SimpleNamespace(model=nn.Module(), step=step)) for _, step in cases]
    return [(case, *results) for (case, _), *results in zip(cases, found, memory, strict=True)]


def training_step(
    make: Callable[[], nn.Module], shape: tuple[int, ...], align: int, axes: dict[str, int], **how: Any
) -> Callable[[], None]:
    torch.manual_seed(0)
    mesh, model = world_mesh(**axes), make()
    if how.pop("checkpoint", None):
        for row in model.modules():
            for block in row if isinstance(row, nn.ModuleList) else ():
                block.forward = checkpointed(block.forward)
    model = jigsaw.parallelize(model, mesh, **how)
    optimizer = torch.optim.AdamW(model.parameters())
    tile = jigsaw.shard(torch.randn(shape), mesh, spec_of(shape, axes), align=rows_together(shape, align))

    def step() -> None:
        model(tile).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)


def rows_together(shape: Sequence[int], align: int) -> dict[int, int]:
    return {len(shape) - 2: align, len(shape) - 1: align}


def predicted(net: Net, axes: dict[str, int], device: Any, how: Mapping[str, Any]) -> Any:
    make, shape, align = net
    return jigsaw.dry_run(
        make,
        shape,
        axes,
        spec=spec_of(shape, axes),
        align=rows_together(shape, align),
        device=device,
        ranks=[0],
        ranks_per_node=8,
        **how,
    )


@dataclass
class CaseRound:
    """One round of a case: on each rank the seconds of its steps, by thread and by process; and what is predicted.

    Then the bytes of a step, measured and predicted.
    """

    of_ranks: list[list[tuple[float, float]]]
    predicted: float
    by_bound: dict[str, float]
    measured_bytes: int
    predicted_bytes: int


def row_of_case(name: str, ranks: int, axes: str, way: str, rounds: Sequence[CaseRound]) -> dict[str, Any]:
    """The medians of all rounds, of the busiest rank."""
    by_rank = [list(itertools.chain(*of)) for of in zip(*(each.of_ranks for each in rounds), strict=True)]
    steps = max(([thread for thread, _ in of] for of in by_rank), key=statistics.median)
    measured, predicted = statistics.median(steps), statistics.median(each.predicted for each in rounds)
    quartiles = statistics.quantiles(steps, n=4)
    bounds = {name: statistics.median(each.by_bound[name] for each in rounds) for name in rounds[0].by_bound}
    return {
        "net": name,
        "ranks": ranks,
        "mesh": json.loads(axes),
        "way": way,
        "measured_s": round(measured, 4),
        "quartiles_s": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "process_s": round(max(statistics.median(whole for _, whole in of) for of in by_rank), 4),
        "predicted_s": round(predicted, 4),
        "ratio": round(predicted / measured, 3),
        "ratios_of_rounds": [
            round(each.predicted / max(statistics.median(t for t, _ in of) for of in each.of_ranks), 3)
            for each in rounds
        ],
        "predicted_by": {name: round(seconds, 4) for name, seconds in bounds.items() if seconds},
        "measured_bytes": rounds[-1].measured_bytes,
        "predicted_bytes": rounds[-1].predicted_bytes,
    }


def ordered_pairs(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How many pairs of a net's cases are ordered as measured."""
    counts = {"all": [0, 0], "of as many ranks": [0, 0], "told apart": [0, 0]}
    for a, b in itertools.combinations(rows, 2):
        if a["net"] != b["net"]:
            continue
        is_right = (a["measured_s"] < b["measured_s"]) == (a["predicted_s"] < b["predicted_s"])
        low, high = sorted((a, b), key=lambda row: row["measured_s"])
        kinds = ["all"]
        if a["ranks"] == b["ranks"]:
            kinds.append("of as many ranks")
            if low["quartiles_s"][1] < high["quartiles_s"][0]:
                kinds.append("told apart")
        for kind in kinds:
            counts[kind][0] += is_right
            counts[kind][1] += 1
    return {kind: f"{right} of {pairs}" for kind, (right, pairs) in counts.items()}


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: a net and mesh a line; measured and predicted milliseconds, and their ratio, of each way.

    Where a step's bytes were measured, their MiB and ratio stand behind.
    """
    of_rows = [way for way in WAYS if any(row["way"] == way for row in rows)]
    lines = ["| net | mesh | " + " | ".join(of_rows) + " |", "|---|---|" + "---|" * len(of_rows)]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        mesh = " ".join(f"{name}={size}" for name, size in row["mesh"].items()) if row["ranks"] > 1 else "one rank"
        times = f"{row['measured_s'] * 1e3:.0f}, {row['predicted_s'] * 1e3:.0f}: {row['ratio']:.2f}"
        if "measured_bytes" in row:
            told, is_so = row["predicted_bytes"] / 2**20, row["measured_bytes"] / 2**20
            times += f"; {is_so:.0f}, {told:.0f} MiB: {told / is_so:.2f}"
        found.setdefault((row["net"], mesh), {})[row["way"]] = times
    order = list(dict.fromkeys(row["net"] for row in rows))
    for (net, mesh), ways in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        lines.append(f"| {net} | {mesh} | " + " | ".join(ways.get(way, "") for way in of_rows) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=1, help="steps of each turn that are not counted")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--nets", type=lambda text: text.split(","), help="by default all")
    parser.add_argument("--table", metavar="FILE", help="print the table of the docs from a result file, and no more")
    parser.add_argument("--small", dest="which", action="store_const", const="small", default="own", help="toy sizes")
    parser.add_argument("--published", dest="which", action="store_const", const="published", help="of other packages")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    options = parser.parse_args()
    if options.table:
        print(table_of([json.loads(line) for line in Path(options.table).read_text().splitlines() if '"net"' in line]))
        return
    torch.set_num_threads(1)
    nets = SETS[options.which]
    names = [name for name in options.nets or nets if name in nets]
    found: dict[tuple[str, int, str, str], list[CaseRound]] = {}
    for at in range(options.rounds):
        forget_kernels()
        device = measure_device()
        for ranks in options.ranks:
            asked = names, options.which, options.ways, options.warm
            by_rank = run_on_ranks(ranks, rank_steps, *asked, timeout=3600)
            for cases in zip(*by_rank, strict=True):
                name, axes, way = cases[0][0]
                report = predicted(nets[name], axes, device, WAYS[way])
                of_ranks, most = [seconds for _, seconds, _ in cases], max(size for _, _, size in cases)
                allocated = report.peak_bytes - report.peak["weights"] - report.peak["optimizer"]
                case = found.setdefault((name, ranks, json.dumps(axes), way), [])
                case.append(CaseRound(of_ranks, report.seconds, dict(report.seconds_by_bound), most, allocated))
        print(f"round {at + 1} of {options.rounds}", file=sys.stderr, flush=True)
    rows = [row_of_case(*case, rounds) for case, rounds in found.items()]
    for row in rows:
        print(json.dumps(row), flush=True)
    within = sum(0.75 <= row["ratio"] <= 1.25 for row in rows)
    of_process = sum(0.75 <= row["predicted_s"] / row["process_s"] <= 1.25 for row in rows)
    summary = {"cases": len(rows), "within_a_quarter": within, "within_a_quarter_by_process": of_process}
    print(json.dumps({**summary, "ordered_as_measured": ordered_pairs(rows)}))


if __name__ == "__main__":
    main()
