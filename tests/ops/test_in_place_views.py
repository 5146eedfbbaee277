"""What is changed in place through a view: the tensor that it is a view of changes too, or the change is refused."""

import pytest
import torch
import torch.nn.functional as F

from jigsaw import ShardingError, comm, strict_mode
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.oracle import random_functional
from jigsaw.tile import Tile
from jigsaw.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]

VIEWS = {
    "an int": lambda x: x[:, :, 3],
    "ints of two cut dims": lambda x: x[..., 2, 9],
    "after an ellipsis": lambda x: x[..., 3],
    "a row of a slice": lambda x: x[:, 1:, 2:6][:, :, 1, ::2],
    "a part of a row": lambda x: x[:, :, 5][1:, :, 2:8],
    "a row of a row": lambda x: x[:, :, 6][..., 0],
    "an uncut dim": lambda x: x[:, 2],
    "select": lambda x: x.select(2, -1),
    "unbind": lambda x: x.unbind(2)[3],
    "iter": lambda x: list(x.movedim(3, 0))[4],
    "squeeze": lambda x: x[:, :, 3:4].squeeze(2),
    "squeeze of several": lambda x: x[:, :, 3:4, 2:3].squeeze(),
    "narrow": lambda x: x.narrow(2, 3, 1),
    "slice": lambda x: x[..., 1::2],
    "split": lambda x: x.split([2, 5], 2)[1],
    "chunk": lambda x: x.chunk(3, 3)[1],
    "tensor_split": lambda x: x.tensor_split(2, 2)[0],
    "transpose": lambda x: x.transpose(1, 2)[:, 3],
    "movedim": lambda x: x.movedim(2, 0)[5],
    "flatten": lambda x: x.flatten(2),
    "tokens": lambda x: x.flatten(2)[..., 30:40],
    "a token": lambda x: x.flatten(2)[..., 40],
    "split tokens": lambda x: x.flatten(2).split(35, 2)[1],
    "unbound tokens": lambda x: x.flatten(2).unbind(2)[4],
    "windows": lambda x: x.view(2, 3, 7, 2, 5),
    "windows of another size": lambda x: x.view(2, 3, 14, 5),
    "unflatten": lambda x: x.unflatten(3, (5, 2)),
    "a row of a realigned view": lambda x: x.unflatten(3, (5, 2))[:, :, 2],
    "unfold": lambda x: x.unfold(3, 2, 2),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "diagonal of an uncut dim": lambda x: x.diagonal(1, 0, 1),
    "expand": lambda x: x[:, :, :1].expand(2, 3, 4, 10),
    "unsqueeze": lambda x: x.unsqueeze(0)[0, ..., 4],
    "detach": lambda x: x.detach()[:, :, 3],
    "a detached row": lambda x: x[:, :, 3].detach(),
    "data": lambda x: x[:, :, 3].data,
    "view_as": lambda x: x.view_as(x)[:, :, 2],
}

CHANGES = {
    "zero_": lambda y: y.zero_(),
    "add_": lambda y: y.add_(1),
    "relu_": torch.relu_,
    "relu, inplace": lambda y: F.relu(y, inplace=True),
    "silu, inplace": lambda y: F.silu(y, True),
    "fill_": lambda y: y.fill_(3),
    "copy_": lambda y: y.copy_(y * 2),
    "mul_ of itself": lambda y: y.mul_(y.detach() + 1),
    "clamp_": lambda y: y.clamp_(-0.3, 0.3),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 2.0),
    "index_fill_": lambda y: y.index_fill_(0, torch.tensor([0]), 7.0),
    "setitem": lambda y: y.__setitem__(..., 4.0),
    "iadd": lambda y: y.__iadd__(2.0),
    "cumsum_": lambda y: y.cumsum_(0),
}


FEW = ["add_", "relu, inplace", "setitem"]
# more views: of views, of what torch copies, and of rows that lie together on some ranks alone
VIEWS |= {
    "flat": lambda x: x.view(-1),
    "a part of the flat": lambda x: x.flatten()[3:99],
    "a row of the flat": lambda x: x.ravel().view(42, 10)[5],
    "flat rows": lambda x: x[:, :, 2].flatten(),
    "a copy of a slice": lambda x: x[:, :, :3].flatten(2),
    "a slice that stays one": lambda x: x[1].flatten(),
    "a copy of a transpose": lambda x: x.transpose(1, 2).flatten(1),
    "a transpose split": lambda x: x.transpose(2, 3).unflatten(2, (5, 2)),
    "windows of windows": lambda x: x.view(2, 3, 14, 5).view(2, 3, 7, 2, 5)[:, :, :, 1],
    "rows of one": lambda x: x[:, :, 3:4].reshape(2, 3, 10),
    "contiguous": lambda x: x.contiguous(),
    "a contiguous slice": lambda x: x[:, :, :3].contiguous(),
    "merged": lambda x: x.reshape(6, 70),
    "copied": lambda x: x.transpose(0, 1).reshape(6, 70),
}


PAIRS = [(v, c) for v in VIEWS for c in FEW] + [(v, c) for v in ("an int", "ints of two cut dims") for c in CHANGES]


def _outcome(x, view, change, late):
    """The tensor, its view, and views of both, after a change in place of the view, or (`late`) of the tensor; or the
    error.
    """
    y = x * 1
    try:
        v = VIEWS[view](y)
        part = v[..., :1]
        CHANGES[change](y if late else v)
        return y, v, part, y[:, 1:]
    except (RuntimeError, ShardingError) as error:
        return error


