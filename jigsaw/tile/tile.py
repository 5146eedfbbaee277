"""`Tile`: a rank's part of a global tensor that behaves like the whole one.

It is a torch.Tensor with ``__torch_function__`` (for C++ code: `TensorShell`; why it is not a DTensor: docs/design.md).
One closed table answers torch functions that meet a Tile.  The files of ops fill it through `implements_torch` when
jigsaw is imported.  A function that is not in the table is refused on a cut dim: there is never a silent gather, and
never a silent local result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodWrapperType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from jigsaw.comm import debug
from jigsaw.comm.exchange import redistribute_rows
from jigsaw.comm.graph_calls import leave_untraced
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import SplitRule
from jigsaw.geometry.layout import Layout, LayoutSpec, MeshCoordinate
from jigsaw.ranks.mesh import is_same_mesh, mesh_coordinate, mesh_size
from jigsaw.tile.shell_making import make_shell
from jigsaw.tile.table import ArgumentKinds, FoundAnswer, TableEntry, table
from jigsaw.tile.table import TileHandler as TileHandler
from jigsaw.tile.table import implements_torch as implements_torch
from jigsaw.tile.tensor_shell import TensorShell
from jigsaw.tile.tensor_shell import in_own_memory as in_own_memory
from jigsaw.torch_internals.autograd import MAKERS_OF_CLASS
from jigsaw.torch_internals.placements import whole_of_dtensor


def _find_answer(function: Any) -> FoundAnswer:
    entry = table.entries.get(function) or table.entries.get(_operator_name(function))
    if entry is None:
        entry = table.entries[function] = TableEntry(table.find_rest(function))
    kinds = entry.kinds
    by_place = {place: is_tile for place, _, is_tile in kinds}
    names = frozenset(("out", *_NUMPY_NAMES, *(name for _, name, is_tile in kinds if is_tile)))
    places = tuple(map(by_place.get, range(_QUICK_PLACES)))
    handler = table.with_check(function, entry.handler)
    answer = FoundAnswer(handler, kinds, places, names, table.find_watcher(function))
    table.found[function] = answer
    return answer


def _operator_name(function: Any) -> str:
    """Return the name of an operator of ``torch.ops`` without its overload; an empty one for other functions."""
    is_operator = isinstance(function, _OPERATOR_KINDS)
    return str(function).removesuffix(".default").replace(".", "::", 1) if is_operator else ""


_OPERATOR_KINDS = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # torch accepts NumPy's names for its own
_HAS_AXIS = frozenset((torch.segment_reduce, torch.quantize_per_channel, torch.fake_quantize_per_channel_affine))
_QUICK_PLACES = 16
# types that need no check; a subclass of one, an array or a list is checked further
_GIVEN_KINDS = {Tensor, Parameter, torch.Size, *map(type, (0, 0.0, True, "", None, ..., slice(0), torch.int))}


# What happens to a function that meets a tile, in this order:
#  1. While ranks debug, the outermost call is noted (`Table.note_call`), and comes back here.
#  2. Its entry is found by the function object: of a file of ops or nn, of an operator's name, else `Table.find_rest`.
#  3. Arguments get torch's names and kinds: arrays become tensors, ``axis=`` becomes ``dim=``, and ``out=`` is refused.
#  4. A function that changes its first argument in place is checked (`Table.find_watcher`).
#  5. A Tile where the handler takes a plain value, or the other way, is refused.
#  6. The handler runs, where torch has a kernel for the operands' dtypes (`Table.with_check`).
#  7. A refusal of 5 or 6 is raised, or the function runs on whole tensors (`Table.answer_refusal`).
#  8. A result that is a copy where torch has a view is noted (`Table.note_views`), and the change of 4 carried to it.
# An argument list that needs no change skips 3 and 5: `is_quick` says so from the types alone.
def _call_handler(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of the table's handler, once the arguments have torch's own names and kinds.

    *Raises*: `ShardingError` for ``out=``, for a Tile or a plain tensor where the handler takes the other, and for a
    tile out of a custom autograd.Function.
    """
    if debug.IS_DEBUGGING and debug.is_outermost_call():
        return table.note_call(_call_handler, function, args, kwargs)
    handler, kinds, by_place, names, watcher = table.found.get(function) or _find_answer(function)
    is_quick, is_apart, copies_before = len(args) <= _QUICK_PLACES, False, table.copies_made
    for value, is_tile in zip(args, by_place, strict=False):
        kind = type(value)
        if kind is Tile:
            local = value.local
            try:
                has_history = local.grad_fn is not None
            except RuntimeError as error:
                raise _changed_source_error(function, value) from error
            if not has_history and torch.is_grad_enabled():
                value.check_no_history()
            is_quick = is_quick and is_tile is not False
            is_apart = is_apart or "apart" in value.__dict__
        elif is_tile or kind not in _GIVEN_KINDS:
            is_sequence = not is_tile and (kind is tuple or kind is list)
            is_quick = is_quick and is_sequence and _GIVEN_KINDS.issuperset(map(type, value))
    if kwargs and not (names.isdisjoint(kwargs) and _GIVEN_KINDS.issuperset(map(type, kwargs.values()))):
        is_quick = False
    if not is_quick:
        args, kwargs = _as_arguments(function, args, kwargs)
    finish = None if watcher is None else watcher(function, args, kwargs)
    try:
        if not is_quick:
            _check_kinds(function, kinds, args, kwargs)
        out = handler(*args, **kwargs)
    except ShardingError as refusal:
        out = table.answer_refusal(refusal, function, args, kwargs)
    if is_apart or table.copies_made != copies_before:
        table.note_views(out)
    return out if finish is None else finish(out)


