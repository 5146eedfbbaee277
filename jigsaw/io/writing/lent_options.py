"""Options that a dataset lends to a store: coordinates, attributes, units of time, and names for channels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import WriteError
from jigsaw.geometry.neighbors import Neighbors
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.chunks.files import holds_place_read
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.pairs import PairedDataset
from jigsaw.io.series.cell_grid import renumbered_cells
from jigsaw.io.series.coords import CELL_ROLE, decoded_coordinate
from jigsaw.io.series.fields import FieldChannel
from jigsaw.io.series.store_survey import StoreSurvey, StoreVariable
from jigsaw.io.writing.cf import REFERENCE_ATTRIBUTES, StoredCoordinate
from jigsaw.io.writing.outline import CHANNEL_DIM, LEVEL_DIM, WriteOptions, WrittenField

# attributes of storage, and the one that describes cells, which the new store writes itself
_STORAGE_ATTRIBUTES = "scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "coordinates", "dggs"
_PACKED_LIMITS = "valid_min", "valid_max", "valid_range"  # in the numbers that are stored, packed or not
_WRITER_PREFIX = "jigsaw_"


def dataset_of_targets(dataset: Dataset) -> Dataset:
    """Return the dataset whose target channels and grid are written: a pair's target is its partner's whole input."""
    if not isinstance(dataset, PairedDataset):
        return dataset
    return dataset.partner.changed(target_channels=dataset.partner.input_channels)


def check_not_replaced(path: Path, dataset: Dataset) -> None:
    """Raise `WriteError` where mode='w' would remove what the dataset, or its partner, reads."""
    stores = [dataset.store, *([dataset.partner.store] if isinstance(dataset, PairedDataset) else [])]
    if any(holds_place_read(path, store.places) for store in stores):
        raise WriteError(f"{path} is what the dataset of like= reads, so mode='w' does not replace it; write elsewhere")


def options_like_dataset(options: WriteOptions, dataset: Dataset) -> WriteOptions:
    """Return the options with what a dataset lends: coordinates, attributes, and names for the channels of one tile.

    What is given stays. A spatial dim is found by its canonical name, or by the store's own. An attribute is left out
    where it names a variable (bounds, a grid mapping) that is neither written as a field nor among the coordinates.
    """
    variables, survey = dataset.variables, StoreSurvey(dataset.store)
    dims: Sequence[str] = () if isinstance(options.dims, Mapping) else options.dims
    own = dict(zip(variables[0].table.dims, variables[0].roles, strict=True))
    by_name = {v.table.name: v for v in variables}
    fields = options.fields
    if fields is None:
        fields = [_written_field(survey, by_name, dataset.channels[c]) for c in dataset.target_channels]
    cells = () if dataset.cells is None else dataset.cells.variables
    plane = _lent_of_plane(dataset, survey, dims or tuple(dataset.whole_coords))
    written = {*options.coords, *(f.array for f in fields), *cells, *plane}

    def attrs_along(variable: StoreVariable, role: str) -> Mapping[str, Any]:
        return _attrs_that_hold(survey.attrs(variable, role), written)

    dggs = survey.coords.dggs(variables[0].table)
    lent: dict[str, Any] = {name: (d, v, _attrs_that_hold(attrs, written)) for name, (d, v, attrs) in plane.items()}
    lent_sizes: dict[str, int] = {}
    restores: tuple[str, Neighbors] | None = None
    for dim in dims or dataset.whole_coords:
        role = dim if dim in dataset.whole_coords else own.get(dim, dim)
        if role in dataset.whole_coords and role not in dataset.counted:
            lent[dim] = dataset.whole_coords[role], attrs_along(variables[0], role)
        if role == CELL_ROLE:
            stored = variables[0].dim(CELL_ROLE)
            rows = slice(None) if dataset.turn.cells is None else dataset.turn.cells.rows
            lent |= {name: _lent_of_cells(dataset.store, name, (stored, dim), rows, written) for name in cells}
            if dim not in lent and dataset.cells is not None and dataset.cells.numbers is not None:
                lent[dim] = dataset.cells.numbers, {"standard_name": "healpix_index"}  # some cells of the sphere
            if dggs:  # the numbers of cells have a name of their own
                lent.pop(dim, None)
                dggs = {**dggs, "spatial_dimension": dim}
            places = dataset.cells.source_places if dataset.cells is not None else None
            if places is not None:
                restores = dim, Neighbors(np.argsort(places)[:, None])
                stored_places = places if isinstance(rows, slice) else places[np.argsort(rows)]
                lent |= _renumbered_tables(lent, survey.coords.tables_of_cells(variables[0].table), stored_places)
            tables = map(dataset.store.arrays.__getitem__, cells)
            lent_sizes = {d: n for t in tables for d, n in zip(t.dims, t.shape, strict=True) if d != stored}
    leveled = next((v for v in variables if LEVEL_DIM in v.roles), None)
    used = {f.level for f in fields} - {None}
    if leveled is not None and used and CHANNEL_DIM in dims:
        values = survey.values(leveled, LEVEL_DIM)
        lent[LEVEL_DIM] = values[[float(v) in used for v in values]], attrs_along(leveled, LEVEL_DIM)
    timed = next((v for v in variables if "time" in v.roles), None)
    lent_units: dict[str, StoredCoordinate] = {}  # of time only units and calendar, because its values are new
    if timed is not None and survey.states(timed, "time"):
        time_values = survey.values(timed, "time"), attrs_along(timed, "time")
        lent_units["time"] = StoredCoordinate("time", ("time",), *time_values)
    own_attrs = {k: v for k, v in dataset.store.attrs.items() if not k.startswith(_WRITER_PREFIX)}
    field_attrs = {name: _attrs_that_hold(v.table.attrs, written) for name, v in by_name.items()}
    return replace(
        options,
        fields=fields if CHANNEL_DIM in dims else options.fields,
        coords={**lent, **options.coords},
        attrs={**own_attrs, **({"dggs": dict(dggs)} if dggs else {}), **options.attrs},
        field_attrs={**field_attrs, **options.field_attrs},
        lent_units=lent_units,
        lent_sizes=lent_sizes,
        restores=restores,
    )


def _lent_of_plane(
    dataset: Dataset, survey: StoreSurvey, dims: Sequence[str]
) -> dict[str, tuple[tuple[str, ...], NDArray[Any], Mapping[str, Any]]]:
    """Return the latitudes and longitudes of a curvilinear grid, and its grid mapping, each with dims and attributes.

    `dims` are those that are written, by the names of roles or of the store.
    """
    variable = dataset.variables[0]
    role_of = dict(zip(variable.table.dims, variable.roles, strict=True))
    named_dims = {d if d in dataset.whole_coords else role_of.get(d, d): d for d in dims}
    along, angles = survey.coords.plane(variable.table)
    roles = [role_of[d] for d in along]
    if not angles or not set(roles) <= set(named_dims) & set(dataset.whole_coords):
        return {}
    starts = [(dataset.turn.rolled.get(role, 0), len(dataset.whole_coords[role])) for role in roles]
    part = tuple(slice(first, first + count) for first, count in starts)
    lent: dict[str, tuple[tuple[str, ...], NDArray[Any], Mapping[str, Any]]] = {}
    for name in angles.values():
        table = dataset.store.arrays[name]
        values = decoded_coordinate(table, dataset.store.read_small(name))[part]
        lent[name] = tuple(named_dims[role] for role in roles), values, table.attrs
    if (mapping := survey.coords.grid_mapping(variable.table)) is not None:
        lent[mapping.name] = (), np.asarray(dataset.store.read_small(mapping.name)), mapping.attrs
    return lent


def _renumbered_tables(lent: Mapping[str, Any], tables: Mapping[str, int], places: NDArray[np.int64]) -> dict[str, Any]:
    """Return the tables among what is lent, with the places of cells in the source."""
    stored = {name: (*lent[name], start) for name, start in tables.items() if name in lent}
    return {name: (dims, renumbered_cells(v, start, places), attrs) for name, (dims, v, attrs, start) in stored.items()}


def _lent_of_cells(
    store: ArrayStore, name: str, cells: tuple[str, str], rows: Any, written: Collection[str]
) -> tuple[Any, Any, Any]:
    """Return a place of each cell, a table of a mesh, or the grid mapping, as a coordinate.

    `cells` are the stored and the new name of their dim, of which `rows` are taken.
    """
    table, values = store.arrays[name], store.read_small(name)
    attrs = _attrs_that_hold(table.attrs, written)
    if len(table.dims) < 2:
        values = decoded_coordinate(table, values)
    elif "_FillValue" in table.attrs:  # a table stays one of integers
        attrs["_FillValue"] = table.attrs["_FillValue"]
    if cells[0] in table.dims:
        values = values[tuple(rows if d == cells[0] else slice(None) for d in table.dims)]
    return tuple(cells[1] if d == cells[0] else d for d in table.dims), values, attrs


def _written_field(survey: StoreSurvey, by_name: Mapping[str, StoreVariable], channel: FieldChannel) -> WrittenField:
    """Return an array, and a level of it; a named channel is an array by that name."""
    if channel.own_name or channel.level is None:
        return WrittenField(channel.own_name or channel.array, None)
    return WrittenField(channel.array, float(survey.values(by_name[channel.array], LEVEL_DIM)[channel.level]))


def _attrs_that_hold(attrs: Mapping[str, Any], written: Collection[str]) -> dict[str, Any]:
    def refers(reference: str) -> set[str]:  # ``crs``, or ``area: cell_area``
        return {word for word in reference.split() if not word.endswith(":")}

    is_packed = "scale_factor" in attrs or "add_offset" in attrs
    left_out = (*_STORAGE_ATTRIBUTES, *(_PACKED_LIMITS if is_packed else ()))
    kept = {k: v for k, v in attrs.items() if k not in left_out}
    return {k: v for k, v in kept.items() if k not in REFERENCE_ATTRIBUTES or refers(str(v)) <= set(written)}
