"""What agreement costs one rank does not grow with the number of ranks; ranks are played, messages counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "control_plane.py"


@pytest.fixture(scope="module")
def rows_of():
    """Rows of the benchmark for the last rank and the first one, by ranks and call; a process of its own has no job."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--ranks", "64", "512", "--entries", "10"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {64: {}, 512: {}}
    for line in ran.stdout.splitlines():
        row = json.loads(line)
        first = {key.removeprefix("first_"): value for key, value in row.items() if key.startswith("first_")}
        rows[row["ranks"]][row["what"]] = row, first
    return rows


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


@pytest.mark.parametrize("call", ["save", "save again", "load", "save cut", "save cut again", "load cut"])
def test_a_checkpoint_costs_all_ranks_together_no_more_than_a_little_each(rows_of, call):
    few, many = (rows[call] for rows in rows_of.values())
    for last, _ in (few, many):
        assert last["sent"] + last["received"] < (64_000 if "load" in call else 30_000)
    for way in ("sent", "received"):  # of the first rank, which hears of all others
        assert many[1][way] <= 511 / 63 * 1.01 * few[1][way] + 1000  # numbers of ranks have a digit more


def test_a_save_of_unchanged_state_is_not_planned_again(rows_of):
    few, many = (rows["save again"] for rows in rows_of.values())
    for last, _ in (few, many):
        assert last["sent"] + last["received"] < 1000  # constant a rank: not even sizes of all ranks go to all
    # the first hears from each rank what it has written, and tells it that the checkpoint is whole
    assert many[1]["received"] < 511 * 600
    assert many[1]["sent"] < 511 * 40


def test_no_rank_of_many_sends_a_block_of_each_gradient_to_each_other(rows_of):
    few, many = (rows["step"][0] for rows in rows_of.values())
    assert few["block_messages"] == 2 * 63  # of two weights, which each rank uses in a column or a row
    assert many["block_messages"] == 0
    assert many["pairs"] <= 5 * 511  # to those who own a part of a product


def test_a_load_of_cut_weights_reads_rules_and_no_list_of_all_pieces(rows_of):
    few, many = (rows["load cut"][0] for rows in rows_of.values())
    # for each further rank no more than its file in the list of files, and not its 30 pieces
    assert many["received"] - few["received"] < 40 * (512 - 64)


def test_a_checkpoint_has_no_more_files_than_tensors(rows_of):
    assert [rows["save again"][0]["files"] for rows in rows_of.values()] == [40 + 3, 40 + 3]


CALLS = ["mesh", "shard", "from_local", "copies", "step", "parallelize", "save", "save again", "load"]
CALLS += ["save cut", "save cut again", "save weights", "load cut"]


@pytest.mark.parametrize("call", CALLS)
def test_a_row_has_every_column_and_none_grows_faster_than_the_ranks(rows_of, call):
    (few, few_first), (many, many_first) = (rows[call] for rows in rows_of.values())
    both_ends = {"cpu_s", "sent", "received", "messages", "pairs", "open_files", "store_requests"}
    assert few_first.keys() - {"block_messages"} == both_ends
    assert few.keys() >= both_ends | {"what", "ranks", "groups", "files"}
    assert few["groups"] == many["groups"] == 3
    # constant and O(log P) a rank
    assert (many["open_files"], many["store_requests"]) == (few["open_files"] + 6, few["store_requests"] + 12)
    # O(P): rings and trees of collectives, messages that each other rank sends the first, files of ranks
    for row_of_few, row_of_many in ((few, many), (few_first, many_first)):
        for column in ("messages", "pairs", "open_files", "store_requests"):
            assert row_of_many[column] <= 512 / 64 * row_of_few[column] + 100, column
    assert many["files"] <= max(512 + 3, few["files"])


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_rules_of_open_files_and_requests_are_what_real_ranks_need(ranks):
    command = [sys.executable, "-W", "ignore", "open_files.py", "--ways", "jigsaw", "--ranks", str(ranks)]
    rules = "import json, sys, open_files; print(json.dumps(open_files.connections_of_rank(int(sys.argv[1]))))"
    counted, ruled = (
        json.loads(subprocess.run(each, cwd=BENCHMARKS, capture_output=True, text=True, check=True).stdout)
        for each in (command, [sys.executable, "-W", "ignore", "-c", rules, str(ranks)])
    )
    # The rank that starts last asks once more, to tell the others. The rules say that it is the first rank.
    possible_requests = [(0, 0), (1, -1), (0, -1)]  # beyond the rules, when it is the first, the last or one between
    request_keys = ("store_requests", "first_store_requests")
    assert tuple(counted.pop(key) - ruled.pop(key) for key in request_keys) in possible_requests
    assert counted == {"ranks": ranks, "groups": "jigsaw", **ruled}
