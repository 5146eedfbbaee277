"""Reductions, and functions along a dim, of what is rare: NaN, infinity, integers, no elements, wrong arguments."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from tile_oracle import SPACE, assert_answers_as_the_whole

from jigsaw import comm
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard


def _nan(x):
    return torch.where(x > 1, torch.nan, x)


def _infinite(x):
    return torch.where(x > 1.5, torch.inf, torch.where(x < -1.5, -torch.inf, x))


def _integers(x):
    return (3 * x).round().to(torch.int64)


CASES = {
    "NaN has no share of amax": lambda x: _nan(x).amax((2, 3)) + _nan(x).amin(3, keepdim=True).sum((2, 3)),
    "NaN shares max": lambda x: _nan(x).max() + _nan(x).min(),
    "ties share amax": lambda x: x.round().amax((2, 3)) + (x.clamp(-0.5, 0.5)).amin(2).sum(2),
    "ties share max": lambda x: x.clamp(-0.5, 0.5).max() - x.clamp(-0.5, 0.5).min(),
    "NaN is left out, infinity is not": lambda x: [_nan(x).nansum((2, 3)), _infinite(x).nansum(2), _nan(x).nanmean(3)],
    "nansum of integers": lambda x: _integers(x).nansum(2),
    "softmax of infinity": lambda x: [_infinite(x).softmax(2), F.log_softmax(_infinite(x), 3)],
    "softmax of minus infinity": lambda x: [x.masked_fill(x < 3, -torch.inf).softmax(2), x.log_softmax(1)],
    "softmax as another dtype": lambda x: [x.softmax(2, torch.float16).dtype == torch.float16 and x.softmax(2)],
    "softmax of integers as numbers": lambda x: [_integers(x).softmax(2, torch.float64), x.sum()],
    "logsumexp of integers": lambda x: (_integers(x).logsumexp((2, 3)) + (x > 0).logsumexp((2, 3))).round(decimals=3),
    "logsumexp of nothing": lambda x: x[:, :0].logsumexp(1) + x[:, :, 3:3].logsumexp(2).sum(),
    "truth of bytes": lambda x: [x.abs().to(torch.uint8).all(2), x.abs().to(torch.uint8).any(), (x > 0).all((2, 3))],
    "truth over no dims": lambda x: [(x > 0).all(()), (x > 0).any(dim=())],
    "bools of a few rows": lambda x: [(x > 0)[:, :, :1].amax(2), (x > 0)[:, :, 6:].amin((2, 3))],
    "vdot": lambda x: torch.vdot(torch.complex(x, -x)[0, 0, :, 0], torch.complex(x, x)[0, 1, :, 0]).real * 2,
    "names as numpy's": lambda x: x.mean(axis=2) + x.amax(axis=(2,), keepdims=False) - x.logsumexp(axis=2),
}


def _run(name, x):
    return CASES[name](x)


@pytest.mark.parametrize("name", CASES)
def test_the_tile_answers_as_the_whole_tensor(name):
    assert_answers_as_the_whole(functools.partial(_run, name))


REFUSED = {
    "softmax of integers": (lambda x: _integers(x).softmax(2), "softmax.* of torch.int64 .*dtype="),
    "log_softmax of bools": (lambda x: F.log_softmax(x > 0, 2), "log_softmax.* of torch.bool"),
    "softmax as integers": (lambda x: x.softmax(2, dtype=torch.int64), "softmax.* of torch.int64"),
    "softmax of few integers along a whole dim": (lambda x: _integers(x)[:, :, :1].softmax(1), "not implemented"),
    "nanmean of integers": (lambda x: _integers(x).nanmean(2), "nanmean.*torch.int64"),
    "norm of integers": (lambda x: torch.linalg.vector_norm(_integers(x), torch.inf, 2), "vector_norm"),
    "negative norm of nothing": (lambda x: torch.linalg.vector_norm(x[:, :0], -1, 1), "vector_norm"),
    "Frobenius norm of a vector": (lambda x: torch.linalg.norm(x, "fro", 2), "dim"),
    "amax of complex numbers": (lambda x: torch.complex(x, x).amax(2), "amax|max_values"),
    "dot of matrices": (lambda x: torch.dot(x[0, 0], x[0, 0]), "1-?[dD]"),
    "dot of two dtypes": (lambda x: torch.dot(x[0, 0, :, 0], x[0, 0, :, 0].float()), "dtype"),
    "dot of two lengths": (lambda x: torch.dot(x[0, 0, :, 0], x[0, 0, :1, 0]), "length|size"),
    "a dim twice": (lambda x: x.sum((2, -2)), "twice|multiple times"),
    "a bool for a dim": (lambda x: x.amax(True), "bool|no dim|not a dim"),
    "keepdim alone": (lambda x: x.max(keepdim=True), "dim"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(3)
def test_what_torch_refuses_every_rank_refuses(name):
    call, words = REFUSED[name]
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    tile = shard(x, world_mesh(lat=3), SPACE)
    with pytest.raises((RuntimeError, TypeError)):
        call(x)
    with pytest.raises((RuntimeError, TypeError), match=words):
        call(tile)
    assert tile.sum().item() == pytest.approx(x.sum().item())


@pytest.mark.parametrize("name", [n for n in REFUSED if not n.startswith("dot")])
@on_ranks(2)
def test_nothing_is_sent_before(name):
    tile = shard(torch.randn(2, 3, 7, 10), world_mesh(lat=2), SPACE)
    with comm.count() as counted, pytest.raises((RuntimeError, TypeError)):
        REFUSED[name][0](tile)
    assert counted.calls == []


@on_ranks(2)
def test_a_tile_without_dims_is_answered_along_its_only_dim():
    x = torch.tensor(3.0)
    tile = shard(x, world_mesh(lat=2), ())
    functions = "argmax argmin max median sort cumsum cummax softmax sum mean amax prod all var norm msort"
    for name in functions.split():
        function = functools.partial(torch.norm, dim=0) if name == "norm" else getattr(torch, name)
        named = {} if name in ("norm", "msort") else {"dim": 0}
        found, right = function(tile, **named), function(x, **named)
        pairs = [(found, right)] if isinstance(right, torch.Tensor) else list(zip(found, right, strict=True))
        for y, expected in pairs:
            whole = y.full_tensor() if isinstance(y, Tile) else y
            torch.testing.assert_close(whole, expected, equal_nan=True, msg=name)
