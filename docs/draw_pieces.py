"""Draws docs/pieces.png: a globe and a volume cut into the same pieces, from the file to the layer.

    python docs/draw_pieces.py

Both are painted pixel by pixel, on paper of twice the size: a globe's pixel becomes latitude and longitude, a volume's
pixel a point of its top, right or front face, and the rank that owns the point gives it its color.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

COASTLINE = Path(__file__).parents[1] / "examples" / "weather" / "data" / "coastline.npy"
WIDTH, HEIGHT, SCALE, DPI = 1800, 1000, 2, 200
INK, PALE, RULE = "#1d2733", "#66727f", "#d5dbe1"
# rank 0 north-west, 1 north-east, 2 south-west, 3 south-east
PALETTE = np.array([mpl.colors.to_rgb(c) for c in ("#3d87ad", "#e58567", "#efbd68", "#7fac89")])
LINE = 0.97  # how white the lines between chunks are
RADIUS, SIDE = 136, 190  # of the globe, of the volume
VIEW = np.deg2rad((16.0, -11.0))  # the latitude and longitude in the middle of the picture
HALO = 24  # pixels that a tile reaches beyond its cut
INWARDS = np.array([0.44, -0.36])  # where the volume's third dim goes, in sides
COLUMNS, ROWS, LEAN = (300, 890, 1480), (346, 728), (-42, 34)  # LEAN: from a volume's middle to its front face's
KERNEL = 15  # pixels of one of its 3 x 3 weights

Array = np.ndarray[Any, Any]
Picture = Callable[[Array, Array], tuple[Array, Array]]  # pixel offsets -> where there is something, and its colors


@dataclass
class Paper:
    """Pixels, and the one way to put something on them."""

    pixels: Array

    def paint(self, x: float, y: float, reach: float, picture: Picture) -> None:
        """Put `picture` on the pixels within `reach` of (x, y)."""
        rows, columns = (np.arange(int((c - reach) * SCALE), int((c + reach) * SCALE)) for c in (y, x))
        down, right = np.meshgrid((rows + 0.5) / SCALE - y, (columns + 0.5) / SCALE - x, indexing="ij")
        where, colors = picture(right, down)
        self.pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1][where] = colors[where]

    def scaled(self) -> Array:
        """Each pixel the mean of those painted in its place: smooth edges."""
        return self.pixels.reshape(HEIGHT, SCALE, WIDTH, SCALE, -1).mean(axis=(1, 3))


def colored(owner: Array, light: Array, pale: Array, lines: Array) -> Array:
    """The owner's color in that light; paler where another rank only holds it; white lines."""
    color = PALETTE[owner]
    color = np.where(pale[..., None], 0.45 * color + 0.55, color) * light[..., None]
    return np.clip(np.where(lines[..., None], 0.35 * color + 0.65 * LINE, color), 0, 1)


def from_line(value: Array, step: float, first: float) -> Array:
    """How far `value` is from the nearest of the lines first, first + step, …"""
    return np.abs((value - first + step / 2) % step - step / 2)


# -- the globe --------------------------------------------------------------------------------------------------------


def land() -> Array:
    """Where land is, on half degrees: where coastlines cross the way from the north pole an odd number of times."""
    points = np.load(COASTLINE).astype(float)
    points[points[:, 0] > 30000] = np.nan
    pairs = np.sort(np.stack([points[:-1], points[1:]], axis=1).view("f8,f8"), axis=1)  # a coast may be there twice
    lon, lat, next_lon, next_lat = np.unique(pairs.view(float).reshape(-1, 4), axis=0).T / 100
    lats = np.arange(-89.75, 90, 0.5)
    found = []
    for at in np.arange(-179.75, 180, 0.5):
        over = ((lon <= at) & (next_lon > at)) | ((next_lon <= at) & (lon > at))
        share = (at - lon[over]) / (next_lon[over] - lon[over])
        crossings = lat[over] + share * (next_lat[over] - lat[over])
        found.append((crossings[:, None] > lats).sum(axis=0) % 2 == 1)
    return np.stack(found, axis=1)


LAND = land()


