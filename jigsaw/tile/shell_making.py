"""The making of shells, and changes of torch that are made with the first of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from jigsaw.torch_internals.autograd import make_wrapper

# Types that autograd can differentiate.  Their shells require grad, so that an autograd.Function that meets a tile
# makes a node, which `check_no_history` finds.
_DIFFERENTIABLE = frozenset(
    d for d in vars(torch).values() if isinstance(d, torch.dtype) and (d.is_floating_point or d.is_complex)
)
META_DEVICE = torch.device("meta")  # on meta no kernel runs, and `x.data = tile` takes over no memory


def make_shell(cls: type, shape: torch.Size, dtype: torch.dtype, needs_node: bool = True) -> Any:
    """Return a shell of that class; C++ code that asks for its strides comes to ``__torch_dispatch__``."""
    return _make_shell(
        cls,
        shape,
        dtype=dtype,
        device=META_DEVICE,
        requires_grad=needs_node and dtype in _DIFFERENTIABLE,
        dispatch_sizes_strides_policy="strides",
    )


_patches: list[Callable[[], None]] = []


def at_first_tile(patch: Callable[[], None]) -> Callable[[], None]:
    """Register a change of torch that only tiles need, to be made with the process' first tile."""
    _patches.append(patch)
    return patch


def _make_first_shell(*args: Any, **kwargs: Any) -> Any:
    global _make_shell
    with _first_lock:
        while _patches:
            _patches.pop()()
        _make_shell = make_wrapper
    return make_wrapper(*args, **kwargs)


_make_shell: Any = _make_first_shell  # replaced by the first tile, so that later ones pay nothing for the check
_first_lock = threading.RLock()
