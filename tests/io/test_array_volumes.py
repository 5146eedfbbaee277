"""Volumes given as arrays and tensors, HDF5 volumes without names, slices, and images without label maps."""

import pickle

import dask.array as da
import h5py
import numpy as np
import pytest
import torch
import zarr
from volume_store import image, label, write
from zarr.storage import MemoryStore

import jigsaw
from jigsaw.errors import FieldError, GridError, MissingArrayError, ReadError
from jigsaw.io import SourceArray
from jigsaw.io.volumes.crops import Foreground
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.io.volumes.volume_statistics import volume_statistics
from jigsaw.testing import run_on_ranks, world_mesh

SHAPES = [(13, 10, 7), (9, 11, 12)]
MESHES = [{"z": 1}, {"z": 2}, {"z": 4}, {"y": 2, "x": 2}]
HOW = {"crop": (7, 8, 9), "crops": 2, "halo": {"z": 1}, "seed": 1, "fill": -9.0, "label_fill": 7}


def batches(ds):
    return [(b.image.full_tensor(), b.label.full_tensor(), b.volumes) for b in VolumeLoader(ds, batch_size=3)]


def read_arrays(images, labels, paths, axes):
    """The same crops of arrays, tensors and files; the second image has no label map."""
    how = {"mesh": world_mesh(**axes), "foreground": Foreground(), **HOW}
    of_arrays = open_volumes(images, [labels[0], None], **how)
    assert "array([[" not in repr(of_arrays.images[0])
    given = [torch.from_numpy(images[0]), [torch.from_numpy(images[1])]]
    of_tensors = pickle.loads(pickle.dumps(open_volumes(given, [torch.from_numpy(labels[0]).bool(), None], **how)))
    return batches(of_arrays), batches(open_volumes(paths[0], [paths[1], None], **how)), batches(of_tensors)


@pytest.mark.parametrize(
    "axes", [pytest.param(a, marks=[pytest.mark.slow] if a in MESHES[1:3] else []) for a in MESHES], ids=str
)
def test_arrays_and_tensors_are_read_as_files(tmp_path, axes):
    images, labels = [image(s, i) for i, s in enumerate(SHAPES)], [(label(SHAPES[0], balls=1))]
    paths = [write(tmp_path / f"{i}.zarr", v, affine=None) for i, v in enumerate(images)], str(tmp_path / "l.zarr")
    write(tmp_path / "l.zarr", labels[0], affine=None)
    for arrays, files, tensors in run_on_ranks(
        int(np.prod(list(axes.values()))), read_arrays, images, labels, paths, axes
    ):
        for (got, got_label, volumes), (want, want_label, _), (third, third_label, _) in zip(
            arrays, files, tensors, strict=True
        ):
            assert torch.equal(got, want) and torch.equal(got, third)
            assert torch.equal(got_label, want_label) and torch.equal(got_label, third_label)
            for found, volume in zip(got_label, volumes, strict=True):
                assert not volume or (found == 7).all()  # nothing is known of it: label_fill, which a loss leaves out


def test_channels_and_orders_of_arrays():
    values = image((2, *SHAPES[0]))
    plain = open_volumes([values], mesh=world_mesh(z=1), crop=None)[0].image.local
    assert torch.equal(plain, torch.from_numpy(values))
    other = np.ascontiguousarray(values.transpose(3, 2, 0, 1))
    how = {"mesh": world_mesh(z=1), "crop": None, "dims": ("x", "y", "channel", "z")}
    sample = open_volumes([other], [label(SHAPES[0]).T.copy().transpose(0, 1, 2)], **how)[0]
    assert torch.equal(sample.image.local, plain)
    assert torch.equal(sample.label.local[0], torch.from_numpy(label(SHAPES[0])).long())
    flat = open_volumes(image((3, 12, 10)), mesh=world_mesh(y=1), crop=(5, 6), dims=("y", "x"))  # three planes
    assert flat[2].image.shape == (1, 5, 6)
    stats = volume_statistics(open_volumes([values], mesh={}, crop=None))
    np.testing.assert_allclose(stats.columns["mean"], values.reshape(2, -1).mean(1, dtype="f8"), rtol=1e-12)


