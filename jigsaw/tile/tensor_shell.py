"""`TensorShell`: the torch.Tensor that C++ code sees of a Tile, without its own memory.

Python code and functions of torch never read the shell.  C++ code that does (a custom ``autograd.Function``,
TorchScript, an extension) finds a tensor on the meta device.  Its sizes are the global ones; its memory, strides and
kernels are refused.  `local` has the history of autograd.  A history on the shell would be lost, so that is found and
refused, too.

>>> tile = jigsaw.shard(torch.arange(4.0), jigsaw.init_mesh(lat=1), ("lat",))
>>> isinstance(tile, torch.Tensor), tile.device.type
(True, 'cpu')
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import FrozenInstanceError
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import debug
from jigsaw.comm.wire_values import lie_in_one_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.tile.shell_making import META_DEVICE, make_shell, tile_as_pickle
from jigsaw.tile.table import table
from jigsaw.torch_internals.autograd import (
    ATTRIBUTES_OF_LOCAL,
    HOOKS_ATTRIBUTE,
    PARAMETER_ATTRIBUTE,
    TensorBase,
    as_plain_tensors,
    next_node_number,
    node_number,
    own_version,
    result_metadata,
    saved_tensor_hooks,
    set_versions,
    swap_tensors_in_place,
    tensor_users,
)
from jigsaw.torch_internals.groups import change_units_of_fsdp

# Attributes that the local tensor answers for the tile, because they do not depend on the rest of the global tensor.
_ATTRIBUTES_OF_LOCAL = (
    "device dtype itemsize retains_grad grad_dtype output_nr volatile name "
    "is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr "
    "is_vulkan is_xla is_xpu"
).split() + ATTRIBUTES_OF_LOCAL

# -- a shell in the graph ---------------------------------------------------------------------------------------------

# The backward hooks of modules pass what requires grad through a Function that returns it as it is.  They ask for
# `requires_grad` first: that puts the shell into the graph (`_EnterShell`).  What the Function returns has its node.
# The next who reads `local` leaves the shell behind that node (`_LeaveShell`): local, shell, node, local.
_IDENTITIES = ("BackwardHookFunctionBackward",)
ENTER_NODE = "_EnterShellBackward"
_LEAF_NODE = "torch::autograd::AccumulateGrad"
# Reentrant checkpointing (of what got no tile and made one) runs a backward pass of its own, and DDP looks for unused
# parameters behind the shell.
_UNFOLLOWED = ("CheckpointFunctionBackward", "_CheckpointTilesBackward", "_DDPSinkBackward")


GRAPH_THROUGH_UNIT = (
    "create_graph=True through weights that shard_weights= cuts: FSDP2 frees gathered weights in the backward pass, "
    "and sums their gradients without a graph, so a penalty on gradients would have none; pass shard_weights=False"
)


def reduce_units_behind_their_gradients() -> None:
    """Pass the local tensors of a unit's tiles, not the tiles, through the Function by which FSDP2 reduces gradients.

    Autograd runs the nodes of each device in a thread of its own.  A node of shells is none of a GPU's: it would reduce
    the unit's gradients while the GPU's thread has not made all of them.
    """
    change_units_of_fsdp(_pass_into_unit)


def _pass_into_unit(torchs_apply: Callable[..., Any], parameters: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    # tiles and plain tensors apart: a plain tensor behind a node of tiles would be taken for one that left a tile
    tiles = [x for x in inputs if isinstance(x, TensorShell)]
    plain = [x for x in inputs if not isinstance(x, TensorShell)]
    passed: Sequence[Tensor] = torchs_apply(parameters, *(x.local for x in tiles)) if tiles else ()
    if passed and passed[0].grad_fn is not None:
        passed[0].grad_fn.register_prehook(_refuse_gradients_with_graph)
    locals_ = iter(passed)
    others = iter(torchs_apply(parameters, *plain) if plain else ())
    return tuple(
        type(x)(next(locals_), x.__dict__["layout"], x.__dict__["mesh"]) if isinstance(x, TensorShell) else next(others)
        for x in inputs
    )


def _refuse_gradients_with_graph(grads: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled():
        raise ShardingError(GRAPH_THROUGH_UNIT)


class _EnterShell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shell: TensorShell, local: Tensor) -> TensorShell:
        ctx.mark_dirty(shell)
        ctx.set_materialize_grads(False)  # a shell that entered twice has no gradient from its first entry
        ctx.entered = ref(shell)
        return shell

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor | None]:
        return None, None if grads[0] is None else grads[0].local


class _LeaveShell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shell: TensorShell) -> Tensor:
        state = shell.__dict__
        ctx.cls, ctx.layout, ctx.mesh = type(shell), state["layout"], state["mesh"]
        return state["_rows"].view_as(state["_rows"])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.cls(grads[0], ctx.layout, ctx.mesh)


class _ThroughFunction(torch.autograd.Function):
    """Function from the local tensors of the tiles, and the plain tensors, that a custom Function took to the local
    tensor of its result.

    The custom forward ran on tiles without autograd, and its node leads from shell to shells.  So its backward runs by
    itself, on the gradient as a tile: it works on tiles, too.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, edge: GradientEdge, as_tile: Any, layouts: Sequence[Layout | None], *inputs: Tensor
    ) -> Tensor:
        # not the shell, which its local tensor's node would keep alive, and no inputs, which a checkpoint frees
        ctx.edge, ctx.as_tile, ctx.layouts = edge, as_tile, layouts
        ctx.saved_rows = _saved_rows(edge.node)
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        node, which = ctx.edge.node, ctx.edge.output_nr
        if any(own_version(x) != version for x, version in ctx.saved_rows):
            raise RuntimeError(
                f"a Tile that {node.name()} saved for its gradient was changed in place since, through a view; make "
                "the change before it, or give the Function tile.clone()"
            )
        # not by the engine, to which the gradient of a plain weight, as a tile, would be on another device
        seeds = [ctx.as_tile(grads[0] if i == which else None, m) for i, m in enumerate(result_metadata(node))]
        gradients = node.apply(*seeds)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        needed = [g for g, needs in zip(gradients, node.needs_input_grad, strict=False) if needs]
        none = (None, None, None, None)
        return *none, *(None if g is None else _as_laid(g, s) for g, s in zip(needed, ctx.layouts, strict=True))


