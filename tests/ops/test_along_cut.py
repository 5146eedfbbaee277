"""Functions along cut dims, which scan, order or pick rows: forward, gradients and bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from tile_oracle import assert_answers_as_the_whole

from jigsaw import ShardingError, comm
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard


def _with_zeros(x):
    """Some elements are 0."""
    return x * (x.detach().abs() > 0.4)


def _scans(x):
    tokens = x.flatten(2)
    found = [x.cumsum(2), x.cumsum(-1), torch.cumprod(x, 3), x.logcumsumexp(2), tokens.cumsum(2)]
    return [*found, (x > 0).cumsum(2), _with_zeros(x).cumprod(2), x.cumsum(2, dtype=torch.float64), x.cumsum(1)]


def _extreme_scans(x):
    ties = (x * 2).round()
    return [*x.cummax(2), *x.cummin(-1), *ties.cummax(2), *ties.cummin(3), *ties.flatten(2).cummax(2)]


def _products(x):
    y = _with_zeros(x)
    return [y.prod(2), y.prod(-1, keepdim=True), x.prod(), y[:, 0].prod(), x.flatten(2).prod(2), (x > 0).prod(3)]


def _extremes(x):
    ties = (x * 2).round()
    found = [*x.max(2), *x.min(-1, keepdim=True), *ties.max(2), *ties.min(3), *x.flatten(2).max(2)]
    return [*found, ties.argmax(2), ties.argmin(-1, True), ties.argmax(), x.argmin(keepdim=True), *x.aminmax(dim=2)]


def _orders(x):
    ties = (x.detach() * 2).round()
    found = [*x.sort(2), *torch.sort(x, -1, True), x.argsort(2), *x.topk(2, 2), *x.topk(3, largest=False)]
    found += [*x.kthvalue(2, 2), *x.median(2), *x.nanmedian(-1, True), *ties.sort(dim=2, stable=True)]
    return [*found, x.msort(), torch.sort(x.flatten(2), stable=True, dim=2)[0], x.mode(2)[0], x.argsort(dim=-1)]


def _turns(x):
    tokens = x.flatten(2)
    found = [x.flip(2), torch.flip(x, (2, -1, 1)), tokens.flip(2), x[0, 0].fliplr(), torch.flipud(x[0, 0])]
    found += [x.rot90(k, (2, 3)) for k in range(-1, 3)] + [torch.rot90(x, 1, [1, 2]), x.flip(0) + x]
    return [*found, x.roll(3), x.roll((5, -2), (2, 3)), tokens.roll(5, 2), x.roll((1, 2), (2, 2)), x.flip(())]


def _differences(x):
    places = torch.linspace(0, 1, 7, dtype=torch.float64).square()
    found = [x.diff(dim=2), x.diff(3, 3), x.diff(8, 2), x.flatten(2).diff(2), (x > 0).diff(dim=2), x.diff(0, 2)]
    found += [torch.trapezoid(x, dim=2), torch.trapz(x, dx=0.5), torch.trapezoid(x, places, dim=2)]
    found += [torch.trapezoid(x, x.square(), dim=-1), torch.cumulative_trapezoid(x, places, dim=-2)]
    return [*found, torch.trapezoid(x, dim=1), torch.trapezoid(x[:, :, :1], dim=2), x[0, 0, :, 0].diff()]


def _quantiles(x):
    q = torch.tensor([0.1, 0.5, 0.77], dtype=x.dtype)
    found = [x.quantile(0.3, 2), x.quantile(q, -1), x.nanquantile(q, 2, keepdim=True), x.quantile(q)]
    return [
        *found,
        x.flatten(2).quantile(q[0], 2, interpolation="lower"),
        x.quantile(q, dim=1),
        x[0, 0, 0].quantile(q, 0),
    ]


def _lists(x):
    y = (x.detach() * 2).round()
    found = [y.nonzero(), *torch.nonzero(y, as_tuple=True), torch.argwhere(y > 1), *torch.where(y > 0), y.unique()]
    found += [
        *torch.unique(y, return_inverse=True, return_counts=True),
        *y.unique_consecutive(return_inverse=True),
    ]
    found += [torch.unique(y, dim=2), x.masked_select(x > 0.5), torch.masked_select(x, y[:1, :1] > 0)]
    return [*found, y.count_nonzero(2), x.sum()]


def _counts(x):
    z = x.detach()
    numbers = (z * 2).abs().long().flatten()
    rows = numbers.bincount()
    found = [rows, numbers.bincount(minlength=9), torch.bincount(numbers, z.flatten().square())]
    return [*found, z.histc(7), torch.histc(z, 5, -1, 1), (z * 0).histc(3), x.sum()]


CASES = {
    "quantiles": _quantiles,
    "lists": _lists,
    "counts": _counts,
    "turns": _turns,
    "differences": _differences,
    "scans": _scans,
    "scans of extremes": _extreme_scans,
    "products": _products,
    "extremes": _extremes,
    "orders": _orders,
    "of all elements": lambda x: [x.median(), x.nanmedian(), x[0, 0, :, 0].sort()[0], x[0, 0].topk(3)[0]],
}


def _run(name, x):
    return CASES[name](x)


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact_on_every_mesh(name):
    assert_answers_as_the_whole(functools.partial(_run, name))


def _few_rows(x):
    """On four ranks some have no rows here, nor of the dim that is visited."""
    q = torch.tensor([0.2, 0.6], dtype=x.dtype)
    y = x[:1, :1, :, :2]
    found = [
        y.sort(2)[0],
        y.topk(2, 2)[0],
        *y.median(2),
        y.mode(2)[0],
        y.quantile(q, 2),
        y.argsort(2),
        y.kthvalue(3, 2)[0],
    ]
    z = x[:, :, :2]
    found += [z.cumsum(2), z.cumprod(2), *z.cummax(2), z.prod(2), *z.max(2), z.argmin(2), z.argmax(), z.diff(dim=2)]
    few = x[0, 0, :2, 0].detach()
    found += [torch.bincount((few * 2).abs().long(), few.square())]
    return [*found, z.flip(2), z.logcumsumexp(2), z[:, :, :1].diff(dim=2), z.roll(1, 2), z.sort(2)[0], z.nonzero()]


def test_ranks_without_rows():
    assert_answers_as_the_whole(_few_rows)


@on_ranks(4)
def test_bytes():
    mesh = world_mesh(lat=4)
    x = torch.randn(2, 8, 33, 64)
    tile = shard(x, mesh, (None, None, "lat", None))
    rank = mesh.get_local_rank()
    rows = (9, 8, 8, 8)[rank]
    row = 2 * 8 * 64 * 4  # bytes
    for call, sent in [
        (lambda: tile.cumsum(2), 3 * (row + 8)),  # one row to each of the others, and what says that layouts are alike
        (lambda: tile.prod(2), 3 * (row + 8)),
        (lambda: tile.max(2), 3 * (row + 8) + 3 * 2 * row),  # values, and places of 8 bytes
        (lambda: tile.diff(dim=2), row if rank else 0),
        (lambda: tile.median(2)[0], None),
        (lambda: torch.flip(tile, (1, 3)), 0),
        (tile.tril, 0),
        (lambda: tile.repeat_interleave(2, 2), 0),
        (lambda: tile.diagonal(0, 2, 3), 0),
    ]:
        with comm.count() as counted:
            call()
        if sent is not None:
            assert counted.sent_bytes == sent
    # a sort takes 3/4 of the tile to the others, and as much of values and of places back
    there = rows * row * 3 // 4
    back = 33 * row // 4 - (rows * row // 4)
    with comm.count() as counted:
        values, _ = torch.sort(tile, dim=2)
    assert counted.sent_bytes == there + back + 2 * back
    assert values.layout == tile.layout


@on_ranks(2)
def test_counts_that_end_in_torch_are_refused():
    mesh = world_mesh(lat=2)
    for dtype, most in ((torch.bfloat16, 256), (torch.float16, 2048)):
        few = torch.cat([torch.zeros(most - 1), torch.ones(3)]).to(dtype)
        tile = shard(few, mesh, ("lat",))
        assert torch.equal(torch.histc(tile, 2).full_tensor(), torch.histc(few, 2))
        with pytest.raises(ShardingError, match=f"a count of {most} or more.*x.float"):
            torch.histc(torch.cat([tile, tile[:1]]), 2)


REFUSED = {
    "no such row": (lambda x: x.kthvalue(9, 2), "kthvalue"),
    "more than there are": (lambda x: x.topk(8, 2), "topk|out of range"),
    "no such dim": (lambda x: x.cumsum(4), "[Dd]im"),
    "several dims": (lambda x: x.prod((2, 3)), "prod"),
    "one dim": (lambda x: x[0, 0, :, 0].fliplr(), "fliplr|2"),
    "three dims": (lambda x: x.rot90(1, (1, 2, 3)), "rot"),
    "a quantile beyond": (lambda x: x.quantile(1.5, 2), "quantile|range"),
    "unequal sections": (lambda x: x.dsplit(2), "dsplit"),
    "other times": (lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64), 2), "repeat"),
    "no matrix": (lambda x: x.trace(), "trace"),
    "other columns": (lambda x: torch.cdist(x, torch.ones(5, 9)), "cdist|column"),
    "not three": (lambda x: torch.linalg.cross(x, x, dim=2), "cross"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(3)
def test_what_torch_refuses_every_rank_refuses(name):
    call, words = REFUSED[name]
    x = torch.randn(2, 3, 7, 10)
    tile = shard(x, world_mesh(lat=3), (None, None, "lat", None))
    with pytest.raises((RuntimeError, IndexError, TypeError)):
        call(x)
    with comm.count() as counted, pytest.raises((RuntimeError, IndexError, TypeError), match=words):
        call(tile)
    assert counted.calls == []


@on_ranks(4)
def test_special_values_and_dtypes():
    """NaN, infinities, zeros, ties, integers and truth: the values, and which of equal ones is named, are torch's."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, nan, inf, 0.0, -inf, 3.0, nan, 3.0, 0.0, 3.0, -inf])
    ordinary = torch.tensor([1.0, 3.0, 0.0, 3.0, -1.0, 0.0, 0.0, 3.0, 2.0, -1.0, 0.0])
    calls = [
        lambda x: x.max(0),
        lambda x: x.min(0, keepdim=True),
        lambda x: (x.argmax(), x.argmin(0), x.argmin(keepdim=True)),
        lambda x: x.cummax(0),
        lambda x: x.cummin(0),
        lambda x: (x.cumsum(0), x.cumprod(0), x.prod(0), x.prod()),
        lambda x: (x.sort()[0], x.median(0)[0], x.flip(0), x.roll(4, 0), x.diff(), x.nonzero(), x.unique()),
        lambda x: torch.cat([x, x[:2], x]),
    ]
    for mesh in (world_mesh(lat=4), world_mesh(lat=2, lon=2)):
        spec = (("lon", "lat"),) if len(mesh.shape) == 2 else ("lat",)  # pieces in another order than the mesh's
        for whole in (x, ordinary, ordinary.long(), ordinary.to(torch.int16), x[:3], ordinary[:1]):
            tile = shard(whole, mesh, spec)
            for call in calls:
                expected, found = call(whole), call(tile)
                several = isinstance(expected, tuple)
                for want, got in zip(*((expected, found) if several else ((expected,), (found,))), strict=True):
                    got = got.full_tensor() if isinstance(got, Tile) else got
                    assert got.dtype == want.dtype and got.shape == want.shape
                    assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5)), (whole, want, got)


