"""How tiles and plain tensors meet (alignment, broadcasting, gradient parts), and every pointwise function.

Torch itself says which functions are pointwise: ``torch.Tag.pointwise`` on the aten overload.  They run on the local
tensors, halo included; rows beyond an end that does not wrap are left out, but for casts and copies: at a number that a
reader put there a function may have no finite gradient.

>>> tile = jigsaw.shard(torch.ones(2, 9), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> (torch.exp(tile) - torch.arange(9.0)).local[0, :3]
tensor([2.7183, 1.7183, 0.7183])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.exchange import exchange_rows
from jigsaw.layout import Cut, Layout, ShardingError, have_same_rows, whole_dim
from jigsaw.tile import (
    LEAVE_NODE,
    Tile,
    TileHandler,
    implements_rest,
    implements_torch,
    leave_tile,
    refusal_error,
    shared_mesh,
    tiles_in,
)

# -- plain tensors enter ----------------------------------------------------------------------------------------------


class _ScaledPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


AVERAGED_MARK = "_jigsaw_averaged_over"


def averaged_over(leaf: Tensor) -> int:
    """Over how many ranks the gradient of a leaf is going to be averaged (`jigsaw.parallelize` says so); 1: its parts
    are summed.
    """
    return getattr(leaf, AVERAGED_MARK, 1)


def plain_operand(x: Tensor, tile: Tile, layout: Layout | None = None) -> Tensor:
    """A plain tensor as an operand of an op whose result has `layout` (by default that of `tile`), on the mesh of
    `tile`.

    Its gradient on each rank becomes this rank's part: the parts sum to the gradient over the whole mesh, also where
    the result is replicated.  Parts of a parameter that is going to be averaged over n ranks are n times as large, so
    that their mean is the gradient.  A plain tensor that itself came out of a tile (a global statistic) has a whole
    gradient instead, for which the parts are summed.

    *Sends*: nothing for parameters; backward one all-reduce for a tensor that came out of a tile.
    *Raises*: `ShardingError` for a tensor made of both a global statistic and a parameter whose parts are summed.
    """
    mesh, layout = tile.mesh, layout or tile.layout
    if not (x.requires_grad and torch.is_grad_enabled()) or mesh.size() == 1:
        return x
    left, leaves = (False, [x]) if x.grad_fn is None else _graph_origins(x)
    ranks = {averaged_over(leaf) for leaf in leaves}
    if left and ranks <= {mesh.size()}:
        # a whole gradient on every rank is right for what left a tile, and for parameters that are averaged
        return comm.use_in_parts(x, mesh, layout.cut_axes)
    if left or len(ranks) > 1:
        raise ShardingError(
            f"a plain tensor of shape {tuple(x.shape)} was computed from a parameter and from a tensor that left a "
            "Tile, or from leaves that are "
            "summed and leaves that are averaged over the ranks; its gradient would be counted wrongly; pass the "
            "model through "
            f"jigsaw.parallelize, or keep the reduction a Tile (keepdim=True) and multiply there"
        )
    scale = max(ranks, default=1) / layout.replicas
    return x if scale == 1 else _ScaledPart.apply(x, scale)


def _graph_origins(x: Tensor) -> tuple[bool, list[Tensor]]:
    """Whether the graph of `x` reaches a tensor that left a tile, and the leaves that it reaches otherwise."""
    left, leaves = False, list[Tensor]()
    seen: set[Any] = set()
    todo: list[Any] = [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == LEAVE_NODE:
            left = True
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo.extend(next_node for next_node, _ in node.next_functions)
    return left, leaves


def cut_whole_tensor(x: Tensor, tile: Tile, layout: Layout | None = None) -> Tensor:
    """A plain whole tensor, broadcast against `layout` from the right, cut to the box that this rank holds.

    *Raises*: `ShardingError` when a dim is neither 1 nor the global size.
    """
    layout = layout or tile.layout
    if x.layout != torch.strided:
        raise ShardingError(f"a tensor of layout {x.layout} cannot meet a Tile: use to_dense(), or tile.full_tensor()")
    x = plain_operand(x, tile, layout)
    lead = layout.ndim - x.ndim
    if lead < 0 or any(n not in (1, layout.shape[lead + d]) for d, n in enumerate(x.shape)):
        raise ShardingError(
            f"a plain tensor of shape {tuple(x.shape)} does not broadcast to the Tile's global shape {layout.shape}; "
            f"plain tensors are whole: pass the whole tensor, or make a Tile of local parts with jigsaw.from_local"
        )
    for d in range(x.ndim):
        cuts = layout.dim(lead + d)
        if x.shape[d] == layout.shape[lead + d] and any(c.is_cut or c.has_halo for c in cuts):
            x = _take_held_rows(x, d, cuts, tile, layout)
    return x


def _take_held_rows(x: Tensor, dim: int, cuts: Sequence[Cut], tile: Tile, layout: Layout) -> Tensor:
    coord = tile.coordinate
    sizes = [c.size for c in cuts]
    x = x.unflatten(dim, sizes) if len(sizes) > 1 else x
    for k, cut in enumerate(cuts):
        start, stop = cut.held[layout.piece(cut, coord)]
        if start < 0 or stop > cut.size:
            rows = torch.arange(start, stop, device=x.device)
            # beyond an end that does not wrap, a plain tensor has its last row again
            x = x.index_select(dim + k, rows % cut.size if cut.wraps else rows.clamp(0, cut.size - 1))
        else:
            x = x.narrow(dim + k, start, stop - start)
    return x.flatten(dim, dim + len(sizes) - 1) if len(sizes) > 1 else x


# -- tiles meet -------------------------------------------------------------------------------------------------------


def align_tiles(tiles: Sequence[Tile]) -> tuple[Layout, list[Tensor]]:
    """The layout of a broadcast of tiles, and the local tensors to compute it from.

    Halos are cropped to what all hold.  A tile that is replicated along an axis that cuts the result enters with its
    adjoint (backward: one all-reduce).  One row of a dim that is cut is sent to all, where it meets more.

    *Raises*: `ShardingError` when two tiles cut a dim differently; it names `redistribute`.
    """
    mesh = shared_mesh(tiles)
    ndim = max(t.ndim for t in tiles)
    longer = {d for d in range(-ndim, 0) if any(t.ndim >= -d and t.shape[d] != 1 for t in tiles)}
    tiles = [held_by_all(t, [t.ndim + d for d in longer if t.ndim >= -d and t.shape[d] == 1]) for t in tiles]
    dims = [_broadcast_cuts([t for t in tiles if t.ndim >= ndim - d], d - ndim) for d in range(ndim)]
    layout = Layout.from_dims(dims, tiles[0].layout.axes)
    locals_: list[Tensor] = []
    for t in tiles:
        cropped = _crop_halo(t, layout)
        missing = [a for a in layout.cut_axes if a not in t.layout.cut_axes]
        locals_.append(comm.use_in_parts(cropped, mesh, missing) if missing else cropped)
    return layout, locals_


def held_by_all(tile: Tile, dims: Sequence[int]) -> Tile:
    """The tile with these dims of size 1 whole: where a slice of a cut dim left one row, one rank alone has it, and all
    need it to broadcast.

    *Sends*: the row, where the dim is cut; backward its gradient.
    """
    layout = tile.layout
    for d in dims:
        if any(c.is_cut or c.has_halo for c in layout.dim(d)):
            layout = layout.replace_dim(d, whole_dim(1))
    return tile if layout is tile.layout else tile.with_layout(layout.without_beyond())


def _broadcast_cuts(tiles: Sequence[Tile], dim: int) -> tuple[Cut, ...]:
    """The cuts of one dim of a broadcast; `dim` counts from the right."""
    groups = [t.layout.dim(t.ndim + dim) for t in tiles]
    wide = [g for g, t in zip(groups, tiles, strict=True) if t.shape[dim] != 1]
    # one row that is cut stays so: the last batch of an epoch may have fewer samples than there are groups
    wide = wide or [g for g in groups if any(c.is_cut for c in g)]
    if not wide:
        return (whole_dim(1),)
    first = wide[0]
    for other in wide[1:]:
        if not have_same_rows(other, first):
            a, b = (Layout(g, tiles[0].layout.axes, (len(g),)) for g in (first, other))
            raise ShardingError(
                f"tiles that cut dim {dim} differently cannot meet: {a} and {b}; bring one to the other's cuts with "
                "tile.redistribute"
            )
    return tuple(_common_held([g[k] for g in wide]) for k in range(len(first)))


def _common_held(cuts: Sequence[Cut]) -> Cut:
    """The same cut, holding what all of them hold."""
    if all(c.wraps and c.held == cuts[0].held for c in cuts):
        return cuts[0]
    held = [(max(c.inside(i)[0] for c in cuts), min(c.inside(i)[1] for c in cuts)) for i in range(cuts[0].pieces)]
    return cuts[0].holding(held)


def _crop_halo(tile: Tile, layout: Layout) -> Tensor:
    """The local part of `tile` without the halo rows that `layout` lacks; nothing is sent."""
    lead = layout.ndim - tile.ndim
    dims = [_cropped_cuts(g, layout.dim(lead + d), tile.shape[d] == 1) for d, g in enumerate(tile.layout.dims())]
    target = Layout.from_dims(dims, layout.axes)
    return exchange_rows(tile.local, tile.layout, target, tile.mesh) if tile.layout.has_halo else tile.local


def _cropped_cuts(group: tuple[Cut, ...], to: tuple[Cut, ...], is_one: bool) -> tuple[Cut, ...]:
    """A dim of a tile with the halo that `to` has; one row that broadcasts stays as it is cut, with none."""
    return tuple(c.bare() for c in group) if is_one and not have_same_rows(group, to) else to


def replace_tensors(args: Any, give: Callable[[Tile], Tensor], plain: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with every Tile and every plain tensor replaced."""
    if isinstance(args, Tile):
        return give(args)
    if isinstance(args, Tensor):
        return plain(args)
    if isinstance(args, (list, tuple)):
        return type(args)(replace_tensors(a, give, plain) for a in args)
    if isinstance(args, dict):
        return {k: replace_tensors(v, give, plain) for k, v in args.items()}
    return args


