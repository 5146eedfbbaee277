"""Label maps stored as numbers of any kind: rounded, missing ones told apart, none that their dtype cannot hold."""

import nibabel
import numpy as np
import pytest
import torch
from volume_store import AFFINE, image, label, write

from jigsaw.errors import FieldError
from jigsaw.io import augment
from jigsaw.io.volumes.crops import Foreground, find_foreground
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume import StoredVolume
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh
from jigsaw.tile import misuse

SHAPE = (9, 8, 7)
WHOLE = {"crop": SHAPE, "foreground": Foreground(by="classes")}


def counts(values):
    return {int(k): int((values == k).sum()) for k in np.unique(values[values != 0])}


def found(ds):
    return {k: kept.count for k, kept in ds.found[0].classes.items()}


def scaled(path, values):
    """A label map of floats that nibabel stores as integers with a slope: of most labels it gives back 0.99999."""
    stored = nibabel.Nifti1Image(values.T.astype("f8"), AFFINE)
    stored.set_data_dtype("i2")
    nibabel.save(stored, path)
    assert (nibabel.load(path).get_fdata() != values.T).any()
    return str(path)


def read_scaled(images, labels, axes):
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), **WHOLE)
    return ds[0].label.full_tensor()[0].numpy(), found(ds)


@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 2}], ids=str)
def test_labels_with_a_scale_are_rounded_not_cut_off(tmp_path, axes):
    values = np.random.default_rng(0).integers(0, 4, SHAPE)
    images, labels = [write(tmp_path / "i.zarr", image(SHAPE))], [scaled(tmp_path / "l.nii", values)]
    for got, classes in run_on_ranks(axes["z"], read_scaled, images, labels, axes):
        np.testing.assert_array_equal(got, values)
        assert classes == counts(values)


