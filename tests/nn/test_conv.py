"""Convolutions on tiles are those of the whole tensor: outputs and every gradient, any kernel, any cuts, any
padding.
"""

from __future__ import annotations

import copy
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.stencil_rules import derive_cut
from jigsaw.nn.stencils.halo_conv import plan_halo, plan_of_whole_channels
from jigsaw.nn.stencils.stencil import plan_stencil
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, run_on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1, "lon": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]

LAYERS = {
    "3x3": nn.Conv2d(3, 4, 3, padding=1),
    "1x1": nn.Conv2d(3, 4, 1, bias=False),
    "valid": nn.Conv2d(3, 4, 3),
    "wide": nn.Conv2d(3, 4, (5, 7), padding=(2, 3)),
    "strided": nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "strided 7 by 4": nn.Conv2d(3, 4, 7, stride=4, padding=3),
    "stride beyond the kernel": nn.Conv2d(3, 4, 2, stride=3),
    "patches": nn.Conv2d(3, 4, 2, stride=2),
    "dilated": nn.Conv2d(3, 4, 3, dilation=(2, 3), padding=(2, 3)),
    "padded beyond the kernel": nn.Conv2d(3, 4, 3, padding=4),
    "grouped": nn.Conv2d(4, 8, 3, padding=1, groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "same": nn.Conv2d(3, 4, 3, padding="same"),
    "same, even kernel": nn.Conv2d(3, 4, (4, 2), padding="same"),
    "circular": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "circular, even and strided": nn.Conv2d(3, 4, 4, stride=2, padding=(1, 2), padding_mode="circular"),
    "reflect": nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect"),
    "replicate": nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="replicate"),
    "same and circular": nn.Conv2d(3, 4, (4, 3), padding="same", padding_mode="circular"),
}
TRANSPOSED = {
    "doubling": nn.ConvTranspose2d(3, 4, 2, stride=2),
    "overlapping": nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1),
    "odd, with output padding": nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    "stride 1": nn.ConvTranspose2d(3, 4, 3, padding=1),
    "full": nn.ConvTranspose2d(3, 4, 3),
    "stride beyond the kernel": nn.ConvTranspose2d(3, 4, 2, stride=4, output_padding=(3, 1)),
    "dilated": nn.ConvTranspose2d(3, 4, 3, stride=2, dilation=2, padding=2, output_padding=1),
    "grouped": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
    "cropped": nn.ConvTranspose2d(3, 4, 5, stride=3, padding=3),
}


def channels(layer):
    return layer.in_channels


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(13, 10), (33, 7)])
def test_conv2d(name, shape):
    layer = LAYERS[name]
    assert_same_on_every_mesh(layer, torch.randn(2, channels(layer), *shape), MESHES, spec=SPACE)


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("shape", [(7, 10), (13, 5)])
def test_conv_transpose2d(name, shape):
    layer = TRANSPOSED[name]
    assert_same_on_every_mesh(layer, torch.randn(2, channels(layer), *shape), MESHES, spec=SPACE)


@pytest.mark.parametrize("points", [(0, 0, 7, 8, 13), (0, 1, 1, 12, 13), (0, 13, 13, 13, 13), (0, 2, 3, 4, 13)])
@pytest.mark.parametrize(
    "name", ["3x3", "wide", "strided", "padded beyond the kernel", "circular", "reflect", "same, even kernel"]
)
def test_thin_and_empty_pieces(name, points):
    layer = LAYERS[name]
    x = torch.randn(2, channels(layer), 13, 10)
    assert_same_on_every_mesh(layer, x, [{"lat": 4}], spec=SPACE, split={2: points})
    assert_same_on_every_mesh(
        nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1), x, [{"lat": 4}], spec=SPACE, split={2: points}
    )


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("periodic", [(), (3,)])
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_halo_serves_any_padding(mode, periodic, stride):
    layer = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=stride, padding=1, padding_mode=mode),
        nn.GELU(),
        nn.Conv2d(3, 2, 3, padding=1, padding_mode=mode),
    )
    halo = {2: (2, 1), 3: 3}
    assert_same_on_every_mesh(layer, torch.randn(1, 2, 13, 10), MESHES, spec=SPACE, halo=halo, periodic=periodic)


