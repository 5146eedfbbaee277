"""One thread a process: the ranks are the parallelism, and a test must not depend on the machine's core count."""

import os
from collections import defaultdict

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

LONG_SERIES = 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark every second case of a series of more than `LONG_SERIES` as slow, which `make check` runs, and what is
    nightly, too.
    """
    series = defaultdict(list)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            series[item.path, item.originalname].append(item)
    for cases in series.values():
        for case in cases[1::2] if len(cases) > LONG_SERIES else ():
            case.add_marker(pytest.mark.slow)
