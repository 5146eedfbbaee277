"""The work of a save that ranks share: who writes which tensor, and who removes which old file."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import jigsaw
from jigsaw.checkpoint.checkpoint_files import PlannedTensors
from jigsaw.checkpoint.checkpoint_folder import FileSum, checkpoint_contents
from jigsaw.checkpoint.numbered_saves import older_saves, removal_shares, remove_folders, remove_share
from jigsaw.checkpoint.piece_writers import writers_of_plain
from jigsaw.errors import CheckpointError
from jigsaw.testing import run_on_ranks

SIZES = {f"t{n}": FileSum(10 * n, n) for n in range(1, 30)}


def test_writers_of_tensors_that_all_ranks_have_write_about_as_much():
    for ranks in (1, 2, 3, 40):
        writers = writers_of_plain([SIZES] * ranks)
        assert writers.keys() == SIZES.keys()
        written = [sum(SIZES[key].size for key, writer in writers.items() if writer == rank) for rank in range(ranks)]
        assert max(written) - min(written) <= max(each.size for each in SIZES.values())


def test_writers_of_stages_have_what_they_write():
    first, second = dict([*SIZES.items()][:20]), dict([*SIZES.items()][15:])
    every = [first, second, first, second]
    writers = writers_of_plain(every)
    assert writers.keys() == SIZES.keys()
    assert all(key in every[rank] for key, rank in writers.items())
    written = [sum(SIZES[key].size for key, writer in writers.items() if writer == rank) for rank in range(4)]
    assert max(abs(a - b) for a, b in ((written[0], written[2]), (written[1], written[3]))) <= 290


def _saves(folder):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    for step in (1, 2, 3):
        with torch.no_grad():
            model[0].weight.fill_(step)
        jigsaw.save(folder / f"step-{step}", model=model)
    (folder / "step-2" / "notes.txt").write_text("mine") if dist.get_rank() == 0 else None
    dist.barrier()
    jigsaw.save(folder / "step-4", model=model, keep=2, wait=False).wait()
    again = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    jigsaw.load(folder / "step-4", model=again)
    return sorted(each.name for each in folder.iterdir()), again[0].weight.tolist()


@pytest.mark.filterwarnings("ignore:.*step-2 is not removed")
def test_ranks_remove_old_saves_together_and_nothing_else(tmp_path):
    for names, weight in run_on_ranks(3, _saves, tmp_path):
        assert names == ["step-2", "step-3", "step-4"]
        assert weight == [[3.0, 3.0], [3.0, 3.0]]
    assert (tmp_path / "step-2" / "notes.txt").read_text() == "mine"
    assert len(checkpoint_contents(tmp_path / "step-4").files) == 3 + 2  # a file a rank, and two indices


def test_each_old_file_is_removed_by_one_rank_and_the_mark_last(tmp_path):
    for step in (1, 2):
        jigsaw.save(tmp_path / f"step-{step}", model=nn.Linear(2, 2))
    older = older_saves(tmp_path / "step-2", 1)
    assert older == [tmp_path / "step-1"]
    shares = removal_shares(older, 3)
    assert sorted(name for share in shares for _, names in share for name in names) == sorted(
        each.name for each in older[0].iterdir()
    )
    for share in shares:
        assert share
        remove_share(tmp_path, share)
    assert [each.name for each in older[0].iterdir()] == ["jigsaw.json"]
    assert remove_folders(older, [None] * 3, 1) == [None] * 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-2"]
    assert removal_shares([], 2) == [None, None]


def _one_rank_cannot_read(path):
    model = nn.Linear(2, 2)
    jigsaw.save(path, model=jigsaw.parallelize(nn.Linear(2, 2), jigsaw.testing.world_mesh(lat=2)))
    reads = torch.load

    def fail(*_, **__):
        raise OSError("the cable is out")

    if dist.get_rank() == 1:
        torch.load = fail
    try:
        with pytest.raises(CheckpointError, match=r"cannot be read: rank 1: .*the cable is out"):
            jigsaw.load(path, model=model)
    finally:
        torch.load = reads


def test_a_rank_that_cannot_read_its_rows_is_told_on_all(tmp_path):
    run_on_ranks(2, _one_rank_cannot_read, tmp_path / "whole")


def _model_of(tensors):
    model = nn.Module()
    for name, x in tensors.items():
        model.register_buffer(name, x)
    return model


def _saved_and_loaded(path, tensors, wait=True):
    """Say whether a save planned anew, and compare what each rank loads with what it saved."""
    anew, plan_anew = [], PlannedTensors._plan_anew
    with mock.patch.object(PlannedTensors, "_plan_anew", lambda *args: anew.append(1) or plan_anew(*args)):
        pending = jigsaw.save(path, model=_model_of(tensors), wait=wait)
    if not wait:
        pending.wait()
    again = _model_of({name: torch.zeros_like(x) for name, x in tensors.items()})
    again.names_of_all_stages = ["extra"]  # of which a rank may have none, as in a pipeline
    jigsaw.load(path, model=again)
    for name, x in tensors.items():
        loaded = getattr(again, name)
        assert torch.equal(*(each.to_local() if isinstance(each, DTensor) else each for each in (loaded, x))), name
    return len(anew)


def _save_kinds(folder):
    mesh, rank = dist.device_mesh.init_device_mesh("cpu", (3,)), dist.get_rank()
    whole = torch.arange(12.0).reshape(6, 2)
    first = {"whole": whole, "cut": distribute_tensor(whole, mesh, [Shard(0)])}
    kinds = {
        "first": first,
        "other values": {"whole": whole + 1, "cut": first["cut"] * 2},
        "other cut": first | {"cut": distribute_tensor(whole, mesh, [Shard(1)])},
        "not cut": first | {"cut": distribute_tensor(whole, mesh, [Replicate()])},
        "other type": first | {"whole": whole.double()},
        "other shape": first | {"whole": whole[:4]},
        "one rank has more": first | ({"extra": torch.ones(3)} if rank == 1 else {}),
        "another rank has more": first | ({"extra": torch.ones(3)} if rank == 2 else {}),
    }
    order = ["first", "first", "other values", *[name for name in kinds for _ in range(2)][4:], "one rank has more"]
    anew = [
        _saved_and_loaded(folder / f"step-{at}", kinds[name], wait=at % 3 > 0) for at, name in enumerate(order, start=1)
    ]
    return list(zip(order, anew, strict=True))


def test_a_plan_is_made_anew_where_a_rank_has_other_names_shapes_types_or_cuts(tmp_path):
    for told in run_on_ranks(3, _save_kinds, tmp_path):
        # for ranks without it the extra tensor changes nothing; still no rank takes an old plan while another plans
        assert told == [
            *[("first", 1), ("first", 0), ("other values", 0)],
            *[(name, n) for name in ("other cut", "not cut", "other type", "other shape") for n in (1, 0)],
            *[("one rank has more", 1), ("one rank has more", 0)],
            *[("another rank has more", 1), ("another rank has more", 0), ("one rank has more", 1)],
        ]


def _save_twice_and_best(folder):
    model = nn.Linear(5, 3)  # which no other test here saves on two ranks
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    with mock.patch.object(PlannedTensors, "_plan_anew", autospec=True, side_effect=PlannedTensors._plan_anew) as anew:
        for step in range(3):
            jigsaw.save(folder / f"step-{step}", model=model, optimizer=optimizer)
            jigsaw.save(folder / "best", model=model)
    return anew.call_count


def test_saves_of_all_and_of_weights_alone_in_turn_are_planned_once_each(tmp_path):
    assert run_on_ranks(2, _save_twice_and_best, tmp_path) == [2, 2]
