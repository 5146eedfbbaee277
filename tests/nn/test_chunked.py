"""Chunked modules: outputs, buffers and every gradient are those of plain torch on the whole, on every mesh."""

from __future__ import annotations

import copy
import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.oracle import random_functional

MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]


def block(ins, outs, norm, **how):
    return nn.Sequential(nn.Conv2d(ins, outs, 3, padding=1, **how), norm, nn.GELU())


class SmallUNet(nn.Module):
    """Norms of three kinds, strides, a pool, a transposed convolution, interpolation, a skip, a circle."""

    def __init__(self):
        super().__init__()
        self.first = block(2, 4, nn.GroupNorm(2, 4), padding_mode="circular")
        self.down = block(4, 4, nn.BatchNorm2d(4), stride=2)
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.merge = block(8, 3, nn.InstanceNorm2d(3, affine=True))

    def forward(self, x):
        skip = self.first(x)
        low = self.down(skip)
        low = self.up(self.deep(low)) + low
        y = self.merge(torch.cat([F.interpolate(low, scale_factor=2, mode="bilinear"), skip], 1))
        return {"field": y, "low": low}


class Attention(nn.Module):
    """A transformer block over tokens, twice, with a causal and with a plain mask."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(13, 13))
        self.rest = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) + F.scaled_dot_product_attention(q, k, v, self.bias)
        return self.rest(x + self.out(y.transpose(1, 2).flatten(2)))


class Conditioned(nn.Module):
    """A convolution with a plain tensor that every rank has, made by the caller."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.inner = Shifted()

    def forward(self, x, when):
        return self.inner(x, shift=self.embed(when))


class Merged(nn.Module):
    """Half the resolution, and back beside what there was: `up` takes tensors of 1 and of 2 (3) rows each."""

    def __init__(self, times=2):
        super().__init__()
        self.first, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.AvgPool2d(times)
        self.up = Widened(times)

    def forward(self, x):
        x = self.first(x)
        return self.up(self.down(x), x)


class Widened(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.wider = nn.ConvTranspose2d(4, 4, times, times)
        self.block = nn.Sequential(block(8, 3, nn.GroupNorm(3, 3)), block(3, 2, nn.Identity()))

    def forward(self, low, x):
        return self.block(torch.cat([self.wider(low), x], 1))


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 5, padding=2), nn.GroupNorm(2, 4)

    def forward(self, x, shift):
        return self.norm(self.conv(x)) * shift[:, :, None, None]


def chunk(model, mesh, name="", **how):
    jigsaw.nn.chunked(model.get_submodule(name), **how)
    return jigsaw.parallelize(model, mesh)


@pytest.mark.parametrize("meshes", [MESHES[-1:], pytest.param(MESHES[:-1], marks=pytest.mark.slow)], ids=str)
def test_net_with_everything(meshes):
    torch.manual_seed(0)
    build = partial(chunk, slabs=2)
    assert_same_on_every_mesh(
        SmallUNet(), torch.randn(2, 2, 40, 12), meshes, spec=(None, None, "lat", "lon"), build=build, align=4
    )


@pytest.mark.slow
def test_layers_at_odd_sizes_on_every_mesh():
    torch.manual_seed(0)
    net = nn.Sequential(
        block(2, 2, nn.GroupNorm(1, 2), padding_mode="circular", dilation=2),
        block(2, 4, nn.BatchNorm2d(4, momentum=None), stride=2),
        nn.AvgPool2d(3, 2, 1),
        nn.ConvTranspose2d(4, 4, 3, 2, 1, 1),
        nn.Upsample(size=(33, 13), mode="bilinear", align_corners=True),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
    )
    assert_same_on_every_mesh(
        net, torch.randn(3, 2, 33, 10), MESHES, spec=(None, None, "lat", "lon"), build=partial(chunk, slabs=2)
    )
    assert_same_on_every_mesh(
        net, torch.randn(3, 2, 33, 10), [{"data": 2, "lat": 2}], build=partial(chunk, slabs=2, dim=-1)
    )


