"""`Tile` itself: what it shows, what it refuses, and how it meets autocast, checkpointing, plain tensors and other
meshes.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import from_local, shard

SPACE = (None, None, "lat", "lon")


def _tile(mesh, shape=(2, 3, 7, 10), spec=SPACE, **options):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    return x, shard(x, mesh, spec, **options)


@on_ranks(4)
def test_an_align_for_all_dims_leaves_no_rank_without_a_sample():
    mesh, x = world_mesh(data=2, lat=2), torch.randn(2, 3, 13)
    for tile in (
        shard(x, mesh, ("data", None, "lat"), align=4),
        shard(x, mesh, (None, None, None)).redistribute(("data", None, "lat"), align=4),
        from_local(x[:1, :, : 8 - 3 * mesh["lat"].get_local_rank()], mesh, ("data", None, "lat"), x.shape, align=4),
    ):
        assert tile.layout.owned(tile.coordinate)[0] == (tile.coordinate[0], tile.coordinate[0] + 1)
        assert tile.local.shape == (1, 3, (8, 5)[tile.coordinate[1]])
    report = jigsaw.dry_run(nn.Conv1d(3, 3, 3), (4, 3, 16), mesh={"data": 4}, align=4, ranks=[0, 3])
    kept = [rank.phases["forward"].flop for rank in report.ranks]
    assert kept[0] == kept[1] > 0


@on_ranks(4)
def test_the_global_view():
    mesh = world_mesh(lat=2, lon=2)
    x, tile = _tile(mesh, halo={2: 1})
    assert (
        tile.shape == x.shape
        and tile.size(2) == 7
        and tile.ndim == tile.dim() == 4
        and tile.numel() == x.numel()
        and len(tile) == 2
    )
    assert tile.dtype == x.dtype and tile.device == x.device and not tile.requires_grad
    assert torch.equal(tile.full_tensor(), x)
    assert torch.equal(tile.owned().full_tensor(), x)
    row, column = tile.coordinate
    assert tile.local.shape == (2, 3, (5, 4)[row], 5)
    text = repr(tile)
    for part in (
        "(2, 3, 7, 10)",
        "float64",
        "dim 2 (7) by lat",
        f"lat={row}/2",
        f"lon={column}/2",
        ("0:4", "4:7")[row],
        "held (2, 3,",
    ):
        assert part in text
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.local = x


@on_ranks(4)
def test_redistribute_to_any_cut_and_back():
    mesh = world_mesh(lat=2, lon=2)
    x, tile = _tile(mesh)
    for spec in [
        (None, None, "lon", "lat"),
        (None, None, None, ("lat", "lon")),
        ("lat", None, None, None),
        (None,) * 4,
        (None, "lon", None, None),
    ]:
        other = tile.redistribute(spec)
        assert torch.equal(other.full_tensor(), x)
        assert torch.equal(other.redistribute(SPACE).local, tile.local)
    uneven = tile.redistribute(SPACE, split={2: (0, 1, 7), 3: (0, 10, 10)})
    assert torch.equal(uneven.full_tensor(), x)
    assert [c.points for c in uneven.layout.cuts][2:] == [(0, 1, 7), (0, 10, 10)]


@on_ranks(3)
def test_strict_means_no_silent_answer():
    mesh = world_mesh(lat=3)
    _, tile = _tile(mesh, spec=(None, None, "lat", None))
    with comm.count() as c:
        for call, words in [
            (lambda: torch.linalg.svd(tile), "linalg_svd on a Tile.*does not answer.*full_tensor"),
            (lambda: bool(tile), "ambiguous"),
            (tile.item, "only a tile of one element"),
            (lambda: torch.add(tile, tile, out=tile), "out=.*frozen"),
            (lambda: torch.poisson(tile), "poisson on a Tile"),
            (lambda: tile + torch.ones(4, 10), r"shape \(4, 10\) does not broadcast.*whole"),
            (tile.numpy, "numpy on a Tile"),
        ]:
            with pytest.raises(ShardingError, match=words):
                call()
    assert c.sent_bytes == 0


@on_ranks(4)
def test_tiles_of_different_sizes_or_meshes_do_not_meet():
    mesh = world_mesh(lat=2, lon=2)
    x, tile = _tile(mesh)
    with comm.count() as c:
        with pytest.raises(ShardingError, match="cannot meet"):
            tile + shard(x[:, :, :5], mesh, (None, None, "lon", "lat"))
        with pytest.raises(ShardingError, match=r"sizes \[5, 7\] along dim -2 cannot meet"):
            tile + shard(x[:, :, :5], mesh, SPACE)
    assert [call.kind for call in c.calls if call.kind != "agree"] == []
    other = world_mesh(lat=4, lon=1)
    with pytest.raises(ShardingError, match="different meshes"):
        tile + shard(x, other, SPACE)


@on_ranks(2)
def test_ranks_that_disagree_all_raise():
    mesh = world_mesh(lat=2)
    mine = mesh.get_local_rank()
    with pytest.raises(ShardingError, match="shard: the ranks must agree on shape"):
        shard(torch.zeros(4 + mine, 3), mesh, ("lat", None))
    with pytest.raises(ShardingError, match=r"rank at \(1,\) passed a local tensor of shape \(5, 3\).*\(3, 3\)"):
        from_local(torch.zeros(4 + mine, 3), mesh, ("lat", None), (7, 3))
    with pytest.raises(ShardingError, match="must agree"):
        from_local(torch.zeros(4 - mine, 3), mesh, ("lat", None), (7 + mine, 3))
    with pytest.raises(ShardingError, match="has 1 entries for 2 dims"):
        shard(torch.zeros(4, 3), mesh, ("lat",))
    with pytest.raises(ShardingError, match="'lat' more than once"):
        shard(torch.zeros(4, 3), mesh, ("lat", "lat"))
    with pytest.raises(ShardingError, match=r"init_mesh.lat=3.*2 ranks"):
        jigsaw.init_mesh(lat=3)
    tile = from_local(torch.full((4 - mine, 3), float(mine)), mesh, ("lat", None), (7, 3))
    assert tile.full_tensor()[:, 0].tolist() == [0.0] * 4 + [1.0] * 3


@on_ranks(4)
def test_a_mesh_of_some_unordered_ranks():
    places = torch.tensor([[3, 1]])
    mesh = DeviceMesh("cpu", places, mesh_dim_names=("data", "lat"))
    if torch.distributed.get_rank() in (1, 3):
        x, tile = _tile(mesh, spec=(None, None, "lat", None))
        assert tile.coordinate == ((0, 1) if torch.distributed.get_rank() == 1 else (0, 0))
        assert torch.equal(tile.local, x[:, :, :4] if torch.distributed.get_rank() == 3 else x[:, :, 4:])
        assert torch.equal(tile.roll(3, 2).full_tensor(), x.roll(3, 2))
        again = tile.roll(0, 2)
        again += 1
        assert torch.equal(tile.full_tensor(), x)
        torch.testing.assert_close(tile.mean(), x.mean())
    else:
        with pytest.raises(ShardingError, match="not part of the mesh"):
            from jigsaw.ranks.mesh import mesh_coordinate

            mesh_coordinate(mesh)


@on_ranks(2)
def test_the_loss_is_an_ordinary_scalar_equal_on_every_rank():
    mesh = world_mesh(lat=2)
    x, tile = _tile(mesh, spec=(None, None, "lat", None))
    tile.local.requires_grad_()
    loss = (tile * 2).square().mean()
    assert type(loss) is torch.Tensor and loss.ndim == 0
    assert len({float(v) for v in comm.all_gather_object(mesh, loss.item())}) == 1
    loss.backward()
    torch.testing.assert_close(tile.grad.full_tensor(), 8 * x / x.numel())


@on_ranks(2)
def test_a_whole_leaf_gets_its_whole_gradient():
    mesh = world_mesh(lat=2)
    x = torch.arange(14.0, dtype=torch.float64).reshape(7, 2).requires_grad_()
    (shard(x, mesh, ("lat", None)).square()).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@on_ranks(2)
def test_parameters_get_parts_that_sum_to_the_gradient():
    mesh = world_mesh(lat=2)
    x, tile = _tile(mesh, spec=(None, None, "lat", None))
    scale, head = (torch.randn(3, 1, 1, dtype=torch.float64).requires_grad_() for _ in range(2))

    def model(y):
        y = y * scale
        return ((y.mean((2, 3), keepdim=True) * head).square() + y).mean()

    model(tile).backward()
    parts = [scale.grad, head.grad]
    scale.grad = head.grad = None
    model(x).backward()
    for part, whole in zip(parts, (scale.grad, head.grad), strict=True):
        torch.testing.assert_close(comm.all_reduce(part, mesh, ("lat",)), whole)


@on_ranks(2)
def test_a_gradient_that_would_be_counted_twice_is_refused():
    mesh = world_mesh(lat=2)
    _, tile = _tile(mesh, spec=(None, None, "lat", None))
    tile.local.requires_grad_()
    gain = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ShardingError, match="computed from a parameter and from a tensor that left a Tile"):
        tile * (tile.std() * gain)


@on_ranks(2)
def test_autocast():
    mesh = world_mesh(lat=2)
    x = torch.randn(2, 4, 6)
    tile = shard(x, mesh, (None, "lat", None))
    layer = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = layer(tile), layer(x)
    assert out.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(out.full_tensor(), plain, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@on_ranks(2)
def test_checkpointing_recomputes_the_same():
    mesh = world_mesh(lat=2)
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm((4, 8))).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    grads = []
    for run in (layer, lambda t: checkpoint(layer, t, use_reentrant=False)):
        layer.zero_grad()
        tile = shard(x, mesh, (None, "lat", None))
        tile.local.requires_grad_()
        run(tile).square().mean().backward()
        grads.append([tile.local.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@on_ranks(2)
def test_in_place_pointwise_changes_the_local_tensor_only():
    mesh = world_mesh(lat=2)
    x, tile = _tile(mesh, spec=(None, None, "lat", None))
    out = nn.ReLU(inplace=True)(tile)
    assert out.local.data_ptr() == tile.local.data_ptr()
    assert torch.equal(tile.add_(1).full_tensor(), x.relu() + 1)
    with pytest.raises(ShardingError, match="in place"):
        tile.mean(2, keepdim=True).add_(tile)


def test_one_rank_without_torchrun_runs_everything():
    mesh = jigsaw.init_mesh(lat=1, lon=1)
    x, tile = _tile(mesh)
    assert isinstance(torch.sort(tile, dim=2).values, Tile)
    torch.testing.assert_close(torch.fft.rfft(tile, dim=2).full_tensor(), torch.fft.rfft(x, dim=2))
    assert torch.equal(nn.Flatten()(tile).full_tensor(), x.flatten(1))


@on_ranks(2)
def test_augmented_assignment_changes_what_other_names_see():
    mesh = world_mesh(lat=2)
    for options in ({}, {"halo": {2: 1}}):
        x, tile = _tile(mesh, spec=(None, None, "lat", None), **options)
        leaf = tile.local.requires_grad_()
        seen = []
        for y in (x.clone().requires_grad_(), tile):
            z = alias = y * 2
            z += y
            z *= torch.arange(70.0, dtype=torch.float64).reshape(7, 10)
            z -= z.mean((2, 3), keepdim=True)
            z **= 2
            assert z is alias
            (alias.sum() + (z / 3).sum()).backward()
            seen.append([alias, y.grad])
        torch.testing.assert_close(seen[1][0].full_tensor(), seen[0][0])
        if not options:
            torch.testing.assert_close(seen[1][1].full_tensor(), seen[0][1])
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            tile += 1
        y = tile * 2
        saved = y * y
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()
        assert leaf is tile.local


@on_ranks(2)
def test_augmented_assignment_that_cannot_be_in_place_is_refused():
    mesh = world_mesh(lat=2)
    x, tile = _tile(mesh, spec=(None, None, "lat", None))
    _, wide = _tile(mesh, spec=(None, None, "lat", None), halo={2: 1})
    row = tile[:, :, :1] * 1
    with comm.count() as counted:
        with pytest.raises(ShardingError, match=r"of shapes .* cannot change its target in place: .* as x \+ y"):
            row += tile
        with pytest.raises(ShardingError, match="a halo counts"):
            wide += tile
        with pytest.raises(RuntimeError, match="can't be cast"):
            counts = tile.long()
            counts += 0.5
    assert counted.calls == []
    assert torch.equal(wide.full_tensor(), x)


@on_ranks(2)
def test_numpys_names_and_out():
    mesh = world_mesh(lat=2)
    x, tile = _tile(mesh, spec=(None, None, "lat", None))
    for call in (
        lambda y: y.amax(axis=2, keepdims=True),
        lambda y: torch.var(y, axis=(2, 3)),
        lambda y: torch.cat([y, y], axis=1),
        lambda y: torch.stack([y, y], axis=-1),
        lambda y: torch.max(y, axis=1).values,
        lambda y: torch.sum(y, axis=-2, out=None),
    ):
        torch.testing.assert_close(call(tile).full_tensor(), call(x))
    whole = _tile(mesh, spec=(None,) * 4)[1]
    lengths = torch.tensor([1, 2, 4]).expand(2, 3, 3)
    sums = torch.segment_reduce(whole, "sum", lengths=lengths, axis=2)  # whose axis is its own
    torch.testing.assert_close(sums.full_tensor(), torch.segment_reduce(x, "sum", lengths=lengths, axis=2))
    with comm.count() as counted:
        for function in (torch.sum, torch.softmax, torch.all, torch.logsumexp):
            with pytest.raises(ShardingError, match=r"\w+\(out=\.\.\.\) is not supported on tiles: a Tile is frozen"):
                function(tile, dim=2, out=x)
    assert counted.calls == []


@on_ranks(2)
def test_every_operator_from_both_sides():
    mesh = world_mesh(lat=2)
    n = torch.arange(14).reshape(7, 2)
    tile = shard(n, mesh, ("lat", None))
    for call in (
        lambda y: +y,
        lambda y: (1 << y % 5) + (y << 1),
        lambda y: (64 >> y % 5) + (y >> 1),
        lambda y: (3 & y) + (4 | y) + (5 ^ y),
        lambda y: y.where(y > 3, 0 * y),
    ):
        assert torch.equal(call(tile).full_tensor(), call(n))
