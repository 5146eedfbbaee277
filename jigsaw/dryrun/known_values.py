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
from jigsaw.torch_internals.autograd import memory_id
from jigsaw.torch_internals.dispatch import READ_NUMBER, operator_schema, without_modes
from jigsaw.torch_internals.fake_tensors import TorchDispatchMode, forget_real_view, note_real_view, real_view

aten = torch.ops.aten

_MOST_ELEMENTS = 1024
# functions that make tensors without setting values
_UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class KnownValues:
    """Real copies of tensors without values: each is computed once more from the copies of its inputs."""

    def __init__(self) -> None:
        self._copies: Any = WeakTensorKeyDictionary()

    def __contains__(self, x: Tensor) -> bool:
        return x in self._copies

    def item_of(self, x: Tensor) -> Any:
        with without_modes():
            return self._copies[x].item()

    def remember(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute a call on real copies, where those of all inputs are known and nothing is drawn."""
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if func.is_view and _has_values(real_view(args[0])):
            # a view of an index that a module keeps is real, too: it takes no memory, and its values are needed for
            # plans
            with without_modes():
                views = func(real_view(args[0]), *args[1:], **(kwargs or {}))
            for x, view in zip(results, pytree.tree_leaves(views), strict=True):
                note_real_view(x, view)
        is_short = results and not any(x.numel() > _MOST_ELEMENTS or _has_values(x) for x in results)
        if not is_short or not self._is_computed(func, args, kwargs):
            self._forget_changed(func, args, kwargs)
            return
        args, kwargs = pytree.tree_map(self._real_copy, (args, kwargs))
        with without_modes():
            copies = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        for x, copy in zip(results, copies, strict=True):
            self._copies[x] = copy

    def _is_computed(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func.overloadpacket in _UNFILLED or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if func.namespace == "c10d":  # nothing is sent in a dry run, so received values are unknown
            return False
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        return all(x in self._copies or _has_values(x) for x in tensors)

    def _forget_changed(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the known tensors that a call has changed, and those that share their memory."""
        schema = operator_schema(func)
        if not schema.is_mutable:
            return
        values = [*zip(schema.arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in schema.arguments)]
        written = [value for argument, value in values if argument.alias_info and argument.alias_info.is_write]
        leaves = [x for x in pytree.tree_leaves(written) if isinstance(x, Tensor)]
        for x in leaves:
            forget_real_view(x)
        changed = [x for x in leaves if x in self._copies]
        memories = {memory_id(self._copies[x].untyped_storage()) for x in changed}
        for x in [x for x, copy in self._copies.items() if memory_id(copy.untyped_storage()) in memories]:
            del self._copies[x]

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
