"""Pointwise functions, and how tiles and plain tensors meet (alignment, broadcasting).

Torch itself says which functions are pointwise: ``torch.Tag.pointwise`` on the aten overload.  They run on the local
tensors, halo included.  Rows beyond an end that does not wrap are left out, because a function may not have a finite
gradient at a reader's number there.  Casts and copies keep them.

>>> tile = jigsaw.shard(torch.ones(2, 9), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> (torch.exp(tile) - torch.arange(9.0)).local[0, :3]
tensor([2.7183, 1.7183, 0.7183])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from jigsaw import comm
from jigsaw.comm.exchange import exchange_rows
from jigsaw.comm.first_meetings import meet_number, numbers_met
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, have_same_rows, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.common_cuts import bring_together, has_moved_rows
from jigsaw.ops.meeting.filling import fill_from_tiles
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor, is_taken_whole, plain_operand
from jigsaw.ops.whole_strides import (
    WHOLE_STRIDES,
    has_strides,
    is_whole_contiguous,
    suggested_format,
    whole_strides,
    with_channels_last,
    with_order_of_operands,
    with_strides,
)
from jigsaw.tile.tile import (
    Tile,
    implements_torch,
    in_own_memory,
    leave_tile,
    shared_mesh,
)

# -- tiles meet -------------------------------------------------------------------------------------------------------


def align_tiles(tiles: Sequence[Tile], stays: int | None = None) -> tuple[Layout, list[Tensor]]:
    """Return the layout of a broadcast of tiles, and the local tensors to compute it from.

    Cut points that differ are brought together (`jigsaw.ops.meeting.common_cuts`; the cuts of tile number `stays`
    win).  Halos are cropped to what all hold.  A tile that is replicated along an axis that cuts the result enters with
    its adjoint (backward: one all-reduce).  A single row of a cut dim is sent to all, where it meets more rows.

    *Raises*: `ShardingError` when other axes cut a dim of two tiles; it names `redistribute`.
    """
    mesh = shared_mesh(tiles)
    layouts = tuple(t.layout for t in tiles)
    if all(other is layouts[0] for other in layouts) and layouts[0].without_beyond() is layouts[0]:
        return layouts[0], [t.local for t in tiles]
    tiles = [t if to is None else t.with_layout(to) for t, to in zip(tiles, _lone_rows_held(layouts), strict=True)]
    tiles = bring_together(tiles, stays=stays)
    layout, crops, missing = _plan_broadcast(tuple(t.layout for t in tiles))
    locals_: list[Tensor] = []
    for t, to, axes in zip(tiles, crops, missing, strict=True):
        cropped = t.local if to is None else exchange_rows(t.local, t.layout, to, t.mesh)
        locals_.append(comm.use_in_parts(cropped, mesh, axes) if axes else cropped)
    return layout, locals_


def held_by_all(tile: Tile, dims: Sequence[int]) -> Tile:
    """Return the tile with these dims of size 1 whole.  Where a slice of a cut dim left one row, only one rank has it,
    and all need it to broadcast.

    *Sends*: the row, where the dim is cut; backward its gradient.
    """
    layout = _with_whole_rows(tile.layout, dims)
    return tile if layout is None else tile.with_layout(layout)


def _with_whole_rows(layout: Layout, dims: Sequence[int]) -> Layout | None:
    """Return the layout with these dims whole, or None where they are."""
    whole = layout
    for d in dims:
        if any(c.is_cut or c.has_halo for c in layout.dim(d)):
            whole = whole.replace_dim(d, whole_dim(1))
    return None if whole is layout else whole.without_beyond()


@lru_cache(maxsize=4096)
def _lone_rows_held(layouts: tuple[Layout, ...]) -> tuple[Layout | None, ...]:
    """Return for each operand of a broadcast the layout in which all ranks hold rows that meet more, or None."""
    longest = max(layout.ndim for layout in layouts)
    longer = {d for d in range(-longest, 0) if any(o.ndim >= -d and o.shape[d] != 1 for o in layouts)}
    lone = ([o.ndim + d for d in longer if o.ndim >= -d and o.shape[d] == 1] for o in layouts)
    return tuple(_with_whole_rows(o, dims) for o, dims in zip(layouts, lone, strict=True))


@lru_cache(maxsize=4096)
def _plan_broadcast(
    layouts: tuple[Layout, ...],
) -> tuple[Layout, tuple[Layout | None, ...], tuple[tuple[str, ...], ...]]:
    """Return the layout of the result, and for each operand the layout without the halo that it lacks and its axes.
    These are the axes along which it is the same and the result is cut.
    """
    ndim = max(layout.ndim for layout in layouts)
    dims = [_broadcast_cuts([o for o in layouts if o.ndim >= ndim - d], d - ndim) for d in range(ndim)]
    out = Layout.from_dims(dims, layouts[0].axes)
    crops: list[Layout | None] = []
    for layout in layouts:
        lead = ndim - layout.ndim
        cropped = [_cropped_cuts(g, dims[lead + d], layout.shape[d] == 1) for d, g in enumerate(layout.dims())]
        target = Layout.from_dims(cropped, layout.axes)
        crops.append(target if layout.has_halo and target != layout else None)
    missing = tuple(tuple(a for a in out.cut_axes if a not in layout.cut_axes) for layout in layouts)
    return out, tuple(crops), missing


def _broadcast_cuts(layouts: Sequence[Layout], dim: int) -> tuple[Cut, ...]:
    """Return the cuts of one dim of a broadcast; `dim` counts from the right."""
    groups = [layout.dim(layout.ndim + dim) for layout in layouts]
    wide = [g for g, layout in zip(groups, layouts, strict=True) if layout.shape[dim] != 1]
    # a cut dim of one row stays cut, as of the last batch of an epoch, which may have fewer samples than `data` has
    # ranks
    wide = wide or [g for g in groups if any(c.is_cut for c in g)]
    if not wide:
        return (whole_dim(1),)
    sizes = {layout.shape[dim] for layout in layouts} - {1}
    if len(sizes) > 1:
        raise ShardingError(f"tiles of sizes {sorted(sizes)} along dim {dim} cannot meet: only one row broadcasts")
    return tuple(_common_held([g[k] for g in wide]) for k in range(len(wide[0])))


def _common_held(cuts: Sequence[Cut]) -> Cut:
    """Return the same cut, holding what all of them hold."""
    if all(c.wraps and c.held == cuts[0].held for c in cuts):
        return cuts[0]
    held = [(max(c.inside(i)[0] for c in cuts), min(c.inside(i)[1] for c in cuts)) for i in range(cuts[0].pieces)]
    return cuts[0].holding(held)


def _cropped_cuts(group: tuple[Cut, ...], to: tuple[Cut, ...], is_one: bool) -> tuple[Cut, ...]:
    """Return a dim of a tile with the halo that `to` has; one row that broadcasts keeps its cut, without halo."""
    return tuple(c.bare() for c in group) if is_one and not have_same_rows(group, to) else to


def replace_tensors(args: Any, give: Callable[[Tile], Tensor], plain: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments with every Tile and every plain tensor replaced."""
    if isinstance(args, Tile):
        return give(args)
    if isinstance(args, Tensor):
        return plain(args)
    if isinstance(args, (list, tuple)):
        return type(args)(replace_tensors(a, give, plain) for a in args)
    if isinstance(args, dict):
        return {k: replace_tensors(v, give, plain) for k, v in args.items()}
    return args


