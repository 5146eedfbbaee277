"""Which mesh for WeatherMixer, by dry runs: results, the tables of docs/scaling.md and its pictures, by one command.

    python benchmarks/scaling.py            # seven minutes of one core
    python benchmarks/scaling.py --page     # the tables and pictures alone, from the results that are there

Nothing here runs on a GPU: every number is a prediction of `jigsaw.dry_run`.  Cases: `weak`, the authors' three nets,
each on 1, 2 or 4 GPUs, and as many of them as 4 to 256 GPUs hold, with the seconds of a reader; `strong`, one sample
on 1 to 8; `best`, a batch of 64 on 256 by every mesh; `four-billion`, that model on 8 GPUs of four kinds; `eight`,
`planning` and `planning-4096`, the search for its mesh of 8, 256 and 4096.  `seconds` are of a step, `flop` of all
ranks, `messages_s` is the part of `seconds` in which nothing but messages goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import scaling_page
import torch
from planning import write_store
from torch import Tensor, nn

import jigsaw
from jigsaw.dryrun import DEVICES, Device, dry_runs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "weather"))
from mixer import TokenLinear, WeatherMixer  # noqa: E402

CHANNELS, GRID, PATCH, BLOCKS = 69, (721, 1440), 8, 12
WIDTHS = (512, 2304)  # 0.13 and 0.98 billion parameters
LARGEST = WIDTHS[-1]
RESULTS = ROOT / "benchmarks" / "results" / "scaling-dry-run-2026-11.jsonl"

# The paper's GPUs: what it says of peaks makes 153 TFLOP/s each, and an A100 has 156 in tf32. Four to a node, as at KIT
# (user documentation of HoreKa: A100 of 40 GB, HDR InfiniBand, two adapters), four NVLinks of 25 GB/s between any two.
NODE = replace(
    DEVICES["a100"],
    name="a100-40",
    flop_per_second={**DEVICES["a100"].flop_per_second, torch.float32: 156e12},
    memory_bytes=40 * 2**30,
    memory_bandwidth=1555e9,
    node_bandwidth=100e9,
    network_bandwidth=12.5e9,  # a GPU's share of its node's adapters
    ranks_per_node=4,
    flop_share=0.51,  # in tf32: with it the net of 16 TFLOP takes on one GPU what the authors' log says, 712 ms
)


# Nets of the authors' runs by their configurations, by the GPUs that have one: the width, and how wide the token MLP is
# beside the tokens. That of one sample on several GPUs is the fourth.
PUBLISHED_NETS = {1: (4320, 0.5), 2: (8192, 0.5), 4: (10352, 1.0)}
STRONG_NET = (4896, 0.5)
PUBLISHED_CHANNELS, PUBLISHED_GRID, RUN = 72, (720, 1440), 60


class PublishedBlock(nn.Module):
    """x + MLP over the tokens of each channel, then x + MLP over the channels of each token, as wide as they are."""

    def __init__(self, tokens: int, width: int, share: float) -> None:
        super().__init__()
        inner = round(tokens * share)
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(TokenLinear(tokens, inner), nn.GELU(), TokenLinear(inner, tokens))
        self.channels = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, tokens, width] -> the same."""
        x = x + self.tokens(self.token_norm(x))
        return x + self.channels(self.channel_norm(x))


