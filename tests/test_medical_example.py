"""The medical example: its loss falls, alike on one rank and on two, and a volume not seen is segmented."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "medical" / "train.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}


def run(launcher, scans, out, *more):
    command = [*launcher, str(SCRIPT), "--data", str(scans), "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "skill.json").read_text())


@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_learns(tmp_path):
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    half = run(two, tmp_path / "scans", tmp_path / "two", "--volumes", "2", "--epochs", "5")
    alone = run([sys.executable], tmp_path / "scans", tmp_path / "one", "--volumes", "2", "--epochs", "1")
    assert half["held"] == [1, 20, 48, 48]
    assert half["spacing"] == [2.0, 1.0, 1.0]
    steps = len(alone["losses"])
    assert half["losses"][:steps] == pytest.approx(alone["losses"], rel=1e-3)
    assert sum(half["losses"][-steps:]) < 0.8 * sum(half["losses"][:steps])
    assert max(half["dice"]) > 0.1
