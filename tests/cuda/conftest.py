"""Skipped where there is no GPU, with the reason; `make test-cuda` runs them.

On the played device they are slow, because that is compiled first, which takes minutes on a busy machine.
"""

import pytest
import torch
from device_under_test import DEVICE
from results_page import page_lines

from jigsaw.testing.played_device import PLAYED_DEVICE


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    for item in items:
        if "cuda" not in item.path.parent.name:
            continue
        if DEVICE == "cuda" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU here"))
        elif DEVICE != "cuda" and item.get_closest_marker("gpu_only"):
            item.add_marker(pytest.mark.skip(reason="of a GPU alone, and JIGSAW_TEST_DEVICE is another"))
        if DEVICE == PLAYED_DEVICE:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))


def pytest_terminal_summary(terminalreporter):
    """The page of results, behind everything else."""
    lines = page_lines(terminalreporter.stats)
    if lines:
        terminalreporter.section("results on the device")
        for line in lines:
            terminalreporter.write_line(line)
