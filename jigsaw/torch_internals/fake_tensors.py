"""Private classes of torch for tensors without values.  Public: the meta device, which forgets the real device."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from jigsaw.torch_internals.private_names import torch_imports

with torch_imports():
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch._subclasses.fake_tensor import log as _log_of_failures  # it prints what raises, though it is caught
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator; public is nothing that does

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "forget_real_view",
    "note_real_view",
    "quiet_failures",
    "real_view",
]

_REAL_VIEW = "_jigsaw_real_view"


def note_real_view(x: Tensor, real: Tensor) -> None:
    """Note the tensor with values that a tensor without them stands for."""
    setattr(x, _REAL_VIEW, real)


def forget_real_view(x: Tensor) -> None:
    """Forget it, because the tensor without values is changed."""
    vars(x).pop(_REAL_VIEW, None)


def real_view(x: Any) -> Any:
    """Return the tensor with values that a tensor without them stands for, where one was noted, else itself."""
    return getattr(x, _REAL_VIEW, x) if isinstance(x, FakeTensor) else x


@contextmanager
def quiet_failures() -> Generator[None]:
    """Let operators that raise in the block say so by their exception alone; nothing warns."""
    before, _log_of_failures.disabled = _log_of_failures.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _log_of_failures.disabled = before
