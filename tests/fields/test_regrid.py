"""Regridding: the values of iris and xarray-regrid, the same on every mesh, the bytes that the plan says."""

from __future__ import annotations

import itertools
import pickle
import re

import numpy as np
import pytest
import torch

from jigsaw import comm
from jigsaw.errors import FieldError, GridError
from jigsaw.fields.latlon import latitude_rows, longitude_rows
from jigsaw.fields.regridder import Regridder, regrid
from jigsaw.testing import assert_adjoint, assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

METHODS = ("conservative", "bilinear")


def poles(n):
    """Latitudes with a row on each pole, southwards."""
    return np.linspace(90, -90, n)


def centered(n):
    """Latitudes half a row away from the poles, southwards."""
    return np.linspace(90 - 90 / n, -90 + 90 / n, n)


def east(n, start=0.0):
    return start + np.arange(n) * 360 / n


def areas(lat, lon):
    """The area of every cell, in the order in which the grid is stored."""
    rows = latitude_rows(lat)
    rings = np.diff(np.sin(np.deg2rad(rows.edges)))
    return np.outer(rings[::-1] if rows.falling else rings, np.diff(longitude_rows(lon).edges))


# -- against established regridders ------------------------------------------------------------------------------------

GLOBE = poles(13), east(10)
SOURCES = list(
    itertools.product(
        (poles(13), poles(13)[::-1], centered(10)), (east(18), east(7, -180), np.roll(east(18), 5), east(12)[::-1])
    )
)
TARGETS = list(
    itertools.product(
        (poles(7), centered(17), centered(4)[::-1], np.linspace(-31, 12.5, 5)),
        (east(9), east(33, -180), np.linspace(-20, 35, 6)),
    )
)


def iris_cube(grid, data):
    """A cube of iris, which wants both coordinates monotonic."""
    import iris.coord_systems  # here as below, because every rank imports this file
    import iris.coords
    import iris.cube

    lat, lon = grid
    order = np.argsort(lon)
    sphere = iris.coord_systems.GeogCS(6371229.0)
    closed = abs(np.ptp(lon) * len(lon) / (len(lon) - 1) - 360) < 1
    coords = [
        iris.coords.DimCoord(v, n, units="degrees", coord_system=sphere, circular=n == "longitude" and closed)
        for v, n in ((lat, "latitude"), (lon[order], "longitude"))
    ]
    for coord in coords:
        coord.guess_bounds()
    return iris.cube.Cube(data[:, order], dim_coords_and_dims=[(c, d) for d, c in enumerate(coords)])


def by_iris(x, source, target, scheme):
    order = np.argsort(np.argsort(target[1]))
    like = iris_cube(target, np.zeros([len(v) for v in target]))
    return iris_cube(source, x).regrid(like, scheme).data[:, order]


@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
def test_values_are_those_of_iris(source):
    analysis = pytest.importorskip("iris.analysis")  # not where cf-units has no wheel: Linux on ARM
    rng = np.random.default_rng(1)
    x = rng.standard_normal([len(v) for v in source])
    holes = np.ma.masked_array(x, rng.random(x.shape) < 0.2)
    nans = torch.from_numpy(holes.filled(np.nan))
    for target in TARGETS:
        got = regrid(torch.from_numpy(x), source, target).numpy()
        np.testing.assert_allclose(got, by_iris(x, source, target, analysis.AreaWeighted(mdtol=0)), atol=1e-12)
        for nan, mdtol in (("keep", 0), ("skip", 1)):
            got = regrid(nans, source, target, nan=nan).numpy()
            want = by_iris(holes, source, target, analysis.AreaWeighted(mdtol=mdtol))
            np.testing.assert_array_equal(np.isnan(got), np.ma.getmaskarray(want))
            np.testing.assert_allclose(got, want.filled(np.nan), atol=1e-12)
        want = by_iris(x, source, target, analysis.Linear("mask"))
        got = regrid(torch.from_numpy(x), source, target, "bilinear").numpy()
        assert not np.isnan(got).any()  # iris masks the caps beyond the outermost rows, where ours hold
        np.testing.assert_allclose(np.where(np.ma.getmaskarray(want), 0, got), np.ma.filled(want, 0), atol=1e-12)


