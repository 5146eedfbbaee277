"""Linear layers and products on tiles: whatever is cut, forward and every gradient are those of the whole tensor."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.nn.products.linear import Linear
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

ROWS = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]
CHANNELS = [{"channel": 2}, {"channel": 3}, {"channel": 4}, {"lat": 2, "channel": 2}, {"channel": 2, "lat": 2}]


def _mlp(channels=10, hidden=13):
    return nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def test_over_a_whole_dim_each_rank_works_by_itself():
    assert_same_on_every_mesh(_mlp(), torch.randn(2, 7, 13, 10), ROWS, spec=(None, "lat", "lon", None))


def test_over_a_whole_dim_nothing_is_sent():
    _nothing_is_sent()


@on_ranks(4)
def _nothing_is_sent():
    mesh = world_mesh(lat=2, lon=2)
    x = shard(torch.randn(7, 13, 10), mesh, ("lat", "lon", None))
    with comm.count() as count:
        _mlp()(x).local.sum().backward()
    assert count.messages == 0


def test_rows_of_the_halo_are_computed_too():
    assert_same_on_every_mesh(
        _mlp(), torch.randn(1, 12, 10), ROWS[:3], spec=(None, "lat", None), halo={1: 2}, periodic=(1,)
    )


@pytest.mark.parametrize("channels", [7, 10, 13, 33])
def test_cut_channels_stay_cut_and_the_skip_fits(channels):
    model = nn.Sequential(Residual(_mlp(channels, 2 * channels)), nn.Linear(channels, 5))
    assert_same_on_every_mesh(model, torch.randn(2, 7, channels), CHANNELS, spec=(None, "lat", "channel"))


def test_cut_channels_at_explicit_points_come_back_to_them():
    assert_same_on_every_mesh(
        Residual(_mlp(10, 3)), torch.randn(7, 10), [{"channel": 3}], spec=(None, "channel"), split={1: (0, 1, 1, 10)}
    )


@on_ranks(4)
def _bytes_over_cut_channels(k, n):
    mesh = world_mesh(lat=2, channel=2)
    x = shard(torch.randn(8, k), mesh, ("lat", "channel"))
    x.local.requires_grad_()
    layer = nn.Linear(k, n, bias=False)
    with comm.count() as forward:
        y = layer(x)
    with comm.count() as backward:
        y.local.sum().backward()
    return forward.received_bytes // 4, backward.received_bytes // 4, y.layout.spec


def test_the_cheaper_of_input_and_output_travels():
    # row: partial sums of y, (1-1/2) 4 n forward, its gradient as much backward
    assert set(_bytes_over_cut_channels(8, 8)) == {(16, 16, ("lat", "channel"))}
    assert set(_bytes_over_cut_channels(32, 8)) == {(16, 16, ("lat", "channel"))}
    # column: x, (1-1/2) 4 k forward, x and its gradient backward
    assert set(_bytes_over_cut_channels(8, 32)) == {(16, 32, ("lat", "channel"))}


class Cut(nn.Module):
    """Layers of cut weights, with the names that the plain model has."""

    def __init__(self, plain, mesh, axis="channel"):
        super().__init__()
        for name, layer in plain.named_children():
            if not isinstance(layer, nn.Linear):
                self.add_module(name, layer)
                continue
            cut = Linear(
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                dtype=layer.weight.dtype,
                mesh=mesh,
                axis=axis,
            )
            cut.load_state_dict(_distributed(layer.state_dict(), cut))
            self.add_module(name, cut)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def _distributed(state, like):
    from torch.distributed.tensor import DTensor, distribute_tensor

    found = {}
    for name, target in like.state_dict().items():
        value = state[name]
        found[name] = (
            distribute_tensor(value, target.device_mesh, target.placements) if isinstance(target, DTensor) else value
        )
    return found


def _cut_along_channel(model, mesh):
    return Cut(model, mesh)


def _cut_along_lat(model, mesh):
    return Cut(model, mesh, "lat")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [(None, "lat", None), (None, "lat", "channel")], ids=["whole channels", "cut channels"]
)
@pytest.mark.parametrize("sizes", [(10, 7), (7, 13), (4, 33)], ids=str)
def test_cut_weights(sizes, spec):
    meshes = (
        [{"channel": 2}, {"channel": 3}, {"lat": 2, "channel": 2}]
        if "channel" in spec
        else [{"lat": 2, "channel": 2}, {"channel": 2, "lat": 2}]
    )
    # chunks, as torch cuts a DTensor
    assert_same_on_every_mesh(
        _mlp(*sizes),
        torch.randn(2, 5, sizes[0]),
        meshes,
        spec=spec,
        build=_cut_along_channel,
        gradients="parts",
        split="chunk",
    )


def _cut_by_inputs(model, mesh):
    """The same layers, whose weights each rank has by its own input features."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and "channel" in mesh.mesh_dim_names:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["channel"], [Shard(1)]))
    return model