def _as_arguments(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.pop("out", None) is not None:
        raise ShardingError(
            f"{getattr(function, '__name__', function)}(out=...) is not supported on tiles: a Tile is frozen; use "
            f"the result instead: x = {getattr(function, '__name__', 'f')}(...), or x[...] = it for a Tile x"
        )
    other_names = {} if function in _HAS_AXIS else _NUMPY_NAMES
    named = {other_names.get(name, name): _as_argument(value) for name, value in kwargs.items()}
    return tuple(map(_as_argument, args)), named


def _check_kinds(function: Any, kinds: ArgumentKinds, args: Any, kwargs: dict[str, Any]) -> None:
    for place, name, is_tile in kinds:
        value = args[place] if place < len(args) else kwargs.get(name, _NOT_GIVEN)
        if value is not _NOT_GIVEN and isinstance(value, Tile) is not is_tile:
            _refuse_kind(function, name, value)


def _changed_source_error(function: Any, tile: Tile) -> ShardingError:
    """Return the error for a tile whose node autograd cannot tell: a view that entered, of a tensor changed since."""
    return ShardingError(
        f"{getattr(function, '__name__', function)} of a Tile of shape {tuple(tile.shape)}: it is a view of a plain "
        "tensor that requires grad, and that tensor was changed in place since, so its gradient would be lost; make "
        "the Tile again after the change, or give clone() of the tensor"
    )


_NOT_GIVEN = object()


def _as_argument(value: Any) -> Any:
    """Return a NumPy array that meets a tile as a plain tensor, which is whole."""
    if isinstance(value, Tile):
        value.check_no_history()
    elif type(value) in table.plain_readers:
        return table.plain_readers[type(value)](value)
    elif isinstance(value, np.ndarray):
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, Tile):
                item.check_no_history()
            elif isinstance(item, np.ndarray) and type(value) is tuple:  # a tuple with an array is an index
                return tuple(map(_as_argument, value))
    return value


def _refuse_kind(function: Any, name: str, value: Any) -> NoReturn:
    what = getattr(function, "__name__", str(function))
    if isinstance(value, Tile):
        raise ShardingError(
            f"{what}: {name}= is a Tile of shape {tuple(value.shape)}, but it is answered for plain values only; pass "
            "tile.full_tensor(), or tile.local for a local answer"
        )
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ShardingError(
        f"{what}: {name}= is a plain {type(value).__name__}{shape}, but another argument is a Tile; make {name} a Tile "
        "with jigsaw.shard (uncut, if every rank has it), or pass tile.full_tensor() for the Tile"
    )