def replace_results(out: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return results of a function, a tensor or several, with each tensor replaced; other values stay."""
    if isinstance(out, Tensor):
        return change(out)
    if isinstance(out, (list, tuple)):
        values = [replace_results(o, change) for o in out]
        return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)
    return out


def _wrap_tiles(out: Any, layout: Layout, tile: Tile) -> Any:
    return replace_results(out, lambda local: Tile(local, layout, tile.mesh))


# -- pointwise --------------------------------------------------------------------------------------------------------


def functions_named(names: str, ends: Sequence[str] = ("",)) -> frozenset[Any]:
    """Return torch's functions and tensor methods of these names."""
    full = [name + end for name in names.split() for end in ends]
    named = [getattr(owner, name, None) for owner in (torch, Tensor, F, torch.special) for name in full]
    return frozenset(function for function in named if function is not None)


def _operators_named(names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, f"__{name}__") for name in names.split())


COPYING_FUNCTIONS = functions_named("to float double half bfloat16 int long bool type type_as clone detach contiguous")
_AUGMENTED = _operators_named("iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor ilshift irshift")
# pointwise functions that torch does not tag
_UNTAGGED = (
    COPYING_FUNCTIONS
    | _AUGMENTED
    | _operators_named(
        "radd rsub rmul rdiv rtruediv rfloordiv rmod rpow add sub mul truediv div floordiv mod pow lshift rshift "
        "rlshift rrshift rand ror rxor pos neg abs invert and or xor eq ne lt le gt ge"
    )
    | functions_named(
        "zeros_like ones_like full_like empty_like conj real imag complex polar hardswish logsigmoid isclose isreal "
        "masked_fill_"
    )
    # other names of functions that torch tags
    | functions_named(
        "abs copysign heaviside "
        "true_divide eq ne gt ge lt le expit ndtr gammaln psi gammainc gammaincc multigammaln absolute arccos arccosh "
        "arcsin arcsinh arctan arctanh arctan2 divide fix floor_divide multiply negative subtract not_equal greater "
        "greater_equal less less_equal byte char short cfloat cdouble chalf resolve_conj resolve_neg",
        ends=("", "_"),
    )
)


