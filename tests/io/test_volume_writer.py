"""NIfTI files that ranks write together, read again by nibabel and by gzip: values, affine and header."""

from __future__ import annotations

import gzip
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import zarr
from torch.distributed.device_mesh import DeviceMesh

import jigsaw
from jigsaw import comm
from jigsaw.errors import GridError, ShardingError, WriteError
from jigsaw.io import open_volumes, write_volume
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

nibabel = pytest.importorskip("nibabel", reason="nibabel reads what was written")

SHAPE = (2, 7, 5, 6)  # channels, z, y, x
AFFINE = np.array([[0.0, -1.5, 0.1, 4], [2, 0, 0, -7], [0, 0.2, 3, 1], [0, 0, 0, 1]])
MESHES = [{"z": 1}, {"z": 2}, {"x": 3}, {"y": 4}, {"z": 2, "x": 2}]


def values(dtype=torch.float32):
    return (torch.arange(math.prod(SHAPE)).view(SHAPE) % 251).to(dtype)


def spec_of(mesh: DeviceMesh):
    names = set(mesh.mesh_dim_names or ())
    return (None, *(axis if axis in names else None for axis in "zyx"))


def write_all(folder, axes):
    """An image of two channels, a mask as a batch of one, both packed and not; and the bytes that a packed one sent."""
    mesh = world_mesh(**axes)
    tile = jigsaw.shard(values(), mesh, spec_of(mesh))
    write_volume(folder / "image.nii", tile, affine=AFFINE)
    with comm.count() as sent:
        write_volume(folder / "image.nii.gz", tile, affine=AFFINE)
    mask = jigsaw.shard(values(torch.int64)[:1] % 3, mesh, spec_of(mesh))
    write_volume(folder / "mask.nii.gz", mask[None], like=folder / "image.nii")
    write_volume(folder / "half.nii.gz", tile[0].half(), like=folder / "image.nii.gz")
    moved = [call.sent_bytes for call in sent.calls if call.kind == "exchange"]
    return sum(moved), tile.local.nbytes


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_files_are_those_of_one_process(tmp_path, axes):
    found = run_on_ranks(math.prod(axes.values()), write_all, tmp_path, axes)
    want = values().numpy().transpose(3, 2, 1, 0)
    for name in ("image.nii", "image.nii.gz"):
        image = nibabel.load(tmp_path / name)
        assert image.get_data_dtype() == np.float32
        np.testing.assert_array_equal(image.get_fdata(dtype=np.float32), want)
        np.testing.assert_allclose(image.affine, AFFINE, rtol=1e-6)
        np.testing.assert_allclose(image.header.get_zooms()[:3], np.linalg.norm(AFFINE[:3, :3], axis=0), rtol=1e-6)
        assert image.header.get_xyzt_units()[0] == "mm"
    assert gzip.decompress((tmp_path / "image.nii.gz").read_bytes()) == (tmp_path / "image.nii").read_bytes()
    mask, half = nibabel.load(tmp_path / "mask.nii.gz"), nibabel.load(tmp_path / "half.nii.gz")
    assert (mask.get_data_dtype(), mask.shape, half.get_data_dtype()) == (np.int32, (6, 5, 7), np.float32)
    np.testing.assert_array_equal(np.asarray(mask.dataobj), want[..., 0].astype(int) % 3)
    np.testing.assert_array_equal(half.get_fdata(), want[..., 0])
    np.testing.assert_allclose(half.affine, AFFINE, rtol=1e-6)
    for sent, held in found:
        assert sent <= held  # each value goes to one rank at most
        assert sent == 0 or list(axes) != ["z"]
    again = open_volumes([tmp_path / "image.nii.gz"], mesh=jigsaw.init_mesh(z=1), crop=None)
    np.testing.assert_array_equal(again[0].image.local.numpy(), values().numpy())
    np.testing.assert_allclose(again[0].affine, AFFINE, rtol=1e-6)
    assert not list(tmp_path.glob("*.part"))


