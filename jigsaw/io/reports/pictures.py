"""Pictures of a read plan and of a field.

That of a plan is the map with chunk borders, tiles and their halos, and the bytes that each rank reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.drafts import draft_of
from jigsaw.errors import UnsupportedStoreError, imports_needed
from jigsaw.geometry.cut import Box, Cut, Interval, whole_dim
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.opening import open
from jigsaw.io.reading.read_plan import ReadPlan
from jigsaw.io.reports.recommend import edges_in_sample
from jigsaw.io.series.cell_grid import CellGrid
from jigsaw.ranks.mesh import init_mesh

if TYPE_CHECKING:
    import xarray as xr


_DRAWN_BYTES = ("stored_bytes", "decoded_bytes", "useful_bytes", "sent_bytes")
_BAR_GRAYS = ("#222222", "#666666", "#999999", "#cccccc")


def draw_plan(dataset: Dataset, plan: ReadPlan, path: str | Path) -> None:
    """Write the picture of a plan; the file's ending says its format.

    Raises: `UnsupportedStoreError` where matplotlib is not installed or does not write such a file.
    """
    save_figure(plan_figure(dataset, plan), path)


def plan_figure(dataset: Dataset, plan: ReadPlan) -> Any:
    """Return the picture as a figure of matplotlib.

    Raises: `UnsupportedStoreError` where that is not installed.
    """
    with imports_needed(UnsupportedStoreError, "drawing a plan needs matplotlib: pip install 'jigsaw-torch[plot]'"):
        import matplotlib
        from matplotlib.figure import Figure
    colors: Any = matplotlib.colormaps["tab10" if plan.ranks <= 10 else "turbo"]
    shades = [colors(rank if plan.ranks <= 10 else rank / (plan.ranks - 1)) for rank in range(plan.ranks)]
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    _draw_tiles(left, dataset, plan, shades)
    _draw_bars(right, plan, shades)
    return figure


def picture_place(path: str | Path) -> Path:
    """Return where a picture is written: a name without an ending gets that of PNG."""
    return Path(path) if Path(path).suffix else Path(f"{path}.png")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure of matplotlib.

    Raises: `UnsupportedStoreError` for an ending that it does not write, and a folder that does not exist.
    """
    endings = sorted(figure.canvas.get_supported_filetypes())
    ending = Path(path).suffix.removeprefix(".")
    if ending and ending not in endings:
        allowed = ", ".join(endings)
        raise UnsupportedStoreError(f"a picture is not written as {str(path)!r}; its ending may be {allowed}")
    place = picture_place(path)
    if not place.absolute().parent.is_dir():
        raise UnsupportedStoreError(
            f"a picture is to be drawn to {str(place)!r}, whose folder is not there; make it first"
        )
    with draft_of(place) as file:
        figure.savefig(file, dpi=120, format=place.suffix.removeprefix("."))


def _draw_tiles(axes: Any, dataset: Dataset, plan: ReadPlan, shades: list[Any]) -> None:
    """Draw the last two spatial dims in rows and columns: tiles filled, halos hatched, chunk borders dashed. Cells are
    one row.
    """
    from matplotlib.patches import Rectangle

    dims, is_row = dataset.frame.dims[-2:], len(dataset.frame.dims) == 1
    height, width = (1, *dataset.frame.sizes) if is_row else dataset.frame.sizes[-2:]
    layout = plan.request.layout
    cuts = (whole_dim(1), layout.cuts[-1]) if is_row else layout.cuts[-2:]

    def plane(box: Box) -> tuple[Interval, Interval]:
        return ((0, 1) if is_row else box[-2]), box[-1]

    for rank, coord in enumerate(layout.coords()):
        rows, columns = plane(layout.owned(coord))
        axes.add_patch(Rectangle(*_rectangle_of(rows, columns), fc=(*shades[rank][:3], 0.25), ec=shades[rank], lw=2))
        tall = "" if is_row else f"{rows[1] - rows[0]} x "
        label = f"rank {rank}\n{tall}{columns[1] - columns[0]}"
        axes.text(sum(columns) / 2, sum(rows) / 2, label, ha="center", va="center", color=shades[rank], weight="bold")
        held_rows, held_columns = plane(layout.held(coord))
        below, above = (held_rows[0], rows[0]), (rows[1], held_rows[1])
        left, right = (held_columns[0], columns[0]), (columns[1], held_columns[1])
        # the halo around the owned box: strips of full width below and above, then the sides
        for strip in ((below, held_columns), (above, held_columns), (rows, left), (rows, right)):
            for part in product(*map(_wrap_interval, strip, cuts)):
                axes.add_patch(Rectangle(*_rectangle_of(*part), fc=(*shades[rank][:3], 0.45), ec="none", hatch="////"))
    _draw_chunk_borders(axes, dataset, height, width)
    axes.set(xlim=(-0.01 * width, 1.01 * width), ylim=(1.01 * height, -0.01 * height), aspect="auto")
    for axis, dim in zip((axes.xaxis, axes.yaxis), reversed(dims), strict=False):
        values = dataset.whole_coords[dim]
        at = np.linspace(0, len(values) - 1, min(len(values), 7)).round().astype(int)
        axis.set_ticks(at + 0.5, [tick_text(values[i]) for i in at])
        axis.set_label_text(dim)
    if is_row:
        axes.set_yticks([])
    axes.set_title("tiles (filled), their halos (hatched), stored chunks (dashed)", fontsize=10)


