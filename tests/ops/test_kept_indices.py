"""Index tensors that stay as they are: cut results, few bytes, and the values of plain torch on every mesh."""

import contextlib
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.ops import kept_indices
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh
from jigsaw.testing.played_device import PLAYED_DEVICE, refuse_host_waits, take_host_waits, why_not_played

MESHES = [{"cell": 1}, {"cell": 2}, {"cell": 3}, {"cell": 4}, {"cell": 2, "channel": 2}]
POINTS = {1: (0, 24), 2: (0, 9, 24), 3: (0, 0, 13, 24), 4: (0, 5, 5, 20, 24)}
CELLS, CHANNELS = 24, 4


def indices(seed=0):
    draw = torch.Generator().manual_seed(seed)
    table = torch.randint(-CELLS, CELLS, (CELLS, 3), generator=draw)
    edges = torch.randint(0, CELLS, (2, 70), generator=draw)
    coarse = torch.randint(0, CELLS, (7,), generator=draw)
    return table, edges, coarse, edges[1] % 10


class Net(nn.Module):
    """A step of a net that knows nothing of tiles: x [batch, cells, channels]."""

    def __init__(self, step, kept_as):
        super().__init__()
        self.step = step
        for name, index in zip(("table", "edges", "coarse", "others"), indices(), strict=True):
            if kept_as == "buffer":
                self.register_buffer(name, index)
            else:
                setattr(self, name, index)
        self.weight = nn.Parameter(torch.linspace(-1, 1, CHANNELS, dtype=torch.float64))

    def forward(self, x):
        return STEPS[self.step](self, x)


def by_table(net, x):
    return x[:, net.table].mul(net.weight).sum(2)


def by_selected_rows(net, x):
    return x.index_select(1, net.coarse) * net.weight


def by_gather(net, x):
    index = net.edges[0].view(1, -1, 1).expand(len(x), -1, x.shape[-1])
    return torch.gather(x, 1, index) * net.weight


def by_pairs(net, x):
    """Both ends of each edge at once: [batch, 2, edges, channels]."""
    return x[:, net.edges].mul(net.weight).square()


def by_added_rows(net, x):
    source, target = net.edges
    values = x.index_select(1, source) * net.weight
    return values.new_zeros(x.shape).index_add_(1, target, values, alpha=0.5)


def by_rows_added_to_zeros(net, x):
    source, target = net.edges
    return torch.zeros(x.shape, dtype=x.dtype).index_add_(1, target, x[:, source] * net.weight)


def by_scatter(net, x, reduce, size=CELLS, **named):
    source, target = net.edges[0], net.edges[1] if size == CELLS else net.others
    values = x.index_select(1, source) * net.weight
    index = target.view(1, -1, 1).expand_as(values)
    zeros = values.new_zeros(len(x), size, x.shape[-1])
    return (
        zeros.scatter_add_(1, index, values)
        if reduce is None
        else zeros.scatter_reduce_(1, index, values, reduce, **named)
    )


def by_written_rows(net, x):
    """Rows written in two parts to new memory, as the mappers of anemoi-models do; the index is made in each step."""
    out = torch.empty(x.shape, dtype=x.dtype)
    for part in torch.arange(CELLS).flip(0).tensor_split(2):
        out[:, part] = x[:, part] * net.weight
    return out


def by_put_values(net, x):
    source, target = net.edges
    values = (x.index_select(1, source) * net.weight).movedim(1, 0)
    return values.new_zeros(CELLS, *values.shape[1:]).index_put_((target,), values, accumulate=True).movedim(0, 1)


STEPS = {
    "table": by_table,
    "index_select": by_selected_rows,
    "gather": by_gather,
    "pairs": by_pairs,
    "index_add": by_added_rows,
    "zeros": by_rows_added_to_zeros,
    "scatter_add": lambda net, x: by_scatter(net, x, None),
    "sum": lambda net, x: by_scatter(net, x, "sum"),
    "mean": lambda net, x: by_scatter(net, x, "mean", include_self=False),
    "amax": lambda net, x: by_scatter(net, x, "amax", include_self=False),
    "amin": lambda net, x: by_scatter(net, x, "amin"),
    "written rows": by_written_rows,
    "put values": by_put_values,
    "other cells": lambda net, x: by_scatter(net, x, "sum", size=10),
}


