"""Fields that a user asks for by name: variables and levels of a store, as channels.

A field is one of

- the store's own variable name: ``2m_temperature``; with a level dim it stands for all its levels, a channel each;
- a variable at one level: ``geopotential@500``, in the units of the store's level coordinate;
- an ECMWF short name: ``t2m``, ``u10``, ``msl``, or a pressure-level name and hPa: ``z500``, ``t850``;
- one channel of an array with a dim of channels that have names, as makani and anemoi-datasets store them: ``t2m``.

A short name finds the long names of WeatherBench2, ARCO-ERA5 and CDS, those of earth2studio's lexicon (``u10m``), and
the other way round (the tables below). The store's own name always wins. A surface name never stands for a pressure
level: ``u10`` is the wind at 10 m, and the wind at 10 hPa is ``u@10``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, MissingArrayError, MissingLevelError
from jigsaw.io.arguments import checked_names

# Each row is one quantity under all its names; the first is the short name of these pages.
SURFACE_NAMES = (
    ("t2m", "2t", "2m_temperature"),
    ("d2m", "2d", "2m_dewpoint_temperature"),
    ("r2m", "2r", "2m_relative_humidity"),
    ("q2m", "2sh", "2m_specific_humidity"),
    ("u10", "10u", "10m_u_component_of_wind", "u10m"),
    ("v10", "10v", "10m_v_component_of_wind", "v10m"),
    ("u100", "100u", "100m_u_component_of_wind", "u100m"),
    ("v100", "100v", "100m_v_component_of_wind", "v100m"),
    ("ws10", "10si", "10m_wind_speed", "ws10m"),
    ("fg10", "10fg", "10m_wind_gust_since_previous_post_processing", "fg10m"),
    ("msl", "mean_sea_level_pressure"),
    ("sp", "surface_pressure"),
    ("tp", "total_precipitation"),
    ("tp6h", "total_precipitation_6hr", "tp06"),
    ("tp12h", "total_precipitation_12hr", "tp12"),
    ("tp24h", "total_precipitation_24hr", "tp24"),
    ("cp", "convective_precipitation"),
    ("lsp", "large_scale_precipitation"),
    ("sf", "snowfall"),
    ("sd", "snow_depth"),
    ("tcc", "total_cloud_cover"),
    ("tcwv", "total_column_water_vapour"),
    ("tcw", "total_column_water"),
    ("tisr", "toa_incident_solar_radiation"),
    ("ssrd", "surface_solar_radiation_downwards"),
    ("strd", "surface_thermal_radiation_downwards"),
    ("ttr", "top_net_thermal_radiation"),
    ("sst", "sea_surface_temperature"),
    ("skt", "skin_temperature"),
    ("siconc", "ci", "sea_ice_cover"),
    ("swvl1", "volumetric_soil_water_layer_1"),
    ("swvl2", "volumetric_soil_water_layer_2"),
    ("stl1", "soil_temperature_level_1"),
    ("stl2", "soil_temperature_level_2"),
    ("sdor", "standard_deviation_of_orography"),
    ("slor", "slope_of_sub_gridscale_orography"),
    ("lsm", "land_sea_mask"),
    ("zs", "geopotential_at_surface"),
    ("blh", "boundary_layer_height"),
)
PRESSURE_NAMES = (
    ("z", "geopotential"),
    ("t", "temperature"),
    ("u", "u_component_of_wind"),
    ("v", "v_component_of_wind"),
    ("q", "specific_humidity"),
    ("r", "relative_humidity"),
    ("w", "vertical_velocity"),
    ("ws", "wind_speed"),
    ("d", "divergence"),
    ("vo", "vorticity"),
    ("pv", "potential_vorticity"),
    ("o3", "ozone_mass_mixing_ratio"),
    ("cc", "fraction_of_cloud_cover"),
    ("clwc", "specific_cloud_liquid_water_content"),
    ("ciwc", "specific_cloud_ice_water_content"),
)
_NAMES_OF_QUANTITY = {name: row for row in (*SURFACE_NAMES, *PRESSURE_NAMES) for name in row}
SHORT_NAMES = {name: row[0] for name, row in _NAMES_OF_QUANTITY.items()}
_NAMES_OF_TWO_MEANINGS = ("u100", "v100")
"""Winds at 100 m, except as channel names, which makani and earth2studio use for 100 hPa: no other name
matches those.
"""


@dataclass(frozen=True)
class LevelCoordinate:
    """The level coordinate of an array; where it is `counted` its values are the places 0, 1, 2…, and no pressures.

    Of a dim of channels they have `names`.
    """

    values: NDArray[np.float64]
    units: str = ""
    counted: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class FieldChannel:
    """Channel of a field: an array, and the position of a level in it (None where the array has no level dim).

    `own_name` is its name, by the store or the user, along a dim of channels. It is read so many steps `earlier`.
    """

    name: str
    field: str
    array: str
    level: int | None = None
    own_name: str = ""
    earlier: int = 0


def channels_of_fields(
    fields: Sequence[str], arrays: Mapping[str, LevelCoordinate | None], argument: str = "fields"
) -> tuple[FieldChannel, ...]:
    """Return the channels that `fields`, given as `argument`, name, in their order; `arrays` maps each variable to its
    levels, or to None. A missing field is refused with a list of those that exist, as is one that comes twice.
    """
    channels = tuple(
        channel for field in checked_names(argument, fields) for channel in _channels_of_one(field, arrays)
    )
    if not channels:
        raise FieldError(f"{argument}=[] names no variable; " + _available_text(arrays))
    field_by_channel: dict[tuple[str, int | None], str] = {}
    for channel in channels:
        key = channel.array, channel.level
        if key in field_by_channel:
            both = f"fields {field_by_channel[key]!r} and {channel.field!r} both"
            raise FieldError(f"{both} name a channel of array {channel.array!r}; name it once")
        field_by_channel[key] = channel.field
    return channels


def _channels_of_one(field: str, arrays: Mapping[str, LevelCoordinate | None]) -> list[FieldChannel]:
    if field in arrays:
        return _all_levels(field, field, arrays[field])
    named = _named_channel(field, arrays)
    if named is not None:
        return [named]
    name, at, level = field.partition("@")
    array = _array_named(name, arrays)
    if array is not None:
        return [_one_level(field, array, level, arrays[array])] if at else _all_levels(field, array, arrays[array])
    quantity, hpa = (None if at else quantity_at_pressure(field)) or ("", 0.0)
    array = _array_named(quantity, arrays) if quantity else None
    if array is None:
        raise MissingArrayError(_missing_text(field, name, arrays))
    levels = arrays[array]
    if levels is None:
        raise MissingLevelError(f"field {field!r} asks for {hpa:g} hPa of array {array!r}, which has no level dim")
    if levels.counted:
        raise MissingLevelError(
            f"field {field!r} asks for {hpa:g} hPa of array {array!r}, whose levels have no numbers in the store; "
            f"ask for a place, like {array}@0"
        )
    return [_nearest_level(field, array, hpa * 100 if levels.units.lower() == "pa" else hpa, levels)]


def _array_named(name: str, arrays: Mapping[str, LevelCoordinate | None]) -> str | None:
    """Return the store's variable for a quantity, under any of the quantity's names."""
    return next((n for n in (name, *_NAMES_OF_QUANTITY.get(name, ())) if n in arrays), None)


def _named_channel(field: str, arrays: Mapping[str, LevelCoordinate | None]) -> FieldChannel | None:
    """Return the channel of that name; else one that has the same quantity under another name."""
    named = [(array, i, name) for array, levels in arrays.items() if levels for i, name in enumerate(levels.names)]
    matches = [entry for entry in named if entry[2] == field] or [
        entry for entry in named if _is_same_channel(field, entry[2])
    ]
    if len(matches) > 1:
        raise FieldError(
            f"field {field!r} is the channels {[f'{array}@{i}' for array, i, _ in matches]} of the store; "
            "ask for one of these"
        )
    return FieldChannel(field, field, *matches[0]) if matches else None


def _is_same_channel(field: str, name: str) -> bool:
    """Say whether a channel's name stands for the quantity that a field names: ``z_500`` for ``geopotential@500``.

    Without a level a name like ``z`` is ambiguous: as a channel it is the height of the ground.
    """
    quantity, level = quantity_and_level(name)
    is_clear = level is not None or any(quantity == row[0] for row in SURFACE_NAMES)
    return is_clear and name not in _NAMES_OF_TWO_MEANINGS and quantity_and_level(field) == (quantity, level)


def quantity_and_level(name: str) -> tuple[str, float | None]:
    """Return short name and level of a channel: ("z", 500.0) for ``z500``, ``z_500``, ``geopotential@500``."""
    base, at, level = name.partition("@")
    if at:
        try:
            return SHORT_NAMES.get(base, base), float(level)
        except ValueError:
            return name, None
    if name in SHORT_NAMES:
        return SHORT_NAMES[name], None
    return quantity_at_pressure(name) or (name, None)


def quantity_at_pressure(name: str) -> tuple[str, float] | None:
    """Return ("z", 500.0) for ``z500`` and anemoi's ``z_500``; None for a name without a pressure."""
    if name in SHORT_NAMES:
        return None
    for short, *_ in PRESSURE_NAMES:
        pressure = name.removeprefix(short).removeprefix("_")
        if name.startswith(short) and pressure.isdecimal():
            return short, float(pressure)
    return None