@pytest.mark.parametrize(
    "spec", [(None, "lat", None), (None, "lat", "channel")], ids=["whole channels", "cut channels"]
)
@pytest.mark.parametrize("sizes", [(10, 7), (7, 13)], ids=str)
def test_weights_cut_by_inputs(sizes, spec):
    meshes = [{"lat": 2, "channel": 2}, {"channel": 2, "lat": 2}]
    x = torch.randn(2, 5, sizes[0])
    assert_same_on_every_mesh(
        _mlp(*sizes), x, meshes, spec=spec, build=_cut_by_inputs, gradients="parts", split="chunk"
    )


@on_ranks(4)
def test_a_weight_cut_by_inputs_sends_one_sum():
    mesh = world_mesh(lat=2, channel=2)
    layer = _cut_by_inputs(nn.Sequential(nn.Linear(6, 8)), mesh)
    for last, back in (("channel", 0), (None, 1)):
        x = shard(torch.randn(4, 6), mesh, ("lat", last))
        x.local.requires_grad_()
        with comm.count() as forward:
            y = layer(x)
        with comm.count() as backward:
            y.local.sum().backward()
        assert y.layout.spec == ("lat", None)
        assert [(c.kind, c.sent_bytes) for c in forward.calls] == [("all_reduce", 2 * 8 * 4)]
        assert [(c.kind, c.sent_bytes) for c in backward.calls] == [("all_reduce", 2 * 6 * 4)] * back


@pytest.mark.parametrize("sizes", [(10, 7), (7, 13)], ids=str)
def test_weights_at_rest_along_the_axis_that_cuts_the_rows(sizes):
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}, {"lat": 2, "channel": 2}]
    layers = nn.Sequential(nn.Linear(*sizes, bias=False), nn.Tanh(), nn.Linear(sizes[1], 4, bias=False))
    assert_same_on_every_mesh(
        layers,
        torch.randn(2, 9, 6, sizes[0]),
        meshes,
        spec=(None, "lat", "lon", "channel"),
        build=_cut_along_lat,
        gradients="parts",
    )


@on_ranks(4)
def _weight_bytes():
    """A weight stored 1/P travels to the rows: what the other ranks hold of it is received, forward; and again,
    backward.
    """
    mesh = world_mesh(lat=4)
    layer = Linear(6, 8, bias=False, mesh=mesh, axis="lat")
    assert layer.weight.to_local().shape == (2, 6)
    assert layer.weight.shape == (8, 6)
    x = shard(torch.randn(33, 6), mesh, ("lat", None))
    x.local.requires_grad_()
    with comm.count() as forward:
        y = layer(x)
    with comm.count() as backward:
        y.local.sum().backward()
    assert forward.received_bytes == 4 * 36
    assert backward.received_bytes == 4 * 72


def test_bytes_of_a_weight_at_rest():
    _weight_bytes()


@on_ranks(2)
def _autocast():
    mesh = world_mesh(channel=2)
    x = torch.randn(33, 64)
    layer = nn.Linear(64, 64)
    expected = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        for spec in ((None, "channel"), ("channel", None)):
            y = layer(shard(x, mesh, spec))
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y.full_tensor(), expected, rtol=2e-2, atol=2e-2)


def test_autocast():
    _autocast()


def test_a_cut_layer_on_a_mesh_without_the_axis_is_plain():
    layer = Linear(3, 4, mesh=jigsaw.init_mesh(lat=1))
    assert type(layer.weight) is nn.Parameter
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}


# -- products
# -----------------------------------------------------------------------------------------------------------


def _matmul(x, w):
    return x @ w


def _rmatmul(x, w):
    return w @ x


def _vector(x, w):
    return torch.matmul(x, w)


def _addmm(b, x, w):
    return torch.addmm(b, x, w, beta=0.5, alpha=2.0)


