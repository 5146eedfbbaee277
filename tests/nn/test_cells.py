"""Neighbors of cells on tiles against plain indexing of the whole tensor, bit for bit on every mesh."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.comm import neighbor_exchange
from jigsaw.comm.neighbor_exchange import ListsOnDevice, sum_in_order
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.geometry.neighbors import OrderedLists
from jigsaw.nn import gather_neighbors, scatter_to_cells
from jigsaw.nn.cells import gather
from jigsaw.testing import assert_adjoint, on_ranks, run_on_ranks, world_mesh

MESHES = [{"cell": 1}, {"cell": 2}, {"cell": 3}, {"cell": 4}, {"cell": 2, "channel": 2}]
POINTS = {1: (0, 48), 2: (0, 17, 48), 3: (0, 0, 31, 48), 4: (0, 5, 5, 40, 48)}


def random_table(targets=48, sources=48, k=5, seed=0):
    index = np.random.default_rng(seed).integers(-1, sources, (targets, k))
    index[3] = -1
    return jigsaw.Neighbors(index, sources)


def random_graph(targets=48, sources=48, edges=300, seed=0):
    rng = np.random.default_rng(seed)
    hub = np.where(rng.uniform(size=edges) < 0.2, 7, rng.integers(0, sources, edges))
    return jigsaw.Neighbors.of_edges(hub, rng.integers(0, targets, edges), sources, targets)


def graph_with_hubs(edges=1500, seed=0):
    """A source of 600 edges, and a target of as many."""
    rng = np.random.default_rng(seed)
    ends = [np.where(rng.uniform(size=edges) < 0.4, hub, rng.integers(0, 48, edges)) for hub in (7, 30)]
    return jigsaw.Neighbors.of_edges(*ends, 48, 48)


TABLES = {
    "healpix": lambda: jigsaw.Neighbors.healpix(2),
    "table": random_table,
    "graph": random_graph,
    "smaller": lambda: random_table(targets=11),
    "larger": lambda: random_graph(targets=100),
    "hubs": graph_with_hubs,
}


def layer(x, table, weight):
    """Attention over neighbors, their greatest value, sum and mean: x [batch, channels, cells]."""
    near = gather_neighbors(x, table)
    dim = 2
    scores = (near * weight.view(-1, *[1] * (near.ndim - 2))).sum(1, keepdim=True)
    share = scatter_to_cells(scores, table, "softmax", dim)
    parts = [scatter_to_cells(near * share, table, "sum", dim)]
    parts += [scatter_to_cells(near, table, reduce, dim) for reduce in ("max", "mean")]
    return torch.cat(parts, 1)


def by_plain_torch(x, table, weight):
    """The same of a whole tensor, cell by cell, with torch's own indexing."""
    sources, cells = table.sources_of((0, table.targets)), table.targets_of((0, table.targets))
    out = []
    for cell in range(table.targets):
        near = x[..., torch.from_numpy(sources[(cells == cell) & (sources >= 0)])]
        if near.shape[-1] == 0:
            out.append(x.new_zeros(x.shape[0], 3 * x.shape[1]))
            continue
        share = (near * weight.view(-1, 1)).sum(1, keepdim=True).softmax(-1)
        out.append(torch.cat([(near * share).sum(-1), near.amax(-1), near.mean(-1)], 1))
    return torch.stack(out, -1)


def values(dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, dtype=dtype, generator=draw) for shape in ((2, 4, 48), (4,)))
    return x, weight


def run_layer(axes, name, dtype):
    table, (x, weight) = TABLES[name](), values(dtype)
    mesh = world_mesh(**axes)
    tile = jigsaw.shard(x, mesh, (None, "channel", "cell"), split={2: POINTS[axes["cell"]]})
    tile.local.requires_grad_()
    weight.requires_grad_()
    out = layer(tile, table, weight)
    out.square().mul(torch.arange(1.0, out.shape[-1] + 1)).sum().backward()
    grad = jigsaw.Tile(tile.local.grad, tile.layout, mesh)
    return out.full_tensor(), grad.full_tensor()


def whole(name, dtype, function=layer):
    table, (x, weight) = TABLES[name](), values(dtype)
    x.requires_grad_(), weight.requires_grad_()
    out = function(x, table, weight)
    out.square().mul(torch.arange(1.0, out.shape[-1] + 1)).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("name", TABLES)
