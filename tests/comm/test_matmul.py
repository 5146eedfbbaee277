"""The matmul core: exact on every grid, the bytes of the formula, the same work on every rank."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from jigsaw import comm
from jigsaw.comm.matmul import grid_matmul
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, box_elements
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import MatmulGrid, candidate_grids, choose_grid
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

GRIDS = [
    (1, 1, 1),
    *[(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    *[(3, 1, 1), (1, 3, 1), (1, 1, 3)],
    *[(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)],
]
RESTS = ["mnm", "knm", "mkn", "kkn"]


def _part(whole, layout, coord):
    (a, b), (c, d) = layout.owned(coord)
    return whole[a:b, c:d].clone()


def _operands(shape, dtype):
    m, k, n = shape
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in ((m, k), (n, k), (m, n))]


def _parts(grid, shape, dtype=torch.float64):
    coord = grid.coord(dist.get_rank())
    wholes = _operands(shape, dtype)
    x, w, g = (_part(t, layout, coord) for t, layout in zip(wholes, (grid.x, grid.w, grid.y), strict=True))
    return wholes, (x.requires_grad_(), w.requires_grad_(), g), coord


def _same_as_whole(grid, shape, chunk=1 << 20, dtype=torch.float64, rtol=1e-12):
    mesh = world_mesh(rank=dist.get_world_size())
    (x, w, g), (xp, wp, gp), coord = _parts(grid, shape, dtype)
    with comm.count() as forward:
        y = grid_matmul(xp, wp, grid, mesh, chunk)
    with comm.count() as backward:
        y.backward(gp)
    assert y.dtype == dtype
    assert xp.grad is not None
    assert wp.grad is not None
    x, w, g = (t.double() for t in (x, w, g))
    for name, got, whole, layout in (
        ("y", y, x @ w.T, grid.y),
        ("dx", xp.grad, g @ w, grid.x),
        ("dw", wp.grad, g.T @ x, grid.w),
    ):
        expected = _part(whole, layout, coord)
        assert got.shape == expected.shape, name
        torch.testing.assert_close(
            got.detach().double(),
            expected,
            rtol=rtol,
            atol=rtol * max(1.0, whole.abs().max().item()),
            msg=lambda m, name=name: f"{name}: {m}",
        )
    return grid, coord, forward, backward


@on_ranks(1)
def _one(*args):
    _check(*args)


def _check(p, rest, shape, chunk, split=None):
    grid, coord, forward, backward = _same_as_whole(MatmulGrid.of(shape, p, rest, split), shape, chunk)
    assert forward.received_bytes == 8 * sum(grid.received(coord).values())
    assert backward.received_bytes == 8 * sum(grid.received_backward(coord).values())
    return forward.received_bytes, backward.received_bytes


@pytest.mark.parametrize("shape", [(7, 10, 13), (33, 13, 10), (2, 3, 1)])
@pytest.mark.parametrize("p", GRIDS, ids=str)
def test_forward_gradients_and_bytes_on_every_grid(p, shape):
    for rest in RESTS:
        run_on_ranks(math.prod(p), _check, p, rest, shape, 1 << 20)


@pytest.mark.parametrize("p", [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_chunks_change_nothing(p):
    for rest in RESTS:
        run_on_ranks(4, _check, p, rest, (33, 13, 10), 100)


@pytest.mark.slow
@pytest.mark.parametrize("p", [(2, 2, 2), (2, 1, 4), (1, 8, 1)], ids=str)
def test_eight_ranks(p):
    run_on_ranks(8, _check, p, "mnm", (33, 13, 10), 200)


def test_explicit_cut_points_and_empty_blocks():
    split = {"m": (0, 0, 9), "n": (0, 7, 7)}
    run_on_ranks(4, _check, (2, 1, 2), "mnm", (9, 5, 7), 64, split)
    run_on_ranks(4, _check, (1, 4, 1), "mnm", (9, 5, 7), 64, {"k": (0, 1, 1, 5, 5)})


@pytest.mark.parametrize(
    "p", [*(p for p in GRIDS if math.prod(p) == 4), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_even_blocks_move_the_elements_of_the_formula(p):
    m, k, n = shape = 32, 24, 16
    p1, p2, p3 = p
    vx, vw, vy = (1 - 1 / p3) * m * k / (p1 * p2), (1 - 1 / p1) * k * n / (p2 * p3), (1 - 1 / p2) * m * n / (p1 * p3)
    for forward, backward in run_on_ranks(p1 * p2 * p3, _check, p, "mnm", shape, 1 << 20):
        assert forward == 8 * (vx + vw + vy)
        assert backward == 8 * (2 * vx + 2 * vw + vy)


@on_ranks(4)
def _work(p, shape):
    grid = MatmulGrid.of(shape, p)
    mesh = world_mesh(rank=4)
    _, (x, w, g), coord = _parts(grid, shape)
    with FlopCounterMode(display=False) as flops:
        grid_matmul(x, w, grid, mesh).backward(g)
    return flops.get_total_flops(), grid.work(coord), grid.products(coord)


@pytest.mark.parametrize("p", [p for p in GRIDS if math.prod(p) == 4], ids=str)
def test_every_rank_does_the_same_work(p):
    m, k, n = shape = 32, 24, 16
    p1, _, p3 = p
    for flops, work, products in _work(p, shape):
        assert flops == 3 * 2 * m * k * n // 4  # one product and its two gradients
        assert work == m * k * n // 4
        assert products == p1 * p3


@pytest.mark.parametrize("p", [p for p in GRIDS if math.prod(p) == 4], ids=str)
def test_uneven_work_differs_by_less_than_the_blocks_do(p):
    m, k, n = shape = 33, 13, 10
    found = _work(p, shape)
    assert sum(flops for flops, _, _ in found) == 6 * m * k * n
    assert max(flops for flops, _, _ in found) == 6 * math.prod(
        -(-size // parts) for size, parts in zip(shape, p, strict=True)
    )
    assert all(flops == 6 * work for flops, work, _ in found)


@pytest.mark.parametrize("p", [(1, 4, 1), (2, 2, 1)], ids=str)
@on_ranks(4)
def test_large_sums_go_around_in_two_chunks(p):
    grid, shape = MatmulGrid.of((33, 13, 10), p), (33, 13, 10)
    coord = grid.coord(dist.get_rank())
    calls = []
    for slack in (1 << 20, 1):  # as if each part were large
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jigsaw.comm.matmul._SLACK_BYTES", slack)
            _, _, forward, _ = _same_as_whole(grid, shape)
        assert forward.received_bytes == 8 * sum(grid.received(coord).values())
        calls.append(sum(c.sent_bytes > 0 for c in forward.calls))
    assert calls[1] - calls[0] == grid.ring("y", coord).size - 1


def _rounding(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@on_ranks(4)
def _narrow(p, dtype):
    shape = (33, 130, 10)
    grid = MatmulGrid.of(shape, p)
    (x, w, g), (xp, wp, gp), coord = _parts(grid, shape, dtype)
    mesh = world_mesh(rank=4)
    with comm.count() as forward:
        y = grid_matmul(xp, wp, grid, mesh, 200)
    y.backward(gp)
    moved, ring = grid.received(coord), grid.ring("y", coord)
    sums = (ring.size - 1) * y.numel()  # this rank's part, from each of the others
    assert forward.received_bytes == 2 * (moved["x"] + moved["w"] + sums)
    x, w, g = (t.double() for t in (x, w, g))
    for got, whole, layout in ((y, x @ w.T, grid.y), (xp.grad, g @ w, grid.x), (wp.grad, g.T @ x, grid.w)):
        assert got.dtype == dtype
        expected = comm.all_gather_object(mesh, (got.detach().double(), _part(whole, layout, coord)))
        found, wanted = (torch.cat([part[i].flatten() for part in expected]) for i in range(2))
        # once on the way and once at the end, of random parts: sqrt 2 of one product's own rounding
        assert _rounding(found, wanted) <= 1.7 * _rounding(wanted.to(dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [(4, 1, 1), (1, 4, 1), (2, 1, 2), (2, 2, 1)], ids=str)
def test_narrow_sums_travel_narrow_and_are_rounded_once_on_the_way(p, dtype):
    _narrow(p, dtype)


@on_ranks(4)
def _long_sum():
    """A sum that bfloat16 cannot take in parts: 256 + 1 is 256."""
    grid = MatmulGrid.of((1, 4, 1), (1, 4, 1))
    coord = grid.coord(dist.get_rank())
    x = _part(torch.tensor([[256.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16), grid.x, coord)
    w = _part(torch.ones(1, 4, dtype=torch.bfloat16), grid.w, coord)
    y = grid_matmul(x, w, grid, world_mesh(rank=4))
    return y.tolist()


def test_a_sum_across_ranks_is_added_up_in_float32():
    assert [row for part in _long_sum() for row in part] == [[260.0]]


@on_ranks(4)
def _complex():
    grid = MatmulGrid.of((7, 10, 5), (2, 1, 2))
    _, _, coord = _parts(grid, (7, 10, 5))
    x, w, g = _operands((7, 10, 5), torch.complex128)
    x, w = (x * (1 + 2j)).requires_grad_(), (w * (2 - 1j)).requires_grad_()
    F.linear(x, w).backward(g)
    xp, wp = (_part(t.detach(), layout, coord).requires_grad_() for t, layout in ((x, grid.x), (w, grid.w)))
    grid_matmul(xp, wp, grid, world_mesh(rank=4)).backward(_part(g, grid.y, coord))
    torch.testing.assert_close(xp.grad, _part(x.grad, grid.x, coord))
    torch.testing.assert_close(wp.grad, _part(w.grad, grid.w, coord))


def test_complex_gradients():
    _complex()


@on_ranks(4)
def _named_axes():
    """Axes by name, not contiguous in the mesh, one of them holding everything alike."""
    mesh = world_mesh(lat=2, channel=2)
    shape = (9, 10, 7)
    grid = MatmulGrid.by(shape, {"lat": 2, "channel": 2}, n="lat", m="channel")
    (x, w, _), (xp, wp, _), coord = _parts(grid, shape)
    y = grid_matmul(xp, wp, grid, mesh)
    torch.testing.assert_close(y, _part(x @ w.T, grid.y, coord))
    alike = MatmulGrid.by(shape, {"lat": 2, "channel": 2}, n="lat")
    (x, w, g), (xp, wp, gp), coord = _parts(alike, shape)
    with comm.count() as count:
        y = grid_matmul(xp, wp, alike, mesh)
    y.backward(gp)
    torch.testing.assert_close(y, _part(x @ w.T, alike.y, coord))
    torch.testing.assert_close(xp.grad, _part(g @ w, alike.x, coord))
    assert count.received_bytes == 8 * alike.received(coord)["x"]


def test_axes_by_name():
    _named_axes()


@on_ranks(4)
def _held_alike():
    """A whole weight on every rank is not gathered, and its gradient stays this rank's part."""
    shape = (9, 10, 7)
    even = MatmulGrid.of(shape, (4, 1, 1))
    grid = MatmulGrid(even.m, even.k, even.n, even.x, Layout.of((7, 10), (None, None), even.x.axes), even.y)
    (x, w, g), (xp, wp, gp), coord = _parts(grid, shape)
    mesh = world_mesh(rank=4)
    with comm.count() as count:
        y = grid_matmul(xp, wp, grid, mesh)
        y.backward(gp)
    assert count.received_bytes == 0
    torch.testing.assert_close(comm.all_reduce(wp.grad, mesh, ["rank"]), g.T @ x)
    torch.testing.assert_close(y, _part(x @ w.T, grid.y, coord))


