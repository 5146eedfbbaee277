"""The code of docs/parallelism.md runs as it stands, and on several ranks with the same loss."""

import re
from pathlib import Path

import pytest

from jigsaw.testing import run_on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
MESHES = {
    "Experts": ("data=1, lat=1", 4, "data=2, lat=2"),
    "Tensor and sequence": ("lat=1, channel=1", 4, "lat=2, channel=2"),
}


def run(section, mesh=""):
    """The block of a section with another mesh; its last loss."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 20
    left = {"__name__": "page"}
    exec(compile(block.replace(MESHES[section][0], mesh or MESHES[section][0]), "docs/parallelism.md", "exec"), left)
    return left["loss"].item()


@pytest.mark.parametrize("section", MESHES)
def test_the_page_runs_alike_on_one_rank_and_several(section):
    before, ranks, after = MESHES[section]
    assert f"jigsaw.init_mesh({before})" in PAGE
    one = run(section)
    for other in run_on_ranks(ranks, run, section, after):
        assert other == pytest.approx(one, rel=1e-4)
