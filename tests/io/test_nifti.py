"""NIfTI as nibabel reads it: values, affine and voxel sizes; the cache of decompressed files; files that lie."""

import gzip
import itertools
import os
import zlib
from datetime import timedelta
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from fault_proxy import Proxy
from remote_servers import nginx

import jigsaw
from jigsaw.errors import CorruptChunkError, FetchError, TruncatedError, UnsupportedStoreError
from jigsaw.io.formats import unpacked_gzip as unpacked
from jigsaw.io.formats.nifti import claims, open_nifti
from jigsaw.io.formats.slab_arrays import read_table_box
from jigsaw.io.formats.store import open_store
from jigsaw.testing import on_ranks, world_mesh

SHAPE = (11, 10, 13)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("JIGSAW_CACHE", str(folder))
    return folder


def write(path, dtype="<i2", kind=nib.Nifti1Image, shape=SHAPE, form="sform", slope=None, seed=0):
    values = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
    affine = nib.affines.from_matvec(nib.eulerangles.euler2mat(0.2, -0.3, 0.4) * (2, 1.5, -3), (4, 5, 6))
    header = kind.header_class(endianness=">" if dtype.startswith(">") else "<")
    header.set_data_dtype(dtype)
    header.set_xyzt_units("mm", "sec")
    image = kind(values, affine, header)
    image.set_sform(affine, 1 if form == "sform" else 0)
    image.set_qform(affine, 1 if form == "qform" else 0)
    if slope:
        image.header.set_slope_inter(*slope)
    nib.save(image, path)
    return str(path)


