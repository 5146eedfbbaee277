"""OME-Zarr images: one level of a multiscales group as an array with named dims, coordinates, spacing and affine.

The metadata are those of OME-NGFF 0.4 (attributes of the group) and 0.5 (under ``ome``):
https://ngff.openmicroscopy.org/0.5/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import MissingLevelError, UnsupportedStoreError
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.formats.in_memory import table_of_values
from jigsaw.io.series.times import is_whole_number

_TRANSFORM_KINDS = ("scale", "translation", "identity")
_METRE_PREFIXES = {"pico": 1e-12, "nano": 1e-9, "micro": 1e-6, "milli": 1e-3, "centi": 1e-2, "": 1.0, "kilo": 1e3}
_METRES_BY_UNIT = {"angstrom": 1e-10, "inch": 0.0254} | {f"{p}meter": size for p, size in _METRE_PREFIXES.items()}


def is_multiscale_group(attrs: Mapping[str, Any]) -> bool:
    """Say whether a group is an OME-Zarr image."""
    return bool(_multiscale_entries(attrs))


def multiscale_level(store: ArrayStore, level: int = 0) -> ArrayStore:
    """Return the store with one level alone: its array, whose dims are named by the axes, and coordinates along space.

    The array has the attributes ``affine`` (from (x, y, z, 1) to the world's (x, y, z), 4 x 4) and ``space_units``;
    axes whose units differ are converted to that of the last one. Metadata that break the specification are refused.
    """
    images = _multiscale_entries(store.attrs)
    if not images:
        raise UnsupportedStoreError(f"{store.url} has no multiscales metadata: level={level} picks one of OME-Zarr's")
    image = images[0]
    levels = [str(entry["path"]) for entry in _listed_metadata(store, image, "datasets")]
    if not is_whole_number(level) or not 0 <= level < len(levels):
        raise MissingLevelError(
            f"level={level!r}: {store.url} has the levels 0..{len(levels) - 1} ({', '.join(levels)})"
        )
    path = levels[level]
    if path not in store.arrays:
        raise UnsupportedStoreError(f"{store.url}: the multiscales metadata name {path!r}, which is no array of it")
    axes = [_OmeAxis.of(store, entry) for entry in _listed_metadata(store, image, "axes")]
    table = store.arrays[path]
    if len(axes) != table.grid.ndim:
        raise UnsupportedStoreError(f"{store.url}: {len(axes)} axes for array {path!r} of {table.grid.ndim} dims")
    own = _listed_metadata(store, image["datasets"][level], "coordinateTransformations")
    steps = [*own, *(image.get("coordinateTransformations") or ())]
    scale, shift = _index_to_world(store, steps, len(axes))
    return _store_of_level(store, table, axes, scale, shift)


@dataclass(frozen=True)
class _OmeAxis:
    name: str
    kind: str
    unit: str

    @classmethod
    def of(cls, store: ArrayStore, entry: Any) -> _OmeAxis:
        if not isinstance(entry, Mapping) or "name" not in entry:
            raise UnsupportedStoreError(f"{store.url}: axis {entry!r} has no name; OME-NGFF 0.4 and 0.5 are read")
        name = str(entry["name"])
        return cls(name, str(entry.get("type", "space" if name in "zyx" else "")), str(entry.get("unit", "")))

    @property
    def is_space(self) -> bool:
        return self.kind == "space" and self.name in ("x", "y", "z")


def _multiscale_entries(attrs: Mapping[str, Any]) -> Sequence[Any]:
    within = attrs.get("ome", attrs)
    found = within.get("multiscales", ()) if isinstance(within, Mapping) else ()
    return found if isinstance(found, Sequence) and all(isinstance(m, Mapping) for m in found) else ()


def _listed_metadata(store: ArrayStore, image: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = image.get(key)
    if not isinstance(found, Sequence) or not found:
        raise UnsupportedStoreError(
            f"{store.url}: its multiscales metadata lack {key!r}; OME-NGFF 0.4 and 0.5 are read"
        )
    return found


def _index_to_world(
    store: ArrayStore, steps: Sequence[Mapping[str, Any]], ndim: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and shift, in world = index * scale + shift, of the level's transformations followed by
    the image's.
    """
    scale, shift = np.ones(ndim), np.zeros(ndim)
    for step in steps:
        kind = step.get("type")
        values = _numbers_or_none(step.get(str(kind)) if kind != "identity" else np.ones(ndim))
        if kind not in _TRANSFORM_KINDS or values.shape != (ndim,) or not np.isfinite(values).all():
            raise UnsupportedStoreError(
                f"{store.url}: coordinate transformation {dict(step)!r} is none of {', '.join(_TRANSFORM_KINDS)} "
                f"with {ndim} numbers"
            )
        if kind == "scale":
            scale, shift = scale * values, shift * values
        elif kind == "translation":
            shift = shift + values
    return scale, shift


def _numbers_or_none(given: Any) -> NDArray[np.float64]:
    """Return numbers as an array; empty for anything else."""
    try:
        return np.asarray([] if given is None else given, np.float64)
    except (TypeError, ValueError):
        return np.empty(0)


def _world_unit(store: ArrayStore, axes: Sequence[_OmeAxis]) -> str:
    """Return the unit of the world, "" where no axis of space has one."""
    units = [axis.unit for axis in axes if axis.is_space and axis.unit]
    unknown = sorted(set(units) - set(_METRES_BY_UNIT))
    if len(set(units)) > 1 and unknown:
        raise UnsupportedStoreError(
            f"{store.url}: the axes of space have the units {units}, and {unknown} cannot be brought to the same; "
            f"give all axes one unit, or those of {', '.join(_METRES_BY_UNIT)}"
        )
    return units[-1] if units else ""


def _store_of_level(
    store: ArrayStore,
    table: ArrayTable,
    axes: Sequence[_OmeAxis],
    scale: NDArray[np.float64],
    shift: NDArray[np.float64],
) -> ArrayStore:
    affine, unit = np.eye(4), _world_unit(store, axes)
    group = table.name.rpartition("/")[0]
    coordinates: dict[str, NDArray[np.float64]] = {}
    tables: dict[str, ArrayTable] = {}
    for d, axis in enumerate(axes):
        if not axis.is_space:
            continue
        row = "xyz".index(axis.name)
        factor = 1.0 if axis.unit in ("", unit) else _METRES_BY_UNIT[axis.unit] / _METRES_BY_UNIT[unit]
        affine[row, row], affine[row, 3] = step, start = scale[d] * factor, shift[d] * factor
        name = f"{group}/{axis.name}" if group else axis.name
        coordinates[name] = start + step * np.arange(table.shape[d])
        attrs = {"axis": axis.name.upper(), **({"units": unit} if unit else {})}
        tables[name] = table_of_values(name, coordinates[name], (axis.name,), attrs, "the multiscales metadata")
    attrs = {**table.attrs, "affine": affine.tolist(), "space_units": unit}
    image = replace(table, dims=tuple(axis.name for axis in axes), attrs=attrs)

    def read(name: str) -> NDArray[Any]:
        return coordinates[name] if name in coordinates else store.read_small(name)

    return ArrayStore(store.url, {table.name: image, **tables}, store.attrs, read)
