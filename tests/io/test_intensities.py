"""Windows, statistics and percentiles of volumes: MONAI's, nnU-Net's and numpy's on the whole."""

import pickle

import numpy as np
import pytest
from volume_store import image, label, write

from jigsaw import comm
from jigsaw.errors import FieldError, GridError
from jigsaw.io.series.statistics import Statistics
from jigsaw.io.stats.compute import statistics
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.io.volumes.volume_statistics import volume_statistics
from jigsaw.testing import run_on_ranks, world_mesh

SHAPES = [(21, 17, 19), (14, 17, 9)]
MESHES = [{"z": 1}, {"z": 2}, {"z": 4}, {"data": 2, "x": 2}]
WINDOW = (-0.8, 1.3)
CROP = {"crop": (9, 12, 11), "halo": {"z": 1}, "fill": -5.0, "seed": 2}


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Images of two channels, one of them packed as integers; labels stored in another order, flipped, one lacking."""
    folder, images, labels, values = tmp_path_factory.mktemp("bright"), [], [], []
    for i, shape in enumerate(SHAPES):
        wide = image(shape, i)
        wide[0, 0, :3] = np.nan
        wide[0, 1, :2] = (0.0, -0.0)
        packed = np.rint(image(shape, 10 + i) * 100).astype("i2")
        one = write(folder / f"a{i}.zarr", wide, chunks=(5, 9, 8), affine=np.eye(4))
        path = str(folder / f"b{i}.zarr")
        write(path, packed, chunks=(4, 17, 19), affine=np.eye(4), attributes={"scale_factor": 0.25, "add_offset": -3.0})
        images.append([one, path])
        values.append(np.stack([wide, (packed * 0.25 - 3).astype("f4")]))
    front = label(SHAPES[0], 3)
    mirrored = np.diag([1.0, -1, 1, 1])
    mirrored[1, 3] = SHAPES[0][1] - 1
    labels = [write(folder / "l.zarr", front[:, ::-1].transpose(2, 0, 1), ("x", "z", "y"), affine=mirrored), None]
    return images, labels, values, front


def numbers_of(found):
    return {name: column.tolist() for name, column in found.columns.items()}


def sent_for_percentiles(images, axes):
    """The bytes that a rank sends to each other rank."""
    ds = open_volumes(images, mesh=world_mesh(**axes), crop=None)
    with comm.count() as sent:
        volume_statistics(ds, percentiles=(0.5, 99.5))
    return sum(call.sent_bytes for call in sent.calls) / (ds.mesh.size() - 1)


def test_what_is_sent_are_counts(scans):
    once = 2 * 2**19  # of two channels
    for sent in run_on_ranks(2, sent_for_percentiles, scans[0], {"z": 2}):
        assert once + 2 * once <= sent < once + 2 * 2 * once + 8192


def all_statistics(images, labels, axes):
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), crop=None, orientation="RAS", label_map={3: 0})
    asked = (0, 0.5, 37.2, 50, 99.5, 100)
    found = [volume_statistics(ds, percentiles=asked), *volume_statistics(ds, percentiles=asked, each=True)]
    found.append(volume_statistics(ds, percentiles=asked, foreground=True))
    found += volume_statistics(ds, foreground=True, each=True)
    return [numbers_of(each) for each in found]


def wanted_of(voxels, percentiles=(0, 0.5, 37.2, 50, 99.5, 100)):
    """[C, voxels] by numpy, in float64."""
    rows = [row[~np.isnan(row)].astype("f8") for row in voxels]
    return {
        "count": [len(row) for row in rows],
        "missing": [len(row) - len(kept) for row, kept in zip(voxels, rows, strict=True)],
        **{name: [getattr(row, name)() for row in rows] for name in ("mean", "std", "min", "max")},
        **{f"percentile_{q:g}": [np.percentile(row, q) for row in rows] for q in percentiles},
    }


def test_statistics_are_numpys_and_alike_on_every_mesh(scans, monkeypatch):
    images, labels, values, front = scans
    flat = [v.reshape(2, -1) for v in values]
    lit = flat[0][:, np.isin(front.ravel(), (1, 2))]
    wanted = [np.concatenate(flat, 1), *flat, lit]
    one = all_statistics(images, labels, MESHES[0])
    for found, voxels in zip(one, wanted, strict=False):
        for name, numbers in wanted_of(voxels).items():
            np.testing.assert_allclose(found[name], numbers, rtol=1e-12, err_msg=name)
    assert one[4]["mean"] == one[3]["mean"]  # the one volume that has labels
    assert list(one[4])[-2:] == ["percentile_0.5", "percentile_99.5"]
    monkeypatch.setattr("jigsaw.io.volumes.volume._SLAB_VALUES", 2000)  # several slabs a volume
    pieces = all_statistics(images, labels, MESHES[0])
    for a, b in zip(one, pieces, strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES[1:], ids=str)
def test_meshes_give_the_same_bits(scans, axes):
    one = all_statistics(*scans[:2], MESHES[0])
    for found in run_on_ranks(int(np.prod(list(axes.values()))), all_statistics, *scans[:2], axes):
        assert found == one


def test_windows_are_monais(scans):
    transforms = pytest.importorskip("monai.transforms")
    images, _, values, _ = scans
    scale = transforms.ScaleIntensityRange(*WINDOW, 0, 1, clip=True)
    ds = open_volumes(images, mesh=world_mesh(z=1), window=WINDOW, **CROP)
    for i, sample in enumerate(ds):
        box = tuple(slice(max(a, 0), a + n) for a, n in zip(sample.origin, CROP["crop"], strict=True))
        got, want = sample.image.full_tensor().numpy(), scale(values[i][(slice(None), *box)])
        inside = tuple(slice(max(-a, 0), max(-a, 0) + n) for a, n in zip(sample.origin, want.shape[1:], strict=True))
        np.testing.assert_allclose(got[(slice(None), *inside)], want, atol=1e-6)
        assert got[~np.isnan(got)].max() == 1
        outside = np.ones(got.shape, bool)
        outside[(slice(None), *inside)] = False
        assert (got[outside] == -5).all()  # what is not a voxel is not clipped
    assert outside.any()


def test_windows_come_after_the_resampling_and_before_augmentation(scans):
    transforms = pytest.importorskip("monai.transforms")
    from jigsaw.io.volumes.augment import Brightness, Flip

    images, _, values, _ = scans
    how = {"mesh": world_mesh(z=1), "crop": None, "window": ([-0.8, -9], [1.3, 4])}
    loaded = transforms.ToTensor()(np.nan_to_num(values[0][1:].transpose(0, 3, 2, 1)))
    spaced = transforms.Spacing((0.7, 1.4, 0.8))(loaded)
    want = transforms.ScaleIntensityRange(-9, 4, 0, 1, clip=True)(spaced).numpy()[0].T
    found = open_volumes(images, spacing=(0.8, 1.4, 0.7), **how).whole(0).image.local[1]
    np.testing.assert_allclose(found, want, atol=2e-6)
    moved = open_volumes(images, augment=[Flip(p=1), Brightness(p=1, scale=(2, 2))], **how)
    plain = open_volumes(images, **how)
    np.testing.assert_array_equal(moved[0].image.local, plain[0].image.local.flip((1, 2, 3)) * 2)


def read_ct(images, labels, axes):
    """nnU-Net's CT normalization: clipped to the foreground's percentiles, then its mean and std; and MRI's."""
    how = {"mesh": world_mesh(**axes), "crop": None}
    stats = volume_statistics(open_volumes(images, labels, **how, orientation="RAS"), foreground=True)
    ct = open_volumes(images, window=stats, normalize=stats, **how)
    mri = open_volumes(images, normalize=volume_statistics(ct, percentiles=(), each=True), **how)
    mri = pickle.loads(pickle.dumps(mri))
    (batch,) = VolumeLoader(mri, batch_size=2)
    return [ct.whole(i).image.full_tensor().numpy() for i in range(2)], batch.image.full_tensor().numpy(), batch.origins


