"""A net that calls `torch.distributed` itself has, on every mesh, the numbers of one process that calls nothing."""

from __future__ import annotations

import contextlib
import copy
import math
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as summed_with_gradient
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_reduce as all_reduce_from_before
from torch.distributed import get_world_size as world_size_from_before
from torch.distributed._functional_collectives import all_reduce as all_reduce_by_name
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.parallel.parallelize import parallelize
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

MESHES = [{"lat": 2}, {"lon": 3}, {"data": 2, "lat": 2}]


class Codebook(nn.Module):
    """Vector quantisation, whose codes are moving averages of what falls to them (van den Oord et al., 2017)."""

    def __init__(self, talks, codes=5, dim=4):
        super().__init__()
        self.talks = talks
        self.all_reduce = all_reduce_from_before if talks else lambda x: None
        self.register_buffer("codes", torch.randn(codes, dim))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", torch.randn(codes, dim))

    def forward(self, x):
        flat = x.movedim(1, -1).flatten(0, -2)
        places = torch.cdist(flat, self.codes).argmin(1)
        one_hot = F.one_hot(places, len(self.codes)).to(x.dtype)
        if self.training:
            counts, sums = one_hot.sum(0), one_hot.T @ flat.detach()
            self.all_reduce(counts)
            self.all_reduce(sums.data)
            fresh = self.codes * 1.0  # plain, and alike on every rank
            if self.talks:
                dist.broadcast(fresh, 0)
                dist.all_reduce(fresh)
                fresh /= world_size_from_before()
            with torch.no_grad():
                self.counts.lerp_(counts, 0.25)
                self.sums.lerp_(sums, 0.25)
                self.codes.copy_((self.sums / self.counts.clamp(1e-3)[:, None] + fresh) / 2)
        quantised = F.embedding(places, self.codes).unflatten(0, x.movedim(1, -1).shape[:-1]).movedim(-1, 1)
        return x + (quantised - x).detach()


class HandMadeNorm(nn.Module):
    """Batch norm over all processes: gathered moments, and a load-balancing loss of plain tensors."""

    def __init__(self, talks, channels=4):
        super().__init__()
        self.talks, self.weight = talks, nn.Parameter(torch.randn(channels))

    def forward(self, x):
        moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        gain = self.weight.exp()  # plain
        if self.talks:
            parts = [torch.zeros_like(moments) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, moments)
            torch.testing.assert_close(torch.stack(list(parts)).mean(0).full_tensor(), moments.full_tensor())
            row = moments.new_empty(2 * dist.get_world_size(), 4)
            work = dist.all_gather_single(row, moments, async_op=True)
            work.wait()
            gain = _SumOfProcesses.apply(gain) / world_size_from_before()
        mean, square = moments.unbind()
        scale = (gain * torch.rsqrt(square - mean.square() + 1e-5))[:, None, None]
        return (x - mean[:, None, None]) * scale


