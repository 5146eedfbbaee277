"""Every function of the closed table outside nn: the tile's answer and gradient are those of the whole tensor, on every
mesh.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]

CASES = {
    # pointwise, with tiles, numbers, whole tensors
    "arithmetic": lambda x: (x * 2 + 1 - x / 3) ** 2 - (1 - x) * (2 / (x.abs() + 1)),
    "activations": lambda x: (
        F.logsigmoid(x) + F.gelu(x) + F.silu(x) + F.relu(x) + torch.tanh(x) + F.softplus(x) + F.elu(x) + x.sigmoid()
    ),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x) + x.clamp(-0.5, 0.5) + torch.maximum(x, x.flip(0)),
    "positional": lambda x: (
        x + torch.arange(70, dtype=x.dtype).reshape(7, 10) / 70 + torch.ones(3, 1, 1, dtype=x.dtype)
    ),
    "sizes that are tensors": lambda x: (
        x * x.new_full([torch.tensor(7), 10], 2.0)
        + x.new_ones(torch.tensor(10))
        + x.new_zeros([torch.tensor(n) for n in x.shape])
    ),
    "broadcast of tiles": lambda x: x * x.mean(2, keepdim=True) + x.mean((0, 3), keepdim=True),
    "lerp": lambda x: torch.lerp(x, x.square(), 0.3) + torch.addcmul(x, x, x, value=0.5),
    # reductions
    "sum": lambda x: x.sum(),
    "mean of rows": lambda x: x.mean(2),
    "mean of columns": lambda x: x.mean(-1, keepdim=True),
    "mean of all": lambda x: x.mean(),
    "amax": lambda x: x.amax((2, 3)) + x.amin(3).sum(2),
    "max and min": lambda x: x.max() - x.min(),
    "max along": lambda x: x.max(1)[0] + x.min(1).values,
    "var": lambda x: x.var((2, 3), keepdim=True) + x.std((0, 2)).reshape(1, 3, 1, -1).mean(3, keepdim=True),
    "var of all": lambda x: x.var() + x.std(unbiased=False) + torch.var_mean(x, correction=0)[1],
    "norm": lambda x: (
        x.norm() + x.norm(dim=2).sum() + torch.linalg.vector_norm(x, 3) + torch.linalg.vector_norm(x, float("inf"))
    ),
    "standardised by plain scalars": lambda x: (x - x.mean()) / x.std(),
    "logsumexp": lambda x: x.logsumexp(2) + x.logsumexp((0, 1, 2, 3)),
    "softmax along rows": lambda x: x.softmax(2),
    "softmax along columns": lambda x: F.log_softmax(x, -1) + F.softmax(x, 1),
    "nanmean": lambda x: torch.where(x > 1, torch.nan, x).nanmean((2, 3)),
    "counts": lambda x: (x > 0).sum((2, 3)) + (x > 0).any(3).all(2) + torch.count_nonzero(x > 1, 2).sum(2) + x.mean(),
    "std of a constant": lambda x: (x * 0 + 1).std((2, 3)) + torch.std_mean(x * (x > 5), (2, 3))[0],
    "vector norms of linalg": lambda x: torch.linalg.norm(x) + torch.linalg.norm(x, 3, 2).sum(),
    "Frobenius norm": lambda x: torch.linalg.norm(x, "fro", (2, 3)) + torch.norm(x, 3, (2, 3)),
    # shapes
    "permute": lambda x: x.permute(0, 2, 3, 1).transpose(1, 2).movedim(-1, 0),
    "tokens": lambda x: (x.flatten(2).transpose(1, 2) * 2).transpose(1, 2).unflatten(2, (7, 10)),
    "tokens with position": lambda x: x.flatten(2) + torch.arange(70, dtype=x.dtype),
    "tokens reduced": lambda x: x.flatten(2).mean(2),
    "all flattened": lambda x: x.flatten().reshape(2, 3, 70).sum(2) + x.view(6, 70).mean(),
    "rows merge and split": lambda x: x.reshape(6, 7, 10).unsqueeze(1) + x.reshape(6, 1, 70).unflatten(2, (7, 10)),
    "slices": lambda x: x[:, 1:, 2:6, 3:] + x[:, :2, 2:6, 3:] * 2,
    "one row": lambda x: x[:, :, 3] * 2,
    "one element": lambda x: x[1, 2, 6, 9] + x[0, 0, 0, 0] * 3,
    "last column": lambda x: x[..., -1],
    "one row meets all rows": lambda x: x[:, :, 3:4] * x + x[..., 9:] - x[:, :, :1],
    "one row meets a whole tensor": lambda x: x[:, :, :1] * torch.arange(4.0, dtype=x.dtype)[:, None],
    "one row meets one row": lambda x: x[:, :, :1] + x[:, :, :1].sin(),
    "one row expanded": lambda x: x[:, :, 2:3].expand(-1, -1, 4, -1),
    "strided": lambda x: x[:, :, ::2, 1::3],
    "new dims": lambda x: x[:, None, ..., None].squeeze(1).squeeze(-1),
    "index": lambda x: x[:, [2, 0]] + x[:, torch.tensor([1, 1])],
    "cat": lambda x: torch.cat([x, x * 2, torch.ones(2, 1, 7, 10, dtype=x.dtype)], 1),
    "stack": lambda x: torch.stack([x, -x], 1).flatten(0, 1),
    "cat a whole and a reduced": lambda x: torch.cat([x, x.mean(1, keepdim=True)], 1),
    "split": lambda x: x.split([3, 4], 2)[1] * 2 + x.chunk(2, 2)[0][:, :, :3].sum(2, keepdim=True),
    "unbind": lambda x: sum(x.unbind(1)),
    "expand": lambda x: x.mean(1, keepdim=True).expand(-1, 5, -1, -1) + x[0, 0].expand(2, 5, 7, 10),
    "roll": lambda x: x.roll((3, -4), (2, 3)) + torch.roll(x, 12, -1),
    "flip uncut": lambda x: x.flip(0) + torch.flip(x, (1,)),
    "sort uncut": lambda x: x.sort(1).values + x.cumsum(0) + torch.topk(x, 1, 1).values,
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    # composition
    "squeeze and excite": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True) * 2),
    "checkpointed": lambda x: checkpoint(lambda y: F.gelu(y) * y.mean(), x, use_reentrant=False),
    "global pool and head": lambda x: (x.mean((2, 3)).square().sum(1) + 1).log(),
}


def _run(name, x):
    return CASES[name](x)


def _sum_and_product(x, y):
    return (x.square() + x).sum(), x * y


@pytest.mark.parametrize("halo", [{0: 1}, {0: (0, 1), 2: 1}, {0: 1, 3: (1, 0)}], ids=str)
@pytest.mark.parametrize("mesh", [{"lat": 2}, {"data": 2}], ids=str)
def test_a_halo_of_a_dim_of_one_row(mesh, halo):
    assert_same_on_every_mesh(
        _sum_and_product,
        [torch.randn(1, 3, 4, 1), torch.randn(1, 3, 4, 1)],
        [mesh],
        spec=[("data", None, "lat", None), ("data", None, "lat", None)],
        halo=halo,
        periodic=tuple(halo),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_tile_answers_as_the_whole_tensor(name):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(functools.partial(_run, name), x, MESHES, spec=SPACE)


@pytest.mark.parametrize(
    "name",
    [
        "arithmetic",
        "positional",
        "broadcast of tiles",
        "var",
        "tokens",
        "slices",
        "roll",
        "norm",
        "cat",
        "squeeze and excite",
    ],
)
def test_a_halo_changes_nothing(name):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(
        functools.partial(_run, name), x, MESHES, spec=SPACE, halo={2: 2, 3: (1, 3)}, periodic=(3,)
    )


@pytest.mark.parametrize(
    "name", ["arithmetic", "mean of rows", "norm", "tokens", "standardised by plain scalars", "roll"]
)
def test_the_batch_is_a_dim_like_any_other(name):
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        functools.partial(_run, name),
        torch.randn(2, 3, 7, 10),
        [{"data": 2}, {"data": 2, "lat": 2}, {"data": 3}],
        spec=("data", None, "lat", None),
    )


FEW = {
    "arithmetic": lambda x: (x + x.tanh()) * x,
    "skips": lambda x: torch.cat([x, x.tanh(), torch.ones(1, 1, 5, 6, dtype=x.dtype)], 1),
    "stack": lambda x: torch.stack([x, 2 * x], 2),
    "whole tensors": lambda x: x * torch.arange(30, dtype=x.dtype).reshape(1, 1, 5, 6) + torch.ones(3, 1, 1).to(x),
    "where": lambda x: torch.where(x > 0, x, -x),
    "one tile whole": lambda x: x * x.mean(0, keepdim=True) + torch.cat([x, x.mean(0, keepdim=True)], 1)[:, 2:5],
    "loss": lambda x: F.mse_loss(x, x.square()) + F.l1_loss(x.softmax(1), x),
    "cross entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1)),
    "expand": lambda x: x.expand(4, -1, -1, -1) * torch.arange(4, dtype=x.dtype).reshape(4, 1, 1, 1),
}


@pytest.mark.parametrize("name", FEW)
def test_a_batch_of_fewer_samples_than_there_are_groups(name):
    """The last batch of an epoch: some ranks have no row of it."""
    torch.manual_seed(0)
    meshes = [{"data": 2}, {"data": 3}, {"data": 2, "lat": 2}]
    model = functools.partial(_few, name)
    assert_same_on_every_mesh(model, torch.randn(1, 3, 5, 6), meshes, spec=("data", None, "lat", None))


def _few(name, x):
    return FEW[name](x)


OUT_OF_RANGE = {
    "index": lambda x: x[:, [3]],
    "negative_index": lambda x: x.index_select(1, torch.tensor([-1])),
    "fraction": lambda x: x[1.5],
    "permute": lambda x: x.permute(0, 1, 2, 7),
    "unsqueeze": lambda x: x.unsqueeze(5),
    "cat": lambda x: torch.cat([x, x], 5),
    "stack": lambda x: torch.stack([x, x], 6),
    "expand": lambda x: x[0, :1, :1].expand(10),
    "norm without dims": lambda x: torch.linalg.norm(x, 2),
    "variance of integers": lambda x: x.round().to(torch.int64).var(2),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
@on_ranks(2)
def test_what_torch_refuses_a_tile_refuses(name):
    x = torch.randn(2, 3, 7, 10)
    for both in (x, shard(x, world_mesh(lat=2), SPACE)):
        with pytest.raises((IndexError, RuntimeError, TypeError)):
            OUT_OF_RANGE[name](both)


@on_ranks(2)
def test_a_mask_of_no_dims_is_refused():
    x = shard(torch.randn(2, 3, 7, 10), world_mesh(lat=2), SPACE)
    with pytest.raises(ShardingError, match=r"True is a mask of no dims; use None"):
        x[True]


@pytest.mark.parametrize("order", [1, 2, -2, float("inf"), "nuc"])
@on_ranks(2)
def test_matrix_norms_are_refused(order):
    x = shard(torch.randn(2, 3, 7, 10), world_mesh(lat=2), SPACE)
    with pytest.raises(ShardingError, match=r"norm.*is not a sum over elements"):
        torch.linalg.norm(x, order, (2, 3))
