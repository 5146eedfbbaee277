"""Views, slices and joins of tiles: what torch answers they answer, what torch refuses they refuse."""

from __future__ import annotations

import functools

import pytest
import torch
from tile_oracle import SPACE, assert_answers_as_the_whole

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

NONE = torch.empty(0, dtype=torch.float64)  # which torch.cat skips


def _class_token(x):
    tokens = x.flatten(2).transpose(1, 2)
    token = torch.cat([tokens[:, :1] * 2, tokens], 1)[:, :1]  # one row, on one rank
    heads = token.reshape(2, 1, 3, 1).permute(0, 2, 1, 3) * 3
    row = x[:, :, 2:3]
    found = [heads.transpose(1, 2).reshape(2, 1, 3) + token, row.reshape(2, 3, 1, 2, 5).reshape(2, 3, 1, 10) + row]
    wide = torch.cat([token, token * 2], -1).reshape(2, 3, 1, 2)
    beside = wide.sum(-1, keepdim=True) * tokens.transpose(1, 2).unsqueeze(-1)  # heads before the one row
    anchors = [(y[:, :1]).view(2, -1, 1, *y.shape[2:]).permute(0, 3, 4, 1, 2).reshape(2, -1, 1) for y in (x, row)]
    return [*found, beside.transpose(1, 2).reshape(2, 70, 3) + token, torch.cat(anchors, 1)]


CASES = {
    "heads of a class token": _class_token,
    "cat with nothing": lambda x: [torch.cat([NONE, x, NONE, x * 2], 1), torch.cat([x, NONE], 0)],
    "cat with nothing of a wider dtype": lambda x: torch.cat([x.float(), NONE], 1).to(torch.float64) * 2,
    "cat of one dim": lambda x: torch.cat([x.mean((1, 2, 3)), NONE, torch.ones(1, dtype=x.dtype)]),
    "diff": lambda x: [torch.diff(x, dim=1), x.diff(2, 0, x, x), x.diff(dim=1, n=0, prepend=x)],
    "diff with tiles": lambda x: torch.diff(x, dim=1, prepend=x[:, :1] * 2, append=x),
    "diff with whole tensors": lambda x: torch.diff(x, dim=1, append=torch.ones(2, 2, 7, 10, dtype=x.dtype)),
    "diff of a whole tensor": lambda x: torch.diff(torch.ones(2, 1, 7, 10, dtype=x.dtype), dim=1, prepend=x),
    "repeat and tile": lambda x: [x.repeat(2, 1, 1, 1, 1), x.tile(2, 1, 1), torch.tile(x, (1, 2, 1, 1))],
    "sizes that are tensors": lambda x: (
        x.reshape(torch.tensor(6), 7, torch.tensor(10)) + x.view(torch.tensor(6), 7, -1)
    ),
    "t": lambda x: [x[0, 0].t(), x[0, 0, 0].t(), torch.t(x[:, 0, :, 0])],
    "narrower": lambda x: [x.transpose(1, 3).contiguous().detach().view(torch.int16), x.sum()],
    "wider": lambda x: [
        torch.imag(x.permute(1, 2, 3, 0).detach().contiguous().view(dtype=torch.complex128)) * 2,
        x.sum(),
    ],
    "squeeze of no dims": lambda x: [x[:, :, :1].squeeze(()), x[:1].squeeze(())],
    "chunks of nothing": lambda x: [*x[:, :0].chunk(3, 1), x[:, :0].split(0, 1)[0] * 2, x.sum()],
    "no rows": lambda x: [x[:, []], x.sum()],
    "trapezoids of one row, and of none": lambda x: [
        torch.cumulative_trapezoid(x[:, :1], dim=1),
        torch.cumulative_trapezoid(x[:, :0], dim=1),
        x.sum(),
    ],
    "what is written into windows": lambda x: [
        torch.slice_scatter(x, x[:, :1] * 2, 1, 2, 3),
        torch.slice_scatter(x.unfold(1, 1, 1), x[:, :1, ..., None] * 2, 1, 2, 3).add_(1),
    ],
    "a whole tensor expanded": lambda x: torch.ones(3, 1, 10, dtype=x.dtype).expand_as(x) * x,
    "places": lambda x: [x.sum(), torch.where(x > 0, x, 0.0), torch.where(x > 0, 1.0, x)],
}


def _run(name, x):
    return CASES[name](x)


@pytest.mark.parametrize("name", CASES)
def test_the_tile_answers_as_the_whole_tensor(name):
    assert_answers_as_the_whole(functools.partial(_run, name))


