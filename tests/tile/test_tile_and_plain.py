"""Where tiles and plain tensors, arrays and numbers meet: right, with exact gradients, or refused by a typed error."""

from __future__ import annotations

import copy
import functools
import math
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import from_local, shard

MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}]
INDEX = (torch.arange(20) % 4).reshape(4, 5)


def _whole(y):
    return y.full_tensor() if isinstance(y, Tile) else y


# -- written into plain tensors ---------------------------------------------------------------------------------------


def _rows(g, y):
    for i in range(4):
        g[i] = y[i]
    return g


def _elements(g, y):
    g[0, 0] = y.mean()
    g[1, 1:3] = y[0, :2]
    return g


def _assigned(g, y):
    g[:, :5] = y
    return g


def _added(g, y):
    g += y
    return g


def _foreach(g, y):
    torch._foreach_add_([g], [y])
    return g


WRITES = {
    "setitem": _assigned,
    "rows": _rows,
    "elements": _elements,
    "copy_": lambda g, y: g.copy_(y),
    "copy_ of a view": lambda g, y: g.narrow(0, 0, 2).copy_(y[:2]) + g[:2],
    "index_put_": lambda g, y: g.index_put_((torch.arange(4),), y),
    "masked_fill_": lambda g, y: g.masked_fill_(INDEX > 1, y.mean()),
    "masked_scatter_": lambda g, y: g.masked_scatter_(INDEX > 1, y),
    "index_copy_": lambda g, y: g.index_copy_(0, torch.arange(4), y),
    "index_add_": lambda g, y: g.index_add_(0, torch.arange(4), y),
    "scatter_": lambda g, y: g.scatter_(0, INDEX, y),
    "scatter_add_": lambda g, y: g.scatter_add_(0, INDEX, y),
    "addmm_": lambda g, y: g.addmm_(y[:, :4], y),
    "iadd": _added,
    "lerp_": lambda g, y: g.lerp_(y, 0.5),
    "foreach": _foreach,
    "stack": lambda g, y: torch.stack([g, y]).sum(0),
    "cat": lambda g, y: torch.cat([g, y], 1)[:, 3:8],
    "where": lambda g, y: torch.where(INDEX > 1, g, y),
    "index_put": lambda g, y: torch.index_put(g, (torch.arange(4),), y),
}


class _Spectral(nn.Module):
    """What a spectral layer does: a tile that nothing cuts is written into zeros, which meet the cut tile again."""

    def __init__(self, write):
        super().__init__()
        self.scale, self.write = nn.Parameter(torch.randn(5, 1)), write

    def forward(self, x):
        y = torch.tanh((x * self.scale).mean(2)) * self.scale[:, 0]
        target = torch.zeros(4, 5, dtype=torch.float64)
        result = WRITES[self.write](target, y)
        g = target if self.write.endswith("_") else result
        return (g * torch.linspace(1, 2, g.shape[1], dtype=torch.float64)).square().mean() * x


@pytest.mark.parametrize("write", WRITES)
def test_a_tile_written_into_a_plain_tensor(write):
    torch.manual_seed(0)
    assert_same_on_every_mesh(_Spectral(write), torch.randn(4, 5, 7), MESHES[2:], spec=(None, None, "lat"))


@on_ranks(2)
def test_what_cannot_be_written_into_a_plain_tensor():
    mesh = world_mesh(lat=2)
    tile = shard(torch.ones(7, 2), mesh, ("lat", None))
    whole = tile.redistribute((None, None))
    weight = torch.ones(7, 2, requires_grad=True)
    with comm.count() as counted:
        for write in (
            lambda g: g[:2].add_(tile),
            lambda g: g.resize_as_(tile),
            lambda g: g.index_copy_(0, torch.arange(7), tile),
        ):
            with pytest.raises(ShardingError, match=r"(add_|resize_as_|index_copy_) .*(full_tensor|must be a Tile)"):
                write(torch.zeros(7, 2))
        mixed = weight * 1
        mixed[:2] = (whole * whole.local.requires_grad_())[:2]
        with pytest.raises(ShardingError, match="computed from a parameter and from a tensor that left a Tile"):
            tile * mixed
    assert counted.calls == []


