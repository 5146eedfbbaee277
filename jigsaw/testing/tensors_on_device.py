"""Tests that are written for CPUs, on GPUs: tensors that are made without a device lie on that of the world."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_FACTORIES = (
    "tensor as_tensor from_numpy zeros ones empty full rand randn randint randperm arange linspace logspace eye "
    "hann_window tril_indices triu_indices"
).split()

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__)
_JIGSAW = _HERE.parent.parent


def make_tensors_on(device: str) -> None:
    """Let test bodies and the modules that they construct make their tensors on that device, for this process's life.

    Values are made on the CPU and then copied, so they are those of a run on CPUs, but for what modules draw in place.
    What jigsaw itself makes is left alone: it must lie on the device of what it is given, and a test shows where it
    does not.
    """
    for name in _FACTORIES:
        setattr(torch, name, _made_on(device, getattr(torch, name)))


def _made_on(device: str, factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        tensor = factory(*args, **kwargs)
        is_told = kwargs.get("device") is not None or kwargs.get("out") is not None
        if is_told or not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or not _is_of_a_test():
            return tensor
        moved = tensor.detach().to(device)
        return moved.requires_grad_(tensor.requires_grad)

    return make


def _is_of_a_test() -> bool:
    """Say whether the call comes from a test's own code, or from a module that is being constructed."""
    frame, is_of_jigsaw = inspect.currentframe(), False
    while frame is not None:  # from the innermost call on
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        if path != _HERE and path.is_relative_to(_JIGSAW):
            is_of_jigsaw = True
        elif path != _HERE and not path.is_relative_to(_TORCH):
            return not is_of_jigsaw
        frame = frame.f_back
    return False