def as_xarray(grid, x=None):
    import xarray as xr

    coords = {"latitude": grid[0], "longitude": grid[1]}
    return xr.Dataset(coords=coords) if x is None else xr.DataArray(x, coords, ("latitude", "longitude"))


def test_values_are_those_of_xarray_regrid():
    import xarray_regrid

    assert xarray_regrid.Regridder  # which its import gives every array, as `regrid`
    rng = np.random.default_rng(2)
    source = centered(36), east(72, 2.5)
    x = rng.standard_normal((36, 72))
    # cells that nest (elsewhere xarray-regrid takes areas as linear in latitude), but at the poles, where it adds rows
    target = centered(12), east(24, 7.5)
    want = as_xarray(source, x).regrid.conservative(as_xarray(target), latitude_coord="latitude", skipna=False)
    got = regrid(torch.from_numpy(x), source, target).numpy()
    np.testing.assert_allclose(got[1:-1], want[1:-1], atol=1e-12)
    target = np.linspace(80, -85, 23), east(31, -180)
    want = as_xarray(source, x).regrid.linear(as_xarray(target))
    np.testing.assert_allclose(regrid(torch.from_numpy(x), source, target, "bilinear").numpy(), want, atol=1e-12)


def test_regions_are_those_of_xarray():
    x = np.random.default_rng(3).standard_normal((9, 11))
    source = np.linspace(60, 40, 9), np.linspace(-10, 15, 11)
    target = np.linspace(41, 58, 7), np.linspace(350.5, 374.0, 8)  # the same region, counted in 0..360
    want = as_xarray(source, x).interp(latitude=target[0], longitude=target[1] - 360)
    np.testing.assert_allclose(regrid(torch.from_numpy(x), source, target, "bilinear").numpy(), want, atol=1e-12)


# -- what must hold ----------------------------------------------------------------------------------------------------


GLOBAL = [t for t in TARGETS[:9] if len(t[1]) != 6]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SOURCES[::3], GLOBAL)))
def test_the_area_integral_is_conserved(source, target):
    x = torch.randn(3, len(source[0]), len(source[1]), dtype=torch.float64)
    y = regrid(x, source, target)
    before, after = ((t * torch.from_numpy(areas(*g))).sum((-2, -1)) for t, g in ((x, source), (y, target)))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_constants_stay(method, dtype):
    source, target = (poles(721), east(1440)), (centered(181), east(353, -180))
    x = torch.full((721, 1440), 287.0, dtype=dtype)
    y = regrid(x, source, target, method)
    assert y.dtype == dtype
    torch.testing.assert_close(y, torch.full_like(y, 287.0), rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lat", [centered(91), poles(721)[::-1]])
def test_products_in_blocks_are_the_dense_ones(method, lat):
    source, target = (poles(361), east(720)), (lat, east(353, -180))
    found = Regridder(source, target, method)
    a, b = (torch.from_numpy(w.dense((0, len(w)), (0, w.size))) for w in found.bands)
    torch.testing.assert_close(a.sum(1), torch.ones(len(a), dtype=torch.float64))
    x = torch.randn(2, 361, 720, dtype=torch.float64)
    torch.testing.assert_close(found(x), a @ x @ b.T)
    turned = regrid(x.permute(2, 0, 1), source, target, method, dims=(-1, 0))
    torch.testing.assert_close(turned.permute(1, 2, 0), a @ x @ b.T)


def test_gaussian_grids_reach_the_poles():
    source = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(32)[0])), east(64)
    x = torch.randn(32, 64, dtype=torch.float64)
    y = regrid(x, source, (poles(13), east(10)))
    before, after = ((t * torch.from_numpy(areas(*g))).sum() for t, g in ((x, source), (y, GLOBE)))
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(torch.from_numpy(areas(*source)).sum().item(), 2 * 360.0)


def test_to_the_same_grid_and_back_changes_nothing():
    x = torch.randn(2, 33, 64)
    grid = poles(33), east(64)
    for method in METHODS:
        torch.testing.assert_close(regrid(x, grid, grid, method), x, rtol=0, atol=0)
    turned = poles(33)[::-1].copy(), east(64, -180)
    assert torch.equal(regrid(x, grid, turned), x.flip(-2).roll(32, -1))


