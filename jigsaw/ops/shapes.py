"""Shape functions: views, slices and flattening.  None of them moves a row, except picking one row of a cut dim.

>>> tile = jigsaw.shard(torch.zeros(2, 4, 9, 16), jigsaw.init_mesh(lat=1, lon=1), (None, None, "lat", "lon"))
>>> tokens = tile.flatten(2).transpose(1, 2)
>>> tokens.shape, tokens.unflatten(1, (9, 16)).shape
(torch.Size([2, 144, 4]), torch.Size([2, 9, 16, 4]))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.apart_copies import copied_apart, copied_to, note_rows_around
from jigsaw.ops.meeting.common_cuts import elements_to_fetch, pieces_with_rows, with_moved_rows
from jigsaw.ops.meeting.reshaped_cuts import plan_reshape
from jigsaw.ops.plain_views import leave_as_view
from jigsaw.ops.pointwise import held_by_all
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.whole_dims import with_contiguous_dim
from jigsaw.ops.whole_strides import strides_of_view, whole_strides, with_strides
from jigsaw.tile.misuse import calling_line, warn_once
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory, refusal_error
from jigsaw.torch_internals.autograd import base_of_view

# -- reshape ----------------------------------------------------------------------------------------------------------


def _full_shape(tile: Tile, shape: Sequence[int]) -> tuple[int, ...]:
    known = math.prod([n for n in shape if n != -1])
    if -1 in shape and known:
        shape = [tile.numel() // known if n == -1 else n for n in shape]
    if math.prod(shape) != tile.numel():
        raise RuntimeError(
            f"shape {tuple(shape)} is invalid for a Tile of shape {tuple(tile.shape)} with {tile.numel()} elements"
        )
    return tuple(shape)


def _size_arguments(first: Any, rest: Sequence[int]) -> tuple[int, ...]:
    sizes = first if isinstance(first, (tuple, list)) else (first, *rest)
    return tuple(map(index, sizes))  # `index`, because torch also takes tensors of one element


@implements_torch(Tensor.view)
def _view(input: Tile, size: Any = None, *more: int, dtype: torch.dtype | None = None) -> Any:
    shape = dtype or size
    return _view_as_type(input, shape) if isinstance(shape, torch.dtype) else reshape(input, shape, *more)


def _view_as_type(input: Tile, dtype: torch.dtype) -> Tile:
    """Return the same bytes; numbers of another width make the last dim longer or shorter."""
    if dtype.itemsize == input.dtype.itemsize:
        return with_strides(Tile(input.local.view(dtype), input.layout, input.mesh), whole_strides(input), input)
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
    # contiguous, because torch checks strides, and ranks must not differ in the check
    return Tile(input.local.contiguous().view(dtype), input.layout.replace_dim(last, whole_dim(size)), input.mesh)


@implements_torch(torch.reshape, Tensor.reshape)
def reshape(input: Tile, shape: Any, *more: int) -> Any:
    """Return the same elements in another global shape; dims flatten together and split again.

    *Shapes*: a lat x lon tile flattens to tokens that each rank holds its box of; they split again at the same place. A
    split that would part a block between ranks (windows of 4 of rows cut at 0, 7, 12) first moves the cut points to the
    nearest multiples (0, 8, 12); ranks may then have nothing.  Where the new dims part every row of a cut one, its axes
    move to the longest dim that the view can keep cut.  The rule is in `jigsaw.ops.meeting.reshaped_cuts`.
    *Sends*: nothing; where cut points move, the rows that change owner, counted as "realign", where axes move up to
    (P-1)/P of a tile, counted as "recut"; backward the reverse.  Where one rank gets what several had, and that is a
    mebibyte or more, a warning says so once for each line.
    *Raises*: `ShardingError` for a tile of no elements.
    """
    new = _full_shape(input, _size_arguments(shape, more))
    if 0 in new:
        raise ShardingError(
            f"reshape of an empty Tile {tuple(input.shape)} to {new} is ambiguous; build the tile in its new shape"
        )
    strides = whole_strides(input)
    view, source = strides_of_view(tuple(input.shape), strides, new), input
    before, layout = plan_reshape(input.layout, new)
    if before is not input.layout and before != input.layout:
        _warn_of_idle_ranks(input, before, new)
        input = with_moved_rows(input, before) if view is None else copied_to(input, before)
    rows = input.local
    local = rows.reshape(layout.local_shape(input.coordinate))
    if view is None:
        # torch copies where rows of the whole tensor are not contiguous, even if this rank's rows are
        return Tile(in_own_memory(local, input), layout, input.mesh)
    if base_of_view(local) is None and local is not rows and local.numel():
        # contiguous in the whole tensor, but not on this rank
        rows = copied_to(input, input.layout).local
        local = rows.reshape(layout.local_shape(input.coordinate))
    return with_strides(Tile(local, layout, input.mesh), view, source)


_BYTES_TO_WARN_OF = 1 << 20


def _warn_of_idle_ranks(tile: Tile, before: Layout, shape: tuple[int, ...]) -> None:
    """Warn once for each line where a view brings to one rank what several had.  Moving axes are only counted: they
    cost one exchange, as in a transform or a sort.
    """
    alone = [c for c in before.cuts if c.is_cut and pieces_with_rows(c.points) == 1]
    spread = {a for c in tile.layout.cuts if pieces_with_rows(c.points) > 1 for a in c.axes}
    axes = [a for c in alone for a in c.axes if a in spread]
    sent = elements_to_fetch(tile.layout, before) * tile.dtype.itemsize if axes else 0
    if sent < _BYTES_TO_WARN_OF:
        return
    where = calling_line()
    warn_once(
        f"idle ranks after a view at {where}",
        f"a Tile cut as {tile.layout}, viewed as {shape}: every new row has parts of all the old ones, and no dim is "
        f"left that {'+'.join(axes)} could cut, so the first rank along it gets {sent} bytes and the others have no "
        f"rows ({where}); cut another dim before with tile.redistribute, or leave this unsaid with "
        "warnings.filterwarnings('ignore', 'a Tile cut as')",
    )


@implements_torch(Tensor.view_as, Tensor.reshape_as, either=("input", "other"))
def _reshape_as(input: Any, other: Any) -> Any:
    if input is not other:
        return input.reshape(tuple(other.shape))
    return with_strides(input.view_of_itself(), whole_strides(input), input)


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
    dims = [d for d in named if input.ndim and input.shape[d] == 1]  # a 0-d tensor accepts dim 0, but has no dims
    return _drop_unit_dims(input, dims)


def _drop_unit_dims(input: Tile, dims: Sequence[int]) -> Any:
    """Drop dims of size 1; a cut or haloed one (some rank holds no row) is made whole first."""
    layout = input.layout
    for d in dims:
        layout = layout.replace_dim(d, whole_dim(1))
    tile = input
    if layout != input.layout:
        layout = layout.without_beyond()
        moved = input.with_layout(layout)
        tile = moved if layout.cut_axes == input.layout.cut_axes else copied_apart(moved, input)
    local = tile.local.squeeze(tuple(dims)) if dims else tile.local
    kept = layout.drop(dims)
    if kept.ndim == 0:
        return leave_as_view(local, kept, input)
    strides = tuple([n for d, n in enumerate(whole_strides(input)) if d not in dims])
    return with_strides(Tile(local, kept, input.mesh), strides, input)


def new_dim_position(dim: int, ndim: int) -> int:
    """Return the position of a new dim, non-negative."""
    if not -ndim - 1 <= dim <= ndim:
        raise IndexError(f"dim {dim} is out of range for a new dim of a Tile of {ndim} dims")
    return dim % (ndim + 1)


@implements_torch(torch.unsqueeze)
def unsqueeze_tile(input: Tile, dim: int) -> Tile:
    """Return a view with a new dim of size 1."""
    at, strides = new_dim_position(dim, input.ndim), whole_strides(input)
    inner = strides[at] * input.shape[at] if at < input.ndim else 1
    out = Tile(input.local.unsqueeze(at), input.layout.insert(at), input.mesh)
    return with_strides(out, (*strides[:at], inner, *strides[at:]), input)


@implements_torch(torch.permute, Tensor.permute)
def _permute(input: Tile, dims: Any, *more: int) -> Tile:
    named = _size_arguments(dims, more)
    if len(named) != input.ndim:
        raise RuntimeError(f"permute{named} of a Tile of {input.ndim} dims: name each dim once")
    return _reordered_dims(input, reduced_dims(input, named))


def _reordered_dims(input: Tile, order: Sequence[int]) -> Tile:
    strides = whole_strides(input)
    out = Tile(input.local.permute(tuple(order)), input.layout.permute(order), input.mesh)
    return with_strides(out, tuple([strides[d] for d in order]), input)


@implements_torch(torch.transpose, torch.swapaxes, torch.swapdims)
def _transpose(input: Tile, dim0: int, dim1: int) -> Tile:
    if not input.ndim:
        return input.movedim(dim0, dim1)
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _reordered_dims(input, order)


@implements_torch(torch.t)
def _t(input: Tile) -> Tile:
    if input.ndim > 2:
        raise RuntimeError(f"t() of a Tile of shape {tuple(input.shape)}: only 2 dims or fewer; use tile.mT")
    return input if input.ndim < 2 else _transpose(input, 0, 1)


@implements_torch(torch.adjoint, Tensor.mH)
def _adjoint(input: Tile) -> Tile:
    return _transpose(input, -2, -1).conj()


@implements_torch(torch.movedim, torch.moveaxis)
def _movedim(input: Tile, source: Any, destination: Any) -> Tile:
    torch.movedim(torch.empty([0] * input.ndim), source, destination)  # only to raise torch's own errors
    if not input.ndim:
        return input.view_of_itself()
    sources = [d % input.ndim for d in _size_arguments(source, ())]
    targets = [d % input.ndim for d in _size_arguments(destination, ())]
    rest = iter(d for d in range(input.ndim) if d not in sources)
    at = dict(zip(targets, sources, strict=True))
    return _permute(input, [at[d] if d in at else next(rest) for d in range(input.ndim)])


@implements_torch(Tensor.expand, torch.broadcast_to)
def _expand(input: Tile, size: Any, *more: int) -> Tile:
    sizes = _size_arguments(size, more)
    lead = len(sizes) - input.ndim
    fits = lead >= 0 and min(sizes[:lead], default=0) >= 0
    if not fits or any(n not in (-1, m) and (m != 1 or n < 0) for n, m in zip(sizes[lead:], input.shape, strict=True)):
        raise RuntimeError(f"cannot expand a Tile of shape {tuple(input.shape)} to {sizes}")
    longer = [d for d in range(input.ndim) if input.shape[d] == 1 and sizes[lead + d] not in (-1, 1)]
    strides = (*[0] * lead, *[0 if d in longer else n for d, n in enumerate(whole_strides(input))])
    source, held = input, held_by_all(input, longer)
    input = held if held.layout.cut_axes == input.layout.cut_axes else copied_apart(held, input)
    layout, local_shape = input.layout, [-1] * input.ndim
    for d in longer:
        layout = layout.replace_dim(d, whole_dim(sizes[lead + d]))
        local_shape[d] = sizes[lead + d]
    for n in reversed(sizes[:lead]):
        layout = layout.insert(0, n)
    return with_strides(Tile(input.local.expand((*sizes[:lead], *local_shape)), layout, input.mesh), strides, source)


@implements_torch(torch.broadcast_tensors)
def _broadcast_tensors(*tensors: Any) -> tuple[Any, ...]:
    tiles: Any = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    shape = torch.broadcast_shapes(*[tuple(t.shape) for t in tiles])
    # as in torch, the tensor itself and not a view
    return tuple(t if tuple(t.shape) == tuple(shape) else t.expand(shape) for t in tiles)


@implements_torch(Tensor.expand_as, either=("input", "other"))
def _expand_as(input: Any, other: Any) -> Any:
    return input.expand(tuple(other.shape))


# -- slices -----------------------------------------------------------------------------------------------------------


def slice_dim(tile: Tile, dim: int, start: int, stop: int, step: int = 1) -> Tile:
    """Return rows start:stop:step of a dim, cut or not; every row stays where it lies.

    *Sends*: nothing, but for dims that were flattened together what `with_contiguous_dim` does.
    """
    if (start, stop, step) == (0, tile.shape[dim], 1):
        return tile
    strides, sliced_at_hand = whole_strides(tile), _slice_at_hand(tile.layout, dim, start, stop, step)
    parts = _whole_parts(tile.layout, dim) if step == 1 else 1
    if parts > 1 and not any(at * parts % tile.shape[dim] for at in (start, stop)):
        return with_strides(_sliced_parts(tile, dim, parts, start, stop), strides, tile)
    if sliced_at_hand is not None:
        rows = tile.local.narrow(dim, start, stop - start)
        return with_strides(Tile(rows, sliced_at_hand, tile.mesh), strides, tile)
    source, tile = tile, with_contiguous_dim(tile, dim, copied_to)
    (cut,) = tile.layout.dim(dim)
    if cut.has_halo and cut.wraps and any(a < 0 or b > cut.size for a, b in cut.held):
        note_rows_around(tile)
    layout = _sliced_layout(tile.layout, dim, start, stop, step)
    (sliced,) = layout.dim(dim)
    piece = tile.layout.piece(cut, tile.coordinate)
    low, (first, last) = cut.held[piece][0], sliced.held[piece]
    begin = start + first * step - low
    local = tile.local[(slice(None),) * dim + (slice(begin, max(begin, begin + (last - first - 1) * step + 1), step),)]
    if first == last:
        local = tile.local.narrow(dim, 0, 0)
    strides = (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
    return with_strides(Tile(local, layout, tile.mesh), strides, source)


def _whole_parts(layout: Layout, dim: int) -> int:
    """Return of how many parts a dim consists of which each rank has the same rows; 1 where it is one cut."""
    first = layout.dim(dim)[0]
    return 1 if len(layout.dim(dim)) == 1 or first.is_cut or first.has_halo else first.size


def _sliced_parts(tile: Tile, dim: int, parts: int, start: int, stop: int) -> Tile:
    """Return some of the parts of a dim: of queries, keys and values side by side each rank has its heads."""
    rows, own = tile.shape[dim] // parts, tile.local.shape[dim] // parts
    first, last = start // rows, stop // rows
    rest = tile.layout.dim(dim)[1:]
    cuts = rest if last - first == 1 else (whole_dim(last - first), *rest)
    local = tile.local.narrow(dim, first * own, (last - first) * own)
    return Tile(local, tile.layout.replace_dim(dim, *cuts), tile.mesh)


@lru_cache(maxsize=4096)
def _slice_at_hand(layout: Layout, dim: int, start: int, stop: int, step: int) -> Layout | None:
    """Return the layout of consecutive rows of a dim of which every rank has all; else None."""
    if step != 1 or not layout.complete_dims[dim] or len(layout.dim(dim)) != 1:
        return None
    return _sliced_layout(layout, dim, start, stop, step)


@lru_cache(maxsize=4096)
def _sliced_layout(layout: Layout, dim: int, start: int, stop: int, step: int) -> Layout:
    cut = layout.dim(dim)[0]
    size = max(0, -(-(stop - start) // step))

    def index(row: int) -> int:
        return min(max(-(-(row - start) // step), 0), size)

    held = [(index(max(a, 0)), index(min(b, cut.size))) for a, b in cut.held]
    points = tuple(index(p) for p in cut.points[:-1]) + (size,) if cut.is_cut else (0, size)
    # `source` is kept: low modes of a spectrum remember the cuts of the field
    return layout.replace_dim(dim, Cut(size, points, cut.axes, tuple(held), cut.source, by_index=cut.by_index))


def select_dim(tile: Tile, dim: int, index: int) -> Any:
    """Return one row of a dim.  *Sends*: of a cut dim the row, to the ranks along the axes that cut it."""
    size = tile.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dim {dim} of size {size}")
    row = index % size
    if tile.layout.complete_dims[dim]:
        local, layout = tile.local.select(dim, row), tile.layout.drop((dim,))
        if not layout.ndim:
            return leave_as_view(local, layout, tile)
        strides = whole_strides(tile)
        return with_strides(Tile(local, layout, tile.mesh), (*strides[:dim], *strides[dim + 1 :]), tile)
    return _drop_unit_dims(slice_dim(tile, dim, row, row + 1), (dim,))


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


@implements_torch(torch.split, Tensor.split, either=("split_size_or_sections", "split_size"))
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
    parts = _whole_parts(tensor.layout, at)
    if len(sizes) > 1 and (parts == 1 or any(start * parts % n for start in starts)):
        tensor = with_contiguous_dim(tensor, at, copied_to)  # one copy for all parts
    return tuple(slice_dim(tensor, at, s, s + k) for s, k in zip(starts, sizes, strict=True))


@implements_torch(torch.chunk, torch.unsafe_chunk)
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
    input = with_contiguous_dim(input, at, copied_to)  # once for all rows
    return tuple(select_dim(input, at, i) for i in range(input.shape[at]))


# -- views of other memory --------------------------------------------------------------------------------------------


def _answer_copy(function: Any, view: Any) -> None:
    """Answer a function that gives the values of a view in new memory."""

    def answer(input: Tile, *args: Any, **kwargs: Any) -> Any:
        out = view(input, *args, **kwargs)
        if isinstance(out, (list, tuple)):
            return tuple(o.clone(memory_format=torch.contiguous_format) for o in out)
        return out.clone(memory_format=torch.contiguous_format)

    implements_torch(function)(answer)


def _slice_of_dim(input: Tile, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    at = dim % max(input.ndim, 1)
    return input[(slice(None),) * at + (slice(start, end, step),)]


for _copying, _viewing in (
    (torch.alias_copy, Tensor.clone),
    (torch.detach_copy, Tensor.detach),
    (torch.diagonal_copy, Tensor.diagonal),
    (torch.expand_copy, Tensor.expand),
    (torch.permute_copy, Tensor.permute),
    (torch.select_copy, Tensor.select),
    (torch.slice_copy, _slice_of_dim),
    (torch.split_copy, Tensor.split),
    (torch.split_with_sizes_copy, Tensor.split_with_sizes),
    (torch.squeeze_copy, Tensor.squeeze),
    (torch.t_copy, Tensor.t),
    (torch.transpose_copy, Tensor.transpose),
    (torch.unbind_copy, Tensor.unbind),
    (torch.unfold_copy, Tensor.unfold),
    (torch.unsqueeze_copy, Tensor.unsqueeze),
    (torch.view_as_complex_copy, torch.view_as_complex),
    (torch.view_as_real_copy, torch.view_as_real),
    (torch.view_copy, Tensor.view),
):
    _answer_copy(_copying, _viewing)