def _picked_by_masks_of_no_dims(x):
    yes, no = torch.tensor(True), torch.tensor(False)
    y = x * 1
    y[yes] = torch.ones(3, 7, 10, dtype=x.dtype)
    return [x[yes], x[no], x[:, yes], x[0, ..., yes], x[x.sum() * 0 == 0], y, x[0, 0, 3, 0, yes] * 2]


def test_masks_of_no_dims_say_whether_a_new_dim_has_its_row():
    assert_answers_as_the_whole(_picked_by_masks_of_no_dims)


@on_ranks(2)
def test_a_trapezoid_of_no_rows_requires_no_gradient():
    x = torch.zeros(0, 3, requires_grad=True)
    tile = shard(x.detach(), world_mesh(lat=2), ("lat", None)).requires_grad_()
    got, right = torch.trapezoid(tile, dim=0), torch.trapezoid(x, dim=0)
    assert torch.equal(got.full_tensor(), right) and got.requires_grad == right.requires_grad


@on_ranks(2)
def test_a_tile_of_the_common_shape_is_itself():
    tile = shard(torch.randn(4, 7), world_mesh(lat=2), (None, "lat"))
    same, wide = torch.broadcast_tensors(tile, torch.ones(7))
    assert same is tile and wide.shape == tile.shape


@on_ranks(2)
def test_the_adjoint_is_conjugated():
    x = torch.randn(4, 7, dtype=torch.complex128)
    tile = shard(x, world_mesh(lat=2), (None, "lat"))
    assert torch.equal(tile.adjoint().full_tensor(), x.adjoint())
    assert tile.is_complex() and not tile.abs().is_complex() and not tile.is_floating_point()


def _written(x):
    x[x > 0] *= 2
    x.mT.mul_(2)
    x.expand_as(x).add_(1)
    x[x < 0] = torch.ones(0, dtype=x.dtype)
    x.masked_scatter_(x > 0, x.flatten() * 2)
    return x.put(torch.tensor([0]), torch.tensor([5.0], dtype=x.dtype), accumulate=True)


SCALAR_CASES = {
    "squeeze": lambda x: [x.squeeze(0), x.squeeze(-1), x.squeeze(()), x.squeeze((0,)), x.squeeze()],
    "transposed": lambda x: [x.mT, x.H, x.T, x.t(), x.swapaxes(0, 0), x.movedim(0, 0), x.permute(())],
    "turned": lambda x: [x.flip(0), x.flip(()), x.roll(1)],
    "expanded": lambda x: [x.expand(()), x.expand_as(x), x.broadcast_to(()), x.expand(2), x.repeat(2), x.tile(2)],
    "unfold": lambda x: [x.unfold(0, 1, 3), x.unfold(0, 0, 1)],
    "masked": lambda x: [x[x > 0], x[x < 0], x.masked_select(x > 0), x[torch.tensor(True)], x[None, x > 0]],
    "picked": lambda x: [x.take(torch.tensor([0, 0])), x.take(torch.tensor(0)), x.index_select(0, torch.tensor([0]))],
    "gather": lambda x: [x.gather(0, torch.tensor(0)), x.gather(0, torch.tensor([0, 0])), x.gather(0, (x * 0).long())],
    "take_along_dim": lambda x: [x.take_along_dim(torch.tensor([0])), x.take_along_dim((x * 0).long().flatten())],
    "masked_scatter": lambda x: [x.masked_scatter(x > 0, x.flatten()), x.masked_scatter(x < 0, x.flatten())],
    "quantile": lambda x: [x.quantile(0.3, 0), x.quantile(0.3, 0, True), x.nanquantile(0.3, 0), x.quantile(0.3)],
    "along": lambda x: [x.cumsum(0), x.softmax(0), x.sort(0).values, x.kthvalue(1, 0).values, x.logcumsumexp(0)],
    "written": lambda x: [_written(x * 2), x.index_fill(0, torch.tensor([0]), 1), x.scatter(0, torch.tensor(0), 1)],
}


@pytest.mark.parametrize("name", SCALAR_CASES)
@on_ranks(2)
def test_a_tile_of_no_dims_answers_as_a_scalar(name):
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    tile = shard(x.detach(), world_mesh(lat=2), ()).requires_grad_()
    results = zip(SCALAR_CASES[name](tile), SCALAR_CASES[name](x), strict=True)
    gradients = []
    for got, right in results:
        assert (got.shape, got.dtype) == (right.shape, right.dtype)
        assert torch.equal(got.full_tensor() if hasattr(got, "full_tensor") else got, right)
        gradients.append((torch.autograd.grad(y.sum(), z) for y, z in ((got, tile), (right, x))))
    assert all(torch.equal(got.full_tensor(), right) for (got,), (right,) in gradients)


