"""Indexing of tiles, and what writes into them, against the whole tensor: forward and gradients."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from jigsaw import ShardingError, comm
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.oracle import random_functional
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]
ROWS, COLUMNS = torch.tensor([6, 0, 3, 0]), torch.tensor([[9, -1, 2, 4], [0, 5, 5, -10]])
MASK = (torch.arange(70).reshape(7, 10) * 7 % 5) > 2
WEIGHTS = torch.linspace(-1, 1, 420, dtype=torch.float64).reshape(2, 3, 7, 10)


def _loss(outputs):
    leaves = [y if y.is_floating_point() else y.to(torch.float64) for y in outputs.values()]
    return random_functional([torch.view_as_real(y) if y.is_complex() else y for y in leaves])


def _like(x, whole):
    """A whole tensor as a tile that is cut as x is, where x is a tile."""
    return shard(whole, x.mesh, SPACE[-whole.ndim :]) if isinstance(x, Tile) else whole


def _added(x):
    y = x * 1
    y[:, :, 3] += x[:, :, 1]
    y[0] *= 2
    y[..., 1:3] -= 1
    return y


def _wrote(x, index, value):
    y = x * 1
    y[index] = value
    return y


def _changed(x, change):
    y = x * 1
    change(y)
    return y


PICKS = {
    "rows": lambda x: x[:, :, ROWS],
    "columns": lambda x: x[..., COLUMNS],
    "of few rows": lambda x: x[:, :, 2:4][:, :, [1, 0, 1]],
    "bools of few rows": lambda x: (x > 0)[:, :, 2:4][:, :, [1, 0, 1]],
    "an uncut dim": lambda x: x[:, [2, 0, 0]],
    "points": lambda x: x[:, :, ROWS, COLUMNS],
    "apart": lambda x: x[:, [0, 2, 1, 1], :, COLUMNS],
    "after an int": lambda x: x[1, :, ROWS],
    "after None and a step": lambda x: x[:, None, 1:, 1::2, ROWS],
    "three": lambda x: x[ROWS % 2, ROWS % 3, ROWS],
    "range": lambda x: x[:, :, range(1, 3)],
    "narrow integers": lambda x: x.flatten()[np.array([-1, 5, -128], np.int8)],
    "no rows": lambda x: x[:, :, []],
    "a mask": lambda x: x[:, :, MASK],
    "a mask of rows": lambda x: x[:, :, MASK[:, 0]],
    "a mask of tiles": lambda x: x[_like(x, WEIGHTS) > 0.1],
    "a mask of x": lambda x: x[x > 0],
    "tile of rows": lambda x: x[:, :, _like(x, MASK.long())[:, 0]],
    "tile of an uncut dim": lambda x: x[0, _like(x, MASK.long())],
    "strides": lambda x: x[:, :, ::2, 1::3],
    "index_select": lambda x: torch.index_select(x, 2, ROWS),
    "index_select by a tile": lambda x: x.index_select(3, _like(x, MASK.long())[:, 0]),
    "take": lambda x: torch.take(x, torch.tensor([[0, 419], [-1, 77]])),
    "take a number": lambda x: torch.take(x, torch.tensor(7)),
    "take by a tile": lambda x: x.take(_like(x, torch.arange(70).reshape(7, 10)) * 5),
    "masked_select": lambda x: x.masked_select(MASK),
    "masked_select by a tile": lambda x: torch.masked_select(x, x > 0.3),
    "gather": lambda x: x.gather(2, COLUMNS[None, None].abs().expand(2, 3, 2, 4) % 7),
    "gather along another": lambda x: torch.gather(x, 1, _like(x, MASK.long()).expand(2, 2, 7, 10)),
    "gather by a cut tile": lambda x: x.gather(2, _like(x, (WEIGHTS * 30).long() % 7)),
    "take_along_dim": lambda x: torch.take_along_dim(x, _like(x, (WEIGHTS * 30).long() % 7), 2),
    "take_along_dim of one": lambda x: x.take_along_dim(torch.tensor([[[[1], [-1], [0]]]]), 2),
    "bools": lambda x: (x > 0)[:, :, ROWS],
    "select_scatter": lambda x: torch.select_scatter(x, x[:, :, 1] * 2, 2, 5),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :, 1:3] * 2, 2, 4, 6),
}

WRITES = {
    "a number": lambda x: _wrote(x, (0, ..., slice(2, 5)), 3.0),
    "a row": lambda x: _wrote(x, (slice(None), 1, 4), x[:, 0, 2]),
    "low and high modes": lambda x: _wrote(
        _wrote(x, (..., slice(-2, None), slice(3)), x[..., :2, 3:6]), (0, 0, 0, 0), 1
    ),
    "strided": lambda x: _wrote(x, (..., slice(None, None, 2), slice(1, None, 3)), x[..., :4, :3] * 2),
    "a whole tensor": lambda x: _wrote(x, (..., slice(3), slice(None)), WEIGHTS[:, :, 2:5]),
    "broadcast": lambda x: _wrote(x, (slice(None), slice(None), slice(1, 4)), x.mean((2, 3), keepdim=True)),
    "broadcast of a row": lambda x: _wrote(x, (slice(None), 0), WEIGHTS[0, 0, 3]),
    "all": lambda x: _wrote(x, ..., WEIGHTS),
    "new dim": lambda x: _wrote(x, (slice(None), None, 0), x[:, 1][:, None]),
    "a mask": lambda x: _wrote(x, x > 0, 0.5),
    "a mask of two dims": lambda x: _wrote(x, (..., MASK), -1.0),
    "a mask of rows": lambda x: _wrote(x, (slice(None), slice(None), MASK[:, 1]), 2),
    "a mask and values": lambda x: _wrote(x, (0, 0, MASK), WEIGHTS[0, 0][MASK]),
    "a mask and picked values": lambda x: _wrote(x, x > 0, (x * 2)[x > 0]),
    "rows": lambda x: _wrote(x, (slice(None), slice(None), ROWS[:3]), x[:, :, 2:5]),
    "points": lambda x: _wrote(x, (1, 2, ROWS[:3], ROWS[:3] + 1), WEIGHTS[0, 0, 0, :3]),
    "apart": lambda x: _wrote(x, (slice(None), [0, 2], slice(None), [9, 1]), x[:, 0, :, 3]),
    "by a tile": lambda x: _wrote(x, (0, _like(x, MASK.long())[:, 0]), 4.0),
    "augmented": _added,
    "masked_fill_": lambda x: _changed(x, lambda y: y.masked_fill_(x > 0.5, x.mean()).masked_fill_(MASK, 2.0)),
    "complex": lambda x: _wrote(x * 1j, (..., slice(2), slice(-3, None)), x[..., 3:5, :3] * (1 + 2j)),
    "zeros": lambda x: _wrote(torch.zeros_like(x), (..., slice(4), slice(None)), x[..., 3:, :]),
    "index_put": lambda x: x.index_put((ROWS[:2] % 2, ROWS[:2] % 3, ROWS[:2]), x[0, 0, :2]),
    "index_put, added": lambda x: torch.index_put(x, (ROWS * 0, ROWS % 3), WEIGHTS[1, 1, 2], True),
    "put": lambda x: x.put(torch.tensor([3, -1, 100]), WEIGHTS[0, 0, 0, :3]),
    "masked_fill": lambda x: x.masked_fill(MASK, 2.0),
    "masked_scatter": lambda x: x.masked_scatter(MASK, WEIGHTS),
    "masked_scatter of a tile": lambda x: _changed(x, lambda y: y.masked_scatter_(x > 0, x * 3)),
    "where": lambda x: torch.where(MASK, x, WEIGHTS),
    "fill_ and zero_": lambda x: _changed(x, lambda y: (y[:, 0].fill_(x.mean()), y[:, :, 3:4].zero_())),
    "index_add": lambda x: x.index_add(2, ROWS, x[:, :, 1:5], alpha=2.0),
    "index_add of a whole tensor": lambda x: torch.index_add(x, 1, ROWS % 3, WEIGHTS[:, [0, 1, 1, 2]]),
    "index_copy": lambda x: x.index_copy(3, ROWS[:3], x[..., 4:7]),
    "index_fill": lambda x: x.index_fill(2, torch.tensor([-1, 2]), 7.0),
    "index_reduce": lambda x: x.detach().index_reduce(2, ROWS, x.detach()[:, :, :4], "amax") * x,
    "scatter": lambda x: x.scatter(2, ROWS[None, None, :3, None].expand(2, 3, 3, 10), x[:, :, 2:5]),
    "scatter of a number": lambda x: x.scatter(3, (ROWS[:3] + 1)[None, None, None].expand(1, 2, 7, 3), 5.0),
    "scatter_add": lambda x: x.scatter_add(2, _like(x, (WEIGHTS * 30).long() % 7), x * 2),
    "scatter_add of fewer": lambda x: _changed(x, lambda y: y.scatter_add_(3, COLUMNS[None, None].abs() % 7, WEIGHTS)),
    "scatter_reduce": lambda x: x.scatter_reduce(2, _like(x, (WEIGHTS * 30).long() % 7), x * 2, "mean"),
    "scatter_reduce, not self": lambda x: x.scatter_reduce(
        2, _like(x, (WEIGHTS * 30).long() % 7), x * 2, reduce="sum", include_self=False
    ),
}


CASES = PICKS | {f"write {name}": case for name, case in WRITES.items()}


def _run(names, x):
    found = {}
    for name in names:
        try:
            found[name] = CASES[name](x)
        except Exception as error:
            error.add_note(f"case: {name}")
            raise
    return found


GROUPS = [[n for n in CASES if n.startswith("write ") == writes] for writes in (False, True)]


@pytest.mark.parametrize("names", GROUPS, ids=["picks", "writes"])
def test_indices_are_answered_as_by_the_whole_tensor(names):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(functools.partial(_run, names), x, MESHES, spec=SPACE, loss=_loss)
    split = {2: (0, 0, 7, 7)}  # two of three ranks own nothing
    assert_same_on_every_mesh(functools.partial(_run, names), x, MESHES[1:2], spec=SPACE, loss=_loss, split=split)


@pytest.mark.parametrize("names", GROUPS, ids=["picks", "writes"])
def test_indices_of_a_batch_that_is_cut(names):
    torch.manual_seed(0)
    x, spec = torch.randn(2, 3, 7, 10), ("lat", None, None, "lon")
    wanted = [n for n in names if "_like" not in CASES[n].__code__.co_names]
    meshes = [{"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(functools.partial(_run, wanted), x, meshes, spec=spec, loss=_loss)


class _Parameters(nn.Module):
    """Parameters, which are whole, written into tiles and read at places that tiles name."""

    def __init__(self):
        super().__init__()
        self.row, self.number = nn.Parameter(torch.randn(3, 1, 10)), nn.Parameter(torch.randn(()))
        self.rows, self.table = nn.Parameter(torch.randn(2, 3, 4, 10)), nn.Parameter(torch.randn(7, 3))

    def forward(self, x):
        y = x * 1
        y[:, :, 2:4] = self.row
        y[:, 1, x[0, 1].detach() > 1] = self.number
        y[x > 1.5] = self.number
        y[0, 0, ROWS[:3], 1] = self.table[0]
        y = y.index_add(2, ROWS, self.rows).scatter_add(3, COLUMNS[None, None].abs() % 7, self.rows[:1, :1, :2, :4])
        y = y.masked_scatter(x > 0.7, self.rows.repeat(1, 1, 2, 1))
        codes = (x.detach()[:, 0].sigmoid() * 7).long()
        found = torch.gather(self.rows.expand(2, 3, 4, 10), 2, (x[:, :, :4].detach() > 0).long())
        return [y, self.table[codes].square(), found, x.new_zeros(x.shape).copy_(self.row) * y]


def test_parameters_written_into_tiles():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_Parameters(), torch.randn(2, 3, 7, 10), MESHES[1:], spec=SPACE)


@on_ranks(3)
def test_a_halo_is_written_too():
    mesh, x = world_mesh(lat=3), torch.arange(33.0)
    for index, value in (
        (slice(8, 14), x[8:14] * 2),
        (slice(None, None, 5), -1.0),
        (torch.tensor([9, 20, 21]), torch.ones(3)),
        (x % 3 == 0, 7.0),
    ):
        tile, expected = shard(x, mesh, ("lat",), halo={0: 2}), x.clone()
        tile[index], expected[index] = value, value
        assert torch.equal(tile.full_tensor(), expected)
        assert torch.equal(tile.local, tile.owned().with_layout(tile.layout).local)


@on_ranks(2)
def test_a_number_is_not_selected_from_by_a_tile():
    index = shard(torch.zeros(3, dtype=torch.int64), world_mesh(lat=2), ("lat",))
    with pytest.raises(ShardingError, match="a number has no dim that a Tile could index"):
        torch.index_select(torch.tensor(2.0), 0, index)


@on_ranks(4)
def test_what_indices_send():
    mesh = world_mesh(lat=4)
    tile = shard(torch.randn(8, 32), mesh, (None, "lat"))
    with comm.count() as counted:
        tile[:, 3:20:2] = torch.zeros(8, 9)
        tile[:, torch.tensor([30, 2])] = 1.0
        tile[:, tile[0] > 0] = 2.0
        tile.index_add_(1, torch.tensor([5, 31]), torch.ones(8, 2))
        tile.scatter_(1, torch.zeros(8, 1, dtype=torch.int64), 3.0)
        assert tile[2:4, ::3].shape == (2, 11)
    assert counted.calls == []
    with comm.count() as counted:
        assert tile[:, [30, 2]].layout.cut_dims == ()
    assert counted.sent_bytes == 2 * 3 * (8 * 2 + 1) * 4 // 4  # an all-reduce of what was picked, and one mark
    with comm.count() as counted:
        assert tile.gather(1, tile.argsort(0).long()).layout == tile.layout
    # the rows of each rank to three others, and one number: whether an index is out of range on any rank
    assert sum(c.sent_bytes for c in counted.calls if c.kind == "exchange") == 3 * 8 * 8 * 4
    assert len(counted.calls) == 2
