"""Roles of dims by attributes, names and the user; coordinates of one and two dims; longitudes that turn and wrap."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import xarray as xr

from jigsaw.errors import GridError
from jigsaw.io.formats.array_source import open_xarray
from jigsaw.io.series import coords
from jigsaw.io.series.coords import DimNaming, StoreCoordinates, role_of_dim
from jigsaw.io.series.store_survey import StoreSurvey


@dataclass
class Array:
    name: str
    dims: tuple
    attrs: dict = field(default_factory=dict)
    roles: tuple = ()


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
        ("ens", {"standard_name": "realization"}, "member"),
        ("step", {"standard_name": "forecast_period", "units": "hours"}, "lead"),
        ("init_time", {"units": "hours since 1900-01-01"}, "init"),
        ("time", {"standard_name": "forecast_reference_time", "units": "hours since 1900-01-01"}, "init"),
        ("layer", {"positive": "down"}, "z"),
        ("rlat", {"standard_name": "grid_latitude", "units": "degrees", "axis": "Y"}, "y"),
        ("bnds", {}, None),
        ("lat", {"standard_name": "projection_y_coordinate"}, "y"),
    ],
)
def test_a_role_is_found_by_attributes_first_then_by_name(dim, attrs, role):
    assert role_of_dim(dim, attrs) == role


@pytest.mark.parametrize(
    ("dims", "want"),
    [
        (("time", "level", "latitude", "longitude"), ("time", "level", "lat", "lon")),
        (("time", "longitude", "latitude"), ("time", "lon", "lat")),
        (("time", "depth", "lat", "lon"), ("time", "level", "lat", "lon")),
        (("z", "y", "x"), ("z", "y", "x")),
        (("number", "time", "lat", "lon"), ("member", "time", "lat", "lon")),
        (("level", "y", "x"), ("z", "y", "x")),
        (("init_time", "lead_time", "lat", "lon"), ("time", "lead", "lat", "lon")),
        (("time", "init_time", "lat", "lon"), ("time", "init", "lat", "lon")),
    ],
)
def test_roles_of_a_whole_array(dims, want):
    assert StoreCoordinates({}).roles(Array("v", dims)) == want


def test_two_dims_with_one_role_are_refused():
    with pytest.raises(GridError, match=r"array 'v' has dims \['lat', 'latitude'\] that both look like 'lat'"):
        StoreCoordinates({}).roles(Array("v", ("lat", "latitude")))


def table(name, *dims, **attrs):
    return Array(name, dims, attrs)


def coords_of(*tables, dims=None, along="time"):
    arrays = {t.name: t for t in tables}
    return StoreCoordinates(arrays, DimNaming.of(dims, along, arrays))


@pytest.mark.parametrize(
    ("dims", "along", "want"),
    [
        ({"lat": "j", "lon": "i"}, "time", ("time", "lead", "lat", "lon")),
        ({"lat": "j", "lon": "i", "time": "step"}, "time", ("init", "time", "lat", "lon")),
        ({"y": "j", "x": "i"}, "lead", ("init", "time", "y", "x")),
        ({"y": "j", "x": "i"}, "step", ("init", "time", "y", "x")),
        ({"y": "j", "x": "i", "member": "time"}, "time", ("member", "lead", "y", "x")),
    ],
)
def test_what_the_user_says_wins(dims, along, want):
    v = table("v", "time", "step", "j", "i")
    assert coords_of(v, dims=dims, along=along).roles(v) == want


@pytest.mark.parametrize(
    ("dims", "match"),
    [
        ({"latitude": "j"}, "names 'latitude', which is not a role; there are .*'lat'"),
        ({"lat": "k"}, r"dims=\{'lat': 'k'\}: the store has no such dim; it has \['i', 'j'\]"),
    ],
)
def test_dims_that_do_not_exist(dims, match):
    with pytest.raises(GridError, match=match):
        coords_of(table("v", "j", "i"), dims=dims)


def test_a_coordinate_of_another_name_is_found_or_given():
    v, lat = table("v", "t", "j", "i"), table("latitude", "j", units="degrees_north")
    valid = table("valid", "t", units="hours since 2000-01-01")
    found = coords_of(v, lat, valid, table("lon_of_i", "i", standard_name="longitude"))
    assert found.roles(v) == ("time", "lat", "lon")
    assert found.name(v, "j") == "latitude"
    given = coords_of(v, lat, valid, dims={"time": "valid", "lon": "i"})
    assert given.name(v, "t") == "valid"
    assert given.roles(v) == ("time", "lat", "lon")


@pytest.mark.parametrize(
    ("dim", "series", "role"),
    [
        ("time", {"units": "Pa"}, "time"),
        ("time", {"units": "degrees_north"}, "time"),
        ("number", {"units": "hours since 2000-01-01"}, "member"),
        ("lat", {"units": "hours since 2000-01-01"}, "lat"),
        ("y", {"units": "degrees_north"}, "lat"),
        ("z", {"units": "hPa"}, "level"),
        ("step", {"units": "hours since 2000-01-01"}, "time"),
        ("c", {"units": "hours since 2000-01-01"}, "time"),
    ],
)
def test_a_series_along_a_dim_is_no_coordinate_of_another_kind(dim, series, role):
    """Surface pressures along time do not make it a level."""
    v, along = table("v", dim, "lat" if dim != "lat" else "t", "lon"), table("ps", dim, **series)
    v = table("v", dim, "j", "lon") if role == "lat" and dim == "y" else v
    found = coords_of(v, along)
    assert found.roles(v)[0] == role
    assert (found.name(v, dim) == "ps") == (role != {"number": "member"}.get(dim, dim))


@pytest.mark.parametrize("dims", [("j", "i"), ("south_north", "west_east"), ("lat", "lon")])
def test_latitudes_of_two_dims_make_a_grid_of_y_and_x(dims):
    lat, lon = table("lat", *dims, units="degrees_north"), table("lon", *dims, units="degrees_east")
    v, corners = table("v", "time", "depth", *dims), table("lat_vertices", *dims, "nv")
    lat.attrs["bounds"] = "lat_vertices"
    found = coords_of(v, lat, lon, corners)
    assert found.roles(v) == ("time", "level", "y", "x")
    assert [found.is_field(t) for t in (v, lat, lon, corners)] == [True, False, False, False]


def test_a_regular_grid_may_have_latitudes_of_two_dims_beside():
    plain = [table("lat", "lat", units="degrees_north"), table("lon", "lon", units="degrees_east")]
    v, both = table("v", "time", "lat", "lon"), table("lat2d", "lat", "lon", standard_name="latitude")
    assert coords_of(v, *plain, both).roles(v) == ("time", "lat", "lon")


@pytest.mark.parametrize(
    ("values", "convention", "shift", "first"),
    [
        (np.arange(0.0, 360, 45), "-180..180", 4, -180),
        (np.arange(-180.0, 180, 45), "0..360", 4, 0),
        (np.arange(0, 360, 120, dtype="f4"), "-180..180", 2, -120),
        (np.arange(0.0, 360, 45), "0..360", 0, 0),
        (np.arange(-180.0, 180, 45), "store", 0, -180),
    ],
)
def test_longitudes_turn_to_a_convention(values, convention, shift, first):
    by, turned = coords.rolled_longitudes(values, convention)
    assert (by, turned[0]) == (shift, first)
    np.testing.assert_allclose((turned - np.roll(values, -shift)) % 360, 0)
    assert (np.diff(turned) > 0).all()


@pytest.mark.parametrize(
    ("values", "convention", "match"),
    [
        (np.arange(-20.0, 30, 10), "0..360", "cannot be had by rolling the 5 stored longitudes -20..20"),
        (np.arange(350.0, 0, -10), "0..360", "cannot be had by rolling"),
        (np.arange(4.0), "east", "must be 'store', '0..360' or '-180..180'"),
    ],
)
def test_longitudes_that_would_tear(values, convention, match):
    with pytest.raises(GridError, match=match):
        coords.rolled_longitudes(values, convention)


def test_only_a_grid_that_goes_round_once_is_periodic():
    coords.check_lon_periodic(np.arange(0, 360, 2.5))
    coords.check_lon_periodic(np.arange(-180, 180, 0.25))
    with pytest.raises(GridError, match=r"go round once, but its 145 values 0..360 cover 362.5 degrees"):
        coords.check_lon_periodic(np.arange(0, 362.5, 2.5))
    with pytest.raises(GridError, match="cover 60 degrees"):
        coords.check_lon_periodic(np.arange(-10, 50, 1.0))


@pytest.mark.parametrize(("units", "is_same"), [("days since 2020-01-02", False), ("hours since 2020-01-01", True)])
def test_times_of_two_dims_are_compared_as_dates(units, is_same):
    values, count = np.zeros((3, 5, 8), "f4"), 24 if is_same else 1
    times = {
        "time": ("time", np.arange(3), {"units": "days since 2020-01-01"}),
        "time2": ("time2", count * np.arange(3), {"units": units}),
    }
    fields = {"a": (("time", "lat", "lon"), values), "b": (("time2", "lat", "lon"), values)}
    survey = StoreSurvey(open_xarray(xr.Dataset(fields, times)))
    if is_same:
        assert len(survey.time(tuple(survey.variables.values()))) == 3
    else:
        with pytest.raises(GridError, match=r"'a' \(3 steps\) and 'b' \(3 steps\) have different times"):
            survey.time(tuple(survey.variables.values()))
