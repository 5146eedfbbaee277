"""Saves in the background: what training changes meanwhile does not reach them, and how they end all ranks are told."""

from __future__ import annotations

import json
import resource
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_checkpoint import Counter, _setting, _steps

import jigsaw
from jigsaw.checkpoint.checkpoint_files import PlannedTensors
from jigsaw.checkpoint.checkpoints import load, save
from jigsaw.checkpoint.pending_save import begin_save
from jigsaw.errors import CheckpointError
from jigsaw.testing import run_on_ranks


def _saved_both_ways(folder, axes, mode):
    """One state saved at once and in the background, while training goes on with messages of its own."""
    model, optimizer, schedule, x, y = _setting(axes, mode)
    _steps(model, optimizer, schedule, x, y, 2)
    things = {"model": model, "optimizer": optimizer, "schedule": schedule}
    save(folder / "now", loader=Counter(3), **things)
    counter = Counter(3)
    pending = save(folder / "later", loader=counter, wait=False, **things)
    counter.seen = 99
    losses = _steps(model, optimizer, schedule, x, y, 4)
    pending.wait()
    assert pending.done()
    assert pending.path == folder / "later"
    for name in ("now", "later"):
        load(folder / name, loader=counter, **things)
        assert counter.seen == 3
        assert _steps(model, optimizer, schedule, x, y, 4) == losses


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "mode"), [({"lat": 2, "lon": 2}, "cut"), ({"data": 3}, "whole")])
def test_a_save_in_the_background_has_the_state_of_its_call(tmp_path, axes, mode):
    run_on_ranks(4 if len(axes) == 2 else 3, _saved_both_ways, tmp_path, axes, mode)


def _copied_bytes(folder, axes, mode):
    model, optimizer, schedule, x, y = _setting(axes, mode)
    _steps(model, optimizer, schedule, x, y, 1)
    tensors = model.state_dict()
    return PlannedTensors(folder / mode, tensors).copy(), sum(x.numel() * x.element_size() for x in tensors.values())


@pytest.mark.slow
def test_every_byte_is_copied_once_among_all_ranks(tmp_path):
    for mode in ("whole", "cut"):
        told = run_on_ranks(3, _copied_bytes, tmp_path, {"lat": 3}, mode)
        assert sum(copied for copied, _ in told) == told[0][1]