def wrap_tiles(out: Any, layout: Layout, tile: Tile) -> Any:
    """Local results as tiles of `layout`; what is no tensor stays."""
    if isinstance(out, Tensor):
        return Tile(out, layout, tile.mesh)
    if isinstance(out, (list, tuple)):
        values = [wrap_tiles(o, layout, tile) for o in out]
        return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)
    return out


# -- pointwise --------------------------------------------------------------------------------------------------------

_COPIES = frozenset("to float double half bfloat16 int long bool type type_as clone detach contiguous".split())
_AUGMENTED = frozenset(
    "__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ "
    "__ilshift__ __irshift__".split()
)
_OPERATORS = (
    _COPIES
    | _AUGMENTED
    | frozenset(
        "__radd__ __rsub__ __rmul__ __rdiv__ __rtruediv__ __rfloordiv__ __rpow__ __add__ __sub__ __mul__ __truediv__ "
        "__div__ __floordiv__ __mod__ __pow__ "
        "__lshift__ __rshift__ __rlshift__ __rrshift__ __rand__ __ror__ __rxor__ __pos__ "
        "__neg__ __abs__ __invert__ __and__ __or__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
        "zeros_like ones_like full_like empty_like conj real imag complex polar "
        "relu6 hardswish softplus log_sigmoid nan_to_num isclose isfinite isnan isinf isreal square logit xlogy".split()
    )
)


