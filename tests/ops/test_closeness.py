"""`torch.testing.assert_close` of tiles: torch's own verdict and words on every rank, and no tile is brought whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

F64 = torch.float64
NAN, INF = float("nan"), float("inf")


def _changed(x, *places):
    y = x.clone()
    for index, value in places:
        y[index] = value
    return y


def _pairs():
    """Two whole tensors [2, 7, 5] and the options to compare them by."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 5, dtype=F64)
    whole = torch.arange(70).reshape(2, 7, 5)
    gaps = _changed(x, ((1, 3), NAN))
    return {
        "alike": (x, x.clone(), {}),
        "one": (x, _changed(x, ((1, 6, 2), 9.0)), {}),
        "two": (_changed(x, ((0, 6, 4), 9.0), ((1, 0, 0), -3.0)), x, {"rtol": 0, "atol": 0}),
        "near": (x, x + 1e-9, {}),
        "near, but": (x, x + 1e-9, {"rtol": 0, "atol": 1e-12}),
        "by rtol": (x, x * 1.01, {"rtol": 0.1, "atol": 0.0}),
        "nan": (gaps, gaps, {}),
        "nan of both": (gaps, gaps, {"equal_nan": True}),
        "nan of one": (gaps, x, {"equal_nan": True}),
        "infinite": (_changed(x, ((0, 5, 1), INF)), x, {}),
        "of zero": (x, _changed(x, ((1, 5, 3), 0.0)), {}),
        "integers": (whole, _changed(whole, ((0, 2, 3), 99), ((1, 2, 3), -5)), {}),
        "bools": (whole > 30, _changed(whole > 30, ((1, 6, 4), False)), {}),
        "complex": (torch.complex(x, x * 2), _changed(torch.complex(x, x * 2), ((0, 3, 3), 2 - 1j)), {}),
        "bfloat16": (x.bfloat16(), _changed(x.bfloat16(), ((0, 6, 0), 3.0)), {}),
        "dtypes": (x, x.float(), {}),
        "dtypes not asked": (x, x.float(), {"check_dtype": False}),
        "shapes": (x, x[:, :6], {}),
        "rows of one shape": (x, x[:1], {}),
        "one tolerance": (x, x, {"atol": 0.1}),
        "message": (x, x + 1, {"msg": "mine"}),
        "message of it": (x, x + 1, {"msg": lambda m: f"so: {m}"}),
        "in a list": ([x, [x + 1]], [x, [x]], {}),
        "in dicts": ({"a": x, "b": (x, 2)}, {"a": x, "b": (_changed(x, ((1, 1, 1), 5.0)), 2)}, {}),
        "classes": (x, x.numpy(), {}),
        "None": (x, None, {}),
        "number": (x.sum(), x.sum() + 1, {}),
        "no elements": (x[:, :0], x[:, :0], {}),
    }


def _as_tiles(values, mesh, spec):
    if isinstance(values, torch.Tensor) and values.ndim:
        return shard(values, mesh, spec)
    if isinstance(values, dict):
        return {k: _as_tiles(v, mesh, spec) for k, v in values.items()}
    return type(values)(_as_tiles(v, mesh, spec) for v in values) if isinstance(values, (list, tuple)) else values


def _verdict(call, *args, **options):
    try:
        call(*args, **options)
    except (AssertionError, TypeError, ValueError) as error:
        words = str(error).replace("<class 'jigsaw.tile.tile.Tile'>", "<class 'torch.Tensor'>")
        return type(error), words.replace("None mismatch: Tile(", "None mismatch: tensor(").partition("tensor(")[0]
    return None


SPECS = [(None, "lat", "lon"), (None, "lat", "lon")], [(None, "lat", None), ("lat", None, "lon")]


def _check_verdicts(mesh):
    for pair, (name, (a, b, options)) in itertools.product(SPECS, _pairs().items()):
        first, second = ([axis if axis in mesh else None for axis in spec] for spec in pair)
        wanted, on = _verdict(assert_close, a, b, **options), world_mesh(**mesh)
        first, second = _as_tiles(a, on, first), _as_tiles(b, on, second)
        for given in ((first, second), (first, b), (a, second)):
            assert _verdict(assert_close, *given, **options) == wanted, name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}])
def test_the_verdict_and_its_words_are_those_of_torch(mesh):
    run_on_ranks(mesh["lat"] * mesh.get("lon", 1), _check_verdicts, mesh)


@on_ranks(2)
def test_what_is_compared_stays_where_it_lies():
    mesh = world_mesh(lat=2)
    x = torch.randn(2, 64, 5, dtype=F64)
    wide = shard(x, mesh, (None, "lat", None), halo={1: 2})
    leaf = shard(x, mesh, (None, "lat", None))
    leaf.local.requires_grad_()
    with comm.count() as counted:
        assert_close(wide, leaf)
        assert_close(leaf * 1, x)
        assert_close(leaf, x, check_layout=False, check_device=False)
        assert_close(x.to_sparse(), leaf, check_layout=False)
    # a number, and two that show whether ranks compare the same
    assert [(c.kind, c.sent_bytes) for c in counted.calls] == [("all_reduce", 16)] * 4
    wrong = wide * 1
    wrong.local[0, -1] = 3.0  # a row of the halo on one rank, the last row on the other: what ranks own counts
    with comm.count() as counted, pytest.raises(AssertionError, match=r"5 / 640 .*\n.* at index \(0, 63, \d\)"):
        assert_close(wrong, x)
    assert counted.sent_bytes < 1000
    alike = shard(x, mesh, (None, None, None))
    if mesh.get_local_rank() == 1:
        alike.local[1, 2, 3] = 7.0
    with pytest.raises(AssertionError, match=r"1 / 640 .*\nGreatest absolute difference: .* at index \(1, 2, 3\)"):
        assert_close(alike, x)
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.testing.assert_allclose(leaf, x.float())
    assert_close(leaf.flatten(1), x.flatten(1))
    with pytest.raises(AssertionError, match=r"at index \(1, 5\)"):
        assert_close(leaf.flatten(1), _changed(x.flatten(1), ((1, 5), 50.0)))
    assert_close(torch.nn.Parameter(x), leaf)
    with pytest.raises(AssertionError, match="layout"):
        assert_close(x.to_sparse(), leaf)


@on_ranks(2)
def test_what_cannot_be_compared_is_a_typed_error():
    mesh = world_mesh(lat=2)
    tile = shard(torch.ones(4, 3), mesh, ("lat", None))
    with pytest.raises(ShardingError, match=r"check_stride=True.*compare tile.stride"):
        assert_close(tile, tile, check_stride=True)
    other = Tile(tile.local, tile.layout, world_mesh(lon=2))
    with pytest.raises(ShardingError, match="tiles on different meshes"):
        assert_close(tile, other)
