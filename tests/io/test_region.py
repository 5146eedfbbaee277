"""A part of the rows: what is read of them is what the whole has there, on every mesh and in every order."""

import numpy as np
import pytest
import torch
import xarray as xr
from globe_store import globe, write

import jigsaw
from jigsaw.errors import GridError
from jigsaw.testing import on_ranks, world_mesh

# of 33 latitudes from 90 to -90 and 64 longitudes from 0 to 354.375, the region and the stored rows and columns
REGIONS = {
    "europe": ({"lat": (30, 60.0), "lon": (-20, 45)}, range(6, 11), [*range(61, 64), *range(9)]),
    "south": ({"lat": (-90, -60)}, range(27, 33), range(64)),
    "pacific": ({"lat": (10, -10), "lon": (150, 200)}, range(15, 18), range(27, 36)),
    "around": ({"lon": (-180, 180)}, range(33), [*range(32, 64), *range(32)]),
    "rows": ({"lat": slice(2, 9), "lon": slice(-4, None)}, range(2, 9), range(60, 64)),
    "line": ({"lon": (180, 180)}, range(33), [32]),
}
FIELDS = ["t2m", "geopotential", "lsm"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("region")
    data = globe(4, 33, 64)
    return {
        "chunks": write(folder / "chunks.zarr", data, "v3", (2, 2, 7, 9)),
        "globe": write(folder / "globe.zarr", data),
    }


def check_region(path, mesh, name, order=(), halo=0):
    region, rows, columns = REGIONS[name]
    how = {"fields": FIELDS, "inputs": [-1, 0], "targets": [1]}
    whole = jigsaw.io.open(path, mesh=mesh, **how)
    part = jigsaw.io.open(path, mesh=mesh, region=region, halo=halo, **how, **dict(order))
    rows, columns = list(rows), list(columns)
    if dict(order).get("lat_order") == "south-first":  # rows by number count as they lie in the sample
        rows = [32 - row for row in rows] if name == "rows" else rows[::-1]
    latitudes, longitudes = np.linspace(90, -90, 33), np.arange(64) * 5.625
    np.testing.assert_array_equal(part.whole_coords["lat"], latitudes[rows])
    assert np.ptp((part.whole_coords["lon"] - longitudes[columns]) % 360) == 0
    assert (np.diff(part.whole_coords["lon"]) > 0).all()
    theirs, ours = whole[1], part[1]
    assert torch.equal(ours.input.full_tensor(), theirs.input.full_tensor()[..., rows, :][..., columns])
    assert torch.equal(ours.target.full_tensor(), theirs.target.full_tensor()[..., rows, :][..., columns])
    held = part.layout.held(tuple(mesh.get_coordinate()))[2:]
    assert all(a >= 0 and b <= n for (a, b), n in zip(held, part.frame.sizes, strict=True))  # nothing is beyond it
    return part


@pytest.mark.parametrize("order", [{}, {"lat_order": "south-first"}], ids=["north", "south"])
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("kind", ["chunks", "globe"])
def test_a_region_is_a_part_of_the_whole(stored, kind, name, order):
    check_region(stored[kind], world_mesh(lat=1, lon=1), name, order.items(), halo=1)


def test_a_region_of_turned_longitudes(stored):
    mesh = world_mesh(lat=1)
    for lon, first in {"store": 0, "0..360": 0, "-180..180": -180}.items():
        how = {"mesh": mesh, "fields": ["t2m"], "lon": lon}
        part = jigsaw.io.open(stored["chunks"], region=REGIONS["europe"][0], **how)
        np.testing.assert_array_equal(part.whole_coords["lon"], np.arange(-16.875, 45.1, 5.625))
        some = jigsaw.io.open(stored["chunks"], region={"lon": slice(0, 3)}, **how)
        assert some.whole_coords["lon"].tolist() == [first, first + 5.625, first + 11.25]
        whole = jigsaw.io.open(stored["chunks"], **how)
        assert torch.equal(some[0].input.local, whole[0].input.local[..., :3])


@on_ranks(4)
def test_a_region_on_four_ranks(stored):
    mesh = world_mesh(lat=2, lon=2)
    for kind, name in (("chunks", "europe"), ("globe", "around")):
        check_region(stored[kind], mesh, name, halo=1)


@on_ranks(3)
def test_a_region_in_bands(stored):
    check_region(stored["chunks"], world_mesh(lon=3), "europe", halo={"lon": 2})


def test_only_the_chunks_of_a_region_are_read(stored):
    how = {"mesh": {"lat": 2, "lon": 2}, "fields": ["t2m"], "mode": "cooperative"}
    assert jigsaw.io.open(stored["chunks"], **how).plan(0).total.chunks == 5 * 8
    part = jigsaw.io.open(stored["chunks"], region=REGIONS["europe"][0], **how)
    assert part.plan(0).total.chunks == 2 * 3  # rows 6 to 10 of seven a chunk, columns 61 to 63 and 0 to 8 of nine


def test_a_part_of_a_curvilinear_grid_keeps_its_places(tmp_path):
    lat, lon = np.meshgrid(np.linspace(40, 60, 9), np.linspace(0, 30, 12), indexing="ij")
    data = xr.Dataset(
        {"t2m": (("time", "y", "x"), np.arange(4 * 9 * 12, dtype="f4").reshape(4, 9, 12))},
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(4) * np.timedelta64(6, "h"),
            "latitude": (("y", "x"), lat, {"units": "degrees_north"}),
            "longitude": (("y", "x"), lon, {"units": "degrees_east"}),
        },
    )
    region = {"y": slice(2, 7), "x": slice(4, 12)}
    part = jigsaw.io.open(data, mesh=world_mesh(y=1), region=region, forcings=["latlon"])
    values = part[1].input.local[0]
    np.testing.assert_array_equal(values[0], data["t2m"].values[1, 2:7, 4:])
    np.testing.assert_allclose(values[1], np.sin(np.deg2rad(lat[2:7, 4:])), rtol=1e-6)
    assert part.forcing_names[0] == "sin_lat"