def _saved_rows(node: Any) -> list[tuple[Tensor, int]]:
    """Return the local tensors of tiles that a custom Function saved, with their versions."""
    saved: Sequence[Any] = ()
    if saved_tensor_hooks(True) is None:
        # raised for a saved tile that was changed; the backward pass will raise, too
        with as_plain_tensors(), suppress(RuntimeError):
            saved = node.saved_tensors
    rows = [x.local for x in saved if isinstance(x, TensorShell)]
    # where the result is first read after a change, the present version would hide that change
    are_same = [getattr(x.untyped_storage(), _CHANGED_AT, 0) <= node_number(node) for x in rows]
    return [(x, own_version(x) if is_same else -1) for x, is_same in zip(rows, are_same, strict=True)]


# attribute of memory: the number of autograd's next node when it was last changed in place
_CHANGED_AT = "_jigsaw_changed_at"


def note_change(memory: torch.UntypedStorage) -> None:
    """Remember that a tile with this memory is changed in place, for the Functions that have saved it."""
    if torch.is_grad_enabled():  # a custom Function's forward runs without grad mode, so its own changes are not noted
        setattr(memory, _CHANGED_AT, next_node_number())


def _as_laid(gradient: Any, layout: Layout | None) -> Tensor:
    """Return the local part of a gradient, in the layout of its tile; that of a plain tensor is whole."""
    if layout is None:
        return gradient.full_tensor() if isinstance(gradient, TensorShell) else gradient
    if not isinstance(gradient, TensorShell):
        raise ShardingError(
            f"the backward of a custom autograd.Function returned a plain tensor as the gradient of a Tile of shape "
            f"{layout.shape}; return a Tile, as torch's functions of tiles give it"
        )
    return (gradient if gradient.__dict__["layout"] == layout else gradient.with_layout(layout)).local