def assert_alike(path):
    """Values, affine and voxel sizes are nibabel's."""
    store, image = open_nifti(path), nib.load(path)
    table = store.arrays["image"]
    stored = read_table_box(table, tuple((0, n) for n in table.shape))
    raw = np.asanyarray(image.dataobj.get_unscaled())
    np.testing.assert_array_equal(stored, raw.T)
    np.testing.assert_array_equal(stored.T * table.scale + table.offset, image.get_fdata())
    np.testing.assert_allclose(store.attrs["affine"], image.affine, rtol=0, atol=1e-6)
    np.testing.assert_allclose(store.attrs["zooms"], image.header.get_zooms(), rtol=1e-7)
    assert np.dtype(table.dtype) == image.header.get_data_dtype()
    return store


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
@pytest.mark.parametrize("form", ["sform", "qform", "neither"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("dtype", ["<i2", ">f4", "u1", ">u8"])
def test_values_and_space_are_those_of_nibabel(tmp_path, dtype, kind, form, ending):
    path = write(tmp_path / f"v{ending}", dtype, kind, form=form)
    assert claims(path)
    store = assert_alike(path)
    assert store.arrays["image"].dims == ("z", "y", "x") and store.attrs["space_units"] == "mm"


def test_turns_by_half_a_circle_have_no_other_rotation(tmp_path):
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((-1, 1), repeat=3):
            affine = np.zeros((4, 4))
            affine[order, range(3)] = np.multiply(signs, (0.7, 1.05, 1.54))
            affine[3, 3] = 1
            image = nib.Nifti1Image(np.zeros(SHAPE, "i2"), affine)
            image.set_sform(None, 0)
            image.set_qform(affine, 1)
            nib.save(image, tmp_path / "v.nii")
            found = open_nifti(str(tmp_path / "v.nii")).attrs["affine"]
            np.testing.assert_allclose(found, affine, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (5, 6), (5, 6, 7, 8), (5, 6, 7, 1, 3)], ids=str)
def test_other_numbers_of_dims(tmp_path, shape):
    table = assert_alike(write(tmp_path / "v.nii", shape=shape)).arrays["image"]
    assert table.dims == ("dim_5", "time", "z", "y", "x")[5 - len(shape) :]


@pytest.mark.parametrize("slope", [(0.25, -1000.0), (1.0, 3.0), (1.0, 0.0)])
def test_scaled_values(tmp_path, slope):
    store = assert_alike(write(tmp_path / "v.nii", slope=slope))
    assert ("scale_factor" in store.attrs) == (slope != (1.0, 0.0))


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scan") / "ct.nii.gz", shape=(40, 70, 33), slope=(0.5, -100.0))


@on_ranks(2)
def test_each_rank_reads_its_slices(scan):
    os.environ["JIGSAW_CACHE"] = os.path.dirname(scan)
    mesh = world_mesh(z=2)
    ds = jigsaw.io.open(open_nifti(scan), mesh=mesh, fields=["image"], spec={"z": "z"}, halo={"z": 1})
    tile = ds[0].input
    whole = nib.load(scan).get_fdata().T
    np.testing.assert_array_equal(tile.full_tensor()[0, 0].numpy(), whole.astype("f4"))
    planned = ds.plan(0).rows[mesh.get_rank()]
    assert ds._engine.stats == planned and planned.stored_bytes > 0
    del os.environ["JIGSAW_CACHE"]


# -- the cache -------------------------------------------------------------------------------------------------------


def entries(folder):
    return sorted(p for p in folder.iterdir() if p.suffix == ".raw")


SEAL = 4 + 16  # the checksum of one block, and that of all checksums


def test_a_file_is_decompressed_once(tmp_path, cache):
    path = write(tmp_path / "v.nii.gz")
    first = assert_alike(path)
    made = entries(cache)[0].stat()
    assert_alike(path)
    assert [p.stat().st_ino for p in entries(cache)] == [made.st_ino]
    assert made.st_size == 352 + 2 * np.prod(SHAPE) + SEAL
    write(path, seed=1)
    assert_alike(path)
    assert len(entries(cache)) == 2
    assert not [p for p in cache.iterdir() if p.suffix == ".draft"]
    read_table_box(first.arrays["image"], ((0, 2), (0, 2), (0, 2)))  # still there, as it was


def test_the_cache_keeps_to_its_limit_and_makes_entries_again(tmp_path, cache, monkeypatch):
    size = 352 + 2 * np.prod(SHAPE)
    monkeypatch.setenv("JIGSAW_CACHE_BYTES", str(2 * (size + SEAL)))
    stores = [open_nifti(write(tmp_path / f"{i}.nii.gz", seed=i)) for i in range(3)]
    assert len(entries(cache)) == 2
    for i, store in enumerate(stores):
        expected = np.asarray(nib.load(tmp_path / f"{i}.nii.gz").dataobj).T
        np.testing.assert_array_equal(store.read_small("image"), expected)
    monkeypatch.setenv("JIGSAW_CACHE_BYTES", "1e3")
    with pytest.raises(UnsupportedStoreError, match=f"decompresses to {size} bytes, and the cache .* may have 1000"):
        open_nifti(write(tmp_path / "4.nii.gz"))


def test_a_changed_file_is_not_decompressed_for_an_old_store(tmp_path, cache):
    path = write(tmp_path / "v.nii.gz")
    store = open_nifti(path)
    entries(cache)[0].unlink()
    write(path, seed=1)
    with pytest.raises(CorruptChunkError, match="changed since it was opened"):
        store.read_small("image")


def test_an_entry_that_was_cut_short_is_made_again(tmp_path, cache):
    """As a machine that loses its power may leave it, before it is opened and while it is."""
    path = write(tmp_path / "v.nii.gz")
    store, expected = assert_alike(path), np.asarray(nib.load(path).dataobj).T
    for opened in (store, open_nifti(path)):
        entries(cache)[0].write_bytes(entries(cache)[0].read_bytes()[:1000])
        np.testing.assert_array_equal(opened.read_small("image"), expected)


def test_files_of_others_come_and_go_while_room_is_made(tmp_path, cache, monkeypatch):
    """Of all that is listed nothing is there any more when it is looked at: drafts are renamed, entries removed."""
    gone = [cache / f".{0:032}.raw.{0:016}.draft", cache / f"{0:032}.raw"]
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(gone))
    path = write(tmp_path / "v.nii.gz")
    np.testing.assert_array_equal(open_nifti(path).read_small("image"), np.asarray(nib.load(path).dataobj).T)


def test_an_entry_that_others_remove_at_once_is_made_again(tmp_path, cache, monkeypatch):
    make, left = unpacked.UnpackedFile.make, [0, 1]

    def made_and_removed(file):
        make(file)
        if left:
            left.pop()
            entries(cache)[0].unlink()

    path = write(tmp_path / "v.nii.gz")
    store = open_nifti(path)
    entries(cache)[0].unlink()
    monkeypatch.setattr(unpacked.UnpackedFile, "make", made_and_removed)
    np.testing.assert_array_equal(store.read_small("image"), np.asarray(nib.load(path).dataobj).T)
    left[:] = range(99)
    entries(cache)[0].unlink()
    with pytest.raises(CorruptChunkError, match="too small for all who use it; set JIGSAW_CACHE_BYTES"):
        open_nifti(path).read_small("image")


# -- far away --------------------------------------------------------------------------------------------------------

