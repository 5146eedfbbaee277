"""Exchanges on real ranks: values, gradients, adjoints, bytes and dtypes against plain indexing of the whole tensor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.exchange import AsyncExchange, AsyncExchangeAdjoint, exchange_rows, redistribute_rows
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.transfers import plan_exchange
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate
from jigsaw.testing import on_ranks, world_mesh

# (shape, spec, halo, periodic) of what is needed; the source is the same cut without halo
NEEDS = [
    ((7,), ("lat",), {0: 1}, ()),
    ((10,), ("lat",), {0: (6, 0)}, ()),
    ((13,), ("lat",), {0: (0, 13)}, (0,)),
    ((2,), ("lat",), {0: 1}, (0,)),
    ((2, 33, 10), (None, "lat", "lon"), {1: 2, 2: (1, 3)}, (2,)),
    ((3, 7), ("lon", ("lat", "absent")), {0: 1, 1: 7}, (0, 1)),
]
MESHES = {1: [{"lat": 1}], 2: [{"lat": 2}], 3: [{"lat": 3}], 4: [{"lat": 4}, {"lat": 2, "lon": 2}]}


def numbered(shape, dtype=torch.float64):
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def box_of(x, box):
    """The box of a whole tensor, wrapped."""
    for dim, (start, stop) in enumerate(box):
        rows = torch.arange(start, stop)
        x = x.index_select(dim, rows % x.shape[dim] if x.shape[dim] else rows)
    return x


def need_of(axes, shape, spec, halo, periodic):
    source = Layout.of(shape, spec, axes)
    return source, Layout.of(shape, spec, axes, halo=halo, periodic=periodic)


def moved_and_back(source, target, mesh, margins=None):
    """<F x, y> - <x, F* y> over all ranks, and the scale of either."""
    here = mesh_coordinate(mesh)
    draw = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(source.local_shape(here), dtype=torch.float64, generator=draw, requires_grad=True)
    out = exchange_rows(x, source, target, mesh, margins)
    y = torch.randn(out.shape, dtype=torch.float64, generator=draw)
    (back,) = torch.autograd.grad(out, x, y)
    products = torch.stack([(out * y).sum(), (x * back).sum(), out.square().sum(), y.square().sum()]).detach()
    forward, backward, fx, yy = comm.all_reduce(products, mesh, [n for n, _ in axes_of_mesh(mesh)]).tolist()
    return abs(forward - backward), math.sqrt(fx * yy)


def check_needs(axes):
    mesh = world_mesh(**axes)
    here = mesh_coordinate(mesh)
    for need in NEEDS:
        source, target = need_of(mesh_axes(mesh), *need)
        x = numbered(source.shape)
        for a, b in ((source, target), (target, source), (target, target)):
            out = exchange_rows(box_of(x, a.held(here)), a, b, mesh)
            torch.testing.assert_close(out, box_of(x, b.held(here)), rtol=0, atol=0)
            gap, scale = moved_and_back(a, b, mesh)
            assert gap <= 1e-13 * scale
            margins = tuple((sum(here) + d, d) for d in range(x.ndim))
            gap, scale = moved_and_back(a, b, mesh, margins)
            assert gap <= 1e-13 * scale


def mesh_axes(mesh):
    return dict(axes_of_mesh(mesh))


@on_ranks(1)
def test_needs_and_adjoints_on_1_rank():
    for axes in MESHES[1]:
        check_needs(axes)


@on_ranks(2)
def test_needs_and_adjoints_on_2_ranks():
    for axes in MESHES[2]:
        check_needs(axes)


@on_ranks(3)
def test_needs_and_adjoints_on_3_ranks():
    for axes in MESHES[3]:
        check_needs(axes)


@on_ranks(4)
def test_needs_and_adjoints_on_4_ranks():
    for axes in MESHES[4]:
        check_needs(axes)


@on_ranks(3)
def test_margins_are_filled_around_the_box():
    mesh = world_mesh(lat=3)
    (here,) = mesh_coordinate(mesh)
    source, target = need_of({"lat": 3}, (10, 4), ("lat", None), {0: 1}, ())
    x = numbered((10, 4))
    margins = ((int(here == 0), int(here == 2)), (2, 1))
    out = exchange_rows(box_of(x, source.held((here,))), source, target, mesh, margins, fill=-math.inf)
    padded = torch.nn.functional.pad(x, (2, 1, 1, 1), value=-math.inf)
    low, high = source.owned((here,))[0]
    torch.testing.assert_close(out, padded[low : high + 2], rtol=0, atol=0)


@on_ranks(3)
def test_needs_smaller_than_owned_and_shifted():
    mesh = world_mesh(lat=3)
    (here,) = mesh_coordinate(mesh)
    source = Layout.of((10,), ("lat",), {"lat": 3})
    x = numbered((10,))
    for held in ([(1, 3), (5, 6), (7, 7)], [(2, 6), (6, 9), (9, 10)], [(-12, -8), (3, 5), (20, 31)]):
        target = source.replace_dim(0, source.cuts[0].holding(held))
        out = exchange_rows(box_of(x, source.held((here,))), source, target, mesh)
        torch.testing.assert_close(out, box_of(x, target.held((here,))), rtol=0, atol=0)
        gap, scale = moved_and_back(source, target, mesh)
        assert gap <= 1e-13 * scale


# -- derivatives ------------------------------------------------------------------------------------------------------


def first_and_second(boxes, weights):
    """L = sum w (F x)³ over all boxes."""
    return sum((w * box**3).sum() for box, w in zip(boxes, weights, strict=True))


@on_ranks(4)
def test_first_and_second_derivatives_are_those_of_the_whole_tensor():
    mesh = world_mesh(lat=2, lon=2)
    here = mesh_coordinate(mesh)
    source, target = need_of(mesh_axes(mesh), (5, 7), ("lat", "lon"), {0: (2, 1), 1: 3}, (1,))
    x = torch.randn((5, 7), dtype=torch.float64, requires_grad=True)
    weights = {c: torch.randn(target.local_shape(c), dtype=torch.float64) for c in target.coords()}

    loss = first_and_second([box_of(x, target.held(c)) for c in weights], weights.values())
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), x)

    local = box_of(x.detach(), source.held(here)).requires_grad_()
    mine = first_and_second([exchange_rows(local, source, target, mesh)], [weights[here]])
    (my_first,) = torch.autograd.grad(mine, local, create_graph=True)
    (my_second,) = torch.autograd.grad(my_first.sin().sum(), local)
    torch.testing.assert_close(my_first, box_of(first, source.held(here)))
    torch.testing.assert_close(my_second, box_of(second, source.held(here)))


SPECS = [(None, None), ("lat", None), (None, "lon"), ("lon", "lat"), (("lat", "lon"), None), (None, ("lon", "lat"))]


@on_ranks(4)
def test_redistribute_from_any_cut_to_any_other():
    """Gathered, cut, transposed; to other points, with a halo: values and both derivatives."""
    mesh = world_mesh(lat=2, lon=2)
    here = mesh_coordinate(mesh)
    x, w = torch.randn(2, 7, 10, dtype=torch.float64)
    for spec in SPECS:
        for other in SPECS:
            source = Layout.of(x.shape, spec, mesh_axes(mesh), halo={1: 2}, periodic=(1,))
            target = Layout.of(x.shape, other, mesh_axes(mesh), split="chunk")
            local = box_of(x, source.held(here)).requires_grad_()
            out = redistribute_rows(local, source, target, mesh)
            torch.testing.assert_close(out, box_of(x, target.held(here)), rtol=0, atol=0)
            # of a value held alike, every rank has the whole gradient
            (grad,) = torch.autograd.grad((box_of(w, target.held(here)) * out**2).sum(), local, create_graph=True)
            bare = source.without_halo()
            torch.testing.assert_close(merged(grad, source, mesh), box_of(2 * w * x, bare.held(here)))
            (second,) = torch.autograd.grad(merged(grad, source, mesh).sum(), local)
            torch.testing.assert_close(merged(second, source, mesh), box_of(2 * w, bare.held(here)))


def merged(grad, source, mesh):
    """The gradient of the owned rows, once what the halo rows got has gone home."""
    bare = source.without_halo()
    ghost = torch.zeros(bare.local_shape(mesh_coordinate(mesh)), dtype=grad.dtype, requires_grad=True)
    return torch.autograd.grad(exchange_rows(ghost, bare, source, mesh), ghost, grad, create_graph=True)[0]


@on_ranks(4)
def test_redistribute_to_a_halo_sums_what_its_copies_got():
    mesh = world_mesh(lat=2, lon=2)
    here = mesh_coordinate(mesh)
    axes = mesh_axes(mesh)
    x = torch.randn(7, 10, dtype=torch.float64)
    source = Layout.of(x.shape, ("lat", "lon"), axes)
    target = Layout.of(x.shape, (None, "lat"), axes, halo={1: 2}, periodic=(1,))
    local = box_of(x, source.held(here)).requires_grad_()
    out = redistribute_rows(local, source, target, mesh)
    torch.testing.assert_close(out, box_of(x, target.held(here)), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), local)
    copies = torch.zeros_like(x)
    for lat in range(2):
        columns = torch.arange(*target.held((lat, 0))[1]) % 10
        copies.index_add_(1, columns, torch.ones(7, len(columns), dtype=x.dtype))
    torch.testing.assert_close(grad, box_of(copies, source.held(here)))


@on_ranks(2)
def test_a_cut_piece_does_not_keep_the_whole_alive():
    mesh = world_mesh(lat=2)
    axes = mesh_axes(mesh)
    source, target = Layout.of((8, 3), (None, None), axes), Layout.of((8, 3), ("lat", None), axes)
    out = redistribute_rows(numbered((8, 3)), source, target, mesh)
    assert out.untyped_storage().nbytes() == 4 * 3 * 8


@on_ranks(2)
def test_what_is_here_already_is_not_copied():
    mesh = world_mesh(lat=2)
    bare, wide = need_of({"lat": 2}, (8, 3), ("lat", None), {0: 1}, ())
    x = numbered(wide.local_shape(mesh_coordinate(mesh)))
    with comm.count() as counted:
        assert exchange_rows(x, wide, wide, mesh) is x
        assert redistribute_rows(x, wide, wide, mesh) is x
        assert exchange_rows(x, wide, bare, mesh).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert counted.calls == []


@on_ranks(4)
def test_flattened_dims():
    mesh = world_mesh(lat=2, lon=2)
    here = mesh_coordinate(mesh)
    lat, lon = Cut(7, (0, 4, 7), ("lat",)), Cut(6, (0, 3, 6), ("lon",))
    source = Layout.from_dims([[whole_dim(2)], [lat, lon]], axes_of_mesh(mesh))
    target = Layout.from_dims(
        [[whole_dim(2)], [lat.with_halo(1, 1), lon.with_halo(2, 1, periodic=True)]], axes_of_mesh(mesh)
    )
    x = numbered((2, 7, 6))
    local = box_of(x, source.held(here)).reshape(source.local_shape(here)).requires_grad_()
    out = exchange_rows(local, source, target, mesh)
    wanted = box_of(x, target.held(here))
    torch.testing.assert_close(out, wanted.reshape(target.local_shape(here)), rtol=0, atol=0)
    padded = exchange_rows(local, source, target, mesh, margins=((0, 0), (1, 0), (0, 2)))
    torch.testing.assert_close(padded, torch.nn.functional.pad(wanted, (0, 2, 1, 0)).flatten(1), rtol=0, atol=0)
    gap, scale = moved_and_back(source, target, mesh, margins=((1, 0), (1, 0), (0, 2)))
    assert gap <= 1e-13 * scale
    gathered = Layout.from_dims([[whole_dim(2)], [whole_dim(7), whole_dim(6)]], axes_of_mesh(mesh))
    out = redistribute_rows(local, source, gathered, mesh)
    torch.testing.assert_close(out, x.reshape(2, 42), rtol=0, atol=0)
    (grad,) = torch.autograd.grad((out * x.reshape(2, 42)).sum(), local)
    torch.testing.assert_close(grad, local.detach())


@on_ranks(3)
def test_strips_and_their_adjoint():
    mesh = world_mesh(lat=3)
    here = mesh_coordinate(mesh)
    source = Layout.of((10, 4), ("lat", None), {"lat": 3})
    cut = source.cuts[0]
    below, above = ([(a - 2, a) for a, _ in cut.held], [(b, b + 1) for _, b in cut.held])
    targets = [source.replace_dim(0, cut.holding(held)) for held in (below, above)]
    x = numbered((10, 4))
    local = box_of(x, source.held(here)).requires_grad_()
    found = AsyncExchange(local.detach(), source, targets, mesh).wait()
    for strip, target in zip(found, targets, strict=True):
        torch.testing.assert_close(strip, box_of(x, target.held(here)), rtol=0, atol=0)
    grads = [torch.randn_like(strip) for strip in found]
    outs = [exchange_rows(local, source, target, mesh) for target in targets]
    (wanted,) = torch.autograd.grad(outs, local, grads)
    into = torch.ones_like(local)
    AsyncExchangeAdjoint(grads, source, targets, mesh).wait(into)
    torch.testing.assert_close(into, wanted + 1)


# -- bytes and dtypes -------------------------------------------------------------------------------------------------


def cells(boxes):
    return sum(math.prod(b - a for a, b in box) for box in boxes)


@on_ranks(4)
def test_bytes_and_messages_are_those_of_the_plan():
    mesh = world_mesh(lat=2, lon=2)
    here = mesh_coordinate(mesh)
    for need in NEEDS[4:]:
        source, target = need_of(mesh_axes(mesh), *need)
        x = torch.ones(source.local_shape(here), dtype=torch.float32, requires_grad=True)
        todo = plan_exchange(source, target, here)
        given, got = (4 * sum(cells(boxes) for _, boxes in side) for side in (todo.sends, todo.receives))
        with comm.count() as forward:
            out = exchange_rows(x, source, target, mesh)
        assert (forward.sent_bytes, forward.received_bytes, forward.messages) == (given, got, len(todo.sends))
        with comm.count() as backward:
            out.sum().backward()
        assert (backward.sent_bytes, backward.received_bytes, backward.messages) == (got, given, len(todo.receives))
        assert [call.kind for call in forward.calls + backward.calls] == ["exchange"] * 2


@on_ranks(4)
def test_a_halo_of_two_rows_costs_two_rows_a_neighbor():
    mesh = world_mesh(lat=4)
    (here,) = mesh_coordinate(mesh)
    source, target = need_of({"lat": 4}, (5, 33, 10), (None, "lat", None), {1: 2}, ())
    with comm.count() as counted:
        exchange_rows(torch.ones(source.local_shape((here,)), dtype=torch.bfloat16), source, target, mesh)
    neighbors = 2 if here in (1, 2) else 1
    assert (counted.sent_bytes, counted.messages) == (neighbors * 5 * 2 * 10 * 2, neighbors)


@on_ranks(2)
def test_a_gather_costs_the_part_that_is_sent():
    mesh = world_mesh(lat=2)
    source, target = (Layout.of((7, 3), spec, {"lat": 2}) for spec in (("lat", None), (None, None)))
    with comm.count() as counted:
        redistribute_rows(torch.ones(source.local_shape(mesh_coordinate(mesh))), source, target, mesh)
    mine = 4 - mesh_coordinate(mesh)[0]
    assert (counted.sent_bytes, counted.received_bytes, counted.messages) == (mine * 12, (7 - mine) * 12, 1)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.bool,
    ],
)
@on_ranks(2)
def test_every_dtype_travels_as_it_is(dtype):
    mesh = world_mesh(lat=2)
    here = mesh_coordinate(mesh)
    source, target = need_of({"lat": 2}, (5, 3), ("lat", None), {0: 1}, (0,))
    x = (numbered((5, 3)) % 2).to(dtype)
    with comm.count() as counted:
        out = exchange_rows(box_of(x.to(torch.complex128), source.held(here)).to(dtype), source, target, mesh)
    assert out.dtype == dtype
    wanted = box_of(x.to(torch.complex128), target.held(here))
    torch.testing.assert_close(out.to(torch.complex128), wanted, rtol=0, atol=0)
    assert counted.sent_bytes == 2 * 3 * dtype.itemsize


@on_ranks(2)
def test_views_travel_by_value():
    """Transposed, strided, conjugated and negated views, and memory in channels-last order."""
    mesh = world_mesh(lat=2)
    here = mesh_coordinate(mesh)
    shape = (2, 4, 6, 3)
    source, target = need_of({"lat": 2}, shape, (None, None, "lat", None), {2: 2}, (2,))
    x = torch.complex(numbered(shape), -numbered(shape))
    views = [
        lambda t: t.conj(),
        lambda t: t.conj().imag,
        lambda t: t.real,
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ]
    for view in views:
        local = view(box_of(x, source.held(here)).clone())
        out = exchange_rows(local, source, target, mesh)
        torch.testing.assert_close(out, box_of(view(x).clone(), target.held(here)), rtol=0, atol=0)


@on_ranks(2)
def test_complex_gradients():
    mesh = world_mesh(lat=2)
    here = mesh_coordinate(mesh)
    source, target = need_of({"lat": 2}, (5,), ("lat",), {0: 1}, (0,))
    x = torch.randn(5, dtype=torch.complex128, requires_grad=True)
    loss = sum((box_of(x, target.held(c)) * (1 + 2j)).abs().pow(3).sum() for c in target.coords())
    (wanted,) = torch.autograd.grad(loss, x)
    local = box_of(x.detach(), source.held(here)).requires_grad_()
    (exchange_rows(local, source, target, mesh) * (1 + 2j)).abs().pow(3).sum().backward()
    torch.testing.assert_close(local.grad, box_of(wanted, source.held(here)))


# -- meshes whose ranks are not a range ------------------------------------------------------------------------------


def check_mesh_of(ranks, spec):
    """Every rank of the job makes the mesh; only its own use it."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("lat", "lon"))
    if mesh.get_coordinate() is None:
        with pytest.raises(
            ShardingError, match=r"rank \d is not part of the mesh .*; only its ranks may use its tiles"
        ):
            mesh_coordinate(mesh)
        return
    here = mesh_coordinate(mesh)
    assert ranks[here[0]][here[1]] == dist.get_rank()
    source, target = need_of(mesh_axes(mesh), (7, 10), spec, {0: 2, 1: 1}, (1,))
    x = numbered((7, 10))
    out = exchange_rows(box_of(x, source.held(here)), source, target, mesh)
    torch.testing.assert_close(out, box_of(x, target.held(here)), rtol=0, atol=0)
    gap, scale = moved_and_back(source, target, mesh)
    assert gap <= 1e-13 * scale
    gathered = Layout.of((7, 10), (None, None), mesh_axes(mesh))
    torch.testing.assert_close(redistribute_rows(out, target, gathered, mesh), x, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [[[3, 1]], [[3], [0], [2]], [[3, 1], [0, 2]], [[2]]])