def is_pointwise(function: Any) -> bool:
    """Whether torch tags the function (its aten overloads) as pointwise and it draws no random numbers."""
    name = getattr(function, "__name__", "")
    if name in _OPERATORS:
        return True
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("__") else None
    if packet is None:
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    random = any(torch.Tag.nondeterministic_seeded in t for t in tags)
    return not random and any(torch.Tag.pointwise in t for t in tags)


def _run_pointwise(function: Any, *args: Any, **kwargs: Any) -> Any:
    tiles = list(tiles_in((args, kwargs)))
    in_place = _is_in_place(function)
    if in_place and _changes_plain(args) and not any(t.layout.cut_dims for t in tiles):
        return _into_plain(function, args, kwargs)
    if in_place:
        _check_shape_of_target(function, args, kwargs)
    first = tiles[0]
    if len(tiles) == 1:
        first = held_by_all(first, _growing_dims(args, kwargs, first.layout))
        layout = first.layout if function.__name__ in _COPIES else first.layout.without_beyond()
        locals_ = [first.local if layout is first.layout else _crop_halo(first, layout)]
    else:
        layout, locals_ = align_tiles(tiles)
    grown = _grown_layout(args, kwargs, layout)
    if grown != layout:
        layout = grown
    if in_place:
        _check_layout_of_target(function, args[0], layout)
    ready = iter(locals_)
    ready_args, ready_kwargs = replace_tensors(
        (args, kwargs), lambda _: next(ready), lambda x: cut_whole_tensor(x, first, layout)
    )
    out = function(*ready_args, **ready_kwargs)
    return args[0] if in_place else wrap_tiles(out, layout, first)