@pytest.mark.parametrize("mesh", [{"z": 2}, {"z": 2, "x": 2}, {"y": 3}])
def test_conv3d(mesh):
    x = torch.randn(1, 2, 7, 10, 5)
    spec = (None, None, "z", "y", "x")
    assert_same_on_every_mesh(nn.Conv3d(2, 3, 3, padding=1, stride=(1, 2, 1)), x, [mesh], spec=spec)
    assert_same_on_every_mesh(nn.ConvTranspose3d(2, 3, 2, stride=2), x, [mesh], spec=spec)
    assert_same_on_every_mesh(nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), x, [mesh], spec=spec)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_conv1d_batched_and_not(ranks):
    layer = nn.Sequential(nn.Conv1d(2, 3, 5, padding=2), nn.ConvTranspose1d(3, 2, 3, stride=2))
    assert_same_on_every_mesh(layer, torch.randn(3, 2, 33), [{"lat": ranks}], spec=(None, None, "lat"))
    assert_same_on_every_mesh(layer, torch.randn(2, 33), [{"lat": ranks}], spec=(None, "lat"))


@pytest.mark.parametrize("mesh", [{"data": 2, "lat": 2}, {"data": 4}, {"data": 2, "spare": 2}])
def test_a_cut_batch(mesh):
    assert_same_on_every_mesh(LAYERS["3x3"], torch.randn(3, 3, 7, 10), [mesh], spec=("data", None, "lat", "lon"))


