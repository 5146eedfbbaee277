"""The code of docs/medical.md runs as it stands, and on two ranks with the same batches, masks and scores."""

import contextlib
import importlib
import json
import re
import sys
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
import tifffile
import torch
from monai.bundle import ConfigParser
from monai.inferers import SlidingWindowInferer
from monai.transforms import LoadImage
from volume_store import image, label

from jigsaw.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "medical.md").read_text()
MESH = "jigsaw.init_mesh(z=1)"
AFFINE = np.diag([1.0, 1, 3, 1])


def run(folder, mesh):
    """Run every block of the page in a folder that has its scans; what it ends with."""
    left = {}
    with contextlib.chdir(folder):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(block.replace(MESH, mesh), "docs/medical.md", "exec"), left)
        wholes = [left[name].whole(0).image.full_tensor()[0] for name in ("stacks", "series")]
    batch, affine = left["batch"], torch.from_numpy(left["series"].images[0].affine)
    others = [*wholes, affine, left["logits"].full_tensor(), *left["network"].state_dict().values()]
    return batch.image.full_tensor(), batch.label.full_tensor(), left["report"], others


def ball(shape, center, radius):
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"))
    return (((grid - np.reshape(center, (3, 1, 1, 1))) ** 2).sum(0) <= radius**2).astype("u1")


def save_scan(values, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, AFFINE), path)


def save_dicom_series(values, folder):
    """One file a slice, numbered in another order than they lie in; slopes differ."""
    folder.mkdir()
    for z, plane in enumerate(values):
        head = pydicom.dataset.FileMetaDataset()
        head.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        slice_ = pydicom.dataset.Dataset()
        slice_.file_meta, slice_.SeriesInstanceUID = head, "1.2.3"
        slice_.SOPClassUID, slice_.SOPInstanceUID = pydicom.uid.CTImageStorage, f"1.2.3.{z + 1}"
        slice_.ImagePositionPatient, slice_.ImageOrientationPatient = [3, 4, 2.5 * z], [1, 0, 0, 0, 1, 0]
        slice_.PixelSpacing, slice_.RescaleSlope, slice_.RescaleIntercept = [0.5, 0.75], 2 + z, -100
        slice_.set_pixel_data(plane.astype("i2"), "MONOCHROME2", 16)
        slice_.save_as(folder / f"{7 * z % len(values):03}.dcm", enforce_file_format=True)


BUNDLE = {
    "_target_": "BasicUNet",
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "features": [4, 4, 4, 4, 4, 4],
}


def bundle_net(folder):
    """The net of a MONAI bundle with the weights in its folder, by MONAI and torch alone."""
    config = ConfigParser()
    config.read_config(folder / "configs" / "inference.json")
    net = config.get_parsed_content("network_def")
    net.load_state_dict(torch.load(folder / "models" / "model.pt", weights_only=True))
    return net.eval()