def _plain_shapes(args: Any, kwargs: Any) -> list[torch.Size]:
    shapes: list[torch.Size] = []
    replace_tensors((args, kwargs), lambda t: t.local, lambda x: shapes.append(x.shape) or x)
    return shapes


def _growing_dims(args: Any, kwargs: Any, layout: Layout) -> list[int]:
    """The dims of size 1 that a plain tensor among the arguments makes longer."""
    sizes = [(layout.ndim - d, shape[-d]) for shape in _plain_shapes(args, kwargs) for d in range(1, len(shape) + 1)]
    return [dim for dim, n in sizes if dim >= 0 and layout.shape[dim] == 1 and n != 1]


def _grown_layout(args: Any, kwargs: Any, layout: Layout) -> Layout:
    """`layout` broadcast to the plain tensors among the arguments; a dim that only they have is cut by nothing."""
    for shape in _plain_shapes(args, kwargs):
        for _ in range(len(shape) - layout.ndim):
            layout = layout.insert(0)
        for d in range(1, len(shape) + 1):
            if layout.shape[-d] == 1 and shape[-d] != 1:
                layout = layout.replace_dim(layout.ndim - d, whole_dim(shape[-d]))
    return layout


def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name in _AUGMENTED or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _changes_plain(args: Sequence[Any]) -> bool:
    """Whether what a function changes in place, its first argument, is a plain tensor (or a list of them)."""
    targets: Any = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    return bool(targets) and all(isinstance(t, Tensor) and not isinstance(t, Tile) for t in targets)


