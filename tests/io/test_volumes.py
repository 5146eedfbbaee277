"""Volumes: crops in any stored order on every mesh, only their chunks read, their place in the world kept."""

import pickle
import threading
import warnings
from itertools import islice
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest
import torch
from volume_store import AFFINE, image, label, ome, pairs, write

import jigsaw
from jigsaw.errors import (
    CorruptChunkError,
    FieldError,
    GridError,
    HaloError,
    MissingArrayError,
    MissingLevelError,
    ReadError,
    UnsupportedStoreError,
)
from jigsaw.io.formats.conventions import multiscale_level
from jigsaw.io.formats.nifti import open_nifti
from jigsaw.io.formats.store import open_store
from jigsaw.io.volumes.crops import Foreground
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh
from jigsaw.tile import misuse

MESHES = [{"z": 1}, {"z": 2}, {"data": 2, "y": 2}, {"z": 2, "x": 2}, {"z": 4}]
SHAPES = [(20, 18, 17), (9, 33, 16)]


def box(values, origin, crop, fill=0):
    """The crop of a whole volume [..., z, y, x], padded where it is smaller."""
    out = np.full((*values.shape[: -len(crop)], *crop), fill, values.dtype)
    here = [(max(o, 0), min(o + c, n)) for o, c, n in zip(origin, crop, values.shape[-len(crop) :], strict=True)]
    to = tuple(slice(a - o, b - o) for (a, b), o in zip(here, origin, strict=True))
    out[(..., *to)] = values[(..., *(slice(a, b) for a, b in here))]
    return out


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return pairs(tmp_path_factory.mktemp("volumes"), SHAPES)


def read_all(images, labels, axes, options):
    """Every sample of a dataset: where it lies, its values, which chunks this rank read."""
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), **options)
    found = []
    for i in range(len(ds)):
        before = ds._engine.stats.stored_bytes
        s = ds[i]
        read = ds._engine.stats.stored_bytes - before
        rows = sum(plan.rows[ds._engine.peers.me].stored_bytes for plan in ds.plan(i))
        assert read == rows
        assert [c.held for c in s.label.layout.cuts] == [c.bare().held for c in s.label.layout.cuts]
        found.append((s.volume, s.origin, s.image.full_tensor().numpy(), s.label.full_tensor().numpy(), s.affine))
    return found


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_mesh_reads_the_same_crops(toy, axes):
    images, labels, values = toy
    crop = (8, 10, 8)
    options = {"crop": crop, "crops": 3, "foreground": Foreground(), "halo": {"z": 1, "y": 2}, "seed": 5}
    (want, *others) = run_on_ranks(int(np.prod(list(axes.values()))), read_all, images, labels, axes, options)
    for found in others:
        for mine, theirs in zip(want, found, strict=True):
            assert mine[:2] == theirs[:2]
            np.testing.assert_array_equal(mine[2], theirs[2])
    alone = open_volumes(images, labels, mesh={}, **options)
    assert [(v, o) for v, o, *_ in want] == [(c.volume, c.origin) for c in map(alone.crop, range(6))]
    for volume, origin, got, got_label, affine in want:
        np.testing.assert_array_equal(got[0], box(values[volume][0], origin, crop))
        np.testing.assert_array_equal(got_label[0], box(values[volume][1], origin, crop))
        assert got_label.dtype == np.int64
        z, y, x = origin
        np.testing.assert_allclose(affine @ [0, 0, 0, 1], AFFINE @ [x, y, z, 1], rtol=1e-12)