NAMED_DTYPES = [(function, torch.bool) for function in (torch.sum, torch.prod)]  # torch has no scans of bool
NAMED_DTYPES += [
    (function, dtype)
    for function in (torch.sum, torch.prod, torch.cumsum, torch.cumprod)
    for dtype in (torch.int8, torch.int32, torch.float64)
]


@pytest.mark.parametrize(("function", "dtype"), NAMED_DTYPES)
@on_ranks(4)
def test_a_named_dtype_is_that_of_the_result(function, dtype):
    x = torch.tensor([[100, 2], [100, 3], [2, 5]])  # one rank has no row; int8 overflows
    tile = shard(x, world_mesh(lat=4), ("lat", None))
    torch.testing.assert_close(function(tile, 0, dtype=dtype).full_tensor(), function(x, 0, dtype=dtype))
    if function in (torch.sum, torch.prod):
        torch.testing.assert_close(function(tile, dtype=dtype), function(x, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
@on_ranks(2)
def test_a_dot_product_of_whole_numbers_has_their_dtype(dtype):
    x = torch.tensor([100, 2, 3], dtype=dtype)
    torch.testing.assert_close(torch.dot(tile := shard(x, world_mesh(lat=2), ("lat",)), tile), torch.dot(x, x))


@pytest.mark.parametrize(("p", "most"), [(-1, 1.0), (1, -1.0)])
@on_ranks(2)
def test_renorm_raises_what_torch_raises(p, most):
    with pytest.raises(RuntimeError, match="renorm"):
        shard(torch.ones(3, 2), world_mesh(lat=2), ("lat", None)).renorm(p, 0, most)
