"""`torch.masked` on tiles against the whole tensor: reductions, orders and softmax of what a mask leaves."""

from __future__ import annotations

import math

import pytest
import torch

import jigsaw
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

WHOLE_MASK = torch.randn(3, 1, 7, 10, generator=torch.Generator().manual_seed(1)) > -0.5
NAMES = {
    "sum": {"dim": (0, 2)}, "mean": {"dim": 3, "keepdim": True}, "prod": {"dim": (2, 1)}, "amax": {"dim": 2},
    "amin": {"dim": None}, "var": {"dim": 2, "unbiased": False}, "std": {"dim": (1, 3), "correction": 1.5},
    "softmax": {"dim": 2}, "log_softmax": {"dim": 3}, "softmin": {"dim": 0}, "norm": {"ord": 3.0, "dim": 2},
    "normalize": {"ord": 2.0, "dim": 2}, "logsumexp": {"dim": (2, 3)}, "cumsum": {"dim": 2}, "cumprod": {"dim": 3},
    "median": {"dim": 2}, "argmax": {"dim": 2}, "argmin": {"dim": 3},
}  # fmt: skip


def _answers(x):
    found = []
    for name, options in NAMES.items():
        function = getattr(torch.masked, name)
        for mask in (x > -0.3, WHOLE_MASK, None):
            found.append(function(x, **options, mask=mask).nan_to_num().double())
    found.append(torch.masked.logaddexp(x, x.sin(), input_mask=x > 0, other_mask=x < 1).exp())
    found.append(torch.masked.sum((x * 9).int(), mask=WHOLE_MASK).double())
    found.append(torch.masked.median((x * 9).detach().int(), 3, mask=WHOLE_MASK | True).double())
    return found


def test_every_function_is_that_of_the_whole():
    assert NAMES.keys() | {"logaddexp"} == {n for n in torch.masked.__all__ if n.islower() and "masked" not in n}
    x = torch.randn(3, 2, 7, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    meshes = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(_answers, x, meshes, spec=(None, None, "lat", "lon"))


@on_ranks(2)
def test_what_torch_refuses_is_refused_by_name():
    tile = shard(torch.arange(12).reshape(4, 3), world_mesh(lat=2), ("lat", None))
    with pytest.raises(ValueError, match=r"masked mean: torch.int64 is neither"):
        torch.masked.mean(tile)
    with pytest.raises(ValueError, match=r"masked median of torch.int64: a row is masked out as a whole"):
        torch.masked.median(tile, 1, mask=tile < 9)
    with pytest.raises(IndexError, match=r"a mask of shape \(1, 4, 3\) has more dims than the input, \(4, 3\)"):
        torch.masked.sum(tile, mask=torch.ones(1, 4, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="masked var and std: pass one of unbiased= and correction="):
        torch.masked.std(tile.double(), 0, True, correction=1)
    plain = torch.masked.softmax(torch.ones(2), 0, mask=jigsaw.shard(torch.tensor([True, False]), tile.mesh, ("lat",)))
    assert plain.full_tensor().tolist() == [1.0, 0.0]
    assert math.isnan(torch.masked.mean(tile.double(), mask=tile < 0))