REFUSED = {
    "repeat of fewer dims": (lambda x: x.repeat(2, 1, 1), "repeat"),
    "repeat less than never": (lambda x: x.repeat(1, -1, 1, 1), "repeat|negative"),
    "t of four dims": (lambda x: x.t(), "t\\(\\).*2"),
    "flatten backwards": (lambda x: x.flatten(2, 1), "flatten"),
    "permute of no dims": (lambda x: x.permute(()), "permute"),
    "permute of a dim twice": (lambda x: x.permute(0, 1, 2, 2), "twice|duplicate"),
    "squeeze of a dim twice": (lambda x: x.squeeze((2, -2)), "twice|multiple"),
    "negative part": (lambda x: x.split([3, -1, 5], 2), "split"),
    "parts of nothing": (lambda x: x.split(0, 2), "split"),
    "negative chunks": (lambda x: x.chunk(-1, 2), "chunk"),
    "expand to less than nothing": (lambda x: x[:, :1].expand(2, -2, 7, 10), "expand"),
    "expand to another size": (lambda x: x[:, :1].expand(2, 3, 7, 11), "expand"),
    "half a number": (lambda x: x.transpose(1, 3).contiguous().view(torch.complex128), "view"),
    "cat of other rows": (lambda x: torch.cat([x, torch.ones(2, 3, 1, 10)], 1), "cat.*agree|Sizes"),
    "cat of other dims": (lambda x: torch.cat([x, torch.ones(7, 10)], 1), "cat.*agree|same number"),
    "diff with nothing": (lambda x: torch.diff(x, dim=1, append=NONE.float()), "diff"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(3)
def test_what_torch_refuses_every_rank_refuses(name):
    call, words = REFUSED[name]
    x = torch.randn(2, 3, 7, 10)
    tile = shard(x, world_mesh(lat=3), SPACE)
    with pytest.raises((RuntimeError, IndexError)):
        call(x)
    with comm.count() as counted, pytest.raises((RuntimeError, IndexError), match=words):
        call(tile)
    assert counted.calls == []


@on_ranks(3)
def test_what_depends_on_rows_of_other_ranks_is_refused():
    tile = shard(torch.randn(2, 3, 7, 10), world_mesh(lat=3), (None, None, None, "lat"))
    for call, words in [
        (lambda: tile[..., ...], "one ellipsis, not several"),
        (lambda: tile.view(torch.float64), "differ in width, and the last dim is cut"),
    ]:
        with comm.count() as counted, pytest.raises(ShardingError, match=words):
            call()
        assert counted.calls == []


@on_ranks(4)
def test_strides_are_those_of_the_whole_tensor():
    whole = torch.randn(1, 8, 6)
    tile = shard(whole, world_mesh(lat=2, lon=2), (None, "lat", "lon"), halo={1: 1}, periodic=(1,))
    for view in (lambda x: x, lambda x: x.mT, lambda x: x[:, 2:5], lambda x: x * 2, lambda x: x.movedim(2, 0)[3]):
        assert view(tile).stride() == view(whole).stride()
        assert view(tile).stride(-1) == view(whole).stride(-1)
    with pytest.raises(IndexError):
        tile.stride(3)


def _rows_of_windows(x):
    rows = torch.slice_scatter(x.unfold(0, 2, 1), torch.zeros(4, 1), 1, 1, 2)
    return rows.index_add_(1, torch.tensor([0]), torch.ones(4, 1))


@on_ranks(2)
def test_rows_written_into_overlapping_windows_lie_apart():
    # torch keeps the strides of the windows, so that what it writes to one row appears in others, too
    tile = shard(torch.arange(5.0), world_mesh(lat=2), ("lat",))
    rows = _rows_of_windows(tile)
    assert rows.stride() == (2, 1)
    assert rows.full_tensor().tolist() == [[1, 0], [2, 0], [3, 0], [4, 0]]


@on_ranks(2)
def test_random_numbers_like_a_view_lie_as_it_does():
    whole = torch.rand(4, 4, 8)
    tile = shard(whole, world_mesh(lat=2), (None, None, "lat"))
    for draw in (torch.rand_like, torch.randn_like, lambda x: torch.randint_like(x, 3, 4), torch.normal):
        for view in (lambda x: x, lambda x: x.mT, lambda x: x.permute(2, 0, 1), lambda x: x.flatten(1).T):
            assert draw(view(tile)).stride() == draw(view(whole)).stride()
    dense = torch.rand_like(tile.mT, memory_format=torch.contiguous_format)
    assert dense.is_contiguous()
