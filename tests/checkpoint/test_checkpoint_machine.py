"""Checkpoints of one folder under random saves, kills, returns to older ones, and folders of others: none is lost."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jigsaw.checkpoint.checkpoints import latest, load, save
from jigsaw.drafts import unforeseen_name
from jigsaw.errors import CheckpointError

NUMBERS = st.integers(1, 6).map(lambda n: 10 * n)


class CheckpointFolder(RuleBasedStateMachine):
    """What is there is kept in dicts: of each number the value and the time of its save, and of others' files."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="jigsaw-machine-"))
        self.saved, self.foreign, self.time = {}, {}, 0

    def teardown(self):
        shutil.rmtree(self.folder)

    def _path(self, number):
        return self.folder / f"step-{number}"

    @rule(number=NUMBERS, keep=st.none() | st.integers(1, 3), wait=st.booleans())
    def save_one(self, number, keep, wait):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, float(self.time))
        if self._path(number) in self.foreign:
            with pytest.raises(CheckpointError, match=f"step-{number} is there, and is replaced only"):
                save(self._path(number), model=model, keep=keep)
            return
        pending = save(self._path(number), model=model, keep=keep, wait=wait)
        if not wait:
            pending.wait()
        self.saved[number] = (self.time, float(self.time))
        self.time += 1
        if keep is not None:
            lower = sorted((each for each in self.saved if each <= number), key=lambda each: self.saved[each])
            for each in lower[:-keep]:
                del self.saved[each]

    @rule(number=NUMBERS)
    def load_one(self, number):
        model = torch.nn.Linear(1, 1)
        if number not in self.saved:
            with pytest.raises(CheckpointError, match=r"does not exist|is not whole|is damaged"):
                load(self._path(number), model=model)
            return
        load(self._path(number), model=model)
        assert model.weight.item() == self.saved[number][1]

    @rule(number=NUMBERS, has_tensors=st.booleans())
    def is_killed_while_it_writes(self, number, has_tensors):
        draft = unforeseen_name(self._path(number))
        draft.mkdir()
        if has_tensors:
            (draft / "__0_0.distcp").write_bytes(b"half")

    @rule(number=NUMBERS)
    def is_killed_between_the_renames(self, number):
        """The old one has made room, and the new one, which is whole, has not taken it."""
        path, source = self._path(number), latest(self.folder)
        if path in self.foreign or source is None or not path.exists() or source != path:
            return
        shutil.copytree(path, unforeseen_name(path))
        path.rename(unforeseen_name(path, "replaced"))

    @rule(number=NUMBERS, kind=st.sampled_from(["text", "torn"]))
    def a_folder_of_others_appears(self, number, kind):
        path = self._path(number)
        if path.exists() or number in self.saved:
            return
        path.mkdir()
        content = {"text": ("thesis.tex", b"mine"), "torn": ("jigsaw.json", b'{"files": {}}')}[kind]
        (path / content[0]).write_bytes(content[1])
        self.foreign[path] = content

    @rule(number=NUMBERS)
    def others_lay_links_under_old_names(self, number):
        for suffix in (".part", ".part.old"):
            link = self.folder / f"step-{number}{suffix}"
            if not link.is_symlink():
                link.symlink_to("/dev/null")

    @invariant()
    def the_last_is_what_was_saved_last(self):
        last = max(self.saved, key=lambda each: self.saved[each], default=None)
        assert latest(self.folder) == (None if last is None else self._path(last))

    @invariant()
    def nothing_of_others_is_touched(self):
        for path, (name, content) in self.foreign.items():
            assert [each.name for each in path.iterdir()] == [name]
            assert (path / name).read_bytes() == content


TestCheckpointFolder = CheckpointFolder.TestCase
TestCheckpointFolder.settings = settings(
    max_examples=20, stateful_step_count=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