@pytest.mark.parametrize("chunks", [(4, 4, 4), (2, 8, 7), (1, 1, 4)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("label_dtype", ["uint8", "int64"])
def test_floats_are_labels_and_nan_is_none(tmp_path, chunks, dtype, label_dtype):
    values = label(SHAPE).astype(dtype) - 1e-4
    values[2] = np.nan
    path = write(tmp_path / "l.zarr", values, chunks=chunks)
    ds = open_volumes(
        [write(tmp_path / "i.zarr", image(SHAPE))],
        [path],
        mesh=world_mesh(z=1),
        label_fill=7,
        label_dtype=label_dtype,
        **WHOLE,
    )
    want = np.where(np.isnan(values), 7, np.rint(values))
    np.testing.assert_array_equal(ds[0].label.local[0], want)
    assert found(ds) == {k: n for k, n in counts(want).items() if k != 7}
    assert ds.found[0].background.count == (want == 0).sum()


def test_a_missing_value_of_a_label_map_is_neither_foreground_nor_background(tmp_path):
    values = label(SHAPE).astype("i2")
    values[4] = -1
    path = write(tmp_path / "l.zarr", values)
    import zarr

    zarr.open_group(path, mode="r+")["image"].attrs["_FillValue"] = -1
    for by in ("voxels", "classes"):
        (seen,) = find_foreground([StoredVolume((path,))], Foreground(by=by), None)
        assert sum(kept.count for kept in seen.classes.values()) == (values > 0).sum()
        assert seen.background.count == (values == 0).sum()


@on_ranks(2)
def test_a_label_that_its_dtype_cannot_hold_is_refused_on_every_rank(tmp_path):
    mesh = world_mesh(z=2)
    wide, infinite = tmp_path / "wide.zarr", tmp_path / "inf.zarr"
    if mesh.get_rank() == 0:
        values = label((16, 8, 8)).astype("i2")
        write(tmp_path / "i.zarr", image((16, 8, 8)))
        values[12, 3, 3] = 300  # of the second rank's half
        write(wide, values, chunks=(4, 8, 8))
        write(infinite, np.where(values == 300, np.inf, values), chunks=(1, 2, 4))
    torch.distributed.barrier()
    options = {"mesh": mesh, "crop": (16, 8, 8)}
    for mode in ("cooperative", "independent"):
        for path, dtype in ((wide, "uint8"), (infinite, "int64")):
            ds = open_volumes([str(tmp_path / "i.zarr")], [str(path)], label_dtype=dtype, mode=mode, **options)
            with pytest.raises(FieldError, match=f"that {dtype} cannot hold; read it as a wider dtype"):
                ds[0]
    ds = open_volumes([str(tmp_path / "i.zarr")], [str(wide)], label_dtype="int16", **options)
    assert ds[0].label.full_tensor().max() == 300


def test_a_fill_that_no_voxel_can_hold_is_refused(tmp_path):
    paths = [write(tmp_path / "i.zarr", image(SHAPE))], [write(tmp_path / "l.zarr", label(SHAPE))]
    for why, more in [
        (r"label_fill=-1 must be an integer that torch.uint8 holds", {"label_fill": -1, "label_dtype": "uint8"}),
        (r"label_fill=0.5 must be an integer", {"label_fill": 0.5}),
        (r"label_fill=nan must be an integer", {"label_fill": float("nan")}),
        (r"label_fill='x' must be an integer", {"label_fill": "x"}),
        (r"fill='x' must be a number", {"fill": "x"}),
    ]:
        with pytest.raises(FieldError, match=why):
            open_volumes(*paths, mesh={}, crop=(12, 8, 8), **more)


def test_labels_between_integers_are_told_of_once(tmp_path, recwarn):
    images = [write(tmp_path / "i.zarr", image(SHAPE))]
    near = write(tmp_path / "near.zarr", label(SHAPE).astype("f4") - 1e-3)
    values = label(SHAPE).astype("f4")
    values[3, 2, 1] = 0.25
    values[0] = np.nan
    soft = write(tmp_path / "soft.zarr", values, chunks=(4, 4, 4))
    misuse._warned.clear()
    open_volumes(images, [near], mesh=world_mesh(z=1), **WHOLE)[0]
    assert not [w for w in recwarn if "not integers" in str(w.message)]
    ds = open_volumes(images, [soft], mesh=world_mesh(z=1), crop=SHAPE)
    with pytest.warns(
        UserWarning, match=r"has labels that are not integers, such as 0.25, .*resample it by the nearest"
    ):
        np.testing.assert_array_equal(ds[0].label.local[0], np.rint(np.nan_to_num(values)))
    recwarn.clear()
    ds[0]
    assert not [w for w in recwarn if "not integers" in str(w.message)]
    misuse._warned.clear()
    with pytest.warns(UserWarning, match=r"array 'image' of .*soft.zarr has labels that are not integers"):
        open_volumes(images, [soft], mesh={}, **WHOLE)


def read_renamed(images, labels, axes, options):
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), **options)
    batches = [*VolumeLoader(ds, batch_size=2), *VolumeLoader(ds, batch_size=1)]
    found = [(s.volume, s.origin, s.label.full_tensor()[0].numpy()) for s in map(ds.__getitem__, range(len(ds)))]
    for b in batches:
        whole = b.label.full_tensor().numpy()
        found += [(v, tuple(b.origins[i]), whole[i, 0]) for i, v in enumerate(b.volumes)]
    return (
        found,
        [{k: kept.count for k, kept in f.classes.items()} for f in ds.found],
        [len(ds.plan(i)) for i in (0, 2)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 2}, {"data": 2, "y": 2}], ids=str)
def test_labels_become_others_and_an_image_may_have_none(tmp_path_factory, axes):
    """Two images, of which the second has no labels; floats are rounded before, and missing ones are none of them."""
    folder = tmp_path_factory.mktemp("renamed")
    values = label(SHAPE).astype("f4") - 1e-4
    values[4] = np.nan
    images = [write(folder / f"i{n}.zarr", image(SHAPE)) for n in range(2)]
    labels = [write(folder / "l.zarr", values, chunks=(4, 4, 4)), None]
    how = Foreground(by="classes", classes=(1, 5), cache=str(folder / "cache"))
    options = {"crop": (6, 12, 5), "crops": 2, "foreground": how, "label_fill": 9, "label_dtype": "uint8"}
    want = np.rint(np.where(np.isnan(values), 9, values))
    want = np.select([want == 2, want == 3], [5, 1], want)
    for _ in range(2):  # searched, and from the cache
        for found, classes, plans in run_on_ranks(
            int(np.prod(list(axes.values()))), read_renamed, images, labels, axes, options | {"label_map": {2: 5, 3: 1}}
        ):
            assert (classes, plans) == ([{1: (want == 1).sum(), 5: (want == 5).sum()}, {}], [2, 1])
            assert len(found) == 12
            for volume, (z, y, x), got in found:
                assert y == -2  # it is smaller than the crop
                shown = np.pad(want, ((0, 0), (2, 2), (0, 0)), constant_values=9)[z : z + 6, :, x : x + 5]
                np.testing.assert_array_equal(got, np.full_like(shown, 9) if volume else shown)


