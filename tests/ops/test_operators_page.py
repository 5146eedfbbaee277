"""docs/operators.md says what the closed table answers, as it is."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_functions_is_not_stale():
    page = (DOCS / "operators.md").read_text()
    if f"torch {torch.__version__.split('+')[0]}," not in page:
        pytest.skip("the page was made with another torch, which has other functions")
    made = runpy.run_path(str(DOCS / "list_operators.py"))["operators_page"]()
    assert made == page, "run python docs/list_operators.py > docs/operators.md"