def test_what_is_computed_and_written_of_a_region(stored, tmp_path):
    region = REGIONS["europe"][0]
    part = jigsaw.io.open(stored["globe"], mesh=world_mesh(lat=1), fields=["t2m"], region=region, targets=[1])
    made = jigsaw.io.statistics(jigsaw.io.open(stored["globe"], mesh=world_mesh(lat=1), fields=["t2m"], region=region))
    values = torch.cat([part[0].input.local, *(part[i].target.local for i in range(len(part)))]).double()
    assert made["t2m"]["mean"] == pytest.approx(values.mean().item(), rel=1e-6)
    dims = ("time", "channel", "lat", "lon")
    jigsaw.io.write(tmp_path / "part.zarr", part[0].target, dims=dims, like=part, coords={"time": part.target_times(0)})
    again = xr.open_zarr(tmp_path / "part.zarr")
    np.testing.assert_array_equal(again["lon"], np.arange(-16.875, 45.1, 5.625))
    np.testing.assert_array_equal(again["2m_temperature"], part[0].target.local[:, 0])


def test_regions_that_are_none(stored):
    how = {"mesh": {"lat": 1}, "fields": ["t2m"]}
    for region, match in (
        ({"lat": (91, 95)}, r"region=\{'lat': \(91, 95\)\} holds no row, .* 'lat' has 33, 90 to -90"),
        ({"lat": slice(0, 9, 2)}, "holds no row, or rows that do not follow each other"),
        ({"lat": 30}, r"region=\{'lat': 30\} must be two coordinates"),
        ({"lat": ("30", "60")}, "must be two coordinates"),
        ({"lat": (30, np.nan)}, "must be two coordinates"),
        ({"lon": (np.nan, 10)}, r"region=\{'lon': \(nan, 10\)\} must be two coordinates"),
        ({"lon": (10, np.inf)}, "must be two coordinates"),
        ({"z": (0, 1)}, r"names no dim of rows; the fields lie along \['lat', 'lon'\]"),
        ([30, 60], "must say it by name: region="),
    ):
        with pytest.raises(GridError, match=match):
            jigsaw.io.open(stored["globe"], region=region, **how)
    with pytest.raises(GridError, match="needs 'lon' to go round once"):
        jigsaw.io.open(stored["globe"], region={"lon": (0, 90)}, boundary={"lon": "periodic"}, halo=1, **how)


@pytest.mark.parametrize("dtype", ["u2", "i2", "f4"])
def test_longitudes_west_of_zero_whatever_number_holds_them(dtype):
    east = np.arange(0, 360, 60).astype(dtype)
    data = xr.Dataset({"a": (("lat", "lon"), np.zeros((5, 6), "f4"))}, {"lat": np.linspace(90, -90, 5), "lon": east})
    part = jigsaw.io.open(data, mesh={"lat": 1}, region={"lon": (-60, 60)})
    assert part.whole_coords["lon"].tolist() == [-60, 0, 60]
