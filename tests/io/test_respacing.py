"""Volumes resampled as they are read: the values and affines of MONAI's `Spacing` on the whole, of the rows needed."""

import math
import pickle

import nibabel
import numpy as np
import pytest
import scipy.spatial.transform
import torch
from volume_store import AFFINE, image, label, write

from jigsaw import comm
from jigsaw.errors import FieldError, GridError, WriteError
from jigsaw.io.volumes.augment import Affine, Flip
from jigsaw.io.volumes.crops import Foreground
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.respacing import GridRespacing
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.io.volumes.volume_writer import write_volume
from jigsaw.testing import run_on_ranks, world_mesh

SIZES, ZOOMS = [(23, 17, 10), (14, 21, 13)], [(0.7, 0.9, 3.0), (1.3, 0.8, 2.5)]  # x, y, z
SPACING = (1.7, 1.1, 1.0)  # z, y, x
OPTIONS = {"crop": (9, 13, 8), "crops": 2, "halo": {"z": 1, "y": 2}, "seed": 5, "fill": -9.0, "label_fill": 7}
MESHES = [{"z": 1}, {"z": 2}, {"z": 4}, {"y": 2, "x": 2}]


def placed(zooms, codes=(-1, 1, 1), degrees=0):
    """Voxels of these sizes, flipped, and turned about z."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    made = np.eye(4)
    made[:3, :3] = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ np.diag(np.array(zooms) * codes)
    made[:3, 3] = (90, -126, -72)
    return made


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Two scans with labels, of different sizes and voxels: one lies on its side."""
    folder, found = tmp_path_factory.mktemp("spaced"), ([], [])
    for i, (sizes, zooms) in enumerate(zip(SIZES, ZOOMS, strict=True)):
        affine = placed(zooms) if i == 0 else placed(zooms)[[1, 2, 0, 3]]
        for paths, name, values in zip(found, ("image", "label"), (image(sizes, i), label(sizes, i)), strict=True):
            paths.append(str(folder / f"{name}{i}.nii"))
            nibabel.save(nibabel.Nifti1Image(values, affine), paths[-1])
    return found


def by_monai(path, codes, mode):
    """A file as MONAI loads, orients and resamples it [z, y, x], and its affine."""
    transforms = pytest.importorskip("monai.transforms")
    loaded = transforms.LoadImage(ensure_channel_first=True, dtype=np.float64)(path)
    turned = transforms.Orientation(codes, labels=None)(loaded) if codes else loaded
    made = transforms.Spacing(SPACING[::-1], mode=mode, recompute_affine=False)(turned)
    return made[0].numpy().T, made.affine.numpy()


def read_spaced(scans, axes, codes):
    """Crops, a pickled one, a batch of whole volumes, and a whole volume, gathered."""
    how = {"mesh": world_mesh(**axes), "orientation": codes, "spacing": SPACING}
    ds = pickle.loads(pickle.dumps(open_volumes(*scans, **how, **OPTIONS, foreground=Foreground(pos=3, neg=1))))
    samples = [(ds.crop(i), s.image.full_tensor()[0], s.label.full_tensor()[0], s.affine) for i, s in enumerate(ds)]
    together = open_volumes(*scans, **how, crop=None, align=4, fill=-9.0)
    (batch,) = VolumeLoader(together, batch_size=2)
    whole = [ds.whole(i) for i in range(2)]
    moved = open_volumes(*scans, **how, **OPTIONS, augment=[Flip(p=1), Affine(p=1, degrees=20)])
    return {
        "samples": samples,
        "batch": (batch.image.full_tensor(), batch.label.full_tensor(), batch.origins, batch.affines, batch.spacings),
        "whole": [(w.image.full_tensor()[0], w.label.full_tensor()[0], w.affine, w.spacing) for w in whole],
        "moved": [(s.image.full_tensor(), s.label.full_tensor(), s.affine) for s in moved],
    }


def padded(values, origin, crop, fill):
    """A crop of a whole volume, where it is smaller too."""
    wide = np.pad(values, [(max(-a, 0), max(a + n - m, 0)) for a, n, m in zip(origin, crop, values.shape, strict=True)],
                  constant_values=fill)  # fmt: skip
    return wide[tuple(slice(max(a, 0), max(a, 0) + n) for a, n in zip(origin, crop, strict=True))]


@pytest.fixture(scope="module")
def on_one_rank(scans):
    return {codes: read_spaced(scans, MESHES[0], codes) for codes in (None, "RAS")}


