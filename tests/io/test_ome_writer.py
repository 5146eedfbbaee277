"""OME-Zarr that ranks write together: its levels against those of the whole, its metadata against the specification."""

import json
import math

import numpy as np
import pytest
import torch
import zarr

import jigsaw
from jigsaw import comm
from jigsaw.errors import GridError, MissingLevelError, WriteError
from jigsaw.io import open_volumes, write_volume
from jigsaw.testing import run_on_ranks, world_mesh

SHAPE = (2, 7, 33, 21)
AFFINE = np.array([[0.5, 0, 0, 4], [0, 0.5, 0, -7], [0, 0, 2.0, 1], [0, 0, 0, 1]])
MESHES = [{"z": 1}, {"y": 2}, {"z": 4}, {"z": 2, "x": 2}]
HOW = {"affine": AFFINE, "levels": 4}


def image():
    return torch.from_numpy(np.random.default_rng(0).normal(size=SHAPE).astype("f4"))


def label():
    return torch.from_numpy(np.random.default_rng(1).integers(0, 4, SHAPE[1:]))


def write_all(folder, axes):
    mesh = world_mesh(**axes)
    spec = [axis if axis in axes else None for axis in "zyx"]
    write_volume(folder / "image.ome.zarr", jigsaw.shard(image(), mesh, (None, *spec)), **HOW)
    with comm.count() as sent:
        write_volume(folder / "label.ome.zarr", jigsaw.shard(label(), mesh, spec), **HOW)
    counts = jigsaw.shard((image() * 10).to(torch.int16), mesh, (None, *spec))
    write_volume(folder / "ct.ome.zarr", counts, coarser="mean", **HOW)
    half = jigsaw.shard(label()[None, None] > 1, mesh, (None, None, *spec))
    write_volume(folder / "mask.ome.zarr", half, like=folder / "label.ome.zarr")
    ds = open_volumes([folder / "image.ome.zarr"], mesh=mesh, crop=None, level=1)
    write_volume(folder / "again.ome.zarr", ds.whole(0).image, like=ds.whole(0), levels=1)
    return sum(call.sent_bytes for call in sent.calls if call.kind == "exchange")


