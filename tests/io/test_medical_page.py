"""The code of docs/medical.md runs as it stands, and on two ranks with the same batches."""

import contextlib
import re
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from volume_store import image, label

from jigsaw.testing import run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "medical.md").read_text()
MESH = "jigsaw.init_mesh(z=1)"


def run(folder, mesh):
    """Run every block of the page in a folder that has a scan and its labels; the last batch."""
    left = {}
    with contextlib.chdir(folder):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(block.replace(MESH, mesh), "docs/medical.md", "exec"), left)
    return left["batch"].image.full_tensor(), left["batch"].label.full_tensor()


def test_the_page_runs_alike_on_one_rank_and_two(tmp_path):
    assert MESH in PAGE
    for name, values in (("scan", 100 + 50 * image((40, 36, 30))), ("label", label((40, 36, 30)))):
        nibabel.save(nibabel.Nifti1Image(values, np.diag([1.0, 1, 3, 1])), tmp_path / f"{name}.nii.gz")
    one, labels = run(tmp_path, MESH)
    assert one.shape == (2, 1, 24, 32, 32) and one.std() > 0.5
    for found, found_labels in run_on_ranks(2, run, tmp_path, "jigsaw.init_mesh(z=2)"):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-5)  # the page's own function has a mean over ranks
        assert torch.equal(found_labels, labels)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(one[0], one[1], rtol=0, atol=1e-5)