def test_in_place_with_a_halo_that_would_stay():
    mesh = jigsaw.init_mesh(lat=1)
    around = shard(torch.arange(6.0), mesh, ("lat",), halo={0: 1}, periodic=[0])
    (cut,) = around.layout.dim(0)
    tile = Tile(around.local, Layout.from_dims([(replace(cut, wraps=False),)], around.layout.axes), mesh)
    for change in (
        lambda x: x.index_fill_(0, torch.tensor([0]), 9.0),
        lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1)),
        lambda x: x.scatter_(0, torch.tensor([0]), 9.0),
        lambda x: x.masked_scatter_(torch.ones(6, dtype=torch.bool), torch.ones(6)),
        lambda x: x.masked_fill_(torch.ones(6, dtype=torch.bool), 9.0),
    ):
        with pytest.raises(ShardingError, match=r"leave the halo as it was; use tile.owned"):
            change(tile)
        change(tile.owned())


@on_ranks(3)
def test_one_row_that_several_tiles_cut_meets_a_plain_tensor_of_more():
    torch.manual_seed(0)
    whole = [torch.randn(1, requires_grad=True), torch.randn(5, 5, 1, requires_grad=True), torch.randn(1, 5)]
    specs = [("lat",), (None, None, "lat")]
    tiles = [shard(x.detach(), world_mesh(lat=3), spec) for x, spec in zip(whole[:2], specs, strict=True)]
    for tile in tiles:
        tile.local.requires_grad_()
    weights = torch.randn(5, 5, 5)
    (torch.addcmul(*whole, value=3.14) * weights).sum().backward()
    y = torch.addcmul(*tiles, whole[2], value=3.14)
    (y * weights).sum().backward()
    torch.testing.assert_close(y.full_tensor(), torch.addcmul(*whole, value=3.14).detach())
    for x, tile in zip(whole[:2], tiles, strict=True):
        torch.testing.assert_close(Tile(tile.local.grad, tile.layout, tile.mesh).full_tensor(), x.grad)


@on_ranks(2)
def test_one_row_that_is_cut_meets_more_in_a_cross_product():
    x, y = torch.randn(1, 3), torch.randn(5, 3)
    tile = shard(x, world_mesh(lat=2), ("lat", None))
    torch.testing.assert_close(_whole(torch.linalg.cross(tile, y)), torch.linalg.cross(x, y))
    torch.testing.assert_close(_whole(torch.linalg.cross(y, tile)), torch.linalg.cross(y, x))


@on_ranks(2)
def test_a_cast_to_the_dtype_of_a_tile_is_no_broadcast():
    mesh = world_mesh(lat=2)
    tile = shard(torch.ones(7, 2), mesh, ("lat", None))
    for plain in (torch.ones((), dtype=torch.float64), torch.ones(3, dtype=torch.float64)):
        for cast in (plain.type_as(tile), plain.to(tile)):
            assert type(cast) is torch.Tensor and cast.dtype == torch.float32 and cast.shape == plain.shape
    assert tile.to(torch.ones(5, dtype=torch.float64)).dtype == tile.double().type_as(tile.double()).dtype
    assert tile.double().type_as(tile).layout == tile.layout


# -- as indices of plain tensors --------------------------------------------------------------------------------------


class _Table(nn.Module):
    def __init__(self, pick):
        super().__init__()
        self.table, self.pick = nn.Parameter(torch.randn(11, 4)), pick

    def forward(self, k):
        return PICKS[self.pick](self.table, k)


