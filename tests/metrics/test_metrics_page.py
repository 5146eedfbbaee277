"""The code of docs/metrics.md runs as it stands, and on four ranks with the same numbers."""

import re
from pathlib import Path

import pytest
import torch

from jigsaw.testing import run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
MESH = "jigsaw.init_mesh(ensemble=1, lat=1)"


def run(mesh):
    """Run every block of the page: the report, the loss, and a sum over the gradient."""
    left = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block.replace(MESH, mesh), "docs/metrics.md", "exec"), left)
    return {
        **{name: float(value) for name, value in left["report"].items()},
        "loss": left["loss"].item(),
        "gradient": left["members"].grad.abs().sum().item(),
    }


def test_the_page_runs_alike_on_one_rank_and_four():
    assert MESH in PAGE
    one = run(MESH)
    assert len(one) == 11
    assert one["hd95"] == 5 and 0 < one["surface dice"] < 1
    for other in run_on_ranks(4, run, "jigsaw.init_mesh(ensemble=2, lat=2)"):
        assert other == pytest.approx(one, rel=1e-4)
    assert torch.tensor(list(one.values())).isfinite().all()