def _all_levels(field: str, array: str, levels: LevelCoordinate | None) -> list[FieldChannel]:
    if levels is None:
        return [FieldChannel(field, field, array)]
    if levels.names:
        return [FieldChannel(name, field, array, i, name) for i, name in enumerate(levels.names)]
    return [FieldChannel(f"{field}@{value:g}", field, array, i) for i, value in enumerate(levels.values)]


def _one_level(field: str, array: str, level: str, levels: LevelCoordinate | None) -> FieldChannel:
    if levels is None:
        raise MissingLevelError(
            f"field {field!r} asks for a level of array {array!r}, which has no level dim; ask for {array!r}"
        )
    if level in levels.names:
        return FieldChannel(field, field, array, levels.names.index(level), level)
    try:
        value = float(level)
    except ValueError:
        raise FieldError(
            f"field {field!r}: {level!r} is not a level; write a number in the store's units, like {array}@500"
        ) from None
    return _nearest_level(field, array, value, levels)


def _nearest_level(field: str, array: str, value: float, levels: LevelCoordinate) -> FieldChannel:
    at = int(np.argmin(np.abs(levels.values - value))) if len(levels.values) else -1
    if at < 0 or not np.isclose(levels.values[at], value, rtol=1e-5, atol=1e-6):
        near = f"; the nearest is {levels.values[at]:g}" if at >= 0 else ""
        units = f" {levels.units}" if levels.units else ""
        listed = ", ".join(f"{v:g}" for v in levels.values)
        raise MissingLevelError(
            f"field {field!r}: array {array!r} has no level {value:g}{units}{near}. It has: {listed}"
        )
    again = np.flatnonzero(levels.values == levels.values[at]).tolist()
    if len(again) > 1:
        raise FieldError(
            f"field {field!r}: array {array!r} has the level {value:g} at the positions {again}, and nothing says "
            "which is meant; keep one of each level"
        )
    return FieldChannel(field, field, array, at, levels.names[at] if levels.names else "")