PLAIN = [
    (_matmul, (7, 10), (10, 13), ("lat", "lon")),
    (_matmul, (2, 7, 10), (10, 13), (None, "lat", "lon")),
    (_rmatmul, (2, 7, 10), (13, 7), (None, "lat", "lon")),
    (_rmatmul, (7, 10), (13, 7), ("lat", "lon")),
    (_vector, (2, 7, 10), (10,), (None, "lat", "lon")),
    (_rmatmul, (2, 7, 10), (7,), (None, "lat", "lon")),
    (_matmul, (3, 7, 10), (3, 10, 5), ("lat", None, "lon")),
]


@pytest.mark.parametrize(("function", "x", "w", "spec"), PLAIN)
def test_products_with_plain_tensors(function, x, w, spec):
    assert_same_on_every_mesh(function, [torch.randn(x), torch.randn(w)], ROWS, spec=[spec, None])


TILES = [
    (_matmul, (7, 10), (10, 13), ("lat", None), (None, "lon")),  # a SUMMA product
    (_matmul, (7, 10), (10, 13), (None, "lat"), ("lat", None)),
    (_matmul, (7, 10), (10, 13), ("lat", "lon"), ("lon", None)),
    (_matmul, (7, 10), (10, 13), ("lat", None), ("lat", None)),  # the second operand travels
    (_matmul, (3, 7, 10), (3, 10, 5), ("lat", "lon", None), ("lat", None, None)),
    (_matmul, (3, 7, 10), (3, 10, 5), ("lat", None, "lon"), ("lat", "lon", None)),
    (_matmul, (1, 7, 10), (3, 10, 5), (None, "lat", None), ("lon", None, None)),
    (_matmul, (2, 3, 7, 10), (3, 10, 5), (None, "lat", None, None), ("lat", None, "lon")),
]


@pytest.mark.parametrize(("function", "x", "w", "spec_x", "spec_w"), TILES)
def test_products_of_tiles(function, x, w, spec_x, spec_w):
    assert_same_on_every_mesh(function, [torch.randn(x), torch.randn(w)], ROWS, spec=[spec_x, spec_w])


def test_addmm():
    assert_same_on_every_mesh(
        _addmm, [torch.randn(13), torch.randn(7, 10), torch.randn(10, 13)], ROWS, spec=[None, ("lat", "lon"), None]
    )


def _spectral(x, w):
    return torch.einsum("bixy, ioxy -> boxy", x, w)


def _dots(x, w):
    return torch.einsum("...xy,x->...y", x, w)


def _implicit(x, w):
    return torch.einsum("bixy,x", x, w)


def _to_scalar(x, w):
    return torch.einsum("bixy,ioxy->", x, w)


EINSUMS = [(_spectral, (3, 4, 7, 10)), (_dots, (7,)), (_implicit, (7,)), (_to_scalar, (3, 4, 7, 10))]


@pytest.mark.parametrize(("function", "w"), EINSUMS)
def test_einsum(function, w):
    assert_same_on_every_mesh(
        function, [torch.randn(2, 3, 7, 10), torch.randn(w)], ROWS, spec=[(None, None, "lat", "lon"), None]
    )


def _wrong(which):
    mesh = world_mesh(lat=2)
    x = shard(torch.randn(4, 6), mesh, ("lat", None))
    if which == "shape":
        F.linear(x, torch.randn(3, 5))
    if which == "diagonal":
        torch.einsum("ii->", x)
    if which == "plain input":
        F.linear(torch.randn(2, 3, 6), x)
    if which == "one against many":
        torch.randn(5, 4, 1) @ shard(torch.randn(5, 2, 3), mesh, (None, "lat", None))


WRONG = {
    "one against many": r"matmul: \(5, 4, 1\) and \(5, 2, 3\) cannot be multiplied",
    "shape": "input .4, 6. and weight .3, 5. cannot be multiplied",
    "diagonal": "einsum: label 'i' has sizes 4 and 6",
    "plain input": "the input is a plain tensor of shape .2, 3, 6..*jigsaw.shard",
}