def values():
    return torch.randn(2, CELLS, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(out):
    return (
        (out * torch.arange(1.0, out.shape[1] + 1, dtype=torch.float64).view(-1, *[1] * (out.ndim - 2))).square().sum()
    )


def run_steps(axes, step, kept_as):
    mesh = world_mesh(**axes)
    net = jigsaw.parallelize(Net(step, kept_as), mesh)
    results = []
    for _ in range(3):
        tile = jigsaw.shard(values(), mesh, (None, "cell", "channel"), split={1: POINTS[axes["cell"]]})
        tile.local.requires_grad_()
        net.zero_grad()
        out = net(tile)
        loss_of(out).backward()
        grad = jigsaw.Tile(tile.local.grad, tile.layout, mesh).full_tensor()
        is_tile = isinstance(out, jigsaw.Tile)  # on one rank zeros stay plain
        whole = (out.full_tensor() if is_tile else out).detach()
        results.append((whole, grad, net.weight.grad.clone()))
    return results, [d for d in range(out.ndim) if is_tile and "cell" in out.layout.dim_axes(d)]


def plain_step(step):
    net, x = Net(step, "buffer"), values().requires_grad_()
    out = net(x)
    loss_of(out).backward()
    return out.detach(), x.grad, net.weight.grad


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_steps_are_those_of_one_process(axes, step):
    wanted = plain_step(step)
    ranks = axes["cell"] * axes.get("channel", 1)
    for results, cut_dims in run_on_ranks(ranks, run_steps, axes, step, "buffer"):
        for found in results:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert axes["cell"] == 1 or cut_dims == [2 if step == "pairs" else 1]


def traffic_of(calls):
    """Bytes and messages by kind, without the 32 bytes by which ranks agree: those of a dry run are of one mind."""
    traffic = {}
    for call in calls:
        if call.kind == "agree":
            continue
        sent, messages = traffic.get(call.kind, (0, 0))
        traffic[call.kind] = sent + call.sent_bytes, messages + call.messages
    return traffic


def counted_steps(ranks, kept_as):
    mesh, counted = world_mesh(cell=ranks), {}
    for step in STEPS:
        net = jigsaw.parallelize(Net(step, kept_as), mesh)
        for _ in range(2):
            tile = jigsaw.shard(values(), mesh, (None, "cell", None), split={1: POINTS[ranks]})
            with comm.count() as counts:
                loss = loss_of(net(tile))
            counted[step, "forward"] = traffic_of(counts.calls)
            with comm.count() as counts:
                loss.backward()
            counted[step, "backward"] = traffic_of(counts.calls)
    return counted


@pytest.mark.parametrize(
    ("ranks", "kept_as", "is_made"),
    [
        *((2, "buffer", False), (3, "attribute", False), (4, "buffer", False)),
        *((3, "buffer", True), (2, "attribute", True)),
    ],
)
def test_a_dry_run_sends_what_a_step_sends(ranks, kept_as, is_made, monkeypatch):
    planned, plan = [], kept_indices.plan_neighbors
    monkeypatch.setattr(kept_indices, "plan_neighbors", lambda *given: planned.append(given) or plan(*given))
    asked = {"mesh": {"cell": ranks}, "spec": (None, "cell", None), "split": POINTS[ranks], "ranks": range(ranks)}
    options = {"loss": loss_of, "optimizer": None, "dtype": torch.float64}
    counted = run_on_ranks(ranks, counted_steps, ranks, kept_as)
    for step in STEPS:
        net = Net(step, kept_as)
        model = partial(Net, step, kept_as) if is_made else net
        for _ in range(1 if is_made else 2):
            planned.clear()
            report = jigsaw.dry_run(model, (2, CELLS, CHANNELS), **asked, **options)
            assert report.is_complete and not report.remarks
            for rank, own in zip(report.ranks, counted, strict=True):
                for phase in ("forward", "backward"):
                    played = {k: (t.sent_bytes, t.messages) for k, t in rank.phases[phase].traffic.items()}
                    assert played == own[step, phase], (step, phase)
        # the second time only an index that the step itself makes is planned again
        assert is_made or step == "written rows" or not planned
        assert all(map(torch.equal, (net.table, net.edges, net.coarse, net.others), indices()))


class MaskedEdges(nn.Module):
    """A net that chooses its edges by their values while it is made."""

    def __init__(self):
        super().__init__()
        _, edges, _, _ = indices()
        chosen = edges[:, edges[0] != edges[1]]
        self.edges = nn.Buffer(chosen[:, : int((chosen[0] < 20).sum())])
        self.mix = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x):
        return self.mix(x.index_select(1, self.edges[0]))


