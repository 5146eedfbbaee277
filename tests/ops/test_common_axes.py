"""Tiles of which one axis cuts other dims meet by themselves: who moves (the rule), what travels, that it is exact."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsaw import Layout, ShardingError, comm, shard
from jigsaw.geometry.cut import Cut, have_same_rows
from jigsaw.geometry.transfers import plan_exchange
from jigsaw.ops.meeting.common_cuts import plan_common_axes
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh

SPACE = (None, None, "lat", "lon")
TURNED = (None, "lon", None, "lat")
OTHER = [
    (None, "lat", None, None),
    (None, None, "lon", "lat"),
    ("lat", None, "lon", None),
    (None, None, ("lon", "lat"), None),
]
MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]

# -- exact ------------------------------------------------------------------------------------------------------------


def _met(x, y):
    turned = y.transpose(2, 3).clone().transpose(2, 3)
    return [
        x + y,
        y - x,
        torch.where(y > 0, x, y),
        torch.addcmul(x, y, x.exp()),
        torch.lerp(y, x, 0.25),
        torch.maximum(x, turned[:, :1]),
        x * y.mean(2, keepdim=True),
        x.mean(3, keepdim=True) * y,
        x.mean(3, keepdim=True) * y.mean(2, keepdim=True),
        x.mean((2, 3), keepdim=True) + y[:1],
        x + y[0, 1],
        torch.cat([x, y], 1),
        torch.cat([y, x], 2),
        torch.cat([x, y[:, :, :1], x[..., -2:, :]], 2),
        torch.cat([y[..., :1], x, y, x], 3),
        torch.stack([x, y, x], 2),
        torch.stack([y, x]),
    ]


@pytest.mark.parametrize("rows", [(7, 10), pytest.param((2, 5), marks=pytest.mark.slow)])
def test_pointwise_functions_and_joins(rows):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, *rows), torch.randn(2, 3, *rows)
    for spec in OTHER:
        assert_same_on_every_mesh(_met, [x, y], MESHES[1:], spec=[SPACE, spec])


def test_alone_on_a_rank_and_with_halos():
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(_met, [x, y], MESHES[:1], spec=[SPACE, TURNED])
    assert_same_on_every_mesh(_met, [x, y], MESHES[2:], spec=[SPACE, TURNED], halo={2: 1, 3: 2}, periodic=[3])


def _lost(x, y):
    classes = (y.detach() > 0).sum(1).clamp(max=2)
    losses = [F.mse_loss(x, y), F.l1_loss(y, x), F.smooth_l1_loss(x, y), F.huber_loss(y, x)]
    losses += [F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), F.binary_cross_entropy_with_logits(y, x.sigmoid())]
    losses += [F.kl_div(x, y.softmax(1), reduction="batchmean"), F.gaussian_nll_loss(x, y, y.exp())]
    losses += [F.cross_entropy(x, classes), F.cross_entropy(x, y.softmax(1)), F.nll_loss(x.log_softmax(1), classes)]
    return [*losses, F.cosine_similarity(x, y, 2), F.pairwise_distance(x, y)]


def _multiplied(x, y):
    q, k, v = (t.flatten(2).mT for t in (x, y, y * 2))
    return [
        torch.einsum("bchw,bdhw->bcd", x, y),
        torch.einsum("bchw,bchw->bhw", y, x),
        x @ y.mT,
        x.mT @ y,
        torch.bmm(q.mT, k),
        F.softmax(q @ k.mT, -1) @ v,
        F.scaled_dot_product_attention(q, k, v),
    ]


def _changed(x, y):
    a, b = x * 1, y * 1
    a += y
    b.mul_(x).add_(x[:, :1], alpha=0.5)
    b[:, 1] = x[:, 0]
    return [a, b]


@pytest.mark.parametrize("function", [_lost, _multiplied, _changed])
def test_losses_products_and_in_place(function):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(function, [x, y], MESHES[1:], spec=[SPACE, TURNED])


def _flattened(x, y):
    return [x.flatten(2) + y, torch.stack([y, x.flatten(2)]), y * x.flatten(2).mean(1, keepdim=True)]


def test_tokens_that_were_flattened():
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, 10), torch.randn(2, 3, 70)
    assert_same_on_every_mesh(_flattened, [x, y], MESHES[1:], spec=[SPACE, (None, "lat", None)])


def _padded_face(faces, turns):
    """A face of a cubed sphere between its neighbors; those above and below are turned."""
    face, left, right, top, bottom = faces
    top, bottom = torch.rot90(top, turns, (-2, -1)), torch.rot90(bottom, turns, (-1, -2))
    middle = torch.cat((left[..., -1:], face, right[..., :1]), -1)
    above, below = (torch.cat((x[..., :1], x, x[..., -1:]), -1) for x in (top, bottom))
    return torch.cat((below[..., -1:, :], middle, above[..., :1, :]), -2)


def _nets(x):
    faces = [_padded_face([x[:, i] for i in range(5)], turns) for turns in range(4)]
    # attention over pixels as MAnet writes it: the view of what comes back parts every pixel
    tokens = x[:, 0].flatten(2)
    scores = torch.softmax((tokens.mT @ tokens).view(2, -1), 1).view(2, 64, 64)
    mixed = x[:, 0] + (scores @ tokens.mT).reshape(2, 4, 8, 8)
    return [*faces, F.conv2d(mixed, torch.linspace(-1, 1, 144, dtype=x.dtype).view(4, 4, 3, 3), padding=1)]


def test_faces_of_a_cube_and_attention_over_pixels():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_nets, torch.randn(2, 5, 4, 8, 8), MESHES[1:], spec=(None, None, None, "lat", "lon"))


def _sampled(x, y):
    """A correlation with all pixels for each pixel, looked up around it: raft."""
    pixels = torch.einsum("bchw,bcij->bhwij", x, y).reshape(70, 1, 7, 10)
    places = (x[:, :2].permute(0, 2, 3, 1).reshape(70, 1, 1, 2) / 4).tanh()
    whole = torch.linspace(-0.9, 0.9, 280, dtype=x.dtype).view(70, 2, 1, 2)
    looked_up = [F.grid_sample(pixels, grid, align_corners=True) for grid in (places, whole)]
    return [*looked_up, looked_up[0].view(1, 7, 10)]


def test_samples_that_were_flattened():
    torch.manual_seed(0)
    x, y = torch.randn(1, 3, 7, 10), torch.randn(1, 3, 7, 10)
    assert_same_on_every_mesh(_sampled, [x, y], MESHES[1:], spec=[SPACE, SPACE])


# -- what travels -----------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_the_worked_example_sends_three_quarters():
    mesh = world_mesh(lat=2, lon=2)
    x, y = torch.randn(2, 2, 128, 12, 8, dtype=torch.float64)
    first, second = shard(x, mesh, SPACE), shard(y, mesh, ("lon", "lat", None, None))
    second.local.requires_grad_()
    with comm.count() as forward:
        z = first + second
    assert z.layout == first.layout
    quarter = 64 * 6 * 4 * 8
    assert [(c.kind, c.sent_bytes, c.received_bytes, c.messages) for c in forward.calls] == [
        ("recut", 3 * quarter, 3 * quarter, 3)
    ]
    with comm.count() as backward:
        (z * z).sum().backward()
    assert [(c.kind, c.sent_bytes) for c in backward.calls if c.kind != "all_reduce"] == [("recut", 3 * quarter)]
    torch.testing.assert_close(second.grad.full_tensor(), 2 * (x + y))
    # a smaller one moves, also if it comes first
    assert (second.float() + first).layout == first.layout == (first + second.float()).layout
    with comm.count() as c:
        assert torch.equal((shard(x, mesh, (None,) * 4) + second).full_tensor(), x + y)
    assert {call.kind for call in c.calls if call.sent_bytes} <= {"agree", "exchange"}


@on_ranks(4)
def test_in_place_the_target_stays():
    mesh = world_mesh(lat=2, lon=2)
    x = torch.randn(2, 3, 7, 10)
    target, other = shard(x, mesh, SPACE), shard(x, mesh, TURNED)
    same = target.local
    with comm.count() as c:
        target += other.double()
    assert {call.kind for call in c.calls} == {"recut"}
    assert target.local is same
    torch.testing.assert_close(target.full_tensor(), x + x)
    by_lat = shard(x, mesh, (None, None, "lat", None))
    with pytest.raises(ShardingError, match=r"cannot be changed in place by one cut as .*lon would no longer cut"):
        by_lat += other


@on_ranks(2)
def test_a_view_that_leaves_much_to_one_rank_says_so_once():
    mesh = world_mesh(lat=2)
    x = torch.randn(521, 509, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            y = shard(x, mesh, ("lat", None)).view(509, 521)
        assert shard(x[:9], mesh, ("lat", None)).view(509, 9).layout.cuts[0].points == (0, 509, 509)  # not much
        shard(x[None], mesh, (None, "lat", None)).view(521, 509, 1)  # every row stays
    assert torch.equal(y.full_tensor(), x.view(509, 521))
    (warning,) = [w for w in said if "viewed as" in str(w.message)]
    assert f"no dim is left that lat could cut, so the first rank along it gets {260 * 509 * 8} bytes" in str(
        warning.message
    )
    assert "test_common_axes.py" in str(warning.message)
    assert "filterwarnings" in str(warning.message)


# -- the rule ---------------------------------------------------------------------------------------------------------

_AXES = {"lat": 2, "lon": 3}
_SPECS = [
    (None, None, None), ("lat", None, None), (None, "lat", "lon"), ("lon", None, "lat"), (None, ("lat", "lon"), None),
    (("lon", "lat"), None, None), (None, None, "lon"), ("lon", "lat", None),
]  # fmt: skip


def _travelling(source, target):
    """Elements that the exchange sends, over all ranks."""
    plans = [plan_exchange(source, target, coord) for coord in source.coords()]
    return sum(math.prod(b - a for a, b in box) for plan in plans for _, boxes in plan.receives for box in boxes)


def _busiest(layout):
    return max(math.prod(layout.local_shape(at)) for at in layout.coords())


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(*(st.integers(1, 7) for _ in range(3))),
    st.lists(st.tuples(st.sampled_from(_SPECS), st.sampled_from([1, 4, 8])), min_size=2, max_size=4),
)
def test_one_stays_and_nobody_gathers(shape, given_tiles):
    layouts = tuple(Layout.of(shape, spec, _AXES) for spec, _ in given_tiles)
    itemsizes = tuple(n for _, n in given_tiles)
    labels = ((0, 1, 2),) * len(layouts)
    moves = plan_common_axes(layouts, itemsizes, labels)
    if not any(moves):
        return
    ends = [to or old for to, old in zip(moves, layouts, strict=True)]
    for to in ends:
        assert all(have_same_rows(a, b) for a, b in zip(to.dims(), ends[0].dims(), strict=True))
        assert set(to.cut_axes) == {a for layout in layouts for a in layout.cut_axes}
    sent = [n * _travelling(old, to) for old, to, n in zip(layouts, ends, itemsizes, strict=True)]
    assert 0 in sent  # the one that stays
    # it is the first for which the fewest bytes travel: no other order of the same tiles finds fewer
    turned = plan_common_axes(layouts[::-1], itemsizes[::-1], labels)
    back = zip(turned, layouts[::-1], itemsizes[::-1], strict=True)
    assert sum(sent) == sum(n * _travelling(old, to or old) for to, old, n in back) or len(layouts) > 2
    assert plan_common_axes.__wrapped__(layouts, itemsizes, labels) == moves  # of layouts alone


@settings(max_examples=100, deadline=None)
@given(st.tuples(*(st.integers(2, 9) for _ in range(2))), st.integers(2, 4), st.data())
def test_two_of_one_size_send_alike_and_the_first_stays(shape, pieces, data):
    axes = (("lat", pieces),)

    def cut(size):
        inner = st.lists(st.integers(0, size), min_size=pieces - 1, max_size=pieces - 1)
        return Cut(size, (0, *sorted(data.draw(inner)), size), ("lat",))

    a = Layout((cut(shape[0]), Cut(shape[1], (0, shape[1]))), axes)
    b = Layout((Cut(shape[0], (0, shape[0])), cut(shape[1])), axes)
    named = ((0, 1),) * 2
    assert _travelling(a, b) == _travelling(b, a)
    rows = [sum(p < q for p, q in zip(c.points, c.points[1:], strict=False)) for c in (a.cuts[0], b.cuts[1])]
    for first, second, swapped in ((a, b, rows[1] > rows[0]), (b, a, rows[0] > rows[1])):
        moves = plan_common_axes((first, second), (4, 4), named)
        assert moves == ((second, None) if swapped else (None, first))
        assert plan_common_axes((first, second), (4, 1), named) == (None, first)  # fewer bytes
        assert plan_common_axes((first, second), (1, 4), named, stays=0) == (None, first)