def test_the_foreground_of_arrays_is_kept_by_their_values(tmp_path):
    how = {"mesh": {}, "crop": (4, 4, 4), "foreground": Foreground(cache=str(tmp_path))}
    values = [label(SHAPES[0], seed) for seed in (0, 1, 0)]
    found = [open_volumes([image(SHAPES[0])], [each], **how).found[0].classes[1].at for each in values]
    assert sorted(found[0].tolist()) == sorted(found[2].tolist()) == np.flatnonzero(values[0]).tolist()
    assert sorted(found[1].tolist()) == np.flatnonzero(values[1]).tolist()


class _NoParts(MemoryStore):
    """A store that makes its chunks when it is asked, as tifffile's does."""

    async def get(self, key, prototype, byte_range=None):
        if byte_range is not None:
            raise ValueError("no parts")
        return await super().get(key, prototype)


class _Counted:
    """An array that counts the rows of z that were read of it."""

    chunks = (3, 10, 7)

    def __init__(self, values):
        self.values, self.shape, self.dtype, self.rows = values, values.shape, values.dtype, []

    def __getitem__(self, index):
        self.rows += range(*index[0].indices(len(self.values)))
        return self.values[index]


def _read_counted(values, axes):
    array = _Counted(values)
    tile = open_volumes([array], mesh=world_mesh(**axes), crop=None).whole(0).image
    return tile.full_tensor()[0], array.rows


def test_of_an_array_each_rank_reads_the_chunks_that_it_needs():
    values = image(SHAPES[0])
    for whole, _ in (found := run_on_ranks(2, _read_counted, values, {"z": 2})):
        assert torch.equal(whole, torch.from_numpy(values))
    assert [sorted(rows) for _, rows in found] == [list(range(9)), list(range(6, 13))]  # of 7 and 6 rows


def test_arrays_of_libraries_are_read_as_they_are(tmp_path):
    values, names = image(SHAPES[0]), ("z", "y", "x")
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("raw", data=values, chunks=(4, 4, 4))
    kept = zarr.storage.LocalStore(tmp_path / "named.zarr"), _NoParts()
    of_zarr = [
        zarr.create_array(store, shape=values.shape, chunks=(4, 4, 4), dtype="f4", dimension_names=names)
        for store in kept
    ]
    old = zarr.create_array(tmp_path / "old.zarr", shape=values.shape, chunks=(4, 4, 4), dtype="f4", zarr_format=2)
    for array in (*of_zarr, old):
        array[:] = values
    given = [
        *of_zarr,
        str(tmp_path / "named.zarr"),
        h5py.File(tmp_path / "v.h5")["raw"],
        da.from_array(values, (5, 4, 7)),
    ]
    how = {"mesh": world_mesh(z=1), "crop": None}
    for array in given:
        assert torch.equal(open_volumes([array], **how)[0].image.local[0], torch.from_numpy(values))
    for array in (old, str(tmp_path / "old.zarr")):
        assert torch.equal(open_volumes([array], dims=names, **how)[0].image.local[0], torch.from_numpy(values))
    (tmp_path / "named.zarr" / "c" / "1" / "0" / "0").unlink()
    with pytest.raises(ReadError, match=r"lacks|missing"):  # zarr itself would read zeros
        open_volumes([of_zarr[0]], **how)[0]


class _Labels:
    """A user's source of labels."""

    def __init__(self, values):
        self.values, self.arrays = values, {"label": SourceArray(values.shape, "u1", ("z", "y", "x"))}

    def read(self, array, box):
        return self.values[tuple(slice(*rows) for rows in box)]


