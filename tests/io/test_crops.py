"""Where crops lie: weighted as MONAI weights them, from an index of the foreground that is the same on every mesh."""

import os
from collections import Counter

import numpy as np
import pytest
import torch
from volume_store import AFFINE, image, label, pairs, write

from jigsaw.errors import CorruptChunkError, FieldError, GridError
from jigsaw.io.volumes.crops import Foreground, FoundVoxels, KeptVoxels, RandomDraws, crop_origin, find_foreground
from jigsaw.io.volumes.open_volumes import open_volumes
from jigsaw.io.volumes.volume import StoredVolume
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh
from jigsaw.tile import misuse

SHAPES = [(20, 18, 17), (9, 33, 16)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return pairs(tmp_path_factory.mktemp("labels"), SHAPES)


def flat(mask):
    return np.flatnonzero(mask).tolist()


def contents(found):
    return [
        (f.background.count, f.background.at.tolist(), {k: (c.count, c.at.tolist()) for k, c in f.classes.items()})
        for f in found
    ]


def search(labels, axes, how):
    return contents(find_foreground([StoredVolume((path,)) for path in labels], how, world_mesh(**axes)))


@pytest.mark.parametrize("axes", [{"z": 2}, {"data": 2, "z": 2}], ids=str)
@pytest.mark.parametrize("kept", [7, 100_000])
def test_the_index_is_every_voxel_or_the_same_sample_of_them_on_every_mesh(toy, axes, kept):
    _, labels, values = toy
    for by in ("voxels", "classes"):
        how = Foreground(by=by, kept=kept)
        want = contents(find_foreground([StoredVolume((path,)) for path in labels], how, None))
        for found in run_on_ranks(int(np.prod(list(axes.values()))), search, labels, axes, how):
            assert found == want
        for (count, background, classes), (_, y) in zip(want, values, strict=True):
            assert count == (y == 0).sum()
            assert len(background) == min(count, kept)
            assert set(background) <= set(flat(y == 0))
            masks = {1: y > 0} if by == "voxels" else {int(k): y == k for k in np.unique(y[y > 0])}
            assert {k: n for k, (n, _) in classes.items()} == {k: m.sum() for k, m in masks.items()}
            for k, (n, at) in classes.items():
                assert len(at) == min(n, kept)
                assert set(at) <= set(flat(masks[k]))
                assert kept < n or sorted(at) == flat(masks[k])


def test_a_bounded_sample_is_uniform(tmp_path):
    """Of a foreground of 16 000 voxels in a plane order, 1000 are kept: as many in each tenth, within four sigmas."""
    values = np.ones((20, 40, 20), "u1")
    path = write(tmp_path / "a.zarr", values, chunks=(7, 9, 20))
    (found,) = find_foreground([StoredVolume((path,))], Foreground(kept=1000), None)
    tenths = np.bincount(found.classes[1].at // 1600, minlength=10)
    assert tenths.sum() == 1000
    assert abs(tenths - 100).max() < 4 * np.sqrt(1000 * 0.1 * 0.9)


def test_classes_and_stored_orders(tmp_path):
    values = label((9, 8, 7), 1)
    want = contents(
        find_foreground([StoredVolume((write(tmp_path / "a.zarr", values),))], Foreground(classes=(2, 3)), None)
    )
    assert sorted(want[0][2][1][1]) == flat((values == 2) | (values == 3))
    turned = write(tmp_path / "b.zarr", values.transpose(2, 1, 0)[..., None], ("x", "y", "z", "c"), (3, 4, 5, 1))
    assert contents(find_foreground([StoredVolume((turned,))], Foreground(classes=(2, 3)), None)) == want


def origins(shape, crop, how, found, count, seed=0):
    return [crop_origin(shape, crop, RandomDraws(seed, 0, i), how, found) for i in range(count)]


@pytest.mark.parametrize(("pos", "neg"), [(1, 1), (3, 1), (1, 0), (0, 1)])
def test_pos_and_neg_are_the_odds_of_a_foreground_center(toy, pos, neg):
    _, labels, values = toy
    how = Foreground(pos, neg, kept=10**6)
    found = find_foreground([StoredVolume((labels[0],))], how, None)[0]
    # a crop of one voxel is its own center
    hit = np.array([values[0][1][o] > 0 for o in origins(SHAPES[0], (1, 1, 1), how, found, 2000)])
    p = pos / (pos + neg)
    assert abs(hit.mean() - p) <= 4 * np.sqrt(p * (1 - p) / 2000)


def test_voxels_or_classes_are_drawn_alike():
    found = FoundVoxels(KeptVoxels(), {1: KeptVoxels(90, np.arange(90)), 2: KeptVoxels(10, np.arange(90, 100))})
    drawn = origins((100,), (1,), Foreground(1, 0, by="classes"), found, 2000)
    assert abs(np.mean([o[0] >= 90 for o in drawn]) - 0.5) < 0.05
    alike = FoundVoxels(KeptVoxels(), {1: KeptVoxels(100, np.arange(100))})
    counts = Counter(o[0] for o in origins((100,), (1,), Foreground(1, 0), alike, 20_000))
    assert len(counts) == 100
    assert max(abs(n - 200) for n in counts.values()) < 5 * np.sqrt(200)


def test_centers_move_inwards_as_monais_do():
    from monai.transforms.utils import correct_crop_centers

    shape, crop = (20, 9, 14), (7, 9, 4)
    for center in np.ndindex(*shape):
        found = FoundVoxels(KeptVoxels(), {1: KeptVoxels(1, np.array([np.ravel_multi_index(center, shape)]))})
        got = crop_origin(shape, crop, RandomDraws(0, 0, 0), Foreground(1, 0), found)
        moved = correct_crop_centers(list(center), crop, shape)
        assert got == tuple(int(c) - n // 2 for c, n in zip(moved, crop, strict=True))


def test_without_weights_every_place_is_alike_and_a_volume_without_foreground_has_crops_too():
    counts = Counter(o[0] for o in origins((11,), (4,), None, None, 8000))
    assert sorted(counts) == list(range(8))
    assert max(abs(n - 1000) for n in counts.values()) < 5 * np.sqrt(1000)
    empty = FoundVoxels(KeptVoxels(50, np.arange(50)), {})
    assert {o[0] for o in origins((50,), (1,), Foreground(), empty, 100)} <= set(range(50))
    full = FoundVoxels(KeptVoxels(), {1: KeptVoxels(50, np.arange(50))})
    assert len(origins((50,), (1,), Foreground(0, 1), full, 10)) == 10
    assert origins((3,), (8,), None, None, 1) == [(-2,)]


def test_draws_are_those_of_philox_and_depend_on_every_number():
    # numpy promises that a bit generator's stream does not change; so does this
    assert [RandomDraws(1, 2, 3).word() for _ in range(2)] == [RandomDraws(1, 2, 3).word()] * 2
    words = {RandomDraws(*place).word() for place in np.ndindex(3, 3, 50)}
    assert len(words) == 450
    wanted = np.random.Philox(key=np.array([7, 1], np.uint64), counter=np.array([0, 0, 5, 0], np.uint64)).random_raw(3)
    draws = RandomDraws(7, 1, 5)
    assert [draws.word() for _ in range(3)] == wanted.tolist()


# -- the cache, and what is refused ----------------------------------------------------------------------------------


def cached(labels, folder, axes):
    how = Foreground(cache=folder, kept=50)
    volumes = [StoredVolume((path,)) for path in labels]
    return contents(find_foreground(volumes, how, world_mesh(**axes)))


def test_what_was_found_is_kept_until_the_labels_change(tmp_path):
    path, folder = tmp_path / "a.zarr", str(tmp_path / "cache")
    values = label((16, 8, 8))
    write(path, values)
    want = cached([str(path)], folder, {"z": 1})
    (file,) = os.listdir(folder)
    held = (tmp_path / "cache" / file).stat().st_mtime_ns
    assert run_on_ranks(2, cached, [str(path)], folder, {"z": 2}) == [want] * 2
    assert (tmp_path / "cache" / file).stat().st_mtime_ns == held
    assert os.listdir(folder) == [file]
    write(path, 1 - np.minimum(values, 1))
    changed = cached([str(path)], folder, {"z": 1})
    assert changed[0][0] == want[0][2][1][0]
    assert len(os.listdir(folder)) == 2


def test_a_torn_file_of_the_cache_is_made_again(tmp_path):
    path, folder = str(tmp_path / "a.zarr"), tmp_path / "cache"
    write(path, label((16, 8, 8)))
    want = cached([path], str(folder), {"z": 1})
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for torn in (whole[:-50], whole[: len(whole) // 2], b""):
        file.write_bytes(torn)
        assert run_on_ranks(2, cached, [path], str(folder), {"z": 2}) == [want] * 2
        assert cached([path], str(folder), {"z": 1}) == want
        assert len(file.read_bytes()) == len(whole)


def test_a_link_beside_the_cache_is_not_written_through(tmp_path):
    path, folder, mine = str(tmp_path / "a.zarr"), tmp_path / "cache", tmp_path / "mine"
    write(path, label((16, 8, 8)))
    mine.write_bytes(b"mine")
    want = cached([path], str(folder), {"z": 1})
    (file,) = folder.iterdir()
    file.unlink()
    (folder / f".{file.stem}.{os.getpid()}.npz").symlink_to(mine)
    file.symlink_to(mine)
    assert cached([path], str(folder), {"z": 1}) == want
    assert mine.read_bytes() == b"mine" and not file.is_symlink()


@on_ranks(2)
def test_a_cache_that_cannot_be_written_is_told_to_every_rank(tmp_path):
    mesh, path = world_mesh(z=2), tmp_path / "a.zarr"
    if mesh.get_rank() == 0:
        write(path, label((16, 8, 8)))
    torch.distributed.barrier()
    how = Foreground(cache=str(path / "zarr.json"))
    with pytest.raises(FieldError, match=r"cache='.*zarr.json' of a Foreground cannot be written"):
        find_foreground([StoredVolume((str(path),))], how, mesh)


@on_ranks(2)
def test_a_damaged_label_map_is_told_to_every_rank(tmp_path):
    mesh, path = world_mesh(z=2), tmp_path / "a.zarr"
    if mesh.get_rank() == 0:
        write(path, label((16, 8, 8)), chunks=(4, 8, 8))
        write(tmp_path / "i.zarr", image((16, 8, 8)))
        (path / "image" / "c" / "3" / "0" / "0").write_bytes(b"broken")
    torch.distributed.barrier()
    with pytest.raises(CorruptChunkError, match=r"chunk .* of array 'image'"):
        open_volumes([str(tmp_path / "i.zarr")], [str(path)], mesh=mesh, crop=(4, 4, 4), foreground=Foreground())


def test_what_says_nothing_is_refused(tmp_path):
    for why, kwargs in [
        ("pos=0, neg=0 must be weights", {"pos": 0, "neg": 0}),
        ("pos=-1, neg=2 must be weights", {"pos": -1, "neg": 2}),
        ("by='boxes' must be 'voxels' or 'classes'", {"by": "boxes"}),
        ("kept=0 must be a whole number >= 1", {"kept": 0}),
        (r"classes=\(\) must be a list of the labels", {"classes": ()}),
    ]:
        with pytest.raises(FieldError, match=why):
            Foreground(**kwargs)
    many = write(tmp_path / "many.zarr", np.arange(1000, dtype="i4").reshape(10, 10, 10), affine=AFFINE)
    assert find_foreground([StoredVolume((many,))], Foreground(), None)[0].classes[1].count == 999
    with pytest.raises(FieldError, match="more than 512 labels, too many to weight by class"):
        find_foreground([StoredVolume((many,))], Foreground(by="classes"), None)
    two = write(tmp_path / "two.zarr", label((2, 8, 8, 8)), ("c", "z", "y", "x"), (1, 8, 8, 8))
    with pytest.raises(GridError, match="has 2 channels; foreground is found in label maps of one channel"):
        find_foreground([StoredVolume((two,))], Foreground(), None)


@pytest.mark.parametrize("by", ["voxels", "classes"])
def test_classes_that_no_label_map_has_are_told_of(tmp_path, by, recwarn):
    """Each of two maps has some of them."""
    values = label((9, 8, 7))
    two, three = np.where(values == 3, 0, values), np.where(values == 2, 0, values)
    volumes = [
        StoredVolume((write(tmp_path / f"{i}.zarr", v, name="label"),)) for i, v in enumerate((two, three, values * 0))
    ]
    cached = Foreground(classes=(2, 3, 7, 9), by=by, cache=str(tmp_path / "cache"))
    for _ in range(2):  # found, and as the cache has it
        misuse._warned.clear()
        with pytest.warns(UserWarning, match="no label map has 7, 9, so no crop.*labels there are: 0, 1, 2, 3"):
            find_foreground(volumes, cached, None)
    recwarn.clear()
    find_foreground(volumes, Foreground(classes=(2, 3), by=by), None)
    find_foreground(volumes, Foreground(by=by), None)
    find_foreground(volumes[2:], Foreground(pos=0, by=by), None)
    assert not [w for w in recwarn if "no label map" in str(w.message)]
    with pytest.raises(FieldError, match=r"no label map has any of these; the labels there are: 0, 1, 2; see that"):
        find_foreground(volumes[:1], Foreground(classes=(3,), by=by), None)
    with pytest.raises(FieldError, match="no foreground to weight crops by, no label map has any but label 0"):
        find_foreground(volumes[2:], Foreground(by=by), None)