@on_ranks(4)
def test_a_mesh_of_ranks_that_are_no_range(ranks):
    check_mesh_of(ranks, ("lat", "lon"))
    check_mesh_of(ranks, (("lon", "lat"), None))


@pytest.mark.slow
@on_ranks(6)
def test_a_mesh_with_two_axes_on_some_ranks_of_a_job():
    """The group of such a mesh is made by its ranks alone, even when the first exchange needs only two of them."""
    check_mesh_of([[5, 1], [0, 3]], ("lat", "lon"))
    mesh = DeviceMesh("cpu", [[2, 5], [4, 1]], mesh_dim_names=("lat", "lon"))
    if mesh.get_coordinate() is None:
        return
    here = mesh_coordinate(mesh)
    source = Layout.of((8,), (("lat", "lon"),), mesh_axes(mesh))
    target = source.replace_dim(0, source.cuts[0].holding([(0, 2), (2, 4), (4, 6), (1, 2)]))
    out = exchange_rows(box_of(numbered((8,)), source.held(here)), source, target, mesh)
    torch.testing.assert_close(out, box_of(numbered((8,)), target.held(here)), rtol=0, atol=0)
    assert sum(comm.all_gather_object(mesh, 1)) == 4


@on_ranks(4)
def test_a_slice_of_a_mesh():
    mesh = world_mesh(data=2, lat=2, lon=1)["lat", "lon"]
    here = mesh_coordinate(mesh)
    source, target = need_of(mesh_axes(mesh), (7,), ("lat",), {0: 1}, ())
    x = numbered((7,))
    out = exchange_rows(box_of(x, source.held(here)), source, target, mesh)
    torch.testing.assert_close(out, box_of(x, target.held(here)), rtol=0, atol=0)


