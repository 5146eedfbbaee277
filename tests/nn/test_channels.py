"""Convolutions whose channels are cut, in the input, in the weight, or in both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

CHANNEL = (None, "channel", "lat", None)
MESHES = [{"channel": 2}, {"channel": 3}, {"channel": 4}, {"channel": 2, "lat": 2}]
LAYERS = {
    "fewer channels": nn.Conv2d(10, 3, 3, padding=1),
    "more channels": nn.Conv2d(10, 13, 3, padding=1),
    "as many": nn.Conv2d(10, 10, (3, 2), padding="same"),
    "strided": nn.Conv2d(10, 7, 3, stride=2, padding=1, padding_mode="circular"),
    "1x1": nn.Conv2d(10, 4, 1, bias=False),
    "one": nn.Conv2d(10, 1, 3, padding=1),
    "depthwise": nn.Conv2d(10, 10, 3, padding=1, groups=10),
    "depthwise, twice": nn.Conv2d(10, 20, 3, padding=1, groups=10),
    "grouped": nn.Conv2d(10, 15, 3, padding=1, groups=5),
    "transposed": nn.ConvTranspose2d(10, 7, 2, stride=2),
    "transposed, more channels": nn.ConvTranspose2d(10, 13, 3, padding=1),
    "transposed, grouped": nn.ConvTranspose2d(10, 5, 4, stride=2, padding=1, groups=5),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_plain_weights_on_cut_channels(name, mesh):
    assert_same_on_every_mesh(LAYERS[name], torch.randn(2, 10, 7, 5), [mesh], spec=CHANNEL)


@pytest.mark.parametrize("mesh", [{"channel": 2}, {"channel": 2, "lat": 2}])
def test_tall_pieces_of_cut_channels(mesh):
    for layer in (nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)):
        assert_same_on_every_mesh(layer, torch.randn(1, 4, 66, 5), [mesh], spec=CHANNEL)


@pytest.mark.parametrize("name", LAYERS)
def test_a_rank_without_channels(name):
    x = torch.randn(2, 10, 7, 5)
    for mesh, points in [({"channel": 2}, (0, 10, 10)), ({"channel": 3}, (0, 0, 10, 10))]:
        assert_same_on_every_mesh(LAYERS[name], x, [mesh], spec=CHANNEL, split={1: points})


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("periodic", [(), (1, 2)])
def test_rows_of_a_halo_and_cut_channels(name, periodic):
    mesh, halo = {"channel": 2, "lat": 2}, {1: (1, 0), 2: (2, 1)}
    x = torch.randn(2, 10, 7, 5)
    assert_same_on_every_mesh(LAYERS[name], x, [mesh], spec=CHANNEL, halo=halo, periodic=periodic)
    assert_same_on_every_mesh(LAYERS[name], x, [mesh], spec=CHANNEL, halo=halo, periodic=periodic, split={2: (0, 0, 7)})


class PaddedFirst(nn.Conv2d):
    mode = ""

    def forward(self, input):
        return super().forward(nn.functional.pad(input, (1, 1, 2, 1), mode=self.mode))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_left_over_by_a_smaller_kernel_on_cut_channels(mode):
    for layer in (PaddedFirst(10, 3, 1), PaddedFirst(10, 3, (2, 3), stride=(2, 3)), PaddedFirst(10, 12, 2)):
        layer.mode = mode
        for spec in (CHANNEL, (None, "channel", None, "lat")):
            x = torch.randn(2, 10, 8, 6)
            assert_same_on_every_mesh(layer, x, [{"channel": 2, "lat": 2}], spec=spec, halo={1: (1, 0)})


@on_ranks(4)
def test_a_halo_spares_the_rows_where_sums_of_cut_channels_travel():
    sent = []
    for halo in ({}, {2: 1}):
        tile = shard(torch.randn(1, 4, 8, 6), world_mesh(channel=2, lat=2), CHANNEL, halo=halo)
        with comm.count() as counted:
            y = nn.Conv2d(4, 1, 3, padding=1)(tile)
        assert not y.layout.has_halo
        sent.append(counted.sent_bytes)
    sums = sent[1]
    # a channel of y that rank 0 along `channel` owns: the other sends 4 rows; without a halo 2 channels of a row more
    assert sums == (4 * 6 * 4 if world_mesh(channel=2, lat=2).get_coordinate()[0] else 0)
    assert sent[0] == sums + 2 * 6 * 4


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_halo_of_channels_that_nothing_cuts(mesh):
    layer, spec = nn.Conv2d(3, 4, 3, padding=1), (None, None, "lat", "channel")
    assert_same_on_every_mesh(layer, torch.randn(2, 3, 7, 5), [mesh], spec=spec, halo={1: (1, 2), 2: 1}, periodic=(1,))


def cut_copy(model, mesh):
    """The same layers of jigsaw.nn, with the same values."""
    copies = []
    for layer in model:
        if not isinstance(layer, nn.modules.conv._ConvNd):
            copies.append(layer)
            continue
        how = {k: getattr(layer, k) for k in ("stride", "padding", "dilation", "groups", "padding_mode")}
        if layer.transposed:
            how["output_padding"] = layer.output_padding
        made = getattr(jigsaw.nn, type(layer).__name__)
        copy = made(
            layer.in_channels, layer.out_channels, layer.kernel_size, **how, bias=layer.bias is not None, mesh=mesh
        ).double()
        with torch.no_grad():
            for p, value in zip(copy.parameters(), layer.parameters(), strict=True):
                if isinstance(p, DTensor):
                    value = torch.distributed.tensor.distribute_tensor(value.contiguous(), p.device_mesh, p.placements)
                p.copy_(value)
        copies.append(copy)
    return nn.Sequential(*copies)


MODELS = {
    "column and column": nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 5, 3, padding=1)),
    "uneven": nn.Sequential(nn.Conv2d(3, 7, 3, padding=1, bias=False), nn.GELU(), nn.Conv2d(7, 5, 1)),
    "down and up": nn.Sequential(nn.Conv2d(3, 8, 2, stride=2), nn.GELU(), nn.ConvTranspose2d(8, 4, 2, stride=2)),
    "circular": nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.GELU(),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=4),
    ),
    "reflect": nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "mesh",
    [pytest.param({"channel": 2}, marks=pytest.mark.slow), {"channel": 3}, {"channel": 2, "lat": 2}, {"lat": 2}],
    ids=str,
)
def test_cut_weights(name, mesh):
    if name == "circular" and mesh.get("channel") == 3:
        mesh = {"channel": 4}
    spec = (None, None, "lat", None)
    x = torch.randn(2, 3, 12, 6)
    if "lat" in mesh:
        assert_same_on_every_mesh(MODELS[name], x, [mesh], spec=spec, build=cut_copy, gradients="parts", align={2: 2})
    else:
        model = nn.Sequential(nn.Conv2d(4, 3, 1), *MODELS[name])
        assert_same_on_every_mesh(
            model, torch.randn(2, 4, 12, 6), [mesh], spec=CHANNEL, build=cut_copy, gradients="parts"
        )


def cut_by_inputs(model, mesh):
    """The same layers, whose weights each rank has by its own input channels."""
    model = copy.deepcopy(model)
    for layer in model:
        if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == 1 and "channel" in mesh.mesh_dim_names:
            placements = [torch.distributed.tensor.Shard(0 if layer.transposed else 1)]
            weight = layer.weight.detach().contiguous()
            layer.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(weight, mesh["channel"], placements))
    return model


@pytest.mark.parametrize("halo", [{}, {1: (1, 0), 2: (2, 1)}], ids=["no halo", "a halo"])
@pytest.mark.parametrize("channels", [None, "channel"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_cut_by_input_channels(name, channels, halo):
    model, meshes = MODELS[name], [{"channel": 2, "lat": 2}, {"lat": 2, "channel": 2}]
    spec = (None, channels, "lat", None)
    how = {"gradients": "parts", "align": {2: 2}, "split": "chunk", "halo": halo}
    assert_same_on_every_mesh(model, torch.randn(2, 3, 12, 6), meshes, spec=spec, build=cut_by_inputs, **how)


@on_ranks(2)
def test_names_and_full_shapes_are_torchs():
    layer = jigsaw.nn.Conv2d(3, 7, 3, mesh=world_mesh(channel=2))
    plain = nn.Conv2d(3, 7, 3)
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert layer.weight.to_local().shape[0] in (4, 3)
    whole = jigsaw.nn.Conv2d(3, 7, 3, mesh=world_mesh(lat=2))
    assert not isinstance(whole.weight, DTensor)


@on_ranks(2)
def test_the_smaller_side_travels():
    x = shard(torch.randn(1, 10, 6, 6), world_mesh(channel=2), CHANNEL)
    x.local.requires_grad_()
    for made, moved in [(4, 4), (20, 10)]:
        layer = nn.Conv2d(10, made, 1)
        with comm.count() as forward:
            y = layer(x)
        with comm.count() as backward:
            y.local.sum().backward()
        assert y.layout.dim_axes(1) == ("channel",)
        assert forward.sent_bytes == backward.sent_bytes == moved // 2 * 36 * 4
    with comm.count() as depthwise:
        nn.Conv2d(10, 20, 3, groups=10)(x)
    assert depthwise.messages == 0


@on_ranks(2)
def test_a_periodic_halo_lives_through_several_circular_layers():
    mesh = world_mesh(lon=2)
    x = shard(torch.randn(1, 2, 6, 24), mesh, (None, None, None, "lon"), halo={3: 3}, periodic=(3,))
    torch.manual_seed(0)
    layers = [jigsaw.nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", mesh=mesh) for _ in range(3)]
    with comm.count() as sent:
        y = x
        for layer in layers:
            y = layer(y)
    assert sent.messages == 0
    expected = nn.Sequential(*layers)(x.full_tensor())
    torch.testing.assert_close(y.full_tensor(), expected)


@on_ranks(2)
def test_channels_cut_at_other_points_come_to_those_of_a_weight():
    mesh = world_mesh(channel=2)
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 7, dtype=torch.float64)
    tile = shard(x, mesh, (None, "channel", None, None), split={1: (0, 1, 4)})
    for layer in (nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 2, stride=2)):
        layer = layer.double()
        row = cut_by_inputs(nn.Sequential(copy.deepcopy(layer)), mesh)
        with comm.count() as c:
            y = row(tile)
        torch.testing.assert_close(y.full_tensor(), layer(x))
        moved = sum(call.sent_bytes for call in c.calls if call.kind == "realign")
        assert moved == [0, x[0, 0].nbytes][mesh.get_local_rank()]  # channel 1, from rank 1 to rank 0
    linear = nn.Linear(4, 6).double()
    weight = torch.distributed.tensor.distribute_tensor(
        linear.weight.detach(), mesh, [torch.distributed.tensor.Shard(1)]
    )
    y = nn.functional.linear(tile.permute(0, 2, 3, 1), weight, linear.bias)
    torch.testing.assert_close(y.full_tensor(), linear(x.permute(0, 2, 3, 1)))


@on_ranks(2)
def test_cuts_that_cannot_meet_are_named():
    mesh = world_mesh(channel=2)
    layer = jigsaw.nn.Conv2d(4, 6, 3, mesh=mesh)
    with pytest.raises(ShardingError, match="weight is cut along channel, which cannot meet a Tile"):
        layer(shard(torch.randn(1, 4, 8, 8), mesh, (None, None, "channel", None)))
    grouped = jigsaw.nn.Conv2d(6, 6, 3, groups=3, mesh=mesh)
    with pytest.raises(ShardingError, match=r"groups=3 makes 2 channels a group, but they are cut at \(0, 3, 6\)"):
        grouped(shard(torch.randn(1, 6, 8, 8), mesh, (None, None, None, None)))
    with pytest.raises(ShardingError, match="with groups=2 cannot be cut"):
        jigsaw.nn.ConvTranspose2d(4, 4, 2, groups=2, mesh=mesh)
