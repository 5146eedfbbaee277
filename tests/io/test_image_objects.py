"""Images of nibabel, SimpleITK and MONAI as volumes: the values, dims and affines of the same scan as a NIfTI file."""

import pickle
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tensorstore
import torch
from volume_store import image, label

from jigsaw.errors import GridError
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.testing import run_on_ranks, world_mesh

SHAPE = (13, 10, 7)  # z, y, x
TURN = np.array([[0.8, -0.6, 0], [0.6, 0.8, 0], [0, 0, 1]])
AFFINE = np.eye(4)
AFFINE[:3] = np.c_[TURN * (0.5, 1.5, 2.0), (-30, 20, 7)]
ITK = Path("scan.mha"), Path("scan.nrrd"), Path("scan.mhd"), Path("scan.nii"), Path("packed.nrrd"), Path("packed.mha")


def nifti(path, values=None, **kind):
    scan = nibabel.Nifti1Image(image(SHAPE).T if values is None else values, AFFINE, **kind)
    scan.set_sform(AFFINE, 1)
    scan.set_qform(AFFINE, 1)
    nibabel.save(scan, path)
    return str(path)


def sample_of(given, axes=None, **more):
    mesh = {"z": 1} if axes is None else axes
    sample = open_volumes([given], mesh=world_mesh(**mesh), crop=None, **more).whole(0)
    return sample.image.full_tensor(), sample.affine


def assert_same_scan(given, path, atol=1e-5, **more):
    (got, affine), (want, own) = sample_of(given, **more), sample_of(path, **more)
    # the affines of files are rounded to float32, and so are the places between voxels
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if "spacing" in more else 0)
    np.testing.assert_allclose(affine, own, rtol=0, atol=atol)


@pytest.mark.parametrize("more", [{}, {"orientation": "LPS"}, {"spacing": (1.0, 2.0, 1.0)}], ids=str)
def test_images_of_nibabel_lie_where_their_files_do(tmp_path, more):
    path = nifti(tmp_path / "scan.nii")
    assert_same_scan(nibabel.load(path), path, **more)
    packed = str(tmp_path / "scan.mgz")
    nibabel.save(nibabel.MGHImage(image(SHAPE).T, AFFINE.astype("f4")), packed)
    assert_same_scan(nibabel.load(packed), path, **more)
    assert_same_scan(nibabel.load(path).__class__(image(SHAPE).T, AFFINE), path, **more)  # never in a file


def test_nibabels_arrays_have_the_dtype_of_what_is_read(tmp_path):
    """The file's own is int16, and its slope makes floats of it."""
    scan = nibabel.Nifti1Image(np.arange(910, dtype="i2").reshape(SHAPE[::-1]), AFFINE)
    scan.header.set_slope_inter(0.25, -3)
    nibabel.save(scan, path := tmp_path / "scaled.nii")
    want = torch.from_numpy(nibabel.load(path).get_fdata().T.copy()).float()
    for given, dims in ((nibabel.load(path), None), (nibabel.load(path).dataobj, ("x", "y", "z"))):
        assert torch.equal(sample_of(given, dims=dims)[0][0], want)


def test_a_fourth_dim_has_the_channels(tmp_path):
    values = image((2, *SHAPE))
    path = nifti(tmp_path / "two.nii", values.T)
    assert torch.equal(sample_of(nibabel.load(path))[0], torch.from_numpy(values))
    assert_same_scan(nibabel.load(path), path)
    with pytest.raises(GridError, match=r"an array of shape \(7, 10, 13, 2, 1\) is not a volume \[x, y, z, channel\]"):
        sample_of(nibabel.load(nifti(tmp_path / "five.nii", values.T[..., None])))


@pytest.mark.parametrize("more", [{}, {"orientation": "LPS"}], ids=str)
def test_what_monai_loads_lies_where_its_file_does(tmp_path, more):
    import monai.data  # here, as ranks import this file: it took four of them 50 s on two busy cores
    from monai.transforms import LoadImage

    path = nifti(tmp_path / "scan.nii.gz")
    for channel_first in (False, True):
        loaded = LoadImage(ensure_channel_first=channel_first, image_only=True)(path)
        assert isinstance(loaded, monai.data.MetaTensor)
        assert_same_scan(loaded, path, **more)
    two = nifti(tmp_path / "two.nii.gz", image((2, *SHAPE)).T)
    assert_same_scan(LoadImage(ensure_channel_first=True, image_only=True)(two), two, **more)


def itk_files(folder):
    """The scan as SimpleITK writes it, in each of its formats."""
    itk = pytest.importorskip("SimpleITK")
    scan = itk.ReadImage(nifti(folder / "from.nii"))
    for name in ITK:
        itk.WriteImage(scan, str(folder / name), "packed" in name.stem)
    return itk


def reader_of(itk, path):
    reader = itk.ImageFileReader()
    reader.SetFileName(str(path))
    return reader


@pytest.mark.parametrize("more", [{}, {"orientation": "RAS"}, {"spacing": (1.0, 2.0, 1.0)}], ids=str)
def test_images_of_simpleitk_lie_where_nibabel_says(tmp_path, more):
    itk = itk_files(tmp_path)
    for name in ITK:
        for given in (itk.ReadImage(str(tmp_path / name)), reader_of(itk, tmp_path / name)):
            assert_same_scan(given, str(tmp_path / "from.nii"), atol=1e-4, **more)


