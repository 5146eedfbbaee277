"""Augmentation at the read: bits that are the same on every mesh, and what scipy and MONAI make of the whole scan."""

import pickle
from itertools import product

import nibabel
import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from volume_store import AFFINE, image, pairs, write

from jigsaw.errors import FieldError, GridError
from jigsaw.io.volumes.augment import Affine, Brightness, Elastic, Flip, Gamma, LowResolution, Noise, Rotate90
from jigsaw.io.volumes.crops import Foreground, RandomDraws
from jigsaw.io.volumes.drawn_steps import AffineStep, CoarseStep, ElasticStep, IntensityStep, VoxelTurn, hashed_places
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.testing import run_on_ranks, world_mesh

SHAPE, CROP = (21, 17, 19), (10, 13, 13)
MESHES = [{"z": 1}, {"z": 2}, {"y": 3}, {"z": 4}, {"data": 2, "x": 2}, {"z": 2, "x": 2}]
EACH = {
    "flip": [Flip(p=0.7)],
    "quarter": [Rotate90(p=1)],
    "pointwise": [Gamma(p=1, between=(-2, 3)), Brightness(p=1, shift=(-1, 1)), Noise(p=1, std=(0.1, 0.2))],
    "coarse": [LowResolution(p=1, zoom=(0.4, 0.8))],
    "affine": [Affine(p=1, degrees=40, scale=(0.7, 1.4), shift=3)],
    "elastic": [Elastic(p=1, magnitude=(2, 5), every=5)],
}
ALL = [step for steps in EACH.values() for step in steps]


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    return pairs(tmp_path_factory.mktemp("augmented"), [SHAPE, (14, 17, 9)], chunks=(6, 7, 8))


def opened(scans, axes, augment, **how):
    options = {"crop": CROP, "crops": 3, "halo": {"z": 2, "y": 1}, "seed": 3, "fill": -1.0} | how
    mesh = world_mesh(**axes) if axes else {}
    return open_volumes(scans[0], scans[1], mesh=mesh, augment=augment, **options)


def read_all(scans, axes):
    """What every kind gives, and the batches of a loader: digests would hide where they differ."""
    found = {}
    for name, steps in (EACH | {"all": ALL}).items():
        ds = opened(scans, axes, steps)
        wanted = range(len(ds)) if name == "all" else (0, 4)
        found[name] = [(s.image.full_tensor(), s.label.full_tensor(), s.affine) for s in map(ds.__getitem__, wanted)]
    ds = pickle.loads(pickle.dumps(opened(scans, axes, ALL, foreground=Foreground())))
    loader = VolumeLoader(ds, batch_size=4, shuffle=True, seed=5)
    for epoch in range(2):
        found[f"epoch {epoch}"] = [(b.image.full_tensor(), b.label.full_tensor(), b.affines) for b in loader]
    whole = opened(scans, axes, [s for s in ALL if not isinstance(s, Rotate90)], crop=None, crops=1)
    for size in (1, 2):  # beside another, a volume lies elsewhere in its batch, and is augmented alike
        found[f"whole {size}"] = [
            (b.image.full_tensor(), b.label.full_tensor(), b.affines) for b in VolumeLoader(whole, batch_size=size)
        ]
    return found