def test_a_whole_tensor_is_that_of_plain_torch(name):
    for found, wanted in zip(whole(name, torch.float64), whole(name, torch.float64, by_plain_torch), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_bits_are_alike_on_every_mesh(axes, name, dtype):
    ranks = int(np.prod(list(axes.values())))
    wanted = whole(name, dtype)
    for found in run_on_ranks(ranks, run_layer, axes, name, dtype):
        for mine, one in zip(found, wanted, strict=True):
            if "channel" in axes:  # the sum over channels is taken in parts
                torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(mine, one)


CHANNELS = (1, 3, 8, 16, 17, 128)


def sums_of_neighbors(x, name, dim):
    """The sum over neighbors and its gradient, of values of many sizes; cells of a tile are cut at uneven points."""
    local = x.local if isinstance(x, jigsaw.Tile) else x
    local.requires_grad_()
    table = TABLES[name]()
    near = gather_neighbors(x, table, dim)
    out = scatter_to_cells(near, table, "sum", dim)
    weight = torch.linspace(0.1, 9, out.shape[dim]).view([-1 if d == dim else 1 for d in range(out.ndim)])
    (out * weight).sum().backward()
    if not isinstance(x, jigsaw.Tile):
        return out.detach(), x.grad
    return out.full_tensor().detach(), jigsaw.Tile(local.grad, x.layout, x.mesh).full_tensor()


def values_of_sizes(shape):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=draw) * 10.0 ** torch.randint(-4, 5, shape, generator=draw)


def sums_on_ranks(ranks, name):
    spec, mesh = {0: ("cell", None), 1: (None, "cell", None)}, world_mesh(cell=ranks)
    return [
        sums_of_neighbors(jigsaw.shard(values_of_sizes(shape), mesh, spec[dim], split={dim: POINTS[ranks]}), name, dim)
        for channels in CHANNELS
        for shape, dim in (((48, channels), 0), ((2, 48, channels), 1))
    ]


def sums_one_after_the_other(x, name):
    """The same of a whole tensor [cells, channels], value by value."""
    table = TABLES[name]()
    sources, cells = table.sources_of((0, table.targets)), table.targets_of((0, table.targets))
    weight = torch.linspace(0.1, 9, table.targets)
    out, grad = x.new_zeros(table.targets, x.shape[1]), torch.zeros_like(x)
    for source, cell in zip(sources.tolist(), cells.tolist(), strict=True):
        if source >= 0:
            out[cell] += x[source]
            grad[source] += weight[cell]
    return out, grad


@pytest.mark.parametrize("name", ["healpix", "table", "smaller", "larger", "hubs"])
def test_values_are_added_one_after_the_other(name):
    cases = [(shape, dim) for n in CHANNELS for shape, dim in (((48, n), 0), ((2, 48, n), 1))]
    by_mesh = [run_on_ranks(ranks, sums_on_ranks, ranks, name) for ranks in (1, 2, 3, 4)]
    for at, (shape, dim) in enumerate(cases):
        x = values_of_sizes(shape)
        parts = [sums_one_after_the_other(part, name) for part in (x if dim else x[None])]
        wanted = [torch.stack(each) if dim else each[0] for each in zip(*parts, strict=True)]
        for outcomes in ([sums_of_neighbors(x, name, dim)], *([rank[at] for rank in ranks] for ranks in by_mesh)):
            for found in outcomes:
                assert all(map(torch.equal, found, wanted)), (shape, len(outcomes))


@pytest.mark.parametrize("channels", [*range(1, 40), 64, 100, 128, 129, 200, 256])
def test_sums_in_bags_have_the_bits_of_the_steps(channels, monkeypatch):
    rng, rows = np.random.default_rng(channels), 60
    row_of_value = np.where(rng.uniform(size=900) < 0.4, 3, rng.integers(0, rows - 5, 900))  # the last have none
    lists = ListsOnDevice(OrderedLists.of(row_of_value, rng.permutation(900), rows), torch.device("cpu"))
    memory = values_of_sizes((900 * (channels + 1) + 3,))
    aligned, unaligned = (memory[at:][: 900 * channels].view(900, channels) for at in (0, 3))
    for values in (aligned, unaligned, memory[: 900 * (channels + 1)].view(900, -1)[:, 1:], aligned.view(1, 900, -1)):
        found = sum_in_order(values, lists, values.ndim - 2)
        with monkeypatch.context() as patch:
            patch.setattr(neighbor_exchange, "_can_use_bags", lambda values: False)
            assert torch.equal(found, sum_in_order(values, lists, values.ndim - 2))


