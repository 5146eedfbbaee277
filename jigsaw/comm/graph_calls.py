"""Messages between ranks as one operator of the graphs of `torch.compile`: `jigsaw::communicate`.

While a graph is made there are no values, so nothing can be sent.  A function that sends (`graph_call`) becomes a call
of that operator in the graph, with its tensors, and the name of all other arguments.  When the graph runs, the operator
looks the name up and calls the function unchanged, with hidden messages and counted bytes.  The function also gives the
shapes of its results: it runs on tensors without values, where sending returns at once (`is_shape_run`).

A compiler may move a call, or drop one whose result this rank does not need; then another rank would wait.  So each
call takes an empty tensor from the call before it, and the graph returns the last one.  For example, two ranks have a
halo that only rank 1 uses, and a sum.  The halo comes first on both, though no result of rank 0 depends on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.ranks.mesh import axes_of_mesh, ranks_along
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import graph_task_id, memory_id
from jigsaw.torch_internals.dispatch import leave_to_python, tracing_context

P = ParamSpec("P")
T = TypeVar("T")

_TENSOR = object()  # placeholder for each tensor among the arguments of a call


@dataclass
class GraphCall:
    """Function with all of its arguments but the tensors, and how its results are put together."""

    function: Callable[..., Any]
    for_shapes: Callable[..., Any]
    values: tuple[Any, ...]
    spec: pytree.TreeSpec
    # device, whether autocast was on, and its dtype, when the graph was made; it is off while the graph runs
    autocast: tuple[str, bool, torch.dtype]
    out_spec: pytree.TreeSpec | None = None
    out_places: tuple[bool, ...] = ()

    def run(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors among the results, each in its own memory, as operators of a graph must."""
        left = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(left) if v is _TENSOR else v for v in self.values], self.spec)
        device, enabled, dtype = self.autocast
        with torch.no_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            leaves, self.out_spec = pytree.tree_flatten(function(*args, **kwargs))
        self.out_places = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        taken = {_memory_of(x) for x in tensors}
        results: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                results.append(leaf.clone() if _memory_of(leaf) in taken else leaf)
                taken.add(_memory_of(leaf))
        return results


def _memory_of(x: Tensor) -> int:
    return memory_id(x.untyped_storage())


# for the life of the process, because a graph may run at any time
_calls: dict[str, GraphCall] = {}


def leave_untraced(*functions: Any) -> None:
    """Let `torch.compile` of a user's own function call these as they are, with all that they call in turn."""
    for function in functions:
        leave_to_python(function, "tiles are in no graph of torch.compile; use jigsaw.compile(module)")


class _GraphState(threading.local):
    """State while a graph is made: the last call of its forward pass and of its backward passes, and the mode.  A
    backward pass has the number that autograd gives it.  The mode says whether a function runs only for its shapes.
    """

    forward: Tensor | None = None
    backward: tuple[int, Tensor] | None = None
    is_shape_run: bool = False


_state = _GraphState()


def is_making_graph() -> bool:
    """Say whether tensors have no values because `torch.compile` is making a graph."""
    return tracing_context() is not None and not _state.is_shape_run


def is_shape_run() -> bool:
    """Say whether nothing is to be sent because a function runs only for the shapes of its results."""
    return _state.is_shape_run


def lacks_values() -> bool:
    """Say whether tensors have no values, for a graph or for shapes alone."""
    return _state.is_shape_run or tracing_context() is not None


@contextmanager
def shape_run() -> Generator[None]:
    """Send nothing within the block, and return received tensors without values."""
    before, _state.is_shape_run = _state.is_shape_run, True
    try:
        yield
    finally:
        _state.is_shape_run = before


@contextmanager
def ordered_calls() -> Generator[Callable[[], Tensor]]:
    """Trace the forward pass of a graph; call the result at the end, for the tensor that the graph must return."""
    _state.forward, _state.backward = torch.empty(0), None
    try:
        yield lambda: _state.forward if _state.forward is not None else torch.empty(0)
    finally:
        _state.forward = None


def graph_call(
    for_shapes: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function that sends one call of a graph, where one is made; it must not change its arguments.

    `for_shapes` makes results of the same shapes, strides and dtypes, where the function itself cannot without values.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if _state.is_shape_run:
                return (for_shapes or function)(*args, **kwargs)
            if tracing_context() is None:
                return function(*args, **kwargs)
            return _write_call(function, for_shapes or function, args, kwargs)

        return call

    return decorate


def _write_call(function: Callable[..., Any], for_shapes: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    values = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    device = tensors[0].device.type if tensors else "cpu"
    autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    name = _name_of_call(GraphCall(function, for_shapes, values, spec, autocast))
    task = graph_task_id()  # -1 outside of a backward pass
    if task == -1:
        before = _state.forward
    else:
        before = _state.backward[1] if _state.backward is not None and _state.backward[0] == task else None
    before = torch.empty(0) if before is None else before
    *returned, last = torch.ops.jigsaw.communicate([x.detach() for x in tensors], before, name)
    if task != -1:
        _state.backward = task, last
    elif _state.forward is not None:
        _state.forward = last
    call, results = _calls[name], iter(returned)
    assert call.out_spec is not None
    return pytree.tree_unflatten([next(results) if is_tensor else None for is_tensor in call.out_places], call.out_spec)


def _name_of_call(call: GraphCall) -> str:
    """Return a name that describes the whole call, because compiled graphs are kept on disk, and read by other
    processes.
    """
    descriptions = [_described_value(value) for value in call.values]
    digest = sha256(repr((descriptions, call.spec, call.autocast)).encode()).hexdigest()[:32]
    name = f"{call.function.__module__}.{call.function.__qualname__}:{digest}"
    if name in _calls and _calls[name].values != call.values:
        name = f"{name}:{uuid4().hex}"  # equal descriptions of different values: make the name unique
    _calls.setdefault(name, call)
    return name


def _described_value(value: Any) -> str:
    if isinstance(value, DeviceMesh):
        axes = axes_of_mesh(value)
        return repr((value.device_type, axes, ranks_along(value, [name for name, _ in axes])))
    if is_dataclass(value):  # its fields may be meshes
        parts = [_described_value(getattr(value, field.name)) for field in fields(value) if field.repr]
        return f"{type(value).__qualname__}({', '.join(parts)})"
    return "tensor" if value is _TENSOR else repr(value)


def refuse_in_graph(what: str) -> None:
    """Raise while a graph is made.  *Raises*: `ShardingError` for what cannot be in one."""
    if is_making_graph():
        raise refused_in_graph(what)


def refused_in_graph(what: str) -> ShardingError:
    """Return the error for what cannot be in a graph."""
    return ShardingError(
        f"jigsaw.compile: {what} cannot be in a graph; compile the modules before and after it instead: "
        "jigsaw.compile(block) for each"
    )


# -- the operator -----------------------------------------------------------------------------------------------------


def _communicate(tensors: Sequence[Tensor], after: Tensor, call: str) -> list[Tensor]:
    return [*_calls[call].run(_calls[call].function, tensors), torch.empty(0)]


def _communicate_shapes(tensors: Sequence[Tensor], after: Tensor, call: str) -> list[Tensor]:
    with shape_run():
        return [*_calls[call].run(_calls[call].for_shapes, tensors), torch.empty(0)]


_library = torch.library.Library("jigsaw", "DEF")
_library.define("communicate(Tensor[] tensors, Tensor after, str call) -> Tensor[]")
_library.impl("communicate", _communicate, "CompositeExplicitAutograd")
torch.library.register_fake("jigsaw::communicate", _communicate_shapes, lib=_library)
