"""What a net computes of the indices that it keeps, in a dry run and on real ranks."""

import pytest
import torch
from small_nets import by_kind
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.testing import run_on_ranks, world_mesh

CELLS, EDGES = 96, 2500  # more edges than a dry run keeps of values that follow from no index


class ComputedEdges(nn.Module):
    """Values of connected cells, along those edges whose target has several, of which each has a weight."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        edges = torch.randint(0, CELLS - 9, (2, EDGES), generator=draw)
        edges[0] //= 2  # half of the cells are connected, and their numbers are not those among all
        self.register_buffer("edges", edges[:, edges[1].argsort()])
        self.weights, self.mix = nn.Parameter(torch.ones(EDGES)), nn.Linear(4, 4)

    def forward(self, x):
        source, target = self.edges
        connected = torch.unique(source)
        numbers = source.new_empty(CELLS)
        numbers[connected] = torch.arange(connected.numel())
        has_several = torch.bincount(target, minlength=CELLS) > 25
        edges = has_several[target].nonzero()[:, 0]
        if edges.numel() < int(source.max()):
            return x
        values = self.mix(x[connected])[numbers[source[edges]]] * self.weights[has_several[target]][:, None]
        return torch.zeros_like(x).index_add(0, target[edges], values)


def counted_step(ranks):
    """Bytes and messages by kind, FLOP and memory of this rank in a step after the first."""
    mesh, meter = world_mesh(cell=ranks), StepMeter(keeps_calls=False)
    net = jigsaw.parallelize(ComputedEdges(), mesh)
    tile = jigsaw.shard(torch.randn(CELLS, 4), mesh, ("cell", None))
    for _ in range(2):  # what an index picks whose values came before is planned
        net(tile).square().mean().backward()
    net.zero_grad()
    with meter.counting():
        meter.begin_phase("setup")
        meter.mark_memory([*net.parameters(), *net.buffers(), tile.local], "weights")
        meter.begin_phase("forward")
        with comm.count() as forward:
            loss = net(tile).square().mean()
        meter.begin_phase("backward")
        with comm.count() as backward:
            loss.backward()
        meter.begin_phase("after")
    phases = {"forward": forward.calls, "backward": backward.calls}
    counted = {name: meter.counted_phase(name, calls) for name, calls in phases.items()}
    return {
        name: (by_kind(phase.calls), sum(kernel.flop for kernel in phase.kernels), sum(phase.peak.values()))
        for name, phase in counted.items()
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_computed_of_a_kept_index_is_known(ranks):
    asked = {"mesh": {"cell": ranks}, "spec": ("cell", None), "ranks": range(ranks), "optimizer": None}
    report = jigsaw.dry_run(ComputedEdges(), (CELLS, 4), **asked)
    assert report.is_complete and not report.remarks, report
    for rank, counted in zip(report.ranks, run_on_ranks(ranks, counted_step, ranks), strict=True):
        for name, (traffic, flop, peak) in counted.items():
            played = rank.phases[name]
            assert {k: (t.sent_bytes, t.messages) for k, t in played.traffic.items()} == traffic
            assert played.flop == flop
            assert sum(played.peak.values()) == pytest.approx(peak, rel=0.1)


class ChangedIndex(nn.Module):
    """Numbers that follow from an index, written in place before Python asks for them."""

    def __init__(self, change):
        super().__init__()
        self.register_buffer("index", torch.arange(2000).flip(0))
        self.change, self.mix = change, nn.Linear(3, 3)

    def forward(self, x):
        assert self.change(self.index, x) == 5  # a value that is not known counts as 1
        return self.mix(x)


def _own(index, x):
    numbers = index + 1
    numbers[numbers == 3] = 5
    return int(numbers[1997])


def _by_floats(index, x):
    numbers = index + 1
    view = numbers[1990:]
    numbers[x.local[:2000, 0].argsort()] = 7
    return int(view[0]) + 4


def _of_model(index, x):
    index.add_(1)
    return int(index[0]) + 4


def _unwritten(index, x):
    numbers = index.new_empty(3000)
    numbers[index] = 2
    return int(numbers[index].max()) + int(numbers[2500]) + 2


@pytest.mark.parametrize(("change", "asks"), [(_own, 0), (_by_floats, 1), (_of_model, 1), (_unwritten, 1)])
def test_what_is_not_known_is_never_read_as_a_value(change, asks):
    net = ChangedIndex(change)
    report = jigsaw.dry_run(net, (4000, 3), {"cell": 2}, spec=("cell", None), ranks=[0], optimizer=None)
    assert report.is_complete
    assert net.index.equal(torch.arange(2000).flip(0))  # the user's, with which a dry run has nothing to do
    assert [remark.kind for remark in report.remarks] == ["value"] * asks
