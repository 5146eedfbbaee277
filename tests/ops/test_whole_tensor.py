"""`parallelize(strict=False)`: what the table refuses runs on the whole tensor, exactly, and says what that costs."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import from_local, shard

MESHES = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
SPEC = (None, "lat", "lon")
WHOLE = functools.partial(jigsaw.parallelize, strict=False)


class Solved(nn.Module):
    """Functions that no cut can be answered for, of parameters, of tiles and of both."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(7, 7) + 7 * torch.eye(7))
        self.weight = nn.Parameter(torch.randn(5, 10, 10))
        self.gain = nn.Parameter(torch.randn(()))

    def forward(self, x):
        solved = torch.linalg.solve(self.matrix, x)  # cut again as x
        crossed = F.bilinear(solved, x, self.weight)  # [2, 7, 5]: its last dim stays uncut
        grown = torch.linalg.matrix_exp(0.1 * x @ x.transpose(-2, -1))
        sign, size = torch.linalg.slogdet(grown + torch.eye(7))  # [2]
        total = torch.linalg.norm(grown[0], 2) * self.gain  # a number
        return solved + x * total, crossed, grown, (sign * size).sum() * self.gain


class Changed(nn.Module):
    """Functions that change a tile or a plain tensor in place."""

    def forward(self, x):
        y = x * 2
        z = y.renorm_(2, 0, 1.5)
        kept = torch.zeros(7, 7, dtype=x.dtype)
        kept.addmm_(y[0], y[1].transpose(0, 1))
        return y + z, kept.sum() * x.mean()


class Nested(nn.Module):
    """The refused function in a module within modules, one of which runs again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 10), Solved())

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=False)
        return y[0] + y[3]


@pytest.mark.parametrize("model", [Solved, Changed, Nested])
def test_refused_functions_run_whole_with_exact_gradients(model):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_on_every_mesh(model(), torch.randn(2, 7, 10), MESHES, spec=SPEC, build=WHOLE)


def _cut(mesh, shape=(6, 5), spec=("lat", None)):
    return shard(torch.randn(shape, generator=torch.Generator().manual_seed(0)), mesh, spec)


class Inverse(nn.Module):
    def forward(self, x):
        return torch.linalg.pinv(x)


@on_ranks(2)
def test_a_place_is_told_once_and_its_bytes_are_counted():
    mesh = world_mesh(lat=2)
    model = jigsaw.parallelize(Inverse(), mesh, strict=False)
    x = _cut(mesh)
    x.local.requires_grad_()
    with warnings.catch_warnings(record=True) as told, comm.count() as traffic:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x).sum().backward()
    texts = [str(w.message) for w in told]
    assert len([t for t in texts if "runs on the whole tensor" in t]) == 1
    assert "linalg_pinv" in texts[0]
    assert "test_whole_tensor.py" in texts[0]
    assert "brings 60 bytes to this rank" in texts[0]
    gathered = [c for c in traffic.calls if c.kind == "gathered"]
    assert sum(c.received_bytes for c in gathered) == 3 * 60  # [5, 6] stays uncut: its gradient is whole on each rank


@on_ranks(2)
def test_the_mode_ends_with_the_forward_pass():
    mesh = world_mesh(lat=2)
    x = _cut(mesh)

    class Raises(nn.Module):
        def forward(self, x):
            torch.linalg.pinv(x)
            raise KeyError("mine")

    model = jigsaw.parallelize(Raises(), mesh, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(KeyError, match="mine"):
            model(x)
        with pytest.raises(ShardingError, match=r"strict=False"):
            torch.linalg.pinv(x)
        with jigsaw.strict_mode(False):
            assert torch.linalg.pinv(x).shape == (5, 6)
            with jigsaw.strict_mode(True), pytest.raises(ShardingError, match="linalg_pinv"):
                torch.linalg.pinv(x)
            assert torch.linalg.pinv(x).shape == (5, 6)
    with pytest.raises(ShardingError, match=r"parallelize\(model, mesh, strict=False\) runs it on the whole"):
        jigsaw.parallelize(Inverse(), mesh)(x)


@on_ranks(2)
def test_the_error_has_the_line_to_write():
    x = _cut(world_mesh(lat=2), (6, 5, 4), ("lat", None, None))
    with pytest.raises(ShardingError, match=r"x = x.redistribute\(\(None, None, None\)\)"):
        torch.linalg.pinv(x)


@on_ranks(2)
def test_what_cannot_be_exact_is_refused():
    mesh = world_mesh(lat=2)
    x = _cut(mesh)
    with jigsaw.strict_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ShardingError, match="draws random numbers"):
            torch.poisson(x.abs())
        with pytest.raises(ShardingError, match=r"out=\.\.\."):
            torch.linalg.pinv(x, out=torch.empty(5, 6))
        with pytest.raises(ShardingError, match="linalg_inv"):  # torch refuses it on the whole tensor
            torch.linalg.inv(x)
        diagonal = torch.linalg.diagonal(x)
        assert torch.equal(diagonal.full_tensor(), x.full_tensor().diagonal())
        wrong = Tile(x.local[:-1], x.layout, mesh)
        with pytest.raises(RanksDifferError, match="local tensor"):
            torch.linalg.pinv(wrong)


@on_ranks(3)
def test_sizes_that_depend_on_values_and_empty_parts():
    mesh = world_mesh(lat=3)
    x = from_local(torch.full((int(mesh.get_local_rank() < 2), 4), 2.0), mesh, ("lat", None), (2, 4))
    with jigsaw.strict_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.linalg.pinv(x).shape == (4, 2)
        assert torch.unique_consecutive(x).shape == (1,)
