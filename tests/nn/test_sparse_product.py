"""Products of sparse matrices with tiles against plain torch on the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import jigsaw
from jigsaw.testing import on_ranks, world_mesh

MESHES = {
    1: [({"lat": 1}, "lat")],
    2: [({"lat": 2}, "lat")],
    3: [({"lat": 3}, "lat")],
    4: [({"lat": 4}, "lat"), ({"lat": 2, "lon": 2}, ("lat", "lon"))],
}


def sparse(*shape: int, share: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * (torch.rand(shape, generator=generator) < share)).to_sparse()


def compare(function, x: Tensor, mesh, spec) -> jigsaw.Tile:
    whole = x.clone().requires_grad_()
    want = function(whole)
    weights = torch.linspace(-1, 2, want.numel(), dtype=torch.float64).view(want.shape)
    (want * weights).sum().backward()
    tile = jigsaw.shard(x, mesh, spec)
    tile.local.requires_grad_()
    got = function(tile)
    assert isinstance(got, jigsaw.Tile)
    (got * weights).sum().backward()
    torch.testing.assert_close(got.full_tensor(), want)
    gradient = jigsaw.from_local(tile.local.grad, mesh, spec, x.shape).full_tensor()
    torch.testing.assert_close(gradient, whole.grad)
    return got


def check_products(axes, rows):
    mesh = world_mesh(**axes)
    matrix, batch = sparse(7, 13), sparse(3, 7, 13)
    x, vector = torch.randn(13, 5, dtype=torch.float64), torch.randn(13, dtype=torch.float64)
    y = compare(lambda t: torch.sparse.mm(matrix, t), x, mesh, (rows, None))
    assert y.layout.is_cut(0) == (mesh.size() > 1)
    compare(lambda t: matrix @ t, x, mesh, (rows, None))
    compare(lambda t: matrix @ t, x, mesh, (None, rows))
    compare(lambda t: matrix.to_sparse_csr() @ t, x, mesh, (rows, None))
    compare(matrix.mv, vector, mesh, (rows,))
    compare(lambda t: t.T @ matrix.t(), x, mesh, (rows, None))
    stack = torch.randn(3, 13, 5, dtype=torch.float64)
    compare(lambda t: torch.bmm(batch, t), stack, mesh, (None, rows, None))
    compare(lambda t: torch.bmm(batch, t), stack, mesh, (rows, None, None))
    compare(lambda t: torch.bmm(batch.transpose(1, 2), t[:, 3:10]), stack, mesh, (None, rows, None))


@on_ranks(1)
def test_products_on_one_rank():
    for mesh in MESHES[1]:
        check_products(*mesh)


@on_ranks(2)
def test_products_on_two_ranks():
    for mesh in MESHES[2]:
        check_products(*mesh)


@on_ranks(3)
def test_products_on_three_ranks():
    for mesh in MESHES[3]:
        check_products(*mesh)


@on_ranks(4)
def test_products_on_four_ranks():
    for mesh in MESHES[4]:
        check_products(*mesh)


@on_ranks(4)
def test_a_dim_that_was_flattened_from_two_cut_ones_is_summed():
    mesh = world_mesh(lat=2, lon=2)
    matrix = sparse(9, 5 * 7)
    y = compare(
        lambda t: matrix @ t.flatten(0, 1), torch.randn(5, 7, 3, dtype=torch.float64), mesh, ("lat", "lon", None)
    )
    assert y.layout.dim_axes(0) == ("lat", "lon")


@on_ranks(3)
def test_only_rows_beyond_a_border_are_sent_and_halos_are_left_out():
    mesh = world_mesh(lat=3)
    ones = torch.ones(12, dtype=torch.float64)
    matrix = (torch.diag(ones) + torch.diag(ones[:-1], 1) + torch.diag(ones[:-1], -1)).to_sparse()
    x = torch.randn(12, 5, dtype=torch.float64)
    tile = jigsaw.shard(x, mesh, ("lat", None))
    halo = tile.with_layout(tile.layout.replace_dim(0, tile.layout.dim(0)[0].with_halo(1, 1)))
    for given in (tile, halo):
        with jigsaw.comm.count() as traffic:
            y = matrix @ given
        neighbors = 1 if tile.coordinate[0] in (0, 2) else 2
        assert traffic.sent_bytes == neighbors * 5 * 8
        torch.testing.assert_close(y.full_tensor(), matrix @ x)


@on_ranks(3)
def test_a_graph_sends_the_rows_that_are_needed_once():
    mesh, (target, source) = (
        world_mesh(lat=3),
        torch.randint(0, 60, (2, 90), generator=torch.Generator().manual_seed(0)),
    )
    ones = torch.ones(90, dtype=torch.float64)
    graph = torch.sparse_coo_tensor(torch.stack([target, source]), ones, (60, 60), check_invariants=True)
    tile = jigsaw.shard(torch.randn(60, 5, dtype=torch.float64), mesh, ("lat", None))
    tile.local.requires_grad_()
    own = range(20 * tile.coordinate[0], 20 * tile.coordinate[0] + 20)
    needed = {s for t, s in zip(target.tolist(), source.tolist(), strict=True) if t in own} - set(own)
    for matrix in (graph, graph.coalesce(), graph.to_sparse_csr()):
        with jigsaw.comm.count() as traffic:
            y = torch.sparse.mm(matrix, tile)
        assert sum(c.received_bytes for c in traffic.calls) == len(needed) * 5 * 8
        with jigsaw.comm.count() as traffic:
            y.sum().backward()
        assert sum(c.sent_bytes for c in traffic.calls if c.kind == "neighbors") == len(needed) * 5 * 8
        torch.testing.assert_close(y.full_tensor(), torch.sparse.mm(matrix, tile.full_tensor()))


@on_ranks(4)
def test_ranks_without_rows_take_part():
    mesh, eye = world_mesh(lat=4), torch.eye(13, dtype=torch.float64)
    for matrix in (eye[:2], eye[5:8].flip(0), eye[:, :2], eye[:, :3] + eye.flip(0)[:, :3]):  # each row needs one or two
        x = torch.randn(matrix.shape[1], 5, dtype=torch.float64)
        compare(matrix.to_sparse().matmul, x, mesh, ("lat", None))


@on_ranks(3)
def test_few_rows_that_sum_over_all_are_sent_as_parts():
    mesh, matrix = world_mesh(lat=3), torch.ones(2, 60, dtype=torch.float64).to_sparse()
    x = torch.randn(60, 5, dtype=torch.float64)
    tile = jigsaw.shard(x, mesh, ("lat", None))
    with jigsaw.comm.count() as traffic:
        y = matrix @ tile
    assert traffic.sent_bytes <= 2 * 5 * 8
    torch.testing.assert_close(y.full_tensor(), matrix @ x)


@on_ranks(2)
def test_a_matrix_that_is_changed_in_place_is_read_anew():
    mesh = world_mesh(lat=2)
    matrix, x = torch.eye(8).to_sparse(), torch.randn(8, 3)
    tile = jigsaw.shard(x, mesh, ("lat", None))
    torch.testing.assert_close((matrix @ tile).full_tensor(), x)
    matrix.mul_(2)
    torch.testing.assert_close((matrix @ tile).full_tensor(), 2 * x)
    matrix.copy_(torch.eye(8).flip(0).to_sparse())
    torch.testing.assert_close((matrix @ tile).full_tensor(), x.flip(0))


def contract_disco(x, psi: Tensor, columns: int):
    """A DISCO convolution of torch-harmonics without its compiled kernels, as that package has it."""
    batch, channels, lat_in, lon_in = x.shape
    kernels, lat_out, _ = psi.shape
    x = x.reshape(1, batch * channels, lat_in, lon_in).permute(0, 2, 3, 1).expand(kernels, -1, -1, -1).contiguous()
    y = torch.zeros(columns, kernels, lat_out, batch * channels, dtype=x.dtype)
    for column in range(columns):
        y[column] = torch.bmm(psi, x.reshape(kernels, lat_in * lon_in, -1))
        x = torch.roll(x, -(lon_in // columns), dims=2)
    return y.permute(3, 1, 2, 0).reshape(batch, channels, kernels, lat_out, columns).contiguous()


@on_ranks(4)
def test_the_disco_convolution_of_plain_torch_stays_cut():
    x, psi = torch.randn(2, 3, 7, 8, dtype=torch.float64), sparse(3, 5, 56, share=0.1)
    for axes in ({"lat": 4}, {"lat": 2, "lon": 2}):
        y = compare(lambda t: contract_disco(t, psi, 4), x, world_mesh(**axes), (None, None, "lat", "lon"))
        assert set(y.layout.dim_axes(3)) == set(axes)


@on_ranks(2)
def test_what_is_not_answered_says_why():
    mesh = world_mesh(lat=2)
    tile = jigsaw.shard(torch.randn(8, 3), mesh, ("lat", None))
    with pytest.raises(jigsaw.ShardingError, match="requires a gradient"):
        torch.eye(8).to_sparse().requires_grad_() @ tile
    with pytest.raises(jigsaw.ShardingError, match=r"use to_dense\(\)"):
        torch.eye(8).to_sparse() @ jigsaw.shard(torch.randn(2, 8, 3), mesh, (None, "lat", None))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.eye(7).to_sparse() @ tile
