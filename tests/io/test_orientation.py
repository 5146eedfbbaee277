"""Volumes turned as they are read: the values, affines, labels and crops of nibabel's and MONAI's turned whole."""

import pickle

import nibabel
import numpy as np
import pytest
import torch
from nibabel.orientations import aff2axcodes, axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform
from volume_store import AFFINE, image, label, write

import jigsaw
from jigsaw.errors import FieldError, GridError
from jigsaw.io.volumes.crops import Foreground
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume import AxisTurn, orientation_codes
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.io.volumes.volume_writer import write_volume
from jigsaw.testing import run_on_ranks, world_mesh
from jigsaw.tile import misuse

STORED = (30, 16, 21)  # x, y, z
OPTIONS = {"crop": (9, 10, 8), "crops": 3, "halo": {"z": 1, "y": 2}, "seed": 5, "foreground": Foreground(pos=3, neg=1)}


def affines(count, seed=0):
    """Rotations, flips, permutations, shears and sizes of voxels."""
    r = np.random.default_rng(seed)
    for _ in range(count):
        q, _ = np.linalg.qr(r.normal(size=(3, 3)))
        made = np.eye(4)
        made[:3, :3] = q * r.uniform(0.5, 3, 3) + r.normal(size=(3, 3)) * 0.05
        made[:3, 3] = r.normal(size=3) * 50
        yield made