def _any_operator(self: Any, *others: Any) -> Any: ...


class Tile(TensorShell):
    """Local part of a global tensor: `local` is what `layout` says that this rank of `mesh` holds, halo included.

    It shows the global view: ``shape``, reductions, broadcasting and indexing are those of the whole tensor.  Gradients
    flow to ``local``, which may require grad.  `shard` and `from_local` make one.

    *Shapes*: global `Tile.shape`; per rank ``local.shape``, which is ``layout.local_shape(coordinate)``.
    *Raises*: `ShardingError` for every function without an exact result on a cut dim; it names the remedy.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> tile = jigsaw.shard(torch.randn(2, 3, 33, 64), mesh, (None, None, "lat", "lon"))
    >>> torch.nn.Conv2d(3, 8, 3, padding=1)(tile).shape
    torch.Size([2, 8, 33, 64])
    >>> tile.square().mean().ndim, tile.coordinate
    (0, (0, 0))
    """

    local: Tensor
    layout: Layout
    mesh: DeviceMesh
    shape: torch.Size

    if not TYPE_CHECKING:  # hides torch's descriptors of these names, so that values set in `__new__` are read
        layout = shape = None

    def __new__(cls, local: Tensor, layout: Layout, mesh: DeviceMesh) -> Tile:
        shape = torch.Size(layout.shape)
        tile = make_shell(cls, shape, local.dtype)
        state = tile.__dict__
        state["local"], state["layout"], state["mesh"], state["shape"] = local, layout, mesh, shape
        if table.see_new_tile is not None:
            table.see_new_tile(tile)
        return tile

    def view_of_itself(self) -> Any:
        """Return the view of a shell; a watcher of new tiles sees it."""
        view = super().view_of_itself()
        if table.see_new_tile is not None:
            table.see_new_tile(view)
        return view

    if TYPE_CHECKING:  # operators that are set below, for type checkers
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _any_operator
        __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _any_operator
        __neg__ = __abs__ = __invert__ = __rmod__ = __and__ = __or__ = __xor__ = _any_operator
        __lt__ = __le__ = __gt__ = __ge__ = _any_operator
        __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _any_operator
        __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _any_operator
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __rand__ = __ror__ = __rxor__ = __pos__ = _any_operator

    # -- the global view ----------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    def dim(self) -> int:
        return self.layout.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d tile")
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.local.itemsize

    @property
    def grad(self) -> Tile | None:
        """Gradient, as a tile: of a row that ranks hold as halo, too, each has a part, and these sum to the whole."""
        return None if self.local.grad is None else Tile(self.local.grad, self.layout, self.mesh)

    @grad.setter
    def grad(self, value: Tile | None) -> None:
        if value is not None and (not isinstance(value, Tile) or value.layout != self.layout):
            raise ShardingError(
                f"tile.grad of a Tile cut as {self.layout} can be None, or a Tile that lies alike; bring it there with "
                "gradient.with_layout(tile.layout)"
            )
        self.local.grad = None if value is None else value.local

    # -- where it sits ------------------------------------------------------------------------------------------------

    @property
    def coordinate(self) -> MeshCoordinate:
        """Coordinate of this rank in the mesh."""
        return mesh_coordinate(self.mesh)

    def owned(self) -> Tile:
        """Return the same tile without its halo; nothing is sent."""
        if not self.layout.has_halo:
            return self
        bare = self.layout.without_halo()
        return Tile(redistribute_rows(self.local, self.layout, bare, self.mesh), bare, self.mesh)

    def redistribute(
        self,
        spec: LayoutSpec | None = None,
        split: SplitRule | Mapping[int, SplitRule] = "balanced",
        align: int | Mapping[int, int] = 1,
        *,
        placements: Sequence[Any] | None = None,
    ) -> Tile:
        """Return the same tensor, cut by another `spec`; `split` and `align` as in `jigsaw.shard`.

        ``placements=[Replicate()]`` is torch's DTensor term for a spec that cuts nothing: nets pass it to any tensor
        that has this method.

        *Sends*: the rows that other ranks will hold and this rank owns; backward likewise, the other way.
        *Raises*: `ShardingError` for a spec that does not fit, dims that were flattened together, or placements that
        are not all Replicate.
        """
        if placements is not None and (spec is not None or not all(p.is_replicate() for p in placements)):
            raise ShardingError(f"redistribute of a Tile by placements={placements}: only Replicate(); pass a spec")
        if placements is not None:
            return self.with_layout(self.layout.uncut())
        if spec is None:
            raise ShardingError("redistribute of a Tile needs a spec: for each dim the mesh axis that cuts it, or None")
        return self.with_layout(Layout.of(self.shape, spec, self.layout.axes, split=split, align=align))

    def with_layout(self, layout: Layout) -> Tile:
        """Return the same tensor in another layout of the same mesh: other cut points, or a halo.

        *Sends*: the rows that other ranks will hold and this rank owns; backward likewise, the other way.
        """
        self.check_no_history()
        return Tile(redistribute_rows(self.local, self.layout, layout, self.mesh), layout, self.mesh)

    def full_tensor(self) -> Tensor:
        """Return the whole tensor as an ordinary one, on every rank; a halo is left out.

        *Sends*: this rank's owned rows to every rank that lacks them; backward, nothing (the gradient is the same on
        all).
        """
        self.check_no_history()
        return leave_tile(redistribute_rows(self.local, self.layout, self.layout.uncut(), self.mesh), self.mesh)

    # -- dispatch -----------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # `Tensor.T.__get__(tile)`, which C++ code and torch use
        if func.__class__ is MethodWrapperType:
            descriptor = func.__self__
            if func == getattr(descriptor, "__set__", None):
                return setattr(args[0], descriptor.__name__, args[1])
            if func == getattr(descriptor, "__get__", None):
                return torch.strided if descriptor is Tensor.layout else getattr(args[0], descriptor.__name__)
        return _call_handler(func, *args, **kwargs) if kwargs else _call_handler(func, *args)

    # No subscript of its own, because a Python class that has one is a sequence for C code, which would take it apart.

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __reversed__(self) -> Any:
        return self.flip(0) if self.ndim else self

    def __contains__(self, element: Any) -> bool:
        return bool((self == element).any())

    def __repr__(self) -> str:
        cut = ", ".join(
            f"dim {d} ({self.shape[d]}) by {'x'.join(self.layout.dim_axes(d))}" for d in self.layout.cut_dims
        )
        box = " x ".join(f"{a}:{b}" for a, b in self.layout.owned(self.coordinate))
        halo = f", held {tuple(self.local.shape)}" if self.layout.has_halo else ""
        at = ", ".join(f"{n}={c}/{s}" for (n, s), c in zip(self.layout.axes, self.coordinate, strict=True))
        return f"Tile(shape {tuple(self.shape)}, {self.dtype}; cut: {cut or 'nowhere'}; at {at} owns [{box}]{halo})"


