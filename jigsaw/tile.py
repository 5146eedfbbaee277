"""`Tile`: a rank's part of a global tensor that behaves like the whole one.

A plain frozen dataclass with ``__torch_function__`` (why not a subclass or a DTensor: docs/design.md).  Torch functions
that meet a Tile are answered from one closed table, which the files of ops fill through `implements_torch` when jigsaw
is imported; what the table does not know is refused on a cut dim.  Never a silent gather, never a silent local answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.agreement import agree_on_arguments
from jigsaw.elements import NoElementProtocols, is_in_subscript, refuse_element
from jigsaw.exchange import redistribute_rows
from jigsaw.layout import Layout, LayoutSpec, MeshCoordinate, ShardingError, SplitRule
from jigsaw.mesh import axes_of_mesh, is_same_mesh, mesh_coordinate

TileHandler = Callable[..., Any]
H = TypeVar("H", bound=TileHandler)

_handlers: dict[Any, TileHandler] = {}
_rest_finders: list[Callable[[Any], TileHandler]] = []


def implements_torch(*functions: Any) -> Callable[[H], H]:
    """Answer these torch functions, and the tensor methods of the same name, with the decorated handler."""

    def register(handler: H) -> H:
        for function in functions:
            _handlers[function] = handler
            method = getattr(Tensor, getattr(function, "__name__", ""), None)
            if method is not None and getattr(torch, function.__name__, None) is function:
                _handlers.setdefault(method, handler)
        return handler

    return register


def implements_rest(find: Callable[[Any], TileHandler]) -> Callable[[Any], TileHandler]:
    """Answer every function that no file of ops implements: `find` returns its handler (jigsaw.ops.pointwise has the
    one).
    """
    _rest_finders[:] = [find]
    return find


def _handler_of(function: Any) -> TileHandler:
    known = _handlers.get(function)
    if known is None:
        known = _handlers[function] = _rest_finders[0](function)
    return known


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # names that torch takes for its own


def _call_handler(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What the table answers, once the arguments are those of torch's own names and kinds.

    *Raises*: `ShardingError` for ``out=``, and for a Tile or a plain tensor where the handler takes the other.
    """
    if kwargs.pop("out", None) is not None:
        raise ShardingError(
            f"{getattr(function, '__name__', function)}(out=...) is not supported on tiles: a Tile is frozen; use the "
            "result instead"
        )
    handler = _handler_of(function)
    named = {_NUMPY_NAMES.get(name, name): _as_whole(value) for name, value in kwargs.items()}
    args = tuple(map(_as_whole, args))
    kinds = _kinds.get(handler)
    if kinds is None:
        kinds = _kinds[handler] = _kinds_of(handler)
    for (name, kind), value in zip(kinds.items(), args, strict=False):
        if kind is not None and isinstance(value, Tile) is not kind:
            _refuse_kind(function, name, value)
    for name, value in named.items():
        kind = kinds.get(name)
        if kind is not None and isinstance(value, Tile) is not kind:
            _refuse_kind(function, name, value)
    return handler(*args, **named)


def _as_whole(value: Any) -> Any:
    """An array of numpy's that meets a tile is the whole one, as a plain tensor is."""
    return torch.from_numpy(np.require(value, requirements=["C", "W"])) if isinstance(value, np.ndarray) else value


# For each handler, its arguments in order: whether each must be a Tile (True), must not be one (False), or may (None).
_kinds: dict[TileHandler, dict[str, bool | None]] = {}


def _kinds_of(handler: TileHandler) -> dict[str, bool | None]:
    """What the annotations of a handler say: `Tile`, something without one, or what may be either."""
    found: dict[str, bool | None] = {}
    for name, parameter in inspect.signature(handler).parameters.items():
        says = str(parameter.annotation)
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_open or any(word in says for word in ("Any", "Tile |", "Weight", "Values", "Mask")):
            found[name] = None
        else:
            found[name] = says == "Tile"
    return found


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


