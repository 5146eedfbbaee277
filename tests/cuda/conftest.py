"""Skipped where there is no GPU, with the reason; `make test-cuda` runs them."""

import pytest
import torch
from device_under_test import DEVICE


def pytest_collection_modifyitems(items):
    for item in items:
        if "cuda" not in item.path.parent.name:
            continue
        if DEVICE == "cuda" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU here"))
        elif DEVICE != "cuda" and item.get_closest_marker("gpu_only"):
            item.add_marker(pytest.mark.skip(reason="of a GPU alone, and JIGSAW_TEST_DEVICE is another"))
