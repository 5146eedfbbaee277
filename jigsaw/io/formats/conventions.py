"""Conventions beyond the format of a file, anemoi-datasets, makani and OME-Zarr, as named dims and coordinates.

anemoi-datasets: ``data[time, variable, ensemble, cell]`` becomes variables on lat and lon. The cells of a regular grid
are its rows of latitude, one after the other. A chunk of whole rows therefore has the same bytes on both grids, and is
read like any other. For a chunk that ends within a row, zarr reads the cells of a box.

makani: one array ``fields[time, channel, lat, lon]`` a year, in HDF5 or Zarr. Its tools record little about dims: in
HDF5 the scales that they attach, in Zarr nothing. Known are the positions of the dims, the seconds since 1970 as
`timestamp` (or `time`), and `channel`, `lat` and `lon` where they exist.

OME-Zarr images: one level of a multiscales group as an array with named dims, coordinates, spacing and affine. The
metadata are those of OME-NGFF 0.4 (attributes of the group) and 0.5 (under ``ome``):
https://ngff.openmicroscopy.org/0.5/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, MissingLevelError, UnsupportedStoreError
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.formats.array_source import FilelessPlaces, table_of_values, wrap_places
from jigsaw.io.series.times import is_whole_number

_DATA_DIMS = ("time", "variable", "ensemble", "cell")
_CELL_COORDINATES = {"latitudes": {"units": "degrees_north"}, "longitudes": {"units": "degrees_east"}}
_DEGREES_APART = 1e-4
MAKANI_FIELDS = "fields"
MAKANI_DIMS = ("time", "channel", "lat", "lon")
_MAKANI_COORDINATES: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("timestamp", "time"), {"units": "seconds since 1970-01-01"}),
    (("channel",), {}),
    (("lat", "latitude"), {"units": "degrees_north"}),
    (("lon", "longitude"), {"units": "degrees_east"}),
)
"""The names that the coordinate of each dim may have, and the units that it has."""
_TRANSFORM_KINDS = ("scale", "translation", "identity")
_METER_PREFIXES = {"pico": 1e-12, "nano": 1e-9, "micro": 1e-6, "milli": 1e-3, "centi": 1e-2, "": 1.0, "kilo": 1e3}
METERS_BY_UNIT = {"angstrom": 1e-10, "inch": 0.0254} | {f"{p}meter": size for p, size in _METER_PREFIXES.items()}


_LONG_UNITS = {"m": "meter", "mm": "millimeter", "um": "micrometer"}


def space_unit(attrs: Mapping[str, Any]) -> str:
    """Return the unit of an array's affine, as OME-NGFF names it; "" where the array does not say one."""
    unit = str(attrs.get("space_units") or "")
    return _LONG_UNITS.get(unit, unit)


def unit_ratio(unit: str, other: str) -> float:
    """Return how many of the `other` units one `unit` is; 1 where one of them is not known."""
    return METERS_BY_UNIT.get(unit, 1) / METERS_BY_UNIT.get(other, 1) if {unit, other} <= set(METERS_BY_UNIT) else 1


def is_anemoi_store(store: ArrayStore) -> bool:
    """Say whether a store has the layout of anemoi-datasets."""
    data, cells = store.arrays.get("data"), [store.arrays.get(name) for name in _CELL_COORDINATES]
    return data is not None and len(data.dims) == 4 and all(cells) and isinstance(store.attrs.get("variables"), list)


def anemoi_as_fields(store: ArrayStore) -> ArrayStore:
    """Return the store with a channel for each of its variables and `data` on lat and lon. On other than regular grids
    its cells stay, each with its own latitude and longitude.

    Raises: `GridError` where a description of `data` is not as long as its dims.
    """
    data = replace(store.arrays["data"], dims=_DATA_DIMS)
    values = {name: store.read_small(name) for name in ("dates", *_CELL_COORDINATES) if name in store.arrays}
    values["variable"] = np.array([str(name) for name in store.attrs["variables"]])
    for name, array in values.items():
        d = {"dates": 0, "variable": 1}.get(name, 3)
        if array.shape != (data.shape[d],):
            raise GridError(
                f"{store.url}: 'data' has {data.shape[d]} rows along {_DATA_DIMS[d]!r}, and its {name} have the shape "
                f"{array.shape}; write both equally long"
            )
    coords: dict[str, tuple[str, NDArray[Any], Mapping[str, Any]]] = {"variable": ("variable", values["variable"], {})}
    if "dates" in values:
        missing = {"missing_dates": [str(date) for date in store.attrs.get("missing_dates", ())]}
        coords["time"] = "time", values["dates"], missing
    rows = _rows_of_cells(values["latitudes"], values["longitudes"])
    for name, attrs in _CELL_COORDINATES.items():
        if rows is None:
            coords[name] = "cell", values[name], attrs
        else:
            dim, grid = name[:3], values[name].reshape(rows, -1)
            coords[dim] = dim, grid[:, 0] if dim == "lat" else grid[0], attrs
    tables = {
        **{name: table for name, table in store.arrays.items() if name not in _CELL_COORDINATES},
        "data": data if rows is None else _on_rows(data, rows, store.url),
        **{name: table_of_values(name, held, (dim,), own, store.url) for name, (dim, held, own) in coords.items()},
    }

    def read_small(name: str) -> NDArray[Any]:
        return coords[name][1] if name in coords else store.read_small(name)

    return ArrayStore(store.url, tables, store.attrs, read_small, store.notes, store.files)


