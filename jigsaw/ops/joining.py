"""Joining along a dim that nothing cuts: cat, stack, and diff of what is prepended or appended.

>>> tile = jigsaw.shard(torch.zeros(2, 3, 9), jigsaw.init_mesh(lat=1), (None, None, "lat"))
>>> torch.cat([tile, tile], dim=1).shape
torch.Size([2, 6, 9])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jigsaw.layout import Layout, whole_dim
from jigsaw.ops.along import run_along_dim
from jigsaw.ops.pointwise import align_tiles, cut_whole_tensor
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.shapes import new_dim_position
from jigsaw.tile import Tile, implements_torch, refusal_error


def _aligned_parts(function: Any, tensors: Sequence[Any], dim: int) -> tuple[list[Tensor], Layout, Tile]:
    """The local tensors to join along `dim`, plain ones cut to the tile's box, and the layout they share in the other
    dims.
    """
    first = next(t for t in tensors if isinstance(t, Tile))
    tiles = [t for t in tensors if isinstance(t, Tile)]
    (at,) = reduced_dims(first, dim)
    _check_joined_shapes(function, tensors, first, at)
    for t in tiles:
        if t.layout.is_cut(at):
            raise refusal_error(
                function,
                t,
                f"it joins along dim {at}, which is cut",
                "redistribute the tiles so that another dim is cut",
            )
    tiles = [t.owned() if any(c.has_halo for c in t.layout.dim(at)) else t for t in tiles]
    layout, _ = align_tiles(
        [
            Tile(t.local.narrow(at, 0, 1) if t.shape[at] else t.local, t.layout.replace_dim(at, whole_dim(1)), t.mesh)
            for t in tiles
        ]
    )
    ready = iter(tiles)
    parts: list[Tensor] = []
    for t in tensors:
        target = layout.replace_dim(at, whole_dim(t.shape[at]))
        parts.append(_local_in_join(next(ready), target) if isinstance(t, Tile) else cut_whole_tensor(t, first, target))
    return parts, layout, first


def _check_joined_shapes(function: Any, tensors: Sequence[Any], first: Tile, at: int) -> None:
    for t in tensors:
        if t.ndim != first.ndim or any(n != first.shape[d] for d, n in enumerate(t.shape) if d != at):
            raise RuntimeError(
                f"{function.__name__} of shapes {[tuple(x.shape) for x in tensors]}: they must agree in every dim but "
                f"{at}"
            )


def _local_in_join(tile: Tile, layout: Layout) -> Tensor:
    """The local part of a tile in a join whose result has `layout`."""
    anchor = Tile(tile.local.new_empty(layout.local_shape(tile.coordinate)), layout, tile.mesh)
    return align_tiles([tile, anchor])[1][0].expand(anchor.local.shape)  # one row, which is cut in another tile


@implements_torch(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Sequence[Any], dim: int = 0) -> Tile:
    # torch leaves out a 1-d tensor of no elements, which has no shape yet, but for its dtype
    shaped = [t for t in tensors if tuple(t.shape) != (0,) or all(other.ndim == 1 for other in tensors)]
    parts, layout, first = _aligned_parts(
        torch.cat, shaped if any(isinstance(t, Tile) for t in shaped) else tensors, dim
    )
    parts += [t.local if isinstance(t, Tile) else t for t in tensors if not any(t is other for other in shaped)]
    at = dim % first.ndim
    return Tile(torch.cat(parts, at), layout.replace_dim(at, whole_dim(sum(t.shape[at] for t in shaped))), first.mesh)


@implements_torch(torch.stack)
def _stack(tensors: Sequence[Any], dim: int = 0) -> Tile:
    at = new_dim_position(dim, next(t for t in tensors if isinstance(t, Tile)).ndim)
    return _cat([t.unsqueeze(at) for t in tensors], at)


@implements_torch(torch.diff)
def _diff(input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    parts = [t for t in (prepend, input, append) if t is not None]
    if any(t.ndim != input.ndim for t in parts):
        raise RuntimeError(f"diff of shapes {[tuple(t.shape) for t in parts]}: prepend and append need as many dims")
    # of n = 0 differences torch returns the input alone
    return run_along_dim(torch.diff, _cat(parts, dim) if len(parts) > 1 and n else input, dim, n, dim)
