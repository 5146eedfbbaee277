"""Padding and cropping of any dims, by a constant, around the circle, by reflection, or by the end rows.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.arange(4.0)[None, None], mesh, (None, None, "lat"))
>>> torch.nn.functional.pad(tile, (1, 1), mode="circular").full_tensor()
tensor([[[3., 0., 1., 2., 3., 0.]]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from jigsaw.comm.wire_values import values_on_device
from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.stencil_rules import FoldedPadding, StencilWindow
from jigsaw.nn.stencils.stencil import (
    DimStencil,
    empty_result,
    gather_input_rows,
    is_cut_or_haloed,
    nonempty_like,
    plan_stencil,
    resized_layout,
)
from jigsaw.ops.whole_strides import with_order
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory

PadsByDim = dict[int, tuple[int, int]]


@implements_torch(F.pad)
def pad(input: Tile, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tile:
    """Pad (or, where negative, crop) `input` below and above each of the last dims, as `torch.nn.functional.pad`.

    *Shapes*: global as torch; per rank the rows of padding belong to the first and last pieces.  In the modes that copy
    rows every rank also holds the padding's width of its neighbors' rows, so that the next convolution sends nothing.
    *Sends*: for "constant", nothing; else forward, `pad` rows a side of every cut, and backward, their gradients.
    *Raises*: `ShardingError` for an unknown mode, too many pads, or pads wider than the dim.
    """
    pads = _pads_by_dim(input, pad)
    if mode not in ("constant", "circular", "reflect", "replicate"):
        raise ShardingError(f"pad with mode={mode!r}: use 'constant', 'circular', 'reflect' or 'replicate'")
    if not any(is_cut_or_haloed(input.layout, d) for d in pads):
        return _pad_uncut(input, pads, pad, mode, value)
    if mode == "constant":
        along = tuple(
            DimStencil(d, StencilWindow(below=low, above=high), always=True) for d, (low, high) in pads.items()
        )
        return _remembering_sources(_pad_by_exchange(input, along, value or 0.0), input)
    if mode == "circular":
        mixed = {d: (min(low, 0), min(high, 0)) for d, (low, high) in pads.items() if low * high < 0}
        if mixed:  # torch crops first, then wraps around what is left
            along = tuple(
                DimStencil(d, StencilWindow(below=low, above=high), always=True) for d, (low, high) in mixed.items()
            )
            input = _pad_by_exchange(input, along)
            pads = {d: (max(low, 0), max(high, 0)) if d in mixed else (low, high) for d, (low, high) in pads.items()}
        padded = _pad_by_exchange(input, tuple(_circular_stencil(input, d, *p) for d, p in pads.items()))
        return with_order(padded, None)  # torch returns contiguous memory, also for channels-last images
    return _pad_folded(input, pads, mode)


def _pads_by_dim(input: Tile, pad: Sequence[int]) -> PadsByDim:
    if len(pad) % 2 or len(pad) // 2 > input.ndim:
        raise ShardingError(
            f"pad={tuple(pad)} must have two entries a dim, for at most the {input.ndim} dims of {tuple(input.shape)}"
        )
    pairs = [(int(pad[2 * i]), int(pad[2 * i + 1])) for i in range(len(pad) // 2)]
    return {input.ndim - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}


def _pad_uncut(input: Tile, pads: PadsByDim, pad: Sequence[int], mode: str, value: float | None) -> Tile:
    """Pad dims that nothing cuts by torch's own op, which takes an empty tensor only for "constant"."""
    x, shape = input.local, input.shape
    layout = resized_layout(input.layout, {d: shape[d] + low + high for d, (low, high) in pads.items()})
    if x.numel() or mode == "constant":
        return Tile(F.pad(x, pad, mode, value), layout, input.mesh)
    F.pad(nonempty_like(x), pad, mode)
    saved = int(mode != "circular")  # for circular padding torch only copies slices, and saves nothing
    return Tile(empty_result(layout.local_shape(input.coordinate), x, saved=saved), layout, input.mesh)


def _pad_by_exchange(input: Tile, along: tuple[DimStencil, ...], fill: float = 0.0) -> Tile:
    to = plan_stencil(input.layout, along, input.coordinate, "pad")
    return Tile(in_own_memory(gather_input_rows(input, to, fill), input), to.out, input.mesh)


def _remembering_sources(padded: Tile, input: Tile) -> Tile:
    """Return the padded low modes of a spectrum with their memory of the cuts of the field, as a slice keeps it."""
    dims = [
        tuple(replace(c, source=was.source) if was.source else c for c, was in zip(group, before, strict=True))
        for group, before in zip(padded.layout.dims(), input.layout.dims(), strict=True)
    ]
    return Tile(padded.local, Layout.from_dims(dims, padded.layout.axes), padded.mesh)


def _circular_stencil(input: Tile, dim: int, low: int, high: int) -> DimStencil:
    n = input.shape[dim]
    if max(low, high) > n:
        raise ShardingError(
            f"circular pad ({low}, {high}) of dim {dim} is wider than its {n} rows; it may wrap around once"
        )
    return DimStencil(
        dim, StencilWindow(below=low, above=high), wrap=True, grow=(max(low, 0), max(high, 0)), always=True
    )


def _pad_folded(input: Tile, pads: PadsByDim, mode: str) -> Tile:
    """Pad by reflection or replication: one exchange brings the rows, then the ends are folded in place."""
    along = tuple(
        DimStencil(d, FoldedPadding(low, high, mode == "reflect"), grow=(max(low, 0), max(high, 0)))
        for d, (low, high) in pads.items()
    )
    to = plan_stencil(input.layout, along, input.coordinate, "pad")
    x = gather_input_rows(input, to)
    if to.is_empty:
        saved = int(any(not is_cut_or_haloed(input.layout, d) for d in pads))  # zero where rows are only picked
        return Tile(empty_result(to.shape, x, saved=saved), to.out, input.mesh)
    rules = {a.dim: a.rule for a in along}
    for dim, derived, piece in to.derived:
        rule, low = rules.pop(dim), derived.needs[piece][0]
        assert isinstance(rule, FoldedPadding)
        rows = [rule.row(o, input.shape[dim]) - low for o in range(*derived.out.held[piece])]
        if rows != list(range(x.shape[dim])):
            x = x.index_select(dim, values_on_device(rows, torch.int64, x.device))
    if rules:
        flat = [n for d in reversed(range(min(pads), input.ndim)) for n in (pads[d] if d in rules else (0, 0))]
        x = F.pad(x, flat, mode)
    return Tile(in_own_memory(x, input), to.out, input.mesh)
