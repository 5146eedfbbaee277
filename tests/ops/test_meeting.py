"""Tiles cut by one axis at other points: who moves (the rule), what travels (bytes), and that it is exact."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jigsaw import Layout, ShardingError, Tile, comm, shard
from jigsaw.geometry.cut import Cut, cut_points, have_same_rows
from jigsaw.geometry.transfers import plan_exchange
from jigsaw.ops.meeting.common_cuts import _plan_meeting, bring_together, cut_at_multiples
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]


def _resized(x):
    """The same shape again, cut at other points where rows are odd."""
    return F.interpolate(F.max_pool2d(x, 2, ceil_mode=False), size=x.shape[-2:], mode="nearest")


# -- exact ------------------------------------------------------------------------------------------------------------


def _joined(x):
    y = _resized(x)
    a, b = x[:, :, 1:], y[:, :, :-1]
    mixed = torch.cat([x, y], 1)
    return [
        mixed,
        torch.cat([y, x[:, :1], mixed], 1),
        torch.cat([x, y], 0),
        torch.stack([x, y, x.exp()], 2),
        torch.where(y > 0, x, y),
        x + y * 2,
        a - b,
        x[:, :, :, 2:] * x[:, :, :, :-2],
        torch.addcmul(x, y, x.sin()),
        torch.lerp(y, x, 0.25),
        torch.maximum(a, b),
        (x - y[:, :1]) * y.mean((0, 1)),
        x * y.mean(3, keepdim=True),
        x.mean(2, keepdim=True) * y,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(37, 13), (121, 5)])
def test_pointwise_and_joins(rows):
    torch.manual_seed(0)
    assert_same_on_every_mesh(_joined, torch.randn(1, 2, *rows), MESHES, spec=SPACE)


def test_halos_and_seven_rows_on_four_ranks():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_joined, torch.randn(2, 3, 7, 10), [{"lat": 4}], spec=SPACE)
    assert_same_on_every_mesh(_joined, torch.randn(1, 2, 37, 13), [{"lat": 3}], spec=SPACE, halo={2: 2, 3: 1})
    assert_same_on_every_mesh(
        _joined, torch.randn(1, 2, 21, 13), [{"lat": 2, "lon": 2}], spec=SPACE, halo={2: 3, 3: 2}, periodic=[3]
    )


def _lost(x):
    y = _resized(x)
    classes = (y.detach().sum(1) > 0).long()
    losses = [F.mse_loss(x, y), F.l1_loss(y, x), F.smooth_l1_loss(x, y), F.huber_loss(y, x)]
    losses += [F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), F.binary_cross_entropy_with_logits(x, y.sigmoid())]
    losses += [
        F.kl_div(x, y.softmax(1), reduction="batchmean"),
        F.cross_entropy(x, classes),
        F.cross_entropy(x, y.softmax(1)),
    ]
    losses += [F.nll_loss(x.log_softmax(1), classes), F.gaussian_nll_loss(x, y, y.exp())]
    return [*losses, F.cross_entropy(x, classes, reduction="none")]


def test_losses():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_lost, torch.randn(1, 3, 37, 13), MESHES, spec=SPACE)


def _multiplied(x):
    y = _resized(x)
    tokens, others = (t.flatten(2).mT for t in (x, y))
    return [
        torch.einsum("bchw,bdhw->bcd", x, y),
        torch.einsum("bchw,bchw->bhw", y, x),
        x.flatten(2) @ others,
        x.mT @ y,
        x[0, 0].mT @ y[0, 1],
        F.linear(x[0, 0].mT, y[0, 1].mT),
        tokens * others,
        F.scaled_dot_product_attention(x.permute(2, 0, 3, 1), y.permute(2, 0, 3, 1), y.permute(2, 0, 3, 1)),
    ]


def test_products_and_attention():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_multiplied, torch.randn(1, 2, 37, 7), [{"lat": 2}, {"lat": 3}], spec=SPACE[:3] + (None,))


def _changed_in_place(x):
    y, z = x * 1, x * 1
    y += _resized(x)
    z.mul_(_resized(x)).add_(_resized(y), alpha=0.5)
    return [y, z]


def test_in_place():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_changed_in_place, torch.randn(1, 2, 37, 13), MESHES, spec=SPACE)


def _whole_and_cut(x, y):
    return [
        x + y,
        torch.cat([y, x], 1),
        torch.where(x > 0, y, x),
        torch.einsum("bchw,bchw->bc", x, y),
        F.mse_loss(y, x),
    ]


@pytest.mark.parametrize("spec", [(None,) * 4, (None, None, None, "lon"), (None, None, "lat", None)])
def test_what_is_whole_along_a_dim_meets_what_is_cut(spec):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(_whole_and_cut, [x, y], [{"lat": 3}, {"lat": 2, "lon": 2}], spec=[SPACE, spec])
    assert_same_on_every_mesh(
        _whole_and_cut, [x, y], [{"lat": 2, "lon": 2}], spec=[SPACE, spec], halo={2: 2, 3: 1}, periodic=[3]
    )


def _flattened(x, y):
    return x.flatten(2) + y.view(2, 3, 70)


def test_whole_tokens_meet_flattened_ones():
    x, y = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 70)
    assert_same_on_every_mesh(_flattened, [x, y], [{"lat": 3}, {"lat": 2, "lon": 2}], spec=[SPACE, (None,) * 3])


def _decoded(x):
    """Patches merged by slices; transposed convolution, padded to the size of the skip."""
    h, w = (n // 2 * 2 for n in x.shape[-2:])
    merged = torch.cat([x[:, :, i:h:2, j:w:2] for i in (0, 1) for j in (0, 1)], 1)
    weight = torch.linspace(-1, 1, 24, dtype=x.dtype).view(2, 3, 2, 2)
    up = F.conv_transpose2d(F.max_pool2d(x, 2), weight, stride=2)
    up = F.pad(up, (0, x.shape[-1] - up.shape[-1], 0, x.shape[-2] - up.shape[-2]), mode="replicate")
    return [merged, torch.cat([x, up], 1), F.avg_pool2d(x, 3, 1, 1) - F.interpolate(merged[:, :2], size=x.shape[-2:])]


def test_patch_merging_by_slices_and_padded_decoders():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_decoded, torch.randn(1, 2, 37, 21), MESHES, spec=SPACE)


class UNet(nn.Module):
    """Three levels; the decoder comes back to the size of the skip."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(c, d, 3, padding=1) for c, d in ((2, 4), (4, 6), (6, 8))])
        self.up = nn.ModuleList([nn.Conv2d(c, d, 3, padding=1) for c, d in ((14, 6), (10, 4))])
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        skips = []
        for layer in self.down[:-1]:
            skips.append(torch.relu(layer(x)))
            x = F.max_pool2d(skips[-1], 2)
        x = torch.relu(self.down[-1](x))
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear")
            x = torch.relu_(layer(torch.cat([skip, x], 1)))
        return self.norm(x)


