"""The files of a checkpoint: nothing in them runs, what is damaged is told, and a kill loses none."""

from __future__ import annotations

import enum
import json
import os
import pickle
import pickletools
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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_disk import no_space
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from jigsaw.checkpoint.checkpoints import latest, load, save
from jigsaw.checkpoint.piece_places import read_places
from jigsaw.checkpoint.whole_weights import load_weights, save_weights
from jigsaw.errors import CheckpointError
from jigsaw.parallel.parallelize import parallelize
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


def _forged(path, **more):
    """Make the checksums of a checkpoint those of the files that it now has."""
    told = json.loads((path / "jigsaw.json").read_text()) | more
    del told["crc32"]
    there = {p.name: p.read_bytes() for p in path.iterdir() if p.name != "jigsaw.json"}
    told["files"] = {name: [len(raw), zlib.crc32(raw)] for name, raw in there.items()}
    (path / "jigsaw.json").write_text(json.dumps({"crc32": zlib.crc32(json.dumps(told).encode()), **told}))


class PicklerOf3112(pickle.Pickler):
    """A member of an enum as Python 3.11.2 pickles it."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def _with_lists(path):
    """A checkpoint as it was made before its index had rules: a list of pieces for each tensor."""
    index = json.loads((path / "tensors.json").read_text())
    for name, each in index.items():
        (first, count, _), *more = each.pop("files")
        assert (first, count, more) == (0, 1, [])
        place = read_places(path / "__0_0.distcp")[name]
        del each["cuts"]
        each["pieces"] = [[[0] * len(each["shape"]), each["shape"], "__0_0.distcp", *place]]
    (path / "tensors.json").write_text(json.dumps(index))
    _forged(path, format=2)
    return path


def _as_before(path, pickler=pickle.Pickler):
    """A checkpoint as it was made before it had an index of ours."""
    index = pickle.loads((path / ".metadata").read_bytes())
    with (path / ".metadata").open("wb") as file:
        pickler(file).dump(index)
    (path / "tensors.json").unlink()
    told = json.loads((path / "jigsaw.json").read_text())
    del told["order"]
    (path / "jigsaw.json").write_text(json.dumps(told))
    _forged(path, format=1)
    return path


# -- nothing runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forge", "before"),
    [
        ("jigsaw.json", False, False),
        (".metadata", False, False),
        (".metadata", True, True),
        ("tensors.json", False, False),
        ("tensors.json", True, False),
        ("__0_0.distcp", False, False),
        ("__0_0.distcp", True, False),
    ],
)
def test_a_pickle_in_the_place_of_a_file_does_not_run(tmp_path, name, forge, before):
    path, mark = _saved(tmp_path / "it"), tmp_path / "ran"
    if before:
        _as_before(path)
    (path / name).write_bytes(pickle.dumps(Trap(mark)))
    if forge:
        _forged(path)
    forged_tensors = forge and name == "__0_0.distcp"
    with pytest.raises(CheckpointError, match="cannot be read: rank 0: " if forged_tensors else re.escape(name)):
        _loaded(path)
    assert not mark.exists()


def test_torchs_index_is_not_read(tmp_path):
    path = _saved(tmp_path / "it")
    (path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    _forged(path)
    assert round(_loaded(path).weight[0, 0].item()) == 1
    assert not (tmp_path / "ran").exists()


def test_torch_reads_a_checkpoint_of_ours(tmp_path):
    model = nn.Linear(64, 32)
    save(tmp_path / "it", model=model)
    found = {"model.weight": torch.zeros(32, 64)}
    dcp.load(found, checkpoint_id=tmp_path / "it", no_dist=True)
    assert torch.equal(found["model.weight"], model.weight)


@pytest.mark.parametrize("pickler", [pickle.Pickler, PicklerOf3112])
def test_a_checkpoint_of_before_there_was_an_index_is_read(tmp_path, pickler):
    path = _as_before(_saved(tmp_path / "it", fill=2.0), pickler)
    raw = (path / ".metadata").read_bytes()
    names = {text for op, text, _ in pickletools.genops(raw) if op.name in ("SHORT_BINUNICODE", "BINUNICODE")}
    assert ("getattr" in names) == (pickler is PicklerOf3112 or sys.version_info[:3] == (3, 11, 2))
    assert round(_loaded(path).weight[0, 0].item()) == 2
    save(path, model=_model(4.0))  # and is replaced as any other
    assert (path / "tensors.json").exists()


def _raw_index(*parts):
    """A pickle that looks names up, calls them, and sets what it has made; protocol 2."""
    return b"\x80\x02" + b"".join(parts) + b"."


ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
GETATTR = b"cbuiltins\ngetattr\n"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (_raw_index(GETATTR, b"(", METADATA, b"X\x08\0\0\0__init__tR"), "names builtins.getattr for '__init__'"),
        (_raw_index(GETATTR, b"(", ENCODING, b"X\x07\0\0\0__new__tR"), "names builtins.getattr for '__new__'"),
        (_raw_index(GETATTR, b"(", ENCODING, b"]tR"), "names builtins.getattr for "),
        (
            _raw_index(GETATTR, b"(", METADATA, b"X\x19\0\0\0TORCH_CONTIGUOUS_FORMATtR".replace(b"\x19", b"\x17")),
            "names builtins.getattr for 'TORCH_CONTIGUOUS_FORMAT'",
        ),
        (_raw_index(b"cbuiltins\neval\n(X\x01\0\0\x001tR"), "names builtins.eval"),
        (_raw_index(b"cbuiltins\nsetattr\n"), "names builtins.setattr"),
        (
            _raw_index(b"ctorch.distributed.checkpoint.metadata\nos.system\n"),
            "names torch.distributed",
        ),
        (_raw_index(b"ctorch\nload\n"), "names torch.load"),
        # sets an attribute of whatever class it may name
        (_raw_index(METADATA, b"N}X\x07\0\0\0planted", GETATTR, b"s\x86b"), "not an index of tensors"),
        (_raw_index(ENCODING, b"N}X\x07\0\0\0planted", GETATTR, b"s\x86b"), "not an index of tensors"),
        (_raw_index(b"]"), "not an index of tensors"),
    ],
)
def test_a_planted_index_of_torch_is_refused(tmp_path, raw, told):
    path = _as_before(_saved(tmp_path / "it"))
    (path / ".metadata").write_bytes(raw)
    _forged(path)
    with pytest.raises(CheckpointError, match=told):
        _loaded(path)
    for each in (Metadata, _MEM_FORMAT_ENCODING):
        assert not hasattr(each, "planted")


def test_values_that_torch_would_unpickle_are_refused(tmp_path):
    """Torch's planner reads what its index calls bytes by `torch.load(weights_only=False)`."""
    path, mark = _saved(tmp_path / "it"), tmp_path / "ran"
    for each in (".metadata", "__0_0.distcp"):
        (path / each).unlink()
    dcp.save({"model.weight": Trap(mark), "model.bias": torch.ones(32)}, checkpoint_id=path, no_dist=True)
    index = pickle.loads((path / ".metadata").read_bytes())
    index.storage_meta = None  # it has a path, which is refused as well
    (path / ".metadata").write_bytes(pickle.dumps(index))
    _as_before(path)
    with pytest.raises(CheckpointError, match=r"\.metadata is not an index of tensors: 'model\.weight' is a value"):
        load(path, model=_model(0.0))
    assert not mark.exists()


