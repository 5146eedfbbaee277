"""Train a forecast model on HEALPix cells: no rank reads, holds or sends more than its part of the globe.

    python examples/cells/train.py                                  # one rank, the reference curve
    torchrun --nproc-per-node 4 examples/cells/train.py             # four, each with a quarter of the cells

Next month's anomaly of near-surface air temperature from the last twelve months. The map is written to `out/`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import data
import matplotlib as mpl
import numpy as np
import torch
import torch.distributed as dist
from model import CellModel

import jigsaw

mpl.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).parent / "out"
TRAIN, TEST = data.TRAIN_YEARS, ("2008-01", "2025-12")  # the first target is 2009-01
PICTURE = "2015-12"  # the held-out month that is drawn
WIDTHS, SEED = (16, 32, 64), 0
EPOCHS, BATCH, RATE, DECAY, CLIP = 2, 16, 4e-3, 0.01, 1.0


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    mesh = jigsaw.init_mesh(cell=-1)
    if dist.get_rank() == 0:
        data.STORE.parent.mkdir(parents=True, exist_ok=True)
        data.write_store()
    dist.barrier()
    torch.manual_seed(SEED)
    model = CellModel(12, data.LEVEL, WIDTHS)
    block = model.block
    model = jigsaw.parallelize(model, mesh)

    # cuts at multiples of a coarse cell, so that going down and up sends nothing
    months = {"fields": ["air_anomaly"], "inputs": range(-11, 1), "targets": [1], "align": block}
    train = jigsaw.io.open(data.STORE, mesh=mesh, time=TRAIN, **months)
    test = jigsaw.io.open(data.STORE, mesh=mesh, time=TEST, **months)
    loader = jigsaw.io.DataLoader(train, BATCH, shuffle=True, seed=SEED, drop_last=True)
    started, steps = time.monotonic(), args.steps or EPOCHS * len(loader)
    losses = fit(model, loader, steps)
    report = {"ranks": mesh.size(), "steps": steps, "train_s": time.monotonic() - started, "losses": losses}
    report["chunks"] = sum_of_ranks(loader.read_counts.chunks)
    report["skill"] = skill(model, test)
    picture(model, test, report, args.out)
    dist.destroy_process_group()
    return report


def season(times: np.ndarray) -> torch.Tensor:
    """Sine and cosine of the time of year that is forecast: times [B, T] -> [B, 2]."""
    days = times[:, -1].astype("datetime64[D]")
    angle = (days - days.astype("datetime64[Y]")).astype(float) * (2 * math.pi / 365.25)
    return torch.tensor(np.stack([np.sin(angle), np.cos(angle)], 1), dtype=torch.float32)


def fit(model: torch.nn.Module, loader: Any, steps: int) -> list[float]:
    """The loss of every step. Cells of HEALPix are equally large, so it needs no weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            forecast = model(batch.input[:, :, 0], season(batch.target_times))
            loss = (forecast - batch.target[:, 0, 0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if dist.get_rank() == 0 and len(losses) % 20 == 0:
                print(f"step {len(losses)} of {steps}: loss {losses[-1]:.4f}", flush=True)
            if len(losses) == steps:
                break
    return losses


def sum_of_ranks(count: int) -> int:
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


@torch.no_grad()
def skill(model: torch.nn.Module, test: Any) -> dict[str, float]:
    """RMSE over the held-out samples, of the model and of what it has to beat."""
    squares, count = dict.fromkeys(("climatology", "persistence", "this model"), 0.0), 0
    for batch in jigsaw.io.DataLoader(test, BATCH):
        last, truth = batch.input[:, -1, 0], batch.target[:, 0, 0]
        forecast = model(batch.input[:, :, 0], season(batch.target_times))
        for name, error in zip(squares, (truth, last - truth, forecast - truth), strict=True):
            squares[name] += error.square().sum().item()
        count += truth.numel()
    return {name: math.sqrt(square / count) for name, square in squares.items()}


@torch.no_grad()
def picture(model: torch.nn.Module, test: Any, report: dict[str, Any], out: Path) -> None:
    """Forecast, truth, error and the tiles of one held-out month; the losses of every run in the folder."""
    months = [str(test.target_times(i)[-1])[: len(PICTURE)] for i in range(len(test))]
    sample = test[months.index(PICTURE)]
    forecast = model(sample.input[:, 0].unsqueeze(0), season(sample.target_times[None]))[0].full_tensor().numpy()
    truth = sample.target[0, 0].full_tensor().numpy()
    if dist.get_rank() != 0:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"loss_{report['ranks']}.json").write_text(json.dumps(report))
    points = sample.target.layout.cuts[-1].points
    owners = np.repeat(np.arange(len(points) - 1), np.diff(points))
    maps = {"forecast [K]": forecast, "truth [K]": truth, "error [K]": forecast - truth, "rank of each cell": owners}
    figure = plt.figure(figsize=(15, 6), dpi=130, layout="constrained")
    lon, lat = np.radians((test.grid.lon + 180) % 360 - 180), np.radians(test.grid.lat)
    limit = float(np.quantile(np.abs(truth), 0.985))
    for k, (name, values) in enumerate(maps.items()):
        axes = figure.add_subplot(2, 3, (1, 2, 3, 4)[k], projection="mollweide")
        style = {"cmap": "tab10", "vmin": 0, "vmax": 9} if k == 3 else {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
        axes.scatter(lon, lat, c=values, s=9, linewidths=0, **style)
        axes.set(title=name, xticks=[], yticks=[])
    axes = figure.add_subplot(2, 3, (5, 6))
    for run in sorted(out.glob("loss_*.json")):
        other = json.loads(run.read_text())
        if other["steps"] == report["steps"]:
            axes.plot(other["losses"], label=f"{other['ranks']} ranks", lw=6 if other["ranks"] == 1 else 1.2)
    axes.set(title="training loss", xlabel="step")
    axes.legend()
    figure.savefig(out / "cells.png")
    print(f"{report['steps']} steps on {report['ranks']} ranks in {report['train_s']:.0f} s, {report['chunks']} chunks")
    print("RMSE in held-out years [K]: " + ", ".join(f"{name} {error:.3f}" for name, error in report["skill"].items()))
    print(f"picture: {out / 'cells.png'}")


if __name__ == "__main__":
    main()
