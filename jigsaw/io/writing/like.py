"""What a dataset that was read lends to a store that is written: coordinates, attributes, names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jigsaw.io.survey import Survey, Variable
from jigsaw.io.writing.cf import REFERENCES, Coordinate
from jigsaw.io.writing.outline import CHANNEL, LEVEL, Field

if TYPE_CHECKING:
    from jigsaw.io.dataset import Dataset

# how the values were stored, and what belongs to the old store alone
_OF_STORAGE = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "coordinates")
_OF_WRITER = "jigsaw_"


@dataclass(frozen=True)
class Lent:
    """Coordinates, attributes, and what each channel becomes; of `time` only how it is stored, the user gives when."""

    coords: Mapping[str, Any]
    attrs: Mapping[str, Any]
    field_attrs: Mapping[str, Mapping[str, Any]]
    fields: list[Field]
    time: Coordinate | None


def lent(
    dataset: Dataset,
    dims: Sequence[str] | None,
    fields: Sequence[Field] | None = None,
    given: Collection[str] = (),
) -> Lent:
    """What of a dataset belongs to tiles with these dims and `fields`, by default those of its target.

    A spatial dim is found by its canonical name, or by the store's own.  Attributes that name what is written neither
    as a field nor among the coordinates `given` (bounds, a grid mapping) are left out.
    """
    store, variables, survey = dataset.store, dataset.variables, Survey(dataset.store)
    own = dict(zip(variables[0].table.dims, variables[0].roles, strict=True))
    found: dict[str, Any] = {}
    fields = _fields(dataset, survey) if fields is None else fields
    written = {*given, *(f.array for f in fields)}
    for dim in dims or dataset.whole_coords:
        role = dim if dim in dataset.whole_coords else own.get(dim, dim)
        if role in dataset.whole_coords and role not in dataset.counted:
            found[dim] = dataset.whole_coords[role], _of(survey, variables[0], role, written)
    leveled = next((v for v in variables if LEVEL in v.roles), None)
    used = {f.level for f in fields} - {None}
    if leveled is not None and used and CHANNEL in (dims or ()):
        values = survey.values(leveled, LEVEL)
        found[LEVEL] = values[[float(v) in used for v in values]], _of(survey, leveled, LEVEL, written)
    timed = next((v for v in variables if "time" in v.roles), None)
    return Lent(
        coords=found,
        attrs={k: v for k, v in store.attrs.items() if not k.startswith(_OF_WRITER)},
        field_attrs={v.table.name: _kept(v.table.attrs, written) for v in variables},
        fields=list(fields),
        time=None if timed is None or not survey.states(timed, "time") else _time(survey, timed, written),
    )


def _fields(dataset: Dataset, survey: Survey) -> list[Field]:
    """What each channel of the target is in the store."""
    by_name = {v.table.name: v for v in dataset.variables}
    channels = [dataset.channels[c] for c in dataset.target_channels]
    return [Field(c.array, _level(survey, by_name[c.array], c.level)) for c in channels]


def _of(survey: Survey, variable: Variable, role: str, written: Collection[str]) -> Mapping[str, Any]:
    """The attributes of a coordinate, whatever the store calls its dim."""
    return _kept(survey.attrs(variable, role), written)


def _kept(attrs: Mapping[str, Any], written: Collection[str]) -> dict[str, Any]:
    """The attributes that still hold beside the variables that are `written`."""
    return {
        k: v
        for k, v in attrs.items()
        if k not in _OF_STORAGE and (k not in REFERENCES or _named(str(v)) <= set(written))
    }


def _named(reference: str) -> set[str]:
    """The variables in ``crs``, or in ``area: cell_area``."""
    return {word for word in reference.split() if not word.endswith(":")}


def _time(survey: Survey, variable: Variable, written: Collection[str]) -> Coordinate:
    return Coordinate("time", ("time",), survey.values(variable, "time"), _of(survey, variable, "time", written))


def _level(survey: Survey, variable: Variable, level: int | None) -> float | None:
    return None if level is None else float(survey.values(variable, LEVEL)[level])
