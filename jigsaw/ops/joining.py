"""Joining and repeating: cat, stack, pad_sequence, repeat, repeat_interleave, atleast_nd, named splits and stacks.

Along a dim that nothing cuts each rank joins what it has.  Along a cut one every operand is cut to the rows that a rank
will have of the result, and moves there; **rows stay where they lie as far as possible**:

- The cut operand with the most rows keeps its cut points where little stands before it and behind it: at most an eighth
  of a balanced piece of the result each, or one row.  That joins the first piece, and the last.  A class token, a
  surface level, a row of padding then move nothing of the operand, and a slice takes them off without a message.
- Otherwise (the faces of a cubed sphere, two halves) the result is cut balanced, and each operand sends the rows that
  lie on another rank there.

Four ranks on lat=4, tokens [2, 196, 8] cut at rows 0, 49, 98, 147, 196: ``cat([token, tokens], 1)`` of a token
[2, 1, 8] is cut at 0, 50, 99, 148, 197 and sends nothing.

>>> tile = jigsaw.shard(torch.zeros(2, 3, 9), jigsaw.init_mesh(lat=1), (None, None, "lat"))
>>> torch.cat([tile, tile], dim=1).shape, tile.repeat(2, 1, 1).shape
(torch.Size([2, 6, 9]), torch.Size([4, 3, 9]))
>>> jigsaw.shard(torch.tensor([1.0, 2.0]), jigsaw.init_mesh(lat=1), ("lat",)).repeat_interleave(2).local
tensor([1., 1., 2., 2.])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.common_cuts import bring_together, plan_common_axes, with_moved_rows
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor
from jigsaw.ops.pointwise import align_tiles
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.shapes import new_dim_position
from jigsaw.ops.whole_dims import with_contiguous_dim
from jigsaw.tile.tile import Tile, implements_torch, shared_mesh
from jigsaw.torch_internals.autograd import cpp_pad_sequence


def joined_points(sizes: Sequence[int], kept: int, points: Sequence[int]) -> tuple[int, ...]:
    """Return where the join of operands of these sizes is cut; operand number `kept` is cut at `points`.

    >>> jigsaw.ops.joining.joined_points([1, 9, 0], 1, [0, 5, 9])
    (0, 6, 10)
    >>> jigsaw.ops.joining.joined_points([9, 9], 0, [0, 5, 9])
    (0, 9, 18)
    """
    size, pieces = sum(sizes), len(points) - 1
    before = sum(sizes[:kept])
    few = max(size // (8 * pieces), 1)
    if before > few or size - before - sizes[kept] > few:
        return cut_points(size, pieces)
    return (0, *(before + p for p in points[1:-1]), size)


def _cuts_in_join(layouts: Sequence[Layout | None], sizes: Sequence[int], at: int) -> tuple[Cut, list[Cut]]:
    """Return the cut of the result along `at`, and that of each operand's rows in it (None stands for plain)."""
    cuts = {i: layout.dim(at)[0] for i, layout in enumerate(layouts) if layout is not None and layout.is_cut(at)}
    if not cuts:
        return whole_dim(sum(sizes)), [whole_dim(n) for n in sizes]
    kept = max(cuts, key=lambda i: sizes[i])
    like = cuts[kept]
    points = joined_points(sizes, kept, like.points)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [
        Cut(n, tuple(min(max(p - start, 0), n) for p in points), like.axes)
        for n, start in zip(sizes, starts, strict=True)
    ]
    return Cut(sum(sizes), points, like.axes, by_index=like.by_index), parts


def _without_other_order(t: Any, at: int) -> Any:
    """Return a tile cut along `at` so that each rank has one interval of rows there, without halo."""
    if not isinstance(t, Tile) or not (t.layout.is_cut(at) or any(c.has_halo for c in t.layout.dim(at))):
        return t
    return with_contiguous_dim(t.owned(), at)


