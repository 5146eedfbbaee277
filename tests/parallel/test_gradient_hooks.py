"""Who looks at a gradient before the buckets are back sees that of the whole batch, or is told why not."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import ShardingError
from jigsaw.errors import RanksDifferError
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

SPEC = ("data", None, "lat", "lon")
AXES = [{"lat": 1}, {"lat": 2}, {"data": 3}, {"lat": 2, "lon": 2}, {"data": 2, "channel": 2}]


class Net(nn.Module):
    """Convolutions, a norm, a tied weight, one that meets plain tensors alone, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, 6), nn.Conv2d(6, 2, 1)
        self.head, self.unused = nn.Linear(2, 3), nn.Parameter(torch.ones(2))

    def forward(self, x):
        y = self.second(torch.tanh(self.first(x)))
        y = self.last(self.norm(torch.tanh(self.second(y))))
        return y, self.head(y.mean((2, 3)).mean(0))


def _loss(model, x):
    y, summary = model(x)
    return y.square().mean() + summary.square().sum() + 1e-2 * sum(_whole(p).square().sum() for p in model.parameters())


def _setting(axes, **options):
    mesh = world_mesh(**axes)
    torch.manual_seed(0)
    plain = Net().double()
    model = jigsaw.parallelize(copy.deepcopy(plain), mesh, bucket_bytes=500, **options)
    x = torch.randn(3, 2, 13, 10, dtype=torch.float64)
    spec = tuple(axis if axis in axes else None for axis in SPEC)
    tile = jigsaw.shard(x, mesh, spec)
    tile.local.requires_grad_()
    return mesh, plain, model, x, tile


def _whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _assert_same(found, expected):
    torch.testing.assert_close([_whole(x) for x in found], list(expected), rtol=0, atol=1e-10)


def _seen_by_hooks(model, x):
    """The gradients that hooks see, and those that they leave, after two passes that add up."""
    seen = {}

    def shrink(name, grad):
        seen.setdefault(f"{name} early", []).append(grad.clone())
        return grad.clamp(-0.1, 0.1)

    def behind(name, p):
        seen.setdefault(f"{name} late", []).append(p.grad.clone())

    for name, p in model.named_parameters():
        if name != "last.bias":  # which has none
            p.register_hook(partial(shrink, name))
            p.register_post_accumulate_grad_hook(partial(behind, name))
    for _ in range(2):
        _loss(model, x).backward()
    flat = [grad for name in sorted(seen) for grad in seen[name]]
    return [*flat, *(p.grad for p in model.parameters())]


def _hooks_see_the_whole(axes):
    _, plain, model, x, tile = _setting(axes)
    _assert_same(_seen_by_hooks(model, tile), _seen_by_hooks(plain, x))


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_hooks_on_parameters_see_the_whole_gradient(axes):
    run_on_ranks(torch.Size(axes.values()).numel(), _hooks_see_the_whole, axes)


def _stepped_in_hooks(model, x, no_sync=None):
    """The weights after three steps of an optimizer for each parameter, within the backward pass, without ``.grad``."""
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        _loss(model, x).backward()
        assert all(p.grad is None for p in model.parameters())
    return list(model.parameters())


def _steps_are_those_of_one_process(axes):
    _, plain, model, x, tile = _setting(axes)
    _assert_same(_stepped_in_hooks(model, tile), _stepped_in_hooks(plain, x))


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_an_optimizer_in_a_hook_steps_with_the_whole_gradient(axes):
    run_on_ranks(torch.Size(axes.values()).numel(), _steps_are_those_of_one_process, axes)


def _penalized(model, x):
    """Gradients of a loss with a penalty on its gradients, and those gradients; without a graph; of second order in
    ``.grad``.
    """
    loss = _loss(model, x)
    taken = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(_whole(g).square().sum() for g in taken)
    (loss + 0.1 * penalty).backward()
    bare = torch.autograd.grad(_loss(model, x), [model.first.weight, model.head.bias])
    found = [*taken, *bare, *(p.grad for p in model.parameters())]
    found = [_whole(x).detach().clone() for x in found]
    model.zero_grad()
    loss = _loss(model, x)
    loss.backward(create_graph=True)
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    sum(_whole(g).pow(4).sum() for g in grads).backward()
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


