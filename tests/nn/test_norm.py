"""Norms: statistics, outputs, running statistics and every gradient are those of the whole tensor, whatever is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import distribute_tensor

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.nn.norms.standardize import as_norm_images
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]


class Permuted(nn.Module):
    """A layer norm over channels of a channel-first image, as ConvNeXt does it."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


LAYERS = {
    "layer norm over space": nn.LayerNorm((7, 10)),
    "layer norm over channels": Permuted(nn.LayerNorm(4)),
    "rms norm": Permuted(nn.RMSNorm(4)),
    "rms norm over space": nn.RMSNorm((7, 10), eps=1e-5),
    "group norm": nn.GroupNorm(2, 4),
    "instance norm": nn.InstanceNorm2d(4, affine=True),
    "batch norm": nn.BatchNorm2d(4),
    "batch norm without affine": nn.BatchNorm2d(4, affine=False, momentum=0.3),
    "batch norm in evaluation": nn.BatchNorm2d(4).eval(),
}


def _randomised(layer):
    torch.manual_seed(1)
    for p in layer.parameters():
        nn.init.normal_(p, 1.0, 0.3)
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_norm(name):
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        _randomised(LAYERS[name]), torch.randn(3, 4, 7, 10) * 3 + 5, MESHES, spec=(None, None, "lat", "lon"), rtol=1e-8
    )


@pytest.mark.parametrize("name", LAYERS)
def test_norm_of_a_tile_with_halo(name):
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        _randomised(LAYERS[name]),
        torch.randn(3, 4, 7, 10),
        MESHES[1:],
        spec=(None, None, "lat", "lon"),
        halo={2: 1, 3: 2},
        periodic=(3,),
        rtol=1e-8,
    )