def _aligned_parts(function: Any, tensors: Sequence[Any], dim: int) -> tuple[list[Tensor], Layout, Tile]:
    """Return the local tensors to join along `dim`, plain ones cut to the tile's box, and the layout of the result."""
    first = next(t for t in tensors if isinstance(t, Tile))
    (at,) = reduced_dims(first, dim)
    _check_joined_shapes(function, tensors, first, at)
    shared_mesh([t for t in tensors if isinstance(t, Tile)])
    tensors = [_without_other_order(t, at) for t in tensors]
    tiles = [t for t in tensors if isinstance(t, Tile)]
    itemsizes, named = tuple(t.dtype.itemsize for t in tiles), tuple(range(first.ndim))
    moves = plan_common_axes(tuple(t.layout for t in tiles), itemsizes, (named,) * len(tiles), None, at)
    planned = iter(to or t.layout for t, to in zip(tiles, moves, strict=True))
    lie = [next(planned) if isinstance(t, Tile) else None for t in tensors]
    joined, cuts = _cuts_in_join(lie, [t.shape[at] for t in tensors], at)
    # a tile that other axes cut moves at once to the ranks that hold its rows of the result
    tensors = [
        with_moved_rows(t, to.replace_dim(at, cut)) if to is not None and to is not t.layout else t
        for t, to, cut in zip(tensors, lie, cuts, strict=True)
    ]
    tiles = [t for t in tensors if isinstance(t, Tile)]
    met = iter(bring_together(tiles, [[None if d == at else d for d in range(t.ndim)] for t in tiles]))
    tensors = [next(met) if isinstance(t, Tile) else t for t in tensors]
    # compare one row of each, because sizes along `at` may differ
    layout, _ = align_tiles([_with_one_row(t, at) for t in tensors if isinstance(t, Tile)])
    parts: list[Tensor] = []
    for t, cut in zip(tensors, cuts, strict=True):
        target = layout.replace_dim(at, cut)
        if isinstance(t, Tile):
            moved = t.layout.replace_dim(at, cut)
            parts.append(_local_in_join(t if moved == t.layout else t.with_layout(moved), target))
        else:
            parts.append(cut_whole_tensor(t, first, target))
    return parts, layout.replace_dim(at, joined), first


def _with_one_row(t: Tile, at: int) -> Tile:
    layout = t.layout.replace_dim(at, whole_dim(1))
    return Tile(t.local.new_empty(layout.local_shape(t.coordinate)), layout, t.mesh)


def _check_joined_shapes(function: Any, tensors: Sequence[Any], first: Tile, at: int) -> None:
    for t in tensors:
        if t.ndim != first.ndim or any(n != first.shape[d] for d, n in enumerate(t.shape) if d != at):
            raise RuntimeError(
                f"{function.__name__} of shapes {[tuple(x.shape) for x in tensors]}: they must agree in every dim but "
                f"{at}"
            )


def _local_in_join(tile: Tile, layout: Layout) -> Tensor:
    """Return the local part of a tile in a join whose result has `layout`."""
    anchor = Tile(tile.local.new_empty(layout.local_shape(tile.coordinate)), layout, tile.mesh)
    # a dim of one row broadcasts to a dim that is cut in another tile
    return align_tiles([tile, anchor])[1][0].expand(anchor.local.shape)


@lru_cache(maxsize=4096)
def _layout_in_place(layouts: tuple[Layout, ...], dim: int) -> Layout | None:
    """Return the layout of a join for which nothing has to move: along a whole dim, of tiles cut alike; else None."""
    first = layouts[0]
    if not -first.ndim <= dim < first.ndim or any(o.ndim != first.ndim for o in layouts):
        return None
    at = dim % first.ndim
    rest = first.replace_dim(at, whole_dim(1))
    for layout in layouts:
        is_whole = layout.complete_dims[at] and layout.without_beyond() is layout
        if not is_whole or layout.replace_dim(at, whole_dim(1)) != rest:
            return None
    return first.replace_dim(at, whole_dim(sum(layout.shape[at] for layout in layouts)))


