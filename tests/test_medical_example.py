"""The medical example: its loss falls, alike on one rank and on two, and a volume not seen is segmented."""

import importlib
import sys
from pathlib import Path

import pytest

from jigsaw.testing import run_on_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "medical"
MODULES = ("data", "train")


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
def test_two_ranks_learn_what_one_learns(tmp_path):
    common = ["--data", str(tmp_path / "scans"), "--volumes", "2", "--out", str(tmp_path / "out")]
    halves = run_on_ranks(2, run, "--mesh", "z=2", "--epochs", "5", *common)
    alone = run("--mesh", "z=1", "--epochs", "1", *common)
    half, steps = halves[0], len(alone["losses"])
    assert [h["losses"] for h in halves] == [half["losses"]] * 2
    assert [h["dice"] for h in halves] == [half["dice"]] * 2
    assert half["held"] == [1, 20, 48, 48]
    assert half["spacing"] == (2.0, 1.0, 1.0)
    assert half["losses"][:steps] == pytest.approx(alone["losses"], rel=1e-3)
    assert sum(half["losses"][-steps:]) < 0.8 * sum(half["losses"][:steps])
    assert max(half["dice"]) > 0.1
