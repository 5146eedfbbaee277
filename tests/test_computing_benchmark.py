"""The benchmarks of computing, strategies and links at toy size; the first two assert that who is timed is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def lines_of(script: str, *words: str) -> list[dict]:
    ran = subprocess.run([sys.executable, FOLDER / script, *words], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.nightly
def test_those_who_are_timed_are_right():
    found = lines_of("computing.py", "--small", "--rounds", "1", "--case", "mlp")
    assert [line["engine"] for line in found if "refused" not in line] == [line["engine"] for line in found]
    assert all(line["max_rel_err"] < 1e-5 and line["cpu_s"] > 0 for line in found)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_strategy_is_right():
    found = lines_of("strategies.py", "--small", "--rounds", "1", "--net", "transformer", "experts")
    assert not [line for line in found if "refused" in line]
    assert all(line["max_rel_err"] < 1e-4 and line["peak_bytes"] > line["state_bytes"] > 0 for line in found)
    cut = [line for line in found if line["engine"] == "jigsaw: batch, weights 1/P"]
    assert 0.5 <= cut[0]["state_bytes"] / found[0]["state_bytes"] < 0.51


@pytest.mark.slow
@pytest.mark.nightly
def test_stages_wait_at_least_as_theory_says():
    found = lines_of("pipeline_waits.py", "--ranks", "2", "--rounds", "1", "--seconds", "0.03")
    assert len(found) == 6 and all(line["step_s"] > line["work_s"] for line in found)
    assert all(line["waits"] > 0.9 * line["theory"] for line in found if line["theory"])


@pytest.mark.slow
def test_a_block_costs_what_the_formula_says():
    whole, cut, again = lines_of("tensor_blocks.py", "--ranks", "2", "--block", "GPTBlock")
    assert [line["flop"] for line in (whole, cut, again)] == [1, 1, 1]
    assert max(whole["bytes"], cut["bytes"]) < 1.01 and 1.25 <= again["bytes"] < 1.26  # two gathers beside four sums
    assert again["activations"] < 1 < cut["activations"] < 1.1 < whole["activations"]


@pytest.mark.slow
def test_experts_are_asked_more_evenly_with_their_loss():
    found = lines_of("expert_load.py", "--steps", "40")
    plain, evened = found[1], found[-1]
    assert evened["busiest_expert"] < plain["busiest_expert"]


@pytest.mark.slow
def test_ranks_on_two_hosts_send_what_the_formula_says():
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("network namespaces need root")
    (found,) = lines_of("links.py", "--small", "--rounds", "1", "--seconds", "0.05", "--case", "ring attention")
    assert found["counted_over_formula"] == 1.0
    assert 1.0 < found["link_over_formula"] < 1.2


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_dry_run_is_compared_with_ranks():
    *rows, summary = lines_of("dry_run.py", "--small", "--rounds", "1", "--ranks", "1,2", "--nets", "unet")
    assert len(rows) == summary["cases"] == 12
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in rows)
