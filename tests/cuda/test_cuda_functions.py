"""Torch's own samples of every function and module on tiles of a GPU, answered as plain torch does there."""

from __future__ import annotations

import random

import pytest
from device_under_test import DEVICE
from opinfo_cases import all_infos, answer_samples

from jigsaw.testing import run_on_ranks

PARTS = 3


def _names():
    """All but what compiles the text of a kernel, which no function of tiles sees; no sparse tensors are played."""
    left_out = ("jiterator",) if DEVICE == "cuda" else ("jiterator", "sparse.")
    return [name for name, _ in all_infos() if not name.startswith(left_out)]


def _faults(ranks, names, path, patience):
    sizes = ranks, names, 1, 0, str(path), DEVICE
    findings = run_on_ranks(ranks, answer_samples, *sizes, timeout=patience, device=DEVICE)[0]
    assert any(f.how == "answered" for f in findings)
    wrong = [f for f in findings if f.how not in ("answered", "refused")]
    return "\n".join(f"{f.how}: {f.name}, sample {f.sample}: {f.text}" for f in wrong)


def test_some_functions_on_ranks_that_share_a_gpu(tmp_path):
    names = random.Random(1).sample(_names(), 20)
    assert not _faults(2, names, tmp_path / "under_way", 250)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_function_on_a_gpu(ranks, part, tmp_path):
    names = _names()[part::PARTS]
    assert not _faults(ranks, names, tmp_path / "under_way", 800)
