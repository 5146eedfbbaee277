"""The work of a save that ranks share: who writes which tensor, and who removes which old file."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import jigsaw
from jigsaw.checkpoint.checkpoint_files import writers_of_plain
from jigsaw.checkpoint.checkpoint_folder import FileSum, checkpoint_contents
from jigsaw.checkpoint.numbered_saves import older_saves, removal_shares, remove_folders, remove_share
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
