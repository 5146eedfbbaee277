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


def lent(dataset: Dataset, dims: Sequence[str] | None, given: Collection[str] = ()) -> Lent:
    """What of a dataset belongs to tiles with these dims, written beside the coordinates `given`; a dim is found by its
    canonical name.  Attributes that name what is not written (bounds, a grid mapping) are left out.
    """
    store, variables, survey = dataset.store, dataset.variables, Survey(dataset.store)
    found: dict[str, Any] = {}
    written = {*given, *(v.table.name for v in variables)}
    for dim in dims or dataset.whole_coords:
        if dim in dataset.whole_coords:
            found[dim] = dataset.whole_coords[dim], _of(survey, variables[0], dim, written)
    leveled = next((v for v in variables if LEVEL in v.roles), None)
    by_name = {v.table.name: v for v in variables}
    fields = [Field(c.array, _level(survey, by_name[c.array], c.level)) for c in dataset.channels]
    if leveled is not None and CHANNEL in (dims or ()):
        values = survey.values(leveled, LEVEL)
        used = {f.level for f in fields}
        found[LEVEL] = values[[float(v) in used for v in values]], _of(survey, leveled, LEVEL, written)
    timed = next((v for v in variables if "time" in v.roles), None)
    return Lent(
        coords=found,
        attrs={k: v for k, v in store.attrs.items() if not k.startswith(_OF_WRITER)},
        field_attrs={v.table.name: _kept(v.table.attrs, written) for v in variables},
        fields=fields,
        time=None if timed is None else _time(survey, timed, written),
    )


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
