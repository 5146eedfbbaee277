"""Needs of the poles: rows up to them, longitudes all round, and vectors that change sign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError
from jigsaw.io import arguments
from jigsaw.io.series.boundary import DimBoundary
from jigsaw.io.series.fields import SHORT_NAMES, FieldChannel, quantity_and_level

_TURNING_NAMES = ("u10", "v10", "u100", "v100", "u", "v")
_TURNING_STANDARD_NAMES = ("eastward", "northward", "x_wind", "y_wind")
_AT_POLE_SHARE = 0.05  # of a step: a first row that near to the pole is the pole


def pole_boundary(values: NDArray[Any], columns: int, halo: tuple[int, int], circle: int) -> DimBoundary:
    """Return the rule ``pole`` for latitudes `values`. Ends that have a halo must be at a pole, or less than a step
    from it.
    """
    if columns % 2:
        raise GridError(
            f"boundary={{'lat': 'pole'}} goes on half-way round the globe, which needs an even number of columns, but "
            f"'lon' has {columns}; use 'replicate', or leave the boundary out"
        )
    lat = values.astype(np.float64)
    step = [abs(float(b - a)) for a, b in (lat[:2], lat[-2:])] if len(lat) > 1 else [0.0, 0.0]
    apart = [90.0 - abs(float(lat[0])), 90.0 - abs(float(lat[-1]))]
    for end, width, distance, size in zip((lat[0], lat[-1]), halo, apart, step, strict=True):
        if width and not -_AT_POLE_SHARE * size <= distance < (1 - _AT_POLE_SHARE) * size:
            raise GridError(
                f"boundary={{'lat': 'pole'}} needs rows up to the pole, but 'lat' runs from {lat[0]:g} to {lat[-1]:g} "
                f"in steps of {size:g}, and {end:g} is {distance:g} degrees from a pole; use 'replicate', or leave the "
                "boundary out"
            )
    first, last = (abs(distance) <= _AT_POLE_SHARE * size for distance, size in zip(apart, step, strict=True))
    return DimBoundary("pole", at_pole=(first, last), circle=circle)


def vector_channels(
    channels: Sequence[FieldChannel], given: Sequence[str] | None, attrs: Mapping[str, Mapping[str, Any]]
) -> tuple[int, ...]:
    """Return the channels that change sign across a pole.

    They are those of the fields or arrays `given`. Without it they are the components of wind, by name or by a CF
    standard name that says eastward or northward. `attrs` are those of each array.
    """
    names = [{c.name, c.field, c.array, c.array.rpartition("/")[2], c.name.partition("@")[0]} for c in channels]
    if given is None:
        known = {name for name, short in SHORT_NAMES.items() if short in _TURNING_NAMES}
        said = [str(attrs.get(c.array, {}).get("standard_name", "")) for c in channels]
        return tuple(
            i
            for i, (mine, standard) in enumerate(zip(names, said, strict=True))
            if mine & known
            or quantity_and_level(channels[i].name)[0] in _TURNING_NAMES
            or any(word in standard for word in _TURNING_STANDARD_NAMES)
        )
    wanted = arguments.checked_names("vectors", given)
    unknown = [name for name in wanted if not any(name in mine for mine in names)]
    if unknown:
        raise FieldError(f"vectors names {unknown[0]!r}, but the fields are {[c.name for c in channels]}")
    return tuple(i for i, mine in enumerate(names) if mine & set(wanted))
