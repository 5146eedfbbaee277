"""Caches belong to one user: what others plant is not read, what is kept others cannot read, no lock holds for ever.

A second user is a child process of another user id, so these tests need root.
"""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_disk_cache import filled, values_of
from volume_store import AFFINE

from jigsaw.errors import CacheError, UnsupportedStoreError
from jigsaw.io.cache_folder import CacheFolder
from jigsaw.io.formats.disk_cache import DiskCache
from jigsaw.io.formats.hdf5 import open_hdf5_file
from jigsaw.io.formats.nifti import open_nifti

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")


def scan(folder, value=5.0):
    """A scan that its owner alone may read."""
    path = folder / "scan.nii.gz"
    values = np.full((70, 80, 100), value, "f4")
    nibabel.save(nibabel.Nifti1Image(values, AFFINE), path)
    path.chmod(0o600)
    os.utime(path, (1, 1))
    return path


def mean_of(path):
    return float(open_nifti(str(path)).read_small("image").mean())


BECOME = f"import fcntl, os, sys, time\nos.setgid({STRANGER}); os.setuid({STRANGER})\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder that everybody may enter, and a umask under which files are readable by all."""
    monkeypatch.setenv("JIGSAW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JIGSAW_CACHE_TIMEOUT", "0.3")
    before = os.umask(0o022)
    here = tmp_path
    while here != Path("/tmp"):  # pytest's folders are its user's alone
        here.chmod(0o755)
        here = here.parent
    yield tmp_path
    os.umask(before)