class PublishedMixer(nn.Module):
    """WeatherMixer of the authors' runs: patches of 60 points along a circle of latitude, and a skip around the blocks.

    They dropped a thousandth of the activations, which is left out here.
    """

    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        channels, (rows, columns) = PUBLISHED_CHANNELS, PUBLISHED_GRID
        self.encoder = nn.Linear(channels * RUN, width)
        self.blocks = nn.ModuleList(PublishedBlock(rows * columns // RUN, width, share) for _ in range(3))
        self.norm, self.decoder = nn.LayerNorm(width), nn.Linear(2 * width, channels * RUN)
        self.norm_of_change, self.norm_of_both = nn.LayerNorm(channels), nn.LayerNorm(2 * channels)
        self.last = nn.Linear(2 * channels, channels)

    def forward(self, state: Tensor) -> Tensor:
        """[B, C, lat, lon] -> [B, lat, lon, C]."""
        state = state.movedim(1, -1)
        first = x = self.encoder(state.unflatten(2, (-1, RUN)).flatten(3).flatten(1, 2))  # [B, tokens, width]
        for block in self.blocks:
            x = block(x)
        x = self.decoder(torch.cat([self.norm(x), first], 2))
        x = x.unflatten(2, (RUN, -1)).unflatten(1, (PUBLISHED_GRID[0], -1)).flatten(2, 3)  # [B, lat, lon, C]
        return self.last(self.norm_of_both(torch.cat([self.norm_of_change(x), state], -1)))


class HalfPrecision(WeatherMixer):
    """The products in bfloat16, the weights and the optimizer in float32: as one trains four billion."""

    def forward(self, state: Tensor) -> Tensor:
        """[B, C, lat, lon] -> the same."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(state).to(state.dtype)


FOUR_BILLION: dict[str, Any] = {"make": HalfPrecision, "blocks": 20, "width": 4096}


def foreseen(
    case: str, axes: Mapping[str, int], batch: int, devices: Sequence[Device], *, width: int = LARGEST, **how: Any
) -> list[dict[str, Any]]:
    """The step of a batch on a mesh, as one line of the results for each device."""
    how = {"make": WeatherMixer, "blocks": BLOCKS} | how
    make = partial(how.pop("make"), CHANNELS, GRID, width, how.pop("blocks"), PATCH)
    return foreseen_step(case, make, (batch, CHANNELS, *GRID), axes, devices, align={2: PATCH}, **how)


def foreseen_step(
    case: str, make: Any, shape: Sequence[int], axes: Mapping[str, int], devices: Sequence[Device], **how: Any
) -> list[dict[str, Any]]:
    """The step of a model on a mesh, as one line of the results for each device."""
    mesh = {name: size for name, size in axes.items() if size > 1} or {"data": 1}
    rows = tuple(name for name in ("lat", "channel") if name in mesh)
    spec = ("data" if "data" in mesh else None, None, rows or None, None)
    gpus = torch.Size(mesh.values()).numel()
    # the first rank has the most rows, the last sends to another node; this net has no halos, for which others matter
    ranks = {0, gpus - 1} if rows else {gpus - 1}
    how = {"ranks": sorted(ranks)} | how
    lines: list[dict[str, Any]] = []
    with played_once():
        for device in devices:
            began = time.process_time()
            report = jigsaw.dry_run(make, shape, mesh, spec=spec, device=device, **how)
            assert report.is_complete, report.remarks
            line = {
                "case": case,
                "parameters": report.parameters,
                "gpus": gpus,
                "mesh": mesh,
                "batch": shape[0],
                "device": device.name,
                "weights": "within nodes" if "replicate" in how else "cut" if how.get("shard_weights") else "whole",
                "checkpoint": "checkpoint" in how,
                "seconds": report.seconds,
                "messages_s": report.seconds_by_bound["messages"],
                "bound": report.bound,
                "peak_bytes": report.peak_bytes,
                "peak": dict(report.peak),
                "memory_bytes": report.device_memory,
                "fits": report.fits,
                "sent_bytes": report.sent_bytes,
                "flop": report.ranks[0].flop * gpus,
                "remarks": sorted({remark.kind for remark in report.remarks}),
                "cpu_s": round(time.process_time() - began, 1),
            }
            lines.append(line)
    return lines


@contextmanager
def played_once() -> Iterator[None]:
    """Dry runs within the block are of one step: what its ranks do is counted once, and has a price on each device."""
    play, known = dry_runs.play_rank_shortly, {}

    def play_or_recall(plan: Any, axes: Any, rank: int) -> Any:
        if rank not in known:
            known[rank] = play(plan, axes, rank)
        return known[rank]

    dry_runs.play_rank_shortly = play_or_recall
    try:
        yield
    finally:
        dry_runs.play_rank_shortly = play


def published_step(
    case: str, net: tuple[int, float], axes: Mapping[str, int], batch: int, device: Device = NODE, **how: Any
) -> dict[str, Any]:
    """The step of one of the authors' nets, with the seconds of a reader of its samples."""
    shape = batch, PUBLISHED_CHANNELS, *PUBLISHED_GRID
    (line,) = foreseen_step(case, partial(PublishedMixer, *net), shape, axes, [device], **how)
    plan_seconds = seconds_of_plans(line["mesh"]) * batch / (line["gpus"] * device.reader_cores)
    return line | {"width": net[0], "reader_s": plan_seconds, "per_node": device.ranks_per_node}


@cache
def chunks_of_states() -> Path:
    """A store of states in chunks of one level's globe, as WeatherBench2 has them; all chunks are links to one."""
    folder = Path(tempfile.gettempdir(), "jigsaw-planning")
    folder.mkdir(exist_ok=True)
    return write_store(folder, "globe")


def seconds_of_plans(mesh: Mapping[str, int]) -> float:
    """The processor seconds in which a reader loads 69 fields of a state and of the next one, by its plan."""
    fields = [*(f"deep{at}" for at in range(6)), *(f"flat{at}" for at in range(9))]
    spec = {"lat": "lat"} if "lat" in mesh else {}
    data = jigsaw.io.open(chunks_of_states(), mesh=dict(mesh), fields=fields, spec=spec, inputs=[0], targets=[1])
    plan = data.plan(len(data) // 2)
    return sum(plan.cost(*mode) for mode in plan.modes.items())


def weak() -> Iterator[dict[str, Any]]:
    for size, way in ((1, {"lat": 1}), (2, {"lat": 2}), (4, {"lat": 2, "channel": 2})):
        for gpus in (size, 8, 16, 64, 256):
            models = gpus // size
            yield published_step("weak", PUBLISHED_NETS[size], {"data": models, **way}, models)


def strong() -> Iterator[dict[str, Any]]:
    eight = replace(NODE, ranks_per_node=8, name="a100-40, eight to a node")
    for axes in ({"lat": 1}, {"lat": 2}, {"channel": 2}, {"lat": 4}, {"lat": 2, "channel": 2}, {"lat": 8},
                 {"lat": 4, "channel": 2}):  # fmt: skip
        yield published_step("strong", STRONG_NET, axes, 1)
        if torch.Size(axes.values()).numel() > 1:
            yield published_step("strong", STRONG_NET, axes, 1, shard_weights=True)
        if torch.Size(axes.values()).numel() == 8:
            yield published_step("strong", STRONG_NET, axes, 1, eight, shard_weights=True)


def best() -> Iterator[dict[str, Any]]:
    for width in (WIDTHS[0], LARGEST):
        for data, lat, channel in ((64, 4, 1), (64, 2, 2), (32, 8, 1)):
            for how in ({}, {"shard_weights": True}, {"shard_weights": True, "replicate": "data"}):
                axes = {"data": data, "lat": lat, "channel": channel}
                yield from foreseen("best", axes, 64, [NODE], width=width, **how)


def four_billion() -> Iterator[dict[str, Any]]:
    devices = [DEVICES[name] for name in ("a100", "h100", "h200", "b200")]
    for axes, batch in (({"lat": 8}, 1), ({"lat": 4, "channel": 2}, 1), ({"data": 8}, 8)):
        for cut in (False, True):
            for twice in ({}, {"checkpoint": "blocks"}):
                how = FOUR_BILLION | twice
                yield from foreseen("four-billion", axes, batch, devices, shard_weights=cut, ranks=[0], **how)


def planning() -> Iterator[dict[str, Any]]:
    """The search for the best mesh of 256 for four billion parameters, and what it finds."""
    yield from best_found("planning", 256, 64)


def planning_of_more() -> Iterator[dict[str, Any]]:
    """The same search for 4096 GPUs."""
    yield from best_found("planning-4096", 4096, 1024)


def eight() -> Iterator[dict[str, Any]]:
    """The same search for eight GPUs, with pipelines."""
    yield from best_found("eight", 8, 8)


def best_found(case: str, gpus: int, batch: int) -> Iterator[dict[str, Any]]:
    """The best five meshes and strategies for four billion parameters, and the first of each axis beside them."""
    make = partial(HalfPrecision, CHANNELS, GRID, FOUR_BILLION["width"], FOUR_BILLION["blocks"], PATCH)
    began = time.process_time()
    found = jigsaw.dryrun.advise_mesh(make, (batch, CHANNELS, *GRID), gpus, align={2: PATCH, 3: PATCH})
    seconds = time.process_time() - began
    able = [option for option in found if option.works and option.report is not None]
    places = reversed(list(enumerate(able)))
    firsts = {name: at for at, option in places for name, size in option.mesh.items() if size > 1}
    for at in sorted({*range(min(5, len(able))), *firsts.values()}):
        option, report = able[at], able[at].report
        assert report is not None
        yield {
            "case": case,
            "place": at + 1,
            "parameters": report.parameters,
            "gpus": gpus,
            "batch": batch,
            "mesh": {name: size for name, size in option.mesh.items() if size > 1},
            "strategy": option.strategy,
            "seconds": report.seconds,
            "bound": report.bound,
            "peak_bytes": report.peak_bytes,
            "options": len(found),
            "cpu_s": round(seconds, 1),
        }


CASES = {
    "weak": weak,
    "strong": strong,
    "best": best,
    "four-billion": four_billion,
    "eight": eight,
    "planning": planning,
    "planning-4096": planning_of_more,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES), help="those of the file stay")
    parser.add_argument("--page", action="store_true", help="make the tables and pictures alone")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    if not chosen.page:
        kept = chosen.output.read_text().splitlines() if chosen.output.exists() else []
        lines = [json.loads(line) for line in kept[1:]]
        date = f"{datetime.date.today()}"
        if kept and set(chosen.case) != set(CASES):  # the other cases are of another day
            cases = ", ".join(chosen.case)
            before = [day for day in json.loads(kept[0])["date"].split("; ") if day.partition(": ")[0] != cases]
            date = "; ".join([*before, f"{cases}: {date}"])
        header = {"hardware": "none: dry runs, on one core", "date": date, "command": "python benchmarks/scaling.py"}
        for case in chosen.case:
            made: list[dict[str, Any]] = []
            for found in CASES[case]():
                print(json.dumps(found), flush=True)
                made.append(found)
            lines = [line for line in lines if line["case"] != case] + made
            chosen.output.write_text("\n".join(map(json.dumps, [header, *lines])) + "\n")
    if chosen.output == RESULTS:
        scaling_page.write(RESULTS)


if __name__ == "__main__":
    main()
