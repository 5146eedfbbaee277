"""Convolutions whose channels are cut: the channels that each rank makes and needs, and its rows of the weight.

In a "column", every rank gathers the input channels of the outputs that it makes.  In a "row", it convolves the
channels that it has, and the partial sums of y are added up where they belong.  The plan takes whichever moves less.  A
weight that is cut by its input channels makes a special row: every rank gets the whole sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.exchange import AsyncExchange, AsyncExchangeAdjoint
from jigsaw.comm.graph_calls import graph_call
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, Interval, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.stencil_rules import ceil_div
from jigsaw.nn.stencils.stencil import single_cut
from jigsaw.nn.weights import CALL_THE_MODEL, local_weight, weight_layout
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.placements import is_dtensor


@dataclass(frozen=True)
class ChannelPlan:
    """The cut of the output channels, and the input channels that each piece needs; with `row` every rank convolves
    those that it has, or those of its piece of the weight, cut as `taken`, for all outputs.
    """

    out: Cut
    needs: tuple[Interval, ...]
    row: bool
    taken: Cut | None = None

    def input(self, layout: Layout) -> Layout:
        cut = layout.dim(1)[0]
        return layout if self.row or not cut.is_cut else layout.replace_dim(1, cut.holding(self.needs))


def plan_channels(
    input: Tile, weight: Tensor, groups: int, transposed: bool, sizes: tuple[int, int]
) -> ChannelPlan | None:
    """Plan the work on channels, None if none are cut; `sizes` are numbers of elements of the input and the output.

    Raises: `ShardingError` for cuts that do not meet: other axes, inside a group, or both sides of the weight.
    """
    cut = single_cut(input.layout, 1, "convolution")
    if not is_dtensor(weight) and not cut.is_cut:
        return None
    stored = weight_layout(weight, input)
    inputs, outputs = (0, 1) if transposed else (1, 0)
    by_inputs = groups == 1 and stored.cut_dims == (inputs,)
    channels = (
        whole_dim(weight.shape[outputs]) if by_inputs else _made_channels(stored, groups, transposed, weight.shape)
    )
    of_weight = stored.dim(inputs)[0] if by_inputs else channels
    if not of_weight.is_cut and not cut.is_cut:
        return None
    other = [a for d in range(input.ndim) if d != 1 for a in input.layout.dim_axes(d)]
    meets = not cut.is_cut or (cut.has_same_rows(of_weight) if by_inputs else cut.axes == of_weight.axes)
    if of_weight.is_cut and (set(of_weight.axes) & set(other) or not meets):
        raise ShardingError(
            f"a convolution's weight is cut along {'+'.join(of_weight.axes)}, which cannot meet a Tile cut as "
            f"{input.layout}; cut the Tile's channels along that axis or not at all, and its other dims along other "
            f"axes{CALL_THE_MODEL}"
        )
    if by_inputs:
        return ChannelPlan(channels, ((0, cut.size),), True, of_weight)
    return _output_channels(cut, channels, groups, sizes[1] < sizes[0])


def _made_channels(stored: Layout, groups: int, transposed: bool, shape: Sequence[int]) -> Cut:
    along = 1 if transposed and groups == 1 else 0
    wrong = [d for d in stored.cut_dims if d != along]
    if wrong or (stored.cut_dims and transposed and groups > 1):
        raise ShardingError(
            f"a convolution's weight is cut as {stored}; cut its output channels (dim 0, of a transposed one dim 1) or "
            f"its input channels, and not where it has groups"
        )
    if transposed and groups > 1:
        return whole_dim(shape[1] * groups)
    return stored.dim(along)[0]


@lru_cache(maxsize=1024)
def _output_channels(cut: Cut, channels: Cut, groups: int, smaller_output: bool) -> ChannelPlan:
    """Plan the cut of the output channels: that of the weight where it has one, else after the input."""
    # Example: 12 channels on four ranks, 3 each, become 8: y is cut at 0, 2, 4, 6, 8.  In 4 groups rank 1 needs its own
    # 3 channels for channels 2:4 of y, and nothing is sent.  In one group it needs all 12.  Because y is smaller, each
    # rank convolves its 3 for all 8 channels (`row`), and the sums travel instead.
    total, inside, outside = channels.size, cut.size // groups, channels.size // groups
    if channels.is_cut:
        out = channels
    elif groups > 1:
        # a group that the input's cut divides goes whole to the lower side
        points = tuple(min(ceil_div(p, inside), groups) * outside for p in cut.points)
        out = Cut(total, points, cut.axes)
    elif total == cut.size:
        out = cut.bare()
    else:
        out = Cut(total, cut_points(total, cut.pieces), cut.axes)
    if groups > 1 and any(p % outside for p in out.points):
        raise ShardingError(
            f"a convolution with groups={groups} makes {outside} channels a group, but they are cut at {out.points}; "
            f"cut at multiples of {outside}"
        )
    row = groups == 1 and smaller_output and not channels.is_cut
    pieces = [out.owned(i) for i in range(out.pieces)]
    if groups == 1:
        needs = [(0, cut.size) if p < q else (0, 0) for p, q in pieces]
    else:
        needs = [(p // outside * inside, q // outside * inside) for p, q in pieces]
    return ChannelPlan(out, tuple(needs), row)


def channel_weight(
    ways: ChannelPlan, input: Tile, weight: Tensor, bias: Tensor | None, out: Layout, groups: int, transposed: bool
) -> tuple[Tensor, Tensor | None, int]:
    """Return this rank's part of the weight and the bias, and how many groups it works on."""
    cut = input.layout.dim(1)[0]
    piece = input.layout.piece(ways.out, input.coordinate)
    start, stop = ways.out.owned(piece)
    w = local_weight(weight, input, out if ways.taken is None else out.replace_dim(1, ways.taken))
    if ways.row and ways.taken is None:
        low, high = cut.owned(input.layout.piece(cut, input.coordinate))
        w = w.narrow(0 if transposed else 1, low, high - low)
    elif not is_dtensor(weight) or not weight_layout(weight, input).cut_axes:
        rows = ways.needs[piece] if transposed and groups > 1 else (start, stop)
        w = w.narrow(1 if transposed and groups == 1 else 0, rows[0], rows[1] - rows[0])
    b = None if bias is None else local_weight(bias, input, out)
    if b is not None and b.shape[0] != stop - start:
        b = b.narrow(0, start, stop - start)
    return w, b, 1 if groups == 1 else (stop - start) // (ways.out.size // groups)


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """Sums of all channels, held as `every`, of which each rank owns those of `out`, of this local `shape`."""

    out: Layout
    every: Layout
    mesh: DeviceMesh
    shape: tuple[int, ...]


