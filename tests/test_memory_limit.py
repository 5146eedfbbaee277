"""The benchmark of samples that are too big for one rank runs at toy size, and what it refuses is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory_limit.py"


@pytest.mark.slow
def test_a_volume_on_one_rank_and_on_two(tmp_path):
    command = [sys.executable, SCRIPT, "--case", "volume", "--ranks", "1", "2", "--limit", "16", "--small"]
    ran = subprocess.run([*command, "--data", tmp_path], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["ranks"], line["limit_bytes"] > 0) for line in lines] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert all(line["losses"] == pytest.approx(lines[0]["losses"], abs=2e-5) for line in lines)
    assert lines[0]["losses"][-1] < lines[0]["losses"][0]
    assert all(line["resident_bytes"] > 0 and 0 < line["data_bytes"] < 16 * 2**30 for line in lines)
