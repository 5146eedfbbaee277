"""What agreement costs one rank does not grow with the number of ranks; ranks are played, messages counted."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    """Rows of the benchmark for the last rank and the first one."""
    sys.path.insert(0, str(FOLDER))
    plane = importlib.import_module("control_plane")
    sys.path.remove(str(FOLDER))
    return {ranks: plane.play_ranks(ranks, 10, tmp_path_factory.mktemp("saves")) for ranks in (64, 512)}


@pytest.mark.parametrize("call", ["mesh", "shard", "from_local", "copies"])
def test_agreement_sends_constant_bytes_a_rank(rows_of, call):
    for last, first in (rows[call] for rows in rows_of.values()):
        assert 0 < max(last["sent"], first["sent"]) <= 4 * 2 * 32  # at most four all-reduces of 32 bytes
        assert last["received"] == last["sent"]


def test_a_model_is_compared_by_constant_bytes_a_rank(rows_of):
    few, many = (rows["parallelize"] for rows in rows_of.values())
    weights = 5 * 4 * (4 + 2)  # of ten parameters, which come from the first rank
    assert few[0]["received"] <= many[0]["received"] <= 2 * 32 + weights
    assert many[1]["sent"] <= 2 * 32 + 9 * weights  # down a tree of nine levels


@pytest.mark.parametrize("call", ["save", "save again", "load"])
def test_a_checkpoint_costs_all_ranks_together_no_more_than_a_little_each(rows_of, call):
    few, many = (rows[call] for rows in rows_of.values())
    for last, _ in (few, many):
        assert last["sent"] + last["received"] < (64_000 if call == "load" else 30_000)
    for way in ("sent", "received"):  # of the first rank, which hears of all others
        assert many[1][way] <= 511 / 63 * few[1][way] + 1000


def test_a_checkpoint_has_no_more_files_than_tensors(rows_of):
    assert [rows["save again"][1]["files"] for rows in rows_of.values()] == [40 + 3, 40 + 3]


def test_the_benchmark_prints_a_row_a_call():
    command = [sys.executable, "-W", "ignore", str(FOLDER / "control_plane.py"), "--ranks", "8", "--entries", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.count('"ranks": 8') == 8
    assert '"what": "save again"' in ran.stdout