def save_bundle(folder):
    (folder / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    inputs = {"image": {"spatial_shape": [32, 32, 32]}}
    meta = {"network_data_format": {"inputs": inputs}}
    (folder / "configs" / "inference.json").write_text(json.dumps({"network_def": BUNDLE}))
    (folder / "configs" / "metadata.json").write_text(json.dumps(meta))
    torch.manual_seed(1)
    net = ConfigParser({"network_def": BUNDLE}).get_parsed_content("network_def")
    torch.save(net.state_dict(), folder / "models" / "model.pt")
    return list(net.state_dict().values())


@pytest.mark.slow
def test_the_page_runs_alike_on_one_rank_and_two(tmp_path):
    assert MESH in PAGE
    save_scan(100 + 50 * image((40, 36, 30)), tmp_path / "scan.nii.gz")
    save_scan(label((40, 36, 30)), tmp_path / "label.nii.gz")
    for case, center in enumerate(((14, 14, 18), (24, 20, 14), (20, 15, 16))):
        body = ball((40, 34, 33), center, 9)
        folder, scan = tmp_path / "Dataset001_Balls", 50 + 100 * body + 20 * image(body.shape, case)
        save_scan(scan, folder / "imagesTr" / f"{case}_0000.nii.gz")
        save_scan(body, folder / "labelsTr" / f"{case}.nii.gz")
    stack = label((12, 36, 40)).astype("u2") * 1000 + 7
    tifffile.imwrite(tmp_path / "stack.ome.tif", stack, tile=(16, 16), metadata={"axes": "ZYX"})
    save_dicom_series(slices := 1000 * image((9, 34, 36)).round(), tmp_path / "series")
    weights = save_bundle(tmp_path / "bundle")
    one, labels, report, others = run(tmp_path, MESH)
    net, scan = bundle_net(tmp_path / "bundle"), LoadImage(ensure_channel_first=True)(tmp_path / "scan.nii.gz")
    assert all(map(torch.equal, weights, net.state_dict().values()))  # written by the page
    inferer = SlidingWindowInferer((32, 32, 32), overlap=0.25, mode="gaussian")
    # in float32 sums of windows and convolutions differ by their order, here and on two ranks
    torch.testing.assert_close(others[3], inferer(scan.as_tensor()[None], net), rtol=1e-4, atol=1e-5)
    assert torch.equal(others[0], torch.from_numpy(stack.astype("f4")))
    slopes = 2 + np.arange(9)[:, None, None]
    assert torch.equal(others[1], torch.from_numpy((slices * slopes - 100)[:, ::-1, ::-1].astype("f4")))  # LPS to RAS
    # the last voxel of each row and column is the first now; PixelSpacing is that of rows, then of columns
    corner = np.array([[0.75, 0, 0, -3 - 35 * 0.75], [0, 0.5, 0, -4 - 33 * 0.5], [0, 0, 2.5, 0], [0, 0, 0, 1]])
    np.testing.assert_allclose(others[2], corner, atol=1e-6)
    assert one.shape == (2, 1, 24, 32, 32) and one.std() > 0.5
    assert report["dice"] > 0.8 and report["surfaces within 3 mm"] > 0.8 and report["hd95 in mm"] < 10
    mask = nibabel.load(tmp_path / "found.nii.gz")
    assert np.array_equal(mask.affine, AFFINE) and mask.get_data_dtype() == np.uint8
    found = mask.get_fdata()
    assert report["dice"] == pytest.approx(2 * (found * body).sum() / (found.sum() + body.sum()), rel=1e-12)
    for tile, tile_labels, scores, on_two in run_on_ranks(2, run, tmp_path, "jigsaw.init_mesh(z=2)"):
        assert all(map(torch.equal, on_two[:3] + on_two[4:], others[:3] + others[4:]))
        torch.testing.assert_close(on_two[3], others[3], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tile, one, rtol=0, atol=1e-5)  # the page's own function has a mean over ranks
        assert torch.equal(tile_labels, labels)
        assert scores == pytest.approx(report, rel=0.02)  # float32: a voxel of a surface may change sides
    with pytest.raises(AssertionError):
        torch.testing.assert_close(one[0], one[1], rtol=0, atol=1e-5)


# -- the table of nets and losses -------------------------------------------------------------------------------------


def nets_of_the_table():
    """Of each net and loss of the page's table, whether it says that it was tried in two dims alone."""
    rows = re.findall(r"^\| (?:MONAI|nnU-Net) \|.*$", PAGE, re.MULTILINE)
    return {name: bool(flat) for row in rows for name, flat in re.findall(r"`(\w+)`( \(2-D\))?", row)}


def test_the_table_has_what_the_zoo_found():
    text = (ROOT / "docs" / "models.md").read_text()
    packages = ("monai", "dynamic-network-architectures")
    told = [text.split(f"\n## {package} ")[1].split("\n## ")[0] for package in packages]
    exact = set(re.findall(r"^\| (\w+)[^|]* \| 2, 3, 2x2 \| \S+ \|[^|]*\| nothing \|$", "".join(told), re.MULTILINE))
    assert len(exact) > 30 and set(nets_of_the_table()) == exact


def test_the_table_says_what_was_tried_on_images_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "zoo"))
    before = set(sys.modules)
    dims = {}
    for net in importlib.import_module("nets_medical").MEDICAL_NETS:
        dims.setdefault(net.name.split()[0], set()).add(len(net.inputs[0].shape) - 2)
    for name in ("nets_medical", "zoo_net"):
        if name not in before:
            sys.modules.pop(name, None)
    assert nets_of_the_table() == {name: found == {2} for name, found in dims.items()}