def test_what_is_held_alike_does_not_move():
    _held_alike()


@on_ranks(4)
def _transient(p, shape):
    """The most that is held at once of what the ranks move, by the engine's own buffers."""
    grid = MatmulGrid.of(shape, p)
    _, (x, w, _), coord = _parts(grid, shape)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.new_empty.default:
                sizes.append(out.numel())
            return out

    with Watch():
        grid_matmul(x, w, grid, world_mesh(rank=4))
    return sum(sizes), max(sizes, default=0), grid.transient(coord)


@pytest.mark.parametrize("p", [(4, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)], ids=str)
def test_no_buffer_is_larger_than_predicted(p):
    for _, largest, predicted in _transient(p, (32, 24, 16)):
        assert largest <= predicted


def test_the_chooser_knows_its_regimes():
    tokens, channels = 1 << 20, 1024
    assert choose_grid(candidate_grids((tokens, channels, channels), 8)).name == "domain"  # the weight moves
    assert choose_grid(candidate_grids((64, 65536, 256), 8)).name == "row"  # a long sum: the result moves
    assert choose_grid(candidate_grids((64, 64, 65536), 8)).name == "column"  # X moves
    assert choose_grid(candidate_grids((4096, 4096, 4096), 64)).p == (4, 4, 4)  # a cube on a cube
    assert choose_grid(candidate_grids((tokens, channels, channels), 1)).name == "local"


