"""Links that somebody laid where a file is about to be written: nothing is written through them."""

import hashlib
import os
import shutil
import threading

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from matplotlib.figure import Figure
from small_disk import no_space

import jigsaw
from jigsaw.drafts import draft_of, open_unlinked
from jigsaw.dryrun.calibration import load_device, save_device
from jigsaw.dryrun.devices import DEVICES
from jigsaw.errors import StateError, WriteError
from jigsaw.io.cache_folder import CACHE_COUNT_FILE, CacheFolder
from jigsaw.io.chunks.files import LocalFiles, ObjectIdentity
from jigsaw.io.conversion.convert import _ConversionTarget
from jigsaw.io.conversion.journal import ConversionJournal, remove_journal
from jigsaw.io.formats import hdf5_index
from jigsaw.io.formats.disk_cache import KeptAnswers
from jigsaw.io.formats.hdf5_index import Hdf5File
from jigsaw.io.reports.pictures import save_figure
from jigsaw.io.series.statistics import replace_file
from jigsaw.io.stats.moments import check_moments
from jigsaw.io.writing.write import Writer
from jigsaw.testing import world_mesh


@pytest.fixture
def mine(tmp_path):
    """A file of mine that others want to be overwritten."""
    path = tmp_path / "mine"
    path.write_bytes(b"mine")
    yield path
    assert path.read_bytes() == b"mine"