def _agree(found, expected):
    found = [a.full_tensor() if isinstance(a, Tile) else a for a in found]
    return all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def _compare_with_torch(layout, specs):
    """What differs from plain torch, and which views are refused."""
    mesh, whole = world_mesh(**layout), torch.randn(2, 3, 7, 10, dtype=torch.float64)
    tiles, wrong, refused = [shard(whole, mesh, spec) for spec in specs], [], set()
    for view, change, late in [(*pair, False) for pair in PAIRS] + [(v, "add_", True) for v in VIEWS]:
        expected = _outcome(whole, view, change, late)
        for tile in tiles:
            found = _outcome(tile, view, change, late)
            if isinstance(found, ShardingError) and "clone() first" in str(found):
                refused.add(view)
            elif isinstance(found, Exception):
                wrong += [] if isinstance(expected, Exception) else [(view, change, repr(tile), found)]
            # torch may refuse (a view of a split) where a tile writes through
            elif not isinstance(expected, Exception) and not _agree(found, expected):
                wrong.append((view, change, late, repr(tile), "other numbers"))
    return wrong, refused


@on_ranks(2)
def test_what_is_changed_through_a_view_on_two_ranks():
    wrong, refused = _compare_with_torch({"lat": 2}, [(None, None, "lat", None), (None, None, None, "lat")])
    assert not wrong
    assert refused <= {"unfold"}


@on_ranks(4)
def test_what_is_changed_through_a_view_on_four_ranks():
    wrong, refused = _compare_with_torch({"lat": 2, "lon": 2}, [SPACE])
    assert not wrong
    assert refused <= {"unfold"}


def _loss(outputs):
    return random_functional(list(outputs.values()))


def _changed_in_many_ways(x):
    """Rows changed through views, of which some are out of date by then, and used again."""
    found = {}
    for name in ("an int", "ints of two cut dims", "a part of a row", "squeeze", "a row of a row", "transpose"):
        y = x * 1
        row = VIEWS[name](y)
        row.mul_(2)
        row += 1
        y[..., 3] += 1
        y.mul_(3)
        row.sin_()
        found[name] = y * row.sum()
    y, z = x * 1, x * 1
    first, second = y[:, :, 3], y[:, :, 3]
    first.mul_(x[:, :, 0])
    second.add_(first)
    found["twice"] = y
    for row in range(10):
        z.select(3, row).mul_(z[..., row].mean())
    found["loop"] = z
    with torch.no_grad():
        z[:, :, 2].add_(1)
    found["without gradients"] = z * z[:, :, 2:3]
    return found


def test_gradients_of_rows_changed_in_place():
    torch.manual_seed(0)

    x, split = torch.randn(2, 3, 7, 10), {2: (0, 0, 7, 7)}
    assert_same_on_every_mesh(_changed_in_many_ways, x, MESHES, spec=SPACE, loss=_loss)
    assert_same_on_every_mesh(_changed_in_many_ways, x, MESHES[1:2], spec=SPACE, loss=_loss, split=split)


@on_ranks(2)
def test_what_a_changed_row_sends():
    mesh = world_mesh(lat=2)
    tile = shard(torch.ones(4, 32), mesh, (None, "lat"))
    with comm.count() as counted:
        tile[:, 3] += 1
    assert [c.sent_bytes for c in counted.calls] == [4 * 4 * (mesh.get_rank() == 0)]  # the row, once
    row = tile[:, 3]
    tile.add_(1)
    with comm.count() as counted:
        row.add_(1)  # out of date by then: the row again
    assert [c.sent_bytes for c in counted.calls] == [4 * 4 * (mesh.get_rank() == 0)]
    assert torch.equal(tile.full_tensor()[:, 3], torch.full((4,), 4.0))
    leaf = shard(torch.ones(4, 32), mesh, (None, "lat"))
    leaf.requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf[:, 3].zero_()
    with pytest.raises(ShardingError, match=r"unsqueeze_ on a Tile .* write x = x.unsqueeze\(...\)"):
        tile.unsqueeze_(0)
    with pytest.raises(ShardingError, match=r"addbmm_ on a Tile .* write x = x.addbmm\(...\)"):
        shard(torch.ones(1), mesh, ("lat",)).addbmm_(torch.ones(2, 3, 3), torch.ones(2, 3, 4))
    with pytest.raises(RuntimeError, match="does not fit into a Tile"):
        (tile > 0).cumsum_(0)
    # a function that runs whole writes through, too; a view whose rows moved is refused all the same
    square = shard(torch.eye(5).expand(2, 5, 5), mesh, (None, "lat", None))
    with strict_mode(False):
        square[:, 2].put_(torch.tensor([1]), torch.tensor([7.0]))
        with pytest.raises(ShardingError, match=r"clone\(\) first"):
            tile.flatten().unfold(0, 2, 2).zero_()
    assert square.full_tensor()[0, 2, 1] == 7


@on_ranks(2)
def test_functions_in_place_whose_new_ones_the_table_knows():
    mesh, whole = world_mesh(lat=2), torch.randn(3, 5, 5, dtype=torch.float64)
    for change in (
        lambda y: y.cumsum_(1),
        lambda y: y.cumprod_(2),
        lambda y: y.tril_(),
        lambda y: y.baddbmm_(y.detach() + 1, y.detach() + 2),
    ):
        tile, expected = shard(whole, mesh, (None, "lat", None)), whole.clone()
        assert change(tile) is tile
        change(expected)
        torch.testing.assert_close(tile.full_tensor(), expected)
