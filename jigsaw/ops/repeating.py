"""Functions that repeat and rearrange: repeat, tile, repeat_interleave, atleast_nd, and named splits and stacks.

>>> tile = jigsaw.shard(torch.tensor([1.0, 2.0]), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.repeat(2).local, tile.repeat_interleave(2).local
(tensor([1., 2., 1., 2.]), tensor([1., 1., 2., 2.]))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, whole_dim
from jigsaw.ops.joining import join_tiles
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.whole_dims import with_contiguous_dim
from jigsaw.tile.tile import Tile, implements_torch

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


def _for_each(function: Any, tensors: Sequence[Any]) -> Any:
    """Return one tensor for one, a tuple for several (or for a list), as in torch."""
    if len(tensors) == 1 and not isinstance(tensors[0], (list, tuple)):
        return function(tensors[0])
    return tuple(map(function, tensors[0] if len(tensors) == 1 else tensors))


def _with_1_dim(x: Any) -> Any:
    return x.reshape(1) if x.ndim == 0 else x


def _with_2_dims(x: Any) -> Any:
    return x.reshape(1, 1) if x.ndim == 0 else x.unsqueeze(0) if x.ndim == 1 else x


def _with_3_dims(x: Any) -> Any:
    return _with_2_dims(x).unsqueeze(-1) if x.ndim < 3 else x


def _answer_at_least(function: Any, with_dims: Callable[[Any], Any]) -> None:
    def handler(*tensors: Any) -> Any:
        return _for_each(with_dims, tensors)

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
