"""Layout of makani: one array ``fields[time, channel, lat, lon]`` a year, in HDF5 or Zarr.

Its tools record little about dims: in HDF5 the scales that they attach, in Zarr nothing. Known are the positions of the
dims, the seconds since 1970 as `timestamp` (or `time`), and `channel`, `lat` and `lon` where they exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jigsaw.errors import GridError
from jigsaw.io.chunks.array_table import ArrayTable

MAKANI_FIELDS = "fields"
MAKANI_DIMS = ("time", "channel", "lat", "lon")
_NAMES_OF_COORDINATES = (("timestamp", "time"), ("channel",), ("lat", "latitude"), ("lon", "longitude"))
_ATTRS_OF_COORDINATES = (
    {"units": "seconds since 1970-01-01"},
    {},
    {"units": "degrees_north"},
    {"units": "degrees_east"},
)


def is_makani_array(name: str, scales: Sequence[str | None]) -> bool:
    """Say whether an array is makani's `fields`; `scales` has None for dims without a name."""
    if name.rpartition("/")[2] != MAKANI_FIELDS or len(scales) != len(MAKANI_DIMS):
        return False
    return all(scale in (None, dim, "timestamp") for scale, dim in zip(scales, MAKANI_DIMS, strict=True))


def describe_makani_fields(tables: dict[str, ArrayTable], url: str) -> None:
    """Say of the coordinates of every `fields` what makani leaves unsaid: the dim that each lies along, and its units.

    Raises: `GridError` where one is of another length than its dim.
    """
    for name, fields in list(tables.items()):
        group, slash, own = name.rpartition("/")
        if own != MAKANI_FIELDS or fields.dims != MAKANI_DIMS:
            continue
        for dim, size, names, attrs in zip(
            MAKANI_DIMS, fields.shape, _NAMES_OF_COORDINATES, _ATTRS_OF_COORDINATES, strict=True
        ):
            said = next((tables[group + slash + n] for n in names if group + slash + n in tables), None)
            if said is None:
                continue
            if said.shape != (size,):
                raise GridError(
                    f"{url}: {name!r} has {size} rows along {dim!r}, and {said.name!r} has the shape {said.shape}; "
                    "write both equally long"
                )
            tables[said.name] = replace(said, dims=(dim,), attrs={**attrs, **said.attrs})
