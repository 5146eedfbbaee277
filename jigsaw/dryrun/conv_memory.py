"""Memory that a convolution takes while it runs, beside its results.

The rules are those of torch's own kernels and of oneDNN with AVX-512, as `torch.profiler` shows them with one thread.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from jigsaw.torch_internals.dispatch import is_conv_by_columns

aten = torch.ops.aten

_CHANNEL_BLOCK = 16
_WIDE_KERNEL = 5
"""Kernels of depthwise convolutions from which on oneDNN sums the gradient of channels-last weights in blocks."""


def scratch_bytes(func: Any, args: Any, out: Any, on_processor: bool) -> int:
    """Return the bytes that an operator takes while it runs; 0 for all but convolutions."""
    if func is aten.convolution.default:
        (x, weight), y, geometry, is_backward = args[:2], out, args[3:9], False
    elif func is aten.convolution_backward.default:
        (y, x, weight), geometry, is_backward = args[:3], args[4:10], True
    else:
        return 0
    if on_processor and is_conv_by_columns(x, weight, geometry):
        return _column_bytes(x, weight, y)
    if on_processor and (_is_channels_last(x) or _is_channels_last(weight)):
        return _weight_copies(weight, is_backward)
    # Values and gradients are copied to blocks of channels, and results from there unless they fill their blocks.
    if is_backward:
        return _in_blocks(x) + _in_blocks(y)
    return _in_blocks(x) + (_in_blocks(y) if y.shape[1] % _CHANNEL_BLOCK else 0)


def _column_bytes(x: Tensor, weight: Tensor, y: Tensor) -> int:
    """Return the bytes of columns: for each value of an output channel all values of the input that it is made of."""
    columns = len(x) * prod(weight.shape[1:]) * prod(y.shape[2:]) * x.itemsize
    is_pointwise = prod(weight.shape[2:]) == 1 and x.shape[2:] == y.shape[2:]
    return 0 if is_pointwise else columns


def _weight_copies(weight: Tensor, is_backward: bool) -> int:
    """Return the bytes of weights, in the order that oneDNN wants, where the values stay as they are."""
    if weight.shape[1] > 1:
        return (3 if is_backward else 2) * weight.nbytes
    if is_backward and min(weight.shape[2:]) >= _WIDE_KERNEL:
        return weight.nbytes * (1 + _CHANNEL_BLOCK**2)  # each group filled up to a block of inputs and of outputs
    return weight.nbytes


def _in_blocks(x: Tensor) -> int:
    channels = -(-x.shape[1] // _CHANNEL_BLOCK) * _CHANNEL_BLOCK
    return x.nbytes // x.shape[1] * channels


def _is_channels_last(x: Tensor) -> bool:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return order is not None and x.is_contiguous(memory_format=order) and not x.is_contiguous()
