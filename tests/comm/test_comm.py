"""Collectives on real ranks: values, NaN, dtypes, order, adjoints and the count of every byte."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.wire_values import wire_memory_by
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.geometry import transfers
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard
from jigsaw.torch_internals import pytree

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def part(rank, dtype=torch.float64):
    """What a rank brings: small whole numbers, exact in every dtype."""
    return (torch.arange(6).reshape(2, 3) * (rank + 1) % 5 + rank).to(dtype)


@on_ranks(2)
def test_all_that_arrives_lands_in_wire_memory():
    mesh, pool, landed = world_mesh(lat=2), set(), []

    def from_pool(like, shape, dtype):
        memory = like.new_empty(shape, dtype=dtype)
        pool.add(memory.untyped_storage().data_ptr())
        return memory

    def noted(name):
        function = getattr(dist, name)

        def call(results, *args, **named):
            if name == "batch_isend_irecv":  # of ordered groups
                landed.extend(m.tensor.untyped_storage().data_ptr() for m in results if m.op is dist.irecv)
            else:
                landed.extend(x.untyped_storage().data_ptr() for x in pytree.tree_leaves(results))
            return function(results, *args, **named)

        return mock.patch.object(dist, name, call)

    q = shard(torch.randn(1, 2, 8, 4), mesh, (None, None, "lat", None))
    x = shard(torch.randn(8, 6), mesh, ("lat", None))
    narrow = shard(torch.ones(2, 2**16, dtype=torch.bfloat16), mesh, ("lat", None))
    calls = {
        "halo": lambda: F.conv1d(x.T[None], torch.ones(1, 6, 3), padding=1),
        "product": lambda: x @ shard(torch.randn(6, 8), mesh, (None, "lat")),
        "ring": lambda: F.scaled_dot_product_attention(q, q, q),
        "layout": lambda: x.redistribute((None, "lat")),
        "whole": x.full_tensor,
        "narrow sum": lambda: narrow.sum(0),
    }
    way = "irecv" if dist.get_backend() == "gloo" else "batch_isend_irecv"
    with wire_memory_by(from_pool), noted(way), noted("all_gather"), noted("all_to_all_single"):
        for name, call in calls.items():
            landed.clear()
            call()
            assert landed, name
            assert set(landed) <= pool, name


# -- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@on_ranks(3)
def test_all_reduce_is_the_reduction_of_the_stacked_parts(dtype):
    mesh = world_mesh(lat=3)
    stacked = torch.stack([part(r, torch.int64) for r in range(3)])
    mine = part(dist.get_rank(), dtype)
    for op, wanted in [
        ("sum", stacked.sum(0)),
        ("prod", stacked.prod(0)),
        ("max", stacked.amax(0)),
        ("min", stacked.amin(0)),
    ]:
        found = comm.all_reduce(mine, mesh, "lat", op)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(mine, part(dist.get_rank(), dtype), rtol=0, atol=0)


@on_ranks(2)
def test_all_reduce_of_bool_and_complex():
    mesh = world_mesh(lat=2)
    rank = dist.get_rank()
    flags = torch.tensor([True, rank == 0, False])
    assert comm.all_reduce(flags, mesh, ["lat"], "max").tolist() == [True, True, False]
    assert comm.all_reduce(flags, mesh, ["lat"], "min").tolist() == [True, False, False]
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128) * (rank + 1)
    torch.testing.assert_close(comm.all_reduce(z.conj(), mesh, ["lat"]), torch.tensor([3 - 6j, 9 + 3j], dtype=z.dtype))
    torch.testing.assert_close(
        comm.all_reduce(z.conj().imag, mesh, ["lat"]), torch.tensor([-6.0, 3.0], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bool, "sum"),
        (torch.complex64, "max"),
        (torch.complex64, "prod"),
        (torch.float8_e4m3fn, "sum"),
        (torch.float32, "mean"),
    ],
)
@on_ranks(2)
def test_a_reduction_that_a_dtype_lacks_is_refused(dtype, op):
    with pytest.raises(ShardingError, match=rf"all_reduce cannot take op='{op}' of {dtype} over ranks; cast to"):
        comm.all_reduce(torch.zeros(2).to(dtype), world_mesh(lat=2), "lat", op)


@pytest.mark.parametrize("dtype", FLOATS)
@on_ranks(3)
def test_max_and_min_of_special_values(dtype):
    """NaN wins from whichever rank it comes and with whichever sign; infinities and signed zeros keep their order."""
    mesh = world_mesh(lat=3)
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor(
        [
            [nan, 1, 1, inf, -inf, -0.0, -2, -nan, nan],
            [1, nan, 1, 1, 1, 0.0, -3, inf, nan],
            [2, 2, nan, -inf, inf, -0.0, -4, -inf, nan],
        ],
        dtype=dtype,
    )
    mine = rows[dist.get_rank()]
    for op, wanted in (("max", rows.amax(0)), ("min", rows.amin(0))):
        torch.testing.assert_close(comm.all_reduce(mine, mesh, "lat", op), wanted, rtol=0, atol=0, equal_nan=True)
    assert comm.all_reduce(mine, mesh, "lat", "max")[5].signbit().item() is False
    assert comm.all_reduce(mine, mesh, "lat", "min")[5].signbit().item() is True


@on_ranks(4)
def test_all_ranks_get_the_same_bits():
    mesh = world_mesh(lat=2, lon=2)
    torch.manual_seed(dist.get_rank())
    total = comm.all_reduce(torch.randn(1001), mesh, ["lat", "lon"])
    assert all(torch.equal(other, total) for other in comm.all_gather(total, mesh, ["lat", "lon"]))


@on_ranks(3)
def test_half_precision_is_summed_in_float32():
    mesh = world_mesh(lat=3)
    rank = dist.get_rank()
    mine = torch.tensor([60000.0, 60000.0, -60000.0][rank], dtype=torch.float16)  # two of them overflow
    assert comm.all_reduce(mine, mesh, "lat").item() == 60000.0
    mine = torch.tensor([256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)  # 257 is none: rounded once, at the end
    assert comm.all_reduce(mine, mesh, "lat").item() == 258.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(3)
def test_large_narrow_sums_travel_as_they_are(dtype):
    """Half the bytes, and float32's sum all the same, rounded once; alike on all ranks."""
    mesh = world_mesh(lat=3)
    torch.manual_seed(0)
    parts = torch.randn(3, 7, 4999).to(dtype)
    mine = parts[dist.get_rank()].t()  # 34993 elements: no share is as long as the others
    for same in (None, ("alike", 7)):
        with comm.count() as counted:
            total = comm.all_reduce(mine, mesh, "lat", same=same)
        assert counted.sent_bytes == 2 * (2 * 11665 * 2) + (2 * 8 if same else 0)
        torch.testing.assert_close(total, parts.double().sum(0).t().to(dtype), rtol=0, atol=0)
        assert all(torch.equal(other, total) for other in comm.all_gather(total, mesh, "lat"))
    with pytest.raises(RanksDifferError, match="the ranks reduce tiles of different layouts"):
        comm.all_reduce(mine, mesh, "lat", same=("rank", dist.get_rank() // 2))
    with comm.count() as counted, mock.patch.object(transfers, "MOST_PEERS_AT_ONCE", 2):  # three ranks are many
        total = comm.all_reduce(mine, mesh, "lat")
    assert counted.sent_bytes == 2 * (2 * 34993 * 4) // 3  # in float32, by the backend's own sum
    torch.testing.assert_close(total, parts.double().sum(0).t().to(dtype), rtol=0, atol=0)


@on_ranks(2)
def test_nothing_is_sent_along_one_rank_or_for_no_rows():
    mesh = world_mesh(lat=2, lon=1)
    x = torch.ones(3)
    with comm.count() as counted:
        for same in (comm.all_reduce(x, mesh, "lon"), *comm.all_gather(x, mesh, "lon")):
            torch.testing.assert_close(same, x)
        assert comm.all_reduce(x, mesh, "lon") is not x
        assert comm.sum_parts(x, mesh, ["lon", "absent"]) is x
        assert comm.use_in_parts(x.requires_grad_(), mesh, ()) is x
        assert comm.all_reduce(torch.ones(0, 3), mesh, "lat").shape == (0, 3)
        assert [p.shape for p in comm.all_gather(torch.ones(0, 3), mesh, "lat")] == [(0, 3)] * 2
        comm.broadcast_first(torch.ones(0), mesh, "lat")
        comm.start_sum(torch.ones(0), mesh, "lat").wait()
    assert counted.calls == []


# -- order, over any axes of any mesh ---------------------------------------------------------------------------------


def check_axes(mesh, ranks, axes):
    """Along `axes` of a mesh whose ranks are `ranks`: every collective against the list of the members."""
    here = mesh_coordinate(mesh)
    names = mesh.mesh_dim_names
    line = ranks[tuple(slice(None) if n in axes else c for n, c in zip(names, here, strict=True))].flatten().tolist()
    me = dist.get_rank()
    assert comm.rank_count(mesh, axes) == len(line)
    torch.testing.assert_close(comm.all_reduce(part(me), mesh, axes), sum(part(r) for r in line))
    for dtype in (torch.float64, torch.bool, torch.complex64, torch.int16):
        parts = comm.all_gather(part(me, dtype).T, mesh, axes)
        assert len(parts) == len(line)
        for found, r in zip(parts, line, strict=True):
            torch.testing.assert_close(found, part(r, dtype).T)
    first = part(me, torch.bfloat16)
    comm.broadcast_first(first, mesh, axes)
    torch.testing.assert_close(first, part(line[0], torch.bfloat16))
    for dtype in (torch.float32, torch.complex64):
        summed = part(me, dtype)
        comm.start_sum(summed, mesh, axes).wait()
        torch.testing.assert_close(summed, sum(part(r, dtype) for r in line))


def check_every_choice(ranks, mesh):
    ranks = torch.tensor(ranks)
    names = mesh.mesh_dim_names
    for bits in range(1 << len(names)):
        check_axes(mesh, ranks, [n for i, n in enumerate(names) if bits >> i & 1])
    assert comm.all_gather_object(mesh, {"rank": "x" * dist.get_rank()}) == [
        {"rank": "x" * r} for r in ranks.flatten().tolist()
    ]


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[3, 1], [0, 2]], [[2, 0, 3, 1]], [[3, 1]], [[1], [0], [3]]])
@on_ranks(4)
def test_members_come_in_mesh_order(ranks):
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("lat", "lon"))
    if mesh.get_coordinate() is not None:
        check_every_choice(ranks, mesh)


