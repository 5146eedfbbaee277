"""Maps of one field of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.opening import open
from jigsaw.io.reports.plan_picture import save_figure, tick_text
from jigsaw.ranks.mesh import init_mesh

if TYPE_CHECKING:
    import xarray as xr

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
        raise IndexError(f"step {step} of {name!r}, which has {len(dataset)}")
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
    _draw_values(_labelled_values(values, dataset), title, path, not dataset.counted)
    return title


def _labelled_values(values: Any, dataset: Dataset) -> xr.DataArray:
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
