"""HEALPix grids: numbers of cells, who is beside whom, and where each lies.

The sphere is twelve faces of nside x nside cells. In a plane that is turned by 45 degrees the faces are unit squares,
with x to the north-east and y to the north-west. Face 4 + i at the equator is the square (i, -i), the northern face i
is at (i + 1, -i) and the southern face 8 + i at (i, -i - 1).  A face is thus known by p + q of its square (p, q): 0 at
the equator, 1 in the north, -1 in the south.  Around a pole the four faces meet, each turned by 90 degrees.

Source: Gorski et al., "HEALPix: a framework for high-resolution discretization", arXiv astro-ph/0409513.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import ShardingError

Integers = NDArray[np.int64]
_OFFSETS = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))  # SW, W, NW, N, NE, E, SE, S


def healpix_neighbors(nside: int, nested: bool = True) -> Callable[[Integers], Integers]:
    """Return a function of cells, [n], that gives the 8 neighbors of each, [n, 8], and -1 where one has 7."""
    if nside < 1 or (nested and nside & (nside - 1)):
        raise ShardingError(
            f"nside={nside} must be {'a power of two for nested numbers' if nside > 0 and nested else '1 or more'}"
        )
    return partial(_cells_beside, nside, nested)


def _cells_beside(nside: int, nested: bool, cells: Integers) -> Integers:
    to_cells = _nested_of_faces if nested else _rings_of_faces
    face, x, y = (_faces_of_nested if nested else _faces_of_rings)(nside, cells)
    columns = [_cell_beside(nside, face, x + dx, y + dy) for dx, dy in _OFFSETS]
    return np.stack([np.where(f < 0, -1, to_cells(nside, np.maximum(f, 0), a, b)) for f, a, b in columns], axis=-1)


def healpix_degrees(nside: int, nested: bool, cells: Integers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return latitude and longitude of the centers of cells, in degrees: [n] each, longitudes from 0 to 360."""
    face, x, y = (_faces_of_nested if nested else _faces_of_rings)(nside, cells)
    ring, place = _ring_and_place(nside, face, x, y)
    from_pole = np.minimum(ring, 4 * nside - ring)
    in_cap = from_pole < nside
    # in the caps 1 - sin(lat) is ring² / 3n², by half angles, whose digits last up to the pole
    cap = 90 - np.degrees(2 * np.arcsin(np.minimum(from_pole, nside) / (nside * 6**0.5)))
    belt = np.degrees(np.arcsin(np.clip((4 - 2 * ring / nside) / 3, -1, 1)))
    lat = np.where(in_cap, np.where(ring < nside, cap, -cap), belt)
    shift = np.where(in_cap | ((ring - nside) % 2 == 0), 0.5, 0.0)
    return lat, (place + shift) * 90 / np.minimum(from_pole, nside)


def _cell_beside(n: int, face: Integers, x: Integers, y: Integers) -> tuple[Integers, Integers, Integers]:
    """Return face and place of a cell that may lie one row beyond a face; face -1 where there is none."""
    band, longitude, last = 1 - face // 4, face % 4, n - 1
    over_x, over_y = x // n, y // n  # -1, 0 or 1
    x, y = x % n, y % n
    to_band = band + over_x + over_y
    over_pole, is_corner = np.abs(to_band) == 3, (over_x != 0) & (over_y != 0)
    # at a corner where three faces meet, no cell lies diagonally beyond it
    is_none = is_corner & ((np.abs(to_band) == 2) | ((over_x != over_y) & (band != 0)))
    # a square beyond the map is another face around its pole, turned by 90 degrees, or by 180 across the pole
    is_turned = (np.abs(to_band) == 2) & ~is_corner
    turned_to = 4 * (1 - band) + (longitude + np.where(over_pole, 2, over_x - over_y)) % 4
    beside = _face_of_square(longitude + (band > 0) + over_x, to_band)
    to_face = np.where(is_turned | over_pole, turned_to, beside)
    by_x, by_y = is_turned & (over_x != 0), is_turned & (over_y != 0)
    to_x = np.select([by_x, by_y, over_pole], [y, last - y, last - x], x)
    to_y = np.select([by_x, by_y, over_pole], [last - x, x, last - y], y)
    return np.where(is_none, -1, to_face), to_x, to_y


def _face_of_square(p: Integers, band: Integers) -> Integers:
    """Return the face of the square (p, band - p) of the plane."""
    return np.select([band == -1, band == 0], [8 + p % 4, 4 + p % 4], (p - 1) % 4)


def _faces_of_nested(n: int, cells: Integers) -> tuple[Integers, Integers, Integers]:
    """Return face, x and y: the bits of a nested number are those of y and x in turns, after the face."""
    face, rest = cells // n**2, cells % n**2
    x, y = np.zeros_like(rest), np.zeros_like(rest)
    for bit in range(n.bit_length() - 1):
        x |= (rest >> 2 * bit & 1) << bit
        y |= (rest >> 2 * bit + 1 & 1) << bit
    return face, x, y