def test_attention_over_slabs_of_queries():
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        Attention(),
        torch.randn(2, 13, 8),
        [{"lat": 1}, {"lat": 3}, {"data": 2, "lat": 2}],
        spec=("data", "lat", None),
        build=partial(chunk, slabs=3, dim=1),
    )


def test_submodule_with_a_plain_argument():
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        Conditioned(),
        [torch.randn(2, 2, 13, 10), torch.randn(2, 3)],
        [{"lat": 2}, {"data": 2, "lat": 2}],
        spec=[(None, None, "lat", None), None],
        build=partial(chunk, name="inner", slabs=3),
    )


def test_a_layer_with_two_names_keeps_its_weights():
    torch.manual_seed(0)
    shared, other = (block(2, 2, nn.BatchNorm2d(2)) for _ in range(2))
    other[0].weight = shared[0].weight
    net = nn.Sequential(shared, nn.Sequential(shared), other)
    meshes = [{"lat": 2}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(
        net, torch.randn(2, 2, 32, 12), meshes, spec=(None, None, "lat", "lon"), build=partial(chunk, slabs=2)
    )


def test_inputs_of_several_resolutions():
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        Merged(),
        torch.randn(2, 2, 26, 12),
        [{"lat": 1}, {"lat": 2}, {"lat": 2, "lon": 2}],
        spec=(None, None, "lat", "lon"),
        build=partial(chunk, name="up", slabs=2),
        align=2,
    )
    assert_same_on_every_mesh(
        Merged(3), torch.randn(2, 2, 39, 9), [{"lat": 3}], build=partial(chunk, name="up", slabs=3), align=3
    )


def compare_on_plain_tensors(net, x, **how):
    """Outputs, buffers and gradients of a module and of its chunked copy."""
    mine = jigsaw.nn.chunked(copy.deepcopy(net), **how)
    results = []
    for model in (net, mine):
        torch.manual_seed(1)
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        random_functional(y).backward()
        results.append([y, leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-11)
    return mine


def test_plain_tensors():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1), nn.InstanceNorm3d(4)
    ).double()
    mine = compare_on_plain_tensors(net, torch.randn(2, 2, 13, 7, 6, dtype=torch.float64), slabs=4)
    assert list(mine.state_dict()) == list(net.state_dict())
    again = copy.deepcopy(mine)
    assert again.forward.module is again  # a copy runs with its own weights
    compare_on_plain_tensors(net.eval(), torch.randn(1, 2, 7, 13, 6, dtype=torch.float64), slabs=2, dim=3)
    with torch.no_grad():
        x = torch.randn(1, 2, 7, 13, 6, dtype=torch.float64)
        torch.testing.assert_close(mine.eval()(x), net(x))


