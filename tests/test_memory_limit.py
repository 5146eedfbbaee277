"""The benchmark of samples that are too big for one rank runs at toy size, and what it refuses is told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tifffile
import torch

from jigsaw.testing import run_on_ranks, world_mesh

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory_limit.py"


def _script():
    """The benchmark as a module, on ranks too."""
    spec = importlib.util.spec_from_file_location("memory_limit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain_losses(file, net):
    """Three steps by plain torch on the whole slide, in float64."""
    whole = torch.from_numpy(tifffile.imread(file)).double().permute(2, 0, 1)[None] / 255
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(net(whole), torch.tensor([1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def _losses_on_tiles(folder):
    torch.manual_seed(0)
    return [loss.item() for loss in _script().slide_steps(folder, world_mesh(y=2), small=True)]


@pytest.mark.slow  # each rank imports what optimizers need
def test_a_slide_on_two_ranks_as_in_plain_torch(tmp_path):
    """Each rank itself asserts which bytes of the file it reads."""
    script = _script()
    file = tmp_path / script.slide_file(small=True)
    script.write_slide(file)
    torch.manual_seed(0)
    losses = list(_plain_losses(file, script.slide_net().double()))
    assert losses[-1] < losses[0]
    for found in run_on_ranks(2, _losses_on_tiles, tmp_path):
        assert found == pytest.approx(losses, rel=1e-5)


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


@pytest.mark.slow
def test_a_task_that_needs_the_whole_volume_on_one_rank_and_on_two():
    command = [sys.executable, SCRIPT.with_name("whole_volume.py"), "--sizes", "3", "2", "2", "--limit", "16"]
    ran = subprocess.run([*command, "--ranks", "2"], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["way"], line["ranks"]) for line in lines] == [
        ("whole", 1),
        ("whole", 1),
        ("whole", 2),
        ("patches", 1),
    ]
    whole = [line for line in lines if line["way"] == "whole"]
    assert all(line["last_losses"] == pytest.approx(whole[0]["last_losses"], abs=2e-4) for line in whole)
    assert all(line["right"] == pytest.approx(whole[0]["right"], abs=0.01) for line in whole)