def test_a_dry_run_of_a_function_makes_indices_with_their_values():
    shape, asked = (2, CELLS, CHANNELS), {"mesh": {"cell": 3}, "spec": (None, "cell", None), "optimizer": None}
    whole = jigsaw.dry_run(MaskedEdges(), shape, **asked)
    made = jigsaw.dry_run(MaskedEdges, shape, **asked)
    assert made.is_complete and not made.remarks
    assert [rank.sent_bytes for rank in made.ranks] == [rank.sent_bytes for rank in whole.ranks]


# -- when an index is planned -----------------------------------------------------------------------------------------


def cut_dims(out):
    return out.layout.cut_dims


@on_ranks(2)
def test_an_index_that_no_module_keeps_is_planned_when_it_is_met_again():
    mesh = world_mesh(cell=2)
    tile = jigsaw.shard(values(), mesh, (None, "cell", None))
    (table, edges, _, _), picked = indices(), []
    for _ in range(2):
        picked.append(cut_dims(tile[:, table]))
        picked.append(cut_dims(tile[:, edges[0]]))  # another object each time, of one memory
    assert picked == [(), (), (1,), (1,)]
    table[0, 0] = 3
    assert [cut_dims(tile[:, table]) for _ in range(2)] == [(), (1,)]
    assert torch.equal(tile[:, table].full_tensor(), values()[:, table])
    for step in range(2):
        assert cut_dims(tile[:, (table + step) % CELLS]) == ()  # one that is new in each step
    made = []
    for _ in range(3):  # one that is made anew of the same values
        again = table.flip(0)
        made.append(tile[:, again])
    assert [cut_dims(x) for x in made] == [(), (1,), (1,)]
    assert torch.equal(made[2].full_tensor(), values()[:, table.flip(0)])
    with torch.inference_mode():
        new = table.clone()
        assert [cut_dims(tile[:, new]) for _ in range(2)] == [(), ()]


@pytest.mark.skipif(bool(why_not_played()), reason=why_not_played() or "it may")
@on_ranks(2, device=PLAYED_DEVICE)
def test_a_device_compares_an_index_that_is_made_anew():
    mesh, table = world_mesh(cell=2), torch.randint(0, 3000, (3000, 9), generator=torch.Generator().manual_seed(0))
    x, thin = (torch.randn(3000, n).to(PLAYED_DEVICE) for n in (12, 1))
    tile, small = (jigsaw.shard(values, mesh, ("cell", None)) for values in (x, thin))
    needed = set(table[:1500].flatten().tolist()) - set(range(1500))
    if mesh.get_rank():
        needed = set(table[1500:].flatten().tolist()) - set(range(1500, 3000))
    table, waits = table.to(PLAYED_DEVICE), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            anew = table.flip(0).flip(0)
            take_host_waits()
            with comm.count() as counts:
                picked = tile[anew]
            waits.append(len(take_host_waits()))
            assert cut_dims(picked) == ((0,) if step else ())
            if step:
                assert sum(c.received_bytes for c in counts.calls) == 12 * x.element_size() * len(needed)
    assert waits[2:] == [2, 2]  # for a checksum, and for one truth
    (warning,) = (str(w.message) for w in caught if "made anew in each step" in str(w.message))
    assert f"bringing {27000 * 12 * x.element_size()} bytes to every rank" in warning
    assert torch.equal(picked.full_tensor().cpu(), x[table].cpu())
    other = table.roll(1, 0)  # with other values than before
    assert torch.equal(tile[other].full_tensor().cpu(), x[other].cpu())
    wide = jigsaw.shard(torch.randn(3001, 12).to(PLAYED_DEVICE), mesh, ("cell", None))
    for step in range(1, 11):  # values that never come again are soon not looked at
        with refuse_host_waits() if step > 8 else contextlib.nullcontext():
            assert cut_dims(wide[(table + step) % 3001]) == ()
    with refuse_host_waits():  # few bytes are not worth a wait
        for _ in range(3):
            assert cut_dims(small[table.flip(0)]) == ()


