"""Values that a dry run knows: those of short tensors that a model makes of numbers alone, and of integers that follow
from an index that a module keeps.

A dry run computes with tensors without values.  But many nets read values that their own code wrote down. Examples are
the rate of each layer's stochastic depth from ``torch.linspace(0, 0.1, 12)``, and the sizes of feature maps from a
table.  Nets on graphs compute with the edges that they keep: ``torch.unique(edges[0])`` says which points have any.

A tensor whose values are known has a real copy beside it.  What is computed of it is computed of the copy, too.
Integers that nobody has written yet (``torch.empty``) have the lowest integer there: what reads it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import memory_id
from jigsaw.torch_internals.dispatch import (
    READ_NUMBER,
    operator_schema,
    tensors_of_call,
    without_modes,
    written_by_call,
)
from jigsaw.torch_internals.fake_tensors import (
    MAKERS_OF_UNFILLED,
    DynamicOutputShapeException,
    TorchDispatchMode,
    forget_real_view,
    is_on_paper,
    note_on_paper,
    note_real_view,
)

aten = torch.ops.aten

_MOST_ELEMENTS = 1024
_MOST_INTEGERS = 2**26  # elements of an integer tensor whose values are known
# functions that write elements and read none of those before
_WRITERS = {
    aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor,
    aten.index_put_.default, aten.scatter_.src, aten.scatter_.value, aten.zero_.default,
}  # fmt: skip
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
_LIFTERS = {aten.lift_fresh.default, aten.lift.default}  # of numbers that Python wrote down, in ``torch.tensor(3)``
_PICKERS = {aten.index.Tensor, aten.index_select.default, aten.gather.default}


class KnownValues:
    """Real copies of tensors without values: each is computed once more from the copies of its inputs.

    Copies are of at most 1024 elements, and of up to 2**26 if they are integers or bools that follow from an index.
    With `follows_integers` those that follow from no tensor, as of ``torch.arange``, are known as well.
    """

    def __init__(self) -> None:
        self.follows_integers = False
        self._copies: Any = WeakTensorKeyDictionary()
        self._changed: set[int] = set()  # memories of the model that a step changed: their values are those of before

    def read_value(self, func: Any, args: Any) -> Any:
        """Return what Python reads of tensors whose values are known; None where they are not."""
        return self._call(func, args, {}) if self._is_computed(func, args, {}) else None

    def integers_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a call on real copies, and return its results with their values; None where an input has none."""
        if func.namespace == "c10d" or not self._has_inputs(args, kwargs):
            return None
        return self._call(func, args, kwargs)

    def answer_by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return tensors without values for a call whose shape depends on known values; None where these are unknown.

        Of floats that a known mask picks, the mask becomes the places where it is true.
        """
        if self._is_computed(func, args, kwargs):
            return pytree.tree_map_only(Tensor, self._stand_in, self._call(func, args, kwargs))
        masks = [x for x in args[1] if _is_bool_index(x)] if func is aten.index.Tensor else []
        if not masks or not all(self._is_computed(aten.nonzero.default, (x,), {}) for x in masks):
            return None
        indices: list[Any] = []
        for x in args[1]:
            places = self._call(aten.nonzero.default, (x,), {}).unbind(1) if _is_bool_index(x) else ()
            indices += map(self._stand_in, places) if _is_bool_index(x) else [x]
        return func(args[0], indices)

    def remember(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute a call on real copies, where those of all inputs are known and nothing is drawn."""
        results = tensors_of_call(out)
        if not self._is_bounded(func, args, kwargs, results) or not self._is_computed(func, args, kwargs):
            self.forget(written_by_call(func, args, kwargs))
            return
        is_unfilled = func.overloadpacket in MAKERS_OF_UNFILLED
        if is_unfilled and not (self.follows_integers and results[0].dtype in _INTEGERS):
            return
        copies = tensors_of_call(self._call(func, args, kwargs))
        if func in _PICKERS and _is_unwritten(self._copies.get(args[0])) and _has_lowest(copies[0]):
            return
        for x, copy in zip(results, copies, strict=True):
            self._note(x, copy)
            if is_unfilled:
                with without_modes():
                    copy.fill_(torch.iinfo(copy.dtype).min)
                note_on_paper(copy, is_unwritten=True)
            elif func in _LIFTERS or not (func.is_view or operator_schema(func).is_mutable):
                note_on_paper(copy)

    def _is_bounded(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> bool:
        """Say whether results are short, or integers that follow from an index; views of these take no memory."""
        if not results or any(x.numel() > _MOST_ELEMENTS and _is_float(x) for x in results):  # most calls of a step
            return False
        if any(has_real_values(x) for x in results):
            return False
        if all(x.numel() <= _MOST_ELEMENTS for x in results):
            return True
        if any(_is_float(x) or (x.numel() > _MOST_INTEGERS and not func.is_view) for x in results):
            return False
        inputs = tensors_of_call((*args, *(kwargs or {}).values()))
        return self.follows_integers or any(
            has_real_values(x) or (x.numel() > _MOST_ELEMENTS and x in self._copies) for x in inputs
        )

    def _is_computed(self, func: Any, args: Any, kwargs: Any) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags or not self._has_inputs(args, kwargs):
            return False
        if func.namespace == "c10d":  # nothing is sent in a dry run, so received values are unknown
            return False
        written = [self._copies.get(x) for x in written_by_call(func, args, kwargs)]
        if not all(copy is not None and is_on_paper(copy) for copy in written):
            return False  # it would change the model
        read = args[1:] if func in _PICKERS or _is_writer(func, args) else args
        tensors = [] if func.is_view else tensors_of_call((*read, *(kwargs or {}).values()))
        return not any(x.numel() > _MOST_INTEGERS or _is_unwritten(self._copies.get(x)) for x in tensors)

    def _has_inputs(self, args: Any, kwargs: Any) -> bool:
        tensors = tensors_of_call((*args, *(kwargs or {}).values()))
        return all(x in self._copies or (has_real_values(x) and not self._is_changed(x)) for x in tensors)

    def _is_changed(self, x: Tensor) -> bool:
        return bool(self._changed) and memory_id(x.untyped_storage()) in self._changed

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(self._real_copy, (args, kwargs or {}))
        with without_modes():
            return func(*args, **kwargs)

    def _stand_in(self, copy: Tensor) -> Tensor:
        x = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype)
        note_on_paper(copy)
        self._note(x, copy)
        return x

    def _note(self, x: Tensor, copy: Tensor) -> None:
        self._copies[x] = copy
        if not _is_float(copy):
            note_real_view(x, copy)

    def forget(self, written: Iterable[Tensor]) -> None:
        """Forget the known tensors that a call has changed, and those that share their memory."""
        changed = [self._copies.get(x, x) for x in written if x in self._copies or has_real_values(x)]
        if not changed:
            return
        memories = {memory_id(x.untyped_storage()) for x in changed}
        self._changed |= {memory_id(x.untyped_storage()) for x in changed if not is_on_paper(x)}
        for x in [x for x, copy in self._copies.items() if memory_id(copy.untyped_storage()) in memories]:
            forget_real_view(x)
            del self._copies[x]

    def _real_copy(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return self._copies[x] if isinstance(x, Tensor) and x in self._copies else x


def _is_writer(func: Any, args: Any) -> bool:
    """Say whether a call writes elements, and reads none of those before."""
    return func in _WRITERS and not (func is aten.index_put_.default and len(args) > 3 and args[3])


def _is_unwritten(copy: Tensor | None) -> bool:
    return copy is not None and is_on_paper(copy, unwritten=True)


def _has_lowest(copy: Tensor) -> bool:
    with without_modes():
        return bool((copy == torch.iinfo(copy.dtype).min).any())


def _is_bool_index(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def has_real_values(x: Tensor) -> bool:
    """Say whether a tensor is a plain one in the host's memory, as an index is that a module keeps."""
    return type(x) is Tensor and x.device.type == "cpu"


def _are_integers(out: Any) -> bool:
    """Say whether all results are tensors of integers or bools, not too large to be computed."""
    results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
    return bool(results) and not any(
        x.is_floating_point() or x.is_complex() or x.device.type != "cpu" or x.numel() > _MOST_INTEGERS for x in results
    )


class KnownValuesMode(TorchDispatchMode):
    """Answers reads of values that are known, while a model is made; `unknown_value` answers others.

    Integers that follow from known values have theirs, and memory: an index that the model keeps is planned by them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = KnownValues()

    def __enter__(self) -> Any:
        with without_modes():  # restored at the end, because integers that are drawn here change it
            self._random_state = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with without_modes():
            torch.set_rng_state(self._random_state)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_NUMBER and has_real_values(args[0]):
            with without_modes():
                return args[0].item()
        if func is READ_NUMBER:
            value = self._known.read_value(func, args)
            return self.unknown_value(func, args) if value is None else value
        try:
            out = func(*args, **(kwargs or {}))
        except DynamicOutputShapeException:  # the shape depends on values, as of the places of a mask
            out = self._known.integers_of(func, args, kwargs or {})
            if out is None:
                raise
            return out
        integers = self._known.integers_of(func, args, kwargs or {}) if _are_integers(out) else None
        if integers is not None:
            return integers
        self._known.remember(func, args, kwargs or {}, out)
        return out

    def unknown_value(self, func: Any, args: Any) -> Any:
        """Answer a read of a value that is not known."""
        return func(*args)