def is_pointwise(function: Any) -> bool:
    """Say whether torch tags the function (its aten overloads) as pointwise and it draws no random numbers."""
    if function in _UNTAGGED:
        return True
    name = getattr(function, "__name__", "").removeprefix("special_")
    packet = (
        getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"special_{name}", None)
        if name and not name.startswith("__")
        else None
    )
    if packet is None:
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    random = any(torch.Tag.nondeterministic_seeded in t for t in tags)
    return not random and any(torch.Tag.pointwise in t for t in tags)


# A pointwise function has one way, `run_pointwise`, and one that is quick where nothing has to move, as in most calls:
# tiles that lie alike, numbers, and plain tensors of which each rank needs all (`_ready_at_once`).


def run_on_tiles(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a pointwise function that makes a new tensor."""
    at_once = _ready_at_once(args, kwargs)
    if at_once is None:
        return run_pointwise(function, *args, **kwargs)
    first, ready, is_view = at_once
    out = function(*ready, **kwargs)
    out = Tile(out, first.layout, first.mesh) if type(out) is Tensor else _wrap_tiles(out, first.layout, first)
    return _in_torch_order(out, function, args, kwargs) if is_view else out


def run_in_place(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a pointwise function that changes its first argument."""
    target = args[0] if args else None
    is_own = type(target) is Tile and not has_moved_rows(target.local)
    at_once = _ready_at_once(args, kwargs) if is_own else None
    if at_once is None:
        return run_pointwise(function, *args, **kwargs)
    function(*at_once[1], **kwargs)
    return target


def run_copy(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a pointwise function that makes the same rows again, of another dtype or in other memory."""
    first = args[0] if args else None
    if type(first) is not Tile or not _NO_TENSORS.issuperset(map(type, (*args[1:], *kwargs.values()))):
        return run_pointwise(function, *args, **kwargs)
    out = function(first.local, *args[1:], **kwargs)
    if out is first.local and not has_moved_rows(out):
        return first
    return _in_torch_order(_wrap_tiles(out, first.layout, first), function, args, kwargs)


# functions whose result is a view, or contiguous, or whose second operand comes first
_VIEWING = functions_named("detach conj positive") | _operators_named("pos")
_CONTIGUOUS = functions_named("contiguous masked_fill mvlgamma multigammaln")
_SECOND_FIRST = _operators_named("rsub rmod rpow") | functions_named("rsub") | {Tensor.where}


def _in_torch_order(out: Any, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return results in torch's order of dims, where an operand is a view; some casts and copies name an order."""
    values = (*args, *kwargs.values())
    named = next((v for v in values if type(v) is torch.memory_format), torch.preserve_format)
    if type(out) is Tile and named in (torch.channels_last, torch.channels_last_3d):
        return with_channels_last(out, named)
    if not any(type(v) is Tile and has_strides(v) for v in values):
        return out
    if type(out) is Tile and function in _VIEWING:
        return with_strides(out, whole_strides(args[0]), args[0])
    if function in _CONTIGUOUS or named is torch.contiguous_format:
        return out
    return with_order_of_operands(out, (*values[1::-1], *values[2:]) if function in _SECOND_FIRST else values)


_NO_TENSORS = frozenset((int, float, complex, bool, str, torch.dtype, torch.device, torch.memory_format, type(None)))


def _ready_at_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tile, list[Any], bool] | None:
    """Return the first tile, the local arguments, and whether a tile is a view; None where something has to move."""
    first: Any = None
    is_view = False
    ready: list[Any] = []
    plain: list[int] = []
    for value in args:
        kind = type(value)
        if kind is Tile:
            if first is None:
                first = value
                if value.layout.without_beyond() is not value.layout:
                    return None
            elif value.layout is not first.layout or value.mesh is not first.mesh:
                return None
            ready.append(value.local)
            is_view = is_view or WHOLE_STRIDES in value.__dict__
            continue
        if kind in _NO_TENSORS:
            if value not in numbers_met and first is not None:
                meet_number(value, first.mesh)
        elif kind is Tensor or kind is Parameter:
            plain.append(len(ready))
        else:
            return None
        ready.append(value)
    if first is None or (kwargs and not _NO_TENSORS.issuperset(map(type, kwargs.values()))):
        return None
    return None if plain and not _enter_plain(ready, plain, first) else (first, ready, is_view)


def _enter_plain(ready: list[Any], places: Sequence[int], first: Tile) -> bool:
    """Let plain tensors at these places meet a tile; False where a rank does not need all of one."""
    for at in places:
        if not is_taken_whole(ready[at], first.layout):
            return False
    for at in places:
        ready[at] = plain_operand(ready[at], first, is_whole=True)
    return True


def run_pointwise(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a pointwise function on any tiles, plain tensors and numbers, in place or not.

    *Sends*: rows between cut points that differ; rows of one size that meet more.
    """
    values = (*args, *kwargs.values())
    tiles = [value for value in values if isinstance(value, Tile)]
    in_place, is_copy = changes_in_place(function), function in COPYING_FUNCTIONS
    if in_place and changes_plain(args):
        if not any(t.layout.cut_dims for t in tiles):
            return run_into_plain(function, args, kwargs)
        if fill_from_tiles(function, args, kwargs, is_pointwise=True):
            return function(*args, **kwargs)
    shapes = [value.shape for value in values if isinstance(value, Tensor) and not isinstance(value, Tile)]
    if in_place:
        _check_shape_of_target(function, args, [t.shape for t in tiles] + shapes)
    if shapes:
        tiles = [held_by_all(t, _growing_dims(shapes, t.layout)) for t in tiles]
    first = tiles[0]
    if len(tiles) == 1:
        layout = first.layout if is_copy else first.layout.without_beyond()
        is_there = layout is first.layout
        locals_ = [first.local if is_there else exchange_rows(first.local, first.layout, layout, first.mesh)]
    else:
        layout, locals_ = align_tiles(tiles, stays=0 if in_place else None)
    if shapes:
        layout = _grown_layout(shapes, layout)
    if in_place:
        _check_layout_of_target(function, args[0], layout)
    ready = iter(locals_)
    own = [
        next(ready)
        if isinstance(value, Tile)
        else cut_whole_tensor(value, first, layout)
        if isinstance(value, Tensor)
        else value
        for value in values
    ]
    out = function(*own[: len(args)], **dict(zip(kwargs, own[len(args) :], strict=True)))
    is_first = is_copy and out is first.local and not has_moved_rows(out)
    if in_place or is_first:
        return args[0] if in_place else first
    return _in_torch_order(_wrap_tiles(out, layout, first), function, args, kwargs)


def _growing_dims(shapes: Sequence[torch.Size], layout: Layout) -> list[int]:
    """Return the dims of size 1 that a plain tensor of one of these shapes makes longer."""
    sizes = [(layout.ndim - d, shape[-d]) for shape in shapes for d in range(1, len(shape) + 1)]
    return [dim for dim, n in sizes if dim >= 0 and layout.shape[dim] == 1 and n != 1]


def _grown_layout(shapes: Sequence[torch.Size], layout: Layout) -> Layout:
    """Return `layout` broadcast to plain tensors of these shapes; nothing cuts a dim that only they have."""
    for shape in shapes:
        for _ in range(len(shape) - layout.ndim):
            layout = layout.insert(0)
        for d in range(1, len(shape) + 1):
            if layout.shape[-d] == 1 and shape[-d] != 1:
                layout = layout.replace_dim(layout.ndim - d, whole_dim(shape[-d]))
    return layout


def changes_in_place(function: Any) -> bool:
    """Say whether a function changes its first argument: an operator that does, or of a name that ends in ``_``."""
    name = getattr(function, "__name__", "")
    is_operator = function in _AUGMENTED or function is Tensor.__setitem__
    return is_operator or (name.endswith("_") and not name.endswith("__"))


def changes_plain(args: Sequence[Any]) -> bool:
    """Say whether the first argument, which a function changes in place, is a plain tensor (or a list of them)."""
    targets: Any = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    return bool(targets) and all(isinstance(t, Tensor) and not isinstance(t, Tile) for t in targets)


def run_into_plain(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write tiles that nothing cuts into a plain tensor, which is then a tensor that left a tile.

    The tiles leave before they are written, so that the graph of the plain tensor says so, and other plain tensors stay
    as they are: none of them enters a tile here.
    """
    args, kwargs = replace_tensors(
        (tuple(args), dict(kwargs)), lambda t: leave_tile(t.owned().local, t.mesh), lambda x: x
    )
    return function(*args, **kwargs)


def _check_shape_of_target(function: Any, args: Sequence[Any], shapes: Sequence[torch.Size]) -> None:
    """Check, before anything is sent, that the target of a change in place keeps its shape."""
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


@implements_torch(Tensor.__rdiv__, either=("other",))
def _divide_other(self: Tile, other: Any) -> Any:
    """Return ``other / self``, by a division.  Torch's own multiplies by the reciprocal, which rounds twice, and in the
    dtype of `self`; but between tensors Python uses the first one's division.
    """
    if isinstance(other, Tensor):
        return run_on_tiles(torch.true_divide, other, self)
    return run_on_tiles(Tensor.__rdiv__, self, other)


@implements_torch(Tensor.where)
def _method_where(*args: Any, **kwargs: Any) -> Any:
    return run_pointwise(Tensor.where, *args, **kwargs)


@implements_torch(torch.where, either=("condition",))
def _where(condition: Any, *others: Any, **named: Any) -> Any:
    if not others and not named:  # with a condition alone, `where` lists places
        return condition.nonzero(as_tuple=True)
    return run_on_tiles(torch.where, condition, *others, **named)


def _cast_like(function: Any) -> None:
    """Answer a function that takes the dtype (and device) of another tensor, whose shape and cuts do not matter."""

    def handler(input: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace_tensors((args, kwargs), lambda t: t.local, lambda x: x)
        if not isinstance(input, Tile):
            return function(input, *args, **kwargs)
        out, values = function(input.local, *args, **kwargs), (*args, *kwargs.values())
        named = next((v for v in values if type(v) is torch.memory_format and v is not torch.preserve_format), None)
        if out is input.local and (named is None or named == suggested_format(input)):
            return input
        out = Tile(in_own_memory(out, input), input.layout, input.mesh)
        return _in_torch_order(out, function, (input, *[v for v in values if not isinstance(v, Tensor)]), {})

    implements_torch(function, either=("input",))(handler)


_cast_like(Tensor.to)
_cast_like(Tensor.type_as)


@implements_torch(Tensor.contiguous)
def _contiguous(input: Tile, **named: Any) -> Any:
    if is_whole_contiguous(input, **named):
        return input  # decided by the whole tensor's strides, so alike on every rank
    # the local rows may be contiguous on some ranks only, so copy on all
    out = _wrap_tiles(in_own_memory(input.local.contiguous(**named), input), input.layout, input)
    return _in_torch_order(out, Tensor.contiguous, (input,), named)


@implements_torch(F.relu)
def _relu(input: Tile, inplace: bool = False) -> Any:
    return run_in_place(torch.relu_, input) if inplace else run_on_tiles(torch.relu, input)