@on_ranks(2)
def test_dropout_is_that_of_the_whole_tile():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.4), nn.GroupNorm(2, 4), nn.Dropout2d(0.3)).double()
    mesh = world_mesh(lat=2)
    results = []
    for model in (net, jigsaw.nn.chunked(copy.deepcopy(net), slabs=3)):
        torch.manual_seed(3)
        tile = jigsaw.shard(torch.randn(2, 2, 13, 10, dtype=torch.float64), mesh, (None, None, "lat", None))
        tile.local.requires_grad_()
        y = model(tile)
        (y * torch.rand_like(y)).sum().backward()
        results.append([y.local, tile.local.grad, torch.get_rng_state()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


@on_ranks(2)
def test_what_is_sent():
    """One convolution of 5 x 5 and one of 3 x 3: three rows a neighbor, once forward, once again and back."""
    net = nn.Sequential(nn.Conv2d(2, 4, 5, padding=2), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))
    mesh = world_mesh(lat=2)
    tile = jigsaw.shard(torch.randn(1, 2, 16, 10), mesh, (None, None, "lat", None))
    tile.local.requires_grad_()
    jigsaw.nn.chunked(net, slabs=2)
    net(tile)  # finds the halo
    rows = 3 * 2 * 10 * 4
    with comm.count() as sent:
        y = net(tile)
    assert sent.sent_bytes == rows
    with comm.count() as sent:
        y.local.sum().backward()
    assert sent.sent_bytes == 2 * rows


def held_for_backward(net, x):
    """The bytes that live on after a forward pass, but for parameters, x and the result."""
    gc.collect()
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    known = {t.untyped_storage().data_ptr() for t in (*net.parameters(), x)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = net(x)
    return sum(n for at, n in saved.items() if at not in known | {y.untyped_storage().data_ptr()})


def test_nothing_but_the_input_is_kept():
    net = nn.Sequential(block(4, 8, nn.GroupNorm(2, 8)), block(8, 8, nn.InstanceNorm2d(8)))
    x = torch.randn(1, 4, 33, 20)
    assert held_for_backward(net, x) > 5 * 8 * 33 * 20 * 4
    assert held_for_backward(jigsaw.nn.chunked(net, slabs=4), x) == 0


def test_unfit():
    x = torch.randn(1, 2, 7, 10)
    conv = nn.Conv2d(2, 2, 3, padding=1)
    with pytest.raises(ShardingError, match=r"slabs=1 must be a whole number, 2 or more"):
        jigsaw.nn.chunked(conv, slabs=1)
    with pytest.raises(ShardingError, match="is chunked already"):
        jigsaw.nn.chunked(jigsaw.nn.chunked(nn.Conv2d(2, 2, 1), slabs=2), slabs=2)
    with pytest.raises(ShardingError, match="slabs=8 of dim 2, of which a rank has 7 rows"):
        jigsaw.nn.chunked(copy.deepcopy(conv), slabs=8)(x)
    with pytest.raises(ShardingError, match="dim=4 of shape"):
        jigsaw.nn.chunked(copy.deepcopy(conv), slabs=2, dim=4)(x)
    y = jigsaw.nn.chunked(copy.deepcopy(conv), slabs=2)(x.requires_grad_())
    with pytest.raises(ShardingError, match="gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    for inner, why in [
        (Meaned(), "values of all slabs at once"),
        (Flipped(), "values of all slabs at once|rows of the whole dim"),
        (nn.AdaptiveAvgPool2d(1), "values of all slabs at once|has no slabs"),
        (nn.Softmax(2), "values of all slabs at once"),
        # rows that are lacking on one side alone
        (Rolled(), "rows of the whole dim"),
        (Doubled(2), "rows of the whole dim"),
        (Detoured(), "gives a plain tensor"),
    ]:
        with pytest.raises(ShardingError, match=why):
            jigsaw.nn.chunked(nn.Sequential(copy.deepcopy(conv), inner), slabs=2)(x)


class Meaned(nn.Module):
    def forward(self, x):
        return x - x.mean(2, keepdim=True)


class Flipped(nn.Module):
    def forward(self, x):
        return x.flip(2)


class Rolled(nn.Module):
    def forward(self, x):
        return x.roll(1, 2)


class Doubled(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return torch.cat([x, x], self.dim)


@on_ranks(2)
def test_channels_that_would_have_to_move_are_refused_in_slabs():
    x = jigsaw.shard(torch.randn(2, 4, 7, 13), world_mesh(lat=2), (None, "lat", None, None))
    assert Doubled(1)(x).shape == (2, 8, 7, 13)
    with pytest.raises(ShardingError, match=r"reads rows of the whole dim that \[\('lat',\)\] cut"):
        jigsaw.nn.chunked(Doubled(1), slabs=3)(x)


class Detoured(nn.Module):
    def forward(self, x):
        return torch.ones(3)
