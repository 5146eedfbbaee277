"""Convolution that never copies its input: that of the rows at hand, plus what the halo adds to the rows at the edges.

A convolution is linear, so rows that a neighbor holds can be convolved by themselves, a strip a side, and added.  The
large tensor is not padded, copied or kept alive twice, forward or backward.  Strips travel while it is convolved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.exchange import AsyncExchange, AsyncExchangeAdjoint, memory_format_of
from jigsaw.comm.graph_calls import graph_call
from jigsaw.comm.kept_halos import results_are_kept
from jigsaw.geometry.cut import Cut, Interval
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.stencil_rules import DerivedCut, StencilWindow, ceil_div
from jigsaw.nn.stencils.conv_geometry import ConvGeometry
from jigsaw.nn.stencils.stencil import DimStencil, plan_stencil

# Example: four ranks with 8 rows each of 32, kernel 3: rank 1 has 8:16 and needs 7:17.  It convolves 8:16 as if zeros
# lay around them while rows 7 and 16 travel; row 7 alone, convolved, is what the zeros below left out of output 8, and
# is added to it, and row 16 to output 15.  Neither 7:17 nor its gradient is ever put together.
_STRIP_SHARE = 8  # strips pay while they touch less than one row in so many


# -- one dim: integers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StripRows:
    """Rows of a neighbor: `rows` of the dim, padded by `pads`, add to `count` output rows from `first`."""

    rows: Interval
    pads: tuple[int, int]
    first: int
    count: int


@dataclass(frozen=True)
class DimSplit:
    """One dim of one piece, in intervals: rows at hand (`box`), and strips below and above.  The plain op pads the box
    by `padding`; `count` of its output rows, from `skip`, are wanted.
    """

    box: Interval
    need: Interval
    inside: Interval
    padding: int
    skip: int
    count: int
    low: StripRows
    high: StripRows


@lru_cache(maxsize=4096)
def split_dim(cut: Cut, rule: StencilWindow, derived: DerivedCut, piece: int, wrap: bool) -> DimSplit:
    """Divide what a piece needs into rows at hand and strips."""
    inside, (below, above) = derived.needs[piece], derived.margins[piece]
    need = inside[0] - below, inside[1] + above
    held = cut.inside(piece) if wrap else cut.between_ends(piece)
    box = max(inside[0], held[0]), min(inside[1], held[1])
    if box[0] >= box[1]:
        box = inside[0], inside[0]
    out = derived.out.held[piece]
    count = out[1] - out[0]
    # the op pads both sides alike, but a piece at the edge of the array may need more above than below
    padding, skip = _covering_padding(rule, box, need)
    if box[1] < held[1]:  # keep rows that no window reads rather than cut them off, because they cost nothing
        longer, more = (box[0], held[1]), _covering_padding(rule, (box[0], held[1]), need)
        if (held[1] - box[0] + 2 * more[0] - rule.span) // rule.stride + 1 - more[1] == count:
            box, (padding, skip) = longer, more
    return DimSplit(box, need, inside, padding, skip, count, *_strip_rows(rule, box, need, inside, count))


def _covering_padding(rule: StencilWindow, box: Interval, need: Interval) -> tuple[int, int]:
    """Return the op's even padding that covers `need`, and how many output rows more that makes below."""
    below, above = box[0] - need[0], need[1] - box[1]
    skip = max(ceil_div(above - below, rule.stride), 0)
    return below + skip * rule.stride, skip


def _strip_rows(
    rule: StencilWindow, box: Interval, need: Interval, inside: Interval, count: int
) -> tuple[StripRows, StripRows]:
    # windows that begin before the box read the strip below; those that end after it read the one above
    windows = min(ceil_div(box[0] - need[0], rule.stride), count)
    rows = inside[0], box[0]
    stop = need[0] + (windows - 1) * rule.stride + rule.span
    low = StripRows(rows, (rows[0] - need[0], stop - rows[1]), 0, windows)
    first = min(max(ceil_div(box[1] - rule.span + 1 - need[0], rule.stride), 0), count)
    rows = box[1], max(inside[1], box[1])
    high = StripRows(rows, (rows[0] - need[0] - first * rule.stride, need[1] - rows[1]), first, count - first)
    none = StripRows((box[1], box[1]), (0, 0), 0, 0)
    return low if low.rows[0] < low.rows[1] else none, high if high.rows[0] < high.rows[1] else none


