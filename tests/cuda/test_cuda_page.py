"""What a step takes on the device, on the page of results that `make test-cuda` prints."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from device_under_test import DEVICE, device_mesh, has_nccl_for, on_ranks
from results_page import FIGURES, hidden_share, page_lines, step_figures
from test_cuda_nets import NETS, _pair

from jigsaw.testing.played_device import PLAYED_DEVICE


def _figures(name, axes):
    whole, tiled, x, tile = _pair(name, device_mesh(**axes))

    def step():
        tiled(tile).square().mean().backward()

    def plain_step():
        whole(x).square().mean().backward()

    return step_figures(step, plain_step)


@on_ranks(1)
def _figures_of_one_rank(name):
    return _figures(name, {"lat": 1})


@on_ranks(2, backend=None if DEVICE == PLAYED_DEVICE else "nccl")
def _figures_of_two_ranks(name):
    return _figures(name, {"lat": 2})


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_step_takes(name, ranks, record_property):
    if ranks == 2 and not (DEVICE == PLAYED_DEVICE or has_nccl_for(2)):
        pytest.skip("fewer GPUs than ranks, and NCCL is older than 2.30")
    every = (_figures_of_one_rank if ranks == 1 else _figures_of_two_ranks)(name)
    assert all(0 < each["host_ms"] <= each["step_ms"] for each in every)
    assert DEVICE != "cuda" or every[0].keys() == set(FIGURES)
    record_property("figures", json.dumps(max(every, key=lambda each: each["step_ms"])))


def test_messages_are_hidden_where_kernels_run():
    assert hidden_share([], [(0, 1)]) is None
    assert hidden_share([(0, 4)], []) == 0.0
    assert hidden_share([(0, 4), (2, 6), (8, 10)], [(1, 2), (1, 3), (9, 20)]) == 3 / 8  # 2 of 6, and 1 of 2


def test_the_page_has_a_line_a_test_and_a_step():
    told = [("figures", json.dumps({"ranks": 2, "host_ms": 1.5, "step_ms": 2.0, "hidden": 0.8}))]
    passed = [
        SimpleNamespace(nodeid=f"tests/cuda/test_x.py::test_a_step[{name}]", when="call", user_properties=told)
        for name in ("unet", "tokens")
    ]
    skipped = [SimpleNamespace(nodeid="tests/cuda/test_x.py::test_a_graph", when="setup", user_properties=[])]
    lines = page_lines({"passed": passed, "skipped": skipped})
    assert "| a step | 2 | 0 | 0 |" in lines
    assert "| a graph | 0 | 0 | 1 |" in lines
    assert "| unet | 2 | 1.5 | 2.0 |  |  |  | 0.8 |" in lines
    assert page_lines({"skipped": skipped}) == []
    assert page_lines({"passed": [SimpleNamespace(nodeid="tests/x.py::test_y", when="call", user_properties=[])]}) == []
