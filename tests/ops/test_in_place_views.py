"""What is changed in place through a view: the tensor that it is a view of changes too, or the change is refused."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jigsaw import ShardingError, comm, strict_mode
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.oracle import random_functional
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

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

# one element: a plain tensor, which is a view all the same
VIEWS |= {
    "an element": lambda x: x[1, 2, 3, 4],
    "an element of a row": lambda x: x[1, 2, 6][9],
    "the last of the rows": lambda x: [c for row in x[0, 0] for c in row][-1],
    "an element selected": lambda x: x[1, 0].select(0, 2).select(0, 7),
    "an element squeezed": lambda x: x[:1, :1, 4:5, 8:9].squeeze(),
    "a detached element": lambda x: x[1, 2, 3, 4].detach(),
    "an element with dims": lambda x: x[1, 2, 3, 4].reshape(1, 1)[0],
}

PAIRS = [(v, c) for v in VIEWS for c in FEW]
PAIRS += [(v, c) for v in ("an int", "ints of two cut dims", "an element") for c in CHANGES]


def _outcome(x, view, change, late):
    """The tensor, its view, and views of both, after a change in place of the view, or (`late`) of the tensor; or the
    error.
    """
    y = x * 1
    try:
        v = VIEWS[view](y)
        part = v[..., :1] if v.ndim else v[None]
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
                refused |= set() if isinstance(expected, Exception) else {view}
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


@pytest.mark.slow
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
    e = x * 1
    element, row = e[1, 2, 3, 4], e[0, 1, :, 5]
    element.mul_(x[0, 0, 0, 0])
    e[0, 0, 0, 3] += element
    row.mul_(2)
    row[2].sin_().add_(row[3].clone() * element.clone())
    e.mul_(e[1, 2, 3, 4].clone())
    found["elements"], found["computed with elements"] = e, element * row[2] + torch.stack([element, e[0, 0, 0, 3]])
    m = x.mean((2, 3), keepdim=True).transpose(1, 3) * 1
    m[0, 0, 0, 2].mul_(m[1, 0, 0, 1].clone())
    found["elements of what no axis cuts"] = m * m[0, 0, 0, 2]
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


@on_ranks(2)
def test_an_element_is_a_plain_tensor_for_whoever_reads_it():
    mesh = world_mesh(lat=2)
    leaf = shard(torch.arange(12.0).reshape(2, 6), mesh, (None, "lat")).requires_grad_()
    tile = leaf * 1
    element = tile[1, 5]
    assert isinstance(element, torch.Tensor) and not isinstance(element, Tile)
    assert (float(element), int(element), f"{element:.1f}", element.item()) == (11, 11, "11.0", 11)
    assert repr(element) == "tensor(11., grad_fn=<_LeaveBackward>)" and element.ndim == 0
    assert torch.ones(20)[element.long()] == 1 and list(range(element.long())) == list(range(11))
    assert type(element * 2) is type(element.clone()) is type(torch.ones(3) * element) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(element.detach()))) is type(copy.deepcopy(element.detach())) is torch.Tensor
    assert np.asarray(element.detach()) == 11 and torch.tensor([element, element]).tolist() == [11, 11]
    assert element.to(torch.float32) is element and element.contiguous() is element
    (gradient,) = torch.autograd.grad(element**2, element, retain_graph=True)
    assert gradient == 22
    (tile * element).sum().backward()
    expected = torch.full((2, 6), 11.0)
    expected[1, 5] += 66
    assert torch.equal(leaf.grad.full_tensor(), expected)
    # read after the tile changed, as a view is
    with torch.no_grad():
        element = tile[1, 5]
        tile.mul_(2)
        assert element == 22
        torch._foreach_add_([element, tile[0, 0]], 1.0)
        assert tile.full_tensor()[[1, 0], [5, 0]].tolist() == [23, 1]
        element.scatter_(0, torch.tensor(0), 7.0).index_add_(0, torch.tensor([0]), torch.tensor([2.0]))
        assert tile.full_tensor()[1, 5] == 9
        with pytest.raises(ShardingError, match=r"write x.copy_\(result\)"):
            torch.add(element, 1, out=element)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        leaf[0, 3].add_(1)


@on_ranks(2)
def test_what_makes_a_new_tile_takes_one_whose_halo_goes_around():
    mesh, whole = world_mesh(lat=2), torch.randn(6, 3, dtype=torch.float64)
    tile = shard(whole, mesh, ("lat", None), halo={0: 1}, periodic=(0,))
    assert "with halo, holding ['-1:4', '2:7']" in str(tile.layout)
    rows = torch.tensor([5, 0])
    for make in (
        lambda x: torch.index_add(x, 0, rows, whole[:2]),
        lambda x: torch.index_copy(x, 0, rows, whole[:2]),
        lambda x: torch.index_fill(x, 0, rows, 2.0),
        lambda x: torch.slice_scatter(x, whole[:2], 0, 3, 5),
        lambda x: torch.select_scatter(x, whole[0], 0, 5),
    ):
        assert torch.equal(make(tile).full_tensor(), make(whole))


WHOLE, WEIGHT, WRITTEN = torch.randn(3, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PLACES, ORDER = torch.tensor([5, 0, 0, 3]), torch.tensor([5, 0, 3, 1, 4, 2])
ELEMENTS = (WRITTEN.abs() * 4).long() % 6

CHANGES_AROUND = {
    "rows": lambda x, w: x.__setitem__(slice(3, 5), x[1:3].clone()),
    "places": lambda x, w: x.__setitem__([0, 5], 2.0),
    "a mask": lambda x, w: x.__setitem__(x > 0, 1.0),
    "a column added": lambda x, w: x.__setitem__((slice(None), 0), x[:, 0].add_(x[:, -1])),
    "a row in place": lambda x, w: x[0].mul_(2),
    "a part of a slice": lambda x, w: x[:3][:, 1:].add_(1),
    "all, turned": lambda x, w: x.copy_(x.flip(0)),
    "put": lambda x, w: x.put_(torch.tensor([0]), torch.tensor([5.0]).double()),
    "index_add_": lambda x, w: x.index_add_(0, PLACES, w[:4], alpha=2),
    "index_copy_": lambda x, w: x.index_copy_(0, ORDER, w),
    "index_fill_": lambda x, w: x.index_fill_(1, torch.tensor([-1, 0]), w.detach()[0, 0]),
    "index_reduce_": lambda x, w: x.index_reduce_(0, PLACES, w[:4], "amax"),
    "scatter_": lambda x, w: x.scatter_(0, ORDER[:, None].expand(6, 3), w),
    "scatter_ of fewer": lambda x, w: x.scatter_(1, torch.tensor([[2, 0]] * 4), 3.0),
    "scatter_add_": lambda x, w: x.scatter_add_(0, ELEMENTS, w),
    "scatter_reduce_": lambda x, w: x.scatter_reduce_(0, ELEMENTS, w, "mean"),
    "masked_scatter_": lambda x, w: x.masked_scatter_(w > 0, w * 3),
    "masked_fill_": lambda x, w: x.masked_fill_(w > 0, w.sum()),
    "a column, filled": lambda x, w: x[:, 1].index_fill_(0, PLACES, 3.0),
    "a transpose, added to": lambda x, w: x.t().index_add_(1, PLACES, w[:4].t()),
    "tokens, scattered": lambda x, w: x.flatten().scatter_(0, torch.tensor([1, 2, 15]), 3.0),
    "rrelu_": lambda x, w: torch.rrelu_(x),
}


def _check_change_around(change, held_rows, written):
    """The tensor, its first rows, all gradients and the tile's own halo are those of torch."""
    results = []
    for x, w in ((WHOLE.clone(), WRITTEN.clone()), (held_rows.owned().clone(), written)):
        y = x.requires_grad_() * 1
        y = y.with_layout(held_rows.layout) if isinstance(y, Tile) else y
        w.requires_grad_()
        first = y[:1]
        CHANGES_AROUND[change](y, w)
        (y * WEIGHT).sum().backward()
        parts = [y, first, x.grad, torch.zeros(6, 3).double() if w.grad is None else w.grad]
        results.append([t.detach().full_tensor() if isinstance(t, Tile) else t.detach() for t in parts])
    for got, right in zip(results[1], results[0], strict=True):
        assert torch.allclose(got, right), change
    held = results[0][0]
    for d, (start, stop) in enumerate(y.layout.held(y.coordinate)):
        held = held.index_select(d, torch.arange(start, stop) % held.shape[d])
    assert torch.allclose(y.local, held), change