def test_a_draft_has_a_name_of_its_own_and_is_whole_or_gone(tmp_path):
    names = set()
    for _ in range(3):
        with draft_of(tmp_path / "a") as file:
            names.update(p.name for p in tmp_path.iterdir())
            file.write(b"whole")
    assert len(names - {"a"}) == 3 and [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(KeyError), draft_of(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyError
    with pytest.raises(OSError, match="File too large"), no_space(3), draft_of(tmp_path / "a") as file:
        file.write(b"too long")
    assert (tmp_path / "a").read_bytes() == b"whole" and [p.name for p in tmp_path.iterdir()] == ["a"]
    mask = os.umask(0o022)
    try:
        with draft_of(tmp_path / "b"):
            pass
    finally:
        os.umask(mask)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o644  # as any file that the user writes


def test_no_link_is_followed(tmp_path, mine):
    (tmp_path / "link").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic link"):
        open_unlinked(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    with draft_of(tmp_path / "link") as file:  # what takes a place takes that of the link
        file.write(b"new")
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_bytes() == b"new"


def test_the_index_of_an_hdf5_file(tmp_path, mine):
    (tmp_path / "a.h5").write_bytes(b"\x89HDF")
    folder = CacheFolder(tmp_path / "cache", 10**7)
    source = Hdf5File(str(tmp_path / "a.h5"), LocalFiles(), folder)
    digest = hashlib.blake2b(f"{source.path}\0t2m".encode(), digest_size=16).hexdigest()
    place = folder.path / f"hdf5-{digest}.npz"
    folder.path.mkdir()
    for guess in (f"{place.name}.{os.getpid()}.{threading.get_ident()}", place.name):
        place.with_name(guess).symlink_to(mine)
    rows = np.arange(hdf5_index._FEWEST_CHUNKS_KEPT * hdf5_index._INDEX_COLUMNS).reshape(-1, hdf5_index._INDEX_COLUMNS)
    asked = []
    for _ in range(2):
        found = hdf5_index._cached_index(source, "t2m", (2,), lambda: asked.append(1) or rows)
        np.testing.assert_array_equal(found, rows)
    assert len(asked) == 1 and not place.is_symlink()


def test_a_file_of_a_cache_and_its_locks(tmp_path, mine):
    folder, made = CacheFolder(tmp_path / "cache", 10**6), f"{0:032}.raw"
    with folder.locked(made), folder.draft(made, 6) as file:
        file.write(b"onetwo")
    assert (folder.path / made).read_bytes() == b"onetwo"
    for lock in [p for p in folder.path.iterdir() if p.name != made]:  # that of the entry, and the count
        lock.unlink()
        lock.symlink_to(tmp_path / "made elsewhere")
    with pytest.raises(OSError, match="symbolic link"), folder.locked(made):
        pass
    with pytest.raises(OSError, match="symbolic link"), folder.draft(made, 6):
        pass
    assert not (tmp_path / "made elsewhere").exists()


def test_the_count_of_a_disk_cache(tmp_path, mine):
    answers = KeptAnswers(CacheFolder(tmp_path / "cache", 10**6))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / CACHE_COUNT_FILE).symlink_to(mine)
    known = ObjectIdentity("a", "state")
    answers.write(known, "whole", np.zeros(9, np.uint8))
    assert answers.read(known, "whole") is None  # nothing is kept, and nothing fails


def test_statistics_and_checkpoints(tmp_path, mine):
    at = tmp_path / "s.npz"
    at.with_name(f".{at.name}.{os.getpid()}").symlink_to(mine)
    replace_file(at, b"whole", "write again")
    assert at.read_bytes() == b"whole"


def test_a_journal(tmp_path, mine):
    (tmp_path / "gone.journal").symlink_to(tmp_path / "made elsewhere")
    with pytest.raises(WriteError, match=r"gone\.journal could not be written .*symbolic link"):
        ConversionJournal(tmp_path / "gone.journal", "one")
    (tmp_path / "a.journal").symlink_to(mine)
    with pytest.raises(WriteError, match=r"a\.journal is a symbolic link"):
        ConversionJournal(tmp_path / "a.journal", "one")
    assert not (tmp_path / "made elsewhere").exists()


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_what_a_forecast_is_written_to(tmp_path, mine, suffix):
    tile = jigsaw.shard(torch.ones(1, 3), world_mesh(lat=1), (None, "lat"))
    path = tmp_path / f"a.{suffix}"
    for _ in range(2):  # a new one, and one that grows
        (tmp_path / "a.nc.part").symlink_to(mine)
        if path.is_dir():
            (path / "zarr.json.part").symlink_to(mine)
            (path / "u" / "zarr.json.part").symlink_to(mine)
        with Writer(path, dims=("time", "lat"), append_dim="time", mode="a") as out:
            out.append({"u": tile})
        (tmp_path / "a.nc.part").unlink(missing_ok=True)
    assert not path.is_symlink() and out.steps == 2


def test_files_of_others_beside_what_is_written_stay(tmp_path, mine):
    """A download that goes on, say."""
    tile = jigsaw.shard(torch.ones(1, 3), world_mesh(lat=1), (None, "lat"))
    part = tmp_path / "a.nc.part"
    part.write_bytes(b"mine")
    with (
        pytest.raises(WriteError, match=r"a\.nc\.part is there, and jigsaw did not write it"),
        Writer(tmp_path / "a.nc", dims=("time", "lat"), append_dim="time", mode="w") as out,
    ):
        out.append({"u": tile})
    assert part.read_bytes() == b"mine"
    (tmp_path / "s.nc.part").write_bytes(b"mine")
    with pytest.raises(StateError, match=r"s\.nc\.part' cannot be read .*remove it to begin anew"):
        check_moments(tmp_path / "s.nc.part")
    (tmp_path / "b.journal").write_bytes(b"mine")
    with pytest.raises(WriteError, match=r"b\.journal is not a journal of a conversion"):
        remove_journal(tmp_path / "b.journal")
    assert (tmp_path / "b.journal").read_bytes() == b"mine"
    (tmp_path / "c.journal").symlink_to(mine)
    remove_journal(tmp_path / "c.journal")
    ConversionJournal(tmp_path / "d.journal", "one")
    remove_journal(tmp_path / "d.journal")
    assert not list(tmp_path.glob("[cd].journal"))


def test_a_volume_a_device_and_a_picture(tmp_path, mine):
    image = jigsaw.shard(torch.ones(2, 3, 4), world_mesh(depth=1), ("depth", None, None))
    for name in ("a.nii.part", "a.nii", "device.json", "p.png"):
        (tmp_path / name).symlink_to(mine)
    with pytest.raises(WriteError, match="is not a NIfTI file"):
        jigsaw.io.write_volume(tmp_path / "a.nii", image, affine=np.eye(4), mode="w")
    (tmp_path / "a.nii").unlink()
    (tmp_path / "a.nii").symlink_to(tmp_path / "nothing")
    jigsaw.io.write_volume(tmp_path / "a.nii", image, affine=np.eye(4), mode="w")
    assert not (tmp_path / "nothing").exists()
    save_device(DEVICES["h100"], tmp_path / "device.json")
    assert load_device(tmp_path / "device.json") == DEVICES["h100"]
    save_figure(Figure(), tmp_path / "p.png")
    save_figure(Figure(), tmp_path / "q")
    for name in ("p.png", "q.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "a.nii").is_symlink() and not list(tmp_path.glob(".*"))


def _zarr_with(path, stray, zarr_format=3):
    store = zarr.open_group(path, mode="a", zarr_format=zarr_format)
    store.create_array("a", shape=(4,), chunks=(2,), dtype="f4")[:] = 1
    store.create_group("deep").create_array("b", shape=(4, 4), chunks=(2, 2), dtype="f4")[:] = 1
    if stray is not None:
        (path / stray).parent.mkdir(parents=True, exist_ok=True)
        (path / stray).write_bytes(b"mine")
    return path


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("stray", [None, "thesis.tex", "src/main.py", "a/notes.txt", "deep/0", "a/c/notes"])
def test_a_store_is_replaced_unless_other_files_are_in_it(tmp_path, stray, zarr_format):
    path = _zarr_with(tmp_path / "a.zarr", stray, zarr_format)
    tile = jigsaw.shard(torch.ones(2, 3, 4), world_mesh(depth=1), ("depth", None, None))
    image = _zarr_with(tmp_path / "a.ome.zarr", stray, zarr_format)
    writes = [
        lambda: jigsaw.io.write(path, {"u": tile}, dims=("z", "y", "x"), mode="w"),
        lambda: jigsaw.io.write_volume(image, tile, affine=np.eye(4), mode="w"),
    ]
    for write in writes:
        if stray is None:
            write()
        else:
            with pytest.raises(WriteError, match=rf"is not replaced, because .*{stray} is not part of a Zarr store"):
                write()
    assert stray is None or (path / stray).read_bytes() == (image / stray).read_bytes() == b"mine"
    assert (path / "u").exists() == (stray is None)


def test_a_conversion_goes_on_only_in_its_own_store(tmp_path, monkeypatch):
    coords = {"time": np.arange(2), "lat": np.arange(3.0), "lon": np.arange(4.0)}
    source = xr.Dataset({"u": (("time", "lat", "lon"), np.ones((2, 3, 4)))}, coords)
    target = tmp_path / "a.zarr"

    def stop(*_):
        raise WriteError("stopped")

    for method in ("make", "finish"):  # stopped before the store was made, and before it was complete
        with monkeypatch.context() as patched:
            patched.setattr(_ConversionTarget, method, stop)
            with pytest.raises(WriteError, match="stopped"):
                jigsaw.io.convert(source, target, chunks={"time": 1})
        if target.exists():
            target.rename(tmp_path / "moved away")
        _zarr_with(target, None)
        with pytest.raises(WriteError, match=r"a\.zarr is not what the conversion of a\.zarr\.journal began"):
            jigsaw.io.convert(source, target, chunks={"time": 1})
        assert (target / "deep").exists()
        shutil.rmtree(target)
    (tmp_path / "moved away").rename(target)
    assert jigsaw.io.convert(source, target, chunks={"time": 1}).written == 0
