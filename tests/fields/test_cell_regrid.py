"""Regridding between cells and lat-lon grids: exact areas, Delaunay's triangles, rows that travel once."""

import itertools
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jigsaw import comm
from jigsaw.errors import GridError
from jigsaw.fields.cell_weights import cell_weights
from jigsaw.fields.latlon import latitude_rows, longitude_rows
from jigsaw.fields.regridder import Regridder, regrid
from jigsaw.geometry.healpix import healpix_degrees
from jigsaw.testing import assert_adjoint, assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard


def points(lat, lon):
    return SimpleNamespace(lat=np.asarray(lat), lon=np.asarray(lon), nside=None, nested=None, numbers=None)


def healpix(nside, nested=True, numbers=None):
    lat, lon = healpix_degrees(nside, nested, np.arange(12 * nside**2) if numbers is None else numbers)
    return SimpleNamespace(lat=lat, lon=lon, nside=nside, nested=nested, numbers=numbers)


def octahedral(n, start=0.0):
    """A reduced Gaussian grid: 20 points on the ring next to the pole, 4 more on each towards the equator."""
    lats = np.degrees(np.arcsin(np.polynomial.legendre.leggauss(2 * n)[0]))[::-1]
    counts = [20 + 4 * min(i, 2 * n - 1 - i) for i in range(2 * n)]
    return points(np.repeat(lats, counts), np.concatenate([start + np.arange(k) * 360 / k for k in counts]))


COARSE = np.linspace(90, -90, 7), np.arange(9) * 40.0 - 180
FINE = np.linspace(-88, 88, 23), np.arange(33) * 360 / 33 + 5
CELLS = {"nested": healpix(4), "ring": healpix(3, False), "gaussian": octahedral(5), "turned": octahedral(4, 7.5)}


def sizes(grid):
    return (len(grid.lat),) if isinstance(grid, SimpleNamespace) else (len(grid[0]), len(grid[1]))


def rows_or_cells(grid):
    return grid if isinstance(grid, SimpleNamespace) else (latitude_rows(grid[0]), longitude_rows(grid[1]))


def areas(grid):
    """The area of each cell, as a part of the sphere."""
    if not isinstance(grid, SimpleNamespace):
        lat, lon = latitude_rows(grid[0]), longitude_rows(grid[1])
        rings = np.diff(np.sin(np.radians(lat.edges))) / 2
        return np.outer(rings[::-1] if lat.falling else rings, np.diff(lon.edges) / 360).reshape(-1)
    if grid.nside:
        return np.full(len(grid.lat), 1 / len(grid.lat))
    lats, ring, counts = np.unique(grid.lat, return_inverse=True, return_counts=True)
    return (np.diff(np.sin(np.radians(latitude_rows(lats).edges))) / 2 / counts)[ring]


# -- conservative ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("grid", [COARSE, FINE], ids=["coarse", "fine"])
def test_constants_stay_and_integrals_are_conserved(cells, grid):
    for source, target in ((CELLS[cells], grid), (grid, CELLS[cells])):
        op = Regridder(source, target)
        x = torch.randn(2, *sizes(source), dtype=torch.float64)
        y = op(x)
        assert y.shape == (2, *sizes(target))
        before, after = (t.flatten(1) @ torch.from_numpy(areas(g)) for t, g in ((x, source), (y, target)))
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(op(torch.ones_like(x)), torch.ones_like(y), rtol=1e-13, atol=0)


@pytest.mark.parametrize("nested", [True, False])
def test_areas_within_healpix_are_those_of_sampled_points(nested):
    theirs = pytest.importorskip("cdshealpix.nested" if nested else "cdshealpix.ring")
    units, coordinates = pytest.importorskip("astropy.units"), pytest.importorskip("astropy.coordinates")
    n, fine = 4, 1600
    z, lon = np.meshgrid((np.arange(fine) + 0.5) / fine * 2 - 1, (np.arange(fine) + 0.5) * 360 / fine, indexing="ij")
    lat = coordinates.Latitude(np.degrees(np.arcsin(z)).ravel() * units.deg)
    cell = theirs.lonlat_to_healpix(coordinates.Longitude(lon.ravel() * units.deg), lat, 2 if nested else n)
    rows, columns = latitude_rows(COARSE[0]), longitude_rows(COARSE[1])
    row = len(rows) - np.searchsorted(np.sin(np.radians(rows.edges)), z.ravel())
    column = np.searchsorted(columns.edges, (lon.ravel() - columns.edges[0]) % 360 + columns.edges[0], "right") - 1
    want = np.zeros((192, 63))
    np.add.at(want, (np.asarray(cell).astype(int), row * 9 + column), 192 / fine**2)
    got = cell_weights((rows, columns), healpix(n, nested), "conservative")
    dense = np.zeros_like(want)
    dense[got.target, got.source] = got.value
    np.testing.assert_allclose(dense, want, atol=8e-3)  # a sample's cells are 1 / 1600 wide
    assert np.array_equal(dense > 3e-3, (want > 3e-3) & (dense > 3e-3))


