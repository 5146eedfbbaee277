"""The medical example: its halves are the CT, and it learns alike on one rank and on two."""

import importlib
import json
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest

from jigsaw.testing import run_on_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "medical"
MODULES = ("baseline", "data", "plot", "train")
SMALL = ("--steps", "2", "--crop", "48", "48", "32")


def run(*argv):
    """The script's own `main`; its modules' short names are forgotten again afterwards."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module("train").main(list(argv))
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if module is not None})


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path, capsys):
    alone = run("--mesh", "z=1", "--out", str(tmp_path), *SMALL)
    whole = nibabel.as_closest_canonical(nibabel.load(EXAMPLE / "data" / "ct.nii.gz"))
    left, right = (nibabel.load(tmp_path / "halves" / f"{side}-scan.nii") for side in ("left", "right"))
    assert np.array_equal(np.concatenate([left.get_fdata(), right.get_fdata()]), whole.get_fdata())
    assert np.allclose(right.affine @ (0, 0, 0, 1), whole.affine @ (left.shape[0], 0, 0, 1))
    halves = run_on_ranks(2, run, "--mesh", "z=2", "--out", str(tmp_path), *SMALL, timeout=240)
    assert halves[0]["losses"] == halves[1]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert halves[0]["held"] == [1, 56, 101, 61]
    assert halves[0]["net"]["dice"] == halves[1]["net"]["dice"] == pytest.approx(alone["net"]["dice"], abs=2e-3)
    assert halves[0]["atlas"] == alone["atlas"] and min(alone["atlas"]["dice"]) > 0.5
    mask = nibabel.load(tmp_path / "mask.nii.gz")
    assert mask.shape == left.shape and np.allclose(mask.affine, left.affine)
    assert (tmp_path / "medical.png").stat().st_size > 50_000
    assert json.loads((tmp_path / "loss_z=2.json").read_text())["losses"] == halves[0]["losses"]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_first_steps_on_one_rank_are_those_of_two(tmp_path):
    common = ("--out", str(tmp_path), "--steps", "24", "--crop", "64", "64", "32")
    alone = run("--mesh", "z=1", "--first", "8", *common)
    assert len(alone["losses"]) == 8 and "net" not in alone and not (tmp_path / "mask.nii.gz").exists()
    found = run_on_ranks(2, run, "--mesh", "z=2", *common, timeout=240)[0]
    assert found["losses"][:8] == pytest.approx(alone["losses"], rel=1e-3)
    assert sum(found["losses"][-4:]) < 0.75 * sum(found["losses"][:4])
