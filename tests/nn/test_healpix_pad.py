"""Padding of HEALPix faces on tiles against the same of the whole tensor, and against cells side by side."""

import numpy as np
import pytest
import torch

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.healpix import healpix_neighbors, padded_faces
from jigsaw.nn import HEALPixPad
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

NSIDE = 4


def values(shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


CASES = {
    "faces": ((2, 3, 12, NSIDE, NSIDE), (None, None, "cell", None, None), -3, (0, 5, 6, 12)),
    "faces before channels": ((2, 12, 3, NSIDE, NSIDE), (None, "cell", None, None, None), 1, (0, 0, 7, 12)),
    "nested": ((2, 3, 12 * NSIDE**2), (None, None, "cell"), None, (0, 50, 51, 192)),
    "nested, whole faces": ((2, 3, 12 * NSIDE**2), (None, None, "cell"), None, "balanced"),
}


def padded(x, face_dim):
    """Two widths, and a convolution between, whose padding then is that of the faces."""
    weight = torch.linspace(-1, 1, 27, dtype=torch.float64).view(3, 1, 3, 3)
    pad = HEALPixPad(2, face_dim)
    y = pad(x) if face_dim != 1 else pad(x).transpose(1, 2)  # [batch, channels, faces, ...]
    y = torch.nn.functional.conv2d(y.transpose(1, 2).flatten(0, 1), weight, groups=3)
    return y.unflatten(0, (2, 12)).transpose(1, 2)


def run_case(ranks, name):
    shape, spec, face_dim, points = CASES[name]
    mesh = world_mesh(cell=ranks)
    split = points if ranks == 3 else "balanced"
    tile = jigsaw.shard(values(shape), mesh, spec, split={spec.index("cell"): split})
    tile.local.requires_grad_()
    out = padded(tile, face_dim)
    (out.square().sum() + out.sum()).backward()
    return out.full_tensor().detach(), tile.grad.full_tensor()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_faces_are_padded_as_the_whole_sphere(ranks, name):
    shape, _, face_dim, _ = CASES[name]
    x = values(shape).requires_grad_()
    wanted = padded(x, face_dim)
    (wanted.square().sum() + wanted.sum()).backward()
    for out, grad in run_on_ranks(ranks, run_case, ranks, name):
        torch.testing.assert_close(out, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12)


def test_nested_cells_are_the_faces():
    cells = values((12 * NSIDE**2,))
    faces = HEALPixPad(3, face_dim=None)(cells)
    assert torch.equal(HEALPixPad(3)(faces[:, 3:-3, 3:-3]), faces)


@on_ranks(3)
def test_only_cells_beside_a_border_travel():
    mesh = world_mesh(cell=3)
    tile = jigsaw.shard(torch.randn(12 * 32**2), mesh, ("cell",))
    pad = HEALPixPad(1, face_dim=None)
    pad(tile)
    with comm.count() as counts:
        pad(tile)
    received = sum(c.received_bytes for c in counts.calls)
    assert {c.kind for c in counts.calls} == {"neighbors"}
    assert 0 < received <= 4 * 4 * 4 * 33  # four faces a rank, each with four sides


def test_what_is_no_sphere_of_faces_is_refused():
    for pad, shape in (
        (HEALPixPad(1), (11, 4, 4)),
        (HEALPixPad(1), (12, 4, 5)),
        (HEALPixPad(5), (12, 4, 4)),
        (HEALPixPad(1, face_dim=None), (100,)),
    ):
        with pytest.raises(ShardingError, match=r"must have 12"):
            pad(torch.zeros(shape))
    with pytest.raises(ShardingError, match="padding=0 must be 1 or more"):
        HEALPixPad(0)
    with pytest.raises(ShardingError, match="power of two for nested numbers"):
        HEALPixPad(1, face_dim=None)(torch.zeros(12 * 9))


@on_ranks(2)
def test_cut_rows_of_faces_are_refused():
    tile = jigsaw.shard(torch.zeros(12, 4, 4), world_mesh(cell=2), (None, "cell", None))
    with pytest.raises(ShardingError, match="rows and columns of faces cannot be cut"):
        HEALPixPad(1)(tile)


# -- which cells -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nside", [2, 4, 8])
def test_a_face_is_padded_with_the_cells_beside_it(nside):
    """One row around each face, by the neighbors of its cells; but the squares where three faces meet."""
    first, second = padded_faces(nside, 1, nested=True)
    neighbors = healpix_neighbors(nside)
    steps = {0: (1, 0), 1: (1, -1), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (-1, 1), 6: (0, 1), 7: (1, 1)}  # from SW on
    compared = 0
    for face, row, column in np.ndindex(12, nside, nside):
        beside = neighbors(first[face, row + 1, column + 1][None])[0]
        for direction, (down, right) in steps.items():
            if beside[direction] >= 0:
                assert first[face, row + 1 + down, column + 1 + right] == beside[direction]
                compared += 1
    assert compared == 8 * 12 * nside**2 - 24
    assert np.count_nonzero(second >= 0) == 8


@pytest.mark.parametrize("padding", [1, 2, 4])
def test_corners_of_faces_at_the_equator_are_filled_from_both_sides(padding):
    nside = 4
    first, second = padded_faces(nside, padding, nested=False)
    faces = np.arange(12 * nside**2).reshape(12, nside, nside)
    for i in range(4):
        top, left = faces[i], faces[(i + 3) % 4]
        bottom, right = faces[8 + (i + 3) % 4], faces[8 + i]
        north, south = first[4 + i, :padding, :padding], first[4 + i, -padding:, -padding:]
        for a in range(padding):  # as the published code fills them
            assert list(north[-a - 1, padding - a :]) == list(top[-a - 1, :a])
            assert list(north[padding - a :, -a - 1]) == list(left[:a, -a - 1])
            assert list(south[a, :a]) == list(bottom[a, nside - a :])
            assert list(south[:a, a]) == list(right[nside - a :, a])
            assert {north[-a - 1, -a - 1], second[4 + i, padding - a - 1, padding - a - 1]} == {
                top[-a - 1, 0],
                left[0, -a - 1],
            }
            at = padding + nside + a
            assert {south[a, a], second[4 + i, at, at]} == {bottom[a, -1], right[-1, a]}
