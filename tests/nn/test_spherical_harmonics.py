"""Spherical harmonic transforms: closed forms, torch-harmonics, every cut, and what is sent and held."""

from __future__ import annotations

import copy
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import cut_points
from jigsaw.nn import (
    InverseSphericalHarmonicTransform,
    InverseVectorSphericalHarmonicTransform,
    SphericalConv,
    SphericalHarmonicTransform,
    VectorSphericalHarmonicTransform,
)
from jigsaw.nn.spheres.legendre_tables import SPHERE_GRIDS, latitude_quadrature, legendre_derivatives, legendre_table
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile

MESHES = [{"lat": 1}, {"lat": 2}, {"lon": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]
GRID = (None, "lat", "lon")

# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", SPHERE_GRIDS)
def test_quadrature_integrates_polynomials(grid):
    for rows in (2, 3, 8, 13, 64, 181):
        theta, weights = latitude_quadrature(grid, rows)
        exact = {"equiangular": rows - 1, "lobatto": 2 * rows - 3, "legendre-gauss": 2 * rows - 1}[grid]
        assert np.all(np.diff(theta) > 0)
        assert abs(weights.sum() - 2) < 1e-14 * rows
        for degree in range(max(exact - 3, 1), exact + 1):
            assert abs(weights @ scipy.special.eval_legendre(degree, np.cos(theta))) < 1e-14 * rows
    if grid == "legendre-gauss":
        nodes, known = scipy.special.roots_legendre(181)
        np.testing.assert_allclose(np.cos(theta)[::-1], nodes, atol=1e-15)
        np.testing.assert_allclose(weights[::-1], known, atol=1e-14)


def test_tables_are_the_spherical_harmonics():
    theta, degrees = np.linspace(0, math.pi, 21), 37  # more orders than go through the recurrence together
    degree, m = np.arange(degrees)[:, None], np.arange(degrees)[:, None, None]
    known, slopes = scipy.special.sph_harm_y(degree, m, theta, 0.0, diff_n=1)
    known, slopes = (np.where(degree >= m, x.real, 0) for x in (known, slopes[..., 0]))
    table = legendre_table(theta, degrees, (0, degrees))
    np.testing.assert_allclose(table, known, atol=1e-13)
    along, across = legendre_derivatives(theta, degrees, (0, degrees))
    np.testing.assert_allclose(along[..., 1:-1], slopes[..., 1:-1], atol=1e-10)
    np.testing.assert_allclose(across * np.sin(theta), m * known, atol=1e-12)
    assert np.isfinite(along).all()
    for orders in ((0, 5), (7, 12), (31, 34), (9, 9)):  # a rank's part is that of the whole
        part = slice(*orders)
        assert np.array_equal(legendre_table(theta, degrees, orders), table[part])
        assert np.array_equal(legendre_derivatives(theta, degrees, orders)[0], along[part])
        assert np.array_equal(legendre_derivatives(theta, degrees, orders)[1], across[part])


def test_orders_that_begin_below_the_least_number():
    theta, weights = latitude_quadrature("legendre-gauss", 2300)
    assert np.sin(theta[0]) ** 810 == 0
    for order in (0, 810, 2190):
        p = legendre_table(theta, 2200, (order, order + 1))[0, [order, order + 5, 2199]]
        np.testing.assert_allclose(2 * math.pi * (p * weights) @ p.T, np.eye(3), atol=1e-10)


# -- closed forms -----------------------------------------------------------------------------------------------------


class DenseAnalysis(nn.Module):
    """c[l, m] = sum over all points of w f conj(Y_lm), by scipy's Y: no transform, one number after the other."""

    def __init__(self, transform):
        super().__init__()
        theta, weights = latitude_quadrature(transform.grid, transform.nlat)
        phi = 2 * math.pi * np.arange(transform.nlon) / transform.nlon
        degree, m = np.arange(transform.lmax)[:, None, None, None], np.arange(transform.mmax)[:, None, None]
        y = scipy.special.sph_harm_y(degree, m, theta[:, None], phi)
        y = np.where(degree >= m, y, 0)
        self.forward_matrix = torch.from_numpy(y.conj() * (weights[:, None] * 2 * math.pi / transform.nlon))
        # orders below 0 are the conjugates of those above; the grid cannot tell those at its limit apart
        twice = np.where((m == 0) | (2 * m == transform.nlon), 1, 2)
        self.inverse_matrix = torch.from_numpy(y * twice)

    def analyse(self, x):
        return torch.einsum("...kj,lmkj->...lm", x + 0j, self.forward_matrix)

    def synthesise(self, c):
        return torch.einsum("...lm,lmkj->...kj", c, self.inverse_matrix).real


class ThereAndBack(nn.Module):
    """Coefficients, weighted by degree, and the field of them on another grid; dense where nothing is cut."""

    def __init__(self, there, back):
        super().__init__()
        self.there, self.back = there, back
        self.dense, self.dense_back = DenseAnalysis(there), DenseAnalysis(back)
        self.filter = nn.Parameter(torch.randn(there.lmax, 1))

    def forward(self, x):
        c = self.there(x) if isinstance(x, Tile) else self.dense.analyse(x)
        c = c * self.filter
        return c, self.back(c) if isinstance(x, Tile) else self.dense_back.synthesise(c)


def _pair(nlat, nlon, **how):
    return SphericalHarmonicTransform(nlat, nlon, **how), InverseSphericalHarmonicTransform(nlat, nlon, **how)


def test_every_cut_is_the_sum_over_all_points():
    there, back = _pair(13, 24, grid="legendre-gauss", lmax=10)
    x = torch.randn(3, 13, 24)
    assert_same_on_every_mesh(ThereAndBack(there, back), x, MESHES, spec=GRID)
    coarse = InverseSphericalHarmonicTransform(7, 20, lmax=10, grid="equiangular")
    model = ThereAndBack(there, coarse)
    assert_same_on_every_mesh(model, x, [{"lon": 2, "lat": 2}], spec=("lon", None, "lat"))  # leading dims too
    assert_same_on_every_mesh(model, x, [{"lat": 3}], spec=GRID, split={1: (0, 1, 1, 13)}, halo={1: 1})


def test_fewer_orders_and_rows_than_ranks():
    there, back = _pair(3, 8, grid="lobatto", lmax=2)
    meshes = [{"lat": 4}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(ThereAndBack(there, back), torch.randn(2, 3, 8), meshes, spec=GRID)
    there, back = _pair(4, 6, grid="legendre-gauss")  # with the order that irfft takes for real
    assert there.mmax == 6 // 2 + 1
    assert_same_on_every_mesh(ThereAndBack(there, back), torch.randn(2, 4, 6), [{"lon": 2}], spec=GRID)


@pytest.mark.parametrize("norm", ["ortho", "four-pi", "schmidt"])
def test_coefficients_come_back_and_have_the_fields_power(norm):
    for grid, nlat in (("equiangular", 33), ("lobatto", 18), ("legendre-gauss", 17)):
        there, back = _pair(nlat, 40, grid=grid, norm=norm, csphase=norm == "ortho", lmax=17)
        c = torch.randn(2, 17, 17, dtype=torch.complex128).tril()
        c[..., 0] = c[..., 0].real + 0j
        field = back(c)
        torch.testing.assert_close(there(field), c, rtol=0, atol=1e-10)
        _, weights = latitude_quadrature(grid, nlat)
        power = (torch.from_numpy(weights) @ field[0].square()).sum() * 2 * math.pi / 40
        of_norm = {"ortho": 1, "four-pi": 4 * math.pi, "schmidt": 4 * math.pi / (2 * torch.arange(17.0) + 1)}[norm]
        by_degree = c[0].abs().square().sum(1) * 2 - c[0, :, 0].abs().square()
        torch.testing.assert_close((by_degree / of_norm).sum().to(power.dtype), power, rtol=1e-7, atol=0)


def test_vectors_are_gradients_and_curls():
    there, back = _pair(17, 40, grid="legendre-gauss")
    how = {"grid": "legendre-gauss"}
    vectors = VectorSphericalHarmonicTransform(17, 40, **how), InverseVectorSphericalHarmonicTransform(17, 40, **how)
    theta, _ = latitude_quadrature("legendre-gauss", 17)
    phi = 2 * math.pi * np.arange(40) / 40
    for degree, m in ((1, 0), (3, 2), (9, 9), (16, 5)):
        _, slopes = scipy.special.sph_harm_y(degree, m, theta[:, None], phi, diff_n=1)
        south, east = slopes[..., 0].real, slopes[..., 1].real / np.sin(theta)[:, None]
        c = torch.zeros(2, 17, 17, dtype=torch.complex128)
        c[0, degree, m] = 1 if m == 0 else 0.5
        gradient = torch.from_numpy(np.stack([south, east]))
        torch.testing.assert_close(vectors[1](c), gradient, rtol=0, atol=1e-11)
        torch.testing.assert_close(vectors[0](gradient), c, rtol=0, atol=1e-11)
        curl = torch.stack([-gradient[1], gradient[0]])
        torch.testing.assert_close(vectors[0](curl)[0], 0 * c[0], rtol=0, atol=1e-11)
    assert not there(back(c[0])).isnan().any()


class VectorsThereAndBack(nn.Module):
    def __init__(self):
        super().__init__()
        how = {"grid": "lobatto", "norm": "schmidt"}
        self.there = VectorSphericalHarmonicTransform(11, 20, **how)
        self.back = InverseVectorSphericalHarmonicTransform(11, 20, **how)

    def forward(self, x):
        c = self.there(x)
        return c, self.back(c * c.abs())


def test_vectors_on_every_mesh():
    x = torch.randn(2, 3, 2, 11, 20)
    spec = (None, None, None, "lat", "lon")
    assert_same_on_every_mesh(VectorsThereAndBack(), x, [{"lat": 3}, {"lat": 2, "lon": 2}], spec=spec)


def test_of_torch_harmonics():
    harmonics = pytest.importorskip("torch_harmonics", reason="a package of the zoo: make zoo")
    x = torch.randn(3, 2, 13, 24).double()
    for grid in SPHERE_GRIDS:
        for norm, csphase, lmax, mmax in (
            ("ortho", True, None, None),
            ("four-pi", False, 7, None),
            ("schmidt", True, 9, 8),
        ):
            how = {"grid": grid, "norm": norm, "csphase": csphase, "lmax": lmax, "mmax": mmax}
            c, field = harmonics.RealSHT(13, 24, **how)(x), harmonics.InverseRealSHT(13, 24, **how)
            torch.testing.assert_close(SphericalHarmonicTransform(13, 24, **how)(x), c, rtol=0, atol=1e-12)
            torch.testing.assert_close(
                InverseSphericalHarmonicTransform(13, 24, **how)(c), field(c), rtol=0, atol=1e-12
            )
            # its 1 / l(l + 1) is in single precision
            c, field = harmonics.RealVectorSHT(13, 24, **how)(x), harmonics.InverseRealVectorSHT(13, 24, **how)
            torch.testing.assert_close(VectorSphericalHarmonicTransform(13, 24, **how)(x), c, rtol=0, atol=1e-6)
            inverse = InverseVectorSphericalHarmonicTransform(13, 24, **how)
            torch.testing.assert_close(inverse(c), field(c), rtol=0, atol=1e-12)
    layer = harmonics.SpectralConvS2((13, 24), (7, 20), 4, 6, grid_in="lobatto")
    there = SphericalHarmonicTransform(13, 24, grid="lobatto", lmax=layer.lmax)
    ours = SphericalConv(4, 6, there, InverseSphericalHarmonicTransform(7, 20, lmax=layer.lmax))
    ours.weight.data.copy_(layer.weight.data[0])
    x = torch.randn(2, 4, 13, 24)
    y = torch.einsum("bixy,iox->boxy", layer.sht(x), layer.weight[0])
    torch.testing.assert_close(ours(x), layer.isht(y), rtol=0, atol=1e-5)


# -- layouts, bytes, memory -------------------------------------------------------------------------------------------


@on_ranks(4)
def _sent(axes):
    """What a transform and its inverse send is what the formula says, and each holds the table of its orders."""
    mesh, leading, orders = world_mesh(**axes), 6, 11
    there, back = _pair(13, 24, grid="legendre-gauss", lmax=orders)
    x = jigsaw.shard(torch.randn(2, 3, 13, 24), mesh, (None, None, "lat", "lon"))
    x.local.requires_grad_()
    with comm.count() as forward:
        c = there(x)
    with comm.count() as inverse:
        y = back(c)
    loss = y.square().mean()
    with comm.count() as backward:
        loss.backward()
    assert y.layout == x.layout
    assert c.layout.dim_axes(3) == tuple(axes)
    rank, (rows, columns), along_lon = mesh.get_rank(), x.local.shape[2:], axes.get("lon", 1)
    points = cut_points(rows, along_lon)
    circles = points[rank % along_lon + 1] - points[rank % along_lon]
    points = cut_points(orders, 4)
    own = points[rank + 1] - points[rank]
    sent = leading * ((rows - circles) * columns * 4 + circles * (orders - own) * 8)
    sent_back = leading * ((13 - circles) * own * 8 + circles * (24 - columns) * 4)
    assert forward.sent_bytes == sent
    assert inverse.sent_bytes == sent_back
    assert backward.sent_bytes == sent + sent_back
    (table,) = [t for t in there._kept.values() if t.ndim == 3]
    assert table.shape == (own, orders, 13)
    assert [t for t in back._kept.values() if t.ndim == 3] == [table]  # one for both


def test_what_is_sent_and_what_is_held():
    for axes in ({"lat": 4}, {"lat": 2, "lon": 2}, {"lon": 4}):
        _sent(axes)


@on_ranks(2)
def _other_cuts():
    mesh = world_mesh(lat=2)
    there, back = _pair(9, 16, lmax=5)
    x = torch.randn(2, 9, 16)
    expected = back(there(x))
    c = there(jigsaw.shard(x, mesh, (None, "lat", None)))
    assert torch.allclose(back(c).full_tensor(), expected, atol=1e-5)
    assert back(c).layout.spec == (None, "lat", None)
    by_degree = c.redistribute((None, "lat", None))  # cut along l, and without memory: latitude is cut
    assert torch.allclose(back(by_degree).full_tensor(), expected, atol=1e-5)
    assert back(c.redistribute((None, None, "lat"))).layout.spec == (None, "lat", None)
    assert back(c.redistribute((None, None, None))).layout.spec == (None, None, None)
    by_columns = jigsaw.shard(x, mesh, (None, None, "lat"), split={2: (0, 5, 16)})
    assert back(there(by_columns)).layout == by_columns.layout
    for bad in (x.unflatten(0, (1, 2))[0].mT, x[:, :8]):
        with pytest.raises(ShardingError, match=r"its last dims must be \(9, 16\)"):
            there(jigsaw.shard(bad, mesh, (None, "lat", None)))
    vectors = VectorSphericalHarmonicTransform(9, 16)
    with pytest.raises(ShardingError, match="the two components, is cut by"):
        vectors(jigsaw.shard(torch.randn(2, 9, 16), mesh, ("lat", None, None)))
    half = there(jigsaw.shard(x.bfloat16(), mesh, (None, "lat", None)))
    assert half.dtype == torch.complex64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(there(x), there(x.float()))


def test_other_cuts_of_coefficients_and_what_is_refused():
    _other_cuts()
    with pytest.raises(ShardingError, match="grid='healpix' of a sphere: use one of"):
        SphericalHarmonicTransform(9, 16, grid="healpix")
    with pytest.raises(ShardingError, match="nlat=1: it needs 2 rows"):
        SphericalHarmonicTransform(1, 16)
    with pytest.raises(ShardingError, match="norm='backward'"):
        InverseSphericalHarmonicTransform(9, 16, norm="backward")
    with pytest.raises(ShardingError, match="tell 1 to 9 orders apart"):
        SphericalHarmonicTransform(99, 16, lmax=12, mmax=12)


def test_modules_keep_no_tables_in_their_state():
    there, back = _pair(9, 16)
    x = torch.randn(9, 16)
    with torch.inference_mode():
        c = there(x)
    loaded = pickle.loads(pickle.dumps(there))
    assert not there.state_dict()
    assert not loaded._kept
    assert torch.equal(loaded(x), c)
    assert torch.equal(copy.deepcopy(there).float()(x), c)
    weight = torch.ones(9, 16, requires_grad=True)
    back(there(x * weight)).sum().backward()  # tables made in inference mode are good for training
    assert weight.grad is not None


# -- convolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator_type", ["dhconv", "diagonal"])
def test_spherical_convolution(operator_type):
    there, _ = _pair(11, 20, grid="legendre-gauss", lmax=8)
    back = InverseSphericalHarmonicTransform(13, 16, grid="equiangular", lmax=8)
    layer = SphericalConv(4, 6, there, back, operator_type, bias=True, dtype=torch.complex128)
    layer.bias.data.normal_()
    dense, dense_back = DenseAnalysis(there), DenseAnalysis(back)
    x = torch.randn(2, 4, 11, 20).double()
    weight = layer.weight if layer.weight.ndim == 4 else layer.weight[..., None].expand(4, 6, 8, 8)
    y = dense_back.synthesise(torch.einsum("bilm,iolm->bolm", dense.analyse(x), weight)) + layer.bias[:, None, None]
    torch.testing.assert_close(layer(x), y)
    meshes = [{"lat": 3}, {"lat": 2, "lon": 2}, {"channel": 2, "lat": 2}]
    assert_same_on_every_mesh(layer, x, meshes[:2], spec=(None, None, "lat", "lon"))
    assert_same_on_every_mesh(layer, x, meshes[2:], spec=(None, "channel", "lat", None))
    assert_same_on_every_mesh(layer, x, meshes[1:2], spec=(None, None, "lat", "lon"), build=jigsaw.parallelize)


def test_spherical_convolution_refuses():
    (there, _), (_, back) = _pair(9, 16), _pair(11, 16)
    with pytest.raises(ShardingError, match="makes 5 degrees, and the inverse takes 6"):
        SphericalConv(2, 2, there, back)
    with pytest.raises(ShardingError, match="operator_type='separable'"):
        SphericalConv(2, 2, there, _pair(9, 16)[1], "separable")


# -- documentation ----------------------------------------------------------------------------------------------------


def _run_page(mesh, x):
    page = (Path(__file__).parents[2] / "docs" / "spheres.md").read_text()
    names = {"jigsaw": jigsaw, "torch": torch, "mesh": mesh, "x": x}
    torch.manual_seed(3)
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    return {name: names[name].full_tensor() for name in ("c", "smooth", "divergent", "low", "y", "wide")}


@on_ranks(4)
def _page_on_four_ranks(x):
    return _run_page(world_mesh(lat=2, lon=2), x)


def test_the_page_runs():
    x = torch.randn(2, 4, 33, 64)
    expected = _run_page(jigsaw.init_mesh(lat=1, lon=1), x)
    assert {name: tuple(t.shape[1:]) for name, t in expected.items()} == {
        "c": (4, 33, 33),
        "smooth": (4, 33, 64),
        "divergent": (2, 2, 33, 64),
        "low": (8, 17, 32),
        "y": (8, 33, 64),
        "wide": (4, 37, 64),
    }
    for found in _page_on_four_ranks(x):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4)


def test_sizes_and_numbers_of_the_wrong_kind():
    for name, value in [("lmax", 1.5), ("mmax", "3"), ("nlat", 9.5), ("nlon", None)]:
        with pytest.raises(ShardingError, match=f"{name}={value!r} of .* must be a whole number"):
            jigsaw.nn.SphericalHarmonicTransform(**{"nlat": 9, "nlon": 16, name: value})
    with pytest.raises(ShardingError, match="lmax=0, mmax=None"):
        jigsaw.nn.SphericalHarmonicTransform(9, 16, lmax=0)
    transform, inverse = jigsaw.nn.SphericalHarmonicTransform(9, 16), jigsaw.nn.InverseSphericalHarmonicTransform(9, 16)
    with pytest.raises(ShardingError, match="it takes real numbers"):
        transform(torch.ones(9, 16, dtype=torch.complex64))
    with pytest.raises(ShardingError, match="it takes complex numbers"):
        inverse(torch.ones(5, 5))


def test_an_empty_batch():
    transform, inverse = jigsaw.nn.SphericalHarmonicTransform(9, 16), jigsaw.nn.InverseSphericalHarmonicTransform(9, 16)
    x = torch.ones(0, 9, 16, requires_grad=True)
    tile = jigsaw.shard(x, world_mesh(lat=1), (None, "lat", None))
    for each in (x, tile):
        c = transform(each)
        assert c.shape == (0, 5, 5) and c.dtype == torch.complex64
        y = inverse(c)
        assert y.shape == x.shape and y.dtype == x.dtype
        y.sum().backward()
    assert x.grad.shape == x.shape