@pytest.mark.slow
@on_ranks(8)
def test_some_axes_of_a_mesh_over_the_whole_job():
    ranks = [[[6, 1], [0, 3]], [[2, 5], [4, 7]]]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("data", "lat", "lon"))
    groups = dist.distributed_c10d.get_pg_count()
    check_every_choice(ranks, mesh)
    # two lines of ranks along each pair of axes: the groups of all three and of one are there already
    assert dist.distributed_c10d.get_pg_count() == groups + 3 * 2
    check_every_choice(ranks, DeviceMesh("cpu", ranks, mesh_dim_names=("data", "lat", "lon")))
    with comm.count() as counted:
        comm.all_reduce(torch.ones(12), mesh, ["data", "lon"])
    assert (counted.sent_bytes, counted.messages) == (2 * 3 * 48 // 4, 6)


@pytest.mark.slow
@on_ranks(6)
def test_several_axes_of_a_mesh_on_some_ranks_of_a_job():
    """No group can be made there without the others: the axes follow each other."""
    ranks = [[5, 1], [0, 3]]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("lat", "lon"))
    if mesh.get_coordinate() is None:
        return
    check_every_choice(ranks, mesh)
    with comm.count() as counted:
        comm.all_reduce(torch.ones(12), mesh, ["lat", "lon"])
        comm.all_gather(torch.ones(12), mesh, ["lat", "lon"])
    assert [call.sent_bytes for call in counted.calls] == [48, 48, 48, 96]


