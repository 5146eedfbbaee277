"""The code of docs/medical.md runs as it stands, and on two ranks with the same batches, masks and scores."""

import contextlib
import importlib
import re
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
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
    return left["batch"].image.full_tensor(), left["batch"].label.full_tensor(), left["report"]


def ball(shape, center, radius):
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"))
    return (((grid - np.reshape(center, (3, 1, 1, 1))) ** 2).sum(0) <= radius**2).astype("u1")


def save_scan(values, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, AFFINE), path)


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
    one, labels, report = run(tmp_path, MESH)
    assert one.shape == (2, 1, 24, 32, 32) and one.std() > 0.5
    assert report["dice"] > 0.8 and report["surfaces within 3 mm"] > 0.8 and report["hd95 in mm"] < 10
    mask = nibabel.load(tmp_path / "found.nii.gz")
    assert np.array_equal(mask.affine, AFFINE) and mask.get_data_dtype() == np.uint8
    found = mask.get_fdata()
    assert report["dice"] == pytest.approx(2 * (found * body).sum() / (found.sum() + body.sum()), rel=1e-12)
    for tile, tile_labels, scores in run_on_ranks(2, run, tmp_path, "jigsaw.init_mesh(z=2)"):
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