def test_a_checkpoint_of_before_the_index_had_rules_is_read(tmp_path):
    path = _with_lists(_saved(tmp_path / "it", fill=2.0))
    raw = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(raw[: -16 - int.from_bytes(raw[-8:], "little")])  # files had no such ends
    _forged(path)
    assert round(_loaded(path).weight[0, 0].item()) == 2
    save(path, model=_model(4.0))  # and is replaced as any other
    assert json.loads((path / "jigsaw.json").read_text())["format"] == 3


def _changed_index(path, change):
    """Change what the index says."""
    told = json.loads((path / "tensors.json").read_text())
    change(told)
    (path / "tensors.json").write_text(json.dumps(told))
    _forged(path)


def test_a_trap_in_a_file_of_torchs_own_form_does_not_run(tmp_path):
    """Where the index says that a tensor lies there is what `torch.save` made of a trap."""
    path, mark = _with_lists(_saved(tmp_path / "it")), tmp_path / "ran"
    torch.save(Trap(mark), path / "__0_0.distcp")
    size = (path / "__0_0.distcp").stat().st_size
    _changed_index(path, lambda told: [each["pieces"][0].__setitem__(slice(3, 5), [0, size]) for each in told.values()])
    with pytest.raises(
        CheckpointError, match=r"the tensors of .*it cannot be read: rank 0: .*Weights only load failed"
    ):
        _loaded(path)
    assert not mark.exists()