def test_codes_and_turns_are_nibabels():
    for affine in [*affines(200), AFFINE, np.eye(4), np.diag([-1.0, -1, 1, 1]), np.eye(4)[[1, 2, 0, 3]]]:
        assert orientation_codes(affine) == "".join(aff2axcodes(affine))
        for codes in ("RAS", "LPS", "SAR", "PIR"):
            turn = AxisTurn.of(affine, codes)
            want = ornt_transform(io_orientation(affine), axcodes2ornt(codes))
            assert list(turn.to) == want[:, 0].tolist()
            assert [-1 if f else 1 for f in turn.flipped] == want[:, 1].tolist()
            sizes = dict(zip("xyz", STORED, strict=True))
            np.testing.assert_allclose(turn.turned_affine(affine, sizes), affine @ inv_ornt_aff(want, STORED))


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Three scans with labels, each stored another way; the first label map has no affine."""
    folder, images, labels = tmp_path_factory.mktemp("turned"), [], []
    for i, affine in enumerate((AFFINE, *affines(2, 3))):
        whole = nibabel.Nifti1Image(image(STORED, i), affine)
        images.append(str(folder / f"image{i}.nii"))
        nibabel.save(whole, images[-1])
        if i:
            labels.append(str(folder / f"label{i}.nii"))
            nibabel.save(nibabel.Nifti1Image(label(STORED, i), affine), labels[-1])
        else:
            labels.append(write(folder / "label0.zarr", label(STORED, 0), ("x", "y", "z"), affine=None))
    return images, labels


def turned_by_nibabel(path, values, codes):
    affine = nibabel.load(path).affine
    how = ornt_transform(io_orientation(affine), axcodes2ornt(codes))
    made = nibabel.Nifti1Image(values, affine).as_reoriented(how)
    return np.asarray(made.dataobj).T, made.affine  # z, y, x


def read_turned(images, labels, axes, codes):
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), orientation=codes, **OPTIONS)
    again = pickle.loads(pickle.dumps(ds))
    found = [(ds.crop(i), ds[i].image.full_tensor()[0].numpy(), ds[i].label.full_tensor()[0].numpy()) for i in range(9)]
    np.testing.assert_array_equal(again[4].image.full_tensor()[0], found[4][1])
    whole = ds.whole(1)
    return found, ds[3].affine, whole.image.full_tensor()[0].numpy(), whole.affine


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 2}, {"y": 2, "x": 2}], ids=str)
def test_crops_and_volumes_are_those_of_nibabels_turned_image(scans, axes):
    images, labels = scans
    for codes in ("RAS", "PIR"):
        wanted = [turned_by_nibabel(path, nibabel.load(path).get_fdata().astype("f4"), codes) for path in images]
        maps = [turned_by_nibabel(path, label(STORED, i), codes)[0] for i, path in enumerate(images)]
        for found, affine, whole, of_whole in run_on_ranks(
            int(np.prod(list(axes.values()))), read_turned, images, labels, axes, codes
        ):
            for crop, got, got_label in found:
                box = tuple(slice(a, a + n) for a, n in zip(crop.origin, OPTIONS["crop"], strict=True))
                np.testing.assert_array_equal(got, wanted[crop.volume][0][box])
                np.testing.assert_array_equal(got_label, maps[crop.volume][box])
            z, y, x = found[3][0].origin
            np.testing.assert_allclose(affine @ [0, 0, 0, 1], wanted[1][1] @ [x, y, z, 1], rtol=1e-5)
            np.testing.assert_array_equal(whole, wanted[1][0])
            np.testing.assert_allclose(of_whole, wanted[1][1], rtol=1e-5)


def test_ras_is_nibabels_canonical_and_monais(scans):
    transforms = pytest.importorskip("monai.transforms")
    images, labels = scans
    ds = open_volumes(images, labels, mesh=world_mesh(z=1), orientation="ras", crop=(8, 8, 8))
    for i, path in enumerate(images):
        sample, canonical = ds.whole(i), nibabel.as_closest_canonical(nibabel.load(path))
        np.testing.assert_array_equal(sample.image.local[0], canonical.get_fdata().T.astype("f4"))
        np.testing.assert_allclose(sample.affine, canonical.affine, rtol=1e-6)
        loaded = transforms.LoadImage(ensure_channel_first=True)(path)
        want = transforms.Orientation("RAS", labels=None)(loaded)
        np.testing.assert_array_equal(sample.image.local[0], want[0].numpy().T)
    batch = next(iter(VolumeLoader(ds, batch_size=3)))
    assert {orientation_codes(affine) for affine in batch.affines} == {"RAS"}


def test_foreground_is_that_of_the_turned_label_map(scans, tmp_path):
    images, labels = scans
    how = Foreground(by="classes", kept=100_000, cache=str(tmp_path))
    for codes in ("LPS", "RAS"):  # the cache keeps them apart
        ds = open_volumes(images, labels, mesh={}, orientation=codes, crop=(8, 8, 8), foreground=how)
        for i, path in enumerate(images):
            want, _ = turned_by_nibabel(path, label(STORED, i), codes)
            for k, kept in ds.found[i].classes.items():
                assert sorted(kept.at.tolist()) == np.flatnonzero(want == k).tolist()


def test_planes_turn_within_themselves(tmp_path):
    values = image((12, 10))
    path = write(tmp_path / "p.zarr", values, ("y", "x"), (4, 4), affine=np.diag([1.0, 1, 1, 1]))
    sample = open_volumes([path], mesh=world_mesh(y=1), crop=(12, 10), orientation="LPS")[0]
    np.testing.assert_array_equal(sample.image.local[0], values[::-1, ::-1])
    sample = open_volumes([path], mesh=world_mesh(y=1), crop=(10, 12), orientation="ARS")[0]
    np.testing.assert_array_equal(sample.image.local[0], values.T)
    with pytest.raises(GridError, match="is a plane of x, y, and orientation= would make another dim of one"):
        open_volumes([path], mesh={}, crop=(12, 10), orientation="SAR")


def test_orientations_that_cannot_be(tmp_path):
    bare = write(tmp_path / "bare.zarr", image((8, 8, 8)), affine=None)
    for wrong in ("RA", "RAR", "XYZ", 3, "RASS"):
        with pytest.raises(FieldError, match=r"orientation=.* one letter each of L or R, P or A, I or S"):
            open_volumes([bare], mesh={}, crop=(4, 4, 4), orientation=wrong)
    with pytest.raises(GridError, match=r"bare\.zarr has no affine, so nobody knows how it lies; write one"):
        open_volumes([bare], mesh={}, crop=(4, 4, 4), orientation="RAS")


def test_volumes_that_lie_differently_are_told_of_once(scans, recwarn):
    images, _ = scans
    misuse._warned.clear()
    with pytest.warns(UserWarning, match=r"image0.nii is stored LAS and .*image1.nii .*give orientation='RAS'"):
        open_volumes(images, mesh={}, crop=(8, 8, 8))
    recwarn.clear()
    open_volumes(images, mesh={}, crop=(8, 8, 8))
    open_volumes(images[:1] * 2, mesh={}, crop=(8, 8, 8))
    open_volumes(images, mesh={}, crop=(8, 8, 8), orientation="RAS")
    assert not [str(w.message) for w in recwarn if "is stored" in str(w.message)]
    assert torch.is_tensor(open_volumes(images[:1], mesh=world_mesh(z=1), crop=(8, 8, 8))[0].image.local)


# -- MONAI's order of axes ---------------------------------------------------------------------------------------------


def read_x_first(images, labels, axes, folder):
    """Of both orders: crops, batches and a whole scan; the scan's file, and what a net says of it."""
    mesh = world_mesh(**axes)
    torch.manual_seed(0)
    net = torch.nn.Conv3d(1, 2, (3, 5, 1), padding=(1, 2, 0), dtype=torch.float64)  # not alike along x, y and z
    net, read = jigsaw.parallelize(net, mesh), {}
    for order in ("zyx", "xyz"):
        data = open_volumes(images, labels, mesh=mesh, axes=order, dtype="float64", **OPTIONS)
        batches = [*VolumeLoader(data, batch_size=4)]
        whole = data.whole(1)
        write_volume(folder / f"{order}.nii", whole.label[0], like=whole, mode="w")
        told = net(whole.image[None]).detach().full_tensor()
        tiles = [data[2].image, data[2].label, *(t for b in batches for t in (b.image, b.label)), whole.image]
        numbers = [data[2].origin, data[2].spacing, *(n for b in batches for n in (b.origins, b.spacings))]
        assert {x.x_first for x in (data[2], whole, *batches)} == {order == "xyz"}
        read[order] = [t.full_tensor().numpy() for t in tiles], [np.array(n) for n in numbers], told.numpy()
    return read