# -- counting ---------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_every_call_is_counted():
    mesh = world_mesh(lat=3)
    x = torch.ones(5, 2)
    rank = dist.get_rank()
    with comm.count() as counted:
        comm.all_reduce(x, mesh, "lat")
        comm.all_reduce(x.bfloat16(), mesh, "lat")
        comm.all_gather(x.bfloat16(), mesh, "lat")
        comm.start_sum(x.double(), mesh, "lat").wait()
        comm.broadcast_first(x.clone(), mesh, "lat")
        comm.swap_messages(
            mesh, [((rank + 1) % 3, x[rank:])], [((rank - 1) % 3, torch.empty(5 - (rank - 1) % 3, 2))], "ring"
        ).wait()
    before = (rank - 1) % 3
    assert counted.calls == [
        comm.TrafficCall("all_reduce", 2 * 2 * 40 // 3, 2 * 2 * 40 // 3, 4),
        comm.TrafficCall("all_reduce", 2 * 2 * 40 // 3, 2 * 2 * 40 // 3, 4),  # as float32
        comm.TrafficCall("all_gather", 2 * 20, 2 * 20, 2),
        comm.TrafficCall("all_reduce", 2 * 2 * 80 // 3, 2 * 2 * 80 // 3, 4),
        comm.TrafficCall("broadcast", 40 if rank == 0 else 0, 0 if rank == 0 else 40, int(rank == 0)),
        comm.TrafficCall("ring", (5 - rank) * 8, (5 - before) * 8, 1),
    ]
    assert counted.sent_bytes == sum(c.sent_bytes for c in counted.calls)
    assert counted.received_bytes == sum(c.received_bytes for c in counted.calls)
    assert counted.messages == sum(c.messages for c in counted.calls)


@on_ranks(2)
def test_agreement_is_counted():
    mesh = world_mesh(lat=2)
    with comm.count() as counted:
        assert comm.all_gather_object(mesh, "ab" * (1 + dist.get_rank())) == ["ab", "abab"]
    assert [c.kind for c in counted.calls] == ["agree", "agree"]
    assert counted.calls[0].sent_bytes == 8
    assert 0 < counted.calls[1].sent_bytes < 100


@on_ranks(1)
def test_counts_nest_and_see_all_threads():
    def record():
        comm.record_call("here", 1, 2, 3)

    with comm.count() as outer:
        with comm.count() as inner:
            thread = threading.Thread(target=record)
            thread.start()
            thread.join()
        record()
        with comm.count() as twin:
            record()
        record()
    record()
    assert (len(inner.calls), len(twin.calls), len(outer.calls)) == (1, 1, 4)
    assert (outer.sent_bytes, outer.received_bytes, outer.messages) == (4, 8, 12)


# -- messages ---------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_swap_leaves_out_what_is_empty():
    mesh = world_mesh(lat=3)
    rank = dist.get_rank()
    got = torch.full((2,), -1.0)
    sends = [(1, torch.ones(2) * 7), (2, torch.ones(0))] if rank == 0 else []
    receives = [(0, got)] if rank == 1 else [(0, torch.ones(0))] if rank == 2 else []
    with comm.count() as counted:
        comm.swap_messages(mesh, sends, receives).wait()
    assert got.tolist() == ([7.0, 7.0] if rank == 1 else [-1.0, -1.0])
    assert (counted.messages, counted.sent_bytes) == ((1, 8) if rank == 0 else (0, 0))


@on_ranks(2)
def test_swap_carries_out_lazy_views():
    mesh = world_mesh(lat=2)
    rank = dist.get_rank()
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128) * (rank + 1)
    for view in (lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t[:1].conj().imag, lambda t: t.real):
        got = torch.empty_like(view(z).clone())
        comm.swap_messages(mesh, [(1 - rank, view(z))], [(1 - rank, got)]).wait()
        torch.testing.assert_close(got, view(z / (rank + 1) * (2 - rank)).clone(), rtol=0, atol=0)


@on_ranks(1)
def test_a_buffer_that_could_not_be_filled_in_place_is_refused():
    with pytest.raises(ShardingError, match=r"a buffer of shape \(4, 2\) and strides \(4, 1\) must be contiguous"):
        comm.swap_messages(world_mesh(lat=1), [], [(0, torch.ones(4, 4)[:, :2])])


# -- adjoint pairs ----------------------------------------------------------------------------------------------------


def draw(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@on_ranks(3)
def test_total_and_enter_are_adjoint():
    """In the product of values held alike, a value counts once; in that of parts, every part."""
    mesh = world_mesh(lat=3)
    parts, alike = draw(5, 1 + dist.get_rank()).requires_grad_(), draw(5, 0).requires_grad_()
    total = comm.sum_parts(parts, mesh, "lat")
    (back,) = torch.autograd.grad(total, parts, alike.detach())
    products = torch.stack([(parts * back).sum()]).detach()
    torch.testing.assert_close((total * alike).sum().detach(), comm.all_reduce(products, mesh, "lat")[0])
    entered = comm.use_in_parts(alike, mesh, "lat")
    (back,) = torch.autograd.grad(entered, alike, parts.detach())
    products = torch.stack([(entered * parts).sum()]).detach()
    torch.testing.assert_close(comm.all_reduce(products, mesh, "lat")[0], (alike * back).sum().detach())


@on_ranks(2)
def test_what_total_and_enter_send():
    mesh = world_mesh(lat=2)
    x = torch.ones(4, requires_grad=True)
    with comm.count() as counted:
        y = comm.sum_parts(x, mesh, "lat")
    assert [c.kind for c in counted.calls] == ["all_reduce"]
    with comm.count() as counted:
        y.sum().backward()
        comm.use_in_parts(x.detach(), mesh, "lat")
        y = comm.use_in_parts(x, mesh, "lat")
        with torch.no_grad():
            comm.use_in_parts(x, mesh, "lat")
    assert counted.calls == []
    with comm.count() as counted:
        y.sum().backward()
    assert [c.kind for c in counted.calls] == ["all_reduce"]


def model(x, w, total, enter):
    """A value that goes out to all ranks and comes back in parts, twice: sum (w² Σ(wx)³ x)⁴ summed over ranks."""
    cubes = total((enter(w) * x).pow(3).sum())
    return total((enter(w**2) * enter(cubes) * x).pow(4).sum())


@on_ranks(2)
def test_first_and_second_derivatives_through_total_and_enter():
    mesh = world_mesh(lat=2)
    rank = dist.get_rank()
    both, w = draw((2, 3), 5).requires_grad_(), draw(3, 6).requires_grad_()
    loss = model(both, w, lambda t: t, lambda t: t)
    firsts = torch.autograd.grad(loss, (both, w), create_graph=True)
    seconds = torch.autograd.grad(firsts[0].sin().sum() + firsts[1].sin().sum(), (both, w))

    mine, my_w = both.detach()[rank].clone().requires_grad_(), w.detach().clone().requires_grad_()
    total, enter = (lambda t, f=f: f(t, mesh, "lat") for f in (comm.sum_parts, comm.use_in_parts))
    my_loss = model(mine, my_w, total, enter)
    torch.testing.assert_close(my_loss, loss)
    my_firsts = torch.autograd.grad(my_loss, (mine, my_w), create_graph=True)
    torch.testing.assert_close(my_firsts, (firsts[0][rank], firsts[1]))
    again = total(my_firsts[0].sin().sum()) + my_firsts[1].sin().sum()
    my_seconds = torch.autograd.grad(again, (mine, my_w))
    torch.testing.assert_close(my_seconds, (seconds[0][rank], seconds[1]))


@on_ranks(2)
def test_zeros_without_memory_travel():
    x = shard(torch.arange(4.0), world_mesh(lat=2), ("lat",))
    x.local.requires_grad_()
    torch.sgn(x).sum().backward()  # its gradient is a tensor of zeros that has no memory
    assert torch.equal(Tile(x.local.grad, x.layout, x.mesh).full_tensor(), torch.zeros(4))
