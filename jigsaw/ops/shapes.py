"""Shape functions: views, slices and flattening.  None of them moves a row, except `roll` and picking one row of a cut
dim.

>>> tile = jigsaw.shard(torch.zeros(2, 4, 9, 16), jigsaw.init_mesh(lat=1, lon=1), (None, None, "lat", "lon"))
>>> tokens = tile.flatten(2).transpose(1, 2)
>>> tokens.shape, tokens.unflatten(1, (9, 16)).shape
(torch.Size([2, 144, 4]), torch.Size([2, 9, 16, 4]))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jigsaw.exchange import exchange_rows
from jigsaw.layout import Cut, Interval, Layout, ShardingError, whole_dim
from jigsaw.ops.picking import pick_from_plain
from jigsaw.ops.pointwise import held_by_all
from jigsaw.ops.reductions import reduced_dims
from jigsaw.tile import Tile, implements_torch, in_own_memory, leave_tile, refusal_error

# -- reshape ----------------------------------------------------------------------------------------------------------


def _split_inner(cut: Cut, inner: int) -> tuple[Cut, Cut] | None:
    """One cut as (outer, whole inner), when every edge lies on a multiple of `inner`."""
    if cut.size % inner or any(e % inner for e in (*cut.points, *(e for held in cut.held for e in held))):
        return None
    held = [(a // inner, b // inner) for a, b in cut.held]
    points = tuple(p // inner for p in cut.points)
    return Cut(cut.size // inner, points, cut.axes, tuple(held), wraps=cut.wraps), whole_dim(inner)


def _merge_cuts(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """The cuts of a flattened dim in canonical form: a cut followed by a whole one is one cut; whole dims of size 1
    vanish.
    """
    merged: list[Cut] = []
    for cut in cuts:
        if cut.size == 1 and not cut.is_cut and not cut.has_halo:
            continue
        if merged and not cut.is_cut and not cut.has_halo:
            outer, n = merged.pop(), cut.size
            held: list[Interval] = [(a * n, b * n) for a, b in outer.held]
            cut = Cut(outer.size * n, tuple(p * n for p in outer.points), outer.axes, tuple(held), wraps=outer.wraps)
        merged.append(cut)
    return tuple(merged) or (whole_dim(1),)


def _reshaped_dims(layout: Layout, shape: Sequence[int]) -> list[tuple[Cut, ...]] | None:
    """The cuts of each dim of a reshaped tensor, or None when a dim would take a part of a cut one."""
    left = [c for c in layout.cuts if c.size != 1 or c.is_cut or c.has_halo]
    dims: list[tuple[Cut, ...]] = []
    for size in shape:
        taken: list[Cut] = []
        missing = size
        while missing > 1:
            if not left:
                return None
            cut = left.pop(0)
            if missing % cut.size == 0:
                missing //= cut.size
                taken.append(cut)
                continue
            halves = _split_inner(cut, cut.size // missing) if cut.size % missing == 0 else None
            if halves is None:
                return None
            taken.append(halves[0])
            left.insert(0, halves[1])
            missing = 1
        dims.append(_merge_cuts(taken))
    return None if left else dims


def _full_shape(tile: Tile, shape: Sequence[int]) -> tuple[int, ...]:
    known = math.prod(n for n in shape if n != -1)
    if -1 in shape and known:
        shape = [tile.numel() // known if n == -1 else n for n in shape]
    if math.prod(shape) != tile.numel():
        raise RuntimeError(
            f"shape {tuple(shape)} is invalid for a Tile of shape {tuple(tile.shape)} with {tile.numel()} elements"
        )
    return tuple(shape)


def _size_arguments(first: Any, rest: Sequence[int]) -> tuple[int, ...]:
    return (first, *rest) if isinstance(first, int) else tuple(first)


@implements_torch(Tensor.view)
def _view(input: Tile, size: Any = None, *more: int, dtype: torch.dtype | None = None) -> Any:
    wanted = dtype or size
    return _view_as_type(input, wanted) if isinstance(wanted, torch.dtype) else reshape(input, wanted, *more)


def _view_as_type(input: Tile, dtype: torch.dtype) -> Tile:
    """The same bytes; numbers of another width make the last dim longer or shorter."""
    if dtype.itemsize == input.dtype.itemsize:
        return Tile(input.local.view(dtype), input.layout, input.mesh)
    last = input.ndim - 1
    if last < 0 or input.shape[last] * input.dtype.itemsize % dtype.itemsize:
        raise RuntimeError(f"view({dtype}) of a Tile of {input.dtype} and shape {tuple(input.shape)}: a part is left")
    if input.layout.is_cut(last) or any(c.has_halo for c in input.layout.dim(last)):
        raise refusal_error(
            Tensor.view,
            input,
            f"numbers of {dtype} and {input.dtype} differ in width, and the last dim is cut or has a halo",
            "redistribute the tile so that another dim is cut",
        )
    size = input.shape[last] * input.dtype.itemsize // dtype.itemsize
    # contiguous, because torch asks for strides that ranks without rows would have anyway
    return Tile(input.local.contiguous().view(dtype), input.layout.replace_dim(last, whole_dim(size)), input.mesh)


@implements_torch(torch.reshape, Tensor.reshape)
def reshape(input: Tile, shape: Any, *more: int) -> Any:
    """The same elements in another global shape; dims flatten together and split again where the cuts allow it.

    *Shapes*: a lat x lon tile flattens to tokens that each rank holds its box of; they split again at the same place.
    *Sends*: nothing.
    *Raises*: `ShardingError` when a new dim would take a part of a cut dim that does not fall on its cut points.
    """
    wanted = _full_shape(input, _size_arguments(shape, more))
    if 0 in wanted:
        raise ShardingError(
            f"reshape of an empty Tile {tuple(input.shape)} to {wanted} is ambiguous; build the tile in its new shape"
        )
    dims = _reshaped_dims(input.layout, wanted)
    if dims is None:
        raise refusal_error(
            torch.reshape,
            input,
            f"shape {wanted} would split a cut dim between its cut points "
            f"{[c.points for c in input.layout.cuts if c.is_cut]}",
            "cut at multiples of the inner size (align=), redistribute, or keep the cut dim together",
        )
    layout = Layout.from_dims(dims, input.layout.axes)
    return Tile(input.local.reshape(layout.local_shape(input.coordinate)), layout, input.mesh)


@implements_torch(Tensor.view_as, Tensor.reshape_as)
def _reshape_as(input: Any, other: Any) -> Any:
    return input.reshape(tuple(other.shape))


@implements_torch(torch.flatten)
def _flatten(input: Tile, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = reduced_dims(input, start_dim)[0], reduced_dims(input, end_dim)[0]
    if first > last:
        raise RuntimeError(f"flatten(): start_dim={start_dim} of a Tile of {input.ndim} dims comes after {end_dim=}")
    return reshape(input, (*input.shape[:first], math.prod(input.shape[first : last + 1]), *input.shape[last + 1 :]))


@implements_torch(torch.unflatten)
def _unflatten(input: Tile, dim: int, sizes: Sequence[int]) -> Any:
    (at,) = reduced_dims(input, dim)
    known = math.prod(n for n in sizes if n != -1)
    full = [input.shape[at] // known if n == -1 else n for n in sizes]
    return reshape(input, (*input.shape[:at], *full, *input.shape[at + 1 :]))


@implements_torch(torch.squeeze)
def _squeeze(input: Tile, dim: Any = None) -> Any:
    named = () if dim == () else reduced_dims(input, dim)
    dims = [d for d in named if input.shape[d] == 1]
    return _drop_unit_dims(input, dims)


def _drop_unit_dims(input: Tile, dims: Sequence[int]) -> Any:
    """Drop dims of size 1; a cut or haloed one (some rank holds no row) is made whole first."""
    layout = input.layout
    for d in dims:
        layout = layout.replace_dim(d, whole_dim(1))
    tile = input
    if layout != input.layout:
        layout = layout.without_beyond()
        tile = input.with_layout(layout)
    local = tile.local.squeeze(tuple(dims)) if dims else tile.local
    kept = layout.drop(dims)
    return leave_tile(local, input.mesh) if kept.ndim == 0 else Tile(local, kept, input.mesh)


def new_dim_position(dim: int, ndim: int) -> int:
    """Where a new dim goes, non-negative."""
    if not -ndim - 1 <= dim <= ndim:
        raise IndexError(f"dim {dim} is out of range for a new dim of a Tile of {ndim} dims")
    return dim % (ndim + 1)


@implements_torch(torch.unsqueeze)
def _unsqueeze(input: Tile, dim: int) -> Tile:
    at = new_dim_position(dim, input.ndim)
    return Tile(input.local.unsqueeze(at), input.layout.insert(at), input.mesh)


@implements_torch(torch.permute, Tensor.permute)
def _permute(input: Tile, dims: Any, *more: int) -> Tile:
    named = _size_arguments(dims, more)
    if len(named) != input.ndim:
        raise RuntimeError(f"permute{named} of a Tile of {input.ndim} dims: name each dim once")
    order = list(reduced_dims(input, named))
    return Tile(input.local.permute(order), input.layout.permute(order), input.mesh)


@implements_torch(torch.transpose, torch.swapaxes, torch.swapdims)
def _transpose(input: Tile, dim0: int, dim1: int) -> Tile:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(input, order)


@implements_torch(torch.t)
def _t(input: Tile) -> Tile:
    if input.ndim > 2:
        raise RuntimeError(f"t() of a Tile of shape {tuple(input.shape)}: only 2 dims or fewer; use tile.mT")
    return input if input.ndim < 2 else _transpose(input, 0, 1)


@implements_torch(torch.adjoint)
def _adjoint(input: Tile) -> Tile:
    return _transpose(input, -2, -1).conj()


@implements_torch(torch.movedim, torch.moveaxis)
def _movedim(input: Tile, source: Any, destination: Any) -> Tile:
    torch.movedim(torch.empty([0] * input.ndim), source, destination)  # for torch's own checks and errors
    sources = [d % input.ndim for d in _size_arguments(source, ())]
    targets = [d % input.ndim for d in _size_arguments(destination, ())]
    rest = iter(d for d in range(input.ndim) if d not in sources)
    at = dict(zip(targets, sources, strict=True))
    return _permute(input, [at[d] if d in at else next(rest) for d in range(input.ndim)])


@implements_torch(Tensor.expand, torch.broadcast_to)
def _expand(input: Tile, size: Any, *more: int) -> Tile:
    wanted = _size_arguments(size, more)
    lead = len(wanted) - input.ndim
    fits = lead >= 0 and min(wanted[:lead], default=0) >= 0
    if not fits or any(n not in (-1, m) and (m != 1 or n < 0) for n, m in zip(wanted[lead:], input.shape, strict=True)):
        raise RuntimeError(f"cannot expand a Tile of shape {tuple(input.shape)} to {wanted}")
    longer = [d for d in range(input.ndim) if input.shape[d] == 1 and wanted[lead + d] not in (-1, 1)]
    input = held_by_all(input, longer)
    layout, local_shape = input.layout, [-1] * input.ndim
    for d in longer:
        layout = layout.replace_dim(d, whole_dim(wanted[lead + d]))
        local_shape[d] = wanted[lead + d]
    for n in reversed(wanted[:lead]):
        layout = layout.insert(0, n)
    return Tile(input.local.expand(*wanted[:lead], *local_shape), layout, input.mesh)


@implements_torch(Tensor.expand_as)
def _expand_as(input: Any, other: Any) -> Any:
    return input.expand(tuple(other.shape))


@implements_torch(torch.tile)
def _torch_tile(input: Tile, dims: Any, *more: int) -> Any:
    times = _size_arguments(dims, more)
    return _repeat(input, (1,) * (input.ndim - len(times)) + times)


@implements_torch(Tensor.repeat)
def _repeat(input: Tile, repeats: Any, *more: int) -> Any:
    times = _size_arguments(repeats, more)
    if len(times) < input.ndim:
        raise RuntimeError(
            f"repeat{times} of a Tile of {input.ndim} dims: give a number for each dim, or use tile.tile"
        )
    while input.ndim < len(times):
        input = _unsqueeze(input, 0)
    if any(n != 1 and any(c.has_halo for c in input.layout.dim(d)) for d, n in enumerate(times)):
        input = input.owned()
    layout = input.layout
    for d, n in enumerate(times):
        if n < 0:
            raise RuntimeError(f"repeat{times} of a Tile: {n} is no number of times")
        if n != 1:
            if layout.is_cut(d):
                raise refusal_error(
                    Tensor.repeat, input, f"it repeats dim {d}, which is cut", "repeat another dim, or redistribute"
                )
            layout = layout.replace_dim(d, whole_dim(n * input.shape[d]))
    return Tile(input.local.repeat(times), layout, input.mesh)


# -- slices -----------------------------------------------------------------------------------------------------------


def _sliced_cut(cut: Cut, start: int, stop: int, step: int) -> Cut:
    """The cut of rows start:stop:step: every row stays where it lies."""
    size = max(0, -(-(stop - start) // step))

    def index(row: int) -> int:
        return min(max(-(-(row - start) // step), 0), size)

    held = [(index(max(a, 0)), index(min(b, cut.size))) for a, b in cut.held]
    return Cut(
        size, tuple(index(p) for p in cut.points[:-1]) + (size,) if cut.is_cut else (0, size), cut.axes, tuple(held)
    )


def slice_dim(tile: Tile, dim: int, start: int, stop: int, step: int = 1) -> Tile:
    """Rows start:stop:step of a dim, cut or not; nothing is sent."""
    cuts = tile.layout.dim(dim)
    if (start, stop, step) == (0, tile.shape[dim], 1):
        return tile
    if len(cuts) != 1:
        raise refusal_error(
            Tensor.__getitem__, tile, f"dim {dim} is made of dims that were flattened together", "unflatten it first"
        )
    cut = cuts[0]
    sliced = _sliced_cut(cut, start, stop, step)
    piece = tile.layout.piece(cut, tile.coordinate)
    low, (first, last) = cut.held[piece][0], sliced.held[piece]
    begin = start + first * step - low
    local = tile.local[(slice(None),) * dim + (slice(begin, max(begin, begin + (last - first - 1) * step + 1), step),)]
    if first == last:
        local = tile.local.narrow(dim, 0, 0)
    return Tile(local, tile.layout.replace_dim(dim, sliced), tile.mesh)


def select_dim(tile: Tile, dim: int, index: int) -> Any:
    """One row of a dim.  *Sends*: for a cut dim the row, from its owner to the ranks along the axes that cut the
    dim.
    """
    size = tile.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dim {dim} of size {size}")
    row = index % size
    return _drop_unit_dims(slice_dim(tile, dim, row, row + 1), (dim,))


@implements_torch(Tensor.__getitem__)
def _getitem(tile: Any, index: Any) -> Any:
    if not isinstance(tile, Tile):
        return pick_from_plain(Tensor.__getitem__, tile, index)
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, (Tensor, Tile, list)) for i in items):
        return _take_indexed(tile, items)
    if any(isinstance(i, bool) for i in items):
        raise refusal_error(Tensor.__getitem__, tile, f"{index!r} is a mask of no dims", "use None, which adds a dim")
    named = sum(1 for i in items if i is not None and i is not Ellipsis)
    if items.count(Ellipsis) > 1:
        raise refusal_error(Tensor.__getitem__, tile, "an index has one ellipsis, not several", "write the slices out")
    if named > tile.ndim:
        raise IndexError(f"too many indices ({named}) for a Tile of {tile.ndim} dims")
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (tile.ndim - named)
    dim, out = 0, tile
    for item in items:
        if item is None:
            out = _unsqueeze(out, dim)
            dim += 1
        elif isinstance(item, slice):
            start, stop, step = item.indices(out.shape[dim])
            if step < 1:
                raise ValueError("step must be greater than zero")
            out = slice_dim(out, dim, start, max(start, stop), step)
            dim += 1
        else:
            out = select_dim(out, dim, operator.index(item))
    return out


def _take_indexed(tile: Tile, items: list[Any]) -> Any:
    """Indexing by one plain 1-d index tensor or list, on a dim that nothing cuts."""
    where = [d for d, i in enumerate(items) if isinstance(i, (Tensor, list))]
    simple = all(isinstance(i, slice) and i == slice(None) for d, i in enumerate(items) if d not in where)
    if len(where) != 1 or not simple:
        raise refusal_error(
            Tensor.__getitem__,
            tile,
            "of advanced indices only one index tensor among full slices is answered",
            "use torch.where, index_select or tile.full_tensor()",
        )
    item, size = items[where[0]], tile.shape[where[0]]
    index = torch.as_tensor(
        item, device=tile.device, dtype=torch.int64 if isinstance(item, list) and not item else None
    )
    # an index out of range stays so, for torch to refuse
    return _index_select(tile, where[0], torch.where(index < 0, index + size, index) if index.is_signed() else index)


@implements_torch(torch.index_select)
def _index_select(input: Any, dim: int, index: Any) -> Any:
    if not isinstance(input, Tile):
        if index.ndim != 1:
            raise RuntimeError(f"index_select(): the index must be 1-d, got a Tile of shape {tuple(index.shape)}")
        return pick_from_plain(torch.index_select, input, (slice(None),) * (dim % max(input.ndim, 1)) + (index,))
    (at,) = reduced_dims(input, dim)
    if isinstance(index, Tile) or input.layout.is_cut(at) or index.ndim != 1 or index.dtype == torch.bool:
        raise refusal_error(
            torch.index_select,
            input,
            f"it picks rows of dim {at} by a tensor {tuple(index.shape)} of {index.dtype}",
            "use a 1-d integer index on a dim that nothing cuts, or a slice",
        )
    own = input.owned() if any(c.has_halo for c in input.layout.dim(at)) else input
    return Tile(own.local.index_select(at, index), own.layout.replace_dim(at, whole_dim(len(index))), own.mesh)


@implements_torch(torch.narrow)
def _narrow(input: Tile, dim: int, start: int, length: int) -> Tile:
    (at,) = reduced_dims(input, dim)
    first = start % input.shape[at] if start < 0 else start
    if length < 0 or first + length > input.shape[at]:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dim {at} of size {input.shape[at]}")
    return slice_dim(input, at, first, first + length)


@implements_torch(torch.select)
def _torch_select(input: Tile, dim: int, index: int) -> Any:
    return select_dim(input, reduced_dims(input, dim)[0], index)


@implements_torch(torch.split, Tensor.split)
def _torch_split(
    tensor: Tile, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None
) -> tuple[Tile, ...]:
    sizes = split_size if split_size_or_sections is None else split_size_or_sections
    (at,) = reduced_dims(tensor, dim)
    n = tensor.shape[at]
    if isinstance(sizes, int):
        if sizes < 0 or (sizes == 0 and n > 0):
            raise RuntimeError(f"split size {sizes} of dim {at}, which has {n} rows, must be larger than 0")
        sizes = [min(sizes, n - s) for s in range(0, n, sizes or 1)] or [0]
    if sum(sizes) != n or min(sizes, default=0) < 0:
        raise RuntimeError(f"split sizes {list(sizes)} must be 0 or more, and sum to {n}, the size of dim {at}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(slice_dim(tensor, at, s, s + k) for s, k in zip(starts, sizes, strict=True))


@implements_torch(torch.chunk)
def _torch_chunk(input: Tile, chunks: int, dim: int = 0) -> tuple[Tile, ...]:
    if chunks < 1:
        raise RuntimeError(f"chunk: there is no way to make {chunks} chunks; pass 1 or more")
    size = input.shape[reduced_dims(input, dim)[0]]
    if size == 0:
        return _torch_split(input, [0] * chunks, dim)
    return _torch_split(input, max(1, -(-size // chunks)), dim)


@implements_torch(torch.unbind)
def _unbind(input: Tile, dim: int = 0) -> tuple[Any, ...]:
    (at,) = reduced_dims(input, dim)
    return tuple(select_dim(input, at, i) for i in range(input.shape[at]))


# -- roll -------------------------------------------------------------------------------------------------------------


@implements_torch(torch.roll)
def _roll(input: Tile, shifts: Any, dims: Any = None) -> Any:
    """y[i] = x[i - shift] around each dim. *Sends*: the rows that change owner; backward the same, reversed."""
    if dims is None or dims == ():
        return reshape(_roll(reshape(input, (input.numel(),)), shifts, 0), tuple(input.shape))
    own = input.owned()
    target = own.layout
    for shift, dim in zip(_size_arguments(shifts, ()), _size_arguments(dims, ()), strict=True):
        (at,) = reduced_dims(own, dim)
        cuts = target.dim(at)
        if len(cuts) != 1:
            raise refusal_error(
                torch.roll, input, f"dim {at} is made of dims that were flattened together", "unflatten it first"
            )
        shifted = [(a - shift, b - shift) for a, b in cuts[0].held]
        target = target.replace_dim(at, cuts[0].holding(shifted))
    return Tile(in_own_memory(exchange_rows(own.local, own.layout, target, own.mesh), input), own.layout, own.mesh)