QUICK = {"retry_config": {"max_retries": 1, "backoff": {"init_backoff": timedelta(milliseconds=1)}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder, and the proxy through which nginx serves it."""
    root = tmp_path_factory.mktemp("www")
    with nginx(root, tmp_path_factory.mktemp("nginx")) as address, Proxy(address) as proxy:
        yield root, proxy


@pytest.fixture
def far(served):
    root, proxy = served
    proxy.faults, proxy.spoils = [], ""
    proxy.clear()
    path = write(root / "v.nii.gz", shape=(90, 80, 70), slope=(0.5, -100.0))
    return path, proxy, f"http://{proxy.address}/v.nii.gz"


def test_a_compressed_volume_behind_http(far, cache):
    path, proxy, url = far
    store, image = open_store(url), nib.load(path)
    np.testing.assert_array_equal(store.read_small("image"), np.asanyarray(image.dataobj.get_unscaled()).T)
    np.testing.assert_allclose(store.attrs["affine"], image.affine, rtol=0, atol=1e-6)
    assert [method for method, _, _ in proxy.requests].count("GET") == 2  # its header, and all of it
    size = os.path.getsize(path)
    assert size < proxy.body_bytes < size + (1 << 17)
    proxy.clear()
    read_table_box(open_store(url).arrays["image"], ((0, 70), (3, 9), (0, 90)))
    assert proxy.body_bytes < 1 << 17  # its header alone
    assert len(entries(cache)) == 1


def test_crops_of_a_compressed_volume_behind_http(far, cache):
    path, proxy, url = far
    crops_of_far(url, str(cache))
    assert len(entries(cache)) == 1
    whole = f"bytes=0-{os.path.getsize(path) - 1}"
    assert [asked for _, _, asked in proxy.requests].count(whole) == 1  # by one of the ranks


@on_ranks(2)
def crops_of_far(url, folder):
    os.environ["JIGSAW_CACHE"] = folder
    mesh = world_mesh(z=2)
    ds = jigsaw.io.open_volumes([url], mesh=mesh, crop=(32, 32, 32), normalize=(0, 1))
    assert ds[0].image.full_tensor().shape == (1, 32, 32, 32)
    del os.environ["JIGSAW_CACHE"]


def test_a_compressed_object_is_fetched_in_blocks(far, cache, monkeypatch):
    path, proxy, url = far
    monkeypatch.setattr(unpacked, "_BODY_FETCHED_BYTES", 50_000)
    np.testing.assert_array_equal(
        open_store(url).read_small("image"), np.asanyarray(nib.load(path).dataobj.get_unscaled()).T
    )
    assert proxy.methods["GET"] == 1 + -(-os.path.getsize(path) // 50_000)


def test_a_compressed_object_that_changes_is_another_entry(far, cache):
    path, _, url = far
    store = open_store(url)
    write(path, shape=(90, 80, 70), seed=1)
    np.testing.assert_array_equal(open_store(url).read_small("image"), np.asanyarray(nib.load(path).dataobj).T)
    assert len(entries(cache)) == 2
    for each in entries(cache):
        each.unlink()
    with pytest.raises(CorruptChunkError, match="changed since"):
        store.read_small("image")


def test_compressed_objects_that_cannot_be_had(far, cache):
    path, proxy, url = far
    with pytest.raises(UnsupportedStoreError, match=r"there is no object 'none.nii.gz'"):
        open_store(url.replace("/v.", "/none."), QUICK)
    os.truncate(path, 30_000)
    with pytest.raises(TruncatedError, match=r"v.nii.gz cannot be read as NIfTI: its gzip stream ends early"):
        open_store(url, QUICK)
    proxy.faults = ["503"] * 9
    with pytest.raises(FetchError, match="given up after 2 tries"):
        open_store(url, QUICK)
    assert not entries(cache)


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [30, 200, -5])
def test_a_truncated_gzip_file(tmp_path, cache, cut):
    path = write(tmp_path / "v.nii.gz")
    os.truncate(path, cut if cut > 0 else os.path.getsize(path) + cut)
    with pytest.raises(TruncatedError, match=rf"{path} cannot be read as NIfTI: its gzip stream ends early"):
        open_nifti(path)
    assert not entries(cache) and not [p for p in cache.iterdir() if p.suffix == ".draft"]


def test_a_damaged_gzip_file(tmp_path, cache):
    path = write(tmp_path / "v.nii.gz")
    with open(path, "r+b") as file:
        file.seek(-6, os.SEEK_END)
        file.write(b"\xff\x00")
    with pytest.raises(CorruptChunkError, match=r"gzip stream is damaged: .*CRC check failed"):
        open_nifti(path)
    assert not entries(cache)


def test_a_truncated_nii(tmp_path):
    path = write(tmp_path / "v.nii")
    os.truncate(path, 2000)
    with pytest.raises(TruncatedError, match=r"says \(11, 10, 13\) of int16 from byte 352 on, and the file has 2000"):
        open_nifti(path)
    os.truncate(path, 347)
    with pytest.raises(TruncatedError, match="first 347 bytes"):
        open_nifti(path)


def _header(**fields):
    header = nib.Nifti1Header()
    header["magic"], header["vox_offset"] = b"n+1", 352
    header["dim"], header["datatype"], header["pixdim"] = [3, 4, 4, 4, 1, 1, 1, 1], 4, 1
    for name, value in fields.items():
        header[name] = value
    return header.binaryblock + bytes(4)


def test_a_header_that_claims_too_much_allocates_nothing(tmp_path, cache):
    huge = _header(dim=[4, 32767, 32767, 32767, 32767, 1, 1, 1])
    (tmp_path / "v.nii").write_bytes(huge + bytes(128))
    with pytest.raises(TruncatedError, match="and the file has 480"):
        open_nifti(tmp_path / "v.nii")
    (tmp_path / "v.nii.gz").write_bytes(gzip.compress(huge + bytes(128)))
    with pytest.raises(CorruptChunkError, match=r"claims 2305561547121623394 bytes, more than .* compressed ones can"):
        open_nifti(tmp_path / "v.nii.gz")
    (tmp_path / "v.nii.gz").write_bytes(gzip.compress(_header() + bytes(1 << 24)))
    with pytest.raises(CorruptChunkError, match="more than the 480 bytes that its header describes"):
        open_nifti(tmp_path / "v.nii.gz")
    (tmp_path / "v.nii.gz").write_bytes(gzip.compress(_header() + bytes(100)))
    with pytest.raises(TruncatedError, match="decompresses to 452 bytes and its header describes 480"):
        open_nifti(tmp_path / "v.nii.gz")
    assert not entries(cache)


@pytest.mark.parametrize(
    ("fields", "kind", "match"),
    [
        ({"dim": [9] * 8}, CorruptChunkError, "it must have 1 to 7 dims"),
        ({"dim": [3, 4, -4, 4, 1, 1, 1, 1]}, CorruptChunkError, "it must have 1 to 7 dims"),
        ({"vox_offset": 100}, CorruptChunkError, "vox_offset is 100"),
        ({"vox_offset": np.nan}, CorruptChunkError, "vox_offset is nan"),
        ({"datatype": 128}, UnsupportedStoreError, "datatype 128"),
        ({"magic": b"ni1"}, UnsupportedStoreError, "pair of files"),
        ({"qform_code": 1, "quatern_b": 3}, CorruptChunkError, "longer than 1"),
        ({"scl_slope": 2, "scl_inter": np.inf}, CorruptChunkError, "scl_inter is inf"),
    ],
)
def test_damaged_headers(tmp_path, fields, kind, match):
    (tmp_path / "v.nii").write_bytes(_header(**fields) + bytes(128))
    with pytest.raises(kind, match=match):
        open_nifti(tmp_path / "v.nii")


def test_what_is_no_nifti_is_refused(tmp_path):
    (tmp_path / "x.nii").write_bytes(bytes(500))
    (tmp_path / "x.nii.gz").write_bytes(gzip.compress(bytes(500)))
    (tmp_path / "y.nii.gz").write_bytes(zlib.compress(bytes(500)))
    assert [claims(tmp_path / n) for n in ("x.nii", "x.nii.gz", "y.nii.gz", "none.nii")] == [False, True, False, False]
    for name in ("x.nii", "x.nii.gz"):
        with pytest.raises(UnsupportedStoreError, match=r"is not a NIfTI file: its first 500 bytes"):
            open_nifti(tmp_path / name)
    with pytest.raises(CorruptChunkError, match="gzip stream is damaged"):
        open_nifti(tmp_path / "y.nii.gz")
    for folder in (tmp_path, tmp_path / "d.nii.gz"):
        folder.mkdir(exist_ok=True)
        with pytest.raises(UnsupportedStoreError, match="is a directory"):
            open_nifti(folder)
    with pytest.raises(UnsupportedStoreError, match="there is no file"):
        open_nifti(tmp_path / "none.nii.gz")


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz", "v.NII.GZ", "v.nc", "v.npy"])
def test_a_file_that_is_not_there_or_empty_is_told_so(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(UnsupportedStoreError, match=f"there is no file '.*{name}'; the working folder is '/"):
        open_store(str(path))
    path.touch()
    with pytest.raises(UnsupportedStoreError, match=f"{name}' is empty: a file of 0 bytes"):
        open_store(path)


@pytest.mark.parametrize("ending", [".NII", ".NII.GZ"])
def test_endings_in_capitals(tmp_path, ending):
    path = Path(write(tmp_path / f"v{ending.lower()}"))
    path = path.rename(tmp_path / f"w{ending}")
    store, image = open_store(str(path)), nib.load(tmp_path / f"w{ending}")
    np.testing.assert_array_equal(store.read_small("image"), np.asanyarray(image.dataobj).T)
