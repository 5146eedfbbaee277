"""Images that lack one of their channels, and volumes that are drawn by weights."""

import numpy as np
import pytest
import torch
from volume_store import image, label, write

from jigsaw.errors import FieldError, StateError
from jigsaw.io import augment
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume_loader import VolumeLoader
from jigsaw.io.volumes.volume_statistics import volume_statistics
from jigsaw.testing import run_on_ranks, world_mesh

SHAPE = (13, 10, 7)
PRESENT = torch.tensor([[True, True, True], [False, True, True], [True, True, False]])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Three images of three channels, of which the second lacks the first and the third the last; labels, values."""
    folder, values = tmp_path_factory.mktemp("absent"), np.stack([image((3, *SHAPE), n) for n in range(3)])
    images = [[write(folder / f"i{n}{c}.zarr", values[n, c]) for c in range(3)] for n in range(3)]
    images[1][0] = images[2][2] = None
    labels = [write(folder / f"l{n}.zarr", label(SHAPE, n), name="label") for n in range(3)]
    return images, labels, values


def shift(tile, generator):
    return tile + torch.rand((), generator=generator).item()


def read_all(images, labels, axes, options):
    mesh = world_mesh(**axes)
    ds = open_volumes(images, labels, mesh=mesh, absent_fill=-7.0, **options)
    loaded = VolumeLoader(ds, batch_size=2, seed=5)
    batches = [(b.image.full_tensor(), b.present, b.volumes) for _ in range(2) for b in loaded]
    samples = [(s.image.full_tensor(), s.present, s.volume) for s in map(ds.__getitem__, range(len(ds)))]
    each = volume_statistics(ds, percentiles=(50,), each=True)
    return batches, samples, [s.columns for s in (volume_statistics(ds, percentiles=(50,)), *each)]


MESHES = [{"z": 1}, {"z": 2}, {"y": 3}, {"z": 2, "x": 2}, {"data": 2, "y": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_channel_that_an_image_lacks_is_the_stated_value_and_samples_say_so(cases, axes):
    images, labels, values = cases
    options = {"crop": (15, 8, 7), "crops": 1, "normalize": (1.0, 2.0)}
    ranks = run_on_ranks(int(np.prod(list(axes.values()))), read_all, images, labels, axes, options)
    for batches, samples, columns in ranks:
        rows = [(x[i], p[i], v) for x, p, volumes in batches for i, v in enumerate(volumes)]
        assert len(rows) == 6
        for x, present, volume in (*rows, *samples):
            assert torch.equal(present, PRESENT[volume])
            assert (x[~present] == -7).all()
            inside = x[present][:, 1:14]  # the crop is two rows longer than the image
            whole = torch.from_numpy((values[volume] - 1) / 2)[present]
            assert any(torch.allclose(inside, whole[:, :, y : y + 8], rtol=1e-6, atol=1e-7) for y in range(3))
            assert not x[present][:, [0, 14]].any()
        for c in range(3):
            present = values[PRESENT[:, c], c]
            assert columns[0]["mean"][c] == pytest.approx(present.mean(dtype="f8"), rel=1e-9)
            assert columns[0]["count"][c] == present.size
            assert columns[0]["percentile_50"][c] == pytest.approx(np.median(present), rel=1e-6)
        for volume, own in enumerate(columns[1:]):
            assert np.array_equal(np.isnan(own["mean"]), ~PRESENT[volume].numpy())
            assert np.array_equal(np.isnan(own["percentile_50"]), ~PRESENT[volume].numpy())


def test_nothing_that_follows_changes_an_absent_channel(cases):
    images, labels, _ = cases
    mesh = world_mesh(z=1)
    plain = open_volumes(images, labels, mesh=mesh, absent_fill=0, crop=None)
    stats = volume_statistics(plain, percentiles=(1, 99), each=True)
    steps = [augment.Affine(degrees=20), augment.Noise(std=(0.5, 1)), shift]
    options = {"crop": (6, 8, 7), "crops": 2, "window": stats, "normalize": stats, "augment": steps}
    ds = open_volumes(images, labels, mesh=mesh, absent_fill=0.5, **options)
    for sample in (*ds, *map(ds.whole, range(3))):
        assert (sample.image.local[~sample.present] == 0.5).all()
        assert (sample.image.local[sample.present] != 0.5).any()
    for batch in VolumeLoader(ds, batch_size=3):
        assert (batch.image.local[~batch.present] == 0.5).all()


def drawn(images, labels, axes, weights, crop):
    ds = open_volumes(images, labels, mesh=world_mesh(**axes), absent_fill=0, crop=crop, weights=weights)
    loader = VolumeLoader(ds, batch_size=2, shuffle=True, seed=3)
    first = [b.volumes for _ in range(2) for b in loader]
    again = VolumeLoader(ds, batch_size=2, shuffle=True, seed=3)
    again.load_state_dict({"seed": 3, "epoch": 1, "next_sample": 2, "samples": len(ds)})
    assert [b.volumes for b in again] == first[3:]
    return first


def test_a_state_of_other_volumes_is_refused(cases):
    images, labels, _ = cases

    def loader(order, crops):
        given = [images[i] for i in order], [labels[i] for i in order]
        ds = open_volumes(*given, mesh=world_mesh(z=1), absent_fill=0, crop=(4, 4, 4), crops=crops)
        return VolumeLoader(ds, batch_size=2, seed=3)

    saved = loader((0, 1), 3)
    state = {**saved.state_dict(), "next_sample": 2, "samples": 6, "order": saved._order.mark(6)}
    loader((0, 1), 3).load_state_dict(state)
    for other in (loader((1, 0), 3), loader((0, 2), 3), loader((0, 1, 2), 2)):
        with pytest.raises(StateError, match="samples are of other times or volumes"):
            other.load_state_dict(state)


@pytest.mark.parametrize("crop", [(6, 8, 7), None], ids=str)
def test_weights_draw_the_same_volumes_on_every_mesh_and_after_a_restart(cases, crop):
    images, labels, _ = cases
    (want,) = run_on_ranks(1, drawn, images, labels, {"z": 1}, (1, 0, 3), crop)
    assert {v for batch in want for v in batch} == {0, 2}
    for axes in ({"z": 2}, {"data": 2, "y": 2}):
        ranks = run_on_ranks(int(np.prod(list(axes.values()))), drawn, images, labels, axes, (1, 0, 3), crop)
        assert ranks == [want] * len(ranks)


def test_volumes_are_drawn_as_often_as_their_weights_say(cases):
    images, labels, _ = cases
    ds = open_volumes(images, labels, mesh={}, crop=(4, 4, 4), crops=1000, absent_fill=0, weights=(0, 0.1, 0.3))
    assert len(ds) == 3000
    counts = np.bincount([ds.volume_of(i) for i in range(len(ds))], minlength=3)
    assert counts[0] == 0
    assert abs(counts[1] - 750) < 4 * np.sqrt(3000 * 0.25 * 0.75)
    assert [ds.at(0, 1).volume_of(i) for i in range(20)] != [ds.volume_of(i) for i in range(20)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"absent_fill": None}, r"images\[1\] lacks channel 0 \(None\); leave the image out, or give absent_fill="),
        ({"absent_fill": "x"}, r"absent_fill='x' must be a number"),
        ({"images": [[None, None, None]] * 3}, r"images\[0\] names no file, so it has no shape"),
        ({"labels": [[None]] * 3}, r"labels\[0\] lacks a channel \(None\); give its map"),
        ({"weights": (1, 2)}, r"weights=\(1, 2\) must be 3 numbers >= 0 that are not all 0"),
        ({"weights": (1, -1, 2)}, "must be 3 numbers >= 0"),
        ({"weights": (0, 0, 0)}, "must be 3 numbers >= 0"),
        ({"weights": "abc"}, "weights='abc' must be 3 numbers >= 0"),
        ({"weights": (1, float("nan"), 2)}, "must be 3 numbers >= 0"),
    ],
)
def test_what_says_nothing_of_absent_channels_or_weights_is_refused(cases, change, why):
    images, labels, _ = cases
    arguments = {"images": images, "labels": labels, "absent_fill": 0.0, "mesh": {}, "crop": (4, 4, 4)} | change
    with pytest.raises(FieldError, match=why):
        open_volumes(**arguments)
