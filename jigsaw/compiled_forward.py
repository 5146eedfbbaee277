"""`jigsaw.compile`: the forward pass of a module on tiles as one graph, backward too, the messages in it.

Dynamo cannot follow what tiles keep of layouts, and need not: a layout is known before anything runs.  So the forward
pass is a function of tensors alone (the local ones of the tiles, plain ones, parameters, buffers), which Dynamo puts
into its graph as it is (`allow_in_graph`) and AOTAutograd takes apart: it calls it with tensors that have no values,
writes down torch's operators, backward too, and for what is sent a call (`jigsaw.graph_calls`).  Tiles live only
meanwhile.  What comes out is put together again from what was noted then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from jigsaw import debug
from jigsaw.cut import ShardingError
from jigsaw.graph_calls import is_making_graph, know_ranks, ordered_calls
from jigsaw.layout import Layout
from jigsaw.mesh import mesh_size
from jigsaw.ops.plain_operands import AVERAGED_MARK, averaged_over, graph_origins
from jigsaw.tile import Tile, leave_tile

M = TypeVar("M", bound=nn.Module)


def compile_on_tiles(
    module: M,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> M:
    module.forward = CompiledForward(module, {"backend": backend, "mode": mode, "options": options})
    return module


# What a value may be that is no tensor: it becomes part of the graph, which is made anew for another one.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
_CONSTANTS += (Layout, DeviceMesh, slice, type(...))


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor stands among arguments or results, and what it is there."""

    layout: Layout | None = None  # of a tile
    mesh: DeviceMesh | None = None
    left: bool = False  # of a plain tensor: it came out of a tile, so its gradient is whole on every rank
    averaged: int = 1  # of a plain tensor that is no tile's: see `averaged_over`