def test_the_chooser_gives_named_axes_a_role():
    grid = choose_grid(candidate_grids((1 << 16, 64, 64), {"lat": 2, "lon": 4}))
    assert grid.m.axes == ("lat", "lon")


def test_the_best_grid_is_never_beaten_on_bytes():
    for shape in [(7, 10, 13), (33, 13, 10), (64, 64, 64), (4, 100, 9)]:
        for ranks in (2, 3, 4, 6, 8):
            every = candidate_grids(shape, ranks)
            best = choose_grid(every)
            balanced = [g for g in every if max(map(g.work, g.coords())) < 2 * math.prod(shape) / ranks]
            assert not balanced or best.worst == min(g.worst for g in balanced)


@pytest.mark.parametrize("rest", ["mnm", "knn", "mkn"])
def test_all_ranks_at_once_are_counted_as_their_rings_are(rest):
    grids = [(("m", "k"), "n"), ("k", ("n", "m")), ((), ("m", "n")), (("n", "m", "k"), ())]  # which axes cut M and K
    for m, k in grids:
        used = {*m, *k}
        grid = MatmulGrid.by((13, 7, 10), {"m": 2, "k": 3, "n": 4}, m, k, [a for a in "mkn" if a not in used], rest)
        for coord in grid.coords():
            rings = {name: grid.ring(name, coord) for name in "xwy"}
            parts = {name: [box_elements(box) for box in ring.boxes] for name, ring in rings.items()}
            gathered = {name: sum(parts[name]) - parts[name][rings[name].me] for name in "xwy"}
            scattered = {name: sum(parts[name]) - parts[name][rings[name].me - 1] for name in "xwy"}
            assert grid.received(coord) == {**gathered, "y": scattered["y"]}
            both = {name: gathered[name] + scattered[name] for name in "xw"}
            assert grid.received_backward(coord) == {**both, "y": gathered["y"]}
        totals = [sum((*grid.received(c).values(), *grid.received_backward(c).values())) for c in grid.coords()]
        assert grid.worst == max(totals)
        assert grid.most_work == max(map(grid.work, grid.coords()))
        assert grid.most_transient == max(map(grid.transient, grid.coords()))