def tick_text(value: Any) -> str:
    """Return a value of a coordinate as text: a number in short, anything else as it is."""
    return f"{value:g}" if np.asarray(value).dtype.kind in "fiu" else str(value)


def _rectangle_of(rows: Interval, columns: Interval) -> tuple[tuple[int, int], int, int]:
    return (columns[0], rows[0]), columns[1] - columns[0], rows[1] - rows[0]


def _wrap_interval(held: Interval, cut: Cut) -> Iterator[Interval]:
    """Yield the parts of an interval that lie in the dim; parts beyond its ends wrap round where the dim wraps."""
    for turn in (-cut.size, 0, cut.size) if cut.wraps else (0,):
        part = max(held[0] + turn, 0), min(held[1] + turn, cut.size)
        if part[0] < part[1]:
            yield part


def _draw_chunk_borders(axes: Any, dataset: Dataset, height: int, width: int) -> None:
    lines: dict[str, set[int]] = {"h": {0, height}, "v": {0, width}}
    sizes = ("v", width), ("h", height)
    for variable in dataset.variables:
        for (key, size), dim in zip(sizes, reversed(dataset.frame.dims), strict=False):
            lines[key] |= edges_in_sample(dataset, variable, dim, size)
    axes.hlines(sorted(lines["h"]), 0, width, colors="black", linestyles="dashed", lw=0.8)
    axes.vlines(sorted(lines["v"]), 0, height, colors="black", linestyles="dashed", lw=0.8)


def _draw_bars(axes: Any, plan: ReadPlan, shades: list[Any]) -> None:
    """Draw a group of bars for each rank; where ranks share chunks, one more for the busiest one reading by itself."""
    rows, names, wide = list(plan.rows), [str(rank) for rank in range(plan.ranks)], 0.8 / len(_DRAWN_BYTES)
    if any(mode != "independent" for mode in plan.modes.values()):
        rows.append(max(plan.in_mode("independent").rows, key=lambda row: row.decoded_bytes))
        names.append("each\nby itself")
    for i, name in enumerate(_DRAWN_BYTES):
        at = [group + (i - 1.5) * wide for group in range(len(rows))]
        megabytes = [getattr(row, name) / 1e6 for row in rows]
        axes.bar(at, megabytes, wide, color=_BAR_GRAYS[i], label=name.partition("_")[0])
    axes.set_xticks(range(len(rows)), names)
    for label, shade in zip(axes.get_xticklabels(), shades, strict=False):
        label.set(color=shade, weight="bold")
    axes.set(xlabel="rank", ylabel="MB")
    # beside the bars: within the axes it would hide bars of the last ranks
    axes.legend(frameon=False, fontsize=9, ncols=len(_DRAWN_BYTES), loc="lower center", bbox_to_anchor=(0.5, 1.06))
    modes = " and ".join(sorted(set(plan.modes.values())))
    title = f"{modes}: {plan.total.chunks} chunks decoded, amplification {plan.amplification:.2f}"
    axes.set_title(title, fontsize=9)


_SHOWN_ATTRIBUTES = ("long_name", "standard_name", "units")


