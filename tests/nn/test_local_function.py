"""`jigsaw.local`: a function of one's own on tiles is that function on the whole tensor."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1, "lon": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]


def heat(x):
    """One explicit step of diffusion: periodic in longitude, the end rows repeated in latitude."""
    padded = F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode="replicate")
    n, s, w, e = padded[..., :-2, 1:-1], padded[..., 2:, 1:-1], padded[..., 1:-1, :-2], padded[..., 1:-1, 2:]
    return x + 0.1 * (n + s + w + e - 4 * x).sin()


class NeighborAttention(nn.Module):
    """Each point attends to the 3 x 5 points around it, as far as they are there."""

    def __init__(self, channels):
        super().__init__()
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)

    def forward(self, x):
        q, k, v = self.to_qkv(x).chunk(3, 1)
        b, c, h, w = q.shape
        k, v = (F.unfold(t, (3, 5), padding=(1, 2)).view(b, c, 15, h, w) for t in (k, v))
        there = F.unfold(torch.ones_like(x[:1, :1]), (3, 5), padding=(1, 2)).view(1, 15, h, w)
        scores = (q[:, :, None] * k).sum(1).masked_fill(there == 0, float("-inf"))
        return (scores.softmax(1)[:, None] * v).sum(2)


# function, reach and more, rows and columns
CASES = {
    "heat": (heat, {"reach": {2: 1, 3: 1}, "wrap": (3,)}, (33, 10)),
    "attention": (NeighborAttention(3), {"reach": {-2: 1, -1: 2}}, (13, 11)),
    "convolution": (nn.Conv2d(3, 5, (5, 3), padding=(2, 1)), {"reach": {2: (2, 2), 3: (1, 1)}}, (13, 10)),
    "strided": (nn.Conv2d(3, 4, 3, stride=2, padding=1), {"reach": {2: 1, 3: 1}, "stride": {2: 2, 3: 2}}, (33, 7)),
    "wide": (nn.Conv2d(3, 4, 7, stride=3, padding=3), {"reach": {2: 3, 3: 3}, "stride": {2: 3, 3: 3}}, (33, 13)),
    "no padding": (nn.Conv2d(3, 2, 3), {"reach": {2: (0, 2), 3: (0, 2)}, "rows": {2: 11, 3: 8}}, (13, 10)),
    "pool": (
        nn.MaxPool2d(2),
        {"reach": {2: (0, 1), 3: (0, 1)}, "stride": {2: 2, 3: 2}, "rows": {2: 6, 3: 3}},
        (13, 7),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_of_ones_own(name):
    op, how, space = CASES[name]
    assert_same_on_every_mesh(jigsaw.local(op, **how), torch.randn(2, 3, *space), MESHES, spec=SPACE)


def test_circles_with_strides():
    op = nn.Conv1d(2, 3, 5, stride=2, padding=2, padding_mode="circular")
    model = jigsaw.local(op, {-1: 2}, stride={-1: 2}, wrap=(-1,))
    meshes = [{"lon": 2}, {"lon": 3}, {"lon": 4}]
    assert_same_on_every_mesh(model, torch.randn(2, 2, 12), meshes, spec=(None, None, "lon"))


@pytest.mark.parametrize("name", ["heat", "attention", "strided", "no padding"])
def test_thin_and_empty_pieces_and_halos(name):
    (op, how, _), x = CASES[name], torch.randn(2, 3, 13, 10)
    model = jigsaw.local(op, **how)
    assert_same_on_every_mesh(model, x, [{"lat": 4}], spec=SPACE, split={2: (0, 1, 1, 12, 13)})
    assert_same_on_every_mesh(model, x, [{"lat": 2, "lon": 2}], spec=SPACE, halo={2: 2, 3: 1}, periodic=(3,))


def upwind(x, wind, area, scale):
    """Fields, a wind of every point, an area of every row, and a plain vector that `op` gets whole."""
    up, down = x - F.pad(x, (0, 0, 1, 0))[..., :-1, :], F.pad(x, (0, 0, 0, 1))[..., 1:, :] - x
    return torch.where(wind > 0, up, down) * wind, (x * area).cumsum(1) * scale[:, None, None]


def test_several_inputs_and_results():
    batch = [torch.randn(2, 3, 13, 10), torch.randn(13, 10), torch.rand(13, 1), torch.randn(3)]
    specs = [SPACE, ("lat", "lon"), ("lat", None), None]
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(jigsaw.local(upwind, {2: 1}), batch, meshes, spec=specs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = jigsaw.local(NeighborAttention(3), {-2: 1, -1: 2})
        self.out = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x):
        return self.out(x + self.near(x))


def test_in_a_net_that_is_parallelized():
    x, y = torch.randn(2, 3, 13, 11), torch.randn(2, 2, 13, 11)
    meshes = [{"lat": 3}, {"lat": 2, "lon": 2}, {"lat": 2, "spare": 2}]
    assert_same_on_every_mesh(Net(), x, meshes, spec=SPACE, target=y, target_spec=SPACE, build=jigsaw.parallelize)


@on_ranks(2)
def test_a_function_with_a_layer_that_has_two_names():
    torch.manual_seed(0)
    conv, other = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
    other.weight = conv.weight
    net, x = nn.Sequential(conv, nn.Sequential(conv), other).double(), torch.randn(2, 3, 13, 10, dtype=torch.float64)
    expected, mesh = net(x), world_mesh(lat=2)
    model = jigsaw.parallelize(jigsaw.local(net, {2: 3, 3: 3}), mesh)
    kept = list(net.parameters())
    for _ in range(2):
        tile = jigsaw.shard(x, mesh, (None, None, "lat", None))
        torch.testing.assert_close(model(tile).full_tensor(), expected)
        assert all(p is q for p, q in zip(kept, net.parameters(), strict=True))


class EarthConv(nn.Module):
    """Rows beyond a pole are those before it, seen from the other side; columns go around."""

    def __init__(self):
        super().__init__()
        self.conv = jigsaw.local(nn.Conv2d(3, 2, 3), {2: (0, 2), 3: (0, 2)}, rows={2: 13, 3: 10})

    def forward(self, x):
        over = [rows.flip(2).roll(x.shape[3] // 2, 3) for rows in (x[:, :, 1:2], x[:, :, -2:-1])]
        return self.conv(F.pad(torch.cat([over[0], x, over[1]], 2), (1, 1, 0, 0), mode="circular"))


def test_over_the_poles():
    assert_same_on_every_mesh(EarthConv(), torch.randn(2, 3, 13, 10), MESHES, spec=SPACE)


@on_ranks(2)
def test_the_rows_within_reach_travel_and_no_others():
    tile = jigsaw.shard(torch.randn(2, 3, 14, 10), world_mesh(lat=2), (None, None, "lat", None))
    tile.local.requires_grad_()
    row = 2 * 3 * 10 * 4
    with comm.count() as sent:
        y = jigsaw.local(heat, {2: 1, 3: 1}, wrap=(3,))(tile)
    assert [(call.kind, call.sent_bytes) for call in sent.calls] == [("exchange", row)]
    loss = y.square().sum()
    with comm.count() as sent:
        loss.backward()
    assert [call.sent_bytes for call in sent.calls if call.kind == "exchange"] == [row]


@on_ranks(2)
def test_what_cannot_be_exact_is_refused():
    x = jigsaw.shard(torch.randn(1, 2, 9, 4), world_mesh(lat=2), (None, None, "lat", None))
    weight = nn.Parameter(torch.ones(()))
    for op, how, text in [
        (heat, {"reach": {4: 1}}, "reach names dim 4"),
        (heat, {"reach": {2: (-1, 0)}}, "counted from the output's own"),
        (heat, {"reach": {2: 1}, "stride": {2: 0}}, "must be 1 or more"),
        (heat, {"reach": {2: 1}, "stride": {2: 2}, "wrap": (2,)}, "do not close that circle"),
        (lambda x: x.add_(1), {"reach": {2: 1}}, "changes an argument in place"),
        (lambda x: x + torch.rand(()), {"reach": {2: 1}}, "draws random numbers"),
        (lambda x: x * weight, {"reach": {2: 1}}, "that it was not given"),
        (lambda x: x.mean((2, 3)), {"reach": {2: 1}}, "makes 2 dims of a Tile of 4"),
        (lambda x: x[:, :, 2:], {"reach": {2: 1}}, "rows={2: ...}"),
        (lambda x: x.mean(2, keepdim=True), {"reach": {}}, "rows of a rank's along dim 2"),
    ]:
        with pytest.raises(ShardingError, match=re.escape(text)):
            jigsaw.local(op, **how)(x)
    with pytest.raises(ShardingError, match="do not broadcast"):
        jigsaw.local(torch.add, {})(x, x[:, :, :5])


# -- neighborhoods of cells -------------------------------------------------------------------------------------------


class Median(nn.Module):
    """The median of the neighbors of each cell, beside its own value, in as many mixtures as there are weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))

    def forward(self, near, own):
        return near.median(-1, keepdim=True).values * self.weight + own.tanh()