@on_ranks(2)
def test_a_cut_bias_is_gathered_for_a_whole_last_dim():
    mesh = world_mesh(lat=2)
    torch.manual_seed(0)
    x, w = torch.randn(5, 6).double(), torch.randn(7, 6).double()
    bias = Linear(6, 7, mesh=mesh, axis="lat").double().bias
    whole = bias.full_tensor().detach().requires_grad_()
    y = F.linear(shard(x, mesh, ("lat", None)), w, bias)
    torch.testing.assert_close(y.full_tensor(), F.linear(x, w, whole))
    (y * y).sum().backward()
    F.linear(x, w, whole).square().sum().backward()
    torch.testing.assert_close(bias.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("which", WRONG)
@on_ranks(2)
def test_wrong_use_is_told(which):
    with pytest.raises((ShardingError, RuntimeError), match=WRONG[which]):
        _wrong(which)


@on_ranks(2)
def test_layers_with_cut_weights_refuse_plain_tensors():
    mesh, x = world_mesh(channel=2), torch.ones(3, 4)
    layers: list[tuple[nn.Module, torch.Tensor]] = [
        (jigsaw.nn.Linear(4, 6, mesh=mesh), x),
        (jigsaw.nn.Mix(3, 6, mesh=mesh, axis="channel"), x),
        (jigsaw.nn.Conv1d(3, 6, 1, mesh=mesh), x[None]),
        (jigsaw.nn.ConvTranspose1d(3, 6, 1, mesh=mesh), x[None]),
        (jigsaw.nn.LayerNorm(4, mesh=mesh), x),
        (jigsaw.nn.Embedding(4, 6, mesh=mesh), x.long()),
    ]
    for layer, plain in layers:
        with pytest.raises(ShardingError, match=r"of a plain tensor of shape .*jigsaw\.shard"):
            layer(plain)
    attention = jigsaw.nn.MultiheadAttention(4, 2, mesh=mesh)
    with pytest.raises(ShardingError, match="MultiheadAttention of a plain tensor"):
        attention(query=x, key=x, value=x)


@on_ranks(4)
def test_a_weight_whose_flattened_rows_or_columns_travel():
    mesh = world_mesh(lat=2, lon=2)
    torch.manual_seed(0)
    x, w, z = torch.randn(7, 9, 2), torch.randn(7, 9, 2), torch.randn(7, 9, 63)
    tokens, weight, scores = (shard(t, mesh, ("lat", "lon", None)).flatten(0, 1) for t in (x, w, z))
    rows = F.linear(tokens, weight)
    torch.testing.assert_close(rows.full_tensor(), F.linear(x.flatten(0, 1), w.flatten(0, 1)))
    columns = F.linear(scores, weight.t())
    torch.testing.assert_close(columns.full_tensor(), z.flatten(0, 1) @ w.flatten(0, 1))


@on_ranks(4)
def test_narrow_sums_of_row_parallel_layers_travel_narrow():
    """Two linears whose weights lie along `channel`: one sum of y forward, one of the input's gradient backward."""
    mesh = world_mesh(lat=2, channel=2)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 64))
    model = jigsaw.parallelize(copy.deepcopy(plain).bfloat16(), mesh)
    wide, narrow = copy.deepcopy(plain).bfloat16().double(), copy.deepcopy(plain).bfloat16()
    x, g = torch.randn(1, 2001, 64).bfloat16(), torch.randn(1, 2001, 64).bfloat16()
    tiles = [jigsaw.shard(t, mesh, (None, "lat", None)) for t in (x, g)]
    leaf = jigsaw.Tile(tiles[0].local.clone().requires_grad_(), tiles[0].layout, mesh)
    with comm.count() as forward:
        y = model(leaf)
    rows = leaf.local.shape[1]
    assert [c.kind for c in forward.calls] == ["all_reduce"]
    assert forward.sent_bytes == 2 * (rows * 64 // 2) * 2  # 2 (P-1)/P of y in bfloat16
    with comm.count() as backward:
        (y * tiles[1]).sum().backward()
    assert 2 * (rows * 64 // 2) * 2 in [c.sent_bytes for c in backward.calls]
    found = []
    for other in (wide, narrow):
        t = x.to(other[0].weight.dtype).requires_grad_()
        out = other(t)
        (out * g.to(out.dtype)).sum().backward()
        found.append([out.detach(), t.grad, *(p.grad for p in other.parameters())])
    mine = [y.full_tensor(), jigsaw.Tile(leaf.local.grad, leaf.layout, mesh).full_tensor()]
    mine += [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    for got, exact, rounded in zip(mine, *found, strict=True):
        error, plains = ((t.double() - exact).norm() / exact.norm() for t in (got, rounded))
        assert error <= 2 * plains