def _penalties_are_those_of_one_process(axes):
    _, plain, model, x, tile = _setting(axes)
    _assert_same(_penalized(model, tile), _penalized(plain, x))
    # on the gradient of the input
    for each in (plain, model):
        each.zero_grad()
    (grad,) = torch.autograd.grad(_loss(plain, x.requires_grad_()), x, create_graph=True)
    grad.square().sum().backward()
    (grad,) = torch.autograd.grad(_loss(model, tile), tile.local, create_graph=True)
    jigsaw.Tile(grad, tile.layout, tile.mesh).square().sum().backward()
    trained = [
        (p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if q.grad is not None
    ]
    _assert_same(*zip(*trained, strict=True))


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_penalties_on_gradients_are_exact(axes):
    run_on_ranks(torch.Size(axes.values()).numel(), _penalties_are_those_of_one_process, axes)


@on_ranks(2)
def test_hooks_that_are_gone_cost_nothing_and_no_sync_keeps_to_them():
    _, plain, model, x, tile = _setting({"lat": 2})
    expected = torch.autograd.grad(_loss(plain, x), list(plain.parameters()))
    first = next(at for at, (name, _) in enumerate(plain.named_parameters()) if name == "first.weight")
    seen = []
    handle = model.first.weight.register_hook(seen.append)
    with jigsaw.no_sync(model):
        _loss(model, tile).backward()
    _loss(model, tile).backward()
    _assert_same(seen, [expected[first]] * 2)
    _assert_same([p.grad / 2 for p in model.parameters()], expected)
    handle.remove()
    model.zero_grad()
    with jigsaw.comm.count() as counted:
        _loss(model, tile).backward()
    after = [call.kind for call in counted.calls]
    other = _setting({"lat": 2})[2]
    with jigsaw.comm.count() as counted:
        _loss(other, tile).backward()
    assert after == [call.kind for call in counted.calls]
    # the copy of a model has hooks of its own
    twin = copy.deepcopy(model)
    _assert_same(torch.autograd.grad(_loss(twin, tile), [twin.first.weight]), [expected[first]])


@on_ranks(2)
def test_a_wrapper_and_its_mean_leave_them_alone():
    _, plain, model, x, tile = _setting({"lat": 2}, reduce=False)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    del wrapped
    expected = torch.autograd.grad(_loss(plain, x), [plain.first.weight, plain.norm.bias])
    _assert_same(torch.autograd.grad(_loss(model, tile), [model.first.weight, model.norm.bias]), expected)


@on_ranks(2)
def test_ranks_that_take_other_gradients_are_told():
    _, _, model, _, tile = _setting({"lat": 2})
    weight = (model.norm.weight, model.norm.bias)[dist.get_rank()]
    with pytest.raises(RanksDifferError, match=r"this rank's are the gradient of, norm\.(weight|bias)"):
        torch.autograd.grad(_loss(model, tile), [weight])


@on_ranks(2)
def test_hooks_from_before_parallelize_are_refused():
    net = Net()
    net.norm.bias.register_hook(lambda grad: None)
    with pytest.raises(ShardingError, match=r"'norm.bias' has a hook .* from before parallelize.*register hooks after"):
        jigsaw.parallelize(net, world_mesh(lat=2))


def _cut_net():
    mesh = world_mesh(lat=2)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 1)).double()
    model = jigsaw.parallelize(copy.deepcopy(plain), mesh, shard_weights=True, unit_bytes=1)
    x = torch.randn(1, 2, 7, 6, dtype=torch.float64)
    return plain, model, x, jigsaw.shard(x, mesh, (None, None, "lat", None))


@on_ranks(2)
def test_hooks_on_cut_weights_see_the_whole_gradient_or_are_refused():
    plain, model, x, tile = _cut_net()
    plain(x).square().mean().backward()
    with pytest.raises(ShardingError, match=r"register_hook on a parameter that shard_weights= cuts would never be"):
        model[0].weight.register_hook(lambda grad: None)
    seen = []
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
    model(tile).square().mean().backward()
    _assert_same(seen, [plain[0].weight.grad])
    handle.remove()
    with pytest.raises(ShardingError, match="create_graph=True through weights that shard_weights= cuts"):
        model(tile).square().mean().backward(create_graph=True)


@pytest.mark.parametrize("way", [True, "keep"])
@on_ranks(2)
def test_a_penalty_on_the_input_is_refused_where_weights_are_cut(way):
    mesh = world_mesh(lat=2)
    model = jigsaw.parallelize(nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh()), mesh, shard_weights=way)
    tile = jigsaw.shard(torch.randn(1, 2, 7, 6), mesh, (None, None, "lat", None)).requires_grad_()
    with pytest.raises(ShardingError, match="create_graph=True through weights that shard_weights= cuts"):
        torch.autograd.grad(model(tile).sum(), tile, create_graph=True)
    (grad,) = torch.autograd.grad(model(tile).sum(), tile)
    assert grad.shape == tile.shape


@on_ranks(2)
def test_hooks_on_gathered_weights_are_refused():
    class Looks(nn.Conv2d):
        def forward(self, x):
            self.weight.register_hook(lambda grad: None)
            return super().forward(x)

    model = jigsaw.parallelize(nn.Sequential(Looks(2, 2, 1)), world_mesh(lat=2), shard_weights=True, unit_bytes=1)
    tile = jigsaw.shard(torch.ones(1, 2, 4, 4), world_mesh(lat=2), (None, None, "lat", None))
    with pytest.raises(ShardingError, match=r"gathered for one forward pass .* would see a part of its gradient"):
        model(tile).square().mean().backward()


@on_ranks(2)
def test_hooks_in_a_pipeline_are_refused():
    mesh = world_mesh(pipe=2)
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 2, 1))
    x = torch.ones(2, 2, 4, 4)
    pipe = jigsaw.pipeline(net, mesh, loss=F.mse_loss, microbatches=2)
    for p in pipe.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ShardingError, match=r"of a pipeline has a hook on its gradient.*after pipe\.step"):
        pipe.step(x, x)
