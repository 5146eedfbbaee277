"""Memory that a convolution takes while it runs: the rule beside what torch's allocator gives."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from jigsaw.dryrun.conv_memory import scratch_bytes

aten = torch.ops.aten
F64 = torch.float64


def _most_allocated(call):
    """Return the most bytes that were allocated at one time, by torch's own profiler."""
    call()  # what a first call prepares is not its memory
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        kept = call()
    alive = highest = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            highest = max(highest, alive)
    del kept
    return highest


def _bytes_of(results):
    return sum(x.nbytes for x in (results if isinstance(results, tuple) else (results,)) if x is not None)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN chooses its blocks by the processor"
)
@pytest.mark.parametrize(
    ("shape", "outputs", "kernel", "groups", "is_last", "dtype", "stride"),
    [
        ((2, 32, 32, 32), 32, 3, 1, False, torch.float32, 1),
        ((2, 16, 16, 16, 16), 16, 3, 1, False, torch.float32, 1),
        ((1, 16, 16, 16, 16), 16, 3, 1, False, torch.float32, 1),  # a small volume by itself: columns
        ((1, 16, 9, 8, 8), 32, 3, 1, False, torch.float32, 2),
        ((3, 16, 8, 8, 8), 16, 3, 1, False, F64, 1),
        ((2, 16, 32, 32), 16, 3, 1, False, F64, 1),
        ((2, 16, 32, 32), 48, 1, 1, False, F64, 1),
        ((2, 64, 32, 32), 64, 3, 1, True, torch.float32, 1),
        ((2, 64, 32, 32), 64, 3, 4, True, torch.float32, 1),
        ((2, 96, 32, 32), 96, 3, 96, True, torch.float32, 1),
        ((2, 96, 32, 32), 96, 7, 96, True, torch.float32, 1),
    ],
)
def test_memory_of_a_convolution_is_as_measured(shape, outputs, kernel, groups, is_last, dtype, stride):
    dims = len(shape) - 2
    x = torch.randn(shape, dtype=dtype)
    if is_last:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(outputs, shape[1] // groups, *[kernel] * dims, dtype=dtype)
    geometry = [stride] * dims, [kernel // 2] * dims, [1] * dims, False, [0] * dims, groups
    forward = (x, weight, None, *geometry)
    y = aten.convolution.default(*forward)
    backward = (torch.randn_like(y), x, weight, [outputs], *geometry, [True, True, True])
    for operator, args in ((aten.convolution.default, forward), (aten.convolution_backward.default, backward)):
        measured = _most_allocated(lambda operator=operator, args=args: operator(*args))
        results = operator(*args)
        predicted = _bytes_of(results) + scratch_bytes(operator, args, results, on_processor=True)
        assert 0.9 <= predicted / measured <= 1.1, (operator, predicted, measured)


def test_columns_are_not_counted_for_an_accelerator():
    x, weight = torch.randn(1, 16, 16, 16, 16), torch.randn(16, 16, 3, 3, 3)
    args = (x, weight, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    sizes = [scratch_bytes(aten.convolution.default, args, x, on_processor=way) for way in (True, False)]
    assert sizes == [27 * x.nbytes, x.nbytes]
