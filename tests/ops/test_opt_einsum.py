"""opt_einsum (and tensorly, and neural operators by it) contracts tiles by torch's functions."""

import pytest
import torch

import jigsaw
from jigsaw.testing import on_ranks, world_mesh


@on_ranks(2)
def test_a_path_of_three_operands():
    opt_einsum = pytest.importorskip("opt_einsum")
    x, w, v = torch.randn(2, 3, 7), torch.randn(3, 4), torch.randn(4, 5)
    tile = jigsaw.shard(x, world_mesh(lat=2), (None, None, "lat"))
    found = opt_einsum.contract("bcl,cd,de->bel", tile, w, v)
    assert found.layout.is_cut(2)
    torch.testing.assert_close(found.full_tensor(), opt_einsum.contract("bcl,cd,de->bel", x, w, v))
