"""Kernels of a dry run, run once more with memory and timed, because peaks do not predict a processor's times.

On a CPU the same number of operations takes from one to several times as long, depending on library, shape, strides and
caches.  A step has a hundred or two different kernels; each runs a few times.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw.torch_internals import pytree


@dataclass(frozen=True)
class TensorLook:
    """Properties of a tensor that a kernel's speed depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made_tensor(self) -> Tensor:
        """Return a similar tensor with values; integers are 0, valid indices of any tensor."""
        reach = max(1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)), 0)
        buffer = torch.empty(reach, dtype=self.dtype)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values = _values_of(self.dtype)
            whole = reach // len(values) * len(values)
            buffer[:whole].view(-1, len(values)).copy_(values)
            buffer[whole:].copy_(values[: reach - whole])
        else:
            buffer.zero_()
        return buffer.as_strided(self.shape, self.stride)


@lru_cache
def _values_of(dtype: torch.dtype) -> Tensor:
    """Return values from 0.5 to 1.5 in an order that a processor cannot predict, without denormals, which are slow."""
    values = torch.rand(2**20, generator=torch.Generator().manual_seed(0))
    return values.add_(0.5).to(dtype)


@dataclass(frozen=True)
class KernelCall:
    """An operator with the arguments of a call, tensors as `TensorLook`."""

    operator: Any
    leaves: tuple[Hashable, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, operator: Any, args: Any, kwargs: Any) -> KernelCall:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        looks = (TensorLook(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        return cls(operator, tuple(looks), spec)

    def made_arguments(self) -> Any:
        leaves = [leaf.made_tensor() if isinstance(leaf, TensorLook) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


_KNOWN: dict[KernelCall, float | None] = {}
_COLD_BYTES = 2**26  # bytes of arguments that are used in turn, so that none is still in the caches, as in a step
_LEAST_SECONDS, _MOST_CALLS = 1e-3, 2**14


def timed_kernel(call: KernelCall) -> float | None:
    """Return the processor seconds of a kernel here, by one thread; None for one that cannot run by itself."""
    if call not in _KNOWN:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                _KNOWN[call] = _timed(call)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):  # not on values that are made up
            _KNOWN[call] = None
        finally:
            torch.set_num_threads(threads)
    return _KNOWN[call]


def forget_kernels() -> None:
    """Forget all times, because they are of the machine as it was then."""
    _KNOWN.clear()


def _timed(call: KernelCall, times: int = 3) -> float:
    size = sum(torch.Size(x.shape).numel() * x.dtype.itemsize for x in call.leaves if isinstance(x, TensorLook))
    turns = [call.made_arguments() for _ in range(max(1, min(4, _COLD_BYTES // max(size, 1))))]
    run = call.operator
    for args, kwargs in turns:
        run(*args, **kwargs)
    times_of_calls: list[float] = []
    calls = 1
    while len(times_of_calls) < times:
        since = time.thread_time()
        for at in range(calls):
            args, kwargs = turns[at % len(turns)]
            run(*args, **kwargs)
        seconds = time.thread_time() - since
        if seconds < _LEAST_SECONDS and not times_of_calls and calls < _MOST_CALLS:
            calls *= 2
        else:
            times_of_calls.append(seconds / calls)
    return sorted(times_of_calls)[times // 2]