def test_a_coarser_level_is_the_mean_of_the_finer():
    x = torch.randn(*sizes(FINE), dtype=torch.float64)
    fine, coarse = regrid(x, FINE, healpix(8)), regrid(x, FINE, healpix(4))
    torch.testing.assert_close(fine.unflatten(0, (-1, 4)).mean(1), coarse, rtol=1e-12, atol=1e-12)
    ring = regrid(x, FINE, healpix(4, nested=False))
    order = np.lexsort((healpix(4).lon, -healpix(4).lat.round(9)))
    torch.testing.assert_close(ring, coarse[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["conservative", "bilinear"])
def test_rings_of_one_length_are_a_lat_lon_grid(method):
    lat, lon = FINE
    cells = points(np.repeat(lat, len(lon)), np.tile(lon, len(lat)))
    x = torch.randn(*sizes(COARSE), dtype=torch.float64)
    torch.testing.assert_close(regrid(x, COARSE, cells, method).view(len(lat), -1), regrid(x, COARSE, FINE, method))
    if method == "conservative":
        x = torch.randn(*sizes(FINE), dtype=torch.float64)
        torch.testing.assert_close(regrid(x.flatten(), cells, COARSE), regrid(x, FINE, COARSE))


def test_a_part_of_the_sphere():
    numbers = np.random.default_rng(0).permutation(np.arange(3 * 16, 7 * 16))
    part, x = healpix(4, numbers=numbers), torch.randn(192, dtype=torch.float64)
    y = torch.randn(*sizes(FINE), dtype=torch.float64)
    torch.testing.assert_close(regrid(y, FINE, part), regrid(y, FINE, healpix(4))[numbers])
    inner = np.linspace(-5, 5, 3), np.linspace(40, 50, 3)  # of face 5, from 45 degrees on, and of those beside it
    wide = healpix(4, numbers=np.arange(192)[::-1].copy())
    torch.testing.assert_close(regrid(x.flip(0), wide, inner), regrid(x, healpix(4), inner))
    with pytest.raises(GridError, match=r"the source covers .*% of the target cell at latitude"):
        regrid(x[numbers], part, COARSE)


# -- linear ------------------------------------------------------------------------------------------------------------


def unit(lat, lon):
    phi, theta = np.radians(lat), np.radians(lon)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], -1)


@pytest.mark.parametrize(
    "source", [healpix(4), octahedral(5), points(*np.random.default_rng(1).uniform(-80, 80, (2, 90)))]
)
def test_weights_are_those_of_delaunays_triangles(source):
    target = points(*np.random.default_rng(2).uniform(-90, 90, (2, 300)))
    if source.lon.max() < 90:  # a region: within its triangles
        target = points(target.lat / 3, target.lon / 3)
    w = cell_weights(source, target, "bilinear")
    at, wanted = unit(source.lat, source.lon), unit(target.lat, target.lon)
    assert (w.value > 0).all()
    for number in range(300):
        mine = w.target == number
        corners = at[w.source[mine]]
        mean = w.value[mine] @ corners
        np.testing.assert_allclose(mean / np.linalg.norm(mean), wanted[number], atol=1e-12)
        if len(corners) == 3:  # no other point in the circle around them
            normal = np.cross(corners[1] - corners[0], corners[2] - corners[0])
            normal *= np.sign(normal @ corners[0]) / np.linalg.norm(normal)
            assert (at @ normal <= corners[0] @ normal + 1e-9).all()
    x = torch.randn(len(source.lat), dtype=torch.float64)
    torch.testing.assert_close(regrid(x, source, source, "bilinear"), x, rtol=1e-9, atol=1e-9)


def test_rows_and_columns_around_each_cell():
    import xarray as xr

    rng = np.random.default_rng(3)
    lat, lon, x = np.linspace(60, -60, 13), np.arange(24) * 15.0 - 180, rng.standard_normal((13, 24))
    target = points(rng.uniform(-60, 60, 50), rng.uniform(-180, 360, 50))
    ring = np.concatenate([x, x[:, :1]], 1)
    field = xr.DataArray(ring, {"lat": lat, "lon": np.arange(25) * 15.0 - 180}, ("lat", "lon"))
    want = field.interp(lat=("p", target.lat), lon=("p", (target.lon + 180) % 360 - 180))
    np.testing.assert_allclose(regrid(torch.from_numpy(x), (lat, lon), target, "bilinear"), want, atol=1e-12)


