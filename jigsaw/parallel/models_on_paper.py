"""Copies of models without values, for runs on paper."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jigsaw.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from jigsaw.torch_internals.placements import is_dtensor


def copy_without_values(model: nn.Module, mode: FakeTensorMode, device_type: str) -> nn.Module:
    """Return a deep copy whose parameters and buffers have no values, in a fake mode."""
    with mode:
        memo: dict[int, Any] = {id(x): _without_values(x, device_type) for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _without_values(x: Tensor, device_type: str) -> Tensor:
    if is_dtensor(x):
        dtensor: Any = type(x.detach())  # the class, without an import: its module is loaded if a DTensor exists
        local, placement = _without_values(x.to_local().detach(), device_type), (x.device_mesh, x.placements)
        empty: Tensor = dtensor.from_local(local, *placement, run_check=False, shape=x.shape, stride=x.stride())
    else:
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device_type)
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty


@contextmanager
def unchanged_draws() -> Generator[None]:
    """Restore the random states of torch, Python and numpy, because a single process runs no model without values."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what models draw from)
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def caches_on_paper() -> tuple[Any, ...]:
    """Return the caches of `functools` that keep tensors without values, for the next call that has some."""
    kind = type(lru_cache(_without_values))
    # each cache refers to its type; a list of all objects would take twice as long
    caches: list[Any] = [each for each in gc.get_referrers(kind) if type(each) is kind]
    return tuple(c for c in caches if c.cache_info().currsize and _has_tensor_on_paper(gc.get_referents(c)))


def _has_tensor_on_paper(values: Iterable[Any]) -> bool:
    """Say whether such a tensor is among values, or within their tuples, lists and dicts.

    Many thousand keys are looked at, for which `pytree` would take seconds.
    """
    for x in values:
        kind = type(x)
        if issubclass(kind, FakeTensor):
            return True
        if issubclass(kind, (tuple, list)) and _has_tensor_on_paper(x):
            return True
        if issubclass(kind, dict) and _has_tensor_on_paper((*x, *x.values())):
            return True
    return False
