"""Caches that several users write: a link that lies where a draft is to be written does not lead out of them."""

import os
import threading

import h5py
import nibabel
import numpy as np
import pytest
from volume_store import AFFINE, label, write

from jigsaw.io.formats.hdf5 import open_hdf5_file
from jigsaw.io.formats.nifti import open_nifti
from jigsaw.io.volumes.crops import Foreground
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.testing import world_mesh


def nifti(folder, cache, monkeypatch):
    monkeypatch.setenv("JIGSAW_CACHE", str(cache))
    nibabel.save(nibabel.Nifti1Image(np.arange(60.0).reshape(3, 4, 5), AFFINE), path := folder / "scan.nii.gz")
    os.utime(path, (1, 1))
    store = open_nifti(str(path))
    assert store.read_small(next(iter(store.arrays))).sum() == 1770


def hdf5(folder, cache, monkeypatch):
    path = folder / "many.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=np.ones(5000), chunks=(1,))
    os.utime(path, (1, 1))
    assert open_hdf5_file(path, cache=cache).read_small("x").sum() == 5000


def foreground(folder, cache, monkeypatch):
    path = str(folder / "labels.zarr")
    if not os.path.exists(path):
        write(path, label((8, 9, 10)))
    how = Foreground(cache=str(cache))
    ds = open_volumes([path], [path], mesh=world_mesh(z=1), crop=(4, 4, 4), foreground=how)
    assert ds.found


DRAFTS = {
    "nifti": lambda entry: entry.with_suffix(f".{os.getpid()}.part"),
    "hdf5": lambda entry: entry.with_name(f"{entry.name}.{os.getpid()}.{threading.get_ident()}"),
    "foreground": lambda entry: entry.with_name(f".{entry.stem}.{os.getpid()}.npz"),
}


@pytest.mark.parametrize("use", [nifti, hdf5, foreground])
def test_a_link_in_the_place_of_a_draft_is_not_followed(tmp_path, monkeypatch, use):
    use(tmp_path, tmp_path / "first", monkeypatch)
    (entry,) = (p for p in (tmp_path / "first").rglob("*") if p.suffix in (".raw", ".npz"))
    victim = tmp_path / "victim"
    victim.write_text("mine")
    there = tmp_path / "second" / entry.relative_to(tmp_path / "first")
    there.parent.mkdir(parents=True)
    os.symlink(victim, DRAFTS[use.__name__](there))
    use(tmp_path, tmp_path / "second", monkeypatch)
    assert there.exists()
    assert victim.read_text() == "mine"