@pytest.mark.parametrize("axes", [MESHES[0], MESHES[3]], ids=str)
def test_nnunets_normalizations(scans, axes):
    images, labels, values, front = scans
    lit = values[0].reshape(2, -1)[:, front.ravel() > 0].astype("f8")
    shape = (2, 1, 1, 1)
    low, high = (np.reshape([np.nanpercentile(row, q) for row in lit], shape) for q in (0.5, 99.5))
    mean, std = (np.reshape([f(row) for row in lit], shape) for f in (np.nanmean, np.nanstd))
    for ct, batch, origins in run_on_ranks(int(np.prod(list(axes.values()))), read_ct, images, labels, axes):
        for i, got in enumerate(ct):
            np.testing.assert_allclose(got, (np.clip(values[i], low, high) - mean) / std, atol=1e-5)
            m, s = (np.reshape([f(row.astype("f8")) for row in values[i]], shape) for f in (np.nanmean, np.nanstd))
            box = tuple(slice(-a, -a + n) for a, n in zip(origins[i], values[i].shape[1:], strict=True))
            np.testing.assert_allclose(batch[(i, slice(None), *box)], (values[i] - m) / s, atol=1e-5)


def test_windows_of_each_volume_are_monais(scans):
    transforms = pytest.importorskip("monai.transforms")
    images, _, values, _ = scans
    packed = [pair[1] for pair in images]  # no NaN, which MONAI's percentiles would be
    how = {"mesh": world_mesh(z=1), "crop": None}
    each = volume_statistics(open_volumes(packed, **how), percentiles=(50, 99, 1), each=True)
    for i, sample in enumerate(open_volumes(packed, window=each, **how)):
        want = transforms.ScaleIntensityRangePercentiles(1, 99, 0, 1, clip=True)(values[i][1:].astype("f8"))
        np.testing.assert_allclose(sample.image.local, want, atol=1e-6)


