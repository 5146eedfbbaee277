"""HDF5 files that name other files, which name others: `outside=False` holds to the end of every way."""

import os
import re

import h5py
import numpy as np
import pytest

import jigsaw
from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.formats.hdf5 import open_hdf5_file

X = np.arange(6, dtype="f4")
OUT = "outside of the file's folder; if you trust the file, open it with jigsaw"


@pytest.fixture
def own(tmp_path):
    """A folder, beside which lie files that nobody gave."""
    with h5py.File(tmp_path / "secret.h5", "w") as f:
        f["x"] = X
    X.tofile(tmp_path / "secret.bin")
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


def virtual(path, source, name="x", step=1, key="x"):
    """A virtual dataset of every `step`-th value; with a step only libhdf5 can read it."""
    with h5py.File(path, "a") as f:
        layout = h5py.VirtualLayout((6 // step,), "f4")
        layout[...] = h5py.VirtualSource(source, name, (6,))[::step]
        f.create_virtual_dataset(key, layout)


def pattern(path, source, name="x"):
    """A virtual dataset that grows by a file a step."""
    grows = h5py.h5s.UNLIMITED
    with h5py.File(path, "w") as f:
        space = h5py.h5s.create_simple((1, 6), (grows, 6))
        space.select_hyperslab((0, 0), (grows, 1), (1, 1), (1, 6))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_virtual(space, source.encode(), name.encode(), h5py.h5s.create_simple((6,)))
        whole = h5py.h5s.create_simple((1, 6), (grows, 6))
        h5py.h5d.create(f.id, b"x", h5py.h5t.NATIVE_FLOAT, whole, dcpl=plist)


def stored_in(path, raw, dtype="f4", count=6):
    with h5py.File(path, "w") as f:
        f.create_dataset("x", (count,), dtype, external=[(str(raw), 0, 24)])


def linked(path, target, name="x"):
    with h5py.File(path, "w") as f:
        f[name] = h5py.ExternalLink(str(target), "/x")


def end(path, kind, folder):
    """A file whose ``x`` is one of those beside the folder."""
    if kind == "virtual":
        virtual(path, "../secret.h5")
    elif kind == "virtual by its whole path":
        virtual(path, str(folder.parent / "secret.h5"))
    elif kind == "storage":
        stored_in(path, "../secret.bin")
    elif kind == "link":
        linked(path, "../secret.h5")
    else:
        os.symlink(folder.parent / "secret.h5", path)


ENDS = ["virtual", "virtual by its whole path", "storage", "link", "symbolic link"]


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("step", [1, 2], ids=["grid", "library"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_way_out_is_refused_at_every_depth(own, kind, step, depth):
    end(own / "end.h5", kind, own)
    names = ["end.h5"]
    for k in range(depth):
        virtual(own / f"{k}.h5", names[-1])
        names.append(f"{k}.h5")
    virtual(own / "first.h5", names[-1], step=step)
    wanted = "leads through an external link" if kind == "link" else OUT
    with pytest.raises(UnsupportedStoreError, match=wanted):
        open_hdf5_file(own / "first.h5", cache="")
    if kind.startswith("virtual"):
        store = open_hdf5_file(own / "first.h5", cache="", outside=True)
        np.testing.assert_array_equal(store.read_small("x"), X[::step])


@pytest.mark.parametrize("step", [1, 2], ids=["grid", "library"])
def test_what_stays_in_the_folder_is_read_at_every_depth(own, step):
    (own / "below").mkdir()
    with h5py.File(own / "below" / "values.h5", "w") as f:
        f["x"] = X
    virtual(own / "0.h5", "below/values.h5")
    virtual(own / "1.h5", "./below/../0.h5")
    virtual(own / "2.h5", str(own / "1.h5"), step=step)
    os.symlink("2.h5", own / "last.h5")
    np.testing.assert_array_equal(open_hdf5_file(own / "last.h5", cache="").read_small("x"), X[::step])


def test_a_folder_of_links_into_an_archive(tmp_path):
    """Whose files lie beside each other where they really are."""
    archive, folder = tmp_path / "archive", tmp_path / "folder"
    archive.mkdir()
    folder.mkdir()
    with h5py.File(archive / "values.h5", "w") as f:
        f["x"] = X
    virtual(archive / "all.h5", "values.h5")
    for name in ("all.h5", "values.h5"):
        os.symlink(archive / name, folder / name)
    np.testing.assert_array_equal(open_hdf5_file(folder / "all.h5", cache="").read_small("x"), X)


def test_a_symbolic_link_out_of_the_folder_is_named(own):
    os.symlink(own.parent, own / "up")
    virtual(own / "a.h5", "up/secret.h5")
    with pytest.raises(
        UnsupportedStoreError, match=rf"'up/secret\.h5', which a symbolic link puts to '.*secret\.h5', {OUT}"
    ):
        open_hdf5_file(own / "a.h5", cache="")
    linked(own / "b.h5", "up/secret.h5")
    with pytest.raises(UnsupportedStoreError, match=rf"the external link 'x' .* symbolic link .* {OUT}"):
        open_hdf5_file(own / "b.h5", cache="")
    stored_in(own / "c.h5", "up/secret.bin")
    with pytest.raises(UnsupportedStoreError, match=rf"the external storage of dataset '/x' .* symbolic link .* {OUT}"):
        open_hdf5_file(own / "c.h5", cache="")


def test_texts_in_external_storage_are_refused(own, monkeypatch):
    """Libhdf5 alone reads texts, and looks for raw files in the working directory."""
    stored_in(own / "a.h5", own.parent / "secret.bin", "S6", 4)
    with pytest.raises(UnsupportedStoreError, match=OUT):
        open_hdf5_file(own / "a.h5", cache="")
    monkeypatch.chdir(own.parent)
    stored_in(own / "a.h5", "secret.bin", "S6", 4)
    with pytest.raises(UnsupportedStoreError, match="only be read by libhdf5, which looks for it in the working dir"):
        open_hdf5_file(own / "a.h5", cache="")


def test_storage_behind_a_virtual_dataset_that_libhdf5_reads_is_refused(own):
    X.tofile(own / "values.bin")
    stored_in(own / "b.h5", "values.bin")
    virtual(own / "grid.h5", "b.h5")
    np.testing.assert_array_equal(open_hdf5_file(own / "grid.h5", cache="").read_small("x"), X)
    virtual(own / "library.h5", "b.h5", step=2)
    with pytest.raises(UnsupportedStoreError, match=r"'/x' in .*b\.h5, 'values\.bin', can only be read by libhdf5"):
        open_hdf5_file(own / "library.h5", cache="")


@pytest.mark.parametrize("step", [1, 2])
def test_a_circle_is_told(own, step):
    """Libhdf5 runs out of stack in one."""
    virtual(own / "a.h5", "b.h5", step=step)
    virtual(own / "b.h5", "a.h5")
    virtual(own / "self.h5", ".", name="x")
    for name in ("a.h5", "self.h5"):
        for outside in (False, True):
            with pytest.raises(UnsupportedStoreError, match=r"the virtual dataset '/x' in .* shows itself"):
                open_hdf5_file(own / name, cache="", outside=outside)


def test_a_long_way_is_told(own):
    with h5py.File(own / "0.h5", "w") as f:
        f["x"] = X
    for k in range(20):
        virtual(own / f"{k + 1}.h5", f"{k}.h5")
    np.testing.assert_array_equal(open_hdf5_file(own / "9.h5", cache="").read_small("x"), X)
    with pytest.raises(UnsupportedStoreError, match="shows virtual datasets 16 deep"):
        open_hdf5_file(own / "20.h5", cache="")


def test_patterns(own, monkeypatch):
    for k in range(3):
        with h5py.File(own / f"part_{k}.h5", "w") as f:
            f["x"] = X + k
    pattern(own / "all.h5", "part_%b.h5")
    np.testing.assert_array_equal(open_hdf5_file(own / "all.h5", cache="").read_small("x"), [X, X + 1, X + 2])
    monkeypatch.chdir(own)
    np.testing.assert_array_equal(open_hdf5_file("all.h5", cache="").read_small("x"), [X, X + 1, X + 2])
    (own / "part_1.h5").unlink()
    os.symlink(own.parent / "secret.h5", own / "part_1.h5")
    with pytest.raises(UnsupportedStoreError, match=rf"'part_1\.h5', which a symbolic link puts to .*{OUT}"):
        open_hdf5_file(own / "all.h5", cache="")
    pattern(own / "out.h5", "../part_%b.h5")
    with pytest.raises(UnsupportedStoreError, match=OUT):
        open_hdf5_file(own / "out.h5", cache="")


def test_a_pattern_whose_files_hide_a_way_out(own):
    virtual(own / "part_0.h5", "../secret.h5")
    pattern(own / "all.h5", "part_%b.h5")
    with pytest.raises(UnsupportedStoreError, match=re.escape("part_0.h5 points to '../secret.h5', ") + OUT):
        open_hdf5_file(own / "all.h5", cache="")
    with h5py.File(own / "one.h5", "w") as f:
        f["good"] = X
        f["x_0"] = h5py.ExternalLink("../secret.h5", "/x")
    pattern(own / "all.h5", "one.h5", "x_%b")
    with pytest.raises(UnsupportedStoreError, match="leads through an external link"):
        open_hdf5_file(own / "all.h5", cache="")
    pattern(own / "all.h5", "one.h5", "g_%b/x")
    with pytest.raises(UnsupportedStoreError, match=r"shows 'g_%b/x' in .*outside=True"):
        open_hdf5_file(own / "all.h5", cache="")


def test_files_of_the_working_directory_are_not_taken(own, monkeypatch):
    """Libhdf5 looks there for what is not in the folder."""
    os.rename(own.parent / "secret.h5", own.parent / "part_0.h5")
    monkeypatch.chdir(own.parent)
    for name in ("part_%b.h5", str(own / "part_%b.h5")):
        pattern(own / "all.h5", name)
        with pytest.raises(UnsupportedStoreError, match=r"libhdf5 would take '.*part_0\.h5' for it.*outside=True"):
            open_hdf5_file(own / "all.h5", cache="")
    virtual(own / "b.h5", "part_0.h5")
    virtual(own / "a.h5", "b.h5", step=2)
    with pytest.raises(UnsupportedStoreError, match=r"needs 'part_0\.h5', which does not exist; bring it back"):
        open_hdf5_file(own / "a.h5", cache="")


def test_files_of_a_glob_lead_where_their_options_allow(own):
    for day in range(2):
        (own.parent / f"{day}.bin").write_bytes(np.float32(day).tobytes())
        with h5py.File(own / f"day-{day}.h5", "w") as f:
            f["time"] = np.array([day])
            f["time"].attrs["units"] = "days since 2020-01-01"
            f["time"].make_scale()
            f.create_dataset("t2m", (1,), "f4", external=[(f"../{day}.bin", 0, 4)]).dims[0].attach_scale(f["time"])
    glob = str(own / "day-*.h5")
    with pytest.raises(UnsupportedStoreError, match=OUT):
        jigsaw.io.open_store(glob)
    np.testing.assert_array_equal(jigsaw.io.open_store(glob, {"outside": True}).read_small("t2m"), [0, 1])