def _local_through_function(shell: TensorShell, node: Any, rows: Tensor) -> Tensor:
    """Return the local tensor of a custom Function's result, with a gradient that reaches its inputs.

    *Raises*: `ShardingError` where an input that requires grad is not a leaf, was not saved, and is no longer there as
    a tile. Also where a tile has a halo. `RuntimeError` where one was changed in place since, as torch's.
    """
    if debug.IS_DEBUGGING:
        debug.note_call(shell.__dict__["mesh"], f"a Tile {list(shell.shape)} out of {node.name()}")
    with as_plain_tensors():
        inputs_of_node = _inputs_of_node(node)
        edge = GradientEdge(node, TensorBase.output_nr.__get__(shell))
    sources = [s for s in inputs_of_node if s is not None]
    tiles = [s for s in sources if isinstance(s, TensorShell)]
    is_torchs = node.name() in _UNFOLLOWED
    if is_torchs or len(sources) < len(inputs_of_node) or any(t.__dict__["layout"].has_halo for t in (shell, *tiles)):
        raise _lost_gradient(shell, node)
    if any(getattr(t.local.untyped_storage(), _CHANGED_AT, 0) > node_number(node) for t in tiles):
        raise RuntimeError(
            f"the input of {node.name()} was changed in place before its result, a Tile of shape {tuple(shell.shape)}, "
            "was used: its gradient would be that of the changed input; give the Function tile.clone()"
        )
    layout, mesh = shell.__dict__["layout"], shell.__dict__["mesh"]
    as_tile = partial(_tile_of, type(shell), layout, mesh)
    inputs = [s.local if isinstance(s, TensorShell) else table.enter_function(s, shell) for s in sources]
    layouts = [s.__dict__["layout"] if isinstance(s, TensorShell) else None for s in sources]
    local = _ThroughFunction.apply(rows, edge, as_tile, layouts, *inputs)
    for tile in tiles:
        _part_from_graph(tile)
    return local


