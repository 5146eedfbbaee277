"""Boxes around what is above a threshold: MONAI's, found together, read alone, kept, and undone by the writer."""

import os

import nibabel
import numpy as np
import pytest
import torch
import zarr
from volume_store import AFFINE, image, label, write

import jigsaw
from jigsaw.errors import FieldError, GridError
from jigsaw.io.volumes.crops import Foreground
from jigsaw.io.volumes.foreground_box import ForegroundBox, find_boxes
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume import StoredVolume
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.io.volumes.volume_statistics import volume_statistics
from jigsaw.testing import run_on_ranks, world_mesh

SHAPES = [(21, 18, 13), (13, 10, 33)]
BODIES = [((4, 17), (0, 9), (5, 12)), ((2, 3), (3, 10), (7, 31))]
MESHES = [{"z": 1}, {"z": 2}, {"y": 3}, {"z": 2, "x": 2}, {"data": 2, "y": 2}]


def body(shape, rows, seed):
    """An image of negative noise, with a body of two corners and some voxels above 0.5 in between."""
    values = -1 - np.abs(image(shape, seed))
    inside = values[tuple(slice(*r) for r in rows)]
    inside[np.random.default_rng(seed).random(inside.shape) < 0.05] = 1.5
    inside[0, 0, 0] = inside[-1, -1, -1] = 0.75
    return values


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Two scans whose voxels run to the left, and their label maps; values [z, y, x] as they are stored."""
    folder, images, labels, values = tmp_path_factory.mktemp("boxes"), [], [], []
    for i, (shape, rows) in enumerate(zip(SHAPES, BODIES, strict=True)):
        values.append((body(shape, rows, i), label(shape, i)))
        for kind, stored, paths in zip("il", values[-1], (images, labels), strict=True):
            paths.append(str(folder / f"{kind}{i}.nii.gz"))
            nibabel.save(nibabel.Nifti1Image(stored.T, AFFINE), paths[-1])
    return images, labels, values


def read_boxes(images, labels, axes, rule, folder):
    mesh = world_mesh(**axes)
    options = {"mesh": mesh, "box": rule, "crop": None, "axes": "xyz", "orientation": "RAS"}
    ds = open_volumes(images, labels, **options)
    wholes = [ds.whole(i) for i in range(len(images))]
    for i, sample in enumerate(wholes):
        jigsaw.io.write_volume(
            f"{folder}/{i}.nii.gz", sample.label[0], like=sample, onto=images[i], dtype="u1", mode="w"
        )
    found = [(s.image.full_tensor(), s.label.full_tensor(), s.affine) for s in wholes]
    batch = next(iter(VolumeLoader(ds, batch_size=2))).image.full_tensor()
    return [i.box for i in ds.images], found, batch, volume_statistics(ds, percentiles=()).columns


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_boxes_values_and_places_are_those_of_monai_and_masks_go_back(scans, axes, tmp_path):
    from monai.transforms import CropForegroundd, EnsureChannelFirstd, LoadImaged, Orientationd

    images, labels, values = scans
    keys = ("image", "label")
    crop = CropForegroundd(keys, "image", select_fn=lambda x: x > 0.5, margin=(1, 2, 3), allow_smaller=True)
    steps = [LoadImaged(keys), EnsureChannelFirstd(keys), Orientationd(keys, "RAS", labels=None), crop]
    wanted = []
    for files in zip(images, labels, strict=True):
        data = dict(zip(keys, files, strict=True))
        for step in steps:
            data = step(data)
        wanted.append(data)
    rule = ForegroundBox(above=0.5, margin=(3, 2, 1))
    ranks = run_on_ranks(int(np.prod(list(axes.values()))), read_boxes, images, labels, axes, rule, str(tmp_path))
    for boxes, found, batch, columns in ranks:
        for data, box, (x, y, affine) in zip(wanted, boxes, found, strict=True):
            start, end = (data[f"foreground_{name}_coord"] for name in ("start", "end"))
            assert box == tuple(zip(start[::-1].tolist(), end[::-1].tolist(), strict=True))
            assert torch.equal(x, data["image"].as_tensor()) and torch.equal(y, data["label"].as_tensor().long())
            np.testing.assert_allclose(affine, data["image"].affine.numpy(), atol=1e-9)
        assert batch.shape[2:] == tuple(max(n) for n in zip(*(x.shape[1:] for x, _, _ in found), strict=True))
        whole = torch.cat([x.ravel() for x, _, _ in found]).double()
        assert columns["count"] == whole.numel()
        assert columns["mean"][0] == pytest.approx(whole.mean().item(), rel=1e-9)
    for i, (data, (_, stored)) in enumerate(zip(wanted, values, strict=True)):
        mask = nibabel.load(tmp_path / f"{i}.nii.gz")
        back = crop.inverse({"image": data["image"], "label": data["label"]})["label"]
        back = Orientationd("label", "LAS", labels=None)({"label": back})["label"].as_tensor()[0]
        assert np.array_equal(np.asarray(mask.dataobj), back.numpy().astype("u1"))
        assert mask.shape == stored.T.shape and np.allclose(mask.affine, AFFINE)


def crops_of(images, labels, axes, options):
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), **options)
    found = [(s.image.full_tensor(), s.label.full_tensor(), s.origin) for s in map(ds.__getitem__, range(len(ds)))]
    return found, [{k: sorted(v.at.tolist()) for k, v in f.classes.items()} for f in ds.found]


@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 2, "x": 2}], ids=str)
def test_crops_foreground_and_spacing_are_those_of_files_with_the_box_alone(scans, axes, tmp_path):
    whole, alone = ([], []), ([], [])
    for i, (rows, shape) in enumerate(zip(BODIES, SHAPES, strict=True)):
        box = tuple(slice(max(a - 1, 0), min(b + 1, n)) for (a, b), n in zip(rows, shape, strict=True))
        straight = np.diag([-2, 1.5, 3, 1])
        place = straight.copy()
        place[:3, 3] += straight[:3, :3] @ [part.start for part in box[::-1]]
        for kind, stored in enumerate(scans[2][i]):
            whole[kind].append(write(tmp_path / f"whole{kind}{i}.zarr", stored, affine=straight))
            alone[kind].append(write(tmp_path / f"alone{kind}{i}.zarr", stored[box], affine=place))
    more = {"crop": (6, 5, 8), "crops": 3, "foreground": Foreground(by="classes"), "spacing": (2, 1.5, 2.5)}
    more |= {"normalize": (0.5, 2.0)}
    count = int(np.prod(list(axes.values())))
    wanted = run_on_ranks(count, crops_of, *alone, axes, more)
    got = run_on_ranks(count, crops_of, *whole, axes, more | {"box": ForegroundBox(above=0.5, margin=1)})
    for (samples, classes), (want, want_classes) in zip(got, wanted, strict=True):
        assert classes == want_classes
        for (x, y, origin), (want_x, want_y, want_origin) in zip(samples, want, strict=True):
            assert origin == want_origin and torch.equal(x, want_x) and torch.equal(y, want_y)


def test_no_more_than_the_box_is_read_and_channels_may_be_chosen(tmp_path):
    values = np.zeros((2, 32, 32, 32), "f4")
    values[0, 9:15, 17:23, 1:7] = 1
    values[1] = 5
    path = write(tmp_path / "a.zarr", values, ("c", "z", "y", "x"), (2, 8, 8, 8))
    ds = open_volumes([path], mesh=world_mesh(z=1), crop=None, box=ForegroundBox(channels=(0,)))
    assert ds.images[0].box == ((9, 15), (17, 23), (1, 7))
    assert torch.equal(ds.whole(0).image.local, torch.from_numpy(values[:, 9:15, 17:23, 1:7]))
    assert ds._engine.stats.chunks == 1  # of 64
    every = open_volumes([path], mesh=world_mesh(z=1), crop=None, box=ForegroundBox())
    assert every.images[0].box == ((0, 32),) * 3


def cached(path, folder, axes, margin=0):
    rule = ForegroundBox(margin=margin, cache=folder)
    return find_boxes([StoredVolume((path,))], rule, world_mesh(**axes))


def test_boxes_are_kept_until_the_image_changes(tmp_path):
    path, folder, values = str(tmp_path / "a.zarr"), str(tmp_path / "cache"), np.zeros((16, 8, 8), "f4")
    values[3:5, 2:4, 1:7] = 1
    write(path, values)
    want = (((3, 5), (2, 4), (1, 7)),)
    assert cached(path, folder, {"z": 1}) == want
    (file,) = os.listdir(folder)
    held = (tmp_path / "cache" / file).stat().st_mtime_ns
    assert run_on_ranks(2, cached, path, folder, {"z": 2}, 1) == [(((2, 6), (1, 5), (0, 8)),)] * 2
    assert (tmp_path / "cache" / file).stat().st_mtime_ns == held
    for torn in (b"", b"[[3, 2, 1], [5, 4", b"[[3, 2], [5, 4]]", b"[[3, 2, 1], [5, 4, 9]]"):
        (tmp_path / "cache" / file).write_bytes(torn)
        assert cached(path, folder, {"z": 1}) == want
    values[12, 7, 0] = 1
    write(path, values)
    assert cached(path, folder, {"z": 1}) == (((3, 13), (2, 8), (0, 7)),)


def refused(path, axes):
    with pytest.raises(GridError, match=r"a.zarr has no voxel above 9, so ForegroundBox\(above=9\) leaves nothing"):
        open_volumes([path], mesh=world_mesh(**axes), crop=None, box=ForegroundBox(above=9))
    with pytest.raises(FieldError, match=r"channels=\(1,\): images have the channels 0 to 0, not 1"):
        open_volumes([path], mesh=world_mesh(**axes), crop=None, box=ForegroundBox(channels=(1,)))
    return True


def test_what_leaves_no_box_is_refused_on_every_rank(tmp_path):
    path = write(tmp_path / "a.zarr", np.zeros((9, 8, 7), "f4"))
    assert all(run_on_ranks(2, refused, path, {"z": 2}))
    with pytest.raises(FieldError, match=r"margin=\(1, 2\) must be one number, or 3, of the dims z, y, x"):
        open_volumes([path], mesh={}, crop=None, box=ForegroundBox(margin=(1, 2)))
    with pytest.raises(FieldError, match=r"box='body' must be a jigsaw.io.ForegroundBox"):
        open_volumes([path], mesh={}, crop=None, box="body")
    for why, more in [
        ("above='x' must be a number", {"above": "x"}),
        ("margin=-1 must be whole numbers >= 0", {"margin": -1}),
        ("margin=0.5 must be whole numbers", {"margin": 0.5}),
        (r"channels=\(\) must be a list", {"channels": ()}),
    ]:
        with pytest.raises(FieldError, match=why):
            ForegroundBox(**more)


def test_a_cache_is_of_the_values_that_metadata_gives(tmp_path):
    path, folder, values = tmp_path / "a.zarr", str(tmp_path / "cache"), np.zeros((8, 8, 8), "f4")
    values[2:4, 2:4, 2:4] = 2
    write(path, values, ("z", "y", "x"))
    about_one = ForegroundBox(above=1, cache=folder)
    narrow = open_volumes([str(path)], mesh={"z": 1}, crop=None, box=about_one).images[0].box
    zarr.open_group(path)["image"].attrs["add_offset"] = 5.0
    wide = open_volumes([str(path)], mesh={"z": 1}, crop=None, box=about_one).images[0].box
    assert (narrow, wide) == (((2, 4),) * 3, ((0, 8),) * 3)