def _weight_is(**parts):
    return lambda told: told["model.weight"].update(parts)


def _pieces_of(*boxes):
    return [[at, sizes, "__0_0.distcp", 0, 9] for at, sizes in boxes]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            _weight_is(pieces=[[[0, 0], [32, 64], "../elsewhere.distcp", 0, 9]]),
            "lies in '../elsewhere.distcp', a file",
        ),
        (_weight_is(pieces=[[[0, 0], [32, 64], "jigsaw.json", 0, 9]]), "lies in 'jigsaw.json', a file that"),
        (_weight_is(pieces=[]), "the pieces of 'model.weight' do not cover it, each element once"),
        (_weight_is(pieces=_pieces_of(([0, 0], [32, 63]))), "do not cover it"),
        (_weight_is(pieces=_pieces_of(([0, 0], [16, 64]), ([17, 0], [15, 64]))), "do not cover it"),
        (_weight_is(pieces=_pieces_of(([0, 0], [16, 64]), ([15, 0], [17, 64]))), "do not cover it"),
        (_weight_is(pieces=_pieces_of(([0, 0], [16, 64]), ([16, 0], [17, 64]))), "do not cover it"),
        (_weight_is(pieces=_pieces_of(([0], [32]))), "do not cover it"),
        (_weight_is(pieces=_pieces_of(([0, 0], [16, 64]), ([16, 0], [16, 1 << 70]))), "that is not a natural number"),
        (_weight_is(shape=[32, -64]), "that is not a natural number"),
        (_weight_is(shape=[32, True]), "that is not a natural number"),
        (_weight_is(dtype="nn"), "'nn' is not a dtype"),
        (_weight_is(dtype="load"), "'load' is not a dtype"),
        (_weight_is(pieces=5), r"tensors\.json is not an index of tensors"),
        (lambda told: told.update({"model.weight": None}), r"tensors\.json is not an index of tensors"),
    ],
)
def test_a_list_of_pieces_that_cannot_be_is_refused(tmp_path, change, told):
    path = _with_lists(_saved(tmp_path / "it"))
    _changed_index(path, change)
    with pytest.raises(CheckpointError, match=told):
        _loaded(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_weight_is(files=[[1, 1, 1]]), "'model.weight' lies in '__1_0.distcp', a file that the checkpoint does not"),
        (_weight_is(files=[]), "1 pieces do not lie in the files that are said to have them"),
        (_weight_is(files=[[0, 2, 1]]), "1 pieces do not lie in the files"),
        (
            _weight_is(files=[[0, 1 << 70, 1]]),
            "do not cover it, each element once: 1180591620717411303424 is not a",
        ),
        (_weight_is(files=[[0, True, 1]]), "True is not a natural number"),
        (_weight_is(files=[[0, 1]]), r"tensors\.json is not an index of tensors"),
        (_weight_is(cuts=[32]), r"tensors\.json is not an index of tensors"),
        (_weight_is(cuts=[33, 64]), "pieces of 33 rows do not cut 32"),
        (_weight_is(cuts=[0, 64]), "pieces of 0 rows do not cut 32"),
        (_weight_is(cuts=[-1, 64]), "pieces of -1 rows do not cut 32"),
        (_weight_is(cuts=[[1, 16], 64], files=[[0, 2, 0]]), "pieces of a dim of 32 rows do not begin one after"),
        (_weight_is(cuts=[[0, 16, 16], 64], files=[[0, 3, 0]]), "pieces of a dim of 32 rows do not begin one after"),
        (_weight_is(cuts=[[0, 32], 64], files=[[0, 2, 0]]), "pieces of a dim of 32 rows do not begin one after"),
        (_weight_is(cuts=[[], 64]), "pieces of a dim of 32 rows do not begin one after"),
        # of which no list fits into memory
        (_weight_is(shape=[1 << 40, 1 << 20], cuts=[1, 1], files=[[0, 1 << 60, 0]]), "1152921504606846976 pieces do"),
        (_weight_is(shape=[32, -64]), "that is not a natural number"),
        (_weight_is(cuts=[16, 64], files=[[0, 2, 0]]), "__0_0.distcp has no piece 1 of 'model.weight'"),
        (_weight_is(dtype="load"), "'load' is not a dtype"),
    ],
)
def test_rules_that_cannot_be_are_refused(tmp_path, change, told):
    path = _saved(tmp_path / "it")
    _changed_index(path, change)
    with pytest.raises(CheckpointError, match=told):
        _loaded(path)


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (b"{}", "__0_0.distcp has no piece 0 of 'model.weight'"),
        (b'{"model.weight": 7}', "the places of 'model.weight' are not natural numbers"),
        (b'{"model.weight": [0, true]}', "the places of 'model.weight' are not natural numbers"),
        (b'{"model.weight": [0]}', "the places of 'model.weight' are not within"),
        (b'{"model.weight": [0, 1000000]}', "the places of 'model.weight' are not within"),
        (b'{"model.weight": [-1, 2]}', "the places of 'model.weight' are not natural numbers"),
        (b"[]", "__0_0.distcp does not say where its pieces are"),
        (b'{"model.weight"', "__0_0.distcp does not say where its pieces are"),
        (b"[" * 900 + b"]" * 900, "__0_0.distcp does not say where its pieces are"),
        (None, "__0_0.distcp does not end with the places of its pieces"),
    ],
)
def test_places_that_cannot_be_are_refused(tmp_path, places, told):
    path = _saved(tmp_path / "it")
    file = path / "__0_0.distcp"
    raw = file.read_bytes()
    tensors = raw[: -16 - int.from_bytes(raw[-8:], "little")]
    end = b"" if places is None else places + b"jigsaw\0\0" + len(places).to_bytes(8, "little")
    file.write_bytes(tensors + end)
    _forged(path)
    with pytest.raises(CheckpointError, match=told):
        _loaded(path)