def test_vectors_of_simpleitk_are_channels(tmp_path):
    itk = pytest.importorskip("SimpleITK")
    values = np.moveaxis(image((2, *SHAPE)), 0, -1)
    itk.WriteImage(itk.GetImageFromArray(values, isVector=True), str(tmp_path / "two.mha"))
    want = torch.from_numpy(values).movedim(-1, 0)
    for given in (itk.ReadImage(str(tmp_path / "two.mha")), reader_of(itk, tmp_path / "two.mha")):
        assert torch.equal(sample_of(given)[0], want)
    flat = itk.GetImageFromArray(image((9, 8)))
    assert torch.equal(
        open_volumes([flat], mesh=world_mesh(y=1), crop=None)[0].image.local[0], torch.from_numpy(image((9, 8)))
    )


def read_on_rank(folder, name, axes):
    """The scan, and the bytes that this rank read from files meanwhile."""
    import SimpleITK as itk  # noqa: N813

    volumes = open_volumes([reader_of(itk, folder / name)], mesh=world_mesh(**axes), crop=None)
    before = read_bytes()
    tile = volumes.whole(0).image
    return tile.full_tensor(), read_bytes() - before


def read_bytes():
    return int(next(x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar")).split()[1])


@pytest.mark.parametrize("name", ["big.mha", "big.mhd"])  # of .nrrd ITK reads all, whatever is asked for
def test_of_a_file_of_simpleitk_each_rank_reads_its_rows(tmp_path, name):
    itk = pytest.importorskip("SimpleITK")
    values = image((40, 200, 250))
    itk.WriteImage(itk.GetImageFromArray(values), str(tmp_path / name))
    for whole, taken in run_on_ranks(4, read_on_rank, tmp_path, name, {"z": 4}, timeout=240):
        assert torch.equal(whole[0], torch.from_numpy(values))
        assert values.nbytes / 4 <= taken < values.nbytes / 3


def test_arrays_of_other_libraries_read_what_is_asked(tmp_path):
    values = label(SHAPE).astype("i2")
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(tmp_path / "scan.n5")}}
    stored = tensorstore.open(spec, create=True, dtype=tensorstore.int16, shape=SHAPE[::-1]).result()
    stored.write(values.T).result()
    assert torch.equal(sample_of(stored, dims=("x", "y", "z"))[0][0], torch.from_numpy(values).float())
    np.savez_compressed(tmp_path / "scan.npz", data=values)
    assert torch.equal(sample_of(np.load(tmp_path / "scan.npz")["data"])[0][0], torch.from_numpy(values).float())


def test_blosc2_and_mrc(tmp_path):
    blosc2, mrcfile = pytest.importorskip("blosc2"), pytest.importorskip("mrcfile")
    values = image(SHAPE)
    blosc2.asarray(values, urlpath=str(tmp_path / "scan.b2nd"), chunks=(4, 5, 7), blocks=(2, 5, 7))
    opened = blosc2.open(str(tmp_path / "scan.b2nd"), mode="r")
    volumes = open_volumes([opened], mesh=world_mesh(z=1), crop=None)
    assert torch.equal(volumes.whole(0).image.local[0], torch.from_numpy(values))
    assert volumes.images[0].stored[0].table.chunks == (4, 5, 7)
    with mrcfile.new(tmp_path / "scan.mrc") as file:
        file.set_data(values)
    assert torch.equal(sample_of(mrcfile.mmap(tmp_path / "scan.mrc", mode="r").data)[0][0], torch.from_numpy(values))


def read_arrays_of_libraries(folder, axes):
    blosc2, mrcfile = pytest.importorskip("blosc2"), pytest.importorskip("mrcfile")
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(folder / "scan.n5")}}
    others = [
        np.load(folder / "scan.npz")["data"],
        blosc2.open(str(folder / "scan.b2nd"), mode="r"),
        mrcfile.mmap(folder / "scan.mrc", mode="r").data,
    ]
    of_n5 = sample_of(tensorstore.open(spec).result(), axes, dims=("x", "y", "z"))
    return [image[0] for image, _ in (of_n5, *(sample_of(each, axes) for each in others))]


@pytest.mark.parametrize("axes", [{"z": 2}, pytest.param({"y": 2, "x": 2}, marks=pytest.mark.slow)], ids=str)
def test_arrays_of_other_libraries_on_ranks(tmp_path, axes):
    blosc2, mrcfile = pytest.importorskip("blosc2"), pytest.importorskip("mrcfile")
    values = image(SHAPE)
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(tmp_path / "scan.n5")}}
    tensorstore.open(spec, create=True, dtype=tensorstore.float32, shape=SHAPE[::-1]).result().write(values.T).result()
    np.savez_compressed(tmp_path / "scan.npz", data=values)
    blosc2.asarray(values, urlpath=str(tmp_path / "scan.b2nd"), chunks=(4, 5, 7), blocks=(2, 5, 7))
    with mrcfile.new(tmp_path / "scan.mrc") as file:
        file.set_data(values)
    for read in run_on_ranks(2 * len(axes), read_arrays_of_libraries, tmp_path, axes, timeout=240):
        assert all(torch.equal(each, torch.from_numpy(values)) for each in read)


def test_image_objects_travel_to_other_processes(tmp_path):
    path = nifti(tmp_path / "scan.nii")
    volumes = pickle.loads(pickle.dumps(open_volumes([nibabel.load(path)], mesh=world_mesh(z=1), crop=None)))
    assert torch.equal(volumes.whole(0).image.local, sample_of(path)[0])
