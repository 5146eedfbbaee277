"""Adaptive pooling to any size, along cut dims too, where windows differ in size by a row.

Example: two ranks pool seven rows, cut at 0, 4, 7, to three.  The windows are rows 0:3, 2:5 and 4:7.  The first rank
makes the first two and takes row 4 from the second.

>>> tile = jigsaw.shard(torch.arange(7.0)[None, None], jigsaw.init_mesh(lat=1), (None, None, "lat"))
>>> torch.nn.functional.adaptive_max_pool1d(tile, 3).local
tensor([[[2., 4., 6.]]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.comm.wire_values import values_on_device
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.stencil_rules import InterpolationTable, ceil_div
from jigsaw.nn.stencils.stencil import (
    DimStencil,
    empty_result,
    gather_input_rows,
    is_cut_or_haloed,
    plan_stencil,
    resized_layout,
)
from jigsaw.ops.reductions import reducing_axes, stack_along_axes
from jigsaw.tile.tile import Tile, implements_torch, refusal_error

OutputSize = int | Sequence[int | None] | None


@lru_cache(maxsize=512)
def _adaptive_windows(n: int, m: int) -> InterpolationTable:
    """Return the table of windows: output row o covers the rows from floor(o n / m) to ceil((o + 1) n / m)."""
    return InterpolationTable(
        tuple(o * n // m for o in range(m)), tuple(ceil_div((o + 1) * n, m) - 1 for o in range(m))
    )


def adaptive_sizes(input: Tile, dims: int, output_size: OutputSize) -> dict[int, int]:
    """Return the output size of every spatial dim; None keeps a dim's own.

    Raises: `ShardingError` for a size below 1, or a number of sizes that is not that of the dims.
    """
    sizes = [output_size] * dims if output_size is None or isinstance(output_size, int) else list(output_size)
    first = input.ndim - dims
    if len(sizes) != dims or input.ndim not in (dims + 1, dims + 2):
        raise ShardingError(f"adaptive pooling of {dims} dims to {output_size} of a Tile of {tuple(input.shape)}")
    wanted = {first + i: input.shape[first + i] if m is None else m for i, m in enumerate(sizes)}
    if min(wanted.values()) < 1:
        raise ShardingError(f"adaptive pooling to {output_size}: every size must be at least 1")
    return wanted


def pool_adaptive_windows(input: Tile, sizes: Mapping[int, int], reduce: Callable[..., Tensor]) -> Tile:
    """Reduce the windows of each dim in `sizes`, one dim after the other, the last one first.

    *Sends*: forward, the rows of windows that reach into a neighbor; backward, their gradients.
    """
    tables = {d: _adaptive_windows(input.shape[d], m) for d, m in sizes.items()}
    along = tuple(DimStencil(d, table, always=True) for d, table in tables.items())
    to = plan_stencil(input.layout, along, input.coordinate, "adaptive_pool")
    x = gather_input_rows(input, to)
    if to.is_empty:
        return Tile(empty_result(to.shape, x), to.out, input.mesh)
    for dim, derived, piece in sorted(to.derived, reverse=True, key=lambda each: each[0]):
        low, out = derived.needs[piece][0], derived.out.held[piece]
        table = tables[dim]
        spans = [(table.first[o] - low, table.last[o] - low + 1) for o in range(*out)]
        x = reduce(x, dim, spans)
    return Tile(x, to.out, input.mesh)


def mean_of_windows(x: Tensor, dim: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the mean of the rows of each span, as a product with a matrix of their shares."""
    shares = torch.zeros(len(spans), x.shape[dim], dtype=x.dtype, device=x.device)
    for o, (start, stop) in enumerate(spans):
        shares[o, start:stop] = 1 / (stop - start)
    return F.linear(x.movedim(dim, -1), shares).movedim(-1, dim)


def _max_of_windows(x: Tensor, dim: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the largest of the rows of each span; among equal ones the first has the gradient, as in torch."""
    longest = max(stop - start for start, stop in spans)
    # a shorter window repeats its last row; the copies get no gradient, because the first of equal elements gets it
    rows = [min(start + k, stop - 1) for start, stop in spans for k in range(longest)]
    picked = x.index_select(dim, values_on_device(rows, torch.int64, x.device))
    return picked.unflatten(dim, (len(spans), longest)).max(dim + 1).values


def _max_of_all_rows(x: Tile, dim: int) -> Tile:
    if x.local.shape[dim]:
        local = x.local.max(dim, keepdim=True).values
    else:
        local = x.local.sum(dim, keepdim=True) - math.inf
    stacked = stack_along_axes(local, x, reducing_axes(x.layout, (dim,)), (x.layout, dim))
    return Tile(stacked.max(0).values, x.layout.replace_dim(dim, whole_dim(1)), x.mesh)


def _max_along_cut_dims(tile: Tile, sizes: Mapping[int, int]) -> Tile:
    for d, size in sizes.items():
        if size == 1:
            tile = _max_of_all_rows(tile.owned(), d)
        else:
            tile = pool_adaptive_windows(tile, {d: size}, _max_of_windows)
    return tile


def _answer_adaptive_max(dims: int, function: Any, with_indices: Any) -> None:
    def pool(input: Tile, output_size: OutputSize, return_indices: bool = False) -> Any:
        """Return y with y[o] the maximum of the rows from floor(o n / m) to ceil((o + 1) n / m).

        *Sends*: for size 1, each rank's largest row; else as `jigsaw.nn.stencils.pool.max_pool`.
        """
        if return_indices:
            return pool_with_indices(input, output_size)
        sizes = adaptive_sizes(input, dims, output_size)
        out = input
        # the last dims first, so that of equal elements the first in row-major order gets the gradient
        for is_cut, dims_alike in groupby(reversed(sizes), lambda d: is_cut_or_haloed(input.layout, d)):
            wanted = {d: sizes[d] for d in dims_alike}
            out = _max_along_cut_dims(out, wanted) if is_cut else pool_whole_dims(out, wanted)
        return out

    def pool_whole_dims(tile: Tile, wanted: Mapping[int, int]) -> Tile:
        layout = resized_layout(tile.layout, wanted)
        shape = layout.local_shape(tile.coordinate)
        if not tile.local.numel():
            return Tile(empty_result(shape, tile.local), layout, tile.mesh)
        return Tile(function(tile.local, shape[-dims:]), layout, tile.mesh)

    def pool_with_indices(input: Tile, output_size: OutputSize, return_indices: bool = False) -> Any:
        sizes = adaptive_sizes(input, dims, output_size)
        if any(is_cut_or_haloed(input.layout, d) for d in sizes):
            raise refusal_error(
                function,
                input,
                "return_indices=True gives flat positions, which a cut dim has not",
                "leave it out, or cut other dims",
            )
        layout = resized_layout(input.layout, sizes)
        if not input.local.numel():  # torch's own function refuses the empty tensor of a rank that has no rows
            shape = layout.local_shape(input.coordinate)
            places = input.local.new_zeros(shape, dtype=torch.int64)
            return Tile(empty_result(shape, input.local), layout, input.mesh), Tile(places, layout, input.mesh)
        return tuple(Tile(y, layout, input.mesh) for y in with_indices(input.local, list(sizes.values())))

    implements_torch(function)(pool)
    implements_torch(with_indices)(pool_with_indices)


_answer_adaptive_max(1, F.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices)
_answer_adaptive_max(2, F.adaptive_max_pool2d, F.adaptive_max_pool2d_with_indices)
_answer_adaptive_max(3, F.adaptive_max_pool3d, F.adaptive_max_pool3d_with_indices)