def _layouts_on_one_mesh(tensors: Sequence[Any]) -> tuple[Layout, ...] | None:
    """Return the layouts, where all are tiles of the same mesh."""
    layouts: list[Layout] = []
    for t in tensors:
        if type(t) is not Tile or t.mesh is not tensors[0].mesh:
            return None
        layouts.append(t.layout)
    return tuple(layouts) or None


@implements_torch(torch.cat, torch.concat, torch.concatenate, either=("tensors",))
def join_tiles(tensors: Sequence[Any], dim: int = 0) -> Tile:
    """Join tiles and plain tensors one after the other along `dim`.

    *Sends*: along a cut dim the rows that lie on another rank in the result, by the rule above; what other axes cut, up
    to (P-1)/P of a tile (`jigsaw.ops.meeting.common_cuts`); backward as many.
    """
    layouts = _layouts_on_one_mesh(tensors)
    layout = None if layouts is None or type(dim) is not int else _layout_in_place(layouts, dim)
    if layout is not None:  # the usual case
        return Tile(torch.cat([t.local for t in tensors], dim), layout, tensors[0].mesh)
    # torch ignores an empty 1-d tensor, except for its dtype
    shaped = [t for t in tensors if tuple(t.shape) != (0,) or all(other.ndim == 1 for other in tensors)]
    first = next((t for t in shaped if isinstance(t, Tile)), None)
    if first is None:  # the others are plain tensors, and so whole on every rank
        empty = next(t for t in tensors if isinstance(t, Tile))
        whole = torch.cat([t.local if isinstance(t, Tile) else t for t in tensors], dim)
        layout = Layout.of(whole.shape, (None,) * whole.ndim, empty.layout.axes)
        return Tile(cut_whole_tensor(whole, empty, layout), layout, empty.mesh)
    parts, layout, first = _aligned_parts(torch.cat, shaped, dim)
    parts += [t.local if isinstance(t, Tile) else t for t in tensors if not any(t is other for other in shaped)]
    return Tile(torch.cat(parts, dim % first.ndim), layout, first.mesh)


@implements_torch(torch.stack, either=("tensors",))
def _stack(tensors: Sequence[Any], dim: int = 0) -> Tile:
    at = new_dim_position(dim, next(t for t in tensors if isinstance(t, Tile)).ndim)
    layouts = _layouts_on_one_mesh(tensors)
    if (
        layouts is not None
        and all(layout is layouts[0] for layout in layouts)
        and layouts[0].without_beyond() is layouts[0]
    ):
        return Tile(torch.stack([t.local for t in tensors], at), layouts[0].insert(at, len(tensors)), tensors[0].mesh)
    return join_tiles([t.unsqueeze(at) for t in tensors], at)


@implements_torch(cpp_pad_sequence, either=("sequences",))
def _pad_and_stack(
    sequences: Sequence[Any], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """Stack sequences, short ones padded along dim 0; *Sends*: of a cut dim the rows that lie on another rank then."""
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"pad_sequence: padding_side={padding_side!r} must be 'left' or 'right'")
    longest = max(t.shape[0] for t in sequences)
    rows: list[Any] = []
    for t in sequences:
        lacking = longest - t.shape[0]
        ends = (0, lacking) if padding_side == "right" else (lacking, 0)
        padded = torch.nn.functional.pad(t, (0, 0) * (t.ndim - 1) + ends, value=padding_value) if lacking else t
        rows.append(padded.to(sequences[0].dtype))  # the first one's, as torch has it, where a stack promotes
    return _stack(rows, 0 if batch_first else 1)


# -- repeated ---------------------------------------------------------------------------------------------------------


def _numbers_of(first: Any, rest: Sequence[int]) -> tuple[int, ...]:
    return (first, *rest) if isinstance(first, int) else tuple(first)