def test_a_unet_at_37_by_50():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 37, 50)
    assert_same_on_every_mesh(UNet(), x, MESHES, spec=SPACE)
    assert_same_on_every_mesh(UNet(), x, [{"lat": 3}], spec=SPACE, halo={2: 3})


# -- views that split a cut -------------------------------------------------------------------------------------------


def _windows(x, size=4):
    b, c, h, w = x.shape
    parts = x.permute(0, 2, 3, 1).view(b, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5)
    parts = parts.reshape(-1, size * size, c)
    parts = parts * torch.softmax(parts, 1)
    back = parts.view(b, h // size, w // size, size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return back.permute(0, 3, 1, 2) + x


def _split_views(x):
    b, c, h, w = x.shape
    squares = x.unflatten(2, (h // 2, 2)).unflatten(4, (w // 2, 2))
    tokens = x.flatten(2).mT
    return [
        _windows(x),
        squares.permute(0, 1, 3, 5, 2, 4).flatten(1, 3),
        squares.sum((3, 5)),
        x.reshape(b * c * h // 4, 4 * w),
        tokens.reshape(b, h // 4, 4, w, c).mean(2),
        F.pixel_unshuffle(x, 2),
        F.pixel_shuffle(torch.cat([x, _resized(x)] * 2, 1), 2),
    ]


@pytest.mark.parametrize("rows", [(20, 12), (28, 44)])
def test_views_move_cut_points_to_multiples(rows):
    torch.manual_seed(0)
    assert_same_on_every_mesh(_split_views, torch.randn(2, 2, *rows), MESHES, spec=SPACE)
    assert_same_on_every_mesh(_split_views, torch.randn(2, 2, *rows), [{"lat": 3}], spec=SPACE, halo={2: 5})


@on_ranks(4)
def test_what_a_view_sends():
    mesh = world_mesh(lat=4)
    x = torch.randn(2, 24, 5, dtype=torch.float64)
    tile = shard(x, mesh, (None, "lat", None), split={1: (0, 7, 13, 18, 24)})
    tile.local.requires_grad_()
    with comm.count() as forward:
        y = tile.view(2, 6, 4, 5)
    assert y.layout.cuts[1].points == (0, 2, 3, 5, 6)
    # rank 0 takes row 7, rank 1 gives it and row 12 to rank 2 which takes it back: 0, 8, 12, 20, 24
    sent = [0, 1 + 1, 0, 2][tile.coordinate[0]]
    assert (forward.sent_bytes, {c.kind for c in forward.calls}) == (sent * 2 * 5 * 8, {"realign"})
    with comm.count() as backward:
        (y * y).sum().backward()
    received = sum(c.received_bytes for c in backward.calls if c.kind == "realign")
    assert received == sent * 2 * 5 * 8
    torch.testing.assert_close(tile.grad.full_tensor(), 2 * x)
    assert torch.equal(y.detach().clone().add_(1).full_tensor(), x.view(2, 6, 4, 5) + 1)
    assert torch.equal(
        y.detach().transpose(1, 2).contiguous().add_(1).full_tensor(), x.view(2, 6, 4, 5).mT.mT.transpose(1, 2) + 1
    )


# -- what travels -----------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_the_worked_example_sends_what_it_says():
    mesh = world_mesh(lat=4)
    at = mesh.get_local_rank()
    skip = shard(torch.randn(1, 16, 37, 50, dtype=torch.float64), mesh, SPACE[:3] + (None,))
    wide = shard(torch.randn(1, 32, 37, 50, dtype=torch.float64), mesh, SPACE[:3] + (None,))
    up = F.interpolate(F.max_pool2d(wide, 2), size=wide.shape[-2:])
    assert skip.layout.cuts[2].points == (0, 10, 19, 28, 37)
    assert up.layout.cuts[2].points == (0, 11, 21, 29, 37)
    skip.local.requires_grad_()
    with comm.count() as forward:
        y = torch.cat([skip, up], 1)
    assert y.layout.cuts[2].points == (0, 11, 21, 29, 37)
    row = 16 * 50 * 8
    assert [(c.kind, c.sent_bytes, c.messages) for c in forward.calls] == [
        ("realign", [0, 1, 2, 1][at] * row, [0, 1, 1, 1][at])
    ]
    with comm.count() as backward:
        y.sum().backward()
    assert [(c.kind, c.sent_bytes) for c in backward.calls if c.kind != "all_reduce"] == [
        ("realign", [1, 2, 1, 0][at] * row)
    ]
    assert torch.equal(skip.local.grad, torch.ones_like(skip.local))


@on_ranks(4)
def test_who_moves():
    mesh = world_mesh(lat=2, lon=2)
    x = torch.randn(3, 9, 7)
    a = shard(x, mesh, (None, "lat", "lon"))
    b = shard(x, mesh, (None, "lat", "lon"), split={1: (0, 4, 9), 2: (0, 3, 7)})
    uneven = shard(x, mesh, (None, "lat", "lon"), split={1: (0, 3, 9), 2: (0, 6, 7)})
    assert (a + b).layout == a.layout  # of equals the first
    assert (a + uneven).layout == a.layout == (uneven + a).layout  # or that of fewer rows on the rank with the most
    assert (b + a).layout == b.layout
    assert (a + b + b).layout == a.layout
    assert torch.addcmul(a, b, b).layout == b.layout  # two stay where one has to go
    assert (a + b[0]).layout == a.layout == (b[0] + a).layout  # less moves of what is smaller
    assert (a.double() + b).layout == a.layout == (b + a.double()).layout
    with comm.count() as c:
        whole = shard(x, mesh, (None, None, "lon")) + a + shard(x, mesh, (None, None, None))
    assert whole.layout == a.layout
    assert {call.kind for call in c.calls} <= {"agree"}
    mine = b.clone()
    mine.add_(a).mul_(a.double().float())
    assert mine.layout == b.layout
    torch.testing.assert_close(mine.full_tensor(), (x + x) * x)
    uncut = shard(x, mesh, (None, None, "lon"))
    with pytest.raises(ShardingError, match="cut dim -2 differently cannot meet"):
        uncut += a


@on_ranks(3)
def test_a_halo_stays_as_far_as_it_reaches():
    mesh = world_mesh(lat=3)
    x = torch.randn(30, 2)
    wide = shard(x, mesh, ("lat", None), halo={0: 3}, split=(0, 10, 19, 30))
    near = shard(x, mesh, ("lat", None), halo={0: 2}, split=(0, 11, 19, 30))
    with comm.count() as c:
        y = near + wide
    assert c.sent_bytes == 0
    assert y.layout.cuts[0].points == (0, 11, 19, 30)
    assert y.layout.cuts[0].held == ((0, 13), (9, 21), (17, 30))
    assert torch.equal(y.full_tensor(), x + x)
    bare = shard(x, mesh, ("lat", None), split=(0, 4, 19, 30))
    with comm.count() as c:
        z = bare + wide
    # at the points of `wide` seven rows would travel, six of them to rank 0; at those of the other three to rank 1
    assert z.layout.cuts[0].points == (0, 4, 19, 30)
    assert c.sent_bytes == [3 * 2 * 4, 0, 0][mesh.get_local_rank()]
    assert torch.equal(z.full_tensor(), x + x)


@on_ranks(2)
def test_rows_beyond_an_end_are_left_out_where_tiles_move():
    mesh = world_mesh(lat=2)
    layout = Layout((Cut(8, (0, 4, 8), ("lat",)).with_beyond(1, 1),), (("lat", 2),))
    x = torch.arange(-1.0, 9)
    at = mesh.get_local_rank()
    beyond = Tile(x[:6] if at == 0 else x[4:], layout, mesh)
    y = shard(torch.zeros(8), mesh, ("lat",), split=(0, 3, 8)) + beyond
    assert y.full_tensor().tolist() == list(range(8))


# -- the rule ---------------------------------------------------------------------------------------------------------


@st.composite
def _cut_of(draw, size, pieces):
    points = (0, *sorted(draw(st.lists(st.integers(0, size), min_size=pieces - 1, max_size=pieces - 1))), size)
    cut = Cut(size, points, ("lat",))
    return cut.with_halo(*draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))) if size > 1 else cut


@st.composite
def _meetings(draw):
    size, pieces, count = draw(st.integers(2, 24)), draw(st.integers(2, 4)), draw(st.integers(2, 4))
    axes = (("lat", pieces),)
    layouts = []
    for _ in range(count):
        lead = draw(st.sampled_from([1, 2, 5]))
        layouts.append(Layout((Cut(lead, (0, lead)), draw(_cut_of(size, pieces))), axes))
    return tuple(layouts), tuple(draw(st.sampled_from([1, 4, 8])) for _ in range(count))


def _travelling(source, target):
    """Elements that an exchange sends, over all ranks."""
    plans = [plan_exchange(source, target, coord) for coord in source.coords()]
    return sum(math.prod(b - a for a, b in box) for plan in plans for _, boxes in plan.receives for box in boxes)


@settings(max_examples=200, deadline=None)
@given(_meetings())
def test_the_fewest_bytes_travel(meeting):
    layouts, itemsizes = meeting
    labels = tuple(((None, "row")) for _ in layouts)
    targets = [new or old for new, old in zip(_plan_meeting(layouts, itemsizes, labels, None), layouts, strict=True)]
    cuts = [to.dim(1) for to in targets]
    assert all(have_same_rows(cut, cuts[0]) for cut in cuts)
    assert any(have_same_rows(cuts[0], layout.dim(1)) for layout in layouts)

    def cost(group):
        ways = [
            (old, old.replace_dim(1, *(c.bare() for c in group)), n) for old, n in zip(layouts, itemsizes, strict=True)
        ]
        return sum(n * _travelling(old, new) for old, new, n in ways)

    costs = [cost(layout.dim(1)) for layout in layouts]
    most = [max(b - a for a, b in pairwise(layout.dim(1)[0].points)) for layout in layouts]
    first = min(range(len(layouts)), key=lambda k: (costs[k], most[k], k))
    assert have_same_rows(cuts[0], layouts[first].dim(1))
    sent = sum(n * _travelling(old, new) for old, new, n in zip(layouts, targets, itemsizes, strict=True))
    assert sent == min(costs)  # and the halos that are kept cost nothing
    for k in range(len(layouts)):
        stay = _plan_meeting(layouts, itemsizes, labels, k)
        assert stay[k] is None
        assert all(have_same_rows((to or old).dim(1), layouts[k].dim(1)) for to, old in zip(stay, layouts, strict=True))


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 12), st.integers(2, 6), st.data())
def test_points_go_to_the_nearest_multiples(blocks, rows, data):
    cut = data.draw(_cut_of(blocks * rows, 3))
    moved = cut_at_multiples(cut, rows)
    nearest = tuple(min(range(0, cut.size + 1, rows), key=lambda m: (abs(m - p), -m)) for p in cut.points)
    if len(set(cut.points)) > 2 == len(set(nearest)):
        nearest = cut_points(cut.size, 3, align=rows)  # one piece would get everything that several have
    assert moved.points == nearest
    for i in range(3):
        (low, high), (start, stop) = moved.held[i], moved.owned(i)
        assert low <= start <= stop <= high
        assert low % rows == high % rows == 0
        assert low == start or cut.held[i][0] <= low
        assert high == stop or high <= cut.held[i][1]
    assert cut_at_multiples(cut, cut.size) is None
    assert cut_at_multiples(cut, cut.size + 1) is None


@on_ranks(2)
def test_dims_meet_by_name():
    mesh = world_mesh(lat=2)
    a, b = shard(torch.randn(9, 3), mesh, ("lat", None)), shard(torch.randn(3, 9), mesh, (None, "lat"), split=(0, 4, 9))
    first, second = bring_together([a, b], [["row", "x"], ["x", "row"]])
    assert first is a
    assert second.layout.cuts[1].points == (0, 5, 9)
    first, second = bring_together([a, b], [["row", "x"], ["x", "row"]], stays=1)
    assert second is b
    assert bring_together([a, b], [["row", None], [None, "other"]]) == [a, b]
    with pytest.raises(ShardingError, match="cut dim 'x' differently cannot meet"):
        bring_together([a, shard(torch.randn(9, 9), mesh, (None, "lat"))], [["x", None], ["x", None]])
