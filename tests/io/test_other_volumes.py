"""Ranks that open, draw or ask for other volumes: each refuses, and no sample has parts of two scans."""

from __future__ import annotations

import nibabel
import numpy as np
import pytest

from jigsaw.errors import FieldError, PeerError
from jigsaw.io import Foreground, ForegroundBox, VolumeLoader, augment, open_volumes, volume_statistics
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

SCANS = 20


def scans():
    """Scans of one shape, each with its number in every voxel."""
    return [np.full((4, 3, 3), number, "f4") for number in range(SCANS)]


def opened(mesh, images=None, labels=None, **options):
    return open_volumes(scans() if images is None else images, labels, mesh=mesh, crop=None, **options)


def reads(mesh, me):
    """Ways to read other scans, or the same ones otherwise, on the second rank."""
    own = opened(mesh)
    yield "seed of a loader", lambda: next(iter(VolumeLoader(own, batch_size=1, shuffle=True, seed=me)))
    yield "sample", lambda: own[3 + me]
    yield "whole volume", lambda: own.whole(3 + me)
    yield "weights", lambda: opened(mesh, weights=np.eye(SCANS)[5 + me].tolist())[0]
    yield "fill", lambda: open_volumes(scans(), mesh=mesh, crop=(8, 2, 2), fill=50.0 + me)[0]
    yield "label_map", lambda: opened(mesh, None, [s.astype("i4") for s in scans()], label_map={1: 2 + me})[0]
    yield "augmented", lambda: opened(mesh, augment=[augment.Brightness(p=1, scale=(1 + me, 1 + me))])[0]
    yield "own function", lambda: opened(mesh, augment=[lambda tile, generator: tile]).at(seed=me, epoch=0)[0]
    swapped = scans()
    swapped[1:3] = swapped[1:3][:: 1 - 2 * me]
    yield "order", lambda: opened(mesh, swapped)[1]
    yield "order of labels", lambda: opened(mesh, None, [s.astype("i4") for s in swapped])[1]
    yield "statistics", lambda: volume_statistics(opened(mesh, swapped))
    yield "box", lambda: opened(mesh, swapped, box=ForegroundBox(above=-1))
    crops = {"crop": (2, 2, 2), "foreground": Foreground(classes=(1,))}
    yield "foreground", lambda: open_volumes(scans(), [s.astype("i4") for s in swapped], mesh=mesh, **crops)


def refused(axes):
    mesh = world_mesh(**axes)
    messages = {}
    for name, read in reads(mesh, mesh.get_rank()):
        try:
            read()
            messages[name] = ""
        except PeerError as error:
            messages[name] = str(error)
    return messages


@on_ranks(2)
def test_ranks_that_read_other_volumes_refuse():
    for name, message in refused({"z": 2}).items():
        assert "another sample" in message or "other volumes" in message, name


def paths_apart(folder, axes):
    """The same scans below a folder of each rank; on the second also in another order."""
    mesh = world_mesh(**axes)
    me = mesh.get_rank()
    own = [str(folder / f"node{me}" / f"{number}.nii") for number in range(SCANS)]
    alike = opened(mesh, own)[1].image.full_tensor()[0, :, 0, 0].tolist()
    own[1:3] = own[1:3][:: 1 - 2 * me]
    with pytest.raises(PeerError, match="other volumes than rank 0, in another order"):
        opened(mesh, own)[1]
    return alike


def test_files_may_lie_in_a_folder_of_each_node(tmp_path):
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
        for number, values in enumerate(scans()):
            nibabel.save(nibabel.Nifti1Image(values.T, np.eye(4)), tmp_path / f"node{node}" / f"{number}.nii")
    assert run_on_ranks(2, paths_apart, tmp_path, {"z": 2}) == [[1.0] * 4] * 2


def test_reading_draws_the_same_on_ranks_that_agree():
    options = {"augment": [augment.Flip(), augment.Elastic(), augment.Noise()], "weights": list(range(SCANS))}
    sample = opened(world_mesh(z=1), **options)[2]
    assert sample.volume == run_on_ranks(2, drawn, options)[1]


def drawn(options):
    return opened(world_mesh(z=2), **options)[2].volume


def test_arguments_of_the_wrong_kind():
    mesh, wrong = world_mesh(z=1), {}
    wrong["labels"] = lambda: opened(mesh, None, 5)
    wrong["foreground"] = lambda: open_volumes(scans(), scans(), mesh=mesh, crop=(2, 2, 2), foreground=True)
    wrong["classes"] = lambda: Foreground(classes=1)
    wrong["kept"] = lambda: Foreground(kept=1.5)
    wrong["pos"] = lambda: Foreground(pos="a")
    wrong["cache"] = lambda: Foreground(cache=5)
    wrong["channels"] = lambda: ForegroundBox(channels=0)
    wrong["percentiles"] = lambda: volume_statistics(opened(mesh), percentiles=50)
    wrong["normalize"] = lambda: opened(mesh, normalize=(0, 1e-320))
    for name, call in wrong.items():
        with pytest.raises(FieldError, match=name):
            call()
    assert ForegroundBox(above=np.float32(3)).above == 3
    columns = volume_statistics(opened(mesh), percentiles=(np.int64(50), 99.99996, 99.99997)).columns
    assert {"percentile_50", "percentile_99.99996", "percentile_99.99997"} <= set(columns)