def test_memory_bounds_the_choice():
    every = candidate_grids((512, 512, 512), 8)
    free = choose_grid(every)
    tight = choose_grid(every, memory=free.most_transient - 1)
    assert tight.most_transient < free.most_transient
    with pytest.raises(ShardingError, match=r"memory=3 elements: every one of 10 grids needs more; the least is \d+"):
        choose_grid(every, memory=3)


def _wrong(which):
    mesh = world_mesh(rank=2)
    x, w = torch.zeros(2, 4), torch.zeros(3, 4)
    if which == "ranks":
        grid_matmul(x, w, MatmulGrid.of((4, 4, 6), (4, 1, 1)), mesh)
    if which == "shape":
        grid_matmul(x[:1], w, MatmulGrid.of((4, 4, 6), (2, 1, 1)), mesh)
    if which == "dtype":
        grid_matmul(x, w.double(), MatmulGrid.of((4, 4, 6), (2, 1, 1)), mesh)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("ranks", "a grid of 4 x 1 x 1 on axes {'m': 4, 'k': 1, 'n': 1} needs 4 ranks, the mesh has 2"),
        ("shape", "x has shape (1, 4) here, but"),
        ("dtype", "x is torch.float32 and w is torch.float64; both must be of one floating or complex dtype"),
    ],
)
@on_ranks(2)
def test_wrong_use_is_told(which, words):
    with pytest.raises((ShardingError, TypeError), match=re.escape(words)):
        _wrong(which)


def test_a_grid_checks_itself():
    with pytest.raises(ShardingError, match="an axis can cut one dim only"):
        MatmulGrid.by((4, 4, 4), {"lat": 2}, m="lat", n="lat")
    good = MatmulGrid.of((4, 4, 4), (2, 1, 2))
    other = Layout((Cut(4, (0, 1, 4), ("m",)), good.k), good.x.axes)
    with pytest.raises(ShardingError, match=r"X at rest, .* must refine blocks cut by"):
        MatmulGrid(good.m, good.k, good.n, other, good.w, good.y)
    with pytest.raises(ShardingError, match="rest='nnn' must name a dim of X"):
        MatmulGrid.of((4, 4, 4), (2, 1, 2), rest="nnn")