# -- all dims of one rank ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HaloStrip:
    """A strip along one dim, as wide as the whole halo in later dims and as the box in earlier ones.

    `shape` is this rank's, `pads` are as of `torch.nn.functional.pad`, and it adds at `place` of the output, if it
    `adds`.
    """

    target: Layout
    shape: tuple[int, ...]
    pads: tuple[int, ...]
    place: tuple[slice, ...]
    adds: bool


@dataclass(frozen=True)
class HaloPlan:
    """Convolution of one rank: the `box` of its local rows, the op's `padding`, `wanted` output rows, and slabs, padded
    by `own`: the op's padding along whole dims, 0 along those that strips pad.
    """

    box: tuple[slice, ...]
    padding: tuple[int, ...]
    own: tuple[int, ...]
    wanted: tuple[slice, ...]
    slabs: tuple[HaloStrip, ...]


@lru_cache(maxsize=1024)
def plan_halo(layout: Layout, along: tuple[DimStencil, ...], coord: MeshCoordinate) -> HaloPlan | None:
    """Plan how this rank convolves by strips; None where they would not pay on every rank (`_STRIP_SHARE`)."""
    derived = {
        d: (derivation, piece) for d, derivation, piece in plan_stencil(layout, along, coord, "convolution").derived
    }
    ways = {a.dim: a for a in along}
    cuts = {d: layout.dim(d)[0] for d in derived}
    # from every piece, not this rank's alone, because all ranks must make the same decision to send
    splits: dict[int, list[DimSplit]] = {}
    for d, (derivation, _) in derived.items():
        rule = cast(StencilWindow, ways[d].rule)
        splits[d] = [split_dim(cuts[d], rule, derivation, i, ways[d].wrap) for i in range(cuts[d].pieces)]
        if not all((s.box[0] < s.box[1] and _STRIP_SHARE * (s.low.count + s.high.count) <= s.count) for s in splits[d]):
            return None
    own_splits = {d: splits[d][piece] for d, (_, piece) in derived.items()}
    slabs = [
        _halo_strip(layout, at, high, splits, own_splits, coord)
        for at in range(len(own_splits))
        for high in (False, True)
    ]
    box, wanted = [slice(None)] * layout.ndim, [slice(None)] * layout.ndim
    own = [0 if a.dim in own_splits else cast(StencilWindow, a.rule).below for a in along]
    padding = [own_splits[a.dim].padding if a.dim in own_splits else p for a, p in zip(along, own, strict=True)]
    for d, (_, piece) in derived.items():
        low, s = cuts[d].held[piece][0], own_splits[d]
        box[d] = slice(s.box[0] - low, s.box[1] - low)
        wanted[d] = slice(s.skip, s.skip + s.count)
    return HaloPlan(tuple(box), tuple(padding), tuple(own), tuple(wanted), tuple(s for s in slabs if s is not None))


def _halo_strip(
    layout: Layout,
    at: int,
    high: bool,
    splits: dict[int, list[DimSplit]],
    own_splits: dict[int, DimSplit],
    coord: MeshCoordinate,
) -> HaloStrip | None:
    def strip(s: DimSplit) -> StripRows:
        return s.high if high else s.low

    dim = list(splits)[at]
    if all(strip(s).rows[0] == strip(s).rows[1] for s in splits[dim]):
        return None
    pads, place = [(0, 0)] * layout.ndim, [slice(None)] * layout.ndim
    target = layout
    for i, d in enumerate(splits):
        s = own_splits[d]
        # a corner belongs to one strip, that of the first dim.  The rows of lat's strips reach over all that lon needs,
        # lon's only over the box of lat; otherwise the corner's rows would be added twice
        rows = [strip(p).rows if i == at else p.box if i < at else p.inside for p in splits[d]]
        target = target.replace_dim(d, layout.dim(d)[0].holding(rows))
        if i == at:
            pads[d] = strip(s).pads
            place[d] = slice(s.skip + strip(s).first, s.skip + strip(s).first + strip(s).count)
        else:
            inner = s.box if i < at else s.inside
            pads[d] = inner[0] - s.need[0], s.need[1] - inner[1]
            place[d] = slice(s.skip, s.skip + s.count)
    flat = tuple(p for d in reversed(range(2, layout.ndim)) for p in pads[d])
    adds = strip(own_splits[dim]).count > 0
    return HaloStrip(target, target.local_shape(coord), flat, tuple(place), adds)