PICKS = {
    "rows": lambda w, k: w[k[:, 0]],
    "rows by two dims": lambda w, k: w[k],
    "negative": lambda w, k: w[k - 11],
    "columns": lambda w, k: w[:, k[:, 0] % 4],
    "columns, ellipsis": lambda w, k: w[..., k % 4],
    "elements": lambda w, k: w[k, k % 4],
    "broadcast": lambda w, k: w[k, k[:, :1] % 4],
    "getitem": lambda w, k: operator.getitem(w, k[:, 0]),
    "method": lambda w, k: w.__getitem__(k[:, 0]),
    "take": torch.take,
    "index_select": lambda w, k: w.index_select(0, k[:, 0]),
    "index_select of columns": lambda w, k: torch.index_select(w, -1, k[:, 0] % 4),
    "used again": lambda w, k: w[k].mean() * w[k[:, 0]].square(),
}


@pytest.mark.parametrize("pick", PICKS)
def test_a_plain_table_indexed_by_a_tile(pick):
    torch.manual_seed(0)
    k = torch.randint(0, 11, (33 if pick == "rows by two dims" else 7, 3))
    assert_same_on_every_mesh(_Table(pick), k, [{"lat": 1}, {"lat": 3}], spec=("lat", None))
    assert_same_on_every_mesh(_Table(pick), k, [{"lat": 2}], spec=(None, "lat"))


@on_ranks(3)
def test_plain_tensors_indexed_by_tiles_are_right_or_refused():
    mesh = world_mesh(lat=3)
    table = torch.arange(7.0)
    k, mask = torch.tensor([0, 3, 1, 6, 5, 2, 4]), torch.tensor([True, False] * 3 + [True])

    def wrote(at, value):
        out = table.clone()
        out[at] = value
        return out

    calls = (
        lambda i, m: table[i],
        lambda i, m: table[m],
        lambda i, m: table[None, i],
        lambda i, m: table[i, None],
        lambda i, m: wrote(i, 9.0),
        lambda i, m: wrote(m, 9.0),
        lambda i, m: operator.setitem(table.clone(), i, 9.0),
        lambda i, m: torch.from_numpy(np.arange(7)[i]),
        lambda i, m: torch.from_numpy(np.arange(7)[m]),
    )
    for spec in ("lat", None):
        tiles = [shard(x, mesh, (spec,)) for x in (k, mask)]
        for call in calls:
            expected = call(k, mask)
            try:
                found = call(*tiles)
            except ShardingError:
                continue
            assert found is expected or torch.equal(_whole(found), expected)
    with pytest.raises(ShardingError, match=r"by a tile of torch.bool; index by integer tiles .*full_tensor"):
        table[shard(mask, mesh, ("lat",))]


# -- arrays, numbers and sequences ------------------------------------------------------------------------------------


@on_ranks(2)
def test_conversions_are_refused_at_once():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(121, 240), mesh, ("lat", None))
    array = np.ones((121, 240))
    with comm.count() as counted:
        for spec in ("lat", None):
            tile = tile if spec else shard(torch.ones(121, 240), world_mesh(lat=2), (None, None))
            counted.calls.clear()
            assert torch.as_tensor(tile) is tile and torch.asarray(tile) is tile  # as torch does with any tensor
            for convert in (
                torch.tensor,
                torch.Tensor,
                lambda y: torch.as_tensor(y, dtype=torch.float64),
                lambda y: torch.nested.nested_tensor([y, y]),
                torch.ones(1).new_tensor,
                np.asarray,
                np.array,
                np.sin,
                np.from_dlpack,
                lambda y: np.add(array, y),
                lambda y: np.array([y, y]),
                lambda y: array[0][y],
                np.float32,
            ):
                with pytest.raises(ShardingError, match=r"cannot become .*tile.full_tensor\(\).*tile.local"):
                    convert(tile)
            for number in (float, int, complex, math.sqrt):
                with pytest.raises(ShardingError, match="only a tile of one element can be a number"):
                    number(tile)
            with pytest.raises((ShardingError, ValueError)):
                torch.tensor([tile, tile])
            assert counted.calls == []