@pytest.mark.parametrize("codes", [None, "RAS"])
def test_samples_are_those_of_monais_spacing(scans, on_one_rank, codes):
    found = on_one_rank[codes]
    wanted = [by_monai(path, codes, "bilinear") for path in scans[0]]
    maps = [by_monai(path, codes, "nearest")[0] for path in scans[1]]
    close = {"rtol": 1e-5, "atol": 1e-5}
    for i, (got, got_label, affine, spacing) in enumerate(found["whole"]):
        np.testing.assert_allclose(got, wanted[i][0], **close)
        np.testing.assert_array_equal(got_label, maps[i])
        np.testing.assert_allclose(affine, wanted[i][1], atol=1e-4)
        np.testing.assert_allclose(spacing, SPACING, rtol=1e-6)
    seen = 0
    for crop, got, got_label, affine in found["samples"]:
        np.testing.assert_allclose(got, padded(wanted[crop.volume][0], crop.origin, OPTIONS["crop"], -9.0), **close)
        want = padded(maps[crop.volume], crop.origin, OPTIONS["crop"], 7)
        np.testing.assert_array_equal(got_label, want)
        np.testing.assert_allclose(affine @ [0, 0, 0, 1], wanted[crop.volume][1] @ [*crop.origin[::-1], 1], atol=1e-4)
        seen += int((want > 0).sum() - (want == 7).sum())
    assert seen  # crops are drawn to what is labelled
    batch, batch_labels, origins, affines, spacings = found["batch"]
    assert all(n % 4 == 0 for n in batch.shape[2:])
    for i, origin in enumerate(origins):
        np.testing.assert_allclose(batch[i, 0], padded(wanted[i][0], origin, batch.shape[2:], -9.0), **close)
        np.testing.assert_array_equal(batch_labels[i, 0], padded(maps[i], origin, batch.shape[2:], 0))
        np.testing.assert_allclose(affines[i] @ [*-origin[::-1], 1], wanted[i][1] @ [0, 0, 0, 1], atol=1e-4)
    np.testing.assert_allclose(spacings, [SPACING] * 2, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
def test_bits_are_alike_on_every_mesh(scans, on_one_rank, axes):
    def compare(got, want):
        if isinstance(want, list | tuple):
            for each in zip(got, want, strict=True):
                compare(*each)
        else:
            assert torch.equal(got, want) if isinstance(want, torch.Tensor) else np.array_equal(got, want)

    for found in run_on_ranks(int(np.prod(list(axes.values()))), read_spaced, scans, axes, "RAS"):
        for name, want in on_one_rank["RAS"].items():
            compare(found[name], want)


def test_oblique_scans_are_resampled_along_their_own_axes(tmp_path):
    """Of these MONAI's `Spacing` keeps the first voxel or the middle, by the last bits of an affine: ours the first."""
    transforms = pytest.importorskip("monai.transforms")
    path = str(tmp_path / "oblique.nii")
    nibabel.save(nibabel.Nifti1Image(image(SIZES[0]), placed(ZOOMS[0], degrees=25)), path)
    sample = open_volumes([path], mesh=world_mesh(z=1), crop=None, spacing=SPACING, orientation="RAS").whole(0)
    loaded = transforms.Orientation("RAS", labels=None)(transforms.LoadImage(ensure_channel_first=True)(path))
    np.testing.assert_allclose(sample.affine[:, 3], loaded.affine[:, 3], rtol=1e-6)
    np.testing.assert_allclose(sample.spacing, SPACING)
    how = {"dst_affine": sample.affine, "spatial_size": tuple(sample.image.shape[:0:-1]), "padding_mode": "border"}
    want = transforms.SpatialResample()(loaded, **how)
    np.testing.assert_allclose(sample.image.local[0], want[0].numpy().T, atol=1e-5)


def test_an_oblique_grid_begins_with_the_first_voxel_where_monais_need_not():
    utils = pytest.importorskip("monai.data.utils")
    turn = scipy.spatial.transform.Rotation.from_euler("xyz", (10, -7, 3), degrees=True).as_matrix()
    affine = np.eye(4)
    affine[:3] = np.c_[turn * (0.8, 0.9, 2.5), (-130, 120, 70)].astype("f4")  # as a header has it
    sizes, asked = (300, 310, 320), (2.0, 1.5, 1.1)
    grid = GridRespacing.of("scan", affine, ("z", "y", "x"), sizes, asked)
    theirs = utils.zoom_affine(affine, asked[::-1], diagonal=False)
    their_sizes, their_origin = utils.compute_shape_offset(sizes[::-1], affine, theirs)
    assert tuple(their_sizes) == grid.sizes[::-1]
    assert np.array_equal(grid.respaced_affine(affine, ("z", "y", "x"))[:3, 3], affine[:3, 3])
    assert 0.01 < np.abs(their_origin - affine[:3, 3]).max() < 2


def test_augmented_crops_are_those_of_the_resampled_scan(tmp_path, scans):
    """The same scan, resampled by MONAI and stored so, is augmented to the same."""
    stored = ([], [])
    for paths, names, mode in zip(stored, scans, ("bilinear", "nearest"), strict=True):
        for i, path in enumerate(names):
            values, affine = by_monai(path, "RAS", mode)
            paths.append(write(tmp_path / f"{mode}{i}.zarr", values.astype("f4"), affine=affine))
    how = {"mesh": world_mesh(z=1), "augment": [Flip(p=0.5), Affine(p=1, degrees=20)], **OPTIONS}
    for mine, plain in zip(
        open_volumes(*scans, orientation="RAS", spacing=SPACING, **how), open_volumes(*stored, **how), strict=True
    ):
        torch.testing.assert_close(mine.image.full_tensor(), plain.image.full_tensor(), rtol=1e-4, atol=1e-4)
        assert (mine.label.full_tensor() != plain.label.full_tensor()).float().mean() < 0.01  # halfway, by rounding
        np.testing.assert_allclose(mine.affine, plain.affine, atol=1e-3)


def test_each_rank_reads_the_stored_rows_that_its_own_lie_between(scans):
    """40 rows of 0.75 mm are asked of 10 of 3 mm: a rank with ten of them reads four, not all."""
    path, labels = scans[0][0], scans[1][0]
    ds = open_volumes([path], [labels], mesh={"z": 4}, crop=None, spacing=(0.75, 0.9, 0.7))
    assert ds.images[0].shape == (37, 17, 23)
    image_plan, label_plan = ds.plan(0)
    assert [cut.owned(i) for cut in [ds.layout.cuts[1]] for i in range(4)] == [(0, 10), (10, 19), (19, 28), (28, 37)]
    assert image_plan.request.layout.cuts[2].held == ((0, 4), (2, 6), (4, 8), (7, 10))
    assert label_plan.request.layout.cuts[2].held == ((0, 3), (2, 5), (5, 8), (7, 10))
    plane = 17 * 23
    assert [rows.useful_bytes for rows in image_plan.rows] == [4 * rows * plane for rows in (4, 4, 4, 3)]
    crop = open_volumes([path], mesh={"z": 2}, crop=(8, 5, 5), spacing=(0.75, 1.8, 0.7))
    assert [b - a for a, b in crop.plan(0)[0].request.layout.cuts[3].held] == [9]  # four steps of two rows, and one row


def test_what_is_there_already_stays(scans, tmp_path):
    same = open_volumes(scans[0], mesh={}, crop=(4, 4, 4), spacing=(3.0004, 0.9, 0.7))
    assert same.images[0].respacing is None
    assert same.images[0].shape == (10, 17, 23)
    assert same.images[1].shape != same.images[1].stored_shape
    metres = write(tmp_path / "metres.zarr", image((8, 8, 8)), affine=np.diag([1e-3, 1e-3, 1e-3, 1]))
    assert open_volumes([metres], mesh={}, crop=(4, 4, 4), spacing=5e-4).images[0].shape == (15, 15, 15)
    one = open_volumes(scans[0], mesh={}, crop=(4, 4, 4), spacing=np.float32(2))
    np.testing.assert_allclose(one.images[0].spacing, (2, 2, 2), rtol=1e-6)


def test_a_mask_goes_back_to_where_the_scan_lies(scans, tmp_path):
    ds = open_volumes(scans[0], mesh=world_mesh(z=1), crop=None, spacing=SPACING, orientation="RAS")
    write_volume(tmp_path / "mask.nii", (ds.whole(0).image[0] > 0).to(torch.uint8), like=ds.whole(0))
    mask = nibabel.load(tmp_path / "mask.nii")
    np.testing.assert_allclose(mask.header.get_zooms(), SPACING[::-1], rtol=1e-6)
    np.testing.assert_allclose(mask.affine, by_monai(scans[0][0], "RAS", "nearest")[1], atol=1e-4)


def test_spacings_that_cannot_be(scans, tmp_path):
    how = {"mesh": {}, "crop": (4, 4, 4)}
    for wrong in (0, -1.0, "1mm", (1, 2), (1, 2, 0), True, float("nan"), float("inf"), ()):
        with pytest.raises(FieldError, match=r"spacing=.* must be a number > 0, or 3 of them, of the dims z, y, x"):
            open_volumes(scans[0], spacing=wrong, **how)
    bare = write(tmp_path / "bare.zarr", image((8, 8, 8)), affine=None)
    with pytest.raises(GridError, match=r"spacing=\(1\.0, 1\.0, 1\.0\): .*bare\.zarr has no affine"):
        open_volumes([bare], spacing=1, **how)
    tilted = write(tmp_path / "tilted.zarr", image((8, 8, 8)), affine=AFFINE)
    with pytest.raises(GridError, match=r"tilted\.zarr is sheared: its axes z and y are 7\.59 degrees off a right"):
        open_volumes([tilted], spacing=1, **how)
    with pytest.raises(GridError, match=r"spacing= with boundary=, whose rows beyond a crop are those of the scan as"):
        open_volumes(scans[0], spacing=1, halo={"z": 1}, boundary={"z": "reflect"}, **how)


# -- and back ----------------------------------------------------------------------------------------------------------


def write_back(scans, folder, axes):
    """Masks of a whole scan and of a crop of it, each on the grid of its scan; and the bytes sent for one of them."""
    how = {"mesh": world_mesh(**axes), "spacing": SPACING, "orientation": "RAS"}
    for i, scan in enumerate(scans[0]):
        sample = open_volumes(*scans, crop=None, **how).whole(i)
        labels = sample.label[0] + 1
        with comm.count() as sent:
            write_volume(folder / f"whole{i}.nii.gz", labels, like=sample, onto=scan)
        crop = open_volumes([scan], [scans[1][i]], crop=(7, 9, 8), seed=i, **how)[0]
        write_volume(folder / f"crop{i}.nii", crop.label[0] + 1, like=crop, onto=scan)
        write_volume(folder / f"crop{i}-there.nii", crop.label[0] + 1, like=crop)
        write_volume(folder / f"whole{i}-there.nii", labels, like=sample)
    return sum(c.sent_bytes for c in sent.calls if c.kind == "exchange"), labels.local.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("axes", [*MESHES, {"z": 3}], ids=str)
def test_labels_go_back_to_the_nearest_voxels_of_the_scan(scans, tmp_path, axes):
    found = run_on_ranks(int(np.prod(list(axes.values()))), write_back, scans, tmp_path, axes)
    # each label is taken once and written once: nothing is sent to all
    assert sum(sent for sent, _ in found) <= sum(nbytes for _, nbytes in found) + 8 * np.prod(SIZES[-1])
    for i, path in enumerate(scans[0]):
        scan = nibabel.load(path)
        for name in (f"whole{i}.nii.gz", f"crop{i}.nii"):
            got, there = nibabel.load(tmp_path / name), nibabel.load(tmp_path / f"{name.split('.')[0]}-there.nii")
            assert got.shape == scan.shape
            np.testing.assert_allclose(got.affine, scan.affine, atol=1e-5)
            labels, spaced = np.asarray(got.dataobj), np.asarray(there.dataobj)
            at = np.indices(scan.shape).reshape(3, -1)
            world = scan.affine[:3, :3] @ at + scan.affine[:3, 3:]
            place = np.linalg.inv(there.affine) @ np.vstack([world, np.ones(world.shape[1])])
            place, sizes = place[:3], np.array(spaced.shape)[:, None]
            outside = ((place < -0.502) | (place > sizes - 0.498)).any(0)
            assert (labels.reshape(-1)[outside] == 0).all() and (name[0] == "w") == (not outside.any())
            # of two voxels that are as near either is right
            allowed = [np.clip(np.rint(place + nudge), 0, sizes - 1).astype(int) for nudge in (-2e-3, 2e-3)]
            same = [labels.reshape(-1) == spaced[tuple(each)] for each in allowed]
            tied = (allowed[0] != allowed[1]).any(0)
            assert ((same[0] | same[1]) | outside | tied).all() and tied.mean() < 0.5


def test_what_cannot_be_put_back(scans, tmp_path):
    sample = open_volumes(*scans, mesh=world_mesh(z=1), crop=None, spacing=SPACING).whole(0)
    with pytest.raises(WriteError, match=r"onto= takes the nearest label, and the tile is of torch\.float32"):
        write_volume(tmp_path / "a.nii", sample.image[0], like=sample, onto=scans[0][0])
    turned = tmp_path / "turned.nii"
    nibabel.save(nibabel.Nifti1Image(image(SIZES[0]), placed(ZOOMS[0], degrees=10)), turned)
    with pytest.raises(GridError, match=r"the axis y of the scan runs along none of the tile's"):
        write_volume(tmp_path / "a.nii", sample.label[0], like=sample, onto=turned)
    assert not (tmp_path / "a.nii").exists()


def test_an_infinite_voxel_stays_where_a_new_row_is_a_stored_one():
    values = np.zeros((9, 4, 4), "f4")
    values[4] = np.inf
    scan = nibabel.Nifti1Image(values.T, np.eye(4))
    sample = open_volumes([scan], mesh=world_mesh(z=1), crop=None, spacing=(4 / 3, 1, 1))[0]
    assert sample.image.full_tensor()[0, :, 0, 0].tolist() == [0, 0, 0, math.inf, 0, 0, 0]
