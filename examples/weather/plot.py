"""The picture of a run: maps on the globe with the tiles' borders, loss curves of every mesh, skill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")
import matplotlib.pyplot as plt

Array = NDArray[Any]

CENTER = 160.0  # the map's central longitude: an edge in the Atlantic, both meridian borders inside
COASTLINE = Path(__file__).parent / "data" / "coastline.npy"
INK, PALE, BORDER = "#1d2733", "#8795a5", "#111111"
PALETTE = ("#0b6e99", "#e4572e", "#f2a541", "#5b8c5a")
_A = (1.340264, -0.081106, 0.000893, 0.003796)  # Equal Earth: Savric, Patterson, Jenny (2018)


def project(lon: Array, lat: Array) -> tuple[Array, Array]:
    """Equal Earth: degrees -> x, y in about -2.7..2.7 and -1.32..1.32."""
    t = np.arcsin(np.sqrt(3) / 2 * np.sin(np.deg2rad(lat)))
    y = t * (_A[0] + _A[1] * t**2 + t**6 * (_A[2] + _A[3] * t**2))
    slope = _A[0] + 3 * _A[1] * t**2 + t**6 * (7 * _A[2] + 9 * _A[3] * t**2)
    return 2 * np.sqrt(3) / 3 * np.deg2rad(lon) * np.cos(t) / slope, y


def around(lon: Array | float) -> Array:
    """Longitudes as the map shows them: degrees east of its center, in -180..180."""
    return (np.asarray(lon, dtype=float) - CENTER + 180) % 360 - 180


def raster(values: Array, lats: Array, lons: Array, rows: int = 520) -> Array:
    """A field [lat, lon] as an image of the map, bilinear between grid points and round the globe; NaN outside."""
    edge_x, edge_y = project(np.array([180.0]), np.array([0.0]))[0][0], project(np.array([0.0]), np.array([90.0]))[1][0]
    y, x = np.meshgrid(np.linspace(edge_y, -edge_y, rows), np.linspace(-edge_x, edge_x, 2 * rows), indexing="ij")
    table = np.linspace(-90, 90, 4001)
    lat = np.interp(y, project(np.zeros_like(table), table)[1], table)
    lon = x / np.maximum(project(np.ones_like(lat), lat)[0], 1e-9)
    i = (
        np.interp(lat, np.sort(lats), np.argsort(lats))
        if lats[0] < lats[-1]
        else np.interp(-lat, -lats, np.arange(len(lats)))
    )
    j = (lon + CENTER - lons[0]) / (lons[1] - lons[0]) % len(lons)
    i0, j0 = np.minimum(i.astype(int), len(lats) - 2), j.astype(int) % len(lons)
    u, v, j1 = i - i0, j - np.floor(j), (j0 + 1) % len(lons)
    image = (1 - u) * ((1 - v) * values[i0, j0] + v * values[i0, j1]) + u * (
        (1 - v) * values[i0 + 1, j0] + v * values[i0 + 1, j1]
    )
    return np.where(np.abs(lon) <= 180, image, np.nan)


def line(ax: Any, lon: Array, lat: Array, **style: Any) -> None:
    """A line on the map, broken where it leaves over the edge."""
    shown = around(lon)
    breaks = np.abs(np.diff(shown, prepend=shown[:1])) > 180
    x, y = project(np.where(breaks, np.nan, shown), lat)
    ax.plot(x, y, **style)


def world(
    ax: Any, values: Array, lats: Array, lons: Array, cuts: Mapping[str, Sequence[int]], limit: float, cmap: str
) -> Any:
    """One map with coastlines and tile borders; `cuts` holds the cut points of lat and lon."""
    edge = project(
        np.r_[np.full(181, 180.0), np.full(181, -180.0)], np.r_[np.linspace(-90, 90, 181), np.linspace(90, -90, 181)]
    )
    x, y = project(np.array([180.0, 0]), np.array([0, 90.0]))
    image = ax.imshow(
        raster(values, lats, lons),
        cmap=cmap,
        vmin=-limit,
        vmax=limit,
        extent=(-x[0], x[0], -y[1], y[1]),
        aspect="equal",
    )
    coast = np.load(COASTLINE).astype(float)
    coast[coast[:, 0] > 30000] = np.nan
    line(ax, coast[:, 0] / 100, coast[:, 1] / 100, color=INK, lw=0.45, alpha=0.75)
    for style in ({"color": "white", "lw": 3.2}, {"color": BORDER, "lw": 1.3}):
        borders(ax, lats, lons, cuts, **style)
    label_tiles(ax, lats, lons, cuts)
    ax.fill(*edge, facecolor="none", edgecolor=INK, lw=0.8)
    ax.set_axis_off()
    return image


def borders(ax: Any, lats: Array, lons: Array, cuts: Mapping[str, Sequence[int]], **style: Any) -> None:
    """The borders between tiles: halfway between the last row of one and the first row of the next."""
    for point in cuts["lat"][1:-1]:
        turn = np.linspace(-179.99, 179.99, 361) + CENTER
        line(ax, turn, np.full(361, (lats[point - 1] + lats[point]) / 2), **style)
    if len(cuts["lon"]) > 2:
        for point in cuts["lon"][:-1]:
            line(ax, np.full(181, lons[point] - (lons[1] - lons[0]) / 2), np.linspace(-90, 90, 181), **style)


def label_tiles(ax: Any, lats: Array, lons: Array, cuts: Mapping[str, Sequence[int]]) -> None:
    rows, columns = (np.asarray(cuts[d]) for d in ("lat", "lon"))
    if len(rows) * len(columns) <= 4:
        return
    for rank, (i, j) in enumerate((i, j) for i in range(len(rows) - 1) for j in range(len(columns) - 1)):
        middle = 0.5 * (lats[rows[i]] + lats[rows[i + 1] - 1]), lons[(columns[j] + columns[j + 1]) // 2 % len(lons)]
        x, y = project(around(middle[1]), np.asarray(middle[0]))
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        ax.text(x, y, f"tile {rank}", ha="center", va="center", fontsize=8, color=INK, bbox=box)


def loss_curves(ax: Any, curves: Mapping[str, Sequence[float]]) -> None:
    """Every mesh's loss, the first as a broad band under the others."""
    for k, (name, losses) in enumerate(curves.items()):
        shift = 3 * max(k - 1, 0)  # dashes that leave the curves below visible
        style = {"lw": 6.0, "alpha": 0.35} if k == 0 and len(curves) > 1 else {"lw": 1.4, "ls": (shift, (9, shift))}
        ax.plot(range(1, len(losses) + 1), losses, color=PALETTE[k % 4], label=name, **style)
    ax.set(xlabel="step", ylabel="loss", xlim=(0, None))
    ax.legend(loc="upper right", framealpha=0.85, edgecolor="none")
    first, *others = curves.values()
    steps = min(map(len, (first, *others)))
    gap = max((np.max(np.abs(np.divide(o[:steps], first[:steps]) - 1)) for o in others), default=None)
    title = "training loss" if gap is None else f"training loss: the curves differ by at most {gap:.0e} of their value"
    ax.set_title(title, loc="left")