def test_an_end_that_is_longer_than_its_file_is_refused(tmp_path):
    path = _saved(tmp_path / "it")
    (path / "__0_0.distcp").write_bytes(b"jigsaw\0\0" + b"\xff" * 8)
    _forged(path)
    with pytest.raises(CheckpointError, match="does not end with the places of its pieces"):
        _loaded(path)


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path):
    path = _saved(tmp_path / "it")
    raw = (path / "tensors.json").read_text()
    (path / "tensors.json").write_text(raw.replace('"model.bias"', '"model.weight"'))
    _forged(path)
    with pytest.raises(CheckpointError, match=r"tensors\.json is not an index of tensors: it has the key 'model"):
        _loaded(path)


def test_other_kinds_of_numbers_and_groups_are_refused(tmp_path):
    path = _saved(tmp_path / "it")
    _changed_index(path, _weight_is(dtype="int32"))
    with pytest.raises(CheckpointError, match=r"'model\.weight' is torch\.int32, the model's torch\.float32, which is"):
        _loaded(path)
    _saved(path)
    for groups in (None, [5], [{"lr": 1}], {"params": []}):
        state = json.loads((path / "jigsaw.json").read_text())["state"]
        _forged(path, state=state | {"optimizer groups": groups})
        with pytest.raises(CheckpointError, match=r"has parameter groups that jigsaw\.save never writes"):
            _loaded(path)


def _deep(path):
    (path / "jigsaw.json").write_text("[" * 900 + "]" * 900)


