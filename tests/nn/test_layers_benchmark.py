"""The benchmark of layers runs at toy size, and its numbers that are not times are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layers.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["conv", *(pytest.param(case, marks=pytest.mark.nightly) for case in ("unet", "mixer", "attention", "linear"))],
)
def test_toy_run(case):
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--case", case, "--small", "--rounds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    plain, alone, apart, both = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert [(c["system"], c["ranks"]) for c in (plain, alone, apart, both)] == [
        ("torch", 1),
        ("jigsaw", 1),
        ("apart", 2),
        ("jigsaw", 2),
    ]
    assert {"case", "step_s", "speedup", "of_limit", "sent_bytes", "peak_bytes_per_rank", "max_abs_err"} <= set(both)
    assert plain["sent_bytes"] == alone["sent_bytes"] == apart["sent_bytes"] == 0 < both["sent_bytes"]
    assert both["max_abs_err"] < 1e-4
    if case == "conv":
        assert alone["max_abs_err"] == 0.0
        assert both["peak_bytes_per_rank"] < 0.55 * plain["peak_bytes_per_rank"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["blocks-2d", *(pytest.param(case, marks=pytest.mark.nightly) for case in ("blocks-3d", "unet-2d"))]
)
def test_toy_run_of_memory(case):
    command = [sys.executable, str(SCRIPT.with_name("memory.py")), "--case", case, "--small", "--rounds", "1"]
    ran = subprocess.run([*command, "--slabs", "6"], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    plain, _, alone, both, chunked = lines
    assert all(c["max_abs_err"] < 1e-4 for c in lines)
    assert alone["held_bytes"] < (0.5 if case == "unet-2d" else 0.01) * plain["held_bytes"]
    assert chunked["held_bytes"] < (0.5 if case == "unet-2d" else 0.01) * both["held_bytes"]
    if case == "blocks-2d":
        assert alone["peak_bytes"] < 0.4 * plain["peak_bytes"]
        assert chunked["peak_bytes"] < 0.5 * both["peak_bytes"]


@pytest.mark.slow
@pytest.mark.nightly
def test_toy_run_of_recomputing():
    command = [sys.executable, str(SCRIPT.with_name("recomputing.py")), "--small", "--rounds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert all(c["max_abs_err"] < 1e-4 for c in lines)
    for ranks in (1, 2):
        by_way = {c["way"]: c for c in lines if c["ranks"] == ranks}
        assert {c["halo_bytes"] for c in by_way.values()} == {by_way["plain"]["halo_bytes"]}
        peaks = {way: c["peak_bytes"] / by_way["plain"]["peak_bytes"] for way, c in by_way.items()}
        assert peaks["by block"] < 0.6 and peaks["selective"] < 0.95 and peaks["offloaded"] < 0.5
        assert peaks["accumulated"] < 0.4
