"""The files of a checkpoint: nothing in them runs, what is damaged is told, and a kill loses none."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from jigsaw.checkpoint import CheckpointError, load, save
from jigsaw.parallel import parallelize
from jigsaw.testing import run_on_ranks, world_mesh


class Holder:
    """Anything with a state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Trap:
    """A pickle of it makes a folder where it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def _model(fill):
    model = nn.Linear(64, 32)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(fill)
    return model


def _adam(model):
    model(torch.ones(64)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    return optimizer


def _saved(path, fill=1.0):
    model = _model(fill)
    save(path, model=model, optimizer=_adam(model), loader=Holder({"seed": 3}))
    return path


def _loaded(path):
    model = _model(0.0)
    load(path, model=model, optimizer=_adam(model), loader=Holder())
    return model


def _forged(path):
    """Make the checksums of a checkpoint those of the files that it now has."""
    told = json.loads((path / "jigsaw.json").read_text())
    del told["crc32"]
    there = {p.name: p.read_bytes() for p in path.iterdir() if p.name != "jigsaw.json"}
    told["files"] = {name: [len(raw), zlib.crc32(raw)] for name, raw in there.items()}
    (path / "jigsaw.json").write_text(json.dumps({"crc32": zlib.crc32(json.dumps(told).encode()), **told}))


# -- nothing runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forge"),
    [
        ("jigsaw.json", False),
        (".metadata", False),
        (".metadata", True),
        ("__0_0.distcp", False),
        ("__0_0.distcp", True),
    ],
)
def test_a_pickle_in_the_place_of_a_file_does_not_run(tmp_path, name, forge):
    path, mark = _saved(tmp_path / "it"), tmp_path / "ran"
    (path / name).write_bytes(pickle.dumps(Trap(mark)))
    if forge:
        _forged(path)
    forged_tensors = forge and name == "__0_0.distcp"
    with pytest.raises(CheckpointError, match="cannot be read: rank 0: " if forged_tensors else re.escape(name)):
        _loaded(path)
    assert not mark.exists()


def test_an_index_that_names_a_function_is_refused_by_the_functions_name(tmp_path):
    path = _saved(tmp_path / "it")
    (path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    _forged(path)
    with pytest.raises(CheckpointError, match=r"\.metadata is no index of tensors: it names posix\.mkdir, which no"):
        _loaded(path)


def test_values_that_torch_would_unpickle_are_refused(tmp_path):
    """Torch's planner reads what its index calls bytes by `torch.load(weights_only=False)`."""
    path, mark = _saved(tmp_path / "it"), tmp_path / "ran"
    for each in (".metadata", "__0_0.distcp"):
        (path / each).unlink()
    dcp.save({"model.weight": Trap(mark), "model.bias": torch.ones(32)}, checkpoint_id=path, no_dist=True)
    index = pickle.loads((path / ".metadata").read_bytes())
    index.storage_meta = None  # it has a path, which is refused as well
    (path / ".metadata").write_bytes(pickle.dumps(index))
    _forged(path)
    with pytest.raises(CheckpointError, match=r"\.metadata names values that are pickled"):
        load(path, model=_model(0.0))
    assert not mark.exists()