def _deep_state(path):
    state = "x"
    for _ in range(900):
        state = {"a": state}
    told = json.loads((path / "jigsaw.json").read_text())
    _forged(path, state=told["state"] | {"state of loader": state})


def _fifo(path):
    (path / "jigsaw.json").unlink()
    os.mkfifo(path / "jigsaw.json")


def _device(path):
    (path / "jigsaw.json").unlink()
    (path / "jigsaw.json").symlink_to("/dev/zero")


def _sparse(path):
    os.truncate(path / "jigsaw.json", 1 << 40)


BAD_LAST = {
    "sparse": (_sparse, "has 1099511627776 bytes, and is damaged if it has more"),
    "deep": (_deep, "is damaged: it does not say what"),
    "deep state": (_deep_state, r"the state of a checkpoint is nested more than 100 deep|is damaged"),
    "fifo": (_fifo, r"jigsaw\.json is not a regular file"),
    "device": (_device, r"jigsaw\.json is not a regular file"),
    "folder": (lambda path: (path / "jigsaw.json").unlink() or (path / "jigsaw.json").mkdir(), "is not a regular file"),
    "text": (lambda path: (path / "jigsaw.json").write_bytes(b'{"format": "\xff\xfe"}'), "is damaged"),
    "no files": (lambda path: (path / "jigsaw.json").write_text('{"files": {}}'), "is damaged"),
    "no index": (lambda path: (path / "tensors.json").unlink() or _forged(path), r"it names no tensors\.json"),
    "outside": (lambda path: _renamed_file(path, "../mine"), r"it names a file '\.\./mine'"),
    "future": (lambda path: _forged(path, format=4), "is of format 4, and this jigsaw reads 1 to 3"),
}


def _renamed_file(path, name):
    told = json.loads((path / "jigsaw.json").read_text())
    del told["crc32"]
    told["files"][name] = told["files"].pop(".metadata")
    (path / "jigsaw.json").write_text(json.dumps({"crc32": zlib.crc32(json.dumps(told).encode()), **told}))


@pytest.mark.parametrize("kind", BAD_LAST)
def test_whatever_stands_in_the_place_of_jigsaw_json_is_told(tmp_path, kind):
    (tmp_path / "mine").write_bytes(b"mine")
    path = _saved(tmp_path / "run" / "step-7")
    change, told = BAD_LAST[kind]
    change(path)
    with pytest.raises(CheckpointError, match=told):
        _loaded(path)
    if kind not in ("deep state", "future"):  # `load` says why
        assert latest(path.parent) is None
    if kind != "deep state":  # which is of a checkpoint that is sound otherwise
        there = sorted(os.listdir(path))
        with pytest.raises(CheckpointError, match=r"step-7 is there, and is replaced only where it is a check"):
            save(path, model=_model(1.0))
        save(path.with_name("step-8"), model=_model(1.0), keep=1)
        assert sorted(os.listdir(path)) == there
    assert (tmp_path / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_file_can_have_are_no_whole_checkpoint(tmp_path, name):
    for step in (6, 7):
        path = _saved(tmp_path / "run" / f"step-{step}")
    _renamed_file(path, name)
    assert latest(path.parent) == path.with_name("step-6")
    with pytest.raises(CheckpointError, match="has no file"):
        _loaded(path)


class FailingState:
    def state_dict(self):
        raise ValueError("no state yet")


def _one_rank_fails(path):
    fails = dist.get_rank() == 1
    with pytest.raises(CheckpointError, match=r"ValueError\('no state yet'\)"):
        save(path, model=_model(1.0), holder=FailingState() if fails else Holder({}))
    for impossible in (lambda: save("a\0b", model=_model(1.0)), lambda: save_weights("a\0b", _model(1.0))):
        with pytest.raises(CheckpointError, match=r"embedded null (byte|character)"):
            impossible()


def test_whatever_fails_on_one_rank_fails_on_all(tmp_path):
    run_on_ranks(2, _one_rank_fails, tmp_path / "it")


def test_a_state_that_is_nested_too_deeply_is_not_saved(tmp_path):
    state = []
    for _ in range(900):
        state = [state]
    with pytest.raises(CheckpointError, match="nested more than 100 deep, which a checkpoint cannot hold; flatten it"):
        save(tmp_path / "it", holder=Holder(state))
    shallow = ()
    for _ in range(40):
        shallow = (shallow,)
    save(tmp_path / "it", holder=Holder(shallow))
    again = Holder()
    load(tmp_path / "it", holder=again)
    assert again.state == shallow


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
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "jigsaw.json", "tensors.json"]
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
            if name in (".metadata", "tensors.json") and kind == "mix":  # the same bytes: models of one shape
                assert told == [{"fill": 1.0}] * 2
            else:
                assert told[0] == told[1]
                assert "distcp" in told[0] if (name, kind) == ("jigsaw.json", "mix") else name in told[0], (name, kind)
    assert run_on_ranks(2, _load_one, tmp_path / "one") == [{"fill": 1.0}] * 2