@pytest.mark.parametrize("change", CHANGES_AROUND)
@on_ranks(2)
def test_a_tile_whose_halo_goes_around_is_written_as_torch_does(change):
    mesh, split = world_mesh(lat=2), {0: (0, 1, 6)}
    for spec, periodic in ((("lat", None), (0,)), (("lat", None), ()), ((None, "lat"), (1,))):
        halo = {spec.index("lat"): 1}
        tile = shard(WHOLE, mesh, spec, split=split if spec[0] else {}, halo=halo, periodic=periodic)
        _check_change_around(change, tile, shard(WRITTEN, mesh, spec))


@pytest.mark.slow
@on_ranks(4)
def test_a_tile_whose_halo_goes_around_two_dims_is_written_as_torch_does():
    mesh = world_mesh(lat=2, lon=2)
    for change in CHANGES_AROUND:
        for spec, periodic in ((("lat", "lon"), (0, 1)), (("lat", "lon"), (1,)), ((("lat", "lon"), None), (0,))):
            halo = {d: (2, 1) for d in (0, 1) if spec[d]}
            tile = shard(WHOLE, mesh, spec, split={0: (0, 4, 6)} if spec[1] else {}, halo=halo, periodic=periodic)
            _check_change_around(change, tile, shard(WRITTEN, mesh, ("lon", "lat")))