@dataclass(frozen=True, eq=False, repr=False)
class Tile(NoElementProtocols):
    """The local part of a global tensor: `local` is what `layout` says that this rank of `mesh` holds, halo included.

    It shows the global view: ``shape``, reductions, broadcasting and indexing are those of the whole tensor.  Gradients
    flow to ``local``, which may require grad.  `shard` and `from_local` make one.

    *Shapes*: global `Tile.shape`; per rank ``local.shape``, which is ``layout.local_shape(coordinate)``.
    *Raises*: `ShardingError` for every function that cannot be answered exactly on a cut dim; it names the remedy.

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

    if TYPE_CHECKING:  # what a type checker sees of the operators that are set below
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _any_operator
        __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _any_operator
        __neg__ = __abs__ = __invert__ = __and__ = __or__ = __xor__ = _any_operator
        __lt__ = __le__ = __gt__ = __ge__ = _any_operator
        __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _any_operator
        __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _any_operator
        __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __rand__ = __ror__ = __rxor__ = __pos__ = _any_operator

    # -- the global view ----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout.shape)

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
        if is_in_subscript():
            refuse_element(self.shape)  # plain[tile]: torch asks whether the index is a tuple, and then dispatches
        if not self.ndim:
            raise TypeError("len() of a 0-d tile")
        return self.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.local.is_cuda

    @property
    def is_nested(self) -> bool:
        return False

    @property
    def is_leaf(self) -> bool:
        return self.local.is_leaf

    @property
    def grad(self) -> Tile | None:
        """The gradient, as a tile: exact on the rows that this rank owns (halo rows hold this rank's part)."""
        return None if self.local.grad is None else replace(self, local=self.local.grad)

    @property
    def mT(self) -> Any:
        return self.transpose(-2, -1)

    # -- where it sits ------------------------------------------------------------------------------------------------

    @property
    def coordinate(self) -> MeshCoordinate:
        """This rank's coordinate in the mesh."""
        return mesh_coordinate(self.mesh)

    def owned(self) -> Tile:
        """The same tile without its halo; nothing is sent."""
        if not self.layout.has_halo:
            return self
        bare = self.layout.without_halo()
        return Tile(redistribute_rows(self.local, self.layout, bare, self.mesh), bare, self.mesh)

    def redistribute(
        self,
        spec: LayoutSpec,
        split: SplitRule | Mapping[int, SplitRule] = "balanced",
        align: int | Mapping[int, int] = 1,
    ) -> Tile:
        """The same tensor, cut by another `spec`.

        *Sends*: the rows that other ranks will hold and this rank owns; backward likewise, the other way.
        *Raises*: `ShardingError` for a spec that does not fit, or dims that were flattened together.
        """
        return self.with_layout(Layout.of(self.shape, spec, self.layout.axes, split=split, align=align))

    def with_layout(self, layout: Layout) -> Tile:
        """The same tensor in another layout of the same mesh: other cut points, or a halo.

        *Sends*: the rows that other ranks will hold and this rank owns; backward likewise, the other way.
        """
        return Tile(redistribute_rows(self.local, self.layout, layout, self.mesh), layout, self.mesh)

    def full_tensor(self) -> Tensor:
        """The whole tensor as an ordinary one, on every rank; a halo is left out.

        *Sends*: this rank's owned rows to every rank that lacks them; backward nothing (the gradient is held alike).
        """
        dims = [[c.uncut() for c in group] for group in self.layout.dims()]
        return leave_tile(
            redistribute_rows(self.local, self.layout, Layout.from_dims(dims, self.layout.axes), self.mesh), self.mesh
        )

    # -- dispatch -----------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call_handler(func, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        method = None if name.startswith("__") else getattr(Tensor, name, None)
        if method is None or not callable(method):
            raise AttributeError(f"'Tile' object has no attribute {name!r}; `tile.local` is this rank's tensor")
        return partial(_call_handler, method, self)

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and not is_in_subscript():
            refuse_element(self.shape)
        whole = tuple(map(_as_whole, index)) if isinstance(index, tuple) else index
        return _call_handler(Tensor.__getitem__, self, whole)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ShardingError(
            f"tile[{index!r}] = ... is not supported: a Tile is frozen; use torch.where or torch.cat, or write to "
            "tile.local"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __bool__(self) -> bool:
        raise ShardingError(
            f"bool() of a Tile of shape {tuple(self.shape)} is ambiguous; reduce it first, e.g. tile.all() or "
            "tile.any()"
        )

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        cut = ", ".join(
            f"dim {d} ({self.shape[d]}) by {'x'.join(self.layout.dim_axes(d))}" for d in self.layout.cut_dims
        )
        box = " x ".join(f"{a}:{b}" for a, b in self.layout.owned(self.coordinate))
        halo = f", held {tuple(self.local.shape)}" if self.layout.has_halo else ""
        at = ", ".join(f"{n}={c}/{s}" for (n, s), c in zip(self.layout.axes, self.coordinate, strict=True))
        return f"Tile(shape {tuple(self.shape)}, {self.dtype}; cut: {cut or 'nowhere'}; at {at} owns [{box}]{halo})"


def _make_operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def method(self: Tile, *args: Any) -> Any:
        return _call_handler(function, self, *args)

    method.__name__ = name
    return method


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod pow rpow matmul rmatmul neg abs invert "
    "and or xor rand ror rxor lshift rlshift rshift rrshift pos eq ne lt le gt ge "
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift"
).split():
    setattr(Tile, f"__{_name}__", _make_operator(f"__{_name}__"))


# -- what the table does not know -------------------------------------------------------------------------------------


def tiles_in(values: object) -> Iterator[Tile]:
    """Every Tile among arguments, lists, tuples and dicts."""
    if isinstance(values, Tile):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tiles_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tiles_in(value)


def refusal_error(function: Any, tile: Tile, why: str, remedy: str) -> ShardingError:
    """The error for an op that cannot be answered exactly: names the op, the dims, the rule and the remedy."""
    name = getattr(function, "__name__", str(function))
    cut = ", ".join(
        f"dim {d} ({tile.shape[d]} rows, cut by {'+'.join(tile.layout.dim_axes(d))})" for d in tile.layout.cut_dims
    )
    return ShardingError(f"{name} on a Tile of shape {tuple(tile.shape)}, {cut or 'uncut'}: {why}; {remedy}")


# -- leaving and entering ---------------------------------------------------------------------------------------------


class _Leave(torch.autograd.Function):
    """The mark, in the autograd graph, of a plain tensor that came out of a tile: its gradient is whole on every
    rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        return (grads[0],)


LEAVE_NODE = "_LeaveBackward"


def leave_tile(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """An ordinary tensor, held alike by every rank of the mesh, out of a tile."""
    return _Leave.apply(x) if x.requires_grad and mesh.size() > 1 else x


def shared_mesh(tiles: Sequence[Tile]) -> DeviceMesh:
    """The mesh that the tiles share.

    Raises: `ShardingError` when they sit on different meshes.
    """
    mesh = tiles[0].mesh
    for other in tiles[1:]:
        if not is_same_mesh(mesh, other.mesh):
            raise ShardingError(
                f"tiles on different meshes cannot meet: {mesh} and {other.mesh}; make both on one mesh"
            )
    return mesh


def in_own_memory(y: Tensor, x: Tile) -> Tensor:
    """`y`, in memory of its own as torch's results are: where nothing had to move, on this rank alone perhaps, the rows
    of `x` themselves came back, and a change in place would reach them.
    """
    shared = y.untyped_storage().data_ptr() == x.local.untyped_storage().data_ptr()
    return y.clone(memory_format=torch.contiguous_format) if shared and y.numel() else y


def shard(
    x: Tensor,
    mesh: DeviceMesh,
    spec: LayoutSpec,
    split: SplitRule | Mapping[int, SplitRule] = "balanced",
    align: int | Mapping[int, int] = 1,
    halo: Mapping[int, int | tuple[int, int]] | None = None,
    periodic: Sequence[int] = (),
) -> Tile:
    """Cut a whole tensor, the same on every rank, into tiles.

    *Shapes*: global ``x.shape``; per rank the balanced (or `split`, `align`) share of every dim that `spec` names, plus
    `halo` rows a side (dim -> rows, or (below, above)), which wrap on `periodic` dims.
    *Sends*: nothing but one agreement on the arguments and a checksum of `x`; backward, one exchange when `x` requires
    grad, so that its gradient is whole on every rank.
    *Raises*: `ShardingError` on every rank, for a spec that does not fit, or ranks whose shapes, dtypes, values or
    other arguments differ.

    A tensor that does not require grad is never shared with the tile, so that the whole one can be freed or changed.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> tile = jigsaw.shard(torch.arange(6.0), mesh, ("lat",), halo={0: 1}, periodic=[0])
    >>> tile.local
    tensor([5., 0., 1., 2., 3., 4., 5., 0.])
    >>> tile
    Tile(shape (6,), torch.float32; cut: nowhere; at lat=0/1 owns [0:6], held (8,))
    """
    found = agree_on_arguments(
        "shard", mesh, x, True, shape=tuple(x.shape), spec=spec, split=split, align=align, halo=halo, periodic=periodic
    )
    layout = Layout.of(x.shape, spec, axes_of_mesh(mesh), split=split, align=align, halo=halo, periodic=periodic)
    for at, (_, checksum) in enumerate(found):
        if checksum != found[0][1]:
            raise ShardingError(
                f"shard takes the whole tensor, the same on every rank, but the values at place {at} of the mesh are "
                f"not those at place 0 (shape {tuple(x.shape)}): seed the ranks alike where they are drawn "
                "(torch.manual_seed), broadcast them from one rank (torch.distributed.broadcast), or give each rank's "
                "own part to jigsaw.from_local"
            )
    uncut = Layout.of(x.shape, (None,) * x.ndim, layout.axes)
    local = redistribute_rows(x, uncut, layout, mesh)
    shared = local.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    if shared and not x.requires_grad:
        local = local.clone(memory_format=torch.contiguous_format)
    return Tile(local, layout, mesh)


def from_local(
    local: Tensor,
    mesh: DeviceMesh,
    spec: LayoutSpec,
    shape: Sequence[int],
    split: SplitRule | Mapping[int, SplitRule] = "balanced",
    align: int | Mapping[int, int] = 1,
    halo: Mapping[int, int | tuple[int, int]] | None = None,
    periodic: Sequence[int] = (),
) -> Tile:
    """The tile whose local part this rank has already; `shape` is the global one.

    *Shapes*: global `shape`; per rank ``local.shape``, the share that `shard` with these arguments would give it.
    *Sends*: one agreement: every rank learns whether all parts fit; where axes cut nothing, with a checksum of `local`.
    *Raises*: `ShardingError` on every rank, when one rank's part does not have the shape that the layout gives it, when
    ranks that hold the same part have other values, or pass different arguments.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> tile = jigsaw.from_local(torch.ones(5, 2), mesh, ("lat", None), shape=(5, 2))
    >>> tile.sum().item()
    10.0
    """
    named = {a for entry in spec if entry is not None for a in ((entry,) if isinstance(entry, str) else entry)}
    is_alike = any(size > 1 and name not in named for name, size in axes_of_mesh(mesh))
    parts = agree_on_arguments(
        "from_local",
        mesh,
        local,
        is_alike,
        shape=shape,
        spec=spec,
        split=split,
        align=align,
        halo=halo,
        periodic=periodic,
    )
    layout = Layout.of(shape, spec, axes_of_mesh(mesh), split=split, align=align, halo=halo, periodic=periodic)
    first: dict[Any, tuple[MeshCoordinate, int]] = {}
    for coord, (part, checksum) in zip(layout.coords(), parts, strict=True):
        if part != layout.local_shape(coord):
            raise ShardingError(
                f"from_local: the rank at {coord} passed a local tensor of shape {part}, but {layout} gives it "
                f"{layout.local_shape(coord)}; pass that part, or the split= that cuts it so"
            )
        there, known = first.setdefault(layout.held(coord), (coord, checksum))
        if checksum != known:
            raise ShardingError(
                f"from_local: the ranks at {coord} and {there} hold one part of {layout}, but passed other values; "
                "name the axis that cuts them in spec=, or make them alike (seed the ranks alike, or broadcast)"
            )
    return Tile(local, layout, mesh)
