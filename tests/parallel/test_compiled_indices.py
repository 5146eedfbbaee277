"""Indices that stay as they are, in graphs of jigsaw.compile: planned as without one, and anew where they change."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile import misuse

CELLS = 41


def _gathered(net, x):
    return x[:, net.index].mean(-1)


def _summed(net, x):
    sources, targets = net.edges
    return torch.zeros_like(x).index_add(-1, targets, x.index_select(-1, sources))


def _summed_in_place(net, x):
    values = x.index_select(-1, net.edges[0])
    return values.new_zeros(3, 1).repeat(1, 20).index_add_(-1, net.halves, values)  # whole until it is written


def _summed_with_a_view(net, x):
    sources, targets = net.edges
    values = x.index_select(-1, sources)
    out = values.new_zeros(3, 1).repeat(1, CELLS)
    view = out.mT
    out.index_add_(-1, targets, values)
    return view.mT


def _largest(net, x):
    sources, targets = (row[None].expand(3, -1) for row in net.edges)
    return x.new_zeros(3, CELLS).scatter_reduce(-1, targets, x.gather(-1, sources), "amax", include_self=False)


def _copied(net, x):
    out = torch.zeros_like(x)
    out[:, net.index[:, 0]] = x[:, net.tables[0]["left"]]
    return out


def _relabelled(net, x):
    """Drop edges and the cells without any, as torch_geometric does; sizes follow from values."""
    sources, targets = net.edges
    kept = (sources % 3 != 0) & (sources != targets)
    weights = (net.mix.weight.sum() * sources)[kept]
    sources, targets = net.edges[:, kept]
    cells, last = torch.unique(sources), sources.max()
    numbers = sources.new_empty(last + 1)
    numbers[cells] = torch.arange(len(cells))
    first, _ = net.edges[:, 0].tolist()
    values = x[:, cells].index_select(-1, numbers[sources] - first) * weights
    return torch.zeros_like(x).index_add(-1, targets, values)


def _checkpointed(net, x):
    return checkpoint(lambda y: _gathered(net, y).sin(), x, use_reentrant=False)


WAYS = [_gathered, _summed, _summed_in_place, _summed_with_a_view, _largest, _copied, _relabelled, _checkpointed]


class Meets(nn.Module):
    """A product over channels, then what a way does with indices, of which the module keeps buffers and attributes."""

    def __init__(self, way):
        super().__init__()
        cells = torch.arange(CELLS)
        self.way, self.mix = way, nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("index", torch.stack([(cells - 1) % CELLS, (cells + 1) % CELLS], 1))
        self.register_buffer(
            "edges", torch.stack([cells.repeat(2), torch.cat([(cells - 1) % CELLS, cells * 3 % CELLS])])
        )
        self.halves = self.edges[1] // 2 % 20
        self.tables = [{"left": cells.roll(1)}]

    def forward(self, x):
        return self.way(self, self.mix(x.mT).mT)


def _check_ways(ways, backend="aot_eager", **axes):
    mesh = world_mesh(**axes)
    for way in ways:
        torch._dynamo.reset()
        torch.manual_seed(0)
        whole, x = Meets(way), torch.randn(3, CELLS, dtype=torch.float64)
        wanted = whole(x)
        gradients = torch.autograd.grad(wanted.square().sum(), list(whole.parameters()))
        net, sent = jigsaw.parallelize(whole, mesh), []
        for is_compiled in (False, True):
            net = jigsaw.compile(net, backend=backend) if is_compiled else net
            for _ in range(2):  # a first call compares what it meets
                net.zero_grad()
                tile = jigsaw.shard(x, mesh, (None, "cell"))
                with comm.count() as forward:
                    out = net(tile)
                with comm.count() as backward:
                    out.square().sum().backward()
            torch.testing.assert_close(out.full_tensor(), wanted)
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
            agreed = sum(call.sent_bytes for call in forward.calls if call.kind == "agree")
            sent.append((out.layout.cut_axes, forward.sent_bytes - agreed, backward.sent_bytes))
        assert sent[0][0] == sent[1][0], way.__name__
        if way is _relabelled:  # it is computed anew at each call, so without a graph it meets what it computed before
            continue
        assert sent[0][1] == sent[1][1], way.__name__
        again = sent[0][1] if way is _checkpointed else 0  # a graph does not send again for its backward pass
        assert sent[0][-1] == sent[1][-1] + again, way.__name__


@on_ranks(2, timeout=240)
def test_indices_in_a_graph_send_what_they_send_without_one():
    _check_ways(WAYS, cell=2)


@pytest.mark.slow
@on_ranks(3, timeout=240)
def test_indices_on_three_ranks():
    _check_ways(WAYS, cell=3)


@pytest.mark.slow
@on_ranks(4, timeout=240)
def test_indices_on_two_by_two_ranks():
    _check_ways([_gathered, _summed_in_place], cell=2, member=2)


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_indices_in_graphs_of_inductor():
    _check_ways([_gathered, _summed_in_place, _largest, _copied, _relabelled], "inductor", cell=2)


# -- indices that change ----------------------------------------------------------------------------------------------


class Shifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.arange(40).roll(1))

    def forward(self, x, index=None):
        return x[:, self.index if index is None else index]


def _graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _check_calls(calls, graphs):
    """Compare calls with the whole tensor; `graphs` are how many there are after each of them."""
    mesh, x = world_mesh(cell=2), torch.randn(3, 40, dtype=torch.float64)
    torch._dynamo.utils.counters.clear()
    net, made, sent = jigsaw.compile(Shifts(), backend="aot_eager"), [], []
    for change in calls:
        arguments = change(net)
        with comm.count() as counted:
            out = net(jigsaw.shard(x, mesh, (None, "cell")), *arguments)
        assert torch.equal(out.full_tensor(), x[:, arguments[0] if arguments else net.index])
        made.append(_graphs())
        sent.append(sum(call.sent_bytes for call in counted.calls if call.kind == "neighbors"))
    assert made == graphs
    return sent


def _stay(net):
    return ()


def _shift(net):
    net.index.copy_(net.index.roll(1))
    return ()


def _load_same(net):
    net.load_state_dict(net.state_dict())
    return ()


def _replace_by_same(net):
    net.index = net.index.clone()
    return ()


@on_ranks(2)
def test_a_buffer_that_changes_makes_another_graph():
    sent = _check_calls([_stay, _load_same, _replace_by_same, _shift, _stay], [1, 1, 1, 2, 2])
    assert sent == [24, 24, 24, 48, 48]


@on_ranks(2)
def test_a_buffer_that_changes_again_and_again_has_no_plan_and_one_graph():
    misuse._warned.clear()  # a rank of this process may have been told in an earlier test
    with pytest.warns(UserWarning, match=r"brings all that it picks, 960 bytes.*keep it unchanged in the module"):
        sent = _check_calls([_stay, _shift, _shift, _shift, _shift], [1, 2, 3, 4, 4])
    assert sent == [24, 48, 72, 0, 0]


@on_ranks(2)
def test_an_argument_has_a_plan_until_it_changes():
    index, other = torch.arange(40).roll(1), torch.arange(40).roll(3)
    calls = [lambda net, x=x: (x.clone(),) for x in (index, index, other, index, other)]
    assert _check_calls(calls, [1, 1, 2, 2, 2]) == [24, 24, 0, 0, 0]


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.arange(40))

    def forward(self, x):
        marks = torch.zeros(40, dtype=torch.bool)
        marks[self.index] = True
        return x[:, self.index[self.index % 2 == 0]] * marks.sum().item()


@on_ranks(2)
def test_a_size_that_follows_from_values_is_that_of_each_call():
    x, net = torch.randn(3, 40, dtype=torch.float64), jigsaw.compile(Counts(), backend="aot_eager")
    for index in (torch.arange(40), torch.arange(40) // 2 * 2, torch.arange(40)):
        net.index.copy_(index)
        wanted = x[:, index[index % 2 == 0]] * len(index.unique())
        assert torch.equal(net(jigsaw.shard(x, world_mesh(cell=2), (None, "cell"))).full_tensor(), wanted)
        assert torch.equal(net(x), wanted)


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.arange(40))

    def forward(self, x):
        self.index.copy_((self.index + 1) % 40)
        return x[:, self.index]


@on_ranks(2)
def test_an_index_that_the_forward_pass_changes_has_no_plan():
    x, net = torch.randn(3, 40, dtype=torch.float64), jigsaw.compile(Turns(), backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        out = net(jigsaw.shard(x, world_mesh(cell=2), (None, "cell")))
        assert torch.equal(out.full_tensor(), x.roll(-1 - step, 1))
    assert _graphs() == 1
