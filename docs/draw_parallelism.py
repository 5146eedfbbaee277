"""Draws docs/parallelism.png: which of four ranks has what of a batch of four samples and a model of four layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

RANKS = ("#4477aa", "#66ccee", "#228833", "#ccbb44")
ALL = "#cccccc"  # every rank has it, whole
Color = Callable[[int, int], str]  # of the number of a sample or layer, and of its piece

PANELS: tuple[tuple[str, str, Color, Color], ...] = (
    ("data", "samples", lambda n, _: RANKS[n], lambda *_: ALL),
    ("lat", "rows of each sample", lambda _, k: RANKS[k], lambda *_: ALL),
    ("channel", "each layer's weights", lambda *_: ALL, lambda _, k: RANKS[k]),
    ("pipe", "layers", lambda *_: ALL, lambda n, _: RANKS[n]),
    ("expert", "experts, beside rows", lambda _, k: RANKS[k], lambda n, k: RANKS[k] if n == 1 else ALL),
    ("shard_weights", "weights while they rest", lambda n, _: RANKS[n], lambda _, k: RANKS[k]),
)


def draw_blocks(place: Any, left: float, color: Color, is_layer: bool, gap: float) -> None:
    """Four blocks above each other, of four pieces each: bands of a sample, or parts of a layer side by side."""
    for n in range(4):
        for k in range(4):
            low = (3 - n) * 1.25
            if is_layer:
                corner, width, height = (left + 0.5 * k, low), 0.5 - gap, 1.0
            else:
                corner, width, height = (left, low + 0.25 * (3 - k)), 1.6, 0.25
            place.add_patch(Rectangle(corner, width, height, facecolor=color(n, k), linewidth=0))
        place.add_patch(Rectangle((left, low), 2.0 - gap if is_layer else 1.6, 1.0, fill=False, linewidth=0.8))


def draw_all(path: Path) -> None:
    figure, places = plt.subplots(1, len(PANELS), figsize=(12.6, 3.1))
    for place, (name, what, of_sample, of_layer) in zip(places, PANELS, strict=True):
        draw_blocks(place, 0, of_sample, is_layer=False, gap=0)
        draw_blocks(place, 2.2, of_layer, is_layer=True, gap=0.08 if name == "shard_weights" else 0)
        place.text(0.8, -0.35, "samples", ha="center", va="top", fontsize=8)
        place.text(3.2, -0.35, "layers", ha="center", va="top", fontsize=8)
        place.text(2.1, 5.55, name, ha="center", fontsize=11, fontfamily="monospace")
        place.text(2.1, 5.0, f"cuts {what}", ha="center", fontsize=8)
        place.set(xlim=(-0.1, 4.4), ylim=(-0.8, 6.0), aspect="equal")
        place.axis("off")
    handles = [Rectangle((0, 0), 1, 1, color=c) for c in (*RANKS, ALL)]
    names = [*(f"rank {n}" for n in range(4)), "all ranks"]
    figure.legend(handles, names, loc="lower center", ncol=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1), w_pad=0.4)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "parallelism.png")
    draw_all(parser.parse_args().out)
