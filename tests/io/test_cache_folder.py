"""The folder that caches share: its limit, its locks, and where it is."""

import multiprocessing
import os
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.cache_folder import CacheFolder, user_cache_folder
from jigsaw.io.formats.hdf5 import open_hdf5_file
from jigsaw.io.formats.nifti import open_nifti


def volume(path, seed=0):
    values = np.random.default_rng(seed).integers(0, 100, (20, 30, 40)).astype("<i2")
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    return values


def hdf5_of_many_chunks(path):
    x = np.arange(70 * 70, dtype="f4").reshape(70, 70)
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=x, chunks=(1, 1))
    return x


def kept(folder):
    return {p.name: p.stat().st_size for p in folder.iterdir() if p.suffix in (".raw", ".npz", ".draft")}


def test_where_the_cache_is(monkeypatch):
    monkeypatch.delenv("JIGSAW_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache_folder().path == Path("/somewhere/jigsaw")
    monkeypatch.setenv("JIGSAW_CACHE", "/else")
    assert user_cache_folder() == CacheFolder(Path("/else"), 64 * 10**9)
    assert user_cache_folder("") is None
    monkeypatch.setenv("JIGSAW_CACHE_BYTES", "much")
    with pytest.raises(UnsupportedStoreError, match="JIGSAW_CACHE_BYTES='much' must be a number of bytes"):
        user_cache_folder()


def test_an_empty_name_is_no_folder_for_any_format(tmp_path, monkeypatch):
    monkeypatch.setenv("JIGSAW_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    volume(tmp_path / "v.nii.gz")
    with pytest.raises(UnsupportedStoreError, match=r"JIGSAW_CACHE='' names no folder, and .*v\.nii\.gz is compressed"):
        open_nifti(tmp_path / "v.nii.gz")
    x = hdf5_of_many_chunks(tmp_path / "x.h5")
    np.testing.assert_array_equal(open_hdf5_file(tmp_path / "x.h5").read_small("x"), x)
    assert not (tmp_path / "home").exists()


def test_indices_and_drafts_count_and_make_room(tmp_path, monkeypatch):
    cache, size = tmp_path / "cache", 352 + 2 * 20 * 30 * 40 + 4 + 16  # one block's checksum, and that of all
    monkeypatch.setenv("JIGSAW_CACHE", str(cache))
    monkeypatch.setenv("JIGSAW_CACHE_BYTES", str(size + 1000))
    cache.mkdir()
    mine = cache / "mine.npz"
    mine.write_bytes(bytes(9000))  # of the user's: neither counted nor removed
    left = cache / f".{0:032}.raw.{0:016}.draft"
    left.write_bytes(bytes(2000))
    x = hdf5_of_many_chunks(tmp_path / "x.h5")
    np.testing.assert_array_equal(open_hdf5_file(tmp_path / "x.h5").read_small("x"), x)
    assert {Path(name).suffix for name in kept(cache)} == {".npz", ".draft"}
    for path in (left, *cache.glob("hdf5-*")):
        os.utime(path, (0, 0))
    values = volume(tmp_path / "v.nii.gz")
    np.testing.assert_array_equal(open_nifti(tmp_path / "v.nii.gz").read_small("image"), values.T)
    assert sorted(kept(cache).values()) == [9000, size] and mine.exists()


def _hold(path, begun, ended):
    with CacheFolder(path, 10**6).locked(f"{0:032}.raw"):
        begun.set()
        ended.wait(60)


@pytest.mark.slow
def test_a_lock_stays_when_its_entry_makes_room(tmp_path):
    """Whoever asks while another process holds it waits, also after the folder was emptied."""
    process = multiprocessing.get_context("spawn")
    begun, ended = process.Event(), process.Event()
    other = process.Process(target=_hold, args=(tmp_path, begun, ended))
    other.start()
    assert begun.wait(60)
    folder, size = CacheFolder(tmp_path, 1000), 800
    for name in (f"{0:032}.raw", f"{1:032}.raw"):  # the second takes the place of the first
        with folder.draft(name, size) as file:
            file.write(bytes(size))
    assert kept(tmp_path) == {f"{1:032}.raw": size}
    waiting = process.Process(target=_hold, args=(tmp_path, entered := process.Event(), ended))
    waiting.start()
    assert not entered.wait(3)
    ended.set()
    assert entered.wait(60)
    for each in (other, waiting):
        each.join()
    assert (other.exitcode, waiting.exitcode) == (0, 0)


def test_a_draft_whose_room_was_needed_is_gone(tmp_path):
    folder, first, second = CacheFolder(tmp_path, 1000), f"{0:032}.raw", f"{1:032}.raw"
    with pytest.raises(FileNotFoundError), folder.draft(first, 400), folder.draft(second, 900) as file:
        assert list(kept(tmp_path).values()) == [900]
        file.write(bytes(900))
    assert kept(tmp_path) == {second: 900}