@on_ranks(2)
def test_one_element_of_a_flat_view_moves_no_other_row():
    mesh, whole = world_mesh(lat=2), torch.arange(24.0).reshape(4, 6)
    tile = shard(whole, mesh, (None, "lat"))
    with comm.count() as counted:
        tile.view(-1)[7] = 70.0
        tile.flatten()[-1] = 80.0
    assert counted.sent_bytes == 0
    whole.view(-1)[[7, 23]] = torch.tensor([70.0, 80.0])
    assert torch.equal(tile.full_tensor(), whole)
    with comm.count() as counted:
        assert tile.view(-1)[8].item() == 8.0
    assert counted.sent_bytes <= 8
    assert tile.view(-1)[3, None].tolist() == [3.0]
    with pytest.raises(IndexError, match="out of range"):
        tile.view(-1)[24]


@on_ranks(2)
def test_windows_that_rows_had_to_move_for_are_refused_on_ranks_without_one_too():
    tile = shard(torch.ones(1), world_mesh(lat=2), ("lat",))
    with pytest.raises(ShardingError, match="rows moved to other cut points"):
        tile.unfold(0, 1, 1).mul_(2)


def _grids_of_changed_rows(x):
    """Grids, and their rows, of tensors that are changed after it; of two that one axis cuts, too."""
    y = x * 1
    rows, columns, more = y[0, 1, :, 2], y[1, 2, 3], y[1, 0, :, 3]
    found = {}
    for name, given in (
        ("both", (rows, columns)),
        ("one axis", (rows, more)),
        ("plain", (rows, torch.ones(3, dtype=x.dtype))),
    ):
        for indexing in ("ij", "xy"):
            for at, grid in enumerate(torch.meshgrid(*given, indexing=indexing)):
                found[f"{name} {indexing} {at}"], found[f"row of {name} {indexing} {at}"] = grid, grid[1]
    first = found["both ij 0"] * 5
    rows.mul_(2)
    y.add_(y.detach() * 3)
    columns[2:].sin_()
    return {"first": first} | {name: grid * 2 for name, grid in found.items()}


def test_grids_follow_their_tensors():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(_grids_of_changed_rows, x, MESHES, spec=SPACE, loss=_loss)
    assert_same_on_every_mesh(_grids_of_changed_rows, x, MESHES[:1], spec=(None, None, None, "lat"), loss=_loss)


GRID_WRITES = {
    "an element": lambda g: g.__setitem__((2, -5), 4.0),
    "a row": lambda g: g[1].__setitem__(3, 4.0),
    "a column": lambda g: g[:, 2:3].squeeze(1).__setitem__(3, 4.0),
    "an element selected": lambda g: g.select(1, 3)[2].fill_(4.0),
    "one row": lambda g: g[:, 3:4].fill_(4.0),
    "picked": lambda g: g.__setitem__((torch.tensor([1]), torch.tensor([2])), 4.0),
    "diagonal": lambda g: g.diagonal().fill_(4.0),
}


