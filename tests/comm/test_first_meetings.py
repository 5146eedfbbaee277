"""Plain tensors and numbers that differ by rank are found by the next sum over ranks, without JIGSAW_DEBUG."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import jigsaw
from jigsaw import ShardingError, comm
from jigsaw.testing import on_ranks, world_mesh

SPEC = (None, None, "lat", "lon")


def _tile(**axes):
    torch.manual_seed(0)
    return jigsaw.shard(torch.randn(1, 2, 13, 7, dtype=torch.float64), world_mesh(**axes), SPEC)


def _mistakes():
    """(what is said, what a user forgets) of functions of a tile that send nothing by themselves."""
    own = torch.Generator().manual_seed(dist.get_rank())
    drawn = random.Random(dist.get_rank())
    conv = torch.nn.Conv2d(2, 2, 1).double()
    with torch.no_grad():
        conv.bias += dist.get_rank()
    return [
        (r"tensor \[1, 2, 13, 7\]", lambda x: x + torch.randn(1, 2, 13, 7, generator=own)),
        (r"tensor \[1, 2, 1, 1\]", lambda x: x * torch.rand(1, 2, 1, 1, generator=own)),
        (r"tensor \[13, 7\] torch.bool", lambda x: x.masked_fill(torch.rand(13, 7, generator=own) < 0.3, 0.0)),
        (r"tensor \[1, 2, 13, 7\]", lambda x: F.mse_loss(x, torch.randn(1, 2, 13, 7, generator=own).double())),
        (r"tensor \[1, 2, 13, 7\]", lambda x: torch.cat([x, torch.randn(1, 2, 13, 7, generator=own).double()], 1)),
        ("a plain float that meets a tile", lambda x: x * drawn.random()),
        ("a plain float that meets a tile", lambda x: x.clone().mul_(drawn.random())),
        (r"tensor \[2\] torch.float64", conv),
    ]


def _find_mistakes(**axes):
    for said, function in _mistakes():
        x = _tile(**axes)
        with pytest.raises(ShardingError, match=said) as caught:
            function(x).sum()
        assert "rank 0 has" in str(caught.value) and "test_first_meetings.py:" in str(caught.value)
        x.sum()  # the ranks have one number again


@on_ranks(2)
def test_values_that_differ_by_rank_are_named():
    _find_mistakes(lat=2)


@on_ranks(3)
def test_values_that_differ_by_rank_are_named_on_three():
    _find_mistakes(lat=3)


@on_ranks(4)
def test_values_that_differ_by_rank_are_named_on_two_axes():
    _find_mistakes(lat=2, lon=2)


@on_ranks(4)
def test_a_rank_beside_which_nothing_was_reduced_is_found_later():
    x = _tile(lat=2, lon=2)
    y = x + torch.full((7,), float(dist.get_rank() % 2))  # alike along lat
    total = y.sum(2)
    with pytest.raises(ShardingError, match=r"tensor \[7\]"):
        total.sum()  # along lon


@on_ranks(2)
def test_a_loss_that_is_scaled_by_rank_is_found_in_the_next_step():
    model = jigsaw.parallelize(torch.nn.Conv2d(2, 2, 1).double(), world_mesh(lat=2))
    (model(_tile(lat=2)).square().mean() * (1 + dist.get_rank())).backward()
    with pytest.raises(ShardingError, match=r"rank 0 has 1 and rank 1 has 2"):
        model(_tile(lat=2)).square().mean()


@on_ranks(2)
def test_what_is_no_mistake_goes_on():
    x, scale = _tile(lat=2), torch.rand(7, dtype=torch.float64)
    ranks = torch.tensor(1.0, dtype=torch.float64)
    for _ in range(3):
        if dist.get_rank():
            (x * torch.rand(7)).exp()  # for a plot of one rank
        y = x * scale + torch.rand(13, 1)  # alike, though drawn by each
        torch.testing.assert_close(y.sum(), y.full_tensor().sum(), rtol=1e-12, atol=0)
        torch.manual_seed(3)
    y = x * (ranks + 1e-12 * dist.get_rank())  # as of sums in another order
    assert torch.isfinite(y.sum())


@on_ranks(2)
def test_nothing_more_is_sent_and_memory_that_is_used_again_is_looked_at_again():
    x, scale = _tile(lat=2), torch.ones(7, dtype=torch.float64)
    with comm.count() as before:
        x.sum()
    with comm.count() as counted:
        (x * scale).sum()
    assert counted.calls == before.calls
    scale.mul_(1 + dist.get_rank())
    with pytest.raises(ShardingError, match=r"rank 0 has 1, 1, 1, 1, ... and rank 1 has 2"):
        (x * scale).sum()
    for step in range(2):  # a fresh tensor at the same address, alike in the first step only
        fresh = torch.full((7,), 1.0 + step * dist.get_rank(), dtype=torch.float64)
        if step:
            with pytest.raises(ShardingError, match=r"tensor \[7\]"):
                (x * fresh).sum()
        else:
            (x * fresh).sum()
        del fresh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 40_000])
@on_ranks(2)
def test_every_kind_of_reduction_carries_the_number(dtype, rows):
    x = jigsaw.shard(torch.ones(2, rows, dtype=dtype), world_mesh(lat=2), ("lat", None))
    calls = [lambda y: y.sum(0), lambda y: y.amax(0), lambda y: y.mean(), lambda y: torch.linalg.vector_norm(y, dim=0)]
    for call in calls:
        y = x * torch.tensor(1.0 + dist.get_rank(), dtype=dtype)
        with pytest.raises(ShardingError, match=r"tensor \[\]"):
            call(y)