def test_the_foreground_of_a_source_is_not_taken_for_that_of_another(tmp_path):
    how = {"mesh": {}, "crop": (4, 4, 4), "foreground": Foreground(cache=str(tmp_path))}
    values = [label(SHAPES[0], seed) for seed in (0, 1)]
    for each in values:
        found = open_volumes([image(SHAPES[0])], [_Labels(each)], **how).found[0].classes[1].at
        assert sorted(found.tolist()) == np.flatnonzero(each).tolist()
    assert not list(tmp_path.iterdir())


def test_hdf5_without_names(tmp_path):
    values, marks = image((2, *SHAPES[0])), label(SHAPES[0])
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["raw"], file["label"] = values.transpose(0, 3, 2, 1), marks.T
    path, how = str(tmp_path / "v.h5"), {"mesh": world_mesh(z=1), "crop": (5, 5, 5)}
    arrays = {"image_array": "raw", "label_array": "label"}
    sample = open_volumes([path], [path], dims=("channel", "x", "y", "z"), **arrays, **how).whole(0)
    assert torch.equal(sample.image.local, torch.from_numpy(values))
    assert torch.equal(sample.label.local[0], torch.from_numpy(marks).long())
    with pytest.raises(MissingArrayError, match="no volume 'raw'"):
        open_volumes([path], [path], **arrays, **how)
    for wrong in ("zyx", ("z", "y"), ("z", "y", "x", "x"), ("t", "y", "x"), 3):
        with pytest.raises(FieldError, match=r"dims=.* must name each stored dim once, in their order: y and x"):
            open_volumes([path], dims=wrong, **arrays, **how)
    with pytest.raises(
        GridError, match=r"an array of shape \(5,\) is not a volume \[C, z, y, x\], \[z, y, x\] or \[y, x\]"
    ):
        open_volumes([np.zeros(5)], **how)
    with pytest.raises(GridError, match=r"an array of shape \(5, 5, 5\) is not a volume \[y, x\]; name its dims"):
        open_volumes([np.zeros((5, 5, 5))], dims=("y", "x"), **how)


def read_slices(volumes, labels, axes):
    """Slices along z: crops of one row, without that dim; of a scan in order, its rows one by one."""
    ds = open_volumes(
        volumes, labels, mesh=world_mesh(**axes), crop=(1, 10, 7), crops=4, foreground=Foreground(), seed=2
    )
    found = []
    for batch in VolumeLoader(ds, batch_size=4):
        image, label = batch.image[:, :, 0], batch.label[:, :, 0]
        found.append((image.full_tensor(), label.full_tensor(), batch.origins, batch.volumes))
    whole = ds.whole(0).image
    return found, torch.stack([whole[:, k].full_tensor() for k in range(3)])


@pytest.mark.parametrize("axes", [{"y": 1}, {"y": 2, "x": 2}], ids=str)
def test_slices_are_crops_of_one_row(axes):
    volumes = [image((2, 13, 10, 7), i) for i in range(2)]
    labels = [label((13, 10, 7), i) for i in range(2)]
    for found, rows in run_on_ranks(int(np.prod(list(axes.values()))), read_slices, volumes, labels, axes):
        np.testing.assert_array_equal(rows, volumes[0][:, :3].swapaxes(0, 1))
        for images, marks, origins, numbers in found:
            assert images.shape == (4, 2, 10, 7)
            for got, mark, (z, _, _), i in zip(images, marks, origins, numbers, strict=True):
                np.testing.assert_array_equal(got, volumes[i][:, z])
                np.testing.assert_array_equal(mark[0], labels[i][z])


def test_masked_voxels_are_missing():
    mesh, values = jigsaw.init_mesh(z=1), np.ma.masked_less(np.arange(64.0, dtype="f4").reshape(4, 4, 4), 8)
    image = open_volumes([values], mesh=mesh, crop=None)[0].image.local[0].numpy()
    np.testing.assert_array_equal(image, values.filled(np.nan))
    labels = np.ma.masked_array(np.ones((4, 4, 4), "u1"), mask=np.ones((4, 4, 4), bool))
    with pytest.raises(ReadError, match="masked values of uint8"):
        open_volumes([values.data], [labels], mesh=mesh, crop=None)
