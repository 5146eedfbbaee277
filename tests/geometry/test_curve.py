"""Order along a curve: a step leads to a cell beside, pieces have short borders."""

import numpy as np
import pytest

import jigsaw
from jigsaw.geometry.curve import curve_order
from jigsaw.geometry.neighbors import plan_neighbors


def octahedral(n):
    """The reduced Gaussian grid O`n`: 20 points on the circles beside the poles, 4 more on each further one."""
    sines, _ = np.polynomial.legendre.leggauss(2 * n)
    sizes = [20 + 4 * k for k in range(n)]
    sizes += sizes[::-1]
    lon = np.concatenate([np.arange(size) * 360 / size for size in sizes])
    return np.repeat(np.degrees(np.arcsin(sines[::-1])), sizes), lon


@pytest.mark.parametrize("side", [2, 4, 16, 64])
def test_each_step_leads_to_a_square_beside(side):
    column, row = np.meshgrid(np.arange(side), np.arange(side))
    draw = np.random.default_rng(0).permutation(side**2)
    x, y = column.reshape(-1)[draw], row.reshape(-1)[draw]
    along = curve_order(np.degrees(np.arcsin((2 * y + 1) / side - 1)), (x + 0.5) / side * 360 - 180)
    steps = np.abs(np.diff((x[along] + side // 2) % side)) + np.abs(np.diff(y[along]))
    assert sorted(along) == list(range(side**2))
    np.testing.assert_array_equal(steps, np.ones(side**2 - 1))


def test_points_in_one_place_and_at_the_ends_of_the_map_have_an_order():
    lat, lon = np.array([90.0, 90, -90, 0, 0, 0]), np.array([0.0, 0, 360, 360, 0, -1e-18])
    along = curve_order(lat, lon).tolist()
    assert sorted(along) == list(range(6))
    assert along.index(0) < along.index(1) and along.index(3) < along.index(4)


def rows_that_travel(table, pieces):
    points = [table.targets * piece // pieces for piece in range(pieces + 1)]
    plans = [plan_neighbors(table, points, points, piece) for piece in range(pieces)]
    return sum(rows for plan in plans for _, rows in plan.receives) / table.targets


def test_pieces_along_the_curve_have_short_borders():
    lat, lon = octahedral(24)
    along = curve_order(lat, lon)
    by_circles, by_curve = (jigsaw.Neighbors.of_points(lat[at], lon[at], 9) for at in (slice(None), along))
    found = {n: (rows_that_travel(by_circles, n), rows_that_travel(by_curve, n)) for n in (16, 64)}
    assert all(curve < 0.6 * circles for circles, curve in found.values()), found