def _make_method(function: Any) -> Callable[..., Any]:
    def method(self: Tile, *args: Any, **kwargs: Any) -> Any:
        return _call_handler(function, self, *args, **kwargs)

    method.__name__ = function.__name__
    return method


def _make_attribute(descriptor: Any, name: str) -> property:
    def read(tile: Tile) -> Any:
        if descriptor not in table.entries:
            raise ShardingError(f"a Tile of shape {tuple(tile.shape)} has no {name}; tile.local is this rank's tensor")
        return _call_handler(descriptor, tile)

    return property(read)


def _hide_tensor(cls: Any) -> None:
    """Send everything else that torch.Tensor has to the table, so that nothing could answer from the shell."""
    own = {name for base in cls.__mro__[: cls.__mro__.index(Tensor)] for name in vars(base)}
    of_the_class = {
        *("__getitem__ __setitem__ __delitem__ __slotnames__ __new__ __init__ __class__ __dict__".split()),
        *("__weakref__ __doc__ __module__ __annotations__".split()),
        *("__init_subclass__ __subclasshook__ __getattribute__ __str__ __sizeof__ __torch_function__".split()),
        *("__array_priority__", *MAKERS_OF_CLASS),
    }
    for name in sorted(set(dir(Tensor)) - own - of_the_class):
        member = getattr(Tensor, name)
        setattr(cls, name, _make_method(member) if callable(member) else _make_attribute(member, name))