@on_ranks(2)
def test_rows_are_picked_and_counted_as_ever():
    mesh = world_mesh(lat=2)
    x = torch.randn(7, 3)
    tile = shard(x, mesh, ("lat", None))
    assert len(tile) == 7 and x[len(tile) - 1, 0] == x[6, 0]
    rows = [operator.getitem(tile, i) if i % 2 else tile[i] for i in range(len(tile))]
    assert torch.equal(torch.stack(rows).full_tensor(), x)
    assert torch.equal(torch.stack(list(tile)).full_tensor(), x)
    first, *_, last = tile
    assert torch.equal(torch.stack([first, last]).full_tensor(), x[[0, 6]])
    one = tile.sum((0, 1), keepdim=True)
    torch.testing.assert_close(float(one), x.sum().item())
    assert int(one * 0) == 0 and complex(one * 0) == 0


ARRAYS = {
    "sum": lambda x, n: x + n,
    "array first": lambda x, n: n + x,
    "product": lambda x, n: n * x - n / (x.square() + 1) + n ** x.sigmoid() - n // 2 * x,
    "row": lambda x, n: (n[0] - x) * n[:, :1],
    "scalar": lambda x, n: (np.array(2.0) if isinstance(x, Tile) else 2.0) * x + x * np.float64(3),
    "matmul": lambda x, n: x @ n.T,
    "array matmul": lambda x, n: n.T @ x,
    "comparison": lambda x, n: (n > x).double() * x + (x != n).double(),
    "function": lambda x, n: torch.maximum(x, x * 0 + n),
    "index": lambda x, n: x[:, np.array([2, 0])],
}


def _with_array(name, x):
    array = (np.random.default_rng(0).random((7, 5)) + 1)[::-1]
    array.setflags(write=False)
    # torch mixes no array with a tensor that requires grad
    return ARRAYS[name](x, array if isinstance(x, Tile) else torch.tensor(array.copy()))


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_a_tile_meets_is_the_whole_array(name):
    torch.manual_seed(0)
    assert_same_on_every_mesh(functools.partial(_with_array, name), torch.randn(7, 5), MESHES[2:], spec=("lat", None))


# -- arguments of the wrong kind --------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_tile_where_a_handler_takes_another_argument_for_it():
    mesh = world_mesh(lat=2)
    x, k = torch.randn(6, 5), torch.randint(0, 5, (6,))
    calls = {
        r"cross_entropy: input= is a plain Tensor of shape \(6, 5\)": lambda t, i: F.cross_entropy(x, i),
        "cross_entropy: weight= is a Tile": lambda t, i: F.cross_entropy(t, i, weight=t[0]),
        "nll_loss: input= is a plain Tensor": lambda t, i: F.nll_loss(x, i),
        "layer_norm: input= is a plain": lambda t, i: F.layer_norm(x.T, (6,), weight=t[:, 0]),
        "rms_norm: input= is a plain": lambda t, i: F.rms_norm(x.T, (6,), t[:, 0]),
        "group_norm: input= is a plain": lambda t, i: F.group_norm(x, 1, t[0]),
        "batch_norm: running_mean= is a Tile": lambda t, i: F.batch_norm(t, t.mean(0), t.var(0)),
        "conv1d: input= is a plain": lambda t, i: F.conv1d(x[None], t[:, :, None]),
        "conv1d: bias= is a Tile": lambda t, i: F.conv1d(t[None], torch.ones(3, 6, 2), t[:3, 0]),
        "sum: dim= is a Tile": lambda t, i: t.sum(i),
        "attn_mask is a Tile, but query, key": lambda t, i: F.scaled_dot_product_attention(
            x, x, x, attn_mask=t @ t.mT.full_tensor()
        ),
        "_foreach_norm on a Tile": lambda t, i: torch._foreach_norm([t]),
        "layout torch.sparse_coo cannot meet a Tile": lambda t, i: t + torch.zeros(6, 5).to_sparse(),
    }
    tile, index = shard(x, mesh, ("lat", None)), shard(k, mesh, ("lat",))
    for words, call in calls.items():
        with pytest.raises(ShardingError, match=words):
            call(tile, index)