@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 2}, {"z": 2, "x": 2}, {"data": 2, "y": 2}], ids=str)
def test_samples_in_monais_order_are_the_same_in_reverse(scans, tmp_path, axes):
    images, labels = scans
    torch.manual_seed(0)
    net = torch.nn.Conv3d(1, 2, (3, 5, 1), padding=(1, 2, 0), dtype=torch.float64)
    for read in run_on_ranks(int(np.prod(list(axes.values()))), read_x_first, images, labels, axes, tmp_path):
        for tile, turned in zip(read["zyx"][0], read["xyz"][0], strict=True):
            assert tile.shape != turned.shape
            np.testing.assert_array_equal(np.moveaxis(tile, (-3, -2, -1), (-1, -2, -3)), turned)
        for along, against in zip(read["zyx"][1], read["xyz"][1], strict=True):
            np.testing.assert_array_equal(along[..., ::-1], against)
        # a net that nibabel's array goes through as it is
        scan = torch.from_numpy(nibabel.load(images[1]).get_fdata())
        np.testing.assert_allclose(read["xyz"][2][0], net(scan[None]).detach().numpy(), rtol=1e-9, atol=1e-9)
    files = [nibabel.load(tmp_path / f"{order}.nii") for order in ("zyx", "xyz")]
    want = nibabel.load(labels[1])
    for file in files:
        np.testing.assert_array_equal(file.get_fdata(), want.get_fdata())
        np.testing.assert_allclose(file.affine, want.affine, atol=1e-5)


def test_an_image_of_two_dims_in_monais_order_is_written_like_its_sample(tmp_path):
    pixels = np.arange(4 * 7, dtype="f4").reshape(4, 7)
    np.save(tmp_path / "image.npy", pixels)
    data = open_volumes([tmp_path / "image.npy"], mesh=world_mesh(y=1), crop=None, axes="xyz")
    sample = data.whole(0)
    assert sample.image.shape == (1, 7, 4)
    for name, tile in (("all.nii", sample.image), ("batch.nii", sample.image[None])):
        write_volume(tmp_path / name, tile, like=sample)
        np.testing.assert_array_equal(nibabel.load(tmp_path / name).get_fdata().squeeze(), pixels.T)
    batch = next(iter(VolumeLoader(data)))
    assert torch.from_numpy(np.asarray(batch.spacings)).shape == torch.from_numpy(batch.origins).shape == (1, 2)


def test_orders_of_axes_that_cannot_be(scans, tmp_path):
    images, _ = scans
    with pytest.raises(FieldError, match=r"axes='zxy' must be one of \('zyx', 'xyz'\)"):
        open_volumes(images, mesh=world_mesh(z=1), crop=None, axes="zxy")
    of_order = {o: open_volumes(images, mesh=world_mesh(z=1), crop=None, axes=o).whole(0) for o in ("zyx", "xyz")}
    with pytest.raises(GridError, match=r"voxels along z, y, x and the tile"):
        write_volume(tmp_path / "mask.nii", of_order["zyx"].image[0], like=of_order["xyz"])
    assert not (tmp_path / "mask.nii").exists()