def globe(right: Array, down: Array, rank: int | None, chunks: bool) -> tuple[Array, Array]:
    """The globe at these offsets: all of it, or the tile of one rank with its halo."""
    x, y = right / RADIUS, -down / RADIUS
    held = x**2 + y**2 <= 1
    z = np.sqrt(np.clip(1 - x**2 - y**2, 0, 1))
    tilt, turn = VIEW
    lat = np.arcsin(np.clip(y * np.cos(tilt) + z * np.sin(tilt), -1, 1))
    lon = (np.arctan2(x, z * np.cos(tilt) - y * np.sin(tilt)) + turn + np.pi) % (2 * np.pi) - np.pi
    owner = np.where(lat >= 0, 0, 2) + (lon >= 0)
    north, east = np.rad2deg(lat), np.rad2deg(lon)
    dry = LAND[np.clip(((north + 90) * 2).astype(int), 0, 359), np.clip(((east + 180) * 2).astype(int), 0, 719)]
    light = 0.97 + 0.13 * (0.6 * z - 0.45 * x + 0.55 * y) - 0.14 * dry
    width = np.deg2rad(np.minimum(from_line(north, 36, 18), from_line(east, 40, 20) * np.cos(lat))) * RADIUS
    if rank is None:
        return held, colored(owner, light, np.zeros_like(held), chunks & (width < 1.1))
    near = HALO / RADIUS
    held &= (np.sin(lat) * (1 if rank < 2 else -1) >= -near) & (
        np.sin(lon) * np.cos(lat) * (1 if rank % 2 else -1) >= -near
    )
    return held, colored(owner, light, owner != rank, np.zeros_like(held))


# -- the volume -------------------------------------------------------------------------------------------------------


def scan(point: Array) -> Array:
    """How bright a head is at points [..., 3] of the unit cube: skull, brain, ventricles, and something to find."""
    x, y, z = np.moveaxis(point - np.array([0.5, 0.5, 0.0]), -1, 0)
    around, out = np.arctan2(y * 0.82, x), np.hypot(x / 0.36, y / 0.44)
    inwards = np.hypot(out, z / 0.6)
    folds = 0.78 + 0.035 * np.cos(15 * around + 2 * np.sin(4 * around)) - 0.05 * np.exp(-((x / 0.03) ** 2))
    bright = np.where(inwards <= 1, -0.17, 0.0)
    bright = np.where(inwards <= 0.88, -0.01, bright)
    bright = np.where(inwards <= folds, -0.09, bright)
    for side in (-1, 1):
        bend = side * x - 0.045 - 1.1 * y**2 * np.where(y < 0, 1.2, 2.4)
        bright = np.where(
            (np.abs(bend) < 0.022 - 0.5 * (y - 0.02) ** 2) & (np.abs(y - 0.02) < 0.17) & (z < 0.3), -0.22, bright
        )
    return np.where((x - 0.17) ** 2 + (y - 0.15) ** 2 + z**2 < 0.055**2, 0.2, bright)