@implements_torch(torch.tile)
def _repeat_last_dims(input: Tile, dims: Any, *more: int) -> Any:
    times = _numbers_of(dims, more)
    return _repeat(input, (1,) * (input.ndim - len(times)) + times)


@implements_torch(Tensor.repeat, either=("repeats",))
def _repeat(input: Tile, repeats: Any, *more: int) -> Any:
    """Return copies side by side along each dim; *Sends*: along a cut dim, what a join of them sends."""
    times = _numbers_of(repeats, more)
    if len(times) < input.ndim or min(times, default=0) < 0:
        raise RuntimeError(
            f"repeat{times} of a Tile of {input.ndim} dims: give a number, 0 or more, for each dim, or use tile.tile"
        )
    while input.ndim < len(times):
        input = input.unsqueeze(0)
    if any(n != 1 and any(c.has_halo for c in input.layout.dim(d)) for d, n in enumerate(times)):
        input = input.owned()
    cut = [d for d, n in enumerate(times) if n != 1 and input.layout.is_cut(d)]
    layout = input.layout
    for d, n in enumerate(times):
        if n != 1 and d not in cut:
            layout = layout.replace_dim(d, whole_dim(n * input.shape[d]))
    tile = Tile(input.local.repeat([1 if d in cut else n for d, n in enumerate(times)]), layout, input.mesh)
    for d in cut:
        tile = join_tiles([tile] * times[d], d) if times[d] else tile.narrow(d, 0, 0)
    return tile