def draw_field_map(
    store: ArrayStore,
    path: str | Path,
    fields: Sequence[str] | None = None,
    step: int = 0,
    select: Mapping[str, int] | None = None,
    dims: Mapping[str, str] | None = None,
) -> str:
    """Draw the first of `fields` at a step; for a volume, its middle slice. Returns a description of the picture.

    Raises: a `ReadError` as `jigsaw.io.open`; `IndexError` for a step that does not exist; `UnsupportedStoreError`
    where matplotlib or xarray is not installed, or cannot write such a file.
    """
    for package in ("matplotlib", "xarray"):
        if find_spec(package) is None:
            raise UnsupportedStoreError(f"drawing a map needs {package}: pip install 'jigsaw-torch[plot]'")
    plan: dict[str, Any] = {"select": select, "dims": dims}
    first = open(store, mesh={}, fields=fields and list(fields[:1]), **plan).channels[0]
    name = first.array if first.level is None else first.name
    dataset = open(store, mesh=init_mesh(device="cpu", data=1), fields=[name], **plan)
    if not -len(dataset) <= step < len(dataset):
        raise IndexError(
            f"step {step} of {name!r}, which has {len(dataset)}: the first is 0, and the last {len(dataset) - 1} or -1"
        )
    number = range(len(dataset))[step]
    values = dataset[number].input.local[0, 0].numpy()
    cut = ""
    if values.ndim == 3:
        sliced, middle = dataset.frame.dims[0], values.shape[0] // 2
        cut, values = f", {sliced} = {tick_text(dataset.whole_coords[sliced][middle])}", values[middle]
    attrs = dataset.variables[0].table.attrs
    long = str(attrs.get("long_name", attrs.get("standard_name", "")))
    timed = any("time" in v.roles for v in dataset.variables)
    at = f", {str(dataset.input_times(number)[0]).removesuffix('.000000')}" if timed else ""
    title = f"{name} ({long}){at}{cut}" if long and long != name else f"{name}{at}{cut}"
    if dataset.cells is not None:
        _draw_cells(values, dataset.cells, title, path)
    else:
        _draw_values(_labeled_values(values, dataset), title, path, not dataset.counted)
    return title


def _draw_cells(values: NDArray[Any], grid: CellGrid, title: str, path: str | Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes: Any = figure.subplots()
    side = 6e4 / max(grid.cells, 60)  # size of a point, so that points cover the map, however many there are
    low, high = np.nanquantile(values, (0.02, 0.98)) if np.isfinite(values).any() else (0.0, 1.0)
    drawn = axes.scatter(grid.lon, grid.lat, c=values, s=side, marker="s", lw=0, vmin=low, vmax=high, rasterized=True)
    figure.colorbar(drawn, ax=axes, extend="both")
    axes.set(xlabel="longitude", ylabel="latitude", aspect="equal")
    axes.set_title(title, fontsize=11)
    save_figure(figure, path)


def _labeled_values(values: Any, dataset: Dataset) -> xr.DataArray:
    """Return the values with what xarray draws beside them: coordinates that are numbers, and attributes."""
    import xarray as xr

    dims, variable = dataset.frame.dims[-2:], dataset.variables[0]
    drawn = xr.DataArray(values, dims=dims, name=variable.table.name, attrs=_shown_attributes(variable.table))
    for dim in dims:
        rows = dataset.whole_coords[dim]
        if rows.dtype.kind in "fiu":
            attrs = _shown_attributes(dataset.store.arrays.get(variable.dim(dim)))
            drawn = drawn.assign_coords({dim: (dim, rows, attrs)})
    return drawn


def _shown_attributes(table: ArrayTable | None) -> dict[str, str]:
    return {k: str(table.attrs[k]) for k in _SHOWN_ATTRIBUTES if k in table.attrs} if table is not None else {}


def _draw_values(values: xr.DataArray, title: str, path: str | Path, degrees: bool) -> None:
    from matplotlib.figure import Figure

    tall = values.shape[0] / values.shape[1]
    figure = Figure(figsize=(10, min(10.0, max(3.5, 8.6 * tall + 1.2))), layout="constrained")
    axes: Any = figure.subplots()
    values.plot.pcolormesh(ax=axes, robust=True, rasterized=True, yincrease=values.dims[0] in ("lat", "z"))
    if degrees and values.dims == ("lat", "lon") and len(values.coords) == len(values.dims):
        axes.set(aspect="equal", ylim=np.clip(axes.get_ylim(), -90.0, 90.0))
    axes.set_title(title, fontsize=11)
    save_figure(figure, path)
