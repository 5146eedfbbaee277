"""A disk cache under random puts, damage, planted files, drafts and locks left over: it answers right or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jigsaw.drafts import unforeseen_name
from jigsaw.errors import CacheError
from jigsaw.io.cache_folder import CACHE_COUNT_FILE, CacheFolder
from jigsaw.io.chunks.files import ObjectIdentity
from jigsaw.io.formats.disk_cache import KeptAnswers

LIMIT, STRANGER = 4000, 12345
OBJECTS, STATES, SIZES = (
    st.integers(0, 4),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([0, 1, 100, 900, 3000, 5000]),
)
SECRET = b"of another folder"


class CacheUnderUse(RuleBasedStateMachine):
    """Of each object the last answer that was put is kept in a dict: it may be gone, but nothing else may come."""

    def __init__(self):
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="jigsaw-machine-"))
        self.before = os.environ.get("JIGSAW_CACHE_TIMEOUT")
        os.environ["JIGSAW_CACHE_TIMEOUT"] = "0.02"
        self.path, self.number = self.home / "cache", 0
        self.put, self.names, self.held = {}, {}, None
        (self.home / "secret").write_bytes(SECRET)
        self._folder().make_ready()
        (self.path / "notes.txt").write_bytes(b"the user's own")

    def teardown(self):
        self.release()
        os.environ.pop("JIGSAW_CACHE_TIMEOUT")
        if self.before is not None:
            os.environ["JIGSAW_CACHE_TIMEOUT"] = self.before
        shutil.rmtree(self.home)

    def _folder(self):
        return CacheFolder(self.path, LIMIT, spare=LIMIT // 8)

    def _answers(self):
        """Those of a run that has just begun."""
        return KeptAnswers(self._folder())

    def _known(self, number, state):
        return ObjectIdentity(f"s3://bucket/{number}", state)

    def _get(self, number, state):
        found = self._answers().read(self._known(number, state), "whole")
        return None if found is None else found.tobytes()

    def _files(self):
        return [each for each in self.path.iterdir() if each.name.endswith((".chunk", ".draft"))]

    def _entry(self, number):
        """The file of an object's answer; None before the first."""
        return self.names.get(number)

    # -- what the cache is asked for ---------------------------------------------------------------------------------

    @rule(number=OBJECTS, state=STATES, size=SIZES)
    def put_one(self, number, state, size):
        self.number += 1
        raw = np.random.default_rng(self.number).integers(0, 256, size, np.uint8)
        if self.held is not None and size + 24 <= LIMIT:
            with pytest.raises(CacheError, match=r"process 1 of nobody holds the lock .*/count"):
                self._answers().write(self._known(number, state), "whole", raw)
            return
        before = {each.name for each in self._files()}
        self._answers().write(self._known(number, state), "whole", raw)
        if size + 24 > LIMIT:
            return
        self.put[number] = state, raw.tobytes()
        for name in {each.name for each in self._files()} - before:
            self.names[number] = self.path / name
        assert self._get(number, state) == raw.tobytes()

    @rule(number=OBJECTS, state=STATES)
    def get_one(self, number, state):
        found = self._get(number, state)
        if found is not None:
            known_state, raw = self.put[number]
            assert found == raw
            assert known_state == state or "" in (known_state, state)

    @rule(number=OBJECTS)
    def forget_one(self, number):
        self._answers().remove(self._known(number, ""))
        assert self._get(number, "") is None

    # -- what happens to the folder ----------------------------------------------------------------------------------

    @rule(number=OBJECTS, at=st.integers(0, 5000), cut=st.booleans())
    def damage_one(self, number, at, cut):
        path = self._entry(number)
        if path is None or path.is_symlink() or not path.is_file() or not path.stat().st_size:
            return
        raw = bytearray(path.read_bytes())
        at %= len(raw)
        raw[at] ^= 1 << (at % 8)
        path.write_bytes(raw[:at] if cut else raw)
        assert self._get(number, "") is None

    @rule(number=OBJECTS, other=OBJECTS)
    def copy_one_over_another(self, number, other):
        path, theirs = self._entry(number), self._entry(other)
        if number == other or None in (path, theirs) or not path.is_file() or not theirs.is_file():
            return
        shutil.copyfile(theirs, path)
        assert self._get(number, "") is None

    @rule(number=OBJECTS, kind=st.sampled_from(["link", "pipe", "folder"]))
    def others_plant(self, number, kind):
        path = self._entry(number)
        if path is None or (path.exists() and not path.is_file()):
            return
        path.unlink(missing_ok=True)
        if kind == "link":
            path.symlink_to(self.home / "secret")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            return  # a folder of that name is nobody's draft, and the cache would never come by its name again
        assert self._get(number, "") is None

    @precondition(lambda self: os.geteuid() == 0)
    @rule(number=OBJECTS)
    def another_user_owns_one(self, number):
        path = self._entry(number)
        if path is not None and path.is_file() and not path.is_symlink():
            os.chown(path, STRANGER, STRANGER)
            assert self._get(number, "") is None

    @rule(number=OBJECTS, size=st.integers(0, 3000))
    def is_killed_while_it_writes(self, number, size):
        path = self._entry(number)
        if path is not None and self.held is None:
            draft = unforeseen_name(path)
            draft.touch(0o600)
            draft.write_bytes(bytes(size))
            (self.path / CACHE_COUNT_FILE).write_bytes(b"")  # it was killed before it counted

    @rule(raw=st.binary(max_size=40))
    def the_count_is_damaged(self, raw):
        if self.held is None:
            (self.path / CACHE_COUNT_FILE).write_bytes(raw)

    @rule()
    def a_lock_is_left_over(self):
        """Its holder has ended: what it wrote is there, and nobody holds it."""
        if self.held is None:
            with open(self.path / CACHE_COUNT_FILE, "ab") as file:
                os.pwrite(file.fileno(), b"process 1 of nobody".ljust(256, b"\0"), 64)

    @precondition(lambda self: self.held is None)
    @rule()
    def somebody_holds_the_lock(self):
        self.held = os.open(self.path / CACHE_COUNT_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(self.held, b"process 1 of nobody".ljust(256, b"\0"), 64)

    @precondition(lambda self: self.held is not None)
    @rule()
    def release(self):
        if self.held is not None:
            os.close(self.held)
            self.held = None

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def others_files_are_as_they_were(self):
        assert (self.home / "secret").read_bytes() == SECRET
        assert (self.path / "notes.txt").read_bytes() == b"the user's own"

    @invariant()
    def what_is_kept_is_the_users_own(self):
        assert all(
            each.lstat().st_mode & 0o077 == 0 for each in self._files() if each.is_file() and not each.is_symlink()
        )


def usual(**more):
    return settings(
        deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), stateful_step_count=25, **more
    )


TestCacheUnderUse = CacheUnderUse.TestCase
TestCacheUnderUse.settings = usual(max_examples=40)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestCacheUnderLongUse(CacheUnderUse.TestCase):
    """The same for longer."""

    settings = usual(max_examples=1500)
