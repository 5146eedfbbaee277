r"""Spherical harmonic transforms of fields that are cut along latitude and longitude.

c[l, m] = sum over the rows k of w_k P_l^m(cos theta_k) x_m(theta_k). x_m are the Fourier modes of the circle of
latitude theta_k, w_k quadrature weights and P associated Legendre functions (`jigsaw.nn.spheres.legendre_tables`). The
inverse sums over the degrees l.  Grids, norms and truncation are those of torch-harmonics, and on one rank this is its
`RealSHT`.

Fourier modes need whole circles; Legendre functions need whole meridians, of one order m each.  So where longitude is
cut, its axes first cut latitude finer.  Then all axes cut the orders, and **stay** there: a rank has some orders, all
degrees, and the Legendre functions of its own orders alone.  The inverse returns to the old cuts of latitude and
longitude, because the cut of the orders remembers them (`Cut.source`).

Example: four ranks on lat=2, lon=2, x [8, 33, 64] cut at row 17 and column 32. Rank 0 has rows 0:17 of columns 0:32. It
gives rank 1 rows 9:17 and gets the other half of rows 0:9.  It transforms these nine circles into 33 modes each, keeps
orders 0:9 of the 33, and gets these of all other rows. With the table [9, 33, 33] of its orders it makes c [8, 33, 9].

Sources: Driscoll and Healy, Computing Fourier transforms and convolutions on the 2-sphere, 1994; Schaeffer, Efficient
spherical harmonic transforms, arXiv 1202.6522, 2013; Bonev et al., Spherical Fourier neural operators, arXiv
2306.03838.

>>> transform = jigsaw.nn.SphericalHarmonicTransform(33, 64, grid="legendre-gauss")
>>> inverse = jigsaw.nn.InverseSphericalHarmonicTransform(33, 64, grid="legendre-gauss")
>>> tile = jigsaw.shard(torch.randn(8, 33, 64), jigsaw.init_mesh(lat=1, lon=1), (None, "lat", "lon"))
>>> smooth = inverse(transform(tile))
>>> torch.allclose(inverse(transform(smooth)), smooth, atol=1e-4)
True
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, Interval, cut_points, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.nn.spheres.legendre_tables import latitude_quadrature, legendre_derivatives, legendre_table
from jigsaw.nn.spheres.sphere import stretched_cut
from jigsaw.nn.stencils.stencil import empty_result, single_cut
from jigsaw.tile.tile import Tile

_NAME = "a spherical harmonic transform"

# -- where the axes go, in integers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HarmonicPlan:
    """Layouts of a transform: the `field` [..., lat, lon], the same of whole `circles`, and `orders` [..., lat, m]."""

    field: Layout
    circles: Layout
    orders: Layout

    def with_rows(self, rows: int) -> Layout:
        return self.orders.replace_dim(self.orders.ndim - 2, whole_dim(rows))

    def modes(self, count: int) -> Layout:
        return self.circles.replace_dim(self.circles.ndim - 1, whole_dim(count))

    def held_orders(self, coord: MeshCoordinate) -> Interval:
        return self.orders.owned(coord)[-1]


@lru_cache(maxsize=1024)
def plan_harmonics(field: Layout, orders: int) -> HarmonicPlan:
    """Plan how a field of that layout, without halo, gets to the first `orders` orders.

    *Raises*: `ShardingError` for latitudes or longitudes that were flattened with other dims.
    """
    n = field.ndim
    lat, lon = (replace(single_cut(field, d, _NAME), source=()) for d in (n - 2, n - 1))
    axes, sizes = (*lat.axes, *lon.axes), dict(field.axes)
    circles = field.replace_dim(n - 1, whole_dim(lon.size)).replace_dim(n - 2, refine_cut(lat, lon.axes, sizes))
    cut = whole_dim(orders)
    if axes:
        points = cut_points(orders, math.prod(sizes[a] for a in axes))
        cut = Cut(orders, points, axes, source=(lat, lon))
    return HarmonicPlan(field, circles, field.replace_dim(n - 2, whole_dim(lat.size)).replace_dim(n - 1, cut))


@lru_cache(maxsize=1024)
def plan_inverse_harmonics(coefficients: Layout, rows: int, columns: int) -> HarmonicPlan:
    """Plan how coefficients [..., l, m] of that layout, without halo, become a field of `rows` and `columns`.

    The field gets the cuts that the cut of the orders remembers; without any, latitude is cut.
    """
    n = coefficients.ndim
    of_l, of_m = (single_cut(coefficients, d, _NAME) for d in (n - 2, n - 1))
    axes, sizes = (*of_m.axes, *of_l.axes), dict(coefficients.axes)
    bare = coefficients.replace_dim(n - 2, whole_dim(rows))
    orders = bare.replace_dim(n - 1, refine_cut(of_m, of_l.axes, sizes))
    lat, lon = whole_dim(rows), whole_dim(columns)
    if axes:
        lat = Cut(rows, cut_points(rows, math.prod(sizes[a] for a in axes)), axes)
        for was in (of_m.source, of_l.source):
            if len(was) == 2 and sorted(a for c in was for a in c.axes) == sorted(axes):
                lat, lon = stretched_cut(was[0], rows), stretched_cut(was[1], columns)
                break
    whole = bare.replace_dim(n - 1, whole_dim(columns))
    circles = whole.replace_dim(n - 2, refine_cut(lat, lon.axes, sizes))
    return HarmonicPlan(whole.replace_dim(n - 2, lat).replace_dim(n - 1, lon), circles, orders)


# -- tables -----------------------------------------------------------------------------------------------------------


class TableKey(NamedTuple):
    """Key of a table of Legendre functions, or of their derivatives."""

    grid: str
    rows: int
    degrees: int
    orders: Interval
    phase: bool
    of_vectors: bool
    dtype: torch.dtype
    device: torch.device


# All modules of a process that need the same table share it, as a transform and its inverse do.
_kept_tables: MutableMapping[TableKey, Tensor] = WeakValueDictionary()


def _make_table(key: TableKey) -> Tensor:
    theta, _ = latitude_quadrature(key.grid, key.rows)
    make = legendre_derivatives if key.of_vectors else legendre_table
    dtype = np.float32 if key.dtype == torch.float32 else np.float64
    return _plain_constant(make(theta, key.degrees, key.orders, key.phase, dtype), key.dtype, key.device)


def _plain_constant(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the table is kept, and may be used in training later
        return torch.from_numpy(values).to(device, dtype)


def truncated_degrees(nlat: int, nlon: int, lmax: int | None, mmax: int | None, grid: str) -> int:
    """Return the number of degrees and orders that a grid resolves: torch-harmonics' rule, one number for both.

    >>> from jigsaw.nn.spheres.spherical_harmonics import truncated_degrees
    >>> truncated_degrees(721, 1440, None, None, "equiangular"), truncated_degrees(32, 64, 20, None, "legendre-gauss")
    (361, 20)
    """
    of_rows = {"legendre-gauss": nlat, "lobatto": nlat - 1}.get(grid, (nlat + 1) // 2)
    return min(of_rows if lmax is None else lmax, nlon // 2 + 1 if mmax is None else mmax)


# -- modules ----------------------------------------------------------------------------------------------------------


class _SphereTransform(nn.Module):
    """Shared part of the transforms: the grid, and the tables of the orders that this rank has worked on."""

    of_vectors = False

    def __init__(
        self,
        nlat: int,
        nlon: int,
        lmax: int | None = None,
        mmax: int | None = None,
        grid: str = "equiangular",
        norm: str = "ortho",
        csphase: bool = True,
    ) -> None:
        super().__init__()
        for name, size in (("nlat", nlat), ("nlon", nlon), ("lmax", lmax), ("mmax", mmax)):
            if not isinstance(size, Integral) and (size is not None or name in ("nlat", "nlon")):
                raise ShardingError(f"{name}={size!r} of {_NAME} must be a whole number")
        _, weights = latitude_quadrature(grid, nlat)
        if norm not in ("ortho", "four-pi", "schmidt"):
            raise ShardingError(f"norm={norm!r} of {_NAME}: use 'ortho', 'four-pi' or 'schmidt'")
        self.lmax = self.mmax = truncated_degrees(nlat, nlon, lmax, mmax, grid)
        if not 1 <= self.mmax <= nlon // 2 + 1:
            raise ShardingError(
                f"lmax={lmax}, mmax={mmax}: nlon={nlon} columns tell 1 to {nlon // 2 + 1} orders apart; take as many"
            )
        self.nlat, self.nlon, self.grid, self.norm, self.csphase = nlat, nlon, grid, norm, csphase
        degree = np.arange(self.lmax, dtype=np.float64)
        of_norm = {"ortho": 0 * degree + 1, "four-pi": 0 * degree + 4 * math.pi}
        scale = np.sqrt(of_norm.get(norm, 4 * math.pi / (2 * degree + 1)))
        self._constants = {"weights": 2 * math.pi * weights[:, None], "scale": scale[:, None]}
        if self.of_vectors:
            self._constants["laplacian"] = 1 / np.maximum(degree * (degree + 1), 1)[:, None]
        self._kept: dict[Any, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def extra_repr(self) -> str:
        size = f"nlat={self.nlat}, nlon={self.nlon}, lmax={self.lmax}, mmax={self.mmax}"
        return f"{size}, grid={self.grid!r}, norm={self.norm!r}, csphase={self.csphase}"

    def _table(self, orders: Interval, like: Tensor) -> Tensor:
        dtype = torch.float32 if like.dtype in (torch.float32, torch.complex64) else torch.float64
        key = TableKey(self.grid, self.nlat, self.lmax, orders, self.csphase, self.of_vectors, dtype, like.device)
        if key not in self._kept:
            table = _kept_tables.get(key)
            _kept_tables[key] = self._kept[key] = _make_table(key) if table is None else table
        return self._kept[key]

    def _constant(self, name: str, like: Tensor) -> Tensor:
        dtype = torch.float32 if like.dtype in (torch.float32, torch.complex64) else torch.float64
        key = name, dtype, like.device
        if key not in self._kept:
            self._kept[key] = _plain_constant(self._constants[name], dtype, like.device)
        return self._kept[key]

    def _checked_input(self, x: Any, sizes: tuple[int, int], of_coefficients: bool = False) -> Any:
        """Return `x` without halo, in single precision or better."""
        if x.dtype.is_complex != of_coefficients:
            kinds = ("real", "complex") if of_coefficients else ("complex", "real")
            raise ShardingError(f"{type(self).__name__} of {kinds[0]} {x.dtype}: it takes {kinds[1]} numbers")
        wanted = (2, *sizes) if self.of_vectors else sizes
        if tuple(x.shape[-len(wanted) :]) != wanted:
            raise ShardingError(
                f"{type(self).__name__} of shape {tuple(x.shape)}: its last dims must be {wanted}, those of "
                f"{self.extra_repr()}"
            )
        if self.of_vectors and isinstance(x, Tile) and x.layout.is_cut(x.ndim - 3):
            raise ShardingError(
                f"{type(self).__name__}: dim -3, the two components, is cut by {x.layout.dim_axes(x.ndim - 3)}; leave "
                "it whole, and cut another dim with tile.redistribute"
            )
        x = x.owned() if isinstance(x, Tile) else x
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _legendre_product(x: Tensor, table: Tensor, inverse: bool) -> Tensor:
    """Map complex [..., lat, m] to [..., l, m], or back, by a real table [m, l, lat]: one matrix for each order."""
    if not x.numel():  # this rank has no orders, or the batch is empty
        return empty_result((*x.shape[:-2], table.shape[2 if inverse else 1], x.shape[-1]), x, saved=0)
    equation = "...lmr,mlk->...kmr" if inverse else "...kmr,mlk->...lmr"
    with torch.autocast(x.device.type, enabled=False):
        return torch.view_as_complex(torch.einsum(equation, torch.view_as_real(x.resolve_conj()), table).contiguous())


class SphericalHarmonicTransform(_SphereTransform):
    """Transform to the coefficients c[l, m] of a real field on a sphere; torch-harmonics' `RealSHT`, and its arguments.

    *Shapes*: [..., nlat, nlon] -> complex [..., lmax, mmax]. Per rank the orders are cut by all axes that cut latitude
    and longitude, degrees are whole, and leading dims stay as they are. *Holds*: the Legendre functions of a rank's own
    orders, about mmax / P x lmax x nlat numbers, in the dtype of x. *Sends*: let there be N leading elements on P = p q
    ranks, p along latitude and q along longitude. Where q > 1, (1 - 1/q) N nlat nlon / P real numbers; then (1 - 1/P) N
    nlat mmax / P complex ones. Backward the same, of gradients. *Raises*: `ShardingError` for an unknown grid or norm,
    more orders than nlon resolves, other sizes, and latitudes or longitudes that were flattened with other dims. Source
    of the method: see `jigsaw.nn.spheres.spherical_harmonics`.

    >>> transform = jigsaw.nn.SphericalHarmonicTransform(9, 16)
    >>> tile = jigsaw.shard(torch.ones(2, 9, 16), jigsaw.init_mesh(lat=1, lon=1), (None, "lat", "lon"))
    >>> c = transform(tile)
    >>> c.shape, round(c[0, 0, 0].real.item() ** 2 / torch.pi, 5)
    (torch.Size([2, 5, 5]), 4.0)
    """

    def forward(self, x: Any) -> Any:
        x = self._checked_input(x, (self.nlat, self.nlon))
        if not isinstance(x, Tile):
            return self._analyze(self._fourier_modes(x), (0, self.mmax))
        plan = plan_harmonics(x.layout, self.mmax)
        modes = cast(Tile, self._fourier_modes(x.with_layout(plan.circles))).with_layout(plan.orders)
        c = self._analyze(modes.local, plan.held_orders(x.coordinate))
        return Tile(c, plan.with_rows(self.lmax), x.mesh)

    def _fourier_modes(self, x: Any) -> Any:
        if isinstance(x, Tensor) and not x.numel():  # MKL refuses an empty batch
            return torch.complex(x, x)[..., : self.mmax]
        return torch.fft.rfft(x, norm="forward")[..., : self.mmax]

    def _analyze(self, modes: Tensor, orders: Interval) -> Tensor:
        """Map [..., lat, m] to [..., l, m] for some orders."""
        c = self._contract(modes * self._constant("weights", modes), self._table(orders, modes))
        return c if self.norm == "ortho" else c * self._constant("scale", c)

    def _contract(self, modes: Tensor, table: Tensor) -> Tensor:
        return _legendre_product(modes, table, inverse=False)


class InverseSphericalHarmonicTransform(_SphereTransform):
    """Transform from coefficients c[l, m] to their real field; torch-harmonics' `InverseRealSHT`, and its arguments.

    *Shapes*: complex [..., lmax, mmax] -> [..., nlat, nlon]. Per rank cut as the field of the coefficients was, at
    proportionate points where the grid has other sizes. Without such a field, latitude is cut. *Holds*: the same table
    as the transform, once for both. *Sends*: the same as the transform, the other way.  Where degrees are cut too, an
    exchange first makes them whole. *Raises*: as `SphericalHarmonicTransform`.

    >>> inverse = jigsaw.nn.InverseSphericalHarmonicTransform(9, 16)
    >>> c = torch.zeros(5, 5, dtype=torch.complex64)
    >>> c[1, 0] = 1
    >>> field = inverse(c)  # the cosine of the colatitude
    >>> field.shape, torch.allclose(field[0], torch.full((16,), (3 / (4 * torch.pi)) ** 0.5))
    (torch.Size([9, 16]), True)
    """

    def forward(self, c: Any) -> Any:
        c = self._checked_input(c, (self.lmax, self.mmax), of_coefficients=True)
        if not isinstance(c, Tile):
            return self._fields_of_modes(self._synthesize(c, (0, self.mmax)))
        plan = plan_inverse_harmonics(c.layout, self.nlat, self.nlon)
        c = c.with_layout(plan.with_rows(self.lmax))
        modes = Tile(self._synthesize(c.local, plan.held_orders(c.coordinate)), plan.orders, c.mesh)
        field = self._fields_of_modes(modes.with_layout(plan.modes(self.mmax)))
        return field.with_layout(plan.field)

    def _fields_of_modes(self, modes: Any) -> Any:
        if isinstance(modes, Tensor) and not modes.numel():
            return modes.real[..., :1].expand(*modes.shape[:-1], self.nlon)
        return torch.fft.irfft(modes, n=self.nlon, norm="forward")

    def _synthesize(self, c: Tensor, orders: Interval) -> Tensor:
        """Map [..., l, m] to [..., lat, m] for some orders."""
        c = c if self.norm == "ortho" else c / self._constant("scale", c)
        modes = self._contract(c, self._table(orders, c))
        real = [m - orders[0] for m in (0, self.nlon / 2) if orders[0] <= m < orders[1]]
        if real and modes.numel():  # a GPU's irfft may not ignore imaginary parts, as the CPU's does
            keep = torch.ones(modes.shape[-1], 2, dtype=modes.real.dtype, device=modes.device)
            for m in real:
                keep[int(m), 1] = 0
            modes = torch.view_as_complex(torch.view_as_real(modes) * keep)
        return modes

    def _contract(self, c: Tensor, table: Tensor) -> Tensor:
        return _legendre_product(c, table, inverse=True)


class VectorSphericalHarmonicTransform(SphericalHarmonicTransform):
    """Transform to spheroidal and toroidal coefficients of a tangential vector field: torch-harmonics' `RealVectorSHT`.

    Components point along colatitude (southward) and longitude (eastward).  A gradient has only spheroidal
    coefficients, which are those of its scalar.

    *Shapes*: [..., 2, nlat, nlon] -> complex [..., 2, lmax, mmax], cut as those of `SphericalHarmonicTransform`.
    *Holds*, *Sends*: twice as much as that, for both components. *Raises*: as that; `ShardingError` also where the
    components are cut.

    >>> transform = jigsaw.nn.VectorSphericalHarmonicTransform(9, 16)
    >>> transform(torch.randn(3, 2, 9, 16)).shape
    torch.Size([3, 2, 5, 5])
    """

    of_vectors = True

    def _contract(self, modes: Tensor, table: Tensor) -> Tensor:
        c = _of_both_components(modes, table, inverse=False)
        return c * self._constant("laplacian", c)


class InverseVectorSphericalHarmonicTransform(InverseSphericalHarmonicTransform):
    """Transform from spheroidal and toroidal coefficients to their vector field: torch-harmonics'
    `InverseRealVectorSHT`.

    *Shapes*: complex [..., 2, lmax, mmax] -> [..., 2, nlat, nlon], cut as by `InverseSphericalHarmonicTransform`.
    *Holds*, *Sends*, *Raises*: as `VectorSphericalHarmonicTransform`.

    >>> inverse = jigsaw.nn.InverseVectorSphericalHarmonicTransform(9, 16)
    >>> c = torch.zeros(2, 5, 5, dtype=torch.complex64)
    >>> c[0, 1, 0] = -1  # the gradient of minus the cosine of the colatitude points southward
    >>> inverse(c)[0, 4, 0].item() > 0
    True
    """

    of_vectors = True

    def _contract(self, c: Tensor, table: Tensor) -> Tensor:
        return _of_both_components(c, table, inverse=True)


def _of_both_components(x: Tensor, tables: Tensor, inverse: bool) -> Tensor:
    """Return (D x_0 + s i E x_1, - D x_1 + s i E x_0). D and E are the two tables, s = 1 for the inverse, else -1."""
    along, across = (_legendre_product(x, table, inverse) for table in tables)
    (first, second), (other_first, other_second) = along.unbind(-3), across.unbind(-3)
    i = 1j if inverse else -1j
    return torch.stack([first + i * other_second, i * other_first - second], -3)


class SphericalConv(nn.Module):
    """Layer y = S^-1(W S(x)) of spherical Fourier neural operators: complex weights mix coefficients over channels.

    They are one matrix for each degree l ("dhconv"), or for each degree and order ("diagonal"). The former is a
    convolution with a filter round a pole (Driscoll and Healy, 1994; Bonev et al., arXiv 2306.03838).  The transforms
    are separate modules, so that layers share them and their tables; between different grids the field is resampled.

    *Shapes*: [..., in, nlat, nlon] -> [..., out, nlat', nlon'], cut alike; weight complex [in, out, lmax], or [in, out,
    lmax, mmax], whole on every rank; bias [out]. *Sends*: what the transforms send. Where channels are cut, also one
    all-reduce of the coefficients over their axes, and y has whole channels. *Raises*: `ShardingError` for transforms
    of other degrees, or another `operator_type`.

    >>> there = jigsaw.nn.SphericalHarmonicTransform(9, 16)
    >>> back = jigsaw.nn.InverseSphericalHarmonicTransform(9, 16)
    >>> layer = jigsaw.nn.SphericalConv(3, 4, there, back)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 9, 16), jigsaw.init_mesh(lat=1), (None, None, "lat", None))).shape
    torch.Size([2, 4, 9, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        forward_transform: SphericalHarmonicTransform,
        inverse_transform: InverseSphericalHarmonicTransform,
        operator_type: str = "dhconv",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.complex64,
    ) -> None:
        super().__init__()
        forth, back = forward_transform, inverse_transform
        if (forth.lmax, forth.mmax) != (back.lmax, back.mmax):
            raise ShardingError(
                f"SphericalConv: the forward transform makes {forth.lmax} degrees, and the inverse takes {back.lmax}; "
                "give both the lesser lmax"
            )
        if operator_type not in ("dhconv", "diagonal"):
            raise ShardingError(f"SphericalConv: operator_type={operator_type!r}; use 'dhconv' or 'diagonal'")
        self.operator_type, self.forward_transform, self.inverse_transform = operator_type, forth, back
        modes = (forth.lmax,) if operator_type == "dhconv" else (forth.lmax, forth.mmax)
        weight = torch.randn(in_channels, out_channels, *modes, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight * in_channels**-0.5)
        self.bias = nn.Parameter(weight.new_zeros(out_channels, dtype=dtype.to_real())) if bias else None

    def forward(self, x: Any) -> Any:
        equation = "...ilm,iol->...olm" if self.operator_type == "dhconv" else "...ilm,iolm->...olm"
        y = self.inverse_transform(torch.einsum(equation, self.forward_transform(x), self.weight))
        return y if self.bias is None else y + self.bias[:, None, None]
