"""What a dataset that was read lends to a store that is written: coordinates, attributes, names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.series.store_survey import StoreSurvey, StoreVariable
from jigsaw.io.writing.cf import REFERENCE_ATTRIBUTES, StoredCoordinate
from jigsaw.io.writing.outline import CHANNEL_DIM, LEVEL_DIM, WrittenField

# how the values were stored, and what belongs to the old store alone
_STORAGE_ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "coordinates")
_WRITER_PREFIX = "jigsaw_"


@dataclass(frozen=True)
class LentMetadata:
    """Coordinates, attributes, and what each channel becomes; of `time` only how it is stored, the user gives when."""

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
    """What of a dataset belongs to tiles with these dims and `fields`, by default those of its target.

    A spatial dim is found by its canonical name, or by the store's own.  Attributes that name what is written neither
    as a field nor among the coordinates `given` (bounds, a grid mapping) are left out.
    """
    store, variables, survey = dataset.store, dataset.variables, StoreSurvey(dataset.store)
    own = dict(zip(variables[0].table.dims, variables[0].roles, strict=True))
    found: dict[str, Any] = {}
    fields = _target_fields(dataset, survey) if fields is None else fields
    written = {*given, *(f.array for f in fields)}
    for dim in dims or dataset.whole_coords:
        role = dim if dim in dataset.whole_coords else own.get(dim, dim)
        if role in dataset.whole_coords and role not in dataset.counted:
            found[dim] = dataset.whole_coords[role], _attrs_of_coordinate(survey, variables[0], role, written)
    leveled = next((v for v in variables if LEVEL_DIM in v.roles), None)
    used = {f.level for f in fields} - {None}
    if leveled is not None and used and CHANNEL_DIM in (dims or ()):
        values = survey.values(leveled, LEVEL_DIM)
        found[LEVEL_DIM] = (
            values[[float(v) in used for v in values]],
            _attrs_of_coordinate(survey, leveled, LEVEL_DIM, written),
        )
    timed = next((v for v in variables if "time" in v.roles), None)
    return LentMetadata(
        coords=found,
        attrs={k: v for k, v in store.attrs.items() if not k.startswith(_WRITER_PREFIX)},
        field_attrs={v.table.name: _attrs_that_hold(v.table.attrs, written) for v in variables},
        fields=list(fields),
        time=None if timed is None or not survey.states(timed, "time") else _stored_time(survey, timed, written),
    )


def _target_fields(dataset: Dataset, survey: StoreSurvey) -> list[WrittenField]:
    """What each channel of the target is in the store."""
    by_name = {v.table.name: v for v in dataset.variables}
    channels = [dataset.channels[c] for c in dataset.target_channels]
    return [WrittenField(c.array, _level_of_channel(survey, by_name[c.array], c.level)) for c in channels]


def _attrs_of_coordinate(
    survey: StoreSurvey, variable: StoreVariable, role: str, written: Collection[str]
) -> Mapping[str, Any]:
    """The attributes of a coordinate, whatever the store calls its dim."""
    return _attrs_that_hold(survey.attrs(variable, role), written)


def _attrs_that_hold(attrs: Mapping[str, Any], written: Collection[str]) -> dict[str, Any]:
    """The attributes that still hold beside the variables that are `written`."""
    return {
        k: v
        for k, v in attrs.items()
        if k not in _STORAGE_ATTRIBUTES
        and (k not in REFERENCE_ATTRIBUTES or _referred_variables(str(v)) <= set(written))
    }


def _referred_variables(reference: str) -> set[str]:
    """The variables in ``crs``, or in ``area: cell_area``."""
    return {word for word in reference.split() if not word.endswith(":")}


def _stored_time(survey: StoreSurvey, variable: StoreVariable, written: Collection[str]) -> StoredCoordinate:
    return StoredCoordinate(
        "time", ("time",), survey.values(variable, "time"), _attrs_of_coordinate(survey, variable, "time", written)
    )


def _level_of_channel(survey: StoreSurvey, variable: StoreVariable, level: int | None) -> float | None:
    return None if level is None else float(survey.values(variable, LEVEL_DIM)[level])