def _nested_of_faces(n: int, face: Integers, x: Integers, y: Integers) -> Integers:
    rest = np.zeros_like(face)
    for bit in range(n.bit_length() - 1):
        rest |= (x >> bit & 1) << 2 * bit | (y >> bit & 1) << 2 * bit + 1
    return face * n**2 + rest


def _ring_starts(n: int) -> Integers:
    """Return the number of cells before each of the rings 1 to 4n - 1, then of all."""
    rings = np.arange(1, 4 * n)
    return np.concatenate([[0], np.cumsum(4 * np.minimum(np.minimum(rings, n), 4 * n - rings))])


def _faces_of_rings(n: int, cells: Integers) -> tuple[Integers, Integers, Integers]:
    starts = _ring_starts(n)
    ring = np.searchsorted(starts, cells, side="right")  # 1 is at the north pole
    place = cells - starts[ring - 1]
    from_pole = np.minimum(ring, 4 * n - ring)
    in_face = place % np.maximum(from_pole, 1)
    # in the belt between the caps, the plane's x + y falls with the ring, and x - y grows with longitude
    total, east = 3 * n - ring - 1, 2 * place + (n - ring - 1) % 2
    plane_x, plane_y = (total + east) // 2, (total - east) // 2
    band = plane_x // n + plane_y // n
    is_north, is_south = ring < n, ring > 3 * n
    caps, x_of_caps = [is_north, is_south], [n - from_pole + in_face, in_face]
    face = np.select(caps, [place // from_pole, 8 + place // from_pole], _face_of_square(plane_x // n, band))
    x = np.select(caps, x_of_caps, plane_x % n)
    y = np.select(caps, [2 * n - 1 - ring - x_of_caps[0], from_pole - 1 - in_face], plane_y % n)
    return face, x, y


def _rings_of_faces(n: int, face: Integers, x: Integers, y: Integers) -> Integers:
    ring, place = _ring_and_place(n, face, x, y)
    return _ring_starts(n)[ring - 1] + place


def _ring_and_place(n: int, face: Integers, x: Integers, y: Integers) -> tuple[Integers, Integers]:
    """Return the ring of each cell, 1 at the north pole, and its place along the ring."""
    band, longitude = 1 - face // 4, face % 4
    ring = (3 - band) * n - x - y - 1
    from_pole = np.minimum(ring, 4 * n - ring)
    east = (2 * longitude + np.abs(band)) * n + x - y
    place = np.select(
        [ring < n, ring > 3 * n],
        [longitude * from_pole + x - (n - from_pole), longitude * from_pole + x],
        east // 2 % (4 * n),
    )
    return ring, place


# -- areas ------------------------------------------------------------------------------------------------------------


def healpix_corners(
    n: int, low: float, high: float, edges: NDArray[np.float64]
) -> Iterator[tuple[NDArray[np.float64], Integers]]:
    """Yield quadrangles of the plane, [m, 4, 2], and which interval between longitudes (`edges`) each is a part of.

    Together they are the intervals between two sines of latitude.  The plane's unit is a cell, and it keeps areas.  In
    the caps meridians are straight within a face, and meet at its corner that is the pole.
    """
    belt = max(low, -2 / 3), min(high, 2 / 3)
    if belt[0] < belt[1]:
        total, east = (n + 1.5 * n * np.array(belt))[:, None], edges * n / 45
        corners = np.stack([(total + east) / 2, (total - east) / 2], -1)
        (a, b), (c, d) = ((row[:-1], row[1:]) for row in corners)
        yield np.stack([a, b, d, c], 1), np.arange(len(edges) - 1)
    points = np.unique(np.concatenate([edges, np.arange(np.ceil(edges[0] / 90), edges[-1] / 90) * 90]))
    middle = (points[:-1] + points[1:]) / 2
    quadrant = np.floor(middle / 90)
    shares = np.stack([points[:-1], points[1:]]) / 90 - quadrant  # fraction of the quadrant
    intervals = np.searchsorted(edges, middle, "right") - 1
    for is_south, cap in enumerate([(max(low, 2 / 3), high), (low, min(high, -2 / 3))]):
        if cap[0] < cap[1]:
            rows = n * np.sqrt(np.maximum(3 * (1 - np.abs(np.array(cap))), 0))[:, None]
            west, east = ([rows * share, rows * (1 - share)] for share in shares)
            # faces of the south lie at (i, -i - 1), those of the north at (i + 1, -i) and count from the pole's corner
            ends = [np.stack(end if is_south else [n - end[1], n - end[0]], -1) for end in (west, east)]
            origin = np.stack([quadrant + 1 - is_south, -quadrant - is_south], -1) * n
            yield np.stack([ends[0][0], ends[1][0], ends[1][1], ends[0][1]], 1) + origin[:, None], intervals


def healpix_cells_of_plane(n: int, nested: bool, squares: Integers) -> Integers:
    """Return the cells that are unit squares of the plane: [m, 2] -> [m]."""
    (p, q), (x, y) = (squares // n).T, (squares % n).T
    return (_nested_of_faces if nested else _rings_of_faces)(n, _face_of_square(p, p + q), x, y)


# -- padded faces -----------------------------------------------------------------------------------------------------


def padded_faces(nside: int, padding: int, nested: bool) -> tuple[Integers, Integers]:
    """Return cells of the twelve faces with `padding` rows and columns around each: [12, nside + 2 padding, ...].

    Rows go to the south-west, columns to the south-east.  The second array has the other cell of those that are the
    mean of two, and -1 elsewhere: at the north and south corners of the faces at the equator three faces meet, and the
    square beyond is filled from both sides.  Cells count by face, row and column, or are `nested` numbers.

    Source: Karlbauer et al., "Advancing parsimonious deep learning weather prediction using the HEALPix mesh", arXiv
    2311.06253, whose code is also PhysicsNeMo's `HEALPixPadding`.
    """
    faces = np.arange(12 * nside**2).reshape(12, nside, nside)
    if nested:
        face, row, column = np.indices(faces.shape)
        faces = _nested_of_faces(nside, face, nside - 1 - row, nside - 1 - column)
    size = nside + 2 * padding
    first, second = np.full((2, 12, size, size), -1)
    for band in range(3):
        for i in range(4):
            first[4 * band + i], second[4 * band + i] = _PADDED[band](faces, i, padding)
    return first, second


def _around(
    center: Integers, rows: tuple[Integers, Integers], sides: tuple[Integers, Integers], corners: tuple[Integers, ...]
) -> Integers:
    """Put a face, two strips above and below, two left and right, and four corners (top first) together."""
    top, bottom, left, right = corners[:2], corners[2:], sides[0], sides[1]
    return np.block([[top[0], rows[0], top[1]], [left, center, right], [bottom[0], rows[1], bottom[1]]])


def _padded_north(faces: Integers, i: int, p: int) -> tuple[Integers, Integers]:
    east, across, west, below = faces[(i + 1) % 4], faces[(i + 2) % 4], faces[(i + 3) % 4], faces[4 + i]
    rows = np.rot90(east)[-p:], below[:p]
    sides = np.rot90(west, -1)[:, -p:], faces[4 + (i + 1) % 4][:, :p]
    corners = np.rot90(across, 2)[-p:, -p:], east[-p:, :p], west[:p, -p:], faces[8 + i][:p, :p]
    padded = _around(faces[i], rows, sides, corners)
    return padded, np.full_like(padded, -1)


def _padded_south(faces: Integers, i: int, p: int) -> tuple[Integers, Integers]:
    east, across, west, above = (
        faces[8 + (i + 1) % 4],
        faces[8 + (i + 2) % 4],
        faces[8 + (i + 3) % 4],
        faces[4 + (i + 1) % 4],
    )
    rows = above[-p:], np.rot90(west)[:p]
    sides = faces[4 + i][:, -p:], np.rot90(east, -1)[:, :p]
    corners = faces[i][-p:, -p:], east[-p:, :p], west[:p, -p:], np.rot90(across, 2)[:p, :p]
    padded = _around(faces[8 + i], rows, sides, corners)
    return padded, np.full_like(padded, -1)


def _padded_equator(faces: Integers, i: int, p: int) -> tuple[Integers, Integers]:
    top, left, bottom, right = faces[i], faces[(i + 3) % 4], faces[8 + (i + 3) % 4], faces[8 + i]
    west, east = faces[4 + (i + 3) % 4], faces[4 + (i + 1) % 4]
    # seen from the corner, a rows and b columns away: of one face where a > b, of the other where b > a
    a, b = np.indices((p, p))
    n, over = len(top), np.abs(a - b) - 1
    north = np.where(a > b, top[n - 1 - a, np.maximum(over, 0)], left[np.maximum(over, 0), n - 1 - b])
    south = np.where(a > b, bottom[a, n - 1 - np.maximum(over, 0)], right[n - 1 - np.maximum(over, 0), b])
    others = [np.where(a == b, other, -1) for other in (top[n - 1 - a, 0], bottom[a, n - 1])]
    none = np.full((p, p), -1)
    rows, sides = (top[-p:], bottom[:p]), (left[:, -p:], right[:, :p])
    padded = _around(faces[4 + i], rows, sides, (north[::-1, ::-1], east[-p:, :p], west[:p, -p:], south))
    strip, whole = np.full((p, n), -1), np.full((n, n), -1)
    corners = others[0][::-1, ::-1], none, none, others[1]
    return padded, _around(whole, (strip, strip), (strip.T, strip.T), corners)


_PADDED = (_padded_north, _padded_equator, _padded_south)