def test_coordinates_in_float32_leave_no_slivers():
    fine = np.arange(90, -90.05, -0.1, dtype=np.float32), np.arange(0, 360, 0.1, dtype=np.float32)
    for given in (fine, [v.astype(np.float64).round(3) for v in fine]):
        found = Regridder(given, (centered(180), east(360, 0.5)))
        assert [(b.values > 0).sum(1).max() for b in found.bands] == [11, 11]


def test_a_narrow_type_is_averaged_in_float32_autocast_or_not():
    x = torch.randn(1, 37, 72)
    source, target = (poles(37), east(72)), (centered(9), east(10))
    want = regrid(x.bfloat16().double(), source, target)
    with torch.autocast("cpu", torch.bfloat16):
        got = regrid(x.bfloat16(), source, target)
        assert got.dtype == torch.bfloat16
        # half a step of bfloat16 is all that rounding the averages may cost, and float32's error the rest
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(regrid(x, source, target), regrid(x, source, target, split="balanced"))
        assert regrid(x, source, target).dtype == torch.float32


def test_missing_values():
    source, target = (centered(6), east(12)), (centered(2), east(4, 30))
    x = torch.ones(6, 12)
    x[0, 0], x[3:, 3:6] = torch.nan, torch.inf
    x.requires_grad_()
    kept = regrid(x, source, target)
    assert torch.equal(kept.isnan(), torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]).bool())
    skipped = regrid(x, source, target, nan="skip")
    assert torch.equal(skipped.isnan(), torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]]).bool())
    torch.testing.assert_close(skipped[0], torch.ones(4))
    assert regrid(x, source, target, nan="skip", coverage=0.96)[0].isnan().tolist() == [True, False, False, False]
    skipped.nansum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all() and x.grad[0, 0] == 0 and x.grad[0, 1] > 0
    # a weight of zero draws on nothing
    assert not regrid(x.detach(), source, (source[0][1:3], source[1][4:7]), "bilinear").isnan().any()


# -- on every mesh -----------------------------------------------------------------------------------------------------

MESHES = [{"lat": 1, "lon": 1}, {"lat": 2}, {"lat": 3}, {"lon": 3}, {"lat": 4}, {"lon": 4}, {"lat": 2, "lon": 2}]
SPACE = (None, "lat", "lon")
CASES = {
    "coarser": ((poles(13), east(10)), (centered(7), east(6))),
    "finer": ((centered(7), east(10)), (poles(13)[2:-2], east(33, -12.0))),
    "against": ((poles(33), east(40)), (centered(7)[::-1], east(10, -180))),
    "region": ((poles(33), east(40)), (np.linspace(-30, 50, 10), np.linspace(-30, 40, 7))),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["coarser", "finer", "against", "region"])
def test_the_same_on_every_mesh(case, method):
    source, target = CASES[case]
    x = torch.randn(3, len(source[0]), len(source[1]), dtype=torch.float64)
    op = Regridder(source, target, method)
    assert_same_on_every_mesh(op, x, MESHES, spec=SPACE)
    assert_same_on_every_mesh(op, x, [{"lat": 2, "lon": 2}], spec=SPACE, halo={1: 2, 2: 1}, periodic=(2,))
    n = len(source[0])
    assert_same_on_every_mesh(op, x, [{"lat": 4}], spec=SPACE, split={1: (0, 1, 1, n - 1, n)})
    assert_same_on_every_mesh(op, x, [{"lat": 2, "lon": 2}], spec=(None, ("lat", "lon"), None))
    assert_same_on_every_mesh(op, x, [{"data": 2, "lat": 2}], spec=("data", "lat", None))
    op = Regridder(source, target, method, dims=(1, 0))
    assert_same_on_every_mesh(op, x.permute(2, 1, 0), [{"lat": 2, "lon": 2}], spec=("lon", "lat", None))


@pytest.mark.parametrize("case", ["coarser", "against"])
def test_adjoint(case):
    source, target = CASES[case]
    assert_adjoint(Regridder(source, target), (2, len(source[0]), len(source[1])), MESHES, spec=SPACE)