def _rank_1_has_no_room(path):
    model, optimizer, *_ = _setting({"lat": 2}, "cut")
    pending = save(path, model=model, wait=False)
    with torch.no_grad():
        model.scale.fill_(9)
    again = save(path, model=model, wait=False)  # which waits for the one before
    assert pending.done()
    again.wait()
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, room[1]))
    try:
        failing = save(path, model=model, wait=False)
        with pytest.raises(CheckpointError, match=r"of .*last in the background failed: .* rank 1: .*File too large"):
            failing.wait()
        failing = save(path, model=model, wait=False)  # whoever was told is not told again
        with pytest.raises(CheckpointError, match=r"the background failed: .* rank 1: .*File too large"):
            save(path, model=model)
        with pytest.raises(CheckpointError, match=r"^the tensors of .*last cannot be written: rank 1: .*large"):
            save(path, model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    with torch.no_grad():
        model.scale.zero_()
    load(path, model=model)
    assert model.scale.item() == 9
    save(path, model=model, optimizer=optimizer)


def test_a_rank_that_cannot_write_is_told_to_all_and_costs_no_checkpoint(tmp_path):
    run_on_ranks(2, _rank_1_has_no_room, tmp_path / "last")
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def test_without_ranks_training_goes_on_as_well(tmp_path):
    model = torch.nn.Linear(300, 300)
    before = model.weight.detach().clone()
    pending = save(tmp_path / "it", model=model, wait=False)
    torch.nn.init.zeros_(model.weight)
    pending.wait()
    load(tmp_path / "it", model=model)
    assert torch.equal(model.weight, before)
    assert not [each for each in threading.enumerate() if each.name.startswith("jigsaw.save")]


# -- numbered ---------------------------------------------------------------------------------------------------------


def _names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_the_last_n_are_kept_and_the_last_whole_one_is_found(tmp_path):
    model = torch.nn.Linear(2, 3)
    assert jigsaw.latest(tmp_path / "none") is None
    left = [tmp_path / f".step-{n}.0123456789abcdef.draft" for n in (70, 130, 125)]
    left[0].mkdir()  # what a kill left
    save(tmp_path / "best", model=model)
    for step in (8, 90, 100, 110):
        save(tmp_path / f"step-{step}", model=model, keep=2)
    assert _names(tmp_path) == ["best", "step-100", "step-110"]
    save(tmp_path / "step-120", model=model, keep=2, wait=False).wait()
    assert _names(tmp_path) == ["best", "step-110", "step-120"]
    assert jigsaw.latest(tmp_path) == tmp_path / "step-120"
    left[1].mkdir()
    (tmp_path / "step-120" / "__0_0.distcp").write_bytes(b"torn")
    assert jigsaw.latest(tmp_path) == tmp_path / "step-110"
    # killed between the two renames: whole, but not yet under its name
    (tmp_path / "step-110").rename(left[2])
    assert jigsaw.latest(tmp_path) == tmp_path / "step-125"
    load(jigsaw.latest(tmp_path), model=model)
    save(tmp_path / "step-140", model=model, keep=1)
    assert _names(tmp_path) == ["best", "step-140"]


def test_after_going_back_the_last_is_what_was_saved_last(tmp_path):
    models = {step: torch.nn.Linear(2, 3) for step in (50, 100, 200, 60, 110, 210)}
    for step in (50, 100, 200):
        save(tmp_path / f"step-{step}", model=models[step])
    load(tmp_path / "step-50", model=torch.nn.Linear(2, 3))
    save(tmp_path / "step-60", model=models[60], keep=1)
    assert jigsaw.latest(tmp_path) == tmp_path / "step-60"
    assert _names(tmp_path) == ["step-100", "step-200", "step-60"]  # higher numbers stay until they are passed
    save(tmp_path / "step-110", model=models[110], keep=2)
    assert _names(tmp_path) == ["step-110", "step-200", "step-60"]  # and then those go that were saved first
    save(tmp_path / "step-100", model=models[100])  # again
    assert jigsaw.latest(str(tmp_path)) == tmp_path / "step-100"
    save(tmp_path / "step-210", model=models[210], keep=2)
    assert _names(tmp_path) == ["step-100", "step-210"]


def test_the_folder_of_another_run_counts_for_itself(tmp_path):
    model = torch.nn.Linear(2, 3)
    for folder in ("a", "b"):
        for step in (1, 2):
            save(tmp_path / folder / f"step-{step}", model=model)
    orders = [json.loads((tmp_path / at / "jigsaw.json").read_text())["order"] for at in ("a/step-2", "b/step-2")]
    assert orders == [2, 2]


def _latest_of_all(folder):
    return jigsaw.latest(folder) if dist.get_rank() == 0 else jigsaw.latest(folder / "elsewhere")


def test_all_ranks_find_the_same_one(tmp_path):
    save(tmp_path / "3", model=torch.nn.Linear(2, 3))
    assert run_on_ranks(2, _latest_of_all, tmp_path) == [tmp_path / "3"] * 2


def test_misuse_of_numbers_is_told(tmp_path):
    model = torch.nn.Linear(2, 3)
    for keep in (0, True, 1.5):
        with pytest.raises(CheckpointError, match=r"keep=.* must be how many checkpoints are kept: an integer of 1 or"):
            save(tmp_path / "step-1", model=model, keep=keep)
    with pytest.raises(CheckpointError, match=r"keep=2 .* but 'best' does not end in a number; save to names such as"):
        save(tmp_path / "best", model=model, keep=2)
    for name in ("step-1", "epoch-1"):
        save(tmp_path / name, model=model)
    with pytest.raises(CheckpointError, match=r"numbered checkpoints of several names, 'epoch-' and 'step-' among"):
        jigsaw.latest(tmp_path)


# -- beside a dry run -------------------------------------------------------------------------------------------------


_disk_goes_on, _saves = threading.Event(), []


class _BesideASave(torch.nn.Module):
    """A model in whose forward pass a disk goes on that has kept a save waiting, and the save ends."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Conv2d(4, 2, 1)

    def forward(self, x):
        _disk_goes_on.set()
        while not all(pending.done() for pending in _saves):
            time.sleep(0.01)
        return self.second(self.first(x))


def _saved_beside_a_dry_run(path, is_pipeline):
    mesh, model, told = jigsaw.init_mesh(pipe=2), _BesideASave(), []
    backend = dist.get_backend()

    def write_slowly(group):
        _disk_goes_on.wait(60)
        ranks = [None] * 2
        dist.all_gather_object(ranks, dist.get_rank(), group=group)
        told.append((ranks, dist.get_world_size(), dist.get_backend()))

    _disk_goes_on.clear()
    pending = begin_save(path, write_slowly)
    _saves[:] = [pending]
    if is_pipeline:
        tile = jigsaw.shard(torch.ones(2, 2, 8, 8), mesh, (None, None, None, None))
        jigsaw.pipeline(model, mesh, loss=F.mse_loss, stages="balanced", example=tile, microbatches=2)
    else:
        assert jigsaw.dry_run(model, (1, 2, 8, 8), mesh={"lat": 4, "lon": 2}).is_complete
    pending.wait()
    assert told == [([0, 1], 2, backend)]
    assert dist.get_rank() in told[0][0]  # the job is as it was
    save(path, model=torch.nn.Linear(2, 2), wait=False).wait()


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_a_dry_run_leaves_a_save_in_the_background_alone(tmp_path, is_pipeline):
    run_on_ranks(2, _saved_beside_a_dry_run, tmp_path / "it", is_pipeline)


def test_a_save_in_the_background_stays_in_the_folder_where_it_began(tmp_path, monkeypatch):
    model = torch.nn.Linear(300, 300)
    for folder in ("a", "b"):
        (tmp_path / folder / "run").mkdir(parents=True)
    for step in (1, 2, 3):
        save(tmp_path / "b" / "run" / f"step-{step}", model=model)
    monkeypatch.chdir(tmp_path / "a")
    pending = save("run/step-3", model=model, wait=False, keep=1)
    monkeypatch.chdir(tmp_path / "b")
    pending.wait()
    names = [sorted(each.name for each in (tmp_path / folder / "run").iterdir()) for folder in ("a", "b")]
    assert names == [["step-3"], ["step-1", "step-2", "step-3"]]
