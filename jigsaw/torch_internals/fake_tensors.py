"""Private classes of torch for tensors without values.  Public: the meta device, which forgets the real device."""

from __future__ import annotations

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
]
