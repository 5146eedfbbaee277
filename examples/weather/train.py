"""Train a forecast model on tiles of the globe: no rank reads, holds or sends more than its part.

    python examples/weather/train.py                                  # one rank, the reference curve
    torchrun --nproc-per-node 4 examples/weather/train.py             # four: 2 bands of latitude x 2 of longitude
    torchrun --nproc-per-node 4 examples/weather/train.py --mesh data=2,lat=2
    torchrun --nproc-per-node 4 examples/weather/train.py --store ERA5.zarr --fields t2m,z500,t850
    torchrun --nproc-per-node 4 --max-restarts 3 examples/weather/train.py --saves runs/one    # docs/failures.md

Without `--store`: next month's anomaly of near-surface air temperature from the last twelve months. With it: the next
state of any WeatherBench2-style store, normalized. Loss curve, skill and picture are written to `out/`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import data
import numpy as np
import plot
import torch
import torch.distributed as dist
from model import GlobeModel
from tqdm import tqdm

import jigsaw

OUT = Path(__file__).parent / "out"
MESHES = {1: "data=1", 2: "data=1,lat=2", 4: "data=1,lat=2,lon=2"}  # by the number of ranks
FIELDS, INPUTS, TARGETS = ["air_anomaly"], list(range(-11, 1)), [1]
LABEL = "Anomaly of near-surface air temperature"
TRAIN = data.TRAIN_YEARS
TEST = ("2008-01", "2025-12")  # the first target is 2009-01: its inputs are the twelve months of 2008
PICTURE = "2015-12"  # the held-out month that is drawn
WIDTHS, HALO, SEED = (16, 32, 64), 2, 0
EPOCHS, BATCH, RATE, DECAY, CLIP = 3, 16, 4e-3, 0.01, 1.0
BYTES = ("read", "decoded", "useful", "sent")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--mesh", default=MESHES.get(ranks, f"data={ranks}"), help="axes and sizes: data=1,lat=2,lon=2")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples a step, over all ranks")
    parser.add_argument(
        "--widths", default=",".join(map(str, WIDTHS)), help="channels of the model, halving the grid each"
    )
    parser.add_argument("--store", help="a WeatherBench2-style store instead of the air temperature that comes along")
    parser.add_argument("--fields", help="its channels: t2m,z500,geopotential@850; by default every variable")
    parser.add_argument("--train", default="", help="first:last date to train on, with --store; by default all")
    parser.add_argument(
        "--test", default="", help="first:last date held out, with --store; by default none, and no picture"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--saves", type=Path, help="a folder of checkpoints: training goes on from the last one in it")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints, with --saves")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments(argv)
    axes = {name: int(size) for name, size in (entry.split("=") for entry in args.mesh.split(","))}
    widths = tuple(map(int, args.widths.split(",")))
    mesh = jigsaw.init_mesh(**axes)
    started = time.monotonic()
    torch.manual_seed(SEED)

    # The data, with the halo of the model's first convolution
    what = stored(args, mesh) if args.store else air()
    train, pairs, test = open_samples(what, mesh)
    grid = train.whole_coords
    loader = jigsaw.io.DataLoader(train, args.batch, shuffle=True, seed=SEED, drop_last=True)
    weights = cell_areas(grid["lat"])

    # The model: plain torch, made alike on every rank
    model = GlobeModel(len(train.inputs), len(train.channels), (len(grid["lat"]), len(grid["lon"])), widths)
    model = jigsaw.parallelize(model, mesh)
    steps = args.steps or args.epochs * len(loader)
    if dist.get_rank() == 0:
        show_plan(open_samples(what, {"data": 1})[0], train, args.batch)
    settings = {"store": Path(what["store"]).name, "fields": what["fields"], "batch": args.batch, "steps": steps}
    report = {"mesh": args.mesh, "ranks": mesh.size(), "settings": settings | {"widths": list(widths), "seed": SEED}}
    report |= fit(model, loader, weights, steps, mesh, args.saves, args.save_every)
    show_ranks(loader, mesh)
    if len(report["losses"]) < steps:  # asked to end before
        dist.destroy_process_group()
        return report

    # What it is worth: held-out skill, and the picture
    if test is not None:
        report["skill"] = skill(model, test, damping_factor(pairs, args.batch), weights, args.batch)
        report["total_s"] = time.monotonic() - started
        picture(model, test, grid, report, what, args.out)
    dist.destroy_process_group()
    return report


# -- data ------------------------------------------------------------------------------------------------------------


def air() -> dict[str, Any]:
    """The air temperature that comes along: one rank writes its store on first use."""
    store = data.store(writes=dist.get_rank() == 0)
    what = {"store": store, "fields": FIELDS, "inputs": INPUTS, "train": TRAIN, "test": TEST}
    return what | {"normalize": None, "unit": "K", "label": LABEL}


def stored(args: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    """Any other store: the next state from the last one, each channel normalized by one sample's mean and deviation."""
    fields = args.fields.split(",") if args.fields else None
    train, test = (tuple(dates.split(":")) if dates else None for dates in (args.train, args.test))
    opened = jigsaw.io.open(args.store, mesh=mesh, fields=fields, time=train)
    x = opened[0].input
    mean = x.mean(dim=(0, 2, 3))
    deviation = (x - mean[:, None, None]).square().mean(dim=(0, 2, 3)).sqrt().clamp(min=1e-12)
    normalize = dict(zip(opened.fields, zip(mean.tolist(), deviation.tolist(), strict=True), strict=True))
    what = {"store": args.store, "fields": list(opened.fields), "inputs": [0], "train": train, "test": test}
    return what | {"normalize": normalize, "unit": "standard deviations", "label": opened.fields[0]}