def skill_bars(ax: Any, skill: Mapping[str, float], unit: str) -> None:
    names = list(skill)
    bars = ax.barh(names, list(skill.values()), color=[*[PALE] * (len(names) - 1), PALETTE[1]], height=0.62)
    ax.bar_label(bars, [f" {v:.3f}" for v in skill.values()], color=INK)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(skill.values()))
    ax.set_title(f"error in held-out years, area-weighted RMSE [{unit}]", loc="left")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def save(
    path: str | Path,
    title: str,
    maps: Mapping[str, Array],
    lats: Array,
    lons: Array,
    cuts: Mapping[str, Sequence[int]],
    curves: Mapping[str, Sequence[float]],
    skill: Mapping[str, float],
    unit: str = "K",
) -> None:
    """Forecast, truth and error above; loss curves and skill below."""
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.edgecolor": PALE})
    plt.rcParams.update({"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(15, 6.6), dpi=130, facecolor="white")
    figure.text(0.025, 0.945, title, fontsize=14, fontweight="bold")
    top = figure.add_gridspec(1, 3, left=0.02, right=0.98, top=0.9, bottom=0.51, wspace=0.03)
    limit = float(np.ceil(np.quantile(np.abs(np.stack(list(maps.values()))), 0.985)))
    for k, (name, values) in enumerate(maps.items()):
        ax = figure.add_subplot(top[k])
        image = world(ax, values, lats, lons, cuts, limit, "RdBu_r")
        ax.set_title(name)
    colors = figure.colorbar(
        image, cax=figure.add_axes((0.36, 0.482, 0.28, 0.018)), orientation="horizontal", extend="both"
    )
    colors.set_label(unit, labelpad=1)
    colors.outline.set_visible(False)
    low = figure.add_gridspec(1, 2, left=0.055, right=0.97, top=0.325, bottom=0.085, wspace=0.26)
    loss_curves(figure.add_subplot(low[0]), curves)
    skill_bars(figure.add_subplot(low[1]), skill, unit)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def comparable(report: Mapping[str, Any], folder: Path) -> dict[str, list[float]]:
    """The loss curves in `folder` that were trained as this one was, on whatever mesh, fewest ranks first."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("loss_*.json"))]
    runs = [run for run in runs if run["settings"] == report["settings"]]
    return {
        f"{run['ranks']} rank{'s' * (run['ranks'] > 1)} ({run['mesh']})": run["losses"]
        for run in sorted(runs, key=lambda run: run["ranks"])
    }