def test_sums_of_nothing_are_zeros():
    none = OrderedLists.of(np.empty(0, int), np.empty(0, int), 3)
    assert sum_in_order(torch.ones(0, 4), ListsOnDevice(none, torch.device("cpu")), 0).tolist() == [[0] * 4] * 3
    assert sum_in_order(torch.ones(2, 0, 4), ListsOnDevice(none, torch.device("cpu")), 1).shape == (2, 3, 4)
    assert sum_in_order(torch.ones(5, 0), ListsOnDevice(none, torch.device("cpu")), 0).shape == (3, 0)


def near_of(tile):
    return gather_neighbors(tile, TABLES["table"](), dim=1)


def edges_of(tile):
    return gather_neighbors(tile, TABLES["larger"](), dim=1)


@pytest.mark.parametrize("op", [near_of, edges_of])
def test_the_way_back_is_the_adjoint(op):
    assert_adjoint(op, (2, 48, 3), [{"cell": 2}, {"cell": 3}, {"cell": 4}], spec=(None, "cell", None))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@on_ranks(3)
def test_gradients_of_gradients(dtype, tolerance):
    mesh, (x, _) = world_mesh(cell=3), values(dtype)
    table = TABLES["graph"]()

    def norm_of_gradient(x):
        edges = gather_neighbors(x, table)
        loss = scatter_to_cells(edges.pow(3), table).square().sum()
        (grad,) = torch.autograd.grad(loss, [x.local if isinstance(x, jigsaw.Tile) else x], create_graph=True)
        return grad

    x.requires_grad_()
    tile = jigsaw.shard(x.detach(), mesh, (None, None, "cell"))
    tile.local.requires_grad_()
    (wanted,) = torch.autograd.grad(norm_of_gradient(x).square().sum(), [x])
    part = norm_of_gradient(tile)
    jigsaw.Tile(part, tile.layout, mesh).square().sum().backward()
    found = jigsaw.Tile(tile.local.grad, tile.layout, mesh).full_tensor()
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@on_ranks(4)
def test_each_row_travels_once():
    mesh, nside = world_mesh(cell=4), 8
    table = jigsaw.Neighbors.healpix(nside)
    tile = jigsaw.shard(torch.randn(3, table.targets), mesh, (None, "cell"))
    tile.local.requires_grad_()
    start, stop = tile.layout.owned(tile.coordinate)[1]
    with comm.count() as counts:
        near = gather_neighbors(tile, table)
    rows, needed = table.sources_of((0, table.targets)).reshape(-1, 8), 0
    for other in range(4):
        first, last = other * table.targets // 4, (other + 1) * table.targets // 4
        if (first, last) != (start, stop):
            asked = np.unique(rows[first:last])
            needed += int(np.count_nonzero((asked >= start) & (asked < stop)))
    (call,) = [c for c in counts.calls if c.kind == "neighbors"]
    assert call.sent_bytes == needed * 3 * 4
    assert needed < 0.5 * (stop - start)
    with comm.count() as counts:
        near.sum().backward()
    edges = rows[start:stop]
    far = int(np.count_nonzero((edges >= 0) & ((edges < start) | (edges >= stop))))
    assert sum(c.sent_bytes for c in counts.calls if c.kind == "neighbors") == far * 3 * 4


@on_ranks(2)
def test_rows_of_a_halo_are_left_out():
    mesh, (x, _) = world_mesh(cell=2), values(torch.float64)
    tile = jigsaw.shard(x, mesh, (None, None, "cell"), halo={2: 3}, periodic=[2])
    table = TABLES["table"]()
    assert torch.equal(gather_neighbors(tile, table).full_tensor(), gather_neighbors(x, table))


@on_ranks(2)
def test_a_dim_that_nothing_cuts_sends_nothing():
    mesh, (x, _) = world_mesh(channel=2), values(torch.float64)
    tile = jigsaw.shard(x, mesh, (None, "channel", None))
    with comm.count() as counts:
        near = gather_neighbors(tile, TABLES["graph"]())
    assert sum(c.sent_bytes for c in counts.calls if c.kind == "neighbors") == 0
    assert torch.equal(near.full_tensor(), gather_neighbors(x, TABLES["graph"]()))


@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_layer_is_the_same():
    mesh, (x, weight) = world_mesh(cell=2), values(torch.float32)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.table = torch.nn.Parameter(weight.clone()), TABLES["graph"]()

        def forward(self, x):
            return layer(x, self.table, self.weight)

    results = []
    for compiled in (False, True):
        net = jigsaw.parallelize(Layer(), mesh)
        run = jigsaw.compile(net, backend="aot_eager") if compiled else net
        tile = jigsaw.shard(x, mesh, (None, None, "cell"))
        tile.local.requires_grad_()
        for _ in range(2):
            out = run(tile)
        out.square().sum().backward()
        results.append((out.full_tensor(), tile.local.grad))
    torch.testing.assert_close(results[0], results[1])


