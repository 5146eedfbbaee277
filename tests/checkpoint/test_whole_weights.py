"""Weights as one file: what torch reads of its header, every mesh writes and reads the same bytes, damage is told."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_checkpoint import MODES, Net
from torch import nn
from torch.distributed.checkpoint._hf_utils import _get_safetensors_file_metadata

import jigsaw
from jigsaw.errors import CheckpointError
from jigsaw.parallel.parallelize import parallelize
from jigsaw.testing import run_on_ranks, world_mesh


def _net(seed):
    torch.manual_seed(seed)
    return Net().double()


def _write(path, axes, mode):
    jigsaw.save_weights(path, parallelize(_net(3), world_mesh(**axes), **MODES[mode]))


def _read(path, axes, mode):
    model = parallelize(_net(4), world_mesh(**axes), **MODES[mode])
    jigsaw.load_weights(path, model)
    found = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}
    for name, x in _net(3).state_dict().items():
        assert torch.equal(found[name], x), name


WAYS = [({"lat": 2}, "cut"), ({"lat": 2}, "whole"), ({"channel": 2, "lat": 2}, "cut"), ({"channel": 2}, "whole")]


def test_every_mesh_writes_the_same_file_and_reads_it(tmp_path):
    jigsaw.save_weights(tmp_path / "alone.safetensors", _net(3))
    alone = (tmp_path / "alone.safetensors").read_bytes()
    for at, (axes, mode) in enumerate(WAYS):
        ranks = 4 if len(axes) == 2 else 2
        path = tmp_path / f"{at}.safetensors"
        run_on_ranks(ranks, _write, path, axes, mode)
        assert path.read_bytes() == alone
        run_on_ranks(ranks, _read, path, axes, mode)
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".safetensors"] * (len(WAYS) + 1)


def test_torch_finds_each_tensor_where_it_is(tmp_path):
    model = nn.ParameterDict(
        {
            "fine": nn.Parameter(torch.randn(3, 5).bfloat16()),
            "scalar": nn.Parameter(torch.tensor(2.5)),
            "none": nn.Parameter(torch.empty(0, 4)),
        }
    )
    model.register_buffer("flags", torch.tensor([True, False, True]))
    jigsaw.save_weights(tmp_path / "it.safetensors", model)
    with (tmp_path / "it.safetensors").open("rb") as opened:
        told, start = _get_safetensors_file_metadata(opened)
    raw = (tmp_path / "it.safetensors").read_bytes()
    assert start % 8 == 0
    assert len(raw) == start + 3 * 5 * 2 + 4 + 3
    kinds = {"fine": ("BF16", np.int16), "scalar": ("F32", np.float32), "flags": ("BOOL", np.bool_)}
    for name, (kind, dtype) in kinds.items():
        x = model.state_dict()[name]
        begin, end = told[name]["data_offsets"]
        assert (told[name]["dtype"], told[name]["shape"]) == (kind, list(x.shape))
        values = np.frombuffer(raw[start + begin : start + end], dtype).reshape(x.shape)
        assert np.array_equal(values, (x.view(torch.int16) if name == "fine" else x).numpy())


def test_files_of_a_folder_are_read_together_and_converted(tmp_path):
    parts = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 1)})
    for name in parts:
        jigsaw.save_weights(tmp_path / f"{name}.safetensors", nn.ModuleDict({name: parts[name]}))
    other = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 1)}).double()
    jigsaw.load_weights(tmp_path, other)
    for mine, theirs in zip(other.parameters(), parts.parameters(), strict=True):
        assert torch.equal(mine, theirs.double())


class _Language(nn.Module):
    """An embedding whose weight the head has, too, as in many language models."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


HUGGING_FACE = {
    "embed.weight": "model.embed_tokens.weight",
    "block.weight": "model.layers.0.mlp.weight",
    "block.bias": "model.layers.0.mlp.bias",
    "head.weight": "lm_head.weight",
}


