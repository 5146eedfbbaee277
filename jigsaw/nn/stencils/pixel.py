"""Pixel shuffle and unshuffle: channels become rows and columns, and back.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.randn(2, 12, 9, 16), mesh, (None, None, "lat", None))
>>> torch.nn.PixelShuffle(2)(tile).shape
torch.Size([2, 3, 18, 32])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.stencil_rules import StencilRule, StencilWindow, TransposedWindow
from jigsaw.nn.stencils.stencil import DimStencil, empty_result, gather_input_rows, plan_stencil
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory, refusal_error


@lru_cache(maxsize=64)
def _shuffle_rule(window: type[StencilWindow | TransposedWindow], r: int) -> StencilRule:
    return window(r, r)


@lru_cache(maxsize=64)
def _stencils_of_space(h: int, w: int, rule: StencilRule) -> tuple[DimStencil, ...]:
    return DimStencil(h, rule), DimStencil(w, rule)


def _shuffle_input(input: Tile, rule: StencilRule, channels: int, name: str) -> tuple[Tile, Layout]:
    c, h, w = range(input.ndim - 3, input.ndim)
    if input.layout.has_halo:
        input = input.with_layout(
            input.layout.replace_dim(c, whole_dim(input.shape[c]))
        )  # a halo of channels is dropped
    to = plan_stencil(input.layout, _stencils_of_space(h, w, rule), input.coordinate, name)
    out = to.out.replace_dim(c, whole_dim(channels))
    return Tile(gather_input_rows(input, to), to.target, input.mesh), out


def _shuffle_result(function: Callable[[Tensor, int], Tensor], x: Tile, r: int, out: Layout) -> Tile:
    shape = out.local_shape(x.coordinate)
    return Tile(empty_result(shape, x.local, saved=0) if 0 in shape else function(x.local, r), out, x.mesh)


@implements_torch(torch.pixel_shuffle)
def pixel_shuffle(input: Tile, upscale_factor: int) -> Tile:
    """Return [..., C r², H, W] as [..., C, H r, W r], r = `upscale_factor`.

    *Shapes*: global as torch; per rank rows and columns are cut at r times the points.
    *Sends*: nothing.
    *Raises*: `ShardingError` for channels that are cut, or not a multiple of r².
    """
    channels, r = input.shape[-3], upscale_factor
    if channels % r**2:
        raise ShardingError(f"pixel_shuffle by {r} needs a multiple of {r**2} channels, got {channels}")
    if input.layout.is_cut(input.ndim - 3):
        raise refusal_error(torch.pixel_shuffle, input, "channels that become rows are cut", "cut another dim")
    x, out = _shuffle_input(input, _shuffle_rule(TransposedWindow, r), channels // r**2, "pixel_shuffle")
    return _shuffle_result(torch.pixel_shuffle, x, r, out)


@implements_torch(torch.pixel_unshuffle)
def pixel_unshuffle(input: Tile, downscale_factor: int) -> Tile:
    """Return [..., C, H r, W r] as [..., C r², H, W], r = `downscale_factor`.

    *Shapes*: global as torch; per rank rows and columns are cut at ceil(point / r).
    *Sends*: nothing where the cut points are multiples of r; else the rows of blocks that reach into a neighbor.
    *Raises*: `ShardingError` for channels that are cut, or rows or columns that are not a multiple of r.
    """
    r = downscale_factor
    if input.shape[-1] % r or input.shape[-2] % r:
        raise ShardingError(
            f"pixel_unshuffle by {r} needs multiples of {r}, got {tuple(input.shape[-2:])} rows and columns"
        )
    if input.layout.is_cut(input.ndim - 3):
        raise refusal_error(torch.pixel_unshuffle, input, "channels that rows join are cut", "cut another dim")
    x, out = _shuffle_input(input, _shuffle_rule(StencilWindow, r), input.shape[-3] * r**2, "pixel_unshuffle")
    return _shuffle_result(torch.pixel_unshuffle, x, r, out)


@implements_torch(torch.channel_shuffle)
def _channel_shuffle(input: Tile, groups: int) -> Tile:
    """Return [B, (g c), ...] as [B, (c g), ...].  *Sends*: of cut channels, the rows that move."""
    channels = input.shape[1]
    if groups < 1 or channels % groups:
        raise ShardingError(f"channel_shuffle of {channels} channels into {groups} groups: they must divide evenly")
    out: Any = input.unflatten(1, (groups, channels // groups)).transpose(1, 2).flatten(1, 2)
    return Tile(in_own_memory(out.local, input), out.layout, out.mesh)