_hide_tensor(Tile)
# a package may compile one of its functions, in which tiles then appear
leave_untraced(_call_handler, *(x for x in vars(Tile).values() if isinstance(x, FunctionType)))
leave_untraced(Tile.__torch_function__.__func__, Tile.__new__)


# -- what the table does not know -------------------------------------------------------------------------------------


def tiles_in(values: object) -> Iterator[Tile]:
    """Iterate over every Tile among arguments, lists, tuples and dicts."""
    if isinstance(values, Tile):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tiles_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tiles_in(value)


def spec_without(layout: Layout, dims: Sequence[int]) -> tuple[str | tuple[str, ...] | None, ...]:
    """Return the spec with the axes that cut `dims` moved to the longest other dim that nothing cuts, if there is one.

    >>> from jigsaw.tile.tile import spec_without
    >>> spec_without(jigsaw.Layout.of((4, 9, 7), (None, "lat", None), (("lat", 2),)), [1])
    (None, None, 'lat')
    """
    axes = [layout.dim_axes(d) for d in range(layout.ndim)]
    for d in dims:
        free = [e for e in range(layout.ndim) if e not in dims and not axes[e] and layout.shape[e] > 1]
        if axes[d] and free:
            axes[max(free, key=lambda e: layout.shape[e])] = axes[d]
        axes[d] = ()
    return tuple(None if not names else names[0] if len(names) == 1 else tuple(names) for names in axes)


def refusal_error(function: Any, tile: Tile, why: str, remedy: str, needs_whole: Sequence[int] = ()) -> ShardingError:
    """Return the error for an op without an exact result: it names the op, the dims, the rule and the remedy.  Where
    the dims that it needs whole are given, it has the line to write.
    """
    if needs_whole and len(tile.layout.cuts) == tile.ndim:
        remedy += f": x = x.redistribute({spec_without(tile.layout, needs_whole)!r})"
    name = getattr(function, "__name__", str(function))
    cut = ", ".join(
        f"dim {d} ({tile.shape[d]} rows, cut by {'+'.join(tile.layout.dim_axes(d))})" for d in tile.layout.cut_dims
    )
    return ShardingError(f"{name} on a Tile of shape {tuple(tile.shape)}, {cut or 'uncut'}: {why}; {remedy}")


# -- leaving and entering ---------------------------------------------------------------------------------------------


class _Leave(torch.autograd.Function):
    """Mark of a plain tensor that was computed from a tile: its gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        # `loss += penalty` is common, and torch forbids changing a view from inside a Function in place
        return x.view_as(x) if x.ndim else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # which may differ by rank, as for a loss that is scaled by the rank
        grad = whole_of_dtensor(grads[0])  # a DTensor where a loss met cut weights, as for their decay
        debug.meet_left_gradient(ctx.mesh, grad)
        return grad, None


LEAVE_NODE = "_LeaveBackward"


def leave_tile(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return an ordinary tensor, the same on every rank of the mesh, from a tile."""
    x = _Leave.apply(x, mesh) if x.requires_grad and mesh_size(mesh) > 1 else x
    return x if table.see_left_tensor is None else table.see_left_tensor(x)


def shared_mesh(tiles: Sequence[Tile]) -> DeviceMesh:
    """Return the mesh that the tiles share.

    Raises: `ShardingError` when they sit on different meshes.
    """
    mesh = tiles[0].mesh
    for other in tiles[1:]:
        if not is_same_mesh(mesh, other.mesh):
            raise ShardingError(
                f"tiles on different meshes cannot meet: {mesh} and {other.mesh}; make both on one mesh"
            )
    return mesh