def test_what_is_kept_is_for_its_user_alone(home):
    mean_of(scan(home))
    with h5py.File(home / "x.h5", "w") as f:
        f.create_dataset("x", data=np.ones(5000), chunks=(1,))
    os.utime(home / "x.h5", (1, 1))
    open_hdf5_file(home / "x.h5").read_small("x")
    values_of(filled(str(home / "s.zarr"), 1), DiskCache(home / "deep" / "answers", 1 << 20))
    for folder in (home / "cache", home / "deep" / "answers"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = list(folder.iterdir())
        assert len(files) >= 2
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((home / "deep").stat().st_mode) == 0o755  # which is none of the cache's


@as_root
@pytest.mark.parametrize("use", ["scan", "answers"])
def test_a_folder_of_somebody_else_is_refused(home, use):
    (home / "cache").mkdir()
    os.chown(home / "cache", STRANGER, STRANGER)
    with pytest.raises(
        CacheError, match=r"cache .* belongs to user 12345, who may put anything.*JIGSAW_CACHE_SHARED=1"
    ):
        mean_of(scan(home)) if use == "scan" else DiskCache(home / "cache", 1000).of(None)
    assert not list((home / "cache").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_write_to_is_refused_unless_it_is_shared_by_name(home, mode, monkeypatch):
    (home / "cache").mkdir()
    (home / "cache").chmod(mode)
    path = scan(home)
    with pytest.raises(CacheError, match=r"other users may write to the cache .* \(mode 1?77[57]\).*chmod 700"):
        mean_of(path)
    with pytest.raises(CacheError, match="other users may write"):
        values_of(filled(str(home / "s.zarr"), 1), DiskCache(home / "cache", 1 << 20))
    assert values_of(filled(str(home / "s.zarr"), 1), DiskCache(home / "cache", 1 << 20, shared=True)) == {1}
    monkeypatch.setenv("JIGSAW_CACHE_SHARED", "1")
    assert mean_of(path) == 5.0


@as_root
def test_an_index_of_hdf5_does_without_a_cache_of_somebody_else(home):
    (home / "cache").mkdir()
    os.chown(home / "cache", STRANGER, STRANGER)
    with h5py.File(home / "x.h5", "w") as f:
        f.create_dataset("x", data=np.ones(5000), chunks=(1,))
    assert open_hdf5_file(home / "x.h5").read_small("x").sum() == 5000
    assert not list((home / "cache").iterdir())


@as_root
@pytest.mark.parametrize("how", ["owned", "linked"])
def test_a_planted_entry_is_not_read(home, how):
    path = scan(home)
    assert mean_of(path) == 5.0
    (entry,) = (home / "cache").glob("*.raw")
    raw = bytearray(entry.read_bytes())
    entry.unlink()
    (home / "else").mkdir()
    planted = entry if how == "owned" else home / "else" / entry.name
    made = home / "other.nii.gz"
    scan(home / "else", 666.0).rename(made)
    os.utime(made, (1, 1))
    mean_of(made)
    (theirs,) = (home / "cache").glob("*.raw")
    planted.write_bytes(theirs.read_bytes()[: len(raw)])
    os.chown(planted, STRANGER, STRANGER)
    if how == "linked":
        entry.symlink_to(planted)
    assert mean_of(path) == 5.0
    assert entry.stat().st_uid == os.geteuid()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_entry_is_made_again(home, data):
    path = scan(home)
    store = open_nifti(str(path))
    table = store.arrays["image"]
    assert store.read_small("image").mean() == 5
    (entry,) = (home / "cache").glob("*.raw")
    whole = entry.read_bytes()
    raw = bytearray(whole)
    at = data.draw(st.integers(352, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del raw[at:]
    entry.write_bytes(raw)
    assert mean_of(path) == 5.0
    assert entry.read_bytes() == whole
    assert table.places.files.ranges("", [(352, np.empty(len(whole) - 400, np.uint8)[: 70 * 80 * 100 * 4])])


def test_an_answer_under_another_name_is_not_read(home):
    cache = DiskCache(home / "answers", 1 << 20)
    for value in (1, 2):
        assert values_of(filled(str(home / f"{value}.zarr"), value), cache) == {value}
    ones = {p: p.read_bytes() for p in sorted((home / "answers").glob("*.chunk"))}
    names = list(ones)
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        name.write_bytes(ones[other])
    for value in (1, 2):
        assert values_of(str(home / f"{value}.zarr"), cache) == {value}


@as_root
def test_a_lock_that_a_stranger_keeps_in_a_shared_cache_ends_with_its_name(home, monkeypatch):
    monkeypatch.setenv("JIGSAW_CACHE_SHARED", "1")
    (home / "cache").mkdir(mode=0o777)
    (home / "cache").chmod(0o777)
    path = scan(home)
    code = (
        f"for name in ['count', *(f'{{n:02x}}.lock' for n in range(256))]:\n"
        f"    f = globals()[name] = open({str(home / 'cache')!r} + '/' + name, 'w+b')\n"
        "    os.fchmod(f.fileno(), 0o666)\n"
        "    os.pwrite(f.fileno(), b'process 1 of the stranger'.ljust(256, b'\\0'), 64)\n"
        "    fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(100)"
    )
    holder = subprocess.Popen([sys.executable, "-c", BECOME + code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CacheError, match=r"process 1 of the stranger holds the lock .*sign of life for 0\.3 s"):
            mean_of(path)
        with pytest.raises(CacheError, match=r"the stranger holds the lock .*count"):
            values_of(filled(str(home / "s.zarr"), 1), DiskCache(home / "cache", 1 << 20, shared=True))
    finally:
        holder.kill()
        holder.wait()
    assert mean_of(path) == 5.0


def test_who_waits_sees_that_the_holder_is_at_work(home, monkeypatch):
    folder, begun, ended, got = CacheFolder(home / "cache", 1000), threading.Event(), threading.Event(), []

    def hold():
        with folder.locked("x") as beat:
            begun.set()
            while not ended.wait(0.02):
                beat()

    def wait():
        with folder.locked("x"):
            got.append(1)

    monkeypatch.setattr("jigsaw.io.cache_folder._BEAT_SECONDS", 0.01)
    holder, waiter = threading.Thread(target=hold), threading.Thread(target=wait)
    holder.start()
    begun.wait()
    waiter.start()
    waiter.join(1.5)  # five times as long as it would wait for somebody who is silent
    assert waiter.is_alive()
    ended.set()
    waiter.join(30)
    holder.join()
    assert got == [1]


def test_the_holder_is_named(home):
    folder = CacheFolder(home / "cache", 1000)
    named = rf"process {os.getpid()} of user .* on .* holds the lock"
    with folder.locked("x"), pytest.raises(CacheError, match=named), folder.locked("x"):
        pass


@pytest.mark.slow
@as_root
def test_two_users_share_a_cache_by_name(home):
    (home / "shared").mkdir()
    (home / "shared").chmod(0o1777)
    store = filled(str(home / "s.zarr"), 7)
    assert values_of(store, DiskCache(home / "shared", 1 << 20, shared=True)) == {7}
    code = (
        "import os, sys\n"
        "from jigsaw.io.formats.disk_cache import DiskCache\n"
        "from jigsaw.io.formats.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        f"os.setgid({STRANGER}); os.setuid({STRANGER})\n"
        "files = DiskCache(sys.argv[2], 1 << 20, shared=True).of(store).arrays['t2m'].places.files\n"
        "files._files.whole = files._files.ranges = None  # the store is not asked\n"
        "(path,) = [sys.argv[1] + '/t2m/c/0/0']\n"
        "out = __import__('numpy').empty(os.stat(path).st_size, 'u1')\n"
        "print(files.ranges(path, [(0, out)]), out.tobytes() == open(path, 'rb').read())"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, store, str(home / "shared")], capture_output=True, text=True, check=False
    )
    assert made.stdout == "True True\n", made.stderr


@pytest.mark.parametrize("value", ["-1", "nan", "soon"])
def test_a_time_out_that_is_none(home, monkeypatch, value):
    monkeypatch.setenv("JIGSAW_CACHE_TIMEOUT", value)
    with pytest.raises(UnsupportedStoreError, match=r"JIGSAW_CACHE_TIMEOUT=.* must be a number of seconds"):
        mean_of(scan(home))
