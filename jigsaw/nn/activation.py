"""Activations for tiles that torch writes in Python, or that look at channels or along a dim, whatever is cut.

>>> tile = jigsaw.shard(torch.tensor([[-1.0, 2.0, 3.0, 4.0]]), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> torch.nn.functional.prelu(tile, torch.tensor([0.5])).local
tensor([[-0.5000,  2.0000,  3.0000,  4.0000]])
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jigsaw.geometry.cut import Cut, cut_points
from jigsaw.nn.products.contraction import in_autocast_dtype, tile_in_autocast_dtype
from jigsaw.nn.weights import StoredWeight, gathered_weight
from jigsaw.ops.pointwise import run_in_place, run_on_tiles
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.shapes import slice_dim
from jigsaw.tile.tile import Tile, implements_torch, refusal_error


@implements_torch(F.softsign)
def _softsign(input: Tile) -> Any:
    return input / (input.abs() + 1)


@implements_torch(F.tanhshrink)
def _tanhshrink(input: Tile) -> Any:
    return input - input.tanh()


@implements_torch(F.softmin)
def _softmin(input: Tile, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    return F.softmax(-input, dim, dtype=dtype)


# F.threshold is the private function that dispatches
@implements_torch(F.threshold, torch.threshold)
def _threshold(input: Tile, threshold: float, value: float, inplace: bool = False) -> Any:
    run = run_in_place if inplace else run_on_tiles
    return run(torch.threshold_ if inplace else torch.threshold, input, threshold, value)


@implements_torch(torch.threshold_)
def _threshold_in_place(input: Tile, threshold: float, value: float) -> Any:
    return run_in_place(torch.threshold_, input, threshold, value)


@implements_torch(F.prelu, torch.prelu, either=("input", "weight"))
def prelu(input: Any, weight: StoredWeight) -> Any:
    """Return x where x > 0, else w x, with one w or one a channel (dim 1).  *Sends*: a cut weight, to all ranks."""
    if not isinstance(input, Tile):
        raise (
            refusal_error(
                F.prelu, weight, "its weight is a Tile and its input is a plain tensor", "make the input a Tile"
            )
            if isinstance(weight, Tile)
            else TypeError("prelu: input= must be a Tile")
        )
    w: Any = weight if isinstance(weight, Tile) else gathered_weight(weight, input)
    if w.numel() != 1:
        if input.ndim < 2 or w.numel() != input.shape[1]:
            channels = input.shape[1] if input.ndim > 1 else 1
            raise RuntimeError(f"prelu: a weight of {w.numel()} numbers for {channels} channels")
        w = w.reshape(w.numel(), *(1,) * (input.ndim - 2))
    if torch.is_autocast_enabled(input.device.type):
        input = tile_in_autocast_dtype(input)
        w = tile_in_autocast_dtype(w) if isinstance(w, Tile) else in_autocast_dtype(w)
    return input.where(input > 0, input * w)


@implements_torch(F.glu)
def _glu(input: Tile, dim: int = -1) -> Any:
    """Return a sigmoid(b) for the two halves a and b of a dim, which may be cut.

    *Sends*: along a cut dim, rows of both halves that others own once each half is cut evenly; backward the same.
    """
    (at,) = reduced_dims(input, dim)
    size = input.shape[at]
    if size % 2:
        raise RuntimeError(f"glu: halving dim {at} of size {size}, which is odd; it must be even")
    own = input.owned() if any(c.has_halo for c in input.layout.dim(at)) else input
    if not own.layout.is_cut(at):
        a, b = own.chunk(2, at)
        return a * b.sigmoid()
    own = own.owned()
    half = size // 2
    first, second = slice_dim(own, at, 0, half), slice_dim(own, at, half, size)
    if first.layout == second.layout:  # each rank has the same rows of both halves
        return first * second.sigmoid()
    (cut,) = own.layout.dim(at)
    layout = own.layout.replace_dim(at, Cut(half, cut_points(half, cut.pieces), cut.axes))
    return first.with_layout(layout) * second.with_layout(layout).sigmoid()
