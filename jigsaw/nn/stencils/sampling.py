"""Sampling at places that a grid names, and the grid of an affine map.

Only the values of a grid tell how far it displaces, so every rank gets the whole input along space.

>>> tile = jigsaw.shard(torch.arange(16.0).reshape(1, 1, 4, 4), jigsaw.init_mesh(lat=1), (None, None, "lat", None))
>>> grid = torch.nn.functional.affine_grid(torch.eye(2, 3)[None], (1, 1, 4, 4), align_corners=False)
>>> torch.nn.functional.grid_sample(tile, grid, align_corners=False).local[0, 0, 3]
tensor([12., 13., 14., 15.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from jigsaw.geometry.cut import Cut, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.nn.stencils.stencil import empty_result
from jigsaw.ops.meeting.common_cuts import matched_structures
from jigsaw.ops.meeting.plain_operands import operand_part
from jigsaw.ops.whole_dims import with_contiguous_dim
from jigsaw.tile.tile import Tile, implements_torch, tiles_in


def _grid_layout(input: Any, grid: Any, first: Tile) -> Layout:
    axes = first.layout.axes
    if isinstance(grid, Tile):
        own = grid.layout.without_halo()
        return (
            own.replace_dim(own.ndim - 1, whole_dim(grid.shape[-1])) if own.cut_dims else _as_space(input, grid, axes)
        )
    return _as_space(input, grid, axes)


def _as_space(input: Any, grid: Any, axes: Any) -> Layout:
    dims: list[tuple[Cut, ...]] = [(whole_dim(n),) for n in grid.shape]
    if isinstance(input, Tile):
        for d, n in enumerate(grid.shape[:-1]):
            group = input.layout.without_halo().dim(d if d == 0 else d + 1)
            if math.prod(c.size for c in group) == n:
                dims[d] = group  # samples that were flattened from several dims (one for each pixel) stay so
            elif len(group) == 1 and group[0].is_cut:
                dims[d] = (Cut(n, cut_points(n, group[0].pieces), group[0].axes),)
    return Layout.from_dims(dims, axes)


@implements_torch(F.grid_sample, either=("input", "grid"))
def _grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tile:
    """Return y[n, c, i, j] = `input` interpolated at grid[n, i, j].

    *Shapes*: the result is cut as the grid is; for a plain or uncut grid its space is cut as the input's. *Sends*: the
    whole input along space to each of the P - 1 others along the axes that cut it; backward, an all-reduce of its
    gradient over them.
    """
    first = next(tiles_in((input, grid)))
    if not input.ndim == grid.ndim == grid.shape[-1] + 2 or input.shape[0] != grid.shape[0]:
        shapes = tuple(input.shape), tuple(grid.shape)
        raise RuntimeError(f"grid_sample of shapes {shapes}: pass [N, C, *space] and [N, *places, dims of space]")
    input, grid = _with_samples_alike(input, grid)
    where = _grid_layout(input, grid, first)
    channels = (whole_dim(input.shape[1]),)
    if isinstance(input, Tile):
        own = input.layout.without_halo().dim(1)
        taken = {a for d in range(where.ndim) for a in where.dim_axes(d)}
        channels = own if not taken.intersection(a for c in own for a in c.axes) else channels
    space = [(whole_dim(n),) for n in input.shape[2:]]
    out = Layout.from_dims([where.dim(0), channels, *where.dims()[1:-1]], where.axes)
    # each rank works on its part of the result: so a replicated operand's gradient is summed over the axes that cut it
    like = Tile(first.local, out, first.mesh)
    x = _sampled_part(input, like, Layout.from_dims([where.dim(0), channels, *space], where.axes))
    places = _sampled_part(grid, like, where)
    shape = out.local_shape(first.coordinate)
    if 0 in shape:
        return Tile(empty_result(shape, x, places), out, first.mesh)
    return Tile(F.grid_sample(x, places, mode, padding_mode, align_corners), out, first.mesh)


def _with_samples_alike(input: Any, grid: Any) -> tuple[Any, Any]:
    """Return both with samples in one interval a rank, if they were flattened from other dims and both are cut."""
    if isinstance(input, Tile) and isinstance(grid, Tile):
        samples = (Layout.from_dims([t.layout.dim(0)], t.layout.axes) for t in (input, grid))
        if matched_structures(*samples) is None:
            return with_contiguous_dim(input, 0), with_contiguous_dim(grid, 0)
    return input, grid


def _sampled_part(value: Any, like: Tile, layout: Layout) -> Tensor:
    """Return this rank's part of an operand; 256 whole samples and 16 x 16 flattened ones lie in memory alike."""
    if isinstance(value, Tile):
        value = value.owned()
        pair = matched_structures(value.layout, layout)
        if pair is not None:
            value, layout = Tile(value.local, pair[0], value.mesh), pair[1]
    return operand_part(value, like, layout)


@implements_torch(F.affine_grid)
def _affine_grid(theta: Tile, size: Sequence[int], align_corners: bool | None = None) -> Tile:
    """Return the grid of an affine map of each sample; its batch dim is cut as `theta`'s.

    *Sends*: nothing, except for a `theta` that is cut inside a matrix.
    """
    own = theta.owned()
    for d in (1, 2):
        if own.layout.is_cut(d):
            own = own.with_layout(own.layout.replace_dim(d, whole_dim(own.shape[d])))
    grid = F.affine_grid(own.local, [own.local.shape[0], *size[1:]], align_corners)
    dims = [own.layout.dim(0), *((whole_dim(n),) for n in grid.shape[1:])]
    return Tile(grid, Layout.from_dims(dims, own.layout.axes), own.mesh)