ANSWERED = {
    "addmm of a plain sum": lambda x, w: torch.addmm(w[:, :1], x, w[:5]),
    "addmm to a tile": lambda x, w: torch.addmm(x, w[:, :2], w[:2, :5]),
    "baddbmm": lambda x, w: torch.baddbmm(w[None, :, :5], x[None], w[None, :5, :5]),
    "equal": lambda x, w: w.sum() * float(torch.equal(w[:, :5], x)) + x.sum(),
    "view_as": lambda x, w: w[:, :5].reshape(-1).view_as(x) * x,
    "expand_as": lambda x, w: w[0, :5].expand_as(x) * x,
    "norm by tiles": lambda x, w: F.layer_norm(x, (7, 5), x * w[:, :5], x),
}


class _Weighted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(7, 6)), function

    def forward(self, x):
        return ANSWERED[self.function](x, self.weight)


@pytest.mark.parametrize("function", ANSWERED)
def test_a_tile_that_is_not_the_first_argument(function):
    torch.manual_seed(0)
    assert_same_on_every_mesh(_Weighted(function), torch.randn(7, 5), MESHES[2:], spec=("lat", None))


# -- ranks that differ ------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_values_that_differ_by_rank_are_no_whole_tensor():
    mesh = world_mesh(lat=3)
    rank = mesh.get_local_rank()
    nan = torch.full((7, 2), math.nan)
    same = {
        "nan": nan,
        "view": torch.arange(42.0).reshape(7, 6)[:, 1::3],
        "odd": torch.arange(15, dtype=torch.uint8)[1:].reshape(7, 2),
        "complex": torch.complex(nan, nan).conj(),
        "bool": torch.arange(14).reshape(7, 2) > 3,
        "bfloat16": torch.arange(14.0).reshape(7, 2).bfloat16(),
        "empty": torch.empty(0, 2),
        "grad": torch.ones(7, 2, requires_grad=True),
    }
    for x in same.values():
        assert torch.equal(shard(x, mesh, ("lat", None)).full_tensor().isnan(), x.isnan())
    changed = {name: x.detach().clone() for name, x in same.items() if x.numel()}
    for name, x in changed.items():
        if rank == 2:
            x[6, 1] = x[6, 1].logical_not() if name in ("bool", "odd") else 5.0
        with pytest.raises(
            ShardingError, match=r"the values at place 2 .*not those at place 0.*manual_seed.*from_local"
        ):
            shard(x, mesh, ("lat", None))
    torch.manual_seed(rank)
    for x in (
        torch.randn(7, 2),
        torch.arange(14.0).reshape(7, 2).roll(rank, 0),
        torch.ones(7, 2) * (0.0, -0.0, 0.0)[rank],
    ):
        with pytest.raises(ShardingError, match="the values at place 1"):
            shard(x, mesh, ("lat", None))
        with pytest.raises(ShardingError, match="the values at place 1"):
            shard(x.requires_grad_(), mesh, (None, "lat"))
    assert torch.equal(x, torch.ones(7, 2) * 0)


@on_ranks(4)
def test_parts_that_ranks_hold_alike_must_be_alike():
    mesh = world_mesh(data=2, lat=2)
    data, lat = mesh.get_coordinate()
    part = torch.full((2, 3), float(lat))
    assert from_local(part, mesh, (None, "lat"), (2, 6)).sum().item() == 6
    assert from_local(part + data, mesh, ("data", "lat"), (4, 6)).sum().item() == 24
    with pytest.raises(ShardingError, match=r"ranks at \(1, 0\) and \(0, 0\) hold one part.*name the axis"):
        from_local(part + data, mesh, (None, "lat"), (2, 6))


