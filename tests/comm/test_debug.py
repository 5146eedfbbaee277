"""``JIGSAW_DEBUG=1``: ranks that go different ways say so at the next message, with both places."""

import copy
import os
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import jigsaw
from jigsaw import ShardingError, comm
from jigsaw.comm import debug
from jigsaw.ranks.launcher import EVERY_VARIABLE
from jigsaw.testing import on_ranks, world_mesh

SPEC = (None, None, "lat", None)


@contextmanager
def debugging():
    with mock.patch.object(debug, "IS_DEBUGGING", True):
        yield


def tile_of(shape=(1, 2, 12, 6), seed=0, **axes):
    torch.manual_seed(seed)
    return jigsaw.shard(torch.randn(*shape), world_mesh(**axes), SPEC)


class Branch(torch.nn.Module):
    """Goes by the local values, as no module should."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        if dist.get_rank() == 1:
            return x.mean(2)
        return self.conv(x)


@on_ranks(3)
def test_a_branch_is_named_with_both_places():
    x, model = tile_of(lat=3), Branch()
    with debugging(), torch.no_grad(), pytest.raises(ShardingError, match="different things") as caught:
        model(x)
    said = str(caught.value)
    assert "exchange" in said and "in conv2d" in said and "Branch > Conv2d" in said, said
    assert "all_reduce" in said and "in mean" in said and "test_debug.py:" in said, said


@on_ranks(2)
def test_an_argument_by_rank_is_named():
    x = tile_of((1, 2, 13, 6), lat=2)
    with debugging(), pytest.raises(ShardingError, match=r"in interpolate.*test_debug\.py"):
        F.interpolate(x, size=(8 + dist.get_rank(), 8), mode="bilinear")


@on_ranks(2)
def test_a_skipped_step_and_another_order():
    x, y = tile_of(lat=2), tile_of(seed=1, lat=2)
    with debugging(), pytest.raises(ShardingError, match=r"message \d+"):
        if dist.get_rank():
            x.sum(2)
        y.amax(2)
    calls = [lambda: x.sum(2), lambda: x.amax(2)]
    with debugging(), pytest.raises(ShardingError, match="different things"):
        for call in reversed(calls) if dist.get_rank() else calls:
            call()


def _where_a_rank_has_nothing():
    """(what, function, shape, spec) of exchanges in which nothing moves, on three ranks."""
    channels = (None, "lat", None)
    return [
        ("mean", lambda x: F.avg_pool1d(x, 2), (2, 4, 8), channels),
        ("maximum", lambda x: F.max_pool1d(x, 2), (2, 4, 8), channels),
        ("flip", torch.fliplr, (2, 5, 4), (None, None, "lat")),
        ("channels", lambda x: F.local_response_norm(x, 2), (1, 4, 3), channels),
        ("convolution", lambda x: F.conv1d(x, torch.ones(3, 4, 3)), (1, 4, 6), channels),
        ("order", lambda x: x.quantile(0.5, dim=2), (2, 4, 3), channels),
    ]


@on_ranks(3)
def test_ranks_that_have_nothing_say_what_the_others_say():
    for what, function, shape, spec in _where_a_rank_has_nothing():
        x = torch.randn(shape, requires_grad=True)
        tile = jigsaw.shard(x.detach(), world_mesh(lat=3), spec, split={spec.index("lat"): (0, 2, 2, 4)})
        tile.local.requires_grad_()
        function(x).square().sum().backward()
        with debugging():
            y = function(tile)
            y.square().sum().backward()
        assert torch.allclose(y.full_tensor(), function(x), atol=1e-5), what
        grad = jigsaw.Tile(tile.local.grad, tile.layout, tile.mesh).full_tensor()
        assert torch.allclose(grad, x.grad, atol=1e-5), what


@on_ranks(4)
def test_training_is_as_it_was_and_nothing_else_is_counted():
    def step(debugged):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1),
            torch.nn.GroupNorm(2, 4),
            torch.nn.Conv2d(4, 4, 3, stride=2, padding=1),
            torch.nn.Upsample(size=(13, 6)),
            torch.nn.Flatten(2),
            torch.nn.Linear(78, 5),
        ).double()
        mesh = world_mesh(lat=2, lon=2)
        with mock.patch.object(debug, "IS_DEBUGGING", debugged), comm.count() as counted:
            jigsaw.parallelize(model, mesh)
            x = jigsaw.shard(torch.randn(1, 2, 13, 6).double(), mesh, (None, None, "lat", "lon"))
            loss = model(x).square().mean()
            loss.backward()
        return [loss.item(), *(p.grad for p in model.parameters())], counted.calls

    (plain, calls), (debugged, same) = step(False), step(True)
    torch.testing.assert_close(debugged, plain, rtol=0, atol=0)
    assert [c for c in same if c.sent_bytes] == [c for c in calls if c.sent_bytes]


@on_ranks(2)
def test_parameters_that_drift_apart_are_found():
    with debugging(), torch.no_grad(), mock.patch.dict(os.environ, {EVERY_VARIABLE: "2"}):
        model = jigsaw.parallelize(torch.nn.Conv2d(2, 2, 1), world_mesh(lat=2))
        x = tile_of(lat=2)
        model(x)
        model.bias[1] += 1e-6 * dist.get_rank()
        model(x)
        with pytest.raises(ShardingError, match=r"parameter 'bias' differs between rank 0 and rank 1"):
            model(x)


@on_ranks(2)
def test_weights_that_are_cut_are_compared_in_parts():
    with debugging(), mock.patch.dict(os.environ, {EVERY_VARIABLE: "1"}):
        for how in ({"unit_bytes": 1}, {"shard_weights": "keep"}, {"replicate": "data"}):
            torch.manual_seed(0)
            plain = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Conv2d(3, 2, 1)).double()
            mesh = world_mesh(data=2, lat=1) if "replicate" in how else world_mesh(lat=2)
            model = jigsaw.parallelize(copy.deepcopy(plain), mesh, **{"shard_weights": True} | how)
            x = torch.randn(1, 2, 7, 6).double()
            tile = jigsaw.shard(x, mesh, SPEC)
            for _ in range(2):  # the second compares weights that were gathered before
                model(tile).square().mean().backward()
                plain(x).square().mean().backward()
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=0, atol=1e-12)
        with torch.no_grad():
            model[0].weight.to_local().add_(1e-6 * dist.get_rank())
        with pytest.raises(ShardingError, match=r"parameter '0.weight' differs between rank 0 and rank 1"):
            model(tile)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class DoubledToo(Doubled):
    """The same under another name, for a rank that takes another Function."""


def _ways_to_part():
    """(what is said, what a rank does that depends on its number) with a tile, before a message."""
    noise = torch.full((6,), float(dist.get_rank()))
    other = dist.get_rank() == 1

    def change_local(x):
        y = x * 2
        if other:
            y.local.add_(1)
        return y + 1

    return [
        (r"rank 0: add\(.*tensor \[6\] torch.float32 of checksum .*rank 1: add\(", lambda x: x + noise),
        (r"rank 0: mul\(.*, 1.5\).*rank 1: mul\(.*, 2.5\)", lambda x: x * (dist.get_rank() + 1.5)),
        (r"rank 0: mul\(.*float32 \[\] .*rank 1: mul\(", lambda x: x * np.float32(dist.get_rank())),
        (r"rank 0: addcmul\(.*value=0.*rank 1: addcmul\(.*value=1", lambda x: x.addcmul(x, x, value=dist.get_rank())),
        (r"rank 0: relu\(.*rank 1: gelu\(", F.gelu if other else F.relu),
        (r"rank 0: sum\(.*; rank 1: relu\(", lambda x: F.relu(x) if other else x),
        ("local was changed 1 times", change_local),
        ("out of DoubledToo", lambda x: (DoubledToo if other else Doubled).apply(x) + 0),
        (
            r"jigsaw.local of cosh.*jigsaw.local of sinh",
            jigsaw.local(torch.sinh if other else torch.cosh, reach={}),
        ),
    ]


@on_ranks(2)
def test_calls_that_send_nothing_are_compared_at_the_next_message():
    for said, function in _ways_to_part():
        x = tile_of(lat=2)
        x.local.requires_grad_()
        with debugging():
            y = function(x)
            with pytest.raises(ShardingError, match=said) as caught:
                y.sum()
            assert "test_debug.py:" in str(caught.value)
            x.sum()  # what has been said is not said again


@on_ranks(4)
def test_ranks_that_part_are_all_named():
    x = tile_of(lat=2, lon=2)
    with debugging(), pytest.raises(ShardingError, match=r"ranks 0, 1, 3: add\(.*; rank 2: add\("):
        (x + torch.full((6,), float(dist.get_rank() == 2))).sum(2)  # along lon nobody differs


@on_ranks(2)
def test_a_loss_that_is_scaled_by_rank_is_found_in_the_backward_pass():
    model = jigsaw.parallelize(torch.nn.Conv2d(2, 2, 1), world_mesh(lat=2))
    with debugging(), pytest.raises(ShardingError, match=r"gradient of what left a tile.*of checksum"):
        (model(tile_of(lat=2)).square().mean() * (1 + dist.get_rank())).backward()


@on_ranks(2)
def test_what_one_rank_looks_at_alone_is_no_difference():
    x = tile_of(lat=2)
    with debugging():
        if dist.get_rank():
            assert x.is_contiguous() and x.is_floating_point() and x.size(0) and repr(x) and x.local.sum()
        x.sum()


@pytest.mark.parametrize("alone", [{"JIGSAW_DEBUG": "1"}, {"JIGSAW_DEBUG": "1", "JIGSAW_DEBUG_EVERY": "3"}])
@on_ranks(2)
def test_a_variable_of_one_rank_alone_is_said_when_a_mesh_is_made(alone):
    others = {"JIGSAW_DEBUG": "1"} if len(alone) > 1 else {}
    said = pytest.raises(ShardingError, match=r"rank 0: .*; rank 1: every .* passes")
    with mock.patch.dict(os.environ, alone if dist.get_rank() else others), said:
        jigsaw.init_mesh(lat=2, device="cpu")


SCRIPT = """
import torch.distributed as dist, torch, jigsaw
from jigsaw.comm import debug
mesh = jigsaw.init_mesh(lat=2)
assert debug.IS_DEBUGGING
x = jigsaw.shard(torch.ones(4), mesh, ("lat",))
if dist.get_rank() == 0:
    x = x.softmax(0)
x.sum()
"""


@pytest.mark.slow
def test_the_variable_turns_it_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    env = {**os.environ, "JIGSAW_DEBUG": "1"}
    found = subprocess.run(run, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "the ranks do different things at message" in found.stderr, found.stderr
    assert "in softmax" in found.stderr and "script.py:" in found.stderr
