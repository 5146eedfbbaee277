"""HEALPix numbers and neighbors against cdshealpix."""

import numpy as np
import pytest

from jigsaw.geometry.healpix import (
    _faces_of_nested,
    _faces_of_rings,
    _nested_of_faces,
    _rings_of_faces,
    healpix_degrees,
    healpix_neighbors,
)

cdshealpix = pytest.importorskip("cdshealpix")
rings = pytest.importorskip("cdshealpix.ring")
THEIRS = ["S", "SE", "E", "SW", "C", "NE", "W", "NW", "N"]
OURS = ["SW", "W", "NW", "N", "NE", "E", "SE", "S"]


@pytest.mark.parametrize("depth", range(6))
def test_nested_neighbors_are_theirs(depth):
    cells = np.arange(12 * 4**depth)
    theirs = np.asarray(cdshealpix.nested.neighbours(cells.astype(np.uint64), depth)).astype(np.int64)
    np.testing.assert_array_equal(healpix_neighbors(2**depth)(cells), theirs[:, [THEIRS.index(k) for k in OURS]])


@pytest.mark.parametrize("depth", range(6))
def test_numbers_along_rings_are_theirs(depth):
    n, cells = 2**depth, np.arange(12 * 4**depth)
    rings = _rings_of_faces(n, *_faces_of_nested(n, cells))
    np.testing.assert_array_equal(rings, np.asarray(cdshealpix.to_ring(cells.astype(np.uint64), depth)))
    np.testing.assert_array_equal(_nested_of_faces(n, *_faces_of_rings(n, rings)), cells)


@pytest.mark.parametrize("depth", [0, 1, 3, 7])
@pytest.mark.parametrize("nested", [True, False])
def test_centers_are_theirs(depth, nested):
    n, cells = 2**depth, np.arange(12 * 4**depth)
    lon, lat = cdshealpix.healpix_to_lonlat(cells, depth) if nested else rings.healpix_to_lonlat(cells, n)
    ours = healpix_degrees(n, nested, cells)
    np.testing.assert_allclose(ours, [lat.to_value("deg"), lon.to_value("deg")], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 3, 6, 7])
def test_ring_neighbors_of_any_nside_are_mutual(n):
    cells = np.arange(12 * n**2)
    np.testing.assert_array_equal(_rings_of_faces(n, *_faces_of_rings(n, cells)), cells)
    table = healpix_neighbors(n, nested=False)(cells)
    assert np.count_nonzero(table < 0) == 24  # eight corners of three faces, each of three cells
    for cell, row in enumerate(table):
        for other in row[row >= 0]:
            assert cell in table[other]
