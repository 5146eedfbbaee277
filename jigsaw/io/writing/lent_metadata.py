"""``like=``: the coordinates, attributes and names that a store takes over from a dataset that was read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.series.fields import FieldChannel
from jigsaw.io.series.store_survey import StoreSurvey, StoreVariable
from jigsaw.io.writing.cf import REFERENCE_ATTRIBUTES, StoredCoordinate
from jigsaw.io.writing.outline import CHANNEL_DIM, LEVEL_DIM, WrittenField

# how the values were stored, and what belongs to the old store alone
_STORAGE_ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "coordinates")
_WRITER_PREFIX = "jigsaw_"


@dataclass(frozen=True)
class LentMetadata:
    """Coordinates, attributes, and the field of each channel; of `time` only units and calendar, because its values are
    new.
    """

    coords: Mapping[str, Any]
    attrs: Mapping[str, Any]
    field_attrs: Mapping[str, Mapping[str, Any]]
    fields: list[WrittenField]
    time: StoredCoordinate | None


def metadata_of_dataset(
    dataset: Dataset,
    dims: Sequence[str] | None,
    fields: Sequence[WrittenField] | None = None,
    given: Collection[str] = (),
) -> LentMetadata:
    """Return the metadata of a dataset for tiles with these dims and `fields`, by default those of its target.

    A spatial dim is found by its canonical name, or by the store's own. An attribute is left out where it names a
    variable (bounds, a grid mapping) that is neither written as a field nor among the coordinates `given`.
    """
    store, variables, survey = dataset.store, dataset.variables, StoreSurvey(dataset.store)
    own = dict(zip(variables[0].table.dims, variables[0].roles, strict=True))
    by_name = {v.table.name: v for v in variables}
    if fields is None:
        fields = [_written_field(survey, by_name, dataset.channels[c]) for c in dataset.target_channels]
    written = {*given, *(f.array for f in fields)}

    def attrs_along(variable: StoreVariable, role: str) -> Mapping[str, Any]:
        return _attrs_that_hold(survey.attrs(variable, role), written)

    found: dict[str, Any] = {}
    for dim in dims or dataset.whole_coords:
        role = dim if dim in dataset.whole_coords else own.get(dim, dim)
        if role in dataset.whole_coords and role not in dataset.counted:
            found[dim] = dataset.whole_coords[role], attrs_along(variables[0], role)
    leveled = next((v for v in variables if LEVEL_DIM in v.roles), None)
    used = {f.level for f in fields} - {None}
    if leveled is not None and used and CHANNEL_DIM in (dims or ()):
        values = survey.values(leveled, LEVEL_DIM)
        found[LEVEL_DIM] = values[[float(v) in used for v in values]], attrs_along(leveled, LEVEL_DIM)
    timed, time = next((v for v in variables if "time" in v.roles), None), None
    if timed is not None and survey.states(timed, "time"):
        time = StoredCoordinate("time", ("time",), survey.values(timed, "time"), attrs_along(timed, "time"))
    return LentMetadata(
        coords=found,
        attrs={k: v for k, v in store.attrs.items() if not k.startswith(_WRITER_PREFIX)},
        field_attrs={name: _attrs_that_hold(v.table.attrs, written) for name, v in by_name.items()},
        fields=list(fields),
        time=time,
    )


def _written_field(survey: StoreSurvey, by_name: Mapping[str, StoreVariable], channel: FieldChannel) -> WrittenField:
    """Return an array, and a level of it; a named channel is an array by that name."""
    if channel.own_name or channel.level is None:
        return WrittenField(channel.own_name or channel.array, None)
    return WrittenField(channel.array, float(survey.values(by_name[channel.array], LEVEL_DIM)[channel.level]))


def _attrs_that_hold(attrs: Mapping[str, Any], written: Collection[str]) -> dict[str, Any]:
    """Return the attributes that still hold beside the variables that are `written`."""

    def refers(reference: str) -> set[str]:  # ``crs``, or ``area: cell_area``
        return {word for word in reference.split() if not word.endswith(":")}

    kept = {k: v for k, v in attrs.items() if k not in _STORAGE_ATTRIBUTES}
    return {k: v for k, v in kept.items() if k not in REFERENCE_ATTRIBUTES or refers(str(v)) <= set(written)}