@on_ranks(2)
def test_what_an_index_that_changes_costs_is_told_once():
    mesh, draw = world_mesh(cell=2), torch.Generator().manual_seed(1)
    x = torch.randn(4001, 40, dtype=torch.float64)
    tile = jigsaw.shard(x, mesh, ("cell", None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            index = torch.randint(0, 4001, (4000 + step,), generator=draw)
            picked = tile.index_select(0, index)
            told = [str(w.message) for w in caught if "has other values in each step" in str(w.message)]
            assert len(told) == (step >= 7)
    assert torch.equal(picked.full_tensor(), x[index])
    assert f"{4007 * 40 * 8} bytes, comes to every rank" in told[0]
    assert "an index of shape (4007,) along dim 0 of a Tile of shape (4001, 40), cut by cell," in told[0]


@on_ranks(2)
def test_an_index_that_a_module_keeps_is_planned_at_once():
    mesh = world_mesh(cell=2)
    tile = jigsaw.shard(values(), mesh, (None, "cell", None))
    for kept_as in ("buffer", "attribute"):
        assert cut_dims(jigsaw.parallelize(Net("table", kept_as), mesh)(tile)) == (1,)


@on_ranks(2)
def test_few_rows_stay_whole():
    mesh = world_mesh(cell=2)
    x = torch.arange(64.0)
    tile, few, some = jigsaw.shard(x, mesh, ("cell",)), torch.tensor([3, 40, 5]), torch.tensor([3, 40, 5, 63])
    for _ in range(2):
        picked = tile[few], tile[some]
    assert [cut_dims(p) for p in picked] == [(), (0,)]
    assert torch.equal(picked[1].full_tensor(), x[some])


@on_ranks(2)
def test_sums_over_few_groups_stay_whole():
    mesh, groups = world_mesh(cell=2), torch.arange(64) % 3
    x = torch.arange(64.0, dtype=torch.float64)
    tile, wanted = jigsaw.shard(x, mesh, ("cell",)), torch.zeros(3, dtype=torch.float64).index_add_(0, groups, x)
    for _ in range(3):
        for zeros in (torch.zeros(3, dtype=torch.float64), tile.new_zeros(3)):
            zeros.index_add_(0, groups, tile)
            assert cut_dims(zeros) == () and torch.equal(zeros.full_tensor(), wanted)


class Checkpointed(nn.Module):
    def __init__(self, kept, use_reentrant):
        super().__init__()
        self.index = kept
        self.use_reentrant = use_reentrant

    def forward(self, x, index):
        index = index if self.index is None else self.index

        def part(x):
            return x[:, index].sum(2).sin()

        # the second call meets the index again
        x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return checkpoint(part, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
@on_ranks(2)
def test_a_checkpoint_runs_again_as_it_ran(is_kept, use_reentrant):
    mesh, index = world_mesh(cell=2), indices(seed=3)[0]  # of values that no other test has
    net = jigsaw.parallelize(Checkpointed(index if is_kept else None, use_reentrant), mesh)
    x = values().requires_grad_()
    wanted = x[:, index].sum(2).sin()[:, index].sum(2).sin()
    wanted.square().sum().backward()
    for step in range(3):
        tile = jigsaw.shard(values(), mesh, (None, "cell", None))
        tile.local.requires_grad_()
        out = net(tile, index)
        assert cut_dims(out) == ((1,) if is_kept or (step and not use_reentrant) else ())
        out.square().sum().backward()
        torch.testing.assert_close(out.full_tensor(), wanted)
        torch.testing.assert_close(tile.grad.full_tensor(), x.grad)


class MadeAnew(nn.Module):
    """Layers on edges that are made in each step, each of them in a checkpoint within another one."""

    def forward(self, x, edges):
        def layer(x):
            source, target = edges.flip(1)
            picked = x.index_select(1, source).sin()
            return x + torch.zeros_like(x).index_add_(1, target, picked)

        def layers(x):
            return checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)

        return checkpoint(layers, x, use_reentrant=False)


@on_ranks(3)
def test_edges_that_a_checkpointed_call_makes_in_each_step_are_planned():
    mesh, edges = world_mesh(cell=3), indices(seed=4)[1]  # of values that no other test has
    net = jigsaw.parallelize(MadeAnew(), mesh)
    x = values().requires_grad_()
    wanted = MadeAnew()(x, edges)
    wanted.square().sum().backward()
    kinds = []
    for _ in range(3):
        tile = jigsaw.shard(values(), mesh, (None, "cell", None), split={1: POINTS[3]})
        tile.local.requires_grad_()
        with comm.count() as counts:
            out = net(tile, edges)
        loss = out.square().sum()
        with comm.count() as back:
            loss.backward()
        kinds.append({call.kind for call in (*counts.calls, *back.calls) if call.kind != "agree"})
        torch.testing.assert_close(out.full_tensor(), wanted)
        torch.testing.assert_close(tile.grad.full_tensor(), x.grad)
    assert "all_reduce" in kinds[0]
    assert kinds[1:] == [{"neighbors"}, {"neighbors"}]


# -- what a cut result meets ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_a_cut_result_cannot_do_runs_whole():
    mesh, (table, edges, _, _) = world_mesh(cell=2), indices()
    x = values()[0]
    tile = jigsaw.shard(x, mesh, ("cell", None))
    tile.local.requires_grad_()
    x.requires_grad_()
    for source in (x, tile):
        for _ in range(2):
            picked = source[edges[0]][:12] @ torch.ones(4, 12, dtype=torch.float64)  # by its rows: 12 x 12
            square = torch.linalg.matrix_exp(picked / 20) + source[table[:12, :]].sum()
        square.square().sum().backward()
    torch.testing.assert_close(tile.grad.full_tensor(), x.grad, rtol=1e-10, atol=1e-10)
    with pytest.raises(jigsaw.ShardingError, match="does not answer this function on a cut dim"):
        torch.linalg.matrix_exp(jigsaw.shard(torch.ones(4, 4), mesh, ("cell", None)))


@on_ranks(2)
def test_a_cut_result_meets_plain_tensors():
    mesh, (_, edges, _, _) = world_mesh(cell=2), indices()
    x = values()[0]
    tile, weights = jigsaw.shard(x, mesh, ("cell", None)), torch.linspace(0, 1, 70, dtype=torch.float64)
    out = torch.zeros(70, 4, dtype=torch.float64)
    for _ in range(2):
        picked = tile[edges[0]] * weights[:, None]
        out = torch.zeros(70, 4, dtype=torch.float64)
        first = out[:3]  # another name of the memory keeps it plain
        out[:] = picked
    wanted = x[edges[0]] * weights[:, None]
    assert cut_dims(picked) == (0,)
    torch.testing.assert_close(picked.full_tensor(), wanted)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(first, wanted[:3])


@on_ranks(2)
def test_a_target_with_another_name_stays_whole():
    mesh, (_, edges, _, others) = world_mesh(cell=2), indices()
    x = values()[0]
    tile = jigsaw.shard(x, mesh, ("cell", None))
    wanted = torch.zeros(10, 4, dtype=torch.float64).index_add_(0, others, x[edges[0]])
    for is_named in (True, True, False):
        picked = tile[edges[0]]
        target = picked.new_zeros(10, 4)
        view = target.view(40) if is_named else None
        target.index_add_(0, others, picked)
    assert cut_dims(target) == (0,) and view is None
    torch.testing.assert_close(target.full_tensor(), wanted)
    target = picked.new_zeros(10, 4)
    view = target.view(40)
    target.index_add_(0, others, picked)
    assert cut_dims(target) == ()
    torch.testing.assert_close(view.full_tensor(), wanted.view(40))


def targets_of_rows(picked):
    """Rows [10, 4] to write to: made as the picked tile is, plain, and a part of a larger tensor."""
    yield picked.new_zeros(10, 4)
    yield torch.zeros(10, 4, dtype=picked.dtype)
    yield picked.new_zeros(12, 4)[1:11]


@on_ranks(3)
def test_a_target_that_one_rank_keeps_stays_whole_on_all():
    mesh, (_, edges, _, others) = world_mesh(cell=3), indices()
    x = values()[0].requires_grad_()
    wanted = torch.zeros(10, 4, dtype=torch.float64).index_add(0, others, x[edges[0]].sin())
    wanted.square().sum().backward()
    tile = jigsaw.shard(x.detach(), mesh, ("cell", None))
    tile.local.requires_grad_()
    for kind, keeper in [(kind, keeper) for kind in range(3) for keeper in (None, None, 0, 1, 2)]:
        tile.local.grad = None
        picked = tile[edges[0]].sin()
        target = list(targets_of_rows(picked))[kind]
        kept = target.view(40) if mesh.get_rank() == keeper else None
        with comm.count() as counts:
            target.index_add_(0, others, picked)
        agreed = [c.sent_bytes for c in counts.calls if c.kind == "agree"]
        target.square().sum().backward()
        is_cut = isinstance(target, jigsaw.Tile) and target.layout.cut_dims == (0,)
        torch.testing.assert_close(target.full_tensor() if isinstance(target, jigsaw.Tile) else target, wanted)
        torch.testing.assert_close(tile.grad.full_tensor(), x.grad)
        if kept is not None:
            torch.testing.assert_close(kept.full_tensor() if isinstance(kept, jigsaw.Tile) else kept, wanted.view(40))
        if cut_dims(picked):  # not yet at the first step
            assert is_cut == (keeper is None and kind < 2) and agreed
    with comm.count() as counts:
        made = torch.index_add(picked.new_zeros(10, 4), 0, others, picked)
    assert cut_dims(made) == (0,) and not any(c.kind == "agree" for c in counts.calls)


def add_values_of_edges(axes):
    mesh, (_, edges, _, _) = world_mesh(**axes), indices()
    x = torch.randn(70, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    ones = torch.ones(CELLS, CHANNELS, dtype=torch.float64)
    adds = (
        lambda v: torch.zeros(CELLS, CHANNELS, dtype=v.dtype).index_add_(0, edges[1], v),
        lambda v: torch.zeros(CELLS, CHANNELS, dtype=v.dtype).scatter_add_(0, index, v),
        lambda v: ones.clone().scatter_reduce_(0, index, v, "amax", include_self=False),
        lambda v: v.new_zeros(CELLS, CHANNELS).index_add_(0, edges[1], v),
        lambda v: v.new_ones(CELLS, CHANNELS).scatter_reduce_(0, index, v, "mean"),
        lambda v: torch.index_add(v.new_zeros(CELLS, CHANNELS), 0, edges[1], v),
    )
    index = edges[1][:, None].expand(-1, CHANNELS)
    tile = jigsaw.shard(x.detach(), mesh, ("cell", None))
    tile.local.requires_grad_()
    for add in adds:
        tile.local.grad = x.grad = None
        wanted = add(x)
        loss_of(wanted[None]).backward()
        for _ in range(3):  # planned from the second time on
            tile.local.grad = None
            with comm.count() as counts:
                out = add(tile)
            loss_of(out[None]).backward()
        whole = out.full_tensor() if isinstance(out, jigsaw.Tile) else out  # on one rank zeros stay plain
        torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(jigsaw.Tile(tile.local.grad, tile.layout, mesh).full_tensor(), x.grad)
        if axes["cell"] > 1:
            assert cut_dims(out) == (0,)
            moved = sum(call.sent_bytes for call in counts.calls if call.kind != "agree")
            assert moved <= tile.local.nbytes  # each row once, to the owner of its cell


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_values_of_edges_that_are_cut_go_to_the_owners_of_their_cells(axes):
    run_on_ranks(axes["cell"] * axes.get("channel", 1), add_values_of_edges, axes)


@on_ranks(2)
def test_places_that_are_not_there_are_told():
    mesh = world_mesh(cell=2)
    tile = jigsaw.shard(values()[0], mesh, ("cell", None))
    wrong, negative = torch.full((24,), CELLS), torch.full((24,), -1)
    for _ in range(3):
        with pytest.raises(IndexError):
            tile[wrong]
        with pytest.raises(IndexError):
            tile.index_select(0, negative)
        with pytest.raises(IndexError):
            tile.gather(0, negative.view(-1, 1).expand(-1, 4))


# -- bytes and bits ---------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_table_of_neighbors_sends_the_rows_that_are_needed():
    mesh, grid = world_mesh(cell=3), jigsaw.Neighbors.healpix(16)
    table = torch.from_numpy(grid.sources_of((0, 3072)).reshape(3072, 8).copy())
    table = torch.where(table < 0, torch.arange(3072)[:, None], table)
    tile = jigsaw.shard(torch.randn(1, 1, 3072), mesh, (None, None, "cell"))
    tile.local.requires_grad_()
    tile[:, :, table]
    with comm.count() as counts:
        near = tile[:, :, table]
    start, stop = tile.layout.owned(tile.coordinate)[2]
    needed = set(table[start:stop].flatten().tolist()) - set(range(start, stop))
    assert sum(c.received_bytes for c in counts.calls) == 4 * len(needed)
    every = [4 * len(set(table[a : a + 1024].flatten().tolist()) - set(range(a, a + 1024))) for a in (0, 1024, 2048)]
    assert sum(every) == 2016
    with comm.count() as counts:
        near.sum().backward()
    far = sum(place < start or place >= stop for place in table[start:stop].flatten().tolist())
    assert sum(c.sent_bytes for c in counts.calls if c.kind == "neighbors") == 4 * far


@on_ranks(3)
def test_an_edge_list_sends_the_rows_that_are_needed():
    mesh, edges = world_mesh(cell=3), torch.randint(0, 300, (2, 900), generator=torch.Generator().manual_seed(0))
    tile = jigsaw.shard(torch.randn(300, 2), mesh, ("cell", None))
    tile.local.requires_grad_()
    for _ in range(2):
        with comm.count() as counts:
            picked = tile.index_select(0, edges[0])
        with comm.count() as back:
            sums = picked.new_zeros(300, 2).scatter_add_(0, edges[1][:, None].expand(-1, 2), picked)
        with comm.count() as gradient:
            sums.square().sum().backward()
    rank = mesh.get_rank()
    own, mine = range(100 * rank, 100 * rank + 100), slice(300 * rank, 300 * rank + 300)
    needed = [set(row.tolist()) - set(own) for row in edges[:, mine]]
    assert sum(c.received_bytes for c in counts.calls) == 8 * len(needed[0])
    far = sum(target not in own for target in edges[1, mine].tolist())
    assert sum(c.sent_bytes for c in back.calls if c.kind == "neighbors") == 8 * far
    received = sum(c.received_bytes for c in gradient.calls if c.kind == "neighbors")
    arrives = sum(source in own for source in torch.cat([edges[0, : mine.start], edges[0, mine.stop :]]).tolist())
    assert received == 8 * (len(needed[1]) + arrives)


def bits_of_step(step, x):
    net = Net(step, "buffer").float()
    mesh = x.mesh if isinstance(x, jigsaw.Tile) else None
    if mesh is not None:
        jigsaw.parallelize(net, mesh)
    local = x if mesh is None else x.local
    local.requires_grad_()
    _, out = net(x), net(x)  # an index that the step itself makes is planned the second time
    weights = torch.linspace(0.1, 9, out.numel()).view(out.shape)
    (grad,) = torch.autograd.grad((out * weights).sum(), local)
    if mesh is None:
        return out.detach(), grad
    return out.full_tensor().detach(), jigsaw.Tile(grad, x.layout, mesh).full_tensor()


def values_of_sizes():
    draw = torch.Generator().manual_seed(3)
    shape = (2, CELLS, CHANNELS)
    return torch.randn(shape, generator=draw) * 10.0 ** torch.randint(-3, 4, shape, generator=draw)


def bits_of_steps(ranks):
    mesh, split = world_mesh(cell=ranks), {1: POINTS[ranks]}
    tile = jigsaw.shard(values_of_sizes(), mesh, (None, "cell", None), split=split)
    return {step: bits_of_step(step, tile.clone().detach()) for step in STEPS}


def test_bits_are_alike_on_every_mesh():
    wanted = {step: bits_of_step(step, values_of_sizes()) for step in STEPS}
    of_two = None
    for ranks in (2, 3, 4):
        for found in run_on_ranks(ranks, bits_of_steps, ranks):
            of_two = of_two or found
            for step in STEPS:
                assert all(map(torch.equal, found[step], of_two[step])), step
                # what an index of two dims picks is cut along the second, and its gradients are summed in that order
                out, grad = (torch.equal(a, b) for a, b in zip(found[step], wanted[step], strict=True))
                assert out and (grad or step == "pairs"), step