def volume(right: Array, down: Array, rank: int | None, chunks: bool) -> tuple[Array, Array]:
    """The volume at these offsets from the middle of its front: all of it, or the tile of one rank with its halo."""
    low, high = np.zeros(3), np.ones(3)
    if rank is not None:
        for axis, upper in ((0, rank % 2), (1, rank // 2)):
            low[axis], high[axis] = (0.5 - HALO / SIDE, 1.0) if upper else (0.0, 0.5 + HALO / SIDE)
    u, v = right / SIDE + 0.5, down / SIDE + 0.5
    top, right_side, front = (v - low[1]) / INWARDS[1], (u - high[0]) / INWARDS[0], np.zeros_like(u)
    seen, point, light = np.zeros(u.shape, bool), np.zeros((*u.shape, 3)), np.zeros(u.shape)
    for z, shade in ((top, 1.09), (right_side, 0.87), (front, 1.0)):
        at = np.stack([u - z * INWARDS[0], v - z * INWARDS[1], z], axis=-1)
        here = np.all((at >= low - 1e-9) & (at <= high + 1e-9), axis=-1)
        point[here], light[here] = at[here], shade
        seen |= here
    inside = np.clip(point, low + 1e-6, high - 1e-6)  # a face has the color of what is just under it
    owner = (inside[..., 0] >= 0.5) + 2 * (inside[..., 1] >= 0.5)
    light += 0.07 * (0.5 - point[..., 1]) + scan(point)
    pale = np.zeros_like(seen) if rank is None else owner != rank
    lines = np.zeros_like(seen)
    for axis, shorter in enumerate((1, 1, 0.57)):
        inner = (point[..., axis] > 0.1) & (point[..., axis] < 0.9)
        lines |= inner & (from_line(point[..., axis], 1 / 3, 1 / 3) * SIDE * shorter < 1.1)
    return seen, colored(owner, light, pale, lines & chunks)


# -- the page ---------------------------------------------------------------------------------------------------------


def rimmed(picture: Picture, width: float) -> Picture:
    """`picture` with a white rim, so that what lies over another thing stands clear of it."""

    def with_rim(right: Array, down: Array) -> tuple[Array, Array]:
        where, colors = picture(right, down)
        grown = where.copy()
        for angle in np.linspace(0, 2 * np.pi, 24, endpoint=False):
            shift = (round(width * SCALE * np.sin(angle)), round(width * SCALE * np.cos(angle)))
            grown |= np.roll(where, shift, axis=(0, 1))
        return grown, np.where(where[..., None], colors, 1.0)

    return with_rim


def draw_things(paper: Paper) -> None:
    """A globe and a volume, in chunks, in tiles with their halos, and as the channels of a layer."""
    for thing, middle, lean, gap in ((globe, ROWS[0], (0, 0), (33, 33)), (volume, ROWS[1], LEAN, (34, 44))):
        y, xs = middle + lean[1], [x + lean[0] for x in COLUMNS]
        paper.paint(xs[0], y, 185, lambda r, d, t=thing: t(r, d, None, True))
        for rank in (2, 3, 0, 1):
            x = xs[1] + gap[0] * (1 if rank % 2 else -1)
            paper.paint(x, y + gap[1] * (1 if rank // 2 else -1), 185, lambda r, d, t=thing, k=rank: t(r, d, k, False))
        for back in (2, 1, 0):
            across = 34 * (back - 1)
            channel = rimmed(lambda r, d, t=thing: t(r, d, None, False), 4)
            paper.paint(xs[2] + across, y - 0.35 * across, 195, channel)


def write_words(ax: Any) -> None:
    """What the columns are, and what leads from one to the next."""
    heads = ("file", "rank", "layer")
    below = ("stored in chunks", "its tile, and a halo of its neighbors", "every channel cut alike")
    codes = ("jigsaw.io.open", "jigsaw.Tile", "torch.nn, jigsaw.nn")
    for x, head, words, code in zip(COLUMNS, heads, below, codes, strict=True):
        ax.text(x, 76, head, ha="center", va="center", size=16, weight="bold", color=INK)
        ax.text(x, 122, words, ha="center", va="center", size=10.5, color=PALE)
        ax.text(x, HEIGHT - 52, code, ha="center", va="center", size=10.5, family="monospace", color=PALE)
    for y in ROWS:
        for word, start, stop in zip(("read", "compute"), COLUMNS[:-1], COLUMNS[1:], strict=True):
            middle = (start + stop) / 2
            ends = (middle - 52, y), (middle + 52, y)
            ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=13, lw=1.6, color=PALE, zorder=3))
            ax.text(middle - 4, y - 24, word, ha="center", va="center", size=10.5, color=PALE)


def draw_kernel(ax: Any, x: float, y: float) -> None:
    """3 x 3 weights over a cut."""
    low = np.array([x, y]) - 1.5 * KERNEL
    ax.add_patch(Rectangle(low, 3 * KERNEL, 3 * KERNEL, facecolor="white", alpha=0.3, zorder=4))
    for n in range(4):
        for line in (([n, n], [0, 3]), ([0, 3], [n, n])):
            ax.plot(
                *(low[:, None] + KERNEL * np.array(line)), color="white", lw=1.1, zorder=5, solid_capstyle="projecting"
            )


def draw(path: Path) -> None:
    """Paint the page, write on it, and save it."""
    paper = Paper(np.ones((HEIGHT * SCALE, WIDTH * SCALE, 3), np.float32))
    draw_things(paper)
    figure = plt.figure(figsize=(WIDTH / DPI, HEIGHT / DPI))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    ax.set_axis_off()
    edge = "round,pad=0,rounding_size=36"
    card = FancyBboxPatch((4, 4), WIDTH - 8, HEIGHT - 8, boxstyle=edge, facecolor="white", edgecolor=RULE, lw=1)
    ax.add_patch(card)
    image = ax.imshow(paper.scaled(), extent=(0, WIDTH, HEIGHT, 0), interpolation="nearest", aspect="auto", zorder=2)
    image.set_clip_path(FancyBboxPatch((6, 6), WIDTH - 12, HEIGHT - 12, boxstyle=edge, transform=ax.transData))
    write_words(ax)
    front = COLUMNS[2] - 34, 12
    draw_kernel(ax, front[0] - RADIUS * np.sin(VIEW[1]), ROWS[0] + 12 + RADIUS * np.sin(VIEW[0]) * np.cos(VIEW[1]))
    draw_kernel(ax, front[0] + LEAN[0], ROWS[1] + 12 + LEAN[1])
    figure.savefig(path, dpi=DPI, transparent=True)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pieces.png")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
