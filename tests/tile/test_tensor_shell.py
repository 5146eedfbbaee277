"""A Tile is a torch.Tensor: for `isinstance`, for every attribute and method of one, and for C++ code that takes it for
one: answered, or refused by a typed error, never read from a shell that has no memory.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard


def _tile(mesh, requires_grad=True):
    x = torch.arange(35.0, dtype=torch.float64).reshape(7, 5).sin()
    tile = shard(x, mesh, ("lat", None))
    tile.local.requires_grad_(requires_grad)
    return x.clone().requires_grad_(requires_grad), tile


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight=None):
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2, None


@on_ranks(2)
def test_a_tile_is_a_tensor():
    x, tile = _tile(world_mesh(lat=2))
    assert isinstance(tile, torch.Tensor) and torch.is_tensor(tile) and torch.jit.isinstance(tile, torch.Tensor)
    assert not isinstance(tile, nn.Parameter)
    assert isinstance(tile.layout, jigsaw.Layout) and torch.Tensor.layout.__get__(tile) is torch.strided
    assert torch.Tensor.size(tile, 0) == torch.numel(tile) // 5 == torch.Tensor.dim(tile) + 5 == 7
    assert torch.Tensor.shape.__get__(tile) == x.shape and tile.nbytes == x.nbytes and tile.itemsize == 8
    for name in ("dtype", "device", "is_cuda", "is_sparse", "is_meta", "is_quantized", "is_nested", "is_leaf"):
        assert getattr(tile, name) == getattr(x, name)
    for method in ("is_contiguous", "element_size", "get_device", "is_conj", "is_signed", "ndimension", "nelement"):
        assert getattr(tile, method)() == getattr(x, method)()
    for call in (
        lambda y: y.T,
        lambda y: y.H,
        lambda y: y.mT + y.mH,
        lambda y: y.real,
        lambda y: torch.complex(y, y * 2).imag,
        lambda y: y.data,
        lambda y: y.detach().cpu(),
        lambda y: y.contiguous().clone(),
        lambda y: y.to(torch.float32),
        torch.as_tensor,
        lambda y: default_collate([y, y]),
        lambda y: reversed(y[None]),
    ):
        assert torch.equal(call(tile).full_tensor(), call(x))
    assert x[3, 2].item() in tile and 7.0 not in tile


def test_nothing_is_answered_by_the_shell():
    """Every name of torch.Tensor is this package's: a property or method of Tile, or of Python's own objects."""
    left = []
    for name in set(dir(torch.Tensor)) - {"__slotnames__"}:  # which copyreg leaves
        owner = next(cls for cls in Tile.__mro__ if name in vars(cls))
        if not owner.__module__.startswith("jigsaw") and owner is not object:
            left.append(name)
    assert sorted(left) == [
        "__array_priority__",
        "__delitem__",
        "__dict__",
        "__getitem__",
        "__setitem__",
        "__weakref__",
        "_dtensor__new__",
        "_make_subclass",
        "_make_wrapper_subclass",
    ]


@on_ranks(2)
def test_every_attribute_and_method_is_answered_or_refused():
    """Whatever torch.Tensor has, without arguments: an answer, or the same error of torch or jigsaw on every rank."""
    mesh = world_mesh(lat=2)
    answered = 0
    for name in sorted(dir(torch.Tensor)):
        x, tile = _tile(mesh, requires_grad=False)
        kind = inspect.getattr_static(torch.Tensor, name)
        if name in ("__class__", "__dlpack_c_exchange_api__", "__init_subclass__", "__subclasshook__", "__new__"):
            continue
        try:
            found = getattr(tile, name)
            found = found() if callable(found) else found
            told = "answered"
        except (
            ShardingError,
            RuntimeError,
            TypeError,
            IndexError,
            NotImplementedError,
            AttributeError,
            AssertionError,
        ) as error:
            told = type(error).__name__
        answered += told == "answered"
        assert set(comm.all_gather_object(mesh, told)) == {told}, name
        if told == "answered" and type(found) is Tile and found.layout.cut_dims == (0,) and found.shape == x.shape:
            assert found.local.shape == tile.local.shape, (name, kind)
    assert answered > 150


@on_ranks(2)
def test_memory_is_refused():
    _, tile = _tile(world_mesh(lat=2), requires_grad=False)
    whole = tile.redistribute((None, None))
    for name in ("data_ptr", "untyped_storage", "storage", "share_memory_", "_typed_storage"):
        for each in (tile, whole):
            with pytest.raises(ShardingError, match=rf"{name} on a Tile .*memory.*tile.local"):
                getattr(each, name)()
    for call in (tile.storage_offset, tile.numpy, tile.tolist):
        with pytest.raises(ShardingError, match=r"on a Tile .*tile.local for a local answer"):
            call()
    with pytest.raises(ShardingError, match=r"has no _cdata; tile.local"):
        _ = tile._cdata
    for call in (
        lambda: torch.utils.dlpack.to_dlpack(tile),
        lambda: torch.Tensor(tile),
        lambda: torch.nested.nested_tensor([tile, tile]),
    ):
        with pytest.raises((ShardingError, RuntimeError, BufferError), match=r"cannot become a plain tensor|meta"):
            call()
    with pytest.raises(RuntimeError, match=r"TorchScript interpreter|forward on a Tile"):
        torch.jit.trace(torch.sin, torch.ones(2))(tile)
    plain = torch.zeros(7, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        plain.data = tile
    with pytest.raises(ShardingError, match=r"cannot be a parameter: make one of tile.local"):
        nn.Parameter(tile)
    with pytest.raises(dataclasses.FrozenInstanceError, match="a Tile is frozen"):
        tile.data = tile
    with pytest.raises(dataclasses.FrozenInstanceError, match="a Tile is frozen"):
        del tile.local
    for convert in (np.asarray, np.sin):
        with pytest.raises(ShardingError, match="cannot become an array"):
            convert(tile)


@on_ranks(2)
def test_numbers_of_one_element():
    mesh = world_mesh(lat=2)
    one = shard(torch.tensor([3]), mesh, (None,))
    assert float(one) == 3 and int(one) == 3 and bool(one) and [4, 5, 6, 7][one] == 7 and one.tolist() == [3]
    with pytest.raises(TypeError, match="only integer tiles of one element"):
        range(one * 1.0)


# -- gradients --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_are_those_of_the_local_tensor():
    mesh = world_mesh(lat=2)
    weight = torch.linspace(1, 2, 35, dtype=torch.float64).reshape(7, 5)
    for halo in ({}, {0: 1}):
        x, _ = _tile(mesh)
        tile = shard(x.detach(), mesh, ("lat", None), halo=halo, periodic=[0] if halo else [])
        tile.requires_grad_()
        assert tile.requires_grad and tile.is_leaf and tile.grad_fn is None
        seen = []
        y, t = x.square(), tile.square()
        for z in (y, t):
            assert z.requires_grad and not z.is_leaf and z.grad_fn.name() == "PowBackward0"
            z.retain_grad()
            z.register_hook(lambda g, seen=seen: seen.append(g))
            z.register_hook(lambda g: g * 2)
        y.backward(weight)
        t.backward(weight)
        torch.testing.assert_close(
            tile.local.grad.narrow(0, 1 if halo else 0, 3), x.grad[4 * mesh.get_local_rank() :][:3]
        )
        if not halo:
            torch.testing.assert_close(seen[1].full_tensor(), seen[0])
            torch.testing.assert_close(t.grad.full_tensor(), y.grad)
            torch.testing.assert_close(tile.grad.full_tensor(), x.grad)


@on_ranks(2)
def test_autograd_functions():
    mesh = world_mesh(lat=2)
    x, tile = _tile(mesh)
    weight = torch.linspace(1, 2, 35, dtype=torch.float64).reshape(7, 5)
    (expected,) = torch.autograd.grad(x.exp(), x, weight, create_graph=True)
    for given in (weight, shard(weight, mesh, ("lat", None))):
        (found,) = torch.autograd.grad(tile.exp(), tile, given, create_graph=True)
        assert isinstance(found, Tile)
        torch.testing.assert_close(found.full_tensor(), expected)
    torch.autograd.backward([tile.sin(), tile.exp().sum()], [weight, None])
    torch.autograd.backward([x.sin(), x.exp().sum()], [weight, None])
    torch.testing.assert_close(tile.grad.full_tensor(), x.grad)
    assert torch.autograd.grad(tile.sum(), [tile, x], allow_unused=True)[1] is None
    for gradient, words in [
        (torch.ones(5), "a gradient of shape"),
        (tile.redistribute((None, "lat")), "a gradient cut as"),
    ]:
        with pytest.raises(ShardingError, match=words):
            tile.exp().backward(gradient)
    with pytest.raises(RuntimeError, match="implicitly created only for scalar"):
        tile.exp().backward()
    with pytest.raises(ShardingError, match="is_grads_batched"):
        torch.autograd.grad(tile.exp(), tile, weight[None], is_grads_batched=True)


@on_ranks(2)
def test_a_custom_function_of_tiles_and_one_that_cannot_be_followed():
    mesh = world_mesh(lat=2)
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    x, tile = _tile(mesh)
    with torch.no_grad():
        assert torch.equal(_Doubled.apply(tile).full_tensor(), x * 2)
    for use in (lambda t: t + 1, lambda t: torch.cat([t, t], 1), Tile.full_tensor, lambda t: t[0]):
        for y in (tile, tile * 1, _tile(mesh, requires_grad=False)[1]):
            with pytest.raises(
                ShardingError, match=r"came out of _DoubledBackward.*would be lost.*use_reentrant=False"
            ):
                use(_Doubled.apply(y, weight * 1))  # which it has not saved
        assert torch.equal(use(_Doubled.apply(tile, weight)), use(_Doubled.apply(tile)))  # a leaf is found
        x.grad = tile.local.grad = None
        found, expected = use(_Doubled.apply(tile * 1)), (x * 2).mul(1)
        found.square().sum().backward()
        (expected if use is Tile.full_tensor else use(expected)).square().sum().backward()
        torch.testing.assert_close(tile.grad.full_tensor(), x.grad)
    with pytest.raises(ShardingError, match="came out of _CheckpointTilesBackward"):  # which got no tile
        checkpoint(lambda w: tile * w, weight, use_reentrant=True).sum()
    layer = nn.Linear(5, 2).double()
    torch.testing.assert_close(checkpoint(layer, tile, use_reentrant=False).full_tensor(), layer(x))


@on_ranks(2)
def test_a_custom_function_of_a_tile_that_was_asked_or_changed():
    mesh = world_mesh(lat=2)
    for is_asked in (False, True):
        x, tile = _tile(mesh)
        results = []
        for leaf in (x, tile):
            y = leaf * 2
            y.mul_(3)
            y[0] = 1.0  # a second change: the first gave it a gradient
            assert not is_asked or y.requires_grad
            z = _Doubled.apply(y)
            z.square().sum().backward()
            results.append(z)
        torch.testing.assert_close(results[1].full_tensor(), results[0])
        torch.testing.assert_close(tile.grad.full_tensor(), x.grad)
        z = _Doubled.apply(y)
        y.mul_(3)
        with pytest.raises(RuntimeError, match="the input of _DoubledBackward was changed in place"):
            z.sum()


@on_ranks(2)
def test_a_result_of_a_function_says_that_it_requires_grad():
    leaf = shard(torch.ones(4), world_mesh(lat=2), ("lat",)).requires_grad_()
    for read, expected in ((lambda y: y.requires_grad, True), (lambda y: y.is_leaf, False), (lambda y: y.grad_fn, ...)):
        found = read(_Doubled.apply(leaf))
        assert found is expected or (expected is ... and found is not None)
    doubled = _Doubled.apply(leaf.detach())
    assert (doubled.requires_grad, doubled.is_leaf, doubled.grad_fn) == (False, True, None)
    assert leaf.is_leaf and leaf.grad_fn is None


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(x):  # a view of its input, or the input itself
        return torch.view_as_complex(torch.view_as_real(x).contiguous()) if x.is_complex() else x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


class _Quadratic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, k):
        ctx.save_for_backward(x, y)
        ctx.k = k
        return k * x * x + y.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return 2 * ctx.k * x * grad, (grad.sum(-1, keepdim=True) / y.shape[-1]).expand_as(y), None


class _Scaled(torch.autograd.Function):
    """Of a tile and plain weights: one that was computed and is saved, a leaf that is not; two results."""

    @staticmethod
    def forward(ctx, x, weight, k, bias):
        ctx.save_for_backward(x, weight)
        ctx.k = k
        return x * weight * k + bias, x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx, grad, of_mean):
        x, weight = ctx.saved_tensors
        to_weight = (grad * x).sum((0, 2, 3), keepdim=True)[0] * ctx.k
        return grad * weight * ctx.k + of_mean / x.shape[1], to_weight, None, grad.sum()


class _ExpAndTanh(torch.autograd.Function):
    """Saves its own results, and no input."""

    @staticmethod
    def forward(ctx, x):
        powers, bounded = x.exp(), x.tanh()
        ctx.save_for_backward(bounded, powers)
        return powers, bounded.mean(1, keepdim=True), bounded

    @staticmethod
    def backward(ctx, of_powers, of_mean, of_bounded):
        bounded, powers = ctx.saved_tensors
        return of_powers * powers + (of_mean / bounded.shape[1] + of_bounded) * (1 - bounded * bounded)


class _WithFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(()))
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x):
        y = _Contiguous.apply(self.first(x))
        z = self.second(y)
        waves = _Contiguous.apply(torch.fft.rfft(z, dim=-1)).transpose(-1, -2).real.sum(-2, keepdim=True)
        scaled, _ = _Scaled.apply(z, self.weight.sin().view(2, 1, 1), 0.5, self.bias)
        _, mean = _Scaled.apply(z, self.weight.cos().view(2, 1, 1), 0.5, self.bias)
        z = scaled + mean
        powers, mean, _ = _ExpAndTanh.apply(z * 0.3)
        z = powers + mean - _ExpAndTanh.apply(z)[2]
        return _Quadratic.apply(z, self.second(y.exp()), 3.0) + _Contiguous.apply(z).sum(1, keepdim=True) + waves.mean()


def test_custom_functions_have_the_gradients_of_one_device():
    x = torch.randn(2, 2, 9, 7).double().requires_grad_()
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(_WithFunctions().double(), x, meshes, spec=(None, None, "lat", "lon"))


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


@on_ranks(2)
def test_a_tile_that_a_function_saved_and_that_was_changed_since_is_refused():
    x, tile = _tile(world_mesh(lat=2))
    for change in (
        lambda x, y: x.mul_(2) * y,
        lambda x, y: x.__setitem__((slice(None), 1), 3.0) or y,
        lambda x, y: (y * 1, x[:, 1].mul_(2))[0],
        lambda x, y: (x[:, 1].mul_(2), y * 1)[1],  # before the result is read for the first time
        lambda x, y: (x.view(-1)[3:9].mul_(2), x[..., -1, :].mul_(2), y)[2],
    ):
        for given in (x, tile):
            leaf = given * 1
            with pytest.raises(RuntimeError, match=r"in ?place"):
                change(leaf, _Cubed.apply(leaf)).sum().backward()


def _several_functions(x):
    return (_Doubled.apply(x) * 3).square() + _Cubed.apply(x) + _Doubled.apply(x * 2) * _Cubed.apply(x)


@on_ranks(2)
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(("function", "keeps_input"), [(_Doubled, False), (_Cubed, True)])
def test_the_input_of_a_function_lives_as_long_as_in_torch(function, keeps_input, is_checkpointed):
    x, tile = _tile(world_mesh(lat=2))
    inputs = []

    def step(x):
        y = x * 2
        inputs.append(weakref.ref(y.local if isinstance(y, jigsaw.Tile) else y))
        return function.apply(y) * 3 + 1

    for leaf in (x, tile):
        out = checkpoint(step, leaf, use_reentrant=False) if is_checkpointed else step(leaf)
        gc.collect()
        assert (inputs[-1]() is not None) == (keeps_input and not is_checkpointed)
        out.sum().backward()
    torch.testing.assert_close(tile.grad.full_tensor(), x.grad)


@on_ranks(2)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_tile_that_several_functions_take(is_checkpointed):
    x, tile = _tile(world_mesh(lat=2))
    for leaf in (x, tile):
        y = leaf * 1
        out = checkpoint(_several_functions, y, use_reentrant=False) if is_checkpointed else _several_functions(y)
        out.sum().backward()
    torch.testing.assert_close(tile.grad.full_tensor(), x.grad)


@on_ranks(2)
def test_backward_hooks_of_modules():
    mesh = world_mesh(lat=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, tile = _tile(mesh)
    results = []
    for y in (x, tile):
        seen = []
        hooks = [
            model[1].register_full_backward_hook(lambda m, gi, go, seen=seen: seen.extend([*gi, *go])),
            model[2].register_full_backward_pre_hook(lambda m, go, seen=seen: (go[0] * 2,)),
            model[0].register_forward_hook(lambda m, args, out: out + 1),
        ]
        model(y * 1).square().sum().backward()
        results.append([*seen, y.grad])
        for hook in hooks:
            hook.remove()
    assert len(results[0]) == len(results[1]) == 3
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.full_tensor(), a)


@on_ranks(2)
def test_what_requires_grad_was_asked_of_and_then_changed_in_place():
    mesh = world_mesh(lat=2)
    layer = nn.Tanh()
    layer.register_full_backward_hook(lambda *_: None)
    x, tile = _tile(mesh)
    for y in (x, tile):
        z = y * 3
        assert z.requires_grad
        z *= 2
        layer(z).sum().backward()
    torch.testing.assert_close(tile.grad.full_tensor(), x.grad)


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2)
def test_ddp_around_a_module_that_returns_tiles(unused):
    mesh = world_mesh(lat=2)
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, tile = _tile(mesh, requires_grad=False)
    wrapped = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=unused)
    if unused:  # torch looks for what is used in the graph of the shell
        with pytest.raises(ShardingError, match="came out of _DDPSinkBackward"):
            wrapped(tile).square()
        return
    wrapped(tile).square().sum().backward()
    model(x).square().sum().backward()
    for a, b in zip(model.parameters(), wrapped.module.parameters(), strict=True):
        torch.testing.assert_close(b.grad * 2, a.grad)


# -- copies -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_copies():
    mesh = world_mesh(lat=2)
    x, tile = _tile(mesh)
    shallow, deep = copy.copy(tile), copy.deepcopy([tile, tile])
    assert shallow.local is tile.local and deep[0] is deep[1] and deep[0].local is not tile.local
    assert deep[0].requires_grad and deep[0].mesh is mesh
    file = io.BytesIO()
    torch.save({"x": tile}, file)
    file.seek(0)
    for again in (deep[0], pickle.loads(pickle.dumps(tile)), torch.load(file, weights_only=False)["x"]):
        assert again.layout == tile.layout
        torch.testing.assert_close(again.full_tensor(), x)
    module = nn.Module()
    module.register_buffer("rows", tile.detach())
    assert torch.equal(copy.deepcopy(module).float().state_dict()["rows"].full_tensor(), x.detach().float())


def test_einops():
    einops = pytest.importorskip("einops")
    from einops.layers.torch import Rearrange, Reduce

    mesh = jigsaw.init_mesh(lat=1)
    x = torch.arange(120.0).reshape(2, 3, 4, 5)
    tile = shard(x, mesh, (None, None, "lat", None))
    for call in (
        lambda y: einops.rearrange(y, "b c h w -> b (h w) c"),
        lambda y: einops.reduce(y, "b c (h k) w -> b h w", "mean", k=2),
        lambda y: einops.repeat(y, "b c h w -> b c h w k", k=2),
        lambda y: einops.einsum(y, y, "b c h w, b d h w -> b c d"),
        Rearrange("b c (h k) w -> b h w (c k)", k=2),
        Reduce("b c h w -> b c", "max"),
    ):
        torch.testing.assert_close(call(tile).full_tensor(), call(x))


@on_ranks(2)
def test_attributes_are_set_on_tiles_as_on_tensors():
    mesh = world_mesh(lat=2)
    tile = shard(torch.arange(6.0), mesh, ("lat",))
    torch._dynamo.mark_static_address(tile)  # static caches of transformers say it to each of theirs
    tile.note = ["mine"]
    assert copy.copy(tile).note is tile.note
    copied = copy.deepcopy(tile)
    assert copied.note == ["mine"]
    assert copied.note is not tile.note
    del tile.note
    assert not hasattr(tile, "note")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'note'"):
        del tile.note
    for name in ("shape", "layout", "mesh", "dtype", "grad_fn"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(tile, name, None)
    tile.requires_grad = True
    (tile * tile).sum().backward()
    assert tile.grad.full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    tile.grad = tile.grad * 2
    assert tile.local.grad.equal(tile.local * 4)
    with pytest.raises(ShardingError, match="can be None, or a Tile that lies alike"):
        tile.grad = torch.zeros(6)
    tile.grad = None
    assert tile.local.grad is None


@on_ranks(2)
def test_a_pickled_tile_is_not_taken_for_another_ranks_part():
    mesh = world_mesh(lat=2)
    tile = shard(torch.arange(12.0).view(4, 3), mesh, ("lat", None))
    own = pickle.loads(pickle.dumps(tile))
    torch.testing.assert_close((own + tile).full_tensor(), 2 * tile.full_tensor())
    first = comm.all_gather_object(mesh, pickle.dumps(tile))[0]
    if mesh.get_rank() == 1:
        with pytest.raises(ShardingError, match=r"pickled by rank 0 of 2, whose part it has, and this is rank 1 of 2"):
            pickle.loads(first)