def open_samples(what: dict[str, Any], mesh: Any) -> list[Any]:
    """The samples to train on, all pairs of neighboring steps among them, and the held-out samples or None."""

    def opened(inputs: list[int], dates: Any, halo: int) -> Any:
        return jigsaw.io.open(
            what["store"],
            mesh=mesh,
            fields=what["fields"],
            spec={"lat": "lat", "lon": "lon"},
            halo={"lat": halo, "lon": halo},
            boundary={"lon": "periodic"},
            inputs=inputs,
            targets=TARGETS,
            time=dates,
            normalize=what["normalize"],
        )

    test = opened(what["inputs"], what["test"], HALO) if what["test"] else None
    return [opened(what["inputs"], what["train"], HALO), opened([0], what["train"], 0), test]


def cell_areas(lats: np.ndarray) -> torch.Tensor:
    """The area of each row's cells, 1 on average: [lat, 1]. The outer rows' cells end at the poles."""
    edges = np.concatenate([lats[:1] * 2 - lats[1:2], lats, lats[-1:] * 2 - lats[-2:-1]])
    sines = np.sin(np.deg2rad(np.clip((edges[1:] + edges[:-1]) / 2, -90, 90)))
    areas = np.abs(np.diff(sines))
    return torch.tensor(areas / areas.mean(), dtype=torch.float32)[:, None]


def season(times: np.ndarray) -> torch.Tensor:
    """Sine and cosine of the time of year that is forecast: times [B, T] -> [B, 2]."""
    days = times[:, -1].astype("datetime64[D]")
    angle = torch.tensor(
        (days - days.astype("datetime64[Y]")).astype(float) * (2 * math.pi / 365.25), dtype=torch.float32
    )
    return torch.stack([angle.sin(), angle.cos()], dim=1)


# -- training --------------------------------------------------------------------------------------------------------


class Losses(list[float]):
    """The loss of every step, as a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["losses"]


def fit(
    model: torch.nn.Module, loader: Any, weights: torch.Tensor, steps: int, mesh: Any, saves: Path | None, every: int
) -> dict[str, Any]:
    """The loss of every step, and how fast it went. Nothing here knows of tiles."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(steps, 2), pct_start=0.2)
    losses, stopping = Losses(), False
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "schedule": schedule}
    state |= {"losses": losses, "random": jigsaw.RandomState()}
    last = jigsaw.latest(saves) if saves else None
    if last:
        jigsaw.load(last, **state)
    started, done = time.monotonic(), len(losses)
    samples, speed = 0, {"train_s": 0.0, "samples_per_s": 0.0, "waiting": 0.0}
    bar = tqdm(total=steps, initial=done, desc="training", unit="step", disable=dist.get_rank() != 0)
    with bar, jigsaw.StopRequest(mesh) as stop:
        while len(losses) < steps and not stopping:
            for batch in loader:
                forecast = model(batch.input, season(batch.target_times))
                loss = ((forecast - batch.target).square() * weights).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                samples, spent = samples + len(batch.samples), time.monotonic() - started
                speed = {"train_s": spent, "samples_per_s": samples / spent, "waiting": loader.waited_s / spent}
                rate, waiting = speed["samples_per_s"], speed["waiting"]
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:.1f} samples/s, {waiting:.0%} waiting for data")
                bar.update()
                stopping = stop.heard()
                if saves and (stopping or len(losses) % every == 0):
                    pending = jigsaw.save(saves / f"step-{len(losses)}", **state, keep=2, wait=False)
                    if stopping:
                        pending.wait()
                if stopping or len(losses) == steps:
                    break
    if saves and not stopping:
        jigsaw.save(saves / f"step-{len(losses)}", **state, keep=2)
    return speed | {"losses": list(losses)}


def byte_figures(counts: Any) -> tuple[int, int, int, int]:
    """Those `BYTES` of a plan's row, or of what a loader has counted."""
    return counts.stored_bytes, counts.decoded_bytes, counts.useful_bytes, counts.sent_bytes