def test_what_was_read_is_written_where_it_was(tmp_path):
    """A scan of another orientation: read turned, written turned, and the same place for the same voxel."""
    header = nibabel.Nifti1Header()
    header["descrip"] = b"a scan"
    header.set_xyzt_units("micron")
    image = nibabel.Nifti1Image(values()[0].numpy().transpose(2, 1, 0), AFFINE, header)
    nibabel.save(image, tmp_path / "scan.nii.gz")
    sample = open_volumes([tmp_path / "scan.nii.gz"], mesh=jigsaw.init_mesh(z=1), crop=None, orientation="RAS")[0]
    write_volume(tmp_path / "turned.nii", sample.image, like=sample)
    found, want = nibabel.load(tmp_path / "turned.nii"), nibabel.as_closest_canonical(image)
    np.testing.assert_array_equal(found.get_fdata(), want.get_fdata())
    np.testing.assert_allclose(found.affine, want.affine, rtol=1e-5, atol=1e-6)
    write_volume(tmp_path / "same.nii.gz", sample.image.bool(), like=tmp_path / "scan.nii.gz", affine=sample.affine)
    with pytest.raises(GridError, match=r"like=.* has \(7, 5, 6\) voxels along z, y, x and the tile \(7, 6, 5\)"):
        write_volume(tmp_path / "apart.nii.gz", sample.image.bool(), like=tmp_path / "scan.nii.gz")
    for like in (sample, nibabel.load(tmp_path / "turned.nii")):  # a net's output of half the rows lies nowhere
        with pytest.raises(GridError, match=r"has \(7, 6, 5\) voxels along z, y, x and the tile \(4, 6, 5\)"):
            write_volume(tmp_path / "apart.nii.gz", sample.image[:, ::2], like=like)
    same = nibabel.load(tmp_path / "same.nii.gz")
    assert (bytes(same.header["descrip"]).rstrip(b"\0"), same.header.get_xyzt_units()[0]) == (b"a scan", "micron")
    assert same.get_data_dtype() == np.uint8


def test_a_world_in_micrometers_stays_in_micrometers(tmp_path):
    mesh, ome, scan = jigsaw.init_mesh(z=1), tmp_path / "scan.ome.zarr", tmp_path / "scan.nii"
    affine = np.diag([0.25, 0.5, 2.0, 1.0])
    header = nibabel.Nifti1Header()
    header.set_xyzt_units("micron", "sec")
    nibabel.save(nibabel.Nifti1Image(values()[0].numpy().transpose(2, 1, 0), affine, header), scan)
    write_volume(ome, open_volumes([scan], mesh=mesh, crop=None)[0].image, like=scan, dtype="i2")
    for place in (scan, ome):
        sample = open_volumes([place], [ome], mesh=mesh, crop=None)[0]
        assert sample.unit == "micrometer"
        for like in (sample, place):
            write_volume(tmp_path / "mask.nii", sample.label > 0, like=like, mode="w")
            image = nibabel.load(tmp_path / "mask.nii")
            assert image.header.get_xyzt_units()[0] == "micron"
            np.testing.assert_allclose(image.affine, affine)
            write_volume(tmp_path / "mask.ome.zarr", sample.label > 0, like=like, mode="w")
            (levels,) = zarr.open_group(tmp_path / "mask.ome.zarr").attrs["ome"]["multiscales"]
            assert {axis["unit"] for axis in levels["axes"] if axis["type"] == "space"} == {"micrometer"}
    image = nibabel.Nifti1Image(values()[0].numpy().transpose(2, 1, 0), affine)  # as many millimeters are elsewhere
    for factor in (1, 1e-3):
        image = nibabel.Nifti1Image(image.get_fdata(), np.diag([*factor * np.diag(affine)[:3], 1]))
        image.header.set_xyzt_units("mm")
        nibabel.save(image, tmp_path / "millimeters.nii")
        with pytest.raises(GridError, match="lie apart") if factor == 1 else nullcontext():
            open_volumes([tmp_path / "millimeters.nii"], [ome], mesh=mesh, crop=None)
    labels = open_volumes([ome], mesh=mesh, crop=None)[0]  # in micrometers, onto the same grid in millimeters
    write_volume(tmp_path / "onto.nii", labels.image.long(), like=labels, onto=tmp_path / "millimeters.nii", dtype="f4")
    onto = nibabel.load(tmp_path / "onto.nii")
    np.testing.assert_array_equal(onto.get_fdata(), image.get_fdata().astype(int))
    np.testing.assert_allclose(onto.affine, image.affine)


