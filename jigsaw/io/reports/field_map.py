"""A map of one field of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.opening import open
from jigsaw.io.reports.plan_picture import save_figure
from jigsaw.mesh import init_mesh

# told apart with every kind of colour vision
_SEQUENTIAL, _DIVERGING = "viridis", "RdBu_r"
_CENTRED_SHARE = 0.2  # smaller to larger side of zero, from which a field is drawn about zero


def draw_field_map(
    store: ArrayStore,
    path: str | Path,
    fields: Sequence[str] | None = None,
    step: int = 0,
    select: Mapping[str, int] | None = None,
    dims: Mapping[str, str] | None = None,
) -> str:
    """Draw the first of `fields` at a step; of a volume its middle slice.  Says what was drawn.

    Raises: a `ReadError` as `jigsaw.io.open`, `IndexError` for a step that there is not, `UnsupportedStoreError`
    where matplotlib is not installed or does not write such a file.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedStoreError("drawing a map needs matplotlib: pip install 'jigsaw-torch[plot]'")
    plan: dict[str, Any] = {"select": select, "dims": dims}
    first = open(store, mesh={}, fields=fields and list(fields[:1]), **plan).channels[0]
    name = first.array if first.level is None else first.name
    dataset = open(store, mesh=init_mesh(device="cpu", data=1), fields=[name], **plan)
    if not -len(dataset) <= step < len(dataset):
        raise IndexError(f"step {step} of {name!r}, which has {len(dataset)}")
    number = range(len(dataset))[step]
    values = dataset[number].input.local[0, 0].numpy()
    names, rows = dataset.frame.dims, dict(dataset.whole_coords)
    cut = ""
    if values.ndim == 3:
        middle = values.shape[0] // 2
        cut, values = f", {names[0]} = {_number_text(rows[names[0]][middle])}", values[middle]
    title = f"{_field_title(dataset, name)}{_sample_time_text(dataset, number)}{cut}"
    _draw_values(values, names[-2:], rows, dataset, title, path)
    return title


def _field_title(dataset: Dataset, name: str) -> str:
    attrs = dataset.variables[0].table.attrs
    long = str(attrs.get("long_name", attrs.get("standard_name", "")))
    return f"{name} ({long})" if long and long != name else name


def _sample_time_text(dataset: Dataset, sample: int) -> str:
    timed = any("time" in v.roles for v in dataset.variables)
    return f", {str(dataset.input_times(sample)[0]).removesuffix('.000000')}" if timed else ""


def _number_text(value: Any) -> str:
    return f"{value:g}" if np.asarray(value).dtype.kind in "fiu" else str(value)


def _draw_values(
    values: NDArray[Any],
    names: Sequence[str],
    rows: Mapping[str, NDArray[Any]],
    dataset: Dataset,
    title: str,
    path: str | Path,
) -> None:
    from matplotlib.figure import Figure

    down, across = names
    tall = values.shape[0] / values.shape[1]
    figure = Figure(figsize=(10, min(10.0, max(3.5, 8.6 * tall + 1.2))), layout="constrained")
    axes: Any = figure.subplots()
    drawn = axes.pcolormesh(
        _drawn_places(rows[across]),
        _drawn_places(rows[down]),
        values,
        shading="nearest",
        rasterized=True,
        **_colour_scale(values),
    )
    numbers = all(rows[dim].dtype.kind in "fiu" for dim in names)
    if (down, across) == ("lat", "lon") and numbers and not dataset.counted:
        axes.set_aspect("equal")
        _set_degrees(axes, rows[down], rows[across])
    if down not in ("lat", "z"):
        axes.invert_yaxis()
    for axis, dim in ((axes.xaxis, across), (axes.yaxis, down)):
        axis.set_label_text(_dim_label(dataset, dim))
    axes.set_title(title, fontsize=11)
    units = str(dataset.variables[0].table.attrs.get("units", ""))
    figure.colorbar(drawn, ax=axes, label=units or "no units given", shrink=0.85, extend="both")
    save_figure(figure, path)


def _set_degrees(axes: Any, lat: NDArray[Any], lon: NDArray[Any]) -> None:
    """No row beyond a pole; ticks at round degrees where the map is wide enough for them."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -90.0), min(high, 90.0))
    for axis, values in ((axes.yaxis, lat), (axes.xaxis, lon)):
        if np.ptp(values) >= 90:
            axis.set_ticks([d for d in range(-180, 361, 30) if values.min() - 1 <= d <= values.max() + 1])


def _drawn_places(values: NDArray[Any]) -> NDArray[Any]:
    """Where rows are drawn: at their coordinate, or one after the other where it is texts."""
    return values if values.dtype.kind in "fiu" else np.arange(len(values))


def _dim_label(dataset: Dataset, dim: str) -> str:
    said = {"lat": "latitude, degrees north", "lon": "longitude, degrees east"}
    variable = dataset.variables[0]
    coordinate = dataset.store.arrays.get(variable.dim(dim))
    units = str(coordinate.attrs.get("units", "")) if coordinate is not None else ""
    return said.get(dim, f"{dim}, {units}" if units else dim)


def _colour_scale(values: NDArray[Any]) -> dict[str, Any]:
    """A scale between the 0.5th and the 99.5th percentile; about zero where the field lies on both sides of it."""
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, (0.5, 99.5)) if finite.size else (0.0, 1.0)
    if low < 0 < high and min(-low, high) > _CENTRED_SHARE * max(-low, high):
        return {"cmap": _DIVERGING, "vmin": -max(-low, high), "vmax": max(-low, high)}
    return {"cmap": _SEQUENTIAL, "vmin": low, "vmax": high}
