"""Roles of dims, and what may be periodic."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from jigsaw.io import coords
from jigsaw.io.coords import Coords, role_of
from jigsaw.io.errors import GridError


@dataclass
class Array:
    name: str
    dims: tuple
    attrs: dict = field(default_factory=dict)


@pytest.mark.parametrize(
    ("dim", "attrs", "role"),
    [
        ("a", {"standard_name": "latitude"}, "lat"),
        ("a", {"units": "degrees_east"}, "lon"),
        ("a", {"units": "hours since 1900-01-01"}, "time"),
        ("a", {"units": "hPa"}, "level"),
        ("a", {"axis": "T"}, "time"),
        ("latitude", {"axis": "Y"}, "lat"),
        ("south_north", {"axis": "Y"}, "y"),
        ("valid_time", {}, "time"),
        ("isobaricInhPa", {}, "level"),
        ("longitude", {}, "lon"),
        ("z", {}, "z"),
        ("number", {}, "member"),
        ("lat", {"standard_name": "projection_y_coordinate"}, "y"),
    ],
)
def test_a_role_is_found_by_attributes_first_then_by_name(dim, attrs, role):
    assert role_of(dim, attrs) == role


@pytest.mark.parametrize(
    ("dims", "want"),
    [
        (("time", "level", "latitude", "longitude"), ("time", "level", "lat", "lon")),
        (("time", "longitude", "latitude"), ("time", "lon", "lat")),
        (("time", "depth", "lat", "lon"), ("time", "level", "lat", "lon")),
        (("z", "y", "x"), ("z", "y", "x")),
        (("number", "time", "lat", "lon"), ("member", "time", "lat", "lon")),
        (("level", "y", "x"), ("z", "y", "x")),
    ],
)
def test_roles_of_a_whole_array(dims, want):
    assert Coords({}).roles(Array("v", dims)) == want


def test_two_dims_with_one_role_are_refused():
    with pytest.raises(GridError, match=r"array 'v' has dims \['lat', 'latitude'\] that both look like 'lat'"):
        Coords({}).roles(Array("v", ("lat", "latitude")))


def test_only_a_grid_that_goes_round_once_is_periodic():
    coords.check_periodic(np.arange(0, 360, 2.5))
    coords.check_periodic(np.arange(-180, 180, 0.25))
    with pytest.raises(GridError, match=r"go round once, but its 145 values 0..360 cover 362.5 degrees"):
        coords.check_periodic(np.arange(0, 362.5, 2.5))
    with pytest.raises(GridError, match="cover 60 degrees"):
        coords.check_periodic(np.arange(-10, 50, 1.0))
