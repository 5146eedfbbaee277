"""Values of short tensors that a model makes of numbers alone, which a dry run therefore knows.

A dry run computes with tensors without values.  But many nets read values that their own code wrote down. Examples are
the rate of each layer's stochastic depth from ``torch.linspace(0, 0.1, 12)``, and the sizes of feature maps from a
table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.dispatch import READ_NUMBER, operator_schema, without_modes
from jigsaw.torch_internals.fake_tensors import TorchDispatchMode

aten = torch.ops.aten

_MOST_ELEMENTS = 1024
# what has no values yet when it is made
_UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class KnownValues:
    """Real copies of tensors without values: each is computed once more from the copies of its inputs."""

    def __init__(self) -> None:
        self._copies: Any = WeakTensorKeyDictionary()

    def __contains__(self, x: Tensor) -> bool:
        return x in self._copies

    def item_of(self, x: Tensor) -> Any:
        """Return the number that a known tensor of one element holds."""
        with without_modes():
            return self._copies[x].item()

    def remember(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute a call on real copies, where those of all inputs are known and nothing is drawn."""
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if not results or any(x.numel() > _MOST_ELEMENTS or _has_values(x) for x in results):
            return  # too many, or a real step, whose changes in place must not happen twice
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # no group carries messages here, so nobody knows what one brings
        is_known = func.namespace != "c10d" and all(x in self._copies or _has_values(x) for x in tensors)
        if is_known and func.overloadpacket not in _UNFILLED and torch.Tag.nondeterministic_seeded not in func.tags:
            args, kwargs = pytree.tree_map(self._real_copy, (args, kwargs))
            with without_modes():
                copies = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for x, copy in zip(results, copies, strict=True):
                self._copies[x] = copy
        elif operator_schema(func).is_mutable and any(x in self._copies for x in tensors):
            self._copies.clear()  # one of them, and whatever shares its memory, has other values now

    def _real_copy(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return self._copies[x] if isinstance(x, Tensor) and x in self._copies else x


def _has_values(x: Tensor) -> bool:
    return type(x) is Tensor and x.device.type == "cpu"


class KnownValuesMode(TorchDispatchMode):
    """Answers reads of values that are known, while a model is made; `unknown_value` answers others."""

    def __init__(self) -> None:
        super().__init__()
        self._known = KnownValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_NUMBER:
            return self._known.item_of(args[0]) if args[0] in self._known else self.unknown_value(func, args)
        out = func(*args, **(kwargs or {}))
        self._known.remember(func, args, kwargs or {}, out)
        return out

    def unknown_value(self, func: Any, args: Any) -> Any:
        """Answer a read of a value that is not known."""
        return func(*args)
