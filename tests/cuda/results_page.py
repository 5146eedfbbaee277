"""One page of results: what passed on the device, and what a step takes there."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from device_under_test import DEVICE, settle

Span = tuple[float, float]
FIGURES = ("ranks", "host_ms", "step_ms", "memory_mib", "plain_mib", "messages_ms", "hidden")


def hidden_share(messages: Sequence[Span], kernels: Sequence[Span]) -> float | None:
    """The share of the time of messages in which kernels run, too; None where there are no messages."""
    whole = _merged(messages)
    total = sum(stop - start for start, stop in whole)
    both = sum(max(min(b, d) - max(a, c), 0.0) for a, b in whole for c, d in _merged(kernels))
    return both / total if total else None


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def step_figures(step, plain_step, rounds=5):
    """Milliseconds of the host and of a step, memory beside that of plain torch, messages behind kernels.

    The host has told the device all of a step after `host_ms`; the device is done with it after `step_ms`.  Memory and
    what the profiler sees of the device are a GPU's alone.
    """
    for warm in (step, step, plain_step):
        warm()
    settle()
    host, whole = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        settle()
        whole.append(time.perf_counter() - began)
    figures = {
        "ranks": torch.distributed.get_world_size(),
        "host_ms": round(1000 * statistics.median(host), 2),
        "step_ms": round(1000 * statistics.median(whole), 2),
    }
    if DEVICE == "cuda":
        messages, kernels = _device_spans(step)
        share = hidden_share(messages, kernels)
        figures |= {
            "memory_mib": _peak_mib(step),
            "plain_mib": _peak_mib(plain_step),
            "messages_ms": round(sum(stop - start for start, stop in _merged(messages)) / 1000, 2),
            "hidden": None if share is None else round(share, 2),
        }
    return figures


def _peak_mib(step):
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    step()
    return round((torch.cuda.max_memory_allocated() - base) / 2**20, 1)


def _device_spans(step):
    """When messages and when kernels run on the GPU in a step, in microseconds, as the profiler saw it."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        settle()
    spans = {True: [], False: []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    return spans[True], spans[False]


def page_lines(reports):
    """The lines of the page, none where nothing ran, from pytest's reports by outcome; figures are properties."""
    outcomes, figures = {}, []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in reports.get(outcome, ()):
            if "tests/cuda/" in report.nodeid and (report.when == "call" or outcome != "passed"):
                outcomes.setdefault(report.nodeid.split("::")[-1].split("[")[0], Counter())[outcome] += 1
                of_test = report.nodeid.rpartition("[")[2].rstrip("]")
                figures += [(of_test, json.loads(told)) for name, told in report.user_properties if name == "figures"]
    if not any(counts["passed"] or counts["failed"] or counts["error"] for counts in outcomes.values()):
        return []
    name = torch.cuda.get_device_name() if DEVICE == "cuda" and torch.cuda.is_available() else DEVICE
    lines = [
        f"device {name}, torch {torch.__version__}",
        "",
        "| test | passed | failed | skipped |",
        "|---|---|---|---|",
    ]
    for test, counts in sorted(outcomes.items()):
        failed = counts["failed"] + counts["error"]
        lines.append(
            f"| {test.removeprefix('test_').replace('_', ' ')} | {counts['passed']} | {failed} | {counts['skipped']} |"
        )
    lines += ["", f"| step | {' | '.join(FIGURES)} |", "|---" * (1 + len(FIGURES)) + "|"]
    for test, told in figures:
        cells = ["" if told.get(key) is None else str(told[key]) for key in FIGURES]
        lines.append(f"| {test} | {' | '.join(cells)} |")
    return lines