def test_names_of_labels_that_cannot_be(tmp_path):
    paths = [write(tmp_path / "i.zarr", image(SHAPE))], [write(tmp_path / "l.zarr", label(SHAPE))]
    for given in ([2, 1], {1: "a"}, {1.5: 2}, {1: 300}, {1: -1}):
        with pytest.raises(
            FieldError, match=r"label_map=.* must say which label becomes which, in integers that torch"
        ):
            open_volumes(*paths, mesh={}, crop=SHAPE, label_map=given, label_dtype="uint8")
    with pytest.raises(FieldError, match=r"renames 0, which is also label_fill, .* give another label_fill"):
        open_volumes(*paths, mesh={}, crop=SHAPE, label_map={0: 1})
    for labels in ([None], [None, None]):
        with pytest.raises(FieldError, match=r"labels=\[None.* names no label map; give labels=None"):
            open_volumes(paths[0] * len(labels), labels, mesh={}, crop=SHAPE)
    with pytest.raises(FieldError, match="2 images and 1 labels: each image needs its label map, or None in its place"):
        open_volumes(paths[0] * 2, paths[1], mesh={}, crop=SHAPE)


# -- labels that are real numbers -------------------------------------------------------------------------------------


def read_real(path, axes, options):
    """The tiles of one array that is read as an image and as a label map, from a dataset and from a loader."""
    ds = open_volumes([path], [path], mesh=world_mesh(**axes), fill=-2.5, label_fill=-2.5, **options)
    batch = next(iter(VolumeLoader(ds, batch_size=2)))
    tiles = [(ds[0].image, ds[0].label), (batch.image, batch.label), (ds.whole(0).image, ds.whole(0).label)]
    return [(x.full_tensor(), y.full_tensor()) for x, y in tiles]


@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 2}, {"data": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("label_dtype", ["float32", torch.bfloat16], ids=str)
def test_labels_of_a_float_dtype_are_read_and_interpolated_as_images_are(tmp_path, axes, label_dtype):
    path = write(tmp_path / "soft.zarr", image(SHAPE), affine=np.diag([2.0, 1, 3, 1]))
    moved = {"spacing": (2, 1.5, 1.5), "augment": [augment.Affine(degrees=20), augment.Flip()]}
    count = int(np.prod(list(axes.values())))
    for more in ({"crop": (7, 12, 5)}, moved | {"crop": (5, 6, 7)}):
        options = {"crops": 2, "dtype": label_dtype, "label_dtype": label_dtype} | more
        for tiles in run_on_ranks(count, read_real, path, axes, options):
            for x, y in tiles:
                assert y.dtype == getattr(torch, str(label_dtype).removeprefix("torch."))
                assert torch.equal(x, y) and (y != y.round()).any()


def test_missing_real_labels_are_the_fill_and_rules_of_classes_are_refused(tmp_path):
    values = image(SHAPE)
    values[2] = np.nan
    path = write(tmp_path / "soft.zarr", values)
    options = {"mesh": world_mesh(z=1), "crop": SHAPE, "label_dtype": "float64"}
    ds = open_volumes([path, path], [path, None], label_fill=-0.5, **options)
    np.testing.assert_array_equal(ds[0].label.local[0], np.where(np.isnan(values), -0.5, values.astype("f8")))
    assert (ds[1].label.local == -0.5).all()
    for more in ({"foreground": Foreground()}, {"label_map": {1: 2}}):
        with pytest.raises(FieldError, match=r"label_dtype=.float64. reads real numbers, and foreground="):
            open_volumes([path], [path], **options, **more)