class Turned(nn.Module):
    """A norm whose gradient comes in another order of memory than its values."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x).transpose(1, 2)


IMAGE_LAYERS = {
    "group norm": nn.GroupNorm(2, 4),
    "group norm without affine": nn.GroupNorm(1, 4, affine=False),
    "instance norm, turned": Turned(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "batch norm, turned": Turned(nn.BatchNorm2d(4)),
    "changed in place": nn.Sequential(nn.InstanceNorm2d(4), nn.LeakyReLU(inplace=True)),
}


@pytest.mark.parametrize("mean", [5, 5000])
@pytest.mark.parametrize("name", IMAGE_LAYERS)
def test_norm_of_images(name, mean):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 33, 46) * 3 + mean
    layer = _randomised(IMAGE_LAYERS[name])
    assert_same_on_every_mesh(layer, x, MESHES, spec=(None, None, "lat", "lon"), rtol=1e-8, atol=1e-8)


def test_moments_of_images():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 300, 301) * torch.rand(2, 3, 4, 1, 1) + 1e3  # several chunks of images
    x[0, 1, 2] = 7.0
    weight = torch.ones(3, 4, 1, 1)
    for dims in ((2, 3, 4), (3, 4), (0, 3, 4)):
        images = as_norm_images(x, dims, weight, None)
        assert images.values.shape == (1, 24, 300 * 301)
        for found, expected in zip(
            images.moments(dims), torch.var_mean(x.double(), dims, correction=0, keepdim=True), strict=True
        ):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert as_norm_images(x, (2, 3, 4), None).shape == (2, 3, 1, 1, 1)  # without weights a group is one image
    for y, dims, scale in (
        (x[..., ::2], (3, 4), None),
        (x, (3,), None),
        (x, (3, 4), torch.ones(301)),
        (x[:0], (3, 4), None),
    ):
        assert as_norm_images(y, dims, scale) is None


@pytest.mark.parametrize("name", ["group norm", "batch norm", "layer norm over channels"])
def test_norm_with_a_cut_batch(name):
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        _randomised(LAYERS[name]),
        torch.randn(3, 4, 7, 10),
        [{"data": 2, "lat": 2}, {"data": 3}],
        spec=("data", None, "lat", None),
        rtol=1e-8,
    )


def test_norm_with_cut_channels():
    torch.manual_seed(0)
    x = torch.randn(3, 4, 7, 10)
    spec = (None, "channel", "lat", None)
    for name in ("group norm", "instance norm", "layer norm over channels", "batch norm in evaluation"):
        assert_same_on_every_mesh(
            _randomised(LAYERS[name]), x, [{"channel": 2}, {"channel": 2, "lat": 2}], spec=spec, rtol=1e-8
        )


@on_ranks(4)
def test_large_means_lose_no_digits():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 10) + 3e4
    norm = nn.GroupNorm(1, 4)
    truth = norm.double()(x.double())
    tile = shard(x, world_mesh(lat=2, lon=2), (None, None, "lat", "lon"))
    ours, plain = norm.float()(tile).full_tensor(), norm(x)
    assert (ours - truth).abs().max() <= (plain - truth).abs().max()


@on_ranks(2)
def test_what_norms_refuse():
    mesh = world_mesh(channel=2)
    x = shard(torch.randn(2, 4, 6), mesh, (None, "channel", None))
    with pytest.raises(ShardingError, match=r"layer_norm over \(5,\).*\(6,\)"):
        nn.LayerNorm(5)(x)
    with pytest.raises(ShardingError, match="num_groups=3: 4 channels"):
        nn.functional.group_norm(x, 3)


def test_a_rank_may_have_one_sample_of_one_channel_a_group():
    x = torch.randn(5, 2, dtype=torch.float64)
    assert_same_on_every_mesh(nn.GroupNorm(2, 2), x, [{"data": 3}, {"data": 4}], spec=("data", None))


@on_ranks(2)
def test_instance_norm_of_one_position_is_refused_as_torch_does():
    tile = shard(torch.randn(3, 2, 1), world_mesh(data=2), ("data", None, None))
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        nn.functional.instance_norm(tile)


@on_ranks(2)
def test_one_value_a_group_is_refused_as_torch_does():
    tile = shard(torch.randn(1, 2), world_mesh(data=2), ("data", None))
    with comm.count() as counted, pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.functional.group_norm(tile, 2)
    assert counted.calls == []


@on_ranks(2)
def test_an_empty_batch_has_no_statistics():
    norm, whole = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    tile = shard(torch.zeros(0, 4, 7, 10), world_mesh(lat=2), (None, None, "lat", None))
    y, expected = norm(tile), whole(torch.zeros(0, 4, 7, 10))
    y.sum().backward()
    expected.sum().backward()
    assert y.shape == expected.shape and torch.equal(norm.weight.grad, whole.weight.grad)
    assert torch.equal(norm.running_mean, whole.running_mean) and torch.equal(norm.running_var, whole.running_var)


@pytest.mark.parametrize("rows", [7, 600])
@on_ranks(2)
def test_norms_are_differentiable_twice(rows):
    torch.manual_seed(0)
    x = torch.randn(2, 4, rows, dtype=torch.float64)
    norm = _randomised(nn.GroupNorm(2, 4)).double()
    tile = shard(x, world_mesh(lat=2), (None, None, "lat"))
    whole = x.clone().requires_grad_()
    tile.local.requires_grad_()
    seconds = []
    for leaf, value in ((whole, whole), (tile.local, tile)):
        (first,) = torch.autograd.grad(norm(value).pow(3).sum(), leaf, create_graph=True)
        first = first if value is whole else type(tile)(first, tile.layout, tile.mesh)
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf)
        seconds.append(second)
    found = type(tile)(seconds[1], tile.layout, tile.mesh).full_tensor()
    torch.testing.assert_close(found, seconds[0])


@pytest.mark.parametrize("shape", [(6, 7), (5, 1, 1)])
def test_a_layer_norm_over_all_dims(shape):
    layer = nn.LayerNorm(shape)
    for p in layer.parameters():
        nn.init.normal_(p)
    spec = ("lat", *(None,) * (len(shape) - 1))
    assert_same_on_every_mesh(layer, torch.randn(shape), [{"lat": 2}, {"lat": 3}], spec=spec)


class Pair(nn.Module):
    """A column layer and a norm over its cut channels."""

    def __init__(self, layer, norm):
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x):
        return self.norm(self.layer(x))


@pytest.mark.parametrize("kind", ["layer", "rms", "group"])
@on_ranks(4)
def test_norms_with_cut_weights(kind):
    torch.manual_seed(0)
    mesh = world_mesh(channel=2, lat=2)
    names = {"layer": "LayerNorm", "rms": "RMSNorm", "group": "GroupNorm"}
    arguments = {"layer": (6,), "rms": (6,), "group": (2, 6)}[kind]
    plain = Pair(
        nn.Conv2d(3, 6, 1) if kind == "group" else nn.Linear(3, 6), getattr(nn, names[kind])(*arguments)
    ).double()
    for p in plain.parameters():
        nn.init.normal_(p)
    make = jigsaw.nn.Conv2d if kind == "group" else jigsaw.nn.Linear
    ours = Pair(
        make(3, 6, *((1,) if kind == "group" else ()), mesh=mesh),
        getattr(jigsaw.nn, names[kind])(*arguments, mesh=mesh),
    ).double()
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            mine.copy_(distribute_tensor(theirs.detach(), mine.device_mesh, mine.placements))
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64) if kind == "group" else torch.randn(2, 7, 3, dtype=torch.float64)
    tile = shard(x, mesh, (None, None, "lat", None) if kind == "group" else (None, "lat", None))
    out = ours(tile)
    assert out.layout.is_cut(1 if kind == "group" else 2)
    torch.testing.assert_close(out.full_tensor(), plain(x))
    out.pow(3).mean().backward()
    plain(x).pow(3).mean().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        part = comm.all_reduce(mine.grad.to_local(), mesh, ("lat",))
        whole = distribute_tensor(theirs.grad, mine.device_mesh, mine.placements).to_local()
        torch.testing.assert_close(part, whole)
    with pytest.raises(ShardingError, match="takes a Tile whose channels are cut so"):
        ours.norm(out.redistribute((None,) * out.ndim))


SCRAMBLED = {
    "instance norm": nn.InstanceNorm2d(4),
    "group norm": nn.GroupNorm(2, 4),
    "batch norm": nn.BatchNorm2d(4),
    "layer norm": nn.LayerNorm((4, 8, 6)),
}


@pytest.mark.parametrize("dim", range(1, 4))
@pytest.mark.parametrize("name", SCRAMBLED)
@on_ranks(2)
def test_results_lie_in_memory_as_torchs(name, dim):
    spec: list[str | None] = [None] * 4
    spec[dim] = "lat"
    for dims in ((0, 3, 1, 2), (1, 0, 2, 3)):
        whole = torch.randn(4, 4, 8, 6).permute(dims).contiguous()
        tile = jigsaw.shard(whole, world_mesh(lat=2), spec)
        back = [dims.index(d) for d in range(4)]
        got, right = (SCRAMBLED[name](x.permute(back)) for x in (tile, whole))
        assert got.stride() == right.stride()
        torch.testing.assert_close(got.full_tensor(), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@on_ranks(2)
def test_the_default_eps_of_an_rms_norm_is_torchs(dtype):
    whole = (torch.arange(1, 9.0).reshape(2, 4) / 1000).to(dtype)
    tile = jigsaw.shard(whole, world_mesh(lat=2), (None, "lat"))
    torch.testing.assert_close(F.rms_norm(tile, (4,)).full_tensor(), F.rms_norm(whole, (4,)))
