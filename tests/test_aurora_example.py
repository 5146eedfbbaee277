"""The Aurora example: a published net on tiles is what it is in one process, and its dry run has every number."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "aurora"


def needs_aurora(test):
    missing = importlib.util.find_spec("aurora") is None
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="microsoft-aurora is missing: make aurora")(test))


def printed(*command: object) -> str:
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_aurora
def test_four_ranks_train_as_one_process_does():
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4)
    told = printed(*launch, EXAMPLE / "train.py", "--check", "--steps", 2, "--degrees", 5, "--checkpoint")
    losses = re.findall(r"step \d  loss (\S+)", told)
    assert losses[:2] == losses[2:]
    assert re.search(r"losses differ by \S+ of them, the gradients of 236 weights by \d\S* at most", told)
    rows = [line.split() for line in told.splitlines() if re.match(r" +\d +\d+:\d+ x ", line)]
    assert [row[1] + row[3] for row in rows] == ["0:200:36", "0:2036:72", "20:370:36", "20:3736:72"]
    assert all(float(number) > 0 for row in rows for number in row[4:])


@needs_aurora
def test_a_dry_run_knows_the_memory_of_a_rank():
    told = printed(EXAMPLE / "full_size.py", "--mesh", "lat=2", "--size", "tiny", "--degrees", 1.5, "--ways", "plain")
    (row,) = (line.split("|")[1:-1] for line in told.splitlines() if "lat=2" in line)
    assert "Remark" not in told
    peak, _, _, _, activations = map(float, row[3:8])
    assert peak >= activations > 0


@pytest.mark.slow
def test_a_torchvision_of_another_torch_can_be_imported(tmp_path):
    """As pip pairs them: the operators do not load, and the package describes two of them when it is imported."""
    (tmp_path / "torchvision").mkdir()
    describe = (
        "import torch\nfor name in ('nms', 'qnms'):\n    torch.library.register_fake('torchvision::' + name)(len)\n"
    )
    (tmp_path / "torchvision" / "__init__.py").write_text(describe)

    def import_in_new_process(*names):
        path = os.pathsep.join((str(tmp_path), str(EXAMPLE)))
        command = [sys.executable, "-c", f"import {', '.join(names)}"]
        return subprocess.run(
            command, check=False, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )

    assert "operator torchvision::nms does not exist" in import_in_new_process("torchvision").stderr
    assert import_in_new_process("torchvision_ops", "torchvision").returncode == 0