@graph_call()
def _added_sums(partial: Tensor, sums: ChannelSums) -> Tensor:
    y = partial.new_zeros(sums.shape)
    AsyncExchangeAdjoint([partial], sums.out, [sums.every], sums.mesh).wait(y)
    return y


@graph_call()
def _spread_rows(y: Tensor, sums: ChannelSums) -> Tensor:
    return AsyncExchange(y, sums.out, [sums.every], sums.mesh).wait()[0]


class _AddPartialSums(torch.autograd.Function):
    """Autograd function from partial sums of all channels to the sum of those that this rank owns."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, sums: ChannelSums) -> Tensor:
        ctx.sums = sums
        return _added_sums(partial, sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SpreadGradient.apply(grads[0], ctx.sums), None


class _SpreadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, sums: ChannelSums) -> Tensor:
        ctx.sums = sums
        return _spread_rows(y, sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AddPartialSums.apply(grads[0], ctx.sums), None


def add_partial_sums(partial: Tensor, out: Layout, tile: Tile) -> Tensor:
    """Sum the partial results of all output channels; each rank gets the channels that it owns.

    *Sends*: (P-1)/P of the bytes of all channels, forward and backward, along the axes that cut them.
    """
    # as if every rank had fetched all of y: the adjoint of that fetch sums on the owners
    cut = out.dim(1)[0]
    every = out.replace_dim(1, cut.holding([(0, cut.size)] * cut.pieces))
    return _AddPartialSums.apply(partial, ChannelSums(out, every, tile.mesh, out.local_shape(tile.coordinate)))
