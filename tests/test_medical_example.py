"""The medical example: its halves are the CT, and it learns alike on one rank and on two."""

import importlib
import json
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

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


def tumors(ranks, dtype, narrow):
    """What MONAI's net of BraTS says of a scan of four channels, its Dice loss in float32 or more, the gradient."""
    losses, nets = importlib.import_module("monai.losses"), importlib.import_module("monai.networks.nets")
    torch.manual_seed(0)
    mesh, size = world_mesh(z=ranks), (24, 32, 16)
    net = nets.SegResNet(blocks_down=[1, 2, 2, 4], blocks_up=[1, 1, 1], init_filters=8, in_channels=4, out_channels=3)
    scan, truth = torch.randn(1, 4, *size).to(dtype), (torch.rand(1, 3, *size) > 0.7).to(dtype)
    scan, truth = (jigsaw.shard(x, mesh, (None, None, "z", None, None)) for x in (scan, truth))
    net = jigsaw.parallelize(net.to(dtype), mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        said = net(scan)
    loss = losses.DiceLoss(smooth_nr=0, smooth_dr=1e-5, squared_pred=True, sigmoid=True)(said.to(dtype), truth)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters()]).double()
    return said.detach().full_tensor(), loss.item(), gradient


@pytest.mark.slow
def test_brats_in_bfloat16_is_that_of_one_process():
    pytest.importorskip("monai")
    (exact,) = run_on_ranks(1, tumors, 1, torch.float64, False, timeout=240)
    (alone,) = run_on_ranks(1, tumors, 1, torch.float32, True, timeout=240)
    for said, loss, gradient in run_on_ranks(2, tumors, 2, torch.float32, True, timeout=240):
        assert said.dtype == torch.bfloat16 and torch.equal(said, alone[0])
        assert loss == pytest.approx(alone[1], rel=1e-5)
        assert (gradient - exact[2]).norm() < 1.5 * (alone[2] - exact[2]).norm()