# -- carrying it out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HaloConvolution:
    """Convolution of the local rows of `layout` and the halo that this rank lacks; `again` is differentiable."""

    conv: ConvGeometry
    halo: HaloPlan
    layout: Layout
    mesh: DeviceMesh
    again: Callable[[Tensor, Tensor, Tensor | None], Tensor] = field(repr=False, compare=False)

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        conv, none = self.conv, (0,) * self.conv.dims
        return torch.convolution(x, weight, bias, conv.stride, padding, conv.dilation, False, none, conv.groups)

    def plain_gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int], mask: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        conv, none = self.conv, (0,) * self.conv.dims
        sizes = [weight.shape[0]]
        return torch.ops.aten.convolution_backward(
            grad, x, weight, sizes, conv.stride, padding, conv.dilation, False, none, conv.groups, mask
        )


@graph_call()
def _convolve_with_strips(
    x: Tensor, weight: Tensor, bias: Tensor | None, op: HaloConvolution
) -> tuple[Tensor, list[Tensor | None]]:
    halo = op.halo
    # started first, so that strips travel while the rows at hand, by far the most, are convolved
    strips = AsyncExchange(x, op.layout, [s.target for s in halo.slabs], op.mesh)
    out = op.plain(x[halo.box], weight, bias, halo.padding)
    if results_are_kept():
        out = out.clone()
    padded: list[Tensor | None] = []
    for slab, strip in zip(halo.slabs, strips.wait(), strict=True):
        padded.append(F.pad(strip, slab.pads) if slab.adds else None)
        if slab.adds:
            out[slab.place].add_(op.plain(cast(Tensor, padded[-1]), weight, None, halo.own))
    return out, padded


@graph_call()
def _gradients_with_strips(
    grad: Tensor, x: Tensor, weight: Tensor, padded: Sequence[Tensor | None], mask: Sequence[bool], op: HaloConvolution
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, the weight and the bias, where `mask` asks for them."""
    halo = op.halo
    slabs = [
        _strip_gradients(op, slab, strip, grad, weight, mask) for slab, strip in zip(halo.slabs, padded, strict=True)
    ]
    # the strips' gradients come first, because others wait for them; the large one is computed while they travel
    pending = None
    if mask[0]:
        of_strips, targets = [cast(Tensor, gx) for gx, _ in slabs], [s.target for s in halo.slabs]
        pending = AsyncExchangeAdjoint(of_strips, op.layout, targets, op.mesh)
    gx, gw, gb = op.plain_gradients(grad, x[halo.box], weight, halo.padding, mask)
    if pending is not None:
        gx = _into_local_rows(cast(Tensor, gx), x, halo)
        pending.wait(gx)
    for _, more in slabs:
        gw = gw.add_(more) if gw is not None and more is not None else gw
    return gx, gw, gb


class _ConvolveWithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: HaloConvolution) -> Tensor:
        out, padded = _convolve_with_strips(x, weight, bias, op)
        ctx.save_for_backward(x, weight, bias, *padded)
        ctx.op = op
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *padded = ctx.saved_tensors
        op: HaloConvolution = ctx.op
        mask = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # differentiable twice, at the price of another exchange
            wanted = [v for v, needs in zip((x, weight, bias), mask, strict=True) if needs]
            gradients = iter(
                torch.autograd.grad(op.again(x, weight, bias), wanted, grads[0][op.halo.wanted], create_graph=True)
            )
            return *(next(gradients) if needs else None for needs in mask), None
        return *_gradients_with_strips(grads[0], x, weight, padded, mask, op), None


def _strip_gradients(
    op: HaloConvolution, slab: HaloStrip, strip: Tensor | None, grad: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if strip is None:
        # no output row reads this strip, but its owner still waits for a gradient
        return grad.new_zeros(slab.shape), None
    gx, gw, _ = op.plain_gradients(grad[slab.place], strip, weight, op.halo.own, (*mask[:2], False))
    return (None if gx is None else F.pad(gx, [-p for p in slab.pads])), gw


def _into_local_rows(gx: Tensor, x: Tensor, halo: HaloPlan) -> Tensor:
    if gx.shape == x.shape:
        return gx
    whole = torch.zeros_like(x, memory_format=memory_format_of(x))
    whole[halo.box] = gx
    return whole


def convolve_with_halo(x: Tensor, weight: Tensor, bias: Tensor | None, op: HaloConvolution) -> Tensor:
    """Convolve the local rows `x` and the halo that this rank lacks.

    *Sends*: forward, the rows that neighbors lack, one message a strip and neighbor; backward, their gradients.
    """
    out = cast(Tensor, _ConvolveWithHalo.apply(x, weight, bias, op))
    for d in range(2, x.ndim):
        wanted = op.halo.wanted[d]
        if wanted.start is not None and (wanted.start, wanted.stop) != (0, out.shape[d]):
            out = out.narrow(d, wanted.start, wanted.stop - wanted.start)
    return out