def test_statistics_are_kept_in_files(scans, tmp_path):
    found = volume_statistics(open_volumes(scans[0], mesh={}, crop=None))
    for name in ("s.json", "s.npz", "s.nc"):
        found.write(tmp_path / name)
        assert numbers_of(Statistics.read(tmp_path / name)) == numbers_of(found)
    from_file = open_volumes(scans[0], mesh={}, crop=None, normalize=str(tmp_path / "s.json"))
    assert from_file.intensities == open_volumes(scans[0], mesh={}, crop=None, normalize=found).intensities


def test_intensities_that_cannot_be(scans):
    images, labels, *_ = scans
    how = {"mesh": {}, "crop": (4, 4, 4)}
    for wrong in (3.0, (1, 0), (0, 0), (0, 1, 2), "ct", (0, np.inf), ([0, 0, 0], [1, 1, 1])):
        with pytest.raises(FieldError, match=r"window=.* must be \(low, high\), a number each or one for 2 channels"):
            open_volumes(images, window=wrong, **how)
    beyond = {"halo": {"z": 1}, "boundary": {"z": ("fill", -7)}}
    with pytest.raises(GridError, match=r"boundary=.* fills with -7, which window= would clip to 0\.\.1"):
        open_volumes(images, window=WINDOW, **beyond, **how)
    ds = open_volumes(images, **how)
    stats = volume_statistics(ds, each=True)
    with pytest.raises(FieldError, match=r"window=.* low < high, or statistics with two percentiles"):
        open_volumes(images, window=volume_statistics(ds, percentiles=()), **how)
    with pytest.raises(FieldError, match="window= has 1 statistics for 2 volumes; give one a volume, or one"):
        open_volumes(images, window=stats[:1], **how)
    with pytest.raises(FieldError, match="normalize= has 1 statistics for 2 volumes; give one a volume, or one"):
        open_volumes(images, normalize=stats[:1], **how)
    with pytest.raises(
        FieldError, match=r"normalize=Statistics.* must be \(mean, std\), a number each or one for 1 ch"
    ):
        open_volumes([pair[0] for pair in images], normalize=stats[0], **how)
    with pytest.raises(FieldError, match="foreground=True needs labels, and the volumes were opened without"):
        volume_statistics(ds, foreground=True)
    with pytest.raises(FieldError, match=r"percentiles=\(101,\) must be numbers from 0 to 100"):
        volume_statistics(ds, percentiles=(101,))
    with pytest.raises(FieldError, match="volume_statistics takes what open_volumes gives, not list"):
        volume_statistics([])
    with pytest.raises(FieldError, match=r"statistics takes what jigsaw\.io\.open gives, not Volumes; of volumes"):
        statistics(ds)
    none = open_volumes(images, labels, orientation="RAS", label_map={1: 0, 2: 0, 3: 0}, **how)
    with pytest.raises(FieldError, match=r"a0\.zarr has no voxel of the foreground in one of its channels"):
        volume_statistics(none, foreground=True)