class UNet(nn.Module):
    """Down, up, skip: cuts must meet again."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        high = F.gelu(self.first(x))
        return self.last(torch.cat([high, self.up(F.gelu(self.down(high)))], 1)) + x


@pytest.mark.parametrize("mesh", MESHES)
def test_unet(mesh):
    assert_same_on_every_mesh(UNet(), torch.randn(2, 2, 16, 24), [mesh], spec=SPACE, align=2)


# -- bytes ------------------------------------------------------------------------------------------------------------


def gradient_bytes(tile, layer):
    """The bytes sent by forward and by backward of a layer on a tile that requires grad."""
    tile.local.requires_grad_()
    with comm.count() as forward:
        y = layer(tile)
    loss = (y.local * torch.randn_like(y.local)).sum()
    with comm.count() as backward:
        loss.backward()
    return forward, backward


@on_ranks(4)
def test_a_3x3_convolution_sends_one_row_a_side():
    mesh = world_mesh(lat=4)
    tile = shard(torch.randn(2, 3, 13, 10), mesh, SPACE)
    forward, backward = gradient_bytes(tile, nn.Conv2d(3, 4, 3, padding=1))
    row = 2 * 3 * 10 * 4
    sides = 1 if tile.coordinate[0] in (0, 3) else 2
    assert (forward.sent_bytes, backward.sent_bytes) == (sides * row, sides * row)
    assert (forward.messages, backward.messages) == (sides, sides)


@on_ranks(2)
def test_a_convolution_is_planned_once():
    """By strips, by an exchange (uneven padding, which no dim leaves to the plain op), and transposed."""
    mesh = world_mesh(lat=2)
    x = shard(torch.randn(1, 3, 40, 8), mesh, (None, None, "lat", None))
    for layer, dims in (
        (nn.Conv2d(3, 3, 3, padding=1), 1),
        (nn.Conv2d(3, 3, 4, padding="same"), 2),
        (nn.ConvTranspose2d(3, 3, 4, stride=2), 1),
    ):
        for planner in (plan_of_whole_channels, plan_stencil, derive_cut, plan_halo):
            planner.cache_clear()
        layer(x)
        assert (plan_stencil.cache_info().misses, derive_cut.cache_info().misses) == (1, dims)
        layer(x)
        assert plan_stencil.cache_info().misses == 1
        assert (plan_of_whole_channels.cache_info().misses, plan_of_whole_channels.cache_info().hits) == (1, 1)


@on_ranks(4)
def test_bytes_on_a_square_mesh_include_the_corner():
    tile = shard(torch.randn(1, 2, 8, 12), world_mesh(lat=2, lon=2), SPACE)
    forward, backward = gradient_bytes(tile, nn.Conv2d(2, 4, 3, padding=1))
    assert forward.sent_bytes == backward.sent_bytes == 2 * 4 * (4 + 6 + 1)


@on_ranks(2)
def test_a_halo_from_disk_makes_the_first_convolutions_silent():
    tile = shard(torch.randn(1, 2, 24, 36), world_mesh(lat=2), SPACE, halo={2: 3})
    with comm.count() as sent:
        y = tile
        for _ in range(3):
            y = F.gelu(nn.Conv2d(2, 2, 3, padding=1)(y))
    assert sent.messages == 0 and not y.layout.has_halo
    with comm.count() as sent:
        nn.Conv2d(2, 2, 3, padding=1)(y)
    assert sent.sent_bytes == 2 * 36 * 4


@on_ranks(2)
def test_a_periodic_halo_serves_circular_and_zero_padding_in_silence():
    tile = shard(torch.randn(1, 2, 12, 24), world_mesh(lon=2), SPACE, halo={3: 2}, periodic=(3,))
    with comm.count() as sent:
        nn.Conv2d(2, 3, 5, padding=2, padding_mode="circular")(tile)
        nn.Conv2d(2, 3, 5, padding=2)(tile)
    assert sent.messages == 0


@on_ranks(2)
def test_circular_padding_and_convolution_exchange_once():
    tile = shard(torch.randn(1, 2, 12, 24), world_mesh(lon=2), SPACE)
    with comm.count() as sent:
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")(tile)
    assert (
        sent.messages == 1 and sent.sent_bytes == 2 * 2 * (12 + 2) * 4
    )  # two columns with their corners, from the one neighbor


@on_ranks(2)
def test_aligned_patches_and_doubling_send_nothing():
    tile = shard(torch.randn(1, 2, 12, 8), world_mesh(lat=2), SPACE, align={2: 2})
    with comm.count() as sent:
        nn.ConvTranspose2d(3, 2, 2, stride=2)(nn.Conv2d(2, 3, 2, stride=2)(tile))
    assert sent.messages == 0


# -- errors -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_uses_name_the_rule():
    tile = shard(torch.randn(1, 2, 12, 8), world_mesh(lat=2), SPACE)
    with pytest.raises(ShardingError, match=r"takes 3 channels, but the Tile of shape \(1, 2, 12, 8\) has 2"):
        nn.Conv2d(3, 4, 3)(tile)
    with pytest.raises(ShardingError, match=r"window of 15 rows .* does not fit into 12 rows"):
        nn.Conv2d(2, 4, (15, 1))(tile)
    with pytest.raises(ShardingError, match="needs 3 or 4 dims"):
        nn.Conv2d(2, 4, 3)(tile.unsqueeze(0))
    with pytest.raises(ShardingError, match="needs a weight of 4 dims"):
        F.conv2d(tile, torch.randn(3, 2, 3))
    with pytest.raises(ShardingError, match="input= is a plain Tensor"):
        F.conv2d(torch.randn(1, 2, 4, 4), tile)
    with pytest.raises(ShardingError, match="flattened together; unflatten it to"):
        nn.Conv1d(2, 3, 3)(shard(torch.randn(1, 2, 12, 8), world_mesh(lon=2), SPACE).flatten(2))


# -- strips: pieces so tall that the input is not copied ---------------------------------------------------------------

TALL = {
    "5": nn.Conv1d(2, 3, 5, padding=2),
    "4, same": nn.Conv1d(2, 3, 4, padding="same"),
    "valid": nn.Conv1d(2, 3, 4),
    "strided": nn.Conv1d(2, 3, 3, stride=2, padding=1),
    "7 by 4": nn.Conv1d(2, 3, 7, stride=4, padding=3),
    "asymmetric strides": nn.Conv1d(2, 3, 5, stride=3, padding=1),
    "stride beyond the kernel": nn.Conv1d(2, 3, 2, stride=3, padding=1),
    "dilated": nn.Conv1d(2, 4, 3, dilation=3, padding=3, groups=2),
    "without bias": nn.Conv1d(2, 3, 3, padding=1, bias=False),
}


@pytest.mark.parametrize("name", TALL)
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4]
)
def test_strips(name, ranks):
    layer, spec = TALL[name], (None, None, "lat")
    assert_same_on_every_mesh(layer, torch.randn(2, 2, 401), [{"lat": ranks}], spec=spec)
    for halo in [1, (0, 2), (3, 1)]:
        assert_same_on_every_mesh(
            layer, torch.randn(2, 2, 401), [{"lat": ranks}], spec=spec, halo={2: halo}, periodic=(2,)
        )


@pytest.mark.parametrize("kernel", [(3, 3), (5, 3), (4, 2)])
@pytest.mark.parametrize("mesh", [{"lat": 2}, {"lon": 3}, {"lat": 2, "lon": 2}])
def test_strips_around_a_box(kernel, mesh):
    x = torch.randn(2, 3, 110, 101)
    assert_same_on_every_mesh(nn.Conv2d(3, 4, kernel, padding="same"), x, [mesh], spec=SPACE)
    assert_same_on_every_mesh(nn.Conv2d(3, 4, kernel, padding=2, stride=(2, 1)), x, [mesh], spec=SPACE, halo={3: 1})


def test_strips_around_a_box_of_three_dims():
    layer, spec = nn.Conv3d(1, 2, 3, padding=1), (None, None, "z", "y", None)
    assert_same_on_every_mesh(layer, torch.randn(1, 1, 35, 36, 5), [{"z": 2, "y": 2}], spec=spec)


BOXES = {
    "box": (nn.Conv2d(3, 4, (5, 3), padding="same"), (2, 3, 110, 101), SPACE, {"lat": 2, "lon": 2}),
    "strided box": (nn.Conv2d(3, 4, 3, padding=2, stride=(2, 1)), (2, 3, 110, 101), SPACE, {"lat": 2, "lon": 2}),
    "circular box": (
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 110, 101), SPACE, {"lat": 2, "lon": 2}
    ),
    "box of three dims": (
        nn.Conv3d(1, 2, 3, padding=1), (1, 1, 35, 36, 5), (None, None, "z", "y", None), {"z": 2, "y": 2}
    ),
}  # fmt: skip
NARROW = {name: (layer, (2, 2, 401), (None, None, "lat"), {"lat": 3}) for name, layer in TALL.items()} | BOXES


def narrow_result(layer, x, spec, axes, dtype):
    narrow = copy.deepcopy(layer).to(dtype)
    return narrow(shard(x.to(dtype), world_mesh(**axes), spec)).full_tensor().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NARROW)
def test_strips_of_narrow_values_are_rounded_once(name, dtype):
    """So rows at the borders of ranks are as exact as the others: half of the last digit."""
    layer, shape, spec, axes = NARROW[name]
    x = torch.randn(shape).to(dtype)
    exact = copy.deepcopy(layer).to(dtype).double()(x.double())
    half_digit = torch.finfo(dtype).eps / 2 * 2.0 ** exact.abs().clamp(min=1e-3).log2().floor()
    for got in run_on_ranks(prod(axes.values()), narrow_result, layer, x, spec, axes, dtype):
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= half_digit * 1.01 + 1e-6).all()


@on_ranks(2)
def test_a_tall_convolution_neither_copies_nor_keeps_its_input_twice():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(1, 4, 64, 32), mesh, SPACE)
    tile.local.requires_grad_()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        x = F.relu(tile)  # keeps its result
        y = nn.Conv2d(4, 4, 3, padding=1)(x)
    assert sum(t.nbytes for t in kept.values()) < 1.2 * x.local.nbytes
    forward, backward = gradient_bytes(tile, nn.Conv2d(4, 4, 3, padding=1))
    assert forward.sent_bytes == backward.sent_bytes == 4 * 32 * 4
    assert y.layout.dim(2)[0].points == (0, 32, 64)


@on_ranks(2)
def test_strips_are_differentiable_twice():
    mesh, layer = world_mesh(lat=2), nn.Conv2d(2, 2, 3, padding=1).double()
    whole = torch.randn(1, 2, 64, 6, dtype=torch.float64, requires_grad=True)

    def penalty(x):
        out = layer(x).pow(3).sum()
        (slope,) = torch.autograd.grad(out, whole, create_graph=True)
        return slope.square().sum()

    expected = torch.autograd.grad(penalty(whole), whole)[0]
    # the gradient of shard is whole on every rank
    found = torch.autograd.grad(penalty(shard(whole, mesh, SPACE)), whole)[0]
    torch.testing.assert_close(found, expected)


TWICE = {
    "convolution": nn.Conv2d(2, 2, 3, padding=1),
    "strided": nn.Conv2d(2, 2, 2, stride=3),
    "transposed": nn.ConvTranspose2d(2, 2, 3, stride=2, padding=3),
    "reflect": nn.Conv2d(2, 2, 1, stride=(1, 3), padding=(0, 2), padding_mode="reflect"),
    "maxima": nn.MaxPool2d((2, 1), stride=(4, 1)),
    "means": nn.AvgPool2d((2, 1), stride=(4, 1)),
    "pixels": nn.PixelUnshuffle(2),
    "upsampled": nn.Upsample(scale_factor=2, mode="bilinear"),
    "downsampled": nn.Upsample(size=(1, 2)),
}


@pytest.mark.parametrize("name", TWICE)
@on_ranks(3)
def test_second_derivatives_pass_ranks_without_rows(name):
    layer = TWICE[name].double()
    whole = torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True)

    def penalty(x):
        (slope,) = torch.autograd.grad(layer(x).pow(3).sum() + x.pow(3).sum(), whole, create_graph=True)
        return slope.square().sum()

    expected = torch.autograd.grad(penalty(whole), whole)[0]
    for points in [(0, 0, 6, 6), (0, 1, 2, 6)]:
        tile = shard(whole, world_mesh(lat=3), SPACE, split={2: points})
        torch.testing.assert_close(torch.autograd.grad(penalty(tile), whole)[0], expected)


@on_ranks(2)
def test_autocast_exchanges_in_its_dtype():
    mesh, layer = world_mesh(lat=2), nn.Conv2d(4, 4, 3, padding=1)
    x = torch.randn(1, 4, 64, 32)
    with torch.autocast("cpu", torch.bfloat16), comm.count() as sent:
        y = layer(shard(x, mesh, SPACE))
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    assert y.dtype == torch.bfloat16
    assert sum(c.sent_bytes for c in sent.calls if c.kind == "exchange") == 4 * 32 * 2
    torch.testing.assert_close(y.full_tensor(), expected, rtol=2e-2, atol=2e-2)