def _read_theirs(path, names):
    model = parallelize(_Language().double(), world_mesh(lat=2), shard_weights=True)
    jigsaw.load_weights(path, model, names)
    return {name: x.full_tensor() for name, x in model.state_dict().items()}


def _theirs(**more):
    layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(4, 4)})])
    return nn.ModuleDict(
        {"model": nn.ModuleDict({"embed_tokens": nn.Embedding(7, 4), "layers": layers}), **more}
    ).double()


@pytest.mark.parametrize("names", [HUGGING_FACE, HUGGING_FACE.__getitem__], ids=["mapping", "function"])
def test_names_of_others_are_read_and_written_and_shared_weights_have_one(tmp_path, names):
    theirs = _theirs()
    jigsaw.save_weights(tmp_path / "theirs.safetensors", theirs)
    expected = theirs.state_dict()
    for state in run_on_ranks(2, _read_theirs, tmp_path / "theirs.safetensors", names):
        assert torch.equal(state.pop("head.weight"), state["embed.weight"])
        assert {HUGGING_FACE[name] for name in state} == set(expected)
        assert all(torch.equal(x, expected[HUGGING_FACE[name]]) for name, x in state.items())
    model = _Language().double()
    jigsaw.save_weights(tmp_path / "ours.safetensors", model, names)
    again = _theirs(lm_head=nn.Linear(4, 7, bias=False))
    jigsaw.load_weights(tmp_path / "ours.safetensors", again)
    assert all(torch.equal(again.state_dict()[HUGGING_FACE[name]], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"weights": "w"}, r"names= has \['weights'\], which the model does not have"),
        (lambda name: "w", "gives 'weight' and 'bias' of the model one name, 'w'"),
        ({"weight": "__metadata__"}, "gives 'weight' of the model the name '__metadata__'; names in a file are texts"),
        ({"weight": 3}, "gives 'weight' of the model the name 3; names in a file are texts"),
        (["w"], r"names=\['w'\] must be names of the file by those of the model"),
    ],
)
def test_names_that_do_not_fit_the_model(tmp_path, names, words):
    with pytest.raises(CheckpointError, match=words):
        jigsaw.save_weights(tmp_path / "it.safetensors", nn.Linear(3, 2), names)
    jigsaw.save_weights(tmp_path / "it.safetensors", nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=words):
        jigsaw.load_weights(tmp_path / "it.safetensors", nn.Linear(3, 2), names)


def _broken(header, more=0):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return len(text).to_bytes(8, "little") + text + bytes(more)


_F32_6 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
_F32_2 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"\xff" * 20, r"its header would have 18446744073709551615 bytes"),
        (_broken(b"{not json"), r"is damaged, or no file of weights: Expecting"),
        (_broken({"weight": {"dtype": "F31", "shape": [2, 3], "data_offsets": [0, 24]}}, 24), r"'F31'"),
        (_broken({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}, 24), r"another size than its"),
        (_broken({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}}, 24), r"'weight' lies outside"),
        (
            _broken({"weight": {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}}, 24),
            "not a natural",
        ),
        (_broken({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [-8, 16]}}, 24), "not a natural"),
        (_broken({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24, 24]}}, 24), r"too many values"),
        (
            _broken({"weight": _F32_6, "bias": {**_F32_2, "data_offsets": [16, 24]}}, 24),
            "'bias' lies in the bytes",
        ),
        (
            _broken(json.dumps({"weight": _F32_6, "w": _F32_6}).replace('"w"', '"weight"').encode(), 48),
            r"it has the key 'weight' twice",
        ),
        (_broken(json.dumps({"weight": _F32_6}).encode("utf-16"), 24), r"is damaged, or no file of weights: 'utf-8'"),
        (_broken(b'{"weight": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), r"nested too deeply"),
        (
            _broken({"weight": {**_F32_6, "dtype": "I32"}, "bias": {**_F32_2, "data_offsets": [24, 32]}}, 32),
            r"is of another model: 'weight' is torch\.int32, the model's torch\.float32, which is not converted",
        ),
        (
            _broken({"weight": _F32_6, "bias": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]}}, 40),
            r"'bias' is torch\.int64, the model's torch\.float32, which is not converted",
        ),
        (
            _broken({"weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}}, 24),
            r"'weight' has shape \(3, 2\), the model's \(2, 3\); missing: 'bias'",
        ),
    ],
)
def test_damaged_and_foreign_files_are_told_and_nothing_is_changed(tmp_path, raw, told):
    (tmp_path / "it.safetensors").write_bytes(raw)
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=told):
        jigsaw.load_weights(tmp_path / "it.safetensors", model)
    assert torch.equal(model.weight, before)