def show_plan(alone: Any, shared: Any, count: int) -> None:
    """What it takes to read a batch: by one rank, by ranks that share it, by each of these for itself; and why so."""
    batch = np.linspace(0, len(shared) - 1, count).round().astype(int)
    plan, rows = shared.plan(batch), {"one rank alone": alone.plan(batch).rows[0]}
    if len(plan.rows) > 1:
        rows |= {f"rank {rank} of {len(plan.rows)}": row for rank, row in enumerate(plan.rows)}
        rows["each of them by itself"] = max(plan.in_mode("independent").rows, key=lambda row: row.decoded_bytes)
    head = f"MB to read {count} sample{'s' * (count > 1)}"
    print(f"{head:<25}" + "".join(f"{name:>12}" for name in BYTES))
    for name, row in rows.items():
        print(f"{name:<25}" + "".join(f"{n / 1e6:>12.2f}" for n in byte_figures(row)))
    print(plan.reasons, flush=True)


def show_ranks(loader: Any, mesh: Any) -> None:
    """What every rank has read, decoded, put in its tiles and handed over, and what it holds."""
    counts, box = loader.read_counts, loader.dataset.layout.owned(tuple(mesh.get_coordinate()))[2:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = (*byte_figures(counts), loader.batch_bytes, peak)
    rows: list[Any] = [None] * mesh.size()
    dist.all_gather_object(rows, (" x ".join(f"{a}:{b}" for a, b in box), figures))
    if dist.get_rank() != 0:
        return
    names = (*BYTES, "a batch", "peak memory")
    print(f"\nMB in all       {'tile (lat x lon)':>20}" + "".join(f"{name:>12}" for name in names))
    for rank, (tile, mine) in enumerate(rows):
        print(f"rank {rank:<10} {tile:>20}" + "".join(f"{n / 1e6:>12.1f}" for n in mine))
    if len(rows) > 1:
        summed = [sum(mine[i] for _, mine in rows) / 1e6 for i in range(4)]
        print(f"{'all ranks':<15} {'':>20}" + "".join(f"{n:>12.1f}" for n in summed))


# -- held-out skill --------------------------------------------------------------------------------------------------


def damping_factor(pairs: Any, batch_size: int) -> Any:
    """The factor by which persistence is damped at each point, from all neighboring steps of the training years."""
    product = square = 0.0
    for batch in jigsaw.io.DataLoader(pairs, batch_size):
        product = product + (batch.input * batch.target).sum(dim=0)
        square = square + batch.input.square().sum(dim=0)
    return product / square


@torch.no_grad()
def skill(model: torch.nn.Module, test: Any, damping: Any, weights: torch.Tensor, batch_size: int) -> dict[str, float]:
    """Area-weighted RMSE over the held-out samples, of the model and of what it has to beat."""
    model.eval()
    squares = dict.fromkeys(("climatology", "persistence", "damped persistence", "this model"), 0.0)
    count = 0
    for batch in jigsaw.io.DataLoader(test, batch_size):
        last, truth = batch.input[:, -1:], batch.target
        forecast = model(batch.input, season(batch.target_times))
        for name, error in zip(squares, (truth, last - truth, damping * last - truth, forecast - truth), strict=True):
            squares[name] += (error.square() * weights).sum().item()
        count += truth.numel()
    return {name: math.sqrt(square / count) for name, square in squares.items()}


@torch.no_grad()
def picture(
    model: torch.nn.Module, test: Any, grid: Any, report: dict[str, Any], what: dict[str, Any], out: Path
) -> None:
    """Forecast, truth and error of one held-out sample, and the loss curves of every mesh that has trained this way."""
    months = [str(test.target_times(i)[-1])[: len(PICTURE)] for i in range(len(test))]
    index = months.index(PICTURE) if PICTURE in months else len(test) - 1
    sample = test[index]
    forecast = model(sample.input.unsqueeze(0), season(sample.target_times[None]))[0, 0, 0].full_tensor().numpy()
    truth = sample.target[0, 0].full_tensor().numpy()
    if dist.get_rank() != 0:
        return
    out.mkdir(parents=True, exist_ok=True)
    name = report["mesh"].replace(",", "_").replace("=", "")
    (out / f"loss_{name}.json").write_text(json.dumps(report))
    maps = {"forecast": forecast, "truth": truth, "error: forecast minus truth": forecast - truth}
    ranks = f"{report['ranks']} rank{'s' * (report['ranks'] > 1)}"
    title = f"{what['label']}, {months[index]}: forecast on {ranks} ({report['mesh']})"
    curves = plot.comparable(report, out)
    cuts = {dim: cut.points for dim, cut in zip(("lat", "lon"), sample.target.layout.cuts[-2:], strict=True)}
    plot.save(out / "weather.png", title, maps, grid["lat"], grid["lon"], cuts, curves, report["skill"], what["unit"])
    show(report, what["unit"])
    print(f"picture: {out / 'weather.png'}")


def show(report: dict[str, Any], unit: str) -> None:
    steps = report["settings"]["steps"]
    print(f"\n{steps} steps on {report['mesh']} in {report['train_s']:.0f} s; all in {report['total_s']:.0f} s")
    print(f"area-weighted RMSE of the held-out samples [{unit}]:")
    for name, error in report["skill"].items():
        print(f"  {name:<20} {error:.3f}")


if __name__ == "__main__":
    main()
