"""Values of integers that the graphs of `jigsaw.compile` know while they are made.

A graph is made with tensors without values.  But a net on a graph of cells keeps its edges, and its results are cut by
what these are: ``x[:, edges[0]]`` has a plan (`jigsaw.ops.kept_indices`), and ``torch.unique(edges[0])`` a size.  So
integers and bools that modules keep, or that are arguments, have their values while a graph is made.  So have those
that follow from them.  What has a size by its values is a constant of the graph.

Where such an input has other values at a later call, another graph is made.  One that changes again and again has no
values any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.first_meetings import meet_tensor
from jigsaw.comm.wire_values import is_on_accelerator
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import tensor_version
from jigsaw.torch_internals.dispatch import (
    DEVICE_OF_TENSOR,
    tensors_of_call,
    without_modes,
    written_by_call,
)
from jigsaw.torch_internals.fake_tensors import (
    MAKERS_OF_UNFILLED,
    KnownMemory,
    TorchDispatchMode,
    constant_in_graph,
    forget_known_memory,
    has_values,
    known_memory,
    note_known_memory,
    real_view,
)

aten = torch.ops.aten

_MOST_INTEGERS = 2**26  # elements of a tensor that is computed from integers with values
_INDICES = (torch.int64, torch.int32)
# functions that pick elements of their first argument by masks
_BY_MASKS = {aten.index.Tensor, aten.masked_select.default}


class GraphValues(TorchDispatchMode):
    """Values of integers while one graph is made, and those of inputs that the graph is right for.

    An input has none once it has `changed` more often than its `most_changes` allow: 0 for arguments, -1 for tiles.
    Both are by the place of the input.
    """

    def __init__(self, most_changes: Sequence[int], changed: Counter[int]) -> None:
        super().__init__()
        self._most_changes, self._changed = most_changes, changed
        self._read: set[int] = set()  # places of inputs whose values the graph was just made with
        self._known: WeakSet[KnownMemory] = WeakSet()
        self._kept: dict[int, tuple[Tensor, int, Tensor]] = {}  # by place: the input, its version and values

    # -- while the graph is made --------------------------------------------------------------------------------------

    def note_inputs(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Note which inputs have values: `tensors` are those of the call."""
        for at, (x, real) in enumerate(zip(inputs, tensors, strict=True)):
            if _is_integer_input(real) and self._changed[at] <= self._most_changes[at]:
                self._note(x, real, frozenset([at]), is_input=True)

    @contextmanager
    def of_run(self) -> Generator[None]:
        """Follow the values of integers within the block, a run of the forward pass."""
        with self if self._known else nullcontext():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF_TENSOR:
            return func(*args, **kwargs)
        written, known = written_by_call(func, args, kwargs), self._known_inputs(func, args, kwargs)
        if known is not None and _has_size_by_values(func, args):
            return pytree.tree_map_only(Tensor, self._as_constant(known), self._real_results(func, args, kwargs, known))
        if func in _BY_MASKS:
            func, args = self._with_places(func, args)
        out = func(*args, **kwargs)
        if known is None or any(memory is None or memory.is_input for memory in map(known_memory, written)):
            for x in written:
                forget_known_memory(x)
        elif written:
            self._call(func, args, kwargs)  # in place, on the values
            for memory in map(known_memory, written):
                if memory is not None:
                    memory.places |= _places_of(known)
        elif _has_indices(tensors_of_call(out)):
            for x, real in zip(tensors_of_call(out), tensors_of_call(self._call(func, args, kwargs)), strict=True):
                if known_memory(x) is None:  # else it is a view of known memory
                    self._note(x, real, _places_of(known))
        return out

    def _known_inputs(self, func: Any, args: Any, kwargs: Any) -> list[KnownMemory] | None:
        """Return what is known of all tensors that a call takes; None where some are not, or where it draws numbers."""
        # torch counts memory that nobody has filled as random
        is_random = torch.Tag.nondeterministic_seeded in func.tags and func.overloadpacket not in MAKERS_OF_UNFILLED
        if func.namespace != "aten" or is_random:
            return None
        tensors = tensors_of_call((*args, *kwargs.values()))
        known = [known_memory(x) for x in tensors if not has_values(x)]
        return None if None in known else [memory for memory in known if memory is not None]

    def _real_results(self, func: Any, args: Any, kwargs: Any, known: Iterable[KnownMemory]) -> Any:
        """Compute what the graph depends on."""
        self._read |= _places_of(known)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, real_view, (args, kwargs))
        with without_modes(), torch.no_grad():
            out = func(*args, **kwargs)
            # no place is the lowest integer, so that an index with elements that nobody wrote gets no plan
            is_filled = func.overloadpacket not in MAKERS_OF_UNFILLED or out.dtype not in _INDICES
            return out if is_filled else out.fill_(torch.iinfo(out.dtype).min)

    def _as_constant(self, known: Iterable[KnownMemory]) -> Any:
        places = _places_of(known)

        def as_constant(real: Tensor) -> Tensor:
            x = constant_in_graph(real)
            self._note(x, real, places)
            return x

        return as_constant

    def _with_places(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Return a call that picks elements by places in the place of one that does so by known masks."""
        masks = [args[1]] if func is aten.masked_select.default else [x for x in args[1] if _picks_by_truth(x)]
        known = [memory for memory in map(known_memory, masks) if memory is not None]
        is_repeated = func is aten.masked_select.default and args[0].shape != args[1].shape
        if not masks or len(known) < len(masks) or is_repeated:
            return func, args
        indices: list[Any] = []
        for x in masks if func is aten.masked_select.default else args[1]:
            if _picks_by_truth(x):
                places = self._real_results(aten.nonzero.default, (x,), {}, known)
                indices += self._as_constant(known)(places).unbind(1)
            else:
                indices.append(x)
        return aten.index.Tensor, (args[0], indices)

    def _note(self, x: Tensor, real: Tensor, places: frozenset[int], is_input: bool = False) -> None:
        known = KnownMemory(real, places, is_input, self._read)
        note_known_memory(x, known)
        self._known.add(known)

    # -- at each call -------------------------------------------------------------------------------------------------

    def keep_read(self, tensors: Sequence[Tensor], mesh: DeviceMesh | None) -> None:
        """Keep the values that a graph was just made with, and compare them with other ranks, as without a graph.  Free
        those that were computed for it.
        """
        for at in sorted(self._read):
            x = tensors[at]
            self._kept[at] = x, tensor_version(x), x.detach().clone()
            if mesh is not None:
                meet_tensor(x, mesh)
        self._read.clear()
        for known in self._known:  # the graph keeps its tensors without values
            known.real = None
        self._known.clear()

    def changes(self, tensors: Sequence[Tensor]) -> Counter[int]:
        """Return how often each input has changed, where one has since the graph was made; none where none has."""
        changed = [at for at in self._kept if not self._has_stayed(at, tensors[at])]
        return self._changed + Counter(changed) if changed else Counter()

    def _has_stayed(self, at: int, x: Tensor) -> bool:
        index, version, values = self._kept[at]
        if not _is_integer_input(x):
            return False
        if x is not index or tensor_version(x) != version:
            # an argument may be made anew in each step: the host does not wait for that
            if (is_on_accelerator(x) and not self._most_changes[at]) or not torch.equal(x, values):
                return False
            self._kept[at] = x, tensor_version(x), values
        return True


def _is_integer_input(x: Tensor) -> bool:
    # a single number counts something, as the batches of a norm
    is_index = x.dtype in (*_INDICES, torch.bool) and x.ndim > 0 and x.layout == torch.strided
    return type(x) in (Tensor, nn.Parameter) and is_index and not x.is_inference()


def _places_of(known: Iterable[KnownMemory]) -> frozenset[int]:
    return frozenset[int]().union(*(memory.places for memory in known))


def _has_size_by_values(func: Any, args: Any) -> bool:
    if func is aten.index.Tensor:
        return any(_picks_by_truth(x) for x in args[1])
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags


def _picks_by_truth(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def _has_indices(results: Sequence[Tensor]) -> bool:
    return bool(results) and not any(
        x.is_floating_point() or x.is_complex() or x.numel() > _MOST_INTEGERS for x in results
    )
