"""Repeats, splits, diagonals and pairs of tiles that are cut: forward and gradients on every mesh."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from tile_oracle import assert_answers_as_the_whole

import jigsaw
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

PLAIN = torch.arange(20, dtype=torch.float64).reshape(2, 10).sin()


def _repeats(x):
    times = torch.tensor([2, 0, 1, 3, 1, 0, 2])
    found = [x.repeat_interleave(2, 2), torch.repeat_interleave(x, 3, -1), x.repeat_interleave(times, 2)]
    found += [x.flatten(2).repeat_interleave(2, 2), x.repeat_interleave(0, 2), x.repeat(2, 1, 2, 1), x.tile(2)]
    return [*found, x[0, 0].repeat_interleave(2), x.unsqueeze(1).expand(-1, 2, -1, -1, -1), x.repeat(1, 1, 0, 1)]


def _splits(x):
    found = [*x.tensor_split(3, 2), *torch.tensor_split(x, (1, 4), 3), *x.hsplit(3), *x[:, :, :6].dsplit(2)]
    found += [*x.vsplit(2), *x.dsplit([2, 5]), *x.split_with_sizes([3, 4], 2), *x.flatten(2).split(30, 2)]
    return [*found, x.flatten(2)[:, :, 4:-3], x.flatten(2)[:, 0, 11], *x.flatten(2).chunk(2, 2)]


def _at_least(x):
    row = x[0, 0, 0]
    found = [torch.atleast_1d(row), *torch.atleast_2d(row, x[0, 0]), torch.atleast_3d(x[0, 0]), torch.atleast_3d(row)]
    found += [torch.hstack([row, row]), torch.vstack([row, x[0, 0]]), torch.dstack([x[0, 0], x[0, 1]])]
    return [*found, torch.column_stack([row, row]), x.ravel(), torch.hstack([x, x]), x.narrow_copy(2, 1, 4)]


def _diagonals(x):
    plane, row = x[0, 0], x[0, 0, :, 0]
    found = [x.tril(), x.triu(1), plane.tril(-2), x.flatten(2).triu(-1), x.transpose(1, 3).tril()]
    found += [x.diagonal(0, 2, 3), x.diagonal(2, 3, 1), x.diagonal(-3, 2, 3), plane.diagonal(-9), plane.trace()]
    found += [
        x.flatten(2).diagonal(1, 1, 2),
        torch.linalg.diagonal(x, offset=4),
        plane.diag(2),
        row.diag(),
        row.diag(2),
    ]
    return [*found, x[:, 0].diag_embed(), x[:, 0].diag_embed(-2, 0, 2), row.diagflat(1), x[:, :, 1:3].diagonal(0, 2, 3)]


def _pairs(x):
    plane, row, column = x[0, 0], x[0, 0, 0], x[0, 0, :, 0]
    found = [torch.kron(plane, x[0, 1]), torch.kron(plane, PLAIN), torch.kron(PLAIN, plane), torch.kron(row, row)]
    found += [*torch.meshgrid(column, row, indexing="ij"), *torch.meshgrid(row, PLAIN[0], row, indexing="ij")]
    found += [*torch.meshgrid(column, row, indexing="xy"), torch.cartesian_prod(column, row)]
    found += [torch.block_diag(plane, PLAIN, x[0, 1]), torch.cdist(x[0], x[1] * 2), torch.cdist(x[:, 0], PLAIN)]
    found += [torch.cdist(x[0, :, :1], x[:, :, None, 3] * 2), torch.cdist(PLAIN[None, :1], x[:, :, :1])]
    return [*found, torch.cdist(x.transpose(2, 3), x.transpose(2, 3)[:1] + 1, 1.0), torch.cdist(PLAIN, plane)]


def _vectors(x):
    y = x.square() + x.flip(1)
    found = [F.cosine_similarity(x, y, d) for d in (1, 2, 3)] + [F.pairwise_distance(x, y), torch.dist(x, y, 3)]
    found += [F.pairwise_distance(x, PLAIN[0], 1, keepdim=True), torch.linalg.vecdot(x, y, dim=2)]
    found += [torch.cross(x, y, dim=1), x.amax(2)]
    found += [torch.linalg.cross(x[:, :, 2:5], y[:, :, 2:5], dim=2), torch.cross(x[..., :3], y[..., :3], dim=3)]
    return [*found, x.renorm(2, 2, 1.5), x.renorm(1, 1, 0.5), F.softmin(x, 2), torch.special.logsumexp(x, 2)]


CASES = {
    "repeats": _repeats,
    "splits": _splits,
    "at least": _at_least,
    "diagonals": _diagonals,
    "pairs": _pairs,
    "vectors": _vectors,
}


def _run(name, x):
    return CASES[name](x)


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact_on_every_mesh(name):
    assert_answers_as_the_whole(functools.partial(_run, name))


@on_ranks(2)
def test_repeated_rows_are_a_copy_and_as_many_as_torch_makes():
    mesh = world_mesh(lat=2)
    tile = shard(torch.ones(1, 3), mesh, ("lat", None))
    wide = tile.repeat_interleave(2, 0)
    tile.add_(1)
    assert torch.equal(wide.full_tensor(), torch.ones(2, 3))
    assert shard(torch.ones(0, 1, 5), mesh, (None, "lat", None)).repeat_interleave(2, 1).shape == (0, 2, 5)


@on_ranks(2)
def test_columns_picked_are_contiguous_as_those_of_torch():
    tile = shard(torch.arange(30.0).reshape(5, 3, 2), world_mesh(lat=2), ("lat", None, None))
    picked = tile.index_select(1, torch.tensor([1, 1, 0]))
    picked.view(-1).mul_(2)
    assert torch.equal(picked.full_tensor(), 2 * torch.arange(30.0).reshape(5, 3, 2)[:, [1, 1, 0]])


def test_numbers_are_turned_swapped_and_compared():
    number = shard(torch.tensor(2.0), jigsaw.init_mesh(lat=1), ())
    for answer in (number.flip(0), number.swapaxes(0, 0), number.movedim(0, -1), number.logsumexp(0)):
        assert (answer.shape, answer.item()) == ((), 2.0)
    assert F.cosine_similarity(number, torch.tensor(3.0), 0).item() == 1.0


@on_ranks(2)
def test_windows_of_bools_are_put_back():
    whole = torch.arange(16.0).reshape(1, 1, 4, 4) % 3 > 0
    tile = shard(whole, world_mesh(lat=2), (None, None, "lat", None))
    for x in (tile, whole):
        y = F.fold(F.unfold(x, 2, padding=1), (4, 4), 2, padding=1)
        assert y.dtype == torch.bool
        assert torch.equal(y.full_tensor() if x is tile else y, whole)


@on_ranks(2)
def test_a_loss_of_one_row_that_one_of_both_cuts():
    x, y = torch.rand(2, 1, 5, dtype=torch.float64)
    mesh = world_mesh(lat=2)
    loss = F.binary_cross_entropy(shard(x, mesh, (None, None)), shard(y, mesh, ("lat", None)))
    assert torch.allclose(loss, F.binary_cross_entropy(x, y))


def test_a_loss_has_the_dtype_of_its_target():
    x, target = torch.randn(6, dtype=torch.float64), torch.rand(6).to(torch.bfloat16)
    loss = F.binary_cross_entropy_with_logits(shard(x, jigsaw.init_mesh(lat=1), ("lat",)), target)
    assert loss.dtype == F.binary_cross_entropy_with_logits(x, target).dtype == torch.bfloat16


@on_ranks(2)
def test_cosine_similarity_has_the_dtype_of_torch():
    x = torch.randn(5, 2)
    tile = jigsaw.shard(x, world_mesh(lat=2), ("lat", None))
    numbers = [torch.tensor(2.0, dtype=torch.float64), torch.tensor(2), torch.tensor([2.0, 3.0], dtype=torch.float16)]
    for other in (*numbers, x.double(), x.long()):
        for expected, found in (
            (F.cosine_similarity(x, other, -1), F.cosine_similarity(tile, other, -1)),
            (F.cosine_similarity(other, x, -1), F.cosine_similarity(other, tile, -1)),
        ):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.full_tensor(), expected)