REDUCED = {
    "mean": lambda y: y.mean(),
    "sum": lambda y: y.sum(),
    "integers": lambda y: y.long().sum(),
    "half": lambda y: y.half().mean(),
    "complex": lambda y: torch.complex(y, y).mean(),
    "max": lambda y: y.max(),
    "amin": lambda y: y.amin((2, 3)),
    "std": lambda y: y.std(),
    "norm": lambda y: y.norm(),
    "softmax": lambda y: y.softmax(2),
    "layer_norm": lambda y: F.layer_norm(y, tuple(y.shape[1:])),
    "batch_norm": lambda y: F.batch_norm(y, None, None, training=True),
    "einsum": lambda y: torch.einsum("bchw,bchw->", y, y),
    "loss": lambda y: F.mse_loss(y, y * 0),
}


@on_ranks(2)
def test_sizes_that_differ_by_rank_are_found_by_the_next_reduction():
    mesh = world_mesh(lat=2)
    x = torch.randn(2, 3, 8, 8)
    tile = shard(x, mesh, (None, None, "lat", None))
    differ = F.interpolate(tile, size=(8 + 4 * mesh.get_local_rank(), 8))
    for reduce in REDUCED.values():
        with pytest.raises(
            ShardingError, match=r"reduce tiles of different layouts: every size .* the same on every rank"
        ):
            reduce(differ)
        torch.testing.assert_close(_whole(reduce(tile)), reduce(x), rtol=2e-3, atol=2e-3)
    with comm.count() as counted:
        tile.mean()
        tile.max()
    assert [c.kind for c in counted.calls] == ["all_reduce"] * 3
    assert [c.sent_bytes for c in counted.calls] == [(1 + 1) * 4, (1 + 2) * 4, 8]


@on_ranks(4)
def test_sizes_that_differ_along_one_of_two_axes():
    mesh = world_mesh(lat=2, lon=2)
    tile = shard(torch.randn(1, 1, 8, 8), mesh, (None, None, "lat", "lon"))
    differ = F.interpolate(tile, size=(8 + 4 * mesh.get_local_rank("lon"), 8))
    with pytest.raises(ShardingError, match="different layouts"):
        differ.mean()


# -- autocast ---------------------------------------------------------------------------------------------------------

LAYERS = {
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), (2, 4, 6)),
    "conv": (nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 6, 1)), (2, 6, 4, 6)),
    "transposed": (nn.Sequential(nn.ConvTranspose1d(6, 8, 2, 2), nn.ReLU(), nn.ConvTranspose1d(8, 6, 2, 2)), (2, 6, 4)),
}


@pytest.mark.parametrize("layer", LAYERS)
@on_ranks(2)
def test_column_and_row_have_the_dtype_of_autocast(layer):
    model, shape = LAYERS[layer]
    torch.manual_seed(0)
    x = torch.randn(shape)
    for axes in ({"lat": 1, "channel": 2}, {"lat": 2}):
        mesh = world_mesh(**axes)
        cut = jigsaw.parallelize(copy.deepcopy(model), mesh)
        tile = shard(x, mesh, (None, None, "lat", None)[: x.ndim])
        with torch.autocast("cpu", torch.bfloat16):
            found, plain = cut(tile), model(x)
        assert found.dtype == plain.dtype == torch.bfloat16


@on_ranks(2)
def test_losses_have_the_dtype_of_autocast():
    mesh = world_mesh(lat=2)
    x = torch.randn(2, 4, 6)
    tile, layer = shard(x, mesh, (None, "lat", None)), nn.Linear(6, 8)
    for loss in (
        lambda h: F.mse_loss(h, h * 2),
        lambda h: F.l1_loss(h, h * 2),
        lambda h: F.smooth_l1_loss(h, h * 2),
        lambda h: F.cross_entropy(h.mT, h.mT.softmax(1).detach()),
        lambda h: F.cross_entropy(h.mT, torch.zeros(2, 4, dtype=torch.long)),
        lambda h: F.binary_cross_entropy_with_logits(h, h.sigmoid().detach()),
        lambda h: torch.addmm(torch.ones(4, 3), h[0], torch.ones(8, 3)),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            found, plain = _whole(loss(layer(tile))), loss(layer(x))
        assert found.dtype == plain.dtype
        torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-2)