# -- kills ------------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, torch
from jigsaw.checkpoint.checkpoints import save

stop, folder = int(sys.argv[2]), os.path.dirname(sys.argv[1])
seen = 0

def hook(event, args):
    global seen
    if event == "os.rename" and str(args[0]).startswith(folder) and ".metadata" not in str(args[0]):
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
    assert sorted(re.sub("[0-9a-f]{16}", "*", p.name) for p in tmp_path.iterdir()) == [
        ".last.*.draft",
        ".last.*.replaced",
    ]
    assert _weight(path) == 2.0
    shutil.copytree(tmp_path, again := tmp_path.with_name(f"{tmp_path.name}-again"))
    next(again.glob(".last.*.draft/jigsaw.json")).unlink()
    assert _weight(again / "last") == 1.0
    for folder in (tmp_path, again):
        save(folder / "last", model=_model(3.0))
        assert [p.name for p in folder.iterdir()] == ["last"]
        assert _weight(folder / "last") == 3.0


@pytest.mark.slow
def test_a_kill_before_the_first_rename_leaves_the_old_one(tmp_path):
    path = tmp_path / "last"
    _killed(path, 1)
    assert _weight(path) == 1.0
    save(path, model=_model(3.0))
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_a_save_that_was_killed_while_it_wrote_is_told(tmp_path):
    (tmp_path / ".last.0123456789abcdef.draft").mkdir()
    with pytest.raises(CheckpointError, match=r"last does not exist; .*\.last\..*\.draft is there, but not whole"):
        load(tmp_path / "last", model=_model(0.0))


def test_a_disk_that_takes_no_more_is_told(tmp_path):
    (tmp_path / "last").write_text("a file")
    with pytest.raises(CheckpointError, match=r"the tensors of .*last/run cannot be written: .*(exists|Not a d)"):
        save(tmp_path / "last" / "run", model=_model(1.0))


def test_a_path_that_is_not_a_checkpoint_is_not_replaced_by_what_lies_beside_it(tmp_path):
    (tmp_path / "it").mkdir()
    _saved(tmp_path / ".it.0123456789abcdef.draft")
    with pytest.raises(CheckpointError, match=r"it is not whole: it has no jigsaw\.json"):
        load(tmp_path / "it", model=_model(0.0))


# -- what is not ours -------------------------------------------------------------------------------------------------


def _tree(folder):
    """All that is in a folder: files with their content, links with where they lead."""
    found = {}
    for each in sorted(folder.rglob("*")):
        name = str(each.relative_to(folder))
        found[name] = each.readlink() if each.is_symlink() else each.read_bytes() if each.is_file() else None
    return found


def _foreign_folders(folder):
    """What lies beside checkpoints: a user's folders, another library's, links, and names like those of a save."""
    (folder / "step-50").mkdir()
    (folder / "step-50" / "thesis.tex").write_text("mine")
    (folder / "step-51").mkdir()
    (folder / "step-51" / "jigsaw.json").write_text('{"files": {}}')
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder / "step-52", no_dist=True)
    (folder / "step-53").mkdir()
    (folder / "step-54").write_text("a file")
    (folder / "step-55").symlink_to(_saved(folder / "elsewhere"))
    shutil.copytree(_saved(folder / "step-56"), folder / "step-57")
    (folder / "step-57" / "notes.txt").write_text("mine")
    for name in ("step-100.part", "step-100.part.old", "step-100.old"):
        (folder / name).mkdir()
        (folder / name / "data.bin").write_bytes(b"mine")
    hidden = folder / ".step-100.0123456789abcdef.draft"
    hidden.mkdir()
    (hidden / "data.bin").write_bytes(b"mine")
    (folder / ".step-100.fedcba9876543210.draft").symlink_to(folder / "step-50")