class _SumOfProcesses(torch.autograd.Function):
    """As in detectron2's NaiveSyncBatchNorm: a sum whose gradient is summed, too."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.stack(parts).sum(0)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Net(nn.Module):
    def __init__(self, talks, checkpointed=None):
        super().__init__()
        self.stem, self.codebook, self.norm = nn.Conv2d(3, 4, 3, padding=1), Codebook(talks), HandMadeNorm(talks)
        self.head, self.checkpointed = nn.Conv2d(4, 2, 1), checkpointed

    def forward(self, x):
        x = self.codebook(self.stem(x))
        if self.checkpointed is None:
            return self.head(self.norm(x))
        return self.head(checkpoint(self.norm, x, use_reentrant=self.checkpointed))


def _net(talks, **kwargs):
    torch.manual_seed(0)
    return Net(talks, **kwargs).double()


def _steps(axes, checkpointed, shard_weights):
    mesh = world_mesh(**axes)
    alone = _net(False)
    model = parallelize(_net(True, checkpointed=checkpointed), mesh, shard_weights=shard_weights, unit_bytes=1)
    for step in range(2):
        x = torch.randn(4, 3, 13, 7, generator=torch.Generator().manual_seed(step)).double()
        out = model(jigsaw.shard(x, mesh, ("data", None, "lat", "lon")))
        assert dist.get_world_size() == math.prod(axes.values())
        expected = alone(x)
        torch.testing.assert_close(out.full_tensor(), expected, atol=1e-12, rtol=1e-12)
        out.square().mean().backward()
        expected.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = p.grad.full_tensor() if shard_weights else p.grad
        torch.testing.assert_close(grad, q.grad, atol=1e-12, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    for (name, b), c in zip(model.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(b, c, atol=1e-12, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_codebook_and_a_norm_that_synchronise_themselves(axes):
    run_on_ranks(math.prod(axes.values()), _steps, axes, None, False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_they_do_so_again_in_what_is_checkpointed(reentrant, cut):
    run_on_ranks(2, _steps, {"lat": 2}, reentrant, cut)


class EveryCollective(nn.Module):
    def forward(self, x):
        assert (dist.get_world_size(), dist.get_rank(), world_size_from_before()) == (1, 0, 1)
        assert dist.get_backend() == "gloo"
        mesh = x.mesh
        assert mesh.get_local_rank("lat") == mesh.get_coordinate()[0] == dist.get_rank(mesh.get_group("lat"))
        assert mesh.get_rank() == mesh.mesh[mesh.get_coordinate()[0]]
        for value in (torch.arange(3.0) + 1, x):
            _check_collectives(value)
        words, first = [None], ["mine"]
        dist.all_gather_object(words, "said")
        dist.broadcast_object_list(first, 0)
        assert (words, first) == (["said"], ["mine"])
        dist.barrier()
        with pytest.raises(ShardingError, match=r"list of 2 tensors: .* make as many as .*get_world_size"):
            dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.ones(3))
        with pytest.raises(ShardingError, match="a message to another process"):
            dist.send(torch.ones(3), 1)
        with pytest.raises(ShardingError, match=r"all_reduce of a Tile .* with group=: a Tile is the whole tensor"):
            dist.all_reduce(x, group=mesh.get_group("lat"))
        with pytest.raises(ShardingError, match="a collective by the name of the default group"):
            all_reduce_by_name(torch.ones(3), "sum", dist.group.WORLD)
        group_sum = torch.ones(3)
        dist.all_reduce(group_sum, group=mesh.get_group("lat"))  # which was asked for by name
        assert group_sum.tolist() == [2, 2, 2]
        thread = threading.Thread(target=lambda: sizes.append(dist.get_world_size()))
        sizes = []
        thread.start()
        thread.join()
        assert sizes == [2]
        return x


def _check_collectives(value):
    before = value.clone()
    empty = torch.zeros_like(value)
    dist.all_reduce(value)
    assert dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.reduce(value, 0)
    dist.broadcast(value, 0)
    torch.testing.assert_close(_whole(value), _whole(before))
    for collective in (
        lambda: dist.all_gather([empty], value),
        lambda: dist.all_gather_single(empty, value),
        lambda: dist.gather(value, [empty], 0),
        lambda: dist.scatter(empty, [value], 0),
        lambda: dist.reduce_scatter(empty, [value]),
        lambda: dist.reduce_scatter_single(empty, value),
        lambda: dist.all_to_all([empty], [value]),
        lambda: dist.all_to_all_single(empty, value),
    ):
        empty.zero_()
        collective()
        torch.testing.assert_close(_whole(empty), _whole(before))


def _whole(x):
    return x.full_tensor() if isinstance(x, jigsaw.Tile) else x


@on_ranks(2)
def test_every_collective_in_a_forward_pass():
    mesh = world_mesh(lat=2)
    x = jigsaw.shard(torch.randn(2, 9, 4), mesh, (None, "lat", None))
    model = parallelize(nn.Sequential(EveryCollective(), nn.Linear(4, 4)), mesh)
    model(x)
    model[0](x)  # a child, called on its own
    assert (dist.get_world_size(), dist.get_rank()) == (2, mesh.get_rank())
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


ENDS = {
    "all_reduce": summed_with_gradient.all_reduce,
    "broadcast": lambda x: summed_with_gradient.broadcast(x, 0),
    "all_gather": lambda x: torch.cat(summed_with_gradient.all_gather(x)),
    "a group made within": lambda x: _summed_in(dist.new_group(), x),
    "a group of the first": lambda x: _summed_in(dist.new_group([0]), x),
}


def _summed_in(group, x):
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    assert (dist.get_rank(group), dist.get_world_size(group)) == (0, 1)
    return x * total.abs()


class EndsWith(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.end, self.gain = end, nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return self.end(x * self.gain)


@pytest.mark.parametrize("end", ENDS)
@on_ranks(2)
def test_a_model_may_end_with_a_sum_and_make_groups(end):
    mesh, x = world_mesh(lat=2), torch.randn(5, 2)
    tiled, whole = (parallelize(EndsWith(ENDS[end]), mesh) for _ in "ab")
    for model, given in ((tiled, jigsaw.shard(x, mesh, ("lat", None))), (whole, x)):
        out, y = model(given), x * model.gain
        torch.testing.assert_close(_whole(out), y * y.detach().abs() if "group" in end else y)
        out.square().sum().backward()
    torch.testing.assert_close(tiled.gain.grad, whole.gain.grad)


class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError(f"in a world of {dist.get_world_size()}")


@on_ranks(2)
def test_the_job_is_there_again_whatever_the_model_raises():
    world = dist.distributed_c10d._world
    rank = dist.get_rank
    model = parallelize(nn.Sequential(nn.Linear(4, 4), Raises()), world_mesh(lat=2))
    with pytest.raises(RuntimeError, match="in a world of 1"):
        model(torch.ones(2, 4))
    assert dist.get_world_size() == 2
    assert dist.distributed_c10d._world is world
    assert dist.get_rank is rank


class Profiled(nn.Module):
    def forward(self, x):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            y = x.exp()
        assert any(event.key == "aten::exp" for event in profiled.key_averages())
        return y


@on_ranks(2)
def test_the_profiler_starts_within_a_model():
    """It asks for the backend of every group, that of the model too."""
    mesh = world_mesh(lat=2)
    x = jigsaw.shard(torch.ones(2, 4), mesh, (None, "lat"))
    assert parallelize(Profiled(), mesh)(x).full_tensor().equal(torch.ones(2, 4).exp())


class _RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(f"in a world of {dist.get_world_size()}")


class FailsBackward(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return _RaisesBackward.apply(x)
        return checkpoint(_RaisesBackward.apply, x, use_reentrant=self.reentrant)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_job_is_there_again_behind_a_backward_pass_that_raised(reentrant):
    world = dist.distributed_c10d._world
    model = parallelize(FailsBackward(reentrant), world_mesh(lat=2))
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="in a world of 1"):
        model(x).sum().backward()
    assert dist.get_world_size() == 2
    assert dist.distributed_c10d._world is world


@on_ranks(2)
def test_outside_a_model_a_sum_of_tiles_is_refused():
    x = jigsaw.shard(torch.arange(6.0), world_mesh(lat=2), ("lat",))
    for tile in (x, jigsaw.shard(torch.arange(6.0), world_mesh(lat=2), (None,))):
        for strict in (True, False):
            with jigsaw.strict_mode(strict):
                with pytest.raises(ShardingError, match=r"all_reduce of a Tile of shape \(6,\): .* leave the call out"):
                    dist.all_reduce(tile)
                with pytest.raises(ShardingError, match="all_gather_single of a Tile"):
                    dist.all_gather_single(torch.empty(12), tile)
                parts = [torch.zeros_like(tile), torch.zeros_like(tile)]
                dist.all_gather(parts, tile)
                assert [part.full_tensor().tolist() for part in parts] == 2 * [[0, 1, 2, 3, 4, 5]]
                dist.all_reduce(tile, op=dist.ReduceOp.AVG)  # alike for any number of processes
                dist.broadcast(tile, 0)
        assert tile.full_tensor().tolist() == [0, 1, 2, 3, 4, 5]


@on_ranks(2)
def test_another_models_backward_pass_sees_the_job():
    mesh, seen = world_mesh(lat=2), []
    model, other = parallelize(nn.Linear(4, 4), mesh), nn.Linear(4, 4)
    other.weight.register_hook(lambda gradient: seen.append(dist.get_world_size()))
    copy.deepcopy(other)(torch.ones(1, 4)).sum().backward()
    model(torch.ones(1, 4)).sum().backward()
    other(torch.ones(1, 4)).sum().backward()
    assert seen == [2]


class _Interrupt(BaseException):
    """What ends a forward pass without the hooks of torch."""


class _Interrupted(nn.Module):
    def forward(self, x):
        raise _Interrupt


class _GoesOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = _Interrupted()

    def forward(self, x):
        with contextlib.suppress(_Interrupt):
            self.part(x)
        return x


@on_ranks(2)
def test_the_job_is_there_again_behind_an_interrupt_within_a_model():
    mesh = world_mesh(lat=2)
    jigsaw.parallelize(_GoesOn(), mesh)(jigsaw.shard(torch.ones(2, 4), mesh, (None, "lat")))
    assert torch.distributed.get_world_size() == 2