# -- as torch rounds and derives --------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_wider_plain_tensor_is_divided_in_its_own_dtype():
    tile = shard(torch.arange(1.0, 8), world_mesh(lat=2), ("lat",))
    x = torch.arange(7, dtype=torch.float64) - 3
    assert torch.equal((x / tile).full_tensor(), x / torch.arange(1.0, 8))


@on_ranks(2)
def test_the_gradient_of_rrelu_at_zero_is_its_slope():
    tile = shard(torch.arange(7.0) - 3, world_mesh(lat=2), ("lat",)).requires_grad_()
    x = (torch.arange(7.0) - 3).requires_grad_()
    F.rrelu(tile, 0.5, 0.5).sum().backward()
    F.rrelu(x, 0.5, 0.5).sum().backward()
    assert torch.equal(tile.grad.full_tensor(), x.grad)


@pytest.mark.parametrize("fill", ["uniform_", "normal_", "random_", "exponential_", "bernoulli_", "log_normal_"])
@on_ranks(2)
def test_what_random_numbers_replace_has_no_gradient(fill):
    tile = shard(torch.arange(7.0), world_mesh(lat=2), ("lat",)).requires_grad_()
    y = tile * 2
    getattr(y, fill)()
    (y.sum() + tile.sum()).backward()
    assert tile.grad.full_tensor().tolist() == [1.0] * 7


WRONG_DRAWS = {
    "uniform_": ((1.0, 0.0), r"from=1 > to=0"),
    "normal_": ((0.0, -1.0), "std >= 0"),
    "random_": ((3, 1), "'from' to be less than 'to'"),
    "exponential_": ((-1.0,), "lambda > 0"),
    "bernoulli_": ((1.5,), r"p to be in \[0, 1\]"),
    "log_normal_": ((0.0, -1.0), "std > 0"),
}


@pytest.mark.parametrize("fill", WRONG_DRAWS)
@on_ranks(3)
def test_wrong_arguments_of_draws_raise_what_torch_raises(fill):
    arguments, message = WRONG_DRAWS[fill]
    tile = shard(torch.arange(2.0), world_mesh(lat=3), ("lat",))
    with pytest.raises(RuntimeError, match=message):
        getattr(tile.clone(), fill)(*arguments)


@on_ranks(2)
def test_draws_of_complex_numbers_have_both_parts():
    tile = shard(torch.zeros(4000, dtype=torch.complex64), world_mesh(lat=2), ("lat",))
    low = {"rand_like": 0.0, "uniform_": 2.0}
    for name, draw in {
        "rand_like": torch.rand_like,
        "uniform_": lambda x: x.clone().uniform_(2, 3),
        "randn_like": torch.randn_like,
        "normal_": lambda x: x.clone().normal_(1.0, 2.0),
    }.items():
        parts = torch.view_as_real(draw(tile).full_tensor())
        assert not torch.equal(parts[:, 0], parts[:, 1])
        if name in low:
            assert parts.min() >= low[name] and parts.max() < low[name] + 1
        else:
            mean, std = (1.0, 2.0) if name == "normal_" else (0.0, 1.0)
            assert (parts.mean(0) - mean).abs().max() < 0.15 * std  # as torch has it: half of the variance each
            assert (parts.std(0) - std * 0.5**0.5).abs().max() < 0.05 * std


@on_ranks(2)
def test_draws_by_normal_have_gradients_of_zero_as_torchs():
    tile = shard(torch.arange(7.0), world_mesh(lat=2), ("lat",)).requires_grad_()
    y = torch.normal(tile, 0.0)
    y.sum().backward()
    assert y.requires_grad and tile.grad.full_tensor().tolist() == [0.0] * 7


@on_ranks(2)
def test_a_halo_along_a_dim_that_nothing_cuts_is_no_hindrance_to_a_view():
    tile = shard(torch.ones(1), world_mesh(lat=2), (None,), halo={0: (1, 1)}, periodic=(0,))
    assert tile.view(1, 1).full_tensor().tolist() == [[1.0]]