# -- on every mesh -----------------------------------------------------------------------------------------------------


def cases():
    for name, method in itertools.product(("nested", "gaussian"), ("conservative", "bilinear")):
        yield f"{name} to rows, {method}", CELLS[name], COARSE, method
        yield f"rows to {name}, {method}", FINE, CELLS[name], method
    yield "gaussian to nested", CELLS["gaussian"], CELLS["nested"], "conservative"


CASES = {name: rest for name, *rest in cases()}
MESHES_OF_CELLS = [{"cell": n} for n in (1, 2, 3, 4)]
MESHES_OF_ROWS = [{"lat": 1, "lon": 1}, {"lat": 2}, {"lon": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]


@pytest.mark.parametrize("case", CASES)
def test_fields_and_gradients_on_every_mesh(case):
    source, target, method = CASES[case]
    op, shape = Regridder(source, target, method), sizes(source)
    x = torch.randn(2, *shape, dtype=torch.float64)
    if len(shape) == 1:
        assert_same_on_every_mesh(op, x, MESHES_OF_CELLS, spec=(None, "cell"))
        n = shape[0]
        assert_same_on_every_mesh(op, x, [{"cell": 4}], spec=(None, "cell"), split={1: (0, 7, 7, n - 1, n)})
        assert_same_on_every_mesh(op, x, [{"data": 2, "cell": 2}], spec=("data", "cell"))
    else:
        assert_same_on_every_mesh(op, x, MESHES_OF_ROWS, spec=(None, "lat", "lon"))
        assert_same_on_every_mesh(op, x, [{"lat": 4}], spec=(None, "lat", "lon"), split={1: (0, 0, 3, 3, shape[0])})
        halo = {"spec": (None, "lat", "lon"), "halo": {1: 1, 2: 2}, "periodic": (2,)}
        assert_same_on_every_mesh(op, x, [{"lat": 2, "lon": 2}], **halo)
        turned = Regridder(source, target, method, dims=(2, 0))
        assert_same_on_every_mesh(turned, x.permute(2, 0, 1), [{"lat": 2, "lon": 2}], spec=("lon", None, "lat"))


@pytest.mark.parametrize("case", ["nested to rows, conservative", "rows to gaussian, bilinear"])
def test_the_gradient_is_the_adjoint(case):
    source, target, method = CASES[case]
    meshes, spec = (
        (MESHES_OF_CELLS, (None, "cell")) if len(sizes(source)) == 1 else (MESHES_OF_ROWS, (None, "lat", "lon"))
    )
    assert_adjoint(Regridder(source, target, method), (2, *sizes(source)), meshes, spec=spec)


@on_ranks(4)
def test_each_row_that_is_needed_travels_once():
    for case, (source, target, method) in CASES.items():
        op = Regridder(source, target, method)
        whole = torch.randn(3, *sizes(source))
        is_cells = whole.ndim == 2
        for mesh in (world_mesh(cell=4), world_mesh(lat=2, lon=2)):
            spec = (None, "cell") if is_cells else (None, "lat", "lon")
            if is_cells != ("cell" in mesh.mesh_dim_names):
                continue
            tile = shard(whole, mesh, spec)
            tile.local.requires_grad_()
            way = op.way(tile.layout)
            with comm.count() as forward:
                y = op(tile)
            with comm.count() as backward:
                y.local.sum().backward()
            # the source cells of this rank's own targets, without those that it owns
            owned = [
                np.arange(math.prod(size)).reshape(size)[tuple(slice(*span) for span in tensor.layout.owned(at)[1:])]
                for size, tensor, at in ((sizes(g), t, tile.coordinate) for g, t in ((source, tile), (target, y)))
            ]
            entries = cell_weights(*map(rows_or_cells, (source, target)), method)
            needed = np.setdiff1d(entries.source[np.isin(entries.target, owned[1])], owned[0])
            assert forward.received_bytes == 4 * 3 * len(needed), case
            assert forward.received_bytes == way.received[tile.layout.index(tile.coordinate)]
            assert forward.messages <= 3
            every = comm.all_gather_object(mesh, (forward.received_bytes, backward.received_bytes))
            assert sum(f for f, _ in every) == sum(b for _, b in every) > 0
            assert y.layout == way.out


@on_ranks(2)
def test_missing_values_split_and_dtypes():
    mesh, cells = world_mesh(cell=2), CELLS["nested"]
    x = torch.randn(2, 192, dtype=torch.float64)
    x[0, 20:60] = torch.nan
    for nan in ("keep", "skip"):
        op = Regridder(cells, COARSE, nan=nan, split=(0, 1, 7))
        want, got = op(x), op(shard(x, mesh, (None, "cell")))
        assert want.isnan().any() and not want.isnan().all()
        assert got.local.shape == ((2, 1, 9), (2, 6, 9))[mesh.get_rank()]
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12, equal_nan=True)
    narrow = op(torch.ones(192, dtype=torch.bfloat16))
    assert narrow.dtype == torch.bfloat16 and (narrow == 1).all()


