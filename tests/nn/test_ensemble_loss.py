"""CRPS: its integral, its sum over pairs, and the same on every mesh, members cut or not."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.nn import crps_loss
from jigsaw.parallel.parallelize import parallelize
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

AREA = torch.linspace(0.1, 1, 7, dtype=torch.float64)[:, None]
MESHES = [{"lat": 1}, {"lat": 3}, {"ensemble": 2}, {"ensemble": 4}, {"ensemble": 2, "lat": 2}]


def _pairs(x, y, alpha):
    """Lang et al., eq. 4: the almost fair score, over all pairs of members along dim 0."""
    members = x.shape[0]
    apart = (x[:, None] - x[None]).abs().sum((0, 1))
    epsilon = (1 - alpha) / members
    spread = (1 - epsilon) / (2 * members * (members - 1)) * apart if members > 1 else 0
    return (x - y).abs().mean(0) - spread


@pytest.mark.parametrize("alpha", [0.0, 0.95, 1.0])
def test_the_score_is_that_of_all_pairs(alpha):
    torch.manual_seed(0)
    for members in (2, 5, 8):
        x = torch.randn(members, 3, 7, dtype=torch.float64)
        x[0, 0] = x[1, 0]  # equal members are not pushed apart
        x.requires_grad_()
        y = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
        found = crps_loss(x, y, 0, alpha=alpha, reduction="none")
        expected = _pairs(x, y, alpha)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        seed = torch.randn(3, 7, dtype=torch.float64)
        for a, b in zip(*(torch.autograd.grad(out, (x, y), seed) for out in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_gradient_has_a_gradient():
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randn(3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: crps_loss(x, y, 0), [x])
    assert torch.autograd.gradcheck(lambda x: crps_loss(x, y, 0), [x])


def test_without_fairness_the_score_is_the_integral_between_the_distributions():
    members, truth = np.array([0.3, 1.0, 2.5]), 1.4
    grid = np.linspace(-1, 4, 500_001)
    below = (members[:, None] <= grid).mean(0)
    integral = np.trapezoid((below - (truth <= grid)) ** 2, grid)
    found = crps_loss(torch.tensor(members), torch.tensor(truth).double(), 0, alpha=0.0)
    assert found.item() == pytest.approx(integral, abs=1e-4)
    assert crps_loss(torch.tensor([3.0]), torch.tensor(1.0), 0, alpha=0.0) == 2


def test_a_hot_field_keeps_its_digits():
    torch.manual_seed(0)
    x, y = 280 + torch.randn(8, 1000), 280 + torch.randn(1000)
    exact = crps_loss(x.double(), y.double(), 0)
    assert crps_loss(x, y, 0).item() == pytest.approx(exact.item(), rel=1e-6)
    narrow = crps_loss(x.bfloat16(), y.bfloat16(), 0)
    assert narrow.dtype == torch.float32
    assert narrow == crps_loss(x.bfloat16().float(), y.bfloat16().float(), 0)


def _score(x, y, member_dim=1, **options):
    return crps_loss(x, y, member_dim, **options)


@pytest.mark.parametrize("case", ["mean", "none", "whole target"])
def test_on_every_mesh(case):
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 3, 7, 10), torch.randn(2, 3, 7, 10)
    x[0, 1] = x[0, 3]
    options = {"mean": {"weight": AREA}, "none": {"reduction": "none"}, "whole target": {"alpha": 0.0}}[case]
    spec = [(None, "ensemble", None, "lat", None), None if case == "whole target" else (None, None, "lat", None)]
    assert_same_on_every_mesh(functools.partial(_score, **options), [x, y], MESHES, spec=spec)


def test_cut_longitudes_and_members_first():
    torch.manual_seed(0)
    spec = [("ensemble", None, "lat", "lon"), (None, "lat", "lon")]
    case = functools.partial(_score, member_dim=0, weight=AREA, reduction="sum")
    meshes = [{"lat": 2, "lon": 2}, {"ensemble": 2, "lon": 2}]
    assert_same_on_every_mesh(case, [torch.randn(4, 2, 7, 10), torch.randn(2, 7, 10)], meshes, spec=spec)


@on_ranks(4)
def test_what_members_that_meet_send():
    mesh = world_mesh(ensemble=2, lat=2)
    x = shard(torch.randn(4, 12, 10), mesh, ("ensemble", "lat", None))
    y = shard(torch.randn(12, 10), mesh, ("lat", None))
    x.local.requires_grad_()
    with comm.count() as forward:
        loss = crps_loss(x, y, 0)
    assert [c.sent_bytes for c in forward.calls if c.kind == "exchange"] == [x.local.nbytes // 2]
    assert {c.kind for c in forward.calls} == {"exchange", "all_reduce"}
    with comm.count() as backward:
        loss.backward()
    assert backward.sent_bytes == x.local.nbytes // 2
    whole = shard(torch.randn(4, 12, 10), world_mesh(lat=4), (None, "lat", None))
    with comm.count() as nothing:
        crps_loss(whole, torch.randn(12, 10), 0, reduction="none")
    assert nothing.sent_bytes == 0


class Members(nn.Module):
    """A forecast a member: the state with the member's noise through one net."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.Conv2d(6, 3, 1))

    def forward(self, x, noise):
        states = x.unsqueeze(1) + noise
        return states + self.net(states.flatten(0, 1)).unflatten(0, states.shape[:2])


@pytest.mark.parametrize("axes", [{"ensemble": 2, "lat": 2}, {"data": 2, "ensemble": 2}], ids=str)
@on_ranks(4)
def test_training_members_that_an_axis_cuts(axes):
    torch.manual_seed(0)
    x, noise, y = (torch.randn(2, *more, 3, 7, 10).double() for more in ((), (5,), ()))
    plain, mesh = Members().double(), world_mesh(**axes)
    loss = crps_loss(plain(x, noise), y, weight=AREA)
    loss.backward()
    data, lat = ("data" if "data" in axes else None), ("lat" if "lat" in axes else None)
    state, member = (data, None, lat, None), (data, "ensemble", None, lat, None)
    tiles = [shard(v, mesh, spec) for v, spec in ((x, state), (noise, member), (y, state))]
    for how in ({}, {"shard_weights": True, "unit_bytes": 1}, {"shard_weights": True, "replicate": "ensemble"}):
        model = parallelize(copy.deepcopy(plain), mesh, **how)
        model.zero_grad()
        found = crps_loss(model(*tiles[:2]), tiles[2], weight=AREA)
        found.backward()
        assert found.item() == pytest.approx(loss.item(), abs=1e-13)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            grad = ours.grad.full_tensor() if how else ours.grad
            torch.testing.assert_close(grad, theirs.grad, rtol=0, atol=1e-13)


def test_what_is_refused():
    with pytest.raises(
        ShardingError, match=r"target \(2, 3\) must be the input's shape \(4, 2, 5\) without its members"
    ):
        crps_loss(torch.ones(4, 2, 5), torch.ones(2, 3), 0)
    with pytest.raises(ShardingError, match=r"crps_loss\(alpha=0.95\): 1 member\(s\) have no spread to be fair about"):
        crps_loss(torch.ones(1, 2), torch.ones(2), 0)
    with pytest.raises(ShardingError, match=r"crps_loss\(member_dim=3\): input \(1, 2\) has no such dim"):
        crps_loss(torch.ones(1, 2), torch.ones(2), 3)
