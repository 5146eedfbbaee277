"""Torch's own samples of every function and module, on random cuts: answered as plain torch does, or refused alike."""

from __future__ import annotations

import os
import random

import pytest
from opinfo_cases import AXES, all_infos, answer_samples

from jigsaw.testing import run_on_ranks

PARTS = 3
SEED = int(os.environ.get("JIGSAW_SAMPLES_SEED", "0"))  # another one is another sample of each function, cut elsewhere


def _faults(ranks, names, seed, path, patience, halos=False):
    """What was neither answered nor refused alike, of one sample of each function."""
    print(f"JIGSAW_SAMPLES_SEED={seed}")
    try:
        done = run_on_ranks(ranks, answer_samples, ranks, names, 1, seed, str(path), halos=halos, timeout=patience)
    except Exception as error:  # ranks that wait for each other, which JIGSAW_DEBUG=1 explains
        error.add_note(f"the sample under way was of {path.read_text() if path.exists() else 'none yet'}")
        raise
    findings = done[0]
    assert any(f.how == "answered" for f in findings)
    wrong = [f for f in findings if f.how not in ("answered", "refused")]
    return "\n".join(f"{f.how}: {f.name}, sample {f.sample}: {f.text}" for f in wrong)


@pytest.mark.slow
def test_some_samples_of_torch_are_answered_or_refused_alike(tmp_path):
    names = random.Random(0).sample([name for name, _ in all_infos()], 40)
    assert not _faults(3, names, 0, tmp_path / "under_way", 250)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_some_samples_of_torch_on_tiles_that_hold_rows_of_their_neighbors(ranks, tmp_path):
    names = random.Random(1).sample([name for name, _ in all_infos()], 60)
    assert not _faults(ranks, names, SEED, tmp_path / "under_way", 500, halos=True)


def _cases():
    """Each function on some mesh of several ranks in `make check`; on all of them nightly."""
    cases = [(ranks, part) for ranks in AXES for part in range(PARTS)]
    return [case if case[0] == 2 + case[1] % 3 else pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "part"), _cases())
def test_every_function_of_torch_is_answered_or_refused_alike(ranks, part, tmp_path):
    names = [name for name, _ in all_infos()][part::PARTS]
    assert not _faults(ranks, names, SEED, tmp_path / "under_way", 800)