@implements_torch(torch.repeat_interleave, either=("input", "repeats"))
def _repeat_interleave(
    input: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repeat each row several times, in place.  *Sends*: nothing; along flattened dims as `with_contiguous_dim`."""
    if not isinstance(input, Tile) or isinstance(repeats, Tile) or repeats is None:
        raise ShardingError("repeat_interleave: repeats= must be plain numbers; pass repeats.full_tensor()")
    if dim is None:
        input, dim = input.flatten(), 0
    (at,) = reduced_dims(input, dim)
    if not isinstance(repeats, Tensor) or repeats.numel() == 1:
        times = int(repeats)
        if times < 0:
            raise RuntimeError(f"repeat_interleave: repeats={times} must be 0 or more")
        if not times or not input.numel():
            return _repeat(input, [times if d == at else 1 for d in range(input.ndim)])
        shape = list(input.shape)
        wide = input.unsqueeze(at + 1).expand(*shape[: at + 1], times, *shape[at + 1 :])
        return wide.clone(memory_format=torch.contiguous_format).flatten(at, at + 1)
    if repeats.ndim != 1 or len(repeats) != input.shape[at]:
        raise RuntimeError(
            f"repeat_interleave: repeats of shape {tuple(repeats.shape)} for the {input.shape[at]} rows of dim {at}"
        )
    tile = with_contiguous_dim(input.owned(), at)
    (cut,) = tile.layout.dim(at)
    ends = [0, *repeats.cumsum(0).tolist()]
    start, stop = cut.owned(tile.layout.piece(cut, tile.coordinate))
    local = tile.local.repeat_interleave(repeats[start:stop].to(tile.device), at)
    longer = Cut(ends[-1], tuple(ends[p] for p in cut.points), cut.axes, by_index=cut.by_index)
    return Tile(local, tile.layout.replace_dim(at, longer), tile.mesh)


# -- dims that are there at least -------------------------------------------------------------------------------------


def _with_1_dim(x: Any) -> Any:
    return x.reshape(1) if x.ndim == 0 else x


def _with_2_dims(x: Any) -> Any:
    return x.reshape(1, 1) if x.ndim == 0 else x.unsqueeze(0) if x.ndim == 1 else x


def _with_3_dims(x: Any) -> Any:
    return _with_2_dims(x).unsqueeze(-1) if x.ndim < 3 else x


def _answer_at_least(function: Any, with_dims: Callable[[Any], Any]) -> None:
    def handler(*tensors: Any) -> Any:
        if len(tensors) == 1 and not isinstance(tensors[0], (list, tuple)):
            return with_dims(tensors[0])
        return tuple(map(with_dims, tensors[0] if len(tensors) == 1 else tensors))

    implements_torch(function)(handler)


_answer_at_least(torch.atleast_1d, _with_1_dim)
_answer_at_least(torch.atleast_2d, _with_2_dims)
_answer_at_least(torch.atleast_3d, _with_3_dims)


@implements_torch(torch.ravel)
def _ravel(input: Tile) -> Any:
    return input.flatten()


# -- stacks and splits ------------------------------------------------------------------------------------------------


@implements_torch(torch.hstack, either=("tensors",))
def _stack_columns_side_by_side(tensors: Sequence[Any]) -> Any:
    ready = [_with_1_dim(t) for t in tensors]
    return join_tiles(ready, 0 if ready[0].ndim == 1 else 1)


@implements_torch(torch.vstack, torch.row_stack, either=("tensors",))
def _stack_rows(tensors: Sequence[Any]) -> Any:
    return join_tiles([_with_2_dims(t) for t in tensors], 0)


@implements_torch(torch.dstack, either=("tensors",))
def _stack_in_depth(tensors: Sequence[Any]) -> Any:
    return join_tiles([_with_3_dims(t) for t in tensors], 2)


@implements_torch(torch.column_stack, either=("tensors",))
def _stack_columns(tensors: Sequence[Any]) -> Any:
    return join_tiles([t.reshape(-1, 1) if t.ndim < 2 else t for t in tensors], 1)


@implements_torch(
    torch.split_with_sizes, torch.unsafe_split, torch.unsafe_split_with_sizes, either=("input", "split_sizes")
)
def _split_by_sizes(input: Any, split_sizes: Any, dim: int = 0) -> Any:
    return torch.split(input, split_sizes, dim)


@implements_torch(torch.narrow_copy, either=("input",))
def _narrow_copy(input: Any, dim: int, start: int, length: int) -> Any:
    return input.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


@implements_torch(torch.tensor_split, either=("input", "indices_or_sections"))
def _split_in_sections(input: Any, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    sections: Any = next((v for v in (indices_or_sections, *named.values()) if v is not None), None)
    sections = sections.tolist() if isinstance(sections, Tensor) and not isinstance(sections, Tile) else sections
    (at,) = reduced_dims(input, dim)
    size = input.shape[at]
    if isinstance(sections, int):
        if sections < 1:
            raise RuntimeError(f"tensor_split: there is no way to make {sections} sections; pass 1 or more")
        base, extra = divmod(size, sections)
        starts = [i * base + min(i, extra) for i in range(sections + 1)]
    else:
        starts = [0, *(slice(None, i).indices(size)[1] for i in sections), size]
    return tuple(input.narrow(at, a, max(b - a, 0)) for a, b in pairwise(starts))


def _answer_split(function: Any, dim: int, least: int) -> None:
    """Answer a split along a dim that its name says, in equal sections or at places."""

    def handler(input: Tile, indices_or_sections: Any, *more: int, **named: Any) -> Any:
        if input.ndim < least:
            raise RuntimeError(f"{function.__name__} of a Tile of {input.ndim} dims: it needs {least} or more")
        at = 0 if function is torch.hsplit and input.ndim == 1 else dim
        sections = (indices_or_sections, *more) if more else indices_or_sections
        size = input.shape[at]
        if isinstance(sections, int) and (sections < 1 or size % sections):
            raise RuntimeError(f"{function.__name__}: dim {at} of {size} rows has no {sections} equal sections")
        return _split_in_sections(input, sections, at)

    implements_torch(function, either=("indices_or_sections",))(handler)


_answer_split(torch.hsplit, 1, 1)
_answer_split(torch.vsplit, 0, 2)
_answer_split(torch.dsplit, 2, 3)
