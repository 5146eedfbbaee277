"""Quadrature in latitude and associated Legendre functions, in numpy: the tables of spherical harmonic transforms.

Each order m stands by itself, so a rank makes the table of its own orders alone.  At order 500 the first functions of a
table are below 1e-400 near the poles and grow along the degrees.  So each is a number with a separate exponent until
double precision can hold it (Schaeffer, arXiv 1202.6522, section 4; Fukushima's X-numbers).  The convention is that of
torch-harmonics.

>>> colatitudes, weights = latitude_quadrature("legendre-gauss", 4)
>>> round(float((weights * np.cos(colatitudes) ** 6).sum()), 12) == round(2 / 7, 12)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Interval

Reals = NDArray[np.float64]

SPHERE_GRIDS = ("equiangular", "legendre-gauss", "lobatto")

_TINY = 1e-150  # the unit of an exponent: squares of it and of its inverse are still finite
_ORDERS_AT_ONCE = 32  # number of orders that go through the recurrence together, so that they fit in a cache


# -- quadrature -------------------------------------------------------------------------------------------------------


def latitude_quadrature(grid: str, rows: int) -> tuple[Reals, Reals]:
    """Return colatitudes of the rows of a grid, from the north pole on, and their weights, which sum to 2.

    *Raises*: `ShardingError` for an unknown grid, or too few rows for it.
    """
    least = 1 if grid == "legendre-gauss" else 2
    if grid not in SPHERE_GRIDS:
        raise ShardingError(f"grid={grid!r} of a sphere: use one of {SPHERE_GRIDS}")
    if rows < least:
        raise ShardingError(f"grid={grid!r} with nlat={rows}: it needs {least} rows of latitude or more")
    if grid == "equiangular":
        return _clenshaw_curtiss(rows)
    return _gauss_points(rows) if grid == "legendre-gauss" else _lobatto_points(rows)


def _clenshaw_curtiss(rows: int) -> tuple[Reals, Reals]:
    """Return equal steps from pole to pole, with their weights."""
    steps = rows - 1
    theta = np.linspace(0, np.pi, rows)
    j = np.arange(1, steps // 2 + 1)
    terms = np.where(2 * j == steps, 1.0, 2.0) / (4 * j**2 - 1)
    weights = (1 - np.cos(2 * theta[:, None] * j) @ terms) * 2 / steps
    weights[[0, -1]] /= 2
    return theta, weights


def _last_two_legendre(degree: int, x: Reals) -> tuple[Reals, Reals]:
    before, last = np.zeros_like(x), np.ones_like(x)
    for n in range(1, degree + 1):
        before, last = last, ((2 * n - 1) * x * last - (n - 1) * before) / n
    return last, before


def _gauss_points(rows: int) -> tuple[Reals, Reals]:
    theta = np.linspace(0.75, rows - 0.25, rows) * np.pi / (rows + 0.5)
    slope = np.ones(rows)
    for _ in range(10):  # Newton's method for the angle, which stays accurate where its cosine is nearly 1
        last, before = _last_two_legendre(rows, np.cos(theta))
        slope = rows * (np.cos(theta) * last - before) / np.sin(theta)
        theta = theta - last / slope
    return theta, 2 / slope**2


def _lobatto_points(rows: int) -> tuple[Reals, Reals]:
    n = rows - 1
    x = np.cos(np.linspace(0, np.pi, rows))
    for _ in range(20):
        last, before = _last_two_legendre(n, x)
        x = x - (x * last - before) / (rows * last)
    last, _ = _last_two_legendre(n, x)
    return np.arccos(np.clip(x, -1, 1)), 2 / (n * rows * last**2)


# -- Legendre functions -----------------------------------------------------------------------------------------------


def legendre_table(
    theta: Reals, degrees: int, orders: Interval, phase: bool = True, dtype: DTypeLike = np.float64
) -> NDArray[np.floating]:
    r"""Return P[m, l, k] = N(l, m) P_l^m(cos theta_k) for the orders m of an interval and l from 0, zero where l < m.

    Orthonormal: ``P[m, l] exp(i m phi)`` has a square that integrates to 1 over the sphere; with the Condon-Shortley
    `phase` it is the spherical harmonic Y_lm.
    """
    first, stop = orders
    out = np.zeros((stop - first, degrees, len(theta)), dtype)
    for low in range(first, stop, _ORDERS_AT_ONCE):
        high = min(low + _ORDERS_AT_ONCE, stop)
        out[low - first : high - first] = _some_orders(theta, degrees, (low, high))
    return _with_phase(out, first) if phase else out


def legendre_derivatives(
    theta: Reals, degrees: int, orders: Interval, phase: bool = True, dtype: DTypeLike = np.float64
) -> NDArray[np.floating]:
    """Return D[0, m, l, k] = dP/dtheta and D[1, m, l, k] = m P / sin theta of `legendre_table`, finite at the poles.

    Both are sums of P at neighboring orders and degrees, so nothing is divided by the sine (as in torch-harmonics).
    """
    first, stop = orders
    out = np.zeros((2, stop - first, degrees, len(theta)), dtype)
    degree = np.arange(degrees, dtype=np.float64)
    for low in range(first, stop, _ORDERS_AT_ONCE):
        high = min(low + _ORDERS_AT_ONCE, stop)
        m = np.arange(low, high)[:, None]
        p = _some_orders(theta, degrees + 1, (low - 1, high + 1))
        below, above = p[:-2], p[2:]  # for the orders m - 1 and m + 1

        def root(values: Reals) -> Reals:
            return np.sqrt(np.maximum(values, 0))[..., None]

        part = out[:, low - first : high - first]
        part[0] = (
            root((degree + m) * (degree - m + 1)) * below[:, :degrees]
            - root((degree - m) * (degree + m + 1)) * above[:, :degrees]
        ) / 2
        side = (
            root((degree - m + 1) * (degree - m + 2)) * below[:, 1:]
            + root((degree + m + 1) * (degree + m + 2)) * above[:, 1:]
        )
        part[1] = root((2 * degree + 1) / (2 * degree + 3)) * side / 2
    return _with_phase(out, first) if phase else out


def _with_phase(table: NDArray[np.floating], first: int) -> NDArray[np.floating]:
    table[..., (first + 1) % 2 :: 2, :, :] *= -1
    return table


def _some_orders(theta: Reals, degrees: int, orders: Interval) -> Reals:
    """Return P of consecutive orders, without phase; -1 may be the first, for derivatives: minus that of order 1."""
    m = np.arange(max(orders[0], 0), orders[1])
    x, out, squares = np.cos(theta), np.zeros((len(m), degrees, len(theta))), (m[:, None] * 1.0) ** 2
    last, exponent = _sectoral_functions(np.sin(theta), m)
    before, counts = np.zeros_like(last), (exponent == 0) * 1.0
    for degree in range(degrees):
        going = min(max(degree - m[0], 0), len(m))  # number of orders below l; order l starts in this step
        if going:
            k = squares[:going]
            a = np.sqrt((4.0 * degree**2 - 1) / (degree**2 - k))
            b = a * np.sqrt(((degree - 1.0) ** 2 - k) / (4.0 * (degree - 1) ** 2 - 1))
            now = (a * x) * last[:going] - b * before[:going]
            before[:going], last[:going] = last[:going], now
        if degree % 16 == 0:  # in 16 steps values grow by far less than 1e150
            risen = (np.abs(last) > 1) & (exponent < 0)
            last[risen] *= _TINY
            before[risen] *= _TINY
            exponent[risen] += 1
            counts = (exponent == 0) * 1.0
        begun = min(max(degree + 1 - m[0], 0), len(m))
        np.multiply(last[:begun], counts[:begun], out=out[:begun, degree])
    return np.concatenate([-out[1:2], out]) if orders[0] < 0 else out


def _sectoral_functions(sine: Reals, orders: NDArray[np.int_]) -> tuple[Reals, NDArray[np.int_]]:
    """Return P of degree m at the orders m, as numbers and exponents of 1e150."""
    value, exponent = np.full_like(sine, np.sqrt(1 / (4 * np.pi))), np.zeros(len(sine), np.int_)
    values, exponents = np.empty((len(orders), len(sine))), np.empty((len(orders), len(sine)), np.int_)
    for m in range(orders[-1] + 1):
        if m:
            value = value * (np.sqrt((2 * m + 1) / (2 * m)) * sine)
            small = np.abs(value) < _TINY
            value[small] /= _TINY
            exponent[small] -= 1
        if m >= orders[0]:
            values[m - orders[0]], exponents[m - orders[0]] = value, exponent
    return values, exponents
