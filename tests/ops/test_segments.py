"""torch.segment_reduce along a cut dim against plain torch on the whole tensor."""

import pytest
import torch

import jigsaw
from jigsaw import comm
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

MESHES = [{"cell": 1}, {"cell": 2}, {"cell": 3}, {"cell": 4}, {"cell": 2, "channel": 2}]
POINTS = {1: (0, 24), 2: (0, 9, 24), 3: (0, 0, 13, 24), 4: (0, 5, 5, 20, 24)}
LENGTHS = {
    "uneven": [0, 7, 1, 0, 5, 9, 2, 0],
    "one": [24],
    "as many": [1] * 24,
    "one of all": [0, 0, 24, 0],
    "many empty": [0] * 30 + [24],
}


def values():
    return torch.randn(24, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def calls():
    for name, lengths in LENGTHS.items():
        for reduce in ("sum", "mean", "max", "min", "prod"):
            yield f"{name} {reduce}", {"reduce": reduce, "lengths": torch.tensor(lengths), "initial": 1.5}
    ends = torch.tensor([0, *LENGTHS["uneven"]]).cumsum(0)
    yield "offsets", {"reduce": "sum", "offsets": ends, "unsafe": True}
    yield "batch", {"reduce": "mean", "lengths": torch.tensor(LENGTHS["uneven"]).expand(2, -1), "axis": 1, "initial": 0}


def reduced(x, told):
    x = x.movedim(0, told.get("axis", 0))
    out = torch.segment_reduce(x, **told)
    return out, (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def run_all(axes):
    mesh, outcomes = world_mesh(**axes), {}
    for name, told in calls():
        tile = jigsaw.shard(values(), mesh, ("cell", None, "channel"), split={0: POINTS[axes["cell"]]})
        tile.local.requires_grad_()
        out, loss = reduced(tile, told)
        loss.backward()
        outcomes[name] = out.full_tensor().detach(), tile.grad.full_tensor(), out.layout.cut_dims
    return outcomes


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_segments_are_those_of_one_process(axes):
    for outcomes in run_on_ranks(axes["cell"] * axes.get("channel", 1), run_all, axes):
        for name, told in calls():
            x = values().requires_grad_()
            want, loss = reduced(x.contiguous(), {**told})
            loss.backward()
            out, grad, cut_dims = outcomes[name]
            torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
            torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12, equal_nan=True)
            assert axes["cell"] == 1 or told.get("axis", 0) in cut_dims


@on_ranks(3)
def test_rows_of_a_segment_that_crosses_a_cut_travel_once():
    mesh = world_mesh(cell=3)
    tile = jigsaw.shard(torch.randn(12, 2), mesh, ("cell", None))  # cut at 4 and 8
    with comm.count() as counts:
        out = torch.segment_reduce(tile, "sum", lengths=torch.tensor([4, 1, 5, 2]))
    assert out.layout.dim(0)[0].points == (0, 1, 3, 4)
    assert sum(c.received_bytes for c in counts.calls) == 8 * {0: 0, 1: 2, 2: 0}[mesh.get_rank()]


@on_ranks(2)
def test_segments_of_picked_rows_are_cut_as_the_cells():
    mesh, index = world_mesh(cell=2), torch.randint(0, 20, (60,), generator=torch.Generator().manual_seed(2))
    x = torch.randn(20, 3, dtype=torch.float64)
    tile = jigsaw.shard(x, mesh, ("cell", None), split={0: (0, 13, 20)})
    counts = torch.bincount(torch.randint(0, 20, (60,), generator=torch.Generator().manual_seed(3)), minlength=20)
    for _ in range(2):
        out = torch.segment_reduce(tile[index], "mean", lengths=counts, initial=0)
    assert out.layout.dim(0)[0].points == (0, 13, 20)
    torch.testing.assert_close(out.full_tensor(), torch.segment_reduce(x[index], "mean", lengths=counts, initial=0))


@on_ranks(2)
def test_segments_that_do_not_fit_are_refused_on_every_rank():
    tile = jigsaw.shard(torch.randn(12, 2, 4), world_mesh(cell=2), ("cell", None, None))
    with comm.count() as counts:
        with pytest.raises(RuntimeError, match="2 segments end at row 11 of 12"):
            torch.segment_reduce(tile, "sum", lengths=torch.tensor([4, 7]))
        with pytest.raises(RuntimeError, match="none may end before it begins"):
            torch.segment_reduce(tile, "sum", lengths=torch.tensor([14, -2]), unsafe=True)
        apart = torch.tensor([[0, 2], [2, 0]] * 6)  # segments of their own for each row
        with pytest.raises(jigsaw.ShardingError, match="segment_reduce"):
            torch.segment_reduce(tile, "sum", lengths=apart, axis=1)
        with pytest.raises(jigsaw.ShardingError, match="segment_reduce"):
            torch.segment_reduce(tile, "sum", lengths=torch.tensor([4.0, 8.0]))
        for told in ({"reduce": "median"}, {"reduce": "sum", "indices": torch.arange(12)}):
            with pytest.raises(RuntimeError):  # torch's own, also on a rank without segments
                torch.segment_reduce(tile, lengths=torch.tensor([12]), **told)
    assert counts.calls == []