def _into_plain(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A plain tensor that tiles which nothing cuts are written into: it is then a tensor that left a tile.

    The tiles leave before they are written, so that the graph of the plain tensor says so, and other plain tensors stay
    as they are: none of them enters a tile here.
    """
    args, kwargs = replace_tensors(
        (tuple(args), dict(kwargs)), lambda t: leave_tile(t.owned().local, t.mesh), lambda x: x
    )
    return function(*args, **kwargs)


def _check_shape_of_target(function: Any, args: Sequence[Any], kwargs: Any) -> None:
    """What is changed in place keeps its shape: known before anything is sent."""
    shapes = [t.shape for t in tiles_in((args, kwargs))] + _plain_shapes(args, kwargs)
    if not args or not isinstance(args[0], Tile) or torch.broadcast_shapes(*shapes) != args[0].shape:
        raise ShardingError(
            f"{function.__name__} of shapes {[tuple(s) for s in shapes]} cannot change its target in place: it must be "
            "a Tile of the shape of the result; use the function that makes a new one, as x + y"
        )


def _check_layout_of_target(function: Any, target: Tile, layout: Layout) -> None:
    if target.layout != layout:
        raise ShardingError(
            f"{function.__name__} would change the layout of its target in place, from {target.layout} to {layout} "
            "(a halo counts); use the function that makes a new one, as x + y"
        )


def _check_halo_of_target(function: Any, target: Tile) -> None:
    if target.layout.has_halo:
        raise refusal_error(
            function,
            target,
            "it would change the owned rows in place, and leave the halo as it was",
            "use tile.owned()",
        )


@implements_torch(Tensor.requires_grad_)
def _requires_grad_(tile: Tile, requires_grad: bool = True) -> Tile:
    tile.local.requires_grad_(requires_grad)
    return tile


@implements_torch(Tensor.item)
def _item(tile: Tile) -> Any:
    if tile.numel() != 1:
        raise ShardingError(
            f"item() of a Tile of shape {tuple(tile.shape)}: only a tile of one element can be a number; reduce it "
            "first"
        )
    return tile.full_tensor().item()


@implements_torch(torch.is_floating_point)
def _is_floating_point(tile: Tile) -> bool:
    return tile.dtype.is_floating_point


@implements_torch(torch.is_complex)
def _is_complex(tile: Tile) -> bool:
    return tile.dtype.is_complex


@implements_torch(Tensor.where)
def _method_where(*args: Any, **kwargs: Any) -> Any:
    return _run_pointwise(Tensor.where, *args, **kwargs)


@implements_torch(torch.where)
def _where(condition: Any, *others: Any, **named: Any) -> Any:
    handler = _run_pointwise if others or named else _run_unknown  # alone, it lists places, however many there are
    return handler(torch.where, condition, *others, **named)


def _cast_like(function: Any) -> None:
    """Answer what takes the dtype (and device) of another tensor, whose shape and cuts do not matter."""

    def handler(input: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace_tensors((args, kwargs), lambda t: t.local, lambda x: x)
        if not isinstance(input, Tile):
            return function(input, *args, **kwargs)
        return Tile(function(input.local, *args, **kwargs), input.layout, input.mesh)

    implements_torch(function)(handler)


_cast_like(Tensor.to)
_cast_like(Tensor.type_as)


@implements_torch(F.relu)
def _relu(input: Tile, inplace: bool = False) -> Any:
    return _run_pointwise(torch.relu_ if inplace else torch.relu, input)


# -- tiles that nothing cuts ------------------------------------------------------------------------------------------


def run_alike(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], first: Tile) -> Any:
    """Any function on tiles that nothing cuts: every rank computes the same whole answer."""
    args, kwargs = replace_tensors(
        (tuple(args), dict(kwargs)),
        lambda t: t.owned().local,
        lambda x: plain_operand(x, first, Layout((), first.layout.axes)),
    )
    return uncut_tiles(function(*args, **kwargs), first)


def uncut_tiles(out: Any, first: Tile) -> Any:
    """Results that every rank has alike, as tiles that nothing cuts; scalars as ordinary tensors."""
    if isinstance(out, Tensor):
        if out.ndim == 0:
            return leave_tile(out, first.mesh)
        return Tile(out, Layout.of(out.shape, (None,) * out.ndim, first.layout.axes), first.mesh)
    if isinstance(out, (list, tuple)):
        values = [uncut_tiles(o, first) for o in out]
        return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)
    return out


# -- what no file of ops implements -----------------------------------------------------------------------------------


@implements_rest
def _find_handler(function: Any) -> TileHandler:
    return partial(_run_pointwise if is_pointwise(function) else _run_unknown, function)


def _run_unknown(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an unknown function where that is exact: on tiles that nothing cuts."""
    tiles = list(tiles_in((args, kwargs)))
    if not tiles:
        raise ShardingError(
            f"{getattr(function, '__name__', function)} was called on a Tile that none of its arguments is; pass plain "
            "tensors, with tile.full_tensor(), or tile.local for a local answer"
        )
    for tile in tiles:
        if tile.layout.cut_dims:
            raise refusal_error(
                function,
                tile,
                "jigsaw does not answer this function on a cut dim",
                "use tile.redistribute so that nothing is cut, tile.full_tensor(), or tile.local for a local answer",
            )
    shared_mesh(tiles)
    if _is_in_place(function):
        if _changes_plain(args):
            return _into_plain(function, args, kwargs)
        _check_halo_of_target(function, tiles[0])
    return run_alike(function, args, kwargs, tiles[0])