@pytest.fixture(scope="module")
def on_one_rank(scans):
    return read_all(scans, MESHES[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [pytest.param(m, marks=pytest.mark.nightly if m in ({"z": 2}, {"y": 3}) else ()) for m in MESHES[1:]],
    ids=str,
)
def test_samples_are_alike_on_every_mesh(scans, on_one_rank, axes):
    for found in run_on_ranks(int(np.prod(list(axes.values()))), read_all, scans, axes):
        for name, samples in on_one_rank.items():
            for (got, label, affine), (want, want_label, want_affine) in zip(found[name], samples, strict=True):
                assert torch.equal(got, want), name
                assert torch.equal(label, want_label), name
                np.testing.assert_array_equal(affine, want_affine)


def test_epochs_differ_and_whole_volumes_do_not_with_their_batch(on_one_rank):
    one = on_one_rank
    assert not torch.equal(one["epoch 0"][0][0], one["epoch 1"][0][0])
    (small, *_), (large, *_) = one["whole 1"][1], one["whole 2"][0]
    inside = tuple(slice((m - n) // 2, (m - n) // 2 + n) for n, m in zip(small.shape[2:], large.shape[2:], strict=True))
    assert torch.equal(small[0], large[1][(slice(None), *inside)])


# -- the whole scan, by others ---------------------------------------------------------------------------------------


def by_others(step, values, origin, fill, is_label):
    """One step on the whole scan, by numpy and scipy in float64: the crop of it."""
    box = np.meshgrid(*(np.arange(n, dtype="f8") for n in CROP), indexing="ij")
    order = {"order": 0 if is_label else 1, "mode": "grid-constant", "cval": fill}
    start = np.reshape(origin, (3, 1, 1, 1))
    if isinstance(step, AffineStep):
        center = (np.array(CROP) - 1) / 2
        matrix = np.array(step.matrix)
        shift = center - matrix @ center + step.shift + origin
        return ndimage.affine_transform(values, matrix, shift, output_shape=CROP, **order)
    if isinstance(step, ElasticStep):
        knots = [(-2, n // step.every + 4) for n in CROP]
        moved = []
        for d in range(3):
            bits = hashed_places(step.key, ((d, d + 1), *knots))[0]
            random = ((bits >> np.uint64(11)).astype("f8") / 2**52 - 1) * step.most
            at = np.stack(box) / step.every + 2
            moved.append(ndimage.map_coordinates(random, at, order=3, prefilter=False))
        assert np.abs(moved).max() <= step.most
        return ndimage.map_coordinates(values, np.stack(box) + moved + start, **order)
    if isinstance(step, CoarseStep):
        f = np.array(step.factor)
        rows = [np.floor(k * (np.arange(-1, n / k + 1) + 0.5)).astype(int) for n, k in zip(CROP, f, strict=True)]
        nearest = np.stack(np.meshgrid(*rows, indexing="ij")) + start
        coarse = ndimage.map_coordinates(values, nearest, **(order | {"order": 0}))
        k = f.reshape(3, 1, 1, 1)
        return ndimage.map_coordinates(coarse, (np.stack(box) + 0.5) / k - 0.5 + 1, order=1)
    crop = values[tuple(slice(a, a + n) for a, n in zip(origin, CROP, strict=True))].astype("f8")
    if isinstance(step, VoxelTurn):
        turned = crop.transpose(step.order)
        return np.flip(turned, [d for d, flipped in enumerate(step.flipped) if flipped])
    assert isinstance(step, IntensityStep)
    bent = step.low + step.width * (np.maximum(crop - step.low, 0) / step.width) ** step.gamma
    return np.where(crop > step.low, bent, crop) * step.scale + step.shift


@pytest.mark.parametrize("kind", [name for name in EACH if name != "pointwise"])
def test_steps_are_those_of_scipy_on_the_whole_scan(scans, kind):
    ds = opened(scans, {"z": 1}, EACH[kind], dtype="float64", crops=4)
    seen = 0
    for i in range(4):
        crop, sample = ds.crop(i), ds[i]
        for step in crop.augmented.steps if crop.augmented else ():
            seen += 1
            values, label = scans[2][0]
            got = sample.image.full_tensor()[0].numpy()
            np.testing.assert_allclose(got, by_others(step, values, crop.origin, -1, False), rtol=0, atol=1e-6)
            if step.moves_labels:
                want = by_others(step, label, crop.origin, 0, True)
                np.testing.assert_array_equal(sample.label.full_tensor()[0], want)
    assert seen >= 3


def test_pointwise_steps_and_noise(scans):
    plain = opened(scans, {"z": 1}, None)
    for step in EACH["pointwise"][:2]:
        for i, sample in enumerate(opened(scans, {"z": 1}, [step])):
            crop = opened(scans, {"z": 1}, [step]).crop(i)
            if crop.volume:
                continue  # the smaller one, filled
            want = by_others(crop.augmented.steps[0], scans[2][0][0], crop.origin, -1, False)
            np.testing.assert_allclose(sample.image.local[0], want, rtol=1e-6, atol=1e-6)
            assert torch.equal(sample.label.local, plain[i].label.local)
    noisy = opened(scans, {"z": 1}, [Noise(p=1, std=(0.5, 0.5))])
    added = torch.stack([noisy[i].image.local - plain[i].image.local for i in range(6)]).numpy() / 0.5
    assert stats.kstest(added.ravel(), "norm").pvalue > 1e-3
    assert abs(np.corrcoef(added[0].ravel(), added[1].ravel())[0, 1]) < 0.1
    assert all(abs(np.corrcoef(added[0].ravel()[k:], added[0].ravel()[:-k])[0, 1]) < 0.1 for k in (1, 13, 169))


def test_probabilities_and_places_in_the_list(scans):
    ds = opened(scans, {}, [Flip(p=0.5, dims=("x",)), Noise(p=0.25)], crops=300)
    drawn = [crop.augmented.steps if crop.augmented else () for crop in map(ds.crop, range(600))]
    flipped, noisy = (sum(any(isinstance(s, kind) for s in steps) for steps in drawn) for kind in (VoxelTurn, object))
    assert 250 < flipped < 350 and 340 < noisy < 410  # 1 - 0.5 * 0.75 = 0.625 have either
    same = opened(scans, {}, [Flip(p=0.5, dims=("x",))], crops=300)
    for i in range(20):  # one step more changes none of the others
        want = [s for s in drawn[i] if isinstance(s, VoxelTurn)]
        assert list(same.crop(i).augmented.steps if same.crop(i).augmented else ()) == want
    assert same.crop(0).origin == ds.crop(0).origin == opened(scans, {}, None, crops=300).crop(0).origin


def test_affines_go_along(scans):
    """A blob stays where it is in the world, flipped, turned and zoomed."""
    ds = opened(scans, {"z": 1}, [Flip(), Rotate90(p=1), Affine(p=1, degrees=20)], crops=6)
    for i in range(6):
        crop, sample = ds.crop(i), ds[i]
        to_world = np.array([(*v, 1) for v in product((0.0, 3.0), repeat=3)])  # x, y, z, 1
        source = np.stack([p[[2, 1, 0]] for p in (to_world @ sample.affine.T @ np.linalg.inv(AFFINE).T)])
        values = scans[2][crop.volume][0]
        if crop.volume:
            continue
        want = ndimage.map_coordinates(values, source.T, order=1, mode="grid-constant", cval=-1)
        got = [sample.image.full_tensor()[0, int(z), int(y), int(x)] for x, y, z, _ in to_world]
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_rotations_are_of_the_world(tmp_path):
    """Of voxels 4 times as long along z: a quarter turn about y maps 4 rows of x onto one of z."""
    path = write(tmp_path / "long.zarr", image((9, 5, 33)), affine=np.diag([1.0, 1, 4, 1]))
    step = Affine(p=1, degrees={"y": 90}, scale=(1, 1)).drawn(
        RandomDraws(0, 0, 1, 1), open_volumes([path], mesh={}, crop=(9, 5, 33)).sample_grid(0)
    )
    m = np.array(step.matrix)
    angle = np.arctan2(m[2, 0] / 4, m[0, 0])
    np.testing.assert_allclose(
        m[[0, 0, 2, 2], [0, 2, 0, 2]], [np.cos(angle), -np.sin(angle) / 4, np.sin(angle) * 4, np.cos(angle)]
    )


def test_turns_and_affines_are_monais(scans):
    transforms = pytest.importorskip("monai.transforms")
    plain = opened(scans, {"z": 1}, None, halo=None)
    for i in range(3):
        ds = opened(scans, {"z": 1}, EACH["quarter"], halo=None)
        (step,), crop = ds.crop(i).augmented.steps, plain[i].image.local
        turns = [transforms.Rotate90(k, spatial_axes=(1, 2))(crop).as_tensor() for k in (1, 2, 3)]
        assert sum(torch.equal(ds[i].image.local, each) for each in turns) == 1, step
        # the crop at the middle of a scan that it fills: both see zeros beyond
        whole = opened(scans, {"z": 1}, EACH["affine"], crop=None, crops=1, halo=None, fill=0.0)
        (step,) = whole.crop(0).augmented.steps
        made = np.eye(4)
        made[:3, :3], made[:3, 3] = step.matrix, step.shift
        affine = transforms.Affine(affine=made, mode="bilinear", padding_mode="zeros", image_only=True)
        want = affine(torch.from_numpy(scans[2][0][0])[None])
        np.testing.assert_allclose(whole[0].image.local, want.as_tensor(), atol=2e-4)  # MONAI's grid is float32


# -- own functions ---------------------------------------------------------------------------------------------------


def contrast(tile, generator):
    factor = 0.5 + torch.rand(1, generator=generator, dtype=torch.float64).item()
    mean = tile.mean()  # of the whole sample
    return (tile - mean) * factor + mean


def read_own(scans, axes):
    ds = opened(scans, axes, [Flip(), contrast], dtype="float64")
    batches = VolumeLoader(ds, batch_size=3, seed=3)
    return [ds[i].image.full_tensor() for i in range(6)], torch.cat([b.image.full_tensor() for b in batches])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [MESHES[2], *MESHES[4:]], ids=str)
def test_a_users_function_gets_tiles(scans, axes):
    plain = opened(scans, {"z": 1}, [Flip()], dtype="float64")
    (samples, batches), *_ = run_on_ranks(1, read_own, scans, MESHES[0])
    for i, made in enumerate(samples):
        whole = plain[i].image.full_tensor()
        factor = (made - whole.mean()).std() / (whole - whole.mean()).std()
        assert 0.5 <= factor <= 1.5
        torch.testing.assert_close(made, (whole - whole.mean()) * factor + whole.mean())
        torch.testing.assert_close(batches[i], made)
    for found, of_batches in run_on_ranks(int(np.prod(list(axes.values()))), read_own, scans, axes):
        torch.testing.assert_close(torch.stack(found), torch.stack(samples), rtol=0, atol=1e-12)
        torch.testing.assert_close(of_batches, batches, rtol=0, atol=1e-12)


def test_what_is_read_is_what_is_reached(scans):
    """A flip reads the mirrored rows, no more; a warp those within its reach."""
    for steps, rows in (([Flip(p=1)], [(5, 10), (0, 5)]), ([Elastic(p=1, magnitude=(1, 1))], [(-2, 7), (3, 12)])):
        ds = open_volumes(*scans[:2], mesh={"z": 2}, crop=CROP, augment=steps, seed=3)
        chain, layout = ds.crop(0).augmented, ds.frame.layout((1, 1), (None, None))
        assert [chain.boxes(layout, (i,))[0][0] for i in range(2)] == rows
        held = ds.plan(0)[0].request.layout.cuts[2].held
        first = ds.crop(0).origin[0]
        assert [b - a for a, b in held] == [min(b + first, SHAPE[0]) - max(a + first, 0) for a, b in rows]


def test_what_cannot_be(scans):
    for steps, error, words in (
        (Flip(), FieldError, r"augment=Flip.* must be a list of jigsaw.io.augment.Flip"),
        ([contrast, Flip()], FieldError, r"then functions of \(tile, generator\)"),
        ([Flip], FieldError, r"must be a list of"),
        ([Flip(dims=("q",))], GridError, r"names 'q', and the dims of space are z, y, x"),
        ([Flip(dims="zy")], GridError, r"names 'zy', .* given as a list"),
        ([Rotate90(plane=("z", "y"))], GridError, r"'z': 10, 'y': 13, .* a quarter turn needs as many along both dims"),
    ):
        with pytest.raises(error, match=words):
            opened(scans, {}, steps)
    with pytest.raises(GridError, match="with boundary=, whose rows beyond a crop"):
        opened(scans, {}, [Flip()], boundary={"z": "reflect"})
    with pytest.raises(GridError, match="quarter turn needs as many"):
        opened(scans, {}, [Rotate90()], crop=None, crops=1)
    for make, words in (
        (lambda: Flip(p=2), r"Flip\(p=2\): a probability"),
        (lambda: Gamma(gamma=(0, 1)), r"Gamma\(gamma=\(0, 1\)\) must be \(from, to\), numbers >= 1e-06"),
        (lambda: Gamma(between=(1, 1)), r"must be \(low, high\), and these are the same"),
        (lambda: Noise(std=0.1), r"Noise\(std=0.1\) must be \(from, to\)"),
        (lambda: LowResolution(zoom=(0.5, 2)), r"numbers >= 0.01, <= 1"),
        (lambda: Affine(degrees=-3), r"degrees= is the most, a number >= 0"),
        (lambda: Elastic(every=0.5), r"every= is a whole number of voxels"),
    ):
        with pytest.raises(FieldError, match=words):
            make()
    with pytest.raises(
        FieldError, match=r"gave torch.float64 .* for a tile torch.float32 .*; return an image of the same"
    ):
        opened(scans, {"z": 1}, [lambda tile, _: tile.double()])[0]


def test_inference_is_not_augmented_and_planes_are(scans, tmp_path):
    assert torch.equal(
        opened(scans, {"z": 1}, ALL).whole(0).image.local, opened(scans, {"z": 1}, None).whole(0).image.local
    )
    path = str(tmp_path / "plane.nii")
    values = image((11, 9))
    nibabel.save(nibabel.Nifti1Image(values.T[..., None], np.eye(4)), path)
    flat = write(tmp_path / "flat.zarr", values, ("y", "x"), (4, 4))
    sample = open_volumes([flat], mesh=world_mesh(y=1), crop=(11, 9), augment=[Flip(p=1), Affine(p=1), Elastic(p=1)])[0]
    assert sample.image.shape == (1, 11, 9) and sample.label is None
    half = open_volumes([flat], mesh=world_mesh(y=1), crop=(9, 9), augment=[Noise(p=1)], dtype="float16")[0]
    assert half.image.dtype == torch.float16