def test_two_files_of_a_folder_with_one_name_are_refused(tmp_path):
    for name in ("a", "b"):
        jigsaw.save_weights(tmp_path / f"{name}.safetensors", nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"a\.safetensors and b\.safetensors of .* both have 'bias'; read one"):
        jigsaw.load_weights(tmp_path, nn.Linear(3, 2))
    jigsaw.load_weights(tmp_path / "b.safetensors", nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("stored", "mine", "is_read"),
    [
        (torch.int32, torch.int64, True),
        (torch.uint8, torch.int16, True),
        (torch.int64, torch.int32, False),
        (torch.int8, torch.uint8, False),
        (torch.bool, torch.int64, False),
        (torch.int64, torch.bool, False),
        (torch.float32, torch.int64, False),
        (torch.int64, torch.float64, False),
        (torch.complex64, torch.float32, False),
        (torch.float32, torch.complex64, False),
        (torch.float64, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
    ],
)
def test_kinds_of_numbers_are_not_mixed(tmp_path, stored, mine, is_read):
    def module(dtype):
        found = nn.Module()
        found.register_buffer("it", torch.ones(3).to(dtype))
        return found

    jigsaw.save_weights(tmp_path / "it.safetensors", module(stored))
    other = module(mine)
    other.it.zero_()
    if is_read:
        jigsaw.load_weights(tmp_path / "it.safetensors", other)
        assert torch.equal(other.it, torch.ones(3).to(mine))
        return
    with pytest.raises(CheckpointError, match=r"'it' is torch\.\w+, the model's torch\.\w+, which is not converted"):
        jigsaw.load_weights(tmp_path / "it.safetensors", other)
    assert not other.it.any()


def test_what_a_file_cannot_have_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"'weight' is .*complex128, which a file of weights cannot have; it has"):
        jigsaw.save_weights(tmp_path / "it", nn.Linear(2, 2, bias=False).to(torch.complex128))
    with pytest.raises(CheckpointError, match=r"the weights of .*none/it cannot be written: .*No such file"):
        jigsaw.save_weights(tmp_path / "none" / "it", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"is neither a \.safetensors file nor a folder with some"):
        jigsaw.load_weights(tmp_path, nn.Linear(2, 2))


def test_nothing_is_written_through_a_link_and_nothing_half_is_left(tmp_path):
    victim = tmp_path / "mine"
    victim.write_bytes(b"mine")
    for name in ("it.safetensors", "it.safetensors.part"):
        (tmp_path / name).symlink_to(victim)
    jigsaw.save_weights(tmp_path / "it.safetensors", nn.Linear(3, 2))
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "it.safetensors").is_symlink()
    jigsaw.load_weights(tmp_path / "it.safetensors", nn.Linear(3, 2))
    (tmp_path / "it.safetensors.part").unlink()
    (tmp_path / "a folder").mkdir()
    with pytest.raises(CheckpointError, match=r"the weights of .*a folder cannot be written: rank 0: IsADirectory"):
        jigsaw.save_weights(tmp_path / "a folder", nn.Linear(3, 2))
    for _ in range(2):  # to an empty file, then to one of weights
        (tmp_path / "again").touch()
        jigsaw.save_weights(tmp_path / "again", nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"mine is there, and is replaced only where it is a file of weights \("):
        jigsaw.save_weights(victim, nn.Linear(3, 2))
    assert victim.read_bytes() == b"mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a folder", "again", "it.safetensors", "mine"]
