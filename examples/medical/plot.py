"""The picture of a run: the held-out half with the tiles' borders, loss curves of every mesh, Dice of every organ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import data
import matplotlib as mpl
import nibabel
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")
import matplotlib.pyplot as plt

Array = NDArray[Any]

INK, PALE, BORDER = "#1d2733", "#8795a5", "#ffffff"
COLORS = ("#3fa7d6", "#f2c14e", "#59c08b", "#e4572e")  # of the organs
PALETTE = ("#0b6e99", "#e4572e", "#f2a541", "#5b8c5a")  # of the meshes
WINDOW = (-250, 350)  # Hounsfield units from black to white


def comparable(report: Mapping[str, Any], folder: Path) -> dict[str, list[float]]:
    """The loss curves in `folder` that were trained as this one was, on whatever mesh, fewest ranks first."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("loss_*.json"))]
    runs = [run for run in runs if run["settings"] == report["settings"]]
    return {name_of(run): run["losses"] for run in sorted(runs, key=lambda run: run["ranks"])}


def name_of(run: Mapping[str, Any]) -> str:
    return f"{run['ranks']} rank{'s' * (run['ranks'] > 1)} ({run['mesh']})"


def largest_gap(curves: Mapping[str, Sequence[float]]) -> float:
    """How far any curve is from the first, as a part of its value."""
    steps = min(map(len, curves.values()))
    first, *others = (np.asarray(losses[:steps]) for losses in curves.values())
    return max(float(np.max(np.abs(other / first - 1))) for other in others)


def coronal(ax: Any, name: str, scan: Array, mask: Array, cuts: Mapping[str, Sequence[int]]) -> None:
    """A slice [z, x] of the body, seen from its front; the left half has the mask and the tiles' borders."""
    rows, columns = mask.shape
    ax.imshow(scan, cmap="gray", vmin=WINDOW[0], vmax=WINDOW[1], origin="lower")
    colors = np.array([(0, 0, 0, 0), *(mpl.colors.to_rgba(c, 0.6) for c in COLORS)])
    ax.imshow(colors[mask], origin="lower", extent=(-0.5, columns - 0.5, -0.5, rows - 0.5), interpolation="nearest")
    ax.axvline(columns - 0.5, color=BORDER, lw=1.0, ls=":")
    for point in cuts["z"][1:-1]:
        ax.plot([-0.5, columns - 0.5], [point - 0.5] * 2, color=BORDER, lw=1.4)
    for point in cuts["x"][1:-1]:
        ax.plot([point - 0.5] * 2, [-0.5, rows - 0.5], color=BORDER, lw=1.4)
    tiles = [(low + high) / 2 for low, high in zip(cuts["z"][:-1], cuts["z"][1:], strict=True)]
    for number, middle in enumerate(tiles if len(tiles) > 1 else []):
        ax.text(1, middle, f"tile {number}", color=BORDER, ha="right", va="center", fontsize=9)
    box = {"facecolor": "black", "edgecolor": "none", "alpha": 0.6, "pad": 2}
    ax.text(scan.shape[1] - 4, 4, "the net has learned\nfrom this half", color=BORDER, fontsize=9, bbox=box)
    ax.set_title(name)
    ax.set(xlim=(scan.shape[1] - 0.5, -0.5), ylim=(-0.5, rows - 0.5))  # as a physician looks: the left on the right
    ax.set_axis_off()


def loss_curves(ax: Any, curves: Mapping[str, Sequence[float]]) -> None:
    """Every mesh's loss, the first as a broad band under the others."""
    for k, (name, losses) in enumerate(curves.items()):
        style = {"lw": 6.0, "alpha": 0.35} if k == 0 and len(curves) > 1 else {"lw": 1.4}
        ax.plot(range(1, len(losses) + 1), losses, color=PALETTE[k % 4], label=name, **style)
    ax.set(xlabel="step", ylabel="Dice + cross-entropy", xlim=(0, None), ylim=(0, None))
    ax.legend(loc="upper right", framealpha=0.85, edgecolor="none")
    gap = f": the curves differ by at most {largest_gap(curves):.0e} of their value" if len(curves) > 1 else ""
    ax.set_title(f"training loss{gap}", loc="left")


def dice_bars(ax: Any, report: Mapping[str, Any]) -> None:
    """Dice of each organ in the held-out half, of the net and of the baseline."""
    places = np.arange(len(data.CLASSES) - 1)
    for who, shift, color in (("net", -0.2, PALETTE[1]), ("atlas", 0.2, PALE)):
        bars = ax.bar(places + shift, report[who]["dice"], width=0.38, color=color, label=who)
        ax.bar_label(bars, [f"{v:.2f}" for v in report[who]["dice"]], color=INK)
    ax.set_xticks(places, data.CLASSES[1:])
    ax.set_ylim(0, 1.12)
    ax.legend(loc="upper right", ncols=2, framealpha=0.85, edgecolor="none")
    ax.set_title("Dice in the held-out half", loc="left")


def save(path: Path, masks: Mapping[str, Array], cuts: Mapping[str, Sequence[int]], report: Any, curves: Any) -> None:
    """Coronal slices above, with the masks of the held-out half [z, y, x]; curves and Dice below."""
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.edgecolor": PALE})
    plt.rcParams.update({"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(13.5, 8.6), dpi=110, facecolor="white")
    title = f"Organs of a left half, learned on the right one: {name_of(report)}"
    figure.text(0.025, 0.955, title, fontsize=14, fontweight="bold")
    top = figure.add_gridspec(1, len(masks), left=0.025, right=0.975, top=0.91, bottom=0.42, wspace=0.04)
    scan = nibabel.as_closest_canonical(nibabel.load(data.SCAN)).get_fdata().T  # z, y, x
    row = scan.shape[1] * 2 // 5
    for k, (name, mask) in enumerate(masks.items()):
        coronal(figure.add_subplot(top[k]), name, scan[:, row], mask[:, row], cuts)
    low = figure.add_gridspec(1, 2, left=0.06, right=0.975, top=0.345, bottom=0.07, wspace=0.18)
    loss_curves(figure.add_subplot(low[0]), curves)
    dice_bars(figure.add_subplot(low[1]), report)
    figure.savefig(path)
    plt.close(figure)