# -- wrong use --------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_wrong_use_is_refused_by_every_rank_before_anything_is_sent():
    mesh = world_mesh(lat=2, lon=2)
    axes = mesh_axes(mesh)
    layout = Layout.of((8, 6), ("lat", "lon"), axes)
    x = torch.ones(layout.local_shape(mesh_coordinate(mesh)))
    wide = layout.replace_dim(0, layout.cuts[0].with_halo(1, 1))
    flat = Layout.from_dims([layout.cuts], axes_of_mesh(mesh))
    wrong = [
        ((layout, Layout.of((8, 7), ("lat", "lon"), axes), mesh), "sizes and mesh must agree"),
        ((layout, Layout.of((8, 6), ("lat", None), axes), mesh), "would change what is replicated; use redistribute"),
        ((layout, layout, world_mesh(lat=4)), r"is cut over mesh \{'lat': 2, 'lon': 2\}, but the mesh is \{'lat': 4\}"),
        ((layout, flat, mesh), "their dims are flattened differently; unflatten first"),
        ((wide, layout, mesh), r"has a local tensor of shape \(4, 3\), but .* gives it \(5, 3\)"),
        ((layout, wide, mesh, ((0, -1), (0, 0))), r"margins .* must be two row counts >= 0 for each of the 2 cuts"),
        ((layout, wide, mesh, ((0, 0),)), r"margins .* for each of the 2 cuts"),
    ]
    with comm.count() as counted:
        for args, words in wrong:
            with pytest.raises(ShardingError, match=words):
                exchange_rows(x, *args)
        with pytest.raises(ShardingError, match=r"fill=-inf does not exist in torch.int64; cast"):
            exchange_rows(x.long(), layout, wide, mesh, ((mesh_coordinate(mesh)[0], 0), (0, 0)), -math.inf)
        for target in (
            Layout.of((8, 7), (None, None), axes),
            Layout.from_dims([[whole_dim(8), whole_dim(6)]], axes_of_mesh(mesh)),
        ):
            with pytest.raises(ShardingError, match=r"sizes and mesh must agree|flattened differently"):
                redistribute_rows(x, layout, target, mesh)
    assert counted.calls == []