def test_keep_removes_what_jigsaw_wrote_and_nothing_else(tmp_path):
    _foreign_folders(tmp_path)
    before = _tree(tmp_path)
    with pytest.warns(UserWarning, match=r"step-57 is not removed, though keep=1: it has 'notes\.txt', which"):
        save(tmp_path / "step-100", model=_model(1.0), keep=1)
    after = {name: each for name, each in _tree(tmp_path).items() if Path(name).parts[0] != "step-100"}
    assert after == {name: each for name, each in before.items() if Path(name).parts[0] != "step-56"}
    assert _weight(latest(tmp_path)) == 1.0


@pytest.mark.parametrize("name", ["step-50", "step-51", "step-52", "step-54", "step-55", "step-57", "step-100.part"])
def test_what_is_not_a_checkpoint_of_jigsaw_is_not_replaced(tmp_path, name):
    _foreign_folders(tmp_path)
    before = _tree(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{name} is there, and is replaced only where it is a check"):
        save(tmp_path / name, model=_model(1.0))
    assert _tree(tmp_path) == before


def test_an_empty_folder_becomes_a_checkpoint(tmp_path):
    (tmp_path / "it").mkdir()
    save(tmp_path / "it", model=_model(2.0))
    assert _weight(tmp_path / "it") == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["it"]


def test_what_appears_while_a_save_writes_is_not_replaced(tmp_path):
    class Slow(Holder):
        def state_dict(self):
            return {}

    pending = save(tmp_path / "it", model=_model(1.0))
    (tmp_path / "it" / "notes.txt").write_text("mine")
    before = _tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has 'notes\.txt', which jigsaw did not write; save to another name"):
        save(tmp_path / "it", model=_model(2.0), wait=False)
    assert pending is None
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", ["", ".", "/", "run/.."])
def test_a_path_without_a_name_is_told(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="names no folder of its own that a checkpoint could be"):
        save(name, model=_model(1.0))


def test_nothing_is_written_through_a_link(tmp_path):
    victims = tmp_path / "victims"
    victims.mkdir()
    for name in ("jigsaw.json", ".metadata", "__0_0.distcp", "tensors.json", ".metadata.tmp"):
        (victims / name).write_bytes(b"mine")
    before = _tree(victims)
    run = tmp_path / "run"
    run.mkdir()
    for name in ("last.part", "last.part.old", ".last.0123456789abcdef.draft"):
        (run / name).symlink_to(victims)
    for fill in (1.0, 2.0):
        save(run / "last", model=_model(fill))
    assert _weight(run / "last") == 2.0
    assert _tree(victims) == before


@pytest.mark.parametrize("size", [0, 5000, 200_000])
@pytest.mark.parametrize("write", ["save", "save_weights"])
def test_a_full_disk_is_told_with_what_to_do_and_loses_nothing(tmp_path, write, size):
    """Torch's own words for a file that was cut short are "unexpected pos 704 vs 598"."""
    before, after = nn.Linear(300, 300), nn.Linear(300, 300)

    def write_model(net):
        save(tmp_path / "s", model=net) if write == "save" else save_weights(tmp_path / "s", net)

    write_model(before)
    with (
        no_space(size),
        pytest.raises(CheckpointError, match=r"see that its disk has room .*then save again; .*as it w"),
    ):
        write_model(after)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    again = nn.Linear(300, 300)
    load(tmp_path / "s", model=again) if write == "save" else load_weights(tmp_path / "s", again)
    assert torch.equal(again.weight, before.weight)
    write_model(after)