@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 4}, {"z": 2, "x": 2}], ids=str)
def test_what_a_smaller_volume_lacks_is_fill(toy, axes):
    images, labels, values = toy
    options = {"crop": (24, 20, 40), "fill": -7.0, "label_fill": 9, "halo": 2, "label_dtype": "uint8"}
    for found in run_on_ranks(int(np.prod(list(axes.values()))), read_all, images, labels, axes, options):
        for volume, origin, got, got_label, _ in found:
            assert origin[2] == -((40 - SHAPES[volume][2]) // 2)
            np.testing.assert_array_equal(got[0], box(values[volume][0], origin, (24, 20, 40), -7.0))
            np.testing.assert_array_equal(got_label[0], box(values[volume][1], origin, (24, 20, 40), 9))


PAD = {"z": ("reflect", "reflect"), "y": ("replicate", "edge"), "x": (("fill", 3.0), "constant")}


def padded(values, origin, crop, halo, smaller):
    """The crop [z, y, x] and its halo, of a volume that goes on beyond its ends as its boundary says."""
    for d in sorted(range(3), key=lambda d: d in smaller):
        pads = [(halo[d], halo[d]) if i == d else (0, 0) for i in range(3)]
        # what a smaller volume lacks is fill: of the crop, and so of its halo
        how, number = ("constant", -7.0) if d in smaller else (PAD["zyx"[d]][1], 3.0)
        values = np.pad(values, pads, how, **({"constant_values": number} if how == "constant" else {}))
    return box(values, origin, [n + 2 * width for n, width in zip(crop, halo, strict=True)], -7.0)


def read_held(images, axes, options):
    """Of every sample: its place, which rows this rank holds, and their values."""
    ds = open_volumes(images, mesh=world_mesh(**axes), boundary={d: rule for d, (rule, _) in PAD.items()}, **options)
    found = []
    for i in range(len(ds)):
        tile = ds[i].image
        held = tile.layout.held(tile.mesh.get_coordinate())[1:]
        found.append((ds.crop(i), held, tile.local[0].numpy(), tile.full_tensor()[0].numpy()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cooperative", "independent"])
@pytest.mark.parametrize("axes", [{"z": 1}, {"z": 2}, {"z": 2, "x": 2}, {"y": 4}], ids=str)
@pytest.mark.parametrize("crop", [(8, 10, 8), (9, 18, 16), (20, 10, 17), (20, 10, 8)], ids=str)
def test_the_halo_beyond_a_crop_is_the_volumes_and_beyond_that_the_boundarys(toy, axes, crop, mode):
    images, _, values = toy
    halo, size = (3, 2, 4), int(np.prod(list(axes.values())))
    widths = dict(zip("zyx", halo, strict=True))
    options = {"crop": crop, "crops": 4, "halo": widths, "seed": 2, "fill": -7.0, "mode": mode}
    for found in run_on_ranks(size, read_held, images, axes, options):
        for at, held, local, full in found:
            volume = values[at.volume][0]
            smaller = [d for d in range(3) if volume.shape[d] < crop[d]]
            whole = padded(volume, at.origin, crop, halo, smaller)
            mine = tuple(slice(a + w, b + w) for (a, b), w in zip(held, halo, strict=True))
            assert all(a == -w for (a, _), w, axis in zip(held, halo, "zyx", strict=True) if axis not in axes)
            np.testing.assert_array_equal(local, whole[mine])
            np.testing.assert_array_equal(full, box(volume, at.origin, crop, -7.0))


def test_boundaries_that_a_crop_cannot_have(toy):
    images, _, _ = toy
    options = {"mesh": {"z": 2}, "crop": (8, 8, 8), "halo": {"z": 8}}
    with pytest.raises(GridError, match="a crop's ends do not meet"):
        open_volumes(images, boundary={"z": "periodic"}, **options)
    with pytest.raises(GridError, match=r"'pole'.* is for 'lat'"):
        open_volumes(images, boundary={"z": "pole"}, **options)
    with pytest.raises(HaloError, match="use at most 7"):
        open_volumes(images, boundary={"z": "reflect"}, **options)


def test_only_the_chunks_of_the_crop_are_read(tmp_path):
    values = image((64, 64, 64))
    path = write(tmp_path / "a.zarr", values, chunks=(16, 16, 16), compressors=None)
    ds = open_volumes([path], mesh=world_mesh(z=1), crop=(16, 16, 16), crops=8)
    for i in range(8):
        before = ds._engine.stats.stored_bytes
        sample = ds[i]
        touched = np.prod([len({o // 16, (o + 15) // 16}) for o in sample.origin])
        assert ds._engine.stats.stored_bytes - before <= touched * 16**3 * 4
        assert ds._engine.stats.chunks <= 8 * (i + 1)
        np.testing.assert_array_equal(sample.image.local[0], box(values, sample.origin, (16, 16, 16)))


@on_ranks(2)
def test_each_rank_reads_its_tile_and_halo_alone(tmp_path):
    values = image((32, 8, 8))
    mesh = world_mesh(z=2)
    path = tmp_path / "a.zarr"
    if mesh.get_rank() == 0:
        write(path, values, chunks=(4, 8, 8), compressors=None)
    torch.distributed.barrier()
    ds = open_volumes([str(path)], mesh=mesh, crop=(32, 8, 8), halo={"z": (1, 1)}, mode="independent")
    sample = ds[0]
    rank = mesh.get_rank()
    held = slice(0, 17) if rank == 0 else slice(15, 32)
    np.testing.assert_array_equal(sample.image.local[0], values[held])
    assert ds._engine.stats.stored_bytes == 5 * 4 * 8 * 8 * 4  # four chunks of four rows, and the halo's


@pytest.mark.parametrize(
    ("dims", "order"),
    [(("x", "y", "z"), (0, 3, 2, 1)), (("c", "z", "y", "x"), (0, 1, 2, 3)), (("x", "y", "z", "time"), (3, 2, 1, 0))],
)
def test_any_stored_order_comes_channel_first(tmp_path, dims, order):
    stored = image((9, 8, 7) if len(dims) == 3 else (3, 9, 8, 7) if dims[0] == "c" else (9, 8, 7, 3))
    path = write(tmp_path / "a.zarr", stored, dims, (4,) * len(dims))
    whole = (stored[None] if len(dims) == 3 else stored).transpose(order)
    ds = open_volumes([path], mesh=world_mesh(z=1), crop=(4, 5, 6), crops=3, normalize=(2.0, 4.0))
    for i in range(3):
        sample = ds[i]
        want = (box(whole, sample.origin, (4, 5, 6)) - 2) / 4
        np.testing.assert_allclose(sample.image.full_tensor(), want, rtol=1e-5, atol=1e-6)
        assert sample.spacing == pytest.approx(tuple(np.linalg.norm(AFFINE[:3, :3], axis=0)[::-1]))


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_nifti_volumes_lie_where_nibabel_says(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("JIGSAW_CACHE", str(tmp_path / "cache"))
    values, labels = image((30, 16, 20)), label((30, 16, 20))  # x, y, z
    files = {}
    for name, stored in (("image", values), ("label", labels)):
        files[name] = nibabel.Nifti1Image(stored, AFFINE)
        nibabel.save(files[name], tmp_path / f"{name}{suffix}")
    stores = [open_nifti(str(tmp_path / f"{name}{suffix}")) for name in files]
    ds = open_volumes(
        stores[:1], stores[1:], mesh=world_mesh(z=1), crop=(4, 8, 10), crops=4, foreground=Foreground(pos=1, neg=0)
    )
    for i in range(4):
        sample = ds[i]
        z, y, x = sample.origin
        want = files["image"].slicer[x : x + 10, y : y + 8, z : z + 4]
        np.testing.assert_array_equal(sample.image.local[0], want.get_fdata().astype("f4").T)
        np.testing.assert_array_equal(sample.label.local[0], labels[x : x + 10, y : y + 8, z : z + 4].T)
        np.testing.assert_allclose(sample.affine, want.affine, rtol=1e-6)
        assert sample.spacing == pytest.approx([float(n) for n in nibabel.affines.voxel_sizes(want.affine)][::-1])
        assert (sample.label.local > 0).any()


def test_channels_may_have_files_of_their_own_and_planes_are_volumes_too(tmp_path):
    values = [image((12, 10), seed) for seed in (0, 1)]
    paths = [write(tmp_path / f"{i}.zarr", v, ("y", "x"), (4, 4)) for i, v in enumerate(values)]
    ds = open_volumes([paths], mesh=world_mesh(y=1), crop=(6, 6), normalize=([0.0, 1.0], [1.0, 2.0]))
    sample = ds[0]
    want = box(np.stack(values), sample.origin, (6, 6))
    want[1] = (want[1] - 1) / 2
    np.testing.assert_allclose(sample.image.full_tensor(), want, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_whole_volume_is_cut_like_its_crops(toy):
    images, labels, values = toy
    ds = open_volumes(images, labels, mesh=world_mesh(y=2), crop=(8, 8, 8), align={"y": 2})
    sample = ds.whole(1)
    assert sample.image.local.shape == (1, 9, 18 if world_mesh(y=2).get_rank() == 0 else 15, 16)
    np.testing.assert_array_equal(sample.image.full_tensor()[0], values[1][0])
    np.testing.assert_array_equal(sample.label.full_tensor()[0], values[1][1])
    np.testing.assert_array_equal(sample.affine, AFFINE)


def test_the_affine_of_an_hdf5_file(tmp_path):
    """A table of numbers stays one; what is not a table of 4 x 4 is refused."""
    path, values = tmp_path / "v.h5", image((8, 7, 6))
    with h5py.File(path, "w") as f:
        f["image"] = values
        for dim, (name, size) in enumerate(zip("zyx", values.shape, strict=True)):
            f[name] = np.arange(size)
            f[name].make_scale()
            f["image"].dims[dim].attach_scale(f[name])
        f["image"].attrs["affine"] = AFFINE
    sample = open_volumes([path], mesh=world_mesh(z=1), crop=(4, 4, 4))[0]
    np.testing.assert_allclose(sample.affine @ [0, 0, 0, 1], AFFINE @ [*sample.origin[::-1], 1])
    for wrong in ("right", AFFINE[:3], np.full((4, 4), np.nan), np.arange(16.0)):
        with h5py.File(path, "a") as f:
            f["image"].attrs["affine"] = wrong
        with pytest.raises(GridError, match="must be an invertible 4 x 4 matrix of numbers"):
            open_volumes([path], mesh=world_mesh(z=1), crop=(4, 4, 4))


def read_whole(images, labels, axes, halo):
    """Whole volumes one by one, and of a batch of both."""
    options = {"crop": None, "align": {"z": 4, "y": 8}, "halo": {"z": halo}, "fill": -7.0, "label_fill": 9}
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), **options)
    alone = [ds[i] for i in range(len(ds))]
    loaders = [VolumeLoader(ds, batch_size=size, shuffle=True, seed=1) for size in (1, 2)]
    batches = [b for loader in loaders for b in loader]
    again = next(iter(VolumeLoader(pickle.loads(pickle.dumps(ds)), batch_size=1)))
    np.testing.assert_array_equal(again.image.full_tensor()[0], alone[0].image.full_tensor())
    shapes = [tuple(b.image.local.shape[2:]) for b in batches]
    found = [(s.volume, s.origin, s.image.full_tensor(), s.label.full_tensor(), s.affine) for s in alone]
    for b in batches:
        values, classes = b.image.full_tensor(), b.label.full_tensor()
        found += [(v, tuple(b.origins[i]), values[i], classes[i], b.affines[i]) for i, v in enumerate(b.volumes)]
    return found, shapes


@pytest.mark.parametrize(("axes", "halo"), [({"z": 1}, 0), ({"z": 2}, 1), ({"data": 2, "y": 2}, 0)], ids=str)
def test_whole_volumes_are_filled_up_to_align_and_a_batch_to_its_largest(toy, axes, halo):
    """Of (20, 18, 17) and (9, 33, 16)."""
    images, labels, values = toy
    alone = [(20, 24, 17), (12, 40, 16)]
    for found, shapes in run_on_ranks(int(np.prod(list(axes.values()))), read_whole, images, labels, axes, halo):
        assert len(found) == 6
        for n, (volume, origin, got, got_label, affine) in enumerate(found):
            sizes = alone[volume] if n < 4 else (20, 40, 17)
            assert origin == tuple(-((m - size) // 2) for m, size in zip(sizes, SHAPES[volume], strict=True))
            np.testing.assert_array_equal(got[0], box(values[volume][0], origin, sizes, -7.0))
            np.testing.assert_array_equal(got_label[0], box(values[volume][1], origin, sizes, 9))
            z, y, x = origin
            np.testing.assert_allclose(affine @ [0, 0, 0, 1], AFFINE @ [x, y, z, 1], rtol=1e-12)
        if axes == {"z": 2}:  # no rank holds more than its rows and their halo
            assert max(rows for rows, _, _ in shapes) in (12 + 1, 8 + 1)


def test_whole_volumes_that_cannot_be(toy):
    images, labels, _ = toy
    for more in ({"crops": 2}, {"foreground": Foreground()}):
        with pytest.raises(FieldError, match="crop=None: each sample is a whole volume, and crops="):
            open_volumes(images, labels, mesh={}, crop=None, **more)
    with pytest.raises(HaloError, match="use at most 9"):
        open_volumes(images, mesh={"z": 2}, crop=None, halo={"z": 12})
    ds = open_volumes(images, mesh={"z": 2}, crop=None)
    assert repr(ds).startswith("Volumes(2 volumes, whole, up to z 20 x y 33 x x 17; ")
    assert [len(ds.plan(i)) for i in range(2)] == [1, 1]


# -- OME-Zarr --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_levels_of_an_ome_zarr_image_lie_where_its_metadata_say(tmp_path, version):
    values = image((2, 6, 12, 10))
    path = ome(tmp_path / "a.ome.zarr", values, version)
    for level, factor in enumerate((1, 2)):
        ds = open_volumes([path], mesh=world_mesh(z=1), crop=(6, 4, 4), level=level)
        sample = ds[0]
        shown = values[..., ::factor, ::factor]
        np.testing.assert_array_equal(sample.image.full_tensor(), box(shown, sample.origin, (6, 4, 4)))
        assert sample.spacing == pytest.approx((20.0, 5.0 * factor, 2.5 * factor))
        z, y, x = sample.origin
        corner = [(30 + x * 0.25 * factor) * 10, (20 + y * 0.5 * factor) * 10, (10 + z * 2) * 10]
        np.testing.assert_allclose(sample.affine[:3, 3], corner)
        store = multiscale_level(open_store(path), level)
        np.testing.assert_allclose(store.read_small("y"), (20 + np.arange(12 // factor) * 0.5 * factor) * 10)
        assert store.arrays["x"].attrs == {"axis": "X", "units": "micrometer"}
        assert store.arrays[f"s{level}"].dims == ("c", "z", "y", "x")


def test_a_level_opens_as_a_store_of_fields_too(tmp_path):
    values = image((6, 12, 10))
    path = ome(tmp_path / "a.ome.zarr", values, "0.5", ("z", "y", "x"), (2.0, 0.5, 0.25), (0.0, 0.0, 1.0))
    ds = jigsaw.io.open(path, mesh=world_mesh(z=1), level=1)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(ds))[0].input.full_tensor(), ds[0].input.full_tensor())
    finest = jigsaw.io.open(path, mesh=world_mesh(z=1))
    np.testing.assert_array_equal(finest[0].input.full_tensor()[0, 0], values)
    np.testing.assert_array_equal(ds[0].input.full_tensor()[0, 0], values[:, ::2, ::2])
    np.testing.assert_allclose(ds.coords["x"], (1 + np.arange(5) * 0.5) * 10)


def test_axes_of_several_units_have_one_world(tmp_path):
    path = ome(tmp_path / "a.ome.zarr", image((1, 6, 12, 10)), "0.5")
    broken(lambda m: m["axes"][1].update(unit="nanometer") or m["axes"][2].update(unit="millimeter"))(path)
    sample = open_volumes([path], mesh=world_mesh(z=1), crop=(6, 12, 10))[0]
    assert sample.spacing == pytest.approx((0.02, 5000.0, 2.5))
    np.testing.assert_allclose(sample.affine[:3, 3], (300.0, 200_000.0, 0.1))
    image_of = multiscale_level(open_store(path))
    np.testing.assert_allclose(image_of.read_small("z"), 0.1 + np.arange(6) * 0.02)
    assert {image_of.arrays[a].attrs["units"] for a in "zyx"} == {image_of.arrays["s0"].attrs["space_units"]}


def broken(change):
    """The attributes of an image after a change."""

    def apply(path):
        import zarr

        group = zarr.open_group(path, mode="r+")
        found = group.attrs["ome"]
        change(found["multiscales"][0])
        group.attrs["ome"] = found

    return apply


@pytest.mark.parametrize(
    ("change", "level", "kind", "why"),
    [
        (lambda m: None, 2, MissingLevelError, r"level=2: .* has the levels 0\.\.1 \(s0, s1\)"),
        (lambda m: m.pop("axes"), 0, UnsupportedStoreError, "lack 'axes'; OME-NGFF 0.4 and 0.5"),
        (lambda m: m.update(axes=["z", "y", "x"]), 0, UnsupportedStoreError, "axis 'z' has no name"),
        (
            lambda m: m["axes"][1].update(unit="furlong"),
            0,
            UnsupportedStoreError,
            r"have the units \['furlong', 'micrometer', 'micrometer'\], and \['furlong'\] cannot be brought",
        ),
        (lambda m: m["axes"].pop(), 0, UnsupportedStoreError, "3 axes for array 's0' of 4 dims"),
        (lambda m: m["datasets"][0].update(path="../x"), 0, UnsupportedStoreError, "'../x', which is not an array"),
        *(
            (
                lambda m, step=step: m["datasets"][0].update(coordinateTransformations=[step]),
                0,
                UnsupportedStoreError,
                "coordinate transformation .* is none of scale, translation, identity with 4 numbers",
            )
            for step in ({"type": "scale", "scale": [1.0]}, {"type": "scale", "scale": ["a"] * 4}, {"type": "affine"})
        ),
        (  # numbers in an array of their own
            lambda m: m["datasets"][1].update(coordinateTransformations=[{"type": "scale", "path": "s1/scale"}]),
            1,
            UnsupportedStoreError,
            "coordinate transformation .*path.* is none of scale",
        ),
        (
            lambda m: m["datasets"][1].pop("coordinateTransformations"),
            1,
            UnsupportedStoreError,
            "lack 'coordinateTransformations'",
        ),
    ],
)
def test_broken_metadata_are_refused(tmp_path, change, level, kind, why):
    path = ome(tmp_path / "a.ome.zarr", image((1, 4, 4, 4)), "0.5")
    broken(change)(path)
    with pytest.raises(kind, match=why):
        open_volumes([path], mesh={}, crop=(2, 2, 2), level=level)


# -- the loader ------------------------------------------------------------------------------------------------------


def batches(images, labels, axes, state=None, count=None, seed=3, **kwargs):
    ds = open_volumes(
        images, labels, mesh=world_mesh(**axes), crop=(8, 8, 8), crops=3, foreground=Foreground(by="classes")
    )
    loader = VolumeLoader(ds, batch_size=2, shuffle=True, seed=seed, **kwargs)
    if state is not None:
        loader.load_state_dict(state)
    found = [
        (b.samples, b.origins.tolist(), b.image.full_tensor().numpy(), b.label.full_tensor().numpy())
        for b in islice(loader, count)
    ]
    return found, loader.state_dict()


@pytest.mark.parametrize(("before", "after"), [({"z": 2}, {"data": 2, "y": 2}), ({"data": 2}, {"x": 1})])
def test_a_run_resumes_in_mid_epoch_on_another_mesh(toy, before, after):
    images, labels, values = toy
    want, _ = batches(images, labels, {"z": 1})
    assert sorted(s for samples, *_ in want for s in samples) == list(range(6))
    for samples, origins, got, got_label in want:
        for i, (sample, origin) in enumerate(zip(samples, origins, strict=True)):
            np.testing.assert_array_equal(got[i, 0], box(values[sample // 3][0], origin, (8, 8, 8)))
            np.testing.assert_array_equal(got_label[i, 0], box(values[sample // 3][1], origin, (8, 8, 8)))
    first = run_on_ranks(2, batches, images, labels, before, count=1)
    place = {"seed": 3, "epoch": 0, "next_sample": 2, "samples": 6}
    assert all(state.items() >= place.items() for _, state in first)
    ranks = int(np.prod(list(after.values())))
    for found, state in run_on_ranks(ranks, batches, images, labels, after, state=first[0][1], seed=99):
        assert state == {"seed": 3, "epoch": 1, "next_sample": 0}
        for mine, theirs in zip(found, want[1:], strict=True):
            assert mine[:2] == theirs[:2]
            np.testing.assert_array_equal(mine[2], theirs[2])
            np.testing.assert_array_equal(mine[3], theirs[3])


def test_every_epoch_has_crops_of_its_own_and_a_loader_pickles(toy):
    images, labels, _ = toy
    ds = open_volumes(images, labels, mesh=world_mesh(z=1), crop=(8, 8, 8), crops=2)
    loader = VolumeLoader(ds, batch_size=2)
    assert len(loader) == 2
    epochs = [[b.origins.tolist() for b in loader] for _ in range(2)]
    assert epochs[0] != epochs[1]
    again = VolumeLoader(ds, batch_size=2, prefetch_bytes=0)
    next(iter(again))
    revived = pickle.loads(pickle.dumps(again))
    assert [b.origins.tolist() for b in revived] == epochs[0][1:]
    assert revived.bytes_read > 0
    for each in (loader, again, revived):
        each.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("jigsaw-prefetch")]


@on_ranks(2)
def test_a_last_batch_may_have_fewer_samples_than_there_are_groups(toy):
    images, labels, values = toy
    ds = open_volumes(images[:1], labels[:1], mesh=world_mesh(data=2), crop=(8, 8, 8), crops=3)
    *_, last = VolumeLoader(ds, batch_size=2)
    assert last.image.shape == (1, 1, 8, 8, 8)
    assert last.spacings.tolist() == [list(ds.images[0].spacing)]
    want = box(values[0][0], last.origins[0], (8, 8, 8))
    np.testing.assert_array_equal(last.image.full_tensor()[0, 0], want)


@on_ranks(2)
def test_a_damaged_chunk_is_told_to_every_rank(tmp_path):
    mesh, path = world_mesh(z=2), tmp_path / "a.zarr"
    if mesh.get_rank() == 0:
        write(path, image((16, 8, 8)), chunks=(4, 8, 8))
        (path / "image" / "c" / "3" / "0" / "0").write_bytes(b"broken")
    torch.distributed.barrier()
    ds = open_volumes([str(path)], mesh=mesh, crop=(16, 8, 8))
    with pytest.raises((CorruptChunkError, ReadError), match="'image'"):
        next(iter(VolumeLoader(ds)))


@on_ranks(2)
def test_an_axis_that_cuts_nothing_is_told_of_once(toy, wb2):
    """Each rank then holds the whole; who names what is cut knows."""
    misuse._warned.clear()
    images, _, _ = toy
    for axes, dims, opened in [
        ({"depth": 2}, "z, y, x", lambda **how: open_volumes(images, crop=(8, 8, 8), **how)),
        ({"height": 2}, "lat, lon", lambda **how: jigsaw.io.open(wb2, **how)),
    ]:
        (name,) = axes
        told = (
            rf"mesh axes {{'{name}': 2}} cut none of the dims {dims}, .* like spec={{'{dims.split(',')[0]}': '{name}'}}"
        )
        with pytest.warns(UserWarning, match=told) as seen:
            opened(mesh=world_mesh(**axes))
        assert seen[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opened(mesh=world_mesh(**axes))
            misuse._warned.clear()
            opened(mesh=world_mesh(**axes), spec={dims.split(",")[0]: name})
            opened(mesh=world_mesh(**axes), spec={})
            opened(mesh=world_mesh(data=2))


@pytest.mark.slow
@on_ranks(2)
def test_random_transforms_draw_alike_once_they_are_seeded_by_the_sample(toy):
    """The trap and the remedy of the medical example's page, along a dim that is cut and one that is not."""
    transforms, data = pytest.importorskip("monai.transforms"), pytest.importorskip("monai.data")
    images, _, _ = toy
    mesh = world_mesh(z=2)
    data.set_track_meta(False)
    ds = open_volumes(images, mesh=mesh, crop=(8, 8, 8), crops=4)
    free = transforms.RandFlip(prob=0.5, spatial_axis=1).set_random_state(mesh.get_rank())  # as without a seed
    drawn = [None] * 2
    decisions = []
    for _ in range(8):
        free(torch.zeros(1, 2, 2, 2))
        decisions.append(bool(free._do_transform))
    torch.distributed.all_gather_object(drawn, decisions)
    assert drawn[0] != drawn[1]
    flipped, pairs_of_flips = 0, []
    for axis in (0, 1):
        flip = transforms.RandFlip(prob=0.5, spatial_axis=axis)
        for i in range(len(ds)):
            whole = ds[i].image
            flip.set_random_state(seed=i)
            got = flip(whole).full_tensor()
            flip.set_random_state(seed=i)
            want = flip(whole.full_tensor())
            flipped += bool(flip._do_transform)
            pairs_of_flips.append((got, want))
    data.set_track_meta(True)
    for got, want in pairs_of_flips:
        np.testing.assert_array_equal(got, want)
    assert 0 < flipped < 16


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(tmp_path):
    a = write(tmp_path / "a.zarr", image((8, 8, 8)))
    small = write(tmp_path / "small.zarr", image((8, 8, 6)))
    moved = write(tmp_path / "moved.zarr", label((8, 8, 8)), affine=AFFINE + np.eye(4)[:, [3, 0, 1, 2]] * 5)
    two = write(tmp_path / "two.zarr", image((2, 8, 8, 8)), ("c", "z", "y", "x"), (1, 8, 8, 8))
    deep = write(tmp_path / "deep.zarr", image((2, 2, 8, 8, 8)), ("t", "c", "z", "y", "x"), (1, 1, 8, 8, 8))
    bare = write(tmp_path / "bare.zarr", image((8, 8, 8)), None)
    flat = write(tmp_path / "flat.zarr", image((8, 8, 8)), affine=np.zeros((4, 4)))
    both = write(tmp_path / "both.zarr", image((8, 8, 8)))
    write(both, label((8, 8, 8)), name="label", mode="a")
    crop = {"crop": (4, 4, 4)}
    for kind, why, images, labels, more in [
        (FieldError, "2 images and 1 labels", [a, a], [a], crop),
        (FieldError, r"images=\[\] must be a list", [], None, crop),
        (FieldError, "images='.*' must be a list", a, None, crop),
        (GridError, r"has shape \(8, 8, 8\) and its label map .*small.* \(8, 8, 6\)", [a], [small], crop),
        (GridError, "lie apart by .* voxels", [a], [moved], crop),
        (GridError, "has channels 1 and .*two.zarr.* 2", [a, two], None, crop),
        (GridError, "has t 2, c 2 beside space", [deep], None, crop),
        (GridError, "share a grid", [[a, small]], None, crop),
        (GridError, "lie apart by .* voxels, and they are the channels of one image", [[a, moved]], None, crop),
        (GridError, "must be an invertible 4 x 4 matrix", [flat], None, crop),
        (GridError, r"crop=\(4, 4\) must be 3 whole numbers >= 1", [a], None, {"crop": (4, 4)}),
        (MissingArrayError, "has 0 arrays with dims z, y, x", [bare], None, crop),
        (MissingArrayError, r"2 arrays with dims .* image .*label .* name it by image_array=", [both], None, crop),
        (MissingArrayError, "has no volume 'x'; it has image", [a], None, {**crop, "image_array": "x"}),
        (MissingLevelError, "is not an OME-Zarr image, so it has level 0 alone", [a], None, {**crop, "level": 1}),
        (
            FieldError,
            "foreground= weights crops by labels, and there are none",
            [a],
            None,
            {**crop, "foreground": Foreground()},
        ),
        (FieldError, "images='a.nii' must be a list of at least one path", "a.nii", None, crop),
        (FieldError, "images=None must be a list of at least one path", None, None, crop),
        (FieldError, "labels=.*Path.* must be a list of at least one path", [a], Path("a.nii"), crop),
        (GridError, "crop=4 must be 3 whole numbers", [a], None, {"crop": 4}),
        (GridError, r"crop=\(4.5, 4, 4\) must be 3 whole numbers", [a], None, {"crop": (4.5, 4, 4)}),
        (FieldError, "seed='a' must be a whole number, 0 or more", [a], None, {**crop, "seed": "a"}),
        (FieldError, "crops=0 must be at least 1", [a], None, {**crop, "crops": 0}),
        (FieldError, "crops=2.0 must be at least 1", [a], None, {**crop, "crops": 2.0}),
        (FieldError, "normalize=.* standard deviations above 0", [a], None, {**crop, "normalize": (0.0, 0.0)}),
        (FieldError, r"normalize=3.0 must be \(mean, std\)", [a], None, {**crop, "normalize": 3.0}),
        (FieldError, r"normalize=\(1, 2, 3\) must be", [a], None, {**crop, "normalize": (1, 2, 3)}),
        (FieldError, "label_dtype='complex64' must be one of", [a], None, {**crop, "label_dtype": "complex64"}),
        (GridError, "spec=.* names 'lat'", [a], None, {**crop, "spec": {"lat": "z"}}),
    ]:
        with pytest.raises(kind, match=why):
            open_volumes(images, labels, mesh={}, **more)
    ds = open_volumes([both], [both], mesh={}, image_array="image", label_array="label", **crop)
    with pytest.raises(ReadError, match="mesh of plain integers"):
        ds[0]
    with pytest.raises(IndexError, match="sample 1 of a dataset of 1"):
        ds.crop(1)
    for volume in (1, -2):
        with pytest.raises(IndexError, match=f"volume {volume} of 1 volumes: they count from 0 to 0"):
            ds.whole(volume)
    with pytest.raises(TypeError, match="volume 'a' of 1 volumes must be an integer"):
        ds.whole("a")