def coarser(values, factors, how):
    """By numpy, block by block, on the whole."""
    made = np.empty([-(-n // f) for n, f in zip(values.shape, factors, strict=True)], values.dtype)
    for at in np.ndindex(*made.shape):
        block = values[tuple(slice(i * f, i * f + f) for i, f in zip(at, factors, strict=True))]
        found, counts = np.unique(block, return_counts=True)
        mean = block.mean(dtype="f8")
        made[at] = found[counts.argmax()] if how == "mode" else mean if values.dtype.kind == "f" else np.rint(mean)
    return made


STEPS = [(1, 2, 2), (1, 2, 2), (2, 2, 2)]  # z is four times as long as y and x


def check_metadata(path, axes):
    """The rules of OME-NGFF 0.5 that a multiscales image must keep."""
    root = json.loads((path / "zarr.json").read_text())
    ome = root["attributes"]["ome"]
    assert root["node_type"] == "group" and root["zarr_format"] == 3 and ome["version"] == "0.5"
    (image,) = ome["multiscales"]
    names = [axis["name"] for axis in image["axes"]]
    kinds = [axis["type"] for axis in image["axes"]]
    assert names == list(axes) and 2 <= len(names) <= 5 and len(set(names)) == len(names)
    assert kinds == ["channel"] * (len(names) - 3) + ["space"] * 3  # channels before space, z before y before x
    assert {axis["unit"] for axis in image["axes"] if axis["type"] == "space"} == {"millimeter"}
    found, before = [], None
    for dataset in image["datasets"]:
        scale, shift = dataset["coordinateTransformations"]  # one scale, then at most one translation
        assert (scale["type"], shift["type"]) == ("scale", "translation")
        assert len(scale["scale"]) == len(shift["translation"]) == len(names)
        array = json.loads((path / dataset["path"] / "zarr.json").read_text())
        assert array["dimension_names"] == names and array["node_type"] == "array"
        assert before is None or all(
            a >= b for a, b in zip(before["shape"], array["shape"], strict=True)
        )  # finest first
        assert before is None or before["data_type"] == array["data_type"]
        before = array
        found.append((scale["scale"], shift["translation"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_levels_are_those_of_the_whole(tmp_path, axes):
    sent = run_on_ranks(math.prod(axes.values()), write_all, tmp_path, axes)
    whole = image().numpy(), label().numpy().astype("i4"), (image() * 10).to(torch.int16).numpy()
    for name, values, how in zip(("image", "label", "ct"), whole, ("mean", "mode", "mean"), strict=True):
        group = zarr.open_group(str(tmp_path / f"{name}.ome.zarr"), mode="r")
        transforms = check_metadata(tmp_path / f"{name}.ome.zarr", "czyx"[4 - values.ndim :])
        assert sorted(name for name, _ in group.arrays()) == ["0", "1", "2", "3"]
        for level, (scale, shift) in enumerate(transforms):
            values = coarser(values, (1, *STEPS[level - 1])[-values.ndim :], how) if level else values
            got = group[str(level)]
            assert got.dtype == values.dtype and math.prod(got.chunks[-3:]) <= 64**3
            np.testing.assert_allclose(got[...], values, rtol=1e-5, atol=1e-6)
            assert np.allclose(scale[-3:], np.prod([(2, 0.5, 0.5), *STEPS[:level]], 0))
            first = (
                np.prod(STEPS[:level], 0) if level else np.ones(3)
            )  # a coarser voxel lies in the middle of its block
            np.testing.assert_allclose(shift[-3:], [1, -7, 4] + (first - 1) / 2 * (2, 0.5, 0.5))
    assert zarr.open_group(str(tmp_path / "mask.ome.zarr"))["0"].dtype == "u1"
    again = zarr.open_group(str(tmp_path / "again.ome.zarr"))["0"][...]
    np.testing.assert_array_equal(again, zarr.open_group(str(tmp_path / "image.ome.zarr"))["1"][...])
    assert check_metadata(tmp_path / "again.ome.zarr", "czyx")[0][1] == [0, 1, -6.75, 4.25]
    # chunks that lie on several ranks travel to one, each row once; of four levels this is little more than of one
    assert sum(sent) < 1.5 * label().nbytes * (len(sent) > 1) + 1


def test_levels_are_opened_by_their_number(tmp_path):
    mesh = world_mesh(z=1)
    write_volume(tmp_path / "v.ome.zarr", jigsaw.shard(image(), mesh, (None, "z", None, None)), **HOW)
    volumes = [open_volumes([tmp_path / "v.ome.zarr"], mesh=mesh, crop=None, level=k) for k in range(4)]
    assert [ds.images[0].shape for ds in volumes] == [(7, 33, 21), (7, 17, 11), (7, 9, 6), (4, 5, 3)]
    assert [ds.images[0].spacing for ds in volumes] == [(2, 0.5, 0.5), (2, 1, 1), (2, 2, 2), (4, 4, 4)]
    np.testing.assert_array_equal(volumes[0].whole(0).affine, AFFINE)
    assert torch.equal(volumes[0].whole(0).image.local, image())
    with pytest.raises(MissingLevelError, match=r"has the levels 0\.\.3"):
        open_volumes([tmp_path / "v.ome.zarr"], mesh=mesh, crop=None, level=4)
    long = jigsaw.shard(torch.zeros(1, 300, 2), mesh, ("z", None, None))
    write_volume(tmp_path / "long.ome.zarr", long)  # as many levels as make it small
    assert sorted(name for name, _ in zarr.open_group(str(tmp_path / "long.ome.zarr")).arrays()) == ["0", "1"]


def test_what_cannot_be_written(tmp_path):
    tile = jigsaw.shard(label(), world_mesh(z=1), ("z", None, None))
    path = tmp_path / "v.ome.zarr"
    for wrong in (0, 2.5, True):
        with pytest.raises(WriteError, match=f"levels={wrong!r} must be a whole number >= 1"):
            write_volume(path, tile, levels=wrong)
    with pytest.raises(WriteError, match=r"levels=9: a volume of \(7, 33, 21\) has only 7; the last is one voxel"):
        write_volume(path, tile, levels=9)
    with pytest.raises(WriteError, match="coarser='max' must be 'mean' or 'mode'"):
        write_volume(path, tile, coarser="max")
    with pytest.raises(WriteError, match=r"levels=2, coarser=None: v\.nii has one level; write \.ome\.zarr"):
        write_volume(tmp_path / "v.nii", tile, levels=2)
    for wrong in (AFFINE[[1, 0, 2, 3]], np.diag([-1.0, 1, 1, 1])):
        with pytest.raises(GridError, match="OME-Zarr stores spacings and an origin, and no rotation"):
            write_volume(path, tile, affine=wrong)
    with pytest.raises(WriteError, match="do not fit uint8"):
        write_volume(path, tile - 1, dtype="uint8")
    assert not path.exists()
    write_volume(path, tile, levels=1)
    with pytest.raises(WriteError, match=r"v\.ome\.zarr is there; mode='w' replaces it"):
        write_volume(path, tile)
    write_volume(path, tile, levels=2, mode="w")
    assert len(check_metadata(path, "zyx")) == 2