def _missing_text(field: str, name: str, arrays: Mapping[str, LevelCoordinate | None]) -> str:
    shorts = [row[0] for row in (*SURFACE_NAMES, *PRESSURE_NAMES) if _array_named(row[0], arrays)]
    channels = [c for levels in arrays.values() if levels for c in levels.names]
    close = difflib.get_close_matches(name, list(dict.fromkeys([*arrays, *shorts, *channels])), n=3, cutoff=0.6)
    suggestion = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else "."
    others = ", ".join(repr(n) for n in _NAMES_OF_QUANTITY.get(name, ()) if n != name)
    also = f" It is also searched as {others}." if others else ""
    return f"field {field!r} is not in the store{suggestion}{also} {_available_text(arrays)}"


def _available_text(arrays: Mapping[str, LevelCoordinate | None], most: int = 60) -> str:
    shown = [(name, arrays[name]) for name in sorted(arrays)[:most]]
    listed = ", ".join(n if levels is None else f"{n} ({_levels_text(levels)})" for n, levels in shown)
    more = f" and {len(arrays) - most} more" if len(arrays) > most else ""
    return f"The store has: {listed or 'no variable'}{more}"


def _levels_text(levels: LevelCoordinate, most: int = 60) -> str:
    if not levels.names:
        return f"{len(levels.values)} levels"
    more = f" and {len(levels.names) - most} more" if len(levels.names) > most else ""
    return f"channels {' '.join(levels.names[:most])}{more}"