def test_a_trap_in_a_file_of_torchs_own_form_does_not_run(tmp_path):
    """Where the index says that a tensor lies there is what `torch.save` made of a trap."""
    path, mark = _saved(tmp_path / "it"), tmp_path / "ran"
    index = pickle.loads((path / ".metadata").read_bytes())
    torch.save(Trap(mark), path / "__0_0.distcp")
    for each in index.storage_data.values():
        each.offset, each.length = 0, (path / "__0_0.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(index))
    _forged(path)
    with pytest.raises(
        CheckpointError, match=r"the tensors of .*it cannot be read: rank 0: .*Weights only load failed"
    ):
        _loaded(path)
    assert not mark.exists()


def test_an_index_of_files_elsewhere_is_refused(tmp_path):
    path = _saved(tmp_path / "it")
    index = pickle.loads((path / ".metadata").read_bytes())
    for each in index.storage_data.values():
        each.relative_path = "../elsewhere.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    _forged(path)
    with pytest.raises(CheckpointError, match=r"files that the checkpoint does not have: \['\.\./elsewhere\.distcp'\]"):
        _loaded(path)


# -- small state ------------------------------------------------------------------------------------------------------


def test_small_states_come_back_as_they_were(tmp_path):
    state = {
        "a": [1, 2.5, None, True, "x", (1, (2,)), b"\0\xff"],
        "b": {3: "c", (1, 2): {"$tuple": 5}},
        "milestones": Counter({30: 1, 80: 2}),
        "far": [float("inf"), 10**40, 0.1 + 0.2],
        "rng": torch.get_rng_state(),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "none": torch.empty(0, 3, dtype=torch.int32),
        "flag": torch.tensor([True, False]),
    }
    save(tmp_path / "it", one=Holder(state), two=Holder(np.float64(0.1)))
    one, two = Holder(), Holder()
    load(tmp_path / "it", one=one, two=two)
    assert list(one.state) == list(state)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert one.state[key].dtype == value.dtype
            assert torch.equal(one.state[key], value)
        else:
            assert one.state[key] == value
            assert type(one.state[key]) is type(value)
    assert two.state == 0.1


SCHEDULES = {
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
    "own": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
}


def _rates(optimizer, schedule, count):
    rates = []
    for _ in range(count):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_goes_on(tmp_path, kind):
    model = _model(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[kind](optimizer)
    _rates(optimizer, schedule, 3)
    save(tmp_path / "it", model=model, optimizer=optimizer, schedule=schedule)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    again = SCHEDULES[kind](other)
    load(tmp_path / "it", model=model, optimizer=other, schedule=again)
    assert _rates(other, again, 4) == _rates(optimizer, schedule, 4)


class WithExtra(nn.Linear):
    """A module with a state beside its tensors."""

    def __init__(self, note):
        super().__init__(2, 3)
        self.note = note

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def test_extra_state_of_a_model_and_an_optimizers_values_come_back(tmp_path):
    model = WithExtra({"scale": 2.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
    optimizer.state[model.weight] = {"momentum_buffer": None, "count": 4, "old": torch.ones(3, 2)}
    save(tmp_path / "it", model=model, optimizer=optimizer)
    other = WithExtra(None)
    fresh = torch.optim.SGD(other.parameters(), lr=torch.tensor(0.5))
    load(tmp_path / "it", model=other, optimizer=fresh)
    assert other.note == {"scale": 2.0}
    found = fresh.state[other.weight]
    assert (found["momentum_buffer"], found["count"], found["old"].tolist()) == (None, 4, [[1.0, 1.0]] * 3)
    assert fresh.param_groups[0]["lr"].item() == 0.25


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": [1, Path("x")]}, r"holder\.state_dict\(\)\['a'\]\[1\] is of type pathlib\.\w*\.?PosixPath"),
        ({"f": len}, r"holder\.state_dict\(\)\['f'\] is of type builtins\.builtin_function_or_method"),
        ({"k": np.ones(3)}, r"\['k'\] is of type numpy\.ndarray.*an array as \.tolist\(\)"),
        ({Trap("x"): 1}, r"a key of holder\.state_dict\(\) is of type .*Trap"),
        ({"big": torch.zeros(1 << 19)}, r"\['big'\] is of type torch\.Tensor.*large tensors belong to the model"),
    ],
)
def test_a_state_that_is_not_plain_is_refused_when_it_is_saved(tmp_path, state, told):
    with pytest.raises(CheckpointError, match=told):
        save(tmp_path / "it", holder=Holder(state))
    assert list(tmp_path.iterdir()) == []


def _refused_on_one_rank(path):
    with pytest.raises(CheckpointError, match=r"it\.state_dict\(\)\['a'\] is of type builtins\.set"):
        save(path, it=Holder({"a": {1} if torch.distributed.get_rank() else 1}))


def test_what_one_rank_cannot_save_no_rank_saves(tmp_path):
    run_on_ranks(2, _refused_on_one_rank, tmp_path / "it")


# -- damage -----------------------------------------------------------------------------------------------------------


def _flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {"flip": _flip, "cut": _cut, "lose": Path.unlink}


def _save_two(folder):
    for name, fill in (("one", 1.0), ("two", 2.0)):
        model = parallelize(_model(fill), world_mesh(lat=2), shard_weights=True, unit_bytes=1)
        save(folder / name, model=model, loader=Holder({"fill": fill}))


def _load_one(path):
    model = parallelize(_model(0.0), world_mesh(lat=2), shard_weights=True, unit_bytes=1)
    loader = Holder()
    try:
        load(path, model=model, loader=loader)
    except CheckpointError as e:
        assert loader.state is None
        assert not any(p.detach().to_local().any() for p in model.parameters())
        return str(e)
    return loader.state


def test_damage_is_told_on_every_rank_and_names_the_file(tmp_path):
    run_on_ranks(2, _save_two, tmp_path)
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "jigsaw.json"]
    broken = tmp_path / "broken"
    for name in names:
        for kind in ["flip", "cut", "lose", "mix"]:
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(tmp_path / "one", broken)
            if kind == "mix":
                shutil.copy(tmp_path / "two" / name, broken / name)
            else:
                DAMAGE[kind](broken / name)
            told = run_on_ranks(2, _load_one, broken)
            if name == ".metadata" and kind == "mix":  # the same bytes: models of one shape
                assert told == [{"fill": 1.0}] * 2
            else:
                assert told[0] == told[1]
                assert "distcp" in told[0] if (name, kind) == ("jigsaw.json", "mix") else name in told[0], (name, kind)
    assert run_on_ranks(2, _load_one, tmp_path / "one") == [{"fill": 1.0}] * 2


# -- kills ------------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, torch
from jigsaw.checkpoint import save

stop = int(sys.argv[2])
seen = 0

def hook(event, args):
    global seen
    if event == "os.rename" and str(args[0]).startswith(sys.argv[1]) and ".metadata" not in str(args[0]):
        seen += 1
        if seen == stop:
            os.kill(os.getpid(), signal.SIGKILL)

model = torch.nn.Linear(64, 32)
for fill in (1.0, 2.0):
    torch.nn.init.constant_(model.weight, fill)
    if fill == 2.0:
        sys.addaudithook(hook)
    save(sys.argv[1], model=model)
"""


def _killed(path, at):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path), str(at)], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def _weight(path):
    model = nn.Linear(64, 32)
    load(path, model=model)
    return model.weight[0, 0].item()


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    path = tmp_path / "last"
    _killed(path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.part", "last.part.old"]
    assert _weight(path) == 2.0
    shutil.copytree(tmp_path, again := tmp_path.with_name(f"{tmp_path.name}-again"))
    (again / "last.part" / "jigsaw.json").unlink()
    assert _weight(again / "last") == 1.0
    for folder in (tmp_path, again):
        save(folder / "last", model=_model(3.0))
        assert [p.name for p in folder.iterdir()] == ["last"]
        assert _weight(folder / "last") == 3.0


def test_a_kill_before_the_first_rename_leaves_the_old_one(tmp_path):
    path = tmp_path / "last"
    _killed(path, 1)
    assert _weight(path) == 1.0
    save(path, model=_model(3.0))
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_a_save_that_was_killed_while_it_wrote_is_told(tmp_path):
    part = tmp_path / "last.part"
    part.mkdir()
    with pytest.raises(CheckpointError, match=r"last does not exist; .*last\.part is there, but not whole"):
        load(tmp_path / "last", model=_model(0.0))


def test_a_disk_that_takes_no_more_is_told(tmp_path):
    (tmp_path / "last").write_text("a file")
    with pytest.raises(
        CheckpointError, match=r"the tensors of .*last/run\.part cannot be written: rank 0: .*NotADirectory"
    ):
        save(tmp_path / "last" / "run", model=_model(1.0))


def test_a_path_that_is_not_a_checkpoint_is_not_replaced_by_what_lies_beside_it(tmp_path):
    (tmp_path / "it").mkdir()
    _saved(tmp_path / "it.part")
    with pytest.raises(CheckpointError, match=r"it is not whole: it has no jigsaw\.json"):
        load(tmp_path / "it", model=_model(0.0))