@pytest.mark.parametrize("nan", ["keep", "skip"])
@pytest.mark.parametrize("case", ["coarser", "against"])
def test_missing_values_on_every_mesh(case, nan):
    source, target = CASES[case]
    whole = torch.randn(2, len(source[0]), len(source[1]), dtype=torch.float64)
    n, m = whole.shape[1:]
    whole[0, n // 4 : 3 * n // 4, 2 : 2 + m // 2] = torch.nan
    want = regrid(whole, source, target, nan=nan)
    assert want.isnan().any() and not want.isnan().all()
    for body in (_holes_on_two, _holes_on_four):
        body(whole, source, target, nan, want)


def _holes(mesh, whole, source, target, nan, want):
    tile = shard(whole, mesh, SPACE)
    tile.local.requires_grad_()
    got = regrid(tile, source, target, nan=nan)
    torch.testing.assert_close(got.full_tensor().detach(), want, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.where(got.isfinite(), got, 0.0).sum().backward()
    plain = whole.clone().requires_grad_()
    regrid(plain, source, target, nan=nan).nansum().backward()
    assert tile.grad is not None
    torch.testing.assert_close(tile.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def _holes_on_two(*args):
    _holes(world_mesh(lat=2), *args)
    _holes(world_mesh(lon=2), *args)


@on_ranks(4)
def _holes_on_four(*args):
    _holes(world_mesh(lat=2, lon=2), *args)


# -- bytes -------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_bytes_are_those_of_the_plan():
    seen: set[int] = set()
    for case, dtype in itertools.product(("coarser", "finer", "against", "region"), (torch.float32, torch.bfloat16)):
        source, target = CASES[case]
        op = Regridder(source, target)
        for mesh in (world_mesh(lat=4), world_mesh(lon=4), world_mesh(lat=2, lon=2)):
            for halo in (None, {1: 1, 2: 1}):
                x = torch.randn(2, len(source[0]), len(source[1])).to(dtype)
                tile = shard(x, mesh, SPACE, halo=halo, periodic=(2,))
                tile.local.requires_grad_()
                way = op.way(tile.layout, dtype)
                with comm.count() as forward:
                    y = op(tile)
                mine = way.received[tile.layout.index(tile.coordinate)]
                assert forward.received_bytes == mine, (case, halo, way)
                assert y.layout == way.out
                with comm.count() as backward:
                    y.local.sum().backward()
                every = comm.all_gather_object(mesh, (forward.received_bytes, backward.received_bytes))
                assert sum(f for f, _ in every) == sum(b for _, b in every)
                seen.add(len(way.summed))
    assert seen == {0, 1, 2}


@on_ranks(2)
def test_grids_that_run_alike_send_rows_at_the_cut_alone():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(1, 720, 8), mesh, SPACE)
    op = Regridder((centered(720), east(8)), (centered(180), east(8)))
    assert op.way(tile.layout).received == (0, 0)  # cells that nest
    op = Regridder((centered(720), east(8)), (centered(180), east(8)), "bilinear")
    assert op.way(tile.layout).received == (0, 0)
    op = Regridder((poles(720), east(8)), (centered(170), east(8)))
    assert max(op.way(tile.layout).received) <= 3 * 8 * 4
    with comm.count() as sent:
        op(tile)
    assert sent.messages <= 1
    # a halo from disk serves
    held = shard(torch.randn(1, 720, 8), mesh, SPACE, halo={1: 3})
    with comm.count() as sent:
        op(held)
    assert sent.messages == 0


@on_ranks(2)
def test_grids_that_run_against_each_other_send_the_fewer_bytes():
    tile = shard(torch.randn(1, 720, 8), world_mesh(lat=2), SPACE)
    flipped = Regridder((centered(720), east(8)), (centered(90)[::-1], east(8))).way(tile.layout)
    assert flipped.summed == (1,)
    assert flipped.received == (2 * 45 * 8 * 4,) * 2  # partial sums of its 45 rows and their counts; rows would be 360
    fine = Regridder((centered(720), east(8)), (centered(720)[::-1], east(8))).way(tile.layout)
    assert fine.summed == ()
    assert fine.received == (360 * 8 * 4,) * 2


@on_ranks(2)
def test_where_the_result_is_cut():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(1, 33, 8), mesh, SPACE, split={1: (0, 11, 33)})
    source, target = (poles(33), east(8)), (centered(9), east(8))
    assert regrid(tile, source, target).layout.dim(1)[0].points == (0, 3, 9)
    assert regrid(tile, source, target, split="balanced").layout.dim(1)[0].points == (0, 5, 9)
    by_hand = regrid(tile, source, target, split={"lat": (0, 9, 9)})
    assert by_hand.layout.dim(1)[0].points == (0, 9, 9)
    torch.testing.assert_close(by_hand.full_tensor(), regrid(tile, source, target).full_tensor())


def test_a_regridder_pickles():
    op = Regridder((poles(13), east(10)), (centered(7), east(6)))
    x = torch.randn(13, 10)
    assert torch.equal(pickle.loads(pickle.dumps(op))(x), op(x))
    assert repr(op) == "Regridder(conservative, 13 x 10 to 7 x 6, nan='keep')"


# -- wrong use ---------------------------------------------------------------------------------------------------------

WRONG = [
    ({"method": "cubic"}, FieldError, r"method='cubic' must be one of \('conservative', 'bilinear'\)"),
    ({"nan": "raise"}, FieldError, r"nan='raise' must be one of"),
    ({"coverage": 0.5}, FieldError, r"coverage=0.5 must be a share, 0 to 1, and is for nan='skip' alone"),
    ({"dims": (-1, -1)}, GridError, r"dims=\(-1, -1\) must be two dims of a tensor of shape \(13, 10\)"),
    ({"dims": (-1, -2)}, GridError, r"dim 1 of shape \(13, 10\) has 10 rows, but the source grid has 13 in lat"),
    ({"split": {"x": "chunk"}}, GridError, r"split names 'x'; it is for 'lat' and 'lon'"),
    ({"source": {"y": 1}}, GridError, r"source has the coordinates \['y'\]; regrid needs 'lat' and 'lon'"),
    ({"source": (poles(13),)}, GridError, r"source must be \(lat, lon\), two coordinates, but has 1"),
    ({"source": (np.zeros((2, 2)), east(4))}, GridError, r"source: lat must be finite numbers.*curvilinear"),
    ({"source": ([0, 2, 1], east(4))}, GridError, r"source: lat \[0, 2, \.\.\., 1\] must rise or fall throughout"),
    ({"source": ([0, 50, 100], east(4))}, GridError, r"lat \[0, 50, \.\.\., 100\] lies beyond a pole"),
    ({"target": (poles(7), [0, 90, 45])}, GridError, r"target: lon \[0, 90, \.\.\., 45\] must go eastwards or west"),
    ({"target": (poles(7), np.linspace(0, 360, 9))}, GridError, r"lon .* goes round more than once.*drop the column"),
    ({"target": ([10.0], east(4))}, GridError, r"lat has one row, at 10 degrees, whose width nobody knows"),
]


@pytest.mark.parametrize(("how", "error", "match"), WRONG, ids=range(len(WRONG)))
def test_wrong_use_names_the_rule(how, error, match):
    with pytest.raises(error, match=match):
        regrid(torch.randn(13, 10), **{"source": GLOBE, "target": (centered(7), east(6)), **how})


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_extrapolated(method):
    region = np.linspace(60, 40, 9), np.linspace(-10, 15, 11)
    for target, name in (
        ((np.linspace(63, 41, 5), np.linspace(0, 10, 3)), "lat"),
        ((np.linspace(50, 41, 5), np.linspace(0, 18, 7)), "lon"),
        ((np.linspace(50, 41, 5), east(36)), "lon"),
        (GLOBE, "lat"),
    ):
        text = rf"target's {name} reaches from .* beyond the source's .*; nothing is extrapolated: crop the target"
        with pytest.raises(GridError, match=text):
            Regridder(region, target, method)


def test_integers_are_refused():
    with pytest.raises(FieldError, match=re.escape("torch.int64 values cannot be averaged; cast them to float32")):
        regrid(torch.zeros(13, 10, dtype=torch.int64), GLOBE, GLOBE)


@on_ranks(2)
def test_flattened_dims_are_refused():
    tile = shard(torch.randn(2, 13, 10), world_mesh(lat=2), SPACE).flatten(0, 1)
    with pytest.raises(GridError, match=r"dim 0 of .* is 2 dims flattened together; unflatten it first"):
        regrid(tile, (poles(26), east(10)), GLOBE)