def _rows_of_cells(latitudes: NDArray[Any], longitudes: NDArray[Any]) -> int | None:
    """Return the number of rows of latitude that the cells form; None where they are not a regular grid."""
    other = np.flatnonzero(np.abs(latitudes - latitudes[0]) > _DEGREES_APART) if latitudes.size else []
    columns = int(other[0]) if len(other) else latitudes.size
    if columns < 2 or latitudes.size % columns:
        return None
    lat, lon = latitudes.reshape(-1, columns), longitudes.reshape(-1, columns)
    near = [np.abs(lat - lat[:, :1]).max(), np.abs(lon - lon[:1]).max()]
    return len(lat) if max(near) <= _DEGREES_APART else None


def _on_rows(data: ArrayTable, rows: int, url: str) -> ArrayTable:
    columns = data.shape[3] // rows
    shape, dims = (*data.shape[:3], rows, columns), (*_DATA_DIMS[:3], "lat", "lon")
    decoder, places = data.decoder, data.places
    even = not data.lengths and data.chunks[3] % columns == 0
    if even and isinstance(decoder, CodecDecoder) and decoder.order == (0, 1, 2, 3):
        return replace(
            data,
            shape=shape,
            dims=dims,
            chunks=(*data.chunks[:3], data.chunks[3] // columns, columns),
            decoder=replace(decoder, order=(0, 1, 2, 3, 4)),
            places=wrap_places(places, dims=4),
        )

    def load_rows(box: Box) -> NDArray[Any]:
        *lead, (first, stop), (west, east) = box
        cells = data.load_slowly((*lead, (first * columns, stop * columns)))
        return cells.reshape(*cells.shape[:3], stop - first, columns)[..., west:east]

    return replace(
        data,
        shape=shape,
        dims=dims,
        dtype=np.dtype(data.dtype).newbyteorder("=").str,
        chunks=(*data.chunks[:3], rows, columns),
        decoder=None,
        places=FilelessPlaces(f"{url}, array 'data'"),
        load_slowly=load_rows,
        lengths={},
        slices=True,
    )


def is_makani_array(name: str, scales: Sequence[str | None]) -> bool:
    """Say whether an array is makani's `fields`; `scales` has None for dims without a name."""
    if name.rpartition("/")[2] != MAKANI_FIELDS or len(scales) != len(MAKANI_DIMS):
        return False
    return all(scale in (None, dim, "timestamp") for scale, dim in zip(scales, MAKANI_DIMS, strict=True))


def describe_makani_fields(tables: dict[str, ArrayTable], url: str) -> None:
    """Set the dims and units of the coordinates of every `fields`, which makani leaves out.

    Raises: `GridError` where one is of another length than its dim.
    """
    for name, fields in list(tables.items()):
        group, slash, own = name.rpartition("/")
        if own != MAKANI_FIELDS or fields.dims != MAKANI_DIMS:
            continue
        for dim, size, (names, attrs) in zip(MAKANI_DIMS, fields.shape, _MAKANI_COORDINATES, strict=True):
            along = next((tables[group + slash + n] for n in names if group + slash + n in tables), None)
            if along is None:
                continue
            if along.shape != (size,):
                raise GridError(
                    f"{url}: {name!r} has {size} rows along {dim!r}, and {along.name!r} has the shape {along.shape}; "
                    "write both equally long"
                )
            tables[along.name] = replace(along, dims=(dim,), attrs={**attrs, **along.attrs})


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
        raise UnsupportedStoreError(f"{store.url}: the multiscales metadata name {path!r}, which is not an array of it")
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
    entries = within.get("multiscales", ()) if isinstance(within, Mapping) else ()
    return entries if isinstance(entries, Sequence) and all(isinstance(m, Mapping) for m in entries) else ()


def _listed_metadata(store: ArrayStore, image: Mapping[str, Any], key: str) -> Sequence[Any]:
    listed = image.get(key)
    if not isinstance(listed, Sequence) or not listed:
        raise UnsupportedStoreError(
            f"{store.url}: its multiscales metadata lack {key!r}; OME-NGFF 0.4 and 0.5 are read"
        )
    return listed


def _index_to_world(
    store: ArrayStore, steps: Sequence[Mapping[str, Any]], ndim: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scale and shift, in world = index * scale + shift, of the level's transformations, then the image's."""
    scale, shift = np.ones(ndim), np.zeros(ndim)
    for step in steps:
        kind = step.get("type")
        try:
            values = np.asarray(step.get(str(kind), []) if kind != "identity" else np.ones(ndim), np.float64)
        except (TypeError, ValueError):  # the entries are not numbers
            values = np.empty(0)
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


def _world_unit(store: ArrayStore, axes: Sequence[_OmeAxis]) -> str:
    """Return the unit of the world, "" where no axis of space has one."""
    units = [axis.unit for axis in axes if axis.is_space and axis.unit]
    unknown = sorted(set(units) - set(METERS_BY_UNIT))
    if len(set(units)) > 1 and unknown:
        raise UnsupportedStoreError(
            f"{store.url}: the axes of space have the units {units}, and {unknown} cannot be brought to the same; "
            f"give all axes one unit, or those of {', '.join(METERS_BY_UNIT)}"
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
        factor = 1.0 if axis.unit in ("", unit) else METERS_BY_UNIT[axis.unit] / METERS_BY_UNIT[unit]
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
