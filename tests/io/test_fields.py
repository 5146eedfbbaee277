"""The field grammar: the store's names, levels, short names, and what an error tells."""

import numpy as np
import pytest

from jigsaw.errors import FieldError, MissingArrayError, MissingLevelError
from jigsaw.io.series.fields import PRESSURE_NAMES, SURFACE_NAMES, FieldChannel, LevelCoordinate, channels_of_fields

HPA = LevelCoordinate(np.array([50.0, 500, 850, 1000]), "hPa")
WB2 = {
    "2m_temperature": None,
    "10m_u_component_of_wind": None,
    "geopotential": HPA,
    "temperature": HPA,
    "u_component_of_wind": HPA,
}
CDS = {"t2m": None, "z": LevelCoordinate(np.array([100000.0, 50000]), "Pa"), "msl": None}


def found(fields, arrays):
    return [(c.name, c.array, c.level) for c in channels_of_fields(fields, arrays)]


def test_the_stores_own_names_in_the_asked_order():
    assert found(["geopotential@850", "2m_temperature", "temperature@50"], WB2) == [
        ("geopotential@850", "geopotential", 2),
        ("2m_temperature", "2m_temperature", None),
        ("temperature@50", "temperature", 0),
    ]


def test_a_variable_with_levels_is_a_channel_for_each():
    assert channels_of_fields(["temperature"], WB2)[1] == FieldChannel(
        "temperature@500", "temperature", "temperature", 1
    )
    assert len(channels_of_fields(["temperature", "t2m"], WB2)) == 5


@pytest.mark.parametrize(
    ("field", "array", "level"),
    [
        ("t2m", "2m_temperature", None),
        ("2t", "2m_temperature", None),
        ("u10", "10m_u_component_of_wind", None),
        ("z500", "geopotential", 1),
        ("t850", "temperature", 2),
        ("u1000", "u_component_of_wind", 3),
        ("z@50", "geopotential", 0),
    ],
)
def test_short_names_find_long_ones(field, array, level):
    assert found([field], WB2) == [(field, array, level)]


def test_long_names_find_short_ones_and_pascal_is_converted():
    assert found(["2m_temperature", "z500", "geopotential@100000", "mean_sea_level_pressure"], CDS) == [
        ("2m_temperature", "t2m", None),
        ("z500", "z", 1),
        ("geopotential@100000", "z", 0),
        ("mean_sea_level_pressure", "msl", None),
    ]


def test_the_stores_own_name_wins_over_the_short_one():
    assert found(["z500"], {**WB2, "z500": None}) == [("z500", "z500", None)]
    assert found(["a@b"], {"a@b": None}) == [("a@b", "a@b", None)]


def test_a_surface_name_never_becomes_a_pressure_level():
    with pytest.raises(MissingArrayError, match=r"'v100' is not in the store.*searched as '100v'"):
        channels_of_fields(["v100"], {"v_component_of_wind": LevelCoordinate(np.array([100.0]))})


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        (
            ["2m_temprature"],
            MissingArrayError,
            r"'2m_temprature' is not in .*did you mean '2m_temperature'.*has: .*geopotential \(4 levels\)",
        ),
        (["tp"], MissingArrayError, r"searched as 'total_precipitation'.*The store has: 10m_u"),
        (["q500"], MissingArrayError, r"'q500' is not in the store"),
        (
            ["z700"],
            MissingLevelError,
            r"'geopotential' has no level 700 hPa; the nearest is \d+. It has: 50, 500, 850, 1000",
        ),
        (["geopotential@501"], MissingLevelError, r"no level 501 hPa; the nearest is 500"),
        (["t2m@500"], MissingLevelError, r"'2m_temperature', which has no level dim; ask for '2m_temperature'"),
        (["geopotential@low"], FieldError, r"'low' is not a level; write a number"),
        (
            ["z500", "geopotential"],
            FieldError,
            r"'z500' and 'geopotential' both name a channel of array 'geopotential'",
        ),
        (["t2m", "2m_temperature"], FieldError, r"both name a channel"),
        ([], FieldError, r"fields=\[\] names no variable; The store has"),
        ("t2m", FieldError, r"is one string; give a list: fields=\['t2m'\]"),
    ],
)
def test_errors_list_what_there_is(fields, error, match):
    with pytest.raises(error, match=match):
        channels_of_fields(fields, WB2)


def test_a_level_that_is_there_twice_is_none_or_two():
    twice = {"geopotential": LevelCoordinate(np.array([500.0, 500.0, 850.0]), "hPa")}
    for field in ("z500", "geopotential@500"):
        with pytest.raises(FieldError, match=r"has the level 500 at the positions \[0, 1\], and nothing says which"):
            channels_of_fields([field], twice)
    assert [c.level for c in channels_of_fields(["z850"], twice)] == [2]


def test_the_tables_name_each_quantity_once():
    names = [name for row in (*SURFACE_NAMES, *PRESSURE_NAMES) for name in row]
    assert len(names) == len(set(names))
