"""What people bring: their trainers, metrics, loggers and notebooks.  The code is that of docs/works_with.md."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr

import jigsaw
from jigsaw import ShardingError
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "works_with.md").read_text()
EPOCHS, STEPS = 3, 4


def blocks(heading):
    """The code that all sections share, then that of one."""
    head, *rest = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True)) | {"": ""}
    return [re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL) for part in (head, sections[heading])]


def run_page(folder, heading, changes=()):
    """Run a section's blocks as torchrun would; the names that they leave, and the loss of every step."""
    shared, own = blocks(heading)
    left, losses = {"__name__": "works_with"}, []
    with as_torchrun(folder):
        for code in shared:
            exec(compile(code, "docs/works_with.md", "exec"), left)
        plain = left["loss_of"]

        def recorded(net, batch):
            loss = plain(net, batch)
            losses.append(loss.item())
            return loss

        left["loss_of"] = recorded
        for code in own:
            for before, after in changes:
                assert before in "".join(own)
                code = code.replace(before, after)
            exec(compile(code, "docs/works_with.md", "exec"), left)
    return left, losses


@contextlib.contextmanager
def as_torchrun(folder):
    """In a folder of data, with the variables that a rank of the tests' world lacks; its process group is there."""
    more = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        for name, value in more.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def globe(tmp_path_factory):
    """A folder with a globe of 33 x 64 points and 8 steps: 7 samples, 4 batches of two."""
    path, r = tmp_path_factory.mktemp("works"), np.random.default_rng(0)
    dims, coords = (
        ("time", "latitude", "longitude"),
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h"),
            "latitude": np.linspace(90, -90, 33),
            "longitude": np.arange(64) * 5.625,
        },
    )
    names = {"2m_temperature": (280, 10), "10m_u_component_of_wind": (0, 5)}
    made = {n: (dims, r.normal(*how, (8, 33, 64)).astype("f4")) for n, how in names.items()}
    xr.Dataset(made, coords).to_zarr(
        path / "globe.zarr", zarr_format=2, encoding={n: {"chunks": (1, 33, 64)} for n in names}
    )
    return path


@cache
def plain_losses(folder):
    """The loss of each step of a plain loop in plain torch, on whole tensors."""
    left, _ = run_page(folder, "")
    net, losses = left["Net"](), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with contextlib.chdir(folder):
        loader = left["batches"](world_mesh(lat=1))
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        given, target = (x.full_tensor()[:, 0] for x in (batch.input, batch.target))
        loss = torch.nn.functional.mse_loss(net(given), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    loader.close()
    assert len(losses) == EPOCHS * STEPS and losses[-1] < 0.99 * losses[0]
    return losses


def check_losses(found, folder, first, last):
    """Every rank's losses of these epochs are the plain loop's."""
    for losses in found:
        np.testing.assert_allclose(losses, plain_losses(folder)[first * STEPS : last * STEPS], rtol=2e-5)


# -- trainers ---------------------------------------------------------------------------------------------------------


def losses_on(ranks, globe, folder, heading, changes=()):
    """What each rank's blocks of a section lost, step by step, in a folder of their own."""
    folder.mkdir(exist_ok=True)
    (folder / "globe.zarr").symlink_to(globe / "globe.zarr")
    return run_on_ranks(ranks, _losses, folder, heading, changes, timeout=120)


def _losses(folder, heading, changes):
    return run_page(folder, heading, changes)[1]


@pytest.mark.slow
def test_lightning_trains_as_the_plain_loop(globe, tmp_path):
    """Whole weights, then cut ones; a checkpoint of two ranks goes on on one, and of one on two."""
    pytest.importorskip("lightning", reason="the trainer that this is about: pip install jigsaw-torch[lightning]")
    plain = plain_losses(globe)
    for ranks in (1, 2):
        for losses in losses_on(ranks, globe, tmp_path / str(ranks), "Lightning"):
            np.testing.assert_allclose(losses, [*plain[: 2 * STEPS]] * 2, rtol=2e-5)
    for saved, ranks in ((1, 2), (2, 1)):
        changes = [("max_epochs=2", "max_epochs=3")]
        for kind, kept in (("Forecast", "lightning"), ("CutForecast", "cut")):
            (path,) = (tmp_path / str(saved) / kept).rglob("*.ckpt")
            changes.append((f"trainer.fit({kind}())", f"trainer.fit({kind}(), ckpt_path={str(path)!r})"))
        went_on = losses_on(ranks, globe, tmp_path / f"{saved} to {ranks}", "Lightning", changes)
        for losses in went_on:
            np.testing.assert_allclose(losses, [*plain[2 * STEPS :]] * 2, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["Fabric", "Accelerate"])
def test_fabric_and_accelerate_train_as_the_plain_loop(globe, tmp_path, trainer):
    pytest.importorskip({"Fabric": "lightning"}.get(trainer, "accelerate"), reason="what this is about")
    for ranks in (1, 2):
        for losses in losses_on(ranks, globe, tmp_path / str(ranks), trainer):
            np.testing.assert_allclose(losses, plain_losses(globe)[: 2 * STEPS], rtol=2e-5)