class MedianOfCells(nn.Module):
    """`Median` of the neighbors that a table names, beside the first of them."""

    def __init__(self, table):
        super().__init__()
        self.op, self.table = jigsaw.local(Median(), reach=table), table

    def forward(self, x):
        return self.op(x, jigsaw.nn.gather_neighbors(x, self.table)[..., :1])


TABLES = {
    "a ring": ([[(i - 1) % 48, (i + 1) % 48, (i * 7) % 48] for i in range(48)], 48),
    "other targets": ([[5, 1, 47], [-1, 3, 30], [9, 9, 0]], 48),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_function_of_neighborhoods_on_every_mesh(name):
    table = jigsaw.Neighbors(*TABLES[name])
    net, x = MedianOfCells(table), torch.randn(2, 48, dtype=torch.float64)
    near = jigsaw.nn.gather_neighbors(x, table)
    assert torch.equal(net(x), Median()(near, near[..., :1]))
    assert_same_on_every_mesh(net, x, [{"cell": n} for n in (1, 2, 3, 4)], spec=(None, "cell"))
    assert_same_on_every_mesh(net, x, [{"cell": 3}], spec=(None, "cell"), split={1: (0, 0, 31, 48)})


@on_ranks(3)
def test_a_function_of_neighborhoods_sends_each_row_once():
    tile = jigsaw.shard(torch.randn(5, 48), world_mesh(cell=3), (None, "cell"))
    table = jigsaw.Neighbors.healpix(2)
    op = jigsaw.local(lambda near: near.amax(-1, keepdim=True), reach=table)
    jigsaw.nn.gather_neighbors(tile, table)  # the checksum of the table
    with comm.count() as counted:
        op(tile)
    owned = set(range(*tile.layout.owned(tile.coordinate)[1]))
    needed = set(table.sources_of((min(owned), max(owned) + 1)).tolist()) - owned - {-1}
    assert counted.received_bytes == 4 * 5 * len(needed)


def test_tables_that_have_no_neighborhoods_are_refused():
    edges = jigsaw.Neighbors.of_edges([0, 1], [1, 1])
    for options in ({"reach": edges}, {"reach": jigsaw.Neighbors.healpix(1), "stride": {-1: 2}}):
        with pytest.raises(ShardingError, match="give a table of k neighbors each, without stride, wrap and rows"):
            jigsaw.local(torch.sin, **options)
