"""The code of docs/physics.md runs as it stands, on one rank and, with the same numbers, on four."""

import contextlib
import re
from pathlib import Path

import h5py
import pytest
import torch
from well_store import write_well

from jigsaw.testing import run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "physics.md").read_text()
MESH = "jigsaw.init_mesh(x=1, y=1)"


def run(folder, mesh):
    """Run every block of the page in a folder that has its files; return what it ends with."""
    left = {}
    with contextlib.chdir(folder):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(block.replace(MESH, mesh), "docs/physics.md", "exec"), left)
    data, solver = left["data"], left["solver"]
    told = data.fields, data.target_fields, data.boundary_types
    slopes = left["start"].grad.full_tensor(), solver.viscosity.grad
    return told, left["losses"], left["energy"].item(), slopes, left["sample"].input.shape


def plain_energy(start, viscosity):
    """The same flow by plain torch, with complex transforms and the divergence taken away by a projection."""
    k = torch.stack(torch.meshgrid(*(torch.fft.fftfreq(n, 1 / n).double() for n in start.shape[-2:]), indexing="ij"))
    square = (k**2).sum(0)
    flow = start
    for _ in range(10):
        rate = torch.zeros_like(flow)
        for dim, n in enumerate(start.shape[-2:]):
            ahead, behind, width = flow.roll(-1, dim + 1), flow.roll(1, dim + 1), 2 * torch.pi / n
            rate = rate + viscosity * (ahead - 2 * flow + behind) / width**2
            rate = rate - flow[dim] * (ahead - behind) / (2 * width)
        waves = torch.fft.fft2(flow + 0.02 * rate)
        along = torch.where(square == 0, 0, (k * waves).sum(0) / square.clamp(min=1))
        flow = torch.fft.ifft2(waves - k * along).real
    return flow.square().mean()


def test_the_page_runs_alike_on_one_rank_and_four(tmp_path):
    assert MESH in PAGE
    (tmp_path / "train").mkdir()
    for first in (0, 1):
        path = write_well(tmp_path / "train" / f"{first}.hdf5", {"x": 13, "y": 10}, "gzip", first)
        with h5py.File(path, "a") as f:
            f["t0_fields"].attrs["field_names"] = ["density", "speed"]
    told, losses, energy, slopes, shape = run(tmp_path, MESH)
    for name in ("fields", "boundary_types"):
        assert f"print(data.{name})".ljust(31) + f"# {told[0] if name == 'fields' else told[2]}" in PAGE
    assert told[1] == told[0][:-1] and shape == (1, 8, 13, 10)
    assert losses[-1] < losses[0] and len(losses) == 6
    x, y = (2 * torch.pi * torch.arange(n, dtype=torch.float64) / n for n in (33, 28))
    start = torch.stack([x.cos()[:, None] * y.sin(), (2 * x).sin()[:, None] * y.cos()]).requires_grad_()
    viscosity = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    plain = plain_energy(start, viscosity)
    plain.backward()
    assert energy == pytest.approx(plain.item(), rel=1e-12)
    torch.testing.assert_close(slopes, (start.grad, viscosity.grad), rtol=1e-10, atol=1e-14)
    for ours in run_on_ranks(4, run, tmp_path, "jigsaw.init_mesh(x=2, y=2)"):
        assert ours[0] == told and ours[2] == pytest.approx(energy, rel=1e-12)
        torch.testing.assert_close(ours[3], slopes, rtol=1e-10, atol=1e-14)
        assert ours[1] == pytest.approx(losses, rel=1e-4)