class MixedNeighbors(torch.nn.Module):
    """Attention over mixed values of neighbors: x [cells, channels]."""

    def __init__(self, name):
        super().__init__()
        self.table, self.mix = TABLES[name](), torch.nn.Linear(4, 6)

    def forward(self, x):
        near = self.mix(gather_neighbors(x, self.table, 0))
        return scatter_to_cells(near * scatter_to_cells(near, self.table, "softmax", 0), self.table, "sum", 0)


def traffic_of(calls):
    """Bytes and messages by kind."""
    traffic = {}
    for call in calls:
        sent, messages = traffic.get(call.kind, (0, 0))
        traffic[call.kind] = sent + call.sent_bytes, messages + call.messages
    return traffic


def counted_step(ranks, name):
    """Bytes and messages by kind, and FLOP, of a forward and a backward pass of this rank."""
    mesh, meter = world_mesh(cell=ranks), StepMeter(keeps_calls=False)
    net = jigsaw.parallelize(MixedNeighbors(name), mesh)
    tile = jigsaw.shard(torch.randn(48, 4), mesh, ("cell", None), split={0: POINTS[ranks]})
    net(tile).square().mean().backward()  # the table is agreed on
    net.zero_grad()
    counted = {}
    with meter.counting():
        meter.begin_phase("forward")
        with comm.count() as counts:
            loss = net(tile).square().mean()
        counted["forward"] = traffic_of(counts.calls)
        meter.begin_phase("backward")
        with comm.count() as counts:
            loss.backward()
        counted["backward"] = traffic_of(counts.calls)
    return counted, {name: sum(kernel.flop for kernel in meter.phases[name].kernels) for name in counted}


