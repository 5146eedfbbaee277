"""Complex tiles against the whole tensor: parts, pointwise functions, reductions, products, and moving them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 2}, {"lon": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]


def _parts(z):
    pairs = torch.view_as_real(z)
    return {
        "pairs": pairs,
        "back": torch.view_as_complex(pairs * 2.0),
        "stacked": torch.view_as_complex(torch.stack([torch.real(z), torch.imag(z) ** 2], -1)),
        "of a conjugate": torch.view_as_real(z.conj().resolve_conj()),
        "size": z.abs(),
        "angle": torch.angle(z),
        "conj": torch.conj(z) * z + z.conj().resolve_conj().resolve_neg(),
        "physical": torch.conj_physical(z),
        "sign": torch.sgn(z),
        "made": torch.complex(torch.real(z), torch.imag(z) + 1.0),
        "polar": torch.polar(z.abs() + 1.0, torch.angle(z)),
        "adjoint": torch.adjoint(z),
        "scaled": z * (1.0 + 2j) + 3.0,
        "rolled": torch.roll(z, (1, 2), (2, 3)),
        "picked": z[:, :, 2] + z[:, :, 1:2].squeeze(2),
        "tokens": z.flatten(2).transpose(1, 2),
    }


def _reduced(z):
    return {
        "sum": z.sum(),
        "rows": z.sum(dim=2),
        "mean": z.mean(dim=(2, 3)),
        "norm": torch.linalg.vector_norm(z, dim=(1, 2)),
        "var": z.var(dim=3),
        "loss": (z - 1j).abs().square().mean(),
    }


def _multiplied(z, w, matrix, columns):
    tokens = z.flatten(2)
    return {
        "einsum": torch.einsum("bihw,iohw->bohw", z, w),
        "over rows": torch.einsum("bihw,hk->bikw", z, matrix),
        "over columns": torch.matmul(z, columns),
        "linear": torch.nn.functional.linear(z, columns.conj().mT.resolve_conj()),
        "tokens": torch.matmul(tokens, torch.ones(70, 3, dtype=z.dtype)),
        "tensordot": torch.tensordot(z, columns, 1),
        "of two dims": torch.tensordot(w, z, ([0, 2], [1, 2])),
        "with itself": torch.einsum("bihw,bjhw->bij", z, z.conj()),
    }


@pytest.mark.parametrize("function", [_parts, _reduced])
def test_functions(function):
    torch.manual_seed(0)
    assert_same_on_every_mesh(function, torch.randn(2, 3, 7, 10, dtype=torch.complex64), MESHES, spec=SPACE)


def test_a_halo_is_left_out_or_stays():
    torch.manual_seed(0)
    z = torch.randn(2, 3, 7, 10, dtype=torch.complex64)
    assert_same_on_every_mesh(_parts, z, MESHES[::3], spec=SPACE, halo={2: 1, 3: 1}, periodic=[3])


def test_products():
    torch.manual_seed(0)
    batch = [torch.randn(s, dtype=torch.complex64) for s in ((2, 3, 7, 10), (3, 4, 7, 10), (7, 5), (10, 6))]
    assert_same_on_every_mesh(_multiplied, batch, MESHES, spec=[SPACE, None, None, None])


class Pointwise(nn.Module):
    """Convolutions of kernel 1 over points that were flattened, as neural operators mix channels."""

    def __init__(self):
        super().__init__()
        self.lift, self.mix = nn.Conv1d(3, 6, 1), nn.Conv1d(6, 4, 1, groups=2, bias=False)
        self.back = nn.ConvTranspose1d(4, 3, 1)

    def forward(self, x):
        y = self.mix(torch.tanh(self.lift(x.flatten(2))))
        return x + self.back(y).reshape(x.shape), y


def test_convolutions_of_kernel_1_on_flattened_points():
    torch.manual_seed(0)
    assert_same_on_every_mesh(Pointwise(), torch.randn(2, 3, 7, 10), MESHES, spec=SPACE)


@on_ranks(4)
def test_longer_kernels_on_flattened_points_are_refused():
    tile = shard(torch.randn(2, 3, 6, 10), world_mesh(lat=2, lon=2), SPACE)
    with pytest.raises(ShardingError, match="flattened together; unflatten it to"):
        nn.Conv1d(3, 3, 3, padding=1)(tile.flatten(2))


@on_ranks(4)
def test_complex_tiles_move():
    whole = torch.randn(4, 9, 10, dtype=torch.complex64)
    tile = shard(whole, world_mesh(lat=2, lon=2), (None, "lat", "lon"), halo={1: 1})
    assert torch.equal(tile.full_tensor(), whole)
    moved = tile.conj().redistribute(("lat", None, "lon"))
    assert torch.equal(moved.full_tensor(), whole.conj())
    assert torch.view_as_real(tile).layout.held(tile.coordinate)[:3] == tile.layout.held(tile.coordinate)
    assert tile.conj().is_conj() and not torch.is_conj(tile)


@on_ranks(2)
def test_wrong_pairs_raise():
    mesh = world_mesh(lat=2)
    with pytest.raises(RuntimeError, match="its last dim must have size 2"):
        torch.view_as_complex(shard(torch.randn(4, 3), mesh, ("lat", None)))
    with pytest.raises(ShardingError, match="the real and the imaginary part, is cut"):
        torch.view_as_complex(shard(torch.randn(4, 2), mesh, (None, "lat")))
    z = shard(torch.randn(4, 2, dtype=torch.complex64), mesh, ("lat", None))
    with pytest.raises(RuntimeError, match="dim 'a1' has sizes 2 and 3"):
        torch.tensordot(z, torch.randn(3, 3) + 0j, 1)
