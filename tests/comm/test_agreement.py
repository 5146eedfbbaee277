"""Ranks compare digests of what they were given; lists travel only where they differ."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.comm.agreement import are_alike, first_rank_where, told_in_job_where_different, told_where_different
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.testing import on_ranks, world_mesh


def _sent_in_agreement(call):
    with comm.count() as counted:
        call()
    return sum(each.sent_bytes for each in counted.calls if each.kind == "agree")


@on_ranks(3)
def test_agreement_sends_as_few_bytes_for_much_as_for_little():
    mesh, points = world_mesh(lat=3), [1000 * n for n in range(200)]
    little = _sent_in_agreement(lambda: jigsaw.shard(torch.ones(6), mesh, ("lat",)))
    cut = [0, *range(2, 4), 6]
    much = _sent_in_agreement(
        lambda: jigsaw.shard(torch.ones(6, *(1,) * 60), mesh, ("lat", *(None,) * 60), split={0: cut})
    )
    assert little == much == 2 * 2 * 32 // 3
    assert _sent_in_agreement(lambda: told_where_different("test", mesh, points)) == little
    assert (
        _sent_in_agreement(lambda: jigsaw.parallelize(nn.Sequential(*[nn.Linear(1, 1) for _ in range(99)]), mesh))
        == little
    )
    part = torch.ones(2)
    assert _sent_in_agreement(lambda: jigsaw.from_local(part, mesh, ("lat",), (6,))) == 2 * little


@on_ranks(4)
def test_values_of_all_ranks_are_told_where_one_differs():
    mesh, rank = world_mesh(lat=2, lon=2), dist.get_rank()
    assert told_where_different("test", mesh, ("alike", 3)) == told_in_job_where_different("test", ("alike", 3)) == []
    for odd in range(4):
        expected = [(r == odd, "x" * 9) for r in range(4)]
        assert (
            told_where_different("test", mesh, expected[rank])
            == told_in_job_where_different("test", expected[rank])
            == expected
        )
    expected = [r // 2 for r in range(4)]  # as stages of a pipeline, each on two ranks
    assert told_in_job_where_different("test", rank // 2) == expected
    assert are_alike(mesh, rank // 2, ("lon",))
    assert not are_alike(mesh, rank // 2, ("lat",))


@on_ranks(4)
def test_the_first_rank_where_something_is_is_known_to_all():
    rank = dist.get_rank()
    assert first_rank_where(False) is None
    for ranks in ({3}, {1, 3}, {0, 1, 2, 3}):
        assert first_rank_where(rank in ranks) == min(ranks)


@on_ranks(4)
def test_copies_of_a_part_are_compared_along_the_axes_that_do_not_cut():
    mesh, rank = world_mesh(lat=2, lon=2), dist.get_rank()
    lat, lon = divmod(rank, 2)
    same = jigsaw.from_local(torch.full((3, 1), float(lat)), mesh, ("lat", None), (6, 1))
    assert same.sum().item() == 3
    # each rank's values are those of another part: swapped on half of the ranks, so that all sums are alike
    with pytest.raises(ShardingError, match=r"the ranks at \(0, 1\) and \(0, 0\) hold one part"):
        jigsaw.from_local(torch.full((3, 1), float(lat ^ lon)), mesh, ("lat", None), (6, 1))
    with pytest.raises(ShardingError, match=r"the ranks at \(1, 0\) and \(0, 0\) hold one part"):
        jigsaw.from_local(torch.full((3, 1), float(rank == 2)), mesh, (None, None), (3, 1))
    assert jigsaw.from_local(torch.ones(3, 1), mesh, (None, None), (3, 1)).sum().item() == 3


@on_ranks(4)
def test_pieces_that_hold_the_same_rows_by_their_halos_are_compared():
    mesh, lat = world_mesh(lat=2, lon=2), dist.get_rank() // 2
    layout = jigsaw.Layout.of((4,), ("lat",), {"lat": 2, "lon": 2}, halo={0: 2})
    assert layout.held((0, 0)) == layout.held((1, 0))
    assert jigsaw.from_local(torch.zeros(4), mesh, ("lat",), (4,), halo={0: 2}).shape == (4,)
    with pytest.raises(ShardingError, match=r"the ranks at \(1, 0\) and \(0, 0\) hold one part"):
        jigsaw.from_local(torch.full((4,), float(lat)), mesh, ("lat",), (4,), halo={0: 2})


@on_ranks(2)
def test_ranks_in_other_calls_name_them():
    mesh = world_mesh(lat=2)
    rank = mesh.get_rank()
    for _ in range(2):
        with pytest.raises(
            RanksDifferError, match=f"place {1 - rank} calls {'save' if rank == 0 else 'shard'} meanwhile"
        ):
            if rank == 0:
                jigsaw.shard(torch.ones(4), mesh, ("lat",))
            else:
                told_in_job_where_different("save", {"path": "run"})
    assert jigsaw.shard(torch.ones(4), mesh, ("lat",)).sum().item() == 4