@on_ranks(2)
def test_refusals_are_alike_and_leave_nothing(folder):
    mesh = world_mesh(z=2)
    tile = jigsaw.shard(values(), mesh, (None, "z", None, None))
    cases = [
        (WriteError, r"must end with \.nii or \.nii\.gz", {"path": "mask.mha"}),
        (WriteError, "mode='a' must be", {"mode": "a"}),
        (WriteError, "dtype='complex64' is none", {"dtype": "complex64"}),
        (WriteError, "do not fit int8", {"dtype": "int8"}),
        (WriteError, "do not fit uint8", {"data": tile + 0.5, "dtype": torch.uint8}),
        (WriteError, "like=int has no affine", {"like": 5}),
        (GridError, "must be an invertible 4 x 4", {"affine": np.eye(3)}),
        (GridError, "must be an invertible 4 x 4", {"affine": np.diag([0.0, 1, 1, 1])}),
        (GridError, "must be an invertible 4 x 4", {"affine": "abc"}),
        (GridError, "whose last row is 0, 0, 0, 1", {"affine": np.diag([1.0, 1, 1, 2])}),
        (WriteError, "has no voxel", {"data": tile[:, :, :0]}),
        (WriteError, "have real numbers", {"data": tile.to(torch.complex64), "dtype": "float32"}),
        (WriteError, "do not fit float32", {"data": tile.long() + 2**24, "dtype": "float32"}),
        (ShardingError, r"takes a tile, not Tensor", {"data": torch.zeros(2, 2, 2)}),
        (ShardingError, r"must be \[z, y, x\]", {"data": tile[None].expand(2, -1, -1, -1, -1)}),
        (WriteError, "other affines", {"affine": np.diag([1.0 + mesh.get_rank(), 1, 1, 1])}),
    ]
    for kind, why, how in cases:
        options = {"path": "mask.nii.gz", "data": tile, **how}
        with pytest.raises(kind, match=why):
            write_volume(folder / options.pop("path"), options.pop("data"), **options)
    comm.all_gather_object(mesh, "the first rank has removed what it began")
    left = comm.all_gather_object(mesh, [file.name for file in folder.iterdir()])  # before any begins the next one
    assert left == [[], []]
    write_volume(folder / "mask.nii", tile)
    with pytest.raises(WriteError, match="is there; mode='w'"):
        write_volume(folder / "mask.nii", tile)
    write_volume(folder / "mask.nii", tile * 0, mode="w")
    if mesh.get_rank() == 0:
        (folder / "note.nii").write_text("dear")
    comm.all_gather_object(mesh, "there is a note")
    with pytest.raises(WriteError, match=r"note\.nii is not a NIfTI file, so mode='w' does not replace it"):
        write_volume(folder / "note.nii", tile, mode="w")


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "int64"])
def test_the_largest_integers(tmp_path, name):
    most = np.iinfo(name).max
    tile = jigsaw.shard(torch.full((2, 3, 4), most, dtype=getattr(torch, name)), world_mesh(z=1), ("z", None, None))
    write_volume(tmp_path / "a.nii", tile, dtype=name)
    written = np.asarray(nibabel.load(tmp_path / "a.nii").dataobj)
    assert written.dtype.name == name
    assert (written == most).all()


def test_a_link_to_what_is_not_there_is_not_replaced(tmp_path):
    tile = jigsaw.shard(torch.ones(2, 3, 4), world_mesh(z=1), ("z", None, None))
    for name in ("a.nii", "a.ome.zarr"):
        (tmp_path / name).symlink_to(tmp_path / "not mounted" / name)
        with pytest.raises(WriteError, match="is there"):
            write_volume(tmp_path / name, tile)
        assert (tmp_path / name).is_symlink()