@pytest.mark.parametrize("name", ["healpix", "table", "larger", "hubs"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_dry_run_sends_what_a_step_sends(ranks, name):
    asked = {"mesh": {"cell": ranks}, "spec": ("cell", None), "split": POINTS[ranks], "ranks": range(ranks)}
    report = jigsaw.dry_run(lambda: MixedNeighbors(name), (48, 4), **asked, optimizer=None)
    assert report.is_complete and not report.remarks
    counted = run_on_ranks(ranks, counted_step, ranks, name)
    for rank, (traffic, flop) in zip(report.ranks, counted, strict=True):
        for phase, kinds in traffic.items():
            played = rank.phases[phase]
            assert {k: (t.sent_bytes, t.messages) for k, t in played.traffic.items()} == kinds
            assert played.flop == flop[phase]
    assert sum(traffic["forward"]["neighbors"][0] for traffic, _ in counted) > 0


def test_a_second_dry_run_plans_nothing_anew():
    net = MixedNeighbors("graph")
    asked = {"mesh": {"cell": 3}, "spec": ("cell", None)}
    first = jigsaw.dry_run(net, (48, 4), **asked)
    planned = gather._plan.cache_info().misses
    assert jigsaw.dry_run(MixedNeighbors("graph"), (48, 4), **asked).sent_bytes == first.sent_bytes
    assert gather._plan.cache_info().misses == planned


class PaddedNeighbors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.table = torch.nn.Linear(3, 3), jigsaw.Neighbors.healpix(2)
        self.pad = jigsaw.nn.HEALPixPad(1, face_dim=None)

    def forward(self, x):
        near = gather_neighbors(self.pad(self.mix(x).t())[..., 1:-1, 1:-1].flatten(-3), self.table)
        return sum(scatter_to_cells(near, self.table, reduce).sum() for reduce in ("sum", "mean", "max"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_a_dry_run_has_planned_serves_a_step(dtype):
    net = PaddedNeighbors().to(dtype)
    for _ in range(2):
        assert jigsaw.dry_run(net, (48, 3), mesh={"cell": 1}, spec=("cell", None), loss=lambda out: out).is_complete
        x = torch.randn(48, 3, dtype=dtype)
        tile = jigsaw.shard(x, world_mesh(cell=1), ("cell", None))
        tile.local.requires_grad_(), x.requires_grad_()
        for loss in (net(tile), net(x)):
            loss.backward()
        assert torch.isfinite(x.grad).all()
        torch.testing.assert_close(tile.local.grad, x.grad)


def other_tables(axes):
    mesh, (x, _) = world_mesh(**axes), values(torch.float64)
    tile = jigsaw.shard(x, mesh, (None, None, "cell"))
    with pytest.raises(RanksDifferError, match="the table differs by rank"):
        gather_neighbors(tile, random_table(seed=100 + mesh.get_rank() // 2))


def test_tables_that_differ_by_rank_are_told():
    run_on_ranks(3, other_tables, {"cell": 3})


@on_ranks(2)
def test_what_does_not_fit_is_refused():
    mesh, (x, _) = world_mesh(cell=2), values(torch.float64)
    tile = jigsaw.shard(x, mesh, (None, None, "cell"))
    with pytest.raises(ShardingError, match=r"dim 1 of shape \(2, 4, 48\) must be the 48 source cells"):
        gather_neighbors(tile, TABLES["table"](), dim=1)
    with pytest.raises(ShardingError, match="was flattened from several"):
        columns = jigsaw.shard(x.view(2, 4, 6, 8), mesh, (None, None, None, "cell"))
        gather_neighbors(columns.flatten(2), TABLES["table"]())
    with pytest.raises(ShardingError, match="reduce='median' must be one of"):
        scatter_to_cells(tile, TABLES["table"](), "median")
    with pytest.raises(ShardingError, match="must be the 5 neighbors"):
        scatter_to_cells(tile, TABLES["table"](), "sum", dim=2)
    with pytest.raises(ShardingError, match="are not those of pieces of target cells"):
        edges = torch.zeros(TABLES["graph"]().edges)
        scatter_to_cells(jigsaw.shard(edges, mesh, ("cell",), split=(0, 1, 300)), TABLES["graph"]())


class BlockOfCells(nn.Module):
    """A layer by a table of jigsaw, and one by edges that the module keeps: x [batch, cells, channels]."""

    def __init__(self):
        super().__init__()
        self.grid, graph = jigsaw.Neighbors.healpix(2), random_graph()
        self.source, self.target = (
            nn.Buffer(torch.from_numpy(ends)) for ends in (graph.sources_of((0, 48)), graph.targets_of((0, 48)))
        )
        self.near, self.message = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 7).view(7, 1))  # fewer rows than some meshes have ranks

    def forward(self, x):
        near = scatter_to_cells(gather_neighbors(self.near(x), self.grid, dim=1), self.grid, "mean", dim=1)
        picked = self.message(x.index_select(1, self.source)).tanh()
        return x + near + torch.zeros_like(x).index_add_(1, self.target, picked) * self.scale.mean()


def trained_weights(axes, shard_weights):
    """Weights after three steps of two blocks, and the share of them that this rank keeps at rest."""
    torch.manual_seed(0)
    net = nn.Sequential(BlockOfCells(), BlockOfCells()).double()
    whole, x = copy.deepcopy(net), torch.randn(2, 48, 4, dtype=torch.float64)
    mesh = world_mesh(**axes)
    spec = ("data" if "data" in axes else None, "cell", None)
    tile = jigsaw.shard(x, mesh, spec, split={1: POINTS[axes["cell"]]})
    net = jigsaw.parallelize(net, mesh, shard_weights=shard_weights, units=list(net))
    losses = []
    for model, values in ((net, tile), (whole, x)):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(values).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for (name, ours), theirs in zip(net.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-10, atol=1e-12, msg=name)
    return sum(p.to_local().numel() for p in net.parameters()), sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("shard_weights", [True, "keep"])
@pytest.mark.parametrize(
    "axes",
    [{"cell": 2}, {"cell": 3}, {"cell": 4}, {"data": 2, "cell": 2}],
    ids=lambda axes: "x".join(map(str, axes.values())),
)
def test_cut_weights_train_on_cells_as_in_one_process(axes, shard_weights):
    ranks = axes["cell"] * axes.get("data", 1)
    kept = run_on_ranks(ranks, trained_weights, axes, shard_weights)
    assert sum(own for own, _ in kept) == kept[0][1]  # each weight lies with one rank
    assert max(own for own, _ in kept) < kept[0][1]


def test_a_softmax_of_scores_that_are_no_numbers_is_torchs():
    table = jigsaw.Neighbors([[0, 1], [1, 0], [0, -1]], 2)
    mesh = world_mesh(cell=1)
    for scores in ([1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf], [1.0, 2.0]):
        edges = gather_neighbors(jigsaw.shard(torch.tensor(scores), mesh, ("cell",)), table, 0)
        share = scatter_to_cells(edges, table, "softmax", 0).full_tensor().reshape(-1)
        expected = torch.tensor(scores).softmax(0)
        torch.testing.assert_close(share[:4], torch.cat([expected, expected.flip(0)]), equal_nan=True)