@on_ranks(2)
def test_what_is_written_to_a_grid_is_written_to_its_tensor_or_refused():
    mesh, refused = world_mesh(lat=2), {}
    a, b = torch.arange(8.0), torch.arange(10.0)
    for specs in ((None, "lat"), ("lat", None), (None, None)):
        for (name, write), at in ((item, at) for item in GRID_WRITES.items() for at in (0, 1)):
            tensors, tiles = (
                [a.clone(), b.clone()],
                [shard(t * 1, mesh, (s,)) for t, s in zip((a, b), specs, strict=True)],
            )
            try:
                write(torch.meshgrid(*tiles, indexing="ij")[at])
            except ShardingError as error:
                refused.setdefault((specs, at), {})[name] = str(error)
            else:
                write(torch.meshgrid(*tensors, indexing="ij")[at])
            for tile, whole in zip(tiles, tensors, strict=True):
                assert torch.equal(tile.full_tensor(), whole), (name, specs, at)
    assert all("clone() first" in text for texts in refused.values() for text in texts.values())
    # torch refuses one column of the second grid, whose rows lie in one place, too
    alone = {k: v.keys() - {"one row", "picked"} for k, v in refused.items()}
    all_names = GRID_WRITES.keys() - {"one row", "picked"}
    assert {k: v for k, v in alone.items() if v} == {((None, "lat"), 0): all_names, (("lat", None), 1): all_names}
    x = shard(torch.ones(3, dtype=torch.float64), mesh, ("lat",)).requires_grad_()
    norm = torch.linalg.norm(x)
    grid = torch.meshgrid(x, norm[None], indexing="ij")[1]
    norm.add_(1)
    with pytest.raises(ShardingError, match=r"changed in place since, .* give clone\(\) of the tensor"):
        grid * 2


@on_ranks(2)
def test_views_of_windows_are_made_again_on_ranks_without_windows_too():
    mesh, whole = world_mesh(lat=2), torch.arange(30.0).reshape(6, 5)
    for split in ((0, 4, 5), (0, 5, 5)):
        tile = shard(whole, mesh, (None, "lat"), split={1: split})
        windows = [x.unfold(1, 5, 1) for x in (tile, whole)]
        views = [w.reshape(10, 3) for w in windows]
        tile.mul_(2)
        assert torch.equal(views[0].full_tensor(), 2 * views[1])
        assert torch.equal(windows[0].full_tensor(), 2 * windows[1])
        with pytest.raises(ShardingError, match="rows moved to other cut points"):
            views[0].add_(1)
    number = shard(torch.tensor(3.0), mesh, ())
    total = number.sum()
    number.add_(1)
    assert total == 3  # a sum of one number lies in new memory


@on_ranks(2)
def test_a_view_of_a_copy_of_a_row_follows_the_tensor():
    results = []
    for x in (torch.ones(1, 6, 2), shard(torch.ones(1, 6, 2), world_mesh(lat=2), ("lat", None, None))):
        (row,) = x
        view = row.view_as(row)
        x.mul_(3)
        row.add_(1)
        results.append([t.full_tensor() if isinstance(t, Tile) else t for t in (x, row, view)])
    for got, right in zip(*results[::-1], strict=True):
        assert torch.equal(got, right)


def _as_numbers(x):
    return x.view(torch.float64)


@pytest.mark.parametrize("part", [torch.real, torch.imag, _as_numbers])
@on_ranks(2)
def test_parts_of_complex_rows_around_a_circle_change_in_place(part):
    whole = torch.randn(4, 7, dtype=torch.complex128)
    tile = shard(whole, world_mesh(lat=2), ("lat", None), halo={0: (1, 0)}, periodic=(0,))
    for x in (whole, tile):
        part(x)[1:2].mul_(2)
        part(x)[3:].add_(1)
    rows = [r % 4 for r in range(*tile.layout.held(tile.coordinate)[0])]
    assert torch.equal(tile.local, whole[rows])