class _WithoutRows(torch.autograd.Function):
    """Function from a local tensor to one of its shape that has its history and no memory."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return local.new_empty(()).expand(local.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _part_from_graph(tile: TensorShell) -> None:
    """Give a tile another C++ tensor than the one that autograd keeps as a leaf, so that its memory ends with it."""
    with as_plain_tensors():
        # the object and the leaf's node; a third one has saved it, to read its values
        is_leaf_alone = TensorBase.grad_fn.__get__(tile) is None and tensor_users(tile) == 2
    if is_leaf_alone:
        rows = _WithoutRows.apply(tile.local)
        setattr(rows.untyped_storage(), _CHANGED_AT, getattr(tile.local.untyped_storage(), _CHANGED_AT, 0))
        with suppress(RuntimeError):  # C++ code has a weak reference to the tile
            swap_tensors_in_place(tile, type(tile)(rows, tile.__dict__["layout"], tile.__dict__["mesh"]))


def _inputs_of_node(node: Any) -> list[Tensor | None]:
    """Return the inputs of a custom Function that require grad: leaves, entered tiles, what it saved; else None."""
    edges = [(n, at) for n, at in node.next_functions if n is not None]
    hooks = saved_tensor_hooks(True)
    # values that a hook packed (as checkpointing does) are not unpacked, because that may run the forward pass again
    known = {_LEAF_NODE: attrgetter("variable"), ENTER_NODE: methodcaller("entered")}
    leaves = [known[n.name()](n) if n.name() in known else None for n, _ in edges]
    saved = [] if hooks is not None or not any(x is None for x in leaves) else node.saved_tensors
    by_edge = {(TensorBase.grad_fn.__get__(x), TensorBase.output_nr.__get__(x)): x for x in saved if x is not None}
    return [by_edge.get(edge) if leaf is None else leaf for leaf, edge in zip(leaves, edges, strict=True)]


def _tile_of(cls: type, layout: Layout, mesh: DeviceMesh, local: Tensor | None, like: Any) -> Any:
    """Return a gradient as a tile; zeros for an output that has none."""
    if local is None:
        zeros = torch.zeros((), dtype=like.dtype, device=mesh.device_type).expand(like.shape)
        return cls(zeros, Layout.of(like.shape, (None,) * len(like.shape), layout.axes), mesh)
    return cls(local, layout, mesh)


def _node_of_shell(shell: TensorShell) -> Any:
    with as_plain_tensors():
        return TensorBase.grad_fn.__get__(shell)


def _has_entered(node: Any, output: int) -> bool:
    """Say whether an input of an identity is a tile that entered the graph, a plain tensor, or needs no gradient."""
    # metadata do not name a subclass, but of tensors with values only shells are on the meta device
    return node is None or node.name() == ENTER_NODE or result_metadata(node)[output].device != META_DEVICE


class _LocalBehindNode:
    """Descriptor of `local` until its first read.  For a tile that autograd has made as a view of another one, or whose
    local tensor still has to arrive; then ``__dict__["awaited"]`` names its source.
    """

    def __get__(self, shell: TensorShell | None, cls: type) -> Any:
        if shell is None:
            return self
        state = shell.__dict__
        if "awaited" in state:
            return state["awaited"](shell)
        node = _node_of_shell(shell)
        if node is None:
            local = state["_rows"]
        elif node.name() in _IDENTITIES and all(_has_entered(n, output) for n, output in node.next_functions):
            local = _LeaveShell.apply(shell)
        else:
            local = _local_through_function(shell, node, state["_rows"].detach())
        state["local"] = local
        return local


def _lost_gradient(shell: TensorShell, node: Any) -> ShardingError:
    return ShardingError(
        f"a Tile of shape {tuple(shell.shape)} came out of {node.name()}, an autograd.Function that looks into the "
        "graph itself, or took a plain tensor that requires grad or a tile with a halo: its gradient would be lost; "
        "use torch's own functions, checkpoint(..., use_reentrant=False), torch.no_grad() where no gradient is needed, "
        "tile.owned(), or tile.full_tensor(); DDP: leave out find_unused_parameters= and static_graph="
    )


# Fields of a tile in its `__dict__`; everything else there was set by others.
_STATE = frozenset("local layout mesh shape awaited numbered _rows _entered".split())

# For a type checker a Tile has whatever torch.Tensor has, of a type that the table alone knows.
if TYPE_CHECKING:
    _TensorBase: Any = Tensor
else:
    _TensorBase = Tensor


class TensorShell(_TensorBase):
    """Behavior of a Tile as an object, as a number and as an array, whatever its layout is."""

    local: Tensor

    # -- below the functions of torch ---------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # autograd adds up the gradients of a tile that entered several Functions, as units of FSDP2 that take the same
        # input; with create_graph=True the sum would have no history, so it is refused
        is_sum = func is torch.ops.aten.add.Tensor and all(isinstance(x, TensorShell) for x in args)
        if is_sum and not torch.is_grad_enabled():
            first, second = args
            return cls(first.local + _as_laid(second, first), first.__dict__["layout"], first.__dict__["mesh"])
        if func is torch.ops.aten.detach.default:  # a result that a Function saves for its own backward is detached
            return cls(args[0].local.detach(), args[0].__dict__["layout"], args[0].__dict__["mesh"])
        raise ShardingError(
            f"a Tile cannot become a plain tensor by itself, which {func} below torch's own functions took it for (a "
            "custom autograd.Function, a full backward hook, TorchScript or C++ code); use tile.full_tensor() for the "
            "whole tensor (with its gradient), or tile.local for this rank's part"
        )

    def check_no_history(self) -> None:
        """Give the local tensor its history, for a tile that came out of a custom ``autograd.Function``.

        Its forward ran without autograd, so the local tensor has no history: autograd's record is on the shell.

        *Raises*: `ShardingError` where that cannot be followed.
        """
        # not `requires_grad`, which is True of a view that a Function made of its input even without a way back
        if self.local.grad_fn is None and torch.is_grad_enabled():
            node = _node_of_shell(self)
            if node is not None and node.name() != ENTER_NODE:
                self.__dict__["local"] = _local_through_function(self, node, self.local.detach())

    def view_of_itself(self) -> Any:
        """Return ``x.view_as(x)``, which autograd makes of an input that a Function returns unchanged."""
        state = self.__dict__
        view = make_shell(type(self), self.shape, self.dtype, needs_node=False)
        rows = self.local.view_as(self.local)
        view.__dict__.update(_rows=rows, layout=state["layout"], mesh=state["mesh"], shape=self.shape)
        return view

    @property
    def requires_grad(self) -> bool:
        self.check_no_history()
        local = self.local
        if local.requires_grad and torch.is_grad_enabled():
            state, node = self.__dict__, local.grad_fn
            # a change in place has given the local tensor another node
            if state.get("_entered", self) is not node:
                with as_plain_tensors():
                    if TensorBase.grad_fn.__get__(self) is None:
                        TensorBase.requires_grad.__set__(self, False)
                    version = own_version(self)
                _EnterShell.apply(self, local)
                # no value has changed, so a saved shell, as of checkpointing, stays valid
                set_versions((self,), (version,))
                state["_entered"] = node
        return local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad = value

    @property
    def grad_fn(self) -> Any:
        self.check_no_history()
        node = _node_of_shell(self) if "_rows" in self.__dict__ else None
        return node if node is not None and node.name() in _IDENTITIES else self.local.grad_fn

    @property
    def is_leaf(self) -> bool:
        self.check_no_history()
        return self.local.is_leaf

    # -- an object ----------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name == HOOKS_ATTRIBUTE and value is None:
            return  # autograd, where the shell enters the graph
        if name == PARAMETER_ATTRIBUTE:
            raise ShardingError(
                f"a Tile of shape {tuple(self.shape)} cannot be a parameter: make one of tile.local, or of the whole "
                "tensor and pass the model through jigsaw.parallelize"
            )
        descriptor = getattr(type(self), name, None)
        if name in _STATE or (hasattr(type(descriptor), "__set__") and getattr(descriptor, "fset", None) is None):
            raise FrozenInstanceError(
                f"cannot assign to field {name!r}: a Tile is frozen; change tile.local, or make another Tile"
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _STATE or name not in self.__dict__:
            raise FrozenInstanceError(f"cannot delete field {name!r}: a Tile is frozen")
        del self.__dict__[name]

    def __hash__(self) -> int:
        return id(self)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__})

    def __format__(self, format_spec: str) -> str:
        return (
            format(self.item(), format_spec) if format_spec and not self.ndim else object.__format__(self, format_spec)
        )

    def __copy__(self) -> Any:
        copied = type(self)(*self._parts())
        copied.__dict__.update(self._attributes())
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        local, layout, mesh = self._parts()
        copied = memo[id(self)] = type(self)(copy.deepcopy(local, memo), layout, mesh)
        copied.__dict__.update(copy.deepcopy(self._attributes(), memo))
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        return tile_as_pickle(type(self), *self._parts())

    def _parts(self) -> tuple[Any, ...]:
        state = self.__dict__
        return self.local, state["layout"], state["mesh"]

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that others have set on the tile, as on any tensor."""
        return {name: value for name, value in self.__dict__.items() if name not in _STATE}

    # -- a number, an array -------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise ShardingError(
                f"bool() of a Tile of shape {tuple(self.shape)} is ambiguous; reduce it first, e.g. tile.all() or "
                "tile.any()"
            )
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self.dtype.is_floating_point or self.dtype.is_complex:
            raise TypeError(f"only integer tiles of one element can be an index, not one of {self.dtype}")
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._refuse_to_become("an array")

    def __dlpack__(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse_to_become("a plain tensor")

    def __dlpack_device__(self) -> NoReturn:
        self._refuse_to_become("a plain tensor")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError("a Tile has no array interface; use tile.full_tensor(), or tile.local")

    def _refuse_to_become(self, what: str) -> NoReturn:
        raise ShardingError(
            f"a Tile of shape {tuple(self.shape)} cannot become {what} by itself; use tile.full_tensor() for the whole "
            "tensor (with its gradient), or tile.local for this rank's part"
        )


if not TYPE_CHECKING:
    TensorShell.local = _LocalBehindNode()
    for _name in _ATTRIBUTES_OF_LOCAL:
        if hasattr(TensorBase, _name):  # a few are missing in some versions of torch
            setattr(TensorShell, _name, property(attrgetter(f"local.{_name}")))


def in_own_memory(y: Tensor, x: TensorShell) -> Tensor:
    """Return `y` in its own memory, as torch's results are.  Where nothing had to move, perhaps only on this rank, `y`
    is the rows of `x` themselves, and a change in place would reach them.
    """
    return y.clone(memory_format=torch.contiguous_format) if lie_in_one_memory(y, x.local) else y
