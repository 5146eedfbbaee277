"""Copies of models without values, for runs on paper."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jigsaw.nn.weights import is_dtensor
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.fake_tensors import FakeTensor, FakeTensorMode


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
    return tuple(
        cache
        for cache in gc.get_objects()
        if type(cache) is kind
        and any(isinstance(x, FakeTensor) for kept in gc.get_referents(cache) for x in pytree.tree_leaves(kept))
    )