def test_a_module_and_its_text():
    op = Regridder(CELLS["nested"], COARSE)
    assert repr(op) == "Regridder(conservative, 192 to 7 x 9, nan='keep')"
    x = torch.randn(192)
    torch.testing.assert_close(pickle.loads(pickle.dumps(op))(x), op(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Regridder(healpix(2), healpix(4)), "method='conservative' from HEALPix to HEALPix is not made"),
        (
            lambda: Regridder(points(*np.random.default_rng(1).uniform(-80, 80, (2, 90))), COARSE),
            "needs the edges of cells, which are known of HEALPix, and of rings of points",
        ),
        (
            lambda: Regridder(points([0, 0, 10, 20], [0, 10, 5, 9]), COARSE, "bilinear"),
            r"the target at latitude .*, longitude .* lies beyond the source's cells",
        ),
        (
            lambda: Regridder(healpix(2), COARSE, split={"lat": "chunk"}),
            "is by dim, and from or to cells it is for one",
        ),
        (lambda: Regridder(healpix(2), COARSE, dims=(-2, -1))(torch.ones(2, 48)), r"dims=\(-2, -1\) must be a dim"),
        (lambda: Regridder(healpix(2), COARSE)(torch.ones(2, 47)), "has 47 rows, but the source grid has 48 in cells"),
    ],
)
def test_what_has_no_weights_is_refused(make, said):
    with pytest.raises(GridError, match=said):
        make()


def test_a_missing_value_stays_one_though_coordinates_are_rounded():
    lat, lon = np.linspace(85, -85, 18), np.arange(36) * 10 + 0.1
    rounded = lat.astype("f4"), lon.astype("f4")
    wide, narrow = (points(*(x.ravel() for x in np.meshgrid(*rows, indexing="ij"))) for rows in ((lat, lon), rounded))
    narrow.lat, narrow.lon = narrow.lat.astype("f8"), narrow.lon.astype("f8")
    x = torch.randn(18, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[5, 7] = math.nan
    for source, target, method in ((rounded, wide, "conservative"), (narrow, (lat, lon), "bilinear")):
        y = Regridder(source, target, method)(x if source is rounded else x.flatten())
        torch.testing.assert_close(y.flatten(), x.flatten(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_station_lies_between_rounded_rows():
    lat, lon = np.linspace(90, -90, 19).astype("f4"), np.arange(36, dtype="f4") * 10
    x = torch.from_numpy(np.broadcast_to(lat[:, None] + np.zeros(36), (19, 36)).copy())
    for place in (points([40.05], [3.02]), points([40.05, 40.05], [3.02, 3.02])):
        torch.testing.assert_close(Regridder((lat, lon), place, "bilinear")(x), torch.from_numpy(place.lat).double())


def test_targets_within_a_region_of_cells_are_found():
    source = points(*(x.ravel() for x in np.meshgrid(np.linspace(-1, 1, 7), np.linspace(-1.1, 1.1, 7))))
    draw = np.random.default_rng(0)
    for lat, lon in draw.uniform(-0.99, 0.99, (60, 2)):
        weights = cell_weights(source, points([lat], [lon]), "bilinear")
        near = weights.value @ source.lat[weights.source], weights.value @ source.lon[weights.source]
        np.testing.assert_allclose(near, (lat, lon), atol=1e-3)


def test_cells_without_a_place_are_refused():
    for lost in (points([math.nan, 3.0], [0.0, 3.0]), points([0.0, 3.0], [0.0, math.inf])):
        with pytest.raises(GridError, match="some cells have no finite latitude and longitude"):
            Regridder(FINE, lost, "bilinear")


def test_weights_made_without_gradients_serve_training():
    regridder = Regridder(FINE, COARSE)
    x = torch.randn(23, 33, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        regridder(x)
    regridder(x).sum().backward()
    assert x.grad is not None