class CompiledForward:
    """What stands in the place of a module's `forward`: a graph for each kind of arguments."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self.module, self.options = module, options
        self._theirs = module.__dict__.get("forward")
        if isinstance(self._theirs, CompiledForward):
            self._theirs = self._theirs._theirs
        self._graphs: dict[Any, TileGraph] = {}
        self._names: tuple[list[str], list[tuple[dict[str, Any], str]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a copy makes graphs of its own, for they have the module in them
        return self.__dict__ | {"_graphs": {}, "_names": None}

    def call_plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass as it is, without a graph."""
        if self._theirs is not None:
            return self._theirs(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # ranks that compare what they do look at every call; and within another graph there is no need of one more
        if debug.IS_DEBUGGING or is_making_graph():
            return self.call_plain(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        names, stored = self._weights()
        tensors: list[Any] = [owner[name] for owner, name in stored]
        marks = tuple((type(x), getattr(x, AVERAGED_MARK, None)) for x in tensors)
        values: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                values.append(_place_of(leaf))
                tensors.append(leaf.local if isinstance(leaf, Tile) else leaf)
            else:
                values.append((type(leaf), leaf))
                _check_constant(self.module, leaf)
        modes = tuple(m.training for m in self._modules)
        key = (spec, tuple(values), marks, modes)
        graph = self._graphs.get(key)
        if graph is None:
            _check_module(self.module, names, tensors)
            for value in values:
                if isinstance(value, TensorPlace) and value.mesh is not None:
                    know_ranks(value.mesh)
            graph = self._graphs[key] = TileGraph(self, names, marks, spec, values)
        return graph(tensors)

    def _weights(self) -> tuple[list[str], list[tuple[dict[str, Any], str]]]:
        """The names of the parameters and buffers, and where each is found: `fully_shard` swaps them meanwhile."""
        if self._names is None:
            owners = dict(self.module.named_modules())
            self._modules = list(owners.values())
            names = [n for n, _ in self.module.named_parameters()]
            buffers = [n for n, _ in self.module.named_buffers()]
            places: list[tuple[dict[str, Any], str]] = []
            for name in (*names, *buffers):
                owner, _, last = name.rpartition(".")
                held = owners[owner]
                places.append((held._parameters if last in held._parameters else held._buffers, last))
            self._names = [*names, *buffers], places
        return self._names


def _place_of(x: Tensor) -> TensorPlace:
    if isinstance(x, Tile):
        x.check_no_history()
        return TensorPlace(x.layout, x.mesh)
    if x.grad_fn is None:
        return TensorPlace(averaged=averaged_over(x))
    left, leaves = graph_origins(x)
    ranks = {averaged_over(leaf) for leaf in leaves}
    if left and leaves and ranks != {1}:
        return TensorPlace(left=True)
    if (left and leaves) or len(ranks) > 1:
        raise ShardingError("mixed")
    return TensorPlace(left=left, averaged=max(ranks, default=1))


def _check_constant(module: nn.Module, value: Any) -> None:
    if not isinstance(value, _CONSTANTS):
        raise ShardingError(
            f"jigsaw.compile: an argument of {type(module).__name__} is a {type(value).__name__}, which a graph cannot "
            "take apart; pass tiles, tensors, numbers, strings, and tuples, lists or dicts of them"
        )


def _check_module(module: nn.Module, names: Sequence[str], tensors: Sequence[Any]) -> None:
    pass


class _PlainModule(nn.Module):
    """The module below another, so that `functional_call` gives it its tensors and calls its own forward pass."""

    def __init__(self, forward: CompiledForward) -> None:
        super().__init__()
        self.module = forward.module
        self.call_plain = forward.call_plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_plain(*args, **kwargs)


class _GraphInput(torch.autograd.Function):
    """A parameter or a plain tensor, as the leaf that `graph_origins` looks for: AOTAutograd puts nodes of its own
    before the inputs of a graph.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.variable = leaf
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _as_leaf(x: Tensor, mark: int | None) -> Tensor:
    if not x.requires_grad:
        return x
    leaf = x.detach()
    entered = _GraphInput.apply(x, leaf)
    if mark is not None:
        setattr(leaf, AVERAGED_MARK, mark)
        setattr(entered, AVERAGED_MARK, mark)
    return entered


class TileGraph:
    """The compiled forward pass for one kind of arguments: layouts, numbers, training or not."""

    def __init__(
        self,
        forward: CompiledForward,
        names: Sequence[str],
        marks: Sequence[tuple[type, int | None]],
        spec: pytree.TreeSpec,
        values: Sequence[Any],
    ) -> None:
        self.names, self.marks, self.spec, self.values = names, marks, spec, values
        self.inner = _PlainModule(forward)
        self.failure: Exception | None = None
        self.results: tuple[pytree.TreeSpec, list[Any]] | None = None
        traced = torch.compiler.allow_in_graph(self._traced())

        def forward_on_tiles(*tensors: Tensor) -> Any:
            return traced(*tensors)

        # every size is a number in the layouts, so sizes are numbers in the graph
        self.compiled = torch.compile(
            forward_on_tiles, fullgraph=True, dynamic=False, isolate_recompiles=True, **forward.options
        )

    def _traced(self) -> Callable[..., Any]:
        def forward_pass(*tensors: Tensor) -> Any:
            try:
                return self._run(tensors)
            except Exception as error:
                self.failure = error
                raise

        return forward_pass

    def _run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The forward pass from tensors without values to tensors without values, noting what the results are."""
        weights = {
            f"module.{name}": _as_leaf(x, mark)
            for name, x, (_, mark) in zip(self.names, tensors, self.marks, strict=False)
        }
        left = iter(tensors[len(self.names) :])
        meshes = [v.mesh for v in self.values if isinstance(v, TensorPlace) and v.mesh is not None]
        leaves = [_entered(v, next(left), meshes) if isinstance(v, TensorPlace) else v[1] for v in self.values]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        given = dict(weights)
        with ordered_calls() as last_call:
            out = torch.func.functional_call(self.inner, given, args, kwargs)
            results, spec = pytree.tree_flatten(out)
            kinds = [_place_of(r) if isinstance(r, Tensor) else r for r in results]
            self.results = spec, kinds
            return *(r.local if isinstance(r, Tile) else r for r in results if isinstance(r, Tensor)), last_call()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        try:
            found = iter(self.compiled(*tensors))
        except Exception as error:
            failure, self.failure = self.failure, None
            if isinstance(failure, ShardingError):
                raise failure from None
            raise
        assert self.results is not None
        spec, kinds = self.results
        return pytree.tree_unflatten([_left(k, next(found)) if isinstance(k, TensorPlace) else k for k in kinds], spec)


def _entered(place: TensorPlace, x: Tensor, meshes: Sequence[DeviceMesh]) -> Tensor:
    if place.layout is not None and place.mesh is not None:
        return Tile(x, place.layout, place.mesh)
    if place.left and meshes:
        return leave_tile(x, meshes[0])
    return _as_leaf(x, None if place.averaged == 1 else place.averaged)


def _left(place: TensorPlace, x: Tensor) -> Tensor:
    if place.layout is not None and place.mesh is not None:
        return Tile(x, place.layout, place.mesh)
    return x
