"""Plain tensors that a cut tile is written into: such a tensor becomes a tile itself, in place.

``out = torch.zeros(...); out[:, :, :12] = tile`` is how nets keep the low modes of a spectrum, `scatter_` into zeros
how they make labels one-hot.  The plain tensor is whole on every rank, so each keeps its rows of it, and nothing is
sent.

**The cuts.**  They are those of the written tile, seen through the index, so that no row of it travels:

1. A dim to which a dim of the tile is written takes its axes.  Points between rows that are written are those of the
   tile; those before the first row and behind the last one are the balanced ones, as far as they lie there.
2. Pointwise functions, `copy_` and `masked_fill_`: dims from the right.  Of several tiles the first that cuts a dim.
3. `scatter_` and its like take the index's cuts, and the source's; `index_add_` and its like the source's.  Along the
   dim that the index runs over nothing cuts, but for values that are added up, or that an index picked: their target
   is cut by `cut_of_written_rows`.  So it is for ``out[:, index] = tile``; dims of other index tensors are whole, and
   those of a mask are as the mask.

Example: four ranks, 33 modes cut at 0, 9, 17, 25, 33, of which the lowest 12 are kept: the slice is cut at 0, 9, 12,
12, 12. Written to ``out[:12]`` of 33 rows, the points are 0, 9 (between written rows), 17, 25 (balanced) and 33: those
of the spectrum again.  Of the highest 12, written to ``out[21:]``, the points are 0, 0, 0, 4, 12: 21 + 4 is 25, again.

``out[:, :, :12] += tile`` is for Python three steps: a view of `out`, a change of the view, and ``out[...] = view``.
Such a view that ints and slices give becomes a tile together with its base: that view of the tile.

Where the function reads old values, as ``out += tile``, ranks compare some of them; `torch.empty` may be written over.

Refusals follow from facts that all ranks share, before the tensor is changed.  A leaf that requires grad is refused.
So is a tensor whose memory another view, tensor, array or saved value would keep with the old values
(`_reason_to_stay_plain`).

>>> tile = jigsaw.shard(torch.ones(2, 9), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> out = torch.zeros(2, 9)
>>> out += tile
>>> out[:, 6:] += tile[:, 6:]
>>> out.sum().item()
24.0
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from jigsaw.comm.agreement import is_true_everywhere
from jigsaw.geometry.cut import Cut, cut_of_written_rows, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.local_cells import dims_named_by, is_mask
from jigsaw.ops.meeting.plain_operands import cut_entered_tensor, plain_operand
from jigsaw.tile.shell_making import make_shell
from jigsaw.tile.tile import Tile, refusal_error, tiles_in
from jigsaw.torch_internals.autograd import (
    base_of_view,
    gradient_hooks,
    memory_id,
    memory_users,
    swap_tensors_in_place,
    tensor_users,
)
from jigsaw.torch_internals.fake_tensors import FakeTensor, FunctionalTensor

# A dim of the plain tensor, the cuts of the values written there, its first row and the step between rows.
DimWish = tuple[int, Sequence[Cut], int, int]
Wishes = Iterable[DimWish]


def fill_from_tiles(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_pointwise: bool = False) -> bool:
    """Make the plain first argument of a function that changes it in place a tile, where a cut tile is among the
    others.  Return False where there is no rule for the function, or for these tiles.

    *Sends*: where an index has cut a tile, 32 bytes: the ranks agree that none of them has the memory elsewhere,
    because they else run the function with that tile whole.  Else nothing.
    *Raises*: `ShardingError` for a tensor that cannot become a tile.
    """
    target = args[0]
    tiles = [t for t in tiles_in((args, kwargs)) if t.layout.cut_dims]
    if not tiles or not isinstance(target, Tensor):
        return False
    rule = _broadcast_wishes if is_pointwise else _RULES.get(function)
    wishes = None if rule is None else rule(target, *args[1:], **kwargs)
    base, places = (target, None) if base_of_view(target) is None else (base_of_view(target), _places_in_base(target))
    if wishes is not None and places is not None:
        wishes = _wishes_of_base(base, places, wishes)
    if wishes is None:
        return False
    layout = _layout_for(base, wishes, tiles[0])
    why = _reason_to_stay_plain(target, base, places, tiles[0])
    if any(cut.by_index and cut.is_cut for t in tiles for cut in t.layout.cuts):
        is_free = is_true_everywhere(tiles[0].mesh, why is None)
        why = None if is_free else why or ("on another rank something else has its memory", "clone() it first")
    if why is not None:
        raise refusal_error(
            function,
            tiles[0],
            f"the plain tensor of shape {tuple(base.shape)} that it changes would become a Tile, but {why[0]}",
            why[1],
        )
    # what ranks have in rows of torch.empty differs, and is right where it is only written over
    is_read = len(args) > _WRITTEN_OVER.get(function, 0) or bool(kwargs.keys() & {"accumulate", "reduce"})
    _become_tile(target, base, places, layout, tiles[0], is_read)
    return True


# -- the tensor -------------------------------------------------------------------------------------------------------


def _reason_to_stay_plain(target: Tensor, plain: Tensor, places: _Places | None, like: Tile) -> tuple[str, str] | None:
    """Return why a tensor, of which `target` is a view or itself, cannot become a tile, and what to write instead."""
    if type(plain) not in (Tensor, FakeTensor, FunctionalTensor):
        kind = "a parameter" if isinstance(plain, nn.Parameter) else f"of the class {type(plain).__name__}"
        return f"it is {kind}", "write into a clone of it"
    if plain.layout != torch.strided or plain.is_quantized:
        return f"its layout is {plain.layout}", "use to_dense()"
    if plain.device != like.device:
        return f"it lies on {plain.device}, the Tile on {like.device}", "make it with device=tile.device"
    if plain.requires_grad and plain.is_leaf:
        return "it is a leaf that requires grad", "write into a clone of it"
    if plain.requires_grad and not torch.is_grad_enabled():
        return "its gradient would be lost without grad mode", "detach it first"
    if plain.retains_grad or gradient_hooks(plain):
        return "a hook, or retain_grad(), waits for its gradient", "write into a clone of it"
    if target is not plain and places is None:
        return (
            f"what is changed is a view {tuple(target.shape)} that ints and slices of it do not give",
            "write out[index] = tile, or into a clone of the view",
        )
    if not plain.untyped_storage().resizable():
        return "its memory is shared with an array or another process", "clone() it first"
    if _is_held_elsewhere(target, plain):
        gc.collect()  # on only one rank a view may lie in an unreachable circle
        if _is_held_elsewhere(target, plain):
            return (
                "another view, another tensor of its memory, or autograd holds it, and would keep the old values",
                "fill it before, or clone() it first",
            )
    return None


def _is_held_elsewhere(target: Tensor, plain: Tensor) -> bool:
    """Say whether anything but its name and the view `target` holds the tensor or its memory, or that view.  That may
    be a view, a saved value, or a tensor of `detach()`.
    """
    views = int(target is not plain)
    memory = plain.untyped_storage()  # `memory` itself is one user
    users = memory_users(memory_id(memory))
    of_tensor, of_view = (tensor_users(x) for x in (plain, target))
    return of_tensor > 1 + views or users > 2 + views or (views == 1 and of_view > 1)


def _become_tile(
    target: Tensor, plain: Tensor, places: _Places | None, layout: Layout, like: Tile, is_read: bool
) -> None:
    """Make a plain tensor a tile, with this rank's part of it, and the view of it `target` that view of the tile.
    Values that are read must be alike on all ranks.
    """
    part = cut_entered_tensor(plain_operand(plain, like, layout, is_whole=is_read), like, layout)
    local = None if part is plain else part.clone()  # copied, so that the whole tensor's memory is freed
    del part
    if places is not None:
        _change_places(target)  # the view first, because it holds its base
    shell = _change_places(plain)
    local = shell if local is None else local
    vars(plain).update(local=local, layout=layout, mesh=like.mesh, shape=torch.Size(layout.shape))
    if places is not None:
        view: Any = plain[places.items]
        vars(target).update(local=view.local, layout=view.layout, mesh=view.mesh, shape=view.shape)


def _change_places(plain: Tensor) -> Tensor:
    """Give the object of a plain tensor the shell and the class of a tile; return one that has its old contents.

    The two C++ tensors change places (as `torch.utils.swap_tensors` does it), so that all C++ code finds a shell, too.
    """
    shell = make_shell(Tile, plain.shape, plain.dtype)
    kind = type(plain)
    # tensors without values, and those of a graph, are known by attributes, which the shell takes over
    if kind is not Tensor:
        vars(shell).update(vars(plain))
        vars(plain).clear()
    plain.__class__ = Tile
    Tensor.__setattr__(shell, "__class__", kind)
    swap_tensors_in_place(plain, shell)
    return shell


# -- a view of the tensor ---------------------------------------------------------------------------------------------


class _Places(NamedTuple):
    """Relation of a view to its base: the ints and slices that give it, and its rows along each dim.  Those are, for
    each dim of the view, the dim of the base, its first row and the step between rows; None for a dim of one row.
    """

    items: tuple[Any, ...]
    dims: tuple[tuple[int, int, int] | None, ...]


def _places_in_base(view: Tensor) -> _Places | None:
    """Return the relation of a view to its base, or None where ints and slices do not describe it.

    Of zeros [4, 6] the view ``[2, 1::2]`` starts at element 13, row 2 and column 1; its next element, 15, lies two
    columns on and in the same row: these are columns 1, 3, 5.  A flattened view would go on in the next row.
    """
    base: Any = base_of_view(view)
    is_other = view.dtype != base.dtype or view.is_conj() != base.is_conj() or view.is_neg() != base.is_neg()
    if is_other or not base.is_contiguous() or not view.numel():
        return None
    start = view.storage_offset() - base.storage_offset()
    first = [int(row) for row in np.unravel_index(start, base.shape)]
    dims, last = list[tuple[int, int, int] | None](), -1
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            dims.append(None)
            continue
        second = np.unravel_index(start + stride, base.shape)
        apart = [d for d in range(base.ndim) if second[d] != first[d]]
        step = int(second[apart[0]]) - first[apart[0]] if len(apart) == 1 and apart[0] > last else 0
        if step < 1 or first[apart[0]] + (size - 1) * step >= base.shape[apart[0]]:
            return None
        last = apart[0]
        dims.append((last, first[last], step))
    return _Places(_index_of_view(view, first, dims), tuple(dims))


def _index_of_view(view: Tensor, first: Sequence[int], dims: Sequence[tuple[int, int, int] | None]) -> tuple[Any, ...]:
    """Return the ints and slices for rows that start at `first`.  Dims of one row stand for dims of the base as long as
    there are some between those of more rows.
    """
    items, at, lone = list[Any](), 0, 0
    for size, place in (*zip(view.shape, dims, strict=True), (1, (len(first), 0, 1))):
        if place is None:
            lone += 1
            continue
        dim, row, step = place
        for d in range(at, dim):
            items.append(slice(first[d], first[d] + 1) if d - at < lone else first[d])
        items.extend([None] * (lone - (dim - at)))
        items.append(slice(row, row + (size - 1) * step + 1, step))
        at, lone = dim + 1, 0
    return tuple(items[:-1])


def _wishes_of_base(base: Tensor, places: _Places, wishes: Wishes) -> Wishes | None:
    """Return the wishes for dims of the view as those of its base; None where no cuts can do that."""
    of_base: list[DimWish] = []
    for dim, group, start, step in wishes:
        place = places.dims[dim]
        if place is not None:
            at, row, apart = place
            of_base.append((at, group, row + start * apart, step * apart))
            if len(group) > 1 and of_base[-1][2:] != (0, 1):
                return None  # rows of dims that were flattened together are not an interval
    return of_base


# -- the layout -------------------------------------------------------------------------------------------------------


def _layout_for(plain: Tensor, wishes: Wishes, like: Tile) -> Layout:
    """Return the layout that gives every dim its first wish, by axes that cut no other."""
    dims: list[Sequence[Cut]] = [(whole_dim(n),) for n in plain.shape]
    used: set[str] = set()
    for dim, group, start, step in wishes:
        axes = {a for c in group for a in c.axes}
        if not axes & used and not any(c.is_cut for c in dims[dim]):
            dims[dim] = _cuts_around(plain.shape[dim], group, start, step)
            used |= axes
    return Layout.from_dims(dims, like.layout.axes)


def _cuts_around(size: int, group: Sequence[Cut], start: int, step: int) -> Sequence[Cut]:
    """Return the cuts of `size` rows of which start, start + step, ... are to be cut as `group`."""
    rows = math.prod(c.size for c in group)
    if (rows, start, step) == (size, 0, 1):
        return tuple(c.bare() for c in group)
    (cut,) = group
    end = start + (rows - 1) * step + 1
    even = cut_points(size, cut.pieces)

    def place(piece: int) -> int:
        point = cut.points[piece]
        if point == 0:
            return min(start, even[piece])
        return max(end, even[piece]) if point == rows else start + point * step

    inner = (place(piece) for piece in range(1, cut.pieces))
    return (Cut(size, (0, *inner, size), cut.axes, source=cut.source, by_index=cut.by_index),)


def _wish_for(plain: Tensor, dim: int, tile: Tile, of: int, start: int = 0, step: int = 1) -> Wishes | None:
    """Return the wish that a dim of the plain tensor be cut as dim `of` of a tile; None where no cuts can do that."""
    group = tile.layout.dim(of)
    if not tile.layout.is_cut(of) or tile.shape[of] == 1:
        return ()
    if len(group) > 1 and (start, step, plain.shape[dim]) != (0, 1, tile.shape[of]):
        return None  # rows of dims that were flattened together are not an interval
    return [(dim, group, start, step)]


def _all_wishes(parts: Iterable[Wishes | None]) -> Wishes | None:
    each = list(parts)
    return None if any(w is None for w in each) else [wish for w in each for wish in w or ()]


# -- the rules --------------------------------------------------------------------------------------------------------


def _broadcast_wishes(plain: Tensor, *args: Any, **kwargs: Any) -> Wishes | None:
    """Return the wishes for dims from the right, of tiles that broadcast to the plain tensor."""
    tiles = list(tiles_in((args, kwargs)))
    for t in tiles:
        lead = plain.ndim - t.ndim
        if lead < 0 or any(n not in (1, plain.shape[lead + d]) for d, n in enumerate(t.shape)):
            return None
    return _all_wishes(_wish_for(plain, plain.ndim - t.ndim + d, t, d) for t in tiles for d in range(t.ndim))


def _element_wishes(plain: Tensor, dim: int, index: Any, src: Any = None, *_: Any, **named: Any) -> Wishes | None:
    """Return the wishes of `scatter_` and its like: index and source lie along each dim but `dim` as the target."""
    at = dim % max(plain.ndim, 1)
    return _along_others(plain, at, [t for t in (index, src) if isinstance(t, Tile) and t.ndim], index.shape)


def _row_wishes(plain: Tensor, dim: int, index: Any, source: Any, *_: Any, **named: Any) -> Wishes | None:
    """Return the wishes of `index_add_` and its like: the source has a row for each index."""
    if isinstance(index, Tile) and index.layout.cut_dims:
        return None
    at = dim % max(plain.ndim, 1)
    return _along_others(plain, at, [source] if isinstance(source, Tile) and source.ndim else [], plain.shape)


def _added_element_wishes(plain: Tensor, dim: int, index: Any, src: Any = None, *_: Any, **named: Any) -> Wishes | None:
    """Return the wishes of `scatter_add_` and its like, whose source may be cut along the dim of a whole index."""
    if isinstance(index, Tile) or not isinstance(src, Tile) or not src.ndim:
        return _element_wishes(plain, dim, index, src)
    return _along_others(plain, dim % max(plain.ndim, 1), [src], index.shape, is_added=True)


def _added_row_wishes(plain: Tensor, dim: int, index: Any, source: Any, *_: Any, **named: Any) -> Wishes | None:
    """Return the wishes of `index_add_`, whose source may be cut along the dim of a whole index."""
    if isinstance(index, Tile) or not isinstance(source, Tile) or not source.ndim:
        return _row_wishes(plain, dim, index, source)
    return _along_others(plain, dim % max(plain.ndim, 1), [source], plain.shape, is_added=True)


def _along_others(
    plain: Tensor, at: int, tiles: Sequence[Tile], shape: Sequence[int], is_added: bool = False
) -> Wishes | None:
    """Return the wish for every dim but `at` as in the tiles, whose sizes are those of `shape`.  None where they are
    cut along `at`, because every rank would need all of them.

    Values that an index picked there, and those that are added up, go to the rank that owns their row of the target.
    """
    for t in tiles:
        others = [d for d in range(t.ndim) if d != at]
        if (
            t.ndim != plain.ndim
            or (t.layout.is_cut(at) and not is_added and not t.layout.dim(at)[0].by_index)
            or any(not t.shape[d] == shape[d] <= plain.shape[d] for d in others)
        ):
            return None
    wishes = _all_wishes(_wish_for(plain, d, t, d) for t in tiles for d in range(t.ndim) if d != at)
    targets = [cut_of_written_rows(plain.shape[at], t.layout.dim(at)) for t in tiles if t.layout.is_cut(at)]
    return None if wishes is None else [*wishes, *((at, cuts, 0, 1) for cuts in targets if cuts is not None)]


def _index_put_wishes(plain: Tensor, indices: Any, values: Any, *_: Any, **named: Any) -> Wishes | None:
    return _index_wishes(plain, tuple(slice(None) if i is None else i for i in indices), values)


def _index_wishes(plain: Tensor, index: Any, value: Any) -> Wishes | None:
    """Return the wishes of ``plain[index] = value``, for the dims that the index leaves."""
    items = _items_of_index(plain, index)
    if items is None:
        return None
    masks = [(dim, item) for dim, item in items if isinstance(item, Tile) and item.layout.cut_dims]
    if masks:
        return _mask_wishes(plain, items, masks, value)
    if not isinstance(value, Tile):
        return ()
    places = _value_dims(plain, items)
    lead = len(places) - value.ndim
    of_dims: list[Wishes | None] = []
    for d in range(value.ndim):
        dim, rows = places[lead + d] if lead + d >= 0 else (None, range(1))
        if dim is None:
            is_cut = value.layout.is_cut(d) and value.shape[d] > 1
            of_dims.append(_written_row_wishes(plain, items, value, d) if is_cut else ())
        elif value.shape[d] == len(rows):
            of_dims.append(_wish_for(plain, dim, value, d, rows.start, rows.step))
    return _all_wishes(of_dims)


def _written_row_wishes(plain: Tensor, items: Sequence[Any], value: Tile, of: int) -> Wishes | None:
    """Return the wish for the dim of a lone index, to which a dim of a tile is written that another index picked.

    Values along dims of other indices would have to come to every rank.
    """
    picks = [(dim, item) for dim, item in items if not (item is None or isinstance(item, slice))]
    if len(picks) != 1 or is_mask(picks[0][1]) or not isinstance(picks[0][1], Tensor) or picks[0][1].ndim != 1:
        return None
    cuts = value.layout.dim(of)
    target = cut_of_written_rows(plain.shape[picks[0][0]], cuts) if all(c.by_index for c in cuts) else None
    return None if target is None else [(picks[0][0], target, 0, 1)]


def _mask_wishes(plain: Tensor, items: Sequence[Any], masks: Sequence[Any], value: Any) -> Wishes | None:
    """Return the wishes of ``plain[:, mask] = number``, of a cut mask: only this is written where the mask lies."""
    ((dim, mask), *more) = masks
    is_number = not isinstance(value, (Tile, list, tuple, np.ndarray)) and getattr(value, "ndim", 0) == 0
    others = [item for _, item in items if item is not mask]
    if more or not is_number or not is_mask(mask) or any(item != slice(None) for item in others):
        return None
    if any(dim + d >= plain.ndim or n != plain.shape[dim + d] for d, n in enumerate(mask.shape)):
        return None
    return _all_wishes(_wish_for(plain, dim + d, mask, d) for d in range(mask.ndim))


def _items_of_index(plain: Tensor, index: Any) -> list[tuple[int, Any]] | None:
    """Return the items of an index, each with the first dim that it names; None where one has no rule."""
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(i) if isinstance(i, (list, range, tuple, np.ndarray)) else i for i in items]
    if any(isinstance(i, bool) for i in items):
        return None
    named = sum(dims_named_by(i) for i in items)
    dots = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[dots : dots + 1] = [slice(None)] * (plain.ndim - named)
    placed, dim = list[tuple[int, Any]](), 0
    for item in items:
        placed.append((dim, item))
        dim += dims_named_by(item)
    return placed if dim == plain.ndim and not any(i is Ellipsis for i in items) else None


def _value_dims(plain: Tensor, items: Sequence[tuple[int, Any]]) -> list[tuple[int | None, range]]:
    """Return for each dim of an index's result the dim of the plain tensor and the rows there; None for a dim that
    index tensors or None make.
    """
    dims: list[tuple[int | None, range]] = []
    picks, wide = list[int](), 0
    for dim, item in items:
        if item is None:
            dims.append((None, range(1)))
        elif isinstance(item, slice):
            dims.append((dim, range(*item.indices(plain.shape[dim]))))
        elif isinstance(item, Tensor) and item.ndim:
            picks.extend(range(len(dims), len(dims) + dims_named_by(item)))
            dims.extend((None, range(1)) for _ in range(dims_named_by(item)))
            wide = max(wide, 1 if is_mask(item) else item.ndim)
    if not picks:
        return dims
    # dims of index tensors replace the indexed dims, or come first where these are not next to each other
    first = picks[0] if picks == list(range(picks[0], picks[-1] + 1)) else 0
    kept = [m for k, m in enumerate(dims) if k not in picks]
    return [*kept[:first], *[(None, range(1))] * wide, *kept[first:]]


_RULES: dict[Any, Callable[..., Wishes | None]] = {
    Tensor.__setitem__: _index_wishes,
    **dict.fromkeys((Tensor.index_put_, torch.index_put_), _index_put_wishes),
    **dict.fromkeys((Tensor.copy_, Tensor.masked_fill_), _broadcast_wishes),
    Tensor.scatter_: _element_wishes,
    **dict.fromkeys((Tensor.scatter_add_, Tensor.scatter_reduce_), _added_element_wishes),
    Tensor.index_copy_: _row_wishes,
    **dict.fromkeys((Tensor.index_add_, Tensor.index_reduce_), _added_row_wishes),
}

# functions that only write over the old values, with the number of arguments of which that is true
_WRITTEN_OVER: dict[Any, int] = {
    **dict.fromkeys((Tensor.__setitem__, Tensor.index_put_, torch.index_put_, Tensor.masked_fill_), 3),
    **dict.fromkeys((Tensor.scatter_, Tensor.index_copy_), 4),
    Tensor.copy_: 3,
}
