"""`jigsaw.compile`: the forward and backward passes of a module on tiles, each as one graph, with the messages in it.

Dynamo cannot follow the layouts of tiles, and need not: a layout is known before anything runs.  So the forward pass is
a function of tensors alone: the local ones of the tiles, plain ones, parameters, buffers.  Dynamo puts it into its
graph as it is (`allow_in_graph`).  AOTAutograd then calls it with tensors that have no values and records torch's
operators, backward too, and a call for each message (`jigsaw.comm.graph_calls`).  Tiles exist only meanwhile; results
are put together from notes of that run.

Tensors that modules keep as plain attributes are inputs of the graph, and those that the forward pass keeps anew are
results of it.  So no tensor without values stays in a module (`jigsaw.parallel.held_tensors`).
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import debug
from jigsaw.comm.graph_calls import is_making_graph, ordered_calls, refused_in_graph
from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.nn.weights import call_with_tensors
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK, averaged_over, graph_origins
from jigsaw.parallel.graph_values import GraphValues
from jigsaw.parallel.held_tensors import HeldChange, HeldTensors
from jigsaw.ranks.call_places import is_of_packages
from jigsaw.tile.tile import Tile, leave_tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import own_buffers, own_parameters
from jigsaw.torch_internals.placements import is_dtensor

M = TypeVar("M", bound=nn.Module)

_MOST_CHANGES = 2  # number of times that an index may change until it gets no plan any more, and graphs stay


def compile(
    module: M,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> M:
    """Compile ``module(tile)``: one graph forward and one backward, in which ranks also talk.

    `backend`, `mode` and `options` are those of `torch.compile`.  Returns `module` itself with another ``forward``, so
    that names of parameters, hooks, and wrappers (`jigsaw.parallelize`, DistributedDataParallel, `fully_shard`) stay.
    The first call makes a graph for each structure, layout and size of the arguments, and each number or string among
    them. Training and evaluation have graphs of their own, and so have runs with and without gradients.  Graphs stay in
    memory.

    *Shapes*: unchanged.
    *Sends*: what the module sends without it, in the same order.
    *Raises*: `ShardingError` at the first call where something cannot be in a graph. That is a value that Python reads
    (``.item()``), FSDP2 units within the module, and buffers that are replaced. Also for arguments other than tensors,
    numbers or strings. docs/compile.md has the list.

    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GELU())
    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> tile = jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None, None, "lat", None))
    >>> plain = net(tile).full_tensor()
    >>> net = jigsaw.compile(net, backend="aot_eager")
    >>> torch.allclose(net(tile).full_tensor(), plain), list(net.state_dict())
    (True, ['0.weight', '0.bias'])
    """
    if not isinstance(module, nn.Module):
        raise ShardingError(f"jigsaw.compile takes a torch.nn.Module, not a {type(module).__name__}")
    module.forward = CompiledForward(module, {"backend": backend, "mode": mode, "options": options})
    return module


# Types of values that are not tensors: they become part of the graph, which is made anew for another value.
_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.memory_format, Layout, DeviceMesh),
)


@dataclass(frozen=True)
class TensorPlace:
    """Stand-in for a tensor among arguments and results, with all that is known before it has values."""

    requires_grad: bool
    layout: Layout | None = None  # set for a tile
    mesh: DeviceMesh | None = None
    # for a plain tensor: whether it was computed from a tile, so that its gradient is whole on every rank
    left: bool = False
    averaged: int = 1  # for a plain tensor: the `averaged_over` of all leaves that it was computed from
    shape: tuple[int, ...] = ()  # for a plain tensor

    def tensor_of(self, value: Tensor) -> Tensor:
        return value.local if isinstance(value, Tile) else value


def _place_of(x: Tensor) -> TensorPlace:
    """Return the stand-in.  *Raises*: `ShardingError` for a tensor whose gradient is neither a part nor whole."""
    if isinstance(x, Tile):
        x.check_no_history()
        # of the local tensor, because asking the tile itself would put its shell into the graph of autograd
        return TensorPlace(x.local.requires_grad, x.layout, x.mesh)
    if x.grad_fn is None:
        return TensorPlace(x.requires_grad, averaged=averaged_over(x), shape=tuple(x.shape))
    left, leaves = graph_origins(x)
    ranks = {averaged_over(leaf) for leaf in leaves}
    if (left and 1 in ranks) or len(ranks) > 1:
        raise ShardingError(
            f"jigsaw.compile: a plain tensor of shape {tuple(x.shape)} goes into or out of the module, computed from "
            "a parameter and from a tensor that left a Tile, or from leaves that are summed and leaves that are "
            "averaged over the ranks; pass the whole model through jigsaw.parallelize, or compile without that part"
        )
    return TensorPlace(x.requires_grad, left=left, averaged=max(ranks, default=1), shape=tuple(x.shape))


# -- a module's forward -----------------------------------------------------------------------------------------------


class CompiledForward:
    """Replacement of a module's `forward`: a graph for each kind of arguments."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.module, self.options = module, options
        # a `forward` that someone set before; a module that is compiled twice is compiled once, with the later options
        self._theirs = module.__dict__.get("forward")
        if isinstance(self._theirs, CompiledForward):
            self._theirs = self._theirs._theirs
        self._graphs: dict[Any, TileGraph] = {}
        self._weights: ModuleWeights | None = None
        self._held = HeldTensors(())

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the module makes its own graphs, because they have the module in them
        return self.__dict__ | {"_graphs": {}, "_weights": None, "_held": HeldTensors(())}

    def call_plain(self, *args: Any, **kwargs: Any) -> Any:
        if self._theirs is not None:
            return self._theirs(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # while messages are compared, run every call plainly; within another graph no further one is needed
        if debug.is_comparing() or is_making_graph():
            return self.call_plain(*args, **kwargs)
        if self._weights is None:
            self._weights = ModuleWeights(self.module)
            self._held = HeldTensors(self._weights.modules)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [_place_of(v) if isinstance(v, Tensor) else (type(v), v) for v in leaves]
        _check_constants(self.module, leaves)
        weights = self._weights.tensors()
        state = self._weights.state(weights)
        weights = [w.to_local() if is_dtensor(w) else w for w in weights]
        held = self._held.tensors()
        held_places = tuple(None if x is None else _place_of(x) for x in held)
        # all that the forward pass may read beside values, and that Dynamo does not guard
        key = spec, tuple(values), held_places, state, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        plain = (*zip(values, leaves, strict=True), *zip(held_places, held, strict=True))
        inputs = [(p, p.tensor_of(v)) for p, v in plain if isinstance(p, TensorPlace) and isinstance(v, Tensor)]
        tensors = [*weights, *(x for _, x in inputs)]
        graph = self._graphs.get(key)
        changed = Counter[int]() if graph is None else graph.known.changes(tensors)
        is_new = graph is None or bool(changed)
        if graph is None or changed:
            _check_weights(self.module, self._weights.names, weights)
            if self._held.find_more():  # tensors that modules have held only since the last graph was made
                return self(*args, **kwargs)
            graph = TileGraph(self, self._weights.names, state[0], (spec, values), held_places, changed)
            self._graphs[key] = graph
        out = graph(tensors)
        if is_new:
            self._held.find_more()  # the next call may read tensors that this one left in modules
        return out

    @property
    def held(self) -> HeldTensors:
        return self._held


@dataclass(frozen=True)
class StoredAs:
    """Properties of a parameter or buffer that are known without its values."""

    kind: type[Tensor]
    requires_grad: bool
    averaged: int | None  # `AVERAGED_MARK`
    cut: tuple[DeviceMesh, tuple[Any, ...], torch.Size, tuple[int, ...]] | None  # of a DTensor

    def in_graph(self, x: Tensor) -> Tensor:
        leaf = _as_leaf(x, self.averaged)
        if self.cut is None:
            return leaf
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self.cut
        whole = DTensor.from_local(leaf, mesh, placements, run_check=False, shape=shape, stride=stride)
        if self.averaged is not None:
            setattr(whole, AVERAGED_MARK, self.averaged)
        return whole


def _stored_as(x: Tensor) -> StoredAs:
    cut = (x.device_mesh, x.placements, x.shape, x.stride()) if is_dtensor(x) else None
    return StoredAs(type(x), x.requires_grad, getattr(x, AVERAGED_MARK, None), cut)


class ModuleWeights:
    """Places of the parameters and buffers of a module, which `fully_shard` swaps for others meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        owners = dict(module.named_modules())
        self.modules = list(owners.values())
        self.names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        self._places: list[tuple[dict[str, Any], str]] = []
        for name in self.names:
            owner, _, last = name.rpartition(".")
            held = owners[owner]
            parameters = own_parameters(held)
            self._places.append((parameters if last in parameters else own_buffers(held), last))

    def tensors(self) -> list[Tensor]:
        return [held[name] for held, name in self._places]

    def state(self, tensors: Sequence[Tensor]) -> tuple[tuple[StoredAs, ...], tuple[bool, ...]]:
        return tuple(map(_stored_as, tensors)), tuple(m.training for m in self.modules)


def _check_constants(module: nn.Module, leaves: Sequence[Any]) -> None:
    for value in leaves:
        if not isinstance(value, (Tensor, *_CONSTANTS)):
            raise ShardingError(
                f"jigsaw.compile: an argument of {type(module).__name__} has a {type(value).__name__}, which a graph "
                "cannot take apart; pass tiles, tensors, numbers, strings, and tuples, lists or dicts of them"
            )


def _check_results(name: str, out: Any) -> None:
    # what pytrees do not know would stay in the graph as it is, with tensors that exist only while it is made
    for value in pytree.tree_leaves(out):
        if not isinstance(value, (Tensor, *_CONSTANTS)):
            raise ShardingError(
                f"jigsaw.compile: {name} returns a {type(value).__name__}, which a graph cannot take apart; return "
                "tiles, tensors, numbers, strings, and tuples, lists or dicts of them, or tell torch of a dataclass: "
                f"torch.export.register_dataclass({type(value).__name__})"
            )


def _check_weights(module: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, part in module.named_modules():
        if name and fsdp is not None and isinstance(part, fsdp.FSDPModule):
            raise ShardingError(
                f"jigsaw.compile: {name!r} in {type(module).__name__} is a unit of fully_shard, whose weights are "
                "gathered by hooks that cannot be in a graph; compile the units: jigsaw.compile(unit) for each"
            )
    for name, x in zip(names, tensors, strict=True):
        if isinstance(x, Tile):
            raise ShardingError(
                f"jigsaw.compile: {name!r} of {type(module).__name__} is a Tile, which a graph cannot be made with; "
                "pass it as an argument, or compile modules without it"
            )


# -- one graph --------------------------------------------------------------------------------------------------------


class TileGraph:
    """The compiled forward pass for one kind of arguments."""

    def __init__(
        self,
        forward: CompiledForward,
        names: Sequence[str],
        stored: Sequence[StoredAs],
        arguments: tuple[pytree.TreeSpec, Sequence[Any]],
        held_places: Sequence[TensorPlace | None],
        changed: Counter[int],
    ) -> None:
        self._names, self._stored = names, stored
        self._spec, self._values = arguments
        self._held, self._held_places = forward.held, held_places
        self._plain = _PlainModule(forward)
        places = (*self._values, *held_places)
        self._meshes = [v.mesh for v in places if isinstance(v, TensorPlace) and v.mesh is not None]
        self._failure: Exception | None = None
        self._failed_line = ""
        self._results: tuple[pytree.TreeSpec, list[Any]] | None = None
        self._changes: list[HeldChange] = []
        of_arguments = [0 if p.layout is None else -1 for p in self._values if isinstance(p, TensorPlace)]
        of_held = [_MOST_CHANGES if p.layout is None else -1 for p in held_places if p is not None]
        self.known = GraphValues([_MOST_CHANGES] * len(names) + of_arguments + of_held, changed)
        self._inputs: Sequence[Tensor] = ()  # those of the call that makes the graph

        @torch.compiler.allow_in_graph
        def run_without_values(*tensors: Tensor) -> tuple[Tensor, ...]:
            try:
                return self._run_without_values(tensors)
            except Exception as error:
                self._failure, self._failed_line = error, _user_line(error)  # Dynamo cuts the traceback
                raise

        def forward_on_tiles(*tensors: Tensor) -> tuple[Tensor, ...]:
            return run_without_values(*tensors)

        # sizes are numbers in the layouts, so they are numbers in the graph, and other layouts are other graphs
        make_graph: Any = torch.compile
        self._compiled: Callable[..., Sequence[Tensor]] = make_graph(
            forward_on_tiles, fullgraph=True, dynamic=False, isolate_recompiles=True, **forward.options
        )

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        self._inputs = tensors
        try:
            outputs = iter(self._compiled(*tensors))
        except Exception as error:
            failure, self._failure = self._failure, None
            raise _told_failure(failure, error, self._failed_line) from error
        finally:
            self._inputs = ()
        self.known.keep_read(tensors, self._meshes[0] if self._meshes else None)
        spec, places = cast(tuple[pytree.TreeSpec, list[Any]], self._results)
        results = [self._as_result(p, next(outputs)) if isinstance(p, TensorPlace) else p for p in places]
        out, kept = pytree.tree_unflatten(results, spec)
        for change, value in zip(self._changes, kept, strict=True):
            change.put(value)
        return out

    def _run_without_values(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward pass while the graph is made, and note what the results are."""
        self.known.note_inputs(tensors, self._inputs)
        left = iter(tensors)
        weights = {
            f"module.{n}": stored.in_graph(next(left)) for n, stored in zip(self._names, self._stored, strict=True)
        }
        leaves = [self._as_argument(v, next(left)) if isinstance(v, TensorPlace) else v[1] for v in self._values]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        held = [None if place is None else self._as_argument(place, next(left)) for place in self._held_places]
        with ordered_calls() as last_call, self._held.replaced_by(held) as changed, self.known.of_run():
            self._plain.given = weights
            try:
                out = call_with_tensors(self._plain, weights, args, kwargs)
            finally:
                self._plain.given = {}
            self._changes = changed()
            _check_results(type(self._plain.module).__name__, out)
            results, spec = pytree.tree_flatten((out, [change.value for change in self._changes]))
            places = [_place_of(r) if isinstance(r, Tensor) else r for r in results]
            self._results = spec, places
            locals_of_tiles = (
                p.tensor_of(r) for p, r in zip(places, results, strict=True) if isinstance(p, TensorPlace)
            )
            return *locals_of_tiles, last_call()

    def _as_argument(self, place: TensorPlace, x: Tensor) -> Tensor:
        if place.layout is not None:
            return Tile(x, place.layout, cast(DeviceMesh, place.mesh))
        if place.left and self._meshes:
            return leave_tile(x, self._meshes[0])
        return _as_leaf(x, None if place.averaged == 1 else place.averaged)

    def _as_result(self, place: TensorPlace, x: Tensor) -> Tensor:
        if place.layout is not None:
            return Tile(x, place.layout, cast(DeviceMesh, place.mesh))
        # a graph has one node for everything, which hides that the tensor came from a tile
        return leave_tile(x, self._meshes[0]) if place.left and self._meshes else x


class _PlainModule(nn.Module):
    """Module below another one, whose `call_with_tensors` gives it its tensors and calls its own forward pass."""

    def __init__(self, forward: CompiledForward) -> None:
        super().__init__()
        self.module, self.call_plain = forward.module, forward.call_plain
        self.given: dict[str, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.call_plain(*args, **kwargs)
        for name, x in (*self.named_parameters(), *self.named_buffers()):
            if x is not self.given.get(name) or isinstance(x, Tile):
                raise ShardingError(
                    f"jigsaw.compile: {name.removeprefix('module.')!r} of {type(self.module).__name__} is replaced in "
                    "the forward pass, which a graph would not do again; change it in place: buffer.copy_(new)"
                )
        return out


class _GraphInput(torch.autograd.Function):
    """A parameter or plain tensor, with its leaf for `graph_origins`: AOTAutograd adds nodes before the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.variable = leaf
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _as_leaf(x: Tensor, mark: int | None) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    leaf = x.detach()
    entered = cast(Tensor, _GraphInput.apply(x, leaf))
    if mark is not None:
        setattr(leaf, AVERAGED_MARK, mark)
        setattr(entered, AVERAGED_MARK, mark)
    return entered


# -- what went wrong --------------------------------------------------------------------------------------------------


def _told_failure(failure: Exception | None, error: Exception, line: str) -> Exception:
    """Return the error to raise: that of the module itself, as without a graph, where it is one."""
    for each in (failure, *_causes(error)):
        if isinstance(each, ShardingError):
            return each
    for each in (failure, *_causes(error)):
        if any(name in f"{type(each).__name__}: {each}" for name in _NEEDS_VALUES):
            message = str(each).partition("\n")[0]
            return refused_in_graph(f"a value or a size that is known only when it runs{line} ({message})")
    if isinstance(failure, AssertionError) and any(name in str(failure) for name in _HAS_NO_VALUES):
        return refused_in_graph(
            f"a tensor that is not an argument, parameter, buffer or attribute of the module{line} "
            f"({str(failure).partition(chr(10))[0]})"
        )
    return error if failure is None or isinstance(failure, AssertionError) else failure


# torch's errors for reads of a tensor without values
_NEEDS_VALUES = (
    *("DataDependentOutputException", "DynamicOutputShapeException"),
    *("PendingUnbackedSymbolNotFound", "GuardOnDataDependentSymNode"),
)

# torch's classes for tensors without values
_HAS_NO_VALUES = ("FakeTensor", "FunctionalTensor", "fake mode")


def _user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code where an error arose, as ``, at file:line in forward: code``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_of_packages(f.filename)]
    if not frames:
        return ""
    frame = frames[-1]
    return f", at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
