"""Training steps that others published, beside the dry run's seconds of them."""

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

published = importlib.import_module("published")

RUNS = {run["name"]: run for run in published.published_runs()}
# a share is from the first; no share is from the others
QUICK = ("7b a100 8 x 2048", "7b h100 8 x 8192", "7b h100 128 x 2048", "Llama 8b, 8")


def _results():
    lines = [json.loads(line) for line in published.RESULTS.read_text().splitlines()[1:]]
    return {line["case"]: line for line in lines}


def _marks_of(run):
    """Of those without a pipeline every third is played in `make check`, and all are nightly."""
    if run["name"] in QUICK:
        return ()
    is_third = list(RUNS).index(run["name"]) % 3 == 0
    return (pytest.mark.slow,) if is_third and "pipe" not in run["mesh"] else (pytest.mark.nightly,)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks_of(run)) for name, run in RUNS.items()])
def test_the_dry_run_of_a_published_step(name):
    run = RUNS[name]
    seconds, _ = published.predicted_step(run)
    assert seconds == pytest.approx(_results()[name]["predicted"], rel=1e-3), "make the page anew"
    _assert_as_listed(run, seconds / run["seconds"])


def _assert_as_listed(run, ratio):
    """A run that is known to be off is listed with its ratio, and is taken from the list when it holds."""
    is_inside = abs(ratio - 1) <= published.MOST_OFF[run["kind"]]
    if "off" in run:
        assert not is_inside, "this run holds now: take `off` from it"
        assert ratio == pytest.approx(run["off"], abs=0.01)
    else:
        assert is_inside, ratio


def test_published_results_are_complete_and_as_listed():
    results = _results()
    assert list(results) == list(RUNS) and len(RUNS) >= 20
    for name, run in RUNS.items():
        _assert_as_listed(run, results[name]["predicted"] / run["seconds"])
    sources = json.loads(published.RUNS.read_text())["sources"]
    assert {run["source"] for run in RUNS.values()} == set(sources)
    assert all(source["url"].startswith("https://") for source in sources.values())
    held_back = [run for run in RUNS.values() if "used_for" not in run]
    assert len(held_back) >= len(RUNS) / 2
